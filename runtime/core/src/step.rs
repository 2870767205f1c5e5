//! One step of one rank, as data: what `batch` plans and a backend runs.

use crate::ids::{AttemptKey, BlockId, TokenId};
use crate::request::Sampling;
use serde::{Deserialize, Serialize};

/// The work of one step: decode tokens and prefill chunks together, as one flat list of slices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    pub slices: Vec<Slice>,
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
/// `tokens` sit at positions `start .. start + tokens.len()`; `blocks` cover positions `0 .. start + tokens.len()` (and
/// may reach further), so `blocks.len() * block_tokens >= start + tokens.len()`. Positions below `start` hold KV already.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    pub attempt: AttemptKey,
    pub tokens: Vec<TokenId>,
    pub start: u32,
    pub blocks: Vec<BlockId>,
    /// Set when the slice's last token is the last one known: a token is sampled from its logits.
    pub sample: Option<Sample>,
}

/// How to draw the next token of a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub sampling: Sampling,
    /// Which of the request's children: 0 for a request without.
    pub child: u32,
    /// Position of the token that is drawn, counted over prompt and produced tokens.
    pub position: u32,
}

/// A token drawn by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// Index of the slice in the step.
    pub slice: u32,
    pub token: TokenId,
    /// Natural logarithm of the token's probability under the model (before temperature and truncation).
    pub logprob: f32,
}
