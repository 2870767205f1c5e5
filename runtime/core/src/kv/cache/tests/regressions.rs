//! Faults that other KV managers had, by the rule that they broke.

use super::{Bed, SCOPE, config, count, fork, required, window};
use crate::ids::ConversationKey;
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use crate::kv::cache::{Commits, Config};
use crate::kv::identity::Scope;

fn full() -> LifeCycle {
    required(Retention::Full, 0)
}

#[test]
fn window_end_points_of_all_sessions_stay_while_there_is_room() {
    // Ten sessions in turn; the window pool has room for one end point each what runs.
    let (sessions, kept, running) = (10, 3, 12);
    let mut bed = Bed::new(Config {
        commits: Commits::EndPoints,
        ..config(4, vec![full(), required(window(8), 1)], vec![vec![200, sessions * kept + running]])
    });
    let mut plans = vec![None; sessions as usize];
    for round in 0..4 {
        for session in 0..sessions {
            bed.conversation = Some(ConversationKey(u128::from(session)));
            let (id, reused) = bed.prefill(&count(1000 * session, 18 + 8 * round), &[]);
            assert_eq!(reused, if round == 0 { 0 } else { 10 + 8 * round }, "session {session}");
            bed.manager.stop(id).expect("it is open");
            let plan = bed.manager.plan(id).expect("it is stopped").map(|(plan, _)| plan);
            // The new end point replaces the old one.
            if let Some(old) = std::mem::replace(&mut plans[session as usize], plan) {
                bed.manager.drop_plan(old).expect("once");
            }
            bed.close(id);
        }
    }
}

#[test]
fn a_fork_inside_the_last_block_reuses_up_to_the_fork() {
    let mut bed = Bed::new(config(32, vec![full(), required(window(1024), 1)], vec![vec![140, 140]]));
    let prompt = count(0, 2048);
    bed.serve(&prompt);
    assert_eq!(bed.serve(&fork(&prompt, 2040, &count(9000, 20))), 2040);
}

#[test]
fn life_cycles_that_do_not_constrain_never_displace_those_that_do() {
    let draft = |policy| LifeCycle { policy, ..required(window(16), 1) };
    for policy in [Policy::Private, Policy::Optional] {
        let mut bed = Bed::new(config(4, vec![full(), draft(policy)], vec![vec![240, 12]]));
        for chat in 0..20 {
            assert_eq!(bed.serve(&count(1000 * chat, 40)), 0);
        }
        for chat in 0..20 {
            assert_eq!(bed.probe(&count(1000 * chat, 40)), 40, "{policy:?}");
        }
    }
}

#[test]
fn a_slot_is_given_back_once() {
    let mut bed = Bed::new(config(4, vec![full(), required(window(4), 0)], vec![vec![12]]));
    let (id, _) = bed.prefill(&count(0, 20), &[]);
    let reader = bed.open(&count(0, 20)).0;
    bed.close(id);
    bed.close(id);
    bed.close(reader);
    let droppable: u32 = bed.manager.census().iter().flatten().map(|census| census.droppable).sum();
    assert_eq!(bed.manager.free(0, 0) + droppable, 12);
}

#[test]
fn hits_of_all_life_cycles_are_held_before_anything_is_allocated() {
    let mut bed = Bed::new(config(4, vec![full(), required(window(6), 0)], vec![vec![8]]));
    bed.serve(&count(0, 12));
    // The next one's new blocks take every page that it does not reuse itself, and no other.
    let (id, opened) = bed.open(&count(0, 16));
    assert_eq!(opened.reused_tokens, 12);
    assert!(bed.resume(id) && bed.resize(id, 16, 12));
    assert_eq!(bed.manager.table(id, 0).iter().flatten().count(), 4);
    assert_eq!(bed.manager.table(id, 1).iter().flatten().count(), 3);
    bed.close(id);
}

