//! The mesh over QUIC on loopback.

mod suite;

#[path = "suite/quic.rs"]
mod quic;

use bytes::Bytes;
use quic::{Quic, start, start_on_threads};
use starling_transport::{DownReason, Lane, Mesh, MeshSettings};
use std::sync::Arc;
use std::time::Duration;
use suite::{Allowed, FabricNode, Record, Told, name, rules};

macro_rules! kept_by_quic {
    ($($rule:ident),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $rule() { rules::$rule(Quic::new()).await })*
    };
}

kept_by_quic!(
    frames_of_a_lane_keep_their_order,
    lanes_wrap_at_what_both_have,
    what_is_too_large_is_refused_at_once,
    a_full_queue_refuses_and_what_it_took_arrives,
    bulk_holds_nothing_up,
    datagrams_arrive,
    closing_loses_nothing,
    both_can_close_at_once,
    a_closed_link_comes_back,
    a_later_life_replaces_an_earlier_one,
    who_dials_at_once_has_one_link,
    a_peer_that_crashed_is_silent_and_comes_back,
    too_much_control_ends_the_link,
);

/// Nothing of a mesh runs on when the last handle to it is gone: its handler is let go.
#[tokio::test]
async fn nothing_is_left_of_a_mesh_that_is_dropped() {
    let quic = Quic::new();
    let a = start(quic.settings(&name("a"), 1, &Allowed::default())).await;
    let record = Arc::<Record>::default();
    let mesh = Mesh::start(quic.settings(&name("b"), 1, &Allowed::default()), record.clone()).await.unwrap();
    mesh.connect(name("a"), a.mesh.local_addr().to_string());
    mesh.connect(name("nobody"), "127.0.0.1:1".to_owned());
    record.link("a", 1).await;
    drop(mesh);
    assert_eq!(record.down("a", 1).await, DownReason::Closed);
    rules::eventually("the mesh to let its handler go", || Arc::strong_count(&record) == 1).await;
    assert!(matches!(a.record.down("b", 1).await, DownReason::Lost(_)));
    a.record.check();
}

/// A socket is free again once the mesh is closed, also while someone keeps a link that ended.
#[tokio::test]
async fn a_closed_mesh_frees_its_address() {
    let quic = Quic::new();
    let suite::Pair { a, b, to_b, .. } = suite::pair(&quic, &Allowed::default()).await;
    let listen = a.mesh.local_addr();
    a.close(suite::LIMIT).await;
    drop(a);
    rules::eventually("the address to be free", || std::net::UdpSocket::bind(listen).is_ok()).await;
    let again = start(MeshSettings { listen, ..quic.settings(&name("a"), 2, &Allowed::default()) }).await;
    again.connect(&b);
    again.record.link("b", 1).await;
    assert!(!to_b.is_up());
}

/// Links end at random on all sides while frames are under way, and every handler hears of each in its order; at the end all are back.
#[tokio::test]
async fn the_order_holds_while_links_end_at_random() {
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];
    let quic = Quic::new();
    let mut nodes = Vec::new();
    for own in NAMES {
        let mut settings = quic.settings(&name(own), 1, &Allowed::default());
        // So that a link that fell is soon dialed again.
        (settings.timings.back_off_min, settings.timings.back_off_max) =
            (Duration::from_millis(1), Duration::from_millis(20));
        nodes.push(start_on_threads(3, settings).await);
    }
    for (node, other) in nodes.iter().flat_map(|node| nodes.iter().map(move |other| (node, other))) {
        if node.name != other.name {
            node.connect(other);
        }
    }
    let (mut random, mut ended) = (1u64, 0);
    let mut paces = tokio::time::interval(Duration::from_millis(2));
    while ended < 200 {
        for link in nodes.iter().flat_map(|node| node.mesh.links()) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            for lane in [Lane::Control, Lane::Rounds, Lane::Messages(0), Lane::Messages(1)] {
                for _ in 0..40 {
                    // Down by now, perhaps: by a side that was picked before.
                    let _ = link.send(lane, Bytes::from(vec![1; 300]));
                }
            }
            if random >> 60 == 0 {
                link.close(DownReason::Violation("at random".to_owned()));
                ended += 1;
            }
        }
        paces.tick().await;
    }
    let others = NAMES.len() - 1;
    rules::eventually("all links", || nodes.iter().all(|node| node.mesh.links().len() == others)).await;
    for node in &nodes {
        node.close(suite::LIMIT).await;
        node.record.check();
        let told = node.record.told();
        let ups = told.iter().filter(|told| matches!(told, Told::Up(_))).count();
        let downs = told.iter().filter(|told| matches!(told, Told::Down(..))).count();
        assert!(ups == downs && ups > others, "{ups} up, {downs} down");
    }
}
