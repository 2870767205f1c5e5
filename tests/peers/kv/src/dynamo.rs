//! The peer's indexes, driven by the events that its workers would send.

use crate::inputs::{EVENT_BLOCKS, Holdings, PREFIX_BLOCKS, Stored, chained};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use std::sync::Arc;
use std::thread::JoinHandle;

pub fn event(worker: usize, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker as u64, KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

pub fn stored(parent: Option<u64>, blocks: impl Iterator<Item = (u64, u64)>) -> KvCacheEventData {
    let block = |(local, chained)| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(chained),
        tokens_hash: LocalBlockHash(local),
        mm_extra_info: None,
    };
    KvCacheEventData::Stored(KvCacheStoreData {
        parent_hash: parent.map(ExternalSequenceBlockHash),
        start_position: None,
        blocks: blocks.map(block).collect(),
    })
}

pub fn removed(blocks: impl Iterator<Item = u64>) -> KvCacheEventData {
    KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: blocks.map(ExternalSequenceBlockHash).collect() })
}

/// Events that make a worker hold a part of a session.
pub fn stores(data: &Holdings, part: &Stored) -> Vec<RouterEvent> {
    let blocks = &data.sessions[part.session].blocks[..part.to];
    let chain = chained(blocks);
    let starts = (part.from..part.to).step_by(EVENT_BLOCKS);
    let store = |start: usize| {
        let range = start..(start + EVENT_BLOCKS).min(part.to);
        let parent = start.checked_sub(1).map(|before| chain[before]);
        event(part.worker, stored(parent, range.map(|at| (blocks[at], chain[at]))))
    };
    starts.map(store).collect()
}

/// Events that make a worker forget what a session has beyond its group's prefix, last block first.
pub fn removals(data: &Holdings, part: &Stored) -> Vec<RouterEvent> {
    let chain = chained(&data.sessions[part.session].blocks[..part.to]);
    let own: Vec<u64> = chain[PREFIX_BLOCKS.min(part.to)..].iter().rev().copied().collect();
    own.chunks(EVENT_BLOCKS).map(|chunk| event(part.worker, removed(chunk.iter().copied()))).collect()
}

pub fn total(scores: &OverlapScores) -> u64 {
    scores.scores.values().map(|score| u64::from(*score)).sum()
}

pub fn best(scores: &OverlapScores) -> u64 {
    scores.scores.values().copied().max().map_or(0, u64::from)
}

/// The concurrent tree with the thread that writes to it.
pub struct Concurrent {
    pub tree: Arc<ConcurrentRadixTreeCompressed>,
    events: flume::Sender<WorkerTask>,
    writer: JoinHandle<()>,
}

impl Concurrent {
    pub fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        // Few at a time, so that waiting events are no part of its memory.
        let (events, received) = flume::bounded(64);
        let writes = tree.clone();
        let writer = std::thread::spawn(move || writes.worker(received, None).expect("the peer's writer runs"));
        Self { tree, events, writer }
    }

    pub fn apply(&self, event: RouterEvent) {
        self.events.send(WorkerTask::Event(event)).expect("the peer's writer runs");
    }

    /// Waits until all events are applied.
    pub fn settle(&self) {
        let (resp, done) = tokio::sync::oneshot::channel();
        self.events.send(WorkerTask::Flush(resp)).expect("the peer's writer runs");
        done.blocking_recv().expect("the peer's writer answers");
    }

    pub fn stop(self) {
        drop(self.events);
        self.writer.join().expect("the peer's writer ends");
    }
}
