//! A rank's KV manager for layers of any kind: full attention, sliding windows and recurrent states, over several tiers.
//!
//! A sequence is cut into blocks. A block has a page for each life cycle: a set of layers that keep the same of it. A page
//! that a running sequence needs is locked on the device; one that a sequence holds may move down a tier; one that nobody
//! holds may vanish. The tree finds the pages of prefixes, but does not own them. A prefix is reusable at a length at
//! which every required life cycle has all pages that are live there: an end point.
//!
//! Every call either does all it says or changes nothing. What has to be moved is appended to the caller's list of copies.

mod check;
pub mod checkpoint;
mod config;
mod ends;
mod events;
mod eviction;
mod explain;
mod forget;
mod hint;
pub mod lifecycle;
mod machine;
pub mod mirror;
mod order;
mod pages;
mod plans;
mod publish;
mod quota;
pub mod rebalance;
mod resize;
pub mod reuse;
mod sequence;
pub mod sizing;
mod store;
#[cfg(test)]
mod tests;
mod tree;
mod worth;

pub use super::Violation;
use super::identity::Scope;
use crate::ids::{BlockId, ConversationKey, TokenId};
pub use config::{
    CONVERSATIONS_MAX_DEFAULT, Commits, Config, ConfigError, Error, ErrorKind, Eviction, PPM, PRIORITY_MAX,
};
use events::Log;
pub use events::{Event, EventLimits, Gap, Numbered, Snapshot};
pub use explain::{Missed, Why};
pub use forget::Forgotten;
pub use hint::{ENDPOINT_CLASS, Request};
pub use machine::{Effect, Input};
pub use pages::Place;
use pages::{PageId, State};
use plans::{Book, Plan};
pub use plans::{PlanId, Turn, TurnEnd};
pub use publish::After;
pub use sequence::{Opened, Phase, SequenceId, Standing};
use sequence::{Owned, Sequence};
use std::collections::BTreeMap;
pub use store::Copy;
use store::Store;

/// Pages of one life cycle on one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    pub locked: u32,
    pub held: u32,
    pub droppable: u32,
}

/// The KV manager of one rank.
///
/// Invariants, by the specification's numbers: (11.1) K <= H <= C, and a row of entries for each block of C; (11.2) each
/// slot is free or one page's; (11.3) a locked page lies on the device and is not queued; (11.4) a page is queued exactly
/// when it is evictable; (11.5) a page that nobody holds is in the tree; (11.6) a sequence holds no committed page that is
/// stale; (11.11) a page's count of plans is right; (11.12) a block's parent is in the tree; (11.14) no pool is below
/// its floor. Holders and locks of a page
/// are those of the sequences (S1), and a live block of an active sequence has a locked page (11.15).
#[derive(Clone, Debug)]
pub struct Manager {
    store: Store,
    sequences: BTreeMap<SequenceId, Sequence>,
    plans: BTreeMap<PlanId, Plan>,
    book: Book,
    /// Plans that were ever made.
    planned: u64,
}

