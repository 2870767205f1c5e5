//! One request over HTTP, measured.

use crate::cli::client::{Lines, local_http, message_of};
use crate::cli::nodes::innermost;
use crate::config::Secret;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
}

/// Where requests go, and what all of them say.
#[derive(Clone, Debug)]
pub struct Target {
    /// Without a `/` at its end.
    pub base_url: String,
    pub path: String,
    pub endpoint: Endpoint,
    pub model: String,
    pub temperature: f64,
    pub ignore_eos: bool,
    /// Header that names the conversation of a request with several turns.
    pub conversation_header: String,
    pub key: Option<Secret>,
    /// From sending a request to the end of its answer.
    pub request_wait: Duration,
}

/// Why a request brought nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("answered {status}: {message}")]
    Status { status: u16, message: String },
    #[error("error in the stream: {0}")]
    ErrorEvent(String),
    #[error("broke off: {0}")]
    BrokenOff(String),
    #[error("not a stream of completions: {0}")]
    Malformed(String),
    #[error("no end within {0:?}")]
    Timeout(Duration),
}

impl Failure {
    /// Under what it is counted.
    pub fn kind(&self) -> String {
        match self {
            Self::Connect(_) => "connect".into(),
            Self::Status { status, .. } => format!("http {status}"),
            Self::ErrorEvent(_) => "error event".into(),
            Self::BrokenOff(_) => "broken off".into(),
            Self::Malformed(_) => "malformed".into(),
            Self::Timeout(_) => "timeout".into(),
        }
    }
}

/// An answer that came to its end. Times count from when the request was due.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    /// To the first text.
    pub ttft: Duration,
    /// To the last event of the choice.
    pub latency: Duration,
    /// Between two events with text.
    pub gaps: Vec<Duration>,
    /// What the server says about tokens; `None` if it says nothing.
    pub usage: Option<Usage>,
    /// Events with text.
    pub events: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    #[serde(default, deserialize_with = "cached")]
    #[serde(rename = "prompt_tokens_details")]
    pub cached_tokens: u64,
}

/// `{"cached_tokens": 3}`, or null, which also stands in it.
fn cached<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let details: Option<BTreeMap<String, Value>> = Option::deserialize(deserializer)?;
    Ok(details.and_then(|details| details.get("cached_tokens")?.as_u64()).unwrap_or(0))
}

impl Answer {
    /// Tokens generated: what the server counted, or else the events.
    pub fn output_tokens(&self) -> u64 {
        self.usage.map_or(self.events, |usage| usage.completion_tokens)
    }

    /// Time of a token after the first; `None` if there was but one.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_tokens().checked_sub(1).filter(|count| *count > 0)?;
        Some(self.latency.saturating_sub(self.ttft).div_f64(after_first as f64))
    }
}

/// What has been said in a conversation so far.
pub enum History {
    Chat(Vec<Value>),
    Text(String),
}

impl History {
    pub fn new(endpoint: Endpoint) -> Self {
        match endpoint {
            Endpoint::Chat => Self::Chat(Vec::new()),
            Endpoint::Completions => Self::Text(String::new()),
        }
    }

    pub fn user_says(&mut self, text: &str) {
        match self {
            Self::Chat(messages) => messages.push(json!({ "role": "user", "content": text })),
            Self::Text(prompt) => {
                if !prompt.is_empty() {
                    prompt.push('\n');
                }
                prompt.push_str(text);
            }
        }
    }

    pub fn model_says(&mut self, text: &str) {
        match self {
            Self::Chat(messages) => messages.push(json!({ "role": "assistant", "content": text })),
            Self::Text(prompt) => prompt.push_str(text),
        }
    }
}

/// Why the server's models are not known.
#[derive(Debug, thiserror::Error)]
pub enum ModelsError {
    #[error("cannot reach {url}: {why}")]
    Unreachable { url: String, why: String },
    #[error("{url} answered {status}: {message}")]
    Refused { url: String, status: u16, message: String },
    #[error("{url} did not answer with a list of models: {why}")]
    Answer { url: String, why: String },
}

/// How long a server may take to list its models.
const MODELS_WAIT: Duration = Duration::from_secs(30);

/// Asks a server which models it has.
///
/// # Errors
/// No answer, a refusal, or another answer.
pub async fn models(base_url: &str, key: Option<&Secret>) -> Result<Vec<String>, ModelsError> {
    #[derive(Deserialize)]
    struct List {
        #[serde(rename = "data")]
        models: Vec<Card>,
    }
    #[derive(Deserialize)]
    struct Card {
        id: String,
    }
    let url = format!("{base_url}/v1/models");
    let unreachable = |error: reqwest::Error| ModelsError::Unreachable { url: url.clone(), why: innermost(&error) };
    let mut request = local_http().map_err(unreachable)?.get(&url).timeout(MODELS_WAIT);
    if let Some(key) = key {
        request = request.bearer_auth(key.expose());
    }
    let response = request.send().await.map_err(unreachable)?;
    let status = response.status();
    let body = response.text().await.map_err(unreachable)?;
    if !status.is_success() {
        return Err(ModelsError::Refused { url, status: status.as_u16(), message: message_of(&body) });
    }
    let list: List =
        serde_json::from_str(&body).map_err(|error| ModelsError::Answer { url, why: error.to_string() })?;
    Ok(list.models.into_iter().map(|card| card.id).collect())
}

