//! End points before a prompt's tail, and recurrent states: where to publish so that a later turn finds something.
//!
//! A model that must compute the last tokens of a prompt again, or a client that rewrites them, cannot use an end point
//! at the prompt's end. One a little before it still serves.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::num::NonZeroU32;

/// When the blocks of a sequence are published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Publishing {
    /// Every block as it fills.
    #[default]
    AllReusable,
    /// What is needed to resume at the prompt's end.
    PerRequest,
    /// As `PerRequest`, kept for a number of turns.
    PerConversation,
}

/// Tokens before the part that is computed again, by rung: a margin serves rewrites of at most as many tokens.
pub const MARGINS: [u32; 3] = [512, 2048, 8192];

/// A prompt whose last chunk is about to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    pub prompt_tokens: u32,
    /// Last tokens that are always computed again; 0 if reuse may reach the prompt's end.
    pub replay_tokens: u32,
    pub reused_tokens: u32,
    /// Where the last chunk starts: an end point before it would need pages that are gone.
    pub chunk_start: u32,
    pub publishing: Publishing,
    /// An encoder refills what is replayed, so the end point at the prompt's end serves.
    pub encoder_replay: bool,
}

impl Tail {
    /// The end point `margin` tokens before the replayed part, at a block's end; `None` where it would bring nothing.
    pub fn checkpoint(&self, margin: u32, block_tokens: NonZeroU32) -> Option<u32> {
        if self.publishing == Publishing::AllReusable || self.replay_tokens == 0 || self.encoder_replay {
            return None;
        }
        let room = self.prompt_tokens.checked_sub(self.replay_tokens)?.checked_sub(margin)?;
        let position = room / block_tokens * block_tokens.get();
        (position > self.reused_tokens && position >= self.chunk_start).then_some(position)
    }

    /// The end points of every rung, ascending.
    pub fn ladder(&self, block_tokens: NonZeroU32) -> BTreeSet<u32> {
        MARGINS.iter().filter_map(|margin| self.checkpoint(*margin, block_tokens)).collect()
    }
}

/// Which positions of a prompt get a snapshot of recurrent layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshots {
    /// Positions from the start; every turn shares them.
    pub from_start: Vec<u32>,
    /// Positions before the prompt's end, which move with each turn; 0 is the end itself.
    pub from_end: Vec<u32>,
    /// One where a prompt leaves what the tree knows.
    pub at_branches: bool,
}

/// How far a request reaches.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Typical capacity of a request: bounds the positions from the start.
    pub capacity: u32,
    pub sequence_tokens_max: u32,
    /// Completed turns whose end points stay.
    pub turns: u32,
    pub block_tokens: NonZeroU32,
}

/// States of recurrent layers that one resident request needs, its retained turns included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct States {
    /// Snapshots that move with each turn.
    pub moving: u64,
    pub generation: u64,
    /// While a new turn takes its snapshots, those of all retained turns are still there.
    pub context: u64,
}

impl Snapshots {
    pub fn states(&self, reach: Reach) -> States {
        let shared: BTreeSet<u32> = self.from_start.iter().copied().filter(|start| *start <= reach.capacity).collect();
        let shared = shared.len() as u64;
        let reachable: Vec<u32> =
            self.from_end.iter().copied().filter(|end| *end < reach.sequence_tokens_max).collect();
        let from_end = blocks_at_worst(&reachable, reach.block_tokens);
        // Without a rule the prompt's end is taken, and so it is where a prompt meets no branch.
        let unset = self.from_start.is_empty() && self.from_end.is_empty();
        let falls_back = shared == 0 && from_end == 0 && (self.at_branches || unset);
        let moving = from_end + u64::from(self.at_branches) + u64::from(falls_back);
        let turns = u64::from(reach.turns);
        let generation = 1 + shared + turns * moving;
        States { moving, generation, context: generation + moving }
    }
}

/// Slots that snapshots at these offsets before the end of a prompt take: two in one block share a slot.
pub fn snapshot_slots(prompt_tokens: u32, from_end: &[u32], block_tokens: NonZeroU32) -> u64 {
    let positions = from_end.iter().filter_map(|end| prompt_tokens.checked_sub(*end)?.checked_sub(1));
    positions.map(|last| last / block_tokens).collect::<BTreeSet<u32>>().len() as u64
}

/// The most blocks that the offsets fall into, over all lengths of a prompt.
fn blocks_at_worst(from_end: &[u32], block_tokens: NonZeroU32) -> u64 {
    let block_tokens = i64::from(block_tokens.get());
    let blocks = |end: i64| {
        let distinct = from_end.iter().map(|offset| (end - i64::from(*offset) - 1).div_euclid(block_tokens));
        distinct.collect::<BTreeSet<i64>>().len() as u64
    };
    // A count changes only where an offset crosses a boundary, so those alignments are enough.
    from_end.iter().map(|offset| blocks(i64::from(*offset) % block_tokens + 1)).max().unwrap_or(0)
}
