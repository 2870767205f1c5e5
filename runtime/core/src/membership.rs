//! Views of a cluster whose members come and go: who takes part in rounds, and how all of them move on together.
//!
//! A consensus group keeps a log of `Freeze` and `Install`. A freeze ends the rounds of a view: whoever stays promises to
//! complete no more of them but by a fill, and reports how far it came. When all who must have reported the same round and
//! digest, the leader proposes the install of the next view behind that round, the cut. Somebody who dies or does not report
//! meanwhile is left out by a further freeze. A member that joins takes the state from a donor before the freeze.
//!
//! The machine is that of one life of one node: a member, somebody outside that wants to join, or a witness that only votes.
//! Whichever of them leads the consensus group also leads changes. Voting and the log itself are not here: entries come in as
//! `Committed`, in order, and what is proposed may be lost or come twice.
//!
//! # Invariants
//! - M1: the round machine is there exactly while the latest view that the log says has a place for this life, which has not left.
//! - M2: it is frozen exactly while a change is pending.
//! - M3: it stands in the latest view, and at or behind the cut before it.
//! - M4: a contribution is kept early only if it is of a newer epoch than the latest view and of a linked peer.
//! - M5: a leader's reports are of the pending change, and of those whom it asks.
//! - M6: the log's state gives each rank once and leaves somebody.
//! - M7: inputs that wait for a joining replica are consecutive.
//! - M8: a donation holds back the rounds behind its state, without a gap.

mod choose;
mod donate;
mod fill;
mod join;
mod lead;
mod log;
mod message;
mod peers;
mod status;
mod suspect;

pub use choose::{Sight, choose};
pub use log::{
    Agreed, Change, Command, Freeze, Ignored, Install, Joiner, Leaver, Name, Outcome, Past, Pending, Place, VOTERS_MAX,
    Why, voters,
};
pub use message::{Consensus, Dropped, Effect, Input, Joining, Left, Level, Message, Peer, Report, State};
pub use status::{Standstill, Status};

use crate::ids::{ClusterId, Incarnation, Round};
use crate::round::{self, Contribution, Entry, Merged, View};
use donate::Donation;
use fill::Lack;
use join::Transfer;
use lead::Leader;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The bounds of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub round: round::Config,
    /// How long a link may be down, or a contribution missing, before a member suspects the other one.
    pub suspect_after_us: u64,
    /// How long a leader gathers what members see before it chooses whom to evict.
    pub suspicion_gather_us: u64,
    /// How long somebody may owe its report before the change starts again without it.
    pub report_after_us: u64,
    /// How long a member may stand still before it admits nothing any more.
    pub change_us_max: u64,
    pub members_max: usize,
    /// Inputs that wait for a joining replica at most, by a rough count of their bytes.
    pub transfer_bytes_max: usize,
    /// How long a joiner that was taken out of a change waits before it asks again: doubles from the least to the most.
    pub rejoin_us_min: u64,
    pub rejoin_us_max: u64,
}

impl Default for Config {
    /// The bounds of the protocol: 2 s, 200 ms, 1 s, 5 s, 64 members, 256 MiB, 1 to 60 s.
    fn default() -> Self {
        Self {
            round: round::Config::default(),
            suspect_after_us: 2_000_000,
            suspicion_gather_us: 200_000,
            report_after_us: 1_000_000,
            change_us_max: 5_000_000,
            members_max: 64,
            transfer_bytes_max: 256 << 20,
            rejoin_us_min: 1_000_000,
            rejoin_us_max: 60_000_000,
        }
    }
}

/// Who this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    pub name: Name,
    pub incarnation: Incarnation,
    /// How many ranks it hosts.
    pub ranks: u32,
    /// The life before, where only the round actor started over and the ranks run on.
    pub replaces: Option<Incarnation>,
    /// It votes and is in no view.
    pub witness: bool,
}

/// The link to a peer.
#[derive(Clone, Debug)]
struct Link {
    name: Name,
    replaces: Option<Incarnation>,
    up: bool,
    /// Since when it is up, or down.
    since_us: u64,
}

