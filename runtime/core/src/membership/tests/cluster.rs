//! Nodes with machines and replicas, wires between them, and a log that they agree on.

use super::super::*;
use crate::bootstrap;
use crate::ids::{Epoch, RankId, RequestKey};
use crate::placement;
use crate::replica::{self, Decision, Replica, Snapshot};
use crate::round::{Arrival, Chain};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(super) fn replica_config() -> replica::Config {
    let placement = placement::Config::default();
    replica::Config { cap: 4, attempts_max: 3, probe_requests_max: 8, lockstep: false, placement }
}

/// Bounds that pass in some thousand steps.
pub(super) fn config() -> Config {
    let round = round::Config { busy_interval_us: 5_000, heartbeat_us: 20_000, ..round::Config::default() };
    Config {
        round,
        suspect_after_us: 100_000,
        suspicion_gather_us: 5_000,
        report_after_us: 40_000,
        change_us_max: 200_000,
        rejoin_us_min: 10_000,
        rejoin_us_max: 100_000,
        ..Config::default()
    }
}

pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound.max(1)
    }

    pub(super) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// What a node's replica does in its own time.
pub(super) enum Own {
    Apply(Merged),
    Install { view: View, polite: Vec<Incarnation> },
    Restore(Box<Snapshot>),
    Donate { to: Incarnation, epoch: Epoch, round: Round },
}

pub(super) enum Wire {
    Up(Peer),
    Down(Incarnation),
    Message { from: Incarnation, to: Incarnation, message: Box<Message> },
}

pub(super) struct Node {
    pub(super) machine: Machine,
    pub(super) replica: Option<Replica>,
    pub(super) work: VecDeque<Own>,
    pub(super) replaces: Option<Incarnation>,
    pub(super) announced: u64,
    pub(super) left: Option<Left>,
    /// The process runs; it may be stopped all the same.
    pub(super) up: bool,
    pub(super) asleep: bool,
    /// It left for good.
    pub(super) retired: bool,
    /// It asked for a polite leave.
    pub(super) leaving: bool,
    /// Entries of the log that came here.
    pub(super) applied: u64,
    pub(super) told: Consensus,
}

impl Node {
    pub(super) fn runs(&self) -> bool {
        self.up && !self.asleep
    }

    pub(super) fn life(&self) -> Incarnation {
        self.machine.incarnation()
    }
}

pub(super) struct Cluster {
    pub(super) draw: Draw,
    pub(super) planted: Option<Planted>,
    /// Entries leave the outbox when they are sent: planted in the round machine.
    pub(super) leaves_at_send: bool,
    pub(super) now_us: u64,
    pub(super) nodes: Vec<Node>,
    pub(super) lives: u64,
    /// What is under way, in order on each link.
    pub(super) wires: BTreeMap<(usize, usize), VecDeque<Wire>>,
    pub(super) linked: BTreeSet<(usize, usize)>,
    /// Directions that lose all that is sent.
    pub(super) lossy: BTreeSet<(usize, usize)>,
    pub(super) log: Vec<Command>,
    pub(super) truth: Agreed,
    pub(super) proposals: Vec<Command>,
    pub(super) proposed: Vec<Command>,
    pub(super) leader: Option<Incarnation>,
    pub(super) voters: Vec<Incarnation>,
    /// Cuts and members of the views so far.
    pub(super) cuts: BTreeMap<u64, u64>,
    pub(super) views: BTreeMap<u64, Vec<Incarnation>>,
    pub(super) polite: BTreeMap<Incarnation, u64>,
    /// Whom a freeze told to stop.
    pub(super) evicted: BTreeSet<Incarnation>,
    /// What somebody completed, by epoch and round, and who did.
    pub(super) completed: BTreeMap<(u64, u64), (u64, u64, BTreeSet<Incarnation>)>,
    /// In which rounds a request was enqueued.
    pub(super) enqueued: BTreeMap<RequestKey, BTreeSet<(u64, u64)>>,
    pub(super) fault: Option<String>,
    /// A replica was tampered with: digests differ.
    pub(super) tampered: bool,
}

pub(super) fn name(at: usize) -> Name {
    Name(format!("node-{at}").into())
}

/// Voters are the first of the members; the log is founded with all nodes but the last `outside`.
pub(super) struct Setup {
    pub(super) nodes: usize,
    pub(super) outside: usize,
    pub(super) seed: u64,
    pub(super) planted: Option<Planted>,
    pub(super) leaves_at_send: bool,
}

impl Setup {
    pub(super) fn of(nodes: usize, seed: u64) -> Self {
        Self { nodes, outside: 0, seed, planted: None, leaves_at_send: false }
    }
}

