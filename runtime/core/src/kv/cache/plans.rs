//! Drop plans: which pages the end points of an old turn need, so that they can go when newer turns replace them.
//!
//! A plan does not hold its pages; it says only that they may go once all plans that name them were dropped, unless
//! somebody outside the plans' conversation used them meanwhile.

use super::config::Error;
use super::lifecycle::{Policy, Retention};
use super::pages::{PageId, State};
use super::sequence::{Committing, Sequence, SequenceId};
use super::store::{Path, Store};
use super::{Manager, Violation};
use crate::ids::ConversationKey;
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlanId(pub u64);

impl fmt::Display for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "drop plan {}", self.0)
    }
}

/// What plans say of a page that is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// Tells this page from a later one of the same id.
    serial: u64,
    plans: u32,
    /// When it was last used, and by which conversation; 0 if not since the first of these plans.
    used: u64,
    user: Option<ConversationKey>,
    /// When it was last used by another one than that.
    used_by_other: u64,
}

impl Mark {
    /// Somebody outside the conversation used the page after that time.
    fn is_wanted(&self, since: u64, conversation: Option<ConversationKey>) -> bool {
        let is_own = self.user.is_some() && self.user == conversation;
        since < if is_own { self.used_by_other } else { self.used }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pages: Vec<(PageId, u64)>,
    made: u64,
    conversation: Option<ConversationKey>,
    scope: Scope,
}

/// How a turn is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Turn {
    /// Its end points replace those of older turns.
    Current,
    /// Another turn of the conversation is under way: its end points are those of a request on its own.
    PerRequest,
}

/// What came of a turn's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnEnd {
    /// The turn's end points are known and will be replaced in time.
    pub planned: bool,
    pub plans: u32,
}

/// A conversation's turns.
#[derive(Clone, Debug, Default)]
struct Turns {
    current: Option<SequenceId>,
    /// Oldest first.
    plans: VecDeque<PlanId>,
    last_use: u64,
    last_use_us: u64,
}

/// The conversations that have a turn or a plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Book {
    turns: BTreeMap<ConversationKey, Turns>,
    by_use: BTreeMap<u64, ConversationKey>,
    uses: u64,
    /// It never goes back, so the order of uses is that of their times.
    now_us: u64,
}

impl Book {
    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// An empty one at the same time.
    pub fn cleared(&self) -> Self {
        Self { now_us: self.now_us, ..Self::default() }
    }

    fn touch(&mut self, conversation: ConversationKey) -> &mut Turns {
        self.uses += 1;
        let turns = self.turns.entry(conversation).or_default();
        self.by_use.remove(&turns.last_use);
        (turns.last_use, turns.last_use_us) = (self.uses, self.now_us);
        self.by_use.insert(self.uses, conversation);
        turns
    }

    fn remove(&mut self, conversation: ConversationKey) -> Option<Turns> {
        let turns = self.turns.remove(&conversation)?;
        self.by_use.remove(&turns.last_use);
        Some(turns)
    }
}

impl Store {
    /// A sequence of `conversation` holds the page from now on.
    pub fn note_interest(&mut self, page: PageId, conversation: Option<ConversationKey>) {
        let Some(mark) = self.marks.get_mut(&page) else { return };
        if conversation.is_none() || conversation != mark.user {
            mark.used_by_other = mark.used;
        }
        self.uses += 1;
        (mark.used, mark.user) = (self.uses, conversation);
    }

    /// One more plan names the page. Tells this page from a later one of the same id.
    fn mark(&mut self, page: PageId) -> u64 {
        self.uses += 1;
        self.set_planned(page, true);
        let new = Mark { serial: self.uses, plans: 0, used: 0, user: None, used_by_other: 0 };
        let mark = self.marks.entry(page).or_insert(new);
        mark.plans += 1;
        mark.serial
    }

