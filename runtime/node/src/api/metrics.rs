//! What the API counts. The telemetry of the node implements it; every method may be left out.

use crate::text::Cost;
use starling_core::request::Finish;
use std::time::Duration;

/// Called for every request and every token event: cheap, never blocking.
pub trait ApiMetrics: Send + Sync + 'static {
    /// A request arrived. Each is followed by one `ended`.
    fn started(&self, _endpoint: Endpoint) {}

    /// A request is over: answered, failed, or the client left.
    fn ended(&self, _endpoint: Endpoint, _end: &End) {}

    /// A prompt of a generation was encoded.
    fn encoded(&self, _cost: &Cost) {}

    /// The first token's text is about to be sent; `elapsed` since the request's head was read (TTFT).
    fn first_token(&self, _elapsed: Duration) {}

    /// `tokens` more arrived, `gap` after those before (ITL is `gap / tokens`).
    fn next_tokens(&self, _gap: Duration, _tokens: u32) {}

    /// A generation is over, in whatever way: what it used.
    fn generated(&self, _usage: &Usage) {}
}

/// Counts nothing.
pub struct NoMetrics;

impl ApiMetrics for NoMetrics {}

/// A group of routes; the metric label `endpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Chat,
    Completions,
    Conversations,
    Models,
    Tokenize,
    Detokenize,
    Health,
    /// Paths that do not exist.
    Unknown,
}

impl Endpoint {
    pub const ALL: [Self; 8] = [
        Self::Chat,
        Self::Completions,
        Self::Conversations,
        Self::Models,
        Self::Tokenize,
        Self::Detokenize,
        Self::Health,
        Self::Unknown,
    ];

    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Conversations => "conversations",
            Self::Models => "models",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Health => "health",
            Self::Unknown => "unknown",
        }
    }
}

/// How a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The HTTP status; 499 when the client left before or while it was answered.
    pub status: u16,
    /// Metric label of the error; `None` when there was none. A stream that broke has status 200 and an error.
    pub error: Option<&'static str>,
    /// Since the request's head was read (E2E).
    pub elapsed: Duration,
    /// Whether the answer was a stream of events.
    pub streamed: bool,
}

/// Status of a request whose client left, as reverse proxies log it.
pub const STATUS_CLIENT_LEFT: u16 = 499;

/// What a generation used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was reused.
    pub cached_tokens: u32,
    pub generated_tokens: u32,
    /// `None` when it failed or was cancelled.
    pub finish: Option<Finish>,
}
