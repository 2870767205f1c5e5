//! Placement and admission at the published workload, after its placements were compared with the published digests.
//!
//! Routers run as they do in steady state: buffers have grown, history is fresh. A repetition is one call.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use starling_core::admission::{self, Admission, Admitted, Pass, Policy as QueuePolicy, Queue, Waiting};
use starling_core::ids::{ConversationKey, RequestKey, RequestNumber};
use starling_core::placement::{
    Config, Conversation, CountChildren, MatchTable, NewConversations, Placement, Policy, RankLoad, Router, Routing,
};
use std::cell::RefCell;
use std::hint::black_box;
use std::time::Duration;

/// (ranks, batch)
const SHAPES: [(u32, u32); 4] = [(8, 16), (16, 256), (64, 1024), (64, 4096)];
/// For the growth with ranks and with the batch.
const GROWTH: [(u32, u32); 8] =
    [(8, 4096), (16, 4096), (32, 4096), (128, 4096), (256, 4096), (64, 256), (64, 16), (64, 16_384)];
const ROUTERS: [&str; 7] = [
    "default",
    "kv_aware",
    "kv_aware+warmup",
    "conv round_robin",
    "conv least_queued",
    "conv least_tokens",
    "conv strict round_robin (reconstruction)",
];
const DIGESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/router/bench-digests.json");

fn hash(i: u32) -> u32 {
    i.wrapping_mul(2_654_435_761)
}

struct Workload {
    cap: u32,
    loads: Vec<RankLoad>,
    plain: Vec<Admitted>,
    prefixes: Vec<Admitted>,
    conversations: Vec<Admitted>,
    /// Conversation and rank that the table knows beforehand.
    known: Vec<(ConversationKey, u32)>,
    matches: MatchTable,
}

impl Workload {
    fn new(ranks: u32, batch: u32) -> Self {
        let load = |r: u32| {
            let active_requests = (7 * r + 3) % 16;
            RankLoad { active_requests, active_tokens: u64::from(1000 * active_requests + 131 * r % 997) }
        };
        let plain = |i: u32| {
            let named = i.is_multiple_of(10);
            Waiting {
                number: RequestNumber(1000 + u64::from(i)),
                key: RequestKey { seq: u64::from(i), ..RequestKey::default() },
                tokens: 512 + hash(i) % 3584,
                explicit: named.then_some(i % ranks),
                relax: named.then_some(i.is_multiple_of(20)),
                ..Waiting::default()
            }
        };
        let with_head = |i: u32| Waiting { head: vec![i % 32; admission::HEAD_TOKENS].into(), ..plain(i) };
        let turn = |i: u32| {
            let talks = !i.is_multiple_of(5);
            Waiting { affinity: talks.then(|| conversation(hash(i) % (2 * batch))), ..plain(i) }
        };
        let all = |make: &dyn Fn(u32) -> Waiting| {
            (0..batch).map(|i| Admitted { request: make(i), reserved: None }).collect::<Vec<_>>()
        };
        let mut matches = MatchTable::default();
        matches.reset(ranks);
        for i in 0..batch {
            for rank in 0..ranks {
                let cached = if ((i % 32) + rank).is_multiple_of(8) { 512 } else { 0 };
                matches.set(RequestNumber(1000 + u64::from(i)), rank, cached);
            }
        }
        Self {
            cap: 2 * batch.div_ceil(ranks) + 64,
            loads: (0..ranks).map(load).collect(),
            plain: all(&plain),
            prefixes: all(&with_head),
            conversations: all(&turn),
            known: (0..batch).map(|j| (conversation(2 * j), (2 * j) % ranks)).collect(),
            matches,
        }
    }

    fn batch(&self, router: &str) -> &[Admitted] {
        match router {
            "default" => &self.plain,
            "kv_aware" | "kv_aware+warmup" => &self.prefixes,
            _ => &self.conversations,
        }
    }

    /// The router as it comes to the batch.
    fn router(&self, name: &str) -> Router {
        let policy = match name {
            "default" => Policy::Balanced,
            "kv_aware" | "kv_aware+warmup" => Policy::KvAware,
            _ => Policy::Conversation,
        };
        let new_conversations = match name {
            "conv least_queued" => NewConversations::LeastQueued,
            "conv least_tokens" => NewConversations::LeastTokens,
            _ => NewConversations::RoundRobin,
        };
        let config = Config {
            policy,
            new_conversations,
            cold_start_warmup: name == "kv_aware+warmup",
            strict_affinity: name.contains("strict"),
            strict_affinity_max_wait_passes: u32::MAX,
            ..Config::default()
        };
        let mut router = Router::new(&config, config.bound(true), self.loads.len() as u32);
        if let Router::Conversation(router) = &mut router {
            self.know(router);
        }
        // Full ranks place nothing, but the buffers grow.
        let full = vec![RankLoad { active_requests: self.cap, active_tokens: 0 }; self.loads.len()];
        let routing = Routing { loads: &full, ..self.routing() };
        let mut placement = Placement::default();
        router.route(&routing, self.batch(name), &mut placement);
        assert_eq!(placement.assigned.len(), 0);
        router
    }

