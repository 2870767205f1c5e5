//! What is shown of a machine, and what must always hold of it.

use super::log::{Agreed, Past, Pending};
use super::{Machine, Planted};
use crate::ids::Incarnation;
use crate::round::{self, View};

/// Why this member can decide nothing new, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill {
    pub since_us: u64,
    /// Whose word is missing; empty while that is not known.
    pub waits_for: Vec<Incarnation>,
}

/// How the cluster stands, as this member sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The latest view, in it or not; `None` before the first word of a cluster.
    pub view: Option<View>,
    /// Whether this life is in it.
    pub inside: bool,
    pub leader: Option<Incarnation>,
    pub pending: Option<Pending>,
    /// The last change, and why somebody left in it.
    pub last: Option<Past>,
    pub standstill: Option<Standstill>,
}

impl Machine {
    pub fn status(&self) -> Status {
        let agreed = self.agreed.as_ref();
        Status {
            view: agreed.map(Agreed::view),
            inside: self.round.is_some(),
            leader: self.consensus.leader,
            pending: agreed.and_then(|a| a.pending.clone()),
            last: agreed.and_then(|a| a.last.clone()),
            standstill: self.standstill(),
        }
    }

    /// Who is missing, while nothing new can be decided here.
    pub fn standstill(&self) -> Option<Standstill> {
        let members = || self.agreed.iter().flat_map(|a| &a.members).map(|m| m.incarnation);
        let down = || members().filter(|m| !self.is_linked(*m));
        if let Some(since_us) = self.halted_us {
            let owing = self.leader.as_ref().filter(|_| self.pending().is_some()).map(|leader| leader.waits_for());
            let waits_for = match owing.filter(|owing| !owing.is_empty()) {
                Some(owing) => owing,
                None => down().chain(self.consensus.leader.filter(|_| down().next().is_none())).collect(),
            };
            let me = self.life.incarnation;
            return Some(Standstill { since_us, waits_for: waits_for.into_iter().filter(|m| *m != me).collect() });
        }
        let Standstill { since_us, waits_for } = self.round_wait()?;
        // Who is a round behind may itself wait for one that is gone, and is not to blame.
        let gone: Vec<Incarnation> = down().filter(|m| waits_for.contains(m)).collect();
        Some(Standstill { since_us, waits_for: if gone.is_empty() { waits_for } else { gone } })
    }

    /// Since when the own contribution to a round is out, and whose is missing; `None` while it is not out, or no round
    /// completes for want of a view.
    pub fn round_wait(&self) -> Option<Standstill> {
        let round = self.round.as_ref().filter(|_| self.halted_us.is_none())?;
        let (since_us, waits_for) = round.waits_for()?;
        Some(Standstill { since_us, waits_for })
    }

    /// Whether nothing new may be admitted: frozen, or outside, for `change_us_max`.
    pub fn refuses(&self, now_us: u64) -> bool {
        self.halted_us.is_some_and(|since_us| now_us.saturating_sub(since_us) >= self.config.change_us_max)
    }

    /// Every invariant.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let me = self.life.incarnation;
        let agreed = self.agreed.as_ref();
        let placed = agreed.is_some_and(|a| a.position(me).is_some());
        if self.round.is_some() != (placed && self.gone.is_none()) {
            return Err(format!("M1: in a view: {}, placed in the latest one: {placed}", self.round.is_some()));
        }
        if let (Some(round), Some(agreed)) = (&self.round, agreed) {
            round.check()?;
            self.check_round(round, agreed)?;
        }
        let latest = agreed.map(|a| a.epoch);
        for (from, contribution) in &self.early {
            if !self.is_linked(*from) || latest.is_some_and(|latest| contribution.epoch <= latest) {
                return Err(format!("M4: {from} is early with {}", contribution.epoch));
            }
        }
        if let Some(leader) = &self.leader {
            leader.check(agreed)?;
        }
        agreed.map_or(Ok(()), Agreed::check)?;
        self.transfer.check()?;
        for (to, donation) in &self.donations {
            let mut rounds = donation.behind.iter().flatten().map(|merged| merged.round.0).zip(donation.round.0 + 1..);
            if self.round.is_none() || !rounds.all(|(round, next)| round == next) {
                return Err(format!("M8: a gap behind {} for {to}", donation.round));
            }
        }
        Ok(())
    }

    fn check_round(&self, round: &round::Machine, agreed: &Agreed) -> Result<(), String> {
        let frozen = agreed.pending.is_some();
        if round.is_frozen() != frozen && !self.is_planted(Planted::CompleteWhileFrozen) {
            return Err(format!("M2: frozen {}, pending {:?}", round.is_frozen(), agreed.change()));
        }
        if *round.view() != agreed.view() || round.completed() < round.view().cut() {
            return Err(format!("M3: at {} in {:?}, not in {:?}", round.completed(), round.view(), agreed.view()));
        }
        Ok(())
    }
}
