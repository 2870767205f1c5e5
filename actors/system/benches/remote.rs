//! What an actor of another node costs on top of the link to it: beside each figure that of a thin layer, which sends the same
//! bodies over the same link with nothing but a number before them. `cargo bench -p starling-actors --bench remote`

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, ActorSpec, Address, AskError, Context, Node, Reply};
use starling_actors::{SendError, Strategy, SupervisorSpec, TraceContext};
use starling_transport::{
    Authority, Credentials, DownReason, Handler, Lane, Limits, Link, LinkError, Mesh, MeshSettings, NodeName, Peer,
    Timings, memory,
};
use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

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

type Failure = Box<dyn Error + Send + Sync>;

/// Links two handlers; the link lasts as long as the result.
trait Fabric {
    type Held: Send;

    async fn link(handlers: [Arc<dyn Handler>; 2]) -> Result<Self::Held, Failure>;
}

struct Memory;

impl Fabric for Memory {
    type Held = [memory::Mesh; 2];

    async fn link([a, b]: [Arc<dyn Handler>; 2]) -> Result<Self::Held, Failure> {
        let network = memory::Network::new();
        let peer = |name| Ok::<_, Failure>(Peer { name: NodeName::new(name)?, incarnation: 1 });
        let limits = memory::Limits::default();
        let meshes = [network.join(peer("a")?, limits, a), network.join(peer("b")?, limits, b)];
        meshes[0].connect(&NodeName::new("b")?);
        Ok(meshes)
    }
}

/// Over loopback.
struct Quic;

impl Fabric for Quic {
    type Held = [Mesh; 2];

    async fn link([a, b]: [Arc<dyn Handler>; 2]) -> Result<Self::Held, Failure> {
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

const THIN_TELL: u8 = 0;
const THIN_ASK: u8 = 1;
const THIN_ANSWER: u8 = 2;

/// Both sides of it: counts tells, answers asks at once, hands answers to who waits.
#[derive(Default)]
struct Thin {
    link: Mutex<Option<Link>>,
    taken: AtomicU64,
    number: AtomicU64,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<Bytes>>>,
}

fn thin_frame(kind: u8, number: u64) -> Bytes {
    let mut frame = Vec::with_capacity(9 + BODY_BYTES);
    frame.push(kind);
    frame.extend(number.to_le_bytes());
    frame.extend(BODY.0);
    frame.extend(BODY.1);
    frame.into()
}

impl Handler for Thin {
    fn up(&self, link: &Link) {
        *self.link.lock().expect("no holder panics") = Some(link.clone());
    }

    fn down(&self, _link: &Link, _reason: &DownReason) {}

    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        let Some((&kind, rest)) = frame.split_first() else { return };
        let Some((number, _)) = rest.split_first_chunk().map(|(number, body)| (u64::from_le_bytes(*number), body))
        else {
            return;
        };
        match kind {
            THIN_TELL => drop(self.taken.fetch_add(1, Ordering::Relaxed)),
            // The bench never has more in flight than the queue takes.
            THIN_ASK => drop(link.send(lane, thin_frame(THIN_ANSWER, number))),
            _ => {
                let waiting = self.waiting.lock().expect("no holder panics").remove(&number);
                drop(waiting.map(|waiting| waiting.send(frame.clone())));
            }
        }
    }

    fn bulk(&self, _link: &Link, _body: Bytes) {}

    fn datagram(&self, _link: &Link, _datagram: Bytes) {}

    fn refused(&self, _peer: &str, _why: &str) {}
}

impl Thin {
    async fn ask(&self, link: &Link) -> Result<(), Failure> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().expect("no holder panics").insert(number, sender);
        link.send(Lane::Messages(0), thin_frame(THIN_ASK, number))?;
        tokio::time::timeout(DEADLINE, receiver).await??;
        Ok(())
    }
}

/// What is compared.
#[derive(Clone)]
enum Contender {
    Starling(Address<Message>),
    Thin { near: Arc<Thin>, far: Arc<Thin>, link: Link },
}

