//! Pools of another size while sequences are open.

use super::{Bed, config, count, required, window};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::cache::{Error, Place};
use std::collections::BTreeMap;

fn full(tiers: Vec<Vec<u32>>) -> Bed {
    Bed::new(config(2, vec![required(Retention::Full, 0)], tiers))
}

impl Bed {
    fn resize_pools(&mut self, tier: u8, slots: &[u32]) -> Result<(), Error> {
        self.copies.clear();
        let resized = self.manager.resize_pools(tier, slots, &mut self.copies);
        self.check();
        resized
    }

    /// Refused, and nothing is changed.
    fn refuses(&mut self, tier: u8, slots: &[u32]) -> Error {
        let before = format!("{:?}", self.manager);
        let refused = self.resize_pools(tier, slots).expect_err("it is refused");
        assert_eq!((before, 0), (format!("{:?}", self.manager), self.copies.len()));
        refused
    }

    /// What the pages of a sequence hold, given what lies in each slot.
    fn reads(&self, id: crate::kv::cache::SequenceId, bytes: &BTreeMap<Place, u32>) -> Vec<u32> {
        self.manager.table(id, 0).into_iter().flatten().map(|place| bytes[&place]).collect()
    }
}

#[test]
fn pages_leave_the_slots_that_go_with_what_they_hold() {
    let mut bed = full(vec![vec![8]]);
    // The first four slots are free again; the sleeper has the last ones.
    let (first, _) = bed.prefill(&count(0, 8), &[]);
    let (sleeper, _) = bed.prefill(&count(100, 8), &[]);
    let mut bytes: BTreeMap<Place, u32> = BTreeMap::new();
    for (ordinal, place) in (0..).zip(bed.manager.table(sleeper, 0).into_iter().flatten()) {
        bytes.insert(place, ordinal);
    }
    assert!(bytes.keys().all(|place| place.slot >= 4));
    bed.close(first);
    bed.manager.clear().expect_err("a sequence is open");
    bed.manager.suspend(sleeper).expect("it is active");
    bed.resize_pools(0, &[5]).expect("the sleeper's four pages fit");
    for copy in &bed.copies {
        assert!(copy.to.slot < 5 && copy.from.slot < 8);
        let moved = bytes[&copy.from];
        bytes.insert(copy.to, moved);
    }
    // Slot 4 stays where it is.
    assert_eq!(bed.copies.len(), 3);
    bytes.retain(|place, _| place.slot < 5);
    assert!(bed.resume(sleeper));
    assert_eq!(bed.reads(sleeper, &bytes), [0, 1, 2, 3]);
    assert_eq!((bed.manager.free(0, 0), bed.manager.config().tiers.clone()), (0, vec![vec![5]]));
    // One page of the first sequence is left, the oldest of its chain.
    assert_eq!(bed.probe(&count(0, 8)), 2);
    bed.close(sleeper);
    bed.resize_pools(0, &[9]).expect("it grows");
    bed.manager.clear().expect("nothing is open");
    assert_eq!(bed.manager.free(0, 0), 9);
    assert_eq!(bed.serve(&count(0, 18)), 0);
}

#[test]
fn what_does_not_fit_falls_a_tier_or_vanishes() {
    let mut bed = full(vec![vec![4], vec![2]]);
    bed.serve(&count(0, 8));
    bed.resize_pools(0, &[1]).expect("three pages go");
    // The oldest are those of the chain's end: one vanishes, two fall.
    assert_eq!(bed.pages(0), [(0, 0, 1), (0, 0, 2)]);
    assert_eq!(bed.probe(&count(0, 8)), 6);
    bed.resize_pools(1, &[0]).expect("nobody holds them");
    assert_eq!((bed.probe(&count(0, 8)), bed.manager.evicted_pages()), (2, 3));
    bed.resize_pools(1, &[3]).expect("it grows");
    assert_eq!(bed.manager.free(1, 0), 3);
}

#[test]
fn a_pool_keeps_what_is_held_and_its_floor() {
    let mut bed = full(vec![vec![8]]);
    let (sleeper, _) = bed.prefill(&count(0, 8), &[]);
    assert_eq!(bed.refuses(0, &[8]), Error::ActiveSequences { active: 1 });
    bed.manager.suspend(sleeper).expect("it is active");
    let small = |slots, floor| Error::PoolTooSmall { tier: 0, group: 0, slots, floor };
    assert_eq!(bed.refuses(0, &[3]), small(3, 4));
    assert_eq!(small(3, 4).to_string(), "KV pool group 0 of tier 0 cannot do with 3 slots (at least 4)");
    assert_eq!(bed.refuses(1, &[3]), Error::UnknownTier { tier: 1, tiers: 1 });
    assert_eq!(bed.refuses(0, &[3, 3]), Error::WrongPools { found: 2, groups: 1 });
    assert_eq!(bed.refuses(0, &[u32::MAX]), Error::TooManySlots { slots: u64::from(u32::MAX) });
    bed.manager.set_floors(&[6]).expect("it has 8");
    assert_eq!(bed.refuses(0, &[5]), small(5, 6));
    assert_eq!(bed.manager.set_floors(&[9]), Err(small(8, 9)));
    bed.resize_pools(0, &[6]).expect("the floor");
    bed.close(sleeper);
    bed.manager.clear().expect("nothing is open");
    assert_eq!(bed.refuses(0, &[0]), small(0, 6));
}

#[test]
fn what_may_fall_does_not_take_the_room_to_come_back() {
    let mut bed = full(vec![vec![8], vec![8]]);
    let (sleeper, _) = bed.prefill(&count(0, 8), &[]);
    bed.manager.suspend(sleeper).expect("it is active");
    // All four pages could fall, but then they could never be resumed.
    assert_eq!(bed.refuses(0, &[3]), Error::PoolTooSmall { tier: 0, group: 0, slots: 3, floor: 4 });
    bed.resize_pools(0, &[4]).expect("they fit");
    assert!(bed.resume(sleeper));
    // A new sequence needs the copy of its partial last block beside the block itself.
    bed.close(sleeper);
    let (late, opened) = bed.open(&count(0, 7));
    assert_eq!(opened.reused_tokens, 7);
    assert_eq!(bed.refuses(0, &[4]), Error::PoolTooSmall { tier: 0, group: 0, slots: 4, floor: 5 });
    bed.resize_pools(0, &[5]).expect("it fits");
    assert!(bed.resume(late));
}

#[test]
fn one_pool_that_cannot_shrink_keeps_all_from_it() {
    let cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
    let mut bed = Bed::new(config(2, cycles, vec![vec![8, 8], vec![2, 0]]));
    let (sleeper, _) = bed.prefill(&count(0, 8), &[]);
    bed.manager.suspend(sleeper).expect("it is active");
    let held = bed.manager.census()[1][0].held;
    assert!(held >= 2, "{held}");
    let refused = bed.refuses(0, &[6, held - 1]);
    assert_eq!(refused, Error::PoolTooSmall { tier: 0, group: 1, slots: held - 1, floor: held });
    bed.resize_pools(0, &[6, held]).expect("both fit");
    // Windows give to full attention, and what is written later still has its place.
    bed.resize_pools(0, &[12, held]).expect("it grows");
    assert!(bed.resume(sleeper) && bed.resize(sleeper, 8, 8));
    bed.close(sleeper);
    assert_eq!(bed.probe(&count(0, 8)), 8);
}
