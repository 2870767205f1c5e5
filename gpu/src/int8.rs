//! Linear layers of the int8 mode: weights of 4 or 8 bits, activations of 8, exact integer products within a block.
//!
//! A row's result must not depend on the rows beside it, on threads, or on the instructions of the processor. Products
//! within a block of 32 are integers, so their order is free; across blocks every kernel runs one chain of fused
//! multiply-adds per output, from the first block to the last. The tests check the bits.

use crate::isa::Isa;
use crate::linear::Matrix;
use crate::team::Team;
use crate::weights::Row;
use packed::Packed;
use rows::{Rows, TILE_ROWS, Tile};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod packed;
mod portable;
pub mod rows;
#[cfg(test)]
mod tests;

/// Numbers that share a scale.
pub const BLOCK: usize = 32;
/// Outputs whose weights are interleaved: one vector of AVX-512.
const GROUP: usize = 16;
/// Groups that a thread takes at once, at most: a few microseconds of one row.
const GROUPS_AT_ONCE: usize = 16;
/// Parts for each thread that even out what else a processor does.
const PARTS_PER_THREAD: usize = 6;

/// Sums of a group for the rows of a tile.
type Sums = [[f32; GROUP]; TILE_ROWS];

/// The weights of a linear layer.
///
/// # Shape
/// Sections of outputs, one after the other, each of one format.
pub struct Linear {
    inputs: usize,
    outputs: usize,
    /// Each with its first output.
    sections: Vec<(usize, Packed)>,
}

impl Linear {
    /// Packs the weights of each output.
    pub fn new(inputs: usize, rows: &[Row<'_>]) -> Self {
        assert!(inputs > 0 && !rows.is_empty(), "a layer of {inputs} x {}", rows.len());
        let mut first = 0;
        let sections = rows.chunk_by(|(a, _), (b, _)| a == b).map(|alike| {
            first += alike.len();
            (first - alike.len(), Packed::new(inputs, alike))
        });
        Self { inputs, outputs: rows.len(), sections: sections.collect() }
    }

    /// Copies the weights of one output.
    pub fn copy_row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs && out.len() == self.inputs, "output {output} of {}", self.outputs);
        let (first, section) =
            self.sections.iter().rfind(|(first, _)| *first <= output).expect("the first begins at 0");
        section.copy_row(output - first, out);
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.sections.iter().map(|(_, packed)| packed.bytes()).sum()
    }

    /// `out = x * weights`, for all rows of `x`.
    pub fn apply(&self, team: &mut Team, isa: Isa, x: &Rows, out: &mut Matrix) {
        assert_eq!(x.inputs(), self.inputs, "inputs");
        out.resize(x.rows(), self.outputs);
        if x.rows() == 0 {
            return;
        }
        let groups: usize = self.sections.iter().map(|(_, packed)| packed.groups()).sum();
        let at_once = groups.div_ceil(team.threads() * PARTS_PER_THREAD).clamp(1, GROUPS_AT_ONCE);
        let stride = out.stride();
        let out = out.split();
        team.run_rows(groups, at_once, |range| {
            for (row, tile) in (0..).step_by(TILE_ROWS).zip(x.tiles()) {
                let (mut first_group, mut sums) = (0, [[0.0; GROUP]; TILE_ROWS]);
                for (first, packed) in &self.sections {
                    let here = range.start.max(first_group)..range.end.min(first_group + packed.groups());
                    for group in here.map(|group| group - first_group) {
                        packed.products(isa, group, &tile, &mut sums);
                        let columns = packed.columns(group);
                        for (r, sums) in sums[..tile.rows].iter().enumerate() {
                            let at = (row + r) * stride + first + group * GROUP;
                            // SAFETY: only this part writes these columns.
                            let out = unsafe { out.part(at..at + columns) };
                            match out.as_mut_array() {
                                Some(all) => *all = *sums,
                                None => out.copy_from_slice(&sums[..columns]),
                            }
                        }
                    }
                    first_group += packed.groups();
                }
            }
        });
    }
}

/// Sums of products of one group's weights with the rows of a tile, without the weights' gains.
fn products(isa: Isa, weights: packed::Group<'_>, tile: &Tile<'_>, sums: &mut Sums) {
    assert!(isa.is_available() && tile.rows <= TILE_ROWS && weights.blocks() == tile.blocks, "{isa:?}");
    let mut at = 0;
    while at < tile.rows {
        // SAFETY: `at` is below the tile's rows.
        let rest = unsafe { tile.skip(at) };
        // SAFETY: the processor has the instructions, and weights and rows are of one number of blocks.
        at += unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::products(weights, rest, &mut sums[at..]),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::products(weights, rest, &mut sums[at..]),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni => avx2::vnni::products(weights, rest, &mut sums[at..]),
                _ => portable::products(weights, rest, &mut sums[at..]),
            }
        };
    }
}
