//! How one rank's memory is divided into KV pools, and what its KV manager keeps.

use crate::config::{Config, ReusePolicy};
use starling_core::batch::ahead_tokens;
use starling_core::kv::cache::checkpoint::Publishing;
use starling_core::kv::cache::lifecycle::{LifeCycle, Retention};
use starling_core::kv::cache::rebalance;
use starling_core::kv::cache::sizing::demand::{Demand, Retained};
use starling_core::kv::cache::sizing::{PlanError, Request, SlotSizes, Tier, Workload, plan};
use starling_core::kv::cache::{Commits, PPM};
use starling_core::kv::{self, Pool};
use starling_gpu::llama::LayerGroup;
use std::num::NonZeroU32;

/// Parts per million in a percent.
const PERCENT_PPM: u32 = PPM / 100;
/// Where every block is published, a later turn goes on at the prompt's end or at the answer's; there are no rungs.
const ENDS_OF_ALL_REUSABLE: u32 = 2;

/// Why a rank's memory cannot be divided.
#[derive(Debug, thiserror::Error)]
pub enum PoolsError {
    #[error("engine.block-tokens is 0")]
    NoBlockTokens,
    #[error("kv.pool-ratio has {found} numbers, one for each life cycle of the model is wanted ({life_cycles})")]
    Ratio { found: usize, life_cycles: usize },
    #[error("kv.sequence-tokens is {tokens}, a request has at most {context}")]
    SequenceTokens { tokens: u32, context: u32 },
    #[error("kv.endpoint-rewind-tokens is {tokens}, which goes with all-reusable only; this model is served {policy}")]
    Rewind { tokens: u32, policy: &'static str },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Kv(#[from] kv::ConfigError),
    #[error(
        "too little memory for one sequence: engine.kv-memory {memory} bytes; one sequence of {context} tokens takes {wanted} \
         ({block_tokens} tokens a block)"
    )]
    TooLittle { memory: u64, wanted: u64, context: u32, block_tokens: u32 },
}

/// The KV manager of one rank, for requests of up to `context` tokens.
///
/// # Errors
/// The memory does not hold one such request, or the configuration contradicts itself or the model.
pub fn manager(config: &Config, groups: &[LayerGroup], context: u32) -> Result<kv::Config, PoolsError> {
    let block_tokens = NonZeroU32::new(config.engine.block_tokens).ok_or(PoolsError::NoBlockTokens)?;
    let publishing = publishing(config, groups);
    let (kv, rewind) = (&config.kv, config.kv.endpoint_rewind_tokens);
    if let Some(policy) = name(publishing).filter(|_| rewind > 0) {
        return Err(PoolsError::Rewind { tokens: rewind, policy });
    }
    let memory = Memory { config, groups, context, block_tokens, publishing };
    let blocks = memory.blocks()?;
    let life_cycles = groups.iter().map(|group| group.life_cycle.retention).zip(blocks).collect();
    let mut manager = kv::Config::new(block_tokens, life_cycles);
    manager.publishing = publishing;
    manager.snapshots = kv.snapshots();
    let cache = &mut manager.cache;
    cache.commits = match publishing {
        Publishing::AllReusable => Commits::EveryBlock,
        Publishing::PerRequest | Publishing::PerConversation => Commits::EndPoints,
    };
    cache.utilisation_ppm_max = kv.resume_utilisation_percent_max.saturating_mul(PERCENT_PPM);
    cache.partial_reuse = kv.partial_reuse;
    cache.match_backoff_tokens = kv.match_backoff_tokens;
    cache.turns_max = kv.turns_max;
    cache.conversations_max = kv.conversations_max;
    cache.conversation_ttl_us = kv.conversation_ttl_us();
    cache.scope_quota_ppm = kv.scope_quota_percent.map(|percent| percent.saturating_mul(PERCENT_PPM));
    cache.endpoint_rewind_tokens = rewind;
    manager.validate()?;
    Ok(manager)
}

/// What the pools are sized for, to be compared with what is measured; `None` where there is one pool only.
///
/// # Errors
/// As [`manager`].
pub fn sized_for(config: &Config, groups: &[LayerGroup], context: u32) -> Result<Option<rebalance::Pools>, PoolsError> {
    let block_tokens = NonZeroU32::new(config.engine.block_tokens).ok_or(PoolsError::NoBlockTokens)?;
    let publishing = publishing(config, groups);
    let memory = Memory { config, groups, context, block_tokens, publishing };
    let demand = memory.demand()?;
    let (life_cycles, sizes, tier) = memory.pools();
    Ok((groups.len() > 1).then(|| rebalance::Pools { life_cycles, sizes, tiers: vec![tier], demand }))
}

/// What the configuration says, and else what serves the model's life cycles.
fn publishing(config: &Config, groups: &[LayerGroup]) -> Publishing {
    let any = |retention: fn(Retention) -> bool| groups.iter().any(|group| retention(group.life_cycle.retention));
    match config.kv.reuse_policy {
        Some(ReusePolicy::AllReusable) if any(|retention| retention == Retention::State) => {
            // A state overwrites itself: there is none at each block's end.
            tracing::warn!(
                "kv.reuse-policy is all-reusable, but the model has recurrent layers; it is served per-request"
            );
            Publishing::PerRequest
        }
        Some(policy) => policy.into(),
        None if any(|retention| retention != Retention::Full) => Publishing::PerConversation,
        None => Publishing::AllReusable,
    }
}

