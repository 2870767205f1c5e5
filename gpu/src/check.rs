//! What every backend asks of a step before it computes anything.

use crate::StepError;
use starling_core::kv::Pool;
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::step::{BlockCopy, Sample, Slice, Step, Table};
use std::num::NonZeroU32;
use std::ops::Range;

#[cfg(test)]
mod tests;

/// What a step must stay within.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// One for each life cycle, in order.
    pub pools: Vec<Pool>,
    pub block_tokens: u32,
    pub vocabulary: u32,
    /// Positions of a sequence at most.
    pub context: u32,
}

/// Why the table of a slice cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTable {
    #[error("it covers {covered} tokens of {tokens}")]
    Short { covered: u64, tokens: u32 },
    #[error("blocks {out:?} are out of the window, of those only {stale:?} may be")]
    Out { out: Range<u32>, stale: Range<u32> },
    #[error("it has {blocks} blocks and {out} without, a state has one")]
    NotOneState { blocks: usize, out: usize },
    #[error("it names block {block}, the pool has {blocks}")]
    BlockOutOfRange { block: u32, blocks: u32 },
    #[error("it names block {block} twice")]
    NamedTwice { block: u32 },
    #[error("it writes block {block} that another slice writes")]
    WrittenTwice { block: u32 },
}

/// Why a copy cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCopy {
    #[error("there are {life_cycles} life cycles")]
    NoLifeCycle { life_cycles: usize },
    #[error("it names block {block}, the pool has {blocks}")]
    BlockOutOfRange { block: u32, blocks: u32 },
}

/// A block that a slice writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Written {
    life_cycle: u32,
    block: u32,
    slice: u32,
}

/// Checks steps; keeps its memory from one to the next.
#[derive(Default)]
pub struct Checker {
    written: Vec<Written>,
    named: Vec<u32>,
}

impl Checker {
    /// # Errors
    /// The first thing in the step that cannot be computed.
    pub fn check(&mut self, step: &Step, bounds: &Bounds) -> Result<(), StepError> {
        self.written.clear();
        for (index, copy) in step.copies.iter().enumerate() {
            let bad = |why| StepError::BadCopy { copy: index, life_cycle: copy.life_cycle, why };
            check_copy(copy, bounds).map_err(bad)?;
        }
        for (index, slice) in step.slices.iter().enumerate() {
            let bad = |what| StepError::BadSlice { slice: index, what };
            let end = extent(slice, bounds).map_err(bad)?;
            if let Some(&token) = slice.tokens.iter().find(|&&token| token >= bounds.vocabulary) {
                return Err(StepError::TokenOutOfRange { token, vocabulary: bounds.vocabulary });
            }
            if slice.tables.len() != bounds.pools.len() {
                let (tables, life_cycles) = (slice.tables.len(), bounds.pools.len());
                return Err(StepError::TableCount { slice: index, tables, life_cycles });
            }
            for life_cycle in 0..bounds.pools.len() {
                let bad = |why| StepError::BadTable { slice: index, life_cycle, why };
                self.check_table((index, slice.start..end), &slice.tables[life_cycle], (bounds, life_cycle))
                    .map_err(bad)?;
            }
            if let Some(sample) = &slice.sample {
                sampling(sample, slice, (end, bounds)).map_err(bad)?;
            }
        }
        self.written.sort_unstable();
        let same = |pair: &&[Written]| (pair[0].life_cycle, pair[0].block) == (pair[1].life_cycle, pair[1].block);
        match self.written.windows(2).find(same) {
            Some(&[_, Written { life_cycle, block, slice }]) => Err(StepError::BadTable {
                slice: slice as usize,
                life_cycle: life_cycle as usize,
                why: BadTable::WrittenTwice { block },
            }),
            _ => Ok(()),
        }
    }

    /// A table of a slice with these positions; notes the blocks that the slice writes.
    fn check_table(
        &mut self,
        (slice, positions): (usize, Range<u32>),
        table: &Table,
        (bounds, life_cycle): (&Bounds, usize),
    ) -> Result<(), BadTable> {
        let Pool { retention, blocks } = bounds.pools[life_cycle];
        let block_tokens = NonZeroU32::new(bounds.block_tokens).unwrap_or(NonZeroU32::MIN);
        let written = match retention {
            Retention::State if table.blocks.len() == 1 && table.out.is_empty() => 0..1,
            Retention::State => {
                return Err(BadTable::NotOneState { blocks: table.blocks.len(), out: table.out.len() });
            }
            Retention::Full | Retention::Window { .. } => {
                let stale = retention.stale(positions.start, block_tokens);
                let out = &table.out;
                let is_stale = stale.start <= out.start && out.end <= stale.end;
                if !(out.is_empty() || is_stale) {
                    return Err(BadTable::Out { out: out.clone(), stale });
                }
                let covered = table.len() as u64 * u64::from(block_tokens.get());
                if covered < u64::from(positions.end) {
                    return Err(BadTable::Short { covered, tokens: positions.end });
                }
                // What is out lies before the slice, and so does the place in `blocks` of what is written.
                let first = positions.start / block_tokens.get() - out.len() as u32;
                let last = (positions.end - 1) / block_tokens.get() - out.len() as u32;
                first as usize..last as usize + 1
            }
        };
        self.named.clear();
        for block in &table.blocks {
            if block.0 >= blocks {
                return Err(BadTable::BlockOutOfRange { block: block.0, blocks });
            }
            self.named.push(block.0);
        }
        self.named.sort_unstable();
        if let Some(pair) = self.named.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(BadTable::NamedTwice { block: pair[0] });
        }
        let (life_cycle, slice) = (life_cycle as u32, slice as u32);
        self.written.extend(table.blocks[written].iter().map(|block| Written { life_cycle, block: block.0, slice }));
        Ok(())
    }
}

fn check_copy(copy: &BlockCopy, bounds: &Bounds) -> Result<(), BadCopy> {
    let pool = bounds.pools.get(usize::from(copy.life_cycle));
    let blocks = pool.ok_or(BadCopy::NoLifeCycle { life_cycles: bounds.pools.len() })?.blocks;
    match [copy.from, copy.to].into_iter().find(|block| block.0 >= blocks) {
        Some(block) => Err(BadCopy::BlockOutOfRange { block: block.0, blocks }),
        None => Ok(()),
    }
}

/// The position behind the slice's last token.
fn extent(slice: &Slice, bounds: &Bounds) -> Result<u32, &'static str> {
    let count = u32::try_from(slice.tokens.len()).map_err(|_| "it has too many tokens")?;
    if count == 0 {
        return Err("it has no tokens");
    }
    let end = slice.start.checked_add(count).filter(|&end| end <= bounds.context);
    end.ok_or("it reaches beyond the context")
}

fn sampling(sample: &Sample, slice: &Slice, (end, bounds): (u32, &Bounds)) -> Result<(), &'static str> {
    if sample.drafts as usize >= slice.tokens.len() {
        return Err("it has no token before its drafts");
    }
    if sample.position != end - sample.drafts {
        return Err("it samples a position that does not follow its last token");
    }
    if sample.sampling.check(bounds.vocabulary).is_err() {
        return Err("its sampling has a number out of range");
    }
    match &sample.history {
        Some(history) if history.tokens.len() != sample.position as usize => {
            Err("its history does not end where it samples")
        }
        None if sample.sampling.has_penalties() => Err("it has penalties and no history"),
        _ => Ok(()),
    }
}
