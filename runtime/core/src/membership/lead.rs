//! The leader of the consensus group leads changes: whom to evict, when to freeze, what all reported, when to install.
//!
//! It decides nothing that it could not decide again: the pending change is in the log, and the next leader asks for the
//! reports anew. What it proposes may be lost, so it proposes it again while it still holds.

use super::choose::{Sight, choose};
use super::log::{Agreed, Change, Command, Freeze, Install, Joiner, Leaver, Why};
use super::{Dropped, Effect, Joining, Level, Machine, Message, Planted, Report, losers};
use crate::ids::{Epoch, Incarnation, Round};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub(super) struct Leader {
    /// By whom, since the gathering began.
    sights: BTreeMap<Incarnation, Sight>,
    gathering_since_us: Option<u64>,
    /// The pending change that the reports are of.
    change: Option<Change>,
    /// M5.
    reports: BTreeMap<Incarnation, Report>,
    /// Who owes a report, or a report from the cut, and since when.
    owing: BTreeMap<Incarnation, u64>,
    /// Known once all reported whose rounds count.
    cut: Option<Round>,
    joiners: BTreeMap<Incarnation, Joining>,
    leavers: BTreeSet<Incarnation>,
    proposed: Option<(Command, u64)>,
    next_us: Option<u64>,
}

impl Leader {
    pub(super) fn new() -> Self {
        Self {
            sights: BTreeMap::new(),
            gathering_since_us: None,
            change: None,
            reports: BTreeMap::new(),
            owing: BTreeMap::new(),
            cut: None,
            joiners: BTreeMap::new(),
            leavers: BTreeSet::new(),
            proposed: None,
            next_us: None,
        }
    }

    /// What it said may not hold any more.
    pub(super) fn link_down(&mut self, peer: Incarnation) {
        self.reports.remove(&peer);
        self.joiners.remove(&peer);
        self.leavers.remove(&peer);
    }

    /// Who has the input of `round`.
    pub(super) fn holders(&self, round: Round) -> Vec<Incarnation> {
        let has = |(of, report): (&Incarnation, &Report)| {
            (report.completed == round && report.input_hash.is_some()).then_some(*of)
        };
        self.reports.iter().filter_map(has).collect()
    }

    /// Whose word is missing.
    pub(super) fn waits_for(&self) -> Vec<Incarnation> {
        self.owing.keys().copied().collect()
    }

    /// What a member might see, as if it had been gathered until now.
    #[cfg(test)]
    pub(super) fn suppose(&mut self, now_us: u64, sight: Sight) {
        self.gathering_since_us = Some(now_us);
        self.sights.insert(sight.by, sight);
    }

    pub(super) fn check(&self, agreed: Option<&Agreed>) -> Result<(), String> {
        let pending = agreed.and_then(Agreed::change);
        if let Some((of, report)) = self.reports.iter().find(|(_, report)| Some(report.change) != self.change) {
            return Err(format!("M5: {of} reported for {:?} under {:?}", report.change, self.change));
        }
        let asked = |of: &Incarnation| agreed.is_some_and(|a| !a.is_out(*of));
        if self.change == pending && !self.reports.keys().all(asked) {
            return Err("M5: a report of somebody who was not asked".into());
        }
        Ok(())
    }

    fn level(&self, change: Change, round: Round) -> Message {
        let holders = self.holders(round);
        let input_hash = holders.iter().find_map(|holder| self.reports.get(holder)?.input_hash);
        Message::Level(Box::new(Level { change, round, input_hash, holders }))
    }
}

impl Machine {
    pub(super) fn lead_next_us(&self) -> Option<u64> {
        self.leader.as_ref().and_then(|leader| leader.next_us)
    }

