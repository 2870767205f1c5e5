//! What this machine does: its arithmetic, its memory, and how long steps of a rank take on it.
//!
//! The first two say whether the third can be believed: where two threads reach less than 1.8 times one thread's
//! multiply-adds, somebody else is at work.

use crate::check::Bounds;
use crate::{Backend, StepError};
use starling_core::ids::{AttemptKey, BlockId, TokenId};
use starling_core::kv::Pool;
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::request::Sampling;
use starling_core::step::{Sample, Slice, Step, Table};
use std::hint::black_box;
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Tokens of a prompt, and what a decoding sequence has behind it.
pub const CONTEXT: u32 = 512;
/// Sequences that decode together, in the order of their measurements.
pub const BATCHES: [usize; 3] = [1, 4, 16];
/// Decoding steps for each measurement of a prefill: they are short and vary more.
const DECODES_PER_RUN: u32 = 4;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    #[error("runs must be at least 1")]
    NoRuns,
    #[error("a sequence of {wanted} tokens does not fit the context of the model ({context})")]
    Context { wanted: u32, context: u32 },
    #[error("KV pool of life cycle {life_cycle} has {blocks} blocks, {wanted} are needed")]
    Blocks { life_cycle: usize, wanted: u32, blocks: u32 },
    #[error(transparent)]
    Step(#[from] StepError),
}

/// How long steps take, as medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTimes {
    /// Seconds of a step that computes a prompt of `CONTEXT` tokens.
    pub prefill_s: f64,
    /// Seconds of a step that decodes as many sequences as `BATCHES` says, at context `CONTEXT`.
    pub decode_s: [f64; BATCHES.len()],
}

/// Costs of the engine `timed` that come closest to what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    pub prefill_per_token: Duration,
    pub decode_per_step: Duration,
    pub decode_per_sequence: Duration,
}

impl StepTimes {
    /// Prompt tokens a second.
    pub fn prefill_tok_s(&self) -> f64 {
        f64::from(CONTEXT) / self.prefill_s
    }

    /// Sequences of a batch and their tokens a second, all together.
    pub fn decode_tok_s(&self) -> [(usize, f64); BATCHES.len()] {
        std::array::from_fn(|at| (BATCHES[at], BATCHES[at] as f64 / self.decode_s[at]))
    }

    /// The line `per_step + sequences * per_sequence` with the least relative errors, neither part of it negative.
    pub fn costs(&self) -> Costs {
        let points = || BATCHES.iter().zip(self.decode_s).map(|(batch, s)| (1.0 / s, *batch as f64 / s));
        let sum = |of: fn((f64, f64)) -> f64| points().map(of).sum::<f64>();
        let (p, q) = (sum(|(p, _)| p), sum(|(_, q)| q));
        let (pp, pq, qq) = (sum(|(p, _)| p * p), sum(|(p, q)| p * q), sum(|(_, q)| q * q));
        let determinant = pp * qq - pq * pq;
        let (per_step, per_sequence) = ((p * qq - q * pq) / determinant, (q * pp - p * pq) / determinant);
        let (per_step, per_sequence) = match (per_step >= 0.0, per_sequence >= 0.0) {
            (true, true) => (per_step, per_sequence),
            (false, _) => (0.0, q / qq),
            (true, false) => (p / pp, 0.0),
        };
        Costs {
            prefill_per_token: seconds(self.prefill_s / f64::from(CONTEXT)),
            decode_per_step: seconds(per_step),
            decode_per_sequence: seconds(per_sequence),
        }
    }
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or_default()
}

/// Measures steps of a rank: prefill `runs` times, each size of decoding four times as often.
pub struct Calibration {
    runs: u32,
    bounds: Bounds,
}

impl Calibration {
    /// # Errors
    /// No runs, or a model or a pool too small for them.
    pub fn new(runs: u32, bounds: Bounds) -> Result<Self, CalibrateError> {
        let (tokens, wanted) = (tokens_each(runs), Self::blocks_needed(runs, bounds.block_tokens));
        if runs == 0 {
            return Err(CalibrateError::NoRuns);
        }
        if tokens > bounds.context {
            return Err(CalibrateError::Context { wanted: tokens, context: bounds.context });
        }
        if let Some(life_cycle) = bounds.pools.iter().position(|pool| pool.blocks < wanted) {
            return Err(CalibrateError::Blocks { life_cycle, wanted, blocks: bounds.pools[life_cycle].blocks });
        }
        Ok(Self { runs, bounds })
    }

    /// KV blocks, in each life cycle, of a rank that can be measured: a prompt is one chunk, which needs all of them.
    pub fn blocks_needed(runs: u32, block_tokens: u32) -> u32 {
        let most = BATCHES.iter().max().map_or(0, |batch| *batch as u32);
        most.saturating_mul(tokens_each(runs).div_ceil(block_tokens.max(1)))
    }

