//! What a KV manager is built for, and what is wrong with a configuration or a call.

use super::events::EventLimits;
use super::lifecycle::{LifeCycle, Policy, Priority, Retention};
use super::plans::PlanId;
use super::sequence::SequenceId;
use crate::ids::ConversationKey;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// Priority classes end here.
pub const PRIORITY_MAX: u8 = 100;
/// Parts of a whole in `utilisation_ppm_max`.
pub const PPM: u32 = 1_000_000;

/// When blocks are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Commits {
    /// Every block as it fills, with the pages of every life cycle.
    EveryBlock,
    /// After each commit exactly what is needed to resume there. Recurrent layers need it.
    EndPoints,
}

/// In which order droppable pages go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Eviction {
    /// Each on its own: by priority, least recent first.
    #[default]
    Pages,
    /// With the end points that need them: those that serve none first, then by the tokens that they save for their bytes,
    /// by priority, least recent first.
    EndPoints,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub block_tokens: NonZeroU32,
    pub life_cycles: Vec<LifeCycle>,
    /// Slots by tier and pool group; tier 0 is the device.
    pub tiers: Vec<Vec<u32>>,
    pub commits: Commits,
    #[serde(default)]
    pub eviction: Eviction,
    /// A sequence resumes only while each group's unavailable share of the device, in parts per million, is at most this.
    pub utilisation_ppm_max: u32,
    /// Blocks that are not full may be reused.
    pub partial_reuse: bool,
    /// Tokens of look-ahead that a match is shortened by.
    pub match_backoff_tokens: u32,
    /// Completed turns of a conversation whose end points stay.
    pub turns_max: u32,
    /// Conversations that are remembered; beyond them, the one used longest ago expires.
    pub conversations_max: u32,
    /// Time after its last turn began or ended at which a conversation expires; `None`: only others make it expire.
    pub conversation_ttl_us: Option<u64>,
    /// Share of each pool group's slots, all tiers together, that one scope's pages may take while nobody uses them, in parts
    /// per million; `None`: any.
    pub scope_quota_ppm: Option<u32>,
    /// Where every block is published: tokens before the end of a prompt, its window apart, at which a later turn may leave
    /// it. The windows' pages there go last, their other pages first. 0: each life cycle's own classes.
    pub endpoint_rewind_tokens: u32,
    /// Events of what is stored, moved and removed are logged; `None` logs nothing.
    #[serde(default)]
    pub events: Option<EventLimits>,
}

/// Conversations that are remembered, where nothing else is said.
pub const CONVERSATIONS_MAX_DEFAULT: u32 = 65_536;

impl Config {
    /// For life cycles over pools of `tiers[tier][group]` slots. Every block is published, unless there are recurrent layers;
    /// pages go one by one; nothing is limited, hinted or logged.
    pub fn new(block_tokens: NonZeroU32, life_cycles: Vec<LifeCycle>, tiers: Vec<Vec<u32>>) -> Self {
        let has_states = life_cycles.iter().any(LifeCycle::is_state);
        Self {
            block_tokens,
            life_cycles,
            tiers,
            commits: if has_states { Commits::EndPoints } else { Commits::EveryBlock },
            eviction: Eviction::Pages,
            utilisation_ppm_max: PPM,
            partial_reuse: true,
            match_backoff_tokens: 0,
            turns_max: 1,
            conversations_max: CONVERSATIONS_MAX_DEFAULT,
            conversation_ttl_us: None,
            scope_quota_ppm: None,
            endpoint_rewind_tokens: 0,
            events: None,
        }
    }

