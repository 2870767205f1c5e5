//! The waiting queue's actor, one a node: owns the machine of rounds and views. Contributions in and out, completed rounds
//! and new views to the router, entries of the log in and proposals out.

use crate::clock::Clock;
use crate::cluster::{self, ClusterReport, Health, Pace, Still, Watch};
use crate::directory::Place;
use crate::directory::Seat;
use crate::gate::{End, Gate};
use crate::log::{self, Log, Logs};
use crate::observer::{Observer, RoundTiming};
use crate::stopwatch::Stopwatch;
use crate::wakeup::Wakeup;
use crate::{Addresses, LocalRank, Settings, Surroundings, gpu_worker};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Address, Context, LinkEvent, NodeName, Reply};
use starling_core::bootstrap;
use starling_core::ids::{Epoch, Incarnation, RankId, RequestNumber, Round};
use starling_core::membership::{self, Effect, Left, Life, Machine, Peer, Why};
use starling_core::replica::Snapshot;
use starling_core::round::{Applied, Entry, Input, PrefixMatch, RankSnapshot, View};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Lives that are remembered by name.
const KNOWN_MAX: usize = 64;

/// What members' queues say to each other.
#[derive(Serialize, Deserialize)]
pub enum Between {
    /// The first word of a life, and the answer to it.
    Hello {
        hello: bootstrap::Hello,
        replaces: Option<Incarnation>,
        answers: bool,
    },
    Standing(Box<bootstrap::Standing>),
    Refused(bootstrap::Refusal),
    Membership {
        from: Incarnation,
        message: Box<membership::Message>,
    },
}

#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From another member's queue.
    Peer { from: Seat, message: Box<Between> },
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
    /// From the router: the replica's state, for a member that joins.
    #[serde(skip)]
    Donated { to: Incarnation, epoch: Epoch, round: Round, replica: Box<Snapshot> },
    /// Of the log, as the life that opened it hears it.
    #[serde(skip)]
    Log { life: Incarnation, news: log::News },
    #[serde(skip)]
    Link(LinkEvent),
    #[serde(skip)]
    Draining,
    /// Leave the view politely. Answered when that is done, or there is no view to leave.
    #[serde(skip)]
    Leave(Reply<()>),
    /// An operator gives the group up.
    #[serde(skip)]
    Abandon,
    #[serde(skip)]
    Debug(Reply<ClusterReport>),
    #[serde(skip)]
    Tick,
}

pub struct Queue {
    machine: Machine,
    gate: Gate,
    logs: Arc<dyn Logs>,
    /// Open while this actor runs.
    log: Option<Box<dyn Log>>,
    /// Who votes in it.
    voters: Vec<Incarnation>,
    /// The lives of linked members.
    lives: BTreeMap<Seat, Incarnation>,
    /// The last lives that were linked or are, oldest first: who has left had a name.
    known: VecDeque<(Incarnation, Seat)>,
    settings: Arc<Settings>,
    addresses: Arc<Addresses>,
    health: Arc<Health>,
    watch: Watch,
    pace: Pace,
    stopwatch: Stopwatch,
    observer: Arc<dyn Observer>,
    /// The life whose ranks run on under this one.
    replaces: Option<Incarnation>,
    /// What the gate wanted before this actor could do it.
    gate_effects: Vec<bootstrap::Effect>,
    /// The ingress was told which life this is.
    announced: bool,
    /// Whoever waits for this member to leave, and whether it has.
    leaving: Vec<Reply<()>>,
    left: bool,
    clock: Clock,
    wakeup: Wakeup,
}

