//! The kernels with AVX-512 and its dot products of bytes.

use super::GROUP;
use super::packed::{BYTE_QUANTS, Group, HALVES, NIBBLE_BLOCK};
use super::rows::Tile;
use std::arch::x86_64::*;

/// Sums of the tile's first rows, 16, 8, 4, 2 or 1; says how many.
///
/// # Safety
/// The processor has `Isa::Avx512`, the tile has a row, and as many blocks as the group.
pub unsafe fn products(weights: Group<'_>, tile: Tile<'_>, sums: &mut [[f32; GROUP]]) -> usize {
    assert!(sums.len() >= tile.rows);
    // SAFETY: what the caller promises, and the kernels take no more rows than there are.
    unsafe {
        match tile.rows {
            16.. => of_rows::<16>(weights, tile, sums),
            8.. => of_rows::<8>(weights, tile, sums),
            4.. => of_rows::<4>(weights, tile, sums),
            2.. => of_rows::<2>(weights, tile, sums),
            _ => of_rows::<1>(weights, tile, sums),
        }
    }
}

#[inline]
unsafe fn of_rows<const R: usize>(weights: Group<'_>, tile: Tile<'_>, sums: &mut [[f32; GROUP]]) -> usize {
    // SAFETY: what the caller promises.
    unsafe {
        match weights {
            Group::Nibbles(bytes) => nibbles::<R>(bytes.as_ptr(), tile, sums.as_mut_ptr()),
            Group::Bytes(quants, scales) => bytes::<R>((quants.as_ptr(), scales.as_ptr()), tile, sums.as_mut_ptr()),
        }
    }
    R
}

/// Runs the body once for each row with the row's number as a constant, so that sums stay in registers: the compiler does
/// not unroll so long a loop by itself.
macro_rules! for_each_row {
    ($row:ident < $rows:ident, $body:block) => {
        for_each_row!($row $rows $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($row:ident $rows:ident $body:block $($number:literal)*) => {$(
        if $number < $rows {
            let $row: usize = $number;
            $body
        }
    )*};
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn nibbles<const R: usize>(weights: *const u8, tile: Tile<'_>, sums: *mut [f32; GROUP]) {
    let low = _mm512_set1_epi8(15);
    let mut out = [_mm512_setzero_ps(); R];
    for block in 0..tile.blocks {
        // SAFETY: within the group's blocks.
        let (quants, scales, minimums) = unsafe {
            let weights = weights.add(block * NIBBLE_BLOCK);
            let mut quants = [_mm512_setzero_si512(); 8];
            for j in 0..4 {
                let both = _mm512_load_si512(weights.add(64 * j).cast());
                quants[j] = _mm512_and_si512(both, low);
                quants[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
            let halves = weights.add(NIBBLE_BLOCK - 2 * HALVES);
            (quants, load_halves(halves), load_halves(halves.add(HALVES)))
        };
        for_each_row!(r < R, {
            let at = block * tile.stride + r;
            // SAFETY: within the tile.
            unsafe {
                let products = dot(&quants, tile.quants.add(at).cast(), _mm512_setzero_si512());
                let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*tile.scales.add(at)));
                out[r] = _mm512_fmadd_ps(products, scale, out[r]);
                out[r] = _mm512_fmadd_ps(minimums, _mm512_set1_ps(*tile.sums.add(at)), out[r]);
            }
        });
    }
    for_each_row!(r < R, {
        // SAFETY: there is room for R rows.
        unsafe { _mm512_storeu_ps(sums.add(r).cast(), out[r]) };
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn bytes<const R: usize>((weights, halves): (*const u8, *const u8), tile: Tile<'_>, sums: *mut [f32; GROUP]) {
    let mut out = [_mm512_setzero_ps(); R];
    for block in 0..tile.blocks {
        // SAFETY: within the group's blocks.
        let (quants, scales) = unsafe {
            let weights = weights.add(block * BYTE_QUANTS);
            let mut quants = [_mm512_setzero_si512(); 8];
            for (j, quants) in quants.iter_mut().enumerate() {
                *quants = _mm512_load_si512(weights.add(64 * j).cast());
            }
            (quants, load_halves(halves.add(block * HALVES)))
        };
        for_each_row!(r < R, {
            let at = block * tile.stride + r;
            // SAFETY: within the tile.
            unsafe {
                let correction = _mm512_set1_epi32(*tile.corrections.add(at));
                let products = dot(&quants, tile.quants.add(at).cast(), correction);
                let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*tile.scales.add(at)));
                out[r] = _mm512_fmadd_ps(products, scale, out[r]);
            }
        });
    }
    for_each_row!(r < R, {
        // SAFETY: there is room for R rows.
        unsafe { _mm512_storeu_ps(sums.add(r).cast(), out[r]) };
    });
}

/// # Safety
/// There are 16 halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn load_halves(halves: *const u8) -> __m512 {
    // SAFETY: what the caller promises.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(halves.cast()) })
}

/// Products of a block of each row of the group with one block, as f32: exact, for they stay below 2^24.
///
/// # Safety
/// There are 32 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn dot(quants: &[__m512i; 8], x: *const i32, start: __m512i) -> __m512 {
    let (mut even, mut odd) = (start, _mm512_setzero_si512());
    for j in (0..8).step_by(2) {
        // SAFETY: within the 32 bytes.
        unsafe {
            even = _mm512_dpbusd_epi32(even, quants[j], _mm512_set1_epi32(x.add(j).read_unaligned()));
            odd = _mm512_dpbusd_epi32(odd, quants[j + 1], _mm512_set1_epi32(x.add(j + 1).read_unaligned()));
        }
    }
    _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd))
}
