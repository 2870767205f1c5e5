//! What the API needs from the rest of the node: somewhere to submit requests, a model's card, and the truth about readiness.

use starling_core::kv::Forget;
use starling_core::rejection::Rejection;
use starling_serving::api::{StreamEvent, Submission};
use starling_serving::{ForgetReport, Texts};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Takes requests. The node implements it with the serving actors, tests with a script.
pub trait Engine: Send + Sync + 'static {
    /// Starts a request.
    ///
    /// Never blocks: what takes time (a place in the queue, a rank) arrives as events.
    ///
    /// # Errors
    /// When the request is refused at once; a later refusal is the event `Failed`.
    fn submit(&self, submission: Submission) -> Result<Box<dyn Events>, Rejection>;

    /// Forgets a conversation or a scope everywhere, and says where that is not known.
    fn forget(&self, what: Forget) -> Forgetting<'_>;

    /// What the API keeps of conversations: when any node forgets, it is told as well.
    fn keep_texts(&self, texts: Arc<dyn Texts>);
}

/// Ends within seconds, whoever answers.
pub type Forgetting<'a> = Pin<Box<dyn Future<Output = ForgetReport> + Send + 'a>>;

/// The events of one request, in the order `StreamEvent` documents. Dropping them cancels the request if it still runs.
pub trait Events: Send {
    /// The next event; `None` after `Ended` or `Failed`, or when the serving actors are gone.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamEvent>>;

    /// The client has what it asked for (a stop string was found): the request ended, it was not cancelled.
    fn finish(self: Box<Self>);
}

/// The model that this node serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// What clients put into `model`.
    pub id: String,
    /// Prompt and generated tokens of one request together.
    pub context_tokens: u32,
    /// Seconds since 1970: when the node loaded the model.
    pub created_s: u64,
    /// Who made the model, as far as its file says.
    pub owned_by: String,
}

/// Tells the truth about the node; asked by each probe, so it must be cheap.
pub trait Health: Send + Sync + 'static {
    /// Everything that must be true before the node takes requests, in the order in which people should read it.
    fn checks(&self) -> Vec<Check>;

    /// Whether the process is worth keeping. That the probe is answered at all proves that the event loop turns.
    fn alive(&self) -> bool {
        true
    }
}

/// One condition of readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Short and stable: `model`, `ranks`, `draining`.
    pub name: &'static str,
    pub passed: bool,
    /// For people.
    pub detail: String,
}
