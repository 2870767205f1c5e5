//! What the mesh costs on top of QUIC: a bare stream as the floor, and the least that carries frames both ways (a bounded queue, a
//! writer that batches, a table of waiting replies) as the yardstick. All on loopback with mutual TLS in one process, in turns, because
//! a shared machine is never the same twice. `cargo bench -p starling-transport --bench mesh`

mod thin;

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};
use starling_transport::{Authority, Credentials, DownReason, Handler, Lane, Limits, Link, Mesh, MeshSettings};
use starling_transport::{NodeCertificate, NodeName, Timings};
use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thin::{Failure, THIN_QUEUE, ThinReader, connected, thin_writer};
use tokio::sync::{Notify, mpsc, oneshot};

const ROUNDS: usize = 7;
const ASKS: usize = 4_000;
const IN_FLIGHT: usize = 64;
const ASKS_EACH: usize = 400;
const TELLS: [(usize, u64); 2] = [(64, 300_000), (4096, 30_000)];
const SMALL: usize = 64;
/// Requests are told from tells by their first bytes: a number that is not zero.
const ID_BYTES: usize = 8;
const LANE: Lane = Lane::Messages(0);
const DEADLINE: Duration = Duration::from_secs(60);

// -- what every layer needs: who waits for a reply, how many tells have come

#[derive(Default)]
struct Waiting {
    next: AtomicU64,
    replies: Mutex<HashMap<u64, oneshot::Sender<()>>>,
}

impl Waiting {
    fn ask(&self) -> (u64, oneshot::Receiver<()>) {
        let (sender, receiver) = oneshot::channel();
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.replies.lock().expect("no holder panics").insert(id, sender);
        (id, receiver)
    }

    fn replied(&self, frame: &[u8]) {
        let waiting = self.replies.lock().expect("no holder panics").remove(&id_of(frame));
        let _ = waiting.map(|waiting| waiting.send(()));
    }
}

#[derive(Default)]
struct Arrived {
    count: AtomicU64,
    awaited: AtomicU64,
    all: Notify,
}

impl Arrived {
    fn one(&self) {
        if self.count.fetch_add(1, Ordering::Relaxed) + 1 == self.awaited.load(Ordering::Relaxed) {
            self.all.notify_one();
        }
    }

    fn expect(&self, more: u64) {
        self.awaited.fetch_add(more, Ordering::Relaxed);
    }

    async fn wait(&self) -> Result<(), Failure> {
        Ok(tokio::time::timeout(DEADLINE, self.all.notified()).await?)
    }
}

fn id_of(frame: &[u8]) -> u64 {
    frame.first_chunk().map_or(0, |id| u64::from_le_bytes(*id))
}

fn request(id: u64, size: usize) -> Bytes {
    let mut frame = vec![7; size];
    frame[..ID_BYTES].copy_from_slice(&id.to_le_bytes());
    Bytes::from(frame)
}

// -- the floor: one stream, one message there and back

struct Bare {
    send: SendStream,
    receive: RecvStream,
}

impl Bare {
    async fn ask(&mut self) -> Result<(), Failure> {
        self.send.write_all(&[7; SMALL]).await?;
        self.receive.read_exact(&mut [0; ID_BYTES]).await?;
        Ok(())
    }
}

async fn echo(mut send: SendStream, mut receive: RecvStream) -> Result<(), Failure> {
    let mut message = [0; SMALL];
    loop {
        receive.read_exact(&mut message).await?;
        send.write_all(&message[..ID_BYTES]).await?;
    }
}

// -- the yardstick

struct Thin {
    frames: mpsc::Sender<Bytes>,
    waiting: Arc<Waiting>,
    arrived: Arc<Arrived>,
}

