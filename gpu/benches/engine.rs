//! Speed of the engine: prefill of 512 tokens, decoding of 1, 4 and 16 sequences at context 512, where a step spends its
//! time, the cost of long contexts, loading, memory, and how far int8 is from exact.
//!
//! `STARLING_MODEL=FILE cargo bench -p starling-gpu --bench engine -- [threads=2] [arithmetic=int8] [part ...]`; the parts are
//! `speed`, `context`, `quality`, and all if none is named. Prints the load average and what two threads reach of f32
//! multiply-adds: figures of a run in which they do not reach 1.8 times one thread's are worth little, and are marked.
//! Times are the best and the median of several runs; `on cpu` is what the calling thread was given of the processor, which
//! is what to compare with one thread on a machine that others use.
//!
//! If `LLAMA_BENCH` names a program, it is run between ours with the model as argument, and prints lines of a name
//! (`prefill512`, `decode1`, `decode4`, `decode16`) and tokens a second, which are set against ours.

// stdout is the benchmark's result.
#![allow(clippy::print_stdout)]

use starling_core::ids::{AttemptKey, BlockId, TokenId};
use starling_core::request::Sampling;
use starling_core::step::{Sample, Slice, Step, Table};
use starling_gpu::Backend;
use starling_gpu::calibrate::{fma_gflops, load_average, median, read_gb_s};
use starling_gpu::cpu::{CpuBackend, CpuConfig, StepTimes};
use starling_gpu::llama::Model;
use starling_gpu::source::Source;
use starling_gpu::weights::Arithmetic;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "engine/quality.rs"]
mod quality;

const CONTEXT: usize = 512;
const BLOCK_TOKENS: usize = 16;
/// Sequences of the largest batch.
const SEQUENCES: usize = 16;
/// Tokens behind the context that a sequence has room for.
const ROOM: usize = 64;
const RUNS: usize = 5;
const DECODE_RUNS: usize = 20;
/// Two threads below this multiple of one thread's multiply-adds: the machine is not ours.
const SCALING_MIN: f64 = 1.8;

fn best(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn load() -> String {
    load_average().map_or_else(|| "unknown".into(), |load| format!("{load:.2}"))
}

/// Seconds that this thread has run so far, if the system says so.
fn on_cpu_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}

/// Memory of this process, in MB, if the system says so.
fn resident_mb() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? / 1e3)
}

/// Multiply-adds of one thread and of two, and whether they say that the machine is ours.
fn self_check() -> bool {
    let Some((one, two)) = fma_gflops(1).zip(fma_gflops(2)) else { return false };
    println!(
        "load average {}; f32 multiply-add: {one:.0} GFLOP/s on 1 thread, {two:.0} on 2 ({:.2} x)",
        load(),
        two / one
    );
    two / one >= SCALING_MIN
}

/// A sequence of so many blocks at most, the `sequence`-th of its like. All life cycles have the same table, which `run` adds.
fn slice(tokens: &[TokenId], start: usize, (sequence, blocks_each): (usize, usize)) -> Slice {
    let end = start + tokens.len();
    let first = sequence * blocks_each;
    let blocks = first..first + end.div_ceil(BLOCK_TOKENS);
    Slice {
        attempt: AttemptKey::default(),
        tokens: tokens.to_vec(),
        start: start as u32,
        tables: vec![Table::whole(blocks.map(|block| BlockId(block as u32)).collect())],
        sample: Some(Sample::new(Sampling::default(), end as u32)),
    }
}

fn prompt(sequence: usize, length: usize, vocabulary: u32) -> Vec<TokenId> {
    (0..length).map(|i| (i * 37 + sequence * 101 + 300) as TokenId % vocabulary.min(40_000)).collect()
}

fn backend(model: &Arc<Model>, threads: usize, tokens: usize) -> CpuBackend {
    let blocks = tokens.div_ceil(BLOCK_TOKENS) as u32;
    let life_cycles = model.config().life_cycles(model.arithmetic(), BLOCK_TOKENS as u32).len();
    let config = CpuConfig { blocks: vec![blocks; life_cycles], block_tokens: BLOCK_TOKENS as u32, threads };
    CpuBackend::new(Arc::clone(model), config).expect("memory for the blocks")
}

