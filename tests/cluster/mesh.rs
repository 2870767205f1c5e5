//! Nodes of one cluster: what a client of any of them can rely on, and what a lost one does to the others.

use super::client::{Chat, rest};
use super::process::{eventually, succeed};
use super::rig::Cluster;
use std::collections::BTreeSet;

/// Long enough for whole blocks, which are what later turns reuse.
const OPENING: &str =
    "tell me of the birds that fly without a leader over the evening town, and why none of them falls";
const SLOW: &str = "engine.timed.decode-per-step = '20ms'\n";

#[tokio::test(flavor = "multi_thread")]
async fn any_node_goes_on_with_a_conversation_that_another_began() {
    const CONVERSATIONS: usize = 60;
    let cluster = Cluster::start(3, 1, "").await;
    let mut turns = tokio::task::JoinSet::new();
    for number in 0..CONVERSATIONS {
        let (first, second) = (cluster.client(number).clone(), cluster.client(number + 1).clone());
        turns.spawn(async move {
            let name = format!("conversation {number}");
            let chat = Chat::new(&name, &format!("{number}: {OPENING}"));
            let began = first.chat(&chat).await;
            let went_on = second.chat(&chat.and_then(&began, "go on")).await;
            assert!(went_on.cached_tokens() > 0, "{name}: {went_on:?}");
            let at = |name: &str| (began.header(name).to_owned(), went_on.header(name).to_owned());
            (at("x-starling-rank"), at("x-starling-node"), at("x-starling-ingress"))
        });
    }
    let (mut ranks, mut elsewhere) = (BTreeSet::new(), 0);
    while let Some(turn) = turns.join_next().await {
        let (rank, node, ingress) = turn.unwrap();
        assert_eq!(rank.0, rank.1);
        assert_eq!(node.0, node.1);
        assert_ne!(ingress.0, ingress.1);
        ranks.insert(rank.0);
        elsewhere += usize::from(node.1 != ingress.1);
    }
    assert_eq!(ranks.len(), 3, "all ranks took part: {ranks:?}");
    // One node asked is the rank's at most, so at least one turn of each conversation crossed the mesh.
    assert!(elsewhere > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_the_blocks_of_another_node() {
    let cluster = Cluster::start(2, 1, SLOW).await;
    let held = async || {
        let metrics = cluster.client(1).metrics().await;
        (metrics.sum("starling_kv_blocks", &[("rank", "0"), ("state", "held")]), metrics)
    };
    let chat = Chat { max_tokens: 3000, rank: Some(1), ..Chat::new("a", OPENING) };
    let stream = cluster.client(0).stream(&chat).await;
    let header = |name: &str| stream.headers()[name].to_str().unwrap().to_owned();
    assert_eq!((header("x-starling-ingress"), header("x-starling-node")), ("node-0".into(), "node-1".into()));
    eventually("rank 1 holds blocks", async || match held().await {
        (blocks, _) if blocks > 0.0 => Ok(()),
        (_, metrics) => Err(format!("{metrics:?}")),
    })
    .await;
    drop(stream);
    eventually("rank 1 holds no blocks", async || match held().await {
        (0.0, _) => Ok(()),
        (_, metrics) => Err(format!("{metrics:?}")),
    })
    .await;
}

/// Waits until these nodes say that they are not ready and name the one that is lost.
async fn all_miss(cluster: &Cluster, those: &[usize], lost: &str) {
    for at in those {
        let client = cluster.client(*at);
        eventually(&format!("node-{at} misses {lost}"), async || match client.not_ready().await? {
            why if why.contains(lost) => Ok(()),
            why => Err(why),
        })
        .await;
    }
}

/// Waits until those nodes are ready, in one view of so many.
async fn all_go_on(cluster: &Cluster, those: &[usize], members: usize) {
    for at in those {
        let client = cluster.client(*at);
        eventually(&format!("node-{at} goes on with {members}"), async || {
            client.ready().await?;
            let page = client.debug("cluster").await;
            let inside =
                page["members"].as_array().map_or(0, |all| all.iter().filter(|m| m["in_view"] == true).count());
            if inside == members { Ok(()) } else { Err(page.to_string()) }
        })
        .await;
        let answer = client.chat(&Chat::new(&format!("on {at}"), OPENING)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}

const SUSPECT: &str = "cluster.suspect-after-ms = 1000\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_peer_is_left_out_and_joins_by_itself_when_it_wakes() {
    let cluster = Cluster::start(3, 1, SUSPECT).await;
    cluster.nodes[2].freeze().await;
    all_go_on(&cluster, &[0, 1], 2).await;
    cluster.nodes[2].thaw().await;
    all_go_on(&cluster, &[0, 1, 2], 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minority_admits_nothing_and_heals_by_itself() {
    let cluster = Cluster::start(3, 1, SUSPECT).await;
    for at in [1, 2] {
        cluster.nodes[at].freeze().await;
    }
    all_miss(&cluster, &[0], "node-1").await;
    let refused = cluster.client(0).chat(&Chat::new("a", OPENING)).await;
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.header("retry-after").parse::<u32>().is_ok_and(|seconds| seconds > 0), "{refused:?}");
    for at in [1, 2] {
        cluster.nodes[at].thaw().await;
    }
    all_go_on(&cluster, &[0, 1, 2], 3).await;
}

/// The text of a stream of events.
fn text_of(events: &str) -> String {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let parsed = events.filter_map(|event| serde_json::from_str::<serde_json::Value>(event).ok());
    parsed.filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_rank_is_killed_goes_on_elsewhere_without_a_lost_or_repeated_token() {
    let mut cluster = Cluster::start(3, 1, &format!("{SLOW}{SUSPECT}")).await;
    let of = |name: &'static str| Chat { max_tokens: 120, ..Chat::new(name, OPENING) };
    let undisturbed = text_of(&rest(cluster.client(0).stream(&of("undisturbed")).await).await);
    assert!(!undisturbed.is_empty());
    // One after another lands on another rank, so not all of them on the ingress' own node.
    let mut streams = Vec::new();
    for name in ["a", "b", "c"] {
        streams.push(cluster.client(0).stream(&of(name)).await);
    }
    let nodes: Vec<String> =
        streams.iter().map(|stream| stream.headers()["x-starling-node"].to_str().unwrap().to_owned()).collect();
    let lost =
        [1, 2].into_iter().find(|at| nodes.contains(&format!("node-{at}"))).unwrap_or_else(|| panic!("{nodes:?}"));
    cluster.nodes[lost].kill().await;
    for stream in streams {
        let events = rest(stream).await;
        assert!(events.ends_with("data: [DONE]\n\n"), "{events}");
        assert_eq!(text_of(&events), undisturbed);
    }
    all_go_on(&cluster, &[0, 3 - lost], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_that_is_restarted_forms_a_cluster_again() {
    let mut cluster = Cluster::start(3, 1, SUSPECT).await;
    let before = cluster.client(0).debug("cluster").await["cluster"].as_str().unwrap_or_default().to_owned();
    for at in [1, 2] {
        cluster.nodes[at].kill().await;
    }
    for at in [1, 2] {
        cluster.nodes[at].restart();
    }
    eventually("node-0 is in another cluster", async || {
        let page = cluster.client(0).debug("cluster").await;
        let id = page["cluster"].as_str().unwrap_or_default();
        if id.is_empty() || id == before { Err(page.to_string()) } else { Ok(()) }
    })
    .await;
    cluster.ready().await;
    all_go_on(&cluster, &[0, 1, 2], 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_does_not_need_the_stopped_peer_runs_to_its_end() {
    let cluster = Cluster::start(3, 1, &format!("{SLOW}{SUSPECT}")).await;
    let chat = Chat { max_tokens: 150, rank: Some(1), ..Chat::new("a", OPENING) };
    let stream = cluster.client(0).stream(&chat).await;
    cluster.nodes[2].freeze().await;
    assert!(rest(stream).await.ends_with("data: [DONE]\n\n"), "ingress and rank reach each other");
    cluster.nodes[2].thaw().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_peer_is_left_out_and_comes_back_as_another_life() {
    let mut cluster = Cluster::start(3, 1, SUSPECT).await;
    let of_peer = |page: &serde_json::Value, what: &str| page["members"][1][what].clone();
    let before = of_peer(&cluster.client(0).debug("cluster").await, "incarnation");
    assert!(!before.is_null());
    cluster.nodes[1].kill().await;
    all_go_on(&cluster, &[0, 2], 2).await;
    cluster.nodes[1].restart();
    cluster.ready().await;
    all_go_on(&cluster, &[0, 1, 2], 3).await;
    let page = cluster.client(0).debug("cluster").await;
    assert_ne!(of_peer(&page, "incarnation"), before, "{page}");
    // Ids of ranks are not given again.
    let rank = of_peer(&page, "ranks")[0].as_u64().unwrap() as u32;
    assert!(rank > 2, "{page}");
    for at in 0..3 {
        let chat = Chat { rank: Some(rank), ..Chat::new("b", OPENING) };
        let answer = cluster.client(at).chat(&chat).await;
        assert_eq!((answer.status, answer.header("x-starling-node")), (200, "node-1"), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_lists_every_member_with_its_ranks() {
    let cluster = Cluster::start(2, 2, "").await;
    let shown = succeed(["nodes", "--admin", &cluster.client(1).admin]).await;
    let rows: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][0], "cluster", "{shown}");
    assert_eq!(rows[1], ["led", "by", "node-0"], "{shown}");
    let members = rows[3..].iter().map(|row| (row[0], row[1], row[row.len() - 1]));
    assert_eq!(members.collect::<Vec<_>>(), [("node-0", "up", "0,1"), ("node-1", "up", "2,3")], "{shown}");
    cluster.nodes[0].freeze().await;
    eventually("node-0 is suspected or down", async || {
        let shown = succeed(["nodes", "--admin", &cluster.client(1).admin]).await;
        let state = shown.lines().find_map(|line| line.strip_prefix("node-0")).unwrap_or_default();
        if state.trim_start().starts_with("up") { Err(shown) } else { Ok(()) }
    })
    .await;
    cluster.nodes[0].thaw().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_with_other_settings_is_refused_by_name_and_nobody_serves() {
    let cluster = Cluster::launch(&["", "", "placement.load-weight = 0.75\n"], 1).await;
    all_miss(&cluster, &[0, 1], "node-2").await;
    eventually("node-2 misses the others", async || cluster.client(2).not_ready().await).await;
    for at in 0..3 {
        eventually("the refusal is in the log", async || {
            let log = cluster.nodes[at].log();
            let told = log.lines().any(|line| line.contains("refused") && line.contains("settings"));
            if told { Ok(()) } else { Err(log) }
        })
        .await;
        assert_eq!(cluster.client(at).chat(&Chat::new("a", OPENING)).await.status, 503);
    }
}
