//! The engine `cpu` in its exact mode: f32 weights, f32 KV, and results that depend on a sequence alone.

use crate::attention::{self, Places, Tile};
use crate::check::{Bounds, Checker};
use crate::kernels;
use crate::kv::KvPool;
use crate::linear::Matrix;
use crate::llama::{Layer, Model, ModelConfig};
use crate::sampling::{NotFinite, Sampler};
use crate::team::Team;
use crate::{Backend, StepError};
use starling_core::ids::BlockId;
use starling_core::step::{Sampled, Slice, Step};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// Threads of a rank at most: more than any machine has for one, and few enough to start.
const THREADS_MAX: usize = 1024;
/// Rows that a thread takes at once where the work of a row is small.
const ROWS_AT_ONCE: usize = 8;
/// Positions of a query tile: enough to reuse keys and values, few enough to share out.
const TILE_ROWS: usize = 16;

/// The size of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    pub blocks: u32,
    pub block_tokens: u32,
    /// Threads that compute, the caller's among them.
    pub threads: usize,
}

/// Why a backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("a rank needs 1 to {THREADS_MAX} threads, not {threads}")]
    BadThreads { threads: usize },
    #[error("a rank needs at least one KV block of one token (blocks {blocks}, block tokens {block_tokens})")]
    NoBlocks { blocks: u32, block_tokens: u32 },
    #[error("a pool of {blocks} KV blocks of {block_bytes} bytes does not fit the address space")]
    PoolTooLarge { blocks: u32, block_bytes: u64 },
    #[error("cannot start {threads} threads: {source}")]
    Threads { threads: usize, source: std::io::Error },
}

/// One rank: a model, its KV blocks and the threads that compute.
pub struct CpuBackend {
    model: Arc<Model>,
    bounds: Bounds,
    pool: KvPool,
    team: Team,
    checker: Checker,
    sampler: Sampler,
    scratch: Scratch,
}

/// Activations of a step; kept from one to the next.
#[derive(Default)]
struct Scratch {
    /// The residual stream.
    x: Matrix,
    normed: Matrix,
    qkv: Matrix,
    mixed: Matrix,
    projected: Matrix,
    gate_up: Matrix,
    gated: Matrix,
    /// Last rows of the slices that sample.
    last: Matrix,
    logits: Matrix,
    /// For each rope, row by row, the cosine and sine of each pair's angle.
    turns: Vec<Vec<(f32, f32)>>,
    tiles: Vec<SliceTile>,
}

/// Consecutive rows of one slice.
struct SliceTile {
    slice: usize,
    /// Row in the step, and position in the sequence, of the first.
    row: usize,
    position: usize,
    rows: usize,
}

impl CpuBackend {
    /// # Errors
    /// Sizes that cannot be, or no threads.
    pub fn new(model: Arc<Model>, config: CpuConfig) -> Result<Self, CpuError> {
        let CpuConfig { blocks, block_tokens, threads } = config;
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(CpuError::BadThreads { threads });
        }
        if blocks == 0 || block_tokens == 0 {
            return Err(CpuError::NoBlocks { blocks, block_tokens });
        }
        let sizes = model.config();
        let pool = KvPool::new(sizes.block_shape(block_tokens), sizes.layers.len(), blocks as usize)
            .ok_or_else(|| CpuError::PoolTooLarge { blocks, block_bytes: model.block_bytes(block_tokens) })?;
        let team = Team::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        let bounds = Bounds { blocks, block_tokens, vocabulary: sizes.vocabulary, context: sizes.context };
        Ok(Self {
            model,
            bounds,
            pool,
            team,
            checker: Checker::default(),
            sampler: Sampler::default(),
            scratch: Scratch::default(),
        })
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Runs a step and hands the logits of each slice that samples to `each`, in the order of the slices.
    ///
    /// # Errors
    /// A malformed step; nothing was computed then.
    pub fn logits_of(&mut self, step: &Step, mut each: impl FnMut(usize, &[f32])) -> Result<(), StepError> {
        self.forward(step)?;
        for (row, (index, _)) in sampling_slices(step).enumerate() {
            each(index, self.scratch.logits.row(row));
        }
        Ok(())
    }

