//! Quotas of scopes: how much of a pool group one scope's pages may take while nobody uses them.
//!
//! Scopes share no pages, so each pays for its own. Pages in use count, but are never refused. A scope that is over its
//! quota loses droppable pages of its own, and nobody else loses any for it.

use super::config::{Eviction, PPM};
use super::order::{Class, bonus};
use super::pages::{PageId, Pages, State};
use super::sequence::Sequence;
use super::store::Store;
use super::{Manager, Violation};
use crate::kv::identity::Scope;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// When a page goes, compared with others of its scope: by use, lower tiers first, by what it saves and how recent it is. Where
/// pages go one by one, by priority instead.
type Rank = (u16, Reverse<u8>, u64, PageId);

/// A page that counts.
#[derive(Clone, Copy, Debug)]
struct Charge {
    scope: Scope,
    group: u8,
    /// While it is droppable.
    rank: Option<Rank>,
}

/// What a scope has in a group.
#[derive(Clone, Debug, Default)]
struct Account {
    pages: u32,
    droppable: BTreeSet<Rank>,
}

/// Invariants: (Q1) every page is charged to the scope that made it, and an account has as many pages as are charged to it;
/// (Q2) it lists those that are droppable; (Q3) after a call, an account over its quota has no droppable page.
#[derive(Clone, Debug)]
pub(super) struct Quotas {
    /// By group.
    pages_max: Vec<u32>,
    charges: BTreeMap<PageId, Charge>,
    accounts: BTreeMap<(Scope, u8), Account>,
    /// Accounts that have got more, or droppable, pages since they were last looked at.
    grown: BTreeSet<(Scope, u8)>,
    stamps: u64,
    by_end_points: bool,
}

impl Quotas {
    pub fn new(tiers: &[Vec<u32>], quota_ppm: u32, eviction: Eviction) -> Self {
        let groups = tiers.first().map_or(0, Vec::len);
        let all = |group: usize| tiers.iter().map(|slots| u64::from(slots[group])).sum::<u64>();
        let share = |slots: u64| (slots * u64::from(quota_ppm) / u64::from(PPM)) as u32;
        Self {
            pages_max: (0..groups).map(|group| share(all(group))).collect(),
            charges: BTreeMap::new(),
            accounts: BTreeMap::new(),
            grown: BTreeSet::new(),
            stamps: 0,
            by_end_points: eviction == Eviction::EndPoints,
        }
    }

    /// A new page counts for the scope.
    pub fn charge(&mut self, page: PageId, scope: Scope, group: u8) {
        self.charges.insert(page, Charge { scope, group, rank: None });
        self.accounts.entry((scope, group)).or_default().pages += 1;
        self.grown.insert((scope, group));
    }

    /// The page is gone.
    pub fn discharge(&mut self, page: PageId) {
        self.set_droppable(page, None);
        let Some(Charge { scope, group, .. }) = self.charges.remove(&page) else { return };
        let Some(account) = self.accounts.get_mut(&(scope, group)) else { return };
        account.pages -= 1;
        if account.pages == 0 {
            self.accounts.remove(&(scope, group));
            self.grown.remove(&(scope, group));
        }
    }

    /// The page became the most recent one of its class on a tier, or is not droppable any more.
    pub fn set_droppable(&mut self, page: PageId, at: Option<(Class, u8)>) {
        let Some(charge) = self.charges.get_mut(&page) else { return };
        let key = (charge.scope, charge.group);
        let Some(account) = self.accounts.get_mut(&key) else { return };
        if let Some(rank) = charge.rank.take() {
            account.droppable.remove(&rank);
        }
        if let Some((class, tier)) = at {
            self.stamps += 1;
            let (first, bonus) = match self.by_end_points {
                true => (class.rank(), bonus(class.step(), self.pages_max[usize::from(charge.group)])),
                false => (u16::from(class.priority()), 0),
            };
            let rank = (first, Reverse(tier), self.stamps + bonus, page);
            charge.rank = Some(rank);
            account.droppable.insert(rank);
            self.grown.insert(key);
        }
    }

    /// Every account was looked at.
    pub fn is_kept(&self) -> bool {
        self.grown.is_empty()
    }

