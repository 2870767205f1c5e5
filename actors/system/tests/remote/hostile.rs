//! A peer that does not keep to the protocol, written byte by byte: this is also the layout that must not change.

use crate::fabric::{Fabric, Memory, node_name, over_every_fabric};
use crate::probe::{Order, count, start, until_answered};
use crate::support::{PATIENCE, TRACE, until};
use bytes::Bytes;
use proptest::prelude::*;
use starling_actors::{Node, RemoteLimits};
use starling_transport::{DownReason, Handler, Lane, Link};
use std::sync::{Arc, Mutex};

over_every_fabric!(
    whoever_breaks_the_protocol_loses_the_link_and_nobody_else_does,
    bodies_that_do_not_decode_are_refused_and_counted,
    a_question_whose_time_is_over_never_reaches_the_mailbox,
    a_cancel_that_overtakes_its_question_is_remembered,
    before_its_hello_a_peer_is_no_link,
);

const WINDOW_BYTES: u32 = 1 << 10;

/// Keeps its link and what comes over it, and never answers.
#[derive(Default)]
struct Raw {
    link: Mutex<Option<Link>>,
    frames: Mutex<Vec<Bytes>>,
}

impl Handler for Raw {
    fn up(&self, link: &Link) {
        *self.link.lock().unwrap() = Some(link.clone());
    }

    fn down(&self, _link: &Link, _reason: &DownReason) {
        *self.link.lock().unwrap() = None;
    }

    fn frame(&self, _link: &Link, _lane: Lane, frame: Bytes) {
        self.frames.lock().unwrap().push(frame);
    }

    fn bulk(&self, _link: &Link, _body: Bytes) {}

    fn datagram(&self, _link: &Link, _datagram: Bytes) {}

    fn refused(&self, _peer: &str, _why: &str) {}
}

impl Raw {
    fn link(&self) -> Option<Link> {
        self.link.lock().unwrap().clone()
    }

    fn send(&self, lane: Lane, frame: &[u8]) {
        // The link may be down because of an earlier frame.
        let _ = self.link().map(|link| link.send(lane, Bytes::copy_from_slice(frame)));
    }

    fn got(&self, frame: &[u8]) -> bool {
        self.frames.lock().unwrap().iter().any(|got| got == frame)
    }
}

fn hello() -> Vec<u8> {
    [&[1u8][..], &1u16.to_le_bytes(), &1u16.to_le_bytes(), &WINDOW_BYTES.to_le_bytes()].concat()
}

fn hash_of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

struct RawTell<'a> {
    name: &'a str,
    request: u64,
    replies: u16,
    left_ms: Option<u32>,
    body: &'a [u8],
}

impl RawTell<'_> {
    fn bytes(&self) -> Vec<u8> {
        let type_hash = hash_of(&format!("{}#0", std::any::type_name::<Order>()));
        let mut frame = vec![2, if self.left_ms.is_some() { 2 } else { 0 }];
        frame.extend(type_hash.to_le_bytes());
        frame.extend(self.request.to_le_bytes());
        frame.extend(self.replies.to_le_bytes());
        frame.extend(self.left_ms.map(u32::to_le_bytes).into_iter().flatten());
        frame.push(u8::try_from(self.name.len()).unwrap());
        frame.extend(self.name.as_bytes());
        frame.extend(self.body);
        frame
    }
}

/// `Order::Note(7)`.
const NOTE: &[u8] = &[0, 7];
/// `Order::Count` and `Order::KeepReply` with the first reply.
const COUNT: &[u8] = &[2, 0];
const KEEP_REPLY: &[u8] = &[8, 0];

fn tell(name: &str, body: &[u8]) -> Vec<u8> {
    RawTell { name, request: 0, replies: 0, left_ms: None, body }.bytes()
}

fn question(request: u64, body: &[u8]) -> RawTell<'_> {
    RawTell { name: "probe", request, replies: 1, left_ms: None, body }
}

