//! One step of one rank, as data: what `batch` plans and a backend runs.

use crate::ids::{AttemptKey, BlockId, TokenId};
use crate::request::{Adjustment, Sampling};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The work of one step: decode tokens and prefill chunks together, as one flat list of slices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Made in this order, before any slice is computed.
    pub copies: Vec<BlockCopy>,
    pub slices: Vec<Slice>,
}

/// The whole contents of one block of a life cycle's pool, to be copied to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCopy {
    pub life_cycle: u8,
    pub from: BlockId,
    pub to: BlockId,
}

/// The blocks that a sequence has in one life cycle's pool, in order of position.
///
/// Recurrent layers have one block, that of their state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Ordinals without a block: they are out of the window.
    pub out: Range<u32>,
    /// The others, those before `out` first.
    pub blocks: Vec<BlockId>,
}

impl Table {
    /// Blocks for every ordinal.
    pub fn whole(blocks: Vec<BlockId>) -> Self {
        Self { out: 0..0, blocks }
    }

    /// Ordinals that it reaches to, those without a block included.
    pub fn len(&self) -> usize {
        self.out.len() + self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block of an ordinal; `None` beyond the table and out of the window.
    pub fn get(&self, ordinal: usize) -> Option<BlockId> {
        let at = u32::try_from(ordinal).ok().and_then(|ordinal| self.place(ordinal))?;
        self.blocks.get(at).copied()
    }
}

impl Table {
    /// Where an ordinal's block is among the blocks.
    fn place(&self, ordinal: u32) -> Option<usize> {
        match ordinal {
            _ if ordinal < self.out.start => Some(ordinal as usize),
            _ if ordinal < self.out.end => None,
            _ => Some((ordinal - self.out.len() as u32) as usize),
        }
    }

    /// Leaves further ordinals out: `out` holds those that are out already, and ends within the table.
    pub fn leave_out(&mut self, out: Range<u32>) {
        let Some(more) = out.len().checked_sub(self.out.len()) else { return };
        let first = (out.start as usize).min(self.blocks.len());
        self.blocks.drain(first..(first + more).min(self.blocks.len()));
        self.out = out;
    }

    /// The part that reaches to an ordinal, which is excluded.
    pub fn up_to(&self, ordinals: u32) -> Self {
        let count = self.place(ordinals).unwrap_or(self.out.start as usize).min(self.blocks.len());
        Self { out: self.out.clone(), blocks: self.blocks[..count].to_vec() }
    }

    /// Another block takes the place of an ordinal's, if it has one.
    pub fn replace(&mut self, ordinal: u32, block: BlockId) {
        if let Some(there) = self.place(ordinal).and_then(|at| self.blocks.get_mut(at)) {
            *there = block;
        }
    }
}

impl std::ops::Index<usize> for Table {
    type Output = BlockId;

    /// # Panics
    /// The ordinal has no block: `check` in the backend sees to it that none is asked for.
    fn index(&self, ordinal: usize) -> &BlockId {
        let (first, last) = (self.out.start as usize, self.out.end as usize);
        assert!(ordinal < first || ordinal >= last, "block {ordinal} is out of the window");
        &self.blocks[if ordinal < first { ordinal } else { ordinal - (last - first) }]
    }
}

impl Step {
    /// Tokens that the step computes.
    pub fn tokens(&self) -> usize {
        self.slices.iter().map(|s| s.tokens.len()).sum()
    }
}

/// Consecutive tokens of one sequence.
///
/// # Shape
/// `tokens` sit at positions `start .. start + tokens.len()`. There is a table for each life cycle, in order. That of attention
/// layers covers positions `0 .. start + tokens.len()`, those out of the window at `start` aside, and may reach further:
/// `table.len() * block_tokens >= start + tokens.len()`. Positions below `start` hold KV already.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    pub attempt: AttemptKey,
    pub tokens: Vec<TokenId>,
    pub start: u32,
    pub tables: Vec<Table>,
    /// Set when the slice's last token, drafts aside, is the last one known: tokens are drawn from its logits and from
    /// those of each draft.
    pub sample: Option<Sample>,
}

impl Slice {
    /// What is drawn, in order of position: one token behind the last that is known, and one behind each draft.
    pub fn draws(&self) -> impl Iterator<Item = Draw<'_>> {
        let sample = self.sample.as_ref();
        let count = sample.map_or(0, |sample| sample.drafts.saturating_add(1));
        let first_row = (self.tokens.len() as u32).saturating_sub(count) as usize;
        sample.into_iter().flat_map(move |sample| {
            (0..count).map(move |nth| {
                let position = sample.position.saturating_add(nth);
                let banned = sample.banned.as_ref().filter(|banned| position < banned.before);
                Draw {
                    row: first_row + nth as usize,
                    sampling: &sample.sampling,
                    child: sample.child,
                    position,
                    history: sample.history.as_ref(),
                    drafts: self.tokens.get(first_row + 1..=first_row + nth as usize).unwrap_or_default(),
                    banned: banned.map_or(&[], |banned| &banned.tokens),
                }
            })
        })
    }
}

