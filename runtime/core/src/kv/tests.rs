//! Rules of the manager one by one, then random operations against a slow and obvious reference.

use super::identity::{BlockKey, Scope, truncated_chain};
use super::tree::{Lookup, Tree};
use super::*;
use crate::ids::{Attempt, Incarnation, RequestKey};
use proptest::prelude::*;
use std::collections::BTreeSet;

const T: u32 = 4;

fn attempt(seq: u64) -> AttemptKey {
    AttemptKey { key: RequestKey { ingress: Incarnation(1), seq }, attempt: Attempt(1) }
}

fn scope(tenant: u64) -> Scope {
    Scope { tenant, adapter: None }
}

fn manager(blocks: u32) -> Manager {
    Manager::new(Config { blocks, block_tokens: T }).expect("a good configuration")
}

fn run(kv: &mut Manager, input: Input) -> Vec<Effect> {
    let mut out = Vec::new();
    kv.handle(0, input, &mut out);
    kv.check().expect("all invariants hold");
    out
}

fn reserve(kv: &mut Manager, seq: u64, tenant: u64, tokens: &[u32]) -> Option<(Vec<BlockId>, u32)> {
    let input = Input::Reserve { attempt: attempt(seq), scope: scope(tenant), tokens: tokens.to_vec() };
    match run(kv, input).as_slice() {
        [Effect::Reserved { blocks, cached_tokens, .. }] => Some((blocks.clone(), *cached_tokens)),
        [Effect::Exhausted { .. }] => None,
        other => panic!("{other:?}"),
    }
}

fn commit(kv: &mut Manager, seq: u64, tokens: &[u32], computed: u32) {
    let out = run(kv, Input::Commit { attempt: attempt(seq), tokens: tokens.to_vec(), computed });
    assert_eq!(out, []);
}

fn release(kv: &mut Manager, seq: u64) -> Vec<Effect> {
    run(kv, Input::Release { attempt: attempt(seq) })
}

/// Runs a sequence alone from reservation to release; returns the tokens it reused.
fn turn(kv: &mut Manager, tenant: u64, tokens: &[u32]) -> u32 {
    let (_, cached) = reserve(kv, 999, tenant, tokens).expect("room");
    commit(kv, 999, &[], tokens.len() as u32);
    release(kv, 999);
    cached
}

fn probe(kv: &Manager, tenant: u64, tokens: &[u32]) -> u32 {
    kv.probe(&truncated_chain(&scope(tenant), tokens, T))
}

fn counts(kv: &Manager) -> [u32; 3] {
    let stats = kv.stats();
    [stats.blocks_free, stats.blocks_reusable, stats.blocks_held]
}

#[test]
fn refuses_a_pool_that_holds_nothing() {
    let new = |blocks, block_tokens| Manager::new(Config { blocks, block_tokens }).map(|_| ());
    assert_eq!(new(0, 4), Err(ConfigError::NoBlocks));
    assert_eq!(new(4, 0), Err(ConfigError::NoBlockTokens));
    assert_eq!(new(1 << 16, 1 << 16), Err(ConfigError::TooLarge { blocks: 1 << 16, block_tokens: 1 << 16 }));
    assert_eq!(new(1, 1), Ok(()));
}

#[test]
fn the_last_token_is_always_computed_whatever_the_length() {
    for length in 1..=3 * T {
        let mut kv = manager(16);
        let tokens: Vec<u32> = (0..length).collect();
        assert_eq!(turn(&mut kv, 0, &tokens), 0);
        let (blocks, cached) = reserve(&mut kv, 1, 0, &tokens).expect("room");
        assert_eq!(cached, (length - 1) / T * T, "length {length}");
        assert_eq!(blocks.len() as u32, (length + 1).div_ceil(T), "all tokens and one more fit");
    }
}

#[test]
fn a_full_block_is_reusable_as_soon_as_it_is_computed() {
    let mut kv = manager(16);
    let tokens: Vec<u32> = (0..12).collect();
    let (first, _) = reserve(&mut kv, 1, 0, &tokens).expect("room");
    assert_eq!(reserve(&mut kv, 2, 0, &tokens).expect("room").1, 0);
    commit(&mut kv, 1, &[], 7);
    let (third, cached) = reserve(&mut kv, 3, 0, &tokens).expect("room");
    assert_eq!((cached, &third[..1]), (4, &first[..1]));
    assert!(third[1..].iter().all(|block| !first.contains(block)));
    commit(&mut kv, 1, &[50, 51], 13);
    assert_eq!(probe(&kv, 0, &[&tokens[..], &[50, 51]].concat()), 12);
}

