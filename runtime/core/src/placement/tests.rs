//! Properties of the routers and of the queue behind them; the published vectors run in the workspace's tests.

use super::reference::{MatchRows, Placed, Reference};
use super::*;
use crate::admission::{self, Admission, HEAD_TOKENS, Limits, Pass, Priority, Queue};
use crate::ids::{ConversationKey, RequestKey, RequestNumber};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

/// A request before it has a number.
fn request(ranks: u32) -> impl Strategy<Value = Waiting> {
    let relax = prop_oneof![Just(None), Just(Some(false)), Just(Some(true))];
    let head = vec(0u32..2, 0..3).prop_map(Vec::into_boxed_slice);
    let priority = prop_oneof![Just(0.5), Just(0.9), Just(-1.0)];
    (
        (0u32..9, prop_oneof![3 => Just(0u32), 1 => 1u32..4]),
        (option::weighted(0.3, 0..ranks + 1), relax, option::weighted(0.7, 1u128..6)),
        (priority, head),
    )
        .prop_map(|((tokens, children), (explicit, relax, conversation), (priority, head))| Waiting {
            tokens,
            children,
            explicit,
            relax,
            affinity: conversation.map(ConversationKey),
            priority: Priority::new(priority).unwrap(),
            head,
            ..Waiting::default()
        })
}

fn config() -> impl Strategy<Value = Config> {
    let policy = prop_oneof![Just(Policy::Balanced), Just(Policy::KvAware), Just(Policy::Conversation)];
    let count =
        prop_oneof![Just(CountChildren::StrictCap), Just(CountChildren::Vectors), Just(CountChildren::Upstream)];
    let queue = prop_oneof![Just(admission::Policy::Fcfs), Just(admission::Policy::Priority)];
    (
        (policy, count, queue, proptest::sample::select(&NewConversations::ALL[..])),
        (1u32..5, any::<bool>(), 0u32..4),
        (
            proptest::sample::select(vec![0.5, 1.0, 1.1, 2.0]),
            proptest::sample::select(vec![0.0, 0.3333, 1.0]),
            proptest::sample::select(vec![0.0, 0.1, 0.5]),
            any::<bool>(),
        ),
    )
        .prop_map(|((policy, count_children, queue, new_conversations), strict, kv)| Config {
            policy,
            count_children,
            queue,
            new_conversations,
            conversations_max: strict.0,
            strict_affinity: strict.1,
            strict_affinity_max_wait_passes: strict.2,
            fair_share_multiplier: kv.0,
            load_weight: kv.1,
            match_threshold: kv.2,
            cold_start_warmup: kv.3,
            ..Config::default()
        })
}

/// One round: what comes, what is held, which active requests end, what is cached.
#[derive(Clone, Debug)]
struct RoundOf {
    arrivals: Vec<Waiting>,
    held: Vec<u32>,
    ends: Vec<u8>,
    cached: std::collections::BTreeMap<usize, Vec<u32>>,
}

fn round_of(ranks: u32) -> impl Strategy<Value = RoundOf> {
    (
        vec(request(ranks), 0..10),
        prop_oneof![4 => Just(Vec::new()), 1 => vec(0u32..3, ranks as usize)],
        vec(any::<u8>(), ranks as usize),
        btree_map(0usize..10, vec(0u32..9, 0..=ranks as usize), 0..6),
    )
        .prop_map(|(arrivals, held, ends, cached)| RoundOf { arrivals, held, ends, cached })
}

fn scenario() -> impl Strategy<Value = (Config, u32, u32, Vec<RoundOf>)> {
    (config(), 1u32..6, 1u32..7).prop_flat_map(|(config, ranks, cap)| {
        vec(round_of(ranks), 1..7).prop_map(move |rounds| (config.clone(), ranks, cap, rounds))
    })
}

/// The fast queue and router beside the slow ones, and the load that they make.
struct Beside {
    config: Config,
    cap: u32,
    queue: Queue,
    router: Router,
    reference: Reference,
    /// Weight and tokens of the active requests of each rank.
    active: Vec<Vec<(u64, u32)>>,
    numbers: u64,
    now_us: u64,
    admission: Admission,
    placement: Placement,
}

