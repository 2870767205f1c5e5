//! The KV manager: its vectors, every line of them, and random operations with bytes in every page.

#[path = "fuzz/driver.rs"]
mod driver;
#[path = "bin/kv/mod.rs"]
mod kv;
#[path = "fuzz/kv_ops.rs"]
mod kv_ops;
#[path = "bin/vectors.rs"]
mod vectors;

use proptest::prelude::*;
use std::path::{Path, PathBuf};
use vectors::Tally;

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/kv")
}

/// A file and the cases that it must have: a file that shrank would pass for the wrong reason.
fn passes(file: &str, cases: usize) {
    let mut report = String::new();
    let tally = kv::run_file(&vectors().join(file), &mut |line| report = format!("{report}{line}\n"));
    assert_eq!(tally, Tally { passed: cases, failed: 0 }, "{report}");
}

macro_rules! files {
    ($($name:ident: $file:literal has $cases:literal;)*) => {
        $(#[test] fn $name() { passes($file, $cases) })*
    };
}

files! {
    blocks_go_stale_as_specified: "pure-stale.jsonl.gz" has 1028;
    reuse_ends_where_specified: "pure-reuse.jsonl.gz" has 2550;
    checkpoints_lie_where_specified: "pure-checkpoint.jsonl.gz" has 434;
    retained_states_are_counted_as_specified: "pure-ssm.jsonl.gz" has 430;
    pools_are_sized_as_specified: "pure-sizing.jsonl.gz" has 426;
    named_sequences_run_as_specified: "ops-named.jsonl.gz" has 67;
    random_sequences_run_as_specified: "ops-random.jsonl.gz" has 374;
}

/// Runs a scratch folder with one file of vectors.
fn run(name: &str, file: &str, text: &str) -> (Tally, String) {
    let folder = std::env::temp_dir().join(format!("starling-kv-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a scratch folder");
    std::fs::write(folder.join(file), text).expect("a scratch file");
    let mut report = String::new();
    let tally = kv::run_folder(&folder, &mut |line| report = format!("{report}{line}\n"));
    std::fs::remove_dir_all(&folder).expect("the scratch folder goes");
    (tally.expect("a readable folder"), report)
}

const SEQUENCE: &str = concat!(
    r#"{"id":"one","config":{"T":4,"mode":"default","life_cycles":[{"kind":"full","policy":"required","group":0}],"#,
    r#""tiers":[[8]]},"streams":[[[0,64,1]]],"probes":[[0,0,-56]],"steps":["#,
    r#"{"op":"create","seq":1,"scope":0,"tokens":[0,0,8],"result":{"K":0,"path_depth":0,"optional":[]}},"#,
    r#"{"op":"resume","seq":1,"result":true},{"op":"resize","seq":1,"C":8,"result":true,"after":{"free":[[6]]}},"#,
    r#"{"op":"commit","seq":1,"tokens":[0,0,8],"result":{"K":8,"H":8},"after":{"probes":[[8,null]]}},"#,
    r#"{"op":"commit","seq":1,"tokens":[0,8,9],"result":{"error":"argument"}}]}"#,
);

#[test]
fn a_changed_expectation_fails_and_says_where() {
    assert_eq!(run("right", "ops.jsonl", SEQUENCE).0, Tally { passed: 1, failed: 0 });
    let changes = [
        (r#""free":[[6]]"#, r#""free":[[7]]"#, "step 2 (resize): after.free[0][0]: expected 7, found 6"),
        (r#"[[8,null]]"#, r#"[[4,null]]"#, "step 3 (commit): after.probes[0][0]: expected 4, found 8"),
        (
            r#""error":"argument""#,
            r#""error":"logic""#,
            r#"step 4 (commit): result.error: expected "logic", found "argument""#,
        ),
        (r#"{"op":"resume""#, r#"{"op":"redo""#, r#"step 1 (redo): op "redo" is not known"#),
        (r#""free""#, r#""used""#, "step 2 (resize): after.used is not known"),
    ];
    for (right, wrong, said) in changes {
        let (tally, report) = run("wrong", "ops.jsonl", &SEQUENCE.replace(right, wrong));
        assert_eq!(tally, Tally { passed: 0, failed: 1 }, "{said}");
        assert!(report.starts_with(&format!("ops line 1 (one): {said}")), "{report}");
    }
}

#[test]
fn files_that_cannot_be_read_fail() {
    for (file, text) in [("broken.jsonl", "{\"fn\":"), ("broken.jsonl.gz", "no archive"), ("odd.jsonl", "{}")] {
        let (tally, report) = run(file, file, text);
        assert_eq!(tally, Tally { passed: 0, failed: 1 }, "{file}: {report}");
    }
    assert_eq!(run("none", "notes.txt", "").0, Tally::default());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn invariants_hold_after_every_operation(input in proptest::collection::vec(any::<u8>(), 0..1600)) {
        kv_ops::run(&input, 1);
    }
}

#[test]
fn sequences_survive_any_operations() {
    driver::fuzz("kv_ops", kv_ops::kv_ops);
}

/// Runs at least so many operations, over all kinds of pools.
fn run_long(operations: usize) {
    /// More than an operation takes on average.
    const OPERATION_BYTES: usize = 8;
    let (mut state, mut count) = (17u64, 0);
    for kind in 0..kv_ops::KINDS {
        let mut input = vec![kind];
        input.extend((0..operations * OPERATION_BYTES / usize::from(kv_ops::KINDS)).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        }));
        count += kv_ops::run(&input, 64);
    }
    assert!(count >= operations, "{count} operations");
}

#[test]
fn many_operations_lose_no_page() {
    run_long(40_000);
}

#[test]
#[ignore = "takes minutes; the same as above with more operations"]
fn a_million_operations_lose_no_page() {
    run_long(1_000_000);
}
