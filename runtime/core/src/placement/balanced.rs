//! The published default router: longest prompt first, each to the rank with the fewest tokens. It remembers nothing.

use super::config::CountChildren;
use super::slots::{Slots, assign, expected};
use super::{Choice, Placement, Routing, Why};
use crate::admission::Admitted;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Tokens, requests, rank: fewest first, as the heap's greatest.
type Ready = Reverse<(u64, u64, u32)>;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Balanced {
    count_children: CountChildren,
    #[serde(skip)]
    scratch: Scratch,
}

#[derive(Clone, Debug, Default)]
struct Scratch {
    slots: Slots,
    order: Vec<u32>,
    /// Rest of the batch: longest first, then in order.
    rest: Vec<(Reverse<u32>, u32, u32)>,
    ready: BinaryHeap<Ready>,
    passed_over: Vec<Ready>,
}

impl Balanced {
    pub fn new(count_children: CountChildren) -> Self {
        Self { count_children, scratch: Scratch::default() }
    }

    pub(super) fn route(&mut self, routing: &Routing<'_>, batch: &[Admitted], out: &mut Placement) {
        let Scratch { slots, order, rest, ready, passed_over } = &mut self.scratch;
        let strict = |a: &Admitted| a.request.explicit.is_some() && a.request.relax == Some(false);
        slots.open(routing, (batch, self.count_children), strict, order);
        rest.clear();
        let mut rest_weight = 0;
        for index in order.iter().copied() {
            let admitted = &batch[index as usize];
            let weight = slots.weight(admitted);
            let named = admitted.request.explicit.filter(|rank| *rank < slots.ranks());
            slots.release(admitted);
            match named.filter(|rank| slots.fits(*rank, weight)) {
                Some(rank) => {
                    // The published router counts no tokens here.
                    slots.place(rank, weight, 0);
                    out.assigned.push(assign(index, rank, Why::plain(Choice::Explicit)));
                }
                None => {
                    slots.hold(admitted);
                    rest_weight += weight;
                    rest.push((Reverse(admitted.request.tokens), rest.len() as u32, index));
                }
            }
        }
        let target = slots.target(1.0, rest_weight);
        rest.sort_unstable();
        ready.clear();
        let entry = |slots: &Slots, rank: u32| Reverse((slots.tokens_of(rank), slots.active[rank as usize], rank));
        ready.extend((0..slots.ranks()).filter(|rank| slots.active[*rank as usize] < target).map(|r| entry(slots, r)));
        let mut most = target;
        for (_, _, index) in rest.iter().copied() {
            let admitted = &batch[index as usize];
            let weight = slots.weight(admitted);
            slots.release(admitted);
            let chosen = loop {
                match ready.pop() {
                    Some(Reverse((tokens, active, rank))) if slots.under(rank, weight, target) => {
                        break Some((rank, Choice::Balanced { active: expected(active), tokens }));
                    }
                    Some(entry) => passed_over.push(entry),
                    None => break None,
                }
            };
            ready.extend(passed_over.drain(..));
            let from_ready = chosen.is_some();
            // A parent may be larger than the target; the published router fails here, and never comes here in budget.
            let fallback = || {
                let rank = slots.emptiest(weight).filter(|rank| slots.fits(*rank, weight))?;
                Some((rank, Choice::Emptiest { active: slots.active_of(rank) }))
            };
            let Some((rank, choice)) = chosen.or_else(fallback) else {
                out.dropped.push(index);
                continue;
            };
            slots.place(rank, weight, u64::from(admitted.request.tokens));
            out.assigned.push(assign(index, rank, Why::plain(choice)));
            if !from_ready {
                most = most.max(slots.active[rank as usize]);
                ready.retain(|Reverse((_, _, other))| *other != rank);
            }
            if slots.active[rank as usize] < target {
                ready.push(entry(slots, rank));
            }
        }
        out.expected = expected(most);
    }
}
