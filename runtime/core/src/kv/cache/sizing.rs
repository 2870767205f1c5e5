//! How a tier's bytes are divided into pools.
//!
//! Two ways: the typical step (shares by what one step of a typical batch holds), and the balanced solve, in which all
//! pools are full at the same number of conversations. Figures are computed once, at start, so shares may be fractions.

use super::lifecycle::{LifeCycle, Policy, Retention};
use std::num::NonZeroU32;

pub mod demand;
mod plan;

pub use plan::{Method, Plan, PlanError, Pool, Request, Tier, TierPlan, Warning, plan};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Device memory is mapped in units of 2 MiB, larger ones for larger quotas, up to 32 MiB.
const DEVICE_GRANULARITY_MIN: u64 = 2 * MIB;
const DEVICE_GRANULARITY_DOUBLINGS_MAX: u32 = 4;

/// The unit in which a pool of device memory grows, in bytes.
pub fn device_granularity(quota: u64) -> u64 {
    let doublings = (quota / GIB).checked_ilog2().unwrap_or(0).min(DEVICE_GRANULARITY_DOUBLINGS_MAX);
    DEVICE_GRANULARITY_MIN << doublings
}

/// One request of a typical step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    pub capacity: u32,
    pub history: u32,
}

/// What a rank is expected to run.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub block_tokens: NonZeroU32,
    /// Average length of a sequence.
    pub sequence_tokens: u32,
    /// Requests at a time, the one in prefill among them.
    pub requests: u32,
    pub step_tokens_max: u32,
    /// Tokens that a step may add to a chunk.
    pub extra_tokens: u32,
    /// Tokens drafted ahead of each decoded one.
    pub draft_tokens: u32,
    /// Shared by all requests.
    pub system_prompt_tokens: u32,
}

impl Workload {
    /// One prefill, and decodes for the rest.
    pub fn residents(&self) -> impl Iterator<Item = Resident> + use<> {
        let prefill = Resident { capacity: self.step_tokens_max.saturating_add(self.extra_tokens), history: 0 };
        let length = self.sequence_tokens;
        let history = length.saturating_sub(self.draft_tokens.saturating_add(1));
        let decodes = self.requests.saturating_sub(1);
        std::iter::once(prefill).chain((0..decodes).map(move |_| Resident { capacity: length, history }))
    }

    /// Slots of each life cycle that one step of this workload holds.
    pub fn typical_slots(&self, life_cycles: &[LifeCycle]) -> Vec<u64> {
        life_cycles.iter().map(|life_cycle| self.slots_of(life_cycle.retention)).collect()
    }

    /// As `typical_slots`, with the end points of `turns` completed turns of every request, the one in prefill included.
    /// Only required windows keep end points; `states` replaces what the recurrent life cycle takes.
    pub fn retaining_slots(
        &self,
        life_cycles: &[LifeCycle],
        turns: u32,
        states: Option<super::checkpoint::States>,
    ) -> Vec<u64> {
        let requests = u64::from(self.requests.max(1));
        let slots = life_cycles.iter().map(|life_cycle| match (life_cycle.retention, life_cycle.policy, states) {
            (Retention::State, _, Some(states)) => states.context + (requests - 1) * states.generation,
            (Retention::Window { tokens, .. }, Policy::Required, _) => {
                let kept = requests * u64::from(turns) * u64::from(end_point_pages(tokens, self.block_tokens));
                self.slots_of(life_cycle.retention) + kept
            }
            _ => self.slots_of(life_cycle.retention),
        });
        slots.collect()
    }

    fn slots_of(&self, retention: Retention) -> u64 {
        if retention == Retention::State {
            return self.residents().count() as u64;
        }
        let system_blocks = self.system_prompt_tokens / self.block_tokens;
        let in_system = |history: u32| {
            let stale = retention.stale(history, self.block_tokens);
            (0..system_blocks).filter(move |block| !stale.contains(block))
        };
        let mut shared = vec![false; system_blocks as usize];
        let mut slots = 0;
        // All decodes are alike, so each kind is computed once.
        let mut residents = self.residents();
        let kinds = [(residents.next(), 1), (residents.next(), u64::from(self.requests.saturating_sub(1)))];
        for (resident, count) in kinds {
            let Some(Resident { capacity, history }) = resident else { continue };
            for block in in_system(history) {
                shared[block as usize] = true;
            }
            let stale = retention.stale(history, self.block_tokens).len() as u64;
            let own = u64::from(capacity.div_ceil(self.block_tokens.get())).saturating_sub(stale);
            slots += count * own.saturating_sub(in_system(history).count() as u64);
        }
        slots + shared.into_iter().filter(|live| *live).count() as u64
    }
}

/// Pages of a window at an end point inside a block: one more than at a block's end.
pub fn end_point_pages(window: NonZeroU32, block_tokens: NonZeroU32) -> u32 {
    let retention = Retention::Window { tokens: window, sink_blocks: 0 };
    retention.live_pages(window.get().saturating_add(block_tokens.get() / 2), block_tokens)
}

/// One pool group: the slot sizes, in bytes, of the pools that allocate together.
pub type SlotSizes = Vec<u64>;

