//! Reads a model's configuration: from the keys of a GGUF file, or from `config.json`.

use super::{DIMENSION_MAX, Family, LayerConfig, ModelConfig, Rope, Stretch};
use crate::gguf::{Gguf, Value};
use crate::source::{Folder, Json, ModelError, Source};
use std::fmt;

/// Bounds of what a file may claim beside `DIMENSION_MAX`. Known models stay far below.
const LAYERS_MAX: u32 = 1 << 12;
const CONTEXT_MAX: u32 = 1 << 24;
const VOCABULARY_MAX: u32 = DIMENSION_MAX * 16;

/// What a file that does not say it means, by convention.
const ROPE_BASE_DEFAULT: f32 = 10_000.0;
/// Gemma 3: every sixth layer sees everything, and turns with another base.
const GEMMA_PATTERN_DEFAULT: u32 = 6;
const GEMMA_GLOBAL_BASE_DEFAULT: f32 = 1_000_000.0;
/// Gemma 3 with so many layers (27B) scales scores by hidden size and heads; its GGUF files do not say so.
const GEMMA_27B_LAYERS: usize = 62;

/// One quantity under its two names.
#[derive(Clone, Copy)]
struct Key {
    /// Behind the architecture's name and a dot.
    gguf: &'static str,
    json: &'static str,
}

const fn key(gguf: &'static str, json: &'static str) -> Key {
    Key { gguf, json }
}

const LAYERS: Key = key("block_count", "num_hidden_layers");
const HIDDEN: Key = key("embedding_length", "hidden_size");
const HEADS: Key = key("attention.head_count", "num_attention_heads");
const KV_HEADS: Key = key("attention.head_count_kv", "num_key_value_heads");
const HEAD_DIM: Key = key("attention.key_length", "head_dim");
const FEED_FORWARD: Key = key("feed_forward_length", "intermediate_size");
const CONTEXT: Key = key("context_length", "max_position_embeddings");
const EPSILON: Key = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
const WINDOW: Key = key("attention.sliding_window", "sliding_window");
const PATTERN: Key = key("attention.sliding_window_pattern", "sliding_window_pattern");

/// Where keys are looked up.
#[derive(Clone, Copy)]
enum Keys<'a> {
    Gguf(&'a Gguf, Family),
    Json(&'a Json),
}

impl Keys<'_> {
    fn name(&self, key: Key) -> String {
        match self {
            Self::Gguf(_, family) => format!("{family}.{}", key.gguf),
            Self::Json(_) => key.json.to_string(),
        }
    }

    fn get_u32(&self, key: Key) -> Result<Option<u32>, ModelError> {
        match self {
            Self::Gguf(gguf, _) => gguf.get_u32(&self.name(key)),
            Self::Json(json) => json.get_u32(key.json),
        }
    }

    fn get_f32(&self, key: Key) -> Result<Option<f32>, ModelError> {
        match self {
            Self::Gguf(gguf, _) => gguf.get_f32(&self.name(key)),
            Self::Json(json) => json.get_f32(key.json),
        }
    }

    fn missing(&self, key: Key) -> ModelError {
        match self {
            Self::Gguf(gguf, _) => gguf.missing(&self.name(key)),
            Self::Json(json) => json.missing(key.json),
        }
    }

    fn bad_value(&self, key: Key, value: impl fmt::Display, why: &'static str) -> ModelError {
        match self {
            Self::Gguf(gguf, _) => gguf.bad_value(&self.name(key), value, why),
            Self::Json(json) => json.bad_value(key.json, value, why),
        }
    }

    /// A number above 0 and at most `limit`.
    fn number(&self, key: Key, limit: u32) -> Result<u32, ModelError> {
        match self.get_u32(key)?.ok_or_else(|| self.missing(key))? {
            0 => Err(self.bad_value(key, 0, "it must be above 0")),
            value if value > limit => Err(self.bad_value(key, value, "it is beyond what is supported")),
            value => Ok(value),
        }
    }

    fn dimension(&self, key: Key) -> Result<usize, ModelError> {
        Ok(self.number(key, DIMENSION_MAX)? as usize)
    }

    fn positive(&self, key: Key, default: Option<f32>) -> Result<f32, ModelError> {
        let value = self.get_f32(key)?.or(default).ok_or_else(|| self.missing(key))?;
        match value.is_finite() && value > 0.0 {
            true => Ok(value),
            false => Err(self.bad_value(key, value, "it must be positive and finite")),
        }
    }
}

