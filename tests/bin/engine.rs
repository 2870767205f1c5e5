//! `conformance engine FILE --model MODEL [--tolerance NATS]`: a model's logits against a reference run.

use serde::Deserialize;
use starling_core::ids::{AttemptKey, BlockId, TokenId};
use starling_core::request::Sampling;
use starling_core::step::{Sample, Slice, Step, Table};
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::Model;
use starling_gpu::source::Source;
use starling_gpu::weights::Arithmetic;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Nats by which a log-probability may differ, and logits by which the two highest must differ to be told apart. The
/// reference is rounded to 1e-5, and the largest difference found over its runs is 3.2e-5.
pub const TOLERANCE: f64 = 1e-4;

const BLOCK_TOKENS: u32 = 16;
/// Steps for which a case lists the most probable tokens.
const TOP_STEPS: usize = 8;
const USAGE: &str = "usage: conformance engine FILE --model MODEL [--tolerance NATS]";

/// A file of reference runs.
#[derive(Deserialize)]
pub struct Vectors {
    #[serde(default)]
    pub prompts: Vec<Case>,
    #[serde(default)]
    pub chats: Vec<Case>,
}

/// One prompt and its greedy continuation.
#[derive(Clone, Deserialize)]
pub struct Case {
    pub name: String,
    prompt_ids: Vec<TokenId>,
    greedy_ids: Vec<TokenId>,
    greedy_logprobs: Vec<f64>,
    top1_top2_margin: Vec<f64>,
    top5_first8: Vec<Vec<(TokenId, f64)>>,
    /// Inside the prompt: how many tokens are known, and the most probable next ones.
    #[serde(default)]
    top5_inside: Vec<(usize, Vec<(TokenId, f64)>)>,
}

/// Runs cases on one model.
pub struct Checker {
    backend: CpuBackend,
    tolerance: f64,
    /// The largest difference of a log-probability so far.
    pub worst: f64,
}

impl Checker {
    /// # Errors
    /// The model cannot be read or run.
    pub fn new(model: &str, tolerance: f64) -> Result<Self, String> {
        let source = Source::open(Path::new(model)).map_err(|error| error.to_string())?;
        let model = Arc::new(Model::load(&source, Arithmetic::Exact).map_err(|error| error.to_string())?);
        let blocks = model.config().context.div_ceil(BLOCK_TOKENS);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let config = CpuConfig { blocks: vec![blocks], block_tokens: BLOCK_TOKENS, threads };
        let backend = CpuBackend::new(model, config).map_err(|error| error.to_string())?;
        Ok(Self { backend, tolerance, worst: 0.0 })
    }

    /// # Errors
    /// The first step that differs, and by how much.
    pub fn check(&mut self, case: &Case) -> Result<(), String> {
        let steps = case.greedy_ids.len();
        let lists = [case.greedy_logprobs.len(), case.top1_top2_margin.len()];
        if case.prompt_ids.is_empty() || steps == 0 {
            return Err("malformed: no prompt, or no step to check".into());
        }
        if lists != [steps; 2] || case.top5_first8.len() != steps.min(TOP_STEPS) {
            let top = case.top5_first8.len();
            return Err(format!("malformed: {steps} steps, but lists of {lists:?} and {top} lists of top tokens"));
        }
        let mut computed = 0;
        for (known, top) in &case.top5_inside {
            if !(computed + 1..=case.prompt_ids.len()).contains(known) {
                return Err(format!("malformed: place {known} inside {} tokens", case.prompt_ids.len()));
            }
            let logits = self.logits(&case.prompt_ids[..*known], computed)?;
            computed = *known;
            self.compare_logprobs(top, &logits).map_err(|what| format!("behind {known} tokens: {what}"))?;
        }
        // The last token of the prompt is computed again if a place was there.
        computed = computed.min(case.prompt_ids.len() - 1);
        let mut known = case.prompt_ids.clone();
        for step in 0..steps {
            let logits = self.logits(&known, computed)?;
            computed = known.len();
            self.compare(case, step, &logits).map_err(|what| format!("step {step}: {what}"))?;
            known.push(case.greedy_ids[step]);
        }
        Ok(())
    }

