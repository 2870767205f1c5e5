//! Events, snapshots, mirrors and end points.

use super::{Bed, SCOPE, config, count, fork, required, window};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::cache::mirror::Mirror;
use crate::kv::cache::{Commits, Config, Event, EventLimits, Gap};
use crate::kv::identity::{BlockKey, Scope, chain};

const LIMITS: EventLimits = EventLimits { events_max: 1000, keys_max: 100 };

fn logging(config: Config) -> Config {
    Config { events: Some(LIMITS), ..config }
}

fn full(slots: u32) -> Config {
    logging(config(4, vec![required(Retention::Full, 0)], vec![vec![slots]]))
}

fn mirror(bed: &Bed) -> Mirror {
    Mirror::new(bed.manager.config().block_tokens, &bed.manager.config().life_cycles)
}

fn follow(bed: &mut Bed, mirror: &mut Mirror) -> Result<(), Gap> {
    for event in bed.manager.events_after(mirror.sequence())? {
        mirror.apply(event)?;
    }
    Ok(())
}

fn events(bed: &mut Bed, after: u64) -> Vec<Event> {
    let events = bed.manager.events_after(after).expect("nothing is lost");
    events.iter().map(|numbered| numbered.event.clone()).collect()
}

fn end(scope: BlockKey, chain: &[BlockKey], tokens: u32) -> Event {
    let parent = chain.len().checked_sub(2).map_or(scope, |at| chain[at]);
    Event::EndPointAdded { scope, parent, key: chain[chain.len() - 1], length: tokens }
}

#[test]
fn blocks_of_one_chain_are_one_event() {
    let mut bed = Bed::new(full(20));
    bed.serve(&count(0, 12));
    let (scope, keys) = (SCOPE.root(), chain(&SCOPE, &count(0, 12), 4));
    let stored = Event::Stored { scope, life_cycle: 0, tier: 0, parent: scope, tokens: 4, blocks: keys.clone() };
    assert_eq!(events(&mut bed, 0), [stored, end(scope, &keys, 12)]);
}

#[test]
fn removals_are_one_event_and_come_before_others() {
    let mut bed = Bed::new(full(20));
    bed.serve(&count(0, 12));
    let before = bed.manager.snapshot().sequence;
    // The whole subtree goes with its first block.
    assert!(bed.manager.unlink(&SCOPE, &count(0, 12), (0, 0)));
    let (scope, mut keys) = (SCOPE.root(), chain(&SCOPE, &count(0, 12), 4));
    let parent = keys[1];
    let gone = Event::EndPointRemoved { scope, parent, key: keys[2], length: 12 };
    let found = events(&mut bed, before);
    let removed: Vec<_> = found
        .iter()
        .filter_map(|event| match event {
            Event::Removed { blocks, life_cycle: 0, .. } => Some(blocks.clone()),
            _ => None,
        })
        .collect();
    assert!(found.contains(&gone), "{found:?}");
    let mut all = removed.concat();
    all.sort_unstable();
    keys.sort_unstable();
    assert_eq!((all, removed.len()), (keys, 2), "{found:?}");
}

#[test]
fn a_donated_page_is_stored_for_its_life_cycle_only() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(6), 1)];
    let mut bed = Bed::new(logging(config(4, life_cycles, vec![vec![20, 20]])));
    // Nobody finds anything of it while it is open, so the second has pages of its own.
    let (first, _) = bed.start(&count(0, 8));
    let (second, _) = bed.start(&count(0, 8));
    bed.commit(first, &count(0, 8));
    bed.close(first);
    assert!(bed.manager.unlink(&SCOPE, &count(0, 8), (0, 1)));
    let before = bed.manager.snapshot().sequence;
    bed.commit(second, &count(0, 8));
    let scope = SCOPE.root();
    let blocks = chain(&SCOPE, &count(0, 4), 4);
    let stored = Event::Stored { scope, life_cycle: 1, tier: 0, parent: scope, tokens: 4, blocks };
    assert!(events(&mut bed, before).contains(&stored));
    assert_eq!(events(&mut bed, before).iter().filter(|event| matches!(event, Event::Stored { .. })).count(), 1);
}

#[test]
fn a_block_that_is_not_full_is_an_end_point_and_not_stored() {
    let mut bed = Bed::new(full(20));
    bed.serve(&count(0, 6));
    let (scope, parent) = (SCOPE.root(), chain(&SCOPE, &count(0, 4), 4)[0]);
    let key = parent.child(&count(4, 2));
    let found = events(&mut bed, 0);
    assert_eq!(found.last(), Some(&Event::EndPointAdded { scope, parent, key, length: 6 }));
    let mut mirror = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut mirror), Ok(()));
    assert_eq!((mirror.blocks(), mirror.end_points()), (1, 1));
    let said = [5, 6, 9].map(|length| mirror.reusable(&SCOPE, &count(0, length)));
    assert_eq!(said, [4, 6, 6]);
}

