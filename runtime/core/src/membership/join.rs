//! Outside: the state from a donor, then its rounds, until this life stands close enough behind to be taken into a view.

use super::log::Joiner;
use super::{Config, Dropped, Effect, Joining, Left, Machine, Message, State, donate};
use crate::ids::{Epoch, Incarnation, Round};
use crate::round::{Applied, Merged};
use std::collections::VecDeque;

/// A joiner asks for its place when at most so many rounds wait for its replica.
const ROUNDS_BEHIND_MAX: usize = 2;

/// How far the state has come.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    me: Incarnation,
    stopped: bool,
    donor: Option<Incarnation>,
    /// Donors tried so far: the next one is another.
    tried: u64,
    given: Option<Given>,
    /// Answers of the replica that are about a state which is void by now.
    void: usize,
    /// Neither asks nor is asked before: a donor refused, or a change went on without this life.
    not_before_us: u64,
    backoff_us: u64,
    in_change: bool,
    /// When it last asked the leader for its place.
    said_us: Option<u64>,
    next_us: Option<u64>,
}

/// A state and the rounds behind it.
#[derive(Clone, Debug)]
struct Given {
    epoch: Epoch,
    /// The last round that the replica was given.
    round: Round,
    clock_us: u64,
    input_hash: Option<u64>,
    /// What the replica said of `round`; `None` while it works.
    applied: Option<Applied>,
    /// M7: rounds that wait for the replica.
    waiting: VecDeque<Merged>,
    bytes: usize,
}

impl Transfer {
    pub(super) fn new(me: Incarnation) -> Self {
        Self {
            me,
            stopped: false,
            donor: None,
            tried: 0,
            given: None,
            void: 0,
            not_before_us: 0,
            backoff_us: 0,
            in_change: false,
            said_us: None,
            next_us: None,
        }
    }

    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.next_us = None;
        self.forget();
    }

    /// What the next leader must be told.
    pub(super) fn say_again(&mut self) {
        self.said_us = None;
    }

    pub(super) fn next_us(&self) -> Option<u64> {
        self.next_us
    }

    pub(super) fn donor(&self) -> Option<Incarnation> {
        self.donor
    }

    /// The state is void: the next donor gives another.
    fn forget(&mut self) {
        if let Some(given) = self.given.take() {
            self.void += usize::from(given.applied.is_none());
        }
        self.donor = None;
        self.tried += 1;
    }

    pub(super) fn link_down(&mut self, peer: Incarnation) {
        if self.donor != Some(peer) {
            return;
        }
        if self.in_change && self.given.is_some() {
            // It may have reported that it has this state, and keeps it until a change goes on without that report.
            self.donor = None;
        } else {
            self.forget();
        }
    }

    /// Whether a freeze named this life, so that it may have reported.
    pub(super) fn is_in_change(&self) -> bool {
        self.in_change
    }

    /// A state whose donor is gone: kept while it may be what was reported.
    pub(super) fn is_orphan(&self) -> bool {
        self.given.is_some() && self.donor.is_none()
    }

    pub(super) fn refused(&mut self, now_us: u64, from: Incarnation) {
        if self.donor == Some(from) {
            self.forget();
            // Its log, or ours, has to go on first.
            self.not_before_us = now_us.saturating_add(REFUSED_US);
        }
    }

    /// Round, its hash and its digest, once the replica is through with all that came.
    pub(super) fn standing(&self) -> Option<(Round, Option<u64>, u64)> {
        let given = self.given.as_ref().filter(|given| given.waiting.is_empty())?;
        given.applied.map(|applied| (given.round, given.input_hash, applied.digest))
    }

    fn is_ready(&self, epoch: Epoch) -> bool {
        self.given.as_ref().is_some_and(|given| {
            let counts = given.applied.is_some() || given.input_hash.is_some();
            given.epoch == epoch && counts && given.waiting.len() <= ROUNDS_BEHIND_MAX
        })
    }

    /// Hands the replica its next round, if it is through with the last.
    fn go_on(&mut self, out: &mut Vec<Effect>) {
        let Some(given) = self.given.as_mut().filter(|given| given.applied.is_some()) else { return };
        if let Some(merged) = given.waiting.pop_front() {
            given.bytes = given.bytes.saturating_sub(donate::bytes(&merged));
            given.round = merged.round;
            given.clock_us = merged.clock_us;
            given.input_hash = Some(merged.hash());
            given.applied = None;
            out.push(Effect::Completed(merged));
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let Some(given) = &self.given else { return Ok(()) };
        let rounds = given.waiting.iter().map(|merged| merged.round.0);
        let consecutive = rounds.zip(given.round.0.saturating_add(1)..).all(|(round, next)| round == next);
        if !consecutive || given.waiting.iter().any(|merged| merged.epoch != given.epoch) {
            return Err(format!("M7: a gap behind {}", given.round));
        }
        Ok(())
    }
}