impl Queue {
    /// A new life, in no view: nothing of an earlier life is known to it, so nothing of an earlier life may be taken for its
    /// own.
    pub(crate) fn new(around: &Surroundings) -> Self {
        let (settings, now_us) = (Arc::clone(&around.settings), around.clock.now_us());
        let incarnation = draw_incarnation();
        let (me, gate) = (&settings.members[settings.me], around.gate.clone());
        let mut gate_effects = Vec::new();
        let first = || bootstrap::Machine::new(me.name.as_str().into(), incarnation, settings.bootstrap());
        let replaces = gate.born(now_us, incarnation, first, &mut gate_effects);
        let life = Life {
            name: membership::Name(me.name.as_str().into()),
            incarnation,
            ranks: me.ranks,
            replaces,
            witness: false,
        };
        Self {
            machine: Machine::new(life, settings.membership(), now_us),
            gate,
            logs: Arc::clone(&around.logs),
            log: None,
            voters: Vec::new(),
            lives: BTreeMap::new(),
            known: VecDeque::new(),
            addresses: Arc::clone(&around.addresses),
            health: Arc::clone(&around.health),
            watch: Watch::new(settings.suspect_after_us),
            pace: Pace::default(),
            stopwatch: Stopwatch::default(),
            observer: Arc::clone(&around.observer),
            replaces,
            gate_effects,
            announced: false,
            leaving: Vec::new(),
            left: false,
            clock: around.clock,
            wakeup: Wakeup::default(),
            settings,
        }
    }

    fn drive(&mut self, context: &mut Context<'_, Message>, input: membership::Input) -> Result<(), ActorError> {
        let mut effects = Vec::new();
        let now_us = self.clock.now_us();
        self.machine.handle(now_us, input, &mut effects);
        for effect in effects {
            if matches!(effect, Effect::Completed(_)) {
                self.stopwatch.completed(now_us);
            }
            self.perform(context, effect)?;
        }
        let wait = self.machine.round_wait();
        self.stopwatch.look(now_us, wait.map(|wait| self.still(wait)));
        let standstill = self.machine.standstill().map(|standstill| self.still(standstill));
        if let Some(news) = self.watch.look(now_us, standstill.as_ref()) {
            self.tell_standstill(context, news);
        }
        let machines = self.machine.poll_timeout().into_iter().chain(self.gate.look(|m| m.poll_timeout()).flatten());
        let due = machines.chain(self.watch.due_us(standstill.as_ref())).min();
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
        Ok(())
    }

    fn perform(&mut self, context: &mut Context<'_, Message>, effect: Effect) -> Result<(), ActorError> {
        match effect {
            Effect::Send { to, message } => {
                if let Some(seat) = self.seat_of(to) {
                    let from = self.machine.incarnation();
                    self.send(context, seat, Between::Membership { from, message });
                }
            }
            Effect::Completed(merged) => {
                self.pace.completed(self.clock.now_us(), merged.round.0);
                let round = crate::router::Message::Round(Box::new(merged));
                // The router restarts with this actor: a round it does not get is a round of an ended life.
                let _ = self.addresses.router.tell(context.trace(), round);
            }
            Effect::Restored(snapshot) => {
                self.addresses.router.tell(context.trace(), crate::router::Message::Restore(snapshot))?;
            }
            Effect::Installed { cluster, view, polite } => {
                tracing::info!(%cluster, epoch = %view.epoch, first_round = %view.first_round, "new view");
                self.install(context, view, polite)?;
            }
            Effect::Donate { to, epoch, round } => {
                let donate = crate::router::Message::Donate { to, epoch, round };
                self.addresses.router.tell(context.trace(), donate)?;
            }
            Effect::Propose(command) => self.with_log(|log| log.propose(command)),
            Effect::Left(left) => return self.leave(left),
            Effect::Dropped(dropped) => tracing::debug!(?dropped, "input of a round not taken"),
        }
        Ok(())
    }

