//! An actor framework: an actor is a mailbox, a machine and a match.
//!
//! Actors live in a supervision tree under a [`Node`], are reached through an [`Address`] that survives their restarts, and
//! every message carries the [`TraceContext`] of what caused it. `README.md` beside this crate lists the guarantees.

mod address;
mod ask;
mod context;
mod entry;
mod hook;
mod node;
mod remote;
mod shell;
mod spec;
mod stream;
mod supervisor;
mod trace;
mod tree;

pub use address::{Address, Carrier, Limit, SendError};
pub use ask::{AskError, Reply};
pub use context::{Context, Timer};
pub use entry::{ActorKind, ActorState, ActorStats};
pub use hook::{AttributeValue, Hook, NoHook, SpanRecord};
pub use node::Node;
pub use remote::{Dropped, LinkEvent, LinkStats, RemoteLimits};
pub use spec::{ActorSpec, Backoff, ChildSpec, Intensity, Restart, Strategy, SupervisorSpec};
pub use starling_transport::{DownReason, NodeName, NodeNameError, Peer};
pub use stream::{Items, Sink, SinkError, StreamError};
pub use trace::{TraceContext, TraceparentError};
pub use tree::{StartError, StopOutcome, Tree, TreeExit};

/// Why an actor failed. Any error converts with `?`, any text with `.into()`.
pub type ActorError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// An actor is a mailbox, a machine and a match.
///
/// Handlers are synchronous and short: nothing is awaited while a machine is borrowed. An error or a panic ends this machine;
/// its supervisor makes a fresh one from the factory, and the failed message is not delivered again.
pub trait Actor: Sized + Send + 'static {
    /// One message enum an actor.
    type Message: Send + 'static;

    /// Runs before the first message. The actor's own address already works. An error here counts as a failed start.
    fn started(&mut self, _context: &mut Context<'_, Self::Message>) -> Result<(), ActorError> {
        Ok(())
    }

    /// Takes one message.
    fn handle(&mut self, context: &mut Context<'_, Self::Message>, message: Self::Message) -> Result<(), ActorError>;

    /// Runs after the last message of an orderly stop; not after a panic, an error or a kill (use `Drop` for those).
    fn stopped(&mut self, _context: &mut Context<'_, Self::Message>) {}

    /// The label of a message in metrics: one of a few constants, such as the variant's name.
    fn kind(_message: &Self::Message) -> &'static str {
        "message"
    }
}
