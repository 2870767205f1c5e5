//! The ingress' actor, one a node: owns the open requests. Streams of tokens out, arrivals and ends into the rounds.

use crate::api::{Names, Placed, StreamEvent, StreamToken};
use crate::clock::Clock;
use crate::gpu_worker;
use crate::observer::{IngressReport, Observer};
use crate::queue;
use crate::requests::{Known, Over};
use crate::router::Decided;
use crate::wakeup::Wakeup;
use crate::{Addresses, Settings, Surroundings, Texts};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Context, Reply, SendError, SpanRecord, TraceContext};
use starling_core::batch::Frame;
use starling_core::ids::{AttemptKey, Incarnation, RankId, RequestKey};
use starling_core::ingress::{Effect, Input, Machine, Prompt, Submission, Ticket};
use starling_core::kv::Forget;
use starling_core::rejection::Rejection;
use starling_core::replica::Decision;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};
use tokio::sync::mpsc::UnboundedSender;

#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From a rank, here or elsewhere: one step's tokens.
    Frames(Vec<Frame>),
    /// The rank cannot run the attempt, and no other can.
    Refused { attempt: AttemptKey, rejection: Rejection },
    /// From any node: what this one's edge keeps of texts goes. Answered by the number of prompts.
    Forget { what: Forget, reply: Reply<u64> },
    /// From any node: the requests of this name, open ones and the last that are over.
    Find { name: String, reply: Reply<Vec<Known>> },
    // The rest is from this node only.
    /// The trace of the message is the request's.
    #[serde(skip)]
    Submit { submission: Box<Submission>, names: Names, events: UnboundedSender<StreamEvent> },
    /// The client left.
    #[serde(skip)]
    Cancel(Ticket),
    /// The edge found a stop string.
    #[serde(skip)]
    Finish(Ticket),
    #[serde(skip)]
    Decided(Box<Decided>),
    #[serde(skip)]
    NewCluster(Incarnation),
    /// Whether rounds complete; if not, whom they wait for.
    #[serde(skip)]
    Standstill(Option<String>),
    /// The node of these ranks cannot be reached.
    #[serde(skip)]
    Unreachable(Vec<RankId>),
    /// A prompt did not get to its rank's node.
    #[serde(skip)]
    Undelivered(AttemptKey),
    #[serde(skip)]
    Drain,
    /// How many requests are open.
    #[serde(skip)]
    Open(Reply<usize>),
    #[serde(skip)]
    Tick,
}

impl Message {
    /// A copy of what may travel to another node: sending takes the message, and without credit it has to wait.
    pub(crate) fn to_send(&self) -> Option<Self> {
        match self {
            Self::Frames(frames) => Some(Self::Frames(frames.clone())),
            Self::Refused { attempt, rejection } => {
                Some(Self::Refused { attempt: *attempt, rejection: rejection.clone() })
            }
            _ => None,
        }
    }
}

/// Requests of one name that are told of: clients may give the same name to any number of them.
const FOUND_MAX: usize = 256;

/// The client's side of an open request. The channel holds at most the request's tokens.
struct Client {
    events: UnboundedSender<StreamEvent>,
    trace: TraceContext,
    submitted: Instant,
    submitted_at: SystemTime,
    enqueued_at: Option<SystemTime>,
    known: Known,
}

pub struct Ingress {
    machine: Machine,
    /// Of this member: the keys of its requests hold it.
    life: Option<Incarnation>,
    clients: BTreeMap<Ticket, Client>,
    over: Over,
    texts: Arc<OnceLock<Arc<dyn Texts>>>,
    settings: Arc<Settings>,
    addresses: Arc<Addresses>,
    observer: Arc<dyn Observer>,
    clock: Clock,
    wakeup: Wakeup,
    effects: Vec<Effect>,
}

impl Ingress {
    pub fn new(around: &Surroundings) -> Self {
        Self {
            machine: Machine::new(around.settings.ingress_config()),
            life: None,
            clients: BTreeMap::new(),
            over: Over::default(),
            texts: Arc::clone(&around.texts),
            settings: Arc::clone(&around.settings),
            addresses: Arc::clone(&around.addresses),
            observer: Arc::clone(&around.observer),
            clock: around.clock,
            wakeup: Wakeup::default(),
            effects: Vec::new(),
        }
    }

    fn drive(&mut self, context: &mut Context<'_, Message>, input: Input) {
        let mut effects = std::mem::take(&mut self.effects);
        self.machine.handle(self.clock.now_us(), input, &mut effects);
        for effect in effects.drain(..) {
            self.perform(context, effect);
        }
        self.effects = effects;
    }