/// The name of a policy that keeps end points.
fn name(publishing: Publishing) -> Option<&'static str> {
    match publishing {
        Publishing::AllReusable => None,
        Publishing::PerRequest => Some("per-request"),
        Publishing::PerConversation => Some("per-conversation"),
    }
}

/// One rank's memory, and what it is for.
struct Memory<'a> {
    config: &'a Config,
    groups: &'a [LayerGroup],
    context: u32,
    block_tokens: NonZeroU32,
    publishing: Publishing,
}

impl Memory<'_> {
    /// Blocks of each pool: one longest sequence at least, and no more than the memory in all.
    fn blocks(&self) -> Result<Vec<u32>, PoolsError> {
        let memory = self.config.engine.kv_memory.bytes();
        let ahead = ahead_tokens(self.config.engine.step_tokens_max);
        let least = |group: &LayerGroup| {
            let pool = Pool { retention: group.life_cycle.retention, blocks: 0 };
            pool.blocks_max(self.context, ahead, self.block_tokens)
        };
        let least: Vec<u32> = self.groups.iter().map(least).collect();
        let sizes: Vec<u64> = self.groups.iter().map(|group| group.page_bytes.max(1)).collect();
        let wanted = bytes(&least, &sizes);
        if wanted > memory {
            let (context, block_tokens) = (self.context, self.block_tokens.get());
            return Err(PoolsError::TooLittle { memory, wanted, context, block_tokens });
        }
        // The values are looked at even where there is nothing to divide.
        let planned = self.planned()?;
        if let [size] = sizes[..] {
            return Ok(vec![u32::try_from(memory / size).unwrap_or(u32::MAX)]);
        }
        let mut blocks: Vec<u32> = planned.iter().zip(&least).map(|(blocks, least)| *blocks.max(least)).collect();
        // What the smallest pools were given for one long sequence, the others give back.
        while let Some(over) = bytes(&blocks, &sizes).checked_sub(memory).filter(|over| *over > 0) {
            let spare = |at: usize| u64::from(blocks[at] - least[at]).saturating_mul(sizes[at]);
            let Some(at) = (0..blocks.len()).max_by_key(|at| spare(*at)).filter(|at| spare(*at) > 0) else { break };
            let fewer = u32::try_from(over.div_ceil(sizes[at])).unwrap_or(u32::MAX);
            blocks[at] -= fewer.min(blocks[at] - least[at]);
        }
        Ok(blocks)
    }

    /// Blocks of each pool by the method or the ratio, which may be fewer than one sequence takes.
    fn planned(&self) -> Result<Vec<u32>, PoolsError> {
        let (kv, life_cycles) = (&self.config.kv, self.groups.len());
        if let Some(found) = kv.pool_ratio.as_ref().map(Vec::len).filter(|found| *found != life_cycles) {
            return Err(PoolsError::Ratio { found, life_cycles });
        }
        let demand = self.demand()?;
        let (life_cycles, sizes, tier) = self.pools();
        let request = Request {
            life_cycles: &life_cycles,
            sizes: &sizes,
            tiers: &[tier],
            demand: &demand,
            method: kv.sizing.into(),
            ratio: kv.pool_ratio.as_deref(),
        };
        Ok(plan(&request)?.slots().remove(0))
    }

    fn pools(&self) -> (Vec<LifeCycle>, Vec<SlotSizes>, Tier) {
        let one = |(at, group): (u8, &LayerGroup)| LifeCycle { group: at, ..group.life_cycle.clone() };
        let life_cycles = (0u8..).zip(self.groups).map(one).collect();
        let sizes = self.groups.iter().map(|group| vec![group.page_bytes.max(1)]).collect();
        // A backend allocates each pool as a whole, so no unit is lost.
        (life_cycles, sizes, Tier { bytes: self.config.engine.kv_memory.bytes(), granularity: 1 })
    }

    fn demand(&self) -> Result<Demand, PoolsError> {
        let (kv, engine, context) = (&self.config.kv, &self.config.engine, self.context);
        if let Some(tokens) = kv.sequence_tokens.filter(|tokens| *tokens > context) {
            return Err(PoolsError::SequenceTokens { tokens, context });
        }
        // Nobody may have said how long sequences are; then it is half of what they may be.
        let sequence_tokens = kv.sequence_tokens.unwrap_or(context / 2).max(1);
        let (turns, end_points) = match self.publishing {
            Publishing::AllReusable => (1, Some(ENDS_OF_ALL_REUSABLE)),
            Publishing::PerRequest => (1, None),
            Publishing::PerConversation => (kv.turns_max, None),
        };
        let workload = Workload {
            block_tokens: self.block_tokens,
            sequence_tokens,
            requests: engine.sequences_max,
            step_tokens_max: engine.step_tokens_max,
            extra_tokens: 0,
            draft_tokens: engine.draft_tokens_max,
            system_prompt_tokens: 0,
        };
        Ok(Demand {
            workload,
            retained: Retained { tokens: sequence_tokens, turns, end_points, snapshots: kv.snapshots() },
            sequence_tokens_max: context,
            suspended_requests: 0,
            reserved_states: 0,
        })
    }
}

fn bytes(blocks: &[u32], sizes: &[u64]) -> u64 {
    let each = blocks.iter().zip(sizes).map(|(blocks, size)| u64::from(*blocks).saturating_mul(*size));
    each.fold(0, u64::saturating_add)
}

#[cfg(test)]
#[path = "pools_tests.rs"]
mod tests;
