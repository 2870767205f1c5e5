//! What a consensus group would keep of each cluster, and tell its members. A change needs a living majority of the voters
//! that there were, and of those that there will be; a minority may hear of it later.

use super::*;
use std::borrow::Borrow;

/// Voters at most, as the protocol has it.
const VOTERS_MAX: usize = 5;

/// The first in view order, an odd number of them.
pub fn voters(members: &[Life]) -> Vec<Life> {
    let len = members.len().min(VOTERS_MAX);
    members[..len.saturating_sub(usize::from(len.is_multiple_of(2)))].to_vec()
}

/// Whether the life runs, and is in the cluster.
pub fn is_alive(nodes: &[impl Borrow<Machine>], cluster: ClusterId, life: &Life) -> bool {
    let mut nodes = nodes.iter().map(Borrow::borrow);
    nodes.any(|node: &Machine| {
        node.incarnation == life.incarnation && node.me == life.name && node.cluster() == Some(cluster)
    })
}

/// Whether `counts` holds for a majority of the voters.
pub fn majority(members: &[Life], counts: impl Fn(&Life) -> bool) -> bool {
    let voters = voters(members);
    2 * voters.iter().filter(|voter| counts(voter)).count() > voters.len()
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Registry(pub BTreeMap<ClusterId, Vec<Life>>);

impl Registry {
    pub fn has_majority(&self, nodes: &[impl Borrow<Machine>], cluster: ClusterId) -> bool {
        self.0.get(&cluster).is_some_and(|members| majority(members, |voter| is_alive(nodes, cluster, voter)))
    }

    /// Clusters that can decide.
    pub fn living(&self, nodes: &[impl Borrow<Machine>]) -> Vec<ClusterId> {
        self.0.keys().copied().filter(|cluster| self.has_majority(nodes, *cluster)).collect()
    }

    pub fn begin(&mut self, cluster: ClusterId, founders: Vec<Life>) {
        self.0.entry(cluster).or_insert(founders);
    }

    /// Forgets clusters that nobody is in.
    pub fn prune(&mut self, nodes: &[impl Borrow<Machine>]) {
        self.0.retain(|cluster, _| nodes.iter().any(|node| node.borrow().entered == Some(*cluster)));
    }

    pub fn holds(&self, cluster: ClusterId, life: &Life) -> bool {
        self.0.get(&cluster).is_some_and(|members| members.contains(life))
    }

    pub fn membership(&self, cluster: ClusterId) -> Membership {
        let members = self.0.get(&cluster).cloned().unwrap_or_default();
        Membership { cluster, voters: voters(&members), members }
    }
}
