//! The commands that run a node: `up` and `serve`, from the configuration to the exit code.

use crate::assembly::{LoadError, Node, StartError};
use crate::cli::demo::{DemoError, Printer};
use crate::cli::{Exit, Serve, Up};
use crate::config::{Config, Secret, Sources};
use crate::telemetry::logs;
use std::io::{self, IsTerminal};
use tokio::signal::unix::{Signal, SignalKind, signal};

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
}

impl From<&RunError> for Exit {
    fn from(error: &RunError) -> Self {
        match error {
            RunError::Config(error) => error.into(),
            RunError::Start(StartError::Spans(_)) => Self::Config,
            RunError::Start(StartError::Load(LoadError::Fetch(error))) => error.into(),
            RunError::Start(StartError::Load(_)) => Self::Unavailable,
            RunError::Start(StartError::Serving(error)) => match error {
                starling_serving::ServingError::Settings(_) => Self::Config,
                starling_serving::ServingError::Start(_) => Self::Unavailable,
            },
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
    finish(run(&command.sources(), async |node, signals| {
        tracing::info!(api = node.ready.api, admin = node.ready.admin, model = node.model, "ready");
        until_stopped(node, signals).await
    }))
}

/// Runs `starling up`.
pub fn up(command: &Up) -> Exit {
    finish(run(&command.sources(), async |node, signals| {
        let stdout = io::stdout();
        let colour = logs::colour(stdout.is_terminal());
        let mut printer = Printer::new(stdout, command.json, colour);
        printer.ready(&node.model, std::slice::from_ref(&node.ready))?;
        if !command.quiet {
            let key = node.key.clone().map(Secret::new);
            tokio::select! {
                talked = printer.converse(node.api, &node.model, key) => { talked?; }
                () = signals.first() => return Ok(()),
            }
        }
        if command.demo_only {
            return Ok(());
        }
        printer.serving()?;
        until_stopped(node, signals).await
    }))
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
fn run(sources: &Sources, work: impl AsyncFnOnce(&Node, &mut Signals) -> Result<(), RunError>) -> Result<(), RunError> {
    let config = Config::load(sources)?;
    logs::init(&config.telemetry)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let node = tokio::select! {
            node = Node::start(&config) => node?,
            // A fetch or a load that is interrupted leaves nothing half done.
            () = signals.first() => return Ok(()),
        };
        let worked = work(&node, &mut signals).await;
        // A second signal means now.
        tokio::spawn(async move {
            signals.first().await;
            std::process::exit(Exit::Interrupted as i32);
        });
        node.drain().await;
        worked
    })
}

/// The signals that ask a process to stop.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next of them.
    async fn first(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
