//! The forward pass written once more, as plainly as it can be, in f64 and without a cache: what engines are compared
//! with.

use crate::dequant::dequantise;
use crate::gguf::Gguf;

/// Logits of every position of `tokens`.
///
/// # Cost
/// Quadratic in the tokens, and it dequantises each matrix anew: for tiny models only.
pub fn logits(gguf: &Gguf, tokens: &[u32]) -> Vec<Vec<f64>> {
    let number = |key: &str| gguf.get_u32(&format!("llama.{key}")).unwrap().unwrap() as usize;
    let heads = number("attention.head_count");
    let kv_heads = number("attention.head_count_kv");
    let hidden = number("embedding_length");
    let head_dim = hidden / heads;
    let eps = f64::from(gguf.get_f32("llama.attention.layer_norm_rms_epsilon").unwrap().unwrap());
    let base = f64::from(gguf.get_f32("llama.rope.freq_base").unwrap().unwrap());

    let embedding = matrix(gguf, "token_embd.weight");
    let mut x: Vec<Vec<f64>> = tokens.iter().map(|&t| embedding[t as usize].clone()).collect();
    for layer in 0..number("block_count") {
        let named = |part: &str| matrix(gguf, &format!("blk.{layer}.{part}.weight"));
        let (wq, wk, wv, wo) = (named("attn_q"), named("attn_k"), named("attn_v"), named("attn_output"));
        let norm = &named("attn_norm")[0];
        let normed: Vec<_> = x.iter().map(|row| rms_norm(row, norm, eps)).collect();
        let rotated = |w: &[Vec<f64>]| -> Vec<Vec<f64>> {
            let rows = normed.iter().enumerate();
            rows.map(|(position, row)| rope(&apply(w, row), position, (head_dim, base))).collect()
        };
        let (q, k) = (rotated(&wq), rotated(&wk));
        let v: Vec<_> = normed.iter().map(|row| apply(&wv, row)).collect();
        for i in 0..x.len() {
            let mut mixed = Vec::new();
            for head in 0..heads {
                let own = head * head_dim..(head + 1) * head_dim;
                let kv = head * kv_heads / heads * head_dim..(head * kv_heads / heads + 1) * head_dim;
                let scores = k[..=i].iter().map(|k| dot(&q[i][own.clone()], &k[kv.clone()]) / (head_dim as f64).sqrt());
                let weights = softmax(&scores.collect::<Vec<_>>());
                mixed.extend(kv.map(|d| weights.iter().zip(&v).map(|(w, v)| w * v[d]).sum::<f64>()));
            }
            add(&mut x[i], &apply(&wo, &mixed));
        }
        let (gate, up, down) = (named("ffn_gate"), named("ffn_up"), named("ffn_down"));
        let norm = &named("ffn_norm")[0];
        for row in &mut x {
            let normed = rms_norm(row, norm, eps);
            let gated = apply(&gate, &normed).into_iter().map(|g| g / (1.0 + (-g).exp()));
            let both: Vec<_> = gated.zip(apply(&up, &normed)).map(|(g, u)| g * u).collect();
            add(row, &apply(&down, &both));
        }
    }
    let output = match gguf.tensor("output.weight") {
        Some(_) => matrix(gguf, "output.weight"),
        None => embedding,
    };
    let norm = &matrix(gguf, "output_norm.weight")[0];
    x.iter().map(|row| apply(&output, &rms_norm(row, norm, eps))).collect()
}

fn matrix(gguf: &Gguf, name: &str) -> Vec<Vec<f64>> {
    let entry = gguf.tensor(name).unwrap_or_else(|| panic!("tensor {name}"));
    let mut weights = vec![0.0; entry.dims.iter().product()];
    dequantise(entry.kind, gguf.tensor_bytes(entry), &mut weights);
    let rows = weights.chunks_exact(entry.dims[0]);
    rows.map(|row| row.iter().map(|&w| f64::from(w)).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn apply(rows: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    rows.iter().map(|row| dot(row, x)).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

/// Rotates the pairs (0, 1), (2, 3), ... of each head.
fn rope(x: &[f64], position: usize, (head_dim, base): (usize, f64)) -> Vec<f64> {
    let mut out = Vec::new();
    for head in x.chunks_exact(head_dim) {
        for (pair, xs) in head.chunks_exact(2).enumerate() {
            let angle = position as f64 * base.powf(-2.0 * pair as f64 / head_dim as f64);
            let (sin, cos) = angle.sin_cos();
            out.extend([xs[0] * cos - xs[1] * sin, xs[0] * sin + xs[1] * cos]);
        }
    }
    out
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - peak).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}