#[test]
fn scopes_with_equal_numbers_share_nothing() {
    let scopes = [
        Scope { tenant: 0, adapter: None },
        Scope { tenant: 7, adapter: None },
        Scope { tenant: 0, adapter: Some(7) },
        Scope { tenant: 7, adapter: Some(7) },
        Scope { tenant: 7, adapter: Some(0) },
    ];
    let mut bed = Bed::new(config(4, vec![full()], vec![vec![20]]));
    for (at, scope) in scopes.iter().enumerate() {
        let found = scopes.map(|scope| bed.manager.probe(&scope, &count(0, 8)));
        let expected: Vec<u32> = (0..scopes.len()).map(|other| if other < at { 8 } else { 0 }).collect();
        assert_eq!(found.to_vec(), expected);
        let (id, _) = bed.open_in(*scope, &count(0, 8));
        assert!(bed.resume(id) && bed.resize(id, 8, 0));
        bed.commit(id, &count(0, 8));
        bed.close(id);
    }
}

#[test]
fn a_fork_is_found_at_the_finest_grain_of_all_life_cycles() {
    let mut bed = Bed::new(config(32, vec![full(), required(window(24), 1)], vec![vec![20, 20]]));
    let prompt = count(0, 128);
    bed.serve(&prompt);
    assert_eq!(bed.probe(&fork(&prompt, 80, &count(900, 48))), 80);
}

#[test]
fn a_block_larger_than_the_window_still_ends_with_a_whole_window() {
    for commits in [Commits::EveryBlock, Commits::EndPoints] {
        let life_cycles = vec![full(), required(window(5), 1)];
        let mut bed = Bed::new(Config { commits, ..config(16, life_cycles, vec![vec![12, 12]]) });
        for length in [16, 17, 31, 32, 48, 50] {
            bed.serve(&count(1000 * length, length));
            assert_eq!(bed.probe(&count(1000 * length, length)), length, "{commits:?}");
        }
    }
}

#[test]
fn an_end_point_that_loses_a_page_goes_as_a_whole() {
    let commits = Commits::EndPoints;
    let mut bed = Bed::new(Config { commits, ..config(4, vec![full(), required(window(8), 1)], vec![vec![40, 7]]) });
    let trunk = count(0, 12);
    let branches = [fork(&trunk, 12, &count(100, 9)), fork(&trunk, 12, &count(200, 9))];
    bed.serve(&branches[0]);
    bed.serve(&branches[1]);
    // The second is used again, so the first one is what room is made of.
    assert_eq!(bed.serve(&branches[1]), 21);
    bed.serve(&count(900, 8));
    assert_eq!((bed.probe(&branches[0]), bed.probe(&branches[1])), (0, 21));
    // Its last block is gone from full attention as well, where there was no lack of room.
    assert!(bed.manager.free(0, 0) > 20);
    let found = |branch: &[u32]| bed.manager.probe_path(&SCOPE, branch).1;
    assert!(found(&branches[0]) < 21 && found(&branches[1]) == 21, "{}", found(&branches[0]));
}

#[test]
fn what_is_retained_is_what_a_shortened_match_needs() {
    for length in [63, 64, 65, 100, 127, 128, 1024] {
        let life_cycles = vec![full(), required(window(127), 1)];
        let mut bed = Bed::new(Config { match_backoff_tokens: 1, ..config(64, life_cycles, vec![vec![20, 20]]) });
        bed.serve(&count(0, length));
        assert_eq!(bed.serve(&count(0, length)), length - 1);
        assert_eq!(bed.probe(&count(0, length)), length - 1);
    }
}

#[test]
fn a_fork_below_a_snapshot_leaves_the_snapshot() {
    let mut bed = Bed::new(config(4, vec![full(), required(Retention::State, 1)], vec![vec![30, 10]]));
    let prompt = count(0, 12);
    let (id, _) = bed.prefill(&prompt, &[8]);
    bed.close(id);
    assert_eq!(bed.probe(&prompt[..8]), 8);
    assert_eq!(bed.serve(&fork(&prompt, 8, &count(100, 4))), 8);
    assert_eq!(bed.serve(&fork(&prompt, 10, &count(200, 4))), 8);
    assert_eq!([&prompt[..8], &prompt[..]].map(|tokens| bed.probe(tokens)), [8, 12]);
}

