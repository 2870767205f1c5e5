//! The deciding machines of Starling.
//!
//! Everything that decides lives here as a deterministic value: it is told the time, takes plain inputs and returns
//! plain effects. No clock, no source of randomness, no threads, no IO, no map whose order could differ between two
//! machines; so the same code runs in the cluster, in one process and in virtual time.
//!
//! One shape for every machine: `handle(now, input, &mut out)` is total (bad input is an effect, never a panic),
//! `poll_timeout` says when it wants to be told the time, and `check` states every invariant.

pub mod admission;
pub mod batch;
pub mod bootstrap;
pub mod digest;
pub mod fence;
pub mod ids;
pub mod ingress;
pub mod kv;
pub mod membership;
pub mod placement;
pub mod rejection;
pub mod replica;
pub mod request;
pub mod round;
pub mod step;
