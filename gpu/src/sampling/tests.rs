use super::*;
use proptest::prelude::*;
use starling_core::step::History;

fn sampling(temperature: f32, top_k: u32, top_p: f32) -> Sampling {
    Sampling { temperature, top_k, top_p, seed: 7, ..Sampling::default() }
}

fn at(sampling: &Sampling, position: u32) -> Draw<'_> {
    Draw { row: 0, sampling, child: 0, position, history: None, drafts: &[], banned: &[] }
}

fn drawn(logits: &[f32], sampling: &Sampling) -> TokenId {
    Sampler::default().draw(logits, &at(sampling, 0)).expect("finite").token
}

/// With the tokens before the draw, the first `prompt_tokens` of which are the prompt's.
fn drawn_behind(logits: &[f32], sampling: &Sampling, tokens: &[TokenId], prompt_tokens: u32) -> TokenId {
    let history = History { tokens: tokens.to_vec().into(), prompt_tokens };
    let draw = Draw { history: Some(&history), ..at(sampling, tokens.len() as u32) };
    Sampler::default().draw(logits, &draw).expect("finite").token
}

/// How often each token is drawn over many positions.
fn frequencies(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
    const DRAWS: u32 = 40_000;
    let mut counts = vec![0.0; logits.len()];
    let mut sampler = Sampler::default();
    for position in 0..DRAWS {
        let token = sampler.draw(logits, &at(sampling, position)).expect("finite").token;
        counts[token as usize] += 1.0 / f64::from(DRAWS);
    }
    counts
}

fn assert_near(found: &[f64], wanted: &[f64]) {
    // Five standard deviations of a frequency over the draws.
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((found - wanted).abs() < 0.0125, "{found} instead of {wanted}");
    }
}

/// Logits of probabilities 0.5, 0.3, 0.15, 0.05, not in this order.
fn four() -> Vec<f32> {
    [0.15_f32, 0.5, 0.05, 0.3].iter().map(|p| p.ln() + 2.0).collect()
}

#[test]
fn greedy_takes_the_highest_and_the_lowest_id_of_equals() {
    assert_eq!(drawn(&[1.0, 5.0, 5.0, -1.0], &sampling(0.0, 0, 1.0)), 1);
    assert_eq!(drawn(&[-3.0; 20], &sampling(0.0, 0, 1.0)), 0);
    assert_eq!(drawn(&[1.0, 5.0, 5.0], &sampling(1.0, 1, 1.0)), 1);
}

#[test]
fn the_logprob_is_that_of_the_raw_softmax_whatever_the_sampling() {
    let mut sampler = Sampler::default();
    let adjusted = Adjustment { logit_bias: vec![(2, 9.0)], ..Adjustment::default() }.unless_neutral();
    let adjusted = Sampling { adjustment: adjusted, ..sampling(1.0, 0, 1.0) };
    for sampling in [sampling(0.0, 0, 1.0), sampling(0.5, 2, 0.4), sampling(1.7, 0, 1.0), adjusted] {
        let Drawn { token, logprob, .. } = sampler.draw(&four(), &at(&sampling, 0)).unwrap();
        let right = [0.15_f32, 0.5, 0.05, 0.3][token as usize].ln();
        assert!((logprob - right).abs() < 1e-5, "token {token}: {logprob} instead of {right}");
    }
}

#[test]
fn tokens_come_as_often_as_their_probability_says() {
    assert_near(&frequencies(&four(), &sampling(1.0, 0, 1.0)), &[0.15, 0.5, 0.05, 0.3]);
}

#[test]
fn temperature_sharpens_before_anything_is_cut() {
    let sharp: Vec<f64> = [0.15_f64, 0.5, 0.05, 0.3].iter().map(|p| p * p).collect();
    let sum: f64 = sharp.iter().sum();
    let wanted: Vec<f64> = sharp.iter().map(|p| p / sum).collect();
    assert_near(&frequencies(&four(), &sampling(0.5, 0, 1.0)), &wanted);
}

