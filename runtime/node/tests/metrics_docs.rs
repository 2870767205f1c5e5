//! The list of metrics is what the code registers. `UPDATE_DOCS=1` writes it anew.

use starling::api::metrics::{ApiMetrics, End, Endpoint, Usage};
use starling::telemetry::metrics::{Described, Format};
use starling::telemetry::{Identity, Metrics, Sight};
use starling::text::Cost;
use starling_actors::{ActorKind, ActorState, ActorStats, Dropped, LinkStats, NodeName};
use starling_core::ids::Epoch;
use starling_core::rejection::Rejection;
use starling_core::{batch, ingress, kv, replica};
use starling_serving::{IngressReport, LocalRank, Observer, RoundReport, RoundTiming};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

const HEAD: &str = "# Metrics

`GET /metrics` on the admin listener, in Prometheus' text format or, if the client accepts it, OpenMetrics. Names that start with
`vllm:` have the meaning and the buckets they have there, since autoscalers, gateways and dashboards look for them; a node shows
itself as one engine (`engine=\"0\"`), whatever the number of its ranks, and bounds below 10 ms are added between tokens. A series
appears with its first value. `rank` counts the ranks of the node, from 0: their ids in the cluster are the view's to give. This page is
written from the code.

| name | type | labels | |
| --- | --- | --- | --- |
";

fn metrics() -> Metrics {
    let model = "smollm2".to_owned();
    Metrics::new(Identity { model, block_tokens: 16, version: "1.2.3", commit: "abc" })
}

#[test]
fn the_list_of_metrics_is_current() {
    let mut page = HEAD.to_owned();
    for Described { name, kind, labels, help } in metrics().registered().described() {
        let _ = writeln!(page, "| `{name}` | {kind} | {} | {help} |", labels.join(", "));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page, "metrics.md is not current; run this test with UPDATE_DOCS=1");
}

#[test]
fn names_follow_the_rules() {
    let metrics = metrics();
    let mut seen = std::collections::BTreeSet::new();
    for Described { name, kind, labels, .. } in metrics.registered().described() {
        assert!(seen.insert(name.clone()), "{name} is registered twice");
        assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
        let known = ["vllm:", "starling_", "process_"].iter().any(|prefix| name.starts_with(prefix));
        assert!(known && !name.contains("_total_total"), "{name}");
        assert_eq!(name.starts_with("vllm:"), labels.contains(&"model_name"), "{name}");
    }
}

/// One sample: its name, its labels and its value.
type Sample = (String, BTreeMap<String, String>, f64);

/// Reads the text format strictly enough to find what a scraper would refuse.
fn parse(text: &str) -> (BTreeMap<String, String>, Vec<Sample>) {
    let mut types = BTreeMap::new();
    let mut samples = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            types.insert(name.to_owned(), kind.to_owned());
        } else if !line.starts_with('#') {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels = labels.strip_suffix('}').unwrap();
            let pairs = labels.split_terminator(',').map(|pair| {
                let (key, value) = pair.split_once('=').unwrap();
                let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap();
                (key.to_owned(), value.to_owned())
            });
            samples.push((name.to_owned(), pairs.collect(), value.parse().unwrap()));
        }
    }
    (types, samples)
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let fits = |(n, l, _): &&Sample| n == name && labels.iter().all(|(k, v)| l.get(*k).is_some_and(|have| have == v));
    let found: Vec<_> = samples.iter().filter(fits).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
    found[0].2
}

fn ended(status: u16, error: Option<&'static str>) -> End {
    End { status, error, elapsed: Duration::from_millis(700), streamed: true }
}

/// A link over which this many frames went out.
fn link(peer: NodeName, frames_out: u64) -> LinkStats {
    LinkStats {
        peer,
        is_up: true,
        links: 2,
        frames_in: 90,
        bytes_in: 9000,
        frames_out,
        bytes_out: 100 * frames_out,
        held_bytes: 64,
        open_asks: 1,
        open_asks_of_peer: 0,
        dropped: Dropped { mailbox_full: 4, ..Dropped::default() },
    }
}

