//! What a rank expects: a prompt runs only if the node's own replica placed that attempt on that rank.
//!
//! Members are at most one round apart, so a prompt or a stop may come before the placement it belongs to; it is kept until
//! that round is applied here, or until it has waited as long as a prompt may.

use crate::ids::{AttemptKey, RequestNumber};
use std::collections::BTreeMap;

/// Prompts and stops that are kept before their placement, at most; more are dropped, and their requests placed again.
pub const EARLY_MAX: usize = 1024;

/// Attempts placed on a rank whose prompt has not come, and what came before its placement.
#[derive(Clone, Debug)]
pub struct Expected<P> {
    placed: BTreeMap<AttemptKey, (u64, RequestNumber)>,
    early: BTreeMap<AttemptKey, (u64, Early<P>)>,
}

#[derive(Clone, Debug)]
enum Early<P> {
    Prompt(P),
    Stop,
}

/// What waited for too long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    /// Placed here, but the prompt did not come: lost.
    pub lost: Vec<AttemptKey>,
    /// Prompts of attempts that were never placed here: from an ingress that is not in the view any more.
    pub fenced: usize,
}

impl<P> Default for Expected<P> {
    fn default() -> Self {
        Self { placed: BTreeMap::new(), early: BTreeMap::new() }
    }
}

impl<P> Expected<P> {
    /// The replica placed the attempt here. A prompt that came before runs now.
    pub fn placed(&mut self, now_us: u64, attempt: AttemptKey, number: RequestNumber) -> Option<P> {
        match self.early.remove(&attempt) {
            Some((_, Early::Prompt(prompt))) => Some(prompt),
            // Its client left already: the round that says so to all is under way.
            Some((_, Early::Stop)) => None,
            None => {
                self.placed.insert(attempt, (now_us, number));
                None
            }
        }
    }

    /// A prompt came: with the request's number if it may run, else it is kept or dropped.
    pub fn prompt(&mut self, now_us: u64, attempt: AttemptKey, prompt: P) -> Option<(P, RequestNumber)> {
        if let Some((_, number)) = self.placed.remove(&attempt) {
            return Some((prompt, number));
        }
        if self.early.len() < EARLY_MAX {
            self.early.entry(attempt).or_insert((now_us, Early::Prompt(prompt)));
        }
        None
    }

    /// The attempt, which does not run, is over.
    pub fn stop(&mut self, now_us: u64, attempt: AttemptKey) {
        let expected = self.placed.remove(&attempt).is_some();
        if !expected && (self.early.len() < EARLY_MAX || self.early.contains_key(&attempt)) {
            self.early.insert(attempt, (now_us, Early::Stop));
        }
    }

    /// Takes out what waited for `wait_us`.
    pub fn overdue(&mut self, now_us: u64, wait_us: u64) -> Overdue {
        let late = |since: u64| now_us.saturating_sub(since) >= wait_us;
        let lost: Vec<AttemptKey> =
            self.placed.iter().filter(|(_, (since, _))| late(*since)).map(|(attempt, _)| *attempt).collect();
        self.placed.retain(|_, (since, _)| !late(*since));
        let mut fenced = 0;
        self.early.retain(|_, (since, early)| {
            fenced += usize::from(late(*since) && matches!(early, Early::Prompt(_)));
            !late(*since)
        });
        Overdue { lost, fenced }
    }

    /// Whether the attempt is placed here and its prompt has not come.
    pub fn expects(&self, attempt: AttemptKey) -> bool {
        self.placed.contains_key(&attempt)
    }

    /// Keeps the placed attempts for which `keep` is true.
    pub fn retain(&mut self, keep: impl Fn(&AttemptKey) -> bool) {
        self.placed.retain(|attempt, _| keep(attempt));
    }

    /// When the oldest becomes overdue.
    pub fn poll_timeout(&self, wait_us: u64) -> Option<u64> {
        let placed = self.placed.values().map(|(since, _)| *since);
        placed.chain(self.early.values().map(|(since, _)| *since)).min().map(|since| since.saturating_add(wait_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Attempt, RequestKey};

    fn attempt(n: u32) -> AttemptKey {
        AttemptKey { key: RequestKey::default(), attempt: Attempt(n) }
    }

    #[test]
    fn only_a_placed_attempt_runs_once_and_a_late_one_is_lost() {
        let mut expected = Expected::default();
        assert_eq!(expected.placed(10, attempt(1), RequestNumber(7)), None::<&str>);
        expected.placed(20, attempt(2), RequestNumber(8));
        expected.placed(30, attempt(3), RequestNumber(9));
        assert_eq!(expected.prompt(40, attempt(1), "one"), Some(("one", RequestNumber(7))));
        assert_eq!(expected.prompt(40, attempt(1), "again"), None);
        expected.stop(41, attempt(3));
        assert_eq!(expected.poll_timeout(100), Some(120));
        assert_eq!(expected.overdue(119, 100), Overdue::default());
        assert_eq!(expected.overdue(120, 100), Overdue { lost: vec![attempt(2)], fenced: 0 });
        assert_eq!(expected.overdue(140, 100), Overdue { lost: vec![], fenced: 1 }, "the one that came twice");
        assert_eq!(expected.poll_timeout(100), None);
    }

    #[test]
    fn what_comes_before_its_placement_waits_for_it() {
        let mut expected = Expected::default();
        assert_eq!(expected.prompt(1, attempt(1), "early"), None);
        assert_eq!(expected.placed(2, attempt(1), RequestNumber(1)), Some("early"));
        assert!(!expected.expects(attempt(1)));
        // A stop that overtook its prompt, and one that overtook the placement too.
        expected.stop(3, attempt(2));
        assert_eq!(expected.prompt(4, attempt(2), "stopped"), None);
        assert_eq!(expected.placed(5, attempt(2), RequestNumber(2)), None);
        assert!(!expected.expects(attempt(2)));
        for n in 0..2 * EARLY_MAX as u32 {
            assert_eq!(expected.prompt(6, attempt(10 + n), "strange"), None);
        }
        assert_eq!(expected.overdue(200, 100), Overdue { lost: vec![], fenced: EARLY_MAX });
    }
}
