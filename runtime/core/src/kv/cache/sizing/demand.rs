//! What pools are to hold: what running requests need at once, and what each conversation needs that is kept.

use super::{Workload, end_point_pages};
use crate::kv::cache::checkpoint::{Publishing, Reach, Snapshots, States, Tail};
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use std::num::NonZeroU32;

/// End points of a turn without its ladder: the prompt's end and the answer's end.
const ENDS: u32 = 2;

/// What is kept of a conversation between its turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retained {
    pub tokens: u32,
    /// Completed turns whose end points stay.
    pub turns: u32,
    /// End points of a turn; `None`: its two ends, and the rungs that the ladder has at this length.
    pub end_points: Option<u32>,
    /// Of recurrent layers.
    pub snapshots: Snapshots,
}

/// What a rank is expected to run and to keep.
#[derive(Clone, Debug)]
pub struct Demand {
    pub workload: Workload,
    pub retained: Retained,
    pub sequence_tokens_max: u32,
    /// Requests that may rest on the tiers below the device.
    pub suspended_requests: u32,
    /// States that the engine takes for itself.
    pub reserved_states: u32,
}

impl Demand {
    fn block_tokens(&self) -> NonZeroU32 {
        self.workload.block_tokens
    }

    /// Whether a length is at a block's end or inside a block must not decide: the larger of both.
    fn at_worst(&self, slots: impl Fn(u32) -> u64) -> u64 {
        let block_tokens = self.block_tokens().get();
        let aligned = self.workload.sequence_tokens.div_ceil(block_tokens).saturating_mul(block_tokens);
        slots(aligned).max(slots(aligned.saturating_add(block_tokens / 2)))
    }

    fn requests(&self) -> u64 {
        u64::from(self.workload.requests.max(1))
    }

    /// Slots of each life cycle that running requests need at once. What full attention keeps of a request that generates
    /// is its conversation's.
    pub fn live(&self, life_cycles: &[LifeCycle]) -> Vec<u64> {
        let prefill = Workload { requests: 1, ..self.workload };
        let live = life_cycles.iter().map(|one| match (one.retention, one.policy) {
            (Retention::State, _) => self.requests() + u64::from(self.reserved_states) + self.states().moving,
            (Retention::Full, Policy::Private) | (Retention::Window { .. }, _) => {
                self.at_worst(|sequence_tokens| Workload { sequence_tokens, ..self.workload }.slots_of(one.retention))
            }
            (Retention::Full, _) => prefill.slots_of(one.retention),
        });
        live.collect()
    }

    /// Slots of each life cycle that requests need which rest on a tier below the device.
    pub fn suspended(&self, life_cycles: &[LifeCycle]) -> Vec<u64> {
        let pages =
            |retention: Retention| self.at_worst(|length| u64::from(retention.live_pages(length, self.block_tokens())));
        let each = life_cycles.iter().map(|one| match (one.retention, one.policy) {
            (Retention::Full, Policy::Required | Policy::Optional) => 0,
            (retention, _) => pages(retention),
        });
        each.map(|pages| pages * u64::from(self.suspended_requests)).collect()
    }

    /// Slots of each life cycle that one conversation needs: its blocks, and windows and states of its turns' end points.
    pub fn conversation(&self, life_cycles: &[LifeCycle]) -> Vec<u64> {
        let blocks = self.retained.tokens.div_ceil(self.block_tokens().get());
        let turns = u64::from(self.retained.turns);
        let ends = self.end_points(life_cycles);
        let kept = life_cycles.iter().map(|one| match (one.retention, one.policy) {
            (_, Policy::Private) => 0,
            (Retention::Full, _) => u64::from(blocks - blocks.min(self.system_blocks())),
            (Retention::Window { tokens, sink_blocks }, _) => {
                let windows = turns * u64::from(ends) * u64::from(end_point_pages(tokens, self.block_tokens()));
                // Windows that overlap share their pages, but for the last one where an end point is inside a block.
                let distinct = u64::from(blocks) + turns * u64::from(ends.min(ENDS));
                (windows + u64::from(sink_blocks.min(blocks))).min(distinct)
            }
            // One of them is the live one.
            (Retention::State, _) => self.states().generation - 1,
        });
        kept.collect()
    }

    /// Slots of each life cycle without which the longest request beside others that have just begun, or a whole chunk,
    /// could not run.
    pub fn floors(&self, life_cycles: &[LifeCycle]) -> Vec<u64> {
        let block_tokens = self.block_tokens().get();
        let chunk = self.workload.step_tokens_max.saturating_add(self.workload.extra_tokens);
        let drafted = self.workload.draft_tokens.saturating_add(1);
        let others = (self.requests() - 1) * u64::from(drafted.div_ceil(block_tokens));
        let floors = life_cycles.iter().map(|one| match one.retention {
            Retention::State => self.requests() + u64::from(self.reserved_states),
            Retention::Full => {
                let longest = self.sequence_tokens_max.div_ceil(block_tokens);
                (u64::from(longest) + others).max(u64::from(chunk.div_ceil(block_tokens)))
            }
            Retention::Window { tokens, sink_blocks } => {
                let reach = u64::from(tokens.get()) - 1 + u64::from(chunk.min(self.sequence_tokens_max));
                let longest = u64::from(self.sequence_tokens_max.div_ceil(block_tokens));
                let in_reach = reach.div_ceil(u64::from(block_tokens)) + 1 + u64::from(sink_blocks);
                in_reach.min(longest) + others
            }
        });
        floors.map(|slots| slots.max(1)).collect()
    }

    /// End points that a turn leaves.
    pub fn end_points(&self, life_cycles: &[LifeCycle]) -> u32 {
        self.retained.end_points.unwrap_or_else(|| ENDS + self.rungs(life_cycles))
    }

    /// Rungs of the ladder that fall into a prompt's last chunk at this length. A prompt's last token is always computed,
    /// and so is a private window.
    fn rungs(&self, life_cycles: &[LifeCycle]) -> u32 {
        let private = life_cycles.iter().filter(|one| one.policy == Policy::Private);
        let replays = private.filter_map(|one| match one.retention {
            Retention::Window { tokens, .. } => Some(tokens.get()),
            Retention::Full | Retention::State => None,
        });
        let tail = Tail {
            prompt_tokens: self.retained.tokens,
            replay_tokens: replays.max().unwrap_or(1),
            reused_tokens: 0,
            chunk_start: self.retained.tokens.saturating_sub(self.workload.step_tokens_max),
            publishing: Publishing::PerConversation,
            encoder_replay: false,
        };
        tail.ladder(self.block_tokens()).len() as u32
    }

    /// States of one request with its turns.
    pub fn states(&self) -> States {
        self.states_of(self.retained.turns)
    }

    pub(super) fn states_of(&self, turns: u32) -> States {
        let reach = Reach {
            capacity: self.retained.tokens,
            sequence_tokens_max: self.sequence_tokens_max,
            turns,
            block_tokens: self.block_tokens(),
        };
        self.retained.snapshots.states(reach)
    }

    fn system_blocks(&self) -> u32 {
        self.workload.system_prompt_tokens / self.block_tokens()
    }
}
