//! The mesh's twin in memory: the same promises as over the network, between meshes of one process, for tests and simulations.
//!
//! A [`Network`] is a plain value; two of them share nothing. Everything runs on tokio tasks, so paused time works. Frames are
//! handed over as fast as the receiving task runs: there is no latency and no loss, only links that go down.

use crate::link::{DownReason, Handler, Lane, Link, LinkError, NodeName, Peer, Port};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A receiving task lets others run after this many frames.
const FRAMES_A_TURN: u32 = 64;

/// What one mesh takes for sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub frame_bytes_max: usize,
    pub bulk_bytes_max: usize,
    /// By default what a QUIC datagram holds on any path, rounded down.
    pub datagram_bytes_max: usize,
    /// Messages and bulk that wait for one peer.
    pub queue_bytes_max: usize,
    /// Lanes of messages.
    pub lanes: u8,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            frame_bytes_max: 1 << 20,
            bulk_bytes_max: 64 << 20,
            datagram_bytes_max: 1100,
            queue_bytes_max: 16 << 20,
            lanes: 4,
        }
    }
}

/// Where meshes of one process meet. Cheap to clone; all clones are the same network.
#[derive(Clone, Default)]
pub struct Network {
    state: Arc<Mutex<State>>,
}

/// Two names, the smaller one first.
type Pair = (NodeName, NodeName);

/// Invariants: (M1) a link of `wires` that is up joins the members that stand under its names now; (M2) whoever is wished for by
/// somebody, is a member and is not cut off has a link that is up, unless one of the two closed it.
#[derive(Default)]
struct State {
    members: BTreeMap<NodeName, Arc<Member>>,
    /// Who asked for a link to whom.
    wishes: BTreeSet<(NodeName, NodeName)>,
    cut: BTreeSet<Pair>,
    wires: BTreeMap<Pair, Arc<Wire>>,
    /// Held by the task of a link's end: the next link of the same two names is up only after this one is down.
    seats: BTreeMap<(NodeName, NodeName), Arc<tokio::sync::Mutex<()>>>,
}

struct Member {
    peer: Peer,
    limits: Limits,
    handler: Arc<dyn Handler>,
}

impl Network {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes part as `peer`. An older life of the same name is replaced: its links end.
    pub fn join(&self, peer: Peer, limits: Limits, handler: Arc<dyn Handler>) -> Mesh {
        let mut state = self.lock();
        let lost = || DownReason::Lost("another life of this name joined".to_owned());
        state.leave(&peer.name, &lost(), &DownReason::Replaced);
        let member = Arc::new(Member { peer, limits, handler });
        state.members.insert(member.peer.name.clone(), Arc::clone(&member));
        state.establish();
        drop(state);
        Mesh(Arc::new(Membership { network: self.clone(), member }))
    }

    /// Nothing passes between the two from now on: their link is lost on both sides.
    pub fn cut(&self, a: &NodeName, b: &NodeName) {
        let mut state = self.lock();
        state.cut.insert(pair(a, b));
        if let Some(wire) = state.wires.remove(&pair(a, b)) {
            let lost = DownReason::Lost("cut".to_owned());
            wire.end(0, &lost, &lost);
        }
    }

    /// Undoes a cut: whoever asked for the link has it again.
    pub fn heal(&self, a: &NodeName, b: &NodeName) {
        let mut state = self.lock();
        state.cut.remove(&pair(a, b));
        state.establish();
    }

    /// The process of this name dies: it hears nothing of it, its peers lose their links.
    pub fn crash(&self, name: &NodeName) {
        let lost = DownReason::Lost("peer crashed".to_owned());
        self.lock().leave(name, &lost, &lost);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock().members.keys()).finish()
    }
}

impl State {
    /// Takes a name out and ends its links: `own` is what it hears, `others` what its peers hear.
    fn leave(&mut self, name: &NodeName, own: &DownReason, others: &DownReason) {
        self.members.remove(name);
        self.wishes.retain(|(who, _)| who != name);
        self.wires.retain(|(low, high), wire| {
            let side = match (low == name, high == name) {
                (true, _) => 0,
                (_, true) => 1,
                _ => return true,
            };
            wire.end(side, own, others);
            false
        });
    }

    /// Makes every link that is wished for, possible and missing.
    fn establish(&mut self) {
        let wished: BTreeSet<Pair> = self.wishes.iter().map(|(who, to)| pair(who, to)).collect();
        for pair in wished {
            let missing = !self.cut.contains(&pair) && !self.wires.contains_key(&pair);
            if let (true, Some(low), Some(high)) =
                (missing, self.members.get(&pair.0).cloned(), self.members.get(&pair.1).cloned())
            {
                self.link(pair, [low, high]);
            }
        }
    }

