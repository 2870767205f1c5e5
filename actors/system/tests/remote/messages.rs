//! Tells and asks to another node.

use crate::fabric::{BULK_BYTES_MAX, Fabric, Two, node_name, over_every_fabric};
use crate::probe::{self, Order, Seen, count, start, until_restarted, until_wanted};
use crate::support::{PATIENCE, TRACE, until};
use starling_actors::{AskError, Carrier, Limit, Node, RemoteLimits, SendError, TraceContext};
use std::sync::Arc;
use std::time::Duration;

over_every_fabric!(
    tells_of_one_sender_arrive_in_order,
    an_ask_is_answered_from_another_node,
    questions_without_an_answer_fail_typed,
    what_is_not_exposed_is_not_reachable,
    another_type_or_schema_is_refused,
    nobody_under_the_name_is_an_error_of_the_ask,
    without_a_link_sends_fail_at_once,
    open_questions_fail_when_the_link_goes_down,
    an_address_follows_its_node_over_links,
    the_trace_travels,
    a_dropped_question_is_taken_back,
    large_bodies_travel_both_ways,
    a_sender_without_credit_is_refused_and_accepted_again,
    every_reply_of_a_message_is_answered_by_itself,
    a_full_mailbox_of_another_node_refuses_and_gives_the_credit_back,
    memory_stays_flat_while_many_tell_a_slow_actor,
    rounds_need_no_credit,
    networks_of_one_process_share_nothing,
    a_patient_sender_waits_for_a_full_mailbox_of_its_own_node,
);

async fn tells_of_one_sender_arrive_in_order<F: Fabric>() {
    let two = Two::<F>::linked().await;
    let seen = start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    for note in 0..1_000 {
        address.send(TRACE, Order::Note(note)).await.unwrap();
    }
    assert_eq!(count(&address).await, 1_000);
    assert!(seen.notes().into_iter().eq(0..1_000));
}

async fn an_ask_is_answered_from_another_node<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    let body = vec![7; 1_000];
    let echo = address.ask(TRACE, PATIENCE, |reply| Order::Echo(body.clone(), reply)).await;
    assert_eq!(echo, Ok(body));
    // And in the other direction over the same link.
    start(&two.a, "probe").await;
    assert_eq!(count(&two.b.remote(&node_name("a"), "probe")).await, 0);
}

async fn questions_without_an_answer_fail_typed<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    let name: Arc<str> = "probe@b".into();

    let dropped = address.ask(TRACE, PATIENCE, Order::DropReply).await;
    assert_eq!(dropped, Err(AskError::NoReply { name: Arc::clone(&name) }));

    let panicked = address.ask(TRACE, PATIENCE, Order::PanicOn).await;
    assert_eq!(panicked, Err(AskError::Died { name: Arc::clone(&name) }));

    until_restarted(&two.b, "probe", 1).await;
    let deadline = Duration::from_millis(20);
    let late = address.ask(TRACE, deadline, Order::KeepReply).await;
    assert_eq!(late, Err(AskError::DeadlineExceeded { name, deadline }));
}

async fn what_is_not_exposed_is_not_reachable<F: Fabric>() {
    let limits = RemoteLimits { window_bytes: 1 << 10, ..RemoteLimits::default() };
    let two = Two::<F>::linked_with(limits).await;
    let seen = Seen::default();
    let supervisor = starling_actors::SupervisorSpec::new("s", starling_actors::Strategy::OneForOne);
    two.b.start(supervisor.child(probe::spec("hidden", &seen))).await.unwrap();
    let address = two.a.remote::<Order>(&node_name("b"), "hidden");
    for note in 0..100 {
        // More than the window: the credit of what is dropped comes back.
        address.send(TRACE, Order::Note(note)).await.unwrap();
    }
    let refused = loop {
        match address.ask(TRACE, PATIENCE, Order::Count).await {
            // The credit is still on its way.
            Err(AskError::Undelivered(SendError::Full { .. })) => tokio::task::yield_now().await,
            refused => break refused,
        }
    };
    assert_eq!(refused, Err(AskError::Undelivered(SendError::NotExposed { name: "hidden@b".into() })));
    assert_eq!(seen.notes(), []);
    assert_eq!(two.b.link_stats()[0].dropped.not_exposed, 101);
}

