//! The assignment table: what became of each request, with its incremental digest.

use crate::admission::Waiting;
use crate::digest::{self, Accumulator, SLICES};
use crate::ids::{Attempt, RankId, RequestKey, RequestNumber};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a request stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) enum State {
    /// In the queue, which then holds what placement needs of it.
    #[default]
    Waiting,
    Placed {
        rank: RankId,
        waiting: Waiting,
        /// What the request counts as its rank's load: the prompt less what was cached.
        load_tokens: u32,
    },
    /// Its rank is done; its ingress has not ended it yet.
    Closing { rank: RankId, waiting: Waiting },
    /// Its attempt failed; its ingress has not resumed it yet.
    Held { waiting: Waiting },
}

impl State {
    pub(super) fn rank(&self) -> Option<RankId> {
        match self {
            State::Placed { rank, .. } | State::Closing { rank, .. } => Some(*rank),
            State::Waiting | State::Held { .. } => None,
        }
    }

    /// What placement needs of a request that is not in the queue.
    pub(super) fn waiting(&self) -> Option<&Waiting> {
        match self {
            State::Waiting => None,
            State::Placed { waiting, .. } | State::Closing { waiting, .. } | State::Held { waiting } => Some(waiting),
        }
    }

    pub(super) fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        match self {
            State::Waiting => None,
            State::Placed { waiting, .. } | State::Closing { waiting, .. } | State::Held { waiting } => Some(waiting),
        }
    }

    pub(super) fn closed(self) -> State {
        match self {
            State::Placed { rank, waiting, .. } => State::Closing { rank, waiting },
            other => other,
        }
    }

    pub(super) fn held(self) -> State {
        match self {
            State::Placed { waiting, .. } | State::Closing { waiting, .. } => State::Held { waiting },
            other => other,
        }
    }
}

/// A request that its ingress has announced and not ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) key: RequestKey,
    pub(super) number: RequestNumber,
    /// Of the latest placement; 0 before the first.
    pub(super) attempt: Attempt,
    pub(super) failed: u32,
    /// Tokens that the arrival or the latest resume said were produced.
    pub(super) produced: u32,
    pub(super) state: State,
}

const TABLE: u64 = 0x72;

impl Request {
    pub(super) fn new(key: RequestKey, number: RequestNumber, produced: u32) -> Self {
        Self { key, number, attempt: Attempt(0), failed: 0, produced, state: State::Waiting }
    }

    fn element(&self) -> u64 {
        let tag = match self.state {
            State::Waiting => 0,
            State::Placed { .. } => 1,
            State::Closing { .. } => 2,
            State::Held { .. } => 3,
        };
        let waiting = self.state.waiting();
        digest::element(
            TABLE,
            &[
                self.key.ingress.0,
                self.key.seq,
                self.number.0,
                u64::from(self.attempt.0) | u64::from(self.failed) << 32,
                u64::from(self.produced),
                tag,
                self.state.rank().map_or(0, |r| u64::from(r.0) + 1),
                waiting.map_or(0, |w| u64::from(w.tokens) | u64::from(w.children) << 32),
                waiting.map_or(0, |w| u64::from(w.deferrals)),
                waiting.and_then(|w| w.explicit).map_or(0, |rank| u64::from(rank) + 1),
            ],
        )
    }
}

/// A slab of requests, an index by key, and the running digest.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<Request>>,
    free: Vec<usize>,
    by_key: BTreeMap<RequestKey, usize>,
    digest: Accumulator,
}

impl Requests {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn get(&self, key: RequestKey) -> Option<&Request> {
        self.slots[*self.by_key.get(&key)?].as_ref()
    }

    /// In key order, the same on every replica.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.by_key.values().filter_map(|slot| self.slots[*slot].as_ref())
    }

    /// The key must be new.
    pub(super) fn insert(&mut self, request: Request) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let known = self.by_key.insert(request.key, slot);
        debug_assert!(known.is_none(), "request {} is new", request.key);
        self.digest.fold_in(slot, request.element());
        self.slots[slot] = Some(request);
    }

    pub(super) fn change(&mut self, key: RequestKey, change: impl FnOnce(&mut Request)) {
        let Some(slot) = self.by_key.get(&key).copied() else { return };
        let Some(request) = self.slots[slot].as_mut() else { return };
        self.digest.fold_out(slot, request.element());
        change(request);
        self.digest.fold_in(slot, request.element());
    }

    pub(super) fn remove(&mut self, key: RequestKey) {
        let Some(slot) = self.by_key.remove(&key) else { return };
        if let Some(request) = self.slots[slot].take() {
            self.digest.fold_out(slot, request.element());
            self.free.push(slot);
        }
    }

    pub(super) fn digest(&self) -> u64 {
        self.digest.total()
    }

    pub(super) fn verify(&self, slice: u64) -> bool {
        let first = (slice % SLICES as u64) as usize;
        let of_slice = self.slots.iter().skip(first).step_by(SLICES).flatten();
        self.digest.verify(slice, of_slice.map(Request::element))
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let sum = self.iter().map(Request::element).fold(0, u64::wrapping_add);
        if sum != self.digest.total() {
            return Err("P5: digest of the assignment table".into());
        }
        if self.by_key.len() + self.free.len() != self.slots.len() {
            return Err("assignment table: slots leak".into());
        }
        Ok(())
    }

    /// Damages one request in memory, as a flipped bit would; for tests of the digest.
    #[cfg(test)]
    pub(super) fn flip_a_bit(&mut self, key: RequestKey) {
        let slot = self.by_key[&key];
        if let Some(request) = self.slots[slot].as_mut() {
            request.failed ^= 1;
        }
    }
}