impl Cluster {
    pub(super) fn new(setup: &Setup) -> Self {
        let founders = setup.nodes - setup.outside;
        let place = |at: usize| Place {
            name: name(at),
            incarnation: Incarnation(at as u64 + 1),
            ranks: vec![RankId(at as u32)],
        };
        let members: Vec<Place> = (0..founders).map(place).collect();
        let life = |m: &Place| bootstrap::Life { name: m.name.0.clone(), incarnation: m.incarnation };
        let names = bootstrap::Founders::new(members.iter().map(life).collect()).expect("each has a name of its own");
        let lives: Vec<Incarnation> = members.iter().map(|m| m.incarnation).collect();
        let truth = Agreed::founded(names.cluster(), members.clone(), config().members_max);
        let mut cluster = Self {
            draw: Draw::new(setup.seed),
            planted: setup.planted,
            leaves_at_send: setup.leaves_at_send,
            now_us: 1,
            nodes: Vec::new(),
            lives: 0,
            wires: BTreeMap::new(),
            linked: BTreeSet::new(),
            lossy: BTreeSet::new(),
            log: Vec::new(),
            proposals: Vec::new(),
            proposed: Vec::new(),
            leader: Some(lives[0]),
            voters: voters(&members, None),
            cuts: BTreeMap::new(),
            views: BTreeMap::from([(1, lives)]),
            polite: BTreeMap::new(),
            evicted: BTreeSet::new(),
            completed: BTreeMap::new(),
            enqueued: BTreeMap::new(),
            fault: None,
            tampered: false,
            truth,
        };
        for at in 0..setup.nodes {
            let node = cluster.new_node(at, None);
            cluster.nodes.push(node);
        }
        for a in 0..setup.nodes {
            for b in a + 1..setup.nodes {
                cluster.link(a, b);
            }
        }
        for at in 0..founders {
            let cluster_id = cluster.truth.cluster;
            cluster.feed(at, Input::Founded { cluster: cluster_id, members: members.clone() });
        }
        cluster
    }

    pub(super) fn new_node(&mut self, at: usize, replaces: Option<Incarnation>) -> Node {
        self.lives += 1;
        let incarnation = Incarnation(self.lives);
        let life = Life { name: name(at), incarnation, ranks: 1, replaces, witness: false };
        let mut machine = Machine::new(life, config(), self.now_us);
        machine.planted = self.planted;
        Node {
            machine,
            replica: None,
            work: VecDeque::new(),
            replaces,
            announced: 0,
            left: None,
            up: true,
            asleep: false,
            retired: false,
            leaving: false,
            applied: 0,
            told: Consensus::default(),
        }
    }

    pub(super) fn fail(&mut self, what: String) {
        self.fault.get_or_insert(what);
    }

    fn peer(&self, at: usize) -> Peer {
        let node = &self.nodes[at];
        Peer { name: name(at), incarnation: node.life(), replaces: node.replaces }
    }

    pub(super) fn at(&self, life: Incarnation) -> Option<usize> {
        self.nodes.iter().position(|node| node.life() == life)
    }

    pub(super) fn feed(&mut self, at: usize, input: Input) {
        let mut out = Vec::new();
        self.nodes[at].machine.handle(self.now_us, input, &mut out);
        if let Some(round) = &mut self.nodes[at].machine.round {
            round.leaves_at_send = self.leaves_at_send;
        }
        if let Err(broken) = self.nodes[at].machine.check() {
            self.fail(format!("node {at}: {broken}"));
        }
        let from = self.nodes[at].life();
        for effect in out {
            match effect {
                Effect::Send { to, message } => {
                    let Some(other) = self.at(to).filter(|other| *other != at) else { continue };
                    let pair = (at.min(other), at.max(other));
                    if self.linked.contains(&pair) && !self.lossy.contains(&(at, other)) {
                        let wire = self.wires.entry((at, other)).or_default();
                        wire.push_back(Wire::Message { from, to, message });
                    }
                }
                Effect::Completed(merged) => self.nodes[at].work.push_back(Own::Apply(merged)),
                Effect::Restored(snapshot) => self.nodes[at].work.push_back(Own::Restore(snapshot)),
                Effect::Installed { view, polite, .. } => {
                    self.nodes[at].work.push_back(Own::Install { view, polite });
                }
                Effect::Donate { to, epoch, round } => {
                    self.nodes[at].work.push_back(Own::Donate { to, epoch, round });
                }
                Effect::Propose(command) => {
                    // What a leader said that is none any more may come through all the same.
                    if self.leader == Some(from) || self.draw.one_in(3) {
                        self.proposals.push(command);
                    }
                }
                Effect::Left(left) => self.left(at, left),
                Effect::Dropped(_) => {}
            }
        }
    }

