//! Each family, from each kind of file, against the plain forward.

use super::*;
use crate::dequant::TensorType;
use crate::llama::Family;

/// Tiny models of all families. Contexts below are several windows long.
fn all() -> Vec<TinyModel> {
    let of = |family| TinyModel { family, kind: TensorType::F32, ..TinyModel::default() };
    let mut models: Vec<_> = Family::ALL.map(of).into();
    models.push(TinyModel { tied: true, kv_heads: 1, seed: 2, ..of(Family::Qwen2) });
    models.push(TinyModel { tied: true, heads: 6, kv_heads: 3, head_dim: 32, seed: 3, ..of(Family::Qwen3) });
    models.push(TinyModel {
        tied: true,
        layers: 6,
        kv_heads: 1,
        window: 13,
        pattern: 3,
        seed: 4,
        ..of(Family::Gemma3)
    });
    models
}

fn loaded(source: impl Into<Source>) -> Arc<Model> {
    Arc::new(Model::load(&source.into(), Arithmetic::Exact).unwrap())
}

#[test]
fn every_family_agrees_with_a_plain_f64_forward() {
    for tiny in all() {
        let tokens = tokens(110, 1, 0, tiny.vocabulary() as u32);
        let right = reference::logits(&tiny, &tokens);
        let mut backend = backend(&loaded(tiny.gguf()), 2);
        for length in [1, 24, 25, 64, 65, 110] {
            let found = alone(&mut backend, &tokens[..length]);
            let errors = found.iter().zip(&right[length - 1]).map(|(f, r)| (f64::from(f32::from_bits(*f)) - r).abs());
            let worst = errors.fold(0.0, f64::max);
            assert!(worst < 1e-4, "{tiny:?}, {length} tokens: off by {worst}");
        }
    }
}

#[test]
fn a_folder_gives_the_bits_of_the_gguf_file_with_the_same_weights() {
    for tiny in all() {
        let tokens = tokens(70, 1, 0, tiny.vocabulary() as u32);
        let of_file = alone(&mut backend(&loaded(tiny.gguf()), 1), &tokens);
        let of_folder = alone(&mut backend(&loaded(tiny.folder_writer().folder().unwrap()), 1), &tokens);
        assert!(of_file == of_folder, "{tiny:?}");
    }
}

#[test]
fn superblocks_agree_with_a_plain_f64_forward() {
    for kind in [TensorType::Q4K, TensorType::Q6K] {
        let tiny = TinyModel { family: Family::Llama, kind, head_dim: 64, feed_forward: 256, ..TinyModel::default() };
        let tokens = tokens(20, 1, 0, tiny.vocabulary() as u32);
        let right = reference::logits(&tiny, &tokens);
        let found = alone(&mut backend(&loaded(tiny.gguf()), 1), &tokens);
        let errors = found.iter().zip(&right[19]).map(|(f, r)| (f64::from(f32::from_bits(*f)) - r).abs());
        let worst = errors.fold(0.0, f64::max);
        assert!(worst < 1e-4, "{kind}: off by {worst}");
    }
}

#[test]
fn every_family_is_batch_invariant() {
    for family in [Family::Qwen2, Family::Qwen3, Family::Gemma3] {
        let tiny = TinyModel { family, ..TinyModel::default() };
        logits_depend_on_the_tokens_alone(&loaded(tiny.gguf()), 150);
    }
}