fn keyed(kind: u8, request: u64, rest: &[u8]) -> Vec<u8> {
    [&[kind][..], &request.to_le_bytes(), &0u16.to_le_bytes(), rest].concat()
}

fn failure(request: u64, index: u16, code: u8) -> Vec<u8> {
    [&[4][..], &request.to_le_bytes(), &index.to_le_bytes(), &[code], &[0; 12]].concat()
}

struct Stage<F> {
    fabric: F,
    node: Node,
    raw: Arc<Raw>,
}

impl<F: Fabric> Stage<F> {
    async fn set() -> Self {
        let node = Node::new("node");
        let limits = RemoteLimits { window_bytes: WINDOW_BYTES, open_asks_max: 4 };
        let handler = node.mesh_handler_with(limits);
        Self::set_with(node, handler).await
    }

    async fn set_with(node: Node, handler: Arc<dyn Handler>) -> Self {
        let fabric = F::new().await;
        fabric.join("node", handler).await;
        let stage = Self { fabric, node, raw: Arc::new(Raw::default()) };
        stage.link().await;
        stage
    }

    /// A fresh life of the raw peer.
    async fn link(&self) {
        self.fabric.join("raw", Arc::clone(&self.raw) as _).await;
        self.raw.frames.lock().unwrap().clear();
        self.fabric.connect("raw", "node").await;
        until("the raw peer is linked", || self.raw.link().is_some_and(|link| link.is_up())).await;
    }

    async fn greet(&self) {
        self.raw.send(Lane::Control, &hello());
        until("it is a link", || self.node.links().iter().any(|link| link.peer().name.as_str() == "raw")).await;
    }
}

async fn whoever_breaks_the_protocol_loses_the_link_and_nobody_else_does<F: Fabric>() {
    let stage = Stage::<F>::set().await;
    let seen = start(&stage.node, "probe").await;
    let friend = Node::new("friend");
    stage.fabric.join("friend", friend.mesh_handler()).await;
    stage.fabric.connect("friend", "node").await;
    until("the friend is linked", || friend.links().len() == 1).await;
    let address = friend.remote::<Order>(&node_name("node"), "probe");
    let mut lines = crate::links::watch(&stage.node).await;
    crate::links::expect(&mut lines, &["friend up"]).await;

    let mut newer = hello();
    newer[1] = 2;
    let mut other_codec = hello();
    other_codec[3] = 9;
    let no_window = [&hello()[..5], &[0; 4]].concat();
    // `Order::Bytes` of 700 bytes; two count as the whole window, and the actor takes neither.
    let half = tell("stuck", &[&[1, 251][..], &700u16.to_le_bytes(), &[0; 700]].concat());
    let many = RawTell { replies: 257, ..question(1, COUNT) }.bytes();
    let unnumbered = question(0, COUNT).bytes();
    let mut flags = tell("probe", NOTE);
    flags[1] = 64;
    let (control, messages) = (Lane::Control, Lane::Messages(1));
    let offences: [(Lane, Vec<Vec<u8>>, &str); 15] = [
        (control, vec![vec![]], "empty frame"),
        (control, vec![vec![0]], "unknown kind 0"),
        (messages, vec![vec![200; 40]], "unknown kind 200"),
        (control, vec![newer], "version 2"),
        (control, vec![other_codec], "codec 9"),
        (control, vec![no_window], "window of 0"),
        (control, vec![hello(), hello()], "second hello"),
        (control, vec![[hello(), vec![0]].concat()], "1 bytes follow"),
        (messages, vec![tell("probe", NOTE)[..20].to_vec()], "ends within its replies"),
        (messages, vec![flags], "flags of a frame"),
        (messages, vec![many], "number of replies of a frame of kind 2 is 257"),
        (messages, vec![unnumbered], "request of a frame of kind 2 is 0"),
        (control, vec![[&[6][..], &[1; 12]].concat()], "more than were taken"),
        (control, vec![failure(1, 0, 77)], "code of a frame of kind 4 is 77"),
        (messages, vec![half.clone(), half, tell("stuck", NOTE)], "window 1024"),
    ];
    let stuck = start(&stage.node, "stuck").await;
    let gate = stuck.gate();
    stage.node.address::<Order>("stuck").tell(TRACE, Order::Block).unwrap();
    until("it stands at the gate", || stuck.is_blocked()).await;
    for (lane, frames, what) in offences {
        // A mesh that dials may have the next link at once: this one must end.
        let link = stage.raw.link().expect("linked");
        for frame in &frames {
            let _ = link.send(lane, Bytes::copy_from_slice(frame));
        }
        until(what, || !link.is_up()).await;
        while let Ok(line) = lines.try_recv() {
            assert!(!line.contains("friend"), "{line}");
        }
        assert_eq!(count(&address).await, 0, "{what}");
        stage.link().await;
    }
    drop(gate);
    assert_eq!(seen.notes(), []);
}

