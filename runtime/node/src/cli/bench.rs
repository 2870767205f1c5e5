//! `starling bench`: what can be said about a load. The names are those of vLLM's `bench serve`.

use crate::bench::{
    Endpoint, Load, Metric, Objective, Pace, Prompts, Random, Target, TextError, View, Workload,
    conversations_from_json,
};
use crate::config::{Period, Secret};
use clap::Args;
use serde_json::{Map, Value, json};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// The flags of the server.
const SERVER: &str = "Server";
/// The flags of the requests.
const REQUESTS: &str = "Requests";
const PACE: &str = "Pace";
const RESULT: &str = "Result";

#[derive(Clone, Debug, Args)]
pub struct Bench {
    /// Address of the server, without /v1. [default: http://HOST:PORT]
    #[arg(long, value_name = "URL", help_heading = SERVER, value_parser = base_url)]
    #[arg(conflicts_with_all = ["host", "port"])]
    pub base_url: Option<String>,
    /// Host of the server.
    #[arg(long, value_name = "HOST", help_heading = SERVER, default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the server.
    #[arg(long, value_name = "PORT", help_heading = SERVER, default_value_t = 8000)]
    pub port: u16,
    /// Path that is asked; what it ends with says what is sent: /chat/completions or /completions.
    #[arg(long, value_name = "PATH", help_heading = SERVER, default_value = "/v1/completions", value_parser = path)]
    pub endpoint: String,
    /// Model that is asked for. [default: the first that the server has]
    #[arg(long, value_name = "ID", help_heading = SERVER)]
    pub model: Option<String>,
    /// Longest time of one request.
    #[arg(long, value_name = "TIME", help_heading = SERVER, default_value = "1h")]
    pub request_timeout: Period,
    /// Header that names the conversation of requests with several turns.
    #[arg(long, value_name = "NAME", help_heading = SERVER, default_value = "x-starling-conversation")]
    #[arg(value_parser = header)]
    pub conversation_header: String,
    #[command(flatten)]
    pub requests: Requests,
    #[command(flatten)]
    pub pace: PaceFlags,
    #[command(flatten)]
    pub result: ResultFlags,
}

#[derive(Clone, Debug, Args)]
pub struct Requests {
    /// What is sent: random words, or the conversations of a file in ShareGPT's form.
    #[arg(long, value_name = "NAME", help_heading = REQUESTS, default_value = "random")]
    #[arg(value_parser = ["random", "sharegpt"])]
    pub dataset_name: String,
    /// File of --dataset-name sharegpt (JSON).
    #[arg(long, value_name = "FILE", help_heading = REQUESTS, required_if_eq("dataset_name", "sharegpt"))]
    pub dataset_path: Option<PathBuf>,
    /// Output tokens of each answer of a file, in place of the length that the file's answer has.
    #[arg(long, value_name = "N", help_heading = REQUESTS, value_parser = clap::value_parser!(u32).range(1..))]
    pub sharegpt_output_len: Option<u32>,
    /// Words of a random prompt; most tokenizers have each as one token.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    pub random_input_len: u32,
    /// Output tokens that are asked for.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX))]
    pub random_output_len: u32,
    /// Lengths are uniform between 1 - R and 1 + R times these two; 0 or more, below 1.
    #[arg(long, value_name = "R", help_heading = REQUESTS, default_value_t = 0.0, value_parser = ratio)]
    pub random_range_ratio: f64,
    /// Words in front of a conversation's first prompt that it shares with others.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=TOKENS_MAX))]
    pub random_prefix_len: u32,
    /// Different prefixes of that length; conversations take them in turns.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub num_shared_prefixes: u32,
    /// Requests in all, rounded up to whole conversations.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "num_conversations")]
    pub num_prompts: u32,
    /// Turns of a conversation; each is sent when the one before was answered, with all that was said.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=TURNS_MAX))]
    pub turns: u32,
    /// Conversations, in place of --num-prompts.
    #[arg(long, value_name = "N", help_heading = REQUESTS, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_conversations: Option<u32>,
    /// Generate on past the model's end tokens.
    #[arg(long, help_heading = REQUESTS)]
    pub ignore_eos: bool,
    /// Sampling temperature, 0 to 2.
    #[arg(long, value_name = "T", help_heading = REQUESTS, default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f64,
    /// Seed of prompts, lengths and arrivals. The same again finds its prompts in the server's cache.
    #[arg(long, value_name = "N", help_heading = REQUESTS, default_value_t = 0)]
    pub seed: u64,
}

/// Words of a prompt and tokens of an answer at most: far more than any context.
const TOKENS_MAX: i64 = 1 << 24;
const TURNS_MAX: i64 = 10_000;

