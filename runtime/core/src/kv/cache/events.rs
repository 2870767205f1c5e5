//! What changed in the tree, for those who keep a picture of it: which blocks are stored where, and where a request can
//! resume.
//!
//! A block is spoken of once its page of a life cycle covers all of it: blocks that are not full never are. Keys are whole
//! and cover the scope, and every event names the scope's root key, so tenants cannot be mixed up. Stored blocks that
//! follow each other are one event, and so are removals that nothing came between. The log is bounded: what is lost is the
//! oldest, and numbers without holes let a reader see it. It then asks for a [`Snapshot`] and goes on from there.
//!
//! What an end point is, is said in `ends`.

use super::Manager;
use super::config::Config;
use super::ends::Name;
use super::pages::PageId;
use super::store::Store;
use super::tree::NodeId;
use crate::kv::identity::BlockKey;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// How much is kept for readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventLimits {
    /// Events that are kept; beyond them the oldest are lost.
    pub events_max: u32,
    /// Keys in one event.
    pub keys_max: u32,
}

/// Keys are chained: `scope` is the key that the first block of the scope hangs from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// These blocks of `tokens` tokens each, the first below `parent` and each below the one before it, have a page.
    Stored {
        scope: BlockKey,
        life_cycle: u8,
        tier: u8,
        parent: BlockKey,
        tokens: u32,
        blocks: Vec<BlockKey>,
    },
    Removed {
        scope: BlockKey,
        life_cycle: u8,
        blocks: Vec<BlockKey>,
    },
    /// The block's page moved.
    Updated {
        scope: BlockKey,
        life_cycle: u8,
        block: BlockKey,
        from: u8,
        to: u8,
    },
    /// A request can resume after `length` tokens, the last of which are the block `key` below the full block `parent`.
    EndPointAdded {
        scope: BlockKey,
        parent: BlockKey,
        key: BlockKey,
        length: u32,
    },
    EndPointRemoved {
        scope: BlockKey,
        parent: BlockKey,
        key: BlockKey,
        length: u32,
    },
    /// Everything is gone.
    Cleared,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbered {
    /// From 1 on, without holes.
    pub sequence: u64,
    pub event: Event,
}

/// Events were lost: ask for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("KV events from {wanted} on are wanted, the next one there is {next}")]
pub struct Gap {
    pub wanted: u64,
    pub next: u64,
}

/// Everything that is there, as the events that lead to it from nothing. The next event is the one after `sequence`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub sequence: u64,
    pub events: Vec<Event>,
}

/// What is open is either stored blocks, one run a life cycle, or removed ones: an event of the other kind closes it.
#[derive(Clone, Debug)]
pub(super) struct Log {
    limits: Option<EventLimits>,
    kept: VecDeque<Numbered>,
    open: Vec<Event>,
    sequence: u64,
}

impl Log {
    pub fn new(config: &Config) -> Self {
        Self { limits: config.events, kept: VecDeque::new(), open: Vec::new(), sequence: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.limits.is_some()
    }

    /// One that keeps everything, for a snapshot.
    fn unbounded(keys_max: u32) -> Self {
        let limits = Some(EventLimits { events_max: u32::MAX, keys_max });
        Self { limits, kept: VecDeque::new(), open: Vec::new(), sequence: 0 }
    }

    fn keys_max(&self) -> usize {
        self.limits.map_or(1, |limits| limits.keys_max.max(1)) as usize
    }

    pub fn push(&mut self, event: Event) {
        if self.is_on() {
            self.flush();
            self.keep(event);
        }
    }

    pub fn cleared(&mut self) {
        self.push(Event::Cleared);
    }

    fn keep(&mut self, event: Event) {
        self.sequence += 1;
        self.kept.push_back(Numbered { sequence: self.sequence, event });
        let events_max = self.limits.map_or(0, |limits| limits.events_max) as usize;
        while self.kept.len() > events_max {
            self.kept.pop_front();
        }
    }

    fn flush(&mut self) {
        for event in std::mem::take(&mut self.open) {
            self.keep(event);
        }
    }

    /// Closes what is open, unless it is of the kind that comes.
    fn close_others(&mut self, is_kind: fn(&Event) -> bool) {
        if self.open.iter().any(|event| !is_kind(event)) {
            self.flush();
        }
    }

    fn stored(&mut self, new: Run) {
        self.close_others(|event| matches!(event, Event::Stored { .. }));
        let keys_max = self.keys_max();
        let goes_on = self.open.iter_mut().find_map(|event| match event {
            Event::Stored { life_cycle, tier, blocks, .. } => {
                let follows = blocks.last() == Some(&new.parent) && blocks.len() < keys_max;
                ((*life_cycle, *tier) == (new.life_cycle, new.tier) && follows).then_some(blocks)
            }
            _ => None,
        });
        match goes_on {
            Some(blocks) => blocks.push(new.block),
            None => {
                let Run { scope, life_cycle, tier, parent, tokens, block } = new;
                // One run a life cycle is enough to follow one chain; the other chain's is over.
                if self
                    .open
                    .iter()
                    .any(|event| matches!(event, Event::Stored { life_cycle: open, .. } if *open == life_cycle))
                {
                    self.flush();
                }
                self.open.push(Event::Stored { scope, life_cycle, tier, parent, tokens, blocks: vec![block] });
            }
        }
    }

    fn removed(&mut self, scope: BlockKey, life_cycle: u8, block: BlockKey) {
        self.close_others(|event| matches!(event, Event::Removed { .. }));
        let keys_max = self.keys_max();
        let batch = self.open.iter_mut().find_map(|event| match event {
            Event::Removed { scope: batched, life_cycle: of, blocks } => {
                ((*batched, *of) == (scope, life_cycle) && blocks.len() < keys_max).then_some(blocks)
            }
            _ => None,
        });
        match batch {
            Some(blocks) => blocks.push(block),
            None => {
                if self.open.len() >= OPEN_MAX {
                    self.flush();
                }
                self.open.push(Event::Removed { scope, life_cycle, blocks: vec![block] });
            }
        }
    }
}

/// Batches of removals that are open at a time, one for each scope and life cycle.
const OPEN_MAX: usize = 16;

/// A block that is stored.
struct Run {
    scope: BlockKey,
    life_cycle: u8,
    tier: u8,
    parent: BlockKey,
    tokens: u32,
    block: BlockKey,
}

impl Store {
    /// The node whose block the page covers wholly, if that is a full one.
    fn whole(&self, page: PageId) -> Option<NodeId> {
        let full = self.block_tokens();
        let page = self.pages.get(page);
        page.node.filter(|node| page.covered == full && self.tree.tokens(*node).len() as u32 == full)
    }

