//! The mesh of one node: an endpoint that listens, dials and keeps at most one link to each name.

use crate::certificate::Credentials;
use crate::codec::CODEC_NUMBER;
use crate::dial::Dialer;
use crate::greeting::{NotUp, Side, code, greet, not_up};
use crate::link::{Handler, Link, NodeName, Port};
use crate::registry::Registry;
use crate::session::enter;
use crate::wire::{HELLO_BYTES_MAX, Hello, LANES_MAX, Offer, PROTOCOL};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, IdleTimeout, Incoming, TokioRuntime, TransportConfig, VarInt};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// What a stream may have under way: a hundred megabits over a hundred milliseconds.
const STREAM_WINDOW_BYTES: u64 = 1_250_000;
/// More is dropped, oldest first: a datagram that waited is worth little.
const DATAGRAM_BUFFER_BYTES: usize = 256 * 1024;
/// Of connections that are not accepted yet.
const INCOMING_BUFFER_BYTES: u64 = 64 * 1024;
/// A peer is doubtful after so many heartbeats that did not come.
const BEATS_MISSED_MAX: u32 = 4;
/// What is told to a peer at the very end is waited for no longer.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What this node allows. Where a peer has a say the smaller of both sides' limits holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Lanes of messages, 1 to 4.
    pub lanes: u8,
    pub frame_bytes_max: usize,
    pub bulk_bytes_max: usize,
    /// Bodies under way at a time to one peer, and from it.
    pub bulk_streams_max: u8,
    /// Messages and bodies that wait for one peer.
    pub queue_bytes_max: usize,
    /// Control and rounds that wait for one peer; past it the link is closed.
    pub urgent_bytes_max: usize,
    /// Peers with a link.
    pub links_max: usize,
    /// Connections of others that are not links yet.
    pub handshakes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lanes: 2,
            // A contribution of a round has at most 1 MiB.
            frame_bytes_max: 4 << 20,
            bulk_bytes_max: 64 << 20,
            bulk_streams_max: 4,
            queue_bytes_max: 128 << 20,
            urgent_bytes_max: 128 << 20,
            links_max: 256,
            handshakes_max: 64,
        }
    }
}

/// Lengths are four bytes on the wire; and what is larger should not be one body.
const BYTES_MAX: usize = 1 << 30;

impl Limits {
    fn check(&self) -> Result<(), MeshError> {
        let outside = |name, value, min, max| Err(MeshError::Limit { name, value, min, max });
        let Self { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, urgent_bytes_max, .. } = *self;
        if !(1..=LANES_MAX).contains(&lanes) {
            return outside("lanes", usize::from(lanes), 1, usize::from(LANES_MAX));
        }
        for (name, bytes) in [("frame_bytes_max", frame_bytes_max), ("bulk_bytes_max", bulk_bytes_max)] {
            if !(HELLO_BYTES_MAX..=BYTES_MAX).contains(&bytes) {
                return outside(name, bytes, HELLO_BYTES_MAX, BYTES_MAX);
            }
        }
        if self.bulk_streams_max == 0 || self.bulk_streams_max > 128 {
            return outside("bulk_streams_max", usize::from(self.bulk_streams_max), 1, 128);
        }
        // What is allowed alone must fit, with its header.
        let largest = frame_bytes_max.max(bulk_bytes_max) + 64;
        for (name, bytes) in [("queue_bytes_max", queue_bytes_max), ("urgent_bytes_max", urgent_bytes_max)] {
            if bytes < largest {
                return outside(name, bytes, largest, usize::MAX);
            }
        }
        for (name, count) in [("links_max", self.links_max), ("handshakes_max", self.handshakes_max)] {
            if !(1..=65_536).contains(&count) {
                return outside(name, count, 1, 65_536);
            }
        }
        Ok(())
    }

    fn offer(&self) -> Offer {
        // `check` bounds both by `BYTES_MAX`.
        let bytes = |limit: usize| u32::try_from(limit).unwrap_or(u32::MAX);
        Offer {
            lanes: self.lanes,
            bulk_streams_max: self.bulk_streams_max,
            frame_bytes_max: bytes(self.frame_bytes_max),
            bulk_bytes_max: bytes(self.bulk_bytes_max),
        }
    }
}

