//! What a node hears of its links.

use crate::fabric::{Fabric, Two, over_every_fabric};
use crate::support::{PATIENCE, until};
use starling_actors::{Actor, ActorError, ActorSpec, Context, LinkEvent, Node, Strategy, SupervisorSpec};
use starling_transport::DownReason;
use tokio::sync::mpsc;

over_every_fabric!(
    events_of_links_come_in_order_beginning_with_those_that_are_up,
    a_restarted_subscriber_begins_with_the_links_of_its_time,
);

struct Watcher(mpsc::UnboundedSender<String>);

enum Watch {
    Link(LinkEvent),
    Panic,
}

impl Actor for Watcher {
    type Message = Watch;

    fn started(&mut self, context: &mut Context<'_, Watch>) -> Result<(), ActorError> {
        context.node().subscribe_links(context.address(), Watch::Link);
        Ok(())
    }

    fn handle(&mut self, _context: &mut Context<'_, Watch>, message: Watch) -> Result<(), ActorError> {
        let line = match message {
            Watch::Link(LinkEvent::Up(peer)) => format!("{} up", peer.name),
            Watch::Link(LinkEvent::Down(peer, DownReason::Goodbye)) => format!("{} says goodbye", peer.name),
            Watch::Link(LinkEvent::Down(peer, _)) => format!("{} down", peer.name),
            Watch::Link(LinkEvent::Refused { peer, why }) => format!("{peer} refused: {why}"),
            Watch::Panic => panic!("told to"),
        };
        self.0.send(line).map_err(|error| error.to_string().into())
    }
}

pub async fn watch(node: &Node) -> mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let spec = SupervisorSpec::new("watching", Strategy::OneForOne);
    // Events pass a full mailbox.
    let watcher = ActorSpec::new("watcher", move || Watcher(sender.clone())).mailbox_messages_max(1);
    node.start(spec.child(watcher)).await.unwrap();
    receiver
}

pub async fn expect(lines: &mut mpsc::UnboundedReceiver<String>, expected: &[&str]) {
    for line in expected {
        let next = tokio::time::timeout(PATIENCE, lines.recv()).await.expect("nothing happened");
        assert_eq!(next.as_deref(), Some(*line));
    }
}

async fn events_of_links_come_in_order_beginning_with_those_that_are_up<F: Fabric>() {
    let two = Two::<F>::linked().await;
    let mut lines = watch(&two.a).await;
    expect(&mut lines, &["b up"]).await;
    two.fabric.cut("a", "b").await;
    expect(&mut lines, &["b down"]).await;
    // Else b could be asked to close with the old link for the new one, which has not come up there.
    two.are_apart().await;
    two.fabric.heal("a", "b").await;
    expect(&mut lines, &["b up"]).await;
    until("b is linked", || two.b.links().len() == 1).await;
    two.fabric.close("b").await;
    expect(&mut lines, &["b says goodbye"]).await;
    assert!(two.a.links().is_empty());
}

async fn a_restarted_subscriber_begins_with_the_links_of_its_time<F: Fabric>() {
    let two = Two::<F>::linked().await;
    let mut lines = watch(&two.a).await;
    expect(&mut lines, &["b up"]).await;
    two.a.address::<Watch>("watcher").tell(starling_actors::TraceContext::NONE, Watch::Panic).unwrap();
    expect(&mut lines, &["b up"]).await;
    two.fabric.cut("a", "b").await;
    expect(&mut lines, &["b down"]).await;
    two.are_apart().await;
    assert!(lines.try_recv().is_err(), "each event once");
}
