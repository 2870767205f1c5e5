//! The serving actors as a whole: a backend that computes tokens from what its pages really hold, actors that are
//! killed under load, and streams that must not lose or repeat a token.

mod support;

use starling_actors::{ActorError, Node};
use starling_core::ids::TokenId;
use starling_core::request::Finish;
use starling_core::{placement, rejection::Rejection, replica};
use starling_gpu::Backend;
use starling_serving::api::StreamEvent;
use starling_serving::{Backends, LocalRank, NoObserver, Observer, Serving, Settings, TokenStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::{Gate, LIMIT, Seen, backends, expected, first_token, prompt, settings, submission, until};
use tokio::time::timeout;

struct Rig {
    node: Node,
    serving: Serving,
    gate: Arc<Gate>,
    seen: Arc<Seen>,
}

impl Rig {
    async fn start(settings: Settings) -> Self {
        let node = Node::new("here");
        let gate = Arc::new(Gate::default());
        let seen = Arc::new(Seen::default());
        let backends = backends(&settings, &gate);
        let observer: Arc<dyn Observer> = Arc::<Seen>::clone(&seen);
        let serving = Serving::start(&node, settings, backends, observer).await.expect("starts");
        Self { node, serving, gate, seen }
    }

    fn submit(&self, prompt: &[TokenId], tokens: u32, conversation: Option<u128>) -> TokenStream {
        self.serving.submit(submission(prompt, tokens, conversation))
    }

    /// Waits until nothing is open and no block is held.
    async fn quiet(&self) {
        until("everything is released", async || {
            let open = self.serving.open_requests().await.unwrap_or(1);
            let requests = self.serving.placement_debug().await.map_or(1, |debug| debug.requests);
            open == 0 && requests == 0 && self.seen.is_quiet() && self.serving.readiness().is_ready()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_on_two_ranks_get_the_tokens_of_an_undisturbed_run() {
    let rig = Rig::start(settings(2, 80)).await;
    let streams: Vec<_> = (0..40).map(|seed| (seed, rig.submit(&prompt(seed), 20, None))).collect();
    for (seed, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(seed), 20), "request {seed}");
        assert_eq!(answer.finish, Finish::Length);
    }
    rig.quiet().await;
    assert_eq!(*rig.seen.faults.lock().expect("no panic"), replica::Faults::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesses_change_no_token_and_are_counted() {
    let mut settings = settings(2, 80);
    settings.batch.draft_tokens_max = 4;
    let rig = Rig::start(settings).await;
    let streams: Vec<_> = (0..30).map(|seed| (seed, rig.submit(&prompt(seed), 40, None))).collect();
    for (seed, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(seed), 40), "request {seed}");
    }
    rig.quiet().await;
    let ranks = rig.seen.kv.lock().expect("no panic");
    let right: u64 = ranks.iter().map(|(_, batch)| batch.accepted_tokens).sum();
    let drafted: u64 = ranks.iter().map(|(_, batch)| batch.drafted_tokens).sum();
    assert!(0 < right && right < drafted, "{right} of {drafted}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_of_a_conversation_stay_on_their_rank_and_reuse_their_prefix() {
    let rig = Rig::start(settings(2, 200)).await;
    let mut tokens = prompt(3);
    let mut ranks = Vec::new();
    let mut cached = Vec::new();
    for turn in 0..3 {
        let mut stream = rig.submit(&tokens, 12, Some(5));
        // Another conversation between the turns takes the other rank.
        let other = rig.submit(&prompt(40 + turn), 4, Some(100 + u128::from(turn)));
        let mut answer = Vec::new();
        while let Some(event) = timeout(LIMIT, stream.next()).await.expect("in time") {
            match event {
                StreamEvent::Placed(placed) => ranks.push(placed.rank),
                StreamEvent::Tokens(new) => {
                    cached.push(new[0].cached_tokens);
                    answer.extend(new.iter().map(|t| t.drawn.token));
                }
                StreamEvent::Ended(_) => {}
                StreamEvent::Failed(rejection) => panic!("{rejection}"),
            }
        }
        assert_eq!(answer, expected(&tokens, 12));
        tokens.extend(answer);
        tokens.extend([turn + 1, turn + 2]);
        timeout(LIMIT, other.complete()).await.expect("in time").expect("served");
    }
    assert!(ranks.windows(2).all(|w| w[0] == w[1]), "{ranks:?}");
    cached.dedup();
    assert!(cached.len() == 3 && cached[0] == 0 && cached.is_sorted(), "{cached:?}");
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_its_blocks_within_one_step() {
    let rig = Rig::start(settings(1, 80)).await;
    let mut stream = rig.submit(&prompt(1), 200, None);
    first_token(&mut stream).await;
    drop(stream);
    // During prefill: the gate holds the step in which the long prompt is computed.
    rig.quiet().await;
    rig.gate.closed.store(true, Ordering::SeqCst);
    let stream = rig.submit(&[7; 100], 10, None);
    let begun = rig.gate.steps.load(Ordering::SeqCst);
    let stepping = async {
        while rig.gate.steps.load(Ordering::SeqCst) == begun {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, stepping).await.expect("the prefill begins");
    drop(stream);
    // The ingress tells the rank before it answers the next question: the stop is in the mailbox while the step runs.
    let left = async {
        while rig.serving.open_requests().await.unwrap_or(1) > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, left).await.expect("the client's leaving reaches the ingress");
    rig.gate.closed.store(false, Ordering::SeqCst);
    rig.quiet().await;
    let (_, batch) = rig.seen.kv.lock().expect("no panic")[0];
    assert_eq!(batch.cancels, 2);
    assert!(batch.cancel_steps_max <= 1, "{batch:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_ended_at_the_edge_is_over_and_one_that_never_fits_is_refused() {
    let rig = Rig::start(settings(1, 80)).await;
    let mut stream = rig.submit(&prompt(1), 200, None);
    first_token(&mut stream).await;
    stream.finish();
    rig.quiet().await;
    let too_long = rig.submit(&vec![1; 300], 5, None);
    let refused = timeout(LIMIT, too_long.complete()).await.expect("in time");
    assert!(matches!(refused, Err(Rejection::PromptTooLong { .. })), "{refused:?}");
    let empty = rig.submit(&[], 5, None);
    assert_eq!(timeout(LIMIT, empty.complete()).await.expect("in time"), Err(Rejection::EmptyPrompt));
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_too_small_for_all_serves_all_by_preemption() {
    let rig = Rig::start(settings(1, 64)).await;
    let streams: Vec<_> = (0..8).map(|seed| (seed, rig.submit(&prompt(seed), 60, None))).collect();
    for (seed, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(seed), 60), "request {seed}");
    }
    rig.quiet().await;
    assert!(rig.seen.kv.lock().expect("no panic")[0].1.preemptions > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kv_aware_policy_finds_the_rank_that_holds_the_prefix_without_a_conversation_key() {
    let policy = placement::Config { policy: placement::Policy::KvAware, ..placement::Config::default() };
    let mut settings = settings(3, 200);
    settings.replica.placement = policy;
    // A contribution goes out when both the ranks have answered: a slow machine must not make their matches absent.
    settings.rounds.probe_us_max = LIMIT.as_micros() as u64;
    let rig = Rig::start(settings).await;
    // Prompts with nothing in common go to ranks of their own.
    let mut homes = Vec::new();
    for seed in 0..3u32 {
        let prompt: Vec<TokenId> = (0..40).map(|i| 100 * seed + i).collect();
        let mut stream = rig.submit(&prompt, 8, None);
        let placed = timeout(LIMIT, stream.next()).await.expect("in time").expect("placed");
        let StreamEvent::Placed(placed) = placed else { panic!("{placed:?}") };
        homes.push((prompt, placed.rank));
        timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        rig.quiet().await;
    }
    for (mut prompt, home) in homes.into_iter().rev() {
        prompt.extend([7, 8, 9]);
        let mut stream = rig.submit(&prompt, 8, None);
        let placed = timeout(LIMIT, stream.next()).await.expect("in time").expect("placed");
        assert!(matches!(&placed, StreamEvent::Placed(p) if p.rank == home), "{placed:?}, its prefix is on {home}");
        let StreamEvent::Tokens(tokens) = first_token(&mut stream).await else { panic!("a token") };
        assert!(tokens[0].cached_tokens >= 36, "{tokens:?}");
        timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        rig.quiet().await;
    }
    assert_eq!(*rig.seen.faults.lock().expect("no panic"), replica::Faults::default());
}

/// Every actor is killed while streams run: each stream goes on to the end of the undisturbed answer.
async fn kill_under_load(name: &'static str) {
    let rig = Rig::start(settings(2, 200)).await;
    let mut streams: Vec<_> =
        (0..8).map(|seed| (seed, rig.submit(&prompt(seed), 100, Some(u128::from(seed))))).collect();
    for (_, stream) in &mut streams {
        // Their tokens so far are kept by the stream.
        first_token(stream).await;
    }
    rig.node.inject_panic(name).expect("it runs");
    for (seed, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time");
        let answer = answer.unwrap_or_else(|why| panic!("request {seed} after {name}: {why}"));
        assert_eq!(answer.tokens, expected(&prompt(seed), 100), "request {seed} after {name}");
    }
    rig.quiet().await;
    let answer = timeout(LIMIT, rig.submit(&prompt(90), 10, None).complete()).await.expect("in time");
    assert_eq!(answer.expect("served").tokens, expected(&prompt(90), 10), "a new request after {name}");
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_when_a_gpu_worker_dies() {
    kill_under_load("rank-0/worker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_when_a_kv_manager_dies() {
    kill_under_load("rank-1/kv").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_when_the_router_dies() {
    kill_under_load("router").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_when_the_queue_dies() {
    kill_under_load("queue").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_when_the_ingress_dies() {
    kill_under_load("ingress").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_rank_is_not_disturbed_when_a_worker_dies() {
    let rig = Rig::start(settings(2, 200)).await;
    let mut a = rig.submit(&prompt(1), 100, Some(1));
    let mut b = rig.submit(&prompt(2), 100, Some(2));
    first_token(&mut a).await;
    first_token(&mut b).await;
    rig.node.inject_panic("rank-0/worker").expect("it runs");
    let mut placements = 0;
    while let Some(event) = timeout(LIMIT, b.next()).await.expect("in time") {
        placements += u32::from(matches!(event, StreamEvent::Placed(_)));
    }
    assert_eq!(placements, 0, "the stream on rank 1 was not placed again");
    timeout(LIMIT, a.complete()).await.expect("in time").expect("served");
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_panics_loses_its_attempts_and_nothing_else() {
    let rig = Rig::start(settings(1, 200)).await;
    rig.gate.panic_at.store(30, Ordering::SeqCst);
    let streams: Vec<_> = (0..4).map(|seed| (seed, rig.submit(&prompt(seed), 60, None))).collect();
    for (seed, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(seed), 60), "request {seed}");
    }
    assert!(rig.seen.lost.load(Ordering::SeqCst) > 0);
    rig.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_refuses_new_requests_finishes_the_open_ones_and_is_not_ready() {
    let rig = Rig::start(settings(1, 80)).await;
    let mut open = rig.submit(&prompt(1), 80, None);
    first_token(&mut open).await;
    let serving = rig.serving.clone();
    let drained = tokio::spawn(async move { serving.drain(LIMIT).await });
    let not_ready = async {
        while rig.serving.readiness().is_ready() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, not_ready).await.expect("not ready while draining");
    timeout(LIMIT, open.complete()).await.expect("in time").expect("the open request ends in its own way");
    assert_eq!(timeout(LIMIT, drained).await.expect("in time").expect("no panic"), 0);
    let refused = timeout(LIMIT, rig.submit(&prompt(2), 5, None).complete()).await.expect("in time");
    assert_eq!(refused, Err(Rejection::Draining));
    rig.serving.stop(LIMIT).await;
    assert!(!rig.serving.readiness().is_ready());
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_with_their_values() {
    let node = Node::new("here");
    let backends: Arc<dyn Backends> =
        Arc::new(|_: LocalRank| -> Result<Box<dyn Backend>, ActorError> { Err("no device".into()) });
    let observer: Arc<dyn Observer> = Arc::new(NoObserver);
    for (settings, text) in [
        (settings(0, 80), "member here has no rank (ranks 0)"),
        (settings(1, 0), "KV pool group 0 has no slot on the device"),
        (
            settings(1, 10),
            "a sequence may have 256 tokens, which take 64 blocks of KV life cycle 0; a rank has 10 (of 4 tokens)",
        ),
        (settings(1, 80), "no device"),
    ] {
        let started = Serving::start(&node, settings, Arc::clone(&backends), Arc::clone(&observer)).await;
        let error = started.err().expect(text).to_string();
        assert!(error.contains(text), "{error}");
    }
}
