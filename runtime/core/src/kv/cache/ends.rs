//! End points: the lengths at which a later request can resume, each known as a whole.
//!
//! A block ends a prefix if a length inside it, or at its end, is reusable: every required life cycle has all pages that
//! are live there. Its end point is the longest such length. Where any block of a path would do, only the last one is
//! worth a word: a length at a block's end is an end point if no block right below it ends a prefix. So a path of full
//! attention has one end point, its last block, which moves up as blocks are evicted; a window has one for each run of
//! pages that is long enough. Who knows which full blocks have whole pages knows the lengths in between; one inside a
//! block he cannot know, so it always is an end point. Snapshots of recurrent layers are not made at every block, and each
//! is an end point.
//!
//! End points are tracked only where somebody wants them. They are few, so they lie in a table beside the tree. What is
//! touched is examined again when the operation is over; a block that goes takes its end point along at once.

use super::Violation;
use super::config::{Config, Eviction};
use super::events::Event;
use super::lifecycle::{LifeCycle, Retention};
use super::store::{Path, Store};
use super::tree::{NodeId, NodeRef};
use crate::kv::identity::BlockKey;
use std::collections::{BTreeMap, BTreeSet};

/// What others call an end point: the keys of its scope, of the full block before its last one, and of its last block as
/// far as it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub scope: BlockKey,
    pub parent: BlockKey,
    pub key: BlockKey,
    pub length: u32,
}

/// An end point, with its name where others are told of it.
#[derive(Clone, Copy, Debug)]
struct End {
    length: u32,
    name: Option<Name>,
}

/// What happened to a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Touched {
    Block,
    /// More or fewer prefixes end behind it.
    Count,
    /// It has a page of a life cycle, or another one.
    Gained(u8),
    Lost(u8),
}

/// Invariant (E1): where end points are tracked, these are those of the tree, by the definition above.
#[derive(Clone, Debug)]
pub(super) struct EndPoints {
    tracked: bool,
    /// Others are told.
    named: bool,
    /// Every block that ends a prefix is one.
    every: bool,
    at: BTreeMap<NodeId, End>,
    touched: Vec<(NodeRef, Touched)>,
}

impl EndPoints {
    pub fn new(config: &Config) -> Self {
        Self {
            tracked: config.events.is_some() || config.eviction == Eviction::EndPoints,
            named: config.events.is_some(),
            every: config.life_cycles.iter().any(LifeCycle::is_state),
            at: BTreeMap::new(),
            touched: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.at.len()
    }

    pub fn bytes(&self) -> usize {
        self.at.len() * size_of::<(NodeId, End)>()
    }

    pub fn names(&self) -> impl Iterator<Item = Name> {
        self.at.values().filter_map(|end| end.name)
    }

    pub fn has(&self, node: NodeId) -> bool {
        self.at.contains_key(&node)
    }

    pub fn length(&self, node: NodeId) -> Option<u32> {
        self.at.get(&node).map(|end| end.length)
    }
}

impl Store {
    /// A block changed: its end point is examined when the operation is over.
    pub fn touched(&mut self, node: NodeId, how: Touched) {
        if self.ends.tracked {
            self.ends.touched.push((self.tree.reference(node), how));
        }
    }

    /// A block is about to leave the tree.
    pub fn leaves(&mut self, node: NodeId) {
        if !self.ends.tracked {
            return;
        }
        self.forget_end(node);
        self.uncount(node);
        if let Some(parent) = self.tree.parent(node) {
            self.touched(parent, Touched::Block);
        }
    }

    /// Whether the block's end point counts may have changed.
    pub fn reconsider(&mut self, node: NodeId) {
        self.ends.touched.push((self.tree.reference(node), Touched::Count));
    }

