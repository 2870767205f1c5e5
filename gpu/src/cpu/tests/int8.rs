//! The int8 mode: the same bits whatever is around a sequence, and close to the exact mode.

use super::*;
use crate::dequant::TensorType;
use crate::gguf::Gguf;

fn load(tiny: &TinyModel, arithmetic: Arithmetic) -> Arc<Model> {
    Arc::new(Model::load(&tiny.gguf().into(), arithmetic).unwrap())
}

/// Shapes and formats that take every path: groups of heads, odd lengths of heads, outputs that fill no vector.
fn tinies() -> Vec<TinyModel> {
    vec![
        TinyModel { kind: TensorType::Q4_1, ..TinyModel::default() },
        TinyModel { tied: true, kv_heads: 1, seed: 4, ..TinyModel::default() },
        TinyModel {
            heads: 6,
            kv_heads: 2,
            head_dim: 48,
            feed_forward: 160,
            kind: TensorType::Q4_0,
            ..TinyModel::default()
        },
        TinyModel {
            heads: 3,
            kv_heads: 3,
            head_dim: 24,
            feed_forward: 50,
            kind: TensorType::F32,
            ..TinyModel::default()
        },
        TinyModel { heads: 2, kv_heads: 1, head_dim: 64, kind: TensorType::Bf16, ..TinyModel::default() },
    ]
}

#[test]
fn logits_depend_on_the_tokens_alone_in_int8_too() {
    for tiny in tinies() {
        logits_depend_on_the_tokens_alone(&load(&tiny, Arithmetic::Int8), 150);
    }
}

#[test]
fn long_contexts_give_the_same_bits_however_their_segments_are_shared_out() {
    let model = load(&TinyModel { context: 2048, kind: TensorType::Q4_1, ..TinyModel::default() }, Arithmetic::Int8);
    let ours = tokens(1100, 1, 0, model.config().vocabulary);
    let blocks = table(3, 1100);
    let whole = alone(&mut backend(&model, 1), &ours);
    for (threads, chunks) in
        [(2, &[1100][..]), (3, &[1099, 1]), (2, &[1000, 97, 1, 1, 1]), (4, &[255, 2, 500, 343]), (1, &[550, 550])]
    {
        let mut chunked = backend(&model, threads);
        let (mut start, mut last) = (0, Bits::new());
        for chunk in chunks {
            // A short sequence runs beside it.
            let other = tokens(20, 7, 0, model.config().vocabulary);
            let beside = slice(&other, 0, 20, &(500..503).map(BlockId).collect::<Vec<_>>());
            last = run(&mut chunked, vec![beside, slice(&ours, start, start + chunk, &blocks)]).remove(1);
            start += chunk;
        }
        assert!(last == whole, "{threads} threads, chunks {chunks:?}");
    }
}

#[test]
fn every_set_of_instructions_gives_the_same_bits() {
    for tiny in tinies() {
        let model = load(&tiny, Arithmetic::Int8);
        let tokens = tokens(100, 1, 0, model.config().vocabulary);
        let blocks = table(3, 100);
        let found: Vec<_> = Isa::ALL
            .into_iter()
            .filter(|isa| isa.is_available())
            .map(|isa| {
                let mut backend = backend(&model, 2).with_isa(isa);
                let first = run(&mut backend, vec![slice(&tokens, 0, 71, &blocks)]);
                (isa, first, run(&mut backend, vec![slice(&tokens, 71, 100, &blocks)]))
            })
            .collect();
        for other in &found[1..] {
            assert!(other.1 == found[0].1 && other.2 == found[0].2, "{tiny:?}: {:?} differs from portable", other.0);
        }
    }
}

#[test]
fn logits_are_close_to_those_of_the_exact_mode() {
    for tiny in tinies() {
        let models = [Arithmetic::Exact, Arithmetic::Int8].map(|arithmetic| load(&tiny, arithmetic));
        let tokens = tokens(100, 1, 0, models[0].config().vocabulary);
        let [exact, int8] = models.map(|model| {
            let bits = alone(&mut backend(&model, 2), &tokens);
            bits.into_iter().map(f32::from_bits).collect::<Vec<_>>()
        });
        let spread = exact.iter().fold(0.0_f32, |spread, logit| spread.max(logit.abs()));
        let worst = exact.iter().zip(&int8).fold(0.0_f32, |worst, (a, b)| worst.max((a - b).abs()));
        // Random weights let errors grow as real ones do not.
        assert!(worst < 0.06 * spread, "{tiny:?}: off by {worst} where logits reach {spread}");
        assert!(worst > 0.0, "bytes cannot give the bits of f32");
    }
}