async fn another_type_or_schema_is_refused<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    two.b.expose_schema::<Order>("newer", 2);
    let name = |name: &str| -> Arc<str> { format!("{name}@b").into() };

    let other = two.a.remote::<Option<starling_actors::Reply<u64>>>(&node_name("b"), "probe");
    let refused = other.ask(TRACE, PATIENCE, Some).await;
    let Err(AskError::Undelivered(SendError::UnknownType { name: of, sent })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((of, sent.contains("Reply")), (name("probe"), true));

    let older = two.a.remote_schema::<Order>(&node_name("b"), "newer", 1);
    let refused = older.ask(TRACE, PATIENCE, Order::Count).await;
    assert!(matches!(refused, Err(AskError::Undelivered(SendError::UnknownType { .. }))), "{refused:?}");

    let same = two.a.remote_schema::<Order>(&node_name("b"), "newer", 2);
    let nobody = same.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(nobody, Err(AskError::Undelivered(SendError::NotRunning { name: name("newer") })));
    assert_eq!(two.b.link_stats()[0].dropped.unknown_type, 2);
}

async fn nobody_under_the_name_is_an_error_of_the_ask<F: Fabric>() {
    let two = Two::<F>::linked().await;
    two.b.expose::<Order>("later");
    let address = two.a.remote::<Order>(&node_name("b"), "later");
    let nobody = address.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(nobody, Err(AskError::Undelivered(SendError::NotRunning { name: "later@b".into() })));
    start(&two.b, "later").await;
    assert_eq!(count(&address).await, 0);
    assert_eq!(two.b.link_stats()[0].dropped.not_running, 1);
}

async fn without_a_link_sends_fail_at_once<F: Fabric>() {
    let two = Two::<F>::linked().await;
    let address = two.a.remote::<Order>(&node_name("c"), "probe");
    let error = SendError::NotConnected { name: "probe@c".into(), node: node_name("c") };
    assert!(!address.is_running());
    assert_eq!(address.tell(TRACE, Order::Note(1)), Err(error.clone()));
    assert_eq!(address.send(TRACE, Order::Note(1)).await, Err(error.clone()));
    assert_eq!(address.ask(TRACE, PATIENCE, Order::Count).await, Err(AskError::Undelivered(error)));
}

async fn open_questions_fail_when_the_link_goes_down<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    let asking = tokio::spawn({
        let address = address.clone();
        async move { address.ask(TRACE, PATIENCE, Order::KeepReply).await }
    });
    let at_home = two.b.address::<Order>("probe");
    until_wanted(&at_home, 1).await;
    two.fabric.cut("a", "b").await;
    let lost = asking.await.unwrap();
    assert_eq!(lost, Err(AskError::ConnectionLost { name: "probe@b".into(), may_have_been_delivered: true }));
    two.are_apart().await;
    // The far side sees that nobody waits.
    until_wanted(&at_home, 0).await;
    // Too late for anybody, and harmless.
    at_home.tell(TRACE, Order::AnswerKept(1)).unwrap();
    assert_eq!(count(&at_home).await, 0);
}

async fn an_address_follows_its_node_over_links<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    assert_eq!(count(&address).await, 0);
    for _ in 0..3 {
        two.fabric.cut("a", "b").await;
        two.are_apart().await;
        assert!(matches!(address.tell(TRACE, Order::Note(1)), Err(SendError::NotConnected { .. })));
        two.fabric.heal("a", "b").await;
        two.are_linked().await;
        assert_eq!(count(&address).await, 0);
    }
    // Another life of the other node, with another actor.
    let reborn = Node::new("b");
    start(&reborn, "probe").await;
    reborn.address::<Order>("probe").tell(TRACE, Order::Note(7)).unwrap();
    two.fabric.join("b", reborn.mesh_handler()).await;
    two.fabric.connect("b", "a").await;
    until("the new life is linked", || reborn.links().len() == 1 && two.a.links().len() == 1).await;
    assert_eq!(count(&address).await, 1);
}

async fn the_trace_travels<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let trace = TraceContext { trace_id: 7 << 90, span_id: 8, flags: 1 };
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    assert_eq!(address.ask(trace, PATIENCE, Order::Trace).await, Ok(trace));
    assert_eq!(address.ask(TRACE, PATIENCE, Order::Trace).await, Ok(TRACE));
}

async fn a_dropped_question_is_taken_back<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    let at_home = two.b.address::<Order>("probe");
    let asking = tokio::spawn({
        let address = address.clone();
        async move { address.ask(TRACE, PATIENCE, Order::KeepReply).await }
    });
    until_wanted(&at_home, 1).await;
    assert_eq!(two.a.link_stats()[0].open_asks, 1);
    asking.abort();
    until_wanted(&at_home, 0).await;
    assert_eq!(two.a.link_stats()[0].open_asks, 0);
    // So does a deadline.
    let late = address.ask(TRACE, Duration::from_millis(20), Order::KeepReply).await;
    assert!(matches!(late, Err(AskError::DeadlineExceeded { .. })));
    until_wanted(&at_home, 0).await;
    assert_eq!(two.a.link_stats()[0].open_asks, 0);
}

