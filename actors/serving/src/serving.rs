//! The tree, and the handle that the rest of the node holds.

use crate::api::Submission;
use crate::clock::Clock;
use crate::cluster::{ClusterReport, Health};
use crate::directory::Seat;
use crate::gate::Gate;
use crate::gpu_worker::GpuWorker;
use crate::ingress::Ingress;
use crate::kv_manager::KvManager;
use crate::log::{LocalLogs, Logs};
use crate::observer::Observer;
use crate::queue::Queue;
use crate::router::{PlacementDebug, Router};
use crate::settings::{Settings, SettingsError};
use crate::stream::TokenStream;
use crate::{Addresses, LocalRank, Surroundings, Texts, ingress, kv_manager, queue, router};
use starling_actors::{
    ActorError, ActorSpec, Address, AskError, Node, StartError, Strategy, SupervisorSpec, TraceContext, Tree, TreeExit,
};
use starling_core::ids::RankId;
use starling_gpu::Backend;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Makes the backend of a rank; called again each time the rank starts over.
pub trait Backends: Send + Sync + 'static {
    /// # Errors
    /// Why the device or the model cannot be used.
    fn backend(&self, rank: LocalRank) -> Result<Box<dyn Backend>, ActorError>;
}

impl<F> Backends for F
where
    F: Fn(LocalRank) -> Result<Box<dyn Backend>, ActorError> + Send + Sync + 'static,
{
    fn backend(&self, rank: LocalRank) -> Result<Box<dyn Backend>, ActorError> {
        self(rank)
    }
}

/// Why the serving tree did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Whether requests can be served right now, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Actors that do not run.
    pub down: Vec<String>,
    pub draining: bool,
    /// No round completes: for how long, and which members it waits for.
    pub standstill: Option<(Duration, Vec<String>)>,
}

impl Readiness {
    pub fn is_ready(&self) -> bool {
        self.down.is_empty() && !self.draining && self.standstill.is_none()
    }
}

/// The running serving actors of a node.
#[derive(Clone)]
pub struct Serving {
    node: Node,
    tree: Tree,
    addresses: Arc<Addresses>,
    tickets: Arc<AtomicU64>,
    draining: Arc<AtomicBool>,
    stopped: Arc<AtomicBool>,
    health: Arc<Health>,
    settings: Arc<Settings>,
    texts: Arc<OnceLock<Arc<dyn Texts>>>,
}

/// Restarts of one actor or rank within a minute before its supervisor gives up and its own supervisor decides.
const RESTARTS_MAX: u32 = 20;
const RESTARTS_WINDOW: Duration = Duration::from_secs(60);

/// How long an actor's answer to the node is waited for.
const ASK_DEADLINE: Duration = Duration::from_secs(5);

