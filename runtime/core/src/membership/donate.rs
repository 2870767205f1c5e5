//! The donor's side of a join: a state, then each round behind it.

use super::{Dropped, Effect, Machine, Message, State};
use crate::ids::{ClusterId, Epoch, Incarnation, Round};
use crate::replica::Snapshot;
use crate::round::{Entry, Merged};

/// M8. What goes to one joiner.
#[derive(Clone, Debug)]
pub(super) struct Donation {
    pub(super) epoch: Epoch,
    /// Behind which the state is taken.
    pub(super) round: Round,
    clock_us: u64,
    /// Rounds that were completed while the replica takes its state; `None` once that is sent.
    pub(super) behind: Option<Vec<Merged>>,
    bytes: usize,
}

impl Machine {
    /// A joiner wants the state: the replica gives it behind all rounds that it was given before.
    pub(super) fn donate(&mut self, to: Incarnation, cluster: ClusterId, epoch: Epoch, out: &mut Vec<Effect>) {
        let round = self.round.as_ref().filter(|round| round.cluster() == cluster && round.view().epoch == epoch);
        let known = self.links.get(&to).is_some_and(|link| link.up) && self.donations.len() < self.config.members_max;
        let Some(round) = round.filter(|_| known) else {
            return self.send(to, Message::Refused, out);
        };
        let (completed, clock_us) = (round.completed(), round.agreed_clock_us());
        let donation = Donation { epoch, round: completed, clock_us, behind: Some(Vec::new()), bytes: 0 };
        self.donations.insert(to, donation);
        out.push(Effect::Donate { to, epoch, round: completed });
    }

    pub(super) fn donated(
        &mut self,
        to: Incarnation,
        (epoch, round): (Epoch, Round),
        replica: Snapshot,
        out: &mut Vec<Effect>,
    ) {
        let donation = self.donations.get_mut(&to).filter(|d| (d.epoch, d.round) == (epoch, round));
        let (Some(donation), Some(machine)) = (donation, &self.round) else {
            out.push(Effect::Dropped(Dropped::Unasked));
            return;
        };
        // Given twice where it was asked for twice behind one round: the first one will do.
        let Some(behind) = donation.behind.take() else { return };
        let state = State { cluster: machine.cluster(), epoch, round, clock_us: donation.clock_us, replica };
        self.send(to, Message::State(Box::new(state)), out);
        for merged in behind {
            self.send(to, Message::Round(Box::new(merged)), out);
        }
    }

    /// A completed round goes to each joiner behind its state.
    pub(super) fn pass_to_joiners(&mut self, merged: &Merged, out: &mut Vec<Effect>) {
        let joiners: Vec<Incarnation> = self.donations.keys().copied().collect();
        for to in joiners {
            let Some(donation) = self.donations.get_mut(&to) else { continue };
            match &mut donation.behind {
                None => self.send(to, Message::Round(Box::new(merged.clone())), out),
                Some(behind) => {
                    donation.bytes = donation.bytes.saturating_add(bytes(merged));
                    if donation.bytes <= self.config.transfer_bytes_max {
                        behind.push(merged.clone());
                    } else {
                        self.donations.remove(&to);
                        self.send(to, Message::Refused, out);
                    }
                }
            }
        }
    }
}

/// About how many bytes an input takes: for a bound, not for a bill.
pub(super) fn bytes(merged: &Merged) -> usize {
    let entry = |entry: &Entry| match entry {
        Entry::Arrival(arrival) => 128 + 4 * arrival.head.len() + 8 * arrival.chain.hashes.len(),
        _ => 40,
    };
    let contributions = merged.contributions.iter().map(|c| {
        let entries: usize = c.entries.iter().map(|s| entry(&s.entry)).sum();
        64 + entries + 88 * c.ranks.len() + 16 * c.prefix_matches.len()
    });
    contributions.sum()
}
