//! What the serving actors offer to whoever talks to people: submit a request, read its tokens.

use starling_actors::TraceContext;
use starling_core::ids::{ConversationKey, RankId, TokenId};
use starling_core::kv::identity::PromptKeys;
use starling_core::rejection::Rejection;
use starling_core::request::{Finish, Generation};
use starling_core::round::Explicit;
use starling_core::step::Drawn;
use std::sync::Arc;

/// What a request is called by whoever looks for it later: the name that the client gave it, and that of the answer.
pub type Names = Arc<[String]>;

/// A request once text and JSON are behind it.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Empty: nobody will look for it.
    pub names: Names,
    pub prompt: Arc<[TokenId]>,
    /// Of the prompt's leading blocks, where they are known already.
    pub keys: PromptKeys,
    pub generation: Generation,
    /// Keyed hash of (tenant, conversation name); turns of one conversation return to the rank that holds its prefix.
    pub conversation: Option<ConversationKey>,
    /// A rank that the client named.
    pub explicit: Option<Explicit>,
    /// Higher is served first under the priority queue; 0.5 is the default. Finite.
    pub priority: f64,
    /// Keyed hash of the tenant (bearer key): blocks are shared within a tenant only.
    pub tenant: u64,
    /// Which of the answers to one question; the first is 0. Part of every draw.
    pub child: u32,
    /// The HTTP span: parent of every span of this request.
    pub trace: TraceContext,
}

/// What a stream yields, in order: `Placed` (again after a failure), `Tokens`, then exactly one of `Ended`, `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    Placed(Placed),
    Tokens(Vec<StreamToken>),
    Ended(Finish),
    Failed(Rejection),
}

/// Where a request runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Name of the node that hosts the rank.
    pub node: Arc<str>,
    pub rank: RankId,
    pub attempt: u32,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamToken {
    pub drawn: Drawn,
    /// Prompt tokens whose KV was reused by the attempt that produced this token.
    pub cached_tokens: u32,
}
