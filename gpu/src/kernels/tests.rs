use super::*;

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0).collect()
}

#[test]
fn exp_is_within_two_units_of_the_last_place() {
    let mut worst = 0.0_f64;
    for step in -87_000..88_000 {
        let x = step as f32 / 1000.0;
        let right = f64::from(x).exp();
        worst = worst.max((f64::from(exp(x)) - right).abs() / right);
    }
    assert!(worst < 2.0 * f64::from(f32::EPSILON), "off by {worst}");
    assert_eq!(exp(0.0), 1.0);
}

#[test]
fn exp_ends_in_zero_saturates_and_keeps_nan() {
    assert_eq!(exp(-1e30), 0.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert!(exp(1e30).is_finite() && exp(1e30) > 1e38);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn wide_vectors_give_the_bits_of_narrow_ones() {
    for count in [1, 7, 8, 9, 64, 100, 576, 1000] {
        let (x, y) = (numbers(count), numbers(count + 3)[3..].to_vec());
        let (mut wide, mut narrow) = (vec![0.0; count], vec![0.0; count]);
        rms_norm(&x, &y, 1e-5, &mut wide);
        rms_norm_body(&x, &y, 1e-5, &mut narrow);
        assert_eq!(wide, narrow);
        silu_product(&x, &y, &mut wide);
        silu_product_body(&x, &y, &mut narrow);
        assert_eq!(wide, narrow);
        gelu_product(&x, &y, &mut wide);
        gelu_product_body(&x, &y, &mut narrow);
        assert_eq!(wide, narrow);
        rms_norm(&x, &y, 1e-5, &mut wide);
        narrow.copy_from_slice(&x);
        rms_norm_in_place(&mut narrow, &y, 1e-5);
        assert_eq!(wide, narrow);
        let sums = (exp_all(&x, 3.0, 0.7, &mut wide), exp_all_body(&x, 3.0, 0.7, &mut narrow));
        assert_eq!(sums.0.to_bits(), sums.1.to_bits());
        assert_eq!(wide, narrow);
        assert_eq!(finite_max(&x).to_bits(), finite_max_body(&x).to_bits());
    }
}

#[test]
fn dot_rms_norm_and_gates_agree_with_f64() {
    let (x, y) = (numbers(77), numbers(80)[3..].to_vec());
    let right: f64 = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
    assert!((f64::from(dot(&x, &y)) - right).abs() < 1e-4);

    let mut out = vec![0.0; 77];
    rms_norm(&x, &y, 1e-5, &mut out);
    let square: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 77.0;
    for ((out, x), y) in out.iter().zip(&x).zip(&y) {
        assert!((f64::from(*out) - f64::from(*x) / (square + 1e-5).sqrt() * f64::from(*y)).abs() < 1e-5);
    }
    silu_product(&x, &y, &mut out);
    for ((out, x), y) in out.iter().zip(&x).zip(&y) {
        let right = f64::from(*x) / (1.0 + (-f64::from(*x)).exp()) * f64::from(*y);
        assert!((f64::from(*out) - right).abs() < 1e-5);
    }
    gelu_product(&x, &y, &mut out);
    for ((out, x), y) in out.iter().zip(&x).zip(&y) {
        let x = f64::from(*x);
        let tanh = ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh();
        assert!((f64::from(*out) - 0.5 * x * (1.0 + tanh) * f64::from(*y)).abs() < 1e-5);
    }
}

#[test]
fn pairs_turn_by_their_own_angle() {
    let mut head = [1.0, 0.0, 0.0, 2.0];
    rotate_halves(&mut head, &[(0.0, 1.0), (-1.0, 0.0)]);
    assert_eq!(head, [0.0, 0.0, 1.0, -2.0]);
}

#[test]
fn the_highest_number_is_nan_as_soon_as_one_number_is_not_finite() {
    for at in [0, 5, 8, 18] {
        let mut numbers = numbers(19);
        assert_eq!(finite_max(&numbers), numbers.iter().copied().fold(f32::MIN, f32::max));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            numbers[at] = bad;
            assert!(finite_max(&numbers).is_nan(), "{bad} at {at}");
        }
    }
}
