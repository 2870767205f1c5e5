//! One waiting request, and what is refused before it may wait.

use crate::digest;
use crate::ids::{ConversationKey, RequestKey, RequestNumber, TokenId};
use crate::placement::CountChildren;
use crate::rejection::Rejection;
use serde::{Deserialize, Serialize};

/// Tokens of the prompt's start that the KV-aware router orders a batch by (published constant).
pub const HEAD_TOKENS: usize = 64;

const TABLE: u64 = 0x7761_6974_696e_6701;
const DEFERRALS: u64 = 0x7761_6974_696e_6702;

/// A finite priority; higher is served first. Total order, so equal replicas sort equally.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Priority(f64);

impl Priority {
    /// `None` for what has no place in an order: NaN and the infinities.
    pub fn new(value: f64) -> Option<Self> {
        // Adding zero makes -0 and 0 one value.
        value.is_finite().then_some(Self(value + 0.0))
    }

    pub fn get(self) -> f64 {
        self.0
    }
}

impl Default for Priority {
    /// The published default.
    fn default() -> Self {
        Self(0.5)
    }
}

impl Eq for Priority {}

impl PartialOrd for Priority {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Priority {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl From<Priority> for f64 {
    fn from(priority: Priority) -> Self {
        priority.0
    }
}

impl TryFrom<f64> for Priority {
    type Error = String;

    fn try_from(value: f64) -> Result<Self, String> {
        Self::new(value).ok_or_else(|| format!("priority {value} is not finite"))
    }
}

/// What the queue, the pass and the routers know of a request. The replica fills it in and gets it back when placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    pub number: RequestNumber,
    pub key: RequestKey,
    /// Prompt tokens to compute, those already produced by an earlier attempt among them.
    pub tokens: u32,
    /// Further sequences that the request splits into on its rank.
    pub children: u32,
    /// Dense index of the rank that the client asked for.
    pub explicit: Option<u32>,
    /// What the client said about the hint. Unset counts as strict at admission and as relaxed in the routers, as published.
    pub relax: Option<bool>,
    /// What keeps turns of one conversation on one rank; see [`affinity`].
    pub affinity: Option<ConversationKey>,
    pub priority: Priority,
    /// Passes that set this request aside for its conversation's rank. Never reset.
    pub deferrals: u32,
    /// Agreed clock at the first deferral; meaningless while `deferrals` is 0.
    pub since_us: u64,
    /// The prompt's first tokens (at most [`HEAD_TOKENS`]); empty unless the policy orders by them.
    pub head: Box<[TokenId]>,
}

impl Waiting {
    /// Admission holds the request back until the rank it named has room.
    pub fn is_strict_at_admission(&self) -> bool {
        self.explicit.is_some() && self.relax != Some(true)
    }

    /// Counts a pass that set the request aside.
    pub(super) fn defer(&mut self, now_us: u64) {
        if self.deferrals == 0 {
            self.since_us = now_us;
        }
        self.deferrals = self.deferrals.saturating_add(1);
    }

    /// Hash of every field that means something: equal on every replica, whatever slot the request sits in.
    pub(super) fn element(&self) -> u64 {
        self.fixed_element().wrapping_add(self.deferrals_element())
    }

    /// The part that a pass changes, a summand of its own: many requests are set aside in a pass, and each time only this
    /// is hashed again.
    pub(super) fn deferrals_element(&self) -> u64 {
        if self.deferrals == 0 {
            return 0;
        }
        digest::element_of(DEFERRALS, [self.number.0, u64::from(self.deferrals), self.since_us])
    }

    fn fixed_element(&self) -> u64 {
        let affinity = self.affinity.map_or(0, |key| key.0);
        let relax = match self.relax {
            None => 0,
            Some(false) => 1,
            Some(true) => 2,
        };
        let explicit = self.explicit.map_or(0, |rank| u64::from(rank) + 1);
        let flags = explicit | relax << 33 | u64::from(self.affinity.is_some()) << 35;
        let fixed = [
            self.number.0,
            self.key.ingress.0,
            self.key.seq,
            u64::from(self.tokens) | u64::from(self.children) << 32,
            flags,
            affinity as u64,
            (affinity >> 64) as u64,
            self.priority.get().to_bits(),
        ];
        let hash = digest::element_of(TABLE, fixed);
        if self.head.is_empty() {
            return hash;
        }
        let head: Vec<u64> = self.head.iter().map(|token| u64::from(*token)).collect();
        digest::element(hash, &head)
    }
}

/// The key that ties a request to its conversation's rank: a sub-agent's id if it has one, else the conversation's own.
pub fn affinity(sub_agent: Option<ConversationKey>, conversation: Option<ConversationKey>) -> Option<ConversationKey> {
    sub_agent.or(conversation)
}

/// What a view can ever hold; requests beyond it are refused when they are submitted, since they could only wait forever.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub ranks: u32,
    /// Active requests a rank holds at most.
    pub cap: u32,
    pub count_children: CountChildren,
}

impl Limits {
    /// # Errors
    /// The refusal to hand to the client; the request was not touched.
    pub fn vet(&self, request: &Waiting) -> Result<(), Rejection> {
        if request.tokens == 0 {
            return Err(Rejection::EmptyPrompt);
        }
        if let Some(rank) = request.explicit
            && rank >= self.ranks
        {
            return Err(Rejection::NoSuchRank { rank, ranks: self.ranks });
        }
        // The published routers look only at the pass's budget, which is a view's worth of slots.
        let most = match self.count_children {
            CountChildren::StrictCap => u64::from(self.cap),
            CountChildren::Vectors | CountChildren::Upstream => u64::from(self.cap) * u64::from(self.ranks),
        };
        if 1 + u64::from(request.children) > most {
            return Err(Rejection::TooManyChildren { children: request.children, cap: self.cap });
        }
        Ok(())
    }
}
