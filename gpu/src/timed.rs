//! The engine `timed`: waits as long as a step would take, and computes nothing.
//!
//! Its tokens follow from the last known token and its position, so a sequence that starts again elsewhere goes on as
//! it would have.

use crate::check::{Bounds, Checker};
use crate::sampling::mix;
use crate::{Backend, StepError};
use starling_core::ids::TokenId;
use starling_core::request::Sampling;
use starling_core::step::{Drawn, Sampled, Slice, Step};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// What steps cost, and which tokens there are.
#[derive(Clone, Debug)]
pub struct TimedConfig {
    pub bounds: Bounds,
    /// Time for each token of a slice that is not a decode, and for each draft (see `TimedConfig::cost`).
    pub prefill_per_token: Duration,
    /// Time for each step that decodes at all.
    pub decode_per_step: Duration,
    /// Time for each sequence that decodes in a step.
    pub decode_per_sequence: Duration,
    /// Tokens that are never emitted: control tokens, so that sequences end by length.
    pub excluded: Vec<TokenId>,
}

impl TimedConfig {
    /// How long a step takes. A slice of one token behind others that samples is a decode, drafts aside.
    pub fn cost(&self, step: &Step) -> Duration {
        let decodes = |slice: &&Slice| {
            let drafts = slice.sample.as_ref().map(|sample| sample.drafts as usize);
            slice.start > 0 && drafts.is_some_and(|drafts| slice.tokens.len() == drafts + 1)
        };
        let sequences = step.slices.iter().filter(decodes).count();
        let prefilled = step.tokens() - sequences;
        let times = |cost: Duration, count: usize| cost.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        times(self.prefill_per_token, prefilled)
            .saturating_add(times(self.decode_per_step, usize::from(sequences > 0)))
            .saturating_add(times(self.decode_per_sequence, sequences))
    }
}

/// Every token of the vocabulary is excluded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no token is left to emit (vocabulary {vocabulary}, excluded {excluded})")]
pub struct NoTokens {
    pub vocabulary: u32,
    pub excluded: usize,
}

/// A backend that costs time only.
pub struct TimedBackend {
    config: TimedConfig,
    /// Sorted, without duplicates, within the vocabulary.
    excluded: Vec<TokenId>,
    wait: Box<dyn FnMut(Duration) + Send>,
    checker: Checker,
}

impl TimedBackend {
    /// Waits by sleeping.
    ///
    /// # Errors
    /// No token is left to emit.
    pub fn new(config: TimedConfig) -> Result<Self, NoTokens> {
        Self::with_wait(config, std::thread::sleep)
    }

    /// Waits by calling `wait`, so that time may be virtual. Costs of nothing are not waited for.
    ///
    /// # Errors
    /// No token is left to emit.
    pub fn with_wait(config: TimedConfig, wait: impl FnMut(Duration) + Send + 'static) -> Result<Self, NoTokens> {
        let vocabulary = config.bounds.vocabulary;
        let mut excluded = config.excluded.clone();
        excluded.retain(|&token| token < vocabulary);
        excluded.sort_unstable();
        excluded.dedup();
        if excluded.len() >= vocabulary as usize {
            return Err(NoTokens { vocabulary, excluded: excluded.len() });
        }
        Ok(Self { config, excluded, wait: Box::new(wait), checker: Checker::default() })
    }

    fn allowed(&self) -> u32 {
        self.config.bounds.vocabulary - self.excluded.len() as u32
    }

    /// The token that follows `last` at `position`.
    fn next_token(&self, last: TokenId, position: u32) -> TokenId {
        let drawn = mix(u64::from(last) << 32 | u64::from(position));
        self.nth_allowed((drawn % u64::from(self.allowed())) as TokenId)
    }

    /// All are as probable as each other, so the first ones are told.
    fn top(&self, sampling: &Sampling, logprob: f32) -> Vec<(TokenId, f32)> {
        let count = sampling.top_logprobs.min(self.allowed());
        (0..count).map(|nth| (self.nth_allowed(nth), logprob)).collect()
    }

    fn nth_allowed(&self, nth: u32) -> TokenId {
        let mut token = nth;
        // Step over each excluded one at or before it.
        for &excluded in &self.excluded {
            if excluded > token {
                break;
            }
            token += 1;
        }
        token
    }
}

impl Backend for TimedBackend {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        self.checker.check(step, &self.config.bounds)?;
        let cost = self.config.cost(step);
        if !cost.is_zero() {
            (self.wait)(cost);
        }
        let logprob = -(self.allowed() as f32).ln();
        for (index, slice) in step.slices.iter().enumerate() {
            for draw in slice.draws() {
                let token = self.next_token(slice.tokens[draw.row], draw.position);
                out.push(Sampled::new(index, Drawn { token, logprob, top: self.top(draw.sampling, logprob) }));
            }
        }
        Ok(())
    }
}
