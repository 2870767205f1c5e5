//! What it costs that nodes decide together: three processes of the binary on this machine, the `timed` engine at zero cost,
//! the limits beside it in turns of one run. `cargo bench -p starling --bench cluster`
//!
//! - rounds, from the own contribution to the decisions, with no requests and with many, beside a frame there and back over
//!   the bare mesh: one after another, and seldom as a heartbeat is;
//! - the CPU time of a node that has nothing to do;
//! - the first token of a request on the rank of the node that was asked, and on another's;
//! - tokens of many streams, beside one node with as many ranks.

// The harness of the tests: it is used as far as it fits.
#[allow(dead_code)]
#[path = "../../../tests/cluster/client.rs"]
mod client;
#[allow(dead_code)]
#[path = "../../../tests/cluster/process.rs"]
mod process;
#[allow(dead_code)]
#[path = "../../../tests/cluster/rig.rs"]
mod rig;

use bytes::Bytes;
use client::Client;
use rig::{Cluster, MODEL};
use serde_json::json;
use starling_transport::{Authority, Credentials, DownReason, Handler, Lane, Limits, Link, Mesh, MeshSettings};
use starling_transport::{NodeCertificate, NodeName, Timings};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

const NODES: usize = 3;
const TURNS: usize = 5;
/// Of a cluster that is watched: ticks of CPU time are 10 ms, so one in a thousand of a core.
const WATCH: Duration = Duration::from_secs(10);
const REQUESTS_PER_S: u32 = 200;
const REQUEST_TOKENS: usize = 8;
/// Each on the own rank and on another's, in all turns together.
const FIRST_TOKENS: usize = 200;
const STREAMS: usize = 64;
const STREAM_TOKENS: usize = 256;
const STREAMS_WATCH: Duration = Duration::from_secs(5);
const PINGS: usize = 3_000;
const SELDOM_PINGS: usize = 100;
/// Long enough for every thread to go to sleep in between.
const SELDOM: Duration = Duration::from_millis(20);
const FRAME_BYTES: usize = 64;

const FREE: &str = "engine.timed.prefill-per-token = '0us'\nengine.timed.decode-per-step = '0us'\n\
                    engine.timed.decode-per-sequence = '0us'\n";

fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

fn median(values: &[f64]) -> f64 {
    percentile(values.to_vec(), 0.5)
}

// -- the bare mesh

#[derive(Default)]
struct Asker(Mutex<Option<oneshot::Sender<()>>>);
struct Answerer;

impl Handler for Asker {
    fn up(&self, _: &Link) {}
    fn down(&self, _: &Link, _: &DownReason) {}
    fn frame(&self, _: &Link, _: Lane, _: Bytes) {
        let waiting = self.0.lock().expect("no holder panics").take();
        let _ = waiting.map(|waiting| waiting.send(()));
    }
    fn bulk(&self, _: &Link, _: Bytes) {}
    fn datagram(&self, _: &Link, _: Bytes) {}
    fn refused(&self, _: &str, _: &str) {}
}

impl Handler for Answerer {
    fn up(&self, _: &Link) {}
    fn down(&self, _: &Link, _: &DownReason) {}
    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        let _ = link.send(lane, frame);
    }
    fn bulk(&self, _: &Link, _: Bytes) {}
    fn datagram(&self, _: &Link, _: Bytes) {}
    fn refused(&self, _: &str, _: &str) {}
}

struct Bare {
    asker: Arc<Asker>,
    link: Link,
    _meshes: [Mesh; 2],
}

