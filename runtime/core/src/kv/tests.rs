//! Rules of the manager one by one, then random operations.

use super::cache::rebalance::{self, Pools};
use super::cache::sizing::demand::{Demand, Retained};
use super::cache::sizing::{Tier, Workload};
use super::identity::truncated_chain;
use super::*;
use crate::ids::{Attempt, Incarnation, RequestKey};
use proptest::prelude::*;
use std::collections::BTreeSet;

const T: u32 = 4;
/// Long enough for any sequence of these tests.
const TOKENS_MAX: u32 = 400;

fn attempt(seq: u64) -> AttemptKey {
    AttemptKey { key: RequestKey { ingress: Incarnation(1), seq }, attempt: Attempt(1) }
}

fn scope(tenant: u64) -> Scope {
    Scope { tenant, adapter: None }
}

fn some(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("above 0")
}

fn window(tokens: u32) -> Retention {
    Retention::Window { tokens: some(tokens), sink_blocks: 0 }
}

/// Of full attention.
fn manager(blocks: u32) -> Manager {
    Manager::new(Config::full(blocks, T).expect("a good configuration")).expect("a good configuration")
}

fn manager_of(pools: &[(Retention, u32)]) -> Manager {
    Manager::new(Config::new(some(T), pools.to_vec())).expect("a good configuration")
}

fn run(kv: &mut Manager, input: Input) -> Vec<Effect> {
    let mut out = Vec::new();
    kv.handle(0, input, &mut out);
    kv.check().expect("all invariants hold");
    out
}

/// A reservation with places for everything at once.
fn asked(seq: u64, tenant: u64, tokens: &[u32]) -> Input {
    Input::Reserve {
        attempt: attempt(seq),
        scope: scope(tenant),
        conversation: None,
        tokens: tokens.to_vec(),
        ahead_tokens: TOKENS_MAX,
        tokens_max: TOKENS_MAX,
    }
}

fn answered(out: &[Effect]) -> Option<Reservation> {
    match out {
        [Effect::Reserved { reservation, .. }] => Some(reservation.clone()),
        [Effect::Exhausted { .. }] => None,
        other => panic!("{other:?}"),
    }
}

fn reserve(kv: &mut Manager, seq: u64, tenant: u64, tokens: &[u32]) -> Option<Reservation> {
    answered(&run(kv, asked(seq, tenant, tokens)))
}

/// The first blocks of the first pool.
fn blocks(reservation: &Reservation) -> Vec<BlockId> {
    reservation.tables[0].blocks.clone()
}

fn commit(kv: &mut Manager, seq: u64, tokens: &[u32], computed: u32) -> Vec<Rebased> {
    let out = run(kv, Input::Commit { attempt: attempt(seq), tokens: tokens.to_vec(), computed });
    match &out[..] {
        [Effect::Committed { rebased, .. }] | [Effect::Committed { rebased, .. }, Effect::Freed { .. }] => {
            rebased.clone()
        }
        other => panic!("{other:?}"),
    }
}

fn release(kv: &mut Manager, seq: u64) -> Vec<Effect> {
    run(kv, Input::Release { attempt: attempt(seq), why: Released::Over })
}

/// Runs a sequence alone from reservation to release, in chunks; returns the tokens it reused.
fn turn_of(kv: &mut Manager, conversation: Option<u128>, tokens: &[u32], chunk: u32) -> u32 {
    let conversation = conversation.map(ConversationKey);
    let Input::Reserve { attempt, scope, tokens, tokens_max, .. } = asked(999, 0, tokens) else {
        panic!("a reservation")
    };
    let asked =
        Input::Reserve { attempt, scope, conversation, tokens: tokens.clone(), ahead_tokens: chunk, tokens_max };
    let reservation = answered(&run(kv, asked)).expect("room");
    let length = tokens.len() as u32;
    let (mut computed, mut capacity) = (reservation.cached_tokens, reservation.capacity);
    while computed < length {
        if capacity < length.min(computed + chunk) {
            let out = run(kv, Input::Grow { attempt, tokens: length.min(computed + chunk) });
            let [Effect::Grown { capacity: now, .. }] = &out[..] else { panic!("{out:?}") };
            capacity = *now;
        }
        let stop = reservation.stops.iter().copied().find(|stop| *stop > computed).unwrap_or(length);
        computed = length.min(computed + chunk).min(stop);
        commit(kv, 999, &[], computed);
    }
    release(kv, 999);
    reservation.cached_tokens
}