    /// Examines what was touched.
    pub fn settle(&mut self) {
        let mut reconsidered = BTreeSet::new();
        while !self.ends.touched.is_empty() {
            let mut nodes = BTreeSet::new();
            for (reference, how) in std::mem::take(&mut self.ends.touched) {
                let Some(node) = self.tree.resolve(reference) else { continue };
                reconsidered.insert(node);
                if let Touched::Count = how {
                    continue;
                }
                nodes.insert(node);
                nodes.extend(self.tree.parent(node));
                match how {
                    Touched::Block | Touched::Count => {}
                    Touched::Gained(life_cycle) => self.within_reach(node, life_cycle, &mut nodes, |_| true),
                    // Nothing below becomes an end point by a loss.
                    Touched::Lost(life_cycle) => {
                        self.within_reach(node, life_cycle, &mut nodes, |below| self.is_known_end(below));
                    }
                }
            }
            for &node in &nodes {
                self.examine(node);
            }
            reconsidered.append(&mut nodes);
        }
        self.weigh(&reconsidered);
    }

    fn is_known_end(&self, node: NodeId) -> bool {
        self.ends.has(node) || self.worth.as_ref().is_some_and(|worth| worth.counts(node))
    }

    /// Blocks below whose windows may reach back to the node: those with pages all the way down from it.
    fn within_reach(
        &self,
        node: NodeId,
        life_cycle: u8,
        found: &mut BTreeSet<NodeId>,
        wanted: impl Fn(NodeId) -> bool,
    ) {
        let one = self.life_cycle(life_cycle);
        let (Retention::Window { tokens, .. }, true) = (one.retention, one.is_required()) else { return };
        let levels = tokens.get().div_ceil(self.block_tokens());
        let mut open = vec![(node, 0)];
        while let Some((at, level)) = open.pop() {
            if level > levels {
                continue;
            }
            for child in self.tree.children(at) {
                if self.tree.link(child, usize::from(life_cycle)).is_some() {
                    found.extend(wanted(child).then_some(child));
                    open.push((child, level + 1));
                }
            }
        }
    }

    fn examine(&mut self, node: NodeId) {
        let is_last = || !self.tree.any_child(node, |child| self.end_in(child).is_some());
        let ends_block = |length: u32| length.is_multiple_of(self.block_tokens());
        let found = self.end_in(node).filter(|length| self.ends.every || !ends_block(*length) || is_last());
        let before = self.ends.length(node);
        if found == before {
            return;
        }
        self.log_end_removed(node);
        let name = found.filter(|_| self.ends.named).and_then(|length| self.name_end(node, length));
        match found {
            Some(length) => _ = self.ends.at.insert(node, End { length, name }),
            None => _ = self.ends.at.remove(&node),
        }
        if let Some(Name { scope, parent, key, length }) = name {
            self.log.push(Event::EndPointAdded { scope, parent, key, length });
        }
        if found.is_some() != before.is_some() {
            self.ends_changed(node, found.is_some());
        }
    }

    fn forget_end(&mut self, node: NodeId) {
        self.log_end_removed(node);
        if self.ends.at.remove(&node).is_some() {
            self.ends_changed(node, false);
        }
    }

    fn log_end_removed(&mut self, node: NodeId) {
        if let Some(Name { scope, parent, key, length }) = self.ends.at.get(&node).and_then(|end| end.name) {
            self.log.push(Event::EndPointRemoved { scope, parent, key, length });
        }
    }

    fn name_end(&self, node: NodeId, length: u32) -> Option<Name> {
        let parent = self.tree.key(self.tree.parent(node)?);
        let tokens = self.tree.tokens(node);
        let covered = (length - self.tree.ordinal(node) * self.block_tokens()) as usize;
        let key = if covered == tokens.len() { self.tree.key(node) } else { parent.child(&tokens[..covered]) };
        Some(Name { scope: self.tree.scope_key(node), parent, key, length })
    }

    /// Without partial reuse nobody finds a block that is not full.
    fn can_end(&self, node: NodeId) -> bool {
        self.config.partial_reuse || self.tree.tokens(node).len() as u32 == self.block_tokens()
    }

