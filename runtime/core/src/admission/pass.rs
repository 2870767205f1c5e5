//! The admission pass: which waiting requests may be placed now.
//!
//! # Source
//! The published waiting-queue rules, with two things added: what children weigh (see [`CountChildren`]), and, under
//! `strict-cap`, room kept free for a parent that waits for it.

use super::queue::{Queue, Step};
use super::waiting::Waiting;
use crate::ids::RequestNumber;
use crate::placement::CountChildren;
use std::collections::BTreeSet;

/// What one pass decides on. All slices are by dense rank index.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Slots to hand out, children counted; see [`budget`].
    pub budget: u64,
    /// Active requests a rank holds at most.
    pub cap: u32,
    /// Active requests by rank. Empty: ranks do not matter and only the budget binds (no attention data parallelism).
    pub counts: &'a [u32],
    /// Free slots by rank that must stay free (a draining or late rank: `cap`). Short or empty: none.
    pub held: &'a [u32],
    pub now_us: u64,
    pub count_children: CountChildren,
    /// The requests that may be admitted, where placement first asks the ranks for prefix matches. `None`: all.
    pub only: Option<&'a BTreeSet<RequestNumber>>,
}

/// A request that the pass lets through.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Admitted {
    pub request: Waiting,
    /// The rank where the pass keeps room for it: its conversation's, the one it insists on, or for a parent under
    /// `strict-cap` one that can take all of it.
    pub reserved: Option<u32>,
}

/// What a pass decided; kept between passes so that its buffers are allocated once.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// In service order.
    pub admitted: Vec<Admitted>,
    /// `Pass::held` plus the room kept for the first parent that waits for it; give it to the router. Empty: nothing held.
    pub held: Vec<u32>,
    /// Requests that were set aside this time.
    pub set_aside: u32,
    reserved: Vec<u64>,
}

/// The published budget: all slots of the view less the active requests, so a rank over its cap takes from the others.
pub fn budget(counts: &[u32], held: &[u32], cap: u32) -> u64 {
    let used = counts.iter().enumerate().map(|(rank, count)| {
        let held = held.get(rank).copied().unwrap_or(0);
        u64::from(*count).max((u64::from(*count) + u64::from(held)).min(u64::from(cap)))
    });
    (u64::from(cap) * counts.len() as u64).saturating_sub(used.sum())
}

enum Decision {
    Admit(Option<u32>),
    /// It waits for its conversation's rank: counted as a deferral.
    Defer(u32),
    /// It waits for the rank it insists on, or for one with room for its children.
    SetAside(u32),
}

/// Slots taken by rank while the pass runs.
struct Room<'a> {
    reserved: &'a mut [u64],
    held: &'a mut Vec<u32>,
    cap: u64,
    claimed: bool,
}

impl Room<'_> {
    fn held(&self, rank: usize) -> u64 {
        u64::from(self.held.get(rank).copied().unwrap_or(0))
    }

    fn reserve(&mut self, rank: u32, weight: u64) -> bool {
        let rank = rank as usize;
        let fits = self.reserved[rank] + self.held(rank) + weight <= self.cap;
        if fits {
            self.reserved[rank] += weight;
        }
        fits
    }

    fn emptiest(&self) -> Option<u32> {
        (0..self.reserved.len()).min_by_key(|rank| self.reserved[*rank] + self.held(*rank)).map(|rank| rank as u32)
    }

    /// Keeps what is free on `rank` from everyone behind the first parent that waits for it: its room grows with each
    /// request that ends there, so requests without children cannot starve it. Returns the slots taken out of the budget.
    fn claim(&mut self, rank: u32) -> u64 {
        if self.claimed {
            return 0;
        }
        let rank = rank as usize;
        let free = self.cap.saturating_sub(self.reserved[rank] + self.held(rank));
        self.claimed = true;
        if free > 0 {
            self.held.resize(self.reserved.len(), 0);
            self.held[rank] += free as u32;
        }
        free
    }
}

impl Queue {
    /// Takes the requests that may be placed now out of the queue, in service order, into `out` (cleared first).
    ///
    /// `pin` names the rank that a request waits for because its conversation lives there
    /// ([`Router::admission_rank`](crate::placement::Router::admission_rank)). A request whose rank is full is set aside
    /// and those behind it are looked at; one that is larger than what is left of the budget stops the pass.
    ///
    /// # Cost
    /// O(requests looked at); no allocation once `out` has grown.
    pub fn admit(&mut self, pass: &Pass<'_>, pin: impl Fn(&Waiting) -> Option<u32>, out: &mut Admission) {
        let Admission { admitted, held, set_aside, reserved } = out;
        admitted.clear();
        *set_aside = 0;
        held.clear();
        if pass.held.iter().any(|held| *held > 0) {
            held.extend_from_slice(pass.held);
        }
        reserved.clear();
        reserved.extend(pass.counts.iter().map(|count| u64::from(*count)));
        let mut room = Room { reserved, held, cap: u64::from(pass.cap), claimed: false };
        let mut budget = pass.budget;
        let judge = |request: &Waiting| {
            if pass.only.is_some_and(|only| !only.contains(&request.number)) {
                return Step::Keep;
            }
            let whole = 1 + u64::from(request.children);
            // An empty budget ends the pass before anything is counted as deferred.
            if whole > budget {
                return Step::Stop;
            }
            let (rank, step) = match decide(request, pass, &pin, &mut room) {
                Decision::Admit(reserved) => {
                    budget -= whole;
                    return Step::Take(reserved);
                }
                Decision::Defer(rank) => (rank, Step::Defer),
                Decision::SetAside(rank) => (rank, Step::Keep),
            };
            *set_aside += 1;
            if whole > 1 && pass.count_children == CountChildren::StrictCap {
                budget -= room.claim(rank).min(budget);
            }
            step
        };
        self.sweep(pass.now_us, judge, |request, reserved| admitted.push(Admitted { request, reserved }));
    }
}

fn decide(request: &Waiting, pass: &Pass<'_>, pin: &impl Fn(&Waiting) -> Option<u32>, room: &mut Room<'_>) -> Decision {
    let exists = |rank: &u32| (*rank as usize) < pass.counts.len();
    let weight = pass.count_children.weight(request.children);
    if let Some(rank) = pin(request).filter(exists) {
        return if room.reserve(rank, weight) { Decision::Admit(Some(rank)) } else { Decision::Defer(rank) };
    }
    if let Some(rank) = request.explicit.filter(exists)
        && request.is_strict_at_admission()
    {
        return if room.reserve(rank, weight) { Decision::Admit(Some(rank)) } else { Decision::SetAside(rank) };
    }
    if weight > 1
        && pass.count_children == CountChildren::StrictCap
        && let Some(rank) = room.emptiest()
    {
        return if room.reserve(rank, weight) { Decision::Admit(Some(rank)) } else { Decision::SetAside(rank) };
    }
    Decision::Admit(None)
}
