//! Random faults, by seed.

use super::cluster::Setup;
use super::faults::run;
use crate::ids::Epoch;

#[test]
fn without_faults_the_first_view_lasts_and_every_announcement_comes_through_once() {
    for nodes in [1, 2, 3, 5, 7] {
        let setup = Setup::of(nodes, 7);
        let (cluster, came) = run(&setup, 6_000, 0).unwrap_or_else(|fault| panic!("{nodes} nodes: {fault}"));
        assert_eq!((cluster.truth.epoch, came.over), (Epoch(1), false), "{nodes} nodes");
        assert!(came.rounds > 20, "{nodes} nodes: {} rounds", came.rounds);
    }
}

#[test]
fn nodes_from_outside_join_one_view() {
    for seed in 1..=20 {
        let setup = Setup { outside: 2, ..Setup::of(5, seed) };
        let (cluster, _) = run(&setup, 3_000, 0).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(cluster.truth.members.len(), 5, "seed {seed}");
    }
}

/// Runs `seeds` under rising rates of faults; the number of views, and of runs that left nobody.
fn runs(seeds: std::ops::RangeInclusive<u64>, steps: u64) -> (u64, u64) {
    let (mut views, mut over) = (0, 0);
    for seed in seeds {
        let nodes = 3 + (seed % 5) as usize;
        let setup = Setup { outside: (seed % 3) as usize / 2, ..Setup::of(nodes, seed) };
        let faults = 2 + seed / 5 % 14;
        let (_, came) =
            run(&setup, steps, faults).unwrap_or_else(|fault| panic!("seed {seed}, {nodes} nodes: {fault}"));
        views += came.views;
        over += u64::from(came.over);
    }
    (views, over)
}

/// Lives, links and leaders end at any moment, nodes stop and wake, join and leave.
#[test]
fn whatever_happens_rounds_agree_and_views_follow() {
    let (views, over) = runs(1..=400, 5_000);
    assert!(views > 1500, "views changed under the faults: {views}");
    assert!(over < 10, "runs that left nobody: {over}");
}

#[test]
#[ignore = "ten thousand seeds take minutes"]
fn whatever_happens_in_many_seeds_rounds_agree_and_views_follow() {
    let (views, over) = runs(1_000..=11_000, 8_000);
    assert!(views > 60_000, "views changed under the faults: {views}");
    assert!(over < 250, "runs that left nobody: {over}");
}