/// What both kinds of files say under their own names.
struct Sizes {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    feed_forward: usize,
    context: u32,
    norm_epsilon: f32,
}

impl Sizes {
    fn read(keys: Keys<'_>, family: Family) -> Result<Self, ModelError> {
        let hidden = keys.dimension(HIDDEN)?;
        let heads = keys.dimension(HEADS)?;
        let kv_heads = match keys.get_u32(KV_HEADS)? {
            Some(_) => keys.dimension(KV_HEADS)?,
            None => heads,
        };
        if heads % kv_heads != 0 {
            return Err(keys.bad_value(KV_HEADS, kv_heads, "it does not divide the number of heads"));
        }
        let may_lack = matches!(keys, Keys::Gguf(..)) || matches!(family, Family::Llama | Family::Qwen2);
        let head_dim = match keys.get_u32(HEAD_DIM)? {
            Some(_) => keys.dimension(HEAD_DIM)?,
            None if !may_lack => return Err(keys.missing(HEAD_DIM)),
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(keys.bad_value(HEADS, heads, "it does not divide the embedding length")),
        };
        if head_dim % 2 != 0 {
            return Err(keys.bad_value(HEAD_DIM, head_dim, "heads of odd length cannot be rotated in pairs"));
        }
        Ok(Self {
            layers: keys.number(LAYERS, LAYERS_MAX)? as usize,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward: keys.dimension(FEED_FORWARD)?,
            context: keys.number(CONTEXT, CONTEXT_MAX)?,
            norm_epsilon: keys.positive(EPSILON, None)?,
        })
    }

    fn score_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Layers that all see everything.
    fn plain_layers(&self) -> Vec<LayerConfig> {
        vec![LayerConfig { window: None, rope: 0 }; self.layers]
    }
}

/// Gemma's layers: those with a window turn by the second rope.
fn windowed(layers: impl Iterator<Item = bool>, window: usize) -> Vec<LayerConfig> {
    layers
        .map(|is_windowed| match is_windowed {
            true => LayerConfig { window: Some(window), rope: 1 },
            false => LayerConfig { window: None, rope: 0 },
        })
        .collect()
}

/// Every `pattern`-th layer sees everything.
fn by_pattern(keys: Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let pattern = match keys.get_u32(PATTERN)? {
        Some(_) => keys.number(PATTERN, LAYERS_MAX)?,
        None => GEMMA_PATTERN_DEFAULT,
    };
    Ok((1..=layers).map(|layer| !layer.is_multiple_of(pattern as usize)).collect())
}

pub(super) fn read(source: &Source) -> Result<ModelConfig, ModelError> {
    match source {
        Source::Gguf(gguf) => from_gguf(gguf),
        Source::Folder(folder) => from_folder(folder),
    }
}

fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, ModelError> {
    let key = "general.architecture";
    let name = gguf.get_str(key)?.ok_or_else(|| gguf.missing(key))?;
    let family = Family::ALL.into_iter().find(|family| family.to_string() == name);
    let family = family.ok_or_else(|| ModelError::UnsupportedArchitecture {
        file: gguf.path().to_path_buf(),
        architecture: name.to_string(),
        supported: Family::ALL.map(|family| family.to_string()).join(", "),
    })?;
    let keys = Keys::Gguf(gguf, family);
    let vocabulary = vocabulary_of(gguf)?;
    let sizes = Sizes::read(keys, family)?;
    refuse_gguf_variants(gguf, family, &sizes)?;
    let base_key = self::key("rope.freq_base", "");
    let mut score_scale = sizes.score_scale();
    let (ropes, layers) = match family {
        Family::Gemma3 => {
            if sizes.layers == GEMMA_27B_LAYERS {
                score_scale = 1.0 / ((sizes.hidden / sizes.heads) as f32).sqrt();
            }
            let window = keys.number(WINDOW, CONTEXT_MAX)? as usize;
            let global = keys.positive(base_key, Some(GEMMA_GLOBAL_BASE_DEFAULT))?;
            let local = keys.positive(self::key("rope.freq_base_swa", ""), Some(ROPE_BASE_DEFAULT))?;
            let layers = windowed(by_pattern(keys, sizes.layers)?.into_iter(), window);
            (vec![Rope::plain(global), Rope::plain(local)], layers)
        }
        Family::Llama | Family::Qwen2 | Family::Qwen3 => {
            let base = keys.positive(base_key, Some(ROPE_BASE_DEFAULT))?;
            (vec![Rope::plain(base)], sizes.plain_layers())
        }
    };
    let tied = gguf.tensor("output.weight").is_none();
    Ok(config(family, sizes, Rest { vocabulary, tied, score_scale, ropes, layers }))
}

/// The file's only sure word on its vocabulary is the embedding's shape.
fn vocabulary_of(gguf: &Gguf) -> Result<u32, ModelError> {
    let tensor = "token_embd.weight";
    let (file, tensor) = (gguf.path().to_path_buf(), tensor.to_string());
    let Some(entry) = gguf.tensor(&tensor) else {
        return Err(ModelError::MissingTensor { file, tensor });
    };
    let vocabulary = entry.dims.get(1).and_then(|&rows| u32::try_from(rows).ok());
    vocabulary.filter(|vocabulary| (1..=VOCABULARY_MAX).contains(vocabulary)).ok_or_else(|| {
        let wanted = vec![entry.dims.first().copied().unwrap_or(1), 1];
        ModelError::WrongShape { file, tensor, found: entry.dims.clone(), wanted }
    })
}

/// Features under the same architecture's name that would change results if they were ignored.
fn refuse_gguf_variants(gguf: &Gguf, family: Family, sizes: &Sizes) -> Result<(), ModelError> {
    let named = |key: &str| format!("{family}.{key}");
    for key in ["attention.value_length", "rope.dimension_count"].map(named) {
        if let Some(other) = gguf.get_u32(&key)?.filter(|&other| other as usize != sizes.head_dim) {
            return Err(gguf.bad_value(&key, other, "only the length of a head is supported"));
        }
    }
    let scaling = named("rope.scaling.type");
    if let Some(kind) = gguf.get_str(&scaling)?.filter(|&kind| kind != "none") {
        return Err(gguf.bad_value(&scaling, kind, "scaled rotary embeddings are not supported"));
    }
    let experts = named("expert_count");
    if let Some(count) = gguf.get_u32(&experts)?.filter(|&count| count > 0) {
        return Err(gguf.bad_value(&experts, count, "mixtures of experts are not supported"));
    }
    let window = named(WINDOW.gguf);
    if let Some(window_tokens) = gguf.get_u32(&window)?.filter(|_| family != Family::Gemma3) {
        return Err(gguf.bad_value(&window, window_tokens, "windows are not supported for this architecture"));
    }
    for (key, why) in [
        ("rope.scale_linear", "scaled rotary embeddings are not supported"),
        ("attn_logit_softcapping", "capped scores are not supported"),
        ("final_logit_softcapping", "capped logits are not supported"),
        ("attention.scale", "scores of another scale are not supported"),
    ] {
        if let Some(value) = gguf.get(&named(key)) {
            return Err(gguf.bad_value(&named(key), format!("{value:?}"), why));
        }
    }
    let causal = named("attention.causal");
    match gguf.get(&causal) {
        None | Some(Value::Bool(true)) => Ok(()),
        Some(other) => Err(gguf.bad_value(&causal, format!("{other:?}"), "only causal attention is supported")),
    }
}

