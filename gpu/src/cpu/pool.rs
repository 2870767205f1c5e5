//! The KV blocks of a rank: those of each life cycle in memory of their own.

use super::CpuError;
use crate::kv::KvPool;
use crate::kv::halves::HalfPool;
use crate::llama::{LayerGroup, Model};
use crate::weights::Arithmetic;
use starling_core::step::BlockCopy;

/// One rank's KV blocks.
pub(super) struct Pool {
    pub memory: Memory,
    /// For each layer of the model.
    homes: Vec<Home>,
}

/// For each life cycle, the blocks of its layers.
pub(super) enum Memory {
    Exact(Vec<KvPool>),
    Int8(Vec<HalfPool>),
}

/// Where the KV of a layer is.
#[derive(Clone, Copy, Default)]
pub(super) struct Home {
    /// Layer of the model.
    pub layer: usize,
    pub life_cycle: usize,
    /// Which of its life cycle's layers it is.
    pub index: usize,
}

impl Pool {
    /// # Errors
    /// So much memory cannot be addressed.
    pub fn new(
        model: &Model,
        life_cycles: &[LayerGroup],
        (blocks, block_tokens): (&[u32], u32),
    ) -> Result<Self, CpuError> {
        let shape = model.config().block_shape(block_tokens);
        let sizes =
            || life_cycles.iter().map(|group| group.layers.len()).zip(blocks.iter().map(|&count| count as usize));
        let memory = match model.arithmetic() {
            Arithmetic::Exact => {
                each(sizes(), |(layers, blocks)| KvPool::new(shape, layers, blocks)).map(Memory::Exact)
            }
            Arithmetic::Int8 => {
                each(sizes(), |(layers, blocks)| HalfPool::new(shape, layers, blocks)).map(Memory::Int8)
            }
        };
        let memory = memory.map_err(|life_cycle| CpuError::PoolTooLarge {
            life_cycle,
            blocks: blocks[life_cycle],
            block_bytes: life_cycles[life_cycle].page_bytes,
        })?;
        let mut homes = vec![Home::default(); model.config().layers.len()];
        for (life_cycle, group) in life_cycles.iter().enumerate() {
            for (index, &layer) in group.layers.iter().enumerate() {
                homes[layer] = Home { layer, life_cycle, index };
            }
        }
        Ok(Self { memory, homes })
    }

    pub fn home(&self, layer: usize) -> Home {
        self.homes[layer]
    }

    /// Copies a block in all layers of its life cycle.
    pub fn copy(&mut self, copy: &BlockCopy) {
        let life_cycle = usize::from(copy.life_cycle);
        match &mut self.memory {
            Memory::Exact(pools) => pools[life_cycle].copy(copy.from, copy.to),
            Memory::Int8(pools) => pools[life_cycle].copy(copy.from, copy.to),
        }
    }
}

/// One pool for each life cycle, or the first that is too large.
fn each<P>(
    sizes: impl Iterator<Item = (usize, usize)>,
    new: impl Fn((usize, usize)) -> Option<P>,
) -> Result<Vec<P>, usize> {
    sizes.enumerate().map(|(life_cycle, size)| new(size).ok_or(life_cycle)).collect()
}
