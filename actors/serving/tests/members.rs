//! Three members in one process, joined in memory: one decision, whichever of them a client asks, and what becomes of
//! streams when links and members come and go.

#[path = "support/member.rs"]
mod member;
mod support;

use member::{Member, name};
use starling_core::ids::RankId;
use starling_core::replica;
use starling_serving::api::StreamEvent;
use starling_serving::log::LocalLogs;
use starling_serving::{MemberState, Serving};
use starling_transport::memory::Network;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::{LIMIT, expected, first_token, prompt, submission, until};
use tokio::time::timeout;

const MEMBERS: usize = 3;

async fn start(world: (&Network, &LocalLogs), me: usize, life: u64) -> Member {
    Member::start(world, (me, MEMBERS), life, |settings| settings.suspect_after_us = 300_000).await
}

struct Cluster {
    network: Network,
    logs: LocalLogs,
    members: Vec<Member>,
}

impl Cluster {
    async fn start() -> Self {
        let (network, logs) = (Network::new(), LocalLogs::new(MEMBERS));
        let mut members = Vec::new();
        for me in 0..MEMBERS {
            members.push(start((&network, &logs), me, 1).await);
        }
        let cluster = Self { network, logs, members };
        cluster.ready().await;
        cluster
    }

    async fn ready(&self) {
        for member in &self.members {
            until("ready", async || member.serving.readiness().is_ready()).await;
        }
    }

    /// Nothing is open, and no block is held anywhere.
    async fn quiet(&self) {
        for member in &self.members {
            until("everything is released", async || {
                let open = member.serving.open_requests().await.unwrap_or(1);
                let debug = member.serving.placement_debug().await;
                let requests = debug.map_or(1, |debug| debug.requests + debug.open_here);
                open == 0 && requests == 0 && member.seen.is_quiet() && member.serving.readiness().is_ready()
            })
            .await;
        }
    }

    fn asked(&self, number: u32) -> Serving {
        self.members[number as usize % MEMBERS].serving.clone()
    }

    fn faults(&self) -> Vec<replica::Faults> {
        self.members.iter().map(|member| *member.seen.faults.lock().expect("no panic")).collect()
    }
}

