//! The kernels with AVX2, and with its dot products of bytes where the processor has them.
//!
//! A vector has half a group, so a group is two halves, each with its own pass.

use super::GROUP;
use super::packed::{BYTE_QUANTS, Group, HALVES, NIBBLE_BLOCK};
use super::rows::Tile;
use std::arch::x86_64::*;

/// Lanes of a vector.
const HALF: usize = GROUP / 2;

/// Makes the kernels for one set of features and its dot products of four-bit and of eight-bit weights.
macro_rules! kernels {
    ($features:literal, $dot_nibbles:path, $dot_bytes:path) => {
        /// Sums of the tile's first rows, 4 or 1; says how many.
        ///
        /// # Safety
        /// The processor has the features, the tile has a row, and as many blocks as the group.
        pub unsafe fn products(weights: Group<'_>, tile: Tile<'_>, sums: &mut [[f32; GROUP]]) -> usize {
            assert!(sums.len() >= tile.rows);
            // SAFETY: what the caller promises, and the kernels take no more rows than there are.
            unsafe {
                if tile.rows >= 4 { of_rows::<4>(weights, tile, sums) } else { of_rows::<1>(weights, tile, sums) }
            }
        }

        #[inline]
        unsafe fn of_rows<const R: usize>(weights: Group<'_>, tile: Tile<'_>, sums: &mut [[f32; GROUP]]) -> usize {
            for half in 0..2 {
                // SAFETY: what the caller promises.
                unsafe {
                    match weights {
                        Group::Nibbles(bytes) => nibbles::<R>(bytes.as_ptr(), half, tile, sums.as_mut_ptr()),
                        Group::Bytes(quants, scales) => {
                            bytes::<R>((quants.as_ptr(), scales.as_ptr()), half, tile, sums.as_mut_ptr());
                        }
                    }
                }
            }
            R
        }

        #[target_feature(enable = $features)]
        unsafe fn nibbles<const R: usize>(weights: *const u8, half: usize, tile: Tile<'_>, sums: *mut [f32; GROUP]) {
            let low = _mm256_set1_epi8(15);
            let mut out = [_mm256_setzero_ps(); R];
            for block in 0..tile.blocks {
                // SAFETY: within the group's blocks.
                let (quants, scales, minimums) = unsafe {
                    let weights = weights.add(block * NIBBLE_BLOCK);
                    let mut quants = [_mm256_setzero_si256(); 8];
                    for j in 0..4 {
                        let both = _mm256_load_si256(weights.add(64 * j + 32 * half).cast());
                        quants[j] = _mm256_and_si256(both, low);
                        quants[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                    }
                    let halves = weights.add(NIBBLE_BLOCK - 2 * HALVES + 16 * half);
                    (quants, load_halves(halves), load_halves(halves.add(HALVES)))
                };
                for (r, out) in out.iter_mut().enumerate() {
                    let at = block * tile.stride + r;
                    // SAFETY: within the tile.
                    unsafe {
                        let products = _mm256_cvtepi32_ps($dot_nibbles(&quants, tile.quants.add(at).cast()));
                        let scale = _mm256_mul_ps(scales, _mm256_set1_ps(*tile.scales.add(at)));
                        *out = _mm256_fmadd_ps(products, scale, *out);
                        *out = _mm256_fmadd_ps(minimums, _mm256_set1_ps(*tile.sums.add(at)), *out);
                    }
                }
            }
            for (r, out) in out.into_iter().enumerate() {
                // SAFETY: there is room for R rows.
                unsafe { _mm256_storeu_ps(sums.add(r).cast::<f32>().add(HALF * half), out) };
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn bytes<const R: usize>(
            (weights, scales): (*const u8, *const u8),
            half: usize,
            tile: Tile<'_>,
            sums: *mut [f32; GROUP],
        ) {
            let mut out = [_mm256_setzero_ps(); R];
            for block in 0..tile.blocks {
                // SAFETY: within the group's blocks.
                let (quants, scales) = unsafe {
                    let weights = weights.add(block * BYTE_QUANTS + 32 * half);
                    let mut quants = [_mm256_setzero_si256(); 8];
                    for (j, quants) in quants.iter_mut().enumerate() {
                        *quants = _mm256_load_si256(weights.add(64 * j).cast());
                    }
                    (quants, load_halves(scales.add(block * HALVES + 16 * half)))
                };
                for (r, out) in out.iter_mut().enumerate() {
                    let at = block * tile.stride + r;
                    // SAFETY: within the tile.
                    unsafe {
                        let products = $dot_bytes(&quants, tile.quants.add(at).cast());
                        let products = _mm256_add_epi32(products, _mm256_set1_epi32(*tile.corrections.add(at)));
                        let scale = _mm256_mul_ps(scales, _mm256_set1_ps(*tile.scales.add(at)));
                        *out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, *out);
                    }
                }
            }
            for (r, out) in out.into_iter().enumerate() {
                // SAFETY: there is room for R rows.
                unsafe { _mm256_storeu_ps(sums.add(r).cast::<f32>().add(HALF * half), out) };
            }
        }
    };
}

kernels!("avx2,fma,f16c", dot_nibbles, dot_bytes);

pub mod vnni {
    use super::*;

    kernels!("avx2,fma,f16c,avxvnni", dot, dot);

    /// # Safety
    /// There are 32 bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn dot(quants: &[__m256i; 8], x: *const i32) -> __m256i {
        let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for j in (0..8).step_by(2) {
            // SAFETY: within the 32 bytes.
            unsafe {
                even = _mm256_dpbusd_avx_epi32(even, quants[j], _mm256_set1_epi32(x.add(j).read_unaligned()));
                odd = _mm256_dpbusd_avx_epi32(odd, quants[j + 1], _mm256_set1_epi32(x.add(j + 1).read_unaligned()));
            }
        }
        _mm256_add_epi32(even, odd)
    }
}

/// # Safety
/// There are 8 halves.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_halves(halves: *const u8) -> __m256 {
    // SAFETY: what the caller promises.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(halves.cast()) })
}

/// Sums of 16 bits hold the products of four-bit weights: two times eight of at most 15 * 127 are below 2^15.
///
/// # Safety
/// There are 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_nibbles(quants: &[__m256i; 8], x: *const i32) -> __m256i {
    let mut sums = _mm256_setzero_si256();
    for (j, quants) in quants.iter().enumerate() {
        // SAFETY: within the 32 bytes.
        let x = _mm256_set1_epi32(unsafe { x.add(j).read_unaligned() });
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(*quants, x));
    }
    _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
}

/// Two products of eight-bit weights may exceed 16 bits, where `maddubs` would saturate: so bytes are widened first, those
/// at even places and those at odd ones apart.
///
/// # Safety
/// There are 32 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_bytes(quants: &[__m256i; 8], x: *const i32) -> __m256i {
    let low = _mm256_set1_epi16(0xff);
    let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    for (j, quants) in quants.iter().enumerate() {
        // SAFETY: within the 32 bytes.
        let x = _mm256_set1_epi32(unsafe { x.add(j).read_unaligned() });
        let (x_even, x_odd) = (_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8));
        even = _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_and_si256(*quants, low), x_even));
        odd = _mm256_add_epi32(odd, _mm256_madd_epi16(_mm256_srli_epi16(*quants, 8), x_odd));
    }
    _mm256_add_epi32(even, odd)
}
