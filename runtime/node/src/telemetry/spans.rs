//! Spans to an OTLP collector.
//!
//! Spans are finished values here (the actors report them with their times), so they go straight to the batch processor:
//! it queues them without blocking, drops what does not fit and exports on a thread of its own. A dead collector costs
//! nothing but its spans.

use super::names;
use crate::api::trace::{RequestSpan, TraceSource, incoming};
use axum::http::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, Config, SamplingDecision, SpanData, SpanEvents, SpanLinks, SpanProcessor,
};
use starling_actors::{AttributeValue, SpanRecord, TraceContext};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Why spans are not exported although they should be.
#[derive(Debug, thiserror::Error)]
#[error("cannot export spans to {endpoint:?}: {why}")]
pub struct SpansError {
    endpoint: String,
    why: String,
}

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

/// Exports spans. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Spans(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    processor: BatchSpanProcessor,
    /// The SDK's reading of `OTEL_TRACES_SAMPLER`; parent-based by default.
    config: Config,
    scope: InstrumentationScope,
}

impl Spans {
    /// The exporter that the configuration or the standard variables ask for, if any. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// An endpoint that is no address, or one that needs TLS.
    pub fn from_settings(otlp: Option<&str>, node: &str) -> Result<Option<Self>, SpansError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let disabled = variable("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER").is_some_and(|v| v == "none");
        let from_env = variable(TRACES_ENDPOINT).or_else(|| variable(ENDPOINT));
        if disabled || (from_env.is_none() && otlp.is_none()) {
            return Ok(None);
        }
        let mut exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic();
        // The SDK reads the variables itself, with all that belongs to them.
        if let (None, Some(endpoint)) = (&from_env, otlp) {
            exporter = exporter.with_endpoint(endpoint);
        }
        let endpoint = from_env.as_deref().or(otlp).unwrap_or_default().to_owned();
        let exporter = exporter.build().map_err(|e| SpansError { endpoint, why: e.to_string() })?;
        let mut processor = BatchSpanProcessor::builder(exporter).build();
        processor.set_resource(&resource(node));
        let scope = InstrumentationScope::builder("starling").with_version(env!("CARGO_PKG_VERSION")).build();
        Ok(Some(Self(Arc::new(Inner { processor, config: Config::default(), scope }))))
    }

    /// Exports a span that an actor finished.
    pub fn finished(&self, span: SpanRecord) {
        let inner = &self.0;
        let id = span.span_id.map_or_else(|| inner.config.id_generator.new_span_id(), id_of);
        let attributes = span.attributes.into_iter().map(|(key, value)| attribute(key, value)).collect();
        inner.processor.on_end(SpanData {
            span_context: context_of(&span.parent.child(u64::from_be_bytes(id.to_bytes()))),
            parent_span_id: id_of(span.parent.span_id),
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: span.name.into(),
            start_time: span.start,
            end_time: span.end,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: inner.scope.clone(),
        });
    }

    /// Sends what is queued and stops. Waits at most `timeout`; blocks, so not for an async thread.
    pub fn shutdown(&self, timeout: Duration) {
        if let Err(e) = self.0.processor.shutdown_with_timeout(timeout) {
            tracing::warn!("spans left unsent: {e}");
        }
    }

    /// The context of a new span below `parent`, and whether it is recorded.
    fn new_context(&self, parent: Option<TraceContext>, name: &str) -> (TraceContext, bool) {
        let config = &self.0.config;
        let trace_id = parent.map_or_else(|| config.id_generator.new_trace_id(), |p| trace_id_of(p.trace_id));
        let otel_parent = parent.map_or_else(Context::new, |parent| {
            let parent = context_of(&parent);
            let remote = SpanContext::new(
                parent.trace_id(),
                parent.span_id(),
                parent.trace_flags(),
                true,
                TraceState::default(),
            );
            Context::new().with_remote_span_context(remote)
        });
        let sampled = config.sampler.should_sample(Some(&otel_parent), trace_id, name, &SpanKind::Server, &[], &[]);
        let is_recorded = sampled.decision == SamplingDecision::RecordAndSample;
        let span_id = config.id_generator.new_span_id();
        let context = TraceContext {
            trace_id: u128::from_be_bytes(trace_id.to_bytes()),
            span_id: u64::from_be_bytes(span_id.to_bytes()),
            flags: u8::from(is_recorded),
        };
        (context, is_recorded)
    }
}

