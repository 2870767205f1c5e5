//! Puts a node together from its configuration: model, ranks, actors, telemetry, listeners.

mod engine;
mod members;
mod model;
mod pools;

pub use engine::{Debug, Health, ServingEngine};
pub use members::MembersError;
pub use model::{LoadError, Loaded};

use crate::api::{self, Api, Drained, ServeLimits};
use crate::cli::demo::NodeReady;
use crate::cli::{COMMIT, VERSION};
use crate::config::Config;
use crate::consensus::{Bounds, RaftLogs};
use crate::telemetry::{Identity, SpansError, Telemetry, admin_router};
use starling_actors::{Hook, TreeExit};
use starling_core::placement::Policy;
use starling_core::{batch, ingress, membership, replica, round};
use starling_serving::{Observer, Serving, ServingError, Settings};
use starling_transport::Mesh;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long the actors may take to stop once no request is open.
const STOP_WAIT: Duration = Duration::from_secs(10);
/// How long answers that are complete may take to reach their clients.
const FLUSH_WAIT: Duration = Duration::from_secs(5);

/// Requests that a round asks the ranks about at most (the protocol's bound).
const PROBE_REQUESTS_MAX: u32 = 256;
/// How long the others may take to go on without a node that leaves.
const LEAVE_WAIT: Duration = Duration::from_secs(5);

/// Why a node did not start. Each kind has an exit code of its own.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen at {address} ({what}): {source}")]
    Listen { what: &'static str, address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Members(#[from] MembersError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Serving(#[from] ServingError),
    #[error(transparent)]
    Spans(#[from] SpansError),
}

/// A running node.
pub struct Node {
    pub ready: NodeReady,
    pub api: SocketAddr,
    /// What clients call the model.
    pub model: String,
    /// A bearer key that is accepted, if keys are asked for.
    pub key: Option<String>,
    serving: Serving,
    /// To the other members, where there are any.
    mesh: Option<Mesh>,
    telemetry: Arc<Telemetry>,
    api_stop: oneshot::Sender<()>,
    api_task: JoinHandle<Drained>,
    admin_stop: oneshot::Sender<()>,
    admin_task: JoinHandle<Drained>,
    drain_timeout: Duration,
}

impl Node {
    /// Starts everything and returns once requests can be served.
    ///
    /// # Errors
    /// A port in use, a model that cannot be used, or settings that cannot work.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let api_listener = listen("api", config.api.listen).await?;
        let admin_listener = listen("admin", config.admin.listen).await?;
        let keys = config.api.keys.iter().map(|key| key.expose().to_owned()).collect::<Vec<_>>();
        let loading = config.clone();
        let loaded = tokio::task::spawn_blocking(move || Loaded::load(&loading))
            .await
            .map_err(|error| LoadError::Interrupted(error.to_string()))??;

        let identity = Identity {
            model: config.model.id(),
            block_tokens: config.engine.block_tokens,
            version: VERSION,
            commit: COMMIT,
        };
        let telemetry = Arc::new(Telemetry::new(identity, &config.node.name, config.telemetry.otlp.as_deref())?);
        let hook: Arc<dyn Hook> = Arc::<Telemetry>::clone(&telemetry);
        let actors = starling_actors::Node::with_hook(config.node.name.as_str(), hook);
        let observer: Arc<dyn Observer> = Arc::clone(&telemetry.metrics) as _;
        let settings = settings(config, &loaded)?;
        let backends = loaded.backends(config);
        let serving = match settings.members.len() {
            1 => Serving::start(&actors, settings, backends, observer).await?,
            _ => {
                let logs = RaftLogs::start(&actors, bounds(config, &settings)).await.map_err(ServingError::Start)?;
                Serving::start_with(&actors, settings, backends, observer, Arc::new(logs)).await?
            }
        };
        let mesh = members::join(config, &actors).await?;

        let health = Arc::new(Health::new(serving.clone(), config.model.id()));
        let api_settings = api_settings(config, &keys);
        let body = Api {
            engine: Arc::new(ServingEngine::new(serving.clone(), Arc::clone(&telemetry.metrics))),
            health: Arc::clone(&health) as _,
            text: Arc::clone(&loaded.text),
            model: loaded.card(config),
            metrics: Arc::clone(&telemetry.metrics) as _,
            trace: Arc::clone(&telemetry) as _,
            settings: api_settings,
        };
        let debug = Arc::new(Debug::new(serving.clone()));
        let admin = admin_router(Arc::clone(&telemetry.metrics), debug, health);
        let (api, admin_address) = (address(&api_listener)?, address(&admin_listener)?);
        let (api_stop, api_task) = spawn(api_listener, api::router(body));
        let (admin_stop, admin_task) = spawn(admin_listener, admin);
        Ok(Self {
            ready: NodeReady::here(&config.node.name, api, admin_address),
            api,
            model: config.model.id(),
            key: keys.into_iter().next(),
            serving,
            mesh,
            telemetry,
            api_stop,
            api_task,
            admin_stop,
            admin_task,
            drain_timeout: config.drain.drain_timeout.duration(),
        })
    }

    /// Waits until the actors end by themselves: their supervision gave up.
    pub async fn failed(&self) -> TreeExit {
        self.serving.exited().await
    }

    /// Refuses new requests, lets the open ones end within the drain timeout, and stops. Returns how many were cut off.
    pub async fn drain(self) -> usize {
        tracing::info!(timeout = ?self.drain_timeout, "draining");
        let left = self.serving.drain(self.drain_timeout).await;
        if left > 0 {
            tracing::warn!(requests = left, "drain timeout passed with open requests");
        }
        self.serving.leave(LEAVE_WAIT).await;
        // Streams that are still open end with an error before their connections are closed.
        self.serving.stop(STOP_WAIT).await;
        if let Some(mesh) = &self.mesh {
            mesh.close(FLUSH_WAIT).await;
        }
        for (stop, task) in [(self.api_stop, self.api_task), (self.admin_stop, self.admin_task)] {
            // A listener that is gone needs no signal.
            let _ = stop.send(());
            let _ = task.await;
        }
        self.telemetry.shutdown().await;
        left
    }
}

