//! The plan of all pools, from the worked example of the specification's section 8 on.

use super::{required, some, window};
use crate::kv::cache::checkpoint::Snapshots;
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use crate::kv::cache::sizing::demand::{Demand, Retained};
use crate::kv::cache::sizing::{Method, Plan, PlanError, Request, SlotSizes, Tier, Warning, Workload, plan};
use proptest::prelude::*;

pub(super) const MIB: u64 = 1 << 20;

/// Full attention, a required window and a private one.
pub(super) fn example_cycles() -> (Vec<LifeCycle>, Vec<SlotSizes>) {
    let private = LifeCycle { policy: Policy::Private, ..required(window(128), 2) };
    let cycles = vec![required(Retention::Full, 0), required(window(128), 1), private];
    (cycles, vec![vec![MIB * 3 / 2], vec![2 * MIB], vec![MIB / 2]])
}

pub(super) fn example_demand() -> Demand {
    Demand {
        workload: Workload {
            block_tokens: some(128),
            sequence_tokens: 65_536,
            requests: 64,
            step_tokens_max: 8192,
            extra_tokens: 0,
            draft_tokens: 3,
            system_prompt_tokens: 0,
        },
        retained: Retained { tokens: 65_536, turns: 5, end_points: Some(1), snapshots: Snapshots::default() },
        sequence_tokens_max: 65_536,
        suspended_requests: 0,
        reserved_states: 0,
    }
}

fn example(demand: &Demand, method: Method, ratio: Option<&[f64]>) -> Result<Plan, PlanError> {
    let (life_cycles, sizes) = example_cycles();
    let tiers = [Tier::device(64 << 30), Tier::below(256 << 30)];
    plan(&Request { life_cycles: &life_cycles, sizes: &sizes, tiers: &tiers, demand, method, ratio })
}

fn slots(plan: &Plan, tier: usize) -> Vec<u64> {
    plan.tiers[tier].pools.iter().map(|pool| pool.slots).collect()
}

fn tenths(conversations: Option<f64>) -> String {
    conversations.map_or("none".into(), |holds| format!("{holds:.1}"))
}

#[test]
fn the_balanced_row_of_the_worked_example_comes_out() {
    let found = example(&example_demand(), Method::Balanced, None).expect("a right request");
    assert_eq!(slots(&found, 0), [42_274, 1014, 190]);
    assert_eq!(found.conversation, [512, 10, 0]);
    let pools = &found.tiers[0].pools;
    assert_eq!(pools.iter().map(|pool| pool.live).collect::<Vec<_>>(), [64, 190, 190]);
    assert_eq!([0, 1, 2].map(|at| tenths(pools[at].conversations)), ["82.4", "82.4", "none"]);
    assert_eq!(tenths(found.tiers[0].conversations), "82.4");
    assert_eq!((found.bottleneck, &found.warnings[..]), (None, &[][..]));
    // Below the device nothing is private, and all is for conversations.
    assert_eq!(slots(&found, 1)[2], 0);
    assert_eq!(tenths(found.tiers[1].conversations), "332.6");
    assert_eq!(found.slots()[0], [42_274, 1014, 190]);
}

#[test]
fn the_other_rows_of_the_worked_example_come_out() {
    let before = example(&example_demand(), Method::TypicalStep, None).expect("a right request");
    assert_eq!((slots(&before, 0), before.bottleneck), (vec![43_264, 256, 256], Some(1)));
    assert_eq!(tenths(before.tiers[0].pools[1].conversations), "6.6");
    assert_eq!(before.warnings, [Warning::FewerThanRequests { conversations: 6.6, requests: 64 }]);
    let retaining = example(&example_demand(), Method::TypicalStepRetaining, None).expect("a right request");
    assert_eq!(slots(&retaining, 0), [42_176, 912, 896]);
    assert_eq!(tenths(retaining.tiers[0].pools[1].conversations), "72.2");
    // One request at a time generates nothing, so nothing is added.
    let mut alone = example_demand();
    alone.workload.requests = 1;
    let slots_of = |method| slots(&example(&alone, method, None).expect("a right request"), 0);
    assert_eq!(slots_of(Method::TypicalStepRetaining), slots_of(Method::TypicalStep));
    assert_eq!(slots_of(Method::TypicalStep), [16_384; 3]);
}

