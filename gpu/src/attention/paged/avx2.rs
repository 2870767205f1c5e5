//! The kernels with AVX2, FMA and F16C: eight lanes at a time, all queries beside each other.

use super::{Chunk, QUERIES, SPLIT_TOKENS, Scores};
use std::arch::x86_64::*;

const LANES: usize = 8;

/// Scores of the queries with the keys of the chunks.
///
/// # Safety
/// The processor has `Isa::Avx2`, and each key has its last number `stride * (head_dim - 1) + lanes` behind its first.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn scores(queries: &[&[f32]], (chunks, stride): (&[Chunk<'_>], usize), out: &mut Scores) {
    for chunk in chunks {
        for lane in (0..chunk.lanes).step_by(LANES) {
            let count = LANES.min(chunk.lanes - lane);
            let mut sums = [_mm256_setzero_ps(); QUERIES];
            for d in 0..queries[0].len() {
                let keys = load(&chunk.keys[d * stride + lane..], count);
                for (sum, x) in sums.iter_mut().zip(queries) {
                    *sum = _mm256_fmadd_ps(keys, _mm256_set1_ps(x[d]), *sum);
                }
            }
            for (sum, out) in sums.iter().zip(out.iter_mut()).take(queries.len()) {
                store(*sum, &mut out[chunk.at + lane..][..count]);
            }
        }
    }
}

/// Shrinks the mixed values and adds those of the positions, by weight.
///
/// # Safety
/// The processor has `Isa::Avx2`; `mixed` has as many rows as `weights`, of as many numbers as each of `values`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn mix(
    (weights, from): (&[[f32; SPLIT_TOKENS]], usize),
    shrinks: &[f32; QUERIES],
    values: &[&[u16]],
    mixed: &mut [f32],
) {
    let head_dim = mixed.len() / weights.len();
    for column in (0..head_dim).step_by(LANES) {
        let count = LANES.min(head_dim - column);
        let mut sums = [_mm256_setzero_ps(); QUERIES];
        for (q, sum) in sums.iter_mut().enumerate().take(weights.len()) {
            let mut before = [0.0; LANES];
            before[..count].copy_from_slice(&mixed[q * head_dim + column..][..count]);
            // SAFETY: a vector's numbers.
            let before = unsafe { _mm256_loadu_ps(before.as_ptr()) };
            *sum = _mm256_mul_ps(before, _mm256_set1_ps(shrinks[q]));
        }
        for (position, row) in (from..SPLIT_TOKENS).zip(values) {
            let vector = load(&row[column..], count);
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = _mm256_fmadd_ps(vector, _mm256_set1_ps(weights[position]), *sum);
            }
        }
        for (q, sum) in sums.iter().enumerate().take(weights.len()) {
            store(*sum, &mut mixed[q * head_dim + column..][..count]);
        }
    }
}

/// The first `count` numbers, at most 8; zeros behind them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(halves: &[u16], count: usize) -> __m256 {
    let halves = &halves[..count];
    if let Some(all) = halves.first_chunk::<LANES>() {
        // SAFETY: a vector's numbers.
        return _mm256_cvtph_ps(unsafe { _mm_loadu_si128(all.as_ptr().cast()) });
    }
    let mut padded = [0_u16; LANES];
    padded[..count].copy_from_slice(halves);
    // SAFETY: a vector's numbers.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(padded.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(vector: __m256, out: &mut [f32]) {
    let mut numbers = [0.0; LANES];
    // SAFETY: a vector's numbers.
    unsafe { _mm256_storeu_ps(numbers.as_mut_ptr(), vector) };
    out.copy_from_slice(&numbers[..out.len()]);
}
