//! Every invariant that ties sequences, pages and tree together.

use super::lifecycle::{LifeCycle, Policy, Retention};
use super::pages::PageId;
use super::sequence::{Committing, Owned, Sequence};
use super::{Manager, Phase, SequenceId, Violation};
use std::collections::BTreeMap;

impl Manager {
    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.store.pages.check()?;
        self.check_pools()?;
        let open = self.sequences.values().filter(|sequence| sequence.committing != Committing::Stopped);
        let open = open.filter_map(|sequence| self.store.tree.resolve(*sequence.path.last()?));
        let open = open.chain(self.store.faded()).collect();
        let known = |page, node, life_cycle| {
            self.store.pages.is_alive(page) && {
                let page = self.store.pages.get(page);
                let covers = (1..=self.store.tree.tokens(node).len() as u32).contains(&page.covered);
                page.node == Some(node) && usize::from(page.life_cycle) == life_cycle && page.is_committed() && covers
            }
        };
        let is_whole = |node| {
            let full = self.store.attention().filter(|life_cycle| {
                let LifeCycle { retention, policy, .. } = self.store.life_cycle(*life_cycle);
                (*retention, *policy) == (Retention::Full, Policy::Required)
            });
            let covered = |page| self.store.pages.get(page).covered == self.store.block_tokens();
            full.into_iter().all(|at| self.store.tree.link(node, usize::from(at)).is_some_and(covered))
        };
        self.store.tree.check(known, &open, is_whole)?;
        for (id, page) in self.store.pages.iter() {
            let named = page.node.map(|node| self.store.tree.link(node, usize::from(page.life_cycle)));
            if named.is_some_and(|named| named != Some(id)) {
                return Err(Violation::new(
                    "T1",
                    format!("{id:?} says {:?} names it, but that names {named:?}", page.node),
                ));
            }
        }
        for (id, sequence) in &self.sequences {
            self.check_sequence(*id, sequence)?;
        }
        self.check_holders()?;
        self.store.check_owners()?;
        self.check_quotas()?;
        self.store.check_ends()?;
        self.store.check_worth()?;
        self.check_plans()
    }

    fn check_sequence(&self, id: SequenceId, sequence: &Sequence) -> Result<(), Violation> {
        let (committed, history, capacity) = (sequence.committed(), sequence.history, sequence.capacity);
        let blocks = capacity.div_ceil(self.store.block_tokens());
        if committed > history || history > capacity || sequence.blocks() != blocks {
            let entries = sequence.blocks();
            return Err(Violation::new("11.1", format!("{id}: {committed}, {history}, {capacity}, {entries} entries")));
        }
        for life_cycle in self.store.attention() {
            let retention = self.store.life_cycle(life_cycle).retention;
            let stale = retention.stale(history, self.store.config.block_tokens);
            for block in 0..blocks {
                let owned = sequence.owned(block, life_cycle);
                let committed = owned.is_some_and(|owned| self.store.pages.get(owned.page).is_committed());
                if stale.contains(&block) && committed {
                    return Err(Violation::new("11.6", format!("{id} holds block {block} of life cycle {life_cycle}")));
                }
                let locked = owned.is_some_and(|owned| owned.locked);
                if sequence.phase == Phase::Active && locked == stale.contains(&block) {
                    return Err(Violation::new(
                        "11.15",
                        format!("{id}, block {block}, life cycle {life_cycle}: {owned:?}"),
                    ));
                }
                if sequence.phase == Phase::Suspended && locked {
                    return Err(Violation::new("11.15", format!("{id} is suspended and locks block {block}")));
                }
            }
        }
        if self.store.recurrent().is_some() && sequence.resumed && sequence.state.is_none() {
            return Err(Violation::new("11.15", format!("{id} has no state")));
        }
        Ok(())
    }

    /// Holders and locks are what the sequences say.
    fn check_holders(&self) -> Result<(), Violation> {
        let mut claims: BTreeMap<PageId, (u32, u32)> = BTreeMap::new();
        for sequence in self.sequences.values() {
            for Owned { page, locked } in sequence.rows.iter().copied().chain([sequence.state]).flatten() {
                let (holders, locks) = claims.entry(page).or_default();
                *holders += 1;
                *locks += u32::from(locked);
            }
        }
        for (id, page) in self.store.pages.iter() {
            let claimed = claims.remove(&id).unwrap_or_default();
            if claimed != (page.holders(), page.locks()) {
                return Err(Violation::new("S1", format!("{id:?} is held and locked by {claimed:?}: {page:?}")));
            }
        }
        match claims.first_key_value() {
            Some((page, _)) => Err(Violation::new("S1", format!("a sequence holds {page:?}, which is gone"))),
            None => Ok(()),
        }
    }
}
