use super::{Bed, SCOPE, config, count, required, some, window};
use crate::kv::cache::hint::Hint;
use crate::kv::cache::lifecycle::{LifeCycle, Priority, Retention};
use crate::kv::cache::{Config, ENDPOINT_CLASS, Request, SequenceId};

#[test]
fn sinks_and_the_prompts_end_stay_longest_and_other_window_pages_go_first() {
    let sinks = Retention::Window { tokens: some(8), sink_blocks: 1 };
    let life_cycle = LifeCycle { priority: Priority::Uniform(50), ..required(sinks, 0) };
    let hint = Some(Hint { reusable_tokens: 42, rewind_tokens: 6 });
    let classes: Vec<u8> = (0..13).map(|block| life_cycle.class(block, hint, some(4))).collect();
    // Tokens [28, 42) lie in blocks 7 to 10.
    assert_eq!(classes, [70, 0, 0, 0, 0, 0, 0, 70, 70, 70, 70, 0, 0]);
    assert_eq!((life_cycle.class(3, None, some(4)), ENDPOINT_CLASS), (50, 70));
    let full = LifeCycle { priority: Priority::Uniform(50), ..required(Retention::Full, 0) };
    assert_eq!(full.class(9, hint, some(4)), 50);
    let short = Some(Hint { reusable_tokens: 5, rewind_tokens: u32::MAX });
    assert_eq!((0..4).map(|block| life_cycle.class(block, short, some(4))).collect::<Vec<_>>(), [70, 70, 0, 0]);
}

/// What is left of a prompt's end point after a long cold prompt, which is computed in chunks.
fn left_after_cold_prompt(rewind_tokens: u32) -> u32 {
    let life_cycles = vec![required(Retention::Full, 0), required(window(8), 1)];
    let hinted = Config { endpoint_rewind_tokens: rewind_tokens, ..config(4, life_cycles, vec![vec![80, 14]]) };
    let mut bed = Bed::new(hinted);
    bed.serve(&count(0, 24));
    let cold = count(1000, 200);
    let (id, _) = bed.open(&cold);
    assert!(bed.resume(id));
    for end in (8..=200).step_by(8) {
        assert!(bed.resize(id, end, end - 8), "no room for {end} tokens");
        bed.commit(id, &cold[end as usize - 8..end as usize]);
    }
    bed.close(id);
    bed.probe(&count(0, 24))
}

#[test]
fn a_hinted_end_point_survives_a_long_cold_prompt() {
    assert_eq!((left_after_cold_prompt(4), left_after_cold_prompt(0)), (24, 0));
}

#[test]
fn the_hint_is_about_the_reusable_part_of_the_prompt() {
    // A prompt whose last 12 tokens no later one has: the end point lies before them.
    for (reusable_tokens, left) in [(Some(12), 12), (None, 0)] {
        let life_cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
        let mut bed = Bed::new(Config { endpoint_rewind_tokens: 1, ..config(4, life_cycles, vec![vec![80, 7]]) });
        let tokens = count(0, 24);
        let request = Request { scope: SCOPE, tokens: &tokens, conversation: None, reusable_tokens };
        let id = SequenceId(900);
        bed.manager.open(id, request).expect("ids are not used twice");
        assert!(bed.resume(id) && bed.resize(id, 24, 0));
        bed.commit(id, &tokens);
        bed.close(id);
        bed.serve(&count(500, 20));
        assert_eq!(bed.probe(&count(0, 12)), left);
    }
}
