//! Paged attention over f16 blocks where they lie, for the int8 mode.
//!
//! The context is cut into segments of `SEGMENT_TOKENS` at fixed positions. A segment's running softmax starts afresh and
//! folds in splits of `SPLIT_TOKENS`, in order; the segments' results are merged in order. A score is one chain of fused
//! multiply-adds along the head, a mixed value one along the positions of a split. So the result depends on the query and
//! its context only: not on chunks, batches, threads, blocks shared with others, or the processor's instructions.

use super::{SPLIT_TOKENS, highest, sum_of};
use crate::isa::Isa;
use crate::kernels::{exp, for_wide_vectors};
use crate::kv::halves::HalfHead;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

/// Positions of a segment. Threads share the segments of a long context out, so this is a thread's least work.
pub const SEGMENT_TOKENS: usize = 256;
/// Queries that a kernel takes at once.
const QUERIES: usize = 6;
/// Positions whose keys a kernel takes at once.
const LANES: usize = 16;

/// Queries of consecutive positions that share keys and values.
///
/// # Shape
/// As `attention::Tile`: row `r` of `rows` holds the queries of position `start + r`, one head after the other.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    pub start: usize,
    pub rows: usize,
    pub group: usize,
    pub numbers: &'a [f32],
    pub stride: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// A query sees this many positions, its own among them; all up to its own if there is no window.
    pub window: Option<usize>,
}

impl Queries<'_> {
    /// The first position that the row sees.
    fn first_seen(&self, row: usize) -> usize {
        self.window.map_or(0, |window| (self.start + row + 1).saturating_sub(window))
    }

    /// The segments that any of the queries sees.
    pub fn segments(&self) -> std::ops::Range<usize> {
        self.first_seen(0) / SEGMENT_TOKENS..(self.start + self.rows).div_ceil(SEGMENT_TOKENS)
    }

    /// Numbers that hold a result of all the queries.
    pub fn result_numbers(&self, head_dim: usize) -> usize {
        self.rows * self.group * (head_dim + RUNNING)
    }
}

/// Numbers beside the mixed values of a query: its peak and its sum.
const RUNNING: usize = 2;

/// Results of queries over some segments.
///
/// # Shape
/// For each query, row by row, `head_dim` mixed values; then for each query the highest score and the sum of the weights
/// relative to it.
pub struct Result<'a> {
    mixed: &'a mut [f32],
    running: &'a mut [[f32; RUNNING]],
}

impl<'a> Result<'a> {
    /// A result in `numbers`, of `Queries::result_numbers`.
    pub fn new(numbers: &'a mut [f32], head_dim: usize) -> Self {
        let queries = numbers.len() / (head_dim + RUNNING);
        let (mixed, running) = numbers.split_at_mut(queries * head_dim);
        Self { mixed, running: running.as_chunks_mut().0 }
    }

    /// The result of a query, with the weights' sum divided out.
    pub fn finish(&self, query: usize, out: &mut [f32]) {
        let total = self.running[query][1];
        let mixed = &self.mixed[query * out.len()..][..out.len()];
        out.iter_mut().zip(mixed).for_each(|(out, mixed)| *out = mixed / total);
    }

    /// Folds in the result of the next segment.
    pub fn merge(&mut self, next: &Result<'_>) {
        let head_dim = self.mixed.len() / self.running.len();
        for (query, (running, next_running)) in self.running.iter_mut().zip(next.running.iter()).enumerate() {
            let peak = if next_running[0] > running[0] { next_running[0] } else { running[0] };
            if peak == f32::NEG_INFINITY && !(running[1].is_nan() || next_running[1].is_nan()) {
                // Neither segment has a position that this query sees.
                continue;
            }
            let (own, other) = (exp(running[0] - peak), exp(next_running[0] - peak));
            *running = [peak, running[1] * own + next_running[1] * other];
            let mixed = &mut self.mixed[query * head_dim..][..head_dim];
            mix_two((mixed, own), (&next.mixed[query * head_dim..][..head_dim], other));
        }
    }
}

