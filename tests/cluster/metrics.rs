//! What a scrape of one node tells of the others.

use super::client::Chat;
use super::process::eventually;
use super::rig::Cluster;

#[tokio::test(flavor = "multi_thread")]
async fn a_scrape_tells_of_links_rounds_and_a_standstill() {
    let cluster = Cluster::start(3, 1, "cluster.suspect-after-ms = 1000\n").await;
    let client = cluster.client(0);
    let chat = Chat { rank: Some(1), ..Chat::new("a", "hello") };
    assert_eq!(client.chat(&chat).await.header("x-starling-node"), "node-1");
    // A scrape may fall between a round's time and the waits in it.
    let metrics = eventually("each round is counted once, with a wait for each member", async || {
        let metrics = client.metrics().await;
        let rounds = metrics.sum("starling_round_seconds_count", &[]);
        let waits = |peer| metrics.sum("starling_round_wait_seconds_count", &[("member", peer)]);
        if waits("node-1") == rounds && waits("node-2") == rounds { Ok(metrics) } else { Err(format!("{metrics:?}")) }
    })
    .await;
    assert!(metrics.sum("starling_view_epoch", &[]) >= 1.0);
    assert_eq!(metrics.sum("starling_standstill_seconds", &[]), 0.0);
    assert!(metrics.sum("starling_round_seconds_count", &[]) > 0.0);
    for peer in ["node-1", "node-2"] {
        let of = |name: &str| metrics.sum(name, &[("peer", peer)]);
        assert_eq!((of("starling_link_up"), of("starling_link_dropped_messages_total")), (1.0, 0.0), "{metrics:?}");
        for direction in ["in", "out"] {
            let passed = |name: &str| metrics.sum(name, &[("peer", peer), ("direction", direction)]);
            let (frames, bytes) = (passed("starling_link_frames_total"), passed("starling_link_bytes_total"));
            assert!(frames > 0.0 && bytes > frames, "{peer} {direction}: {frames} frames, {bytes} bytes");
        }
    }

    cluster.nodes[2].freeze().await;
    eventually("a standstill is measured", async || match client.metrics().await {
        metrics if metrics.sum("starling_standstill_seconds", &[]) >= 1.0 => Ok(()),
        metrics => Err(format!("{metrics:?}")),
    })
    .await;
    cluster.nodes[2].thaw().await;
    eventually("the wait for node-2 is measured and over", async || {
        let metrics = client.metrics().await;
        let waited = metrics.sum("starling_round_wait_seconds_sum", &[("member", "node-2")]);
        let still = metrics.sum("starling_standstill_seconds", &[]);
        if waited >= 1.0 && still == 0.0 { Ok(()) } else { Err(format!("{metrics:?}")) }
    })
    .await;
}