fn turn(kv: &mut Manager, tokens: &[u32]) -> u32 {
    turn_of(kv, None, tokens, TOKENS_MAX)
}

fn probe(kv: &Manager, tenant: u64, tokens: &[u32]) -> u32 {
    kv.probe(&truncated_chain(&scope(tenant), tokens, T))
}

fn counts(kv: &Manager) -> [u32; 3] {
    let pool = kv.stats().pools[0];
    [pool.blocks_free, pool.blocks_reusable, pool.blocks_held]
}

#[test]
fn refuses_what_holds_nothing_or_contradicts_itself() {
    assert_eq!(Config::full(4, 0).map(|_| ()), Err(ConfigError::NoBlockTokens));
    assert!(matches!(Config::full(0, 4), Err(ConfigError::Cache(cache::ConfigError::EmptyPool { group: 0 }))));
    let config = || Config::new(some(4), vec![(Retention::Full, 8), (window(8), 8)]);
    let refused = |change: fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        config.validate()
    };
    assert_eq!(refused(|_| ()), Ok(()));
    let shared = ConfigError::SharedGroup { life_cycle: 1, group: 0 };
    assert_eq!(refused(|config| config.cache.life_cycles[1].group = 0), Err(shared));
    let unused = refused(|config| config.cache.tiers[0].push(3));
    assert_eq!(unused, Err(ConfigError::UnusedGroups { groups: 3 }));
    let two = refused(|config| config.cache.tiers.push(vec![1, 1]));
    assert_eq!(two, Err(ConfigError::Tiers { tiers: 2 }));
    let every = refused(|config| config.publishing = Publishing::AllReusable);
    assert_eq!(every, Err(ConfigError::Publishing { publishing: Publishing::AllReusable }));
}

#[test]
fn the_last_token_is_always_computed_whatever_the_length() {
    for length in 1..=3 * T {
        let mut kv = manager(16);
        let tokens: Vec<u32> = (0..length).collect();
        assert_eq!(turn(&mut kv, &tokens), 0);
        let reservation = reserve(&mut kv, 1, 0, &tokens).expect("room");
        assert_eq!(reservation.cached_tokens, length - 1, "length {length}");
        let wanted = (length + 1).div_ceil(T);
        assert_eq!(blocks(&reservation).len() as u32, wanted, "all tokens and one more fit");
        assert_eq!(reservation.capacity, wanted * T);
    }
}

#[test]
fn a_full_block_is_reusable_as_soon_as_it_is_computed() {
    let mut kv = manager(16);
    let tokens: Vec<u32> = (0..12).collect();
    let first = reserve(&mut kv, 1, 0, &tokens).expect("room");
    assert_eq!(reserve(&mut kv, 2, 0, &tokens).expect("room").cached_tokens, 0);
    commit(&mut kv, 1, &[], 7);
    let third = reserve(&mut kv, 3, 0, &tokens).expect("room");
    assert_eq!((third.cached_tokens, blocks(&third)[0]), (4, blocks(&first)[0]));
    assert!(blocks(&third)[1..].iter().all(|block| !blocks(&first).contains(block)));
    commit(&mut kv, 1, &[50, 51], 13);
    assert_eq!(probe(&kv, 0, &[&tokens[..], &[50, 51]].concat()), 12);
}

#[test]
fn produced_tokens_become_a_prefix_of_the_next_turn() {
    let mut kv = manager(16);
    reserve(&mut kv, 1, 0, &[1, 2, 3]).expect("room");
    for (at, token) in (4u32..20).enumerate() {
        run(&mut kv, Input::Grow { attempt: attempt(1), tokens: at as u32 + 4 });
        commit(&mut kv, 1, &[token], at as u32 + 3);
    }
    release(&mut kv, 1);
    let next: Vec<u32> = (1..30).collect();
    assert_eq!(reserve(&mut kv, 2, 0, &next).expect("room").cached_tokens, 18, "all of the 18 that were computed");
}