#[test]
fn a_conversation_that_goes_on_is_found_without_hashing_what_it_said_before() {
    let mut kv = manager(256);
    let mut tokens: Vec<u32> = (0..100).collect();
    turn(&mut kv, 0, &tokens);
    for round in 0..5 {
        let (known, before) = (tokens.len() as u32 / T * T, kv.stats().keyed_blocks);
        tokens.extend((0..30).map(|i| 1000 * (round + 1) + i));
        assert_eq!(turn(&mut kv, 0, &tokens), known);
        // The first block, which has no parent, and the first that is new.
        assert_eq!(kv.stats().keyed_blocks - before, 2);
    }
}

#[test]
fn an_older_branch_is_found_by_its_keys() {
    let mut kv = manager(256);
    let branch = |last: u32| [(0..40).collect(), vec![last; 20]].concat();
    turn(&mut kv, 0, &branch(7));
    turn(&mut kv, 0, &branch(8));
    assert_eq!(turn(&mut kv, 0, &branch(7)), 56);
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
    // 18 of the 19 tokens are computed: four full blocks.
    assert_eq!(reserve(&mut kv, 2, 0, &next).expect("room").1, 16);
}

#[test]
fn two_attempts_that_make_the_same_block_keep_their_own_tables() {
    let mut kv = manager(8);
    let tokens: Vec<u32> = (0..9).collect();
    let (first, _) = reserve(&mut kv, 1, 0, &tokens).expect("room");
    let (second, _) = reserve(&mut kv, 2, 0, &tokens).expect("room");
    assert!(first.iter().all(|block| !second.contains(block)));
    commit(&mut kv, 1, &[], 9);
    commit(&mut kv, 2, &[], 9);
    let (third, cached) = reserve(&mut kv, 3, 0, &tokens).expect("room");
    assert_eq!((cached, &third[..2]), (8, &first[..2]));
    // Three blocks each for the first and second, one more for the third; then one of the two copies is given up.
    assert_eq!(counts(&kv), [1, 0, 7]);
    release(&mut kv, 3);
    assert_eq!(release(&mut kv, 1), [Effect::Freed { blocks: 3 }]);
    assert_eq!(counts(&kv), [5, 0, 3]);
    let (fourth, cached) = reserve(&mut kv, 4, 0, &tokens).expect("room");
    assert_eq!((cached, &fourth[..2]), (8, &second[..2]), "the second one's copy is the shared one now");
    release(&mut kv, 4);
    commit(&mut kv, 2, &[9, 10, 11], 12);
    assert_eq!(probe(&kv, 0, &(0..12).collect::<Vec<_>>()), 12);
    release(&mut kv, 2);
    assert_eq!(counts(&kv), [5, 3, 0]);
}

#[test]
fn an_attempt_that_runs_alone_holds_its_own_table_and_no_more() {
    let mut kv = manager(4);
    let tokens: Vec<u32> = (0..8).collect();
    turn(&mut kv, 0, &tokens);
    // The second block is computed again, since the last token always is; the old one must not stay pinned.
    reserve(&mut kv, 1, 0, &tokens).expect("room");
    commit(&mut kv, 1, &[], 8);
    assert_eq!(counts(&kv), [1, 0, 3]);
    assert!(matches!(run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 16 })[..], [Effect::Grown { .. }]));
    release(&mut kv, 1);
    assert_eq!(counts(&kv), [2, 2, 0]);
}

