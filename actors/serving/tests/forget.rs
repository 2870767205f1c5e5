//! Two members in one process: what one of them is asked to forget goes on both, and what one is asked about is found on both.

#[path = "support/member.rs"]
mod member;
mod support;

use member::{Member, name};
use starling_actors::Node;
use starling_core::ids::{ConversationKey, RankId, TokenId};
use starling_core::kv::identity::Scope;
use starling_core::kv::{self, Forget, Forgotten};
use starling_core::placement::Policy;
use starling_core::round::Explicit;
use starling_serving::api::{StreamEvent, Submission};
use starling_serving::log::LocalLogs;
use starling_serving::{
    AttemptReport, ForgetReport, MissedReport, RequestReport, RequestsReport, ReservationReport, Serving, Settings,
    Texts,
};
use starling_transport::memory::Network;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use support::{BLOCK_TOKENS, Gate, LIMIT, Seen, backends, expected, first_token, prompt, settings, submission, until};
use tokio::time::timeout;

const MEMBERS: usize = 2;
/// Of every submission of the tests.
const SCOPE: Scope = Scope { tenant: 1, adapter: None };
const SYSTEM_TOKENS: u32 = 3 * BLOCK_TOKENS;

/// Remembers what it was told to forget.
#[derive(Default)]
struct Told(Mutex<Vec<Forget>>);

impl Texts for Told {
    fn forget(&self, what: &Forget) -> usize {
        self.0.lock().expect("no panic under the lock").push(*what);
        1
    }
}

struct Cluster {
    network: Network,
    members: Vec<Member>,
    /// What each member's edge was told.
    texts: Vec<Arc<Told>>,
}

impl Cluster {
    async fn start() -> Self {
        let (network, logs) = (Network::new(), LocalLogs::new(MEMBERS));
        let (mut members, mut texts) = (Vec::new(), Vec::new());
        for me in 0..MEMBERS {
            // Ranks are named, and a conversation's turns may go to any.
            let balanced = |settings: &mut Settings| settings.replica.placement.policy = Policy::Balanced;
            let member = Member::start((&network, &logs), (me, MEMBERS), 1, balanced).await;
            let told = Arc::new(Told::default());
            member.serving.keep_texts(Arc::clone(&told) as _);
            members.push(member);
            texts.push(told);
        }
        let cluster = Self { network, members, texts };
        cluster.ready().await;
        cluster
    }

    async fn ready(&self) {
        for member in &self.members {
            until("ready", async || member.serving.readiness().is_ready()).await;
        }
    }

    async fn quiet(&self) {
        for member in &self.members {
            until("everything is released", async || member.seen.is_quiet()).await;
        }
    }

    async fn forget(&self, asked: usize, what: Forget) -> ForgetReport {
        self.members[asked].serving.forget(what, LIMIT).await
    }

    async fn requests(&self, asked: usize, name: &str) -> RequestsReport {
        self.members[asked].serving.requests(name, LIMIT).await
    }

    /// A whole answer by that rank, with the tokens that its prompt reused.
    async fn serve(&self, request: Submission) -> u32 {
        let prompt = Arc::clone(&request.prompt);
        let mut stream = self.members[0].serving.submit(request);
        let (mut answer, mut cached) = (Vec::new(), 0);
        while let Some(event) = timeout(LIMIT, stream.next()).await.expect("in time") {
            if let StreamEvent::Tokens(tokens) = event {
                cached = tokens[0].cached_tokens;
                answer.extend(tokens.iter().map(|token| token.drawn.token));
            }
        }
        assert_eq!(answer, expected(&prompt, answer.len() as u32));
        self.quiet().await;
        cached
    }
}

/// On that rank and nowhere else.
fn on(rank: u32, tokens: &[TokenId], conversation: u128) -> Submission {
    let explicit = Some(Explicit { rank: RankId(rank), relax: Some(false) });
    Submission { explicit, ..submission(tokens, 4, Some(conversation)) }
}

/// A system prompt, and a user's tokens behind it.
fn turn(user: u32, tokens: u32) -> Vec<TokenId> {
    (0..SYSTEM_TOKENS).chain((0..tokens).map(|i| 100 * user + i)).collect()
}

fn conversation(key: u128) -> Forget {
    Forget::Conversation { scope: SCOPE, conversation: ConversationKey(key) }
}