/// Reports one of everything.
fn feed(metrics: &Metrics) -> Sight {
    let batch = batch::Stats {
        waiting: 1,
        running: 2,
        preemptions: 3,
        cancels: 4,
        cancel_steps: 2,
        cancel_steps_max: 1,
        produced_tokens: 50,
        drafted_tokens: 12,
        accepted_tokens: 5,
        ..batch::Stats::default()
    };
    let kv = kv::Stats {
        pools: vec![kv::PoolStats { blocks_total: 100, blocks_free: 60, blocks_reusable: 15, blocks_held: 25 }],
        conversations: 3,
        turns: 9,
        turns_unplanned: 2,
        proposed: vec![70, 30],
        query_tokens: 80,
        hit_tokens: 40,
        evicted_blocks: 7,
        ..kv::Stats::default()
    };
    metrics.rank(LocalRank(0), &batch, &kv);
    metrics.rank(LocalRank(1), &batch, &kv);
    metrics.step(LocalRank(0), 33, Duration::from_millis(3));
    let faults = replica::Faults { entries_ignored: 1, ..replica::Faults::default() };
    let apply = Duration::from_micros(40);
    metrics.round(&RoundReport { round: 9, waiting: 5, requests: 8, apply, faults });
    let peer = NodeName::new("node-1").unwrap();
    let waits = vec![(&peer, Duration::from_micros(120))];
    metrics.round_timed(&RoundTiming { took: Duration::from_micros(160), waits });
    metrics.view(Epoch(3));
    metrics.placed("bound", Duration::from_millis(1));
    metrics.placed("overflow", Duration::from_millis(1));
    metrics.rejected(&Rejection::Draining);
    let counts = ingress::Counts { frames_fenced: 2, ..ingress::Counts::default() };
    metrics.ingress(&IngressReport { open: 9, backlog: 3, counts });
    metrics.fenced(LocalRank(0));
    metrics.lost(LocalRank(0), 2);
    (0..3).for_each(|_| metrics.padded(LocalRank(1)));
    metrics.late(LocalRank(0));
    metrics.conversation_keyless();
    metrics.actor_handled("router", 0.001);
    metrics.actor_restarted("router");
    metrics.actor_failed("router");
    for _ in 0..3 {
        metrics.started(Endpoint::Chat);
    }
    metrics.encoded(&Cost { is_cacheable: true, reused_tokens: 40, encoded_bytes: 90, evicted: 2, ..Cost::default() });
    metrics.encoded(&Cost { is_cacheable: true, encoded_bytes: 10, cache_bytes: 4096, ..Cost::default() });
    metrics.encoded(&Cost { encoded_bytes: 1, cache_bytes: 4096, ..Cost::default() });
    metrics.first_token(Duration::from_millis(30));
    metrics.next_tokens(Duration::from_millis(8), 4);
    metrics.generated(&Usage { prompt_tokens: 20, cached_tokens: 16, generated_tokens: 5, finish: None });
    metrics.ended(Endpoint::Chat, &ended(200, None));
    metrics.ended(Endpoint::Chat, &ended(503, Some("draining")));
    let actors = vec![ActorStats {
        name: "router".into(),
        kind: ActorKind::Actor,
        level: 2,
        state: ActorState::Running,
        depth: 6,
        mailbox_messages_max: None,
        handled: 1,
        restarts: 0,
        failures: 0,
        uptime: Duration::ZERO,
    }];
    Sight { actors, links: vec![link(peer, 100)], standstill: Duration::from_millis(1500) }
}

#[test]
fn a_scrape_holds_every_documented_metric() {
    let metrics = metrics();
    let sight = feed(&metrics);
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = metrics.encode(&sight, format);
        let (types, samples) = parse(&text);
        for Described { name, kind, labels, .. } in metrics.registered().described() {
            let family = if format == Format::OpenMetrics { name.trim_end_matches("_total") } else { name };
            assert_eq!(types.get(family).map(String::as_str), Some(*kind), "{name}");
            let sample = if *kind == "histogram" { format!("{name}_count") } else { name.clone() };
            let (_, found, _) = samples.iter().find(|(n, ..)| *n == sample).unwrap_or_else(|| panic!("no {sample}"));
            assert!(labels.iter().all(|label| found.contains_key(*label)), "{name} {found:?}");
        }
        assert_eq!(text.ends_with("# EOF\n"), format == Format::OpenMetrics);
    }
}

