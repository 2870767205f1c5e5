//! What both sides get: sessions of blocks that workers hold, and prompts that begin like some of them.

use starling_core::ids::TokenId;
use std::collections::BTreeSet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub const BLOCK_TOKENS: u32 = 64;
/// Blocks of a store or remove event.
pub const EVENT_BLOCKS: usize = 32;
/// Leading blocks that the sessions of a group share.
pub const PREFIX_BLOCKS: usize = 64;
const GROUPS: u64 = 64;
const LENGTHS: [usize; 4] = [128, 256, 512, 1024];
/// New blocks of a next turn.
const TURN_BLOCKS: usize = 8;
const CHAIN_SEED: u64 = 1337;

pub struct SplitMix(pub u64);

impl SplitMix {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn blocks(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.next()).collect()
    }
}

pub struct Session {
    pub worker: usize,
    /// What the tokens of each block hash to for the peer.
    pub blocks: Vec<u64>,
}

/// Blocks of a session that a worker begins to hold.
#[derive(Clone, Copy)]
pub struct Stored {
    pub worker: usize,
    pub session: usize,
    pub from: usize,
    pub to: usize,
}

pub struct Holdings {
    pub workers: usize,
    pub groups: Vec<Vec<u64>>,
    pub sessions: Vec<Session>,
    pub stored: Vec<Stored>,
    /// Pairs of a worker and a block.
    pub held: usize,
}

impl Holdings {
    /// Until at least `target` blocks are held.
    pub fn new(target: usize, workers: usize) -> Self {
        let mut random = SplitMix(42);
        let groups: Vec<Vec<u64>> = (0..GROUPS).map(|_| random.blocks(PREFIX_BLOCKS)).collect();
        let mut data = Self { workers, groups, sessions: Vec::new(), stored: Vec::new(), held: 0 };
        let mut prefixes = BTreeSet::new();
        while data.held < target {
            let (session, worker) = (data.sessions.len(), data.sessions.len() % workers);
            let group = random.below(GROUPS) as usize;
            let length = LENGTHS[random.below(LENGTHS.len() as u64) as usize];
            let mut blocks = data.groups[group].clone();
            blocks.extend(random.blocks(length - PREFIX_BLOCKS));
            data.sessions.push(Session { worker, blocks });
            let mut store = |worker, to| {
                let from = if prefixes.insert((worker, group)) { 0 } else { PREFIX_BLOCKS };
                data.stored.extend((from < to).then_some(Stored { worker, session, from, to }));
                data.held += to - from;
            };
            store(worker, length);
            if random.below(4) == 0 {
                let other = (worker + 1 + random.below(workers as u64 - 1) as usize) % workers;
                store(other, length / 2);
            }
        }
        data
    }

    /// Each session makes way for another of its length. Each of a worker's groups keeps its prefix.
    pub fn replace(&mut self, round: u64) {
        let mut random = SplitMix(1000 + round);
        for session in &mut self.sessions {
            let fresh = random.blocks(session.blocks.len() - PREFIX_BLOCKS);
            session.blocks.truncate(PREFIX_BLOCKS);
            session.blocks.extend(fresh);
        }
    }

    /// Prompts: next turns, prompts that leave a session somewhere, and others.
    pub fn queries(&self, count: usize) -> Vec<Vec<u64>> {
        let mut random = SplitMix(43);
        let mut query = || {
            let session = &self.sessions[random.below(self.sessions.len() as u64) as usize].blocks;
            let length = session.len();
            match random.below(20) {
                0..9 => [session.clone(), random.blocks(TURN_BLOCKS)].concat(),
                9..18 => {
                    let cut = PREFIX_BLOCKS + random.below((length - PREFIX_BLOCKS) as u64) as usize;
                    [&session[..cut], &random.blocks(length - cut)].concat()
                }
                _ => random.blocks(length),
            }
        };
        (0..count).map(|_| query()).collect()
    }

    /// Blocks that sessions grow by, each with its session.
    pub fn decoded(&self, count: usize) -> Vec<(usize, u64)> {
        let mut random = SplitMix(44);
        (0..count).map(|_| (random.below(self.sessions.len() as u64) as usize, random.next())).collect()
    }
}

/// The peer's hash of a block and all before it.
pub fn after(parent: Option<u64>, block: u64) -> u64 {
    let Some(parent) = parent else { return block };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&block.to_le_bytes());
    xxh3_64_with_seed(&bytes, CHAIN_SEED)
}

pub fn chained(blocks: &[u64]) -> Vec<u64> {
    let mut last = None;
    let mut next = |block: &u64| {
        last = Some(after(last, *block));
        last
    };
    blocks.iter().filter_map(|block| next(block)).collect()
}

/// Tokens for blocks that the peer knows by a hash only.
pub fn tokens(blocks: &[u64]) -> Vec<TokenId> {
    let block = |seed: &u64| {
        let mut random = SplitMix(*seed);
        (0..BLOCK_TOKENS / 2).flat_map(move |_| {
            let both = random.next();
            [both as u32, (both >> 32) as u32]
        })
    };
    blocks.iter().flat_map(block).collect()
}