impl Serving {
    /// Starts the tree on `node` and returns once every actor runs.
    ///
    /// # Errors
    /// Settings that cannot work, a taken name, or a backend that cannot be made.
    pub async fn start(
        node: &Node,
        settings: Settings,
        backends: Arc<dyn Backends>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, ServingError> {
        let logs = Arc::new(LocalLogs::new(settings.changes.members_max));
        Self::start_with(node, settings, backends, observer, logs).await
    }

    /// As `start`, for a member of a cluster whose log is kept elsewhere than in this process.
    ///
    /// # Errors
    /// As `start`.
    pub async fn start_with(
        node: &Node,
        settings: Settings,
        backends: Arc<dyn Backends>,
        observer: Arc<dyn Observer>,
        logs: Arc<dyn Logs>,
    ) -> Result<Self, ServingError> {
        settings.validate()?;
        let addresses = Arc::new(Addresses::of(node, &settings));
        Addresses::expose(node, &settings);
        let clock = Clock::start();
        let health = Arc::new(Health::new(clock, settings.suspect_after_us));
        let (settings, texts) = (Arc::new(settings), Arc::default());
        let around = Surroundings {
            health: Arc::clone(&health),
            gate: Gate::default(),
            logs,
            settings: Arc::clone(&settings),
            texts: Arc::clone(&texts),
            backends,
            addresses: Arc::clone(&addresses),
            observer,
            clock,
        };
        let tree = node.start(tree(&around)).await?;
        Ok(Self {
            node: node.clone(),
            tree,
            addresses,
            tickets: Arc::new(AtomicU64::new(1)),
            draining: Arc::default(),
            stopped: Arc::default(),
            health,
            settings,
            texts,
        })
    }

    /// From now on what is to be forgotten is forgotten there as well. A node has one edge; a second one is not heard.
    pub fn keep_texts(&self, texts: Arc<dyn Texts>) {
        if self.texts.set(texts).is_err() {
            tracing::error!("this node's edge said twice what it keeps");
        }
    }

    /// The KV managers of all ranks of the view, with what people call them.
    pub(crate) fn all_kvs(&self) -> Vec<(RankId, (String, Address<kv_manager::Message>))> {
        let all = self.addresses.directory.all();
        all.keys().filter_map(|rank| Some((*rank, self.kv_of(*rank)?))).collect()
    }

    pub(crate) fn kv_of(&self, rank: RankId) -> Option<(String, Address<kv_manager::Message>)> {
        let kv = self.addresses.kv(self.addresses.directory.find(rank)?)?;
        Some((format!("rank {} of {}", rank.0, self.node_of(rank)), kv.clone()))
    }

    /// The ingresses of all members, by seat, with the members' names.
    pub(crate) fn all_ingresses(&self) -> Vec<(String, Address<ingress::Message>)> {
        let ingresses = self.addresses.ingresses.iter().enumerate();
        ingresses.map(|(seat, ingress)| (self.name_of(seat).to_owned(), ingress.clone())).collect()
    }

    pub(crate) fn name_of(&self, seat: usize) -> &str {
        self.settings.name_of(Seat(seat as u32))
    }

    pub(crate) fn node_of(&self, rank: RankId) -> &str {
        self.addresses.directory.find(rank).map_or("unknown", |(seat, _)| self.settings.name_of(seat))
    }

    /// Hands a request in; its events come by the stream.
    pub fn submit(&self, submission: Submission) -> TokenStream {
        let shared = (Arc::clone(&self.tickets), Arc::clone(&self.stopped));
        TokenStream::new(self.addresses.ingress.clone(), shared, submission)
    }

    /// Whether requests can be served, from what runs right now.
    pub fn readiness(&self) -> Readiness {
        let mut down = Vec::new();
        let mut see = |name: &str, running: bool| {
            if !running {
                down.push(name.to_owned());
            }
        };
        see(self.addresses.ingress.name(), self.addresses.ingress.is_running());
        see(self.addresses.queue.name(), self.addresses.queue.is_running());
        see(self.addresses.router.name(), self.addresses.router.is_running());
        for rank in &self.addresses.ranks {
            see(rank.kv.name(), rank.kv.is_running());
            see(rank.worker.name(), rank.worker.is_running());
        }
        Readiness { down, draining: self.draining.load(Ordering::Relaxed), standstill: self.health.standstill() }
    }

    /// The newest placements with their terms.
    ///
    /// # Errors
    /// The router does not answer.
    pub async fn placement_debug(&self) -> Result<PlacementDebug, AskError> {
        self.addresses.router.ask(TraceContext::default(), ASK_DEADLINE, router::Message::Debug).await
    }

    /// The members as this node sees them.
    ///
    /// # Errors
    /// The queue does not answer.
    pub async fn cluster_report(&self) -> Result<ClusterReport, AskError> {
        self.addresses.queue.ask(TraceContext::default(), ASK_DEADLINE, queue::Message::Debug).await
    }

    /// Requests that are not ended.
    ///
    /// # Errors
    /// The ingress does not answer.
    pub async fn open_requests(&self) -> Result<usize, AskError> {
        self.addresses.ingress.ask(TraceContext::default(), ASK_DEADLINE, ingress::Message::Open).await
    }

    /// Refuses new requests and waits for the open ones, of this node's clients and on its ranks, `within` at most. Returns
    /// how many are left.
    pub async fn drain(&self, within: Duration) -> usize {
        self.draining.store(true, Ordering::Relaxed);
        let trace = TraceContext::default();
        // An actor that is down has no requests to end.
        let _ = self.addresses.ingress.tell(trace, ingress::Message::Drain);
        let _ = self.addresses.queue.tell(trace, queue::Message::Draining);
        let until = tokio::time::Instant::now() + within;
        loop {
            // Actors that do not answer serve nobody.
            let own = self.open_requests().await.unwrap_or(0);
            let of_others = self.placement_debug().await.map_or(0, |debug| debug.open_here);
            let open = own.max(of_others);
            if open == 0 || tokio::time::Instant::now() >= until {
                return open;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Leaves the view, so that others take over at once what still runs on this node's ranks. Returns when that is done, at the
    /// latest after `within`; a node that is the last of its cluster, or in none, has nothing to leave.
    pub async fn leave(&self, within: Duration) {
        if self.addresses.queue.ask(TraceContext::default(), within, queue::Message::Leave).await.is_err() {
            tracing::warn!(?within, "the others have not let this node go in time");
        }
    }

    /// Gives up the group that this node is in: it takes part in none, founds another one with others who do so, or joins one.
    pub fn abandon(&self) {
        let _ = self.addresses.queue.tell(TraceContext::default(), queue::Message::Abandon);
    }

    /// Stops all actors, in order.
    pub async fn stop(&self, within: Duration) {
        self.stopped.store(true, Ordering::Relaxed);
        let outcome = self.tree.stop(within).await;
        tracing::info!(?outcome, "serving actors stopped");
    }

    /// Waits until the tree ends: by `stop`, or because its root gave up.
    pub async fn exited(&self) -> TreeExit {
        self.tree.exited().await
    }

    pub fn node(&self) -> &Node {
        &self.node
    }
}

/// The supervision tree; see the crate's documentation.
fn tree(around: &Surroundings) -> SupervisorSpec {
    let mut ranks = SupervisorSpec::new("ranks", Strategy::OneForOne).intensity(RESTARTS_MAX, RESTARTS_WINDOW);
    for local in around.settings.own_ranks() {
        ranks = ranks.child(rank(around, local));
    }
    let control = SupervisorSpec::new("control", Strategy::OneForAll)
        .intensity(RESTARTS_MAX, RESTARTS_WINDOW)
        .child(ActorSpec::new("router", {
            let a = around.clone();
            move || Router::new(&a)
        }))
        .child(ActorSpec::new("queue", {
            let a = around.clone();
            move || Queue::new(&a)
        }));
    let front = SupervisorSpec::new("front", Strategy::RestForOne)
        .intensity(RESTARTS_MAX, RESTARTS_WINDOW)
        .child(ActorSpec::new("ingress", {
            let a = around.clone();
            move || Ingress::new(&a)
        }))
        .child(control);
    SupervisorSpec::new("serving", Strategy::OneForOne)
        .intensity(RESTARTS_MAX, RESTARTS_WINDOW)
        .child(ranks)
        .child(front)
}

fn rank(around: &Surroundings, rank: LocalRank) -> SupervisorSpec {
    let own = around.addresses.ranks[rank.0 as usize].clone();
    let kv = ActorSpec::new(own.kv.name().to_owned(), {
        let (a, own) = (around.clone(), own.clone());
        move || KvManager::new(&a, rank, own.clone()).expect("settings were validated")
    });
    let worker = ActorSpec::new(own.worker.name().to_owned(), {
        let (a, own) = (around.clone(), own.clone());
        move || GpuWorker::new(rank, &a, own.clone()).expect("settings were validated")
    });
    SupervisorSpec::new(rank.to_string(), Strategy::OneForAll)
        .intensity(RESTARTS_MAX, RESTARTS_WINDOW)
        .child(kv)
        .child(worker)
}
