use super::*;
use crate::source::Source;
use crate::testing::{TinyModel, reference};
use crate::weights::Arithmetic;
use starling_core::ids::{AttemptKey, BlockId, TokenId};
use starling_core::request::Sampling;
use starling_core::step::{Sample, Slice, Table};

mod drafts;
mod families;
mod int8;
mod sequences;
mod windows;

const BLOCK_TOKENS: u32 = 8;
const BLOCKS: u32 = 512;

/// Bits of logits: equality means equality.
type Bits = Vec<u32>;

fn backend(model: &Arc<Model>, threads: usize) -> CpuBackend {
    sized(model, (BLOCKS, BLOCK_TOKENS), threads)
}

/// A rank with as many blocks in each life cycle.
fn sized(model: &Arc<Model>, (blocks, block_tokens): (u32, u32), threads: usize) -> CpuBackend {
    let life_cycles = model.config().life_cycles(model.arithmetic(), block_tokens).len();
    CpuBackend::new(Arc::clone(model), CpuConfig { blocks: vec![blocks; life_cycles], block_tokens, threads }).unwrap()
}

fn tiny(seed: u64, tied: bool) -> (TinyModel, Arc<Model>) {
    let tiny = TinyModel { seed, tied, kv_heads: if tied { 1 } else { 2 }, ..TinyModel::default() };
    let model = Arc::new(Model::load(&tiny.gguf().into(), Arithmetic::Exact).unwrap());
    (tiny, model)
}

/// Tokens that look random; the first `shared` are the same for all seeds.
fn tokens(count: usize, seed: usize, shared: usize, vocabulary: u32) -> Vec<TokenId> {
    let token = |i: usize| if i < shared { i * 37 + 11 } else { i * 7919 + seed * 104_729 + 5 };
    (0..count).map(|i| token(i) as u32 % vocabulary).collect()
}

/// Blocks of a sequence: every `stride`-th from `first`, so that tables are not in order and never overlap.
fn table(first: u32, tokens: usize) -> Vec<BlockId> {
    let blocks = (tokens as u32).div_ceil(BLOCK_TOKENS) + 1;
    (0..blocks).map(|i| BlockId((first + (blocks - i) * 17) % BLOCKS)).collect()
}

/// A slice with one table: for a model of several life cycles, `step` gives it the others.
fn slice(tokens: &[TokenId], start: usize, end: usize, blocks: &[BlockId]) -> Slice {
    let sample = Sample::new(Sampling::default(), end as u32);
    Slice {
        attempt: AttemptKey::default(),
        tokens: tokens[start..end].to_vec(),
        start: start as u32,
        tables: vec![Table::whole(blocks.to_vec())],
        sample: Some(sample),
    }
}

/// A step of slices that have the same blocks in all life cycles.
fn step(backend: &CpuBackend, mut slices: Vec<Slice>) -> Step {
    for slice in &mut slices {
        slice.tables = vec![slice.tables[0].clone(); backend.bounds().pools.len()];
    }
    Step { slices, ..Step::default() }
}

fn run(backend: &mut CpuBackend, slices: Vec<Slice>) -> Vec<Bits> {
    let step = step(backend, slices);
    logits(backend, &step)
}

fn logits(backend: &mut CpuBackend, step: &Step) -> Vec<Bits> {
    let mut out = Vec::new();
    let keep = |_: usize, logits: &[f32]| out.push(logits.iter().map(|l| l.to_bits()).collect());
    backend.logits_of(step, keep).unwrap();
    out
}

/// Logits behind the last token, computed alone and in one go.
fn alone(backend: &mut CpuBackend, tokens: &[TokenId]) -> Bits {
    let blocks = table(3, tokens.len());
    run(backend, vec![slice(tokens, 0, tokens.len(), &blocks)]).remove(0)
}

#[test]
fn logits_agree_with_a_plain_f64_forward() {
    for (seed, tied) in [(1, false), (2, true), (3, false)] {
        let (tiny, model) = tiny(seed, tied);
        let tokens = tokens(100, seed as usize, 0, model.config().vocabulary);
        let right = reference::logits(&tiny, &tokens);
        let mut backend = backend(&model, 2);
        let found = alone(&mut backend, &tokens);
        let worst = found.iter().zip(&right[99]).map(|(f, r)| (f64::from(f32::from_bits(*f)) - r).abs());
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < 2e-4, "seed {seed}: off by {worst}");
    }
}

