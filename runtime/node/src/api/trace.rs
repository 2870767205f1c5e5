//! Where the spans of requests come from. The telemetry of the node implements it; the API only tells what happened.

use axum::http::HeaderMap;
use starling_actors::{AttributeValue, TraceContext};

/// Starts the outermost span of each request.
pub trait TraceSource: Send + Sync + 'static {
    /// Continues the trace of the header `traceparent`, or starts one. `name` is the route, such as `POST /v1/completions`.
    fn start_request(&self, headers: &HeaderMap, name: &'static str) -> Box<dyn RequestSpan>;
}

/// An open span. Dropping it ends it.
pub trait RequestSpan: Send + Sync {
    /// Parent of every span that the request causes.
    fn context(&self) -> TraceContext;

    /// Replaces the span's name once more is known: `chat smollm2`.
    fn rename(&mut self, name: String);

    /// Sets an attribute; the keys are the semantic conventions' or start with `starling.`.
    fn set(&mut self, key: &'static str, value: AttributeValue);

    /// Marks the span as failed. `kind` is short and stable (`error.type`), `message` is for people.
    fn fail(&mut self, kind: &'static str, message: &str);
}

/// Continues the client's trace and records nothing.
pub struct NoTrace;

impl TraceSource for NoTrace {
    fn start_request(&self, headers: &HeaderMap, _name: &'static str) -> Box<dyn RequestSpan> {
        Box::new(Passed(incoming(headers).unwrap_or(TraceContext::NONE)))
    }
}

/// The client's trace context, if the header `traceparent` is there and well-formed.
pub fn incoming(headers: &HeaderMap) -> Option<TraceContext> {
    let header = headers.get("traceparent")?.to_str().ok()?;
    TraceContext::parse_traceparent(header).ok()
}

struct Passed(TraceContext);

impl RequestSpan for Passed {
    fn context(&self) -> TraceContext {
        self.0
    }
    fn rename(&mut self, _name: String) {}
    fn set(&mut self, _key: &'static str, _value: AttributeValue) {}
    fn fail(&mut self, _kind: &'static str, _message: &str) {}
}
