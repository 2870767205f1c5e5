//! In which order the pages of a pool go.
//!
//! Pages that no end point needs go first, then those of older turns that a plan still names, then those that an end point
//! needs; of these, the ones that save the fewest tokens for their bytes, aged: a page is treated as if it had been queued
//! later, by an eighth of its pool for each step of what it saves. Four steps are twice the tokens. What is equal there goes by
//! priority, and then least recent first.
//!
//! Where pages are on their own ([`Eviction::Pages`](super::Eviction)), all are alike but for priority and recency.

use super::config::PRIORITY_MAX;
use super::pages::{PageId, Pages};
use std::collections::VecDeque;

/// What a page is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub(super) enum Use {
    /// No end point needs it.
    None,
    /// An end point of an older turn, which a plan names, or one that a hint expects.
    Older,
    /// The last end point of a path, or one where paths part.
    End,
}

/// Pages of one class are queued together, least recent first. Lower classes go first, steps apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class(u16);

/// Steps of what a page saves.
pub(super) const STEP_MAX: u8 = 127;

impl Class {
    /// `step`: how much the page saves, by its logarithm.
    pub fn new(used: Use, step: u8, priority: u8) -> Self {
        Self((used as u16) << 14 | u16::from(step.min(STEP_MAX)) << 7 | u16::from(priority.min(PRIORITY_MAX)))
    }

    pub fn priority(self) -> u8 {
        (self.0 & 0x7f) as u8
    }

    pub fn step(self) -> u8 {
        (self.0 >> 7 & 0x7f) as u8
    }

    /// Comes before every other use.
    pub fn rank(self) -> u16 {
        self.0 >> 14
    }
}

impl std::fmt::Debug for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "class {}/{}/{}", self.rank(), self.step(), self.priority())
    }
}

/// How much later a page counts as queued, in pages that are queued.
pub(super) fn bonus(step: u8, slots: u32) -> u64 {
    u64::from(step) * u64::from(slots) / 8
}

/// The step of so many tokens a page.
pub(super) fn step_of(tokens: u32) -> u8 {
    let tokens = tokens.max(1);
    let log = tokens.ilog2();
    // The two bits after the first one.
    let quarter = if log < 2 { tokens << (2 - log) } else { tokens >> (log - 2) } & 3;
    (log * 4 + quarter) as u8
}

/// A page that will be queued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming {
    pub class: Class,
    pub held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    There(PageId),
    /// Whether it is held.
    Coming(bool),
}

impl Next {
    pub fn page(self) -> Option<PageId> {
        match self {
            Self::There(page) => Some(page),
            Self::Coming(_) => None,
        }
    }
}

/// What is left of one class.
#[derive(Debug)]
struct Front {
    class: Class,
    page: Option<PageId>,
    /// How long after now each will have been queued, and whether it is held.
    coming: VecDeque<(u32, bool)>,
}

/// Pages in the order in which they go.
#[derive(Debug)]
pub(super) struct Order<'a> {
    pages: &'a Pages,
    slots: u32,
    now: u32,
    /// Those with something left, lowest class first.
    fronts: Vec<Front>,
}

impl<'a> Order<'a> {
    pub fn new(
        pages: &'a Pages,
        slots: u32,
        now: u32,
        firsts: impl Iterator<Item = (Class, PageId)>,
        coming: impl Iterator<Item = Coming>,
    ) -> Self {
        let front = |(class, page)| Front { class, page: Some(page), coming: VecDeque::new() };
        let mut fronts: Vec<Front> = firsts.map(front).collect();
        for (after, Coming { class, held }) in (1..).zip(coming) {
            let at = fronts.binary_search_by_key(&class, |front| front.class).unwrap_or_else(|at| {
                fronts.insert(at, Front { class, page: None, coming: VecDeque::new() });
                at
            });
            fronts[at].coming.push_back((after, held));
        }
        let mut order = Self { pages, slots, now, fronts };
        for at in (0..order.fronts.len()).rev() {
            order.skip_claimed(at);
        }
        order
    }

    /// Claimed pages are passed over; a front with nothing left goes.
    fn skip_claimed(&mut self, at: usize) {
        let front = &mut self.fronts[at];
        while let Some(page) = front.page.filter(|page| self.pages.get(*page).is_claimed()) {
            front.page = self.pages.get(page).next();
        }
        if front.page.is_none() && front.coming.is_empty() {
            self.fronts.remove(at);
        }
    }

    /// When the first of a front counts as queued, from now on.
    fn due(&self, front: &Front) -> i64 {
        let queued = match (front.page, front.coming.front()) {
            (Some(page), _) => -i64::from(self.now.wrapping_sub(self.pages.queued_at(page))),
            (None, Some((after, _))) => i64::from(*after),
            (None, None) => i64::MAX / 2,
        };
        queued + bonus(front.class.step(), self.slots) as i64
    }

    /// The front whose first page goes next. Of each step only the lowest priority counts.
    fn first(&self) -> Option<usize> {
        let lowest = self.fronts.first()?.class.rank();
        let mut best: Option<(i64, usize)> = None;
        let mut step = None;
        for (at, front) in self.fronts.iter().enumerate().take_while(|(_, front)| front.class.rank() == lowest) {
            if step.replace(front.class.step()) == Some(front.class.step()) {
                continue;
            }
            let due = self.due(front);
            if best.is_none_or(|(first, _)| due < first) {
                best = Some((due, at));
            }
        }
        best.map(|(_, at)| at)
    }
}

impl Iterator for Order<'_> {
    type Item = Next;

    fn next(&mut self) -> Option<Next> {
        let at = self.first()?;
        let front = &mut self.fronts[at];
        let next = match front.page {
            Some(page) => {
                front.page = self.pages.get(page).next();
                Next::There(page)
            }
            None => Next::Coming(front.coming.pop_front()?.1),
        };
        self.skip_claimed(at);
        Some(next)
    }
}
