//! A member of a cluster in one process, joined to the others in memory.

use crate::support::{Gate, Seen, backends, settings};
use starling_actors::{Node, NodeName, Peer};
use starling_serving::log::LocalLogs;
use starling_serving::{MemberSettings, Serving, Settings};
use starling_transport::memory::{Limits, Mesh, Network};
use std::sync::Arc;

pub fn name(member: usize) -> NodeName {
    NodeName::new(&format!("node-{member}")).expect("a name")
}

#[allow(dead_code, reason = "not every test that shares this file asks the node or the mesh")]
pub struct Member {
    pub node: Node,
    pub serving: Serving,
    pub seen: Arc<Seen>,
    pub gate: Arc<Gate>,
    pub mesh: Mesh,
}

impl Member {
    /// One of so many members, with a rank each, in one of its lives.
    pub async fn start(
        (network, logs): (&Network, &LocalLogs),
        (me, members): (usize, usize),
        life: u64,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let mut settings = settings(1, 200);
        settings.members = (0..members).map(|member| MemberSettings { name: name(member), ranks: 1 }).collect();
        settings.me = me;
        change(&mut settings);
        let node = Node::new(name(me).as_str());
        let (gate, seen) = (Arc::new(Gate::default()), Arc::new(Seen::default()));
        let backends = backends(&settings, &gate);
        let logs = Arc::new(logs.clone());
        let serving =
            Serving::start_with(&node, settings, backends, Arc::clone(&seen) as _, logs).await.expect("starts");
        let peer = Peer { name: name(me), incarnation: life };
        let mesh = network.join(peer, Limits::default(), node.mesh_handler());
        (0..members).filter(|other| *other != me).for_each(|other| mesh.connect(&name(other)));
        Self { node, serving, seen, gate, mesh }
    }
}
