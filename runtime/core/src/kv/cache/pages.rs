//! Pages and the slots they lie in: who keeps a page where, and which one goes first.

use super::Violation;
use super::order::{Class, Coming, Order};
use super::quota::Quotas;
use super::tree::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// One page, wherever it lies. Ids of pages that are gone are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PageId(NonZeroU32);

impl PageId {
    fn at(index: usize) -> Self {
        Self(NonZeroU32::MIN.saturating_add(index as u32))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Where a page lies: tier 0 is the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    pub tier: u8,
    pub group: u8,
    pub slot: u32,
}

/// What may happen to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Stays on the device.
    Locked,
    /// May move down, may not vanish.
    Held,
    /// May move or vanish.
    Droppable,
}

/// With its node, a block of one life cycle has at most 128 bytes besides its tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub place: Place,
    pub life_cycle: u8,
    flags: u8,
    pub class: Class,
    /// Leading tokens of the block that it covers.
    pub covered: u32,
    /// The tree's node that names it; none for pages of one sequence and for those whose node is gone.
    pub node: Option<NodeId>,
    /// Sequences that hold it, and those among them that need it on the device.
    holders: u32,
    locks: u32,
    /// What its pool had counted when it was queued.
    queued_at: u32,
    prev: Option<PageId>,
    next: Option<PageId>,
}

impl Page {
    const ALIVE: u8 = 1;
    const COMMITTED: u8 = 2;
    const PLANNED: u8 = 4;
    const QUEUED: u8 = 8;
    const CLAIMED: u8 = 16;

    fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    fn set(&mut self, flag: u8, to: bool) {
        self.flags = if to { self.flags | flag } else { self.flags & !flag };
    }

    /// Was published: nobody writes to it.
    pub fn is_committed(&self) -> bool {
        self.is(Self::COMMITTED)
    }

    /// Some drop plan names it.
    pub fn is_planned(&self) -> bool {
        self.is(Self::PLANNED)
    }

    /// Passed over when victims are sought: whoever makes room is about to use it.
    pub fn is_claimed(&self) -> bool {
        self.is(Self::CLAIMED)
    }

    pub fn next(&self) -> Option<PageId> {
        self.next
    }

    pub fn state(&self) -> State {
        match self {
            Self { locks: 1.., .. } => State::Locked,
            Self { holders: 1.., .. } => State::Held,
            _ => State::Droppable,
        }
    }

    pub fn is_shared(&self) -> bool {
        self.holders > 1
    }

    pub fn locks(&self) -> u32 {
        self.locks
    }

    pub fn holders(&self) -> u32 {
        self.holders
    }
}

/// Pages of one class, least recent first.
#[derive(Clone, Copy, Debug)]
struct Ends {
    first: PageId,
    last: PageId,
}

/// The slots of one group on one tier, and the order in which pages leave them.
#[derive(Clone, Debug)]
struct Pool {
    slots: u32,
    /// What a resize must leave.
    floor: u32,
    /// Slots that were given back; those from `untouched` on were never used.
    returned: Vec<u32>,
    untouched: u32,
    classes: BTreeMap<Class, Ends>,
    queued: u32,
    claimed: u32,
    /// Pages that were ever queued: the time by which some are older than others. It may begin again.
    now: u32,
}

impl Pool {
    fn free(&self) -> u32 {
        self.slots - self.untouched + self.returned.len() as u32
    }

    fn take(&mut self) -> Option<u32> {
        self.returned.pop().or_else(|| {
            let slot = self.untouched;
            (slot < self.slots).then(|| {
                self.untouched += 1;
                slot
            })
        })
    }
}

/// Invariants of section 11: (2) each slot is free or one page's; (3) a locked page lies on tier 0 and is not queued;
/// (4) a page is queued exactly when it is evictable where it lies; (5) nobody's page is droppable without a node; (14) no
/// pool is below its floor.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    slab: Vec<Page>,
    vacant: Vec<PageId>,
    pools: Vec<Pool>,
    groups: u8,
    tiers: u8,
    pub quotas: Option<Box<Quotas>>,
}

