use super::*;
use proptest::prelude::*;

fn sample(temperature: f32, top_k: u32, top_p: f32) -> Sample {
    Sample { sampling: Sampling { temperature, top_k, top_p, seed: 7 }, child: 0, position: 0 }
}

fn drawn(logits: &[f32], sample: &Sample) -> TokenId {
    Sampler::default().draw(logits, sample).expect("finite").0
}

/// How often each token is drawn over many positions.
fn frequencies(logits: &[f32], sample: &Sample) -> Vec<f64> {
    const DRAWS: u32 = 40_000;
    let mut counts = vec![0.0; logits.len()];
    let mut sampler = Sampler::default();
    for position in 0..DRAWS {
        let (token, _) = sampler.draw(logits, &Sample { position, ..sample.clone() }).expect("finite");
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
    assert_eq!(drawn(&[1.0, 5.0, 5.0, -1.0], &sample(0.0, 0, 1.0)), 1);
    assert_eq!(drawn(&[-3.0; 20], &sample(0.0, 0, 1.0)), 0);
    assert_eq!(drawn(&[1.0, 5.0, 5.0], &sample(1.0, 1, 1.0)), 1);
}

#[test]
fn the_logprob_is_that_of_the_raw_softmax_whatever_the_sampling() {
    let mut sampler = Sampler::default();
    for sampling in [sample(0.0, 0, 1.0), sample(0.5, 2, 0.4), sample(1.7, 0, 1.0)] {
        let (token, logprob) = sampler.draw(&four(), &sampling).unwrap();
        let right = [0.15_f32, 0.5, 0.05, 0.3][token as usize].ln();
        assert!((logprob - right).abs() < 1e-5, "token {token}: {logprob} instead of {right}");
    }
}

#[test]
fn tokens_come_as_often_as_their_probability_says() {
    assert_near(&frequencies(&four(), &sample(1.0, 0, 1.0)), &[0.15, 0.5, 0.05, 0.3]);
}

#[test]
fn temperature_sharpens_before_anything_is_cut() {
    let sharp: Vec<f64> = [0.15_f64, 0.5, 0.05, 0.3].iter().map(|p| p * p).collect();
    let sum: f64 = sharp.iter().sum();
    let wanted: Vec<f64> = sharp.iter().map(|p| p / sum).collect();
    assert_near(&frequencies(&four(), &sample(0.5, 0, 1.0)), &wanted);
}

#[test]
fn top_k_keeps_the_highest_and_top_p_the_fewest_that_reach_it() {
    assert_near(&frequencies(&four(), &sample(1.0, 2, 1.0)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &sample(1.0, 0, 0.6)), &[0.0, 0.625, 0.0, 0.375]);
    assert_near(&frequencies(&four(), &sample(1.0, 0, 0.9)), &[0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95]);
    // Among the two that top_k left, the first alone has 0.625.
    assert_near(&frequencies(&four(), &sample(1.0, 2, 0.6)), &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn top_p_reaches_beyond_the_tokens_sorted_first() {
    let logits = vec![0.25; 3000];
    let counts = frequencies(&logits, &sample(1.0, 0, 0.5));
    // Equals are kept by id.
    assert!(counts[..1400].iter().filter(|&&count| count > 0.0).count() > 1300);
    assert!(counts[1501..].iter().all(|&count| count == 0.0));
}

#[test]
fn a_draw_depends_on_seed_child_position_and_use_alone() {
    let logits: Vec<f32> = (0..500).map(|i| (i as f32 * 0.37).sin()).collect();
    let base = sample(1.0, 0, 1.0);
    let mut used = Sampler::default();
    used.draw(&[0.0; 999], &sample(1.0, 7, 0.3)).unwrap();
    assert_eq!(used.draw(&logits, &base).unwrap().0, drawn(&logits, &base));
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
        assert_eq!(Sampler::default().draw(&logits, &sample(0.0, 0, 1.0)), Err(NotFinite));
    }
}

proptest! {
    /// Against a slow reading of the definition.
    #[test]
    fn a_drawn_token_is_among_those_that_are_kept(
        logits in prop::collection::vec(-20.0_f32..20.0, 1..200),
        temperature in 0.05_f32..2.0,
        top_k in 0_u32..220,
        top_p in 0.01_f32..=1.0,
        position in any::<u32>(),
    ) {
        let token = drawn(&logits, &Sample { position, ..sample(temperature, top_k, top_p) }) as usize;
        let weight = |l: f32| f64::from(l / temperature).exp();
        let mut heavier: Vec<usize> = (0..logits.len()).collect();
        heavier.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let rank = heavier.iter().position(|&t| t == token).expect("in the vocabulary");
        if top_k > 0 {
            prop_assert!(rank < top_k as usize);
            heavier.truncate(top_k as usize);
        }
        let all: f64 = heavier.iter().map(|&t| weight(logits[t])).sum();
        let before: f64 = heavier[..rank].iter().map(|&t| weight(logits[t])).sum();
        // Those before it do not reach top_p by themselves, up to rounding.
        prop_assert!(before / all < f64::from(top_p) + 1e-5);
    }
}
