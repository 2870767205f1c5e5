//! What must hold between values, once each has the right type.

use super::{Config, Kv, Problem, ReusePolicy};
use crate::fetch;
use starling_transport::NodeName;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// A view has at most this many members, and a node no more ranks.
const RANKS: RangeInclusive<u32> = 1..=64;
const MEMBERS_MAX: usize = 64;
const LANES: RangeInclusive<u8> = 1..=4;
/// Longer, and a client has given up by itself.
const STREAM_WAIT_S: RangeInclusive<u64> = 0..=3600;
const CHANGE_MS: RangeInclusive<u64> = 1..=600_000;
const SUSPECT_AFTER_MS: RangeInclusive<u64> = 1..=600_000;
/// Smaller blocks cost more bookkeeping than they save; larger ones share too little of a prefix.
const BLOCK_TOKENS: RangeInclusive<u32> = 8..=256;
const STEP_TOKENS: RangeInclusive<u32> = 1..=1 << 20;
/// One token of prompt and one to generate; positions are 32-bit.
const CONTEXT_TOKENS: RangeInclusive<u32> = 2..=1 << 24;
const SEQUENCES: RangeInclusive<u32> = 1..=4096;
/// A guess this far ahead is hardly ever right, and each costs as much as a token of prefill.
const DRAFT_TOKENS: RangeInclusive<u32> = 0..=64;
const THREADS: RangeInclusive<u32> = 1..=1024;
const KV_MEMORY_MIN: u64 = 1 << 20;
/// Each turn keeps its windows; nobody goes back this far.
const TURNS: RangeInclusive<u32> = 1..=1024;
/// Each takes some hundred bytes.
const CONVERSATIONS: RangeInclusive<u32> = 1..=1 << 24;
const PERCENT: RangeInclusive<u32> = 1..=100;
/// Places of snapshots: each is a state of memory.
const SNAPSHOTS_MAX: usize = 64;
/// Shares that people write down add up to one only so far.
const RATIO_SUM_TOLERANCE: f64 = 1e-6;
const BODY_LIMIT: RangeInclusive<u64> = 1 << 10..=1 << 30;
/// A replica's bound: members times this is what it may hold.
const ANNOUNCED: RangeInclusive<u32> = 1..=65_536;

/// Every value that does not fit, each named with its key.
pub fn check(config: &Config) -> Vec<Problem> {
    let mut problems = Problems(Vec::new());
    if let Err(e) = NodeName::new(&config.node.name) {
        problems.add("node.name", e.to_string());
    }
    problems.cluster(config);
    problems.listeners(config.api.listen, config.admin.listen);
    problems.range("api.body-limit", config.api.body_limit.bytes(), BODY_LIMIT, " bytes");
    problems.keys(config);
    problems.model(config);
    problems.engine(config);
    problems.kv(config);
    problems.snapshots(&config.kv);
    problems.range("ranks.count", config.ranks.count, RANKS, "");
    problems.rounds(config);
    problems.limits(config);
    problems.telemetry(config);
    problems.0
}

struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, key: &str, what: String) {
        self.0.push(Problem::new(key, what));
    }

    fn range<N: PartialOrd + std::fmt::Display>(&mut self, key: &str, n: N, range: RangeInclusive<N>, unit: &str) {
        if !range.contains(&n) {
            let (low, high) = range.into_inner();
            self.add(key, format!("{n}{unit} is not in {low} to {high}"));
        }
    }

    fn cluster(&mut self, config: &Config) {
        let (cluster, mesh) = (&config.cluster, &config.mesh);
        // Both are names of certificates and follow one rule.
        if NodeName::new(&cluster.name).is_err() {
            let what = format!("{:?} is not 1 to 63 of a-z, 0-9 and '-', a letter first, no '-' last", cluster.name);
            self.add("cluster.name", what);
        }
        self.range("cluster.suspect-after-ms", cluster.suspect_after_ms, SUSPECT_AFTER_MS, "");
        let changes = [
            ("cluster.suspicion-gather-ms", cluster.suspicion_gather_ms),
            ("cluster.report-after-ms", cluster.report_after_ms),
            ("cluster.change-ms-max", cluster.change_ms_max),
            ("cluster.election-ms", cluster.election_ms),
        ];
        for (key, ms) in changes {
            self.range(key, ms, CHANGE_MS, "");
        }
        for name in cluster.bootstrap.iter().filter(|name| cluster.members.iter().all(|member| member.name != **name)) {
            self.add("cluster.bootstrap", format!("{name} is not in cluster.members"));
        }
        self.range("cluster.stream-wait-s", cluster.stream_wait_s, STREAM_WAIT_S, "");
        self.range("mesh.lanes", mesh.lanes, LANES, "");
        self.members(config);
        if cluster.members.len() > 1 {
            self.others_are_met(config);
        }
    }

    fn members(&mut self, config: &Config) {
        let members = &config.cluster.members;
        if members.len() > MEMBERS_MAX {
            self.add("cluster.members", format!("{} members are more than {MEMBERS_MAX}", members.len()));
        }
        for (at, member) in members.iter().enumerate() {
            self.range(&format!("cluster.members[{at}].ranks"), member.ranks, RANKS, "");
            for other in &members[..at] {
                if other.name == member.name {
                    self.add("cluster.members", format!("two members are named {}", member.name));
                }
                if other.mesh == member.mesh {
                    let (first, second) = (&other.name, &member.name);
                    self.add("cluster.members", format!("{first} and {second} are both at {}", member.mesh));
                }
            }
        }
        let name = &config.node.name;
        match config.own_member() {
            Some(own) if own.ranks != config.ranks.count => {
                let what = format!("{} is not the {} of {name} in cluster.members", config.ranks.count, own.ranks);
                self.add("ranks.count", what);
            }
            None if !members.is_empty() => {
                let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
                self.add("cluster.members", format!("node.name {name:?} is not among them ({})", names.join(", ")));
            }
            _ => {}
        }
    }

    /// What a node needs that has others to meet.
    fn others_are_met(&mut self, config: &Config) {
        let (cluster, mesh, heartbeat) = (&config.cluster, &config.mesh, config.rounds.heartbeat_ms);
        // One heartbeat may be late.
        if cluster.suspect_after_ms < heartbeat.saturating_mul(2) {
            let what = format!("{} is less than two rounds.heartbeat-ms of {heartbeat}", cluster.suspect_after_ms);
            self.add("cluster.suspect-after-ms", what);
        }
        if mesh.listen.port() == 0 {
            self.add("mesh.listen", format!("{}: the others need a port that they know", mesh.listen));
        }
        if let Err(problem) = config.credentials() {
            self.0.push(problem);
        }
    }

    fn listeners(&mut self, api: SocketAddr, admin: SocketAddr) {
        let overlap = api.ip() == admin.ip() || api.ip().is_unspecified() || admin.ip().is_unspecified();
        if api.port() == admin.port() && api.port() != 0 && overlap {
            self.add("admin.listen", format!("{admin} takes the port of api.listen, {api}"));
        }
    }

    fn keys(&mut self, config: &Config) {
        let keys = &config.api.keys;
        let legal = |key: &str| !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic());
        if let Some(at) = keys.iter().position(|key| !legal(key.expose())) {
            // The key itself is a secret, so only its place is told.
            self.add("api.keys", format!("key {} of {} is not printable ASCII without spaces", at + 1, keys.len()));
        }
    }

    fn model(&mut self, config: &Config) {
        let model = &config.model;
        if let (Some(path), Some(name)) = (&model.path, &model.name) {
            self.add("model.path", format!("{path:?} and model.name {name:?} exclude each other"));
        }
        if let Some(name) = &model.name {
            if name.starts_with(fetch::HUB_PREFIX) {
                if let Err(error) = name.parse::<fetch::HubName>() {
                    self.add("model.name", error.to_string());
                }
            } else if fetch::by_name(name).is_none() {
                let known = fetch::NAMES.join(", ");
                let what =
                    format!("{name:?} is not a known model ({known}); give hf:OWNER/NAME, or a file by model.path");
                self.add("model.name", what);
            }
        }
        if model.id.as_ref().is_some_and(|id| id.trim().is_empty()) {
            self.add("model.id", "\"\" is not a name".into());
        }
    }

    fn engine(&mut self, config: &Config) {
        let engine = &config.engine;
        if let Some(threads) = engine.threads {
            self.range("engine.threads", threads, THREADS, "");
        }
        if engine.kv_memory.bytes() < KV_MEMORY_MIN {
            self.add("engine.kv-memory", format!("{} is less than 1MiB", engine.kv_memory));
        }
        self.range("engine.block-tokens", engine.block_tokens, BLOCK_TOKENS, "");
        if let Some(tokens) = engine.context_tokens_max {
            self.range("engine.context-tokens-max", tokens, CONTEXT_TOKENS, "");
        }
        self.range("engine.step-tokens-max", engine.step_tokens_max, STEP_TOKENS, "");
        self.range("engine.sequences-max", engine.sequences_max, SEQUENCES, "");
        self.range("engine.draft-tokens-max", engine.draft_tokens_max, DRAFT_TOKENS, "");
        if engine.step_tokens_max < engine.sequences_max {
            let (step, sequences) = (engine.step_tokens_max, engine.sequences_max);
            let what = format!("{step} is less than engine.sequences-max {sequences}: each decodes one token a step");
            self.add("engine.step-tokens-max", what);
        }
    }

    fn kv(&mut self, config: &Config) {
        let kv = &config.kv;
        self.range("kv.turns-max", kv.turns_max, TURNS, "");
        self.range("kv.conversations-max", kv.conversations_max, CONVERSATIONS, "");
        if kv.conversation_ttl != super::Period::secs(0) && kv.conversation_ttl.as_millis() == 0 {
            self.add("kv.conversation-ttl", format!("{} is less than 1ms, and not 0s for never", kv.conversation_ttl));
        }
        if let Some(percent) = kv.scope_quota_percent {
            self.range("kv.scope-quota-percent", percent, PERCENT, "");
        }
        self.range("kv.resume-utilisation-percent-max", kv.resume_utilisation_percent_max, PERCENT, "");
        if let Some(ratio) = &kv.pool_ratio {
            self.ratio(ratio);
        }
        if let Some(tokens) = kv.sequence_tokens {
            self.range("kv.sequence-tokens", tokens, 1..=*CONTEXT_TOKENS.end(), "");
            if let Some(context) = config.engine.context_tokens_max.filter(|context| tokens > *context) {
                self.add("kv.sequence-tokens", format!("{tokens} is more than engine.context-tokens-max {context}"));
            }
        }
        self.range("kv.match-backoff-tokens", kv.match_backoff_tokens, 0..=*CONTEXT_TOKENS.end(), "");
        self.range("kv.endpoint-rewind-tokens", kv.endpoint_rewind_tokens, 0..=*CONTEXT_TOKENS.end(), "");
        let policy = kv.reuse_policy.filter(|policy| *policy != ReusePolicy::AllReusable);
        if let Some(policy) = policy.filter(|_| kv.endpoint_rewind_tokens > 0) {
            let name = serde_json::json!(policy);
            let what = format!("{} goes with all-reusable only, kv.reuse-policy is {name}", kv.endpoint_rewind_tokens);
            self.add("kv.endpoint-rewind-tokens", what);
        }
    }

    fn ratio(&mut self, ratio: &[f64]) {
        if let Some(share) = ratio.iter().find(|share| !(share.is_finite() && **share > 0.0)) {
            return self.add("kv.pool-ratio", format!("{share} is not a share above 0"));
        }
        let sum: f64 = ratio.iter().sum();
        if (sum - 1.0).abs() > RATIO_SUM_TOLERANCE {
            self.add("kv.pool-ratio", format!("{ratio:?} adds up to {sum}, not to 1"));
        }
    }

    fn snapshots(&mut self, kv: &Kv) {
        let offsets = [
            ("kv.snapshot-offsets-from-start", &kv.snapshot_offsets_from_start, 1),
            ("kv.snapshot-offsets-from-end", &kv.snapshot_offsets_from_end, 0),
        ];
        for (key, offsets, least) in offsets {
            if offsets.len() > SNAPSHOTS_MAX {
                self.add(key, format!("{} offsets are more than {SNAPSHOTS_MAX}", offsets.len()));
            }
            for (at, offset) in offsets.iter().enumerate() {
                self.range(&format!("{key}[{at}]"), *offset, least..=*CONTEXT_TOKENS.end(), "");
            }
        }
    }

    fn rounds(&mut self, config: &Config) {
        let rounds = &config.rounds;
        let (least, busy, heartbeat) = (rounds.round_interval_ms_min, rounds.busy_interval_ms, rounds.heartbeat_ms);
        self.range("rounds.round-interval-ms-min", least, 1..=60_000, "");
        self.range("rounds.heartbeat-ms", heartbeat, 1..=60_000, "");
        if busy < least {
            self.add("rounds.busy-interval-ms", format!("{busy} is less than round-interval-ms-min {least}"));
        }
        if heartbeat < busy {
            self.add("rounds.heartbeat-ms", format!("{heartbeat} is less than busy-interval-ms {busy}"));
        }
    }

    fn limits(&mut self, config: &Config) {
        let limits = &config.limits;
        self.range("limits.backlog-requests-max", limits.backlog_requests_max, 1..=1 << 20, "");
        self.range("limits.backlog-tokens-max", limits.backlog_tokens_max, 1..=1 << 40, "");
        self.range("limits.announced-requests-max", limits.announced_requests_max, ANNOUNCED, "");
        self.range("limits.attempts-max", limits.attempts_max, 1..=100, "");
        for (key, wait) in [("limits.announce-wait", limits.announce_wait), ("limits.prompt-wait", limits.prompt_wait)]
        {
            if wait.as_millis() == 0 {
                self.add(key, format!("{wait} is less than 1ms"));
            }
        }
    }

    fn telemetry(&mut self, config: &Config) {
        let telemetry = &config.telemetry;
        if let Err(e) = tracing_subscriber::EnvFilter::try_new(&telemetry.log) {
            self.add("telemetry.log", format!("{:?} is not a log filter: {e}", telemetry.log));
        }
        if let Some(otlp) = &telemetry.otlp
            && otlp.strip_prefix("http://").is_none_or(str::is_empty)
        {
            self.add("telemetry.otlp", format!("{otlp:?} is not an address such as \"http://127.0.0.1:4317\""));
        }
    }
}

/// The keys of `api.keys-file`. A file without any would open the API by accident, so it is refused.
pub fn keys_of_file(config: &Config) -> Result<Vec<String>, Problem> {
    let Some(path) = &config.api.keys_file else {
        return Ok(Vec::new());
    };
    let problem = |what: String| Problem::new("api.keys-file", what);
    let text = std::fs::read_to_string(path).map_err(|e| problem(format!("cannot read {path:?}: {e}")))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(problem(format!("{path:?} holds no key")));
    }
    Ok(keys)
}