#[test]
fn blocks_of_any_size_give_the_same_bits() {
    let model = load(&TinyModel { kind: TensorType::Q4_1, ..TinyModel::default() }, Arithmetic::Int8);
    let tokens = tokens(130, 2, 0, model.config().vocabulary);
    let right = alone(&mut backend(&model, 1), &tokens);
    for block_tokens in [1, 8, 13, 16, 32, 100, 256] {
        let mut backend = sized(&model, (256, block_tokens), 2);
        let blocks: Vec<_> = (0..130_u32.div_ceil(block_tokens)).map(|i| BlockId(255 - i)).collect();
        assert!(run(&mut backend, vec![slice(&tokens, 0, 130, &blocks)])[0] == right, "blocks of {block_tokens}");
    }
}

#[test]
fn weights_take_about_the_memory_of_their_file_and_kv_half_of_the_exact_mode() {
    let tiny = TinyModel { tied: true, kind: TensorType::Q8_0, ..TinyModel::default() };
    let [exact, int8] = [Arithmetic::Exact, Arithmetic::Int8].map(|arithmetic| load(&tiny, arithmetic));
    let weights = tiny.hidden() * (tiny.vocabulary() + 2 * (2 * tiny.hidden() + 2 * 32 + 3 * tiny.feed_forward));
    assert!(exact.bytes() >= weights * 4);
    assert!((weights..weights * 115 / 100).contains(&int8.bytes()), "{} bytes for {weights} weights", int8.bytes());
    assert_eq!(exact.block_bytes(16), 2 * int8.block_bytes(16));
}

#[test]
fn numbers_that_are_not_finite_fail_the_step_with_the_slice_named() {
    // In the attention, in the residual stream, and in the head.
    for name in ["blk.1.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"] {
        for bad in [f32::NAN, f32::INFINITY, 1e38] {
            let mut writer = TinyModel::default().writer();
            let mut weights = vec![0.5_f32; 64];
            weights[3] = bad;
            weights[4] = bad;
            writer.tensor(name, TensorType::F32, &[64], &weights);
            let gguf = Gguf::from_bytes("nan.gguf", writer.to_bytes().0).unwrap();
            let model = Arc::new(Model::load(&gguf.into(), Arithmetic::Int8).unwrap());
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let mut backend = backend(&model, 2).with_isa(isa);
                let tokens = tokens(20, 1, 0, model.config().vocabulary);
                let step = step(&backend, vec![slice(&tokens, 0, 20, &table(3, 20))]);
                let found = backend.step(&step, &mut Vec::new());
                // Numbers that are large but finite may do no harm.
                let is_harmless = bad == 1e38 && found.is_ok();
                assert!(is_harmless || matches!(found, Err(StepError::NotFinite { slice: 0 })), "{name} {bad} {isa:?}");
            }
        }
    }
}

#[test]
fn the_real_model_is_batch_invariant_and_close_to_exact_in_int8() {
    let Some(path) = std::env::var_os("STARLING_MODEL") else {
        eprintln!("SKIPPED: STARLING_MODEL names no model file");
        return;
    };
    let source = Source::open(path.as_ref()).unwrap();
    let [exact, int8] =
        [Arithmetic::Exact, Arithmetic::Int8].map(|arithmetic| Arc::new(Model::load(&source, arithmetic).unwrap()));
    logits_depend_on_the_tokens_alone(&int8, 80);
    let tokens = tokens(60, 1, 0, int8.config().vocabulary);
    let [exact, int8] = [exact, int8].map(|model| log_probs(&alone(&mut backend(&model, 2), &tokens)));
    let mut best: Vec<usize> = (0..exact.len()).collect();
    best.sort_by(|a, b| exact[*b].total_cmp(&exact[*a]));
    for token in &best[..5] {
        let difference = (exact[*token] - int8[*token]).abs();
        assert!(difference < 0.5, "token {token}: {} exact, {} int8", exact[*token], int8[*token]);
    }
}

fn log_probs(logits: &Bits) -> Vec<f64> {
    let logits: Vec<_> = logits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect();
    let peak = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|l| (l - peak).exp()).sum();
    logits.iter().map(|l| l - peak - sum.ln()).collect()
}
