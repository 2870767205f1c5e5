//! The engine `cpu`: results depend on a sequence alone, in either arithmetic.

use crate::check::{Bounds, Checker};
use crate::isa::Isa;
use crate::kernels;
use crate::linear::Matrix;
use crate::llama::{Layer, Model, ModelConfig};
use crate::sampling::{NotFinite, Sampler};
use crate::team::Team;
use crate::weights::Inputs;
use crate::{Backend, StepError};
use attention::Mixing;
use pool::Pool;
use starling_core::kv;
use starling_core::step::{Draw, Sampled, Step};
use std::sync::Arc;
use times::Clock;

mod attention;
mod pool;
#[cfg(test)]
mod tests;
mod times;

pub use times::StepTimes;

/// Threads of a rank at most: more than any machine has for one, and few enough to start.
const THREADS_MAX: usize = 1024;
/// Rows that a thread takes at once where the work of a row is small.
const ROWS_AT_ONCE: usize = 8;

/// The size of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// For each life cycle of the model (`ModelConfig::life_cycles`).
    pub blocks: Vec<u32>,
    pub block_tokens: u32,
    /// Threads that compute, the caller's among them.
    pub threads: usize,
}

/// Why a backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("a rank needs 1 to {THREADS_MAX} threads, not {threads}")]
    BadThreads { threads: usize },
    #[error("a rank needs KV blocks for each of {life_cycles} life cycles (blocks {blocks:?})")]
    LifeCycles { life_cycles: usize, blocks: Vec<u32> },
    #[error("a rank needs at least one KV block of one token (blocks {blocks:?}, block tokens {block_tokens})")]
    NoBlocks { blocks: Vec<u32>, block_tokens: u32 },
    #[error("life cycle {life_cycle}: {blocks} KV blocks of {block_bytes} bytes do not fit the address space")]
    PoolTooLarge { life_cycle: usize, blocks: u32, block_bytes: u64 },
    #[error("cannot start {threads} threads: {source}")]
    Threads { threads: usize, source: std::io::Error },
}

/// One rank: a model, its KV blocks and the threads that compute.
pub struct CpuBackend {
    model: Arc<Model>,
    bounds: Bounds,
    pool: Pool,
    team: Team,
    isa: Isa,
    checker: Checker,
    sampler: Sampler,
    scratch: Scratch,
    mixing: Mixing,
    clock: Clock,
}

/// Activations of a step; kept from one to the next.
struct Scratch {
    /// The residual stream.
    x: Matrix,
    normed: Inputs,
    qkv: Matrix,
    mixed: Inputs,
    projected: Matrix,
    gate_up: Matrix,
    gated: Inputs,
    /// Rows that something is drawn from.
    last: Matrix,
    logits: Matrix,
    /// For each rope, row by row, the cosine and sine of each pair's angle.
    turns: Vec<Vec<(f32, f32)>>,
}

