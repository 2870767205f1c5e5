use super::{Bed, SCOPE, config, count, fork, required, some, window};
use crate::kv::cache::lifecycle::{Priority, Retention};
use crate::kv::cache::pages::PageId;
use crate::kv::cache::tree::{Inserted, NodeId, Tree};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Blocks of a small alphabet, so that many begin alike.
fn blocks() -> impl Strategy<Value = Vec<Vec<u32>>> {
    proptest::collection::vec(proptest::collection::vec(0u32..3, 1..5), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn siblings_are_found_like_in_a_list(blocks in blocks(), asked in blocks(), gone in 0usize..60) {
        let mut tree = Tree::new(some(4), 1, false);
        let root = tree.root_or_new(&SCOPE);
        // The rules of section 4, over a list.
        let mut list: Vec<Vec<u32>> = Vec::new();
        for block in &blocks {
            let useless = list.iter().any(|other| other.len() > block.len() && other.starts_with(block));
            prop_assert_eq!(matches!(tree.insert(root, block), Inserted::Useless(_)), useless);
            if !useless && !list.contains(block) {
                list.retain(|other| !block.starts_with(other));
                list.push(block.clone());
            }
        }
        let removed = list.swap_remove(gone % list.len());
        let node = tree.child(root, &removed).expect("it is there");
        tree.remove(node);
        list.sort();
        let found: Vec<Vec<u32>> = tree.children(root).into_iter().map(|id| tree.tokens(id).to_vec()).collect();
        prop_assert_eq!(&found, &list);
        prop_assert_eq!(tree.len(), list.len());
        for tokens in &asked {
            let shared = |other: &[u32]| other.iter().zip(tokens).take_while(|(a, b)| a == b).count() as u32;
            let longest = list.iter().map(|other| shared(other)).max().filter(|longest| *longest > 0);
            let nearest = tree.nearest_child(root, tokens);
            prop_assert_eq!(nearest.map(|(_, length)| length), longest);
            if let Some((id, length)) = nearest {
                prop_assert_eq!(shared(tree.tokens(id)), length);
            }
            prop_assert_eq!(tree.child(root, tokens).is_some(), list.contains(tokens));
        }
    }
}

#[test]
fn a_node_is_not_taken_for_one_that_had_its_id() {
    let mut tree = Tree::new(some(2), 1, false);
    let root = tree.root_or_new(&SCOPE);
    let Inserted::New(first) = tree.insert(root, &[1, 2]) else { panic!("nothing else is there") };
    let reference = tree.reference(first);
    tree.remove(first);
    assert_eq!(tree.resolve(reference), None);
    let Inserted::New(second) = tree.insert(root, &[3, 4]) else { panic!("nothing else is there") };
    assert_eq!((first, tree.resolve(reference)), (second, None));
}

#[test]
fn a_block_has_at_most_128_bytes_of_metadata() {
    let mut bed = Bed::new(config(4, vec![required(Retention::Full, 0)], vec![vec![10_000]]));
    // Twice what fits, so that everything was used and given back.
    for user in 0..20 {
        let prompt = count(100_000 * user, 4000);
        let (id, _) = bed.open(&prompt);
        bed.manager.resume(id, &[], &mut bed.copies).expect("it is suspended");
        bed.manager.resize(id, (Some(4000), None), &mut bed.copies).expect("a right size");
        bed.manager.commit(id, &prompt, crate::kv::cache::After::GoesOn, &mut bed.copies).expect("a right commit");
        bed.manager.close(id);
    }
    bed.check();
    assert_eq!((bed.manager.blocks(), bed.manager.evicted_pages()), (10_000, 10_000));
    let each = bed.manager.metadata_bytes() / bed.manager.blocks();
    assert!(each <= 128, "{each} bytes a block");
    assert_eq!(size_of::<Option<PageId>>() + size_of::<Option<NodeId>>(), 8);
}

#[test]
fn wide_fan_out_has_no_cliff() {
    let mut bed = Bed::new(config(4, vec![required(Retention::Full, 0)], vec![vec![400]]));
    let system = count(0, 6);
    for user in 0..150 {
        // The fork lies inside a block: only a partial match finds the system prompt.
        let reused = bed.serve(&fork(&system, 6, &count(1000 * (user + 1), 5)));
        assert_eq!(reused, if user == 0 { 0 } else { 6 }, "user {user}");
    }
    for user in [0, 31, 32, 33, 149] {
        assert_eq!(bed.probe(&fork(&system, 6, &count(1000 * (user + 1), 5))), 11);
        assert_eq!(bed.probe(&fork(&system, 6, &[1000 * (user + 1), 7])), 7);
    }
}

#[test]
fn a_full_block_takes_its_subtree_along() {
    let priority = Priority::ByOrdinal(vec![50, 1, 50]);
    let full = crate::kv::cache::lifecycle::LifeCycle { priority, ..required(Retention::Full, 0) };
    let mut bed = Bed::new(config(2, vec![full, required(window(3), 1)], vec![vec![12, 12], vec![4, 4]]));
    let trunk = count(0, 6);
    bed.serve(&fork(&trunk, 6, &[100, 101, 102, 103]));
    bed.serve(&fork(&trunk, 6, &[200, 201]));
    let (stranger, _) = bed.prefill(&count(500, 4), &[]);
    assert_eq!(bed.manager.blocks(), 6 + 2);
    // Block 1 goes first, and with it all that can only be reached through it.
    assert!(bed.manager.unlink(&SCOPE, &trunk, (1, 0)));
    bed.check();
    assert_eq!(bed.manager.blocks(), 1 + 2);
    assert_eq!((bed.probe(&trunk), bed.probe(&count(500, 4))), (2, 4));
    assert_eq!(bed.pages(0), [(2, 0, 1), (0, 0, 0)]);
    bed.close(stranger);
}

#[test]
fn a_sequence_keeps_pages_whose_block_is_gone() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![10]]));
    let (id, _) = bed.prefill(&count(0, 6), &[]);
    let reader = bed.open(&count(0, 4)).0;
    // Held pages do not vanish, so the root of them is taken away by hand.
    let node = bed.manager.store.matched(&SCOPE, &count(0, 2), &[]).nodes[0];
    let page = bed.manager.store.tree.link(node, 0).expect("block 0 has a page");
    for below in bed.manager.store.tree.subtree(node) {
        let page = bed.manager.store.tree.link(below, 0).expect("each block has one");
        bed.manager.store.tree.set_link(below, 0, None);
        bed.manager.store.pages.orphan(page);
        bed.manager.store.tree.remove(below);
    }
    bed.manager
        .store
        .may_be_bare(bed.manager.store.tree.reference(bed.manager.store.tree.root(&SCOPE).expect("a root")));
    bed.manager.store.sweep();
    bed.check();
    assert!(bed.manager.store.pages.is_alive(page));
    assert_eq!((bed.probe(&count(0, 6)), bed.pages(0)), (0, vec![(3, 0, 0)]));
    // What follows can only be found if what came before can: that is put back.
    assert!(bed.resize(id, 10, 6));
    bed.commit(id, &count(6, 2));
    assert_eq!((bed.manager.blocks(), bed.probe(&count(0, 8))), (4, 8));
    bed.close(id);
    bed.close(reader);
    assert_eq!((bed.pages(0), bed.manager.free(0, 0)), (vec![(0, 0, 4)], 6));
}

