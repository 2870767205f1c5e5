use super::*;
use crate::dequant::TensorType;
use crate::gguf::{Gguf, Value};
use crate::testing::{GgufWriter, TinyModel};
use starling_core::kv::cache::lifecycle::Retention;
use std::num::NonZeroU32;

mod folders;

fn refusal(change: impl FnOnce(&mut GgufWriter) -> &mut GgufWriter) -> String {
    let mut writer = TinyModel::default().writer();
    change(&mut writer);
    let gguf = Gguf::from_bytes("broken.gguf", writer.to_bytes().0).expect("a file that can be read");
    Model::load(&gguf.into(), Arithmetic::Exact).err().expect("refused").to_string()
}

#[test]
fn a_tiny_model_loads_with_the_sizes_of_its_file() {
    let tiny = TinyModel::default();
    let model = Model::load(&tiny.gguf().into(), Arithmetic::Exact).unwrap();
    let config = model.config();
    assert_eq!((config.layers.len(), config.heads, config.kv_heads), (tiny.layers, tiny.heads, tiny.kv_heads));
    assert_eq!(config.vocabulary as usize, tiny.vocabulary());
    // Keys and values of two heads of 16 numbers, in two layers, four bytes each.
    assert_eq!(model.block_bytes(8), 8 * 2 * 2 * 16 * 2 * 4);
}

#[test]
fn what_a_file_lacks_or_has_wrong_is_named_with_the_file() {
    let text = |value: &str| crate::gguf::Value::Str(value.to_owned());
    for (message, parts) in [
        (refusal(|w| w.set("general.architecture", text("mamba"))), ["mamba", "broken.gguf"]),
        (refusal(|w| w.unset("llama.block_count")), ["llama.block_count", "broken.gguf"]),
        (refusal(|w| w.set("llama.attention.head_count", crate::gguf::Value::U32(0))), ["head_count", "0"]),
        (refusal(|w| w.remove_tensor("blk.1.ffn_up.weight")), ["blk.1.ffn_up.weight", "broken.gguf"]),
        (refusal(|w| w.set("llama.feed_forward_length", crate::gguf::Value::U32(97))), ["ffn", "broken.gguf"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let (bytes, _) = TinyModel::default().writer().to_bytes();
    for end in (0..bytes.len()).step_by(997).chain([bytes.len() - 1]) {
        let opened = Gguf::from_bytes("cut.gguf", bytes[..end].to_vec());
        let refused = opened.and_then(|gguf| Model::load(&gguf.into(), Arithmetic::Exact)).err();
        assert!(refused.is_some_and(|why| why.to_string().contains("cut.gguf")), "cut at {end}");
    }
}

#[test]
fn memory_is_known_before_the_weights_are_loaded() {
    let gguf = TinyModel::default().gguf();
    let weights = 2 * 267 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96);
    let model = Model::load(&gguf.into(), Arithmetic::Exact).unwrap();
    assert!(model.bytes() as u64 >= 4 * weights);
}

#[test]
fn absent_keys_have_the_defaults_of_the_format() {
    let mut writer = TinyModel { kv_heads: 4, ..TinyModel::default() }.writer();
    for key in ["llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count"] {
        writer.unset(key);
    }
    let gguf = Gguf::from_bytes("m.gguf", writer.to_bytes().0).unwrap();
    let config = ModelConfig::read(&gguf.into()).unwrap();
    assert_eq!((config.kv_heads, config.ropes[0].base, config.head_dim), (4, 10_000.0, 16));
}

#[test]
fn other_architectures_and_variants_are_named() {
    let with = |key: &'static str, value: Value| refusal(move |w| w.set(key, value.clone()));
    assert_eq!(
        with("general.architecture", Value::Str("mamba".into())),
        "broken.gguf: architecture mamba is not supported (supported: llama, qwen2, qwen3, gemma3)"
    );
    assert!(refusal(|w| w.unset("general.architecture")).contains("general.architecture is missing"));
    assert!(with("llama.rope.scaling.type", Value::Str("yarn".into())).contains("yarn"));
    assert!(with("llama.expert_count", Value::U32(8)).contains("has value 8"));
    assert!(with("llama.attention.causal", Value::Bool(false)).contains("causal"));
}

#[test]
fn sizes_that_cannot_be_are_named() {
    for (key, value, part) in [
        ("llama.block_count", Value::U32(0), "above 0"),
        ("llama.block_count", Value::U32(u32::MAX), "beyond what is supported"),
        ("llama.embedding_length", Value::Str("64".into()), "is a string, not an integer"),
        ("llama.attention.head_count", Value::U32(7), "does not divide"),
        ("llama.attention.head_count_kv", Value::U32(3), "does not divide the number of heads"),
        ("llama.attention.key_length", Value::U32(15), "odd length"),
        ("llama.rope.dimension_count", Value::U32(8), "only the length of a head"),
        ("llama.rope.freq_base", Value::F32(f32::NAN), "positive and finite"),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0), "positive and finite"),
        ("llama.context_length", Value::U64(1 << 33), "does not fit 32 bits"),
    ] {
        let message = refusal(|w| w.set(key, value.clone()));
        assert!(message.contains(key) && message.contains(part), "{message}");
    }
    for key in ["llama.block_count", "llama.context_length", "llama.attention.layer_norm_rms_epsilon"] {
        assert_eq!(refusal(|w| w.unset(key)), format!("broken.gguf: metadata key {key} is missing"));
    }
}