    /// Runs the steps; `done` is called after each.
    ///
    /// # Errors
    /// A step failed.
    pub fn measure(&self, backend: &mut dyn Backend, mut done: impl FnMut()) -> Result<StepTimes, CalibrateError> {
        let mut out = Vec::new();
        let mut run = |slices| -> Result<f64, StepError> {
            let step = Step { slices, ..Step::default() };
            out.clear();
            let begun = Instant::now();
            backend.step(&step, &mut out)?;
            let elapsed = begun.elapsed().as_secs_f64();
            done();
            Ok(elapsed)
        };
        let prefills = (0..self.runs).map(|_| run(vec![self.prefill(0)])).collect::<Result<Vec<_>, _>>()?;
        for sequence in 1..BATCHES.iter().copied().max().unwrap_or(0) {
            run(vec![self.prefill(sequence)])?;
        }
        let mut decode_s = [0.0; BATCHES.len()];
        for (time, batch) in decode_s.iter_mut().zip(BATCHES) {
            let at = |n: u32| (0..batch).map(|sequence| self.slice(&[500], CONTEXT + n, sequence)).collect();
            let times = (0..self.runs * DECODES_PER_RUN).map(|n| run(at(n))).collect::<Result<Vec<_>, _>>()?;
            *time = median(times);
        }
        Ok(StepTimes { prefill_s: median(prefills), decode_s })
    }

    /// How often `measure` calls `done`.
    pub fn steps(&self) -> u32 {
        let sequences = BATCHES.iter().max().map_or(0, |batch| *batch as u32);
        self.runs + sequences.saturating_sub(1) + self.runs * DECODES_PER_RUN * BATCHES.len() as u32
    }

    fn prefill(&self, sequence: usize) -> Slice {
        let token = |i: usize| (i * 37 + sequence * 101 + 300) as TokenId % 40_000;
        self.slice(&(0..CONTEXT as usize).map(token).collect::<Vec<_>>(), 0, sequence)
    }

    fn slice(&self, tokens: &[TokenId], start: u32, sequence: usize) -> Slice {
        let end = start + tokens.len() as u32;
        let blocks_each = tokens_each(self.runs).div_ceil(self.bounds.block_tokens);
        let first = sequence as u32 * blocks_each;
        let table = |pool: &Pool| {
            let count = if pool.retention == Retention::State { 1 } else { end.div_ceil(self.bounds.block_tokens) };
            Table::whole((first..first + count).map(BlockId).collect())
        };
        Slice {
            attempt: AttemptKey::default(),
            tokens: tokens.iter().map(|token| token % self.bounds.vocabulary).collect(),
            start,
            tables: self.bounds.pools.iter().map(table).collect(),
            sample: Some(Sample::new(Sampling::default(), end)),
        }
    }
}

/// Tokens that a sequence has in the end.
fn tokens_each(runs: u32) -> u32 {
    CONTEXT.saturating_add(runs.saturating_mul(DECODES_PER_RUN))
}

/// The middle one; the upper of two.
///
/// # Panics
/// If there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processes that ran or wanted to, on average over the last minute, where the system tells.
pub fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Chains enough to hide the latency of one, few enough for the registers of AVX2: ten vectors of eight.
const FMA_LANES: usize = 80;

/// Fused multiply-adds that stay in registers, in GFLOP/s of so many threads together; `None` where the processor has none.
pub fn fma_gflops(threads: usize) -> Option<f64> {
    const ROUNDS: usize = 10_000_000;
    if !has_fma() {
        return None;
    }
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| black_box(multiply_adds(ROUNDS)));
        }
    });
    Some((threads * ROUNDS * FMA_LANES * 2) as f64 / begun.elapsed().as_secs_f64() / 1e9)
}

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
fn has_fma() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

#[cfg(target_arch = "x86_64")]
fn multiply_adds(rounds: usize) -> [f32; FMA_LANES] {
    #[target_feature(enable = "avx2,fma")]
    fn wide(rounds: usize) -> [f32; FMA_LANES] {
        multiply_adds_body(rounds)
    }
    assert!(has_fma(), "the caller looked");
    // SAFETY: the processor has both.
    unsafe { wide(rounds) }
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fma() -> bool {
    cfg!(target_arch = "aarch64")
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(rounds: usize) -> [f32; FMA_LANES] {
    multiply_adds_body(rounds)
}

/// What one thread reads from memory, in GB/s: decoding one sequence reads every weight once a token.
pub fn read_gb_s() -> f64 {
    let numbers = vec![1_u64; 64 << 20];
    let begun = Instant::now();
    let sum = numbers.chunks_exact(8).fold([0_u64; 8], |mut sums, chunk| {
        sums.iter_mut().zip(chunk).for_each(|(sum, number)| *sum = sum.wrapping_add(*number));
        sums
    });
    black_box(sum);
    (numbers.len() * 8) as f64 / begun.elapsed().as_secs_f64() / 1e9
}
