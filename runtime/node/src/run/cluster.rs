//! `starling up` with several nodes: a cluster on this machine, each node a process.

use super::child::{News, Nodes};
use super::folder::Folder;
use super::{RunError, Signals};
use crate::cli::cert::CertError;
use crate::cli::client::local_http;
use crate::cli::demo::{NodeReady, Printer};
use crate::cli::{Exit, Up};
use crate::config::{Config, ConfigError, ModelSource, Problem, Secret};
use crate::fetch;
use crate::telemetry::logs;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// How long the nodes may take to load the model and find each other: a large model from a slow disk.
const READY_WAIT: Duration = Duration::from_secs(600);
/// Between two looks at whether a node is ready.
const READY_INTERVAL: Duration = Duration::from_millis(50);
/// For one look: a node that is stopped does not answer.
const PROBE_WAIT: Duration = Duration::from_secs(2);
/// Between the end of a node's streams and of its process, when both end by one cause.
const END_WAIT: Duration = Duration::from_secs(1);
/// What a node needs to stop beside its drain: its own limits are 10 s for the actors and 5 s for each listener.
const STOP_WAIT: Duration = Duration::from_secs(30);

/// Why the cluster did not start, or did not last.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("cannot write {path:?}: {source}")]
    Folder { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Certificate(#[from] CertError),
    #[error("no free UDP port for a mesh: {source}")]
    MeshPort { source: io::Error },
    #[error("{nodes} nodes count up from {listen}, past the last port")]
    Ports { listen: SocketAddr, nodes: usize },
    #[error("{nodes} nodes count up from api.listen {api} and admin.listen {admin}, and run into each other")]
    Overlap { api: SocketAddr, admin: SocketAddr, nodes: u16 },
    #[error("cannot start {name}: {source}")]
    Spawn { name: String, source: io::Error },
    #[error("not ready after {READY_WAIT:?}: {}", .0.join(", "))]
    NotReady(Vec<String>),
    #[error("nodes still run {limit:?} after they were told to stop")]
    NotStopped { limit: Duration },
    #[error("cannot look at the nodes: {0}")]
    Http(reqwest::Error),
    #[error("{name} ended ({how}){log}")]
    Ended { name: String, how: String, code: Option<i32>, log: String },
    #[error("a second signal ended the nodes at once")]
    Interrupted,
}

impl From<&ClusterError> for Exit {
    fn from(error: &ClusterError) -> Self {
        match error {
            // A node that does not start says why by its code; that is what this command says then.
            ClusterError::Ended { code: Some(code), .. } if *code == Self::Config as i32 => Self::Config,
            ClusterError::Ended { code: Some(code), .. } if *code == Self::Unavailable as i32 => Self::Unavailable,
            ClusterError::Overlap { .. } | ClusterError::Ports { .. } => Self::Config,
            ClusterError::Interrupted => Self::Interrupted,
            _ => Self::Failed,
        }
    }
}

/// Starts the nodes, has the conversation, and serves until a signal.
pub fn up(command: &Up) -> Result<(), RunError> {
    let config = Config::load(&command.sources())?;
    logs::init(&config.telemetry)?;
    let config = of_one_machine(config)?;
    // What the nodes do is theirs; this process only waits.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before the folder, so that no signal leaves it behind.
        let mut signals = Signals::new(false)?;
        let mut folder = Folder::new()?;
        if command.keep_logs {
            folder.keep();
            eprintln!("logs are kept in {}", folder.path().display());
        }
        let mut nodes = Nodes::start(&folder.fill(&config, command.nodes)?)?;
        let worked = tokio::select! {
            worked = work(command, &config, &mut nodes) => worked,
            () = signals.first() => Ok(()),
        };
        let stopped = tokio::select! {
            stopped = stop(&config, &mut nodes) => stopped,
            // A second signal means now.
            () = signals.first() => Err(ClusterError::Interrupted.into()),
        };
        nodes.kill().await;
        // What went wrong first is what is told.
        worked.and(stopped)
    })
}

/// The configuration of all nodes, with a model that is there.
fn of_one_machine(mut config: Config) -> Result<Config, RunError> {
    if !config.cluster.members.is_empty() {
        let what = "up makes the members itself; starling serve joins those that a file names".to_owned();
        return Err(ConfigError::Invalid(vec![Problem::new("cluster.members", what)]).into());
    }
    if let ModelSource::Named(name) = config.model.source() {
        // Here, so that one process fetches and shows how far it is, under the name that clients know.
        let path = fetch::model(&name)?;
        config.model.id = Some(config.model.id());
        (config.model.path, config.model.name) = (Some(path), None);
    }
    Ok(config)
}

