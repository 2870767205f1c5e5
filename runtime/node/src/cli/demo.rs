//! The conversation of `starling up`: three turns over real HTTP, shown as they stream.

use super::client::{Client, ClientError, Turn, reachable};
use crate::config::Secret;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::{self, Write};
use std::net::SocketAddr;

/// What is said. Each turn needs the ones before it, so the answers show that the prefix is understood, not only reused.
const QUESTIONS: [&str; 3] = [
    "Hello! My name is Ada and I keep bees. What do bees make?",
    "How do they make it? Answer in two sentences.",
    "What is my name, and what animals do I keep?",
];
const SYSTEM: &str = "You are Starling, a friendly assistant. Answer briefly and plainly.";
/// Tokens of one answer at most: enough for some sentences, few enough for a slow machine.
const ANSWER_TOKENS_MAX: u32 = 64;

/// Why the conversation failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot write the conversation: {0}")]
    Write(#[from] io::Error),
}

/// One node that is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReady {
    pub id: String,
    /// Base of the API, such as `http://127.0.0.1:8000`.
    pub api: String,
    pub admin: String,
    pub pid: u32,
}

impl NodeReady {
    /// This process, by its listeners' actual addresses.
    pub fn here(id: &str, api: SocketAddr, admin: SocketAddr) -> Self {
        let url = |address| format!("http://{}", reachable(address));
        Self { id: id.to_owned(), api: url(api), admin: url(admin), pid: std::process::id() }
    }
}

/// One line of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event<'a> {
    Ready {
        nodes: &'a [NodeReady],
    },
    Turn {
        turn: usize,
        /// The node that was asked.
        node: &'a str,
        /// The rank's node, where it is another.
        #[serde(skip_serializing_if = "Option::is_none")]
        rank_node: Option<&'a str>,
        rank: Option<u32>,
        prompt_tokens: u64,
        cached_tokens: u64,
        completion_tokens: u64,
        ttft_ms: f64,
        tokens_per_s: Option<f64>,
        finish: Option<&'a str>,
        user: &'a str,
        text: &'a str,
    },
}

/// What is shown of a turn beside its outcome.
struct Shown<'a> {
    number: usize,
    question: &'a str,
    /// The node that was asked, of `nodes`.
    asked: &'a str,
    nodes: usize,
}