    fn logits(&mut self, known: &[TokenId], computed: usize) -> Result<Vec<f32>, String> {
        let blocks = (known.len() as u32).div_ceil(BLOCK_TOKENS);
        let sample = Sample::new(Sampling::default(), known.len() as u32);
        let slice = Slice {
            attempt: AttemptKey::default(),
            tokens: known[computed..].to_vec(),
            start: computed as u32,
            tables: vec![Table::whole((0..blocks).map(BlockId).collect())],
            sample: Some(sample),
        };
        let mut found = Vec::new();
        let ran = self
            .backend
            .logits_of(&Step { copies: Vec::new(), slices: vec![slice] }, |_, logits| found = logits.to_vec());
        ran.map_err(|error| error.to_string())?;
        Ok(found)
    }

    fn compare(&mut self, case: &Case, step: usize, logits: &[f32]) -> Result<(), String> {
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let best = logits.iter().position(|logit| *logit == peak).unwrap_or(0) as TokenId;
        let expected = case.greedy_ids[step];
        if best != expected && case.top1_top2_margin[step] > self.tolerance {
            return Err(format!("token {best} is highest, the reference's is {expected}"));
        }
        let top = case.top5_first8.get(step).map_or(&[][..], Vec::as_slice);
        self.compare_logprobs(top, logits)?;
        self.compare_logprobs(&[(expected, case.greedy_logprobs[step])], logits)
    }

    fn compare_logprobs(&mut self, right: &[(TokenId, f64)], logits: &[f32]) -> Result<(), String> {
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - peak).exp()).sum();
        for &(token, right) in right {
            let logit = logits.get(token as usize).ok_or(format!("token {token} is outside the vocabulary"))?;
            let found = f64::from(logit - peak) - sum.ln();
            let difference = (found - right).abs();
            self.worst = self.worst.max(difference);
            // A difference that is not a number is no agreement.
            if difference.is_nan() || difference > self.tolerance {
                return Err(format!("log-probability of token {token} is {found:.5}, the reference's {right:.5}"));
            }
        }
        Ok(())
    }
}

/// Reads a file of vectors.
///
/// # Errors
/// The file cannot be read, or is not such a file.
pub fn read(file: &str) -> Result<Vectors, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{file}: {error}"))
}

struct Args<'a> {
    file: &'a str,
    model: &'a str,
    tolerance: f64,
}

fn parse(args: &[String]) -> Result<Args<'_>, String> {
    let (mut file, mut model, mut tolerance) = (None, None, TOLERANCE);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--model" => model = Some(value()?),
            "--tolerance" => {
                let text = value()?;
                let number = text.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
                tolerance = number.ok_or(format!("--tolerance {text:?} is not a number of nats"))?;
            }
            other if other.starts_with("--") || file.is_some() => return Err(format!("{other:?} is not expected")),
            _ => file = Some(arg),
        }
    }
    let (file, model) = (file.ok_or("no FILE")?, model.ok_or("no --model")?);
    Ok(Args { file, model, tolerance })
}

/// The subcommand: a line a group, the sum alone on the last.
pub fn main(args: &[String]) -> ExitCode {
    let args = match parse(args) {
        Ok(args) => args,
        Err(what) => {
            let _ = writeln!(std::io::stderr(), "error: {what}\n{USAGE} (default {TOLERANCE})");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            let _ = writeln!(std::io::stderr(), "error: {what}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args<'_>) -> Result<bool, String> {
    let vectors = read(args.file)?;
    let mut checker = Checker::new(args.model, args.tolerance)?;
    let mut out = std::io::stdout();
    let (mut passed, mut failed) = (0, 0);
    for (group, cases) in [("prompts", &vectors.prompts), ("chats", &vectors.chats)] {
        let mut failures = 0;
        for case in cases {
            if let Err(what) = checker.check(case) {
                failures += 1;
                let _ = writeln!(std::io::stderr(), "{group} {}: {what}", case.name);
            }
        }
        if !cases.is_empty() {
            let _ = writeln!(out, "{group} {} passed, {failures} failed", cases.len() - failures);
        }
        passed += cases.len() - failures;
        failed += failures;
    }
    let (worst, tolerance) = (checker.worst, args.tolerance);
    let _ = writeln!(std::io::stderr(), "largest difference {worst:.2e} nats (tolerance {tolerance:.0e})");
    let _ = writeln!(out, "{passed} passed, {failed} failed");
    Ok(failed == 0 && passed > 0)
}
