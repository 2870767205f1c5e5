//! The life cycles of a model's KV: which layers keep the same of a sequence, and what a block of it takes in them.

use super::ModelConfig;
use crate::weights::Arithmetic;
use starling_core::kv::cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use std::num::NonZeroU32;

/// Layers that keep the same of a sequence. Their pages are allocated together, in a pool group of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroup {
    /// Layers of the model, ascending.
    pub layers: Vec<usize>,
    /// Its `group` is the place of this group in the list.
    pub life_cycle: LifeCycle,
    /// Bytes that a page takes: keys and values of one block in all these layers.
    pub page_bytes: u64,
}

impl ModelConfig {
    /// The model's life cycles, by the first layer of each. Every layer is in one; together a page of each takes
    /// `block_bytes`.
    pub fn life_cycles(&self, arithmetic: Arithmetic, block_tokens: u32) -> Vec<LayerGroup> {
        let shape = self.block_shape(block_tokens);
        let mut groups: Vec<LayerGroup> = Vec::new();
        for (layer, attends) in self.layers.iter().enumerate() {
            let retention = retention(attends.window);
            match groups.iter_mut().find(|group| group.life_cycle.retention == retention) {
                Some(group) => group.layers.push(layer),
                None => {
                    // Beyond 255 there is no manager for them, and its configuration says so.
                    let group = u8::try_from(groups.len()).unwrap_or(u8::MAX);
                    let life_cycle =
                        LifeCycle { retention, policy: Policy::Required, group, priority: Priority::default() };
                    groups.push(LayerGroup { layers: vec![layer], life_cycle, page_bytes: 0 });
                }
            }
        }
        for group in &mut groups {
            let bytes = shape.block_bytes(group.layers.len(), arithmetic.kv_number_bytes());
            group.page_bytes = bytes.unwrap_or(u64::MAX);
        }
        groups
    }
}

/// Both count the query's own position into the window, which is therefore never empty.
fn retention(window: Option<usize>) -> Retention {
    let Some(window) = window else { return Retention::Full };
    let tokens = u32::try_from(window).unwrap_or(u32::MAX);
    Retention::Window { tokens: NonZeroU32::new(tokens).unwrap_or(NonZeroU32::MIN), sink_blocks: 0 }
}