#[test]
fn evicts_leaves_before_parents_and_the_longest_unused_first() {
    let mut kv = manager(6);
    let shared = [1, 1, 1, 1];
    let with = |tail: u32| [&shared[..], &[tail; 4]].concat();
    turn(&mut kv, 0, &with(2));
    turn(&mut kv, 0, &with(3));
    turn(&mut kv, 0, &with(4));
    assert_eq!(turn(&mut kv, 0, &with(2)[..]), 4, "used again: now 3 is the oldest");
    assert_eq!(counts(&kv), [2, 4, 0]);
    // The second block of `with(2)` was computed again, so its use counts.
    reserve(&mut kv, 1, 0, &[9; 10]).expect("room");
    assert_eq!([2, 3, 4].map(|tail| probe(&kv, 0, &with(tail))), [8, 4, 8]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 16 });
    assert_eq!([2, 3, 4].map(|tail| probe(&kv, 0, &with(tail))), [8, 4, 4]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 20 });
    assert_eq!([2, 3, 4].map(|tail| probe(&kv, 0, &with(tail))), [4, 4, 4]);
    run(&mut kv, Input::Grow { attempt: attempt(1), tokens: 24 });
    assert_eq!(counts(&kv), [0, 0, 6]);
    assert_eq!(probe(&kv, 0, &with(2)), 0);
    assert_eq!(kv.stats().evicted_blocks, 4);
}

#[test]
fn making_room_never_evicts_the_prefix_that_was_just_matched() {
    let mut kv = manager(3);
    let tokens: Vec<u32> = (0..8).collect();
    turn(&mut kv, 0, &tokens);
    assert_eq!(counts(&kv), [1, 2, 0]);
    // Two blocks are reusable and one matched: room for this exists only if the match survives.
    let longer: Vec<u32> = (0..4).chain(20..25).collect();
    let (blocks, cached) = reserve(&mut kv, 1, 0, &longer).expect("room");
    assert_eq!((blocks.len(), cached), (3, 4));
    assert_eq!(BTreeSet::from_iter(blocks).len(), 3);
}

#[test]
fn an_exhausted_question_changes_nothing() {
    let mut kv = manager(4);
    turn(&mut kv, 0, &[1; 8]);
    reserve(&mut kv, 1, 0, &[2; 4]).expect("room");
    let before = (counts(&kv), probe(&kv, 0, &[1; 8]));
    let asked = Input::Reserve { attempt: attempt(2), scope: scope(0), tokens: vec![1; 12] };
    // The two reusable blocks lead the new prompt, and so are not among what could be had.
    assert_eq!(run(&mut kv, asked), [Effect::Exhausted { attempt: attempt(2), wanted: 2, available: 0 }]);
    let grow = Input::Grow { attempt: attempt(1), tokens: 100 };
    assert_eq!(run(&mut kv, grow), [Effect::Exhausted { attempt: attempt(1), wanted: 23, available: 2 }]);
    assert_eq!((counts(&kv), probe(&kv, 0, &[1; 8])), before);
    assert_eq!(kv.stats().exhausted, 2);
}

#[test]
fn scopes_never_share_blocks() {
    let mut kv = manager(64);
    let tokens: Vec<u32> = (0..16).collect();
    let scopes = [(1, None), (2, None), (1, Some(0)), (1, Some(2)), (2, Some(1))]
        .map(|(tenant, adapter)| Scope { tenant, adapter });
    let mut seen = BTreeSet::new();
    for (seq, scope) in scopes.into_iter().enumerate() {
        assert_eq!(kv.probe(&truncated_chain(&scope, &tokens, T)), 0);
        let input = Input::Reserve { attempt: attempt(seq as u64), scope, tokens: tokens.clone() };
        let [Effect::Reserved { blocks, cached_tokens: 0, .. }] = &run(&mut kv, input)[..] else {
            panic!("{scope:?} reused another scope's blocks");
        };
        assert!(blocks.iter().all(|block| seen.insert(*block)));
        commit(&mut kv, seq as u64, &[], 16);
    }
}

#[test]
fn a_collision_of_keys_costs_a_reuse_and_leaks_nothing() {
    let mut tree = Tree::default();
    let key = BlockKey([7; 32]);
    let mut same_start = [7; 32];
    same_start[31] = 8;
    assert_eq!(tree.find(None, &key, &[1, 2]), Lookup::Absent);
    let id = tree.insert(None, key, &[1, 2], BlockId(0));
    assert_eq!(tree.find(None, &key, &[1, 2]), Lookup::Found(id));
    assert_eq!(tree.find(None, &key, &[1, 3]), Lookup::Occupied, "other tokens under the same key");
    assert_eq!(tree.find(Some(id), &key, &[1, 2]), Lookup::Occupied, "another place under the same key");
    let near = BlockKey(same_start);
    assert_eq!(near.truncated(), key.truncated());
    assert_eq!(tree.find(None, &near, &[1, 2]), Lookup::Occupied, "another key with the same 64 bits");
}

