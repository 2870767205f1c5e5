//! What pages are worth: which end points need them, so that these go as units.
//!
//! The end points that count are the last one of each path and those where paths part; others, which a longer one has
//! replaced, serve nobody but who rewinds. The pages that those which count need are a window's pages back from their
//! lengths, and their snapshots. A block of full attention, or a sink, serves whatever ends at it or behind it; a block
//! behind which nothing ends serves nobody.
//!
//! An end point saves the tokens between it and the end point before it that counts, as it stood when it was made. What it
//! saves a page decides how long it stays. To that its key adds up to two doublings: were all of equal worth, sessions that
//! come in turn would find either all end points or, one session more, none. So the share that is found falls smoothly.

use super::Violation;
use super::config::{Config, Eviction};
use super::hint::ENDPOINT_CLASS;
use super::lifecycle::Retention;
use super::order::{Class, Use, step_of};
use super::pages::PageId;
use super::store::Store;
use super::tree::NodeId;
use std::collections::{BTreeMap, BTreeSet};

/// An end point that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    length: u32,
    /// Where a prompt would resume without it.
    before: u32,
}

/// What needs a block's window page, or its snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Need {
    ends: u32,
    /// The highest step of those that need it or have needed it, since the last time that nobody did.
    step: u8,
}

/// Invariants: (W1) a block is told how many of its children end a prefix, or have one behind them that does; (W2) the end
/// points that count, and how many of them need a page, are those of the tree; (W3) a page's class says so.
#[derive(Clone, Debug, Default)]
pub(super) struct Worth {
    ending_children: Vec<u32>,
    kept: BTreeMap<NodeId, Kept>,
    needs: BTreeMap<(NodeId, u8), Need>,
}

impl Worth {
    /// `None` where pages go one by one.
    pub fn new(config: &Config) -> Option<Box<Self>> {
        (config.eviction == Eviction::EndPoints).then(Box::default)
    }

    pub fn counts(&self, node: NodeId) -> bool {
        self.kept.contains_key(&node)
    }

    pub fn bytes(&self) -> usize {
        self.ending_children.capacity() * size_of::<u32>()
            + self.kept.len() * size_of::<(NodeId, Kept)>()
            + self.needs.len() * size_of::<((NodeId, u8), Need)>()
    }

    /// One more end point needs a page, or one less.
    fn need(&mut self, page: (NodeId, u8), step: u8, needs: bool) {
        let need = self.needs.entry(page).or_default();
        match needs {
            true => *need = Need { ends: need.ends + 1, step: need.step.max(step) },
            false => need.ends -= 1,
        }
        if need.ends == 0 {
            self.needs.remove(&page);
        }
    }

    fn ending_children(&self, node: NodeId) -> u32 {
        self.ending_children.get(node.index()).copied().unwrap_or(0)
    }

    fn ending_children_mut(&mut self, node: NodeId) -> &mut u32 {
        if self.ending_children.len() <= node.index() {
            self.ending_children.resize(node.index() + 1, 0);
        }
        &mut self.ending_children[node.index()]
    }
}

impl Store {
    // -- what ends where

    /// A block ends a prefix from now on, or no more: those before it learn that there is use for them, or none.
    pub fn ends_changed(&mut self, node: NodeId, is_end: bool) {
        let Some(worth) = &self.worth else { return };
        let mut at = node;
        if worth.ending_children(node) > 0 {
            return;
        }
        self.rank_block(node);
        while let Some(parent) = self.tree.parent(at) {
            let Some(worth) = &mut self.worth else { return };
            let count = worth.ending_children_mut(parent);
            let others = if is_end { *count } else { *count - 1 };
            *count = others + u32::from(is_end);
            self.reconsider(parent);
            if others > 0 || self.ends.has(parent) {
                return;
            }
            self.rank_block(parent);
            at = parent;
        }
    }