impl Bare {
    async fn start() -> Self {
        let authority = Authority::new("bench").expect("an authority");
        let settings = |name: &str| {
            let name = NodeName::new(name).expect("a name");
            let NodeCertificate { certificate_pem, key_pem } = authority.issue(&name, 1).expect("a certificate");
            let authority = authority.certificate_pem().as_bytes().to_vec();
            let credentials = Credentials::from_pem(&authority, certificate_pem.as_bytes(), key_pem.as_bytes());
            MeshSettings {
                incarnation: 1,
                settings_digest: 1,
                listen: "127.0.0.1:0".parse().expect("an address"),
                credentials: credentials.expect("credentials"),
                limits: Limits::default(),
                timings: Timings::default(),
            }
        };
        let asker = Arc::<Asker>::default();
        let asks = Mesh::start(settings("asks"), asker.clone()).await.expect("a mesh");
        let answers = Mesh::start(settings("answers"), Arc::new(Answerer)).await.expect("a mesh");
        asks.connect(NodeName::new("answers").expect("a name"), answers.local_addr().to_string());
        let linked = async || asks.links().pop().ok_or_else(|| "no link".to_owned());
        let link = process::eventually("a link", linked).await;
        Self { asker, link, _meshes: [asks, answers] }
    }

    /// Frames there and back, one after another or at this pace: microseconds.
    async fn pings(&self, count: usize, pace: Option<Duration>) -> Vec<f64> {
        let mut ticks = pace.map(interval);
        let mut took_us = Vec::with_capacity(count);
        for _ in 0..count {
            if let Some(ticks) = &mut ticks {
                ticks.tick().await;
            }
            let (sender, back) = oneshot::channel();
            let begun = Instant::now();
            *self.asker.0.lock().expect("no holder panics") = Some(sender);
            self.link.send(Lane::Rounds, Bytes::from_static(&[7; FRAME_BYTES])).expect("room in the queue");
            back.await.expect("an answer");
            took_us.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        took_us
    }
}

// -- rounds and CPU time

/// How many rounds of all nodes took at most so long, by upper bound in nanoseconds.
async fn rounds(cluster: &Cluster) -> BTreeMap<u64, f64> {
    let mut sum = BTreeMap::new();
    for at in 0..NODES {
        let (_, text) = cluster.client(at).admin("/metrics").await.expect("a scrape");
        for line in text.lines() {
            let Some(bucket) = line.strip_prefix("starling_round_seconds_bucket{le=\"") else { continue };
            let (bound, count) = bucket.split_once("\"} ").expect("a sample");
            let bound_ns = (bound.parse::<f64>().expect("a bound") * 1e9) as u64;
            *sum.entry(bound_ns).or_default() += count.parse::<f64>().expect("a count");
        }
    }
    sum
}

/// The share's place between two bounds, in microseconds, as if values lay evenly between them.
fn within(before: &BTreeMap<u64, f64>, after: &BTreeMap<u64, f64>, share: f64) -> f64 {
    let since: Vec<(u64, f64)> = after.iter().map(|(bound, count)| (*bound, count - before[bound])).collect();
    let wanted = since.last().map_or(0.0, |(_, all)| all * share);
    let (mut lower_ns, mut below) = (0, 0.0);
    for (bound_ns, count) in since {
        if count >= wanted && count > below {
            let part = (wanted - below) / (count - below);
            return (lower_ns as f64 + part * (bound_ns - lower_ns) as f64) / 1e3;
        }
        (lower_ns, below) = (bound_ns, count);
    }
    f64::NAN
}

/// Ticks of CPU time that a process used.
fn cpu_ticks(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<f64>().expect("a number")).sum()
}

const TICKS_PER_S: f64 = 100.0;

/// Nobody asks anything: percent of a core a node.
async fn idle(cluster: &Cluster) -> f64 {
    let ticks = || cluster.nodes.iter().map(|node| cpu_ticks(node.process().pid())).sum::<f64>();
    let (begun, before) = (Instant::now(), ticks());
    // sleeps because it watches what happens without it
    tokio::time::sleep(WATCH).await;
    (ticks() - before) / TICKS_PER_S / begun.elapsed().as_secs_f64() / NODES as f64 * 100.0
}

// -- requests

fn post(http: &reqwest::Client, node: &Client, tokens: usize) -> reqwest::RequestBuilder {
    let prompt = "On and on it goes, a prompt of some words for every client.";
    let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": true, "temperature": 0,
        "ignore_eos": true });
    http.post(format!("{}/v1/completions", node.api)).json(&body)
}

