//! Other sizes for the pools of a tier, while sequences are open.
//!
//! As every call, it does all or nothing: first it is computed whether what must stay fits, then pages make way.

use super::config::Error;
use super::eviction::Change;
use super::sequence::Sequence;
use super::store::{Copy, Store};
use super::{Manager, Phase, Violation};

impl Manager {
    /// Slots that each pool of the device keeps whatever the load; at first one for each of its life cycles.
    ///
    /// # Errors
    /// The device has another number of pools, or a pool has less already.
    pub fn set_floors(&mut self, floors: &[u32]) -> Result<(), Error> {
        self.store.has_pools(floors.len())?;
        for (group, &floor) in (0u8..).zip(floors) {
            let slots = self.store.pages.slots(0, group);
            if slots < floor {
                return Err(Error::PoolTooSmall { tier: 0, group, slots, floor });
            }
        }
        for (group, &floor) in (0u8..).zip(floors) {
            self.store.pages.set_floor(group, floor);
        }
        Ok(())
    }

    /// Gives the pools of a tier other sizes. What lies in slots that go moves into free ones that stay; what does not fit
    /// goes as if room were made: down a tier, or away if nobody holds it.
    ///
    /// The copies read and write slots of the old pools only, so the memory changes hands after them.
    ///
    /// # Errors
    /// A pool would be smaller than its floor, than what one open sequence needs to resume, or than what is held and can
    /// go nowhere; it is the device, and a sequence is active; there is no such tier, or it has another number of pools.
    pub fn resize_pools(&mut self, tier: u8, slots: &[u32], copies: &mut Vec<Copy>) -> Result<(), Error> {
        self.may_resize_pools(tier, slots)?;
        let store = &mut self.store;
        let groups = 0..store.pages.groups();
        let lost: Vec<u32> = groups
            .clone()
            .zip(slots)
            .map(|(group, slots)| store.pages.slots(tier, group).saturating_sub(*slots))
            .collect();
        store.make_room(tier, &lost, copies);
        for (group, &slots) in groups.zip(slots) {
            let moved = store.pages.resize(tier, group, slots);
            copies.extend(moved.into_iter().map(|(from, to)| Copy { from, to }));
        }
        store.config.tiers[usize::from(tier)] = slots.to_vec();
        store.sweep();
        Ok(())
    }

    fn may_resize_pools(&self, tier: u8, slots: &[u32]) -> Result<(), Error> {
        let store = &self.store;
        if tier >= store.pages.tiers() {
            return Err(Error::UnknownTier { tier, tiers: store.pages.tiers() });
        }
        store.has_pools(slots.len())?;
        let others = (0u8..).zip(&store.config.tiers).filter(|(other, _)| *other != tier);
        let all = others.flat_map(|(_, slots)| slots).chain(slots).map(|slots| u64::from(*slots)).sum::<u64>();
        if all >= u64::from(u32::MAX) {
            return Err(Error::TooManySlots { slots: all });
        }
        let active = self.sequences.values().filter(|sequence| sequence.phase == Phase::Active).count();
        if tier == 0 && active > 0 {
            return Err(Error::ActiveSequences { active });
        }
        let least = self.least_slots(tier);
        for ((group, &slots), least) in (0u8..).zip(slots).zip(least) {
            let floor = least.max(store.slots_that_stay(tier, group, slots));
            if slots < floor {
                return Err(Error::PoolTooSmall { tier, group, slots, floor });
            }
        }
        Ok(())
    }

    /// Slots of each pool without which some sequence could never resume, or its floor.
    fn least_slots(&self, tier: u8) -> Vec<u32> {
        let groups = 0..self.store.pages.groups();
        let mut least: Vec<u32> = groups.map(|group| self.store.pages.floor(tier, group)).collect();
        for sequence in self.sequences.values().filter(|_| tier == 0) {
            for (least, needed) in least.iter_mut().zip(sequence.slots_to_resume(&self.store)) {
                *least = (*least).max(needed);
            }
        }
        least
    }

    pub(super) fn check_pools(&self) -> Result<(), Violation> {
        for (tier, slots) in (0u8..).zip(&self.store.config.tiers) {
            let found: Vec<u32> =
                (0..self.store.pages.groups()).map(|group| self.store.pages.slots(tier, group)).collect();
            if found != *slots {
                return Err(Violation::new(
                    "11.2",
                    format!("tier {tier} has {found:?} slots, it should have {slots:?}"),
                ));
            }
        }
        Ok(())
    }
}

impl Store {
    fn has_pools(&self, found: usize) -> Result<(), Error> {
        match usize::from(self.pages.groups()) {
            groups if groups == found => Ok(()),
            groups => Err(Error::WrongPools { found, groups }),
        }
    }

    /// The least slots, from `wanted` on, in which all pages of a pool fit that can neither fall nor vanish.
    fn slots_that_stay(&self, tier: u8, group: u8, wanted: u32) -> u32 {
        let slots = self.pages.slots(tier, group);
        let mut goal = vec![0; usize::from(self.pages.groups())];
        let mut can_lose = |lost: u32| {
            goal[usize::from(group)] = lost;
            self.fits(tier, &goal, &Change::default())
        };
        let (mut fits, mut beyond) = (0, slots.saturating_sub(wanted) + 1);
        while fits + 1 < beyond {
            let middle = fits + (beyond - fits) / 2;
            if can_lose(middle) {
                fits = middle;
            } else {
                beyond = middle;
            }
        }
        slots - fits
    }
}

impl Sequence {
    /// Slots of each pool of the device that a resume takes at most: with everything restored that can be.
    fn slots_to_resume(&self, store: &Store) -> Vec<u32> {
        let mut slots = vec![0; usize::from(store.pages.groups())];
        let rows = self.needed_rows(store, &self.restorable);
        let pages = rows.into_iter().map(|row| self.rows[row]).chain([self.state]).flatten();
        for owned in pages {
            slots[usize::from(store.pages.get(owned.page).place.group)] += 1;
        }
        let fresh = if self.resumed { Vec::new() } else { self.fresh(store, &self.restorable) };
        for (life_cycle, _) in fresh {
            slots[usize::from(store.life_cycle(life_cycle).group)] += 1;
        }
        slots
    }
}
