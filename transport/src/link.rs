//! What the layer above sees of a peer: a link to send on, and a handler that is told what comes.
//!
//! A link is one authenticated connection to one life of one peer. It ends with that connection: a peer that comes back is a
//! new link. Nothing is sent again on its own: what was not acknowledged when a link ended may or may not have arrived.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// A node's name: what its certificate says. 1 to 63 of `a-z`, `0-9` and `-`, a letter first and no dash last: a DNS label, and one
/// that cannot be taken for a number, since TLS checks no names that could be addresses.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(Arc<str>);

/// Not a name for a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node name {0:?} is not 1 to 63 of a-z, 0-9 and -, a letter first and no dash last")]
pub struct NodeNameError(String);

/// Of a label in DNS.
pub(crate) const LABEL_BYTES_MAX: usize = 63;

pub(crate) fn is_label(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let starts_well = text.starts_with(|c: char| c.is_ascii_lowercase());
    starts_well && text.len() <= LABEL_BYTES_MAX && text.bytes().all(allowed) && !text.ends_with('-')
}

impl NodeName {
    /// # Errors
    /// A text that is no such label.
    pub fn new(name: &str) -> Result<Self, NodeNameError> {
        if !is_label(name) {
            return Err(NodeNameError(name.chars().take(80).collect()));
        }
        Ok(Self(Arc::from(name)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NodeName {
    type Error = NodeNameError;

    fn try_from(name: String) -> Result<Self, NodeNameError> {
        Self::new(&name)
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> Self {
        name.0.as_ref().to_owned()
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Who a peer is, as its certificate and its hello say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub name: NodeName,
    /// One life of its process; a later life has a greater number.
    pub incarnation: u64,
}

/// Frames of one lane keep their order; lanes are independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Ahead of all else: small, must never wait behind messages. Not limited by the queue's bytes, but a link on which far too
    /// much of it and of rounds waits is closed: its peer does not read.
    Control,
    /// Contributions of rounds: ahead of messages. Limited as control is.
    Rounds,
    /// Taken modulo the lanes that both sides have.
    Messages(u8),
}

/// Why a frame was not taken for sending.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("link to {peer} is down")]
    Down { peer: NodeName },
    #[error("frame for {peer} has {bytes} bytes (limit {limit})")]
    TooLarge { peer: NodeName, bytes: usize, limit: usize },
    #[error("{queued} bytes wait for {peer} (limit {limit})")]
    Full { peer: NodeName, queued: usize, limit: usize },
}

/// Why a link ended, as this side sees it. Only after [`DownReason::Goodbye`] and an orderly [`DownReason::Closed`] it is certain that
/// what was sent has arrived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownReason {
    /// The peer's mesh was closed in order.
    #[error("peer said goodbye")]
    Goodbye,
    /// This side's mesh was closed, or its link was.
    #[error("this side closed it")]
    Closed,
    /// By a later life of the peer, or by another connection that both sides keep.
    #[error("replaced by another connection")]
    Replaced,
    #[error("nothing heard for {0:?}")]
    Silent(Duration),
    /// The peer broke a rule of the mesh. The peer itself hears [`DownReason::Lost`], with the reason.
    #[error("protocol violation: {0}")]
    Violation(String),
    #[error("connection lost: {0}")]
    Lost(String),
}

/// An implementation of a link; [`Link`] is what others hold.
pub trait Port: Send + Sync + 'static {
    fn peer(&self) -> &Peer;
    /// See [`Link::send`].
    fn send(&self, lane: Lane, frame: Bytes) -> Result<(), LinkError>;
    /// See [`Link::send_bulk`].
    fn send_bulk(&self, body: Bytes) -> Result<(), LinkError>;
    /// See [`Link::send_datagram`].
    fn send_datagram(&self, datagram: Bytes) -> Result<(), LinkError>;
    /// See [`Link::queued_bytes`].
    fn queued_bytes(&self) -> usize;
    /// See [`Link::last_heard`].
    fn last_heard(&self) -> Duration;
    /// See [`Link::is_up`].
    fn is_up(&self) -> bool;
    /// See [`Link::close`].
    fn close(&self, reason: DownReason);
}

/// A link to one life of a peer. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Link(Arc<LinkShared>);

struct LinkShared {
    attached: OnceLock<Weak<dyn Any + Send + Sync>>,
    port: Arc<dyn Port>,
}

impl Link {
    pub fn new(port: Arc<dyn Port>) -> Self {
        Self(Arc::new(LinkShared { attached: OnceLock::new(), port }))
    }

    /// Keeps what the layer above knows of this link, for all its clones; the first call counts.
    pub fn attach<T: Send + Sync + 'static>(&self, what: &Arc<T>) {
        let weak: Weak<T> = Arc::downgrade(what);
        let _ = self.0.attached.set(weak);
    }

    /// What was attached, while it lives.
    pub fn attached<T: Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        self.0.attached.get()?.upgrade()?.downcast().ok()
    }

    pub fn peer(&self) -> &Peer {
        self.0.port.peer()
    }

    /// Queues a frame behind those of its lane; never waits.
    ///
    /// # Errors
    /// See [`LinkError`]; the frame was not taken.
    pub fn send(&self, lane: Lane, frame: Bytes) -> Result<(), LinkError> {
        self.0.port.send(lane, frame)
    }

    /// Sends a large body on a stream of its own, at the lowest priority: it holds nothing else up, and keeps no order with
    /// anything. Never waits; counted in the queue's bytes until it is sent.
    ///
    /// # Errors
    /// See [`LinkError`]; the body was not taken.
    pub fn send_bulk(&self, body: Bytes) -> Result<(), LinkError> {
        self.0.port.send_bulk(body)
    }

    /// May be lost, doubled or overtaken.
    ///
    /// # Errors
    /// A datagram that is larger than the path allows, or a link that is down.
    pub fn send_datagram(&self, datagram: Bytes) -> Result<(), LinkError> {
        self.0.port.send_datagram(datagram)
    }

    /// Bytes taken for sending and not handed to the connection yet.
    pub fn queued_bytes(&self) -> usize {
        self.0.port.queued_bytes()
    }

    /// Since anything came from the peer.
    pub fn last_heard(&self) -> Duration {
        self.0.port.last_heard()
    }

    pub fn is_up(&self) -> bool {
        self.0.port.is_up()
    }

    /// Ends the link at once: what is queued is lost.
    pub fn close(&self, reason: DownReason) {
        self.0.port.close(reason);
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Link").field(self.peer()).finish()
    }
}

/// Is told what comes from peers. Called from the mesh's tasks, for different lanes and links at the same time: it must not block or
/// panic, and what it does not want to take it drops or answers with [`Link::close`]. For one link `up` comes first and `down`
/// last, each once, and frames of one lane in their order.
pub trait Handler: Send + Sync + 'static {
    /// A peer was authenticated and said hello. At most one link to a name is up at any time.
    fn up(&self, link: &Link);
    fn down(&self, link: &Link, reason: &DownReason);
    fn frame(&self, link: &Link, lane: Lane, frame: Bytes);
    fn bulk(&self, link: &Link, body: Bytes);
    fn datagram(&self, link: &Link, datagram: Bytes);
    /// A peer was refused, or refused this node, before a link was up; `why` names both values. `peer` is its name where a
    /// certificate says it, and its address where none does.
    fn refused(&self, peer: &str, why: &str);
}