    fn perform(&mut self, context: &mut Context<'_, Message>, effect: Effect) {
        match effect {
            Effect::Announce(entry) => {
                // A queue that is down makes a new cluster, which asks for every open request again.
                let _ = self.addresses.queue.tell(context.trace(), queue::Message::Announce(entry));
            }
            Effect::Prompt { ticket, rank, prompt } => {
                let trace = self.clients.get(&ticket).map(|c| c.trace).unwrap_or_default();
                self.prompt(context, trace, rank, prompt);
            }
            Effect::Stop { rank, attempt } => {
                if let Some(worker) = self.addresses.worker(rank) {
                    // A rank that is down runs nothing; one that cannot be reached hears it by the round.
                    let _ = worker.tell(context.trace(), gpu_worker::Message::Stop(attempt));
                }
            }
            Effect::Placed { ticket, rank, attempt } => {
                let place = self.addresses.directory.find(rank);
                let node = place.map_or("unknown", |(seat, _)| self.settings.name_of(seat)).into();
                self.send(ticket, StreamEvent::Placed(Placed { node, rank, attempt: attempt.0 }));
            }
            Effect::Tokens { ticket, tokens, cached_tokens } => {
                let token = |drawn| StreamToken { drawn, cached_tokens };
                self.send(ticket, StreamEvent::Tokens(tokens.into_iter().map(token).collect()));
            }
            Effect::Ended { ticket, finish } => {
                self.send(ticket, StreamEvent::Ended(finish));
                self.let_go(ticket);
            }
            Effect::Failed { ticket, rejection } => {
                self.observer.rejected(&rejection);
                self.send(ticket, StreamEvent::Failed(rejection));
                self.let_go(ticket);
            }
        }
    }

    /// To the rank, wherever it is. A prompt to another node that has no credit waits for it on its own.
    fn prompt(&mut self, context: &mut Context<'_, Message>, trace: TraceContext, rank: RankId, prompt: Prompt) {
        let attempt = prompt.attempt;
        let here = self.addresses.directory.find(rank).is_some_and(|(seat, _)| seat == self.settings.seat());
        match self.addresses.worker(rank) {
            Some(worker) if here => {
                if worker.tell(trace, gpu_worker::Message::Prompt(Box::new(prompt))).is_err() {
                    self.drive_nested(context, Input::PromptUndelivered { attempt });
                }
            }
            Some(worker) => match worker.tell(trace, gpu_worker::Message::Prompt(Box::new(prompt.clone()))) {
                Ok(()) => {}
                Err(SendError::Full { .. }) => {
                    let (worker, own) = (worker.clone(), context.address().clone());
                    tokio::spawn(async move {
                        if let Err(error) = worker.send(trace, gpu_worker::Message::Prompt(Box::new(prompt))).await {
                            tracing::debug!(%error, "prompt not delivered");
                            let _ = own.tell(trace, Message::Undelivered(attempt));
                        }
                    });
                }
                Err(_) => self.drive_nested(context, Input::PromptUndelivered { attempt }),
            },
            None => self.drive_nested(context, Input::PromptUndelivered { attempt }),
        }
    }

    fn drive_nested(&mut self, context: &mut Context<'_, Message>, input: Input) {
        let mut effects = Vec::new();
        self.machine.handle(self.clock.now_us(), input, &mut effects);
        for effect in effects {
            self.perform(context, effect);
        }
    }

    /// A client that left says so by itself: its stream sends `Cancel` when it is dropped.
    fn send(&self, ticket: Ticket, event: StreamEvent) {
        if let Some(client) = self.clients.get(&ticket) {
            let _ = client.events.send(event);
        }
    }

    fn let_go(&mut self, ticket: Ticket) {
        if let Some(client) = self.clients.remove(&ticket) {
            self.over.add(client.known);
        }
    }

    fn find(&self, name: &str) -> Vec<Known> {
        let open = self.clients.values().map(|client| &client.known);
        open.chain(self.over.iter()).filter(|known| known.is_called(name)).take(FOUND_MAX).cloned().collect()
    }

    fn decided(&mut self, context: &mut Context<'_, Message>, decided: &Decided) {
        // Those of other ingresses may have the same numbers.
        let own = self.life;
        let is_own = |key: RequestKey| Some(key.ingress) == own;
        for decision in &decided.decisions {
            match decision {
                Decision::Enqueued { key, .. } if !is_own(*key) => {}
                Decision::Placed { attempt, .. } if !is_own(attempt.key) => {}
                Decision::Enqueued { key, .. } => self.enqueued(context, *key, decided.ended),
                Decision::Placed { attempt, rank, why, .. } => {
                    self.placed(context, *attempt, decided, (*rank, why));
                    self.drive(context, Input::Placed { attempt: *attempt, rank: *rank });
                }
                Decision::Seal { attempt } => self.drive(context, Input::Seal { attempt: *attempt }),
                Decision::Rejected { key, rejection } => {
                    self.drive(context, Input::Rejected { key: *key, rejection: rejection.clone() });
                }
                Decision::Stop { .. } | Decision::Probe { .. } => {}
            }
        }
    }

