//! The seeded permutation that tells exact ties apart: the published routers' language shuffles a list with MT19937, and
//! every replica has to shuffle alike.
//!
//! Seeding is nearly all of the cost, so routers build a permutation only where two ranks tie, and of the generator's
//! next state only the words that are drawn are computed.

const WORDS: usize = 624;
const SHIFT: usize = 397;
/// State that array seeding starts from (the generator's authors chose this seed).
const START: [u32; WORDS] = seeded(19_650_218);

const fn seeded(seed: u32) -> [u32; WORDS] {
    let mut state = [0; WORDS];
    state[0] = seed;
    let mut at = 1;
    while at < WORDS {
        let last = state[at - 1];
        state[at] = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(at as u32);
        at += 1;
    }
    state
}

struct Twister {
    state: [u32; WORDS],
    at: usize,
}

impl Twister {
    /// Seeded with the 32-bit words of `seed`, lowest first; at least one.
    fn new(seed: u64) -> Self {
        let words = [seed as u32, (seed >> 32) as u32];
        let key = if words[1] == 0 { &words[..1] } else { &words[..] };
        let mut state = START;
        let mix = |state: &[u32; WORDS], at: usize, factor: u32| {
            let last = state[at - 1];
            state[at] ^ (last ^ (last >> 30)).wrapping_mul(factor)
        };
        let mut at = 1;
        for step in 0..WORDS {
            let word = step % key.len();
            state[at] = mix(&state, at, 1_664_525).wrapping_add(key[word]).wrapping_add(word as u32);
            at += 1;
            if at == WORDS {
                state[0] = state[WORDS - 1];
                at = 1;
            }
        }
        for _ in 1..WORDS {
            state[at] = mix(&state, at, 1_566_083_941).wrapping_sub(at as u32);
            at += 1;
            if at == WORDS {
                state[0] = state[WORDS - 1];
                at = 1;
            }
        }
        state[0] = 1 << 31;
        Self { state, at: 0 }
    }

    fn next(&mut self) -> u32 {
        let at = self.at;
        let after = if at + 1 == WORDS { 0 } else { at + 1 };
        let far = if at + SHIFT >= WORDS { at + SHIFT - WORDS } else { at + SHIFT };
        let joined = (self.state[at] & 0x8000_0000) | (self.state[after] & 0x7fff_ffff);
        let mut word = self.state[far] ^ (joined >> 1) ^ (if joined & 1 == 1 { 0x9908_b0df } else { 0 });
        self.state[at] = word;
        self.at = after;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// Uniform in `0..=most`, by rejection. `most` is at least 1.
    fn up_to(&mut self, most: u32) -> u32 {
        let spare_bits = (most + 1).leading_zeros();
        loop {
            let drawn = self.next() >> spare_bits;
            if drawn <= most {
                return drawn;
            }
        }
    }
}

/// Shuffles `ranks` by the seed.
pub(super) fn shuffle(seed: u64, ranks: &mut [u32]) {
    let mut twister = Twister::new(seed);
    for at in (1..ranks.len()).rev() {
        ranks.swap(at, twister.up_to(at as u32) as usize);
    }
}

/// The numbers below `n` in the order that the seed gives.
pub fn permutation(seed: u64, n: u32) -> Vec<u32> {
    let mut ranks: Vec<u32> = (0..n).collect();
    shuffle(seed, &mut ranks);
    ranks
}
