//! What a rank sends to another node's ingress, in order: messages for which there is no credit wait here.

use crate::ingress::Message;
use starling_actors::{Address, SendError, TraceContext};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Messages taken together at most, so that frames of steps that waited travel as one.
const MERGED_MAX: usize = 64;

/// The way to one ingress. It holds at most what the sequences of that ingress produce: each is bounded by its request.
pub(crate) struct Outlet {
    ingress: Address<Message>,
    queue: UnboundedSender<(TraceContext, Message)>,
    /// Messages that the task has not sent yet: while there are any, all go behind them.
    waiting: Arc<AtomicUsize>,
}

impl Outlet {
    pub(crate) fn to(ingress: Address<Message>) -> Self {
        let (queue, inbox) = unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        tokio::spawn(forward(ingress.clone(), inbox, Arc::clone(&waiting)));
        Self { ingress, queue, waiting }
    }

    pub(crate) fn send(&self, trace: TraceContext, message: Message) {
        // Only this side adds, so nothing can come between the look and the send.
        if self.waiting.load(Ordering::Acquire) == 0
            && let Some(copy) = message.to_send()
        {
            match self.ingress.tell(trace, copy) {
                Err(SendError::Full { .. }) => {}
                Ok(()) => return,
                Err(error) => return lost(&error),
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The task ends with this outlet only.
        let _ = self.queue.send((trace, message));
    }
}

/// The ingress seals what ran here once it hears that the link is down.
fn lost(error: &SendError) {
    tracing::debug!(%error, "frames lost");
}

async fn forward(
    ingress: Address<Message>,
    mut inbox: UnboundedReceiver<(TraceContext, Message)>,
    waiting: Arc<AtomicUsize>,
) {
    let mut taken = Vec::new();
    loop {
        let count = inbox.recv_many(&mut taken, MERGED_MAX).await;
        if count == 0 {
            return;
        }
        for (trace, message) in merge(&mut taken) {
            if let Err(error) = ingress.send(trace, message).await {
                lost(&error);
            }
        }
        waiting.fetch_sub(count, Ordering::Release);
    }
}

/// Frames that follow each other, as one message.
fn merge(taken: &mut Vec<(TraceContext, Message)>) -> Vec<(TraceContext, Message)> {
    let mut merged: Vec<(TraceContext, Message)> = Vec::with_capacity(1);
    for (trace, message) in taken.drain(..) {
        match (merged.last_mut(), message) {
            (Some((_, Message::Frames(earlier))), Message::Frames(frames)) => earlier.extend(frames),
            (_, message) => merged.push((trace, message)),
        }
    }
    merged
}
