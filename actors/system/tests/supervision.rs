//! Who is restarted, when, in which order, and what happens when restarts do not help.

mod support;

use starling_actors::{ActorState, Backoff, Node, Restart, StartError, StopOutcome, Strategy};
use starling_actors::{SupervisorSpec, TreeExit};
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{Log, Order, PATIENCE, TRACE, apart, count, pass, probe, probes, stats, until};
use tokio::time::Instant;

/// Three children that restart at once.
fn abc(strategy: Strategy, log: &Log) -> SupervisorSpec {
    SupervisorSpec::new("s", strategy)
        .backoff(Backoff::NONE)
        .child(probe("a", log))
        .child(probe("b", log))
        .child(probe("c", log))
}

const ABC_STARTED: [&str; 3] = ["a started", "b started", "c started"];

/// Starts `abc`, makes b fail by `order`, and returns the names that were restarted, in order.
async fn restarted_with_b(strategy: Strategy, order: Order) -> Vec<String> {
    let (node, log, restarts) = (Node::new("n"), Log::new(), Log::new());
    let done = restarts.clone();
    let spec = abc(strategy, &log).on_restart(move |name, number| {
        assert_eq!(number, 1);
        done.write(name.to_owned());
    });
    node.start(spec).await.unwrap();
    log.expect(&ABC_STARTED).await;
    node.address::<Order>("b").tell(TRACE, order).unwrap();
    let mut names = vec![restarts.next().await];
    // All of a group are reported in one go.
    names.extend(restarts.rest().await);
    let lines = log.rest().await;
    let position = |line: String| lines.iter().position(|other| *other == line);
    for name in &names {
        let (dropped, started) = (format!("{name} dropped"), format!("{name} started"));
        assert!(position(dropped).unwrap() < position(started).unwrap(), "{lines:?}");
        assert_eq!(count(&node.address::<Order>(name)).await, 0);
    }
    let started = lines.iter().filter(|line| line.ends_with("started"));
    assert_eq!(started.count(), names.len(), "{lines:?}");
    node.stop(PATIENCE).await;
    names
}

#[tokio::test]
async fn one_for_one_restarts_the_failed_child_alone() {
    assert_eq!(restarted_with_b(Strategy::OneForOne, Order::Panic).await, ["b"]);
    assert_eq!(restarted_with_b(Strategy::OneForOne, Order::Fail).await, ["b"]);
}

