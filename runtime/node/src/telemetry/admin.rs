//! The admin listener: metrics, probes, and what the actors and the router are doing.

use super::feed::{Metrics, Sight};
use super::metrics::Format;
use crate::api::Health;
use axum::Router;
use axum::extract::{Path, RawQuery, State};
use axum::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use starling_actors::ActorStats;
use starling_serving::{RequestsReport, Unanswered};
use std::fmt::Write;
use std::pin::Pin;
use std::sync::Arc;

/// JSON that an actor is asked for.
pub type Page<'a> = Pin<Box<dyn Future<Output = serde_json::Value> + Send + 'a>>;

/// Where debugging pages come from; asked by each request.
pub trait DebugSource: Send + Sync + 'static {
    fn actors(&self) -> Vec<ActorStats>;

    /// What the metrics show of this moment.
    fn sight(&self) -> Sight;

    /// The last decisions of the router with their terms, as plain JSON.
    fn placement(&self) -> Page<'_>;

    /// The members of the cluster as this node sees them.
    fn cluster(&self) -> Page<'_>;

    /// Where the requests of that name ran, on any node, and what their prompts reused.
    fn requests(&self, id: String) -> Requests<'_>;
}

/// All requests of a name, once the nodes were asked.
pub type Requests<'a> = Pin<Box<dyn Future<Output = RequestsReport> + Send + 'a>>;

#[derive(Clone)]
struct Admin {
    metrics: Arc<Metrics>,
    debug: Arc<dyn DebugSource>,
    health: Arc<dyn Health>,
}

/// `/metrics`, `/debug/actors`, `/debug/placement`, `/debug/cluster`, `/debug/requests/{id}`, `/livez`, `/readyz` and `/health`.
pub fn admin_router(metrics: Arc<Metrics>, debug: Arc<dyn DebugSource>, health: Arc<dyn Health>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/debug/actors", get(actors))
        .route("/debug/placement", get(placement))
        .route("/debug/cluster", get(cluster))
        .route("/debug/requests/{*id}", get(requests))
        .route("/livez", get(livez))
        .route("/health", get(livez))
        .route("/readyz", get(readyz))
        .with_state(Admin { metrics, debug, health })
}

async fn scrape(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    let format = Format::accepted(headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()));
    let text = admin.metrics.encode(&admin.debug.sight(), format);
    ([(CONTENT_TYPE, format.content_type())], text).into_response()
}

async fn actors(State(admin): State<Admin>) -> Response {
    axum::Json(admin.debug.actors()).into_response()
}

async fn placement(State(admin): State<Admin>) -> Response {
    axum::Json(admin.debug.placement().await).into_response()
}

async fn cluster(State(admin): State<Admin>) -> Response {
    axum::Json(admin.debug.cluster().await).into_response()
}

/// 404 if no node knows the request, and 503 if none does of those that answered.
async fn requests(State(admin): State<Admin>, Path(id): Path<String>) -> Response {
    let report = admin.debug.requests(id).await;
    if !report.requests.is_empty() {
        return axum::Json(report).into_response();
    }
    let names = |Unanswered { who, why }: &Unanswered| format!("{who} ({why})");
    let (status, error) = match &report.unanswered[..] {
        [] => (StatusCode::NOT_FOUND, format!("no request {:?} is known", report.id)),
        silent => {
            let silent = silent.iter().map(names).collect::<Vec<_>>().join(", ");
            (StatusCode::SERVICE_UNAVAILABLE, format!("no request {:?} is known; no answer from {silent}", report.id))
        }
    };
    (status, axum::Json(json!({ "error": error }))).into_response()
}

fn probe(passed: bool, text: String) -> Response {
    let status = if passed { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, [(CACHE_CONTROL, "no-store")], text).into_response()
}

async fn livez(State(admin): State<Admin>) -> Response {
    let alive = admin.health.alive();
    probe(alive, if alive { "ok\n" } else { "not alive\n" }.to_owned())
}

/// `?verbose` lists every check; else only what fails is named.
async fn readyz(State(admin): State<Admin>, RawQuery(query): RawQuery) -> Response {
    let checks = admin.health.checks();
    let ready = checks.iter().all(|check| check.passed);
    let wants_all = query.is_some_and(|query| query.split('&').any(|key| key.split('=').next() == Some("verbose")));
    let mut text = String::new();
    for check in checks.iter().filter(|check| wants_all || !check.passed) {
        let mark = if check.passed { '+' } else { '-' };
        let _ = writeln!(text, "[{mark}] {}: {}", check.name, check.detail);
    }
    text.push_str(if ready { "ready\n" } else { "not ready\n" });
    probe(ready, text)
}
