//! The consensus group of a cluster of several nodes: openraft, in memory, over the mesh.
//!
//! Each life of this member is a node of the group by its incarnation. Whoever leads takes lives that are linked in as
//! learners, makes the first members of the view the voters, and lets go of lives that are gone. A life that was evicted votes on
//! until the voters are changed, for a while at most.

mod network;
mod store;

use network::{ACTOR, Lives, Message, Network, Port};
use openraft::error::InitializeError;
use openraft::{BasicNode, ChangeMembers, Config, Raft, RaftMetrics, SnapshotPolicy};
use starling_actors::{ActorSpec, Node, StartError, Strategy, SupervisorSpec};
use starling_core::ids::{ClusterId, Incarnation};
use starling_core::membership::{Command, Consensus, Place, voters};
use starling_serving::log::{Entry, Keeper, Log, Logs, News, Sink};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use store::{Applied, Store, Types};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// Bounds of the group.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub members_max: usize,
    /// An election begins when a leader was silent for a time between this and twice this.
    pub election: Duration,
    /// How long a life that was evicted votes on at most.
    pub votes_on: Duration,
}

/// How often a leader looks whether the group is as it should be.
const TEND_EVERY: Duration = Duration::from_millis(100);
/// How long one change of the group may take before it is tried again.
const TEND_WITHIN: Duration = Duration::from_secs(2);
/// Entries after which the log is cut: there are two for each change of the view.
const ENTRIES_KEPT: u64 = 256;

/// Opens the log for the lives of one node.
pub struct RaftLogs {
    node: Node,
    lives: Lives,
    config: Arc<Config>,
    bounds: Bounds,
}

impl RaftLogs {
    /// Starts to answer for this node's lives. Questions come over the mesh.
    ///
    /// # Errors
    /// The actor's name is taken.
    pub async fn start(node: &Node, bounds: Bounds) -> Result<Self, StartError> {
        let lives = Lives::default();
        let port = {
            let lives = lives.clone();
            ActorSpec::new(ACTOR, move || Port(lives.clone()))
        };
        node.start(SupervisorSpec::new("group", Strategy::OneForOne).child(port)).await?;
        node.expose::<Message>(ACTOR);
        let election_ms = u64::try_from(bounds.election.as_millis()).unwrap_or(u64::MAX).max(10);
        let config = Config {
            cluster_name: "starling".to_owned(),
            heartbeat_interval: election_ms / 5,
            election_timeout_min: election_ms,
            election_timeout_max: election_ms.saturating_mul(2),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(ENTRIES_KEPT),
            max_in_snapshot_log_to_keep: ENTRIES_KEPT,
            ..Config::default()
        };
        Ok(Self { node: node.clone(), lives, config: Arc::new(config), bounds })
    }
}

impl Logs for RaftLogs {
    fn open(&self, life: Incarnation, sink: Sink) -> Box<dyn Log> {
        let (orders, inbox) = unbounded_channel();
        let member = Member {
            life,
            name: self.node.name().to_owned(),
            lives: self.lives.clone(),
            bounds: self.bounds,
            sink: Arc::clone(&sink),
            applied: Applied::new(Keeper::new(life, self.bounds.members_max), sink),
            linked: BTreeMap::new(),
            founding: None,
            told: Consensus::default(),
            tending: None,
        };
        let (config, network) = (Arc::clone(&self.config), Network(self.node.clone()));
        tokio::spawn(async move {
            if let Err(error) = member.run(config, network, inbox).await {
                tracing::error!(%error, "the consensus group of this life ended");
            }
        });
        Box::new(RaftLog(orders))
    }
}

enum Order {
    Propose(Command),
    Found { cluster: ClusterId, members: Vec<Place> },
    Linked { life: Incarnation, name: String, up: bool },
}

struct RaftLog(UnboundedSender<Order>);

impl RaftLog {
    fn order(&self, order: Order) {
        // A group that has ended takes no orders, and its life hears of no entries: it stands still, and says so.
        let _ = self.0.send(order);
    }
}

impl Log for RaftLog {
    fn propose(&self, command: Command) {
        self.order(Order::Propose(command));
    }

    fn found(&self, cluster: ClusterId, members: Vec<Place>) {
        self.order(Order::Found { cluster, members });
    }

    fn linked(&self, life: Incarnation, name: &str, up: bool) {
        self.order(Order::Linked { life, name: name.to_owned(), up });
    }
}

/// One life in the group.
struct Member {
    life: Incarnation,
    name: String,
    lives: Lives,
    bounds: Bounds,
    sink: Sink,
    applied: Applied,
    /// Lives that can be reached, and the names of their nodes.
    linked: BTreeMap<u64, String>,
    founding: Option<Entry>,
    told: Consensus,
    tending: Option<JoinHandle<()>>,
}

/// One change of the group.
enum Step {
    Found(Entry),
    /// Takes a life in, which hears of all entries.
    Learn {
        life: u64,
        name: String,
    },
    /// Makes those the voters.
    Vote(BTreeSet<u64>),
    LetGo(BTreeSet<u64>),
}

/// What fails is tried again: the group is looked at every time.
async fn take(raft: Raft<Types>, step: Step) {
    let change = async {
        match step {
            Step::Found(founding) => raft.client_write(founding).await.map(drop),
            Step::Learn { life, name } => raft.add_learner(life, BasicNode::new(name), false).await.map(drop),
            Step::Vote(voters) => raft.change_membership(voters, true).await.map(drop),
            Step::LetGo(gone) => raft.change_membership(ChangeMembers::RemoveNodes(gone), true).await.map(drop),
        }
    };
    if let Ok(Err(error)) = timeout(TEND_WITHIN, change).await {
        tracing::debug!(%error, "the consensus group does not change");
    }
}