fn from_folder(folder: &Folder) -> Result<ModelConfig, ModelError> {
    let json = folder.config();
    let name = json.get_str("model_type")?.ok_or_else(|| json.missing("model_type"))?;
    let family = Family::ALL.into_iter().find(|family| family.model_type() == name);
    let family = family.ok_or_else(|| ModelError::UnsupportedArchitecture {
        file: json.file().to_path_buf(),
        architecture: name.to_string(),
        supported: Family::ALL.map(Family::model_type).join(", "),
    })?;
    refuse_json_variants(json, family)?;
    let keys = Keys::Json(json);
    let sizes = Sizes::read(keys, family)?;
    let vocabulary = keys.number(key("", "vocab_size"), VOCABULARY_MAX)?;
    let mut score_scale = sizes.score_scale();
    let (ropes, layers) = match family {
        Family::Gemma3 => {
            let scalar = key("", "query_pre_attn_scalar");
            score_scale = 1.0 / keys.positive(scalar, Some(sizes.head_dim as f32))?.sqrt();
            let window = keys.number(WINDOW, CONTEXT_MAX)? as usize;
            let layers = windowed(layer_types(json, sizes.layers)?.into_iter(), window);
            (gemma_ropes(json)?, layers)
        }
        Family::Llama | Family::Qwen2 | Family::Qwen3 => (vec![rope(json)?], sizes.plain_layers()),
    };
    // The default differs between the classes that write these files.
    let tied = json.get_bool("tie_word_embeddings")?.unwrap_or(family == Family::Gemma3);
    Ok(config(family, sizes, Rest { vocabulary, tied, score_scale, ropes, layers }))
}

/// As `refuse_gguf_variants`.
fn refuse_json_variants(json: &Json, family: Family) -> Result<(), ModelError> {
    let (activation_key, activation) = match family {
        Family::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
        Family::Llama | Family::Qwen2 | Family::Qwen3 => ("hidden_act", "silu"),
    };
    if let Some(other) = json.get_str(activation_key)?.filter(|&other| other != activation) {
        return Err(json.bad_value(activation_key, other, "this activation is not supported"));
    }
    for (key, why) in [
        ("attention_bias", "biases are not supported for this architecture"),
        ("mlp_bias", "biases are not supported for this architecture"),
        ("use_sliding_window", "windows are not supported for this architecture"),
        ("use_bidirectional_attention", "only causal attention is supported"),
    ] {
        if json.get_bool(key)? == Some(true) {
            return Err(json.bad_value(key, true, why));
        }
    }
    for (key, why) in [
        ("attn_logit_softcapping", "capped scores are not supported"),
        ("final_logit_softcapping", "capped logits are not supported"),
        ("quantization_config", "only plain weights are supported"),
        ("num_local_experts", "mixtures of experts are not supported"),
        ("num_experts", "mixtures of experts are not supported"),
    ] {
        if let Some(value) = json.get(key) {
            return Err(json.bad_value(key, value, why));
        }
    }
    match json.get_f32("partial_rotary_factor")?.filter(|&part| part != 1.0) {
        Some(part) => Err(json.bad_value("partial_rotary_factor", part, "only whole heads are rotated")),
        None => Ok(()),
    }
}

/// Which layers have a window.
fn layer_types(json: &Json, layers: usize) -> Result<Vec<bool>, ModelError> {
    let key = "layer_types";
    let Some(types) = json.get_array(key)? else {
        return by_pattern(Keys::Json(json), layers);
    };
    if types.len() != layers {
        return Err(json.bad_value(key, format!("of {} layers", types.len()), "the model has another number"));
    }
    let is_windowed = |kind: &serde_json::Value| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(json.bad_value(key, kind, "this kind of layer is not supported")),
    };
    types.iter().map(is_windowed).collect()
}

