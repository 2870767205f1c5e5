//! The bodies of the generation endpoints: each field honoured, tolerated, or refused by name.

use super::error::ApiError;
use super::read::{Fields, Neutral, Rules, bad, show, whole};
use crate::text::{Message, Role, StopStrings};
use serde_json::{Map, Value};
use starling_core::ids::TokenId;
use starling_core::request::{
    Adjustment, LOGIT_BIAS, LOGIT_BIAS_ENTRIES_MAX, MIN_P, PENALTY, REPETITION_PENALTY, TEMPERATURE, TOP_LOGPROBS_MAX,
};

/// OpenAI's limit.
const STOP_STRINGS_MAX: usize = 4;
/// Characters of a stop string are held back until it is certain that they are none.
const STOP_BYTES_MAX: usize = 1_024;
/// OpenAI's limit of `n`.
const CHOICES_MAX: u32 = 128;
/// OpenAI's default for completions; a chat's answer may fill the context.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

const TOLERATED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "prompt_cache_options",
    "parallel_tool_calls",
];

pub const CHAT: Rules = Rules {
    honoured: &[
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "n",
        "min_tokens",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "prompt_cache_key",
        "ignore_eos",
    ],
    tolerated: TOLERATED,
    neutral: &[
        ("response_format", Neutral::TextFormat),
        ("tools", Neutral::Empty),
        ("tool_choice", Neutral::OneOf(&["none", "auto"])),
        ("functions", Neutral::Empty),
        ("function_call", Neutral::OneOf(&["none", "auto"])),
        ("modalities", Neutral::TextOnly),
        ("audio", Neutral::Null),
        ("prediction", Neutral::Null),
        ("reasoning_effort", Neutral::OneOf(&["none"])),
        ("verbosity", Neutral::OneOf(&["medium"])),
        ("web_search_options", Neutral::Null),
        ("moderation", Neutral::Null),
    ],
};

pub const COMPLETION: Rules = Rules {
    honoured: &[
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "n",
        "min_tokens",
        "best_of",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "prompt_cache_key",
        "ignore_eos",
    ],
    tolerated: TOLERATED,
    neutral: &[("echo", Neutral::Flag(false)), ("suffix", Neutral::Empty), ("response_format", Neutral::TextFormat)],
};

pub const STREAM_OPTIONS: Rules =
    Rules { honoured: &["include_usage"], tolerated: &["include_obfuscation"], neutral: &[] };

pub const MESSAGE: Rules = Rules {
    honoured: &["role", "content", "name"],
    tolerated: &["tool_call_id"],
    // What clients send back when they repeat an answer.
    neutral: &[
        ("tool_calls", Neutral::Empty),
        ("function_call", Neutral::Null),
        ("refusal", Neutral::Null),
        ("annotations", Neutral::Empty),
        ("audio", Neutral::Null),
        ("reasoning", Neutral::Empty),
        ("reasoning_content", Neutral::Empty),
    ],
};

pub const PART: Rules = Rules { honoured: &["type", "text"], tolerated: &[], neutral: &[] };

/// What a model continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Messages(Vec<Message>),
    Text(String),
    Tokens(Vec<TokenId>),
}

impl Prompt {
    /// The field that holds it.
    pub fn param(&self) -> &'static str {
        match self {
            Self::Messages(_) => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }
}

/// A generation as the client asks for it.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    pub model: String,
    pub prompt: Prompt,
    /// `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
    pub adjustment: Adjustment,
    /// How many of the most probable tokens are told with each token; `None`: nothing is told, not even of the token itself.
    pub logprobs: Option<u32>,
    /// Tokens before the answer may end by an end token or a stop string.
    pub min_tokens: u32,
    /// Answers to give.
    pub choices: u32,
    pub seed: Option<u64>,
    pub stops: StopStrings,
    pub stream: bool,
    pub include_usage: bool,
    pub prompt_cache_key: Option<String>,
    pub ignore_eos: bool,
}

impl GenerationRequest {
    /// Reads the body of `/v1/chat/completions`.
    ///
    /// # Errors
    /// For the first field that cannot be served.
    pub fn chat(body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields::of(body);
        fields.check(&CHAT)?;
        let old = tokens_max(&fields, "max_tokens")?;
        let new = tokens_max(&fields, "max_completion_tokens")?;
        if let (Some(old), Some(new)) = (old, new)
            && old != new
        {
            let why = format_args!("contradicts max_completion_tokens ({old} and {new})");
            return Err(bad("max_tokens".into(), why));
        }
        let logprobs = chat_logprobs(&fields)?;
        Ok(Self { logprobs, ..Self::read(&fields, Prompt::Messages(messages(&fields)?), new.or(old))? })
    }

