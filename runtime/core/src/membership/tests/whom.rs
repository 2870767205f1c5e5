//! Whom to evict, and who votes.

use super::super::*;
use super::cluster::{Draw, name};
use crate::ids::{Epoch, RankId};

fn places(ranks: &[usize]) -> Vec<Place> {
    let mut next = 0;
    let mut place = |(at, ranks): (usize, &usize)| {
        let first = next;
        next += *ranks as u32;
        Place { name: name(at), incarnation: life(at as u64 + 1), ranks: (first..next).map(RankId).collect() }
    };
    ranks.iter().enumerate().map(&mut place).collect()
}

fn life(number: u64) -> Incarnation {
    Incarnation(number)
}

fn lives(numbers: &[u64]) -> Vec<Incarnation> {
    numbers.iter().copied().map(Incarnation).collect()
}

fn down(by: u64, down: &[u64]) -> Sight {
    Sight { by: life(by), epoch: Epoch(1), down: lives(down), ..Sight::default() }
}

fn misses(by: u64, round: u64, missing: &[u64]) -> Sight {
    Sight { by: life(by), epoch: Epoch(1), round: Round(round), missing: lives(missing), ..Sight::default() }
}

fn chosen(ranks: &[usize], sights: &[Sight]) -> Vec<u64> {
    choose(&places(ranks), Epoch(1), sights).into_iter().map(|l| l.incarnation.0).collect()
}

#[test]
fn one_dead_member_costs_one_member() {
    let sights = [down(1, &[3]), down(2, &[3]), down(4, &[3])];
    assert_eq!(chosen(&[1; 4], &sights), [3]);
    assert_eq!(chosen(&[1; 4], &sights[..1]), [3], "who accuses stays");
    assert_eq!(chosen(&[1; 4], &[]), [0u64; 0]);
}

#[test]
fn two_that_accuse_each_other_do_not_both_go() {
    assert_eq!(chosen(&[1; 3], &[down(1, &[2]), down(2, &[1])]), [2], "the later in view order goes");
    assert_eq!(chosen(&[1, 2, 1], &[down(1, &[2]), down(2, &[1])]), [1], "fewer ranks go");
    assert_eq!(chosen(&[2, 1], &[down(1, &[2]), down(2, &[1])]), [2]);
}

#[test]
fn more_accusers_go_before_fewer_ranks() {
    // A broken link each: one end is accused by the other, which nobody accuses.
    assert_eq!(chosen(&[9, 1, 1], &[down(2, &[1])]), [1]);
    // The middle of two broken links goes alone, though it has most ranks and is first.
    assert_eq!(chosen(&[9, 1, 1], &[down(2, &[1]), down(1, &[3])]), [1]);
}

#[test]
fn the_smallest_set_goes_where_a_network_breaks() {
    // 1 and 2 cannot reach 3, 4 and 5.
    let sights: Vec<Sight> =
        [1, 2].iter().map(|by| down(*by, &[3, 4, 5])).chain([3, 4, 5].iter().map(|by| down(*by, &[1, 2]))).collect();
    assert_eq!(chosen(&[1; 5], &sights), [1, 2]);
    // Two separate faults cost one each.
    assert_eq!(chosen(&[1; 5], &[down(1, &[2]), down(4, &[5])]), [2, 5]);
}

#[test]
fn a_missing_contribution_counts_for_the_lowest_incomplete_round_only() {
    // 4 is dead: 1 waits for it in round 9. The others are a round further and wait for 1.
    let sights = [misses(1, 9, &[4]), misses(2, 10, &[1, 4]), misses(3, 10, &[1])];
    assert_eq!(chosen(&[1; 4], &sights), [4]);
    assert_eq!(choose(&places(&[1; 4]), Epoch(1), &sights)[0].why, Why::Silent);
    // A link that is down is the reason where both are said.
    let both = Sight { down: lives(&[4]), ..misses(1, 9, &[4]) };
    assert_eq!(choose(&places(&[1; 4]), Epoch(1), &[both])[0].why, Why::LinkDown);
}