    /// Leaves the logits of the slices that sample in `scratch.logits`.
    fn forward(&mut self, step: &Step) -> Result<(), StepError> {
        self.checker.check(step, &self.bounds)?;
        let model = Arc::clone(&self.model);
        self.lay_out(step, &model);
        for (index, layer) in model.layers.iter().enumerate() {
            self.attention(step, index, layer);
            self.feed_forward(layer);
        }
        self.head(step, &model);
        Ok(())
    }

    /// Embeds the tokens, and works out where each row is.
    fn lay_out(&mut self, step: &Step, model: &Model) {
        let Scratch { x, turns, tiles, .. } = &mut self.scratch;
        x.resize(step.tokens(), model.config().hidden);
        turns.resize(model.turns_per_position.len(), Vec::new());
        turns.iter_mut().for_each(Vec::clear);
        tiles.clear();
        let scale = model.config().embedding_scale();
        let mut row = 0;
        for (index, slice) in step.slices.iter().enumerate() {
            let start = slice.start as usize;
            for first in (0..slice.tokens.len()).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(slice.tokens.len() - first);
                tiles.push(SliceTile { slice: index, row: row + first, position: start + first, rows });
            }
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
    }

    fn attention(&mut self, step: &Step, index: usize, layer: &Layer) {
        let Scratch { x, normed, qkv, mixed, projected, turns, tiles, .. } = &mut self.scratch;
        let sizes = self.model.config();
        norm_rows(&mut self.team, (x, &layer.attention_norm, sizes.norm_epsilon), normed);
        layer.qkv.apply(&mut self.team, normed, qkv);
        let (q_width, kv_width) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);

        let stride = qkv.stride();
        let (rows, split) = (qkv.rows(), qkv.split());
        let (pairs, turns) = (sizes.head_dim / 2, &turns[layer.attention.rope]);
        self.team.run_rows(rows, ROWS_AT_ONCE, |rows| {
            for row in rows {
                // SAFETY: each row is in one part.
                let numbers = unsafe { split.part(row * stride..row * stride + q_width + 2 * kv_width) };
                prepare_row(numbers, layer, sizes, &turns[row * pairs..][..pairs]);
            }
        });
        let mut row = 0;
        for Slice { tokens, start, blocks, .. } in &step.slices {
            for position in *start as usize..*start as usize + tokens.len() {
                let (keys, values) = qkv.row(row)[q_width..].split_at(kv_width);
                self.pool.write(index, blocks, position, (keys, values));
                row += 1;
            }
        }

