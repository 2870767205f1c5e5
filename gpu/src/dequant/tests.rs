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

#[test]
fn quantised_weights_come_back_within_half_a_step() {
    let weights: Vec<f32> = (0..96).map(|i| (i as f32 * 0.7).sin()).collect();
    for (kind, error_max) in [
        (TensorType::F32, 0.0),
        (TensorType::F16, 0.000_5),
        (TensorType::Bf16, 0.004),
        (TensorType::Q8_0, 0.0045),
        (TensorType::Q5_0, 0.035),
        (TensorType::Q4_0, 0.075),
        (TensorType::Q4_1, 0.07),
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
    assert_eq!(TensorType::from_id(12), Err("Q4_K (12)".to_string()));
    assert_eq!(TensorType::from_id(999), Err("number 999".to_string()));
}
