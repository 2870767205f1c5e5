//! Every way in which a request can fail, and the one table that says how each is told.

use super::router::HEADER_RANK;
use crate::text::{ChatError, TextError};
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use starling_core::rejection::Rejection;

/// Seconds after which a node that is not ready is worth another try.
const RETRY_NOT_READY_S: u64 = 5;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("body is not UTF-8 (byte {at})")]
    NotUtf8 { at: usize },
    #[error("body is not JSON: {0}")]
    BadJson(String),
    #[error("body must be a JSON object, not {0}")]
    NotAnObject(&'static str),
    #[error("body has more than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("body did not arrive within {seconds} s")]
    BodyLate { seconds: u64 },
    #[error("body ended early")]
    BodyLost,
    /// A field that is missing, or whose value cannot be.
    #[error("{param}: {why}")]
    BadField { param: String, why: String },
    /// A field that is known, with a value that is not served.
    #[error("{param}: {why}")]
    Unsupported { param: String, why: String },
    #[error("{param}: unknown field")]
    UnknownField { param: String },
    #[error("model {model:?} does not exist; this node serves {served:?}")]
    NoSuchModel { model: String, served: String },
    #[error("path {0:?} does not exist")]
    NoSuchPath(String),
    #[error("path {path:?} does not take {method}")]
    NoSuchMethod { method: String, path: String },
    #[error("no API key was given; send the header \"authorization: Bearer KEY\"")]
    NoKey,
    #[error("the API key is not known")]
    WrongKey,
    #[error(
        "prompt has {at_least}{tokens} tokens; the context holds {context} tokens, and one is generated at least",
        at_least = if *.exact { "" } else { "at least " }
    )]
    ContextExceeded {
        tokens: u64,
        context: u32,
        /// Text that is far too long is not encoded only to be counted.
        exact: bool,
        param: &'static str,
    },
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error("{0}")]
    Refused(Rejection, &'static str),
    #[error("node is not ready ({0})")]
    NotReady(String),
    /// Some may have deleted and some not.
    #[error("not deleted everywhere: no answer from {0}; it can be deleted again, as often as need be")]
    NotDeleted(String),
    #[error("the request's events ended without a result")]
    Lost,
    #[error("internal error: {0}")]
    Internal(String),
}

/// How an error is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub status: u16,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`, and the metric label.
    pub code: &'static str,
    /// Exit code of a command that ran into it.
    pub exit_code: u8,
}

const REQUEST: &str = "invalid_request_error";
const LIMIT: &str = "rate_limit_error";
const SERVER: &str = "server_error";

/// The request itself has to change.
const fn bad(status: u16, code: &'static str) -> Row {
    Row { status, kind: REQUEST, code, exit_code: 2 }
}

/// The same request may succeed another time, or elsewhere.
const fn failed(status: u16, kind: &'static str, code: &'static str) -> Row {
    Row { status, kind, code, exit_code: 1 }
}

impl ApiError {
    /// The table.
    pub fn row(&self) -> Row {
        match self {
            Self::NotUtf8 { .. } => bad(400, "invalid_utf8"),
            Self::BadJson(_) => bad(400, "invalid_json"),
            Self::NotAnObject(_) => bad(400, "invalid_type"),
            Self::BodyTooLarge { .. } => bad(413, "body_too_large"),
            Self::BodyLate { .. } => bad(408, "body_late"),
            Self::BodyLost => bad(400, "body_lost"),
            Self::BadField { .. } => bad(400, "invalid_value"),
            Self::Unsupported { .. } => bad(400, "unsupported_value"),
            Self::UnknownField { .. } => bad(400, "unknown_parameter"),
            Self::NoSuchModel { .. } => bad(404, "model_not_found"),
            Self::NoSuchPath(_) => bad(404, "not_found"),
            Self::NoSuchMethod { .. } => bad(405, "method_not_allowed"),
            Self::NoKey | Self::WrongKey => bad(401, "invalid_api_key"),
            Self::ContextExceeded { .. } => bad(400, "context_length_exceeded"),
            Self::Chat(_) => bad(400, "chat_template"),
            Self::NotReady(_) => failed(503, SERVER, "not_ready"),
            Self::NotDeleted(_) => failed(503, SERVER, "not_deleted_everywhere"),
            Self::Lost => failed(500, SERVER, "events_lost"),
            Self::Internal(_) => failed(500, SERVER, "internal_error"),
            Self::Refused(rejection, _) => match rejection {
                Rejection::BacklogFull { .. } => failed(429, LIMIT, "backlog_full"),
                Rejection::BacklogTokensFull { .. } => failed(429, LIMIT, "backlog_tokens_full"),
                Rejection::AnnounceTimeout { .. } => failed(503, SERVER, "announce_timeout"),
                Rejection::Standstill { .. } => failed(503, SERVER, "standstill"),
                Rejection::Draining => failed(503, SERVER, "draining"),
                Rejection::ShuttingDown => failed(503, SERVER, "shutting_down"),
                Rejection::RankFailed => failed(503, SERVER, "rank_failed"),
                Rejection::AttemptsExhausted { .. } => failed(500, SERVER, "attempts_exhausted"),
                Rejection::NoSuchRank { .. } => bad(400, "no_such_rank"),
                Rejection::DuplicateRequest { .. } => failed(500, SERVER, "duplicate_request"),
                Rejection::PromptTooLong { .. } => bad(400, "context_length_exceeded"),
                Rejection::TooLargeForRank { .. } => bad(400, "too_large_for_rank"),
                Rejection::TooManyChildren { .. } => bad(400, "too_many_children"),
                Rejection::EmptyPrompt => bad(400, "empty_prompt"),
                Rejection::BadParameter { .. } => bad(400, "invalid_value"),
                Rejection::TokenOutOfRange { .. } => bad(400, "invalid_value"),
            },
        }
    }