/// One conversation, each turn by the next member: the rank and the cached tokens of each turn.
async fn converse(number: u32, asked: Vec<Serving>) -> Vec<(RankId, u32)> {
    let mut tokens = prompt(number);
    let mut seen = Vec::new();
    for (turn, asked) in asked.iter().enumerate() {
        let mut stream = asked.submit(submission(&tokens, 12, Some(u128::from(number))));
        let placed = timeout(LIMIT, stream.next()).await.expect("in time").expect("placed");
        let StreamEvent::Placed(placed) = placed else { panic!("{placed:?}") };
        assert_eq!(*placed.node, *format!("node-{}", placed.rank.0));
        let (mut answer, mut cached) = (Vec::new(), 0);
        while let Some(event) = timeout(LIMIT, stream.next()).await.expect("in time") {
            if let StreamEvent::Tokens(tokens) = event {
                cached = tokens[0].cached_tokens;
                answer.extend(tokens.iter().map(|token| token.drawn.token));
            }
        }
        assert_eq!(answer, expected(&tokens, 12), "conversation {number}, turn {turn}");
        seen.push((placed.rank, cached));
        tokens.extend(answer);
        tokens.extend([turn as u32 + 1, turn as u32 + 2]);
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_by_different_members_return_to_the_rank_that_holds_the_prefix() {
    let cluster = Cluster::start().await;
    let mut ranks = std::collections::BTreeSet::new();
    let mut conversations = tokio::task::JoinSet::new();
    for number in 0..20u32 {
        let asked: Vec<Serving> = (0..3).map(|turn| cluster.asked(number + turn)).collect();
        conversations.spawn(converse(number, asked));
    }
    while let Some(seen) = timeout(LIMIT, conversations.join_next()).await.expect("in time") {
        let seen = seen.expect("no panic");
        assert!(seen.windows(2).all(|w| w[0].0 == w[1].0 && w[0].1 < w[1].1), "{seen:?}");
        ranks.insert(seen[0].0);
    }
    assert_eq!(ranks.len(), MEMBERS, "all ranks took part");
    cluster.quiet().await;
    assert_eq!(cluster.faults(), [replica::Faults::default(); MEMBERS]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_the_blocks_of_another_member() {
    let cluster = Cluster::start().await;
    let mut request = submission(&prompt(1), 200, None);
    request.explicit = Some(starling_core::round::Explicit { rank: RankId(2), relax: Some(false) });
    let mut stream = cluster.members[0].serving.submit(request);
    first_token(&mut stream).await;
    drop(stream);
    cluster.quiet().await;
    let (_, batch) = cluster.members[2].seen.kv.lock().expect("no panic")[0];
    assert_eq!(batch.cancels, 1);
    assert!(batch.cancel_steps_max <= 1, "{batch:?}");
}

/// A member dies, the others go on without it, and it comes back as another life with their state.
async fn lose(lost: usize) {
    let mut cluster = Cluster::start().await;
    let others: Vec<usize> = (0..MEMBERS).filter(|member| *member != lost).collect();
    let epoch = cluster.members[others[0]].serving.cluster_report().await.expect("answers").epoch;
    // One stream runs where it is, the other on the member that dies.
    let on = |rank: usize| starling_core::round::Explicit { rank: RankId(rank as u32), relax: Some(true) };
    let slow = Arc::clone(&cluster.members[others[1]].gate);
    let mut streams = Vec::new();
    for rank in [others[1], lost] {
        let mut request = submission(&prompt(rank as u32), 100, None);
        request.explicit = Some(on(rank));
        let mut stream = cluster.members[others[0]].serving.submit(request);
        first_token(&mut stream).await;
        streams.push((rank, stream));
    }
    slow.closed.store(true, Ordering::SeqCst);
    let dead = cluster.members.remove(lost);
    cluster.network.crash(&name(lost));
    dead.serving.stop(LIMIT).await;
    drop(dead);
    for member in &cluster.members {
        until("the lost member is out of the view", async || {
            let report = member.serving.cluster_report().await.expect("answers");
            report.epoch > epoch && !report.members[lost].in_view && member.serving.readiness().is_ready()
        })
        .await;
        let report = member.serving.cluster_report().await.expect("answers");
        assert_eq!(report.members[lost].state, MemberState::Down, "{report:?}");
    }
    slow.closed.store(false, Ordering::SeqCst);
    for member in &cluster.members {
        let answer = timeout(LIMIT, member.serving.submit(submission(&prompt(9), 5, None)).complete()).await;
        assert_eq!(answer.expect("in time").expect("served").tokens, expected(&prompt(9), 5));
    }
    // What ran on the dead one goes on elsewhere, behind the tokens that its client has; the other never stopped for it.
    for (rank, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(rank as u32), 100));
    }
    let epoch = cluster.members[0].serving.cluster_report().await.expect("answers").epoch;
    let back = start((&cluster.network, &cluster.logs), lost, 2).await;
    cluster.members.insert(lost, back);
    cluster.ready().await;
    let report = cluster.members[lost].serving.cluster_report().await.expect("answers");
    assert!(report.epoch > epoch, "{report:?}");
    assert!(report.members.iter().all(|member| member.in_view), "{report:?}");
    for member in &cluster.members {
        let answer = timeout(LIMIT, member.serving.submit(submission(&prompt(5), 10, None)).complete()).await;
        assert_eq!(answer.expect("in time").expect("served").tokens, expected(&prompt(5), 10));
    }
    cluster.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_others_go_on_without_a_member_that_dies_and_it_comes_back_with_their_state() {
    lose(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_member_dies_and_comes_back() {
    lose(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_breaks_and_heals_costs_no_token() {
    let cluster = Cluster::start().await;
    let mut streams = Vec::new();
    for (asked, rank) in [(0, 1), (0, 2), (1, 0), (2, 0), (1, 2)] {
        let mut request = submission(&prompt(rank), 150, None);
        request.explicit = Some(starling_core::round::Explicit { rank: RankId(rank), relax: Some(true) });
        let mut stream = cluster.members[asked].serving.submit(request);
        first_token(&mut stream).await;
        streams.push((rank, stream));
    }
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        cluster.network.cut(&name(a), &name(b));
        cluster.network.heal(&name(a), &name(b));
    }
    for (rank, stream) in streams {
        let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
        assert_eq!(answer.tokens, expected(&prompt(rank), 150), "on rank {rank}");
    }
    cluster.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_round_actor_that_fails_comes_back_as_another_life_and_the_others_go_on() {
    for victim in ["queue", "router", "ingress"] {
        let cluster = Cluster::start().await;
        let mut streams = Vec::new();
        for asked in 0..MEMBERS {
            let mut stream = cluster.members[asked].serving.submit(submission(&prompt(asked as u32), 100, None));
            first_token(&mut stream).await;
            streams.push((asked, stream));
        }
        cluster.members[1].node.inject_panic(victim).expect("it runs");
        for (asked, stream) in streams {
            let answer = timeout(LIMIT, stream.complete()).await.expect("in time").expect("served");
            assert_eq!(answer.tokens, expected(&prompt(asked as u32), 100), "asked {asked}, {victim} failed");
        }
        cluster.quiet().await;
        cluster.members[0].mesh.close(LIMIT).await;
    }
}
