//! Admission and placement once more, slow and obvious: lists that are searched from the start, nothing kept that can be
//! computed. Property tests hold the fast ones to it.

use super::config::{Bound, Config, CountChildren, NewConversations, Policy};
use super::{RankLoad, permutation};
use crate::admission::{self, Admitted, Pass, Waiting};
use crate::ids::{ConversationKey, RequestNumber};
use std::collections::BTreeMap;

pub(crate) type MatchRows = BTreeMap<RequestNumber, Vec<u32>>;

/// A queue, a router and its history.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) config: Config,
    pub(crate) bound: Bound,
    pub(crate) waiting: Vec<Waiting>,
    /// Oldest use first.
    pub(crate) table: Vec<(ConversationKey, usize)>,
    pub(crate) cursor: usize,
    pub(crate) pending: Vec<usize>,
}

/// Where a batch went.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Placed {
    /// Index in the batch and rank, in placement order.
    pub(crate) assigned: Vec<(usize, usize)>,
    pub(crate) dropped: Vec<usize>,
    pub(crate) expected: u64,
}

/// What a pass let through, and the slots that must stay free.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Passed {
    pub(crate) admitted: Vec<Admitted>,
    pub(crate) held: Vec<u32>,
}

impl Reference {
    pub(crate) fn new(config: &Config, bound: Bound, ranks: usize) -> Self {
        let pending = if config.cold_start_warmup && config.policy == Policy::KvAware { 0..ranks } else { 0..0 };
        Self {
            config: config.clone(),
            bound,
            waiting: Vec::new(),
            table: Vec::new(),
            cursor: 0,
            pending: pending.collect(),
        }
    }

    pub(crate) fn push(&mut self, request: Waiting) {
        self.waiting.push(request);
        let by_priority = self.config.queue == admission::Policy::Priority;
        self.waiting.sort_by(|a, b| {
            let priority = if by_priority { b.priority.cmp(&a.priority) } else { std::cmp::Ordering::Equal };
            priority.then(a.number.cmp(&b.number))
        });
    }

    fn home(&self, request: &Waiting) -> Option<usize> {
        let key = request.affinity?;
        self.table.iter().find(|(known, _)| *known == key).map(|(_, rank)| *rank)
    }

    fn pin(&self, request: &Waiting, now_us: u64) -> Option<usize> {
        let waits = self.config.strict_affinity
            && self.config.policy == Policy::Conversation
            && !self.bound.expired(request, now_us);
        self.home(request).filter(|_| waits)
    }

    pub(crate) fn admit(&mut self, pass: &Pass<'_>) -> Passed {
        let ranks = pass.counts.len();
        let mut passed = Passed { admitted: Vec::new(), held: (0..ranks).map(|r| held_at(pass.held, r)).collect() };
        let mut reserved: Vec<u64> = pass.counts.iter().map(|count| u64::from(*count)).collect();
        let mut budget = pass.budget;
        let mut claimed = false;
        let strict_cap = pass.count_children == CountChildren::StrictCap;
        let mut at = 0;
        while at < self.waiting.len() {
            let request = &self.waiting[at];
            let whole = 1 + u64::from(request.children);
            if whole > budget {
                break;
            }
            let weight = pass.count_children.weight(request.children);
            let pin = self.pin(request, pass.now_us).filter(|rank| *rank < ranks);
            let named = request.explicit.map(|rank| rank as usize).filter(|rank| *rank < ranks);
            let strict = named.filter(|_| request.relax != Some(true));
            let taken = |rank: &usize| reserved[*rank] + u64::from(passed.held[*rank]);
            let roomy = (0..ranks).min_by_key(taken).filter(|_| strict_cap && weight > 1);
            match pin.or(strict).or(roomy) {
                Some(rank) if taken(&rank) + weight > pass.cap.into() => {
                    if pin.is_some() {
                        let request = &mut self.waiting[at];
                        request.since_us = if request.deferrals == 0 { pass.now_us } else { request.since_us };
                        request.deferrals += 1;
                    }
                    if strict_cap && weight > 1 && !claimed {
                        claimed = true;
                        let free = u64::from(pass.cap).saturating_sub(taken(&rank));
                        passed.held[rank] += free as u32;
                        budget -= free.min(budget);
                    }
                    at += 1;
                }
                rank => {
                    budget -= whole;
                    if let Some(rank) = rank {
                        reserved[rank] += weight;
                    }
                    let request = self.waiting.remove(at);
                    passed.admitted.push(Admitted { request, reserved: rank.map(|rank| rank as u32) });
                }
            }
        }
        passed
    }

