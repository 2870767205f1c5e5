//! The published routers' vectors, every sequence of them; fuzz targets of admission and placement.

#[path = "fuzz/driver.rs"]
mod driver;
#[path = "bin/router.rs"]
mod router;
#[path = "fuzz/router_ops.rs"]
mod router_ops;
#[path = "bin/vectors.rs"]
mod vectors;

use std::path::{Path, PathBuf};
use vectors::Tally;

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/router")
}

/// A family's file and the sequences that it must have: a file that shrank would pass for the wrong reason.
fn passes(file: &str, sequences: usize) {
    let mut report = String::new();
    let tally = router::run_file(&vectors().join(file), &mut |line| report = format!("{report}{line}\n"));
    assert_eq!(tally, Tally { passed: sequences, failed: 0 }, "{report}");
}

macro_rules! families {
    ($($name:ident: $file:literal has $sequences:literal;)*) => {
        $(#[test] fn $name() { passes($file, $sequences) })*
    };
}

families! {
    admission_passes_as_published: "admission.jsonl.gz" has 1998;
    gate_holds_and_releases_as_published: "balance.jsonl" has 425;
    least_queued_places_as_published: "conv_least_queued.jsonl.gz" has 1998;
    least_tokens_places_as_published: "conv_least_tokens.jsonl.gz" has 1998;
    round_robin_places_as_published: "conv_round_robin.jsonl.gz" has 1998;
    strict_affinity_waits_as_published: "conv_strict.jsonl.gz" has 1998;
    children_weigh_as_in_the_extension: "conv_strict_children.jsonl.gz" has 1998;
    balanced_places_as_published: "default.jsonl.gz" has 1998;
    kv_aware_places_as_published: "kv_aware.jsonl.gz" has 1998;
    warm_up_places_as_published: "kv_aware_warmup.jsonl.gz" has 1998;
    ranks_are_padded_as_published: "pad.jsonl" has 425;
    ties_are_shuffled_as_published: "rng.jsonl" has 510;
}

/// A scratch folder with one file of vectors.
fn folder(name: &str, file: &str, text: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("starling-router-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a scratch folder");
    std::fs::write(folder.join(file), text).expect("a scratch file");
    folder
}

fn run(name: &str, file: &str, text: &str) -> (Tally, String) {
    let folder = folder(name, file, text);
    let mut report = String::new();
    let tally = router::run_folder(&folder, &mut |line| report = format!("{report}{line}\n"));
    std::fs::remove_dir_all(&folder).expect("the scratch folder goes");
    (tally.expect("a readable folder"), report)
}

#[test]
fn a_changed_expectation_fails_and_says_where() {
    let right = [
        r#"{"v":"x","router":"default","ranks":2,"cap":4,"cfg":{},"#,
        r#""iters":[{"rs":[[0,0],[1,9]],"rq":[{"id":5,"n":3}],"out":[[5],[]],"exp":1}]}"#,
    ]
    .concat();
    let right = right.as_str();
    let (tally, _) = run("right", "family.jsonl", right);
    assert_eq!(tally, Tally { passed: 1, failed: 0 });
    let (tally, report) = run("wrong", "family.jsonl", &right.replace("[[5],[]]", "[[],[5]]"));
    assert_eq!(tally, Tally { passed: 0, failed: 1 });
    assert!(report.contains("family line 1: iteration 0: out is Some([[5], []])"), "{report}");
    assert!(report.ends_with("family 0 passed, 1 failed\n"), "{report}");
}

#[test]
fn files_that_cannot_be_read_fail() {
    for (file, text) in [("broken.jsonl", "{\"router\":"), ("broken.jsonl.gz", "no archive"), ("odd.jsonl", "{}")] {
        let (tally, report) = run(file, file, text);
        assert_eq!(tally, Tally { passed: 0, failed: 1 }, "{file}: {report}");
    }
    let (tally, _) = run("none", "notes.txt", "");
    assert_eq!(tally, Tally::default());
}

#[test]
fn routers_survive_any_operations() {
    driver::fuzz("placement_ops", router_ops::placement_ops);
}

#[test]
fn queues_survive_any_operations() {
    driver::fuzz("admission_ops", router_ops::admission_ops);
}
