//! A rank's KV manager: which blocks hold the KV of which tokens, who uses them, and what can be reused.
//!
//! Two operations look a prefix up, at two costs: [`Manager::probe`] estimates for routing from truncated keys;
//! [`Input::Reserve`] walks whole keys, compares tokens and pins what it hands out. Only this machine reserves blocks, and
//! nobody else's word counts on what is reusable.
//!
//! [`cache`] decides what is kept of which layers; [`Manager`] is how the step planner sees it: attempts instead of
//! sequences, tables of blocks instead of pages, and room that is promised before it is taken.

pub mod cache;
#[cfg(test)]
mod forget_tests;
pub mod identity;
mod manager;
mod record;
#[cfg(test)]
mod tests;

use crate::ids::{AttemptKey, BlockId, ConversationKey, TokenId};
use crate::step::{BlockCopy, Table};
use cache::checkpoint::{Publishing, Snapshots};
use cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use cache::{Commits, Eviction, PPM};
pub use cache::{Forgotten, Missed, Why};
use identity::Scope;
pub use manager::Manager;
pub use record::{Explanation, Forget};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// What a rank's KV manager is built for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Each life cycle has a pool group of its own, of the same index.
    pub cache: cache::Config,
    pub publishing: Publishing,
    /// Last tokens of a prompt that are always computed again, at least the one whose logits are wanted.
    pub replay_tokens: NonZeroU32,
    /// Where recurrent layers take snapshots, beside the prompt's end.
    pub snapshots: Snapshots,
}

/// Blocks of one life cycle, as planners and backends see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    pub retention: Retention,
    pub blocks: u32,
}

impl Pool {
    /// Blocks that a sequence of `tokens` holds at most, if it has places for up to `ahead` tokens that are not computed.
    ///
    /// It tells of computed tokens block by block, so that up to a block's length of them still counts as its window.
    pub fn blocks_max(&self, tokens: u32, ahead: u32, block_tokens: NonZeroU32) -> u32 {
        let all = tokens.div_ceil(block_tokens.get());
        match self.retention {
            Retention::Full => all,
            Retention::State => 1,
            Retention::Window { tokens: window, sink_blocks } => {
                let live = u64::from(window.get()) + u64::from(ahead) + u64::from(block_tokens.get());
                let most = u64::from(sink_blocks) + live / u64::from(block_tokens.get()) + 2;
                u64::from(all).min(most) as u32
            }
        }
    }
}

/// What planners and backends know of a rank's KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub block_tokens: NonZeroU32,
    /// One for each life cycle.
    pub pools: Vec<Pool>,
}

impl Shape {
    /// Recurrent layers overwrite their state, so a sequence cannot take computed tokens back.
    pub fn has_states(&self) -> bool {
        self.pools.iter().any(|pool| pool.retention == Retention::State)
    }
}

impl Config {
    /// Full attention on the device, every full block reusable.
    ///
    /// # Errors
    /// A pool without blocks, or blocks without tokens.
    pub fn full(blocks: u32, block_tokens: u32) -> Result<Self, ConfigError> {
        let block_tokens = NonZeroU32::new(block_tokens).ok_or(ConfigError::NoBlockTokens)?;
        let config = Self::new(block_tokens, vec![(Retention::Full, blocks)]);
        config.validate()?;
        Ok(config)
    }

    /// Life cycles that are all required, with their blocks on the device. Where windows or states are among them, the end
    /// points of a conversation's last turn are kept.
    pub fn new(block_tokens: NonZeroU32, life_cycles: Vec<(Retention, u32)>) -> Self {
        let is_full = life_cycles.iter().all(|(retention, _)| *retention == Retention::Full);
        let (publishing, commits) = match is_full {
            true => (Publishing::AllReusable, Commits::EveryBlock),
            false => (Publishing::PerConversation, Commits::EndPoints),
        };
        let one = |(group, (retention, _)): (u8, &(Retention, u32))| LifeCycle {
            retention: *retention,
            policy: Policy::Required,
            group,
            priority: Priority::default(),
        };
        Self {
            cache: cache::Config {
                commits,
                eviction: if is_full { Eviction::Pages } else { Eviction::EndPoints },
                ..cache::Config::new(
                    block_tokens,
                    (0u8..).zip(&life_cycles).map(one).collect(),
                    vec![life_cycles.iter().map(|(_, blocks)| *blocks).collect()],
                )
            },
            publishing,
            replay_tokens: NonZeroU32::MIN,
            snapshots: Snapshots::default(),
        }
    }

    /// # Errors
    /// The first contradiction.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.cache.validate()?;
        if self.cache.tiers.len() != 1 {
            return Err(ConfigError::Tiers { tiers: self.cache.tiers.len() });
        }
        let shared = (0u8..).zip(&self.cache.life_cycles).find(|(index, one)| one.group != *index);
        if let Some((life_cycle, one)) = shared {
            return Err(ConfigError::SharedGroup { life_cycle, group: one.group });
        }
        if self.cache.tiers[0].len() != self.cache.life_cycles.len() {
            return Err(ConfigError::UnusedGroups { groups: self.cache.tiers[0].len() });
        }
        let every_block = self.cache.commits == Commits::EveryBlock;
        if every_block != (self.publishing == Publishing::AllReusable) {
            return Err(ConfigError::Publishing { publishing: self.publishing });
        }
        Ok(())
    }

    /// What planners and backends know of it. Empty tiers, which are refused elsewhere, have no pools.
    pub fn shape(&self) -> Shape {
        let blocks = self.cache.tiers.first().into_iter().flatten();
        let pools = self.cache.life_cycles.iter().zip(blocks);
        let pools = pools.map(|(one, blocks)| Pool { retention: one.retention, blocks: *blocks }).collect();
        Shape { block_tokens: self.cache.block_tokens, pools }
    }
}

