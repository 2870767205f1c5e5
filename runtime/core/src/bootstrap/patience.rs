//! How long a node stays away: between two tries to get into a cluster, and after its replica differed too often.

use crate::digest;
use crate::ids::Incarnation;
use std::collections::VecDeque;

/// The first wait is at least this long: 1 s.
pub const REJOIN_US_MIN: u64 = 1_000_000;
/// No wait is longer than this: 60 s.
pub const REJOIN_US_MAX: u64 = 60_000_000;
/// `mismatches_max` counts within this time: 10 min.
pub const MISMATCHES_WITHIN_US: u64 = 600_000_000;

const JITTER: u64 = 0x32;

/// The wait before a try: it doubles with each, and is drawn from its upper half by the incarnation, which is random, so
/// that nodes that failed together do not try again together.
pub(super) fn rejoin_us(tries: u32, incarnation: Incarnation) -> u64 {
    let top = (REJOIN_US_MIN << tries.min(6)).min(REJOIN_US_MAX);
    let low = (top / 2).max(REJOIN_US_MIN);
    low + digest::element(JITTER, &[incarnation.0, u64::from(tries)]) % (top - low + 1)
}

/// When the replica of one name differed from those of most members.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Mismatches {
    at_us: VecDeque<u64>,
    barred: bool,
}

impl Mismatches {
    /// Another one. Once there were `max` of them within ten minutes, only an operator helps.
    pub(super) fn count(&mut self, now_us: u64, max: u32) {
        self.at_us.retain(|at| now_us.saturating_sub(*at) < MISMATCHES_WITHIN_US);
        self.at_us.push_back(now_us);
        self.barred |= self.at_us.len() >= max.max(1) as usize;
    }

    pub(super) fn is_barred(&self) -> bool {
        self.barred
    }

    pub(super) fn times(&self) -> u32 {
        self.at_us.len() as u32
    }
}