    fn run(&self, node: NodeId, page: PageId) -> Option<Run> {
        let parent = self.tree.parent(node)?;
        let page = self.pages.get(page);
        Some(Run {
            scope: self.tree.scope_key(node),
            life_cycle: page.life_cycle,
            tier: page.place.tier,
            parent: self.tree.key(parent),
            tokens: self.block_tokens(),
            block: self.tree.key(node),
        })
    }

    pub fn log_stored(&mut self, page: PageId) {
        if !self.log.is_on() {
            return;
        }
        let run = self.whole(page).and_then(|node| self.run(node, page));
        if let Some(run) = run {
            self.log.stored(run);
        }
    }

    /// Before the tree forgets the page.
    pub fn log_removed(&mut self, page: PageId) {
        if !self.log.is_on() {
            return;
        }
        if let Some(node) = self.whole(page) {
            let life_cycle = self.pages.get(page).life_cycle;
            self.log.removed(self.tree.scope_key(node), life_cycle, self.tree.key(node));
        }
    }

    pub fn log_moved(&mut self, page: PageId, from: u8) {
        if !self.log.is_on() {
            return;
        }
        if let Some(node) = self.whole(page) {
            let (life_cycle, to) = (self.pages.get(page).life_cycle, self.pages.get(page).place.tier);
            let (scope, block) = (self.tree.scope_key(node), self.tree.key(node));
            self.log.push(Event::Updated { scope, life_cycle, block, from, to });
        }
    }

    /// From the tree alone, whatever was logged.
    fn state(&self) -> Vec<Event> {
        let mut log = Log::unbounded(self.log.keys_max() as u32);
        let mut open: Vec<NodeId> = self.tree.scope_roots().collect();
        while let Some(node) = open.pop() {
            for page in self.tree.links(node).iter().flatten() {
                if let Some(run) = self.whole(*page).and_then(|node| self.run(node, *page)) {
                    log.stored(run);
                }
            }
            open.extend(self.tree.children(node));
        }
        for Name { scope, parent, key, length } in self.ends.names() {
            log.push(Event::EndPointAdded { scope, parent, key, length });
        }
        log.flush();
        log.kept.into_iter().map(|numbered| numbered.event).collect()
    }
}

impl Manager {
    /// The events after that number; 0 asks for all. Where nothing is logged there are none.
    ///
    /// # Errors
    /// Some of them are lost, or the number is of another log.
    pub fn events_after(&mut self, sequence: u64) -> Result<&[Numbered], Gap> {
        let log = &mut self.store.log;
        log.flush();
        let next = log.sequence + 1 - log.kept.len() as u64;
        let wanted = sequence.saturating_add(1);
        if wanted < next || sequence > log.sequence {
            return Err(Gap { wanted, next });
        }
        Ok(&log.kept.make_contiguous()[(wanted - next) as usize..])
    }

    /// All that is stored, and the end points.
    ///
    /// # Cost
    /// All blocks.
    pub fn snapshot(&mut self) -> Snapshot {
        self.store.log.flush();
        Snapshot { sequence: self.store.log.sequence, events: self.store.state() }
    }
}