    fn link(&mut self, pair: Pair, members: [Arc<Member>; 2]) {
        let wire = Arc::new(Wire {
            ends: [End::new(&members[0], &members[1]), End::new(&members[1], &members[0])],
            limits: [members[0].limits, members[1].limits],
        });
        for (side, member) in members.into_iter().enumerate() {
            let far = wire.ends[side].far.name.clone();
            let seat = Arc::clone(self.seats.entry((member.peer.name.clone(), far)).or_default());
            let wire = Arc::clone(&wire);
            tokio::spawn(async move {
                let _seat = seat.lock_owned().await;
                hand_over(&wire, side, member.handler.as_ref()).await;
            });
        }
        self.wires.insert(pair, wire);
    }
}

fn pair(a: &NodeName, b: &NodeName) -> Pair {
    if a <= b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// One member's place in the network. Dropping its last clone without [`Mesh::close`] is a crash.
#[derive(Clone)]
pub struct Mesh(Arc<Membership>);

struct Membership {
    network: Network,
    member: Arc<Member>,
}

impl Mesh {
    pub fn peer(&self) -> &Peer {
        &self.0.member.peer
    }

    /// Asks for a link to `to`: made as soon as that name is there, and again after each loss. A link that either side closed
    /// stays closed until somebody asks again.
    pub fn connect(&self, to: &NodeName) {
        let own = &self.peer().name;
        let mut state = self.0.network.lock();
        if to == own || !self.0.is_member(&state) {
            return;
        }
        let closed = state.wires.get(&pair(own, to)).is_some_and(|wire| !wire.is_up(0));
        if closed {
            state.wires.remove(&pair(own, to));
        }
        state.wishes.insert((own.clone(), to.clone()));
        state.establish();
    }

    /// The links that are up.
    pub fn links(&self) -> Vec<Link> {
        let state = self.0.network.lock();
        if !self.0.is_member(&state) {
            return Vec::new();
        }
        state.wires.iter().filter_map(|(pair, wire)| self.side_of(pair, wire)).map(Side::link).collect()
    }

    /// Leaves: waits until what was taken for sending is handed over, at most `deadline`, and says goodbye.
    pub async fn close(&self, deadline: Duration) {
        let wires: Vec<Side> = {
            let state = self.0.network.lock();
            state.wires.iter().filter_map(|(pair, wire)| self.side_of(pair, wire)).collect()
        };
        let drained = async {
            for side in &wires {
                side.wire.ends[1 - side.side].drained().await;
            }
        };
        // At the deadline what is left is lost.
        let _ = tokio::time::timeout(deadline, drained).await;
        let mut state = self.0.network.lock();
        if self.0.is_member(&state) {
            state.leave(&self.peer().name, &DownReason::Closed, &DownReason::Goodbye);
        }
    }

    fn side_of(&self, pair: &Pair, wire: &Arc<Wire>) -> Option<Side> {
        let own = &self.peer().name;
        let side = [&pair.0, &pair.1].iter().position(|name| *name == own)?;
        wire.is_up(side).then(|| Side { wire: Arc::clone(wire), side })
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mesh").field(self.peer()).finish()
    }
}

impl Membership {
    fn is_member(&self, state: &State) -> bool {
        state.members.get(&self.member.peer.name).is_some_and(|member| Arc::ptr_eq(member, &self.member))
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut state = self.network.lock();
        if self.is_member(&state) {
            let lost = DownReason::Lost("its mesh was dropped".to_owned());
            state.leave(&self.member.peer.name, &lost, &lost);
        }
    }
}

/// One connection. End `i` holds what travels to side `i`.
struct Wire {
    ends: [End; 2],
    limits: [Limits; 2],
}

struct End {
    /// Whom this end's owner sees.
    far: Peer,
    queue: Mutex<Queue>,
    wake: Notify,
    idle: Notify,
}

struct Queue {
    control: VecDeque<Bytes>,
    rounds: VecDeque<Bytes>,
    lanes: Vec<VecDeque<Bytes>>,
    next_lane: usize,
    bulk: VecDeque<Bytes>,
    datagrams: VecDeque<Bytes>,
    /// Of messages and bulk.
    bytes: usize,
    /// Of all.
    bytes_all: usize,
    /// The task found nothing more to hand over.
    is_idle: bool,
    down: Option<DownReason>,
    heard: Instant,
}

enum Arrival {
    Frame(Lane, Bytes),
    Bulk(Bytes),
    Datagram(Bytes),
    Down(DownReason),
}

impl End {
    fn new(owner: &Arc<Member>, far: &Arc<Member>) -> Self {
        let lanes = usize::from(owner.limits.lanes.min(far.limits.lanes).max(1));
        let queue = Queue {
            control: VecDeque::new(),
            rounds: VecDeque::new(),
            lanes: vec![VecDeque::new(); lanes],
            next_lane: 0,
            bulk: VecDeque::new(),
            datagrams: VecDeque::new(),
            bytes: 0,
            bytes_all: 0,
            is_idle: false,
            down: None,
            heard: Instant::now(),
        };
        Self { far: far.peer.clone(), queue: Mutex::new(queue), wake: Notify::new(), idle: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, reason: &DownReason) {
        let mut queue = self.lock();
        if queue.down.is_none() {
            let Queue { control, rounds, lanes, bulk, datagrams, bytes, bytes_all, .. } = &mut *queue;
            for waiting in lanes.iter_mut().chain([control, rounds, bulk, datagrams]) {
                waiting.clear();
            }
            (*bytes, *bytes_all) = (0, 0);
            queue.down = Some(reason.clone());
        }
        drop(queue);
        self.wake.notify_one();
        self.idle.notify_waiters();
    }

    /// Until everything was handed over, or the link is down.
    async fn drained(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            // Registered before the look, so that no wake-up falls between.
            idle.as_mut().enable();
            {
                let queue = self.lock();
                if queue.is_idle || queue.down.is_some() {
                    return;
                }
            }
            idle.await;
        }
    }

    /// The next thing to hand over; none says that there is nothing, and marks the end idle.
    fn next(&self) -> Option<Arrival> {
        let mut queue = self.lock();
        let arrival = queue.pop();
        match &arrival {
            Some(_) => queue.heard = Instant::now(),
            None => {
                queue.is_idle = true;
                self.idle.notify_waiters();
            }
        }
        arrival
    }
}

impl Queue {
    fn pop(&mut self) -> Option<Arrival> {
        if let Some(reason) = &self.down {
            return Some(Arrival::Down(reason.clone()));
        }
        let arrival = if let Some(datagram) = self.datagrams.pop_front() {
            Arrival::Datagram(datagram)
        } else if let Some(frame) = self.control.pop_front() {
            Arrival::Frame(Lane::Control, frame)
        } else if let Some(frame) = self.rounds.pop_front() {
            Arrival::Frame(Lane::Rounds, frame)
        } else if let Some((lane, frame)) = self.pop_message() {
            Arrival::Frame(lane, frame)
        } else {
            Arrival::Bulk(self.bulk.pop_front()?)
        };
        match &arrival {
            Arrival::Frame(Lane::Messages(_), body) | Arrival::Bulk(body) => {
                self.bytes -= body.len();
                self.bytes_all -= body.len();
            }
            Arrival::Frame(_, body) | Arrival::Datagram(body) => self.bytes_all -= body.len(),
            Arrival::Down(_) => {}
        }
        Some(arrival)
    }

    /// One lane after the other, so that none waits for another to be empty.
    fn pop_message(&mut self) -> Option<(Lane, Bytes)> {
        let count = self.lanes.len();
        let lane = (0..count).map(|step| (self.next_lane + step) % count).find(|lane| !self.lanes[*lane].is_empty())?;
        self.next_lane = lane + 1;
        let frame = self.lanes[lane].pop_front()?;
        Some((Lane::Messages(u8::try_from(lane).unwrap_or(u8::MAX)), frame))
    }
}

impl Wire {
    fn is_up(&self, side: usize) -> bool {
        self.ends[side].lock().down.is_none()
    }

    /// `own` is what the owner of end `side` hears.
    fn end(&self, side: usize, own: &DownReason, other: &DownReason) {
        self.ends[side].end(own);
        self.ends[1 - side].end(other);
    }
}

/// Tells one side's handler of everything, in order, from up to down.
async fn hand_over(wire: &Arc<Wire>, side: usize, handler: &dyn Handler) {
    let end = &wire.ends[side];
    if !wire.is_up(side) {
        // Ended before its turn came: this side never saw it.
        return;
    }
    let link = Side { wire: Arc::clone(wire), side }.link();
    handler.up(&link);
    let mut frames = 0;
    loop {
        match end.next() {
            Some(Arrival::Frame(lane, frame)) => handler.frame(&link, lane, frame),
            Some(Arrival::Bulk(body)) => handler.bulk(&link, body),
            Some(Arrival::Datagram(datagram)) => handler.datagram(&link, datagram),
            Some(Arrival::Down(reason)) => {
                handler.down(&link, &reason);
                return;
            }
            None => end.wake.notified().await,
        }
        frames = (frames + 1) % FRAMES_A_TURN;
        if frames == 0 {
            tokio::task::yield_now().await;
        }
    }
}

/// What one side holds of a connection.
struct Side {
    wire: Arc<Wire>,
    side: usize,
}

impl Side {
    fn link(self) -> Link {
        Link::new(Arc::new(self))
    }

    fn limits(&self) -> &Limits {
        &self.wire.limits[self.side]
    }

    fn check_size(&self, bytes: usize, limit: usize) -> Result<(), LinkError> {
        if bytes > limit {
            return Err(LinkError::TooLarge { peer: self.peer().name.clone(), bytes, limit });
        }
        Ok(())
    }

    /// Puts bytes into the other side's end; `counted` against the queue's limit or not.
    fn put(&self, bytes: usize, counted: bool, put: impl FnOnce(&mut Queue)) -> Result<(), LinkError> {
        let far = &self.wire.ends[1 - self.side];
        let peer = || self.peer().name.clone();
        {
            let mut queue = far.lock();
            if queue.down.is_some() {
                return Err(LinkError::Down { peer: peer() });
            }
            let limit = self.limits().queue_bytes_max;
            if counted && queue.bytes + bytes > limit {
                return Err(LinkError::Full { peer: peer(), queued: queue.bytes, limit });
            }
            queue.bytes += if counted { bytes } else { 0 };
            queue.bytes_all += bytes;
            queue.is_idle = false;
            put(&mut queue);
        }
        far.wake.notify_one();
        Ok(())
    }
}

impl Port for Side {
    fn peer(&self) -> &Peer {
        &self.wire.ends[self.side].far
    }

    fn send(&self, lane: Lane, frame: Bytes) -> Result<(), LinkError> {
        self.check_size(frame.len(), self.limits().frame_bytes_max)?;
        let counted = matches!(lane, Lane::Messages(_));
        self.put(frame.len(), counted, |queue| match lane {
            Lane::Control => queue.control.push_back(frame),
            Lane::Rounds => queue.rounds.push_back(frame),
            Lane::Messages(lane) => {
                let lane = usize::from(lane) % queue.lanes.len();
                queue.lanes[lane].push_back(frame);
            }
        })
    }

    fn send_bulk(&self, body: Bytes) -> Result<(), LinkError> {
        self.check_size(body.len(), self.limits().bulk_bytes_max)?;
        self.put(body.len(), true, |queue| queue.bulk.push_back(body))
    }

    fn send_datagram(&self, datagram: Bytes) -> Result<(), LinkError> {
        self.check_size(datagram.len(), self.limits().datagram_bytes_max)?;
        self.put(datagram.len(), false, |queue| queue.datagrams.push_back(datagram))
    }

    fn queued_bytes(&self) -> usize {
        self.wire.ends[1 - self.side].lock().bytes_all
    }

    fn last_heard(&self) -> Duration {
        self.wire.ends[self.side].lock().heard.elapsed()
    }

    fn is_up(&self) -> bool {
        self.wire.is_up(self.side)
    }

    fn close(&self, reason: DownReason) {
        let other = match &reason {
            DownReason::Closed | DownReason::Goodbye => DownReason::Goodbye,
            DownReason::Replaced => DownReason::Replaced,
            reason => DownReason::Lost(format!("closed by the peer: {reason}")),
        };
        self.wire.end(self.side, &reason, &other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;

    /// Generous: only a hang meets it.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Writes down what it is told.
    #[derive(Default)]
    struct Recorder {
        lines: Mutex<Vec<String>>,
        changed: Notify,
    }

    impl Recorder {
        fn write(&self, line: String) {
            self.lines.lock().unwrap().push(line);
            self.changed.notify_one();
        }

        fn lines(&self) -> Vec<String> {
            self.lines.lock().unwrap().clone()
        }

        async fn until(&self, last: &str) -> Vec<String> {
            let waiting = async {
                while self.lines().last().is_none_or(|line| line != last) {
                    self.changed.notified().await;
                }
            };
            let waited = tokio::time::timeout(PATIENCE, waiting).await;
            waited.unwrap_or_else(|_| panic!("never: {last}; {:?}", self.lines()));
            self.lines()
        }
    }

    impl Handler for Recorder {
        fn up(&self, link: &Link) {
            self.write(format!("{}.{} up", link.peer().name, link.peer().incarnation));
        }

        fn down(&self, link: &Link, reason: &DownReason) {
            assert!(!link.is_up());
            self.write(format!("{}.{} down: {reason}", link.peer().name, link.peer().incarnation));
        }

        fn frame(&self, _link: &Link, lane: Lane, frame: Bytes) {
            self.write(format!("{lane:?} {}", String::from_utf8_lossy(&frame)));
        }

        fn bulk(&self, _link: &Link, body: Bytes) {
            self.write(format!("bulk {}", body.len()));
        }

        fn datagram(&self, _link: &Link, datagram: Bytes) {
            self.write(format!("datagram {}", datagram.len()));
        }

        fn refused(&self, peer: &str, why: &str) {
            self.write(format!("{peer} refused: {why}"));
        }
    }

    fn name(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    struct Place {
        mesh: Mesh,
        heard: Arc<Recorder>,
    }

    fn join(network: &Network, of: &str, incarnation: u64) -> Place {
        let heard = Arc::new(Recorder::default());
        let limits = Limits {
            frame_bytes_max: 100,
            bulk_bytes_max: 300,
            datagram_bytes_max: 10,
            queue_bytes_max: 400,
            lanes: 2,
        };
        let peer = Peer { name: name(of), incarnation };
        Place { mesh: network.join(peer, limits, Arc::clone(&heard) as _), heard }
    }

    async fn pair() -> (Network, Place, Place) {
        let network = Network::new();
        let (a, b) = (join(&network, "a", 1), join(&network, "b", 1));
        a.mesh.connect(&name("b"));
        a.heard.until("b.1 up").await;
        b.heard.until("a.1 up").await;
        (network, a, b)
    }

    fn text(text: &str) -> Bytes {
        Bytes::copy_from_slice(text.as_bytes())
    }

    #[tokio::test]
    async fn lanes_keep_their_order_and_control_goes_first() {
        let (_network, a, b) = pair().await;
        let link = &a.mesh.links()[0];
        // Nothing is handed over before the next await.
        link.send_bulk(text("large")).unwrap();
        for number in 0..3 {
            link.send(Lane::Messages(0), text(&format!("m{number}"))).unwrap();
            link.send(Lane::Messages(3), text(&format!("n{number}"))).unwrap();
            link.send(Lane::Rounds, text(&format!("r{number}"))).unwrap();
            link.send(Lane::Control, text(&format!("c{number}"))).unwrap();
        }
        link.send_datagram(text("d")).unwrap();
        assert_eq!(link.queued_bytes(), 5 + 12 * 2 + 1);
        let lines = b.heard.until("bulk 5").await;
        let expected = [
            "a.1 up",
            "datagram 1",
            "Control c0",
            "Control c1",
            "Control c2",
            "Rounds r0",
            "Rounds r1",
            "Rounds r2",
            "Messages(0) m0",
            "Messages(1) n0",
            "Messages(0) m1",
            "Messages(1) n1",
            "Messages(0) m2",
            "Messages(1) n2",
            "bulk 5",
        ];
        assert_eq!(lines, expected);
        assert_eq!(link.queued_bytes(), 0);
    }

    #[tokio::test]
    async fn messages_beyond_the_queue_are_refused_and_control_is_not() {
        let (_network, a, b) = pair().await;
        let link = &a.mesh.links()[0];
        let peer = name("b");
        let frame = Bytes::from(vec![b'x'; 100]);
        for _ in 0..4 {
            link.send(Lane::Messages(0), frame.clone()).unwrap();
        }
        let full = LinkError::Full { peer: peer.clone(), queued: 400, limit: 400 };
        assert_eq!(link.send(Lane::Messages(1), text("x")), Err(full.clone()));
        assert_eq!(link.send_bulk(text("x")), Err(full));
        link.send(Lane::Control, frame.clone()).unwrap();
        link.send(Lane::Rounds, frame.clone()).unwrap();
        let too_large = |bytes, limit| Err(LinkError::TooLarge { peer: peer.clone(), bytes, limit });
        assert_eq!(link.send(Lane::Control, Bytes::from(vec![0; 101])), too_large(101, 100));
        assert_eq!(link.send_bulk(Bytes::from(vec![0; 301])), too_large(301, 300));
        assert_eq!(link.send_datagram(Bytes::from(vec![0; 11])), too_large(11, 10));
        let last = format!("Messages(0) {}", "x".repeat(100));
        b.heard.until(&last).await;
        link.send(Lane::Messages(0), text("room again")).unwrap();
        b.heard.until("Messages(0) room again").await;
    }

    #[tokio::test]
    async fn a_cut_loses_the_link_on_both_sides_and_healing_brings_another() {
        let (network, a, b) = pair().await;
        let link = a.mesh.links()[0].clone();
        link.send(Lane::Messages(0), text("lost")).unwrap();
        network.cut(&name("a"), &name("b"));
        assert!(!link.is_up() && a.mesh.links().is_empty());
        assert_eq!(link.send(Lane::Control, text("x")), Err(LinkError::Down { peer: name("b") }));
        assert_eq!(a.heard.until("b.1 down: connection lost: cut").await.len(), 2);
        assert_eq!(b.heard.until("a.1 down: connection lost: cut").await.len(), 2, "what was queued is lost");
        b.mesh.connect(&name("a"));
        assert!(b.mesh.links().is_empty());
        network.heal(&name("a"), &name("b"));
        a.heard.until("b.1 up").await;
        b.heard.until("a.1 up").await;
        assert_eq!((a.mesh.links().len(), b.mesh.links().len()), (1, 1));
        assert!(!link.is_up(), "the old link stays down");
    }

    #[tokio::test]
    async fn another_life_of_a_name_replaces_its_link() {
        let (network, a, old) = pair().await;
        let new = join(&network, "b", 2);
        // The wish of `a` stands.
        let lines = a.heard.until("b.2 up").await;
        assert_eq!(lines, ["b.1 up", "b.1 down: replaced by another connection", "b.2 up"]);
        new.heard.until("a.1 up").await;
        let lost = "a.1 down: connection lost: another life of this name joined";
        old.heard.until(lost).await;
        assert!(old.mesh.links().is_empty());
        // The old life can do nothing any more, not even by its end.
        old.mesh.connect(&name("a"));
        drop(old);
        assert_eq!(a.mesh.links()[0].peer().incarnation, 2);
    }

    #[tokio::test]
    async fn closing_hands_over_what_was_taken_and_says_goodbye() {
        let (_network, a, b) = pair().await;
        let link = a.mesh.links()[0].clone();
        for number in 0..3 {
            link.send(Lane::Messages(0), text(&format!("m{number}"))).unwrap();
        }
        a.mesh.close(PATIENCE).await;
        let lines = b.heard.until("a.1 down: peer said goodbye").await;
        assert_eq!(lines[1..4], ["Messages(0) m0", "Messages(0) m1", "Messages(0) m2"]);
        a.heard.until("b.1 down: this side closed it").await;
        a.mesh.connect(&name("b"));
        assert!(a.mesh.links().is_empty(), "it has left");
    }

    #[tokio::test]
    async fn whoever_closes_a_link_names_the_reason_and_it_stays_down_until_asked_for() {
        let (_network, a, b) = pair().await;
        b.mesh.links()[0].close(DownReason::Violation("nonsense".to_owned()));
        b.heard.until("a.1 down: protocol violation: nonsense").await;
        a.heard.until("b.1 down: connection lost: closed by the peer: protocol violation: nonsense").await;
        assert!(a.mesh.links().is_empty());
        a.mesh.connect(&name("b"));
        a.heard.until("b.1 up").await;
    }

    #[tokio::test]
    async fn a_link_is_made_when_the_other_name_joins_and_only_one() {
        let network = Network::new();
        let a = join(&network, "a", 1);
        a.mesh.connect(&name("a"));
        a.mesh.connect(&name("b"));
        a.mesh.connect(&name("b"));
        let b = join(&network, "b", 5);
        b.mesh.connect(&name("a"));
        a.heard.until("b.5 up").await;
        b.heard.until("a.1 up").await;
        assert_eq!((a.heard.lines().len(), a.mesh.links().len()), (1, 1));
        // Who goes without a word is lost.
        drop(b.mesh);
        a.heard.until("b.5 down: connection lost: its mesh was dropped").await;
        network.crash(&name("a"));
        assert!(a.mesh.links().is_empty());
    }

    #[test]
    fn tasks_of_the_network_can_move_between_threads() {
        fn is_send(_: impl Future + Send) {}
        let network = Network::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _inside = runtime.enter();
        let place = join(&network, "a", 1);
        is_send(place.mesh.close(PATIENCE));
    }
}
