//! Supervisors: they start children in order, restart who must be restarted, give up in time, and stop in reverse order.

use crate::entry::{ActorState, Entry};
use crate::node::Node;
use crate::shell::panic_text;
use crate::spec::{Backoff, Intensity, OnRestart, Restart, Strategy};
use ractor::{ActorCell, ActorProcessingErr, ActorRef, ActorStatus, SupervisionEvent};
use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};

/// How long a killed actor may take to let go. Handlers are short, so whoever needs longer is stuck.
pub(crate) const KILL_GRACE: Duration = Duration::from_secs(1);

/// How one life of an actor ended; unset when it was killed.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Clean,
    Crashed(String),
}

/// One life of an actor.
pub(crate) struct Live {
    pub cell: ActorCell,
    /// Completes when its machine is dropped.
    pub handle: JoinHandle<()>,
    pub ending: Arc<OnceLock<Ending>>,
}

pub(crate) type StartFuture = Pin<Box<dyn Future<Output = Result<Live, String>> + Send>>;

/// How to start a child, again and again.
pub(crate) trait Start: Send + Sync {
    fn start(self: Arc<Self>, node: Node, entry: Arc<Entry>, parent: ActorCell) -> StartFuture;
}

/// What a supervisor runs from; survives its restarts.
pub(crate) struct Branch {
    pub entry: Arc<Entry>,
    pub strategy: Strategy,
    pub intensity: Intensity,
    pub backoff: Backoff,
    pub on_restart: Option<OnRestart>,
    pub children: Vec<Child>,
}

pub(crate) struct Child {
    pub entry: Arc<Entry>,
    pub restart: Restart,
    pub stop_deadline: Duration,
    pub start: Arc<dyn Start>,
}

impl Branch {
    /// Long enough for each child to use up its own.
    pub fn stop_deadline(&self) -> Duration {
        let patience = |child: &Child| child.stop_deadline.saturating_add(KILL_GRACE);
        self.children.iter().map(patience).fold(KILL_GRACE, Duration::saturating_add)
    }
}

pub(crate) struct SupervisorStart(pub Arc<Branch>);

impl SupervisorStart {
    pub async fn start_root(&self, node: Node) -> Result<Live, String> {
        let (supervisor, ending) = self.supervisor(node);
        let started = ractor::Actor::spawn(None, supervisor, ()).await;
        Self::live(started, ending)
    }

    fn supervisor(&self, node: Node) -> (Supervisor, Arc<OnceLock<Ending>>) {
        let ending = Arc::new(OnceLock::new());
        let supervisor = Supervisor { branch: Arc::clone(&self.0), node, ending: Arc::clone(&ending) };
        (supervisor, ending)
    }

    fn live(
        started: Result<(ActorRef<Restarts>, JoinHandle<()>), ractor::SpawnErr>,
        ending: Arc<OnceLock<Ending>>,
    ) -> Result<Live, String> {
        match started {
            Ok((supervisor, handle)) => Ok(Live { cell: supervisor.get_cell(), handle, ending }),
            Err(ractor::SpawnErr::StartupFailed(reason)) => Err(reason.to_string()),
            Err(other) => Err(other.to_string()),
        }
    }
}

impl Start for SupervisorStart {
    fn start(self: Arc<Self>, node: Node, _entry: Arc<Entry>, parent: ActorCell) -> StartFuture {
        Box::pin(async move {
            let (supervisor, ending) = self.supervisor(node);
            let started = ractor::Actor::spawn_linked(None, supervisor, (), parent).await;
            Self::live(started, ending)
        })
    }
}

/// A supervisor that is killed while it waits for a child takes the child with it: ractor's own links spare whoever drains.
struct KillOnDrop(ActorCell);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}

struct Supervisor {
    branch: Arc<Branch>,
    node: Node,
    ending: Arc<OnceLock<Ending>>,
}

/// The back-off of those that wait for `epoch` is over.
pub(crate) struct Restarts {
    epoch: u64,
}

impl ractor::Message for Restarts {}

enum ChildState {
    Live(Live),
    /// To be started when `epoch` is due.
    Waiting {
        epoch: u64,
    },
    /// Ended for good, or not started yet.
    Ended,
}

/// Invariants: (S1) `states` and `branch.children` have the same length and order; (S2) for each epoch in a `Waiting` exactly one
/// timer runs or one message waits; (S3) a child is started only when its former life has let go or was abandoned.
struct Group {
    states: Vec<ChildState>,
    /// When children failed, within the intensity's window.
    failures: VecDeque<Instant>,
    /// Failures since this supervisor started: the seed of the jitter.
    failures_total: u64,
    epoch: u64,
    /// Started again, but their group is not complete yet.
    restarted: BTreeSet<usize>,
    timers: JoinSet<()>,
}

impl Supervisor {
    /// Off this task, so that a `started` that does not return cannot keep the supervisor from being killed.
    async fn start_child(&self, myself: &ActorCell, index: usize) -> Result<Live, String> {
        let child = &self.branch.children[index];
        let entry = Arc::clone(&child.entry);
        let start = Arc::clone(&child.start);
        let starting = tokio::spawn(start.start(self.node.clone(), entry, myself.clone()));
        match starting.await {
            Ok(started) => started,
            Err(lost) => Err(lost.to_string()),
        }
    }

