//! The serving actors: ingress, waiting queue, router, and a KV manager and a GPU worker per rank, under one tree.
//!
//! ```text
//! serving (one for one)
//! ├── ranks (one for one)
//! │   ├── rank-0 (one for all): rank-0/kv, rank-0/worker
//! │   └── rank-1 ...
//! └── front (rest for one)
//!     ├── ingress
//!     └── control (one for all): router, queue
//! ```
//! A rank that fails starts over with an empty pool; its attempts are lost and their requests placed again. The router
//! and the queue fail together and come back as a new cluster, to which the ingress announces every open request again.
//! An ingress that fails takes them with it; each stream hands its request to the new one.
//!
//! Actors are thin: they own a core machine, feed it messages and perform its effects. Nothing here scores, sizes,
//! hashes or compares.

pub mod api;
mod clock;
mod gpu_worker;
mod ingress;
mod kv_manager;
mod observer;
mod queue;
mod router;
mod serving;
mod stream;
mod wakeup;

pub use observer::{IngressReport, NoObserver, Observer, RoundReport};
pub use router::PlacementDebug;
pub use serving::{Backends, Readiness, Serving, ServingError, Settings, SettingsError};
pub use stream::{Completion, TokenStream};

use clock::Clock;
use starling_actors::{Address, Node};
use std::sync::Arc;

/// Where the serving actors of a node are reached.
pub(crate) struct Addresses {
    pub(crate) queue: Address<queue::Message>,
    pub(crate) router: Address<router::Message>,
    pub(crate) ingress: Address<ingress::Message>,
    pub(crate) ranks: Vec<RankAddresses>,
}

#[derive(Clone)]
pub(crate) struct RankAddresses {
    pub(crate) kv: Address<kv_manager::Message>,
    pub(crate) worker: Address<gpu_worker::Message>,
}

impl Addresses {
    pub(crate) fn of(node: &Node, ranks: u32) -> Self {
        let rank = |index: u32| RankAddresses {
            kv: node.address(&format!("rank-{index}/kv")),
            worker: node.address(&format!("rank-{index}/worker")),
        };
        Self {
            queue: node.address("queue"),
            router: node.address("router"),
            ingress: node.address("ingress"),
            ranks: (0..ranks).map(rank).collect(),
        }
    }
}

/// What every actor is made with.
#[derive(Clone)]
pub(crate) struct Surroundings {
    pub(crate) settings: Arc<Settings>,
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) addresses: Arc<Addresses>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) clock: Clock,
    pub(crate) pulse: Arc<serving::Pulse>,
}
