use super::*;
use crate::kv::BlockShape;
use crate::kv::halves::HalfPool;
use half::f16;
use starling_core::ids::BlockId;
use starling_core::step::Table;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 700.0 - 1.4).collect()
}

/// A sequence of one layer with two kv heads.
struct Sequence {
    head_dim: usize,
    group: usize,
    window: Option<usize>,
    queries: Vec<Vec<f32>>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

const KV_HEADS: usize = 2;
const POOL: u32 = 127;

/// How a sequence is attended.
#[derive(Clone, Copy, Debug)]
struct How {
    isa: Isa,
    block_tokens: usize,
    chunk: usize,
    tile: usize,
}

impl Sequence {
    fn new(tokens: usize, head_dim: usize, group: usize) -> Self {
        let rows = |width: usize, seed: usize| (0..tokens).map(|t| numbers(width, seed + 10 * t)).collect();
        Self {
            head_dim,
            group,
            window: None,
            queries: rows(KV_HEADS * group * head_dim, 1),
            keys: rows(KV_HEADS * head_dim, 2),
            values: rows(KV_HEADS * head_dim, 3),
        }
    }

    /// Bits of the attention of all positions, with blocks that are not in order and garbage in all that is not written.
    fn attended(&self, how: How) -> Vec<Vec<u32>> {
        let How { isa, block_tokens, chunk, tile } = how;
        let (tokens, width, head_dim) = (self.queries.len(), self.group * self.head_dim, self.head_dim);
        let blocks = tokens.div_ceil(block_tokens) as u32;
        let all: Vec<_> = (0..blocks).map(|i| BlockId((i * 7 + 3) % POOL)).collect();
        let mut table = Table::whole(all.clone());
        let shape = BlockShape { kv_heads: KV_HEADS, head_dim, block_tokens };
        let mut pool = HalfPool::new(shape, 2, POOL as usize).unwrap();
        let garbage = Table::whole((0..POOL).map(BlockId).collect());
        let nan = vec![f32::NAN; KV_HEADS * head_dim];
        for position in 0..POOL as usize * block_tokens {
            // SAFETY: one position after the other.
            unsafe { pool.writer(1).put(&garbage, position, (&nan, &nan)) };
        }
        let stride = KV_HEADS * width;
        let mut out = vec![vec![0; stride]; tokens];
        for start in (0..tokens).step_by(chunk) {
            let end = tokens.min(start + chunk);
            for position in start..end {
                // SAFETY: one position after the other.
                unsafe { pool.writer(1).put(&table, position, (&self.keys[position], &self.values[position])) };
            }
            if let Some(window) = self.window {
                // Blocks before the window belong to nobody.
                let out = (start + 1).saturating_sub(window) / block_tokens;
                table = Table { out: 0..out as u32, blocks: all[out..].to_vec() };
            }
            for start in (start..end).step_by(tile) {
                let rows = tile.min(end - start);
                let numbers = self.queries[start..start + rows].concat();
                for kv_head in 0..KV_HEADS {
                    let queries = Queries {
                        start,
                        rows,
                        group: self.group,
                        numbers: &numbers[kv_head * width..],
                        stride,
                        scale: 1.0 / (head_dim as f32).sqrt(),
                        window: self.window,
                    };
                    let result = all_segments(isa, pool.head(1, kv_head, &table), &queries);
                    let result = Result { mixed: &mut result.0.clone(), running: &mut result.1.clone() };
                    for query in 0..rows * self.group {
                        let (row, head) = (query / self.group, query % self.group);
                        let mut mixed = vec![0.0; head_dim];
                        result.finish(query, &mut mixed);
                        let to = &mut out[start + row][kv_head * width + head * head_dim..][..head_dim];
                        to.iter_mut().zip(mixed).for_each(|(to, from)| *to = from.to_bits());
                    }
                }
            }
        }
        out
    }

    fn reference(&self, position: usize, head: usize) -> Vec<f64> {
        let at = |row: &[f32], head: usize| -> Vec<f64> {
            row[head * self.head_dim..][..self.head_dim].iter().map(|&n| f64::from(f16::from_f32(n).to_f32())).collect()
        };
        let query: Vec<_> = self.queries[position][head * self.head_dim..][..self.head_dim].to_vec();
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let scores = (first..=position).map(|p| {
            let key = at(&self.keys[p], head / self.group);
            let score: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum();
            (score / (self.head_dim as f64).sqrt()).exp()
        });
        let weights: Vec<f64> = scores.collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.head_dim];
        for (p, weight) in (first..).zip(&weights) {
            for (out, value) in out.iter_mut().zip(at(&self.values[p], head / self.group)) {
                *out += weight / total * value;
            }
        }
        out
    }
}

