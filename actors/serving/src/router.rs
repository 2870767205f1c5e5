//! The router, one a node: owns the replica. Applies each completed round and hands its decisions to those they concern.

use crate::cluster::Health;
use crate::directory::Seat;
use crate::gpu_worker::RankReport;
use crate::observer::{Observer, RoundReport};
use crate::{Addresses, LocalRank, Settings, Surroundings, gpu_worker, kv_manager};
use starling_actors::{Actor, ActorError, Context, Reply};
use starling_core::ids::{AttemptKey, Epoch, Incarnation, RankId, RequestKey, RequestNumber, Round};
use starling_core::replica::{Decision, Replica, Snapshot};
use starling_core::round::{Chain, Entry, Merged, RankSnapshot, Turn, View};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// Placements kept for `/debug/placement`.
const RECENT_PLACEMENTS: usize = 64;

pub enum Message {
    /// A new view, the ids that it gives to the ranks of this node, and where the ingresses sit. In the first view of a cluster
    /// the replica starts empty.
    Install {
        view: View,
        own: Vec<RankId>,
        ingresses: Arc<[(Incarnation, Seat)]>,
        /// Left of their own will.
        polite: Vec<Incarnation>,
    },
    /// To somebody outside a view: begin with this state, and go on by rounds.
    Restore(Box<Snapshot>),
    /// A member that joins wants the replica's state.
    Donate {
        to: Incarnation,
        epoch: Epoch,
        round: Round,
    },
    Round(Box<Merged>),
    /// The rank is done with the attempt, or cannot run it.
    Finished {
        rank: LocalRank,
        attempt: AttemptKey,
    },
    Lost {
        rank: LocalRank,
        attempts: Vec<AttemptKey>,
    },
    /// The rank started over: all that was placed on it is lost.
    RankStarted(LocalRank),
    /// A rank's newest load.
    Report {
        rank: LocalRank,
        report: RankReport,
    },
    Debug(Reply<PlacementDebug>),
}

/// Chains of ended requests that may be kept before they are swept.
const CHAINS_SPARE: usize = 64;

/// What a round decided, for those it concerns.
#[derive(Clone, Debug)]
pub struct Decided {
    pub round: Round,
    pub decisions: Vec<Decision>,
    pub started: SystemTime,
    pub ended: SystemTime,
}

/// The newest decisions with their terms.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PlacementDebug {
    pub round: u64,
    pub waiting: usize,
    pub requests: usize,
    pub conversations: usize,
    /// Attempts on the ranks of this node.
    pub open_here: usize,
    pub faults: starling_core::replica::Faults,
    /// Newest last.
    pub recent: Vec<Decision>,
}

/// A local rank's own count of what it was given: the replica compares it with its own.
struct Ledger {
    open: BTreeSet<AttemptKey>,
    report: RankReport,
}

pub struct Router {
    settings: Arc<Settings>,
    replica: Option<Replica>,
    /// A view was installed.
    installed: bool,
    /// Those of the view, and where they sit.
    ingresses: Arc<[(Incarnation, Seat)]>,
    /// The ids that the view gives to the ranks of this node.
    own: Vec<RankId>,
    /// By place, as `own`.
    ledgers: Vec<Ledger>,
    addresses: Arc<Addresses>,
    observer: Arc<dyn Observer>,
    health: Arc<Health>,
    recent: VecDeque<Decision>,
    /// Block keys of requests that may be probed; not replica state.
    chains: BTreeMap<RequestKey, Chain>,
}

impl Router {
    pub fn new(around: &Surroundings) -> Self {
        let ledger = |_| Ledger { open: BTreeSet::new(), report: RankReport::default() };
        Self {
            settings: Arc::clone(&around.settings),
            replica: None,
            installed: false,
            ingresses: Arc::default(),
            own: Vec::new(),
            ledgers: around.settings.own_ranks().map(ledger).collect(),
            addresses: Arc::clone(&around.addresses),
            observer: Arc::clone(&around.observer),
            health: Arc::clone(&around.health),
            recent: VecDeque::new(),
            chains: BTreeMap::new(),
        }
    }

    fn ledger(&mut self, rank: LocalRank) -> Option<&mut Ledger> {
        self.ledgers.get_mut(rank.0 as usize)
    }