/// Newer files have everything about rotation in `rope_parameters`, older ones in two keys.
fn rope(json: &Json) -> Result<Rope, ModelError> {
    let base = ("rope_theta", ROPE_BASE_DEFAULT);
    match json.get_object("rope_parameters")? {
        Some(parameters) => Ok(Rope { base: rope_base(&parameters, base)?, stretch: stretch(&parameters)? }),
        None => {
            let scaling = json.get_object("rope_scaling")?;
            let stretch = scaling.as_ref().map(stretch).transpose()?.flatten();
            Ok(Rope { base: rope_base(json, base)?, stretch })
        }
    }
}

/// The rope of layers that see everything, and that of layers with a window.
fn gemma_ropes(json: &Json) -> Result<Vec<Rope>, ModelError> {
    let Some(parameters) = json.get_object("rope_parameters")? else {
        if let Some(scaling) = json.get("rope_scaling") {
            return Err(json.bad_value("rope_scaling", scaling, "scaled rotary embeddings are not supported"));
        }
        let global = rope_base(json, ("rope_theta", GEMMA_GLOBAL_BASE_DEFAULT))?;
        let local = rope_base(json, ("rope_local_base_freq", ROPE_BASE_DEFAULT))?;
        return Ok(vec![Rope::plain(global), Rope::plain(local)]);
    };
    let of = |kind: &str, default: f32| -> Result<Rope, ModelError> {
        let own = parameters.get_object(kind)?.ok_or_else(|| parameters.missing(kind))?;
        match stretch(&own)? {
            None => Ok(Rope::plain(rope_base(&own, ("rope_theta", default))?)),
            Some(_) => Err(own.bad_value("rope_type", "llama3", "it is not supported for this architecture")),
        }
    };
    Ok(vec![of("full_attention", GEMMA_GLOBAL_BASE_DEFAULT)?, of("sliding_attention", ROPE_BASE_DEFAULT)?])
}

fn rope_base(json: &Json, (name, default): (&'static str, f32)) -> Result<f32, ModelError> {
    Keys::Json(json).positive(key("", name), Some(default))
}

fn stretch(json: &Json) -> Result<Option<Stretch>, ModelError> {
    // The older name comes second.
    let key = if json.get("rope_type").is_some() { "rope_type" } else { "type" };
    match json.get_str(key)? {
        None | Some("default") => Ok(None),
        Some("llama3") => {
            let positive = |name: &'static str| Keys::Json(json).positive(self::key("", name), None);
            let stretch = Stretch {
                factor: positive("factor")?,
                low: positive("low_freq_factor")?,
                high: positive("high_freq_factor")?,
                context: positive("original_max_position_embeddings")?,
            };
            match stretch.low < stretch.high {
                true => Ok(Some(stretch)),
                false => Err(json.bad_value("high_freq_factor", stretch.high, "it must be above low_freq_factor")),
            }
        }
        Some(other) => Err(json.bad_value(key, other, "this scaling of rotary embeddings is not supported")),
    }
}

/// What is read in its own way from each kind of file.
struct Rest {
    vocabulary: u32,
    tied: bool,
    score_scale: f32,
    ropes: Vec<Rope>,
    layers: Vec<LayerConfig>,
}

fn config(family: Family, sizes: Sizes, rest: Rest) -> ModelConfig {
    ModelConfig {
        family,
        hidden: sizes.hidden,
        heads: sizes.heads,
        kv_heads: sizes.kv_heads,
        head_dim: sizes.head_dim,
        feed_forward: sizes.feed_forward,
        vocabulary: rest.vocabulary,
        context: sizes.context,
        norm_epsilon: sizes.norm_epsilon,
        score_scale: rest.score_scale,
        tied: rest.tied,
        ropes: rest.ropes,
        layers: rest.layers,
    }
}
