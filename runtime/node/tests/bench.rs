//! `starling bench` against a node of our own, and against a server that does all that servers should not.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream::{self, StreamExt};
use serde_json::{Map, Value, json};
use starling::assembly::Node;
use starling::bench::{
    Client, Endpoint, Failure, Load, Measured, Metric, Pace, Prompts, Random, Report, Target, View, Workload,
};
use starling::config::{Config, Secret, Sources, set};
use starling_gpu::testing::TinyModel;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Generous: two shared cores.
const LIMIT: Duration = Duration::from_secs(60);

const RANDOM: Random = Random { input_tokens: 12, output_tokens: 6, range: 0.0, prefix_tokens: 0, prefixes: 1 };

fn target(base_url: &str, endpoint: Endpoint) -> Target {
    let path = match endpoint {
        Endpoint::Chat => "/v1/chat/completions",
        Endpoint::Completions => "/v1/completions",
    };
    Target {
        base_url: base_url.to_owned(),
        path: path.to_owned(),
        endpoint,
        model: "tiny".into(),
        temperature: 0.0,
        ignore_eos: true,
        conversation_header: "x-starling-conversation".into(),
        key: None,
        request_wait: LIMIT,
    }
}

fn load(target: Target, random: Random, (conversations, turns): (u32, u32), pace: Pace) -> Load {
    let workload = Workload { prompts: Prompts::Random(random), conversations, turns, seed: 1 };
    Load { client: Client::new(target).unwrap(), workload, pace }
}

const AT_ONCE: Pace = Pace { rate: None, burstiness: 1.0, concurrency_max: None };

const fn closed(concurrency: u32) -> Pace {
    Pace { concurrency_max: Some(concurrency), ..AT_ONCE }
}

async fn run(load: Load) -> Measured {
    timeout(LIMIT, load.run(std::future::pending(), |_| {})).await.unwrap()
}

fn json_of(measured: &Measured) -> Value {
    let view = View { metrics: Metric::ALL.to_vec(), percentiles: vec![99.0], objectives: vec![], detailed: false };
    Report::new(measured, view).to_json(Map::new())
}

