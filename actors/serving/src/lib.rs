//! The serving actors.
pub mod api;
