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
//! and the queue fail together and come back as another life of this member, which takes the replica from the others, or
//! founds a new cluster where there are none; the ingress announces every open request again. An ingress that fails takes
//! them with it; each stream hands its request to the new one.
//!
//! Between nodes travel: contributions and changes of the view (queue to queue), prompts and stops (ingress to worker),
//! frames (worker to ingress), and questions that a node's edge asks of all ranks and ingresses: to forget, and where a
//! request ran. Everything else stays on its node.
//!
//! Actors are thin: they own a core machine, feed it messages and perform its effects. Nothing here scores, sizes,
//! hashes or compares.

pub mod api;
mod clock;
mod cluster;
mod directory;
mod everywhere;
mod forget;
mod gate;
mod gpu_worker;
mod ingress;
mod kv_manager;
pub mod log;
mod observer;
mod outlet;
mod queue;
mod requests;
mod router;
mod serving;
mod settings;
mod stopwatch;
mod stream;
mod wakeup;

pub use cluster::{ChangeReport, ClusterReport, LeftReport, MemberReport, MemberState};
pub use directory::LocalRank;
pub use everywhere::Unanswered;
pub use forget::{ForgetReport, RankForgotten, Texts};
pub use observer::{IngressReport, NoObserver, Observer, RoundReport, RoundTiming};
pub use requests::{AttemptReport, MissedReport, RequestReport, RequestsReport, ReservationReport};
pub use router::PlacementDebug;
pub use serving::{Backends, Readiness, Serving, ServingError};
pub use settings::{MemberSettings, Settings, SettingsError};
pub use stream::{Completion, TokenStream};

use clock::Clock;
use cluster::Health;
use directory::{Directory, Place, Seat};
use gate::Gate;
use log::Logs;
use starling_actors::{Address, Carrier, Node};
use starling_core::ids::RankId;
use std::sync::{Arc, OnceLock};

/// Where the serving actors are reached: those of this node, and what other nodes let us reach.
pub(crate) struct Addresses {
    pub(crate) queue: Address<queue::Message>,
    pub(crate) router: Address<router::Message>,
    pub(crate) ingress: Address<ingress::Message>,
    /// The ranks of this node, in order.
    pub(crate) ranks: Vec<RankAddresses>,
    /// Each member's queue, ahead of all else.
    pub(crate) queues: Vec<Address<queue::Message>>,
    /// Each member's ingress.
    pub(crate) ingresses: Vec<Address<ingress::Message>>,
    /// The workers of each member's ranks.
    workers: Vec<Vec<Address<gpu_worker::Message>>>,
    /// The KV managers of each member's ranks.
    kvs: Vec<Vec<Address<kv_manager::Message>>>,
    /// Which of them are in the view, and under which ids.
    pub(crate) directory: Directory,
}

#[derive(Clone)]
pub(crate) struct RankAddresses {
    pub(crate) kv: Address<kv_manager::Message>,
    pub(crate) worker: Address<gpu_worker::Message>,
}

/// Versions of message types that travel between nodes, 0 where none is said. Each is raised whenever its type changes: nodes
/// of different versions refuse each other's messages.
mod schema {
    /// Of [`queue::Message`](super::queue::Message): 1 lets members come and go.
    pub(super) const QUEUE: u32 = 1;
    /// Of [`ingress::Message`](super::ingress::Message): 1 carries the most probable tokens, 2 asks to forget and to find.
    pub(super) const INGRESS: u32 = 2;
    /// Of [`kv_manager::Message`](super::kv_manager::Message).
    pub(super) const KV: u32 = 0;
    /// Of [`gpu_worker::Message`](super::gpu_worker::Message): 1 carries the child and all of the sampling.
    pub(super) const WORKER: u32 = 1;
}

fn worker_name(rank: LocalRank) -> String {
    format!("{rank}/worker")
}

fn kv_name(rank: LocalRank) -> String {
    format!("{rank}/kv")
}

impl Addresses {
    pub(crate) fn of(node: &Node, settings: &Settings) -> Self {
        let rank = |rank: LocalRank| RankAddresses {
            kv: node.address(&kv_name(rank)),
            worker: node.address(&worker_name(rank)),
        };
        let here = |seat: usize| seat == settings.me;
        let members = || settings.members.iter().enumerate();
        let queues = members().map(|(seat, member)| match here(seat) {
            true => node.address("queue"),
            false => node.remote_schema(&member.name, "queue", schema::QUEUE).over(Carrier::Rounds),
        });
        let ingresses = members().map(|(seat, member)| match here(seat) {
            true => node.address("ingress"),
            false => node.remote_schema(&member.name, "ingress", schema::INGRESS),
        });
        let workers = members().map(|(seat, member)| {
            let worker = |rank| match here(seat) {
                true => node.address(&worker_name(rank)),
                false => node.remote_schema(&member.name, &worker_name(rank), schema::WORKER),
            };
            member.ranks().map(worker).collect()
        });
        let kvs = members().map(|(seat, member)| {
            let kv = |rank| match here(seat) {
                true => node.address(&kv_name(rank)),
                false => node.remote_schema(&member.name, &kv_name(rank), schema::KV),
            };
            member.ranks().map(kv).collect()
        });
        Self {
            queue: node.address("queue"),
            router: node.address("router"),
            ingress: node.address("ingress"),
            ranks: settings.own_ranks().map(rank).collect(),
            queues: queues.collect(),
            ingresses: ingresses.collect(),
            workers: workers.collect(),
            kvs: kvs.collect(),
            directory: Directory::default(),
        }
    }

    /// Lets the other members reach what the protocol needs, and nothing else.
    pub(crate) fn expose(node: &Node, settings: &Settings) {
        if settings.members.len() > 1 {
            node.expose_schema::<queue::Message>("queue", schema::QUEUE);
            node.expose_schema::<ingress::Message>("ingress", schema::INGRESS);
            for rank in settings.own_ranks() {
                node.expose_schema::<gpu_worker::Message>(&worker_name(rank), schema::WORKER);
                node.expose_schema::<kv_manager::Message>(&kv_name(rank), schema::KV);
            }
        }
    }

    /// The worker of a rank of the view, and whether it is on this node.
    pub(crate) fn worker(&self, rank: RankId) -> Option<&Address<gpu_worker::Message>> {
        let (Seat(seat), LocalRank(local)) = self.directory.find(rank)?;
        self.workers.get(seat as usize)?.get(local as usize)
    }

    /// What traces call a rank of this node: its id in the view, and -1 while there is none.
    pub(crate) fn traced(&self, me: Seat, rank: LocalRank) -> i64 {
        self.directory.id((me, rank)).map_or(-1, |id| i64::from(id.0))
    }

    pub(crate) fn kv(&self, (Seat(seat), LocalRank(local)): Place) -> Option<&Address<kv_manager::Message>> {
        self.kvs.get(seat as usize)?.get(local as usize)
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
    pub(crate) health: Arc<Health>,
    pub(crate) gate: Gate,
    pub(crate) logs: Arc<dyn Logs>,
    /// What the node's edge keeps of conversations, once it has said so.
    pub(crate) texts: Arc<OnceLock<Arc<dyn Texts>>>,
}
