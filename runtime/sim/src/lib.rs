//! A node in virtual time.
//!
//! The machines that decide in production (ingress, rounds, replica, KV manager, step planner) run here in one thread
//! under a clock that jumps from event to event. One seed derives everything: traffic, delays, faults. A safety phase
//! under faults is followed by a liveness phase without; every machine's `check` runs after each event.
//!
//! Today: one node with some ranks. The network between nodes and its faults come with the mesh.

mod draw;
mod node;
mod rank;

pub use draw::Draw;
pub use node::{Report, Scenario, Simulation};
