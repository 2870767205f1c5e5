//! When pools should have other sizes.

use super::sizing::{example_cycles, example_demand};
use crate::kv::cache::rebalance::{Config, Pools, Rebalancer};
use crate::kv::cache::sizing::{Method, Plan, Request, Tier, plan};
use proptest::prelude::*;

fn pools(bytes: u64) -> Pools {
    let (life_cycles, sizes) = example_cycles();
    Pools { life_cycles, sizes, tiers: vec![Tier::device(bytes), Tier::below(4 * bytes)], demand: example_demand() }
}

fn planned(pools: &Pools) -> Plan {
    let Pools { life_cycles, sizes, tiers, demand } = pools;
    plan(&Request { life_cycles, sizes, tiers, demand, method: Method::Balanced, ratio: None })
        .expect("a right request")
}

/// Closes sequences of these lengths in turn; the proposals that were followed.
fn run(rebalancer: &mut Rebalancer, current: &mut Vec<Vec<u32>>, lengths: &[u32], sequences: usize) -> usize {
    let mut followed = 0;
    for at in 0..sequences {
        let length = lengths[at % lengths.len()];
        rebalancer.created(length);
        rebalancer.closed(length, length.saturating_sub(1));
        let now_us = at as u64 * 1_000_000;
        if let Some(proposed) = rebalancer.propose(now_us, current) {
            (*current, followed) = (proposed, followed + 1);
            rebalancer.acted(now_us);
        }
    }
    followed
}

#[test]
fn what_was_planned_for_stays() {
    let pools = pools(64 << 30);
    let mut current = planned(&pools).slots();
    let before = current.clone();
    let mut rebalancer = Rebalancer::new(Config::default(), pools);
    assert_eq!(run(&mut rebalancer, &mut current, &[65_536], 5000), 0);
    assert_eq!(before, current);
}

#[test]
fn shorter_conversations_move_room_to_the_windows_once_it_is_time() {
    let pools = pools(64 << 30);
    let mut current = planned(&pools).slots();
    let (full, kept) = (current[0][0], current[0][1]);
    let mut rebalancer = Rebalancer::new(Config::default(), pools);
    // Not before 2000 samples.
    assert_eq!(run(&mut rebalancer, &mut current, &[8192], 1999), 0);
    assert_eq!(run(&mut rebalancer, &mut current, &[8192], 3000), 1);
    assert!(current[0][0] < full && current[0][1] > 5 * kept, "{current:?}");
    // The private window has what runs at once, whatever is kept.
    assert_eq!(current[0][2], 190);
}

#[test]
fn a_cooldown_passes_between_two_changes() {
    let pools = pools(64 << 30);
    let mut current = planned(&pools).slots();
    let config = Config { samples_min: 1, interval: 1, decay: 0.5, ..Config::default() };
    let mut rebalancer = Rebalancer::new(config, pools);
    rebalancer.closed(4096, 4096);
    current = rebalancer.propose(7, &current).expect("it is far off");
    rebalancer.acted(7);
    (0..20).for_each(|_| rebalancer.closed(65_536, 65_536));
    assert_eq!(rebalancer.propose(7 + config.cooldown_us - 1, &current), None);
    assert!(rebalancer.propose(7 + config.cooldown_us, &current).is_some());
    // It looks once for each interval.
    assert_eq!(rebalancer.propose(7 + config.cooldown_us, &current), None);
}

#[test]
fn long_sequences_weigh_more_and_old_ones_fade() {
    let mut rebalancer = Rebalancer::new(Config { decay: 0.5, ..Config::default() }, pools(1 << 36));
    rebalancer.closed(700, 100);
    rebalancer.closed(100, 100);
    // (700² / 2 + 100²) / (1 / 2 + 1), and its root.
    assert_eq!(rebalancer.demand(0).workload.sequence_tokens, 412);
    assert_eq!(rebalancer.demand(0).retained.tokens, 100);
    // Below the device what was reused counts, where anything was.
    assert_eq!(rebalancer.demand(1).retained.tokens, 100);
    [0, 50, 0].into_iter().for_each(|reused| rebalancer.created(reused));
    assert_eq!(rebalancer.demand(1).retained.tokens, 50);
}

#[test]
fn noise_at_the_end_of_a_block_moves_nothing() {
    let pools = pools(64 << 30);
    let mut current = planned(&pools).slots();
    let config = Config { decay: 0.5, ..Config::default() };
    let mut rebalancer = Rebalancer::new(config, pools);
    // One block or two, which would halve the room for windows.
    assert_eq!(run(&mut rebalancer, &mut current, &[127, 128, 129, 130, 126], 4000), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn no_proposal_takes_from_a_window_what_its_end_points_need(
        lengths in proptest::collection::vec(1_u32..65_536, 1..20),
        turns in 1_u32..9,
        end_points in 1_u32..5,
    ) {
        let mut pools = pools(64 << 30);
        (pools.demand.retained.turns, pools.demand.retained.end_points) = (turns, Some(end_points));
        let (cycles, sizes, quota) = (pools.life_cycles.clone(), pools.sizes.clone(), pools.tiers[0].bytes);
        let current = planned(&pools).slots();
        let config = Config { samples_min: 1, interval: 1, threshold: 1.0, ..Config::default() };
        let mut rebalancer = Rebalancer::new(config, pools);
        for length in lengths {
            rebalancer.closed(length, length);
        }
        let Some(proposed) = rebalancer.propose(0, &current) else { return Ok(()) };
        let demand = rebalancer.demand(0);
        let (live, each, floors) = (demand.live(&cycles), demand.conversation(&cycles), demand.floors(&cycles));
        // C from the definition, floors apart.
        let bytes = |slots: &[u64]| -> f64 { slots.iter().zip(&sizes).map(|(slots, sizes)| (slots * sizes[0]) as f64).sum() };
        let mut conversations = (quota as f64 - bytes(&live)) / bytes(&each);
        let at_floor = |at: usize| u64::from(proposed[0][at]) == floors[at];
        if at_floor(0) {
            let fixed = (floors[0] * sizes[0][0]) as f64 - (live[0] * sizes[0][0]) as f64;
            conversations = (quota as f64 - bytes(&live) - fixed) / ((each[1] * sizes[1][0]) as f64);
        }
        let least = live[1] as f64 + conversations * each[1] as f64;
        prop_assert!(f64::from(proposed[0][1]) > least - 1.0, "{} of {}", proposed[0][1], least);
    }

    #[test]
    fn a_steady_load_is_left_alone_after_one_change(lengths in proptest::collection::vec(1_u32..65_536, 1..40)) {
        let pools = pools(64 << 30);
        let mut current = planned(&pools).slots();
        let mut rebalancer = Rebalancer::new(Config::default(), pools);
        let first = run(&mut rebalancer, &mut current, &lengths, 20_000);
        prop_assert!(first <= 1, "{} changes", first);
        let settled = current.clone();
        prop_assert_eq!(run(&mut rebalancer, &mut current, &lengths, 20_000), 0);
        prop_assert_eq!(settled, current);
    }
}