#[derive(Clone, Debug, Args)]
pub struct PaceFlags {
    /// Conversations that begin a second, whatever became of earlier ones (open loop); latency counts from when a request
    /// was due. `inf`: all at once.
    #[arg(long, value_name = "RATE", help_heading = PACE, default_value = "inf", value_parser = rate)]
    pub request_rate: f64,
    /// Shape of the gaps' gamma distribution: 1 is a Poisson process, less comes in bursts, more is regular.
    #[arg(long, value_name = "B", help_heading = PACE, default_value_t = 1.0, value_parser = positive)]
    pub burstiness: f64,
    /// Conversations that are open at most. With no rate it is a closed loop: latency counts from sending.
    #[arg(long, value_name = "N", help_heading = PACE, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
}

#[derive(Clone, Debug, Args)]
pub struct ResultFlags {
    /// Times that are shown, separated by commas: ttft, tpot, itl, e2el.
    #[arg(long, value_name = "LIST", help_heading = RESULT, default_value = "ttft,tpot,itl,e2el")]
    #[arg(value_delimiter = ',')]
    pub percentile_metrics: Vec<Metric>,
    /// Their percentiles, separated by commas.
    #[arg(long, value_name = "LIST", help_heading = RESULT, default_value = "99", value_parser = percentile)]
    #[arg(value_delimiter = ',')]
    pub metric_percentiles: Vec<f64>,
    /// What a good request keeps to, such as `ttft:200 tpot:50`, in milliseconds; e2el can be asked for too.
    #[arg(long, value_name = "METRIC:MS", help_heading = RESULT, num_args = 1..)]
    pub goodput: Vec<Objective>,
    /// Prints the result as a JSON object.
    #[arg(long, help_heading = RESULT)]
    pub json: bool,
    /// Writes the result to a file as a JSON object.
    #[arg(long, help_heading = RESULT)]
    pub save_result: bool,
    /// That file, and --save-result with it. [default: openai-RATEqps-MODEL-DATE.json]
    #[arg(long, value_name = "FILE", help_heading = RESULT)]
    pub result_filename: Option<PathBuf>,
    /// The JSON has the times of each request too.
    #[arg(long, help_heading = RESULT)]
    pub save_detailed: bool,
    /// Draws the latencies to a file.
    #[arg(long, value_name = "FILE", help_heading = RESULT)]
    pub svg: Option<PathBuf>,
    /// Shows no progress bar; there is none either where standard error is no terminal.
    #[arg(long, visible_alias = "no-progress", help_heading = RESULT)]
    pub disable_tqdm: bool,
}

pub const EXAMPLES: &str = "\
Examples:
  starling bench --num-prompts 100 --max-concurrency 8     a closed loop against 127.0.0.1:8000
  starling bench --request-rate 4 --goodput ttft:500       an open loop
  starling bench --endpoint /v1/chat/completions --num-conversations 20 --turns 5 --random-input-len 64

OPENAI_API_KEY is sent as the bearer key where it is set.";

/// Why a load cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum BenchArgsError {
    #[error("cannot read --dataset-path {path:?}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("--dataset-path {path:?}: {source}")]
    Texts { path: PathBuf, source: TextError },
}

impl Bench {
    pub fn base_url(&self) -> String {
        self.base_url.clone().unwrap_or_else(|| {
            let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
            format!("http://{host}:{}", self.port)
        })
    }

    /// Where requests for `model` go.
    pub fn target(&self, model: String, key: Option<Secret>) -> Target {
        let chat = self.endpoint.ends_with("/chat/completions");
        Target {
            base_url: self.base_url(),
            path: self.endpoint.clone(),
            endpoint: if chat { Endpoint::Chat } else { Endpoint::Completions },
            model,
            temperature: self.requests.temperature,
            ignore_eos: self.requests.ignore_eos,
            conversation_header: self.conversation_header.clone(),
            key,
            request_wait: self.request_timeout.duration(),
        }
    }

    /// # Errors
    /// A file that cannot be used.
    pub fn workload(&self) -> Result<Workload, BenchArgsError> {
        let Requests { turns, seed, .. } = self.requests;
        let prompts = match &self.requests.dataset_path {
            Some(path) if self.requests.dataset_name == "sharegpt" => {
                let bytes = std::fs::read(path);
                let bytes = bytes.map_err(|source| BenchArgsError::Read { path: path.clone(), source })?;
                let texts = conversations_from_json(&bytes, self.requests.sharegpt_output_len);
                let texts = texts.map_err(|source| BenchArgsError::Texts { path: path.clone(), source })?;
                Prompts::Texts(Arc::new(texts))
            }
            _ => Prompts::Random(Random {
                input_tokens: self.requests.random_input_len,
                output_tokens: self.requests.random_output_len,
                range: self.requests.random_range_ratio,
                prefix_tokens: self.requests.random_prefix_len,
                prefixes: self.requests.num_shared_prefixes,
            }),
        };
        let conversations = self.requests.num_conversations;
        let conversations = conversations.unwrap_or_else(|| self.requests.num_prompts.div_ceil(turns));
        Ok(Workload { prompts, conversations, turns, seed })
    }

