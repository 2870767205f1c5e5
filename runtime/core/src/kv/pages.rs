//! The pool of device blocks: which are free, how many sequences use each of the others, which outlive their users.

use super::Violation;
use crate::ids::BlockId;

/// One block's book-keeping.
#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// Sequences that use the block.
    pins: u32,
    /// Those among them that keep a copy of their own and only want the node to stay.
    copies: u32,
    /// A tree node names the block, so it stays when the last sequence lets go.
    cached: bool,
}

/// Invariants: (P1) a block is on the free list exactly when it is neither pinned nor cached, and once at most;
/// (P2) `reusable` counts blocks that are cached and not pinned; (P3) held = total - free - reusable;
/// (P4) copies are pins, and a cached block that is pinned at all is pinned by one that reads it.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    pages: Vec<Page>,
    free: Vec<BlockId>,
    reusable: u32,
}

impl Pages {
    pub fn new(blocks: u32) -> Self {
        // Taken from the end, so the lowest block goes first.
        Self {
            pages: vec![Page::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            reusable: 0,
        }
    }

    pub fn total(&self) -> u32 {
        self.pages.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn reusable(&self) -> u32 {
        self.reusable
    }

    /// Blocks that a reservation can have: free ones, and those that eviction yields.
    pub fn available(&self) -> u32 {
        self.free() + self.reusable
    }

    pub fn pins(&self, block: BlockId) -> u32 {
        self.page(block).pins
    }

    pub fn is_cached(&self, block: BlockId) -> bool {
        self.page(block).cached
    }

    /// A free block, pinned once.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.page_mut(block).pins = 1;
        Some(block)
    }

    pub fn pin(&mut self, block: BlockId) {
        let page = self.page_mut(block);
        assert!(page.pins > 0 || page.cached, "{block} is free");
        page.pins += 1;
        if page.pins == 1 {
            self.reusable -= 1;
        }
    }

    /// Takes a pin away; the last one frees the block unless it is cached.
    pub fn unpin(&mut self, block: BlockId) {
        let page = self.page_mut(block);
        assert!(page.pins > 0, "{block} is not pinned");
        page.pins -= 1;
        match *page {
            Page { pins: 1.., .. } => {}
            Page { cached: true, .. } => self.reusable += 1,
            Page { cached: false, .. } => self.free.push(block),
        }
    }

    /// A pinned block that a tree node names from now on.
    pub fn cache(&mut self, block: BlockId) {
        let page = self.page_mut(block);
        assert!(page.pins > 0 && !page.cached, "{block} is free or cached already");
        page.cached = true;
    }

    /// One of the pins is by a sequence that keeps a copy.
    pub fn add_copy(&mut self, block: BlockId) {
        self.page_mut(block).copies += 1;
    }

    pub fn remove_copy(&mut self, block: BlockId) {
        self.page_mut(block).copies -= 1;
    }

    /// The block is pinned, but nobody reads it.
    pub fn is_only_copied(&self, block: BlockId) -> bool {
        let page = self.page(block);
        page.pins > 0 && page.pins == page.copies
    }

    /// `copy`, private to one of the sequences that pin `block`, takes its place; `block`, which nobody reads, is free.
    pub fn replace(&mut self, block: BlockId, copy: BlockId) {
        assert!(self.is_only_copied(block), "{block} is in use");
        let Page { pins, copies, cached } = std::mem::take(self.page_mut(block));
        self.free.push(block);
        *self.page_mut(copy) = Page { pins, copies: copies - 1, cached };
    }

    /// An unpinned block whose tree node is gone.
    pub fn evict(&mut self, block: BlockId) {
        let page = self.page_mut(block);
        assert!(page.pins == 0 && page.cached, "{block} is pinned or not cached");
        page.cached = false;
        self.reusable -= 1;
        self.free.push(block);
    }

    pub fn check(&self) -> Result<(), Violation> {
        let mut listed = vec![false; self.pages.len()];
        for block in &self.free {
            if std::mem::replace(&mut listed[block.0 as usize], true) {
                return Err(Violation::new("P1", format!("{block} is twice on the free list")));
            }
        }
        for (at, (page, listed)) in self.pages.iter().zip(listed).enumerate() {
            if listed != (page.pins == 0 && !page.cached) {
                return Err(Violation::new("P1", format!("block {at}: on the free list {listed}, {page:?}")));
            }
        }
        let unread = |page: &Page| page.cached && page.pins > 0 && page.copies == page.pins;
        if let Some(at) = self.pages.iter().position(|page| page.copies > page.pins || unread(page)) {
            return Err(Violation::new("P4", format!("block {at}: {:?}", self.pages[at])));
        }
        let reusable = self.pages.iter().filter(|p| p.pins == 0 && p.cached).count();
        if reusable != self.reusable as usize {
            return Err(Violation::new("P2", format!("{reusable} reusable blocks, counted {}", self.reusable)));
        }
        Ok(())
    }

    fn page(&self, block: BlockId) -> &Page {
        &self.pages[block.0 as usize]
    }

    fn page_mut(&mut self, block: BlockId) -> &mut Page {
        &mut self.pages[block.0 as usize]
    }
}
