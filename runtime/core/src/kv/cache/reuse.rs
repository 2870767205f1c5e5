//! How much of a match is reusable: the longest length at which every required life cycle has what it needs.

use super::lifecycle::{LifeCycle, Retention};
use std::num::NonZeroU32;

/// What the tree holds along one path.
pub trait Coverage {
    /// Leading tokens of the block that the life cycle's page covers; 0 without a page. For recurrent layers the
    /// position inside the block of its snapshot.
    fn covered(&self, life_cycle: usize, block: u32) -> u32;

    /// Leading blocks that full attention is known to cover wholly.
    fn whole_blocks(&self) -> u32 {
        0
    }
}

/// A match of the tree, without its pages.
#[derive(Clone, Copy, Debug)]
pub struct Match<'a> {
    pub block_tokens: NonZeroU32,
    pub life_cycles: &'a [LifeCycle],
    /// Tokens on the path.
    pub tokens: u32,
}

/// Which life cycles have a say.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    All,
    Attention,
}

impl Match<'_> {
    /// The longest reusable length of at most `tokens`.
    ///
    /// Shrinks to a fixed point: to the last snapshot, then to the first token that is not covered, and again. A shorter
    /// length never makes a live block stale, so the fixed point is the maximum.
    ///
    /// # Cost
    /// The live blocks of each life cycle, once for each time that the length shrinks.
    pub fn reusable(&self, coverage: &impl Coverage) -> u32 {
        self.fixed_point(coverage, Asked::All)
    }

    /// As `reusable`, if every position were a snapshot: tells "no snapshot" from "page evicted".
    pub fn reusable_before_states(&self, coverage: &impl Coverage) -> u32 {
        self.fixed_point(coverage, Asked::Attention)
    }

    /// The life cycle, of whatever policy, has all pages that are live at `length`.
    pub fn is_complete(&self, life_cycle: usize, length: u32, coverage: &impl Coverage) -> bool {
        let Some(retention) = self.life_cycles.get(life_cycle).map(|life_cycle| life_cycle.retention) else {
            return false;
        };
        self.first_gap(life_cycle, retention, length, coverage).is_none()
    }

    fn fixed_point(&self, coverage: &impl Coverage, asked: Asked) -> u32 {
        let mut length = self.tokens;
        loop {
            let before = length;
            for (index, life_cycle) in self.required().filter(|_| asked == Asked::All) {
                if life_cycle.is_state() {
                    length = self.last_snapshot(index, length, coverage);
                }
            }
            for (index, life_cycle) in self.required() {
                if let Some(gap) = self.first_gap(index, life_cycle.retention, length, coverage) {
                    length = gap;
                }
            }
            if length == before || length == 0 {
                return length;
            }
        }
    }

    fn required(&self) -> impl Iterator<Item = (usize, &LifeCycle)> {
        self.life_cycles.iter().enumerate().filter(|(_, life_cycle)| life_cycle.is_required())
    }

    /// The last snapshot position that is not beyond `length`, or 0.
    fn last_snapshot(&self, life_cycle: usize, length: u32, coverage: &impl Coverage) -> u32 {
        let blocks = (0..length.div_ceil(self.block_tokens.get())).rev();
        let position = |block: u32| {
            let covered = coverage.covered(life_cycle, block);
            (covered > 0).then(|| block * self.block_tokens.get() + covered)
        };
        blocks.filter_map(position).find(|position| *position <= length).unwrap_or(0)
    }

    /// Where the first live block that is covered too little stops being covered.
    fn first_gap(&self, life_cycle: usize, retention: Retention, length: u32, coverage: &impl Coverage) -> Option<u32> {
        let block_tokens = self.block_tokens.get();
        let gap = |block: u32| {
            let start = block * block_tokens;
            let covered = coverage.covered(life_cycle, block);
            (covered < block_tokens.min(length - start)).then_some(start + covered)
        };
        match retention {
            Retention::Full => (coverage.whole_blocks()..length.div_ceil(block_tokens)).find_map(gap),
            Retention::Window { .. } | Retention::State => retention.live(length, self.block_tokens).find_map(gap),
        }
    }
}
