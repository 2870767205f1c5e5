//! Views of a cluster whose member list is fixed: who runs now, and from which round on they go on together.
//!
//! Every member of the list has a seat; whoever sits in seat 0 has the chair. A member tells the chair which life of it
//! runs, and how far it came, whenever a link to the chair comes up and whenever that changes. The chair waits until it
//! knows a living member in **every** seat. If they are not all in one view it starts a change: freeze, report, fill and
//! donate, install, as in the protocol's views; a leader that a consensus group elects will do the same with fewer.
//!
//! Since a change needs all seats, two changes cannot both come to an end, and since each is named by the chair's life and
//! a count, a message of an older one is not taken. A chair that dies in a change leaves the others frozen until it is back;
//! it then learns from their reports how far the change came.
//!
//! # Invariants
//! - V1: the round machine is there exactly while this member is in a view that has a place for its incarnation.
//! - V2: a member is frozen exactly while a change is pending.
//! - V3: a view is installed only under the pending change, and only behind the round that this member came to.

mod chair;

use crate::digest;
use crate::ids::{ClusterId, Epoch, Incarnation, RankId, Round};
use crate::replica::Snapshot;
use crate::round::{self, Contribution, Entry, Member, Merged, View};
use chair::Chair;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A place in the member list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Seat(pub u32);

/// The seat whose member drives changes.
pub const CHAIR: Seat = Seat(0);

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seat {}", self.0)
    }
}

/// Names one attempt at a new view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub chair: Incarnation,
    pub count: u64,
}

/// What members say to each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    Contribution(Box<Contribution>),
    /// To the chair.
    Report(Box<Report>),
    // The rest is from the chair, or on its behalf.
    /// A chair that just began asks for a report.
    Ask,
    Freeze(Change),
    /// The input of the round that this member lacks.
    Fill {
        change: Change,
        merged: Box<Merged>,
    },
    /// Send your state to these.
    Donate {
        change: Change,
        to: Vec<Seat>,
    },
    /// From the donor to a member that joins.
    State {
        change: Change,
        state: Box<State>,
    },
    Install {
        change: Change,
        cluster: ClusterId,
        view: View,
    },
    /// There is no place for this life of yours: begin another.
    Leave {
        change: Change,
    },
}

/// Which life of a member runs, and how far it came.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub incarnation: Incarnation,
    /// The pending change, under which this member is frozen.
    pub change: Option<Change>,
    pub standing: Standing,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Standing {
    /// In no view yet. `given`: the round whose state it was given under the pending change.
    Outside { given: Option<Round> },
    Inside {
        cluster: ClusterId,
        view: View,
        completed: Round,
        /// What its replica said of `completed`.
        digest: u64,
        /// The input of `completed`, under a pending change.
        last: Option<Box<Merged>>,
    },
}

/// What a member that joins begins with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    pub cluster: ClusterId,
    pub epoch: Epoch,
    /// The round behind which the state was taken.
    pub round: Round,
    pub clock_us: u64,
    pub replica: Snapshot,
}

#[derive(Debug)]
pub enum Input {
    /// For the round machine. What is announced outside a view is kept for the first one.
    Round(round::Input),
    LinkUp(Seat),
    LinkDown(Seat),
    Received {
        from: Seat,
        message: Box<Message>,
    },
    /// The replica's state behind the last completed round, as asked by `Effect::Donate`.
    Donated {
        change: Change,
        to: Vec<Seat>,
        replica: Box<Snapshot>,
    },
}

#[derive(Debug)]
pub enum Effect {
    Send {
        to: Seat,
        message: Box<Message>,
    },
    /// To the replica.
    Completed(Merged),
    /// To the replica, before any round of the view: it answers with `Applied` of the round before. With a state it starts
    /// from that, without one it goes on; in the first view of a cluster it starts empty.
    Installed {
        cluster: ClusterId,
        view: View,
        replica: Option<Box<Snapshot>>,
    },
    /// Asks the replica for its state.
    Donate {
        change: Change,
        to: Vec<Seat>,
    },
    /// This life has no place in the cluster any more: draw another incarnation.
    Left(Left),
    Dropped(Dropped),
}

