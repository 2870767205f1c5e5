//! Why a request went where it went: for traces, and for whoever asks.

use super::config::NewConversations;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The reason for one placement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Why {
    pub choice: Choice,
    /// The rank of the request's conversation, if it had no room: this turn lost its cached prefix.
    pub overflow_from: Option<u32>,
}

/// The rule that chose the rank, with the numbers it looked at.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Choice {
    /// Admission kept the slot for this turn of a conversation; it was set aside so many times before.
    Pinned { deferrals: u32 },
    /// The client named the rank.
    Explicit,
    /// The conversation's rank had room.
    Bound,
    /// A cold rank's first request.
    WarmUp,
    /// First turn, or a turn that lost its rank. `active`: requests on the rank before; `tokens`: prompt tokens there.
    New { by: NewConversations, active: u32, tokens: u64 },
    /// Fewest tokens, then fewest requests.
    Balanced { active: u32, tokens: u64 },
    /// Lowest score. `matched`: cached tokens of the prompt; `gated`: matches were too short to count; `tied`: ranks with
    /// the same score and load, told apart by a permutation seeded with the request's number.
    Score { score: f64, matched: u32, gated: bool, tied: u32 },
    /// No rank under the target had room for it: the emptiest one.
    Emptiest { active: u32 },
}

impl Why {
    pub(super) fn plain(choice: Choice) -> Self {
        Self { choice, overflow_from: None }
    }

    /// Short and stable: a metric label.
    pub fn label(&self) -> &'static str {
        match (self.choice, self.overflow_from) {
            (_, Some(_)) => "overflow",
            (Choice::Pinned { .. }, _) => "pinned",
            (Choice::Explicit, _) => "explicit",
            (Choice::Bound, _) => "bound",
            (Choice::WarmUp, _) => "warm_up",
            (Choice::New { .. }, _) => "new",
            (Choice::Balanced { .. }, _) => "balanced",
            (Choice::Score { .. }, _) => "score",
            (Choice::Emptiest { .. }, _) => "emptiest",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.overflow_from {
            write!(f, "overflow from rank {rank}: ")?;
        }
        match self.choice {
            Choice::Pinned { deferrals } => write!(f, "pinned (deferrals {deferrals})"),
            Choice::Explicit => write!(f, "explicit rank"),
            Choice::Bound => write!(f, "bound conversation"),
            Choice::WarmUp => write!(f, "warm-up of a cold rank"),
            Choice::New { by, active, tokens } => {
                write!(f, "new by {} (active {active}, tokens {tokens})", by.name())
            }
            Choice::Balanced { active, tokens } => {
                write!(f, "balanced (active {active}, tokens {tokens})")
            }
            Choice::Score { score, matched, gated, tied } => {
                let gate = if gated { ", match below threshold" } else { "" };
                write!(f, "score {score} (matched {matched}{gate}, tied {tied})")
            }
            Choice::Emptiest { active } => write!(f, "emptiest rank (active {active})"),
        }
    }
}
