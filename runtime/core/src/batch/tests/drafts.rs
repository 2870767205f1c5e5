//! Guesses: which are made, which stand, and what is left of those that do not.

use super::super::*;
use super::rank::{Rank, attempt};
use super::{config, drained, prompt, reserved, sequence};
use crate::batch::sequence::Known;
use crate::ids::BlockId;

/// Four tokens over and over.
fn repetitive(number: u64, max_new_tokens: u32) -> Sequence {
    sequence(number, &[5, 6, 7, 8].repeat(3), max_new_tokens)
}

#[test]
fn guesses_change_no_token_and_save_steps_where_they_are_right() {
    let sequences = || [repetitive(1, 60), sequence(2, &prompt(1, 9), 60), repetitive(3, 40)];
    let without = drained(config(), sequences());
    assert_eq!(without.batch.stats().drafted_tokens, 0);
    for draft_tokens_max in [1, 3, 8] {
        let with = drained(Config { draft_tokens_max, ..config() }, sequences());
        for (attempt, stream) in &with.streams {
            assert_eq!(stream.tokens, without.streams[attempt].tokens);
        }
        let (stats, plain) = (with.batch.stats(), without.batch.stats());
        assert_eq!(stats.produced_tokens, plain.produced_tokens);
        assert!(0 < stats.accepted_tokens && stats.accepted_tokens < stats.drafted_tokens, "{stats:?}");
        assert!(stats.steps < plain.steps, "{} instead of {} steps", stats.steps, plain.steps);
    }
}

#[test]
fn a_guess_is_what_followed_the_last_tokens_before_read_on_as_if_it_repeated() {
    let guess = |tokens: &[TokenId], count| Known::new(sequence(1, tokens, 9)).guess(count);
    assert_eq!(guess(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 2), [4, 5]);
    assert_eq!(guess(&[1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], 1), [5], "the latest place");
    assert_eq!(guess(&[7, 1, 2, 3, 1, 2, 3], 7), [1, 2, 3, 1, 2, 3, 1]);
    assert_eq!(guess(&[4, 4, 4, 4], 3), [4, 4, 4]);
    assert!(guess(&[4, 4, 4], 3).is_empty(), "nothing follows but itself");
    assert!(guess(&[1, 2, 9, 1, 2], 3).is_empty(), "two tokens are too few");
    assert!(guess(&[1], 3).is_empty());
    assert!(guess(&[1, 2, 3, 4, 1, 2, 3], 0).is_empty());
}

#[test]
fn guesses_take_what_the_step_has_left_when_everyone_has_a_share() {
    let config = Config { draft_tokens_max: 4, step_tokens_max: 8, ..config() };
    let mut rank = Rank::new(config);
    rank.admit(repetitive(1, 40));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    // Two chunks of prefill, and one token of decode.
    for _ in 0..3 {
        rank.plan();
        rank.finish_step();
        while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    }
    rank.admit(sequence(2, &prompt(2, 15), 5));
    while rank.deliver_to_kv() | rank.deliver_to_batch() {}
    rank.plan();
    let step = rank.steps.last().expect("planned");
    assert_eq!(step.slices.iter().map(|slice| slice.tokens.len()).collect::<Vec<_>>(), [1, 7], "prefill goes first");
    rank.drain();
    rank.check_ended();
}

fn drawn(tokens: &[TokenId]) -> Input {
    Input::StepDone { sampled: tokens.iter().map(|token| Sampled::new(0, Drawn::new(*token, -1.0))).collect() }
}

