//! Keeps a link to one peer: dials while there is none, with a pause that grows with every failure.

use crate::greeting::{NotUp, Side, greet};
use crate::link::NodeName;
use crate::mesh::{Phase, Shared, Timings};
use crate::session::{Session, enter};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// So many connections in a row that the peer did not want, since it has one.
const DUPLICATES_MAX: u32 = 8;

/// Pauses between dials: doubled with each failure, and half of each is random, so that nodes that lost each other at the same
/// time do not meet at the same time again.
pub(crate) struct BackOff {
    min: Duration,
    max: Duration,
    failures: u32,
}

impl BackOff {
    pub fn new(timings: &Timings) -> Self {
        Self { min: timings.back_off_min, max: timings.back_off_max, failures: 0 }
    }

    /// `random` decides within the half that is random.
    fn pause(&mut self, random: u64) -> Duration {
        let doubled = 1u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        let whole = self.min.saturating_mul(doubled).min(self.max);
        self.failures = self.failures.saturating_add(1);
        let share = random as f64 / u64::MAX as f64;
        whole.mul_f64(0.5 + share / 2.0)
    }

    /// A link that stood for long means that the peer is sound; one that fell at once does not.
    fn stood(&mut self, for_time: Duration) {
        if for_time >= self.max {
            self.failures = 0;
        }
    }
}

pub(crate) struct Dialer {
    pub shared: Arc<Shared>,
    pub peer: NodeName,
    pub address: watch::Receiver<String>,
}

impl Dialer {
    pub async fn run(self, mut life: watch::Receiver<Phase>) {
        let timings = &self.shared.timings;
        let mut back_off = BackOff::new(timings);
        let mut failing: Option<String> = None;
        let mut duplicates = 0;
        loop {
            let tried = tokio::select! {
                _ = life.wait_for(|phase| *phase != Phase::Running) => return,
                tried = self.dial() => tried,
            };
            match tried {
                Ok(session) => {
                    (failing, duplicates) = (None, 0);
                    let began = Instant::now();
                    session.run(timings.heartbeat, life.clone()).await;
                    back_off.stood(began.elapsed());
                }
                Err(NotUp::Duplicate) => {
                    duplicates += 1;
                    // Now and then is how two that dial at once meet; again and again is something else.
                    if duplicates == DUPLICATES_MAX {
                        let incarnation = self.shared.hello.incarnation;
                        tracing::warn!(peer = %self.peer, incarnation, "peer has a link to another process of this name and life");
                    }
                }
                Err(failed) => self.report(&failed, &mut failing),
            }
            let pause = back_off.pause(self.random(back_off.failures));
            tokio::select! {
                _ = life.wait_for(|phase| *phase != Phase::Running) => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Differs between nodes and lives, as it must, and is the same when a simulation runs again.
    fn random(&self, failures: u32) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.shared.hello.name, self.shared.hello.incarnation, &self.peer, failures).hash(&mut hasher);
        hasher.finish()
    }

    /// Once for each reason in a row, however often it is tried.
    fn report(&self, failed: &NotUp, failing: &mut Option<String>) {
        let address = self.address.borrow().clone();
        let why = match failed {
            NotUp::Refused { why, .. } | NotUp::Lost(why) => why.clone(),
            NotUp::Duplicate => return,
        };
        if failing.as_ref() == Some(&why) {
            return;
        }
        tracing::warn!(peer = %self.peer, address, why, "no link to peer, dialing on");
        if let NotUp::Refused { .. } = failed {
            self.shared.handler.refused(self.peer.as_str(), &why);
        }
        *failing = Some(why);
    }

    /// Waits until there is no link, then tries each address of the peer until one is a link.
    async fn dial(&self) -> Result<Session, NotUp> {
        self.shared.registry.vacant(&self.peer).await;
        let address = self.address.borrow().clone();
        let limit = self.shared.timings.hello;
        let resolved = timeout(limit, tokio::net::lookup_host(&address)).await;
        let found = match resolved {
            Ok(Ok(found)) => found.collect::<Vec<_>>(),
            Ok(Err(error)) => return Err(NotUp::Lost(format!("{address} is no address: {error}"))),
            Err(_) => return Err(NotUp::Lost(format!("{address} was not resolved within {limit:?}"))),
        };
        let mut failed = NotUp::Lost(format!("{address} has no addresses"));
        for address in found {
            let tried = timeout(limit, self.dial_one(address)).await;
            match tried.unwrap_or_else(|_| Err(NotUp::Lost(format!("no answer from {address} within {limit:?}")))) {
                Err(error @ (NotUp::Lost(_) | NotUp::Refused { .. })) => failed = error,
                decided => return decided,
            }
        }
        Err(failed)
    }

    async fn dial_one(&self, address: SocketAddr) -> Result<Session, NotUp> {
        let Shared { endpoint, client, .. } = &*self.shared;
        let peer = self.peer.as_str();
        let connecting = endpoint.connect_with(client.clone(), address, peer);
        let connecting = connecting.map_err(|error| NotUp::Lost(format!("{address} cannot be dialed: {error}")))?;
        let connection = connecting.await.map_err(|error| crate::greeting::not_up(peer, &error))?;
        let greeted = greet(&self.shared, connection, Side::Dialed { expected: &self.peer }).await?;
        enter(&self.shared, greeted).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_limit_and_half_is_random() {
        let mut back_off = BackOff::new(&Timings::default());
        let millis: Vec<u128> = (0..10).map(|_| back_off.pause(u64::MAX).as_millis()).collect();
        assert_eq!(millis, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(back_off.pause(0).as_millis(), 5_000);
        back_off.failures = u32::MAX;
        assert_eq!(back_off.pause(0).as_millis(), 5_000);
    }

    #[test]
    fn only_a_link_that_stood_ends_the_growth() {
        let mut back_off = BackOff::new(&Timings::default());
        back_off.pause(0);
        back_off.stood(Duration::from_secs(1));
        assert_eq!(back_off.pause(u64::MAX).as_millis(), 100);
        back_off.stood(Duration::from_secs(10));
        assert_eq!(back_off.pause(u64::MAX).as_millis(), 50);
    }
}
