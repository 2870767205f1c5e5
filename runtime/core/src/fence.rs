//! What a rank expects: a prompt is taken only if the node's own replica placed that attempt on that rank.

use crate::ids::AttemptKey;
use std::collections::BTreeMap;

/// Attempts placed on a rank whose prompt has not come.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    since_us: BTreeMap<AttemptKey, u64>,
}

impl Expected {
    /// The replica placed the attempt here.
    pub fn placed(&mut self, attempt: AttemptKey, now_us: u64) {
        self.since_us.insert(attempt, now_us);
    }

    /// Its prompt came: whether it may run.
    pub fn admit(&mut self, attempt: AttemptKey) -> bool {
        self.since_us.remove(&attempt).is_some()
    }

    /// The attempt is over before its prompt came.
    pub fn stopped(&mut self, attempt: AttemptKey) {
        self.since_us.remove(&attempt);
    }

    /// Takes out the attempts whose prompt did not come within `wait_us`: they are lost.
    pub fn overdue(&mut self, now_us: u64, wait_us: u64) -> Vec<AttemptKey> {
        let late: Vec<AttemptKey> = self
            .since_us
            .iter()
            .filter(|(_, since)| now_us.saturating_sub(**since) >= wait_us)
            .map(|(attempt, _)| *attempt)
            .collect();
        for attempt in &late {
            self.since_us.remove(attempt);
        }
        late
    }

    /// Forgets all; a new cluster knows none of them.
    pub fn clear(&mut self) {
        self.since_us.clear();
    }

    /// When the oldest becomes overdue.
    pub fn poll_timeout(&self, wait_us: u64) -> Option<u64> {
        self.since_us.values().min().map(|since| since + wait_us)
    }

    pub fn len(&self) -> usize {
        self.since_us.len()
    }

    pub fn is_empty(&self) -> bool {
        self.since_us.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt, RequestKey};

    #[test]
    fn only_a_placed_attempt_is_admitted_once_and_a_late_one_is_overdue() {
        let attempt = |n| AttemptKey { key: RequestKey::default(), attempt: Attempt(n) };
        let mut expected = Expected::default();
        assert!(!expected.admit(attempt(1)), "nobody placed it");
        expected.placed(attempt(1), 10);
        expected.placed(attempt(2), 20);
        expected.placed(attempt(3), 30);
        assert!(expected.admit(attempt(1)) && !expected.admit(attempt(1)));
        expected.stopped(attempt(3));
        assert_eq!(expected.poll_timeout(100), Some(120));
        assert_eq!(expected.overdue(119, 100), []);
        assert_eq!(expected.overdue(120, 100), [attempt(2)]);
        assert!(expected.is_empty() && expected.poll_timeout(100).is_none());
    }
}
