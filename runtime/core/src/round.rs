//! Rounds: one contribution of each member in, one merged input out, the same on every member.
//!
//! The machine keeps the outbox, decides when to contribute, holds what other members sent for the next two rounds and
//! completes a round when it holds a contribution of every member. It never sends its contribution for round k + 1
//! before round k was completed and applied, so members are at most one round apart.
//!
//! # Invariants
//! - R1: an entry leaves the outbox only when the round that carried it completes here; it keeps its `seq` until then.
//! - R2: contributions are kept for rounds `completed + 1` and `completed + 2` only.
//! - R3: a contribution is built once; two different ones for one (epoch, round, member) are equivocation.
//! - R4: entries of one contribution have growing `seq`, and are at most `contribution_entries_max`.
//! - R5: a frozen machine completes no round but by `fill`, until a view is installed.
//! - R6: in lockstep a contribution says of each own rank whether it went out before the rank's step was over, and outside
//!   lockstep of none.

mod contribution;
mod lockstep;

pub use contribution::{
    Arrival, CHAIN_HASHES_MAX, Chain, Contribution, Entry, Explicit, Merged, PrefixMatch, RankSnapshot, Sequenced,
};
pub use lockstep::{Begun, Lockstep, Turn};

use crate::ids::{ClusterId, Epoch, Incarnation, RankId, Round};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// When to contribute, and how much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub round_interval_us_min: u64,
    pub busy_interval_us: u64,
    pub heartbeat_us: u64,
    pub contribution_entries_max: usize,
    /// How long a contribution waits for the local ranks' prefix matches.
    pub probe_us_max: u64,
    /// A round is one step of all ranks: a contribution waits for the local ranks' steps.
    pub lockstep: bool,
    /// How long it waits for them, from when the last round was applied.
    pub step_wait_us: u64,
}

impl Default for Config {
    /// The bounds of the protocol: 2 ms, 20 ms, 200 ms, 256 entries, 2 ms; not in lockstep, 50 ms.
    fn default() -> Self {
        Self {
            round_interval_us_min: 2_000,
            busy_interval_us: 20_000,
            heartbeat_us: 200_000,
            contribution_entries_max: 256,
            probe_us_max: 2_000,
            lockstep: false,
            step_wait_us: 50_000,
        }
    }
}

/// Who takes part in rounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    pub epoch: Epoch,
    /// In view order; none twice, at least one.
    pub members: Vec<Member>,
    pub first_round: Round,
}

impl View {
    /// Ids of all ranks in the view; a rank's dense index is its place here.
    pub fn ranks(&self) -> impl Iterator<Item = (RankId, Incarnation)> + '_ {
        self.members.iter().flat_map(|m| m.ranks.iter().map(|r| (*r, m.incarnation)))
    }

    /// The last round before this view.
    pub fn cut(&self) -> Round {
        Round(self.first_round.0.saturating_sub(1))
    }

    pub fn position(&self, member: Incarnation) -> Option<usize> {
        self.members.iter().position(|m| m.incarnation == member)
    }
}

/// A member and the ranks that it hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub incarnation: Incarnation,
    pub ranks: Vec<RankId>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// Something of this node that all must learn.
    Announce(Entry),
    /// Newest snapshot of a local rank, and what the rank has to say with it: together, so that no contribution
    /// carries the one without the other.
    FromRank {
        entry: Option<Entry>,
        snapshot: RankSnapshot,
    },
    /// What one local rank could reuse of the requests that `round` named.
    Matches {
        round: Round,
        matches: Vec<PrefixMatch>,
    },
    /// Another member's contribution.
    Received(Contribution),
    /// The replica applied `round`.
    Applied(Applied),
    Draining(bool),
    /// Time passed.
    Tick,
}

