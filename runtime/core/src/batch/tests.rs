//! Rules of the planner one by one.

mod drafts;
mod memory;
mod random;
mod rank;

use super::*;
use crate::ids::BlockId;
use crate::request::Adjustment;
use crate::step::Banned;
use rank::{End, Rank, attempt, undisturbed};

fn config() -> Config {
    let kv = full(64, 4);
    Config { step_tokens_max: 16, sequences_max: 8, draft_tokens_max: 0, vocabulary: 100, kv }
}

fn full(blocks: u32, block_tokens: u32) -> kv::Shape {
    kv::Config::full(blocks, block_tokens).expect("a good configuration").shape()
}

/// A reservation of these blocks, of which nothing is computed.
fn reserved(attempt: AttemptKey, blocks: std::ops::Range<u32>) -> Input {
    let capacity = 4 * blocks.len() as u32;
    let tables = vec![Table::whole(blocks.map(BlockId).collect())];
    let reservation = kv::Reservation { tables, capacity, ..Default::default() };
    Input::Kv(kv::Effect::Reserved { attempt, reservation, copies: Vec::new() })
}

fn reserve(attempt: AttemptKey, tokens: &[TokenId], tokens_max: u32) -> Effect {
    let (scope, tokens) = (Scope { tenant: 1, adapter: None }, tokens.to_vec());
    Effect::Kv(kv::Input::Reserve { attempt, scope, conversation: None, tokens, ahead_tokens: 32, tokens_max })
}

fn sequence(number: u64, tokens: &[TokenId], max_new_tokens: u32) -> Sequence {
    Sequence {
        attempt: attempt(number, 1),
        number: RequestNumber(number),
        child: 0,
        scope: Scope { tenant: 1, adapter: None },
        conversation: None,
        tokens: tokens.to_vec(),
        produced_before: 0,
        generation: Generation { max_new_tokens, ..Generation::default() },
        context_tokens_max: 1000,
    }
}

fn prompt(seed: u64, length: usize) -> Vec<TokenId> {
    (0..length as u64).map(|at| ((seed * 31 + at * at + at * seed) % 11) as TokenId + 1).collect()
}

fn drained(config: Config, sequences: impl IntoIterator<Item = Sequence>) -> Rank {
    let mut rank = Rank::new(config);
    sequences.into_iter().for_each(|sequence| rank.admit(sequence));
    rank.drain();
    rank.check_ended();
    rank
}

#[test]
fn refuses_budgets_of_nothing() {
    let new = |config| Batch::new(config).map(|_| ());
    assert_eq!(new(Config { step_tokens_max: 0, ..config() }), Err(ConfigError::NoStepTokens));
    assert_eq!(new(Config { sequences_max: 0, ..config() }), Err(ConfigError::NoSequences));
    let mut without = config();
    without.kv.pools[0].blocks = 0;
    assert_eq!(new(without), Err(ConfigError::NoBlocks { pool: 0 }));
    assert_eq!(new(config()), Ok(()));
}

#[test]
fn decode_goes_first_and_prefill_fills_the_rest_in_number_order() {
    let mut rank = Rank::new(config());
    rank.admit(sequence(5, &prompt(1, 3), 50));
    for _ in 0..4 {
        rank.deliver_to_kv();
        rank.deliver_to_batch();
    }
    rank.plan();
    rank.finish_step();
    rank.admit(sequence(7, &prompt(2, 40), 5));
    rank.admit(sequence(6, &prompt(3, 10), 5));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    rank.plan();
    let lengths = |step: &crate::step::Step| -> Vec<(u64, usize, bool)> {
        step.slices.iter().map(|s| (s.attempt.key.seq, s.tokens.len(), s.sample.is_some())).collect()
    };
    assert_eq!(lengths(&rank.steps[1]), [(5, 1, true), (6, 10, true), (7, 5, false)]);
    assert_eq!(rank.batch.stats().queued_prefill_tokens, 50);
    rank.finish_step();
    rank.plan();
    assert_eq!(lengths(&rank.steps[2]), [(5, 1, true), (6, 1, true), (7, 14, false)]);
    rank.finish_step();
    assert_eq!(rank.batch.stats().queued_prefill_tokens, 21);
    rank.drain();
    rank.check_ended();
}

