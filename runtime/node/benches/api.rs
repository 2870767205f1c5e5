//! What the API and the actors cost: a node with the `timed` engine at zero cost, beside a bare axum handler that streams
//! as many events of the same size, in turns in one run.
//!
//! `STARLING_MODEL=FILE cargo bench -p starling --bench api`: the file's tokenizer is used, its weights are not.

use axum::Router;
use axum::response::sse::{Event, Sse};
use axum::routing::post;
use serde_json::json;
use starling::api::ServeLimits;
use starling::assembly::Node;
use starling::config::{Config, Sources, set};
use std::convert::Infallible;
use std::time::{Duration, Instant};

const CLIENTS: usize = 64;
const TOKENS: usize = 16;
const WINDOW: Duration = Duration::from_secs(4);
const TURNS: usize = 3;

/// One window of a closed loop.
struct Window {
    requests_s: f64,
    ttft_ms: Vec<f64>,
}

impl Window {
    fn percentile(&self, p: f64) -> f64 {
        let at = ((self.ttft_ms.len() - 1) as f64 * p).round() as usize;
        self.ttft_ms[at]
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_else(|_| "unknown".into());
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

/// Sends requests for `window` and reads each answer to its end.
async fn client(url: String, window: Duration, conversation: String) -> Vec<f64> {
    let http = reqwest::Client::new();
    let body = json!({
        "model": "bench", "prompt": "On and on it goes, a prompt of some words for every client.",
        "max_tokens": TOKENS, "stream": true, "temperature": 0, "ignore_eos": true,
    });
    let until = Instant::now() + window;
    let mut ttft_ms = Vec::new();
    while Instant::now() < until {
        let begun = Instant::now();
        let sent = http.post(&url).header("x-starling-conversation", &conversation).json(&body).send().await;
        let mut response = sent.expect("the server answers");
        assert_eq!(response.status(), 200);
        let mut first = None;
        while response.chunk().await.expect("a whole answer").is_some() {
            first.get_or_insert_with(|| begun.elapsed());
        }
        ttft_ms.push(first.expect("an event").as_secs_f64() * 1e3);
    }
    ttft_ms
}

async fn window(url: &str) -> Window {
    let begun = Instant::now();
    let clients: Vec<_> =
        (0..CLIENTS).map(|c| tokio::spawn(client(url.to_owned(), WINDOW, format!("client {c}")))).collect();
    let mut ttft_ms = Vec::new();
    for client in clients {
        ttft_ms.extend(client.await.expect("no panic"));
    }
    let requests_s = ttft_ms.len() as f64 / begun.elapsed().as_secs_f64();
    ttft_ms.sort_by(f64::total_cmp);
    Window { requests_s, ttft_ms }
}

/// The limit: the same bytes from a handler that does nothing.
async fn bare() -> String {
    let handler = || async {
        let chunk = json!({
            "id": "cmpl-00000000000000000000000000000000", "object": "text_completion", "created": 1_700_000_000,
            "model": "bench", "choices": [{ "index": 0, "text": " word", "logprobs": null, "finish_reason": null }],
        });
        let events = (0..TOKENS).map(move |_| Ok::<_, Infallible>(Event::default().data(chunk.to_string())));
        Sse::new(futures_util::stream::iter(events))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let router = Router::new().route("/v1/completions", post(handler));
    // The node's own accept loop, so that both sides send small packets at once.
    tokio::spawn(starling::api::serve(listener, router, ServeLimits::default(), std::future::pending()));
    format!("http://{address}/v1/completions")
}

fn config() -> Config {
    let model = std::env::var("STARLING_MODEL").expect("STARLING_MODEL names a model file");
    let mut flags = toml::Table::new();
    for (key, value) in [
        ("model.path", model.as_str()),
        ("model.id", "bench"),
        ("engine.kind", "timed"),
        ("engine.timed.prefill-per-token", "0us"),
        ("engine.timed.decode-per-step", "0us"),
        ("engine.timed.decode-per-sequence", "0us"),
        ("api.listen", "127.0.0.1:0"),
        ("admin.listen", "127.0.0.1:0"),
    ] {
        set(&mut flags, key, value);
    }
    set(&mut flags, "ranks.count", 2);
    Config::load(&Sources { flags, ..Sources::default() }).expect("a sound configuration")
}

#[tokio::main]
async fn main() {
    let load_before = load_average();
    let node = Node::start(&config()).await.expect("starts");
    let starling = format!("{}/v1/completions", node.ready.api);
    let bare = bare().await;
    let mut windows = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        windows[0].push(window(&starling).await);
        windows[1].push(window(&bare).await);
    }
    // stdout is the benchmark's result.
    #[allow(clippy::print_stdout)]
    {
        println!(
            "clients {CLIENTS} (closed loop, same process), tokens {TOKENS}, median of {TURNS} windows of {WINDOW:?}"
        );
        println!("load average {load_before} before, {} after", load_average());
        let mut rates = Vec::new();
        for (name, windows) in ["starling, timed engine at zero cost", "bare axum, same events"].iter().zip(&windows) {
            let rate = median(windows.iter().map(|w| w.requests_s).collect());
            let p50 = median(windows.iter().map(|w| w.percentile(0.5)).collect());
            let p99 = median(windows.iter().map(|w| w.percentile(0.99)).collect());
            println!("{name}: {rate:.0} requests/s, TTFT p50 {p50:.2} ms, p99 {p99:.2} ms");
            rates.push(rate);
        }
        println!("ratio {:.2}", rates[0] / rates[1]);
    }
    node.drain().await;
}