#[test]
fn an_explicit_ratio_goes_before_every_method_but_not_below_floors() {
    let ratio = [0.1, 0.8999, 0.0001];
    let found = example(&example_demand(), Method::Balanced, Some(&ratio)).expect("a right request");
    let pools = slots(&found, 0);
    // A private window keeps the chunk and the other requests' blocks whatever its share.
    assert_eq!(pools[2], 64 + 2 + 63);
    assert!(pools[0] * 3 / 2 < 6600 && pools[1] * 2 > 58_000, "{pools:?}");
    let proportion = |at: usize| slots(&found, 1)[at] as f64 / pools[at] as f64;
    assert!((proportion(0) / proportion(1) - 1.0).abs() < 1e-3, "colder tiers have the device's proportions");
    for (wrong, why) in [
        (&[0.5, 0.5][..], "pool_ratio has 2 numbers, there are 3 life cycles"),
        (&[0.5, 0.5, 0.0], "pool_ratio is 0 (each share must be positive)"),
        (&[0.5, 0.6, -0.1], "pool_ratio is -0.1 (each share must be positive)"),
        (&[0.5, 0.25, 0.125], "pool_ratio is 0.875 (in sum; the shares must add up to 1)"),
        (&[f64::NAN, 0.5, 0.5], "pool_ratio is NaN (each share must be positive)"),
    ] {
        let refused = example(&example_demand(), Method::Balanced, Some(wrong)).expect_err("it is refused");
        assert_eq!(refused.to_string(), why);
    }
    assert!(example(&example_demand(), Method::Balanced, Some(&[0.25, 0.5, 0.250_000_9])).is_ok());
}

#[test]
fn a_turn_leaves_its_ends_and_the_rungs_of_the_ladder() {
    let (cycles, _) = example_cycles();
    let mut demand = example_demand();
    demand.retained.end_points = None;
    // Of 512, 2048 and 8192 tokens before the private window, two are within one step.
    assert_eq!((demand.end_points(&cycles), demand.conversation(&cycles)), (4, vec![512, 5 * 4 * 2, 0]));
    demand.workload.step_tokens_max = 16_384;
    assert_eq!(demand.end_points(&cycles), 5);
    demand.retained.tokens = 700;
    assert_eq!((demand.end_points(&cycles), demand.conversation(&cycles)[0]), (2, 6));
    // A conversation of six blocks has no more windows than blocks, and a page for each end inside one.
    assert_eq!(demand.conversation(&cycles)[1], 6 + 5 * 2);
}

#[test]
fn states_of_retained_turns_are_counted() {
    let mut demand = example_demand();
    demand.retained.turns = 3;
    demand.retained.snapshots = Snapshots { from_end: vec![0], ..Snapshots::default() };
    let cycles = vec![required(Retention::Full, 0), required(Retention::State, 1)];
    // The context chunk takes its snapshot while those of three turns are there.
    assert_eq!((demand.live(&cycles)[1], demand.conversation(&cycles)[1]), (64 + 1, 3));
    // A length at a block's end needs no less for what runs than one inside a block.
    demand.workload.sequence_tokens -= 64;
    assert_eq!(demand.live(&[required(window(128), 0)]), [190]);
    demand.reserved_states = 2;
    assert_eq!((demand.live(&cycles)[1], demand.floors(&cycles)[1]), (67, 66));
    let sizes = [vec![MIB], vec![64 * MIB]];
    let tiers = [Tier::device(64 << 30)];
    let request =
        |demand, tiers, method| Request { life_cycles: &cycles, sizes: &sizes, tiers, demand, method, ratio: None };
    for method in [Method::Balanced, Method::TypicalStep, Method::TypicalStepRetaining] {
        let found = plan(&request(&demand, &tiers, method)).expect("a right request");
        assert!(slots(&found, 0)[1] >= 66, "{method:?}");
    }
    let small = [Tier::device(4 << 30)];
    let refused = plan(&request(&demand, &small, Method::Balanced)).expect_err("66 states take more");
    assert_eq!(
        refused.to_string(),
        "device quota of 4294967296 bytes does not hold the states of 66 resident and reserved requests beside the other \
         pools' floors (5032116224 bytes)"
    );
}

