//! The conversation router: turns of a conversation go to the rank that holds its prefix.

use super::config::{Bound, Config, CountChildren, NewConversations, UnknownPolicy};
use super::remap::Remap;
use super::slots::{Slots, assign, expected};
use super::table::Table;
use super::{Choice, Placement, Routing, Why};
use crate::admission::{Admitted, Waiting};
use crate::digest;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Conversation {
    new_conversations: NewConversations,
    /// At least 1.
    multiplier: f64,
    /// `None`: a turn whose rank is full goes elsewhere at once.
    strict: Option<Bound>,
    count_children: CountChildren,
    table: Table,
    /// The rank whose turn is next, below the number of ranks.
    cursor: u32,
    #[serde(skip)]
    scratch: Scratch,
}

#[derive(Clone, Debug, Default)]
struct Scratch {
    slots: Slots,
    order: Vec<u32>,
    rest: Vec<u32>,
}

impl Conversation {
    pub fn new(config: &Config, bound: Bound) -> Self {
        let multiplier = config.fair_share_multiplier;
        Self {
            new_conversations: config.new_conversations,
            multiplier: if multiplier >= 1.0 { multiplier } else { 1.0 },
            strict: config.strict_affinity.then_some(bound),
            count_children: config.count_children,
            table: Table::new(config.conversations_max),
            cursor: 0,
            scratch: Scratch::default(),
        }
    }

    /// With the policy for new conversations by name. An unknown one becomes round-robin; the warning is the caller's to
    /// report.
    pub fn with_policy_name(config: &Config, bound: Bound, name: &str) -> (Self, Option<UnknownPolicy>) {
        let (new_conversations, warning) = NewConversations::from_name(name);
        (Self { new_conversations, ..Self::new(config, bound) }, warning)
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The rank whose turn is next.
    pub fn cursor(&self) -> u32 {
        self.cursor
    }

    /// Binds a conversation ahead of its first turn.
    pub fn bind(&mut self, key: crate::ids::ConversationKey, rank: u32) {
        if self.table.find(key).is_none() {
            self.table.bind(key, rank);
        }
    }

    pub(super) fn admission_rank(&self, request: &Waiting, now_us: u64) -> Option<u32> {
        let bound = self.strict?;
        let key = request.affinity?;
        if bound.expired(request, now_us) {
            return None;
        }
        self.table.rank(key)
    }

    pub(super) fn route(&mut self, routing: &Routing<'_>, batch: &[Admitted], out: &mut Placement) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let Scratch { slots, order, rest } = &mut scratch;
        let strict = |admitted: &Admitted| admitted.request.relax == Some(false);
        slots.open(routing, (batch, self.count_children), strict, order);
        if self.cursor >= slots.ranks() {
            self.cursor = 0;
        }
        if self.strict.is_some() {
            self.place_pinned(routing.now_us, batch, (slots, order), out);
        }
        let rest_weight = self.place_explicit(batch, (slots, order), rest, out);
        let target = slots.target(self.multiplier, rest_weight);
        for index in rest.iter().copied() {
            self.place_rest(index, &batch[index as usize], target, slots, out);
        }
        out.expected = expected(target.max(slots.most_active()));
        self.scratch = scratch;
    }

    /// Turns whose slot admission reserved go first, so that nobody else takes it. The others stay in `order`.
    fn place_pinned(
        &mut self,
        now_us: u64,
        batch: &[Admitted],
        (slots, order): (&mut Slots, &mut Vec<u32>),
        out: &mut Placement,
    ) {
        let Some(bound) = self.strict else { return };
        order.retain(|index| {
            let admitted = &batch[*index as usize];
            let request = &admitted.request;
            let Some(key) = request.affinity else {
                return true;
            };
            if bound.expired(request, now_us) {
                return true;
            }
            let Some((place, rank)) = self.table.find(key) else {
                return true;
            };
            let weight = slots.weight(admitted);
            slots.release(admitted);
            if rank >= slots.ranks() || !slots.fits(rank, weight) {
                slots.hold(admitted);
                return true;
            }
            slots.place(rank, weight, u64::from(request.tokens));
            self.table.touch(place);
            out.assigned.push(assign(*index, rank, Why::plain(Choice::Pinned { deferrals: request.deferrals })));
            false
        });
    }

    /// Requests that name a rank and whose conversation is not bound. Returns the weight of the rest.
    fn place_explicit(
        &mut self,
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
            if let Some(rank) = named
                && request.affinity.is_none_or(|key| self.table.find(key).is_none())
            {
                slots.release(admitted);
                if slots.fits(rank, weight) {
                    slots.place(rank, weight, u64::from(request.tokens));
                    if let Some(key) = request.affinity {
                        self.table.bind(key, rank);
                    }
                    out.assigned.push(assign(index, rank, Why::plain(Choice::Explicit)));
                    continue;
                }
                slots.hold(admitted);
            }
            rest_weight += weight;
            rest.push(index);
        }
        rest_weight
    }