#[test]
fn every_length_of_a_prompt_leaves_a_snapshot_below_it() {
    for length in 2u32..40 {
        let mut bed = Bed::new(config(4, vec![full(), required(Retention::State, 1)], vec![vec![30, 10]]));
        // One at the end of the last whole block below the prompt's end, besides the one at its end.
        let below = (length - 1) / 4 * 4;
        let ends: Vec<usize> = (below > 0).then_some(below as usize).into_iter().collect();
        let (id, _) = bed.prefill(&count(0, length), &ends);
        bed.close(id);
        assert_eq!(bed.probe(&count(0, length)), length);
        // The last token has to be computed, so the match stops short of it.
        assert_eq!(bed.probe(&count(0, length - 1)), below, "{length} tokens");
    }
}

#[test]
fn only_a_full_block_takes_a_full_blocks_page() {
    let mut bed = Bed::new(config(8, vec![full()], vec![vec![10]]));
    let (long, _) = bed.prefill(&count(0, 8), &[]);
    let (short, _) = bed.open(&[]);
    assert!(bed.resume(short) && bed.resize(short, 8, 0));
    bed.commit(short, &count(0, 5));
    bed.manager.stop(short).expect("it is open");
    bed.check();
    let (kept, own) = (bed.manager.table(long, 0), bed.manager.table(short, 0));
    assert_ne!(kept, own, "five tokens of another sequence are not these eight");
    assert_eq!(bed.probe(&count(0, 8)), 8);
    bed.close(short);
    assert_eq!((bed.probe(&count(0, 8)), bed.manager.free(0, 0)), (8, 9));
}

#[test]
fn without_a_lower_tier_suspending_frees_nothing() {
    let mut bed = Bed::new(config(4, vec![full()], vec![vec![4]]));
    let (first, _) = bed.prefill(&count(0, 16), &[]);
    bed.manager.suspend(first).expect("it is active");
    let (second, _) = bed.open(&count(100, 4));
    assert!(bed.resume(second) && !bed.resize(second, 4, 0));
    bed.close(first);
    assert!(bed.resize(second, 4, 0));
}

#[test]
fn a_block_committed_after_it_went_stale_is_let_go() {
    let mut bed = Bed::new(config(4, vec![full(), required(window(8), 1)], vec![vec![10, 10]]));
    let (id, _) = bed.open(&[]);
    assert!(bed.resume(id) && bed.resize(id, 24, 0) && bed.resize(id, 24, 24));
    assert_eq!(bed.pages(1), [(2, 4, 0)]);
    bed.commit(id, &count(0, 24));
    assert_eq!(bed.pages(1), [(2, 0, 4)]);
    bed.manager.suspend(id).expect("it is active");
    bed.check();
}

#[test]
fn lookups_that_are_dropped_leave_nothing_held() {
    let mut bed = Bed::new(config(4, vec![full(), required(window(8), 1)], vec![vec![10, 10]]));
    bed.serve(&count(0, 24));
    let before = bed.manager.census();
    for _ in 0..200 {
        let (id, opened) = bed.open(&count(0, 24));
        assert_eq!(opened.reused_tokens, 24);
        bed.close(id);
    }
    assert_eq!(bed.manager.census(), before);
}

#[test]
fn a_block_is_found_below_its_own_parent_only() {
    let mut bed = Bed::new(config(2, vec![full()], vec![vec![20]]));
    bed.serve(&[1, 2, 9, 9]);
    assert_eq!(bed.manager.probe(&SCOPE, &[3, 4, 9, 9]), 0);
    bed.serve(&[3, 4, 9, 9]);
    assert_eq!((bed.manager.blocks(), bed.probe(&[1, 2, 9, 9]), bed.probe(&[9, 9])), (4, 4, 0));
}
