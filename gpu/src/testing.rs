//! Tiny models for tests: written as GGUF files with seeded weights and a byte-level tokenizer.
//!
//! Public so that other crates' tests can run a whole engine in milliseconds; no part of the product uses it.

use crate::dequant::TensorType;
use crate::gguf::{Array, Gguf, Value};
use half::{bf16, f16};
use std::path::Path;

pub mod reference;

/// What the specification aligns tensors to where a file says nothing.
const ALIGNMENT: usize = 32;

/// Collects metadata and tensors and writes them as a GGUF file of version 3.
#[derive(Clone, Default)]
pub struct GgufWriter {
    keys: Vec<(String, Value)>,
    tensors: Vec<WrittenTensor>,
}

#[derive(Clone)]
struct WrittenTensor {
    name: String,
    kind: u32,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl GgufWriter {
    /// Sets a key, over what it had.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.keys.retain(|(known, _)| known != key);
        self.keys.push((key.to_string(), value));
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(known, _)| known != key);
        self
    }

    /// Adds a tensor, converting the weights to `kind`.
    pub fn tensor(&mut self, name: &str, kind: TensorType, dims: &[usize], weights: &[f32]) -> &mut Self {
        assert_eq!(weights.len(), dims.iter().product::<usize>(), "weights of {name}");
        self.raw_tensor(name, kind.id(), dims, quantise(kind, weights))
    }

    /// Adds a tensor as it is, whether it makes sense or not.
    pub fn raw_tensor(&mut self, name: &str, kind: u32, dims: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.remove_tensor(name);
        self.tensors.push(WrittenTensor { name: name.to_string(), kind, dims: dims.to_vec(), bytes });
        self
    }

    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// The file, and the length of its header.
    pub fn to_bytes(&self) -> (Vec<u8>, usize) {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0_usize;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            for &dim in &tensor.dims {
                out.extend((dim as u64).to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(ALIGNMENT);
        }
        let header = out.len();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.bytes);
        }
        (out, header)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let kind = match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::Str(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12_u32,
    };
    out.extend(kind.to_le_bytes());
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::Str(v) => put_text(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! numbers {
        ($kind:literal, $values:expr) => {{
            out.extend(($kind as u32).to_le_bytes());
            out.extend(($values.len() as u64).to_le_bytes());
            $values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(v) => numbers!(0, v),
        Array::I8(v) => numbers!(1, v),
        Array::U16(v) => numbers!(2, v),
        Array::I16(v) => numbers!(3, v),
        Array::U32(v) => numbers!(4, v),
        Array::I32(v) => numbers!(5, v),
        Array::F32(v) => numbers!(6, v),
        Array::Bool(v) => numbers!(7, v.iter().map(|&flag| u8::from(flag)).collect::<Vec<_>>()),
        Array::Str(v) => {
            out.extend(8_u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|text| put_text(out, text));
        }
        Array::Array(v) => {
            out.extend(9_u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|inner| put_array(out, inner));
        }
        Array::U64(v) => numbers!(10, v),
        Array::I64(v) => numbers!(11, v),
        Array::F64(v) => numbers!(12, v),
    }
}

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

/// A model small enough for tests: a real architecture and tokenizer, random weights.
#[derive(Clone, Debug)]
pub struct TinyModel {
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
    pub context: u32,
    /// Whether the output projection is the token embedding.
    pub tied: bool,
    /// The format of the matrices; norms are F32 always.
    pub kind: TensorType,
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            feed_forward: 96,
            context: 512,
            tied: false,
            kind: TensorType::Q8_0,
            seed: 1,
        }
    }
}

/// Control tokens of a tiny model, at ids 0, 1, 2: end of text, start of a message, end of a message.
pub const CONTROL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Merges of a tiny model's tokenizer, each with the token it makes.
const MERGES: [(&str, &str); 8] =
    [("h", "e"), ("t", "he"), ("Ġ", "the"), ("i", "n"), ("Ġ", "t"), ("e", "r"), ("o", "n"), ("Ġ", "a")];

