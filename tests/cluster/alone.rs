//! The harness itself, and what holds of a node whether or not it has others to meet.

use super::client::Chat;
use super::process::eventually;
use super::rig::Cluster;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_is_gone_and_comes_back_as_it_was() {
    let mut cluster = Cluster::apart(2, "").await;
    let before = cluster.client(1).clone();
    cluster.nodes[1].kill().await;
    eventually("its listeners are gone", async || before.gone().await).await;
    assert_eq!(cluster.client(0).ready().await, Ok(()), "the other does not care");
    cluster.nodes[1].restart();
    cluster.ready().await;
    let answer = cluster.client(1).chat(&Chat::new("a", "hello")).await;
    assert_eq!((answer.status, answer.header("x-starling-node")), (200, "node-1"));
    assert_eq!(cluster.nodes[1].terminate().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_answers_once_it_is_thawed() {
    let cluster = Cluster::apart(1, "").await;
    cluster.nodes[0].freeze().await;
    let client = cluster.client(0).clone();
    let answer = tokio::spawn(async move { client.chat(&Chat::new("a", "hello")).await });
    cluster.nodes[0].thaw().await;
    assert_eq!(answer.await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_held_while_a_stream_is_open_and_free_when_its_client_has_left() {
    let cluster = Cluster::apart(1, "engine.timed.decode-per-step = '20ms'\n").await;
    let client = cluster.client(0);
    let stream = client.stream(&Chat { max_tokens: 2000, ..Chat::new("a", "on and on") }).await;
    let held = async || match client.metrics().await.sum("starling_kv_blocks", &[("state", "held")]) {
        blocks if blocks > 0.0 => Ok(()),
        blocks => Err(format!("{blocks} blocks are held")),
    };
    eventually("blocks are held", held).await;
    drop(stream);
    eventually("no block is held", async || held().await.map_or_else(|_| Ok(()), |()| Err("blocks are held".into())))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_with_certificates_of_one_authority_all_become_ready() {
    let cluster = Cluster::start(3, 2, "cluster.suspect-after-ms = 5000\nengine.timed.decode-per-step = '1ms'\n").await;
    for at in 0..3 {
        let answer = cluster.client(at).chat(&Chat::new("a", "hello")).await;
        assert_eq!((answer.status, answer.header("x-starling-ingress")), (200, format!("node-{at}").as_str()));
    }
}
