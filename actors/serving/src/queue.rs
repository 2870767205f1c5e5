//! The waiting queue's actor, one a node: owns the machine of rounds and views. Contributions in and out, completed rounds
//! and new views to the router.

use crate::clock::Clock;
use crate::cluster::{self, ClusterReport, Health, News, Pace, Watch};
use crate::directory::Place;
use crate::observer::{Observer, RoundTiming};
use crate::stopwatch::Stopwatch;
use crate::wakeup::Wakeup;
use crate::{Addresses, LocalRank, Settings, Surroundings};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Context, LinkEvent, NodeName, Reply};
use starling_core::ids::{Incarnation, RankId, RequestNumber, Round};
use starling_core::replica::Snapshot;
use starling_core::round::{Applied, Entry, Input, PrefixMatch, RankSnapshot, View};
use starling_core::view::{self, Change, Effect, Machine, Seat, Standstill};
use std::sync::Arc;

#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From another member's queue.
    Peer { from: Seat, message: Box<view::Message> },
    // The rest is from this node only.
    #[serde(skip)]
    Announce(Entry),
    #[serde(skip)]
    FromRank { entry: Option<Entry>, snapshot: RankSnapshot },
    #[serde(skip)]
    Applied(Applied),
    /// From a local rank: how many tokens it could reuse of the requests that `round` named.
    #[serde(skip)]
    Matches { rank: LocalRank, round: Round, matches: Vec<(RequestNumber, u32)> },
    /// From the router: the replica's state, for members that join.
    #[serde(skip)]
    Donated { change: Change, to: Vec<Seat>, replica: Box<Snapshot> },
    #[serde(skip)]
    Link(LinkEvent),
    #[serde(skip)]
    Draining,
    #[serde(skip)]
    Debug(Reply<ClusterReport>),
    #[serde(skip)]
    Tick,
}

pub struct Queue {
    machine: Machine,
    settings: Arc<Settings>,
    addresses: Arc<Addresses>,
    health: Arc<Health>,
    watch: Watch,
    pace: Pace,
    stopwatch: Stopwatch,
    observer: Arc<dyn Observer>,
    /// The ingress was told which life this is.
    announced: bool,
    clock: Clock,
    wakeup: Wakeup,
}

impl Queue {
    /// A new life, in no view: nothing of an earlier life is known to it, so nothing of an earlier life may be taken for its
    /// own.
    pub(crate) fn new(around: &Surroundings) -> Self {
        let settings = Arc::clone(&around.settings);
        let seating = settings.seating(draw_incarnation());
        Self {
            machine: Machine::new(seating, settings.rounds.clone(), around.clock.now_us()),
            addresses: Arc::clone(&around.addresses),
            health: Arc::clone(&around.health),
            watch: Watch::new(settings.suspect_after_us),
            pace: Pace::default(),
            stopwatch: Stopwatch::default(),
            observer: Arc::clone(&around.observer),
            announced: false,
            clock: around.clock,
            wakeup: Wakeup::default(),
            settings,
        }
    }

    fn drive(&mut self, context: &mut Context<'_, Message>, input: view::Input) -> Result<(), ActorError> {
        let mut effects = Vec::new();
        let now_us = self.clock.now_us();
        self.machine.handle(now_us, input, &mut effects);
        for effect in effects {
            if matches!(effect, Effect::Completed(_)) {
                self.stopwatch.completed(now_us);
            }
            self.perform(context, effect)?;
        }
        self.stopwatch.look(now_us, self.machine.round_wait());
        let standstill = self.machine.standstill();
        if let Some(news) = self.watch.look(now_us, standstill.as_ref()) {
            self.tell_standstill(context, news);
        }
        let due = self.machine.poll_timeout().into_iter().chain(self.watch.due_us(standstill.as_ref())).min();
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
        Ok(())
    }

    fn perform(&mut self, context: &mut Context<'_, Message>, effect: Effect) -> Result<(), ActorError> {
        match effect {
            Effect::Send { to, message } => {
                if let Some(queue) = self.addresses.queues.get(to.0 as usize) {
                    let message = Message::Peer { from: self.settings.seat(), message };
                    // What a link loses is sent again when it is up again.
                    let _ = queue.tell(context.trace(), message);
                }
            }
            Effect::Completed(merged) => {
                self.pace.completed(self.clock.now_us(), merged.round.0);
                let round = crate::router::Message::Round(Box::new(merged));
                // The router restarts with this actor: a round it does not get is a round of an ended life.
                let _ = self.addresses.router.tell(context.trace(), round);
            }
            Effect::Installed { cluster, view, replica } => {
                tracing::info!(%cluster, epoch = %view.epoch, first_round = %view.first_round, "new view");
                self.observer.view(view.epoch);
                self.addresses.directory.set(places(&view));
                let own = self.addresses.directory.of(self.settings.seat());
                self.addresses.router.tell(context.trace(), crate::router::Message::Install { view, own, replica })?;
                if !std::mem::replace(&mut self.announced, true) {
                    let life = crate::ingress::Message::NewCluster(self.machine.incarnation());
                    // An ingress that is just restarting restarts this actor after itself.
                    let _ = self.addresses.ingress.tell(context.trace(), life);
                }
            }
            Effect::Donate { change, to } => {
                self.addresses.router.tell(context.trace(), crate::router::Message::Donate { change, to })?;
            }
            Effect::Left(left) => {
                return Err(format!("this life has no place in the cluster any more: {left:?}").into());
            }
            Effect::Dropped(dropped) => tracing::debug!(?dropped, "input of a round not taken"),
        }
        Ok(())
    }

