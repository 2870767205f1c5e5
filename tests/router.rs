//! The published routers' vectors, every sequence of them.

#[path = "bin/router.rs"]
mod router;

use router::Tally;
use std::path::{Path, PathBuf};

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/router")
}

/// Sequences of each family; a file that shrank would pass for the wrong reason.
const FAMILIES: [(&str, usize); 12] = [
    ("admission.jsonl.gz", 1998),
    ("balance.jsonl", 425),
    ("conv_least_queued.jsonl.gz", 1998),
    ("conv_least_tokens.jsonl.gz", 1998),
    ("conv_round_robin.jsonl.gz", 1998),
    ("conv_strict.jsonl.gz", 1998),
    ("conv_strict_children.jsonl.gz", 1998),
    ("default.jsonl.gz", 1998),
    ("kv_aware.jsonl.gz", 1998),
    ("kv_aware_warmup.jsonl.gz", 1998),
    ("pad.jsonl", 425),
    ("rng.jsonl", 510),
];

#[test]
fn every_published_sequence_gets_the_published_decisions() {
    let mut report = String::new();
    for (file, sequences) in FAMILIES {
        let mut lines = |line: &str| report = format!("{report}{line}\n");
        let tally = router::run_file(&vectors().join(file), &mut lines);
        let all = Tally { passed: sequences, failed: 0 };
        assert_eq!(tally, all, "{file}\n{report}");
    }
}
