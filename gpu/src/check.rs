//! What every backend asks of a step before it computes anything.

use crate::StepError;
use starling_core::step::{Sample, Slice, Step};

#[cfg(test)]
mod tests;

/// What a step must stay within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub blocks: u32,
    pub block_tokens: u32,
    pub vocabulary: u32,
    /// Positions of a sequence at most.
    pub context: u32,
}

/// Checks steps; keeps its memory from one to the next.
#[derive(Default)]
pub struct Checker {
    written: Vec<u32>,
    named: Vec<u32>,
}

impl Checker {
    /// # Errors
    /// The first thing in the step that cannot be computed.
    pub fn check(&mut self, step: &Step, bounds: &Bounds) -> Result<(), StepError> {
        self.written.clear();
        for (index, slice) in step.slices.iter().enumerate() {
            let bad = |what| StepError::BadSlice { slice: index, what };
            let end = shape(slice, bounds).map_err(bad)?;
            if let Some(block) = slice.blocks.iter().find(|block| block.0 >= bounds.blocks) {
                return Err(StepError::BlockOutOfRange { block: block.0, blocks: bounds.blocks });
            }
            if let Some(&token) = slice.tokens.iter().find(|&&token| token >= bounds.vocabulary) {
                return Err(StepError::TokenOutOfRange { token, vocabulary: bounds.vocabulary });
            }
            self.named.clear();
            self.named.extend(slice.blocks.iter().map(|block| block.0));
            if has_duplicates(&mut self.named) {
                return Err(bad("it names a block twice"));
            }
            if let Some(sample) = &slice.sample {
                sampling(sample, slice, (end, bounds)).map_err(bad)?;
            }
            let (first, last) = (slice.start / bounds.block_tokens, (end - 1) / bounds.block_tokens);
            self.written.extend(slice.blocks[first as usize..=last as usize].iter().map(|block| block.0));
        }
        if let Some(block) = first_duplicate(&mut self.written) {
            let writes = |slice: &Slice| slice.blocks.iter().any(|named| named.0 == block);
            let slice = step.slices.iter().rposition(writes).unwrap_or(0);
            return Err(StepError::BadSlice { slice, what: "it writes a block that another slice writes" });
        }
        Ok(())
    }
}

/// The position behind the slice's last token.
fn shape(slice: &Slice, bounds: &Bounds) -> Result<u32, &'static str> {
    let count = u32::try_from(slice.tokens.len()).map_err(|_| "it has too many tokens")?;
    if count == 0 {
        return Err("it has no tokens");
    }
    let end = slice.start.checked_add(count).filter(|&end| end <= bounds.context);
    let end = end.ok_or("it reaches beyond the context")?;
    if slice.blocks.len() < end.div_ceil(bounds.block_tokens) as usize {
        return Err("its blocks do not cover its tokens");
    }
    Ok(end)
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

fn has_duplicates(numbers: &mut [u32]) -> bool {
    first_duplicate(numbers).is_some()
}

fn first_duplicate(numbers: &mut [u32]) -> Option<u32> {
    numbers.sort_unstable();
    numbers.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
