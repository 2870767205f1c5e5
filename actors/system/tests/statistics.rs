//! What is measured and reported.

mod support;

use starling_actors::{ActorKind, ActorState, AttributeValue, Backoff, Hook, Node, SpanRecord};
use starling_actors::{SendError, Strategy, SupervisorSpec, TraceContext};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use support::{Log, Order, PATIENCE, TRACE, count, pass, probe, stats, until};

#[derive(Default)]
struct Recorder {
    timed: Mutex<Vec<(String, &'static str)>>,
    spans: Mutex<Vec<SpanRecord>>,
    events: Mutex<Vec<String>>,
}

impl Hook for Recorder {
    fn handled(&self, actor: &str, kind: &'static str, seconds: f64) {
        assert!(seconds >= 0.0);
        self.timed.lock().unwrap().push((actor.to_owned(), kind));
    }

    fn span(&self, span: SpanRecord) {
        self.spans.lock().unwrap().push(span);
    }

    fn restarted(&self, actor: &str) {
        self.events.lock().unwrap().push(format!("{actor} restarted"));
    }

    fn failed(&self, actor: &str) {
        self.events.lock().unwrap().push(format!("{actor} failed"));
    }
}

#[tokio::test]
async fn the_tree_is_listed_parents_first_with_states_and_counts() {
    let (node, log) = (Node::new("n"), Log::new());
    let inner = SupervisorSpec::new("rank-0", Strategy::OneForAll)
        .backoff(Backoff::NONE)
        .child(probe("rank-0/kv", &log).mailbox_messages_max(8))
        .child(probe("rank-0/gpu", &log));
    let spec = SupervisorSpec::new("node", Strategy::RestForOne)
        .child(probe("queue", &log))
        .child(inner)
        .child(probe("ingress", &log));
    node.start(spec).await.unwrap();
    node.start(SupervisorSpec::new("mesh", Strategy::OneForOne)).await.unwrap();
    let kv = node.address::<Order>("rank-0/kv");
    kv.tell(TRACE, Order::Note(1)).unwrap();
    count(&kv).await;
    node.inject_panic("rank-0/gpu").unwrap();
    until("the rank is back", || stats(&node, "rank-0/gpu").restarts == 1).await;

    let actors = node.actors();
    let lines: Vec<(&str, u32, ActorKind)> =
        actors.iter().map(|actor| (&*actor.name, actor.level, actor.kind)).collect();
    let expected = [
        ("node", 0, ActorKind::Supervisor),
        ("queue", 1, ActorKind::Actor),
        ("rank-0", 1, ActorKind::Supervisor),
        ("rank-0/kv", 2, ActorKind::Actor),
        ("rank-0/gpu", 2, ActorKind::Actor),
        ("ingress", 1, ActorKind::Actor),
        ("mesh", 0, ActorKind::Supervisor),
    ];
    assert_eq!(lines, expected);
    assert!(actors.iter().all(|actor| actor.state == ActorState::Running));
    let kv = stats(&node, "rank-0/kv");
    assert_eq!((kv.handled, kv.restarts, kv.failures), (2, 1, 0));
    assert_eq!((kv.depth, kv.mailbox_messages_max), (0, Some(8)));
    let gpu = stats(&node, "rank-0/gpu");
    assert_eq!((gpu.handled, gpu.restarts, gpu.failures), (0, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn uptime_counts_from_the_last_start_and_is_zero_between_lives() {
    let (node, log) = (Node::new("n"), Log::new());
    let wait = Duration::from_secs(8);
    let spec = SupervisorSpec::new("s", Strategy::OneForOne)
        .backoff(Backoff { first: wait, max: wait })
        .child(probe("a", &log));
    node.start(spec).await.unwrap();
    pass(Duration::from_secs(100)).await;
    assert!(stats(&node, "a").uptime >= Duration::from_secs(100));
    node.inject_panic("a").unwrap();
    until("it waits", || stats(&node, "a").state == ActorState::Restarting).await;
    assert_eq!(stats(&node, "a").uptime, Duration::ZERO);
    assert!(matches!(node.inject_panic("a"), Err(SendError::NotRunning { .. })));
    log.expect(&["a started", "a dropped", "a started"]).await;
    assert!(stats(&node, "a").uptime < Duration::from_secs(100));
    assert!(stats(&node, "s").uptime > Duration::from_secs(100));
}

#[tokio::test]
async fn one_message_in_64_is_timed_by_kind() {
    let (recorder, log) = (Arc::new(Recorder::default()), Log::new());
    let node = Node::with_hook("n", recorder.clone());
    let spec = SupervisorSpec::new("s", Strategy::OneForOne).child(probe("a", &log));
    node.start(spec).await.unwrap();
    let address = node.address::<Order>("a");
    for note in 0..128 {
        address.tell(TRACE, Order::Note(note)).unwrap();
    }
    // The 129th.
    count(&address).await;
    until("it is timed", || recorder.timed.lock().unwrap().len() == 3).await;
    let timed: Vec<&str> = recorder.timed.lock().unwrap().iter().map(|(_, kind)| *kind).collect();
    assert_eq!(timed, ["note", "note", "other"]);
    assert!(recorder.timed.lock().unwrap().iter().all(|(actor, _)| actor == "a"));
}

#[tokio::test]
async fn failures_and_restarts_are_reported_once_each() {
    let (recorder, log) = (Arc::new(Recorder::default()), Log::new());
    let node = Node::with_hook("n", recorder.clone());
    let spec = SupervisorSpec::new("s", Strategy::OneForAll)
        .backoff(Backoff::NONE)
        .child(probe("a", &log))
        .child(probe("b", &log));
    node.start(spec).await.unwrap();
    node.address::<Order>("b").tell(TRACE, Order::Fail).unwrap();
    until("all are back", || stats(&node, "b").restarts == 1).await;
    node.stop(PATIENCE).await;
    let events = recorder.events.lock().unwrap().clone();
    assert_eq!(events, ["b failed", "a restarted", "b restarted"]);
}

#[tokio::test]
async fn spans_are_reported_under_a_sampled_trace_only() {
    let recorder = Arc::new(Recorder::default());
    let node = Node::with_hook("n", recorder.clone());
    let span = |flags| SpanRecord {
        parent: TraceContext { trace_id: 1, span_id: 2, flags },
        span_id: None,
        name: "kv.reserve",
        start: SystemTime::UNIX_EPOCH,
        end: SystemTime::UNIX_EPOCH + Duration::from_millis(3),
        attributes: vec![("blocks", AttributeValue::from(12u32))],
    };
    node.span(span(0));
    node.span(span(1));
    assert_eq!(*recorder.spans.lock().unwrap(), [span(1)]);
}

#[tokio::test]
async fn an_injected_panic_comes_after_the_messages_before_it() {
    let (node, log) = (Node::new("n"), Log::new());
    let a = support::probes("a", &log);
    let handled = a.handled.clone();
    let spec = SupervisorSpec::new("s", Strategy::OneForOne).backoff(Backoff::NONE).child(a.spec);
    node.start(spec).await.unwrap();
    let address = node.address::<Order>("a");
    address.tell(TRACE, Order::Note(1)).unwrap();
    node.inject_panic("a").unwrap();
    address.tell(TRACE, Order::Note(2)).unwrap();
    log.expect(&["a started", "a dropped", "a started"]).await;
    assert_eq!(count(&address).await, 0);
    assert_eq!(*handled.lock().unwrap(), [1], "what waited behind it is lost");
}