#[test]
fn top_k_keeps_the_highest_and_top_p_the_fewest_that_reach_it() {
    assert_near(&frequencies(&four(), &sampling(1.0, 2, 1.0)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &sampling(1.0, 0, 0.6)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &sampling(1.0, 0, 0.9)), &[0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95]);
    // Among the two that top_k left, the first alone has 0.625.
    assert_near(&frequencies(&four(), &sampling(1.0, 2, 0.6)), &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn top_p_reaches_beyond_the_tokens_sorted_first() {
    let logits = vec![0.25; 3000];
    let counts = frequencies(&logits, &sampling(1.0, 0, 0.5));
    // Equals are kept by id.
    assert!(counts[..1400].iter().filter(|&&count| count > 0.0).count() > 1300);
    assert!(counts[1501..].iter().all(|&count| count == 0.0));
}

#[test]
fn a_draw_depends_on_seed_child_position_and_use_alone() {
    let logits: Vec<f32> = (0..500).map(|i| (i as f32 * 0.37).sin()).collect();
    let base = sampling(1.0, 0, 1.0);
    let mut used = Sampler::default();
    let bias = Adjustment { logit_bias: vec![(9, 5.0)], repetition_penalty: 2.0, ..Adjustment::default() };
    let other = Sampling { adjustment: bias.unless_neutral(), min_p: 0.1, ..sampling(1.0, 7, 0.3) };
    let history = History { tokens: vec![1, 2, 2].into(), prompt_tokens: 1 };
    used.draw(&[0.0; 999], &Draw { history: Some(&history), ..at(&other, 3) }).unwrap();
    assert_eq!(used.draw(&logits, &at(&base, 0)).unwrap().token, drawn(&logits, &base));
    let numbers = [
        random_bits(7, 0, 0, Use::Token),
        random_bits(8, 0, 0, Use::Token),
        random_bits(7, 1, 0, Use::Token),
        random_bits(7, 0, 1, Use::Token),
    ];
    let distinct: std::collections::BTreeSet<u64> = numbers.into_iter().collect();
    assert_eq!(distinct.len(), numbers.len());
    // Known values, so that a change of the generator shows.
    assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
}

#[test]
fn logits_that_are_not_finite_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let logits = [0.0, bad, 1.0];
        assert_eq!(Sampler::default().draw(&logits, &at(&sampling(0.0, 0, 1.0), 0)), Err(NotFinite));
    }
}

