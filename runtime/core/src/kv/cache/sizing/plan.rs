//! The one entry: from a model's life cycles, the memory of each tier and what is expected, to slots of every pool.

use super::demand::Demand;
use super::{Quota, SlotSizes, TooSmall, Workload, grains, shares};
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use serde::{Deserialize, Serialize};

/// Ratios that are told may be off by so much in sum.
const RATIO_SUM_TOLERANCE: f64 = 1e-6;
/// Pools that are full within so much of each other's conversations are full together.
const TOGETHER: f64 = 1.05;

/// How the bytes of a tier are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// All pools are full at the same number of conversations.
    #[default]
    Balanced,
    /// By what a typical step holds.
    TypicalStep,
    /// As `TypicalStep`, with the end points of all turns but one of every request that generates.
    TypicalStepRetaining,
}

/// The memory of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    pub bytes: u64,
    /// Pools grow by so many bytes, where shares are turned into slots.
    pub granularity: u64,
}

impl Tier {
    /// Memory and disks are given out in pages of 4 KiB.
    const PAGE_BYTES: u64 = 4096;

    pub fn device(bytes: u64) -> Self {
        Self { bytes, granularity: super::device_granularity(bytes) }
    }

    /// Of the host, or a disk.
    pub fn below(bytes: u64) -> Self {
        Self { bytes, granularity: Self::PAGE_BYTES }
    }
}

/// What is to be divided, for what.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub life_cycles: &'a [LifeCycle],
    /// Slot sizes of each pool group.
    pub sizes: &'a [SlotSizes],
    /// The device first.
    pub tiers: &'a [Tier],
    pub demand: &'a Demand,
    pub method: Method,
    /// A share of the device's bytes for each life cycle. It goes before the method; floors hold all the same.
    pub ratio: Option<&'a [f64]>,
}

/// One pool of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pool {
    pub slots: u64,
    pub bytes: u64,
    /// Slots that requests need, which run on the device or rest below it.
    pub live: u64,
    /// Conversations that it holds beside these; `None` if they need nothing of it.
    pub conversations: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierPlan {
    pub quota: u64,
    pub used: u64,
    pub pools: Vec<Pool>,
    /// Of the pool that holds the fewest.
    pub conversations: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    pub tiers: Vec<TierPlan>,
    /// Slots of each pool group that one conversation needs.
    pub conversation: Vec<u64>,
    /// End points that a turn leaves.
    pub end_points: u32,
    /// Over all tiers.
    pub conversations: Option<f64>,
    /// The pool group that is full first; `None` if all are full together.
    pub bottleneck: Option<usize>,
    pub warnings: Vec<Warning>,
}

impl Plan {
    /// Slots by tier and pool group, as a manager's configuration has them.
    pub fn slots(&self) -> Vec<Vec<u32>> {
        let slots = |tier: &TierPlan| {
            let pools = tier.pools.iter();
            pools.map(|pool| u32::try_from(pool.slots).unwrap_or(u32::MAX)).collect()
        };
        self.tiers.iter().map(slots).collect()
    }
}

/// What whoever reads a plan should know.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Warning {
    #[error("device quota of {quota} bytes is below the pools' floors, which are taken instead ({floors} bytes)")]
    BelowFloors { quota: u64, floors: u64 },
    #[error("tier {tier} of {quota} bytes does not hold what its requests need at once ({wanted} bytes)")]
    BelowLive { tier: usize, quota: u64, wanted: u64 },
    #[error(
        "the device holds {conversations:.1} conversations beside what runs, but {requests} requests run at a time"
    )]
    FewerThanRequests { conversations: f64, requests: u32 },
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error("{field} is {value} ({why})")]
    Field { field: &'static str, value: String, why: &'static str },
    #[error("pool_ratio has {found} numbers, there are {life_cycles} life cycles")]
    RatioLength { found: usize, life_cycles: usize },
    #[error("life cycle {life_cycle} is in pool group {group}, but there are {groups}")]
    UnknownGroup { life_cycle: usize, group: u8, groups: usize },
    #[error(
        "device quota of {quota} bytes does not hold the states of {states} resident and reserved requests beside the \
         other pools' floors ({wanted} bytes)"
    )]
    StatesDoNotFit { quota: u64, states: u64, wanted: u64 },
}

