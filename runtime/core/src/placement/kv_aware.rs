//! The KV-aware router: the prefix that a rank has cached, weighed against its load.

use super::config::{Config, CountChildren};
use super::permutation::shuffle;
use super::prefix_order::PrefixOrder;
use super::remap::Remap;
use super::slots::{Slots, assign, expected};
use super::{Choice, Placement, Routing, Why};
use crate::admission::{Admitted, Waiting};
use crate::digest;
use serde::{Deserialize, Serialize};

const TABLE: u64 = 0x7761_726d_2d75_7001;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KvAware {
    load_weight: f64,
    match_threshold: f64,
    /// May be below 1: then part of a batch is dropped.
    multiplier: f64,
    cold_start_warmup: bool,
    count_children: CountChildren,
    /// Ranks that still wait for their first request, rising. A rank leaves it once.
    pending: Vec<u32>,
    #[serde(skip)]
    scratch: Scratch,
}

#[derive(Clone, Debug, Default)]
struct Scratch {
    slots: Slots,
    order: Vec<u32>,
    rest: Vec<u32>,
    prefixes: PrefixOrder,
    field: Field,
}

/// The ranks that a request may go to, side by side for the scoring loop.
#[derive(Clone, Debug, Default)]
struct Field {
    ranks: Vec<u32>,
    tokens: Vec<f64>,
    /// Sum of `tokens`.
    total: u64,
    matches: Vec<f64>,
    scores: Vec<f64>,
    shuffled: Vec<u32>,
    /// Weight that `ranks` have room for; `None`: to be gathered again.
    weight: Option<u64>,
}

/// The best rank of a field.
struct Best {
    at: usize,
    score: f64,
    gated: bool,
    tied: u32,
}

impl KvAware {
    pub fn new(config: &Config, ranks: u32) -> Self {
        Self {
            load_weight: config.load_weight,
            match_threshold: config.match_threshold,
            multiplier: config.fair_share_multiplier,
            cold_start_warmup: config.cold_start_warmup,
            count_children: config.count_children,
            pending: if config.cold_start_warmup { (0..ranks).collect() } else { Vec::new() },
            scratch: Scratch::default(),
        }
    }

    /// Ranks that wait for their first request, rising.
    pub fn pending(&self) -> &[u32] {
        &self.pending
    }

    pub(super) fn route(&mut self, routing: &Routing<'_>, batch: &[Admitted], out: &mut Placement) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let Scratch { slots, order, rest, prefixes, field } = &mut scratch;
        let strict = |a: &Admitted| a.request.explicit.is_some() && a.request.relax == Some(false);
        slots.open(routing, (batch, self.count_children), strict, order);
        let rest_weight = self.place_first(routing, batch, (slots, order), rest, out);
        prefixes.sort(batch, rest);
        let target = slots.target(self.multiplier, rest_weight);
        let mut most = target;
        field.weight = None;
        for index in rest.iter().copied() {
            let admitted = &batch[index as usize];
            let weight = slots.weight(admitted);
            slots.release(admitted);
            if weight > 1 || field.weight != Some(weight) {
                field.gather(slots, weight, target);
            }
            let row = routing.matches.row(admitted.request.number);
            let chosen = match self.score(&admitted.request, row, field) {
                Some(best) => {
                    let rank = field.ranks[best.at];
                    let matched = matched(row, rank);
                    let Best { score, gated, tied, .. } = best;
                    Some((rank, Choice::Score { score, matched, gated, tied }))
                }
                // Larger than any target, or the ranks under it are held free: any rank with room. Otherwise the
                // request is dropped, as published (a multiplier below 1).
                None if weight > 1 || slots.any_held() => {
                    slots.emptiest(weight).filter(|rank| slots.fits(*rank, weight)).map(|rank| {
                        let active = slots.active_of(rank);
                        (rank, Choice::Emptiest { active })
                    })
                }
                None => None,
            };
            let Some((rank, choice)) = chosen else {
                out.dropped.push(index);
                continue;
            };
            let added = uncached(&admitted.request, row, rank);
            slots.place(rank, weight, added);
            field.placed(rank, added, slots, target);
            most = most.max(slots.active[rank as usize].min(u64::from(routing.cap)));
            out.assigned.push(assign(index, rank, Why::plain(choice)));
        }
        out.expected = expected(most);
        self.scratch = scratch;
    }

    /// Requests that name a rank, and the first request of each cold rank. Returns the weight of the rest.
    fn place_first(
        &mut self,
        routing: &Routing<'_>,
        batch: &[Admitted],
        (slots, order): (&mut Slots, &[u32]),
        rest: &mut Vec<u32>,
        out: &mut Placement,
    ) -> u64 {
        rest.clear();
        let mut rest_weight = 0;
        for index in order.iter().copied() {
            let admitted = &batch[index as usize];
            let request = &admitted.request;
            let weight = slots.weight(admitted);
            let named = request.explicit.filter(|rank| *rank < slots.ranks());
            let cold = self.pending.first().copied().filter(|rank| *rank < slots.ranks());
            slots.release(admitted);
            match named.or(cold).filter(|rank| slots.fits(*rank, weight)) {
                Some(rank) => {
                    let row = routing.matches.row(request.number);
                    slots.place(rank, weight, uncached(request, row, rank));
                    if let Ok(at) = self.pending.binary_search(&rank) {
                        self.pending.remove(at);
                    }
                    let choice = if named.is_some() { Choice::Explicit } else { Choice::WarmUp };
                    out.assigned.push(assign(index, rank, Why::plain(choice)));
                }
                None => {
                    slots.hold(admitted);
                    rest_weight += weight;
                    rest.push(index);
                }
            }
        }
        rest_weight
    }

