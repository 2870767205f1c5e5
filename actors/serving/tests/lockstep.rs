//! Three members in lockstep: a round is one step of all ranks, whoever has none is padded, and whoever takes too long is
//! late and alone with it.

mod support;

use starling_actors::{Node, NodeName, Peer};
use starling_core::ids::RankId;
use starling_core::rejection::Rejection;
use starling_core::round::Explicit;
use starling_core::step::{Sampled, Step};
use starling_core::{batch, kv, replica, round};
use starling_gpu::{Backend, StepError};
use starling_serving::api::{StreamEvent, Submission};
use starling_serving::log::LocalLogs;
use starling_serving::{Backends, LocalRank, MemberSettings, MemberState, Observer, RoundReport, Serving, TokenStream};
use starling_transport::memory::{Limits, Mesh, Network};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use support::{Gate, LIMIT, Seen, backends, expected, first_token, prompt, settings, submission, until};
use tokio::time::timeout;

const MEMBERS: usize = 3;

fn name(member: usize) -> NodeName {
    NodeName::new(&format!("node-{member}")).expect("a name")
}

/// What the ranks of all members did, in the order in which it happened.
#[derive(Clone, Debug, Default)]
struct Tally {
    /// Steps begun, by rank.
    steps: [u64; MEMBERS],
    padded: [u64; MEMBERS],
    late: [u64; MEMBERS],
    /// How far two ranks were ever apart in rounds that they took part in, beyond what late ones missed.
    apart_max: u64,
}

impl Tally {
    fn look(&mut self) {
        let rounds = || (0..MEMBERS).map(|rank| self.steps[rank] + self.padded[rank]);
        let apart = rounds().max().unwrap_or(0) - rounds().min().unwrap_or(0);
        self.apart_max = self.apart_max.max(apart.saturating_sub(self.late.iter().sum()));
    }
}

/// Of one member.
#[derive(Default)]
struct Watcher {
    /// Its one rank counts under this.
    member: usize,
    tally: Arc<Mutex<Tally>>,
    seen: Seen,
    round: AtomicU64,
}

impl Watcher {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().expect("no panic under the lock")
    }
}

impl Observer for Watcher {
    fn rank(&self, rank: LocalRank, batch: &batch::Stats, kv: &kv::Stats) {
        self.seen.rank(rank, batch, kv);
    }
    fn round(&self, report: &RoundReport) {
        self.seen.round(report);
        self.round.store(report.round, Ordering::SeqCst);
    }
    fn padded(&self, _: LocalRank) {
        let mut tally = self.tally();
        tally.padded[self.member] += 1;
        tally.look();
    }
    fn late(&self, _: LocalRank) {
        self.tally().late[self.member] += 1;
    }
}

struct Counted {
    inner: Box<dyn Backend>,
    watcher: Arc<Watcher>,
}

impl Backend for Counted {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        {
            let mut tally = self.watcher.tally();
            tally.steps[self.watcher.member] += 1;
            tally.look();
        }
        self.inner.step(step, out)
    }
}

struct Member {
    serving: Serving,
    watcher: Arc<Watcher>,
    gate: Arc<Gate>,
    mesh: Mesh,
}

impl Member {
    async fn start(
        (network, logs): (&Network, &LocalLogs),
        (me, life): (usize, u64),
        tally: &Arc<Mutex<Tally>>,
        rounds: round::Config,
    ) -> Self {
        let mut settings = settings(1, 200);
        settings.members = (0..MEMBERS).map(|member| MemberSettings { name: name(member), ranks: 1 }).collect();
        settings.me = me;
        // Nobody is suspected here, however slow the machine.
        settings.suspect_after_us = 40_000_000;
        settings.replica.lockstep = true;
        settings.rounds = round::Config { lockstep: true, ..rounds };
        let node = Node::new(name(me).as_str());
        let watcher = Arc::new(Watcher { member: me, tally: Arc::clone(tally), ..Watcher::default() });
        let gate = Arc::new(Gate::default());
        let (plain, of_backends) = (backends(&settings, &gate), Arc::clone(&watcher));
        let counted: Arc<dyn Backends> = Arc::new(move |rank: LocalRank| {
            let inner = plain.backend(rank)?;
            Ok(Box::new(Counted { inner, watcher: Arc::clone(&of_backends) }) as Box<dyn Backend>)
        });
        let logs = Arc::new(logs.clone());
        let serving =
            Serving::start_with(&node, settings, counted, Arc::clone(&watcher) as _, logs).await.expect("starts");
        let peer = Peer { name: name(me), incarnation: life };
        let mesh = network.join(peer, Limits::default(), node.mesh_handler());
        (0..MEMBERS).filter(|other| *other != me).for_each(|other| mesh.connect(&name(other)));
        Self { serving, watcher, gate, mesh }
    }
}