async fn thin(client: &Connection, server: &Connection) -> Result<Thin, Failure> {
    let (mut send, receive) = client.open_bi().await?;
    send.write_all(&0u32.to_le_bytes()).await?;
    let (server_send, server_receive) = server.accept_bi().await?;
    let (waiting, arrived) = (Arc::<Waiting>::default(), Arc::<Arrived>::default());
    // The frame that opened the stream.
    arrived.expect(1);
    let (frames, queue) = mpsc::channel(THIN_QUEUE);
    let (replies, reply_queue) = mpsc::channel(THIN_QUEUE);
    tokio::spawn(thin_writer(queue, send));
    tokio::spawn(thin_writer(reply_queue, server_send));
    let (replied, counted) = (waiting.clone(), arrived.clone());
    tokio::spawn(async move {
        let mut reader = ThinReader::new(receive);
        while let Ok(Some(frame)) = reader.next().await {
            replied.replied(&frame);
        }
    });
    tokio::spawn(async move {
        let mut reader = ThinReader::new(server_receive);
        while let Ok(Some(frame)) = reader.next().await {
            match id_of(&frame) {
                0 => counted.one(),
                // As many replies as there are asks under way fit.
                _ => drop(replies.try_send(frame.slice(..ID_BYTES))),
            }
        }
    });
    arrived.wait().await?;
    Ok(Thin { frames, waiting, arrived })
}

// -- the mesh

struct Asker(Waiting);
#[derive(Default)]
struct Answerer(Arrived);

impl Handler for Asker {
    fn up(&self, _: &Link) {}
    fn down(&self, _: &Link, _: &DownReason) {}
    fn frame(&self, _: &Link, _: Lane, frame: Bytes) {
        self.0.replied(&frame);
    }
    fn bulk(&self, _: &Link, _: Bytes) {}
    fn datagram(&self, _: &Link, _: Bytes) {}
    fn refused(&self, _: &str, _: &str) {}
}

impl Handler for Answerer {
    fn up(&self, _: &Link) {}
    fn down(&self, _: &Link, _: &DownReason) {}
    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        match id_of(&frame) {
            0 => self.0.one(),
            _ => drop(link.send(lane, frame.slice(..ID_BYTES))),
        }
    }
    fn bulk(&self, _: &Link, _: Bytes) {}
    fn datagram(&self, _: &Link, _: Bytes) {}
    fn refused(&self, _: &str, _: &str) {}
}

struct Meshed {
    link: Link,
    asker: Arc<Asker>,
    answerer: Arc<Answerer>,
    _meshes: (Mesh, Mesh),
}

async fn meshed(authority: &Authority) -> Result<Meshed, Failure> {
    let settings = |name: &str| -> Result<MeshSettings, Failure> {
        let NodeCertificate { certificate_pem, key_pem } = authority.issue(&NodeName::new(name)?, 1)?;
        let authority = authority.certificate_pem();
        let credentials = Credentials::from_pem(authority.as_bytes(), certificate_pem.as_bytes(), key_pem.as_bytes())?;
        let listen = "127.0.0.1:0".parse()?;
        let (limits, timings) = (Limits::default(), Timings::default());
        Ok(MeshSettings { incarnation: 1, settings_digest: 1, listen, credentials, limits, timings })
    };
    let (asker, answerer) = (Arc::new(Asker(Waiting::default())), Arc::<Answerer>::default());
    let client = Mesh::start(settings("client")?, asker.clone()).await?;
    let server = Mesh::start(settings("server")?, answerer.clone()).await?;
    client.connect(NodeName::new("server")?, server.local_addr().to_string());
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    let link = loop {
        looks.tick().await;
        if let Some(link) = client.links().pop() {
            break link;
        }
    };
    Ok(Meshed { link, asker, answerer, _meshes: (client, server) })
}

// -- what is compared

enum Contender {
    Bare(Box<tokio::sync::Mutex<Bare>>),
    Thin(Thin),
    Mesh(Meshed),
}

