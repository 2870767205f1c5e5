//! The context balance gate: whether the ranks of a group prefill in this step.
//!
//! A rank that prefills makes all others wait in the step's collectives, so prefill is held back until the ranks can do
//! it together, within two bounds counted in steps.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub max_batch_size: u32,
    /// Steps that prefill is held back at most while some rank has none to do or is full.
    pub timeout_steps: u32,
    /// Steps that it is held back to let more of it gather.
    pub batching_wait_steps: u32,
    pub min_generation_requests: u32,
    pub low_occupancy_timeout_steps: u32,
}

/// What one rank could schedule in this step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankWork {
    pub context: u32,
    pub generation: u32,
    /// `generation` without dummies.
    pub generation_real: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Release,
    /// No rank of the group schedules prefill in this step.
    Hold,
}

/// The gate of one group; the same on each of its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gate {
    /// Steps held since a release, while the group was not ready.
    pub waited: u32,
    /// Steps held since a release, while the group was ready.
    pub batched: u32,
}

impl Gate {
    pub fn step(&mut self, settings: &Settings, ranks: &[RankWork]) -> Verdict {
        let free = ranks.iter().all(|rank| rank.generation < settings.max_batch_size);
        let all_context = ranks.iter().all(|rank| rank.context > 0);
        let all_generation = ranks.iter().all(|rank| rank.generation > 0);
        if free && all_context {
            self.waited = 0;
            if !all_generation {
                return Verdict::Release;
            }
            if self.batched < settings.batching_wait_steps {
                self.batched += 1;
                return Verdict::Hold;
            }
            self.batched = 0;
            return Verdict::Release;
        }
        self.waited = self.waited.saturating_add(1);
        let fewest = ranks.iter().map(|rank| rank.generation_real).min().unwrap_or(0);
        let limit = if fewest < settings.min_generation_requests {
            settings.low_occupancy_timeout_steps
        } else {
            settings.timeout_steps
        };
        if self.waited >= limit || !all_generation {
            self.waited = 0;
            return Verdict::Release;
        }
        Verdict::Hold
    }
}
