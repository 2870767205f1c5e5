//! The KV-aware router: the prefix that a rank has cached, weighed against its load.

use super::config::{Config, CountChildren};
use super::permutation::shuffle;
use super::remap::Remap;
use super::slots::{Slots, assign, expected, strict_first};
use super::{Choice, Placement, Routing, Why};
use crate::admission::{Admitted, HEAD_TOKENS, Waiting};
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
    field: Field,
}

/// The ranks that a request may go to, side by side for the scoring loop.
#[derive(Clone, Debug, Default)]
struct Field {
    ranks: Vec<u32>,
    tokens: Vec<f64>,
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
        let Scratch { slots, order, rest, field } = &mut scratch;
        slots.load(routing, batch, self.count_children);
        strict_first(batch, |a| a.request.explicit.is_some() && a.request.relax == Some(false), order);
        let rest_weight = self.place_first(routing, batch, (slots, order), rest, out);
        rest.sort_by(|a, b| by_prefix(&batch[*a as usize].request, &batch[*b as usize].request));
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
            slots.place(rank, weight, uncached(&admitted.request, row, rank));
            field.placed(rank, slots, target);
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
        let prompt = f64::from(request.tokens);
        let longest = field.ranks.iter().map(|rank| matched(row, *rank)).max()?;
        let gated = f64::from(longest) / prompt.max(1.0) <= self.match_threshold;
        let total: f64 = field.tokens.iter().sum();
        let share = total.max(prompt);
        // An empty prompt on idle ranks has no load to compare.
        let share = if share == 0.0 { 1.0 } else { share };
        field.matches.clear();
        field.matches.extend(field.ranks.iter().map(|rank| if gated { 0.0 } else { f64::from(matched(row, *rank)) }));
        field.scores.clear();
        let terms = field.tokens.iter().zip(&field.matches);
        field
            .scores
            .extend(terms.map(|(tokens, matched)| (prompt - matched) + self.load_weight * ((tokens / share) * prompt)));
        let order = |at: usize| (field.scores[at], field.tokens[at]);
        let mut at = 0;
        let mut tied = 1;
        for other in 1..field.scores.len() {
            if order(other) < order(at) {
                (at, tied) = (other, 1);
            } else if order(other) == order(at) {
                tied += 1;
            }
        }
        if tied > 1 {
            let best = order(at);
            field.shuffled.clear();
            field.shuffled.extend(0..field.ranks.len() as u32);
            shuffle(request.number.0, &mut field.shuffled);
            let ties = field.shuffled.iter().map(|at| *at as usize);
            at = ties.into_iter().find(|at| order(*at) == best).unwrap_or(at);
        }
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
        self.weight = Some(weight);
    }

    /// Follows a placement: the rank's new load, or the field is to be gathered again.
    fn placed(&mut self, rank: u32, slots: &Slots, target: u64) {
        let (Some(weight), Ok(at)) = (self.weight, self.ranks.binary_search(&rank)) else {
            return;
        };
        if slots.under(rank, weight, target) {
            self.tokens[at] = slots.tokens_of(rank) as f64;
        } else {
            self.weight = None;
        }
    }
}

fn matched(row: &[u32], rank: u32) -> u32 {
    row.get(rank as usize).copied().unwrap_or(0)
}

fn uncached(request: &Waiting, row: &[u32], rank: u32) -> u64 {
    u64::from(request.tokens.saturating_sub(matched(row, rank)))
}

/// Requests that share a prefix are placed one after the other, the longest of them first.
fn by_prefix(a: &Waiting, b: &Waiting) -> std::cmp::Ordering {
    let head = |request: &Waiting| request.head.len().min(HEAD_TOKENS);
    a.head[..head(a)].cmp(&b.head[..head(b)]).then(b.tokens.cmp(&a.tokens))
}
