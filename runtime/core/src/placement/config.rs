//! What an operator can set. Keys and values are kebab-case; the published names are accepted beside them.

use super::balance;
use crate::admission;
use serde::{Deserialize, Serialize};

/// Which router places requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Longest prompt first, to the rank with the fewest tokens.
    #[serde(alias = "default")]
    Balanced,
    /// Weighs the prefix a rank has cached against its load.
    #[serde(alias = "kv_aware")]
    KvAware,
    /// Turns of a conversation stay on one rank.
    #[default]
    Conversation,
}

/// Where a conversation's first turn goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NewConversations {
    #[serde(alias = "round_robin")]
    RoundRobin,
    /// Fewest active requests, ties to the lowest rank.
    #[default]
    #[serde(alias = "least_queued")]
    LeastQueued,
    /// Fewest prompt tokens, ties to fewer requests and then in turn.
    #[serde(alias = "least_tokens")]
    LeastTokens,
}

/// A policy name that nobody knows; the router goes on with round-robin, as the published one does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy for new conversations {name:?} (round-robin, least-queued, least-tokens); using round-robin")]
pub struct UnknownPolicy {
    pub name: String,
}

impl NewConversations {
    pub const ALL: [Self; 3] = [Self::RoundRobin, Self::LeastQueued, Self::LeastTokens];

    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastQueued => "least-queued",
            Self::LeastTokens => "least-tokens",
        }
    }

    /// For callers past configuration: never fails, but says so when it had to fall back.
    pub fn from_name(name: &str) -> (Self, Option<UnknownPolicy>) {
        let known = Self::ALL.into_iter().find(|policy| policy.name() == name.replace('_', "-"));
        match known {
            Some(policy) => (policy, None),
            None => (Self::RoundRobin, Some(UnknownPolicy { name: name.to_owned() })),
        }
    }
}

/// What a request with children counts on its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CountChildren {
    /// Itself and its children, and it is admitted only when one rank has room for all: no rank ever exceeds its cap.
    #[default]
    StrictCap,
    /// Itself and its children where a rank is named; a free parent is admitted on the budget alone and may exceed the
    /// cap of its rank. Pinned by published vectors.
    Vectors,
    /// One, whatever it splits into: the published behaviour.
    Upstream,
}

impl CountChildren {
    /// Slots of one rank.
    pub fn weight(self, children: u32) -> u64 {
        match self {
            Self::StrictCap | Self::Vectors => 1 + u64::from(children),
            Self::Upstream => 1,
        }
    }
}

/// How long a turn waits for its conversation's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bound {
    /// Ranks that step together: passes that set it aside.
    Passes(u32),
    /// Otherwise: microseconds of the agreed clock since the first pass that set it aside.
    Micros(u64),
}

impl Bound {
    /// Whether a turn has waited its time; at once if the bound is 0.
    pub fn expired(self, request: &admission::Waiting, now_us: u64) -> bool {
        match self {
            Self::Passes(most) => request.deferrals >= most,
            Self::Micros(0) => true,
            Self::Micros(most) => request.deferrals > 0 && now_us.saturating_sub(request.since_us) >= most,
        }
    }
}

