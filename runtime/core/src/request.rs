//! What a request asks for, once text and JSON are behind it.

use crate::ids::TokenId;
use crate::rejection::{Parameter, Rejection};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::sync::Arc;

pub const TEMPERATURE: RangeInclusive<f32> = 0.0..=2.0;
/// Below it, dividing by the temperature leaves nothing to draw: it is greedy.
pub const TEMPERATURE_MIN: f32 = 1e-5;
pub const MIN_P: RangeInclusive<f32> = 0.0..=1.0;
/// Of `presence_penalty` and `frequency_penalty`; OpenAI's range.
pub const PENALTY: RangeInclusive<f32> = -2.0..=2.0;
/// A factor: what is useful lies between 1 and 2. The bounds keep logits far from where they overflow.
pub const REPETITION_PENALTY: RangeInclusive<f32> = 0.01..=100.0;
pub const LOGIT_BIAS: RangeInclusive<f32> = -100.0..=100.0;
pub const LOGIT_BIAS_ENTRIES_MAX: usize = 300;
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// More than any model has; each is looked for behind each token.
pub const STOP_TOKENS_MAX: usize = 256;

/// How the next token is chosen. `temperature == 0` is greedy: the highest logit, ties to the lowest id.
///
/// The order is: the adjustment, the temperature, `top_k`, `top_p`, `min_p`, then the draw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 (greedy) to 2.
    pub temperature: f32,
    /// Keep the `top_k` highest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep what has at least this share of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Every random number is a function of (seed, child, position, use): the same position draws the same number in
    /// any attempt and in any batch.
    pub seed: u64,
    /// What is changed about the logits first; `None` where nothing is.
    pub adjustment: Option<Arc<Adjustment>>,
    /// How many of the most probable tokens are told with each token, 20 at most.
    pub top_logprobs: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, adjustment: None, top_logprobs: 0 }
    }
}

impl Sampling {
    pub fn is_greedy(&self) -> bool {
        self.temperature < TEMPERATURE_MIN || self.top_k == 1
    }

    /// Whether a draw has to know the tokens before it.
    pub fn has_penalties(&self) -> bool {
        self.adjustment.as_ref().is_some_and(|adjustment| adjustment.has_penalties())
    }

    /// # Errors
    /// `BadParameter` for the first number that is out of its range, `TokenOutOfRange` for a token that there is none of.
    pub fn check(&self, vocabulary: u32) -> Result<(), Rejection> {
        within(Parameter::Temperature, self.temperature, &TEMPERATURE)?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Rejection::bad(Parameter::TopP, self.top_p));
        }
        within(Parameter::MinP, self.min_p, &MIN_P)?;
        if self.top_logprobs > TOP_LOGPROBS_MAX {
            return Err(Rejection::bad(Parameter::TopLogprobs, self.top_logprobs));
        }
        self.adjustment.as_ref().map_or(Ok(()), |adjustment| adjustment.check(vocabulary))
    }
}

/// What is changed about the logits before anything else is.
///
/// The penalties first, then the bias: they weigh what the model said, not what the client added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adjustment {
    /// Of each token in the prompt or the output, a positive logit is divided by this and a negative one multiplied.
    pub repetition_penalty: f32,
    /// Taken from the logit of each token in the output.
    pub presence_penalty: f32,
    /// Taken from the logit of a token as often as it is in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
}

impl Default for Adjustment {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0, logit_bias: Vec::new() }
    }
}

impl Adjustment {
    /// `None` where it would change nothing.
    pub fn unless_neutral(self) -> Option<Arc<Self>> {
        (self.has_penalties() || !self.logit_bias.is_empty()).then(|| Arc::new(self))
    }

    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    fn check(&self, vocabulary: u32) -> Result<(), Rejection> {
        within(Parameter::RepetitionPenalty, self.repetition_penalty, &REPETITION_PENALTY)?;
        within(Parameter::PresencePenalty, self.presence_penalty, &PENALTY)?;
        within(Parameter::FrequencyPenalty, self.frequency_penalty, &PENALTY)?;
        if self.logit_bias.len() > LOGIT_BIAS_ENTRIES_MAX {
            return Err(Rejection::bad(Parameter::LogitBiasEntries, self.logit_bias.len()));
        }
        for &(token, bias) in &self.logit_bias {
            in_vocabulary(token, vocabulary)?;
            within(Parameter::LogitBias, bias, &LOGIT_BIAS)?;
        }
        Ok(())
    }
}

fn within(parameter: Parameter, number: f32, range: &RangeInclusive<f32>) -> Result<(), Rejection> {
    // NaN is in no range.
    match range.contains(&number) {
        true => Ok(()),
        false => Err(Rejection::bad(parameter, number)),
    }
}

/// # Errors
/// `TokenOutOfRange` for a token that is not in the vocabulary.
pub fn in_vocabulary(token: TokenId, vocabulary: u32) -> Result<(), Rejection> {
    match token < vocabulary {
        true => Ok(()),
        false => Err(Rejection::TokenOutOfRange { token, vocabulary }),
    }
}

