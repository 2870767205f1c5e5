use super::*;
use starling_core::ids::{AttemptKey, BlockId};
use starling_core::step::Sample;
use std::sync::{Arc, Mutex};

fn config() -> TimedConfig {
    TimedConfig {
        bounds: Bounds { blocks: 64, block_tokens: 16, vocabulary: 50, context: 512 },
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
        blocks: (first_block..first_block + blocks).map(BlockId).collect(),
        sample: Some(Sample { sampling: Default::default(), child: 0, position: tokens.len() as u32 }),
    }
}

fn next(backend: &mut TimedBackend, slices: Vec<Slice>) -> Vec<TokenId> {
    let mut out = Vec::new();
    backend.step(&Step { slices }, &mut out).unwrap();
    out.iter().map(|sampled| sampled.token).collect()
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
        backend.step(&Step { slices: vec![bad] }, &mut Vec::new()),
        Err(StepError::TokenOutOfRange { token: 50, vocabulary: 50 })
    ));
}