#[test]
fn a_step_is_planned_only_when_none_is_in_flight() {
    let mut rank = Rank::new(config());
    rank.admit(sequence(1, &prompt(1, 3), 5));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    assert!(rank.batch.plan().is_some());
    assert!(rank.batch.step_in_flight());
    assert_eq!(rank.batch.plan(), None);
}

#[test]
fn the_budget_of_a_step_changes_no_token() {
    let sequences = || (1..=6).map(|n| sequence(n, &prompt(n % 3, 5 + 6 * n as usize), 20));
    for step_tokens_max in [1, 2, 3, 7, 16, 1000] {
        for sequences_max in [1, 2, 6] {
            let rank = drained(Config { step_tokens_max, sequences_max, ..config() }, sequences());
            assert!(rank.streams.values().all(|s| s.end == Some(End::Finished(Finish::Length))));
            assert_eq!(rank.batch.stats().produced_tokens, 6 * 20);
        }
    }
}

#[test]
fn a_sequence_ends_at_a_stop_token_its_length_or_its_context() {
    let mut stops = sequence(1, &prompt(1, 9), 200);
    let (free, _) = undisturbed(&stops);
    stops.generation.stop_tokens = vec![free[6]];
    let first = free.iter().position(|token| *token == free[6]).expect("it is there");
    let length = sequence(2, &prompt(2, 9), 3);
    let mut context = sequence(3, &prompt(3, 9), 200);
    context.context_tokens_max = 14;
    let rank = drained(config(), [stops, length, context]);
    let ends: Vec<_> = rank.streams.values().map(|s| (s.tokens.len(), s.end.clone().expect("ended"))).collect();
    let expected = [(first + 1, Finish::Stop), (3, Finish::Length), (5, Finish::Length)];
    assert_eq!(ends, expected.map(|(tokens, finish)| (tokens, End::Finished(finish))));
}

#[test]
fn what_can_never_run_is_refused_at_admission() {
    let kv = full(5, 4);
    let refused = |sequence: Sequence| {
        let attempt = sequence.attempt;
        let rank = drained(Config { kv: kv.clone(), ..config() }, [sequence]);
        match rank.streams[&attempt].end.clone() {
            Some(End::Refused(rejection)) => Some(rejection),
            _ => None,
        }
    };
    assert_eq!(refused(sequence(1, &[1; 10], 10)), None, "exactly the pool");
    let too_large = Some(Rejection::TooLargeForRank { wanted: 6, total: 5 });
    assert_eq!(refused(sequence(1, &[1; 10], 11)), too_large);
    let mut at_context = sequence(1, &[1; 10], 3);
    at_context.context_tokens_max = 10;
    assert_eq!(refused(at_context), Some(Rejection::PromptTooLong { tokens: 10, limit: 9 }));
    let mut batch = Batch::new(config()).expect("a good configuration");
    let mut out = Vec::new();
    batch.handle(0, Input::Admit(sequence(1, &[], 4)), &mut out);
    assert_eq!(out, [Effect::Refused { attempt: attempt(1, 1), rejection: Rejection::EmptyPrompt }]);
    assert!(batch.is_idle());
}

