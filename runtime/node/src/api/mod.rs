//! The OpenAI-compatible API: the only place that knows HTTP and JSON.
//!
//! `router` serves an `Engine`; `serve` runs it on a listener. `docs/api.md` lists what each endpoint takes.

mod answer;
mod body;
mod conversations;
pub mod engine;
mod error;
mod generate;
mod health;
mod identity;
mod logprobs;
pub mod metrics;
mod models;
mod read;
mod reply;
mod request;
mod router;
mod scope;
mod serve;
mod sse;
pub mod trace;

pub use engine::{Check, Engine, Events, Forgetting, Health, ModelCard};
pub use error::{ApiError, ErrorBody, Row};
pub use identity::CONVERSATION_HEADERS;
pub use metrics::{ApiMetrics, NoMetrics};
pub use router::{HEADER_INGRESS, HEADER_NODE, HEADER_RANK, HEADER_REQUEST_ID, router};
pub use serve::{Drained, ServeLimits, serve};
pub use trace::{NoTrace, RequestSpan, TraceSource};

use crate::text::{TextCache, TextModel};
use identity::{Identities, Mint};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// What the API is made of.
pub struct Api {
    pub engine: Arc<dyn Engine>,
    pub health: Arc<dyn Health>,
    pub text: Arc<TextModel>,
    pub model: ModelCard,
    pub metrics: Arc<dyn ApiMetrics>,
    pub trace: Arc<dyn TraceSource>,
    pub settings: Settings,
}

/// What an operator decides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of this node: the header `x-starling-ingress`.
    pub node: String,
    /// Nodes of one cluster give a conversation the same key.
    pub cluster: String,
    /// Bearer keys; with none every request is served.
    pub keys: Vec<String>,
    pub body_bytes_max: usize,
    /// How long a body may take to arrive.
    pub body_seconds_max: u64,
    /// Requests whose text is worked on at once, each on a thread of its own.
    pub text_threads: usize,
    /// What conversations' last prompts may take in memory; 0 remembers none.
    pub text_cache_bytes: usize,
    /// Prompts are submitted with the keys of their blocks of so many tokens; `None` where nobody asks for them.
    pub keyed_block_tokens: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            node: "node-0".into(),
            cluster: "starling".into(),
            keys: Vec::new(),
            body_bytes_max: 8 << 20,
            body_seconds_max: 60,
            text_threads: std::thread::available_parallelism().map_or(1, usize::from),
            text_cache_bytes: 64 << 20,
            keyed_block_tokens: None,
        }
    }
}

/// Shared by all handlers.
struct Shared {
    api: Api,
    identities: Identities,
    mint: Mint,
    text_permits: Arc<Semaphore>,
    texts: Arc<TextCache>,
}

impl Shared {
    fn new(api: Api) -> Arc<Self> {
        let settings = &api.settings;
        let texts = Arc::new(TextCache::new(settings.text_cache_bytes, settings.keyed_block_tokens));
        api.engine.keep_texts(Arc::clone(&texts) as _);
        Arc::new(Self {
            identities: Identities::new(&settings.cluster, &settings.keys),
            mint: Mint::new(),
            text_permits: Arc::new(Semaphore::new(settings.text_threads.max(1))),
            texts,
            api,
        })
    }

    /// Works on text away from the threads that answer everybody else.
    async fn offload<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Shared) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.text_permits.clone().acquire_owned().await;
        let permit = permit.map_err(|error| ApiError::Internal(error.to_string()))?;
        let shared = self.clone();
        let worked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&shared)
        });
        worked.await.map_err(|error| ApiError::Internal(error.to_string()))?
    }

    /// # Errors
    /// When `model` is not the one that is served.
    fn check_model(&self, model: &str) -> Result<(), ApiError> {
        let served = &self.api.model.id;
        match model == served {
            true => Ok(()),
            false => Err(ApiError::NoSuchModel { model: model.chars().take(200).collect(), served: served.clone() }),
        }
    }
}
