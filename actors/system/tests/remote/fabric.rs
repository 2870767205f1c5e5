//! The meshes that the rules are tested over.

use crate::support::until;
use starling_actors::{Node, RemoteLimits};
use starling_transport::{
    Authority, Credentials, DownReason, Handler, Limits, Mesh, MeshSettings, NodeName, Peer, Timings, memory,
};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

/// QUIC over loopback. A cut sends both sides' dialers to a port where nobody listens and ends the link.
pub struct Quic {
    authority: Authority,
    nodes: Mutex<BTreeMap<String, QuicNode>>,
    lives: Mutex<u64>,
}

struct QuicNode {
    mesh: Mesh,
    /// Whom it was asked to reach.
    asked: Vec<String>,
}

/// Reserved, so nobody answers there.
const NOWHERE: &str = "127.0.0.1:1";

impl Quic {
    fn mesh(&self, name: &str) -> Mesh {
        self.nodes.lock().unwrap()[name].mesh.clone()
    }

    /// Sends the dialers of the two, if they were asked for each other, to each other or nowhere.
    fn direct(&self, a: &str, b: &str, reachable: bool) {
        let nodes = self.nodes.lock().unwrap();
        for (from, to) in [(a, b), (b, a)] {
            let (Some(from), Some(to)) = (nodes.get(from), nodes.get(to).map(|node| (to, &node.mesh))) else {
                continue;
            };
            if from.asked.iter().any(|asked| asked == to.0) {
                let address = if reachable { to.1.local_addr().to_string() } else { NOWHERE.to_owned() };
                from.mesh.connect(node_name(to.0), address);
            }
        }
    }
}

impl Fabric for Quic {
    async fn new() -> Self {
        Self { authority: Authority::new("flock").unwrap(), nodes: Mutex::default(), lives: Mutex::new(0) }
    }

    async fn join(&self, name: &str, handler: Arc<dyn Handler>) {
        let incarnation = {
            let mut lives = self.lives.lock().unwrap();
            *lives += 1;
            *lives
        };
        let of_node = self.authority.issue(&node_name(name), 1).unwrap();
        let authority = self.authority.certificate_pem();
        let (certificate, key) = (of_node.certificate_pem, of_node.key_pem);
        let credentials = Credentials::from_pem(authority.as_bytes(), certificate.as_bytes(), key.as_bytes()).unwrap();
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let limits = Limits { bulk_bytes_max: BULK_BYTES_MAX, ..Limits::default() };
        // Whoever comes back is found soon.
        let timings = Timings { back_off_max: Duration::from_millis(200), ..Timings::default() };
        let settings = MeshSettings { incarnation, settings_digest: 1, listen, credentials, limits, timings };
        let mesh = Mesh::start(settings, handler).await.unwrap();
        let earlier = self.nodes.lock().unwrap().insert(name.to_owned(), QuicNode { mesh, asked: Vec::new() });
        if let Some(earlier) = earlier {
            drop(earlier.mesh);
            let others: Vec<String> =
                self.nodes.lock().unwrap().keys().filter(|other| *other != name).cloned().collect();
            others.iter().for_each(|other| self.direct(other, name, true));
        }
    }

    async fn connect(&self, a: &str, b: &str) {
        self.nodes.lock().unwrap().get_mut(a).unwrap().asked.push(b.to_owned());
        self.direct(a, b, true);
    }

    async fn cut(&self, a: &str, b: &str) {
        self.direct(a, b, false);
        for link in self.mesh(a).links().into_iter().filter(|link| link.peer().name == node_name(b)) {
            link.close(DownReason::Closed);
        }
    }

    async fn heal(&self, a: &str, b: &str) {
        self.direct(a, b, true);
    }

    async fn close(&self, name: &str) {
        self.mesh(name).close(crate::support::PATIENCE).await;
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

        mod quic {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $rule() {
                    super::$rule::<$crate::fabric::Quic>().await;
                }
            )*
        }
    };
}
pub(crate) use over_every_fabric;
