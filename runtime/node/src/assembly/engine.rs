//! The serving actors as the API, the probes and the debugging pages see them.

use crate::api::{self, Check, Engine, Events, Forgetting};
use crate::telemetry::admin::{Page, Requests};
use crate::telemetry::{DebugSource, Metrics, Sight};
use starling_actors::ActorStats;
use starling_core::kv::Forget;
use starling_core::rejection::Rejection;
use starling_serving::api::{StreamEvent, Submission};
use starling_serving::{Serving, Texts, TokenStream};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// How long the ranks and nodes of the cluster may take to answer.
const EVERYWHERE_WAIT: Duration = Duration::from_secs(5);

/// Takes the API's requests to the ingress.
pub struct ServingEngine {
    serving: Serving,
    metrics: Arc<Metrics>,
}

impl ServingEngine {
    pub fn new(serving: Serving, metrics: Arc<Metrics>) -> Self {
        Self { serving, metrics }
    }
}

impl Engine for ServingEngine {
    fn submit(&self, submission: Submission) -> Result<Box<dyn Events>, Rejection> {
        if self.serving.readiness().draining {
            return Err(Rejection::Draining);
        }
        if submission.conversation.is_none() {
            self.metrics.conversation_keyless();
        }
        Ok(Box::new(Stream(self.serving.submit(submission))))
    }

    fn forget(&self, what: Forget) -> Forgetting<'_> {
        Box::pin(self.serving.forget(what, EVERYWHERE_WAIT))
    }

    fn keep_texts(&self, texts: Arc<dyn Texts>) {
        self.serving.keep_texts(texts);
    }
}

struct Stream(TokenStream);

impl Events for Stream {
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamEvent>> {
        self.0.poll_next(context)
    }

    fn finish(self: Box<Self>) {
        self.0.finish();
    }
}

/// Readiness from what runs right now.
pub struct Health {
    serving: Serving,
    model: String,
}

impl Health {
    pub fn new(serving: Serving, model: String) -> Self {
        Self { serving, model }
    }
}

impl api::Health for Health {
    fn checks(&self) -> Vec<Check> {
        let readiness = self.serving.readiness();
        let actors = match readiness.down.as_slice() {
            [] => "all run".to_owned(),
            down => format!("down: {}", down.join(", ")),
        };
        let rounds = match &readiness.standstill {
            None => "go on".to_owned(),
            Some((age, waits_for)) if waits_for.is_empty() => format!("none for {} ms", age.as_millis()),
            Some((age, waits_for)) => format!("none for {} ms: waits for {}", age.as_millis(), waits_for.join(", ")),
        };
        vec![
            // The listener opens behind the model, so a probe that is answered finds it loaded.
            Check { name: "model", passed: true, detail: format!("{} is loaded", self.model) },
            Check { name: "actors", passed: readiness.down.is_empty(), detail: actors },
            Check { name: "rounds", passed: readiness.standstill.is_none(), detail: rounds },
            Check {
                name: "draining",
                passed: !readiness.draining,
                detail: if readiness.draining { "the node is stopping" } else { "no" }.to_owned(),
            },
        ]
    }
}

/// What the admin listener shows.
pub struct Debug {
    serving: Serving,
}

impl Debug {
    pub fn new(serving: Serving) -> Self {
        Self { serving }
    }
}

impl DebugSource for Debug {
    fn actors(&self) -> Vec<ActorStats> {
        self.serving.node().actors()
    }

    fn sight(&self) -> Sight {
        let node = self.serving.node();
        let standstill = self.serving.readiness().standstill.map_or(Duration::ZERO, |(age, _)| age);
        Sight { actors: node.actors(), links: node.link_stats(), standstill }
    }

    fn cluster(&self) -> Page<'_> {
        Box::pin(async {
            match self.serving.cluster_report().await {
                Ok(report) => serde_json::json!(report),
                Err(error) => serde_json::json!({ "error": error.to_string() }),
            }
        })
    }

    fn requests(&self, id: String) -> Requests<'_> {
        Box::pin(async move { self.serving.requests(&id, EVERYWHERE_WAIT).await })
    }

    fn placement(&self) -> Page<'_> {
        Box::pin(async {
            match self.serving.placement_debug().await {
                Ok(debug) => serde_json::json!(debug),
                Err(error) => serde_json::json!({ "error": error.to_string() }),
            }
        })
    }
}
