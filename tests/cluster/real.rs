//! The real model, computed on the CPU: what a node answers does not depend on which nodes took part.

use super::client::{Answer, Chat};
use super::rig::Cluster;
use std::path::PathBuf;

const OPENING: &str = "In one sentence: why do starlings fly together in the evening, and who leads them on their way?";

/// The first and the second turn of one conversation, asked of these nodes.
async fn turns(cluster: &Cluster, asked: [usize; 2]) -> [Answer; 2] {
    let chat = Chat::new("birds", OPENING);
    let first = cluster.client(asked[0]).chat(&chat).await;
    let second = cluster.client(asked[1]).chat(&chat.and_then(&first, "And what do they eat?")).await;
    assert_eq!(first.header("x-starling-rank"), second.header("x-starling-rank"));
    assert!(second.cached_tokens() > 0, "{second:?}");
    [first, second]
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_answer_as_one_does() {
    let Some(model) = std::env::var_os("STARLING_MODEL").map(PathBuf::from) else {
        eprintln!("SKIPPED: STARLING_MODEL names no model file");
        return;
    };
    let more = "engine.threads = 1\nengine.context-tokens-max = 512\n";
    let alone = turns(&Cluster::computing(1, &model, more).await, [0, 0]).await;
    let together = turns(&Cluster::computing(2, &model, more).await, [0, 1]).await;
    let ingresses = together.each_ref().map(|answer| answer.header("x-starling-ingress").to_owned());
    assert_eq!(ingresses, ["node-0", "node-1"]);
    assert!(!alone[0].text().is_empty());
    assert_eq!(together.each_ref().map(Answer::text), alone.each_ref().map(Answer::text));
}
