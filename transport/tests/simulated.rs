//! The mesh over a simulated network in virtual time: latency, loss, reordering, partitions. Nothing here depends on the speed of
//! the machine.

mod suite;

#[path = "suite/quic.rs"]
mod quic;

use bytes::Bytes;
use quic::Quic;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, TokioRuntime, UdpPoller};
use starling_transport::{DownReason, Handler, Lane, Link, Mesh, NodeName};
use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use suite::{Allowed, Record, Told, name};
use tokio::sync::Notify;
use turmoil::net::UdpSocket;

const PORT: u16 = 9000;

type Waits = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// A socket of the simulation as QUIC wants it; it loses some of what it sends.
struct Socket {
    socket: Arc<UdpSocket>,
    /// Waits until something can be read; it holds the socket's lock meanwhile.
    readable: Mutex<Option<Waits>>,
    /// Of a linear congruential generator.
    random: Mutex<u64>,
    lost_of_256: u8,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Socket {
    fn is_lost(&self) -> bool {
        let mut random = self.random.lock().unwrap();
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*random >> 56) as u8) < self.lost_of_256
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if !self.is_lost() {
            self.socket.try_send_to(transmit.contents, transmit.destination)?;
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut readable = self.readable.lock().unwrap();
        loop {
            if let Some(waits) = readable.as_mut() {
                ready!(waits.as_mut().poll(context))?;
                *readable = None;
            }
            match self.socket.try_recv_from(&mut buffers[0]) {
                Ok((len, addr)) => {
                    meta[0] = RecvMeta { addr, len, stride: len, ecn: None, dst_ip: None };
                    return Poll::Ready(Ok(1));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let socket = self.socket.clone();
                    *readable = Some(Box::pin(async move { socket.readable().await }));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// What a network does to packets.
#[derive(Clone, Copy)]
struct Weather {
    seed: u64,
    latency_ms: (u64, u64),
    lost_of_256: u8,
}

impl Weather {
    fn simulation(self) -> turmoil::Sim<'static> {
        let (min, max) = self.latency_ms;
        turmoil::Builder::new()
            .rng_seed(self.seed)
            .simulation_duration(Duration::from_secs(3600))
            .tick_duration(Duration::from_millis(1))
            .min_message_latency(Duration::from_millis(min))
            .max_message_latency(Duration::from_millis(max))
            // A burst of QUIC is more than the default holds.
            .udp_capacity(100_000)
            .build()
    }
}

/// A node of the simulation; called on its host.
async fn start(quic: &Quic, node: &NodeName, weather: Weather) -> (Mesh, Arc<Record>) {
    let record = Arc::<Record>::default();
    (start_with(quic, node, weather, record.clone()).await, record)
}

async fn start_with(quic: &Quic, node: &NodeName, weather: Weather, handler: Arc<dyn Handler>) -> Mesh {
    let socket = UdpSocket::bind(("0.0.0.0", PORT)).await.unwrap();
    let seed = weather.seed.wrapping_add(node.as_str().bytes().map(u64::from).sum());
    let socket = Arc::new(Socket {
        socket: Arc::new(socket),
        readable: Mutex::default(),
        random: Mutex::new(seed),
        lost_of_256: weather.lost_of_256,
    });
    let mut config = EndpointConfig::default();
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    config.rng_seed(Some(bytes));
    let endpoint = Endpoint::new_with_abstract_socket(config, None, socket, Arc::new(TokioRuntime)).unwrap();
    Mesh::start_on(endpoint, quic.settings(node, 1, &Allowed::default()), handler).unwrap()
}

fn address(node: &str) -> String {
    SocketAddr::from((turmoil::lookup(node), PORT)).to_string()
}

fn numbered(count: u32, size: impl Fn(u32) -> usize) -> Vec<Bytes> {
    let frame = |number: u32| {
        let mut frame = vec![number as u8; size(number).max(4)];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        Bytes::from(frame)
    };
    (0..count).map(frame).collect()
}

const LANES: [Lane; 4] = [Lane::Control, Lane::Rounds, Lane::Messages(0), Lane::Messages(1)];

/// Sends a lot on every lane, and waits for as much from the other side.
async fn exchange(quic: Arc<Quic>, weather: Weather, own: &'static str, other: &'static str) {
    let (mesh, record) = start(&quic, &name(own), weather).await;
    if own == "a" {
        mesh.connect(name(other), address(other));
    }
    let link = record.link(other, 1).await;
    let frames = numbered(400, |number| (number as usize * 7) % 3_000);
    let body = Bytes::from(vec![8; 1 << 20]);
    for (index, frame) in frames.iter().enumerate() {
        for lane in LANES {
            link.send(lane, frame.clone()).unwrap();
        }
        if index % 150 == 0 {
            link.send_bulk(body.clone()).unwrap();
        }
    }
    for lane in LANES {
        assert!(record.frames(lane, frames.len()).await == frames, "{lane:?} from {other}");
    }
    assert!(record.bodies(3).await == vec![body; 3], "bodies from {other}");
    mesh.close(suite::LIMIT).await;
    let reason = record.down(other, 1).await;
    assert!(matches!(reason, DownReason::Closed | DownReason::Goodbye), "{reason}");
    record.check();
}

#[test]
fn frames_arrive_in_order_through_latency_and_loss() {
    // 13 of 256 is five of a hundred.
    for (seed, latency_ms, lost_of_256) in [(1, (1, 2), 0), (2, (1, 60), 0), (3, (1, 5), 13), (4, (5, 60), 13)] {
        let weather = Weather { seed, latency_ms, lost_of_256 };
        let (mut simulation, quic) = (weather.simulation(), Arc::new(Quic::new()));
        for (own, other) in [("a", "b"), ("b", "a")] {
            let quic = quic.clone();
            simulation.client(own, async move {
                exchange(quic, weather, own, other).await;
                Ok(())
            });
        }
        simulation.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// Both sides must have the same link, and not by trying: in virtual time nobody is doubtful, so no link goes down.
#[test]
fn who_dials_at_once_has_one_link_from_the_first() {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    for seed in 0..12 {
        let weather = Weather { seed, latency_ms: (1, 40), lost_of_256: if seed < 6 { 0 } else { 13 } };
        let (mut simulation, quic) = (weather.simulation(), Arc::new(Quic::new()));
        for own in NAMES {
            let quic = quic.clone();
            simulation.client(own, async move {
                let (mesh, record) = start(&quic, &name(own), weather).await;
                let others: Vec<&str> = NAMES.into_iter().filter(|other| *other != own).collect();
                for other in &others {
                    mesh.connect(name(other), address(other));
                }
                for other in &others {
                    record.link(other, 1).await.send(Lane::Control, Bytes::from_static(b"1")).unwrap();
                }
                record.frames(Lane::Control, others.len()).await;
                // As long as a dial under way could need to come to something.
                // sleeps because time is virtual, and what must not happen has no end to wait for
                tokio::time::sleep(Duration::from_secs(6)).await;
                let told = record.told();
                let ups = told.iter().filter(|told| matches!(told, Told::Up(_))).count();
                let downs: Vec<&Told> = told.iter().filter(|told| matches!(told, Told::Down(..))).collect();
                assert!(ups == others.len() && downs.is_empty(), "{own}, seed {seed}: {ups} up, down {downs:?}");
                assert_eq!(mesh.links().len(), others.len());
                record.check();
                // sleeps because time is virtual, and the others look a little later
                tokio::time::sleep(Duration::from_secs(5)).await;
                Ok(())
            });
        }
        simulation.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// A link on which nobody says anything stays, since heartbeats do; one whose path is cut is silent, and comes back with the path.
#[test]
fn a_quiet_link_stays_and_a_cut_one_comes_back() {
    let weather = Weather { seed: 5, latency_ms: (1, 30), lost_of_256: 5 };
    let (mut simulation, quic) = (weather.simulation(), Arc::new(Quic::new()));
    let theirs = quic.clone();
    simulation.client("b", async move {
        let (_mesh, record) = start(&theirs, &name("b"), weather).await;
        record.link("a", 1).await;
        // sleeps because time is virtual: for so long nothing is said
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert!(record.told().iter().all(|told| !matches!(told, Told::Down(..))), "{:?}", record.told());
        assert!(matches!(record.down("a", 1).await, DownReason::Silent(_)));
        record.link("a", 2).await;
        record.frames(Lane::Control, 1).await;
        record.check();
        Ok(())
    });
    simulation.client("a", async move {
        let (mesh, record) = start(&quic, &name("a"), weather).await;
        mesh.connect(name("b"), address("b"));
        let link = record.link("b", 1).await;
        for _ in 0..60 {
            // sleeps because time is virtual
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(link.is_up() && link.last_heard() < Duration::from_secs(2), "{:?}", link.last_heard());
        }
        turmoil::partition("a", "b");
        let cut = tokio::time::Instant::now();
        let reason = record.down("b", 1).await;
        assert!(matches!(reason, DownReason::Silent(silent) if silent >= Duration::from_secs(4)), "{reason}");
        assert!(cut.elapsed() < Duration::from_secs(8), "{:?}", cut.elapsed());
        // sleeps because time is virtual: dials fail for a while
        tokio::time::sleep(Duration::from_secs(30)).await;
        turmoil::repair("a", "b");
        record.link("b", 2).await.send(Lane::Control, Bytes::new()).unwrap();
        record.check();
        // sleeps because time is virtual: the other side looks at what it was told
        tokio::time::sleep(Duration::from_secs(20)).await;
        Ok(())
    });
    simulation.run().unwrap();
}

/// Notes how long each frame that says when it was sent was on its way.
#[derive(Default)]
struct Delays {
    frames_ms: Mutex<Vec<u64>>,
    bodies: Mutex<usize>,
    changed: Notify,
}

fn now_ms() -> u64 {
    turmoil::sim_elapsed().unwrap().as_millis() as u64
}

impl Handler for Delays {
    fn up(&self, _: &Link) {}
    fn down(&self, _: &Link, _: &DownReason) {}
    fn frame(&self, _: &Link, _: Lane, frame: Bytes) {
        let sent = u64::from_le_bytes(frame[..].try_into().unwrap());
        self.frames_ms.lock().unwrap().push(now_ms() - sent);
    }
    fn bulk(&self, _: &Link, _: Bytes) {
        *self.bodies.lock().unwrap() += 1;
        self.changed.notify_one();
    }
    fn datagram(&self, _: &Link, _: Bytes) {}
    fn refused(&self, _: &str, _: &str) {}
}

/// Bodies that keep a slow path full for long hold a frame up by no more than the path itself does: if they took up the windows
/// that all streams share, each frame would wait until a window's worth of them is through.
#[test]
fn bulk_that_fills_the_path_does_not_hold_frames_up() {
    const BODIES: usize = 4;
    let weather = Weather { seed: 6, latency_ms: (20, 25), lost_of_256: 4 };
    let (mut simulation, quic) = (weather.simulation(), Arc::new(Quic::new()));
    let theirs = quic.clone();
    simulation.client("b", async move {
        let delays = Arc::<Delays>::default();
        let _mesh = start_with(&theirs, &name("b"), weather, delays.clone()).await;
        while *delays.bodies.lock().unwrap() < BODIES {
            delays.changed.notified().await;
        }
        let mut frames_ms = delays.frames_ms.lock().unwrap().clone();
        frames_ms.sort_unstable();
        assert!(frames_ms.len() > 60, "the bodies were through too soon to tell: {} frames", frames_ms.len());
        let (median, most) = (frames_ms[frames_ms.len() / 2], frames_ms[frames_ms.len() - 1]);
        // One way is 20 to 25 ms; a lost packet costs a round trip or two, a full window a second.
        assert!(median < 60 && most < 400, "median {median} ms, most {most} ms of {}", frames_ms.len());
        Ok(())
    });
    simulation.client("a", async move {
        let (mesh, record) = start(&quic, &name("a"), weather).await;
        mesh.connect(name("b"), address("b"));
        let link = record.link("b", 1).await;
        for value in 0..BODIES {
            link.send_bulk(Bytes::from(vec![value as u8; 1 << 20])).unwrap();
        }
        let mut paces = tokio::time::interval(Duration::from_millis(100));
        while link.is_up() {
            for lane in LANES {
                // The other side ends when it has seen enough.
                let _ = link.send(lane, Bytes::copy_from_slice(&now_ms().to_le_bytes()));
            }
            paces.tick().await;
        }
        Ok(())
    });
    simulation.run().unwrap();
}
