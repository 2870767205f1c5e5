//! Models of the Llama kind: decoders with grouped heads, rotary positions, norms by the root mean square and a gated
//! feed-forward network. Their configuration and weights, as f32.

use crate::kv::BlockShape;
use crate::source::{ModelError, Source};
use crate::weights::{Arithmetic, Linear};
use std::fmt;

mod config;
mod life_cycles;
mod loader;
#[cfg(test)]
mod tests;

pub use life_cycles::LayerGroup;
use loader::Loader;

/// Bound of what a file may claim, so that no product of sizes overflows. Known models stay far below.
const DIMENSION_MAX: u32 = 1 << 20;

/// Architectures of this kind. They differ in the parts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Qwen2,
    Qwen3,
    /// The text models of Gemma 3.
    Gemma3,
}

impl Family {
    pub const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    /// Its name in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3_text",
        }
    }

    /// Queries, keys and values have biases.
    pub(crate) fn has_biases(self) -> bool {
        self == Self::Qwen2
    }

    /// Each head's queries and keys are normed.
    pub(crate) fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    /// What a half of a layer adds to the residual stream is normed.
    pub(crate) fn has_post_norms(self) -> bool {
        self == Self::Gemma3
    }

    /// The gate is a GELU, in the form with tanh; else a SiLU.
    pub(crate) fn has_gelu(self) -> bool {
        self == Self::Gemma3
    }
}

/// The name in `general.architecture` of GGUF files.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        })
    }
}

/// How heads turn with the position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    pub base: f32,
    /// `None`: angles as the base says.
    pub stretch: Option<Stretch>,
}

impl Rope {
    pub(crate) fn plain(base: f32) -> Self {
        Self { base, stretch: None }
    }

    /// Angle by which each pair of a head turns from one position to the next.
    fn turns_per_position(&self, head_dim: usize) -> Vec<f64> {
        let turn = |pair: usize| f64::from(self.base).powf(-2.0 * pair as f64 / head_dim as f64);
        let turns = (0..head_dim / 2).map(turn);
        turns.map(|turn| self.stretch.map_or(turn, |stretch| stretch.slowed(turn))).collect()
    }
}

/// Slows pairs that turn less than a few times within the context the model was first made for.
///
/// # Source
/// The scaling `llama3` of the Transformers library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    pub factor: f32,
    /// Pairs that turn less often than this within `context` are slowed by `factor`.
    pub low: f32,
    /// Pairs that turn more often than this are left alone; in between it is a mixture.
    pub high: f32,
    pub context: f32,
}

impl Stretch {
    fn slowed(&self, turn: f64) -> f64 {
        let [factor, low, high, context] = [self.factor, self.low, self.high, self.context].map(f64::from);
        let turns_in_context = context * turn / std::f64::consts::TAU;
        let kept = ((turns_in_context - low) / (high - low)).clamp(0.0, 1.0);
        turn * kept + turn / factor * (1.0 - kept)
    }
}

/// How one layer attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Positions that a query sees, its own among them; `None`: all before it.
    pub window: Option<usize>,
    /// Which of the model's ropes.
    pub rope: usize,
}

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub feed_forward: usize,
    pub vocabulary: u32,
    /// Positions that the model was made for.
    pub context: u32,
    pub norm_epsilon: f32,
    /// What the scalar product of a query and a key is multiplied with.
    pub score_scale: f32,
    /// Whether the embedding is the output projection too.
    pub tied: bool,
    pub ropes: Vec<Rope>,
    pub layers: Vec<LayerConfig>,
}

impl ModelConfig {
    /// Reads and checks a model's configuration.
    ///
    /// # Errors
    /// A key is missing or has a value that cannot be, the architecture is another, or a feature is not supported.
    pub fn read(source: &Source) -> Result<Self, ModelError> {
        config::read(source)
    }

    /// What embeddings are multiplied with.
    pub(crate) fn embedding_scale(&self) -> Option<f32> {
        (self.family == Family::Gemma3).then(|| (self.hidden as f32).sqrt())
    }

    /// How KV lies in blocks of so many tokens.
    pub fn block_shape(&self, block_tokens: u32) -> BlockShape {
        BlockShape { kv_heads: self.kv_heads, head_dim: self.head_dim, block_tokens: block_tokens as usize }
    }

    /// Bytes of memory that a block of so many tokens takes over all layers.
    pub fn block_bytes(&self, arithmetic: Arithmetic, block_tokens: u32) -> u64 {
        let shape = self.block_shape(block_tokens);
        shape.block_bytes(self.layers.len(), arithmetic.kv_number_bytes()).unwrap_or(u64::MAX)
    }
}

/// One transformer layer. Projections that read the same input are one matrix, their outputs one after the other.
pub(crate) struct Layer {
    pub attention: LayerConfig,
    pub attention_norm: Vec<f32>,
    /// Queries, keys, values. Pairs that turn together are the first half of a head with the second.
    pub qkv: Linear,
    pub qkv_bias: Option<Vec<f32>>,
    pub head_norms: Option<HeadNorms>,
    pub attention_output: Linear,
    pub post_attention_norm: Option<Vec<f32>>,
    pub feed_forward_norm: Vec<f32>,
    /// Gates, then what they are multiplied with.
    pub gate_up: Linear,
    pub down: Linear,
    pub post_feed_forward_norm: Option<Vec<f32>>,
}

/// Norms of each head, applied before it turns.
pub(crate) struct HeadNorms {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
}

/// A model in memory: read-only, and shared by the ranks of a process.
pub struct Model {
    config: ModelConfig,
    arithmetic: Arithmetic,
    pub(crate) embedding: Linear,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// `None` if the embedding is the output projection too.
    output: Option<Linear>,
    /// For each rope, the angle by which each pair of a head turns from one position to the next.
    pub(crate) turns_per_position: Vec<Vec<f64>>,
}

impl Model {
    /// Loads a model's weights, converted to what the arithmetic computes with.
    ///
    /// # Errors
    /// The configuration or the tensors are not those of a supported model.
    ///
    /// # Cost
    /// Reads all weights and allocates `Model::bytes`: four bytes a weight, or about as much as the file has.
    pub fn load(source: &Source, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let config = ModelConfig::read(source)?;
        let loader = Loader::check(source, &config, arithmetic)?;
        let mut turns_per_position: Vec<_> =
            config.ropes.iter().map(|rope| rope.turns_per_position(config.head_dim)).collect();
        for (pair, factor) in loader.rope_factors().into_iter().flatten().enumerate() {
            turns_per_position.iter_mut().for_each(|turns| turns[pair] /= f64::from(factor));
        }
        Ok(Self {
            embedding: loader.embedding(),
            layers: (0..config.layers.len()).map(|layer| loader.layer(layer)).collect(),
            output_norm: loader.output_norm(),
            output: loader.output(),
            turns_per_position,
            config,
            arithmetic,
        })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Bytes of the weights of all linear layers.
    pub fn bytes(&self) -> usize {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down].map(Linear::bytes));
        self.embedding.bytes() + self.output.as_ref().map_or(0, Linear::bytes) + layers.sum::<usize>()
    }

    /// Bytes of memory that a block of so many tokens takes over all layers.
    pub fn block_bytes(&self, block_tokens: u32) -> u64 {
        self.config.block_bytes(self.arithmetic, block_tokens)
    }

    pub(crate) fn output(&self) -> &Linear {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}
