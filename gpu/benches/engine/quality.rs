//! How far int8 is from exact on a text: perplexity, and log-probabilities of the likeliest tokens.

use super::{backend, load, slice, step};
use starling_core::ids::TokenId;
use starling_gpu::cpu::CpuBackend;
use starling_gpu::llama::Model;
use starling_gpu::source::Source;
use starling_gpu::weights::Arithmetic;
use std::path::Path;
use std::sync::Arc;

/// Our own words, so that no model has learnt them.
const TEXT: &str = "The harbour master kept two books. In the first she wrote what every ship declared: salt, timber, wool, a \
few barrels of oil, and once a piano that nobody came to fetch. In the second she wrote what she saw when the hatches were \
opened. The two books seldom agreed, and over the years she stopped being surprised by that. What interested her was how they \
differed. A captain who hid one crate of tobacco was only poor; a captain whose papers were perfect had something to lose. When \
the inspectors came from the city, they asked for the first book, copied the totals, and went home on the evening train. Nobody \
asked for the second, so she left it to the school, where the children learned arithmetic from it. They added up the missing \
barrels, divided them by the number of ships, and found that on an average day the harbour received a little more than it was \
told about. The teacher said that this was called an error, and that errors of this kind have a direction. Years later one of \
the children became an inspector. On her first day at the harbour she asked to see both books.";

/// The longest tokens that the text begins with, one after the other: not what a tokenizer would make of it, but the same
/// for both arithmetics.
fn tokens(source: &Source) -> Option<Vec<TokenId>> {
    let vocabulary = source.gguf()?.get_str_array("tokenizer.ggml.tokens").ok()??;
    let known: std::collections::HashMap<String, TokenId> = vocabulary
        .iter()
        .enumerate()
        .map(|(id, token)| (token.replace(['\u{120}', '\u{2581}'], " "), id as TokenId))
        .collect();
    let (mut rest, mut out) = (TEXT, Vec::new());
    while !rest.is_empty() {
        let ends = (1..=rest.len().min(24)).rev().filter(|&end| rest.is_char_boundary(end));
        let (end, id) = ends.filter_map(|end| Some((end, *known.get(&rest[..end])?))).next()?;
        out.push(id);
        rest = &rest[end..];
    }
    Some(out)
}

/// Log-probabilities behind each token but the last.
fn log_probs(backend: &mut CpuBackend, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let mut out = Vec::new();
    for (start, token) in tokens[..tokens.len() - 1].iter().enumerate() {
        let step = step(backend, vec![slice(&[*token], start, (0, 0))]);
        let each = |_: usize, logits: &[f32]| {
            let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|logit| f64::from(logit - peak).exp()).sum();
            out.push(logits.iter().map(|logit| (f64::from(logit - peak) - sum.ln()) as f32).collect());
        };
        backend.logits_of(&step, each).expect("a sound step");
    }
    out
}

fn perplexity(log_probs: &[Vec<f32>], tokens: &[TokenId]) -> f64 {
    let sum: f64 = log_probs.iter().zip(&tokens[1..]).map(|(all, token)| f64::from(all[*token as usize])).sum();
    (-sum / log_probs.len() as f64).exp()
}

/// Prints how far int8 is from exact.
pub fn compare(path: &str, threads: usize) {
    let source = Source::open(Path::new(path)).expect("readable");
    let Some(tokens) = tokens(&source) else {
        return println!("quality: the file has no vocabulary that this text can be written in");
    };
    let [exact, int8] = [Arithmetic::Exact, Arithmetic::Int8].map(|arithmetic| {
        let model = Arc::new(Model::load(&source, arithmetic).expect("supported"));
        log_probs(&mut backend(&model, threads, tokens.len()), &tokens)
    });
    let (mut differences, mut same) = (Vec::new(), 0);
    for (exact, int8) in exact.iter().zip(&int8) {
        let mut order: Vec<usize> = (0..exact.len()).collect();
        order.select_nth_unstable_by(5, |a, b| exact[*b].total_cmp(&exact[*a]));
        differences.extend(order[..5].iter().map(|&token| f64::from((exact[token] - int8[token]).abs())));
        let best = |all: &[f32]| all.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token);
        same += usize::from(best(exact) == best(int8));
    }
    differences.sort_by(f64::total_cmp);
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    println!(
        "quality over {} tokens (load average {}): perplexity {:.3} exact, {:.3} int8; the likeliest token agrees at {:.1} %",
        tokens.len(),
        load(),
        perplexity(&exact, &tokens),
        perplexity(&int8, &tokens),
        100.0 * same as f64 / exact.len() as f64
    );
    println!(
        "log-probabilities of exact's top 5: {mean:.3} nats apart on average, {:.3} at the 99th percentile, {:.3} at most",
        differences[differences.len() * 99 / 100],
        differences[differences.len() - 1]
    );
}
