//! Pages and tree together: what is linked where, and what goes when a page vanishes.

use super::config::{Commits, Config};
use super::ends::{EndPoints, Touched};
use super::events::Log;
use super::explain::Gone;
use super::forget::Owners;
use super::hint::Hint;
use super::lifecycle::{LifeCycle, Policy};
use super::pages::{PageId, Pages, Place};
use super::plans::Mark;
use super::quota::Quotas;
use super::reuse::{Coverage, Match};
use super::tree::{NodeId, NodeRef, Tree};
use super::worth::Worth;
use crate::ids::TokenId;
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Bytes of one whole slot to be copied, after all copies before it and before its source is written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copy {
    pub from: Place,
    pub to: Place,
}

/// A prefix in the tree: full blocks, and last perhaps one that shares its beginning only.
#[derive(Clone, Debug, Default)]
pub(super) struct Path {
    pub nodes: Vec<NodeId>,
    pub tokens: u32,
}

/// Last blocks of stopped sequences that may be without a page. So many are remembered for telling content that is known
/// from content that is not; a block costs some hundred bytes.
const FADED_MAX: usize = 256;

/// Some of the life cycles.
#[derive(Clone, Copy, Debug)]
struct Members {
    bits: [u64; 4],
    life_cycles: u8,
}

impl Members {
    fn of(config: &Config, is_member: fn(&LifeCycle) -> bool) -> Self {
        let mut bits = [0; 4];
        for (index, _) in config.life_cycles.iter().enumerate().filter(|(_, one)| is_member(one)) {
            bits[index / 64] |= 1 << (index % 64);
        }
        Self { bits, life_cycles: config.life_cycles.len() as u8 }
    }

    fn iter(self) -> impl Iterator<Item = u8> {
        (0..self.life_cycles).filter(move |index| self.bits[usize::from(index / 64)] >> (index % 64) & 1 == 1)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub config: Config,
    attention: Members,
    published: Members,
    pub pages: Pages,
    pub tree: Tree,
    pub owners: Owners,
    pub gone: Gone,
    /// Pages that drop plans name.
    pub marks: BTreeMap<PageId, Mark>,
    /// Nodes that may have been left without children and pages. They go when nothing else is under way.
    bare: Vec<NodeRef>,
    /// Those that go when others follow, oldest first.
    faded: VecDeque<NodeRef>,
    pub evicted_pages: u64,
    /// Counts plans' pages and their uses: what comes later has a higher number.
    pub uses: u64,
    pub ends: EndPoints,
    pub worth: Option<Box<Worth>>,
    pub log: Log,
}

impl Store {
    pub fn new(config: Config) -> Self {
        let mut pages = Pages::new(&config.tiers);
        for life_cycle in &config.life_cycles {
            let floor = pages.floor(0, life_cycle.group) + 1;
            pages.set_floor(life_cycle.group, floor.min(pages.slots(0, life_cycle.group)));
        }
        pages.quotas =
            config.scope_quota_ppm.map(|quota_ppm| Box::new(Quotas::new(&config.tiers, quota_ppm, config.eviction)));
        Self {
            pages,
            tree: Tree::new(config.block_tokens, config.life_cycles.len(), config.events.is_some()),
            owners: Owners::default(),
            gone: Gone::default(),
            attention: Members::of(&config, |one| !one.is_state()),
            published: Members::of(&config, LifeCycle::is_published),
            ends: EndPoints::new(&config),
            worth: Worth::new(&config),
            log: Log::new(&config),
            config,
            marks: BTreeMap::new(),
            bare: Vec::new(),
            faded: VecDeque::new(),
            evicted_pages: 0,
            uses: 0,
        }
    }

    pub fn block_tokens(&self) -> u32 {
        self.config.block_tokens.get()
    }

    pub fn life_cycle(&self, index: u8) -> &LifeCycle {
        &self.config.life_cycles[usize::from(index)]
    }

    pub fn life_cycles(&self) -> u8 {
        self.config.life_cycles.len() as u8
    }

    /// The life cycles of attention layers.
    pub fn attention(&self) -> impl Iterator<Item = u8> + use<> {
        self.attention.iter()
    }

    /// Attention life cycles whose blocks others may find.
    pub fn published(&self) -> impl Iterator<Item = u8> + use<> {
        self.published.iter()
    }

    pub fn recurrent(&self) -> Option<u8> {
        self.config.life_cycles.iter().position(LifeCycle::is_state).map(|index| index as u8)
    }

    // -- matching