    pub(crate) fn route(
        &mut self,
        batch: &[Admitted],
        (loads, cap, held): (&[RankLoad], u32, &[u32]),
        now_us: u64,
        matches: &MatchRows,
    ) -> Placed {
        let ranks = loads.len();
        let mut world = World {
            active: loads.iter().map(|load| u64::from(load.active_requests)).collect(),
            tokens: loads.iter().map(|load| load.active_tokens).collect(),
            given: (0..ranks).map(|rank| u64::from(held_at(held, rank))).collect(),
            cap: u64::from(cap),
            children: self.config.count_children,
            left: batch.iter().map(Some).collect(),
            any_held: false,
            placed: Placed::default(),
        };
        if ranks == 0 {
            world.placed.dropped = (0..batch.len()).collect();
            return world.placed;
        }
        let parents = batch.iter().enumerate().any(|(at, _)| world.parent_rank(at).is_some());
        world.any_held = parents || world.given.iter().any(|held| *held > 0);
        let strict = |at: &usize| {
            let request = &batch[*at].request;
            request.relax == Some(false) && (self.config.policy == Policy::Conversation || request.explicit.is_some())
        };
        let (first, then): (Vec<usize>, Vec<usize>) = (0..batch.len()).partition(strict);
        let order = [first, then].concat();
        match self.config.policy {
            Policy::Balanced => balanced(&mut world, batch, order),
            Policy::KvAware => self.kv_aware(&mut world, batch, order, matches),
            Policy::Conversation => self.conversation(&mut world, batch, order, now_us),
        }
        world.placed.dropped.sort_unstable();
        world.placed
    }

    fn kv_aware(&mut self, world: &mut World<'_>, batch: &[Admitted], order: Vec<usize>, matches: &MatchRows) {
        let matched = |at: usize, rank: usize| {
            let row = matches.get(&batch[at].request.number);
            row.and_then(|row| row.get(rank)).copied().unwrap_or(0)
        };
        let mut rest = Vec::new();
        for at in order {
            let target = world.named(at).or(self.pending.iter().copied().min());
            match target.filter(|rank| *rank < world.active.len() && world.fits(at, *rank)) {
                Some(rank) => {
                    let tokens = batch[at].request.tokens.saturating_sub(matched(at, rank));
                    world.place(at, rank, tokens);
                    self.pending.retain(|cold| *cold != rank);
                }
                None => rest.push(at),
            }
        }
        rest.sort_by(|a, b| {
            let (a, b) = (&batch[*a].request, &batch[*b].request);
            a.head.cmp(&b.head).then(b.tokens.cmp(&a.tokens))
        });
        let target = world.target(self.config.fair_share_multiplier, &rest);
        world.placed.expected = target;
        for at in rest {
            let eligible: Vec<usize> = (0..world.active.len()).filter(|rank| world.under(at, *rank, target)).collect();
            let prompt = f64::from(batch[at].request.tokens);
            let total: f64 = eligible.iter().map(|rank| world.tokens[*rank] as f64).sum();
            let best = eligible.iter().map(|rank| matched(at, *rank)).max().unwrap_or(0);
            let counts = f64::from(best) / prompt.max(1.0) > self.config.match_threshold;
            let score = |rank: usize| {
                let cached = if counts { f64::from(matched(at, rank)) } else { 0.0 };
                let share = total.max(prompt);
                let load = if share > 0.0 { world.tokens[rank] as f64 / share * prompt } else { 0.0 };
                prompt - cached + self.config.load_weight * load
            };
            let seeded = permutation(batch[at].request.number.0, eligible.len() as u32);
            let ordered: Vec<usize> = seeded.into_iter().map(|place| eligible[place as usize]).collect();
            let chosen = ordered
                .into_iter()
                .min_by(|a, b| score(*a).total_cmp(&score(*b)).then(world.tokens[*a].cmp(&world.tokens[*b])));
            match chosen.or_else(|| world.beyond_target(at)) {
                Some(rank) => {
                    let tokens = batch[at].request.tokens.saturating_sub(matched(at, rank));
                    world.place(at, rank, tokens);
                    let active = world.active[rank].min(world.cap);
                    world.placed.expected = world.placed.expected.max(active);
                }
                None => world.drop(at),
            }
        }
    }