#[test]
fn min_p_keeps_what_has_that_share_of_the_highest_probability() {
    let min_p = |min_p, top_k, top_p| Sampling { min_p, ..sampling(1.0, top_k, top_p) };
    // Of 0.5, 0.3, 0.15 and 0.05.
    assert_near(&frequencies(&four(), &min_p(0.5, 0, 1.0)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &min_p(0.25, 0, 1.0)), &[0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95]);
    assert_near(&frequencies(&four(), &min_p(0.5, 3, 1.0)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &min_p(0.5, 0, 0.99)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &min_p(1.0, 0, 1.0)), &[0.0, 1.0, 0.0, 0.0]);
    // After the temperature: squared, 0.3 has 0.36 of the highest.
    let sharp = Sampling { temperature: 0.5, ..min_p(0.5, 0, 1.0) };
    assert_near(&frequencies(&four(), &sharp), &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn a_temperature_too_small_to_divide_by_is_greedy() {
    for temperature in [f32::MIN_POSITIVE, 1e-40, 9e-6] {
        assert_eq!(drawn(&[1.0, 5.0, 5.0, -1.0], &sampling(temperature, 0, 1.0)), 1);
    }
}

#[test]
fn penalties_count_the_output_and_repetition_the_prompt_too() {
    let greedy = |adjustment: Adjustment| Sampling { adjustment: adjustment.unless_neutral(), ..Sampling::default() };
    // Token 0 is in the prompt, 1 once and 2 twice in the output.
    let behind = |logits: &[f32], adjustment| drawn_behind(logits, &greedy(adjustment), &[0, 0, 1, 2, 2], 2);
    let repetition = |repetition_penalty| Adjustment { repetition_penalty, ..Adjustment::default() };
    assert_eq!(behind(&[4.0, 3.5, 3.0, 2.1], repetition(2.0)), 3, "4, 3.5 and 3 are halved");
    assert_eq!(behind(&[-1.0, -1.2, -1.4, -1.9], repetition(2.0)), 3, "negative ones are doubled");
    assert_eq!(behind(&[1.0, -1.2, -1.4, 1.5], repetition(0.5)), 0, "a factor below 1 favours what was there");
    let presence = |presence_penalty| Adjustment { presence_penalty, ..Adjustment::default() };
    assert_eq!(behind(&[1.0, 2.9, 2.9, 0.0], presence(2.0)), 0, "the prompt does not count");
    let frequency = |frequency_penalty| Adjustment { frequency_penalty, ..Adjustment::default() };
    assert_eq!(behind(&[0.0, 2.9, 3.8, 0.5], frequency(1.0)), 1, "1.9 and 1.8 are left");
    let all = Adjustment { presence_penalty: 0.5, frequency_penalty: 0.5, repetition_penalty: 2.0, logit_bias: vec![] };
    // 4/2 = 2, 5/2 - 1 = 1.5, 6/2 - 1.5 = 1.5, 2.1.
    assert_eq!(behind(&[4.0, 5.0, 6.0, 2.1], all), 3);
}

#[test]
fn a_bias_is_added_after_the_penalties_and_can_ban_and_force() {
    let biased = |logit_bias| Adjustment { logit_bias, repetition_penalty: 2.0, ..Adjustment::default() };
    let greedy = |logit_bias| Sampling { adjustment: biased(logit_bias).unless_neutral(), ..Sampling::default() };
    let behind = |bias: Vec<(TokenId, f32)>| drawn_behind(&[8.0, 5.0, 3.0], &greedy(bias), &[0], 1);
    assert_eq!(behind(vec![]), 1, "8 is halved");
    assert_eq!(behind(vec![(0, 1.5)]), 0, "halved, then 5.5");
    assert_eq!(behind(vec![(1, -100.0)]), 0);
    assert_eq!(behind(vec![(2, 100.0)]), 2);
    assert_eq!(behind(vec![(1, -60.0), (1, 60.0), (7, 100.0)]), 1, "entries add up, and none is outside");
}

#[test]
fn a_banned_token_is_not_drawn_whatever_speaks_for_it() {
    let bias = Adjustment { logit_bias: vec![(1, 100.0)], ..Adjustment::default() };
    for temperature in [0.0, 1.0] {
        for adjustment in [None, bias.clone().unless_neutral()] {
            let sampling = Sampling { temperature, adjustment, ..Sampling::default() };
            for position in 0..200 {
                let draw = Draw { banned: &[1, 2, 999], ..at(&sampling, position) };
                let drawn = Sampler::default().draw(&[0.5, 9.0, 3.0, 0.4], &draw).expect("finite").token;
                assert!(drawn == 0 || (drawn == 3 && temperature > 0.0), "{drawn}");
            }
        }
    }
}

#[test]
fn adjusted_logits_stay_finite_whatever_the_model_says() {
    let extreme = Adjustment { repetition_penalty: 0.01, logit_bias: vec![(0, 100.0)], ..Adjustment::default() };
    for temperature in [0.0, 2.0] {
        let sampling = Sampling { temperature, adjustment: extreme.clone().unless_neutral(), ..Sampling::default() };
        assert_eq!(drawn_behind(&[f32::MAX, 0.0, f32::MIN], &sampling, &[0, 2], 1), 0);
    }
}

#[test]
fn drafts_are_output_like_what_was_produced() {
    let adjustment = Adjustment { presence_penalty: 1.0, frequency_penalty: 0.25, ..Adjustment::default() };
    let sampling = Sampling { adjustment: adjustment.unless_neutral(), ..sampling(1.0, 0, 1.0) };
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let tokens: Vec<TokenId> = (0..40).map(|i| i * 7 % 50).collect();
    for known in 10..40 {
        let history = History { tokens: tokens[..known].to_vec().into(), prompt_tokens: 10 };
        let draw = Draw { history: Some(&history), drafts: &tokens[known..], ..at(&sampling, 40) };
        let with_drafts = Sampler::default().draw(&logits, &draw).expect("finite").token;
        assert_eq!(with_drafts, drawn_behind(&logits, &sampling, &tokens, 10));
    }
}

#[test]
fn the_most_probable_tokens_are_told_highest_first_and_equals_by_id() {
    let told = |logits: &[f32], top_logprobs| {
        let sampling = Sampling { top_logprobs, ..sampling(1.0, 0, 1.0) };
        Sampler::default().draw(logits, &at(&sampling, 0)).expect("finite").top
    };
    let tokens = |top: Vec<(TokenId, f32)>| top.into_iter().map(|(token, _)| token).collect::<Vec<_>>();
    assert_eq!(tokens(told(&[1.0, 3.0, 2.0, 3.0], 3)), [1, 3, 2]);
    assert_eq!(tokens(told(&[1.0, 3.0], 20)), [1, 0], "there are no more");
    assert_eq!(told(&[1.0, 3.0], 0), []);
    for ((_, logprob), right) in told(&four(), 4).into_iter().zip([0.5_f32, 0.3, 0.15, 0.05]) {
        assert!((logprob - right.ln()).abs() < 1e-5, "{logprob} instead of {}", right.ln());
    }
}

/// What a client may ask for.
fn samplings() -> impl Strategy<Value = Sampling> {
    let bias = prop::collection::vec((0_u32..200, -100.0_f32..=100.0), 0..6);
    let adjustment =
        (0.5_f32..2.0, -2.0_f32..=2.0, -2.0_f32..=2.0, bias).prop_map(|(repetition, presence, frequency, bias)| {
            Adjustment {
                repetition_penalty: repetition,
                presence_penalty: presence,
                frequency_penalty: frequency,
                logit_bias: bias,
            }
        });
    let adjustment = prop::option::of(adjustment);
    (0.05_f32..2.0, 0_u32..220, 0.01_f32..=1.0, 0.0_f32..=1.0, any::<u64>(), adjustment).prop_map(
        |(temperature, top_k, top_p, min_p, seed, adjustment)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            adjustment: adjustment.and_then(Adjustment::unless_neutral),
            top_logprobs: 5,
        },
    )
}

/// The definition, read slowly: the logits that a token is drawn from.
fn slowly_adjusted(logits: &[f32], sampling: &Sampling, (tokens, prompt): (&[TokenId], usize)) -> Vec<f64> {
    let Some(adjustment) = &sampling.adjustment else { return logits.iter().map(|&l| f64::from(l)).collect() };
    let adjusted = |(token, &logit): (usize, &f32)| {
        let is = |other: &&TokenId| **other as usize == token;
        let mut logit = f64::from(logit);
        if tokens.iter().any(|other| is(&other)) {
            let penalty = f64::from(adjustment.repetition_penalty);
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        let count = tokens[prompt..].iter().filter(is).count() as f64;
        logit -= count * f64::from(adjustment.frequency_penalty);
        if count > 0.0 {
            logit -= f64::from(adjustment.presence_penalty);
        }
        let biases = adjustment.logit_bias.iter().filter(|(other, _)| is(&other));
        logit + biases.map(|(_, bias)| f64::from(*bias)).sum::<f64>()
    };
    logits.iter().enumerate().map(adjusted).collect()
}

proptest! {
    /// Against a slow reading of the definition.
    #[test]
    fn a_drawn_token_is_among_those_that_are_kept(
        logits in prop::collection::vec(-20.0_f32..20.0, 1..200),
        sampling in samplings(),
        tokens in prop::collection::vec(0_u32..200, 0..60),
        prompt in 0_usize..60,
        greedy in any::<bool>(),
    ) {
        let tokens: Vec<TokenId> = tokens.into_iter().filter(|&token| (token as usize) < logits.len()).collect();
        let prompt = prompt.min(tokens.len());
        let temperature = if greedy { 0.0 } else { sampling.temperature };
        let sampling = Sampling { temperature, ..sampling };
        let token = drawn_behind(&logits, &sampling, &tokens, prompt as u32) as usize;
        let adjusted = slowly_adjusted(&logits, &sampling, (&tokens, prompt));
        let peak = adjusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if greedy {
            prop_assert!(adjusted[token] > peak - 1e-4, "{} is below {peak}", adjusted[token]);
            return Ok(());
        }
        // What stands before it, up to rounding: equals to the last digit may stand in either order.
        let weight = |logit: f64| ((logit - peak) / f64::from(sampling.temperature)).exp();
        let mut heavier: Vec<f64> = adjusted.iter().copied().filter(|&logit| logit > adjusted[token] + 1e-3).collect();
        heavier.sort_by(|a, b| b.total_cmp(a));
        let mut all = adjusted.clone();
        all.sort_by(|a, b| b.total_cmp(a));
        if sampling.top_k > 0 {
            prop_assert!(heavier.len() < sampling.top_k as usize);
            all.truncate(sampling.top_k as usize);
        }
        let sum: f64 = all.iter().map(|&logit| weight(logit)).sum();
        let before: f64 = heavier.iter().map(|&logit| weight(logit)).sum();
        // Those before it do not reach top_p by themselves.
        prop_assert!(before / sum < f64::from(sampling.top_p) + 1e-3);
        prop_assert!(weight(adjusted[token]) >= f64::from(sampling.min_p) * (1.0 - 1e-3));
    }

    #[test]
    fn the_most_probable_tokens_are_those_that_sorting_puts_first(
        logits in prop::collection::vec((-8_i32..8).prop_map(|l| l as f32 / 2.0), 1..300),
        count in 0_u32..=20,
    ) {
        let sampling = Sampling { top_logprobs: count, ..Sampling::default() };
        let top = Sampler::default().draw(&logits, &at(&sampling, 0)).expect("finite").top;
        let mut sorted: Vec<usize> = (0..logits.len()).collect();
        sorted.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        sorted.truncate(count as usize);
        prop_assert_eq!(top.iter().map(|(token, _)| *token as usize).collect::<Vec<_>>(), sorted);
    }
}
