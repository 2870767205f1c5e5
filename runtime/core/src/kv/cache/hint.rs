//! The retention hint: which window pages of a prompt are worth keeping where every block is published.
//!
//! A later turn resumes near the end of the prompt before it, so the window there stays longest, with some tokens more for
//! a prompt whose end is written anew. Other pages of a window serve nobody for long: they go first.

use super::lifecycle::{LifeCycle, Retention};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use std::num::NonZeroU32;

/// The class of pages that a later turn is expected to need (section 6.1).
pub const ENDPOINT_CLASS: u8 = 70;
/// The class of a window's other pages.
const PASSED_CLASS: u8 = 0;

/// What a sequence is opened for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub scope: Scope,
    /// What may be reused: a prompt without its last token.
    pub tokens: &'a [TokenId],
    pub conversation: Option<ConversationKey>,
    /// Leading tokens of the prompt that a later request may reuse; all of `tokens` where nothing else is said.
    pub reusable_tokens: Option<u32>,
}

/// How far a prompt is reusable, and how many tokens before its end a later one may leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hint {
    pub reusable_tokens: u32,
    pub rewind_tokens: u32,
}

impl LifeCycle {
    /// The class of a new page of block `ordinal`.
    pub(super) fn class(&self, ordinal: u32, hint: Option<Hint>, block_tokens: NonZeroU32) -> u8 {
        let (Retention::Window { tokens, sink_blocks }, true, Some(hint)) = (self.retention, self.is_published(), hint)
        else {
            return self.priority.of(ordinal);
        };
        let kept = tokens.get().saturating_add(hint.rewind_tokens);
        let from = hint.reusable_tokens.saturating_sub(kept) / block_tokens;
        let end = hint.reusable_tokens.div_ceil(block_tokens.get());
        match ordinal < sink_blocks || (from..end).contains(&ordinal) {
            true => ENDPOINT_CLASS,
            false => PASSED_CLASS,
        }
    }
}
