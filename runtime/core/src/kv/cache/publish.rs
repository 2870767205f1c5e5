//! Committing: how a sequence's blocks become prefixes that others find.

use super::config::Error;
use super::pages::PageId;
use super::sequence::{Committing, Owned, Sequence, SequenceId};
use super::store::{Copy, Store};
use super::tree::NodeId;
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// Whether the sequence goes on after a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum After {
    GoesOn,
    /// Nothing is written any more, so a block that is not full is published without a copy.
    Ends,
}

/// A page to be published: whose, and where.
struct Published {
    node: NodeId,
    life_cycle: u8,
    block: u32,
    covered: u32,
}

impl Sequence {
    /// # Errors
    /// The commit is beyond the capacity, or only end points are committed and the history is at neither of its ends.
    pub fn may_commit(&self, store: &Store, id: SequenceId, tokens: &[TokenId]) -> Result<(), Error> {
        if self.committing == Committing::Stopped {
            return Err(Error::Stopped { sequence: id });
        }
        if self.phase != super::sequence::Phase::Active {
            return Err(Error::NotActive { sequence: id });
        }
        let from = self.committed();
        let to = u64::from(from) + tokens.len() as u64;
        let (starts, ends) = (from == self.history, to == u64::from(self.history));
        if store.commits_end_points() && !starts && !ends {
            return Err(Error::OffHistory { from, to: to as u32, history: self.history });
        }
        if to > u64::from(self.capacity) {
            return Err(Error::BeyondCapacity { to, capacity: self.capacity });
        }
        Ok(())
    }

    /// Publishes the tokens that follow. What cannot be published is recorded all the same.
    pub fn commit(&mut self, store: &mut Store, tokens: &[TokenId], after: After, copies: &mut Vec<Copy>) {
        let from = self.committed();
        self.tokens.extend_from_slice(tokens);
        self.history = self.history.max(self.committed());
        if self.committing == Committing::Publishes {
            self.attach_again(store);
            match store.commits_end_points() {
                true => self.publish_end_point(store, from, after, copies),
                false => self.publish_full(store, from, |_, _, _| true),
            }
        }
        self.release_stale(store);
        if after == After::Ends {
            self.stop(store);
        }
    }

    /// Publishes the last block if it is not full, and commits nothing more.
    pub fn stop(&mut self, store: &mut Store) {
        if self.committing == Committing::Stopped {
            return;
        }
        let tail = self.committed() % store.config.block_tokens;
        // End points are published by the commit that makes them.
        let publishes = self.committing == Committing::Publishes && self.resumed && !store.commits_end_points();
        let has_tail = publishes && tail > 0;
        if has_tail {
            self.attach_again(store);
        }
        if let Some((node, block)) = if has_tail { self.insert_tail(store) } else { None } {
            for life_cycle in store.published() {
                if let Some(page) = self.unpublished(store, block, life_cycle) {
                    store.link(node, life_cycle, page.page, tail);
                }
            }
            store.fades(store.tree.reference(node));
        }
        if let Some(last) = self.path.last() {
            store.fades(*last);
        }
        self.committing = Committing::Stopped;
        self.release_stale(store);
    }

    /// Puts those of the sequence's blocks back into the tree that went from it, with the pages that it still holds. A block
    /// goes although it is in use where nobody could resume at it, as when its snapshot was evicted.
    fn attach_again(&mut self, store: &mut Store) {
        // A block that is there has all blocks before it.
        if self.path.last().is_none_or(|last| store.tree.resolve(*last).is_some()) {
            return;
        }
        let block_tokens = store.block_tokens() as usize;
        let there = self.path.partition_point(|node| store.tree.resolve(*node).is_some());
        let mut parent = match self.path[..there].last().and_then(|node| store.tree.resolve(*node)) {
            Some(node) => node,
            None => store.tree.root_or_new(&self.scope),
        };
        for block in there..self.path.len() {
            let tokens = &self.tokens[block * block_tokens..][..block_tokens];
            let Some(node) = store.insert(parent, tokens, self.conversation) else { return };
            self.path[block] = store.tree.reference(node);
            for life_cycle in store.published() {
                let owned = self.owned(block as u32, life_cycle).map(|owned| owned.page);
                let lost = |page: &PageId| {
                    let page = store.pages.get(*page);
                    page.is_committed() && page.node.is_none()
                };
                if let Some(page) = owned.filter(lost) {
                    store.link(node, life_cycle, page, store.block_tokens());
                }
            }
            parent = node;
        }
    }

    /// Where the sequence's next block hangs from; `None` if what came before is gone from the tree.
    fn last_node(&self, store: &mut Store) -> Option<NodeId> {
        match self.path.last() {
            Some(node) => store.tree.resolve(*node),
            None => Some(store.tree.root_or_new(&self.scope)),
        }
    }

    fn unpublished(&self, store: &Store, block: u32, life_cycle: u8) -> Option<Owned> {
        self.owned(block, life_cycle).filter(|owned| !store.pages.get(owned.page).is_committed())
    }

    /// Puts the block that is not full into the tree.
    fn insert_tail(&mut self, store: &mut Store) -> Option<(NodeId, u32)> {
        let block = self.path.len() as u32;
        let tokens = &self.tokens[block as usize * store.block_tokens() as usize..];
        let parent = self.last_node(store)?;
        store.insert(parent, tokens, self.conversation).map(|node| (node, block))
    }

