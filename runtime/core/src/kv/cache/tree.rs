//! The prefix tree over blocks of tokens: full blocks, and at the ends blocks that are not full.
//!
//! The tree names pages, it does not own them. A block is found by its key, and its tokens are compared; what begins like
//! a block is found in the order of the siblings' tokens, so wide fan-out costs little.

use super::Violation;
use super::forget::OwnerId;
use super::pages::PageId;
use crate::ids::TokenId;
use crate::kv::identity::{BlockKey, Scope};
use hashbrown::HashTable;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeId(NonZeroU32);

impl NodeId {
    fn at(index: usize) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index as u32))
    }

    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A node as others remember it: it may be gone meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeRef {
    id: NodeId,
    birth: u32,
}

/// A block of a prefix. Siblings form a search tree by their tokens that is a heap by their keys: keys are uniform
/// hashes, so it is balanced, and the same for the same blocks.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Node {
    key: BlockKey,
    parent: Option<NodeId>,
    /// Blocks from the root on; 0 for the root.
    depth: u32,
    len: u32,
    children: Option<NodeId>,
    before: Option<NodeId>,
    after: Option<NodeId>,
    /// Counts the blocks that had this id, and their ends: odd while there is one.
    birth: u32,
    owner: Option<OwnerId>,
}

impl Node {
    fn is_alive(&self) -> bool {
        self.birth % 2 == 1
    }
}

/// What came of putting a block into the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inserted {
    /// It was there.
    Here(NodeId),
    New(NodeId),
    /// In it now, with the pages of the shorter block of so many tokens that it replaced.
    Longer(NodeId, u32),
    /// A longer sibling covers it.
    Useless(NodeId),
}

/// Siblings around a sequence of tokens, in their order.
#[derive(Clone, Copy, Debug, Default)]
struct Neighbours {
    before: Option<NodeId>,
    same: Option<NodeId>,
    after: Option<NodeId>,
}

/// Invariants: (11.12) a node's parent is in the tree, and full; (T1) the index names every block under its key;
/// (T2) siblings are in order, and none is the beginning of another; (T3) a node without children has a page, or is the
/// last one of a sequence that still commits or of one of the last that did; (T4) every full block has a page of each
/// required life cycle of full attention, which covers it wholly.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    block_tokens: NonZeroU32,
    life_cycles: usize,
    nodes: Vec<Node>,
    /// `block_tokens` each.
    tokens: Vec<TokenId>,
    /// A page for each life cycle, or none.
    links: Vec<Option<PageId>>,
    /// The root of each node, where somebody wants to know.
    roots_of: Option<Vec<NodeId>>,
    vacant: Vec<NodeId>,
    index: HashTable<NodeId>,
    roots: BTreeMap<Scope, NodeId>,
    scopes: BTreeMap<NodeId, Scope>,
}

impl Tree {
    pub fn new(block_tokens: NonZeroU32, life_cycles: usize, tells_roots: bool) -> Self {
        Self {
            block_tokens,
            life_cycles,
            nodes: Vec::new(),
            tokens: Vec::new(),
            links: Vec::new(),
            roots_of: tells_roots.then(Vec::new),
            vacant: Vec::new(),
            index: HashTable::new(),
            roots: BTreeMap::new(),
            scopes: BTreeMap::new(),
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.index()]
    }

    pub fn tokens(&self, id: NodeId) -> &[TokenId] {
        let start = id.index() * self.block_tokens.get() as usize;
        &self.tokens[start..start + self.node(id).len as usize]
    }

    pub fn link(&self, id: NodeId, life_cycle: usize) -> Option<PageId> {
        self.links[id.index() * self.life_cycles + life_cycle]
    }

    pub fn set_link(&mut self, id: NodeId, life_cycle: usize, page: Option<PageId>) {
        self.links[id.index() * self.life_cycles + life_cycle] = page;
    }

    pub fn links(&self, id: NodeId) -> &[Option<PageId>] {
        let start = id.index() * self.life_cycles;
        &self.links[start..start + self.life_cycles]
    }

    /// `None` for a root.
    pub fn parent(&self, id: NodeId) -> Option<NodeId> {
        self.node(id).parent
    }

    pub fn key(&self, id: NodeId) -> BlockKey {
        self.node(id).key
    }

    pub fn scopes(&self) -> impl Iterator<Item = &Scope> {
        self.roots.keys()
    }

    /// The only conversation that has used the block.
    pub fn owner(&self, id: NodeId) -> Option<OwnerId> {
        self.node(id).owner
    }

    pub fn set_owner(&mut self, id: NodeId, owner: Option<OwnerId>) {
        self.node_mut(id).owner = owner;
    }

