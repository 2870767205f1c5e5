//! The order in which the KV-aware router places a batch: requests that share a prefix one after the other, the longest
//! of them first.
//!
//! Batches mostly share few beginnings (system prompts), and equal ones are the dearest to compare. So equal beginnings
//! are found by their hash, only the distinct ones are compared token by token, and what is sorted are numbers.

use crate::admission::{Admitted, HEAD_TOKENS};
use hashbrown::HashTable;

#[derive(Clone, Debug, Default)]
pub(super) struct PrefixOrder {
    /// Places in `firsts`, by hash of the beginning.
    by_hash: HashTable<(u64, u32)>,
    /// For each distinct beginning, the first request with it (index in the batch).
    firsts: Vec<u32>,
    /// Places in `firsts`, in order of the beginnings; then the other way round.
    sorted: Vec<u32>,
    ordinals: Vec<u32>,
    /// For each request of the rest: the place of its beginning in `firsts`.
    of: Vec<u32>,
    /// (ordinal of the beginning, tokens falling, place in the rest), highest bits first.
    keys: Vec<u128>,
    before: Vec<u32>,
}

impl PrefixOrder {
    /// Sorts `rest`, indices of the batch; equals keep their order.
    pub(super) fn sort(&mut self, batch: &[Admitted], rest: &mut [u32]) {
        self.group(batch, rest);
        self.sorted.clear();
        self.sorted.extend(0..self.firsts.len() as u32);
        let head_of = |first: &u32| head(&batch[self.firsts[*first as usize] as usize]);
        self.sorted.sort_unstable_by(|a, b| head_of(a).cmp(head_of(b)));
        self.ordinals.clear();
        self.ordinals.resize(self.firsts.len(), 0);
        for (ordinal, first) in self.sorted.iter().enumerate() {
            self.ordinals[*first as usize] = ordinal as u32;
        }
        self.keys.clear();
        self.keys.extend(rest.iter().zip(&self.of).enumerate().map(|(place, (index, of))| {
            let shorter = !batch[*index as usize].request.tokens;
            let ordinal = self.ordinals[*of as usize];
            u128::from(ordinal) << 64 | u128::from(shorter) << 32 | place as u128
        }));
        self.keys.sort_unstable();
        self.before.clear();
        self.before.extend_from_slice(rest);
        for (index, key) in rest.iter_mut().zip(&self.keys) {
            *index = self.before[*key as u32 as usize];
        }
    }

    fn group(&mut self, batch: &[Admitted], rest: &[u32]) {
        self.by_hash.clear();
        self.firsts.clear();
        self.of.clear();
        for index in rest {
            let tokens = head(&batch[*index as usize]);
            let hash = spread(tokens);
            let same =
                |entry: &(u64, u32)| entry.0 == hash && head(&batch[self.firsts[entry.1 as usize] as usize]) == tokens;
            let known = self.by_hash.find(hash, same).map(|entry| entry.1);
            self.of.push(known.unwrap_or(self.firsts.len() as u32));
            if known.is_none() {
                let first = self.firsts.len() as u32;
                self.by_hash.insert_unique(hash, (hash, first), |entry| entry.0);
                self.firsts.push(*index);
            }
        }
    }
}

fn head(admitted: &Admitted) -> &[u32] {
    let head = &admitted.request.head;
    &head[..head.len().min(HEAD_TOKENS)]
}

/// Four lanes, so that multiplications overlap. Only speed depends on it.
fn spread(tokens: &[u32]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut lanes = [tokens.len() as u64, 1, 2, 3];
    for chunk in tokens.chunks(4) {
        for (lane, token) in lanes.iter_mut().zip(chunk) {
            *lane = (lane.rotate_left(23) ^ u64::from(*token)).wrapping_mul(FACTOR);
        }
    }
    lanes.into_iter().fold(0, |hash: u64, lane| {
        let mixed = (hash ^ lane).wrapping_mul(FACTOR);
        mixed ^ (mixed >> 32)
    })
}