#[test]
fn tensors_that_lack_or_do_not_fit_or_are_left_over_are_named() {
    assert_eq!(
        refusal(|w| w.remove_tensor("blk.1.ffn_up.weight")),
        "broken.gguf: tensor blk.1.ffn_up.weight is missing"
    );
    assert_eq!(
        refusal(|w| w.tensor("blk.0.attn_k.weight", TensorType::F32, &[64, 16], &[0.0; 1024])),
        "broken.gguf: tensor blk.0.attn_k.weight has shape [64, 16], not [64, 32]"
    );
    assert_eq!(
        refusal(|w| w.tensor("blk.0.attn_q.bias", TensorType::F32, &[64], &[0.0; 64])),
        "broken.gguf: tensor blk.0.attn_q.bias is not part of a supported model"
    );
    assert!(refusal(|w| w.remove_tensor("token_embd.weight")).contains("token_embd.weight is missing"));
    assert!(refusal(|w| w.tensor("token_embd.weight", TensorType::F32, &[64], &[0.0; 64])).contains("has shape [64]"));
}

#[test]
fn factors_of_the_file_slow_the_turning_of_pairs() {
    let mut writer = TinyModel::default().writer();
    writer.tensor("rope_freqs.weight", TensorType::F32, &[8], &[1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]);
    let plain = Model::load(&TinyModel::default().gguf().into(), Arithmetic::Exact).unwrap();
    let slowed =
        Model::load(&Gguf::from_bytes("m.gguf", writer.to_bytes().0).unwrap().into(), Arithmetic::Exact).unwrap();
    assert_eq!(plain.turns_per_position[0][0], 1.0);
    assert_eq!(slowed.turns_per_position[0][5], plain.turns_per_position[0][5] / 4.0);
}

/// The refusal of a tiny Gemma after a change.
fn gemma_refusal(change: impl FnOnce(&mut GgufWriter) -> &mut GgufWriter) -> String {
    let mut writer = TinyModel { family: Family::Gemma3, ..TinyModel::default() }.writer();
    change(&mut writer);
    let gguf = Gguf::from_bytes("gemma.gguf", writer.to_bytes().0).expect("a file that can be read");
    Model::load(&gguf.into(), Arithmetic::Exact).err().expect("refused").to_string()
}