/// How long the end of the body may follow the last event; most send both at once.
const CLOSE_WAIT: Duration = Duration::from_millis(100);

/// Sends requests to one target.
pub struct Client {
    http: reqwest::Client,
    target: Target,
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<Value>,
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    /// What a model thinks before it answers, under either name, is generated like the answer.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
}

impl Client {
    /// # Errors
    /// The HTTP client cannot be set up.
    pub fn new(target: Target) -> Result<Self, reqwest::Error> {
        Ok(Self { http: local_http()?, target })
    }

    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Sends what was said so far and reads the answer to its end; `due` is when that should have been.
    ///
    /// # Errors
    /// Anything but a whole answer.
    pub async fn ask(
        &self,
        history: &History,
        output_tokens: u32,
        conversation: Option<&str>,
        due: Instant,
    ) -> Result<Answer, Failure> {
        let mut body = json!({
            "model": self.target.model,
            "max_tokens": output_tokens,
            "temperature": self.target.temperature,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        match history {
            History::Chat(messages) => body["messages"] = Value::Array(messages.clone()),
            History::Text(prompt) => body["prompt"] = prompt.as_str().into(),
        }
        if self.target.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let mut request = self.http.post(format!("{}{}", self.target.base_url, self.target.path)).json(&body);
        if let Some(name) = conversation {
            request = request.header(&self.target.conversation_header, name);
        }
        if let Some(key) = &self.target.key {
            request = request.bearer_auth(key.expose());
        }
        let wait = self.target.request_wait;
        tokio::time::timeout(wait, answer(request, due)).await.unwrap_or(Err(Failure::Timeout(wait)))
    }
}

async fn answer(request: reqwest::RequestBuilder, due: Instant) -> Result<Answer, Failure> {
    let broken = |error: reqwest::Error| match error.is_connect() {
        true => Failure::Connect(innermost(&error)),
        false => Failure::BrokenOff(innermost(&error)),
    };
    let mut response = request.send().await.map_err(broken)?;
    if !response.status().is_success() {
        let status = response.status().as_u16();
        let body = response.text().await.unwrap_or_default();
        return Err(Failure::Status { status, message: message_of(&body) });
    }
    let mut lines = Lines::default();
    let mut reading = Reading::default();
    while let Some(bytes) = response.chunk().await.map_err(broken)? {
        let elapsed = due.elapsed();
        for event in lines.push(&bytes).map_err(|error| Failure::Malformed(error.to_string()))? {
            if event == "[DONE]" {
                // A connection whose answer was read to its end is used again.
                let _ = tokio::time::timeout(CLOSE_WAIT, response.chunk()).await;
                return reading.end();
            }
            reading.take(&event, elapsed)?;
        }
    }
    reading.end()
}

/// An answer as far as it has come.
#[derive(Default)]
struct Reading {
    answer: Answer,
    finished: bool,
    any: bool,
}

impl Reading {
    fn take(&mut self, event: &str, elapsed: Duration) -> Result<(), Failure> {
        let chunk: Chunk = serde_json::from_str(event).map_err(|error| {
            Failure::Malformed(format!("{error} in {:?}", event.chars().take(200).collect::<String>()))
        })?;
        if chunk.error.is_some() || chunk.object.as_deref() == Some("error") {
            return Err(Failure::ErrorEvent(message_of(event)));
        }
        self.any = true;
        let answer = &mut self.answer;
        answer.usage = chunk.usage.or(answer.usage);
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else { return Ok(()) };
        let delta = choice.delta.unwrap_or_default();
        let said = choice.text.or(delta.content).unwrap_or_default();
        let thought =
            [delta.reasoning_content, delta.reasoning].into_iter().flatten().any(|thought| !thought.is_empty());
        if !said.is_empty() || thought {
            match answer.events {
                0 => answer.ttft = elapsed,
                _ => answer.gaps.push(elapsed.saturating_sub(answer.latency)),
            }
            answer.events += 1;
            answer.text.push_str(&said);
            answer.latency = elapsed;
        }
        if choice.finish_reason.is_some() {
            self.finished = true;
            answer.latency = elapsed;
            // An answer may have tokens and no text.
            if answer.events == 0 {
                answer.ttft = elapsed;
            }
        }
        Ok(())
    }

    /// The answer, if it is whole: not every server sends `[DONE]`, but each says why it stopped.
    fn end(self) -> Result<Answer, Failure> {
        match (self.finished, self.any) {
            (true, _) => Ok(self.answer),
            (false, true) => Err(Failure::BrokenOff("the stream ended without a finish_reason".into())),
            (false, false) => Err(Failure::Malformed("no event in the stream".into())),
        }
    }
}