impl Beside {
    fn new(config: &Config, ranks: u32, cap: u32) -> Self {
        let bound = config.bound(true);
        Self {
            config: config.clone(),
            cap,
            queue: Queue::new(config.queue),
            router: Router::new(config, bound, ranks),
            reference: Reference::new(config, bound, ranks as usize),
            active: vec![Vec::new(); ranks as usize],
            numbers: 0,
            now_us: 0,
            admission: Admission::default(),
            placement: Placement::default(),
        }
    }

    fn loads(&self) -> Vec<RankLoad> {
        let load = |active: &Vec<(u64, u32)>| RankLoad {
            active_requests: active.iter().map(|(weight, _)| *weight).sum::<u64>() as u32,
            active_tokens: active.iter().map(|(_, tokens)| u64::from(*tokens)).sum(),
        };
        self.active.iter().map(load).collect()
    }

    /// Numbers the arrivals and queues those that may wait.
    fn arrive(&mut self, round: &RoundOf) -> MatchRows {
        let limits =
            Limits { ranks: self.active.len() as u32, cap: self.cap, count_children: self.config.count_children };
        let mut rows = MatchRows::new();
        for (at, request) in round.arrivals.iter().enumerate() {
            let number = RequestNumber(self.numbers);
            self.numbers += 1;
            if let Some(row) = round.cached.get(&at) {
                rows.insert(number, row.clone());
            }
            let key = RequestKey { seq: number.0, ..RequestKey::default() };
            let request = Waiting { number, key, ..request.clone() };
            if limits.vet(&request).is_ok() {
                self.queue.push(request.clone()).unwrap();
                self.reference.push(request);
            }
        }
        rows
    }

    fn end(&mut self, ends: &[u8]) {
        for (active, bits) in self.active.iter_mut().zip(ends) {
            let mut at = 0;
            active.retain(|_| {
                at += 1;
                bits >> (at % 8) & 1 == 0
            });
        }
    }

    fn round(&mut self, round: &RoundOf) {
        let rows = self.arrive(round);
        self.now_us += 1;
        let loads = self.loads();
        let counts: Vec<u32> = loads.iter().map(|load| load.active_requests).collect();
        let pass = Pass {
            only: None,
            budget: admission::budget(&counts, &round.held, self.cap),
            cap: self.cap,
            counts: &counts,
            held: &round.held,
            now_us: self.now_us,
            count_children: self.config.count_children,
        };
        let (router, now_us) = (&self.router, self.now_us);
        self.queue.admit(&pass, |request| router.admission_rank(request, now_us), &mut self.admission);
        let slow = self.reference.admit(&pass);
        assert_eq!(self.admission.admitted, slow.admitted, "admitted");
        assert!(self.queue.iter().eq(&self.reference.waiting), "still waiting");
        let held = &self.admission.held;
        assert!((0..counts.len()).all(|rank| held.get(rank).copied().unwrap_or(0) == slow.held[rank]), "held");
        self.place(&loads, &rows, &slow.admitted);
        self.end(&round.ends);
    }

    fn place(&mut self, loads: &[RankLoad], rows: &MatchRows, batch: &[Admitted]) {
        let held = &self.admission.held;
        let routing = Routing { loads, cap: self.cap, held, now_us: self.now_us, matches: rows };
        let pins: Vec<(u32, u32)> = self.reserved_pins(batch);
        self.router.route(&routing, batch, &mut self.placement);
        self.placement.check(batch.len(), loads.len());
        let slow = self.reference.route(batch, (loads, self.cap, held), self.now_us, rows);
        assert_eq!(placed(&self.placement), slow, "placement");
        let whole = batch.iter().all(|admitted| admitted.request.children == 0);
        if whole || self.config.count_children == CountChildren::StrictCap {
            for (index, rank) in pins {
                let got = self.placement.assigned.iter().find(|assigned| assigned.index == index);
                assert_eq!(got.map(|assigned| assigned.rank), Some(rank), "I5: the reserved slot");
            }
        }
        for assigned in &self.placement.assigned {
            let request = &batch[assigned.index as usize].request;
            let weight = self.config.count_children.weight(request.children);
            self.active[assigned.rank as usize].push((weight, request.tokens));
        }
        let mut back = Vec::new();
        for index in &self.placement.dropped {
            let request = batch[*index as usize].request.clone();
            self.reference.push(request.clone());
            back.push(request);
        }
        self.queue.put_back(back).unwrap();
        self.invariants();
    }