impl Pages {
    /// `tiers[tier][group]` slots.
    pub fn new(tiers: &[Vec<u32>]) -> Self {
        let pool = |slots: &u32| Pool {
            slots: *slots,
            floor: 0,
            returned: Vec::new(),
            untouched: 0,
            classes: BTreeMap::new(),
            queued: 0,
            claimed: 0,
            now: 0,
        };
        let slots: usize = tiers.iter().flatten().map(|slots| *slots as usize).sum();
        Self {
            // No more pages than slots, so it never grows.
            slab: Vec::with_capacity(slots),
            vacant: Vec::new(),
            pools: tiers.iter().flatten().map(pool).collect(),
            groups: tiers.first().map_or(0, Vec::len) as u8,
            tiers: tiers.len() as u8,
            quotas: None,
        }
    }

    pub fn groups(&self) -> u8 {
        self.groups
    }

    pub fn tiers(&self) -> u8 {
        self.tiers
    }

    pub fn last_tier(&self) -> u8 {
        self.tiers.saturating_sub(1)
    }

    fn pool(&self, tier: u8, group: u8) -> &Pool {
        &self.pools[usize::from(tier) * usize::from(self.groups) + usize::from(group)]
    }

    fn pool_mut(&mut self, tier: u8, group: u8) -> &mut Pool {
        &mut self.pools[usize::from(tier) * usize::from(self.groups) + usize::from(group)]
    }

    pub fn slots(&self, tier: u8, group: u8) -> u32 {
        self.pool(tier, group).slots
    }

    pub fn floor(&self, tier: u8, group: u8) -> u32 {
        self.pool(tier, group).floor
    }

    /// Of the device: other tiers may be without slots.
    pub fn set_floor(&mut self, group: u8, floor: u32) {
        self.pool_mut(0, group).floor = floor;
    }

    pub fn free(&self, tier: u8, group: u8) -> u32 {
        self.pool(tier, group).free()
    }

    /// Pages that making room may move or drop.
    pub fn evictable(&self, tier: u8, group: u8) -> u32 {
        let pool = self.pool(tier, group);
        pool.queued - pool.claimed
    }

    pub fn get(&self, id: PageId) -> &Page {
        let page = &self.slab[id.index()];
        debug_assert!(page.is(Page::ALIVE), "{id:?} is gone");
        page
    }

    fn page_mut(&mut self, id: PageId) -> &mut Page {
        &mut self.slab[id.index()]
    }

    pub fn len(&self) -> usize {
        self.slab.len() - self.vacant.len()
    }

    /// Bytes of everything kept of pages.
    pub fn bytes(&self) -> usize {
        let returned: usize = self.pools.iter().map(|pool| pool.returned.capacity()).sum();
        self.slab.len() * size_of::<Page>() + self.vacant.capacity() * size_of::<PageId>() + returned * size_of::<u32>()
    }

    pub fn is_alive(&self, id: PageId) -> bool {
        self.slab[id.index()].is(Page::ALIVE)
    }

    pub fn iter(&self) -> impl Iterator<Item = (PageId, &Page)> {
        let pages = self.slab.iter().enumerate().filter(|(_, page)| page.is(Page::ALIVE));
        pages.map(|(index, page)| (PageId::at(index), page))
    }

    /// A page on the device, held and locked by one sequence. Room was made before.
    pub fn allocate(&mut self, life_cycle: u8, group: u8, class: Class) -> PageId {
        let slot = self.pool_mut(0, group).take().expect("room was made before a page is allocated");
        let page = Page {
            place: Place { tier: 0, group, slot },
            life_cycle,
            flags: Page::ALIVE,
            class,
            covered: 0,
            node: None,
            holders: 1,
            locks: 1,
            queued_at: 0,
            prev: None,
            next: None,
        };
        match self.vacant.pop() {
            Some(id) => {
                *self.page_mut(id) = page;
                id
            }
            None => {
                self.slab.push(page);
                PageId::at(self.slab.len() - 1)
            }
        }
    }

