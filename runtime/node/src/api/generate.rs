//! The two endpoints that generate.

use super::answer::{Answer, Ask, Piece, Step};
use super::error::ApiError;
use super::reply::{Head, Shape};
use super::request::{GenerationRequest, Prompt};
use super::router::{HEADER_NODE, HEADER_RANK, Tenant};
use super::scope::Scope;
use super::trace::attribute;
use super::{Shared, body, identity, read, sse};
use crate::text::{Encoded, Owner, PromptText};
use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use starling_core::ids::{ConversationKey, TokenId};
use starling_core::rejection::Rejection;
use starling_core::request::{Finish, Generation, Sampling};
use starling_serving::api::{Placed, Submission};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Every request is as urgent as the next: the API has no field for it yet.
const PRIORITY: f64 = 0.5;

pub async fn chat(
    State(shared): State<Arc<Shared>>,
    Extension(scope): Extension<Arc<Scope>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(shared, scope, request, Shape::Chat).await
}

pub async fn completion(
    State(shared): State<Arc<Shared>>,
    Extension(scope): Extension<Arc<Scope>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(shared, scope, request, Shape::Completion).await
}

/// A request whose text is behind it.
struct Prepared {
    asked: GenerationRequest,
    owner: Owner,
    prompt: Encoded,
    max_new_tokens: u32,
}

async fn generate(
    shared: Arc<Shared>,
    scope: Arc<Scope>,
    request: Request,
    shape: Shape,
) -> Result<Response, ApiError> {
    let tenant = request.extensions().get::<Tenant>().map_or(0, |tenant| tenant.0);
    let (parts, request_body) = request.into_parts();
    let settings = &shared.api.settings;
    let bytes = body::read(request_body, settings.body_bytes_max, settings.body_seconds_max).await?;
    let headers = parts.headers.clone();
    let prepared = shared.offload(move |shared| prepare(shared, &bytes, shape, (tenant, &headers))).await?;
    shared.api.metrics.encoded(&prepared.prompt.cost);

    let head = head(&shared, &prepared.asked, shape);
    describe(&scope, &head, &prepared);
    let ask = Ask {
        stops: prepared.asked.stops.clone(),
        prompt_tokens: u32::try_from(prepared.prompt.tokens.len()).unwrap_or(u32::MAX),
        scores: prepared.asked.logprobs.is_some(),
        min_tokens: prepared.asked.min_tokens,
        prompt_param: prepared.asked.prompt.param(),
    };
    let streamed = prepared.asked.stream;
    let submissions = submissions(&shared, (&scope, &head), prepared, &parts.headers)?;
    let around = (scope.clone(), shared.api.text.clone());
    let mut answer = Answer::start(shared.api.engine.clone(), submissions, around, ask)?;
    let placed = answer.placed().await?;
    let mut response = match streamed {
        true => sse::response(answer, head, scope),
        false => whole(answer, &head).await?,
    };
    tell_place(response.headers_mut(), placed);
    Ok(response)
}

/// Everything that costs time for long bodies: parsing, rendering, encoding.
fn prepare(
    shared: &Shared,
    bytes: &[u8],
    shape: Shape,
    (tenant, headers): (u64, &HeaderMap),
) -> Result<Prepared, ApiError> {
    let body = read::object(bytes)?;
    let asked = match shape {
        Shape::Chat => GenerationRequest::chat(&body)?,
        Shape::Completion => GenerationRequest::completion(&body)?,
    };
    shared.check_model(&asked.model)?;
    for &(token, _) in &asked.adjustment.logit_bias {
        check_token(shared, token, || format!("logit_bias.{token}"))?;
    }
    let conversation = shared.identities.conversation(tenant, headers, asked.prompt_cache_key.as_deref());
    let owner = Owner { tenant, conversation };
    let prompt = encode(shared, &asked.prompt, owner)?;
    if prompt.tokens.is_empty() {
        return Err(ApiError::Refused(Rejection::EmptyPrompt, asked.prompt.param()));
    }
    let context = shared.api.model.context_tokens;
    let tokens = prompt.tokens.len() as u64;
    if tokens >= u64::from(context) {
        return Err(ApiError::ContextExceeded { tokens, context, exact: true, param: asked.prompt.param() });
    }
    let room = context - tokens as u32;
    let max_new_tokens = asked.max_tokens.map_or(room, |max_tokens| max_tokens.min(room));
    Ok(Prepared { asked, owner, prompt, max_new_tokens })
}

/// Encodes a prompt, unless its text is so long that it cannot fit.
pub(super) fn encode(shared: &Shared, prompt: &Prompt, owner: Owner) -> Result<Encoded, ApiError> {
    let text_model = &shared.api.text;
    let bytes = match prompt {
        Prompt::Messages(messages) => messages.iter().map(|message| message.content.len()).sum(),
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(_) => 0,
    };
    let context = shared.api.model.context_tokens;
    let tokens = text_model.tokenizer.tokens_min(bytes) as u64;
    if tokens > u64::from(context) {
        return Err(ApiError::ContextExceeded { tokens, context, exact: false, param: prompt.param() });
    }
    let text = match prompt {
        Prompt::Messages(messages) => text_model.chat_text(messages)?,
        Prompt::Text(text) => PromptText::plain(text.clone()),
        Prompt::Tokens(tokens) => {
            check_vocabulary(shared, tokens, prompt.param())?;
            return Ok(shared.texts.take(tokens.clone(), owner));
        }
    };
    Ok(shared.texts.encode(text_model, text, owner)?)
}