    /// Drains one child, kills it at its deadline, and abandons it when even that does not help.
    async fn stop_child(&self, myself: &ActorCell, index: usize, live: Live) {
        let Child { entry, stop_deadline, .. } = &self.branch.children[index];
        entry.set_state(ActorState::Stopping);
        // A linked actor would send its machine along with the news of its end, to be dropped whenever this supervisor reads its
        // events; unlinked, its task drops it before it completes. From here on the guard does what the link did.
        live.cell.unlink(myself.clone());
        let guard = KillOnDrop(live.cell);
        let mut handle = live.handle;
        // An error says that it has ended already.
        let _ = guard.0.drain();
        let state = if timeout(*stop_deadline, &mut handle).await.is_ok() {
            ActorState::Stopped
        } else {
            guard.0.kill();
            match timeout(KILL_GRACE, &mut handle).await {
                Ok(_) => ActorState::Killed,
                Err(_) => ActorState::Abandoned,
            }
        };
        if state != ActorState::Stopped {
            tracing::warn!(actor = %entry.name, ?stop_deadline, ?state, "actor outlived its stop deadline");
        }
        entry.set_state(state);
    }

    /// Last started, first stopped.
    async fn stop_children(&self, myself: &ActorCell, group: &mut Group, range: Range<usize>) {
        for index in range.rev() {
            let state = std::mem::replace(&mut group.states[index], ChildState::Ended);
            match state {
                ChildState::Live(live) => self.stop_child(myself, index, live).await,
                ChildState::Waiting { .. } => {
                    let entry = &self.branch.children[index].entry;
                    entry.set_state(ActorState::Stopped);
                }
                ChildState::Ended => {}
            }
        }
    }

    /// A child ended by itself, or could not be started.
    async fn child_ended(
        &self,
        myself: &ActorRef<Restarts>,
        group: &mut Group,
        (index, ending): (usize, Option<Ending>),
    ) -> Result<(), ActorProcessingErr> {
        let child = &self.branch.children[index];
        let name = &child.entry.name;
        let clean = matches!(ending, Some(Ending::Clean));
        let (settled, reason) = match ending {
            Some(Ending::Clean) => (ActorState::Stopped, "stopped".to_owned()),
            Some(Ending::Crashed(reason)) => (ActorState::Failed, reason),
            None => (ActorState::Killed, "killed".to_owned()),
        };
        let restarts = match child.restart {
            Restart::Permanent => true,
            Restart::Transient => !clean,
            Restart::Temporary => false,
        };
        if !clean {
            tracing::error!(actor = %name, restarts, "actor {reason}");
        }
        group.states[index] = ChildState::Ended;
        child.entry.set_state(settled);
        // A supervisor that is being stopped itself restarts nobody.
        if !restarts || myself.get_status() >= ActorStatus::Draining {
            return Ok(());
        }
        if !group.may_restart(self.branch.intensity) {
            let Intensity { restarts, window } = self.branch.intensity;
            let gave_up = format!("gave up: more than {restarts} restarts within {window:?}, last {name:?} {reason}");
            self.stop_children(myself, group, 0..group.states.len()).await;
            child.entry.set_state(settled);
            self.branch.entry.failures.fetch_add(1, Ordering::Relaxed);
            self.node.hook().failed(&self.branch.entry.name);
            let _ = self.ending.set(Ending::Crashed(gave_up.clone()));
            return Err(gave_up.into());
        }
        self.schedule(myself, group, index).await;
        Ok(())
    }

    /// Stops whoever is restarted with the child and sets the timer for all of them.
    async fn schedule(&self, myself: &ActorRef<Restarts>, group: &mut Group, failed: usize) {
        let range = match self.branch.strategy {
            Strategy::OneForOne => failed..failed + 1,
            Strategy::OneForAll => 0..group.states.len(),
            Strategy::RestForOne => failed..group.states.len(),
        };
        self.stop_children(myself, group, range.clone()).await;
        group.epoch += 1;
        let epoch = group.epoch;
        for index in range {
            let child = &self.branch.children[index];
            if index == failed || child.restart != Restart::Temporary {
                group.states[index] = ChildState::Waiting { epoch };
                child.entry.set_state(ActorState::Restarting);
            }
        }
        let earlier = u32::try_from(group.failures.len() - 1).unwrap_or(u32::MAX);
        let delay = self.branch.backoff.delay(earlier, group.failures_total);
        while group.timers.try_join_next().is_some() {}
        let supervisor = myself.clone();
        group.timers.spawn(async move {
            tokio::time::sleep(delay).await;
            // A supervisor that is gone restarts nobody.
            let _ = supervisor.send_message(Restarts { epoch });
        });
    }

