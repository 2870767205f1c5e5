//! Addresses, which follow a name through restarts, and the mailboxes that they find there.

use crate::entry::Control;
use crate::node::NodeShared;
use crate::trace::TraceContext;
use arc_swap::ArcSwapOption;
use ractor::{ActorRef, ActorStatus, MessagingErr};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// Why a message was not delivered. It was not handled and will not be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Never started, between two lives, or ended.
    #[error("actor {name:?} is not running")]
    NotRunning { name: Arc<str> },
    #[error("mailbox of actor {name:?} is full (limit {limit} messages)")]
    Full { name: Arc<str>, limit: u32 },
    /// The name belongs to an actor with another message type.
    #[error("actor {name:?} takes {takes}, not {sent}")]
    WrongType { name: Arc<str>, takes: &'static str, sent: &'static str },
}

/// Where to send messages of type `M`: a name on a node. Cheap to clone, usable from any thread, and it outlives restarts:
/// each send goes to whoever runs under the name at that moment.
pub struct Address<M: Send + 'static> {
    slot: Arc<Slot<M>>,
}

impl<M: Send + 'static> Address<M> {
    pub(crate) fn new(slot: Arc<Slot<M>>) -> Self {
        Self { slot }
    }

    /// The name it sends to.
    pub fn name(&self) -> &str {
        &self.slot.name
    }

    pub(crate) fn name_shared(&self) -> &Arc<str> {
        &self.slot.name
    }

    /// Puts a message into the mailbox; never waits. Messages from one thread to one life of an actor keep their order, and each
    /// is handled at most once.
    ///
    /// # Errors
    /// See [`SendError`].
    ///
    /// # Cost
    /// No lock: a pointer load, a counter, one allocation and a queue push.
    pub fn tell(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        self.deliver(trace, message, |_| ())
    }

    /// Whether something runs under the name right now.
    pub fn is_running(&self) -> bool {
        self.slot.current.load().as_ref().is_some_and(|mailbox| !mailbox.is_dead())
    }

    /// Delivers and hands the mailbox that took the message to `taken`.
    pub(crate) fn deliver<T>(
        &self,
        trace: TraceContext,
        message: M,
        taken: impl FnOnce(&Arc<Mailbox<M>>) -> T,
    ) -> Result<T, SendError> {
        let mut envelope = Envelope::Tell { trace, message };
        let mut current = self.slot.current.load();
        while let Some(mailbox) = current.as_ref() {
            match mailbox.push(envelope) {
                Ok(()) => return Ok(taken(mailbox)),
                Err(PushError::Full) => {
                    return Err(SendError::Full { name: Arc::clone(&self.slot.name), limit: mailbox.limit });
                }
                Err(PushError::Dead(returned)) => envelope = returned,
            }
            // The mailbox died after it was found; a restart may have replaced it since.
            let next = self.slot.current.load();
            if next.as_ref().is_some_and(|next| Arc::ptr_eq(next, mailbox)) {
                break;
            }
            current = next;
        }
        Err(self.slot.why_nobody())
    }
}

impl<M: Send + 'static> Clone for Address<M> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.slot))
    }
}

impl<M: Send + 'static> fmt::Debug for Address<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Address").field(&self.slot.name).finish()
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

/// What travels through ractor's queue.
pub(crate) enum Envelope<M> {
    Tell {
        trace: TraceContext,
        message: M,
    },
    /// For tests: the actor panics when it comes to this.
    Panic,
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
}

pub(crate) enum PushError<M> {
    Full,
    Dead(Envelope<M>),
}

impl<M: Send + 'static> Mailbox<M> {
    pub fn new(actor: ActorRef<Envelope<M>>, limit: Option<u32>) -> Self {
        Self { actor, depth: AtomicU32::new(0), limit: limit.unwrap_or(u32::MAX), failed: AtomicBool::new(false) }
    }

    /// Queues within the limit.
    pub fn push(&self, envelope: Envelope<M>) -> Result<(), PushError<M>> {
        // Counted before it is queued, so that the handler never counts down first.
        if self.depth.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.depth.fetch_sub(1, Ordering::Relaxed);
            return Err(PushError::Full);
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
        self.depth.fetch_sub(1, Ordering::Relaxed);
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

impl<M: Send + 'static> Control for Mailbox<M> {
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
