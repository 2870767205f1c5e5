use super::*;
use crate::dequant::{TensorType, dequantise};
use crate::testing::quantise;

/// Whole numbers that look random, from -`most` to `most`.
fn numbers(count: usize, seed: usize, most: f32) -> Vec<f32> {
    (0..count).map(|i| (((i + 1) * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 * most - most).collect()
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

fn rows_of(kind: TensorType, bytes: &[u8], outputs: usize) -> Vec<Row<'_>> {
    bytes.chunks_exact(bytes.len() / outputs).map(|row| (kind, row)).collect()
}

fn applied(layer: &Linear, isa: Isa, team: &mut Team, x: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let mut out = Matrix::default();
    layer.apply(team, isa, &Rows::of(x), &mut out);
    (0..x.len()).map(|row| out.row(row).iter().map(|n| n.to_bits()).collect()).collect()
}

/// Products of the quantised activations with the weights as `copy_row` has them, in f64.
fn right(layer: &Linear, x: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let rows = Rows::of(x);
    let mut weights = vec![0.0; layer.inputs];
    let mut out = vec![vec![0.0; layer.outputs]; x.len()];
    for output in 0..layer.outputs {
        layer.copy_row(output, &mut weights);
        for (row, out) in out.iter_mut().enumerate() {
            for (block, weights) in weights.chunks(BLOCK).enumerate() {
                let (quants, scale) = rows.block(row, block);
                let products = weights.iter().zip(quants).map(|(w, q)| f64::from(*w) * f64::from(q));
                out[output] += products.sum::<f64>() * f64::from(scale);
            }
        }
    }
    out
}

/// Formats whose blocks fit any of the shapes.
fn kinds() -> impl Iterator<Item = TensorType> {
    TensorType::ALL.into_iter().filter(|kind| kind.block_weights() <= BLOCK)
}

/// The shapes of the small real model, and odd ones: outputs that fill no group, one output, a single block.
const SHAPES: [(usize, usize); 6] = [(576, 192), (1536, 64), (64, 267), (32, 1), (96, 17), (160, 33)];

#[test]
fn products_agree_with_f64_for_every_format_shape_and_set_of_instructions() {
    let mut team = Team::new(2).unwrap();
    for kind in TensorType::ALL {
        for (inputs, outputs) in SHAPES.into_iter().filter(|(inputs, _)| inputs.is_multiple_of(kind.block_weights())) {
            let bytes = quantise(kind, &numbers(inputs * outputs, 1, 0.3));
            let layer = Linear::new(inputs, &rows_of(kind, &bytes, outputs));
            let x: Vec<_> = (0..5).map(|row| numbers(inputs, row, 2.0)).collect();
            let right = right(&layer, &x);
            for isa in available() {
                for (found, right) in applied(&layer, isa, &mut team, &x).iter().flatten().zip(right.iter().flatten()) {
                    let found = f64::from(f32::from_bits(*found));
                    assert!((found - right).abs() < 2e-4, "{kind} {inputs}x{outputs} {isa:?}: {found}, not {right}");
                }
            }
        }
    }
}

#[test]
fn inputs_that_fill_no_block_are_padded() {
    for inputs in [1, 6, 33, 63, 100] {
        let bytes = quantise(TensorType::F32, &numbers(inputs * 20, 1, 1.0));
        let layer = Linear::new(inputs, &rows_of(TensorType::F32, &bytes, 20));
        let x = vec![numbers(inputs, 2, 1.0), numbers(inputs, 3, 1.0)];
        let right = right(&layer, &x);
        for isa in available() {
            let out = applied(&layer, isa, &mut Team::new(1).unwrap(), &x);
            for (found, right) in out.iter().flatten().zip(right.iter().flatten()) {
                assert!((f64::from(f32::from_bits(*found)) - right).abs() < 1e-4, "{inputs} inputs, {isa:?}");
            }
        }
    }
}

#[test]
fn weights_of_files_of_four_and_eight_bits_are_kept_as_they_are() {
    for kind in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q5_0, TensorType::Q8_0] {
        let (inputs, outputs) = (96, 37);
        let bytes = quantise(kind, &numbers(inputs * outputs, 1, 0.3));
        let mut right = vec![0.0; inputs * outputs];
        dequantise(kind, &bytes, &mut right);
        let layer = Linear::new(inputs, &rows_of(kind, &bytes, outputs));
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            layer.copy_row(output, &mut row);
            for (found, right) in row.iter().zip(&right[output * inputs..]) {
                // The smallest quant of Q4_0 is a difference, rounded once more.
                assert!((found - right).abs() <= 1e-7, "{kind}: {found}, not {right}");
            }
        }
    }
}

