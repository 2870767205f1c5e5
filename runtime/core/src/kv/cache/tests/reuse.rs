use super::{required, some, window};
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use crate::kv::cache::reuse::{Coverage, Match};
use proptest::prelude::*;

#[derive(Debug)]
struct Rows(Vec<Vec<u32>>);

impl Coverage for Rows {
    fn covered(&self, life_cycle: usize, block: u32) -> u32 {
        self.0[life_cycle].get(block as usize).copied().unwrap_or(0)
    }
}

/// Section 4.1, read literally.
fn is_reusable(length: u32, block_tokens: u32, life_cycles: &[LifeCycle], rows: &Rows) -> bool {
    let ok = |(at, life_cycle): (usize, &LifeCycle)| match life_cycle.retention {
        _ if life_cycle.policy != Policy::Required || length == 0 => true,
        Retention::State => {
            let block = (length - 1) / block_tokens;
            let covered = rows.covered(at, block);
            covered > 0 && block * block_tokens + covered == length
        }
        retention => (0..length.div_ceil(block_tokens)).all(|block| {
            let stale = retention.stale(length, some(block_tokens)).contains(&block);
            stale || rows.covered(at, block) >= block_tokens.min(length - block * block_tokens)
        }),
    };
    life_cycles.iter().enumerate().all(ok)
}

fn life_cycles() -> impl Strategy<Value = Vec<LifeCycle>> {
    let one = (0u32..4, 1u32..14, 0u32..3, 0u32..6).prop_map(|(kind, tokens, sink_blocks, policy)| {
        let policy = [Policy::Required, Policy::Optional, Policy::Private][(policy / 2) as usize];
        let retention = match kind {
            0 => Retention::Full,
            1 => return required(Retention::State, 0),
            _ => Retention::Window { tokens: some(tokens), sink_blocks },
        };
        LifeCycle { policy, ..required(retention, 0) }
    });
    proptest::collection::vec(one, 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn the_fixed_point_is_the_longest_reusable_length(
        block_tokens in 1u32..6,
        tokens in 0u32..40,
        life_cycles in life_cycles(),
        seed in proptest::collection::vec(0u32..100, 160),
    ) {
        // Mostly full, so that lengths above 0 are common.
        let cell = |at: usize| if seed[at % seed.len()] < 80 { block_tokens } else { seed[at % seed.len()] % (block_tokens + 1) };
        let rows = Rows((0..life_cycles.len()).map(|row| (0..40).map(|at| cell(row * 40 + at)).collect()).collect());
        let matched = Match { block_tokens: some(block_tokens), life_cycles: &life_cycles, tokens };
        let longest = (0..=tokens).rev().find(|length| is_reusable(*length, block_tokens, &life_cycles, &rows));
        prop_assert_eq!(Some(matched.reusable(&rows)), longest);
        let reusable = matched.reusable(&rows);
        prop_assert!(matched.reusable_before_states(&rows) >= reusable);
    }

    #[test]
    fn live_and_stale_blocks_share_out_a_sequence(
        tokens in 1u32..40, sink_blocks in 0u32..4, history in 0u32..200, block_tokens in 1u32..9,
    ) {
        let retention = Retention::Window { tokens: some(tokens), sink_blocks };
        let stale = retention.stale(history, some(block_tokens));
        let blocks: Vec<u32> = (0..history.div_ceil(block_tokens)).filter(|block| !stale.contains(block)).collect();
        prop_assert_eq!(retention.live(history, some(block_tokens)).collect::<Vec<_>>(), blocks.clone());
        prop_assert_eq!(retention.live_pages(history, some(block_tokens)) as usize, blocks.len());
        // Every token that a query at `history` reads is in a block that is not stale.
        for at in (history + 1).saturating_sub(tokens)..history {
            prop_assert!(!stale.contains(&(at / block_tokens)), "token {}", at);
        }
    }
}

#[test]
fn an_end_point_inside_a_block_keeps_one_page_more() {
    let retention = window(128);
    assert_eq!([128, 192, 256].map(|history| retention.live_pages(history, some(128))), [1, 2, 1]);
}

#[test]
fn a_window_of_one_token_keeps_nothing_at_a_blocks_end() {
    assert_eq!(window(1).live_pages(256, some(128)), 0);
    assert_eq!(window(1).live_pages(257, some(128)), 1);
}
