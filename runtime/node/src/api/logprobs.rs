//! What the model thought of each token of an answer, held back as long as the text that it is about.

use crate::text::{Output, Tokenizer};
use starling_core::ids::TokenId;
use starling_core::step::Drawn;
use std::collections::VecDeque;

/// A token as text.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    pub bytes: Box<[u8]>,
    /// Natural logarithm.
    pub logprob: f32,
}

/// One token of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    pub token: Scored,
    /// The most probable ones, highest first.
    pub top: Vec<Scored>,
    /// Characters of the answer before the token's.
    pub offset: u32,
    /// Bytes of the answer before the token's.
    begins: usize,
}

/// Scores of one choice that are not told yet. They go out with the text that they are about, so what a stop string cuts off
/// has none.
#[derive(Default)]
pub struct Scores {
    waiting: VecDeque<TokenScore>,
    /// Bytes and characters of the answer that are out.
    bytes: usize,
    characters: u32,
}

impl Scores {
    /// Takes a token before it becomes text; `more` is text that is about to go out. Tokens that add nothing to the answer (the
    /// model's end token, control tokens) are not among those that are told.
    pub fn push(&mut self, drawn: &Drawn, tokenizer: &Tokenizer, (output, more): (&Output, &str)) {
        let bytes = tokenizer.answer_bytes(drawn.token);
        if bytes.is_empty() {
            return;
        }
        let scored = |(token, logprob): &(TokenId, f32)| Scored {
            bytes: tokenizer.token_bytes(*token).unwrap_or_default().into(),
            logprob: *logprob,
        };
        let before = |text: &str| text.chars().count() as u32;
        self.waiting.push_back(TokenScore {
            token: Scored { bytes: bytes.into(), logprob: drawn.logprob },
            top: drawn.top.iter().map(scored).collect(),
            offset: self.characters + before(more) + before(output.held()),
            begins: self.bytes + more.len() + output.held().len(),
        });
    }

    /// The scores that go out with `text`: of the tokens whose text has begun to.
    pub fn go_with(&mut self, text: &str) -> Vec<TokenScore> {
        self.bytes += text.len();
        self.characters += text.chars().count() as u32;
        let out = self.waiting.partition_point(|score| score.begins < self.bytes);
        self.waiting.drain(..out).collect()
    }

    /// Those that are left when an answer ends by itself.
    pub fn rest(&mut self) -> Vec<TokenScore> {
        self.waiting.drain(..).collect()
    }
}
