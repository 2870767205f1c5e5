//! Server-sent events: one for each event of tokens, each flushed at once.

use super::answer::{Answer, Step};
use super::error::ApiError;
use super::reply::Head;
use super::scope::Scope;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_core::Stream;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

const DONE: &str = "data: [DONE]\n\n";

/// The body of a streamed answer. Dropping it, which is what the server does when the client is gone, cancels the request.
struct Chunks {
    answer: Answer,
    head: Head,
    scope: Arc<Scope>,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Opening,
    Open,
    Closed,
}

/// The response that streams an answer.
pub fn response(answer: Answer, head: Head, scope: Arc<Scope>) -> Response {
    scope.streams();
    let chunks = Chunks { answer, head, scope, phase: Phase::Opening };
    let mut response = Response::new(Body::from_stream(chunks));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks reverse proxies not to collect events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl Stream for Chunks {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.phase == Phase::Opening {
            this.phase = Phase::Open;
            let opening: String = (0..this.head.choices)
                .filter_map(|choice| this.head.opening(choice))
                .map(|json| event(&json))
                .collect();
            if !opening.is_empty() {
                return Poll::Ready(Some(Ok(opening.into())));
            }
        }
        while this.phase == Phase::Open {
            let events = match ready!(this.answer.poll_step(context)) {
                Step::Placed(_) => continue,
                Step::More { choice, piece } => event(&this.head.more(choice, &piece)),
                Step::Ended { choice, finish } => event(&this.head.closing(choice, finish)),
                Step::Done => {
                    this.phase = Phase::Closed;
                    this.scope.answered(200);
                    let usage = this.head.usage(this.answer.usage());
                    usage.as_deref().map(event).unwrap_or_default() + DONE
                }
                Step::Failed(error) => {
                    this.phase = Phase::Closed;
                    this.fail(&error)
                }
            };
            return Poll::Ready(Some(Ok(events.into())));
        }
        Poll::Ready(None)
    }
}

impl Chunks {
    /// The status went out long ago: the error is the last event, and no `[DONE]` follows it.
    fn fail(&self, error: &ApiError) -> String {
        self.scope.failed(error.row().code, &error.to_string());
        self.scope.answered(200);
        event(&serde_json::to_string(&error.body()).expect("strings are always JSON"))
    }
}

/// JSON has no line breaks of its own, so one line of data is enough.
fn event(json: &str) -> String {
    format!("data: {json}\n\n")
}