fn all_segments(isa: Isa, kv: HalfHead<'_>, queries: &Queries<'_>) -> (Vec<f32>, Vec<[f32; RUNNING]>) {
    let mut segments = queries.segments().map(|segment| {
        let mut numbers = vec![f32::NAN; queries.result_numbers(kv.head_dim())];
        attend(isa, kv, queries, segment, &mut Result::new(&mut numbers, kv.head_dim()));
        numbers
    });
    let mut first = segments.next().unwrap();
    let mut result = Result::new(&mut first, kv.head_dim());
    segments.for_each(|mut next| result.merge(&Result::new(&mut next, kv.head_dim())));
    (result.mixed.to_vec(), result.running.to_vec())
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

const WHOLE: How = How { isa: Isa::Portable, block_tokens: 16, chunk: usize::MAX >> 1, tile: 16 };

#[test]
fn attention_agrees_with_the_definition() {
    for (head_dim, group) in [(64, 3), (128, 1), (256, 4), (40, 7), (24, 2), (6, 3)] {
        let sequence = Sequence::new(150, head_dim, group);
        for isa in available() {
            let out = sequence.attended(How { isa, ..WHOLE });
            for position in [0, 1, 15, 16, 63, 64, 65, 127, 128, 149] {
                for head in [0, KV_HEADS * group - 1] {
                    let found = &out[position][head * head_dim..][..head_dim];
                    for (found, right) in found.iter().zip(sequence.reference(position, head)) {
                        let found = f64::from(f32::from_bits(*found));
                        assert!((found - right).abs() < 1e-5, "{isa:?} {head_dim} at {position}: {found}, not {right}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_sees_its_window_and_nothing_before_it() {
    for window in [1, 5, 16, 64, 100, 300] {
        let sequence = Sequence { window: Some(window), ..Sequence::new(400, 16, 2) };
        let whole = sequence.attended(WHOLE);
        for position in [0, 4, 63, 64, 99, 100, 256, 299, 300, 399] {
            for (found, right) in whole[position][16..32].iter().zip(sequence.reference(position, 1)) {
                let found = f64::from(f32::from_bits(*found));
                assert!((found - right).abs() < 1e-5, "window {window} at {position}: {found}, not {right}");
            }
        }
        for isa in available() {
            for (block_tokens, chunk, tile) in [(16, 1, 1), (8, 37, 16), (64, 150, 7), (13, 400, 16)] {
                let how = How { isa, block_tokens, chunk, tile };
                assert!(sequence.attended(how) == whole, "window {window}: {how:?}");
            }
        }
    }
}

#[test]
fn chunks_tiles_blocks_and_instructions_leave_the_bits_as_they_are() {
    for (tokens, head_dim, group) in [(600, 64, 3), (150, 40, 4), (100, 128, 7)] {
        let sequence = Sequence::new(tokens, head_dim, group);
        let whole = sequence.attended(WHOLE);
        for isa in available() {
            for (block_tokens, chunk, tile) in [
                (16, 1, 1),
                (16, 7, 3),
                (16, 64, 16),
                (16, 1000, 5),
                (32, 100, 16),
                (8, 250, 16),
                (5, 13, 16),
                (256, 1, 1),
            ] {
                let how = How { isa, block_tokens, chunk, tile };
                assert!(sequence.attended(how) == whole, "{tokens} tokens of {head_dim}: {how:?}");
            }
        }
    }
}

#[test]
fn a_score_that_is_not_finite_shows_in_the_result() {
    for bad in [f32::NAN, f32::INFINITY, 1e6] {
        let mut sequence = Sequence::new(300, 64, 1);
        sequence.keys[280][0] = bad;
        for isa in available() {
            let out = sequence.attended(How { isa, ..WHOLE });
            assert!(out[200].iter().all(|bits| f32::from_bits(*bits).is_finite()), "{isa:?}");
            assert!(f32::from_bits(out[299][0]).is_nan(), "{isa:?} with {bad}");
        }
    }
}
