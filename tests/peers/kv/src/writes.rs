//! What it costs that blocks come and go.

use crate::dynamo::{event, removals, stored, stores};
use crate::inputs::{BLOCK_TOKENS, EVENT_BLOCKS, Holdings, after, chained, tokens};
use crate::measure::{median, on_cpu};
use crate::starling::{Layers, Loaded, Ranks, SCOPE, load};
use crate::table::Table;
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::RouterEvent;
use starling_core::kv::identity::{BlockKey, chain, chain_after};

const DECODED: usize = 100_000;

/// A second of CPU time: blocks stored, blocks decoded one by one, blocks removed.
#[derive(Default)]
struct Rates {
    store: Vec<f64>,
    decode: Vec<f64>,
    evict: Vec<f64>,
}

/// CPU seconds for hashing one block of those that are stored, and one of those that are decoded.
fn hashing(data: &Holdings, decoded: &[(usize, u64)]) -> (f64, f64) {
    let (mut stored, mut blocks) = (0.0, 0);
    for part in data.stored.iter().step_by(1 + data.stored.len() / 500) {
        let tokens = tokens(&data.sessions[part.session].blocks[..part.to]);
        let known = chain(&SCOPE, &tokens[..part.from * BLOCK_TOKENS as usize], BLOCK_TOKENS);
        let keys = on_cpu(&mut stored, || chain_after(&known, &SCOPE, &tokens, BLOCK_TOKENS));
        blocks += keys.len() - part.from;
    }
    let fresh: Vec<_> = decoded.iter().map(|(_, block)| tokens(&[*block])).collect();
    let (mut single, mut key) = (0.0, SCOPE.root());
    on_cpu(&mut single, || fresh.iter().for_each(|tokens| key = BlockKey::child(&key, tokens)));
    std::hint::black_box(key);
    (stored / blocks as f64, single / decoded.len() as f64)
}

fn starling(data: &Holdings, decoded: &[(usize, u64)], rates: &mut Rates) {
    let mut spare = vec![0; data.workers];
    for (session, _) in decoded {
        spare[data.sessions[*session].worker] += 1;
    }
    let Loaded { mut ranks, seconds } = load(data, Layers::Full, Ranks::OneEach, &spare);
    rates.store.push(data.held as f64 / seconds);

    // Sequences that run: each holds all of its session.
    let mut open = Vec::new();
    for session in &data.sessions {
        let rank = &mut ranks[session.worker];
        let (id, opened) = rank.create(&tokens(&session.blocks));
        rank.resume(id);
        open.push((id, opened.reused_tokens as usize));
    }
    let blocks: Vec<_> = decoded.iter().map(|(session, block)| (*session, tokens(&[*block]))).collect();
    let mut seconds = 0.0;
    on_cpu(&mut seconds, || {
        for (session, tokens) in &blocks {
            let (rank, (id, length)) = (&mut ranks[data.sessions[*session].worker], &mut open[*session]);
            *length += BLOCK_TOKENS as usize;
            rank.grow(*id, *length);
            rank.commit(*id, tokens);
        }
    });
    rates.decode.push(decoded.len() as f64 / seconds);
    for (session, (id, _)) in data.sessions.iter().zip(open) {
        ranks[session.worker].manager.close(id);
    }
    let (mut seconds, mut taken, mut gone) = (0.0, 0, 0);
    for rank in &mut ranks {
        let before = rank.manager.blocks();
        taken += on_cpu(&mut seconds, || rank.displace(before - before / 8));
        gone += before - rank.manager.blocks();
    }
    assert!(gone * 100 >= taken * 99, "{gone} blocks made room for {taken}");
    rates.evict.push(gone as f64 / seconds);
}

fn apply(tree: &mut RadixTree, events: Vec<RouterEvent>) {
    for event in events {
        tree.apply_event(event).expect("the peer takes it");
    }
}

fn dynamo(data: &Holdings, decoded: &[(usize, u64)], rates: &mut Rates) {
    let mut tree = RadixTree::new();
    let mut seconds = 0.0;
    for part in &data.stored {
        let events = stores(data, part);
        on_cpu(&mut seconds, || apply(&mut tree, events));
    }
    rates.store.push(data.held as f64 / seconds);

    let mut tails: Vec<Option<u64>> =
        data.sessions.iter().map(|session| chained(&session.blocks).last().copied()).collect();
    let mut events = Vec::new();
    for (session, block) in decoded {
        let tail = &mut tails[*session];
        let next = after(*tail, *block);
        events.push(event(data.sessions[*session].worker, stored(*tail, [(*block, next)].into_iter())));
        *tail = Some(next);
    }
    let mut seconds = 0.0;
    on_cpu(&mut seconds, || apply(&mut tree, events));
    rates.decode.push(decoded.len() as f64 / seconds);

    let (mut seconds, mut removed) = (0.0, 0);
    for part in &data.stored {
        let events = removals(data, part);
        removed += part.to - part.to.min(crate::inputs::PREFIX_BLOCKS);
        on_cpu(&mut seconds, || apply(&mut tree, events));
    }
    rates.evict.push(removed as f64 / seconds);
}

pub fn compare(data: &Holdings, rounds: usize, table: &mut Table) {
    let decoded = data.decoded(DECODED);
    let (mut ours, mut theirs) = (Rates::default(), Rates::default());
    let (mut hash, mut single) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        starling(data, &decoded, &mut ours);
        dynamo(data, &decoded, &mut theirs);
        let (stored, decoded) = hashing(data, &decoded);
        hash.push(stored);
        single.push(decoded);
    }
    let (hash, single) = (median(hash), median(single));
    let mut row = |name: &str, ours: f64, theirs: f64| table.compared(name, (ours / 1e6, theirs / 1e6), "1 at least");
    let (store, their_store) = (median(ours.store), median(theirs.store));
    row(&format!("store, {EVENT_BLOCKS} blocks a call, M blocks/s"), store, their_store);
    row("the same without hashing the tokens (the peer gets hashes)", 1.0 / (1.0 / store - hash), their_store);
    let (decode, their_decode) = (median(ours.decode), median(theirs.decode));
    row("decode, 1 block a call, M blocks/s", decode, their_decode);
    row("the same without hashing", 1.0 / (1.0 / decode - single), their_decode);
    row(&format!("evict, {EVENT_BLOCKS} blocks a call, M blocks/s"), median(ours.evict), median(theirs.evict));
    table.row(&["hashing a block of 64 tokens, ns".to_owned(), format!("{:.0}", hash * 1e9)]);
}
