//! Links to peers, and what comes over them.

use super::{Dropped, Effect, Left, Link, Machine, Message, Peer};
use crate::ids::{ClusterId, Epoch, Incarnation};
use crate::round;

impl Machine {
    pub(super) fn link_up(&mut self, now_us: u64, peer: Peer, out: &mut Vec<Effect>) {
        let Peer { name, incarnation, replaces } = peer;
        if incarnation == self.life.incarnation {
            return;
        }
        // One process a name: the life before is not behind any link any more.
        let before = self.links.iter().filter(|(other, link)| link.up && link.name == name && **other != incarnation);
        for other in before.map(|(other, _)| *other).collect::<Vec<Incarnation>>() {
            self.link_down(now_us, other, out);
        }
        self.links.insert(incarnation, Link { name, replaces, up: true, since_us: now_us });
        self.watch_us = 0;
        if let Some(round) = &self.round {
            let (cluster, epoch, completed) = (round.cluster(), round.view().epoch, round.completed());
            // What was on its way when the link was down is lost.
            let member = self.is_member(incarnation);
            let again: Vec<_> = round.own_contributions().filter(|_| member).cloned().collect();
            self.send(incarnation, Message::Hello { cluster, epoch, completed }, out);
            for contribution in again {
                self.send(incarnation, Message::Contribution(Box::new(contribution)), out);
            }
        }
        if self.consensus.leader == Some(incarnation) {
            self.report_due = true;
            self.leaving_said_us = None;
            self.transfer.say_again();
        }
        if let (Some(change), Some(_)) = (self.pending(), &self.leader) {
            self.send(incarnation, Message::Ask(change), out);
        }
        self.fetch(out);
    }

    pub(super) fn link_down(&mut self, now_us: u64, peer: Incarnation, out: &mut Vec<Effect>) {
        let member = self.is_member(peer);
        let Some(link) = self.links.get_mut(&peer).filter(|link| link.up) else { return };
        link.up = false;
        self.watch_us = 0;
        link.since_us = now_us;
        if !member {
            self.links.remove(&peer);
        }
        self.early.remove(&peer);
        self.donations.remove(&peer);
        self.transfer.link_down(peer);
        if let Some(leader) = &mut self.leader {
            leader.link_down(peer);
        }
        self.fetch(out);
    }

    /// Whether the latest view, or the pending change, has a place for it.
    pub(super) fn is_member(&self, peer: Incarnation) -> bool {
        self.agreed.as_ref().is_some_and(|agreed| agreed.position(peer).is_some() || agreed.joins(peer))
    }

    pub(super) fn received(&mut self, now_us: u64, from: Incarnation, message: Message, out: &mut Vec<Effect>) {
        if !self.is_linked(from) {
            out.push(Effect::Dropped(Dropped::Unlinked));
            return;
        }
        match message {
            Message::Contribution(contribution) => self.contribution(now_us, from, contribution, out),
            Message::Hello { cluster, epoch, .. } => {
                let ours = self.agreed.as_ref().is_some_and(|a| a.cluster == cluster && a.epoch >= epoch);
                if ours {
                    self.send_stale(from, out);
                } else {
                    out.push(Effect::Dropped(Dropped::OtherEpoch));
                }
            }
            Message::Stale { cluster, epoch } => self.told_stale(now_us, cluster, epoch, out),
            Message::Sight { sight, passed_on } => self.sighted(now_us, from, sight, passed_on, out),
            Message::Look { epoch } => self.look(now_us, from, epoch, out),
            Message::Ask(change) => self.asked(from, change, out),
            Message::Report(report) => self.reported(now_us, from, *report, out),
            Message::Level(level) => self.leveled(*level, out),
            Message::Need { change, round, by } => self.needed(from, (change, round), by, out),
            Message::Fill { change, to, merged } => self.filled(now_us, change, to, merged, out),
            Message::Joining(joining) => self.joins(from, *joining, out),
            Message::Leaving { epoch } => self.leaves(from, epoch, out),
            Message::Want { cluster, epoch } => self.donate(from, cluster, epoch, out),
            Message::Refused => self.transfer.refused(now_us, from),
            Message::Enough => {
                self.donations.remove(&from);
            }
            Message::State(state) => self.given(from, *state, out),
            Message::Round(merged) => self.given_round(from, *merged, out),
        }
    }

    /// Only a life that is out is told so: one that is merely behind in the log is in the view of those who are ahead.
    fn told_stale(&mut self, now_us: u64, cluster: ClusterId, epoch: Epoch, out: &mut Vec<Effect>) {
        let round = self.round.as_ref();
        if round.is_some_and(|round| round.cluster() == cluster && round.view().epoch < epoch) {
            let left = if self.leaving { Left::Politely } else { Left::Stale { epoch } };
            self.leave(now_us, left, out);
        } else {
            out.push(Effect::Dropped(Dropped::Round(round::Dropped::OlderEpoch)));
        }
    }
}
