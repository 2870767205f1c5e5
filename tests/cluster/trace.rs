//! A request that crosses the mesh is one trace, whichever node does a part of it.

#[path = "../../runtime/node/tests/collector/mod.rs"]
mod collector;

use super::client::Chat;
use super::process::eventually;
use super::rig::Cluster;
use collector::{Collector, text};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use std::collections::BTreeSet;

const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const PARENT: u64 = 0x00f0_67aa_0ba9_02b7;
const REQUEST: &str = "chat tiny";

/// What a request on another node's rank causes, and where.
const EXPECTED: [(&str, &str); 7] = [
    ("node-0", REQUEST),
    ("node-0", "announce"),
    ("node-0", "admission"),
    ("node-0", "placement"),
    ("node-2", "kv.reserve"),
    ("node-2", "prefill"),
    ("node-2", "decode"),
];

/// Asks node-0 for something on the rank of node-2.
async fn ask(cluster: &Cluster, traceparent: Option<&str>) {
    let chat = Chat { rank: Some(2), traceparent, ..Chat::new("a", "tell me of the birds") };
    let answer = cluster.client(0).chat(&chat).await;
    let header = |name: &str| answer.header(name).to_owned();
    assert_eq!((header("x-starling-ingress"), header("x-starling-node")), ("node-0".into(), "node-2".into()));
}

/// Waits until the spans of a whole request have come, and returns them with their nodes. Spans of other requests are left
/// out: those that begin no trace in `known`.
async fn request(collector: &Collector, known: &BTreeSet<Vec<u8>>) -> Vec<(String, Span)> {
    let expected: BTreeSet<(&str, &str)> = EXPECTED.into();
    eventually("the spans of the request", async || {
        let mut spans = collector.spans_by_node();
        spans.retain(|(_, span)| !known.contains(&span.trace_id));
        let seen: BTreeSet<(&str, &str)> = spans.iter().map(|(node, span)| (node.as_str(), &*span.name)).collect();
        if seen.is_superset(&expected) { Ok(spans.clone()) } else { Err(format!("{seen:?}")) }
    })
    .await
}

/// One trace, in which everything is below the request; returns the request's own span.
fn checked(spans: &[(String, Span)]) -> &Span {
    assert_eq!(spans.len(), EXPECTED.len(), "nothing twice and nothing else: {spans:?}");
    let request = &spans.iter().find(|(_, span)| span.name == REQUEST).unwrap().1;
    assert_eq!(request.kind(), SpanKind::Server);
    let ids: BTreeSet<&[u8]> = spans.iter().map(|(_, span)| span.span_id.as_slice()).collect();
    assert_eq!(ids.len(), spans.len(), "ids are unique");
    for (node, span) in spans {
        assert_eq!(span.trace_id, request.trace_id, "{node} {}", span.name);
        if span.name != REQUEST {
            assert_eq!(span.parent_span_id, request.span_id, "{node} {}", span.name);
        }
        let rank = text(&span.attributes, "starling.rank");
        assert!(rank.is_none_or(|rank| rank == "2"), "{node} {}: {:?}", span.name, span.attributes);
    }
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_on_another_nodes_rank_is_one_trace_of_two_nodes() {
    let (collector, address) = Collector::start().await;
    let cluster = Cluster::start(3, 1, &format!("telemetry.otlp = 'http://{address}'\n")).await;

    ask(&cluster, None).await;
    let spans = request(&collector, &BTreeSet::new()).await;
    let own = checked(&spans);
    assert!(own.parent_span_id.is_empty(), "it begins the trace");

    let known = BTreeSet::from([own.trace_id.clone()]);
    ask(&cluster, Some(&format!("00-{TRACE:032x}-{PARENT:016x}-01"))).await;
    let spans = request(&collector, &known).await;
    let below = checked(&spans);
    assert_eq!(below.trace_id, TRACE.to_be_bytes());
    assert_eq!(below.parent_span_id, PARENT.to_be_bytes());

    // A client that does not sample decides for all nodes.
    let unsampled = TRACE + 1;
    ask(&cluster, Some(&format!("00-{unsampled:032x}-{PARENT:016x}-00"))).await;
    let mut cluster = cluster;
    for node in &mut cluster.nodes {
        // Ending, it sends what it still has.
        assert_eq!(node.terminate().await, Some(0));
    }
    let spans = collector.spans_by_node();
    assert!(spans.iter().all(|(_, span)| span.trace_id != unsampled.to_be_bytes()), "{spans:?}");
}