    /// The longest path of the tree that `tokens` begin with. `known` are blocks that they are known to begin with, as
    /// far as these are still there.
    ///
    /// # Cost
    /// One hash and one look-up for each block that is not known.
    pub fn matched(&self, scope: &Scope, tokens: &[TokenId], known: &[NodeRef]) -> Path {
        let block_tokens = self.block_tokens() as usize;
        // A block that is there has all blocks before it.
        let there = known.partition_point(|node| self.tree.resolve(*node).is_some());
        let mut nodes: Vec<NodeId> = Vec::with_capacity(tokens.len() / block_tokens + 1);
        nodes.extend(known[..there].iter().filter_map(|node| self.tree.resolve(*node)));
        nodes.truncate(tokens.len() / block_tokens);
        let Some(mut last) = nodes.last().copied().or_else(|| self.tree.root(scope)) else {
            return Path::default();
        };
        let mut rest = &tokens[nodes.len() * block_tokens..];
        while let Some((block, after)) = rest.split_at_checked(block_tokens) {
            let Some(child) = self.tree.child(last, block) else { break };
            nodes.push(child);
            (last, rest) = (child, after);
        }
        let mut matched = (nodes.len() * block_tokens) as u32;
        let beginning = &rest[..rest.len().min(block_tokens)];
        if let Some((child, shared)) = self.tree.nearest_child(last, beginning).filter(|_| self.config.partial_reuse) {
            nodes.push(child);
            matched += shared;
        }
        Path { nodes, tokens: matched }
    }

    /// How much of a path can be reused, after `backoff` tokens are taken off.
    pub fn reusable(&self, path: &Path, backoff: u32) -> u32 {
        self.matching(path.tokens.saturating_sub(backoff)).reusable(&On { store: self, path })
    }

    pub fn reusable_before_states(&self, path: &Path, backoff: u32) -> u32 {
        self.matching(path.tokens.saturating_sub(backoff)).reusable_before_states(&On { store: self, path })
    }

    pub fn is_complete(&self, path: &Path, life_cycle: u8, length: u32) -> bool {
        self.matching(length).is_complete(usize::from(life_cycle), length, &On { store: self, path })
    }

    /// As `reusable`, for the full blocks that a chain of truncated keys names. No tokens are compared.
    ///
    /// # Cost
    /// A logarithmic number of look-ups, and those of the windows' blocks: a block that is there has all before it.
    pub fn reusable_on_chain(&self, chain: &[u64]) -> u32 {
        let there = self.blocks_there(chain);
        let tokens = (there as u32).saturating_mul(self.block_tokens());
        let matching = self.matching(tokens.saturating_sub(self.config.match_backoff_tokens));
        matching.reusable(&OnChain { store: self, chain: &chain[..there] })
    }

    /// How many blocks of a chain are there. A turn mostly adds a few blocks to what is known, so it is looked for from the end.
    fn blocks_there(&self, chain: &[u64]) -> usize {
        let is_there = |key: &u64| self.tree.named(*key).is_some();
        let (mut end, mut step) = (chain.len(), 1);
        while end > 0 {
            let from = end.saturating_sub(step);
            if is_there(&chain[from]) {
                return from + 1 + chain[from + 1..end].partition_point(is_there);
            }
            (end, step) = (from, step * 2);
        }
        0
    }

    fn matching(&self, tokens: u32) -> Match<'_> {
        Match { block_tokens: self.config.block_tokens, life_cycles: &self.config.life_cycles, tokens }
    }

    pub fn page_on(&self, path: &Path, life_cycle: u8, block: u32) -> Option<PageId> {
        self.tree.link(*path.nodes.get(block as usize)?, usize::from(life_cycle))
    }

    pub fn commits_end_points(&self) -> bool {
        self.config.commits == Commits::EndPoints
    }

    /// A page on the device that its only holder has locked. Room was made before.
    pub fn allocate(&mut self, life_cycle: u8, ordinal: u32, hint: Option<Hint>) -> PageId {
        let one = self.life_cycle(life_cycle);
        let (group, priority) = (one.group, one.class(ordinal, hint, self.config.block_tokens));
        self.pages.allocate(life_cycle, group, self.class_of_new(priority))
    }

    // -- linking and letting go

    /// Names a page at a block, if the block has none that covers as much.
    pub fn link(&mut self, node: NodeId, life_cycle: u8, page: PageId, covered: u32) -> bool {
        let before = self.tree.link(node, usize::from(life_cycle));
        if before.is_some_and(|before| self.pages.get(before).covered >= covered) {
            return false;
        }
        self.replace_link(node, life_cycle, page, covered);
        true
    }

    /// Names a page at a block, whatever was named there.
    pub fn replace_link(&mut self, node: NodeId, life_cycle: u8, page: PageId, covered: u32) {
        if let Some(before) = self.tree.link(node, usize::from(life_cycle)) {
            self.log_removed(before);
            self.unname(before);
        }
        self.tree.set_link(node, usize::from(life_cycle), Some(page));
        self.pages.set_covered(page, node, covered);
        self.rank_page(node, life_cycle);
        self.log_stored(page);
        self.touched(node, Touched::Gained(life_cycle));
    }

    /// The tree does not name the page any more: without a holder it is gone.
    pub fn unname(&mut self, page: PageId) {
        self.pages.orphan(page);
        if self.pages.get(page).holders() == 0 {
            self.free_page(page);
        }
    }

