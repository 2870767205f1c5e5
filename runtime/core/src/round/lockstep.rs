//! Lockstep: a round is one step of all ranks.
//!
//! After each round every rank takes its turn: it runs the one step it has, or passes. It then stands at the boundary of
//! the next round, and its member contributes when all of its ranks do. Whoever takes longer than `step_wait_us` is late:
//! the others go on without it, and it takes the newest turn as soon as its step is over.

use super::{Machine, RankSnapshot};
use crate::ids::Round;
use crate::placement::padding::{Mode, Occupancy, needs_dummy, needs_dummy_after_scheduling};

/// What a rank is told after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub round: Round,
    pub occupancy: Occupancy,
}

/// What a rank does with its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun<S> {
    /// It is not its turn, or no rank of the view has anything to run.
    Nothing,
    Step(S),
    /// It has nothing to run, and the view has: it takes part as a padded rank.
    Dummy,
}

/// One rank's part in lockstep.
///
/// # Invariants
/// A step begins only with a turn, and a turn begins one step at most: a rank never runs more steps than rounds were
/// applied, and views installed, since it began.
#[derive(Clone, Debug)]
pub struct Lockstep {
    /// Active requests a rank holds at most.
    cap: u32,
    /// Not taken yet: the newest, if several came during one step.
    turn: Option<Turn>,
    /// The turn whose step runs.
    running: Option<Round>,
    /// The round that the rank stands before.
    boundary: Round,
}

/// What the published rules ask of a group that steps together, with nothing disaggregated.
const MODE: Mode = Mode { attention_dp: true, exclude_retiring: false, disaggregated: false, benchmark_fill: false };

impl Lockstep {
    pub fn new(cap: u32) -> Self {
        Self { cap, turn: None, running: None, boundary: Round(0) }
    }

    /// A round was applied, or a view installed behind it.
    pub fn turn(&mut self, turn: Turn) {
        // Rounds of a new cluster count from 0 again.
        self.boundary = self.boundary.min(turn.round);
        self.turn = Some(turn);
    }

    /// Takes the turn, if there is one and no step runs: with what `plan` gives.
    pub fn begin<S>(&mut self, plan: impl FnOnce() -> Option<S>) -> Begun<S> {
        let Some(turn) = self.turn.take_if(|_| self.running.is_none()) else { return Begun::Nothing };
        if let Some(step) = plan() {
            self.running = Some(turn.round);
            self.boundary = turn.round;
            return Begun::Step(step);
        }
        self.boundary = Round(turn.round.0 + 1);
        let occupancy = turn.occupancy;
        let padded = needs_dummy(MODE, occupancy) || needs_dummy_after_scheduling(MODE, occupancy, self.cap, false);
        if padded { Begun::Dummy } else { Begun::Nothing }
    }

    /// The step is over.
    pub fn ended(&mut self) {
        if let Some(round) = self.running.take() {
            self.boundary = Round(round.0 + 1);
        }
    }

    /// The round that the rank stands before: it is through with the steps of all rounds below.
    pub fn boundary(&self) -> Round {
        self.boundary
    }
}

impl Machine {
    /// When the next contribution is due; `paced` is when it would be outside lockstep.
    ///
    /// While a local rank runs the step of the last round, the round waits for it: `step_wait_us` at most. Otherwise steps
    /// are the pace, and the least interval does not count, but only where somebody has a step: a rank here, one elsewhere as
    /// it said in the last round, or one of a member that has contributed. So where nobody has one, no round follows another
    /// faster than it would outside lockstep, or than a late rank is looked after.
    pub(super) fn due_in_lockstep_us(&self, paced: u64) -> u64 {
        let waited_us = self.applied_at_us.saturating_add(self.config.step_wait_us);
        let boundaries = || self.own_ranks().map(|snapshot| snapshot.map_or(Round(0), |s| s.boundary));
        // Whoever was late in the last round and is not back is not waited for again.
        if boundaries().any(|boundary| boundary == self.completed) {
            return waited_us;
        }
        let others_wait = self.held[0].iter().any(Option::is_some);
        let ready = self.own_ranks().flatten().any(|s| s.ready && s.boundary > self.completed);
        if others_wait || ready || self.applied.is_some_and(|a| a.stepping) {
            return 0;
        }
        let late = boundaries().any(|boundary| boundary < self.completed);
        if late { paced.min(waited_us) } else { paced }
    }

    /// The newest snapshot of each rank that this member hosts, if there is one.
    fn own_ranks(&self) -> impl Iterator<Item = Option<&RankSnapshot>> {
        let mine = self.view.members.iter().filter(|m| m.incarnation == self.me).flat_map(|m| &m.ranks);
        mine.map(|id| self.ranks.iter().find(|snapshot| snapshot.rank == *id))
    }

    /// R6: with its mark for the next round.
    pub(super) fn marked(&self, snapshot: RankSnapshot) -> RankSnapshot {
        RankSnapshot { late: self.config.lockstep && snapshot.boundary <= self.completed, ..snapshot }
    }

    pub(super) fn check_marks(&self) -> Result<(), String> {
        let mine = self.held[0].iter().flatten().filter(|c| c.member == self.me);
        match mine.flat_map(|c| &c.ranks).find(|snapshot| self.marked(**snapshot) != **snapshot) {
            Some(snapshot) => {
                Err(format!("R6: {} before {}: late {}", snapshot.rank, snapshot.boundary, snapshot.late))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