    /// The page that goes next where the account, with so many pages more, were over its quota.
    fn surplus(&self, (scope, group): (Scope, u8), more: u32) -> Option<PageId> {
        let account = self.accounts.get(&(scope, group))?;
        let is_over = account.pages.saturating_add(more) > self.pages_max[usize::from(group)];
        account.droppable.first().filter(|_| is_over).map(|(.., page)| *page)
    }

    fn check(&self, pages: &Pages) -> Result<(), Violation> {
        let mut counted: BTreeMap<(Scope, u8), (u32, BTreeSet<PageId>)> = BTreeMap::new();
        for (id, page) in pages.iter() {
            let Some(charge) = self.charges.get(&id).filter(|charge| charge.group == page.place.group) else {
                return Err(Violation::new("Q1", format!("{id:?} is charged to nobody: {page:?}")));
            };
            let (count, droppable) = counted.entry((charge.scope, charge.group)).or_default();
            *count += 1;
            if page.state() == State::Droppable {
                droppable.insert(id);
            }
        }
        for (key, account) in &self.accounts {
            let listed: BTreeSet<PageId> = account.droppable.iter().map(|(.., page)| *page).collect();
            let (count, droppable) = counted.remove(key).unwrap_or_default();
            if count != account.pages {
                return Err(Violation::new("Q1", format!("{key:?} has {count} pages and counts {}", account.pages)));
            }
            if listed != droppable {
                return Err(Violation::new("Q2", format!("{key:?} lists {listed:?}, droppable are {droppable:?}")));
            }
            if let Some(page) = self.surplus(*key, 0) {
                return Err(Violation::new("Q3", format!("{key:?} is over its quota and keeps {page:?}")));
            }
        }
        match counted.is_empty() && self.charges.len() == pages.len() {
            true => Ok(()),
            false => Err(Violation::new("Q1", format!("{} pages, {} charged", pages.len(), self.charges.len()))),
        }
    }
}

impl Store {
    /// Before so many pages of each group are made: those of the scope's own go that have no place beside them.
    pub fn make_way(&mut self, scope: Scope, wanted: &[u32]) {
        if self.pages.quotas.is_none() {
            return;
        }
        for (group, more) in (0u8..).zip(wanted).filter(|(_, more)| **more > 0) {
            self.drop_surplus((scope, group), *more);
        }
    }

    /// Droppable pages go of scopes that are over their quota.
    pub fn keep_quotas(&mut self) {
        while let Some(key) = self.pages.quotas.as_mut().and_then(|quotas| quotas.grown.pop_first()) {
            self.drop_surplus(key, 0);
        }
    }

    fn drop_surplus(&mut self, key: (Scope, u8), more: u32) {
        while let Some(page) = self.pages.quotas.as_ref().and_then(|quotas| quotas.surplus(key, more)) {
            self.evicted_pages += 1;
            self.vanish(page);
        }
    }
}

impl Sequence {
    /// A page of the sequence's own, on the device. Room was made before.
    pub fn allocate(&self, store: &mut Store, life_cycle: u8, ordinal: u32) -> PageId {
        let page = store.allocate(life_cycle, ordinal, self.hint);
        let group = store.life_cycle(life_cycle).group;
        if let Some(quotas) = &mut store.pages.quotas {
            quotas.charge(page, self.scope, group);
        }
        page
    }
}

impl Manager {
    /// Pages of a scope in a pool group, on all tiers; `None` where scopes have no quota.
    pub fn scope_pages(&self, scope: &Scope, group: u8) -> Option<u32> {
        let quotas = self.store.pages.quotas.as_ref()?;
        Some(quotas.accounts.get(&(*scope, group)).map_or(0, |account| account.pages))
    }

    pub(super) fn check_quotas(&self) -> Result<(), Violation> {
        let Some(quotas) = &self.store.pages.quotas else { return Ok(()) };
        quotas.check(&self.store.pages)?;
        for (id, page) in self.store.pages.iter() {
            let Some(mut top) = page.node else { continue };
            while let Some(parent) = self.store.tree.parent(top) {
                top = parent;
            }
            let scope = quotas.charges.get(&id).map(|charge| charge.scope);
            if scope.and_then(|scope| self.store.tree.root(&scope)) != Some(top) {
                return Err(Violation::new("Q1", format!("{id:?} is charged to {scope:?}, but hangs from {top:?}")));
            }
        }
        Ok(())
    }
}
