//! Weights as the kernels read them: two layouts, for four bits with a minimum and for eight bits.

use super::{BLOCK, GROUP, Sums};
use crate::dequant::{TensorType, dequantise, group_of_four_bits};
use crate::int8::rows::Tile;
use crate::isa::Isa;
use crate::weights::Row;
use half::f16;

/// Bytes of the weights of a group's block, without scales.
const NIBBLE_QUANTS: usize = GROUP * BLOCK / 2;
pub(super) const BYTE_QUANTS: usize = GROUP * BLOCK;
/// Bytes of a group's scales of one block, or its minimums.
pub(super) const HALVES: usize = GROUP * 2;
/// Bytes of a group's block of four bits: quants, scales, minimums. Whole cache lines.
pub(super) const NIBBLE_BLOCK: usize = NIBBLE_QUANTS + 2 * HALVES;
/// The largest scale of a row of weights that has a gain is below this power of two.
const SCALE_EXPONENT: i32 = 14;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// `weight = scale * quant + minimum`, quants of 0 to 15.
    ///
    /// # Shape
    /// Block by block: 256 bytes of quants, 16 scales, 16 minimums. The 4 bytes at `64 j + 4 r` have for the group's row
    /// `r` the quants `4 j` to `4 j + 3` in their low and `16 + 4 j` to `16 + 4 j + 3` in their high halves.
    Nibbles,
    /// `weight = scale * (quant - 128)`.
    ///
    /// # Shape
    /// All blocks' quants, 512 bytes each, then all blocks' 16 scales. The 4 bytes at `64 j + 4 r` are the quants `4 j` to
    /// `4 j + 3` of the group's row `r`.
    Bytes,
}

/// Weights of one layout, in groups of 16 outputs; missing outputs of the last group have zeros.
pub struct Packed {
    layout: Layout,
    outputs: usize,
    blocks: usize,
    lines: Vec<Line>,
    /// What each output's sum is multiplied with, a power of two. Scales are f16: those that a file has are taken as they
    /// are, others are brought into range by this. Empty where all are 1.
    gains: Vec<f32>,
}

/// One group, for kernels.
#[derive(Clone, Copy)]
pub enum Group<'a> {
    /// Whole blocks of `NIBBLE_BLOCK`.
    Nibbles(&'a [u8]),
    /// The quants and the scales.
    Bytes(&'a [u8], &'a [u8]),
}

impl Group<'_> {
    pub fn blocks(&self) -> usize {
        match self {
            Self::Nibbles(bytes) => bytes.len() / NIBBLE_BLOCK,
            Self::Bytes(quants, _) => quants.len() / BYTE_QUANTS,
        }
    }
}

/// One block of one row.
#[derive(Clone, Copy)]
struct Block {
    /// Of 0 to 15, or with 128 added.
    quants: [u8; BLOCK],
    scale: f32,
    minimum: f32,
}

impl Packed {
    /// Packs rows of one format.
    pub fn new(inputs: usize, rows: &[Row<'_>]) -> Self {
        let kind = rows[0].0;
        let (layout, blocks) = (layout(kind), inputs.div_ceil(BLOCK));
        let lines = match layout {
            Layout::Nibbles => blocks * NIBBLE_BLOCK / 64,
            Layout::Bytes => (blocks * (BYTE_QUANTS + HALVES)).div_ceil(64),
        };
        let groups = rows.len().div_ceil(GROUP);
        let lines = vec![Line([0; 64]); groups * lines];
        let mut packed = Self { layout, outputs: rows.len(), blocks, lines, gains: Vec::new() };
        let mut numbers = vec![0.0; blocks * BLOCK];
        let mut row_blocks = Vec::with_capacity(blocks);
        for (output, (_, row)) in rows.iter().enumerate() {
            row_blocks.clear();
            let gain = read_row(kind, row, &mut numbers[..inputs], &mut row_blocks);
            if gain != 1.0 {
                packed.gains.resize(groups * GROUP, 1.0);
                packed.gains[output] = gain;
            }
            row_blocks.iter().enumerate().for_each(|(index, block)| packed.put(output, index, block));
        }
        packed
    }

    pub fn groups(&self) -> usize {
        self.outputs.div_ceil(GROUP)
    }

    /// Outputs of a group.
    pub fn columns(&self, group: usize) -> usize {
        GROUP.min(self.outputs - group * GROUP)
    }

    pub fn bytes(&self) -> usize {
        self.lines.len() * 64 + self.gains.len() * 4
    }

    /// Products of a group's weights with the rows of a tile.
    #[inline]
    pub fn products(&self, isa: Isa, group: usize, tile: &Tile<'_>, sums: &mut Sums) {
        super::products(isa, self.group(group), tile, sums);
        if !self.gains.is_empty() {
            let gains = &self.gains[group * GROUP..][..GROUP];
            for sums in &mut sums[..tile.rows] {
                sums.iter_mut().zip(gains).for_each(|(sum, gain)| *sum *= gain);
            }
        }
    }

    fn group(&self, group: usize) -> Group<'_> {
        let size = self.lines.len() / self.groups();
        let bytes = bytes_of(&self.lines[group * size..][..size]);
        match self.layout {
            Layout::Nibbles => Group::Nibbles(bytes),
            Layout::Bytes => {
                let (quants, scales) = bytes.split_at(self.blocks * BYTE_QUANTS);
                Group::Bytes(quants, scales)
            }
        }
    }

