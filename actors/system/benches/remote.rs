//! What an actor of another node costs. Beside it a thin layer with as little as does the same work: typed messages through the same
//! codec, a bounded queue, a writer that batches, a bounded mailbox and a task that takes from it, a table of open questions; over its
//! own connection, without supervision, credit, names, deadlines that travel or trace. `cargo bench -p starling-actors --bench remote`,
//! with `-- asks`, `-- tells` or `-- flood` only one part of it.

#[path = "../../../transport/benches/thin/mod.rs"]
mod thin;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, ActorSpec, Address, AskError, Context, Node, Reply};
use starling_actors::{SendError, Strategy, SupervisorSpec, TraceContext};
use starling_transport::{Authority, Credentials, Handler, Limits, Mesh, MeshSettings, NodeName, Timings, codec};
use std::collections::HashMap;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thin::{Failure, THIN_QUEUE, ThinReader, connected, thin_writer};
use tokio::sync::{mpsc, oneshot};

const ROUNDS: usize = 5;
const TELLS: u64 = 200_000;
const ASKS: usize = 20_000;
const IN_FLIGHT: usize = 64;
const BODY_BYTES: usize = 64;
/// Tells of a GiB in all, to an actor that is slower than the link.
const HEAVY_BODY_BYTES: usize = 32 << 10;
const HEAVY_TELLS: usize = (1 << 30) / HEAVY_BODY_BYTES;
const HEAVY_TAKES: Duration = Duration::from_micros(200);
const DEADLINE: Duration = Duration::from_secs(60);
const TRACE: TraceContext = TraceContext::NONE;
/// What a message of the thin layer may take in memory.
const DECODED_BYTES_MAX: usize = 64 << 10;

/// Two meshes over loopback, linked as long as they live.
async fn linked([a, b]: [Arc<dyn Handler>; 2]) -> Result<[Mesh; 2], Failure> {
    let authority = Authority::new("bench")?;
    let start = async |name: &str, handler| {
        let of_node = authority.issue(&NodeName::new(name)?, 1)?;
        let [trusted, certificate, key] = [authority.certificate_pem(), of_node.certificate_pem, of_node.key_pem];
        let settings = MeshSettings {
            incarnation: 1,
            settings_digest: 1,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            credentials: Credentials::from_pem(trusted.as_bytes(), certificate.as_bytes(), key.as_bytes())?,
            limits: Limits::default(),
            timings: Timings::default(),
        };
        Ok::<_, Failure>(Mesh::start(settings, handler).await?)
    };
    let meshes = [start("a", a).await?, start("b", b).await?];
    meshes[0].connect(NodeName::new("b")?, meshes[1].local_addr().to_string());
    Ok(meshes)
}

// -- ours

#[derive(Serialize, Deserialize)]
enum Message {
    Take(Bytes64),
    Echo(Bytes64, Reply<Bytes64>),
    Count(Reply<u64>),
    /// Handled slowly.
    Heavy(Vec<u8>),
}

/// As two arrays: serde knows arrays of up to 32.
type Bytes64 = ([u8; BODY_BYTES / 2], [u8; BODY_BYTES / 2]);

const BODY: Bytes64 = ([7; BODY_BYTES / 2], [9; BODY_BYTES / 2]);

struct Sum(u64);

impl Actor for Sum {
    type Message = Message;

    fn handle(&mut self, _context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Take(_) => self.0 += 1,
            Message::Echo(body, reply) => reply.send(body),
            Message::Count(reply) => reply.send(self.0),
            Message::Heavy(body) => {
                let until = Instant::now() + HEAVY_TAKES;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                self.0 += u64::from(!body.is_empty());
            }
        }
        Ok(())
    }
}

// -- the thin layer

#[derive(Serialize, Deserialize)]
enum ThinMessage {
    Take(Bytes64),
    Echo(u64, Bytes64),
    Echoed(u64, Bytes64),
}

type ThinWaiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Bytes64>>>>;

struct Thin {
    frames: mpsc::Sender<Bytes>,
    waiting: ThinWaiting,
    number: AtomicU64,
    taken: Arc<AtomicU64>,
}

fn thin_frame(message: &ThinMessage) -> Result<Bytes, Failure> {
    Ok(codec::encode(message)?.into())
}