    /// Requests whose slot is reserved for their conversation.
    fn reserved_pins(&self, batch: &[Admitted]) -> Vec<(u32, u32)> {
        let pinned = |admitted: &Admitted| self.router.admission_rank(&admitted.request, self.now_us);
        batch.iter().enumerate().filter_map(|(at, admitted)| Some((at as u32, pinned(admitted)?))).collect()
    }

    fn invariants(&self) {
        self.queue.check();
        self.router.check(self.active.len() as u32);
        for (rank, load) in self.loads().iter().enumerate() {
            let weightless = self.config.count_children != CountChildren::Vectors;
            if weightless {
                assert!(load.active_requests <= self.cap, "I3: rank {rank} over its cap");
                assert_eq!(self.placement.over_cap, 0, "I3: the way over the cap is not taken");
            }
            assert!(load.active_requests <= self.placement.expected || load.active_requests > self.cap, "I2");
        }
        if self.config.count_children == CountChildren::StrictCap
            && (self.config.policy != Policy::KvAware || self.config.fair_share_multiplier >= 1.0)
        {
            assert_eq!(self.placement.dropped, [0u32; 0], "what admission lets through finds a rank");
        }
    }
}

fn placed(placement: &Placement) -> Placed {
    Placed {
        assigned: placement.assigned.iter().map(|a| (a.index as usize, a.rank as usize)).collect(),
        dropped: placement.dropped.iter().map(|index| *index as usize).collect(),
        expected: u64::from(placement.expected),
    }
}

fn snapshot<T: Serialize + for<'de> Deserialize<'de>>(state: &T) -> T {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn queue_and_routers_decide_as_the_reference((config, ranks, cap, rounds) in scenario()) {
        let mut beside = Beside::new(&config, ranks, cap);
        for round in &rounds {
            beside.round(round);
        }
    }

    /// Loads that no admission pass would let through, and batches larger than all room.
    #[test]
    fn routers_place_any_batch_as_the_reference(
        (config, ranks, cap, rounds) in scenario(),
        active in vec((0u32..9, 0u64..40), 6),
    ) {
        let mut beside = Beside::new(&config, ranks, cap);
        for round in &rounds {
            let loads: Vec<RankLoad> = active[..ranks as usize]
                .iter()
                .map(|(active_requests, active_tokens)| RankLoad {
                    active_requests: *active_requests,
                    active_tokens: *active_tokens,
                })
                .collect();
            let rows = MatchRows::new();
            let batch: Vec<Admitted> = round
                .arrivals
                .iter()
                .zip(0..)
                .map(|(request, number)| Admitted {
                    request: Waiting { number: RequestNumber(number), ..request.clone() },
                    reserved: None,
                })
                .collect();
            let routing = Routing { loads: &loads, cap, held: &round.held, now_us: 0, matches: &rows };
            beside.router.route(&routing, &batch, &mut beside.placement);
            beside.placement.check(batch.len(), loads.len());
            let slow = beside.reference.route(&batch, (&loads, cap, &round.held), 0, &rows);
            prop_assert_eq!(placed(&beside.placement), slow);
            beside.router.check(ranks);
            if config.count_children == CountChildren::StrictCap {
                prop_assert_eq!(beside.placement.over_cap, 0);
            }
        }
    }

    #[test]
    fn restored_replicas_have_the_same_digest_and_go_on_alike((config, ranks, cap, rounds) in scenario()) {
        let mut beside = Beside::new(&config, ranks, cap);
        for round in &rounds {
            let (queue, router) = (snapshot(&beside.queue), snapshot(&beside.router));
            prop_assert_eq!(queue.digest(), beside.queue.digest());
            prop_assert_eq!(router.digest(), beside.router.digest());
            (beside.queue, beside.router) = (queue, router);
            beside.round(round);
            prop_assert!((0..256).all(|slice| beside.queue.verify(slice) && beside.router.verify(slice)));
        }
    }

    #[test]
    fn a_new_view_keeps_what_ranks_that_stay_know(
        (config, ranks, cap, rounds) in scenario(),
        (stay, joined, turn) in (vec(any::<bool>(), 6), 0u32..3, 0usize..6),
    ) {
        let mut beside = Beside::new(&config, ranks, cap);
        for round in &rounds {
            beside.round(round);
        }
        let stayers = stay[..ranks as usize].iter().filter(|stays| **stays).count() as u32;
        let mut places: Vec<u32> = (0..stayers).collect();
        let turn = turn % places.len().max(1);
        places.rotate_left(turn);
        let mut places = places.into_iter();
        let old_to_new: Vec<Option<u32>> =
            stay[..ranks as usize].iter().map(|stays| if *stays { places.next() } else { None }).collect();
        let remap = Remap::new(old_to_new.clone(), stayers + joined).unwrap();
        let (before, waiting) = (beside.router.clone(), beside.queue.clone());
        beside.router.remap(&remap);
        let stranded = beside.queue.remap(&remap);
        beside.router.check(stayers + joined);
        beside.queue.check();
        if let (Router::Conversation(old), Router::Conversation(new)) = (&before, &beside.router) {
            let kept: Vec<_> = old
                .table()
                .iter()
                .filter_map(|(key, rank)| Some((key, old_to_new[rank as usize]?)))
                .collect();
            prop_assert_eq!(new.table().iter().collect::<Vec<_>>(), kept);
            if stay[old.cursor() as usize % ranks as usize] {
                prop_assert_eq!(Some(new.cursor()), old_to_new[old.cursor() as usize]);
            }
        }
        if let (Router::KvAware(old), Router::KvAware(new)) = (&before, &beside.router) {
            for (rank, place) in old_to_new.iter().enumerate() {
                let Some(place) = place else { continue };
                prop_assert_eq!(old.pending().contains(&(rank as u32)), new.pending().contains(place));
            }
        }
        let gone = |request: &Waiting| request.explicit.is_some_and(|rank| old_to_new[rank as usize].is_none());
        let strict_gone: Vec<_> =
            waiting.iter().filter(|r| gone(r) && r.relax != Some(true)).map(|r| r.number).collect();
        prop_assert_eq!(stranded.iter().map(|r| r.number).collect::<Vec<_>>(), strict_gone);
        prop_assert_eq!(beside.queue.len() + stranded.len(), waiting.len());
        for request in beside.queue.iter() {
            let before = waiting.get(request.number).unwrap();
            prop_assert_eq!(request.explicit, before.explicit.and_then(|rank| old_to_new[rank as usize]));
        }
    }
}