/// Divides every tier.
///
/// # Errors
/// A value that cannot be, or recurrent states that do not fit.
pub fn plan(request: &Request<'_>) -> Result<Plan, PlanError> {
    request.validate()?;
    let mut warnings = Vec::new();
    let mut slots: Vec<Vec<u64>> = Vec::with_capacity(request.tiers.len());
    for tier in 0..request.tiers.len() {
        let divided = request.divide(tier, slots.first().map(Vec::as_slice), &mut warnings)?;
        slots.push(divided);
    }
    let conversation = request.by_group(&request.demand.conversation(request.life_cycles));
    let mut tiers = Vec::with_capacity(slots.len());
    for (tier, slots) in slots.iter().enumerate() {
        tiers.push(request.tier_plan(tier, slots, &conversation));
    }
    let requests = request.demand.workload.requests;
    let device = tiers.first().and_then(|tier| tier.conversations);
    if let Some(conversations) = device.filter(|holds| *holds < f64::from(requests)) {
        warnings.push(Warning::FewerThanRequests { conversations, requests });
    }
    let (conversations, bottleneck) = narrowest(&tiers, request.sizes.len());
    let end_points = request.demand.end_points(request.life_cycles);
    Ok(Plan { tiers, conversation, end_points, conversations, bottleneck, warnings })
}

/// Conversations that fit over all tiers, and the pool that bounds them.
fn narrowest(tiers: &[TierPlan], groups: usize) -> (Option<f64>, Option<usize>) {
    let of = |group: usize| -> Option<f64> { tiers.iter().map(|tier| tier.pools[group].conversations).sum() };
    let holds: Vec<(usize, f64)> = (0..groups).filter_map(|group| Some((group, of(group)?))).collect();
    let Some(&(least, fewest)) = holds.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { return (None, None) };
    let together = holds.iter().all(|(_, holds)| *holds <= fewest * TOGETHER);
    (Some(fewest), (!together || holds.len() == 1).then_some(least))
}

