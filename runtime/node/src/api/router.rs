//! Routes, and what surrounds every request: its name, its span, its key, its answer's headers.

use super::error::{ApiError, Told};
use super::metrics::Endpoint;
use super::scope::Scope;
use super::trace::attribute;
use super::{Api, Shared, conversations, generate, health, identity, models};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use std::sync::Arc;

pub const HEADER_REQUEST_ID: &str = "x-request-id";
/// The node that talks to the client.
pub const HEADER_INGRESS: &str = "x-starling-ingress";
/// The node whose rank runs the request.
pub const HEADER_NODE: &str = "x-starling-node";
/// The rank that runs the request.
pub const HEADER_RANK: &str = "x-starling-rank";

/// Characters of a path that an error repeats.
const PATH_CHARS_MAX: usize = 200;

/// Whose tenant a request is; only there once its key was checked.
#[derive(Clone, Copy)]
pub(super) struct Tenant(pub u64);

/// The API as a service.
pub fn router(api: Api) -> Router {
    let shared = Shared::new(api);
    Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completion))
        .route("/v1/conversations", delete(conversations::all))
        .route("/v1/conversations/{*id}", delete(conversations::one))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(models::tokenize))
        .route("/detokenize", post(models::detokenize))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/health", get(health::ready))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(from_fn_with_state(shared.clone(), surround))
        .with_state(shared)
}

async fn no_such_path(uri: Uri) -> ApiError {
    ApiError::NoSuchPath(uri.path().chars().take(PATH_CHARS_MAX).collect())
}

async fn no_such_method(method: Method, uri: Uri) -> ApiError {
    let path = uri.path().chars().take(PATH_CHARS_MAX).collect();
    ApiError::NoSuchMethod { method: method.as_str().chars().take(PATH_CHARS_MAX).collect(), path }
}

/// The endpoint of a path and the name of its span.
fn endpoint(path: &str) -> (Endpoint, &'static str) {
    match path {
        "/v1/chat/completions" => (Endpoint::Chat, "POST /v1/chat/completions"),
        "/v1/completions" => (Endpoint::Completions, "POST /v1/completions"),
        "/v1/conversations" => (Endpoint::Conversations, "DELETE /v1/conversations"),
        "/v1/models" => (Endpoint::Models, "GET /v1/models"),
        "/tokenize" => (Endpoint::Tokenize, "POST /tokenize"),
        "/detokenize" => (Endpoint::Detokenize, "POST /detokenize"),
        "/livez" | "/readyz" | "/health" => (Endpoint::Health, "GET health"),
        path if path.starts_with("/v1/conversations/") => (Endpoint::Conversations, "DELETE /v1/conversations/{id}"),
        path if path.starts_with("/v1/models/") => (Endpoint::Models, "GET /v1/models/{id}"),
        _ => (Endpoint::Unknown, "unknown path"),
    }
}

async fn surround(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let (endpoint, name) = endpoint(request.uri().path());
    let headers = request.headers();
    let request_id = identity::request_id(headers).unwrap_or_else(|| format!("{:032x}", shared.mint.number()));
    let span = shared.api.trace.start_request(headers, name);
    let scope = Arc::new(Scope::new(endpoint, request_id, shared.api.metrics.clone(), span));
    scope.set(attribute::REQUEST_ID, &*scope.request_id);

    let open = matches!(endpoint, Endpoint::Health | Endpoint::Unknown);
    let mut response = match shared.identities.tenant(headers) {
        Err(error) if !open => error.into_response(),
        tenant => {
            request.extensions_mut().insert(Tenant(tenant.unwrap_or_default()));
            request.extensions_mut().insert(scope.clone());
            next.run(request).await
        }
    };
    if let Some(told) = response.extensions().get::<Told>() {
        scope.failed(told.code, &told.message);
    }
    if !scope.is_streamed() {
        scope.answered(response.status().as_u16());
    }
    let headers = response.headers_mut();
    for (name, value) in [(HEADER_REQUEST_ID, &*scope.request_id), (HEADER_INGRESS, &shared.api.settings.node)] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
    response
}
