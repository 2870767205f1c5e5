//! One request's sequence: what it holds, and how it grows, rests and ends.
//!
//! A suspended sequence holds its pages; an active one has those it needs locked on the device. Committed tokens K,
//! history H (tokens with no query left to run) and capacity C (tokens that may be stored): K <= H <= C.

use super::config::Error;
use super::eviction::{Change, Queued};
use super::hint::{Hint, Request};
use super::pages::PageId;
use super::store::{Copy, Path, Store};
use super::tree::NodeRef;
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// What the caller calls a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    Suspended,
    Active,
}

/// What a new sequence found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    pub reused_tokens: u32,
    /// How far the content is known, whatever became of its pages.
    pub path_tokens: u32,
    /// How far it were reusable if every position had a snapshot.
    pub reusable_before_states_tokens: u32,
    /// Optional life cycles that are complete, so that the first resume may restore them.
    pub restorable: Vec<u8>,
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    pub committed: u32,
    pub history: u32,
    pub capacity: u32,
    pub phase: Phase,
}

/// A page as a sequence has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owned {
    pub page: PageId,
    pub locked: bool,
}

/// What a commit still does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Committing {
    Publishes,
    /// Tokens are counted, but nothing more is published: the tree knows better, or has forgotten what came before.
    Records,
    Stopped,
}

/// Whether a sequence lets go of a stale page, or keeps it for a later commit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stale {
    Keep,
    Go,
}

#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub scope: Scope,
    /// The committed ones.
    pub tokens: Vec<TokenId>,
    pub history: u32,
    pub capacity: u32,
    pub phase: Phase,
    /// Was resumed once: what it writes to is its own.
    pub resumed: bool,
    pub committing: Committing,
    pub conversation: Option<ConversationKey>,
    pub hint: Option<Hint>,
    /// Lengths that it published as end points.
    pub ends: Vec<u32>,
    /// The tree's nodes of its committed full blocks.
    pub path: Vec<NodeRef>,
    /// A row of life cycles for each block.
    pub rows: Vec<Option<Owned>>,
    pub state: Option<Owned>,
    /// Life cycle and block of pages that were replaced by ones published before.
    pub rebased: Vec<(u8, u32)>,
    /// For each life cycle, the block before which no stale block has a page.
    cleared: Vec<u32>,
    pub restorable: Vec<u8>,
    width: usize,
}

impl Sequence {
    /// Holds what a new sequence of these tokens can reuse.
    pub fn open(store: &mut Store, request: Request<'_>) -> (Self, Opened) {
        let Request { scope, tokens, conversation, reusable_tokens } = request;
        let path = store.matched(&scope, tokens, &[]);
        let backoff = store.config.match_backoff_tokens;
        let reused = store.reusable(&path, backoff);
        let width = usize::from(store.life_cycles());
        let cleared =
            store.config.life_cycles.iter().map(|one| one.retention.stale(u32::MAX, store.config.block_tokens));
        let mut sequence = Self {
            scope,
            tokens: tokens[..reused as usize].to_vec(),
            history: reused,
            capacity: reused,
            phase: Phase::Suspended,
            resumed: false,
            committing: Committing::Publishes,
            conversation,
            hint: Some(Hint {
                reusable_tokens: reusable_tokens.unwrap_or(tokens.len() as u32),
                rewind_tokens: store.config.endpoint_rewind_tokens,
            })
            .filter(|hint| hint.rewind_tokens > 0),
            ends: Vec::new(),
            path: path.nodes[..(reused / store.config.block_tokens) as usize]
                .iter()
                .map(|node| store.tree.reference(*node))
                .collect(),
            rows: vec![None; reused.div_ceil(store.block_tokens()) as usize * width],
            state: None,
            rebased: Vec::new(),
            cleared: cleared.map(|stale| stale.start).collect(),
            restorable: Vec::new(),
            width,
        };
        store.use_path(&path, reused, conversation);
        sequence.hold_reused(store, &path, reused);
        let opened = Opened {
            reused_tokens: reused,
            path_tokens: path.tokens,
            reusable_before_states_tokens: store.reusable_before_states(&path, backoff),
            restorable: sequence.restorable.clone(),
        };
        (sequence, opened)
    }