/// Mistakes that the tests plant, to see that they would find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    InstallOnMajority,
    NoEpochCheck,
    SkipFill,
    CompleteWhileFrozen,
    InstallWithoutChange,
    NoRestart,
    PoliteSilence,
}

/// The machine of one life.
#[derive(Clone, Debug)]
pub struct Machine {
    config: Config,
    life: Life,
    links: BTreeMap<Incarnation, Link>,
    consensus: Consensus,
    /// What the log says, as far as it was applied here.
    agreed: Option<Agreed>,
    /// M1.
    round: Option<round::Machine>,
    gone: Option<Left>,
    /// It asked for a polite leave, and when it last said so to a leader.
    leaving: bool,
    leaving_said_us: Option<u64>,
    draining: bool,
    /// Announced before the first view.
    announced: Vec<Entry>,
    /// M4.
    early: BTreeMap<Incarnation, Box<Contribution>>,
    /// Since when the latest view is installed here.
    view_since_us: u64,
    /// Since when this life is outside a view, or frozen.
    halted_us: Option<u64>,
    /// A report is due once the replica has applied what it was given.
    report_due: bool,
    /// The round that this member lacks at the cut.
    lack: Option<Lack>,
    /// Members whose digests or contributions showed that they differ.
    diverged: BTreeSet<Incarnation>,
    said_us: Option<u64>,
    /// When it looks after the others next.
    watch_us: u64,
    /// Outside: how far the state has come.
    transfer: Transfer,
    donations: BTreeMap<Incarnation, Donation>,
    leader: Option<Leader>,
    effects: Vec<round::Effect>,
    /// What this life says to itself, as a leader and as one of those who are led.
    own: VecDeque<Message>,
    #[cfg(test)]
    planted: Option<Planted>,
}

impl Machine {
    /// A life that is in no view yet.
    pub fn new(life: Life, config: Config, now_us: u64) -> Self {
        Self {
            transfer: Transfer::new(life.incarnation),
            config,
            life,
            links: BTreeMap::new(),
            consensus: Consensus::default(),
            agreed: None,
            round: None,
            gone: None,
            leaving: false,
            leaving_said_us: None,
            draining: false,
            announced: Vec::new(),
            early: BTreeMap::new(),
            view_since_us: now_us,
            halted_us: Some(now_us),
            report_due: false,
            lack: None,
            diverged: BTreeSet::new(),
            said_us: None,
            watch_us: 0,
            donations: BTreeMap::new(),
            leader: None,
            effects: Vec::new(),
            own: VecDeque::new(),
            #[cfg(test)]
            planted: None,
        }
    }