impl CpuBackend {
    /// # Errors
    /// Sizes that cannot be, or no threads.
    pub fn new(model: Arc<Model>, config: CpuConfig) -> Result<Self, CpuError> {
        let CpuConfig { blocks, block_tokens, threads } = config;
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(CpuError::BadThreads { threads });
        }
        if block_tokens == 0 || blocks.contains(&0) {
            return Err(CpuError::NoBlocks { blocks, block_tokens });
        }
        let (sizes, arithmetic) = (model.config(), model.arithmetic());
        let life_cycles = sizes.life_cycles(arithmetic, block_tokens);
        if blocks.len() != life_cycles.len() {
            return Err(CpuError::LifeCycles { life_cycles: life_cycles.len(), blocks });
        }
        let pool = Pool::new(&model, &life_cycles, (&blocks, block_tokens))?;
        let team = Team::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        let retentions = life_cycles.iter().map(|group| group.life_cycle.retention);
        let pools = retentions.zip(blocks).map(|(retention, blocks)| kv::Pool { retention, blocks }).collect();
        let bounds = Bounds { pools, block_tokens, vocabulary: sizes.vocabulary, context: sizes.context };
        let inputs = || Inputs::new(arithmetic);
        let scratch = Scratch {
            x: Matrix::default(),
            normed: inputs(),
            qkv: Matrix::default(),
            mixed: inputs(),
            projected: Matrix::default(),
            gate_up: Matrix::default(),
            gated: inputs(),
            last: Matrix::default(),
            logits: Matrix::default(),
            turns: Vec::new(),
        };
        Ok(Self {
            model,
            bounds,
            pool,
            team,
            isa: Isa::best(),
            checker: Checker::default(),
            sampler: Sampler::default(),
            scratch,
            mixing: Mixing::default(),
            clock: Clock::default(),
        })
    }

    /// Takes other instructions than the fastest, for comparison: results are the same.
    ///
    /// # Panics
    /// The processor does not have them.
    #[must_use]
    pub fn with_isa(self, isa: Isa) -> Self {
        assert!(isa.is_available(), "{isa:?}");
        Self { isa, ..self }
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Starts to measure where steps spend their time, or stops.
    pub fn measure(&mut self, is_on: bool) {
        self.clock = Clock::new(is_on);
    }

    /// Times of the steps since `measure`.
    pub fn times(&self) -> StepTimes {
        self.clock.times()
    }

    /// Runs a step and hands the logits of each draw to `each` with its slice, in the order of slices and positions.
    ///
    /// # Errors
    /// A malformed step; nothing was computed then.
    pub fn logits_of(&mut self, step: &Step, mut each: impl FnMut(usize, &[f32])) -> Result<(), StepError> {
        self.forward(step)?;
        for (row, (index, ..)) in draws(step).enumerate() {
            each(index, self.scratch.logits.row(row));
        }
        Ok(())
    }

    /// Leaves the logits of each draw in `scratch.logits`.
    fn forward(&mut self, step: &Step) -> Result<(), StepError> {
        self.checker.check(step, &self.bounds)?;
        self.clock.begin();
        step.copies.iter().for_each(|copy| self.pool.copy(copy));
        let model = Arc::clone(&self.model);
        self.lay_out(step, &model);
        let mut next = model.layers.iter().skip(1).map(|layer| &*layer.attention_norm);
        for (index, layer) in model.layers.iter().enumerate() {
            self.attention(step, index, layer);
            self.feed_forward(layer, next.next());
        }
        self.head(step, &model);
        Ok(())
    }

    /// Embeds the tokens, works out where each row is, and makes the first layer's input.
    fn lay_out(&mut self, step: &Step, model: &Model) {
        let Scratch { x, normed, turns, .. } = &mut self.scratch;
        x.resize(step.tokens(), model.config().hidden);
        turns.resize(model.turns_per_position.len(), Vec::new());
        turns.iter_mut().for_each(Vec::clear);
        let scale = model.config().embedding_scale();
        let mut row = 0;
        for slice in &step.slices {
            let start = slice.start as usize;
            for (i, &token) in slice.tokens.iter().enumerate() {
                model.embedding.copy_row(token as usize, x.row_mut(row));
                if let Some(scale) = scale {
                    kernels::scale(x.row_mut(row), scale);
                }
                for (turns, per_position) in turns.iter_mut().zip(&model.turns_per_position) {
                    turns.extend(per_position.iter().map(|turn| {
                        let (sin, cos) = ((start + i) as f64 * turn).sin_cos();
                        (cos as f32, sin as f32)
                    }));
                }
                row += 1;
            }
        }
        self.mixing.lay_out(step);
        norm_rows(&mut self.team, x, (&model.layers[0].attention_norm, model.config().norm_epsilon), normed);
        self.clock.lap(|times| &mut times.rest);
    }

    fn attention(&mut self, step: &Step, index: usize, layer: &Layer) {
        let Self { scratch, team, isa, clock, pool, mixing, model, .. } = self;
        let Scratch { x, normed, qkv, mixed, projected, turns, .. } = scratch;
        let sizes = model.config();
        layer.qkv.apply(team, *isa, normed, qkv);
        clock.lap(|times| &mut times.linears);

        let (pairs, q_width) = (sizes.head_dim / 2, sizes.heads * sizes.head_dim);
        let turns = &turns[layer.attention.rope];
        mixing.write(team, (pool, step, index), (qkv, q_width), |row, numbers| {
            prepare_row(numbers, layer, sizes, &turns[row * pairs..][..pairs]);
        });
        clock.lap(|times| &mut times.rest);
        mixed.resize(qkv.rows(), q_width);
        mixing.attend(team, (pool, step, index), (sizes, *isa), (qkv, mixed));
        clock.lap(|times| &mut times.attention);
        layer.attention_output.apply(team, *isa, mixed, projected);
        clock.lap(|times| &mut times.linears);
        let norms = (layer.post_attention_norm.as_deref(), Some(&*layer.feed_forward_norm));
        add_output(team, x, projected, (norms, sizes.norm_epsilon), normed);
        clock.lap(|times| &mut times.rest);
    }

    /// Leaves the input of the next layer, if `next_norm` is the norm of one, in `normed`.
    fn feed_forward(&mut self, layer: &Layer, next_norm: Option<&[f32]>) {
        let Self { scratch, team, isa, clock, model, .. } = self;
        let Scratch { x, normed, projected, gate_up, gated, .. } = scratch;
        let sizes = model.config();
        layer.gate_up.apply(team, *isa, normed, gate_up);
        clock.lap(|times| &mut times.linears);
        let product = if sizes.family.has_gelu() { kernels::gelu_product } else { kernels::silu_product };
        gated.resize(x.rows(), sizes.feed_forward);
        let filler = gated.filler();
        team.run_rows(x.rows(), ROWS_AT_ONCE, |rows| {
            for row in rows {
                let (gate, up) = gate_up.row(row).split_at(sizes.feed_forward);
                // SAFETY: each row is in one part.
                unsafe { filler.fill(row, |out| product(gate, up, out)) };
            }
        });
        clock.lap(|times| &mut times.rest);
        layer.down.apply(team, *isa, gated, projected);
        clock.lap(|times| &mut times.linears);
        let norms = (layer.post_feed_forward_norm.as_deref(), next_norm);
        add_output(team, x, projected, (norms, sizes.norm_epsilon), normed);
        clock.lap(|times| &mut times.rest);
    }

    /// Logits of each row that something is drawn from.
    fn head(&mut self, step: &Step, model: &Model) {
        let Scratch { x, normed, last, logits, .. } = &mut self.scratch;
        last.resize(draws(step).count(), model.config().hidden);
        for (row, (_, of_step, _)) in draws(step).enumerate() {
            last.row_mut(row).copy_from_slice(x.row(of_step));
        }
        norm_rows(&mut self.team, last, (&model.output_norm, model.config().norm_epsilon), normed);
        model.output().apply(&mut self.team, self.isa, normed, logits);
        self.clock.lap(|times| &mut times.head);
    }
}

