//! Tells, asks, addresses, timers and limits.

mod support;

use starling_actors::{ActorState, AskError, Backoff, Context, Limit, Node, Restart, SendError};
use starling_actors::{Strategy, SupervisorSpec, TraceContext};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use support::{Log, Order, PATIENCE, TRACE, count, pass, probe, probes, stats, until};
use tokio::time::Instant;

fn one_for_one(name: &str) -> SupervisorSpec {
    SupervisorSpec::new(name, Strategy::OneForOne).backoff(Backoff::NONE).intensity(1_000_000, PATIENCE)
}

#[tokio::test]
async fn an_ask_is_answered_and_tells_keep_their_order() {
    let node = Node::new("n");
    let a = probes("a", &Log::new());
    let handled = Arc::clone(&a.handled);
    node.start(one_for_one("s").child(a.spec)).await.unwrap();
    let address = node.address::<Order>("a");
    for note in 0..100 {
        address.tell(TRACE, Order::Note(note)).unwrap();
    }
    assert_eq!(count(&address).await, 100);
    assert!(handled.lock().unwrap().iter().copied().eq(0..100));
}

#[tokio::test(start_paused = true)]
async fn a_question_without_an_answer_fails_at_once_and_typed() {
    let node = Node::new("n");
    node.start(one_for_one("s").child(probe("a", &Log::new()))).await.unwrap();
    let address = node.address::<Order>("a");
    let name: Arc<str> = "a".into();
    let started = Instant::now();

    let dropped = address.ask(TRACE, PATIENCE, Order::DropReply).await;
    assert_eq!(dropped, Err(AskError::NoReply { name: Arc::clone(&name) }));

    let panicked = address.ask(TRACE, PATIENCE, Order::PanicOn).await;
    assert_eq!(panicked, Err(AskError::Died { name }));

    assert_eq!(started.elapsed(), Duration::ZERO, "not at the deadline");
}

#[tokio::test(start_paused = true)]
async fn a_question_meets_its_deadline() {
    let node = Node::new("n");
    node.start(one_for_one("s").child(probe("a", &Log::new()))).await.unwrap();
    let address = node.address::<Order>("a");
    let started = Instant::now();
    let deadline = Duration::from_millis(250);
    let late = address.ask(TRACE, deadline, Order::KeepReply).await;
    let name = "a".into();
    assert_eq!(late, Err(AskError::DeadlineExceeded { name, deadline }));
    assert!(started.elapsed() >= deadline && started.elapsed() < deadline * 2);
}

#[tokio::test(start_paused = true)]
async fn questions_behind_a_panic_fail_at_once() {
    let node = Node::new("n");
    node.start(one_for_one("s").child(probe("a", &Log::new()))).await.unwrap();
    let address = node.address::<Order>("a");
    let started = Instant::now();
    address.tell(TRACE, Order::Panic).unwrap();
    let name = "a".into();
    let lost = address.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(lost, Err(AskError::Died { name }));
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test]
async fn an_address_works_before_its_actor_and_after_its_restarts() {
    let node = Node::new("n");
    let log = Log::new();
    let address = node.address::<Order>("a");
    let nobody = SendError::NotRunning { name: "a".into() };
    assert_eq!(address.tell(TRACE, Order::Note(0)), Err(nobody.clone()));
    let undelivered = address.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(undelivered, Err(AskError::Undelivered(nobody.clone())));

    let tree = node.start(one_for_one("s").child(probe("a", &log))).await.unwrap();
    for _ in 0..3 {
        log.expect(&["a started"]).await;
        until("a runs", || address.is_running()).await;
        address.tell(TRACE, Order::Note(1)).unwrap();
        assert_eq!(count(&address).await, 1, "a fresh machine each time");
        address.tell(TRACE, Order::Panic).unwrap();
        log.expect(&["a dropped"]).await;
    }
    log.expect(&["a started"]).await;
    tree.stop(PATIENCE).await;
    assert_eq!(address.tell(TRACE, Order::Note(0)), Err(nobody));
}

