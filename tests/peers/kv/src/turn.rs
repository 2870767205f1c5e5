//! Reserving what a prompt can reuse, beside a comparison of its tokens; and a known conversation's turn.

use crate::dynamo::stores;
use crate::inputs::{BLOCK_TOKENS, Holdings, SplitMix, tokens};
use crate::measure::{Calls, median};
use crate::starling::{Layers, Rank, Ranks, SCOPE, load};
use crate::table::Table;
use dynamo_kv_router::indexer::KvIndexerInterface;
use dynamo_kv_router::protocols::RoutingConstraints;
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::selection::{
    PromptRequest, SelectAndReserveRequest, SelectionCacheConfig, SelectionCore, WorkerRequest,
};
use dynamo_kv_router::{KvRouterConfig, RoutingPartitionId, WorkerSelectionPolicy};
use starling_core::ids::TokenId;
use starling_core::kv::identity::{BlockKey, chain, chain_after};
use std::hint::black_box;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Prompts of a size, taken in turns so that neither side finds them in the nearest cache only.
const PROMPTS: usize = 24;
const CALLS: usize = 240;
const SIZES: [usize; 3] = [1024, 8192, 65_536];
/// Tokens of a conversation's next turn.
const TURN_TOKENS: usize = 512;

fn prompts(data: &Holdings, size: usize) -> Vec<Vec<TokenId>> {
    let blocks = size / BLOCK_TOKENS as usize;
    let long = data.sessions.iter().filter(|session| session.blocks.len() >= blocks);
    long.rev().take(PROMPTS).map(|session| tokens(&session.blocks[..blocks])).collect()
}

fn create_and_close(rank: &mut Rank, calls: &mut Calls, prompt: &[TokenId]) -> u32 {
    let (id, opened) = calls.time(|| rank.create(prompt));
    rank.manager.close(id);
    opened.reused_tokens
}

/// Median microseconds: reserve, probe by tokens, comparison.
fn reserve(rank: &mut Rank, prompts: &[Vec<TokenId>]) -> [f64; 3] {
    let copies = prompts.to_vec();
    let [mut created, mut probed, mut compared]: [Calls; 3] = Default::default();
    for call in 0..CALLS {
        let (prompt, copy) = (&prompts[call % prompts.len()], &copies[call % prompts.len()]);
        assert!(compared.time(|| black_box(prompt) == black_box(copy)));
        assert_eq!(probed.time(|| rank.manager.probe(&SCOPE, prompt)) as usize, prompt.len());
        assert_eq!(create_and_close(rank, &mut created, prompt) as usize, prompt.len());
    }
    [created, probed, compared].map(|mut calls| calls.median())
}

/// Median microseconds of the parts of a turn whose first tokens are known, and of the same turn with nothing known.
#[derive(Default)]
struct Turn {
    keys: Vec<f64>,
    probe: Vec<f64>,
    create: Vec<f64>,
    all_keys: Vec<f64>,
}

impl Turn {
    fn measure(&mut self, rank: &mut Rank, prompts: &[Vec<TokenId>], known: &[Vec<BlockKey>]) {
        let [mut keys, mut probe, mut create, mut all]: [Calls; 4] = Default::default();
        let truncated = |chain: Vec<BlockKey>| chain.iter().map(BlockKey::truncated).collect::<Vec<u64>>();
        for call in 0..CALLS {
            let (prompt, known) = (&prompts[call % prompts.len()], &known[call % prompts.len()]);
            let chain = keys.time(|| truncated(chain_after(known, &SCOPE, prompt, BLOCK_TOKENS)));
            let found = probe.time(|| rank.manager.probe_chain(&chain));
            assert_eq!(found as usize, prompt.len() - TURN_TOKENS);
            assert_eq!(create_and_close(rank, &mut create, prompt), found);
            if call < PROMPTS {
                assert_eq!(all.time(|| truncated(chain_after(&[], &SCOPE, prompt, BLOCK_TOKENS))), chain);
            }
        }
        self.keys.push(keys.median());
        self.probe.push(probe.median());
        self.create.push(create.median());
        self.all_keys.push(all.median());
    }
}

/// The peer's whole decision: tokens in, a worker reserved.
struct Selection {
    runtime: Runtime,
    core: SelectionCore,
    asked: u64,
}

