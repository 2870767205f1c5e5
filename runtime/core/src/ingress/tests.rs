use super::*;
use crate::kv::identity::{chain, truncated_chain};
use proptest::prelude::*;

fn submission(ticket: u64, produced: Vec<TokenId>) -> Box<Submission> {
    Box::new(Submission {
        ticket: Ticket(ticket),
        prompt: Arc::from([1, 2, 3]),
        keys: PromptKeys::default(),
        produced,
        generation: Generation { max_new_tokens: 8, stop_tokens: vec![99], ..Generation::default() },
        conversation: None,
        sub_agent: None,
        explicit: None,
        priority: 0.5,
        tenant: 0,
        child: 0,
    })
}

fn key(ticket: u64) -> RequestKey {
    RequestKey { ingress: Incarnation(7), seq: ticket }
}

fn attempt(ticket: u64, attempt: u32) -> AttemptKey {
    AttemptKey { key: key(ticket), attempt: Attempt(attempt) }
}

fn frame(attempt: AttemptKey, first_position: u32, tokens: &[TokenId], finished: Option<Finish>) -> Input {
    let tokens = tokens.iter().map(|t| Drawn::new(*t, -0.5)).collect();
    Input::Frame(Frame { attempt, first_position, tokens, cached_tokens: 0, finished })
}

struct Rig {
    machine: Machine,
    now_us: u64,
}

impl Rig {
    fn new(config: Config) -> Self {
        let mut rig = Self { machine: Machine::new(config), now_us: 0 };
        rig.put(Input::NewCluster(Incarnation(7)));
        rig
    }

    fn put(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.machine.handle(self.now_us, input, &mut out);
        self.machine.check().expect("invariants");
        out
    }

    fn placed(ticket: u64) -> Self {
        let mut rig = Self::new(Config::default());
        rig.put(Input::Submit(submission(ticket, vec![])));
        rig.put(Input::Placed { attempt: attempt(ticket, 1), rank: RankId(0) });
        rig
    }
}

fn tokens(effects: &[Effect]) -> Vec<TokenId> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Tokens { tokens, .. } => Some(tokens.iter().map(|t| t.token)),
            _ => None,
        })
        .flatten()
        .collect()
}