    fn hold_reused(&mut self, store: &mut Store, path: &Path, reused: u32) {
        for life_cycle in store.published() {
            if !store.life_cycle(life_cycle).is_required() && store.is_complete(path, life_cycle, reused) {
                self.restorable.push(life_cycle);
            }
        }
        for Reused { life_cycle, block, page } in reused_pages(store, path, reused) {
            let owned = Some(self.hold(store, page));
            match block {
                Some(block) => {
                    let row = self.row(block, life_cycle);
                    self.rows[row] = owned;
                }
                None => self.state = owned,
            }
        }
    }

    /// The pages that a new sequence of these tokens would hold, last block first.
    pub fn reused_pages(store: &Store, scope: &Scope, tokens: &[TokenId]) -> Vec<PageId> {
        let path = store.matched(scope, tokens, &[]);
        let mut pages = reused_pages(store, &path, store.reusable(&path, store.config.match_backoff_tokens));
        // The state, which is in no block, is let go last.
        pages.sort_by_key(|page| std::cmp::Reverse(page.block));
        pages.into_iter().map(|page| page.page).collect()
    }

    fn hold(&self, store: &mut Store, page: PageId) -> Owned {
        store.pages.hold(page);
        store.note_interest(page, self.conversation);
        Owned { page, locked: false }
    }