    fn know(&self, router: &mut Conversation) {
        for (key, rank) in &self.known {
            router.bind(*key, *rank);
        }
    }

    fn routing(&self) -> Routing<'_> {
        Routing { loads: &self.loads, cap: self.cap, held: &[], now_us: 0, matches: &self.matches }
    }

    fn digest(&self, router: &str, placement: &Placement) -> u64 {
        let batch = self.batch(router);
        let mut ranks = vec![Vec::new(); self.loads.len()];
        for assigned in &placement.assigned {
            ranks[assigned.rank as usize].push(batch[assigned.index as usize].request.number.0);
        }
        let placed = ranks.iter().zip(0u64..).flat_map(|(ids, rank)| ids.iter().map(move |id| (*id, rank)));
        placed.fold(0u64, |digest, (id, rank)| {
            digest.wrapping_mul(1_000_003).wrapping_add(id.wrapping_mul(31)).wrapping_add(rank)
        })
    }
}

/// Keys are 128-bit hashes in production: spread over all bits.
fn conversation(number: u32) -> ConversationKey {
    ConversationKey(u128::from(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
}

fn check_digests() {
    let text = std::fs::read_to_string(DIGESTS).expect("the published digests");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).expect("digests as JSON");
    for row in &rows {
        let (ranks, batch) = (row["ranks"].as_u64().expect("ranks"), row["batch"].as_u64().expect("batch"));
        let name = row["router"].as_str().expect("router");
        let workload = Workload::new(ranks as u32, batch as u32);
        let mut placement = Placement::default();
        workload.router(name).route(&workload.routing(), workload.batch(name), &mut placement);
        assert_eq!(Some(u64::from(placement.expected)), row["expected"].as_u64(), "{name} {ranks}x{batch}");
        let digest = workload.digest(name, &placement).to_string();
        assert_eq!(Some(digest.as_str()), row["digest"].as_str(), "{name} {ranks}x{batch}");
    }
    assert_eq!(rows.len(), SHAPES.len() * ROUTERS.len());
}

fn placement(criterion: &mut Criterion) {
    for name in ROUTERS {
        let mut group = criterion.benchmark_group(name);
        let wide = matches!(name, "conv least_queued" | "kv_aware");
        for (ranks, batch) in SHAPES.into_iter().chain(GROWTH.into_iter().filter(|_| wide)) {
            let workload = Workload::new(ranks, batch);
            let (requests, routing) = (workload.batch(name), workload.routing());
            let router = workload.router(name);
            let mut out = Placement::default();
            group.throughput(Throughput::Elements(u64::from(batch)));
            group.bench_function(BenchmarkId::from_parameter(format!("{ranks}x{batch}")), |bencher| {
                let route = |router: &mut Router| router.route(&routing, black_box(requests), &mut out);
                bencher.iter_batched_ref(|| router.clone(), route, BatchSize::LargeInput);
            });
        }
        group.finish();
    }
}

fn admission_pass(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    for (ranks, batch) in SHAPES {
        let workload = Workload::new(ranks, batch);
        let router = workload.router("conv strict round_robin (reconstruction)");
        let mut queue = Queue::new(QueuePolicy::Fcfs);
        for admitted in &workload.conversations {
            queue.push(admitted.request.clone()).expect("numbers differ");
        }
        let counts: Vec<u32> = workload.loads.iter().map(|load| load.active_requests).collect();
        let most = counts.iter().max().expect("ranks");
        let pass = Pass {
            budget: u64::from(batch / 2),
            cap: most + (batch / (8 * ranks)).max(1),
            counts: &counts,
            held: &[],
            now_us: 0,
            count_children: CountChildren::StrictCap,
            only: None,
        };
        let state = RefCell::new((queue, Admission::default()));
        let admit = || {
            let (queue, out) = &mut *state.borrow_mut();
            queue.admit(&pass, |request| router.admission_rank(request, 0), out);
        };
        // The queue as it was, in the memory where it was; taking over what was admitted is no part of the pass.
        let refill = || {
            let (queue, out) = &mut *state.borrow_mut();
            let admitted = out.admitted.drain(..).map(|admitted| admitted.request);
            queue.put_back(admitted).expect("they were taken out");
        };
        admit();
        assert_eq!(state.borrow().1.admitted.len() as u64, pass.budget, "the workload uses its budget up");
        group.throughput(Throughput::Elements(u64::from(batch)));
        group.bench_function(BenchmarkId::from_parameter(format!("{ranks}x{batch}")), |bencher| {
            bencher.iter_batched(refill, |()| admit(), BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn main() {
    check_digests();
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .configure_from_args();
    placement(&mut criterion);
    admission_pass(&mut criterion);
    criterion.final_summary();
}
