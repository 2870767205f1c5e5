//! The meshes that the rules are tested over.

use crate::support::until;
use starling_actors::{Node, RemoteLimits};
use starling_transport::{Handler, NodeName, Peer, memory};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub fn node_name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

/// The largest body of every fabric: small, because unoptimised code encodes it byte by byte.
pub const BULK_BYTES_MAX: usize = 2 << 20;

/// A kind of mesh.
pub trait Fabric: Sized {
    async fn new() -> Self;
    /// Takes part under `name`; an earlier life of that name is replaced.
    async fn join(&self, name: &str, handler: Arc<dyn Handler>);
    /// Asks for a link from `a` to `b`, from now on.
    async fn connect(&self, a: &str, b: &str);
    /// Nothing passes between the two.
    async fn cut(&self, a: &str, b: &str);
    async fn heal(&self, a: &str, b: &str);
    /// Says goodbye to all.
    async fn close(&self, name: &str);
}

pub struct Memory {
    network: memory::Network,
    meshes: Mutex<BTreeMap<String, memory::Mesh>>,
    lives: Mutex<u64>,
}

impl Memory {
    fn mesh(&self, name: &str) -> memory::Mesh {
        self.meshes.lock().unwrap()[name].clone()
    }
}

impl Fabric for Memory {
    async fn new() -> Self {
        Self { network: memory::Network::new(), meshes: Mutex::default(), lives: Mutex::new(0) }
    }

    async fn join(&self, name: &str, handler: Arc<dyn Handler>) {
        let incarnation = {
            let mut lives = self.lives.lock().unwrap();
            *lives += 1;
            *lives
        };
        let peer = Peer { name: node_name(name), incarnation };
        let limits = memory::Limits { bulk_bytes_max: BULK_BYTES_MAX, ..memory::Limits::default() };
        let mesh = self.network.join(peer, limits, handler);
        self.meshes.lock().unwrap().insert(name.to_owned(), mesh);
    }

    async fn connect(&self, a: &str, b: &str) {
        self.mesh(a).connect(&node_name(b));
    }

    async fn cut(&self, a: &str, b: &str) {
        self.network.cut(&node_name(a), &node_name(b));
    }

    async fn heal(&self, a: &str, b: &str) {
        self.network.heal(&node_name(a), &node_name(b));
    }

    async fn close(&self, name: &str) {
        let mesh = self.mesh(name);
        mesh.close(crate::support::PATIENCE).await;
    }
}

/// Two nodes with a link between them.
pub struct Two<F> {
    pub fabric: F,
    pub a: Node,
    pub b: Node,
}

impl<F: Fabric> Two<F> {
    pub async fn linked() -> Self {
        Self::linked_with(RemoteLimits::default()).await
    }

    pub async fn linked_with(limits: RemoteLimits) -> Self {
        let fabric = F::new().await;
        let (a, b) = (Node::new("a"), Node::new("b"));
        fabric.join("a", a.mesh_handler_with(limits)).await;
        fabric.join("b", b.mesh_handler_with(limits)).await;
        fabric.connect("a", "b").await;
        let two = Self { fabric, a, b };
        two.are_linked().await;
        two
    }

    pub async fn are_linked(&self) {
        until("both are linked", || self.a.links().len() == 1 && self.b.links().len() == 1).await;
    }

    pub async fn are_apart(&self) {
        until("both are apart", || self.a.links().is_empty() && self.b.links().is_empty()).await;
    }
}

/// Makes a test of each rule over each kind of mesh.
macro_rules! over_every_fabric {
    ($($rule:ident),* $(,)?) => {
        mod memory {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $rule() {
                    super::$rule::<$crate::fabric::Memory>().await;
                }
            )*
        }
    };
}
pub(crate) use over_every_fabric;