/// Shares of the groups when each holds `slots`, by bytes rounded up to the granularity.
pub fn shares(slots: &[u64], sizes: &[SlotSizes], granularity: u64) -> Vec<f64> {
    let granularity = granularity.max(1);
    let bytes = |(slots, sizes): (&u64, &SlotSizes)| grains(*slots, sizes, granularity) * granularity;
    let bytes: Vec<u64> = slots.iter().zip(sizes).map(bytes).collect();
    let total = bytes.iter().sum::<u64>().max(1) as f64;
    bytes.iter().map(|bytes| *bytes as f64 / total).collect()
}

fn grains(slots: u64, sizes: &SlotSizes, granularity: u64) -> u64 {
    sizes.iter().map(|size| slots.saturating_mul(*size).div_ceil(granularity)).fold(0, u64::saturating_add)
}

/// The most slots that fit into so many units of memory.
fn slots_within(budget_grains: u64, sizes: &SlotSizes, granularity: u64) -> u64 {
    let slot_bytes: u64 = sizes.iter().sum();
    let Some(bound) = budget_grains.saturating_mul(granularity).checked_div(slot_bytes) else { return 0 };
    let (mut fits, mut beyond) = (0, bound + 1);
    while fits + 1 < beyond {
        let middle = fits + (beyond - fits) / 2;
        if grains(middle, sizes, granularity) <= budget_grains {
            fits = middle;
        } else {
            beyond = middle;
        }
    }
    fits
}

/// A tier and what its pools may not fall below.
#[derive(Clone, Copy, Debug)]
pub struct Quota<'a> {
    pub bytes: u64,
    pub granularity: u64,
    pub sizes: &'a [SlotSizes],
    /// Slots that each group has whatever its share.
    pub floors: &'a [u64],
}

impl Quota<'_> {
    /// Slots of each group by its share of the bytes. A group whose share does not reach its floor gets the floor, and
    /// the others divide the rest.
    pub fn pool_slots(&self, shares: &[f64]) -> Vec<u64> {
        let granularity = self.granularity.max(1);
        let mut slots = self.floors.to_vec();
        let mut rest = self.bytes / granularity;
        let mut open: Vec<usize> = (0..slots.len().min(shares.len()).min(self.sizes.len())).collect();
        loop {
            // Smaller shares first: what rounding leaves over goes to those that lose least by it.
            open.sort_by(|a, b| shares[*a].total_cmp(&shares[*b]).then(a.cmp(b)));
            let (mut budget, mut weight) = (rest, open.iter().map(|at| shares[*at]).sum::<f64>());
            let mut given = Vec::with_capacity(open.len());
            for &at in &open {
                let part = if weight > 0.0 { shares[at] / weight } else { 0.0 };
                let fitting =
                    slots_within((budget as f64 * part.clamp(0.0, 1.0)).round() as u64, &self.sizes[at], granularity);
                budget = budget.saturating_sub(grains(fitting, &self.sizes[at], granularity));
                weight -= shares[at];
                given.push((at, fitting));
            }
            let at_floor: Vec<usize> =
                given.iter().filter(|(at, fitting)| *fitting <= self.floors[*at]).map(|(at, _)| *at).collect();
            if at_floor.is_empty() {
                for (at, fitting) in given {
                    slots[at] = fitting;
                }
                return slots;
            }
            for at in &at_floor {
                rest = rest.saturating_sub(grains(slots[*at], &self.sizes[*at], granularity));
            }
            open.retain(|at| !at_floor.contains(at));
        }
    }

    /// Pools that are all full at the same number of conversations: `live` slots for what runs at once, and as many
    /// times `conversation` slots as the bytes allow.
    ///
    /// # Errors
    /// The quota does not hold what runs at once.
    pub fn balanced(&self, live: &[u64], conversation: &[u64]) -> Result<Balanced, TooSmall> {
        let size = |at: usize| -> u128 { self.sizes[at].iter().map(|size| u128::from(*size)).sum() };
        let floor = |at: usize| self.floors.get(at).copied().unwrap_or(0);
        let groups = live.len().min(conversation.len()).min(self.sizes.len());
        let mut pinned = vec![false; groups];
        loop {
            let base = |at: usize| if pinned[at] { floor(at) } else { live[at] };
            let each = |at: usize| if pinned[at] { 0 } else { conversation[at] };
            let wanted: u128 = (0..groups).map(|at| u128::from(base(at)) * size(at)).sum();
            let Some(spare) = u128::from(self.bytes).checked_sub(wanted) else {
                return Err(TooSmall { quota: self.bytes, wanted: u64::try_from(wanted).unwrap_or(u64::MAX) });
            };
            let one: u128 = (0..groups).map(|at| u128::from(each(at)) * size(at)).sum();
            // Rounded down; what is left over is less than a slot of each pool, and no conversation.
            let share = |at: usize| (spare * u128::from(each(at))).checked_div(one).unwrap_or(0) as u64;
            let slots: Vec<u64> = (0..groups).map(|at| base(at) + share(at)).collect();
            let below: Vec<usize> = (0..groups).filter(|at| slots[*at] < floor(*at)).collect();
            if below.is_empty() {
                let conversations = if one == 0 { f64::INFINITY } else { spare as f64 / one as f64 };
                return Ok(Balanced { conversations, slots });
            }
            // Those have their floors, and the others divide the rest.
            below.into_iter().for_each(|at| pinned[at] = true);
        }
    }
}

/// The balanced solve.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    /// Retained conversations at which every pool is full; infinite if one takes nothing.
    pub conversations: f64,
    pub slots: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV quota of {quota} bytes does not hold what runs at once ({wanted} bytes)")]
pub struct TooSmall {
    pub quota: u64,
    pub wanted: u64,
}
