//! Deleting: what only a conversation, or only a tenant, has used goes on all nodes.

use super::Shared;
use super::error::ApiError;
use super::router::Tenant;
use axum::extract::State;
use axum::http::Uri;
use axum::{Extension, Json};
use serde::Serialize;
use starling_core::kv::Forget;
use starling_core::kv::identity::Scope;
use starling_serving::{RankForgotten, Unanswered};
use std::sync::Arc;

/// Before a conversation's name, which is the rest of the path.
const PREFIX: &str = "/v1/conversations/";

/// What was deleted.
#[derive(Debug, Serialize)]
pub struct Deleted {
    /// As the client named it; a scope has no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    object: &'static str,
    deleted: bool,
    ranks: Vec<OfRank>,
}

#[derive(Debug, Serialize)]
struct OfRank {
    rank: u32,
    blocks: u32,
    pages: u32,
    /// Requests that go on: what they hold goes when they end.
    pending_sequences: u32,
}

impl From<RankForgotten> for OfRank {
    fn from(RankForgotten { rank, forgotten }: RankForgotten) -> Self {
        Self {
            rank: rank.0,
            blocks: forgotten.blocks,
            pages: forgotten.pages,
            pending_sequences: forgotten.pending_sequences,
        }
    }
}

pub async fn one(
    State(shared): State<Arc<Shared>>,
    Extension(tenant): Extension<Tenant>,
    uri: Uri,
) -> Result<Json<Deleted>, ApiError> {
    let name = name(uri.path().strip_prefix(PREFIX).unwrap_or_default())?;
    let conversation = shared.identities.named(tenant.0, &name);
    let what = Forget::Conversation { scope: scope(tenant), conversation };
    let ranks = forget(&shared, what).await?;
    let id = Some(String::from_utf8_lossy(&name).into_owned());
    Ok(Json(Deleted { id, object: "conversation.deleted", deleted: true, ranks }))
}

pub async fn all(
    State(shared): State<Arc<Shared>>,
    Extension(tenant): Extension<Tenant>,
) -> Result<Json<Deleted>, ApiError> {
    let ranks = forget(&shared, Forget::Scope(scope(tenant))).await?;
    Ok(Json(Deleted { id: None, object: "scope.deleted", deleted: true, ranks }))
}

/// Whose blocks the tenant's requests share.
fn scope(tenant: Tenant) -> Scope {
    Scope { tenant: tenant.0, adapter: None }
}

async fn forget(shared: &Shared, what: Forget) -> Result<Vec<OfRank>, ApiError> {
    let report = shared.api.engine.forget(what).await;
    if report.unanswered.is_empty() {
        return Ok(report.ranks.into_iter().map(OfRank::from).collect());
    }
    let one = |Unanswered { who, why }: Unanswered| format!("{who} ({why})");
    Err(ApiError::NotDeleted(report.unanswered.into_iter().map(one).collect::<Vec<_>>().join(", ")))
}

/// The bytes that a path's end stands for: names are compared as they stand in headers and fields.
fn name(escaped: &str) -> Result<Vec<u8>, ApiError> {
    let bad = |why: &str| ApiError::BadField { param: "id".into(), why: why.into() };
    let mut name = Vec::with_capacity(escaped.len());
    let mut rest = escaped.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            name.push(*first);
            continue;
        }
        let digits = after.first_chunk::<2>().filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        name.push(byte.ok_or_else(|| bad("% must be followed by two hexadecimal digits"))?);
        rest = &after[2..];
    }
    if name.is_empty() { Err(bad("a conversation's name is not empty")) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_bytes_that_the_path_stands_for() {
        let of = |path: &str| name(path).ok();
        assert_eq!(of("chat-1"), Some(b"chat-1".to_vec()));
        assert_eq!(of("a%2Fb/c%20d+%ff"), Some(b"a/b/c d+\xff".to_vec()));
        assert_eq!(of("%25"), Some(b"%".to_vec()));
        for wrong in ["", "%", "a%2", "%zz", "%+1", "%\u{e9}1"] {
            assert_eq!(of(wrong), None, "{wrong:?}");
        }
    }
}
