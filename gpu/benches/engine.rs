//! Speed of the engine in exact mode: prefill of 512 tokens, and decoding of 1, 4 and 16 sequences at context 512.
//!
//! `STARLING_MODEL=FILE cargo bench -p starling-gpu --bench engine`. Prints the load average and what two threads reach
//! of f32 multiply-adds: figures of a run in which they do not reach 1.8 times one thread's are worth little.

// stdout is the benchmark's result.
#![allow(clippy::print_stdout)]

use starling_core::ids::{AttemptKey, BlockId, TokenId};
use starling_core::request::Sampling;
use starling_core::step::{Sample, Slice, Step};
use starling_gpu::Backend;
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::Model;
use starling_gpu::source::Source;
use starling_gpu::weights::Arithmetic;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const CONTEXT: usize = 512;
const BLOCK_TOKENS: usize = 16;
const THREADS: usize = 2;
const RUNS: usize = 5;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

/// Fused multiply-adds that stay in registers, in GFLOP/s of so many threads together.
fn fma_gflops(threads: usize) -> f64 {
    const ROUNDS: usize = 10_000_000;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| black_box(multiply_adds(ROUNDS)));
        }
    });
    (threads * ROUNDS * FMA_LANES * 2) as f64 / begun.elapsed().as_secs_f64() / 1e9
}

/// Chains enough to hide the latency of one, few enough for the registers of AVX2: ten vectors of eight.
const FMA_LANES: usize = 80;

#[inline(always)]
fn multiply_adds_body(rounds: usize) -> [f32; FMA_LANES] {
    let mut sums = [1.0_f32; FMA_LANES];
    let (a, b) = (black_box(0.999_f32), black_box(0.001_f32));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = sum.mul_add(a, b);
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
fn multiply_adds(rounds: usize) -> [f32; FMA_LANES] {
    #[target_feature(enable = "avx2,fma")]
    fn wide(rounds: usize) -> [f32; FMA_LANES] {
        multiply_adds_body(rounds)
    }
    assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "the self-check needs AVX2 and FMA");
    // SAFETY: the processor has both.
    unsafe { wide(rounds) }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(rounds: usize) -> [f32; FMA_LANES] {
    multiply_adds_body(rounds)
}

/// What one thread reads from memory, in GB/s: decoding one sequence reads every weight once a token.
fn read_gb_s() -> f64 {
    let numbers = vec![1_u64; 64 << 20];
    let begun = Instant::now();
    let sum = numbers.chunks_exact(8).fold([0_u64; 8], |mut sums, chunk| {
        sums.iter_mut().zip(chunk).for_each(|(sum, number)| *sum = sum.wrapping_add(*number));
        sums
    });
    black_box(sum);
    (numbers.len() * 8) as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn slice(tokens: &[TokenId], start: usize, sequence: usize) -> Slice {
    let end = start + tokens.len();
    let blocks_each = (CONTEXT + 64) / BLOCK_TOKENS;
    let first = sequence * blocks_each;
    Slice {
        attempt: AttemptKey::default(),
        tokens: tokens.to_vec(),
        start: start as u32,
        blocks: (first..first + end.div_ceil(BLOCK_TOKENS)).map(|block| BlockId(block as u32)).collect(),
        sample: Some(Sample::new(Sampling::default(), end as u32)),
    }
}

fn prompt(sequence: usize) -> Vec<TokenId> {
    (0..CONTEXT).map(|i| (i * 37 + sequence * 101 + 300) as TokenId % 40_000).collect()
}

fn run(backend: &mut CpuBackend, slices: Vec<Slice>) -> f64 {
    let step = Step { slices };
    let mut out = Vec::new();
    let begun = Instant::now();
    backend.step(&step, &mut out).expect("a sound step");
    begun.elapsed().as_secs_f64()
}

fn main() {
    let path = std::env::var("STARLING_MODEL").expect("STARLING_MODEL names a model file");
    let source = Source::open(path.as_ref()).expect("readable");
    let model = Arc::new(Model::load(&source, Arithmetic::Int8).expect("supported"));
    let model_bytes = model.bytes();
    let blocks = (16 * (CONTEXT + 64) / BLOCK_TOKENS) as u32;
    let config = CpuConfig { blocks, block_tokens: BLOCK_TOKENS as u32, threads: THREADS };
    let mut backend = CpuBackend::new(model, config).expect("memory for 16 sequences");
    println!("exact mode, {THREADS} threads, context {CONTEXT}, medians of {RUNS}; load average {}", load_average());
    let (one, two) = (fma_gflops(1), fma_gflops(2));
    println!("f32 multiply-add self-check: {one:.0} GFLOP/s on 1 thread, {two:.0} on 2 ({:.2} x)", two / one);

    let bytes = model_bytes as f64;
    let read = median((0..RUNS).map(|_| read_gb_s()).collect());
    println!(
        "memory: {read:.1} GB/s on 1 thread; {:.0} MB of weights: at most {:.1} tok/s of one sequence a thread",
        bytes / 1e6,
        read * 1e9 / bytes
    );
    let prefill: Vec<f64> = (0..RUNS).map(|_| run(&mut backend, vec![slice(&prompt(0), 0, 0)])).collect();
    println!("prefill {CONTEXT}: {:.0} tok/s", CONTEXT as f64 / median(prefill));
    for sequence in 1..16 {
        run(&mut backend, vec![slice(&prompt(sequence), 0, sequence)]);
    }
    for batch in [1, 4, 16] {
        let step = |at: usize| (0..batch).map(|sequence| slice(&[500], at, sequence)).collect::<Vec<_>>();
        let times: Vec<f64> = (0..RUNS * 4).map(|n| run(&mut backend, step(CONTEXT + n))).collect();
        let time = median(times);
        println!("decode, {batch} sequences: {:.1} tok/s ({:.1} ms a step)", batch as f64 / time, time * 1e3);
    }
    println!("load average {} after; f32 multiply-add 2 threads {:.0} GFLOP/s", load_average(), fma_gflops(2));
}
