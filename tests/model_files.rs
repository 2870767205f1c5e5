//! Fuzz targets of model files, and tiny models that are damaged at random.

#[path = "fuzz/driver.rs"]
mod driver;
#[path = "fuzz/model_files.rs"]
mod model_files;

use model_files::{gguf_header, loads_or_names, safetensors_header};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use starling_gpu::dequant::TensorType;
use starling_gpu::gguf;
use starling_gpu::llama::Family;
use starling_gpu::testing::TinyModel;

#[test]
fn any_bytes_are_a_gguf_file_or_refused() {
    driver::fuzz("gguf_header", gguf_header);
}

#[test]
fn any_bytes_are_a_safetensors_file_or_refused() {
    driver::fuzz("safetensors_header", safetensors_header);
}

fn tiny(family: usize) -> TinyModel {
    let kind = TensorType::F16;
    TinyModel { family: Family::ALL[family], layers: 1, head_dim: 8, feed_forward: 32, kind, ..TinyModel::default() }
}

/// Bytes changed, cut out or put in, and an end cut off.
#[derive(Clone, Debug)]
struct Damage {
    changes: Vec<(Index, u8)>,
    stretch: Option<(Index, u8, bool)>,
    end: Option<Index>,
}

fn damage() -> impl Strategy<Value = Damage> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..4);
    let stretch = prop::option::of((any::<Index>(), any::<u8>(), any::<bool>()));
    let end = prop::option::weighted(0.2, any::<Index>());
    (changes, stretch, end).prop_map(|(changes, stretch, end)| Damage { changes, stretch, end })
}

impl Damage {
    /// Damages what lies before `within`.
    fn of(&self, mut bytes: Vec<u8>, within: usize) -> Vec<u8> {
        for (at, byte) in &self.changes {
            bytes[at.index(within)] = *byte;
        }
        if let Some((at, count, is_cut)) = self.stretch {
            let at = at.index(within);
            let end = (at + usize::from(count)).min(bytes.len());
            let stretch = if is_cut { Vec::new() } else { bytes[at..end].repeat(2) };
            bytes.splice(at..end, stretch);
        }
        let end = self.end.map_or(bytes.len(), |end| end.index(bytes.len()));
        bytes.truncate(end);
        bytes
    }
}

/// Values that a configuration should not have.
fn absurd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_u32..300).prop_map(Value::from),
        prop_oneof![Just(0.0), Just(-1.5), Just(1e300), Just(1e-300)].prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        Just(json!([])),
        Just(json!([1, "full_attention", null])),
        Just(json!({ "rope_type": "yarn", "factor": 0 })),
        Just(json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0 })),
    ]
}

const CONFIG_KEYS: [&str; 24] = [
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "hidden_act",
    "hidden_activation",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attention_bias",
    "partial_rotary_factor",
    "quantization_config",
];

const GGUF_KEYS: [&str; 16] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "expert_count",
    "attention.causal",
];

fn absurd_gguf() -> impl Strategy<Value = gguf::Value> {
    prop_oneof![
        (0_u32..300).prop_map(gguf::Value::U32),
        any::<u32>().prop_map(gguf::Value::U32),
        any::<i64>().prop_map(gguf::Value::I64),
        any::<u64>().prop_map(gguf::Value::U64),
        any::<f32>().prop_map(gguf::Value::F32),
        any::<bool>().prop_map(gguf::Value::Bool),
        ".{0,8}".prop_map(gguf::Value::Str),
        Just(gguf::Value::Array(gguf::Array::U32(vec![1, 2, 3]))),
    ]
}

proptest! {
    #[test]
    fn a_damaged_gguf_file_loads_or_is_refused_by_name(family in 0..4_usize, damage in damage()) {
        let (bytes, header) = tiny(family).writer().to_bytes();
        gguf_header(&damage.of(bytes, header));
    }

    #[test]
    fn a_damaged_safetensors_file_is_read_or_refused_by_name(family in 0..4_usize, damage in damage()) {
        let bytes = tiny(family).folder_writer().weights.to_bytes();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        safetensors_header(&damage.of(bytes, header));
    }

    #[test]
    fn absurd_values_of_a_configuration_are_taken_or_refused_by_name(
        family in 0..4_usize,
        changes in prop::collection::vec((prop::sample::select(&CONFIG_KEYS[..]), absurd()), 1..4),
    ) {
        let mut writer = tiny(family).folder_writer();
        changes.into_iter().for_each(|(key, value)| _ = writer.set(key, value));
        loads_or_names(&writer.folder().expect("the files are sound").into());
    }

    #[test]
    fn absurd_values_of_gguf_keys_are_taken_or_refused_by_name(
        family in 0..4_usize,
        changes in prop::collection::vec((prop::sample::select(&GGUF_KEYS[..]), absurd_gguf()), 1..4),
    ) {
        let tiny = tiny(family);
        let mut writer = tiny.writer();
        changes.into_iter().for_each(|(key, value)| _ = writer.set(&format!("{}.{key}", tiny.family), value));
        gguf_header(&writer.to_bytes().0);
    }
}
