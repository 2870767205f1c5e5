//! A node's listeners as clients and operators see them.

use super::process::LIMIT;
use super::rig::MODEL;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The addresses of one node.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    pub api: String,
    pub admin: String,
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

/// What to ask for.
#[derive(Clone, Debug)]
pub struct Chat<'a> {
    pub messages: Vec<Value>,
    pub conversation: &'a str,
    pub max_tokens: u32,
    /// Further fields of the body, which go before all others.
    pub with: Value,
    /// The rank that it must run on.
    pub rank: Option<u32>,
    /// The trace that it belongs to.
    pub traceparent: Option<&'a str>,
}

impl<'a> Chat<'a> {
    pub fn new(conversation: &'a str, text: &str) -> Self {
        let messages = vec![json!({ "role": "user", "content": text })];
        Self { messages, conversation, max_tokens: 8, with: json!({}), rank: None, traceparent: None }
    }

    /// The next turn: the answer, and something more.
    pub fn and_then(mut self, answer: &Answer, text: &str) -> Self {
        self.messages.push(json!({ "role": "assistant", "content": answer.text() }));
        self.messages.push(json!({ "role": "user", "content": text }));
        self
    }
}

impl Client {
    /// From an entry of the `ready` line.
    pub fn new(node: &Value) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(LIMIT).build().unwrap();
        let url = |name: &str| node[name].as_str().unwrap_or_else(|| panic!("{name} in {node}")).to_owned();
        Self { http, api: url("api"), admin: url("admin") }
    }

    fn request(&self, chat: &Chat<'_>, stream: bool) -> reqwest::RequestBuilder {
        let mut body = json!({ "model": MODEL, "messages": chat.messages, "max_tokens": chat.max_tokens, "temperature": 0,
            "stream": stream });
        for (name, value) in chat.with.as_object().unwrap() {
            body[name] = value.clone();
        }
        let request = self.http.post(format!("{}/v1/chat/completions", self.api)).json(&body);
        let request = request.header("x-starling-conversation", chat.conversation);
        let request = match chat.traceparent {
            None => request,
            Some(parent) => request.header("traceparent", parent),
        };
        match chat.rank {
            None => request,
            Some(rank) => request.header("x-starling-rank", rank).header("x-starling-rank-strict", "true"),
        }
    }

    /// Asks and reads the whole answer, whatever its status.
    pub async fn chat(&self, chat: &Chat<'_>) -> Answer {
        let response = self.request(chat, false).send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer { status, headers, body: response.json().await.unwrap() }
    }

    /// Asks for a stream and returns it once its first bytes are here.
    pub async fn stream(&self, chat: &Chat<'_>) -> reqwest::Response {
        let mut response = self.request(chat, true).send().await.unwrap();
        let status = response.status();
        if !status.is_success() {
            panic!("{status}: {}", response.text().await.unwrap());
        }
        assert!(response.chunk().await.unwrap().is_some());
        response
    }

    /// Status and text of a page of the admin listener; an error where nobody answers.
    pub async fn admin(&self, path: &str) -> Result<(u16, String), String> {
        let response = self.http.get(format!("{}{path}", self.admin)).send().await.map_err(|e| e.to_string())?;
        let status = response.status().as_u16();
        Ok((status, response.text().await.map_err(|e| e.to_string())?))
    }

    /// That it is ready, or why it is not.
    pub async fn ready(&self) -> Result<(), String> {
        match self.admin("/readyz").await? {
            (200, _) => Ok(()),
            (status, why) => Err(format!("/readyz answers {status}: {why}")),
        }
    }

    /// Why it is not ready; an error while it is.
    pub async fn not_ready(&self) -> Result<String, String> {
        match self.admin("/readyz").await? {
            (503, why) => Ok(why),
            (status, text) => Err(format!("/readyz answers {status}: {text}")),
        }
    }

    pub async fn debug(&self, page: &str) -> Value {
        let (status, text) = self.admin(&format!("/debug/{page}")).await.unwrap();
        assert_eq!(status, 200, "/debug/{page}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    pub async fn metrics(&self) -> Metrics {
        let (status, text) = self.admin("/metrics").await.unwrap();
        assert_eq!(status, 200, "/metrics: {text}");
        Metrics::read(&text)
    }

    /// That nobody listens any more.
    pub async fn gone(&self) -> Result<(), String> {
        for url in [&self.api, &self.admin] {
            match self.http.get(format!("{url}/livez")).send().await {
                Err(e) if e.is_connect() => {}
                other => return Err(format!("{url}: {other:?}")),
            }
        }
        Ok(())
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no {name} in {self:?}"));
        value.to_str().unwrap()
    }

    pub fn text(&self) -> &str {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body["choices"][0]["message"]["content"].as_str().unwrap_or_default()
    }

    pub fn cached_tokens(&self) -> u64 {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    }
}

/// What comes after `[DONE]` or a break: the rest of a stream as text.
pub async fn rest(mut stream: reqwest::Response) -> String {
    let mut text = String::new();
    while let Ok(Some(bytes)) = stream.chunk().await {
        text.push_str(&String::from_utf8_lossy(&bytes));
    }
    text
}

/// One scrape of `/metrics`.
#[derive(Debug)]
pub struct Metrics(Vec<(String, BTreeMap<String, String>, f64)>);

impl Metrics {
    fn read(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
            let labels = labels.map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()));
            (name.to_owned(), labels.collect(), value.parse().unwrap_or_else(|_| panic!("{line}")))
        });
        Self(samples.collect())
    }

    /// The sum over all series with these labels. A name that is not there is a failure, not a zero.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has =
            |of: &BTreeMap<String, String>| labels.iter().all(|(n, v)| of.get(*n).is_some_and(|value| value == v));
        let found: Vec<f64> = self.0.iter().filter(|s| s.0 == name && has(&s.1)).map(|s| s.2).collect();
        assert!(!found.is_empty(), "no metric {name} {labels:?}");
        found.iter().sum()
    }
}
