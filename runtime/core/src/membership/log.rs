//! What the consensus group's log says: the state machine that every member runs over it.
//!
//! The log holds `Freeze` and `Install` and nothing else. A freeze's index names its change. Whatever is proposed twice, too
//! late or by a leader that knew less is ignored here, by everybody alike.

use crate::ids::{ClusterId, Epoch, Incarnation, RankId, Round};
use crate::round::{Member, View};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// What a node's certificate says; one process a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Name(pub Arc<str>);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One attempt at a new view: the log index of its freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Change(pub u64);

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    Freeze(Freeze),
    Install(Install),
}

/// No more rounds of `epoch`: a new view is made, without some and with others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    pub epoch: Epoch,
    pub leaving: Vec<Leaver>,
    pub joining: Vec<Joiner>,
}

/// The view that `change` came to: all who reported stood behind round `cut` with `digest`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Install {
    pub change: Change,
    pub epoch: Epoch,
    /// In view order.
    pub members: Vec<Place>,
    pub cut: Round,
    pub digest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Leaver {
    pub incarnation: Incarnation,
    pub why: Why,
}

/// Why a member is in no further view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Why {
    /// It asked to. It reports like those who stay.
    Politely,
    /// A link between it and another member was down for too long.
    LinkDown,
    /// Its contribution to a round was missing for too long.
    Silent,
    /// Its name runs another life.
    Restarted,
    /// Its replica or its contributions differ from what others have.
    Diverged,
    /// It did not report, or not in time, how far it came.
    Unreported,
    /// Its round actor starts over: a joiner takes its ranks.
    Replaced,
}

/// A life that wants a place in the view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joiner {
    pub name: Name,
    pub incarnation: Incarnation,
    /// How many ranks it hosts.
    pub ranks: u32,
    /// The life of the same node whose ranks run on.
    pub replaces: Option<Incarnation>,
}

/// A member's place in a view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub name: Name,
    pub incarnation: Incarnation,
    pub ranks: Vec<RankId>,
}

/// A freeze that no install has followed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub change: Change,
    pub freeze: Freeze,
}

/// The last change that came to its install.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    pub change: Change,
    pub epoch: Epoch,
    pub cut: Round,
    pub digest: u64,
    pub leaving: Vec<Leaver>,
    pub joining: Vec<Incarnation>,
}

/// What an entry did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its change is the pending one now.
    Frozen,
    /// Its view is the latest one now.
    Installed,
    Ignored(Ignored),
}

/// Why an entry did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ignored {
    /// Its index was applied before.
    Replayed,
    /// It is not about the latest view.
    OtherEpoch,
    /// It names nobody who could leave or join, or nothing that the pending change does not say already.
    Nothing,
    /// It would take somebody back, or somebody new, into a pending change, or leave nobody.
    Unfit,
    /// There are as many members as there may be.
    Full,
    /// Its change is not the pending one.
    OtherChange,
    /// Its members are not those that the change leads to.
    OtherMembers,
}

/// The state behind the last applied entry. A snapshot of the log is a copy of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreed {
    pub cluster: ClusterId,
    /// Of the last applied entry.
    pub index: u64,
    pub epoch: Epoch,
    pub first_round: Round,
    /// In view order; at least one.
    pub members: Vec<Place>,
    pub pending: Option<Pending>,
    pub last: Option<Past>,
    /// Ids below were given, and are never given again.
    next_rank: u32,
    members_max: usize,
}

impl Agreed {
    /// The first view of a cluster; every rank of `members` has its id.
    pub fn founded(cluster: ClusterId, members: Vec<Place>, members_max: usize) -> Self {
        let highest = members.iter().flat_map(|m| &m.ranks).map(|rank| rank.0).max();
        Self {
            cluster,
            index: 0,
            epoch: Epoch(1),
            first_round: Round(1),
            pending: None,
            last: None,
            next_rank: highest.map_or(0, |id| id.saturating_add(1)),
            members,
            members_max,
        }
    }

    /// Takes the entry at `index`; entries come in order, some perhaps again.
    pub fn apply(&mut self, index: u64, command: &Command) -> Outcome {
        self.apply_if(index, command, true)
    }