    fn conversation(&mut self, world: &mut World<'_>, batch: &[Admitted], order: Vec<usize>, now_us: u64) {
        let ranks = world.active.len();
        self.cursor = if self.cursor < ranks { self.cursor } else { 0 };
        let mut rest = Vec::new();
        for at in order {
            let request = &batch[at].request;
            match self.pin(request, now_us).filter(|rank| *rank < ranks && world.fits(at, *rank)) {
                Some(rank) => {
                    world.place(at, rank, request.tokens);
                    self.touch(request, rank);
                }
                None => rest.push(at),
            }
        }
        rest.retain(|at| {
            let request = &batch[*at].request;
            let named = world.named(*at).filter(|_| self.home(request).is_none());
            let Some(rank) = named.filter(|rank| world.fits(*at, *rank)) else { return true };
            world.place(*at, rank, request.tokens);
            self.touch(request, rank);
            false
        });
        let multiplier = self.config.fair_share_multiplier;
        let target = world.target(if multiplier >= 1.0 { multiplier } else { 1.0 }, &rest);
        for at in rest {
            let request = &batch[at].request;
            let home = self.home(request);
            if let Some(rank) = home.filter(|rank| *rank < ranks && world.fits(at, *rank)) {
                world.place(at, rank, request.tokens);
                self.touch(request, rank);
                continue;
            }
            let Some(rank) = self.choose(world, at, target) else {
                world.drop(at);
                continue;
            };
            world.place(at, rank, request.tokens);
            if home.is_none() {
                self.touch(request, rank);
            }
        }
        world.placed.expected = target.max(world.active.iter().copied().max().unwrap_or(0));
    }

    fn choose(&mut self, world: &World<'_>, at: usize, target: u64) -> Option<usize> {
        let ranks = world.active.len();
        let under: Vec<usize> = (0..ranks).filter(|rank| world.under(at, *rank, target)).collect();
        let last: Vec<usize> = (0..ranks).filter(|rank| world.last_resort(at, *rank)).collect();
        let emptiest = last.iter().copied().min_by_key(|rank| world.active[*rank]);
        let in_turn = |rank: &usize| (*rank + ranks - self.cursor) % ranks;
        match self.config.new_conversations {
            NewConversations::LeastQueued => emptiest,
            NewConversations::RoundRobin => {
                let Some(rank) = under.into_iter().min_by_key(in_turn) else { return emptiest };
                self.cursor = (rank + 1) % ranks;
                Some(rank)
            }
            NewConversations::LeastTokens => {
                let among = if under.is_empty() { last } else { under };
                let order = |rank: &usize| (world.tokens[*rank], world.active[*rank], in_turn(rank));
                let rank = among.into_iter().min_by_key(order)?;
                self.cursor = (rank + 1) % ranks;
                Some(rank)
            }
        }
    }

    /// Binds or renews; the oldest is forgotten at the limit.
    fn touch(&mut self, request: &Waiting, rank: usize) {
        let Some(key) = request.affinity else { return };
        self.table.retain(|(known, _)| *known != key);
        self.table.push((key, rank));
        if self.table.len() > self.config.conversations_max.max(1) as usize {
            self.table.remove(0);
        }
    }
}

fn held_at(held: &[u32], rank: usize) -> u32 {
    held.get(rank).copied().unwrap_or(0)
}

