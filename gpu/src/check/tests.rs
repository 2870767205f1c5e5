use super::*;
use starling_core::ids::{AttemptKey, BlockId};
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::request::Adjustment;
use starling_core::step::History;

/// One life cycle of full attention with 8 blocks of 4 tokens.
fn bounds() -> Bounds {
    let pools = vec![Pool { retention: Retention::Full, blocks: 8 }];
    Bounds { pools, block_tokens: 4, vocabulary: 100, context: 16 }
}

/// Full attention, a window of 5 tokens, one of 6 that keeps the first block, and a state.
fn mixed() -> Bounds {
    let window = |tokens, sink_blocks| Retention::Window { tokens: NonZeroU32::new(tokens).unwrap(), sink_blocks };
    let retentions = [Retention::Full, window(5, 0), window(6, 1), Retention::State];
    let pools = (8..).zip(retentions).map(|(blocks, retention)| Pool { retention, blocks });
    Bounds { pools: pools.collect(), context: 64, ..bounds() }
}

fn table(out: Range<u32>, blocks: &[u32]) -> Table {
    Table { out, blocks: blocks.iter().map(|&block| BlockId(block)).collect() }
}

fn slice(start: u32, tokens: u32, blocks: &[u32]) -> Slice {
    Slice {
        attempt: AttemptKey::default(),
        tokens: (0..tokens).collect(),
        start,
        tables: vec![table(0..0, blocks)],
        sample: Some(Sample::new(Default::default(), start.saturating_add(tokens))),
    }
}

fn step(slices: &[Slice]) -> Step {
    Step { slices: slices.to_vec(), ..Step::default() }
}

fn refusal(slices: &[Slice]) -> String {
    Checker::default().check(&step(slices), &bounds()).expect_err("refused").to_string()
}

/// A decode at position 13 of the sequence number `nth`: the window of 5 begins in block 2, that of 6 at its start.
fn decode(nth: u32) -> Slice {
    let first = nth * 4;
    let tables = vec![
        table(0..0, &[first, first + 1, first + 2, first + 3]),
        table(0..2, &[first + 1, first]),
        table(1..2, &[first, first + 1, first + 2]),
        table(0..0, &[nth]),
    ];
    Slice { tables, ..slice(13, 1, &[]) }
}

/// What is said of a decode after a change, and that of another one beside it.
fn mixed_refusal(change: impl FnOnce(&mut [Slice; 2])) -> String {
    let mut both = [decode(0), decode(1)];
    change(&mut both);
    Checker::default().check(&step(&both), &mixed()).err().map_or_else(|| "none".into(), |error| error.to_string())
}

#[test]
fn a_step_that_can_be_computed_passes() {
    let mut without_sample = slice(5, 3, &[4, 5]);
    without_sample.sample = None;
    let step = step(&[slice(0, 4, &[0]), without_sample, slice(15, 1, &[0, 1, 2, 3])]);
    let mut checker = Checker::default();
    for _ in 0..2 {
        checker.check(&step, &bounds()).unwrap();
    }
    checker.check(&Step::default(), &bounds()).unwrap();
}

#[test]
fn sequences_may_read_the_same_blocks_and_write_their_own() {
    let step = step(&[slice(8, 2, &[0, 1, 2]), slice(8, 1, &[0, 1, 3])]);
    Checker::default().check(&step, &bounds()).unwrap();
    let message = refusal(&[slice(8, 2, &[0, 1, 2]), slice(4, 4, &[0, 2])]);
    assert_eq!(message, "slice 1 has a malformed table for life cycle 0: it writes block 2 that another slice writes");
}

#[test]
fn each_malformation_is_named() {
    assert_eq!(refusal(&[slice(0, 0, &[0])]), "slice 0 is malformed: it has no tokens");
    let of_table = |slice: u32, why: &str| format!("slice {slice} has a malformed table for life cycle 0: {why}");
    assert_eq!(refusal(&[slice(0, 5, &[0])]), of_table(0, "it covers 4 tokens of 5"));
    assert_eq!(refusal(&[slice(14, 3, &[0, 1, 2, 3, 4])]), "slice 0 is malformed: it reaches beyond the context");
    assert_eq!(refusal(&[slice(u32::MAX, 1, &[0])]), "slice 0 is malformed: it reaches beyond the context");
    assert_eq!(refusal(&[slice(0, 1, &[0]), slice(4, 2, &[3, 3])]), of_table(1, "it names block 3 twice"));
    assert_eq!(refusal(&[slice(0, 1, &[8])]), of_table(0, "it names block 8, the pool has 8"));
    // Also where no token reaches.
    assert_eq!(refusal(&[slice(0, 1, &[0, 9])]), of_table(0, "it names block 9, the pool has 8"));
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
    Checker::default().check(&step(&[penalized]), &bounds()).expect("it has what it needs");
}

#[test]
fn drafts_stand_between_the_last_known_token_and_the_end() {
    let drafted = |drafts, position| {
        let mut slice = slice(4, 3, &[0, 1]);
        slice.sample = Some(Sample { drafts, ..Sample::new(Default::default(), position) });
        slice
    };
    Checker::default().check(&step(&[drafted(2, 5)]), &bounds()).expect("one known token and two drafts");
    assert!(refusal(&[drafted(2, 7)]).contains("samples a position"));
    assert!(refusal(&[drafted(3, 4)]).contains("no token before its drafts"));
    assert!(refusal(&[drafted(u32::MAX, 4)]).contains("no token before its drafts"));
}

