//! How the cluster stands, as this node sees it: for readiness and for whoever looks.

use crate::Settings;
use crate::clock::Clock;
use crate::directory::Seat;
use starling_actors::{Node, NodeName};
use starling_core::ids::Incarnation;
use starling_core::membership::{Leaver, Machine, Why};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Rounds follow each other by the heartbeat at least (200 ms by default); a machine that is this late serves nobody.
const ROUND_AGE_US_MAX: u64 = 5_000_000;

/// What the queue and the router say of the rounds, for threads that are not actors.
pub(crate) struct Health {
    clock: Clock,
    suspect_after_us: u64,
    applied_us: AtomicU64,
    /// Since when no round completes, and whom it waits for. A node begins in no view.
    standstill: Mutex<Option<(u64, Vec<String>)>>,
}

impl Health {
    pub(crate) fn new(clock: Clock, suspect_after_us: u64) -> Self {
        let standstill = Mutex::new(Some((0, Vec::new())));
        Self { clock, suspect_after_us, applied_us: AtomicU64::new(0), standstill }
    }

    /// The router applied a round.
    pub(crate) fn beat(&self) {
        self.applied_us.store(self.clock.now_us(), Ordering::Relaxed);
    }

    pub(crate) fn set(&self, standstill: Option<(u64, Vec<String>)>) {
        *self.standstill.lock().unwrap_or_else(PoisonError::into_inner) = standstill;
    }

    pub(crate) fn standstill(&self) -> Option<(Duration, Vec<String>)> {
        let now_us = self.clock.now_us();
        let age = |since_us: u64| Duration::from_micros(now_us.saturating_sub(since_us));
        let told = self.standstill.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((since_us, waits_for)) = told {
            return Some((age(since_us), waits_for));
        }
        // The queue says nothing, and yet nothing happens: it hangs.
        let applied_us = self.applied_us.load(Ordering::Relaxed);
        let late = now_us.saturating_sub(applied_us) > ROUND_AGE_US_MAX.max(2 * self.suspect_after_us);
        late.then(|| (age(applied_us), Vec::new()))
    }
}

/// No round completes, since when, and which members it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Still {
    pub(crate) since_us: u64,
    pub(crate) waits_for: Vec<Seat>,
}

/// Turns what the round machine says into what people are told, once it lasts.
pub(crate) struct Watch {
    suspect_after_us: u64,
    told: Told,
}

#[derive(PartialEq, Eq)]
enum Told {
    /// A new life: what an earlier one told holds until this one knows better. Streams that hand themselves over are not to be
    /// refused for the moment in which there is no view.
    Nothing,
    Moving,
    Still(Vec<Seat>),
}

/// Something to tell.
pub(crate) enum News {
    Still(Still),
    Moving,
}

impl Watch {
    pub(crate) fn new(suspect_after_us: u64) -> Self {
        Self { suspect_after_us, told: Told::Nothing }
    }

    /// When a standstill that just began is one.
    pub(crate) fn due_us(&self, standstill: Option<&Still>) -> Option<u64> {
        let told = matches!(self.told, Told::Still(_));
        standstill.filter(|_| !told).map(|s| s.since_us.saturating_add(self.suspect_after_us))
    }

    /// What changed.
    pub(crate) fn look(&mut self, now_us: u64, standstill: Option<&Still>) -> Option<News> {
        let (told, news) = match standstill {
            None => (Told::Moving, News::Moving),
            Some(s) if now_us.saturating_sub(s.since_us) >= self.suspect_after_us => {
                (Told::Still(s.waits_for.clone()), News::Still(s.clone()))
            }
            // It may pass.
            Some(_) => return None,
        };
        let changed = told != self.told;
        self.told = told;
        changed.then_some(news)
    }

    fn suspects(&self, seat: Seat) -> bool {
        matches!(&self.told, Told::Still(seats) if seats.contains(&seat))
    }
}

/// Marks of the last seconds, for the rate of rounds.
#[derive(Default)]
pub(crate) struct Pace {
    marks: VecDeque<(u64, u64)>,
}

const PACE_MARK_US: u64 = 250_000;
const PACE_MARKS: usize = 20;

impl Pace {
    pub(crate) fn completed(&mut self, now_us: u64, round: u64) {
        if self.marks.back().is_none_or(|(at_us, _)| now_us.saturating_sub(*at_us) >= PACE_MARK_US) {
            self.marks.push_back((now_us, round));
            if self.marks.len() > PACE_MARKS {
                self.marks.pop_front();
            }
        }
    }

    fn rounds_per_s(&self, now_us: u64, round: u64) -> f64 {
        self.marks.front().map_or(0.0, |(since_us, first)| {
            let seconds = now_us.saturating_sub(*since_us).max(1) as f64 / 1e6;
            round.saturating_sub(*first) as f64 / seconds
        })
    }
}

