//! The client's end of a request.

use crate::api::{StreamEvent, Submission};
use crate::ingress::Message;
use starling_actors::Address;
use starling_core::ids::TokenId;
use starling_core::ingress::{self, Ticket};
use starling_core::rejection::Rejection;
use starling_core::request::Finish;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, Sleep, sleep};

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
    /// Set when the tree is stopped for good: nobody to look for.
    stopped: Arc<AtomicBool>,
    submission: Submission,
    produced: Vec<TokenId>,
    state: State,
    ended: bool,
}

enum State {
    Open(Open),
    /// The ingress is down: try again until it is back.
    Looking {
        until: Instant,
        retry: Option<Pin<Box<Sleep>>>,
    },
}

impl State {
    fn looking() -> Self {
        Self::Looking { until: Instant::now() + INGRESS_WAIT, retry: None }
    }
}

struct Open {
    ticket: Ticket,
    events: UnboundedReceiver<StreamEvent>,
}

impl TokenStream {
    pub(crate) fn new(
        ingress: Address<Message>,
        (tickets, stopped): (Arc<AtomicU64>, Arc<AtomicBool>),
        submission: Submission,
    ) -> Self {
        let mut stream =
            Self { ingress, tickets, stopped, submission, produced: Vec::new(), state: State::looking(), ended: false };
        // If the ingress is down just now, `next` tries again.
        stream.submit();
        stream
    }

    /// The next event; `None` after `Ended` or `Failed`.
    pub async fn next(&mut self) -> Option<StreamEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`next`](Self::next), for callers that poll.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            match &mut self.state {
                State::Open(open) => match ready!(open.events.poll_recv(context)) {
                    Some(event) => return Poll::Ready(Some(self.note(event))),
                    // The ingress died with its end of the channel.
                    None => self.state = State::looking(),
                },
                State::Looking { until, retry } => {
                    let until = *until;
                    if let Some(sleep) = retry {
                        ready!(sleep.as_mut().poll(context));
                    }
                    if self.submit() {
                        continue;
                    }
                    if self.stopped.load(Ordering::Relaxed) || Instant::now() >= until {
                        self.ended = true;
                        return Poll::Ready(Some(StreamEvent::Failed(Rejection::ShuttingDown)));
                    }
                    self.state = State::Looking { until, retry: Some(Box::pin(sleep(INGRESS_RETRY))) };
                }
            }
        }
    }

    /// Ends the request: the text is complete, whatever the rank would add.
    pub fn finish(mut self) {
        self.leave(Message::Finish);
    }

    fn note(&mut self, event: StreamEvent) -> StreamEvent {
        match &event {
            StreamEvent::Tokens(tokens) => self.produced.extend(tokens.iter().map(|t| t.drawn.token)),
            StreamEvent::Ended(_) | StreamEvent::Failed(_) => self.ended = true,
            StreamEvent::Placed(_) => {}
        }
        event
    }

    fn submit(&mut self) -> bool {
        let ticket = Ticket(self.tickets.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = unbounded_channel();
        let submission = ingress::Submission {
            ticket,
            prompt: Arc::clone(&self.submission.prompt),
            keys: self.submission.keys.clone(),
            produced: self.produced.clone(),
            generation: self.submission.generation.clone(),
            conversation: self.submission.conversation,
            sub_agent: None,
            explicit: self.submission.explicit,
            priority: self.submission.priority,
            tenant: self.submission.tenant,
            child: self.submission.child,
        };
        let names = Arc::clone(&self.submission.names);
        let message = Message::Submit { submission: Box::new(submission), names, events: sender };
        let sent = self.ingress.tell(self.submission.trace, message).is_ok();
        if sent {
            self.state = State::Open(Open { ticket, events });
        }
        sent
    }

    fn leave(&mut self, message: impl Fn(Ticket) -> Message) {
        if let State::Open(open) = &self.state
            && !std::mem::replace(&mut self.ended, true)
        {
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