#[tokio::test]
async fn two_nodes_in_one_process_never_see_each_others_names() {
    let (left, right) = (Node::new("left"), Node::new("right"));
    let spec = || one_for_one("s").child(probe("a", &Log::new()));
    left.start(spec()).await.unwrap();
    let (on_left, on_right) = (left.address::<Order>("a"), right.address::<Order>("a"));
    assert!(on_right.tell(TRACE, Order::Note(0)).is_err());
    right.start(spec()).await.unwrap();
    on_left.tell(TRACE, Order::Note(0)).unwrap();
    assert_eq!((count(&on_left).await, count(&on_right).await), (1, 0));
    left.stop(PATIENCE).await;
    assert!(on_left.tell(TRACE, Order::Note(0)).is_err());
    assert_eq!(count(&on_right).await, 0);
}

#[tokio::test]
async fn a_message_of_another_type_is_refused_by_name() {
    let node = Node::new("n");
    node.start(one_for_one("s").child(probe("a", &Log::new()))).await.unwrap();
    let refused = node.address::<u64>("a").tell(TRACE, 7).unwrap_err();
    assert!(
        matches!(&refused, SendError::WrongType { sent: "u64", takes, .. } if takes.ends_with("Order")),
        "{refused}"
    );
}

#[tokio::test]
async fn a_full_mailbox_refuses_and_accepts_again_once_read() {
    let node = Node::new("n");
    let a = probes("a", &Log::new());
    let handled = Arc::clone(&a.handled);
    let spec = a.spec.mailbox_messages_max(4);
    node.start(one_for_one("s").child(spec)).await.unwrap();
    let address = node.address::<Order>("a");
    // On this runtime of one thread the actor cannot run before the next await.
    for note in 0..4 {
        address.tell(TRACE, Order::Note(note)).unwrap();
    }
    assert_eq!(stats(&node, "a").depth, 4);
    assert_eq!(stats(&node, "a").mailbox_messages_max, Some(4));
    let full = SendError::Full { name: "a".into(), limit: Limit::MailboxMessages(4) };
    assert_eq!(address.tell(TRACE, Order::Note(4)), Err(full.clone()));
    let asked = address.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(asked, Err(AskError::Undelivered(full)));
    until("the mailbox is read", || stats(&node, "a").depth == 0).await;
    assert_eq!(count(&address).await, 4);
    assert_eq!(*handled.lock().unwrap(), [0, 1, 2, 3]);
}