    /// The field at fault.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::BadField { param, .. } | Self::Unsupported { param, .. } | Self::UnknownField { param } => {
                Some(param)
            }
            Self::NoSuchModel { .. } => Some("model"),
            Self::ContextExceeded { param, .. } => Some(param),
            Self::Chat(_) => Some("messages"),
            Self::Refused(Rejection::TooManyChildren { .. }, _) => Some("n"),
            Self::Refused(Rejection::NoSuchRank { .. }, _) => Some(HEADER_RANK),
            Self::Refused(Rejection::BadParameter { parameter, .. }, _) => Some(parameter.name()),
            Self::Refused(_, prompt) if self.row().status == 400 => Some(prompt),
            _ => None,
        }
    }

    /// Whole seconds after which another try makes sense.
    pub fn retry_after_s(&self) -> Option<u64> {
        match self {
            Self::Refused(rejection, _) => rejection.retry_after_ms().map(|ms| ms.div_ceil(1_000)),
            Self::NotReady(_) | Self::NotDeleted(_) => Some(RETRY_NOT_READY_S),
            _ => None,
        }
    }

    /// The body in OpenAI's shape: all four keys are always there.
    pub fn body(&self) -> ErrorBody<'_> {
        let row = self.row();
        let error = ErrorFields { message: self.to_string(), kind: row.kind, param: self.param(), code: row.code };
        ErrorBody { error }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        Self::Internal(error.to_string())
    }
}

#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

/// Left in a response's extensions for whoever counts.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub code: &'static str,
    pub message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let row = self.row();
        let status = StatusCode::from_u16(row.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self {
            Self::NoKey | Self::WrongKey => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The rest of such a body may still be on its way.
            Self::BodyTooLarge { .. } | Self::BodyLate { .. } => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response.extensions_mut().insert(Told { code: row.code, message: self.to_string() });
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling_core::ids::RequestKey;

    fn refusals() -> Vec<Rejection> {
        vec![
            Rejection::BacklogFull { requests: 1, limit: 1 },
            Rejection::BacklogTokensFull { tokens: 1, limit: 1 },
            Rejection::AnnounceTimeout { waited_ms: 1 },
            Rejection::Standstill { waits_for: "node-1".into() },
            Rejection::Draining,
            Rejection::PromptTooLong { tokens: 1, limit: 1 },
            Rejection::TooLargeForRank { wanted: 1, total: 1 },
            Rejection::TooManyChildren { children: 1, cap: 1 },
            Rejection::NoSuchRank { rank: 1, ranks: 1 },
            Rejection::DuplicateRequest { key: RequestKey::default() },
            Rejection::EmptyPrompt,
            Rejection::AttemptsExhausted { attempts: 1 },
            Rejection::RankFailed,
            Rejection::ShuttingDown,
        ]
    }

    #[test]
    fn what_is_worth_a_retry_says_when_and_what_is_not_does_not() {
        for refusal in refusals() {
            let error = ApiError::Refused(refusal.clone(), "prompt");
            let status = error.row().status;
            assert_eq!(matches!(status, 429 | 503), error.retry_after_s().is_some(), "{refusal:?}");
            assert_eq!(status == 400, error.param().is_some(), "{refusal:?}");
            assert_eq!(status < 429, error.row().exit_code == 2, "{refusal:?}");
        }
    }

    #[test]
    fn bodies_have_all_four_keys() {
        let body = serde_json::to_value(ApiError::Lost.body()).unwrap();
        let error = body["error"].as_object().unwrap();
        assert_eq!(error.keys().collect::<Vec<_>>(), ["code", "message", "param", "type"]);
        assert!(error["param"].is_null());
    }
}
