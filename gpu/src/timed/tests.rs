use super::*;
use starling_core::ids::{AttemptKey, BlockId};
use starling_core::kv::Pool;
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::step::{BlockCopy, Sample, Table};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

fn pool(retention: Retention) -> Pool {
    Pool { retention, blocks: 64 }
}

fn config() -> TimedConfig {
    TimedConfig {
        bounds: Bounds { pools: vec![pool(Retention::Full)], block_tokens: 16, vocabulary: 50, context: 512 },
        prefill_per_token: Duration::from_micros(10),
        decode_per_step: Duration::from_millis(2),
        decode_per_sequence: Duration::from_micros(100),
        excluded: vec![0, 1, 2, 49],
    }
}

/// A slice of the sequence `tokens`, from `start` on, with blocks from `first_block` on.
fn slice(tokens: &[TokenId], start: usize, first_block: u32) -> Slice {
    let blocks = (tokens.len() as u32).div_ceil(16);
    Slice {
        attempt: AttemptKey::default(),
        tokens: tokens[start..].to_vec(),
        start: start as u32,
        tables: vec![Table::whole((first_block..first_block + blocks).map(BlockId).collect())],
        sample: Some(Sample::new(Default::default(), tokens.len() as u32)),
    }
}

fn next(backend: &mut TimedBackend, slices: Vec<Slice>) -> Vec<TokenId> {
    let mut out = Vec::new();
    backend.step(&Step { slices, ..Step::default() }, &mut out).unwrap();
    out.iter().map(|sampled| sampled.drawn.token).collect()
}

#[test]
fn a_step_waits_for_its_prefill_tokens_its_decode_and_its_sequences() {
    let waits = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&waits);
    let mut backend = TimedBackend::with_wait(config(), move |wait| log.lock().unwrap().push(wait)).unwrap();
    next(&mut backend, vec![slice(&[5; 30], 0, 0)]);
    next(&mut backend, vec![slice(&[5; 31], 30, 0), slice(&[6; 8], 7, 10), slice(&[7; 20], 0, 20)]);
    next(&mut backend, vec![]);
    let expected = [Duration::from_micros(300), Duration::from_micros(2_000 + 2 * 100 + 20 * 10)];
    assert_eq!(*waits.lock().unwrap(), expected, "and a step that costs nothing does not wait");
}

#[test]
fn a_sequence_goes_on_elsewhere_as_it_would_have_gone_on_here() {
    let free = TimedConfig {
        prefill_per_token: Duration::ZERO,
        decode_per_step: Duration::ZERO,
        decode_per_sequence: Duration::ZERO,
        ..config()
    };
    let mut here = TimedBackend::new(free.clone()).unwrap();
    let mut tokens = vec![7, 8, 9];
    tokens.push(next(&mut here, vec![slice(&tokens, 0, 0)])[0]);
    for _ in 0..20 {
        let start = tokens.len() - 1;
        tokens.push(next(&mut here, vec![slice(&tokens, start, 0)])[0]);
    }
    // Elsewhere the first half is prompt, in another batch.
    let mut elsewhere = TimedBackend::new(free).unwrap();
    for known in 4..tokens.len() {
        let sampled = next(&mut elsewhere, vec![slice(&[3; 5], 0, 30), slice(&tokens[..known], 0, 0)]);
        assert_eq!(sampled[1], tokens[known]);
    }
    let distinct: std::collections::BTreeSet<_> = tokens.iter().collect();
    assert!(distinct.len() > 10, "{tokens:?}");
}

#[test]
fn excluded_tokens_never_come_and_all_others_do() {
    let backend = TimedBackend::with_wait(config(), |_| {}).unwrap();
    let emitted: std::collections::BTreeSet<_> = (0..5_000).map(|position| backend.next_token(7, position)).collect();
    assert_eq!(emitted, (3..49).collect());
}

#[test]
fn at_least_one_token_must_be_left() {
    let mut all = config();
    all.excluded = (0..50).chain(0..50).collect();
    let error = TimedBackend::new(all.clone()).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("no token is left to emit (vocabulary 50, excluded 50)"));
    all.excluded = (0..49).chain([77]).collect();
    assert_eq!(TimedBackend::new(all).unwrap().next_token(1, 1), 49);
}

#[test]
fn malformed_steps_are_refused_before_any_time_passes() {
    let mut backend = TimedBackend::with_wait(config(), |_| panic!("waited")).unwrap();
    let bad = slice(&[50; 3], 0, 0);
    assert!(matches!(
        backend.step(&Step { slices: vec![bad], ..Step::default() }, &mut Vec::new()),
        Err(StepError::TokenOutOfRange { token: 50, vocabulary: 50 })
    ));
}

#[test]
fn drafts_are_verified_by_the_tokens_that_would_come_without_them_and_cost_as_prefill() {
    let waits = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&waits);
    let mut backend = TimedBackend::with_wait(config(), move |wait| log.lock().unwrap().push(wait)).unwrap();
    let mut tokens = vec![7, 8, 9];
    for _ in 0..3 {
        tokens.push(next(&mut backend, vec![slice(&tokens, tokens.len() - 1, 0)])[0]);
    }
    let mut drafted = slice(&tokens, 2, 0);
    drafted.sample = Some(Sample { drafts: 3, ..Sample::new(Default::default(), 3) });
    let sampled = next(&mut backend, vec![drafted]);
    assert_eq!((&sampled[..3], sampled.len()), (&tokens[3..], 4));
    let last = *waits.lock().unwrap().last().unwrap();
    assert_eq!(last, Duration::from_micros(2_000 + 100 + 3 * 10));
}

#[test]
fn all_tokens_are_as_probable_as_each_other_and_the_first_are_told() {
    let mut backend = TimedBackend::with_wait(config(), |_| {}).unwrap();
    let mut one = slice(&[5, 6], 0, 0);
    one.sample.as_mut().unwrap().sampling.top_logprobs = 3;
    let mut out = Vec::new();
    backend.step(&Step { slices: vec![one], ..Step::default() }, &mut out).unwrap();
    let logprob = -(46_f32).ln();
    assert_eq!(out[0].drawn.logprob, logprob);
    assert_eq!(out[0].drawn.top, [(3, logprob), (4, logprob), (5, logprob)]);
}

#[test]
fn life_cycles_of_any_kind_are_served_and_checked() {
    let window = Retention::Window { tokens: NonZeroU32::new(20).unwrap(), sink_blocks: 1 };
    let pools = [Retention::Full, window, Retention::State].map(pool).to_vec();
    let config = TimedConfig { bounds: Bounds { pools, ..config().bounds }, ..config() };
    let mut backend = TimedBackend::with_wait(config, |_| {}).unwrap();
    let mut one = slice(&[5; 100], 99, 0);
    let blocks = |blocks: &[u32]| blocks.iter().map(|&block| BlockId(block)).collect();
    one.tables.push(Table { out: 1..5, blocks: blocks(&[9, 3, 4]) });
    one.tables.push(Table::whole(blocks(&[63])));
    let copies = vec![BlockCopy { life_cycle: 2, from: BlockId(1), to: BlockId(63) }];
    let mut step = Step { copies, slices: vec![one] };
    let mut out = Vec::new();
    backend.step(&step, &mut out).unwrap();
    assert_eq!(out.len(), 1);
    step.copies[0].life_cycle = 3;
    assert!(matches!(backend.step(&step, &mut out), Err(StepError::BadCopy { copy: 0, life_cycle: 3, .. })));
}
