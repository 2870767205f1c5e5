//! Actors of other nodes: what a node exposes, the links it has, and who hears of them.

mod asked;
mod flow;
mod gate;
mod passage;
mod session;
mod stats;
mod target;
mod wire;

pub use stats::{Dropped, LinkStats};

pub(crate) use asked::{Asked, OutletError};
pub(crate) use flow::Permit;
pub(crate) use gate::{Exposed, Gate};
pub(crate) use passage::{Asking, Home, Pending, Streaming, claim, claim_sink, leave};
pub(crate) use target::{Posted, RemoteTarget};
pub(crate) use wire::Failure;

use bytes::Bytes;
use flow::give_credit;
use session::Session;
use starling_transport::codec::{self, CodecError};
use starling_transport::{DownReason, Handler, Lane, Link, NodeName, Peer};
use stats::Counters;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use wire::{Frame, Tell};

/// What one link may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteLimits {
    /// Bytes of one peer's messages to one actor that may be on their way or wait in its mailbox. The receiver's setting counts.
    pub window_bytes: u32,
    /// Questions that may wait for one peer.
    pub open_asks_max: usize,
}

impl Default for RemoteLimits {
    fn default() -> Self {
        Self { window_bytes: 1 << 20, open_asks_max: 64 << 10 }
    }
}

/// What happens to the links of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// Messages can be sent from now on.
    Up(Peer),
    Down(Peer, DownReason),
    /// A peer was refused, or refused this node.
    Refused {
        peer: String,
        why: String,
    },
}

/// A body that travels on a lane is at most 64 KiB; numbers take at most 16 times their bytes on the wire.
const SMALL_DECODED_BYTES_MAX: usize = 16 * session::LANE_BYTES_MAX;
/// The same for the largest bodies that any link takes.
const DECODED_BYTES_MAX: usize = 1 << 30;

/// Decodes a body; what it may reserve follows from its size, not from what it claims. It runs on the mesh's tasks, which must
/// outlive a type whose `Deserialize` panics.
pub(crate) fn decode_body<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, CodecError> {
    let decode = || match body.len() {
        0..=session::LANE_BYTES_MAX => codec::decode::<T, SMALL_DECODED_BYTES_MAX>(body),
        _ => codec::decode::<T, DECODED_BYTES_MAX>(body),
    };
    catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| {
        let (bytes, target) = (body.len(), std::any::type_name::<T>());
        Err(CodecError::Malformed { bytes, target, reason: "its decoding panicked".to_owned() })
    })
}

/// Encodes a value behind what stands before it in a frame.
pub(crate) type Encode<T> = fn(&T, &mut Vec<u8>) -> Result<(), CodecError>;

/// FNV-1a: the same on every machine.
pub(crate) fn hash_of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Both sides of a link must mean the same type by a name.
pub(crate) fn type_hash<M>(schema: u32) -> u64 {
    hash_of(&format!("{}#{schema}", std::any::type_name::<M>()))
}

/// The remote half of a node.
#[derive(Default)]
pub(crate) struct Remote {
    /// Numbers messages that hold replies.
    requests: AtomicU64,
    sessions: RwLock<BTreeMap<NodeName, Arc<Session>>>,
    gates: RwLock<BTreeMap<Arc<str>, Arc<dyn Gate>>>,
    counters: Mutex<BTreeMap<NodeName, Arc<Counters>>>,
    /// By the name of who listens. Locked before `sessions`, and while an event is told: so all hear of all events in one order.
    listeners: Mutex<Listeners>,
}

pub(crate) type Listener = Box<dyn Fn(LinkEvent) + Send + Sync>;
type Listeners = BTreeMap<Arc<str>, Listener>;
type Sessions = BTreeMap<NodeName, Arc<Session>>;

impl Remote {
    pub fn expose(&self, name: Arc<str>, gate: Arc<dyn Gate>) {
        self.gates.write().unwrap_or_else(PoisonError::into_inner).insert(name, gate);
        self.read_sessions().values().for_each(|session| session.forget_entrances());
    }