#[test]
fn four_bits_with_products_as_scales_are_kept_within_a_fraction_of_a_step() {
    for size in [1e-3, 0.3, 20.0] {
        let (inputs, outputs) = (512, 5);
        let bytes = quantise(TensorType::Q4K, &numbers(inputs * outputs, 1, size));
        let mut right = vec![0.0; inputs * outputs];
        dequantise(TensorType::Q4K, &bytes, &mut right);
        let layer = Linear::new(inputs, &rows_of(TensorType::Q4K, &bytes, outputs));
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            layer.copy_row(output, &mut row);
            for (found, right) in row.iter().zip(&right[output * inputs..]) {
                // A step is an eighth of the size or so, and both of scale and minimum are rounded.
                assert!((found - right).abs() <= size * 2e-3, "{found}, not {right}");
            }
        }
        assert!(layer.bytes() < inputs * 16 * 5 / 8 + 128, "four bits stay four bits");
    }
}

#[test]
fn wider_weights_are_rounded_to_half_a_step_of_their_block_whatever_their_size() {
    for kind in [TensorType::F32, TensorType::F16, TensorType::Bf16] {
        for size in [1e-30, 1e-6, 1.0, 300.0, 1e30] {
            if kind == TensorType::F16 && !(1e-6..=300.0).contains(&size) {
                continue;
            }
            let mut weights = numbers(32 * 20, 1, 1.0);
            // A block far smaller than the rest of its row.
            weights[32..64].iter_mut().for_each(|w| *w *= 1e-3);
            weights.iter_mut().for_each(|w| *w *= size);
            let bytes = quantise(kind, &weights);
            dequantise(kind, &bytes, &mut weights);
            let layer = Linear::new(64, &rows_of(kind, &bytes, 10));
            let mut row = vec![0.0; 64];
            for output in 0..10 {
                layer.copy_row(output, &mut row);
                for (block, right) in row.chunks(32).zip(weights[output * 64..].chunks(32)) {
                    let step = right.iter().fold(0.0, |peak: f32, w| peak.max(w.abs())) / 127.0;
                    let worst = block.iter().zip(right).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()));
                    assert!(worst <= step * 0.56, "{kind} of {size}: {worst} with steps of {step}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_number_of_rows_and_with_any_instructions() {
    let mut teams = [1, 2, 3].map(|threads| Team::new(threads).unwrap());
    for kind in [TensorType::Q4_1, TensorType::Q8_0, TensorType::F32] {
        for (inputs, outputs) in [(576, 200), (96, 33)] {
            let bytes = quantise(kind, &numbers(inputs * outputs, 1, 0.3));
            let layer = Linear::new(inputs, &rows_of(kind, &bytes, outputs));
            let x: Vec<_> = (0..70).map(|row| numbers(inputs, row, 2.0)).collect();
            let alone: Vec<_> = x
                .iter()
                .map(|x| applied(&layer, Isa::Portable, &mut teams[0], std::slice::from_ref(x)).remove(0))
                .collect();
            for isa in available() {
                for count in [1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 33, 70] {
                    let from = x.len() - count;
                    let found = applied(&layer, isa, &mut teams[count % 3], &x[from..]);
                    assert!(found == alone[from..], "{kind} {inputs}x{outputs} {isa:?}: {count} rows");
                }
            }
        }
    }
}

#[test]
fn extremes_of_weights_and_activations_do_not_saturate() {
    let (inputs, outputs) = (64, 18);
    let sign = |i: usize, of: f32| if i.is_multiple_of(3) { -of } else { of };
    // Every second row at the ends of the range everywhere.
    let ends = |of: f32| -> Vec<f32> {
        (0..inputs * outputs).map(|i| if i / inputs % 2 == 0 { of } else { sign(i, of) }).collect()
    };
    for kind in kinds() {
        let bytes = quantise(kind, &ends(1.0));
        let layer = Linear::new(inputs, &rows_of(kind, &bytes, outputs));
        let x = vec![vec![3.0; inputs], vec![-3.0; inputs], (0..inputs).map(|i| sign(i, 3.0)).collect()];
        let right = right(&layer, &x);
        for isa in available() {
            for (found, right) in
                applied(&layer, isa, &mut Team::new(1).unwrap(), &x).iter().flatten().zip(right.iter().flatten())
            {
                let found = f64::from(f32::from_bits(*found));
                assert!((found - right).abs() < 1e-3, "{kind} {isa:?}: {found}, not {right}");
            }
        }
    }
}

#[test]
fn sections_of_several_formats_stand_one_after_the_other() {
    let kinds = [(TensorType::Q4_1, 40), (TensorType::Q4_1, 7), (TensorType::Q8_0, 19), (TensorType::Q4_0, 5)];
    let bytes: Vec<_> =
        kinds.iter().enumerate().map(|(i, (kind, outputs))| quantise(*kind, &numbers(64 * outputs, i, 0.3))).collect();
    let parts: Vec<_> =
        kinds.iter().zip(&bytes).map(|((kind, outputs), bytes)| rows_of(*kind, bytes, *outputs)).collect();
    let together = Linear::new(64, &parts.concat());
    let x: Vec<_> = (0..3).map(|row| numbers(64, row, 1.0)).collect();
    let mut team = Team::new(2).unwrap();
    let found = applied(&together, Isa::best(), &mut team, &x);
    let mut first = 0;
    let (mut row, mut expected) = (vec![0.0; 64], vec![0.0; 64]);
    for rows in parts {
        let apart = Linear::new(64, &rows);
        let right = applied(&apart, Isa::best(), &mut team, &x);
        for (found, right) in found.iter().zip(&right) {
            assert!(found[first..first + rows.len()] == right[..]);
        }
        for output in 0..rows.len() {
            together.copy_row(first + output, &mut row);
            apart.copy_row(output, &mut expected);
            assert!(row == expected);
        }
        first += rows.len();
    }
    assert_eq!(first, 71);
}

#[test]
fn blocks_of_zeros_give_zero() {
    let bytes = quantise(TensorType::Q4_1, &vec![0.0; 64 * 16]);
    let layer = Linear::new(64, &rows_of(TensorType::Q4_1, &bytes, 16));
    let x = vec![vec![0.0; 64], vec![1e-38; 64], numbers(64, 1, 1.0)];
    for isa in available() {
        let found = applied(&layer, isa, &mut Team::new(1).unwrap(), &x);
        assert!(found.iter().flatten().all(|bits| f32::from_bits(*bits) == 0.0), "{isa:?}");
    }
}

#[test]
fn what_is_not_finite_shows_in_its_row_and_in_no_other() {
    let bytes = quantise(TensorType::Q8_0, &numbers(64 * 16, 1, 1.0));
    let layer = Linear::new(64, &rows_of(TensorType::Q8_0, &bytes, 16));
    let with = |number: f32| {
        let mut x = numbers(64, 2, 1.0);
        x[40] = number;
        x
    };
    let sound = numbers(64, 3, 1.0);
    for isa in available() {
        let mut team = Team::new(1).unwrap();
        let right = applied(&layer, isa, &mut team, std::slice::from_ref(&sound)).remove(0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let found = applied(&layer, isa, &mut team, &[sound.clone(), with(bad), sound.clone()]);
            assert!(found[0] == right && found[2] == right, "{isa:?}");
            assert!(found[1].iter().all(|bits| f32::from_bits(*bits).is_nan()), "{isa:?}");
        }
        let huge = applied(&layer, isa, &mut team, &[with(f32::MAX)]).remove(0);
        assert!(huge.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{isa:?}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let bytes = quantise(TensorType::F32, &with(bad));
        let layer = Linear::new(64, &rows_of(TensorType::F32, &bytes, 1));
        for isa in available() {
            let found = applied(&layer, isa, &mut Team::new(1).unwrap(), std::slice::from_ref(&sound));
            assert!(f32::from_bits(found[0][0]).is_nan(), "{isa:?}");
        }
    }
}

#[test]
fn activations_are_rounded_to_the_nearest_of_255_steps() {
    let x = numbers(64, 4, 5.0);
    let rows = Rows::of(std::slice::from_ref(&x));
    for (block, x) in x.chunks(32).enumerate() {
        let (quants, scale) = rows.block(0, block);
        let peak = x.iter().fold(0.0, |peak: f32, x| peak.max(x.abs()));
        assert_eq!(scale, peak / 127.0);
        assert_eq!(quants.iter().map(|q| q.unsigned_abs()).max(), Some(127));
        for (quant, x) in quants.iter().zip(x) {
            assert!((f32::from(*quant) * scale - x).abs() <= scale * 0.5001, "{x} became {quant} steps of {scale}");
        }
    }
}
