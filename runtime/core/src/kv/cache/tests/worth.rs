//! End points go as units, those that save the fewest tokens for their bytes first.

use super::{Bed, config, count, fork, required, window};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::cache::{Commits, Config, Eviction};

/// Blocks of 4 tokens, full attention with room for everything, and windows of 8 tokens: an end point inside a block needs
/// three blocks of them, one at its end two.
fn windows(slots: u32) -> Bed {
    let life_cycles = vec![required(Retention::Full, 0), required(window(8), 1)];
    let tiers = vec![vec![4000, slots]];
    Bed::new(Config { commits: Commits::EndPoints, eviction: Eviction::EndPoints, ..config(4, life_cycles, tiers) })
}

/// Computes, commits and closes, a block at a time: no more of the window is taken than is live. The tokens that were reused.
fn serve(bed: &mut Bed, tokens: &[u32]) -> u32 {
    let (id, opened) = bed.open(tokens);
    assert!(bed.resume(id), "no room to begin");
    let reused = opened.reused_tokens;
    let mut at = reused;
    while at < tokens.len() as u32 {
        let next = (at / 4 * 4 + 4).min(tokens.len() as u32);
        assert!(bed.resize(id, next, at), "no room for {next}");
        at = next;
    }
    assert!(bed.resize(id, at, at));
    bed.commit(id, &tokens[reused as usize..]);
    bed.close(id);
    reused
}

/// Prompts of one life, each with tokens of its own.
fn prompt(at: u32, length: u32) -> Vec<u32> {
    count(at * 10_000, length)
}

#[test]
fn an_end_point_goes_with_all_its_pages() {
    // Two pages each, and one that is free.
    let mut bed = windows(9);
    for at in 0..4 {
        serve(&mut bed, &prompt(at, 44));
    }
    assert_eq!(bed.pages(1), [(0, 0, 8)]);
    let (id, _) = bed.start(&prompt(9, 4));
    assert!(bed.resize(id, 8, 0), "one page more");
    let found = |bed: &Bed| (0..4).filter(|at| bed.probe(&prompt(*at, 44)) == 44).count();
    assert_eq!((found(&bed), bed.pages(1)), (3, vec![(2, 0, 7)]));
    // What is left of it goes next, before any page of another one.
    assert!(bed.resize(id, 12, 0), "one page more");
    assert_eq!((found(&bed), bed.pages(1)), (3, vec![(3, 0, 6)]));
    bed.close(id);
}

#[test]
fn a_last_block_that_is_not_full_goes_before_the_window_before_it() {
    // Two tokens for a page, forty for two.
    let mut bed = windows(5);
    serve(&mut bed, &prompt(0, 42));
    assert_eq!(bed.pages(1), [(0, 0, 3)]);
    let (id, _) = bed.start(&prompt(1, 4));
    assert!(bed.resize(id, 12, 0), "two pages more");
    assert_eq!((bed.probe(&prompt(0, 42)), bed.pages(1)), (40, vec![(3, 0, 2)]));
    bed.close(id);
}

#[test]
fn a_dead_branch_gives_up_its_full_attention_as_well() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(8), 1)];
    let tiers = vec![vec![204, 5]];
    let mut bed = Bed::new(Config {
        commits: Commits::EndPoints,
        eviction: Eviction::EndPoints,
        ..config(4, life_cycles, tiers)
    });
    serve(&mut bed, &prompt(0, 400));
    serve(&mut bed, &prompt(1, 400));
    // The windows of the first go, or of the second; then its full attention is of no use.
    serve(&mut bed, &prompt(2, 8));
    let alive = if bed.probe(&prompt(0, 400)) == 400 { 0 } else { 1 };
    assert_eq!([bed.probe(&prompt(alive, 400)), bed.probe(&prompt(1 - alive, 400))], [400, 0]);
    // The dead one has a hundred blocks, two are free.
    let (id, _) = bed.start(&prompt(3, 4));
    assert!(bed.resize(id, 404, 400), "a hundred blocks of full attention more, two of the window");
    assert_eq!(bed.probe(&prompt(alive, 400)), 400);
    bed.close(id);
}

#[test]
fn what_a_longer_one_replaced_goes_before_what_is_the_last_of_its_path() {
    let mut bed = windows(11);
    serve(&mut bed, &prompt(0, 40));
    serve(&mut bed, &prompt(1, 20));
    serve(&mut bed, &prompt(0, 60));
    // Two of the first's older end point, two of the second, two of the newest.
    assert_eq!(bed.pages(1), [(0, 0, 6)]);
    let (id, _) = bed.start(&prompt(2, 4));
    assert!(bed.resize(id, 28, 0), "seven pages");
    assert_eq!([bed.probe(&prompt(0, 40)), bed.probe(&prompt(1, 20)), bed.probe(&prompt(0, 60))], [0, 20, 60]);
    bed.close(id);
}

#[test]
fn where_paths_part_an_end_point_counts() {
    let mut bed = windows(12);
    let system = prompt(0, 40);
    serve(&mut bed, &system);
    for at in 1..3 {
        serve(&mut bed, &fork(&system, 40, &prompt(at, 8)));
    }
    // The shared beginning saves ten times what its branches save.
    for at in 3..9 {
        assert_eq!(serve(&mut bed, &fork(&system, 40, &prompt(at, 8))), 40, "branch {at}");
    }
}

#[test]
fn who_saves_more_tokens_for_the_same_bytes_stays_longer() {
    let mut bed = windows(8);
    serve(&mut bed, &prompt(0, 3200));
    for at in 1..8 {
        serve(&mut bed, &prompt(at, 8));
    }
    assert_eq!(bed.probe(&prompt(0, 3200)), 3200);
    // But not for ever.
    for at in 8..400 {
        serve(&mut bed, &prompt(at, 8));
    }
    assert_eq!(bed.probe(&prompt(0, 3200)), 0);
}

#[test]
fn sessions_in_turn_that_do_not_fit_find_a_share_that_falls_smoothly() {
    /// End points, and what one more that runs needs.
    const KEPT: u32 = 64;
    let shares: Vec<u32> = [32, 64, 72, 80, 88, 96, 160]
        .into_iter()
        .map(|sessions| {
            let mut bed = windows(3 * KEPT + 6);
            let mut found = 0;
            for round in 0..8 {
                for session in 0..sessions {
                    let reused = serve(&mut bed, &prompt(session, 42));
                    found += u32::from(round > 3 && reused > 0);
                }
            }
            found * 100 / (4 * sessions)
        })
        .collect();
    assert_eq!(shares[..2], [100, 100], "{shares:?}");
    assert!(shares.windows(2).all(|pair| pair[1] <= pair[0]), "{shares:?}");
    assert!(shares[2] >= 70 && shares[3] >= 40 && shares[4] >= 20, "{shares:?}");
}
