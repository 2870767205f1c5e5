//! The manager's own invariants, recounted from scratch.

use super::{Manager, Violation};
use crate::ids::BlockId;

impl Manager {
    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.pages.check()?;
        self.tree.check(|block| self.pages.pins(block))?;
        let mut pins = vec![0u32; self.pages.total() as usize];
        let mut owners = vec![0u32; self.pages.total() as usize];
        for block in self.tree.blocks() {
            owners[block.0 as usize] += 1;
            if !self.pages.is_cached(block) {
                return Err(Violation::new("K3", format!("{block} has a node but is not cached")));
            }
        }
        for (attempt, held) in &self.attempts {
            for block in held.path.iter().map(|&id| self.tree.block(id)).chain(self.private(held)) {
                pins[block.0 as usize] += 1;
            }
            for block in self.private(held) {
                owners[block.0 as usize] += 1;
            }
            let covered = held.blocks.len() as u64 * u64::from(self.config.block_tokens);
            let published = held.path.len() as u64 * u64::from(self.config.block_tokens);
            let computed = u64::from(held.computed);
            if computed > covered || published > computed || computed > held.tokens.len() as u64 {
                let what = format!("{attempt}: {published} published, {computed} computed, {covered} covered");
                return Err(Violation::new("K4", what));
            }
        }
        for (block, (pins, owners)) in pins.into_iter().zip(owners).enumerate() {
            let id = BlockId(block as u32);
            if pins != self.pages.pins(id) {
                return Err(Violation::new("K2", format!("{id} has {} pins, {pins} users", self.pages.pins(id))));
            }
            let used = self.pages.is_cached(id) || pins > 0;
            if owners != u32::from(used) {
                return Err(Violation::new("K3", format!("{id} has {owners} owners, used {used}")));
            }
        }
        let stats = self.stats();
        if stats.blocks_free + stats.blocks_reusable + stats.blocks_held != stats.blocks_total {
            return Err(Violation::new("K1", format!("{stats:?}")));
        }
        if self.tree.len() > self.pages.total() as usize {
            return Err(Violation::new("K1", format!("{} nodes for {} blocks", self.tree.len(), self.pages.total())));
        }
        Ok(())
    }
}
