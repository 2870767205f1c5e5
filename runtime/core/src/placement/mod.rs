//! Placement: which rank runs an admitted request.
//!
//! A router is a pure function of gathered loads, the admitted batch and its own history, so every replica that applied
//! the same rounds places alike. Ranks are dense indices of the view; [`Remap`] carries what a router remembers over to
//! the next view.
//!
//! # Source
//! The published attention-DP routers, decision for decision. What differs is switched on by data they do not have:
//! children that weigh more than one ([`CountChildren`]), slots held free, and a bound counted in time ([`Bound`]).
//!
//! Invariants of a placement
//! - I1 each request of the batch is assigned once or dropped once;
//! - I2 `expected` is at least the active count of every rank, unless a rank came in over its cap;
//! - I3 no rank that came in within its cap leaves it, for a batch that admission let through (under `strict-cap` for any
//!   batch at all; what does not fit is dropped);
//! - I4 equal inputs and histories give equal placements;
//! - I5 a request gets the slot that admission reserved for it (strict affinity).

pub mod balance;
mod balanced;
mod config;
mod conversation;
mod kv_aware;
mod matches;
pub mod padding;
mod permutation;
mod prefix_order;
mod remap;
mod slots;
mod table;
mod why;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use balanced::Balanced;
pub use config::{Bound, Config, ConfigError, CountChildren, NewConversations, Policy, UnknownPolicy};
pub use conversation::Conversation;
pub use kv_aware::KvAware;
pub use matches::{MatchTable, Matches, NoMatches};
pub use permutation::permutation;
pub use remap::{Remap, RemapError};
pub use table::Table;
pub use why::{Choice, Why};

use crate::admission::{Admitted, Waiting};
use serde::{Deserialize, Serialize};

/// What is known of a rank's load when a batch is placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLoad {
    pub active_requests: u32,
    /// Prompt tokens of the active requests; for the KV-aware router without what was cached.
    pub active_tokens: u64,
}

/// What a batch is placed on.
#[derive(Clone, Copy)]
pub struct Routing<'a> {
    /// By dense rank.
    pub loads: &'a [RankLoad],
    /// Active requests a rank holds at most.
    pub cap: u32,
    /// Free slots by rank that must stay free: what the admission pass returned. Short or empty: none.
    pub held: &'a [u32],
    pub now_us: u64,
    pub matches: &'a dyn Matches,
}

/// One request of a batch and its rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Assigned {
    /// Index in the batch.
    pub index: u32,
    pub rank: u32,
    pub why: Why,
}

/// Where a batch goes; kept between batches so that its buffers are allocated once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// In placement order, which is the order on each rank.
    pub assigned: Vec<Assigned>,
    /// Active requests that a rank may have after this batch: what dummy padding goes by.
    pub expected: u32,
    /// Indices of the batch that found no rank, rising; they go back to the queue.
    pub dropped: Vec<u32>,
    /// Requests placed on a rank that had no room for them, as the published fallback does. Never under `strict-cap`.
    pub over_cap: u32,
}

impl Placement {
    fn clear(&mut self) {
        self.assigned.clear();
        self.dropped.clear();
        self.expected = 0;
        self.over_cap = 0;
    }

    /// Asserts I1 for a batch of `requests` on `ranks` ranks.
    pub fn check(&self, requests: usize, ranks: usize) {
        let mut seen = vec![false; requests];
        let indices = self.assigned.iter().map(|assigned| assigned.index).chain(self.dropped.iter().copied());
        for index in indices {
            assert!(!std::mem::replace(&mut seen[index as usize], true), "request {index} of the batch placed twice");
        }
        assert!(seen.into_iter().all(|seen| seen), "a request of the batch is nowhere");
        assert!(self.assigned.iter().all(|assigned| (assigned.rank as usize) < ranks), "rank out of range");
        assert!(self.dropped.is_sorted(), "drops in batch order");
    }
}

/// A router with its history.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Router {
    Balanced(Balanced),
    KvAware(Box<KvAware>),
    Conversation(Conversation),
}

impl Router {
    /// `bound`: how long a turn waits for its rank; see [`Config::bound`].
    pub fn new(config: &Config, bound: Bound, ranks: u32) -> Self {
        match config.policy {
            Policy::Balanced => Self::Balanced(Balanced::new(config.count_children)),
            Policy::KvAware => Self::KvAware(Box::new(KvAware::new(config, ranks))),
            Policy::Conversation => Self::Conversation(Conversation::new(config, bound)),
        }
    }

    /// The rank that admission keeps the request for, if it still waits for its conversation's rank.
    pub fn admission_rank(&self, request: &Waiting, now_us: u64) -> Option<u32> {
        match self {
            Self::Conversation(router) => router.admission_rank(request, now_us),
            Self::Balanced(_) | Self::KvAware(_) => None,
        }
    }

    /// Whether placement waits for the ranks' prefix matches, and requests carry their first tokens.
    pub fn needs_matches(&self) -> bool {
        matches!(self, Self::KvAware(_))
    }

    /// Places a batch. Hints to ranks that do not exist are ignored; [`Limits::vet`](crate::admission::Limits::vet)
    /// refuses them at the edge.
    pub fn route(&mut self, routing: &Routing<'_>, batch: &[Admitted], out: &mut Placement) {
        out.clear();
        if routing.loads.is_empty() {
            out.dropped.extend(0..batch.len() as u32);
            return;
        }
        match self {
            Self::Balanced(router) => router.route(routing, batch, out),
            Self::KvAware(router) => router.route(routing, batch, out),
            Self::Conversation(router) => router.route(routing, batch, out),
        }
        out.dropped.sort_unstable();
    }

    /// Carries the history over to a new view. Conversations of ranks that left become unknown; ranks that join are cold.
    pub fn remap(&mut self, remap: &Remap) {
        match self {
            Self::Balanced(_) => {}
            Self::KvAware(router) => router.remap(remap),
            Self::Conversation(router) => router.remap(remap),
        }
    }

    /// Conversations that are bound to a rank.
    pub fn conversations(&self) -> usize {
        match self {
            Self::Conversation(router) => router.table().len(),
            Self::Balanced(_) | Self::KvAware(_) => 0,
        }
    }

    /// The rank that a conversation is bound to.
    pub fn bound_rank(&self, key: crate::ids::ConversationKey) -> Option<u32> {
        match self {
            Self::Conversation(router) => router.table().rank(key),
            Self::Balanced(_) | Self::KvAware(_) => None,
        }
    }

    /// Equal for equal histories.
    pub fn digest(&self) -> u64 {
        match self {
            Self::Balanced(_) => 0,
            Self::KvAware(router) => router.digest(),
            Self::Conversation(router) => router.digest(),
        }
    }

    /// Hashes slice `slice % 256` of the table again from memory: false if a bit changed outside these methods.
    pub fn verify(&self, slice: u64) -> bool {
        match self {
            Self::Conversation(router) => router.table().verify(slice),
            Self::Balanced(_) | Self::KvAware(_) => true,
        }
    }

    /// Asserts every invariant of the history, for a view of `ranks` ranks.
    pub fn check(&self, ranks: u32) {
        match self {
            Self::Balanced(_) => {}
            Self::KvAware(router) => router.check(ranks),
            Self::Conversation(router) => router.check(ranks),
        }
    }
}