    /// One plan less names the page; its mark, if that was the last one.
    fn unname_plan(&mut self, page: PageId, serial: u64) -> Option<Mark> {
        let mark = self.marks.get_mut(&page).filter(|mark| mark.serial == serial)?;
        mark.plans -= 1;
        if mark.plans > 0 {
            return None;
        }
        self.set_planned(page, false);
        self.marks.remove(&page)
    }

    fn set_planned(&mut self, page: PageId, planned: bool) {
        self.pages.set_planned(page, planned);
        let (node, life_cycle) = (self.pages.get(page).node, self.pages.get(page).life_cycle);
        if let Some(node) = node {
            self.rank_page(node, life_cycle);
        }
    }

    /// A plan that named the page was dropped. The last one takes the page along, if nobody uses or wants it.
    fn unmark(&mut self, page: PageId, serial: u64, plan: &Plan) {
        let Some(mark) = self.unname_plan(page, serial) else { return };
        let wanted = mark.is_wanted(plan.made, plan.conversation);
        if !wanted && self.pages.get(page).state() == State::Droppable && self.pages.is_queued(page) {
            self.vanish(page);
        }
    }

    /// The pages of a stopped sequence's moving end points: what is out of every window after the next turn. Sinks and
    /// full attention serve all turns. `None` if the sequence's end is no end point any more.
    fn moving_pages(&self, sequence: &Sequence) -> Option<BTreeSet<PageId>> {
        let end = sequence.committed();
        let path = self.matched(&sequence.scope, &sequence.tokens, &sequence.path);
        if end == 0 || self.reusable(&path, 0) != end {
            return None;
        }
        let mut pages = BTreeSet::new();
        // Earlier end points first: the last one decides whether there is a plan.
        for &length in sequence.ends.iter().chain([&end]) {
            self.collect(&path, length, length == end, &mut pages)?;
        }
        Some(pages)
    }

    /// `None` if a required page of the last end point is missing.
    fn collect(&self, path: &Path, length: u32, is_last: bool, pages: &mut BTreeSet<PageId>) -> Option<()> {
        let block_tokens = self.config.block_tokens;
        for (index, life_cycle) in (0u8..).zip(&self.config.life_cycles) {
            let blocks = match (life_cycle.retention, life_cycle.policy) {
                (Retention::Full, _) | (_, Policy::Private) => continue,
                (Retention::State, _) => {
                    pages.extend(self.page_on(path, index, length.saturating_sub(1) / block_tokens));
                    continue;
                }
                (Retention::Window { .. }, _) => {
                    life_cycle.retention.stale(length, block_tokens).end..length.div_ceil(block_tokens.get())
                }
            };
            for block in blocks {
                match self.page_on(path, index, block) {
                    Some(page) => {
                        let needed = block_tokens.get().min(length - block * block_tokens.get());
                        if is_last || self.pages.get(page).covered >= needed {
                            pages.insert(page);
                        }
                    }
                    None if is_last && life_cycle.is_required() => return None,
                    None => {}
                }
            }
        }
        Some(())
    }

    fn check_marks(&self, plans: &BTreeMap<PlanId, Plan>) -> Result<(), Violation> {
        let mut named: BTreeMap<PageId, u32> = BTreeMap::new();
        for (page, serial) in plans.values().flat_map(|plan| &plan.pages) {
            if self.marks.get(page).is_some_and(|mark| mark.serial == *serial) {
                *named.entry(*page).or_default() += 1;
            }
        }
        for (page, mark) in &self.marks {
            let there = self.pages.is_alive(*page) && self.pages.get(*page).is_planned();
            if !there || named.get(page) != Some(&mark.plans) {
                return Err(Violation::new(
                    "11.11",
                    format!("{page:?} is named by {:?} plans: {mark:?}", named.get(page)),
                ));
            }
        }
        match self.pages.iter().find(|(id, page)| page.is_planned() && !self.marks.contains_key(id)) {
            Some((id, _)) => Err(Violation::new("11.11", format!("{id:?} counts as planned, but has no mark"))),
            None => Ok(()),
        }
    }
}