/// Settings of the queue and the router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", try_from = "Given")]
pub struct Config {
    pub policy: Policy,
    pub queue: admission::Policy,
    pub count_children: CountChildren,
    /// Where first turns go.
    pub new_conversations: NewConversations,
    /// Conversations remembered at most; the one unused for longest is forgotten first.
    pub conversations_max: u32,
    /// A turn whose rank is full waits for it, up to the bound, instead of going elsewhere.
    pub strict_affinity: bool,
    pub strict_affinity_max_wait_s: u32,
    /// The bound where ranks step together.
    pub strict_affinity_max_wait_passes: u32,
    /// A rank takes up to this many times its fair share of a batch. The conversation router never goes below 1.
    pub fair_share_multiplier: f64,
    /// Weight of load against cached prefix in the KV-aware score.
    pub load_weight: f64,
    /// Prefix matches count only if the best exceeds this share of the prompt.
    pub match_threshold: f64,
    /// The first requests go to one rank each, so that every rank caches the shared system prompt.
    pub cold_start_warmup: bool,
    /// Requests whose KV is still being sent away count as load.
    pub account_for_in_transfer: bool,
    /// Hold prefill back until the ranks of a group can prefill together.
    pub balance: bool,
    pub balance_timeout_steps: u32,
    pub balance_batching_wait_steps: u32,
    /// Below this many generating requests on some rank the low-occupancy timeout applies; 0 never.
    pub balance_min_generation_requests: u32,
    pub balance_low_occupancy_timeout_steps: u32,
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("{setting} is {value}; it must be a finite number that is at least {least}")]
    Number { setting: &'static str, value: f64, least: f64 },
    #[error("conversations-max is 0; it must be at least 1")]
    NoConversations,
    #[error("balance-low-occupancy-timeout-steps is {steps}; it must be at most balance-timeout-steps ({timeout})")]
    LowOccupancyTimeout { steps: u32, timeout: u32 },
    #[error("policy is {policy}, but {switch} = {value} asks for another")]
    Contradiction { policy: &'static str, switch: &'static str, value: bool },
}

/// What can be written, before it is checked. `Config` without the published switches that name a policy indirectly.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct Given {
    policy: Option<Policy>,
    #[serde(alias = "enable_kv_cache_aware_routing")]
    enable_kv_cache_aware_routing: Option<bool>,
    #[serde(alias = "kv_cache_routing_conversation_affinity")]
    kv_cache_routing_conversation_affinity: Option<bool>,
    queue: admission::Policy,
    count_children: CountChildren,
    #[serde(alias = "kv_cache_routing_new_conv_placement")]
    new_conversations: NewConversations,
    #[serde(alias = "kv_cache_routing_max_sessions")]
    conversations_max: u32,
    #[serde(alias = "kv_cache_routing_strict_conversation_affinity")]
    strict_affinity: bool,
    #[serde(alias = "strict-affinity-max-wait")]
    strict_affinity_max_wait_s: u32,
    #[serde(alias = "kv_cache_routing_strict_affinity_max_wait_iters")]
    strict_affinity_max_wait_passes: u32,
    #[serde(alias = "kv_cache_routing_fair_share_multiplier")]
    fair_share_multiplier: f64,
    #[serde(alias = "kv_cache_routing_load_balance_weight")]
    load_weight: f64,
    #[serde(alias = "kv_cache_routing_match_rate_threshold")]
    match_threshold: f64,
    #[serde(alias = "kv_cache_routing_cold_start_warmup")]
    cold_start_warmup: bool,
    #[serde(alias = "kv_cache_routing_account_for_in_transfer")]
    account_for_in_transfer: bool,
    #[serde(alias = "enable_balance")]
    balance: bool,
    #[serde(alias = "timeout_iters")]
    balance_timeout_steps: u32,
    #[serde(alias = "batching_wait_iters")]
    balance_batching_wait_steps: u32,
    #[serde(alias = "min_generation_requests")]
    balance_min_generation_requests: u32,
    #[serde(alias = "low_occupancy_timeout_iters")]
    balance_low_occupancy_timeout_steps: u32,
}

impl Default for Given {
    fn default() -> Self {
        Self {
            policy: None,
            enable_kv_cache_aware_routing: None,
            kv_cache_routing_conversation_affinity: None,
            queue: admission::Policy::Fcfs,
            count_children: CountChildren::StrictCap,
            new_conversations: NewConversations::LeastQueued,
            conversations_max: 65_536,
            strict_affinity: true,
            strict_affinity_max_wait_s: 120,
            strict_affinity_max_wait_passes: 2_000,
            fair_share_multiplier: 2.0,
            load_weight: 1.0,
            match_threshold: 0.1,
            cold_start_warmup: false,
            account_for_in_transfer: false,
            balance: false,
            balance_timeout_steps: 50,
            balance_batching_wait_steps: 10,
            balance_min_generation_requests: 0,
            balance_low_occupancy_timeout_steps: 0,
        }
    }
}