/// How to draw the next tokens of a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub sampling: Sampling,
    /// Which of the request's children: 0 for a request without.
    pub child: u32,
    /// Position of the first token that is drawn, counted over prompt and produced tokens.
    pub position: u32,
    /// How many of the slice's last tokens are guesses. Fewer than the slice has tokens.
    pub drafts: u32,
    /// The tokens before `position`, for penalties only.
    pub history: Option<History>,
    /// What is not to be drawn yet.
    pub banned: Option<Banned>,
}

/// Tokens that are not drawn before a position: they would end the sequence too early.
#[derive(Clone, Debug, PartialEq)]
pub struct Banned {
    pub tokens: Vec<TokenId>,
    pub before: u32,
}

impl Sample {
    /// One token behind all that are known, without penalties.
    pub fn new(sampling: Sampling, position: u32) -> Self {
        Self { sampling, child: 0, position, drafts: 0, history: None, banned: None }
    }
}

/// What a sequence held before a draw. Shared with the planner, not copied.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    /// The prompt, then what was produced.
    pub tokens: Arc<Vec<TokenId>>,
    pub prompt_tokens: u32,
}

/// One token to draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw<'a> {
    /// The slice's row whose logits it is drawn from.
    pub row: usize,
    pub sampling: &'a Sampling,
    pub child: u32,
    pub position: u32,
    pub history: Option<&'a History>,
    /// Guesses that stand between the history and this position.
    pub drafts: &'a [TokenId],
    /// Tokens that are not drawn here.
    pub banned: &'a [TokenId],
}

impl<'a> Draw<'a> {
    pub fn adjustment(&self) -> Option<&'a Adjustment> {
        self.sampling.adjustment.as_deref()
    }

    /// All tokens before the position, and how many of them are the prompt's; nothing where no penalty asks for them.
    pub fn before(&self) -> (impl Iterator<Item = TokenId> + Clone + 'a, usize) {
        let (tokens, prompt_tokens) = match self.history {
            Some(history) => (&history.tokens[..], history.prompt_tokens as usize),
            None => (&[][..], 0),
        };
        (tokens.iter().chain(self.drafts).copied(), prompt_tokens)
    }
}

/// A token, and what the model thought of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drawn {
    pub token: TokenId,
    /// Natural logarithm of the token's probability under the model (before anything that sampling does to the logits).
    pub logprob: f32,
    /// The most probable tokens with theirs, the highest first, as many as were asked for. Empty costs nothing.
    pub top: Vec<(TokenId, f32)>,
}

impl Drawn {
    pub fn new(token: TokenId, logprob: f32) -> Self {
        Self { token, logprob, top: Vec::new() }
    }
}

/// A token drawn by a backend: those of one slice in order of position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// Index of the slice in the step.
    pub slice: u32,
    pub drawn: Drawn,
}

impl Sampled {
    pub fn new(slice: usize, drawn: Drawn) -> Self {
        Self { slice: slice as u32, drawn }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_draws_behind_its_last_known_token_and_behind_each_draft() {
        let history = History { tokens: Arc::new(vec![7, 8, 9]), prompt_tokens: 2 };
        let sample = Sample { child: 1, drafts: 2, history: Some(history), ..Sample::new(Sampling::default(), 3) };
        let slice = Slice {
            attempt: AttemptKey::default(),
            tokens: vec![8, 9, 10, 11],
            start: 1,
            tables: Vec::new(),
            sample: Some(sample),
        };
        let draws: Vec<_> = slice.draws().map(|d| (d.row, d.position, d.before().0.collect::<Vec<_>>())).collect();
        assert_eq!(draws, [(1, 3, vec![7, 8, 9]), (2, 4, vec![7, 8, 9, 10]), (3, 5, vec![7, 8, 9, 10, 11])]);
        assert_eq!(Slice { sample: None, ..slice }.draws().count(), 0);
    }

    #[test]
    fn tokens_are_banned_up_to_their_position_drafts_or_not() {
        let banned = Banned { tokens: vec![1, 2], before: 5 };
        let sample = Sample { drafts: 3, banned: Some(banned), ..Sample::new(Sampling::default(), 3) };
        let slice = Slice {
            attempt: AttemptKey::default(),
            tokens: vec![7; 4],
            start: 2,
            tables: Vec::new(),
            sample: Some(sample),
        };
        let banned: Vec<usize> = slice.draws().map(|draw| draw.banned.len()).collect();
        assert_eq!(banned, [2, 2, 0, 0]);
    }

    #[test]
    fn a_slice_that_claims_more_drafts_than_it_has_tokens_draws_without_panic() {
        let sample = Sample { drafts: 9, ..Sample::new(Sampling::default(), 1) };
        let slice = Slice {
            attempt: AttemptKey::default(),
            tokens: vec![1],
            start: 0,
            tables: Vec::new(),
            sample: Some(sample),
        };
        assert_eq!(slice.draws().count(), 10);
    }
}
