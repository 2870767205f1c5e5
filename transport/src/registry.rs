//! The one place that says which connection to a peer is its link, and that keeps the handler's order: a name's place is free again
//! only after the handler was told that the link before is down.

use crate::link::{DownReason, NodeName, Peer, Port};
use crate::port::QuicPort;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// A connection that could become the link to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Of the peer.
    pub incarnation: u64,
    /// The number of the peer's choice, where the peer is the one who chooses: the node with the greater name.
    pub chosen: Option<u64>,
}

/// The link that is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub claim: Claim,
    /// It ends, or was silent so long that it may be dead.
    pub doubtful: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The new connection takes the place, once the link before is down.
    Replaces,
    /// The link that is there stays.
    Duplicate,
    /// The new connection is from a life, or of a choice, before the one that is there.
    Stale,
}

/// Which of two connections to one name stays.
///
/// Only the node with the greater name chooses among connections of the same two lives, so the two sides cannot choose
/// differently: it keeps what it has, and the other follows its latest choice. Between lives of the peer each side decides for
/// itself, by the same order.
pub(crate) fn decide(standing: Standing, claim: Claim) -> Verdict {
    let before = standing.claim;
    if claim.incarnation != before.incarnation {
        return if claim.incarnation > before.incarnation { Verdict::Replaces } else { Verdict::Stale };
    }
    match claim.chosen {
        Some(_) if claim.chosen > before.chosen => Verdict::Replaces,
        Some(_) => Verdict::Stale,
        None if standing.doubtful => Verdict::Replaces,
        None => Verdict::Duplicate,
    }
}

/// Why a connection did not become the link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotTaken {
    #[error("there is a link already")]
    Duplicate,
    #[error("incarnation of {name} is {claimed}, and {up} is up")]
    Stale { name: NodeName, claimed: u64, up: u64 },
    #[error("{links} links are up (limit {limit})")]
    TooMany { links: usize, limit: usize },
}

impl NotTaken {
    fn stale(name: &NodeName, claimed: u64, up: u64) -> Self {
        Self::Stale { name: name.clone(), claimed, up }
    }
}

struct Place {
    port: Arc<QuicPort>,
    claim: Claim,
}

pub(crate) struct Registry {
    places: Mutex<BTreeMap<NodeName, Place>>,
    /// A place became free.
    freed: Notify,
    links_max: usize,
    silent_max: Duration,
}

/// The place of a name; free again when this is dropped, which is after the handler was told.
pub(crate) struct Held {
    registry: Arc<Registry>,
    name: NodeName,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.registry.places().remove(&self.name);
        self.registry.freed.notify_waiters();
    }
}

