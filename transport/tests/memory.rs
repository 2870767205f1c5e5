//! The mesh's twin in memory keeps the same rules, as far as its promises go.

mod suite;

use starling_transport::memory::{Limits, Mesh, Network};
use starling_transport::{Link, Peer};
use std::sync::Arc;
use std::time::Duration;
use suite::{Allowed, Fabric, FabricNode, Record, name, rules};

struct Memory(Network);

struct MemoryNode {
    mesh: Mesh,
    record: Arc<Record>,
    network: Network,
}

impl Fabric for Memory {
    type Node = MemoryNode;

    async fn node(&self, node: &str, incarnation: u64, allowed: &Allowed) -> MemoryNode {
        let Allowed { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, .. } = *allowed;
        let limits = Limits { lanes, frame_bytes_max, bulk_bytes_max, queue_bytes_max, ..Limits::default() };
        let record = Arc::<Record>::default();
        let mesh = self.0.join(Peer { name: name(node), incarnation }, limits, record.clone());
        MemoryNode { mesh, record, network: self.0.clone() }
    }
}

impl FabricNode for MemoryNode {
    fn record(&self) -> &Arc<Record> {
        &self.record
    }

    fn connect(&self, other: &Self) {
        self.mesh.connect(&other.mesh.peer().name);
    }

    fn links(&self) -> Vec<Link> {
        self.mesh.links()
    }

    async fn close(&self, deadline: Duration) {
        self.mesh.close(deadline).await;
    }

    fn crash(self) {
        self.network.crash(&self.mesh.peer().name);
    }
}

macro_rules! kept_in_memory {
    ($($rule:ident),* $(,)?) => {
        $(#[tokio::test] async fn $rule() { rules::$rule(Memory(Network::new())).await })*
    };
}

kept_in_memory!(
    frames_of_a_lane_keep_their_order,
    lanes_wrap_at_what_both_have,
    a_full_queue_refuses_and_what_it_took_arrives,
    bulk_holds_nothing_up,
    datagrams_arrive,
    closing_loses_nothing,
    both_can_close_at_once,
    who_dials_at_once_has_one_link,
);