    pub fn pace(&self) -> Pace {
        let PaceFlags { request_rate, burstiness, max_concurrency } = self.pace;
        let rate = request_rate.is_finite().then_some(request_rate);
        Pace { rate, burstiness, concurrency_max: max_concurrency }
    }

    pub fn view(&self) -> View {
        View {
            metrics: self.result.percentile_metrics.clone(),
            percentiles: self.result.metric_percentiles.clone(),
            objectives: self.result.goodput.clone(),
            detailed: self.result.save_detailed,
        }
    }

    /// What was run, for the table.
    pub fn header(&self, load: &Load) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        if let Some(most) = self.pace.max_concurrency {
            lines.push(("Maximum request concurrency", most.to_string()));
        }
        if let Some(rate) = load.pace.rate {
            lines.push(("Request rate configured (RPS)", format!("{rate:.2}")));
        }
        if load.workload.turns > 1 {
            lines.push(("Conversations", load.workload.conversations.to_string()));
        }
        lines
    }

    /// What was run, for JSON; `date` as `20261130-160000`.
    pub fn about(&self, load: &Load, date: &str) -> Map<String, Value> {
        let target = load.client.target();
        let rate = load.pace.rate.map_or_else(|| json!("inf"), |rate| json!(rate));
        let goodput = self.result.goodput.iter().map(|o| (o.metric.name().to_owned(), json!(o.ms)));
        let about = json!({
            "date": date,
            "endpoint_type": if target.endpoint == Endpoint::Chat { "openai-chat" } else { "openai" },
            "base_url": target.base_url,
            "endpoint": target.path,
            "model_id": target.model,
            "dataset_name": self.requests.dataset_name,
            "num_prompts": load.workload.requests(),
            "num_conversations": load.workload.conversations,
            "turns_max": load.workload.turns,
            "request_rate": rate,
            "burstiness": load.pace.burstiness,
            "max_concurrency": load.pace.concurrency_max,
            "seed": load.workload.seed,
            "goodput_objectives": goodput.collect::<Map<_, _>>(),
        });
        match about {
            Value::Object(about) => about,
            _ => Map::new(),
        }
    }

    /// Where the result is written, if it is to be.
    pub fn result_path(&self, model: &str, date: &str) -> Option<PathBuf> {
        let named = self.result.result_filename.clone();
        named.or_else(|| {
            let rate = self.pace.request_rate;
            // A model may be called by a path.
            let model = model.rsplit('/').next().unwrap_or(model);
            self.result.save_result.then(|| PathBuf::from(format!("openai-{rate}qps-{model}-{date}.json")))
        })
    }
}

fn base_url(text: &str) -> Result<String, String> {
    let url = text.trim_end_matches('/');
    let host = url.strip_prefix("http://").ok_or("it does not begin with http://")?;
    if host.is_empty() {
        return Err("it names no host".into());
    }
    if host.ends_with("/v1") {
        return Err("it ends with /v1, which --endpoint brings".into());
    }
    Ok(url.to_owned())
}

fn path(text: &str) -> Result<String, String> {
    if !text.starts_with('/') || !text.ends_with("/completions") {
        return Err("it does not begin with / and end with /completions or /chat/completions".into());
    }
    Ok(text.to_owned())
}

fn header(text: &str) -> Result<String, String> {
    let name = reqwest::header::HeaderName::try_from(text).map_err(|_| "it is no name of a header")?;
    Ok(name.as_str().to_owned())
}

fn number(text: &str, legal: impl Fn(f64) -> bool, what: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|number: &f64| legal(*number)).ok_or_else(|| format!("it is not {what}"))
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0, "a number above 0, nor inf")
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number.is_finite(), "a number above 0")
}

fn ratio(text: &str) -> Result<f64, String> {
    number(text, |ratio| (0.0..1.0).contains(&ratio), "a number from 0 to below 1")
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |temperature| (0.0..=2.0).contains(&temperature), "a number from 0 to 2")
}

fn percentile(text: &str) -> Result<f64, String> {
    number(text, |percentile| (0.0..=100.0).contains(&percentile), "a number from 0 to 100")
}
