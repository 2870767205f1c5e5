//! The forward pass written once more, as plainly as it can be, in f64 and without a cache or a file: what engines are
//! compared with.

use super::quantise;
use super::tiny::{LOCAL_ROPE_BASE, TinyModel};
use crate::dequant::dequantise;
use crate::llama::Family;
use std::collections::BTreeMap;

type Matrix = Vec<Vec<f64>>;

/// A checkpoint's tensors by the names of hubs, as rounded by their format.
struct Tensors(BTreeMap<String, Matrix>);

impl Tensors {
    fn of(tiny: &TinyModel) -> Self {
        let tensors = tiny.tensors().into_iter().map(|tensor| {
            let mut weights = vec![0.0; tensor.weights.len()];
            dequantise(tensor.kind, &quantise(tensor.kind, &tensor.weights), &mut weights);
            let rows = weights.chunks_exact(tensor.dims[0]);
            (tensor.names.1, rows.map(|row| row.iter().map(|&w| f64::from(w)).collect()).collect())
        });
        Self(tensors.collect())
    }

    fn matrix(&self, name: &str) -> &Matrix {
        &self.0[name]
    }

    fn vector(&self, name: &str) -> Option<&Vec<f64>> {
        self.0.get(name).map(|rows| &rows[0])
    }
}

/// Logits of every position of `tokens`.
///
/// # Cost
/// Quadratic in the tokens: for tiny models only.
pub fn logits(tiny: &TinyModel, tokens: &[u32]) -> Matrix {
    let tensors = Tensors::of(tiny);
    let is_gemma = tiny.family == Family::Gemma3;
    let embedding = tensors.matrix("model.embed_tokens.weight");
    let mut x: Matrix = tokens.iter().map(|&token| embedding[token as usize].clone()).collect();
    if is_gemma {
        x.iter_mut().flatten().for_each(|number| *number *= (tiny.hidden() as f64).sqrt());
    }
    for layer in 0..tiny.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |row: &[f64], part: &str| normed(tiny, row, tensors.vector(&name(part)).expect("a norm"));
        let attended = attention(
            tiny,
            &tensors,
            layer,
            &x.iter().map(|row| norm(row, "input_layernorm.weight")).collect::<Vec<_>>(),
        );
        for (row, mixed) in x.iter_mut().zip(attended) {
            let out = apply(tensors.matrix(&name("self_attn.o_proj.weight")), &mixed);
            add(row, &if is_gemma { norm(&out, "post_attention_layernorm.weight") } else { out });
        }
        let before = if is_gemma { "pre_feedforward_layernorm.weight" } else { "post_attention_layernorm.weight" };
        for row in &mut x {
            let input = norm(row, before);
            let [gate, up] =
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"].map(|m| apply(tensors.matrix(&name(m)), &input));
            let activation = if is_gemma { gelu } else { silu };
            let both: Vec<_> = gate.iter().zip(up).map(|(g, u)| activation(*g) * u).collect();
            let out = apply(tensors.matrix(&name("mlp.down_proj.weight")), &both);
            add(row, &if is_gemma { norm(&out, "post_feedforward_layernorm.weight") } else { out });
        }
    }
    let output = if tiny.tied { embedding } else { tensors.matrix("lm_head.weight") };
    let norm = tensors.vector("model.norm.weight").expect("a norm");
    x.iter().map(|row| apply(output, &normed(tiny, row, norm))).collect()
}

/// What attention mixes for each position, before the output projection.
fn attention(tiny: &TinyModel, tensors: &Tensors, layer: usize, x: &[Vec<f64>]) -> Matrix {
    let &TinyModel { head_dim, heads, kv_heads, .. } = tiny;
    let is_local = tiny.family == Family::Gemma3 && !(layer + 1).is_multiple_of(tiny.pattern);
    let base = if is_local { LOCAL_ROPE_BASE } else { tiny.rope_base() };
    let projected = |which: &str, position: usize| -> Vec<f64> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{which}{part}");
        let mut out = apply(tensors.matrix(&name("_proj.weight")), &x[position]);
        if let Some(bias) = tensors.vector(&name("_proj.bias")) {
            add(&mut out, bias);
        }
        if let Some(norm) = tensors.vector(&name("_norm.weight")) {
            out = out.chunks_exact(head_dim).flat_map(|head| normed(tiny, head, norm)).collect();
        }
        out
    };
    let turned = |which: &str| -> Matrix {
        let positions = 0..x.len();
        positions.map(|position| rope(&projected(which, position), position, (head_dim, f64::from(base)))).collect()
    };
    let (q, k) = (turned("q"), turned("k"));
    let v: Matrix = (0..x.len()).map(|position| projected("v", position)).collect();
    let mix = |i: usize| -> Vec<f64> {
        let first = if is_local { (i + 1).saturating_sub(tiny.window) } else { 0 };
        let of_head = |head: usize| {
            let own = head * head_dim..(head + 1) * head_dim;
            let kv_head = head * kv_heads / heads;
            let kv = kv_head * head_dim..(kv_head + 1) * head_dim;
            let scores =
                k[first..=i].iter().map(|k| dot(&q[i][own.clone()], &k[kv.clone()]) / (head_dim as f64).sqrt());
            let weights = softmax(&scores.collect::<Vec<_>>());
            kv.map(|d| weights.iter().zip(&v[first..]).map(|(w, v)| w * v[d]).sum::<f64>()).collect::<Vec<_>>()
        };
        (0..heads).flat_map(of_head).collect()
    };
    (0..x.len()).map(mix).collect()
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

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// The norm by the root mean square. Gemma's weights lack one.
fn normed(tiny: &TinyModel, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let missing = if tiny.family == Family::Gemma3 { 1.0 } else { 0.0 };
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(tiny.norm_epsilon())).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * (w + missing)).collect()
}

/// Rotates each head: its first half with its second.
fn rope(x: &[f64], position: usize, (head_dim, base): (usize, f64)) -> Vec<f64> {
    let mut out = x.to_vec();
    for head in out.chunks_exact_mut(head_dim) {
        for pair in 0..head_dim / 2 {
            let angle = position as f64 * base.powf(-2.0 * pair as f64 / head_dim as f64);
            let (a, b) = (head[pair], head[pair + head_dim / 2]);
            head[pair] = a * angle.cos() - b * angle.sin();
            head[pair + head_dim / 2] = a * angle.sin() + b * angle.cos();
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