        mixed.resize(rows, q_width);
        let group = sizes.heads / sizes.kv_heads;
        let (mixed_stride, mixed_split) = (mixed.stride(), mixed.split());
        let pool = &self.pool;
        self.team.run(tiles.len() * sizes.kv_heads, |part| {
            // Long contexts cost most, and they tend to stand first: kv heads of one tile run one after the other.
            let (tile, kv_head) = (&tiles[part / sizes.kv_heads], part % sizes.kv_heads);
            let table: &[BlockId] = &step.slices[tile.slice].blocks;
            let column = kv_head * group * sizes.head_dim;
            let queries = Tile {
                scale: sizes.score_scale,
                window: layer.attention.window,
                start: tile.position,
                rows: tile.rows,
                group,
                queries: &qkv.tail(tile.row)[column..],
                stride,
            };
            let (start, width) = (tile.row * mixed_stride + column, group * sizes.head_dim);
            // SAFETY: no other part has these rows and this kv head.
            let mut places = unsafe { Places::new(&mixed_split, start, mixed_stride, width) };
            attention::attend(pool.head(index, kv_head, table), &queries, &mut places);
        });
        layer.attention_output.apply(&mut self.team, mixed, projected);
        let post_norm = layer.post_attention_norm.as_deref();
        add_output(&mut self.team, x, (projected, post_norm, sizes.norm_epsilon), normed);
    }

    fn feed_forward(&mut self, layer: &Layer) {
        let Scratch { x, normed, projected, gate_up, gated, .. } = &mut self.scratch;
        let sizes = self.model.config();
        norm_rows(&mut self.team, (x, &layer.feed_forward_norm, sizes.norm_epsilon), normed);
        layer.gate_up.apply(&mut self.team, normed, gate_up);
        let product = if sizes.family.has_gelu() { kernels::gelu_product } else { kernels::silu_product };
        gated.resize(x.rows(), sizes.feed_forward);
        let (stride, split) = (gated.stride(), gated.split());
        self.team.run_rows(x.rows(), ROWS_AT_ONCE, |rows| {
            for row in rows {
                let (gate, up) = gate_up.row(row).split_at(sizes.feed_forward);
                // SAFETY: each row is in one part.
                let out = unsafe { split.part(row * stride..row * stride + sizes.feed_forward) };
                product(gate, up, out);
            }
        });
        layer.down.apply(&mut self.team, gated, projected);
        let post_norm = layer.post_feed_forward_norm.as_deref();
        add_output(&mut self.team, x, (projected, post_norm, sizes.norm_epsilon), normed);
    }

    /// Logits of the last row of each slice that samples.
    fn head(&mut self, step: &Step, model: &Model) {
        let Scratch { x, normed, last, logits, .. } = &mut self.scratch;
        last.resize(sampling_slices(step).count(), model.config().hidden);
        for (row, (_, end)) in sampling_slices(step).enumerate() {
            last.row_mut(row).copy_from_slice(x.row(end - 1));
        }
        norm_rows(&mut self.team, (last, &model.output_norm, model.config().norm_epsilon), normed);
        model.output().apply(&mut self.team, normed, logits);
    }
}

impl Backend for CpuBackend {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        self.forward(step)?;
        let before = out.len();
        for (row, (index, _)) in sampling_slices(step).enumerate() {
            let Some(sample) = &step.slices[index].sample else { continue };
            match self.sampler.draw(self.scratch.logits.row(row), sample) {
                Ok((token, logprob)) => out.push(Sampled { slice: index as u32, token, logprob }),
                Err(NotFinite) => {
                    out.truncate(before);
                    return Err(StepError::NotFinite { slice: index });
                }
            }
        }
        Ok(())
    }
}

/// Slices that sample, each with the row behind its last.
fn sampling_slices(step: &Step) -> impl Iterator<Item = (usize, usize)> {
    let ends = step.slices.iter().scan(0, |end, slice| {
        *end += slice.tokens.len();
        Some((slice.sample.is_some(), *end))
    });
    ends.enumerate().filter(|(_, (samples, _))| *samples).map(|(index, (_, end))| (index, end))
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

/// `x += y`, or `x += norm(y)`, row by row.
fn add_output(
    team: &mut Team,
    x: &mut Matrix,
    (y, norm, epsilon): (&Matrix, Option<&[f32]>, f32),
    normed: &mut Matrix,
) {
    match norm {
        Some(weight) => {
            norm_rows(team, (y, weight, epsilon), normed);
            add_rows(team, x, normed);
        }
        None => add_rows(team, x, y),
    }
}

/// `out = norm(x)`, row by row.
fn norm_rows(team: &mut Team, (x, weight, epsilon): (&Matrix, &[f32], f32), out: &mut Matrix) {
    out.resize(x.rows(), weight.len());
    let (stride, split) = (out.stride(), out.split());
    team.run_rows(x.rows(), ROWS_AT_ONCE, |rows| {
        for row in rows {
            // SAFETY: each row is in one part.
            let out = unsafe { split.part(row * stride..row * stride + weight.len()) };
            kernels::rms_norm(x.row(row), weight, epsilon, out);
        }
    });
}

/// `x += y`, row by row.
fn add_rows(team: &mut Team, x: &mut Matrix, y: &Matrix) {
    let (count, stride, split) = (x.rows(), x.stride(), x.split());
    team.run_rows(count, ROWS_AT_ONCE, |rows| {
        for row in rows {
            let y = y.row(row);
            // SAFETY: each row is in one part.
            kernels::add(unsafe { split.part(row * stride..row * stride + y.len()) }, y);
        }
    });
}
