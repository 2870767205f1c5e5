//! The rules. Each takes a fabric, and a test program names those that its fabric has to keep.

use super::{Allowed, Fabric, FabricNode, LIMIT, Pair, Record, Told, name, pair};
use bytes::Bytes;
use starling_transport::{DownReason, Lane, LinkError, Peer};
use std::sync::Arc;
use std::time::Duration;

const LANES: [Lane; 4] = [Lane::Control, Lane::Rounds, Lane::Messages(0), Lane::Messages(1)];

fn numbered(count: u32, size: usize) -> Vec<Bytes> {
    let frame = |number: u32| {
        let mut frame = vec![number as u8; size.max(4)];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        Bytes::from(frame)
    };
    (0..count).map(frame).collect()
}

fn check(records: &[&Arc<Record>]) {
    for record in records {
        record.check();
    }
}

/// Waits for what nobody tells: looks again and again, with a limit.
pub async fn eventually(what: &str, mut look: impl FnMut() -> bool) {
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    let waits = async {
        while !look() {
            looks.tick().await;
        }
    };
    assert!(tokio::time::timeout(LIMIT, waits).await.is_ok(), "waited for {what}");
}

/// Frames of every size arrive on every lane in their order, both ways.
pub async fn frames_of_a_lane_keep_their_order<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, to_a } = pair(&fabric, &Allowed::default()).await;
    let mut frames = numbered(500, 10);
    frames.push(Bytes::new());
    frames.extend(numbered(20, 50_000));
    frames.extend(numbered(300, 1_400));
    for frame in &frames {
        for lane in LANES {
            to_b.send(lane, frame.clone()).unwrap();
            to_a.send(lane, frame.clone()).unwrap();
        }
    }
    for lane in LANES {
        assert!(b.record().frames(lane, frames.len()).await == frames, "{lane:?} to b");
        assert!(a.record().frames(lane, frames.len()).await == frames, "{lane:?} to a");
    }
    check(&[a.record(), b.record()]);
}

/// A lane beyond those that both sides have is one of those.
pub async fn lanes_wrap_at_what_both_have<F: Fabric>(fabric: F) {
    let a = fabric.node("a", 1, &Allowed { lanes: 3, ..Allowed::default() }).await;
    let b = fabric.node("b", 1, &Allowed { lanes: 2, ..Allowed::default() }).await;
    b.connect(&a);
    let link = a.record().link("b", 1).await;
    b.record().link("a", 1).await;
    for lane in [2, 0, 200] {
        link.send(Lane::Messages(lane), Bytes::from(vec![lane])).unwrap();
    }
    assert_eq!(b.record().frames(Lane::Messages(0), 3).await, [&[2][..], &[0], &[200]]);
}

/// The smaller limit of both sides holds, and what passes it is not taken.
pub async fn what_is_too_large_is_refused_at_once<F: Fabric>(fabric: F) {
    let small = Allowed { frame_bytes_max: 1000, bulk_bytes_max: 5000, ..Allowed::default() };
    let (a, b) = (fabric.node("a", 1, &Allowed::default()).await, fabric.node("b", 1, &small).await);
    a.connect(&b);
    let link = a.record().link("b", 1).await;
    let peer = name("b");
    for lane in LANES {
        let refused = link.send(lane, Bytes::from(vec![0; 1001])).unwrap_err();
        assert_eq!(refused, LinkError::TooLarge { peer: peer.clone(), bytes: 1001, limit: 1000 });
        link.send(lane, Bytes::from(vec![1; 1000])).unwrap();
    }
    let refused = link.send_bulk(Bytes::from(vec![0; 5001])).unwrap_err();
    assert_eq!(refused, LinkError::TooLarge { peer: peer.clone(), bytes: 5001, limit: 5000 });
    link.send_bulk(Bytes::from(vec![2; 5000])).unwrap();
    let refused = link.send_datagram(Bytes::from(vec![0; 70_000])).unwrap_err();
    assert!(matches!(refused, LinkError::TooLarge { bytes: 70_000, .. }), "{refused}");
    for lane in LANES {
        assert_eq!(b.record().frames(lane, 1).await, [vec![1; 1000]]);
    }
    assert_eq!(b.record().bodies(1).await, [vec![2; 5000]]);
    check(&[a.record(), b.record()]);
}