fn balanced(world: &mut World<'_>, batch: &[Admitted], order: Vec<usize>) {
    let mut rest = Vec::new();
    for at in order {
        match world.named(at).filter(|rank| world.fits(at, *rank)) {
            Some(rank) => world.place(at, rank, 0),
            None => rest.push(at),
        }
    }
    let target = world.target(1.0, &rest);
    world.placed.expected = target;
    rest.sort_by_key(|at| std::cmp::Reverse(batch[*at].request.tokens));
    for at in rest {
        let ranks = 0..world.active.len();
        let under = ranks.filter(|rank| world.under(at, *rank, target));
        let chosen = under.min_by_key(|rank| (world.tokens[*rank], world.active[*rank], *rank));
        let last = || (0..world.active.len()).filter(|r| world.fits(at, *r)).min_by_key(|r| world.active[*r]);
        match chosen.or_else(last) {
            Some(rank) => {
                world.place(at, rank, batch[at].request.tokens);
                world.placed.expected = world.placed.expected.max(world.active[rank]);
            }
            None => world.drop(at),
        }
    }
}

/// The ranks while a batch is placed.
struct World<'a> {
    active: Vec<u64>,
    tokens: Vec<u64>,
    given: Vec<u64>,
    cap: u64,
    children: CountChildren,
    /// The batch; what was placed or dropped is gone.
    left: Vec<Option<&'a Admitted>>,
    any_held: bool,
    placed: Placed,
}

impl World<'_> {
    fn weight(&self, at: usize) -> u64 {
        self.left[at].map_or(0, |admitted| self.children.weight(admitted.request.children))
    }

    fn named(&self, at: usize) -> Option<usize> {
        let named = self.left[at].and_then(|admitted| admitted.request.explicit)? as usize;
        (named < self.active.len()).then_some(named)
    }

    /// Where admission keeps room for a parent.
    fn parent_rank(&self, at: usize) -> Option<usize> {
        let admitted = self.left[at]?;
        let parent = self.children == CountChildren::StrictCap && admitted.request.children > 0;
        let rank = admitted.reserved.filter(|_| parent)? as usize;
        (rank < self.active.len()).then_some(rank)
    }

    /// Slots that `at` may not use: those given, and those of parents other than itself that are still to be placed.
    fn held(&self, at: usize, rank: usize) -> u64 {
        let others = (0..self.left.len()).filter(|other| *other != at && self.parent_rank(*other) == Some(rank));
        self.given[rank] + others.map(|other| self.weight(other)).sum::<u64>()
    }

    fn fits(&self, at: usize, rank: usize) -> bool {
        self.active[rank] + self.held(at, rank) + self.weight(at) <= self.cap
    }

    fn under(&self, at: usize, rank: usize, target: u64) -> bool {
        self.active[rank] + self.weight(at) <= target && self.fits(at, rank)
    }

    fn last_resort(&self, at: usize, rank: usize) -> bool {
        let published = self.children != CountChildren::StrictCap && !self.any_held;
        published || self.fits(at, rank)
    }

    fn beyond_target(&self, at: usize) -> Option<usize> {
        let fitting =
            (0..self.active.len()).filter(|rank| (self.weight(at) > 1 || self.any_held) && self.last_resort(at, *rank));
        fitting.min_by_key(|rank| self.active[*rank]).filter(|rank| self.fits(at, *rank))
    }

    fn target(&self, multiplier: f64, rest: &[usize]) -> u64 {
        let all = self.active.iter().sum::<u64>() + rest.iter().map(|at| self.weight(*at)).sum::<u64>();
        let fair = all.div_ceil(self.active.len() as u64);
        let scaled = (multiplier * fair as f64).ceil() as u64;
        scaled.max(*self.active.iter().max().unwrap_or(&0)).min(self.cap)
    }

    fn place(&mut self, at: usize, rank: usize, tokens: u32) {
        self.active[rank] += self.weight(at);
        self.tokens[rank] += u64::from(tokens);
        self.left[at] = None;
        self.placed.assigned.push((at, rank));
    }

    fn drop(&mut self, at: usize) {
        self.left[at] = None;
        self.placed.dropped.push(at);
    }
}
