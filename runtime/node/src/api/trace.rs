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

/// Names of attributes, from the OpenTelemetry semantic conventions for HTTP and generative AI, and our own.
pub mod attribute {
    pub const STATUS: &str = "http.response.status_code";
    pub const OPERATION: &str = "gen_ai.operation.name";
    pub const REQUEST_MODEL: &str = "gen_ai.request.model";
    pub const MAX_TOKENS: &str = "gen_ai.request.max_tokens";
    pub const TEMPERATURE: &str = "gen_ai.request.temperature";
    pub const TOP_P: &str = "gen_ai.request.top_p";
    pub const STREAM: &str = "gen_ai.request.stream";
    pub const RESPONSE_ID: &str = "gen_ai.response.id";
    pub const FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
    pub const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
    pub const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
    pub const CACHED_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
    pub const REQUEST_ID: &str = "starling.request.id";
    pub const NODE: &str = "starling.node";
    pub const RANK: &str = "starling.rank";
    pub const ATTEMPT: &str = "starling.attempt";
    pub const TIME_TO_FIRST_TOKEN_S: &str = "starling.time_to_first_token_s";
}
