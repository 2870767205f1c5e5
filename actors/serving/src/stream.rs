//! The client's end of a request.

use crate::api::{StreamEvent, Submission};
use crate::ingress::Message;
use starling_actors::Address;
use starling_core::ids::TokenId;
use starling_core::ingress::{self, Ticket};
use starling_core::rejection::Rejection;
use starling_core::request::Finish;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How long a stream looks for an ingress that is being restarted, and how often.
const INGRESS_WAIT: Duration = Duration::from_secs(10);
const INGRESS_RETRY: Duration = Duration::from_millis(20);

/// Tokens of one request as they are produced. Dropping it cancels the request.
///
/// It outlives the ingress' actor: if that fails, the request goes to its successor with the tokens already yielded, and
/// the stream goes on behind them.
pub struct TokenStream {
    ingress: Address<Message>,
    tickets: Arc<AtomicU64>,
    submission: Submission,
    produced: Vec<TokenId>,
    open: Option<Open>,
    ended: bool,
}

struct Open {
    ticket: Ticket,
    events: UnboundedReceiver<StreamEvent>,
}

impl TokenStream {
    pub(crate) fn new(ingress: Address<Message>, tickets: Arc<AtomicU64>, submission: Submission) -> Self {
        let mut stream = Self { ingress, tickets, submission, produced: Vec::new(), open: None, ended: false };
        // If the ingress is down just now, `next` tries again.
        stream.submit();
        stream
    }

    /// The next event; `None` after `Ended` or `Failed`.
    pub async fn next(&mut self) -> Option<StreamEvent> {
        if self.ended {
            return None;
        }
        loop {
            if let Some(open) = &mut self.open {
                match open.events.recv().await {
                    Some(event) => return Some(self.note(event)),
                    // The ingress died with its end of the channel.
                    None => self.open = None,
                }
            }
            if !self.resubmit().await {
                self.ended = true;
                return Some(StreamEvent::Failed(Rejection::ShuttingDown));
            }
        }
    }

    /// Ends the request: the text is complete, whatever the rank would add.
    pub fn finish(mut self) {
        self.leave(Message::Finish);
    }

    fn note(&mut self, event: StreamEvent) -> StreamEvent {
        match &event {
            StreamEvent::Tokens(tokens) => self.produced.extend(tokens.iter().map(|t| t.token)),
            StreamEvent::Ended(_) | StreamEvent::Failed(_) => self.ended = true,
            StreamEvent::Placed(_) => {}
        }
        event
    }

    async fn resubmit(&mut self) -> bool {
        let until = tokio::time::Instant::now() + INGRESS_WAIT;
        while !self.submit() {
            if tokio::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(INGRESS_RETRY).await;
        }
        true
    }

    fn submit(&mut self) -> bool {
        let ticket = Ticket(self.tickets.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = unbounded_channel();
        let submission = ingress::Submission {
            ticket,
            prompt: Arc::clone(&self.submission.prompt),
            produced: self.produced.clone(),
            generation: self.submission.generation.clone(),
            conversation: self.submission.conversation,
            sub_agent: None,
            explicit: self.submission.explicit,
            priority: self.submission.priority,
            tenant: self.submission.tenant,
            head_tokens: 0,
        };
        let message = Message::Submit { submission: Box::new(submission), events: sender };
        let sent = self.ingress.tell(self.submission.trace, message).is_ok();
        if sent {
            self.open = Some(Open { ticket, events });
        }
        sent
    }

    fn leave(&mut self, message: impl Fn(Ticket) -> Message) {
        if let Some(open) = self.open.take()
            && !self.ended
        {
            self.ended = true;
            // An ingress that is down has forgotten the request already.
            let _ = self.ingress.tell(self.submission.trace, message(open.ticket));
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.leave(Message::Cancel);
    }
}

/// A whole answer, for callers that do not stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub tokens: Vec<TokenId>,
    pub finish: Finish,
}

impl TokenStream {
    /// Reads the stream to its end.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn complete(mut self) -> Result<Completion, Rejection> {
        while let Some(event) = self.next().await {
            match event {
                StreamEvent::Ended(finish) => {
                    return Ok(Completion { tokens: std::mem::take(&mut self.produced), finish });
                }
                StreamEvent::Failed(rejection) => return Err(rejection),
                StreamEvent::Placed(_) | StreamEvent::Tokens(_) => {}
            }
        }
        Err(Rejection::ShuttingDown)
    }
}