#[tokio::test]
async fn one_for_all_restarts_every_child() {
    let names = restarted_with_b(Strategy::OneForAll, Order::Panic).await;
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn rest_for_one_restarts_the_failed_child_and_those_after_it() {
    let names = restarted_with_b(Strategy::RestForOne, Order::Panic).await;
    assert_eq!(names, ["b", "c"]);
}

#[tokio::test]
async fn a_group_stops_in_reverse_and_starts_in_order() {
    let (node, log) = (Node::new("n"), Log::new());
    node.start(abc(Strategy::OneForAll, &log)).await.unwrap();
    log.expect(&ABC_STARTED).await;
    node.address::<Order>("b").tell(TRACE, Order::Panic).unwrap();
    log.expect(&["b dropped", "c stopped", "c dropped", "a stopped", "a dropped"]).await;
    log.expect(&ABC_STARTED).await;
}

#[tokio::test]
async fn a_permanent_actor_returns_after_an_orderly_end_a_temporary_one_never() {
    let (node, log) = (Node::new("n"), Log::new());
    let spec = SupervisorSpec::new("s", Strategy::OneForOne)
        .backoff(Backoff::NONE)
        .child(probe("permanent", &log))
        .child(probe("temporary", &log).restart(Restart::Temporary))
        .child(probe("transient", &log).restart(Restart::Transient));
    node.start(spec).await.unwrap();
    let tell = |name: &str, order| node.address::<Order>(name).tell(TRACE, order).unwrap();
    log.expect(&["permanent started", "temporary started", "transient started"]).await;
    tell("permanent", Order::Stop);
    log.expect(&["permanent stopped", "permanent dropped", "permanent started"]).await;
    tell("transient", Order::Panic);
    log.expect(&["transient dropped", "transient started"]).await;
    tell("temporary", Order::Panic);
    log.expect(&["temporary dropped"]).await;
    let failed = || stats(&node, "temporary").state == ActorState::Failed;
    until("the temporary one is given up", failed).await;
    let outcome = node.stop(PATIENCE).await;
    assert_eq!(outcome, StopOutcome::Drained);
    let rest = log.rest().await;
    assert!(!rest.contains(&"temporary started".to_owned()), "{rest:?}");
}

#[tokio::test]
async fn a_group_restart_leaves_temporary_children_ended() {
    let (node, log, restarts) = (Node::new("n"), Log::new(), Log::new());
    let done = restarts.clone();
    let spec = abc(Strategy::OneForAll, &log)
        .child(probe("t", &log).restart(Restart::Temporary))
        .on_restart(move |name, _| done.write(name.to_owned()));
    node.start(spec).await.unwrap();
    node.address::<Order>("a").tell(TRACE, Order::Panic).unwrap();
    restarts.expect(&["a", "b", "c"]).await;
    assert_eq!(stats(&node, "t").state, ActorState::Stopped);
    assert!(!node.address::<Order>("t").is_running());
}

#[tokio::test(start_paused = true)]
async fn restarts_wait_longer_each_time_up_to_the_cap() {
    let (node, log) = (Node::new("n"), Log::new());
    let backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(4) };
    let spec = SupervisorSpec::new("s", Strategy::OneForOne)
        .backoff(backoff)
        .intensity(10, Duration::from_secs(600))
        .child(probe("a", &log));
    node.start(spec).await.unwrap();
    log.expect(&["a started"]).await;
    for (failure, full_s) in [1, 2, 4, 4, 4].into_iter().enumerate() {
        let failed_at = Instant::now();
        node.address::<Order>("a").tell(TRACE, Order::Panic).unwrap();
        log.expect(&["a dropped", "a started"]).await;
        let waited = failed_at.elapsed();
        let full = Duration::from_secs(full_s);
        // Timers have a resolution of a millisecond.
        let latest = full + Duration::from_millis(2);
        assert!(waited >= full * 3 / 4 && waited <= latest, "{failure}: {waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_outside_the_window_are_forgotten() {
    let (node, log) = (Node::new("n"), Log::new());
    let window = Duration::from_secs(10);
    let spec = SupervisorSpec::new("s", Strategy::OneForOne)
        .backoff(Backoff::NONE)
        .intensity(1, window)
        .child(probe("a", &log));
    node.start(spec).await.unwrap();
    log.expect(&["a started"]).await;
    for _ in 0..5 {
        node.address::<Order>("a").tell(TRACE, Order::Panic).unwrap();
        log.expect(&["a dropped", "a started"]).await;
        pass(window + Duration::from_millis(1)).await;
    }
    assert_eq!(stats(&node, "a").restarts, 5);
}

#[tokio::test]
async fn a_root_that_gives_up_stops_its_children_and_says_why() {
    let (node, log) = (Node::new("n"), Log::new());
    let spec = abc(Strategy::OneForOne, &log).intensity(2, PATIENCE);
    let tree = node.start(spec).await.unwrap();
    log.expect(&ABC_STARTED).await;
    for _ in 0..2 {
        node.address::<Order>("b").tell(TRACE, Order::Panic).unwrap();
        log.expect(&["b dropped", "b started"]).await;
    }
    node.address::<Order>("b").tell(TRACE, Order::Panic).unwrap();
    log.expect(&["b dropped", "c stopped", "c dropped", "a stopped", "a dropped"]).await;
    match tree.exited().await {
        TreeExit::Failed { reason } => {
            assert_eq!(reason, "gave up: more than 2 restarts within 60s, last \"b\" panicked: told to")
        }
        other => panic!("{other:?}"),
    }
    assert!(node.actors().is_empty());
    // Its names are free again.
    node.start(abc(Strategy::OneForOne, &log)).await.unwrap();
}

#[tokio::test]
async fn a_nested_supervisor_that_gives_up_is_restarted_by_its_own() {
    let (node, log) = (Node::new("n"), Log::new());
    let inner = SupervisorSpec::new("inner", Strategy::OneForOne)
        .backoff(Backoff::NONE)
        .intensity(1, PATIENCE)
        .child(probe("x", &log))
        .child(probe("y", &log));
    let outer = SupervisorSpec::new("outer", Strategy::RestForOne)
        .backoff(Backoff::NONE)
        .child(probe("before", &log))
        .child(inner)
        .child(probe("after", &log));
    node.start(outer).await.unwrap();
    log.expect(&["before started", "x started", "y started", "after started"]).await;
    let panic_x = || node.address::<Order>("x").tell(TRACE, Order::Panic).unwrap();
    panic_x();
    log.expect(&["x dropped", "x started"]).await;
    panic_x();
    log.expect(&["x dropped", "y stopped", "y dropped"]).await;
    log.expect(&["after stopped", "after dropped"]).await;
    log.expect(&["x started", "y started", "after started"]).await;
    assert_eq!(count(&node.address::<Order>("x")).await, 0);
    until("it is reported", || stats(&node, "inner").restarts == 1).await;
    assert_eq!(stats(&node, "before").restarts, 0);
    assert_eq!(stats(&node, "x").failures, 2);
    // The inner supervisor starts to count anew.
    panic_x();
    log.expect(&["x dropped", "x started"]).await;
}

#[tokio::test]
async fn a_child_that_cannot_start_fails_the_whole_start_and_frees_the_names() {
    let (node, log) = (Node::new("n"), Log::new());
    let failing = probes("b", &log);
    failing.failing_starts.store(1, Ordering::SeqCst);
    let spec = SupervisorSpec::new("s", Strategy::OneForOne)
        .child(probe("a", &log))
        .child(failing.spec)
        .child(probe("c", &log));
    let refused = node.start(spec).await.unwrap_err();
    let expected = "supervisor \"s\" did not start: child \"b\" panicked: cannot start";
    assert_eq!(refused.to_string(), expected);
    let lines = ["a started", "b panics in started", "b dropped", "a stopped", "a dropped"];
    log.expect(&lines).await;
    assert!(node.actors().is_empty());
    assert!(!node.address::<Order>("a").is_running());
    node.start(abc(Strategy::OneForOne, &log)).await.unwrap();
    log.expect(&ABC_STARTED).await;
}

#[tokio::test]
async fn a_nested_supervisor_that_cannot_start_fails_the_whole_start() {
    let (node, log) = (Node::new("n"), Log::new());
    let failing = probes("x", &log);
    failing.failing_starts.store(1, Ordering::SeqCst);
    let spec = SupervisorSpec::new("outer", Strategy::OneForOne)
        .child(probe("a", &log))
        .child(SupervisorSpec::new("inner", Strategy::OneForOne).child(failing.spec));
    let refused = node.start(spec).await.unwrap_err();
    let expected = "supervisor \"outer\" did not start: child \"inner\" child \"x\" panicked: cannot start";
    assert_eq!(refused.to_string(), expected);
    assert_eq!(log.rest().await.last().unwrap(), "a dropped");
}

#[tokio::test]
async fn a_panic_in_started_during_a_restart_is_one_more_failure() {
    let (node, log) = (Node::new("n"), Log::new());
    let flaky = probes("b", &log);
    let failing_starts = flaky.failing_starts.clone();
    let spec = SupervisorSpec::new("s", Strategy::RestForOne)
        .backoff(Backoff::NONE)
        .child(probe("a", &log))
        .child(flaky.spec)
        .child(probe("c", &log));
    node.start(spec).await.unwrap();
    log.expect(&ABC_STARTED).await;
    failing_starts.store(2, Ordering::SeqCst);
    node.address::<Order>("a").tell(TRACE, Order::Panic).unwrap();
    log.expect(&["a dropped", "c stopped", "c dropped", "b stopped", "b dropped"]).await;
    log.expect(&["a started", "b panics in started", "b dropped"]).await;
    log.expect(&["b panics in started", "b dropped"]).await;
    log.expect(&["b started", "c started"]).await;
    until("it is reported", || stats(&node, "c").restarts == 1).await;
    let restarts = ["a", "b", "c"].map(|name| stats(&node, name).restarts);
    assert_eq!(restarts, [1, 1, 1], "each came back once");
    assert_eq!(stats(&node, "b").failures, 2);
}

#[tokio::test(start_paused = true)]
async fn a_failure_during_a_back_off_joins_the_groups_restart() {
    let (node, log) = (Node::new("n"), Log::new());
    let second = Duration::from_secs(1);
    let backoff = Backoff { first: second, max: second };
    let spec = abc(Strategy::RestForOne, &log).backoff(backoff);
    node.start(spec).await.unwrap();
    log.expect(&ABC_STARTED).await;
    node.address::<Order>("c").tell(TRACE, Order::Panic).unwrap();
    log.expect(&["c dropped"]).await;
    node.address::<Order>("b").tell(TRACE, Order::Panic).unwrap();
    log.expect(&["b dropped", "b started", "c started"]).await;
    pass(second * 5).await;
    assert_eq!(log.rest().await, [""; 0], "c is started once");
    let restarts = ["a", "b", "c"].map(|name| stats(&node, name).restarts);
    assert_eq!(restarts, [0, 1, 1]);
}

#[tokio::test]
async fn a_panic_in_the_restart_hook_hurts_nobody() {
    let (node, log) = (Node::new("n"), Log::new());
    let spec = abc(Strategy::OneForAll, &log).on_restart(|_, _| panic!("in the hook"));
    node.start(spec).await.unwrap();
    node.address::<Order>("a").tell(TRACE, Order::Panic).unwrap();
    until("all are back", || stats(&node, "c").restarts == 1).await;
    assert_eq!(count(&node.address::<Order>("a")).await, 0);
    assert_eq!(stats(&node, "s").state, ActorState::Running);
}

#[tokio::test]
async fn names_are_unique_on_a_node() {
    let (node, log) = (Node::new("n"), Log::new());
    let taken = |name: &str| StartError::NameTaken { name: name.into() };
    let twice = abc(Strategy::OneForOne, &log).child(probe("b", &log));
    assert_eq!(node.start(twice).await.unwrap_err(), taken("b"));
    node.start(abc(Strategy::OneForOne, &log)).await.unwrap();
    let other = SupervisorSpec::new("other", Strategy::OneForOne).child(probe("c", &log));
    assert_eq!(node.start(other).await.unwrap_err(), taken("c"));
    log.expect(&ABC_STARTED).await;
    assert_eq!(log.rest().await, [""; 0], "nothing else ever started");
}

#[tokio::test]
async fn a_node_stops_its_trees_and_their_children_in_reverse_order() {
    let (node, log) = (Node::new("n"), Log::new());
    node.start(abc(Strategy::OneForOne, &log)).await.unwrap();
    let nested = SupervisorSpec::new("inner", Strategy::OneForAll).child(probe("x", &log)).child(probe("y", &log));
    let second =
        SupervisorSpec::new("outer", Strategy::OneForOne).child(probe("v", &log)).child(nested).child(probe("w", &log));
    node.start(second).await.unwrap();
    log.expect(&ABC_STARTED).await;
    log.expect(&["v started", "x started", "y started", "w started"]).await;
    assert_eq!(node.stop(PATIENCE).await, StopOutcome::Drained);
    let ends = log.rest().await;
    let stopped: Vec<&str> = ends.iter().filter_map(|line| line.strip_suffix(" stopped")).collect();
    assert_eq!(stopped, ["w", "y", "x", "v", "c", "b", "a"]);
    assert!(node.actors().is_empty());
    // Stopping twice is allowed.
    assert_eq!(node.stop(PATIENCE).await, StopOutcome::Drained);
}

#[tokio::test]
async fn a_stop_drains_what_is_in_the_mailbox() {
    let (node, log) = (Node::new("n"), Log::new());
    let a = probes("a", &log);
    let handled = a.handled.clone();
    let tree = node.start(SupervisorSpec::new("s", Strategy::OneForOne).child(a.spec)).await.unwrap();
    for note in 0..1_000 {
        node.address::<Order>("a").tell(TRACE, Order::Note(note)).unwrap();
    }
    assert_eq!(tree.stop(PATIENCE).await, StopOutcome::Drained);
    assert_eq!(handled.lock().unwrap().len(), 1_000);
    assert_eq!(tree.exited().await, TreeExit::Stopped);
}

#[tokio::test]
async fn an_actor_past_its_stop_deadline_is_killed_with_what_it_had_left() {
    let (node, log) = (Node::new("n"), Log::new());
    let a = probes("a", &log);
    let handled = a.handled.clone();
    let spec = SupervisorSpec::new("s", Strategy::OneForOne).child(a.spec.stop_deadline(Duration::ZERO));
    let tree = node.start(spec).await.unwrap();
    for note in 0..100_000 {
        node.address::<Order>("a").tell(TRACE, Order::Note(note)).unwrap();
    }
    assert_eq!(tree.stop(PATIENCE).await, StopOutcome::Killed);
    assert!(handled.lock().unwrap().len() < 100_000);
    let lines = log.rest().await;
    assert_eq!(lines, ["a started", "a dropped"], "killed, so not stopped in order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stop_completes_though_a_handler_never_returns() {
    let (node, log) = (Node::new("n"), Log::new());
    let stuck = probe("b", &log).stop_deadline(Duration::from_millis(10));
    let spec = SupervisorSpec::new("s", Strategy::OneForOne).child(probe("a", &log)).child(stuck);
    let tree = node.start(spec).await.unwrap();
    log.expect(&["a started", "b started"]).await;
    apart(&node, "b", "a").await;
    log.expect(&["a dropped", "a started"]).await;
    let (open, gate) = std::sync::mpsc::channel();
    node.address::<Order>("b").tell(TRACE, Order::Block(gate)).unwrap();
    log.expect(&["b blocked"]).await;
    assert_eq!(tree.stop(PATIENCE).await, StopOutcome::Abandoned);
    log.expect(&["a stopped", "a dropped"]).await;
    drop(open);
    log.expect(&["b dropped"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_tree_past_its_deadline_is_killed_as_a_whole() {
    let (node, log) = (Node::new("n"), Log::new());
    let inner = SupervisorSpec::new("inner", Strategy::OneForOne)
        .child(probe("x", &log))
        .child(probe("stuck", &log).stop_deadline(PATIENCE));
    let spec = SupervisorSpec::new("s", Strategy::OneForOne).child(inner);
    let tree = node.start(spec).await.unwrap();
    log.expect(&["x started", "stuck started"]).await;
    apart(&node, "stuck", "x").await;
    log.expect(&["x dropped", "x started"]).await;
    let (open, gate) = std::sync::mpsc::channel();
    let address = node.address::<Order>("stuck");
    address.tell(TRACE, Order::Block(gate)).unwrap();
    log.expect(&["stuck blocked"]).await;
    assert_eq!(tree.stop(Duration::from_millis(10)).await, StopOutcome::Killed);
    assert_eq!(tree.exited().await, TreeExit::Killed);
    log.expect(&["x dropped"]).await;
    drop(open);
    log.expect(&["stuck dropped"]).await;
    assert!(node.actors().is_empty());
}

#[tokio::test]
async fn a_cancelled_start_leaves_nothing_behind() {
    let (node, log) = (Node::new("n"), Log::new());
    // Each round lets the start run a little further.
    for polls in 0..40 {
        let start = node.start(abc(Strategy::OneForOne, &log));
        let mut start = Box::pin(start);
        let mut finished = false;
        for _ in 0..polls {
            let poll = std::future::poll_fn(|cx| std::task::Poll::Ready(start.as_mut().poll(cx))).await;
            if let std::task::Poll::Ready(tree) = poll {
                tree.unwrap().stop(PATIENCE).await;
                finished = true;
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(start);
        let mut alive = 0i32;
        until("all ended", || node.actors().is_empty()).await;
        let address = node.address::<Order>("a");
        until("nobody answers", || !address.is_running()).await;
        for line in log.rest().await {
            alive += i32::from(line.ends_with("started")) - i32::from(line.ends_with("dropped"));
        }
        while alive > 0 {
            alive -= i32::from(log.next().await.ends_with("dropped"));
        }
        assert_eq!(alive, 0, "after {polls} polls, finished {finished}");
    }
}

#[tokio::test]
async fn a_thousand_actors_start_answer_and_stop() {
    let (node, log) = (Node::new("n"), Log::new());
    let names: Vec<String> = (0..1_000).map(|index| format!("a-{index}")).collect();
    let spec =
        names.iter().fold(SupervisorSpec::new("s", Strategy::OneForOne), |spec, name| spec.child(probe(name, &log)));
    let tree = node.start(spec).await.unwrap();
    for name in &names {
        node.address::<Order>(name).tell(TRACE, Order::Note(1)).unwrap();
    }
    for name in &names {
        assert_eq!(count(&node.address::<Order>(name)).await, 1);
    }
    assert_eq!(node.actors().len(), 1_001);
    assert_eq!(tree.stop(PATIENCE).await, StopOutcome::Drained);
    let lines = log.rest().await;
    let ended = |end: &str| lines.iter().filter(|line| line.ends_with(end)).count();
    assert_eq!((ended("stopped"), ended("dropped")), (1_000, 1_000));
}
