//! The numbers of a simulation: a counter through a mixer, so a seed names a run.

/// Draws numbers from a seed.
#[derive(Clone, Debug)]
pub struct Draw {
    state: u64,
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next number: splitmix64 (Steele, Lea, Flood 2014).
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `limit`, which is at least 1; the bias is below 2^-32 for the small limits used here.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit.max(1)
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}