for_wide_vectors! {
    fn mix_two(to: (&mut [f32], f32), from: (&[f32], f32)) = mix_two_body;
}

#[inline(always)]
fn mix_two_body((to, own): (&mut [f32], f32), (from, other): (&[f32], f32)) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *to * own + from * other);
}

/// Attention of the queries within one segment.
pub fn attend(isa: Isa, kv: HalfHead<'_>, queries: &Queries<'_>, segment: usize, out: &mut Result<'_>) {
    assert!(isa.is_available() && out.running.len() == queries.rows * queries.group, "{isa:?}");
    out.mixed.fill(0.0);
    out.running.fill([f32::NEG_INFINITY, 0.0]);
    let end = (queries.start + queries.rows).min((segment + 1) * SEGMENT_TOKENS);
    for split in (segment * SEGMENT_TOKENS..end).step_by(SPLIT_TOKENS) {
        let seen = split.max(queries.first_seen(0))..end.min(split + SPLIT_TOKENS);
        if seen.is_empty() {
            continue;
        }
        prefetch(kv, queries, seen.end..end.min(seen.end + SPLIT_TOKENS));
        let split = Split::new(kv, split, seen);
        // Rows before the split's first position do not see it.
        let first = split.seen.start.saturating_sub(queries.start) * queries.group;
        for first in (first..queries.rows * queries.group).step_by(QUERIES) {
            split.fold(isa, (first, QUERIES.min(queries.rows * queries.group - first)), queries, out);
        }
    }
}

/// Asks for the blocks of the next split while this one is computed, where few queries share what is read.
fn prefetch(kv: HalfHead<'_>, queries: &Queries<'_>, next: std::ops::Range<usize>) {
    let mut position = next.start;
    while queries.rows <= ROWS_PREFETCHED_MAX && position < next.end {
        kv.prefetch(position);
        position += kv.stretch(position, next.end);
    }
}

/// With more rows the processor has time to see for itself what is read next.
const ROWS_PREFETCHED_MAX: usize = 4;

/// Keys of positions in one block: the first number of the first, and how many positions.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    keys: &'a [u16],
    /// From the start of the split.
    at: usize,
    lanes: usize,
}