impl Manager {
    /// Makes a plan of a stopped sequence's end points; `None` if its end is none. Also says how many pages of each life
    /// cycle it names.
    ///
    /// # Errors
    /// The sequence is not open, or still commits.
    pub fn plan(&mut self, id: SequenceId) -> Result<Option<(PlanId, Vec<u32>)>, Error> {
        let sequence = self.sequences.get(&id).ok_or(Error::UnknownSequence { sequence: id })?;
        if sequence.committing != Committing::Stopped {
            return Err(Error::StillCommits { sequence: id });
        }
        let (conversation, scope) = (sequence.conversation, sequence.scope);
        let Some(pages) = self.store.moving_pages(sequence) else { return Ok(None) };
        let mut counts = vec![0; self.store.config.life_cycles.len()];
        let mut named = Vec::with_capacity(pages.len());
        for page in pages {
            counts[usize::from(self.store.pages.get(page).life_cycle)] += 1;
            named.push((page, self.store.mark(page)));
        }
        self.planned += 1;
        let plan = PlanId(self.planned);
        self.plans.insert(plan, Plan { pages: named, made: self.store.uses, conversation, scope });
        Ok(Some((plan, counts)))
    }

    /// Drops a plan. Pages that somebody holds, wants or plans stay and fall under the usual order.
    ///
    /// # Errors
    /// It was dropped before.
    pub fn drop_plan(&mut self, id: PlanId) -> Result<(), Error> {
        let plan = self.plans.remove(&id).ok_or(Error::UnknownPlan { plan: id })?;
        for (page, serial) in &plan.pages {
            self.store.unmark(*page, *serial, &plan);
        }
        self.store.sweep();
        Ok(())
    }

