//! Rules that show best on the twin in memory: with paused time, or a queue of a few bytes.

use crate::fabric::{Memory, Two, node_name};
use crate::probe::{self, Order, Seen, count, start, until_restarted};
use crate::support::{PATIENCE, TRACE, until};
use serde::{Deserialize, Deserializer, Serialize};
use starling_actors::{Limit, Node, Reply, SendError, Strategy, SupervisorSpec};
use starling_transport::{Peer, memory};
use std::time::Duration;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn a_question_to_another_node_fails_at_once_where_the_reason_is_known() {
    let two = Two::<Memory>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    let started = Instant::now();
    assert!(address.ask(TRACE, PATIENCE, Order::DropReply).await.is_err());
    assert!(address.ask(TRACE, PATIENCE, Order::PanicOn).await.is_err());
    assert_eq!(started.elapsed(), Duration::ZERO);
    until_restarted(&two.b, "probe", 1).await;
    let deadline = Duration::from_secs(2);
    assert!(address.ask(TRACE, deadline, Order::KeepReply).await.is_err());
    assert!(started.elapsed() >= deadline && started.elapsed() < deadline * 2);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_of_the_link_refuses_tells_holds_senders_and_loses_no_answer() {
    const QUEUE_BYTES: usize = 4_000;
    let network = memory::Network::new();
    let (a, b) = (Node::new("a"), Node::new("b"));
    let join = |node: &Node| {
        let peer = Peer { name: node_name(node.name()), incarnation: 1 };
        let limits = memory::Limits { queue_bytes_max: QUEUE_BYTES, ..memory::Limits::default() };
        network.join(peer, limits, node.mesh_handler())
    };
    let meshes = [join(&a), join(&b)];
    meshes[0].connect(&node_name("b"));
    until("both are linked", || a.links().len() == 1 && b.links().len() == 1).await;
    let seen = start(&b, "probe").await;
    let address = a.remote::<Order>(&node_name("b"), "probe");
    // Nothing leaves the queue before the next await.
    let mut told = 0;
    let full = loop {
        match address.tell(TRACE, Order::Note(told)) {
            Ok(()) => told += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, SendError::Full { name: "probe@b".into(), limit: Limit::QueueBytes(QUEUE_BYTES) });
    address.send(TRACE, Order::Note(told)).await.unwrap();
    until("all arrived", || seen.notes().len() as u64 == told + 1).await;
    assert!(seen.notes().into_iter().eq(0..=told));
    // The answers are many times what the queue takes, and the actor gives them all before one leaves.
    let asking: Vec<_> = (0..20)
        .map(|_| {
            let address = address.clone();
            tokio::spawn(async move { address.ask(TRACE, PATIENCE, |reply| Order::Large(1_000, reply)).await })
        })
        .collect();
    for asking in asking {
        assert_eq!(asking.await.unwrap(), Ok(vec![0; 1_000]));
    }
    let numbers = |sink| Order::Numbers(2_000, crate::probe::End::Finish, sink);
    let mut items = address.stream::<u64>(TRACE, 1_000, numbers).unwrap();
    for number in 0..2_000 {
        assert_eq!(items.next().await, Some(Ok(number)));
    }
    assert_eq!(items.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn replies_that_were_sent_on_and_given_up_are_swept_out() {
    let two = Two::<Memory>::linked().await;
    start(&two.b, "probe").await;
    let address = two.a.remote::<Order>(&node_name("b"), "probe");
    for _ in 0..1_000 {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let asking = address.ask(TRACE, PATIENCE, |reply: Reply<u64>| {
            drop(sender.send(reply));
            Order::Note(0)
        });
        let mut asking = Box::pin(asking);
        let sent_on = async {
            let reply = receiver.await.unwrap();
            address.send(TRACE, Order::KeepReply(reply)).await.unwrap();
        };
        tokio::select! {
            answer = &mut asking => panic!("{answer:?}"),
            () = sent_on => {}
        }
    }
    let open = two.a.link_stats()[0].open_asks;
    assert!(open <= 130, "{open} questions are open though nobody waits");
    until("the far side hears of it", || two.b.link_stats()[0].open_asks_of_peer == open).await;
}

/// Cannot be decoded without a panic.
#[derive(Serialize)]
struct Bomb;

impl<'de> Deserialize<'de> for Bomb {
    fn deserialize<D: Deserializer<'de>>(_deserializer: D) -> Result<Self, D::Error> {
        panic!("told to")
    }
}

#[tokio::test]
async fn a_type_that_panics_while_it_is_decoded_harms_nobody_else() {
    let two = Two::<Memory>::linked().await;
    start(&two.b, "probe").await;
    two.b.expose::<Bomb>("bomb");
    let bomb = two.a.remote::<Bomb>(&node_name("b"), "bomb");
    bomb.tell(TRACE, Bomb).unwrap();
    until("it went off", || two.b.link_stats()[0].dropped.undecodable == 1).await;
    assert_eq!(count(&two.a.remote(&node_name("b"), "probe")).await, 0);
}

#[tokio::test]
async fn an_actor_of_the_own_node_is_reached_without_a_link() {
    let node = Node::new("a");
    let seen = Seen::default();
    let supervisor = SupervisorSpec::new("s", Strategy::OneForOne);
    node.start(supervisor.child(probe::spec("probe", &seen))).await.unwrap();
    let address = node.remote::<Order>(&node_name("a"), "probe");
    assert_eq!(count(&address).await, 0);
}

#[tokio::test]
async fn a_reply_outside_a_message_cannot_be_serialized() {
    let two = Two::<Memory>::linked().await;
    start(&two.b, "probe").await;
    let address = two.b.address::<Order>("probe");
    let answer = address
        .ask(TRACE, PATIENCE, |reply| {
            let order = Order::Count(reply);
            let refused = starling_transport::codec::encode(&order).unwrap_err();
            assert!(refused.to_string().contains("only travel inside a message"), "{refused}");
            order
        })
        .await;
    assert_eq!(answer, Ok(0), "it is still good");
    assert!(starling_transport::codec::decode::<Order, 64>(&[2, 0]).is_err());
}
