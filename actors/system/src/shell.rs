//! The ractor actor around every machine: it counts, measures, catches panics and publishes the mailbox.

use crate::address::{Envelope, Mailbox, Slot};
use crate::context::{Context, Surroundings};
use crate::entry::{ActorState, Entry};
use crate::node::Node;
use crate::supervisor::{Ending, Live, Start, StartFuture};
use crate::trace::TraceContext;
use crate::{Actor, ActorError, Address};
use ractor::{ActorCell, ActorProcessingErr, ActorRef};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::task::JoinSet;

/// One message in this many is timed: two clock reads for every message would cost more than most handlers.
const TIMED_ONE_IN: u64 = 64;

/// How a machine failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Crash {
    #[error("panicked: {0}")]
    Panicked(String),
    #[error("failed: {0}")]
    Failed(String),
}

/// Runs the actor's code; a panic becomes a value.
fn guarded<T>(run: impl FnOnce() -> Result<T, ActorError>) -> Result<T, Crash> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Crash::Failed(error.to_string())),
        Err(payload) => Err(Crash::Panicked(panic_text(payload.as_ref()))),
    }
}

pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "with a payload that is no text".to_owned())
}

/// How to make one actor, again and again.
pub(crate) struct ActorStart<F> {
    pub factory: F,
    pub mailbox_messages_max: Option<u32>,
}

impl<A: Actor, F: Fn() -> A + Send + Sync + 'static> Start for ActorStart<F> {
    fn start(self: Arc<Self>, node: Node, entry: Arc<Entry>, parent: ActorCell) -> StartFuture {
        Box::pin(async move {
            let ending = Arc::new(OnceLock::new());
            let shell = Shell {
                slot: node.slot::<A::Message>(&entry.name),
                start: self,
                node,
                entry,
                ending: Arc::clone(&ending),
            };
            let (actor, handle) =
                ractor::Actor::spawn_linked(None, shell, (), parent).await.map_err(|error| match error {
                    ractor::SpawnErr::StartupFailed(crash) => crash.to_string(),
                    other => other.to_string(),
                })?;
            Ok(Live { cell: actor.get_cell(), handle, ending })
        })
    }
}

struct Shell<A: Actor, F> {
    start: Arc<ActorStart<F>>,
    slot: Arc<Slot<A::Message>>,
    node: Node,
    entry: Arc<Entry>,
    ending: Arc<OnceLock<Ending>>,
}

/// A machine while it lives.
struct Running<A: Actor> {
    machine: A,
    around: Surroundings<A::Message>,
    _published: Published<A::Message>,
}

/// While it exists the name leads to the mailbox.
struct Published<M: Send + 'static> {
    slot: Arc<Slot<M>>,
    mailbox: Arc<Mailbox<M>>,
}

impl<M: Send + 'static> Published<M> {
    fn new(slot: Arc<Slot<M>>, mailbox: Arc<Mailbox<M>>) -> Self {
        slot.publish(Arc::clone(&mailbox));
        Self { slot, mailbox }
    }
}

impl<M: Send + 'static> Drop for Published<M> {
    fn drop(&mut self) {
        self.slot.withdraw(&self.mailbox);
    }
}

impl<A: Actor, F: Fn() -> A + Send + Sync + 'static> Shell<A, F> {
    /// Fences the mailbox first: nobody may send to a machine that failed, nor mistake a dropped question for a refusal.
    fn crashed(&self, mailbox: &Arc<Mailbox<A::Message>>, crash: Crash) -> ActorProcessingErr {
        mailbox.mark_failed();
        self.slot.withdraw(mailbox);
        self.entry.failures.fetch_add(1, Ordering::Relaxed);
        self.node.hook().failed(&self.entry.name);
        let _ = self.ending.set(Ending::Crashed(crash.to_string()));
        crash.into()
    }

    fn take(&self, running: &mut Running<A>, trace: TraceContext, message: A::Message) -> Result<(), Crash> {
        running.around.mailbox.taken();
        let handled = self.entry.handled.fetch_add(1, Ordering::Relaxed);
        let timed = handled.is_multiple_of(TIMED_ONE_IN).then(|| (A::kind(&message), Instant::now()));
        let mut context = Context { around: &mut running.around, trace };
        let machine = &mut running.machine;
        let outcome = guarded(|| machine.handle(&mut context, message));
        if let Some((kind, start)) = timed {
            let seconds = start.elapsed().as_secs_f64();
            self.node.hook().handled(&self.entry.name, kind, seconds);
        }
        outcome
    }
}

impl<A: Actor, F: Fn() -> A + Send + Sync + 'static> ractor::Actor for Shell<A, F> {
    type Msg = Envelope<A::Message>;
    type State = Running<A>;
    type Arguments = ();

    async fn pre_start(&self, myself: ActorRef<Self::Msg>, (): ()) -> Result<Self::State, ActorProcessingErr> {
        let mailbox = Arc::new(Mailbox::new(myself, self.start.mailbox_messages_max));
        self.entry.begin(Some(&mailbox));
        let published = Published::new(Arc::clone(&self.slot), Arc::clone(&mailbox));
        let mut around = Surroundings {
            node: self.node.clone(),
            entry: Arc::clone(&self.entry),
            address: Address::local(Arc::clone(&self.slot)),
            mailbox: Arc::clone(&mailbox),
            timers: JoinSet::new(),
        };
        let machine = guarded(|| {
            let mut machine = (self.start.factory)();
            machine.started(&mut Context { around: &mut around, trace: TraceContext::NONE })?;
            Ok(machine)
        })
        .map_err(|crash| self.crashed(&mailbox, crash))?;
        self.entry.set_state(ActorState::Running);
        Ok(Running { machine, around, _published: published })
    }

    async fn handle(
        &self,
        _myself: ActorRef<Self::Msg>,
        envelope: Self::Msg,
        running: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        let outcome = match envelope {
            Envelope::Tell { trace, message, permit } => {
                drop(permit);
                self.take(running, trace, message)
            }
            Envelope::Panic => guarded(|| panic!("injected by a test")),
        };
        outcome.map_err(|crash| self.crashed(&running.around.mailbox, crash))
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<Self::Msg>,
        running: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        let mut context = Context { around: &mut running.around, trace: TraceContext::NONE };
        let machine = &mut running.machine;
        guarded(|| {
            machine.stopped(&mut context);
            Ok(())
        })
        .map_err(|crash| self.crashed(&running.around.mailbox, crash))?;
        let _ = self.ending.set(Ending::Clean);
        Ok(())
    }
}