async fn work(command: &Up, config: &Config, nodes: &mut Nodes) -> Result<(), RunError> {
    let ready = ready(command.nodes, nodes).await?;
    let stdout = io::stdout();
    let colour = logs::colour(stdout.is_terminal());
    let mut printer = Printer::new(stdout, command.json, colour);
    let model = config.model.id();
    printer.ready(&model, &ready)?;
    if !command.quiet {
        let key = config.api.keys.first().map(|key| Secret::new(key.expose()));
        let talked = tokio::select! {
            talked = printer.converse(&ready, &model, key) => talked,
            ended = nodes.next_end() => return Err(ended.into_error().into()),
        };
        if let Err(error) = talked {
            // A stream breaks a moment before its node has ended, which is the better thing to tell.
            return match timeout(END_WAIT, nodes.next_end()).await {
                Ok(ended) => Err(ended.into_error().into()),
                Err(_) => Err(error.into()),
            };
        }
    }
    if command.demo_only {
        return Ok(());
    }
    serve(command, nodes, &mut printer).await
}

/// Returns when a node ended that was to go on. Served quietly, the others go on without it.
async fn serve(command: &Up, nodes: &mut Nodes, printer: &mut Printer<Stdout>) -> Result<(), RunError> {
    printer.serving()?;
    loop {
        let error = nodes.next_end().await.into_error();
        if !command.quiet || nodes.running() == 0 {
            return Err(error.into());
        }
        eprintln!("error: {error}");
    }
}

/// Waits until every node says that it is ready, and returns them in their order.
async fn ready(count: u16, nodes: &mut Nodes) -> Result<Vec<NodeReady>, RunError> {
    let mut waiting = Waiting::new(count)?;
    let all = async {
        let mut pace = interval(READY_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !waiting.reasons.is_empty() {
            tokio::select! {
                news = nodes.next() => match news {
                    News::Ready(at, node) => { waiting.known.insert(at, node); }
                    News::Ended(ended) => return Err(ended.into_error()),
                },
                _ = pace.tick() => waiting.look().await,
            }
        }
        Ok(())
    };
    match timeout(READY_WAIT, all).await {
        Ok(outcome) => outcome?,
        Err(_) => return Err(ClusterError::NotReady(waiting.reasons.into_values().collect()).into()),
    }
    Ok(waiting.known.into_values().collect())
}

/// The nodes that are waited for.
struct Waiting {
    http: reqwest::Client,
    /// Those that have said where their listeners are, by place.
    known: BTreeMap<usize, NodeReady>,
    /// Why the others, and those of them that do not pass their own probe yet, are not ready.
    reasons: BTreeMap<usize, String>,
}

impl Waiting {
    fn new(count: u16) -> Result<Self, ClusterError> {
        let reasons = (0..usize::from(count)).map(|at| (at, format!("node-{at} is starting"))).collect();
        Ok(Self { http: local_http().map_err(ClusterError::Http)?, known: BTreeMap::new(), reasons })
    }

    /// Asks those that can be asked.
    async fn look(&mut self) {
        for (at, node) in &self.known {
            if !self.reasons.contains_key(at) {
                continue;
            }
            let asked = self.http.get(format!("{}/readyz", node.admin)).timeout(PROBE_WAIT).send().await;
            let reason = match asked {
                Ok(answer) if answer.status().is_success() => None,
                Ok(answer) => Some(answer.text().await.unwrap_or_default().trim().replace('\n', "; ")),
                Err(e) => Some(e.to_string()),
            };
            match reason {
                None => self.reasons.remove(at),
                Some(reason) => self.reasons.insert(*at, format!("{}: {reason}", node.id)),
            };
        }
    }
}

/// Lets all nodes drain, and returns when the last has ended.
async fn stop(config: &Config, nodes: &mut Nodes) -> Result<(), RunError> {
    nodes.drain();
    let all = async {
        let mut outcome = Ok(());
        while nodes.running() > 0 {
            let ended = nodes.next_end().await;
            if !ended.in_order() {
                outcome = outcome.and(Err(ended.into_error()));
            }
        }
        outcome
    };
    let limit = config.drain.drain_timeout.duration() + STOP_WAIT;
    let outcome = timeout(limit, all).await;
    Ok(outcome.unwrap_or(Err(ClusterError::NotStopped { limit }))?)
}