    fn left(&mut self, at: usize, left: Left) {
        let tampered = self.tampered;
        match left {
            Left::Misfit { .. } => self.fail(format!("node {at} left: {left:?}")),
            Left::Diverged { .. } if !tampered => self.fail(format!("node {at} left: {left:?}")),
            _ => {}
        }
        self.nodes[at].left = Some(left);
        self.nodes[at].work.clear();
    }

    /// The replica works behind the machine, in order.
    pub(super) fn work(&mut self, at: usize) {
        let Some(own) = self.nodes[at].work.pop_front() else { return };
        let applied = match own {
            Own::Apply(merged) => self.apply(at, &merged),
            Own::Install { view, polite } => self.install(at, view, &polite),
            Own::Restore(snapshot) => match Replica::restore(*snapshot, &replica_config()) {
                Ok(replica) => {
                    let said = replica.last_said();
                    self.nodes[at].replica = Some(replica);
                    Some(said)
                }
                Err(broken) => {
                    self.fail(format!("node {at} was given an unsound state: {broken}"));
                    None
                }
            },
            Own::Donate { to, epoch, round } => {
                let Some(replica) = &self.nodes[at].replica else { return };
                if replica.round() != round {
                    return self.fail(format!("node {at} donates {} as {round}", replica.round()));
                }
                let replica = Box::new(replica.snapshot());
                return self.feed(at, Input::Donated { to, epoch, round, replica });
            }
        };
        if let Some(applied) = applied {
            self.feed(at, Input::Round(round::Input::Applied(applied)));
        }
    }

    fn apply(&mut self, at: usize, merged: &Merged) -> Option<round::Applied> {
        let life = self.nodes[at].life();
        let inside = self.nodes[at].machine.view().is_some();
        let replica = self.nodes[at].replica.as_mut()?;
        let before = replica.round();
        let mut decisions = Vec::new();
        let applied = replica.apply(merged, &mut decisions);
        let sound = replica.check();
        let (epoch, round) = (merged.epoch.0, merged.round.0);
        if let Err(broken) = sound {
            self.fail(format!("replica of node {at}: {broken}"));
        }
        if before.0 + 1 != round {
            self.fail(format!("node {at} applied {round} behind {before}"));
        }
        let made = (merged.hash(), applied.digest);
        let known = self.completed.entry((epoch, round)).or_insert((made.0, made.1, BTreeSet::new()));
        // A joiner may be given what its donor alone completed: it has to take another state then.
        if inside {
            known.2.insert(life);
        }
        let differs = (known.0, known.1) != made;
        if differs && !self.tampered {
            self.fail(format!("node {at} completed another round {round} of epoch {epoch}"));
        }
        let view = self.views.get(&epoch);
        let from: BTreeSet<Incarnation> = merged.contributions.iter().map(|c| c.member).collect();
        if view.is_none_or(|view| view.iter().copied().collect::<BTreeSet<_>>() != from) {
            self.fail(format!("round {round} of epoch {epoch} has contributions of {from:?}, view {view:?}"));
        }
        for decision in decisions {
            if let Decision::Enqueued { key, .. } = decision {
                self.enqueued.entry(key).or_default().insert((epoch, round));
            }
        }
        Some(applied)
    }

    fn install(&mut self, at: usize, view: View, polite: &[Incarnation]) -> Option<round::Applied> {
        let cut = view.cut();
        if view.epoch == Epoch(1) {
            self.nodes[at].replica = Some(Replica::new(view.clone(), replica_config()));
        }
        let Some(replica) = &mut self.nodes[at].replica else {
            self.fail(format!("node {at} is in {view:?} without a state"));
            return None;
        };
        let stands = replica.round();
        let done = replica.install(view, polite, &mut Vec::new()).and_then(|()| replica.check());
        let ready = replica.ready();
        if stands != cut {
            self.fail(format!("node {at} installs behind {cut} and stands at {stands}"));
        }
        if let Err(broken) = done {
            self.fail(format!("replica of node {at} installs: {broken}"));
        }
        Some(ready)
    }