    /// All that are there, roots included.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        let alive = self.nodes.iter().enumerate().filter(|(_, node)| node.is_alive());
        alive.map(|(index, _)| NodeId::at(index))
    }

    /// Which block of its sequence it is; 0 for a root as well.
    pub fn ordinal(&self, id: NodeId) -> u32 {
        self.node(id).depth.saturating_sub(1)
    }

    /// The key of the scope that the node belongs to.
    ///
    /// # Cost
    /// The blocks before it, unless the tree was told to know roots.
    pub fn scope_key(&self, id: NodeId) -> BlockKey {
        let root = match &self.roots_of {
            Some(roots) => roots[id.index()],
            None => std::iter::successors(Some(id), |id| self.parent(*id)).last().unwrap_or(id),
        };
        self.key(root)
    }

    /// The scopes' roots, in order.
    pub fn scope_roots(&self) -> impl Iterator<Item = NodeId> {
        self.roots.values().copied()
    }

    pub fn is_leaf(&self, id: NodeId) -> bool {
        self.node(id).children.is_none()
    }

    pub fn reference(&self, id: NodeId) -> NodeRef {
        NodeRef { id, birth: self.node(id).birth }
    }

    pub fn resolve(&self, reference: NodeRef) -> Option<NodeId> {
        (self.node(reference.id).birth == reference.birth).then_some(reference.id)
    }

    /// Blocks, roots apart.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Bytes of everything kept of blocks, their tokens apart.
    pub fn bytes(&self) -> usize {
        let lists = self.links.len() * size_of::<Option<PageId>>() + self.vacant.capacity() * size_of::<NodeId>();
        self.nodes.len() * size_of::<Node>() + lists + self.index.allocation_size()
    }

    pub fn token_bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<TokenId>()
    }

    // -- looking up

    pub fn root(&self, scope: &Scope) -> Option<NodeId> {
        self.roots.get(scope).copied()
    }

    /// The child that is exactly these tokens. Key, parent and tokens must agree.
    ///
    /// # Cost
    /// A hash and a look-up; a comparison of tokens where there is one child.
    pub fn child(&self, parent: NodeId, tokens: &[TokenId]) -> Option<NodeId> {
        let first = self.node(parent).children?;
        if let Node { before: None, after: None, .. } = self.node(first) {
            return (self.tokens(first) == tokens).then_some(first);
        }
        let key = self.node(parent).key.child(tokens);
        let same = |id: &NodeId| {
            let node = self.node(*id);
            node.key == key && node.parent == Some(parent) && self.tokens(*id) == tokens
        };
        self.index.find(key.truncated(), same).copied()
    }

    /// A full block with that truncated key.
    pub fn named(&self, key: u64) -> Option<NodeId> {
        let full = self.block_tokens.get();
        let same = |id: &NodeId| self.node(*id).key.truncated() == key && self.node(*id).len == full;
        self.index.find(key, same).copied()
    }

    /// The child that shares the longest beginning with `tokens`, and how long that is.
    pub fn nearest_child(&self, parent: NodeId, tokens: &[TokenId]) -> Option<(NodeId, u32)> {
        let Neighbours { before, same, after } = self.neighbours(parent, tokens);
        let shared = |id: NodeId| self.tokens(id).iter().zip(tokens).take_while(|(a, b)| a == b).count() as u32;
        let nearest = [same, before, after].into_iter().flatten().map(|id| (id, shared(id)));
        // The first of several that share as much.
        nearest.filter(|(_, shared)| *shared > 0).reduce(|best, next| if next.1 > best.1 { next } else { best })
    }

    fn neighbours(&self, parent: NodeId, tokens: &[TokenId]) -> Neighbours {
        let mut found = Neighbours::default();
        let mut at = self.node(parent).children;
        while let Some(id) = at {
            match tokens.cmp(self.tokens(id)) {
                Ordering::Less => (found.after, at) = (Some(id), self.node(id).before),
                Ordering::Greater => (found.before, at) = (Some(id), self.node(id).after),
                Ordering::Equal => (found.same, at) = (Some(id), None),
            }
        }
        found
    }

    /// The children of a node, in order.
    pub fn children(&self, id: NodeId) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut open = Vec::new();
        let mut at = self.node(id).children;
        while at.is_some() || !open.is_empty() {
            while let Some(id) = at {
                open.push(id);
                at = self.node(id).before;
            }
            if let Some(id) = open.pop() {
                found.push(id);
                at = self.node(id).after;
            }
        }
        found
    }

    /// Whether a child is as asked.
    ///
    /// # Cost
    /// The children up to the first one that is.
    pub fn any_child(&self, id: NodeId, asked: impl Fn(NodeId) -> bool) -> bool {
        let mut open: Vec<NodeId> = self.node(id).children.into_iter().collect();
        while let Some(child) = open.pop() {
            if asked(child) {
                return true;
            }
            open.extend([self.node(child).before, self.node(child).after].into_iter().flatten());
        }
        false
    }

    /// The node and all below it, children before parents.
    pub fn subtree(&self, id: NodeId) -> Vec<NodeId> {
        let mut found = vec![id];
        let mut at = 0;
        while let Some(id) = found.get(at) {
            found.extend(self.children(*id));
            at += 1;
        }
        found.reverse();
        found
    }

    // -- changing

    pub fn root_or_new(&mut self, scope: &Scope) -> NodeId {
        if let Some(id) = self.root(scope) {
            return id;
        }
        let id = self.add(scope.root(), None, &[]);
        self.roots.insert(*scope, id);
        self.scopes.insert(id, *scope);
        id
    }

    /// Puts a block under a full parent. A block that a longer sibling begins with is useless; one that begins with a
    /// shorter sibling takes its place and its pages.
    pub fn insert(&mut self, parent: NodeId, tokens: &[TokenId]) -> Inserted {
        if let Some(same) = self.child(parent, tokens) {
            return Inserted::Here(same);
        }
        let Neighbours { before, after, .. } = self.neighbours(parent, tokens);
        if let Some(longer) = after.filter(|after| self.tokens(*after).starts_with(tokens)) {
            return Inserted::Useless(longer);
        }
        let key = self.node(parent).key.child(tokens);
        let shorter = before.filter(|before| tokens.starts_with(self.tokens(*before)));
        let Some(shorter) = shorter else {
            let id = self.add(key, Some(parent), tokens);
            self.list(parent, id);
            return Inserted::New(id);
        };
        let had = self.node(shorter).len;
        self.unlist(shorter);
        self.write(shorter, key, tokens);
        self.list(parent, shorter);
        Inserted::Longer(shorter, had)
    }

    /// Takes a leaf out. Its links must be dealt with before.
    pub fn remove(&mut self, id: NodeId) {
        assert!(self.is_leaf(id), "{id:?} has children");
        if self.node(id).parent.is_some() {
            self.unlist(id);
        } else if let Some(scope) = self.scopes.remove(&id) {
            self.roots.remove(&scope);
        }
        let node = self.node_mut(id);
        (node.birth, node.parent) = (node.birth.wrapping_add(1), None);
        self.vacant.push(id);
    }

    fn add(&mut self, key: BlockKey, parent: Option<NodeId>, tokens: &[TokenId]) -> NodeId {
        let depth = parent.map_or(0, |parent| self.node(parent).depth + 1);
        let (children, before, after, owner) = (None, None, None, None);
        let node = Node { key, parent, depth, len: 0, children, before, after, birth: 1, owner };
        let id = match self.vacant.pop() {
            Some(id) => {
                let birth = self.node(id).birth.wrapping_add(1);
                *self.node_mut(id) = Node { birth, ..node };
                id
            }
            None => {
                self.nodes.push(node);
                self.tokens.resize(self.nodes.len() * self.block_tokens.get() as usize, 0);
                self.links.resize(self.nodes.len() * self.life_cycles, None);
                NodeId::at(self.nodes.len() - 1)
            }
        };
        let start = id.index() * self.life_cycles;
        self.links[start..start + self.life_cycles].fill(None);
        let count = self.nodes.len();
        if let Some(roots) = &mut self.roots_of {
            roots.resize(count, id);
            roots[id.index()] = parent.map_or(id, |parent| roots[parent.index()]);
        }
        self.write(id, key, tokens);
        id
    }

    fn write(&mut self, id: NodeId, key: BlockKey, tokens: &[TokenId]) {
        let start = id.index() * self.block_tokens.get() as usize;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        let node = self.node_mut(id);
        (node.key, node.len) = (key, tokens.len() as u32);
    }

    /// Enters a block into the index and among its siblings.
    fn list(&mut self, parent: NodeId, id: NodeId) {
        let (nodes, key) = (&self.nodes, self.node(id).key.truncated());
        self.index.insert_unique(key, id, |other| nodes[other.index()].key.truncated());
        let top = self.insert_below(self.node(parent).children, id);
        self.node_mut(parent).children = Some(top);
    }

    fn unlist(&mut self, id: NodeId) {
        let key = self.node(id).key.truncated();
        if let Ok(entry) = self.index.find_entry(key, |other| *other == id) {
            entry.remove();
        }
        if let Some(parent) = self.node(id).parent {
            let top = self.remove_below(self.node(parent).children, id);
            self.node_mut(parent).children = top;
        }
        let node = self.node_mut(id);
        (node.before, node.after) = (None, None);
    }

    // -- siblings

    fn rank(&self, id: NodeId) -> (u64, NodeId) {
        (self.node(id).key.truncated(), id)
    }

    fn insert_below(&mut self, top: Option<NodeId>, new: NodeId) -> NodeId {
        let Some(top) = top else { return new };
        if self.rank(new) > self.rank(top) {
            let (before, after) = self.split(Some(top), new);
            let node = self.node_mut(new);
            (node.before, node.after) = (before, after);
            return new;
        }
        if self.tokens(new) < self.tokens(top) {
            let below = self.insert_below(self.node(top).before, new);
            self.node_mut(top).before = Some(below);
        } else {
            let below = self.insert_below(self.node(top).after, new);
            self.node_mut(top).after = Some(below);
        }
        top
    }

    /// Those before and those after `by`, each with its top.
    fn split(&mut self, top: Option<NodeId>, by: NodeId) -> (Option<NodeId>, Option<NodeId>) {
        let Some(top) = top else { return (None, None) };
        if self.tokens(top) < self.tokens(by) {
            let (before, after) = self.split(self.node(top).after, by);
            self.node_mut(top).after = before;
            (Some(top), after)
        } else {
            let (before, after) = self.split(self.node(top).before, by);
            self.node_mut(top).before = after;
            (before, Some(top))
        }
    }

    fn merge(&mut self, before: Option<NodeId>, after: Option<NodeId>) -> Option<NodeId> {
        let (Some(left), Some(right)) = (before, after) else { return before.or(after) };
        if self.rank(left) > self.rank(right) {
            let below = self.merge(self.node(left).after, Some(right));
            self.node_mut(left).after = below;
            Some(left)
        } else {
            let below = self.merge(Some(left), self.node(right).before);
            self.node_mut(right).before = below;
            Some(right)
        }
    }

    fn remove_below(&mut self, top: Option<NodeId>, gone: NodeId) -> Option<NodeId> {
        let top = top?;
        if top == gone {
            let Node { before, after, .. } = *self.node(gone);
            return self.merge(before, after);
        }
        if self.tokens(gone) < self.tokens(top) {
            let below = self.remove_below(self.node(top).before, gone);
            self.node_mut(top).before = below;
        } else {
            let below = self.remove_below(self.node(top).after, gone);
            self.node_mut(top).after = below;
        }
        Some(top)
    }

    /// `known(page, node, life_cycle)`: the page is there and says the same of itself. `open` are the last nodes of
    /// sequences that still commit, or of the last ones that did. `is_whole(node)`: full attention covers it.
    pub fn check(
        &self,
        known: impl Fn(PageId, NodeId, usize) -> bool,
        open: &BTreeSet<NodeId>,
        is_whole: impl Fn(NodeId) -> bool,
    ) -> Result<(), Violation> {
        let mut blocks = 0;
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.is_alive()) {
            let id = NodeId::at(index);
            let children = self.children(id);
            for (life_cycle, page) in self.links(id).iter().enumerate() {
                if page.is_some_and(|page| !known(page, id, life_cycle)) {
                    return Err(Violation::new("T1", format!("{id:?} names {page:?}, which says otherwise")));
                }
            }
            if children.is_empty() && self.links(id).iter().all(Option::is_none) && !open.contains(&id) {
                return Err(Violation::new("T3", format!("{id:?} has neither children nor a page")));
            }
            if node.len == self.block_tokens.get() && !is_whole(id) {
                return Err(Violation::new("T4", format!("{id:?} is not covered by full attention")));
            }
            for pair in children.windows(2) {
                let (first, second) = (self.tokens(pair[0]), self.tokens(pair[1]));
                if first >= second || second.starts_with(first) {
                    return Err(Violation::new("T2", format!("{:?} stands before {:?}", pair[0], pair[1])));
                }
            }
            match node.parent {
                None if self.scopes.contains_key(&id) => {}
                Some(parent) if self.node(parent).is_alive() && self.children(parent).contains(&id) => {
                    blocks += 1;
                    let grand = self.node(parent).parent;
                    if grand.is_some() && self.node(parent).len != self.block_tokens.get() {
                        return Err(Violation::new("11.12", format!("{parent:?} is not full and has children")));
                    }
                    let listed = self.index.find(node.key.truncated(), |other| *other == id).is_some();
                    if !listed || self.child(parent, self.tokens(id)) != Some(id) {
                        return Err(Violation::new("T1", format!("{id:?} is not found under its key")));
                    }
                }
                parent => return Err(Violation::new("11.12", format!("{id:?} hangs from {parent:?}"))),
            }
        }
        if blocks != self.index.len() {
            return Err(Violation::new("T1", format!("{blocks} blocks, {} in the index", self.index.len())));
        }
        Ok(())
    }
}
