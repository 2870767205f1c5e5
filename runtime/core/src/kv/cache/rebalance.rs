//! When pools should have other sizes: what sequences really needed, against what the pools were made for.
//!
//! The target is the balanced solve of `sizing`, with the lengths that were measured and the turns that are kept. So a
//! rebalance never takes from a window what its end points need.

use super::lifecycle::LifeCycle;
use super::sizing::demand::Demand;
use super::sizing::{Method, Request, SlotSizes, Tier};

/// When to act (section 13).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Sequences that were closed before anything is done.
    pub samples_min: u64,
    /// Between two changes.
    pub cooldown_us: u64,
    /// Sequences that are closed between two looks at the targets.
    pub interval: u64,
    /// A pool that is off by more than this factor is worth a change.
    pub threshold: f64,
    /// What a sample still weighs after the next one.
    pub decay: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self { samples_min: 2000, cooldown_us: 120_000_000, interval: 100, threshold: 1.25, decay: 0.9999 }
    }
}

/// A length that moves by no more than this factor counts as it was: noise at a block's end could double a small pool.
const NOISE: f64 = 1.05;

/// A mean of squares in which older samples fade: long sequences weigh more.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Length {
    squares: f64,
    weight: f64,
    /// As the last look took it.
    settled: Option<u32>,
}

impl Length {
    fn add(&mut self, tokens: u32, decay: f64) {
        self.squares = self.squares * decay + f64::from(tokens) * f64::from(tokens);
        self.weight = self.weight * decay + 1.0;
    }

    /// `None` before the first sample.
    fn tokens(&self) -> Option<u32> {
        // No square is above that of `u32::MAX`.
        let root = (self.weight > 0.0).then(|| (self.squares / self.weight).sqrt())?;
        let near = |settled: &u32| {
            let settled = f64::from(*settled);
            root <= settled * NOISE && settled <= root * NOISE
        };
        Some(self.settled.filter(near).unwrap_or(root.round() as u32).max(1))
    }

    fn settle(&mut self) {
        self.settled = self.tokens();
    }
}

/// What pools are sized for.
#[derive(Clone, Debug)]
pub struct Pools {
    pub life_cycles: Vec<LifeCycle>,
    /// Slot sizes of each pool group.
    pub sizes: Vec<SlotSizes>,
    /// The device first.
    pub tiers: Vec<Tier>,
    /// Expected at start. Its lengths give way to those that are measured.
    pub demand: Demand,
}

#[derive(Clone, Debug)]
pub struct Rebalancer {
    config: Config,
    pools: Pools,
    capacity: Length,
    history: Length,
    reused: Length,
    samples: u64,
    /// Samples at the last look.
    looked: u64,
    acted_us: Option<u64>,
}

impl Rebalancer {
    pub fn new(config: Config, pools: Pools) -> Self {
        let (capacity, history, reused) = Default::default();
        Self { config, pools, capacity, history, reused, samples: 0, looked: 0, acted_us: None }
    }

    /// A sequence was created with so many reused tokens. One that found nothing does not say how long is what is kept.
    pub fn created(&mut self, reused: u32) {
        if reused > 0 {
            self.reused.add(reused, self.config.decay);
        }
    }

    /// A sequence was closed.
    pub fn closed(&mut self, capacity: u32, history: u32) {
        self.capacity.add(capacity, self.config.decay);
        self.history.add(history, self.config.decay);
        self.samples += 1;
    }

    /// Sizes by tier and pool group, if the current ones are off by enough and it is time. Whoever follows says so by `acted`.
    pub fn propose(&mut self, now_us: u64, current: &[Vec<u32>]) -> Option<Vec<Vec<u32>>> {
        let Config { samples_min, cooldown_us, interval, threshold, .. } = self.config;
        let cools = self.acted_us.is_some_and(|acted| now_us.saturating_sub(acted) < cooldown_us);
        if cools || self.samples < samples_min.max(1) || self.samples - self.looked < interval {
            return None;
        }
        self.looked = self.samples;
        [&mut self.capacity, &mut self.history, &mut self.reused].into_iter().for_each(Length::settle);
        let targets = self.targets()?;
        let pairs = targets.iter().zip(current).flat_map(|(targets, current)| targets.iter().zip(current));
        let is_off = pairs.into_iter().any(|(target, current)| {
            let (target, current) = (f64::from(*target), f64::from(*current));
            target > current * threshold || current > target * threshold
        });
        is_off.then_some(targets)
    }

    /// The pools were given other sizes.
    pub fn acted(&mut self, now_us: u64) {
        self.acted_us = Some(now_us);
    }

    /// What the pools are to hold, by what was measured: on the device by what sequences grew to, below it by what was
    /// reused.
    pub fn demand(&self, tier: usize) -> Demand {
        let mut demand = self.pools.demand.clone();
        let capacity = self.capacity.tokens().unwrap_or(demand.workload.sequence_tokens);
        let history = self.history.tokens().unwrap_or(demand.retained.tokens);
        demand.workload.sequence_tokens = capacity;
        demand.retained.tokens = match tier {
            0 => history,
            _ => self.reused.tokens().unwrap_or(history),
        };
        demand
    }

    /// `None` where the memory does not hold what runs at once.
    fn targets(&self) -> Option<Vec<Vec<u32>>> {
        let Pools { life_cycles, sizes, tiers, .. } = &self.pools;
        let slots = (0..tiers.len()).map(|tier| {
            let demand = &self.demand(tier);
            let request = Request { life_cycles, sizes, tiers, demand, method: Method::Balanced, ratio: None };
            let slots = request.balanced(tier).ok()?;
            slots.into_iter().map(|slots| u32::try_from(slots).ok()).collect()
        });
        slots.collect()
    }
}