/// Why a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Left {
    /// The others went on without it.
    NotInView,
    /// Its replica differs from that of most members.
    Diverged { round: Round },
    /// The view cannot follow what it has.
    Misfit { completed: Round, first_round: Round },
}

/// What was not taken: counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dropped {
    Round(round::Dropped),
    /// Of a change that is not the pending one.
    OtherChange,
    /// Only the chair may say so.
    NotTheChair(Seat),
    /// A contribution that its sender may not make.
    NotItsOwn(Seat),
    /// In no view, so there is no round to take part in.
    Outside,
}

/// Why this member can decide nothing new, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill {
    pub since_us: u64,
    /// Whose word is missing; empty while that is not known.
    pub waits_for: Vec<Seat>,
}

/// The seats and who sits where.
#[derive(Clone, Debug)]
pub struct Seating {
    /// Ranks of each member of the list, in the order of views.
    pub ranks: Vec<Vec<RankId>>,
    pub me: Seat,
    pub incarnation: Incarnation,
}

/// The machine of one life of one member.
#[derive(Debug)]
pub struct Machine {
    config: round::Config,
    seating: Seating,
    links: Vec<bool>,
    /// V1.
    round: Option<round::Machine>,
    /// V2.
    pending: Option<Change>,
    /// For a member that joins: what to begin with.
    given: Option<Box<State>>,
    /// Announced before the first view.
    announced: Vec<Entry>,
    draining: bool,
    /// Contributions to a view that is not installed here yet: one a seat at most.
    early: Vec<Option<Box<Contribution>>>,
    chair: Option<Chair>,
    /// Since when this member is outside a view, or frozen.
    halted_us: Option<u64>,
    /// A report is due once the replica has applied the last round.
    report_due: bool,
    effects: Vec<round::Effect>,
}

impl Machine {
    /// A life that is in no view yet. Its first input should be the links that are up, or a tick where it is alone.
    pub fn new(seating: Seating, config: round::Config, now_us: u64) -> Self {
        let seats = seating.ranks.len();
        let chair = (seating.me == CHAIR).then(|| Chair::new(seating.incarnation, seats));
        let mut links = vec![false; seats];
        links[seating.me.0 as usize] = true;
        Self {
            config,
            links,
            round: None,
            pending: None,
            given: None,
            announced: Vec::new(),
            draining: false,
            early: vec![None; seats],
            chair,
            halted_us: Some(now_us),
            report_due: true,
            effects: Vec::new(),
            seating,
        }
    }