    /// A turn of a conversation begins.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn begin_turn(&mut self, conversation: ConversationKey, id: SequenceId) -> Result<Turn, Error> {
        if !self.sequences.contains_key(&id) {
            return Err(Error::UnknownSequence { sequence: id });
        }
        let turns = self.book.touch(conversation);
        if turns.current.is_some() {
            return Ok(Turn::PerRequest);
        }
        turns.current = Some(id);
        self.forget_conversations();
        Ok(Turn::Current)
    }

    /// The turn's prompt is committed and its sequence stopped: its end points replace those of the oldest turn.
    ///
    /// # Errors
    /// The sequence is not the conversation's current one, or still commits.
    pub fn end_turn(&mut self, conversation: ConversationKey, id: SequenceId) -> Result<TurnEnd, Error> {
        if self.book.turns.get(&conversation).and_then(|turns| turns.current) != Some(id) {
            return Err(Error::NotCurrent { sequence: id, conversation });
        }
        let plan = self.plan(id)?;
        let turns_max = self.store.config.turns_max as usize;
        let turns = self.book.touch(conversation);
        turns.current = None;
        turns.plans.extend(plan.as_ref().map(|(plan, _)| *plan));
        let oldest = if turns.plans.len() > turns_max { turns.plans.pop_front() } else { None };
        let plans = turns.plans.len() as u32;
        if plans == 0 {
            self.book.remove(conversation);
        }
        if let Some(oldest) = oldest {
            self.drop_plan(oldest)?;
        }
        Ok(TurnEnd { planned: plan.is_some(), plans })
    }

    /// The conversation is over: its plans are dropped.
    pub fn expire(&mut self, conversation: ConversationKey) {
        let turns = self.book.remove(conversation).unwrap_or_default();
        for plan in turns.plans {
            // Plans of the book are dropped by nobody else; one that a caller dropped is gone already.
            let _ = self.drop_plan(plan);
        }
    }

    /// A turn whose prompt was never finished gives way to the next one. Closing its sequence does not say so.
    ///
    /// # Errors
    /// The sequence is not the conversation's current one.
    pub fn abandon_turn(&mut self, conversation: ConversationKey, id: SequenceId) -> Result<(), Error> {
        let turns = self.book.turns.get_mut(&conversation).filter(|turns| turns.current == Some(id));
        let turns = turns.ok_or(Error::NotCurrent { sequence: id, conversation })?;
        turns.current = None;
        if turns.plans.is_empty() {
            self.book.remove(conversation);
        }
        Ok(())
    }

    fn forget_conversations(&mut self) {
        while self.book.turns.len() > self.store.config.conversations_max as usize {
            let Some(oldest) = self.oldest_idle() else { return };
            self.expire(oldest);
        }
    }

    /// The conversation used longest ago, those apart whose current turn is under way.
    fn oldest_idle(&self) -> Option<ConversationKey> {
        let idle = |conversation: &ConversationKey| {
            let current = self.book.turns.get(conversation).and_then(|turns| turns.current);
            current.is_none_or(|current| !self.sequences.contains_key(&current))
        };
        self.book.by_use.values().copied().find(idle)
    }

    /// It is that time, or a later one that was named before: conversations expire whose time has come.
    pub fn advance(&mut self, now_us: u64) {
        self.book.now_us = self.book.now_us.max(now_us);
        while self.poll_timeout().is_some_and(|at_us| at_us <= self.book.now_us) {
            let Some(oldest) = self.oldest_idle() else { return };
            self.expire(oldest);
        }
    }

    /// When the next conversation expires, unless it is used before.
    ///
    /// # Cost
    /// The conversations whose turns are under way, at most.
    pub fn poll_timeout(&self) -> Option<u64> {
        let ttl_us = self.store.config.conversation_ttl_us?;
        let turns = self.book.turns.get(&self.oldest_idle()?)?;
        Some(turns.last_use_us.saturating_add(ttl_us))
    }

    /// The plans and turns of a conversation, or of a scope, are no more. Pages that they name stay: what nobody else has
    /// used goes with its blocks.
    pub(super) fn forget_plans(&mut self, conversation: Option<ConversationKey>, scope: Option<Scope>) {
        let turns = conversation.and_then(|conversation| self.book.remove(conversation)).unwrap_or_default();
        let is_meant = |id: &PlanId, plan: &Plan| {
            let is_of = conversation.is_some() && plan.conversation == conversation;
            is_of || turns.plans.contains(id) || scope == Some(plan.scope)
        };
        let gone: Vec<PlanId> = self.plans.iter().filter(|(id, plan)| is_meant(id, plan)).map(|(id, _)| *id).collect();
        for plan in gone.into_iter().filter_map(|id| self.plans.remove(&id)) {
            for (page, serial) in plan.pages {
                self.store.unname_plan(page, serial);
            }
        }
        if scope.is_some() {
            self.forget_turns(scope);
        }
    }

    /// Turns of the scope, and conversations that have neither turn nor plan, are no more.
    fn forget_turns(&mut self, scope: Option<Scope>) {
        for conversation in self.book.turns.keys().copied().collect::<Vec<_>>() {
            let Some(turns) = self.book.turns.get_mut(&conversation) else { continue };
            let scope_of = |id| self.sequences.get(&id).map(|sequence| sequence.scope);
            turns.current = turns.current.filter(|id| scope_of(*id) != scope);
            turns.plans.retain(|plan| self.plans.contains_key(plan));
            if turns.current.is_none() && turns.plans.is_empty() {
                self.book.remove(conversation);
            }
        }
    }

    pub(super) fn check_plans(&self) -> Result<(), Violation> {
        let listed: BTreeSet<ConversationKey> = self.book.by_use.values().copied().collect();
        if listed.len() != self.book.turns.len() || self.book.turns.keys().any(|key| !listed.contains(key)) {
            return Err(Violation::new("B1", format!("{} conversations, {} in order", self.book.len(), listed.len())));
        }
        self.store.check_marks(&self.plans)
    }
}
