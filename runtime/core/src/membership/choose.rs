//! Whom to evict: the smallest set that leaves no broken link among the rest.
//!
//! Members are dots, broken links are lines; the set that touches every line and is smallest goes. So one broken direction
//! costs one member, and two that accuse each other cannot both go. Of sets of one size that with more accusers goes, then
//! that with fewer ranks, then the one later in view order.

use super::log::{Leaver, Place, Why};
use crate::ids::{Epoch, Incarnation, Round};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// What a member sees of the others: what it says when it suspects somebody, and when it is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sight {
    pub by: Incarnation,
    /// Of its view: only members of the latest one are listened to.
    pub epoch: Epoch,
    /// Members to which its link has been down for long.
    pub down: Vec<Incarnation>,
    /// The lowest round that it has not completed.
    pub round: Round,
    /// Members whose contribution to `round` has been missing for long.
    pub missing: Vec<Incarnation>,
    /// Members that are gone for certain.
    pub gone: Vec<Leaver>,
}

impl Sight {
    /// Whether it accuses nobody.
    pub fn is_clear(&self) -> bool {
        self.down.is_empty() && self.missing.is_empty() && self.gone.is_empty()
    }
}

/// Sets looked at for one group of members with broken links among them. Real faults are a dead member or a cut network, which
/// take a handful; a pattern that takes more gets the best set found so far.
const SETS_MAX: usize = 20_000;

/// Who leaves, in view order, by what the members of `epoch` see.
pub fn choose(members: &[Place], epoch: Epoch, sights: &[Sight]) -> Vec<Leaver> {
    let position = |of: Incarnation| members.iter().position(|m| m.incarnation == of);
    let sights: Vec<(usize, &Sight)> =
        sights.iter().filter(|s| s.epoch == epoch).filter_map(|s| Some((position(s.by)?, s))).collect();
    let mut leaving: BTreeMap<usize, Why> = BTreeMap::new();
    for gone in sights.iter().flat_map(|(_, sight)| &sight.gone) {
        if let Some(at) = position(gone.incarnation) {
            leaving.entry(at).or_insert(gone.why);
        }
    }
    // Who waits in a later round waits for a member that itself waits in the lowest one.
    let lowest = sights.iter().filter(|(_, s)| !s.missing.is_empty()).map(|(_, s)| s.round).min();
    let mut broken = Broken::new(members);
    for (by, sight) in &sights {
        let silent = sight.missing.iter().filter(|_| Some(sight.round) == lowest).map(|of| (*of, Why::Silent));
        let accused = sight.down.iter().map(|of| (*of, Why::LinkDown)).chain(silent);
        for (of, why) in accused {
            if let Some(of) = position(of).filter(|of| !leaving.contains_key(of) && !leaving.contains_key(by)) {
                broken.accuse(*by, of, why);
            }
        }
    }
    leaving.extend(broken.smallest_set());
    let leaver = |(at, why): (usize, Why)| Leaver { incarnation: members[at].incarnation, why };
    leaving.into_iter().map(leaver).collect()
}

/// Lines between members, by their position in view order.
struct Broken {
    ranks: Vec<usize>,
    links: Vec<BTreeSet<usize>>,
    accusers: Vec<BTreeMap<usize, Why>>,
}

impl Broken {
    fn new(members: &[Place]) -> Self {
        let ranks = members.iter().map(|m| m.ranks.len()).collect();
        let count = members.len();
        Self { ranks, links: vec![BTreeSet::new(); count], accusers: vec![BTreeMap::new(); count] }
    }

    fn accuse(&mut self, by: usize, of: usize, why: Why) {
        if by != of {
            self.links[by].insert(of);
            self.links[of].insert(by);
            // A link that is down explains why nothing comes over it.
            let known = self.accusers[of].entry(by).or_insert(why);
            *known = why.min(*known);
        }
    }

    fn smallest_set(&self) -> Vec<(usize, Why)> {
        let mut seen = BTreeSet::new();
        let mut all = Vec::new();
        for start in 0..self.links.len() {
            let mut group = BTreeSet::new();
            let mut open = vec![start];
            while let Some(at) = open.pop() {
                if seen.insert(at) {
                    group.insert(at);
                    open.extend(self.links[at].iter().copied());
                }
            }
            if group.len() > 1 {
                let mut search = Search { broken: self, best: self.by_degree(&group), sets: 0 };
                search.go_on(&mut BTreeSet::new());
                all.extend(search.best);
            }
        }
        all.into_iter().map(|at| (at, self.why(at))).collect()
    }

    /// A set that will do, to begin with: whoever has most broken links goes, until none is left.
    fn by_degree(&self, group: &BTreeSet<usize>) -> BTreeSet<usize> {
        let mut set = BTreeSet::new();
        loop {
            let degree = |at: &usize| self.links[*at].difference(&set).count();
            let left = group.iter().filter(|at| !set.contains(*at) && degree(at) > 0);
            let Some(most) = left.max_by_key(|at| degree(at)).copied() else { return set };
            set.insert(most);
        }
    }

    /// `Less`: `a` goes rather than `b`.
    fn compare(&self, a: &BTreeSet<usize>, b: &BTreeSet<usize>) -> Ordering {
        let accusers = |set: &BTreeSet<usize>| -> usize { set.iter().map(|at| self.accusers[*at].len()).sum() };
        let ranks = |set: &BTreeSet<usize>| -> usize { set.iter().map(|at| self.ranks[*at]).sum() };
        let smaller = a.len().cmp(&b.len());
        let blamed = accusers(b).cmp(&accusers(a));
        let cheaper = ranks(a).cmp(&ranks(b));
        smaller.then(blamed).then(cheaper).then_with(|| b.iter().rev().cmp(a.iter().rev()))
    }

    fn why(&self, at: usize) -> Why {
        // A member that goes for the sake of others may be accused by none: its link is the broken one.
        self.accusers[at].values().copied().min().unwrap_or(Why::LinkDown)
    }
}

struct Search<'a> {
    broken: &'a Broken,
    best: BTreeSet<usize>,
    sets: usize,
}

impl Search<'_> {
    /// Either the member with most lines left goes, or all who are at the other ends of them do.
    fn go_on(&mut self, set: &mut BTreeSet<usize>) {
        self.sets += 1;
        if self.sets > SETS_MAX || set.len() > self.best.len() {
            return;
        }
        let broken = self.broken;
        let left = |at: usize| broken.links[at].iter().filter(|other| !set.contains(*other)).count();
        let group = (0..broken.links.len()).filter(|at| !set.contains(at) && self.is_of_group(*at));
        let most = group.map(|at| (left(at), at)).filter(|(lines, _)| *lines > 0).max();
        let Some((_, most)) = most else {
            if broken.compare(set, &self.best) == Ordering::Less {
                self.best = set.clone();
            }
            return;
        };
        set.insert(most);
        self.go_on(set);
        set.remove(&most);
        let others: Vec<usize> = broken.links[most].difference(set).copied().collect();
        set.extend(others.iter().copied());
        self.go_on(set);
        for other in others {
            set.remove(&other);
        }
    }

    /// Lines of other groups are not for this search: the best set so far touches every line of its own.
    fn is_of_group(&self, at: usize) -> bool {
        self.best.contains(&at) || self.broken.links[at].iter().any(|other| self.best.contains(other))
    }
}