async fn large_bodies_travel_both_ways<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    for bytes in [60 << 10, 65 << 10, 1 << 20] {
        let body: Vec<u8> = (0..bytes).map(|index: u32| index.to_le_bytes()[0]).collect();
        let echo = address.ask(TRACE, PATIENCE, |reply| Order::Echo(body.clone(), reply)).await;
        assert!(echo == Ok(body), "{bytes} bytes");
    }
    for _ in 0..4 {
        let huge = address.tell(TRACE, Order::Bytes(vec![0; BULK_BYTES_MAX]));
        assert!(matches!(huge, Err(SendError::TooLarge { .. })), "{huge:?}");
    }
    // What was not sent costs no credit, and its reply is not waited for.
    let huge = address.ask(TRACE, PATIENCE, |reply| Order::Echo(vec![0; BULK_BYTES_MAX], reply)).await;
    assert!(matches!(huge, Err(AskError::Undelivered(SendError::TooLarge { .. }))), "{huge:?}");
    assert_eq!(two.a.link_stats()[0].open_asks, 0);
    address.tell(TRACE, Order::Note(1)).unwrap();
}

async fn a_sender_without_credit_is_refused_and_accepted_again<F: Fabric>() {
    let window_bytes = 16 << 10;
    let limits = RemoteLimits { window_bytes, ..RemoteLimits::default() };
    let two = Two::<F>::linked_with(limits).await;
    let seen = start(&two.b, "probe").await;
    let gate = seen.gate();
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    address.send(TRACE, Order::Block).await.unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    let mut told = 0u64;
    let full = loop {
        match address.tell(TRACE, Order::Bytes(vec![0; 100])) {
            Ok(()) => told += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, SendError::Full { name: "probe@b".into(), limit: Limit::CreditBytes(window_bytes) });
    assert!((100..160).contains(&told), "{told}");
    let asked = address.ask(TRACE, PATIENCE, |reply| Order::Echo(vec![0; 200], reply)).await;
    assert_eq!(asked, Err(AskError::Undelivered(full)));
    // A patient sender gets through as soon as the actor goes on.
    let waiting = tokio::spawn({
        let address = address.clone();
        async move { address.send(TRACE, Order::Bytes(vec![0; 100])).await }
    });
    assert!(two.b.link_stats()[0].held_bytes <= u64::from(window_bytes));
    drop(gate);
    waiting.await.unwrap().unwrap();
    until("all arrived", || seen.notes().len() as u64 == told + 1).await;
    assert_eq!(two.b.link_stats()[0].held_bytes, 0);
    for _ in 0..1_000 {
        address.send(TRACE, Order::Bytes(vec![0; 1_000])).await.unwrap();
    }
}

async fn every_reply_of_a_message_is_answered_by_itself<F: Fabric>() {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    // The reply of one question travels in the message of another.
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let asking = tokio::spawn({
        let address = address.clone();
        async move {
            address
                .ask(TRACE, PATIENCE, |second: starling_actors::Reply<u64>| {
                    drop(sender.send(second));
                    Order::Note(1)
                })
                .await
        }
    });
    let second = receiver.await.unwrap();
    let first = address.ask(TRACE, PATIENCE, |first| Order::Both(first, second)).await;
    assert_eq!(first, Ok(1));
    assert_eq!(asking.await.unwrap(), Err(AskError::NoReply { name: "probe@b".into() }));
}

async fn a_full_mailbox_of_another_node_refuses_and_gives_the_credit_back<F: Fabric>() {
    let limits = RemoteLimits { window_bytes: 4 << 10, ..RemoteLimits::default() };
    let two = Two::<F>::linked_with(limits).await;
    let seen = Seen::default();
    probe::start_spec(&two.b, "probe", probe::spec("probe", &seen).mailbox_messages_max(3)).await;
    let gate = seen.gate();
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    address.tell(TRACE, Order::Block).unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    // Far more than the window: what is dropped costs nothing for long.
    for note in 0..1_000 {
        address.send(TRACE, Order::Note(note)).await.unwrap();
    }
    let full = SendError::Full { name: "probe@b".into(), limit: Limit::MailboxMessages(3) };
    let refused = address.ask(TRACE, PATIENCE, Order::Count).await;
    assert_eq!(refused, Err(AskError::Undelivered(full)));
    assert_eq!(two.b.link_stats()[0].dropped.mailbox_full, 998);
    drop(gate);
    until("all is read", || seen.notes().len() == 3).await;
    assert_eq!(seen.notes(), [0, 1, 2]);
}

async fn memory_stays_flat_while_many_tell_a_slow_actor<F: Fabric>() {
    const WINDOW_BYTES: u32 = 64 << 10;
    const BODY_BYTES: u32 = 1_000;
    let two = Two::<F>::linked_with(RemoteLimits { window_bytes: WINDOW_BYTES, ..RemoteLimits::default() }).await;
    let seen = start(&two.b, "probe").await;
    let gate = seen.gate();
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    address.send(TRACE, Order::Block).await.unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    let senders: Vec<_> = (0..4)
        .map(|_| {
            let address = address.clone();
            tokio::spawn(async move {
                for _ in 0..500 {
                    address.send(TRACE, Order::Bytes(vec![0; BODY_BYTES as usize])).await.unwrap();
                }
            })
        })
        .collect();
    let held = || two.b.link_stats()[0].held_bytes;
    until("the window is used", || held() > u64::from(WINDOW_BYTES - 2 * BODY_BYTES)).await;
    let gate = std::cell::Cell::new(Some(gate));
    until("all arrived", || {
        let depth = crate::support::stats(&two.b, "probe").depth;
        assert!(held() <= WINDOW_BYTES.into(), "{} bytes", held());
        assert!(depth <= WINDOW_BYTES / BODY_BYTES, "{depth} messages");
        drop(gate.take());
        seen.notes().len() == 2_000
    })
    .await;
    for sender in senders {
        sender.await.unwrap();
    }
    until("nothing is held", || held() == 0).await;
}

async fn rounds_need_no_credit<F: Fabric>() {
    let limits = RemoteLimits { window_bytes: 1 << 10, ..RemoteLimits::default() };
    let two = Two::<F>::linked_with(limits).await;
    let seen = start(&two.b, "probe").await;
    let gate = seen.gate();
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    address.send(TRACE, Order::Block).await.unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    while address.tell(TRACE, Order::Note(0)).is_ok() {}
    let rounds = address.over(Carrier::Rounds);
    for note in 1..=1_000 {
        rounds.tell(TRACE, Order::Note(note)).unwrap();
    }
    drop(gate);
    assert!(count(&rounds).await >= 1_000);
    let notes = seen.notes();
    assert!(notes.into_iter().filter(|note| *note > 0).eq(1..=1_000));
    assert_eq!(two.b.address::<Order>("probe").over(Carrier::Rounds).name(), "probe");
}

async fn networks_of_one_process_share_nothing<F: Fabric>() {
    let (first, second) = (Two::<F>::linked().await, Two::<F>::linked().await);
    start(&first.b, "probe").await;
    let on_first = first.a.remote::<Order>(&node_name("b"), "probe");
    let on_second = second.a.remote::<Order>(&node_name("b"), "probe");
    on_first.tell(TRACE, Order::Note(1)).unwrap();
    let refused = on_second.ask(TRACE, PATIENCE, Order::Count).await;
    assert!(matches!(refused, Err(AskError::Undelivered(SendError::NotExposed { .. }))), "{refused:?}");
    first.fabric.cut("a", "b").await;
    first.are_apart().await;
    assert!(on_second.is_running() && !on_first.is_running());
    start(&second.b, "probe").await;
    assert_eq!(count(&on_second).await, 0);
}

async fn a_patient_sender_waits_for_a_full_mailbox_of_its_own_node<F: Fabric>() {
    let two = Two::<F>::linked().await;
    let seen = Seen::default();
    probe::start_spec(&two.a, "probe", probe::spec("probe", &seen).mailbox_messages_max(2)).await;
    let address = two.a.address::<Order>("probe");
    let gate = seen.gate();
    address.send(TRACE, Order::Block).await.unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    let senders: Vec<_> = (0..20)
        .map(|note| {
            let address = address.clone();
            tokio::spawn(async move { address.send(TRACE, Order::Note(note)).await })
        })
        .collect();
    until("the mailbox is full", || crate::support::stats(&two.a, "probe").depth >= 2).await;
    assert!(matches!(address.tell(TRACE, Order::Note(99)), Err(SendError::Full { .. })));
    drop(gate);
    for sender in senders {
        sender.await.unwrap().unwrap();
    }
    until("all arrived", || seen.notes().len() == 20).await;
    // Whoever waits when the actor ends for good hears of it.
    let gate = seen.gate();
    address.send(TRACE, Order::Block).await.unwrap();
    until("it stands at the gate", || seen.is_blocked()).await;
    address.tell(TRACE, Order::Panic).unwrap();
    address.tell(TRACE, Order::Note(0)).unwrap();
    let sender = tokio::spawn({
        let address = address.clone();
        async move { address.send(TRACE, Order::Note(100)).await }
    });
    drop(gate);
    // To the old life, to nobody or to the new one: but it ends.
    let _ = sender.await.unwrap();
}
