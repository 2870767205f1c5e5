//! A rank's KV manager for layers of any kind: full attention, sliding windows and recurrent states, over several tiers.

pub mod checkpoint;
pub mod lifecycle;
pub mod reuse;
pub mod sizing;
