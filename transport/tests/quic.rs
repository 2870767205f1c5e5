//! The mesh over QUIC on loopback.

mod suite;

use starling_transport::{Authority, Credentials, Limits, Link, Mesh, MeshSettings, NodeName, Timings};
use std::sync::Arc;
use std::time::Duration;
use suite::{Allowed, Fabric, FabricNode, Record, name, rules};

/// Nodes of one cluster on loopback.
struct Quic {
    authority: Authority,
}

impl Quic {
    fn new() -> Self {
        Self { authority: Authority::new("test").unwrap() }
    }

    fn credentials(&self, node: &NodeName) -> Credentials {
        let certificate = self.authority.issue(node, 1).unwrap();
        let authority = self.authority.certificate_pem();
        let (certificate, key) = (certificate.certificate_pem, certificate.key_pem);
        Credentials::from_pem(authority.as_bytes(), certificate.as_bytes(), key.as_bytes()).unwrap()
    }

    fn settings(&self, node: &NodeName, incarnation: u64, allowed: &Allowed) -> MeshSettings {
        let Allowed { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, urgent_bytes_max } = *allowed;
        let sizes =
            Limits { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, urgent_bytes_max, ..Limits::default() };
        MeshSettings {
            incarnation,
            settings_digest: 7,
            listen: "127.0.0.1:0".parse().unwrap(),
            credentials: self.credentials(node),
            limits: sizes,
            timings: Timings::default(),
        }
    }
}

async fn start(settings: MeshSettings) -> QuicNode {
    let (record, name) = (Arc::<Record>::default(), settings.credentials.name().clone());
    let mesh = Mesh::start(settings, record.clone()).await.unwrap();
    QuicNode { mesh, record, name }
}

struct QuicNode {
    mesh: Mesh,
    record: Arc<Record>,
    name: NodeName,
}

impl Fabric for Quic {
    type Node = QuicNode;

    async fn node(&self, node: &str, incarnation: u64, allowed: &Allowed) -> QuicNode {
        start(self.settings(&name(node), incarnation, allowed)).await
    }
}

impl FabricNode for QuicNode {
    fn record(&self) -> &Arc<Record> {
        &self.record
    }

    fn connect(&self, other: &Self) {
        self.mesh.connect(other.name.clone(), other.mesh.local_addr().to_string());
    }

    fn links(&self) -> Vec<Link> {
        self.mesh.links()
    }

    async fn close(&self, deadline: Duration) {
        self.mesh.close(deadline).await;
    }

    fn crash(self) {
        drop(self.mesh);
    }
}

macro_rules! kept_by_quic {
    ($($rule:ident),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $rule() { rules::$rule(Quic::new()).await })*
    };
}

kept_by_quic!(frames_of_a_lane_keep_their_order);