fn spawn(listener: TcpListener, router: axum::Router) -> (oneshot::Sender<()>, JoinHandle<Drained>) {
    let (stop, stopped) = oneshot::channel::<()>();
    let limits = ServeLimits { drain_wait: FLUSH_WAIT, ..ServeLimits::default() };
    let task = tokio::spawn(api::serve(listener, router, limits, async {
        let _ = stopped.await;
    }));
    (stop, task)
}

async fn listen(what: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| StartError::Listen { what, address, source })
}

fn address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    listener.local_addr().map_err(|source| StartError::Listen { what: "bound", address: nowhere, source })
}

/// A leader that stopped is replaced before anybody is suspected.
fn bounds(config: &Config, settings: &Settings) -> Bounds {
    let suspect_after = Duration::from_micros(settings.suspect_after_us);
    Bounds {
        members_max: settings.changes.members_max,
        election: Duration::from_millis(config.cluster.election_ms).min(suspect_after / 4),
        votes_on: Duration::from_micros(settings.changes.change_us_max),
    }
}

fn api_settings(config: &Config, keys: &[String]) -> api::Settings {
    api::Settings {
        node: config.node.name.clone(),
        cluster: config.cluster.name.clone(),
        keys: keys.to_vec(),
        body_bytes_max: usize::try_from(config.api.body_limit.bytes()).unwrap_or(usize::MAX),
        text_cache_bytes: usize::try_from(config.api.text_cache.bytes()).unwrap_or(usize::MAX),
        keyed_block_tokens: (config.placement.policy == Policy::KvAware).then_some(config.engine.block_tokens),
        ..api::Settings::default()
    }
}

/// The actors' settings.
fn settings(config: &Config, loaded: &Loaded) -> Result<Settings, MembersError> {
    let batch = batch::Config {
        step_tokens_max: config.engine.step_tokens_max,
        sequences_max: config.engine.sequences_max,
        draft_tokens_max: config.engine.draft_tokens_max,
        vocabulary: loaded.vocabulary(),
        kv: loaded.kv().shape(),
    };
    let (members, me) = members::list(config)?;
    Ok(Settings {
        members,
        me,
        suspect_after_us: config.cluster.suspect_after_ms * 1000,
        context_tokens_max: loaded.context_tokens(config),
        prompt_wait_us: config.limits.prompt_wait.as_micros(),
        batch,
        kv: loaded.kv().clone(),
        kv_sizing: loaded.kv_sizing().cloned(),
        replica: replica::Config {
            cap: config.engine.sequences_max,
            attempts_max: config.limits.attempts_max,
            probe_requests_max: PROBE_REQUESTS_MAX,
            lockstep: config.cluster.lockstep,
            placement: (*config.placement).clone(),
        },
        rounds: round::Config {
            round_interval_us_min: config.rounds.round_interval_ms_min * 1000,
            busy_interval_us: config.rounds.busy_interval_ms * 1000,
            heartbeat_us: config.rounds.heartbeat_ms * 1000,
            lockstep: config.cluster.lockstep,
            ..round::Config::default()
        },
        changes: membership::Config {
            suspicion_gather_us: config.cluster.suspicion_gather_ms * 1000,
            report_after_us: config.cluster.report_after_ms * 1000,
            change_us_max: config.cluster.change_ms_max * 1000,
            ..membership::Config::default()
        },
        bootstrap: config.cluster.bootstrap.clone(),
        ingress: ingress::Config {
            announced_requests_max: config.limits.announced_requests_max,
            backlog_requests_max: config.limits.backlog_requests_max,
            backlog_tokens_max: config.limits.backlog_tokens_max,
            announce_wait_us: config.limits.announce_wait.as_micros(),
            stream_wait_us: config.cluster.stream_wait_s * 1_000_000,
            ..ingress::Config::default()
        },
    })
}
