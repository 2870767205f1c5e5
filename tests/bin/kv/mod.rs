//! Runs vectors of the KV manager: each line of a file is one case of a pure function, or a sequence of operations that
//! starts with a fresh manager.

mod differ;
mod ops;
mod pure;

use crate::vectors::{self, Tally, lines, stem};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Differences that are shown of each file.
const SHOWN_MAX: usize = 5;

/// `kv DIR`: a line a file, then the sum; fails if anything failed or nothing was run.
#[allow(dead_code)] // the test runs folders without the command line
pub fn main(args: &[String]) -> ExitCode {
    let [folder] = args else {
        let _ = writeln!(std::io::stderr(), "usage: conformance kv DIR");
        return ExitCode::from(2);
    };
    vectors::print_folder(folder, run_file)
}

#[allow(dead_code)] // the command prints it
pub fn run_folder(folder: &Path, report: &mut dyn FnMut(&str)) -> std::io::Result<Tally> {
    vectors::run_folder(folder, report, run_file)
}

/// A line that cannot be read counts as failed, and so does a file that ends badly.
pub fn run_file(file: &Path, report: &mut dyn FnMut(&str)) -> Tally {
    let name = stem(file).unwrap_or("?");
    let mut tally = Tally::default();
    let mut count = |case: &str, verdict: Result<(), String>| match verdict {
        Ok(()) => tally.passed += 1,
        Err(why) => {
            tally.failed += 1;
            if tally.failed <= SHOWN_MAX {
                report(&format!("{name} {case}: {why}"));
            }
        }
    };
    match lines(file) {
        Ok(lines) => {
            for (at, line) in lines.enumerate() {
                match line {
                    Ok(line) if line.trim().is_empty() => {}
                    Ok(line) => {
                        let (case, verdict) = run_line(&line);
                        count(&format!("line {}{case}", at + 1), verdict);
                    }
                    Err(error) => {
                        count(&format!("line {}", at + 1), Err(error.to_string()));
                        break;
                    }
                }
            }
        }
        Err(error) => count("line 0", Err(error.to_string())),
    }
    report(&format!("{name} {} passed, {} failed", tally.passed, tally.failed));
    tally
}

/// The case's name, to be appended to its line, and what came of it.
fn run_line(line: &str) -> (String, Result<(), String>) {
    let case: Value = match serde_json::from_str(line) {
        Ok(case) => case,
        Err(error) => return (String::new(), Err(error.to_string())),
    };
    let name = ["id", "name"].iter().find_map(|field| case.get(field)?.as_str());
    let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
    let verdict = match case.get("fn").and_then(Value::as_str) {
        Some(function) => pure::judge(function, &case),
        None if case.get("steps").is_some() => ops::judge(&case),
        None => Err("has neither a function nor steps".into()),
    };
    (name, verdict)
}
