//! A whole node in this process: a tiny model that is really computed, real HTTP, a collector for its spans.

mod collector;

use collector::{Collector, text};
use serde_json::{Value, json};
use starling::assembly::Node;
use starling::config::{Config, Sources, set};
use starling_gpu::dequant::TensorType;
use starling_gpu::gguf::{Array, Value as GgufValue};
use starling_gpu::llama::Family;
use starling_gpu::testing::{CHAT_TEMPLATE, CONTROL_TOKENS, TinyModel};
use std::collections::BTreeSet;
use std::path::Path;
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

fn config(model: &Path, keys: &[(&str, toml::Value)]) -> Config {
    let mut flags = toml::Table::new();
    set(&mut flags, "model.path", model.display().to_string());
    set(&mut flags, "api.listen", "127.0.0.1:0");
    set(&mut flags, "admin.listen", "127.0.0.1:0");
    set(&mut flags, "ranks.count", 2);
    set(&mut flags, "engine.kv-memory", "8MiB");
    for (key, value) in keys {
        set(&mut flags, key, value.clone());
    }
    Config::load(&Sources { flags, ..Sources::default() }).unwrap()
}

impl Rig {
    async fn start(keys: &[(&str, toml::Value)]) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("tiny.gguf");
        TinyModel::default().write(&path).unwrap();
        Self::serve(folder, &path, keys).await
    }

    async fn serve(folder: TempDir, model: &Path, keys: &[(&str, toml::Value)]) -> Self {
        let node = Node::start(&config(model, keys)).await.unwrap();
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
async fn a_model_with_windows_is_served_with_their_blocks_given_back() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyModel { family: Family::Gemma3, layers: 4, context: 2048, ..TinyModel::default() }.write(&path).unwrap();
    let keys =
        [("engine.arithmetic", "exact".into()), ("engine.step-tokens-max", 64.into()), ("ranks.count", 1.into())];
    let rig = Rig::serve(folder, &path, &keys).await;
    let text = "the hen is in the attic, the rat is on the tin ".repeat(12);
    let mut messages = vec![json!({ "role": "user", "content": text })];
    let (first, _) = rig.chat(&json!(messages), "windows").await;
    let answer = &first["choices"][0]["message"]["content"];
    messages.push(json!({ "role": "assistant", "content": answer }));
    messages.push(json!({ "role": "user", "content": "and then?" }));
    let (second, _) = rig.chat(&json!(messages), "windows").await;
    let usage = &second["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > first["usage"]["prompt_tokens"].as_u64().unwrap() / 2, "{usage}");
    // Whatever it finds, another conversation gets the same answer.
    let (alone, _) = rig.chat(&json!(messages), "another").await;
    assert_eq!(alone["choices"], second["choices"]);
    // The answer is out a moment before its blocks are back.
    let pools = async || {
        let (_, metrics) = rig.admin("/metrics").await;
        let of_pool = |life_cycle: u32, state: &str| {
            let labels = format!("starling_kv_blocks{{rank=\"0\",life_cycle=\"{life_cycle}\",state=\"{state}\"}} ");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&labels));
            line.unwrap_or_else(|| panic!("{labels} is not in {metrics}")).parse::<u64>().unwrap()
        };
        [0, 1].map(|life_cycle| (of_pool(life_cycle, "held"), of_pool(life_cycle, "reusable")))
    };
    let released = async {
        loop {
            if let [(0, window), (0, full)] = pools().await {
                return (window, full);
            }
        }
    };
    let (window, full) = timeout(LIMIT, released).await.expect("nothing is held when nothing runs");
    assert!(full > 2 * window && window > 0, "full {full}, window {window}");
    rig.node.drain().await;
}