    fn gate(&self, name: &str) -> Option<Arc<dyn Gate>> {
        self.gates.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub fn next_request(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The session to the peer of this name, when messages may be sent.
    pub fn session(&self, name: &NodeName) -> Option<Arc<Session>> {
        self.read_sessions().get(name).filter(|session| session.is_usable()).cloned()
    }

    pub fn links(&self) -> Vec<Link> {
        let sessions = self.read_sessions();
        sessions.values().filter(|session| session.is_usable()).map(|session| session.link.clone()).collect()
    }

    pub fn stats(&self) -> Vec<LinkStats> {
        let sessions = self.read_sessions();
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let open = |name| sessions.get(name).filter(|session| session.is_usable()).map(|session| session.open_asks());
        counters.iter().map(|(name, counters)| counters.read(name.clone(), open(name))).collect()
    }

    /// Tells `listener` of the links that are up, and from now on of every event. It replaces the one of the same name.
    pub fn listen(&self, name: Arc<str>, listener: Listener) {
        let mut listeners = self.lock_listeners();
        // Also those that are down, but whose end is still to be told.
        let sessions: Vec<_> = self.read_sessions().values().cloned().collect();
        for session in sessions.iter().filter(|session| session.told.load(Ordering::Relaxed)) {
            listener(LinkEvent::Up(session.link.peer().clone()));
        }
        listeners.insert(name, listener);
    }

    fn lock_listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_sessions(&self) -> RwLockReadGuard<'_, Sessions> {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_sessions(&self) -> RwLockWriteGuard<'_, Sessions> {
        self.sessions.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self, name: &NodeName) -> Arc<Counters> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counters.entry(name.clone()).or_default())
    }
}

/// Two links to one name are told apart by where their ports keep the peer.
fn is_same(a: &Link, b: &Link) -> bool {
    std::ptr::eq(a.peer(), b.peer())
}

fn tell_all(listeners: &Listeners, event: &LinkEvent) {
    listeners.values().for_each(|listener| listener(event.clone()));
}

/// What a node gives to its mesh.
pub(crate) struct MeshHandler {
    /// Weak: the mesh must not keep the node alive, which holds its links.
    remote: Weak<Remote>,
    limits: RemoteLimits,
}

impl MeshHandler {
    pub fn new(remote: &Arc<Remote>, limits: RemoteLimits) -> Self {
        Self { remote: Arc::downgrade(remote), limits }
    }

    fn take(&self, link: &Link, lane: Option<Lane>, frame: &Bytes) {
        let Some(session) = link.attached::<Session>().filter(|session| !session.has_ended()) else { return };
        session.counters.received(frame.len());
        let arrival = Arrival { remote: &self.remote, session: &session, lane, bytes: frame.len() };
        let taken = Frame::decode(frame).map_err(|error| error.to_string()).and_then(|frame| arrival.take(frame));
        if let Err(what) = taken {
            session.violated(&what);
        }
    }
}

impl Handler for MeshHandler {
    fn up(&self, link: &Link) {
        let Some(remote) = self.remote.upgrade() else { return };
        let name = link.peer().name.clone();
        let session = Arc::new(Session::new(link.clone(), self.limits, remote.counters(&name)));
        link.attach(&session);
        let listeners = remote.lock_listeners();
        let before = remote.write_sessions().insert(name, Arc::clone(&session));
        if let Some(before) = before {
            ended(&listeners, &before, &DownReason::Replaced);
        }
        drop(listeners);
        session.send_hello();
    }