#[test]
fn a_request_is_announced_prompted_streamed_and_ended_by_its_ingress() {
    let mut rig = Rig::new(Config::default());
    let out = rig.put(Input::Submit(submission(1, vec![])));
    let [Effect::Announce(Entry::Arrival(arrival))] = &out[..] else { panic!("{out:?}") };
    assert_eq!((arrival.key, arrival.prompt_tokens, arrival.produced_tokens), (key(1), 3, 0));
    assert!(arrival.head.is_empty() && arrival.chain.hashes.is_empty(), "nobody probes");
    let out = rig.put(Input::Placed { attempt: attempt(1, 1), rank: RankId(1) });
    let [Effect::Placed { .. }, Effect::Prompt { rank: RankId(1), prompt, .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((prompt.tokens.as_slice(), prompt.produced), ([1, 2, 3].as_slice(), 0));
    assert_eq!(tokens(&rig.put(frame(attempt(1, 1), 0, &[10, 11], None))), [10, 11]);
    let out = rig.put(frame(attempt(1, 1), 2, &[99], Some(Finish::Stop)));
    assert_eq!(tokens(&out), [99]);
    assert!(out.contains(&Effect::Announce(Entry::Ended(key(1)))));
    assert!(out.contains(&Effect::Ended { ticket: Ticket(1), finish: Finish::Stop }));
    assert_eq!(rig.machine.open_len(), 0);
}

#[test]
fn where_the_policy_probes_arrivals_carry_the_keys_of_all_but_the_last_token() {
    let mut rig = Rig::new(Config { probe_block_tokens: Some(2), ..Config::default() });
    let mut long = submission(1, vec![]);
    long.prompt = (0..3000).collect();
    let out = rig.put(Input::Submit(long));
    let [Effect::Announce(Entry::Arrival(arrival))] = &out[..] else { panic!("{out:?}") };
    assert_eq!(arrival.head.len(), 64);
    // 2,999 reusable tokens are 1,499 full blocks: every third key, 499 of them.
    assert_eq!((arrival.chain.stride, arrival.chain.hashes.len()), (3, 499));
    let prompt: Vec<TokenId> = (0..6).collect();
    let scope = Scope { tenant: 0, adapter: None };
    assert_eq!(arrival.chain.hashes[0], truncated_chain(&scope, &prompt, 2)[2]);
}

#[test]
fn keys_that_come_with_a_prompt_are_announced_and_not_computed_again() {
    let mut rig = Rig::new(Config { probe_block_tokens: Some(2), ..Config::default() });
    let mut announced = |ticket, keys| {
        let prompt = (0..9).collect();
        let out = rig.put(Input::Submit(Box::new(Submission { prompt, keys, ..*submission(ticket, vec![]) })));
        let [Effect::Announce(Entry::Arrival(arrival))] = &out[..] else { panic!("{out:?}") };
        arrival.chain.clone()
    };
    let keys = |tenant, block_tokens, blocks: usize| {
        let prompt: Vec<TokenId> = (0..9).collect();
        let keys = chain(&Scope { tenant, adapter: None }, &prompt, block_tokens);
        PromptKeys { block_tokens, keys: keys[..blocks].into() }
    };
    let computed = announced(1, PromptKeys::default());
    assert_eq!(announced(2, keys(0, 2, 4)), computed);
    assert_eq!(announced(3, keys(0, 2, 1)), computed, "the rest of the chain goes on from what is known");
    assert_eq!(announced(4, keys(0, 4, 2)), computed, "keys of other blocks say nothing");
    assert_ne!(announced(5, keys(9, 2, 4)), computed, "keys are taken as they come");
}

#[test]
fn frames_of_a_sealed_or_unknown_attempt_are_fenced_and_overlaps_are_dropped() {
    let mut rig = Rig::placed(1);
    rig.put(frame(attempt(1, 1), 0, &[10, 11], None));
    let out = rig.put(Input::Seal { attempt: attempt(1, 1) });
    assert_eq!(out, [Effect::Announce(Entry::Resume { key: key(1), attempt: Attempt(1), produced: 2 })]);
    assert_eq!(rig.put(frame(attempt(1, 1), 2, &[12], None)), [], "sealed");
    let out = rig.put(Input::Placed { attempt: attempt(1, 2), rank: RankId(0) });
    let Some(Effect::Prompt { prompt, .. }) = out.last() else { panic!("{out:?}") };
    assert_eq!((prompt.tokens.as_slice(), prompt.produced), ([1, 2, 3, 10, 11].as_slice(), 2));
    assert_eq!(rig.put(frame(attempt(1, 1), 2, &[12], None)), [], "an old attempt");
    assert_eq!(rig.put(frame(attempt(5, 1), 0, &[12], None)), [], "a stranger");
    assert_eq!(tokens(&rig.put(frame(attempt(1, 2), 1, &[11, 12], None))), [12], "overlap");
    assert_eq!(rig.machine.counts().frames_fenced, 3);
    assert_eq!(rig.machine.counts().tokens_overlapping, 1);
}

#[test]
fn a_gap_asks_for_another_attempt_instead_of_skipping_tokens() {
    let mut rig = Rig::placed(1);
    rig.put(frame(attempt(1, 1), 0, &[10], None));
    let out = rig.put(frame(attempt(1, 1), 2, &[12], None));
    assert_eq!(out, [Effect::Announce(Entry::Resume { key: key(1), attempt: Attempt(1), produced: 1 })]);
}

#[test]
fn a_rank_that_dies_behind_the_last_token_loses_nothing() {
    for (last, finish) in [(99, Finish::Stop), (17, Finish::Length)] {
        let mut rig = Rig::placed(1);
        rig.put(frame(attempt(1, 1), 0, &[10, 11, 12, 13, 14, 15, 16], None));
        rig.put(frame(attempt(1, 1), 7, &[last], None));
        let out = rig.put(Input::Seal { attempt: attempt(1, 1) });
        assert!(out.contains(&Effect::Ended { ticket: Ticket(1), finish }), "{out:?}");
    }
}

#[test]
fn a_client_that_leaves_stops_its_rank_at_once_and_is_announced() {
    let mut rig = Rig::placed(1);
    let stop = Effect::Stop { rank: RankId(0), attempt: attempt(1, 1) };
    assert_eq!(rig.put(Input::Cancel(Ticket(1))), [stop, Effect::Announce(Entry::Cancel(key(1)))]);
    assert_eq!(rig.put(Input::Cancel(Ticket(1))), []);
    assert_eq!(rig.put(frame(attempt(1, 1), 0, &[10], None)), []);
}

#[test]
fn the_backlog_is_bounded_in_requests_tokens_and_time() {
    let config = Config {
        announced_requests_max: 1,
        backlog_requests_max: 2,
        backlog_tokens_max: 7,
        announce_wait_us: 100,
        ..Config::default()
    };
    let mut rig = Rig::new(config);
    rig.put(Input::Submit(submission(1, vec![])));
    assert_eq!(rig.put(Input::Submit(submission(2, vec![]))), []);
    assert_eq!(rig.put(Input::Submit(submission(3, vec![]))), []);
    let full = Rejection::BacklogFull { requests: 2, limit: 2 };
    assert_eq!(rig.put(Input::Submit(submission(4, vec![]))), [Effect::Failed { ticket: Ticket(4), rejection: full }]);
    rig.put(Input::Cancel(Ticket(3)));
    let mut long = submission(5, vec![]);
    long.prompt = Arc::from([0; 5]);
    let full = Rejection::BacklogTokensFull { tokens: 8, limit: 7 };
    assert_eq!(rig.put(Input::Submit(long)), [Effect::Failed { ticket: Ticket(5), rejection: full }]);
    assert_eq!(rig.machine.poll_timeout(), Some(100));
    rig.now_us = 100;
    let late = Rejection::AnnounceTimeout { waited_ms: 0 };
    assert_eq!(rig.put(Input::Tick), [Effect::Failed { ticket: Ticket(2), rejection: late }]);
    rig.put(Input::Submit(submission(6, vec![])));
    let out = rig.put(Input::Placed { attempt: attempt(1, 1), rank: RankId(0) });
    let announced = out.iter().any(|e| matches!(e, Effect::Announce(Entry::Arrival(a)) if a.key == key(6)));
    assert!(announced, "a placed request makes room: {out:?}");
}

#[test]
fn a_new_cluster_gets_every_open_request_with_its_tokens_under_a_new_key() {
    let mut rig = Rig::placed(1);
    rig.put(frame(attempt(1, 1), 0, &[10, 11], None));
    rig.put(Input::Submit(submission(2, vec![])));
    let out = rig.put(Input::NewCluster(Incarnation(8)));
    let arrivals: Vec<(RequestKey, u32)> = out
        .iter()
        .map(|e| match e {
            Effect::Announce(Entry::Arrival(a)) => (a.key, a.produced_tokens),
            other => panic!("{other:?}"),
        })
        .collect();
    let new = |ticket| RequestKey { ingress: Incarnation(8), seq: ticket };
    assert_eq!(arrivals, [(new(1), 2), (new(2), 0)]);
    assert_eq!(rig.put(frame(attempt(1, 1), 2, &[12], None)), [], "the old cluster's frames are fenced");
}

#[test]
fn nothing_is_announced_outside_a_cluster_and_nothing_is_taken_while_draining() {
    let mut out = Vec::new();
    let mut machine = Machine::new(Config::default());
    machine.handle(0, Input::Submit(submission(1, vec![])), &mut out);
    assert_eq!(out, []);
    machine.handle(0, Input::NewCluster(Incarnation(7)), &mut out);
    assert!(matches!(&out[..], [Effect::Announce(Entry::Arrival(_))]));
    out.clear();
    machine.handle(0, Input::Drain, &mut out);
    machine.handle(0, Input::Submit(submission(2, vec![])), &mut out);
    assert_eq!(out, [Effect::Failed { ticket: Ticket(2), rejection: Rejection::Draining }]);
}

#[test]
fn a_stream_handed_over_goes_on_behind_its_tokens_or_is_over() {
    let mut rig = Rig::new(Config::default());
    let out = rig.put(Input::Submit(submission(1, vec![10, 11])));
    assert!(matches!(&out[..], [Effect::Announce(Entry::Arrival(a))] if a.produced_tokens == 2));
    let out = rig.put(Input::Submit(submission(2, vec![10, 99])));
    assert_eq!(out, [Effect::Ended { ticket: Ticket(2), finish: Finish::Stop }]);
}

#[derive(Clone, Debug)]
enum Op {
    Submit,
    Place,
    Frame { back: u32, tokens: u32, old: bool, finish: bool },
    Seal,
    Cancel,
    Finish,
    Reject,
    NewCluster,
    Wait,
}

fn ops() -> impl Strategy<Value = Vec<(u8, Op)>> {
    let op = prop_oneof![
        4 => Just(Op::Submit),
        6 => Just(Op::Place),
        12 => (0..3u32, 0..4u32, any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(back, tokens, old, finish)| Op::Frame { back, tokens, old, finish }),
        3 => Just(Op::Seal),
        1 => Just(Op::Cancel),
        1 => Just(Op::Finish),
        1 => Just(Op::Reject),
        1 => Just(Op::NewCluster),
        1 => Just(Op::Wait),
    ];
    prop::collection::vec((0..4u8, op), 1..120)
}

proptest! {
    /// Whatever ranks, replica and clients do: each position of a stream is delivered once and in order, each
    /// submission is answered at most once, and nothing is delivered after its end.
    #[test]
    fn streams_neither_lose_nor_repeat_a_token(ops in ops()) {
        let mut machine = Machine::new(Config { announced_requests_max: 2, ..Config::default() });
        let mut out = Vec::new();
        let mut me = 7;
        machine.handle(0, Input::NewCluster(Incarnation(me)), &mut out);
        let mut next_ticket = 10u64;
        let mut names = [0u64; 4];
        let mut attempts: BTreeMap<u64, u32> = BTreeMap::new();
        let mut delivered: BTreeMap<u64, Vec<TokenId>> = BTreeMap::new();
        let mut answered: BTreeMap<u64, u32> = BTreeMap::new();
        let mut left: Vec<u64> = Vec::new();
        for (now, (who, op)) in ops.into_iter().enumerate() {
            let ticket = names[who as usize];
            let key = RequestKey { ingress: Incarnation(me), seq: ticket };
            let current = attempts.get(&ticket).copied().unwrap_or(0);
            let attempt = AttemptKey { key, attempt: Attempt(current) };
            let held = delivered.get(&ticket).map_or(0, Vec::len) as u32;
            let input = match op {
                Op::Submit => {
                    next_ticket += 1;
                    names[who as usize] = next_ticket;
                    Input::Submit(submission(next_ticket, vec![]))
                }
                Op::Place => {
                    attempts.insert(ticket, current + 1);
                    Input::Placed { attempt: AttemptKey { key, attempt: Attempt(current + 1) }, rank: RankId(0) }
                }
                Op::Frame { back, tokens, old, finish } => {
                    let first = held.saturating_sub(back);
                    // The token at a position is the position: a right continuation of any prefix.
                    let tokens: Vec<TokenId> = (first..first + tokens).collect();
                    let attempt = if old { AttemptKey { attempt: Attempt(current.saturating_sub(1)), ..attempt } } else { attempt };
                    frame(attempt, first, &tokens, finish.then_some(Finish::Length))
                }
                Op::Seal => Input::Seal { attempt },
                Op::Cancel => { left.push(ticket); Input::Cancel(Ticket(ticket)) }
                Op::Finish => { left.push(ticket); Input::Finish(Ticket(ticket)) }
                Op::Reject => Input::Rejected { key, rejection: Rejection::RankFailed },
                Op::NewCluster => { me += 1; attempts.clear(); Input::NewCluster(Incarnation(me)) }
                Op::Wait => Input::Tick,
            };
            out.clear();
            machine.handle(now as u64, input, &mut out);
            prop_assert!(machine.check().is_ok(), "{:?}", machine.check());
            for effect in &out {
                match effect {
                    Effect::Tokens { ticket, tokens, .. } => {
                        prop_assert!(!left.contains(&ticket.0) && !answered.contains_key(&ticket.0));
                        let stream = delivered.entry(ticket.0).or_default();
                        stream.extend(tokens.iter().map(|t| t.token));
                    }
                    Effect::Ended { ticket, .. } | Effect::Failed { ticket, .. } => {
                        prop_assert!(!left.contains(&ticket.0));
                        *answered.entry(ticket.0).or_default() += 1;
                    }
                    _ => {}
                }
            }
            for stream in delivered.values() {
                let positions: Vec<TokenId> = (0..stream.len() as u32).collect();
                prop_assert_eq!(stream, &positions);
            }
            prop_assert!(answered.values().all(|n| *n == 1));
        }
    }
}

#[test]
fn a_standstill_refuses_what_is_new_and_gives_up_what_waits_too_long() {
    let mut rig = Rig::new(Config::default());
    let mut drive = |now_us, input| {
        rig.now_us = now_us;
        let out = rig.put(input);
        (out, rig.machine.poll_timeout(), rig.machine.open_len())
    };
    let submit = |ticket| Input::Submit(submission(ticket, vec![]));
    let still = || Input::Standstill(Some("node-2".into()));
    let refused = Rejection::Standstill { waits_for: "node-2".into() };
    drive(0, submit(1));
    drive(0, submit(2));
    drive(10, Input::Placed { attempt: attempt(2, 1), rank: RankId(5) });
    drive(1_000, still());
    drive(1_100, Input::Standstill(Some("node-2, node-3".into())));
    drive(1_200, still());
    let (out, ..) = drive(2_000, submit(3));
    assert_eq!(out, [Effect::Failed { ticket: Ticket(3), rejection: refused.clone() }]);
    // The rank's node is gone as well: sealed, and resumed once rounds go on.
    let (out, ..) = drive(3_000, Input::Unreachable(vec![RankId(4), RankId(5)]));
    assert_eq!(out, [Effect::Announce(Entry::Resume { key: key(2), attempt: Attempt(1), produced: 0 })]);
    let (again, due, _) = drive(3_000, Input::Unreachable(vec![RankId(5)]));
    assert!(again.is_empty(), "once");
    assert_eq!(due, Some(2_001_000), "since the standstill began");
    let (out, due, _) = drive(2_001_000, Input::Tick);
    let cancel = |seq| Effect::Announce(Entry::Cancel(key(seq)));
    assert_eq!(out, [cancel(1), Effect::Failed { ticket: Ticket(1), rejection: refused.clone() }]);
    assert_eq!(due, Some(30_003_000), "the stream waits longer");
    let (out, ..) = drive(30_003_000, Input::Tick);
    assert_eq!(out, [cancel(2), Effect::Failed { ticket: Ticket(2), rejection: refused }]);
    let (_, _, open) = drive(30_004_000, Input::Standstill(None));
    assert_eq!(open, 0);
    let (out, ..) = drive(30_005_000, submit(4));
    assert!(matches!(out[..], [Effect::Announce(Entry::Arrival(_))]), "{out:?}");
}