/// When things happen, and when they have taken too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timings {
    /// A peer that was not heard for so long is gone.
    pub idle: Duration,
    /// Something is sent at least so often.
    pub keep_alive: Duration,
    /// Between datagrams that tell the peer that this node lives.
    pub heartbeat: Duration,
    /// The first pause between dials.
    pub back_off_min: Duration,
    /// The longest.
    pub back_off_max: Duration,
    /// From dialing one address to a link.
    pub hello: Duration,
    /// From a peer's goodbye to the end of its link.
    pub goodbye: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(5),
            keep_alive: Duration::from_secs(1),
            heartbeat: Duration::from_millis(500),
            back_off_min: Duration::from_millis(50),
            back_off_max: Duration::from_secs(10),
            hello: Duration::from_secs(5),
            goodbye: Duration::from_secs(10),
        }
    }
}

impl Timings {
    fn check(&self) -> Result<(), MeshError> {
        let Self { idle, keep_alive, heartbeat, back_off_min, back_off_max, hello, goodbye } = *self;
        let set = [("heartbeat", heartbeat), ("back_off_min", back_off_min), ("hello", hello), ("goodbye", goodbye)];
        for (name, value) in set {
            if value.is_zero() {
                return Err(MeshError::Timing { name, value, must: "more than nothing" });
            }
        }
        if keep_alive.is_zero() || keep_alive >= idle {
            return Err(MeshError::Timing {
                name: "keep_alive",
                value: keep_alive,
                must: "more than nothing and less than idle",
            });
        }
        if back_off_max < back_off_min {
            return Err(MeshError::Timing { name: "back_off_max", value: back_off_max, must: "at least back_off_min" });
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub struct MeshSettings {
    /// One life of this process: greater than that of every life before.
    pub incarnation: u64,
    /// Of all settings that must be the same on all nodes.
    pub settings_digest: u64,
    /// Port 0: any that is free.
    pub listen: SocketAddr,
    pub credentials: Credentials,
    pub limits: Limits,
    pub timings: Timings,
}

/// Why a mesh could not be started.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    #[error("{name} is {value} (allowed {min} to {max})")]
    Limit { name: &'static str, value: usize, min: usize, max: usize },
    #[error("{name} is {value:?} (it must be {must})")]
    Timing { name: &'static str, value: Duration, must: &'static str },
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
}

/// How far the mesh's life is. Its receivers are held by its tasks, so their count says when all have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Links say goodbye.
    Leaving,
    /// All ends at once.
    Over,
}

/// What the mesh's tasks share.
pub(crate) struct Shared {
    pub hello: Hello,
    pub handler: Arc<dyn Handler>,
    pub registry: Arc<Registry>,
    pub endpoint: Endpoint,
    pub client: quinn::ClientConfig,
    pub limits: Limits,
    pub timings: Timings,
    local: SocketAddr,
    life: watch::Sender<Phase>,
    dialed: Mutex<BTreeMap<NodeName, watch::Sender<String>>>,
    serial: AtomicU64,
    runtime: Handle,
}

impl Shared {
    /// The number of this node's next choice among connections.
    pub fn next_serial(&self) -> u64 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }
}

/// A node's mesh. Cheap to clone; when the last clone is dropped, all links end at once.
#[derive(Clone)]
pub struct Mesh(Arc<Owner>);

/// The tasks hold [`Shared`], so only this tells when nobody outside does.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.life.send_replace(Phase::Over);
        self.0.endpoint.set_server_config(None);
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh").field("name", &self.0.0.hello.name).field("local", &self.0.0.local).finish()
    }
}