    fn place_rest(&mut self, index: u32, admitted: &Admitted, target: u64, slots: &mut Slots, out: &mut Placement) {
        let request = &admitted.request;
        let weight = slots.weight(admitted);
        slots.release(admitted);
        let bound = request.affinity.and_then(|key| self.table.find(key));
        if let Some((place, rank)) = bound
            && rank < slots.ranks()
            && slots.fits(rank, weight)
        {
            slots.place(rank, weight, u64::from(request.tokens));
            self.table.touch(place);
            out.assigned.push(assign(index, rank, Why::plain(Choice::Bound)));
            return;
        }
        let Some((rank, choice)) = self.choose(weight, target, slots) else {
            out.dropped.push(index);
            return;
        };
        out.over_cap += u32::from(!slots.fits(rank, weight));
        slots.place(rank, weight, u64::from(request.tokens));
        if let Some(key) = request.affinity
            && bound.is_none()
        {
            self.table.bind(key, rank);
        }
        let why = Why { choice, overflow_from: bound.map(|(_, home)| home) };
        out.assigned.push(assign(index, rank, why));
    }

    fn choose(&mut self, weight: u64, target: u64, slots: &mut Slots) -> Option<(u32, Choice)> {
        let by = self.new_conversations;
        let chosen = match by {
            NewConversations::RoundRobin => self.next_in_turn(weight, target, slots),
            NewConversations::LeastQueued => slots.emptiest(weight),
            NewConversations::LeastTokens => self.fewest_tokens(weight, target, slots),
        };
        if let Some(rank) = chosen {
            let (active, tokens) = (slots.active_of(rank), slots.tokens_of(rank));
            return Some((rank, Choice::New { by, active, tokens }));
        }
        let rank = slots.emptiest(weight)?;
        Some((rank, Choice::Emptiest { active: slots.active_of(rank) }))
    }

    fn next_in_turn(&mut self, weight: u64, target: u64, slots: &Slots) -> Option<u32> {
        for _ in 0..slots.ranks() {
            let rank = self.cursor;
            self.cursor = after(rank, slots.ranks());
            if slots.under(rank, weight, target) {
                return Some(rank);
            }
        }
        None
    }

    fn fewest_tokens(&mut self, weight: u64, target: u64, slots: &Slots) -> Option<u32> {
        let under = self.fewest_tokens_among(slots, |rank| slots.under(rank, weight, target));
        let rank = under.or_else(|| self.fewest_tokens_among(slots, |rank| slots.last_resort(rank, weight)))?;
        self.cursor = after(rank, slots.ranks());
        Some(rank)
    }

    /// Fewest tokens, then fewest requests, then the next in turn.
    fn fewest_tokens_among(&self, slots: &Slots, room: impl Fn(u32) -> bool) -> Option<u32> {
        let turn = |rank: u32| if rank < self.cursor { rank + slots.ranks() } else { rank };
        let mut best: Option<u32> = None;
        let mut fewest = u64::MAX;
        for (rank, tokens) in (0..).zip(&slots.tokens) {
            if *tokens > fewest || !room(rank) {
                continue;
            }
            let active = |rank: u32| (slots.active[rank as usize], turn(rank));
            if *tokens < fewest || best.is_none_or(|best| active(rank) < active(best)) {
                (best, fewest) = (Some(rank), *tokens);
            }
        }
        best
    }

    pub(super) fn remap(&mut self, remap: &Remap) {
        self.table.remap(remap);
        self.cursor = remap.cursor(self.cursor);
    }

    pub(super) fn digest(&self) -> u64 {
        digest::element(self.table.digest(), &[u64::from(self.cursor)])
    }

    pub(super) fn check(&self, ranks: u32) {
        self.table.check(ranks);
        assert!(self.cursor < ranks.max(1), "cursor {} of {ranks} ranks", self.cursor);
    }
}

fn after(rank: u32, ranks: u32) -> u32 {
    if rank + 1 < ranks { rank + 1 } else { 0 }
}
