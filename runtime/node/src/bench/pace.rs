//! When requests are due.

use rand_distr::{Distribution, Gamma};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;
use std::time::Duration;

/// How requests arrive, and how many may be open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Arrivals a second, on average; `None`: all at once.
    pub rate: Option<f64>,
    /// Shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, more is regular.
    pub burstiness: f64,
    /// Requests that are open at most; the others wait.
    pub concurrency_max: Option<u32>,
}

/// Longest gap that is kept; a rate so low asks for nothing.
const GAP_S_MAX: f64 = 1e9;

impl Pace {
    /// Whether a request is sent when another has ended, and not at a time of its own.
    pub fn is_closed_loop(&self) -> bool {
        self.rate.is_none() && self.concurrency_max.is_some()
    }

    /// Times from the beginning at which requests are due, without end. The first is due at once.
    pub fn due(&self, seed: u64) -> impl Iterator<Item = Duration> + Send + use<> {
        let gaps = self.rate.and_then(|rate| Gamma::new(self.burstiness, 1.0 / (rate * self.burstiness)).ok());
        let mut random = stream(seed, Purpose::Arrivals, 0);
        let mut at = 0.0;
        std::iter::from_fn(move || {
            let due = at;
            at += gaps.map_or(0.0, |gaps| gaps.sample(&mut random).min(GAP_S_MAX));
            Some(Duration::try_from_secs_f64(due).unwrap_or(Duration::MAX))
        })
    }
}

/// What random numbers are for: each purpose has its own, so that one does not shift another.
#[derive(Clone, Copy)]
pub enum Purpose {
    Arrivals = 1,
    Conversation = 2,
    Prefix = 3,
    Order = 4,
}

/// Random numbers that follow from the seed alone.
pub fn stream(seed: u64, purpose: Purpose, index: u64) -> Pcg64 {
    let mut bytes = [0; 24];
    for (part, number) in bytes.chunks_exact_mut(8).zip([seed, purpose as u64, index]) {
        part.copy_from_slice(&number.to_le_bytes());
    }
    Pcg64::from_seed(*blake3::hash(&bytes).as_bytes())
}
