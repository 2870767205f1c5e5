//! Runs a fuzz target as a test: its corpus, and the same generated inputs each time.

use std::path::Path;

const GENERATED: usize = 20_000;

/// Runs a target over its corpus and over generated inputs (a linear congruential generator: the same each time).
pub fn fuzz(name: &str, target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut seeds = 0;
    for entry in std::fs::read_dir(corpus).expect("a corpus") {
        target(&std::fs::read(entry.expect("an entry").path()).expect("a seed"));
        seeds += 1;
    }
    assert!(seeds > 0, "the corpus is empty");
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    for _ in 0..GENERATED {
        let length = usize::from(next());
        let input: Vec<u8> = (0..length).map(|_| next()).collect();
        target(&input);
    }
}
