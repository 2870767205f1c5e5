//! What a rank remembers of its reservations: how much was reused, and why not more. No tokens are kept.

use super::cache::Missed;
use super::identity::Scope;
use crate::ids::{AttemptKey, ConversationKey};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Reservations that are over and still remembered, some hundred bytes each.
const ENDED_MAX: usize = 1024;

/// What is to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Forget {
    /// Everything that only this conversation has used.
    Conversation { scope: Scope, conversation: ConversationKey },
    /// Everything of a scope, of whatever conversation.
    Scope(Scope),
}

impl Forget {
    /// Whether something of that scope and conversation is meant.
    pub fn is_meant(&self, of: &Scope, by: Option<ConversationKey>) -> bool {
        match self {
            Self::Conversation { scope, conversation } => scope == of && by == Some(*conversation),
            Self::Scope(scope) => scope == of,
        }
    }
}

/// How much of a prompt was reused when blocks were reserved for it, and why the rest was not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    pub attempt: AttemptKey,
    pub scope: Scope,
    pub conversation: Option<ConversationKey>,
    /// Tokens that the attempt began with: the prompt, and what an earlier attempt had produced.
    pub prompt_tokens: u32,
    pub reused_tokens: u32,
    /// From the reused tokens on, without gaps.
    pub missed: Vec<Missed>,
}

/// The last reservations that are over.
#[derive(Clone, Debug, Default)]
pub(super) struct Ended(VecDeque<Explanation>);

impl Ended {
    pub fn add(&mut self, explanation: Explanation) {
        if self.0.len() == ENDED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(explanation);
    }

    pub fn forget(&mut self, what: &Forget) {
        self.0.retain(|one| !what.is_meant(&one.scope, one.conversation));
    }

    /// Of one attempt, the oldest first: each time it was preempted it reserved again.
    pub fn of(&self, attempt: AttemptKey) -> impl Iterator<Item = &Explanation> {
        self.0.iter().filter(move |one| one.attempt == attempt)
    }
}