impl TraceSource for Spans {
    fn start_request(&self, headers: &HeaderMap, name: &'static str) -> Box<dyn RequestSpan> {
        let parent = incoming(headers);
        let (context, is_recorded) = self.new_context(parent, name);
        Box::new(OpenSpan {
            spans: self.clone(),
            context,
            parent: parent.map_or(0, |parent| parent.span_id),
            recorded: is_recorded.then(|| Recorded {
                name: name.to_owned(),
                start: SystemTime::now(),
                attributes: Vec::new(),
                status: Status::Unset,
            }),
        })
    }
}

/// The span of a request, exported when it is dropped.
struct OpenSpan {
    spans: Spans,
    context: TraceContext,
    /// 0 for none.
    parent: u64,
    /// `None` under a trace that is not sampled.
    recorded: Option<Recorded>,
}

struct Recorded {
    name: String,
    start: SystemTime,
    attributes: Vec<KeyValue>,
    status: Status,
}

impl RequestSpan for OpenSpan {
    fn context(&self) -> TraceContext {
        self.context
    }

    fn rename(&mut self, name: String) {
        if let Some(recorded) = &mut self.recorded {
            recorded.name = name;
        }
    }

    fn set(&mut self, key: &'static str, value: AttributeValue) {
        let Some(recorded) = &mut self.recorded else { return };
        let new = attribute(key, value);
        match recorded.attributes.iter_mut().find(|old| old.key == new.key) {
            Some(old) => *old = new,
            None => recorded.attributes.push(new),
        }
    }

    fn fail(&mut self, kind: &'static str, message: &str) {
        self.set(names::ERROR_TYPE, kind.into());
        if let Some(recorded) = &mut self.recorded {
            recorded.status = Status::error(message.to_owned());
        }
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let Some(recorded) = self.recorded.take() else { return };
        let inner = &self.spans.0;
        inner.processor.on_end(SpanData {
            span_context: context_of(&self.context),
            parent_span_id: id_of(self.parent),
            parent_span_is_remote: self.parent != 0,
            span_kind: SpanKind::Server,
            name: recorded.name.into(),
            start_time: recorded.start,
            end_time: SystemTime::now(),
            attributes: recorded.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: recorded.status,
            instrumentation_scope: inner.scope.clone(),
        });
    }
}

/// Who reports: the node, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` says otherwise.
fn resource(node: &str) -> Resource {
    let given = Resource::builder().build();
    let is_given = |key: &'static str| given.get(&key.into());
    let named = is_given(names::SERVICE_NAME).filter(|name| !name.as_str().starts_with("unknown_service"));
    let mut resource = Resource::builder();
    if named.is_none() {
        resource = resource.with_service_name("starling");
    }
    for (key, value) in [(names::SERVICE_INSTANCE_ID, node), (names::SERVICE_VERSION, env!("CARGO_PKG_VERSION"))] {
        if is_given(key).is_none() {
            resource = resource.with_attribute(KeyValue::new(key, value.to_owned()));
        }
    }
    resource.build()
}

fn trace_id_of(id: u128) -> TraceId {
    TraceId::from_bytes(id.to_be_bytes())
}

fn id_of(id: u64) -> SpanId {
    SpanId::from_bytes(id.to_be_bytes())
}

fn context_of(context: &TraceContext) -> SpanContext {
    SpanContext::new(
        trace_id_of(context.trace_id),
        id_of(context.span_id),
        TraceFlags::new(context.flags),
        false,
        TraceState::default(),
    )
}

fn attribute(key: &'static str, value: AttributeValue) -> KeyValue {
    let value: Value = match value {
        AttributeValue::Bool(value) => value.into(),
        AttributeValue::Int(value) => value.into(),
        AttributeValue::Float(value) => value.into(),
        AttributeValue::Text(value) => value.into(),
    };
    KeyValue::new(key, value)
}
