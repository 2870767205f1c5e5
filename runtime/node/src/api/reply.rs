//! The JSON that generation endpoints answer with, in OpenAI's shapes.

use super::answer::finish_reason;
use super::metrics::Usage;
use serde::Serialize;
use starling_core::request::Finish;

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
    logprobs: Option<()>,
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
    pub fn whole(&self, text: &str, finish: Finish, usage: Usage) -> String {
        let content = match self.shape {
            Shape::Chat => Content::Message { role: "assistant", content: text, refusal: None },
            Shape::Completion => Content::Text(text),
        };
        self.json(false, &[choice(content, Some(finish))], Some(Some(usage.into())))
    }

    /// The chunk that says who speaks; completions have none.
    pub fn opening(&self) -> Option<String> {
        let opening = Delta { role: Some("assistant"), content: Some("") };
        (self.shape == Shape::Chat).then(|| self.chunk(Content::Delta(opening), None))
    }

    /// A chunk of text.
    pub fn text(&self, text: &str) -> String {
        match self.shape {
            Shape::Chat => self.chunk(Content::Delta(Delta { role: None, content: Some(text) }), None),
            Shape::Completion => self.chunk(Content::Text(text), None),
        }
    }

    /// The chunk that says why the answer ended.
    pub fn closing(&self, finish: Finish) -> String {
        let content = match self.shape {
            Shape::Chat => Content::Delta(Delta::default()),
            Shape::Completion => Content::Text(""),
        };
        self.chunk(content, Some(finish))
    }

    /// The last chunk, without choices, if the client asked for it.
    pub fn usage(&self, usage: Usage) -> Option<String> {
        self.include_usage.then(|| self.json(true, &[], Some(Some(usage.into()))))
    }

    fn chunk(&self, content: Content<'_>, finish: Option<Finish>) -> String {
        self.json(true, &[choice(content, finish)], self.include_usage.then_some(None))
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

fn choice(content: Content<'_>, finish: Option<Finish>) -> Choice<'_> {
    Choice { index: 0, content, logprobs: None, finish_reason: finish.map(finish_reason) }
}