impl Request<'_> {
    /// The balanced solve of one tier.
    ///
    /// # Errors
    /// The tier does not hold what its requests need at once.
    pub fn balanced(&self, tier: usize) -> Result<Vec<u64>, TooSmall> {
        let (live, floors) = (self.live(tier), self.floors(tier));
        let conversation = self.by_group(&self.demand.conversation(self.life_cycles));
        let quota = Quota { bytes: self.tiers[tier].bytes, granularity: 1, sizes: self.sizes, floors: &floors };
        Ok(quota.balanced(&live, &conversation)?.slots)
    }

    fn divide(&self, tier: usize, device: Option<&[u64]>, warnings: &mut Vec<Warning>) -> Result<Vec<u64>, PlanError> {
        let Tier { bytes: quota, granularity } = self.tiers[tier];
        let floors = self.floors(tier);
        let is_balanced = self.ratio.is_none() && self.method == Method::Balanced;
        let granularity = if is_balanced { 1 } else { granularity.max(1) };
        let lowest = self.bytes(&floors, granularity);
        if lowest > quota {
            if let Some(states) = self.states(&floors) {
                return Err(PlanError::StatesDoNotFit { quota, states, wanted: lowest });
            }
            warnings.push(Warning::BelowFloors { quota, floors: lowest });
            return Ok(floors);
        }
        let shares = match (self.ratio, device) {
            _ if is_balanced => match self.balanced(tier) {
                Ok(slots) => return Ok(slots),
                Err(TooSmall { wanted, .. }) => {
                    warnings.push(Warning::BelowLive { tier, quota, wanted });
                    shares(&self.live(tier), self.sizes, granularity)
                }
            },
            // Colder tiers have the device's proportions.
            (_, Some(device)) => shares(device, self.sizes, granularity),
            (Some(ratio), None) => self.ratio_by_group(ratio),
            (None, None) => shares(&self.by_group(&self.typical()), self.sizes, granularity),
        };
        Ok(Quota { bytes: quota, granularity, sizes: self.sizes, floors: &floors }.pool_slots(&shares))
    }

    /// Slots of each life cycle in a typical step.
    fn typical(&self) -> Vec<u64> {
        let Demand { workload, retained, .. } = self.demand;
        let turns = if self.method == Method::TypicalStepRetaining { retained.turns.max(1) } else { 1 };
        let ends = u64::from(turns - 1) * u64::from(workload.requests.saturating_sub(1));
        let states = u64::from(workload.requests.max(1)) * self.demand.states_of(turns).generation;
        // Each end point is as long as the widest window and a half block, for every life cycle.
        let windows = self.life_cycles.iter().filter_map(|one| match one.retention {
            Retention::Window { tokens, .. } => Some(tokens.get()),
            Retention::Full | Retention::State => None,
        });
        let end = windows.max().map(|tokens| tokens.saturating_add(workload.block_tokens.get() / 2));
        let slots = workload.typical_slots(self.life_cycles).into_iter().zip(self.life_cycles);
        let slots = slots.map(|(slots, one)| match (one.retention, end) {
            (Retention::State, _) => states + u64::from(self.demand.reserved_states),
            (_, None) => slots,
            (retention, Some(end)) => slots + ends * u64::from(retention.live_pages(end, workload.block_tokens)),
        });
        slots.collect()
    }

    fn tier_plan(&self, tier: usize, slots: &[u64], conversation: &[u64]) -> TierPlan {
        let live = self.live(tier);
        let pools: Vec<Pool> = (0..slots.len())
            .map(|group| {
                let (slots, live, each) = (slots[group], live[group], conversation[group]);
                let spare = slots.saturating_sub(live) as f64;
                Pool {
                    slots,
                    bytes: grains(slots, &self.sizes[group], 1),
                    live,
                    conversations: (each > 0).then(|| spare / each as f64),
                }
            })
            .collect();
        let conversations = pools.iter().filter_map(|pool| pool.conversations).min_by(f64::total_cmp);
        let used = pools.iter().map(|pool| pool.bytes).sum();
        TierPlan { quota: self.tiers[tier].bytes, used, pools, conversations }
    }

    fn live(&self, tier: usize) -> Vec<u64> {
        let demand = self.demand;
        self.by_group(&if tier == 0 { demand.live(self.life_cycles) } else { demand.suspended(self.life_cycles) })
    }

    /// Only the device has floors.
    fn floors(&self, tier: usize) -> Vec<u64> {
        match tier {
            0 => self.by_group(&self.demand.floors(self.life_cycles)),
            _ => vec![0; self.sizes.len()],
        }
    }

    fn by_group(&self, slots: &[u64]) -> Vec<u64> {
        let mut groups = vec![0_u64; self.sizes.len()];
        for (life_cycle, slots) in self.life_cycles.iter().zip(slots) {
            let group = &mut groups[usize::from(life_cycle.group)];
            *group = group.saturating_add(*slots);
        }
        groups
    }

    fn ratio_by_group(&self, ratio: &[f64]) -> Vec<f64> {
        let mut groups = vec![0.0; self.sizes.len()];
        for (life_cycle, share) in self.life_cycles.iter().zip(ratio) {
            groups[usize::from(life_cycle.group)] += share;
        }
        groups
    }

    fn bytes(&self, slots: &[u64], granularity: u64) -> u64 {
        let bytes = slots.iter().zip(self.sizes).map(|(slots, sizes)| grains(*slots, sizes, granularity));
        bytes.fold(0, u64::saturating_add).saturating_mul(granularity)
    }

    /// The least states, if there are recurrent layers.
    fn states(&self, floors: &[u64]) -> Option<u64> {
        let recurrent = self.life_cycles.iter().find(|one| one.is_state())?;
        Some(floors[usize::from(recurrent.group)])
    }

    fn validate(&self) -> Result<(), PlanError> {
        let field =
            |field, value: &dyn std::fmt::Display, why| Err(PlanError::Field { field, value: value.to_string(), why });
        if self.life_cycles.is_empty() {
            return field("life_cycles", &"empty", "a model has at least one");
        }
        for (life_cycle, one) in self.life_cycles.iter().enumerate() {
            let (group, groups) = (one.group, self.sizes.len());
            if usize::from(group) >= groups {
                return Err(PlanError::UnknownGroup { life_cycle, group, groups });
            }
            let is_state = one.is_state();
            if is_state
                && (one.policy != Policy::Required || self.life_cycles[..life_cycle].iter().any(LifeCycle::is_state))
            {
                return field("life_cycles", &format!("{life_cycle}: state"), "one at most, which is required");
            }
        }
        if let Some(sizes) = self.sizes.iter().find(|sizes| sizes.iter().all(|size| *size == 0)) {
            return field("slot_bytes", &format!("{sizes:?}"), "a slot has bytes");
        }
        if self.tiers.is_empty() {
            return field("tiers", &"empty", "the device is the first");
        }
        let Demand { workload: Workload { sequence_tokens, requests, .. }, retained, .. } = self.demand;
        for (name, value) in [("sequence_tokens", sequence_tokens), ("requests", requests), ("turns", &retained.turns)]
        {
            if *value == 0 {
                return field(name, value, "it must be above 0");
            }
        }
        if *sequence_tokens > self.demand.sequence_tokens_max {
            return field("sequence_tokens", sequence_tokens, "it is above sequence_tokens_max");
        }
        self.validate_ratio()
    }

    fn validate_ratio(&self) -> Result<(), PlanError> {
        let Some(ratio) = self.ratio else { return Ok(()) };
        let wrong = |value: f64, why| Err(PlanError::Field { field: "pool_ratio", value: value.to_string(), why });
        let life_cycles = self.life_cycles.len();
        if ratio.len() != life_cycles {
            return Err(PlanError::RatioLength { found: ratio.len(), life_cycles });
        }
        if let Some(share) = ratio.iter().find(|share| !(share.is_finite() && **share > 0.0)) {
            return wrong(*share, "each share must be positive");
        }
        let sum: f64 = ratio.iter().sum();
        match (sum - 1.0).abs() <= RATIO_SUM_TOLERANCE {
            true => Ok(()),
            false => wrong(sum, "in sum; the shares must add up to 1"),
        }
    }
}
