//! Rules of the manager one by one.
