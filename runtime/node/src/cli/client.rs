//! A small streaming client of the API, for the conversation of `starling up`. It speaks real HTTP, as any client would.

use crate::config::Secret;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Why a turn failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot reach the API at {api}: {source}")]
    Http { api: String, source: reqwest::Error },
    #[error("API answered {status}: {message}")]
    Refused { status: u16, message: String },
    #[error("stream broke off: {0}")]
    Broken(String),
}

/// What one turn brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    pub text: String,
    /// The node of the rank, which need not be the one that was asked.
    pub node: Option<String>,
    pub rank: Option<u32>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub finish: Option<String>,
    pub ttft: Duration,
    /// From the first text to the last.
    pub decode: Duration,
}

impl Turn {
    /// Tokens a second after the first; `None` when there were too few to tell.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.decode.as_secs_f64();
        (self.completion_tokens > 1 && seconds > 0.0).then(|| (self.completion_tokens - 1) as f64 / seconds)
    }
}

/// One conversation, each turn with a node of the caller's choice.
pub struct Client {
    http: reqwest::Client,
    key: Option<Secret>,
    model: String,
    /// Sent with every turn, so that later turns find their prefix.
    conversation: String,
}

/// Where a listener can be reached from this machine.
pub fn reachable(listen: SocketAddr) -> SocketAddr {
    match listen {
        SocketAddr::V4(a) if a.ip().is_unspecified() => SocketAddr::from((Ipv4Addr::LOCALHOST, a.port())),
        SocketAddr::V6(a) if a.ip().is_unspecified() => SocketAddr::from((Ipv6Addr::LOCALHOST, a.port())),
        other => other,
    }
}

/// A client for nodes of this machine or network: proxies of the environment are for the world outside.
///
/// # Errors
/// The client cannot be set up.
pub fn local_http() -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(10)).build()
}

impl Client {
    /// # Errors
    /// The HTTP client cannot be set up.
    pub fn new(model: &str, key: Option<Secret>) -> Result<Self, ClientError> {
        let http = local_http().map_err(|source| ClientError::Http { api: "any address".into(), source })?;
        let conversation = format!("starling-up-{}", std::process::id());
        Ok(Self { http, key, model: model.to_owned(), conversation })
    }

    /// Sends the messages so far to the API at `api`, such as `http://127.0.0.1:8000`, and streams the answer; `show` gets
    /// each piece of text as it arrives.
    ///
    /// # Errors
    /// No connection, a refusal, or a stream that does not end as it should.
    pub async fn turn(
        &self,
        api: &str,
        messages: &[Value],
        max_tokens: u32,
        mut show: impl FnMut(&str),
    ) -> Result<Turn, ClientError> {
        let body = json!({
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        let http = |source| ClientError::Http { api: api.to_owned(), source };
        let mut request = self.http.post(format!("{api}/v1/chat/completions")).json(&body);
        request = request.header("x-starling-conversation", &self.conversation);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key.expose());
        }
        let sent = Instant::now();
        let mut response = request.send().await.map_err(http)?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            let text = response.text().await.unwrap_or_default();
            return Err(ClientError::Refused { status, message: message_of(&text) });
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let rank = header("x-starling-rank").and_then(|rank| rank.parse().ok());
        let mut turn = Turn { node: header("x-starling-node"), rank, ..Turn::default() };
        let mut lines = Lines::default();
        while let Some(bytes) = response.chunk().await.map_err(http)? {
            for event in lines.push(&bytes)? {
                if event == "[DONE]" {
                    return Ok(turn);
                }
                turn.take(&event, sent.elapsed(), &mut show)?;
            }
        }
        Err(ClientError::Broken("the connection was closed before the end".into()))
    }
}

impl Turn {
    fn take(&mut self, event: &str, elapsed: Duration, show: &mut impl FnMut(&str)) -> Result<(), ClientError> {
        let chunk: Value = serde_json::from_str(event).map_err(|e| ClientError::Broken(format!("{e} in {event:?}")))?;
        if chunk.get("error").is_some() {
            return Err(ClientError::Broken(message_of(event)));
        }
        let choice = &chunk["choices"][0];
        if let Some(text) = choice["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
            if self.text.is_empty() {
                self.ttft = elapsed;
            }
            self.decode = elapsed.saturating_sub(self.ttft);
            self.text.push_str(text);
            show(text);
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = Some(finish.to_owned());
        }
        let usage = &chunk["usage"];
        if usage.is_object() {
            let count = |value: &Value| value.as_u64().unwrap_or(0);
            self.prompt_tokens = count(&usage["prompt_tokens"]);
            self.completion_tokens = count(&usage["completion_tokens"]);
            self.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        }
        Ok(())
    }
}

/// The message of an error body; the body itself when it is none.
pub fn message_of(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|value| value["error"]["message"].as_str().map(str::to_owned));
    let message = message.or_else(|| parsed?["message"].as_str().map(str::to_owned));
    message.unwrap_or_else(|| body.trim().chars().take(200).collect())
}

