//! What a node knows of each of its actors, whichever machine runs under the name just now.

use crate::address::Mailbox;
use std::any::TypeId;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Where an actor is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum ActorState {
    /// Its factory or `started` runs.
    Starting,
    Running,
    /// It failed, or its group did, and it waits for its back-off.
    Restarting,
    /// It handles what is left in its mailbox and then ends.
    Stopping,
    /// It ended in order and will not come back by itself.
    Stopped,
    /// It failed and its supervisor does not restart it.
    Failed,
    /// It outlived its stop deadline and was killed.
    Killed,
    /// It outlived even the kill: a handler does not return.
    Abandoned,
}

impl ActorState {
    const ALL: [Self; 8] = [
        Self::Starting,
        Self::Running,
        Self::Restarting,
        Self::Stopping,
        Self::Stopped,
        Self::Failed,
        Self::Killed,
        Self::Abandoned,
    ];
}

/// What kind of node of the supervision tree this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActorKind {
    Supervisor,
    Actor,
}

/// One line of the supervision tree.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ActorStats {
    pub name: Arc<str>,
    pub kind: ActorKind,
    /// 0 for the root of a tree.
    pub level: u32,
    pub state: ActorState,
    /// Messages waiting.
    pub depth: u32,
    /// None where the mailbox has no limit.
    pub mailbox_messages_max: Option<u32>,
    /// Messages handled since the name was first started, over all restarts.
    pub handled: u64,
    pub restarts: u64,
    /// Panics and errors.
    pub failures: u64,
    /// Since the last start; zero when it does not run.
    pub uptime: Duration,
}

/// The part of a mailbox that needs no message type.
pub(crate) trait Control: Send + Sync {
    fn depth(&self) -> u32;
    fn limit(&self) -> Option<u32>;
    fn inject_panic(&self) -> bool;
    /// Nothing more will be handled.
    fn is_dead(&self) -> bool;
}

pub(crate) struct Entry {
    pub name: Arc<str>,
    pub kind: ActorKind,
    pub level: u32,
    /// The message an actor takes; none for supervisors.
    pub message: Option<(TypeId, &'static str)>,
    pub handled: AtomicU64,
    pub restarts: AtomicU64,
    pub failures: AtomicU64,
    state: AtomicU8,
    live: Mutex<Option<Life>>,
}

#[derive(Clone)]
struct Life {
    since: Instant,
    control: Option<Arc<dyn Control>>,
}

impl Entry {
    pub fn new(name: Arc<str>, level: u32, kind: ActorKind, message: Option<(TypeId, &'static str)>) -> Self {
        Self {
            name,
            kind,
            level,
            message,
            handled: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            state: AtomicU8::new(ActorState::Starting as u8),
            live: Mutex::new(None),
        }
    }

    pub fn state(&self) -> ActorState {
        ActorState::ALL[usize::from(self.state.load(Ordering::Relaxed))]
    }

    pub fn set_state(&self, state: ActorState) {
        self.state.store(state as u8, Ordering::Relaxed);
        if !matches!(state, ActorState::Starting | ActorState::Running | ActorState::Stopping) {
            *self.live.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// A machine was made for this name.
    pub fn begin<M: Send + 'static>(&self, mailbox: Option<&Arc<Mailbox<M>>>) {
        let life =
            Life { since: Instant::now(), control: mailbox.map(|mailbox| Arc::clone(mailbox) as Arc<dyn Control>) };
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(life);
        self.set_state(ActorState::Starting);
    }

    /// False when the actor does not run.
    pub fn inject_panic(&self) -> bool {
        self.life().and_then(|life| life.control).is_some_and(|control| control.inject_panic())
    }

    pub fn stats(&self) -> ActorStats {
        let life = self.life();
        let control = life.as_ref().and_then(|life| life.control.as_ref());
        ActorStats {
            name: Arc::clone(&self.name),
            kind: self.kind,
            level: self.level,
            state: self.state(),
            depth: control.map_or(0, |control| control.depth()),
            mailbox_messages_max: control.and_then(|control| control.limit()),
            handled: self.handled.load(Ordering::Relaxed),
            restarts: self.restarts.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            uptime: life.map_or(Duration::ZERO, |life| life.since.elapsed()),
        }
    }

    fn life(&self) -> Option<Life> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