    /// The page is gone, and its slot free.
    pub fn free_page(&mut self, id: PageId) {
        self.unqueue(id);
        let page = self.page_mut(id);
        assert!(page.is(Page::ALIVE), "{id:?} is freed twice");
        (page.flags, page.node) = (0, None);
        let place = page.place;
        if let Some(quotas) = &mut self.quotas {
            quotas.discharge(id);
        }
        self.pool_mut(place.tier, place.group).returned.push(place.slot);
        self.vacant.push(id);
    }

    /// Moves the page to another tier, where there is room; it is the most recent one there.
    pub fn move_to(&mut self, id: PageId, tier: u8) -> (Place, Place) {
        let from = self.get(id).place;
        self.unqueue(id);
        let slot = self.pool_mut(tier, from.group).take().expect("room was made before a page moves");
        self.pool_mut(from.tier, from.group).returned.push(from.slot);
        let to = Place { tier, group: from.group, slot };
        self.page_mut(id).place = to;
        self.requeue(id);
        (from, to)
    }

    /// Gives a pool another size. Pages in slots that go move into free ones below, where there is room; they keep their
    /// places in the order.
    pub fn resize(&mut self, tier: u8, group: u8, slots: u32) -> Vec<(Place, Place)> {
        let pool = self.pool_mut(tier, group);
        let shrinks = slots < pool.slots;
        pool.slots = slots;
        pool.untouched = pool.untouched.min(slots);
        pool.returned.retain(|slot| *slot < slots);
        if !shrinks {
            let all: usize = self.pools.iter().map(|pool| pool.slots as usize).sum();
            self.slab.reserve(all.saturating_sub(self.slab.len()));
            return Vec::new();
        }
        let is_out = |place: Place| (place.tier, place.group) == (tier, group) && place.slot >= slots;
        let out: Vec<PageId> = self.iter().filter(|(_, page)| is_out(page.place)).map(|(id, _)| id).collect();
        let mut moved = Vec::with_capacity(out.len());
        for id in out {
            let slot = self.pool_mut(tier, group).take().expect("room was made before a pool shrinks");
            let place = &mut self.page_mut(id).place;
            let from = std::mem::replace(place, Place { slot, ..*place });
            moved.push((from, Place { slot, ..from }));
        }
        moved
    }

    // -- holding

    /// One more sequence holds the page; it keeps its place in the order.
    pub fn hold(&mut self, id: PageId) {
        self.page_mut(id).holders += 1;
        if let Some(quotas) = &mut self.quotas {
            quotas.set_droppable(id, None);
        }
        if !self.is_evictable(id) {
            self.unqueue(id);
        }
    }

    /// A holder needs the page on the device, where it is.
    pub fn lock(&mut self, id: PageId) {
        self.unqueue(id);
        let page = self.page_mut(id);
        assert!(page.place.tier == 0 && page.locks < page.holders, "{id:?} cannot be locked: {page:?}");
        page.locks += 1;
    }

    /// A holder does not need the page on the device any more.
    pub fn unlock(&mut self, id: PageId) {
        let page = self.page_mut(id);
        page.locks -= 1;
        if page.locks == 0 {
            self.requeue(id);
        }
    }

    /// A holder lets go. The last one leaves a page that the tree names for others; `true` if nobody wants it any more.
    #[must_use]
    pub fn release(&mut self, id: PageId, locked: bool) -> bool {
        let page = self.page_mut(id);
        page.holders -= 1;
        page.locks -= u32::from(locked);
        match *page {
            Page { holders: 0, node: None, .. } => return true,
            Page { holders: 0, .. } => self.requeue(id),
            Page { locks: 0, .. } if locked => self.requeue(id),
            Page { .. } => {}
        }
        false
    }