#[test]
fn a_slice_has_a_table_for_each_life_cycle() {
    assert_eq!(mixed_refusal(|_| ()), "none");
    let missing = mixed_refusal(|both| both[1].tables.truncate(3));
    assert_eq!(missing, "slice 1 has 3 tables, there are 4 life cycles");
    let more = mixed_refusal(|both| both[0].tables.push(table(0..0, &[0])));
    assert_eq!(more, "slice 0 has 5 tables, there are 4 life cycles");
}

#[test]
fn only_blocks_that_no_query_of_the_slice_reads_may_be_out() {
    let with = |life_cycle: usize, changed: Table| mixed_refusal(|both| both[1].tables[life_cycle] = changed);
    let of = |life_cycle: u32, why: &str| format!("slice 1 has a malformed table for life cycle {life_cycle}: {why}");
    let out = |out, stale| format!("blocks {out} are out of the window, of those only {stale} may be");
    assert_eq!(with(0, table(0..1, &[5, 6, 7])), of(0, &out("0..1", "0..0")));
    assert_eq!(with(1, table(0..3, &[5])), of(1, &out("0..3", "0..2")));
    assert_eq!(with(2, table(0..2, &[5, 6])), of(2, &out("0..2", "1..2")));
    assert_eq!(with(2, table(1..3, &[5, 6])), of(2, &out("1..3", "1..2")));
    // More than must be may be kept, and nothing out may be written anyhow.
    for kept in
        [table(0..0, &[4, 5, 6, 7]), table(7..7, &[4, 5, 6, 7]), table(0..1, &[4, 5, 6]), table(1..2, &[4, 5, 6])]
    {
        assert_eq!(with(1, kept), "none");
    }
    let early = mixed_refusal(|both| (both[1].start, both[1].tokens) = (10, vec![0; 4]));
    assert_eq!(early, of(1, &out("0..2", "0..1")));
}

#[test]
fn tables_reach_over_the_slice_with_what_is_out() {
    let short = mixed_refusal(|both| both[0].tables[1] = table(0..2, &[1]));
    assert_eq!(short, "slice 0 has a malformed table for life cycle 1: it covers 12 tokens of 14");
    // They may reach further.
    assert_eq!(mixed_refusal(|both| both[0].tables[1] = table(0..2, &[1, 2, 3])), "none");
}

#[test]
fn blocks_are_of_the_pool_and_named_once_in_each_life_cycle() {
    let of = |life_cycle: u32, why: &str| format!("slice 1 has a malformed table for life cycle {life_cycle}: {why}");
    for (life_cycle, count) in [(0, 8), (1, 9), (2, 10), (3, 11)] {
        let beyond = mixed_refusal(|both| both[1].tables[life_cycle as usize].blocks[0] = BlockId(count));
        assert_eq!(beyond, of(life_cycle, &format!("it names block {count}, the pool has {count}")));
        if life_cycle < 3 {
            let twice = |both: &mut [Slice; 2]| {
                let table = &mut both[1].tables[life_cycle as usize];
                table.blocks[0] = table.blocks[1];
            };
            assert!(mixed_refusal(twice).starts_with(&of(life_cycle, "it names block")), "twice in {life_cycle}");
        }
    }
}

#[test]
fn slices_write_different_blocks_and_states_of_each_life_cycle() {
    for (life_cycle, at) in [(0, 3), (1, 1), (2, 2), (3, 0)] {
        let mut block = 0;
        let same = mixed_refusal(|both| {
            block = both[0].tables[life_cycle].blocks[at].0;
            both[1].tables[life_cycle].blocks[at] = BlockId(block);
        });
        let why = format!("it writes block {block} that another slice writes");
        assert_eq!(same, format!("slice 1 has a malformed table for life cycle {life_cycle}: {why}"));
    }
    // What both only read is shared, and numbers of different life cycles have nothing to do with each other.
    assert_eq!(mixed_refusal(|both| both[1].tables[0].blocks[0] = both[0].tables[0].blocks[0]), "none");
    assert_eq!(mixed_refusal(|both| both[1].tables[1].blocks[1] = BlockId(3)), "none");
}

#[test]
fn a_state_is_one_block() {
    for (changed, blocks, out) in
        [(table(0..0, &[]), 0, 0), (table(0..0, &[1, 2]), 2, 0), (table(0..3, &[1]), 1, 3), (table(0..1, &[]), 0, 1)]
    {
        let why = format!("it has {blocks} blocks and {out} without, a state has one");
        let found = mixed_refusal(|both| both[1].tables[3] = changed);
        assert_eq!(found, format!("slice 1 has a malformed table for life cycle 3: {why}"));
    }
}

#[test]
fn copies_stay_within_their_life_cycle() {
    let of = |life_cycle, from, to| {
        let copies = [(0, 0, 7), (life_cycle, from, to)];
        let copy = |(life_cycle, from, to)| BlockCopy { life_cycle, from: BlockId(from), to: BlockId(to) };
        let step = Step { copies: copies.map(copy).to_vec(), ..step(&[decode(0)]) };
        Checker::default().check(&step, &mixed()).err().map_or_else(|| "none".into(), |error| error.to_string())
    };
    assert_eq!(of(3, 10, 0), "none");
    assert_eq!(of(3, 11, 0), "copy 1, of life cycle 3, cannot be made: it names block 11, the pool has 11");
    assert_eq!(of(1, 0, 9), "copy 1, of life cycle 1, cannot be made: it names block 9, the pool has 9");
    assert_eq!(of(4, 0, 0), "copy 1, of life cycle 4, cannot be made: there are 4 life cycles");
}
