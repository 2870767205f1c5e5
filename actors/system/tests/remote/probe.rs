//! An actor that other nodes reach.

use crate::support::{PATIENCE, stats, until};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, ActorSpec, ActorState, Address, Backoff, Context, Node, Reply};
use starling_actors::{Sink, Strategy, SupervisorSpec, TraceContext};
use std::sync::{Arc, Mutex, mpsc};

#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Note(u64),
    Bytes(Vec<u8>),
    Count(Reply<u64>),
    Echo(Vec<u8>, Reply<Vec<u8>>),
    /// Answers with so many bytes.
    Large(u32, Reply<Vec<u8>>),
    Trace(Reply<TraceContext>),
    /// Two questions in one message: the first is answered, the second dropped.
    Both(Reply<u64>, Reply<u64>),
    DropReply(Reply<u64>),
    KeepReply(Reply<u64>),
    /// How many of the kept replies are still wanted.
    Wanted(Reply<u64>),
    AnswerKept(u64),
    PanicOn(Reply<u64>),
    Panic,
    Stop,
    /// Sends 0 and so on, as many as it says, and ends the stream as told.
    Numbers(u64, End, Sink<u64>),
    /// Keeps the sink; `Push` sends into all that are kept and answers how many took the item.
    KeepSink(Sink<u64>),
    Push(u64, Reply<u64>),
    FinishSinks,
    PanicOnSink(Sink<u64>),
    /// Takes the next message only once the gate is opened.
    Block,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum End {
    Finish,
    Drop,
}

/// What a probe shares with its test.
#[derive(Clone, Default)]
pub struct Seen {
    pub notes: Arc<Mutex<Vec<u64>>>,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
}

impl Seen {
    pub fn notes(&self) -> Vec<u64> {
        self.notes.lock().unwrap().clone()
    }

    /// The gate of the next `Block`; dropping it opens it.
    pub fn gate(&self) -> mpsc::Sender<()> {
        let (sender, receiver) = mpsc::channel();
        *self.gate.lock().unwrap() = Some(receiver);
        sender
    }

    /// Whether a probe stands at the gate.
    pub fn is_blocked(&self) -> bool {
        self.gate.lock().unwrap().is_none()
    }
}

struct Probe {
    seen: Seen,
    notes: u64,
    kept: Vec<Reply<u64>>,
    sinks: Vec<Sink<u64>>,
}

impl Actor for Probe {
    type Message = Order;

    fn handle(&mut self, context: &mut Context<'_, Order>, order: Order) -> Result<(), ActorError> {
        match order {
            Order::Note(note) => {
                self.notes += 1;
                self.seen.notes.lock().unwrap().push(note);
            }
            Order::Bytes(bytes) => self.seen.notes.lock().unwrap().push(bytes.len() as u64),
            Order::Count(reply) => reply.send(self.notes),
            Order::Echo(bytes, reply) => reply.send(bytes),
            Order::Large(bytes, reply) => reply.send(vec![0; bytes as usize]),
            Order::Trace(reply) => reply.send(context.trace()),
            Order::Both(first, _second) => first.send(1),
            Order::DropReply(reply) => drop(reply),
            Order::KeepReply(reply) => self.kept.push(reply),
            Order::Wanted(reply) => {
                let wanted = self.kept.iter().filter(|kept| kept.is_wanted()).count();
                reply.send(wanted as u64);
            }
            Order::AnswerKept(answer) => self.kept.drain(..).for_each(|kept| kept.send(answer)),
            Order::PanicOn(_reply) => panic!("told to"),
            Order::Panic => panic!("told to"),
            Order::Stop => context.stop(),
            Order::Numbers(count, end, mut sink) => {
                // The stream is slower than the handler may be.
                tokio::spawn(async move {
                    for number in 0..count {
                        if sink.send(number).await.is_err() {
                            return;
                        }
                    }
                    match end {
                        End::Finish => sink.finish(),
                        End::Drop => drop(sink),
                    }
                });
            }
            Order::KeepSink(sink) => self.sinks.push(sink),
            Order::Push(number, reply) => {
                let taken = self.sinks.iter_mut().filter_map(|sink| sink.try_send(number).ok()).count();
                reply.send(taken as u64);
            }
            Order::FinishSinks => self.sinks.drain(..).for_each(Sink::finish),
            Order::PanicOnSink(_sink) => panic!("told to"),
            Order::Block => {
                let gate = self.seen.gate.lock().unwrap().take();
                let _ = gate.map(|gate| gate.recv());
            }
        }
        Ok(())
    }
}

pub fn spec(name: &str, seen: &Seen) -> ActorSpec {
    let seen = seen.clone();
    ActorSpec::new(name, move || Probe { seen: seen.clone(), notes: 0, kept: Vec::new(), sinks: Vec::new() })
}

/// Starts an exposed probe.
pub async fn start(node: &Node, name: &str) -> Seen {
    let seen = Seen::default();
    start_spec(node, name, spec(name, &seen)).await;
    seen
}

pub async fn start_spec(node: &Node, name: &str, spec: ActorSpec) {
    node.expose::<Order>(name);
    let supervisor = SupervisorSpec::new(format!("{name}/supervisor"), Strategy::OneForOne);
    let supervisor = supervisor.backoff(Backoff::NONE).intensity(1_000_000, PATIENCE);
    node.start(supervisor.child(spec)).await.unwrap();
}

pub async fn count(address: &Address<Order>) -> u64 {
    address.ask(TraceContext::NONE, PATIENCE, Order::Count).await.unwrap()
}

/// Waits for the restart of that number: a probe that has panicked seems to run for a moment longer.
pub async fn until_restarted(node: &Node, name: &str, restarts: u64) {
    until("it is back", || {
        let stats = stats(node, name);
        stats.restarts == restarts && stats.state == ActorState::Running
    })
    .await;
}

/// Waits until so many of the kept replies are wanted.
pub async fn until_wanted(address: &Address<Order>, expected: u64) {
    let started = std::time::Instant::now();
    loop {
        let wanted = address.ask(TraceContext::NONE, PATIENCE, Order::Wanted).await.unwrap();
        if wanted == expected {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{wanted} are wanted, not {expected}");
        tokio::task::yield_now().await;
    }
}

/// Asks until the probe is there: it may be between two lives.
pub async fn until_answered(address: &Address<Order>) {
    let started = std::time::Instant::now();
    while let Err(error) = address.ask(TraceContext::NONE, PATIENCE, Order::Count).await {
        assert!(started.elapsed() < PATIENCE, "never answered: {error}");
        tokio::task::yield_now().await;
    }
}