    fn group_mut(&mut self, group: usize) -> &mut [u8] {
        let size = self.lines.len() / self.groups();
        let lines = &mut self.lines[group * size..][..size];
        // SAFETY: lines are bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 64) }
    }

    fn put(&mut self, output: usize, index: usize, block: &Block) {
        let (layout, blocks, row) = (self.layout, self.blocks, output % GROUP);
        let bytes = self.group_mut(output / GROUP);
        let mut put_half = |at: usize, number: f32| {
            bytes[at + 2 * row..][..2].copy_from_slice(&f16::from_f32(number).to_le_bytes());
        };
        let quants = match layout {
            Layout::Nibbles => {
                let at = index * NIBBLE_BLOCK;
                put_half(at + NIBBLE_QUANTS, block.scale);
                put_half(at + NIBBLE_QUANTS + HALVES, block.minimum);
                let (low, high) = block.quants.split_at(BLOCK / 2);
                let mut both = [0; BLOCK];
                both.iter_mut().zip(low.iter().zip(high)).for_each(|(both, (low, high))| *both = low | high << 4);
                let bytes = &mut bytes[at..][..NIBBLE_QUANTS];
                return put_quads(bytes, row, &both[..BLOCK / 2]);
            }
            Layout::Bytes => {
                put_half(blocks * BYTE_QUANTS + index * HALVES, block.scale);
                &mut bytes[index * BYTE_QUANTS..][..BYTE_QUANTS]
            }
        };
        put_quads(quants, row, &block.quants);
    }

    /// Dequantises the weights of one output.
    pub fn copy_row(&self, output: usize, out: &mut [f32]) {
        let row = output % GROUP;
        let gain = self.gains.get(output).copied().unwrap_or(1.0);
        let half = |bytes: &[u8]| f16::from_le_bytes([bytes[2 * row], bytes[2 * row + 1]]).to_f32();
        for (index, out) in out.chunks_mut(BLOCK).enumerate() {
            match self.group(output / GROUP) {
                Group::Nibbles(bytes) => {
                    let (quants, halves) = bytes[index * NIBBLE_BLOCK..][..NIBBLE_BLOCK].split_at(NIBBLE_QUANTS);
                    let (scale, minimum) = (half(halves), half(&halves[HALVES..]));
                    for (k, out) in out.iter_mut().enumerate() {
                        let both = quants[k % 16 / 4 * 64 + row * 4 + k % 4];
                        let quant = if k < 16 { both & 15 } else { both >> 4 };
                        *out = (f32::from(quant) * scale + minimum) * gain;
                    }
                }
                Group::Bytes(quants, scales) => {
                    let scale = half(&scales[index * HALVES..]);
                    let quants = &quants[index * BYTE_QUANTS..][..BYTE_QUANTS];
                    for (k, out) in out.iter_mut().enumerate() {
                        let quant = i16::from(quants[k / 4 * 64 + row * 4 + k % 4]) - 128;
                        *out = f32::from(quant) * scale * gain;
                    }
                }
            }
        }
    }
}

fn bytes_of(lines: &[Line]) -> &[u8] {
    // SAFETY: lines are bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * 64) }
}

