//! A rank's KV manager: which blocks hold the KV of which tokens, who uses them, and what can be reused.
//!
//! Full attention on the device tier. Two operations look a prefix up, at two costs: [`Manager::probe`] estimates for
//! routing from truncated keys; [`Input::Reserve`] walks whole keys, compares tokens and pins what it hands out.
//! Only this machine reserves blocks, and nobody else's word counts on what is reusable.

pub mod cache;
mod check;
pub mod identity;
mod pages;
#[cfg(test)]
mod tests;
mod tree;

use crate::ids::{AttemptKey, BlockId, TokenId};
use identity::Scope;
use pages::Pages;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tree::{Lookup, NodeId, Tree};

/// The size of a rank's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub blocks: u32,
    pub block_tokens: u32,
}

impl Config {
    /// # Errors
    /// A pool without blocks, blocks without tokens, or more positions than a `u32` counts.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match *self {
            Self { blocks: 0, .. } => Err(ConfigError::NoBlocks),
            Self { block_tokens: 0, .. } => Err(ConfigError::NoBlockTokens),
            Self { blocks, block_tokens } if blocks.checked_mul(block_tokens).is_none() => {
                Err(ConfigError::TooLarge { blocks, block_tokens })
            }
            Self { .. } => Ok(()),
        }
    }
}

/// A pool that cannot hold anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("KV pool has no blocks (blocks 0)")]
    NoBlocks,
    #[error("KV blocks hold no tokens (block tokens 0)")]
    NoBlockTokens,
    #[error("KV pool of {blocks} blocks of {block_tokens} tokens has more positions than 32 bits count")]
    TooLarge { blocks: u32, block_tokens: u32 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// Match the longest reusable prefix, pin it and allocate the rest so that all `tokens` and one more fit.
    /// The last token is never reused: its logits are wanted. Answered by `Reserved` or `Exhausted`.
    Reserve { attempt: AttemptKey, scope: Scope, tokens: Vec<TokenId> },
    /// Make the attempt's blocks cover `tokens` positions in all. Answered by `Grown` or `Exhausted`.
    Grow { attempt: AttemptKey, tokens: u32 },
    /// `tokens` follow those known; the KV of the first `computed` positions is written. Full ones become reusable.
    Commit { attempt: AttemptKey, tokens: Vec<TokenId>, computed: u32 },
    /// Unpin everything: full computed blocks stay as reusable prefixes, the others are free.
    Release { attempt: AttemptKey },
    /// The device lost its contents: forget every attempt and every reusable block.
    Clear,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// `blocks` in order of position; the KV of the first `cached_tokens` positions is written already.
    Reserved {
        attempt: AttemptKey,
        blocks: Vec<BlockId>,
        cached_tokens: u32,
    },
    /// The blocks that were added, in order.
    Grown {
        attempt: AttemptKey,
        blocks: Vec<BlockId>,
    },
    /// Nothing was changed: `wanted` further blocks were needed, `available` could be had.
    Exhausted {
        attempt: AttemptKey,
        wanted: u32,
        available: u32,
    },
    /// `blocks` more can be had than before.
    Freed {
        blocks: u32,
    },
    Ignored {
        attempt: AttemptKey,
        why: Ignored,
    },
}

/// Why an input had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ignored {
    /// The attempt holds a reservation already.
    DuplicateReserve,
    EmptyReserve,
    UnknownGrow,
    UnknownCommit,
    UnknownRelease,
    /// `computed` went back, or beyond the tokens or blocks of the attempt.
    BadCommit,
}

/// Blocks of the pool by state, and what reuse brought so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    pub blocks_total: u32,
    pub blocks_free: u32,
    /// Hold a reusable prefix that nobody uses: evictable.
    pub blocks_reusable: u32,
    /// Used by at least one attempt.
    pub blocks_held: u32,
    pub attempts: u32,
    /// Tokens of successful reservations, and how many of them were reused.
    pub query_tokens: u64,
    pub hit_tokens: u64,
    /// Blocks that were looked up by their key, because comparing tokens with the newest child did not find them.
    pub keyed_blocks: u64,
    pub evicted_blocks: u64,
    pub exhausted: u64,
    pub ignored: u64,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant {id} does not hold: {what}")]