fn turn(number: u64, conversation: u128) -> Waiting {
    Waiting {
        number: RequestNumber(number),
        key: RequestKey { seq: number, ..RequestKey::default() },
        tokens: 10,
        affinity: Some(ConversationKey(conversation)),
        ..Waiting::default()
    }
}

fn strict(passes: u32) -> Config {
    Config {
        strict_affinity_max_wait_passes: passes,
        new_conversations: NewConversations::RoundRobin,
        ..Config::default()
    }
}

/// One pass and its placement: (number, rank, reason) in placement order.
fn step(queue: &mut Queue, router: &mut Router, counts: &[u32], cap: u32, now_us: u64) -> Vec<(u64, u32, Why)> {
    let mut admission = Admission::default();
    let pass = Pass {
        only: None,
        budget: admission::budget(counts, &[], cap),
        cap,
        counts,
        held: &[],
        now_us,
        count_children: CountChildren::StrictCap,
    };
    queue.admit(&pass, |request| router.admission_rank(request, now_us), &mut admission);
    let loads: Vec<RankLoad> =
        counts.iter().map(|count| RankLoad { active_requests: *count, active_tokens: 0 }).collect();
    let mut placement = Placement::default();
    let routing = Routing { loads: &loads, cap, held: &admission.held, now_us, matches: &NoMatches };
    router.route(&routing, &admission.admitted, &mut placement);
    assert_eq!((placement.over_cap, placement.dropped.len()), (0, 0));
    let number = |assigned: &Assigned| admission.admitted[assigned.index as usize].request.number.0;
    placement.assigned.iter().map(|assigned| (number(assigned), assigned.rank, assigned.why)).collect()
}