    /// Publishes the full blocks from that of token `from` on, for the life cycles that are `wanted`.
    fn publish_full(&mut self, store: &mut Store, from: u32, wanted: impl Fn(&Store, u32, u8) -> bool) {
        let block_tokens = store.block_tokens() as usize;
        for block in from / block_tokens as u32..self.committed() / block_tokens as u32 {
            // Without what came before, nothing can be found: stop publishing.
            let Some(parent) = self.last_node(store) else {
                self.committing = Committing::Records;
                return;
            };
            let tokens = &self.tokens[block as usize * block_tokens..][..block_tokens];
            let Some(node) = store.insert(parent, tokens, self.conversation) else {
                self.committing = Committing::Records;
                return;
            };
            self.path.push(store.tree.reference(node));
            for life_cycle in store.published() {
                if wanted(store, block, life_cycle) {
                    self.publish_page(store, node, block, life_cycle);
                }
            }
        }
    }

    /// Names the sequence's page at a full block, or takes the one that is named there already.
    fn publish_page(&mut self, store: &mut Store, node: NodeId, block: u32, life_cycle: u8) {
        let Some(own) = self.unpublished(store, block, life_cycle) else { return };
        if store.link(node, life_cycle, own.page, store.block_tokens()) {
            return;
        }
        let Some(there) = store.tree.link(node, usize::from(life_cycle)) else { return };
        if store.pages.get(there).place.tier > 0 {
            // The same bytes, nearer.
            return store.replace_link(node, life_cycle, own.page, store.block_tokens());
        }
        let row = self.row(block, life_cycle);
        let retention = store.life_cycle(life_cycle).retention;
        let is_stale = retention.stale(self.history, store.config.block_tokens).contains(&block);
        self.rows[row] = None;
        if !is_stale {
            store.pages.hold(there);
            if own.locked {
                store.pages.lock(there);
            }
            self.rows[row] = Some(Owned { page: there, locked: own.locked });
            self.rebased.push((life_cycle, block));
        }
        store.release(own.page, own.locked);
    }

    /// Publishes what a sequence needs to resume at the committed length, and nothing else.
    fn publish_end_point(&mut self, store: &mut Store, from: u32, after: After, copies: &mut Vec<Copy>) {
        let end = self.committed();
        let block_tokens = store.config.block_tokens;
        let is_live = move |store: &Store, block: u32, life_cycle: u8| {
            store.life_cycle(life_cycle).retention.is_live(block, end, block_tokens)
        };
        self.publish_full(store, from, is_live);
        if self.committing == Committing::Publishes {
            self.ends.push(end);
        }
        self.release_stale(store);
        if self.committing != Committing::Publishes || end == 0 {
            return;
        }
        let covered = end % block_tokens;
        let node = match covered {
            0 => self.path.last().and_then(|node| store.tree.resolve(*node)),
            _ => match self.insert_tail(store) {
                Some((node, _)) => Some(node),
                None => {
                    self.committing = Committing::Records;
                    None
                }
            },
        };
        let Some(node) = node else { return };
        if covered > 0 {
            store.may_be_bare(store.tree.reference(node));
        }
        let mut published: Vec<Published> = Vec::new();
        if covered > 0 {
            let block = end / block_tokens;
            let live = store.published().filter(|life_cycle| is_live(store, block, *life_cycle));
            published.extend(live.map(|life_cycle| Published { node, life_cycle, block, covered }));
        }
        if let Some(life_cycle) = store.recurrent().filter(|_| end > from) {
            let block = (end - 1) / block_tokens;
            published.push(Published { node, life_cycle, block, covered: end - block * block_tokens.get() });
        }
        published.retain(|page| {
            let there = store.tree.link(page.node, usize::from(page.life_cycle));
            there.is_none_or(|there| store.pages.get(there).covered < page.covered)
        });
        match after {
            After::Ends => self.publish_pages(store, &published),
            After::GoesOn => self.publish_copies(store, &published, copies),
        }
    }

    fn source(&self, store: &Store, page: &Published) -> Option<Owned> {
        match store.life_cycle(page.life_cycle).is_state() {
            true => self.state,
            false => self.owned(page.block, page.life_cycle),
        }
    }

    /// The sequence's own pages are published.
    fn publish_pages(&mut self, store: &mut Store, published: &[Published]) {
        for page in published {
            if let Some(source) = self.source(store, page) {
                store.link(page.node, page.life_cycle, source.page, page.covered);
            }
        }
    }

    /// Copies are published; the sequence goes on writing to its own pages. Without room for all, none is: an end point
    /// that lacks a page would be of no use.
    fn publish_copies(&mut self, store: &mut Store, published: &[Published], copies: &mut Vec<Copy>) {
        let mut wanted = vec![0; usize::from(store.pages.groups())];
        for page in published {
            wanted[usize::from(store.life_cycle(page.life_cycle).group)] += 1;
        }
        if !store.fits(0, &wanted, &Default::default()) {
            return;
        }
        let nodes: Vec<_> = published.iter().map(|page| store.tree.reference(page.node)).collect();
        store.make_way(self.scope, &wanted);
        store.make_room(0, &wanted, copies);
        for (page, node) in published.iter().zip(nodes) {
            // Making room may have taken the block itself.
            let (Some(_), Some(source)) = (store.tree.resolve(node), self.source(store, page)) else { continue };
            let copy = self.allocate(store, page.life_cycle, page.block);
            copies.push(Copy { from: store.pages.get(source.page).place, to: store.pages.get(copy).place });
            store.link(page.node, page.life_cycle, copy, page.covered);
            store.release(copy, true);
        }
    }
}