    /// `fenced` is false only where a test plants that mistake.
    pub(super) fn apply_if(&mut self, index: u64, command: &Command, fenced: bool) -> Outcome {
        if index <= self.index {
            return Outcome::Ignored(Ignored::Replayed);
        }
        self.index = index;
        let done = match command {
            Command::Freeze(freeze) => self.freeze(Change(index), freeze).map(|()| Outcome::Frozen),
            Command::Install(install) => self.install(install, fenced).map(|()| Outcome::Installed),
        };
        done.unwrap_or_else(Outcome::Ignored)
    }

    fn freeze(&mut self, change: Change, freeze: &Freeze) -> Result<(), Ignored> {
        if freeze.epoch != self.epoch {
            return Err(Ignored::OtherEpoch);
        }
        let is_member = |of: Incarnation| self.position(of).is_some();
        let once = |all: &[Incarnation]| all.iter().enumerate().all(|(at, one)| !all[..at].contains(one));
        let leaving: Vec<Incarnation> = freeze.leaving.iter().map(|l| l.incarnation).collect();
        let joining: Vec<Incarnation> = freeze.joining.iter().map(|j| j.incarnation).collect();
        let fits = leaving.iter().all(|l| is_member(*l)) && !joining.iter().any(|j| is_member(*j));
        let sized = freeze.joining.iter().all(|j| j.ranks <= RANKS_MAX);
        if !fits || !sized || !once(&leaving) || !once(&joining) || leaving.len() >= self.members.len() {
            return Err(Ignored::Unfit);
        }
        if leaving.is_empty() && joining.is_empty() && self.pending.is_none() {
            return Err(Ignored::Nothing);
        }
        if self.members.len() - leaving.len() + joining.len() > self.members_max {
            return Err(Ignored::Full);
        }
        if let Some(pending) = &self.pending {
            // Who was told that it is out has stopped; each further freeze removes somebody, so changes come to an end.
            let kept =
                |l: &Leaver| freeze.leaving.iter().any(|n| n.incarnation == l.incarnation && n.is_no_nicer_than(l));
            let narrower = freeze.joining.iter().all(|j| pending.freeze.joining.contains(j));
            if !pending.freeze.leaving.iter().all(kept) || !narrower {
                return Err(Ignored::Unfit);
            }
            let reporting = |f: &Freeze| f.leaving.iter().filter(|l| l.why == Why::Politely).count();
            let fewer = freeze.leaving.len() > pending.freeze.leaving.len()
                || freeze.joining.len() < pending.freeze.joining.len()
                || reporting(freeze) < reporting(&pending.freeze);
            if !fewer {
                return Err(Ignored::Nothing);
            }
        }
        self.pending = Some(Pending { change, freeze: freeze.clone() });
        Ok(())
    }

    fn install(&mut self, install: &Install, fenced: bool) -> Result<(), Ignored> {
        let pending = self.pending.as_ref().ok_or(Ignored::OtherChange)?;
        if pending.change != install.change && fenced {
            return Err(Ignored::OtherChange);
        }
        if install.epoch.0 != self.epoch.0 + 1 || install.cut < self.view().cut() || install.cut.0 == u64::MAX {
            return Err(Ignored::OtherEpoch);
        }
        if install.members != self.members_next() && fenced {
            return Err(Ignored::OtherMembers);
        }
        self.last = Some(Past {
            change: pending.change,
            epoch: install.epoch,
            cut: install.cut,
            digest: install.digest,
            leaving: pending.freeze.leaving.clone(),
            joining: pending.freeze.joining.iter().map(|j| j.incarnation).collect(),
        });
        let given = install.members.iter().flat_map(|m| &m.ranks).map(|rank| rank.0.saturating_add(1)).max();
        self.next_rank = self.next_rank.max(given.unwrap_or(0));
        self.pending = None;
        self.epoch = install.epoch;
        self.first_round = Round(install.cut.0 + 1);
        self.members = install.members.clone();
        Ok(())
    }

    /// The latest view.
    pub fn view(&self) -> View {
        let member = |place: &Place| Member { incarnation: place.incarnation, ranks: place.ranks.clone() };
        let members = self.members.iter().map(member).collect();
        View { epoch: self.epoch, members, first_round: self.first_round }
    }

    pub fn position(&self, member: Incarnation) -> Option<usize> {
        self.members.iter().position(|m| m.incarnation == member)
    }