/// A step of slices that have one table each, with that table in all life cycles.
fn step(backend: &CpuBackend, mut slices: Vec<Slice>) -> Step {
    for slice in &mut slices {
        slice.tables = vec![slice.tables[0].clone(); backend.bounds().pools.len()];
    }
    Step { slices, ..Step::default() }
}

/// Seconds of a step, and seconds that the calling thread was on a processor.
fn run(backend: &mut CpuBackend, slices: Vec<Slice>) -> (f64, f64) {
    let step = step(backend, slices);
    let mut out = Vec::new();
    let (begun, on_cpu) = (Instant::now(), on_cpu_s());
    backend.step(&step, &mut out).expect("a sound step");
    let wall = begun.elapsed().as_secs_f64();
    (wall, on_cpu_s().zip(on_cpu).map_or(wall, |(after, before)| after - before))
}

fn shares(times: StepTimes) -> String {
    let StepTimes { steps, linears, attention, head, rest } = times;
    let each = |time: Duration| time.as_secs_f64() * 1e3 / steps.max(1) as f64;
    format!(
        "linears {:.2}, attention {:.2}, head {:.2}, rest {:.2} ms",
        each(linears),
        each(attention),
        each(head),
        each(rest)
    )
}

/// Runs steps and says how fast they were; returns the best tokens a second.
fn measured(
    name: &str,
    (backend, runs, tokens): (&mut CpuBackend, usize, usize),
    mut step: impl FnMut(usize) -> Vec<Slice>,
) -> f64 {
    run(backend, step(0));
    backend.measure(true);
    let times: Vec<(f64, f64)> = (0..runs).map(|n| run(backend, step(n))).collect();
    let shares = shares(backend.times());
    backend.measure(false);
    let (wall, on_cpu): (Vec<f64>, Vec<f64>) = times.into_iter().unzip();
    let (quickest, usual, on_cpu) = (best(&wall), median(wall.clone()), best(&on_cpu));
    println!(
        "{name}: best {:.1} tok/s ({:.2} ms), median {:.1} tok/s, on cpu {:.2} ms; means: {shares}",
        tokens as f64 / quickest,
        quickest * 1e3,
        tokens as f64 / usual,
        on_cpu * 1e3
    );
    tokens as f64 / quickest
}

/// Tokens a second by the name of what was measured.
fn speed(model: &Arc<Model>, threads: usize) -> BTreeMap<String, f64> {
    let each = (CONTEXT + ROOM) / BLOCK_TOKENS;
    let vocabulary = model.config().vocabulary;
    let mut backend = backend(model, threads, SEQUENCES * (CONTEXT + ROOM));
    let whole = |sequence: usize| vec![slice(&prompt(sequence, CONTEXT, vocabulary), 0, (sequence, each))];
    let mut found = BTreeMap::new();
    let prefill = measured("prefill 512", (&mut backend, RUNS, CONTEXT), |_| whole(0));
    found.insert("prefill512".to_owned(), prefill);
    for sequence in 1..SEQUENCES {
        run(&mut backend, whole(sequence));
    }
    for batch in [1, 4, SEQUENCES] {
        let step = |n: usize| (0..batch).map(|sequence| slice(&[500], CONTEXT + n, (sequence, each))).collect();
        let name = format!("decode, {batch} sequences");
        found.insert(format!("decode{batch}"), measured(&name, (&mut backend, DECODE_RUNS, batch), step));
    }
    found
}

/// The other program's tokens a second, by the same names.
fn other_speed(program: &str, model: &str) -> BTreeMap<String, f64> {
    let output = Command::new(program).arg(model).output().expect("LLAMA_BENCH names a program");
    assert!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.lines().map(|line| line.split_whitespace());
    words.filter_map(|mut words| Some((words.next()?.to_owned(), words.next()?.parse().ok()?))).collect()
}

