//! What an actor sees of its surroundings while it handles a message.

use crate::address::{Address, Envelope, Mailbox};
use crate::entry::Entry;
use crate::hook::SpanRecord;
use crate::node::Node;
use crate::trace::TraceContext;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::{AbortHandle, JoinSet};

/// What outlives a message but not a machine.
pub(crate) struct Surroundings<M: Send + 'static> {
    pub node: Node,
    pub entry: Arc<Entry>,
    pub address: Address<M>,
    pub mailbox: Arc<Mailbox<M>>,
    /// Aborted when dropped, so timers die with the actor.
    pub timers: JoinSet<()>,
}

/// The surroundings of one message.
pub struct Context<'a, M: Send + 'static> {
    pub(crate) around: &'a mut Surroundings<M>,
    pub(crate) trace: TraceContext,
}

impl<M: Send + 'static> Context<'_, M> {
    /// The actor's own address, by name: what others may keep.
    pub fn address(&self) -> &Address<M> {
        &self.around.address
    }

    /// The node it lives on.
    pub fn node(&self) -> &Node {
        &self.around.node
    }

    /// The actor's name.
    pub fn name(&self) -> &str {
        &self.around.entry.name
    }

    /// What caused the message at hand.
    pub fn trace(&self) -> TraceContext {
        self.trace
    }

    /// Reports a finished span, unless its parent is not sampled.
    pub fn span(&self, span: SpanRecord) {
        self.around.node.span(span);
    }

    /// Sends `message` to this life of the actor after `delay`, under the trace of the message at hand, beyond the mailbox's
    /// limit. The timer dies with the machine: a restarted actor never sees it.
    pub fn send_after(&mut self, delay: Duration, message: M) -> Timer {
        let timers = &mut self.around.timers;
        // Timers that fired leave their results behind.
        while timers.try_join_next().is_some() {}
        let mailbox = Arc::clone(&self.around.mailbox);
        let trace = self.trace;
        Timer(timers.spawn(async move {
            tokio::time::sleep(delay).await;
            // A dying actor needs no reminder.
            let _ = mailbox.push_unlimited(Envelope::told(trace, message));
        }))
    }

    /// Ends the actor in order once the message at hand is handled. Messages still waiting are dropped.
    pub fn stop(&mut self) {
        self.around.mailbox.stop();
    }
}

/// A message to be sent later.
#[derive(Debug)]
pub struct Timer(AbortHandle);

impl Timer {
    /// Takes it back. A timer that fired already may still have its message in the mailbox.
    pub fn cancel(self) {
        self.0.abort();
    }
}