    pub fn set_covered(&mut self, id: PageId, node: NodeId, covered: u32) {
        let page = self.page_mut(id);
        (page.node, page.covered) = (Some(node), covered);
        page.set(Page::COMMITTED, true);
    }

    /// The tree does not name the page any more; whoever holds it keeps it.
    pub fn orphan(&mut self, id: PageId) {
        self.page_mut(id).node = None;
    }

    pub fn set_planned(&mut self, id: PageId, planned: bool) {
        self.page_mut(id).set(Page::PLANNED, planned);
    }

    // -- order

    fn is_evictable(&self, id: PageId) -> bool {
        let page = self.get(id);
        match page.state() {
            State::Locked => false,
            State::Held => page.place.tier < self.last_tier(),
            State::Droppable => page.node.is_some(),
        }
    }

    /// The page becomes the most recent one of its class, if it may go at all.
    pub fn requeue(&mut self, id: PageId) {
        self.unqueue(id);
        if !self.is_evictable(id) {
            return;
        }
        let Page { place, class, holders, .. } = *self.get(id);
        if let Some(quotas) = self.quotas.as_mut().filter(|_| holders == 0) {
            quotas.set_droppable(id, Some((class, place.tier)));
        }
        let pool = self.pool_mut(place.tier, place.group);
        pool.queued += 1;
        pool.now = pool.now.wrapping_add(1);
        let now = pool.now;
        let ends = pool.classes.get_mut(&class);
        let before = match ends {
            Some(ends) => Some(std::mem::replace(&mut ends.last, id)),
            None => {
                pool.classes.insert(class, Ends { first: id, last: id });
                None
            }
        };
        if let Some(before) = before {
            self.page_mut(before).next = Some(id);
        }
        let page = self.page_mut(id);
        page.set(Page::QUEUED, true);
        (page.queued_at, page.prev, page.next) = (now, before, None);
    }

    /// The page is worth something else from now on.
    pub fn set_class(&mut self, id: PageId, class: Class) {
        if self.get(id).class == class {
            return;
        }
        let was_queued = self.is_queued(id);
        self.unqueue(id);
        self.page_mut(id).class = class;
        if was_queued {
            self.requeue(id);
        }
    }

    fn unqueue(&mut self, id: PageId) {
        let page = self.slab[id.index()];
        let Page { place, class, prev, next, .. } = page;
        if !page.is(Page::QUEUED) {
            return;
        }
        if let Some(prev) = prev {
            self.page_mut(prev).next = next;
        }
        if let Some(next) = next {
            self.page_mut(next).prev = prev;
        }
        let pool = self.pool_mut(place.tier, place.group);
        pool.queued -= 1;
        pool.claimed -= u32::from(page.is_claimed());
        match (prev, next, pool.classes.get_mut(&class)) {
            (None, None, _) => {
                pool.classes.remove(&class);
            }
            (None, Some(next), Some(ends)) => ends.first = next,
            (Some(prev), None, Some(ends)) => ends.last = prev,
            _ => {}
        }
        let page = self.page_mut(id);
        page.set(Page::QUEUED | Page::CLAIMED, false);
        (page.prev, page.next) = (None, None);
    }

    pub fn is_queued(&self, id: PageId) -> bool {
        self.get(id).is(Page::QUEUED)
    }

    /// Victims pass over the page until it is let go; nothing for a page that is in no queue.
    pub fn claim(&mut self, id: PageId, claimed: bool) {
        let page = self.page_mut(id);
        if !page.is(Page::ALIVE) || !page.is(Page::QUEUED) || page.is_claimed() == claimed {
            return;
        }
        page.set(Page::CLAIMED, claimed);
        let place = page.place;
        let pool = self.pool_mut(place.tier, place.group);
        pool.claimed = if claimed { pool.claimed + 1 } else { pool.claimed - 1 };
    }

