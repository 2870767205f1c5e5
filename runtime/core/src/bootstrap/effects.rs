//! What the machine takes, what it wants done, and what it counts.

use super::lives::{Life, Name};
use super::peers::{Hello, Refusal, Standing};
use crate::ids::{ClusterId, Incarnation};
use serde::{Deserialize, Serialize};

/// What the membership machine says of the cluster that this node is in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Membership {
    pub cluster: ClusterId,
    /// In view order.
    pub members: Vec<Life>,
    /// Who votes now. A voter that was evicted votes on for a while, so not all need be members.
    pub voters: Vec<Life>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// A link is up, and this is how its other end began. It replaces the link that there was.
    LinkUp {
        name: Name,
        hello: Hello,
    },
    LinkDown {
        name: Name,
    },
    Received {
        from: Name,
        standing: Box<Standing>,
    },
    /// The other end closed the link for this reason.
    RefusedBy {
        name: Name,
        why: Refusal,
    },
    /// This node is a member, and again whenever members or voters change.
    InCluster(Membership),
    /// The membership of this node's life has ended, or did not begin.
    Left(Left),
    /// The life that was asked for, random and never used before.
    Incarnation(Incarnation),
    /// The members saw that the replica of this name differed from those of most.
    Mismatched {
        name: Name,
    },
    /// The operator gives the group up, perhaps to found another one by other names.
    Abandon {
        bootstrap: Option<Vec<Name>>,
    },
    /// The operator lets a name back in that differed too often.
    Readmit {
        name: Name,
    },
    /// Time passed.
    Tick,
}

/// Why the membership of a life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Left {
    /// The others went on without it.
    Evicted,
    /// Its replica differed from those of most members.
    Diverged,
    /// The cluster did not take it in.
    NotTakenIn,
    /// The round or the replica lost what it knew.
    StateLost,
}

/// Why a new life is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Why {
    Left(Left),
    /// So many voters are gone for good that no majority can be left.
    GroupOver,
    Abandoned,
    /// The cluster may have taken this life in without its knowing.
    JoinGivenUp,
    /// The life that was given is the last one.
    NotNew,
    /// It pledged itself to as many sets as it may.
    PledgesSpent,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    Send {
        to: Name,
        standing: Box<Standing>,
    },
    /// To the membership machine: epoch 1, round 1, with these members in this order.
    Begin {
        cluster: ClusterId,
        members: Vec<Life>,
    },
    /// To the membership machine: ask that member to be taken in.
    Join {
        cluster: ClusterId,
        via: Life,
    },
    /// End the membership, if there is one, then answer with `Incarnation`.
    DrawIncarnation(Why),
    /// Nothing more is taken from this node, and it is told why. The link stays, so that what it said of its cluster is known
    /// to hold; and what becomes of a life in another cluster may decide whether this group is over.
    Refuse {
        name: Name,
        why: Refusal,
    },
    /// To the membership machine, as a suspicion: the name of this member runs another life.
    Superseded(Life),
}

/// Things worth counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Counts {
    pub refused: u64,
    /// Links to members of other clusters; each counts in `refused` too.
    pub other_cluster: u64,
    /// Messages that their sender may not send, or from nobody who is linked.
    pub malformed: u64,
    /// What the membership machine or the shell said at a time when it may not.
    pub unexpected: u64,
    pub pledges: u64,
    pub pledges_lapsed: u64,
    pub begun: u64,
    pub joins: u64,
    /// New lives that were asked for.
    pub draws: u64,
}