pub struct Violation {
    pub id: &'static str,
    pub what: String,
}

impl Violation {
    pub(crate) fn new(id: &'static str, what: String) -> Self {
        Self { id, what }
    }
}

/// What one attempt holds.
#[derive(Clone, Debug)]
struct Held {
    scope: Scope,
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    /// The tree's nodes for the leading blocks, each pinned. Where another attempt published the same block first, the
    /// node names that one's block while it is read, and `blocks` keeps the private copy: a running attempt's table
    /// never changes.
    path: Vec<NodeId>,
    computed: u32,
    /// Cleared when a block met a collision of truncated keys: nothing after it can be published.
    publishes: bool,
}

/// The KV manager of one rank.
///
/// Invariants, besides those of the pool (P) and the tree (T): (K1) free + reusable + held = total; (K2) a block's pins
/// are the attempts that use it; (K3) a cached block is named by one node, an uncached pinned one by one attempt;
/// (K4) an attempt's blocks cover what it computed, and its path only full computed blocks.
#[derive(Clone, Debug)]
pub struct Manager {
    config: Config,
    pages: Pages,
    tree: Tree,
    attempts: BTreeMap<AttemptKey, Held>,
    /// Counts releases: the order of eviction follows it, not the clock.
    uses: u64,
    query_tokens: u64,
    hit_tokens: u64,
    keyed_blocks: u64,
    evicted_blocks: u64,
    exhausted: u64,
    ignored: u64,
}

