//! What a request asks for, once text and JSON are behind it.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// How the next token is chosen. `temperature == 0` is greedy: the highest logit, ties to the lowest id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 (greedy) to 2.
    pub temperature: f32,
    /// Keep the `top_k` highest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Every random number is a function of (seed, child, position, use): the same position draws the same number in
    /// any attempt and in any batch.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// When a sequence ends by itself, and how its tokens are drawn: all that a rank needs besides the prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    pub sampling: Sampling,
    /// Tokens to generate at most, counted over all attempts.
    pub max_new_tokens: u32,
    /// Tokens that end the sequence (the model's end-of-generation tokens). The token itself is delivered.
    pub stop_tokens: Vec<TokenId>,
}

/// Why a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Finish {
    /// A stop token was sampled, or the ingress found a stop string.
    Stop,
    /// `max_new_tokens` were generated, or the context is full.
    Length,
}