type Metrics = RaftMetrics<u64, BasicNode>;

impl Member {
    async fn run(
        mut self,
        config: Arc<Config>,
        network: Network,
        mut inbox: UnboundedReceiver<Order>,
    ) -> Result<(), openraft::error::Fatal<u64>> {
        let raft = Raft::new(self.life.0, config, network, Store::default(), self.applied.clone()).await?;
        self.lives.add(self.life.0, raft.clone());
        let mut metrics = raft.metrics();
        let mut ticks = interval(TEND_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                order = inbox.recv() => match order {
                    Some(order) => self.obey(&raft, order).await,
                    None => break,
                },
                changed = metrics.changed() => if changed.is_err() { break },
                _ = ticks.tick() => {
                    let seen = metrics.borrow().clone();
                    self.tend(&raft, &seen);
                }
            }
            let seen = metrics.borrow_and_update().clone();
            self.tell(&seen);
        }
        self.retire(&raft, &mut ticks).await;
        Ok(())
    }

    async fn obey(&mut self, raft: &Raft<Types>, order: Order) {
        match order {
            Order::Propose(command) => {
                let raft = raft.clone();
                // The leader of changes proposes again what did not come through.
                tokio::spawn(async move { raft.client_write(Entry::Command(command)).await });
            }
            Order::Found { cluster, members } => {
                let first = voters(&members, None);
                let named = members.iter().filter(|member| first.contains(&member.incarnation));
                let voters: BTreeMap<u64, BasicNode> =
                    named.map(|member| (member.incarnation.0, BasicNode::new(&*member.name.0))).collect();
                self.founding = Some(Entry::Founded { cluster, members });
                if !voters.contains_key(&self.life.0) {
                    return;
                }
                match raft.initialize(voters).await {
                    // It heard from another founder before.
                    Ok(()) | Err(openraft::error::RaftError::APIError(InitializeError::NotAllowed(_))) => {}
                    Err(error) => tracing::error!(%error, "the consensus group does not begin"),
                }
            }
            Order::Linked { life, name, up: true } => _ = self.linked.insert(life.0, name),
            Order::Linked { life, up: false, .. } => _ = self.linked.remove(&life.0),
        }
    }

    /// Says how the group stands, whenever that changes.
    fn tell(&mut self, seen: &Metrics) {
        let leads = seen.current_leader == Some(self.life.0);
        let voters: Vec<u64> = seen.membership_config.voter_ids().collect();
        let reached = voters.iter().filter(|voter| leads && self.reaches(seen, **voter));
        let consensus = Consensus {
            leader: seen.current_leader.map(Incarnation),
            reached: reached.map(|voter| Incarnation(*voter)).collect(),
            voters: voters.iter().map(|voter| Incarnation(*voter)).collect(),
        };
        if consensus != self.told {
            self.told = consensus.clone();
            (self.sink)(News::Consensus(consensus));
        }
    }

    /// A former life of a node that is linked votes on there.
    fn reaches(&self, seen: &Metrics, voter: u64) -> bool {
        let name = seen.membership_config.membership().get_node(&voter).map(|node| &node.addr);
        voter == self.life.0 || name.is_some_and(|name| *name == self.name || self.linked.values().any(|l| l == name))
    }

    /// As the leader: what brings the group closer to what it should be.
    fn step(&self, seen: &Metrics) -> Option<Step> {
        if seen.current_leader != Some(self.life.0) {
            return None;
        }
        let Some(agreed) = self.applied.look(|keeper| keeper.agreed().cloned()) else {
            return self.founding.clone().map(Step::Found);
        };
        let group = seen.membership_config.membership();
        let known: BTreeSet<u64> = group.nodes().map(|(life, _)| *life).collect();
        if let Some((life, name)) = self.linked.iter().find(|(life, _)| !known.contains(life)) {
            return Some(Step::Learn { life: *life, name: name.clone() });
        }
        if agreed.pending.is_some() {
            return None;
        }
        let now: BTreeSet<u64> = group.voter_ids().collect();
        let wanted: BTreeSet<u64> = voters(&agreed.members, None).into_iter().map(|voter| voter.0).collect();
        if now != wanted && wanted.is_subset(&known) {
            return Some(Step::Vote(wanted));
        }
        let is_gone = |life: &u64| {
            let is_member = agreed.position(Incarnation(*life)).is_some();
            !now.contains(life) && !is_member && !self.linked.contains_key(life) && *life != self.life.0
        };
        let gone: BTreeSet<u64> = known.into_iter().filter(is_gone).collect();
        (!gone.is_empty()).then_some(Step::LetGo(gone))
    }

    /// Takes the next step, unless one is under way: without a majority it is not done before its time is over.
    fn tend(&mut self, raft: &Raft<Types>, seen: &Metrics) {
        if self.tending.as_ref().is_none_or(JoinHandle::is_finished)
            && let Some(step) = self.step(seen)
        {
            self.tending = Some(tokio::spawn(take(raft.clone(), step)));
        }
    }

    /// The life is over: it votes until nobody needs its vote.
    async fn retire(mut self, raft: &Raft<Types>, ticks: &mut tokio::time::Interval) {
        let until = Instant::now() + self.bounds.votes_on;
        while Instant::now() < until {
            let seen = raft.metrics().borrow().clone();
            if !seen.membership_config.voter_ids().any(|voter| voter == self.life.0) {
                break;
            }
            self.tend(raft, &seen);
            ticks.tick().await;
        }
        self.lives.remove(self.life.0);
        let _ = raft.shutdown().await;
    }
}
