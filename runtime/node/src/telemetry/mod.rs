//! What a node tells about itself: logs, metrics, spans, and the admin listener that serves them.

pub mod admin;
mod feed;
pub mod logs;
pub mod metrics;
pub mod names;
mod spans;

pub use admin::{DebugSource, admin_router};
pub use feed::{Metrics, Sight};
pub use metrics::Identity;
pub use spans::{Spans, SpansError};

use crate::api::trace::{NoTrace, RequestSpan, TraceSource};
use axum::http::HeaderMap;
use starling_actors::{Hook, SpanRecord};
use std::sync::Arc;
use std::time::Duration;

/// How long unsent spans may hold up the end of the process.
const FLUSH_WAIT: Duration = Duration::from_secs(3);

/// Metrics and spans together: the hook of the actors and the source of request spans.
#[derive(Clone, Debug)]
pub struct Telemetry {
    pub metrics: Arc<Metrics>,
    spans: Option<Spans>,
}

impl Telemetry {
    /// Call it inside a tokio runtime.
    ///
    /// # Errors
    /// A collector's address that cannot be used. A collector that does not answer is no error.
    pub fn new(identity: Identity, node: &str, otlp: Option<&str>) -> Result<Self, SpansError> {
        let spans = Spans::from_settings(otlp, node)?;
        Ok(Self { metrics: Arc::new(Metrics::new(identity)), spans })
    }

    /// Sends what spans are left, for three seconds at most. Later spans are dropped.
    pub async fn shutdown(&self) {
        if let Some(spans) = self.spans.clone() {
            let _ = tokio::task::spawn_blocking(move || spans.shutdown(FLUSH_WAIT)).await;
        }
    }
}

impl Hook for Telemetry {
    fn handled(&self, actor: &str, _kind: &'static str, seconds: f64) {
        self.metrics.actor_handled(actor, seconds);
    }

    fn span(&self, span: SpanRecord) {
        if let Some(spans) = &self.spans {
            spans.finished(span);
        }
    }

    fn restarted(&self, actor: &str) {
        self.metrics.actor_restarted(actor);
    }

    fn failed(&self, actor: &str) {
        self.metrics.actor_failed(actor);
    }
}

impl TraceSource for Telemetry {
    fn start_request(&self, headers: &HeaderMap, name: &'static str) -> Box<dyn RequestSpan> {
        match &self.spans {
            Some(spans) => spans.start_request(headers, name),
            None => NoTrace.start_request(headers, name),
        }
    }
}