    /// A member suspects somebody, or answers what it sees.
    pub(super) fn gather(&mut self, now_us: u64, sight: Sight, out: &mut Vec<Effect>) {
        let latest = self.agreed.as_ref().filter(|a| a.epoch == sight.epoch && a.position(sight.by).is_some());
        let Some(agreed) = latest.filter(|agreed| agreed.pending.is_none()) else {
            out.push(Effect::Dropped(Dropped::OtherEpoch));
            return;
        };
        let epoch = agreed.epoch;
        let members: Vec<Incarnation> = agreed.members.iter().map(|m| m.incarnation).collect();
        let Some(leader) = &mut self.leader else { return };
        let begins = leader.gathering_since_us.is_none();
        if begins && sight.is_clear() {
            return;
        }
        leader.sights.insert(sight.by, sight);
        if begins {
            leader.gathering_since_us = Some(now_us);
            for member in members {
                self.send(member, Message::Look { epoch }, out);
            }
        }
    }

    pub(super) fn reported(&mut self, now_us: u64, from: Incarnation, report: Report, out: &mut Vec<Effect>) {
        if self.agreed.as_ref().is_some_and(|agreed| agreed.is_out(from) && self.leader.is_some()) {
            self.send_stale(from, out);
        }
        let asked = self.agreed.as_ref().filter(|agreed| !agreed.is_out(from)).and_then(Agreed::change);
        let Some(leader) = &mut self.leader else {
            out.push(Effect::Dropped(Dropped::NotTheLeader));
            return;
        };
        if asked != Some(report.change) || leader.change != asked {
            // Of a change that was not applied here yet: it is asked again then.
            out.push(Effect::Dropped(Dropped::OtherChange));
            return;
        }
        let change = report.change;
        let behind = leader.cut.filter(|cut| *cut != report.completed);
        let moved = leader.reports.get(&from).is_none_or(|known| known.completed != report.completed);
        if moved && leader.owing.contains_key(&from) {
            leader.owing.insert(from, now_us);
        }
        leader.reports.insert(from, report);
        if let Some(cut) = behind {
            let level = leader.level(change, cut);
            self.send(from, level, out);
        }
    }

    pub(super) fn joins(&mut self, from: Incarnation, joining: Joining, out: &mut Vec<Effect>) {
        let Some(leader) = &mut self.leader else {
            out.push(Effect::Dropped(Dropped::NotTheLeader));
            return;
        };
        let known = self.links.get(&from).is_some_and(|link| link.name == joining.joiner.name);
        if joining.joiner.incarnation == from && known {
            leader.joiners.insert(from, joining);
        } else {
            out.push(Effect::Dropped(Dropped::NotItsOwn(from)));
        }
    }

    pub(super) fn leaves(&mut self, from: Incarnation, epoch: Epoch, out: &mut Vec<Effect>) {
        let latest = self.agreed.as_ref().is_some_and(|a| a.epoch == epoch && a.position(from).is_some());
        match &mut self.leader {
            Some(leader) if latest => {
                leader.leavers.insert(from);
            }
            Some(_) => out.push(Effect::Dropped(Dropped::OtherEpoch)),
            None => out.push(Effect::Dropped(Dropped::NotTheLeader)),
        }
    }

    /// Does what is due.
    pub(super) fn lead(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        if self.leader.is_none() || self.agreed.is_none() {
            return;
        }
        let (Some(mut leader), Some(agreed)) = (self.leader.take(), self.agreed.take()) else { return };
        leader.next_us = None;
        if leader.change != agreed.change() {
            self.begin_change(now_us, &mut leader, &agreed, out);
        }
        match agreed.change() {
            Some(change) => self.lead_change(now_us, &mut leader, &agreed, change, out),
            None => self.lead_view(now_us, &mut leader, &agreed, out),
        }
        self.leader = Some(leader);
        self.agreed = Some(agreed);
    }

