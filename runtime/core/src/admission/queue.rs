//! The queue: lanes of requests in a slab, each lane a linked list in number order.
//!
//! Slots are stable while a request waits, which is what the sliced digest needs, and taking a request out of the middle
//! of a lane moves nothing else.
//!
//! Invariants
//! - Q1 every occupied slot is in exactly one lane, and in the index under its number;
//! - Q2 a lane is never empty, its numbers rise from head to tail, its priority is that of all its requests (first come,
//!   first served: one lane);
//! - Q3 the digest is the sum over the occupied slots.

use super::waiting::{Priority, Waiting};
use crate::digest::{Accumulator, SLICES};
use crate::ids::RequestNumber;
use crate::placement::Remap;
use crate::rejection::Rejection;
use hashbrown::HashTable;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

const NONE: u32 = u32::MAX;

/// In which order waiting requests are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// In number order; priorities are ignored.
    #[default]
    #[serde(alias = "FCFS")]
    Fcfs,
    /// Higher priority first, number order among equals.
    #[serde(alias = "PRIORITY")]
    Priority,
}

/// What becomes of a request that a sweep comes by.
pub(super) enum Step<T> {
    Take(T),
    Keep,
    /// It stays, set aside for its conversation's rank.
    Defer,
    /// It stays, and so do all behind it.
    Stop,
}

#[derive(Clone, Debug)]
struct Slot {
    request: Option<Waiting>,
    prev: u32,
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

type Lane = Reverse<Priority>;

/// The waiting requests of a view, in service order.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    policy: Policy,
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_number: HashTable<u32>,
    lanes: BTreeMap<Lane, Ends>,
    /// The slot filled last: requests that are put back come in order, each behind the one before.
    last: u32,
    digest: Accumulator,
}

fn number_of(slots: &[Slot], slot: u32) -> Option<RequestNumber> {
    slots[slot as usize].request.as_ref().map(|request| request.number)
}

impl Queue {
    pub fn new(policy: Policy) -> Self {
        Self { policy, ..Self::default() }
    }

    pub fn policy(&self) -> Policy {
        self.policy
    }

    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// # Errors
    /// A number that already waits; the queue is as before.
    pub fn push(&mut self, request: Waiting) -> Result<(), Rejection> {
        if self.contains(request.number) {
            return Err(Rejection::DuplicateRequest { key: request.key });
        }
        self.insert(request);
        Ok(())
    }

    fn insert(&mut self, request: Waiting) {
        let number = request.number;
        let lane = self.lane_of(&request);
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        self.digest.fold_in(slot as usize, request.element());
        let vacant = Slot { request: Some(request), prev: NONE, next: NONE };
        match self.slots.get_mut(slot as usize) {
            Some(place) => *place = vacant,
            None => self.slots.push(vacant),
        }
        let slots = &self.slots;
        self.by_number
            .insert_unique(number.spread(), slot, |slot| number_of(slots, *slot).map_or(0, RequestNumber::spread));
        self.link(lane, slot, number);
        self.last = slot;
    }

    /// Gives back requests that were admitted and then placed nowhere; each stands where it stood before.
    ///
    /// # Errors
    /// The requests whose number already waits, untouched.
    pub fn put_back(&mut self, requests: impl IntoIterator<Item = Waiting>) -> Result<(), Vec<Waiting>> {
        let mut known = Vec::new();
        for request in requests {
            if self.contains(request.number) {
                known.push(request);
            } else {
                self.insert(request);
            }
        }
        if known.is_empty() { Ok(()) } else { Err(known) }
    }

    pub fn contains(&self, number: RequestNumber) -> bool {
        self.find(number).is_some()
    }

    pub fn get(&self, number: RequestNumber) -> Option<&Waiting> {
        self.slots[self.find(number)? as usize].request.as_ref()
    }

    pub fn remove(&mut self, number: RequestNumber) -> Option<Waiting> {
        let slot = self.find(number)?;
        self.take(slot)
    }