    pub(super) fn announce(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let ingress = node.life();
        // Some of what was announced ends, which the replica then forgets.
        if node.announced > 3 && self.draw.one_in(2) {
            let seq = 1 + self.draw.below(node.announced - 2);
            let ended = Entry::Ended(RequestKey { ingress, seq });
            return self.feed(at, Input::Round(round::Input::Announce(ended)));
        }
        node.announced += 1;
        let key = RequestKey { ingress, seq: node.announced };
        let arrival = Arrival {
            key,
            prompt_tokens: 10,
            produced_tokens: 0,
            head: Box::default(),
            chain: Chain::default(),
            children: 0,
            conversation: None,
            sub_agent: None,
            explicit: None,
            priority: 0.5,
        };
        self.feed(at, Input::Round(round::Input::Announce(Entry::Arrival(Box::new(arrival)))));
    }

    // -- links

    pub(super) fn link(&mut self, a: usize, b: usize) {
        let (a, b) = (a.min(b), a.max(b));
        if self.nodes[a].runs() && self.nodes[b].runs() && self.linked.insert((a, b)) {
            let (of_a, of_b) = (self.peer(a), self.peer(b));
            self.lossy.remove(&(a, b));
            self.lossy.remove(&(b, a));
            self.wires.entry((a, b)).or_default().push_back(Wire::Up(of_a));
            self.wires.entry((b, a)).or_default().push_back(Wire::Up(of_b));
        }
    }

    /// Both ends notice, each in its own time, behind some of what was under way.
    pub(super) fn cut(&mut self, a: usize, b: usize) {
        let (a, b) = (a.min(b), a.max(b));
        if self.linked.remove(&(a, b)) {
            for (from, to) in [(a, b), (b, a)] {
                let life = self.nodes[from].life();
                let under_way = self.wires.entry((from, to)).or_default().len() as u64;
                let kept = self.draw.below(under_way + 1) as usize;
                let wire = self.wires.entry((from, to)).or_default();
                let mut at = 0;
                wire.retain(|what| {
                    at += 1;
                    at <= kept || !matches!(what, Wire::Message { .. })
                });
                wire.push_back(Wire::Down(life));
            }
        }
    }

    /// Another life at the same node: its process goes on, and its links say who it is now.
    pub(super) fn new_life(&mut self, at: usize, replaces: Option<Incarnation>) {
        let old = self.nodes[at].life();
        let node = self.new_node(at, replaces);
        self.nodes[at] = node;
        let peer = self.peer(at);
        for other in (0..self.nodes.len()).filter(|other| *other != at) {
            self.wires.remove(&(other, at));
            if self.linked.contains(&(at.min(other), at.max(other))) {
                let of_other = self.peer(other);
                self.wires.entry((other, at)).or_default().push_back(Wire::Up(of_other));
                let wire = self.wires.entry((at, other)).or_default();
                wire.push_back(Wire::Down(old));
                wire.push_back(Wire::Up(peer.clone()));
            }
        }
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize) {
        let Some(what) = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { return };
        match what {
            Wire::Up(peer) => self.feed(to, Input::LinkUp(peer)),
            Wire::Down(life) => self.feed(to, Input::LinkDown(life)),
            Wire::Message { from, to: life, message } => {
                if self.nodes[to].life() == life {
                    self.feed(to, Input::Received { from, message });
                }
            }
        }
    }

    // -- the log

    /// Whether packets go both ways.
    fn reach(&self, a: usize, b: usize) -> bool {
        let linked = self.linked.contains(&(a.min(b), a.max(b)));
        let sound = !self.lossy.contains(&(a, b)) && !self.lossy.contains(&(b, a));
        self.nodes[a].runs() && self.nodes[b].runs() && (a == b || linked && sound)
    }

    /// Voters that a voter reaches.
    pub(super) fn reached(&self, by: Incarnation) -> Vec<Incarnation> {
        let Some(at) = self.at(by) else { return Vec::new() };
        let reaches = |voter: &Incarnation| self.at(*voter).is_some_and(|other| self.reach(at, other));
        self.voters.iter().copied().filter(reaches).collect()
    }

    pub(super) fn has_majority(&self, by: Incarnation) -> bool {
        self.reached(by).len() * 2 > self.voters.len()
    }

    /// Another voter that reaches a majority.
    pub(super) fn elect(&mut self) {
        let able: Vec<Incarnation> = self.voters.iter().copied().filter(|v| self.has_majority(*v)).collect();
        self.leader = None;
        if !able.is_empty() {
            self.leader = Some(able[self.draw.below(able.len() as u64) as usize]);
        }
        let proposals = std::mem::take(&mut self.proposals);
        for command in proposals {
            if self.draw.one_in(2) {
                self.proposals.push(command);
            }
        }
    }

    pub(super) fn consensus(&self, at: usize) -> Consensus {
        let leads = self.leader == Some(self.nodes[at].life());
        let reached = if leads { self.reached(self.nodes[at].life()) } else { Vec::new() };
        Consensus { leader: self.leader, voters: self.voters.clone(), reached }
    }

