//! The kernels with AVX-512.

use super::{Chunk, LANES, QUERIES, SPLIT_TOKENS, Scores};
use std::arch::x86_64::*;

/// Vectors that a kernel takes at once.
const VECTORS: usize = 4;

/// Scores of the queries with the keys of the chunks.
///
/// # Safety
/// The processor has `Isa::Avx512`, and each key has its last number `stride * (head_dim - 1) + lanes` behind its first.
pub unsafe fn scores(queries: &[&[f32]], (chunks, stride): (&[Chunk<'_>], usize), out: &mut Scores) {
    // SAFETY: what the caller promises.
    unsafe {
        match queries {
            [a, b, c, d, e, f, ..] => scores_of([a, b, c, d, e, f], (chunks, stride), out),
            [a, b, c, d, e] => scores_of([a, b, c, d, e], (chunks, stride), out),
            [a, b, c, d] => scores_of([a, b, c, d], (chunks, stride), out),
            [a, b, c] => scores_of([a, b, c], (chunks, stride), out),
            [a, b] => scores_of([a, b], (chunks, stride), out),
            [a] => scores_of([a], (chunks, stride), out),
            [] => {}
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn scores_of<const Q: usize>(x: [&[f32]; Q], (chunks, stride): (&[Chunk<'_>], usize), out: &mut Scores) {
    let mut rest = chunks;
    while let [a, b, c, d, more @ ..] = rest {
        let four = [a, b, c, d];
        if four.iter().any(|chunk| chunk.lanes < LANES) {
            break;
        }
        // SAFETY: what the caller promises; each chunk has all lanes.
        unsafe { scores_of_chunks::<Q, VECTORS>(x, four, (stride, u16::MAX), out) };
        rest = more;
    }
    for chunk in rest {
        let mask = u16::MAX >> (LANES - chunk.lanes);
        // SAFETY: what the caller promises.
        unsafe { scores_of_chunks::<Q, 1>(x, [chunk], (stride, mask), out) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn scores_of_chunks<const Q: usize, const V: usize>(
    x: [&[f32]; Q],
    chunks: [&Chunk<'_>; V],
    (stride, mask): (usize, u16),
    out: &mut Scores,
) {
    let mut sums = [[_mm512_setzero_ps(); V]; Q];
    for d in 0..x[0].len() {
        let mut keys = [_mm512_setzero_ps(); V];
        for (keys, chunk) in keys.iter_mut().zip(chunks) {
            // SAFETY: the lanes of the mask lie within the chunk's block.
            *keys = unsafe { load(mask, chunk.keys.as_ptr().add(d * stride)) };
        }
        for (sums, x) in sums.iter_mut().zip(x) {
            // SAFETY: all queries have one length.
            let x = _mm512_set1_ps(unsafe { *x.get_unchecked(d) });
            for (sum, keys) in sums.iter_mut().zip(keys) {
                *sum = _mm512_fmadd_ps(keys, x, *sum);
            }
        }
    }
    for (sums, out) in sums.iter().zip(out) {
        for (sum, chunk) in sums.iter().zip(chunks) {
            // SAFETY: the lanes of the mask lie within the split.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr().add(chunk.at), mask, *sum) };
        }
    }
}

/// # Safety
/// The lanes of the mask can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(mask: u16, halves: *const u16) -> __m512 {
    // SAFETY: what the caller promises.
    _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, halves.cast()) })
}

/// Shrinks the mixed values and adds those of the positions, by weight.
///
/// # Safety
/// The processor has `Isa::Avx512`; `mixed` has as many rows as `weights`, of as many numbers as each of `values`.
pub unsafe fn mix(
    (weights, from): (&[[f32; SPLIT_TOKENS]], usize),
    shrinks: &[f32; QUERIES],
    values: &[&[u16]],
    mixed: &mut [f32],
) {
    // SAFETY: what the caller promises.
    unsafe {
        match weights.len() {
            6.. => mix_of::<6>((weights, from), shrinks, values, mixed),
            5 => mix_of::<5>((weights, from), shrinks, values, mixed),
            4 => mix_of::<4>((weights, from), shrinks, values, mixed),
            3 => mix_of::<3>((weights, from), shrinks, values, mixed),
            2 => mix_of::<2>((weights, from), shrinks, values, mixed),
            1 => mix_of::<1>((weights, from), shrinks, values, mixed),
            0 => {}
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn mix_of<const Q: usize>(
    weights: (&[[f32; SPLIT_TOKENS]], usize),
    shrinks: &[f32; QUERIES],
    values: &[&[u16]],
    mixed: &mut [f32],
) {
    let head_dim = mixed.len() / Q;
    let mut at = 0;
    while head_dim - at >= VECTORS * LANES {
        // SAFETY: so many numbers are left of each row.
        unsafe { mix_columns::<Q, VECTORS>(weights, shrinks, (values, u16::MAX), (mixed, at)) };
        at += VECTORS * LANES;
    }
    while at < head_dim {
        let mask = u16::MAX >> (LANES - LANES.min(head_dim - at));
        // SAFETY: the lanes of the mask are what is left.
        unsafe { mix_columns::<Q, 1>(weights, shrinks, (values, mask), (mixed, at)) };
        at += LANES;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn mix_columns<const Q: usize, const V: usize>(
    (weights, from): (&[[f32; SPLIT_TOKENS]], usize),
    shrinks: &[f32; QUERIES],
    (values, mask): (&[&[u16]], u16),
    (mixed, at): (&mut [f32], usize),
) {
    let head_dim = mixed.len() / Q;
    let weights: &[[f32; SPLIT_TOKENS]; Q] = weights.first_chunk().expect("a row of weights for each query");
    let mut sums = [[_mm512_setzero_ps(); V]; Q];
    for (q, sums) in sums.iter_mut().enumerate() {
        for (v, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the lanes of the mask lie within the row.
            let before = unsafe { _mm512_maskz_loadu_ps(mask, mixed.as_ptr().add(q * head_dim + at + v * LANES)) };
            *sum = _mm512_mul_ps(before, _mm512_set1_ps(shrinks[q]));
        }
    }
    for (position, row) in (from..SPLIT_TOKENS).zip(values) {
        let mut vectors = [_mm512_setzero_ps(); V];
        for (v, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: the lanes of the mask lie within the row.
            *vector = unsafe { load(mask, row.as_ptr().add(at + v * LANES)) };
        }
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weight = _mm512_set1_ps(weights[position]);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = _mm512_fmadd_ps(vector, weight, *sum);
            }
        }
    }
    for (q, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            // SAFETY: the lanes of the mask lie within the row.
            unsafe { _mm512_mask_storeu_ps(mixed.as_mut_ptr().add(q * head_dim + at + v * LANES), mask, *sum) };
        }
    }
}
