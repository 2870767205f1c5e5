//! Where the ranks of the view are.

use serde::{Deserialize, Serialize};
use starling_core::ids::RankId;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// A place in the list of those that may be members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Seat(pub u32);

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seat {}", self.0)
    }
}

/// A rank's place among those of its node, from 0. Its id in the cluster is given by the view, and is another one when the node
/// was out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LocalRank(pub u32);

impl fmt::Display for LocalRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank-{}", self.0)
    }
}

/// A node, and a rank of it.
pub(crate) type Place = (Seat, LocalRank);

/// The ranks of the newest view that this node is in.
#[derive(Default)]
pub(crate) struct Directory(RwLock<Arc<BTreeMap<RankId, Place>>>);

impl Directory {
    pub(crate) fn set(&self, ranks: impl Iterator<Item = (RankId, Place)>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(ranks.collect());
    }

    pub(crate) fn all(&self) -> Arc<BTreeMap<RankId, Place>> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn find(&self, rank: RankId) -> Option<Place> {
        self.all().get(&rank).copied()
    }

    /// The id of a rank, while its node is in the view.
    pub(crate) fn id(&self, place: Place) -> Option<RankId> {
        self.all().iter().find(|(_, at)| **at == place).map(|(id, _)| *id)
    }

    /// The ids of a node's ranks, by place; none while it is in no view.
    pub(crate) fn of(&self, seat: Seat) -> Vec<RankId> {
        let all = self.all();
        let mut own: Vec<(LocalRank, RankId)> =
            all.iter().filter(|(_, place)| place.0 == seat).map(|(id, place)| (place.1, *id)).collect();
        own.sort_unstable();
        own.into_iter().map(|(_, id)| id).collect()
    }
}
