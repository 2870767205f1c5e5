//! A running supervision tree: how it starts, how it ends.

use crate::entry::{ActorKind, ActorState, ActorStats, Entry};
use crate::node::Node;
use crate::spec::{ChildSpec, ChildSpecKind, SupervisorSpec};
use crate::supervisor::{Branch, Child, Ending, KILL_GRACE, SupervisorStart};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Why a tree did not start. Nothing of it runs and its names are free.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    #[error("actor name {name:?} is taken on this node")]
    NameTaken { name: Arc<str> },
    #[error("supervisor {name:?} did not start: {reason}")]
    Failed { name: Arc<str>, reason: String },
}

/// How a tree ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TreeExit {
    /// It was stopped.
    Stopped,
    /// Its root gave up.
    Failed { reason: String },
    /// It was killed.
    Killed,
}

/// How a stop went; the worst of all actors counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopOutcome {
    /// Every actor handled what was in its mailbox.
    Drained,
    /// Some actor was killed at its deadline, with messages left.
    Killed,
    /// Some handler does not return: its thread is lost until it does.
    Abandoned,
}

/// A running supervision tree. Dropping the handle leaves it running.
#[derive(Clone)]
pub struct Tree {
    root: ractor::ActorCell,
    entries: Arc<[Arc<Entry>]>,
    exit: watch::Receiver<Option<TreeExit>>,
}

impl Node {
    /// Starts a supervisor with all its children, in order, and returns once every one of them has started.
    ///
    /// # Errors
    /// When a name is taken or a child fails to start; what had started is stopped again.
    pub async fn start(&self, spec: SupervisorSpec) -> Result<Tree, StartError> {
        let mut entries = Vec::new();
        let root = Arc::new(SupervisorStart(plan(spec, 0, &mut entries)));
        let enlisted = Enlisted::new(self, entries.into())?;
        let name = Arc::clone(&root.0.entry.name);
        let live = root.start_root(self.clone()).await.map_err(|reason| StartError::Failed { name, reason })?;
        let (sender, exit) = watch::channel(None);
        let tree = Tree { root: live.cell, entries: Arc::clone(&enlisted.entries), exit };
        self.add_tree(tree.clone());
        tokio::spawn(async move {
            // Only the end of the task counts; how it ended is in `ending`.
            let _ = live.handle.await;
            let ending = live.ending.get();
            drop(enlisted);
            sender.send_replace(Some(match ending {
                Some(Ending::Clean) => TreeExit::Stopped,
                Some(Ending::Crashed(reason)) => TreeExit::Failed { reason: reason.clone() },
                None => TreeExit::Killed,
            }));
        });
        Ok(tree)
    }
}

impl Tree {
    /// Waits until the tree has ended, for whatever reason.
    pub async fn exited(&self) -> TreeExit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.clone().unwrap_or(TreeExit::Killed),
            // The watcher went away with its runtime, and the tree with both.
            Err(_) => TreeExit::Killed,
        }
    }

    /// Stops in reverse order of start: each actor refuses new messages, handles those it has, and ends. Whoever outlives its own
    /// deadline is killed, and so is the whole tree at `deadline`. Always completes.
    pub async fn stop(&self, deadline: Duration) -> StopOutcome {
        // An error says that it has ended already.
        let _ = self.root.drain();
        if tokio::time::timeout(deadline, self.exited()).await.is_err() {
            tracing::warn!(tree = %self.entries[0].name, ?deadline, "tree killed at its stop deadline");
            self.root.kill();
            let graced = tokio::time::timeout(KILL_GRACE, self.exited()).await;
            return graced.map_or(StopOutcome::Abandoned, |_| StopOutcome::Killed);
        }
        let outcome = |entry: &Arc<Entry>| match entry.state() {
            ActorState::Killed => StopOutcome::Killed,
            ActorState::Abandoned => StopOutcome::Abandoned,
            _ => StopOutcome::Drained,
        };
        let worst = self.entries.iter().map(outcome).max();
        worst.unwrap_or(StopOutcome::Drained)
    }

    pub(crate) fn actors(&self) -> Vec<ActorStats> {
        self.entries.iter().map(|entry| entry.stats()).collect()
    }

    pub(crate) fn has_root(&self, root: &Arc<Entry>) -> bool {
        self.entries.first().is_some_and(|mine| Arc::ptr_eq(mine, root))
    }
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tree").field(&self.entries[0].name).finish()
    }
}

/// Holds the names of a tree while it exists, also when the start is cancelled half-way.
struct Enlisted {
    node: Node,
    entries: Arc<[Arc<Entry>]>,
}

impl Enlisted {
    fn new(node: &Node, entries: Arc<[Arc<Entry>]>) -> Result<Self, StartError> {
        node.enlist(&entries).map_err(|name| StartError::NameTaken { name })?;
        let node = node.clone();
        Ok(Self { node, entries })
    }
}

impl Drop for Enlisted {
    fn drop(&mut self) {
        self.node.delist(&self.entries);
    }
}

/// Turns a spec into what a supervisor runs from; `entries` collects the tree in order, parents first.
fn plan(spec: SupervisorSpec, level: u32, entries: &mut Vec<Arc<Entry>>) -> Arc<Branch> {
    let name = Arc::clone(&spec.name);
    let entry = Arc::new(Entry::new(name, level, ActorKind::Supervisor, None));
    entries.push(Arc::clone(&entry));
    let children: Vec<Child> = spec.children.into_iter().map(|child| plan_child(child, level + 1, entries)).collect();
    Arc::new(Branch {
        entry,
        strategy: spec.strategy,
        intensity: spec.intensity,
        backoff: spec.backoff,
        on_restart: spec.on_restart,
        children,
    })
}

fn plan_child(spec: ChildSpec, level: u32, entries: &mut Vec<Arc<Entry>>) -> Child {
    match spec.0 {
        ChildSpecKind::Actor(parts) => {
            let message = Some(parts.message);
            let entry = Arc::new(Entry::new(parts.name, level, ActorKind::Actor, message));
            entries.push(Arc::clone(&entry));
            Child { entry, restart: parts.restart, stop_deadline: parts.stop_deadline, start: parts.start }
        }
        ChildSpecKind::Supervisor(spec) => {
            let restart = spec.restart;
            let branch = plan(spec, level, entries);
            Child {
                entry: Arc::clone(&branch.entry),
                restart,
                stop_deadline: branch.stop_deadline(),
                start: Arc::new(SupervisorStart(branch)),
            }
        }
    }
}