    /// Prefixes end in the block or behind it.
    fn is_useful(&self, worth: &Worth, node: NodeId) -> bool {
        worth.ending_children(node) > 0 || self.ends.has(node)
    }

    /// The length of the block's end point, if that counts.
    fn counted(&self, worth: &Worth, node: NodeId) -> Option<u32> {
        match worth.ending_children(node) {
            0 => self.ends.length(node),
            1 => None,
            _ => self.end_in(node),
        }
    }

    // -- who needs what

    /// The blocks may have got an end point that counts, or lost it.
    pub fn weigh(&mut self, nodes: &BTreeSet<NodeId>) {
        let mut new = Vec::new();
        let mut replaced = BTreeMap::new();
        for &node in nodes {
            let Some(worth) = &self.worth else { return };
            let counted = self.counted(worth, node);
            if worth.kept.get(&node).map(|kept| kept.length) != counted {
                if let Some(kept) = self.uncount(node) {
                    replaced.insert(node, kept.before);
                }
                new.extend(counted.map(|length| (self.tree.ordinal(node), node, length)));
            }
        }
        // Those before first: the others' savings begin there.
        new.sort_unstable();
        for (_, node, length) in new {
            let before = self.before(node, &replaced);
            let Some(worth) = &mut self.worth else { return };
            worth.kept.insert(node, Kept { length, before });
            self.need(node, Kept { length, before }, true);
        }
    }

    /// A block is about to leave the tree, or its end point is void.
    pub(super) fn uncount(&mut self, node: NodeId) -> Option<Kept> {
        let kept = self.worth.as_mut()?.kept.remove(&node)?;
        self.need(node, kept, false);
        Some(kept)
    }

    /// The last end point before the block that counts, or where one that was replaced just now began.
    ///
    /// # Cost
    /// The blocks up to there.
    fn before(&self, node: NodeId, replaced: &BTreeMap<NodeId, u32>) -> u32 {
        let kept = |at: NodeId| self.worth.as_ref()?.kept.get(&at).map(|kept| kept.length);
        let mut above = std::iter::successors(self.tree.parent(node), |at| self.tree.parent(*at));
        above.find_map(|at| kept(at).or_else(|| replaced.get(&at).copied())).unwrap_or(0)
    }

    /// An end point needs its pages from now on, or no more.
    fn need(&mut self, node: NodeId, kept: Kept, needs: bool) {
        for life_cycle in 0..self.life_cycles() {
            let one = self.life_cycle(life_cycle);
            let blocks = match one.retention {
                _ if !one.is_required() => continue,
                Retention::Full => continue,
                Retention::State => self.tree.ordinal(node)..self.tree.ordinal(node) + 1,
                Retention::Window { .. } => {
                    one.retention.stale(kept.length, self.config.block_tokens).end..self.tree.ordinal(node) + 1
                }
            };
            // Whoever shares a key is of the same worth, and goes with all its pages.
            let lot = (self.tree.key(node).truncated() >> 61) as u8;
            let step = step_of((kept.length - kept.before.min(kept.length)) / blocks.len().max(1) as u32) + lot;
            let mut at = Some(node);
            for _ in blocks {
                let Some(here) = at.filter(|at| self.tree.parent(*at).is_some()) else { break };
                let Some(worth) = &mut self.worth else { return };
                worth.need((here, life_cycle), step, needs);
                self.rank_page(here, life_cycle);
                at = self.tree.parent(here);
            }
        }
    }

    // -- what that makes of pages

    fn rank_block(&mut self, node: NodeId) {
        for life_cycle in 0..self.life_cycles() {
            self.rank_page(node, life_cycle);
        }
    }

    /// A page was linked, is needed by more or fewer, or a plan names it now, or no more.
    pub fn rank_page(&mut self, node: NodeId, life_cycle: u8) {
        let Some((worth, page)) = self.worth.as_ref().zip(self.tree.link(node, usize::from(life_cycle))) else {
            return;
        };
        let class = self.class_in(worth, node, life_cycle, page);
        self.pages.set_class(page, class);
    }