/// A node with the `timed` engine at zero cost.
async fn node() -> (Node, TempDir) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyModel::default().write(&path).unwrap();
    let mut flags = toml::Table::new();
    for (key, value) in [
        ("model.path", path.display().to_string().as_str()),
        ("api.listen", "127.0.0.1:0"),
        ("admin.listen", "127.0.0.1:0"),
        ("engine.kind", "timed"),
        ("engine.kv-memory", "8MiB"),
        ("engine.timed.prefill-per-token", "0us"),
        ("engine.timed.decode-per-step", "0us"),
    ] {
        set(&mut flags, key, value);
    }
    let config = Config::load(&Sources { flags, ..Sources::default() }).unwrap();
    (Node::start(&config).await.unwrap(), folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_of_a_sound_server_succeeds_at_every_pace() {
    let (node, _folder) = node().await;
    for endpoint in [Endpoint::Completions, Endpoint::Chat] {
        for pace in
            [AT_ONCE, closed(3), Pace { rate: Some(2000.0), ..AT_ONCE }, Pace { rate: Some(2000.0), ..closed(2) }]
        {
            let measured = run(load(target(&node.ready.api, endpoint), RANDOM, (20, 1), pace)).await;
            let json = json_of(&measured);
            assert_eq!((&json["completed"], &json["failures"]), (&json!(20), &json!({})), "{endpoint:?} {pace:?}");
            assert_eq!((&json["total_output_tokens"], &json["without_usage"]), (&json!(120), &json!(0)));
            assert_eq!((&json["unfinished"], &json["interrupted"]), (&json!(0), &json!(false)));
            // The tokenizer of the tiny model knows no words, so a word has several tokens: the server says how many.
            assert!(json["total_input_tokens"].as_u64().unwrap() > 20 * 12);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn later_turns_bring_all_that_was_said_and_find_it_cached() {
    let (node, _folder) = node().await;
    for endpoint in [Endpoint::Completions, Endpoint::Chat] {
        let random = Random { output_tokens: 2, ..RANDOM };
        let measured = run(load(target(&node.ready.api, endpoint), random, (4, 3), closed(2))).await;
        let json = json_of(&measured);
        assert_eq!((&json["completed"], &json["failures"]), (&json!(12), &json!({})), "{endpoint:?}");
        let mut inputs: BTreeMap<u32, Vec<(u32, u64, u64)>> = BTreeMap::new();
        for record in &measured.records {
            let usage = record.outcome.as_ref().unwrap().usage.unwrap();
            let turns = inputs.entry(record.conversation).or_default();
            turns.push((record.turn, usage.prompt_tokens, usage.cached_tokens));
        }
        for turns in inputs.values() {
            assert_eq!(turns.iter().map(|turn| turn.0).collect::<Vec<_>>(), [0, 1, 2]);
            assert!(turns.windows(2).all(|pair| pair[0].1 < pair[1].1), "prompts grow: {turns:?}");
            assert!(turns[1..].iter().all(|turn| turn.2 > 0), "later turns find a prefix: {turns:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_prefix_is_found_by_the_conversations_that_come_later() {
    let (node, _folder) = node().await;
    let shared = Random { prefix_tokens: 40, prefixes: 2, ..RANDOM };
    let json = json_of(&run(load(target(&node.ready.api, Endpoint::Completions), shared, (10, 1), closed(1))).await);
    let cached = json["cached_tokens_share"].as_f64().unwrap();
    assert!((0.4..0.8).contains(&cached), "8 of 10 prompts have three of four tokens cached: {cached}");
}

/// What the bad server does with one request.
#[derive(Clone, Copy, Debug)]
enum Deed {
    /// A sound answer, in pieces of three bytes, with comments, a header of events, and `\r\n`.
    Split,
    /// Half an answer, then the connection is gone.
    CloseEarly,
    /// Half an answer and its regular end, but no reason.
    EndWithoutFinish,
    ErrorEvent,
    OldErrorEvent,
    Busy,
    Stall,
    StallBeforeHead,
    NotJson,
    NotAStream,
    Empty,
    /// Sound, without `[DONE]` and without usage.
    Terse,
    /// An end and no text.
    Silent,
}

struct Bad {
    deeds: Mutex<Vec<Deed>>,
    /// With the conversation's name.
    bodies: Mutex<Vec<(Option<String>, Value)>>,
    /// The `authorization` of each request.
    keys: Mutex<Vec<Option<String>>>,
    stalled: Notify,
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn text(text: &str, finish: Option<&str>) -> String {
    event(&json!({ "choices": [{ "index": 0, "text": text, "finish_reason": finish }], "usage": null }))
}

fn usage() -> String {
    let usage = json!({ "prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": null });
    event(&json!({ "choices": [], "usage": usage }))
}

fn streamed(text: String) -> Response {
    Body::from(text).into_response()
}

async fn misbehave(State(bad): State<Arc<Bad>>, headers: HeaderMap, body: Bytes) -> Response {
    let header = |name| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let name = header("x-starling-conversation");
    bad.keys.lock().unwrap().push(header("authorization"));
    bad.bodies.lock().unwrap().push((name, serde_json::from_slice(&body).unwrap()));
    let deed = {
        let mut deeds = bad.deeds.lock().unwrap();
        if deeds.len() > 1 { deeds.remove(0) } else { deeds[0] }
    };
    let half = text("one", None) + &text(" two", None);
    let whole = half.clone() + &text("", Some("length"));
    match deed {
        Deed::Split => {
            let all = format!(": hello\n\nevent: message\nid: 1\n{whole}{}: bye\r\n\r\ndata: [DONE]\n\n", usage());
            let all = all.replace("data: {\"choices\":[{", "data:{\"choices\":[{").replace("\n", "\r\n");
            let pieces: Vec<_> = all.as_bytes().chunks(3).map(Bytes::copy_from_slice).collect();
            Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, Infallible>))).into_response()
        }
        Deed::CloseEarly => {
            let pieces = [Ok(Bytes::from(half)), Err(io::Error::other("gone"))];
            Body::from_stream(stream::iter(pieces)).into_response()
        }
        Deed::EndWithoutFinish => streamed(half + "data: [DONE]\n\n"),
        Deed::ErrorEvent => streamed(half + &event(&json!({ "error": { "message": "rank failed" } }))),
        Deed::OldErrorEvent => streamed(half + &event(&json!({ "object": "error", "message": "out of blocks" }))),
        Deed::Busy => {
            let body = json!({ "error": { "message": "backlog full" } }).to_string();
            (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], body).into_response()
        }
        Deed::Stall => {
            bad.stalled.notify_one();
            let pieces = stream::iter([Ok::<_, Infallible>(Bytes::from(half))]).chain(stream::pending());
            Body::from_stream(pieces).into_response()
        }
        Deed::StallBeforeHead => std::future::pending().await,
        Deed::NotJson => streamed("data: {\"choices\": nonsense\n\n".into()),
        Deed::NotAStream => streamed(json!({ "choices": [{ "text": "whole" }] }).to_string()),
        Deed::Empty => streamed(String::new()),
        Deed::Terse => streamed(whole),
        Deed::Silent => streamed(text("", Some("stop")) + &usage() + "data: [DONE]\n\n"),
    }
}

/// A server that does these deeds, one a request; the last again and again.
async fn bad_server(deeds: &[Deed]) -> (String, Arc<Bad>) {
    let bad = Bad {
        deeds: Mutex::new(deeds.to_vec()),
        bodies: Mutex::default(),
        keys: Mutex::default(),
        stalled: Notify::new(),
    };
    let bad = Arc::new(bad);
    let models = || async { json!({ "object": "list", "data": [{ "id": "tiny" }, { "id": "other" }] }).to_string() };
    let router = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/completions", post(misbehave))
        .route("/v1/chat/completions", post(misbehave))
        .with_state(bad.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (format!("http://{address}"), bad)
}

/// What one request to a server of this deed comes to.
async fn outcome(deed: Deed, request_wait: Duration) -> Result<starling::bench::Answer, Failure> {
    let (url, _bad) = bad_server(&[deed]).await;
    let target = Target { request_wait, ..target(&url, Endpoint::Completions) };
    let measured = run(load(target, RANDOM, (1, 1), AT_ONCE)).await;
    measured.records.into_iter().next().unwrap().outcome
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_fail_is_told_apart() {
    let short = Duration::from_millis(50);
    for (deed, kind, words) in [
        (Deed::CloseEarly, "broken off", ""),
        (Deed::EndWithoutFinish, "broken off", "without a finish_reason"),
        (Deed::ErrorEvent, "error event", "rank failed"),
        (Deed::OldErrorEvent, "error event", "out of blocks"),
        (Deed::Busy, "http 503", "answered 503: backlog full"),
        (Deed::Stall, "timeout", "50ms"),
        (Deed::StallBeforeHead, "timeout", "50ms"),
        (Deed::NotJson, "malformed", "nonsense"),
        (Deed::NotAStream, "malformed", "no event"),
        (Deed::Empty, "malformed", "no event"),
    ] {
        let wait = if kind == "timeout" { short } else { LIMIT };
        let failure = outcome(deed, wait).await.unwrap_err();
        assert_eq!(failure.kind(), kind, "{deed:?}: {failure}");
        assert!(failure.to_string().contains(words), "{deed:?}: {failure}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_answers_that_are_whole_are_counted() {
    let split = outcome(Deed::Split, LIMIT).await.unwrap();
    assert_eq!((split.events, split.output_tokens(), split.gaps.len()), (2, 4, 1));
    assert_eq!(split.usage.unwrap().prompt_tokens, 10);
    let terse = outcome(Deed::Terse, LIMIT).await.unwrap();
    assert_eq!((terse.usage, terse.output_tokens()), (None, 2));
    let silent = outcome(Deed::Silent, LIMIT).await.unwrap();
    assert_eq!((silent.events, silent.output_tokens(), silent.ttft), (0, 4, silent.latency));
    assert!(silent.ttft > Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_counted_beside_successes_and_end_their_conversations() {
    let deeds = [Deed::Split, Deed::ErrorEvent, Deed::Split, Deed::Split, Deed::Split, Deed::Busy];
    let (url, bad) = bad_server(&deeds).await;
    let measured = run(load(target(&url, Endpoint::Chat), RANDOM, (3, 3), closed(1))).await;
    let json = json_of(&measured);
    assert_eq!((&json["completed"], &json["failed"], &json["dropped_turns"]), (&json!(4), &json!(2), &json!(3)));
    assert_eq!(json["failures"]["error event"]["count"], json!(1));
    assert_eq!(json["failures"]["http 503"], json!({ "count": 1, "first": "answered 503: backlog full" }));
    let bodies = bad.bodies.lock().unwrap();
    let names: BTreeSet<_> = bodies.iter().map(|(name, _)| name.clone().expect("turns have a name")).collect();
    assert_eq!(names, ["bench-1-0", "bench-1-1", "bench-1-2"].map(str::to_owned).into());
    // The chat endpoint was answered with completions' text, which is as good.
    let messages = bodies[4].1["messages"].as_array().unwrap();
    let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant", "user"]);
    assert_eq!(messages[1]["content"], "one two");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_say_what_they_were_told_to() {
    let (url, bad) = bad_server(&[Deed::Split]).await;
    run(load(target(&url, Endpoint::Completions), RANDOM, (1, 1), AT_ONCE)).await;
    let key = Some(Secret::new("sk-1"));
    let plain = Target { ignore_eos: false, temperature: 0.7, key, ..target(&url, Endpoint::Completions) };
    run(load(plain, RANDOM, (1, 1), AT_ONCE)).await;
    let bodies = bad.bodies.lock().unwrap();
    let (name, body) = &bodies[0];
    assert!(name.is_none(), "a single turn is no conversation");
    let prompt = body["prompt"].as_str().unwrap();
    let expected = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0.0, "stream": true,
        "stream_options": { "include_usage": true }, "ignore_eos": true });
    assert_eq!(*body, expected);
    assert_eq!((&bodies[1].1["temperature"], bodies[1].1.get("ignore_eos")), (&json!(0.7), None));
    assert_eq!(*bad.keys.lock().unwrap(), [None, Some("Bearer sk-1".to_owned())]);
    assert_eq!(bodies[1].1["prompt"], prompt, "the same seed, the same prompt");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_stopped_keeps_what_it_has() {
    let (url, bad) = bad_server(&[Deed::Split, Deed::Split, Deed::Stall]).await;
    let load = load(target(&url, Endpoint::Completions), RANDOM, (10, 1), closed(1));
    let mut seen = 0;
    let measured = timeout(LIMIT, load.run(bad.stalled.notified(), |_| seen += 1)).await.unwrap();
    assert_eq!((measured.records.len(), seen, measured.unfinished), (2, 2, 8));
    let json = json_of(&measured);
    assert_eq!((&json["completed"], &json["failed"], &json["interrupted"]), (&json!(2), &json!(0), &json!(true)));
}

/// Of two requests with one slot the first stalls until its time is over: when the second was due, and its latency.
async fn behind_a_stall(pace: Pace, wait: Duration) -> (Duration, Duration) {
    let (url, _bad) = bad_server(&[Deed::Stall, Deed::Split]).await;
    let target = Target { request_wait: wait, ..target(&url, Endpoint::Completions) };
    let measured = run(load(target, RANDOM, (2, 1), pace)).await;
    assert_eq!(measured.records[0].outcome, Err(Failure::Timeout(wait)));
    (measured.records[1].due, measured.records[1].outcome.as_ref().unwrap().latency)
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_slot_is_part_of_the_latency_in_an_open_loop_only() {
    // Enough for a sound answer on a slow machine.
    let wait = Duration::from_secs(3);
    let open = Pace { rate: Some(1e6), ..closed(1) };
    let (in_closed, in_open) = tokio::join!(behind_a_stall(closed(1), wait), behind_a_stall(open, wait));
    assert!(in_closed.0 >= wait, "due when the first had ended: {in_closed:?}");
    assert!(in_open.0 < wait && in_open.0 + in_open.1 >= wait, "due with the first: {in_open:?}");
}

async fn starling(words: &str, args: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_starling"));
    command.args(words.split(' ')).args(args).stdin(Stdio::null()).kill_on_drop(true);
    timeout(LIMIT, command.output()).await.unwrap().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_prints_one_object_and_writes_what_it_is_told_to() {
    let (node, folder) = node().await;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let words = "bench --json --num-prompts 8 --max-concurrency 2 --random-input-len 8 --random-output-len 4 \
                 --metric-percentiles 90,99.9 --percentile-metrics ttft,e2el --goodput ttft:60000 e2el:60000 --save-detailed";
    let (result, svg) = (path("result.json"), path("run.svg"));
    let args = ["--base-url", &format!("{}/", node.ready.api), "--result-filename", &result, "--svg", &svg];
    let output = starling(&words.split_whitespace().collect::<Vec<_>>().join(" "), &args).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&printed["model_id"], &printed["completed"], &printed["failed"]),
        (&json!("tiny"), &json!(8), &json!(0))
    );
    assert_eq!((&printed["num_prompts"], &printed["request_rate"]), (&json!(8), &json!("inf")));
    assert_eq!(printed["request_goodput"], printed["request_throughput"]);
    assert!(printed["p99.9_e2el_ms"].is_number() && printed["p90_ttft_ms"].is_number(), "{printed}");
    assert!(printed.get("mean_itl_ms").is_none());
    assert_eq!(printed["ttfts"].as_array().unwrap().len(), 8);
    let written: Value = serde_json::from_slice(&std::fs::read(&result).unwrap()).unwrap();
    assert_eq!(written, printed);
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg "));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_said_in_words_and_by_the_exit_code() {
    let (url, _bad) = bad_server(&[Deed::Busy]).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port().to_string();
    let absent = TempDir::new().unwrap().path().join("absent.json").display().to_string();
    let to = ["--base-url", url.as_str()];
    for (words, args, code, said) in [
        ("bench --port", &[closed.as_str()][..], 1, "cannot reach http://127.0.0.1:"),
        ("bench --model wrong", &to, 1, "--model \"wrong\": the server has tiny, other"),
        ("bench --num-prompts 3", &to, 1, "http 503 (3), the first: answered 503: backlog full"),
        ("bench --num-prompts 3", &to, 1, "error: no request succeeded"),
        ("bench --dataset-name sharegpt --dataset-path", &[&absent], 2, "cannot read --dataset-path"),
        ("bench --dataset-name sharegpt", &to, 2, "--dataset-path"),
        ("bench --request-rate 0", &to, 2, "'0' for '--request-rate <RATE>': it is not a number above 0"),
        ("bench --burstiness inf", &to, 2, "'inf' for '--burstiness <B>'"),
        ("bench --random-range-ratio 1", &to, 2, "'1' for '--random-range-ratio <R>'"),
        ("bench --metric-percentiles 99,101", &to, 2, "'101' for '--metric-percentiles <LIST>'"),
        ("bench --percentile-metrics ttft,speed", &to, 2, "\"speed\" is no metric"),
        ("bench --goodput itl:5", &to, 2, "\"itl\" is of a token"),
        ("bench --endpoint /v1/embeddings", &to, 2, "'/v1/embeddings' for '--endpoint <PATH>'"),
        ("bench --base-url https://there", &[], 2, "it does not begin with http://"),
        ("bench --base-url http://there/v1", &[], 2, "it ends with /v1"),
        ("bench --base-url http://there --port 1", &[], 2, "cannot be used with"),
        ("bench --num-prompts 3 --num-conversations 3", &to, 2, "cannot be used with"),
        ("bench --request-timeout 5", &to, 2, "\"5\" is not a duration"),
        ("bench --turns 0", &to, 2, "0 is not in 1"),
    ] {
        let output = starling(words, args).await;
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{words}: {told}");
        assert!(told.contains(said), "{words}: {told}");
    }
}
