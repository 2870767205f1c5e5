//! The JSON that generation endpoints answer with, in OpenAI's shapes.

use super::answer::{Piece, finish_reason};
use super::logprobs::{Scored, TokenScore};
use super::metrics::Usage;
use serde::Serialize;
use starling_core::request::Finish;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Which endpoint's shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Chat,
    Completion,
}

impl Shape {
    /// What OpenTelemetry calls the operation.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }

    pub fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl",
            Self::Completion => "cmpl",
        }
    }

    fn object(self, streamed: bool) -> &'static str {
        match (self, streamed) {
            (Self::Chat, false) => "chat.completion",
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Completion, _) => "text_completion",
        }
    }
}

/// What every body of one answer begins with.
#[derive(Clone, Debug)]
pub struct Head {
    pub shape: Shape,
    pub id: String,
    pub created_s: u64,
    pub model: String,
    pub include_usage: bool,
    /// How many there are.
    pub choices: u32,
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice<'a>],
    /// Left out, or null, or there.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Message { role: &'static str, content: &'a str, refusal: Option<()> },
    Delta(Delta<'a>),
    Text(&'a str),
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

/// What the model thought of the tokens, in each endpoint's shape.
#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs<'a> {
    Chat { content: Vec<ChatToken<'a>>, refusal: Option<()> },
    Completion(CompletionTokens),
}

#[derive(Serialize)]
struct ChatToken<'a> {
    #[serde(flatten)]
    token: ChatScore<'a>,
    top_logprobs: Vec<ChatScore<'a>>,
}

#[derive(Serialize)]
struct ChatScore<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
}

/// Lists of one length, an entry a token.
#[derive(Default, Serialize)]
struct CompletionTokens {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// The most probable ones, and the token itself.
    top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Characters of the text before each.
    text_offset: Vec<u32>,
}

impl<'a> Logprobs<'a> {
    fn new(shape: Shape, scores: &'a [TokenScore]) -> Self {
        match shape {
            Shape::Chat => {
                let token = |score: &'a TokenScore| ChatToken {
                    token: ChatScore::from(&score.token),
                    top_logprobs: score.top.iter().map(ChatScore::from).collect(),
                };
                Self::Chat { content: scores.iter().map(token).collect(), refusal: None }
            }
            Shape::Completion => {
                let mut tokens = CompletionTokens::default();
                for TokenScore { token, top, offset, .. } in scores {
                    tokens.tokens.push(spelled(token));
                    tokens.token_logprobs.push(token.logprob);
                    let known = top.iter().chain([token]).map(|scored| (spelled(scored), scored.logprob));
                    tokens.top_logprobs.push(known.collect());
                    tokens.text_offset.push(*offset);
                }
                Self::Completion(tokens)
            }
        }
    }
}

impl<'a> From<&'a Scored> for ChatScore<'a> {
    fn from(scored: &'a Scored) -> Self {
        Self { token: String::from_utf8_lossy(&scored.bytes), logprob: scored.logprob, bytes: &scored.bytes }
    }
}

/// As a key: a token that is a part of a character is told by its bytes, so that no two are alike.
fn spelled(scored: &Scored) -> String {
    match std::str::from_utf8(&scored.bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => scored.bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

#[derive(Serialize)]
struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.generated_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.generated_tokens),
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

impl Head {
    /// The whole answer of a request that is not streamed.
    pub fn whole(&self, choices: &[(Piece, Option<Finish>)], usage: Usage) -> String {
        let choices = choices.iter().zip(0..).map(|((piece, finish), index)| {
            let content = match self.shape {
                Shape::Chat => Content::Message { role: "assistant", content: &piece.text, refusal: None },
                Shape::Completion => Content::Text(&piece.text),
            };
            let logprobs = piece.scores.as_deref().map(|scores| Logprobs::new(self.shape, scores));
            Choice { index, content, logprobs, finish_reason: finish.map(finish_reason) }
        });
        self.json(false, &choices.collect::<Vec<_>>(), Some(Some(usage.into())))
    }

    /// The chunk that says who speaks; completions have none.
    pub fn opening(&self, index: u32) -> Option<String> {
        let opening = Delta { role: Some("assistant"), content: Some("") };
        (self.shape == Shape::Chat).then(|| self.chunk(Choice::of(index, Content::Delta(opening))))
    }

    /// A chunk of text.
    pub fn more(&self, index: u32, piece: &Piece) -> String {
        let content = match self.shape {
            Shape::Chat => Content::Delta(Delta { role: None, content: Some(&piece.text) }),
            Shape::Completion => Content::Text(&piece.text),
        };
        let scores = piece.scores.as_deref().filter(|scores| !scores.is_empty());
        let logprobs = scores.map(|scores| Logprobs::new(self.shape, scores));
        self.chunk(Choice { logprobs, ..Choice::of(index, content) })
    }

    /// The chunk that says why a choice ended.
    pub fn closing(&self, index: u32, finish: Finish) -> String {
        let content = match self.shape {
            Shape::Chat => Content::Delta(Delta::default()),
            Shape::Completion => Content::Text(""),
        };
        self.chunk(Choice { finish_reason: Some(finish_reason(finish)), ..Choice::of(index, content) })
    }

    /// The last chunk, without choices, if the client asked for it.
    pub fn usage(&self, usage: Usage) -> Option<String> {
        self.include_usage.then(|| self.json(true, &[], Some(Some(usage.into()))))
    }

    fn chunk(&self, choice: Choice<'_>) -> String {
        self.json(true, &[choice], self.include_usage.then_some(None))
    }

    fn json(&self, streamed: bool, choices: &[Choice<'_>], usage: Option<Option<UsageBody>>) -> String {
        let body = Body {
            id: &self.id,
            object: self.shape.object(streamed),
            created: self.created_s,
            model: &self.model,
            choices,
            usage,
        };
        serde_json::to_string(&body).expect("strings and numbers are always JSON")
    }
}

impl<'a> Choice<'a> {
    fn of(index: u32, content: Content<'a>) -> Self {
        Self { index, content, logprobs: None, finish_reason: None }
    }
}