    fn covered(&self, node: NodeId, life_cycle: usize) -> u32 {
        self.tree.link(node, life_cycle).map_or(0, |page| self.pages.get(page).covered)
    }

    /// The longest reusable length inside a block or at its end. As `reuse`, for one block.
    ///
    /// # Cost
    /// The blocks of the windows; all blocks before it where there are sinks.
    pub fn end_in(&self, node: NodeId) -> Option<u32> {
        self.tree.parent(node).filter(|_| self.can_end(node))?;
        let (ordinal, block_tokens) = (self.tree.ordinal(node), self.config.block_tokens);
        let start = ordinal * block_tokens.get();
        let mut length = start + self.tree.tokens(node).len() as u32;
        let required = || self.config.life_cycles.iter().enumerate().filter(|(_, one)| one.is_required());
        loop {
            let before = length;
            for (life_cycle, one) in required() {
                let covered = start + self.covered(node, life_cycle);
                let is_needed = one.is_state() || one.retention.is_live(ordinal, length, block_tokens);
                match one.is_state() && covered > length {
                    true => return None,
                    false if is_needed => length = length.min(covered),
                    false => {}
                }
                if length == start {
                    return None;
                }
            }
            if length == before {
                break;
            }
        }
        required().all(|(life_cycle, one)| self.has_before(node, life_cycle, one.retention, length)).then_some(length)
    }

    /// A window has all pages of the blocks before the node that are live at `length`. Full attention has (T4).
    fn has_before(&self, node: NodeId, life_cycle: usize, retention: Retention, length: u32) -> bool {
        let Retention::Window { .. } = retention else { return true };
        let stale = retention.stale(length, self.config.block_tokens);
        let mut at = self.tree.parent(node);
        let mut ordinal = self.tree.ordinal(node);
        while let Some(before) = at.filter(|_| ordinal > stale.end || stale.start > 0) {
            let Some(parent) = self.tree.parent(before) else { return true };
            ordinal -= 1;
            if !stale.contains(&ordinal) && self.covered(before, life_cycle) < self.block_tokens() {
                return false;
            }
            at = Some(parent);
        }
        true
    }

    /// The slow way: every block by the rule for prefixes.
    pub fn check_ends(&self) -> Result<(), Violation> {
        if !self.ends.tracked {
            return Ok(());
        }
        let mut reusable: BTreeMap<NodeId, u32> = BTreeMap::new();
        let mut open: Vec<Vec<NodeId>> =
            self.tree.scope_roots().flat_map(|root| self.tree.children(root)).map(|id| vec![id]).collect();
        while let Some(nodes) = open.pop() {
            let Some(&last) = nodes.last() else { continue };
            open.extend(self.tree.children(last).into_iter().map(|child| [&nodes[..], &[child]].concat()));
            let start = self.tree.ordinal(last) * self.block_tokens();
            let tokens = start + self.tree.tokens(last).len() as u32;
            let length = self.reusable(&Path { nodes, tokens }, 0);
            if length > start && self.can_end(last) {
                reusable.insert(last, length);
            }
        }
        let mut expected: BTreeMap<NodeId, u32> = reusable.clone();
        if !self.ends.every {
            let ends_below = |node: NodeId| self.tree.children(node).iter().any(|child| reusable.contains_key(child));
            expected.retain(|node, length| !length.is_multiple_of(self.block_tokens()) || !ends_below(*node));
        }
        let found: BTreeMap<NodeId, u32> = self.ends.at.iter().map(|(node, end)| (*node, end.length)).collect();
        if found != expected || !self.ends.touched.is_empty() {
            return Err(Violation::new("E1", format!("end points {found:?}, the tree has {expected:?}")));
        }
        let is_misnamed =
            |node: NodeId, end: &End| end.name != self.name_end(node, end.length).filter(|_| self.ends.named);
        match self.ends.at.iter().find(|(node, end)| is_misnamed(**node, end)) {
            Some((node, end)) => Err(Violation::new("E1", format!("{node:?} is called {:?}", end.name))),
            None => Ok(()),
        }
    }
}
