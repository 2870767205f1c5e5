//! The configuration of a node: one TOML table a component.
//!
//! Order, later wins: defaults, what a command presets, the file, the environment, flags. The JSON Schema of these types
//! is the one list of keys: it finds unknown ones, gives environment variables their types and fills the documentation.

mod check;
mod cluster;
mod digest;
mod keys;
mod kv;
mod load;
mod placement;
#[cfg(test)]
mod tests;
mod units;
mod upstream;

pub use cluster::{Cluster, Member, Mesh};
pub use keys::variable;
pub use kv::{Kv, ReusePolicy, Sizing};
pub use load::{ConfigError, Origin, Problem, Sources, set};
pub use placement::Placement;
pub use units::{HostPort, Period, REDACTED, Secret, Size, UnitError};

use crate::fetch::HubName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// Everything a node can be told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Config {
    pub node: Node,
    pub cluster: Cluster,
    pub mesh: Mesh,
    pub api: Api,
    pub admin: Admin,
    pub model: Model,
    pub engine: Engine,
    pub kv: Kv,
    pub ranks: Ranks,
    pub placement: Placement,
    pub rounds: Rounds,
    pub limits: Limits,
    pub drain: Drain,
    pub telemetry: Telemetry,
}

/// Who this process is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Node {
    /// Name of the node, as its certificate says it: a-z, 0-9 and `-`, a letter first, at most 63.
    pub name: String,
}

/// The OpenAI-compatible API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Api {
    /// Address and port; port 0 takes a free one.
    #[serde(deserialize_with = "units::address")]
    #[schemars(with = "String")]
    pub listen: SocketAddr,
    /// Bearer keys. Secrets are not read from the configuration file: give them by environment variable, separated by
    /// commas, or by `keys-file`. With no key at all every request is served.
    pub keys: Vec<Secret>,
    /// File of bearer keys, one a line; empty lines and lines that start with `#` are skipped.
    pub keys_file: Option<PathBuf>,
    /// Largest request body.
    pub body_limit: Size,
    /// Memory for the text of conversations, so that a turn costs only what is new in it; 0 remembers none.
    pub text_cache: Size,
}

/// Health, metrics and debugging, on a listener of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Admin {
    /// Address and port; port 0 takes a free one.
    #[serde(deserialize_with = "units::address")]
    #[schemars(with = "String")]
    pub listen: SocketAddr,
}

/// Which model is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Model {
    /// Model file (GGUF), or a folder with `config.json`, `tokenizer.json` and weights as safetensors. Excludes `name`; the
    /// one that comes later in the order of sources wins.
    pub path: Option<PathBuf>,
    /// A model that is fetched once and cached: `smollm2`, which is what is served when neither is given, or one of the
    /// Hugging Face hub, as `hf:OWNER/NAME` or `hf:OWNER/NAME/FILE.gguf`, with `@REVISION` if need be.
    pub name: Option<String>,
    /// What clients call the model; by default its name, or the file's name without its ending `.gguf`, or the folder's.
    pub id: Option<String>,
}

/// What runs the steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Engine {
    /// `cpu` computes the model; `timed` takes fixed times and answers with made-up tokens, for tests and benchmarks.
    pub kind: EngineKind,
    /// `int8` computes with weights of 4 or 8 bits and KV of f16; `exact` with f32 throughout: slower, and four times the
    /// memory. In either, what a request gets does not depend on what runs beside it.
    pub arithmetic: Arithmetic,
    /// Threads of all ranks together; by default one a core.
    pub threads: Option<u32>,
    /// Memory of one rank's KV blocks.
    pub kv_memory: Size,
    /// Tokens of a KV block, 8 to 256.
    pub block_tokens: u32,
    /// Prompt and generated tokens of one request at most; by default what the model was made for.
    pub context_tokens_max: Option<u32>,
    /// Tokens that one step computes at most, prefill and decode together.
    pub step_tokens_max: u32,
    /// Sequences that one rank runs at most.
    pub sequences_max: u32,
    /// Tokens that a sequence guesses at most in each step, by what followed its last tokens earlier, and verifies in the same
    /// step. Answers are the same; those that repeat themselves come faster. 0 guesses none.
    pub draft_tokens_max: u32,
    pub timed: Timed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    Cpu,
    Timed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Arithmetic {
    Int8,
    Exact,
}

/// Times of engine `timed`. A step takes the sum of what it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Timed {
    /// For each prompt token that a step computes.
    pub prefill_per_token: Period,
    /// For each step that decodes, however many sequences.
    pub decode_per_step: Period,
    /// For each sequence that a step decodes.
    pub decode_per_sequence: Period,
}

