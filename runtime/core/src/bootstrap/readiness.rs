//! What a node says of itself while it is in no cluster.

use super::lives::{Life, Name};
use super::peers::Refusal;
use super::{Machine, Phase};
use crate::ids::ClusterId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a node is not ready, or that it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Readiness {
    Inside(ClusterId),
    /// Links to these names are missing, or they are in no state to begin a cluster with.
    WaitsForNames(Vec<Name>),
    /// All names are there; these have not pledged themselves to the set yet.
    WaitsForPledges(Vec<Name>),
    /// A name that is needed, or a member of a cluster, differs.
    Refused {
        name: Name,
        why: Refusal,
    },
    /// Not named itself, so it waits for a cluster to join.
    WaitsForCluster,
    Joining {
        cluster: ClusterId,
        via: Life,
    },
    /// Nothing is tried before this time, in us of the machine's clock.
    Waits {
        until_us: u64,
    },
    /// Its replica differed too often: an operator has to readmit it.
    Barred {
        times: u32,
    },
    BetweenLives,
}

impl Machine {
    pub fn readiness(&self) -> Readiness {
        if let Some(mismatches) = self.mismatches.get(&self.me).filter(|m| m.is_barred()) {
            return Readiness::Barred { times: mismatches.times() };
        }
        match &self.phase {
            Phase::Inside { cluster, .. } => Readiness::Inside(*cluster),
            Phase::Drawing => Readiness::BetweenLives,
            Phase::Joining { cluster, via, .. } => Readiness::Joining { cluster: *cluster, via: via.clone() },
            Phase::Outside { pledge: Some(pledge) } => Readiness::WaitsForPledges(self.lacking(&pledge.founders)),
            Phase::Outside { pledge: None } => self.seeking(),
        }
    }

    fn seeking(&self) -> Readiness {
        if let Some(until_us) = self.quiet_until_us {
            return Readiness::Waits { until_us };
        }
        let is_needed = |name: &Name| self.config.bootstrap.contains(name);
        let mut linked = self.peers.up().filter(|(name, peer)| is_needed(name) || peer.cluster.is_some());
        let refused = linked.find_map(|(name, peer)| Some((name.clone(), peer.refused.clone()?)));
        if let Some((name, why)) = refused {
            return Readiness::Refused { name, why };
        }
        if !self.config.bootstrap.contains(&self.me) {
            return Readiness::WaitsForCluster;
        }
        let missing = self.config.bootstrap.iter().filter(|name| self.life_of(name).is_none());
        Readiness::WaitsForNames(missing.cloned().collect())
    }
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inside(cluster) => write!(f, "in cluster {cluster}"),
            Self::WaitsForNames(names) => write!(f, "waits for names [{}]", names.join(", ")),
            Self::WaitsForPledges(names) => write!(f, "waits for pledges of [{}]", names.join(", ")),
            Self::Refused { name, why } => write!(f, "refused with {name}: {why}"),
            Self::WaitsForCluster => write!(f, "waits for a cluster to join"),
            Self::Joining { cluster, via } => write!(f, "joins cluster {cluster} by {via}"),
            Self::Waits { until_us } => write!(f, "waits until {until_us} us before it tries again"),
            Self::Barred { times } => {
                write!(f, "stays out: its replica differed {times} times; an operator has to readmit it")
            }
            Self::BetweenLives => write!(f, "between two incarnations"),
        }
    }
}