    pub fn free_page(&mut self, page: PageId) {
        if self.pages.get(page).is_planned() {
            self.marks.remove(&page);
        }
        self.pages.free_page(page);
    }

    /// A holder lets go of a page.
    pub fn release(&mut self, page: PageId, locked: bool) {
        if self.pages.release(page, locked) {
            self.free_page(page);
        }
    }

    /// A droppable page is gone, and with it whatever is of no use without it.
    pub fn vanish(&mut self, page: PageId) {
        let (node, life_cycle) = (self.pages.get(page).node, self.pages.get(page).life_cycle);
        self.log_removed(page);
        self.free_page(page);
        if let Some(node) = node {
            self.tree.set_link(node, usize::from(life_cycle), None);
            self.touched(node, Touched::Lost(life_cycle));
            self.lost(node, life_cycle);
        }
    }

    fn lost(&mut self, node: NodeId, life_cycle: u8) {
        let LifeCycle { retention, policy, .. } = *self.life_cycle(life_cycle);
        let constrains = policy == Policy::Required;
        let mut at = node;
        if constrains && retention.carries_all_after(self.tree.ordinal(node)) {
            let Some(parent) = self.tree.parent(node) else { return };
            for below in self.tree.subtree(node) {
                self.remember(below, life_cycle);
                self.remove_node(below);
            }
            at = parent;
        }
        // A leaf that no sequence can end at has no use, whatever else it has.
        while let Some(parent) = self.tree.parent(at) {
            let lacks = self.tree.link(at, usize::from(life_cycle)).is_none();
            let useless = lacks && constrains && retention.ends_need_page();
            if !self.tree.is_leaf(at) || !(useless || self.is_without_pages(at)) {
                return;
            }
            self.remember(at, life_cycle);
            self.remove_node(at);
            at = parent;
        }
        self.bare.push(self.tree.reference(at));
    }

    fn is_without_pages(&self, node: NodeId) -> bool {
        self.tree.links(node).iter().all(Option::is_none)
    }

    pub fn remove_node(&mut self, node: NodeId) {
        self.leaves(node);
        for life_cycle in 0..self.config.life_cycles.len() {
            if let Some(page) = self.tree.link(node, life_cycle) {
                self.log_removed(page);
                self.tree.set_link(node, life_cycle, None);
                self.unname(page);
            }
        }
        self.take_out(node);
    }

    /// The node may turn out to hold nothing.
    pub fn may_be_bare(&mut self, node: NodeRef) {
        self.bare.push(node);
    }

    /// The node is the last one of a sequence that commits nothing more.
    pub fn fades(&mut self, node: NodeRef) {
        let is_bare = |node: NodeId| self.tree.is_leaf(node) && self.is_without_pages(node);
        if self.tree.resolve(node).is_some_and(is_bare) {
            self.faded.push_back(node);
        }
        if self.faded.len() > FADED_MAX {
            self.bare.extend(self.faded.pop_front());
        }
    }

    pub fn faded(&self) -> impl Iterator<Item = NodeId> {
        self.faded.iter().filter_map(|node| self.tree.resolve(*node))
    }

    /// Removes blocks and roots that hold nothing. Called when no one is walking the tree.
    pub fn sweep(&mut self) {
        loop {
            self.keep_quotas();
            while let Some(reference) = self.bare.pop() {
                let mut next = self.tree.resolve(reference);
                while let Some(node) = next.filter(|node| self.tree.is_leaf(*node) && self.is_without_pages(*node)) {
                    next = self.tree.parent(node);
                    self.leaves(node);
                    self.take_out(node);
                }
            }
            self.settle();
            // Pages that are worth something else now are looked at again by their quotas.
            if self.pages.quotas.as_ref().is_none_or(|quotas| quotas.is_kept()) {
                return;
            }
        }
    }
}

/// A path as `reuse` sees it.
struct On<'a> {
    store: &'a Store,
    path: &'a Path,
}

impl Coverage for On<'_> {
    fn covered(&self, life_cycle: usize, block: u32) -> u32 {
        let node = self.path.nodes.get(block as usize);
        let page = node.and_then(|node| self.store.tree.link(*node, life_cycle));
        page.map_or(0, |page| self.store.pages.get(page).covered)
    }

    /// All but the last block (T4).
    fn whole_blocks(&self) -> u32 {
        (self.path.nodes.len() as u32).saturating_sub(1)
    }
}

/// Full blocks that are named by truncated keys, as `reuse` sees them.
pub(super) struct OnChain<'a> {
    pub store: &'a Store,
    pub chain: &'a [u64],
}

impl Coverage for OnChain<'_> {
    fn covered(&self, life_cycle: usize, block: u32) -> u32 {
        let node = self.chain.get(block as usize).and_then(|key| self.store.tree.named(*key));
        let page = node.and_then(|node| self.store.tree.link(node, life_cycle));
        page.map_or(0, |page| self.store.pages.get(page).covered)
    }

    fn whole_blocks(&self) -> u32 {
        self.chain.len() as u32
    }
}
