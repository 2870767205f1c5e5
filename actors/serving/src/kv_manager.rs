//! A rank's KV manager: owns the machine that knows which blocks hold what, and alone reserves them.

use crate::clock::Clock;
use crate::directory::Seat;
use crate::wakeup::Wakeup;
use crate::{Addresses, LocalRank, RankAddresses, Surroundings, gpu_worker, queue};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Context, Reply, SpanRecord};
use starling_core::ids::{AttemptKey, RequestNumber, Round};
use starling_core::kv::cache::rebalance;
use starling_core::kv::{ConfigError, Effect, Explanation, Forget, Forgotten, Input, Manager};
use starling_core::round::Chain;
use std::sync::Arc;
use std::time::SystemTime;

#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From any node: whatever the rank holds of a conversation or a scope goes.
    Forget { what: Forget, reply: Reply<Forgotten> },
    /// From any node: how the reservations of these attempts went, as far as that is remembered.
    Explain { attempts: Vec<AttemptKey>, reply: Reply<Vec<Explanation>> },
    // The rest is from this node only.
    /// One request's reservation: the trace of the message is the request's.
    #[serde(skip)]
    Reserve(Input),
    /// Growth, commits and releases of one step.
    #[serde(skip)]
    Changes(Vec<Input>),
    /// How much of each prompt could be reused; the answer goes into the next contribution.
    #[serde(skip)]
    Probe { round: Round, chains: Arc<[(RequestNumber, Chain)]> },
    #[serde(skip)]
    Tick,
}

pub struct KvManager {
    rank: LocalRank,
    manager: Manager,
    addresses: RankAddresses,
    cluster: Arc<Addresses>,
    me: Seat,
    clock: Clock,
    wakeup: Wakeup,
    /// Blocks of the pools, as last told to whoever reads the log.
    proposed: Vec<u32>,
    effects: Vec<Effect>,
}

impl KvManager {
    /// # Errors
    /// A pool that cannot hold anything; checked before the tree starts.
    pub fn new(around: &Surroundings, rank: LocalRank, addresses: RankAddresses) -> Result<Self, ConfigError> {
        let mut manager = Manager::new(around.settings.kv.clone())?;
        if let Some(pools) = &around.settings.kv_sizing {
            manager.measure(rebalance::Config::default(), pools.clone());
        }
        Ok(Self {
            rank,
            manager,
            proposed: Vec::new(),
            addresses,
            cluster: Arc::clone(&around.addresses),
            me: around.settings.seat(),
            clock: around.clock,
            wakeup: Wakeup::default(),
            effects: Vec::new(),
        })
    }

    /// Tells the worker, which shares this actor's supervisor and fate.
    fn answer(&mut self, context: &Context<'_, Message>) {
        let effects = std::mem::take(&mut self.effects);
        let stats = self.manager.stats();
        if stats.proposed != self.proposed {
            self.proposed.clone_from(&stats.proposed);
            let has: Vec<u32> = stats.pools.iter().map(|pool| pool.blocks_total).collect();
            let (rank, proposed) = (self.rank, &self.proposed);
            tracing::info!(%rank, ?has, ?proposed, "KV pools fit the load badly: see kv.pool-ratio, kv.sequence-tokens");
        }
        let answer = gpu_worker::Message::Kv { effects, stats };
        let _ = self.addresses.worker.tell(context.trace(), answer);
    }

    fn probe(&self, context: &Context<'_, Message>, round: Round, chains: &[(RequestNumber, Chain)]) {
        let matched = |(number, chain): &(RequestNumber, Chain)| {
            // A thinned chain stands for `stride` blocks a key.
            (*number, self.manager.probe(&chain.hashes).saturating_mul(chain.stride))
        };
        let matches = chains.iter().map(matched).filter(|(_, tokens)| *tokens > 0).collect();
        // A queue that is down starts a new cluster, which probes again.
        let _ = self.cluster.queue.tell(context.trace(), queue::Message::Matches { rank: self.rank, round, matches });
    }

    fn reserve(&mut self, context: &Context<'_, Message>, input: Input) {
        let start = SystemTime::now();
        self.manager.handle(self.clock.now_us(), input, &mut self.effects);
        let mut attributes = vec![
            ("starling.actor", "kv_manager".into()),
            ("starling.rank", self.cluster.traced(self.me, self.rank).into()),
        ];
        match self.effects.last() {
            Some(Effect::Reserved { reservation, .. }) => {
                let blocks: usize = reservation.tables.iter().map(|table| table.blocks.len()).sum();
                attributes.push(("starling.kv.blocks", blocks.into()));
                attributes.push(("starling.kv.cached_tokens", reservation.cached_tokens.into()));
            }
            Some(Effect::Exhausted { wanted, available, .. }) => {
                attributes.push(("starling.kv.blocks_wanted", (*wanted).into()));
                attributes.push(("starling.kv.blocks_available", (*available).into()));
            }
            _ => {}
        }
        context.span(SpanRecord {
            parent: context.trace(),
            span_id: None,
            name: "kv.reserve",
            start,
            end: SystemTime::now(),
            attributes,
        });
    }
}

impl Actor for KvManager {
    type Message = Message;

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Reserve(input) => {
                self.reserve(context, input);
                self.answer(context);
            }
            Message::Changes(inputs) => {
                let now_us = self.clock.now_us();
                for input in inputs {
                    self.manager.handle(now_us, input, &mut self.effects);
                }
                self.answer(context);
            }
            Message::Probe { round, chains } => self.probe(context, round, &chains),
            Message::Forget { what, reply } => {
                let forgotten = self.manager.forget(self.clock.now_us(), &what, &mut self.effects);
                tracing::info!(rank = %self.rank, ?forgotten, "forgotten");
                self.answer(context);
                reply.send(forgotten);
            }
            Message::Explain { attempts, reply } => {
                reply.send(attempts.into_iter().flat_map(|attempt| self.manager.explanations(attempt)).collect());
            }
            Message::Tick => {
                self.wakeup.fired();
                self.manager.advance(self.clock.now_us(), &mut self.effects);
                self.answer(context);
            }
        }
        let due = self.manager.poll_timeout();
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Reserve(_) => "reserve",
            Message::Changes(_) => "changes",
            Message::Probe { .. } => "probe",
            Message::Forget { .. } => "forget",
            Message::Explain { .. } => "explain",
            Message::Tick => "tick",
        }
    }
}
