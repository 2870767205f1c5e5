//! Making room: which pages move down a tier or vanish so that others fit.
//!
//! First it is computed whether everything fits, then it is done: an operation that fails has evicted nothing.

use super::order::{Class, Coming, Next};
use super::pages::{PageId, State};
use super::store::{Copy, Store};

/// What will have happened before room is made.
#[derive(Clone, Debug, Default)]
pub(super) struct Change {
    /// Slots that will be free, by tier and group.
    pub freed: Vec<(u8, u8)>,
    pub queued: Vec<Queued>,
}

/// A page that will stand at the recent end of its class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    pub tier: u8,
    pub group: u8,
    pub class: Class,
    pub held: bool,
}

impl Store {
    /// Whether `wanted` slots of each group can be had on a tier after `change`.
    pub fn fits(&self, tier: u8, wanted: &[u32], change: &Change) -> bool {
        wanted.iter().enumerate().all(|(group, goal)| *goal == 0 || self.group_fits(tier, group as u8, *goal, change))
    }

    fn group_fits(&self, first: u8, group: u8, wanted: u32, change: &Change) -> bool {
        let mut goal = wanted as usize;
        // Whether each page that falls from the tier above is held, least recent first.
        let mut falling: Vec<bool> = Vec::new();
        for tier in first..self.pages.tiers() {
            let freed = change.freed.iter().filter(|at| **at == (tier, group)).count();
            let queued = change.queued.iter().filter(|page| (page.tier, page.group) == (tier, group)).count();
            let free = self.pages.free(tier, group) as usize + freed;
            let evictable = self.pages.evictable(tier, group) as usize + queued;
            if tier == self.pages.last_tier() {
                let held = falling.iter().filter(|held| **held).count();
                return free + evictable >= goal + held;
            }
            if free + evictable < goal {
                return false;
            }
            let victims = (goal + falling.len()).saturating_sub(free).min(evictable);
            let mut list = self.first_victims(tier, group, victims, change);
            list.append(&mut falling);
            let stay = (free + victims - goal).min(list.len());
            list.truncate(list.len() - stay);
            if list.is_empty() {
                return true;
            }
            (falling, goal) = (list, 0);
        }
        false
    }

    /// Whether the first victims, in order, are held.
    fn first_victims(&self, tier: u8, group: u8, count: usize, change: &Change) -> Vec<bool> {
        let there = change.queued.iter().filter(|page| (page.tier, page.group) == (tier, group));
        let coming = there.map(|page| Coming { class: page.class, held: page.held });
        let held = |next: Next| match next {
            Next::There(page) => self.pages.get(page).state() == State::Held,
            Next::Coming(held) => held,
        };
        self.pages.order(tier, group, coming).take(count).map(held).collect()
    }

    /// Makes `wanted` slots of each group free on a tier, where they fit.
    pub fn make_room(&mut self, tier: u8, wanted: &[u32], copies: &mut Vec<Copy>) {
        for (group, goal) in wanted.iter().enumerate() {
            if *goal > 0 {
                self.make_group_room((tier, group as u8), *goal as usize, Vec::new(), copies);
            }
        }
    }

    /// `falling` come from the tier above, least recent first.
    fn make_group_room(&mut self, at: (u8, u8), goal: usize, falling: Vec<PageId>, copies: &mut Vec<Copy>) {
        let (tier, group) = at;
        if tier == self.pages.last_tier() {
            return self.make_last_room(at, goal, falling, copies);
        }
        let free = self.pages.free(tier, group) as usize;
        let evictable = self.pages.evictable(tier, group) as usize;
        let victims = (goal + falling.len()).saturating_sub(free).min(evictable);
        let mut list: Vec<PageId> = self.pages.victims(tier, group).take(victims).collect();
        list.extend(falling);
        let stay = (free + victims).saturating_sub(goal).min(list.len());
        let staying = list.split_off(list.len() - stay);
        if !list.is_empty() {
            self.make_group_room((tier + 1, group), 0, list, copies);
        }
        for page in staying {
            if self.pages.is_alive(page) && self.pages.get(page).place.tier != tier {
                self.move_page(page, tier, copies);
            }
        }
    }

    fn make_last_room(&mut self, at: (u8, u8), goal: usize, mut falling: Vec<PageId>, copies: &mut Vec<Copy>) {
        let (tier, group) = at;
        let mut free = self.pages.free(tier, group) as usize;
        while free < goal + falling.len() {
            let Some(victim) = self.pages.victim(tier, group) else { break };
            let before = self.pages.len();
            self.evict(victim);
            free = self.pages.free(tier, group) as usize;
            if self.pages.len() + 1 < before {
                // A subtree went, perhaps with pages that were to fall.
                falling.retain(|page| self.pages.is_alive(*page));
            }
        }
        let held = falling.iter().filter(|page| self.pages.get(**page).state() == State::Held).count();
        let droppable = falling.len() - held;
        // Held pages must stay; of the others the most recent ones stay where room lasts.
        let mut dropped = droppable - free.saturating_sub(goal + held).min(droppable);
        for page in falling {
            if !self.pages.is_alive(page) {
                continue;
            }
            if dropped > 0 && self.pages.get(page).state() == State::Droppable {
                dropped -= 1;
                self.evict(page);
            } else {
                self.move_page(page, tier, copies);
            }
        }
    }

    /// The page goes. What is worth nothing without it goes next.
    fn evict(&mut self, page: PageId) {
        self.evicted_pages += 1;
        self.vanish(page);
        self.settle();
    }

    pub fn move_page(&mut self, page: PageId, tier: u8, copies: &mut Vec<Copy>) {
        let (from, to) = self.pages.move_to(page, tier);
        copies.push(Copy { from, to });
        self.log_moved(page, from.tier);
    }

    /// The share of the fullest pool group of the device that neither is free nor can be made so is above so many parts per
    /// million.
    pub fn is_fuller_than(&self, ppm: u32) -> bool {
        (0..self.pages.groups()).any(|group| {
            let slots = self.pages.slots(0, group);
            let unavailable = slots - self.pages.free(0, group) - self.pages.evictable(0, group);
            let limit = u64::from(slots) * u64::from(ppm);
            u64::from(unavailable) * u64::from(super::config::PPM) > limit
        })
    }
}