    /// The field's rank with the smallest (score, tokens); exact ties go to the one that the seeded permutation has first.
    fn score(&self, request: &Waiting, row: &[u32], field: &mut Field) -> Option<Best> {
        if field.ranks.is_empty() {
            return None;
        }
        let prompt = f64::from(request.tokens);
        let longest = field.match_row(row);
        let gated = longest / prompt.max(1.0) <= self.match_threshold;
        let share = (field.total as f64).max(prompt);
        // An empty prompt on idle ranks has no load to compare.
        let share = if share == 0.0 { 1.0 } else { share };
        let load = |tokens: &f64| self.load_weight * ((tokens / share) * prompt);
        field.scores.clear();
        if gated {
            field.scores.extend(field.tokens.iter().map(|tokens| prompt + load(tokens)));
        } else {
            let terms = field.tokens.iter().zip(&field.matches);
            field.scores.extend(terms.map(|(tokens, matched)| (prompt - matched) + load(tokens)));
        }
        let (at, tied) = field.best(request.number.0);
        Some(Best { at, score: field.scores[at], gated, tied })
    }

    /// Ranks that join are cold.
    pub(super) fn remap(&mut self, remap: &Remap) {
        if !self.cold_start_warmup {
            return;
        }
        self.pending = self.pending.iter().filter_map(|rank| remap.rank(*rank)).chain(remap.joined()).collect();
        self.pending.sort_unstable();
    }

    pub(super) fn digest(&self) -> u64 {
        self.pending.chunks(8).fold(TABLE, |hash, chunk| {
            let mut words = [u64::MAX; 8];
            for (word, rank) in words.iter_mut().zip(chunk) {
                *word = u64::from(*rank);
            }
            digest::element(hash, &words)
        })
    }

    pub(super) fn check(&self, ranks: u32) {
        assert!(self.pending.is_sorted_by(|a, b| a < b), "cold ranks in order");
        assert!(self.pending.last().is_none_or(|rank| *rank < ranks), "cold rank of {ranks}");
        assert!(self.cold_start_warmup || self.pending.is_empty(), "cold ranks without warm-up");
    }
}

impl Field {
    fn gather(&mut self, slots: &Slots, weight: u64, target: u64) {
        self.ranks.clear();
        self.ranks.extend((0..slots.ranks()).filter(|rank| slots.under(*rank, weight, target)));
        self.tokens.clear();
        self.tokens.extend(self.ranks.iter().map(|rank| slots.tokens_of(*rank) as f64));
        self.total = self.ranks.iter().fold(0, |total, rank| total.saturating_add(slots.tokens_of(*rank)));
        self.weight = Some(weight);
    }

    /// Follows a placement: the rank's new load, or the field is to be gathered again.
    fn placed(&mut self, rank: u32, added: u64, slots: &Slots, target: u64) {
        let (Some(weight), Ok(at)) = (self.weight, self.ranks.binary_search(&rank)) else { return };
        if slots.under(rank, weight, target) {
            self.tokens[at] = slots.tokens_of(rank) as f64;
            self.total = self.total.saturating_add(added);
        } else {
            self.weight = None;
        }
    }

    /// Takes a request's matches over; returns the longest.
    fn match_row(&mut self, row: &[u32]) -> f64 {
        self.matches.clear();
        // Ranks rise, so a field as long as the row that ends with its last rank is all of it.
        let whole =
            self.ranks.len() == row.len() && self.ranks.last().is_some_and(|rank| *rank as usize + 1 == row.len());
        if whole {
            self.matches.extend(row.iter().map(|tokens| f64::from(*tokens)));
            return f64::from(row.iter().copied().max().unwrap_or(0));
        }
        let mut longest = 0;
        self.matches.extend(self.ranks.iter().map(|rank| {
            let tokens = matched(row, *rank);
            longest = longest.max(tokens);
            f64::from(tokens)
        }));
        f64::from(longest)
    }

    /// The best rank's place in the field, and how many share its score and load.
    fn best(&mut self, seed: u64) -> (usize, u32) {
        let least = least(&self.scores);
        let mut at = self.scores.iter().position(|score| *score == least).unwrap_or(0);
        let same_score = self.scores.iter().filter(|score| **score == least).count();
        if same_score <= 1 {
            return (at, 1);
        }
        let mut tied = 1;
        for other in at + 1..self.scores.len() {
            if self.scores[other] == least {
                if self.tokens[other] < self.tokens[at] {
                    (at, tied) = (other, 1);
                } else if self.tokens[other] == self.tokens[at] {
                    tied += 1;
                }
            }
        }
        if tied > 1 {
            let tokens = self.tokens[at];
            self.shuffled.clear();
            self.shuffled.extend(0..self.ranks.len() as u32);
            shuffle(seed, &mut self.shuffled);
            let ties = |place: &usize| self.scores[*place] == least && self.tokens[*place] == tokens;
            at = self.shuffled.iter().map(|place| *place as usize).find(ties).unwrap_or(at);
        }
        (at, tied)
    }
}

/// Four running minima, which the compiler keeps in vector registers.
fn least(scores: &[f64]) -> f64 {
    let lesser = |a: f64, b: f64| if b < a { b } else { a };
    let (fours, rest) = scores.as_chunks::<4>();
    let lanes =
        fours.iter().fold([f64::INFINITY; 4], |lanes, four| std::array::from_fn(|at| lesser(lanes[at], four[at])));
    lanes.iter().chain(rest).copied().fold(f64::INFINITY, lesser)
}

fn matched(row: &[u32], rank: u32) -> u32 {
    row.get(rank as usize).copied().unwrap_or(0)
}

fn uncached(request: &Waiting, row: &[u32], rank: u32) -> u64 {
    u64::from(request.tokens.saturating_sub(matched(row, rank)))
}