/// Milliseconds to the first event; reads the whole answer.
async fn first_token(request: reqwest::RequestBuilder) -> f64 {
    let begun = Instant::now();
    let mut response = request.send().await.expect("the node answers");
    assert_eq!(response.status(), 200);
    let mut first = None;
    while response.chunk().await.expect("a whole answer").is_some() {
        first.get_or_insert_with(|| begun.elapsed());
    }
    first.expect("an event").as_secs_f64() * 1e3
}

/// Asks the nodes in turn, at a steady rate whatever they do.
async fn steady(http: &reqwest::Client, cluster: &Cluster) {
    let mut ticks = interval(Duration::from_secs(1) / REQUESTS_PER_S);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut requests = JoinSet::new();
    for number in 0..WATCH.as_secs() as usize * REQUESTS_PER_S as usize {
        ticks.tick().await;
        requests.spawn(first_token(post(http, cluster.client(number), REQUEST_TOKENS)));
    }
    requests.join_all().await;
}

/// First tokens on the asked node's own rank and on another's, in milliseconds, in turns.
async fn first_tokens(http: &reqwest::Client, cluster: &Cluster, count: usize) -> [Vec<f64>; 2] {
    let mut took_ms = [Vec::new(), Vec::new()];
    for number in 0..count {
        for (place, took_ms) in took_ms.iter_mut().enumerate() {
            let request = post(http, cluster.client(number), REQUEST_TOKENS);
            let request = request.header("x-starling-rank", (number + place) % NODES);
            took_ms.push(first_token(request.header("x-starling-rank-strict", "true")).await);
        }
    }
    took_ms
}

async fn generated(cluster: &Cluster) -> f64 {
    let mut tokens = 0.0;
    for node in &cluster.nodes {
        tokens += node.client().metrics().await.sum("vllm:generation_tokens_total", &[]);
    }
    tokens
}

/// Tokens a second that many clients get, each of them in a closed loop.
async fn streams(http: &reqwest::Client, cluster: &Cluster) -> f64 {
    let (begun, before) = (Instant::now(), generated(cluster).await);
    let mut clients = JoinSet::new();
    for number in 0..STREAMS {
        let (http, node) = (http.clone(), cluster.client(number).clone());
        clients.spawn(async move {
            while begun.elapsed() < STREAMS_WATCH {
                first_token(post(&http, &node, STREAM_TOKENS)).await;
            }
        });
    }
    clients.join_all().await;
    (generated(cluster).await - before) / begun.elapsed().as_secs_f64()
}

// -- what is shown

#[derive(Default)]
struct Figures {
    bare_us: [Vec<f64>; 2],
    seldom_us: [Vec<f64>; 2],
    idle_us: [Vec<f64>; 2],
    /// A bare round trip for each request, while the cluster serves them: what the machine gives to whoever asks so seldom.
    beside_us: [Vec<f64>; 2],
    busy_us: [Vec<f64>; 2],
    busy_rounds_per_s: Vec<f64>,
    idle_cpu: Vec<f64>,
    first_ms: [Vec<f64>; 2],
    tokens_per_s: [Vec<f64>; 2],
}

const SHARES: [f64; 2] = [0.5, 0.99];

