//! What to supervise and how: plain descriptions, turned into a running tree by `Node::start`.

use crate::Actor;
use crate::shell::ActorStart;
use crate::supervisor::Start;
use std::any::TypeId;
use std::sync::Arc;
use std::time::Duration;

/// How long an actor may drain its mailbox when it is stopped, unless its spec says otherwise.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Whether an actor that ended is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Restart {
    /// However it ended.
    #[default]
    Permanent,
    /// Only after a panic, an error or a kill.
    Transient,
    /// Never.
    Temporary,
}

/// Who is restarted with a failed child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The child alone.
    OneForOne,
    /// All children.
    OneForAll,
    /// The child and those listed after it.
    RestForOne,
}

/// A supervisor gives up at more than `restarts` failures within `window`; then its own supervisor decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intensity {
    pub restarts: u32,
    pub window: Duration,
}

impl Default for Intensity {
    /// Enough for a burst of bad input, too few for a machine that cannot start.
    fn default() -> Self {
        Self { restarts: 5, window: Duration::from_secs(10) }
    }
}

/// How long to wait before a restart: doubles with every failure inside the intensity's window, up to a cap, less a jitter of up
/// to a quarter so that many actors that fail together do not return together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(10), max: Duration::from_secs(5) }
    }
}

impl Backoff {
    /// Restarts at once, every time.
    pub const NONE: Self = Self { first: Duration::ZERO, max: Duration::ZERO };

    /// The wait before a restart, `earlier` failures being remembered. The jitter is a hash of `seed`: no randomness.
    pub fn delay(&self, earlier: u32, seed: u64) -> Duration {
        let doublings = 1u32.checked_shl(earlier).unwrap_or(u32::MAX);
        let full = self.first.saturating_mul(doublings).min(self.max);
        let nanos = u64::try_from(full.as_nanos()).unwrap_or(u64::MAX);
        let quarter = u128::from(nanos / 4);
        let jitter = (quarter * u128::from(scramble(seed))) >> 64;
        full - Duration::from_nanos(u64::try_from(jitter).unwrap_or(u64::MAX))
    }
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014): consecutive seeds give unrelated numbers.
fn scramble(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An actor to supervise.
pub struct ActorSpec {
    name: Arc<str>,
    restart: Restart,
    stop_deadline: Duration,
    mailbox_messages_max: Option<u32>,
    message: (TypeId, &'static str),
    start: Box<dyn FnOnce(Option<u32>) -> Arc<dyn Start> + Send>,
}

impl ActorSpec {
    /// An actor called `name`, whose machine comes from `factory`: a fresh one at each start.
    pub fn new<A: Actor>(name: impl Into<Arc<str>>, factory: impl Fn() -> A + Send + Sync + 'static) -> Self {
        Self {
            name: name.into(),
            restart: Restart::default(),
            stop_deadline: STOP_DEADLINE,
            mailbox_messages_max: None,
            message: (TypeId::of::<A::Message>(), std::any::type_name::<A::Message>()),
            start: Box::new(|mailbox_messages_max| Arc::new(ActorStart { factory, mailbox_messages_max })),
        }
    }

    pub fn restart(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    /// Messages that may wait; beyond it a send fails with `SendError::Full`. Without it the mailbox has no limit.
    pub fn mailbox_messages_max(mut self, messages: u32) -> Self {
        self.mailbox_messages_max = Some(messages);
        self
    }

    /// How long it may drain its mailbox when stopped; then it is killed.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.stop_deadline = deadline;
        self
    }
}

/// Told about each restarted child, with the number of its restarts so far.
pub(crate) type OnRestart = Arc<dyn Fn(&str, u64) + Send + Sync>;

/// A supervisor and its children, in the order in which they start. They stop in reverse.
pub struct SupervisorSpec {
    pub(crate) name: Arc<str>,
    pub(crate) restart: Restart,
    pub(crate) strategy: Strategy,
    pub(crate) intensity: Intensity,
    pub(crate) backoff: Backoff,
    pub(crate) on_restart: Option<OnRestart>,
    pub(crate) children: Vec<ChildSpec>,
}

impl SupervisorSpec {
    pub fn new(name: impl Into<Arc<str>>, strategy: Strategy) -> Self {
        Self {
            name: name.into(),
            restart: Restart::default(),
            strategy,
            intensity: Intensity::default(),
            backoff: Backoff::default(),
            on_restart: None,
            children: Vec::new(),
        }
    }

    /// Adds a child: an [`ActorSpec`] or another [`SupervisorSpec`].
    pub fn child(mut self, child: impl Into<ChildSpec>) -> Self {
        self.children.push(child.into());
        self
    }

    /// What its own supervisor does when this one gives up. Nobody restarts the root of a tree.
    pub fn restart(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    pub fn intensity(mut self, restarts: u32, window: Duration) -> Self {
        self.intensity = Intensity { restarts, window };
        self
    }

    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Called after a group's restart is complete, for each restarted child in order, with the number of its restarts so far: the
    /// place to tell other actors. It runs on the supervisor, so it must not block.
    pub fn on_restart(mut self, hook: impl Fn(&str, u64) + Send + Sync + 'static) -> Self {
        self.on_restart = Some(Arc::new(hook));
        self
    }
}

/// A child of a supervisor.
pub struct ChildSpec(pub(crate) ChildSpecKind);

pub(crate) enum ChildSpecKind {
    Actor(ActorParts),
    Supervisor(SupervisorSpec),
}

pub(crate) struct ActorParts {
    pub name: Arc<str>,
    pub restart: Restart,
    pub stop_deadline: Duration,
    pub message: (TypeId, &'static str),
    pub start: Arc<dyn Start>,
}

impl From<ActorSpec> for ChildSpec {
    fn from(spec: ActorSpec) -> Self {
        Self(ChildSpecKind::Actor(ActorParts {
            name: spec.name,
            restart: spec.restart,
            stop_deadline: spec.stop_deadline,
            message: spec.message,
            start: (spec.start)(spec.mailbox_messages_max),
        }))
    }
}

impl From<SupervisorSpec> for ChildSpec {
    fn from(spec: SupervisorSpec) -> Self {
        Self(ChildSpecKind::Supervisor(spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_doubles_up_to_its_cap_and_jitter_takes_at_most_a_quarter() {
        let backoff = Backoff { first: Duration::from_millis(10), max: Duration::from_millis(100) };
        for (earlier, full_ms) in [(0, 10), (1, 20), (2, 40), (3, 80), (4, 100), (40, 100)] {
            for seed in 0..100 {
                let delay = backoff.delay(earlier, seed);
                let full = Duration::from_millis(full_ms);
                assert!(delay <= full && delay >= full * 3 / 4, "{earlier} {delay:?}");
            }
        }
    }

    #[test]
    fn jitter_depends_on_the_counter_alone() {
        let backoff = Backoff::default();
        let delays = |from: u64| (from..from + 16).map(|seed| backoff.delay(9, seed));
        assert!(delays(0).eq(delays(0)));
        let mut distinct: Vec<_> = delays(0).collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 16);
        assert_eq!(Backoff::NONE.delay(3, 9), Duration::ZERO);
    }
}