    fn begin_change(&mut self, now_us: u64, leader: &mut Leader, agreed: &Agreed, out: &mut Vec<Effect>) {
        leader.change = agreed.change();
        leader.reports.clear();
        leader.owing.clear();
        leader.cut = None;
        leader.sights.clear();
        leader.gathering_since_us = None;
        leader.joiners.retain(|joiner, joining| !agreed.joins(*joiner) && joining.epoch == agreed.epoch);
        leader.leavers.retain(|leaver| agreed.position(*leaver).is_some() && agreed.leaves(*leaver).is_none());
        if let Some(change) = leader.change {
            for member in self.asks(agreed) {
                leader.owing.insert(member, now_us);
                self.send(member, Message::Ask(change), out);
            }
        }
    }

    /// Who must report, and stand at the cut.
    fn asks(&self, agreed: &Agreed) -> Vec<Incarnation> {
        let silent = self.is_planted(Planted::PoliteSilence);
        let members = agreed.reporting().filter(|m| !silent || agreed.leaves(*m).is_none());
        members.chain(agreed.joiners().map(|j| j.incarnation)).collect()
    }

    fn lead_change(
        &mut self,
        now_us: u64,
        leader: &mut Leader,
        agreed: &Agreed,
        change: Change,
        out: &mut Vec<Effect>,
    ) {
        let majority = self.is_planted(Planted::InstallOnMajority);
        let asked = self.asks(agreed);
        let counting: Vec<Incarnation> = asked.iter().copied().filter(|m| agreed.position(*m).is_some()).collect();
        let reported = counting.iter().filter(|m| leader.reports.contains_key(m)).count();
        let all = if majority { reported * 2 > counting.len() } else { reported == counting.len() };
        let highest = counting.iter().filter_map(|m| leader.reports.get(m)).map(|report| report.completed).max();
        let cut = highest.filter(|_| all);
        let is_level = |leader: &Leader, of: &Incarnation| match (leader.reports.get(of), cut) {
            (Some(report), Some(cut)) => report.completed == cut || self.is_planted(Planted::SkipFill),
            (None, Some(_)) => majority && agreed.position(*of).is_some(),
            (report, None) => report.is_some(),
        };
        for member in &asked {
            if is_level(leader, member) {
                leader.owing.remove(member);
            } else if leader.cut != cut && leader.reports.contains_key(member) {
                leader.owing.insert(*member, now_us);
            } else {
                leader.owing.entry(*member).or_insert(now_us);
            }
        }
        if let Some(cut) = cut.filter(|cut| leader.cut != Some(*cut)) {
            let behind: Vec<Incarnation> =
                leader.owing.keys().copied().filter(|of| leader.reports.contains_key(of)).collect();
            for member in behind {
                self.send(member, leader.level(change, cut), out);
            }
        }
        leader.cut = cut;
        let mut out_now = self.overdue(now_us, leader, agreed);
        if !out_now.is_empty() {
            let mut again = go_on_without(agreed, &out_now);
            if !self.leaves_somebody(agreed, &again) {
                // Who is slow but there is better than nobody.
                out_now.retain(|l| !self.is_linked(l.incarnation));
                again = go_on_without(agreed, &out_now);
            }
            if out_now.is_empty() {
                leader.next_us = Some(now_us.saturating_add(self.config.report_after_us));
            } else {
                self.propose_freeze(now_us, leader, (agreed, again), out);
            }
        } else if let Some(cut) = cut.filter(|_| leader.owing.is_empty()) {
            self.judge_and_install(now_us, leader, agreed, (change, cut), out);
        }
    }

    /// Who died or did not report in time.
    fn overdue(&self, now_us: u64, leader: &mut Leader, agreed: &Agreed) -> Vec<Leaver> {
        if self.is_planted(Planted::NoRestart) {
            return Vec::new();
        }
        let after_us = self.config.report_after_us;
        let mut overdue = Vec::new();
        for (&incarnation, since_us) in &leader.owing {
            let due_us = since_us.saturating_add(after_us);
            let restarted = agreed.members.iter().any(|m| m.incarnation == incarnation && self.is_restarted(m));
            if restarted {
                overdue.push(Leaver { incarnation, why: Why::Restarted });
            } else if due_us <= now_us {
                overdue.push(Leaver { incarnation, why: Why::Unreported });
            } else {
                leader.next_us = Some(leader.next_us.map_or(due_us, |next| next.min(due_us)));
            }
        }
        overdue
    }

