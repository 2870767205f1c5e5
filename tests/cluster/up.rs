//! `starling up` with several nodes: what it prints, and that nothing outlives it.

use super::client::{Chat, Client, rest};
use super::process::{Process, command, eventually, send, send_to};
use super::rig::model;
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

/// `starling up`, with a folder of its own for temporary files.
struct Up {
    process: Process,
    folder: TempDir,
}

impl Up {
    fn start(more: &[&str]) -> Self {
        Self::with(more, &[])
    }

    fn with(more: &[&str], variables: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().unwrap();
        let model = model(folder.path());
        let arguments = ["up", "--json", "--engine", "timed", "--model", model.to_str().unwrap()];
        let mut command = command(arguments.iter().chain(more));
        let scratch = folder.path().join("scratch");
        std::fs::create_dir(&scratch).unwrap();
        command.env("TMPDIR", &scratch).env("STARLING__ENGINE__TIMED__DECODE_PER_STEP", "10ms");
        command.env("STARLING__ENGINE__KV_MEMORY", "16MiB").envs(variables.iter().copied());
        // A terminal would give it a group of its own.
        command.process_group(0);
        let process = Process::start("up", command, &folder.path().join("up.log"));
        Self { process, folder }
    }

    /// The nodes of the `ready` line.
    async fn ready(&mut self) -> Vec<Value> {
        let event = self.process.event().await;
        assert_eq!(event["event"], "ready", "{event}");
        event["nodes"].as_array().unwrap().clone()
    }

    /// As Ctrl-C does: the terminal signals the whole group.
    async fn interrupt(&self) {
        send_to("INT", &format!("-{}", self.process.pid())).await;
    }

