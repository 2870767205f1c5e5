//! A node: the names of its actors, their trees and the hook. A plain value; two nodes in one process share nothing.

use crate::address::{Address, SendError, Slot};
use crate::entry::{ActorState, ActorStats, Entry};
use crate::hook::{Hook, NoHook, SpanRecord};
use crate::remote::{Exposed, LinkEvent, LinkStats, MeshHandler, Remote, RemoteLimits, RemoteTarget};
use crate::tree::{StopOutcome, Tree};
use serde::Serialize;
use serde::de::DeserializeOwned;
use starling_transport::{Handler, Link, NodeName};
use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Cheap to clone; all clones are the same node.
#[derive(Clone)]
pub struct Node {
    pub(crate) shared: Arc<NodeShared>,
}

pub(crate) struct NodeShared {
    name: Arc<str>,
    hook: Arc<dyn Hook>,
    registry: Mutex<Registry>,
    remote: Arc<Remote>,
}

/// Invariants: (R1) every entry belongs to a tree of `trees` or to one that is just starting; (R2) a slot is listed exactly while
/// somebody holds it.
#[derive(Default)]
struct Registry {
    slots: BTreeMap<(Arc<str>, TypeId), Weak<dyn Any + Send + Sync>>,
    entries: BTreeMap<Arc<str>, Arc<Entry>>,
    /// In the order of their start.
    trees: Vec<Tree>,
}

impl Node {
    /// A node that reports nothing.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self::with_hook(name, Arc::new(NoHook))
    }

    /// A node that reports to `hook`.
    pub fn with_hook(name: impl Into<Arc<str>>, hook: Arc<dyn Hook>) -> Self {
        Self {
            shared: Arc::new(NodeShared {
                name: name.into(),
                hook,
                registry: Mutex::default(),
                remote: Arc::default(),
            }),
        }
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The address of the actor called `name`, which need not run yet.
    pub fn address<M: Send + 'static>(&self, name: &str) -> Address<M> {
        Address::local(self.slot(name))
    }

    /// The address of the actor called `name` on the node `peer`. It follows that node's name over all links; while none is up,
    /// sends fail at once. For this node's own name it is the same as [`Node::address`].
    pub fn remote<M>(&self, peer: &NodeName, name: &str) -> Address<M>
    where
        M: Serialize + DeserializeOwned + Send + 'static,
    {
        self.remote_schema(peer, name, 0)
    }

    /// Like [`Node::remote`], for version `schema` of the type.
    pub fn remote_schema<M>(&self, peer: &NodeName, name: &str, schema: u32) -> Address<M>
    where
        M: Serialize + DeserializeOwned + Send + 'static,
    {
        if peer.as_str() == self.name() {
            return self.address(name);
        }
        let remote = Arc::clone(&self.shared.remote);
        Address::remote(RemoteTarget::new(remote, peer.clone(), name.into(), schema))
    }

    /// Lets peers send messages of type `M` to the actor called `name`, which need not run yet. Nothing else is reachable.
    pub fn expose<M>(&self, name: &str)
    where
        M: Serialize + DeserializeOwned + Send + 'static,
    {
        self.expose_schema::<M>(name, 0);
    }

    /// Like [`Node::expose`], for version `schema` of the type: a number to raise whenever the type changes. Peers that know
    /// another version are refused, not misread.
    pub fn expose_schema<M>(&self, name: &str, schema: u32)
    where
        M: Serialize + DeserializeOwned + Send + 'static,
    {
        let gate = Exposed::<M>::new(self.slot(name), schema);
        self.shared.remote.expose(name.into(), Arc::new(gate));
    }

    /// What the node's mesh reports to, with the default limits.
    pub fn mesh_handler(&self) -> Arc<dyn Handler> {
        self.mesh_handler_with(RemoteLimits::default())
    }

    /// What the node's mesh reports to.
    pub fn mesh_handler_with(&self, limits: RemoteLimits) -> Arc<dyn Handler> {
        Arc::new(MeshHandler::new(&self.shared.remote, limits))
    }

    /// The links over which messages can be sent right now, by name.
    pub fn links(&self) -> Vec<Link> {
        self.shared.remote.links()
    }

    /// What passed over the links to each peer, by name.
    pub fn link_stats(&self) -> Vec<LinkStats> {
        self.shared.remote.stats()
    }

    /// Tells the actor at `address` of every link that comes up or goes down, beginning with those that are up. Events pass the
    /// limit of its mailbox. An actor subscribes in `started`: a new life then begins with the links of its time, and replaces
    /// the subscription of the old one.
    pub fn subscribe_links<M: Send + 'static>(
        &self,
        address: &Address<M>,
        message: impl Fn(LinkEvent) -> M + Send + Sync + 'static,
    ) {
        let listener = address.clone();
        let listener = Box::new(move |event| listener.notify(message(event)));
        self.shared.remote.listen(Arc::clone(address.label()), listener);
    }

    /// The hook it was made with.
    pub fn hook(&self) -> &dyn Hook {
        self.shared.hook.as_ref()
    }

    /// Reports a finished span, unless its parent is not sampled.
    pub fn span(&self, span: SpanRecord) {
        if span.parent.is_sampled() {
            self.shared.hook.span(span);
        }
    }

    /// Every actor and supervisor, each supervisor before its children, trees in the order of their start.
    pub fn actors(&self) -> Vec<ActorStats> {
        let trees = self.shared.lock().trees.clone();
        trees.iter().flat_map(Tree::actors).collect()
    }

    /// Stops all trees, the last started first, within `deadline` in all. Always completes: what does not end is killed.
    pub async fn stop(&self, deadline: Duration) -> StopOutcome {
        let until = tokio::time::Instant::now() + deadline;
        let mut worst = StopOutcome::Drained;
        let mut trees = self.shared.lock().trees.clone();
        while let Some(tree) = trees.pop() {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            worst = worst.max(tree.stop(left).await);
        }
        worst
    }

    /// For tests: the named actor panics once it has handled the messages that wait before this one.
    #[doc(hidden)]
    pub fn inject_panic(&self, name: &str) -> Result<(), SendError> {
        let entry = self.shared.lock().entries.get(name).cloned();
        match entry {
            Some(entry) if entry.inject_panic() => Ok(()),
            _ => Err(SendError::NotRunning { name: name.into() }),
        }
    }

    pub(crate) fn slot<M: Send + 'static>(&self, name: &str) -> Arc<Slot<M>> {
        let mut registry = self.shared.lock();
        let key = (Arc::from(name), TypeId::of::<M>());
        let known = registry.slots.get(&key).and_then(Weak::upgrade);
        if let Some(slot) = known.and_then(|slot| slot.downcast::<Slot<M>>().ok()) {
            return slot;
        }
        let slot = Arc::new(Slot::new(Arc::clone(&key.0), Arc::downgrade(&self.shared)));
        let erased: Arc<dyn Any + Send + Sync> = Arc::clone(&slot) as _;
        registry.slots.insert(key, Arc::downgrade(&erased));
        slot
    }

    /// Takes the names of a new tree: all or none. The error is the first name that is taken.
    pub(crate) fn enlist(&self, entries: &[Arc<Entry>]) -> Result<(), Arc<str>> {
        let mut registry = self.shared.lock();
        for (index, entry) in entries.iter().enumerate() {
            if registry.entries.contains_key(&entry.name) {
                for taken in &entries[..index] {
                    registry.entries.remove(&taken.name);
                }
                return Err(Arc::clone(&entry.name));
            }
            let name = Arc::clone(&entry.name);
            registry.entries.insert(name, Arc::clone(entry));
        }
        Ok(())
    }

    pub(crate) fn add_tree(&self, tree: Tree) {
        self.shared.lock().trees.push(tree);
    }

    /// Gives the names of an ended tree back.
    pub(crate) fn delist(&self, entries: &[Arc<Entry>]) {
        let mut registry = self.shared.lock();
        for entry in entries {
            registry.entries.remove(&entry.name);
        }
        let ended = |tree: &Tree| entries.first().is_some_and(|root| tree.has_root(root));
        registry.trees.retain(|tree| !ended(tree));
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Node").field(&self.shared.name).finish()
    }
}

