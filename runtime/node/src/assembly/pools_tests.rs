use super::*;
use crate::config::{Period, Size, Sizing};
use proptest::prelude::*;
use starling_core::kv::cache::lifecycle::{Policy, Priority};

const KIB: u64 = 1 << 10;

fn group(retention: Retention, page_bytes: u64, group: u8) -> LayerGroup {
    let life_cycle = LifeCycle { retention, policy: Policy::Required, group, priority: Priority::default() };
    LayerGroup { layers: vec![usize::from(group)], life_cycle, page_bytes }
}

fn window(tokens: u32) -> Retention {
    Retention::Window { tokens: NonZeroU32::new(tokens).expect("a window"), sink_blocks: 0 }
}

/// As Gemma 3 has them: five layers with a window of 512 to each that attends to everything.
fn gemma() -> Vec<LayerGroup> {
    vec![group(window(512), 80 * KIB, 0), group(Retention::Full, 16 * KIB, 1)]
}

fn config(memory: Size) -> Config {
    let mut config = Config::default();
    config.engine.kv_memory = memory;
    config.engine.sequences_max = 8;
    config
}

fn blocks(config: &Config, groups: &[LayerGroup], context: u32) -> Vec<u32> {
    manager(config, groups, context).expect("pools").cache.tiers.remove(0)
}

fn taken(blocks: &[u32], groups: &[LayerGroup]) -> u64 {
    blocks.iter().zip(groups).map(|(blocks, group)| u64::from(*blocks) * group.page_bytes).sum()
}

fn refused(config: &Config, groups: &[LayerGroup], context: u32) -> String {
    manager(config, groups, context).expect_err("a refusal").to_string()
}

#[test]
fn a_single_pool_takes_all_memory_whatever_the_sizing() {
    let groups = [group(Retention::Full, 96 * KIB, 0)];
    let mut config = config(Size::mib(512));
    for sizing in [Sizing::Balanced, Sizing::TypicalStep, Sizing::TypicalStepRetaining] {
        config.kv.sizing = sizing;
        assert_eq!(blocks(&config, &groups, 8192), [(512 << 10) / 96]);
    }
    let manager = manager(&config, &groups, 8192).expect("pools");
    assert_eq!((manager.publishing, manager.cache.commits), (Publishing::AllReusable, Commits::EveryBlock));
}

#[test]
fn windows_get_what_their_conversations_need_and_no_more() {
    let (config, groups) = (config(Size::mib(2048)), gemma());
    let found = blocks(&config, &groups, 32_768);
    // A conversation of half the context has 1024 blocks of full attention, and an end point's window has 33 pages. A turn has
    // its two ends and no rung, which would lie before its last chunk of 512 tokens.
    let by_tokens = f64::from(found[1]) / 1024.0;
    let by_windows = f64::from(found[0]) / 66.0;
    assert!(by_tokens > 50.0 && by_windows > by_tokens, "{found:?}");
    // Besides, the windows of eight requests are live, one of which has a chunk of 32 blocks.
    assert!((by_windows - by_tokens) * 66.0 < 8.0 * 35.0 + 66.0, "{found:?}");
    assert!(taken(&found, &groups) > (2047 << 20), "{found:?}");
}

#[test]
fn more_turns_make_the_windows_pool_larger() {
    let (mut config, groups) = (config(Size::mib(2048)), gemma());
    let one = blocks(&config, &groups, 32_768);
    config.kv.turns_max = 5;
    let five = blocks(&config, &groups, 32_768);
    assert!(five[0] > one[0] * 3 / 2 && five[1] < one[1], "{one:?} {five:?}");
    // Whoever keeps no turns has no use for them.
    config.kv.reuse_policy = Some(ReusePolicy::PerRequest);
    assert_eq!(blocks(&config, &groups, 32_768), one);
}

#[test]
fn longer_conversations_want_less_for_windows() {
    let (mut config, groups) = (config(Size::mib(2048)), gemma());
    let half = blocks(&config, &groups, 32_768);
    config.kv.sequence_tokens = Some(16_384);
    assert_eq!(blocks(&config, &groups, 32_768), half);
    config.kv.sequence_tokens = Some(32_768);
    assert!(blocks(&config, &groups, 32_768)[0] < half[0]);
    config.kv.sequence_tokens = Some(40_000);
    assert_eq!(refused(&config, &groups, 32_768), "kv.sequence-tokens is 40000, a request has at most 32768");
}

#[test]
fn a_ratio_goes_before_the_sizing() {
    let (mut config, groups) = (config(Size::mib(2048)), gemma());
    config.kv.pool_ratio = Some(vec![0.25, 0.75]);
    for sizing in [Sizing::Balanced, Sizing::TypicalStep] {
        config.kv.sizing = sizing;
        let found = blocks(&config, &groups, 32_768);
        // What is left of a window's page goes to the larger pool.
        assert_eq!(found, [(512 << 10) / 80, (1536 << 10) / 16 + 3]);
    }
    // A pool holds one longest sequence all the same.
    config.kv.pool_ratio = Some(vec![0.999, 0.001]);
    let found = blocks(&config, &groups, 32_768);
    assert!(found[1] >= 2048 && taken(&found, &groups) <= 2048 << 20, "{found:?}");
    config.kv.pool_ratio = Some(vec![1.0]);
    let says = "kv.pool-ratio has 1 numbers, one for each life cycle of the model is wanted (2)";
    assert_eq!(refused(&config, &groups, 32_768), says);
}