#[test]
fn a_turn_is_deferred_twice_and_then_overflows_without_losing_its_conversation() {
    let config = strict(2);
    let mut queue = Queue::new(admission::Policy::Fcfs);
    let mut router = Router::new(&config, config.bound(true), 2);
    queue.push(turn(1, 7)).unwrap();
    let first = step(&mut queue, &mut router, &[0, 0], 1, 0);
    assert_eq!((first[0].1, first[0].2.label()), (0, "new"));

    queue.push(turn(2, 7)).unwrap();
    for deferrals in 1..=2 {
        queue.push(turn(10 + deferrals, 100 + u128::from(deferrals))).unwrap();
        let placed = step(&mut queue, &mut router, &[1, 0], 1, 0);
        assert_eq!(placed.iter().map(|p| (p.0, p.1)).collect::<Vec<_>>(), [(10 + deferrals, 1)], "later ones pass");
        let waiting: Vec<_> = queue.iter().map(|r| (r.number.0, u64::from(r.deferrals))).collect();
        assert_eq!(waiting, [(2, deferrals)], "it keeps its place");
    }
    let overflow = step(&mut queue, &mut router, &[1, 0], 1, 0);
    assert_eq!((overflow[0].0, overflow[0].1), (2, 1));
    assert_eq!((overflow[0].2.overflow_from, overflow[0].2.label()), (Some(0), "overflow"));

    queue.push(turn(3, 7)).unwrap();
    let home = step(&mut queue, &mut router, &[0, 1], 1, 0);
    assert_eq!((home[0].1, home[0].2.choice), (0, Choice::Pinned { deferrals: 0 }), "still bound to its rank");
}

#[test]
fn outside_lockstep_the_bound_is_time_since_the_first_deferral() {
    let config = Config { strict_affinity_max_wait_s: 3, ..strict(1) };
    let mut queue = Queue::new(admission::Policy::Fcfs);
    let mut router = Router::new(&config, config.bound(false), 2);
    queue.push(turn(1, 7)).unwrap();
    step(&mut queue, &mut router, &[0, 0], 1, 0);
    queue.push(turn(2, 7)).unwrap();
    let start = 50_000_000;
    for now_us in [start, start + 1, start + 2_999_999] {
        assert_eq!(step(&mut queue, &mut router, &[1, 0], 1, now_us), []);
    }
    let overflow = step(&mut queue, &mut router, &[1, 0], 1, start + 3_000_000);
    assert_eq!((overflow[0].1, overflow[0].2.overflow_from), (1, Some(0)));
}

#[test]
fn a_bound_of_nothing_never_waits() {
    for bound in [Bound::Passes(0), Bound::Micros(0)] {
        assert!(bound.expired(&turn(1, 7), 0));
    }
}

#[test]
fn a_parent_is_not_starved_by_requests_without_children() {
    let config = Config { strict_affinity: false, ..Config::default() };
    let mut queue = Queue::new(admission::Policy::Fcfs);
    let mut router = Router::new(&config, config.bound(true), 2);
    queue.push(Waiting { children: 2, ..turn(0, 1) }).unwrap();
    let mut counts = [3u32, 4];
    for number in 1..20 {
        // Both ranks are kept full by single requests; one ends in each round.
        queue.push(turn(number, 100 + u128::from(number))).unwrap();
        counts[number as usize % 2] -= 1;
        for (placed, rank, _) in step(&mut queue, &mut router, &counts, 4, 0) {
            counts[rank as usize] += if placed == 0 { 3 } else { 1 };
            assert!(counts[rank as usize] <= 4);
            if placed == 0 {
                return;
            }
        }
        counts[1] = counts[1].max(1);
    }
    panic!("the parent never found room");
}

#[test]
fn what_a_rank_can_never_hold_is_refused() {
    let limits = Limits { ranks: 2, cap: 4, count_children: CountChildren::StrictCap };
    let refusal = |request: Waiting| limits.vet(&request).unwrap_err().label();
    assert_eq!(refusal(Waiting { children: 4, ..turn(1, 1) }), "too_many_children");
    assert_eq!(refusal(Waiting { children: u32::MAX, ..turn(1, 1) }), "too_many_children");
    assert_eq!(refusal(Waiting { explicit: Some(2), ..turn(1, 1) }), "no_such_rank");
    assert_eq!(refusal(Waiting { tokens: 0, ..turn(1, 1) }), "empty_prompt");
    assert_eq!(limits.vet(&Waiting { children: 3, explicit: Some(1), ..turn(1, 1) }), Ok(()));
}

fn route_one(router: &mut Router, request: Waiting, loads: &[RankLoad], cap: u32) -> Placement {
    let mut placement = Placement::default();
    let routing = Routing { loads, cap, held: &[], now_us: 0, matches: &NoMatches };
    let batch = [Admitted { request, reserved: None }];
    router.route(&routing, &batch, &mut placement);
    placement.check(1, loads.len());
    placement
}

