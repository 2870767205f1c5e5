//! Forgetting a conversation or a scope: what nobody else has used leaves the tree, page by page.
//!
//! A block has an owner while only one conversation has used all of it: put it there, or reused it to its last token. What a
//! second conversation or a request without one uses is everybody's for good. Whoever uses a block uses those before it,
//! so an owner's blocks are whole subtrees: their topmost ones are enough to find all of them, whatever became of plans
//! and branches.

use super::ends::Touched;
use super::pages::PageId;
use super::sequence::{Committing, Sequence};
use super::store::{Path, Store};
use super::tree::{Inserted, NodeId};
use super::{Manager, Violation};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

/// A conversation while it owns blocks. Ids of conversations that own none any more are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OwnerId(NonZeroU32);

impl OwnerId {
    fn at(index: usize) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index as u32))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// What was forgotten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {
    /// Pages that the tree named. Those that sequences still hold go when they let go.
    pub pages: u32,
    pub blocks: u32,
    /// Open sequences: they publish nothing more, and what they hold goes when they close.
    pub pending_sequences: u32,
}

#[derive(Clone, Debug)]
struct Owner {
    conversation: ConversationKey,
    /// Its blocks whose parents are not its own.
    tops: BTreeSet<NodeId>,
}

/// Invariants: (F1) a block below an owned one has the same owner; (F2) an owner's tops are its blocks whose parents are not
/// its own, and it has some; (F3) what others used of the beginning of a block is noted of tops only, and is not all of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    ids: BTreeMap<ConversationKey, OwnerId>,
    slab: Vec<Owner>,
    vacant: Vec<OwnerId>,
    /// Leading tokens of an owned block that others have used as well.
    beginnings: BTreeMap<NodeId, u32>,
}

impl Owners {
    fn find(&self, conversation: Option<ConversationKey>) -> Option<OwnerId> {
        self.ids.get(&conversation?).copied()
    }

    /// The id of a conversation that is about to own a block.
    fn find_or_new(&mut self, conversation: ConversationKey) -> OwnerId {
        if let Some(id) = self.find(Some(conversation)) {
            return id;
        }
        let owner = Owner { conversation, tops: BTreeSet::new() };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slab[id.index()] = owner;
                id
            }
            None => {
                self.slab.push(owner);
                OwnerId::at(self.slab.len() - 1)
            }
        };
        self.ids.insert(conversation, id);
        id
    }

    fn add_top(&mut self, owner: OwnerId, node: NodeId) {
        self.slab[owner.index()].tops.insert(node);
    }

    /// The owner lost a block. With the last one goes the owner.
    fn remove_top(&mut self, owner: OwnerId, node: NodeId) {
        self.beginnings.remove(&node);
        let Owner { conversation, tops } = &mut self.slab[owner.index()];
        if tops.remove(&node) && tops.is_empty() {
            self.ids.remove(conversation);
            self.vacant.push(owner);
        }
    }

    pub fn conversation(&self, owner: OwnerId) -> ConversationKey {
        self.slab[owner.index()].conversation
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Bytes of everything kept of owners, about.
    pub fn bytes(&self) -> usize {
        let tops: usize = self.ids.values().map(|id| self.slab[id.index()].tops.len()).sum();
        let lists = self.slab.capacity() * size_of::<Owner>() + self.vacant.capacity() * size_of::<OwnerId>();
        lists
            + self.ids.len() * size_of::<(ConversationKey, OwnerId)>()
            + (tops + self.beginnings.len()) * size_of::<u64>()
    }
}

impl Store {
    // -- who has used what

    /// Puts a block under a full parent for a conversation that has used the parent; `None` where a longer block covers it.
    pub fn insert(
        &mut self,
        parent: NodeId,
        tokens: &[TokenId],
        conversation: Option<ConversationKey>,
    ) -> Option<NodeId> {
        let inserted = self.tree.insert(parent, tokens);
        if let Inserted::Here(node) | Inserted::New(node) | Inserted::Longer(node, _) = inserted {
            self.touched(node, Touched::Block);
        }
        match inserted {
            Inserted::Here(node) => {
                self.use_block(node, self.owners.find(conversation));
                Some(node)
            }
            Inserted::New(node) => {
                self.own(node, conversation);
                Some(node)
            }
            Inserted::Longer(node, had) => {
                let before = self.tree.owner(node);
                if before.is_none() || before != self.owners.find(conversation) {
                    self.own(node, conversation);
                    // What was there is somebody else's.
                    if self.tree.owner(node).is_some() {
                        self.owners.beginnings.insert(node, had);
                    }
                }
                Some(node)
            }
            Inserted::Useless(longer) => {
                self.use_beginning(longer, self.owners.find(conversation), tokens.len() as u32);
                None
            }
        }
    }

