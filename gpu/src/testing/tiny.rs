//! The tiny models.

use super::{FolderWriter, GgufWriter};
use crate::dequant::TensorType;
use crate::gguf::{Array, Gguf, Value};
use crate::llama::Family;
use serde_json::{Map, json};
use std::path::Path;

/// The base of Gemma's layers with a window.
pub(super) const LOCAL_ROPE_BASE: f32 = 10_000.0;

/// A tensor of a checkpoint.
pub(super) struct TinyTensor {
    /// Its name in GGUF files, and on hubs.
    pub names: (String, String),
    pub kind: TensorType,
    /// The row length first.
    pub dims: Vec<usize>,
    pub weights: Vec<f32>,
}

/// A model small enough for tests: a real architecture and tokenizer, random weights.
#[derive(Clone, Debug)]
pub struct TinyModel {
    pub family: Family,
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
    /// Gemma only: positions that a layer with a window sees, and every which layer has none.
    pub window: usize,
    pub pattern: usize,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            family: Family::Llama,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            feed_forward: 96,
            context: 512,
            tied: false,
            kind: TensorType::Q8_0,
            seed: 1,
            window: 24,
            pattern: 2,
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
        match self.family {
            Family::Llama | Family::Qwen2 => self.heads * self.head_dim,
            // These need not be as wide as their heads together.
            Family::Qwen3 | Family::Gemma3 => self.heads * self.head_dim / 2,
        }
    }

    /// The model as a writer, so that a test can damage it first.
    pub fn writer(&self) -> GgufWriter {
        let mut writer = GgufWriter::default();
        self.put_configuration(&mut writer);
        put_tokenizer(&mut writer);
        for tensor in self.tensors() {
            writer.tensor(&tensor.names.0, tensor.kind, &tensor.dims, &self.as_gguf(&tensor));
        }
        writer
    }

    /// The model as a folder, so that a test can damage it first. Only formats without blocks exist there.
    pub fn folder_writer(&self) -> FolderWriter {
        let mut writer = FolderWriter { config: self.configuration(), ..FolderWriter::default() };
        for TinyTensor { names, kind, dims, weights } in self.tensors() {
            writer.weights.tensor(&names.1, kind, &dims, &weights);
        }
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
        let family = self.family;
        writer.set("general.architecture", Value::Str(family.to_string()));
        writer.set("general.name", Value::Str("tiny".into()));
        let mut set = |key: &str, value| {
            writer.set(&format!("{family}.{key}"), value);
        };
        let count = |n: usize| Value::U32(n as u32);
        set("block_count", count(self.layers));
        set("context_length", Value::U32(self.context));
        set("embedding_length", count(self.hidden()));
        set("feed_forward_length", count(self.feed_forward));
        set("attention.head_count", count(self.heads));
        set("attention.head_count_kv", count(self.kv_heads));
        set("rope.freq_base", Value::F32(self.rope_base()));
        set("attention.layer_norm_rms_epsilon", Value::F32(self.norm_epsilon()));
        set("vocab_size", count(self.vocabulary()));
        if self.hidden() == self.heads * self.head_dim {
            set("rope.dimension_count", count(self.head_dim));
        } else {
            set("attention.key_length", count(self.head_dim));
            set("attention.value_length", count(self.head_dim));
        }
        if family == Family::Gemma3 {
            set("attention.sliding_window", count(self.window));
            set("attention.sliding_window_pattern", count(self.pattern));
        }
    }

    fn configuration(&self) -> Map<String, serde_json::Value> {
        let mut config = json!({
            "model_type": self.family.model_type(),
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.feed_forward,
            "vocab_size": self.vocabulary(),
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_epsilon(),
            "rope_theta": self.rope_base(),
            "rope_scaling": null,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        });
        let map = config.as_object_mut().expect("an object");
        if self.family == Family::Gemma3 {
            map.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
            map.insert("sliding_window".into(), json!(self.window));
            map.insert("sliding_window_pattern".into(), json!(self.pattern));
            map.insert("rope_local_base_freq".into(), json!(LOCAL_ROPE_BASE));
            map.insert("query_pre_attn_scalar".into(), json!(self.head_dim));
        } else {
            map.insert("hidden_act".into(), json!("silu"));
        }
        map.clone()
    }

    pub(super) fn rope_base(&self) -> f32 {
        if self.family == Family::Llama { 10_000.0 } else { 1_000_000.0 }
    }

    pub(super) fn norm_epsilon(&self) -> f32 {
        if self.family == Family::Gemma3 { 1e-6 } else { 1e-5 }
    }

    /// Every tensor, in the order of the weights' generator.
    pub(super) fn tensors(&self) -> Vec<TinyTensor> {
        let mut seed = self.seed;
        let mut weights = |count: usize, spread: f32, middle: f32| -> Vec<f32> {
            (0..count).map(|_| middle + spread * next_number(&mut seed)).collect()
        };
        let (hidden, ffn) = (self.hidden(), self.feed_forward);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = Vec::new();
        let mut matrix = |names: (String, String), [row, rows]: [usize; 2]| {
            // Wide enough that logits differ clearly from token to token.
            let spread = 3.0 / (row as f32).sqrt();
            let weights = weights(row * rows, spread, 0.0);
            tensors.push(TinyTensor { names, kind: self.kind, dims: vec![row, rows], weights });
        };
        let top = |gguf: &str, hub: &str| (format!("{gguf}.weight"), format!("{hub}.weight"));
        let inner = |layer: usize, gguf: &str, hub: &str| {
            (format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{hub}"))
        };
        matrix(top("token_embd", "model.embed_tokens"), [hidden, self.vocabulary()]);
        if !self.tied {
            matrix(top("output", "lm_head"), [hidden, self.vocabulary()]);
        }
        for layer in 0..self.layers {
            for (gguf, hub, dims) in [
                ("attn_q", "self_attn.q_proj", [hidden, q]),
                ("attn_k", "self_attn.k_proj", [hidden, kv]),
                ("attn_v", "self_attn.v_proj", [hidden, kv]),
                ("attn_output", "self_attn.o_proj", [q, hidden]),
                ("ffn_gate", "mlp.gate_proj", [hidden, ffn]),
                ("ffn_up", "mlp.up_proj", [hidden, ffn]),
                ("ffn_down", "mlp.down_proj", [ffn, hidden]),
            ] {
                matrix(inner(layer, &format!("{gguf}.weight"), &format!("{hub}.weight")), dims);
            }
        }
        // Checkpoints of Gemma hold the weights of norms less one.
        let middle = if self.family == Family::Gemma3 { 0.0 } else { 1.0 };
        let mut vector = |names: (String, String), width: usize, (spread, middle): (f32, f32)| {
            let weights = weights(width, spread, middle);
            tensors.push(TinyTensor { names, kind: TensorType::F32, dims: vec![width], weights });
        };
        vector(top("output_norm", "model.norm"), hidden, (0.2, middle));
        for layer in 0..self.layers {
            let mut norm = |gguf: &str, hub: &str, width: usize| {
                vector(inner(layer, &format!("{gguf}.weight"), &format!("{hub}.weight")), width, (0.2, middle));
            };
            norm("attn_norm", "input_layernorm", hidden);
            if self.family == Family::Gemma3 {
                norm("ffn_norm", "pre_feedforward_layernorm", hidden);
                norm("post_attention_norm", "post_attention_layernorm", hidden);
                norm("post_ffw_norm", "post_feedforward_layernorm", hidden);
            } else {
                norm("ffn_norm", "post_attention_layernorm", hidden);
            }
            if matches!(self.family, Family::Qwen3 | Family::Gemma3) {
                norm("attn_q_norm", "self_attn.q_norm", self.head_dim);
                norm("attn_k_norm", "self_attn.k_norm", self.head_dim);
            }
            if self.family == Family::Qwen2 {
                for (gguf, hub, width) in [("attn_q", "q_proj", q), ("attn_k", "k_proj", kv), ("attn_v", "v_proj", kv)]
                {
                    let names = inner(layer, &format!("{gguf}.bias"), &format!("self_attn.{hub}.bias"));
                    vector(names, width, (0.5, 0.0));
                }
            }
        }
        tensors
    }

    /// Writers of GGUF files change some weights of a checkpoint.
    fn as_gguf(&self, tensor: &TinyTensor) -> Vec<f32> {
        let name = &*tensor.names.0;
        match self.family {
            Family::Llama if name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight") => {
                // Pairs that turn together stand side by side: the first half of a head's rows with the second.
                let row = tensor.dims[0];
                let heads = tensor.weights.chunks_exact(row * self.head_dim);
                let pairs = heads.flat_map(|head| {
                    let (first, second) = head.split_at(head.len() / 2);
                    first.chunks_exact(row).zip(second.chunks_exact(row)).flat_map(|(a, b)| [a, b])
                });
                pairs.flatten().copied().collect()
            }
            Family::Gemma3 if name.ends_with("norm.weight") => tensor.weights.iter().map(|w| w + 1.0).collect(),
            _ => tensor.weights.clone(),
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
