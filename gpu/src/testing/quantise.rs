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
        match kind {
            TensorType::F32 => out.extend(block[0].to_le_bytes()),
            TensorType::F16 => out.extend(f16::from_f32(block[0]).to_le_bytes()),
            TensorType::Bf16 => out.extend(bf16::from_f32(block[0]).to_le_bytes()),
            TensorType::Q8_0 => {
                let scale = put_half(&mut out, peak / 127.0);
                out.extend(block.iter().map(|w| level(w / scale, -127.0, 127.0) as i8 as u8));
            }
            TensorType::Q4_0 => {
                let scale = put_half(&mut out, peak / 7.0);
                let quants: Vec<u8> = block.iter().map(|w| level(w / scale + 8.0, 0.0, 15.0) as u8).collect();
                out.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
            }
            TensorType::Q4_1 => {
                let scale = put_half(&mut out, (high - low) / 15.0);
                let min = put_half(&mut out, low);
                let quants: Vec<u8> = block.iter().map(|w| level((w - min) / scale, 0.0, 15.0) as u8).collect();
                out.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
            }
            TensorType::Q5_0 => {
                let scale = put_half(&mut out, peak / 15.0);
                let quants: Vec<u8> = block.iter().map(|w| level(w / scale + 16.0, 0.0, 31.0) as u8).collect();
                let fifth = quants.iter().enumerate().fold(0_u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
                out.extend(fifth.to_le_bytes());
                out.extend((0..16).map(|i| quants[i] & 15 | (quants[i + 16] & 15) << 4));
            }
            TensorType::Q4K => put_four_bits_of_groups(block, &mut out),
            TensorType::Q6K => put_six_bits_of_groups(block, &mut out),
        }
    }
    out
}

fn level(quant: f32, low: f32, high: f32) -> i32 {
    if quant.is_nan() { 0 } else { quant.round().clamp(low, high) as i32 }
}

/// Quants are computed with the scale as the file holds it.
fn put_half(out: &mut Vec<u8>, number: f32) -> f32 {
    let number = f16::from_f32(number);
    out.extend(number.to_le_bytes());
    number.to_f32()
}

/// The highest of some numbers that are not negative.
fn highest(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.fold(0.0, f32::max)
}

fn put_four_bits_of_groups(block: &[f32], out: &mut Vec<u8>) {
    let ranges: Vec<_> = block
        .chunks_exact(32)
        .map(|group| (highest(group.iter().map(|w| -w)), highest(group.iter().copied())))
        .map(|(min, high)| ((high + min) / 15.0, min))
        .collect();
    let unit = put_half(out, highest(ranges.iter().map(|(scale, _)| *scale)) / 63.0);
    let min_unit = put_half(out, highest(ranges.iter().map(|(_, min)| *min)) / 63.0);
    let sixes: Vec<(u8, u8)> = ranges
        .iter()
        .map(|(scale, min)| (level(scale / unit, 0.0, 63.0) as u8, level(min / min_unit, 0.0, 63.0) as u8))
        .collect();
    out.extend((0..4).map(|i| sixes[i].0 | sixes[i + 4].0 >> 4 << 6));
    out.extend((0..4).map(|i| sixes[i].1 | sixes[i + 4].1 >> 4 << 6));
    out.extend((4..8).map(|i| sixes[i].0 & 15 | sixes[i].1 << 4));
    let groups = block.chunks_exact(32).zip(&sixes).map(|(group, (scale, min))| {
        let (scale, min) = (unit * f32::from(*scale), min_unit * f32::from(*min));
        group.iter().map(|w| level((w + min) / scale, 0.0, 15.0) as u8).collect::<Vec<_>>()
    });
    for pair in groups.collect::<Vec<_>>().chunks_exact(2) {
        out.extend((0..32).map(|i| pair[0][i] | pair[1][i] << 4));
    }
}

fn put_six_bits_of_groups(block: &[f32], out: &mut Vec<u8>) {
    let peaks: Vec<f32> = block.chunks_exact(16).map(|group| highest(group.iter().map(|w| w.abs()))).collect();
    let unit = f16::from_f32(highest(peaks.iter().copied()) / 31.0 / 127.0);
    let scales: Vec<i8> = peaks.iter().map(|peak| level(peak / 31.0 / unit.to_f32(), 0.0, 127.0) as i8).collect();
    let quant = |i: usize| {
        let scale = unit.to_f32() * f32::from(scales[i / 16]);
        level(block[i] / scale + 32.0, 0.0, 63.0) as u8
    };
    for half in [0, 128] {
        out.extend((half..half + 64).map(|i| quant(i) & 15 | (quant(i + 64) & 15) << 4));
    }
    for half in [0, 128] {
        let upper = |i: usize| (0..4).fold(0, |bits, quarter| bits | quant(i + 32 * quarter) >> 4 << (2 * quarter));
        out.extend((half..half + 32).map(upper));
    }
    out.extend(scales.iter().map(|&scale| scale as u8));
    out.extend(unit.to_le_bytes());
}