    /// All stand at the cut: whose digest differs goes, else the view is installed.
    fn judge_and_install(
        &mut self,
        now_us: u64,
        leader: &mut Leader,
        agreed: &Agreed,
        (change, cut): (Change, Round),
        out: &mut Vec<Effect>,
    ) {
        let digest = |of: Incarnation| leader.reports.get(&of).map(|report| (of, report.digest));
        let members: Vec<(Incarnation, u64)> = agreed.members.iter().filter_map(|m| digest(m.incarnation)).collect();
        let mut differ = losers(&members);
        let agreed_digest = members.iter().find(|(of, _)| !differ.contains(of)).map_or(0, |(_, digest)| *digest);
        // A joiner has its state from one of the members: it follows their verdict and has no voice in it.
        let joiners = agreed.joiners().filter_map(|j| digest(j.incarnation));
        differ.extend(joiners.filter(|(_, digest)| *digest != agreed_digest).map(|(of, _)| of));
        // A view with a link that is not there would not last.
        let linked = |of: &Joiner| {
            let links = leader.reports.get(&of.incarnation).map_or(&[][..], |report| &report.links);
            agreed.stayers().all(|m| links.contains(&m.incarnation))
        };
        differ.extend(agreed.joiners().filter(|j| !linked(j)).map(|j| j.incarnation));
        if differ.is_empty() || self.is_planted(Planted::SkipFill) || self.is_planted(Planted::InstallOnMajority) {
            let install = Install {
                change,
                epoch: Epoch(agreed.epoch.0 + 1),
                members: agreed.members_next(),
                cut,
                digest: agreed_digest,
            };
            self.propose(now_us, leader, Command::Install(install), out);
        } else {
            let diverged: Vec<Leaver> =
                differ.into_iter().map(|incarnation| Leaver { incarnation, why: Why::Diverged }).collect();
            let again = go_on_without(agreed, &diverged);
            self.propose_freeze(now_us, leader, (agreed, again), out);
        }
    }

    /// No change is pending: is one due?
    fn lead_view(&mut self, now_us: u64, leader: &mut Leader, agreed: &Agreed, out: &mut Vec<Effect>) {
        let mut evicted = Vec::new();
        if let Some(since_us) = leader.gathering_since_us {
            let due_us = since_us.saturating_add(self.config.suspicion_gather_us);
            if now_us < due_us {
                leader.next_us = Some(due_us);
                return;
            }
            let sights: Vec<Sight> = std::mem::take(&mut leader.sights).into_values().collect();
            leader.gathering_since_us = None;
            evicted = choose(&agreed.members, agreed.epoch, &sights);
        }
        let freeze = self.freeze_of(leader, agreed, evicted);
        if !freeze.leaving.is_empty() || !freeze.joining.is_empty() {
            self.propose_freeze(now_us, leader, (agreed, freeze), out);
        }
    }

