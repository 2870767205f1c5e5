//! A whole node in this process: a tiny model that is really computed, real HTTP, a collector for its spans.

mod collector;

use collector::{Collector, text};
use serde_json::{Value, json};
use starling::assembly::Node;
use starling::config::{Config, Sources, set};
use starling_gpu::testing::TinyModel;
use std::collections::BTreeSet;
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::timeout;

/// Generous: two shared cores.
const LIMIT: Duration = Duration::from_secs(60);

struct Rig {
    node: Node,
    client: reqwest::Client,
    _folder: TempDir,
}

impl Rig {
    async fn start(keys: &[(&str, toml::Value)]) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("tiny.gguf");
        TinyModel::default().write(&path).unwrap();
        let mut flags = toml::Table::new();
        set(&mut flags, "model.path", path.display().to_string());
        set(&mut flags, "api.listen", "127.0.0.1:0");
        set(&mut flags, "admin.listen", "127.0.0.1:0");
        set(&mut flags, "ranks.count", 2);
        set(&mut flags, "engine.kv-memory", "8MiB");
        for (key, value) in keys {
            set(&mut flags, key, value.clone());
        }
        let config = Config::load(&Sources { flags, ..Sources::default() }).unwrap();
        let node = Node::start(&config).await.unwrap();
        Self { node, client: reqwest::Client::new(), _folder: folder }
    }

    async fn chat(&self, messages: &Value, conversation: &str) -> (Value, reqwest::header::HeaderMap) {
        let body = json!({ "model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0 });
        let request = self
            .client
            .post(format!("{}/v1/chat/completions", self.node.ready.api))
            .header("x-starling-conversation", conversation)
            .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
            .json(&body);
        let response = timeout(LIMIT, request.send()).await.unwrap().unwrap();
        let headers = response.headers().clone();
        let status = response.status();
        let body: Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{body}");
        (body, headers)
    }

    async fn admin(&self, path: &str) -> (u16, String) {
        let response = self.client.get(format!("{}{path}", self.node.ready.admin)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_trace_through_every_actor() {
    let (collector, address) = Collector::start().await;
    let rig = Rig::start(&[("telemetry.otlp", format!("http://{address}").into())]).await;
    rig.chat(&json!([{ "role": "user", "content": "hello there" }]), "a").await;
    assert_eq!(rig.node.drain().await, 0);

    let spans = collector.spans();
    let names: BTreeSet<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    let expected = ["admission", "announce", "chat tiny", "decode", "kv.reserve", "placement", "prefill"];
    assert_eq!(names, BTreeSet::from(expected));
    let trace = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes();
    assert!(spans.iter().all(|span| span.trace_id == trace));
    let request = spans.iter().find(|span| span.name == "chat tiny").unwrap();
    assert_eq!(request.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    for span in spans.iter().filter(|span| span.name != "chat tiny") {
        assert_eq!(span.parent_span_id, request.span_id, "{}", span.name);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{}", span.name);
        assert!(span.start_time_unix_nano >= request.start_time_unix_nano, "{}", span.name);
    }
    let actors: BTreeSet<String> = spans.iter().filter_map(|s| text(&s.attributes, "starling.actor")).collect();
    assert_eq!(actors, ["gpu_worker", "kv_manager", "queue", "router"].map(str::to_owned).into());
    let placement = spans.iter().find(|span| span.name == "placement").unwrap();
    assert_eq!(text(&placement.attributes, "starling.placement.why").as_deref(), Some("new"));
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_conversation_share_a_rank_and_a_growing_prefix() {
    let rig = Rig::start(&[]).await;
    let mut messages = vec![json!({ "role": "user", "content": "tell me of birds that fly without a leader" })];
    let (mut ranks, mut cached) = (BTreeSet::new(), Vec::new());
    for turn in 0..3 {
        let (body, headers) = rig.chat(&json!(messages), "birds").await;
        ranks.insert(headers["x-starling-rank"].to_str().unwrap().to_owned());
        assert_eq!(headers["x-starling-node"], "node-0");
        cached.push(body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        messages.push(json!({ "role": "assistant", "content": body["choices"][0]["message"]["content"] }));
        messages.push(json!({ "role": "user", "content": format!("go on, part {turn}, with more words for a block") }));
        // Another conversation between the turns takes the other rank.
        rig.chat(&json!([{ "role": "user", "content": "hi" }]), &format!("other {turn}")).await;
    }
    assert_eq!(ranks.len(), 1, "{ranks:?}");
    assert!(cached[0] == 0 && cached[1] > 0 && cached[2] > cached[1], "{cached:?}");
    let (_, placement) = rig.admin("/debug/placement").await;
    let placement: Value = serde_json::from_str(&placement).unwrap();
    assert_eq!(placement["conversations"], 4);
    let faults = placement["faults"].as_object().unwrap();
    assert!(faults.values().all(|count| count == 0), "{faults:?}");
    let (_, actors) = rig.admin("/debug/actors").await;
    for name in ["queue", "router", "ingress", "rank-0/kv", "rank-1/worker"] {
        assert!(actors.contains(&format!("\"{name}\"")), "{name}: {actors}");
    }
    let (_, metrics) = rig.admin("/metrics").await;
    assert!(metrics.contains("vllm:prefix_cache_hits_total"), "{metrics}");
    rig.node.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_tells_of_a_node_that_drains_and_new_requests_are_told_when_to_come_back() {
    let keys = [
        ("engine.kind", toml::Value::from("timed")),
        ("engine.timed.decode-per-step", "20ms".into()),
        ("engine.timed.prefill-per-token", "0us".into()),
    ];
    let rig = Rig::start(&keys).await;
    assert_eq!(rig.admin("/readyz?verbose").await.0, 200);
    let url = format!("{}/v1/completions", rig.node.ready.api);
    let body = |tokens: u32| json!({ "model": "tiny", "prompt": "on and on", "max_tokens": tokens, "stream": true });
    let mut open = rig.client.post(&url).json(&body(40)).send().await.unwrap();
    assert_eq!(open.status(), 200);
    let first = timeout(LIMIT, open.chunk()).await.unwrap().unwrap();
    assert!(first.is_some());
    let (admin, client) = (rig.node.ready.admin.clone(), rig.client.clone());
    let drain = tokio::spawn(rig.node.drain());
    let not_ready = async {
        loop {
            let response = client.get(format!("{admin}/readyz")).send().await.unwrap();
            if response.status() == 503 {
                return response.text().await.unwrap();
            }
        }
    };
    let why = timeout(LIMIT, not_ready).await.unwrap();
    assert!(why.contains("draining"), "{why}");
    let refused = rig.client.post(&url).json(&body(1)).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    let mut rest = String::new();
    while let Some(bytes) = timeout(LIMIT, open.chunk()).await.unwrap().unwrap() {
        rest.push_str(&String::from_utf8_lossy(&bytes));
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "the open stream ends in its own way: {rest}");
    assert_eq!(timeout(LIMIT, drain).await.unwrap().unwrap(), 0);
}