impl Manager {
    /// # Errors
    /// As [`Config::validate`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            pages: Pages::new(config.blocks),
            tree: Tree::default(),
            attempts: BTreeMap::new(),
            uses: 0,
            query_tokens: 0,
            hit_tokens: 0,
            keyed_blocks: 0,
            evicted_blocks: 0,
            exhausted: 0,
            ignored: 0,
        })
    }

    /// Takes one input and appends what follows from it. Total: what makes no sense is `Ignored`.
    pub fn handle(&mut self, _now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Reserve { attempt, scope, tokens } => self.reserve(attempt, scope, tokens, out),
            Input::Grow { attempt, tokens } => self.grow(attempt, tokens, out),
            Input::Commit { attempt, tokens, computed } => self.commit(attempt, tokens, computed, out),
            Input::Release { attempt } => self.release(attempt, out),
            Input::Clear => self.clear(out),
        }
    }

    /// Tokens of reusable prefix for a chain of truncated keys (`identity::truncated_chain`): an estimate for routing.
    /// It pins nothing, compares no tokens and counts a last block that a reservation would compute again.
    ///
    /// # Cost
    /// A logarithmic number of hash look-ups.
    pub fn probe(&self, chain: &[u64]) -> u32 {
        self.tree.probe(chain) as u32 * self.config.block_tokens
    }

    /// How many attempts use the block, and whether others may find it.
    #[cfg(test)]
    pub(crate) fn block_state(&self, block: BlockId) -> (u32, bool) {
        (self.pages.pins(block), self.pages.is_cached(block))
    }

    pub fn config(&self) -> Config {
        self.config
    }

    pub fn stats(&self) -> Stats {
        Stats {
            blocks_total: self.pages.total(),
            blocks_free: self.pages.free(),
            blocks_reusable: self.pages.reusable(),
            blocks_held: self.pages.total() - self.pages.available(),
            attempts: self.attempts.len() as u32,
            query_tokens: self.query_tokens,
            hit_tokens: self.hit_tokens,
            keyed_blocks: self.keyed_blocks,
            evicted_blocks: self.evicted_blocks,
            exhausted: self.exhausted,
            ignored: self.ignored,
        }
    }

    fn reserve(&mut self, attempt: AttemptKey, scope: Scope, tokens: Vec<TokenId>, out: &mut Vec<Effect>) {
        if self.attempts.contains_key(&attempt) {
            return self.ignore(attempt, Ignored::DuplicateReserve, out);
        }
        if tokens.is_empty() {
            return self.ignore(attempt, Ignored::EmptyReserve, out);
        }
        let path = self.matched(&scope, &tokens);
        // The hits are pinned before anything is allocated, so that making room cannot evict them.
        for &id in &path {
            self.pin(id);
        }
        let wanted =
            ((tokens.len() as u64 + 1).div_ceil(u64::from(self.config.block_tokens)) - path.len() as u64) as u32;
        let Some(fresh) = self.allocate(wanted) else {
            self.exhaust(attempt, wanted, out);
            for &id in path.iter().rev() {
                self.unpin(id, None);
            }
            return;
        };
        let cached_tokens = path.len() as u32 * self.config.block_tokens;
        self.query_tokens += tokens.len() as u64;
        self.hit_tokens += u64::from(cached_tokens);
        let mut blocks: Vec<BlockId> = path.iter().map(|&id| self.tree.block(id)).collect();
        blocks.extend(fresh);
        let held = Held { scope, tokens, blocks: blocks.clone(), path, computed: cached_tokens, publishes: true };
        self.attempts.insert(attempt, held);
        out.push(Effect::Reserved { attempt, blocks, cached_tokens });
    }

    fn grow(&mut self, attempt: AttemptKey, tokens: u32, out: &mut Vec<Effect>) {
        let Some(held) = self.attempts.get(&attempt) else {
            return self.ignore(attempt, Ignored::UnknownGrow, out);
        };
        let wanted = tokens.div_ceil(self.config.block_tokens).saturating_sub(held.blocks.len() as u32);
        let Some(blocks) = self.allocate(wanted) else {
            return self.exhaust(attempt, wanted, out);
        };
        if let Some(held) = self.attempts.get_mut(&attempt) {
            held.blocks.extend(&blocks);
        }
        out.push(Effect::Grown { attempt, blocks });
    }

    fn commit(&mut self, attempt: AttemptKey, tokens: Vec<TokenId>, computed: u32, out: &mut Vec<Effect>) {
        let Some(mut held) = self.attempts.remove(&attempt) else {
            return self.ignore(attempt, Ignored::UnknownCommit, out);
        };
        let covered = held.blocks.len() as u64 * u64::from(self.config.block_tokens);
        let known = (held.tokens.len() + tokens.len()) as u64;
        if computed < held.computed || u64::from(computed) > covered.min(known) {
            self.attempts.insert(attempt, held);
            return self.ignore(attempt, Ignored::BadCommit, out);
        }
        held.tokens.extend(tokens);
        held.computed = computed;
        self.publish(&mut held);
        self.attempts.insert(attempt, held);
    }

    fn release(&mut self, attempt: AttemptKey, out: &mut Vec<Effect>) {
        let Some(held) = self.attempts.remove(&attempt) else {
            return self.ignore(attempt, Ignored::UnknownRelease, out);
        };
        let before = self.pages.available();
        self.uses += 1;
        let private: Vec<BlockId> = self.private(&held).collect();
        for block in private.into_iter().rev() {
            self.pages.unpin(block);
        }
        for (at, &id) in held.path.iter().enumerate().rev() {
            let block = self.tree.block(id);
            if held.blocks[at] != block {
                self.pages.remove_copy(block);
            }
            self.unpin(id, Some(self.uses));
            if self.pages.is_only_copied(block) {
                let mut others = self.attempts.values();
                let heir = others.find(|other| other.path.get(at) == Some(&id));
                self.adopt_if_unread(id, heir.expect("who pins it is held (K2)").blocks[at]);
            }
        }
        let blocks = self.pages.available() - before;
        if blocks > 0 {
            out.push(Effect::Freed { blocks });
        }
    }

    fn clear(&mut self, out: &mut Vec<Effect>) {
        let blocks = self.pages.total() - self.pages.available();
        self.attempts.clear();
        self.tree = Tree::default();
        self.pages = Pages::new(self.config.blocks);
        if blocks > 0 {
            out.push(Effect::Freed { blocks });
        }
    }

    /// Nodes of the longest reusable prefix that leaves at least one token to compute.
    ///
    /// # Cost
    /// Tokens are compared; a block is hashed only where it is not the newest child of the one before.
    fn matched(&mut self, scope: &Scope, tokens: &[TokenId]) -> Vec<NodeId> {
        let block_tokens = self.config.block_tokens as usize;
        let mut path: Vec<NodeId> = Vec::new();
        for block in tokens[..tokens.len() - 1].chunks_exact(block_tokens) {
            let parent = path.last().copied();
            let newest = parent.and_then(|parent| self.tree.newest_child(parent, block));
            let Some(id) = newest.or_else(|| self.child(parent, scope, block)) else { break };
            path.push(id);
        }
        path
    }

    /// The block of `tokens` under `parent`, by its key.
    fn child(&mut self, parent: Option<NodeId>, scope: &Scope, tokens: &[TokenId]) -> Option<NodeId> {
        self.keyed_blocks += 1;
        let key = parent.map_or_else(|| scope.root(), |id| self.tree.key(id)).child(tokens);
        match self.tree.find(parent, &key, tokens) {
            Lookup::Found(id) => Some(id),
            Lookup::Absent | Lookup::Occupied => None,
        }
    }

    /// Puts the attempt's newly full and computed blocks into the tree.
    fn publish(&mut self, held: &mut Held) {
        let block_tokens = self.config.block_tokens as usize;
        let full = held.computed as usize / block_tokens;
        while held.publishes && held.path.len() < full {
            let at = held.path.len();
            let parent = held.path.last().copied();
            let tokens = &held.tokens[at * block_tokens..(at + 1) * block_tokens];
            let key = parent.map_or_else(|| held.scope.root(), |id| self.tree.key(id)).child(tokens);
            match self.tree.find(parent, &key, tokens) {
                Lookup::Found(id) => {
                    self.pin(id);
                    self.pages.add_copy(self.tree.block(id));
                    self.adopt_if_unread(id, held.blocks[at]);
                    held.path.push(id);
                }
                Lookup::Absent => {
                    self.pages.cache(held.blocks[at]);
                    held.path.push(self.tree.insert(parent, key, tokens, held.blocks[at]));
                }
                Lookup::Occupied => held.publishes = false,
            }
        }
    }

    /// Where all who pin a node keep copies, one of these becomes the node's block: an attempt that runs alone holds no
    /// more than its own table, so a planner can count on what fits.
    fn adopt_if_unread(&mut self, id: NodeId, copy: BlockId) {
        let block = self.tree.block(id);
        if self.pages.is_only_copied(block) {
            self.pages.replace(block, copy);
            self.tree.replace_block(id, copy);
        }
    }

    /// Blocks that only this attempt uses and no node names.
    fn private<'a>(&'a self, held: &'a Held) -> impl Iterator<Item = BlockId> + 'a {
        let shared = |at: usize, block| held.path.get(at).is_some_and(|&id| self.tree.block(id) == block);
        held.blocks.iter().copied().enumerate().filter(move |&(at, block)| !shared(at, block)).map(|(_, block)| block)
    }

    fn pin(&mut self, id: NodeId) {
        self.pages.pin(self.tree.block(id));
        self.tree.keep(id);
    }

    fn unpin(&mut self, id: NodeId, last_use: Option<u64>) {
        let block = self.tree.block(id);
        self.pages.unpin(block);
        if self.pages.pins(block) == 0 {
            self.tree.let_go(id, last_use);
        } else if let Some(last_use) = last_use {
            self.tree.touch(id, last_use);
        }
    }

    /// `wanted` pinned blocks, or none at all. Evicts the prefixes that were used longest ago.
    fn allocate(&mut self, wanted: u32) -> Option<Vec<BlockId>> {
        if wanted > self.pages.available() {
            return None;
        }
        let mut blocks = Vec::with_capacity(wanted as usize);
        while blocks.len() < wanted as usize {
            if let Some(block) = self.pages.take() {
                blocks.push(block);
                continue;
            }
            let evicted = self.tree.evict(|block| self.pages.pins(block) == 0);
            self.pages.evict(evicted.expect("every reusable block is a leaf's or below it (T3, T4)"));
            self.evicted_blocks += 1;
        }
        Some(blocks)
    }

    fn exhaust(&mut self, attempt: AttemptKey, wanted: u32, out: &mut Vec<Effect>) {
        self.exhausted += 1;
        out.push(Effect::Exhausted { attempt, wanted, available: self.pages.available() });
    }

    fn ignore(&mut self, attempt: AttemptKey, why: Ignored, out: &mut Vec<Effect>) {
        self.ignored += 1;
        out.push(Effect::Ignored { attempt, why });
    }
}
