//! Suspicion: what a member sees of the others, and when it tells the leader.

use super::choose::Sight;
use super::log::{Leaver, Place, Why};
use super::{Dropped, Effect, Machine, Message};
use crate::ids::{Epoch, Incarnation};

impl Machine {
    /// Since when the link to a member is down; `None` while it is up.
    fn down_since_us(&self, member: Incarnation) -> Option<u64> {
        match self.links.get(&member) {
            Some(link) if link.up => None,
            // A view begins with links that may still have to come up.
            Some(link) => Some(link.since_us.max(self.view_since_us)),
            None => Some(self.view_since_us),
        }
    }

    /// Whether the member's name is known to run another life, which does not take over from it.
    pub(super) fn is_restarted(&self, member: &Place) -> bool {
        self.links.iter().any(|(incarnation, link)| {
            link.up
                && link.name == member.name
                && *incarnation != member.incarnation
                && link.replaces != Some(member.incarnation)
                // A link to the life before may still seem up while this one joins.
                && link.since_us > self.view_since_us
        })
    }

    fn others(&self) -> impl Iterator<Item = &Place> + '_ {
        let members = self.agreed.iter().flat_map(|agreed| &agreed.members);
        members.filter(|m| m.incarnation != self.life.incarnation)
    }

    /// Members that are gone for certain.
    fn gone(&self) -> Vec<Leaver> {
        let fresh = self.links.values().any(|link| link.up && link.since_us > self.view_since_us);
        if !fresh && self.diverged.is_empty() {
            return Vec::new();
        }
        let mut gone = Vec::new();
        for member in self.others() {
            let incarnation = member.incarnation;
            if self.is_restarted(member) {
                gone.push(Leaver { incarnation, why: Why::Restarted });
            } else if self.diverged.contains(&incarnation) {
                gone.push(Leaver { incarnation, why: Why::Diverged });
            }
        }
        gone
    }

    /// The others of the view that did not contribute to the lowest incomplete round, and since when they are waited for.
    fn waits_for(&self) -> Option<(u64, Vec<Incarnation>)> {
        let round = self.round.as_ref().filter(|_| self.pending().is_none())?;
        round.waits_for()
    }

    /// What this member sees that has lasted for `least_us`.
    fn sight(&self, now_us: u64, least_us: u64) -> Option<Sight> {
        let round = self.round.as_ref()?;
        let lasts = |since_us: u64| now_us.saturating_sub(since_us) >= least_us;
        let down = |m: &&Place| self.down_since_us(m.incarnation).is_some_and(lasts);
        let missing = self.waits_for().filter(|(since_us, _)| lasts(*since_us)).map(|(_, missing)| missing);
        Some(Sight {
            by: self.life.incarnation,
            epoch: round.view().epoch,
            down: self.others().filter(down).map(|m| m.incarnation).collect(),
            round: crate::ids::Round(round.completed().0 + 1),
            missing: missing.unwrap_or_default(),
            gone: self.gone(),
        })
    }

    /// When this member will have something to say, if nothing changes.
    fn suspicion_due_us(&self) -> Option<u64> {
        let down = self.others().filter_map(|m| self.down_since_us(m.incarnation)).min();
        let waits = self.waits_for().map(|(since_us, _)| since_us);
        let soft = down.into_iter().chain(waits).min().map(|since| since.saturating_add(self.config.suspect_after_us));
        let due = if self.gone().is_empty() { soft? } else { 0 };
        let again = self.said_us.map_or(0, |said| said.saturating_add(self.watch_interval_us()));
        Some(due.max(again))
    }

    fn watch_interval_us(&self) -> u64 {
        self.config.suspicion_gather_us.clamp(1, self.config.suspect_after_us.max(1))
    }

    /// When this member looks after the others next: it costs as much as there are members, so not with every input. What
    /// begins between two looks is due behind the next one; a link that changes is looked after at once.
    pub(super) fn watch_due_us(&self) -> Option<u64> {
        (self.round.is_some() && self.pending().is_none()).then_some(self.watch_us)
    }

    pub(super) fn suspect_if_due(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        if self.watch_due_us().is_none_or(|due| now_us < due) {
            return;
        }
        let due = self.suspicion_due_us();
        if due.is_some_and(|due| due <= now_us) {
            self.said_us = Some(now_us);
            self.suspect(now_us, out);
        }
        let later = due.filter(|due| *due > now_us).unwrap_or(u64::MAX);
        self.watch_us = now_us.saturating_add(self.watch_interval_us()).min(later);
    }

    fn suspect(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        // Others began to wait a moment later: what has lasted half as long is said too, so that all accuse alike.
        let Some(sight) = self.sight(now_us, self.config.suspect_after_us / 2).map(Box::new) else { return };
        match self.consensus.leader.filter(|leader| self.is_linked(*leader)) {
            Some(leader) => self.send(leader, Message::Sight { sight, passed_on: false }, out),
            None => {
                for member in self.linked_members() {
                    self.send(member, Message::Sight { sight: sight.clone(), passed_on: false }, out);
                }
            }
        }
    }

    /// The leader asks.
    pub(super) fn look(&mut self, now_us: u64, from: Incarnation, epoch: Epoch, out: &mut Vec<Effect>) {
        match self.sight(now_us, self.config.suspect_after_us / 2).filter(|sight| sight.epoch == epoch) {
            Some(sight) => self.send(from, Message::Sight { sight: Box::new(sight), passed_on: false }, out),
            None => out.push(Effect::Dropped(Dropped::OtherEpoch)),
        }
    }

    /// A member suspects somebody: for the leader, or to be passed on to it once.
    pub(super) fn sighted(
        &mut self,
        now_us: u64,
        from: Incarnation,
        sight: Box<Sight>,
        passed_on: bool,
        out: &mut Vec<Effect>,
    ) {
        if !passed_on && sight.by != from {
            out.push(Effect::Dropped(Dropped::NotItsOwn(from)));
        } else if self.leader.is_some() {
            self.gather(now_us, *sight, out);
        } else {
            match self.consensus.leader.filter(|leader| !passed_on && *leader != from) {
                Some(leader) => self.send(leader, Message::Sight { sight, passed_on: true }, out),
                None => out.push(Effect::Dropped(Dropped::NotTheLeader)),
            }
        }
    }
}
