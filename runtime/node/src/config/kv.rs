//! The table `[kv]`: what a rank keeps of sequences for later ones.

use super::Period;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_core::kv::CONVERSATIONS_MAX_DEFAULT;
use starling_core::kv::cache::checkpoint::{Publishing, Snapshots};
use starling_core::kv::cache::sizing::Method;

/// What a rank keeps of sequences for later ones, and how `engine.kv-memory` is divided for that: a pool for each life cycle,
/// the layers that keep the same of a sequence. The names that TensorRT-LLM has for these keys are accepted in the file too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Kv {
    /// What becomes reusable: `all-reusable` each block as it fills, `per-request` what resumes at a prompt's and an answer's
    /// end, `per-conversation` the same, kept for `turns-max` turns. By default `all-reusable` where every layer attends to
    /// everything, else `per-conversation`. Models with recurrent layers take `all-reusable` as `per-request`.
    pub reuse_policy: Option<ReusePolicy>,
    /// Completed turns of a conversation whose end points stay, under `per-conversation`.
    pub turns_max: u32,
    /// Conversations that a rank remembers; beyond them, the one used longest ago is forgotten.
    pub conversations_max: u32,
    /// A conversation without a turn for so long is forgotten; `0s`: only others make it go. People come back within an hour
    /// or start anew, and what is forgotten may still be reused until its memory is wanted.
    pub conversation_ttl: Period,
    /// Share of each pool that one tenant's blocks may take while nobody uses them, in percent; by default any.
    pub scope_quota_percent: Option<u32>,
    /// Share of the memory for each life cycle, in the order that `starling plan` lists them, together 1. It goes before
    /// `sizing`; each pool holds one longest sequence all the same.
    pub pool_ratio: Option<Vec<f64>>,
    /// Tokens of a typical conversation, for which pools are sized; by default half of the context.
    pub sequence_tokens: Option<u32>,
    /// How memory is divided where life cycles differ: `balanced` fills all pools at the same number of conversations,
    /// `typical-step` divides by what a step of `engine.sequences-max` requests holds, `typical-step-retaining` by that and the
    /// end points of all turns but one.
    pub sizing: Sizing,
    /// Blocks that are not full are reused too, by a copy.
    pub partial_reuse: bool,
    /// Tokens that each match with a stored prefix is shortened by.
    pub match_backoff_tokens: u32,
    /// Tokens before a prompt's end at which a later turn may leave it and still find its windows. Only with `all-reusable`.
    pub endpoint_rewind_tokens: u32,
    /// Recurrent layers: a snapshot where a prompt leaves what is known.
    pub branch_snapshots: bool,
    /// Recurrent layers: snapshots at these positions of a prompt, from 1.
    pub snapshot_offsets_from_start: Vec<u32>,
    /// Recurrent layers: snapshots so many tokens before a prompt's end; 0 is the end, where one is always taken.
    pub snapshot_offsets_from_end: Vec<u32>,
    /// A request starts only while at most this share of each pool is in use, in percent. A rank promises room before it
    /// takes it, so that all of it may be used.
    pub resume_utilisation_percent_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReusePolicy {
    AllReusable,
    PerRequest,
    PerConversation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sizing {
    Balanced,
    TypicalStep,
    TypicalStepRetaining,
}

impl Default for Kv {
    fn default() -> Self {
        Self {
            reuse_policy: None,
            turns_max: 1,
            conversations_max: CONVERSATIONS_MAX_DEFAULT,
            conversation_ttl: Period::secs(3600),
            scope_quota_percent: None,
            pool_ratio: None,
            sequence_tokens: None,
            sizing: Sizing::Balanced,
            partial_reuse: true,
            match_backoff_tokens: 0,
            endpoint_rewind_tokens: 0,
            branch_snapshots: false,
            snapshot_offsets_from_start: Vec::new(),
            snapshot_offsets_from_end: Vec::new(),
            resume_utilisation_percent_max: 100,
        }
    }
}

impl Kv {
    /// `None`: only others make a conversation go.
    pub fn conversation_ttl_us(&self) -> Option<u64> {
        Some(self.conversation_ttl.as_micros()).filter(|ttl_us| *ttl_us > 0)
    }

    pub fn snapshots(&self) -> Snapshots {
        Snapshots {
            from_start: self.snapshot_offsets_from_start.clone(),
            from_end: self.snapshot_offsets_from_end.clone(),
            at_branches: self.branch_snapshots,
        }
    }
}

impl From<ReusePolicy> for Publishing {
    fn from(policy: ReusePolicy) -> Self {
        match policy {
            ReusePolicy::AllReusable => Self::AllReusable,
            ReusePolicy::PerRequest => Self::PerRequest,
            ReusePolicy::PerConversation => Self::PerConversation,
        }
    }
}

impl From<Sizing> for Method {
    fn from(sizing: Sizing) -> Self {
        match sizing {
            Sizing::Balanced => Self::Balanced,
            Sizing::TypicalStep => Self::TypicalStep,
            Sizing::TypicalStepRetaining => Self::TypicalStepRetaining,
        }
    }
}
