//! How much of a prompt is there: the managers' probe beside the peer's `find_matches`.

use crate::dynamo::{Concurrent, best, stores, total};
use crate::inputs::{BLOCK_TOKENS, Holdings, tokens};
use crate::measure::{Calls, median};
use crate::starling::{Layers, Loaded, Ranks, SCOPE, load};
use crate::table::Table;
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::LocalBlockHash;
use starling_core::kv::cache::Manager;
use starling_core::kv::identity::truncated_chain;

const QUERIES: usize = 10_000;

/// Percentiles of single calls, by round.
#[derive(Default)]
struct Rounds {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, mut calls: Calls) {
        self.p50.push(calls.percentile(50));
        self.p99.push(calls.percentile(99));
    }

    fn medians(self) -> (f64, f64) {
        (median(self.p50), median(self.p99))
    }
}

fn probed(manager: &Manager, chain: &[u64]) -> u64 {
    u64::from(manager.probe_chain(chain) / BLOCK_TOKENS)
}

/// Returns the median probe of one manager that holds everything, in microseconds.
pub fn compare(data: &Holdings, published: u64, rounds: usize, table: &mut Table) -> f64 {
    let queries = data.queries(QUERIES);
    let chains: Vec<Vec<u64>> =
        queries.iter().map(|query| truncated_chain(&SCOPE, &tokens(query), BLOCK_TOKENS)).collect();
    let hashes = |query: &Vec<u64>| query.iter().map(|block| LocalBlockHash(*block)).collect();
    let sequences: Vec<Vec<LocalBlockHash>> = queries.iter().map(hashes).collect();

    let mut radix = RadixTree::new();
    let concurrent = Concurrent::new();
    for part in &data.stored {
        for event in stores(data, part) {
            radix.apply_event(event.clone()).expect("the peer stores it");
            concurrent.apply(event);
        }
    }
    concurrent.settle();
    let all = |layers| load(data, layers, Ranks::OneForAll, &[]).ranks;
    let (full, both) = (all(Layers::Full), all(Layers::FullAndWindow));
    let Loaded { ranks, .. } = load(data, Layers::Full, Ranks::OneEach, &[]);

    let mut expected = (0, 0);
    for sequence in &sequences {
        let scores = radix.find_matches(sequence.clone(), false);
        expected = (expected.0 + total(&scores), expected.1 + best(&scores));
    }
    assert_eq!(expected.0, published, "the peer's scores are those that were published");
    let sum = |manager: &Manager| chains.iter().map(|chain| probed(manager, chain)).sum::<u64>();
    assert_eq!(ranks.iter().map(|rank| sum(&rank.manager)).sum::<u64>(), published, "the ranks' scores");
    assert_eq!(sum(&full[0].manager), expected.1, "best scores, full attention");
    assert_eq!(sum(&both[0].manager), expected.1, "best scores, full attention and a window");
    println!(
        "Scores of {QUERIES} prompts: {published} by the peer and by {} managers; best {}",
        ranks.len(),
        expected.1
    );

    let mut times: [Rounds; 6] = Default::default();
    for _ in 0..rounds {
        let mut calls: [Calls; 6] = Default::default();
        for (at, managers) in [&full, &both].into_iter().enumerate() {
            for chain in &chains {
                calls[at].time(|| managers[0].manager.probe_chain(chain));
            }
        }
        for (index, chain) in chains.iter().enumerate() {
            calls[2].time(|| ranks[index % ranks.len()].manager.probe_chain(chain));
        }
        for chain in &chains {
            calls[3].time(|| ranks.iter().map(|rank| rank.manager.probe_chain(chain)).sum::<u32>());
        }
        for sequence in &sequences {
            // The tree takes the sequence and frees it.
            let sequence = sequence.clone();
            calls[4].time(|| radix.find_matches(sequence, false));
        }
        for sequence in &sequences {
            calls[5].time(|| concurrent.tree.find_matches_impl(sequence, false));
        }
        for (times, calls) in times.iter_mut().zip(calls) {
            times.add(calls);
        }
    }
    concurrent.stop();
    let [full, both, one, every, radix, concurrent] = times.map(Rounds::medians);
    let mut row = |name: &str, ours: (f64, f64), theirs: (f64, f64), wanted: &str| {
        table.compared(&format!("{name}, p50, µs"), (ours.0, theirs.0), wanted);
        table.compared(&format!("{name}, p99, µs"), (ours.1, theirs.1), "");
    };
    row("probe of one manager with all blocks / `RadixTree`", full, radix, "1 at most");
    row("the same / concurrent tree", full, concurrent, "");
    row("the same, full attention and a window / `RadixTree`", both, radix, "1 at most");
    row("probe of one worker's manager / `RadixTree`", one, radix, "");
    row("probes of all eight managers / `RadixTree`", every, radix, "");
    full.0
}