    /// Which rank of this node has that id.
    fn local(&self, id: RankId) -> Option<LocalRank> {
        let place = self.own.iter().position(|own| *own == id)?;
        Some(LocalRank(place as u32))
    }

    fn own_ranks(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..self.own.len() as u32).map(LocalRank)
    }

    fn install(
        &mut self,
        context: &Context<'_, Message>,
        view: View,
        polite: &[Incarnation],
    ) -> Result<(), ActorError> {
        let started = SystemTime::now();
        let fresh = !std::mem::replace(&mut self.installed, true);
        let mut replica = match self.replica.take() {
            Some(replica) => replica,
            None if view.epoch == Epoch(1) => Replica::new(view.clone(), self.settings.replica.clone()),
            None => return Err(format!("no state for the view of {}", view.epoch).into()),
        };
        let mut decisions = Vec::new();
        replica.install(view, polite, &mut decisions)?;
        let (round, ready) = (replica.round(), replica.ready());
        self.reconcile(context, &replica, fresh);
        self.replica = Some(replica);
        self.account(&decisions);
        self.hand_out(context, Decided { round, decisions, started, ended: SystemTime::now() });
        if self.settings.rounds.lockstep {
            // The step that this begins is waited for like one that a round begins.
            for rank in self.own_ranks() {
                self.stands(rank, round);
                self.tell_queue(context, rank, None);
            }
            self.take_turns(context);
        }
        self.health.beat();
        self.addresses.queue.tell(context.trace(), crate::queue::Message::Applied(ready))?;
        Ok(())
    }

    /// Tells each local rank what the replica thinks it runs. A router that just began knows nothing of what its ranks lost
    /// before; one that goes on heard of it.
    fn reconcile(&mut self, context: &Context<'_, Message>, replica: &Replica, fresh: bool) {
        for (index, rank) in self.own.clone().into_iter().enumerate() {
            let open = replica.open_on_rank(rank);
            let of_replica: BTreeSet<AttemptKey> = open.iter().map(|(attempt, _)| *attempt).collect();
            let ledger = &mut self.ledgers[index].open;
            match fresh {
                true => *ledger = of_replica,
                // What a rank finished in the meantime is known here and on its way to the replica.
                false => ledger.retain(|attempt| of_replica.contains(attempt)),
            }
            self.tell_view(context, index, (open, fresh));
        }
    }

    fn tell_view(
        &self,
        context: &Context<'_, Message>,
        index: usize,
        (open, report_lost): (Vec<(AttemptKey, RequestNumber)>, bool),
    ) {
        let ingresses = Arc::clone(&self.ingresses);
        let message = gpu_worker::Message::Reconcile { ingresses, open: open.into(), report_lost };
        // A rank that is down says that it started when it is back.
        let _ = self.addresses.ranks[index].worker.tell(context.trace(), message);
    }

    fn rank_started(&mut self, context: &Context<'_, Message>, rank: LocalRank) {
        let id = self.own.get(rank.0 as usize);
        let attempts = self.replica.as_ref().zip(id).map(|(r, id)| r.placed_on_rank(*id)).unwrap_or_default();
        // It runs no step before it was told of a round.
        self.stands(rank, Round(0));
        self.lost(context, rank, attempts);
        self.tell_view(context, rank.0 as usize, (Vec::new(), false));
    }

    fn round(&mut self, context: &Context<'_, Message>, merged: &Merged) -> Result<(), ActorError> {
        let replica = self.replica.as_mut().ok_or("a round came before the view")?;
        let (begun, started) = (Instant::now(), SystemTime::now());
        let mut decisions = Vec::new();
        let applied = replica.apply(merged, &mut decisions);
        let report = RoundReport {
            round: merged.round.0,
            waiting: replica.waiting_len(),
            requests: replica.requests_len(),
            apply: begun.elapsed(),
            faults: replica.faults(),
        };
        self.probe(context, merged, &decisions);
        self.observer.round(&report);
        self.health.beat();
        let ended = SystemTime::now();
        if !decisions.is_empty() {
            self.account(&decisions);
            self.hand_out(context, Decided { round: merged.round, decisions, started, ended });
        }
        if self.settings.rounds.lockstep {
            self.count_late(merged);
            self.take_turns(context);
        }
        for rank in self.own_ranks() {
            self.tell_queue(context, rank, None);
        }
        let applied = crate::queue::Message::Applied(applied);
        // A queue that is just restarting has another cluster, and restarts this actor with it.
        let _ = self.addresses.queue.tell(context.trace(), applied);
        Ok(())
    }

    /// Asks the local ranks about the requests that the round named.
    fn probe(&mut self, context: &Context<'_, Message>, merged: &Merged, decisions: &[Decision]) {
        let Some(replica) = self.replica.as_ref().filter(|r| r.router().needs_matches()) else { return };
        for sequenced in merged.contributions.iter().flat_map(|c| &c.entries) {
            if let Entry::Arrival(arrival) = &sequenced.entry {
                self.chains.insert(arrival.key, arrival.chain.clone());
            }
        }
        if self.chains.len() > 2 * replica.requests_len() + CHAINS_SPARE {
            self.chains.retain(|key, _| replica.knows(*key));
        }
        let chain = |d: &Decision| match d {
            Decision::Probe { key, number } => Some((*number, self.chains.get(key)?.clone())),
            _ => None,
        };
        let chains: Arc<[(RequestNumber, Chain)]> = decisions.iter().filter_map(chain).collect();
        if replica.is_probing() {
            for rank in &self.addresses.ranks {
                let probe = kv_manager::Message::Probe { round: merged.round, chains: Arc::clone(&chains) };
                // A rank that is down holds nothing: its matches are absent and count as 0.
                let _ = rank.kv.tell(context.trace(), probe);
            }
        }
    }

    /// Keeps the ranks' own counts and the newest placements.
    fn account(&mut self, decisions: &[Decision]) {
        for decision in decisions {
            match decision {
                Decision::Placed { attempt, rank, .. } => {
                    if let Some(ledger) = self.local(*rank).and_then(|rank| self.ledger(rank)) {
                        ledger.open.insert(*attempt);
                    }
                    if self.recent.len() == RECENT_PLACEMENTS {
                        self.recent.pop_front();
                    }
                    self.recent.push_back(decision.clone());
                }
                Decision::Stop { attempt, rank } => {
                    if let Some(ledger) = self.local(*rank).and_then(|rank| self.ledger(rank)) {
                        ledger.open.remove(attempt);
                    }
                }
                Decision::Enqueued { .. }
                | Decision::Seal { .. }
                | Decision::Probe { .. }
                | Decision::Rejected { .. } => {}
            }
        }
    }

    /// Ranks hear of a placement before the ingress does, so a prompt never comes before its placement.
    fn hand_out(&self, context: &Context<'_, Message>, decided: Decided) {
        for (id, rank) in self.own.iter().copied().zip(&self.addresses.ranks) {
            let concerns = |d: &&Decision| match d {
                Decision::Placed { rank, .. } | Decision::Stop { rank, .. } => *rank == id,
                _ => false,
            };
            let mine: Vec<Decision> = decided.decisions.iter().filter(concerns).cloned().collect();
            if !mine.is_empty() {
                // A rank that is down loses all that was placed on it, and says so when it is back.
                let _ = rank.worker.tell(context.trace(), crate::gpu_worker::Message::Decided(mine));
            }
        }
        // An ingress that is down announces its streams again in a new cluster.
        let decided = crate::ingress::Message::Decided(Box::new(decided));
        let _ = self.addresses.ingress.tell(context.trace(), decided);
    }

    /// In lockstep: each local rank runs one step, or passes.
    fn take_turns(&self, context: &Context<'_, Message>) {
        let Some(replica) = &self.replica else { return };
        for (id, rank) in self.own.iter().copied().zip(&self.addresses.ranks) {
            let turn = Turn { round: replica.round(), occupancy: replica.occupancy(id) };
            // A rank that is down is late until it is back.
            let _ = rank.worker.tell(context.trace(), gpu_worker::Message::Step(turn));
        }
    }

    fn count_late(&self, merged: &Merged) {
        let late = merged.contributions.iter().flat_map(|c| &c.ranks).filter(|s| s.late);
        late.filter_map(|s| self.local(s.rank)).for_each(|rank| self.observer.late(rank));
    }

    /// In lockstep: what is known of a rank that has not spoken since.
    fn stands(&mut self, rank: LocalRank, boundary: Round) {
        if let Some(ledger) = self.ledger(rank) {
            (ledger.report.boundary, ledger.report.ready) = (boundary, false);
        }
    }

    fn reported(&mut self, context: &Context<'_, Message>, rank: LocalRank, report: RankReport) {
        let lockstep = self.settings.rounds.lockstep;
        let Some(ledger) = self.ledger(rank) else { return };
        let old = std::mem::replace(&mut ledger.report, report);
        // Rounds wait for this; all else is told after each of them.
        if lockstep && (old.boundary, old.ready) != (report.boundary, report.ready) {
            self.tell_queue(context, rank, None);
        }
    }

    fn tell_queue(&mut self, context: &Context<'_, Message>, rank: LocalRank, entry: Option<Entry>) {
        let Some(counted) = self.replica.as_ref().map(Replica::round) else { return };
        let Some(id) = self.own.get(rank.0 as usize).copied() else { return };
        let Some(ledger) = self.ledger(rank) else { return };
        let snapshot = RankSnapshot {
            rank: id,
            counted,
            active_requests: ledger.open.len() as u32,
            active_tokens: ledger.report.active_tokens,
            queued_prefill_tokens: ledger.report.queued_prefill_tokens,
            kv_blocks_held: ledger.report.kv.blocks_held,
            kv_blocks_reusable: ledger.report.kv.blocks_reusable,
            kv_blocks_free: ledger.report.kv.blocks_free,
            steps: ledger.report.steps,
            boundary: ledger.report.boundary,
            ready: ledger.report.ready,
            // The queue knows whether it waited.
            late: false,
        };
        let message = crate::queue::Message::FromRank { entry, snapshot };
        let _ = self.addresses.queue.tell(context.trace(), message);
    }

    fn lost(&mut self, context: &Context<'_, Message>, rank: LocalRank, attempts: Vec<AttemptKey>) {
        if attempts.is_empty() {
            return;
        }
        self.observer.lost(rank, attempts.len());
        tracing::warn!(%rank, attempts = attempts.len(), "attempts lost");
        for attempt in attempts {
            if let Some(ledger) = self.ledger(rank) {
                ledger.open.remove(&attempt);
            }
            self.tell_queue(context, rank, Some(Entry::Lost(attempt)));
        }
    }

    fn debug(&self) -> PlacementDebug {
        let replica = self.replica.as_ref();
        PlacementDebug {
            round: replica.map_or(0, |r| r.round().0),
            waiting: replica.map_or(0, Replica::waiting_len),
            requests: replica.map_or(0, Replica::requests_len),
            conversations: replica.map_or(0, |r| r.router().conversations()),
            open_here: self.ledgers.iter().map(|ledger| ledger.open.len()).sum(),
            faults: replica.map(Replica::faults).unwrap_or_default(),
            recent: self.recent.iter().cloned().collect(),
        }
    }
}

