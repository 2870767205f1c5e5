//! What goes into the machine and what comes out.

use super::choose::Sight;
use super::log::{Agreed, Change, Command, Ignored, Joiner, Name, Place, Why};
use crate::ids::{ClusterId, Epoch, Incarnation, Round};
use crate::replica::Snapshot;
use crate::round::{self, Contribution, Merged, View};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug)]
pub enum Input {
    /// For the round machine, and `Tick` for this one too. What is announced outside a view is kept for the first one.
    /// `Applied` answers each of `Installed`, `Completed` and `Restored`, in their order.
    Round(round::Input),
    /// The link to a life of a node is up, and what was on its way over the last one is lost.
    LinkUp(Peer),
    LinkDown(Incarnation),
    Received {
        from: Incarnation,
        message: Box<Message>,
    },
    /// All who bootstrap together pledged this same membership: its first view.
    Founded {
        cluster: ClusterId,
        members: Vec<Place>,
    },
    /// The log's snapshot: what a life begins with that was not there from the first entry.
    Restored(Box<Agreed>),
    /// The next entry of the log.
    Committed {
        index: u64,
        command: Command,
    },
    Consensus(Consensus),
    /// The replica's state behind `round`, as asked by `Effect::Donate`.
    Donated {
        to: Incarnation,
        epoch: Epoch,
        round: Round,
        replica: Box<Snapshot>,
    },
    /// Leave the view politely; where it has nobody else, that is its end.
    Leave,
}

/// The other end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: Name,
    pub incarnation: Incarnation,
    pub replaces: Option<Incarnation>,
}

/// How the consensus group stands, as this node sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consensus {
    pub leader: Option<Incarnation>,
    pub voters: Vec<Incarnation>,
    /// At the leader: the voters that it reaches, itself included.
    pub reached: Vec<Incarnation>,
}

impl Consensus {
    /// Whether an entry could be committed now. Evicted voters that live vote on, so they count.
    pub(super) fn has_majority(&self) -> bool {
        let reached = self.voters.iter().filter(|voter| self.reached.contains(voter)).count();
        reached * 2 > self.voters.len()
    }
}

#[derive(Clone, Debug)]
pub enum Effect {
    Send {
        to: Incarnation,
        message: Box<Message>,
    },
    /// To the replica.
    Completed(Merged),
    /// To the replica of somebody outside: begin with this state.
    Restored(Box<Snapshot>),
    /// To the replica, before any round of the view. In the first view of a cluster it starts empty. `polite` left of their own
    /// will: what ran on their ranks does not count as failed.
    Installed {
        cluster: ClusterId,
        view: View,
        polite: Vec<Incarnation>,
    },
    /// Asks the replica for its state behind all that it was given before: `Donated` answers.
    Donate {
        to: Incarnation,
        epoch: Epoch,
        round: Round,
    },
    /// To the consensus group, if this node still leads it; it may be lost.
    Propose(Command),
    /// This life has no place in the cluster any more. It goes on voting, and leading, until the voters are changed.
    Left(Left),
    Dropped(Dropped),
}

/// Why a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Left {
    Politely,
    Evicted(Why),
    /// The log goes on with a view that it is not in.
    NotInView {
        epoch: Epoch,
    },
    /// Another member says that its epoch is over.
    Stale {
        epoch: Epoch,
    },
    /// Its replica differs from that of most members.
    Diverged {
        round: Round,
    },
    /// The view cannot follow what it has.
    Misfit {
        completed: Round,
        first_round: Round,
    },
}

/// What was not taken: counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dropped {
    Round(round::Dropped),
    /// An entry of the log that does nothing.
    Entry(Ignored),
    /// Of a change that is not the pending one.
    OtherChange,
    /// Of another epoch, or another cluster.
    OtherEpoch,
    /// A contribution, or a sight, that its sender may not make.
    NotItsOwn(Incarnation),
    /// In no view, or not any more.
    Outside,
    /// To somebody who does not lead.
    NotTheLeader,
    /// A state, an input or a fill that was not asked for, or is not what was.
    Unasked,
    /// The link is down, or was never up.
    Unlinked,
    /// A first view that has no place for this life, or comes too late.
    Founded,
}

/// What lives say to each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    Contribution(Box<Contribution>),
    /// The link is up, and its sender stands there.
    Hello {
        cluster: ClusterId,
        epoch: Epoch,
        completed: Round,
    },
    /// You are out: `epoch` has no place for you.
    Stale {
        cluster: ClusterId,
        epoch: Epoch,
    },
    /// To the leader, by way of any member.
    Sight {
        sight: Box<Sight>,
        passed_on: bool,
    },
    /// From the leader: what do you see?
    Look {
        epoch: Epoch,
    },
    /// From the leader: where do you stand?
    Ask(Change),
    /// To the leader.
    Report(Box<Report>),
    /// From the leader to somebody who does not stand at the cut.
    Level(Box<Level>),
    /// To a holder of the round, or to the leader, which passes it on.
    Need {
        change: Change,
        round: Round,
        by: Incarnation,
    },
    Fill {
        change: Change,
        to: Incarnation,
        merged: Box<Merged>,
    },
    /// To the leader: a joiner has the state.
    Joining(Box<Joining>),
    /// To the leader: go on without me.
    Leaving {
        epoch: Epoch,
    },
    /// From a joiner to its donor.
    Want {
        cluster: ClusterId,
        epoch: Epoch,
    },
    /// Its answer where it has nothing to give.
    Refused,
    /// From a joiner that turns to another donor.
    Enough,
    State(Box<State>),
    /// The next round behind the state.
    Round(Box<Merged>),
}

/// How far a member, or a joiner, came under a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub change: Change,
    pub completed: Round,
    /// Hash of the whole input of `completed`, where it can be given to others.
    pub input_hash: Option<u64>,
    /// What its replica said of `completed`.
    pub digest: u64,
    /// Members to which its link is up.
    pub links: Vec<Incarnation>,
}

/// Where all must stand: behind `round`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    pub change: Change,
    pub round: Round,
    pub input_hash: Option<u64>,
    /// Who has the round's input.
    pub holders: Vec<Incarnation>,
}

/// A joiner that is at most two rounds behind its donor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joining {
    pub joiner: Joiner,
    /// Of the view that its state belongs to.
    pub epoch: Epoch,
    /// Lives to which its link is up.
    pub links: Vec<Incarnation>,
}

/// What a joiner begins with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    pub cluster: ClusterId,
    pub epoch: Epoch,
    /// The round behind which the state was taken.
    pub round: Round,
    pub clock_us: u64,
    pub replica: Snapshot,
}
