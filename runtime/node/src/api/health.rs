//! Probes. They answer from what the node knows, and never say ready when it is not.

use super::Shared;
use super::engine::Check;
use super::error::ApiError;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use std::fmt::Write;
use std::sync::Arc;

/// 200 while the process is worth keeping.
pub async fn live(State(shared): State<Arc<Shared>>) -> (StatusCode, &'static str) {
    match shared.api.health.alive() {
        true => (StatusCode::OK, "alive\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not alive\n"),
    }
}

/// 200 while the node takes requests; `?verbose` lists every check, and so does a failure.
pub async fn ready(State(shared): State<Arc<Shared>>, RawQuery(query): RawQuery) -> (StatusCode, String) {
    let checks = shared.api.health.checks();
    let ready = checks.iter().all(|check| check.passed);
    let verbose =
        query.is_some_and(|query| query.split('&').any(|part| part == "verbose" || part.starts_with("verbose=")));
    let mut text = String::new();
    if verbose || !ready {
        for Check { name, passed, detail } in &checks {
            let mark = if *passed { '+' } else { '-' };
            let _ = writeln!(text, "[{mark}] {name}: {detail}");
        }
    }
    text.push_str(if ready { "ready\n" } else { "not ready\n" });
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
}

/// # Errors
/// While the node does not take requests.
pub(super) fn require_ready(shared: &Shared) -> Result<(), ApiError> {
    match shared.api.health.checks().into_iter().find(|check| !check.passed) {
        None => Ok(()),
        Some(Check { name, detail, .. }) => Err(ApiError::NotReady(format!("{name}: {detail}"))),
    }
}