/// A donor that has nothing to give is asked again after this: 50 ms, some rounds.
const REFUSED_US: u64 = 50_000;

impl Machine {
    fn is_outside(&self) -> bool {
        self.round.is_none() && self.gone.is_none() && !self.life.witness
    }

    pub(super) fn turn_from_donor(&mut self, out: &mut Vec<Effect>) {
        if let Some(donor) = self.transfer.donor() {
            self.send(donor, Message::Enough, out);
        }
        self.transfer.forget();
    }

    /// What a change, or a new view, means for somebody outside.
    pub(super) fn follow_outside(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some(agreed) = &self.agreed else { return };
        let (joins, epoch) = (agreed.joins(self.life.incarnation), agreed.epoch);
        let donor_is_out = self.transfer.donor.is_some_and(|donor| agreed.is_out(donor));
        let other_epoch = self.transfer.given.as_ref().is_some_and(|given| given.epoch != epoch);
        let asked_before = self.transfer.given.is_none() && self.pending().is_none();
        if donor_is_out || other_epoch || asked_before || self.transfer.is_orphan() {
            // A donor that is out may have completed a round that never happened for the others.
            self.turn_from_donor(out);
        }
        let Config { rejoin_us_min, rejoin_us_max, .. } = self.config;
        let transfer = &mut self.transfer;
        if transfer.in_change && !joins {
            transfer.backoff_us = (transfer.backoff_us * 2).clamp(rejoin_us_min, rejoin_us_max);
            transfer.not_before_us = now_us.saturating_add(transfer.backoff_us);
        }
        transfer.in_change = joins;
        transfer.said_us = None;
    }

    /// Finds a donor, or asks for a place.
    pub(super) fn seek(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        self.transfer.next_us = None;
        let Some(agreed) = self.agreed.as_ref().filter(|_| self.is_outside()) else { return };
        let (me, cluster, epoch) = (self.life.incarnation, agreed.cluster, agreed.epoch);
        if now_us < self.transfer.not_before_us && !agreed.joins(me) {
            self.transfer.next_us = Some(self.transfer.not_before_us);
            return;
        }
        let stays = |m: Incarnation| !agreed.is_out(m) && Some(m) != self.life.replaces;
        let donors: Vec<Incarnation> = agreed.members.iter().map(|m| m.incarnation).filter(|m| stays(*m)).collect();
        let links: Vec<Incarnation> =
            self.links.iter().filter(|(_, link)| link.up).map(|(incarnation, _)| *incarnation).collect();
        if self.transfer.is_orphan() {
            return;
        }
        if self.transfer.donor.is_none() {
            // A view in which it lacks a link would not last.
            let all = donors.iter().all(|donor| links.contains(donor)) && !donors.is_empty();
            if all {
                let at = self.transfer.me.0.wrapping_add(self.transfer.tried) % donors.len() as u64;
                let donor = donors[at as usize];
                self.transfer.donor = Some(donor);
                self.send(donor, Message::Want { cluster, epoch }, out);
            }
            return;
        }
        if agreed.pending.is_some() || !self.transfer.is_ready(epoch) {
            return;
        }
        let again = self.transfer.said_us.map_or(0, |said| said.saturating_add(self.config.report_after_us));
        if now_us < again {
            self.transfer.next_us = Some(again);
            return;
        }
        self.transfer.said_us = Some(now_us);
        self.transfer.next_us = Some(now_us.saturating_add(self.config.report_after_us));
        let Some(leader) = self.consensus.leader else { return };
        let life = &self.life;
        let joiner = Joiner { name: life.name.clone(), incarnation: me, ranks: life.ranks, replaces: life.replaces };
        self.send(leader, Message::Joining(Box::new(Joining { joiner, epoch, links })), out);
    }

