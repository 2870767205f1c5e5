//! A rank's KV manager: owns the machine that knows which blocks hold what, and alone reserves them.

use crate::{RankAddresses, Surroundings, gpu_worker, queue};
use starling_actors::{Actor, ActorError, Address, Context, SpanRecord};
use starling_core::ids::{RankId, RequestNumber, Round};
use starling_core::kv::{ConfigError, Effect, Input, Manager};
use starling_core::round::{Chain, PrefixMatch};
use std::sync::Arc;
use std::time::SystemTime;

pub enum Message {
    /// One request's reservation: the trace of the message is the request's.
    Reserve(Input),
    /// Growth, commits and releases of one step.
    Changes(Vec<Input>),
    /// How much of each prompt could be reused; the answer goes into the next contribution.
    Probe { round: Round, chains: Arc<[(RequestNumber, Chain)]> },
}

pub struct KvManager {
    rank: RankId,
    manager: Manager,
    addresses: RankAddresses,
    queue: Address<queue::Message>,
    effects: Vec<Effect>,
}

impl KvManager {
    /// # Errors
    /// A pool that cannot hold anything; checked before the tree starts.
    pub fn new(around: &Surroundings, rank: RankId, addresses: RankAddresses) -> Result<Self, ConfigError> {
        Ok(Self {
            rank,
            manager: Manager::new(around.settings.kv.clone())?,
            addresses,
            queue: around.addresses.queue.clone(),
            effects: Vec::new(),
        })
    }

    /// Tells the worker, which shares this actor's supervisor and fate.
    fn answer(&mut self, context: &Context<'_, Message>) {
        let effects = std::mem::take(&mut self.effects);
        let answer = gpu_worker::Message::Kv { effects, stats: self.manager.stats() };
        let _ = self.addresses.worker.tell(context.trace(), answer);
    }

    fn probe(&self, context: &Context<'_, Message>, round: Round, chains: &[(RequestNumber, Chain)]) {
        let matched = |(number, chain): &(RequestNumber, Chain)| PrefixMatch {
            number: *number,
            rank: self.rank,
            // A thinned chain stands for `stride` blocks a key.
            tokens: self.manager.probe(&chain.hashes).saturating_mul(chain.stride),
        };
        let matches = chains.iter().map(matched).filter(|m| m.tokens > 0).collect();
        // A queue that is down starts a new cluster, which probes again.
        let _ = self.queue.tell(context.trace(), queue::Message::Matches { round, matches });
    }

    fn reserve(&mut self, context: &Context<'_, Message>, input: Input) {
        let start = SystemTime::now();
        self.manager.handle(0, input, &mut self.effects);
        let mut attributes = vec![("starling.actor", "kv_manager".into()), ("starling.rank", self.rank.0.into())];
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
                for input in inputs {
                    self.manager.handle(0, input, &mut self.effects);
                }
                self.answer(context);
            }
            Message::Probe { round, chains } => self.probe(context, round, &chains),
        }
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Reserve(_) => "reserve",
            Message::Changes(_) => "changes",
            Message::Probe { .. } => "probe",
        }
    }
}
