//! The waiting queue's actor, one a node: owns the round machine. Contributions in and out, completed rounds to the
//! router.

use crate::clock::Clock;
use crate::wakeup::Wakeup;
use crate::{Addresses, Settings};
use starling_actors::{Actor, ActorError, Context};
use starling_core::ids::{ClusterId, Epoch, Incarnation, RankId, Round};
use starling_core::round::{Applied, Effect, Entry, Input, Machine, Member, PrefixMatch, RankSnapshot, View};
use std::sync::Arc;

#[derive(Debug)]
pub enum Message {
    Announce(Entry),
    FromRank {
        entry: Option<Entry>,
        snapshot: RankSnapshot,
    },
    Applied(Applied),
    /// From a local rank: what it could reuse of the requests that `round` named.
    Matches {
        round: Round,
        matches: Vec<PrefixMatch>,
    },
    Draining,
    Tick,
}

pub struct Queue {
    machine: Machine,
    incarnation: Incarnation,
    addresses: Arc<Addresses>,
    clock: Clock,
    wakeup: Wakeup,
    effects: Vec<Effect>,
}

impl Queue {
    /// A new life: a new incarnation, in a new cluster of one. Nothing of an earlier life is known to it, so nothing of
    /// an earlier life may be taken for its own.
    pub fn new(settings: &Settings, addresses: Arc<Addresses>, clock: Clock) -> Self {
        let incarnation = draw_incarnation();
        let ranks: Vec<RankId> = (0..settings.ranks).map(RankId).collect();
        let view = View { epoch: Epoch(1), members: vec![Member { incarnation, ranks }], first_round: Round(1) };
        let cluster = ClusterId(incarnation.0);
        let machine = Machine::new(cluster, incarnation, view, settings.rounds.clone());
        Self {
            machine: machine.expect("the view was made of this incarnation"),
            incarnation,
            addresses,
            clock,
            wakeup: Wakeup::default(),
            effects: Vec::new(),
        }
    }

    fn drive(&mut self, context: &mut Context<'_, Message>, input: Input) {
        self.machine.handle(self.clock.now_us(), input, &mut self.effects);
        for effect in self.effects.drain(..) {
            match effect {
                // The view has one member: there is nobody to send to before the mesh.
                Effect::Send(_) => {}
                Effect::Completed(merged) => {
                    let round = crate::router::Message::Round(Box::new(merged));
                    // The router restarts with this actor: a round it does not get is a round of an ended cluster.
                    let _ = self.addresses.router.tell(context.trace(), round);
                }
                Effect::Dropped(dropped) => tracing::warn!(?dropped, "input of a round not taken"),
            }
        }
        let due = self.machine.poll_timeout();
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
    }
}

impl Actor for Queue {
    type Message = Message;

    fn started(&mut self, context: &mut Context<'_, Message>) -> Result<(), ActorError> {
        tracing::info!(incarnation = self.incarnation.0, "new cluster of one member");
        let view = self.machine.view().clone();
        self.addresses.router.tell(context.trace(), crate::router::Message::Install(view))?;
        for rank in &self.addresses.ranks {
            // A rank that is just restarting has nothing of an earlier cluster to end.
            let _ = rank.worker.tell(context.trace(), crate::gpu_worker::Message::NewCluster(self.incarnation));
        }
        // An ingress that is just restarting restarts this actor after itself.
        let _ = self.addresses.ingress.tell(context.trace(), crate::ingress::Message::NewCluster(self.incarnation));
        self.drive(context, Input::Tick);
        Ok(())
    }

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        let input = match message {
            Message::Announce(entry) => Input::Announce(entry),
            Message::FromRank { entry, snapshot } => Input::FromRank { entry, snapshot },
            Message::Applied(applied) => Input::Applied(applied),
            Message::Matches { round, matches } => Input::Matches { round, matches },
            Message::Draining => Input::Draining(true),
            Message::Tick => {
                self.wakeup.fired();
                Input::Tick
            }
        };
        self.drive(context, input);
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Announce(_) => "announce",
            Message::FromRank { .. } => "from_rank",
            Message::Applied(_) => "applied",
            Message::Matches { .. } => "matches",
            Message::Draining => "draining",
            Message::Tick => "tick",
        }
    }
}

/// A random number that was not drawn before and is not 0. The standard library seeds its hasher from the system's
/// randomness, which is all that is wanted here.
fn draw_incarnation() -> Incarnation {
    use std::hash::{BuildHasher, RandomState};
    Incarnation(RandomState::new().hash_one(std::process::id()).max(1))
}