    /// Reads the body of `/v1/completions`.
    ///
    /// # Errors
    /// As `chat`.
    pub fn completion(body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields::of(body);
        fields.check(&COMPLETION)?;
        let max_tokens = tokens_max(&fields, "max_tokens")?.unwrap_or(COMPLETION_TOKENS_DEFAULT);
        let logprobs = fields.whole("logprobs", 0, i128::from(TOP_LOGPROBS_MAX))?.map(|top| top as u32);
        let asked = Self { logprobs, ..Self::read(&fields, prompt(&fields)?, Some(max_tokens))? };
        let best_of = fields.whole("best_of", 1, i128::from(CHOICES_MAX))?;
        match best_of {
            Some(best_of) if best_of != i128::from(asked.choices) => {
                let why = format!("{best_of} is not supported (only the value of n, {})", asked.choices);
                Err(ApiError::Unsupported { param: fields.at("best_of"), why })
            }
            _ => Ok(asked),
        }
    }

    fn read(fields: &Fields, prompt: Prompt, max_tokens: Option<u32>) -> Result<Self, ApiError> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        // Clients that mean "all" send -1 (vLLM's spelling) or 0.
        let top_k = fields.whole("top_k", -1, i128::from(u32::MAX))?.unwrap_or(0).max(0);
        // Any 64 bits will do; negative numbers are the upper half.
        let seed = fields.whole("seed", i128::from(i64::MIN), i128::from(u64::MAX))?;
        Ok(Self {
            model: required(fields.text("model")?, fields.at("model"))?.to_owned(),
            prompt,
            max_tokens,
            temperature: fields.number("temperature", &TEMPERATURE)?.unwrap_or(1.0),
            top_p: top_p(fields)?,
            top_k: top_k as u32,
            min_p: fields.number("min_p", &MIN_P)?.unwrap_or(0.0),
            adjustment: adjustment(fields)?,
            logprobs: None,
            min_tokens: fields.whole("min_tokens", 0, i128::from(max_tokens.unwrap_or(u32::MAX)))?.unwrap_or(0) as u32,
            choices: fields.whole("n", 1, i128::from(CHOICES_MAX))?.map_or(1, |choices| choices as u32),
            seed: seed.map(|seed| seed as u64),
            stops: stops(fields)?,
            stream,
            include_usage: include_usage(fields, stream)?,
            prompt_cache_key: fields.text("prompt_cache_key")?.map(str::to_owned),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        })
    }
}

/// The value of a field that must be there.
pub fn required<T>(value: Option<T>, param: String) -> Result<T, ApiError> {
    value.ok_or_else(|| bad(param, "is missing"))
}

fn tokens_max(fields: &Fields, name: &str) -> Result<Option<u32>, ApiError> {
    let tokens = fields.whole(name, 1, i128::from(u32::MAX))?;
    Ok(tokens.map(|tokens| tokens as u32))
}

fn top_p(fields: &Fields) -> Result<f32, ApiError> {
    match fields.number("top_p", &(0.0..=1.0))?.unwrap_or(1.0) {
        0.0 => Err(bad(fields.at("top_p"), "must be above 0, not 0")),
        top_p => Ok(top_p),
    }
}

fn adjustment(fields: &Fields) -> Result<Adjustment, ApiError> {
    Ok(Adjustment {
        repetition_penalty: fields.number("repetition_penalty", &REPETITION_PENALTY)?.unwrap_or(1.0),
        presence_penalty: fields.number("presence_penalty", &PENALTY)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", &PENALTY)?.unwrap_or(0.0),
        logit_bias: logit_bias(fields)?,
    })
}

/// Whether its tokens are in the vocabulary is for who knows it.
fn logit_bias(fields: &Fields) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let param = fields.at("logit_bias");
    let Some(value) = fields.get("logit_bias") else {
        return Ok(Vec::new());
    };
    let Value::Object(entries) = value else {
        return Err(bad(param, format_args!("must be an object of biases by token id, not {}", show(value))));
    };
    if entries.len() > LOGIT_BIAS_ENTRIES_MAX {
        let why = format_args!("has {} entries; at most {LOGIT_BIAS_ENTRIES_MAX} are allowed", entries.len());
        return Err(bad(param, why));
    }
    let biases = Fields::within(value, param.clone())?;
    let bias = |name: &String| {
        // One spelling a token, so that none is there twice.
        let token = name.parse::<TokenId>().ok().filter(|token| token.to_string() == *name);
        let shown = show(&Value::from(name.as_str()));
        let token = token.ok_or_else(|| bad(param.clone(), format_args!("a name must be a token id, not {shown}")))?;
        Ok((token, required(biases.number(name, &LOGIT_BIAS)?, biases.at(name))?))
    };
    entries.keys().map(bias).collect()
}

fn chat_logprobs(fields: &Fields) -> Result<Option<u32>, ApiError> {
    let asked = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0, i128::from(TOP_LOGPROBS_MAX))?.unwrap_or(0);
    match asked {
        false if top > 0 => Err(bad(fields.at("top_logprobs"), format_args!("{top} needs \"logprobs\": true"))),
        false => Ok(None),
        true => Ok(Some(top as u32)),
    }
}

