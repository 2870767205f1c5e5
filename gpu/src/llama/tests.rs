use super::*;
use crate::testing::{GgufWriter, TinyModel};

fn refusal(change: impl FnOnce(&mut GgufWriter) -> &mut GgufWriter) -> String {
    let mut writer = TinyModel::default().writer();
    change(&mut writer);
    let gguf = Gguf::from_bytes("broken.gguf", writer.to_bytes().0).expect("a file that can be read");
    Model::load(&gguf).err().expect("refused").to_string()
}

#[test]
fn a_tiny_model_loads_with_the_sizes_of_its_file() {
    let tiny = TinyModel::default();
    let model = Model::load(&tiny.gguf()).unwrap();
    let config = model.config();
    assert_eq!((config.layers, config.heads, config.kv_heads), (tiny.layers, tiny.heads, tiny.kv_heads));
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
        let refused = opened.and_then(|gguf| Model::load(&gguf)).err();
        assert!(refused.is_some_and(|why| why.to_string().contains("cut.gguf")), "cut at {end}");
    }
}