    pub fn committed(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn standing(&self) -> Standing {
        Standing { committed: self.committed(), history: self.history, capacity: self.capacity, phase: self.phase }
    }

    pub fn row(&self, block: u32, life_cycle: u8) -> usize {
        block as usize * self.width + usize::from(life_cycle)
    }

    pub fn blocks(&self) -> u32 {
        (self.rows.len() / self.width) as u32
    }

    pub fn owned(&self, block: u32, life_cycle: u8) -> Option<Owned> {
        self.rows.get(self.row(block, life_cycle)).copied().flatten()
    }

    fn life_cycle_of(&self, row: usize) -> u8 {
        (row % self.width) as u8
    }

    fn block_of(&self, row: usize) -> u32 {
        (row / self.width) as u32
    }

    // -- resume

    /// Locks what the sequence needs on the device; `false`, and nothing is changed, where it does not fit.
    pub fn resume(&mut self, store: &mut Store, restored: &[u8], copies: &mut Vec<Copy>) -> Result<bool, Error> {
        let wrong = restored.iter().find(|life_cycle| !self.restorable.contains(life_cycle));
        if let Some(&life_cycle) = wrong.filter(|_| !self.resumed) {
            return Err(Error::NotSelectable { life_cycle });
        }
        if store.is_fuller_than(store.config.utilisation_ppm_max) {
            return Ok(false);
        }
        let fresh = if self.resumed { Vec::new() } else { self.fresh(store, restored) };
        let rows = self.needed_rows(store, restored);
        let mut wanted = vec![0; usize::from(store.pages.groups())];
        for (life_cycle, _) in &fresh {
            wanted[usize::from(store.life_cycle(*life_cycle).group)] += 1;
        }
        let made = wanted.clone();
        let pages = rows.iter().map(|row| self.rows[*row]).chain([self.state]).flatten();
        let pages: Vec<PageId> = pages.map(|owned| owned.page).collect();
        for &page in &pages {
            let place = store.pages.get(page).place;
            wanted[usize::from(place.group)] += u32::from(place.tier > 0);
            // What is on the device already stays there.
            store.pages.claim(page, place.tier == 0);
        }
        if !store.fits(0, &wanted, &Change::default()) {
            for page in pages {
                store.pages.claim(page, false);
            }
            return Ok(false);
        }
        for &page in &pages {
            if store.pages.get(page).place.tier == 0 {
                store.pages.lock(page);
            }
        }
        store.make_way(self.scope, &made);
        store.make_room(0, &wanted, copies);
        for &page in &pages {
            if store.pages.get(page).place.tier > 0 {
                store.move_page(page, 0, copies);
                store.pages.lock(page);
            }
        }
        for row in rows {
            lock(&mut self.rows[row]);
        }
        lock(&mut self.state);
        self.add_fresh(store, fresh, copies);
        (self.resumed, self.phase) = (true, Phase::Active);
        Ok(true)
    }

    /// What is reused of a life cycle is read where it lies.
    fn is_kept(store: &Store, life_cycle: u8, restored: &[u8]) -> bool {
        let one = store.life_cycle(life_cycle);
        one.is_published() && (one.is_required() || restored.contains(&life_cycle))
    }

    /// Pages that the first resume allocates, each with its block: a copy of the last block if it is not full, windows
    /// that nothing is restored of, and the state that is written to.
    pub fn fresh(&self, store: &Store, restored: &[u8]) -> Vec<(u8, Option<u32>)> {
        let block_tokens = store.config.block_tokens;
        let length = self.committed();
        let mut fresh = Vec::new();
        for life_cycle in store.attention() {
            if !Self::is_kept(store, life_cycle, restored) {
                let live = store.life_cycle(life_cycle).retention.live(length, block_tokens);
                fresh.extend(live.map(|block| (life_cycle, Some(block))));
            } else if length % block_tokens > 0 {
                fresh.push((life_cycle, Some(length / block_tokens)));
            }
        }
        fresh.extend(store.recurrent().map(|life_cycle| (life_cycle, None)));
        fresh
    }

    /// Rows whose pages a resume locks.
    pub fn needed_rows(&self, store: &Store, restored: &[u8]) -> Vec<usize> {
        let held = (0..self.rows.len()).filter(|row| self.rows[*row].is_some());
        let needed = held.filter(|row| {
            let (block, life_cycle) = (self.block_of(*row), self.life_cycle_of(*row));
            if !self.resumed {
                return Self::is_kept(store, life_cycle, restored);
            }
            let stale = store.life_cycle(life_cycle).retention.stale(self.history, store.config.block_tokens);
            !stale.contains(&block)
        });
        needed.collect()
    }

    fn add_fresh(&mut self, store: &mut Store, fresh: Vec<(u8, Option<u32>)>, copies: &mut Vec<Copy>) {
        let mut sources = Vec::new();
        for (life_cycle, block) in fresh {
            let owned = Owned { page: self.allocate(store, life_cycle, block.unwrap_or(0)), locked: true };
            let before = match block {
                Some(block) => {
                    let row = self.row(block, life_cycle);
                    self.rows[row].replace(owned)
                }
                None => self.state.replace(owned),
            };
            let Some(source) = before else { continue };
            if source.locked {
                copies.push(Copy { from: store.pages.get(source.page).place, to: store.pages.get(owned.page).place });
            }
            sources.push(source);
        }
        for Owned { page, locked } in sources {
            store.release(page, locked);
        }
    }

    // -- resize

    /// Sets capacity and history at once; `false`, and nothing is changed, where the new blocks do not fit.
    pub fn resize(
        &mut self,
        store: &mut Store,
        (capacity, history): (u32, u32),
        copies: &mut Vec<Copy>,
    ) -> Result<bool, Error> {
        if history < self.history {
            return Err(Error::HistoryWentBack { from: self.history, to: history });
        }
        if capacity < history {
            return Err(Error::CapacityBelowHistory { capacity, history });
        }
        let blocks = capacity.div_ceil(store.block_tokens());
        let mut wanted = vec![0u32; usize::from(store.pages.groups())];
        for life_cycle in store.attention() {
            let (first, second) = self.added(store, life_cycle, (blocks, history));
            let group = &mut wanted[usize::from(store.life_cycle(life_cycle).group)];
            *group = group.saturating_add((first.len() + second.len()) as u32);
        }
        if (0u8..).zip(&wanted).any(|(group, wanted)| *wanted > store.pages.slots(0, group)) {
            return Ok(false);
        }
        let cut = (blocks as usize * self.width).min(self.rows.len());
        let grows = wanted.iter().any(|wanted| *wanted > 0);
        if grows && !self.fits_after(store, cut, history, &wanted) {
            return Ok(false);
        }
        self.let_go(store, cut);
        self.rows.truncate(cut);
        let passed = history > self.history;
        (self.history, self.capacity) = (history, capacity);
        if passed {
            self.release_stale(store);
        }
        store.make_way(self.scope, &wanted);
        store.make_room(0, &wanted, copies);
        let mut new: Vec<(u32, u8)> = Vec::new();
        for life_cycle in store.attention() {
            let (first, second) = self.added(store, life_cycle, (blocks, history));
            new.extend(first.chain(second).map(|block| (block, life_cycle)));
        }
        new.sort_unstable();
        self.rows.resize(blocks as usize * self.width, None);
        for (block, life_cycle) in new {
            let row = self.row(block, life_cycle);
            self.rows[row] = Some(Owned { page: self.allocate(store, life_cycle, block), locked: true });
        }
        Ok(true)
    }

    /// Blocks that are new with so many, those apart that are out of the window at once: the ones before and after these.
    fn added(&self, store: &Store, life_cycle: u8, (blocks, history): (u32, u32)) -> (Range<u32>, Range<u32>) {
        let stale = store.life_cycle(life_cycle).retention.stale(history, store.config.block_tokens);
        let from = self.blocks().min(blocks);
        (from..stale.start.clamp(from, blocks), stale.end.clamp(from, blocks)..blocks)
    }

    /// Whether there is room once the rows from `cut` on and those that `history` makes stale are let go.
    fn fits_after(&self, store: &mut Store, cut: usize, history: u32, wanted: &[u32]) -> bool {
        let mut change = Change::default();
        let mut claimed = Vec::new();
        for owned in self.rows[cut..].iter().flatten() {
            foresee_release(store, *owned, &mut change, &mut claimed);
        }
        let stale = if history > self.history { self.stale_rows(store, history) } else { Vec::new() };
        for (row, fate) in stale.into_iter().filter(|(row, _)| *row < cut) {
            match (self.rows[row], fate) {
                (Some(owned), Stale::Go) => foresee_release(store, owned, &mut change, &mut claimed),
                (Some(owned), Stale::Keep) => foresee_unlock(store, owned, &mut change),
                (None, _) => {}
            }
        }
        let fits = store.fits(0, wanted, &change);
        for page in claimed {
            store.pages.claim(page, false);
        }
        fits
    }

    /// Rows with pages that no query from `history` on reads, by block.
    fn stale_rows(&self, store: &Store, history: u32) -> Vec<(usize, Stale)> {
        let mut stale = Vec::new();
        for life_cycle in store.attention() {
            let one = store.life_cycle(life_cycle);
            let range = one.retention.stale(history, store.config.block_tokens);
            let first = range.start.max(self.cleared[usize::from(life_cycle)]);
            for block in first..range.end.min(self.blocks()) {
                let Some(owned) = self.owned(block, life_cycle) else { continue };
                let keeps =
                    one.is_published() && !store.pages.get(owned.page).is_committed() && self.keeps_for_commit(store);
                stale.push((self.row(block, life_cycle), if keeps { Stale::Keep } else { Stale::Go }));
            }
        }
        stale.sort_unstable_by_key(|(row, _)| *row);
        stale
    }

    /// A stale block that was not committed yet may still be, unless only end points are.
    fn keeps_for_commit(&self, store: &Store) -> bool {
        self.committing == Committing::Publishes && !store.commits_end_points()
    }

    pub fn release_stale(&mut self, store: &mut Store) {
        for (row, fate) in self.stale_rows(store, self.history) {
            let Some(owned) = self.rows[row] else { continue };
            match fate {
                Stale::Go => {
                    self.rows[row] = None;
                    store.release(owned.page, owned.locked);
                }
                Stale::Keep => unlock(store, &mut self.rows[row]),
            }
        }
        for life_cycle in store.attention() {
            let range = store.life_cycle(life_cycle).retention.stale(self.history, store.config.block_tokens);
            let mut block = range.start.max(self.cleared[usize::from(life_cycle)]);
            while block < range.end.min(self.blocks()) && self.owned(block, life_cycle).is_none() {
                block += 1;
            }
            self.cleared[usize::from(life_cycle)] = block;
        }
    }

    // -- suspend, close

    /// Every lock becomes a hold; the pages of the last block are the least recent ones, so that a prefix stays longest.
    pub fn suspend(&mut self, store: &mut Store) {
        for block in (0..self.blocks()).rev() {
            for life_cycle in 0..store.life_cycles() {
                let row = self.row(block, life_cycle);
                unlock(store, &mut self.rows[row]);
            }
        }
        unlock(store, &mut self.state);
        self.phase = Phase::Suspended;
    }

    pub fn close(mut self, store: &mut Store) {
        self.let_go(store, 0);
        if let Some(owned) = self.state {
            store.release(owned.page, owned.locked);
        }
    }

    /// Releases the rows from `cut` on, last block first.
    fn let_go(&mut self, store: &mut Store, cut: usize) {
        for block in (cut / self.width..self.rows.len() / self.width).rev() {
            for row in block * self.width..(block + 1) * self.width {
                if let Some(owned) = self.rows[row].take() {
                    store.release(owned.page, owned.locked);
                }
            }
        }
    }
}

/// A page that can be reused, and where; a state is in no block.
struct Reused {
    life_cycle: u8,
    block: Option<u32>,
    page: PageId,
}

fn reused_pages(store: &Store, path: &Path, reused: u32) -> Vec<Reused> {
    let block_tokens = store.config.block_tokens;
    let mut pages = Vec::with_capacity(path.nodes.len() + 1);
    for life_cycle in store.published().filter(|life_cycle| store.is_complete(path, *life_cycle, reused)) {
        for block in store.life_cycle(life_cycle).retention.live(reused, block_tokens) {
            let page = store.page_on(path, life_cycle, block);
            pages.extend(page.map(|page| Reused { life_cycle, block: Some(block), page }));
        }
    }
    if let Some(life_cycle) = store.recurrent().filter(|_| reused > 0) {
        let page = store.page_on(path, life_cycle, (reused - 1) / block_tokens);
        pages.extend(page.map(|page| Reused { life_cycle, block: None, page }));
    }
    pages
}

fn lock(row: &mut Option<Owned>) {
    if let Some(owned) = row {
        owned.locked = true;
    }
}

fn unlock(store: &mut Store, row: &mut Option<Owned>) {
    if let Some(owned) = row.as_mut().filter(|owned| owned.locked) {
        owned.locked = false;
        store.pages.unlock(owned.page);
    }
}

/// What letting go of a page will change. A page that will stand elsewhere in its queue is claimed meanwhile.
fn foresee_release(store: &mut Store, owned: Owned, change: &mut Change, claimed: &mut Vec<PageId>) {
    let page = *store.pages.get(owned.page);
    if page.is_shared() {
        return foresee_unlock(store, owned, change);
    }
    store.pages.claim(owned.page, true);
    claimed.push(owned.page);
    let (tier, group) = (page.place.tier, page.place.group);
    match page.node {
        Some(_) => change.queued.push(Queued { tier, group, class: page.class, held: false }),
        None => change.freed.push((tier, group)),
    }
}

fn foresee_unlock(store: &Store, owned: Owned, change: &mut Change) {
    let page = store.pages.get(owned.page);
    let (tier, group) = (page.place.tier, page.place.group);
    if owned.locked && page.locks() == 1 && tier < store.pages.last_tier() {
        change.queued.push(Queued { tier, group, class: page.class, held: true });
    }
}