impl Thin {
    async fn new(client: &quinn::Connection, server: &quinn::Connection) -> Result<Self, Failure> {
        let (frames, queue) = mpsc::channel(THIN_QUEUE);
        let (send, receive) = client.open_bi().await?;
        tokio::spawn(thin_writer(queue, send));
        // A stream is seen by the peer once something was written.
        frames.send(thin_frame(&ThinMessage::Take(BODY))?).await?;
        let (server_send, server_receive) = server.accept_bi().await?;
        let (replies, reply_queue) = mpsc::channel(THIN_QUEUE);
        tokio::spawn(thin_writer(reply_queue, server_send));
        let (waiting, taken) = (ThinWaiting::default(), Arc::<AtomicU64>::default());
        let (mailbox, messages) = mpsc::channel(THIN_QUEUE);
        tokio::spawn(thin_actor(messages, replies, Arc::clone(&taken)));
        tokio::spawn(async move {
            let mut reader = ThinReader::new(server_receive);
            while let Some(frame) = reader.next().await? {
                mailbox.send(codec::decode::<ThinMessage, DECODED_BYTES_MAX>(&frame)?).await?;
            }
            Ok::<_, Failure>(())
        });
        let waits = Arc::clone(&waiting);
        tokio::spawn(async move {
            let mut reader = ThinReader::new(receive);
            while let Some(frame) = reader.next().await? {
                if let ThinMessage::Echoed(number, body) = codec::decode::<ThinMessage, DECODED_BYTES_MAX>(&frame)? {
                    let waiting = waits.lock().expect("no holder panics").remove(&number);
                    let _ = waiting.map(|waiting| waiting.send(body));
                }
            }
            Ok::<_, Failure>(())
        });
        Ok(Self { frames, waiting, number: AtomicU64::new(0), taken })
    }

    async fn ask(&self) -> Result<Bytes64, Failure> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().expect("no holder panics").insert(number, sender);
        self.frames.send(thin_frame(&ThinMessage::Echo(number, BODY))?).await?;
        Ok(tokio::time::timeout(DEADLINE, receiver).await??)
    }
}

async fn thin_actor(
    mut messages: mpsc::Receiver<ThinMessage>,
    replies: mpsc::Sender<Bytes>,
    taken: Arc<AtomicU64>,
) -> Result<(), Failure> {
    while let Some(message) = messages.recv().await {
        match message {
            ThinMessage::Echo(number, body) => replies.send(thin_frame(&ThinMessage::Echoed(number, body))?).await?,
            ThinMessage::Take(_) | ThinMessage::Echoed(..) => {
                taken.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

/// What is compared.
#[derive(Clone)]
enum Contender {
    Starling(Address<Message>),
    Thin(Arc<Thin>),
}

impl Contender {
    fn name(&self) -> &'static str {
        match self {
            Self::Starling(_) => "starling-actors",
            Self::Thin(_) => "thin layer",
        }
    }

    async fn ask(&self) -> Result<(), Failure> {
        let echo = match self {
            Self::Starling(address) => address.ask(TRACE, DEADLINE, |reply| Message::Echo(BODY, reply)).await?,
            Self::Thin(thin) => thin.ask().await?,
        };
        assert_eq!(echo, BODY);
        Ok(())
    }

    async fn tell(&self) -> Result<(), Failure> {
        match self {
            Self::Starling(address) => Ok(address.send(TRACE, Message::Take(BODY)).await?),
            Self::Thin(thin) => Ok(thin.frames.send(thin_frame(&ThinMessage::Take(BODY))?).await?),
        }
    }

    async fn taken(&self) -> Result<u64, Failure> {
        match self {
            Self::Starling(address) => loop {
                match address.ask(TRACE, DEADLINE, Message::Count).await {
                    // The credit of the tells before it is on its way.
                    Err(AskError::Undelivered(SendError::Full { .. })) => tokio::task::yield_now().await,
                    count => return Ok(count?),
                }
            },
            Self::Thin(thin) => Ok(thin.taken.load(Ordering::Relaxed)),
        }
    }

    /// Thousands of tells a second, sent and handled.
    async fn tells(&self) -> Result<f64, Failure> {
        let before = self.taken().await?;
        let start = Instant::now();
        for _ in 0..TELLS {
            self.tell().await?;
        }
        while self.taken().await? - before < TELLS {
            tokio::task::yield_now().await;
        }
        Ok(TELLS as f64 / start.elapsed().as_secs_f64() / 1e3)
    }

    /// The median latency of asks one after another, in microseconds.
    async fn latency(&self) -> Result<f64, Failure> {
        let mut latencies_us = Vec::with_capacity(ASKS);
        for _ in 0..ASKS {
            let start = Instant::now();
            self.ask().await?;
            latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(latencies_us))
    }

    /// Thousands of asks a second with many in flight.
    async fn asks(&self) -> Result<f64, Failure> {
        let start = Instant::now();
        let askers: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let contender = self.clone();
                tokio::spawn(async move {
                    for _ in 0..ASKS / IN_FLIGHT {
                        contender.ask().await?;
                    }
                    Ok::<_, Failure>(())
                })
            })
            .collect();
        for asker in askers {
            asker.await??;
        }
        Ok((ASKS / IN_FLIGHT * IN_FLIGHT) as f64 / start.elapsed().as_secs_f64() / 1e3)
    }
}

/// NaN where nothing was measured.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Whether the command line names this part, or none.
fn is_asked_for(part: &str) -> bool {
    let mut named = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).peekable();
    named.peek().is_none() || named.any(|name| name == part)
}