/// A planner that guesses up to eight tokens, whose only sequence has just drawn the first token behind its prompt.
fn decoding(change: impl FnOnce(&mut Sequence)) -> Batch {
    let mut sequence = repetitive(1, 40);
    change(&mut sequence);
    let mut batch = Batch::new(Config { draft_tokens_max: 8, ..config() }).expect("a good configuration");
    let one = attempt(1, 1);
    let mut out = Vec::new();
    batch.handle(0, Input::Admit(sequence), &mut out);
    batch.handle(0, reserved(one, 0..4), &mut out);
    batch.plan().expect("a prefill");
    batch.handle(0, drawn(&[5]), &mut out);
    let blocks = vec![(4..8).map(BlockId).collect()];
    let grown = kv::Effect::Grown { attempt: one, blocks, capacity: 32, copies: Vec::new() };
    batch.handle(0, Input::Kv(grown), &mut out);
    batch
}

fn told(out: &[Effect]) -> (Vec<TokenId>, Option<Finish>) {
    let frame = out.iter().find_map(|effect| match effect {
        Effect::Emit(frames) => Some(&frames[0]),
        _ => None,
    });
    let frame = frame.expect("tokens");
    (frame.tokens.iter().map(|drawn| drawn.token).collect(), frame.finished)
}

#[test]
fn a_wrong_guess_is_neither_told_to_the_kv_manager_nor_kept() {
    let (mut batch, mut out) = (decoding(|_| {}), Vec::new());
    let step = batch.plan().expect("a decode");
    assert_eq!(step.slices[0].tokens, [5, 6, 7, 8, 5, 6, 7, 8, 5]);
    assert_eq!((step.slices[0].start, step.slices[0].tables[0].len()), (12, 6));
    // 6 and 7 were right; 9 stands in the place of 8, and what was drawn behind 8 means nothing.
    batch.handle(0, drawn(&[6, 7, 9, 5, 6, 7, 8, 5, 6]), &mut out);
    assert_eq!(told(&out), (vec![6, 7, 9], None));
    let commits = out.iter().filter(|effect| matches!(effect, Effect::Kv(kv::Input::Commit { .. })));
    assert_eq!(commits.count(), 0, "15 positions are computed: three blocks, told before");
    let stats = batch.stats();
    assert_eq!((stats.drafted_tokens, stats.accepted_tokens, stats.produced_tokens), (8, 2, 4));
    batch.check().expect("all invariants hold");
    // The next step writes over what was guessed wrongly.
    let step = batch.plan().expect("a decode");
    assert_eq!((step.slices[0].start, &step.slices[0].tokens[..]), (15, &[9][..]));
}

#[test]
fn the_end_of_a_sequence_cuts_what_was_accepted_behind_it() {
    let ends = |change: fn(&mut Sequence)| {
        let (mut batch, mut out) = (decoding(change), Vec::new());
        let drafts = batch.plan().expect("a decode").slices[0].tokens.len() - 1;
        batch.handle(0, drawn(&[6, 7, 8, 5, 6, 7, 8, 5, 6][..=drafts]), &mut out);
        let (tokens, finished) = told(&out);
        (drafts, tokens, finished)
    };
    let stops = ends(|s| s.generation.stop_tokens = vec![8]);
    assert_eq!(stops, (8, vec![6, 7, 8], Some(Finish::Stop)));
    let length = ends(|s| s.generation.max_new_tokens = 4);
    assert_eq!(length, (2, vec![6, 7, 8], Some(Finish::Length)), "no more is guessed than may be produced");
    let context = ends(|s| s.context_tokens_max = 15);
    assert_eq!(context, (1, vec![6, 7], Some(Finish::Length)));
}

#[test]
fn tokens_missing_behind_guesses_cost_nothing_but_the_guesses() {
    let (mut batch, mut out) = (decoding(|_| {}), Vec::new());
    batch.plan().expect("a decode");
    batch.handle(0, drawn(&[6, 7]), &mut out);
    assert_eq!(told(&out), (vec![6, 7], None));
    batch.plan().expect("a decode");
    out.clear();
    batch.handle(0, drawn(&[8; 20]), &mut out);
    let ignored = out.iter().filter(|effect| matches!(effect, Effect::Ignored(Ignored::UnaskedToken { slice: 0 })));
    assert_eq!(ignored.count(), 11, "nine were asked for");
    batch.check().expect("all invariants hold");
}