#[test]
fn who_is_gone_for_certain_goes_and_accuses_nobody() {
    let gone =
        |by: u64, of: u64| Sight { gone: vec![Leaver { incarnation: life(of), why: Why::Restarted }], ..down(by, &[]) };
    assert_eq!(chosen(&[1; 4], &[gone(1, 2), down(2, &[3, 4]), down(3, &[2])]), [2]);
}

#[test]
fn strangers_and_members_of_older_views_are_not_listened_to() {
    let older = Sight { epoch: Epoch(0), ..down(1, &[2]) };
    assert_eq!(chosen(&[1; 3], &[older, down(77, &[1, 2, 3]), down(1, &[77])]), [0u64; 0]);
}

/// The set leaves no broken link, and no smaller one does: against all sets of few members.
#[test]
fn the_set_is_as_small_as_any_that_will_do() {
    let mut draw = Draw::new(11);
    for _ in 0..3_000 {
        let count = 2 + draw.below(7);
        let links: Vec<(u64, u64)> = (0..draw.below(14))
            .map(|_| (1 + draw.below(count), 1 + draw.below(count)))
            .filter(|(by, of)| by != of)
            .collect();
        let sights: Vec<Sight> = (1..=count)
            .map(|by| down(by, &links.iter().filter(|(b, _)| *b == by).map(|(_, of)| *of).collect::<Vec<u64>>()))
            .collect();
        let set = chosen(&vec![1; count as usize], &sights);
        let will_do = |set: &[u64]| links.iter().all(|(a, b)| set.contains(a) || set.contains(b));
        assert!(will_do(&set), "{links:?} leaves {set:?}");
        let smallest = (0u32..1 << count)
            .map(|bits| (1..=count).filter(|m| bits >> (m - 1) & 1 == 1).collect::<Vec<u64>>())
            .filter(|set| will_do(set))
            .map(|set| set.len())
            .min();
        assert_eq!(Some(set.len()), smallest, "{links:?} leaves {set:?}");
    }
}

#[test]
fn a_large_pattern_ends_and_leaves_no_broken_link() {
    // 64 members, each link broken with one in three: no quick answer, but an answer.
    let mut draw = Draw::new(5);
    let sights: Vec<Sight> = (1..=64u64)
        .map(|by| down(by, &(1..=64).filter(|of| *of != by && draw.one_in(3)).collect::<Vec<u64>>()))
        .collect();
    let set = chosen(&[1; 64], &sights);
    let broken = |sight: &Sight, of: &Incarnation| !set.contains(&sight.by.0) && !set.contains(&of.0);
    assert!(set.len() < 64 && !sights.iter().any(|sight| sight.down.iter().any(|of| broken(sight, of))));
}

#[test]
fn voters_are_odd_and_the_first_in_view_order() {
    let of = |count: usize, witness: Option<u64>| -> Vec<u64> {
        voters(&places(&vec![1; count]), witness.map(Incarnation)).into_iter().map(|v| v.0).collect()
    };
    assert_eq!(of(1, None), [1]);
    assert_eq!(of(2, None), [1]);
    assert_eq!(of(3, None), [1, 2, 3]);
    assert_eq!(of(4, None), [1, 2, 3]);
    assert_eq!(of(5, None), [1, 2, 3, 4, 5]);
    assert_eq!(of(9, None), [1, 2, 3, 4, 5]);
    assert_eq!(of(1, Some(99)), [1]);
    assert_eq!(of(2, Some(99)), [1, 2, 99]);
    assert_eq!(of(3, Some(99)), [1, 2, 3]);
    assert_eq!(of(4, Some(99)), [1, 2, 3, 4, 99]);
    assert_eq!(of(6, Some(99)), [1, 2, 3, 4, 5]);
}
