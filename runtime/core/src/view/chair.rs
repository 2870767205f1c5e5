//! The chair: gathers a report of every seat and leads all of them into one view.

use super::{Change, Message, Report, Seat, Standing, founded_by, majority};
use crate::ids::{ClusterId, Epoch, Incarnation, RankId, Round};
use crate::round::{Member, Merged, View};
use std::collections::BTreeSet;

/// What the chair wants a seat to be told.
type Orders = Vec<(Seat, Message)>;

#[derive(Debug)]
pub(super) struct Chair {
    me: Incarnation,
    /// The newest report of each seat whose link is up.
    reports: Vec<Option<Report>>,
    /// Of the last change.
    count: u64,
    change: Option<Change>,
    /// The view that the change came to.
    installed: Option<(ClusterId, View)>,
    /// Who was asked for what under the change since its last report, so that nobody is asked twice.
    asked: BTreeSet<(Seat, Asked)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Asked {
    Freeze,
    Install(Epoch),
    Fill(Round),
    /// By which donor: another one is asked when that one is gone.
    State(Round, Incarnation),
    Leave,
}

/// A member that is in the newest view and has a place in it.
struct Stayer<'a> {
    seat: Seat,
    incarnation: Incarnation,
    view: &'a View,
    cluster: ClusterId,
    completed: Round,
    digest: u64,
    last: Option<&'a Merged>,
}

impl Chair {
    pub(super) fn new(me: Incarnation, seats: usize) -> Self {
        Self { me, reports: vec![None; seats], count: 0, change: None, installed: None, asked: BTreeSet::new() }
    }

    /// The link to a seat is down: what it said may not hold any more.
    pub(super) fn gone(&mut self, seat: Seat) {
        self.reports[seat.0 as usize] = None;
    }

    /// Seats without a report.
    pub(super) fn silent(&self) -> Vec<Seat> {
        self.seats().filter(|seat| self.reports[seat.0 as usize].is_none()).collect()
    }

    fn seats(&self) -> impl Iterator<Item = Seat> + use<> {
        (0..self.reports.len() as u32).map(Seat)
    }

    /// Takes a report and says what follows from it.
    pub(super) fn report(&mut self, from: Seat, report: Report, ranks: &[Vec<RankId>], orders: &mut Orders) {
        self.reports[from.0 as usize] = Some(report);
        self.asked.retain(|(seat, _)| *seat != from);
        let Some(reports) = self.reports.iter().cloned().collect::<Option<Vec<Report>>>() else { return };
        if is_settled(&reports) {
            self.change = None;
            return;
        }
        let Some(change) = self.change else { return self.freeze(orders) };
        // Another life than the one that was frozen, or one that does not know of the change yet.
        let strange = |report: &&Report| report.change != Some(change) && !self.is_installed_at(report);
        match &self.installed {
            None if reports.iter().any(|report| strange(&report)) => {
                let strangers = self.seats().zip(&reports).filter(|(_, report)| strange(report));
                for seat in strangers.map(|(seat, _)| seat).collect::<Vec<Seat>>() {
                    self.order_once(seat, Asked::Freeze, Message::Freeze(change), orders);
                }
            }
            None => self.go_on(&reports, ranks, orders),
            // Too late for this change.
            Some(_) if reports.iter().any(|report| strange(&report)) => self.freeze(orders),
            // The others carry it out; this one's order may have been lost with its link.
            Some((cluster, view)) if reports[from.0 as usize].change == Some(change) => {
                let install = Message::Install { change, cluster: *cluster, view: view.clone() };
                orders.push((from, install));
            }
            Some(_) => {}
        }
    }

    /// Whether the change that the chair led was carried out there.
    fn is_installed_at(&self, report: &Report) -> bool {
        let epoch = self.installed.as_ref().map(|(_, view)| view.epoch);
        match &report.standing {
            Standing::Inside { view, .. } => report.change.is_none() && Some(view.epoch) == epoch,
            Standing::Outside { .. } => false,
        }
    }

    fn freeze(&mut self, orders: &mut Orders) {
        self.count += 1;
        let change = Change { chair: self.me, count: self.count };
        self.change = Some(change);
        self.installed = None;
        self.asked.clear();
        orders.extend(self.seats().map(|seat| (seat, Message::Freeze(change))));
    }

    fn order_once(&mut self, seat: Seat, what: Asked, message: Message, orders: &mut Orders) {
        if self.asked.insert((seat, what)) {
            orders.push((seat, message));
        }
    }

