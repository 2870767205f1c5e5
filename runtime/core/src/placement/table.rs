//! The conversation table: which rank a conversation lives on, least recently used first.
//!
//! Bindings sit in a slab of stable slots (the sliced digest needs them), linked by use. A stamp that grows with every
//! use makes the order part of each binding's hash.
//!
//! Invariants
//! - T1 at most `max` bindings, each in the index under its key and once in the list;
//! - T2 stamps rise from oldest to newest and are below `next_stamp`;
//! - T3 the digest is the sum over the bindings.

use super::remap::Remap;
use crate::digest::{self, Accumulator, SLICES};
use crate::ids::ConversationKey;
use hashbrown::HashTable;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const TABLE: u64 = 0x636f_6e76_6572_7301;
const NONE: u32 = u32::MAX;

/// Two words instead of one of 128 bits, whose alignment would cost 8 bytes a binding.
#[derive(Clone, Copy, Debug)]
struct Binding {
    key: (u64, u64),
    stamp: u64,
    rank: u32,
    older: u32,
    newer: u32,
}

impl Binding {
    fn element(&self) -> u64 {
        digest::element_of(TABLE, [self.key.0, self.key.1, self.stamp, u64::from(self.rank)])
    }
}

fn words(key: ConversationKey) -> (u64, u64) {
    (key.0 as u64, (key.0 >> 64) as u64)
}