impl NodeShared {
    /// A panic elsewhere cannot leave the registry half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the running actor `name` takes, when it is not `M`.
    pub fn other_message_type<M: 'static>(&self, name: &str) -> Option<&'static str> {
        let registry = self.lock();
        let entry = registry.entries.get(name)?;
        let (id, text) = entry.message?;
        let running = entry.state() == ActorState::Running;
        (running && id != TypeId::of::<M>()).then_some(text)
    }

    /// The last holder of a slot is gone; a new one may have appeared under the same key since.
    pub fn forget_slot<M: 'static>(&self, name: &Arc<str>) {
        let mut registry = self.lock();
        let key = (Arc::clone(name), TypeId::of::<M>());
        if registry.slots.get(&key).is_some_and(|slot| slot.strong_count() == 0) {
            registry.slots.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Actor, ActorError, ActorSpec, Context, Strategy, SupervisorSpec, TraceContext};

    struct Idle;

    impl Actor for Idle {
        type Message = ();

        fn handle(&mut self, _context: &mut Context<'_, ()>, (): ()) -> Result<(), ActorError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn names_that_nobody_holds_leave_nothing_in_the_registry() {
        let node = Node::new("n");
        for round in 0..100 {
            let name = format!("a-{round}");
            let address = node.address::<()>(&name);
            let spec = SupervisorSpec::new("s", Strategy::OneForOne);
            let tree = node.start(spec.child(ActorSpec::new(name, || Idle))).await.unwrap();
            address.tell(TraceContext::NONE, ()).unwrap();
            tree.stop(Duration::from_secs(60)).await;
            drop(node.address::<u64>("never-started"));
        }
        let registry = node.shared.lock();
        assert_eq!(registry.slots.len(), 0);
        assert_eq!(registry.entries.len(), 0);
        assert_eq!(registry.trees.len(), 0);
    }

    #[tokio::test]
    async fn all_addresses_of_a_name_share_one_slot() {
        let node = Node::new("n");
        let (first, second) = (node.slot::<()>("a"), node.slot::<()>("a"));
        assert!(Arc::ptr_eq(&first, &second));
        drop(first);
        assert_eq!(node.shared.lock().slots.len(), 1, "one holder is left");
        drop(second);
        assert_eq!(node.shared.lock().slots.len(), 0);
    }
}