/// An actor on another node, and the meshes that lead to it.
async fn ours() -> Result<(Address<Message>, [Mesh; 2]), Failure> {
    let (a, b) = (Node::new("a"), Node::new("b"));
    let spec = SupervisorSpec::new("s", Strategy::OneForOne);
    b.start(spec.child(ActorSpec::new("sum", || Sum(0)))).await?;
    b.expose::<Message>("sum");
    let meshes = linked([a.mesh_handler(), b.mesh_handler()]).await?;
    let address = a.remote::<Message>(&NodeName::new("b")?, "sum");
    while !address.is_running() {
        tokio::task::yield_now().await;
    }
    Ok((address, meshes))
}

async fn run(out: &mut impl Write) -> Result<(), Failure> {
    let (address, _meshes) = ours().await?;
    let (client, server, _endpoints) = connected(&Authority::new("bench")?).await?;
    let thin = Arc::new(Thin::new(&client, &server).await?);
    let contenders = [Contender::Thin(thin), Contender::Starling(address)];
    let mut figures = [const { [const { Vec::new() }; 3] }; 2];
    for _ in 0..ROUNDS {
        for (contender, [latency, asks, tells]) in contenders.iter().zip(&mut figures) {
            if is_asked_for("asks") {
                latency.push(contender.latency().await?);
                asks.push(contender.asks().await?);
            }
            if is_asked_for("tells") {
                tells.push(contender.tells().await?);
            }
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    writeln!(out, "median of {ROUNDS} rounds, bodies of {BODY_BYTES} bytes; load average {}", load.trim())?;
    let heads = ["ask p50 us", "k asks/s at 64", "k tells/s"];
    writeln!(out, "{:<16}{}", "", heads.map(|head| format!("{head:>16}")).concat())?;
    let rows = figures.map(|row| row.map(median));
    for (contender, row) in contenders.iter().zip(&rows) {
        writeln!(out, "{:<16}{}", contender.name(), row.map(|figure| format!("{figure:>16.1}")).concat())?;
    }
    let ratios: String = rows[1].iter().zip(&rows[0]).map(|(ours, thin)| format!("{:>16.2}", ours / thin)).collect();
    writeln!(out, "{:<16}{ratios}", "actors / thin")?;
    Ok(())
}

/// Resident memory of this process, in MiB: now and at its highest.
fn memory_mib() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let of = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    };
    Some((of("VmRSS:")?, of("VmHWM:")?))
}

/// Both nodes are in this process, so its memory is that of the sender and the receiver together.
async fn flood(out: &mut impl Write) -> Result<(), Failure> {
    let (address, _meshes) = ours().await?;
    let before = memory_mib();
    let start = Instant::now();
    for _ in 0..HEAVY_TELLS {
        address.send(TRACE, Message::Heavy(vec![1; HEAVY_BODY_BYTES])).await?;
    }
    let took = start.elapsed();
    let (Some((before, _)), Some((after, highest))) = (before, memory_mib()) else { return Ok(()) };
    writeln!(
        out,
        "1 GiB of tells of 32 KiB to an actor that takes {HEAVY_TAKES:?} for each: {:.1} s, resident {before} MiB before, \
         {after} MiB after, {highest} MiB at most",
        took.as_secs_f64()
    )?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // On a worker, as actors are.
    runtime.block_on(async {
        let benched = tokio::spawn(async {
            let mut out = Vec::new();
            if is_asked_for("flood") {
                flood(&mut out).await?;
            }
            run(&mut out).await?;
            Ok::<_, Failure>(out)
        });
        std::io::stdout().write_all(&benched.await??)?;
        Ok(())
    })
}