/// Keys are hashes already; the multiplication keeps the table quick for those that are not.
fn spread(key: (u64, u64)) -> u64 {
    let mixed = (key.0 ^ key.1.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}

/// A place in the table, good until the next change of its bindings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place(u32);

#[derive(Clone, Debug)]
pub struct Table {
    max: u32,
    bindings: Vec<Binding>,
    index: HashTable<u32>,
    oldest: u32,
    newest: u32,
    next_stamp: u64,
    digest: Accumulator,
}

impl Table {
    /// `max`: bindings kept, at least one.
    pub fn new(max: u32) -> Self {
        Self {
            max: max.clamp(1, NONE - 1),
            bindings: Vec::new(),
            index: HashTable::new(),
            oldest: NONE,
            newest: NONE,
            next_stamp: 0,
            digest: Accumulator::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.bindings.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bindings.is_empty()
    }

    pub fn rank(&self, key: ConversationKey) -> Option<u32> {
        self.find(key).map(|(_, rank)| rank)
    }

    /// From the binding unused for longest to the latest.
    pub fn iter(&self) -> impl Iterator<Item = (ConversationKey, u32)> {
        self.places().map(|at| {
            let binding = &self.bindings[at as usize];
            let (low, high) = binding.key;
            (ConversationKey(u128::from(high) << 64 | u128::from(low)), binding.rank)
        })
    }

    fn places(&self) -> impl Iterator<Item = u32> {
        let mut at = self.oldest;
        std::iter::from_fn(move || {
            let place = (at != NONE).then_some(at)?;
            at = self.bindings[place as usize].newer;
            Some(place)
        })
    }

    pub(super) fn find(&self, key: ConversationKey) -> Option<(Place, u32)> {
        let key = words(key);
        let place = *self.index.find(spread(key), |at| self.bindings[*at as usize].key == key)?;
        Some((Place(place), self.bindings[place as usize].rank))
    }

    /// Makes a binding the newest.
    pub(super) fn touch(&mut self, place: Place) {
        self.fold_out(place.0);
        self.unlink(place.0);
        self.append(place.0);
    }

    /// Binds a conversation that is not in the table; at the limit the oldest is forgotten.
    pub(super) fn bind(&mut self, key: ConversationKey, rank: u32) {
        let key = words(key);
        let binding = Binding { key, stamp: 0, rank, older: NONE, newer: NONE };
        let place = if self.bindings.len() < self.max as usize {
            self.bindings.push(binding);
            self.bindings.len() as u32 - 1
        } else {
            let place = self.oldest;
            self.fold_out(place);
            self.unlink(place);
            let old = self.bindings[place as usize].key;
            if let Ok(entry) = self.index.find_entry(spread(old), |at| *at == place) {
                entry.remove();
            }
            self.bindings[place as usize] = binding;
            place
        };
        let bindings = &self.bindings;
        self.index.insert_unique(spread(key), place, |at| spread(bindings[*at as usize].key));
        self.append(place);
    }

    /// Renames ranks; bindings to ranks that left are forgotten, the others keep their order of use.
    pub(super) fn remap(&mut self, remap: &Remap) {
        let kept: Vec<Binding> = self
            .places()
            .filter_map(|at| {
                let binding = self.bindings[at as usize];
                Some(Binding { rank: remap.rank(binding.rank)?, ..binding })
            })
            .collect();
        let next_stamp = self.next_stamp;
        *self = Self::new(self.max);
        for binding in kept {
            self.restore(binding);
        }
        self.next_stamp = next_stamp;
    }

    /// Appends a binding with its stamp as it was.
    fn restore(&mut self, binding: Binding) {
        self.next_stamp = binding.stamp;
        let place = self.bindings.len() as u32;
        self.bindings.push(binding);
        let bindings = &self.bindings;
        self.index.insert_unique(spread(binding.key), place, |at| spread(bindings[*at as usize].key));
        self.append(place);
    }

    fn fold_out(&mut self, place: u32) {
        self.digest.fold_out(place as usize, self.bindings[place as usize].element());
    }

    fn unlink(&mut self, place: u32) {
        let Binding { older, newer, .. } = self.bindings[place as usize];
        match older {
            NONE => self.oldest = newer,
            _ => self.bindings[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.bindings[newer as usize].older = older,
        }
    }

    fn append(&mut self, place: u32) {
        let newest = std::mem::replace(&mut self.newest, place);
        match newest {
            NONE => self.oldest = place,
            _ => self.bindings[newest as usize].newer = place,
        }
        let binding = &mut self.bindings[place as usize];
        (binding.older, binding.newer) = (newest, NONE);
        binding.stamp = self.next_stamp;
        self.next_stamp += 1;
        self.digest.fold_in(place as usize, binding.element());
    }

    pub fn digest(&self) -> u64 {
        digest::element(self.digest.total(), &[self.next_stamp, u64::from(self.max)])
    }

    pub fn verify(&self, slice: u64) -> bool {
        let first = (slice % SLICES as u64) as usize;
        self.digest.verify(slice, self.bindings.iter().skip(first).step_by(SLICES).map(Binding::element))
    }

    /// Asserts T1 to T3, and that ranks are below `ranks`.
    pub fn check(&self, ranks: u32) {
        assert!(self.len() <= self.max as usize, "{} bindings, limit {}", self.len(), self.max);
        let (mut older, mut last, mut seen) = (NONE, None, 0);
        for at in self.places() {
            let binding = &self.bindings[at as usize];
            assert_eq!(binding.older, older, "back link");
            assert!(last < Some(binding.stamp), "stamp {} out of order", binding.stamp);
            assert!(binding.stamp < self.next_stamp, "stamp {} from the future", binding.stamp);
            assert!(binding.rank < ranks, "rank {} of {ranks}", binding.rank);
            let found = self.index.find(spread(binding.key), |at| self.bindings[*at as usize].key == binding.key);
            assert_eq!(found, Some(&at), "index");
            (older, last, seen) = (at, Some(binding.stamp), seen + 1);
        }
        assert_eq!(older, self.newest, "newest");
        assert_eq!((seen, self.index.len()), (self.len(), self.len()), "linked and indexed bindings");
        let sum = self.bindings.iter().map(Binding::element).fold(0, u64::wrapping_add);
        assert_eq!(sum, self.digest.total(), "digest");
        assert!((0..SLICES as u64).all(|slice| self.verify(slice)), "digest of a slice");
    }
}

#[derive(Serialize, Deserialize)]
struct Snapshot {
    max: u32,
    next_stamp: u64,
    /// Key, rank and stamp, oldest first.
    bindings: Vec<(ConversationKey, u32, u64)>,
}

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stamps = self.places().map(|at| self.bindings[at as usize].stamp);
        let bindings = self.iter().zip(stamps).map(|((key, rank), stamp)| (key, rank, stamp)).collect();
        Snapshot { max: self.max, next_stamp: self.next_stamp, bindings }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let snapshot = Snapshot::deserialize(deserializer)?;
        let refuse = |what: &str| Err(serde::de::Error::custom(format!("conversation table: {what}")));
        let mut table = Self::new(snapshot.max);
        if snapshot.bindings.len() > table.max as usize {
            return refuse("more bindings than its limit");
        }
        for (key, rank, stamp) in snapshot.bindings {
            if table.find(key).is_some() {
                return refuse("a conversation twice");
            }
            if stamp < table.next_stamp || stamp >= snapshot.next_stamp {
                return refuse("stamps out of order");
            }
            table.restore(Binding { key: words(key), stamp, rank, older: NONE, newer: NONE });
        }
        table.next_stamp = snapshot.next_stamp;
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verify_finds_a_binding_that_changed_in_memory() {
        let mut table = Table::new(1000);
        for key in 0..700u32 {
            table.bind(ConversationKey(u128::from(key)), key % 3);
        }
        table.check(3);
        table.bindings[300].rank ^= 1;
        let found: Vec<u64> = (0..256).filter(|slice| !table.verify(*slice)).collect();
        assert_eq!(found, [300 - 256]);
    }

    #[test]
    fn the_order_of_use_is_part_of_the_digest() {
        let bind = |order: [u128; 2]| {
            let mut table = Table::new(4);
            for key in order {
                table.bind(ConversationKey(key), 0);
            }
            table.digest()
        };
        assert_ne!(bind([1, 2]), bind([2, 1]));
    }

    #[test]
    fn many_conversations_fit_in_few_bytes() {
        // 65,536 conversations take at most 8 MiB, the index's share (5 bytes at most 8/7 full) counted twice over.
        assert!(std::mem::size_of::<Binding>() <= 40);
        let mut table = Table::new(65_536);
        for key in 0..200_000u32 {
            table.bind(ConversationKey(u128::from(key)), 0);
        }
        let bytes = table.bindings.capacity() * std::mem::size_of::<Binding>() + table.index.allocation_size();
        assert!(bytes <= 8 << 20, "{bytes} bytes");
    }
}
