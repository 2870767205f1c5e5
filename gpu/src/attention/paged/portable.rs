//! The kernels in plain Rust: what the others are compared with, and what other processors run.

use super::{Chunk, QUERIES, SPLIT_TOKENS, Scores};
use half::f16;

/// Scores of the queries with the keys of the chunks.
///
/// # Safety
/// None is needed; the other kernels have the same signature.
pub unsafe fn scores(queries: &[&[f32]], (chunks, stride): (&[Chunk<'_>], usize), out: &mut Scores) {
    for chunk in chunks {
        for (query, out) in queries.iter().zip(out.iter_mut()) {
            for lane in 0..chunk.lanes {
                let mut sum = 0.0;
                for (d, x) in query.iter().enumerate() {
                    sum = f16::from_bits(chunk.keys[d * stride + lane]).to_f32().mul_add(*x, sum);
                }
                out[chunk.at + lane] = sum;
            }
        }
    }
}

/// Shrinks the mixed values and adds those of the positions, by weight.
///
/// # Safety
/// None is needed; the other kernels have the same signature.
pub unsafe fn mix(
    (weights, from): (&[[f32; SPLIT_TOKENS]], usize),
    shrinks: &[f32; QUERIES],
    values: &[&[u16]],
    mixed: &mut [f32],
) {
    let head_dim = mixed.len() / weights.len();
    for ((mixed, weights), shrink) in mixed.chunks_exact_mut(head_dim).zip(weights).zip(shrinks) {
        for (d, mixed) in mixed.iter_mut().enumerate() {
            let mut sum = *mixed * shrink;
            for (weight, values) in weights[from..].iter().zip(values) {
                sum = f16::from_bits(values[d]).to_f32().mul_add(*weight, sum);
            }
            *mixed = sum;
        }
    }
}