#[test]
fn what_another_node_sends_is_refused_by_type_where_it_is_out_of_range() {
    let refused = |change: fn(&mut Sequence)| {
        let mut sequence = sequence(1, &[1, 2, 3], 4);
        change(&mut sequence);
        let mut batch = Batch::new(config()).expect("a good configuration");
        let mut out = Vec::new();
        batch.handle(0, Input::Admit(sequence), &mut out);
        assert!(batch.is_idle() && batch.stats().refused == 1);
        match &out[..] {
            [Effect::Refused { rejection, .. }] => rejection.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(|s| s.generation.sampling.temperature = f32::NAN), "temperature cannot be NaN");
    assert_eq!(refused(|s| s.generation.sampling.min_p = -1.0), "min_p cannot be -1");
    assert_eq!(refused(|s| s.generation.sampling.top_logprobs = u32::MAX), "top_logprobs cannot be 4294967295");
    let penalty = |s: &mut Sequence| {
        let adjustment = Adjustment { repetition_penalty: 0.0, ..Adjustment::default() };
        s.generation.sampling.adjustment = Some(adjustment.into());
    };
    assert_eq!(refused(penalty), "repetition_penalty cannot be 0");
    let outside = "token 100 is outside the vocabulary of 100 tokens";
    assert_eq!(refused(|s| s.tokens[1] = 100), outside);
    let bias = |s: &mut Sequence| {
        let adjustment = Adjustment { logit_bias: vec![(100, 1.0)], ..Adjustment::default() };
        s.generation.sampling.adjustment = Some(adjustment.into());
    };
    assert_eq!(refused(bias), outside);
}

#[test]
fn draws_with_penalties_are_given_the_tokens_before_them_and_others_are_not() {
    let mut penalized = sequence(2, &prompt(2, 6), 5);
    let adjustment = Adjustment { presence_penalty: 1.0, ..Adjustment::default() };
    penalized.generation.sampling.adjustment = adjustment.unless_neutral();
    // Two of its tokens were produced by an attempt before.
    penalized.produced_before = 2;
    let tokens = penalized.tokens.clone();
    let rank = drained(config(), [sequence(1, &prompt(1, 6), 3), penalized]);
    let samples = |number: u64| {
        let slices = rank.steps.iter().flat_map(|step| &step.slices).filter(move |s| s.attempt == attempt(number, 1));
        slices.filter_map(|slice| slice.sample.clone()).collect::<Vec<_>>()
    };
    assert!(samples(1).iter().all(|sample| sample.history.is_none()));
    let all: Vec<TokenId> = tokens.iter().chain(&rank.streams[&attempt(2, 1)].tokens).copied().collect();
    let penalized = samples(2);
    assert_eq!(penalized.len(), 3);
    for sample in penalized {
        let history = sample.history.expect("it has penalties");
        assert_eq!((&history.tokens[..], history.prompt_tokens), (&all[..sample.position as usize], 4));
    }
}

#[test]
fn stop_tokens_are_banned_until_enough_is_produced_over_all_attempts() {
    let mut long = sequence(1, &prompt(1, 6), 5);
    (long.generation.min_new_tokens, long.generation.stop_tokens) = (4, vec![99]);
    long.produced_before = 2;
    let rank = drained(config(), [long, sequence(2, &prompt(2, 6), 3)]);
    let banned: Vec<_> = rank.steps.iter().flat_map(|step| &step.slices).filter_map(|s| s.sample.as_ref()).collect();
    let of_first = |position: u32| banned.iter().any(|s| s.position == position && s.banned.is_some());
    // The prompt has 4 tokens, so the fifth of the output is at position 8.
    assert_eq!([6, 7, 8].map(of_first), [true, true, false]);
    let expected = Banned { tokens: vec![99], before: 8 };
    assert!(banned.iter().filter_map(|sample| sample.banned.as_ref()).all(|banned| *banned == expected));
}

#[test]
fn an_attempt_that_has_nothing_left_to_produce_ends_at_once() {
    let done = |max_new_tokens, stop_tokens: &[TokenId], context_tokens_max| {
        let mut resumed = sequence(1, &[1, 2, 3, 4, 5], max_new_tokens);
        resumed.produced_before = 2;
        resumed.generation.stop_tokens = stop_tokens.to_vec();
        resumed.context_tokens_max = context_tokens_max;
        let mut batch = Batch::new(config()).expect("a good configuration");
        let mut out = Vec::new();
        batch.handle(0, Input::Admit(resumed), &mut out);
        match out.as_slice() {
            [Effect::Emit(frames)] => {
                assert_eq!((frames.len(), frames[0].first_position, frames[0].tokens.len()), (1, 2, 0));
                frames[0].finished
            }
            _ => None,
        }
    };
    assert_eq!(done(2, &[], 100), Some(Finish::Length));
    assert_eq!(done(9, &[5], 100), Some(Finish::Stop));
    assert_eq!(done(9, &[3], 100), None, "a stop token of the prompt is no end");
    assert_eq!(done(9, &[], 5), Some(Finish::Length));
    assert_eq!(done(3, &[], 100), None);
    let mut fresh = sequence(1, &[1, 2, 3], 4);
    fresh.generation.stop_tokens = vec![3];
    let rank = drained(config(), [fresh]);
    assert_eq!(rank.streams[&attempt(1, 1)].tokens.len(), 4, "nor is the prompt's last token");
}

#[test]
fn blocks_that_came_free_are_asked_for_again() {
    let mut batch = Batch::new(config()).expect("a good configuration");
    let (mut out, first, second) = (Vec::new(), attempt(1, 1), attempt(2, 1));
    batch.handle(0, Input::Admit(sequence(1, &[1; 8], 4)), &mut out);
    batch.handle(0, reserved(first, 0..3), &mut out);
    batch.handle(0, Input::Admit(sequence(2, &[2; 3], 4)), &mut out);
    out.clear();
    batch.handle(0, Input::Kv(kv::Effect::Exhausted { attempt: second, wanted: 1, available: 0 }), &mut out);
    assert_eq!(out, [], "there is nothing new to hope for");
    batch.handle(0, Input::Kv(kv::Effect::Freed { blocks: 1 }), &mut out);
    assert_eq!(out, [reserve(second, &[2; 3], 7)]);
}

#[test]
fn turns_of_a_conversation_reuse_what_the_last_one_left() {
    let mut rank = Rank::new(config());
    let mut history = prompt(4, 10);
    let mut cached = Vec::new();
    for turn in 1..=4 {
        rank.admit(sequence(turn, &history, 9));
        rank.drain();
        let stream = &rank.streams[&attempt(turn, 1)];
        cached.push(stream.cached_tokens[0]);
        // All but the last produced token has KV; the next turn finds all of it, and a probe the full blocks.
        let known = history.len() as u32;
        history.extend(&stream.tokens);
        history.extend(prompt(turn, 6));
        let left = (known + 9 - 1) / 4 * 4;
        let scope = Scope { tenant: 1, adapter: None };
        let chain = crate::kv::identity::truncated_chain(&scope, &history, 4);
        assert_eq!(rank.kv.probe(&chain), left);
    }
    assert_eq!(cached, [0, 18, 33, 48]);
    assert_eq!(rank.batch.stats().reused_tokens, 18 + 33 + 48);
    rank.check_ended();
}

#[test]
fn tenants_never_share() {
    let mut other = sequence(2, &prompt(1, 30), 5);
    other.scope.tenant = 2;
    let mut rank = drained(config(), [sequence(1, &prompt(1, 30), 5)]);
    rank.admit(other);
    rank.admit(sequence(3, &prompt(1, 30), 5));
    rank.drain();
    rank.check_ended();
    let cached = [1, 2, 3].map(|n| rank.streams[&attempt(n, 1)].cached_tokens[0]);
    assert_eq!(cached, [0, 0, 29]);
}

#[test]
fn preemption_takes_the_highest_number_and_changes_no_token() {
    // Room for the two prompts and little more; each grows to 10 of the 12 blocks.
    let kv = full(12, 4);
    let sequences = [sequence(1, &prompt(1, 15), 24), sequence(2, &prompt(2, 15), 24)];
    let rank = drained(Config { kv, ..config() }, sequences);
    assert!(rank.batch.stats().preemptions > 0, "the pool is too small for both");
    assert_eq!(rank.ended, [attempt(1, 1), attempt(2, 1)]);
    // The first one never stood still: a token each step after its prefill.
    let last_of_first = rank.steps.iter().rposition(|s| s.slices.iter().any(|s| s.attempt == attempt(1, 1)));
    let with_first = rank.steps.iter().filter(|s| s.slices.iter().any(|s| s.attempt == attempt(1, 1))).count();
    let waited = last_of_first.map(|at| at + 1 - with_first);
    assert!(waited <= Some(6), "{waited:?} steps without the lowest number");
}

#[test]
fn a_preempted_sequence_comes_back_before_later_ones() {
    let kv = full(12, 4);
    let config = Config { kv, sequences_max: 2, ..config() };
    let rank = drained(config, (1..=5).map(|n| sequence(n, &prompt(n, 15), 24)));
    assert!(rank.batch.stats().preemptions > 0);
    assert_eq!(rank.ended, [1, 2, 3, 4, 5].map(|n| attempt(n, 1)));
}

#[test]
fn nobody_overtakes_a_sequence_that_does_not_fit_yet() {
    let kv = full(10, 4);
    let mut rank = Rank::new(Config { kv, ..config() });
    rank.admit(sequence(1, &prompt(1, 20), 10));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    rank.plan();
    rank.admit(sequence(2, &prompt(2, 30), 4));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    for number in 3..30 {
        rank.admit(sequence(number, &prompt(number, 4), 2));
        rank.deliver_to_kv();
        rank.deliver_to_batch();
        rank.plan();
        rank.finish_step();
    }
    rank.drain();
    rank.check_ended();
    let mut begun: Vec<AttemptKey> = Vec::new();
    for slice in rank.steps.iter().flat_map(|step| &step.slices) {
        if !begun.contains(&slice.attempt) {
            begun.push(slice.attempt);
        }
    }
    assert_eq!(begun[..2], [attempt(1, 1), attempt(2, 1)]);
}

#[test]
fn a_cancel_during_a_step_gives_blocks_back_when_it_is_done() {
    let mut rank = Rank::new(config());
    rank.admit(sequence(1, &prompt(1, 15), 10));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    rank.plan();
    rank.cancel(attempt(1, 1));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    assert!(rank.kv.stats().pools[0].blocks_held > 0, "the step still writes");
    rank.finish_step();
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    let stats = rank.batch.stats();
    assert_eq!((stats.cancels, stats.cancel_steps, stats.cancel_steps_max), (1, 1, 1));
    assert_eq!(rank.kv.stats().pools[0].blocks_reusable, 4, "what it computed stays");
    assert!(rank.streams[&attempt(1, 1)].tokens.is_empty());
    assert!(rank.batch.is_idle());
    rank.check_ended();
}

#[test]
fn a_cancel_while_blocks_are_on_their_way_gives_them_back() {
    for delivered in 0..2 {
        let mut rank = Rank::new(config());
        rank.admit(sequence(1, &prompt(1, 15), 10));
        (0..delivered).for_each(|_| assert!(rank.deliver_to_kv()));
        rank.cancel(attempt(1, 1));
        assert!(!rank.batch.is_idle(), "an answer is still to come");
        // The same attempt again, before that answer, must not take it for its own.
        rank.tell_batch(Input::Admit(sequence(1, &prompt(1, 15), 10)));
        assert_eq!(rank.ignored, [Ignored::DuplicateAttempt { attempt: attempt(1, 1) }]);
        rank.drain();
        rank.check_ended();
        assert_eq!(rank.batch.stats().cancel_steps, 0);
        assert_eq!(rank.kv.stats().ignored, 0, "released once");
    }
}

#[test]
fn a_reservation_for_nobody_is_released() {
    let mut batch = Batch::new(config()).expect("a good configuration");
    let mut out = Vec::new();
    let stranger = attempt(9, 1);
    batch.handle(0, reserved(stranger, 1..2), &mut out);
    assert_eq!(out, [Effect::Kv(kv::Input::Release { attempt: stranger, why: kv::Released::Over })]);
}

#[test]
fn a_pool_smaller_than_promised_refuses_and_hangs_nobody() {
    let mut rank = Rank::new(config());
    rank.kv = kv::Manager::new(kv::Config::full(6, 4).expect("good")).expect("a good configuration");
    // Too long at once, growing too long alone, and fitting.
    rank.admit(sequence(1, &prompt(1, 30), 2));
    rank.admit(sequence(2, &prompt(2, 10), 100));
    rank.admit(sequence(3, &prompt(3, 4), 4));
    rank.drain();
    let ends = [1, 2, 3].map(|n| rank.streams[&attempt(n, 1)].end.clone().expect("ended"));
    assert_eq!(ends[0], End::Refused(Rejection::TooLargeForRank { wanted: 8, total: 6 }));
    assert_eq!(ends[1], End::Refused(Rejection::TooLargeForRank { wanted: 28, total: 6 }));
    assert_eq!(ends[2], End::Finished(Finish::Length));
    assert_eq!(rank.kv.stats().pools[0].blocks_held, 0);
}

#[test]
fn a_kv_manager_that_forgot_a_sequence_costs_it_a_recompute() {
    let mut batch = Batch::new(config()).expect("a good configuration");
    let (mut out, one) = (Vec::new(), attempt(1, 1));
    batch.handle(0, Input::Admit(sequence(1, &[1, 2, 3, 4, 5], 30)), &mut out);
    batch.handle(0, reserved(one, 0..1), &mut out);
    assert_eq!(out.last(), Some(&Effect::Kv(kv::Input::Grow { attempt: one, tokens: 8 })));
    out.clear();
    let forgot = kv::Effect::Ignored { attempt: one, why: kv::Ignored::UnknownGrow };
    batch.handle(0, Input::Kv(forgot), &mut out);
    let release = kv::Input::Release { attempt: one, why: kv::Released::Preempted };
    assert_eq!(out, [Effect::Kv(release), reserve(one, &[1, 2, 3, 4, 5], 35)]);
    batch.check().expect("all invariants hold");
}

#[test]
fn nonsense_is_ignored_and_the_sequence_goes_on() {
    let mut rank = Rank::new(config());
    let one = attempt(1, 1);
    rank.tell_batch(Input::StepDone { sampled: Vec::new() });
    rank.tell_batch(Input::Cancel { attempt: one });
    rank.admit(sequence(1, &prompt(1, 10), 6));
    rank.tell_batch(Input::Admit(sequence(1, &prompt(1, 10), 6)));
    rank.tell_batch(Input::Kv(kv::Effect::Grown {
        attempt: one,
        blocks: vec![vec![BlockId(0)]],
        capacity: 4,
        copies: vec![],
    }));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    rank.tell_batch(Input::Kv(kv::Effect::Exhausted { attempt: attempt(7, 1), wanted: 1, available: 0 }));
    rank.tell_batch(reserved(one, 0..0));
    rank.plan();
    let drawn = |slice| Sampled { slice, drawn: Drawn::new(3, 0.0) };
    // No token for the slice that samples: its last position is computed again.
    rank.tell_batch(Input::StepDone { sampled: vec![drawn(1), drawn(u32::MAX)] });
    let expected = [
        Ignored::NoStep,
        Ignored::UnknownAttempt { attempt: one },
        Ignored::DuplicateAttempt { attempt: one },
        Ignored::UnaskedAnswer { attempt: one },
        Ignored::UnaskedAnswer { attempt: attempt(7, 1) },
        Ignored::UnaskedAnswer { attempt: one },
        Ignored::UnaskedToken { slice: 1 },
        Ignored::UnaskedToken { slice: u32::MAX },
        Ignored::MissingToken { slice: 0 },
    ];
    assert_eq!(rank.ignored, expected);
    assert_eq!(rank.batch.stats().ignored, expected.len() as u64);
}

#[test]
fn inputs_and_effects_survive_serde() {
    let inputs = [
        Input::Admit(sequence(1, &[1, 2, 3], 4)),
        Input::StepDone { sampled: vec![Sampled::new(0, Drawn { top: vec![(4, -0.5)], ..Drawn::new(1, -1.5) })] },
        Input::Kv(kv::Effect::Freed { blocks: 3 }),
        Input::Tick,
    ];
    let text = serde_json::to_string(&inputs).expect("serializes");
    assert_eq!(serde_json::from_str::<Vec<Input>>(&text).expect("parses"), inputs);
}