impl Contender {
    fn name(&self) -> &'static str {
        match self {
            Self::Bare(_) => "bare stream",
            Self::Thin(_) => "thin layer",
            Self::Mesh(_) => "mesh",
        }
    }

    async fn ask(&self) -> Result<(), Failure> {
        let reply = match self {
            Self::Bare(bare) => return bare.lock().await.ask().await,
            Self::Thin(thin) => {
                let (id, reply) = thin.waiting.ask();
                thin.frames.send(request(id, SMALL)).await?;
                reply
            }
            Self::Mesh(mesh) => {
                let (id, reply) = mesh.asker.0.ask();
                mesh.link.send(LANE, request(id, SMALL))?;
                reply
            }
        };
        Ok(tokio::time::timeout(DEADLINE, reply).await??)
    }

    /// Latencies of asks one after another, in microseconds: median and 99th percentile.
    async fn asks(&self) -> Result<(f64, f64), Failure> {
        let mut latencies_us = Vec::with_capacity(ASKS);
        for _ in 0..ASKS {
            let start = Instant::now();
            self.ask().await?;
            latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        latencies_us.sort_by(f64::total_cmp);
        Ok((latencies_us[ASKS / 2], latencies_us[ASKS * 99 / 100]))
    }

    /// Thousands of asks a second with many under way.
    async fn asks_at_once(self: &Arc<Self>) -> Result<f64, Failure> {
        let start = Instant::now();
        let askers: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let contender = self.clone();
                tokio::spawn(async move {
                    for _ in 0..ASKS_EACH {
                        contender.ask().await?;
                    }
                    Ok::<_, Failure>(())
                })
            })
            .collect();
        for asker in askers {
            asker.await??;
        }
        Ok((IN_FLIGHT * ASKS_EACH) as f64 / start.elapsed().as_secs_f64() / 1e3)
    }

    /// Thousands of frames a second one way, sent and received.
    async fn tells(&self, size: usize, count: u64) -> Result<f64, Failure> {
        let frame = Bytes::from(vec![0; size]);
        let start = Instant::now();
        match self {
            Self::Bare(_) => return Ok(f64::NAN),
            Self::Thin(thin) => {
                thin.arrived.expect(count);
                for _ in 0..count {
                    thin.frames.send(frame.clone()).await?;
                }
                thin.arrived.wait().await?;
            }
            Self::Mesh(mesh) => {
                mesh.answerer.0.expect(count);
                for _ in 0..count {
                    while mesh.link.send(LANE, frame.clone()).is_err() {
                        tokio::task::yield_now().await;
                    }
                }
                mesh.answerer.0.wait().await?;
            }
        }
        Ok(count as f64 / start.elapsed().as_secs_f64() / 1e3)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn run(out: &mut impl Write) -> Result<(), Failure> {
    let authority = Authority::new("bench")?;
    let (bare_client, bare_server, _bare) = connected(&authority).await?;
    let (mut send, receive) = bare_client.open_bi().await?;
    send.write_all(&[7; SMALL]).await?;
    let (server_send, server_receive) = bare_server.accept_bi().await?;
    tokio::spawn(echo(server_send, server_receive));
    let mut bare = Bare { send, receive };
    // The reply to what opened the stream.
    bare.receive.read_exact(&mut [0; ID_BYTES]).await?;
    let (thin_client, thin_server, _thin) = connected(&authority).await?;
    let contenders = [
        Contender::Bare(Box::new(tokio::sync::Mutex::new(bare))),
        Contender::Thin(thin(&thin_client, &thin_server).await?),
        Contender::Mesh(meshed(&authority).await?),
    ]
    .map(Arc::new);
    let mut figures = [const { [const { Vec::new() }; 5] }; 3];
    for _ in 0..ROUNDS {
        for (contender, figures) in contenders.iter().zip(&mut figures) {
            let (middle, tail) = contender.asks().await?;
            figures[0].push(middle);
            figures[1].push(tail);
            if !matches!(**contender, Contender::Bare(_)) {
                figures[2].push(contender.asks_at_once().await?);
                for (place, (size, count)) in TELLS.iter().enumerate() {
                    figures[3 + place].push(contender.tells(*size, *count).await?);
                }
            }
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    writeln!(out, "median of {ROUNDS} rounds; load average {}", load.trim())?;
    let heads = ["ask p50 us", "ask p99 us", "k asks/s at 64", "k tells/s 64 B", "k tells/s 4 KiB"];
    writeln!(out, "{:<12}{}", "", heads.map(|head| format!("{head:>16}")).concat())?;
    let rows = figures.map(|row| row.map(|values| if values.is_empty() { f64::NAN } else { median(values) }));
    for (contender, row) in contenders.iter().zip(&rows) {
        let cells: String = row.iter().map(|figure| format!("{figure:>16.1}")).collect();
        writeln!(out, "{:<12}{}", contender.name(), cells.replace("NaN", "  -"))?;
    }
    let ratios: String = rows[2].iter().zip(&rows[1]).map(|(mesh, thin)| format!("{:>16.2}", mesh / thin)).collect();
    writeln!(out, "{:<12}{ratios}", "mesh / thin")?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // On a worker, as senders are.
    runtime.block_on(async {
        let benched = tokio::spawn(async {
            let mut out = Vec::new();
            run(&mut out).await?;
            Ok::<_, Failure>(out)
        });
        std::io::stdout().write_all(&benched.await??)?;
        Ok(())
    })
}