/// The ranks that this node hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Ranks {
    /// Copies of the model, each with KV blocks of its own. Where `cluster.members` is given, it says how many, and this
    /// key agrees or is left out.
    pub count: u32,
}

/// When a node takes part in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Rounds {
    /// Milliseconds between two rounds at least.
    pub round_interval_ms_min: u64,
    /// Milliseconds between two rounds at most while a request waits.
    pub busy_interval_ms: u64,
    /// Milliseconds between two rounds at most.
    pub heartbeat_ms: u64,
}

/// Bounds of what waits, and what a request may cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Limits {
    /// Requests that wait at this node and are not announced yet.
    pub backlog_requests_max: u32,
    /// Prompt tokens of these requests.
    pub backlog_tokens_max: u64,
    /// Requests of this node that are announced and wait to be placed.
    pub announced_requests_max: u32,
    /// Placements of one request that may fail before it ends with an error.
    pub attempts_max: u32,
    /// How long a request may wait to be announced before it is refused.
    pub announce_wait: Period,
    /// How long a rank waits for the prompt of a request that was placed on it.
    pub prompt_wait: Period,
}

/// How a node stops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Drain {
    /// How long open streams may run on after the signal to stop.
    pub drain_timeout: Period,
}

/// What a node tells about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Telemetry {
    /// Which logs are written: a level, or directives such as `info,starling=debug`. The environment variable
    /// `RUST_LOG` sets it too.
    pub log: String,
    /// `text` for people, `json` for machines; both to standard error.
    pub log_format: LogFormat,
    /// Where spans go: the address of an OTLP collector over gRPC, such as `http://127.0.0.1:4317`. The standard
    /// `OTEL_*` variables work too and win.
    pub otlp: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    Text,
    Json,
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl Default for Node {
    fn default() -> Self {
        Self { name: "node-0".into() }
    }
}

impl Default for Api {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(LOOPBACK, 8000),
            keys: Vec::new(),
            keys_file: None,
            body_limit: Size::mib(8),
            text_cache: Size::mib(64),
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self { listen: SocketAddr::new(LOOPBACK, 8001) }
    }
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            kind: EngineKind::Cpu,
            arithmetic: Arithmetic::Int8,
            threads: None,
            kv_memory: Size::mib(512),
            block_tokens: 16,
            context_tokens_max: None,
            step_tokens_max: 512,
            sequences_max: 64,
            draft_tokens_max: 0,
            timed: Timed::default(),
        }
    }
}

impl Default for Timed {
    fn default() -> Self {
        Self {
            prefill_per_token: Period::micros(20),
            decode_per_step: Period::millis(5),
            decode_per_sequence: Period::micros(0),
        }
    }
}

impl Default for Ranks {
    fn default() -> Self {
        Self { count: 1 }
    }
}

impl Default for Rounds {
    fn default() -> Self {
        Self { round_interval_ms_min: 2, busy_interval_ms: 20, heartbeat_ms: 200 }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            backlog_requests_max: 8192,
            backlog_tokens_max: 64 << 20,
            announced_requests_max: 1024,
            attempts_max: 3,
            announce_wait: Period::secs(2),
            prompt_wait: Period::secs(5),
        }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self { drain_timeout: Period::secs(300) }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log: "info".into(), log_format: LogFormat::Text, otlp: None }
    }
}

/// Where the model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    Path(PathBuf),
    /// One of `fetch::NAMES`, or a model of the hub.
    Named(String),
}

impl Model {
    pub fn source(&self) -> ModelSource {
        match &self.path {
            Some(path) => ModelSource::Path(path.clone()),
            None => ModelSource::Named(self.name.clone().unwrap_or_else(|| crate::fetch::SMOLLM2.name.into())),
        }
    }

    /// What clients call the model.
    pub fn id(&self) -> String {
        let id = self.id.clone();
        id.unwrap_or_else(|| match self.source() {
            ModelSource::Named(name) => name.parse().map_or(name, |hub: HubName| hub.id()),
            ModelSource::Path(path) => {
                // Names of folders have dots that begin no ending.
                let is_file = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
                let name = if is_file { path.file_stem() } else { path.file_name() };
                name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        })
    }
}

impl Config {
    /// The effective configuration as TOML. Secrets are redacted.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is plain tables of plain values")
    }

    /// The JSON Schema of the configuration file, as editors read it.
    pub fn json_schema() -> serde_json::Value {
        let mut schema = schemars::schema_for!(Config);
        schema.insert("title".into(), "starling.toml".into());
        schema.to_value()
    }
}
