//! How ranks of one view are called in the next.

/// Dense indices of the old view to those of the new one.
///
/// Invariant: targets are below `ranks` and no two old ranks share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remap {
    old_to_new: Vec<Option<u32>>,
    ranks: u32,
}

/// A mapping that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemapError {
    #[error("old rank {old} maps to {new}, but the new view has {ranks} ranks")]
    OutOfRange { old: u32, new: u32, ranks: u32 },
    #[error("two old ranks map to rank {new}")]
    Twice { new: u32 },
}

impl Remap {
    /// `old_to_new[old]` is the new index of rank `old`, or nothing if it left; the new view has `ranks` ranks.
    ///
    /// # Errors
    /// The first old rank that breaks the invariant.
    pub fn new(old_to_new: Vec<Option<u32>>, ranks: u32) -> Result<Self, RemapError> {
        let mut taken = vec![false; ranks as usize];
        for (old, new) in old_to_new.iter().enumerate() {
            let Some(new) = *new else { continue };
            match taken.get_mut(new as usize) {
                None => {
                    return Err(RemapError::OutOfRange { old: old as u32, new, ranks });
                }
                Some(true) => return Err(RemapError::Twice { new }),
                Some(free) => *free = true,
            }
        }
        Ok(Self { old_to_new, ranks })
    }

    /// Where an old rank is now; `None` if it left or never was.
    pub fn rank(&self, old: u32) -> Option<u32> {
        self.old_to_new.get(old as usize).copied().flatten()
    }

    /// Ranks of the new view.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// New ranks that no old one became.
    pub fn joined(&self) -> impl Iterator<Item = u32> {
        (0..self.ranks).filter(|new| !self.old_to_new.contains(&Some(*new)))
    }

    /// Where a cursor that pointed at `old` points now: at that rank, or at the next one in turn that stayed.
    pub fn cursor(&self, old: u32) -> u32 {
        let ranks = self.old_to_new.len() as u32;
        (0..ranks).find_map(|step| self.rank((old + step) % ranks)).unwrap_or(0)
    }
}
