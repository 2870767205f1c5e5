//! A small hybrid model: a recurrent layer, one with full attention and one with a window. Weights come from a seed.
//!
//! Twice: by its definition, over all tokens at once; and as a backend, which reads and writes what a step's tables name.

use starling_core::ids::TokenId;
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::step::{Drawn, Sampled, Step};
use starling_gpu::{Backend, StepError};
use std::num::NonZeroU32;
use std::sync::Arc;

pub const VOCABULARY: u32 = 61;
const WIDTH: usize = 8;
const WINDOW: usize = 20;

type Vector = [f32; WIDTH];
type Matrix = [Vector; WIDTH];

/// Keys and values of one attention layer.
struct Attention {
    query: Matrix,
    key: Matrix,
    value: Matrix,
}

pub struct Hybrid {
    embedding: Vec<Vector>,
    /// How much of the state stays, by dimension.
    decay: Vector,
    input: Matrix,
    layers: [Attention; 2],
}

/// In the order of the tables: full attention, the window, the state.
pub fn retentions() -> [Retention; 3] {
    let tokens = NonZeroU32::new(WINDOW as u32).expect("above 0");
    [Retention::Full, Retention::Window { tokens, sink_blocks: 0 }, Retention::State]
}

/// Uniform numbers between -1 and 1 (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self) -> Vector {
        std::array::from_fn(|_| self.next())
    }

    fn matrix(&mut self) -> Matrix {
        std::array::from_fn(|_| self.vector())
    }
}

fn dot(a: &Vector, b: &Vector) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn times(matrix: &Matrix, vector: &Vector) -> Vector {
    std::array::from_fn(|row| dot(&matrix[row], vector))
}

fn plus(a: &Vector, b: &Vector) -> Vector {
    std::array::from_fn(|at| a[at] + b[at])
}

impl Attention {
    fn new(numbers: &mut Numbers) -> Self {
        Self { query: numbers.matrix(), key: numbers.matrix(), value: numbers.matrix() }
    }

    /// What a query sees of keys and values, in the order of positions.
    fn mix(&self, x: &Vector, seen: &[(Vector, Vector)]) -> Vector {
        let query = times(&self.query, x);
        let scores: Vec<f32> = seen.iter().map(|(key, _)| dot(&query, key)).collect();
        let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        let mut mixed = [0.0; WIDTH];
        for (weight, (_, value)) in weights.iter().zip(seen) {
            for (mixed, value) in mixed.iter_mut().zip(value) {
                *mixed += weight / sum * value;
            }
        }
        mixed
    }
}

impl Hybrid {
    pub fn new(seed: u64) -> Self {
        let numbers = &mut Numbers(seed);
        Self {
            embedding: (0..VOCABULARY).map(|_| numbers.vector()).collect(),
            decay: std::array::from_fn(|_| 0.9 + 0.09 * numbers.next()),
            input: numbers.matrix(),
            layers: [Attention::new(numbers), Attention::new(numbers)],
        }
    }

    /// The recurrent layer: the next state, and what it gives for a token.
    fn recur(&self, state: &Vector, token: TokenId) -> (Vector, Vector) {
        let x = self.embedding[token as usize];
        let input = times(&self.input, &x);
        let next = std::array::from_fn(|at| self.decay[at] * state[at] + input[at]);
        (next, plus(&x, &next))
    }

    fn next_token(&self, x: &Vector) -> TokenId {
        let score = |token: &u32| dot(&self.embedding[*token as usize], x);
        (0..VOCABULARY).max_by(|a, b| score(a).total_cmp(&score(b)).then(b.cmp(a))).expect("a vocabulary")
    }

    /// What the model says behind a prompt, by its definition.
    pub fn continued(&self, prompt: &[TokenId], count: u32) -> Vec<TokenId> {
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let (mut state, mut last) = ([0.0; WIDTH], [0.0; WIDTH]);
            let mut kept: [Vec<(Vector, Vector)>; 2] = Default::default();
            for &token in &tokens {
                let (next, mut x) = self.recur(&state, token);
                state = next;
                for (layer, kept) in self.layers.iter().zip(&mut kept) {
                    kept.push((times(&layer.key, &x), times(&layer.value, &x)));
                    let is_full = std::ptr::eq(layer, &self.layers[0]);
                    let first = if is_full { 0 } else { kept.len().saturating_sub(WINDOW) };
                    x = plus(&x, &layer.mix(&x, &kept[first..]));
                }
                last = x;
            }
            tokens.push(self.next_token(&last));
        }
        tokens.split_off(prompt.len())
    }
}

/// The model over paged KV: blocks of two attention layers, and states.
pub struct HybridBackend {
    model: Arc<Hybrid>,
    block_tokens: usize,
    attention: [Vec<(Vector, Vector)>; 2],
    states: Vec<Vector>,
}

impl HybridBackend {
    /// Whatever was not written is not a number.
    pub fn new(model: Arc<Hybrid>, [full, window, states]: [u32; 3], block_tokens: usize) -> Self {
        let nothing = [f32::NAN; WIDTH];
        let blocks = |count: u32| vec![(nothing, nothing); count as usize * block_tokens];
        let attention = [blocks(full), blocks(window)];
        Self { model, block_tokens, attention, states: vec![nothing; states as usize] }
    }

    fn copy(&mut self, copy: &starling_core::step::BlockCopy) {
        let (from, to) = (copy.from.0 as usize, copy.to.0 as usize);
        match self.attention.get_mut(usize::from(copy.life_cycle)) {
            Some(blocks) => {
                let from = from * self.block_tokens;
                blocks.copy_within(from..from + self.block_tokens, to * self.block_tokens);
            }
            None => self.states[to] = self.states[from],
        }
    }
}

impl Backend for HybridBackend {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        step.copies.iter().for_each(|copy| self.copy(copy));
        for (index, slice) in step.slices.iter().enumerate() {
            let state_block = slice.tables[2][0].0 as usize;
            let start = slice.start as usize;
            let mut state = if start == 0 { [0.0; WIDTH] } else { self.states[state_block] };
            let mut rows = Vec::with_capacity(slice.tokens.len());
            for (at, &token) in slice.tokens.iter().enumerate() {
                let position = start + at;
                let (next, mut x) = self.model.recur(&state, token);
                state = next;
                for (nth, layer) in self.model.layers.iter().enumerate() {
                    let place = |position: usize| {
                        let block = slice.tables[nth][position / self.block_tokens].0 as usize;
                        block * self.block_tokens + position % self.block_tokens
                    };
                    self.attention[nth][place(position)] = (times(&layer.key, &x), times(&layer.value, &x));
                    let first = if nth == 0 { 0 } else { (position + 1).saturating_sub(WINDOW) };
                    let seen: Vec<_> =
                        (first..=position).map(|position| self.attention[nth][place(position)]).collect();
                    x = plus(&x, &layer.mix(&x, &seen));
                }
                rows.push(x);
            }
            self.states[state_block] = state;
            for draw in slice.draws() {
                out.push(Sampled::new(index, Drawn::new(self.model.next_token(&rows[draw.row]), -1.0)));
            }
        }
        Ok(())
    }
}