struct Cluster {
    network: Network,
    logs: LocalLogs,
    members: Vec<Member>,
    tally: Arc<Mutex<Tally>>,
}

impl Cluster {
    async fn start(rounds: round::Config) -> Self {
        let (network, logs) = (Network::new(), LocalLogs::new(MEMBERS));
        let (mut members, tally) = (Vec::new(), Arc::default());
        for me in 0..MEMBERS {
            members.push(Member::start((&network, &logs), (me, 1), &tally, rounds.clone()).await);
        }
        let cluster = Self { network, logs, members, tally };
        cluster.ready().await;
        cluster
    }

    async fn ready(&self) {
        for member in &self.members {
            until("ready", async || member.serving.readiness().is_ready()).await;
        }
    }

    /// To the next member in turn, for that very rank.
    fn submit(&self, number: u32, rank: u32, tokens: u32) -> TokenStream {
        let explicit = Some(Explicit { rank: RankId(rank), relax: Some(false) });
        let request = Submission { explicit, ..submission(&prompt(number), tokens, None) };
        self.members[number as usize % MEMBERS].serving.submit(request)
    }

    fn tally(&self) -> Tally {
        self.tally.lock().expect("no panic under the lock").clone()
    }

    /// Nothing is open, no block is held anywhere, and no decision went wrong. Ends the members.
    async fn end(self) {
        self.end_with(0).await;
    }

    /// As `end`, where so many entries may have come too late to count.
    async fn end_with(self, late_max: u64) {
        for member in &self.members {
            until("everything is released", async || {
                let open = member.serving.open_requests().await.unwrap_or(1);
                let debug = member.serving.placement_debug().await;
                let requests = debug.map_or(1, |debug| debug.requests + debug.open_here);
                open == 0 && requests == 0 && member.watcher.seen.is_quiet()
            })
            .await;
            let faults = *member.watcher.seen.faults.lock().expect("no panic under the lock");
            assert!(faults.entries_ignored <= late_max, "{faults:?}");
            assert_eq!(replica::Faults { entries_ignored: 0, ..faults }, replica::Faults::default());
        }
        for member in &self.members {
            member.serving.stop(LIMIT).await;
            member.mesh.close(LIMIT).await;
        }
    }
}

async fn answered(stream: TokenStream, number: u32, tokens: u32) {
    let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
    assert_eq!(answer.tokens, expected(&prompt(number), tokens), "request {number}");
}

