//! Draws tokens from logits.

use crate::kernels::{exp_all, finite_max};
use starling_core::ids::TokenId;
use starling_core::request::{Adjustment, Sampling};
use starling_core::step::{Draw, Drawn};

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
    adjusted: Vec<f32>,
    /// How often each token of the vocabulary is in the output, and whether it is anywhere before. All 0 between draws.
    marks: Vec<u32>,
}

/// In a mark: the token is in the prompt or the output. The rest of the mark counts how often it is in the output.
const SEEN: u32 = 1 << 31;

/// Weights that a draw chooses among, and their sum.
struct Kept {
    /// Whether the kept tokens are those of the order, the heaviest first; otherwise all are, in the order of their ids.
    ordered: bool,
    sum: f64,
}

impl Sampler {
    /// The next token, with the logarithm of its probability under the softmax of the logits as they are.
    ///
    /// # Errors
    /// A logit is not finite.
    ///
    /// # Cost
    /// Linear in the vocabulary; with `top_p` below 1, plus sorting the tokens that reach it; with penalties, plus the tokens
    /// before.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw<'_>) -> Result<Drawn, NotFinite> {
        let raw_peak = finite_max(logits);
        if raw_peak.is_nan() {
            return Err(NotFinite);
        }
        self.weights.resize(logits.len(), 0.0);
        let log_sum = exp_all(logits, raw_peak, 1.0, &mut self.weights).ln();
        let token = if draw.adjustment().is_none() && draw.banned.is_empty() {
            self.choose(logits, raw_peak, draw)
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            if let Some(adjustment) = draw.adjustment() {
                self.adjust(&mut adjusted, adjustment, draw);
            }
            for &token in draw.banned {
                if let Some(logit) = adjusted.get_mut(token as usize) {
                    *logit = f32::MIN;
                }
            }
            let token = self.choose(&adjusted, finite_max(&adjusted), draw);
            self.adjusted = adjusted;
            token
        };
        let logprob = |token: TokenId| (f64::from(logits[token as usize] - raw_peak) - log_sum) as f32;
        let top = highest(logits, draw.sampling.top_logprobs as usize);
        let top = top.into_iter().map(|token| (token, logprob(token))).collect();
        Ok(Drawn { token, logprob: logprob(token), top })
    }

    fn choose(&mut self, logits: &[f32], peak: f32, draw: &Draw<'_>) -> TokenId {
        let sampling = draw.sampling;
        if sampling.is_greedy() {
            // The first of the highest: ties go to the lowest id.
            return logits.iter().position(|&logit| logit == peak).unwrap_or(0) as TokenId;
        }
        let sum = exp_all(logits, peak, 1.0 / sampling.temperature, &mut self.weights);
        let bits = random_bits(sampling.seed, draw.child, draw.position, Use::Token);
        let kept = keep(sampling, (&self.weights, sum), &mut self.order);
        choose(&self.weights, kept.ordered.then_some(&self.order[..]), unit(bits) * kept.sum)
    }

    /// Penalties, then bias. What would overflow stays finite.
    fn adjust(&mut self, logits: &mut [f32], adjustment: &Adjustment, draw: &Draw<'_>) {
        if adjustment.has_penalties() {
            let (before, prompt_tokens) = draw.before();
            self.marks.resize(logits.len(), 0);
            for (at, token) in before.clone().enumerate() {
                if let Some(mark) = self.marks.get_mut(token as usize) {
                    *mark = (*mark | SEEN) + u32::from(at >= prompt_tokens);
                }
            }
            for token in before {
                // Each once: the mark is gone then.
                let Some(mark @ 1..) = self.marks.get_mut(token as usize).map(std::mem::take) else { continue };
                let logit = &mut logits[token as usize];
                let factor = adjustment.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
                let count = mark & !SEEN;
                if count > 0 {
                    *logit -= adjustment.presence_penalty + adjustment.frequency_penalty * count as f32;
                }
                *logit = logit.clamp(f32::MIN, f32::MAX);
            }
        }
        for &(token, bias) in &adjustment.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = (*logit + bias).clamp(f32::MIN, f32::MAX);
            }
        }
    }
}

/// The `count` tokens with the highest logits, highest first, ties by id.
fn highest(logits: &[f32], count: usize) -> Vec<TokenId> {
    let mut top: Vec<TokenId> = Vec::with_capacity(count);
    if count == 0 {
        return top;
    }
    for (token, logit) in logits.iter().enumerate() {
        let last = top.last().map_or(f32::NEG_INFINITY, |&last| logits[last as usize]);
        if top.len() < count || *logit > last {
            top.truncate(count - 1);
            let at = top.partition_point(|&other| logits[other as usize] >= *logit);
            top.insert(at, token as TokenId);
        }
    }
    top
}

/// Applies `top_k`, then `top_p` to what it left, then `min_p`. `sum` is that of all weights.
fn keep(sampling: &Sampling, (weights, sum): (&[f32], f64), order: &mut Vec<TokenId>) -> Kept {
    let kept = keep_highest(sampling, (weights, sum), order);
    if sampling.min_p <= 0.0 {
        return kept;
    }
    if !kept.ordered {
        order.clear();
        order.extend(0..weights.len() as TokenId);
    }
    let weight = |token: TokenId| weights[token as usize];
    let peak = order.iter().map(|&token| weight(token)).fold(0.0, f32::max);
    let least = peak * sampling.min_p;
    order.retain(|&token| weight(token) >= least);
    Kept { ordered: true, sum: order.iter().map(|&token| f64::from(weight(token))).sum() }
}

/// `top_k`, then `top_p`: what they leave is in `order`.
fn keep_highest(sampling: &Sampling, (weights, sum): (&[f32], f64), order: &mut Vec<TokenId>) -> Kept {
    let tokens = weights.len();
    let top_k = match sampling.top_k as usize {
        0 => tokens,
        k => k.min(tokens),
    };
    if top_k == tokens && sampling.top_p >= 1.0 {
        return Kept { ordered: false, sum };
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
        return Kept { ordered: true, sum: all };
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
            Some(last) => {
                order.truncate(last + 1);
                return Kept { ordered: true, sum };
            }
            None if sorted >= order.len() => return Kept { ordered: true, sum },
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
