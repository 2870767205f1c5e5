//! Runs published vectors against the core: `conformance router DIR`.

mod router;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((family, rest)) if family == "router" => router::main(rest),
        _ => {
            let _ = writeln!(std::io::stderr(), "usage: conformance router DIR");
            ExitCode::FAILURE
        }
    }
}