#[test]
fn an_address_works_on_threads_that_know_no_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let node = Node::new("n");
    runtime.block_on(node.start(one_for_one("s").child(probe("a", &Log::new())))).unwrap();
    let address = node.address::<Order>("a");
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let address = address.clone();
            std::thread::spawn(move || {
                for note in 0..100 {
                    address.tell(TRACE, Order::Note(note)).unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(runtime.block_on(count(&address)), 400);
}

#[tokio::test]
async fn the_trace_of_a_message_reaches_its_handler() {
    let node = Node::new("n");
    node.start(one_for_one("s").child(probe("a", &Log::new()))).await.unwrap();
    let trace = TraceContext { trace_id: 7, span_id: 8, flags: 1 };
    let address = node.address::<Order>("a");
    let seen = address.ask(trace, PATIENCE, Order::Trace).await;
    assert_eq!(seen, Ok(trace));
}

#[tokio::test(start_paused = true)]
async fn timers_fire_on_time_can_be_cancelled_and_die_with_the_machine() {
    let node = Node::new("n");
    let log = Log::new();
    let a = probes("a", &log);
    let handled = Arc::clone(&a.handled);
    // A timer is not bound by the mailbox's limit.
    let spec = a.spec.mailbox_messages_max(2);
    node.start(one_for_one("s").child(spec)).await.unwrap();
    let address = node.address::<Order>("a");
    let notes = || handled.lock().unwrap().clone();
    let second = Duration::from_secs(1);

    address.tell(TRACE, Order::NoteAfter(second, 1)).unwrap();
    pass(second - Duration::from_millis(10)).await;
    assert_eq!(notes(), []);
    pass(Duration::from_millis(20)).await;
    assert_eq!(notes(), [1]);

    address.tell(TRACE, Order::NoteAfter(second, 2)).unwrap();
    address.tell(TRACE, Order::CancelTimers).unwrap();
    pass(second * 2).await;
    assert_eq!(notes(), [1]);

    log.expect(&["a started"]).await;
    address.tell(TRACE, Order::NoteAfter(second, 3)).unwrap();
    address.tell(TRACE, Order::Panic).unwrap();
    log.expect(&["a dropped", "a started"]).await;
    pass(second * 2).await;
    assert_eq!(notes(), [1], "the timer of the former life is gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_is_handled_twice_nor_out_of_order_across_restarts() {
    const SENDERS: u64 = 4;
    const MESSAGES: u64 = 2_000;
    let node = Node::new("n");
    let a = probes("a", &Log::new());
    let handled = Arc::clone(&a.handled);
    let tree = node.start(one_for_one("s").child(a.spec)).await.unwrap();
    let senders: Vec<_> = (0..SENDERS)
        .map(|sender| {
            let address = node.address::<Order>("a");
            std::thread::spawn(move || {
                let mut accepted = BTreeSet::new();
                for number in 0..MESSAGES {
                    let note = sender * MESSAGES + number;
                    if address.tell(TRACE, Order::Note(note)).is_ok() {
                        accepted.insert(note);
                    }
                    if number % 100 == 0 {
                        // Refused while the actor is between two lives.
                        let _ = address.tell(TRACE, Order::Panic);
                    }
                }
                accepted
            })
        })
        .collect();
    let mut accepted = BTreeSet::new();
    for sender in senders {
        accepted.extend(tokio::task::block_in_place(|| sender.join().unwrap()));
    }
    until("it failed in between", || stats(&node, "a").failures > 0).await;
    tree.stop(PATIENCE).await;
    let handled = handled.lock().unwrap();
    let distinct: BTreeSet<u64> = handled.iter().copied().collect();
    assert_eq!(distinct.len(), handled.len(), "handled twice");
    assert!(distinct.is_subset(&accepted), "handled, though refused");
    for sender in 0..SENDERS {
        let of_sender = |note: &&u64| **note / MESSAGES == sender;
        assert!(handled.iter().filter(of_sender).is_sorted(), "out of order");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_an_actor_stops_each_send_is_either_refused_or_handled() {
    for _ in 0..20 {
        let node = Node::new("n");
        let a = probes("a", &Log::new());
        let handled = Arc::clone(&a.handled);
        let tree = node.start(one_for_one("s").child(a.spec)).await.unwrap();
        let senders: Vec<_> = (0..4)
            .map(|_| {
                let address = node.address::<Order>("a");
                std::thread::spawn(move || {
                    let mut accepted = 0u64;
                    while address.tell(TRACE, Order::Note(accepted)).is_ok() {
                        accepted += 1;
                    }
                    accepted
                })
            })
            .collect();
        until("messages flow", || handled.lock().unwrap().len() > 100).await;
        tree.stop(PATIENCE).await;
        let accepted: u64 = senders.into_iter().map(|sender| sender.join().unwrap()).sum();
        let handled = u64::try_from(handled.lock().unwrap().len()).unwrap();
        assert_eq!(handled, accepted);
    }
}

#[tokio::test]
async fn an_actor_that_stops_itself_ends_in_order_and_stays_ended() {
    let node = Node::new("n");
    let log = Log::new();
    let spec = probe("a", &log).restart(Restart::Transient);
    node.start(one_for_one("s").child(spec)).await.unwrap();
    node.address::<Order>("a").tell(TRACE, Order::Stop).unwrap();
    log.expect(&["a started", "a stopped", "a dropped"]).await;
    until("it is stopped", || stats(&node, "a").state == ActorState::Stopped).await;
    assert_eq!(log.rest().await, [""; 0]);
}

/// Tells itself something in `started` and keeps its own address.
struct Selfish;

impl starling_actors::Actor for Selfish {
    type Message = Option<starling_actors::Reply<&'static str>>;

    fn started(&mut self, context: &mut Context<'_, Self::Message>) -> Result<(), starling_actors::ActorError> {
        Ok(context.address().tell(TRACE, None)?)
    }

    fn handle(
        &mut self,
        context: &mut Context<'_, Self::Message>,
        message: Self::Message,
    ) -> Result<(), starling_actors::ActorError> {
        match message {
            None => assert_eq!((context.name(), context.node().name()), ("a", "n")),
            Some(reply) => reply.send("second"),
        }
        Ok(())
    }
}

#[tokio::test]
async fn an_actor_can_send_to_itself_while_it_starts() {
    let node = Node::new("n");
    let spec = starling_actors::ActorSpec::new("a", || Selfish);
    node.start(one_for_one("s").child(spec)).await.unwrap();
    let address = node.address("a");
    assert_eq!(address.ask(TRACE, PATIENCE, Some).await, Ok("second"));
    assert_eq!(stats(&node, "a").handled, 2);
}