#[test]
fn an_attempt_that_made_a_block_second_goes_on_with_the_first_ones() {
    let mut kv = manager(8);
    let tokens: Vec<u32> = (0..9).collect();
    let first = reserve(&mut kv, 1, 0, &tokens).expect("room");
    let second = reserve(&mut kv, 2, 0, &tokens).expect("room");
    assert!(blocks(&first).iter().all(|block| !blocks(&second).contains(block)));
    assert_eq!(commit(&mut kv, 1, &[], 9), []);
    let expected = [0, 1].map(|ordinal| Rebased { life_cycle: 0, ordinal, block: blocks(&first)[ordinal as usize] });
    assert_eq!(commit(&mut kv, 2, &[], 9), expected);
    assert_eq!(counts(&kv), [4, 0, 4], "two blocks together, and one each");
    release(&mut kv, 1);
    release(&mut kv, 2);
    assert_eq!(counts(&kv), [5, 3, 0]);
}

#[test]
fn a_sequence_that_needs_the_whole_pool_is_not_kept_out_by_what_it_left_there() {
    let mut kv = manager(4);
    let tokens: Vec<u32> = (0..15).collect();
    assert_eq!(turn(&mut kv, &tokens), 0);
    // The last block is copied, and there is no room for both: so much is computed again.
    assert_eq!(turn(&mut kv, &tokens), 12);
    let mut states = manager_of(&[(Retention::Full, 8), (Retention::State, 1)]);
    assert_eq!(turn(&mut states, &tokens), 0);
    assert_eq!(turn(&mut states, &tokens), 0, "one state cannot be copied to itself");
}

#[test]
fn evicts_leaves_before_parents_and_the_longest_unused_first() {
    let mut kv = manager(6);
    let with = |tail: u32| [&[1; 4][..], &[tail; 4]].concat();
    for tail in [2, 3, 4] {
        turn(&mut kv, &with(tail));
    }
    assert_eq!(turn(&mut kv, &with(2)), 7, "used again: now 3 is the oldest");
    let probes = |kv: &Manager| [2, 3, 4].map(|tail| probe(kv, 0, &with(tail)));
    assert_eq!((probes(&kv), counts(&kv)), ([8, 8, 8], [2, 4, 0]));
    reserve(&mut kv, 1, 0, &[9; 10]).expect("room");
    assert_eq!(probes(&kv), [8, 4, 8]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 16 });
    assert_eq!(probes(&kv), [8, 4, 4]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 20 });
    assert_eq!(probes(&kv), [4, 4, 4]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 24 });
    assert_eq!((probes(&kv), counts(&kv)), ([0, 0, 0], [0, 0, 6]));
}

#[test]
fn making_room_never_evicts_the_prefix_that_was_just_matched() {
    let mut kv = manager(3);
    let tokens: Vec<u32> = (0..8).collect();
    turn(&mut kv, &tokens);
    assert_eq!(counts(&kv), [1, 2, 0]);
    // Two blocks are reusable and one matched: room for this exists only if the match survives.
    let longer: Vec<u32> = (0..4).chain(20..25).collect();
    let reservation = reserve(&mut kv, 1, 0, &longer).expect("room");
    assert_eq!((blocks(&reservation).len(), reservation.cached_tokens), (3, 4));
    assert_eq!(BTreeSet::from_iter(blocks(&reservation)).len(), 3);
}

#[test]
fn an_exhausted_question_changes_nothing() {
    let mut kv = manager(4);
    turn(&mut kv, &[1; 8]);
    reserve(&mut kv, 1, 0, &[2; 4]).expect("room");
    let before = (counts(&kv), probe(&kv, 0, &[1; 8]));
    let out = run(&mut kv, asked(2, 0, &[1; 12]));
    // The two reusable blocks lead the new prompt, and so are not among what could be had.
    assert_eq!(out, [Effect::Exhausted { attempt: attempt(2), wanted: 2, available: 0 }]);
    let grow = Input::Grow { attempt: attempt(1), tokens: 100 };
    assert_eq!(run(&mut kv, grow), [Effect::Exhausted { attempt: attempt(1), wanted: 23, available: 2 }]);
    assert_eq!((counts(&kv), probe(&kv, 0, &[1; 8])), before);
    assert_eq!(kv.stats().exhausted, 2);
}