async fn bodies_that_do_not_decode_are_refused_and_counted<F: Fabric>() {
    let stage = Stage::<F>::set().await;
    let seen = start(&stage.node, "probe").await;
    let lane = Lane::Messages(1);
    // Unknown variant, truncated, too long, a huge length, a reply that is not there, one reply twice.
    let bodies: [&[u8]; 6] =
        [&[99], &[0], &[0, 7, 7], &[1, 253, 255, 255, 255, 255, 255, 255, 0, 0], &[2, 1], &[6, 0, 0]];
    for (request, body) in (1..).zip(bodies) {
        stage.raw.send(lane, &question(request, body).bytes());
        until("it is refused", || stage.raw.got(&failure(request, u16::MAX, 8))).await;
    }
    // A reply that the message does not hold, though it says so.
    stage.raw.send(lane, &question(7, NOTE).bytes());
    until("nobody will answer", || stage.raw.got(&failure(7, 0, 1))).await;
    assert_eq!(stage.node.link_stats()[0].dropped.undecodable, 6);
    until("the message itself arrived", || seen.notes() == [7]).await;
    assert!(stage.raw.link().is_some_and(|link| link.is_up()));
    // No more questions than twice the limit are open at a time.
    for request in 10..19 {
        stage.raw.send(lane, &question(request, KEEP_REPLY).bytes());
    }
    until("one too many", || stage.raw.got(&failure(18, u16::MAX, 8))).await;
    stage.raw.send(lane, &question(10, KEEP_REPLY).bytes());
    until("the same twice", || stage.raw.got(&failure(10, u16::MAX, 8))).await;
}

async fn a_question_whose_time_is_over_never_reaches_the_mailbox<F: Fabric>() {
    let stage = Stage::<F>::set().await;
    start(&stage.node, "probe").await;
    let late = RawTell { left_ms: Some(0), ..question(1, COUNT) };
    stage.raw.send(Lane::Messages(1), &late.bytes());
    until("it is refused", || stage.raw.got(&failure(1, u16::MAX, 9))).await;
    let early = RawTell { left_ms: Some(1), ..question(2, COUNT) };
    stage.raw.send(Lane::Messages(1), &early.bytes());
    until("it is answered", || stage.raw.got(&keyed(3, 2, &[0]))).await;
    assert_eq!(stage.node.link_stats()[0].dropped.deadline_exceeded, 1);
}

async fn a_cancel_that_overtakes_its_question_is_remembered<F: Fabric>() {
    let stage = Stage::<F>::set().await;
    start(&stage.node, "probe").await;
    let at_home = stage.node.address::<Order>("probe");
    stage.raw.send(Lane::Messages(1), &keyed(5, 9, &[]));
    stage.raw.send(Lane::Messages(1), &question(9, KEEP_REPLY).bytes());
    stage.raw.send(Lane::Messages(1), &question(10, KEEP_REPLY).bytes());
    until("both came", || crate::support::stats(&stage.node, "probe").handled >= 2).await;
    assert_eq!(at_home.ask(TRACE, PATIENCE, Order::Wanted).await, Ok(1));
    at_home.tell(TRACE, Order::AnswerKept(5)).unwrap();
    until("the other is answered", || stage.raw.got(&keyed(3, 10, &[5]))).await;
    assert!(!stage.raw.got(&keyed(3, 9, &[5])));
}