/// The next tokens of a stream; panics if it ends before.
async fn tokens_of(stream: &mut TokenStream, wanted: usize) {
    let mut got = 0;
    while got < wanted {
        match timeout(LIMIT, stream.next()).await.expect("in time").expect("not ended") {
            StreamEvent::Tokens(tokens) => got += tokens.len(),
            StreamEvent::Placed(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Steps are slow on a loaded machine, and these tests are about ranks that are not late.
fn patient() -> round::Config {
    round::Config { step_wait_us: 10_000_000, ..round::Config::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_take_one_step_a_round_and_answers_are_the_undisturbed_ones() {
    let cluster = Cluster::start(patient()).await;
    let mut streams = tokio::task::JoinSet::new();
    for number in 0..12 {
        let tokens = 20 + 5 * number;
        let stream = cluster.submit(number, number % 3, tokens);
        streams.spawn(answered(stream, number, tokens));
    }
    while let Some(stream) = streams.join_next().await {
        stream.expect("answered");
    }
    let tally = cluster.tally();
    assert!(tally.steps.iter().all(|steps| *steps >= 60), "{tally:?}");
    assert!(tally.apart_max <= 1, "{tally:?}");
    let rounds = cluster.members[0].watcher.round.load(Ordering::SeqCst);
    assert!(tally.steps.iter().all(|steps| *steps <= rounds + 1), "one a round at most: {rounds}, {tally:?}");
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_without_requests_is_padded_while_others_step() {
    let cluster = Cluster::start(patient()).await;
    let streams = [(0, 0), (1, 1)].map(|(number, rank)| (number, cluster.submit(number, rank, 80)));
    for (number, stream) in streams {
        answered(stream, number, 80).await;
    }
    let tally = cluster.tally();
    assert_eq!(tally.steps[2], 0);
    assert!(tally.padded[2] >= 80, "{tally:?}");
    assert!(tally.apart_max <= 1, "{tally:?}");
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_whose_step_hangs_is_late_and_others_go_on_without_it() {
    let cluster = Cluster::start(round::Config { step_wait_us: 20_000, ..round::Config::default() }).await;
    let mut streams: Vec<TokenStream> = (0..3).map(|number| cluster.submit(number, number, 200)).collect();
    for stream in &mut streams {
        first_token(stream).await;
    }
    let gate = Arc::clone(&cluster.members[2].gate);
    gate.closed.store(true, Ordering::SeqCst);
    let begun = gate.steps.load(Ordering::SeqCst);
    until("its step hangs", async || gate.steps.load(Ordering::SeqCst) > begun).await;
    let before = cluster.tally().late[2];
    until("the others do not wait for it", async || cluster.tally().late[2] > before + 1).await;
    // Steps go on elsewhere, and what is new goes there.
    tokens_of(&mut streams[0], 30).await;
    tokens_of(&mut streams[1], 30).await;
    for number in 10..16u32 {
        let mut stream =
            cluster.members[number as usize % MEMBERS].serving.submit(submission(&prompt(number), 5, None));
        let placed = timeout(LIMIT, stream.next()).await.expect("in time").expect("placed");
        assert!(matches!(&placed, StreamEvent::Placed(at) if at.rank != RankId(2)), "{placed:?}");
        answered(stream, number, 5).await;
    }
    // Who insists on it waits.
    let strict = cluster.submit(20, 2, 10);
    answered(cluster.submit(21, 0, 10), 21, 10).await;
    let waiting = cluster.members[0].serving.placement_debug().await.expect("answers").waiting;
    assert_eq!(waiting, 1, "the strict one");
    assert_eq!(gate.steps.load(Ordering::SeqCst), begun + 1);
    gate.closed.store(false, Ordering::SeqCst);
    answered(strict, 20, 10).await;
    for stream in &mut streams {
        while let Some(event) = timeout(LIMIT, stream.next()).await.expect("in time") {
            assert!(!matches!(event, StreamEvent::Failed(_)), "{event:?}");
        }
    }
    // One more than without late ranks: the others may go on while a step that has its turn is not begun yet.
    assert!(cluster.tally().apart_max <= 2, "{:?}", cluster.tally());
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_cluster_makes_no_rounds_but_heartbeats() {
    // None comes while the test runs.
    let cluster = Cluster::start(round::Config { heartbeat_us: 3_600_000_000, ..patient() }).await;
    let rounds = || -> Vec<u64> { cluster.members.iter().map(|m| m.watcher.round.load(Ordering::SeqCst)).collect() };
    answered(cluster.submit(1, 0, 30), 1, 30).await;
    // What follows the end of a request comes to rest, and stays there however much is talked.
    until("the rounds end", async || {
        let before = rounds();
        for _ in 0..30 {
            for member in &cluster.members {
                member.serving.cluster_report().await.expect("answers");
                member.serving.placement_debug().await.expect("answers");
            }
        }
        before == rounds()
    })
    .await;
    let (rest, padded) = (rounds(), cluster.tally().padded);
    assert!(rest.iter().all(|round| *round == rest[0] && *round >= 30), "{rest:?}");
    for _ in 0..100 {
        for member in &cluster.members {
            member.serving.cluster_report().await.expect("answers");
        }
    }
    assert_eq!((rounds(), cluster.tally().padded), (rest, padded));
    // It wakes by itself.
    answered(cluster.submit(2, 2, 10), 2, 10).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_stand_still_while_a_member_is_gone_and_go_on_when_it_is_back() {
    const LOST: usize = 1;
    let mut cluster = Cluster::start(patient()).await;
    // Asked of a member that stays.
    let mut streams = [2, 5, 8].map(|number| (number, cluster.submit(number, number / 3, 200)));
    first_token(&mut streams[2].1).await;
    // All wait for the step of one.
    let gate = Arc::clone(&cluster.members[2].gate);
    gate.closed.store(true, Ordering::SeqCst);
    let lost = cluster.members.remove(LOST);
    cluster.network.crash(&name(LOST));
    lost.serving.stop(LIMIT).await;
    drop(lost);
    for member in &cluster.members {
        until("it is gone", async || {
            let report = member.serving.cluster_report().await.expect("answers");
            report.members[LOST].state == MemberState::Down
        })
        .await;
    }
    gate.closed.store(false, Ordering::SeqCst);
    // What is on its way is one round at most, so each rank ends the step that it runs and takes one more.
    let before = cluster.tally().steps;
    for _ in 0..100 {
        for member in &cluster.members {
            member.serving.cluster_report().await.expect("answers");
        }
    }
    let after = cluster.tally().steps;
    assert!(before.iter().zip(after).all(|(before, after)| after <= before + 2), "{before:?}, {after:?}");
    let back = Member::start((&cluster.network, &cluster.logs), (LOST, 2), &cluster.tally, patient()).await;
    cluster.members.insert(LOST, back);
    cluster.ready().await;
    for (number, stream) in streams {
        if number / 3 != LOST as u32 {
            answered(stream, number, 200).await;
            continue;
        }
        // It insisted on the rank of a life that is over.
        let refused = timeout(LIMIT, stream.complete()).await.expect("in time");
        assert!(matches!(refused, Err(Rejection::NoSuchRank { rank: 1, .. })), "{refused:?}");
    }
    // Its ingress may ask to resume it until it hears that.
    cluster.end_with(1).await;
}