impl Backend for CpuBackend {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        self.forward(step)?;
        let before = out.len();
        for (row, (index, _, draw)) in draws(step).enumerate() {
            match self.sampler.draw(self.scratch.logits.row(row), &draw) {
                Ok(drawn) => out.push(Sampled::new(index, drawn)),
                Err(NotFinite) => {
                    out.truncate(before);
                    return Err(StepError::NotFinite { slice: index });
                }
            }
        }
        Ok(())
    }
}

/// What a step draws: the slice, the step's row whose logits it is drawn from, and how.
fn draws(step: &Step) -> impl Iterator<Item = (usize, usize, Draw<'_>)> {
    let starts = step.slices.iter().scan(0, |start, slice| {
        *start += slice.tokens.len();
        Some((*start - slice.tokens.len(), slice))
    });
    starts
        .enumerate()
        .flat_map(|(index, (start, slice))| slice.draws().map(move |draw| (index, start + draw.row, draw)))
}

/// Makes queries and keys of what the projection gave: biases, norms of heads, and the turn of their position.
fn prepare_row(numbers: &mut [f32], layer: &Layer, sizes: &ModelConfig, turns: &[(f32, f32)]) {
    let (head_dim, epsilon) = (sizes.head_dim, sizes.norm_epsilon);
    if let Some(bias) = &layer.qkv_bias {
        kernels::add(numbers, bias);
    }
    let (queries, rest) = numbers.split_at_mut(sizes.heads * head_dim);
    let keys = &mut rest[..sizes.kv_heads * head_dim];
    if let Some(norms) = &layer.head_norms {
        for (heads, weight) in [(&mut *queries, &norms.query), (&mut *keys, &norms.key)] {
            heads.chunks_exact_mut(head_dim).for_each(|head| kernels::rms_norm_in_place(head, weight, epsilon));
        }
    }
    let heads = queries.chunks_exact_mut(head_dim).chain(keys.chunks_exact_mut(head_dim));
    heads.for_each(|head| kernels::rotate_halves(head, turns));
}

/// `out = norm(x)`, row by row.
fn norm_rows(team: &mut Team, x: &Matrix, (weight, epsilon): (&[f32], f32), out: &mut Inputs) {
    out.resize(x.rows(), weight.len());
    let filler = out.filler();
    team.run_rows(x.rows(), ROWS_AT_ONCE, |rows| {
        for row in rows {
            // SAFETY: each row is in one part.
            unsafe { filler.fill(row, |out| kernels::rms_norm(x.row(row), weight, epsilon, out)) };
        }
    });
}

/// Norms behind a half of a layer, and before the next.
type Norms<'a> = (Option<&'a [f32]>, Option<&'a [f32]>);

/// `x += y`, or `x += norm(y)`; then `out = norm(x)` if there is another half, row by row. Leaves `y` unspecified.
fn add_output(team: &mut Team, x: &mut Matrix, y: &mut Matrix, (norms, epsilon): (Norms<'_>, f32), out: &mut Inputs) {
    let (count, width, stride) = (x.rows(), x.width(), x.stride());
    out.resize(count, width);
    let (x, y, filler) = (x.split(), y.split(), out.filler());
    team.run_rows(count, ROWS_AT_ONCE, |rows| {
        for row in rows {
            // SAFETY: each row is in one part.
            let (x, y) =
                unsafe { (x.part(row * stride..row * stride + width), y.part(row * stride..row * stride + width)) };
            if let Some(weight) = norms.0 {
                kernels::rms_norm_in_place(y, weight, epsilon);
            }
            kernels::add(x, y);
            if let Some(weight) = norms.1 {
                // SAFETY: as above.
                unsafe { filler.fill(row, |out| kernels::rms_norm(x, weight, epsilon, out)) };
            }
        }
    });
}