/// Puts a row's quants in their places, four at a time.
fn put_quads(bytes: &mut [u8], row: usize, quants: &[u8]) {
    for (line, quad) in bytes.chunks_exact_mut(64).zip(quants.chunks_exact(4)) {
        line[row * 4..][..4].copy_from_slice(quad);
    }
}

fn layout(kind: TensorType) -> Layout {
    match kind {
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K => Layout::Nibbles,
        TensorType::Q5_0 | TensorType::Q8_0 => Layout::Bytes,
        // Scales of 16 weights, or none at all: rounded to eight bits.
        TensorType::Q6K | TensorType::F32 | TensorType::F16 | TensorType::Bf16 => Layout::Bytes,
    }
}

/// Appends a row's blocks and returns its gain; `numbers` is memory for the row.
fn read_row(kind: TensorType, row: &[u8], numbers: &mut [f32], out: &mut Vec<Block>) -> f32 {
    let half = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let blocks = row.chunks_exact(kind.block_bytes());
    match kind {
        TensorType::Q4_0 => out.extend(blocks.map(|block| {
            let scale = half(block, 0);
            Block { quants: nibbles(&block[2..]), scale, minimum: -8.0 * scale }
        })),
        TensorType::Q4_1 => out.extend(blocks.map(|block| Block {
            quants: nibbles(&block[4..]),
            scale: half(block, 0),
            minimum: half(block, 2),
        })),
        TensorType::Q8_0 => out.extend(blocks.map(|block| {
            let quants = std::array::from_fn(|i| block[2 + i] ^ 0x80);
            Block { quants, scale: half(block, 0), minimum: 0.0 }
        })),
        TensorType::Q5_0 => out.extend(blocks.map(|block| {
            let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
            let low = nibbles(&block[6..]);
            let quants = std::array::from_fn(|i| low[i] + 16 * (fifth >> i & 1) as u8 + (128 - 16));
            Block { quants, scale: half(block, 0), minimum: 0.0 }
        })),
        TensorType::Q4K => {
            out.extend(
                blocks
                    .flat_map(|block| (0..8).map(|group| group_of_four_bits(block, group)))
                    .map(|(quants, scale, subtracted)| Block { quants, scale, minimum: -subtracted }),
            );
            // Scales are products of a half and six bits: rounded to a half by a part in 2048, a fraction of a step.
            let largest = out.iter().map(|block| block.scale.abs().max(block.minimum.abs()));
            let gain = gain(largest.filter(|largest| largest.is_finite()).fold(0.0, f32::max));
            for block in out {
                block.scale /= gain;
                block.minimum /= gain;
            }
            return gain;
        }
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 | TensorType::Q6K => {
            dequantise(kind, row, numbers);
            return requantise(numbers, out);
        }
    }
    1.0
}

/// Low halves are the first half of the block, high halves the second.
fn nibbles(quants: &[u8]) -> [u8; BLOCK] {
    std::array::from_fn(|i| if i < 16 { quants[i] & 15 } else { quants[i - 16] >> 4 })
}

/// A power of two that, as divisor, brings a row's largest scale near the top of f16.
fn gain(largest: f32) -> f32 {
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    2.0_f32.powi((exponent - SCALE_EXPONENT + 1).clamp(-100, 120))
}

/// Rounds numbers to eight bits, block by block. A block with a number that is not finite has the scale NaN.
fn requantise(numbers: &[f32], out: &mut Vec<Block>) -> f32 {
    let peaks = numbers.chunks(BLOCK).map(|block| block.iter().fold(0.0, |peak: f32, w| peak.max(w.abs())));
    let gain = gain(peaks.filter(|peak| peak.is_finite()).fold(0.0, f32::max) / 127.0);
    for block in numbers.chunks(BLOCK) {
        let peak = block.iter().fold(0.0, |peak: f32, w| if w.is_finite() { peak.max(w.abs()) } else { f32::INFINITY });
        // Quants are computed with the scale as the kernels will have it.
        let scale = f16::from_f32(peak / 127.0 / gain).to_f32();
        let step = scale * gain;
        let mut quants = [128; BLOCK];
        if scale.is_finite() && step > 0.0 {
            for (quant, w) in quants.iter_mut().zip(block) {
                *quant = ((w / step).round_ties_even().clamp(-127.0, 127.0) as i32 + 128) as u8;
            }
        }
        out.push(Block { quants, scale: if scale.is_finite() { scale } else { f32::NAN }, minimum: 0.0 });
    }
    gain
}
