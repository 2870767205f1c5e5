//! What a rank sends to another node's ingress, in order: messages that wait for credit there wait here.

use crate::ingress::Message;
use starling_actors::{Address, TraceContext};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Messages taken together at most, so that frames of steps that waited travel as one.
const MERGED_MAX: usize = 64;

/// The way to one ingress. It holds at most what the sequences of that ingress produce: each is bounded by its request.
pub(crate) struct Outlet {
    queue: UnboundedSender<(TraceContext, Message)>,
}

impl Outlet {
    pub(crate) fn to(ingress: Address<Message>) -> Self {
        let (queue, waiting) = unbounded_channel();
        tokio::spawn(forward(ingress, waiting));
        Self { queue }
    }

    pub(crate) fn send(&self, trace: TraceContext, message: Message) {
        // The task ends with this outlet only.
        let _ = self.queue.send((trace, message));
    }
}

async fn forward(ingress: Address<Message>, mut waiting: UnboundedReceiver<(TraceContext, Message)>) {
    let mut taken = Vec::new();
    while waiting.recv_many(&mut taken, MERGED_MAX).await > 0 {
        for (trace, message) in merge(&mut taken) {
            if let Err(error) = ingress.send(trace, message).await {
                // That ingress seals what ran here once it hears that the link is down.
                tracing::debug!(%error, "frames lost");
            }
        }
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
