//! The ranks of the view: what the replica counts on them, and what they say of themselves.

use super::Replica;
use crate::ids::{Incarnation, RankId, Round};
use crate::placement::padding::Occupancy;
use crate::round::{Contribution, RankSnapshot};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Rank {
    pub(super) id: RankId,
    pub(super) member: Incarnation,
    /// Weight of the requests placed here and not finished.
    pub(super) open: u32,
    pub(super) open_tokens: u64,
    pub(super) snapshot: RankSnapshot,
    pub(super) draining: bool,
}

impl Rank {
    pub(super) fn new(id: RankId, member: Incarnation) -> Self {
        let snapshot = RankSnapshot { rank: id, ..RankSnapshot::default() };
        Self { id, member, open: 0, open_tokens: 0, snapshot, draining: false }
    }
}

impl Replica {
    /// A rank that has counted all placements must count what the replica counts, once its own entries are applied.
    pub(super) fn compare_counts(&mut self, contribution: &Contribution, round: Round) {
        let current = contribution.ranks.iter().filter(|s| s.counted.0 + 1 == round.0);
        let differ =
            current.filter(|s| self.ranks.iter().any(|r| r.id == s.rank && r.open != s.active_requests)).count();
        self.faults.counts_differ += differ as u64;
    }

    pub(super) fn snapshots(&mut self, contribution: &Contribution) {
        for rank in self.ranks.iter_mut().filter(|r| r.member == contribution.member) {
            rank.draining = contribution.draining;
        }
        for snapshot in &contribution.ranks {
            if let Some(index) = self.index_of(snapshot.rank) {
                self.ranks[index].snapshot = *snapshot;
            }
        }
    }

    /// Free slots by rank that this round gives to nobody. A draining rank gets nothing, but where all drain, what waits is
    /// served here or nowhere. A late rank gets nothing in this round, whatever the others do: it is back in the next one, or
    /// its node is not in the next view.
    pub(super) fn held(&self) -> Vec<u32> {
        let all_drain = self.ranks.iter().all(|rank| rank.draining);
        let takes_none = |rank: &Rank| rank.snapshot.late || (rank.draining && !all_drain);
        match self.ranks.iter().any(takes_none) {
            true => self.ranks.iter().map(|rank| if takes_none(rank) { self.config.cap } else { 0 }).collect(),
            false => Vec::new(),
        }
    }

    /// Whether some rank has a step to run in the round that was just applied. A late one still runs an earlier round's.
    pub(super) fn is_stepping(&self) -> bool {
        self.ranks.iter().any(|rank| rank.snapshot.ready && !rank.snapshot.late)
    }

    /// What the router says to a rank of the view about the step of this round; a rank that is not in it is idle.
    ///
    /// # Source
    /// The published default router's target when nothing is left to place: the active requests spread evenly, but no less
    /// than the fullest rank has, and no more than the cap.
    pub fn occupancy(&self, rank: RankId) -> Occupancy {
        let Some(index) = self.index_of(rank) else { return Occupancy::default() };
        let active: u64 = self.ranks.iter().map(|rank| u64::from(rank.open)).sum();
        let most = self.ranks.iter().map(|rank| rank.open).max().unwrap_or(0);
        let fair = u32::try_from(active.div_ceil(self.ranks.len() as u64)).unwrap_or(u32::MAX);
        let expected = fair.max(most).min(self.config.cap);
        Occupancy { expected, active: self.ranks[index].open, ..Occupancy::default() }
    }
}
