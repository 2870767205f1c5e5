//! Memory: what a block costs, and what is left after everything was replaced a few times.
//!
//! Each subject has a process of its own, since a process's memory does not show whose it is.

use crate::dynamo::{Concurrent, removals, stores};
use crate::inputs::{BLOCK_TOKENS, Holdings, tokens};
use crate::measure::{count_bytes, live_bytes, resident_bytes};
use crate::starling::{Layers, Loaded, Ranks, load};
use crate::table::Table;
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::RouterEvent;
use starling_core::ids::TokenId;
use std::process::Command;

const HELD: usize = 300_000;
const WORKERS: usize = 8;
const TURNOVERS: u64 = 6;
const SUBJECTS: [(&str, &str); 4] = [
    ("full", "managers, full attention"),
    ("window", "managers, full attention and a window"),
    ("radix", "`RadixTree`"),
    ("concurrent", "concurrent tree"),
];

pub fn compare(quick: bool) {
    let program = std::env::current_exe().expect("this program's path");
    let header = [
        "",
        "blocks held",
        "live MiB",
        "after 6 turnovers",
        "metadata bytes a block, then",
        "at the end",
        "RSS, MiB",
        "at the end",
    ];
    let mut table = Table::new(&header);
    for (which, name) in SUBJECTS.iter().filter(|(which, _)| !quick || *which != "window") {
        let output = Command::new(&program).args(["turnovers", which]).output().expect("this program starts again");
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<Vec<&str>> = lines.lines().map(|line| line.split(' ').collect()).collect();
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { continue };
        let cells = [*name, first[0], first[1], last[1], first[2], last[2], first[3], last[3]];
        table.row(&cells.map(str::to_owned));
        let each: Vec<&str> = rows.iter().map(|row| row[1]).collect();
        eprintln!("{name}: live MiB after each turnover: {}", each.join(", "));
    }
    println!("# Memory: {HELD} blocks held by {WORKERS} workers, without tokens\n");
    table.print();
}

/// Live and resident bytes apart from the inputs'.
struct Base {
    live: i64,
    resident: i64,
}

impl Base {
    fn new() -> Self {
        Self { live: live_bytes(), resident: resident_bytes() }
    }

    /// `other` bytes are neither metadata nor anything the peer keeps.
    fn print(&self, held: usize, metadata: Option<usize>, other: usize) {
        let mib = |bytes: i64| bytes as f64 / f64::from(1 << 20);
        let live = live_bytes() - self.live - other as i64;
        let metadata = metadata.map_or(live as f64, |metadata| metadata as f64);
        // Of what is reserved for tokens only those of blocks were ever written.
        let written = other.min(held * BLOCK_TOKENS as usize * size_of::<TokenId>());
        let resident = resident_bytes() - self.resident - written as i64;
        println!("{held} {:.1} {:.1} {:.1}", mib(live), metadata / held as f64, mib(resident));
    }
}

/// One subject, in this process: a line after loading and one after each turnover.
pub fn turnovers(which: &str) {
    let mut data = Holdings::new(HELD, WORKERS);
    count_bytes();
    match which {
        "full" => starling(&mut data, Layers::Full),
        "window" => starling(&mut data, Layers::FullAndWindow),
        "radix" => radix(&mut data),
        _ => concurrent(&mut data),
    }
}

fn starling(data: &mut Holdings, layers: Layers) {
    let base = Base::new();
    let Loaded { mut ranks, .. } = load(data, layers, Ranks::OneEach, &[]);
    for round in 0..=TURNOVERS {
        if round > 0 {
            data.replace(round);
            for part in &data.stored {
                ranks[part.worker].prefill(&tokens(&data.sessions[part.session].blocks[..part.to]));
            }
        }
        let blocks = ranks.iter().map(|rank| rank.manager.blocks()).sum();
        let metadata = ranks.iter().map(|rank| rank.manager.metadata_bytes()).sum();
        base.print(blocks, Some(metadata), ranks.iter().map(|rank| rank.manager.token_bytes()).sum());
    }
}

/// Replaces what each worker has of each session beyond its group's prefix.
fn replaced(data: &mut Holdings, round: u64, mut apply: impl FnMut(RouterEvent)) {
    for part in &data.stored {
        removals(data, part).into_iter().for_each(&mut apply);
    }
    data.replace(round);
    for part in &data.stored {
        let part = crate::inputs::Stored { from: part.from.max(crate::inputs::PREFIX_BLOCKS), ..*part };
        stores(data, &part).into_iter().for_each(&mut apply);
    }
}

fn radix(data: &mut Holdings) {
    let base = Base::new();
    let mut tree = RadixTree::new();
    let mut apply = |event| tree.apply_event(event).expect("the peer takes it");
    data.stored.iter().flat_map(|part| stores(data, part)).for_each(&mut apply);
    base.print(data.held, None, 0);
    for round in 1..=TURNOVERS {
        replaced(data, round, &mut apply);
        base.print(data.held, None, 0);
    }
}

fn concurrent(data: &mut Holdings) {
    let base = Base::new();
    let tree = Concurrent::new();
    data.stored.iter().flat_map(|part| stores(data, part)).for_each(|event| tree.apply(event));
    tree.settle();
    base.print(data.held, None, 0);
    for round in 1..=TURNOVERS {
        replaced(data, round, |event| tree.apply(event));
        tree.settle();
        base.print(data.held, None, 0);
    }
    tree.stop();
}