    /// The class of a page that the tree does not name.
    pub fn class_of_new(&self, priority: u8) -> Class {
        let step = match self.config.eviction {
            Eviction::Pages => 0,
            Eviction::EndPoints => step_of(self.block_tokens()),
        };
        Class::new(Use::End, step, priority)
    }

    /// The class of the page that a block has of a life cycle.
    fn class_in(&self, worth: &Worth, node: NodeId, life_cycle: u8, page: PageId) -> Class {
        let page = self.pages.get(page);
        let (one, priority) = (self.life_cycle(life_cycle), page.class.priority());
        let serves_all = one.retention.carries_all_after(self.tree.ordinal(node));
        match worth.needs.get(&(node, life_cycle)) {
            _ if one.is_required() && serves_all && self.is_useful(worth, node) => self.class_of_new(priority),
            Some(need) if !serves_all => Class::new(Use::End, need.step, priority),
            _ if page.is_planned() || self.is_hinted(priority) => Class::new(Use::Older, 0, priority),
            _ => Class::new(Use::None, 0, priority),
        }
    }

    fn is_hinted(&self, priority: u8) -> bool {
        self.config.endpoint_rewind_tokens > 0 && priority == ENDPOINT_CLASS
    }

    /// The slow way: from the end points that are known.
    pub fn check_worth(&self) -> Result<(), Violation> {
        let Some(worth) = &self.worth else { return Ok(()) };
        let wrong = |id, text: String| Err(Violation::new(id, text));
        let mut useful: BTreeSet<NodeId> = BTreeSet::new();
        for node in self.tree.nodes().filter(|node| self.ends.has(*node)) {
            useful.extend(std::iter::successors(Some(node), |at| self.tree.parent(*at)));
        }
        let mut needs: BTreeMap<(NodeId, u8), u32> = BTreeMap::new();
        for node in self.tree.nodes().chain(self.tree.scope_roots()) {
            let ending = self.tree.children(node).iter().filter(|child| useful.contains(child)).count();
            if worth.ending_children(node) as usize != ending {
                return wrong("W1", format!("{node:?} counts {} of {ending}", worth.ending_children(node)));
            }
            let kept = worth.kept.get(&node).map(|kept| kept.length);
            if kept != self.counted(worth, node).filter(|_| self.tree.parent(node).is_some()) {
                return wrong("W2", format!("the end point of {node:?} counts as {kept:?}"));
            }
            for life_cycle in (0..self.life_cycles()).filter(|at| self.life_cycle(*at).is_required()) {
                let one = self.life_cycle(life_cycle).retention;
                let Some(length) = kept.filter(|_| one != Retention::Full) else { continue };
                let live = |at: &NodeId| match one {
                    Retention::State => *at == node,
                    _ => self.tree.ordinal(*at) >= one.stale(length, self.config.block_tokens).end,
                };
                let path = std::iter::successors(Some(node), |at| self.tree.parent(*at));
                for at in path.take_while(|at| self.tree.parent(*at).is_some() && live(at)) {
                    *needs.entry((at, life_cycle)).or_default() += 1;
                }
            }
        }
        let counted: BTreeMap<(NodeId, u8), u32> = worth.needs.iter().map(|(at, need)| (*at, need.ends)).collect();
        if counted != needs || worth.kept.keys().any(|node| self.tree.parent(*node).is_none()) {
            return wrong("W2", format!("needed are {needs:?}, counted {counted:?}"));
        }
        for (id, page) in self.pages.iter() {
            let Some(node) = page.node else { continue };
            let class = self.class_in(worth, node, page.life_cycle, id);
            if page.class != class {
                return wrong("W3", format!("{id:?} is worth {class:?}: {page:?}"));
            }
        }
        Ok(())
    }
}