impl Actor for Router {
    type Message = Message;

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Install { view, own, ingresses, polite } => {
                (self.own, self.ingresses) = (own, ingresses);
                self.install(context, view, &polite)?;
            }
            Message::Restore(snapshot) => {
                let replica = Replica::restore(*snapshot, &self.settings.replica)?;
                let said = crate::queue::Message::Applied(replica.last_said());
                self.replica = Some(replica);
                self.addresses.queue.tell(context.trace(), said)?;
            }
            Message::Donate { to, epoch, round } => {
                if let Some(replica) = &self.replica {
                    let replica = Box::new(replica.snapshot());
                    let donated = crate::queue::Message::Donated { to, epoch, round, replica };
                    let _ = self.addresses.queue.tell(context.trace(), donated);
                }
            }
            Message::Round(merged) => self.round(context, &merged)?,
            Message::Finished { rank, attempt } => {
                let known = self.ledger(rank).is_some_and(|ledger| ledger.open.remove(&attempt));
                if known {
                    self.tell_queue(context, rank, Some(Entry::Finished(attempt)));
                }
            }
            Message::Lost { rank, attempts } => self.lost(context, rank, attempts),
            Message::RankStarted(rank) => self.rank_started(context, rank),
            Message::Report { rank, report } => self.reported(context, rank, report),
            Message::Debug(reply) => reply.send(self.debug()),
        }
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Install { .. } => "install",
            Message::Restore(_) => "restore",
            Message::Donate { .. } => "donate",
            Message::Round(_) => "round",
            Message::Finished { .. } => "finished",
            Message::Lost { .. } => "lost",
            Message::RankStarted(_) => "rank_started",
            Message::Report { .. } => "report",
            Message::Debug(_) => "debug",
        }
    }
}
