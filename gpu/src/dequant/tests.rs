use super::*;
use crate::testing::quantise;

fn converted(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / kind.block_bytes() * kind.block_weights()];
    dequantise(kind, bytes, &mut out);
    out
}

fn halves(numbers: &[f32]) -> Vec<u8> {
    let halves = numbers.iter().map(|&n| f16::from_f32(n).to_le_bytes());
    halves.flatten().collect()
}

#[test]
fn f32_f16_and_bf16_are_read_little_endian() {
    assert_eq!(converted(TensorType::F32, &[0, 0, 0xc0, 0x3f]), [1.5]);
    assert_eq!(converted(TensorType::F16, &[0x00, 0x3e, 0x00, 0xc0]), [1.5, -2.0]);
    assert_eq!(converted(TensorType::Bf16, &[0xc0, 0x3f, 0x00, 0xc0]), [1.5, -2.0]);
}

#[test]
fn q8_0_scales_signed_bytes() {
    let mut block = halves(&[0.5]);
    block.extend((0..32_u8).map(|i| i.wrapping_sub(4)));
    let expected: Vec<f32> = (0..32).map(|i| (i as f32 - 4.0) * 0.5).collect();
    assert_eq!(converted(TensorType::Q8_0, &block), expected);
}

#[test]
fn q4_0_centres_nibbles_on_eight_and_puts_low_nibbles_first() {
    let mut block = halves(&[0.25]);
    block.extend((0..16_u8).map(|i| i | (15 - i) << 4));
    let low = (0..16).map(|i| (i as f32 - 8.0) * 0.25);
    let high = (0..16).map(|i| (7.0 - i as f32) * 0.25);
    assert_eq!(converted(TensorType::Q4_0, &block), low.chain(high).collect::<Vec<_>>());
}

#[test]
fn q4_1_scales_nibbles_and_adds_the_minimum() {
    let mut block = halves(&[0.25, -3.0]);
    block.extend((0..16_u8).map(|i| i | (15 - i) << 4));
    let low = (0..16).map(|i| i as f32 * 0.25 - 3.0);
    let high = (0..16).map(|i| (15.0 - i as f32) * 0.25 - 3.0);
    assert_eq!(converted(TensorType::Q4_1, &block), low.chain(high).collect::<Vec<_>>());
}

#[test]
fn q5_0_takes_the_fifth_bit_of_each_weight_from_the_word_before_the_nibbles() {
    let mut block = halves(&[2.0]);
    block.extend((1_u32 << 0 | 1 << 17).to_le_bytes());
    block.extend([3 | 4 << 4, 5 | 6 << 4]);
    block.extend([0; 14]);
    let mut expected = [-32.0; 32];
    expected[0] = 6.0; // (3 + 16 - 16) * 2
    expected[1] = -22.0; // (5 - 16) * 2
    expected[16] = -24.0; // (4 - 16) * 2
    expected[17] = 12.0; // (6 + 16 - 16) * 2
    assert_eq!(converted(TensorType::Q5_0, &block), expected);
}

/// Twelve bytes of eight scales and eight minima of six bits.
fn sixes(scales: [u8; 8], minima: [u8; 8]) -> Vec<u8> {
    let mut bytes = vec![0; 12];
    for i in 0..4 {
        bytes[i] = scales[i] | (scales[i + 4] & 0x30) << 2;
        bytes[i + 4] = minima[i] | (minima[i + 4] & 0x30) << 2;
        bytes[i + 8] = scales[i + 4] & 0x0f | (minima[i + 4] & 0x0f) << 4;
    }
    bytes
}

#[test]
fn q4_k_has_a_scale_and_a_minimum_of_six_bits_for_each_group_of_32() {
    let (scales, minima) = ([1, 2, 3, 63, 16, 33, 62, 48], [0, 63, 1, 2, 17, 32, 47, 60]);
    let mut block = halves(&[0.5, 0.25]);
    block.extend(sixes(scales, minima));
    // Byte `b` of pair `p` holds weight `b` of groups `2p` (low nibble) and `2p + 1`.
    block.extend((0..128_usize).map(|at| (at % 16) as u8 | (((at / 32 * 3 + at) % 16) as u8) << 4));
    let found = converted(TensorType::Q4K, &block);
    for group in 0..8 {
        for i in 0..32 {
            let quant = if group % 2 == 0 { i % 16 } else { (group / 2 * 3 + group / 2 * 32 + i) % 16 };
            let right = 0.5 * f32::from(scales[group]) * quant as f32 - 0.25 * f32::from(minima[group]);
            assert_eq!(found[32 * group + i], right, "group {group}, weight {i}");
        }
    }
}

#[test]
fn q6_k_joins_nibbles_and_pairs_of_bits_around_32_and_has_a_signed_scale_for_each_16() {
    let quant = |weight: usize| (weight * 29 + weight / 16 * 5) % 64;
    let scale = |group: usize| (group as i8 - 7) * 15;
    let mut block = vec![0_u8; 208];
    for weight in 0..256 {
        let (half, within) = (weight / 128, weight % 128);
        // The first 64 weights of a half are low nibbles, the others high ones.
        block[64 * half + within % 64] |= ((quant(weight) & 15) as u8) << (within / 64 * 4);
        block[128 + 32 * half + within % 32] |= ((quant(weight) >> 4) as u8) << (within / 32 * 2);
    }
    (0..16).for_each(|group| block[192 + group] = scale(group) as u8);
    block.extend(halves(&[0.125]));
    let found = converted(TensorType::Q6K, &block);
    for (weight, found) in found.into_iter().enumerate() {
        let right = 0.125 * f32::from(scale(weight / 16)) * (quant(weight) as f32 - 32.0);
        assert_eq!(found, right, "weight {weight}");
    }
}

#[test]
fn quantised_weights_come_back_within_half_a_step() {
    let weights: Vec<f32> = (0..768).map(|i| (i as f32 * 0.7).sin()).collect();
    for (kind, error_max) in [
        (TensorType::F32, 0.0),
        (TensorType::F16, 0.000_5),
        (TensorType::Bf16, 0.004),
        (TensorType::Q8_0, 0.0045),
        (TensorType::Q5_0, 0.035),
        (TensorType::Q4_0, 0.075),
        (TensorType::Q4_1, 0.07),
        // Half a step, and half a step of the scale times the largest quant, or of the minimum.
        (TensorType::Q4K, 0.09),
        (TensorType::Q6K, 0.02),
    ] {
        let back = converted(kind, &quantise(kind, &weights));
        let error = back.iter().zip(&weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(error <= error_max, "{kind}: off by {error}");
    }
}

#[test]
fn formats_are_known_by_the_numbers_of_the_file_format() {
    for kind in TensorType::ALL {
        assert_eq!(TensorType::from_id(kind.id()), Ok(kind));
    }
    assert_eq!(TensorType::from_id(13), Err("Q5_K (13)".to_string()));
    assert_eq!(TensorType::from_id(999), Err("number 999".to_string()));
}