impl Figures {
    async fn turn(&mut self, http: &reqwest::Client, (bare, cluster, alone): (&Bare, &Cluster, &Cluster)) {
        let (close, seldom) = (bare.pings(PINGS, None).await, bare.pings(SELDOM_PINGS, Some(SELDOM)).await);
        let begun = rounds(cluster).await;
        self.idle_cpu.push(idle(cluster).await);
        let between = (Instant::now(), rounds(cluster).await);
        let pace = Duration::from_secs(1) / REQUESTS_PER_S;
        let pings = WATCH.as_millis() / pace.as_millis();
        let (beside, ()) = tokio::join!(bare.pings(pings as usize, Some(pace)), steady(http, cluster));
        let seconds = between.0.elapsed().as_secs_f64();
        let ended = rounds(cluster).await;
        for (place, share) in SHARES.into_iter().enumerate() {
            self.bare_us[place].push(percentile(close.clone(), share));
            self.seldom_us[place].push(percentile(seldom.clone(), share));
            self.idle_us[place].push(within(&begun, &between.1, share));
            self.beside_us[place].push(percentile(beside.clone(), share));
            self.busy_us[place].push(within(&between.1, &ended, share));
        }
        let all = |of: &BTreeMap<u64, f64>| of.values().last().copied().unwrap_or(0.0);
        self.busy_rounds_per_s.push((all(&ended) - all(&between.1)) / seconds / NODES as f64);
        for (all, some) in self.first_ms.iter_mut().zip(first_tokens(http, cluster, FIRST_TOKENS / TURNS).await) {
            all.extend(some);
        }
        for (rates, cluster) in self.tokens_per_s.iter_mut().zip([cluster, alone]) {
            rates.push(streams(http, cluster).await);
        }
    }

    // stdout is the benchmark's result.
    #[allow(clippy::print_stdout)]
    fn show(&self) {
        let pair = |of: &[Vec<f64>; 2]| (median(&of[0]), median(&of[1]));
        let (bare, seldom) = (pair(&self.bare_us), pair(&self.seldom_us));
        println!("{:<44}{:>10}{:>10}{:>12}", "microseconds", "p50", "p99", "p50 / bare");
        let row = |name: &str, (middle, tail): (f64, f64), floor: f64| {
            println!("{name:<44}{middle:>10.0}{tail:>10.0}{:>12.2}", middle / floor);
        };
        row("a frame there and back, one after another", bare, bare.0);
        row("a frame there and back, one in 20 ms", seldom, seldom.0);
        row("a round, no requests (to one in 20 ms)", pair(&self.idle_us), seldom.0);
        let (beside, busy) = (pair(&self.beside_us), pair(&self.busy_us));
        row(&format!("beside {REQUESTS_PER_S} requests/s, one for each"), beside, beside.0);
        row(&format!("a round, {REQUESTS_PER_S} requests/s (to one for each)"), busy, beside.0);
        row(&format!("a round, {REQUESTS_PER_S} requests/s (to one after another)"), busy, bare.0);
        println!("rounds a second at {REQUESTS_PER_S} requests/s: {:.0}", median(&self.busy_rounds_per_s));
        println!("CPU of a node without requests: {:.2} % of a core", median(&self.idle_cpu));
        let [own, other] = &self.first_ms;
        let tails = [own, other].map(|ms| percentile(ms.clone(), 0.99));
        let middles = [own, other].map(|ms| median(ms));
        println!("first token, ms: on the own rank p50 {:.2}, p99 {:.2}", middles[0], tails[0]);
        println!("first token, ms: on another's   p50 {:.2}, p99 {:.2}", middles[1], tails[1]);
        println!("first token, ms: added at p50 {:.2} (of {} each)", middles[1] - middles[0], own.len());
        let [together, alone] = self.tokens_per_s.each_ref().map(|rates| median(rates));
        println!("{STREAMS} streams of {STREAM_TOKENS} tokens: {together:.0} tokens/s over {NODES} nodes");
        println!("the same with one node of {NODES} ranks: {alone:.0} tokens/s, ratio {:.2}", together / alone);
    }
}

fn load_average() -> String {
    std::fs::read_to_string("/proc/loadavg").map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

#[tokio::main]
async fn main() {
    let bare = Bare::start().await;
    let cluster = Cluster::start(NODES, 1, FREE).await;
    let alone = Cluster::apart(1, &format!("{FREE}ranks.count = {NODES}\n")).await;
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    // Connections are made and code is paged in.
    first_tokens(&http, &cluster, 2 * NODES).await;
    let before = load_average();
    let mut figures = Figures::default();
    for _ in 0..TURNS {
        figures.turn(&http, (&bare, &cluster, &alone)).await;
    }
    #[allow(clippy::print_stdout)]
    {
        println!(
            "median of {TURNS} turns, all on one machine; load average before: {before}, after: {}",
            load_average()
        );
    }
    figures.show();
}