#[test]
fn windows_and_caps_are_taken_where_they_belong_or_named() {
    for (message, parts) in [
        (gemma_refusal(|w| w.unset("gemma3.attention.sliding_window")), ["sliding_window", "missing"]),
        (gemma_refusal(|w| w.set("gemma3.attention.sliding_window", Value::U32(0))), ["sliding_window", "above 0"]),
        (
            gemma_refusal(|w| w.set("gemma3.attention.sliding_window_pattern", Value::Str("all".into()))),
            ["sliding_window_pattern", "is a string"],
        ),
        (
            gemma_refusal(|w| w.set("gemma3.final_logit_softcapping", Value::F32(30.0))),
            ["final_logit_softcapping", "30"],
        ),
        (gemma_refusal(|w| w.set("gemma3.attn_logit_softcapping", Value::F32(50.0))), ["attn_logit_softcapping", "50"]),
        (
            gemma_refusal(|w| w.set("gemma3.rope.scaling.type", Value::Str("linear".into()))),
            ["rope.scaling.type", "linear"],
        ),
        (gemma_refusal(|w| w.remove_tensor("blk.1.post_ffw_norm.weight")), ["blk.1.post_ffw_norm.weight", "missing"]),
        (refusal(|w| w.set("llama.attention.sliding_window", Value::U32(4096))), ["sliding_window", "4096"]),
        (refusal(|w| w.set("llama.rope.scale_linear", Value::F32(2.0))), ["rope.scale_linear", "2"]),
        (refusal(|w| w.set("llama.attention.scale", Value::F32(0.5))), ["attention.scale", "0.5"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn a_gemma_that_does_not_say_it_has_every_sixth_layer_without_a_window() {
    let mut writer = TinyModel { family: Family::Gemma3, layers: 12, ..TinyModel::default() }.writer();
    writer.unset("gemma3.attention.sliding_window_pattern");
    let config = ModelConfig::read(&Gguf::from_bytes("m.gguf", writer.to_bytes().0).unwrap().into()).unwrap();
    let whole: Vec<_> = (0..12).filter(|&layer| config.layers[layer].window.is_none()).collect();
    assert_eq!(whole, [5, 11]);
    assert_eq!((config.score_scale, config.embedding_scale()), (0.25, Some((32.0_f32).sqrt())));
}

#[test]
fn layers_of_one_window_are_one_life_cycle_in_the_order_of_their_first_layers() {
    let tiny = TinyModel { family: Family::Gemma3, layers: 12, ..TinyModel::default() };
    let mut writer = tiny.writer();
    writer.unset("gemma3.attention.sliding_window_pattern");
    let mut config = ModelConfig::read(&Gguf::from_bytes("m.gguf", writer.to_bytes().0).unwrap().into()).unwrap();
    let window = |tokens: u32| Retention::Window { tokens: NonZeroU32::new(tokens).unwrap(), sink_blocks: 0 };
    let found = config.life_cycles(Arithmetic::Int8, 8);
    let retentions: Vec<_> = found.iter().map(|group| (group.life_cycle.group, group.life_cycle.retention)).collect();
    assert_eq!(retentions, [(0, window(config.layers[0].window.unwrap() as u32)), (1, Retention::Full)]);
    assert_eq!(found[0].layers, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]);
    assert_eq!(found[1].layers, [5, 11]);
    // Keys and values of two bytes a number.
    let layer_bytes = 2 * 2 * (config.kv_heads * config.head_dim * 8) as u64;
    assert_eq!((found[0].page_bytes, found[1].page_bytes), (10 * layer_bytes, 2 * layer_bytes));
    // A second window is a third life cycle, and one that a query cannot see through is as long as can be.
    config.layers[3].window = Some(7);
    config.layers[11].window = Some(usize::MAX);
    let found = config.life_cycles(Arithmetic::Exact, 8);
    assert_eq!(found.iter().map(|group| group.layers.len()).collect::<Vec<_>>(), [9, 1, 1, 1]);
    assert_eq!((found[1].layers[0], found[1].life_cycle.retention), (3, window(7)));
    assert_eq!(found[3].life_cycle.retention, window(u32::MAX));
    let bytes: u64 = found.iter().map(|group| group.page_bytes).sum();
    assert_eq!(bytes, config.block_bytes(Arithmetic::Exact, 8));
}

#[test]
fn a_model_without_windows_has_one_life_cycle() {
    let config = ModelConfig::read(&TinyModel::default().gguf().into()).unwrap();
    let found = config.life_cycles(Arithmetic::Exact, 16);
    assert_eq!((found.len(), found[0].life_cycle.retention, found[0].layers.len()), (1, Retention::Full, 2));
    assert_eq!(found[0].page_bytes, config.block_bytes(Arithmetic::Exact, 16));
}
