//! The consensus group's log, as a life of this member sees it: entries in one order, the same for all.
//!
//! Who keeps it is for the node to say. [`LocalLogs`] keeps it for lives in one process, where there is nobody to agree with.

use serde::{Deserialize, Serialize};
use starling_core::ids::{ClusterId, Incarnation};
use starling_core::membership::{Agreed, Command, Consensus, Place};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the log holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// The first one: those who found the cluster together.
    Founded {
        cluster: ClusterId,
        members: Vec<Place>,
    },
    Command(Command),
}

/// What a life hears of the log, in order.
#[derive(Clone, Debug)]
pub enum News {
    /// The cluster that it founds with others.
    Founded {
        cluster: ClusterId,
        members: Vec<Place>,
    },
    /// A cluster that goes on already, as its log stands.
    Restored(Box<Agreed>),
    Committed {
        index: u64,
        command: Command,
    },
    /// Who leads, who votes, and whom the leader reaches.
    Consensus(Consensus),
}

/// Where a life wants its news.
pub type Sink = Arc<dyn Fn(News) + Send + Sync>;

/// Opens the log for each life of this member.
pub trait Logs: Send + Sync + 'static {
    /// The life before may still be heard of: it votes until it need not.
    fn open(&self, life: Incarnation, sink: Sink) -> Box<dyn Log>;
}

/// The log, to one life. Dropped, the life leaves it as soon as nobody needs its vote.
pub trait Log: Send + Sync + 'static {
    /// To all, if this life leads; it may be lost.
    fn propose(&self, command: Command);

    /// All who found the cluster say so alike.
    fn found(&self, cluster: ClusterId, members: Vec<Place>);

    /// A life of a member can be reached, or not any more.
    fn linked(&self, life: Incarnation, name: &str, up: bool);
}

/// The state of the log, by its entries: what is kept instead of those that are applied.
#[derive(Clone, Debug)]
pub struct Keeper {
    life: Incarnation,
    members_max: usize,
    agreed: Option<Agreed>,
}

impl Keeper {
    pub fn new(life: Incarnation, members_max: usize) -> Self {
        Self { life, members_max, agreed: None }
    }

    /// Takes the entry at `index`. A second foundation is none.
    pub fn apply(&mut self, index: u64, entry: Entry) -> Option<News> {
        match entry {
            Entry::Founded { cluster, members } if self.agreed.is_none() => {
                let founds = members.iter().any(|member| member.incarnation == self.life);
                let agreed = Agreed::founded(cluster, members.clone(), self.members_max);
                self.agreed = Some(agreed.clone());
                Some(match founds {
                    true => News::Founded { cluster, members },
                    false => News::Restored(Box::new(agreed)),
                })
            }
            Entry::Founded { .. } => None,
            Entry::Command(command) => {
                self.agreed.as_mut()?.apply(index, &command);
                Some(News::Committed { index, command })
            }
        }
    }

    pub fn restore(&mut self, agreed: Agreed) -> News {
        self.agreed = Some(agreed.clone());
        News::Restored(Box::new(agreed))
    }

    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }
}

/// Logs for lives in one process: the oldest one leads.
#[derive(Clone)]
pub struct LocalLogs {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    members_max: usize,
    index: u64,
    lives: Vec<(Keeper, Sink)>,
}

impl LocalLogs {
    pub fn new(members_max: usize) -> Self {
        Self { shared: Arc::new(Mutex::new(Shared { members_max, index: 0, lives: Vec::new() })) }
    }
}

impl Shared {
    fn append(&mut self, entry: &Entry) {
        self.index += 1;
        for (keeper, sink) in &mut self.lives {
            if let Some(news) = keeper.apply(self.index, entry.clone()) {
                sink(news);
            }
        }
    }

    fn tell_consensus(&self) {
        let leader = self.lives.first().map(|(keeper, _)| keeper.life);
        let reached: Vec<Incarnation> = leader.into_iter().collect();
        for (_, sink) in &self.lives {
            sink(News::Consensus(Consensus { leader, voters: reached.clone(), reached: reached.clone() }));
        }
    }
}

impl Logs for LocalLogs {
    fn open(&self, life: Incarnation, sink: Sink) -> Box<dyn Log> {
        let mut shared = locked(&self.shared);
        let mut keeper = Keeper::new(life, shared.members_max);
        // Of lives that are all gone nothing is left to go on with.
        let agreed = shared.lives.iter().find_map(|(keeper, _)| keeper.agreed().cloned());
        if let Some(agreed) = agreed {
            sink(keeper.restore(agreed));
        }
        shared.lives.push((keeper, sink));
        shared.tell_consensus();
        Box::new(LocalLog { shared: Arc::clone(&self.shared), life })
    }
}

struct LocalLog {
    shared: Arc<Mutex<Shared>>,
    life: Incarnation,
}

impl Log for LocalLog {
    fn propose(&self, command: Command) {
        locked(&self.shared).append(&Entry::Command(command));
    }

    fn found(&self, cluster: ClusterId, members: Vec<Place>) {
        let mut shared = locked(&self.shared);
        if shared.lives.iter().all(|(keeper, _)| keeper.agreed().is_none()) {
            shared.append(&Entry::Founded { cluster, members });
        }
    }

    fn linked(&self, _: Incarnation, _: &str, _: bool) {}
}

impl Drop for LocalLog {
    fn drop(&mut self) {
        let mut shared = locked(&self.shared);
        shared.lives.retain(|(keeper, _)| keeper.life != self.life);
        shared.tell_consensus();
    }
}

fn locked(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
