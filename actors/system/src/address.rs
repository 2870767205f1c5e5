//! Addresses, which follow a name through restarts, and the mailboxes that they find there.

use crate::entry::Control;
use crate::node::NodeShared;
use crate::remote::{Permit, Posted, RemoteTarget};
use crate::trace::TraceContext;
use arc_swap::ArcSwapOption;
use ractor::{ActorRef, ActorStatus, MessagingErr};
use starling_transport::NodeName;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Notify;

/// What is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Its mailbox: the limit of its spec.
    MailboxMessages(u32),
    /// The credit of this node for that actor, in bytes.
    CreditBytes(u32),
    /// The queue of the link to its node, in bytes.
    QueueBytes(usize),
    /// Questions that wait for its node.
    OpenAsks(usize),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MailboxMessages(limit) => write!(f, "{limit} messages in its mailbox"),
            Self::CreditBytes(limit) => write!(f, "{limit} bytes on their way or in its mailbox"),
            Self::QueueBytes(limit) => write!(f, "{limit} bytes in the queue of its link"),
            Self::OpenAsks(limit) => write!(f, "{limit} questions that wait for its node"),
        }
    }
}

/// Why a message was not delivered. It was not handled and will not be. Actors of other nodes are named `name@node`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Never started, between two lives, or ended.
    #[error("actor {name:?} is not running")]
    NotRunning { name: Arc<str> },
    #[error("actor {name:?} is full (limit {limit})")]
    Full { name: Arc<str>, limit: Limit },
    /// The name belongs to an actor with another message type.
    #[error("actor {name:?} takes {takes}, not {sent}")]
    WrongType { name: Arc<str>, takes: &'static str, sent: &'static str },
    /// No link to its node is up.
    #[error("actor {name:?} cannot be reached: no link to node {node} is up")]
    NotConnected { name: Arc<str>, node: NodeName },
    /// Its node does not expose this name.
    #[error("actor {name:?} is not exposed by its node")]
    NotExposed { name: Arc<str> },
    /// Its node exposes the name with another type, or another version of it.
    #[error("actor {name:?} does not take {sent} as this node knows it")]
    UnknownType { name: Arc<str>, sent: &'static str },
    #[error("message for actor {name:?} cannot be encoded: {reason}")]
    Unencodable { name: Arc<str>, reason: String },
    #[error("message could not be decoded by the node of actor {name:?}")]
    Undecodable { name: Arc<str> },
    #[error("message for actor {name:?} has {bytes} bytes (limit {limit})")]
    TooLarge { name: Arc<str>, bytes: usize, limit: usize },
}

/// How messages travel to another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// On the lane of the target's name, within the credit that its node gives for it.
    #[default]
    Messages,
    /// Ahead of all messages and without credit: for what is small and what the protocol itself bounds.
    Rounds,
}

/// Where to send messages of type `M`: a name on this node or on another. Cheap to clone, usable from any thread, and it outlives
/// restarts and links: each send goes to whoever runs under the name at that moment.
pub struct Address<M: Send + 'static> {
    target: Target<M>,
}

enum Target<M: Send + 'static> {
    Local(Arc<Slot<M>>),
    Remote(Arc<RemoteTarget<M>>),
}

impl<M: Send + 'static> Address<M> {
    pub(crate) fn local(slot: Arc<Slot<M>>) -> Self {
        Self { target: Target::Local(slot) }
    }

    pub(crate) fn remote(target: RemoteTarget<M>) -> Self {
        Self { target: Target::Remote(Arc::new(target)) }
    }

    /// The name it sends to.
    pub fn name(&self) -> &str {
        match &self.target {
            Target::Local(slot) => &slot.name,
            Target::Remote(remote) => remote.name(),
        }
    }

    /// For errors.
    pub(crate) fn label(&self) -> &Arc<str> {
        match &self.target {
            Target::Local(slot) => &slot.name,
            Target::Remote(remote) => remote.label(),
        }
    }

    /// Puts a message into the mailbox, or on its way to another node; never waits. Messages from one thread to one life of an
    /// actor keep their order, and each is handled at most once. To another node bodies of more than 64 KiB keep no order.
    ///
    /// # Errors
    /// See [`SendError`]. A message that is on its way to another node may still be lost.
    ///
    /// # Cost
    /// On this node no lock: a pointer load, a counter, one allocation and a queue push.
    pub fn tell(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        match &self.target {
            Target::Local(slot) => slot.tell(trace, message),
            Target::Remote(remote) => remote.post(trace, &message, None).map(drop),
        }
    }

    /// Like [`Address::tell`], but waits while the mailbox is at its limit, or for credit where the actor is on another node.
    ///
    /// # Errors
    /// See [`SendError`]; never `Full` for want of room or credit.
    pub async fn send(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        match &self.target {
            Target::Local(slot) => slot.send(trace, message).await,
            Target::Remote(remote) => remote.post_patiently(trace, message).await,
        }
    }

    /// The same address by another carrier. On this node both are the same.
    pub fn over(&self, carrier: Carrier) -> Self {
        match &self.target {
            Target::Local(_) => self.clone(),
            Target::Remote(remote) => Self::remote(remote.over(carrier)),
        }
    }

    /// Whether something runs under the name right now; for an actor of another node, whether messages can be sent to that node.
    pub fn is_running(&self) -> bool {
        match &self.target {
            Target::Local(slot) => slot.is_running(),
            Target::Remote(remote) => remote.is_linked(),
        }
    }

    /// Tells beyond the mailbox's limit, for what must not be lost to a full mailbox. Whoever uses it bounds by other means what
    /// may wait there.
    pub fn notify(&self, message: M) {
        let trace = TraceContext::NONE;
        // Nobody is there to be told: it asks again when it starts.
        let _ = match &self.target {
            Target::Local(slot) => slot.deliver(Envelope::told(trace, message), Limited::No, |_| ()).map_err(drop),
            Target::Remote(remote) => remote.post(trace, &message, None).map(drop).map_err(drop),
        };
    }

    /// Sends a message that holds the asking side's reply.
    pub(crate) fn pose(
        &self,
        trace: TraceContext,
        deadline: Option<Duration>,
        message: M,
    ) -> Result<Posed<M>, SendError> {
        match &self.target {
            Target::Local(slot) => {
                let posed = slot.deliver(Envelope::told(trace, message), Limited::Yes, Arc::clone);
                posed.map(Posed::Local).map_err(|refused| refused.error)
            }
            Target::Remote(remote) => remote.post(trace, &message, deadline).map(Posed::Remote),
        }
    }
}

