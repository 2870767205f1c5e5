//! Activations as bytes: quantised once for all layers that read them, by whichever thread made the row.

use super::BLOCK;
use crate::kernels::for_wide_vectors;
use std::marker::PhantomData;

/// Rows that lie together, the most that a kernel takes at once.
pub const TILE_ROWS: usize = 16;
/// What is added to an unsigned weight's products: the kernels store a weight `w` as `w + 128`.
const OFFSET: i32 = 128;
/// Numbers below this in magnitude count as zero: their reciprocal would not be finite.
const TINY: f32 = 1e-30;
/// The bit of a number's sign.
const SIGN: u32 = 1 << 31;
/// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Quantised rows.
///
/// # Shape
/// Blocks of 32 numbers of one row; rows end with zeros to a whole block. Rows lie in tiles of `TILE_ROWS` (the last one
/// as many as there are), and a tile has the first block of each of its rows, then the second of each, and so on: what a
/// kernel reads is one stream. `x ~ scale * quant`, block by block.
#[derive(Default)]
pub struct Rows {
    rows: usize,
    inputs: usize,
    blocks: usize,
    quants: Vec<[i8; BLOCK]>,
    scales: Vec<f32>,
    /// Scale times the sum of the quants: what the minimum of a weight block is multiplied with.
    sums: Vec<f32>,
    /// What the offset of unsigned weights adds to their sum of products, to be taken away.
    corrections: Vec<i32>,
}

/// The blocks of one tile, for kernels.
///
/// Block `b` of the tile's row `r` is at `b * stride + r` behind each address.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    pub rows: usize,
    pub stride: usize,
    pub blocks: usize,
    pub quants: *const [i8; BLOCK],
    pub scales: *const f32,
    pub sums: *const f32,
    pub corrections: *const i32,
    memory: PhantomData<&'a Rows>,
}

impl Tile<'_> {
    /// The tile without its first rows.
    ///
    /// # Safety
    /// The tile has more rows than `rows`.
    pub unsafe fn skip(self, rows: usize) -> Self {
        // SAFETY: within the tile's first block of each row.
        unsafe {
            Self {
                rows: self.rows - rows,
                quants: self.quants.add(rows),
                scales: self.scales.add(rows),
                sums: self.sums.add(rows),
                corrections: self.corrections.add(rows),
                ..self
            }
        }
    }
}

impl Rows {
    /// Gives it another shape and keeps the memory; what it holds then is unspecified, but for being initialised.
    pub fn resize(&mut self, rows: usize, inputs: usize) {
        (self.rows, self.inputs, self.blocks) = (rows, inputs, inputs.div_ceil(BLOCK));
        let needed = rows * self.blocks;
        if self.scales.len() < needed {
            self.quants.resize(needed, [0; BLOCK]);
            self.scales.resize(needed, 0.0);
            self.sums.resize(needed, 0.0);
            self.corrections.resize(needed, 0);
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// All tiles, in the order of the rows.
    pub fn tiles(&self) -> impl Iterator<Item = Tile<'_>> {
        (0..self.rows).step_by(TILE_ROWS).map(|row| {
            let at = row * self.blocks;
            Tile {
                rows: TILE_ROWS.min(self.rows - row),
                stride: TILE_ROWS.min(self.rows - row),
                blocks: self.blocks,
                quants: self.quants[at..].as_ptr(),
                scales: self.scales[at..].as_ptr(),
                sums: self.sums[at..].as_ptr(),
                corrections: self.corrections[at..].as_ptr(),
                memory: PhantomData,
            }
        })
    }

    /// For parts that write different rows.
    pub fn writer(&mut self) -> Writer<'_> {
        Writer {
            rows: self.rows,
            inputs: self.inputs,
            blocks: self.blocks,
            quants: self.quants.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            corrections: self.corrections.as_mut_ptr(),
            memory: PhantomData,
        }
    }
}

