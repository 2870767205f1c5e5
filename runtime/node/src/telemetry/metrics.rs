//! Every metric of the node: names, types, labels and meaning in this one file. `runtime/docs/metrics.md` is written from it.
//!
//! Own names are `starling_WHAT_UNIT`. For what others measure too, the names of vLLM are exported, since autoscalers,
//! gateways and dashboards look for those; to them a node looks like one engine, whatever the number of its ranks.

use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};

/// Time to first token, in seconds; vLLM's bounds.
const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Between tokens, in seconds; vLLM's bounds and three below its lowest, which is coarse for a fast device.
const ITL: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];
/// A whole request, in seconds; vLLM's bounds.
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Tokens of a request; 1, 2, 5 a decade, as vLLM has them.
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
/// Work inside the node, in seconds: from ten microseconds to ten seconds.
const WORK: &[f64] = &[
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// A round, in seconds: from 50 us, a round trip on one machine, to what a member that was away costs.
const ROUND: &[f64] = &[
    5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 4e-4, 5e-4, 7.5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 0.01, 0.02,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

fn ttft() -> Histogram {
    Histogram::new(TTFT.iter().copied())
}

fn itl() -> Histogram {
    Histogram::new(ITL.iter().copied())
}

fn request() -> Histogram {
    Histogram::new(REQUEST.iter().copied())
}

fn tokens() -> Histogram {
    Histogram::new(TOKENS.iter().copied())
}

fn work() -> Histogram {
    Histogram::new(WORK.iter().copied())
}

fn round() -> Histogram {
    Histogram::new(ROUND.iter().copied())
}

/// One metric, for the documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// As it is exposed; a histogram adds `_bucket`, `_sum` and `_count`.
    pub name: String,
    pub kind: &'static str,
    pub labels: Vec<&'static str>,
    pub help: &'static str,
}

/// Keys and values of one series.
type Labels<const N: usize> = [(&'static str, String); N];

/// The series of one metric, by the values of its labels.
#[derive(Clone, Debug)]
pub struct Labelled<M, const N: usize> {
    keys: [&'static str; N],
    family: Family<Labels<N>, M, fn() -> M>,
}

impl<M: Clone, const N: usize> Labelled<M, N> {
    pub fn with(&self, values: [&str; N]) -> M {
        let mut values = values.into_iter().map(str::to_owned);
        let labels = self.keys.map(|key| (key, values.next().unwrap_or_default()));
        self.family.get_or_create_owned(&labels)
    }
}

pub type FloatGauge = Gauge<f64, AtomicU64>;

/// What a node tells of itself once.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Label `model_name`: what clients call the model.
    pub model: String,
    pub block_tokens: u32,
    pub version: &'static str,
    pub commit: &'static str,
}

macro_rules! metrics {
    ($($field:ident: $type:ty = $make:expr;)*) => {
        /// Handles of all metrics. Updating one never blocks for long; scraping reads them.
        #[derive(Debug)]
        pub struct Registered {
            registry: Registry,
            described: Vec<Described>,
            $(pub $field: $type,)*
        }

        impl Registered {
            pub fn new(identity: &Identity) -> Self {
                let mut registrar = Registrar {
                    registry: Registry::default(),
                    model: vec![
                        ("model_name".into(), identity.model.clone().into()),
                        ("engine".into(), "0".into()),
                    ],
                    described: Vec::new(),
                };
                $(let $field = register::<$type>(&mut registrar, $make);)*
                Self { registry: registrar.registry, described: registrar.described, $($field,)* }
            }
        }
    };
}

metrics! {
    // Shared meanings under vLLM's names.
    running: Gauge = |r| r.gauge("vllm:num_requests_running", [],
        "Requests that hold KV blocks of a rank.").with([]);
    waiting: Gauge = |r| r.gauge("vllm:num_requests_waiting", [],
        "Requests that wait: not announced, not placed, or without KV blocks.").with([]);
    kv_usage: FloatGauge = |r| r.float("vllm:kv_cache_usage_perc", [],
        "Share of KV blocks that requests hold, 0 to 1.").with([]);
    cache_config: Labelled<Gauge, 2> = |r| r.gauge("vllm:cache_config_info", ["block_size", "num_gpu_blocks"],
        "Tokens of a KV block and blocks of all ranks, as labels; the value is 1.");
    prompt_tokens: Counter = |r| r.counter("vllm:prompt_tokens", [],
        "Prompt tokens of ended requests.").with([]);
    prompt_tokens_cached: Counter = |r| r.counter("vllm:prompt_tokens_cached", [],
        "Prompt tokens of ended requests whose KV was reused.").with([]);
    generation_tokens: Counter = |r| r.counter("vllm:generation_tokens", [],
        "Tokens generated.").with([]);
    request_success: Labelled<Counter, 1> = |r| r.counter("vllm:request_success", ["finished_reason"],
        "Ended requests, by reason: stop, length or abort.");
    preemptions: Counter = |r| r.counter("vllm:num_preemptions", [],
        "Times that a running request gave its blocks to another and was computed again.").with([]);
    prefix_queries: Counter = |r| r.counter("vllm:prefix_cache_queries", [],
        "Tokens looked up in the prefix cache.").with([]);
    prefix_hits: Counter = |r| r.counter("vllm:prefix_cache_hits", [],
        "Tokens found in the prefix cache.").with([]);
    ttft: Histogram = |r| r.histogram("vllm:time_to_first_token_seconds", [], ttft,
        "From the request's head to its first token (TTFT).").with([]);
    itl: Histogram = |r| r.histogram("vllm:inter_token_latency_seconds", [], itl,
        "Between two tokens of a request (ITL).").with([]);
    e2e: Histogram = |r| r.histogram("vllm:e2e_request_latency_seconds", [], request,
        "From the request's head to the end of its answer (E2E).").with([]);
    queue_time: Histogram = |r| r.histogram("vllm:request_queue_time_seconds", [], request,
        "From submission to placement.").with([]);
    request_prompt_tokens: Histogram = |r| r.histogram("vllm:request_prompt_tokens", [], tokens,
        "Prompt tokens of a request.").with([]);
    request_generation_tokens: Histogram = |r| r.histogram("vllm:request_generation_tokens", [], tokens,
        "Tokens generated for a request.").with([]);

    // Ranks.
    kv_blocks: Labelled<Gauge, 3> = |r| r.gauge("starling_kv_blocks", ["rank", "life_cycle", "state"],
        "KV blocks by state: free, reusable (a prefix that nobody uses) or held. They add up to starling_kv_pool_blocks.");
    kv_pool_blocks: Labelled<Gauge, 2> = |r| r.gauge("starling_kv_pool_blocks", ["rank", "life_cycle"],
        "KV blocks of a rank, by life cycle: layers that keep the same of a sequence, as all with one sliding window.");
    kv_pool_blocks_proposed: Labelled<Gauge, 2> = |r| r.gauge("starling_kv_pool_blocks_proposed", ["rank", "life_cycle"],
        "KV blocks that a rank's pools should have by the lengths that it measured, from when they are far from what they have.");
    kv_conversations: Labelled<Gauge, 1> = |r| r.gauge("starling_kv_conversations", ["rank"],
        "Conversations whose end points a rank keeps, or that have a turn under way there.");
    kv_turns: Labelled<Counter, 1> = |r| r.counter("starling_kv_turns", ["rank"],
        "Turns of conversations that ended, where end points are kept by conversation.");
    kv_turns_unplanned: Labelled<Counter, 1> = |r| r.counter("starling_kv_turns_unplanned", ["rank"],
        "Those of them whose end points could not be planned: they stay until other blocks push them out. A warning.");
    kv_evicted: Labelled<Counter, 1> = |r| r.counter("starling_kv_evicted_blocks", ["rank"],
        "Reusable blocks given to another use.");
    rank_running: Labelled<Gauge, 1> = |r| r.gauge("starling_rank_running_requests", ["rank"],
        "Requests that hold KV blocks of a rank.");
    rank_waiting: Labelled<Gauge, 1> = |r| r.gauge("starling_rank_waiting_requests", ["rank"],
        "Requests placed on a rank that have no KV blocks yet.");
    step_seconds: Labelled<Histogram, 1> = |r| r.histogram("starling_step_seconds", ["rank"], work,
        "One step of a rank.");
    step_tokens: Labelled<Counter, 1> = |r| r.counter("starling_step_tokens", ["rank"],
        "Tokens that steps computed, prefill and decode.");
    drafted: Labelled<Counter, 1> = |r| r.counter("starling_draft_tokens", ["rank"],
        "Tokens that sequences guessed ahead and steps verified.");
    accepted: Labelled<Counter, 1> = |r| r.counter("starling_draft_accepted_tokens", ["rank"],
        "Guessed tokens that were right: each saved its sequence a step.");
    steps_dummy: Labelled<Counter, 1> = |r| r.counter("starling_steps_dummy", ["rank"],
        "In lockstep, rounds in which a rank had no step to run while requests were active: it took part as a padded rank.");
    steps_late: Labelled<Counter, 1> = |r| r.counter("starling_steps_late", ["rank"],
        "In lockstep, rounds that went on without a rank because its step took too long; it got nothing new in them.");
    cancels: Counter = |r| r.counter("starling_cancels", [],
        "Requests cancelled on a rank.").with([]);
    cancel_steps: Counter = |r| r.counter("starling_cancel_steps", [],
        "Steps that ended between a cancel's receipt and the release of its blocks, summed.").with([]);
    cancel_steps_max: Gauge = |r| r.gauge("starling_cancel_steps_max", [],
        "The most such steps that one cancel took; never above 1.").with([]);

    // Rounds, queue, placement.
    rounds: Counter = |r| r.counter("starling_rounds", [],
        "Rounds applied.").with([]);
    round_seconds: Histogram = |r| r.histogram("starling_round_seconds", [], round,
        "A round at this node, from its own contribution to the decisions.").with([]);
    round_apply_seconds: Histogram = |r| r.histogram("starling_round_apply_seconds", [], work,
        "From a completed round to its decisions.").with([]);
    round_wait_seconds: Labelled<Histogram, 1> = |r| r.histogram("starling_round_wait_seconds", ["member"], round,
        "How long after this node's own contribution to a round a member's came; 0 where it was there first.");
    view_epoch: Gauge = |r| r.gauge("starling_view_epoch", [],
        "The view of the cluster that this node was in last, counted from 1; 0 before the first.").with([]);
    standstill: FloatGauge = |r| r.float("starling_standstill_seconds", [],
        "For how long no round completes while one should; 0 while rounds go on.").with([]);
    queue_requests: Gauge = |r| r.gauge("starling_queue_requests", [],
        "Announced requests that wait to be placed.").with([]);
    backlog_requests: Gauge = |r| r.gauge("starling_backlog_requests", [],
        "Requests at this node that are not announced yet.").with([]);
    open_requests: Gauge = |r| r.gauge("starling_open_requests", [],
        "Requests of this node that have not ended.").with([]);
    placements: Labelled<Counter, 1> = |r| r.counter("starling_placements", ["why"],
        "Placements, by the rule that chose the rank.");
    rejections: Labelled<Counter, 1> = |r| r.counter("starling_admission_rejections", ["reason"],
        "Requests refused.");
    keyless: Counter = |r| r.counter("starling_conversation_keyless", [],
        "Requests without a conversation key: no rank is preferred for their prefix.").with([]);
    lost_rank: Counter = |r| r.counter("starling_conversation_lost_rank", [],
        "Later turns that were placed on another rank than their conversation's.").with([]);
    text_encoded: Counter = |r| r.counter("starling_text_encoded_bytes", [],
        "Bytes of prompts' text that were turned into tokens.").with([]);
    text_cache_lookups: Labelled<Counter, 1> = |r| r.counter("starling_text_cache_lookups", ["result"],
        "Prompts of conversations, by result: hit (its beginning was encoded by an earlier turn) or miss.");
    text_cache_tokens: Counter = |r| r.counter("starling_text_cache_reused_tokens", [],
        "Prompt tokens that an earlier turn's text was turned into already.").with([]);
    text_cache_evictions: Counter = |r| r.counter("starling_text_cache_evictions", [],
        "Conversations' prompts that made room for others in the text cache.").with([]);
    text_cache_bytes: Gauge = |r| r.gauge("starling_text_cache_bytes", [],
        "Memory of the text cache.").with([]);
    attempts_lost: Counter = |r| r.counter("starling_attempts_lost", [],
        "Placements that failed with their rank.").with([]);
    fenced: Counter = |r| r.counter("starling_fenced", [],
        "Prompts and frames of attempts that were not current, dropped.").with([]);
    replica_faults: Labelled<Gauge, 1> = |r| r.gauge("starling_replica_faults", ["kind"],
        "Faults the replica counted since it started.");

    // Links to other nodes.
    link_up: Labelled<Gauge, 1> = |r| r.gauge("starling_link_up", ["peer"],
        "1 while messages can be sent to a peer.");
    links: Labelled<Counter, 1> = |r| r.counter("starling_links", ["peer"],
        "Times that a link to a peer came up.");
    link_frames: Labelled<Counter, 2> = |r| r.counter("starling_link_frames", ["peer", "direction"],
        "Frames over the link, by direction: in or out.");
    link_bytes: Labelled<Counter, 2> = |r| r.counter("starling_link_bytes", ["peer", "direction"],
        "Bytes of these frames.");
    link_dropped: Labelled<Counter, 2> = |r| r.counter("starling_link_dropped_messages", ["peer", "reason"],
        "Messages of a peer that reached no mailbox, and answers that nobody waited for, by reason.");
    link_held: Labelled<Gauge, 1> = |r| r.gauge("starling_link_held_bytes", ["peer"],
        "Credit of a peer's messages that wait in mailboxes here.");
    link_asks: Labelled<Gauge, 2> = |r| r.gauge("starling_link_open_asks", ["peer", "asker"],
        "Questions and streams under way, by who asked: node (this one) or peer.");

    // Actors.
    mailbox_depth: Labelled<Gauge, 1> = |r| r.gauge("starling_actor_mailbox_depth", ["actor"],
        "Messages waiting.");
    handle_seconds: Labelled<Histogram, 1> = |r| r.histogram("starling_actor_handle_seconds", ["actor"], work,
        "Handling one message; one in 64 is measured.");
    actor_restarts: Labelled<Counter, 1> = |r| r.counter("starling_actor_restarts", ["actor"],
        "Restarts after a failure.");
    actor_failures: Labelled<Counter, 1> = |r| r.counter("starling_actor_failures", ["actor"],
        "Panics and errors.");

    // The API and the process.
    http_requests: Labelled<Counter, 2> = |r| r.counter("starling_http_requests", ["endpoint", "status"],
        "Requests answered; 499 when the client left.");
    http_errors: Labelled<Counter, 2> = |r| r.counter("starling_http_errors", ["endpoint", "error"],
        "Requests that ended with an error, a broken stream among them.");
    http_open: Labelled<Gauge, 1> = |r| r.gauge("starling_http_open_requests", ["endpoint"],
        "Requests being answered.");
    rss: Gauge = |r| r.gauge("process_resident_memory_bytes", [],
        "Resident memory of the process.").with([]);
    start_time: FloatGauge = |r| r.float("process_start_time_seconds", [],
        "Start of the process, in seconds since 1970.").with([]);
    build: Labelled<Gauge, 2> = |r| r.gauge("starling_build_info", ["version", "commit"],
        "What runs here, as labels; the value is 1.");
}

fn register<M>(registrar: &mut Registrar, make: fn(&mut Registrar) -> M) -> M {
    make(registrar)
}

struct Registrar {
    registry: Registry,
    /// Labels that vLLM's names carry besides their own.
    model: Vec<(std::borrow::Cow<'static, str>, std::borrow::Cow<'static, str>)>,
    described: Vec<Described>,
}

impl Registrar {
    fn counter<const N: usize>(
        &mut self,
        name: &str,
        keys: [&'static str; N],
        help: &'static str,
    ) -> Labelled<Counter, N> {
        self.add((name, "counter"), keys, Counter::default, help)
    }

    fn gauge<const N: usize>(&mut self, name: &str, keys: [&'static str; N], help: &'static str) -> Labelled<Gauge, N> {
        self.add((name, "gauge"), keys, Gauge::default, help)
    }

    fn float<const N: usize>(
        &mut self,
        name: &str,
        keys: [&'static str; N],
        help: &'static str,
    ) -> Labelled<FloatGauge, N> {
        self.add((name, "gauge"), keys, FloatGauge::default, help)
    }

    fn histogram<const N: usize>(
        &mut self,
        name: &str,
        keys: [&'static str; N],
        make: fn() -> Histogram,
        help: &'static str,
    ) -> Labelled<Histogram, N> {
        self.add((name, "histogram"), keys, make, help)
    }

    fn add<M, const N: usize>(
        &mut self,
        (name, kind): (&str, &'static str),
        keys: [&'static str; N],
        make: fn() -> M,
        help: &'static str,
    ) -> Labelled<M, N>
    where
        Family<Labels<N>, M, fn() -> M>: Metric + Clone,
    {
        let family = Family::new_with_constructor(make);
        let is_shared = name.starts_with("vllm:");
        let registry = if is_shared {
            self.registry.sub_registry_with_labels(self.model.iter().cloned())
        } else {
            &mut self.registry
        };
        // The registry ends each help text with a full stop of its own.
        registry.register(name, help.trim_end_matches('.'), family.clone());
        let suffix = if kind == "counter" { "_total" } else { "" };
        let shared: &[&str] = if is_shared { &["model_name", "engine"] } else { &[] };
        let labels = shared.iter().copied().chain(keys).collect();
        self.described.push(Described { name: format!("{name}{suffix}"), kind, labels, help });
        Labelled { keys, family }
    }
}

/// A text format that Prometheus reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Prometheus,
    OpenMetrics,
}

impl Format {
    /// By the header `Accept`.
    pub fn accepted(accept: Option<&str>) -> Self {
        match accept {
            Some(accept) if accept.contains("application/openmetrics-text") => Self::OpenMetrics,
            _ => Self::Prometheus,
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Registered {
    /// What is exported, in order of registration.
    pub fn described(&self) -> &[Described] {
        &self.described
    }

    /// What does not change while the process runs.
    pub fn identify(&self, identity: &Identity) {
        self.build.with([identity.version, identity.commit]).set(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.start_time.set(now.as_secs_f64());
    }

    pub fn encode(&self, format: Format) -> String {
        let mut out = String::new();
        let outcome = match format {
            Format::Prometheus => prometheus_text::encode(&mut out, &self.registry),
            Format::OpenMetrics => text::encode(&mut out, &self.registry),
        };
        // Writing to a string cannot fail.
        debug_assert!(outcome.is_ok());
        out
    }
}

/// Resident memory; `None` where the system does not tell.
pub fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