    fn down(&self, link: &Link, reason: &DownReason) {
        let Some(remote) = self.remote.upgrade() else { return };
        let name = &link.peer().name;
        let listeners = remote.lock_listeners();
        let session = remote.read_sessions().get(name).filter(|session| is_same(&session.link, link)).cloned();
        if let Some(session) = session {
            remote.write_sessions().remove(name);
            ended(&listeners, &session, reason);
        }
    }

    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        self.take(link, Some(lane), &frame);
    }

    fn bulk(&self, link: &Link, body: Bytes) {
        self.take(link, None, &body);
    }

    /// Actors send none: whoever does has another use for the link.
    fn datagram(&self, _link: &Link, _datagram: Bytes) {}

    fn refused(&self, peer: &str, why: &str) {
        let Some(remote) = self.remote.upgrade() else { return };
        let event = LinkEvent::Refused { peer: peer.to_owned(), why: why.to_owned() };
        tell_all(&remote.lock_listeners(), &event);
    }
}

fn ended(listeners: &Listeners, session: &Session, reason: &DownReason) {
    session.end();
    if session.told.load(Ordering::Relaxed) {
        tell_all(listeners, &LinkEvent::Down(session.link.peer().clone(), reason.clone()));
    }
}

/// A frame of a peer, and where it came from.
struct Arrival<'a> {
    remote: &'a Weak<Remote>,
    session: &'a Arc<Session>,
    /// None: a bulk body.
    lane: Option<Lane>,
    bytes: usize,
}

impl Arrival<'_> {
    /// # Errors
    /// The rule that the peer broke.
    fn take(&self, frame: Frame<'_>) -> Result<(), String> {
        match frame {
            Frame::Hello { version, codec, window_bytes } => {
                let Some(remote) = self.remote.upgrade() else { return Ok(()) };
                let listeners = remote.lock_listeners();
                self.session.take_hello((version, codec), window_bytes)?;
                if !self.session.has_ended() {
                    self.session.counters.links.fetch_add(1, Ordering::Relaxed);
                    self.session.told.store(true, Ordering::Relaxed);
                    tell_all(&listeners, &LinkEvent::Up(self.session.link.peer().clone()));
                }
                Ok(())
            }
            Frame::Tell(tell) => self.tell(&tell),
            Frame::Answer { key, body } => self.session.answered(key, body),
            Frame::Fail { key, items, failure } => {
                self.session.failed(key, items, &failure);
                Ok(())
            }
            Frame::Cancel { key } => {
                self.session.cancelled(key);
                Ok(())
            }
            Frame::Credit { flow, bytes } => self.session.credited(flow, bytes),
            Frame::Item { key, body } => self.session.item(key, body),
            Frame::ItemCredit { key, items } => self.session.item_credited(key, items),
        }
    }

    fn tell(&self, tell: &Tell<'_>) -> Result<(), String> {
        let counters = &self.session.counters;
        let credited = self.lane != Some(Lane::Rounds);
        let entrance = self.session.entrance(tell.name, || self.remote.upgrade()?.gate(tell.name));
        let Some(entrance) = entrance else {
            counters.not_exposed.fetch_add(1, Ordering::Relaxed);
            if credited {
                // No flow is kept for a name that a peer made up.
                let cost = flow::cost(self.bytes, self.session.limits.window_bytes);
                give_credit(&self.session.link, hash_of(tell.name), cost, counters);
            }
            self.session.refuse(tell.request, Failure::NotExposed);
            return Ok(());
        };
        let permit = match credited.then(|| entrance.flow.charge(self.bytes)).transpose() {
            Ok(permit) => permit,
            Err(overdrawn) => {
                let limit = self.session.limits.window_bytes;
                return Err(format!("{} bytes wait for actor {:?} (window {limit})", overdrawn.bytes, tell.name));
            }
        };
        let counter = |failure: &Failure| match failure {
            Failure::UnknownType => &counters.unknown_type,
            Failure::MailboxFull { .. } => &counters.mailbox_full,
            Failure::DeadlineExceeded => &counters.deadline_exceeded,
            Failure::Undecodable => &counters.undecodable,
            _ => &counters.not_running,
        };
        if let Err(failure) = entrance.gate.take(self.session, tell, permit) {
            counter(&failure).fetch_add(1, Ordering::Relaxed);
            self.session.refuse(tell.request, failure);
        }
        Ok(())
    }
}