    /// # Errors
    /// The first contradiction.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let groups = self.tiers.first().map_or(0, Vec::len);
        if self.life_cycles.is_empty() || self.life_cycles.len() > usize::from(u8::MAX) {
            return Err(ConfigError::LifeCycles { life_cycles: self.life_cycles.len() });
        }
        if groups == 0 || groups > usize::from(u8::MAX) || self.tiers.len() > usize::from(u8::MAX) {
            return Err(ConfigError::Tiers { tiers: self.tiers.len(), groups });
        }
        if let Some(tier) = self.tiers.iter().position(|slots| slots.len() != groups) {
            return Err(ConfigError::UnevenTier { tier, groups, found: self.tiers[tier].len() });
        }
        if self.tiers.iter().flatten().map(|slots| u64::from(*slots)).sum::<u64>() >= u64::from(u32::MAX) {
            return Err(ConfigError::TooManySlots);
        }
        if let Some(group) = self.tiers[0].iter().position(|slots| *slots == 0) {
            return Err(ConfigError::EmptyPool { group });
        }
        if let Some(quota_ppm) = self.scope_quota_ppm.filter(|quota_ppm| *quota_ppm > PPM) {
            return Err(ConfigError::ScopeQuota { quota_ppm });
        }
        if self.endpoint_rewind_tokens > 0 && self.commits == Commits::EndPoints {
            return Err(ConfigError::RewindNeedsEveryBlock { rewind_tokens: self.endpoint_rewind_tokens });
        }
        for (index, life_cycle) in self.life_cycles.iter().enumerate() {
            if usize::from(life_cycle.group) >= groups {
                return Err(ConfigError::UnknownGroup { life_cycle: index, group: life_cycle.group, groups });
            }
            let classes = match &life_cycle.priority {
                Priority::Uniform(class) => std::slice::from_ref(class),
                Priority::ByOrdinal(classes) => classes,
            };
            if let Some(&class) = classes.iter().find(|class| **class > PRIORITY_MAX) {
                return Err(ConfigError::UnknownPriority { life_cycle: index, class });
            }
        }
        let states: Vec<&LifeCycle> = self.life_cycles.iter().filter(|one| one.retention == Retention::State).collect();
        match states[..] {
            [] => Ok(()),
            [_] if self.commits != Commits::EndPoints => Err(ConfigError::StatesNeedEndPoints),
            [state] if state.policy != Policy::Required => Err(ConfigError::StatesAreRequired),
            [_] => Ok(()),
            _ => Err(ConfigError::ManyStates { found: states.len() }),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("KV manager of {life_cycles} life cycles (1 to 255 are possible)")]
    LifeCycles { life_cycles: usize },
    #[error("KV manager of {tiers} tiers with {groups} pool groups (1 to 255 of each are possible)")]
    Tiers { tiers: usize, groups: usize },
    #[error("KV tier {tier} has {found} pool groups, the device has {groups}")]
    UnevenTier { tier: usize, groups: usize, found: usize },
    #[error("KV tiers have more slots than 32 bits count")]
    TooManySlots,
    #[error("KV pool group {group} has no slot on the device")]
    EmptyPool { group: usize },
    #[error("KV quota of a scope is {quota_ppm} parts per million (at most {PPM})")]
    ScopeQuota { quota_ppm: u32 },
    #[error("KV end points are kept for a rewind of {rewind_tokens} tokens, but only end points are committed")]
    RewindNeedsEveryBlock { rewind_tokens: u32 },
    #[error("KV life cycle {life_cycle} is in pool group {group}, but there are {groups}")]
    UnknownGroup { life_cycle: usize, group: u8, groups: usize },
    #[error("KV life cycle {life_cycle} has priority {class} (at most {PRIORITY_MAX})")]
    UnknownPriority { life_cycle: usize, class: u8 },
    #[error("KV life cycle of recurrent layers needs commits at end points only")]
    StatesNeedEndPoints,
    #[error("KV life cycle of recurrent layers is always required")]
    StatesAreRequired,
    #[error("KV manager has {found} life cycles of recurrent layers (at most one)")]
    ManyStates { found: usize },
}

/// Which side a refused call is wrong on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The values.
    Argument,
    /// The order of calls.
    Logic,
    /// The caller contradicts the configuration.
    Assertion,
}

/// A call that was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Error {
    #[error("{sequence} is not open")]
    UnknownSequence { sequence: SequenceId },
    #[error("{sequence} is open already")]
    DuplicateSequence { sequence: SequenceId },
    #[error("history cannot go back from {from} to {to} tokens")]
    HistoryWentBack { from: u32, to: u32 },
    #[error("capacity of {capacity} tokens is below the history of {history}")]
    CapacityBelowHistory { capacity: u32, history: u32 },
    #[error("commit up to {to} tokens is beyond the capacity of {capacity}")]
    BeyondCapacity { to: u64, capacity: u32 },
    #[error("life cycle {life_cycle} cannot be restored on its own")]
    NotSelectable { life_cycle: u8 },
    #[error("{plan} was dropped or never made")]
    UnknownPlan { plan: PlanId },
    #[error("{sequence} is active")]
    NotSuspended { sequence: SequenceId },
    #[error("{sequence} is suspended")]
    NotActive { sequence: SequenceId },
    #[error("{sequence} does not commit any more")]
    Stopped { sequence: SequenceId },
    #[error("{sequence} still commits")]
    StillCommits { sequence: SequenceId },
    #[error("{sequence} is not the current turn of {conversation}")]
    NotCurrent { sequence: SequenceId, conversation: ConversationKey },
    #[error("{open} sequences are open")]
    OpenSequences { open: usize },
    #[error("commit from {from} to {to} tokens neither starts nor ends at the history of {history}")]
    OffHistory { from: u32, to: u32, history: u32 },
    #[error("KV tier {tier} does not exist (there are {tiers})")]
    UnknownTier { tier: u8, tiers: u8 },
    #[error("{found} sizes for {groups} KV pool groups")]
    WrongPools { found: usize, groups: usize },
    #[error("{slots} KV slots are more than 32 bits count")]
    TooManySlots { slots: u64 },
    #[error("KV pool group {group} of tier {tier} cannot do with {slots} slots (at least {floor})")]
    PoolTooSmall { tier: u8, group: u8, slots: u32, floor: u32 },
    #[error("{active} sequences are active")]
    ActiveSequences { active: usize },
}

impl Error {
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownSequence { .. }
            | Self::DuplicateSequence { .. }
            | Self::HistoryWentBack { .. }
            | Self::CapacityBelowHistory { .. }
            | Self::BeyondCapacity { .. }
            | Self::NotSelectable { .. }
            | Self::UnknownPlan { .. }
            | Self::UnknownTier { .. }
            | Self::WrongPools { .. }
            | Self::TooManySlots { .. }
            | Self::PoolTooSmall { .. } => ErrorKind::Argument,
            Self::NotSuspended { .. }
            | Self::NotActive { .. }
            | Self::Stopped { .. }
            | Self::StillCommits { .. }
            | Self::NotCurrent { .. }
            | Self::OpenSequences { .. }
            | Self::ActiveSequences { .. } => ErrorKind::Logic,
            Self::OffHistory { .. } => ErrorKind::Assertion,
        }
    }
}