#[test]
fn memory_that_does_not_hold_one_sequence_is_named() {
    let (mut config, groups) = (config(Size::mib(32)), gemma());
    let says = refused(&config, &groups, 32_768);
    assert!(says.contains("engine.kv-memory 33554432 bytes; one sequence of 32768 tokens takes "), "{says}");
    assert!(says.ends_with("(16 tokens a block)"), "{says}");
    config.engine.kv_memory = Size::mib(40);
    let found = blocks(&config, &groups, 32_768);
    // 512 tokens of window, two steps of 512 ahead, a block's length that is not told of yet, and two blocks begun.
    assert!((99..=102).contains(&found[0]) && (2048..2070).contains(&found[1]), "{found:?}");
    assert!(taken(&found, &groups) <= 40 << 20, "{found:?}");
}

#[test]
fn a_policy_that_does_not_go_with_the_model_is_replaced_or_refused() {
    let hybrid = [group(Retention::State, 4096 * KIB, 0), group(Retention::Full, 16 * KIB, 1)];
    let mut config = config(Size::mib(512));
    let policy = |config: &Config, groups: &[LayerGroup]| manager(config, groups, 8192).expect("pools").publishing;
    assert_eq!(policy(&config, &hybrid), Publishing::PerConversation);
    assert_eq!(policy(&config, &gemma()), Publishing::PerConversation);
    config.kv.reuse_policy = Some(ReusePolicy::AllReusable);
    assert_eq!(policy(&config, &hybrid), Publishing::PerRequest);
    assert_eq!(policy(&config, &gemma()), Publishing::AllReusable);
    config.kv.endpoint_rewind_tokens = 64;
    assert_eq!(manager(&config, &gemma(), 8192).expect("pools").cache.endpoint_rewind_tokens, 64);
    let says = "kv.endpoint-rewind-tokens is 64, which goes with all-reusable only; this model is served per-request";
    assert_eq!(refused(&config, &hybrid, 8192), says);
    config.kv.reuse_policy = None;
    assert!(refused(&config, &gemma(), 8192).ends_with("this model is served per-conversation"));
}

#[test]
fn the_manager_is_built_as_the_keys_say() {
    let mut config = config(Size::mib(512));
    let kv = &mut config.kv;
    (kv.turns_max, kv.conversations_max, kv.partial_reuse, kv.match_backoff_tokens) = (3, 9, false, 2);
    (kv.scope_quota_percent, kv.resume_utilisation_percent_max) = (Some(40), 95);
    (kv.branch_snapshots, kv.snapshot_offsets_from_start, kv.snapshot_offsets_from_end) =
        (true, vec![128], vec![0, 32]);
    let found = manager(&config, &gemma(), 8192).expect("pools");
    let cache = &found.cache;
    assert_eq!((cache.turns_max, cache.conversations_max, cache.match_backoff_tokens), (3, 9, 2));
    assert_eq!(
        (cache.scope_quota_ppm, cache.utilisation_ppm_max, cache.partial_reuse),
        (Some(400_000), 950_000, false)
    );
    assert_eq!(cache.conversation_ttl_us, Some(3_600_000_000));
    assert!(found.snapshots.at_branches);
    assert_eq!((found.snapshots.from_start, found.snapshots.from_end), (vec![128], vec![0, 32]));
    config.kv.conversation_ttl = Period::secs(0);
    assert_eq!(manager(&config, &gemma(), 8192).expect("pools").cache.conversation_ttl_us, None);
}

prop_compose! {
    fn any_groups()(
        kinds in prop::collection::vec((0..3_u8, 1..5000_u32, 1..300 * KIB), 1..5),
        has_state: bool,
    ) -> Vec<LayerGroup> {
        let mut kinds = kinds.into_iter().map(|(kind, tokens, bytes)| match kind {
            0 => (Retention::Full, bytes),
            _ => (window(tokens), bytes),
        }).collect::<Vec<_>>();
        kinds.extend(has_state.then_some((Retention::State, 3000 * KIB)));
        (0..).zip(kinds).map(|(at, (retention, bytes))| group(retention, bytes, at)).collect()
    }
}

proptest! {
    #[test]
    fn pools_hold_one_sequence_and_never_more_than_the_memory(
        groups in any_groups(),
        (mib, context, sequences, steps) in (1..4096_u64, 2..100_000_u32, 1..64_u32, 64..4096_u32),
        (sizing, policy, turns) in (0..3_u8, 0..4_u8, 1..6_u32),
        weights in prop::option::of(prop::collection::vec(1..100_u32, 5)),
    ) {
        let mut config = Config::default();
        config.engine.kv_memory = Size::mib(mib);
        (config.engine.sequences_max, config.engine.step_tokens_max) = (sequences, steps);
        config.kv.sizing = [Sizing::Balanced, Sizing::TypicalStep, Sizing::TypicalStepRetaining][usize::from(sizing)];
        let policies = [ReusePolicy::AllReusable, ReusePolicy::PerRequest, ReusePolicy::PerConversation];
        config.kv.reuse_policy = policies.get(usize::from(policy)).copied();
        config.kv.turns_max = turns;
        config.kv.pool_ratio = weights.map(|weights| {
            let weights = &weights[..groups.len()];
            let sum: u32 = weights.iter().sum();
            weights.iter().map(|weight| f64::from(*weight) / f64::from(sum)).collect()
        });
        match manager(&config, &groups, context) {
            Ok(manager) => {
                let blocks = &manager.cache.tiers[0];
                prop_assert!(taken(blocks, &groups) <= mib << 20, "{blocks:?}");
                let shape = manager.shape();
                for pool in &shape.pools {
                    let least = pool.blocks_max(context, 2 * steps, shape.block_tokens);
                    prop_assert!(pool.blocks >= least, "{pool:?} {least}");
                }
            }
            Err(PoolsError::TooLittle { memory, wanted, .. }) => prop_assert!(wanted > memory),
            Err(PoolsError::Plan(PlanError::StatesDoNotFit { quota, wanted, .. })) => prop_assert!(wanted > quota),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