impl Selection {
    fn new(data: &Holdings) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let config = KvRouterConfig { use_kv_events: true, router_queue_threshold: None, ..Default::default() };
        let cache = SelectionCacheConfig::default();
        let core = SelectionCore::try_new_local(
            config,
            1,
            CancellationToken::new(),
            cache,
            Arc::new(|config, role, _| WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())),
        )
        .expect("a core");
        runtime.block_on(async {
            for worker in 0..data.workers as u64 {
                let request = WorkerRequest {
                    worker_id: worker,
                    endpoint: Some(format!("http://worker-{worker}:8000")),
                    kv_events_endpoint: Some(format!("tcp://127.0.0.1:{}", 40_000 + worker)),
                    block_size: Some(BLOCK_TOKENS),
                    max_num_batched_tokens: Some(8192),
                    ..WorkerRequest::default()
                };
                core.upsert_worker(request).await.expect("the peer takes the worker");
            }
            let partition = core.partition(&RoutingPartitionId::new("default", "default")).expect("a partition");
            let indexer = partition.indexer().clone();
            for event in data.stored.iter().flat_map(|part| stores(data, part)) {
                indexer.apply_event_routed(event).await.expect("the peer takes the event");
            }
            match &indexer {
                Indexer::Single { primary, .. } => _ = primary.flush().await,
                Indexer::Concurrent { primary, .. } => primary.flush().await,
                Indexer::Remote { .. } | Indexer::None => {}
            }
        });
        Self { runtime, core, asked: 0 }
    }

    fn request(&mut self, prompt: &[TokenId]) -> (String, SelectAndReserveRequest) {
        self.asked += 1;
        let id = format!("turn-{}", self.asked);
        let request = SelectAndReserveRequest {
            model_name: "default".to_owned(),
            routing_group: "default".to_owned(),
            selection_id: Some(id.clone()),
            prompt: PromptRequest { token_ids: Some(prompt.to_vec()), ..PromptRequest::default() },
            router_config_override: None,
            expected_output_tokens: None,
            priority_jump: None,
            strict_priority: None,
            session_id: None,
            session_context: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
        };
        (id, request)
    }

    fn decide(&mut self, prompts: &[Vec<TokenId>]) -> f64 {
        let mut calls = Calls::default();
        for call in 0..CALLS {
            let (id, request) = self.request(&prompts[call % prompts.len()]);
            let (runtime, core) = (&self.runtime, &self.core);
            calls.time(|| runtime.block_on(core.select_and_reserve(request)).expect("the peer selects"));
            runtime.block_on(core.free_reservation(&id)).expect("the peer frees");
        }
        calls.median()
    }
}

/// Returns the median reserve of 64k tokens, in microseconds.
pub fn compare(data: &Holdings, rounds: usize, quick: bool) -> f64 {
    let mut all = load(data, Layers::Full, Ranks::OneForAll, &[]).ranks;
    let rank = &mut all[0];
    let mut table = Table::new(&[
        "one manager with all blocks, tokens",
        "reserve, µs",
        "match, µs",
        "compare, µs",
        "reserve / compare",
    ]);
    let mut largest = 0.0;
    for size in SIZES {
        let prompts = prompts(data, size);
        let times: Vec<[f64; 3]> = (0..rounds).map(|_| reserve(rank, &prompts)).collect();
        let of = |at: usize| median(times.iter().map(|times| times[at]).collect());
        let cells = [of(0), of(1), of(2)].map(|time| format!("{time:.2}"));
        let ratio = format!("{:.2} (3 at most)", of(0) / of(2));
        table.row(&[&[size.to_string()], &cells[..], &[ratio]].concat());
        largest = of(0);
    }
    table.print();
    conversation(data, rank, rounds, quick);
    largest
}

fn conversation(data: &Holdings, rank: &mut Rank, rounds: usize, quick: bool) {
    let known = prompts(data, SIZES[2]);
    let mut random = SplitMix(46);
    let mut fresh = || (0..TURN_TOKENS).map(|_| random.next() as TokenId).collect::<Vec<_>>();
    let turns: Vec<Vec<TokenId>> = known.iter().map(|known| [&known[..], &fresh()].concat()).collect();
    let keys: Vec<Vec<BlockKey>> = known.iter().map(|known| chain(&SCOPE, known, BLOCK_TOKENS)).collect();
    let mut selection = Selection::new(data);
    let (mut turn, mut decisions) = (Turn::default(), Vec::new());
    for _ in 0..if quick { 1 } else { rounds } {
        turn.measure(rank, &turns, &keys);
        decisions.push(selection.decide(&turns));
    }
    let [keys, probe, create, all] = [turn.keys, turn.probe, turn.create, turn.all_keys].map(median);
    let theirs = median(decisions);
    let mut table =
        Table::new(&["a turn of 64k known tokens and 512 new ones, µs", "starling", "peer", "starling / peer"]);
    for (name, time) in [("keys of the new blocks", keys), ("probe", probe), ("reserve at the rank", create)] {
        table.row(&[name.to_owned(), format!("{time:.1}")]);
    }
    table.compared("all three / select and reserve", (keys + probe + create, theirs), "");
    table.compared("keys and probe / select and reserve", (keys + probe, theirs), "");
    table.row(&["keys where none is known".to_owned(), format!("{all:.1}")]);
    table.print();
}