    /// The last completed round is applied here.
    fn tell_timing(&mut self) {
        let Some(lap) = self.stopwatch.applied(self.clock.now_us()) else { return };
        let others = self.settings.members.iter().enumerate().filter(|(seat, _)| *seat != self.settings.me);
        let waits = others.map(|(seat, member)| (&member.name, lap.wait(Seat(seat as u32))));
        self.observer.round_timed(&RoundTiming { took: lap.took, waits: waits.collect() });
    }

    fn tell_standstill(&self, context: &Context<'_, Message>, news: News) {
        let (who, still) = match news {
            News::Moving => {
                tracing::info!("rounds go on");
                (None, None)
            }
            News::Still(Standstill { since_us, waits_for }) => {
                let names: Vec<String> = waits_for.iter().map(|seat| self.settings.name_of(*seat).to_owned()).collect();
                tracing::warn!(waits_for = ?names, "no round completes");
                let who = if names.is_empty() { "the other members".to_owned() } else { names.join(", ") };
                (Some(who), Some((since_us, names)))
            }
        };
        // An ingress that is down is told again: this actor restarts after it.
        let _ = self.addresses.ingress.tell(context.trace(), crate::ingress::Message::Standstill(who));
        // Whoever is told that this node is ready must not be refused: its ingress heard of it before.
        self.health.set(still);
    }

    fn link(&mut self, context: &mut Context<'_, Message>, event: LinkEvent) -> Result<(), ActorError> {
        let seat = |name: &NodeName| self.settings.seat_of(name).filter(|seat| *seat != self.settings.seat());
        match event {
            LinkEvent::Up(peer) => {
                let Some(seat) = seat(&peer.name) else { return Ok(()) };
                tracing::info!(peer = %peer.name, "link up");
                self.drive(context, view::Input::LinkUp(seat))
            }
            LinkEvent::Down(peer, reason) => {
                let Some(seat) = seat(&peer.name) else { return Ok(()) };
                tracing::warn!(peer = %peer.name, %reason, "link down");
                let ranks = self.addresses.directory.of(seat);
                let _ = self.addresses.ingress.tell(context.trace(), crate::ingress::Message::Unreachable(ranks));
                self.drive(context, view::Input::LinkDown(seat))
            }
            LinkEvent::Refused { peer, why } => {
                tracing::error!(%peer, %why, "peer refused");
                Ok(())
            }
        }
    }
}

impl Actor for Queue {
    type Message = Message;

    fn started(&mut self, context: &mut Context<'_, Message>) -> Result<(), ActorError> {
        tracing::info!(incarnation = %self.machine.incarnation(), "new life of this member");
        context.node().subscribe_links(context.address(), Message::Link);
        self.drive(context, view::Input::Round(Input::Tick))
    }

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        let input = match message {
            Message::Peer { from, message } if (from.0 as usize) < self.settings.members.len() => {
                view::Input::Received { from, message }
            }
            Message::Peer { from, .. } => {
                tracing::warn!(%from, "message of a member that is not in the list");
                return Ok(());
            }
            Message::Announce(entry) => view::Input::Round(Input::Announce(entry)),
            Message::FromRank { entry, snapshot } => view::Input::Round(Input::FromRank { entry, snapshot }),
            Message::Applied(applied) => {
                self.tell_timing();
                view::Input::Round(Input::Applied(applied))
            }
            Message::Matches { rank, round, matches } => {
                let Some(rank) = self.addresses.directory.of(self.settings.seat()).get(rank.0 as usize).copied() else {
                    return Ok(());
                };
                let matched = |(number, tokens)| PrefixMatch { number, rank, tokens };
                let matches = matches.into_iter().map(matched).collect();
                view::Input::Round(Input::Matches { round, matches })
            }
            Message::Donated { change, to, replica } => view::Input::Donated { change, to, replica },
            Message::Link(event) => return self.link(context, event),
            Message::Draining => view::Input::Round(Input::Draining(true)),
            Message::Debug(reply) => {
                let seen = (&self.watch, &self.pace);
                let here = (context.node(), self.clock.now_us());
                reply.send(cluster::report(&self.settings, &self.machine, seen, here));
                return Ok(());
            }
            Message::Tick => {
                self.wakeup.fired();
                view::Input::Round(Input::Tick)
            }
        };
        self.drive(context, input)
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Peer { .. } => "peer",
            Message::Announce(_) => "announce",
            Message::FromRank { .. } => "from_rank",
            Message::Applied(_) => "applied",
            Message::Matches { .. } => "matches",
            Message::Donated { .. } => "donated",
            Message::Link(_) => "link",
            Message::Draining => "draining",
            Message::Debug(_) => "debug",
            Message::Tick => "tick",
        }
    }
}

/// Where the ranks of a view are: its members sit in the order of the list.
fn places(view: &View) -> impl Iterator<Item = (RankId, Place)> + '_ {
    let seats = (0..).map(Seat).zip(&view.members);
    seats.flat_map(|(seat, member)| {
        member.ranks.iter().zip((0..).map(LocalRank)).map(move |(id, local)| (*id, (seat, local)))
    })
}

/// A random number that was not drawn before and is not 0. The standard library seeds its hasher from the system's
/// randomness, which is all that is wanted here.
fn draw_incarnation() -> Incarnation {
    use std::hash::{BuildHasher, RandomState};
    Incarnation(RandomState::new().hash_one(std::process::id()).max(1))
}