impl Contender {
    fn name(&self) -> &'static str {
        match self {
            Self::Starling(_) => "starling-actors",
            Self::Thin { .. } => "thin layer",
        }
    }

    async fn ask(&self) -> Result<(), Failure> {
        match self {
            Self::Starling(address) => {
                let echo = address.ask(TRACE, DEADLINE, |reply| Message::Echo(BODY, reply)).await?;
                assert_eq!(echo, BODY);
                Ok(())
            }
            Self::Thin { near, link, .. } => near.ask(link).await,
        }
    }

    /// False when the sender has to wait.
    async fn tell(&self) -> Result<bool, Failure> {
        match self {
            Self::Starling(address) => {
                address.send(TRACE, Message::Take(BODY)).await?;
                Ok(true)
            }
            Self::Thin { link, .. } => match link.send(Lane::Messages(0), thin_frame(THIN_TELL, 0)) {
                Ok(()) => Ok(true),
                Err(LinkError::Full { .. }) => Ok(false),
                Err(error) => Err(error.into()),
            },
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
            Self::Thin { far, .. } => Ok(far.taken.load(Ordering::Relaxed)),
        }
    }

    /// Thousands of tells a second, sent and handled.
    async fn tells(&self) -> Result<f64, Failure> {
        let before = self.taken().await?;
        let start = Instant::now();
        for _ in 0..TELLS {
            while !self.tell().await? {
                tokio::task::yield_now().await;
            }
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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn contenders<F: Fabric>() -> Result<(Vec<Contender>, [F::Held; 2]), Failure> {
    let (a, b) = (Node::new("a"), Node::new("b"));
    let spec = SupervisorSpec::new("s", Strategy::OneForOne);
    b.start(spec.child(ActorSpec::new("sum", || Sum(0)))).await?;
    b.expose::<Message>("sum");
    let ours = F::link([a.mesh_handler(), b.mesh_handler()]).await?;
    let address = a.remote::<Message>(&NodeName::new("b")?, "sum");
    let (near, far) = (Arc::new(Thin::default()), Arc::new(Thin::default()));
    let thin = F::link([Arc::clone(&near) as _, Arc::clone(&far) as _]).await?;
    let link = loop {
        let link = near.link.lock().expect("no holder panics").clone();
        match link {
            Some(link) if address.is_running() => break link,
            _ => tokio::task::yield_now().await,
        }
    };
    Ok((vec![Contender::Starling(address), Contender::Thin { near, far, link }], [ours, thin]))
}

async fn run<F: Fabric>(fabric: &str, out: &mut impl Write) -> Result<(), Failure> {
    let (contenders, _held) = contenders::<F>().await?;
    let mut figures = [const { [const { Vec::new() }; 3] }; 2];
    for _ in 0..ROUNDS {
        for (contender, [latency, asks, tells]) in contenders.iter().zip(&mut figures) {
            latency.push(contender.latency().await?);
            asks.push(contender.asks().await?);
            tells.push(contender.tells().await?);
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    writeln!(out, "{fabric}: median of {ROUNDS} rounds, bodies of {BODY_BYTES} bytes; load average {}", load.trim())?;
    let in_flight = format!("k asks/s, {IN_FLIGHT} in flight");
    writeln!(out, "{:<16} {:>11} {in_flight:>24} {:>9}", "", "ask p50 us", "k tells/s")?;
    for (contender, figures) in contenders.iter().zip(figures) {
        let [latency, asks, tells] = figures.map(median);
        writeln!(out, "{:<16} {latency:>11.2} {asks:>24.1} {tells:>9.1}", contender.name())?;
    }
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
    let (contenders, _held) = contenders::<Quic>().await?;
    let Contender::Starling(address) = &contenders[0] else { return Ok(()) };
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
            flood(&mut out).await?;
            run::<Memory>("in memory", &mut out).await?;
            run::<Quic>("over QUIC", &mut out).await?;
            Ok::<_, Failure>(out)
        });
        std::io::stdout().write_all(&benched.await??)?;
        Ok(())
    })
}