#[test]
fn an_occupied_key_ends_publication_and_nothing_else() {
    let mut kv = manager(8);
    // Another block sits where the second block of this sequence belongs.
    let tokens: Vec<u32> = (0..13).collect();
    let keys = identity::chain(&scope(0), &tokens, T);
    let strange = kv.pages.take().expect("a free block");
    kv.pages.cache(strange);
    let node = kv.tree.insert(None, keys[1], &[90, 91, 92, 93], strange);
    kv.unpin(node, Some(0));
    kv.check().expect("all invariants hold");
    let (_, cached) = reserve(&mut kv, 1, 0, &tokens).expect("room");
    assert_eq!(cached, 0);
    commit(&mut kv, 1, &[], 13);
    assert_eq!(counts(&kv), [3, 1, 4]);
    let (second, cached) = reserve(&mut kv, 2, 0, &tokens[..9]).expect("room");
    assert_eq!((second.len(), cached), (3, 4), "only the first block is shared");
    release(&mut kv, 1);
    release(&mut kv, 2);
    assert_eq!(counts(&kv), [6, 2, 0]);
}

#[test]
fn nonsense_is_ignored_and_counted() {
    let mut kv = manager(8);
    reserve(&mut kv, 1, 0, &[1; 6]).expect("room");
    commit(&mut kv, 1, &[], 5);
    let before = counts(&kv);
    let (known, unknown) = (attempt(1), attempt(2));
    let of = |attempt, tokens| Input::Reserve { attempt, scope: scope(0), tokens };
    let told = |attempt, computed| Input::Commit { attempt, tokens: vec![3], computed };
    let nonsense = [
        (of(known, vec![1; 6]), known, Ignored::DuplicateReserve),
        (of(unknown, vec![]), unknown, Ignored::EmptyReserve),
        (Input::Grow { attempt: unknown, tokens: 3 }, unknown, Ignored::UnknownGrow),
        (told(unknown, 0), unknown, Ignored::UnknownCommit),
        (told(known, 4), known, Ignored::BadCommit),
        (told(known, 8), known, Ignored::BadCommit),
        (told(known, u32::MAX), known, Ignored::BadCommit),
        (Input::Release { attempt: unknown }, unknown, Ignored::UnknownRelease),
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
    turn(&mut kv, 0, &[1; 8]);
    reserve(&mut kv, 1, 0, &[1; 8]).expect("room");
    assert_eq!(run(&mut kv, Input::Clear), [Effect::Freed { blocks: 3 }]);
    assert_eq!((counts(&kv), probe(&kv, 0, &[1; 8])), ([8, 0, 0], 0));
    let gone = Effect::Ignored { attempt: attempt(1), why: Ignored::UnknownRelease };
    assert_eq!(release(&mut kv, 1), [gone]);
}

#[test]
fn fan_out_has_no_cliff() {
    let mut kv = manager(2048);
    let system = [5; 8];
    let with = |user: u32| [&system[..], &[user, 0, 0, 0, 1]].concat();
    for user in 100..1100 {
        turn(&mut kv, 0, &with(user));
    }
    assert!((100..1100).all(|user| probe(&kv, 0, &with(user)) == 12));
    assert_eq!(reserve(&mut kv, 1, 0, &with(5000)).expect("room").1, 8);
}

#[test]
fn inputs_and_effects_survive_serde() {
    let mut kv = manager(4);
    let mut out = Vec::new();
    let input = Input::Reserve { attempt: attempt(1), scope: scope(3), tokens: vec![1, 2, 3] };
    let text = serde_json::to_string(&input).expect("serializes");
    assert_eq!(serde_json::from_str::<Input>(&text).expect("parses"), input);
    kv.handle(0, input, &mut out);
    let text = serde_json::to_string(&out).expect("serializes");
    assert_eq!(serde_json::from_str::<Vec<Effect>>(&text).expect("parses"), out);
}

/// One reusable prefix, by its tokens.
#[derive(Clone, Debug, Default)]
struct Prefix {
    pins: u32,
    last_use: u64,
}

#[derive(Clone, Debug)]
struct Holder {
    tenant: u64,
    tokens: Vec<u32>,
    blocks: u32,
    /// Per leading block: whether its own block is the shared one, not a copy.
    path: Vec<bool>,
    computed: u32,
}

/// The manager without block numbers, keys or queues: prefixes are compared token by token.
#[derive(Default)]
struct Reference {
    total: u32,
    prefixes: BTreeMap<(u64, Vec<u32>), Prefix>,
    holders: BTreeMap<AttemptKey, Holder>,
    uses: u64,
}

impl Reference {
    fn private(&self) -> u32 {
        self.holders.values().map(|h| h.blocks - h.path.iter().filter(|own| **own).count() as u32).sum()
    }

    fn counts(&self) -> [u32; 3] {
        let reusable = self.prefixes.values().filter(|p| p.pins == 0).count() as u32;
        let free = self.total - self.prefixes.len() as u32 - self.private();
        [free, reusable, self.total - free - reusable]
    }

    fn probe(&self, tenant: u64, tokens: &[u32]) -> u32 {
        let lengths = (T..=tokens.len() as u32).step_by(T as usize);
        lengths
            .take_while(|n| self.prefixes.contains_key(&(tenant, tokens[..*n as usize].to_vec())))
            .last()
            .unwrap_or(0)
    }

    fn pin(&mut self, tenant: u64, tokens: &[u32], by: i32, last_use: Option<u64>) {
        for end in (T as usize..=tokens.len()).step_by(T as usize) {
            let prefix = self.prefixes.get_mut(&(tenant, tokens[..end].to_vec())).expect("present");
            prefix.pins = prefix.pins.checked_add_signed(by).expect("not below 0");
            prefix.last_use = last_use.unwrap_or(prefix.last_use);
        }
    }

    fn make_room(&mut self, wanted: u32) -> bool {
        let [free, reusable, _] = self.counts();
        if free + reusable < wanted {
            return false;
        }
        while self.counts()[0] < wanted {
            let is_leaf = |(tenant, tokens): &(u64, Vec<u32>)| {
                let below = self.prefixes.keys().filter(|(t, longer)| t == tenant && longer.starts_with(tokens));
                below.count() == 1
            };
            let leaves = self.prefixes.iter().filter(|(key, prefix)| prefix.pins == 0 && is_leaf(key));
            let oldest = leaves.min_by_key(|(_, prefix)| prefix.last_use).expect("a leaf").0.clone();
            self.prefixes.remove(&oldest);
        }
        true
    }

    fn reserve(&mut self, attempt: AttemptKey, tenant: u64, tokens: &[u32]) -> Option<u32> {
        let cached = self.probe(tenant, &tokens[..tokens.len() - 1]);
        let blocks = (tokens.len() as u32 + 1).div_ceil(T);
        self.pin(tenant, &tokens[..cached as usize], 1, None);
        if !self.make_room(blocks - cached / T) {
            self.pin(tenant, &tokens[..cached as usize], -1, None);
            return None;
        }
        let path = vec![true; (cached / T) as usize];
        self.holders.insert(attempt, Holder { tenant, tokens: tokens.to_vec(), blocks, path, computed: cached });
        Some(cached)
    }

    fn commit(&mut self, attempt: AttemptKey, tokens: &[u32], computed: u32) {
        let holder = self.holders.get_mut(&attempt).expect("held");
        holder.tokens.extend(tokens);
        holder.computed = computed;
        while (holder.path.len() as u32) < computed / T {
            let end = (holder.path.len() + 1) * T as usize;
            let prefix = self.prefixes.entry((holder.tenant, holder.tokens[..end].to_vec())).or_default();
            holder.path.push(prefix.pins == 0);
            prefix.pins += 1;
        }
    }

    fn release(&mut self, attempt: AttemptKey) {
        let holder = self.holders.remove(&attempt).expect("held");
        self.uses += 1;
        let published = holder.path.len() * T as usize;
        self.pin(holder.tenant, &holder.tokens[..published], -1, Some(self.uses));
        // Where no reader of a shared block is left, the first one with a copy shares its copy.
        for at in 0..holder.path.len() {
            let start = &holder.tokens[..(at + 1) * T as usize];
            let same = |other: &&mut Holder| {
                other.tenant == holder.tenant && other.path.len() > at && other.tokens.starts_with(start)
            };
            let mut others: Vec<&mut Holder> = self.holders.values_mut().filter(same).collect();
            if others.iter().all(|other| !other.path[at])
                && let Some(heir) = others.first_mut()
            {
                heir.path[at] = true;
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Reserve { tenant: u64, tokens: Vec<u32> },
    Grow { who: usize, more: u32 },
    Commit { who: usize, tokens: Vec<u32>, computed: u32 },
    Release { who: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Two tokens make equal blocks common.
    let tokens = |most| proptest::collection::vec(0u32..2, 0..most);
    let op = prop_oneof![
        3 => (0u64..2, tokens(24), 0u32..2)
            .prop_map(|(tenant, mut tokens, last)| {
                tokens.push(last);
                Op::Reserve { tenant, tokens }
            }),
        2 => (any::<usize>(), 0u32..12).prop_map(|(who, more)| Op::Grow { who, more }),
        4 => (any::<usize>(), tokens(8), 0u32..24)
            .prop_map(|(who, tokens, computed)| Op::Commit { who, tokens, computed }),
        2 => any::<usize>().prop_map(|who| Op::Release { who }),
    ];
    proptest::collection::vec(op, 1..120)
}

fn compare(kv: &mut Manager, reference: &mut Reference, seq: u64, op: Op) {
    let who = |who: usize| {
        let holders = reference.holders.len();
        reference.holders.keys().nth(who.checked_rem(holders)?).copied()
    };
    match op {
        Op::Reserve { tenant, tokens } => {
            let cached = reserve(kv, seq, tenant, &tokens).map(|(blocks, cached)| {
                assert_eq!(blocks.len(), BTreeSet::from_iter(&blocks).len());
                cached
            });
            assert_eq!(cached, reference.reserve(attempt(seq), tenant, &tokens));
        }
        Op::Grow { who: at, more } => {
            let Some(attempt) = who(at) else { return };
            let held = reference.holders[&attempt].blocks;
            let tokens = held * T + more;
            let wanted = tokens.div_ceil(T) - held;
            let out = run(kv, Input::Grow { attempt, tokens });
            let fits = reference.make_room(wanted);
            assert_eq!(matches!(out[..], [Effect::Grown { .. }]), fits, "{out:?}");
            if let ([Effect::Grown { blocks, .. }], Some(holder)) = (&out[..], reference.holders.get_mut(&attempt)) {
                assert_eq!(blocks.len() as u32, wanted);
                holder.blocks += wanted;
            }
        }
        Op::Commit { who: at, tokens, computed } => {
            let Some(attempt) = who(at) else { return };
            let holder = &reference.holders[&attempt];
            let most = (holder.tokens.len() + tokens.len()).min((holder.blocks * T) as usize) as u32;
            let computed = (holder.computed + computed).min(most);
            assert_eq!(run(kv, Input::Commit { attempt, tokens: tokens.clone(), computed }), []);
            reference.commit(attempt, &tokens, computed);
        }
        Op::Release { who: at } => {
            let Some(attempt) = who(at) else { return };
            let before: u32 = reference.counts()[..2].iter().sum();
            let out = run(kv, Input::Release { attempt });
            reference.release(attempt);
            let freed = reference.counts()[..2].iter().sum::<u32>() - before;
            let told = if freed > 0 { vec![Effect::Freed { blocks: freed }] } else { Vec::new() };
            assert_eq!(out, told);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_agree_with_the_reference(blocks in 1u32..24, ops in ops()) {
        let mut kv = manager(blocks);
        let mut reference = Reference { total: blocks, ..Reference::default() };
        for (seq, op) in ops.into_iter().enumerate() {
            compare(&mut kv, &mut reference, seq as u64, op);
            prop_assert_eq!(counts(&kv), reference.counts());
            for (tenant, tokens) in reference.prefixes.keys() {
                prop_assert_eq!(probe(&kv, *tenant, tokens), tokens.len() as u32);
            }
        }
        for attempt in reference.holders.keys().copied().collect::<Vec<_>>() {
            run(&mut kv, Input::Release { attempt });
        }
        let [free, reusable, held] = counts(&kv);
        prop_assert_eq!((free + reusable, held), (blocks, 0));
    }
}
