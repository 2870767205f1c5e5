//! How one rank's memory is divided into KV pools.

use crate::config::Config;
use starling_core::kv::cache::lifecycle::LifeCycle;
use starling_core::kv::cache::sizing::demand::{Demand, Retained};
use starling_core::kv::cache::sizing::{Method, PlanError, Request, SlotSizes, Tier, Workload, plan};
use starling_core::kv::{self, Pool};
use starling_gpu::llama::LayerGroup;
use std::num::NonZeroU32;

/// Why a rank's memory cannot be divided.
#[derive(Debug, thiserror::Error)]
pub enum PoolsError {
    #[error("engine.block-tokens is 0")]
    NoBlockTokens,
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
/// The memory does not hold one such request, or the configuration contradicts itself.
pub fn manager(config: &Config, groups: &[LayerGroup], context: u32) -> Result<kv::Config, PoolsError> {
    let block_tokens = NonZeroU32::new(config.engine.block_tokens).ok_or(PoolsError::NoBlockTokens)?;
    let blocks = blocks(config, groups, (context, block_tokens))?;
    let life_cycles = groups.iter().map(|group| group.life_cycle.retention).zip(blocks).collect();
    let manager = kv::Config::new(block_tokens, life_cycles);
    manager.validate()?;
    Ok(manager)
}

fn blocks(
    config: &Config,
    groups: &[LayerGroup],
    (context, block_tokens): (u32, NonZeroU32),
) -> Result<Vec<u32>, PoolsError> {
    let memory = config.engine.kv_memory.bytes();
    let ahead = config.engine.step_tokens_max.saturating_mul(2);
    let least = |group: &LayerGroup| {
        let pool = Pool { retention: group.life_cycle.retention, blocks: 0 };
        pool.blocks_max(context, ahead, block_tokens)
    };
    let least: Vec<u32> = groups.iter().map(least).collect();
    let sizes: Vec<u64> = groups.iter().map(|group| group.page_bytes.max(1)).collect();
    let bytes = |blocks: &[u32]| -> u64 {
        blocks
            .iter()
            .zip(&sizes)
            .fold(0, |sum: u64, (blocks, size)| sum.saturating_add(u64::from(*blocks).saturating_mul(*size)))
    };
    let wanted = bytes(&least);
    if wanted > memory {
        return Err(PoolsError::TooLittle { memory, wanted, context, block_tokens: block_tokens.get() });
    }
    if let [size] = sizes[..] {
        return Ok(vec![u32::try_from(memory / size).unwrap_or(u32::MAX)]);
    }
    let mut blocks = planned(config, groups, (context, block_tokens))?;
    for (blocks, least) in blocks.iter_mut().zip(&least) {
        *blocks = (*blocks).max(*least);
    }
    // What the smallest pools were given for one long sequence, the others give back.
    while let Some(over) = bytes(&blocks).checked_sub(memory).filter(|over| *over > 0) {
        let spare = |at: usize| u64::from(blocks[at] - least[at]) * sizes[at];
        let Some(at) = (0..blocks.len()).max_by_key(|at| spare(*at)).filter(|at| spare(*at) > 0) else { break };
        let fewer = u32::try_from(over.div_ceil(sizes[at])).unwrap_or(u32::MAX);
        blocks[at] -= fewer.min(blocks[at] - least[at]);
    }
    Ok(blocks)
}

/// Pools that are full at the same number of conversations.
fn planned(
    config: &Config,
    groups: &[LayerGroup],
    (context, block_tokens): (u32, NonZeroU32),
) -> Result<Vec<u32>, PoolsError> {
    // Nobody said how long sequences are, so half of what they may be.
    let sequence_tokens = context / 2;
    let demand = Demand {
        workload: Workload {
            block_tokens,
            sequence_tokens,
            requests: config.engine.sequences_max,
            step_tokens_max: config.engine.step_tokens_max,
            extra_tokens: 0,
            draft_tokens: config.engine.draft_tokens_max,
            system_prompt_tokens: 0,
        },
        retained: Retained { tokens: sequence_tokens, turns: 1, end_points: None, snapshots: Default::default() },
        sequence_tokens_max: context,
        suspended_requests: 0,
        reserved_states: 0,
    };
    let life_cycles: Vec<LifeCycle> = groups.iter().map(|group| group.life_cycle.clone()).collect();
    let sizes: Vec<SlotSizes> = groups.iter().map(|group| vec![group.page_bytes]).collect();
    let tiers = [Tier::device(config.engine.kv_memory.bytes())];
    let request = Request {
        life_cycles: &life_cycles,
        sizes: &sizes,
        tiers: &tiers,
        demand: &demand,
        method: Method::Balanced,
        ratio: None,
    };
    Ok(plan(&request)?.slots().remove(0))
}