#[test]
fn inputs_on_which_the_published_routers_fail_are_placed_safely() {
    let idle = [RankLoad::default(); 3];
    for policy in [Policy::Balanced, Policy::KvAware, Policy::Conversation] {
        let config = Config { policy, ..Config::default() };
        let mut router = Router::new(&config, config.bound(true), 3);
        let empty = route_one(&mut router, Waiting::default(), &idle, 4);
        assert_eq!(empty.assigned.len(), 1, "{policy:?}: an empty prompt on idle ranks");
        let absent = Waiting { explicit: Some(u32::MAX), relax: Some(false), ..turn(1, 1) };
        let placement = route_one(&mut router, absent, &idle, 4);
        assert_eq!(placement.assigned.len(), 1, "{policy:?}: a rank out of range");
        let nowhere = route_one(&mut router, turn(2, 2), &[], 4);
        assert_eq!((nowhere.dropped.as_slice(), nowhere.expected), (&[0][..], 0), "{policy:?}: no ranks");
        let full = [RankLoad { active_requests: 4, active_tokens: u64::MAX }; 3];
        let refused = route_one(&mut router, turn(3, 3), &full, 4);
        assert_eq!((refused.dropped.as_slice(), refused.over_cap), (&[0][..], 0), "{policy:?}: no room");
        let absurd = [RankLoad { active_requests: u32::MAX, active_tokens: u64::MAX }; 3];
        let refused = route_one(&mut router, turn(4, 4), &absurd, u32::MAX);
        assert_eq!(refused.dropped, [0], "{policy:?}: absurd counts");
        router.check(3);
    }
}

#[test]
fn unset_relax_counts_as_relaxed_in_the_conversation_router() {
    let config = strict(5);
    let mut router = Router::new(&config, config.bound(true), 2);
    let hinted = |number, relax| Admitted {
        request: Waiting { explicit: Some(0), relax, ..turn(number, u128::from(number)) },
        reserved: None,
    };
    let batch = [hinted(1, None), hinted(2, None), hinted(3, Some(false))];
    let loads = [RankLoad::default(); 2];
    let routing = Routing { loads: &loads, cap: 1, held: &[], now_us: 0, matches: &NoMatches };
    let mut placement = Placement::default();
    router.route(&routing, &batch, &mut placement);
    assert_eq!((placement.assigned[0].index, placement.assigned[0].rank), (2, 0), "the strict one goes first");
}

#[test]
fn mappings_that_are_none_are_refused() {
    assert_eq!(Remap::new(vec![Some(0), Some(0)], 2), Err(RemapError::Twice { new: 0 }));
    assert_eq!(Remap::new(vec![Some(2)], 2), Err(RemapError::OutOfRange { old: 0, new: 2, ranks: 2 }));
}

#[test]
fn a_cursor_moves_on_to_the_next_rank_that_stayed() {
    let remap = Remap::new(vec![Some(1), None, None, Some(0)], 3).unwrap();
    assert_eq!([0, 1, 2, 3].map(|old| remap.cursor(old)), [1, 0, 0, 0]);
    assert_eq!(remap.joined().collect::<Vec<_>>(), [2]);
    assert_eq!(Remap::new(vec![None], 1).unwrap().cursor(0), 0);
}

#[test]
fn ranks_that_join_are_warmed_up_too() {
    let config = Config { policy: Policy::KvAware, cold_start_warmup: true, ..Config::default() };
    let mut router = Router::new(&config, config.bound(true), 2);
    route_one(&mut router, turn(1, 1), &[RankLoad::default(); 2], 4);
    router.remap(&Remap::new(vec![Some(1), Some(0)], 3).unwrap());
    let Router::KvAware(router) = router else { panic!("another router") };
    assert_eq!(router.pending(), [0, 2]);
}