fn forgotten(report: &ForgetReport) -> Vec<Forgotten> {
    assert_eq!(report.unanswered, []);
    assert!(report.ranks.iter().map(|one| one.rank).eq((0..MEMBERS as u32).map(RankId)), "{report:?}");
    report.ranks.iter().map(|one| one.forgotten).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_conversation_reuses_the_system_prompt_of_all_and_nothing_of_its_own() {
    let cluster = Cluster::start().await;
    let (ours, theirs) = (turn(1, 20), turn(2, 20));
    // On both ranks, as if it had moved.
    for rank in 0..2 {
        assert_eq!(cluster.serve(on(rank, &ours, 1)).await, 0);
        assert_eq!(cluster.serve(on(rank, &theirs, 2)).await, SYSTEM_TOKENS);
        assert_eq!(cluster.serve(on(rank, &ours, 1)).await, 31, "all but the last token");
    }
    let report = cluster.forget(0, conversation(1)).await;
    for forgotten in forgotten(&report) {
        assert!(forgotten.blocks >= 5 && forgotten.pages == forgotten.blocks, "{report:?}");
        assert_eq!(forgotten.pending_sequences, 0);
    }
    assert_eq!(report.texts, MEMBERS);
    for told in &cluster.texts {
        assert_eq!(*told.0.lock().expect("no panic"), [conversation(1)]);
    }
    // From the other member, it is the same again, and nothing is left.
    assert_eq!(forgotten(&cluster.forget(1, conversation(1)).await), [Forgotten::default(); MEMBERS]);
    for rank in 0..2 {
        assert_eq!(cluster.serve(on(rank, &ours, 1)).await, SYSTEM_TOKENS);
        assert_eq!(cluster.serve(on(rank, &theirs, 2)).await, 31, "others keep theirs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scope_is_forgotten_on_all_ranks_and_another_tenants_is_not() {
    let cluster = Cluster::start().await;
    let tokens = turn(1, 20);
    for rank in 0..2 {
        cluster.serve(on(rank, &tokens, 1)).await;
        cluster.serve(Submission { tenant: 2, ..on(rank, &tokens, 3) }).await;
    }
    let nobody = Forget::Scope(Scope { tenant: 3, adapter: None });
    assert_eq!(forgotten(&cluster.forget(1, nobody).await), [Forgotten::default(); MEMBERS]);
    let report = cluster.forget(1, Forget::Scope(SCOPE)).await;
    assert!(forgotten(&report).iter().all(|forgotten| forgotten.blocks >= 8), "{report:?}");
    for rank in 0..2 {
        assert_eq!(cluster.serve(on(rank, &tokens, 1)).await, 0);
        assert_eq!(cluster.serve(Submission { tenant: 2, ..on(rank, &tokens, 3) }).await, 31);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_a_forgotten_conversation_goes_on_and_leaves_nothing() {
    let cluster = Cluster::start().await;
    let tokens = turn(1, 20);
    let gate = &cluster.members[1].gate;
    gate.closed.store(true, Ordering::SeqCst);
    let mut stream = cluster.members[0].serving.submit(on(1, &tokens, 1));
    until("its first step", async || gate.steps.load(Ordering::SeqCst) > 0).await;
    let report = cluster.forget(0, conversation(1)).await;
    assert_eq!(forgotten(&report).iter().map(|one| one.pending_sequences).collect::<Vec<_>>(), [0, 1]);
    gate.closed.store(false, Ordering::SeqCst);
    let mut answer = Vec::new();
    while let Some(event) = timeout(LIMIT, stream.next()).await.expect("in time") {
        if let StreamEvent::Tokens(tokens) = event {
            answer.extend(tokens.iter().map(|token| token.drawn.token));
        }
    }
    assert_eq!(answer, expected(&tokens, 4));
    cluster.quiet().await;
    let pools = |member: &Member| member.seen.kv.lock().expect("no panic")[0].0.pools.clone();
    assert_eq!(pools(&cluster.members[1])[0].blocks_free, 200);
    assert_eq!(cluster.serve(on(1, &tokens, 1)).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_be_reached_is_named_and_forgets_when_it_is_asked_again() {
    let cluster = Cluster::start().await;
    let tokens = turn(1, 20);
    for rank in 0..2 {
        cluster.serve(on(rank, &tokens, 1)).await;
    }
    cluster.network.cut(&name(0), &name(1));
    until("the link is down", async || cluster.members[0].serving.node().links().is_empty()).await;
    let report = cluster.forget(0, conversation(1)).await;
    assert_eq!(report.ranks.iter().map(|one| one.rank).collect::<Vec<_>>(), [RankId(0)]);
    assert!(report.ranks[0].forgotten.blocks > 0);
    let who: Vec<&str> = report.unanswered.iter().map(|one| one.who.as_str()).collect();
    assert_eq!(who, ["rank 1 of node-1", "node-1"]);
    assert!(report.unanswered[0].why.contains("no link to node node-1"), "{report:?}");
    let found = cluster.requests(0, "nothing").await;
    assert_eq!((found.requests.len(), found.unanswered[0].who.as_str()), (0, "node-1"));

    cluster.network.heal(&name(0), &name(1));
    for member in &cluster.members {
        until("the link is up", async || !member.serving.node().links().is_empty()).await;
    }
    cluster.ready().await;
    let again = forgotten(&cluster.forget(0, conversation(1)).await);
    assert_eq!(again[0], Forgotten::default());
    assert!(again[1].blocks > 0, "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_member_tells_where_a_request_ran_and_why_its_prompt_was_computed() {
    let cluster = Cluster::start().await;
    let called = |name: &str, request: Submission| Submission { names: [name.into(), "id".into()].into(), ..request };
    cluster.serve(called("one", on(1, &turn(1, 20), 1))).await;
    cluster.serve(called("two", on(1, &turn(2, 20), 2))).await;
    let missed = |from, to, why| MissedReport { from, to, why, life_cycle: None };
    for asked in 0..MEMBERS {
        let report = cluster.requests(asked, "two").await;
        let reservation = ReservationReport {
            prompt_tokens: 32,
            reused_tokens: SYSTEM_TOKENS,
            missed: vec![missed(SYSTEM_TOKENS, 31, "content_differs"), missed(31, 32, "last_token")],
        };
        let attempt = AttemptReport { attempt: 1, node: "node-1".into(), rank: 1, reservations: vec![reservation] };
        let request = RequestReport { ingress: "node-0".into(), choice: 0, open: false, attempts: vec![attempt] };
        assert_eq!(report, RequestsReport { id: "two".into(), requests: vec![request], unanswered: Vec::new() });
        assert_eq!(cluster.requests(asked, "id").await.requests.len(), 2, "the names of answers are names as well");
        assert_eq!(cluster.requests(asked, "three").await.requests, []);
    }
    // What is forgotten is not explained any more.
    cluster.forget(0, conversation(2)).await;
    let report = cluster.requests(0, "two").await;
    assert_eq!(report.requests[0].attempts[0].reservations, []);
    assert_eq!(cluster.requests(0, "one").await.requests[0].attempts[0].reservations.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_runs_is_told_of_as_open() {
    let cluster = Cluster::start().await;
    let gate = &cluster.members[0].gate;
    gate.closed.store(true, Ordering::SeqCst);
    let request = Submission { names: ["mine".to_owned()].into(), ..on(0, &turn(1, 20), 1) };
    let mut stream = cluster.members[1].serving.submit(request);
    until("its first step", async || gate.steps.load(Ordering::SeqCst) > 0).await;
    let report = cluster.requests(0, "mine").await;
    let [RequestReport { ingress, open: true, attempts, .. }] = &report.requests[..] else { panic!("{report:?}") };
    assert_eq!((ingress.as_str(), attempts[0].node.as_str()), ("node-1", "node-0"));
    assert_eq!(attempts[0].reservations[0].missed[0].why, "content_differs");
    gate.closed.store(false, Ordering::SeqCst);
    first_token(&mut stream).await;
    drop(stream);
    cluster.quiet().await;
    until("it is over", async || !cluster.requests(0, "mine").await.requests[0].open).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_expire_on_a_rank_that_nobody_asks_anything() {
    let window = kv::cache::lifecycle::Retention::Window { tokens: NonZeroU32::new(8).expect("not 0"), sink_blocks: 0 };
    let full = kv::cache::lifecycle::Retention::Full;
    let block_tokens = NonZeroU32::new(BLOCK_TOKENS).expect("not 0");
    let mut settings: Settings = settings(1, 200);
    settings.kv = kv::Config::new(block_tokens, vec![(full, 200), (window, 200)]);
    settings.kv.cache.conversation_ttl_us = Some(50_000);
    settings.batch.kv = settings.kv.shape();
    let (gate, seen) = (Arc::new(Gate::default()), Arc::new(Seen::default()));
    let backends = backends(&settings, &gate);
    let serving = Serving::start(&Node::new("here"), settings, backends, Arc::clone(&seen) as _).await.expect("starts");
    let request = submission(&prompt(3), 4, Some(1));
    timeout(LIMIT, serving.submit(request).complete()).await.expect("in time").expect("an answer");
    until("the conversation has expired", async || {
        let kv = seen.kv.lock().expect("no panic under the lock")[0].0.clone();
        kv.turns == 1 && kv.conversations == 0
    })
    .await;
}
