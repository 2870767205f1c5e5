//! Products of a few rows: decoding. The gemm crate copies weights into its own order before it multiplies, which costs
//! more than the product itself when there are few rows; here each weight is read once, where it lies.
//!
//! The arithmetic is that of the crate's blocked path, bit for bit: one chain of fused operations along a block of the
//! inner dimension, then one addition to what the blocks before came to. The tests hold it to that.

use super::PANEL;

/// Rows up to which this path is taken. Beyond it the crate's register tiles pay for its copies.
pub(super) const ROWS_MAX: usize = 8;
/// Rows whose sums stay in registers together.
const GROUP: usize = 4;

/// Whether this processor has what the path needs: fused multiply-add, as the gemm crate uses it too.
pub(super) fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512f") || (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// A block of the inner dimension: `weights` are `depth` rows of `PANEL` numbers, `x[r]` as many numbers of row r.
/// Writes `PANEL` sums a row to `out`, or adds them to what is there.
///
/// # Safety
/// The processor has what `is_available` asks for, `out` points to `x.len()` rows of `PANEL` numbers, `stride` apart, and
/// nobody else uses them.
pub(super) unsafe fn product(weights: &[f32], x: &[&[f32]], (out, stride): (*mut f32, usize), add: bool) {
    for (group, rows) in x.chunks(GROUP).enumerate() {
        assert!(rows.iter().all(|row| row.len() * PANEL == weights.len()), "rows and weights of one depth");
        // SAFETY: within the rows that the caller promises.
        unsafe {
            let out = out.add(group * GROUP * stride);
            match rows {
                [a] => of_rows([a], weights, (out, stride), add),
                [a, b] => of_rows([a, b], weights, (out, stride), add),
                [a, b, c] => of_rows([a, b, c], weights, (out, stride), add),
                [a, b, c, d] => of_rows([a, b, c, d], weights, (out, stride), add),
                _ => {}
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn of_rows<const R: usize>(x: [&[f32]; R], weights: &[f32], out: (*mut f32, usize), add: bool) {
    // SAFETY: the processor has the features; the rest is the caller's promise.
    unsafe {
        if is_x86_feature_detected!("avx512f") {
            wide::<R>(x, weights, out, add);
        } else {
            half::<R>(x, weights, out, add);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn of_rows<const R: usize>(_: [&[f32]; R], _: &[f32], _: (*mut f32, usize), _: bool) {
    unreachable!("is_available says no here");
}

/// Makes a kernel for one width of vectors: `$columns` sums a row stay in registers, `$vectors` vectors of `$lanes`.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    ($name:ident, $features:literal, $lanes:literal, $vectors:literal,
     $zero:ident, $load:ident, $splat:ident, $fma:ident, $sum:ident, $store:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize>(x: [&[f32]; R], weights: &[f32], (out, stride): (*mut f32, usize), add: bool) {
            use std::arch::x86_64::*;
            let columns = $lanes * $vectors;
            for column in (0..PANEL).step_by(columns) {
                let mut sums = [[$zero(); $vectors]; R];
                for (k, weights) in weights.chunks_exact(PANEL).enumerate() {
                    for v in 0..$vectors {
                        // SAFETY: `column + v * lanes` and what follows lie within the row of `PANEL` weights.
                        let w = unsafe { $load(weights.as_ptr().add(column + v * $lanes)) };
                        for r in 0..R {
                            // SAFETY: each row has as many numbers as there are rows of weights.
                            let value = $splat(unsafe { *x[r].get_unchecked(k) });
                            sums[r][v] = $fma(w, value, sums[r][v]);
                        }
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (v, sum) in sums.iter().enumerate() {
                        // SAFETY: within the rows that the caller promises.
                        unsafe {
                            let at = out.add(r * stride + column + v * $lanes);
                            $store(at, if add { $sum($load(at), *sum) } else { *sum });
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(
    wide,
    "avx512f",
    16,
    4,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_storeu_ps
);
#[cfg(target_arch = "x86_64")]
kernel!(
    half,
    "avx2,fma",
    8,
    2,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_storeu_ps
);
