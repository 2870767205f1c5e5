//! Life cycles: what a set of layers keeps of a sequence, and which blocks are live at a length.

use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::ops::Range;

/// What the layers of a life cycle still read of the tokens before a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Retention {
    /// Full attention: everything.
    Full,
    /// Sliding window: the last `tokens` positions, the query's own among them, and the first `sink_blocks` blocks.
    Window { tokens: NonZeroU32, sink_blocks: u32 },
    /// Recurrent layers: one state, which stands for everything before it.
    State,
}

/// What a life cycle means for reuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// A prefix is reusable only where its pages are.
    Required,
    /// Published, but never shortens a match; restored on request where complete.
    Optional,
    /// Never published; fresh pages on reuse.
    Private,
}

/// When pages of a life cycle go, compared with others of their pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Priority {
    Uniform(u8),
    /// By ordinal of the block; the last one stands for all blocks after it.
    ByOrdinal(Vec<u8>),
}

impl Priority {
    /// The class that pages have of which nobody said anything (section 6.1).
    pub const DEFAULT: u8 = 35;

    pub fn of(&self, ordinal: u32) -> u8 {
        match self {
            Self::Uniform(class) => *class,
            Self::ByOrdinal(classes) => {
                classes.get(ordinal as usize).or(classes.last()).copied().unwrap_or(Self::DEFAULT)
            }
        }
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self::Uniform(Self::DEFAULT)
    }
}

/// A set of layers with the same retention and policy. Its pages lie in one pool group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LifeCycle {
    pub retention: Retention,
    pub policy: Policy,
    /// Pool group, from 0.
    pub group: u8,
    pub priority: Priority,
}

impl LifeCycle {
    pub fn is_state(&self) -> bool {
        self.retention == Retention::State
    }

    /// Its blocks are published for others: attention that is not private. States are published as snapshots.
    pub fn is_published(&self) -> bool {
        !self.is_state() && self.policy != Policy::Private
    }

    pub fn is_required(&self) -> bool {
        self.policy == Policy::Required
    }
}

impl Retention {
    /// Blocks out of the window at history `history`: no query from there on reads them.
    ///
    /// There is always one query at position `history`, so the live tokens are `[history + 1 - window, history]`.
    pub fn stale(&self, history: u32, block_tokens: NonZeroU32) -> Range<u32> {
        match *self {
            Self::Full => 0..0,
            Self::State => 0..history / block_tokens,
            Self::Window { tokens, sink_blocks } => {
                let begin = history.div_ceil(block_tokens.get()).min(sink_blocks);
                let out = (u64::from(history) + 1).saturating_sub(u64::from(tokens.get()));
                begin..begin.max((out / u64::from(block_tokens.get())) as u32)
            }
        }
    }

    /// Blocks that a sequence of `length` tokens needs in order to go on, in order. A state is in no block.
    pub fn live(&self, length: u32, block_tokens: NonZeroU32) -> impl DoubleEndedIterator<Item = u32> + use<> {
        let blocks = match self {
            Self::State => 0,
            Self::Full | Self::Window { .. } => length.div_ceil(block_tokens.get()),
        };
        let stale = self.stale(length, block_tokens);
        (0..stale.start.min(blocks)).chain(stale.end..blocks)
    }

    pub fn live_pages(&self, length: u32, block_tokens: NonZeroU32) -> u32 {
        match self {
            Self::State => 1,
            Self::Full | Self::Window { .. } => {
                length.div_ceil(block_tokens.get()) - self.stale(length, block_tokens).len() as u32
            }
        }
    }

    /// Whether block `ordinal` is read by a query at `length`.
    pub fn is_live(&self, ordinal: u32, length: u32, block_tokens: NonZeroU32) -> bool {
        match self {
            Self::State => false,
            Self::Full | Self::Window { .. } => {
                ordinal < length.div_ceil(block_tokens.get()) && !self.stale(length, block_tokens).contains(&ordinal)
            }
        }
    }

    /// Blocks of a prefill chunk whose KV is read during its own step only: those out of window at the chunk's end, and
    /// not begun before it. `rewind_max` tokens of the capacity may be taken back.
    pub fn scratch(&self, chunk: Chunk, block_tokens: NonZeroU32) -> Range<u32> {
        let Self::Window { .. } = self else { return 0..0 };
        let stale = self.stale(chunk.capacity.saturating_sub(chunk.rewind_max), block_tokens);
        let begin = stale.start.max(chunk.history.div_ceil(block_tokens.get()));
        begin..begin.max(stale.end.min(chunk.capacity.div_ceil(block_tokens.get())))
    }

    /// The vanishing of a page of block `ordinal` makes every longer prefix useless, not only those that end near it.
    pub fn carries_all_after(&self, ordinal: u32) -> bool {
        match *self {
            Self::Full => true,
            Self::Window { sink_blocks, .. } => ordinal < sink_blocks,
            Self::State => false,
        }
    }

    /// An end point inside or at the end of a block needs the block's page. A window of one token needs none at a
    /// block's end.
    pub fn ends_need_page(&self) -> bool {
        match self {
            Self::Full | Self::State => true,
            Self::Window { tokens, .. } => tokens.get() > 1,
        }
    }
}

/// Where a prefill chunk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub history: u32,
    pub capacity: u32,
    pub rewind_max: u32,
}
