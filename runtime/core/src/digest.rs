//! The replica's incremental digest.
//!
//! A table's digest is the wrapping sum of its elements' hashes, kept up to date by folding the old element out and the
//! new one in: its cost follows the change, not the table. The sum is kept in 256 slices by the element's slot, so that
//! each round can re-hash one slice from memory and compare: a flipped bit is found within 256 rounds anywhere.
//! It guards against faults, not adversaries.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Slices of a table; a round verifies one.
pub const SLICES: usize = 256;

/// Hash of one element: `table` keeps equal elements of two tables apart.
pub fn element(table: u64, words: &[u64]) -> u64 {
    let mut bytes = [0u8; 8 * 16];
    let mut hash = table;
    for chunk in words.chunks(16) {
        for (slot, word) in bytes.chunks_exact_mut(8).zip(chunk) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        hash = xxh3_64_with_seed(&bytes[..chunk.len() * 8], hash);
    }
    hash
}

/// [`element`] where the number of words is known when compiling: nothing to copy or to branch on.
#[inline]
pub fn element_of<const N: usize>(table: u64, words: [u64; N]) -> u64 {
    const { assert!(N <= 16, "element hashes more words in chunks") };
    xxh3_64_with_seed(words.map(u64::to_le_bytes).as_flattened(), table)
}

/// The running digest of one table whose elements sit in slots `0..n`.
#[derive(Clone, Debug)]
pub struct Accumulator {
    slices: Box<[u64; SLICES]>,
    total: u64,
}

impl Default for Accumulator {
    fn default() -> Self {
        Self { slices: Box::new([0; SLICES]), total: 0 }
    }
}

impl Accumulator {
    pub fn fold_in(&mut self, slot: usize, element: u64) {
        let slice = &mut self.slices[slot % SLICES];
        *slice = slice.wrapping_add(element);
        self.total = self.total.wrapping_add(element);
    }

    pub fn fold_out(&mut self, slot: usize, element: u64) {
        let slice = &mut self.slices[slot % SLICES];
        *slice = slice.wrapping_sub(element);
        self.total = self.total.wrapping_sub(element);
    }

    /// The same for the same set of elements, whatever slots they sit in.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Whether slice `slice % 256`, hashed again from memory, agrees with its running sum.
    pub fn verify(&self, slice: u64, elements: impl Iterator<Item = u64>) -> bool {
        let sum = elements.fold(0u64, u64::wrapping_add);
        sum == self.slices[(slice % SLICES as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_follows_the_set_and_verify_finds_a_changed_element() {
        let mut a = Accumulator::default();
        let mut b = Accumulator::default();
        let elements: Vec<u64> = (0..1000u64).map(|i| element(7, &[i, i * i])).collect();
        for (slot, e) in elements.iter().enumerate() {
            a.fold_in(slot, *e);
        }
        for (slot, e) in elements.iter().rev().enumerate() {
            b.fold_in(slot, *e);
        }
        assert_eq!(a.total(), b.total());
        for slice in 0..SLICES {
            let of_slice = || elements.iter().skip(slice).step_by(SLICES).copied();
            assert!(a.verify(slice as u64, of_slice()));
            assert!(!a.verify(slice as u64, of_slice().map(|e| e.wrapping_add(1))));
        }
        for (slot, e) in elements.iter().enumerate() {
            a.fold_out(slot, *e);
        }
        assert_eq!(a.total(), 0);
    }

    #[test]
    fn element_depends_on_table_length_and_order() {
        let long: Vec<u64> = (0..40).collect();
        assert_eq!(element(9, &long[..3]), element_of(9, [0, 1, 2]));
        assert_eq!(element(9, &long[..16]), element_of::<16>(9, std::array::from_fn(|at| at as u64)));
        assert_ne!(element(1, &[1, 2]), element(2, &[1, 2]));
        assert_ne!(element(1, &[1, 2]), element(1, &[2, 1]));
        assert_ne!(element(1, &[1]), element(1, &[1, 0]));
        assert_ne!(element(1, &long), element(1, &long[..39]));
    }
}
