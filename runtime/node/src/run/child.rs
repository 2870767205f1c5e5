//! Nodes as processes of this one: started, watched, and never left behind.
//!
//! A node's standard input is a pipe whose other end is here. When it closes, because this process says so or because it is
//! gone, the node drains and exits; so nothing outlives this process, however it ends.

use super::ClusterError;
use super::folder::Plan;
use crate::cli::demo::NodeReady;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Lines of a log that are shown when its node ends.
const LOG_LINES_SHOWN: usize = 20;
/// Of these lines; one may be long.
const LOG_BYTES_SHOWN: usize = 8 << 10;

/// All nodes. Dropped, it kills those that still run.
pub struct Nodes {
    /// By place; what has been closed or has ended is gone.
    pipes: BTreeMap<usize, ChildStdin>,
    ends: JoinSet<Ended>,
    ready: mpsc::Receiver<(usize, NodeReady)>,
}

/// What happens to nodes.
pub enum News {
    /// The node at this place takes requests.
    Ready(usize, NodeReady),
    Ended(Ended),
}

/// How a node ended.
#[derive(Debug)]
pub struct Ended {
    at: usize,
    pub name: String,
    pub status: Result<ExitStatus, std::io::Error>,
    log: PathBuf,
}

impl Ended {
    /// Whether it drained, as it was told to.
    pub fn in_order(&self) -> bool {
        self.status.as_ref().is_ok_and(ExitStatus::success)
    }

    /// Who ended how, with the last lines of its log.
    pub fn into_error(self) -> ClusterError {
        let how = match &self.status {
            Ok(status) => status.to_string(),
            Err(e) => format!("not known: {e}"),
        };
        let code = self.status.ok().and_then(|status| status.code());
        ClusterError::Ended { name: self.name, how, code, log: last_lines(&self.log) }
    }
}

/// The line that a node prints when it takes requests.
#[derive(Deserialize)]
struct ReadyLine {
    nodes: Vec<NodeReady>,
}

impl Nodes {
    /// Starts a process for each plan.
    ///
    /// # Errors
    /// A process that cannot be started; those that were are killed.
    pub fn start(plans: &[Plan]) -> Result<Self, ClusterError> {
        let (told, ready) = mpsc::channel(plans.len().max(1));
        let mut nodes = Self { pipes: BTreeMap::new(), ends: JoinSet::new(), ready };
        for (at, plan) in plans.iter().enumerate() {
            let spawn = |source| ClusterError::Spawn { name: plan.name.clone(), source };
            let mut process = command(plan).and_then(|mut command| command.spawn()).map_err(spawn)?;
            let pipe = process.stdin.take().expect("standard input is a pipe");
            let output = process.stdout.take().expect("standard output is a pipe");
            nodes.pipes.insert(at, pipe);
            let (told, name, log) = (told.clone(), plan.name.clone(), plan.log.clone());
            nodes.ends.spawn(async move {
                // Held until the end: a node that writes to a closed pipe would fail for it.
                let mut output = BufReader::new(output);
                if let Some(node) = ready_line(&mut output).await {
                    // Nobody waits for it any more when this process is about to stop.
                    let _ = told.send((at, node)).await;
                }
                Ended { at, name, status: process.wait().await, log }
            });
        }
        Ok(nodes)
    }

    /// What happens next; nothing, once all have ended.
    pub async fn next(&mut self) -> News {
        loop {
            tokio::select! {
                Some((at, node)) = self.ready.recv() => return News::Ready(at, node),
                Some(joined) = self.ends.join_next() => {
                    // What watches a node only waits; it fails only if it was cut short here.
                    if let Ok(ended) = joined {
                        self.pipes.remove(&ended.at);
                        return News::Ended(ended);
                    }
                }
                else => std::future::pending().await,
            }
        }
    }

    /// The next node that ends.
    pub async fn next_end(&mut self) -> Ended {
        loop {
            if let News::Ended(ended) = self.next().await {
                return ended;
            }
        }
    }

    pub fn running(&self) -> usize {
        self.ends.len()
    }

    /// Tells all nodes to drain and exit.
    pub fn drain(&mut self) {
        self.pipes.clear();
    }

    /// Ends all nodes at once.
    pub async fn kill(&mut self) {
        self.ends.shutdown().await;
    }
}

async fn ready_line(output: &mut BufReader<ChildStdout>) -> Option<NodeReady> {
    let mut line = String::new();
    output.read_line(&mut line).await.ok()?;
    // No line, or another one, is told by how the process ends.
    let ready: ReadyLine = serde_json::from_str(&line).ok()?;
    ready.nodes.into_iter().next()
}

fn command(plan: &Plan) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--supervised", "--config"]).arg(&plan.config);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&plan.log)?);
    // Ctrl-C goes to all of a terminal's foreground group; the nodes are told by their pipes, and once.
    command.process_group(0).kill_on_drop(true);
    // What the variables say is in the file by now. Bearer keys are in no file.
    let ours = |name: &str| (name.starts_with("STARLING") && name != "STARLING__API__KEYS") || name == "RUST_LOG";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
        command.env_remove(name);
    }
    Ok(command)
}

/// The end of a log, indented; empty if there is none.
fn last_lines(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOG_BYTES_SHOWN)..]);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].iter().map(|line| format!("\n  | {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_shown_and_no_more() {
        let folder = tempfile::TempDir::new().unwrap();
        let log = folder.path().join("a.log");
        assert_eq!(last_lines(&log), "");
        std::fs::write(&log, "one\ntwo\n").unwrap();
        assert_eq!(last_lines(&log), "\n  | one\n  | two");
        std::fs::write(&log, (0..100).map(|n| format!("{n}\n")).collect::<String>()).unwrap();
        let shown = last_lines(&log);
        assert!(shown.starts_with("\n  | 80\n") && shown.ends_with("\n  | 99"), "{shown}");
        std::fs::write(&log, "\u{fc}".repeat(20_000)).unwrap();
        assert!(last_lines(&log).len() < LOG_BYTES_SHOWN + 20);
    }
}