/// The heart of the exact mode: the same tokens give the same bits whatever is around them and however they came.
fn logits_depend_on_the_tokens_alone(model: &Arc<Model>, length: usize) {
    let vocabulary = model.config().vocabulary;
    let ours = tokens(length, 1, length / 2, vocabulary);
    let blocks = table(3, length);
    let right = alone(&mut backend(model, 1), &ours);
    let same = |found: &Bits, how: &str| assert!(*found == right, "{how}");

    same(&alone(&mut backend(model, 2), &ours), "two threads");

    // In a batch of 16 others, of other lengths, in any place.
    for place in [0, 7, 16] {
        let mut batch = backend(model, 2);
        let mut slices: Vec<Slice> = (0..16)
            .map(|other| {
                let theirs = tokens(3 + other * 5 % 60, other + 2, 0, vocabulary);
                slice(
                    &theirs,
                    0,
                    theirs.len(),
                    &[(); 10]
                        .map(|()| 0)
                        .iter()
                        .enumerate()
                        .map(|(i, _)| BlockId(BLOCKS - 1 - (other * 10 + i) as u32))
                        .collect::<Vec<_>>(),
                )
            })
            .collect();
        slices.insert(place, slice(&ours, 0, length, &blocks));
        same(&run(&mut batch, slices)[place], "in a batch of 17");
    }

    // Prefilled in chunks, the last one possibly a single token: decoding is a chunk of one.
    for chunk in [1, 5, 16, 63, 64, length - 1] {
        let mut chunked = backend(model, 2);
        let mut last = Bits::new();
        for start in (0..length).step_by(chunk) {
            let end = (start + chunk).min(length);
            last = run(&mut chunked, vec![slice(&ours, start, end, &blocks)]).remove(0);
        }
        same(&last, &format!("in chunks of {chunk}"));
    }

    // With the prefix that another sequence computed, read in its blocks.
    let shared = (length / 2 / BLOCK_TOKENS as usize) * BLOCK_TOKENS as usize;
    let mut reusing = backend(model, 2);
    let theirs = tokens(length, 9, length / 2, vocabulary);
    assert_eq!(theirs[..shared], ours[..shared]);
    let their_blocks = table(100, length);
    run(&mut reusing, vec![slice(&theirs, 0, length, &their_blocks)]);
    let kept = shared / BLOCK_TOKENS as usize;
    let mixed: Vec<BlockId> = their_blocks[..kept].iter().chain(&table(300, length)[kept..]).copied().collect();
    same(&run(&mut reusing, vec![slice(&ours, shared, length, &mixed)])[0], "behind a reused prefix");

    // After preemption: computed up to the middle, dropped, and computed again elsewhere from the start.
    let mut preempted = backend(model, 2);
    run(&mut preempted, vec![slice(&ours, 0, length / 2, &blocks)]);
    run(&mut preempted, vec![slice(&theirs, 0, length, &blocks)]);
    same(&run(&mut preempted, vec![slice(&ours, 0, length, &table(200, length))])[0], "after preemption");
}

#[test]
fn tiny_models_are_batch_invariant() {
    for (seed, tied) in [(1, false), (4, true)] {
        logits_depend_on_the_tokens_alone(&tiny(seed, tied).1, 150);
    }
}

#[test]
fn the_real_model_is_batch_invariant() {
    let Some(path) = std::env::var_os("STARLING_MODEL") else {
        eprintln!("SKIPPED: STARLING_MODEL names no model file");
        return;
    };
    let model = Arc::new(Model::load(&Source::open(path.as_ref()).unwrap(), Arithmetic::Exact).unwrap());
    logits_depend_on_the_tokens_alone(&model, 80);
}

#[test]
fn a_step_samples_for_the_slices_that_ask_in_their_order() {
    let (_, model) = tiny(1, false);
    let vocabulary = model.config().vocabulary;
    let mut backend = backend(&model, 1);
    let sequences: Vec<Vec<TokenId>> = (0..3).map(|seed| tokens(10, seed, 0, vocabulary)).collect();
    let greedy: Vec<TokenId> = sequences
        .iter()
        .map(|tokens| {
            let logits: Vec<f32> = alone(&mut backend, tokens).into_iter().map(f32::from_bits).collect();
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter().position(|l| *l == best).unwrap() as TokenId
        })
        .collect();
    let tables = [table(0, 10), table(100, 10), table(200, 10)];
    let mut slices: Vec<Slice> =
        sequences.iter().zip(&tables).map(|(tokens, table)| slice(tokens, 0, 10, table)).collect();
    slices[1].sample = None;
    let mut out = Vec::new();
    backend.step(&Step { slices, ..Step::default() }, &mut out).unwrap();
    let found: Vec<(u32, TokenId)> = out.iter().map(|s| (s.slice, s.drawn.token)).collect();
    assert_eq!(found, [(0, greedy[0]), (2, greedy[2])]);
    assert!(out.iter().all(|s| s.drawn.logprob.is_finite() && s.drawn.logprob < 0.0));
}

#[test]
fn a_malformed_step_is_refused_and_the_next_one_runs() {
    let (_, model) = tiny(1, false);
    let mut backend = backend(&model, 1);
    let tokens = tokens(10, 1, 0, model.config().vocabulary);
    let right = alone(&mut backend, &tokens);
    let mut bad = slice(&tokens, 0, 10, &table(0, 10));
    bad.tables[0].blocks[0] = BlockId(BLOCKS);
    let bad = step(&backend, vec![bad]);
    let refused = backend.step(&bad, &mut Vec::new()).unwrap_err().to_string();
    assert!(refused.ends_with("it names block 512, the pool has 512"), "{refused}");
    assert!(alone(&mut backend, &tokens) == right);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let (_, model) = tiny(1, false);
    let of = |blocks: &[u32], block_tokens, threads| {
        let blocks = blocks.to_vec();
        CpuBackend::new(Arc::clone(&model), CpuConfig { blocks, block_tokens, threads }).err().unwrap().to_string()
    };
    assert_eq!(of(&[1], 8, 0), "a rank needs 1 to 1024 threads, not 0");
    assert!(of(&[0], 8, 1).contains("(blocks [0], block tokens 8)"));
    assert!(of(&[1], 0, 1).contains("(blocks [1], block tokens 0)"));
    assert!(of(&[u32::MAX], u32::MAX, 1).contains("do not fit the address space"));
    assert_eq!(of(&[3, 4], 8, 1), "a rank needs KV blocks for each of 1 life cycles (blocks [3, 4])");
    assert!(of(&[], 8, 1).contains("(blocks [])"));
}