#[test]
fn configuration_rejects_an_unknown_policy_and_names_the_known_ones() {
    let error = serde_json::from_str::<Config>(r#"{"new-conversations": "least-busy"}"#).unwrap_err().to_string();
    for name in ["least-busy", "round-robin", "least-queued", "least-tokens"] {
        assert!(error.contains(name), "{error}");
    }
    let error = serde_json::from_str::<Config>(r#"{"max-sessions": 4}"#).unwrap_err().to_string();
    assert!(error.contains("max-sessions"), "{error}");
}

#[test]
fn routers_fall_back_to_round_robin_on_an_unknown_policy_and_say_so() {
    let config = Config::default();
    let (mut router, warning) = Conversation::with_policy_name(&config, Bound::Passes(1), "least_busy");
    assert_eq!(warning.unwrap().name, "least_busy");
    let batch: Vec<Admitted> = (1..4).map(|n| Admitted { request: turn(n, u128::from(n)), reserved: None }).collect();
    let loads = [1, 0, 0].map(|active_requests| RankLoad { active_requests, active_tokens: 0 });
    let routing = Routing { loads: &loads, cap: 4, held: &[], now_us: 0, matches: &NoMatches };
    let mut placement = Placement::default();
    router.route(&routing, &batch, &mut placement);
    assert_eq!(placement.assigned.iter().map(|a| a.rank).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(NewConversations::from_name("least_tokens"), (NewConversations::LeastTokens, None));
}

#[test]
fn published_field_names_and_values_mean_the_same() {
    let published = r#"{
        "kv_cache_routing_conversation_affinity": true,
        "kv_cache_routing_new_conv_placement": "least_tokens",
        "kv_cache_routing_max_sessions": 9,
        "kv_cache_routing_strict_conversation_affinity": false,
        "kv_cache_routing_strict_affinity_max_wait_iters": 7,
        "kv_cache_routing_fair_share_multiplier": 3.0,
        "kv_cache_routing_load_balance_weight": 0.5,
        "kv_cache_routing_match_rate_threshold": 0.2,
        "kv_cache_routing_cold_start_warmup": true,
        "kv_cache_routing_account_for_in_transfer": true,
        "enable_balance": true, "timeout_iters": 4, "batching_wait_iters": 2
    }"#;
    let ours = Config {
        new_conversations: NewConversations::LeastTokens,
        conversations_max: 9,
        strict_affinity: false,
        strict_affinity_max_wait_passes: 7,
        fair_share_multiplier: 3.0,
        load_weight: 0.5,
        match_threshold: 0.2,
        cold_start_warmup: true,
        account_for_in_transfer: true,
        balance: true,
        balance_timeout_steps: 4,
        balance_batching_wait_steps: 2,
        ..Config::default()
    };
    assert_eq!(serde_json::from_str::<Config>(published).unwrap(), ours);
    assert_eq!(snapshot(&ours), ours);
    let policy =
        |text: &str| serde_json::from_str::<Config>(text).map(|config| config.policy).map_err(|e| e.to_string());
    assert_eq!(policy("{}"), Ok(Policy::Conversation));
    assert_eq!(policy(r#"{"enable_kv_cache_aware_routing": true}"#), Ok(Policy::KvAware));
    assert_eq!(policy(r#"{"enable_kv_cache_aware_routing": false}"#), Ok(Policy::Balanced));
    assert_eq!(policy(r#"{"policy": "default"}"#), Ok(Policy::Balanced));
    let refusal = policy(r#"{"policy": "balanced", "kv_cache_routing_conversation_affinity": true}"#).unwrap_err();
    assert!(refusal.contains("balanced") && refusal.contains("kv_cache_routing_conversation_affinity"), "{refusal}");
}

#[test]
fn settings_that_no_router_can_use_are_refused() {
    let refusal = |config: Config| config.validate().unwrap_err().to_string();
    assert!(refusal(Config { load_weight: f64::NAN, ..Config::default() }).contains("load-weight is NaN"));
    assert!(refusal(Config { match_threshold: -1.0, ..Config::default() }).contains("match-threshold is -1"));
    assert!(refusal(Config { conversations_max: 0, ..Config::default() }).contains("conversations-max"));
    let gate = Config { balance: true, balance_low_occupancy_timeout_steps: 51, ..Config::default() };
    assert!(refusal(gate).contains("(50)"));
}

#[test]
fn only_the_first_tokens_order_a_batch() {
    let config = Config { policy: Policy::KvAware, ..Config::default() };
    let mut router = Router::new(&config, config.bound(true), 1);
    let with_head = |last: u32, tokens: u32, number: u64| {
        let mut head = vec![1; HEAD_TOKENS];
        head.push(last);
        Admitted { request: Waiting { head: head.into(), tokens, ..turn(number, 1) }, reserved: None }
    };
    let batch = [with_head(0, 70, 1), with_head(9, 80, 2)];
    let loads = [RankLoad::default()];
    let routing = Routing { loads: &loads, cap: 4, held: &[], now_us: 0, matches: &NoMatches };
    let mut placement = Placement::default();
    router.route(&routing, &batch, &mut placement);
    assert_eq!(placement.assigned.iter().map(|a| a.index).collect::<Vec<_>>(), [1, 0], "the longer one first");
}
