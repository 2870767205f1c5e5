//! How long rounds take at this member, and whom it waits for in them.

use crate::cluster::Still;
use crate::directory::Seat;
use std::time::Duration;

/// Follows one round after another: own contribution, those of the others, decisions.
#[derive(Debug, Default)]
pub struct Stopwatch {
    contributed_us: Option<u64>,
    /// Whose contributions were missing when it last looked.
    missing: Vec<Seat>,
    /// Of those that were missing and came.
    waits: Vec<(Seat, Duration)>,
}

/// One round.
#[derive(Debug, PartialEq, Eq)]
pub struct Lap {
    pub took: Duration,
    waits: Vec<(Seat, Duration)>,
}

impl Lap {
    /// How long after the own contribution a member's came.
    pub fn wait(&self, seat: Seat) -> Duration {
        self.waits.iter().find(|(of, _)| *of == seat).map_or(Duration::ZERO, |(_, wait)| *wait)
    }
}

impl Stopwatch {
    /// Looks at whom the round waits for now. A wait that ends otherwise than by its round is not one of a round: the view
    /// changes.
    pub fn look(&mut self, now_us: u64, wait: Option<Still>) {
        match wait {
            Some(Still { since_us, waits_for }) => {
                self.contributed_us = Some(since_us);
                self.came(now_us, waits_for);
            }
            None if self.missing.is_empty() => {}
            None => *self = Self::default(),
        }
    }

    /// The round completed, so whoever was still missing came now.
    pub fn completed(&mut self, now_us: u64) {
        // The last contribution may have been the own one: nobody saw it wait.
        self.contributed_us.get_or_insert(now_us);
        self.came(now_us, Vec::new());
    }

    /// The completed round was applied; `None` if none completed.
    pub fn applied(&mut self, now_us: u64) -> Option<Lap> {
        let contributed_us = self.contributed_us.filter(|_| self.missing.is_empty())?;
        let waits = std::mem::take(self).waits;
        Some(Lap { took: since(contributed_us, now_us), waits })
    }

    fn came(&mut self, now_us: u64, missing: Vec<Seat>) {
        let wait = since(self.contributed_us.unwrap_or(now_us), now_us);
        let before = std::mem::replace(&mut self.missing, missing);
        let came = before.into_iter().filter(|seat| !self.missing.contains(seat));
        self.waits.extend(came.map(|seat| (seat, wait)));
    }
}

fn since(earlier_us: u64, now_us: u64) -> Duration {
    Duration::from_micros(now_us.saturating_sub(earlier_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits_for(since_us: u64, seats: &[u32]) -> Option<Still> {
        Some(Still { since_us, waits_for: seats.iter().copied().map(Seat).collect() })
    }

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn each_member_is_as_late_as_the_round_waited_for_it() {
        let mut watch = Stopwatch::default();
        watch.look(100, waits_for(100, &[1, 2]));
        watch.look(130, waits_for(100, &[2]));
        watch.look(140, waits_for(100, &[2]));
        watch.completed(170);
        watch.look(170, None);
        let lap = watch.applied(200).unwrap();
        assert_eq!(lap.took, us(100));
        assert_eq!([0, 1, 2].map(|seat| lap.wait(Seat(seat))), [us(0), us(30), us(70)]);
        assert_eq!(watch.applied(210), None, "a round is told once");
    }

    #[test]
    fn whoever_contributes_last_waits_for_nobody() {
        let mut watch = Stopwatch::default();
        watch.completed(50);
        watch.look(50, None);
        let lap = watch.applied(60).unwrap();
        assert_eq!((lap.took, lap.wait(Seat(1))), (us(10), us(0)));
    }

    #[test]
    fn a_change_of_the_view_is_no_round() {
        let mut watch = Stopwatch::default();
        watch.look(100, waits_for(100, &[1]));
        watch.look(900, None);
        assert_eq!(watch.applied(1000), None);
        watch.look(2000, waits_for(2000, &[1]));
        watch.completed(2005);
        assert_eq!(watch.applied(2006).unwrap().wait(Seat(1)), us(5));
    }
}
