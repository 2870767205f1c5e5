//! The commands that run nodes or talk to them, from the configuration to the exit code.

mod bench;
mod calibrate;
mod child;
mod cluster;
mod folder;
mod plan;

pub use bench::bench;
pub use calibrate::calibrate;
pub use plan::plan;

use cluster::ClusterError;

use crate::assembly::{LoadError, MembersError, Node, StartError};
use crate::cli::cert::CertCommand;
use crate::cli::demo::{DemoError, Printer};
use crate::cli::nodes::{self, NodesError};
use crate::cli::{Exit, Serve, Up};
use crate::config::{Config, Secret, Sources};
use crate::telemetry::logs;
use std::io::{self, IsTerminal, Read};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// Why a command ended in an error; the exit code says which kind.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("the conversation failed: {0}")]
    Demo(#[from] DemoError),
    #[error("{0}")]
    Log(#[from] logs::LogError),
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
    #[error("the serving actors ended: {0:?}")]
    Actors(starling_actors::TreeExit),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Fetch(#[from] crate::fetch::FetchError),
}

impl From<&RunError> for Exit {
    fn from(error: &RunError) -> Self {
        match error {
            RunError::Config(error) => error.into(),
            RunError::Start(StartError::Spans(_)) => Self::Config,
            RunError::Start(StartError::Members(MembersError::Mesh(_))) => Self::Failed,
            RunError::Start(StartError::Members(_)) => Self::Config,
            RunError::Start(StartError::Load(LoadError::Fetch(error))) => error.into(),
            RunError::Start(StartError::Load(_)) => Self::Unavailable,
            RunError::Start(StartError::Serving(error)) => match error {
                starling_serving::ServingError::Settings(_) => Self::Config,
                starling_serving::ServingError::Start(_) => Self::Unavailable,
            },
            RunError::Fetch(error) => error.into(),
            RunError::Cluster(error) => error.into(),
            RunError::Start(StartError::Listen { .. })
            | RunError::Demo(_)
            | RunError::Log(_)
            | RunError::Write(_)
            | RunError::Actors(_) => Self::Failed,
        }
    }
}

/// Runs `starling serve`.
pub fn serve(command: &Serve) -> Exit {
    finish(run(&command.sources(), command.supervised, async |node, signals| {
        tracing::info!(api = node.ready.api, admin = node.ready.admin, model = node.model, "ready");
        if command.supervised {
            Printer::new(io::stdout(), true, false).ready(&node.model, std::slice::from_ref(&node.ready))?;
        }
        until_stopped(node, signals).await
    }))
}

/// Runs `starling up`: a single node in this process, several in processes of their own.
pub fn up(command: &Up) -> Exit {
    finish(if command.nodes > 1 { cluster::up(command) } else { up_alone(command) })
}

/// Runs `starling cert`.
pub fn cert(command: &CertCommand) -> Exit {
    match command.run(&mut io::stdout()) {
        Ok(()) => Exit::Ok,
        Err(error) => failed(&error),
    }
}

/// Runs `starling nodes`.
pub fn nodes(admin: &str) -> Exit {
    let shown = || -> Result<(), NodesError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let cluster = runtime.block_on(nodes::ask(admin))?;
        Ok(nodes::write(&cluster, &mut io::stdout())?)
    };
    match shown() {
        Ok(()) => Exit::Ok,
        Err(error @ NodesError::Url(_)) => {
            eprintln!("error: {error}");
            Exit::Usage
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> Exit {
    eprintln!("error: {error}");
    Exit::Failed
}

fn up_alone(command: &Up) -> Result<(), RunError> {
    run(&command.sources(), false, async |node, signals| {
        let stdout = io::stdout();
        let colour = logs::colour(stdout.is_terminal());
        let mut printer = Printer::new(stdout, command.json, colour);
        printer.ready(&node.model, std::slice::from_ref(&node.ready))?;
        if !command.quiet {
            let key = node.key.clone().map(Secret::new);
            tokio::select! {
                talked = printer.converse(std::slice::from_ref(&node.ready), &node.model, key) => { talked?; }
                () = signals.first() => return Ok(()),
            }
        }
        if command.demo_only {
            return Ok(());
        }
        printer.serving()?;
        until_stopped(node, signals).await
    })
}

async fn until_stopped(node: &Node, signals: &mut Signals) -> Result<(), RunError> {
    tokio::select! {
        () = signals.first() => Ok(()),
        exit = node.failed() => Err(RunError::Actors(exit)),
    }
}

fn finish(result: Result<(), RunError>) -> Exit {
    match result {
        Ok(()) => Exit::Ok,
        Err(error) => {
            eprintln!("error: {error}");
            (&error).into()
        }
    }
}

/// Starts a node, does `work` with it, and drains it, whatever `work` came to.
fn run(
    sources: &Sources,
    supervised: bool,
    work: impl AsyncFnOnce(&Node, &mut Signals) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let config = Config::load(sources)?;
    logs::init(&config.telemetry)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new(supervised)?;
        let node = tokio::select! {
            node = Node::start(&config) => node?,
            // A fetch or a load that is interrupted leaves nothing half done.
            () = signals.first() => return Ok(()),
        };
        let worked = work(&node, &mut signals).await;
        // A second signal means now. Whoever started this node may be gone by then, which is no reason to hurry.
        signals.pipe = None;
        tokio::spawn(async move {
            signals.first().await;
            std::process::exit(Exit::Interrupted as i32);
        });
        node.drain().await;
        worked
    })
}

/// What asks a process to stop.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Ends with standard input.
    pipe: Option<oneshot::Receiver<()>>,
}

impl Signals {
    fn new(supervised: bool) -> io::Result<Self> {
        let pipe = if supervised { Some(end_of_input()?) } else { None };
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())?, pipe })
    }

    /// Waits for the next of them.
    async fn first(&mut self) {
        let pipe = async {
            match &mut self.pipe {
                Some(end) => end.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            // An error is as good: nobody is at the other end any more.
            _ = pipe => self.pipe = None,
        }
    }
}

/// Tells when standard input ends. On a thread of its own, which the process does not wait for: a read cannot be cut short.
fn end_of_input() -> io::Result<oneshot::Receiver<()>> {
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut ignored = [0; 1024];
        loop {
            match stdin.read(&mut ignored) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        // The process may be on its way out already.
        let _ = ended.send(());
    })?;
    Ok(end)
}
