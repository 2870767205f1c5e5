//! Choices and what is told of their tokens, asked of one node and computed on another.

use super::client::{Answer, Chat};
use super::process::eventually;
use super::rig::{self, Cluster};
use serde_json::{Value, json};
use tempfile::TempDir;

const OPENING: &str = "tell me of the birds that fly over the evening town";

fn choices(answer: &Answer) -> &Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.body["choices"].as_array().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_penalties_and_logprobs_cross_nodes_and_change_nothing() {
    let folder = TempDir::new().unwrap();
    let cluster = Cluster::computing(2, &rig::model(folder.path()), "engine.threads = 1\n").await;
    let with = json!({ "n": 3, "temperature": 1.5, "seed": 11, "logprobs": true, "top_logprobs": 3, "min_p": 0.001,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "logit_bias": { "70": -5 },
        "ignore_eos": true });
    let chat = Chat { with: with.clone(), max_tokens: 12, rank: Some(1), ..Chat::new("birds", OPENING) };
    let far = cluster.client(0).chat(&chat).await;
    assert_eq!((far.header("x-starling-ingress"), far.header("x-starling-node")), ("node-0", "node-1"));
    // On the ranks of other nodes, and with the prefix in place or not.
    let near = cluster.client(1).chat(&chat).await;
    let other = cluster.client(1).chat(&Chat { rank: Some(0), conversation: "elsewhere", ..chat.clone() }).await;
    assert_eq!(other.header("x-starling-node"), "node-0");
    assert_eq!((choices(&far), choices(&far)), (choices(&near), choices(&other)));

    let told = choices(&far);
    assert_eq!(told.len(), 3);
    assert!(told[0]["message"] != told[1]["message"] && told[1]["message"] != told[2]["message"], "{told:?}");
    for choice in told {
        let content = choice["logprobs"]["content"].as_array().unwrap();
        assert!(!content.is_empty() && content.len() <= 12, "{choice}");
        for token in content {
            let top = token["top_logprobs"].as_array().unwrap();
            let logprobs: Vec<f64> = top.iter().map(|token| token["logprob"].as_f64().unwrap()).collect();
            assert!(logprobs.len() == 3 && logprobs.is_sorted_by(|a, b| a >= b), "{token}");
            assert!(token["logprob"].as_f64().unwrap() <= logprobs[0], "none is more probable than the first: {token}");
        }
    }
    // The first is what it is alone.
    let mut alone = with;
    alone["n"] = json!(1);
    let alone = cluster.client(1).chat(&Chat { with: alone, ..chat }).await;
    assert_eq!(choices(&alone)[..], told[..1]);
    assert!(far.body["usage"]["prompt_tokens"] == alone.body["usage"]["prompt_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_change_no_answer_and_are_counted() {
    let folder = TempDir::new().unwrap();
    let model = rig::model(folder.path());
    // Held to three tokens, even a model of random weights repeats itself.
    let with = json!({ "n": 2, "temperature": 0.9, "seed": 3, "logprobs": true, "frequency_penalty": 0.1,
        "logit_bias": { "70": 60, "71": 60, "72": 60 }, "ignore_eos": true });
    let chat = Chat { with, max_tokens: 60, rank: Some(1), ..Chat::new("birds", OPENING) };
    let mut told = Vec::new();
    for drafts in [0, 4] {
        let more = format!("engine.threads = 1\nengine.draft-tokens-max = {drafts}\n");
        let cluster = Cluster::computing(2, &model, &more).await;
        let answer = cluster.client(0).chat(&chat).await;
        assert_eq!(answer.header("x-starling-node"), "node-1");
        told.push(choices(&answer).clone());
        if drafts > 0 {
            eventually("node-1 tells of its drafts", async || {
                let metrics = cluster.client(1).metrics().await;
                let count = |name| metrics.sum(name, &[("rank", "0")]);
                let [all, right] = ["starling_draft_tokens_total", "starling_draft_accepted_tokens_total"].map(count);
                if 0.0 < right && right < all { Ok(()) } else { Err(format!("{right} of {all}")) }
            })
            .await;
        }
    }
    assert_eq!(told[0], told[1]);
}
