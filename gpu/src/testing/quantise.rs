//! Converts weights to the formats of files.

use crate::dequant::TensorType;
use half::{bf16, f16};

/// Converts weights to a format, rounding to nearest within each block.
pub fn quantise(kind: TensorType, weights: &[f32]) -> Vec<u8> {
    assert_eq!(weights.len() % kind.block_weights(), 0, "whole blocks of {kind}");
    let mut out = Vec::new();
    for block in weights.chunks_exact(kind.block_weights()) {
        let low = block.iter().copied().fold(f32::INFINITY, f32::min);
        let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let peak = low.abs().max(high.abs());
        // Quants are computed with the scale as the file will hold it.
        let mut put_half = |number: f32| {
            let number = f16::from_f32(number);
            out.extend(number.to_le_bytes());
            number.to_f32()
        };
        match kind {
            TensorType::F32 => out.extend(block[0].to_le_bytes()),
            TensorType::F16 => out.extend(f16::from_f32(block[0]).to_le_bytes()),
            TensorType::Bf16 => out.extend(bf16::from_f32(block[0]).to_le_bytes()),
            TensorType::Q8_0 => {
                let scale = put_half(peak / 127.0);
                out.extend(block.iter().map(|w| level(w / scale, -127.0, 127.0) as i8 as u8));
            }
            TensorType::Q4_0 => {
                let scale = put_half(peak / 7.0);
                let quants: Vec<u8> = block.iter().map(|w| level(w / scale + 8.0, 0.0, 15.0) as u8).collect();
                out.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
            }
            TensorType::Q4_1 => {
                let scale = put_half((high - low) / 15.0);
                let min = put_half(low);
                let quants: Vec<u8> = block.iter().map(|w| level((w - min) / scale, 0.0, 15.0) as u8).collect();
                out.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
            }
            TensorType::Q5_0 => {
                let scale = put_half(peak / 15.0);
                let quants: Vec<u8> = block.iter().map(|w| level(w / scale + 16.0, 0.0, 31.0) as u8).collect();
                let fifth = quants.iter().enumerate().fold(0_u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
                out.extend(fifth.to_le_bytes());
                out.extend((0..16).map(|i| quants[i] & 15 | (quants[i + 16] & 15) << 4));
            }
        }
    }
    out
}

fn level(quant: f32, low: f32, high: f32) -> i32 {
    if quant.is_nan() { 0 } else { quant.round().clamp(low, high) as i32 }
}
