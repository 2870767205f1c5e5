//! Models of the Llama family: their configuration and weights, as f32.

use crate::dequant::dequantise;
use crate::gguf::{Gguf, ModelError, Value};
use crate::kv::BlockShape;
use crate::linear::Linear;
use std::collections::BTreeSet;

#[cfg(test)]
mod tests;

/// Bounds of what a file may claim, so that no product of them overflows. Known models stay far below.
const DIMENSION_MAX: u32 = 1 << 20;
const CONTEXT_MAX: u32 = 1 << 24;
/// What a file without `llama.rope.freq_base` means, by the format's convention.
const ROPE_BASE_DEFAULT: f32 = 10_000.0;

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
    pub vocabulary: u32,
    /// Positions that the model was made for.
    pub context: u32,
    pub rope_base: f32,
    pub norm_epsilon: f32,
}

impl ModelConfig {
    /// Reads and checks a file's configuration.
    ///
    /// # Errors
    /// A key is missing or has a value that cannot be, the architecture is another, or a feature is not supported.
    pub fn read(gguf: &Gguf) -> Result<Self, ModelError> {
        let architecture_key = "general.architecture";
        let architecture = gguf.get_str(architecture_key)?.ok_or_else(|| gguf.missing(architecture_key))?;
        if architecture != "llama" {
            let (file, architecture) = (gguf.path().to_path_buf(), architecture.to_string());
            return Err(ModelError::UnsupportedArchitecture { file, architecture });
        }
        let embedding = "token_embd.weight";
        let entry = gguf.tensor(embedding).ok_or_else(|| missing_tensor(gguf, embedding))?;
        let vocabulary = entry.dims.get(1).copied().unwrap_or(0);
        let hidden = dimension(gguf, "llama.embedding_length")?;
        let heads = dimension(gguf, "llama.attention.head_count")?;
        let kv_heads = match gguf.get("llama.attention.head_count_kv") {
            Some(_) => dimension(gguf, "llama.attention.head_count_kv")?,
            None => heads,
        };
        if heads % kv_heads != 0 {
            let why = "it does not divide the number of heads";
            return Err(gguf.bad_value("llama.attention.head_count_kv", kv_heads, why));
        }
        let head_dim = head_dim(gguf, hidden, heads)?;
        refuse_variants(gguf)?;
        let config = Self {
            layers: dimension(gguf, "llama.block_count")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: dimension(gguf, "llama.feed_forward_length")?,
            vocabulary: u32::try_from(vocabulary)
                .ok()
                .filter(|&v| (1..=DIMENSION_MAX * 16).contains(&v))
                .ok_or_else(|| wrong_shape(gguf, embedding, &entry.dims, &[hidden, vocabulary.max(1)]))?,
            context: number(gguf, "llama.context_length", CONTEXT_MAX)?,
            rope_base: positive(gguf, "llama.rope.freq_base", Some(ROPE_BASE_DEFAULT))?,
            norm_epsilon: positive(gguf, "llama.attention.layer_norm_rms_epsilon", None)?,
        };
        Ok(config)
    }

    /// How KV lies in blocks of so many tokens.
    pub fn block_shape(&self, block_tokens: u32) -> BlockShape {
        BlockShape { kv_heads: self.kv_heads, head_dim: self.head_dim, block_tokens: block_tokens as usize }
    }

    /// Bytes of memory that a block of so many tokens takes over all layers.
    pub fn block_bytes(&self, block_tokens: u32) -> u64 {
        self.block_shape(block_tokens).block_bytes(self.layers).unwrap_or(u64::MAX)
    }
}

fn number(gguf: &Gguf, key: &str, limit: u32) -> Result<u32, ModelError> {
    match gguf.get_u32(key)?.ok_or_else(|| gguf.missing(key))? {
        0 => Err(gguf.bad_value(key, 0, "it must be above 0")),
        value if value > limit => Err(gguf.bad_value(key, value, "it is beyond what is supported")),
        value => Ok(value),
    }
}

fn dimension(gguf: &Gguf, key: &str) -> Result<usize, ModelError> {
    Ok(number(gguf, key, DIMENSION_MAX)? as usize)
}

fn positive(gguf: &Gguf, key: &str, default: Option<f32>) -> Result<f32, ModelError> {
    let value = gguf.get_f32(key)?.or(default).ok_or_else(|| gguf.missing(key))?;
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(gguf.bad_value(key, value, "it must be positive and finite")),
    }
}

