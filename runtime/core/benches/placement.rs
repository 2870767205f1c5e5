//! Placement and admission at the published workload, after its placements were compared with the published digests.
//!
//! Routers run as they do in steady state: buffers have grown, history is fresh. A repetition is one call.
//! Before that, what is counted rather than timed is printed: the load average, allocations, bytes. With `PLACEMENT_PLOT` set to a
//! path, the growth with ranks and with the batch is measured, printed and drawn there.

#[path = "placement/growth.rs"]
mod growth;
#[path = "placement/memory.rs"]
mod memory;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use starling_core::admission::{self, Admission, Admitted, Pass, Policy as QueuePolicy, Queue, Waiting};
use starling_core::ids::{ClusterId, ConversationKey, Epoch, Incarnation, RankId, RequestKey, RequestNumber, Round};
use starling_core::placement::{
    Config, Conversation, CountChildren, MatchTable, NewConversations, Placement, Policy, RankLoad, Router, Routing,
};
use starling_core::replica::{self, Replica};
use starling_core::round::{Arrival, Contribution, Entry, Member, Merged, Sequenced, View};
use std::cell::RefCell;
use std::hint::black_box;
use std::time::Duration;

/// (ranks, batch)
const SHAPES: [(u32, u32); 4] = [(8, 16), (16, 256), (64, 1024), (64, 4096)];
const GROWTH_RANKS: [u32; 6] = [8, 16, 32, 64, 128, 256];
const GROWTH_BATCH: [u32; 6] = [16, 64, 256, 1024, 4096, 16_384];
/// Conversations and waiting requests whose bytes are counted.
const KEPT: u32 = 65_536;
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
        for (ranks, batch) in SHAPES {
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

/// The queue of the workload, and the pass over it.
struct Waitroom {
    router: Router,
    counts: Vec<u32>,
    cap: u32,
    budget: u64,
    state: RefCell<(Queue, Admission)>,
}

impl Waitroom {
    fn new(ranks: u32, batch: u32) -> Self {
        let workload = Workload::new(ranks, batch);
        let mut queue = Queue::new(QueuePolicy::Fcfs);
        for admitted in &workload.conversations {
            queue.push(admitted.request.clone()).expect("numbers differ");
        }
        let counts: Vec<u32> = workload.loads.iter().map(|load| load.active_requests).collect();
        let most = counts.iter().max().expect("ranks");
        Self {
            router: workload.router("conv strict round_robin (reconstruction)"),
            cap: most + (batch / (8 * ranks)).max(1),
            budget: u64::from(batch / 2),
            counts,
            state: RefCell::new((queue, Admission::default())),
        }
    }

    fn admit(&self) {
        let pass = Pass {
            budget: self.budget,
            cap: self.cap,
            counts: &self.counts,
            held: &[],
            now_us: 0,
            count_children: CountChildren::StrictCap,
            only: None,
        };
        let (queue, out) = &mut *self.state.borrow_mut();
        queue.admit(&pass, |request| self.router.admission_rank(request, 0), out);
        assert_eq!(out.admitted.len() as u64, self.budget, "the workload uses its budget up");
    }

    /// The queue as it was, in the memory where it was; taking over what was admitted is no part of the pass.
    fn refill(&self) {
        let (queue, out) = &mut *self.state.borrow_mut();
        let admitted = out.admitted.drain(..).map(|admitted| admitted.request);
        queue.put_back(admitted).expect("they were taken out");
    }
}

fn admission_pass(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    for (ranks, batch) in SHAPES {
        let room = Waitroom::new(ranks, batch);
        room.admit();
        group.throughput(Throughput::Elements(u64::from(batch)));
        group.bench_function(BenchmarkId::from_parameter(format!("{ranks}x{batch}")), |bencher| {
            bencher.iter_batched(|| room.refill(), |()| room.admit(), BatchSize::PerIteration);
        });
    }
    group.finish();
}

const CHANGES: u64 = 64;

/// A round of one member of 64 ranks that brings `entries`.
fn round(number: u64, entries: Vec<Entry>) -> Merged {
    let first = (number - 1) * 10_000;
    let entries = entries.into_iter().zip(first + 1..).map(|(entry, seq)| Sequenced { seq, entry }).collect();
    let (epoch, round) = (Epoch(1), Round(number));
    let contribution = Contribution {
        cluster: ClusterId(1),
        epoch,
        round,
        member: Incarnation(7),
        clock_us: number,
        entries,
        ranks: Vec::new(),
        prefix_matches: Vec::new(),
        digest: 0,
        draining: false,
    };
    Merged { epoch, round, clock_us: number, contributions: vec![contribution] }
}

fn arrivals(seqs: std::ops::Range<u64>) -> Vec<Entry> {
    let arrival = |seq: u64| Arrival {
        key: RequestKey { ingress: Incarnation(7), seq },
        prompt_tokens: 512,
        produced_tokens: 0,
        head: Box::default(),
        chain: Default::default(),
        children: 0,
        conversation: Some(conversation(seq as u32)),
        sub_agent: None,
        explicit: None,
        priority: 0.5,
    };
    seqs.map(|seq| Entry::Arrival(Box::new(arrival(seq)))).collect()
}

/// A replica that knows 4,096 requests: its state's digest, and whole rounds (merge, queue, placement, digest) of 64 changes.
fn replica(criterion: &mut Criterion) {
    let member = Member { incarnation: Incarnation(7), ranks: (0..64).map(RankId).collect() };
    let view = View { epoch: Epoch(1), members: vec![member], first_round: Round(1) };
    let config = replica::Config {
        cap: 32,
        attempts_max: 3,
        probe_requests_max: 256,
        lockstep: false,
        placement: Config::default(),
    };
    let mut known = Replica::new(view, config);
    let mut decisions = Vec::new();
    known.apply(&round(1, arrivals(0..4096)), &mut decisions);
    assert_eq!(known.waiting_len(), 4096 - 64 * 32);
    let cancels = |entry: u64| Entry::Cancel(RequestKey { ingress: Incarnation(7), seq: 4095 - entry });
    let rounds = [
        ("64 arrivals", round(2, arrivals(4096..4096 + CHANGES))),
        ("64 cancels", round(2, (0..CHANGES).map(cancels).collect())),
        ("nothing", round(2, Vec::new())),
    ];
    let mut group = criterion.benchmark_group("replica");
    group.bench_function("digest of the state", |bencher| bencher.iter(|| black_box(&known).state_digest()));
    for (name, merged) in &rounds {
        let apply = |(replica, out): &mut (Replica, Vec<_>)| replica.apply(merged, out);
        let fresh = || (known.clone(), Vec::with_capacity(1024));
        let mut tried = fresh();
        assert_ne!(apply(&mut tried).digest, 0, "{name}");
        assert_eq!(tried.0.faults().entries_ignored, 0, "{name}");
        group.bench_function(format!("round of {name}"), |bencher| {
            bencher.iter_batched_ref(fresh, apply, BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn print_counts() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    eprintln!("load average: {}", load.trim());
    for name in ROUTERS {
        let workload = Workload::new(64, 4096);
        let (mut router, mut out) = (workload.router(name), Placement::default());
        let mut route = || router.route(&workload.routing(), workload.batch(name), &mut out);
        route();
        eprintln!("{name}: {} allocations in a call", memory::allocations(route));
    }
    let room = Waitroom::new(64, 4096);
    let pass = || {
        room.admit();
        room.refill();
    };
    pass();
    eprintln!("admission: {} allocations in a pass and its refill", memory::allocations(pass));

    let conversations = || {
        let config = Config::default();
        let Router::Conversation(mut router) = Router::new(&config, config.bound(true), 64) else {
            unreachable!("the default policy")
        };
        (0..KEPT).for_each(|key| router.bind(conversation(key), key % 64));
        router
    };
    let queue = || {
        let mut queue = Queue::new(QueuePolicy::Fcfs);
        for number in 0..KEPT {
            let request = Waiting { number: RequestNumber(number.into()), ..Waiting::default() };
            queue.push(request).expect("numbers differ");
        }
        queue
    };
    for (what, bytes) in [("conversation", memory::bytes(conversations)), ("waiting request", memory::bytes(queue))] {
        let each = bytes / u64::from(KEPT);
        eprintln!("{bytes} bytes of {KEPT}: {each} bytes a {what}, growth of its tables included");
    }
}

fn plot(path: &std::ffi::OsStr) {
    let routers = [("conv least_queued", "#1f77b4"), ("kv_aware", "#d62728"), ("default", "#2ca02c")];
    let curves = |shapes: &[(u32, u32)], x: fn((u32, u32)) -> u32| -> Vec<growth::Curve> {
        let mut curves: Vec<growth::Curve> =
            routers.map(|(name, colour)| growth::Curve { name, colour, points: Vec::new() }).into();
        let mut pass = growth::Curve { name: "admission", colour: "#9467bd", points: Vec::new() };
        for shape in shapes.iter().copied() {
            let workload = Workload::new(shape.0, shape.1);
            for curve in &mut curves {
                let (router, mut out) = (workload.router(curve.name), Placement::default());
                let route = |router: &mut Router| {
                    router.route(&workload.routing(), workload.batch(curve.name), &mut out);
                };
                curve.points.push((x(shape), growth::median_us(|| router.clone(), route)));
            }
            let room = Waitroom::new(shape.0, shape.1);
            room.admit();
            pass.points.push((x(shape), growth::median_us(|| room.refill(), |()| room.admit())));
        }
        curves.push(pass);
        curves
    };
    let by_ranks = curves(&GROWTH_RANKS.map(|ranks| (ranks, 4096)), |(ranks, _)| ranks);
    let by_batch = curves(&GROWTH_BATCH.map(|batch| (64, batch)), |(_, batch)| batch);
    for curve in by_ranks.iter().chain(&by_batch) {
        let points: Vec<String> = curve.points.iter().map(|(x, us)| format!("{x}: {us:.1}")).collect();
        eprintln!("{}: {} (median, µs)", curve.name, points.join(", "));
    }
    let panels = [("ranks, with 4,096 requests", by_ranks), ("requests, with 64 ranks", by_batch)];
    std::fs::write(path, growth::svg(&panels)).expect("the picture is written");
}

fn main() {
    check_digests();
    print_counts();
    if let Some(path) = std::env::var_os("PLACEMENT_PLOT") {
        plot(&path);
    }
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500))
        .configure_from_args();
    placement(&mut criterion);
    admission_pass(&mut criterion);
    replica(&mut criterion);
    criterion.final_summary();
}
