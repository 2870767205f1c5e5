//! The one place of this crate that reads a clock: machines are told the time.

use std::time::{Duration, Instant};

/// Microseconds of a monotonic clock, counted from the serving tree's start; shared by all its actors.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// How long until `due_us`.
    pub fn until(&self, due_us: u64) -> Duration {
        Duration::from_micros(due_us.saturating_sub(self.now_us()))
    }
}
