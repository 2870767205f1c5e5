//! Forgetting a conversation or a scope everywhere: on every rank, and in what every node's edge keeps of texts.

use crate::everywhere::{Unanswered, ask_all};
use crate::serving::Serving;
use crate::{ingress, kv_manager};
use starling_actors::TraceContext;
use starling_core::ids::RankId;
use starling_core::kv::{Forget, Forgotten};
use std::time::Duration;

/// What a node's edge keeps of conversations.
pub trait Texts: Send + Sync + 'static {
    /// Forgets, and returns how many prompts went. Called from an actor: it waits for nothing.
    fn forget(&self, what: &Forget) -> usize;
}

/// What was forgotten, and where nobody knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForgetReport {
    /// The ranks that answered, by id.
    pub ranks: Vec<RankForgotten>,
    /// Prompts that the nodes' edges kept.
    pub texts: usize,
    /// Ranks and nodes that did not answer: they may have forgotten or not. To forget again does no harm.
    pub unanswered: Vec<Unanswered>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankForgotten {
    pub rank: RankId,
    pub forgotten: Forgotten,
}

impl Serving {
    /// Forgets a conversation or a scope on all ranks and nodes of the cluster. Requests of it go on, and what they hold goes when
    /// they end; those that have no blocks yet count as new ones.
    pub async fn forget(&self, what: Forget, within: Duration) -> ForgetReport {
        let trace = TraceContext::default();
        let (ids, kvs): (Vec<RankId>, Vec<_>) = self.all_kvs().into_iter().unzip();
        let of_ranks = ask_all(kvs, trace, within, move |_, reply| kv_manager::Message::Forget { what, reply });
        let of_nodes =
            ask_all(self.all_ingresses(), trace, within, move |_, reply| ingress::Message::Forget { what, reply });
        let ((ranks, mut unanswered), (texts, silent)) = tokio::join!(of_ranks, of_nodes);
        unanswered.extend(silent);
        let of_rank = |(index, forgotten): (usize, _)| RankForgotten { rank: ids[index], forgotten };
        ForgetReport {
            ranks: ranks.into_iter().map(of_rank).collect(),
            texts: texts.into_iter().map(|(_, count): (usize, u64)| count as usize).sum(),
            unanswered,
        }
    }
}
