//! Machines, replicas and a model of the log over links that delay, break and come back: whatever happens, all who complete a
//! round complete the same one, and once it calms down all are in one view and go on.

mod cluster;
mod faults;
mod garbage;
mod model;
mod planted;
mod random;
mod rows;
mod whom;
