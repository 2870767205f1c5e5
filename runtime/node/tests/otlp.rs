//! Spans as a collector in this process receives them over OTLP.

mod collector;

use axum::http::HeaderMap;
use collector::{Collector, text};
use opentelemetry_proto::tonic::trace::v1::{span::SpanKind, status::StatusCode};
use starling::api::trace::TraceSource;
use starling::telemetry::{Identity, Telemetry, names};
use starling_actors::{Hook, SpanRecord, TraceContext};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn telemetry(address: SocketAddr) -> Telemetry {
    let model = "smollm2".to_owned();
    let identity = Identity { model, block_tokens: 16, version: "1.2.3", commit: "abc" };
    Telemetry::new(identity, "node-7", Some(&format!("http://{address}"))).unwrap()
}

fn headers(traceparent: &str) -> HeaderMap {
    HeaderMap::from_iter([("traceparent".parse().unwrap(), traceparent.parse().unwrap())])
}

fn record(parent: TraceContext, span_id: Option<u64>, name: &'static str) -> SpanRecord {
    let start = UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_001);
    let end = start + Duration::from_nanos(42);
    SpanRecord { parent, span_id, name, start, end, attributes: vec![("starling.rank", 1u32.into())] }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_tree_of_spans_below_the_clients() {
    let (collector, address) = Collector::start().await;
    let telemetry = telemetry(address);
    let before = SystemTime::now();
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let mut request = telemetry.start_request(&headers(parent), "POST /v1/chat/completions");
    request.rename("chat smollm2".into());
    request.set("gen_ai.request.model", "other".into());
    request.set("gen_ai.request.model", "smollm2".into());
    request.set("gen_ai.usage.input_tokens", 12u32.into());
    request.fail("rank_failed", "rank failed while it ran the request");
    let context = request.context();
    telemetry.span(record(context, Some(77), "placement"));
    telemetry.span(record(context.child(77), None, "prefill"));
    drop(request);
    telemetry.shutdown().await;

    let spans = collector.spans();
    assert_eq!(spans.len(), 3);
    let span = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (request, placement, prefill) = (span("chat smollm2"), span("placement"), span("prefill"));
    let trace = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();
    assert!(spans.iter().all(|span| span.trace_id == trace));
    assert_eq!(request.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    assert_eq!(request.span_id, context.span_id.to_be_bytes());
    assert_eq!(placement.parent_span_id, request.span_id);
    assert_eq!(placement.span_id, 77u64.to_be_bytes());
    assert_eq!(prefill.parent_span_id, placement.span_id);
    assert!(prefill.span_id != placement.span_id && prefill.span_id.iter().any(|byte| *byte != 0));

    assert_eq!(request.kind(), SpanKind::Server);
    assert_eq!(prefill.kind(), SpanKind::Internal);
    assert_eq!(prefill.start_time_unix_nano, 1_700_000_000_000_000_001);
    assert_eq!(prefill.end_time_unix_nano, 1_700_000_000_000_000_043);
    let started = UNIX_EPOCH + Duration::from_nanos(request.start_time_unix_nano);
    assert!(started >= before && request.end_time_unix_nano >= request.start_time_unix_nano);

    assert_eq!(text(&request.attributes, "gen_ai.request.model").as_deref(), Some("smollm2"));
    assert_eq!(text(&request.attributes, "gen_ai.usage.input_tokens").as_deref(), Some("12"));
    assert_eq!(text(&request.attributes, names::ERROR_TYPE).as_deref(), Some("rank_failed"));
    assert_eq!(request.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(text(&prefill.attributes, "starling.rank").as_deref(), Some("1"));
    assert_eq!(text(&collector.resource(), names::SERVICE_NAME).as_deref(), Some("starling"));
    assert_eq!(text(&collector.resource(), names::SERVICE_INSTANCE_ID).as_deref(), Some("node-7"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_decision_to_sample_is_kept() {
    let (collector, address) = Collector::start().await;
    let telemetry = telemetry(address);
    let not_sampled = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    let request = telemetry.start_request(&headers(not_sampled), "POST /v1/chat/completions");
    assert_eq!(request.context().trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
    assert!(!request.context().is_sampled());
    drop(request);
    // Without a parent, or with one that cannot be read, a trace of its own begins.
    let fresh = telemetry.start_request(&headers("00-zz"), "GET /v1/models");
    assert!(fresh.context().is_sampled() && fresh.context().span_id != 0);
    drop(fresh);
    telemetry.shutdown().await;
    let spans = collector.spans();
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].name, "GET /v1/models");
    assert!(spans[0].parent_span_id.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_collector_the_clients_context_is_passed_on() {
    let model = "smollm2".to_owned();
    let identity = Identity { model, block_tokens: 16, version: "1.2.3", commit: "abc" };
    let telemetry = Telemetry::new(identity, "node-7", None).unwrap();
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let request = telemetry.start_request(&headers(parent), "GET /v1/models");
    assert_eq!(request.context().to_traceparent().as_deref(), Some(parent));
    telemetry.span(record(request.context(), None, "placement"));
    telemetry.shutdown().await;
}

/// Bounds a hang, nothing else.
const NEVER: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_collector_holds_nothing_up() {
    // One that refuses connections, and one that accepts them and never answers.
    let refusing = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [refusing, silent.local_addr().unwrap()] {
        let telemetry = telemetry(address);
        let all = async {
            for _ in 0..10_000 {
                let request = telemetry.start_request(&HeaderMap::new(), "GET /v1/models");
                telemetry.span(record(request.context(), None, "placement"));
            }
            telemetry.shutdown().await;
            // What comes after the end is dropped.
            telemetry.span(record(TraceContext { trace_id: 1, span_id: 1, flags: 1 }, None, "late"));
        };
        tokio::time::timeout(NEVER, all).await.unwrap();
    }
}

#[tokio::test]
async fn an_address_that_needs_tls_is_refused() {
    let model = "smollm2".to_owned();
    let identity = Identity { model, block_tokens: 16, version: "1.2.3", commit: "abc" };
    let error = Telemetry::new(identity, "node-7", Some("https://collector:4317")).unwrap_err();
    assert!(error.to_string().starts_with("cannot export spans to \"https://collector:4317\""), "{error}");
}