fn hex(incarnation: Incarnation) -> String {
    format!("{:016x}", incarnation.0)
}

/// The cluster as one member sees it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ClusterReport {
    /// In hexadecimal; empty in no view.
    pub cluster: String,
    pub epoch: u64,
    pub round: u64,
    pub rounds_per_s: f64,
    /// The member that leads changes, if one does.
    pub leader: Option<String>,
    /// Changes of the view are under way.
    pub changing: bool,
    pub last_change: Option<ChangeReport>,
    pub members: Vec<MemberReport>,
}

/// The last change of the view.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ChangeReport {
    /// Of the view that it came to.
    pub epoch: u64,
    /// The last round before it.
    pub cut: u64,
    /// Members that left, and why.
    pub left: Vec<LeftReport>,
    /// Names of those that joined.
    pub joined: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LeftReport {
    pub name: String,
    pub incarnation: String,
    pub why: String,
}

fn said(why: Why) -> &'static str {
    match why {
        Why::Politely => "left politely",
        Why::LinkDown => "its link was down",
        Why::Silent => "its contributions were missing",
        Why::Restarted => "its name runs another life",
        Why::Diverged => "its replica differed",
        Why::Unreported => "it did not report",
        Why::Replaced => "its round actor started over",
    }
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MemberReport {
    pub name: String,
    /// Of its life in the view, in hexadecimal: JSON numbers may not hold it. Empty in no view.
    pub incarnation: String,
    pub in_view: bool,
    pub ranks: Vec<u32>,
    pub state: MemberState,
    /// Since anything came from it; 0 for this node, absent without a link.
    pub last_heard_ms: Option<u64>,
    /// The last round that it completed; known of this node only.
    pub completed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    Up,
    /// There is a link, but rounds wait for it.
    Suspected,
    /// There is no link.
    Down,
}

pub(crate) fn report(
    settings: &Settings,
    machine: &Machine,
    (watch, pace, known): (&Watch, &Pace, &[(Incarnation, Seat)]),
    (node, now_us): (&Node, u64),
) -> ClusterReport {
    let links = node.links();
    let heard = |name: &NodeName| links.iter().find(|link| link.peer().name == *name).map(|link| link.last_heard());
    let member = |(index, member): (usize, &crate::MemberSettings)| {
        let seat = Seat(index as u32);
        let last_heard = if seat == settings.seat() { Some(Duration::ZERO) } else { heard(&member.name) };
        let state = match last_heard {
            None => MemberState::Down,
            Some(_) if watch.suspects(seat) => MemberState::Suspected,
            Some(_) => MemberState::Up,
        };
        let places = machine.agreed().into_iter().flat_map(|agreed| &agreed.members);
        let life = places.into_iter().find(|place| *place.name.0 == *member.name.as_str());
        MemberReport {
            name: member.name.to_string(),
            incarnation: life.map_or_else(String::new, |place| hex(place.incarnation)),
            in_view: life.is_some(),
            ranks: life.map_or_else(Vec::new, |member| member.ranks.iter().map(|rank| rank.0).collect()),
            state,
            completed: (seat == settings.seat()).then_some(machine.completed().0),
            last_heard_ms: last_heard.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        }
    };
    let round = machine.completed().0;
    let status = machine.status();
    let places = || machine.agreed().into_iter().flat_map(|agreed| &agreed.members);
    // Who has left is known by what it said when it was linked.
    let former =
        |life| known.iter().rev().find(|(of, _)| *of == life).map(|(_, seat)| settings.name_of(*seat).to_owned());
    let name_of = |life| {
        let place = places().find(|place| place.incarnation == life);
        place.map(|place| place.name.to_string()).or_else(|| former(life))
    };
    let named = |life| name_of(life).unwrap_or_else(|| hex(life));
    let left = |leaver: &Leaver| LeftReport {
        name: named(leaver.incarnation),
        incarnation: hex(leaver.incarnation),
        why: said(leaver.why).to_owned(),
    };
    ClusterReport {
        cluster: machine.cluster().map_or_else(String::new, |cluster| format!("{:016x}", cluster.0)),
        epoch: machine.view().map_or(0, |view| view.epoch.0),
        round,
        rounds_per_s: pace.rounds_per_s(now_us, round),
        leader: status.leader.and_then(name_of),
        changing: status.pending.is_some(),
        last_change: status.last.map(|past| ChangeReport {
            epoch: past.epoch.0,
            cut: past.cut.0,
            left: past.leaving.iter().map(left).collect(),
            joined: past.joining.iter().copied().map(named).collect(),
        }),
        members: settings.members.iter().enumerate().map(member).collect(),
    }
}