fn include_usage(fields: &Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.get("stream_options") else {
        return Ok(false);
    };
    if !stream {
        return Err(bad(fields.at("stream_options"), "is only allowed with \"stream\": true"));
    }
    let options = Fields::within(options, fields.at("stream_options"))?;
    options.check(&STREAM_OPTIONS)?;
    Ok(options.flag("include_usage")?.unwrap_or(false))
}

fn stops(fields: &Fields) -> Result<StopStrings, ApiError> {
    let one_or_more = match fields.get("stop") {
        None => &[][..],
        Some(Value::Array(stops)) => stops,
        Some(stop) => std::slice::from_ref(stop),
    };
    if one_or_more.len() > STOP_STRINGS_MAX {
        let why = format_args!("has {} strings; at most {STOP_STRINGS_MAX} are allowed", one_or_more.len());
        return Err(bad(fields.at("stop"), why));
    }
    let mut stops = Vec::with_capacity(one_or_more.len());
    for stop in one_or_more {
        match stop.as_str() {
            None => {
                let why = format_args!("must be a string or an array of strings, not {}", show(stop));
                return Err(bad(fields.at("stop"), why));
            }
            Some("") => return Err(bad(fields.at("stop"), "an empty string would end every answer")),
            Some(text) if text.len() > STOP_BYTES_MAX => {
                let why = format_args!("a string has {} bytes; at most {STOP_BYTES_MAX} are allowed", text.len());
                return Err(bad(fields.at("stop"), why));
            }
            Some(text) => stops.push(text.to_owned()),
        }
    }
    Ok(StopStrings::new(stops))
}

/// Reads `messages`.
///
/// # Errors
/// When they are missing, empty, or one of them cannot be served.
pub fn messages(fields: &Fields) -> Result<Vec<Message>, ApiError> {
    let param = fields.at("messages");
    let messages = match required(fields.get("messages"), param.clone())? {
        Value::Array(messages) if messages.is_empty() => return Err(bad(param, "is empty")),
        Value::Array(messages) => messages,
        other => return Err(bad(param, format_args!("must be an array, not {}", show(other)))),
    };
    messages.iter().enumerate().map(|(at, value)| message(value, format!("{param}[{at}]"))).collect()
}

fn message(value: &Value, path: String) -> Result<Message, ApiError> {
    let fields = Fields::within(value, path)?;
    fields.check(&MESSAGE)?;
    let role = required(fields.text("role")?, fields.at("role"))?;
    let role = Role::of(role).ok_or_else(|| {
        let known = Role::ALL.map(Role::name).join(", ");
        bad(fields.at("role"), format_args!("must be one of {known}, not {role:?}"))
    })?;
    let param = fields.at("content");
    let content = match required(fields.get("content"), param.clone())? {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts_text(parts, &param)?,
        other => {
            let why = format_args!("must be a string or an array of parts, not {}", show(other));
            return Err(bad(param, why));
        }
    };
    Ok(Message { role, content, name: fields.text("name")?.map(str::to_owned) })
}

/// Parts become one text, a line each, as other servers do it.
fn parts_text(parts: &[Value], param: &str) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, part) in parts.iter().enumerate() {
        let part = Fields::within(part, format!("{param}[{at}]"))?;
        let kind = required(part.text("type")?, part.at("type"))?;
        if kind != "text" {
            let why = format!("{kind:?} is not supported (only \"text\")");
            return Err(ApiError::Unsupported { param: part.at("type"), why });
        }
        part.check(&PART)?;
        texts.push(required(part.text("text")?, part.at("text"))?);
    }
    Ok(texts.join("\n"))
}

fn prompt(fields: &Fields) -> Result<Prompt, ApiError> {
    let param = fields.at("prompt");
    let value = required(fields.get("prompt"), param.clone())?;
    let wanted = |other: &Value| {
        bad(param.clone(), format_args!("must be a string or an array of token ids, not {}", show(other)))
    };
    match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(values) => match &values[..] {
            [] => Err(bad(param, "is empty")),
            [Value::String(text)] => Ok(Prompt::Text(text.clone())),
            [Value::Array(tokens)] => token_ids(tokens, &param).map(Prompt::Tokens),
            [Value::Number(_), ..] => token_ids(values, &param).map(Prompt::Tokens),
            [Value::String(_) | Value::Array(_), ..] => {
                let why = format!("{} prompts are not supported in one request (only 1)", values.len());
                Err(ApiError::Unsupported { param, why })
            }
            [other, ..] => Err(wanted(other)),
        },
        other => Err(wanted(other)),
    }
}

/// Reads an array of token ids; whether they are in the vocabulary is for who knows it.
///
/// # Errors
/// When one of them is no 32-bit whole number.
pub fn token_ids(values: &[Value], param: &str) -> Result<Vec<TokenId>, ApiError> {
    let id = |(at, value): (usize, &Value)| {
        let id = whole(value).and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| bad(format!("{param}[{at}]"), format_args!("must be a token id, not {}", show(value))))
    };
    values.iter().enumerate().map(id).collect()
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
