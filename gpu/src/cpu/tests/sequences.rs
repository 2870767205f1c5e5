//! Whole sequences: tokens drawn step by step, and the bits of their log-probabilities.

use super::*;
use crate::dequant::TensorType;
use crate::gguf::Gguf;

fn model(tiny: &TinyModel) -> Arc<Model> {
    Arc::new(Model::load(&tiny.gguf().into(), Arithmetic::Exact).unwrap())
}

fn backend(model: &Arc<Model>, threads: usize) -> CpuBackend {
    sized(model, (256, 16), threads)
}

fn prompt(length: usize, seed: u32) -> Vec<TokenId> {
    (0..length as u32).map(|i| (i * 31 + seed * 17) % 259).collect()
}

/// A sequence as a test drives it: its tokens, how many are computed, and its blocks.
#[derive(Clone)]
struct Sequence {
    tokens: Vec<TokenId>,
    computed: usize,
    blocks: Vec<BlockId>,
    sampling: Sampling,
}

impl Sequence {
    /// A sequence with the `slot`-th stretch of 12 blocks, last block first so that order shows.
    fn new(tokens: Vec<TokenId>, slot: u32) -> Self {
        let blocks = (slot * 12..(slot + 1) * 12).rev().map(BlockId).collect();
        Self { tokens, computed: 0, blocks, sampling: Sampling::default() }
    }

    /// The next `count` tokens; samples if they are the last known.
    fn slice(&self, count: usize) -> Slice {
        let end = (self.computed + count).min(self.tokens.len());
        let sample = Sample::new(self.sampling.clone(), end as u32);
        Slice {
            attempt: AttemptKey::default(),
            tokens: self.tokens[self.computed..end].to_vec(),
            start: self.computed as u32,
            tables: vec![Table::whole(self.blocks.clone())],
            sample: (end == self.tokens.len()).then_some(sample),
        }
    }

    fn rest(&self) -> Slice {
        self.slice(self.tokens.len() - self.computed)
    }
}

/// Runs one step with a slice of each sequence; sampled tokens are appended. Returns what was sampled, bit by bit.
fn advance(backend: &mut CpuBackend, sequences: &mut [Sequence], counts: &[usize]) -> Vec<(u32, TokenId, u32)> {
    let slices = sequences.iter().zip(counts).map(|(sequence, &count)| sequence.slice(count)).collect();
    let step = step(backend, slices);
    let mut out = Vec::new();
    backend.step(&step, &mut out).unwrap();
    for (sequence, slice) in sequences.iter_mut().zip(&step.slices) {
        sequence.computed += slice.tokens.len();
    }
    out.iter().for_each(|sampled| sequences[sampled.slice as usize].tokens.push(sampled.drawn.token));
    out.iter().map(|sampled| (sampled.slice, sampled.drawn.token, sampled.drawn.logprob.to_bits())).collect()
}

/// What a sequence produces alone: whole prompt first, then token by token. With the bits of each logprob.
fn alone(model: &Arc<Model>, mut sequence: Sequence, tokens: usize, threads: usize) -> Vec<(TokenId, u32)> {
    let mut backend = backend(model, threads);
    let mut produced = Vec::new();
    for _ in 0..tokens {
        let count = sequence.tokens.len() - sequence.computed;
        let sampled = advance(&mut backend, std::slice::from_mut(&mut sequence), &[count]);
        produced.extend(sampled.into_iter().map(|(_, token, bits)| (token, bits)));
    }
    produced
}

/// Bits of the logits of a slice's last position.
fn logits(backend: &mut CpuBackend, slice: Slice) -> Vec<u32> {
    run(backend, vec![slice]).remove(0)
}

#[test]
fn weight_formats_and_shapes_of_heads_agree_with_a_plain_f64_forward() {
    let tokens = prompt(90, 1);
    for tiny in [
        TinyModel::default(),
        TinyModel { tied: true, kind: TensorType::Q4_1, ..TinyModel::default() },
        TinyModel { heads: 6, kv_heads: 2, head_dim: 32, layers: 3, kind: TensorType::F16, ..TinyModel::default() },
        TinyModel { heads: 2, kv_heads: 2, head_dim: 32, kind: TensorType::Bf16, seed: 5, ..TinyModel::default() },
    ] {
        let right = reference::logits(&tiny, &tokens);
        let mut backend = backend(&model(&tiny), 2);
        for length in [1, 2, 17, 65, 90] {
            let found = logits(&mut backend, Sequence::new(tokens[..length].to_vec(), 0).rest());
            for (found, right) in found.into_iter().map(f32::from_bits).zip(&right[length - 1]) {
                let error = (f64::from(found) - right).abs();
                assert!(error < 2e-3, "{tiny:?}, {length} tokens: {found} instead of {right}");
            }
        }
    }
}