/// A sender that is faster than the link is told so; what was taken arrives; control is taken all the while.
pub async fn a_full_queue_refuses_and_what_it_took_arrives<F: Fabric>(fabric: F) {
    let allowed = Allowed { queue_bytes_max: 9 << 20, urgent_bytes_max: 64 << 20, ..Allowed::default() };
    let Pair { a, b, to_b, .. } = pair(&fabric, &allowed).await;
    let frame = Bytes::from(vec![7; 256 << 10]);
    let mut taken = 0;
    let refused = loop {
        match to_b.send(Lane::Messages(0), frame.clone()) {
            Ok(()) => taken += 1,
            Err(refused) => break refused,
        }
        assert!(taken < 100_000, "the queue has no end");
    };
    let is_full = matches!(&refused, LinkError::Full { limit, queued, .. } if *limit == 9 << 20 && queued <= limit);
    assert!(is_full, "{refused}");
    assert!(to_b.queued_bytes() <= 9 << 20);
    to_b.send(Lane::Control, frame.clone()).unwrap();
    to_b.send(Lane::Rounds, frame.clone()).unwrap();
    assert_eq!(b.record().frames(Lane::Messages(0), taken).await.len(), taken);
    b.record().frames(Lane::Control, 1).await;
    b.record().frames(Lane::Rounds, 1).await;
    eventually("the queue to be empty", || to_b.queued_bytes() == 0).await;
    to_b.send(Lane::Messages(0), frame).unwrap();
    b.record().frames(Lane::Messages(0), taken + 1).await;
    check(&[a.record(), b.record()]);
}

/// Bodies that were taken before do not hold up a frame, on whatever lane.
pub async fn bulk_holds_nothing_up<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, .. } = pair(&fabric, &Allowed::default()).await;
    let bodies: Vec<Bytes> = (0..3).map(|value| Bytes::from(vec![value; 8 << 20])).collect();
    for body in &bodies {
        to_b.send_bulk(body.clone()).unwrap();
    }
    for lane in LANES {
        to_b.send(lane, Bytes::from_static(b"small")).unwrap();
    }
    let mut arrived = b.record().bodies(3).await;
    arrived.sort();
    assert!(arrived == bodies, "bodies differ");
    let told = b.record().told();
    let last_body = told.iter().rposition(|told| matches!(told, Told::Bulk(..))).unwrap();
    let frames = told[..last_body].iter().filter(|told| matches!(told, Told::Frame(..))).count();
    assert_eq!(frames, LANES.len(), "frames waited for a body");
    eventually("the queue to be empty", || to_b.queued_bytes() == 0).await;
    check(&[a.record(), b.record()]);
}

/// A datagram may be lost, so it is sent until one has come.
pub async fn datagrams_arrive<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, .. } = pair(&fabric, &Allowed::default()).await;
    eventually("a datagram", || {
        to_b.send_datagram(Bytes::from_static(b"beat")).unwrap();
        b.record().told().iter().any(|told| matches!(told, Told::Datagram(_, bytes) if bytes == &b"beat"[..]))
    })
    .await;
    check(&[a.record(), b.record()]);
}

/// All that was taken before a node closes arrives, on both sides, and both know why the link ended.
pub async fn closing_loses_nothing<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, to_a } = pair(&fabric, &Allowed::default()).await;
    let frames = numbered(2_000, 700);
    for frame in &frames {
        for lane in LANES {
            to_b.send(lane, frame.clone()).unwrap();
        }
        to_a.send(Lane::Messages(1), frame.clone()).unwrap();
    }
    let body = Bytes::from(vec![9; 4 << 20]);
    for _ in 0..3 {
        to_b.send_bulk(body.clone()).unwrap();
        to_a.send_bulk(body.clone()).unwrap();
    }
    a.close(LIMIT).await;
    assert_eq!(a.record().down("b", 1).await, DownReason::Closed);
    assert_eq!(b.record().down("a", 1).await, DownReason::Goodbye);
    for lane in LANES {
        assert!(b.record().frames(lane, frames.len()).await == frames, "{lane:?} to b");
    }
    assert!(a.record().frames(Lane::Messages(1), frames.len()).await == frames, "to a");
    assert!(b.record().bodies(3).await == vec![body.clone(); 3], "bodies to b");
    assert!(a.record().bodies(3).await == vec![body; 3], "bodies to a");
    let refused = to_b.send(Lane::Control, Bytes::new()).unwrap_err();
    assert_eq!(refused, LinkError::Down { peer: name("b") });
    assert!(to_b.send_bulk(Bytes::new()).is_err() && to_b.send_datagram(Bytes::new()).is_err());
    assert!(!to_b.is_up() && !to_a.is_up() && a.links().is_empty() && b.links().is_empty());
    check(&[a.record(), b.record()]);
}

/// Two that close at the same time lose nothing either.
pub async fn both_can_close_at_once<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, to_a } = pair(&fabric, &Allowed::default()).await;
    let frames = numbered(1_000, 3_000);
    for frame in &frames {
        to_b.send(Lane::Rounds, frame.clone()).unwrap();
        to_a.send(Lane::Rounds, frame.clone()).unwrap();
    }
    tokio::join!(a.close(LIMIT), b.close(LIMIT));
    for (node, peer) in [(&a, "b"), (&b, "a")] {
        assert!(node.record().frames(Lane::Rounds, frames.len()).await == frames, "from {peer}");
        let reason = node.record().down(peer, 1).await;
        assert!(matches!(reason, DownReason::Closed | DownReason::Goodbye), "{reason}");
    }
    check(&[a.record(), b.record()]);
}