/// What the replica says after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    pub round: Round,
    pub digest: u64,
    /// Something waits in the queue, so rounds keep a busy pace.
    pub waiting: bool,
    /// The round named requests to probe: the next one brings the matches.
    pub probing: bool,
    /// In lockstep: some rank of the view said that it has a step to run in this round.
    pub stepping: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// To every other member.
    Send(Contribution),
    /// To the replica.
    Completed(Merged),
    /// Not taken, and why: counted.
    Dropped(Dropped),
}

/// Why a contribution was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dropped {
    OtherCluster,
    OlderEpoch,
    NewerEpoch,
    NotAMember(Incarnation),
    OldRound(Round),
    FutureRound(Round),
    Duplicate,
    /// Two different contributions for one round: the member is at fault.
    Equivocation(Incarnation),
    Malformed(Incarnation),
    /// The replica spoke of a round that is not the one it was given.
    UnexpectedApplied(Round),
    /// Matches came behind the contribution that would have carried them; they count as 0.
    LateMatches(Round),
}

/// Rounds that can be held at once: the next and the one after it.
const ROUNDS_HELD: usize = 2;

/// The round machine of one member.
#[derive(Clone, Debug)]
pub struct Machine {
    config: Config,
    cluster: ClusterId,
    me: Incarnation,
    view: View,
    /// The last completed round; `first_round - 1` before the first.
    completed: Round,
    /// What the replica said of `completed`; `None` while it still applies it.
    applied: Option<Applied>,
    /// When it said so.
    applied_at_us: u64,
    /// `held[i][m]`: contribution of member m for round `completed + 1 + i`.
    held: VecDeque<Vec<Option<Contribution>>>,
    outbox: VecDeque<Sequenced>,
    next_seq: u64,
    ranks: Vec<RankSnapshot>,
    /// Prefix matches for the next contribution, and how long it waits for more.
    matches: Vec<PrefixMatch>,
    ranks_matched: usize,
    probe: Option<Probe>,
    draining: bool,
    /// R5: a change of the view is under way.
    frozen: bool,
    /// The input of `completed`, for a member that lacks it; kept where there are other members.
    last: Option<Merged>,
    /// Added to the caller's clock to make this member's agreed clock.
    clock_offset_us: i64,
    agreed_clock_us: u64,
    contributed_at_us: Option<u64>,
    /// A planted mistake: entries leave the outbox when they are sent.
    #[cfg(test)]
    pub(crate) leaves_at_send: bool,
}

/// Ranks that have not answered a probe, and until when they may.
#[derive(Clone, Copy, Debug)]
struct Probe {
    open: usize,
    until_us: u64,
}

impl Machine {
    /// A member of `view` that stands before its first round; `None` if it is not one. Like after each round, the replica
    /// says first that it is there: `Applied` of the round before.
    pub fn new(cluster: ClusterId, me: Incarnation, view: View, config: Config) -> Option<Self> {
        view.position(me)?;
        let members = view.members.len();
        Some(Self {
            config,
            cluster,
            me,
            completed: view.cut(),
            applied: None,
            applied_at_us: 0,
            frozen: false,
            last: None,
            held: (0..ROUNDS_HELD).map(|_| vec![None; members]).collect(),
            view,
            outbox: VecDeque::new(),
            next_seq: 1,
            ranks: Vec::new(),
            matches: Vec::new(),
            ranks_matched: 0,
            probe: None,
            draining: false,
            clock_offset_us: 0,
            agreed_clock_us: 0,
            contributed_at_us: None,
            #[cfg(test)]
            leaves_at_send: false,
        })
    }

