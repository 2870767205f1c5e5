//! The router, one a node: owns the replica. Applies each completed round and hands its decisions to those they concern.

use crate::gpu_worker::RankReport;
use crate::observer::{Observer, RoundReport};
use crate::serving::Pulse;
use crate::{Addresses, Settings, Surroundings, kv_manager};
use starling_actors::{Actor, ActorError, Context, Reply};
use starling_core::ids::{AttemptKey, RankId, RequestKey, RequestNumber, Round};
use starling_core::replica::{Decision, Replica};
use starling_core::round::{Chain, Entry, Merged, RankSnapshot, View};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// Placements kept for `/debug/placement`.
const RECENT_PLACEMENTS: usize = 64;

pub enum Message {
    /// A new view in a new cluster: the replica starts empty.
    Install(View),
    Round(Box<Merged>),
    /// The rank is done with the attempt, or cannot run it.
    Finished {
        rank: RankId,
        attempt: AttemptKey,
    },
    Lost {
        rank: RankId,
        attempts: Vec<AttemptKey>,
    },
    /// The rank started over: all that was placed on it is lost.
    RankStarted(RankId),
    /// A rank's newest load.
    Report {
        rank: RankId,
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
    ledgers: Vec<Ledger>,
    addresses: Arc<Addresses>,
    observer: Arc<dyn Observer>,
    pulse: Arc<Pulse>,
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
            ledgers: (0..around.settings.ranks).map(ledger).collect(),
            addresses: Arc::clone(&around.addresses),
            observer: Arc::clone(&around.observer),
            pulse: Arc::clone(&around.pulse),
            recent: VecDeque::new(),
            chains: BTreeMap::new(),
        }
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
        self.pulse.beat();
        let ended = SystemTime::now();
        if !decisions.is_empty() {
            self.account(&decisions);
            self.hand_out(context, Decided { round: merged.round, decisions, started, ended });
        }
        for rank in 0..self.settings.ranks {
            self.tell_queue(context, RankId(rank), None);
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
                    if let Some(ledger) = self.ledgers.get_mut(rank.0 as usize) {
                        ledger.open.insert(*attempt);
                    }
                    if self.recent.len() == RECENT_PLACEMENTS {
                        self.recent.pop_front();
                    }
                    self.recent.push_back(decision.clone());
                }
                Decision::Stop { attempt, rank } => {
                    if let Some(ledger) = self.ledgers.get_mut(rank.0 as usize) {
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
        for (index, rank) in self.addresses.ranks.iter().enumerate() {
            let id = RankId(index as u32);
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

    fn tell_queue(&self, context: &Context<'_, Message>, rank: RankId, entry: Option<Entry>) {
        let (Some(ledger), Some(replica)) = (self.ledgers.get(rank.0 as usize), &self.replica) else {
            return;
        };
        let snapshot = RankSnapshot {
            rank,
            counted: replica.round(),
            active_requests: ledger.open.len() as u32,
            active_tokens: ledger.report.active_tokens,
            queued_prefill_tokens: ledger.report.queued_prefill_tokens,
            kv_blocks_held: ledger.report.kv.blocks_held,
            kv_blocks_reusable: ledger.report.kv.blocks_reusable,
            kv_blocks_free: ledger.report.kv.blocks_free,
            steps: ledger.report.steps,
        };
        let message = crate::queue::Message::FromRank { entry, snapshot };
        let _ = self.addresses.queue.tell(context.trace(), message);
    }

    fn lost(&mut self, context: &Context<'_, Message>, rank: RankId, attempts: Vec<AttemptKey>) {
        if attempts.is_empty() {
            return;
        }
        self.observer.lost(rank, attempts.len());
        tracing::warn!(%rank, attempts = attempts.len(), "attempts lost");
        for attempt in attempts {
            if let Some(ledger) = self.ledgers.get_mut(rank.0 as usize) {
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
            faults: replica.map(Replica::faults).unwrap_or_default(),
            recent: self.recent.iter().cloned().collect(),
        }
    }
}

impl Actor for Router {
    type Message = Message;

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Install(view) => {
                self.replica = Some(Replica::new(view, self.settings.replica.clone()));
            }
            Message::Round(merged) => self.round(context, &merged)?,
            Message::Finished { rank, attempt } => {
                let known = self.ledgers.get_mut(rank.0 as usize).is_some_and(|l| l.open.remove(&attempt));
                if known {
                    self.tell_queue(context, rank, Some(Entry::Finished(attempt)));
                }
            }
            Message::Lost { rank, attempts } => self.lost(context, rank, attempts),
            Message::RankStarted(rank) => {
                let attempts = self.replica.as_ref().map(|r| r.placed_on_rank(rank)).unwrap_or_default();
                self.lost(context, rank, attempts);
            }
            Message::Report { rank, report } => {
                if let Some(ledger) = self.ledgers.get_mut(rank.0 as usize) {
                    ledger.report = report;
                }
            }
            Message::Debug(reply) => reply.send(self.debug()),
        }
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Install(_) => "install",
            Message::Round(_) => "round",
            Message::Finished { .. } => "finished",
            Message::Lost { .. } => "lost",
            Message::RankStarted(_) => "rank_started",
            Message::Report { .. } => "report",
            Message::Debug(_) => "debug",
        }
    }
}