#[test]
fn too_little_memory_is_told() {
    let (life_cycles, sizes) = example_cycles();
    let demand = example_demand();
    let of = |bytes: u64| {
        let tiers = [Tier::device(bytes)];
        let (life_cycles, sizes) = (&life_cycles[..], &sizes[..]);
        plan(&Request { life_cycles, sizes, tiers: &tiers, demand: &demand, method: Method::Balanced, ratio: None })
    };
    // 575 slots for the longest request and the others' first blocks, and 129 for each window.
    let floors = 575 * MIB * 3 / 2 + 129 * MIB * 5 / 2;
    let least = of(1 << 30).expect("floors are taken");
    assert_eq!(least.warnings[0], Warning::BelowFloors { quota: 1 << 30, floors });
    assert_eq!((slots(&least, 0), least.tiers[0].used), (vec![575, 129, 129], floors));
    let mut busy = example_demand();
    (busy.workload.step_tokens_max, busy.workload.sequence_tokens, busy.workload.requests) = (128, 128, 2000);
    busy.sequence_tokens_max = 128;
    let tiers = [Tier::device(floors)];
    let request = Request {
        life_cycles: &life_cycles,
        sizes: &sizes,
        tiers: &tiers,
        demand: &busy,
        method: Method::Balanced,
        ratio: None,
    };
    assert!(
        matches!(plan(&request), Ok(Plan { warnings, .. }) if matches!(warnings[..], [Warning::BelowFloors { .. }, ..]))
    );
}

#[test]
fn values_that_cannot_be_are_named() {
    let refused = |change: fn(&mut Demand)| {
        let mut demand = example_demand();
        change(&mut demand);
        example(&demand, Method::Balanced, None).expect_err("it is refused").to_string()
    };
    assert_eq!(refused(|of| of.workload.requests = 0), "requests is 0 (it must be above 0)");
    assert_eq!(refused(|of| of.retained.turns = 0), "turns is 0 (it must be above 0)");
    assert_eq!(refused(|of| of.workload.sequence_tokens = 0), "sequence_tokens is 0 (it must be above 0)");
    assert_eq!(refused(|of| of.sequence_tokens_max = 1), "sequence_tokens is 65536 (it is above sequence_tokens_max)");
    let demand = example_demand();
    let cycles = [required(Retention::Full, 1)];
    let tiers = [Tier::device(1 << 30)];
    let refused = |sizes: &[SlotSizes], tiers: &[Tier]| {
        let (life_cycles, demand) = (&cycles[..], &demand);
        let request = Request { life_cycles, sizes, tiers, demand, method: Method::Balanced, ratio: None };
        plan(&request).expect_err("refused").to_string()
    };
    assert_eq!(refused(&[vec![1]], &tiers), "life cycle 0 is in pool group 1, but there are 1");
    assert_eq!(refused(&[vec![1], vec![0]], &tiers), "slot_bytes is [0] (a slot has bytes)");
    assert_eq!(refused(&[vec![1], vec![1]], &[]), "tiers is empty (the device is the first)");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn a_balanced_plan_fits_holds_what_it_says_and_wastes_no_conversation(
        (bytes, host) in (1_u64 << 30..1 << 37, 1_u64 << 20..1 << 37),
        (tokens, requests, turns) in (1_u32..200_000, 1_u32..80, 1_u32..9),
        step in 1_u32..20_000,
    ) {
        let (life_cycles, sizes) = example_cycles();
        let mut demand = example_demand();
        (demand.workload.sequence_tokens, demand.retained.tokens, demand.sequence_tokens_max) = (tokens, tokens, tokens);
        (demand.workload.requests, demand.retained.turns, demand.workload.step_tokens_max) = (requests, turns, step);
        (demand.retained.end_points, demand.suspended_requests) = (None, requests / 2);
        let tiers = [Tier::device(bytes), Tier::below(host)];
        let (life_cycles, sizes, tiers, demand) = (&life_cycles[..], &sizes[..], &tiers[..], &demand);
        let request = Request { life_cycles, sizes, tiers, demand, method: Method::Balanced, ratio: None };
        let found = plan(&request).expect("a right request");
        let floors = demand.floors(life_cycles);
        for (tier, of) in found.tiers.iter().enumerate() {
            let raised = tier == 0 && found.warnings.iter().any(|one| matches!(one, Warning::BelowFloors { .. }));
            prop_assert!(of.used <= of.quota || raised);
            prop_assert_eq!(of.used, of.pools.iter().map(|pool| pool.bytes).sum::<u64>());
        }
        prop_assert!(slots(&found, 0).iter().zip(&floors).all(|(slots, floor)| slots >= floor));
        if found.warnings.iter().all(|one| matches!(one, Warning::FewerThanRequests { .. })) {
            let at_floor = slots(&found, 0).iter().zip(&floors).any(|(slots, floor)| slots == floor);
            let each: u64 = found.conversation.iter().zip(sizes).map(|(slots, sizes)| slots * sizes[0]).sum();
            let left = found.tiers[0].quota - found.tiers[0].used;
            prop_assert!(at_floor || left < each + 4 * MIB, "{} bytes are left, a conversation takes {}", left, each);
        }
    }
}
