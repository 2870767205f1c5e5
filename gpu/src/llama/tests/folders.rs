//! Folders: what their configuration means, and what is refused.

use super::*;
use crate::testing::FolderWriter;
use serde_json::{Value, json};

fn of(family: Family) -> FolderWriter {
    TinyModel { family, kind: TensorType::F32, ..TinyModel::default() }.folder_writer()
}

fn loaded(writer: &FolderWriter) -> Result<Model, ModelError> {
    Model::load(&writer.folder().expect("sound files").into(), Arithmetic::Exact)
}

fn config(writer: &FolderWriter) -> ModelConfig {
    ModelConfig::read(&writer.folder().expect("sound files").into()).unwrap()
}

fn refusal(family: Family, change: impl FnOnce(&mut FolderWriter) -> &mut FolderWriter) -> String {
    let mut writer = of(family);
    change(&mut writer);
    loaded(&writer).err().expect("refused").to_string()
}

#[test]
fn a_folder_has_the_configuration_of_the_gguf_file_with_the_same_model() {
    for family in Family::ALL {
        for tied in [true, false] {
            let tiny = TinyModel { family, tied, kind: TensorType::F32, layers: 5, pattern: 3, ..TinyModel::default() };
            let of_file = ModelConfig::read(&tiny.gguf().into()).unwrap();
            assert_eq!(config(&tiny.folder_writer()), of_file, "{family}");
        }
    }
    let gemma = config(&of(Family::Gemma3));
    assert_eq!(gemma.layers, [LayerConfig { window: Some(24), rope: 1 }, LayerConfig { window: None, rope: 0 }]);
    assert_eq!(gemma.ropes, [Rope::plain(1e6), Rope::plain(1e4)]);
}

#[test]
fn newer_names_of_a_configuration_mean_the_same() {
    let mut writer = of(Family::Qwen3);
    writer.unset("rope_theta").set("rope_parameters", json!({ "rope_type": "default", "rope_theta": 1e6 }));
    assert_eq!(config(&writer), config(&of(Family::Qwen3)));
    let mut writer = of(Family::Gemma3);
    writer.unset("rope_theta").unset("rope_local_base_freq").unset("sliding_window_pattern");
    writer.set("layer_types", json!(["sliding_attention", "full_attention"])).set(
        "rope_parameters",
        json!({
            "full_attention": { "rope_type": "default", "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        }),
    );
    assert_eq!(config(&writer), config(&of(Family::Gemma3)));
}

#[test]
fn what_a_folder_does_not_say_has_the_meaning_of_the_classes_that_write_it() {
    let mut writer = of(Family::Llama);
    for key in ["rope_theta", "rope_scaling", "head_dim", "tie_word_embeddings"] {
        writer.unset(key);
    }
    assert_eq!(config(&writer), config(&of(Family::Llama)));
    let mut writer = of(Family::Gemma3);
    for key in ["rope_theta", "rope_local_base_freq", "sliding_window_pattern", "tie_word_embeddings"] {
        writer.unset(key);
    }
    let gemma = config(&writer);
    assert!(gemma.tied && gemma.layers.iter().all(|layer| layer.window == Some(24)), "every sixth sees everything");
    assert_eq!(gemma.ropes, [Rope::plain(1e6), Rope::plain(1e4)]);
    writer.set("query_pre_attn_scalar", json!(64));
    assert_eq!(config(&writer).score_scale, 0.125);
    assert!(refusal(Family::Qwen3, |w| w.unset("head_dim")).contains("key head_dim is missing"));
}

#[test]
fn the_scaling_of_llama_3_slows_pairs_that_turn_seldom() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    });
    let mut writer = of(Family::Llama);
    writer.set("rope_scaling", scaling);
    let (plain, slowed) = (loaded(&of(Family::Llama)).unwrap(), loaded(&writer).unwrap());
    for (plain, slowed) in plain.turns_per_position[0].iter().zip(&slowed.turns_per_position[0]) {
        // The definition goes by the length of a wave in positions.
        let wave = std::f64::consts::TAU / plain;
        let mixed = (1024.0 / wave - 1.0) / 3.0;
        let right = match wave {
            w if w < 1024.0 / 4.0 => *plain,
            w if w > 1024.0 / 1.0 => plain / 8.0,
            _ => (1.0 - mixed) * plain / 8.0 + mixed * plain,
        };
        assert!((slowed - right).abs() < 1e-12 * plain, "{slowed}, not {right}");
    }
    // All three cases occur.
    let ratios = plain.turns_per_position[0].iter().zip(&slowed.turns_per_position[0]).map(|(p, s)| p / s);
    let kinds: Vec<_> = ratios.map(|r| (r * 10.0).round() / 10.0).collect();
    assert_eq!((kinds[0], kinds[7]), (1.0, 8.0));
    assert!(kinds.iter().any(|&ratio| ratio > 1.0 && ratio < 8.0), "{kinds:?}");
}