    fn install(
        &mut self,
        context: &mut Context<'_, Message>,
        view: View,
        polite: Vec<Incarnation>,
    ) -> Result<(), ActorError> {
        self.observer.view(view.epoch);
        let me = self.machine.incarnation();
        self.gate.inside(me);
        let seats: Vec<(Incarnation, Seat)> = self.agreed_seats();
        self.addresses.directory.set(places(&view, &seats));
        let own = view.members.iter().find(|member| member.incarnation == me).map(|member| member.ranks.clone());
        let (own, ingresses) = (own.unwrap_or_default(), seats.into());
        let install = crate::router::Message::Install { view, own, ingresses, polite };
        self.addresses.router.tell(context.trace(), install)?;
        if !std::mem::replace(&mut self.announced, true) {
            let life = crate::ingress::Message::NewCluster(me);
            // An ingress that is just restarting restarts this actor after itself.
            let _ = self.addresses.ingress.tell(context.trace(), life);
        }
        self.tell_gate(context)
    }

    /// The members of the latest view, with their places in the list. Who is not in the list is nobody's to reach.
    fn agreed_seats(&self) -> Vec<(Incarnation, Seat)> {
        let members = self.machine.agreed().into_iter().flat_map(|agreed| &agreed.members);
        members.filter_map(|place| Some((place.incarnation, self.settings.seat_of(&place.name.0)?))).collect()
    }

    fn with_log(&self, then: impl FnOnce(&dyn Log)) {
        if let Some(log) = &self.log {
            then(log.as_ref());
        }
    }

    fn seat_of(&self, life: Incarnation) -> Option<Seat> {
        self.lives.iter().find(|(_, known)| **known == life).map(|(seat, _)| *seat)
    }

    /// With places in the list instead of lives.
    fn still(&self, standstill: membership::Standstill) -> Still {
        let members = || self.machine.agreed().into_iter().flat_map(|agreed| &agreed.members);
        let seat = |life| self.settings.seat_of(&members().find(|place| place.incarnation == life)?.name.0);
        let membership::Standstill { since_us, waits_for } = standstill;
        let mut waits_for: Vec<Seat> = waits_for.into_iter().filter_map(seat).collect();
        if waits_for.is_empty() && self.machine.view().is_none() {
            // In no view, it waits for those without whom there is none.
            let others = (0..self.settings.members.len() as u32).map(Seat).filter(|seat| *seat != self.settings.seat());
            waits_for = others.filter(|seat| !self.lives.contains_key(seat)).collect();
        }
        Still { since_us, waits_for }
    }

    /// This life is over, and another one begins with another incarnation; unless it left of its own will.
    fn leave(&mut self, left: Left) -> Result<(), ActorError> {
        if left == Left::Politely {
            self.left = true;
            self.leaving.drain(..).for_each(|reply| reply.send(()));
            return Ok(());
        }
        self.gate.ends(End::Left(match left {
            Left::Diverged { .. } | Left::Evicted(Why::Diverged) => bootstrap::Left::Diverged,
            _ => bootstrap::Left::Evicted,
        }));
        Err(format!("this life has no place in the cluster any more: {left:?}").into())
    }

    // -- the gate

    /// Who is a member and who votes now.
    fn tell_gate(&mut self, context: &mut Context<'_, Message>) -> Result<(), ActorError> {
        let Some(agreed) = self.machine.agreed().filter(|_| self.machine.view().is_some()) else { return Ok(()) };
        let life = |place: &membership::Place| bootstrap::Life {
            name: Arc::clone(&place.name.0),
            incarnation: place.incarnation,
        };
        let members: Vec<bootstrap::Life> = agreed.members.iter().map(life).collect();
        let voters = members.iter().filter(|member| self.voters.contains(&member.incarnation)).cloned().collect();
        let membership = bootstrap::Membership { cluster: agreed.cluster, members, voters };
        self.at_gate(context, bootstrap::Input::InCluster(membership))
    }

    fn at_gate(&mut self, context: &mut Context<'_, Message>, input: bootstrap::Input) -> Result<(), ActorError> {
        let mut effects = std::mem::take(&mut self.gate_effects);
        self.gate.handle(self.clock.now_us(), input, &mut effects);
        for effect in effects {
            self.perform_at_gate(context, effect)?;
        }
        Ok(())
    }

