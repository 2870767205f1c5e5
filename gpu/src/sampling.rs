//! Draws tokens from logits.

use crate::kernels::{exp_all, finite_max};
use starling_core::ids::TokenId;
use starling_core::request::Sampling;
use starling_core::step::Sample;

#[cfg(test)]
mod tests;

/// Logits with NaN or infinity among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite;

/// What a random number is for: numbers of different uses at one position are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The choice of the token.
    Token = 0,
}

/// The random number of (seed, child, position, use), so that any attempt draws the same at the same position.
///
/// # Source
/// The finaliser of splitmix64, applied to each word mixed with the result of the word before.
pub fn random_bits(seed: u64, child: u32, position: u32, which: Use) -> u64 {
    [seed, u64::from(child), u64::from(position), which as u64].into_iter().fold(0, |state, word| mix(state ^ word))
}

/// One step of splitmix64.
pub(crate) fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Uniform in [0, 1), with all 53 bits that an f64 has.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// Tokens that are sorted first for `top_p`; most distributions reach it within them.
const SORTED_FIRST: usize = 64;

/// Draws tokens; keeps its memory from one to the next.
#[derive(Default)]
pub struct Sampler {
    weights: Vec<f32>,
    order: Vec<TokenId>,
}

/// Weights that a draw chooses among, and their sum.
struct Kept<'a> {
    /// Highest first; `None` for all tokens in the order of their ids.
    order: Option<&'a [TokenId]>,
    sum: f64,
}

impl Sampler {
    /// The next token, and the logarithm of its probability under the softmax of the logits as they are.
    ///
    /// # Errors
    /// A logit is not finite.
    ///
    /// # Cost
    /// Linear in the vocabulary; with `top_p` below 1, plus sorting the tokens that reach it.
    pub fn draw(&mut self, logits: &[f32], sample: &Sample) -> Result<(TokenId, f32), NotFinite> {
        let peak = finite_max(logits);
        if peak.is_nan() {
            return Err(NotFinite);
        }
        self.weights.resize(logits.len(), 0.0);
        let log_sum = exp_all(logits, peak, 1.0, &mut self.weights).ln();
        let sampling = &sample.sampling;
        let token = if sampling.temperature == 0.0 || sampling.top_k == 1 {
            // The first of the highest: ties go to the lowest id.
            logits.iter().position(|&logit| logit == peak).unwrap_or(0) as TokenId
        } else {
            let sum = exp_all(logits, peak, 1.0 / sampling.temperature, &mut self.weights);
            let bits = random_bits(sampling.seed, sample.child, sample.position, Use::Token);
            let kept = keep(sampling, (&self.weights, sum), &mut self.order);
            let target = unit(bits) * kept.sum;
            choose(&self.weights, kept.order, target)
        };
        let logprob = f64::from(logits[token as usize] - peak) - log_sum;
        Ok((token, logprob as f32))
    }
}

/// Applies `top_k`, then `top_p` to what it left. `sum` is that of all weights.
fn keep<'a>(sampling: &Sampling, (weights, sum): (&[f32], f64), order: &'a mut Vec<TokenId>) -> Kept<'a> {
    let tokens = weights.len();
    let top_k = match sampling.top_k as usize {
        0 => tokens,
        k => k.min(tokens),
    };
    if top_k == tokens && sampling.top_p >= 1.0 {
        return Kept { order: None, sum };
    }
    order.clear();
    order.extend(0..tokens as TokenId);
    let weight = |token: TokenId| f64::from(weights[token as usize]);
    let mut all = sum;
    if top_k < tokens {
        sort_first(order, top_k, weights);
        order.truncate(top_k);
        all = order.iter().map(|&token| weight(token)).sum();
    }
    if sampling.top_p >= 1.0 {
        return Kept { order: Some(order), sum: all };
    }
    // Few tokens hold nearly all the weight, so sort some, and more only where they do not reach.
    let wanted = all * f64::from(sampling.top_p);
    let mut sorted = SORTED_FIRST;
    loop {
        sort_first(order, sorted, weights);
        let mut sum = 0.0;
        let reaches = order.iter().take(sorted).position(|&token| {
            sum += weight(token);
            sum >= wanted
        });
        match reaches {
            Some(last) => return Kept { order: Some(&order[..=last]), sum },
            None if sorted >= order.len() => return Kept { order: Some(order), sum },
            None => sorted *= 8,
        }
    }
}

/// Puts the `count` heaviest tokens first, heaviest first, ties by id.
fn sort_first(order: &mut [TokenId], count: usize, weights: &[f32]) {
    let by_weight = |a: &TokenId, b: &TokenId| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, by_weight);
    }
    let count = count.min(order.len());
    order[..count].sort_unstable_by(by_weight);
}

/// The token in whose share of the sum `target` falls; the last that has a share if rounding leaves it behind all.
fn choose(weights: &[f32], order: Option<&[TokenId]>, target: f64) -> TokenId {
    let mut sum = 0.0;
    let mut last = 0;
    let mut falls_in = |token: TokenId| {
        let weight = f64::from(weights[token as usize]);
        sum += weight;
        if weight > 0.0 {
            last = token;
        }
        sum > target
    };
    let found = match order {
        Some(order) => order.iter().copied().find(|&token| falls_in(token)),
        None => (0..weights.len() as TokenId).find(|&token| falls_in(token)),
    };
    found.unwrap_or(last)
}
