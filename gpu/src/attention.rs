//! Paged attention over blocks where they lie.
//!
//! A query looks at its positions in splits of `SPLIT_TOKENS`, in order, and folds each into a running softmax. The
//! splits lie at fixed positions, and within one every sum runs in the order of the positions: so the result depends on
//! the query and its context only, never on how the context was chunked, batched, shared or shared out over threads.

use crate::kernels::{LANES, dot, exp, for_wide_vectors, sum_lanes};
use crate::kv::KvHead;
use crate::team::Split;

pub mod paged;
#[cfg(test)]
mod tests;

/// Positions of a split: keys and values of one head (64 numbers each) fit the first-level cache beside the queries.
pub const SPLIT_TOKENS: usize = 64;
/// Numbers of a head that are summed in registers at once.
const STRIP: usize = 4 * LANES;

/// Queries of consecutive positions that share keys and values.
///
/// # Shape
/// Row `r` of `rows` holds the queries of position `start + r`, one head of `head_dim` numbers after the other, for the
/// heads of one group; `stride` numbers lie between rows.
pub struct Tile<'a> {
    /// What the scalar product of a query and a key is multiplied with.
    pub scale: f32,
    /// Positions that a query sees, its own among them; `None`: all before it.
    pub window: Option<usize>,
    pub start: usize,
    pub rows: usize,
    pub group: usize,
    pub queries: &'a [f32],
    pub stride: usize,
}

impl Tile<'_> {
    /// The first position that a row sees.
    fn first_seen(&self, row: usize) -> usize {
        self.window.map_or(0, |window| (self.start + row + 1).saturating_sub(window))
    }
}

/// The running softmax of one query: the highest score, and the sum of weights relative to it.
#[derive(Clone, Copy)]
struct Running {
    peak: f32,
    sum: f32,
}

/// Where the results of a tile go: a stretch of each of its rows.
pub struct Places<'a> {
    split: &'a Split<'a>,
    start: usize,
    stride: usize,
    width: usize,
}

impl<'a> Places<'a> {
    /// Stretches of `width` numbers, the first at `start`, `stride` apart.
    ///
    /// # Safety
    /// Nobody else uses these stretches as long as this lives.
    pub unsafe fn new(split: &'a Split<'a>, start: usize, stride: usize, width: usize) -> Self {
        Self { split, start, stride, width }
    }

    fn row(&mut self, row: usize) -> &mut [f32] {
        let start = self.start + row * self.stride;
        // SAFETY: the stretches are this one's alone, and `&mut self` keeps them apart in time.
        unsafe { self.split.part(start..start + self.width) }
    }
}

/// Attention of a tile: `out` gets, for each query, the mean of the values weighted by the softmax of the scores.
pub fn attend(kv: KvHead<'_>, tile: &Tile<'_>, out: &mut Places<'_>) {
    let head_dim = kv.head_dim();
    let end = tile.start + tile.rows;
    let mut running = vec![Running { peak: f32::NEG_INFINITY, sum: 0.0 }; tile.rows * tile.group];
    for row in 0..tile.rows {
        out.row(row).fill(0.0);
    }
    // Splits lie where they would without a window, so that what a row reads does not depend on its tile.
    let first_split = tile.first_seen(0) / SPLIT_TOKENS * SPLIT_TOKENS;
    for split in (first_split..end).step_by(SPLIT_TOKENS) {
        // Rows before the split's first position do not see it.
        for row in split.saturating_sub(tile.start)..tile.rows {
            let from = tile.first_seen(row).max(split);
            let to = (tile.start + row + 1).min(split + SPLIT_TOKENS);
            if from >= to {
                continue;
            }
            let queries = &tile.queries[row * tile.stride..];
            let sums = out.row(row);
            for head in 0..tile.group {
                let query = &queries[head * head_dim..][..head_dim];
                let sum = &mut sums[head * head_dim..][..head_dim];
                fold(kv, (from, to), (query, tile.scale), (&mut running[row * tile.group + head], sum));
            }
        }
    }
    for row in 0..tile.rows {
        for (head, sums) in out.row(row).chunks_exact_mut(head_dim).enumerate() {
            let total = running[row * tile.group + head].sum;
            sums.iter_mut().for_each(|sum| *sum /= total);
        }
    }
}

for_wide_vectors! {
    /// Folds the positions of a split that a query sees into its running softmax.
    fn fold(
        kv: KvHead<'_>,
        positions: (usize, usize),
        query: (&[f32], f32),
        so_far: (&mut Running, &mut [f32]),
    ) = fold_body;
}

#[inline(always)]
fn fold_body(
    kv: KvHead<'_>,
    (from, to): (usize, usize),
    (query, scale): (&[f32], f32),
    (running, sums): (&mut Running, &mut [f32]),
) {
    let mut weights = [f32::NEG_INFINITY; SPLIT_TOKENS];
    let head_dim = query.len();
    let mut at = from;
    while at < to {
        let (keys, _) = kv.run(at, to);
        for (weight, key) in weights[at - from..].iter_mut().zip(keys.chunks_exact(head_dim)) {
            *weight = dot(query, key) * scale;
        }
        at += keys.len() / head_dim;
    }
    let peak = highest(&weights).max(running.peak);
    // The first split has no sums yet: e^-inf is 0.
    let shrink = exp(running.peak - peak);
    weights.iter_mut().for_each(|weight| *weight = exp(*weight - peak));
    *running = Running { peak, sum: running.sum * shrink + sum_of(&weights) };
    sums.iter_mut().for_each(|sum| *sum *= shrink);
    let mut at = from;
    while at < to {
        let (_, values) = kv.run(at, to);
        add_weighted(&weights[at - from..], values, sums);
        at += values.len() / head_dim;
    }
}

#[inline(always)]
fn highest(weights: &[f32; SPLIT_TOKENS]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in weights.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

#[inline(always)]
fn sum_of(weights: &[f32; SPLIT_TOKENS]) -> f32 {
    let mut lanes = [0.0; LANES];
    for chunk in weights.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
    sum_lanes(lanes)
}

/// `sums += weights * values`, position by position.
#[inline(always)]
fn add_weighted(weights: &[f32], values: &[f32], sums: &mut [f32]) {
    let head_dim = sums.len();
    let (strips, rest) = sums.as_chunks_mut::<STRIP>();
    for (strip, sums) in strips.iter_mut().enumerate() {
        let mut registers = *sums;
        for (weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
            let values: &[f32; STRIP] = values[strip * STRIP..][..STRIP].try_into().expect("a strip");
            for i in 0..STRIP {
                registers[i] += weight * values[i];
            }
        }
        *sums = registers;
    }
    let done = head_dim - rest.len();
    for (weight, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
        for (sum, value) in rest.iter_mut().zip(&values[done..]) {
            *sum += weight * value;
        }
    }
}