fn head_dim(gguf: &Gguf, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let key = "llama.attention.key_length";
    let head_dim = match gguf.get(key) {
        Some(_) => dimension(gguf, key)?,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let why = "it does not divide the embedding length";
            return Err(gguf.bad_value("llama.attention.head_count", heads, why));
        }
    };
    if head_dim % 2 != 0 {
        return Err(gguf.bad_value(key, head_dim, "heads of odd length cannot be rotated in pairs"));
    }
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(other) = gguf.get_u32(key)?.filter(|&other| other as usize != head_dim) {
            return Err(gguf.bad_value(key, other, "only the length of a head is supported"));
        }
    }
    Ok(head_dim)
}

/// Features under the same architecture name that would change results if they were ignored.
fn refuse_variants(gguf: &Gguf) -> Result<(), ModelError> {
    let scaling = "llama.rope.scaling.type";
    if let Some(kind) = gguf.get_str(scaling)?.filter(|&kind| kind != "none") {
        return Err(gguf.bad_value(scaling, kind, "scaled rotary embeddings are not supported"));
    }
    let experts = "llama.expert_count";
    if let Some(count) = gguf.get_u32(experts)?.filter(|&count| count > 0) {
        return Err(gguf.bad_value(experts, count, "mixtures of experts are not supported"));
    }
    let causal = "llama.attention.causal";
    match gguf.get(causal) {
        None | Some(Value::Bool(true)) => Ok(()),
        Some(other) => Err(gguf.bad_value(causal, format!("{other:?}"), "only causal attention is supported")),
    }
}

fn missing_tensor(gguf: &Gguf, tensor: &str) -> ModelError {
    ModelError::MissingTensor { file: gguf.path().to_path_buf(), tensor: tensor.to_string() }
}

fn wrong_shape(gguf: &Gguf, tensor: &str, found: &[usize], wanted: &[usize]) -> ModelError {
    ModelError::WrongShape {
        file: gguf.path().to_path_buf(),
        tensor: tensor.to_string(),
        found: found.to_vec(),
        wanted: wanted.to_vec(),
    }
}

/// One transformer layer. Projections that read the same input are one matrix, their outputs one after the other.
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Queries, keys, values.
    pub qkv: Linear,
    pub attention_output: Linear,
    pub feed_forward_norm: Vec<f32>,
    /// Gates, then what they are multiplied with.
    pub gate_up: Linear,
    pub down: Linear,
}

/// A model in memory: read-only, and shared by the ranks of a process.
pub struct Model {
    config: ModelConfig,
    pub(crate) embedding: Linear,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// `None` if the embedding is the output projection too.
    output: Option<Linear>,
    /// Angle by which each pair of a head turns from one position to the next.
    pub(crate) turns_per_position: Vec<f64>,
}