/// Writes rows from several threads.
pub struct Writer<'a> {
    rows: usize,
    inputs: usize,
    blocks: usize,
    quants: *mut [i8; BLOCK],
    scales: *mut f32,
    sums: *mut f32,
    corrections: *mut i32,
    memory: PhantomData<&'a mut Rows>,
}

// SAFETY: by the contract of `put`, no two threads write the same row.
unsafe impl Sync for Writer<'_> {}

impl Writer<'_> {
    /// Quantises one row.
    ///
    /// # Safety
    /// Nobody else writes this row meanwhile.
    pub unsafe fn put(&self, row: usize, x: &[f32]) {
        assert!(row < self.rows && x.len() == self.inputs, "row {row} of {} with {} numbers", self.rows, x.len());
        quantise_row(self, row, x);
    }
}

for_wide_vectors! {
    fn quantise_row(to: &Writer<'_>, row: usize, x: &[f32]) = quantise_row_body;
}

#[inline(always)]
fn quantise_row_body(to: &Writer<'_>, row: usize, x: &[f32]) {
    let tile = row / TILE_ROWS * TILE_ROWS;
    let stride = TILE_ROWS.min(to.rows - tile);
    let mut at = tile * to.blocks + row - tile;
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    for block in blocks {
        put_block(to, at, block);
        at += stride;
    }
    if !rest.is_empty() {
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        put_block(to, at, &last);
    }
}

#[inline(always)]
fn put_block(to: &Writer<'_>, at: usize, block: &[f32; BLOCK]) {
    let (quants, scale, sum) = quantise(block);
    // SAFETY: the block is of this row, and `resize` made room for `rows * blocks` of them.
    unsafe {
        *to.quants.add(at) = quants;
        *to.scales.add(at) = scale;
        *to.sums.add(at) = scale * sum as f32;
        *to.corrections.add(at) = -OFFSET * sum;
    }
}

/// Quants from -127 to 127, their scale and their sum. A block with a number that is not finite has the scale NaN, so
/// that everything computed from it is NaN.
#[inline(always)]
fn quantise(x: &[f32; BLOCK]) -> ([i8; BLOCK], f32, i32) {
    // Sizes of numbers are in the order of their bits, and infinities and NaN have the highest.
    let mut peak = 0;
    for x in x {
        peak = peak.max(x.to_bits() & !SIGN);
    }
    let peak = f32::from_bits(peak);
    if !peak.is_finite() {
        return ([0; BLOCK], f32::NAN, 0);
    }
    if peak < TINY {
        return ([0; BLOCK], 0.0, 0);
    }
    let factor = 127.0 / peak;
    // Loops over arrays, so that they become vectors.
    let (mut rounded, mut quants, mut sum) = ([0; BLOCK], [0; BLOCK], 0);
    for i in 0..BLOCK {
        rounded[i] = (x[i] * factor + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
    }
    for i in 0..BLOCK {
        quants[i] = rounded[i] as i8;
    }
    for rounded in rounded {
        sum += rounded;
    }
    (quants, peak / 127.0, sum)
}

#[cfg(test)]
impl Rows {
    /// Quantises rows of one length.
    pub fn of(x: &[Vec<f32>]) -> Self {
        let mut rows = Self::default();
        rows.resize(x.len(), x[0].len());
        let writer = rows.writer();
        for (row, x) in x.iter().enumerate() {
            // SAFETY: one row after the other.
            unsafe { writer.put(row, x) };
        }
        rows
    }

    /// One block: its quants and their scale.
    pub fn block(&self, row: usize, block: usize) -> ([i8; BLOCK], f32) {
        let tile = self.tiles().nth(row / TILE_ROWS).unwrap();
        let at = block * tile.stride + row % TILE_ROWS;
        // SAFETY: within the tile.
        unsafe { (*tile.quants.add(at), *tile.scales.add(at)) }
    }
}