/// A question that was delivered.
pub(crate) enum Posed<M: Send + 'static> {
    Local(Arc<Mailbox<M>>),
    Remote(Posted),
}

impl<M: Send + 'static> Clone for Address<M> {
    fn clone(&self) -> Self {
        match &self.target {
            Target::Local(slot) => Self::local(Arc::clone(slot)),
            Target::Remote(remote) => Self { target: Target::Remote(Arc::clone(remote)) },
        }
    }
}

impl<M: Send + 'static> fmt::Debug for Address<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Address").field(self.label()).finish()
    }
}

/// The place of a name on its node: all addresses of one name and type share it.
pub(crate) struct Slot<M: Send + 'static> {
    name: Arc<str>,
    node: Weak<NodeShared>,
    current: ArcSwapOption<Mailbox<M>>,
}

impl<M: Send + 'static> Slot<M> {
    pub fn new(name: Arc<str>, node: Weak<NodeShared>) -> Self {
        Self { name, node, current: ArcSwapOption::empty() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// From now on the name leads to `mailbox`.
    pub fn publish(&self, mailbox: Arc<Mailbox<M>>) {
        self.current.store(Some(mailbox));
    }

    /// Forgets `mailbox`, unless a successor has taken its place.
    pub fn withdraw(&self, mailbox: &Arc<Mailbox<M>>) {
        let current = self.current.load();
        if current.as_ref().is_some_and(|now| Arc::ptr_eq(now, mailbox)) {
            self.current.compare_and_swap(&current, None);
        }
        // Whoever waits for room looks again, and finds a successor or nobody.
        mailbox.room.notify_waiters();
    }

    fn is_running(&self) -> bool {
        self.current.load().as_ref().is_some_and(|mailbox| !mailbox.is_dead())
    }

    fn tell(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        self.deliver(Envelope::told(trace, message), Limited::Yes, |_| ()).map_err(|refused| refused.error)
    }

    async fn send(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        let mut envelope = Envelope::told(trace, message);
        loop {
            let refused = match self.deliver(envelope, Limited::Yes, |_| ()) {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            };
            let Some(full) = refused.full else {
                return Err(refused.error);
            };
            envelope = refused.envelope;
            full.room().await;
        }
    }

    /// Delivers to whoever runs. `meet` sees each mailbox before it is tried; what it made of the one that took the message comes
    /// back.
    pub fn deliver<T>(
        &self,
        mut envelope: Envelope<M>,
        limited: Limited,
        mut meet: impl FnMut(&Arc<Mailbox<M>>) -> T,
    ) -> Result<T, Refused<M>> {
        let mut current = self.current.load();
        while let Some(mailbox) = current.as_ref() {
            let met = meet(mailbox);
            let pushed = match limited {
                Limited::Yes => mailbox.push(envelope),
                Limited::No => mailbox.push_unlimited(envelope),
            };
            match pushed {
                Ok(()) => return Ok(met),
                Err(PushError::Full(envelope)) => {
                    let limit = Limit::MailboxMessages(mailbox.limit);
                    let error = SendError::Full { name: Arc::clone(&self.name), limit };
                    return Err(Refused { error, envelope, full: Some(Arc::clone(mailbox)) });
                }
                Err(PushError::Dead(returned)) => envelope = returned,
            }
            // The mailbox died after it was found; a restart may have replaced it since.
            let next = self.current.load();
            if next.as_ref().is_some_and(|next| Arc::ptr_eq(next, mailbox)) {
                break;
            }
            current = next;
        }
        Err(Refused { error: self.why_nobody(), envelope, full: None })
    }

    fn why_nobody(&self) -> SendError {
        let name = Arc::clone(&self.name);
        let takes = self.node.upgrade().and_then(|node| node.other_message_type::<M>(&name));
        match takes {
            Some(takes) => SendError::WrongType { name, takes, sent: std::any::type_name::<M>() },
            None => SendError::NotRunning { name },
        }
    }
}

impl<M: Send + 'static> Drop for Slot<M> {
    fn drop(&mut self) {
        if let Some(node) = self.node.upgrade() {
            node.forget_slot::<M>(&self.name);
        }
    }
}