    pub fn change(&self) -> Option<Change> {
        self.pending.as_ref().map(|p| p.change)
    }

    /// How the pending change sees a member off.
    pub fn leaves(&self, member: Incarnation) -> Option<Why> {
        let leaving = self.pending.iter().flat_map(|p| &p.freeze.leaving);
        leaving.filter(|l| l.incarnation == member).map(|l| l.why).next()
    }

    /// Whether the member, or joiner, is out by the latest view and the pending change.
    pub fn is_out(&self, member: Incarnation) -> bool {
        match self.position(member) {
            None => !self.joins(member),
            Some(_) => self.leaves(member).is_some_and(|why| why != Why::Politely),
        }
    }

    pub fn joins(&self, joiner: Incarnation) -> bool {
        self.pending.iter().flat_map(|p| &p.freeze.joining).any(|j| j.incarnation == joiner)
    }

    /// Members that stay, in view order.
    pub fn stayers(&self) -> impl Iterator<Item = &Place> + '_ {
        self.members.iter().filter(|m| self.leaves(m.incarnation).is_none())
    }

    /// Members whose completed rounds count for the cut: those who stay, and who leave politely.
    pub fn reporting(&self) -> impl Iterator<Item = Incarnation> + '_ {
        self.members.iter().map(|m| m.incarnation).filter(|m| !self.is_out(*m))
    }

    pub fn joiners(&self) -> impl Iterator<Item = &Joiner> + '_ {
        self.pending.iter().flat_map(|p| &p.freeze.joining)
    }

    /// Members of the view that the pending change leads to: those who stay, then those who join. A joiner's ranks get the
    /// next ids, or keep those of the life that it replaces.
    pub fn members_next(&self) -> Vec<Place> {
        let mut members: Vec<Place> = self.stayers().cloned().collect();
        let mut next = self.next_rank;
        for joiner in self.joiners() {
            let replaced = joiner.replaces.filter(|old| self.leaves(*old).is_some());
            let old = self.members.iter().find(|m| Some(m.incarnation) == replaced && m.name == joiner.name);
            let ranks = match old.filter(|old| old.ranks.len() == joiner.ranks as usize) {
                Some(old) => old.ranks.clone(),
                None => {
                    let first = next;
                    next = next.saturating_add(joiner.ranks);
                    (first..next).map(RankId).collect()
                }
            };
            members.push(Place { name: joiner.name.clone(), incarnation: joiner.incarnation, ranks });
        }
        members
    }

    /// Every invariant.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let ranks: Vec<RankId> = self.members.iter().flat_map(|m| m.ranks.iter().copied()).collect();
        if let Some((at, twice)) = ranks.iter().enumerate().find(|(at, rank)| ranks[..*at].contains(rank)) {
            return Err(format!("M6: {twice} is given twice, again at {at}"));
        }
        if let Some(high) = ranks.iter().find(|rank| rank.0 >= self.next_rank) {
            return Err(format!("M6: {high} is in the view and would be given again"));
        }
        if self.members.is_empty() || self.pending.is_some() && self.stayers().next().is_none() {
            return Err("M6: nobody stays".into());
        }
        if let (Some(change), Some(past)) = (self.change(), &self.last)
            && change <= past.change
        {
            return Err(format!("M6: {change:?} is pending behind {:?}", past.change));
        }
        Ok(())
    }
}

impl Leaver {
    /// Who was evicted is not asked for a report any more; the other way round is fine.
    fn is_no_nicer_than(&self, before: &Leaver) -> bool {
        before.why == Why::Politely || self.why != Why::Politely
    }
}

/// Ranks that one node hosts at most: more than any machine has devices.
const RANKS_MAX: u32 = 1024;

/// Voters at most: with more, each entry waits for more of them and no more failures are borne in practice.
pub const VOTERS_MAX: usize = 5;

/// Who votes in the consensus group of a view: an odd number, at most five, the first in view order. A witness, which is in no
/// view, comes last: with it two members make three voters.
pub fn voters(members: &[Place], witness: Option<Incarnation>) -> Vec<Incarnation> {
    let mut voters: Vec<Incarnation> = members.iter().map(|m| m.incarnation).chain(witness).take(VOTERS_MAX).collect();
    if voters.len().is_multiple_of(2) {
        voters.pop();
    }
    voters
}
