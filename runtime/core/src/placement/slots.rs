//! The working copy of the ranks' loads while a batch is placed.

use super::config::CountChildren;
use super::{Assigned, Routing, Why};
use crate::admission::Admitted;

/// Loads by dense rank, and the room that is left.
///
/// Counts are 64 bits wide: a batch cannot overflow them, whatever loads and weights were claimed.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots {
    pub(super) active: Vec<u64>,
    pub(super) tokens: Vec<u64>,
    /// Free slots that are not to be used: those of [`Routing::held`], and those of parents that are not placed yet.
    held: Vec<u64>,
    any_held: bool,
    cap: u64,
    count_children: CountChildren,
    /// No rank has fewer requests than `fewest`, and none before `from` has so few: requests are only added.
    fewest: u64,
    from: usize,
    /// Buffer of [`open`](Self::open).
    relaxed: Vec<u32>,
}

impl Slots {
    /// Takes the ranks' loads, and orders the batch: strict requests before the others, each in batch order.
    pub(super) fn open(
        &mut self,
        routing: &Routing<'_>,
        (batch, count_children): (&[Admitted], CountChildren),
        strict: impl Fn(&Admitted) -> bool,
        order: &mut Vec<u32>,
    ) {
        self.load(routing, count_children);
        order.clear();
        self.relaxed.clear();
        for (index, admitted) in batch.iter().enumerate() {
            let among = if strict(admitted) { &mut *order } else { &mut self.relaxed };
            among.push(index as u32);
            if let Some(rank) = self.parent_hold(admitted) {
                self.held[rank] += self.weight(admitted);
                self.any_held = true;
            }
        }
        if order.is_empty() {
            std::mem::swap(order, &mut self.relaxed);
        } else {
            order.append(&mut self.relaxed);
        }
    }

    fn load(&mut self, routing: &Routing<'_>, count_children: CountChildren) {
        self.cap = u64::from(routing.cap);
        self.count_children = count_children;
        self.active.clear();
        self.active.extend(routing.loads.iter().map(|load| u64::from(load.active_requests)));
        self.tokens.clear();
        self.tokens.extend(routing.loads.iter().map(|load| load.active_tokens));
        self.held.clear();
        self.held.resize(self.active.len(), 0);
        for (held, given) in self.held.iter_mut().zip(routing.held) {
            *held = u64::from(*given);
        }
        self.any_held = self.held.iter().any(|held| *held > 0);
        (self.fewest, self.from) = (0, self.active.len());
    }

    pub(super) fn ranks(&self) -> u32 {
        self.active.len() as u32
    }

    /// Whether some slots were not to be used when the batch came.
    pub(super) fn any_held(&self) -> bool {
        self.any_held
    }

    pub(super) fn weight(&self, admitted: &Admitted) -> u64 {
        self.count_children.weight(admitted.request.children)
    }

    fn parent_hold(&self, admitted: &Admitted) -> Option<usize> {
        let parent = admitted.request.children > 0 && self.count_children == CountChildren::StrictCap;
        let rank = admitted.reserved.filter(|_| parent)? as usize;
        (rank < self.active.len()).then_some(rank)
    }

    /// Lets go of the room kept for a parent, as its turn to be placed has come: it fits there, or anywhere else that
    /// leaves the other parents' room alone.
    pub(super) fn release(&mut self, admitted: &Admitted) {
        if self.any_held
            && let Some(rank) = self.parent_hold(admitted)
        {
            self.held[rank] -= self.weight(admitted);
        }
    }

    /// Takes the room again, for a parent that was not placed after all and is looked at later.
    pub(super) fn hold(&mut self, admitted: &Admitted) {
        if self.any_held
            && let Some(rank) = self.parent_hold(admitted)
        {
            self.held[rank] += self.weight(admitted);
        }
    }

    /// Room under the hard cap.
    pub(super) fn fits(&self, rank: u32, weight: u64) -> bool {
        let rank = rank as usize;
        self.active[rank] + self.held[rank] + weight <= self.cap
    }

    /// Room under a batch's target.
    pub(super) fn under(&self, rank: u32, weight: u64, target: u64) -> bool {
        self.active[rank as usize] + weight <= target && (!self.any_held || self.fits(rank, weight))
    }

    /// A rank's soft target: its share of all requests times `multiplier`, at least what a rank has, at most the cap.
    /// `rest`: weight of the requests that are not placed yet.
    pub(super) fn target(&self, multiplier: f64, rest: u64) -> u64 {
        let all = self.active.iter().sum::<u64>() + rest;
        let fair = all.div_ceil(self.active.len() as u64);
        let scaled = (multiplier * fair as f64).ceil() as u64;
        scaled.max(self.most_active()).min(self.cap)
    }

    pub(super) fn most_active(&self) -> u64 {
        self.active.iter().copied().max().unwrap_or(0)
    }

    /// Room for a request that no rank under the target takes. The published routers then look at no limit at all.
    pub(super) fn last_resort(&self, rank: u32, weight: u64) -> bool {
        let published = self.count_children != CountChildren::StrictCap && !self.any_held;
        published || self.fits(rank, weight)
    }

    /// The rank with the fewest requests among those of last resort, ties to the lowest. It is under the target if any
    /// rank is.
    pub(super) fn emptiest(&mut self, weight: u64) -> Option<u32> {
        if !self.any_held {
            let rank = self.next_emptiest()?;
            return self.last_resort(rank, weight).then_some(rank);
        }
        let roomy = (0..self.ranks()).filter(|rank| self.last_resort(*rank, weight));
        roomy.min_by_key(|rank| self.active[*rank as usize])
    }

    /// # Cost
    /// One comparison a request while ranks fill up evenly; at worst two looks at each rank.
    fn next_emptiest(&mut self) -> Option<u32> {
        let here = |slots: &Self| slots.active[slots.from..].iter().position(|active| *active == slots.fewest);
        let step = match here(self) {
            Some(step) => step,
            None => {
                self.fewest = self.active.iter().copied().min()?;
                self.from = 0;
                here(self)?
            }
        };
        self.from += step;
        Some(self.from as u32)
    }

    /// `tokens`: what the request adds to the rank's token load.
    pub(super) fn place(&mut self, rank: u32, weight: u64, tokens: u64) {
        let rank = rank as usize;
        self.active[rank] += weight;
        self.tokens[rank] = self.tokens[rank].saturating_add(tokens);
    }

    pub(super) fn active_of(&self, rank: u32) -> u32 {
        self.active[rank as usize].min(u64::from(u32::MAX)) as u32
    }

    pub(super) fn tokens_of(&self, rank: u32) -> u64 {
        self.tokens[rank as usize]
    }
}

pub(super) fn assign(index: u32, rank: u32, why: Why) -> Assigned {
    Assigned { index, rank, why }
}

/// 32 bits are what the interface carries; a target is never above a cap of 32 bits.
pub(super) fn expected(target: u64) -> u32 {
    target.min(u64::from(u32::MAX)) as u32
}
