use super::{Bed, config, count, required, window};
use crate::kv::cache::Copy;
use crate::kv::cache::lifecycle::Retention;

#[test]
fn pages_fall_tier_by_tier_and_the_oldest_vanish() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![4], vec![4], vec![4], vec![4]]));
    for user in 0..4 {
        bed.serve(&count(100 * user, 8));
    }
    assert_eq!(bed.pages(0), [(0, 0, 4); 4]);
    assert_eq!([0, 1, 2, 3].map(|user| bed.probe(&count(100 * user, 8))), [8; 4]);
    // The next one pushes the first one out of the last tier, from its end.
    let (id, _) = bed.start(&count(900, 4));
    assert_eq!([0, 1, 2, 3].map(|user| bed.probe(&count(100 * user, 8))), [4, 8, 8, 8]);
    assert_eq!(bed.pages(0), [(2, 0, 2), (0, 0, 4), (0, 0, 4), (0, 0, 4)]);
    bed.close(id);
}

#[test]
fn a_resume_brings_pages_back_from_every_tier() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![4], vec![4], vec![8]]));
    let (sleeper, _) = bed.prefill(&count(0, 8), &[]);
    bed.manager.suspend(sleeper).expect("it is active");
    for user in 1..3 {
        bed.serve(&count(100 * user, 8));
    }
    assert_eq!(bed.pages(0), [(0, 0, 4), (0, 0, 4), (0, 4, 0)]);
    assert!(bed.resume(sleeper));
    assert_eq!(bed.pages(0), [(4, 0, 0), (0, 0, 4), (0, 0, 4)]);
    assert_eq!(bed.manager.table(sleeper, 0).iter().flatten().count(), 4);
    bed.close(sleeper);
}

#[test]
fn a_demotion_without_room_fails_and_loses_nothing() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![4], vec![4]]));
    let mut sleepers = Vec::new();
    for user in 0..2 {
        let (id, _) = bed.prefill(&count(100 * user, 8), &[]);
        bed.manager.suspend(id).expect("it is active");
        sleepers.push(id);
    }
    assert_eq!(bed.pages(0), [(0, 4, 0), (0, 4, 0)]);
    let before = format!("{:?}", bed.manager);
    let (late, _) = bed.open(&[]);
    assert!(bed.resume(late) && !bed.resize(late, 1, 0));
    assert!(!bed.manager.resume(sleepers[0], &[], &mut bed.copies).expect("it is suspended"), "a swap has no room");
    bed.close(late);
    assert_eq!(before, format!("{:?}", bed.manager));
    assert_eq!((bed.manager.free(0, 0), bed.manager.free(1, 0)), (0, 0));
    bed.close(sleepers[1]);
    assert!(bed.resume(sleepers[0]));
}

#[test]
fn counters_of_both_tiers_follow_a_move() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![3], vec![5]]));
    bed.serve(&count(0, 4));
    let (id, _) = bed.start(&count(100, 4));
    assert_eq!((bed.manager.free(0, 0), bed.manager.free(1, 0)), (0, 4));
    assert_eq!(bed.pages(0), [(2, 0, 1), (0, 0, 1)]);
    bed.close(id);
    assert_eq!((bed.manager.free(0, 0), bed.manager.free(1, 0)), (2, 4));
}

#[test]
fn a_source_is_not_lost_while_its_destination_is_made() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![2], vec![2]]));
    bed.serve(&count(0, 4));
    bed.serve(&count(100, 4));
    assert_eq!(bed.pages(0), [(0, 0, 2), (0, 0, 2)]);
    // Both tiers are full, and what is wanted would be the first to go.
    let (id, opened) = bed.open(&count(0, 2));
    assert_eq!(opened.reused_tokens, 2);
    bed.copies.clear();
    assert!(bed.resume(id));
    assert_eq!(bed.pages(0), [(1, 0, 1), (0, 0, 1)]);
    let (down, up) = (bed.copies[0], bed.copies[1]);
    assert_eq!((down.from.tier, down.to.tier, up.from.tier, up.to.tier), (0, 1, 1, 0), "{:?}", bed.copies);
    assert_eq!((down.from.slot, bed.copies.len()), (up.to.slot, 2));
    bed.close(id);
}

