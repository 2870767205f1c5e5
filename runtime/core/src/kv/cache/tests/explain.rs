use super::{Bed, SCOPE, config, count, fork, required, window};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::cache::{Config, Missed, Why};
use crate::kv::identity::Scope;

/// Why a prompt's tokens would not be reused: the ends of the ranges, with the reasons.
fn why(bed: &Bed, tokens: &[TokenId]) -> Vec<(u32, Why)> {
    why_in(bed, &SCOPE, tokens)
}

fn why_in(bed: &Bed, scope: &Scope, tokens: &[TokenId]) -> Vec<(u32, Why)> {
    let reused = bed.manager.probe(scope, &tokens[..tokens.len() - 1]);
    let missed = bed.manager.explain(scope, tokens, reused);
    let mut at = reused;
    for Missed { from, to, .. } in &missed {
        assert!(*from == at && to > from, "{missed:?}");
        at = *to;
    }
    assert_eq!(at as usize, tokens.len());
    missed.into_iter().map(|missed| (missed.to, missed.why)).collect()
}

fn full_only(slots: u32) -> Config {
    config(4, vec![required(Retention::Full, 0)], vec![vec![slots]])
}

#[test]
fn other_content_and_the_last_token_are_told_apart() {
    let mut bed = Bed::new(full_only(20));
    bed.serve(&count(0, 12));
    assert_eq!(why(&bed, &count(0, 12)), [(12, Why::LastToken)]);
    let differs = fork(&count(0, 6), 6, &count(50, 6));
    assert_eq!(why(&bed, &differs), [(11, Why::ContentDiffers), (12, Why::LastToken)]);
    assert_eq!(bed.manager.explain(&SCOPE, &[], 0), []);
    assert_eq!(bed.manager.explain(&SCOPE, &count(0, 12), 12), []);
}

#[test]
fn evicted_blocks_are_told_from_unknown_ones_until_they_are_forgotten() {
    let mut bed = Bed::new(full_only(20));
    bed.conversation = Some(ConversationKey(1));
    bed.serve(&count(0, 12));
    assert!(bed.manager.unlink(&SCOPE, &count(0, 12), (1, 0)));
    let longer = count(0, 17);
    let evicted = [(12, Why::Evicted { life_cycle: 0 }), (16, Why::ContentDiffers), (17, Why::LastToken)];
    assert_eq!(why(&bed, &longer), evicted);
    bed.manager.forget_conversation(ConversationKey(2));
    assert_eq!(why(&bed, &longer), evicted);
    bed.manager.forget_conversation(ConversationKey(1));
    assert_eq!(why(&bed, &longer), [(16, Why::ContentDiffers), (17, Why::LastToken)]);
}

#[test]
fn the_memory_of_evicted_blocks_is_bounded() {
    let mut bed = Bed::new(full_only(2));
    for prompt in 0..4200 {
        let (id, _) = bed.open(&[]);
        assert!(bed.resume(id) && bed.resize(id, 4, 0));
        bed.commit(id, &count(10 * prompt, 4));
        bed.close(id);
    }
    assert_eq!(why(&bed, &count(0, 5))[0], (4, Why::ContentDiffers));
    assert_eq!(why(&bed, &count(10 * 4000, 5))[0], (4, Why::Evicted { life_cycle: 0 }));
}

#[test]
fn a_missing_window_is_named() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(6), 1)];
    let mut bed = Bed::new(config(4, life_cycles, vec![vec![20, 20]]));
    bed.serve(&count(0, 24));
    assert!(bed.manager.unlink(&SCOPE, &count(0, 24), (2, 1)));
    let prompt = fork(&count(0, 14), 14, &count(70, 3));
    assert_eq!(bed.probe(&prompt), 8);
    let missing = Why::WindowMissing { life_cycle: 1 };
    assert_eq!(why(&bed, &prompt), [(14, missing), (16, Why::ContentDiffers), (17, Why::LastToken)]);
}

#[test]
fn a_missing_snapshot_and_a_backoff_are_named() {
    let life_cycles = vec![required(Retention::Full, 0), required(Retention::State, 1)];
    let backoff = Config { match_backoff_tokens: 2, ..config(4, life_cycles, vec![vec![20, 20]]) };
    let mut bed = Bed::new(backoff);
    let (id, _) = bed.prefill(&count(0, 16), &[8]);
    bed.close(id);
    let prompt = count(0, 17);
    assert_eq!(why(&bed, &prompt), [(14, Why::NoSnapshot), (16, Why::Backoff), (17, Why::LastToken)]);
}

#[test]
fn another_scope_that_knows_the_prompt_is_named() {
    let mut bed = Bed::new(full_only(20));
    bed.serve(&count(0, 12));
    let other = Scope { tenant: 5, adapter: None };
    let expected = [(12, Why::OtherScope), (16, Why::ContentDiffers), (17, Why::LastToken)];
    assert_eq!(why_in(&bed, &other, &count(0, 17)), expected);
    assert_eq!(why_in(&bed, &other, &count(3, 5))[0], (4, Why::ContentDiffers));
}