/// A model as it is published on hubs, with the tokenizer of the same model's GGUF file.
fn write_folder(model: &TinyModel, path: &Path) {
    model.folder_writer().write(path).unwrap();
    let gguf = model.gguf();
    let tokens = gguf.get_str_array("tokenizer.ggml.tokens").unwrap().unwrap();
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().zip(0..).map(|(t, id)| (t.clone(), json!(id))).collect();
    let added = CONTROL_TOKENS.iter().zip(0..).map(|(name, id)| {
        json!({ "id": id, "content": name, "special": true, "normalized": false, "single_word": false, "lstrip": false,
            "rstrip": false })
    });
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "post_processor": null, "decoder": byte_level,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": gguf.get_str_array("tokenizer.ggml.merges").unwrap().unwrap() },
    });
    let config = json!({ "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE });
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(path.join("tokenizer_config.json"), config.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_folder_answers_as_the_file_of_the_same_model_does() {
    let model = TinyModel { kind: TensorType::F32, ..TinyModel::default() };
    let messages = json!([{ "role": "user", "content": "the hen on 12 <|im_end|> é 😀" }]);
    let mut answers = Vec::new();
    for is_folder in [true, false] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join(if is_folder { "tiny" } else { "tiny.gguf" });
        match is_folder {
            true => write_folder(&model, &path),
            false => model.write(&path).unwrap(),
        }
        let rig = Rig::serve(folder, &path, &[]).await;
        let (body, _) = rig.chat(&messages, "a").await;
        answers.push((body["choices"].clone(), body["usage"].clone()));
        rig.node.drain().await;
    }
    assert_eq!(answers[0], answers[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tokenizer_of_another_model_is_refused_with_both_numbers_and_the_file() {
    let folder = TempDir::new().unwrap();
    let refusal = async |path: &Path| match Node::start(&config(path, &[])).await {
        Ok(_) => panic!("it starts"),
        Err(error) => error.to_string(),
    };
    let model = TinyModel { kind: TensorType::F32, ..TinyModel::default() };
    let (file, directory) = (folder.path().join("tiny.gguf"), folder.path().join("tiny"));
    let mut writer = model.writer();
    let tokens = model.gguf().get_str_array("tokenizer.ggml.tokens").unwrap().unwrap().to_vec();
    let last = tokens.len();
    let more = tokens.into_iter().chain(["zzz".into()]).collect();
    writer.set("tokenizer.ggml.tokens", GgufValue::Array(Array::Str(more)));
    writer.set("tokenizer.ggml.token_type", GgufValue::Array(Array::I32(vec![1; last + 1])));
    std::fs::write(&file, writer.to_bytes().0).unwrap();
    let wanted = format!("{}: the tokenizer has {} tokens, the model's embedding {last}", file.display(), last + 1);
    assert_eq!(refusal(&file).await, wanted);

    write_folder(&model, &directory);
    let tokenizer = std::fs::read_to_string(directory.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&tokenizer).unwrap();
    tokenizer["model"]["vocab"]["zzz"] = json!(last);
    std::fs::write(directory.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let wanted =
        format!("{}: the tokenizer has {} tokens, the model's embedding only {last}", directory.display(), last + 1);
    assert_eq!(refusal(&directory).await, wanted);

    std::fs::remove_file(directory.join("tokenizer.json")).unwrap();
    let wanted = format!("{}: tokenizer.json: is missing from the model's folder", directory.display());
    assert_eq!(refusal(&directory).await, wanted);
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

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_conversation_reuses_the_system_prompt_of_all_and_says_why_the_rest_was_computed() {
    let rig = Rig::start(&[("ranks.count", 1.into())]).await;
    let system = json!({ "role": "system", "content": "you are a bird that flies in a flock without any leader" });
    let chat = |said: &str| json!([system, { "role": "user", "content": said }]);
    let cached = |body: &Value| body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let (ours, theirs) = (chat("where do you fly in winter, and with whom?"), chat("hi"));
    rig.chat(&theirs, "theirs").await;
    let shared = cached(&rig.chat(&ours, "ours").await.0);
    let whole = cached(&rig.chat(&ours, "ours").await.0);
    assert!(0 < shared && shared < whole, "{shared} {whole}");

    let url = format!("{}/v1/conversations/ours", rig.node.ready.api);
    for is_first in [true, false] {
        let response = rig.client.delete(&url).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let deleted: Value = response.json().await.unwrap();
        let rank = &deleted["ranks"][0];
        assert_eq!((&deleted["id"], &rank["rank"], &rank["pending_sequences"]), (&json!("ours"), &json!(0), &json!(0)));
        assert_eq!(rank["blocks"].as_u64() > Some(0), is_first, "{deleted}");
    }
    let (body, headers) = rig.chat(&ours, "ours").await;
    assert_eq!(cached(&body), shared);
    for name in [headers["x-request-id"].to_str().unwrap(), body["id"].as_str().unwrap()] {
        let (status, page) = rig.admin(&format!("/debug/requests/{name}")).await;
        let page: Value = serde_json::from_str(&page).unwrap();
        let reservation = &page["requests"][0]["attempts"][0]["reservations"][0];
        assert_eq!((status, &reservation["reused_tokens"]), (200, &json!(shared)));
        assert_eq!(reservation["missed"][0]["why"], "content_differs", "{page}");
    }
    assert_eq!(rig.admin("/debug/requests/unknown").await.0, 404);

    let all = format!("{}/v1/conversations", rig.node.ready.api);
    assert_eq!(rig.client.delete(&all).send().await.unwrap().status(), 200);
    assert_eq!(cached(&rig.chat(&theirs, "theirs").await.0), 0);
    rig.node.drain().await;
}
