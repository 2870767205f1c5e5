//! Models and paged KV: runs one step of one rank and owns the bytes of its KV blocks.
//!
//! Knows no users, no actors and no async runtime. A backend is driven by one OS thread.

pub mod calibrate;
pub mod check;
pub mod cpu;
pub mod dequant;
pub mod gguf;
pub mod isa;
pub mod kv;
pub mod llama;
pub mod sampling;
pub mod source;
pub mod team;
#[doc(hidden)]
pub mod testing;
pub mod timed;
pub mod weights;

mod attention;
mod int8;
mod kernels;
mod linear;

use check::{BadCopy, BadTable};
use starling_core::step::{Sampled, Step};

/// Why a step failed. The rank's KV is not to be trusted afterwards.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error("copy {copy}, of life cycle {life_cycle}, cannot be made: {why}")]
    BadCopy { copy: usize, life_cycle: u8, why: BadCopy },
    #[error("step names token {token}, the vocabulary has {vocabulary}")]
    TokenOutOfRange { token: u32, vocabulary: u32 },
    #[error("slice {slice} is malformed: {what}")]
    BadSlice { slice: usize, what: &'static str },
    #[error("slice {slice} has {tables} tables, there are {life_cycles} life cycles")]
    TableCount { slice: usize, tables: usize, life_cycles: usize },
    #[error("slice {slice} has a malformed table for life cycle {life_cycle}: {why}")]
    BadTable { slice: usize, life_cycle: usize, why: BadTable },
    #[error("logits of slice {slice} are not finite")]
    NotFinite { slice: usize },
}

/// Runs steps of one rank.
pub trait Backend: Send {
    /// Runs one step and appends a token for each draw, in the order of the slices and within them of positions.
    ///
    /// # Errors
    /// A malformed step (nothing was computed), or logits that are not finite.
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError>;
}
