//! A prompt between its text and its tokens.

use starling_core::ids::TokenId;

/// A prompt's text, and the control tokens in it. Their names are not part of the text: what people wrote cannot be taken
/// for one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptText {
    pub text: String,
    /// In order of their places.
    pub controls: Vec<Control>,
}

/// A control token, and how much of the text lies before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    pub at: usize,
    pub token: TokenId,
}

impl PromptText {
    /// A text without control tokens.
    pub fn plain(text: String) -> Self {
        Self { text, controls: Vec::new() }
    }

    /// The text before the control token of this number, from the one before it on.
    pub fn run(&self, number: usize) -> &str {
        let start = number.checked_sub(1).map_or(0, |before| self.controls[before].at);
        let end = self.controls.get(number).map_or(self.text.len(), |control| control.at);
        &self.text[start..end]
    }

    /// Where the text behind the last control token starts.
    pub fn run_start(&self) -> usize {
        self.controls.last().map_or(0, |control| control.at)
    }
}

/// How far a prompt is encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub tokens: Vec<TokenId>,
    /// For each control token, how many tokens end with it.
    pub ends: Vec<usize>,
    /// Bytes of text that were turned into tokens.
    pub encoded_bytes: usize,
}