/// Whether the mailbox's limit holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limited {
    Yes,
    /// For what must not be lost to a full mailbox.
    No,
}

/// A message that comes back.
pub(crate) struct Refused<M: Send + 'static> {
    pub error: SendError,
    pub envelope: Envelope<M>,
    /// The mailbox that had no room.
    full: Option<Arc<Mailbox<M>>>,
}

/// What travels through ractor's queue.
pub(crate) enum Envelope<M> {
    Tell {
        trace: TraceContext,
        message: M,
        /// The credit of a message from another node, given back when it leaves the mailbox.
        permit: Option<Permit>,
    },
    /// For tests: the actor panics when it comes to this.
    Panic,
}

impl<M> Envelope<M> {
    /// A message of this node.
    pub fn told(trace: TraceContext, message: M) -> Self {
        Self::Tell { trace, message, permit: None }
    }
}

// The only place that meets ractor's `cluster` feature, under which no type is a message by itself.
impl<M: Send + 'static> ractor::Message for Envelope<M> {}

/// The mailbox of one life of an actor.
pub(crate) struct Mailbox<M: Send + 'static> {
    actor: ActorRef<Envelope<M>>,
    depth: AtomicU32,
    /// `u32::MAX`: no limit.
    limit: u32,
    /// Set when the machine failed, before ractor itself knows.
    failed: AtomicBool,
    /// Senders that wait for room.
    waiting: AtomicU32,
    room: Notify,
}

pub(crate) enum PushError<M> {
    Full(Envelope<M>),
    Dead(Envelope<M>),
}

impl<M: Send + 'static> Mailbox<M> {
    pub fn new(actor: ActorRef<Envelope<M>>, limit: Option<u32>) -> Self {
        Self {
            actor,
            depth: AtomicU32::new(0),
            limit: limit.unwrap_or(u32::MAX),
            failed: AtomicBool::new(false),
            waiting: AtomicU32::new(0),
            room: Notify::new(),
        }
    }

    /// Queues within the limit.
    pub fn push(&self, envelope: Envelope<M>) -> Result<(), PushError<M>> {
        // Counted before it is queued, so that the handler never counts down first.
        if self.depth.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.depth.fetch_sub(1, Ordering::Relaxed);
            return Err(PushError::Full(envelope));
        }
        self.enqueue(envelope)
    }

    /// Queues beyond the limit: an actor's own timers must not be lost to a full mailbox.
    pub fn push_unlimited(&self, envelope: Envelope<M>) -> Result<(), PushError<M>> {
        self.depth.fetch_add(1, Ordering::Relaxed);
        self.enqueue(envelope)
    }

    fn enqueue(&self, envelope: Envelope<M>) -> Result<(), PushError<M>> {
        let error = match self.actor.send_message(envelope) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        self.depth.fetch_sub(1, Ordering::Relaxed);
        match error {
            MessagingErr::SendErr(envelope) => Err(PushError::Dead(envelope)),
            // A local mailbox is made for its own message type and has only a sending side here.
            MessagingErr::ChannelClosed | MessagingErr::InvalidActorType => {
                unreachable!("a typed local mailbox refused its own message type")
            }
        }
    }

    /// The actor took one message out.
    pub fn taken(&self) {
        // Ordered with `room`: either this sees who waits, or that sees the room.
        self.depth.fetch_sub(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.room.notify_waiters();
        }
    }

    /// Waits until there may be room, or the mailbox is dead.
    async fn room(&self) {
        let waiting = Waiting::new(&self.waiting);
        let room = self.room.notified();
        tokio::pin!(room);
        // Registered before the look, so that no wake-up falls between.
        room.as_mut().enable();
        if self.depth.load(Ordering::SeqCst) >= self.limit && !self.is_dead() {
            room.await;
        }
        drop(waiting);
    }

    pub fn mark_failed(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Nothing more will be handled.
    pub fn is_dead(&self) -> bool {
        self.failed.load(Ordering::Acquire) || self.actor.get_status() >= ActorStatus::Stopping
    }

    /// Ends the actor after the message at hand.
    pub fn stop(&self) {
        self.actor.stop(None);
    }
}

/// Counts one who waits.
struct Waiting<'a>(&'a AtomicU32);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<M: Send + 'static> Control for Mailbox<M> {
    fn is_dead(&self) -> bool {
        Mailbox::is_dead(self)
    }

    fn depth(&self) -> u32 {
        self.depth.load(Ordering::Relaxed)
    }

    fn limit(&self) -> Option<u32> {
        (self.limit != u32::MAX).then_some(self.limit)
    }

    fn inject_panic(&self) -> bool {
        self.push_unlimited(Envelope::Panic).is_ok()
    }
}
