//! What a node knows of the others: who is linked, which life of a name runs, and where that stands.

use super::lives::{Founders, Life, Name};
use crate::ids::{ClusterId, Incarnation};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Names that a node keeps in mind at most: four times as many as a view holds members.
pub const PEERS_MAX: usize = 256;

/// What both sides of a link say first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hello {
    pub incarnation: Incarnation,
    /// Of the protocol that the process speaks.
    pub version: u32,
    /// Hash of all settings that decide.
    pub settings: u64,
    /// The cluster that it is in. It is said here and not only in a message, so that also a node of another version
    /// stops a second cluster.
    pub cluster: Option<ClusterId>,
}

/// Where one life stands: all that nodes tell each other about it, whole each time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Standing {
    pub incarnation: Incarnation,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    Outside {
        /// The set to which it is pledged.
        pledge: Option<Founders>,
    },
    Inside {
        cluster: ClusterId,
        /// The set that began the cluster, where the member knows it.
        founders: Option<Founders>,
    },
}

impl Standing {
    /// Whether a node of that name may say so.
    pub(super) fn is_well_formed(&self, name: &Name) -> bool {
        let me = Life { name: name.clone(), incarnation: self.incarnation };
        match &self.place {
            Place::Outside { pledge } => pledge.as_ref().is_none_or(|p| p.is_well_formed() && p.holds(&me)),
            Place::Inside { cluster, founders } => {
                founders.as_ref().is_none_or(|f| f.is_well_formed() && f.cluster() == *cluster)
            }
        }
    }
}

/// Why a node has nothing to do with another.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    #[error("protocol version {theirs} differs from ours, {ours}")]
    Version { ours: u32, theirs: u32 },
    #[error("settings that decide differ (hash {theirs:016x}, ours {ours:016x})")]
    Settings { ours: u64, theirs: u64 },
    #[error("member of another cluster ({theirs}, ours {ours})")]
    OtherCluster { ours: ClusterId, theirs: ClusterId },
    #[error("name {name} is taken")]
    NameTaken { name: Name },
    #[error("replica of {name} differed from the others {times} times; an operator has to readmit it")]
    Diverged { name: Name, times: u32 },
    #[error("too many names (limit {limit})")]
    TooManyNames { limit: usize },
}

/// One other name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Peer {
    pub(super) up: bool,
    pub(super) incarnation: Incarnation,
    pub(super) refused: Option<Refusal>,
    /// Whether it has said more than its hello.
    pub(super) has_said: bool,
    /// The cluster it is in, by its hello or what it said since.
    pub(super) cluster: Option<ClusterId>,
    /// Of that cluster.
    pub(super) founders: Option<Founders>,
    /// The set to which this life is pledged, as far as is known. It stays when the link is gone: a pledge holds for a time.
    pub(super) pledge: Option<Founders>,
    /// The last lives before this one.
    pub(super) former: Vec<Incarnation>,
}

/// Former lives that are kept in mind. They matter while one of them is still a voter, and that is seldom more than one.
const FORMER_MAX: usize = 4;

impl Peer {
    /// What a hello says, and what is left of what was known of that name.
    pub(super) fn new(hello: &Hello, known: Option<&Peer>) -> Self {
        let mut peer = Self {
            up: true,
            incarnation: hello.incarnation,
            refused: None,
            has_said: false,
            cluster: hello.cluster,
            founders: None,
            pledge: None,
            former: Vec::new(),
        };
        if let Some(known) = known {
            peer.former = known.former.clone();
            peer.pledge = known.pledge.clone().filter(|_| known.incarnation == hello.incarnation);
            peer.outlives(known.incarnation);
        }
        peer
    }

    fn outlives(&mut self, former: Incarnation) {
        if former != self.incarnation && !self.former.contains(&former) {
            self.former.truncate(FORMER_MAX - 1);
            self.former.insert(0, former);
        }
    }

    pub(super) fn is_heard(&self) -> bool {
        self.up && self.refused.is_none()
    }

    pub(super) fn stands(&mut self, standing: Standing) {
        let former = std::mem::replace(&mut self.incarnation, standing.incarnation);
        self.outlives(former);
        self.has_said = true;
        (self.cluster, self.founders, self.pledge) = match standing.place {
            Place::Outside { pledge } => (None, None, pledge),
            Place::Inside { cluster, founders } => (Some(cluster), founders, None),
        };
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Peers(BTreeMap<Name, Peer>);

impl Peers {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Peer> {
        self.0.get(name)
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Peer> {
        self.0.get_mut(name)
    }

    /// Puts a peer in; false if there is no room for another name. One whose link is down makes room.
    pub(super) fn put(&mut self, name: Name, peer: Peer) -> bool {
        if !self.0.contains_key(&name) && self.0.len() >= PEERS_MAX {
            let down = self.0.iter().find(|(_, peer)| !peer.up).map(|(name, _)| name.clone());
            let Some(down) = down else { return false };
            self.0.remove(&down);
        }
        self.0.insert(name, peer);
        true
    }

    /// With a link, whatever else is wrong with them.
    pub(super) fn up(&self) -> impl Iterator<Item = (&Name, &Peer)> {
        self.0.iter().filter(|(_, peer)| peer.up)
    }

    /// With a link, and not refused.
    pub(super) fn heard(&self) -> impl Iterator<Item = (&Name, &Peer)> {
        self.0.iter().filter(|(_, peer)| peer.is_heard())
    }
}

#[cfg(test)]
impl Peers {
    pub(super) fn retain_former(&mut self, keep: impl Fn(Incarnation) -> bool) {
        self.0.values_mut().for_each(|peer| peer.former.retain(|life| keep(*life)));
    }
}