    /// The conversation is the only one that has used the block.
    fn own(&mut self, node: NodeId, conversation: Option<ConversationKey>) {
        // A new owner first: its id must not be the one that is about to be free.
        let owner = conversation.map(|conversation| self.owners.find_or_new(conversation));
        let above = self.tree.parent(node).and_then(|parent| self.tree.owner(parent));
        let before = self.tree.owner(node);
        self.tree.set_owner(node, owner);
        if let Some(owner) = owner.filter(|owner| above != Some(*owner)) {
            self.owners.add_top(owner, node);
        }
        if let Some(before) = before.filter(|before| Some(*before) != owner) {
            self.owners.remove_top(before, node);
        }
    }

    /// Someone uses all of a block: an owner, or whoever owns nothing. The blocks before it are used as well.
    fn use_block(&mut self, node: NodeId, user: Option<OwnerId>) {
        let Some(owner) = self.tree.owner(node).filter(|owner| user != Some(*owner)) else { return };
        self.tree.set_owner(node, None);
        for child in self.tree.children(node) {
            self.owners.add_top(owner, child);
        }
        self.owners.remove_top(owner, node);
    }

    fn use_beginning(&mut self, node: NodeId, user: Option<OwnerId>, tokens: u32) {
        if self.tree.owner(node).is_some_and(|owner| user != Some(owner)) {
            let used = self.owners.beginnings.entry(node).or_default();
            *used = tokens.max(*used);
        }
    }

    /// A new sequence reuses so much of a path.
    pub fn use_path(&mut self, path: &Path, reused: u32, conversation: Option<ConversationKey>) {
        let user = self.owners.find(conversation);
        let mut rest = reused;
        for &node in &path.nodes {
            let used = rest.min(self.tree.tokens(node).len() as u32);
            if used == 0 {
                return;
            }
            if used == self.tree.tokens(node).len() as u32 {
                self.use_block(node, user);
            } else {
                self.use_beginning(node, user, used);
            }
            rest -= used;
        }
    }

    /// Takes a leaf out of the tree. Its links were dealt with before.
    pub fn take_out(&mut self, node: NodeId) {
        if let Some(owner) = self.tree.owner(node) {
            self.owners.remove_top(owner, node);
        }
        self.tree.remove(node);
    }

    // -- forgetting

    /// Removes what only this conversation has used.
    fn forget_owner(&mut self, conversation: ConversationKey, forgotten: &mut Forgotten) {
        let Some(owner) = self.owners.find(Some(conversation)) else { return };
        let tops: Vec<NodeId> = self.owners.slab[owner.index()].tops.iter().copied().collect();
        for top in tops {
            let Some(parent) = self.tree.parent(top) else { continue };
            let shared = self.owners.beginnings.get(&top).copied().unwrap_or(0);
            let beginning = self.tree.tokens(top)[..shared as usize].to_vec();
            self.count_below(top, forgotten);
            let kept = self.take_beginning(top, shared);
            for node in self.tree.subtree(top) {
                self.remove_node(node);
            }
            forgotten.pages -= self.put_beginning(parent, &beginning, kept);
            self.may_be_bare(self.tree.reference(parent));
        }
    }

    fn forget_root(&mut self, scope: &Scope, forgotten: &mut Forgotten) {
        let Some(root) = self.tree.root(scope) else { return };
        self.count_below(root, forgotten);
        forgotten.blocks -= 1;
        for node in self.tree.subtree(root) {
            self.remove_node(node);
        }
    }

    fn count_below(&self, top: NodeId, forgotten: &mut Forgotten) {
        for node in self.tree.subtree(top) {
            forgotten.blocks += 1;
            forgotten.pages += self.tree.links(node).iter().flatten().count() as u32;
        }
    }

    /// Takes from a block the pages that serve the first `tokens` of it as well. A state is that of one position only.
    fn take_beginning(&mut self, node: NodeId, tokens: u32) -> Vec<Kept> {
        let mut kept = Vec::new();
        for life_cycle in 0..self.life_cycles() {
            let Some(page) = self.tree.link(node, usize::from(life_cycle)) else { continue };
            let covered = self.pages.get(page).covered;
            if tokens > 0 && (covered <= tokens || !self.life_cycle(life_cycle).is_state()) {
                self.log_removed(page);
                self.tree.set_link(node, usize::from(life_cycle), None);
                kept.push(Kept { life_cycle, page, covered: covered.min(tokens) });
            }
        }
        kept
    }