impl Mesh {
    /// Listens, and tells `handler` what comes.
    ///
    /// # Errors
    /// [`MeshError`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn start(settings: MeshSettings, handler: Arc<dyn Handler>) -> Result<Self, MeshError> {
        let address = settings.listen;
        let failed = |source| MeshError::Listen { address, source };
        let socket = std::net::UdpSocket::bind(address).map_err(failed)?;
        let runtime = Arc::new(TokioRuntime);
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, runtime).map_err(failed)?;
        Self::start_on(endpoint, settings, handler)
    }

    /// As [`Self::start`], on an endpoint that is there: tests bring a simulated network.
    #[doc(hidden)]
    pub fn start_on(endpoint: Endpoint, settings: MeshSettings, handler: Arc<dyn Handler>) -> Result<Self, MeshError> {
        let MeshSettings { incarnation, settings_digest, listen, credentials, limits, timings } = settings;
        limits.check()?;
        timings.check()?;
        let (client, server) = configs(&credentials, &limits, &timings)?;
        let local = endpoint.local_addr().map_err(|source| MeshError::Listen { address: listen, source })?;
        endpoint.set_server_config(Some(server));
        let hello = Hello {
            codec: CODEC_NUMBER,
            incarnation,
            settings_digest,
            offer: limits.offer(),
            name: credentials.name().clone(),
            cluster: credentials.cluster().to_owned(),
        };
        let registry = Registry::new(limits.links_max, timings.heartbeat * BEATS_MISSED_MAX);
        let (life, alive) = watch::channel(Phase::Running);
        let shared = Arc::new(Shared {
            hello,
            handler,
            registry,
            endpoint,
            client,
            limits,
            timings,
            local,
            life,
            dialed: Mutex::default(),
            // Zero is before every choice.
            serial: AtomicU64::new(1),
            runtime: Handle::current(),
        });
        tracing::info!(name = %shared.hello.name, %local, incarnation, "mesh listens");
        shared.runtime.spawn(accept(shared.clone(), alive));
        Ok(Self(Arc::new(Owner(shared))))
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.0.0.local
    }

    /// Keeps a link to `peer`: dials `address` (`host:port`, resolved for each dial) whenever there is none. Said again with another
    /// address, the next dial goes there.
    pub fn connect(&self, peer: NodeName, address: String) {
        let shared = &self.0.0;
        let alive = shared.life.subscribe();
        if *alive.borrow() != Phase::Running {
            return;
        }
        // Nothing panics while the lock is held, so a poisoned lock guards nothing broken.
        let mut dialed = shared.dialed.lock().unwrap_or_else(PoisonError::into_inner);
        match dialed.entry(peer) {
            Entry::Occupied(entry) => {
                entry.get().send_replace(address);
            }
            Entry::Vacant(entry) => {
                let (sender, address) = watch::channel(address);
                let dialer = Dialer { shared: shared.clone(), peer: entry.key().clone(), address };
                entry.insert(sender);
                shared.runtime.spawn(dialer.run(alive));
            }
        }
    }

    /// The links that are up.
    pub fn links(&self) -> Vec<Link> {
        self.0.0.registry.ports().iter().filter(|port| port.is_up()).map(|port| port.link()).collect()
    }

    /// Says goodbye on all links and waits until the peers have all that was taken for sending, `deadline` at the most; then ends
    /// all. Nothing is up afterwards, and the mesh listens no more.
    pub async fn close(&self, deadline: Duration) {
        let Shared { life, endpoint, .. } = &*self.0.0;
        endpoint.set_server_config(None);
        life.send_if_modified(|phase| {
            let was_running = *phase == Phase::Running;
            if was_running {
                *phase = Phase::Leaving;
            }
            was_running
        });
        if timeout(deadline, life.closed()).await.is_err() {
            life.send_replace(Phase::Over);
            life.closed().await;
        }
        endpoint.close(code::CLOSED, b"node is closed");
        // Best effort: who does not hear that all is closed will notice.
        let _ = timeout(LAST_WORDS, endpoint.wait_idle()).await;
    }
}

/// Accepts connections until the mesh leaves.
async fn accept(shared: Arc<Shared>, mut life: watch::Receiver<Phase>) {
    let handshakes = Arc::new(Semaphore::new(shared.limits.handshakes_max));
    loop {
        let incoming = tokio::select! {
            _ = life.wait_for(|phase| *phase != Phase::Running) => return,
            incoming = shared.endpoint.accept() => incoming,
        };
        let Some(incoming) = incoming else {
            return;
        };
        match handshakes.clone().try_acquire_owned() {
            Ok(permit) => {
                let (shared, life) = (shared.clone(), life.clone());
                shared.runtime.clone().spawn(welcome(shared, incoming, permit, life));
            }
            // Told at once rather than left waiting: it dials again.
            Err(_) => incoming.refuse(),
        }
    }
}

