//! The KV managers of ranks, driven as ranks drive them.

use crate::inputs::{BLOCK_TOKENS, EVENT_BLOCKS, Holdings, Stored, tokens};
use crate::measure::on_cpu;
use starling_core::ids::TokenId;
use starling_core::kv::cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use starling_core::kv::cache::{After, Config, Copy, Manager, Opened, SequenceId};
use starling_core::kv::identity::Scope;
use std::num::NonZeroU32;

pub const SCOPE: Scope = Scope { tenant: 1, adapter: None };
const CHUNK: usize = EVENT_BLOCKS * BLOCK_TOKENS as usize;
const WINDOW_TOKENS: u32 = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Layers {
    Full,
    /// Full attention and a sliding window.
    FullAndWindow,
}

fn some(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("not 0")
}

fn config(layers: Layers, slots: u32) -> Config {
    let required =
        |retention, group| LifeCycle { retention, policy: Policy::Required, group, priority: Priority::default() };
    let mut life_cycles = vec![required(Retention::Full, 0)];
    if layers == Layers::FullAndWindow {
        life_cycles.push(required(Retention::Window { tokens: some(WINDOW_TOKENS), sink_blocks: 0 }, 1));
    }
    let tiers = vec![vec![slots; life_cycles.len()]];
    Config { conversations_max: 1000, ..Config::new(some(BLOCK_TOKENS), life_cycles, tiers) }
}

pub struct Rank {
    pub manager: Manager,
    copies: Vec<Copy>,
    opened: u64,
}

impl Rank {
    pub fn new(layers: Layers, slots: usize) -> Self {
        let manager = Manager::new(config(layers, slots as u32)).expect("a valid configuration");
        Self { manager, copies: Vec::new(), opened: 0 }
    }

    pub fn create(&mut self, tokens: &[TokenId]) -> (SequenceId, Opened) {
        let id = SequenceId(self.opened);
        self.opened += 1;
        (id, self.manager.create(id, SCOPE, tokens, None).expect("the id is new"))
    }

    pub fn resume(&mut self, id: SequenceId) {
        assert!(self.manager.resume(id, &[], &mut self.copies).expect("it is suspended"), "the pool is too full");
    }

    /// Room for so many tokens, of which none is computed.
    pub fn grow(&mut self, id: SequenceId, capacity: usize) {
        let wanted = (Some(capacity as u32), None);
        assert!(self.manager.resize(id, wanted, &mut self.copies).expect("it is active"), "the pool is too full");
    }

    pub fn commit(&mut self, id: SequenceId, tokens: &[TokenId]) {
        self.manager.commit(id, tokens, After::GoesOn, &mut self.copies).expect("there is room");
    }

    /// A prompt's prefill, in chunks of as many blocks as an event of the peer's has.
    pub fn prefill(&mut self, prompt: &[TokenId]) {
        let (id, opened) = self.create(prompt);
        self.resume(id);
        let mut at = opened.reused_tokens as usize;
        while at < prompt.len() {
            let to = (at + CHUNK).min(prompt.len());
            self.grow(id, to);
            self.commit(id, &prompt[at..to]);
            at = to;
        }
        self.manager.close(id);
    }

    /// As many blocks as an event has are taken by a sequence again and again, so that others must go. Returns how many
    /// were taken.
    pub fn displace(&mut self, blocks: usize) -> usize {
        let (id, _) = self.create(&[]);
        self.resume(id);
        let mut taken = 0;
        while taken + EVENT_BLOCKS <= blocks {
            taken += EVENT_BLOCKS;
            self.grow(id, taken * BLOCK_TOKENS as usize);
        }
        self.manager.close(id);
        taken
    }
}

/// A rank for each worker; or one that holds what all of them do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ranks {
    OneEach,
    OneForAll,
}

pub struct Loaded {
    pub ranks: Vec<Rank>,
    /// CPU seconds of the managers' calls.
    pub seconds: f64,
}

/// Each worker's blocks are stored. There is room for these and as many blocks more as `spare` says.
pub fn load(data: &Holdings, layers: Layers, kind: Ranks, spare: &[usize]) -> Loaded {
    let at = |worker: usize| if kind == Ranks::OneEach { worker } else { 0 };
    let mut slots = vec![0; at(data.workers - 1) + 1];
    for Stored { worker, from, to, .. } in &data.stored {
        slots[at(*worker)] += to - from;
    }
    for (worker, spare) in spare.iter().enumerate() {
        slots[at(worker)] += spare;
    }
    let mut ranks: Vec<Rank> = slots.into_iter().map(|slots| Rank::new(layers, slots)).collect();
    let mut seconds = 0.0;
    for stored in &data.stored {
        let prompt = tokens(&data.sessions[stored.session].blocks[..stored.to]);
        on_cpu(&mut seconds, || ranks[at(stored.worker)].prefill(&prompt));
    }
    Loaded { ranks, seconds }
}
