//! Number formats of weights, and their conversion to f32.
//!
//! # Source
//! The block formats of the ggml project. A quantised block holds 32 weights of one row, or 256 in eight or sixteen groups.

use half::{bf16, f16};
use std::fmt;

#[cfg(test)]
mod tests;

/// Weights in a quantised block.
const BLOCK: usize = 32;
/// Weights in a block of the formats with K.
const SUPERBLOCK: usize = 256;

/// A number format that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q8_0,
    Q4K,
    Q6K,
}

impl TensorType {
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q8_0, Self::Q4K, Self::Q6K];

    /// The number that stands for the format in a file.
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// # Errors
    /// A format that cannot be read: its name where it has one, and its number.
    pub fn from_id(id: u32) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|kind| kind.id() == id);
        known.ok_or_else(|| match foreign_name(id) {
            Some(name) => format!("{name} ({id})"),
            None => format!("number {id}"),
        })
    }

    /// Weights in a block.
    pub fn block_weights(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => BLOCK,
            Self::Q4K | Self::Q6K => SUPERBLOCK,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 2 + 2 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4K => 2 + 2 + 12 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        })
    }
}

/// Formats of ggml that are not read here, so that a refusal can name them.
fn foreign_name(id: u32) -> Option<&'static str> {
    Some(match id {
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        13 => "Q5_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        _ => return None,
    })
}

/// Converts whole blocks.
///
/// # Shape
/// `bytes` holds `n` blocks of `kind` and `out` takes their `n * kind.block_weights()` weights; anything else is a
/// programmer's error and panics.
pub fn dequantise(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.len() / kind.block_bytes();
    assert_eq!(bytes.len() % kind.block_bytes(), 0, "whole blocks of {kind}");
    assert_eq!(out.len(), blocks * kind.block_weights(), "room for {blocks} blocks of {kind}");
    let bytes = bytes.chunks_exact(kind.block_bytes());
    let out = out.chunks_exact_mut(kind.block_weights());
    for (block, out) in bytes.zip(out) {
        match kind {
            TensorType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            TensorType::F16 => out[0] = half_at(block, 0),
            TensorType::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            TensorType::Q4_0 => {
                let scale = half_at(block, 0);
                nibbles(&block[2..], out, |q| (f32::from(q) - 8.0) * scale);
            }
            TensorType::Q4_1 => {
                let (scale, min) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], out, |q| f32::from(q) * scale + min);
            }
            TensorType::Q5_0 => five_bits(block, out),
            TensorType::Q8_0 => {
                let scale = half_at(block, 0);
                for (out, &q) in out.iter_mut().zip(&block[2..]) {
                    *out = f32::from(q as i8) * scale;
                }
            }
            TensorType::Q4K => four_bits_of_groups(block, out),
            TensorType::Q6K => six_bits_of_groups(block, out),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are the first half of the block, high nibbles the second.
fn nibbles(quants: &[u8], out: &mut [f32], weight: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for (i, &q) in quants.iter().enumerate() {
        low[i] = weight(q & 0x0f);
        high[i] = weight(q >> 4);
    }
}

/// Nibbles as in Q4_0, with a fifth bit for each weight in a 32-bit word before them.
fn five_bits(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, f32::from);
    for (i, out) in out.iter_mut().enumerate() {
        let high = if fifth >> i & 1 == 1 { 16.0 } else { 0.0 };
        *out = (*out + high - 16.0) * scale;
    }
}

/// Eight groups of 32 nibbles, each with a scale and a minimum of six bits, in units of the block's two.
///
/// # Shape
/// Two halves, twelve bytes of scales and minima, 128 bytes of nibbles: 32 bytes hold two groups, low nibbles first.
fn four_bits_of_groups(block: &[u8], out: &mut [f32]) {
    for (group, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let (quants, scale, min) = group_of_four_bits(block, group);
        for (out, quant) in out.iter_mut().zip(quants) {
            *out = scale * f32::from(quant) - min;
        }
    }
}

/// The quants of one group of a block of Q4_K, their scale, and what is subtracted.
pub(crate) fn group_of_four_bits(block: &[u8], group: usize) -> ([u8; BLOCK], f32, f32) {
    let (unit, min_unit) = (half_at(block, 0), half_at(block, 2));
    let (sixes, quants) = block[4..].split_at(12);
    // The first four groups have whole bytes but for their highest two bits; these belong to the last four.
    let (scale, min) = match group {
        0..4 => (sixes[group] & 63, sixes[group + 4] & 63),
        _ => {
            let nibbles = sixes[group + 4];
            (nibbles & 15 | sixes[group - 4] >> 6 << 4, nibbles >> 4 | sixes[group] >> 6 << 4)
        }
    };
    let quants = &quants[group / 2 * BLOCK..][..BLOCK];
    let quants = std::array::from_fn(|i| quants[i] >> (4 * (group % 2)) & 15);
    (quants, unit * f32::from(scale), min_unit * f32::from(min))
}

/// Sixteen groups of 16 weights of six bits around 32, each with a signed scale, in units of the block's.
///
/// # Shape
/// 128 bytes of low nibbles, 64 bytes with the upper two bits of four weights each, 16 scales, a half. Each half of the
/// weights has half of each: 32 weights in low nibbles of its first 32 bytes, 32 in those of the next, then as many in
/// the high ones.
fn six_bits_of_groups(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let unit = half_at(rest, 16);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (part / 4, part % 4);
        let low = &low[64 * half + 32 * (quarter % 2)..][..32];
        let high = &high[32 * half..][..32];
        for (i, out) in out.iter_mut().enumerate() {
            let quant = low[i] >> (4 * (quarter / 2)) & 15 | (high[i] >> (2 * quarter) & 3) << 4;
            let scale = rest[2 * part + i / 16] as i8;
            *out = unit * f32::from(scale) * (f32::from(quant) - 32.0);
        }
    }
}
