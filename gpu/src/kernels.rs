//! Loops over numbers, written so that the compiler vectorises them and so that every path gives the same bits.
//!
//! Sums run over `LANES` accumulators that are added up in one fixed order. Nothing here fuses a multiplication with an
//! addition, and the exponential is our own: plain IEEE operations give equal results on any machine, with or without
//! wide vectors.

#[cfg(test)]
mod tests;

/// Accumulators of a sum; a vector register of AVX2.
pub const LANES: usize = 8;

/// Compiles a function for any processor, with AVX2 and with AVX-512, and picks at run time. All give the same bits.
macro_rules! for_wide_vectors {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $(-> $out:ty)? = $body:path;) => {
        $(#[$doc])*
        $vis fn $name($($arg: $kind),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
                fn wider($($arg: $kind),*) $(-> $out)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn wide($($arg: $kind),*) $(-> $out)? {
                    $body($($arg),*)
                }
                if $crate::kernels::has_avx512() {
                    // SAFETY: the processor has these parts of AVX-512.
                    return unsafe { wider($($arg),*) };
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has AVX2.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use for_wide_vectors;

/// Whether the widest of `for_wide_vectors` can run.
#[cfg(target_arch = "x86_64")]
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// Adds the accumulators up in a fixed order.
#[inline(always)]
pub fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Scalar product.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    sum_lanes(lanes)
}

/// `e^x` within two units in the last place; 0 far below, and NaN stays NaN. Saturates above 88.
///
/// # Source
/// The usual reduction to a power of two times `e^r`, `|r| <= ln(2)/2`, with Taylor's polynomial of degree 7.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln(2) in two parts: the first has few bits, so its product with a small integer is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = (x - power * LN2_HIGH) - power * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x < -87.0 { 0.0 } else { p * scale }
}

#[inline(always)]
fn rms_scale(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + epsilon).sqrt()
}

for_wide_vectors! {
    /// `out = x / rms(x) * weight`.
    ///
    /// # Shape
    /// All three have the model's width.
    pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) = rms_norm_body;
}

#[inline(always)]
fn rms_norm_body(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let scale = rms_scale(x, epsilon);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

for_wide_vectors! {
    /// `x += y`.
    pub fn add(x: &mut [f32], y: &[f32]) = add_body;
}

#[inline(always)]
fn add_body(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

for_wide_vectors! {
    /// `out = gate * sigmoid(gate) * up`.
    pub fn silu_product(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_product_body;
}

#[inline(always)]
fn silu_product_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

for_wide_vectors! {
    /// `out = gelu(gate) * up`, the GELU in its form with tanh: `x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3))`.
    pub fn gelu_product(gate: &[f32], up: &[f32], out: &mut [f32]) = gelu_product_body;
}

#[inline(always)]
fn gelu_product_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    const TWICE_ROOT_OF_2_BY_PI: f32 = 1.595_769_2;
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let inner = TWICE_ROOT_OF_2_BY_PI * (gate + 0.044_715 * gate * gate * gate);
        *out = gate / (1.0 + exp(-inner)) * up;
    }
}

for_wide_vectors! {
    /// `x *= factor`.
    pub fn scale(x: &mut [f32], factor: f32) = scale_body;
}

#[inline(always)]
fn scale_body(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

for_wide_vectors! {
    /// `x = x / rms(x) * weight`.
    pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32) = rms_norm_in_place_body;
}

#[inline(always)]
fn rms_norm_in_place_body(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = rms_scale(x, epsilon);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

for_wide_vectors! {
    /// Rotates one head by the angles of its position: each number of its first half with the one of the second.
    ///
    /// # Shape
    /// `head` has `head_dim` numbers, `turns` the cosine and sine of `head_dim / 2` angles.
    pub fn rotate_halves(head: &mut [f32], turns: &[(f32, f32)]) = rotate_halves_body;
}

#[inline(always)]
fn rotate_halves_body(head: &mut [f32], turns: &[(f32, f32)]) {
    let (first, second) = head.split_at_mut(turns.len());
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

for_wide_vectors! {
    /// The highest number; NaN if any number is NaN or infinite.
    pub fn finite_max(numbers: &[f32]) -> f32 = finite_max_body;
}

#[inline(always)]
fn finite_max_body(numbers: &[f32]) -> f32 {
    let mut peaks = [f32::NEG_INFINITY; LANES];
    // A finite number times zero is zero; anything else is NaN, and NaN stays.
    let mut poison = [0.0_f32; LANES];
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            peaks[i] = if chunk[i] > peaks[i] { chunk[i] } else { peaks[i] };
            poison[i] += chunk[i] * 0.0;
        }
    }
    let mut peak = peaks.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut all_poison = sum_lanes(poison);
    for &number in rest {
        peak = peak.max(number);
        all_poison += number * 0.0;
    }
    if all_poison == 0.0 { peak } else { f32::NAN }
}

for_wide_vectors! {
    /// `out = e^((x - peak) * factor)`, and their sum.
    pub fn exp_all(x: &[f32], peak: f32, factor: f32, out: &mut [f32]) -> f64 = exp_all_body;
}

#[inline(always)]
fn exp_all_body(x: &[f32], peak: f32, factor: f32, out: &mut [f32]) -> f64 {
    // Short stretches are summed in f32, the stretches in f64, so that a vocabulary's sum keeps its precision.
    const STRETCH: usize = 256;
    let mut sum = 0.0;
    for (x, out) in x.chunks(STRETCH).zip(out.chunks_mut(STRETCH)) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = exp((x - peak) * factor);
        }
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = out.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] += chunk[i];
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x;
        }
        sum += f64::from(sum_lanes(lanes));
    }
    sum
}
