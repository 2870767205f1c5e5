//! Runs vectors of the KV manager: each line of a file is one case of a pure function, or a sequence of operations that
//! starts with a fresh manager.

mod differ;
mod ops;
mod pure;

use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Differences that are shown of each file.
const SHOWN_MAX: usize = 5;

/// What came of a file, or of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
}

/// `kv DIR`: a line a file, then the sum; fails if anything failed or nothing was run.
#[allow(dead_code)] // the test runs folders without the command line
pub fn main(args: &[String]) -> ExitCode {
    let [folder] = args else {
        let _ = writeln!(std::io::stderr(), "usage: conformance kv DIR");
        return ExitCode::from(2);
    };
    let mut report = |line: &str| {
        let _ = writeln!(std::io::stdout(), "{line}");
    };
    match run_folder(Path::new(folder), &mut report) {
        Ok(all) => {
            report(&format!("{} passed, {} failed", all.passed, all.failed));
            if all.failed == 0 && all.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{folder}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every `*.jsonl` and `*.jsonl.gz` of a folder, by name.
///
/// # Errors
/// The folder cannot be listed.
pub fn run_folder(folder: &Path, report: &mut dyn FnMut(&str)) -> std::io::Result<Tally> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|file| stem(file).is_some());
    files.sort();
    let mut all = Tally::default();
    for file in &files {
        let tally = run_file(file, report);
        all.passed += tally.passed;
        all.failed += tally.failed;
    }
    Ok(all)
}

fn stem(file: &Path) -> Option<&str> {
    let name = file.file_name()?.to_str()?;
    name.strip_suffix(".jsonl").or_else(|| name.strip_suffix(".jsonl.gz"))
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

fn lines(file: &Path) -> std::io::Result<impl Iterator<Item = std::io::Result<String>>> {
    let opened = File::open(file)?;
    let reader: Box<dyn Read> = if file.extension().is_some_and(|extension| extension == "gz") {
        Box::new(flate2::read::MultiGzDecoder::new(opened))
    } else {
        Box::new(opened)
    };
    Ok(BufReader::new(reader).lines())
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
