//! The invariants, as the module lists them.

use super::lives::{Name, are_distinct};
use super::patience::{REJOIN_US_MAX, REJOIN_US_MIN};
use super::{Machine, PEERS_MAX, PLEDGES_MAX, Phase};

impl Machine {
    /// Every invariant.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let me = self.life();
        let stands_in = match &self.phase {
            Phase::Joining { cluster, .. } | Phase::Inside { cluster, .. } => Some(*cluster),
            Phase::Outside { .. } | Phase::Drawing => self.entered,
        };
        if stands_in != self.entered || (self.entered.is_some() && matches!(self.phase, Phase::Outside { .. })) {
            return Err(format!("B3: {me} entered {:?} and is in {stands_in:?}", self.entered));
        }
        let linked_inside = self.peers.up().find(|(_, peer)| peer.cluster.is_some());
        match &self.phase {
            Phase::Outside { pledge: Some(pledge) } => {
                let names: Vec<&Name> = pledge.founders.lives().iter().map(|life| &life.name).collect();
                let all = self.planted.some_names() || names.iter().copied().eq(&self.config.bootstrap);
                if !all || !pledge.founders.holds(&me) || !pledge.founders.is_well_formed() {
                    return Err(format!("B1: {me} pledged itself to {names:?}"));
                }
                if let Some((name, _)) = linked_inside {
                    return Err(format!("B7: {me} is pledged while {name} is in a cluster"));
                }
            }
            Phase::Inside { cluster, founders, members, voters, .. } => {
                let founded = founders.as_ref().is_none_or(|f| f.cluster() == *cluster);
                if !members.contains(&me) || !founded {
                    return Err(format!("B2: {me} is in {cluster}"));
                }
                if !are_distinct(voters) || !are_distinct(members) {
                    return Err(format!("B8: voters {voters:?} of {members:?}"));
                }
            }
            Phase::Drawing if !self.pledged.is_empty() => return Err(format!("B3: {me} is pledged, and over")),
            Phase::Outside { pledge: None } | Phase::Joining { .. } | Phase::Drawing => {}
        }
        if self.is_barred() && !matches!(self.phase, Phase::Outside { pledge: None } | Phase::Drawing) {
            return Err(format!("B4: {me} is barred, and not outside"));
        }
        if self.waited_us.is_some_and(|wait| !(REJOIN_US_MIN..=REJOIN_US_MAX).contains(&wait)) {
            return Err(format!("B5: waits {:?} us", self.waited_us));
        }
        if self.peers.len() > PEERS_MAX || self.pledged.len() > PLEDGES_MAX || self.mismatches.len() > PEERS_MAX + 1 {
            return Err(format!("B6: {} names, {} pledges", self.peers.len(), self.pledged.len()));
        }
        Ok(())
    }
}
