//! The model's card, and its tokenizer.

use super::error::ApiError;
use super::generate::{check_vocabulary, encode};
use super::read::{self, Fields, Neutral, Rules, bad};
use super::request::{self, Prompt, required};
use super::{Shared, body, health};
use crate::text::Owner;
use axum::Json;
use axum::extract::{Path, Request, State};
use serde::Serialize;
use serde_json::Value;
use starling_core::ids::TokenId;
use std::sync::Arc;

pub(super) const TOKENIZE: Rules = Rules {
    honoured: &["model", "prompt", "messages", "add_special_tokens"],
    tolerated: &[],
    neutral: &[("add_generation_prompt", Neutral::Flag(true)), ("return_token_strs", Neutral::Flag(false))],
};

pub(super) const DETOKENIZE: Rules = Rules { honoured: &["model", "tokens"], tolerated: &[], neutral: &[] };

/// Whoever only wants to see tokens continues no conversation.
const NOBODY: Owner = Owner { tenant: 0, conversation: None };

#[derive(Serialize)]
pub struct List {
    object: &'static str,
    data: [Card; 1],
}

#[derive(Serialize)]
pub struct Card {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: String,
    max_model_len: u32,
}

fn card(shared: &Shared) -> Card {
    let model = &shared.api.model;
    Card {
        id: model.id.clone(),
        object: "model",
        created: model.created_s,
        owned_by: model.owned_by.clone(),
        max_model_len: model.context_tokens,
    }
}

/// People probe this path for readiness, so it tells the truth too.
pub async fn list(State(shared): State<Arc<Shared>>) -> Result<Json<List>, ApiError> {
    health::require_ready(&shared)?;
    Ok(Json(List { object: "list", data: [card(&shared)] }))
}

pub async fn one(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Result<Json<Card>, ApiError> {
    shared.check_model(&id)?;
    Ok(Json(card(&shared)))
}

#[derive(Serialize)]
pub struct Tokens {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
}

pub async fn tokenize(State(shared): State<Arc<Shared>>, request: Request) -> Result<Json<Tokens>, ApiError> {
    let settings = &shared.api.settings;
    let bytes = body::read(request.into_body(), settings.body_bytes_max, settings.body_seconds_max).await?;
    shared.offload(move |shared| tokens_of(shared, &bytes)).await.map(Json)
}

fn tokens_of(shared: &Shared, bytes: &[u8]) -> Result<Tokens, ApiError> {
    let object = read::object(bytes)?;
    let fields = Fields::of(&object);
    fields.check(&TOKENIZE)?;
    check_optional_model(shared, &fields)?;
    let add_special_tokens = fields.flag("add_special_tokens")?;
    let tokens = match (fields.text("prompt")?, fields.get("messages")) {
        (Some(_), Some(_)) => return Err(bad("prompt".into(), "cannot go with messages")),
        (None, None) => return Err(bad("prompt".into(), "is missing, and so is messages")),
        (None, Some(_)) => encode(shared, &Prompt::Messages(request::messages(&fields)?), NOBODY)?.tokens.to_vec(),
        (Some(text), None) if add_special_tokens == Some(false) => shared.api.text.tokenizer.encode(text)?,
        (Some(text), None) => shared.api.text.encode_text(text)?,
    };
    Ok(Tokens { count: tokens.len(), max_model_len: shared.api.model.context_tokens, tokens })
}

#[derive(Serialize)]
pub struct Text {
    prompt: String,
}

pub async fn detokenize(State(shared): State<Arc<Shared>>, request: Request) -> Result<Json<Text>, ApiError> {
    let settings = &shared.api.settings;
    let bytes = body::read(request.into_body(), settings.body_bytes_max, settings.body_seconds_max).await?;
    shared.offload(move |shared| text_of(shared, &bytes)).await.map(Json)
}

fn text_of(shared: &Shared, bytes: &[u8]) -> Result<Text, ApiError> {
    let object = read::object(bytes)?;
    let fields = Fields::of(&object);
    fields.check(&DETOKENIZE)?;
    check_optional_model(shared, &fields)?;
    let values = match required(fields.get("tokens"), "tokens".into())? {
        Value::Array(values) => values,
        other => return Err(bad("tokens".into(), format_args!("must be an array, not {}", read::show(other)))),
    };
    let tokens = request::token_ids(values, "tokens")?;
    check_vocabulary(shared, &tokens, "tokens")?;
    let prompt = shared.api.text.tokenizer.decode(&tokens);
    let prompt = prompt.map_err(|token| ApiError::Internal(format!("token {token} has no bytes")))?;
    Ok(Text { prompt })
}

fn check_optional_model(shared: &Shared, fields: &Fields) -> Result<(), ApiError> {
    fields.text("model")?.map_or(Ok(()), |model| shared.check_model(model))
}