    /// What is left in the folder for temporary files.
    fn left(&self) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(self.folder.path().join("scratch")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

async fn all_gone(nodes: &[Value]) {
    for node in nodes {
        let client = Client::new(node);
        eventually(&format!("{} is gone", node["id"]), async || client.gone().await).await;
    }
}

fn pid(node: &Value) -> u32 {
    u32::try_from(node["pid"].as_u64().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_turn_asks_the_next_node_and_nothing_is_left_behind() {
    let mut up = Up::start(&["--nodes", "3", "--demo-only"]);
    let nodes = up.ready().await;
    let ids: Vec<&str> = nodes.iter().map(|node| node["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["node-0", "node-1", "node-2"]);
    for (at, node) in nodes.iter().enumerate() {
        assert_ne!(pid(node), up.process.pid());
        assert!(nodes[..at].iter().all(|other| other["api"] != node["api"] && other["pid"] != node["pid"]));
    }
    for (turn, asked) in ids.iter().enumerate() {
        let event = up.process.event().await;
        assert_eq!(
            (&event["event"], &event["turn"], &event["node"]),
            (&"turn".into(), &(turn + 1).into(), &(*asked).into())
        );
        for number in ["rank", "prompt_tokens", "cached_tokens", "ttft_ms"] {
            assert!(event[number].is_number(), "{number} in {event}");
        }
    }
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
    all_gone(&nodes).await;
    assert!(up.left().is_empty(), "{:?}", up.left());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_drains_every_node() {
    let mut up = Up::start(&["--nodes", "2", "--quiet"]);
    let nodes = up.ready().await;
    let client = Client::new(&nodes[1]);
    let stream = client.stream(&Chat { max_tokens: 100, ..Chat::new("a", "on and on") }).await;
    up.interrupt().await;
    assert!(rest(stream).await.ends_with("data: [DONE]\n\n"), "the open stream ends in its own way");
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
    all_gone(&nodes).await;
    assert!(up.left().is_empty(), "{:?}", up.left());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_interrupt_ends_every_node_at_once() {
    let mut up = Up::start(&["--nodes", "2", "--quiet"]);
    let nodes = up.ready().await;
    let client = Client::new(&nodes[0]);
    let stream = client.stream(&Chat { max_tokens: 3900, ..Chat::new("a", "on and on") }).await;
    up.interrupt().await;
    eventually("draining", async || client.not_ready().await).await;
    up.interrupt().await;
    assert_eq!(up.process.ended().await.code(), Some(130), "{}", up.process.log());
    all_gone(&nodes).await;
    assert!(!rest(stream).await.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_node_outlives_a_parent_that_is_killed() {
    let mut up = Up::start(&["--nodes", "2", "--quiet"]);
    let nodes = up.ready().await;
    up.process.signal("KILL").await;
    up.process.ended().await;
    all_gone(&nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_is_named_with_the_end_of_its_log() {
    let mut up = Up::start(&["--nodes", "3", "--log", "info"]);
    let nodes = up.ready().await;
    for _ in 0..3 {
        up.process.event().await;
    }
    send("KILL", pid(&nodes[1])).await;
    assert_eq!(up.process.ended().await.code(), Some(1));
    let log = up.process.log();
    let told = log.split_once("error: node-1 ended (signal: 9").unwrap_or_else(|| panic!("{log}")).1;
    let shown = |line: &str| line.starts_with("  | ") && line.contains("ready");
    assert!(told.lines().any(shown), "its log is shown: {log}");
    all_gone(&nodes).await;
    assert!(up.left().is_empty(), "{:?}", up.left());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_in_the_conversation_is_named_and_not_only_its_stream() {
    let mut up = Up::start(&["--nodes", "2"]);
    let nodes = up.ready().await;
    send("KILL", pid(&nodes[0])).await;
    assert_eq!(up.process.ended().await.code(), Some(1));
    let log = up.process.log();
    assert!(log.contains("error: node-0 ended (signal: 9"), "{log}");
    all_gone(&nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quietly_served_the_others_go_on_without_it() {
    let mut up = Up::start(&["--nodes", "3", "--quiet"]);
    let nodes = up.ready().await;
    send("KILL", pid(&nodes[2])).await;
    eventually("node-2 is named", async || {
        let log = up.process.log();
        if log.contains("error: node-2 ended (signal: 9") { Ok(()) } else { Err(log) }
    })
    .await;
    for node in &nodes[..2] {
        assert_eq!(Client::new(node).admin("/livez").await.unwrap().0, 200);
    }
    assert!(up.process.runs());
    up.process.signal("TERM").await;
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
    all_gone(&nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_kept_where_it_says() {
    let mut up = Up::start(&["--nodes", "2", "--demo-only", "--keep-logs", "--log", "info"]);
    up.ready().await;
    for _ in 0..3 {
        up.process.event().await;
    }
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
    let log = up.process.log();
    let folder = log.lines().find_map(|line| line.strip_prefix("logs are kept in ")).unwrap_or_else(|| panic!("{log}"));
    for node in ["node-0", "node-1"] {
        let log = std::fs::read_to_string(Path::new(folder).join(format!("{node}.log"))).unwrap();
        assert!(log.contains("draining"), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bearer_keys_reach_the_nodes_and_no_file() {
    const KEY: &str = "sk-of-this-test";
    let mut up = Up::with(&["--nodes", "2", "--keep-logs"], &[("STARLING__API__KEYS", KEY)]);
    let nodes = up.ready().await;
    for _ in 0..3 {
        assert_eq!(up.process.event().await["event"], "turn", "the conversation has the key");
    }
    for node in &nodes {
        assert_eq!(Client::new(node).chat(&Chat::new("a", "hello")).await.status, 401);
    }
    up.interrupt().await;
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
    let files = std::fs::read_dir(&up.left()[0]).unwrap().map(|file| file.unwrap().path());
    let holding: Vec<_> = files.filter(|file| std::fs::read_to_string(file).unwrap().contains(KEY)).collect();
    assert!(holding.is_empty(), "{holding:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_conversation_stays_on_one_rank_whichever_node_is_asked() {
    let mut up = Up::start(&["--nodes", "3", "--demo-only"]);
    up.ready().await;
    let turns = [up.process.event().await, up.process.event().await, up.process.event().await];
    let number = |turn: &Value, name: &str| turn[name].as_u64().unwrap_or_else(|| panic!("{name} in {turn}"));
    let cached = turns.each_ref().map(|turn| number(turn, "cached_tokens"));
    assert!(cached[0] < cached[1] && cached[1] < cached[2], "{cached:?}");
    let ranks = turns.each_ref().map(|turn| number(turn, "rank"));
    assert_eq!(ranks, [ranks[0]; 3]);
    // Ranks are counted in the order of the nodes, one each here.
    for turn in &turns {
        let node = format!("node-{}", ranks[0]);
        let elsewhere = turn.get("rank_node").and_then(Value::as_str);
        assert_eq!(elsewhere.or(turn["node"].as_str()), Some(node.as_str()), "{turn}");
    }
    assert_eq!(up.process.ended().await.code(), Some(0), "{}", up.process.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_keeps_a_node_from_starting_is_told_in_its_words() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let mut up = Up::start(&["--nodes", "2", "--quiet", "--port", &port]);
    assert_eq!(up.process.ended().await.code(), Some(1));
    let log = up.process.log();
    assert!(log.contains(" ended (exit status: 1)") && log.contains("cannot listen at 127.0.0.1:"), "{log}");
    assert!(up.left().is_empty(), "{:?}", up.left());

    // In exact arithmetic KV takes twice as much.
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("exact.toml");
    std::fs::write(&config, "engine.arithmetic = 'exact'").unwrap();
    let mut up = Up::start(&["--nodes", "2", "--kv-memory", "1MiB", "--config", config.to_str().unwrap()]);
    assert_eq!(up.process.ended().await.code(), Some(4), "the exit code is the node's: {}", up.process.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn members_are_not_for_up() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("a.toml");
    std::fs::write(&config, "cluster.members = ['node-0=127.0.0.1:9']").unwrap();
    let mut up = Up::start(&["--nodes", "2", "--config", config.to_str().unwrap()]);
    assert_eq!(up.process.ended().await.code(), Some(3));
    assert!(up.process.log().contains("cluster.members: up makes the members itself"), "{}", up.process.log());
}