/// One message a line of ChatML; a system message stands first where none is given, as in the models of this family.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl TinyModel {
    pub fn vocabulary(&self) -> usize {
        CONTROL_TOKENS.len() + 256 + MERGES.len()
    }

    pub fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The model as a writer, so that a test can damage it first.
    pub fn writer(&self) -> GgufWriter {
        let mut writer = GgufWriter::default();
        self.put_configuration(&mut writer);
        put_tokenizer(&mut writer);
        self.put_weights(&mut writer);
        writer
    }

    /// The model, opened from memory.
    pub fn gguf(&self) -> Gguf {
        Gguf::from_bytes("tiny.gguf", self.writer().to_bytes().0).expect("a written model opens")
    }

    /// Writes the model's file.
    ///
    /// # Errors
    /// Of the file system.
    pub fn write(&self, path: impl AsRef<Path>) -> std::io::Result<()> {
        std::fs::write(path, self.writer().to_bytes().0)
    }

    fn put_configuration(&self, writer: &mut GgufWriter) {
        let mut set = |key: &str, value| {
            writer.set(key, value);
        };
        let count = |n: usize| Value::U32(n as u32);
        set("general.architecture", Value::Str("llama".into()));
        set("general.name", Value::Str("tiny".into()));
        set("llama.block_count", count(self.layers));
        set("llama.context_length", Value::U32(self.context));
        set("llama.embedding_length", count(self.hidden()));
        set("llama.feed_forward_length", count(self.feed_forward));
        set("llama.attention.head_count", count(self.heads));
        set("llama.attention.head_count_kv", count(self.kv_heads));
        set("llama.rope.dimension_count", count(self.head_dim));
        set("llama.rope.freq_base", Value::F32(10_000.0));
        set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        set("llama.vocab_size", count(self.vocabulary()));
    }

    fn put_weights(&self, writer: &mut GgufWriter) {
        let mut seed = self.seed;
        let mut weights = |count: usize, spread: f32, middle: f32| -> Vec<f32> {
            (0..count).map(|_| middle + spread * next_number(&mut seed)).collect()
        };
        let (hidden, ffn) = (self.hidden(), self.feed_forward);
        let kv = self.kv_heads * self.head_dim;
        let mut matrix = |name: String, row: usize, rows: usize| {
            // Wide enough that logits differ clearly from token to token.
            let spread = 3.0 / (row as f32).sqrt();
            writer.tensor(&name, self.kind, &[row, rows], &weights(row * rows, spread, 0.0));
        };
        matrix("token_embd.weight".into(), hidden, self.vocabulary());
        if !self.tied {
            matrix("output.weight".into(), hidden, self.vocabulary());
        }
        for layer in 0..self.layers {
            matrix(format!("blk.{layer}.attn_q.weight"), hidden, hidden);
            matrix(format!("blk.{layer}.attn_k.weight"), hidden, kv);
            matrix(format!("blk.{layer}.attn_v.weight"), hidden, kv);
            matrix(format!("blk.{layer}.attn_output.weight"), hidden, hidden);
            matrix(format!("blk.{layer}.ffn_gate.weight"), hidden, ffn);
            matrix(format!("blk.{layer}.ffn_up.weight"), hidden, ffn);
            matrix(format!("blk.{layer}.ffn_down.weight"), ffn, hidden);
        }
        let mut norm = |name: String| {
            writer.tensor(&name, TensorType::F32, &[hidden], &weights(hidden, 0.2, 1.0));
        };
        norm("output_norm.weight".into());
        for layer in 0..self.layers {
            norm(format!("blk.{layer}.attn_norm.weight"));
            norm(format!("blk.{layer}.ffn_norm.weight"));
        }
    }
}

/// Uniform in -1..1 (splitmix64).
fn next_number(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The printable character that stands for a byte in byte-level vocabularies: itself where it prints, else one of the
/// characters from U+0100 on, in the order of the bytes.
fn character_of(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !prints(b)).count() as u32;
    char::from_u32(0x100 + before).expect("there are 68 such bytes")
}

fn put_tokenizer(writer: &mut GgufWriter) {
    let mut tokens: Vec<String> = CONTROL_TOKENS.iter().map(|t| t.to_string()).collect();
    tokens.extend((0..=255).map(|byte| character_of(byte).to_string()));
    tokens.extend(MERGES.iter().map(|(left, right)| format!("{left}{right}")));
    // 1 is a normal token, 3 a control token.
    let kinds = (0..tokens.len()).map(|id| if id < CONTROL_TOKENS.len() { 3 } else { 1 });
    let merges = MERGES.iter().map(|(left, right)| format!("{left} {right}"));
    writer
        .set("tokenizer.ggml.model", Value::Str("gpt2".into()))
        .set("tokenizer.ggml.pre", Value::Str("smollm".into()))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds.collect())))
        .set("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens)))
        .set("tokenizer.ggml.merges", Value::Array(Array::Str(merges.collect())))
        .set("tokenizer.ggml.bos_token_id", Value::U32(1))
        .set("tokenizer.ggml.eos_token_id", Value::U32(2))
        .set("tokenizer.ggml.unknown_token_id", Value::U32(0))
        .set("tokenizer.ggml.padding_token_id", Value::U32(2))
        .set("tokenizer.ggml.add_bos_token", Value::Bool(false))
        .set("tokenizer.ggml.add_space_prefix", Value::Bool(false))
        .set("tokenizer.chat_template", Value::Str(CHAT_TEMPLATE.into()));
}