/// The positions of one split that any query sees.
struct Split<'a> {
    start: usize,
    seen: std::ops::Range<usize>,
    head_dim: usize,
    key_stride: usize,
    chunks: [Chunk<'a>; SPLIT_TOKENS],
    chunk_count: usize,
    /// For each position from `seen.start` on.
    values: [&'a [u16]; SPLIT_TOKENS],
}

/// Scores of several queries, then their weights.
type Scores = [[f32; SPLIT_TOKENS]; QUERIES];

impl<'a> Split<'a> {
    fn new(kv: HalfHead<'a>, start: usize, seen: std::ops::Range<usize>) -> Self {
        let mut chunks = [Chunk { keys: &[], at: 0, lanes: 0 }; SPLIT_TOKENS];
        // Whole chunks are faster, and the positions before the first are in its block.
        let back = if kv.key_stride().is_multiple_of(LANES) { seen.start % LANES } else { 0 };
        let (mut at, mut chunk_count) = (seen.start - back, 0);
        while at < seen.end {
            // A chunk takes lanes of the block beyond the last position too: nobody looks at their scores.
            let lanes = kv.stretch(at, start + SPLIT_TOKENS).min(LANES);
            chunks[chunk_count] = Chunk { keys: kv.keys(at), at: at - start, lanes };
            chunk_count += 1;
            at += lanes;
        }
        let mut values: [&[u16]; SPLIT_TOKENS] = [&[]; SPLIT_TOKENS];
        let mut position = seen.start;
        while position < seen.end {
            let count = kv.stretch(position, seen.end);
            let of_block = kv.values(position).chunks_exact(kv.head_dim()).take(count);
            values[position - seen.start..].iter_mut().zip(of_block).for_each(|(values, of_one)| *values = of_one);
            position += count;
        }
        Self { start, seen, head_dim: kv.head_dim(), key_stride: kv.key_stride(), chunks, chunk_count, values }
    }

    /// Folds the split into the running softmax of a few queries.
    fn fold(&self, isa: Isa, (first, count): (usize, usize), queries: &Queries<'_>, out: &mut Result<'_>) {
        let head_dim = self.head_dim;
        let mut pointers: [&[f32]; QUERIES] = [&[]; QUERIES];
        for (i, numbers) in pointers[..count].iter_mut().enumerate() {
            let (row, head) = ((first + i) / queries.group, (first + i) % queries.group);
            *numbers = &queries.numbers[row * queries.stride + head * head_dim..][..head_dim];
        }
        let mut scores: Scores = [[0.0; SPLIT_TOKENS]; QUERIES];
        self.scores(isa, &pointers[..count], &mut scores);
        let mut shrinks = [1.0; QUERIES];
        for i in 0..count {
            let row = (first + i) / queries.group;
            let from = queries.first_seen(row).max(self.seen.start) - self.start;
            let to = (queries.start + row + 1).min(self.seen.end).saturating_sub(self.start);
            shrinks[i] = if from < to {
                soften(&mut scores[i], (from, to), queries.scale, &mut out.running[first + i])
            } else {
                scores[i] = [0.0; SPLIT_TOKENS];
                1.0
            };
        }
        let mixed = &mut out.mixed[first * head_dim..][..count * head_dim];
        self.mix(isa, (&scores[..count], &shrinks), mixed);
    }

    /// Scores of the positions seen; elsewhere they are unspecified.
    fn scores(&self, isa: Isa, queries: &[&[f32]], out: &mut Scores) {
        let chunks = &self.chunks[..self.chunk_count];
        for chunk in chunks {
            // What the kernels rely on: the last number of the last lane lies within the block.
            let reach = (self.head_dim - 1) * self.key_stride + chunk.lanes;
            assert!(chunk.keys.len() >= reach && chunk.lanes <= LANES && chunk.at + chunk.lanes <= SPLIT_TOKENS);
        }
        // SAFETY: the processor has the instructions, and the chunks are as asserted.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::scores(queries, (chunks, self.key_stride), out),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => avx2::scores(queries, (chunks, self.key_stride), out),
                _ => portable::scores(queries, (chunks, self.key_stride), out),
            }
        }
    }

    /// `mixed = mixed * shrink + weights * values`, query by query.
    fn mix(&self, isa: Isa, (weights, shrinks): (&[[f32; SPLIT_TOKENS]], &[f32; QUERIES]), mixed: &mut [f32]) {
        let from = self.seen.start - self.start;
        let values = &self.values[..self.seen.len()];
        assert!(
            values.iter().all(|values| values.len() == self.head_dim) && mixed.len() == weights.len() * self.head_dim
        );
        // SAFETY: the processor has the instructions, and the lengths are as asserted.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::mix((weights, from), shrinks, values, mixed),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => avx2::mix((weights, from), shrinks, values, mixed),
                _ => portable::mix((weights, from), shrinks, values, mixed),
            }
        }
    }
}

for_wide_vectors! {
    /// Makes weights of the scores of the positions `from..to` and zero of the others; updates the running softmax and
    /// says what the sums so far are to be multiplied with.
    fn soften(scores: &mut [f32; SPLIT_TOKENS], seen: (usize, usize), scale: f32, running: &mut [f32; RUNNING]) -> f32
        = soften_body;
}

#[inline(always)]
fn soften_body(
    scores: &mut [f32; SPLIT_TOKENS],
    (from, to): (usize, usize),
    scale: f32,
    running: &mut [f32; RUNNING],
) -> f32 {
    for (i, score) in scores.iter_mut().enumerate() {
        *score = if i >= from && i < to { *score * scale } else { f32::NEG_INFINITY };
    }
    let [before, sum] = *running;
    let peak = highest(scores);
    let peak = if peak > before { peak } else { before };
    // The first split has no sums yet: e^-inf is 0.
    let shrink = exp(before - peak);
    scores.iter_mut().for_each(|score| *score = exp(*score - peak));
    *running = [peak, sum * shrink + sum_of(scores)];
    shrink
}