/// Someone dialed: a link, or a refusal.
async fn welcome(
    shared: Arc<Shared>,
    incoming: Incoming,
    handshake: tokio::sync::OwnedSemaphorePermit,
    life: watch::Receiver<Phase>,
) {
    let from = incoming.remote_address().to_string();
    let greeted = async {
        let connection = incoming.await.map_err(|error| not_up(&from, &error))?;
        let greeted = greet(&shared, connection, Side::Accepted).await?;
        enter(&shared, greeted).await
    };
    let mut leaves = life.clone();
    let limit = shared.timings.hello;
    let tried = tokio::select! {
        _ = leaves.wait_for(|phase| *phase != Phase::Running) => return,
        tried = timeout(limit, greeted) => tried,
    };
    drop((handshake, leaves));
    match tried.unwrap_or_else(|_| Err(NotUp::Lost(format!("no hello within {limit:?}")))) {
        Ok(session) => {
            session.run(shared.timings.heartbeat, life).await;
        }
        Err(NotUp::Refused { peer, why }) => {
            tracing::warn!(peer, from, why, "refused a connection");
            shared.handler.refused(&peer, &why);
        }
        Err(NotUp::Lost(why)) => tracing::debug!(from, why, "a connection did not become a link"),
        Err(NotUp::Duplicate) => {}
    }
}

fn configs(
    credentials: &Credentials,
    limits: &Limits,
    timings: &Timings,
) -> Result<(quinn::ClientConfig, quinn::ServerConfig), MeshError> {
    let (client, server) = credentials.tls(PROTOCOL).map_err(MeshError::Tls)?;
    let client = QuicClientConfig::try_from(client).map_err(|error| MeshError::Tls(error.to_string()))?;
    let server = QuicServerConfig::try_from(server).map_err(|error| MeshError::Tls(error.to_string()))?;
    let transport = Arc::new(transport(limits, timings)?);
    let mut client = quinn::ClientConfig::new(Arc::new(client));
    client.transport_config(transport.clone());
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(server));
    server
        .transport_config(transport)
        // Nodes keep their addresses while a connection lives.
        .migration(false)
        .max_incoming(limits.handshakes_max)
        .incoming_buffer_size(INCOMING_BUFFER_BYTES)
        .incoming_buffer_size_total(INCOMING_BUFFER_BYTES * limits.handshakes_max as u64);
    Ok((client, server))
}

/// All that QUIC would otherwise choose by itself and that matters.
fn transport(limits: &Limits, timings: &Timings) -> Result<TransportConfig, MeshError> {
    let idle = IdleTimeout::try_from(timings.idle);
    let idle = idle.map_err(|_| MeshError::Timing { name: "idle", value: timings.idle, must: "shorter" })?;
    let bulk = u32::from(limits.bulk_streams_max);
    // Rounds, messages, and bodies.
    let streams = 1 + u32::from(LANES_MAX) + bulk;
    // Each stream's window fits into the connection's at the same time, and control's too: so none waits because others are full.
    let window = STREAM_WINDOW_BYTES * u64::from(streams + 2);
    let varint = |value: u64| VarInt::from_u64(value).unwrap_or(VarInt::MAX);
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(Some(timings.keep_alive))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(streams))
        .stream_receive_window(varint(STREAM_WINDOW_BYTES))
        .receive_window(varint(window))
        .send_window(window)
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES);
    Ok(transport)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_cannot_hold_are_refused_by_name() {
        assert!(Limits::default().check().is_ok());
        let refused = |change: fn(&mut Limits)| {
            let mut limits = Limits::default();
            change(&mut limits);
            limits.check().unwrap_err().to_string()
        };
        assert_eq!(refused(|l| l.lanes = 5), "lanes is 5 (allowed 1 to 4)");
        assert_eq!(refused(|l| l.frame_bytes_max = 1), "frame_bytes_max is 1 (allowed 256 to 1073741824)");
        assert!(refused(|l| l.queue_bytes_max = l.bulk_bytes_max).starts_with("queue_bytes_max is 67108864"));
        assert!(refused(|l| l.bulk_streams_max = 0).starts_with("bulk_streams_max is 0"));
        assert!(refused(|l| l.links_max = 0).starts_with("links_max is 0"));
    }

    #[test]
    fn timings_that_cannot_hold_are_refused_by_name() {
        assert!(Timings::default().check().is_ok());
        let refused = |change: fn(&mut Timings)| {
            let mut timings = Timings::default();
            change(&mut timings);
            timings.check().unwrap_err().to_string()
        };
        assert_eq!(refused(|t| t.heartbeat = Duration::ZERO), "heartbeat is 0ns (it must be more than nothing)");
        assert!(refused(|t| t.keep_alive = t.idle).starts_with("keep_alive is 5s"));
        assert!(refused(|t| t.back_off_max = Duration::ZERO).starts_with("back_off_max is 0ns"));
        let endless = Timings { idle: Duration::MAX, ..Timings::default() };
        assert!(transport(&Limits::default(), &endless).is_err());
    }
}
