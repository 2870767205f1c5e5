//! Frozen: reports of how far members came, and the one round that some of them lack.

use super::log::Change;
use super::{Dropped, Effect, Level, Machine, Message, Planted, Report};
use crate::ids::{Incarnation, Round};
use crate::round::Merged;

/// The round that this member lacks at the cut, and whom it asked for it.
#[derive(Clone, Debug)]
pub(super) struct Lack {
    level: Level,
    asked: Option<Incarnation>,
}

impl Machine {
    /// Tells the leader how far this life came, once its replica has said so too.
    pub(super) fn report_if_due(&mut self, out: &mut Vec<Effect>) {
        let Some(leader) = self.consensus.leader.filter(|_| self.report_due) else { return };
        let Some(report) = self.report().filter(|_| self.is_linked(leader)) else { return };
        self.report_due = false;
        self.send(leader, Message::Report(Box::new(report)), out);
    }

    /// `None`: it is not asked, or cannot say yet.
    fn report(&self) -> Option<Report> {
        let agreed = self.agreed.as_ref().filter(|_| self.gone.is_none())?;
        let change = agreed.change()?;
        let me = self.life.incarnation;
        if agreed.is_out(me) || self.is_planted(Planted::PoliteSilence) && agreed.leaves(me).is_some() {
            return None;
        }
        let others = agreed.members.iter().map(|m| m.incarnation).filter(|m| *m != me);
        let links = others.filter(|m| self.is_linked(*m)).collect();
        let (completed, input_hash, digest) = match &self.round {
            Some(round) => {
                let applied = round.applied()?;
                (applied.round, round.last().map(Merged::hash), applied.digest)
            }
            None => self.transfer.standing()?,
        };
        Some(Report { change, completed, input_hash, digest, links })
    }

    pub(super) fn asked(&mut self, from: Incarnation, change: Change, out: &mut Vec<Effect>) {
        if self.pending() != Some(change) {
            // It reports of its own when it comes to this change.
            out.push(Effect::Dropped(Dropped::OtherChange));
        } else if let Some(report) = self.report() {
            self.send(from, Message::Report(Box::new(report)), out);
        } else {
            self.report_due = true;
        }
    }

    /// The leader says where all must stand.
    pub(super) fn leveled(&mut self, level: Level, out: &mut Vec<Effect>) {
        if self.pending() != Some(level.change) || self.gone.is_some() {
            out.push(Effect::Dropped(Dropped::OtherChange));
            return;
        }
        match &self.round {
            Some(round) if round.completed().0.checked_add(1) == Some(level.round.0) => {
                self.lack = Some(Lack { level, asked: None });
                self.fetch(out);
            }
            // It stands there, so its report did not come through. Nothing else is answered: it could not be told otherwise.
            Some(round) => self.report_due |= round.completed() == level.round,
            None => {
                let standing = self.transfer.standing().map(|(completed, ..)| completed);
                let ahead = standing.is_some_and(|completed| completed > level.round);
                let behind = standing.is_some_and(|completed| completed < level.round);
                if ahead || behind && self.transfer.is_orphan() {
                    // What only the evicted completed never happened: a state that holds it is void.
                    self.turn_from_donor(out);
                }
                self.report_due |= standing == Some(level.round);
            }
        }
    }

    /// Asks a holder for the lacking round; another one when its link goes, or the leader where none is linked.
    pub(super) fn fetch(&mut self, out: &mut Vec<Effect>) {
        let Some(lack) = &self.lack else { return };
        let me = self.life.incarnation;
        if lack.asked.is_some_and(|asked| self.is_linked(asked)) {
            return;
        }
        let holders = lack.level.holders.iter().copied().filter(|holder| *holder != me);
        let to = holders.chain(self.consensus.leader.filter(|leader| *leader != me)).find(|to| self.is_linked(*to));
        let (change, round) = (lack.level.change, lack.level.round);
        if let Some(lack) = &mut self.lack {
            lack.asked = to;
        }
        if let Some(to) = to {
            self.send(to, Message::Need { change, round, by: me }, out);
        }
    }

    pub(super) fn needed(
        &mut self,
        from: Incarnation,
        (change, round): (Change, Round),
        by: Incarnation,
        out: &mut Vec<Effect>,
    ) {
        if self.pending() != Some(change) {
            out.push(Effect::Dropped(Dropped::OtherChange));
            return;
        }
        let last = self.round.as_ref().and_then(|machine| machine.last()).filter(|merged| merged.round == round);
        if let Some(merged) = last.cloned().map(Box::new) {
            self.send(from, Message::Fill { change, to: by, merged }, out);
        } else if let Some(leader) = self.leader.as_ref().filter(|_| by == from) {
            let holder = leader.holders(round).into_iter().find(|holder| *holder != by && self.is_linked(*holder));
            if let Some(holder) = holder.filter(|holder| *holder != self.life.incarnation) {
                self.send(holder, Message::Need { change, round, by }, out);
            }
        } else {
            out.push(Effect::Dropped(Dropped::Unasked));
        }
    }

    /// The lacking round: completes it if it is that very one, or passes it on to whom it is for.
    pub(super) fn filled(
        &mut self,
        now_us: u64,
        change: Change,
        to: Incarnation,
        merged: Box<Merged>,
        out: &mut Vec<Effect>,
    ) {
        if to != self.life.incarnation {
            if self.leader.is_some() {
                self.send(to, Message::Fill { change, to, merged }, out);
            } else {
                out.push(Effect::Dropped(Dropped::NotTheLeader));
            }
            return;
        }
        let wanted = self.lack.as_ref().is_some_and(|lack| {
            let level = &lack.level;
            level.change == change
                && level.round == merged.round
                && level.input_hash.is_none_or(|hash| hash == merged.hash())
        });
        let Some(round) =
            self.round.as_mut().filter(|_| wanted && self.agreed.as_ref().and_then(|a| a.change()) == Some(change))
        else {
            out.push(Effect::Dropped(Dropped::Unasked));
            return;
        };
        self.lack = None;
        round.fill(now_us, *merged, &mut self.effects);
        self.carry_out(now_us, out);
        self.report_due = true;
    }
}
