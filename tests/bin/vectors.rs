//! Folders of vectors: what every kind of them shares.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What came of a file, or of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
}

/// Runs one file and reports line by line.
pub type RunFile = fn(&Path, &mut dyn FnMut(&str)) -> Tally;

/// Runs a folder and prints a line a file, then the sum; fails if anything failed or nothing was run.
#[allow(dead_code)] // the tests run folders without the command line
pub fn print_folder(folder: &str, run_file: RunFile) -> ExitCode {
    let mut report = |line: &str| {
        let _ = writeln!(std::io::stdout(), "{line}");
    };
    match run_folder(Path::new(folder), &mut report, run_file) {
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
pub fn run_folder(folder: &Path, report: &mut dyn FnMut(&str), run_file: RunFile) -> std::io::Result<Tally> {
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

pub fn stem(file: &Path) -> Option<&str> {
    let name = file.file_name()?.to_str()?;
    name.strip_suffix(".jsonl").or_else(|| name.strip_suffix(".jsonl.gz"))
}

pub fn lines(file: &Path) -> std::io::Result<impl Iterator<Item = std::io::Result<String>>> {
    let opened = File::open(file)?;
    let reader: Box<dyn Read> = if file.extension().is_some_and(|extension| extension == "gz") {
        Box::new(flate2::read::MultiGzDecoder::new(opened))
    } else {
        Box::new(opened)
    };
    Ok(BufReader::new(reader).lines())
}