    /// In service order.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.lanes.values().flat_map(move |ends| {
            let mut at = ends.head;
            std::iter::from_fn(move || {
                let slot = self.slots.get(at as usize)?;
                at = slot.next;
                slot.request.as_ref()
            })
        })
    }

    /// Carries explicit ranks over to a new view. A relaxed hint to a rank that left is forgotten; requests that insist
    /// on one come back in service order, to be refused.
    pub fn remap(&mut self, remap: &Remap) -> Vec<Waiting> {
        let mut stranded = Vec::new();
        let numbers: Vec<RequestNumber> =
            self.iter().filter(|request| request.explicit.is_some()).map(|request| request.number).collect();
        for number in numbers {
            let Some(slot) = self.find(number) else {
                continue;
            };
            let Some(request) = self.slots[slot as usize].request.as_ref() else {
                continue;
            };
            let rank = request.explicit.and_then(|rank| remap.rank(rank));
            if rank.is_none() && request.is_strict_at_admission() {
                stranded.extend(self.take(slot));
            } else {
                self.edit(slot, |request| request.explicit = rank);
            }
        }
        stranded
    }

    /// The same for the same waiting requests, whatever slots they sit in.
    pub fn digest(&self) -> u64 {
        self.digest.total()
    }

    /// Hashes slice `slice % 256` again from memory: false if a bit changed outside these methods.
    pub fn verify(&self, slice: u64) -> bool {
        let first = (slice % SLICES as u64) as usize;
        let of_slice = self.slots.iter().skip(first).step_by(SLICES);
        self.digest.verify(slice, of_slice.filter_map(|slot| slot.request.as_ref().map(Waiting::element)))
    }

    /// Walks the requests in service order and does with each what `judge` says; those taken out go to `taken`.
    ///
    /// # Cost
    /// O(requests looked at). What is taken out of a row of requests is unlinked once, not one by one.
    pub(super) fn sweep<T>(
        &mut self,
        now_us: u64,
        mut judge: impl FnMut(&Waiting) -> Step<T>,
        mut taken: impl FnMut(Waiting, T),
    ) {
        let mut lane = self.lanes.iter().next().map(|(lane, ends)| (*lane, *ends));
        while let Some((key, Ends { head, tail })) = lane {
            let (mut first, mut kept, mut at) = (NONE, NONE, head);
            let mut stopped = false;
            while let Some(Slot { request: Some(request), next, .. }) = self.slots.get(at as usize) {
                let next = *next;
                match judge(request) {
                    Step::Take(with) => {
                        if let Some(request) = self.vacate(at) {
                            taken(request, with);
                        }
                        at = next;
                        continue;
                    }
                    Step::Keep => {}
                    Step::Defer => self.defer(at, now_us),
                    Step::Stop => {
                        stopped = true;
                        break;
                    }
                }
                self.join(kept, at);
                first = if first == NONE { at } else { first };
                (kept, at) = (at, next);
            }
            self.join(kept, at);
            let ends =
                Ends { head: if first == NONE { at } else { first }, tail: if at == NONE { kept } else { tail } };
            if ends.head == NONE {
                self.lanes.remove(&key);
            } else {
                self.lanes.insert(key, ends);
            }
            if stopped {
                return;
            }
            lane = self.lanes.range((Excluded(key), Unbounded)).next().map(|(lane, ends)| (*lane, *ends));
        }
    }

    fn join(&mut self, before: u32, after: u32) {
        if before != NONE {
            self.slots[before as usize].next = after;
        }
        if after != NONE {
            self.slots[after as usize].prev = before;
        }
    }

    /// Counts a deferral; the rest of the request need not be hashed again.
    fn defer(&mut self, slot: u32, now_us: u64) {
        if let Some(request) = self.slots[slot as usize].request.as_mut() {
            self.digest.fold_out(slot as usize, request.deferrals_element());
            request.defer(now_us);
            self.digest.fold_in(slot as usize, request.deferrals_element());
        }
    }

    /// Changes a request in place; its number and priority stay.
    fn edit(&mut self, slot: u32, change: impl FnOnce(&mut Waiting)) {
        if let Some(request) = self.slots[slot as usize].request.as_mut() {
            self.digest.fold_out(slot as usize, request.element());
            change(request);
            self.digest.fold_in(slot as usize, request.element());
        }
    }

    fn take(&mut self, slot: u32) -> Option<Waiting> {
        let Slot { prev, next, .. } = self.slots[slot as usize];
        let request = self.vacate(slot)?;
        self.unlink(&request, prev, next);
        Some(request)
    }

    /// Empties a slot; its neighbours still have to be joined.
    #[inline]
    fn vacate(&mut self, slot: u32) -> Option<Waiting> {
        let request = self.slots[slot as usize].request.take()?;
        self.digest.fold_out(slot as usize, request.element());
        if let Ok(entry) = self.by_number.find_entry(request.number.spread(), |at| *at == slot) {
            entry.remove();
        }
        self.free.push(slot);
        Some(request)
    }

    fn find(&self, number: RequestNumber) -> Option<u32> {
        let slots = &self.slots;
        self.by_number.find(number.spread(), |slot| number_of(slots, *slot) == Some(number)).copied()
    }

    fn lane_of(&self, request: &Waiting) -> Lane {
        match self.policy {
            Policy::Fcfs => Reverse(Priority::default()),
            Policy::Priority => Reverse(request.priority),
        }
    }

    /// # Cost
    /// O(1) for a new request, and for one that stands right behind the front or the request before it; else it walks.
    fn link(&mut self, lane: Lane, slot: u32, number: RequestNumber) {
        let Some(ends) = self.lanes.get_mut(&lane) else {
            self.lanes.insert(lane, Ends { head: slot, tail: slot });
            return;
        };
        let before = |at: u32| number_of(&self.slots, at).is_some_and(|other| other < number);
        let (prev, next) = if before(ends.tail) {
            (ends.tail, NONE)
        } else {
            let last = self.slots[self.last as usize].request.as_ref();
            let same_lane = last.is_some_and(|last| match self.policy {
                Policy::Fcfs => true,
                Policy::Priority => Reverse(last.priority) == lane,
            });
            let mut at = if same_lane && before(self.last) { self.last } else { ends.head };
            while before(at) {
                at = self.slots[at as usize].next;
            }
            (self.slots[at as usize].prev, at)
        };
        match prev {
            NONE => ends.head = slot,
            _ => self.slots[prev as usize].next = slot,
        }
        match next {
            NONE => ends.tail = slot,
            _ => self.slots[next as usize].prev = slot,
        }
        let place = &mut self.slots[slot as usize];
        (place.prev, place.next) = (prev, next);
    }

    fn unlink(&mut self, request: &Waiting, prev: u32, next: u32) {
        if prev != NONE && next != NONE {
            self.slots[prev as usize].next = next;
            self.slots[next as usize].prev = prev;
            return;
        }
        let lane = self.lane_of(request);
        if prev == NONE && next == NONE {
            self.lanes.remove(&lane);
            return;
        }
        let Some(ends) = self.lanes.get_mut(&lane) else {
            return;
        };
        if prev == NONE {
            ends.head = next;
            self.slots[next as usize].prev = NONE;
        } else {
            ends.tail = prev;
            self.slots[prev as usize].next = NONE;
        }
    }

    /// Asserts Q1 to Q3.
    ///
    /// # Cost
    /// O(waiting requests); for the simulator, fuzzers and tests.
    pub fn check(&self) {
        let mut seen = 0;
        for (lane, ends) in &self.lanes {
            let (mut at, mut prev, mut last) = (ends.head, NONE, None);
            while at != NONE {
                let slot = &self.slots[at as usize];
                let request = slot.request.as_ref().expect("a linked slot holds a request");
                assert_eq!(slot.prev, prev, "back link of {}", request.number);
                assert!(last < Some(request.number), "{} out of order", request.number);
                assert_eq!(self.lane_of(request), *lane, "lane of {}", request.number);
                assert_eq!(self.find(request.number), Some(at), "index of {}", request.number);
                (prev, last, at) = (at, Some(request.number), slot.next);
                seen += 1;
            }
            assert!(prev == ends.tail && last.is_some(), "tail of a lane");
        }
        assert_eq!(seen, self.len(), "linked and indexed requests");
        assert_eq!(seen + self.free.len(), self.slots.len(), "linked and free slots");
        let sum = self.iter().map(Waiting::element).fold(0, u64::wrapping_add);
        assert_eq!(sum, self.digest(), "digest");
        assert!((0..SLICES as u64).all(|slice| self.verify(slice)), "digest of a slice");
    }
}

#[derive(Serialize)]
struct SnapshotRef<'a> {
    policy: Policy,
    waiting: Vec<&'a Waiting>,
}

#[derive(Deserialize)]
struct Snapshot {
    policy: Policy,
    waiting: Vec<Waiting>,
}

impl Serialize for Queue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        SnapshotRef { policy: self.policy, waiting: self.iter().collect() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Queue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let snapshot = Snapshot::deserialize(deserializer)?;
        let mut queue = Self::new(snapshot.policy);
        for request in snapshot.waiting {
            queue.push(request).map_err(serde::de::Error::custom)?;
        }
        Ok(queue)
    }
}

#[cfg(test)]
mod slice_tests {
    use super::*;

    #[test]
    fn verify_finds_a_request_that_changed_in_memory() {
        let mut queue = Queue::new(Policy::Fcfs);
        for number in 0..600 {
            queue.push(Waiting { number: RequestNumber(number), ..Waiting::default() }).unwrap();
        }
        if let Some(request) = &mut queue.slots[300].request {
            request.deferrals ^= 1;
        }
        let found: Vec<u64> = (0..256).filter(|slice| !queue.verify(*slice)).collect();
        assert_eq!(found, [300 - 256]);
    }
}