#[test]
fn variants_of_a_folder_are_named_with_key_and_value() {
    let set = |family, key: &'static str, value: Value| refusal(family, |w| w.set(key, value));
    for (family, key, value, parts) in [
        (Family::Llama, "model_type", json!("mixtral"), ["architecture mixtral", "llama, qwen2, qwen3, gemma3_text"]),
        (Family::Qwen3, "model_type", json!("qwen3_moe"), ["architecture qwen3_moe", "not supported"]),
        (Family::Gemma3, "model_type", json!("gemma3"), ["architecture gemma3 ", "not supported"]),
        (Family::Llama, "rope_scaling", json!({"rope_type": "yarn"}), ["rope_scaling.rope_type", "yarn"]),
        (Family::Llama, "rope_scaling", json!({"type": "linear", "factor": 2}), ["rope_scaling.type", "linear"]),
        (Family::Llama, "rope_scaling", json!({"rope_type": "llama3"}), ["rope_scaling.factor", "missing"]),
        (Family::Llama, "rope_parameters", json!({"rope_type": "dynamic"}), ["rope_parameters.rope_type", "dynamic"]),
        (Family::Gemma3, "rope_scaling", json!({"rope_type": "linear"}), ["rope_scaling", "linear"]),
        (Family::Gemma3, "rope_parameters", json!({"rope_theta": 1e6}), ["rope_parameters.full_attention", "missing"]),
        (Family::Gemma3, "layer_types", json!(["full_attention"]), ["layer_types", "of 1 layers"]),
        (Family::Gemma3, "layer_types", json!(["full_attention", "chunked"]), ["layer_types", "chunked"]),
        (Family::Gemma3, "sliding_window", json!(0), ["sliding_window has value 0", "above 0"]),
        (Family::Gemma3, "attn_logit_softcapping", json!(50.0), ["attn_logit_softcapping", "50"]),
        (Family::Gemma3, "final_logit_softcapping", json!(30.0), ["final_logit_softcapping", "30"]),
        (Family::Gemma3, "hidden_activation", json!("relu"), ["hidden_activation", "relu"]),
        (Family::Gemma3, "use_bidirectional_attention", json!(true), ["use_bidirectional_attention", "true"]),
        (Family::Qwen2, "use_sliding_window", json!(true), ["use_sliding_window", "true"]),
        (Family::Qwen2, "hidden_act", json!("gelu"), ["hidden_act", "gelu"]),
        (Family::Qwen3, "attention_bias", json!(true), ["attention_bias", "true"]),
        (Family::Llama, "mlp_bias", json!(true), ["mlp_bias", "true"]),
        (Family::Llama, "partial_rotary_factor", json!(0.5), ["partial_rotary_factor", "0.5"]),
        (Family::Llama, "num_local_experts", json!(8), ["num_local_experts", "8"]),
        (Family::Llama, "quantization_config", json!({"quant_method": "awq"}), ["quantization_config", "awq"]),
        (Family::Llama, "num_hidden_layers", json!(1_000_000), ["num_hidden_layers", "1000000"]),
        (Family::Llama, "vocab_size", json!(0), ["vocab_size", "0"]),
        (Family::Llama, "head_dim", json!(15), ["head_dim", "15"]),
        (Family::Llama, "num_key_value_heads", json!(3), ["num_key_value_heads", "does not divide"]),
        (Family::Llama, "rms_norm_eps", json!("small"), ["rms_norm_eps", "is a string, not a number"]),
    ] {
        let message = set(family, key, value.clone());
        assert!(parts.iter().all(|part| message.contains(part)), "{key} = {value}: {message}");
        assert!(message.contains("config.json"), "{message}");
    }
    assert!(refusal(Family::Llama, |w| w.unset("model_type")).contains("key model_type is missing"));
}

#[test]
fn tensors_of_a_folder_that_lack_or_do_not_fit_or_are_left_over_are_named() {
    let weights = |family, change: &dyn Fn(&mut FolderWriter)| {
        refusal(family, |w| {
            change(w);
            w
        })
    };
    let norm = "model.layers.1.self_attn.q_norm.weight";
    for (message, wanted) in [
        (
            weights(Family::Qwen3, &|w| _ = w.weights.remove_tensor(norm)),
            "tensor model.layers.1.self_attn.q_norm.weight is missing",
        ),
        (
            weights(Family::Llama, &|w| _ = w.weights.tensor(norm, TensorType::F32, &[16], &[0.0; 16])),
            "tensor model.layers.1.self_attn.q_norm.weight is not part of a supported model",
        ),
        (
            weights(Family::Qwen3, &|w| _ = w.weights.tensor(norm, TensorType::F32, &[8], &[0.0; 8])),
            "tensor model.layers.1.self_attn.q_norm.weight has shape [8], not [16]",
        ),
        (
            weights(Family::Llama, &|w| _ = w.weights.remove_tensor("lm_head.weight")),
            "tensor lm_head.weight is missing",
        ),
        (
            weights(Family::Llama, &|w| _ = w.set("vocab_size", json!(268))),
            "tensor model.embed_tokens.weight has shape [64, 267], not [64, 268]",
        ),
        (
            weights(Family::Llama, &|w| _ = w.set("num_hidden_layers", json!(1))),
            "tensor model.layers.1.input_layernorm.weight is not part of a supported model",
        ),
    ] {
        assert_eq!(message, format!("tiny: {wanted}"));
    }
}

#[test]
fn tensors_that_say_nothing_new_are_left_alone() {
    let mut writer = of(Family::Llama);
    writer.weights.tensor("model.layers.0.self_attn.rotary_emb.inv_freq", TensorType::F32, &[8], &[1.0; 8]);
    writer.set("tie_word_embeddings", json!(true));
    let model = loaded(&writer).unwrap();
    assert!(model.config().tied && model.output.is_none());
}
