//! A probe actor that does what it is told and tells what happens to it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use starling_actors::{Actor, ActorError, ActorSpec, ActorStats, Address, Context, Node, Reply};
use starling_actors::{Timer, TraceContext};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;

pub const TRACE: TraceContext = TraceContext::NONE;
/// Generous: only a hang meets it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub enum Order {
    Note(u64),
    Count(Reply<u64>),
    /// Replies with the trace of the question.
    Trace(Reply<TraceContext>),
    DropReply(Reply<u64>),
    KeepReply(Reply<u64>),
    PanicOn(Reply<u64>),
    Panic,
    Fail,
    Stop,
    NoteAfter(Duration, u64),
    CancelTimers,
    /// Blocks the handler until the other end is dropped.
    Block(std::sync::mpsc::Receiver<()>),
}

/// What happened, in order, to all probes that share it.
#[derive(Clone)]
pub struct Log {
    sender: mpsc::UnboundedSender<String>,
    receiver: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>>,
}

impl Log {
    pub fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        Self { sender, receiver }
    }

    pub fn write(&self, line: String) {
        self.sender.send(line).unwrap();
    }

    pub async fn next(&self) -> String {
        let mut receiver = self.receiver.lock().await;
        let next = tokio::time::timeout(PATIENCE, receiver.recv()).await;
        next.expect("nothing happened").unwrap()
    }

    /// The next lines are exactly these.
    pub async fn expect(&self, lines: &[&str]) {
        for (index, line) in lines.iter().enumerate() {
            assert_eq!(self.next().await, *line, "line {index} of {lines:?}");
        }
    }

    /// What has happened and was not read yet.
    pub async fn rest(&self) -> Vec<String> {
        let mut receiver = self.receiver.lock().await;
        std::iter::from_fn(|| receiver.try_recv().ok()).collect()
    }
}

pub struct Probe {
    name: String,
    log: Log,
    failing_starts: Arc<AtomicU32>,
    notes: u64,
    kept: Vec<Reply<u64>>,
    timers: Vec<Timer>,
    handled: Arc<Mutex<Vec<u64>>>,
}

impl Actor for Probe {
    type Message = Order;

    fn started(&mut self, _context: &mut Context<'_, Order>) -> Result<(), ActorError> {
        let left = self.failing_starts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if left.is_ok() {
            self.log.write(format!("{} panics in started", self.name));
            panic!("cannot start");
        }
        self.log.write(format!("{} started", self.name));
        Ok(())
    }

    fn handle(&mut self, context: &mut Context<'_, Order>, order: Order) -> Result<(), ActorError> {
        match order {
            Order::Note(note) => {
                self.notes += 1;
                self.handled.lock().unwrap().push(note);
            }
            Order::Count(reply) => reply.send(self.notes),
            Order::Trace(reply) => reply.send(context.trace()),
            Order::DropReply(reply) => drop(reply),
            Order::KeepReply(reply) => self.kept.push(reply),
            Order::PanicOn(_reply) => panic!("told to"),
            Order::Panic => panic!("told to"),
            Order::Fail => return Err("told to".into()),
            Order::Stop => context.stop(),
            Order::NoteAfter(delay, note) => {
                let timer = context.send_after(delay, Order::Note(note));
                self.timers.push(timer);
            }
            Order::CancelTimers => self.timers.drain(..).for_each(Timer::cancel),
            Order::Block(gate) => {
                self.log.write(format!("{} blocked", self.name));
                let _ = gate.recv();
            }
        }
        Ok(())
    }

    fn stopped(&mut self, _context: &mut Context<'_, Order>) {
        self.log.write(format!("{} stopped", self.name));
    }

    fn kind(order: &Order) -> &'static str {
        match order {
            Order::Note(_) => "note",
            _ => "other",
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.log.write(format!("{} dropped", self.name));
    }
}

/// How to make probes of one name.
pub struct Probes {
    pub spec: ActorSpec,
    pub handled: Arc<Mutex<Vec<u64>>>,
    /// The next so many starts panic.
    pub failing_starts: Arc<AtomicU32>,
}

pub fn probes(name: &str, log: &Log) -> Probes {
    let handled = Arc::new(Mutex::new(Vec::new()));
    let failing_starts = Arc::new(AtomicU32::new(0));
    let (owned, log) = (name.to_owned(), log.clone());
    let (notes, failing) = (Arc::clone(&handled), Arc::clone(&failing_starts));
    let spec = ActorSpec::new(name, move || Probe {
        name: owned.clone(),
        log: log.clone(),
        failing_starts: Arc::clone(&failing),
        notes: 0,
        kept: Vec::new(),
        timers: Vec::new(),
        handled: Arc::clone(&notes),
    });
    Probes { spec, handled, failing_starts }
}

pub fn probe(name: &str, log: &Log) -> ActorSpec {
    probes(name, log).spec
}

pub fn stats(node: &Node, name: &str) -> ActorStats {
    let mut actors = node.actors().into_iter();
    actors.find(|actor| &*actor.name == name).unwrap_or_else(|| panic!("no actor {name:?}"))
}

pub async fn count(address: &Address<Order>) -> u64 {
    address.ask(TRACE, PATIENCE, Order::Count).await.unwrap()
}

/// Returns once `actor` has run and its supervisor has run after it: by then the supervisor does not wait on the worker thread
/// of `actor`, which may block now. The runtime keeps the task woken last with the thread that woke it.
pub async fn apart(node: &Node, actor: &str, sibling: &str) {
    count(&node.address::<Order>(actor)).await;
    let panics = node.address::<Order>(sibling).tell(TRACE, Order::Panic);
    panics.unwrap();
    until("the sibling is back", || stats(node, sibling).restarts == 1).await;
}

/// Lets paused time pass.
pub async fn pass(duration: Duration) {
    // sleeps because time is paused: it advances at once.
    tokio::time::sleep(duration).await;
}

/// Lets the runtime run until `holds`.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    // On a thread of its own clock: paused time must not advance under the wait.
    let started = std::time::Instant::now();
    tokio::pin!(waiting);
    std::future::poll_fn(|context| {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        waiting.as_mut().poll(context)
    })
    .await;
}