/// Decoding one sequence at contexts of several lengths.
fn long_contexts(model: &Arc<Model>, threads: usize) {
    let (longest, vocabulary) = (model.config().context.min(8192) as usize, model.config().vocabulary);
    let mut backend = backend(model, threads, longest);
    let tokens = prompt(0, longest, vocabulary);
    let blocks = longest.div_ceil(BLOCK_TOKENS);
    let (mut at, begun) = (0, Instant::now());
    for context in [128, 512, 1024, 2048, 4096, longest - ROOM] {
        if context > longest - ROOM {
            continue;
        }
        while at < context {
            let end = context.min(at + CONTEXT);
            run(&mut backend, vec![slice(&tokens[at..end], at, (0, blocks))]);
            at = end;
        }
        let step = |n: usize| vec![slice(&[500], context + n, (0, blocks))];
        measured(&format!("decode at context {context}"), (&mut backend, DECODE_RUNS, 1), step);
    }
    println!("prefill of {at} tokens and these steps: {:.1} s", begun.elapsed().as_secs_f64());
}

fn main() {
    let path = std::env::var("STARLING_MODEL").expect("STARLING_MODEL names a model file");
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let option = |name: &str| arguments.iter().find_map(|argument| argument.strip_prefix(name));
    let threads = option("threads=").map_or(2, |threads| threads.parse().expect("threads=NUMBER"));
    let arithmetic = match option("arithmetic=") {
        None | Some("int8") => Arithmetic::Int8,
        Some("exact") => Arithmetic::Exact,
        Some(other) => panic!("arithmetic={other} is neither int8 nor exact"),
    };
    let parts: Vec<_> = arguments.iter().filter(|argument| !argument.contains('=')).map(String::as_str).collect();
    let wants = |part: &str| parts.is_empty() || parts.contains(&part);

    println!("{arithmetic}, {threads} threads, context {CONTEXT}");
    let was_ours = self_check();
    let before = resident_mb();
    let begun = Instant::now();
    let source = Source::open(Path::new(&path)).expect("readable");
    let model = Arc::new(Model::load(&source, arithmetic).expect("supported"));
    let loaded = begun.elapsed();
    let megabytes = model.bytes() as f64 / 1e6;
    run(&mut backend(&model, threads, CONTEXT), vec![slice(&[1], 0, (0, 1))]);
    println!("loaded in {:.2} s, first token after {:.2} s", loaded.as_secs_f64(), begun.elapsed().as_secs_f64());
    if let Some((after, before)) = resident_mb().zip(before) {
        println!("memory: {:.0} MB in all, {megabytes:.0} MB of weights", after - before);
    }
    drop(source);
    let read = median((0..RUNS).map(|_| read_gb_s()).collect());
    let limit = read * 1e3 / megabytes;
    println!("memory: {read:.1} GB/s on 1 thread: at most {limit:.1} tok/s of one sequence a thread");

    if wants("speed") {
        let other = std::env::var("LLAMA_BENCH").ok();
        let theirs = |_: usize| other.as_deref().map(|program| other_speed(program, &path));
        // Theirs before and after ours, so that a change of the machine shows.
        let rounds: Vec<_> = (0..if other.is_some() { 3 } else { 1 })
            .map(|round| (theirs(round), speed(&model, threads), theirs(round)))
            .collect();
        for (before, ours, after) in rounds {
            let (Some(before), Some(after)) = (before, after) else { continue };
            for (name, ours) in ours {
                let Some((before, after)) = before.get(&name).zip(after.get(&name)) else { continue };
                let theirs = before.max(*after);
                println!("{name}: ours {ours:.1}, theirs {before:.1} and {after:.1}: {:.2} x", ours / theirs);
            }
        }
    }
    if wants("context") {
        long_contexts(&model, threads);
    }
    if wants("quality") {
        quality::compare(&path, threads);
    }
    if !(self_check() && was_ours) {
        println!("DISCARD: two threads do not reach {SCALING_MIN} x of one: others use this machine");
    }
}