    /// Puts a block's beginning back, with its pages; how many of them there is use for.
    fn put_beginning(&mut self, parent: NodeId, tokens: &[TokenId], kept: Vec<Kept>) -> u32 {
        let node = if kept.is_empty() { None } else { self.insert(parent, tokens, None) };
        let Some(node) = node else {
            for kept in kept {
                self.unname(kept.page);
            }
            return 0;
        };
        for Kept { life_cycle, page, covered } in &kept {
            self.replace_link(node, *life_cycle, *page, *covered);
        }
        kept.len() as u32
    }

    pub fn check_owners(&self) -> Result<(), Violation> {
        let wrong = |id, text: String| Err(Violation::new(id, text));
        let mut tops: BTreeMap<OwnerId, BTreeSet<NodeId>> = BTreeMap::new();
        for node in self.tree.nodes() {
            let owner = self.tree.owner(node);
            let above = self.tree.parent(node).and_then(|parent| self.tree.owner(parent));
            if above.is_some() && above != owner {
                return wrong("F1", format!("{node:?} is of {owner:?}, its parent of {above:?}"));
            }
            if let Some(owner) = owner.filter(|owner| above != Some(*owner)) {
                tops.entry(owner).or_default().insert(node);
            }
        }
        let owners = &self.owners;
        for (conversation, owner) in &owners.ids {
            let there = &owners.slab[owner.index()];
            if there.conversation != *conversation || tops.remove(owner).as_ref() != Some(&there.tops) {
                return wrong("F2", format!("{conversation} has other blocks than {there:?}"));
            }
        }
        if !tops.is_empty() || owners.ids.len() + owners.vacant.len() != owners.slab.len() {
            return wrong("F2", format!("blocks of nobody: {tops:?}"));
        }
        for (node, tokens) in &owners.beginnings {
            let is_top = owners.ids.values().any(|owner| owners.slab[owner.index()].tops.contains(node));
            if !is_top || !(1..self.tree.tokens(*node).len() as u32).contains(tokens) {
                return wrong("F3", format!("others used {tokens} tokens of {node:?}"));
            }
        }
        Ok(())
    }
}

/// A page of a block's beginning.
struct Kept {
    life_cycle: u8,
    page: PageId,
    covered: u32,
}

impl Sequence {
    /// Publishes nothing more; what it kept for that, it lets go.
    fn be_forgotten(&mut self, store: &mut Store) {
        if self.committing == Committing::Publishes {
            self.committing = Committing::Records;
            self.release_stale(store);
        }
    }
}

impl Manager {
    /// Forgets a conversation: its turns, its plans, and all blocks that nobody else has used, on every tier. What another
    /// conversation or a request without one has used as well stays. Twice is the same as once.
    ///
    /// # Cost
    /// All open sequences, plans, and the blocks that go.
    pub fn forget_conversation(&mut self, conversation: ConversationKey) -> Forgotten {
        let pending_sequences = self.forget_sequences(|sequence| sequence.conversation == Some(conversation));
        let mut forgotten = Forgotten { pending_sequences, ..Forgotten::default() };
        self.forget_plans(Some(conversation), None);
        self.store.gone.forget(conversation);
        self.store.forget_owner(conversation, &mut forgotten);
        self.store.sweep();
        forgotten
    }

    /// Forgets everything of a scope: all its blocks, plans, and turns, of whatever conversation.
    ///
    /// # Cost
    /// As `forget_conversation`, and all conversations.
    pub fn forget_scope(&mut self, scope: &Scope) -> Forgotten {
        let pending_sequences = self.forget_sequences(|sequence| sequence.scope == *scope);
        let mut forgotten = Forgotten { pending_sequences, ..Forgotten::default() };
        self.forget_plans(None, Some(*scope));
        // Of what was evicted, nobody knows the scope.
        self.store.gone = super::explain::Gone::default();
        self.store.forget_root(scope, &mut forgotten);
        self.store.sweep();
        forgotten
    }

    fn forget_sequences(&mut self, is_meant: impl Fn(&Sequence) -> bool) -> u32 {
        let mut open = 0;
        for sequence in self.sequences.values_mut().filter(|sequence| is_meant(sequence)) {
            sequence.be_forgotten(&mut self.store);
            open += 1;
        }
        open
    }

    /// Conversations that are the only ones to have used some block.
    pub fn owners(&self) -> usize {
        self.store.owners.len()
    }
}