/// # Errors
/// For the first token outside the vocabulary.
pub(super) fn check_vocabulary(shared: &Shared, tokens: &[TokenId], param: &str) -> Result<(), ApiError> {
    let check = |(at, &token)| check_token(shared, token, || format!("{param}[{at}]"));
    tokens.iter().enumerate().try_for_each(check)
}

fn check_token(shared: &Shared, token: TokenId, param: impl FnOnce() -> String) -> Result<(), ApiError> {
    let vocabulary = shared.api.text.tokenizer.vocabulary_tokens();
    match token < vocabulary {
        true => Ok(()),
        false => {
            let why = format_args!("token {token} is outside the vocabulary of {vocabulary} tokens");
            Err(read::bad(param(), why))
        }
    }
}

/// One for each choice: the same question, and another child's random numbers.
fn submissions(
    shared: &Shared,
    (scope, head): (&Scope, &Head),
    prepared: Prepared,
    headers: &HeaderMap,
) -> Result<Vec<Submission>, ApiError> {
    let explicit = identity::explicit(headers)?;
    let asked = prepared.asked;
    let stop_tokens = match asked.ignore_eos {
        true => Vec::new(),
        false => shared.api.text.tokenizer.ends().to_vec(),
    };
    // Choices share the prompt's blocks where they run on one rank: a conversation keeps them there.
    let own = (asked.choices > 1).then(|| ConversationKey(shared.mint.number()));
    let first = Submission {
        names: [scope.request_id.clone(), head.id.clone()].into(),
        prompt: prepared.prompt.tokens,
        keys: prepared.prompt.keys,
        generation: Generation {
            sampling: Sampling {
                temperature: asked.temperature,
                top_k: asked.top_k,
                top_p: asked.top_p,
                min_p: asked.min_p,
                adjustment: asked.adjustment.unless_neutral(),
                top_logprobs: asked.logprobs.unwrap_or(0),
                seed: asked.seed.unwrap_or_else(|| shared.mint.number() as u64),
            },
            max_new_tokens: prepared.max_new_tokens,
            min_new_tokens: asked.min_tokens,
            stop_tokens,
        },
        conversation: prepared.owner.conversation.or(own),
        explicit,
        priority: PRIORITY,
        tenant: prepared.owner.tenant,
        child: 0,
        trace: scope.trace(),
    };
    Ok((0..asked.choices).map(|child| Submission { child, ..first.clone() }).collect())
}

fn head(shared: &Shared, asked: &GenerationRequest, shape: Shape) -> Head {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Head {
        shape,
        id: format!("{}-{:032x}", shape.id_prefix(), shared.mint.number()),
        created_s: since_1970.as_secs(),
        model: shared.api.model.id.clone(),
        include_usage: asked.include_usage,
        choices: asked.choices,
    }
}

fn describe(scope: &Scope, head: &Head, prepared: &Prepared) {
    let asked = &prepared.asked;
    scope.rename(format!("{} {}", head.shape.operation(), head.model));
    scope.set(attribute::OPERATION, head.shape.operation());
    scope.set(attribute::REQUEST_MODEL, &*head.model);
    scope.set(attribute::RESPONSE_ID, &*head.id);
    scope.set(attribute::MAX_TOKENS, prepared.max_new_tokens);
    scope.set(attribute::TEMPERATURE, f64::from(asked.temperature));
    scope.set(attribute::TOP_P, f64::from(asked.top_p));
    scope.set(attribute::STREAM, asked.stream);
}

async fn whole(mut answer: Answer, head: &Head) -> Result<Response, ApiError> {
    let mut choices: Vec<(Piece, Option<Finish>)> = (0..head.choices).map(|_| Default::default()).collect();
    loop {
        match answer.step().await {
            Step::Placed(_) => {}
            Step::More { choice, piece } => choices[choice as usize].0.append(piece),
            Step::Ended { choice, finish } => choices[choice as usize].1 = Some(finish),
            Step::Failed(error) => return Err(error),
            Step::Done => {
                let json = head.whole(&choices, answer.usage());
                let mut response = Body::from(json).into_response();
                let kind = HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                return Ok(response);
            }
        }
    }
}

fn tell_place(headers: &mut HeaderMap, placed: Option<Placed>) {
    let Some(placed) = placed else { return };
    headers.insert(HEADER_RANK, HeaderValue::from(placed.rank.0));
    if let Ok(node) = HeaderValue::from_str(&placed.node) {
        headers.insert(HEADER_NODE, node);
    }
}