/// A link that one side closes has its reason there, is lost on the other side, and comes back.
pub async fn a_closed_link_comes_back<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, to_a } = pair(&fabric, &Allowed::default()).await;
    let reason = DownReason::Violation("said nonsense".to_owned());
    to_b.close(reason.clone());
    to_b.close(DownReason::Closed);
    assert_eq!(a.record().down("b", 1).await, reason);
    let there = b.record().down("a", 1).await;
    assert!(matches!(&there, DownReason::Lost(why) if why.contains("said nonsense")), "{there}");
    assert!(!to_a.is_up());
    let again = a.record().link("b", 2).await;
    again.send(Lane::Control, Bytes::from_static(b"again")).unwrap();
    assert_eq!(b.record().frames(Lane::Control, 1).await, [&b"again"[..]]);
    check(&[a.record(), b.record()]);
}

/// Who starts again under its name takes the place of its life before, which cannot come back: whichever name is the greater.
pub async fn a_later_life_replaces_an_earlier_one<F: Fabric>(fabric: F) {
    let allowed = Allowed::default();
    for (stays, restarts) in [("a", "b"), ("z", "y")] {
        let peer = fabric.node(stays, 1, &allowed).await;
        let before = fabric.node(restarts, 5, &allowed).await;
        before.connect(&peer);
        before.record().link(stays, 1).await;
        let after = fabric.node(restarts, 6, &allowed).await;
        after.connect(&peer);
        let link = after.record().link(stays, 1).await;
        assert_eq!(peer.record().down(restarts, 1).await, DownReason::Replaced);
        assert_eq!(before.record().down(stays, 1).await, DownReason::Replaced);
        let latest = Peer { name: name(restarts), incarnation: 6 };
        assert_eq!(peer.record().link(restarts, 2).await.peer(), &latest);
        let (_, why) = before.record().refusal().await;
        assert!(why.contains(&format!("incarnation of {restarts} is 5, and 6 is up")), "{why}");
        link.send(Lane::Control, Bytes::from_static(b"6")).unwrap();
        peer.record().frames(Lane::Control, 1).await;
        assert_eq!(peer.links().len(), 1);
        check(&[peer.record(), before.record(), after.record()]);
    }
}

/// However many dial each other at once: each pair has one link, the same on both sides.
pub async fn who_dials_at_once_has_one_link<F: Fabric>(fabric: F) {
    let names = ["a", "b", "c", "d", "e"];
    let mut nodes = Vec::new();
    for name in names {
        nodes.push(fabric.node(name, 1, &Allowed::default()).await);
    }
    for (from, node) in nodes.iter().enumerate() {
        for (to, other) in nodes.iter().enumerate() {
            if from != to {
                node.connect(other);
                node.connect(other);
            }
        }
    }
    for (node, own) in nodes.iter().zip(names) {
        for other in names.into_iter().filter(|other| *other != own) {
            node.record().link(other, 1).await;
        }
    }
    // A link that is the same on both sides carries a frame, and the answer.
    let all = names.len() - 1;
    for (lane, text) in [(Lane::Control, "ask"), (Lane::Rounds, "answer")] {
        for node in &nodes {
            let links = node.links();
            assert_eq!(links.len(), all, "{links:?}");
            for link in links {
                link.send(lane, Bytes::from_static(text.as_bytes())).unwrap();
            }
        }
        for node in &nodes {
            node.record().frames(lane, all).await;
        }
    }
    check(&nodes.iter().map(FabricNode::record).collect::<Vec<_>>());
}

/// A peer that is gone without a word is noticed by its silence, and its next life is found where it is then.
pub async fn a_peer_that_crashed_is_silent_and_comes_back<F: Fabric>(fabric: F) {
    let Pair { a, b, to_b, .. } = pair(&fabric, &Allowed::default()).await;
    b.crash();
    let reason = a.record().down("b", 1).await;
    assert!(matches!(reason, DownReason::Silent(_)), "{reason}");
    assert!(!to_b.is_up());
    let back = fabric.node("b", 2, &Allowed::default()).await;
    a.connect(&back);
    assert_eq!(a.record().link("b", 2).await.peer().incarnation, 2);
    back.record().link("a", 1).await;
    check(&[a.record()]);
}

/// A peer that reads nothing of what must not wait breaks the rules: the link ends rather than the memory.
pub async fn too_much_control_ends_the_link<F: Fabric>(fabric: F) {
    let allowed = Allowed { urgent_bytes_max: 9 << 20, ..Allowed::default() };
    let Pair { a, b, to_b, .. } = pair(&fabric, &allowed).await;
    let frame = Bytes::from(vec![7; 1 << 20]);
    let mut taken = 0;
    let refused = loop {
        match to_b.send(Lane::Rounds, frame.clone()) {
            Ok(()) => taken += 1,
            Err(refused) => break refused,
        }
        assert!(taken < 100_000, "the queue has no end");
    };
    assert!(matches!(refused, LinkError::Full { .. }), "{refused}");
    let reason = a.record().down("b", 1).await;
    assert!(matches!(reason, DownReason::Violation(_)), "{reason}");
    assert!(matches!(b.record().down("a", 1).await, DownReason::Lost(_)));
    check(&[a.record(), b.record()]);
}