    fn perform_at_gate(
        &mut self,
        context: &mut Context<'_, Message>,
        effect: bootstrap::Effect,
    ) -> Result<(), ActorError> {
        match effect {
            bootstrap::Effect::Send { to, standing } => {
                if let Some(seat) = self.settings.seat_of(&to) {
                    self.send(context, seat, Between::Standing(standing));
                }
            }
            bootstrap::Effect::Begin { cluster, members } => {
                tracing::info!(%cluster, members = members.len(), "founding a cluster");
                // In the order of the list, so that its ranks count through it.
                let mut founders: Vec<(Seat, Incarnation)> = Vec::new();
                for life in &members {
                    founders.extend(self.settings.seat_of(&life.name).map(|seat| (seat, life.incarnation)));
                }
                founders.sort_unstable();
                let place = |(seat, incarnation): &(Seat, Incarnation)| membership::Place {
                    name: membership::Name(self.settings.name_of(*seat).into()),
                    incarnation: *incarnation,
                    ranks: self.settings.ranks_of(*seat).map(RankId).collect(),
                };
                let founders = founders.iter().map(place).collect();
                self.with_log(|log| log.found(cluster, founders));
            }
            bootstrap::Effect::Join { cluster, via } => tracing::info!(%cluster, %via, "joining a cluster"),
            bootstrap::Effect::DrawIncarnation(why) => {
                self.gate.ends(End::Asked);
                return Err(format!("this life is over: {why:?}").into());
            }
            bootstrap::Effect::Refuse { name, why } => {
                tracing::warn!(peer = %name, %why, "member refused");
                if let Some(seat) = self.settings.seat_of(&name) {
                    self.send(context, seat, Between::Refused(why));
                }
            }
            bootstrap::Effect::Superseded(life) => {
                // Its own link says the same: the life that took its place says hello.
                tracing::info!(%life, "a member's name runs another life");
            }
        }
        Ok(())
    }

    // -- links

    fn send(&self, context: &Context<'_, Message>, to: Seat, message: Between) {
        if let Some(queue) = self.addresses.queues.get(to.0 as usize) {
            let message = Message::Peer { from: self.settings.seat(), message: Box::new(message) };
            // What a link loses is sent again when it is up again.
            let _ = queue.tell(context.trace(), message);
        }
    }

    fn say_hello(&self, context: &Context<'_, Message>, to: Seat, answers: bool) {
        if let Some(hello) = self.gate.look(bootstrap::Machine::hello) {
            self.send(context, to, Between::Hello { hello, replaces: self.replaces, answers });
        }
    }

    fn received(&mut self, context: &mut Context<'_, Message>, seat: Seat, message: Between) -> Result<(), ActorError> {
        let name: bootstrap::Name = self.settings.name_of(seat).into();
        match message {
            Between::Hello { hello, replaces, answers } => {
                if !answers {
                    self.say_hello(context, seat, true);
                }
                let incarnation = hello.incarnation;
                self.forget_life(context, seat, Some(incarnation))?;
                self.at_gate(context, bootstrap::Input::LinkUp { name: Arc::clone(&name), hello })?;
                if self.lives.insert(seat, incarnation) != Some(incarnation) {
                    if self.known.len() == KNOWN_MAX {
                        self.known.pop_front();
                    }
                    self.known.push_back((incarnation, seat));
                }
                self.with_log(|log| log.linked(incarnation, &name, true));
                let peer = Peer { name: membership::Name(name), incarnation, replaces };
                self.drive(context, membership::Input::LinkUp(peer))
            }
            Between::Standing(standing) => self.at_gate(context, bootstrap::Input::Received { from: name, standing }),
            Between::Refused(why) => {
                tracing::error!(peer = %name, %why, "refused by a member");
                self.at_gate(context, bootstrap::Input::RefusedBy { name, why })
            }
            Between::Membership { from, message } if self.lives.get(&seat) == Some(&from) => {
                self.drive(context, membership::Input::Received { from, message })
            }
            // Of a life that has not said hello, or not any more.
            Between::Membership { .. } => Ok(()),
        }
    }