#[test]
fn reports_add_up() {
    let metrics = metrics();
    let sight = feed(&metrics);
    let text = metrics.encode(&sight, Format::Prometheus);
    let (_, samples) = parse(&text);
    let value = |name, labels: &[(&str, &str)]| value(&samples, name, labels);
    // Two ranks, five in the queue, three in the backlog.
    assert_eq!(value("vllm:num_requests_running", &[("model_name", "smollm2"), ("engine", "0")]), 4.0);
    assert_eq!(value("vllm:num_requests_waiting", &[]), 10.0);
    assert_eq!(value("vllm:kv_cache_usage_perc", &[]), 0.25);
    assert_eq!(value("vllm:cache_config_info", &[("block_size", "16"), ("num_gpu_blocks", "200")]), 1.0);
    assert_eq!(value("vllm:generation_tokens_total", &[]), 100.0);
    assert_eq!(value("vllm:prefix_cache_queries_total", &[]), 160.0);
    assert_eq!(value("vllm:prefix_cache_hits_total", &[]), 80.0);
    assert_eq!(value("vllm:request_success_total", &[("finished_reason", "abort")]), 1.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_count", &[]), 4.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_bucket", &[("le", "0.001")]), 0.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_bucket", &[("le", "0.0025")]), 4.0);
    assert_eq!(value("vllm:e2e_request_latency_seconds_count", &[]), 1.0);
    let pool = [("rank", "1"), ("life_cycle", "0")];
    let blocks =
        ["free", "reusable", "held"].map(|state| value("starling_kv_blocks", &[pool[0], pool[1], ("state", state)]));
    assert_eq!(blocks.iter().sum::<f64>(), value("starling_kv_pool_blocks", &pool));
    assert_eq!(value("starling_kv_conversations", &[("rank", "1")]), 3.0);
    assert_eq!(value("starling_kv_turns_total", &[("rank", "1")]), 9.0);
    assert_eq!(value("starling_kv_pool_blocks_proposed", &[("rank", "1"), ("life_cycle", "1")]), 30.0);
    assert_eq!(value("starling_kv_turns_unplanned_total", &[("rank", "1")]), 2.0);
    assert_eq!(value("starling_cancels_total", &[]), 8.0);
    assert_eq!(value("starling_cancel_steps_max", &[]), 1.0);
    assert_eq!(value("starling_draft_tokens_total", &[("rank", "1")]), 12.0);
    assert_eq!(value("starling_draft_accepted_tokens_total", &[("rank", "1")]), 5.0);
    assert_eq!(value("starling_placements_total", &[("why", "overflow")]), 1.0);
    assert_eq!(value("starling_conversation_lost_rank_total", &[]), 1.0);
    assert_eq!(value("starling_admission_rejections_total", &[("reason", "draining")]), 1.0);
    assert_eq!(value("starling_fenced_total", &[]), 3.0);
    assert_eq!(value("starling_text_encoded_bytes_total", &[]), 101.0);
    assert_eq!(value("starling_text_cache_lookups_total", &[("result", "hit")]), 1.0);
    assert_eq!(value("starling_text_cache_lookups_total", &[("result", "miss")]), 1.0);
    assert_eq!(value("starling_text_cache_reused_tokens_total", &[]), 40.0);
    assert_eq!(value("starling_text_cache_evictions_total", &[]), 2.0);
    assert_eq!(value("starling_text_cache_bytes", &[]), 4096.0);
    assert_eq!(value("starling_steps_dummy_total", &[("rank", "1")]), 3.0);
    assert_eq!(value("starling_steps_late_total", &[("rank", "0")]), 1.0);
    assert_eq!(value("starling_http_open_requests", &[("endpoint", "chat")]), 1.0);
    assert_eq!(value("starling_http_errors_total", &[("error", "draining")]), 1.0);
    assert_eq!(value("starling_actor_mailbox_depth", &[("actor", "router")]), 6.0);
    assert_eq!(value("starling_round_wait_seconds_bucket", &[("member", "node-1"), ("le", "0.0001")]), 0.0);
    assert_eq!(value("starling_round_wait_seconds_bucket", &[("member", "node-1"), ("le", "0.00015")]), 1.0);
    assert_eq!((value("starling_view_epoch", &[]), value("starling_standstill_seconds", &[])), (3.0, 1.5));
    assert_eq!(value("starling_link_dropped_messages_total", &[("reason", "mailbox_full")]), 4.0);
    assert_eq!(value("starling_link_open_asks", &[("asker", "node")]), 1.0);
    assert!(value("process_resident_memory_bytes", &[]) > 1e6);
}

#[test]
fn totals_of_links_are_exported_as_they_are_however_often_somebody_scrapes() {
    let metrics = metrics();
    let peer = NodeName::new("node-1").unwrap();
    // The third scrape looked before the second and came behind it.
    for (frames, shown) in [(100, 100.0), (250, 250.0), (200, 250.0), (250, 250.0)] {
        let sight = Sight { links: vec![link(peer.clone(), frames)], ..Sight::default() };
        let (_, samples) = parse(&metrics.encode(&sight, Format::Prometheus));
        let out = [("peer", "node-1"), ("direction", "out")];
        assert_eq!(value(&samples, "starling_link_frames_total", &out), shown);
        assert_eq!(value(&samples, "starling_link_bytes_total", &out), 100.0 * shown);
    }
}

#[test]
fn a_restarted_rank_starts_over_and_its_counters_go_on() {
    let metrics = metrics();
    let kv = kv::Stats::default();
    for produced_tokens in [10, 25, 25, 4, 6] {
        let batch = batch::Stats { produced_tokens, ..batch::Stats::default() };
        metrics.rank(LocalRank(0), &batch, &kv);
    }
    let (_, samples) = parse(&metrics.encode(&Sight::default(), Format::Prometheus));
    assert_eq!(value(&samples, "vllm:generation_tokens_total", &[]), 31.0);
}
