//! Why something was refused. A refusal is normal data: counted, typed, and told to the client with the time to wait.

use serde::{Deserialize, Serialize};

/// A refusal. One table at the edge maps each to a status, an error body, a metric label and an exit code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Rejection {
    #[error("backlog full (requests {requests}, limit {limit})")]
    BacklogFull { requests: u32, limit: u32 },
    #[error("backlog full (prompt tokens {tokens}, limit {limit})")]
    BacklogTokensFull { tokens: u64, limit: u64 },
    #[error("not announced within {waited_ms} ms")]
    AnnounceTimeout { waited_ms: u64 },
    /// No round completes, so nothing new can be placed.
    #[error("cluster stands still: it waits for {waits_for}")]
    Standstill { waits_for: String },
    #[error("node is draining")]
    Draining,
    #[error("prompt has {tokens} tokens; at most {limit} fit the context with one token to generate")]
    PromptTooLong { tokens: u64, limit: u64 },
    #[error("request needs {wanted} KV blocks; a rank has {total}")]
    TooLargeForRank { wanted: u32, total: u32 },
    #[error("request has {children} children; a rank holds at most {cap} requests")]
    TooManyChildren { children: u32, cap: u32 },
    #[error("rank {rank} is not in the view (ranks {ranks})")]
    NoSuchRank { rank: u32, ranks: u32 },
    #[error("request {key} is already known")]
    DuplicateRequest { key: crate::ids::RequestKey },
    #[error("empty prompt")]
    EmptyPrompt,
    #[error("{parameter} cannot be {value}")]
    BadParameter { parameter: Parameter, value: String },
    #[error("token {token} is outside the vocabulary of {vocabulary} tokens")]
    TokenOutOfRange { token: crate::ids::TokenId, vocabulary: u32 },
    #[error("attempts exhausted ({attempts} failed)")]
    AttemptsExhausted { attempts: u32 },
    #[error("rank failed while it ran the request")]
    RankFailed,
    #[error("node is shutting down")]
    ShuttingDown,
}

/// What a request says of its sampling, by the names that clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Parameter {
    Temperature,
    TopP,
    MinP,
    RepetitionPenalty,
    PresencePenalty,
    FrequencyPenalty,
    LogitBias,
    LogitBiasEntries,
    TopLogprobs,
    StopTokens,
}

impl Parameter {
    pub fn name(self) -> &'static str {
        match self {
            Self::Temperature => "temperature",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::RepetitionPenalty => "repetition_penalty",
            Self::PresencePenalty => "presence_penalty",
            Self::FrequencyPenalty => "frequency_penalty",
            Self::LogitBias => "logit_bias",
            Self::LogitBiasEntries => "logit_bias entries",
            Self::TopLogprobs => "top_logprobs",
            Self::StopTokens => "stop tokens",
        }
    }
}

impl std::fmt::Display for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Rejection {
    /// For a parameter with a value that it cannot have.
    pub fn bad(parameter: Parameter, value: impl std::fmt::Display) -> Self {
        Self::BadParameter { parameter, value: value.to_string() }
    }

    /// Short and stable: a metric label and an error code.
    pub fn label(&self) -> &'static str {
        match self {
            Self::BacklogFull { .. } => "backlog_full",
            Self::BacklogTokensFull { .. } => "backlog_tokens_full",
            Self::AnnounceTimeout { .. } => "announce_timeout",
            Self::Standstill { .. } => "standstill",
            Self::Draining => "draining",
            Self::PromptTooLong { .. } => "prompt_too_long",
            Self::TooLargeForRank { .. } => "too_large_for_rank",
            Self::TooManyChildren { .. } => "too_many_children",
            Self::NoSuchRank { .. } => "no_such_rank",
            Self::DuplicateRequest { .. } => "duplicate_request",
            Self::EmptyPrompt => "empty_prompt",
            Self::BadParameter { .. } => "bad_parameter",
            Self::TokenOutOfRange { .. } => "token_out_of_range",
            Self::AttemptsExhausted { .. } => "attempts_exhausted",
            Self::RankFailed => "rank_failed",
            Self::ShuttingDown => "shutting_down",
        }
    }

    /// Milliseconds after which another try makes sense; `None` when it never will.
    pub fn retry_after_ms(&self) -> Option<u64> {
        match self {
            Self::BacklogFull { .. }
            | Self::BacklogTokensFull { .. }
            | Self::AnnounceTimeout { .. }
            | Self::RankFailed => Some(1_000),
            Self::Standstill { .. } => Some(2_000),
            Self::Draining | Self::ShuttingDown => Some(5_000),
            Self::PromptTooLong { .. }
            | Self::TooLargeForRank { .. }
            | Self::TooManyChildren { .. }
            | Self::NoSuchRank { .. }
            | Self::DuplicateRequest { .. }
            | Self::EmptyPrompt
            | Self::BadParameter { .. }
            | Self::TokenOutOfRange { .. }
            | Self::AttemptsExhausted { .. } => None,
        }
    }
}
