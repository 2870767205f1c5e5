//! What the serving actors report to whoever measures. Called from the actors, so an implementation must be cheap.

use crate::LocalRank;
use starling_actors::NodeName;
use starling_core::ids::Epoch;
use starling_core::rejection::Rejection;
use starling_core::{batch, ingress, kv, replica};
use std::time::Duration;

/// Every method may be left out.
pub trait Observer: Send + Sync + 'static {
    /// The replica applied a round.
    fn round(&self, _round: &RoundReport) {}

    /// A round is through at this member: decided, and all others' contributions waited for.
    fn round_timed(&self, _timing: &RoundTiming<'_>) {}

    /// This member is in a new view of the cluster.
    fn view(&self, _epoch: Epoch) {}

    /// A request was placed, `waited` after it was submitted.
    fn placed(&self, _why: &'static str, _waited: Duration) {}

    fn rejected(&self, _rejection: &Rejection) {}

    /// A rank's newest state, after a step or a change of its blocks.
    fn rank(&self, _rank: LocalRank, _batch: &batch::Stats, _kv: &kv::Stats) {}

    /// A step of `tokens` tokens took `took`.
    fn step(&self, _rank: LocalRank, _tokens: usize, _took: Duration) {}

    /// The ingress' state after a change.
    fn ingress(&self, _report: &IngressReport) {}

    /// A prompt came for an attempt that was not placed here, or a placed one was lost.
    fn fenced(&self, _rank: LocalRank) {}

    fn lost(&self, _rank: LocalRank, _attempts: usize) {}

    /// In lockstep: the rank had nothing to run in a round in which others had, and took part as a padded one.
    fn padded(&self, _rank: LocalRank) {}

    /// In lockstep: a round went on without the rank's step.
    fn late(&self, _rank: LocalRank) {}
}

/// Reports nothing.
pub struct NoObserver;

impl Observer for NoObserver {}

/// A round as one node saw it.
#[derive(Clone, Debug)]
pub struct RoundReport {
    pub round: u64,
    /// Requests in the waiting queue.
    pub waiting: usize,
    /// Requests announced and not ended.
    pub requests: usize,
    /// From the completed round to its decisions.
    pub apply: Duration,
    pub faults: replica::Faults,
}

/// How long a round took at one member.
#[derive(Clone, Debug)]
pub struct RoundTiming<'a> {
    /// From the own contribution to the decisions.
    pub took: Duration,
    /// Each other member, and how long behind the own contribution its came; 0 where it was there first.
    pub waits: Vec<(&'a NodeName, Duration)>,
}

/// The ingress' open requests.
#[derive(Clone, Copy, Debug)]
pub struct IngressReport {
    pub open: usize,
    pub backlog: usize,
    pub counts: ingress::Counts,
}
