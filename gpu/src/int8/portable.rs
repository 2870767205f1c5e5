//! The kernels in plain Rust: what the others are compared with, and what other processors run.

use super::packed::{BYTE_QUANTS, Group, HALVES, NIBBLE_BLOCK};
use super::rows::Tile;
use super::{BLOCK, GROUP};
use half::f16;

/// Sums of the tile's first row; says how many rows it took.
///
/// # Safety
/// The tile has a row, and as many blocks as the group.
pub unsafe fn products(weights: Group<'_>, tile: Tile<'_>, sums: &mut [[f32; GROUP]]) -> usize {
    let sums = &mut sums[0];
    *sums = [0.0; GROUP];
    for block in 0..tile.blocks {
        let at = block * tile.stride;
        // SAFETY: within the tile.
        let (quants, scale, sum, correction) =
            unsafe { (*tile.quants.add(at), *tile.scales.add(at), *tile.sums.add(at), *tile.corrections.add(at)) };
        for (row, out) in sums.iter_mut().enumerate() {
            let half = |bytes: &[u8]| f16::from_le_bytes([bytes[2 * row], bytes[2 * row + 1]]).to_f32();
            match weights {
                Group::Nibbles(bytes) => {
                    let bytes = &bytes[block * NIBBLE_BLOCK..][..NIBBLE_BLOCK];
                    let (bytes, halves) = bytes.split_at(NIBBLE_BLOCK - 2 * HALVES);
                    let product = |k: usize| {
                        let both = i32::from(bytes[k / 4 * 64 + row * 4 + k % 4]);
                        (both & 15) * i32::from(quants[k]) + (both >> 4) * i32::from(quants[16 + k])
                    };
                    let products: i32 = (0..BLOCK / 2).map(product).sum();
                    *out = (products as f32).mul_add(half(halves) * scale, *out);
                    *out = half(&halves[HALVES..]).mul_add(sum, *out);
                }
                Group::Bytes(bytes, halves) => {
                    let bytes = &bytes[block * BYTE_QUANTS..][..BYTE_QUANTS];
                    let product = |k: usize| i32::from(bytes[k / 4 * 64 + row * 4 + k % 4]) * i32::from(quants[k]);
                    let products = correction + (0..BLOCK).map(product).sum::<i32>();
                    *out = (products as f32).mul_add(half(&halves[block * HALVES..]) * scale, *out);
                }
            }
        }
    }
    1
}
