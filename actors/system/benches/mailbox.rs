//! What the framework costs on top of a bare ractor actor, with tokio's own queue as the floor. All three in one run, in turns,
//! because a shared machine is never the same twice. `cargo bench -p starling-actors --bench mailbox`

use starling_actors::{Actor, ActorError, ActorSpec, Address, Context, Node, Reply};
use starling_actors::{Strategy, SupervisorSpec, TraceContext};
use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

const ROUNDS: usize = 7;
const TELLS: u64 = 500_000;
const ASKS: usize = 50_000;
const DEADLINE: Duration = Duration::from_secs(60);

enum Message {
    Add(u64),
    Total(Reply<u64>),
}

struct Sum(u64);

impl Actor for Sum {
    type Message = Message;

    fn handle(&mut self, _context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Add(amount) => self.0 += amount,
            Message::Total(reply) => reply.send(self.0),
        }
        Ok(())
    }
}

enum BareMessage {
    Add(u64),
    Total(oneshot::Sender<u64>),
}

impl ractor::Message for BareMessage {}

struct Bare;

impl ractor::Actor for Bare {
    type Msg = BareMessage;
    type State = u64;
    type Arguments = ();

    async fn pre_start(
        &self,
        _myself: ractor::ActorRef<BareMessage>,
        (): (),
    ) -> Result<u64, ractor::ActorProcessingErr> {
        Ok(0)
    }

    async fn handle(
        &self,
        _myself: ractor::ActorRef<BareMessage>,
        message: BareMessage,
        total: &mut u64,
    ) -> Result<(), ractor::ActorProcessingErr> {
        take(total, message);
        Ok(())
    }
}

fn take(total: &mut u64, message: BareMessage) {
    match message {
        BareMessage::Add(amount) => *total += amount,
        // Every asker of this benchmark waits.
        BareMessage::Total(reply) => drop(reply.send(*total)),
    }
}

/// What is compared: how to send, how to ask.
enum Contender {
    Starling(Address<Message>),
    Ractor(ractor::ActorRef<BareMessage>),
    Queue(mpsc::UnboundedSender<BareMessage>),
}

impl Contender {
    fn name(&self) -> &'static str {
        match self {
            Self::Starling(_) => "starling-actors",
            Self::Ractor(_) => "ractor",
            Self::Queue(_) => "tokio mpsc",
        }
    }

    fn tell(&self, amount: u64) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Starling(address) => address.tell(TraceContext::NONE, Message::Add(amount))?,
            Self::Ractor(actor) => actor.send_message(BareMessage::Add(amount))?,
            Self::Queue(queue) => queue.send(BareMessage::Add(amount)).map_err(|_| "closed")?,
        }
        Ok(())
    }

    async fn ask(&self) -> Result<u64, Box<dyn Error>> {
        let (sender, receiver) = oneshot::channel();
        match self {
            Self::Starling(address) => {
                let total = address.ask(TraceContext::NONE, DEADLINE, Message::Total);
                return Ok(total.await?);
            }
            Self::Ractor(actor) => actor.send_message(BareMessage::Total(sender))?,
            Self::Queue(queue) => queue.send(BareMessage::Total(sender)).map_err(|_| "closed")?,
        }
        // With a deadline, as every ask here has one.
        Ok(tokio::time::timeout(DEADLINE, receiver).await??)
    }

    /// Millions of tells a second, sent and handled.
    async fn tells(&self) -> Result<f64, Box<dyn Error>> {
        let before = self.ask().await?;
        let start = Instant::now();
        for _ in 0..TELLS {
            self.tell(1)?;
        }
        let after = self.ask().await?;
        assert_eq!(after - before, TELLS, "a message was lost");
        Ok(TELLS as f64 / start.elapsed().as_secs_f64() / 1e6)
    }

    /// The latencies of asks one after another, in microseconds: median and 99th percentile.
    async fn asks(&self) -> Result<(f64, f64), Box<dyn Error>> {
        let mut latencies_us = Vec::with_capacity(ASKS);
        for _ in 0..ASKS {
            let start = Instant::now();
            self.ask().await?;
            latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        latencies_us.sort_by(f64::total_cmp);
        Ok((latencies_us[ASKS / 2], latencies_us[ASKS * 99 / 100]))
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let node = Node::new("bench");
    let spec = SupervisorSpec::new("s", Strategy::OneForOne);
    node.start(spec.child(ActorSpec::new("sum", || Sum(0)))).await?;
    let (bare, _) = ractor::Actor::spawn(None, Bare, ()).await?;
    let (queue, mut receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut total = 0;
        while let Some(message) = receiver.recv().await {
            take(&mut total, message);
        }
    });
    let contenders = [Contender::Starling(node.address("sum")), Contender::Ractor(bare), Contender::Queue(queue)];
    let mut figures = [const { (Vec::new(), Vec::new(), Vec::new()) }; 3];
    for _ in 0..ROUNDS {
        for (contender, figures) in contenders.iter().zip(&mut figures) {
            figures.0.push(contender.tells().await?);
            let (middle, tail) = contender.asks().await?;
            figures.1.push(middle);
            figures.2.push(tail);
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    writeln!(out, "median of {ROUNDS} rounds; load average {}", load.trim())?;
    writeln!(out, "{:<16} {:>9} {:>11} {:>11}", "", "M tells/s", "ask p50 us", "ask p99 us")?;
    for (contender, (tells, middle, tail)) in contenders.iter().zip(figures) {
        let (tells, middle, tail) = (median(tells), median(middle), median(tail));
        let name = contender.name();
        writeln!(out, "{name:<16} {tells:>9.2} {middle:>11.2} {tail:>11.2}")?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // On a worker, as actors are.
    runtime.block_on(async {
        let benched = tokio::spawn(async {
            let mut out = Vec::new();
            run(&mut out).await.map_err(|error| error.to_string())?;
            Ok::<_, String>(out)
        });
        std::io::stdout().write_all(&benched.await??)?;
        Ok(())
    })
}