/// How `up` shows what happens.
#[derive(Debug)]
pub struct Printer<W> {
    out: W,
    json: bool,
    colour: bool,
}

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl<W: Write> Printer<W> {
    /// `colour` only matters for text; `telemetry::logs::colour` says whether a stream wants it.
    pub fn new(out: W, json: bool, colour: bool) -> Self {
        Self { out, json, colour: colour && !json }
    }

    fn style(&self, style: &'static str) -> &'static str {
        if self.colour { style } else { "" }
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, event)?;
        writeln!(self.out)?;
        self.out.flush()
    }

    /// Says where the nodes are reached.
    ///
    /// # Errors
    /// Writing failed.
    pub fn ready(&mut self, model: &str, nodes: &[NodeReady]) -> io::Result<()> {
        if self.json {
            return self.event(&Event::Ready { nodes });
        }
        let (bold, plain) = (self.style(BOLD), self.style(PLAIN));
        for node in nodes {
            writeln!(self.out, "{} serves {model} at {bold}{}/v1{plain} (admin {})", node.id, node.api, node.admin)?;
        }
        self.out.flush()
    }

    /// Has the conversation and shows it turn by turn. Each turn asks the next node; the conversation is one.
    ///
    /// # Errors
    /// A turn failed, or writing did.
    pub async fn converse(
        &mut self,
        nodes: &[NodeReady],
        model: &str,
        key: Option<Secret>,
    ) -> Result<Vec<Turn>, DemoError> {
        let client = Client::new(model, key)?;
        let mut messages = vec![json!({ "role": "system", "content": SYSTEM })];
        let mut turns = Vec::new();
        for (question, asked) in QUESTIONS.into_iter().zip(nodes.iter().cycle()) {
            messages.push(json!({ "role": "user", "content": question }));
            self.question(model, question)?;
            let mut written = Ok(());
            let turn = client.turn(&asked.api, &messages, ANSWER_TOKENS_MAX, |text| {
                if written.is_ok() {
                    written = self.piece(text);
                }
            });
            let turn = turn.await?;
            written?;
            let number = turns.len() + 1;
            self.turn(&Shown { number, question, asked: &asked.id, nodes: nodes.len() }, &turn)?;
            messages.push(json!({ "role": "assistant", "content": turn.text }));
            turns.push(turn);
        }
        Ok(turns)
    }

    /// Says that it goes on serving; nothing in JSON, where no news is good news.
    ///
    /// # Errors
    /// Writing failed.
    pub fn serving(&mut self) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        writeln!(self.out, "\nserving; Ctrl-C drains and ends")?;
        self.out.flush()
    }

    fn question(&mut self, model: &str, question: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let (bold, plain) = (self.style(BOLD), self.style(PLAIN));
        write!(self.out, "\n{bold}you{plain}: {question}\n{bold}{model}{plain}: ")?;
        self.out.flush()
    }

    fn piece(&mut self, text: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        // A model's text is not trusted with the terminal.
        let text: String = text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        write!(self.out, "{text}")?;
        self.out.flush()
    }

    fn turn(&mut self, shown: &Shown<'_>, turn: &Turn) -> io::Result<()> {
        let ttft_ms = (turn.ttft.as_secs_f64() * 10_000.0).round() / 10.0;
        if self.json {
            return self.event(&Event::Turn {
                turn: shown.number,
                node: shown.asked,
                rank_node: turn.node.as_deref().filter(|node| *node != shown.asked),
                rank: turn.rank,
                prompt_tokens: turn.prompt_tokens,
                cached_tokens: turn.cached_tokens,
                completion_tokens: turn.completion_tokens,
                ttft_ms,
                tokens_per_s: turn.tokens_per_s().map(|rate| (rate * 10.0).round() / 10.0),
                finish: turn.finish.as_deref(),
                user: shown.question,
                text: &turn.text,
            });
        }
        let rank = turn.rank.map_or("?".to_owned(), |rank| rank.to_string());
        let node = turn.node.as_deref().unwrap_or("?");
        let rate = turn.tokens_per_s().map_or(String::new(), |rate| format!(" · {rate:.1} tok/s"));
        let asked = if shown.nodes > 1 { format!(" · asked {}", shown.asked) } else { String::new() };
        let (dim, plain) = (self.style(DIM), self.style(PLAIN));
        writeln!(
            self.out,
            "\n{dim}  turn {}{asked} · rank {rank} on {node} · {} prompt tokens, {} cached · TTFT {ttft_ms} ms{rate}{plain}",
            shown.number, turn.prompt_tokens, turn.cached_tokens
        )?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::routing::post;
    use serde_json::Value;

    /// Answers each turn with the number of messages it was sent.
    async fn api() -> SocketAddr {
        let answer = |axum::Json(request): axum::Json<Value>| async move {
            let count = request["messages"].as_array().unwrap().len();
            let text = json!({ "choices": [{ "delta": { "content": format!("{count}\u{1b}[2J messages") } }] });
            let usage = json!({ "choices": [], "usage": { "prompt_tokens": 10 * count, "completion_tokens": 2,
                "prompt_tokens_details": { "cached_tokens": count } } });
            let headers = [("x-starling-rank", "0"), ("x-starling-node", "node-0")];
            (headers, format!("data: {text}\n\ndata: {usage}\n\ndata: [DONE]\n\n"))
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/v1/chat/completions", post(answer));
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    async fn conversation(json: bool, nodes: usize) -> String {
        let admin = SocketAddr::from(([0, 0, 0, 0], 9));
        let mut ready = Vec::new();
        for node in 0..nodes {
            ready.push(NodeReady::here(&format!("node-{node}"), api().await, admin));
        }
        let mut out = Vec::new();
        let mut printer = Printer::new(&mut out, json, false);
        printer.ready("smollm2", &ready).unwrap();
        let turns = printer.converse(&ready, "smollm2", None).await.unwrap();
        assert_eq!(turns.len(), 3);
        String::from_utf8(out).unwrap()
    }

    #[tokio::test]
    async fn each_line_of_json_is_an_event() {
        let out = conversation(true, 1).await;
        let events: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(events.len(), 4);
        assert_eq!(events[0]["event"], "ready");
        assert_eq!(events[0]["nodes"][0]["id"], "node-0");
        assert_eq!(events[0]["nodes"][0]["admin"], "http://127.0.0.1:9");
        assert_eq!(events[0]["nodes"][0]["pid"], std::process::id());
        for (at, messages) in [(1, 2), (2, 4), (3, 6)] {
            let turn = &events[at];
            assert_eq!((turn["event"].as_str(), turn["rank"].as_u64()), (Some("turn"), Some(0)));
            assert_eq!((&turn["node"], turn.get("rank_node")), (&json!("node-0"), None));
            assert_eq!(
                (turn["prompt_tokens"].as_u64(), turn["cached_tokens"].as_u64()),
                (Some(10 * messages), Some(messages))
            );
            assert!(turn["ttft_ms"].is_number());
        }
    }

    #[tokio::test]
    async fn text_shows_each_turn_and_no_control_characters_of_the_model() {
        let out = conversation(false, 1).await;
        assert!(out.starts_with("node-0 serves smollm2 at http://127.0.0.1:"), "{out}");
        assert!(
            out.contains("smollm2: 2[2J messages\n  turn 1 · rank 0 on node-0 · 20 prompt tokens, 2 cached · TTFT ")
        );
        assert!(out.contains("turn 3 · ") && !out.contains('\u{1b}'));
    }

    #[tokio::test]
    async fn each_turn_asks_the_next_node_and_tells_where_the_rank_is() {
        let out = conversation(true, 2).await;
        let turns: Vec<Value> = out.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
        let nodes: Vec<_> = turns.iter().map(|turn| (turn["node"].as_str(), turn.get("rank_node"))).collect();
        let here = json!("node-0");
        assert_eq!(nodes, [(Some("node-0"), None), (Some("node-1"), Some(&here)), (Some("node-0"), None)]);
        let out = conversation(false, 2).await;
        assert!(out.contains("turn 2 · asked node-1 · rank 0 on node-0 · "), "{out}");
    }
}