    /// The life that was linked there is gone, unless it is `still` that one.
    fn forget_life(
        &mut self,
        context: &mut Context<'_, Message>,
        seat: Seat,
        still: Option<Incarnation>,
    ) -> Result<(), ActorError> {
        let Some(life) = self.lives.get(&seat).copied().filter(|life| Some(*life) != still) else { return Ok(()) };
        self.lives.remove(&seat);
        self.with_log(|log| log.linked(life, self.settings.name_of(seat), false));
        self.drive(context, membership::Input::LinkDown(life))
    }

    fn link(&mut self, context: &mut Context<'_, Message>, event: LinkEvent) -> Result<(), ActorError> {
        let seat = |name: &NodeName| self.settings.seat_of(name.as_str()).filter(|seat| *seat != self.settings.seat());
        match event {
            LinkEvent::Up(peer) => {
                let Some(seat) = seat(&peer.name) else { return Ok(()) };
                tracing::info!(peer = %peer.name, "link up");
                self.say_hello(context, seat, false);
                Ok(())
            }
            LinkEvent::Down(peer, reason) => {
                let Some(seat) = seat(&peer.name) else { return Ok(()) };
                tracing::warn!(peer = %peer.name, %reason, "link down");
                let ranks = self.addresses.directory.of(seat);
                let _ = self.addresses.ingress.tell(context.trace(), crate::ingress::Message::Unreachable(ranks));
                self.at_gate(context, bootstrap::Input::LinkDown { name: peer.name.as_str().into() })?;
                self.forget_life(context, seat, None)
            }
            LinkEvent::Refused { peer, why } => {
                tracing::error!(%peer, %why, "peer refused");
                Ok(())
            }
        }
    }

    fn heard(&mut self, context: &mut Context<'_, Message>, news: log::News) -> Result<(), ActorError> {
        let input = match news {
            log::News::Founded { cluster, members } => membership::Input::Founded { cluster, members },
            log::News::Restored(agreed) => membership::Input::Restored(agreed),
            log::News::Committed { index, command } => membership::Input::Committed { index, command },
            log::News::Consensus(consensus) => {
                self.voters.clone_from(&consensus.voters);
                self.drive(context, membership::Input::Consensus(consensus))?;
                return self.tell_gate(context);
            }
        };
        self.drive(context, input)
    }

    // -- what others are told

    /// The last completed round is applied here.
    fn tell_timing(&mut self) {
        let Some(lap) = self.stopwatch.applied(self.clock.now_us()) else { return };
        let others = self.settings.members.iter().enumerate().filter(|(seat, _)| *seat != self.settings.me);
        let waits = others.map(|(seat, member)| (&member.name, lap.wait(Seat(seat as u32))));
        self.observer.round_timed(&RoundTiming { took: lap.took, waits: waits.collect() });
    }