#[test]
fn room_for_a_prompt_is_promised_before_it_is_taken() {
    let mut kv = manager(10);
    let ahead = |seq: u64, tokens: &[u32]| match asked(seq, 0, tokens) {
        Input::Reserve { attempt, scope, conversation, tokens, tokens_max, .. } => {
            Input::Reserve { attempt, scope, conversation, tokens, ahead_tokens: T, tokens_max }
        }
        other => other,
    };
    let first = answered(&run(&mut kv, ahead(1, &[1; 31]))).expect("room");
    assert_eq!((blocks(&first).len(), counts(&kv)), (1, [9, 0, 1]), "a chunk's places, of eight blocks that it needs");
    assert_eq!(answered(&run(&mut kv, ahead(2, &[2; 12]))), None, "of nine free blocks seven are promised");
    answered(&run(&mut kv, ahead(3, &[3; 7]))).expect("two are not");
    let more = Input::Grow { attempt: attempt(3), tokens: 9 };
    let out = run(&mut kv, more);
    assert!(matches!(out[..], [Effect::Exhausted { wanted: 2, available: 1, .. }]), "{out:?}");
    for tokens in [8, 20, 32] {
        assert!(matches!(run(&mut kv, Input::Grow { attempt: attempt(1), tokens })[..], [Effect::Grown { .. }]));
    }
    assert_eq!(release(&mut kv, 1), [Effect::Freed { blocks: 8 }]);
}

#[test]
fn scopes_never_share_blocks() {
    let mut kv = manager(64);
    let tokens: Vec<u32> = (0..16).collect();
    let scopes = [(1, None), (2, None), (1, Some(0)), (1, Some(2)), (2, Some(1))]
        .map(|(tenant, adapter)| Scope { tenant, adapter });
    let mut seen = BTreeSet::new();
    for (seq, own) in scopes.into_iter().enumerate() {
        assert_eq!(kv.probe(&truncated_chain(&own, &tokens, T)), 0);
        let Input::Reserve { attempt, conversation, tokens, ahead_tokens, tokens_max, .. } =
            asked(seq as u64, 0, &tokens)
        else {
            panic!("a reservation")
        };
        let asked = Input::Reserve { attempt, scope: own, conversation, tokens, ahead_tokens, tokens_max };
        let reservation = answered(&run(&mut kv, asked)).expect("room");
        assert_eq!(reservation.cached_tokens, 0, "{own:?} reused another scope's blocks");
        assert!(blocks(&reservation).iter().all(|block| seen.insert(*block)));
        commit(&mut kv, seq as u64, &[], 16);
    }
}

#[test]
fn nonsense_is_ignored_and_counted() {
    let mut kv = manager(8);
    reserve(&mut kv, 1, 0, &[1; 6]).expect("room");
    commit(&mut kv, 1, &[], 5);
    let before = counts(&kv);
    let (known, unknown) = (attempt(1), attempt(2));
    let told = |attempt, computed| Input::Commit { attempt, tokens: vec![3], computed };
    let nonsense = [
        (asked(1, 0, &[1; 6]), known, Ignored::DuplicateReserve),
        (asked(2, 0, &[]), unknown, Ignored::EmptyReserve),
        (Input::Grow { attempt: unknown, tokens: 3 }, unknown, Ignored::UnknownGrow),
        (told(unknown, 0), unknown, Ignored::UnknownCommit),
        (told(known, 4), known, Ignored::BadCommit),
        (told(known, 8), known, Ignored::BadCommit),
        (told(known, u32::MAX), known, Ignored::BadCommit),
        (Input::Release { attempt: unknown, why: Released::Over }, unknown, Ignored::UnknownRelease),
    ];
    let count = nonsense.len() as u64;
    for (input, attempt, why) in nonsense {
        assert_eq!(run(&mut kv, input), [Effect::Ignored { attempt, why }]);
    }
    assert_eq!((counts(&kv), kv.stats().ignored), (before, count));
    assert_eq!(release(&mut kv, 1), [Effect::Freed { blocks: 2 }]);
    let twice = Effect::Ignored { attempt: known, why: Ignored::UnknownRelease };
    assert_eq!(release(&mut kv, 1), [twice]);
}

