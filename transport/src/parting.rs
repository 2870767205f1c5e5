//! How a link ends without losing anything: each side ends its lanes, says goodbye with the number of bodies it sent, and answers
//! the other's goodbye when all of that has arrived. A machine without a network, so that it can be read and tested alone.

use crate::link::DownReason;

#[derive(Debug)]
pub(crate) struct Parting {
    /// Streams of the peer that end with its goodbye.
    lanes: usize,
    lanes_ended: usize,
    bodies_arrived: u64,
    /// Bodies that the peer says it sent, once it said goodbye.
    bodies_theirs: Option<u64>,
    /// This side's answer was given.
    answered: bool,
    /// The peer's answer came.
    was_answered: bool,
    /// Why this side leaves, once it does.
    leaving: Option<DownReason>,
}

impl Parting {
    pub fn new(lanes: usize) -> Self {
        Self {
            lanes,
            lanes_ended: 0,
            bodies_arrived: 0,
            bodies_theirs: None,
            answered: false,
            was_answered: false,
            leaving: None,
        }
    }

    pub fn lane_ended(&mut self) {
        self.lanes_ended += 1;
    }

    pub fn body_arrived(&mut self) {
        self.bodies_arrived += 1;
    }

    /// The peer's goodbye; `false` when it was said before.
    pub fn goodbye(&mut self, bodies: u64) -> bool {
        self.bodies_theirs.replace(bodies).is_none()
    }

    /// The peer has all that this side sent.
    pub fn was_answered(&mut self) {
        self.was_answered = true;
    }

    /// Begins to leave; `false` when it has begun before.
    pub fn leave(&mut self, reason: DownReason) -> bool {
        let begins = self.leaving.is_none();
        self.leaving.get_or_insert(reason);
        begins
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Whether the peer's goodbye is to be answered now; once.
    pub fn answers(&mut self) -> bool {
        let arrived = self.bodies_theirs.is_some_and(|bodies| self.bodies_arrived >= bodies);
        let answers = arrived && self.lanes_ended >= self.lanes && !self.answered;
        self.answered |= answers;
        answers
    }

    /// Both sides have all: the connection can be closed, for this reason.
    pub fn is_complete(&self) -> Option<DownReason> {
        self.leaving.clone().filter(|_| self.answered && self.was_answered)
    }

    /// The peer closed the connection as complete, which is an answer too: it does so only when it has all.
    pub fn closed_as_complete(&self) -> DownReason {
        self.leaving.clone().unwrap_or(DownReason::Goodbye)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goodbye_is_answered_once_when_all_has_arrived() {
        let mut parting = Parting::new(2);
        parting.lane_ended();
        parting.body_arrived();
        assert!(!parting.answers(), "no goodbye yet");
        assert!(parting.goodbye(2));
        assert!(!parting.goodbye(2), "said twice");
        parting.lane_ended();
        assert!(!parting.answers(), "a body is missing");
        parting.body_arrived();
        assert!(parting.answers());
        assert!(!parting.answers(), "answered already");
    }

    #[test]
    fn a_link_is_complete_when_both_have_answered() {
        let mut parting = Parting::new(0);
        assert!(parting.leave(DownReason::Closed));
        assert!(!parting.leave(DownReason::Goodbye), "it leaves already");
        parting.was_answered();
        assert_eq!(parting.is_complete(), None);
        parting.goodbye(0);
        assert!(parting.answers());
        assert_eq!(parting.is_complete(), Some(DownReason::Closed));
    }
}