    /// Takes one input at `now_us` of a monotonic clock.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Round(input) => self.round_input(now_us, input, out),
            Input::LinkUp(peer) => self.link_up(now_us, peer, out),
            Input::LinkDown(peer) => self.link_down(now_us, peer, out),
            Input::Received { from, message } => self.received(now_us, from, *message, out),
            Input::Founded { cluster, members } => self.founded(now_us, cluster, members, out),
            Input::Restored(agreed) => self.restored(now_us, *agreed, out),
            Input::Committed { index, command } => self.committed(now_us, index, &command, out),
            Input::Consensus(consensus) => self.consensus_is(consensus),
            Input::Donated { to, epoch, round, replica } => self.donated(to, (epoch, round), *replica, out),
            Input::Leave => self.leave_politely(now_us, out),
        }
        loop {
            while let Some(message) = self.own.pop_front() {
                self.received(now_us, self.life.incarnation, message, out);
            }
            self.report_if_due(out);
            self.suspect_if_due(now_us, out);
            self.say_that_it_leaves(now_us, out);
            self.seek(now_us, out);
            self.lead(now_us, out);
            if self.own.is_empty() {
                return;
            }
        }
    }

    /// When this machine wants a `Tick`.
    pub fn poll_timeout(&self) -> Option<u64> {
        let round = self.round.as_ref().and_then(round::Machine::poll_timeout);
        let leaving = self.leaving_said_us.map(|said| said.saturating_add(self.config.report_after_us));
        let due = [round, self.watch_due_us(), leaving, self.transfer.next_us(), self.lead_next_us()];
        due.into_iter().flatten().min()
    }

    pub fn incarnation(&self) -> Incarnation {
        self.life.incarnation
    }

    fn is_planted(&self, _mistake: Planted) -> bool {
        #[cfg(test)]
        return self.planted == Some(_mistake);
        #[cfg(not(test))]
        false
    }

    fn is_linked(&self, peer: Incarnation) -> bool {
        peer == self.life.incarnation || self.links.get(&peer).is_some_and(|link| link.up)
    }

    /// Sends if the link is up: whatever must come through is sent again when it comes up.
    fn send(&mut self, to: Incarnation, message: Message, out: &mut Vec<Effect>) {
        if to == self.life.incarnation {
            self.own.push_back(message);
        } else if self.is_linked(to) {
            out.push(Effect::Send { to, message: Box::new(message) });
        }
    }

    /// Members of the latest view that are linked, apart from this one.
    fn linked_members(&self) -> Vec<Incarnation> {
        let members = self.agreed.iter().flat_map(|agreed| &agreed.members).map(|m| m.incarnation);
        members.filter(|m| *m != self.life.incarnation && self.is_linked(*m)).collect()
    }

    fn pending(&self) -> Option<Change> {
        self.agreed.as_ref().and_then(Agreed::change)
    }

    fn founded(&mut self, now_us: u64, cluster: ClusterId, members: Vec<Place>, out: &mut Vec<Effect>) {
        let fits = members.iter().any(|m| m.incarnation == self.life.incarnation || self.life.witness);
        let agreed = Agreed::founded(cluster, members, self.config.members_max);
        if self.agreed.is_some() || !fits || agreed.check().is_err() {
            out.push(Effect::Dropped(Dropped::Founded));
            return;
        }
        self.agreed = Some(agreed);
        if !self.life.witness {
            self.begin_view(now_us, None, out);
        }
    }

    /// The log's snapshot, where it went on without us.
    fn restored(&mut self, now_us: u64, agreed: Agreed, out: &mut Vec<Effect>) {
        let known = self.agreed.as_ref();
        if agreed.check().is_err() || known.is_some_and(|k| k.cluster != agreed.cluster || k.index >= agreed.index) {
            out.push(Effect::Dropped(Dropped::Entry(Ignored::Replayed)));
            return;
        }
        self.early.retain(|_, contribution| contribution.epoch > agreed.epoch);
        let epoch = agreed.epoch;
        let skips = known.is_some_and(|known| known.epoch < epoch) && agreed.position(self.life.incarnation).is_none();
        self.agreed = Some(agreed);
        if skips && self.transfer.is_in_change() {
            // A view that the snapshot skips may have had a place for it, and no life comes back.
            return self.leave(now_us, Left::NotInView { epoch }, out);
        }
        self.follow(now_us, out);
    }

    fn committed(&mut self, now_us: u64, index: u64, command: &Command, out: &mut Vec<Effect>) {
        let fenced = !self.is_planted(Planted::InstallWithoutChange);
        let Some(agreed) = &mut self.agreed else {
            out.push(Effect::Dropped(Dropped::Outside));
            return;
        };
        match agreed.apply_if(index, command, fenced) {
            Outcome::Ignored(ignored) => out.push(Effect::Dropped(Dropped::Entry(ignored))),
            Outcome::Frozen => self.follow(now_us, out),
            Outcome::Installed => {
                self.view_since_us = now_us;
                self.follow(now_us, out);
            }
        }
    }

    /// Does what the log's state asks of this life: freeze, install, or go.
    fn follow(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        self.tell_those_out(out);
        let Some(agreed) = &self.agreed else { return };
        let me = self.life.incarnation;
        if self.gone.is_some() || self.life.witness {
            return;
        }
        self.lack = None;
        self.report_due = true;
        match &mut self.round {
            Some(round) if agreed.epoch == round.view().epoch => {
                if let Some(why) = agreed.leaves(me).filter(|_| agreed.is_out(me)) {
                    self.leave(now_us, Left::Evicted(why), out);
                } else if agreed.pending.is_some() {
                    self.halted_us.get_or_insert(now_us);
                    if !self.is_planted(Planted::CompleteWhileFrozen)
                        && let Some(round) = &mut self.round
                    {
                        round.freeze();
                    }
                }
            }
            Some(_) => self.install(now_us, out),
            None if agreed.position(me).is_some() => self.join_view(now_us, out),
            None => return self.follow_outside(now_us, out),
        }
        // A snapshot of the log may hold a view and the change behind it.
        let halted = self.round.as_ref().is_some_and(round::Machine::is_frozen);
        if self.round.is_some() && self.pending().is_some() && !halted && !self.is_planted(Planted::CompleteWhileFrozen)
        {
            self.follow(now_us, out);
        }
    }

    /// M3: a stayer goes on from where it stands, which is the cut.
    fn install(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let skip = self.is_planted(Planted::SkipFill);
        let (Some(agreed), Some(round)) = (&self.agreed, &mut self.round) else { return };
        let view = agreed.view();
        if view.position(self.life.incarnation).is_none() {
            let left = if self.leaving { Left::Politely } else { Left::NotInView { epoch: view.epoch } };
            return self.leave(now_us, left, out);
        }
        let misfit = Left::Misfit { completed: round.completed(), first_round: view.first_round };
        let stands = round.applied().map(|applied| applied.digest) == agreed.last.as_ref().map(|last| last.digest);
        let follows = view.epoch.0 == round.view().epoch.0 + 1 && stands;
        #[cfg(test)]
        if skip {
            round.skip_to(view.cut());
        }
        if !(follows || skip) || !round.install(view) {
            return self.leave(now_us, misfit, out);
        }
        self.installed(now_us, out);
    }

    /// A member begins a view that it was not in before; `clock_us` is the agreed clock of the state that it was given.
    fn begin_view(&mut self, now_us: u64, clock_us: Option<u64>, out: &mut Vec<Effect>) {
        let Some(agreed) = &self.agreed else { return };
        let (me, config) = (self.life.incarnation, self.config.round.clone());
        self.round = round::Machine::new(agreed.cluster, me, agreed.view(), config);
        if let (Some(round), Some(clock_us)) = (&mut self.round, clock_us) {
            round.set_clock(now_us, clock_us);
        }
        self.installed(now_us, out);
        self.round_input(now_us, round::Input::Draining(self.draining), out);
        for entry in std::mem::take(&mut self.announced) {
            self.round_input(now_us, round::Input::Announce(entry), out);
        }
    }

    /// Says so, and takes the contributions that came before the view did.
    fn installed(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some(agreed) = &self.agreed else { return };
        let leaving = agreed.last.iter().flat_map(|last| &last.leaving);
        let polite = leaving.filter(|l| l.why == Why::Politely).map(|l| l.incarnation).collect();
        out.push(Effect::Installed { cluster: agreed.cluster, view: agreed.view(), polite });
        let epoch = agreed.epoch;
        let known: Vec<Incarnation> = agreed.members.iter().map(|m| m.incarnation).collect();
        self.halted_us = None;
        self.view_since_us = now_us;
        self.diverged.clear();
        self.donations.clear();
        self.said_us = None;
        self.watch_us = 0;
        self.links.retain(|peer, link| link.up || known.contains(peer));
        let early = std::mem::take(&mut self.early);
        for (from, contribution) in early {
            if contribution.epoch >= epoch {
                self.contribution(now_us, from, contribution, out);
            }
        }
    }

    fn leave(&mut self, now_us: u64, left: Left, out: &mut Vec<Effect>) {
        if self.gone.is_none() {
            self.round = None;
            self.gone = Some(left);
            self.donations.clear();
            self.early.clear();
            self.lack = None;
            self.leaving_said_us = None;
            self.transfer.stop();
            self.halted_us.get_or_insert(now_us);
            out.push(Effect::Left(left));
        }
    }

    fn leave_politely(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        self.leaving = true;
        self.leaving_said_us = None;
        if self.round.is_none() {
            self.leave(now_us, Left::Politely, out);
        }
    }

    /// Asks the leader to go on without this member, until a change does.
    fn say_that_it_leaves(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let said = self.leaving_said_us.is_some_and(|said| now_us < said.saturating_add(self.config.report_after_us));
        if !self.leaving || self.gone.is_some() || self.pending().is_some() || said {
            return;
        }
        let Some(agreed) = &self.agreed else { return };
        if agreed.members.len() == 1 {
            return self.leave(now_us, Left::Politely, out);
        }
        let epoch = agreed.epoch;
        self.leaving_said_us = Some(now_us);
        if let Some(leader) = self.consensus.leader {
            self.send(leader, Message::Leaving { epoch }, out);
        }
    }

    fn consensus_is(&mut self, consensus: Consensus) {
        let before = self.consensus.leader;
        self.consensus = consensus;
        if self.consensus.leader != before {
            let leads = self.consensus.leader == Some(self.life.incarnation);
            self.leader = leads.then(Leader::new);
            // What the last leader was told, the next one must be told.
            self.report_due = true;
            self.said_us = None;
            self.watch_us = 0;
            self.leaving_said_us = None;
            self.transfer.say_again();
        }
    }

    fn round_input(&mut self, now_us: u64, input: round::Input, out: &mut Vec<Effect>) {
        if let round::Input::Draining(draining) = input {
            self.draining = draining;
        }
        match (&mut self.round, input) {
            (Some(round), input) => {
                round.handle(now_us, input, &mut self.effects);
                self.carry_out(now_us, out);
            }
            (None, round::Input::Announce(entry) | round::Input::FromRank { entry: Some(entry), .. }) => {
                // Bounded by who announces: an ingress by its limit, a rank by its open attempts.
                self.announced.push(entry);
            }
            (None, round::Input::Applied(applied)) => self.applied_outside(applied, out),
            (None, _) => {}
        }
    }

    fn carry_out(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                round::Effect::Send(contribution) => {
                    for to in self.linked_members() {
                        self.send(to, Message::Contribution(Box::new(contribution.clone())), out);
                    }
                }
                round::Effect::Completed(merged) => {
                    let verdict = self.verdict(&merged);
                    self.pass_to_joiners(&merged, out);
                    out.push(Effect::Completed(merged));
                    if let Some(left) = verdict {
                        self.leave(now_us, left, out);
                    }
                }
                round::Effect::Dropped(dropped) => {
                    if let round::Dropped::Equivocation(member) = dropped {
                        self.diverged.insert(member);
                        self.watch_us = 0;
                    }
                    out.push(Effect::Dropped(Dropped::Round(dropped)));
                }
            }
        }
    }

    /// All members see the same digests of the round before, so all come to the same verdict: the largest group stays, among
    /// equal ones that with the first member in view order. Who found itself damaged says 0 and loses to anyone.
    fn verdict(&mut self, merged: &Merged) -> Option<Left> {
        let view = self.round.as_ref()?.view();
        let digest = |member: Incarnation| {
            merged.contributions.iter().find(|c| c.member == member).map_or(0, |contribution| contribution.digest)
        };
        let digests: Vec<(Incarnation, u64)> =
            view.members.iter().map(|m| (m.incarnation, digest(m.incarnation))).collect();
        let losers = losers(&digests);
        let lost = losers.contains(&self.life.incarnation);
        if !losers.is_empty() {
            self.diverged.extend(losers);
            self.watch_us = 0;
        }
        lost.then(|| Left::Diverged { round: Round(merged.round.0.saturating_sub(1)) })
    }

    /// What came before its view did is kept, one a peer: a member sends one contribution of a view before it needs ours.
    fn contribution(&mut self, now_us: u64, from: Incarnation, contribution: Box<Contribution>, out: &mut Vec<Effect>) {
        let mut contribution = contribution;
        if contribution.member != from {
            out.push(Effect::Dropped(Dropped::NotItsOwn(from)));
            return;
        }
        let Some(agreed) = self.agreed.as_ref().filter(|_| self.gone.is_none()) else {
            // Others may be founded before this one is.
            if self.gone.is_none() && self.is_linked(from) {
                self.early.insert(from, contribution);
            } else {
                out.push(Effect::Dropped(Dropped::Outside));
            }
            return;
        };
        if contribution.cluster != agreed.cluster {
            out.push(Effect::Dropped(Dropped::Round(round::Dropped::OtherCluster)));
            return;
        }
        if contribution.epoch > agreed.epoch {
            if self.is_linked(from) {
                self.early.insert(from, contribution);
            }
            return;
        }
        if self.is_planted(Planted::NoEpochCheck) {
            contribution.epoch = agreed.epoch;
        } else if agreed.is_out(from) {
            self.send_stale(from, out);
            out.push(Effect::Dropped(Dropped::Round(round::Dropped::NotAMember(from))));
            return;
        }
        let Some(round) = &mut self.round else {
            out.push(Effect::Dropped(Dropped::Outside));
            return;
        };
        round.handle(now_us, round::Input::Received(*contribution), &mut self.effects);
        self.carry_out(now_us, out);
    }

    /// A life that is out may wait for ever, frozen by a change that it was still asked in.
    fn tell_those_out(&mut self, out: &mut Vec<Effect>) {
        if self.round.is_none() && self.leader.is_none() {
            return;
        }
        let agreed = self.agreed.as_ref();
        let last = agreed.and_then(|agreed| agreed.last.as_ref()).into_iter().flat_map(|last| &last.leaving);
        let pending = agreed.and_then(|agreed| agreed.pending.as_ref()).into_iter().flat_map(|p| &p.freeze.leaving);
        let those: Vec<Incarnation> = last.chain(pending).map(|leaver| leaver.incarnation).collect();
        for life in those {
            if life != self.life.incarnation {
                self.send_stale(life, out);
            }
        }
    }

    /// Tells a life that it is out, which the log may not tell it any more.
    fn send_stale(&mut self, to: Incarnation, out: &mut Vec<Effect>) {
        if let Some(agreed) = self.agreed.as_ref().filter(|agreed| agreed.is_out(to)) {
            // Out by the pending change: the next epoch will not have it.
            let next = u64::from(agreed.position(to).is_some());
            let (cluster, epoch) = (agreed.cluster, crate::ids::Epoch(agreed.epoch.0 + next));
            self.send(to, Message::Stale { cluster, epoch }, out);
        }
    }

    /// The view that this member is in.
    pub fn view(&self) -> Option<&View> {
        self.round.as_ref().map(round::Machine::view)
    }

    pub fn cluster(&self) -> Option<ClusterId> {
        self.agreed.as_ref().map(|agreed| agreed.cluster)
    }

    /// The last completed round; 0 outside a view.
    pub fn completed(&self) -> Round {
        self.round.as_ref().map_or(Round(0), round::Machine::completed)
    }

    /// What the log says, as far as it was applied here: what its snapshot holds, and whom the voters are chosen from.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }
}

/// Who is not of the largest group of equal digests that are not 0; among equal groups that of the first member stays.
fn losers(digests: &[(Incarnation, u64)]) -> Vec<Incarnation> {
    let count = |digest: u64| digests.iter().filter(|(_, d)| *d == digest).count();
    let sound = digests.iter().map(|(_, digest)| *digest).filter(|digest| *digest != 0);
    // `max_by_key` keeps the last of equals, so it goes backwards. Where all are damaged all say the same.
    let stays = sound.rev().max_by_key(|digest| count(*digest)).unwrap_or(0);
    digests.iter().filter(|(_, digest)| *digest != stays).map(|(member, _)| *member).collect()
}

#[cfg(test)]
mod tests;
