//! Checks vectors in files: `conformance router DIR`, `conformance kv DIR`, `conformance engine FILE --model MODEL`.

mod engine;
mod kv;
mod router;
mod vectors;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((family, rest)) if family == "router" => router::main(rest),
        Some((family, rest)) if family == "kv" => kv::main(rest),
        Some((family, rest)) if family == "engine" => engine::main(rest),
        _ => {
            let _ = writeln!(std::io::stderr(), "usage: conformance router DIR | kv DIR | engine FILE --model MODEL");
            ExitCode::from(2)
        }
    }
}