    /// One of the proposals comes through, or is lost; an older one may come again.
    pub(super) fn commit(&mut self, lossy: bool) {
        if self.proposals.is_empty() || self.leader.is_none_or(|leader| !self.has_majority(leader)) {
            return;
        }
        let at = self.draw.below(self.proposals.len() as u64) as usize;
        let command = self.proposals.remove(at);
        self.proposed.push(command.clone());
        if !(lossy && self.draw.one_in(4)) {
            self.append(command);
        }
        // What was lost, or what came through before, may come now.
        if lossy && self.draw.one_in(2) {
            let among = self.proposed.len().min(5) as u64;
            let at = self.proposed.len() - 1 - self.draw.below(among) as usize;
            self.append(self.proposed[at].clone());
        }
    }

    fn append(&mut self, command: Command) {
        self.log.push(command);
        let index = self.log.len() as u64;
        let command = &self.log[self.log.len() - 1];
        let fenced = self.planted != Some(Planted::InstallWithoutChange);
        match self.truth.apply_if(index, command, fenced) {
            Outcome::Ignored(_) => return,
            Outcome::Frozen => {
                let all = self.truth.members.iter().map(|m| m.incarnation);
                self.evicted.extend(all.filter(|m| self.truth.is_out(*m)));
                return;
            }
            Outcome::Installed => {}
        }
        if let Some(back) = self.truth.members.iter().find(|m| self.evicted.contains(&m.incarnation)) {
            self.fail(format!("{} was told that it is out and is in the view again", back.incarnation));
        }
        let Some(past) = self.truth.last.clone() else { return };
        let (epoch, cut) = (self.truth.epoch.0, past.cut);
        self.cuts.insert(epoch - 1, cut.0);
        self.views.insert(epoch, self.truth.members.iter().map(|m| m.incarnation).collect());
        let polite = past.leaving.iter().filter(|l| l.why == Why::Politely);
        self.polite.extend(polite.map(|l| (l.incarnation, epoch - 1)));
        for at in 0..self.nodes.len() {
            let machine = &self.nodes[at].machine;
            let stays = self.truth.position(machine.incarnation()).is_some();
            if let Some(round) = machine.round.as_ref().filter(|_| stays)
                && round.view().epoch.0 + 1 == epoch
                && round.completed() != cut
            {
                let completed = round.completed();
                self.fail(format!("node {at} stays and is at {completed} at the install behind {cut}"));
            }
        }
    }

    /// Whether the log goes to this node: a life that is out hears of it only as a voter.
    pub(super) fn hears_of_log(&self, at: usize) -> bool {
        let Some(leader) = self.leader.and_then(|leader| self.at(leader)) else { return false };
        let life = self.nodes[at].life();
        let agreed = self.nodes[at].machine.agreed();
        let outside = self.nodes[at].left.is_none() && self.nodes[at].machine.view().is_none();
        let concerned = !self.truth.is_out(life) || self.voters.contains(&life) || outside;
        let behind = agreed.is_none() || self.nodes[at].applied < self.log.len() as u64;
        self.reach(leader, at) && concerned && behind
    }

    pub(super) fn hear_of_log(&mut self, at: usize) {
        let end = self.log.len() as u64;
        let member = self.nodes[at].machine.view().is_some();
        let far = self.nodes[at].applied + 4 < end && !member && self.draw.one_in(3);
        if self.nodes[at].machine.agreed().is_none() || far {
            self.nodes[at].applied = end;
            let truth = self.truth.clone();
            return self.feed(at, Input::Restored(Box::new(truth)));
        }
        // An entry may come again.
        let applied = self.nodes[at].applied;
        let again = applied > 0 && self.draw.one_in(8);
        let index = if again { applied } else { applied + 1 };
        if let Some(command) = self.log.get(index as usize - 1).cloned() {
            self.nodes[at].applied = index;
            self.feed(at, Input::Committed { index, command });
        }
    }

    /// Changed by the leader after the install, in one step that needs a majority of both.
    pub(super) fn change_voters(&mut self) {
        let next = voters(&self.truth.members, None);
        let Some(leader) = self.leader.filter(|leader| self.has_majority(*leader)) else { return };
        let Some(at) = self.at(leader) else { return };
        let reaches = |voter: &&Incarnation| self.at(**voter).is_some_and(|other| self.reach(at, other));
        if next.iter().filter(reaches).count() * 2 > next.len() {
            self.voters = next;
            if !self.voters.contains(&leader) {
                self.elect();
            }
        }
    }
}