impl Given {
    /// The published switches choose a router only if one of them is there; conversation affinity comes first.
    fn policy(&self) -> Result<Policy, ConfigError> {
        let conversation = self.kv_cache_routing_conversation_affinity;
        let kv_aware = self.enable_kv_cache_aware_routing;
        let Some(policy) = self.policy else {
            return Ok(match (conversation, kv_aware) {
                (None, None) => Policy::default(),
                (Some(true), _) => Policy::Conversation,
                (_, Some(true)) => Policy::KvAware,
                _ => Policy::Balanced,
            });
        };
        let name = match policy {
            Policy::Balanced => "balanced",
            Policy::KvAware => "kv-aware",
            Policy::Conversation => "conversation",
        };
        let contradiction = |switch, value| Err(ConfigError::Contradiction { policy: name, switch, value });
        if let Some(value) = conversation
            && value != (policy == Policy::Conversation)
        {
            return contradiction("kv_cache_routing_conversation_affinity", value);
        }
        match kv_aware {
            Some(true) if policy == Policy::Balanced => contradiction("enable_kv_cache_aware_routing", true),
            Some(false) if policy == Policy::KvAware => contradiction("enable_kv_cache_aware_routing", false),
            _ => Ok(policy),
        }
    }
}

impl TryFrom<Given> for Config {
    type Error = ConfigError;

    fn try_from(given: Given) -> Result<Self, ConfigError> {
        let config = Self { policy: given.policy()?, ..Self::unchecked(given) };
        config.validate()?;
        Ok(config)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::unchecked(Given::default())
    }
}

impl Config {
    fn unchecked(given: Given) -> Self {
        Self {
            policy: given.policy.unwrap_or_default(),
            queue: given.queue,
            count_children: given.count_children,
            new_conversations: given.new_conversations,
            conversations_max: given.conversations_max,
            strict_affinity: given.strict_affinity,
            strict_affinity_max_wait_s: given.strict_affinity_max_wait_s,
            strict_affinity_max_wait_passes: given.strict_affinity_max_wait_passes,
            fair_share_multiplier: given.fair_share_multiplier,
            load_weight: given.load_weight,
            match_threshold: given.match_threshold,
            cold_start_warmup: given.cold_start_warmup,
            account_for_in_transfer: given.account_for_in_transfer,
            balance: given.balance,
            balance_timeout_steps: given.balance_timeout_steps,
            balance_batching_wait_steps: given.balance_batching_wait_steps,
            balance_min_generation_requests: given.balance_min_generation_requests,
            balance_low_occupancy_timeout_steps: given.balance_low_occupancy_timeout_steps,
        }
    }

    /// # Errors
    /// The first setting that no router can work with.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let numbers = [
            ("load-weight", self.load_weight),
            ("match-threshold", self.match_threshold),
            ("fair-share-multiplier", self.fair_share_multiplier),
        ];
        for (setting, value) in numbers {
            if !(value.is_finite() && value >= 0.0) {
                return Err(ConfigError::Number { setting, value, least: 0.0 });
            }
        }
        if self.conversations_max == 0 {
            return Err(ConfigError::NoConversations);
        }
        let (steps, timeout) = (self.balance_low_occupancy_timeout_steps, self.balance_timeout_steps);
        if self.balance && steps > timeout {
            return Err(ConfigError::LowOccupancyTimeout { steps, timeout });
        }
        Ok(())
    }

    /// The bound of a turn's wait; `lockstep`: ranks step together, so a pass is an iteration.
    pub fn bound(&self, lockstep: bool) -> Bound {
        if lockstep {
            Bound::Passes(self.strict_affinity_max_wait_passes)
        } else {
            Bound::Micros(u64::from(self.strict_affinity_max_wait_s) * 1_000_000)
        }
    }

    /// The context balance gate's settings, if it is on.
    pub fn balance(&self, max_batch_size: u32) -> Option<balance::Settings> {
        self.balance.then_some(balance::Settings {
            max_batch_size,
            timeout_steps: self.balance_timeout_steps,
            batching_wait_steps: self.balance_batching_wait_steps,
            min_generation_requests: self.balance_min_generation_requests,
            low_occupancy_timeout_steps: self.balance_low_occupancy_timeout_steps,
        })
    }
}
