//! The mesh over QUIC on loopback.

mod suite;

#[path = "suite/quic.rs"]
mod quic;

use quic::{Quic, start};
use starling_transport::{DownReason, Mesh, MeshSettings};
use std::sync::Arc;
use suite::{Allowed, FabricNode, Record, name, rules};

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
