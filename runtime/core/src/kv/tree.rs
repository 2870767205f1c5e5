//! The prefix tree: every reusable full block under the key of the prefix it ends.
//!
//! A node has no list of its children: a child is found by its own key, so wide fan-out costs nothing. It knows the newest of
//! them, so that a conversation that goes on finds its way by comparing tokens, without hashing what it said before.

use super::Violation;
use super::identity::BlockKey;
use crate::ids::{BlockId, TokenId};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(u32);

#[derive(Clone, Debug)]
struct Node {
    key: BlockKey,
    parent: Option<NodeId>,
    tokens: Box<[TokenId]>,
    block: BlockId,
    children: u32,
    /// The child that came last; its place may have gone to another since.
    newest_child: Option<NodeId>,
    /// When a sequence last let go of it, in uses of the manager.
    last_use: u64,
}

/// What the tree says about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Found(NodeId),
    Absent,
    /// Another block has the same truncated key. Both cannot be in the tree; the first one stays.
    Occupied,
}

/// The truncated key is a uniform hash already.
#[derive(Clone, Copy, Debug, Default)]
struct Truncated(u64);

impl Hasher for Truncated {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// Invariants: (T1) a node's parent is in the tree; (T2) `index` names every node under its truncated key;
/// (T3) `evictable` holds exactly the unpinned nodes without children, under their last use; (T4) a pinned node's
/// parent is pinned.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    index: HashMap<u64, NodeId, BuildHasherDefault<Truncated>>,
    evictable: BTreeSet<(u64, NodeId)>,
}

impl Tree {
    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn block(&self, id: NodeId) -> BlockId {
        self.node(id).block
    }

    /// The key that children of `id` hang from.
    pub fn key(&self, id: NodeId) -> BlockKey {
        self.node(id).key
    }

    /// The block `tokens` with key `key` under `parent`. The whole key and the tokens must agree: a collision of keys
    /// can cost a reuse, never hand out a stranger's block.
    pub fn find(&self, parent: Option<NodeId>, key: &BlockKey, tokens: &[TokenId]) -> Lookup {
        let Some(&id) = self.index.get(&key.truncated()) else {
            return Lookup::Absent;
        };
        let node = self.node(id);
        if node.key == *key && node.parent == parent && *node.tokens == *tokens {
            Lookup::Found(id)
        } else {
            Lookup::Occupied
        }
    }

    /// The newest child of `parent`, if it is the block `tokens`.
    pub fn newest_child(&self, parent: NodeId, tokens: &[TokenId]) -> Option<NodeId> {
        let id = self.node(parent).newest_child?;
        let child = self.nodes[id.0 as usize].as_ref()?;
        (child.parent == Some(parent) && *child.tokens == *tokens).then_some(id)
    }

    /// Puts a block that `find` called absent under a pinned `parent`. Its own block is pinned too.
    pub fn insert(&mut self, parent: Option<NodeId>, key: BlockKey, tokens: &[TokenId], block: BlockId) -> NodeId {
        let node = Node { key, parent, tokens: tokens.into(), block, children: 0, newest_child: None, last_use: 0 };
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                self.nodes.push(None);
                NodeId(self.nodes.len() as u32 - 1)
            }
        };
        self.nodes[id.0 as usize] = Some(node);
        let before = self.index.insert(key.truncated(), id);
        assert!(before.is_none(), "two nodes under {key:?}");
        if let Some(parent) = parent {
            let parent = self.node_mut(parent);
            (parent.children, parent.newest_child) = (parent.children + 1, Some(id));
        }
        id
    }

    /// Another block holds the same KV.
    pub fn replace_block(&mut self, id: NodeId, block: BlockId) {
        self.node_mut(id).block = block;
    }

    /// The node's block is pinned from now on.
    pub fn keep(&mut self, id: NodeId) {
        let last_use = self.node(id).last_use;
        self.evictable.remove(&(last_use, id));
    }

    /// The node's block is not pinned any more. `last_use: None` leaves its place in the order as it was.
    pub fn let_go(&mut self, id: NodeId, last_use: Option<u64>) {
        let node = self.node_mut(id);
        node.last_use = last_use.unwrap_or(node.last_use);
        if node.children == 0 {
            let entry = (node.last_use, id);
            self.evictable.insert(entry);
        }
    }

    /// A sequence lets go of the node while others keep it.
    pub fn touch(&mut self, id: NodeId, last_use: u64) {
        self.node_mut(id).last_use = last_use;
    }

    /// Removes the leaf that was let go longest ago. Its parent, if now a leaf and unpinned, is next in its own turn.
    pub fn evict(&mut self, unpinned: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let (_, id) = self.evictable.pop_first()?;
        let node = self.nodes[id.0 as usize].take()?;
        self.index.remove(&node.key.truncated());
        self.vacant.push(id);
        if let Some(parent_id) = node.parent {
            let parent = self.node_mut(parent_id);
            parent.children -= 1;
            if parent.children == 0 && unpinned(parent.block) {
                let entry = (parent.last_use, parent_id);
                self.evictable.insert(entry);
            }
        }
        Some(node.block)
    }

    /// Leading keys of `chain` that the tree holds.
    ///
    /// # Cost
    /// A logarithmic number of look-ups: a node's ancestors are always present (T1).
    pub fn probe(&self, chain: &[u64]) -> usize {
        chain.partition_point(|key| self.index.contains_key(key))
    }

    pub fn check(&self, pins: impl Fn(BlockId) -> u32) -> Result<(), Violation> {
        let mut children = vec![0u32; self.nodes.len()];
        let mut evictable = BTreeSet::new();
        let mut count = 0;
        for (id, node) in self.present() {
            count += 1;
            if self.index.get(&node.key.truncated()) != Some(&id) {
                return Err(Violation::new("T2", format!("{id:?} is not in the index")));
            }
            if let Some(parent) = node.parent {
                let Some(above) = self.nodes.get(parent.0 as usize).and_then(Option::as_ref) else {
                    return Err(Violation::new("T1", format!("{id:?} hangs from {parent:?}, which is gone")));
                };
                children[parent.0 as usize] += 1;
                if pins(node.block) > 0 && pins(above.block) == 0 {
                    return Err(Violation::new("T4", format!("{id:?} is pinned, its parent {parent:?} is not")));
                }
            }
            if pins(node.block) == 0 && node.children == 0 {
                evictable.insert((node.last_use, id));
            }
        }
        if count != self.index.len() {
            return Err(Violation::new("T2", format!("{count} nodes, {} in the index", self.index.len())));
        }
        if let Some((id, node)) = self.present().find(|(id, node)| node.children != children[id.0 as usize]) {
            return Err(Violation::new("T1", format!("{id:?} counts {} children wrongly", node.children)));
        }
        if evictable != self.evictable {
            return Err(Violation::new("T3", format!("evictable {:?}, should be {evictable:?}", self.evictable)));
        }
        Ok(())
    }

    /// The blocks that nodes name, each with its node's place.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.present().map(|(_, node)| node.block)
    }

    fn present(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().filter_map(|(at, node)| Some((NodeId(at as u32), node.as_ref()?)))
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize].as_ref().expect("a node is named only while it is in the tree")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize].as_mut().expect("a node is named only while it is in the tree")
    }
}