    /// Takes one input at `now_us` of a monotonic clock.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Round(input) => self.round_input(now_us, input, out),
            Input::LinkUp(seat) => self.link_up(seat, out),
            Input::LinkDown(seat) => self.link_down(seat),
            Input::Received { from, message } => self.received(now_us, from, *message, out),
            Input::Donated { change, to, replica } => self.donated(change, &to, *replica, out),
        }
        self.report_if_due(now_us, out);
    }

    pub fn poll_timeout(&self) -> Option<u64> {
        self.round.as_ref().and_then(round::Machine::poll_timeout)
    }

    pub fn incarnation(&self) -> Incarnation {
        self.seating.incarnation
    }

    /// The view that this member is in.
    pub fn view(&self) -> Option<&View> {
        self.round.as_ref().map(round::Machine::view)
    }

    pub fn cluster(&self) -> Option<ClusterId> {
        self.round.as_ref().map(round::Machine::cluster)
    }

    pub fn completed(&self) -> Round {
        self.round.as_ref().map_or(Round(0), round::Machine::completed)
    }

    /// Who is missing, while nothing new can be decided here.
    pub fn standstill(&self) -> Option<Standstill> {
        let down = || (0..self.links.len()).filter(|seat| !self.links[*seat]).map(|seat| Seat(seat as u32));
        if let Some(since_us) = self.halted_us {
            let silent = self.chair.as_ref().map(Chair::silent).unwrap_or_default();
            let waits_for = if silent.is_empty() { down().collect() } else { silent };
            return Some(Standstill { since_us, waits_for });
        }
        let Standstill { since_us, waits_for } = self.round_wait()?;
        // Who is a round behind may itself wait for one that is gone, and is not to blame.
        let gone: Vec<Seat> = down().filter(|seat| waits_for.contains(seat)).collect();
        Some(Standstill { since_us, waits_for: if gone.is_empty() { waits_for } else { gone } })
    }

    /// Since when the own contribution to a round is out, and whose is missing; `None` while it is not out, or no round
    /// completes for want of a view.
    pub fn round_wait(&self) -> Option<Standstill> {
        let round = self.round.as_ref().filter(|_| self.halted_us.is_none())?;
        let (since_us, missing) = round.waits_for()?;
        let seat = |incarnation| round.view().position(incarnation).map(|at| Seat(at as u32));
        Some(Standstill { since_us, waits_for: missing.into_iter().filter_map(seat).collect() })
    }

    fn send(&self, to: Seat, message: Message, out: &mut Vec<Effect>) {
        out.push(Effect::Send { to, message: Box::new(message) });
    }

    fn others(&self) -> impl Iterator<Item = Seat> + use<> {
        let me = self.seating.me;
        (0..self.seating.ranks.len() as u32).map(Seat).filter(move |seat| *seat != me)
    }

    fn round_input(&mut self, now_us: u64, input: round::Input, out: &mut Vec<Effect>) {
        if let round::Input::Draining(draining) = input {
            self.draining = draining;
        }
        match (&mut self.round, input) {
            (Some(round), input) => {
                round.handle(now_us, input, &mut self.effects);
                self.carry_out(out);
            }
            (None, round::Input::Announce(entry) | round::Input::FromRank { entry: Some(entry), .. }) => {
                // Bounded by who announces: an ingress by its limit, a rank by its open attempts.
                self.announced.push(entry);
            }
            (None, _) => {}
        }
    }

    fn carry_out(&mut self, out: &mut Vec<Effect>) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                round::Effect::Send(contribution) => {
                    for seat in self.others().filter(|seat| self.links[seat.0 as usize]) {
                        self.send(seat, Message::Contribution(Box::new(contribution.clone())), out);
                    }
                }
                round::Effect::Completed(merged) => {
                    let verdict = self.verdict(&merged);
                    out.push(Effect::Completed(merged));
                    if let Some(left) = verdict {
                        self.leave(left, out);
                    }
                }
                round::Effect::Dropped(dropped) => out.push(Effect::Dropped(Dropped::Round(dropped))),
            }
        }
    }

    /// All members see the same digests of the round before, so all come to the same verdict: the largest group stays, among
    /// equal ones that with the first member in view order. Who found itself damaged says 0 and loses to anyone.
    fn verdict(&self, merged: &Merged) -> Option<Left> {
        let view = self.view()?;
        let digest = |member: Incarnation| {
            merged.contributions.iter().find(|c| c.member == member).map_or(0, |contribution| contribution.digest)
        };
        let digests: Vec<u64> = view.members.iter().map(|m| digest(m.incarnation)).collect();
        let mine = digests[view.position(self.seating.incarnation)?];
        let stays = majority(&digests);
        (mine != stays).then_some(Left::Diverged { round: Round(merged.round.0 - 1) })
    }

    fn leave(&mut self, left: Left, out: &mut Vec<Effect>) {
        self.round = None;
        out.push(Effect::Left(left));
    }

    fn link_up(&mut self, seat: Seat, out: &mut Vec<Effect>) {
        self.links[seat.0 as usize] = true;
        // What was on its way when the link was down may be lost.
        let again: Vec<Contribution> = self.round.iter().flat_map(round::Machine::own_contributions).cloned().collect();
        for contribution in again {
            self.send(seat, Message::Contribution(Box::new(contribution)), out);
        }
        // A state that a donor sent may be lost with the link: the chair learns from the report that it is still wanted.
        if seat == CHAIR || self.pending.is_some() {
            self.report_due = true;
        }
        if self.chair.is_some() {
            self.send(seat, Message::Ask, out);
        }
    }

    fn link_down(&mut self, seat: Seat) {
        self.links[seat.0 as usize] = false;
        self.early[seat.0 as usize] = None;
        if let Some(chair) = &mut self.chair {
            chair.gone(seat);
        }
    }

    fn received(&mut self, now_us: u64, from: Seat, message: Message, out: &mut Vec<Effect>) {
        let of_chair = !matches!(message, Message::Contribution(_) | Message::Report(_) | Message::State { .. });
        if of_chair && from != CHAIR {
            out.push(Effect::Dropped(Dropped::NotTheChair(from)));
            return;
        }
        match message {
            Message::Contribution(contribution) => self.contribution(now_us, from, contribution, out),
            Message::Report(report) => self.reported(now_us, from, *report, out),
            Message::Ask => self.report_due = true,
            Message::Freeze(change) => {
                if self.pending != Some(change) {
                    self.given = None;
                }
                self.pending = Some(change);
                self.halted_us.get_or_insert(now_us);
                if let Some(round) = &mut self.round {
                    round.freeze();
                }
                self.report_due = true;
            }
            Message::Fill { change, merged } if self.pending == Some(change) => {
                if let Some(round) = &mut self.round {
                    round.fill(now_us, *merged, &mut self.effects);
                    self.carry_out(out);
                    self.report_due = true;
                }
            }
            Message::Donate { change, to } if self.pending == Some(change) && self.round.is_some() => {
                out.push(Effect::Donate { change, to });
            }
            Message::State { change, state } if self.pending == Some(change) && self.round.is_none() => {
                self.given = Some(state);
                self.report_due = true;
            }
            Message::Install { change, cluster, view } if self.pending == Some(change) => {
                self.install(now_us, cluster, view, out);
            }
            Message::Leave { change } if self.pending == Some(change) => self.leave(Left::NotInView, out),
            Message::Fill { .. }
            | Message::Donate { .. }
            | Message::State { .. }
            | Message::Install { .. }
            | Message::Leave { .. } => out.push(Effect::Dropped(Dropped::OtherChange)),
        }
    }

    fn contribution(&mut self, now_us: u64, from: Seat, contribution: Box<Contribution>, out: &mut Vec<Effect>) {
        let epoch = self.round.as_ref().map(|round| round.view().epoch);
        if epoch.is_none_or(|epoch| contribution.epoch > epoch) {
            // Its view is on its way to us: a member sends one contribution at most before it needs ours.
            self.early[from.0 as usize] = Some(contribution);
            return;
        }
        let Some(round) = &mut self.round else { return };
        if round.view().position(contribution.member) != Some(from.0 as usize) {
            out.push(Effect::Dropped(Dropped::NotItsOwn(from)));
            return;
        }
        round.handle(now_us, round::Input::Received(*contribution), &mut self.effects);
        self.carry_out(out);
    }

    fn reported(&mut self, now_us: u64, from: Seat, report: Report, out: &mut Vec<Effect>) {
        let Some(chair) = &mut self.chair else {
            out.push(Effect::Dropped(Dropped::NotTheChair(self.seating.me)));
            return;
        };
        let mut orders = Vec::new();
        chair.report(from, report, &self.seating.ranks, &mut orders);
        for (to, message) in orders {
            if to == self.seating.me {
                self.received(now_us, to, message, out);
            } else {
                self.send(to, message, out);
            }
        }
    }

    fn donated(&mut self, change: Change, to: &[Seat], replica: Snapshot, out: &mut Vec<Effect>) {
        let Some(round) = self.round.as_ref().filter(|_| self.pending == Some(change)) else {
            out.push(Effect::Dropped(Dropped::OtherChange));
            return;
        };
        let state = State {
            cluster: round.cluster(),
            epoch: round.view().epoch,
            round: round.completed(),
            clock_us: round.agreed_clock_us(),
            replica,
        };
        for seat in to {
            self.send(*seat, Message::State { change, state: Box::new(state.clone()) }, out);
        }
    }

    /// V3.
    fn install(&mut self, now_us: u64, cluster: ClusterId, view: View, out: &mut Vec<Effect>) {
        let misfit = Left::Misfit { completed: self.completed(), first_round: view.first_round };
        if view.position(self.seating.incarnation) != Some(self.seating.me.0 as usize) {
            return self.leave(Left::NotInView, out);
        }
        // A state of a cluster that ended meanwhile is void.
        let given = self.given.take().filter(|given| given.cluster == cluster && given.round == view.cut());
        match &mut self.round {
            Some(round) => {
                if round.cluster() != cluster || !round.install(view.clone()) {
                    return self.leave(misfit, out);
                }
            }
            None => {
                let founds = view.epoch == Epoch(1) && view.cut() == Round(0);
                let me = self.seating.incarnation;
                let machine = round::Machine::new(cluster, me, view.clone(), self.config.clone());
                let Some(mut machine) = machine.filter(|_| founds || given.is_some()) else {
                    return self.leave(misfit, out);
                };
                machine.set_clock(now_us, given.as_ref().map_or(0, |g| g.clock_us));
                self.round = Some(machine);
            }
        }
        self.pending = None;
        self.halted_us = None;
        out.push(Effect::Installed { cluster, view, replica: given.map(|g| Box::new(g.replica)) });
        self.begin_view(now_us, out);
    }

    /// Hands the round machine what came before its view did.
    fn begin_view(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        self.round_input(now_us, round::Input::Draining(self.draining), out);
        for entry in std::mem::take(&mut self.announced) {
            self.round_input(now_us, round::Input::Announce(entry), out);
        }
        for seat in 0..self.early.len() {
            if let Some(contribution) = self.early[seat].take() {
                self.contribution(now_us, Seat(seat as u32), contribution, out);
            }
        }
        self.report_due = true;
    }

    /// Tells the chair how this member stands, once its replica has said so too.
    fn report_if_due(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        while self.report_due && self.links[CHAIR.0 as usize] {
            let standing = match &self.round {
                None => Standing::Outside { given: self.given.as_ref().map(|given| given.round) },
                Some(round) => {
                    let Some(applied) = round.applied() else { return };
                    Standing::Inside {
                        cluster: round.cluster(),
                        view: round.view().clone(),
                        completed: round.completed(),
                        digest: applied.digest,
                        last: self.pending.and(round.last()).cloned().map(Box::new),
                    }
                }
            };
            self.report_due = false;
            let report = Report { incarnation: self.seating.incarnation, change: self.pending, standing };
            if self.seating.me == CHAIR {
                self.reported(now_us, CHAIR, report, out);
            } else {
                self.send(CHAIR, Message::Report(Box::new(report)), out);
            }
        }
    }

    /// Every invariant.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        if let Some(round) = &self.round {
            round.check()?;
            let seat = self.seating.me.0 as usize;
            if round.view().position(self.seating.incarnation) != Some(seat) {
                return Err(format!("V1: in a view without a place for {}", self.seating.incarnation));
            }
            if round.is_frozen() != self.pending.is_some() {
                return Err(format!("V2: frozen {}, pending {:?}", round.is_frozen(), self.pending));
            }
        }
        Ok(())
    }
}

/// The digest of the largest group that is not 0; among equal groups that of the first member.
fn majority(digests: &[u64]) -> u64 {
    let count = |digest: u64| digests.iter().filter(|d| **d == digest).count();
    let sound = digests.iter().copied().filter(|d| *d != 0);
    // `max_by_key` keeps the last of equals, so it goes backwards.
    sound.rev().max_by_key(|d| count(*d)).unwrap_or(0)
}

/// The cluster of those who begin together.
fn founded_by(members: &[Member]) -> ClusterId {
    let incarnations: Vec<u64> = members.iter().map(|m| m.incarnation.0).collect();
    ClusterId(digest::element(CLUSTER, &incarnations))
}

const CLUSTER: u64 = 0x30;

#[cfg(test)]
mod tests;