    pub(super) fn given(&mut self, from: Incarnation, state: State, out: &mut Vec<Effect>) {
        let agreed = self.agreed.as_ref().filter(|_| self.is_outside());
        let asked = self.transfer.donor == Some(from) && self.transfer.given.is_none();
        if !asked || agreed.is_none_or(|a| a.cluster != state.cluster || a.epoch != state.epoch) {
            out.push(Effect::Dropped(Dropped::Unasked));
            return;
        }
        self.transfer.given = Some(Given {
            epoch: state.epoch,
            round: state.round,
            clock_us: state.clock_us,
            input_hash: None,
            applied: None,
            waiting: VecDeque::new(),
            bytes: 0,
        });
        out.push(Effect::Restored(Box::new(state.replica)));
    }

    pub(super) fn given_round(&mut self, from: Incarnation, merged: Merged, out: &mut Vec<Effect>) {
        let from_donor = self.transfer.donor == Some(from);
        let Some(given) = self.transfer.given.as_mut().filter(|given| from_donor && given.epoch == merged.epoch) else {
            out.push(Effect::Dropped(Dropped::Unasked));
            return;
        };
        let next = given.round.0.saturating_add(given.waiting.len() as u64 + 1);
        given.bytes = given.bytes.saturating_add(donate::bytes(&merged));
        let fits = merged.round.0 == next && given.bytes <= self.config.transfer_bytes_max;
        given.waiting.push_back(merged);
        if fits {
            self.transfer.go_on(out);
        } else {
            self.turn_from_donor(out);
        }
    }

    /// The replica of somebody outside is through with what it was given.
    pub(super) fn applied_outside(&mut self, applied: Applied, out: &mut Vec<Effect>) {
        if self.transfer.void > 0 {
            self.transfer.void -= 1;
            return;
        }
        let Some(given) = self.transfer.given.as_mut().filter(|g| g.applied.is_none() && g.round == applied.round)
        else {
            out.push(Effect::Dropped(Dropped::Unasked));
            return;
        };
        given.applied = Some(applied);
        self.transfer.go_on(out);
        self.report_due |= self.agreed.as_ref().is_some_and(|agreed| agreed.joins(self.life.incarnation));
    }

    /// The latest view has a place for this life, which was in none: it stands at the cut, as it reported.
    pub(super) fn join_view(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some(agreed) = &self.agreed else { return };
        let standing = self.transfer.standing();
        let given = self.transfer.given.as_ref();
        let follows = given.is_some_and(|given| given.epoch.0 + 1 == agreed.epoch.0)
            && standing.map(|(round, _, digest)| (round, digest))
                == agreed.last.as_ref().map(|last| (last.cut, last.digest));
        let clock_us = given.map(|given| given.clock_us);
        let completed = standing.map_or(Round(0), |(round, ..)| round);
        let first_round = agreed.first_round;
        if !follows {
            return self.leave(now_us, Left::Misfit { completed, first_round }, out);
        }
        self.transfer.stop();
        self.begin_view(now_us, clock_us, out);
    }
}