#[test]
fn a_lost_device_forgets_every_attempt_and_prefix() {
    let mut kv = manager(8);
    turn(&mut kv, &[1; 8]);
    reserve(&mut kv, 1, 0, &[1; 8]).expect("room");
    assert_eq!(run(&mut kv, Input::Clear), [Effect::Freed { blocks: 3 }]);
    assert_eq!((counts(&kv), probe(&kv, 0, &[1; 8])), ([8, 0, 0], 0));
    let gone = Effect::Ignored { attempt: attempt(1), why: Ignored::UnknownRelease };
    assert_eq!(release(&mut kv, 1), [gone]);
}

#[test]
fn fan_out_has_no_cliff() {
    let mut kv = manager(2048);
    let with = |user: u32| [&[5; 8][..], &[user, 0, 0, 0, 1]].concat();
    for user in 100..1100 {
        turn(&mut kv, &with(user));
    }
    assert!((100..1100).all(|user| probe(&kv, 0, &with(user)) == 12));
    assert_eq!(reserve(&mut kv, 1, 0, &with(5000)).expect("room").cached_tokens, 8);
}

#[test]
fn what_slides_out_of_a_window_is_given_back_while_a_prompt_runs() {
    let mut kv = manager_of(&[(Retention::Full, 64), (window(8), 9)]);
    let tokens: Vec<u32> = (0..200).collect();
    // The prompt has 50 blocks; a chunk and a window take six.
    assert_eq!(turn_of(&mut kv, None, &tokens, 8), 0);
    let stats = kv.stats();
    assert_eq!(stats.pools.iter().map(|pool| pool.blocks_held).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(stats.pools[0].blocks_reusable, 50);
    assert!(stats.pools[1].blocks_reusable <= 9);
    assert_eq!(turn_of(&mut kv, None, &[&tokens[..], &[7; 9]].concat(), 8), 200, "its end is an end point");
}

#[test]
fn a_prompt_that_comes_again_resumes_before_its_last_token() {
    for pools in [vec![(Retention::Full, 64), (window(8), 32)], vec![(Retention::Full, 64), (Retention::State, 8)]] {
        for length in 90..100 {
            let mut kv = manager_of(&pools);
            let tokens: Vec<u32> = (0..length).collect();
            assert_eq!(turn_of(&mut kv, Some(1), &tokens, 32), 0);
            let reused = turn_of(&mut kv, Some(1), &tokens, 32);
            assert!(reused >= (length - 1) / T * T, "{reused} of {length} with {pools:?}");
        }
    }
}

#[test]
fn a_conversations_newer_turns_replace_its_older_ones() {
    let mut config = Config::new(some(T), vec![(Retention::Full, 256), (window(8), 64)]);
    config.cache.turns_max = 2;
    let mut kv = Manager::new(config).expect("a good configuration");
    let turns: Vec<Vec<u32>> = (1..=5).map(|turn| (0..turn * 40).collect()).collect();
    for (at, tokens) in turns.iter().enumerate() {
        let before = at as u32 * 40;
        assert_eq!(turn_of(&mut kv, Some(7), tokens, 16), before, "the last turn is never the one that goes");
    }
    assert_eq!((kv.stats().conversations, kv.stats().turns, kv.stats().turns_unplanned), (1, 5, 0));
    // What resumes at the end of an older turn: its window is gone, and a shorter end point with it.
    let resumes = |kv: &Manager, turn: usize| probe(kv, 0, &turns[turn]) > turns[turn].len() as u32 - 8;
    assert_eq!([0, 1, 2, 3, 4].map(|turn| resumes(&kv, turn)), [false, false, false, true, true]);
}

#[test]
fn a_preempted_attempt_ends_no_turn() {
    let mut kv = manager_of(&[(Retention::Full, 64), (window(8), 32)]);
    let tokens: Vec<u32> = (0..40).collect();
    let Input::Reserve { attempt, scope, tokens, tokens_max, .. } = asked(1, 0, &tokens) else {
        panic!("a reservation")
    };
    let conversation = Some(ConversationKey(3));
    let again =
        || Input::Reserve { attempt, scope, conversation, tokens: tokens.clone(), ahead_tokens: 20, tokens_max };
    assert_eq!(answered(&run(&mut kv, again())).expect("room").cached_tokens, 0);
    commit(&mut kv, 1, &[], 20);
    run(&mut kv, Input::Release { attempt, why: Released::Preempted });
    assert_eq!((kv.stats().turns, kv.stats().conversations), (0, 0));
    assert_eq!(answered(&run(&mut kv, again())).expect("room").cached_tokens, 20, "it goes on where it stood");
    release(&mut kv, 1);
    assert_eq!((kv.stats().turns, kv.stats().conversations), (1, 1));
}

#[test]
fn a_failed_attempt_publishes_nothing_more() {
    let mut kv = manager_of(&[(Retention::Full, 64), (Retention::State, 8)]);
    let tokens: Vec<u32> = (0..40).collect();
    reserve(&mut kv, 1, 0, &tokens).expect("room");
    commit(&mut kv, 1, &[], 8);
    run(&mut kv, Input::Release { attempt: attempt(1), why: Released::Failed });
    assert_eq!(reserve(&mut kv, 2, 0, &tokens).expect("room").cached_tokens, 0);
}

#[test]
fn inputs_and_effects_survive_serde() {
    let mut kv = manager(4);
    let mut out = Vec::new();
    let input = asked(1, 3, &[1, 2, 3]);
    let text = serde_json::to_string(&input).expect("serializes");
    assert_eq!(serde_json::from_str::<Input>(&text).expect("parses"), input);
    kv.handle(0, input, &mut out);
    let text = serde_json::to_string(&out).expect("serializes");
    assert_eq!(serde_json::from_str::<Vec<Effect>>(&text).expect("parses"), out);
}

#[derive(Clone, Debug)]
enum Op {
    Reserve { tenant: u64, tokens: Vec<u32>, ahead: u32, conversation: u8 },
    Grow { who: usize, more: u32 },
    Commit { who: usize, tokens: Vec<u32>, computed: u32 },
    Release { who: usize, why: u8 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Two tokens make equal blocks common.
    let tokens = |most| proptest::collection::vec(0u32..2, 0..most);
    let op = prop_oneof![
        3 => (0u64..2, tokens(24), 1u32..30, 0u8..4).prop_map(|(tenant, mut tokens, ahead, conversation)| {
            tokens.push(0);
            Op::Reserve { tenant, tokens, ahead, conversation }
        }),
        2 => (any::<usize>(), 0u32..12).prop_map(|(who, more)| Op::Grow { who, more }),
        4 => (any::<usize>(), tokens(8), 0u32..24)
            .prop_map(|(who, tokens, computed)| Op::Commit { who, tokens, computed }),
        2 => (any::<usize>(), 0u8..3).prop_map(|(who, why)| Op::Release { who, why }),
    ];
    proptest::collection::vec(op, 1..120)
}

/// An open attempt, as its caller knows it.
struct Open {
    known: u32,
    /// Up to which room was promised.
    target: u32,
    capacity: u32,
    computed: u32,
    most: u32,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a caller does that keeps to the protocol: all invariants hold, a promise is kept, and nothing is leaked.
    #[test]
    fn random_operations_keep_promises_and_leak_nothing(kind in 0usize..4, size in 6u32..24, ops in ops()) {
        let pools = [
            vec![(Retention::Full, size)],
            vec![(Retention::Full, size), (window(6), 12)],
            vec![(window(5), size), (Retention::State, 3)],
            vec![(Retention::Full, size), (window(9), 14), (Retention::State, 2)],
        ];
        let mut kv = manager_of(&pools[kind]);
        let mut open: std::collections::BTreeMap<u64, Open> = Default::default();
        let nth = |open: &std::collections::BTreeMap<u64, Open>, who: usize| {
            who.checked_rem(open.len()).and_then(|at| open.keys().nth(at).copied())
        };
        for (seq, op) in ops.into_iter().enumerate() {
            match op {
                Op::Reserve { tenant, tokens, ahead, conversation } => {
                    let (seq, known) = (seq as u64, tokens.len() as u32);
                    let conversation = (conversation > 0).then_some(ConversationKey(conversation.into()));
                    let most = known + 12;
                    let (attempt, scope) = (attempt(seq), scope(tenant));
                    let asked =
                        Input::Reserve { attempt, scope, conversation, tokens, ahead_tokens: ahead, tokens_max: most };
                    if let Some(reservation) = answered(&run(&mut kv, asked)) {
                        let Reservation { capacity, cached_tokens: computed, .. } = reservation;
                        open.insert(seq, Open { known, target: known + 1, capacity, computed, most });
                    }
                }
                Op::Grow { who, more } => {
                    let Some(seq) = nth(&open, who) else { continue };
                    let one = open.get_mut(&seq).expect("open");
                    let promised = one.capacity < one.target;
                    let tokens = (one.capacity + more).min(one.most);
                    let out = run(&mut kv, Input::Grow { attempt: attempt(seq), tokens });
                    match &out[..] {
                        [Effect::Grown { capacity, .. }] => one.capacity = *capacity,
                        [Effect::Exhausted { .. }] => prop_assert!(!promised || tokens > one.target || kind > 0),
                        other => panic!("{other:?}"),
                    }
                }
                Op::Commit { who, tokens, computed } => {
                    let Some(seq) = nth(&open, who) else { continue };
                    let one = open.get_mut(&seq).expect("open");
                    one.known += tokens.len() as u32;
                    one.computed = (one.computed + computed).min(one.known).min(one.capacity);
                    commit(&mut kv, seq, &tokens, one.computed);
                }
                Op::Release { who, why } => {
                    let Some(seq) = nth(&open, who) else { continue };
                    open.remove(&seq);
                    let why = [Released::Over, Released::Preempted, Released::Failed][usize::from(why)];
                    run(&mut kv, Input::Release { attempt: attempt(seq), why });
                }
            }
        }
        for seq in open.into_keys() {
            release(&mut kv, seq);
        }
        for pool in kv.stats().pools {
            prop_assert_eq!((pool.blocks_held, pool.blocks_free + pool.blocks_reusable), (0, pool.blocks_total));
        }
    }
}

#[test]
fn a_rank_says_what_its_pools_should_have_been() {
    let mut kv = manager_of(&[(Retention::Full, 400), (window(8), 40)]);
    let workload = Workload {
        block_tokens: some(T),
        sequence_tokens: 200,
        requests: 2,
        step_tokens_max: 16,
        extra_tokens: 0,
        draft_tokens: 0,
        system_prompt_tokens: 0,
    };
    let demand = Demand {
        workload,
        retained: Retained { tokens: 200, turns: 1, end_points: Some(2), snapshots: Snapshots::default() },
        sequence_tokens_max: TOKENS_MAX,
        suspended_requests: 0,
        reserved_states: 0,
    };
    let life_cycles = kv.config().cache.life_cycles.clone();
    let sizes = vec![vec![100], vec![100]];
    let pools = Pools { life_cycles, sizes, tiers: vec![Tier { bytes: 44_000, granularity: 1 }], demand };
    kv.measure(rebalance::Config { samples_min: 20, interval: 10, ..rebalance::Config::default() }, pools);
    for at in 0..20 {
        assert_eq!(kv.stats().proposed, Vec::<u32>::new(), "after {at} sequences");
        turn_of(&mut kv, None, &(1000 * at..1000 * at + 24).collect::<Vec<u32>>(), 16);
    }
    // Six blocks of full attention a conversation, and as many of the window.
    let proposed = kv.stats().proposed;
    assert!(proposed[0] < 300 && proposed[1] > 140 && proposed[0] + proposed[1] <= 440, "{proposed:?}");
}