impl Manager {
    /// # Errors
    /// As [`Config::validate`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            store: Store::new(config),
            sequences: BTreeMap::new(),
            plans: BTreeMap::new(),
            book: Book::default(),
            planned: 0,
        })
    }

    pub fn config(&self) -> &Config {
        &self.store.config
    }

    // -- looking

    /// Tokens that a new sequence of these would reuse. Changes nothing.
    pub fn probe(&self, scope: &Scope, tokens: &[TokenId]) -> u32 {
        self.probe_path(scope, tokens).0
    }

    /// As `probe`, with how far the content is known whatever became of its pages.
    pub fn probe_path(&self, scope: &Scope, tokens: &[TokenId]) -> (u32, u32) {
        let path = self.store.matched(scope, tokens, &[]);
        (self.store.reusable(&path, self.store.config.match_backoff_tokens), path.tokens)
    }

    /// As `probe`, for the full blocks of a chain of truncated keys (`identity::truncated_chain`): an estimate for routing.
    ///
    /// # Cost
    /// A logarithmic number of look-ups, and one for each block of a window.
    pub fn probe_chain(&self, chain: &[u64]) -> u32 {
        self.store.reusable_on_chain(chain)
    }

    pub fn standing(&self, id: SequenceId) -> Option<Standing> {
        self.sequences.get(&id).map(Sequence::standing)
    }

    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Blocks in the tree.
    pub fn blocks(&self) -> usize {
        self.store.tree.len()
    }

    /// Conversations with a turn or a plan.
    pub fn conversations(&self) -> usize {
        self.book.len()
    }

    /// Bytes of metadata of pages and blocks, without the blocks' tokens.
    pub fn metadata_bytes(&self) -> usize {
        self.store.pages.bytes()
            + self.store.tree.bytes()
            + self.store.owners.bytes()
            + self.store.ends.bytes()
            + self.store.worth.as_ref().map_or(0, |worth| worth.bytes())
    }

    /// End points that are known; none unless events are logged.
    pub fn end_points(&self) -> usize {
        self.store.ends.len()
    }

    /// Bytes reserved for the blocks' tokens.
    pub fn token_bytes(&self) -> usize {
        self.store.tree.token_bytes()
    }

    pub fn evicted_pages(&self) -> u64 {
        self.store.evicted_pages
    }

    pub fn free(&self, tier: u8, group: u8) -> u32 {
        self.store.pages.free(tier, group)
    }

    /// Pages of a group that are free on the device or can be made so.
    pub fn available(&self, group: u8) -> u32 {
        self.store.pages.free(0, group) + self.store.pages.evictable(0, group)
    }

    /// A pool group of the device has a larger share than that, in parts per million, which neither is free nor can be made so.
    pub fn is_fuller_than(&self, ppm: u32) -> bool {
        self.store.is_fuller_than(ppm)
    }

    /// Pages by life cycle and tier.
    ///
    /// # Cost
    /// All pages.
    pub fn census(&self) -> Vec<Vec<Census>> {
        let tiers = usize::from(self.store.pages.tiers());
        let mut found = vec![vec![Census::default(); tiers]; self.store.config.life_cycles.len()];
        for (_, page) in self.store.pages.iter() {
            let census = &mut found[usize::from(page.life_cycle)][usize::from(page.place.tier)];
            let count = match page.state() {
                State::Locked => &mut census.locked,
                State::Held => &mut census.held,
                State::Droppable => &mut census.droppable,
            };
            *count += 1;
        }
        found
    }

    /// Where the pages of a life cycle lie, by block; an entry is valid while its page is locked (11.15). A recurrent
    /// life cycle has one entry.
    pub fn table(&self, id: SequenceId, life_cycle: u8) -> Vec<Option<Place>> {
        let Some(sequence) = self.sequences.get(&id).filter(|_| life_cycle < self.store.life_cycles()) else {
            return Vec::new();
        };
        let owned = match self.store.life_cycle(life_cycle).is_state() {
            true => vec![sequence.state],
            false => (0..sequence.blocks()).map(|block| sequence.owned(block, life_cycle)).collect(),
        };
        let place = |page: PageId| self.store.pages.get(page).place;
        owned.into_iter().map(|owned| owned.filter(|owned| owned.locked).map(|owned| place(owned.page))).collect()
    }

    /// The device's blocks that an active sequence has in a life cycle from an ordinal on, in order, those out of the window
    /// left out. A recurrent life cycle has the one of its state.
    pub fn device_blocks(&self, id: SequenceId, life_cycle: u8, from: u32) -> Vec<BlockId> {
        let Some(sequence) = self.sequences.get(&id).filter(|_| life_cycle < self.store.life_cycles()) else {
            return Vec::new();
        };
        let slot = |owned: Owned| BlockId(self.store.pages.get(owned.page).place.slot);
        match self.store.life_cycle(life_cycle).is_state() {
            true => sequence.state.map(slot).into_iter().collect(),
            false => {
                let owned = (from..sequence.blocks()).filter_map(|block| sequence.owned(block, life_cycle));
                owned.filter(|owned| owned.locked).map(slot).collect()
            }
        }
    }

    /// Blocks of a sequence that were replaced by ones published before, since the last call: life cycle, ordinal, and the
    /// block that it has now.
    pub fn take_rebased(&mut self, id: SequenceId) -> Vec<(u8, u32, BlockId)> {
        let Some(sequence) = self.sequences.get_mut(&id) else { return Vec::new() };
        let rows = std::mem::take(&mut sequence.rebased).into_iter();
        let here = rows.filter_map(|(life_cycle, block)| Some((life_cycle, block, sequence.owned(block, life_cycle)?)));
        let slot = |owned: Owned| BlockId(self.store.pages.get(owned.page).place.slot);
        here.map(|(life_cycle, block, owned)| (life_cycle, block, slot(owned))).collect()
    }

    /// The end point at which the sequence resumed is one of its own turn's as well: it goes with that turn.
    pub fn ends_at(&mut self, id: SequenceId, length: u32) {
        if let Some(sequence) = self.sequences.get_mut(&id).filter(|sequence| length <= sequence.committed()) {
            sequence.ends.push(length);
        }
    }

    /// Whether the tree names the page in a slot of the device.
    #[cfg(test)]
    pub(crate) fn is_published(&self, life_cycle: u8, block: BlockId) -> bool {
        let there = |page: &pages::Page| page.place == Place { tier: 0, group: life_cycle, slot: block.0 };
        self.store.pages.iter().any(|(_, page)| there(page) && page.is_committed())
    }

    // -- a sequence's life

    /// Opens a sequence: matches its tokens and holds what can be reused. Takes nothing of the device.
    ///
    /// # Errors
    /// It is open already.
    pub fn create(
        &mut self,
        id: SequenceId,
        scope: Scope,
        tokens: &[TokenId],
        conversation: Option<ConversationKey>,
    ) -> Result<Opened, Error> {
        self.open(id, Request { scope, tokens, conversation, reusable_tokens: None })
    }

    /// As `create`, for a prompt of which more or less may be reused later.
    ///
    /// # Errors
    /// It is open already.
    pub fn open(&mut self, id: SequenceId, request: Request<'_>) -> Result<Opened, Error> {
        if self.sequences.contains_key(&id) {
            return Err(Error::DuplicateSequence { sequence: id });
        }
        let (sequence, opened) = Sequence::open(&mut self.store, request);
        self.sequences.insert(id, sequence);
        Ok(opened)
    }

    /// Brings what the sequence needs onto the device; `false`, and nothing is changed, where it does not fit. The first
    /// time, `restored` names the optional life cycles that are to be reused.
    ///
    /// # Errors
    /// The sequence is not suspended, or a life cycle cannot be restored.
    pub fn resume(&mut self, id: SequenceId, restored: &[u8], copies: &mut Vec<Copy>) -> Result<bool, Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(Error::UnknownSequence { sequence: id })?;
        if sequence.phase != Phase::Suspended {
            return Err(Error::NotSuspended { sequence: id });
        }
        let resumed = sequence.resume(&mut self.store, restored, copies);
        self.store.sweep();
        resumed
    }

    /// Sets capacity and history; what is `None` stays. `false`, and nothing is changed, where new blocks do not fit.
    ///
    /// Where every block is published, history should not pass the old capacity: a block that goes stale at once would
    /// be published although its last tokens had nowhere to be stored.
    ///
    /// # Errors
    /// The sequence is not active, its history would go back, or its capacity would be below its history.
    pub fn resize(
        &mut self,
        id: SequenceId,
        (capacity, history): (Option<u32>, Option<u32>),
        copies: &mut Vec<Copy>,
    ) -> Result<bool, Error> {
        let sequence = active(&mut self.sequences, id)?;
        let wanted = (capacity.unwrap_or(sequence.capacity), history.unwrap_or(sequence.history));
        let resized = sequence.resize(&mut self.store, wanted, copies);
        self.store.sweep();
        resized
    }

    /// The tokens that follow the committed ones are computed: publishes them.
    ///
    /// # Errors
    /// The sequence is not active or commits no more, the commit is beyond the capacity, or only end points are committed
    /// and the history is at neither of its ends.
    pub fn commit(
        &mut self,
        id: SequenceId,
        tokens: &[TokenId],
        after: After,
        copies: &mut Vec<Copy>,
    ) -> Result<Standing, Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(Error::UnknownSequence { sequence: id })?;
        sequence.may_commit(&self.store, id, tokens)?;
        sequence.commit(&mut self.store, tokens, after, copies);
        let standing = sequence.standing();
        self.store.sweep();
        Ok(standing)
    }

    /// The sequence commits nothing more. Its last block is published even if it is not full. Twice is the same as once.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn stop(&mut self, id: SequenceId) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(&id).ok_or(Error::UnknownSequence { sequence: id })?;
        sequence.stop(&mut self.store);
        self.store.sweep();
        Ok(())
    }

    /// The sequence needs nothing on the device until it resumes.
    ///
    /// # Errors
    /// The sequence is not active.
    pub fn suspend(&mut self, id: SequenceId) -> Result<(), Error> {
        active(&mut self.sequences, id)?.suspend(&mut self.store);
        Ok(())
    }

    /// Releases everything. A sequence that is not open is closed already.
    pub fn close(&mut self, id: SequenceId) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        sequence.stop(&mut self.store);
        sequence.close(&mut self.store);
        self.store.sweep();
    }

    /// Brings what a sequence of these tokens would reuse up to the tier below the device; `false`, and nothing is
    /// changed, where it does not fit.
    pub fn prefetch(&mut self, scope: &Scope, tokens: &[TokenId], copies: &mut Vec<Copy>) -> bool {
        const TARGET: u8 = 1;
        if self.store.pages.last_tier() < TARGET {
            return true;
        }
        let pages = Sequence::reused_pages(&self.store, scope, tokens);
        let low = |store: &Store, page: PageId| store.pages.get(page).place.tier > TARGET;
        let mut wanted = vec![0; usize::from(self.store.pages.groups())];
        for &page in &pages {
            let place = self.store.pages.get(page).place;
            wanted[usize::from(place.group)] += u32::from(place.tier > TARGET);
            // None of them makes way for another.
            self.store.pages.claim(page, true);
        }
        let fits = self.store.fits(TARGET, &wanted, &Default::default());
        if fits {
            for &page in &pages {
                self.store.pages.hold(page);
            }
            self.store.make_room(TARGET, &wanted, copies);
            for &page in pages.iter().filter(|page| low(&self.store, **page)).collect::<Vec<_>>() {
                self.store.move_page(page, TARGET, copies);
            }
        }
        for &page in &pages {
            self.store.pages.claim(page, false);
        }
        if fits {
            for page in pages {
                self.store.release(page, false);
            }
        }
        self.store.sweep();
        fits
    }

    /// Forgets every prefix, plan and conversation.
    ///
    /// # Errors
    /// A sequence is open.
    pub fn clear(&mut self) -> Result<(), Error> {
        if !self.sequences.is_empty() {
            return Err(Error::OpenSequences { open: self.sequences.len() });
        }
        let floors: Vec<u32> = (0..self.store.pages.groups()).map(|group| self.store.pages.floor(0, group)).collect();
        let mut log = std::mem::replace(&mut self.store.log, Log::new(&self.store.config));
        log.cleared();
        self.store = Store::new(self.store.config.clone());
        self.store.log = log;
        self.set_floors(&floors)?;
        (self.plans, self.book) = (BTreeMap::new(), self.book.cleared());
        Ok(())
    }

    /// For tests: the page of a block vanishes as if it were evicted. `false` if there is none, or somebody holds it.
    pub fn unlink(&mut self, scope: &Scope, tokens: &[TokenId], (block, life_cycle): (u32, u8)) -> bool {
        let path = self.store.matched(scope, tokens, &[]);
        let page = (life_cycle < self.store.life_cycles()).then(|| self.store.page_on(&path, life_cycle, block));
        let droppable = |page: &PageId| self.store.pages.get(*page).state() == State::Droppable;
        let Some(page) = page.flatten().filter(droppable) else { return false };
        self.store.vanish(page);
        self.store.sweep();
        true
    }
}

fn active(sequences: &mut BTreeMap<SequenceId, Sequence>, id: SequenceId) -> Result<&mut Sequence, Error> {
    let sequence = sequences.get_mut(&id).ok_or(Error::UnknownSequence { sequence: id })?;
    match sequence.phase {
        Phase::Active => Ok(sequence),
        Phase::Suspended => Err(Error::NotActive { sequence: id }),
    }
}