    /// All are frozen under the change: brings them to one state, then into one view.
    fn go_on(&mut self, reports: &[Report], ranks: &[Vec<RankId>], orders: &mut Orders) {
        let Some(change) = self.change else { return };
        let members: Vec<Member> = reports
            .iter()
            .zip(ranks)
            .map(|(report, ranks)| Member { incarnation: report.incarnation, ranks: ranks.clone() })
            .collect();
        let Some((cluster, newest)) = newest_view(reports) else {
            let view = View { epoch: Epoch(1), first_round: Round(1), members };
            let cluster = founded_by(&view.members);
            return self.install(change, cluster, &view, orders);
        };
        let mut stayers = Vec::new();
        let mut behind = false;
        for (seat, report) in self.seats().zip(reports) {
            let Standing::Inside { cluster: of, view, completed, digest, last } = &report.standing else { continue };
            let placed = newest.position(report.incarnation) == Some(seat.0 as usize);
            if *of != cluster || !placed {
                behind = true;
                self.order_once(seat, Asked::Leave, Message::Leave { change }, orders);
            } else if view.epoch < newest.epoch {
                // It missed an install that others have carried out; it was at the cut then.
                behind = true;
                let install = Message::Install { change, cluster, view: newest.clone() };
                self.order_once(seat, Asked::Install(newest.epoch), install, orders);
            } else {
                let last = last.as_deref();
                let incarnation = report.incarnation;
                stayers.push(Stayer { seat, incarnation, view, cluster, completed: *completed, digest: *digest, last });
            }
        }
        if !behind && self.level(change, &stayers, orders) {
            self.join(change, &stayers, reports, members, orders);
        }
    }

    /// Brings all stayers to the cut, and sends away who differs there. True once they stand alike.
    fn level(&mut self, change: Change, stayers: &[Stayer<'_>], orders: &mut Orders) -> bool {
        let Some(cut) = stayers.iter().map(|s| s.completed).max() else { return false };
        let merged = stayers.iter().filter(|s| s.completed == cut).find_map(|s| s.last);
        let mut alike = true;
        for stayer in stayers.iter().filter(|s| s.completed < cut) {
            alike = false;
            match merged.filter(|_| stayer.completed.0 + 1 == cut.0) {
                Some(merged) => {
                    let fill = Message::Fill { change, merged: Box::new(merged.clone()) };
                    self.order_once(stayer.seat, Asked::Fill(cut), fill, orders);
                }
                // More than a round behind: it takes the state from another instead.
                None => self.order_once(stayer.seat, Asked::Leave, Message::Leave { change }, orders),
            }
        }
        if alike {
            let digests: Vec<u64> = stayers.iter().map(|s| s.digest).collect();
            let stays = majority(&digests);
            for stayer in stayers.iter().filter(|s| s.digest != stays) {
                alike = false;
                self.order_once(stayer.seat, Asked::Leave, Message::Leave { change }, orders);
            }
        }
        alike
    }

    /// Gives those outside the state of the cut; installs once all have it.
    fn join(
        &mut self,
        change: Change,
        stayers: &[Stayer<'_>],
        reports: &[Report],
        members: Vec<Member>,
        orders: &mut Orders,
    ) {
        let Some(donor) = stayers.first() else { return };
        let cut = donor.completed;
        let lacks = |report: &Report| match report.standing {
            Standing::Outside { given } => given != Some(cut),
            Standing::Inside { .. } => false,
        };
        let lacking: Vec<Seat> =
            self.seats().zip(reports).filter(|(_, report)| lacks(report)).map(|(seat, _)| seat).collect();
        if lacking.is_empty() {
            let view = View { epoch: Epoch(donor.view.epoch.0 + 1), first_round: Round(cut.0 + 1), members };
            return self.install(change, donor.cluster, &view, orders);
        }
        let to: Vec<Seat> = lacking
            .into_iter()
            .filter(|seat| self.asked.insert((*seat, Asked::State(cut, donor.incarnation))))
            .collect();
        if !to.is_empty() {
            orders.push((donor.seat, Message::Donate { change, to }));
        }
    }

    fn install(&mut self, change: Change, cluster: ClusterId, view: &View, orders: &mut Orders) {
        self.installed = Some((cluster, view.clone()));
        for seat in self.seats() {
            let install = Message::Install { change, cluster, view: view.clone() };
            self.order_once(seat, Asked::Install(view.epoch), install, orders);
        }
    }
}

/// Whether all are in one view that has a place for each of them, and none is frozen.
fn is_settled(reports: &[Report]) -> bool {
    let Some((cluster, newest)) = newest_view(reports) else { return false };
    reports.iter().enumerate().all(|(seat, report)| match &report.standing {
        Standing::Inside { cluster: of, view, .. } => {
            *of == cluster
                && view.epoch == newest.epoch
                && newest.position(report.incarnation) == Some(seat)
                && report.change.is_none()
        }
        Standing::Outside { .. } => false,
    })
}

/// The view with the highest epoch, and its cluster.
fn newest_view(reports: &[Report]) -> Option<(ClusterId, &View)> {
    let inside = reports.iter().filter_map(|report| match &report.standing {
        Standing::Inside { cluster, view, .. } => Some((*cluster, view)),
        Standing::Outside { .. } => None,
    });
    // The first of equals: all reports of one epoch hold the same view.
    inside.rev().max_by_key(|(_, view)| view.epoch)
}