#[test]
fn a_sequence_gives_the_same_bits_alone_and_in_a_batch_of_sixteen() {
    let model = model(&TinyModel::default());
    let mut sequences: Vec<_> = (0..16).map(|i| Sequence::new(prompt(3 + 7 * i as usize, i), i)).collect();
    sequences[5].sampling = Sampling { temperature: 0.9, top_k: 40, top_p: 0.95, seed: 11, ..Sampling::default() };
    sequences[6].sampling = Sampling { temperature: 1.3, seed: 12, ..Sampling::default() };
    let lonely: Vec<_> = sequences.iter().map(|sequence| alone(&model, sequence.clone(), 10, 1)).collect();
    for threads in [1, 2] {
        let mut backend = backend(&model, threads);
        let mut batch = sequences.clone();
        let mut produced = vec![Vec::new(); 16];
        for _ in 0..10 {
            for (slice, token, bits) in advance(&mut backend, &mut batch, &[usize::MAX >> 1; 16]) {
                produced[slice as usize].push((token, bits));
            }
        }
        assert_eq!(produced, lonely, "{threads} threads");
    }
    let distinct: std::collections::BTreeSet<_> = lonely.iter().flatten().map(|(token, _)| token).collect();
    assert!(distinct.len() > 30, "a test of one token would prove little: {distinct:?}");
}

#[test]
fn any_chunks_of_a_prompt_give_the_same_bits() {
    let model = model(&TinyModel::default());
    let sequence = Sequence::new(prompt(150, 3), 0);
    let whole = logits(&mut backend(&model, 1), sequence.rest());
    for chunks in [&[150][..], &[1; 150], &[16; 10], &[64, 64, 22], &[65, 1, 63, 21], &[7; 22], &[149, 1], &[100, 50]] {
        let mut backend = backend(&model, 2);
        // A neighbour decodes meanwhile.
        let mut both = vec![sequence.clone(), Sequence::new(prompt(9, 8), 1)];
        let (last, first) = chunks.split_last().unwrap();
        for &chunk in first {
            advance(&mut backend, &mut both, &[chunk, 100]);
        }
        assert!(logits(&mut backend, both[0].slice(*last)) == whole, "chunks {chunks:?}");
    }
}

#[test]
fn a_sequence_computed_again_after_preemption_goes_on_with_the_same_bits() {
    let model = model(&TinyModel::default());
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
    let start = Sequence { sampling, ..Sequence::new(prompt(40, 6), 0) };
    let undisturbed = alone(&model, start.clone(), 20, 1);
    for after in [1, 7, 19] {
        let mut backend = backend(&model, 2);
        let mut sequence = [start.clone()];
        let mut produced = Vec::new();
        for round in 0..20 {
            if round == after {
                // Its blocks are given to another, then it starts over elsewhere with all it knows.
                advance(&mut backend, &mut [Sequence::new(prompt(150, 7), 0)], &[150]);
                let again = Sequence::new(sequence[0].tokens.clone(), 3);
                sequence[0] = Sequence { sampling: start.sampling.clone(), ..again };
            }
            let sampled = advance(&mut backend, &mut sequence, &[1000]);
            produced.extend(sampled.into_iter().map(|(_, token, bits)| (token, bits)));
        }
        assert_eq!(produced, undisturbed, "preempted after {after} tokens");
    }
}

#[test]
fn numbers_of_threads_and_sizes_of_blocks_leave_the_bits_as_they_are() {
    let model = model(&TinyModel::default());
    let sequence = Sequence::new(prompt(130, 2), 0);
    let one = alone(&model, sequence.clone(), 8, 1);
    for threads in [2, 3] {
        assert_eq!(alone(&model, sequence.clone(), 8, threads), one, "{threads} threads");
    }
    let bits = logits(&mut backend(&model, 1), sequence.rest());
    for block_tokens in [1, 8, 32, 100] {
        let mut backend = sized(&model, (256, block_tokens), 1);
        let mut slice = sequence.rest();
        let blocks = (0..130_u32.div_ceil(block_tokens)).map(|i| BlockId(255 - i));
        slice.tables = vec![Table::whole(blocks.collect())];
        assert!(logits(&mut backend, slice) == bits, "blocks of {block_tokens} tokens");
    }
}

#[test]
fn two_ranks_share_a_model_and_nothing_else() {
    let model = model(&TinyModel::default());
    let expected = alone(&model, Sequence::new(prompt(30, 1), 0), 5, 1);
    std::thread::scope(|scope| {
        let ranks = [1, 2].map(|threads| {
            scope.spawn({
                let model = &model;
                move || alone(model, Sequence::new(prompt(30, 1), 0), 5, threads)
            })
        });
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), expected);
        }
    });
}

#[test]
fn logits_that_are_not_finite_fail_the_step_with_the_slice_named() {
    let mut writer = TinyModel::default().writer();
    let (mut weights, dims) = (vec![0.5_f32; 64], [64]);
    weights[3] = f32::NAN;
    writer.tensor("output_norm.weight", TensorType::F32, &dims, &weights);
    let gguf = Gguf::from_bytes("nan.gguf", writer.to_bytes().0).unwrap();
    let mut backend = backend(&Arc::new(Model::load(&gguf.into(), Arithmetic::Exact).unwrap()), 1);
    let silent = Slice { sample: None, ..Sequence::new(prompt(3, 1), 0).rest() };
    let step = step(&backend, vec![silent, Sequence::new(prompt(3, 1), 1).rest()]);
    let mut out = Vec::new();
    assert!(matches!(backend.step(&step, &mut out), Err(StepError::NotFinite { slice: 1 })));
    assert!(out.is_empty());
}

#[test]
fn an_empty_step_and_one_without_samples_give_no_tokens() {
    let mut backend = backend(&model(&TinyModel::default()), 2);
    let mut out = Vec::new();
    backend.step(&Step::default(), &mut out).unwrap();
    let silent = step(&backend, vec![Sequence::new(prompt(9, 1), 0).slice(4)]);
    backend.step(&silent, &mut out).unwrap();
    assert!(out.is_empty());
}
