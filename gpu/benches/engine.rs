//! Speed of the engine in exact mode: prefill of 512 tokens, and decoding of 1, 4 and 16 sequences at context 512.
//!
//! `STARLING_MODEL=FILE cargo bench -p starling-gpu --bench engine`. Prints the load average and what two threads reach
//! of f32 multiply-adds: figures of a run in which they do not reach 1.8 times one thread's are worth little.

// stdout is the benchmark's result.
#![allow(clippy::print_stdout)]

use starling_gpu::calibrate::{CONTEXT, Calibration, fma_gflops, load_average, median, read_gb_s};
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::Model;
use starling_gpu::source::Source;
use starling_gpu::weights::Arithmetic;
use std::sync::Arc;

const BLOCK_TOKENS: u32 = 16;
const THREADS: usize = 2;
const RUNS: u32 = 5;

fn load() -> String {
    load_average().map_or_else(|| "unknown".into(), |load| format!("{load:.2}"))
}

fn main() {
    let path = std::env::var("STARLING_MODEL").expect("STARLING_MODEL names a model file");
    let source = Source::open(path.as_ref()).expect("readable");
    let model = Arc::new(Model::load(&source, Arithmetic::Int8).expect("supported"));
    let model_bytes = model.bytes();
    let blocks = Calibration::blocks_needed(RUNS, BLOCK_TOKENS);
    let config = CpuConfig { blocks, block_tokens: BLOCK_TOKENS, threads: THREADS };
    let mut backend = CpuBackend::new(model, config).expect("memory for 16 sequences");
    println!("int8 mode, {THREADS} threads, context {CONTEXT}, medians of {RUNS}; load average {}", load());
    let (one, two) = (fma_gflops(1).expect("AVX2 and FMA"), fma_gflops(2).expect("AVX2 and FMA"));
    println!("f32 multiply-add self-check: {one:.0} GFLOP/s on 1 thread, {two:.0} on 2 ({:.2} x)", two / one);

    let bytes = model_bytes as f64;
    let read = median((0..RUNS).map(|_| read_gb_s()).collect());
    println!(
        "memory: {read:.1} GB/s on 1 thread; {:.0} MB of weights: at most {:.1} tok/s of one sequence a thread",
        bytes / 1e6,
        read * 1e9 / bytes
    );
    let calibration = Calibration::new(RUNS, *backend.bounds()).expect("a model for such contexts");
    let times = calibration.measure(&mut backend, || {}).expect("sound steps");
    println!("prefill {CONTEXT}: {:.0} tok/s", times.prefill_tok_s());
    for ((batch, rate), s) in times.decode_tok_s().into_iter().zip(times.decode_s) {
        println!("decode, {batch} sequences: {rate:.1} tok/s ({:.1} ms a step)", s * 1e3);
    }
    println!(
        "load average {} after; f32 multiply-add 2 threads {:.0} GFLOP/s",
        load(),
        fma_gflops(2).expect("AVX2 and FMA")
    );
}