#[test]
fn prefetch_brings_a_prefix_below_the_device_and_takes_nothing_of_it() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![4], vec![8], vec![12]]));
    assert!(bed.manager.prefetch(&super::SCOPE, &count(0, 8), &mut bed.copies), "nothing is known yet");
    for user in 0..4 {
        bed.serve(&count(100 * user, 8));
    }
    assert_eq!(bed.pages(0), [(0, 0, 4), (0, 0, 8), (0, 0, 4)]);
    bed.copies.clear();
    assert!(bed.manager.prefetch(&super::SCOPE, &count(0, 8), &mut bed.copies));
    bed.check();
    let rises = bed.copies.iter().filter(|Copy { from, to }| (from.tier, to.tier) == (2, 1)).count();
    assert_eq!((rises, bed.copies.len()), (4, 8), "{:?}", bed.copies);
    // What a resume needs is one step away.
    let (id, _) = bed.open(&count(0, 8));
    bed.copies.clear();
    assert!(bed.resume(id));
    assert!(bed.copies.iter().all(|copy| copy.from.tier < 2), "{:?}", bed.copies);
    bed.close(id);
}

#[test]
fn what_is_prefetched_does_not_make_way_for_what_falls() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![2], vec![2], vec![2], vec![2]]));
    let (sleeper, _) = bed.prefill(&count(0, 4), &[]);
    bed.manager.suspend(sleeper).expect("it is active");
    for user in 1..4 {
        bed.serve(&count(100 * user, 4));
    }
    assert_eq!(bed.pages(0), [(0, 0, 2), (0, 0, 2), (0, 0, 2), (0, 2, 0)]);
    assert!(bed.manager.prefetch(&super::SCOPE, &count(100, 4), &mut bed.copies));
    bed.check();
    // The pages of the second one had nowhere to fall to.
    assert_eq!(bed.pages(0), [(0, 0, 2), (0, 0, 2), (0, 0, 0), (0, 2, 0)]);
    assert_eq!([1, 2, 3].map(|user| bed.probe(&count(100 * user, 4))), [4, 0, 4]);
    bed.close(sleeper);
}

#[test]
fn prefetch_without_room_changes_nothing() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![6], vec![3], vec![2]]));
    bed.serve(&count(0, 4));
    bed.serve(&count(100, 12));
    let (full, _) = bed.prefill(&count(200, 6), &[]);
    bed.manager.suspend(full).expect("it is active");
    let (second, _) = bed.prefill(&count(300, 12), &[]);
    let wanted = count(100, 12);
    let before = format!("{:?}", bed.manager);
    bed.copies.clear();
    let low = bed.pages(0)[2];
    let fits = bed.manager.prefetch(&super::SCOPE, &wanted, &mut bed.copies);
    if !fits {
        assert_eq!((before, bed.copies.len()), (format!("{:?}", bed.manager), 0));
    }
    assert_eq!((low, fits), ((0, 0, 2), false), "held pages fill the tier that it aims at");
    bed.close(second);
}

#[test]
fn windows_and_full_attention_fall_on_their_own() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
    let mut bed = Bed::new(config(2, life_cycles, vec![vec![8, 6], vec![8, 6]]));
    bed.serve(&count(0, 8));
    bed.serve(&count(100, 8));
    assert_eq!(bed.pages(0), [(0, 0, 8), (0, 0, 0)]);
    assert_eq!(bed.pages(1), [(0, 0, 6), (0, 0, 2)]);
    assert_eq!([bed.probe(&count(0, 8)), bed.probe(&count(100, 8))], [8, 8]);
}

#[test]
fn a_full_device_does_not_let_a_sequence_resume() {
    let limited =
        super::Config { utilisation_ppm_max: 500_000, ..config(2, vec![required(Retention::Full, 0)], vec![vec![4]]) };
    let mut bed = Bed::new(limited);
    let (id, _) = bed.start(&count(0, 4));
    let (other, _) = bed.open(&[]);
    assert!(bed.resume(other), "half is not more than half");
    bed.manager.suspend(other).expect("it is active");
    assert!(bed.resize(id, 6, 0) && !bed.resume(other));
    bed.close(id);
    assert!(bed.resume(other));
}

#[test]
fn a_page_on_the_device_takes_the_place_of_the_same_one_below() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![6], vec![4]]));
    let (id, _) = bed.start(&count(0, 4));
    // Another one publishes the same first, and its pages fall.
    bed.serve(&count(0, 4));
    bed.serve(&count(100, 8));
    assert_eq!(bed.pages(0), [(2, 0, 4), (0, 0, 2)]);
    bed.commit(id, &count(0, 4));
    assert_eq!(bed.pages(0), [(2, 0, 4), (0, 0, 0)]);
    bed.close(id);
    assert_eq!((bed.probe(&count(0, 4)), bed.manager.free(1, 0)), (4, 4));
}