    /// Takes one input at `now_us` of a monotonic clock.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Announce(entry) => self.announce(entry),
            Input::FromRank { entry, snapshot } => {
                match self.ranks.iter_mut().find(|r| r.rank == snapshot.rank) {
                    Some(known) => *known = snapshot,
                    None => self.ranks.push(snapshot),
                }
                if let Some(entry) = entry {
                    self.announce(entry);
                }
            }
            Input::Matches { round, matches } => {
                if round == self.completed && !self.mine_is_out() {
                    self.matches.extend(matches);
                    self.ranks_matched += 1;
                    self.probe = self.probe.filter(|p| p.open > 1).map(|p| Probe { open: p.open - 1, ..p });
                } else {
                    out.push(Effect::Dropped(Dropped::LateMatches(round)));
                }
            }
            Input::Received(contribution) => {
                if let Err(dropped) = self.receive(contribution) {
                    out.push(Effect::Dropped(dropped));
                }
            }
            Input::Applied(applied) if applied.round == self.completed && self.applied.is_none() => {
                self.applied = Some(applied);
                self.applied_at_us = now_us;
                let mine = self.view.members.iter().find(|m| m.incarnation == self.me);
                // A rank may have answered before the replica was through.
                let open = mine.map_or(0, |m| m.ranks.len()).saturating_sub(self.ranks_matched);
                let until_us = now_us.saturating_add(self.config.probe_us_max);
                self.probe = (applied.probing && open > 0).then_some(Probe { open, until_us });
            }
            Input::Applied(applied) => out.push(Effect::Dropped(Dropped::UnexpectedApplied(applied.round))),
            Input::Draining(draining) => self.draining = draining,
            Input::Tick => {}
        }
        self.advance(now_us, out);
    }

    /// Promises to complete no more rounds of this view but by `fill`.
    pub fn freeze(&mut self) {
        self.frozen = true;
    }

    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// The input of the one round that this member lacks at the cut: completes it, if it is that.
    pub fn fill(&mut self, now_us: u64, merged: Merged, out: &mut Vec<Effect>) {
        let next = merged.epoch == self.view.epoch && merged.round.0 == self.completed.0 + 1;
        if self.frozen && next && self.applied.is_some() {
            let clock_us = merged.clock_us;
            self.set_clock(now_us, clock_us);
            let carried = merged.contributions.iter().find(|c| c.member == self.me).map_or(0, |c| c.entries.len());
            self.held.pop_front();
            self.held.push_back(vec![None; self.view.members.len()]);
            self.completed_with(carried, merged, out);
        }
    }

    /// The next view of the same cluster; `false` and unchanged if it does not begin behind the last completed round, or
    /// has no place for this member. Contributions that no round of the old view came to are void; what they carried is
    /// in the outbox still.
    pub fn install(&mut self, view: View) -> bool {
        let follows = view.epoch > self.view.epoch && view.cut() == self.completed;
        if !follows || view.position(self.me).is_none() {
            return false;
        }
        self.held = (0..ROUNDS_HELD).map(|_| vec![None; view.members.len()]).collect();
        self.ranks.retain(|snapshot| view.ranks().any(|(id, member)| id == snapshot.rank && member == self.me));
        self.view = view;
        self.frozen = false;
        self.applied = None;
        self.last = None;
        self.matches.clear();
        self.ranks_matched = 0;
        self.probe = None;
        self.contributed_at_us = None;
        true
    }

    /// A planted mistake: as if the rounds up to `round` had been completed here.
    #[cfg(test)]
    pub(crate) fn skip_to(&mut self, round: Round) {
        self.completed = self.completed.max(round);
    }

    /// Goes on from a clock that the others have agreed on: what a member that joins begins with.
    pub fn set_clock(&mut self, now_us: u64, agreed_clock_us: u64) {
        self.agreed_clock_us = self.agreed_clock_us.max(agreed_clock_us);
        self.follow_clock(now_us);
    }

    fn announce(&mut self, entry: Entry) {
        self.outbox.push_back(Sequenced { seq: self.next_seq, entry });
        self.next_seq += 1;
    }

    /// When this machine wants a `Tick`; `None` while it waits for the replica or for other members.
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.applied.is_none() || self.mine_is_out() || self.frozen {
            return None;
        }
        let paced = self.contributed_at_us.map_or(0, |at| at + self.interval_us());
        let due = if self.config.lockstep { self.due_in_lockstep_us(paced) } else { paced };
        Some(self.probe.map_or(due, |probe| due.max(probe.until_us)))
    }

    /// The last completed round.
    pub fn completed(&self) -> Round {
        self.completed
    }

    /// What the replica said of the last completed round; `None` while it still applies it.
    pub fn applied(&self) -> Option<Applied> {
        self.applied
    }

    /// The input of the last completed round of this view, where there are other members.
    pub fn last(&self) -> Option<&Merged> {
        self.last.as_ref()
    }

    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    pub fn agreed_clock_us(&self) -> u64 {
        self.agreed_clock_us
    }

    /// Own contributions that another member may lack after its link was down: of the last round and of the next.
    pub fn own_contributions(&self) -> impl Iterator<Item = &Contribution> {
        let last = self.last.iter().flat_map(|merged| &merged.contributions);
        let next = self.held[0].iter().flatten();
        last.chain(next).filter(|c| c.member == self.me)
    }

    /// Since when this member waits for others to complete the next round, and for whom; `None` while its own
    /// contribution is not out.
    pub fn waits_for(&self) -> Option<(u64, Vec<Incarnation>)> {
        let since_us = self.contributed_at_us.filter(|_| self.mine_is_out())?;
        let missing = self.view.members.iter().zip(&self.held[0]).filter(|(_, held)| held.is_none());
        Some((since_us, missing.map(|(member, _)| member.incarnation).collect()))
    }

    /// Entries that wait for a round to carry them, or for the round that carries them to complete.
    pub fn outbox_len(&self) -> usize {
        self.outbox.len()
    }

    pub fn view(&self) -> &View {
        &self.view
    }

    /// How long after the last contribution the next one is due.
    fn interval_us(&self) -> u64 {
        let probing = self.applied.is_some_and(|a| a.probing);
        if self.held[0].iter().any(Option::is_some) {
            // Whoever began the round kept the interval: all have contributed to the last one since.
            0
        } else if probing || !self.outbox.is_empty() {
            self.config.round_interval_us_min
        } else if self.applied.is_some_and(|a| a.waiting) {
            self.config.busy_interval_us
        } else {
            self.config.heartbeat_us
        }
    }

    fn mine_is_out(&self) -> bool {
        self.view.position(self.me).is_some_and(|me| self.held[0][me].is_some())
    }

    fn receive(&mut self, contribution: Contribution) -> Result<(), Dropped> {
        if contribution.cluster != self.cluster {
            return Err(Dropped::OtherCluster);
        }
        if contribution.epoch < self.view.epoch {
            return Err(Dropped::OlderEpoch);
        }
        if contribution.epoch > self.view.epoch {
            return Err(Dropped::NewerEpoch);
        }
        let member = contribution.member;
        let position = self.view.position(member).ok_or(Dropped::NotAMember(member))?;
        if contribution.round <= self.completed {
            return Err(Dropped::OldRound(contribution.round));
        }
        let ahead = (contribution.round.0 - self.completed.0 - 1) as usize;
        if ahead >= ROUNDS_HELD {
            return Err(Dropped::FutureRound(contribution.round));
        }
        if !contribution.is_well_formed(self.config.contribution_entries_max, &self.view.members[position].ranks) {
            return Err(Dropped::Malformed(member));
        }
        match &self.held[ahead][position] {
            None => {
                self.held[ahead][position] = Some(contribution);
                Ok(())
            }
            Some(known) if *known == contribution => Err(Dropped::Duplicate),
            Some(_) => Err(Dropped::Equivocation(member)),
        }
    }

    /// Contributes when it is due and completes what is complete.
    fn advance(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        if self.poll_timeout().is_some_and(|due| due <= now_us) {
            self.contribute(now_us, out);
        }
        if !self.frozen && self.applied.is_some() && self.held[0].iter().all(Option::is_some) {
            self.complete(now_us, out);
        }
    }

    fn contribute(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some(me) = self.view.position(self.me) else { return };
        let contribution = Contribution {
            cluster: self.cluster,
            epoch: self.view.epoch,
            round: Round(self.completed.0 + 1),
            member: self.me,
            clock_us: now_us.saturating_add_signed(self.clock_offset_us),
            entries: self.outbox.iter().take(self.config.contribution_entries_max).cloned().collect(),
            ranks: self.ranks.iter().map(|snapshot| self.marked(*snapshot)).collect(),
            prefix_matches: std::mem::take(&mut self.matches),
            digest: self.applied.map_or(0, |a| a.digest),
            draining: self.draining,
        };
        self.contributed_at_us = Some(now_us);
        #[cfg(test)]
        if self.leaves_at_send {
            self.outbox.drain(..contribution.entries.len());
        }
        if self.view.members.len() > 1 {
            out.push(Effect::Send(contribution.clone()));
        }
        self.held[0][me] = Some(contribution);
    }

    fn complete(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some(me) = self.view.position(self.me) else { return };
        let members = self.view.members.len();
        let mut of_round: Vec<Contribution> = self.held.pop_front().into_iter().flatten().flatten().collect();
        self.held.push_back(vec![None; members]);
        let round = Round(self.completed.0 + 1);
        let mut clocks: Vec<u64> = of_round.iter().map(|c| c.clock_us).collect();
        clocks.sort_unstable();
        // The lower median: one wrong or paused clock moves nothing.
        self.set_clock(now_us, clocks[(clocks.len() - 1) / 2]);
        let carried = of_round[me].entries.len();
        // No member is always first.
        of_round.rotate_left((round.0 % members as u64) as usize);
        let merged = Merged { epoch: self.view.epoch, round, clock_us: self.agreed_clock_us, contributions: of_round };
        self.completed_with(carried, merged, out);
    }

    /// R1: what the round carried of ours is through.
    fn completed_with(&mut self, carried: usize, merged: Merged, out: &mut Vec<Effect>) {
        #[cfg(test)]
        let carried = if self.leaves_at_send { 0 } else { carried };
        self.outbox.drain(..carried.min(self.outbox.len()));
        self.completed = merged.round;
        self.applied = None;
        self.matches.clear();
        self.ranks_matched = 0;
        self.last = (self.view.members.len() > 1).then(|| merged.clone());
        out.push(Effect::Completed(merged));
    }

    /// A clock that is behind the agreed one, or far ahead, is set to it.
    fn follow_clock(&mut self, now_us: u64) {
        let own = now_us.saturating_add_signed(self.clock_offset_us);
        let behind = own < self.agreed_clock_us;
        let far_ahead = own > self.agreed_clock_us.saturating_add(CLOCK_AHEAD_US_MAX);
        if behind || far_ahead {
            self.clock_offset_us = self.agreed_clock_us as i64 - now_us as i64;
        }
    }

    /// Every invariant of the machine.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.held.len() != ROUNDS_HELD {
            return Err(format!("R2: {} rounds held", self.held.len()));
        }
        for (ahead, of_round) in self.held.iter().enumerate() {
            let round = Round(self.completed.0 + 1 + ahead as u64);
            for (member, contribution) in self.view.members.iter().zip(of_round) {
                if let Some(c) = contribution
                    && (c.round != round || c.member != member.incarnation)
                {
                    return Err(format!("R2: contribution of {} for {} held as {round}", c.member, c.round));
                }
            }
        }
        let in_order = self.outbox.iter().zip(self.outbox.iter().skip(1)).all(|(a, b)| a.seq + 1 == b.seq);
        if !in_order || self.outbox.back().is_some_and(|last| last.seq + 1 != self.next_seq) {
            return Err("R1: outbox has a gap".into());
        }
        if let Some(me) = self.view.position(self.me)
            && let Some(mine) = &self.held[0][me]
            && !self.outbox.iter().zip(&mine.entries).all(|(kept, sent)| kept == sent)
        {
            return Err("R1: an entry left the outbox before its round completed".into());
        }
        self.check_marks()
    }
}

/// A member further ahead than this of the agreed clock sets its own back: 1 s.
const CLOCK_AHEAD_US_MAX: u64 = 1_000_000;

#[cfg(test)]
mod tests;