/// Conversations whose end points are known at once, some hundred bytes each.
pub use cache::CONVERSATIONS_MAX_DEFAULT;

/// A KV manager that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("KV blocks hold no tokens (block tokens 0)")]
    NoBlockTokens,
    #[error("KV life cycle {life_cycle} is in pool group {group}, but a rank's have one each")]
    SharedGroup { life_cycle: u8, group: u8 },
    #[error("KV manager has {groups} pool groups, which are more than its life cycles")]
    UnusedGroups { groups: usize },
    #[error("KV reuse policy {publishing:?} does not go with when blocks are published")]
    Publishing { publishing: Publishing },
    #[error("KV manager of a rank has {tiers} tiers, of which only the device is served")]
    Tiers { tiers: usize },
    #[error(transparent)]
    Cache(#[from] cache::ConfigError),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// Match the longest reusable prefix, pin it, and promise room for all `tokens` and one more. Places are given for what is
    /// reused and up to `ahead_tokens` behind it; growth asks for the rest, up to `tokens_max` in all. The last token is never
    /// reused: its logits are wanted. Answered by `Reserved` or `Exhausted`.
    Reserve {
        attempt: AttemptKey,
        scope: Scope,
        conversation: Option<ConversationKey>,
        tokens: Vec<TokenId>,
        ahead_tokens: u32,
        tokens_max: u32,
    },
    /// Make the attempt's blocks cover `tokens` positions in all. Answered by `Grown` or `Exhausted`.
    Grow { attempt: AttemptKey, tokens: u32 },
    /// `tokens` follow those known; the KV of the first `computed` positions is written. Blocks out of every window are given
    /// back, and what the policy says becomes reusable. Answered by `Committed`.
    Commit { attempt: AttemptKey, tokens: Vec<TokenId>, computed: u32 },
    /// Unpin everything. What was computed stays as a reusable prefix; the other blocks are free.
    Release { attempt: AttemptKey, why: Released },
    /// The device lost its contents: forget every attempt and every reusable block.
    Clear,
}

/// Why an attempt lets go of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Released {
    /// It is over here: a turn of its conversation has ended.
    Over,
    /// It will ask again.
    Preempted,
    /// What it wrote is not to be trusted: nothing more of it becomes reusable.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    Reserved {
        attempt: AttemptKey,
        reservation: Reservation,
        copies: Copies,
    },
    /// The blocks that were added, in order, by life cycle. Places reach to `capacity` now.
    Grown {
        attempt: AttemptKey,
        blocks: Vec<Vec<BlockId>>,
        capacity: u32,
        copies: Copies,
    },
    /// Blocks that another attempt published first take the place of this one's.
    Committed {
        attempt: AttemptKey,
        rebased: Vec<Rebased>,
        copies: Copies,
    },
    /// Nothing was changed: `wanted` further blocks were needed, `available` could be had.
    Exhausted {
        attempt: AttemptKey,
        wanted: u32,
        available: u32,
    },
    /// `blocks` more can be had than before.
    Freed {
        blocks: u32,
    },
    Ignored {
        attempt: AttemptKey,
        why: Ignored,
    },
}

/// To be made in this order, before any block is written that this answer or a later one hands out. They come with the answer,
/// so that no step can be planned between the two.
pub type Copies = Vec<BlockCopy>;

/// What an attempt got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// One for each life cycle.
    pub tables: Vec<Table>,
    /// Positions that have a place.
    pub capacity: u32,
    /// The KV of so many positions is written already.
    pub cached_tokens: u32,
    /// Lengths, ascending, at which the KV manager is to be told before more is computed: end points are made there.
    pub stops: Vec<u32>,
}

/// A block of an attempt's table that is another one now, with the same contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebased {
    pub life_cycle: u8,
    pub ordinal: u32,
    pub block: BlockId,
}

/// Why an input had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ignored {
    /// The attempt holds a reservation already.
    DuplicateReserve,
    EmptyReserve,
    UnknownGrow,
    UnknownCommit,
    UnknownRelease,
    /// `computed` went back, or beyond the tokens or blocks of the attempt.
    BadCommit,
}

/// Blocks of one pool by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStats {
    pub blocks_total: u32,
    pub blocks_free: u32,
    /// Hold a reusable prefix that nobody uses: evictable.
    pub blocks_reusable: u32,
    /// Used by at least one attempt.
    pub blocks_held: u32,
}

/// The blocks of the pools by state, and what reuse brought so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// One for each life cycle.
    pub pools: Vec<PoolStats>,
    pub attempts: u32,
    pub conversations: u32,
    /// Tokens of successful reservations, and how many of them were reused.
    pub query_tokens: u64,
    pub hit_tokens: u64,
    pub evicted_blocks: u64,
    /// Turns of conversations that ended, and those among them whose end points could not be planned.
    pub turns: u64,
    pub turns_unplanned: u64,
    pub exhausted: u64,
    pub ignored: u64,
    /// Blocks that each pool should have by what was measured, if that is far from what it has; empty before.
    pub proposed: Vec<u32>,
}

impl Stats {
    /// The pool that will be short first: the one with the largest share held.
    pub fn tightest(&self) -> PoolStats {
        let share =
            |pool: &PoolStats| u64::from(pool.blocks_held) * u64::from(PPM) / u64::from(pool.blocks_total.max(1));
        // Of several, the first.
        self.pools.iter().rev().copied().max_by_key(share).unwrap_or_default()
    }
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant {id} does not hold: {what}")]
pub struct Violation {
    pub id: &'static str,
    pub what: String,
}

impl Violation {
    pub(crate) fn new(id: &'static str, what: String) -> Self {
        Self { id, what }
    }
}
