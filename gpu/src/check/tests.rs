use super::*;
use starling_core::ids::{AttemptKey, BlockId};
use starling_core::request::Adjustment;
use starling_core::step::History;

const BOUNDS: Bounds = Bounds { blocks: 8, block_tokens: 4, vocabulary: 100, context: 16 };

fn slice(start: u32, tokens: u32, blocks: &[u32]) -> Slice {
    Slice {
        attempt: AttemptKey::default(),
        tokens: (0..tokens).collect(),
        start,
        blocks: blocks.iter().map(|&block| BlockId(block)).collect(),
        sample: Some(Sample::new(Default::default(), start.saturating_add(tokens))),
    }
}

fn refusal(slices: &[Slice]) -> String {
    let step = Step { slices: slices.to_vec() };
    Checker::default().check(&step, &BOUNDS).expect_err("refused").to_string()
}

#[test]
fn a_step_that_can_be_computed_passes() {
    let mut without_sample = slice(5, 3, &[4, 5]);
    without_sample.sample = None;
    let step = Step { slices: vec![slice(0, 4, &[0]), without_sample, slice(15, 1, &[0, 1, 2, 3])] };
    let mut checker = Checker::default();
    for _ in 0..2 {
        checker.check(&step, &BOUNDS).unwrap();
    }
    checker.check(&Step::default(), &BOUNDS).unwrap();
}

#[test]
fn sequences_may_read_the_same_blocks_and_write_their_own() {
    let step = Step { slices: vec![slice(8, 2, &[0, 1, 2]), slice(8, 1, &[0, 1, 3])] };
    Checker::default().check(&step, &BOUNDS).unwrap();
    let message = refusal(&[slice(8, 2, &[0, 1, 2]), slice(4, 4, &[0, 2])]);
    assert_eq!(message, "slice 1 is malformed: it writes a block that another slice writes");
}

#[test]
fn each_malformation_is_named() {
    assert_eq!(refusal(&[slice(0, 0, &[0])]), "slice 0 is malformed: it has no tokens");
    assert_eq!(refusal(&[slice(0, 5, &[0])]), "slice 0 is malformed: its blocks do not cover its tokens");
    assert_eq!(refusal(&[slice(14, 3, &[0, 1, 2, 3, 4])]), "slice 0 is malformed: it reaches beyond the context");
    assert_eq!(refusal(&[slice(u32::MAX, 1, &[0])]), "slice 0 is malformed: it reaches beyond the context");
    assert_eq!(refusal(&[slice(0, 1, &[0]), slice(4, 2, &[3, 3])]), "slice 1 is malformed: it names a block twice");
    assert_eq!(refusal(&[slice(0, 1, &[8])]), "step names block 8, the pool has 8");
    // Also where no token reaches.
    assert_eq!(refusal(&[slice(0, 1, &[0, 9])]), "step names block 9, the pool has 8");
    let mut bad = slice(0, 2, &[0]);
    bad.tokens[1] = 100;
    assert_eq!(refusal(&[bad]), "step names token 100, the vocabulary has 100");
}

#[test]
fn sampling_that_has_no_meaning_is_named() {
    let with = |change: fn(&mut Sample)| {
        let mut slice = slice(0, 2, &[0]);
        change(slice.sample.as_mut().expect("samples"));
        refusal(&[slice])
    };
    assert!(with(|s| s.position = 1).contains("samples a position"));
    let numbers: [fn(&mut Sample); 6] = [
        |s| s.sampling.temperature = -0.1,
        |s| s.sampling.temperature = f32::NAN,
        |s| s.sampling.top_p = 0.0,
        |s| s.sampling.top_p = f32::NAN,
        |s| s.sampling.min_p = 1.5,
        |s| {
            s.sampling.adjustment =
                Adjustment { logit_bias: vec![(100, 1.0)], ..Adjustment::default() }.unless_neutral()
        },
    ];
    for change in numbers {
        assert!(with(change).contains("number out of range"));
    }
    let penalty = || Adjustment { presence_penalty: 1.0, ..Adjustment::default() }.unless_neutral();
    let of = |tokens: &[u32]| Some(History { tokens: tokens.to_vec().into(), prompt_tokens: 1 });
    let mut penalized = slice(0, 2, &[0]);
    let sample = penalized.sample.as_mut().expect("samples");
    sample.sampling.adjustment = penalty();
    assert!(refusal(std::slice::from_ref(&penalized)).contains("penalties and no history"));
    let mut long = penalized.clone();
    long.sample.as_mut().expect("samples").history = of(&[0, 1, 2]);
    assert!(refusal(&[long]).contains("history does not end"));
    penalized.sample.as_mut().expect("samples").history = of(&[0, 1]);
    Checker::default().check(&Step { slices: vec![penalized] }, &BOUNDS).expect("it has what it needs");
}

#[test]
fn drafts_stand_between_the_last_known_token_and_the_end() {
    let drafted = |drafts, position| {
        let mut slice = slice(4, 3, &[0, 1]);
        slice.sample = Some(Sample { drafts, ..Sample::new(Default::default(), position) });
        slice
    };
    Checker::default().check(&Step { slices: vec![drafted(2, 5)] }, &BOUNDS).expect("one known token and two drafts");
    assert!(refusal(&[drafted(2, 7)]).contains("samples a position"));
    assert!(refusal(&[drafted(3, 4)]).contains("no token before its drafts"));
    assert!(refusal(&[drafted(u32::MAX, 4)]).contains("no token before its drafts"));
}