async fn before_its_hello_a_peer_is_no_link<F: Fabric>() {
    let stage = Stage::<F>::set().await;
    let mut lines = crate::links::watch(&stage.node).await;
    assert!(stage.node.links().is_empty());
    assert!(!stage.node.remote::<Order>(&node_name("raw"), "probe").is_running());
    stage.greet().await;
    crate::links::expect(&mut lines, &["raw up"]).await;
    assert!(stage.node.remote::<Order>(&node_name("raw"), "probe").is_running());
    until("it greets as well", || stage.raw.got(&hello())).await;
}

/// A panic in a task of the mesh would be seen by nobody.
struct NoPanic {
    inner: Arc<dyn Handler>,
    panics: Mutex<Vec<Bytes>>,
}

impl NoPanic {
    fn guard(&self, frame: &Bytes, call: impl FnOnce()) {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err() {
            self.panics.lock().unwrap().push(frame.clone());
        }
    }
}

impl Handler for NoPanic {
    fn up(&self, link: &Link) {
        self.inner.up(link);
    }

    fn down(&self, link: &Link, reason: &DownReason) {
        self.guard(&Bytes::from_static(b"down"), || self.inner.down(link, reason));
    }

    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        self.guard(&frame, || self.inner.frame(link, lane, frame.clone()));
    }

    fn bulk(&self, link: &Link, body: Bytes) {
        self.guard(&body, || self.inner.bulk(link, body.clone()));
    }

    fn datagram(&self, link: &Link, datagram: Bytes) {
        self.inner.datagram(link, datagram);
    }

    fn refused(&self, peer: &str, why: &str) {
        self.inner.refused(peer, why);
    }
}

/// Frames that are nearly right: random bytes, or right ones with some bytes changed.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let right = prop_oneof![
        Just(hello()),
        Just(tell("probe", NOTE)),
        Just(question(1, COUNT).bytes()),
        Just(question(2, KEEP_REPLY).bytes()),
        Just(keyed(3, 1, &[0])),
        Just(keyed(5, 2, &[])),
        Just(keyed(7, 1, &[0])),
        Just(keyed(8, 2, &[1, 0, 0, 0])),
        Just(failure(1, 0, 1)),
    ];
    let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3);
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        (right, changes).prop_map(|(mut frame, changes)| {
            for (at, byte) in changes {
                let at = at.index(frame.len());
                frame[at] = byte;
            }
            frame
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_never_harms_a_node(frames in proptest::collection::vec((0..4u8, garbage()), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let node = Node::new("node");
            let limits = RemoteLimits { window_bytes: WINDOW_BYTES, open_asks_max: 4 };
            let handler = NoPanic { inner: node.mesh_handler_with(limits), panics: Mutex::default() };
            let handler = Arc::new(handler);
            let stage = Stage::<Memory>::set_with(node, Arc::clone(&handler) as _).await;
            start(&stage.node, "probe").await;
            for (lane, frame) in frames {
                match lane {
                    0 => stage.raw.send(Lane::Control, &frame),
                    1 => stage.raw.send(Lane::Rounds, &frame),
                    2 => drop(stage.raw.link().map(|link| link.send_bulk(frame.into()))),
                    _ => stage.raw.send(Lane::Messages(0), &frame),
                }
                tokio::task::yield_now().await;
            }
            // A friend still is served, over its own link.
            let friend = Node::new("friend");
            stage.fabric.join("friend", friend.mesh_handler()).await;
            stage.fabric.connect("friend", "node").await;
            until("the friend is linked", || friend.links().len() == 1).await;
            let address = friend.remote::<Order>(&node_name("node"), "probe");
            // What decodes to `Panic` makes it restart.
            until_answered(&address).await;
            let panics = handler.panics.lock().unwrap().clone();
            assert!(panics.is_empty(), "{panics:?}");
        });
    }
}