#[test]
fn a_page_that_moves_is_updated() {
    let mut bed = Bed::new(logging(config(4, vec![required(Retention::Full, 0)], vec![vec![2], vec![2]])));
    bed.serve(&count(0, 8));
    let mut mirror = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut mirror), Ok(()));
    let keys = chain(&SCOPE, &count(0, 8), 4);
    assert_eq!((mirror.leading(&keys, 0, 0), mirror.leading(&keys, 0, 1)), (2, 2));
    bed.serve(&count(100, 4));
    assert_eq!(follow(&mut bed, &mut mirror), Ok(()));
    // The last block went down to make room.
    assert_eq!((mirror.leading(&keys, 0, 0), mirror.leading(&keys, 0, 1)), (1, 2));
}

#[test]
fn tenants_with_the_same_tokens_have_other_keys() {
    let mut bed = Bed::new(full(20));
    let scopes = [1, 2].map(|tenant| Scope { tenant, adapter: None });
    let (id, _) = bed.open_in(scopes[0], &count(0, 8));
    assert!(bed.resume(id) && bed.resize(id, 8, 0));
    bed.commit(id, &count(0, 8));
    bed.close(id);
    let mut mirror = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut mirror), Ok(()));
    assert_eq!(scopes.map(|scope| mirror.reusable(&scope, &count(0, 8))), [8, 0]);
    for event in events(&mut bed, 0) {
        match event {
            Event::Stored { scope, .. } | Event::EndPointAdded { scope, .. } => assert_eq!(scope, scopes[0].root()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn equal_last_blocks_of_other_chains_are_told_apart() {
    let mut bed = Bed::new(full(20));
    let [first, second] = [[1, 2, 3, 4, 9, 9, 9, 9], [5, 6, 7, 8, 9, 9, 9, 9]];
    bed.serve(&first);
    let mut mirror = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut mirror), Ok(()));
    assert_eq!((mirror.reusable(&SCOPE, &first), mirror.reusable(&SCOPE, &second)), (8, 0));
}

#[test]
fn a_reader_that_starts_anew_asks_for_a_snapshot_and_knows_every_parent() {
    let mut bed = Bed::new(Config { events: Some(EventLimits { events_max: 3, keys_max: 100 }), ..full(40) });
    let prompt = count(0, 8);
    bed.serve(&prompt);
    let mut reader = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    // It starts anew; meanwhile a block is stored below one that it heard of before.
    let mut reader = mirror(&bed);
    let longer = fork(&prompt, 8, &count(100, 8));
    bed.serve(&longer);
    let gap = follow(&mut bed, &mut reader).expect_err("the first events are lost");
    assert!(gap.wanted == 1 && gap.next > 1, "{gap}");
    assert_eq!(reader, mirror(&bed), "a gap changes nothing");
    let snapshot = bed.manager.snapshot();
    reader.repair(&snapshot);
    assert_eq!(reader.reusable(&SCOPE, &longer), 16);
    // It goes on from there.
    bed.serve(&fork(&longer, 16, &count(200, 4)));
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    assert_eq!(reader.reusable(&SCOPE, &fork(&longer, 16, &count(200, 4))), 20);
}

#[test]
fn an_event_out_of_order_is_not_applied() {
    let mut bed = Bed::new(full(20));
    bed.serve(&count(0, 8));
    let all = bed.manager.events_after(0).expect("nothing is lost").to_vec();
    let mut reader = mirror(&bed);
    assert_eq!(reader.apply(&all[1]), Err(Gap { wanted: 1, next: 2 }));
    assert_eq!((reader.apply(&all[0]), reader.apply(&all[0]), reader.apply(&all[1])), (Ok(()), Ok(()), Ok(())));
    assert_eq!((reader.sequence(), reader.blocks()), (2, 2));
    let beyond = bed.manager.events_after(99);
    assert_eq!(beyond, Err(Gap { wanted: 100, next: 1 }));
}

#[test]
fn clearing_is_one_event() {
    let mut bed = Bed::new(full(20));
    bed.serve(&count(0, 8));
    let mut reader = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    bed.manager.clear().expect("nothing is open");
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    assert_eq!((reader.blocks(), reader.end_points(), reader.sequence()), (0, 0, 3));
}

#[test]
fn nothing_is_logged_unless_asked_for() {
    let mut bed = Bed::new(Config { events: None, ..full(20) });
    bed.serve(&count(0, 8));
    assert_eq!((events(&mut bed, 0), bed.manager.end_points()), (vec![], 0));
}

#[test]
fn a_window_that_loses_a_page_takes_its_end_point_along() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(8), 1)];
    let mut bed =
        Bed::new(logging(Config { commits: Commits::EndPoints, ..config(4, life_cycles, vec![vec![40, 40]]) }));
    let prompt = count(0, 21);
    bed.serve(&prompt);
    let mut reader = mirror(&bed);
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    assert_eq!((reader.reusable(&SCOPE, &prompt), bed.manager.end_points()), (21, 1));
    // Full attention has all blocks still, but nobody can resume.
    assert!(bed.manager.unlink(&SCOPE, &prompt, (3, 1)));
    assert_eq!(follow(&mut bed, &mut reader), Ok(()));
    assert_eq!((reader.reusable(&SCOPE, &prompt), bed.manager.end_points()), (0, 0));
    assert_eq!(reader.leading(&chain(&SCOPE, &prompt, 4), 0, 0), 5);
}
