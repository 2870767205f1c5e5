//! `starling bench`: from the flags to the result.

use crate::bench::{Client, Load, ModelsError, PlotError, Report, models, write_svg};
use crate::cli::Exit;
use crate::cli::bench::{Bench, BenchArgsError};
use crate::config::Secret;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[error(transparent)]
    Args(#[from] BenchArgsError),
    #[error(transparent)]
    Models(#[from] ModelsError),
    #[error("--model {asked:?}: the server has {}", known.join(", "))]
    Model { asked: String, known: Vec<String> },
    #[error("the server has no model; name one by --model")]
    NoModel,
    #[error("cannot set up the HTTP client: {0}")]
    Client(#[from] reqwest::Error),
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
    #[error("cannot write the result to {path:?}: {source}")]
    Save { path: PathBuf, source: io::Error },
    #[error("--svg: {0}")]
    Plot(#[from] PlotError),
    #[error("no request succeeded")]
    NoneSucceeded,
}

impl From<&BenchError> for Exit {
    fn from(error: &BenchError) -> Self {
        match error {
            BenchError::Args(_) => Self::Usage,
            _ => Self::Failed,
        }
    }
}

/// Runs `starling bench`.
pub fn bench(command: &Bench) -> Exit {
    raise_open_files();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return super::failed(&error),
    };
    match runtime.block_on(run(command)) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            eprintln!("error: {error}");
            (&error).into()
        }
    }
}

/// Each open request is a connection, and shells give a process few files.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Without it requests beyond the limit fail and say why.
    let _ = setrlimit(Resource::Nofile, limit);
}

async fn run(command: &Bench) -> Result<(), BenchError> {
    let key = std::env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty()).map(Secret::new);
    let workload = command.workload()?;
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let model = tokio::select! {
        model = model(command, key.as_ref()) => model?,
        _ = interrupts.recv() => return Ok(()),
    };
    let client = Client::new(command.target(model, key))?;
    let load = Load { client, workload, pace: command.pace() };
    let (header, date) = (command.header(&load), date());
    let about = command.about(&load, &date);
    let path = command.result_path(&load.client.target().model, &date);

    let bar = bar(command, load.workload.requests());
    let mut failed = 0_u64;
    let stop = async {
        interrupts.recv().await;
    };
    let measured = load
        .run(stop, |record| {
            bar.inc(1 + u64::from(record.dropped_turns));
            if record.outcome.is_err() {
                failed += 1;
                bar.set_message(format!("{failed} failed"));
            }
        })
        .await;
    bar.finish_and_clear();

    let report = Report::new(&measured, command.view());
    let mut stdout = io::stdout().lock();
    let json = report.to_json(about);
    if command.result.json {
        writeln!(stdout, "{json}")?;
    } else {
        report.write_table(&header, &mut stdout)?;
    }
    stdout.flush()?;
    for (kind, (count, first)) in &report.failures {
        eprintln!("{kind} ({count}), the first: {first}");
    }
    if let Some(path) = path {
        std::fs::write(&path, format!("{json}\n")).map_err(|source| BenchError::Save { path, source })?;
    }
    // An interruption before the first answer is no failure of the server.
    if report.completed == 0 && !measured.stopped {
        return Err(BenchError::NoneSucceeded);
    }
    if let Some(path) = command.result.svg.as_ref().filter(|_| report.completed > 0) {
        write_svg(&report, &measured, path)?;
    }
    Ok(())
}

/// Now, in UTC, as file names have it: `20261130-160000`.
fn date() -> String {
    let now = time::OffsetDateTime::now_utc();
    let (year, month, day) = (now.year(), u8::from(now.month()), now.day());
    format!("{year}{month:02}{day:02}-{:02}{:02}{:02}", now.hour(), now.minute(), now.second())
}

/// The model that is asked for, if the server has it. A server that lists none is believed to have it.
async fn model(command: &Bench, key: Option<&Secret>) -> Result<String, BenchError> {
    let known = match models(&command.base_url(), key).await {
        Ok(known) => known,
        Err(ModelsError::Refused { status: 404 | 405, .. }) if command.model.is_some() => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    match &command.model {
        Some(asked) if known.is_empty() || known.contains(asked) => Ok(asked.clone()),
        Some(asked) => Err(BenchError::Model { asked: asked.clone(), known }),
        None => known.into_iter().next().ok_or(BenchError::NoModel),
    }
}

fn bar(command: &Bench, requests: u64) -> ProgressBar {
    let hidden = command.result.disable_tqdm || !io::stderr().is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(requests), target);
    let style = "{wide_bar} {pos}/{len} requests, {per_sec}, {elapsed} (left {eta}) {msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is sound"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
