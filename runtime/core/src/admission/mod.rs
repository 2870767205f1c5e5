//! The waiting queue and the admission pass.
//!
//! Everything here is replicated: each node holds the same queue, runs the same pass on the same inputs and admits the
//! same requests. Service order is a pure function of what a request carries (priority, then number), so a request that
//! is set aside, deferred or put back after a failed placement stands where it stood before.

mod pass;
mod queue;
mod waiting;

#[cfg(test)]
mod tests;

pub use pass::{Admission, Admitted, Pass, budget};
pub use queue::{Policy, Queue};
pub use waiting::{HEAD_TOKENS, Limits, Priority, Waiting, affinity};
