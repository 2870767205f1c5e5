//! Where steps spend their time.

use std::time::{Duration, Instant};

/// Time spent in steps, by kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    pub steps: u64,
    /// Linear layers but the head.
    pub linears: Duration,
    pub attention: Duration,
    /// Logits of the rows that sample.
    pub head: Duration,
    /// Embeddings, norms, gates, quantisation, and writing KV.
    pub rest: Duration,
}

/// Measures if it is on; costs nothing otherwise.
#[derive(Default)]
pub(super) struct Clock {
    /// When the last stretch ended; `None` if nothing is measured.
    last: Option<Instant>,
    times: StepTimes,
}

impl Clock {
    pub fn new(is_on: bool) -> Self {
        Self { last: is_on.then(Instant::now), times: StepTimes::default() }
    }

    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// A step begins.
    pub fn begin(&mut self) {
        if let Some(last) = &mut self.last {
            *last = Instant::now();
            self.times.steps += 1;
        }
    }

    /// Adds the time since the last stretch to one kind.
    pub fn lap(&mut self, kind: impl FnOnce(&mut StepTimes) -> &mut Duration) {
        if let Some(last) = &mut self.last {
            let now = Instant::now();
            *kind(&mut self.times) += now - *last;
            *last = now;
        }
    }
}
