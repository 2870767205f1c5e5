//! Lives of named nodes, and the set of them that founds a cluster.

use crate::digest;
use crate::ids::{ClusterId, Incarnation};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// What a node's certificate says; one process a name.
pub type Name = Arc<str>;

/// Lives in one set at most: a view holds no more members.
pub const LIVES_MAX: usize = 64;

/// One life of a named node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Life {
    pub name: Name,
    pub incarnation: Incarnation,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.incarnation)
    }
}

/// The lives that found a cluster together: in the order of their names, none twice, at least one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Founders(Vec<Life>);

const FOUNDERS: u64 = 0x31;

impl Founders {
    /// `None` for no lives, too many of them, or two of one name.
    pub fn new(mut lives: Vec<Life>) -> Option<Self> {
        lives.sort_unstable();
        Some(Self(lives)).filter(Self::is_well_formed)
    }

    /// What came from another node may be anything.
    pub fn is_well_formed(&self) -> bool {
        (1..=LIVES_MAX).contains(&self.0.len()) && self.0.windows(2).all(|two| two[0].name < two[1].name)
    }

    /// The cluster that they found.
    pub fn cluster(&self) -> ClusterId {
        let incarnations: Vec<u64> = self.0.iter().map(|life| life.incarnation.0).collect();
        ClusterId(digest::element(FOUNDERS, &incarnations))
    }

    pub fn lives(&self) -> &[Life] {
        &self.0
    }

    pub fn incarnation_of(&self, name: &str) -> Option<Incarnation> {
        self.0.iter().find(|life| &*life.name == name).map(|life| life.incarnation)
    }

    pub fn holds(&self, life: &Life) -> bool {
        self.0.contains(life)
    }
}

/// Whether no life is there twice, and no more of them than a view may hold. A name may be: its old life is on its way out.
pub(super) fn are_distinct(lives: &[Life]) -> bool {
    let twice = |(at, life): (usize, &Life)| lives[..at].iter().any(|other| other == life);
    lives.len() <= LIVES_MAX && !lives.iter().enumerate().any(twice)
}