impl Registry {
    pub fn new(links_max: usize, silent_max: Duration) -> Arc<Self> {
        Arc::new(Self { places: Mutex::default(), freed: Notify::new(), links_max, silent_max })
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<NodeName, Place>> {
        // Nothing panics while the lock is held, so a poisoned lock guards nothing broken.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn ports(&self) -> Vec<Arc<QuicPort>> {
        self.places().values().map(|place| place.port.clone()).collect()
    }

    /// Waits until no link to `name` is there.
    pub async fn vacant(&self, name: &NodeName) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if !self.places().contains_key(name) {
                return;
            }
            freed.await;
        }
    }

    /// Whether a connection to this life of a peer could become its link. Asked before the peer is answered: the node with the greater
    /// name is up once it has chosen, and should hear before that what would be refused after it.
    pub fn admits(&self, peer: &Peer) -> Result<(), NotTaken> {
        let places = self.places();
        match places.get(&peer.name) {
            Some(place) if place.claim.incarnation > peer.incarnation => {
                Err(NotTaken::stale(&peer.name, peer.incarnation, place.claim.incarnation))
            }
            Some(_) => Ok(()),
            None if places.len() >= self.links_max => {
                Err(NotTaken::TooMany { links: places.len(), limit: self.links_max })
            }
            None => Ok(()),
        }
    }

    /// Takes the place of the port's peer, after the link that had it is down.
    pub async fn claim(self: &Arc<Self>, port: &Arc<QuicPort>, claim: Claim) -> Result<Held, NotTaken> {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Before the look, so that a place that becomes free after it is not missed.
            freed.as_mut().enable();
            if let Some(held) = self.try_claim(port, claim)? {
                return Ok(held);
            }
            freed.await;
        }
    }

    /// `None`: the link before was told to end.
    fn try_claim(self: &Arc<Self>, port: &Arc<QuicPort>, claim: Claim) -> Result<Option<Held>, NotTaken> {
        let name = port.peer().name.clone();
        let mut places = self.places();
        let Some(place) = places.get(&name) else {
            if places.len() >= self.links_max {
                return Err(NotTaken::TooMany { links: places.len(), limit: self.links_max });
            }
            places.insert(name.clone(), Place { port: port.clone(), claim });
            drop(places);
            return Ok(Some(Held { registry: self.clone(), name }));
        };
        let doubtful = place.port.is_doubtful(self.silent_max);
        match decide(Standing { claim: place.claim, doubtful }, claim) {
            Verdict::Replaces => {
                let before = place.port.clone();
                drop(places);
                before.end(DownReason::Replaced);
                Ok(None)
            }
            Verdict::Duplicate => Err(NotTaken::Duplicate),
            Verdict::Stale if claim.incarnation == place.claim.incarnation => Err(NotTaken::Duplicate),
            Verdict::Stale => Err(NotTaken::Stale { name, claimed: claim.incarnation, up: place.claim.incarnation }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(incarnation: u64, chosen: Option<u64>, doubtful: bool) -> Standing {
        Standing { claim: Claim { incarnation, chosen }, doubtful }
    }

    #[test]
    fn the_greater_name_keeps_what_it_has_while_it_is_sound() {
        let claim = Claim { incarnation: 7, chosen: None };
        assert_eq!(decide(standing(7, None, false), claim), Verdict::Duplicate);
        assert_eq!(decide(standing(7, None, true), claim), Verdict::Replaces);
    }

    #[test]
    fn the_lesser_name_follows_the_latest_choice_and_no_earlier_one() {
        for doubtful in [false, true] {
            let choice =
                |number| decide(standing(7, Some(4), doubtful), Claim { incarnation: 7, chosen: Some(number) });
            assert_eq!([3, 4, 5].map(choice), [Verdict::Stale, Verdict::Stale, Verdict::Replaces]);
        }
    }

    #[test]
    fn a_later_life_replaces_and_an_earlier_one_is_refused() {
        for (doubtful, chosen) in [(false, None), (true, None), (false, Some(1)), (true, Some(1))] {
            let life = |incarnation| decide(standing(7, chosen, doubtful), Claim { incarnation, chosen });
            assert_eq!([life(6), life(8)], [Verdict::Stale, Verdict::Replaces]);
        }
    }

    /// Two nodes, two connections, every order in which the choices and connections can come: at the end both have the same.
    #[test]
    fn both_sides_end_with_the_same_connection_in_any_order() {
        // The greater name sees both connections in either order, and one may be doubtful by then.
        for (order, doubtful) in [([0, 1], false), ([1, 0], false), ([0, 1], true), ([1, 0], true)] {
            let mut choices: Vec<(u64, usize)> = Vec::new();
            let mut greater: Option<usize> = None;
            for connection in order {
                let claim = Claim { incarnation: 1, chosen: None };
                let taken = greater.is_none_or(|_| decide(standing(1, None, doubtful), claim) == Verdict::Replaces);
                if taken {
                    greater = Some(connection);
                    choices.push((choices.len() as u64 + 1, connection));
                }
            }
            // The choices travel on different connections, so the lesser name may hear of them in any order.
            for heard in [choices.clone(), choices.iter().rev().copied().collect()] {
                let mut lesser: Option<(u64, usize)> = None;
                for (number, connection) in heard {
                    let claim = Claim { incarnation: 1, chosen: Some(number) };
                    let replaces = |(before, _)| decide(standing(1, Some(before), false), claim) == Verdict::Replaces;
                    if lesser.is_none_or(replaces) {
                        lesser = Some((number, connection));
                    }
                }
                assert_eq!(lesser.map(|(_, connection)| connection), greater, "{order:?} {doubtful}");
            }
        }
    }
}
