//! One request from its head to its last byte: its span, its metrics and its name, ended however it ends.

use super::metrics::{ApiMetrics, End, Endpoint, STATUS_CLIENT_LEFT};
use super::trace::{RequestSpan, attribute};
use starling_actors::{AttributeValue, TraceContext};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by whoever works on a request; when the last of them lets go, the request is over and counted.
pub struct Scope {
    pub endpoint: Endpoint,
    /// The client's or a minted one; repeated in the answer.
    pub request_id: String,
    started: Instant,
    metrics: Arc<dyn ApiMetrics>,
    state: Mutex<State>,
}

struct State {
    span: Box<dyn RequestSpan>,
    /// Unknown until an answer is complete: if it never is, the client left.
    status: Option<u16>,
    error: Option<&'static str>,
    streamed: bool,
}

impl Scope {
    pub fn new(
        endpoint: Endpoint,
        request_id: String,
        metrics: Arc<dyn ApiMetrics>,
        span: Box<dyn RequestSpan>,
    ) -> Self {
        metrics.started(endpoint);
        let state = Mutex::new(State { span, status: None, error: None, streamed: false });
        Self { endpoint, request_id, started: Instant::now(), metrics, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is a single assignment, so the state is whole whoever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn metrics(&self) -> &dyn ApiMetrics {
        &*self.metrics
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn trace(&self) -> TraceContext {
        self.state().span.context()
    }

    pub fn rename(&self, name: String) {
        self.state().span.rename(name);
    }

    pub fn set(&self, key: &'static str, value: impl Into<AttributeValue>) {
        self.state().span.set(key, value.into());
    }

    /// The answer is a stream: it is complete when the stream says so, not when its head is sent.
    pub fn streams(&self) {
        self.state().streamed = true;
    }

    pub fn is_streamed(&self) -> bool {
        self.state().streamed
    }

    /// The answer is complete.
    pub fn answered(&self, status: u16) {
        self.state().status = Some(status);
    }

    /// The answer tells of an error.
    pub fn failed(&self, code: &'static str, message: &str) {
        let mut state = self.state();
        state.error = Some(code);
        state.span.fail(code, message);
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let elapsed = self.started.elapsed();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let status = state.status.unwrap_or(STATUS_CLIENT_LEFT);
        if state.status.is_none() {
            state.span.fail("client_left", "the client left before the answer was complete");
        }
        state.span.set(attribute::STATUS, u32::from(status).into());
        let error = state.error.or_else(|| state.status.is_none().then_some("client_left"));
        self.metrics.ended(self.endpoint, &End { status, error, elapsed, streamed: state.streamed });
    }
}