    /// Who goes, who leaves politely, and who joins that is linked to all who stay.
    fn freeze_of(&self, leader: &Leader, agreed: &Agreed, evicted: Vec<Leaver>) -> Freeze {
        let mut leaving = evicted;
        let mut left = agreed.members.len() - leaving.len().min(agreed.members.len());
        let leaves = |leaving: &[Leaver], of: Incarnation| leaving.iter().any(|l| l.incarnation == of);
        for leaver in &leader.leavers {
            if left > 1 && agreed.position(*leaver).is_some() && !leaves(&leaving, *leaver) {
                leaving.push(Leaver { incarnation: *leaver, why: Why::Politely });
                left -= 1;
            }
        }
        let mut joining: Vec<Joiner> = Vec::new();
        for Joining { joiner, epoch, links } in leader.joiners.values() {
            let replaces = joiner.replaces.filter(|old| agreed.position(*old).is_some() && !leaves(&leaving, *old));
            let stays = |of: Incarnation| !leaves(&leaving, of) && Some(of) != replaces;
            let fits = *epoch == agreed.epoch
                && agreed.position(joiner.incarnation).is_none()
                && (left > 1 || replaces.is_none())
                && left + joining.len() < self.config.members_max.saturating_add(usize::from(replaces.is_some()))
                && agreed.members.iter().map(|m| m.incarnation).filter(|m| stays(*m)).all(|m| links.contains(&m))
                && joining.iter().all(|other| links.contains(&other.incarnation));
            if fits {
                left -= usize::from(replaces.is_some());
                leaving.extend(replaces.map(|incarnation| Leaver { incarnation, why: Why::Replaced }));
                joining.push(joiner.clone());
            }
        }
        leaving.sort_by_key(|l| agreed.position(l.incarnation));
        Freeze { epoch: agreed.epoch, leaving, joining }
    }

    /// Whether a member stays that the leader has a link to: the state would go with the last one.
    fn leaves_somebody(&self, agreed: &Agreed, freeze: &Freeze) -> bool {
        let leaves = |of: Incarnation| freeze.leaving.iter().any(|l| l.incarnation == of);
        let gone = self.gone.is_some().then_some(self.life.incarnation);
        let stayers = agreed.members.iter().map(|m| m.incarnation).filter(|m| !leaves(*m) && Some(*m) != gone);
        stayers.into_iter().any(|m| self.is_linked(m))
    }

    /// Whoever cannot reach a majority of the voters evicts nobody.
    fn propose_freeze(
        &mut self,
        now_us: u64,
        leader: &mut Leader,
        (agreed, freeze): (&Agreed, Freeze),
        out: &mut Vec<Effect>,
    ) {
        let lasts = self.leaves_somebody(agreed, &freeze);
        if self.consensus.has_majority() && lasts {
            self.propose(now_us, leader, Command::Freeze(freeze), out);
        } else {
            leader.next_us = Some(now_us.saturating_add(self.config.report_after_us));
        }
    }

    /// Again while it holds, since what is proposed may be lost.
    fn propose(&mut self, now_us: u64, leader: &mut Leader, command: Command, out: &mut Vec<Effect>) {
        let due = |at_us: u64| at_us.saturating_add(self.config.report_after_us);
        let same = leader.proposed.as_ref().filter(|(known, at_us)| *known == command && now_us < due(*at_us));
        let at_us = same.map_or(now_us, |(_, at_us)| *at_us);
        if same.is_none() {
            out.push(Effect::Propose(command.clone()));
            leader.proposed = Some((command, now_us));
        }
        leader.next_us = Some(leader.next_us.map_or(due(at_us), |next| next.min(due(at_us))));
    }
}

/// The pending change again, without some more.
fn go_on_without(agreed: &Agreed, who: &[Leaver]) -> Freeze {
    let pending = agreed.pending.as_ref().map(|pending| &pending.freeze);
    let out = |of: Incarnation| who.iter().any(|l| l.incarnation == of);
    let mut leaving: Vec<Leaver> =
        pending.iter().flat_map(|f| &f.leaving).filter(|l| !out(l.incarnation)).copied().collect();
    leaving.extend(who.iter().filter(|l| agreed.position(l.incarnation).is_some()));
    leaving.sort_by_key(|l| agreed.position(l.incarnation));
    let joining = pending.iter().flat_map(|f| &f.joining).filter(|j| !out(j.incarnation)).cloned().collect();
    Freeze { epoch: agreed.epoch, leaving, joining }
}