/// Longest line of an event stream; more is no chat chunk.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Cuts server-sent events out of the bytes of a stream.
#[derive(Default)]
pub struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The data of the events that `bytes` completes.
    ///
    /// # Errors
    /// A line that is too long or no text.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, ClientError> {
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        let mut start = 0;
        while let Some(length) = self.rest[start..].iter().position(|byte| *byte == b'\n') {
            let line = std::str::from_utf8(&self.rest[start..start + length]);
            let line = line.map_err(|_| ClientError::Broken("a line that is not UTF-8".into()))?;
            if let Some(data) = line.trim_end_matches('\r').strip_prefix("data:") {
                events.push(data.trim_start().to_owned());
            }
            start += length + 1;
        }
        self.rest.drain(..start);
        if self.rest.len() > LINE_BYTES_MAX {
            return Err(ClientError::Broken(format!("a line of more than {LINE_BYTES_MAX} bytes")));
        }
        Ok(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    /// Answers one request with these pieces of a response, and returns the request.
    async fn serve(pieces: Vec<Vec<u8>>) -> (SocketAddr, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                let mut buffer = [0; 4096];
                let n = stream.read(&mut buffer).await.unwrap();
                request.extend_from_slice(&buffer[..n]);
            }
            for piece in pieces {
                stream.write_all(&piece).await.unwrap();
                stream.flush().await.unwrap();
                tokio::task::yield_now().await;
            }
            String::from_utf8(request).unwrap()
        });
        (address, served)
    }

    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-starling-rank: 1\r\n\
                        x-starling-node: node-0\r\nconnection: close\r\n\r\n";

    fn delta(text: &str) -> String {
        format!("data: {}\n\n", json!({ "choices": [{ "delta": { "content": text }, "finish_reason": null }] }))
    }

    async fn talk(pieces: Vec<Vec<u8>>) -> (Result<Turn, ClientError>, String, String) {
        let (address, served) = serve(pieces).await;
        let client = Client::new("smollm2", Some(Secret::new("sk-1"))).unwrap();
        let (api, messages) = (format!("http://{address}"), [json!({ "role": "user", "content": "hi" })]);
        let mut shown = String::new();
        let outcome = client.turn(&api, &messages, 9, |text| shown.push_str(text)).await;
        (outcome, shown, served.await.unwrap())
    }

    #[tokio::test]
    async fn a_stream_is_read_however_it_is_cut() {
        let usage = json!({ "choices": [], "usage": { "prompt_tokens": 7, "completion_tokens": 3,
            "prompt_tokens_details": { "cached_tokens": 4 } } });
        let finish = json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] });
        let whole = format!(
            "{HEAD}: comment\n\n{}{}data: {finish}\r\n\r\ndata:{usage}\n\ndata: [DONE]\n\n",
            delta("grüß"),
            delta(" dich")
        );
        for size in [1, 7, 4096] {
            let pieces = whole.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            let (turn, shown, request) = talk(pieces).await;
            let turn = turn.unwrap();
            assert_eq!((shown.as_str(), turn.text.as_str()), ("grüß dich", "grüß dich"));
            assert_eq!((turn.rank, turn.node.as_deref()), (Some(1), Some("node-0")));
            assert_eq!((turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens), (7, 4, 3));
            assert_eq!(turn.finish.as_deref(), Some("stop"));
            let request = request.to_lowercase();
            assert!(request.contains("authorization: bearer sk-1") && request.contains("x-starling-conversation: "));
        }
    }

    #[tokio::test]
    async fn a_refusal_is_told_in_the_servers_words() {
        let body = json!({ "error": { "message": "node is draining", "type": "server_error" } }).to_string();
        let head = format!("HTTP/1.1 503 Unavailable\r\ncontent-length: {}\r\n\r\n", body.len());
        let (error, ..) = talk(vec![(head + &body).into_bytes()]).await;
        assert_eq!(error.unwrap_err().to_string(), "API answered 503: node is draining");
    }

    #[tokio::test]
    async fn a_stream_that_breaks_off_is_an_error() {
        let (error, shown, _) = talk(vec![format!("{HEAD}{}", delta("half")).into_bytes()]).await;
        assert!(matches!(error, Err(ClientError::Broken(_))) && shown == "half");
        let broken = format!("{HEAD}data: {}\n\n", json!({ "error": { "message": "rank failed" } }));
        let (error, ..) = talk(vec![broken.into_bytes()]).await;
        assert_eq!(error.unwrap_err().to_string(), "stream broke off: rank failed");
        let (error, ..) = talk(vec![format!("{HEAD}data: nonsense\n\n").into_bytes()]).await;
        assert!(matches!(error, Err(ClientError::Broken(_))));
    }
}