    fn tell_standstill(&self, context: &Context<'_, Message>, news: cluster::News) {
        let (who, still) = match news {
            cluster::News::Moving => {
                tracing::info!("rounds go on");
                (None, None)
            }
            cluster::News::Still(Still { since_us, waits_for }) => {
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

    /// What ran here under another life that is out of the view is nobody's: it ends, and its blocks stay as prefixes.
    fn end_attempts(&self, context: &Context<'_, Message>) {
        for rank in &self.addresses.ranks {
            let ends =
                gpu_worker::Message::Reconcile { ingresses: Arc::default(), open: Arc::default(), report_lost: false };
            let _ = rank.worker.tell(context.trace(), ends);
        }
    }
}

impl Actor for Queue {
    type Message = Message;

    fn started(&mut self, context: &mut Context<'_, Message>) -> Result<(), ActorError> {
        tracing::info!(incarnation = %self.machine.incarnation(), replaces = ?self.replaces, "new life of this member");
        if self.replaces.is_none() {
            self.end_attempts(context);
        }
        let (life, queue): (_, Address<Message>) = (self.machine.incarnation(), context.address().clone());
        let sink = Arc::new(move |news| queue.notify(Message::Log { life, news }));
        self.log = Some(self.logs.open(life, sink));
        context.node().subscribe_links(context.address(), Message::Link);
        self.at_gate(context, bootstrap::Input::Tick)?;
        self.drive(context, membership::Input::Round(Input::Tick))
    }

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        let input = match message {
            Message::Peer { from, message } if (from.0 as usize) < self.settings.members.len() => {
                return self.received(context, from, *message);
            }
            Message::Peer { from, .. } => {
                tracing::warn!(%from, "message of a member that is not in the list");
                return Ok(());
            }
            Message::Announce(entry) => membership::Input::Round(Input::Announce(entry)),
            Message::FromRank { entry, snapshot } => membership::Input::Round(Input::FromRank { entry, snapshot }),
            Message::Applied(applied) => {
                self.tell_timing();
                membership::Input::Round(Input::Applied(applied))
            }
            Message::Matches { rank, round, matches } => {
                let Some(rank) = self.addresses.directory.id((self.settings.seat(), rank)) else { return Ok(()) };
                let matched = |(number, tokens)| PrefixMatch { number, rank, tokens };
                let matches = matches.into_iter().map(matched).collect();
                membership::Input::Round(Input::Matches { round, matches })
            }
            Message::Donated { to, epoch, round, replica } => membership::Input::Donated { to, epoch, round, replica },
            Message::Log { life, news } if life == self.machine.incarnation() => return self.heard(context, news),
            Message::Log { .. } => return Ok(()),
            Message::Link(event) => return self.link(context, event),
            Message::Draining => membership::Input::Round(Input::Draining(true)),
            Message::Leave(reply) => {
                let alone = self.machine.agreed().is_none_or(|agreed| agreed.members.len() < 2);
                if self.left || alone || self.machine.view().is_none() {
                    reply.send(());
                    return Ok(());
                }
                self.leaving.push(reply);
                membership::Input::Leave
            }
            Message::Abandon => return self.at_gate(context, bootstrap::Input::Abandon { bootstrap: None }),
            Message::Debug(reply) => {
                let known: Vec<(Incarnation, Seat)> = self.known.iter().copied().collect();
                let seen = (&self.watch, &self.pace, &known[..]);
                let here = (context.node(), self.clock.now_us());
                reply.send(cluster::report(&self.settings, &self.machine, seen, here));
                return Ok(());
            }
            Message::Tick => {
                self.wakeup.fired();
                self.at_gate(context, bootstrap::Input::Tick)?;
                membership::Input::Round(Input::Tick)
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
            Message::Log { .. } => "log",
            Message::Link(_) => "link",
            Message::Draining => "draining",
            Message::Leave(_) => "leave",
            Message::Abandon => "abandon",
            Message::Debug(_) => "debug",
            Message::Tick => "tick",
        }
    }
}

/// Where the ranks of a view are.
fn places<'a>(view: &'a View, seats: &'a [(Incarnation, Seat)]) -> impl Iterator<Item = (RankId, Place)> + 'a {
    view.members.iter().flat_map(move |member| {
        let seat = seats.iter().find(|(life, _)| *life == member.incarnation).map(|(_, seat)| *seat);
        let ranks = member.ranks.iter().zip((0..).map(LocalRank));
        seat.into_iter().flat_map(move |seat| ranks.clone().map(move |(id, local)| (*id, (seat, local))))
    })
}

/// A random number that was not drawn before and is not 0. The standard library seeds its hasher from the system's
/// randomness, which is all that is wanted here.
fn draw_incarnation() -> Incarnation {
    use std::hash::{BuildHasher, RandomState};
    Incarnation(RandomState::new().hash_one(std::process::id()).max(1))
}