    /// Starts those whose back-off is over, in order; at the first failure the rest waits for the next round.
    async fn restart_due(
        &self,
        myself: &ActorRef<Restarts>,
        group: &mut Group,
        due: u64,
    ) -> Result<(), ActorProcessingErr> {
        for index in 0..group.states.len() {
            if !matches!(group.states[index], ChildState::Waiting { epoch } if epoch == due) {
                continue;
            }
            match self.start_child(&myself.get_cell(), index).await {
                Ok(live) => {
                    group.states[index] = ChildState::Live(live);
                    group.restarted.insert(index);
                }
                Err(reason) => {
                    let ending = Some(Ending::Crashed(reason));
                    return self.child_ended(myself, group, (index, ending)).await;
                }
            }
        }
        for index in std::mem::take(&mut group.restarted) {
            self.report_restart(index);
        }
        Ok(())
    }

    fn report_restart(&self, index: usize) {
        let entry = &self.branch.children[index].entry;
        let number = entry.restarts.fetch_add(1, Ordering::Relaxed) + 1;
        let report = || {
            self.node.hook().restarted(&entry.name);
            if let Some(on_restart) = &self.branch.on_restart {
                on_restart(&entry.name, number);
            }
        };
        // The application's hook must not take the supervisor down with it.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(report)) {
            let reason = panic_text(payload.as_ref());
            tracing::error!(actor = %entry.name, "restart hook panicked: {reason}");
        }
    }
}

impl Group {
    fn new(children: usize) -> Self {
        Self {
            states: (0..children).map(|_| ChildState::Ended).collect(),
            failures: VecDeque::new(),
            failures_total: 0,
            epoch: 0,
            restarted: BTreeSet::new(),
            timers: JoinSet::new(),
        }
    }

    /// Counts a failure; false when it is one too many.
    fn may_restart(&mut self, intensity: Intensity) -> bool {
        let now = Instant::now();
        let outdated = |at: &Instant| now.duration_since(*at) > intensity.window;
        while self.failures.front().is_some_and(outdated) {
            self.failures.pop_front();
        }
        self.failures.push_back(now);
        self.failures_total += 1;
        self.failures.len() <= usize::try_from(intensity.restarts).unwrap_or(usize::MAX)
    }

    /// Takes out the child whose present life is `cell`; none for an earlier life, whose end was expected.
    fn take_live(&mut self, cell: &ActorCell) -> Option<(usize, Live)> {
        let index = self
            .states
            .iter()
            .position(|state| matches!(state, ChildState::Live(live) if live.cell.get_id() == cell.get_id()))?;
        match std::mem::replace(&mut self.states[index], ChildState::Ended) {
            ChildState::Live(live) => Some((index, live)),
            ChildState::Waiting { .. } | ChildState::Ended => None,
        }
    }
}

impl ractor::Actor for Supervisor {
    type Msg = Restarts;
    type State = Group;
    type Arguments = ();

    async fn pre_start(&self, myself: ActorRef<Restarts>, (): ()) -> Result<Group, ActorProcessingErr> {
        self.branch.entry.begin::<()>(None);
        let mut group = Group::new(self.branch.children.len());
        for index in 0..group.states.len() {
            match self.start_child(&myself.get_cell(), index).await {
                Ok(live) => group.states[index] = ChildState::Live(live),
                Err(reason) => {
                    let entry = &self.branch.children[index].entry;
                    entry.set_state(ActorState::Failed);
                    self.stop_children(&myself, &mut group, 0..index).await;
                    let name = &entry.name;
                    return Err(format!("child {name:?} {reason}").into());
                }
            }
        }
        self.branch.entry.set_state(ActorState::Running);
        Ok(group)
    }

    async fn handle(
        &self,
        myself: ActorRef<Restarts>,
        Restarts { epoch }: Restarts,
        group: &mut Group,
    ) -> Result<(), ActorProcessingErr> {
        self.restart_due(&myself, group, epoch).await
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Restarts>,
        event: SupervisionEvent,
        group: &mut Group,
    ) -> Result<(), ActorProcessingErr> {
        let cell = match event {
            SupervisionEvent::ActorTerminated(cell, last_state, _) => {
                // The machine goes before its successor is made.
                drop(last_state);
                cell
            }
            SupervisionEvent::ActorFailed(cell, _) => cell,
            SupervisionEvent::ActorStarted(_)
            | SupervisionEvent::ProcessGroupChanged(_)
            | SupervisionEvent::PidLifecycleEvent(_) => return Ok(()),
        };
        let Some((index, live)) = group.take_live(&cell) else {
            return Ok(());
        };
        // The task ends right after its event; its machine goes with it.
        if timeout(KILL_GRACE, live.handle).await.is_err() {
            let name = &self.branch.children[index].entry.name;
            tracing::warn!(actor = %name, "a failed actor's machine is still being dropped");
        }
        let ending = live.ending.get().cloned();
        self.child_ended(&myself, group, (index, ending)).await
    }

    async fn post_stop(&self, myself: ActorRef<Restarts>, group: &mut Group) -> Result<(), ActorProcessingErr> {
        self.stop_children(&myself, group, 0..group.states.len()).await;
        self.branch.entry.set_state(ActorState::Stopped);
        let _ = self.ending.set(Ending::Clean);
        Ok(())
    }
}