/// When a sequence ends by itself, and how its tokens are drawn: all that a rank needs besides the prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    pub sampling: Sampling,
    /// Tokens to generate at most, counted over all attempts.
    pub max_new_tokens: u32,
    /// Tokens to generate before one that ends the sequence may be drawn, counted over all attempts.
    pub min_new_tokens: u32,
    /// Tokens that end the sequence (the model's end-of-generation tokens). The token itself is delivered.
    pub stop_tokens: Vec<TokenId>,
}

impl Generation {
    /// # Errors
    /// As [`Sampling::check`], and for more stop tokens than there may be.
    pub fn check(&self, vocabulary: u32) -> Result<(), Rejection> {
        if self.stop_tokens.len() > STOP_TOKENS_MAX {
            return Err(Rejection::bad(Parameter::StopTokens, self.stop_tokens.len()));
        }
        self.sampling.check(vocabulary)
    }
}

/// Why a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Finish {
    /// A stop token was sampled, or the ingress found a stop string.
    Stop,
    /// `max_new_tokens` were generated, or the context is full.
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut Sampling, &mut Adjustment)) -> Result<(), Rejection> {
        let (mut sampling, mut adjustment) = (Sampling::default(), Adjustment::default());
        change(&mut sampling, &mut adjustment);
        sampling.adjustment = Some(Arc::new(adjustment));
        sampling.check(100)
    }

    #[test]
    fn numbers_out_of_their_range_are_refused_by_name_and_value() {
        type Change = fn(&mut Sampling, &mut Adjustment);
        let cases: [(Change, Parameter, &str); 17] = [
            (|s, _| s.temperature = f32::NAN, Parameter::Temperature, "NaN"),
            (|s, _| s.temperature = f32::INFINITY, Parameter::Temperature, "inf"),
            (|s, _| s.temperature = -0.5, Parameter::Temperature, "-0.5"),
            (|s, _| s.top_p = 0.0, Parameter::TopP, "0"),
            (|s, _| s.top_p = f32::NAN, Parameter::TopP, "NaN"),
            (|s, _| s.min_p = 1.5, Parameter::MinP, "1.5"),
            (|s, _| s.min_p = f32::NAN, Parameter::MinP, "NaN"),
            (|s, _| s.top_logprobs = 21, Parameter::TopLogprobs, "21"),
            (|_, a| a.repetition_penalty = 0.0, Parameter::RepetitionPenalty, "0"),
            (|_, a| a.repetition_penalty = -1.0, Parameter::RepetitionPenalty, "-1"),
            (|_, a| a.repetition_penalty = f32::NAN, Parameter::RepetitionPenalty, "NaN"),
            (|_, a| a.presence_penalty = 2.5, Parameter::PresencePenalty, "2.5"),
            (|_, a| a.frequency_penalty = -2.5, Parameter::FrequencyPenalty, "-2.5"),
            (|_, a| a.frequency_penalty = f32::NEG_INFINITY, Parameter::FrequencyPenalty, "-inf"),
            (|_, a| a.logit_bias = vec![(1, 0.0); 301], Parameter::LogitBiasEntries, "301"),
            (|_, a| a.logit_bias = vec![(1, 100.5)], Parameter::LogitBias, "100.5"),
            (|_, a| a.logit_bias = vec![(1, f32::NAN)], Parameter::LogitBias, "NaN"),
        ];
        for (change, parameter, value) in cases {
            let refused = Rejection::BadParameter { parameter, value: value.into() };
            assert_eq!(refusal(change), Err(refused));
        }
        let outside = Rejection::TokenOutOfRange { token: 100, vocabulary: 100 };
        assert_eq!(refusal(|_, a| a.logit_bias = vec![(99, 1.0), (100, 1.0)]), Err(outside));
        let many = Generation { stop_tokens: vec![1; 257], ..Generation::default() };
        assert!(matches!(many.check(100), Err(Rejection::BadParameter { parameter: Parameter::StopTokens, .. })));
    }

    #[test]
    fn numbers_at_their_bounds_are_taken() {
        let at_bounds = refusal(|sampling, adjustment| {
            (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_logprobs) = (2.0, 1.0, 1.0, 20);
            (adjustment.repetition_penalty, adjustment.presence_penalty) = (100.0, -2.0);
            (adjustment.frequency_penalty, adjustment.logit_bias) = (2.0, vec![(99, -100.0); 300]);
        });
        assert_eq!(at_bounds, Ok(()));
    }

    #[test]
    fn an_adjustment_that_changes_nothing_is_none() {
        assert_eq!(Adjustment::default().unless_neutral(), None);
        let presence = Adjustment { presence_penalty: 0.5, ..Adjustment::default() };
        assert!(presence.unless_neutral().is_some_and(|adjustment| adjustment.has_penalties()));
        let bias = Adjustment { logit_bias: vec![(1, 1.0)], ..Adjustment::default() };
        assert!(bias.unless_neutral().is_some_and(|adjustment| !adjustment.has_penalties()));
    }
}