#[test]
fn a_sequence_whose_snapshot_was_evicted_publishes_its_next_end_point() {
    let mut bed =
        Bed::new(config(4, vec![required(Retention::Full, 0), required(Retention::State, 1)], vec![vec![40, 3]]));
    let (id, _) = bed.prefill(&count(0, 12), &[]);
    assert_eq!(bed.probe(&count(0, 12)), 12);
    for user in 1..4 {
        bed.serve(&count(100 * user, 8));
    }
    // Nobody can resume there any more, so the blocks went, although the sequence runs.
    assert_eq!(bed.manager.probe_path(&SCOPE, &count(0, 12)), (0, 0));
    assert!(bed.resize(id, 17, 17));
    bed.commit(id, &count(12, 5));
    bed.close(id);
    assert_eq!(bed.probe(&count(0, 17)), 17);
}

#[test]
fn a_shorter_block_gives_its_pages_to_the_one_that_covers_it() {
    let mut bed = Bed::new(config(8, vec![required(Retention::Full, 0)], vec![vec![4]]));
    bed.serve(&count(0, 3));
    assert_eq!((bed.manager.blocks(), bed.probe(&count(0, 8))), (1, 3));
    bed.serve(&count(0, 6));
    assert_eq!((bed.manager.blocks(), bed.probe(&count(0, 8)), bed.pages(0)), (1, 6, vec![(0, 0, 1)]));
    // And a shorter one is of no use beside a longer one.
    bed.serve(&count(0, 5));
    assert_eq!((bed.manager.blocks(), bed.probe(&count(0, 8))), (1, 6));
}

#[test]
fn empty_scopes_leave_nothing_behind() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![3]]));
    for tenant in 0..50 {
        let scope = crate::kv::identity::Scope { tenant, adapter: None };
        let (id, _) = bed.open_in(scope, &count(0, 4));
        assert!(bed.resume(id) && bed.resize(id, 4, 0));
        bed.commit(id, &count(0, 4));
        bed.close(id);
    }
    let there: BTreeSet<u64> = (0..50)
        .filter(|tenant| {
            bed.manager.store.tree.root(&crate::kv::identity::Scope { tenant: *tenant, adapter: None }).is_some()
        })
        .collect();
    assert_eq!(there, BTreeSet::from([48, 49]));
}

#[test]
fn blocks_without_pages_are_remembered_for_a_while() {
    let mut bed = Bed::new(config(2, vec![required(window(3), 0)], vec![vec![20]]));
    let mut known = Vec::new();
    for user in 0..600 {
        let (id, _) = bed.open(&[]);
        // History passes the block before it is committed, and there it ends.
        assert!(bed.manager.resume(id, &[], &mut bed.copies).is_ok_and(|fits| fits) && bed.resize(id, 6, 6));
        let prompt = count(1000 * user, 2);
        bed.manager.commit(id, &prompt, crate::kv::cache::After::Ends, &mut bed.copies).expect("a right commit");
        bed.close(id);
        known.push(prompt);
    }
    let found: Vec<u32> = known.iter().map(|prompt| bed.manager.probe_path(&SCOPE, prompt).1).collect();
    assert!(found[..300] == [0; 300] && found[590..] == [2; 10], "{found:?}");
    assert_eq!(bed.manager.free(0, 0), 20);
}
