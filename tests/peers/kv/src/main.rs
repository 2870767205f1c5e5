//! The KV manager beside the indexes of Dynamo's router, on the same blocks and prompts, in one run.
//!
//! `cargo run --release -- [--quick] [rounds=N]`, in this folder.

mod dynamo;
mod inputs;
mod measure;
mod memory;
mod reads;
mod starling;
mod table;
mod turn;
mod writes;

use inputs::Holdings;
use table::Table;

#[global_allocator]
static ALLOCATOR: measure::Counted = measure::Counted;

/// Scores of all prompts together, which any correct index has.
const PUBLISHED: [(usize, u64); 2] = [(100_000, 5_402_500), (1_000_000, 7_848_276)];
const WORKERS: usize = 8;
const ROUNDS: usize = 5;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, which] = &arguments[..]
        && first == "turnovers"
    {
        return memory::turnovers(which);
    }
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let rounds = arguments.iter().find_map(|argument| argument.strip_prefix("rounds=")?.parse().ok());
    let rounds = if quick { 1 } else { rounds.unwrap_or(ROUNDS) };
    println!("{}; load average {}", measure::machine(), measure::load_average());
    println!("Medians of {rounds} rounds; rates are a second of the working thread's CPU time.\n");
    let mut growth = Vec::new();
    for (held, published) in PUBLISHED.into_iter().filter(|(held, _)| !quick || *held == 100_000) {
        let data = Holdings::new(held, WORKERS);
        println!("# {} blocks held by {WORKERS} workers, {} sessions\n", data.held, data.sessions.len());
        let mut table = Table::new(&["", "starling", "peer", "starling / peer", "wanted"]);
        let probe = reads::compare(&data, published, rounds, &mut table);
        writes::compare(&data, if quick { 1 } else { rounds.min(3) }, &mut table);
        table.print();
        let reserve = turn::compare(&data, rounds, quick);
        growth.push((held, probe, reserve));
        println!("load average {}\n", measure::load_average());
    }
    if let [(_, probe, reserve), (_, large_probe, large_reserve)] = growth[..] {
        println!("# Ten times the blocks\n");
        println!(
            "probe p50 x {:.2}, reserve of 64k tokens x {:.2} (2.2 wanted)\n",
            large_probe / probe,
            large_reserve / reserve
        );
    }
    memory::compare(quick);
    println!("load average {}", measure::load_average());
}