    /// Pages in the order in which they go, among them those that are about to be queued.
    pub fn order<'a>(&'a self, tier: u8, group: u8, coming: impl Iterator<Item = Coming>) -> Order<'a> {
        let pool = self.pool(tier, group);
        let firsts = pool.classes.iter().map(|(class, ends)| (*class, ends.first));
        Order::new(self, pool.slots, pool.now, firsts, coming)
    }

    /// When a page of a pool was queued, as its order sees it.
    pub fn queued_at(&self, id: PageId) -> u32 {
        self.get(id).queued_at
    }

    /// Pages in the order in which they go.
    pub fn victims(&self, tier: u8, group: u8) -> impl Iterator<Item = PageId> {
        self.order(tier, group, std::iter::empty()).filter_map(|next| next.page())
    }

    /// The page that goes next.
    pub fn victim(&self, tier: u8, group: u8) -> Option<PageId> {
        let pool = self.pool(tier, group);
        // Most pools have one class: nothing to compare.
        match (pool.classes.len(), pool.claimed) {
            (1, 0) => pool.classes.values().next().map(|ends| ends.first),
            _ => self.victims(tier, group).next(),
        }
    }

    pub fn check(&self) -> Result<(), Violation> {
        let mut used: Vec<Vec<bool>> = self.pools.iter().map(|pool| vec![false; pool.slots as usize]).collect();
        let at = |place: Place| usize::from(place.tier) * usize::from(self.groups) + usize::from(place.group);
        for (id, page) in self.iter() {
            match used[at(page.place)].get_mut(page.place.slot as usize).map(|used| std::mem::replace(used, true)) {
                Some(false) => {}
                Some(true) => {
                    return Err(Violation::new(
                        "11.2",
                        format!("{:?} belongs to two pages, {id:?} is one", page.place),
                    ));
                }
                None => return Err(Violation::new("11.2", format!("{:?} of {id:?} is in no pool", page.place))),
            }
            if page.locks > 0 && (page.place.tier != 0 || page.is(Page::QUEUED)) {
                return Err(Violation::new("11.3", format!("{id:?} is locked: {page:?}")));
            }
            if page.is(Page::QUEUED) != self.is_evictable(id) || page.is_claimed() {
                return Err(Violation::new("11.4", format!("{id:?}: {page:?}")));
            }
            if page.holders == 0 && (page.node.is_none() || !page.is_committed()) {
                return Err(Violation::new("11.5", format!("{id:?} is nobody's: {page:?}")));
            }
        }
        for (index, (pool, used)) in self.pools.iter().zip(&mut used).enumerate() {
            if pool.slots < pool.floor {
                let (slots, floor) = (pool.slots, pool.floor);
                return Err(Violation::new("11.14", format!("pool {index} has {slots} slots, its floor is {floor}")));
            }
            for slot in pool.returned.iter().copied().chain(pool.untouched..pool.slots) {
                if used.get_mut(slot as usize).is_none_or(|used| std::mem::replace(used, true)) {
                    return Err(Violation::new(
                        "11.2",
                        format!("slot {slot} of pool {index} is free and used, free twice, or not there"),
                    ));
                }
            }
            if let Some(slot) = used.iter().position(|used| !used) {
                return Err(Violation::new("11.2", format!("slot {slot} of pool {index} belongs to nobody")));
            }
            let (tier, group) = ((index / usize::from(self.groups)) as u8, (index % usize::from(self.groups)) as u8);
            let listed = self.victims(tier, group).count();
            if listed != pool.queued as usize || pool.claimed != 0 {
                return Err(Violation::new(
                    "11.4",
                    format!("pool {index} lists {listed} pages and counts {}", pool.queued),
                ));
            }
        }
        Ok(())
    }
}