    fn enqueued(&mut self, context: &Context<'_, Message>, key: RequestKey, at: SystemTime) {
        let Some(client) = self.clients.get_mut(&Ticket(key.seq)) else {
            return;
        };
        client.enqueued_at = Some(at);
        context.span(SpanRecord {
            parent: client.trace,
            span_id: None,
            name: "announce",
            start: client.submitted_at,
            end: at,
            attributes: vec![("starling.actor", "queue".into())],
        });
    }

    fn placed(
        &mut self,
        context: &Context<'_, Message>,
        attempt: AttemptKey,
        decided: &Decided,
        (rank, why): (RankId, &starling_core::placement::Why),
    ) {
        let Some(client) = self.clients.get_mut(&Ticket(attempt.key.seq)) else {
            return;
        };
        client.known.attempts.push((attempt, rank));
        self.observer.placed(why.label(), client.submitted.elapsed());
        if !client.trace.is_sampled() {
            return;
        }
        let enqueued = client.enqueued_at.unwrap_or(client.submitted_at);
        context.span(SpanRecord {
            parent: client.trace,
            span_id: None,
            name: "admission",
            start: enqueued,
            end: decided.started.max(enqueued),
            attributes: vec![("starling.actor", "router".into())],
        });
        context.span(SpanRecord {
            parent: client.trace,
            span_id: None,
            name: "placement",
            start: decided.started,
            end: decided.ended,
            attributes: vec![
                ("starling.actor", "router".into()),
                ("starling.round", decided.round.0.into()),
                ("starling.rank", rank.0.into()),
                ("starling.placement.why", why.label().into()),
                ("starling.placement.terms", format!("{why:?}").into()),
            ],
        });
    }

    fn submit(
        &mut self,
        context: &mut Context<'_, Message>,
        submission: Box<Submission>,
        (names, events): (Names, UnboundedSender<StreamEvent>),
    ) {
        if let Some(known) = self.clients.get(&submission.ticket) {
            // Tickets are drawn from one counter: a known one is a fault of the caller, and not of that client.
            tracing::error!(ticket = submission.ticket.0, trace = ?known.trace, "ticket given twice");
            let key = RequestKey { seq: submission.ticket.0, ..RequestKey::default() };
            let _ = events.send(StreamEvent::Failed(Rejection::DuplicateRequest { key }));
            return;
        }
        let client = Client {
            events,
            trace: context.trace(),
            submitted: Instant::now(),
            submitted_at: SystemTime::now(),
            enqueued_at: None,
            known: Known { names, child: submission.child, is_open: true, attempts: Vec::new() },
        };
        self.clients.insert(submission.ticket, client);
        self.drive(context, Input::Submit(submission));
    }
}

impl Actor for Ingress {
    type Message = Message;

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Submit { submission, names, events } => self.submit(context, submission, (names, events)),
            Message::Forget { what, reply } => {
                // An edge that has not said what it keeps keeps nothing yet.
                reply.send(self.texts.get().map_or(0, |texts| texts.forget(&what) as u64));
            }
            Message::Find { name, reply } => reply.send(self.find(&name)),
            Message::Cancel(ticket) => {
                self.let_go(ticket);
                self.drive(context, Input::Cancel(ticket));
            }
            Message::Finish(ticket) => {
                self.let_go(ticket);
                self.drive(context, Input::Finish(ticket));
            }
            Message::Frames(frames) => {
                for frame in frames {
                    self.drive(context, Input::Frame(frame));
                }
            }
            Message::Decided(decided) => self.decided(context, &decided),
            Message::Refused { attempt, rejection } => {
                self.drive(context, Input::Refused { attempt, rejection });
            }
            Message::NewCluster(incarnation) => {
                self.life = Some(incarnation);
                self.drive(context, Input::NewCluster(incarnation));
            }
            Message::Standstill(waits_for) => self.drive(context, Input::Standstill(waits_for)),
            Message::Unreachable(ranks) => self.drive(context, Input::Unreachable(ranks)),
            Message::Undelivered(attempt) => self.drive(context, Input::PromptUndelivered { attempt }),
            Message::Drain => self.drive(context, Input::Drain),
            Message::Open(reply) => reply.send(self.machine.open_len()),
            Message::Tick => {
                self.wakeup.fired();
                self.drive(context, Input::Tick);
            }
        }
        let due = self.machine.poll_timeout();
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
        self.observer.ingress(&IngressReport {
            open: self.machine.open_len(),
            backlog: self.machine.backlog_len(),
            counts: self.machine.counts(),
        });
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Submit { .. } => "submit",
            Message::Forget { .. } => "forget",
            Message::Find { .. } => "find",
            Message::Cancel(_) => "cancel",
            Message::Finish(_) => "finish",
            Message::Frames(_) => "frames",
            Message::Decided(_) => "decided",
            Message::Refused { .. } => "refused",
            Message::NewCluster(_) => "new_cluster",
            Message::Standstill(_) => "standstill",
            Message::Unreachable(_) => "unreachable",
            Message::Undelivered(_) => "undelivered",
            Message::Drain => "drain",
            Message::Open(_) => "open",
            Message::Tick => "tick",
        }
    }
}
