use super::*;
use crate::kv::{BlockShape, KvPool};
use starling_core::ids::BlockId;
use starling_core::step::Table;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 700.0 - 1.4).collect()
}

/// A sequence of one layer with two kv heads of three queries each.
struct Sequence {
    head_dim: usize,
    window: Option<usize>,
    queries: Vec<Vec<f32>>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

const KV_HEADS: usize = 2;
const GROUP: usize = 3;

impl Sequence {
    fn new(tokens: usize, head_dim: usize) -> Self {
        let rows = |width: usize, seed: usize| (0..tokens).map(|t| numbers(width, seed + 10 * t)).collect();
        Self {
            head_dim,
            window: None,
            queries: rows(KV_HEADS * GROUP * head_dim, 1),
            keys: rows(KV_HEADS * head_dim, 2),
            values: rows(KV_HEADS * head_dim, 3),
        }
    }

    /// Attention of all positions, `chunk` at a time, with blocks that are not in order.
    fn attended(&self, block_tokens: usize, chunk: usize) -> Vec<Vec<f32>> {
        let (tokens, width) = (self.queries.len(), GROUP * self.head_dim);
        let blocks = tokens.div_ceil(block_tokens) as u32;
        let table = Table::whole((0..blocks).map(|i| BlockId((i * 7 + 3) % 211)).collect());
        let shape = BlockShape { kv_heads: KV_HEADS, head_dim: self.head_dim, block_tokens };
        let mut pool = KvPool::new(shape, 2, 211).unwrap();
        for position in 0..tokens {
            pool.write(1, &table, position, (&self.keys[position], &self.values[position]));
        }
        let mut out = vec![vec![0.0; KV_HEADS * width]; tokens];
        for start in (0..tokens).step_by(chunk) {
            let rows = chunk.min(tokens - start);
            let queries = self.queries[start..start + rows].concat();
            let mut sums = vec![f32::NAN; queries.len()];
            let split = Split::new(&mut sums);
            let stride = KV_HEADS * width;
            for kv_head in 0..KV_HEADS {
                let queries = &queries[kv_head * width..];
                let scale = 1.0 / (self.head_dim as f32).sqrt();
                let tile = Tile { scale, window: self.window, start, rows, group: GROUP, queries, stride };
                // SAFETY: one kv head after the other.
                let mut places = unsafe { Places::new(&split, kv_head * width, stride, width) };
                attend(pool.head(1, kv_head, &table), &tile, &mut places);
            }
            for (row, sums) in sums.chunks(stride).enumerate() {
                out[start + row].copy_from_slice(sums);
            }
        }
        out
    }

    fn reference(&self, position: usize, head: usize) -> Vec<f64> {
        let at = |row: &[f32], head: usize| -> Vec<f64> {
            row[head * self.head_dim..][..self.head_dim].iter().map(|&n| f64::from(n)).collect()
        };
        let query = at(&self.queries[position], head);
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let scores = (first..=position).map(|p| {
            let key = at(&self.keys[p], head / GROUP);
            let score: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
            (score / (self.head_dim as f64).sqrt()).exp()
        });
        let weights: Vec<f64> = scores.collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.head_dim];
        for (p, weight) in weights.iter().enumerate() {
            for (out, value) in out.iter_mut().zip(at(&self.values[first + p], head / GROUP)) {
                *out += weight / total * value;
            }
        }
        out
    }
}

#[test]
fn attention_agrees_with_the_definition() {
    for head_dim in [64, 6, 40] {
        let sequence = Sequence::new(150, head_dim);
        let out = sequence.attended(16, 16);
        for position in [0, 1, 15, 16, 63, 64, 65, 127, 128, 149] {
            for head in 0..KV_HEADS * GROUP {
                let found = &out[position][head * head_dim..][..head_dim];
                for (found, right) in found.iter().zip(sequence.reference(position, head)) {
                    assert!((f64::from(*found) - right).abs() < 1e-5, "position {position}: {found}, not {right}");
                }
            }
        }
    }
}

#[test]
fn chunks_and_sizes_of_blocks_leave_the_bits_as_they_are() {
    let sequence = Sequence::new(150, 64);
    let all = sequence.attended(16, 150);
    for (block_tokens, chunk) in
        [(16, 1), (16, 7), (16, 64), (16, 100), (32, 16), (5, 13), (1, 150), (64, 33), (256, 1)]
    {
        assert!(sequence.attended(block_tokens, chunk) == all, "blocks of {block_tokens}, chunks of {chunk}");
    }
}

#[test]
fn wide_vectors_give_the_bits_of_narrow_ones() {
    let sequence = Sequence::new(64, 64);
    let shape = BlockShape { kv_heads: KV_HEADS, head_dim: 64, block_tokens: 64 };
    let mut pool = KvPool::new(shape, 1, 1).unwrap();
    let table = Table::whole(vec![BlockId(0)]);
    for position in 0..64 {
        pool.write(0, &table, position, (&sequence.keys[position], &sequence.values[position]));
    }
    let query = (&sequence.queries[63][..64], 0.125);
    let first = Running { peak: -1.0, sum: 0.5 };
    let (mut wide, mut narrow) = ((first, vec![0.25; 64]), (first, vec![0.25; 64]));
    fold(pool.head(0, 0, &table), (0, 64), query, (&mut wide.0, &mut wide.1));
    fold_body(pool.head(0, 0, &table), (0, 64), query, (&mut narrow.0, &mut narrow.1));
    assert_eq!(wide.1, narrow.1);
    assert_eq!((wide.0.peak, wide.0.sum), (narrow.0.peak, narrow.0.sum));
}

#[test]
fn a_query_with_a_window_sees_that_many_positions_and_reads_no_others() {
    for window in [1, 5, 16, 63, 64, 65, 100, 149, 150, 1000] {
        let mut sequence = Sequence { window: Some(window), ..Sequence::new(150, 40) };
        let all = sequence.attended(16, 150);
        for position in [0, 1, 63, 64, 65, 128, 149] {
            for head in 0..KV_HEADS * GROUP {
                let found = &all[position][head * 40..][..40];
                for (found, right) in found.iter().zip(sequence.reference(position, head)) {
                    let error = (f64::from(*found) - right).abs();
                    assert!(error < 1e-5, "window {window}, position {position}: {found}, not {right}");
                }
            }
        }
        for (block_tokens, chunk) in [(16, 1), (16, 7), (5, 64), (64, 33)] {
            assert!(sequence.attended(block_tokens, chunk) == all, "window {window}, chunks of {chunk}");
        }
        // What lies before the window may be anything.
        let unseen = 150_usize.saturating_sub(window);
        sequence.keys[..unseen].iter_mut().chain(&mut sequence.values[..unseen]).for_each(|row| row.fill(f32::NAN));
        assert!(sequence.attended(16, 16)[149] == all[149], "window {window}");
    }
}

#[test]
fn a_score_that_is_not_finite_shows_in_the_result() {
    let mut sequence = Sequence::new(4, 64);
    sequence.keys[2][0] = f32::NAN;
    let out = sequence.attended(16, 4);
    assert!(out[1].iter().all(|n| n.is_finite()) && out[3][0].is_nan());
}
