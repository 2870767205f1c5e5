//! A picture of another rank's tree, built from its events: what a reader outside the rank knows of its blocks.
//!
//! Events are applied in the order of their numbers. One that is missing is seen at once, and the picture stays as it is
//! until a snapshot repairs it. So a reader that starts anew needs no parent that it never heard of.

use super::events::{Event, Gap, Numbered, Snapshot};
use super::lifecycle::LifeCycle;
use super::reuse::{Coverage, Match};
use crate::ids::TokenId;
use crate::kv::identity::{BlockKey, Scope, chain};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// Where the pages of a full block lie, by life cycle.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    scope: BlockKey,
    parent: BlockKey,
    tiers: Vec<Option<u8>>,
}

/// Invariant: no block is without a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    block_tokens: NonZeroU32,
    life_cycles: Vec<LifeCycle>,
    sequence: u64,
    blocks: BTreeMap<BlockKey, Held>,
    /// Lengths by the key of the full block before the last one, and the last one's own key.
    ends: BTreeMap<(BlockKey, BlockKey), u32>,
}

impl Mirror {
    /// Of a rank that nothing is known of. Its first event is number 1.
    pub fn new(block_tokens: NonZeroU32, life_cycles: &[LifeCycle]) -> Self {
        Self {
            block_tokens,
            life_cycles: life_cycles.to_vec(),
            sequence: 0,
            blocks: BTreeMap::new(),
            ends: BTreeMap::new(),
        }
    }

    /// The last event that it knows of.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub fn end_points(&self) -> usize {
        self.ends.len()
    }

    /// Replaces everything.
    pub fn repair(&mut self, snapshot: &Snapshot) {
        self.apply_event(&Event::Cleared);
        for event in &snapshot.events {
            self.apply_event(event);
        }
        self.sequence = snapshot.sequence;
    }

    /// Applies an event; one that was applied before is passed over.
    ///
    /// # Errors
    /// It is not the next one: nothing is changed.
    pub fn apply(&mut self, numbered: &Numbered) -> Result<(), Gap> {
        let wanted = self.sequence + 1;
        if numbered.sequence > wanted {
            return Err(Gap { wanted, next: numbered.sequence });
        }
        if numbered.sequence == wanted {
            self.apply_event(&numbered.event);
            self.sequence = wanted;
        }
        Ok(())
    }

    fn apply_event(&mut self, event: &Event) {
        match event {
            Event::Stored { scope, life_cycle, tier, parent, blocks, .. } => {
                let mut before = *parent;
                for key in blocks {
                    let tiers = vec![None; self.life_cycles.len()];
                    let held = self.blocks.entry(*key).or_insert(Held { scope: *scope, parent: before, tiers });
                    if let Some(at) = held.tiers.get_mut(usize::from(*life_cycle)) {
                        *at = Some(*tier);
                    }
                    before = *key;
                }
            }
            Event::Removed { life_cycle, blocks, .. } => {
                for key in blocks {
                    self.remove(*key, *life_cycle);
                }
            }
            Event::Updated { life_cycle, block, to, .. } => {
                let held = self.blocks.get_mut(block).and_then(|held| held.tiers.get_mut(usize::from(*life_cycle)));
                if let Some(Some(tier)) = held {
                    *tier = *to;
                }
            }
            Event::EndPointAdded { parent, key, length, .. } => {
                self.ends.insert((*parent, *key), *length);
            }
            Event::EndPointRemoved { parent, key, .. } => {
                self.ends.remove(&(*parent, *key));
            }
            Event::Cleared => {
                self.blocks.clear();
                self.ends.clear();
            }
        }
    }

    fn remove(&mut self, key: BlockKey, life_cycle: u8) {
        let Some(held) = self.blocks.get_mut(&key) else { return };
        if let Some(at) = held.tiers.get_mut(usize::from(life_cycle)) {
            *at = None;
        }
        if held.tiers.iter().all(Option::is_none) {
            self.blocks.remove(&key);
        }
    }

    /// The tier of each life cycle's page of a block, if it is held.
    pub fn tiers(&self, block: &BlockKey) -> Option<&[Option<u8>]> {
        self.blocks.get(block).map(|held| &held.tiers[..])
    }

    /// Leading blocks of a chain that a life cycle holds down to a tier.
    pub fn leading(&self, chain: &[BlockKey], life_cycle: u8, tier_max: u8) -> usize {
        let is_held = |key: &&BlockKey| {
            let tier = self.tiers(key).and_then(|tiers| tiers.get(usize::from(life_cycle)).copied().flatten());
            tier.is_some_and(|tier| tier <= tier_max)
        };
        chain.iter().take_while(is_held).count()
    }

    /// Tokens that a request could resume after, as far as whole blocks and end points tell: at most what the rank would
    /// say, and exactly that where prefixes are reused whole blocks at a time.
    pub fn reusable(&self, scope: &Scope, tokens: &[TokenId]) -> u32 {
        let chain = chain(scope, tokens, self.block_tokens.get());
        // Blocks without a page may lie before one that has some.
        let matched = chain.iter().rposition(|key| self.blocks.contains_key(key)).map_or(0, |last| last + 1);
        let on_chain = OnChain { mirror: self, chain: &chain[..matched] };
        let (block_tokens, life_cycles) = (self.block_tokens, &self.life_cycles[..]);
        let tokens_max = (matched as u32).saturating_mul(block_tokens.get());
        let whole = Match { block_tokens, life_cycles, tokens: tokens_max }.reusable(&on_chain);
        whole.max(self.end_point(scope, tokens, &chain))
    }

    /// The longest end point that the tokens begin with, or 0. `chain` has the keys of their full blocks.
    pub fn end_point(&self, scope: &Scope, tokens: &[TokenId], chain: &[BlockKey]) -> u32 {
        let block_tokens = self.block_tokens.get() as usize;
        let parents = std::iter::once(scope.root()).chain(chain.iter().copied());
        let mut longest = 0;
        for (parent, rest) in parents.zip((0..).map(|block| tokens.get(block * block_tokens..).unwrap_or_default())) {
            let bounds = (parent, BlockKey([0; 32]))..=(parent, BlockKey([0xff; 32]));
            for ((_, key), length) in self.ends.range(bounds) {
                let last = (*length as usize - 1) % block_tokens + 1;
                if rest.get(..last).is_some_and(|last| parent.child(last) == *key) {
                    longest = longest.max(*length);
                }
            }
        }
        longest
    }
}

/// Full blocks of a chain, as `reuse` sees them.
struct OnChain<'a> {
    mirror: &'a Mirror,
    chain: &'a [BlockKey],
}

impl Coverage for OnChain<'_> {
    fn covered(&self, life_cycle: usize, block: u32) -> u32 {
        let tiers = self.chain.get(block as usize).and_then(|key| self.mirror.tiers(key));
        let tier = tiers.and_then(|tiers| tiers.get(life_cycle).copied().flatten());
        tier.map_or(0, |_| self.mirror.block_tokens.get())
    }
}