impl Model {
    /// Loads a model's weights, converted to f32.
    ///
    /// # Errors
    /// The file's configuration or tensors are not those of a supported model.
    ///
    /// # Cost
    /// Reads the whole file and allocates four bytes a weight (`Model::bytes_needed`).
    pub fn load(gguf: &Gguf) -> Result<Self, ModelError> {
        let config = ModelConfig::read(gguf)?;
        let mut loader = Loader { gguf, taken: BTreeSet::new() };
        // Everything is looked up and checked before the first large allocation.
        loader.check_all(&config)?;
        let ModelConfig { hidden, heads, kv_heads, head_dim, feed_forward, .. } = config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let vocabulary = config.vocabulary as usize;
        let mut layers = Vec::new();
        for layer in 0..config.layers {
            let named = |part: &str| format!("blk.{layer}.{part}.weight");
            let attention = [(named("attn_q"), q), (named("attn_k"), kv), (named("attn_v"), kv)];
            let gated = [(named("ffn_gate"), feed_forward), (named("ffn_up"), feed_forward)];
            layers.push(Layer {
                attention_norm: loader.vector(&named("attn_norm")),
                qkv: loader.linear(hidden, &attention),
                attention_output: loader.linear(q, &[(named("attn_output"), hidden)]),
                feed_forward_norm: loader.vector(&named("ffn_norm")),
                gate_up: loader.linear(hidden, &gated),
                down: loader.linear(feed_forward, &[(named("ffn_down"), hidden)]),
            });
        }
        let matrix = |name: &str| loader.linear(hidden, &[(name.to_string(), vocabulary)]);
        let turns =
            (0..head_dim / 2).map(|pair| f64::from(config.rope_base).powf(-2.0 * pair as f64 / head_dim as f64));
        let factors = gguf.tensor(ROPE_FACTORS).map(|_| loader.vector(ROPE_FACTORS));
        let factor = |pair: usize| factors.as_ref().map_or(1.0, |factors| f64::from(factors[pair]));
        Ok(Self {
            embedding: matrix("token_embd.weight"),
            layers,
            output_norm: loader.vector("output_norm.weight"),
            output: gguf.tensor(OUTPUT).map(|_| matrix(OUTPUT)),
            turns_per_position: turns.enumerate().map(|(pair, turn)| turn / factor(pair)).collect(),
            config,
        })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes that the weights of a file will take once loaded.
    pub fn bytes_needed(gguf: &Gguf) -> u64 {
        let weights = gguf.tensors().map(|(_, entry)| entry.dims.iter().product::<usize>() as u64);
        weights.sum::<u64>().saturating_mul(size_of::<f32>() as u64)
    }

    /// Bytes of memory that a block of so many tokens takes over all layers.
    pub fn block_bytes(&self, block_tokens: u32) -> u64 {
        self.config.block_bytes(block_tokens)
    }

    pub(crate) fn output(&self) -> &Linear {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

const OUTPUT: &str = "output.weight";
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Invariant: `check_all` succeeded before anything is read.
struct Loader<'a> {
    gguf: &'a Gguf,
    taken: BTreeSet<String>,
}

impl Loader<'_> {
    fn check_all(&mut self, config: &ModelConfig) -> Result<(), ModelError> {
        let ModelConfig { hidden, heads, kv_heads, head_dim, feed_forward, .. } = *config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let vocabulary = config.vocabulary as usize;
        self.check("token_embd.weight", &[hidden, vocabulary])?;
        self.check("output_norm.weight", &[hidden])?;
        for (name, dims) in [(OUTPUT, &[hidden, vocabulary][..]), (ROPE_FACTORS, &[head_dim / 2])] {
            if self.gguf.tensor(name).is_some() {
                self.check(name, dims)?;
            }
        }
        for layer in 0..config.layers {
            for (part, dims) in [
                ("attn_norm", &[hidden][..]),
                ("attn_q", &[hidden, q]),
                ("attn_k", &[hidden, kv]),
                ("attn_v", &[hidden, kv]),
                ("attn_output", &[q, hidden]),
                ("ffn_norm", &[hidden]),
                ("ffn_gate", &[hidden, feed_forward]),
                ("ffn_up", &[hidden, feed_forward]),
                ("ffn_down", &[feed_forward, hidden]),
            ] {
                self.check(&format!("blk.{layer}.{part}.weight"), dims)?;
            }
        }
        // A tensor that is not read would be a part of the model that is left out: a bias, say.
        match self.gguf.tensors().find(|(name, _)| !self.taken.contains(*name)) {
            Some((name, _)) => {
                Err(ModelError::UnexpectedTensor { file: self.gguf.path().to_path_buf(), tensor: name.to_string() })
            }
            None => Ok(()),
        }
    }

    fn check(&mut self, name: &str, dims: &[usize]) -> Result<(), ModelError> {
        let entry = self.gguf.tensor(name).ok_or_else(|| missing_tensor(self.gguf, name))?;
        if entry.dims != dims {
            return Err(wrong_shape(self.gguf, name, &entry.dims, dims));
        }
        self.taken.insert(name.to_string());
        Ok(())
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        let entry = self.gguf.tensor(name).expect("checked");
        let mut out = vec![0.0; entry.dims[0]];
        dequantise(entry.kind, self.gguf.tensor_bytes(entry), &mut out);
        out
    }

    /// Stacks the outputs of matrices that read the same inputs.
    fn linear(&self, inputs: usize, parts: &[(String, usize)]) -> Linear {
        let rows = parts.iter().flat_map(|(name, outputs)| {
            let entry = self.gguf.tensor(name).expect("checked");
            let row_bytes = inputs / entry.kind.block_weights() * entry.kind.block_bytes();
            let bytes = self.gguf.tensor_bytes(entry);
            (0..*outputs).map(move |row| (entry.kind, &bytes[row * row_bytes..][..row_bytes]))
        });
        let rows: Vec<_> = rows.collect();
        Linear::new(inputs, rows.len(), |output, row| {
            let (kind, bytes) = rows[output];
            dequantise(kind, bytes, row);
        })
    }
}
