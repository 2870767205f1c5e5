//! Every interleaving of a few machines: the very ones, with a hash for a replica and a list for a log.
//!
//! Time does not pass but by an event, so what waits for time waits for that. A contribution is due at once where something
//! waits for a round, and never otherwise, so that a run comes to its end; the end must be a good one.

use super::super::*;
use super::cluster::name;
use crate::digest;
use crate::ids::{Epoch, RankId, RequestKey};
use stateright::{Checker, Model, Property};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// More than any run lasts.
const NEVER_US: u64 = 1 << 40;

fn config() -> Config {
    let round = round::Config {
        round_interval_us_min: 0,
        busy_interval_us: 0,
        heartbeat_us: NEVER_US,
        ..round::Config::default()
    };
    Config {
        round,
        suspect_after_us: NEVER_US,
        suspicion_gather_us: 0,
        report_after_us: 1,
        rejoin_us_min: NEVER_US,
        rejoin_us_max: NEVER_US,
        ..Config::default()
    }
}

/// How many nodes, and what may befall them.
#[derive(Clone, Copy)]
struct Bounds {
    nodes: usize,
    crashes: usize,
    /// Suspicions of members that live, and reports that come too late.
    falses: usize,
    /// Nodes that announce something, from the first on.
    announcing: usize,
    planted: Option<Planted>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Deliver(usize, usize),
    Hear(usize),
    Commit(usize),
    Tell(usize),
    Announce(usize),
    /// The process dies; so many messages of it to each other node still come.
    Crash(usize, Vec<usize>),
    Suspect(usize, usize),
    /// Whoever owes a report owes it for too long.
    Late,
}

#[derive(Clone, Debug)]
struct Node {
    machine: Arc<Machine>,
    up: bool,
    left: bool,
    announced: bool,
    heard: usize,
    told: u64,
    /// Stands for the replica's state.
    digest: u64,
    completed: Vec<(u64, u64, u64)>,
    applied: BTreeSet<(u64, u64)>,
    print: u64,
}

#[derive(Clone, Debug)]
enum Wire {
    Message(Arc<Message>, u64),
    Down,
}

#[derive(Clone, Debug)]
struct State {
    now_us: u64,
    nodes: Vec<Node>,
    wires: BTreeMap<(usize, usize), VecDeque<Wire>>,
    log: Vec<Command>,
    truth: Agreed,
    proposals: Vec<Command>,
    leader: u64,
    crashes: usize,
    falses: usize,
    fault: Option<String>,
}

/// What is written out is all there is to a value.
fn print(value: &impl std::fmt::Debug) -> u64 {
    let text = format!("{value:?}");
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.now_us.hash(state);
        for node in &self.nodes {
            node.print.hash(state);
        }
        for (pair, wire) in &self.wires {
            pair.hash(state);
            for what in wire {
                match what {
                    Wire::Message(_, print) => print.hash(state),
                    Wire::Down => 0u64.hash(state),
                }
            }
        }
        print(&(&self.log, &self.proposals, self.leader, self.crashes, self.falses, &self.fault)).hash(state);
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        let print = |state: &State| {
            let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
            state.hash(&mut hasher);
            hasher.finish()
        };
        print(self) == print(other)
    }
}

fn life(at: usize) -> Incarnation {
    Incarnation(at as u64 + 1)
}

fn at(life: Incarnation) -> usize {
    life.0 as usize - 1
}

impl State {
    fn new(bounds: &Bounds) -> Self {
        let place = |at: usize| Place { name: name(at), incarnation: life(at), ranks: vec![RankId(at as u32)] };
        let members: Vec<Place> = (0..bounds.nodes).map(place).collect();
        let truth = Agreed::founded(ClusterId(9), members.clone(), 64);
        let node = |at: usize| {
            let life = Life { name: name(at), incarnation: life(at), ranks: 1, replaces: None, witness: false };
            let mut machine = Machine::new(life, config(), 0);
            machine.planted = bounds.planted;
            Node {
                machine: Arc::new(machine),
                up: true,
                left: false,
                announced: false,
                heard: 0,
                told: 0,
                digest: 1,
                completed: Vec::new(),
                applied: BTreeSet::new(),
                print: 0,
            }
        };
        let mut state = Self {
            now_us: 0,
            nodes: (0..bounds.nodes).map(node).collect(),
            wires: BTreeMap::new(),
            log: Vec::new(),
            truth,
            proposals: Vec::new(),
            leader: 1,
            crashes: bounds.crashes,
            falses: bounds.falses,
            fault: None,
        };
        for at in 0..bounds.nodes {
            for other in (0..bounds.nodes).filter(|other| *other != at) {
                let peer = Peer { name: name(other), incarnation: life(other), replaces: None };
                state.feed(at, Input::LinkUp(peer));
            }
            state.tell(at);
        }
        for at in 0..bounds.nodes {
            state.feed(at, Input::Founded { cluster: ClusterId(9), members: members.clone() });
        }
        state
    }

    fn fail(&mut self, what: String) {
        self.fault.get_or_insert(what);
    }

    /// One input, and what the replica says to what comes of it.
    fn feed(&mut self, at: usize, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let mut out = Vec::new();
            let now_us = self.now_us;
            Arc::make_mut(&mut self.nodes[at].machine).handle(now_us, input, &mut out);
            if let Err(broken) = self.nodes[at].machine.check() {
                self.fail(format!("node {at}: {broken}"));
            }
            for effect in out {
                self.carry_out(at, effect, &mut inputs);
            }
        }
        let node = &mut self.nodes[at];
        node.print = 0;
        node.print = print(node);
    }

    fn carry_out(&mut self, from: usize, effect: Effect, inputs: &mut VecDeque<Input>) {
        let said = |round: Round, digest: u64| {
            let applied = round::Applied { round, digest, waiting: false, probing: false, stepping: false };
            Input::Round(round::Input::Applied(applied))
        };
        match effect {
            Effect::Send { to, message } => {
                let print = print(&message) | 1;
                if self.nodes[at(to)].up {
                    self.wires.entry((from, at(to))).or_default().push_back(Wire::Message(Arc::from(message), print));
                }
            }
            Effect::Completed(merged) => {
                let made = (merged.epoch.0, merged.round.0, merged.hash());
                let same = |known: &&(u64, u64, u64)| (known.0, known.1) == (made.0, made.1) && known.2 != made.2;
                if self.nodes.iter().any(|node| node.completed.iter().any(|known| same(&known))) {
                    self.fail(format!("node {from} completed another round {} of epoch {}", made.1, made.0));
                }
                let view: Option<BTreeSet<Incarnation>> =
                    self.nodes[from].machine.view().map(|v| v.members.iter().map(|m| m.incarnation).collect());
                if view.is_some_and(|view| merged.contributions.iter().any(|c| !view.contains(&c.member))) {
                    self.fail(format!("node {from} completed {} with somebody who is gone", made.1));
                }
                let node = &mut self.nodes[from];
                node.completed.push(made);
                let entries = merged.contributions.iter().flat_map(|c| c.entries.iter().map(|e| (c.member.0, e.seq)));
                let twice = entries.filter(|entry| !node.applied.insert(*entry)).count();
                node.digest = digest::element(node.digest, &[made.2]).max(1);
                inputs.push_back(said(merged.round, node.digest));
                if twice > 0 {
                    self.fail(format!("node {from} applied something twice in {}", made.1));
                }
            }
            Effect::Installed { view, .. } => {
                let node = &mut self.nodes[from];
                node.digest = digest::element(node.digest, &[view.epoch.0]).max(1);
                inputs.push_back(said(view.cut(), node.digest));
            }
            Effect::Propose(command) if self.leader == life(from).0 && !self.proposals.contains(&command) => {
                self.proposals.push(command);
            }
            Effect::Left(left) => {
                self.nodes[from].left = true;
                if matches!(left, Left::Misfit { .. } | Left::Diverged { .. }) {
                    self.fail(format!("node {from} left: {left:?}"));
                }
            }
            _ => {}
        }
    }

    fn tell(&mut self, at: usize) {
        let voters: Vec<Incarnation> = (0..self.nodes.len()).map(life).collect();
        let reached = voters.iter().copied().filter(|v| self.nodes[v.0 as usize - 1].up).collect();
        self.nodes[at].told = self.leader;
        self.feed(at, Input::Consensus(Consensus { leader: Some(Incarnation(self.leader)), voters, reached }));
    }

    fn commit(&mut self, which: usize) {
        let command = self.proposals.remove(which);
        self.log.push(command.clone());
        let fenced = self.nodes[0].machine.planted != Some(Planted::InstallWithoutChange);
        if self.truth.apply_if(self.log.len() as u64, &command, fenced) != Outcome::Installed {
            return;
        }
        let cut = self.truth.view().cut();
        for at in 0..self.nodes.len() {
            let node = &self.nodes[at];
            let stays = node.up && !node.left && self.truth.position(life(at)).is_some();
            if stays && node.machine.completed() != cut {
                self.fail(format!("node {at} stays at {} at the install behind {cut}", node.machine.completed()));
            }
        }
    }

    fn crash(&mut self, of: usize, kept: &[usize]) {
        self.crashes -= 1;
        self.nodes[of].up = false;
        for (other, kept) in (0..self.nodes.len()).zip(kept) {
            self.wires.remove(&(other, of));
            if other != of {
                let wire = self.wires.entry((of, other)).or_default();
                wire.truncate(*kept);
                wire.push_back(Wire::Down);
            }
        }
        if self.leader == life(of).0 {
            let next = (0..self.nodes.len()).find(|at| self.nodes[*at].up);
            self.leader = next.map_or(0, |at| life(at).0);
            // What it proposed is lost with it, or was committed before.
            self.proposals.clear();
        }
        let node = &mut self.nodes[of];
        node.print = 0;
        node.print = print(node);
    }

    /// Whom the leader waits for.
    fn owing(&self) -> Vec<Incarnation> {
        let leader = self.nodes[at(Incarnation(self.leader))].machine.leader.as_ref();
        leader.map(|leader| leader.waits_for()).unwrap_or_default()
    }

    /// Whether the faults left nobody who has the state.
    fn is_over(&self) -> bool {
        !self.truth.stayers().any(|m| self.nodes[at(m.incarnation)].up && !self.nodes[at(m.incarnation)].left)
    }

    fn suspects(&self, by: usize, of: usize) -> bool {
        let node = &self.nodes[by];
        let leads = self.nodes[at(Incarnation(self.leader))].machine.leader.is_some();
        let latest = node.machine.view().map(|v| v.epoch) == Some(self.truth.epoch);
        let known = self.nodes[at(Incarnation(self.leader))].machine.agreed().map(|a| (a.epoch, a.change()));
        by != of
            && node.up
            && leads
            && latest
            && self.truth.position(life(of)).is_some()
            && self.truth.pending.is_none()
            && known == Some((self.truth.epoch, None))
            && self.proposals.is_empty()
    }

    fn events(&self, bounds: &Bounds) -> Vec<Event> {
        let mut events = Vec::new();
        let count = self.nodes.len();
        if self.is_over() {
            return events;
        }
        for (&(from, to), wire) in &self.wires {
            if !wire.is_empty() && self.nodes[to].up {
                events.push(Event::Deliver(from, to));
            }
        }
        for at in (0..count).filter(|at| self.nodes[*at].up) {
            let node = &self.nodes[at];
            if node.heard < self.log.len() {
                events.push(Event::Hear(at));
            }
            if node.told != self.leader {
                events.push(Event::Tell(at));
            }
            if at < bounds.announcing && !node.announced && !node.left {
                events.push(Event::Announce(at));
            }
        }
        events.extend((0..self.proposals.len()).map(Event::Commit));
        if self.crashes > 0 {
            for of in 0..count {
                let mut kept = vec![vec![]];
                for other in 0..count {
                    let under_way = self.wires.get(&(of, other)).map_or(0, VecDeque::len);
                    kept = kept
                        .iter()
                        .flat_map(|k: &Vec<usize>| (0..=under_way).map(|n| [&k[..], &[n]].concat()))
                        .collect();
                }
                events.extend(kept.into_iter().map(|kept| Event::Crash(of, kept)));
            }
        }
        for of in 0..count {
            let mut accusers = (0..count).filter(|by| self.suspects(*by, of));
            if !self.nodes[of].up || self.falses > 0 && !self.nodes[of].left {
                events.extend(accusers.next().map(|by| Event::Suspect(by, of)));
            }
        }
        let owing = self.owing();
        let dead = |of: &Incarnation| !self.nodes[at(*of)].up;
        if self.truth.pending.is_some()
            && self.proposals.is_empty()
            && !owing.is_empty()
            && (self.falses > 0 && owing.len() == 1 || owing.iter().all(dead))
        {
            events.push(Event::Late);
        }
        events
    }

    fn apply(&mut self, event: &Event) {
        match *event {
            Event::Deliver(from, to) => match self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) {
                Some(Wire::Message(message, _)) => {
                    let message = Box::new((*message).clone());
                    self.feed(to, Input::Received { from: life(from), message });
                }
                _ => self.feed(to, Input::LinkDown(life(from))),
            },
            Event::Hear(at) => {
                let index = self.nodes[at].heard;
                self.nodes[at].heard += 1;
                self.feed(at, Input::Committed { index: index as u64 + 1, command: self.log[index].clone() });
            }
            Event::Commit(which) => self.commit(which),
            Event::Tell(at) => self.tell(at),
            Event::Announce(at) => {
                self.nodes[at].announced = true;
                let entry = Entry::Cancel(RequestKey { ingress: life(at), seq: 1 });
                self.feed(at, Input::Round(round::Input::Announce(entry)));
            }
            Event::Crash(of, ref kept) => self.crash(of, kept),
            Event::Suspect(by, of) => {
                self.falses -= usize::from(self.nodes[of].up);
                let sight = Sight { by: life(by), epoch: self.truth.epoch, down: vec![life(of)], ..Sight::default() };
                let leader = at(Incarnation(self.leader));
                let machine = Arc::make_mut(&mut self.nodes[leader].machine);
                // As gathered: what the members really see is clear, and would be heard too.
                if let Some(leader) = &mut machine.leader {
                    leader.suppose(self.now_us, sight);
                }
                self.feed(leader, Input::Round(round::Input::Tick));
            }
            Event::Late => {
                let lives = self.owing().iter().any(|of| self.nodes[at(*of)].up);
                self.falses -= usize::from(lives);
                self.now_us += 1;
                self.feed(at(Incarnation(self.leader)), Input::Round(round::Input::Tick));
            }
        }
    }

    /// Nothing more happens: it must have come to a good end.
    fn ends_well(&self) -> Result<(), String> {
        if self.is_over() {
            return Ok(());
        }
        let view = self.truth.view();
        if self.truth.pending.is_some() {
            return Err("a change never ends".into());
        }
        for member in &view.members {
            let node = &self.nodes[at(member.incarnation)];
            if !node.up || node.left || node.machine.view() != Some(&view) {
                return Err(format!("{} is in the view and not there", member.incarnation));
            }
            for other in view.members.iter().map(|m| m.incarnation).filter(|m| self.nodes[at(*m)].announced) {
                if node.applied.len() < node.applied.union(&BTreeSet::from([(other.0, 1)])).count() {
                    return Err(format!("what {other} announced is lost at {}", member.incarnation));
                }
            }
        }
        Ok(())
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(self)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Event>) {
        if state.fault.is_none() {
            actions.extend(state.events(self));
        }
    }

    fn next_state(&self, state: &State, event: Event) -> Option<State> {
        let mut next = state.clone();
        next.apply(&event);
        next.wires.retain(|_, wire| !wire.is_empty());
        if next.fault.is_none()
            && next.events(self).iter().all(|e| matches!(e, Event::Crash(..) | Event::Suspect(..) | Event::Announce(_)))
            && !next.events(self).iter().any(|e| matches!(e, Event::Suspect(_, of) if !next.nodes[*of].up))
            && let Err(what) = next.ends_well()
        {
            next.fail(what);
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |_, state: &State| state.fault.is_none()),
            Property::sometimes("views change", |_, state: &State| state.truth.epoch > Epoch(1)),
        ]
    }
}

/// States seen, and the first fault.
fn visit(bounds: Bounds, states_max: usize, deep: bool) -> (usize, Option<String>) {
    fn end(checker: &impl Checker<Bounds>) -> (usize, Option<String>) {
        let path = checker.discovery("sound").map(|path| {
            let events = path.clone().into_actions();
            let fault = path.last_state().fault.clone().unwrap_or_default();
            format!("{fault}, after {events:?}")
        });
        (checker.unique_state_count(), path)
    }
    let checker = bounds.checker().threads(1).target_state_count(states_max);
    if deep { end(&checker.spawn_dfs().join()) } else { end(&checker.spawn_bfs().join()) }
}

const THREE: Bounds = Bounds { nodes: 3, crashes: 0, falses: 0, announcing: 0, planted: None };

/// All states of each, or as many as are given.
fn visit_all(bounded: &[(Bounds, usize)]) {
    for (bounds, states_max) in bounded {
        let (states, fault) = visit(*bounds, *states_max, false);
        let Bounds { nodes, crashes, falses, announcing, .. } = bounds;
        eprintln!(
            "{nodes} nodes, {crashes} crashes, {falses} false suspicions, {announcing} announcing: {states} states"
        );
        assert_eq!(fault, None, "{states} states");
    }
}

/// Each bound on states counts repeated ones too; the first two are visited whole.
#[test]
fn three_machines_agree_and_come_to_a_good_end_in_every_order() {
    let crash = Bounds { crashes: 1, ..THREE };
    visit_all(&[
        (crash, usize::MAX),
        (Bounds { falses: 1, ..THREE }, usize::MAX),
        (Bounds { falses: 1, ..crash }, 400_000),
        (Bounds { announcing: 1, ..crash }, 300_000),
    ]);
    // Down to the ends of runs, which a search by breadth comes to last.
    for bounds in [Bounds { falses: 1, ..crash }, Bounds { falses: 1, announcing: 1, ..crash }] {
        let (states, fault) = visit(bounds, 20_000, true);
        assert_eq!(fault, None, "{states} states");
    }
}

#[test]
#[ignore = "millions of states take minutes and gigabytes"]
fn four_machines_agree_and_come_to_a_good_end() {
    let four = Bounds { nodes: 4, crashes: 1, ..THREE };
    visit_all(&[
        (four, 2_000_000),
        (Bounds { falses: 1, ..four }, 1_000_000),
        (Bounds { falses: 1, ..THREE }, usize::MAX),
    ]);
    visit_all(&[(Bounds { falses: 1, crashes: 1, ..THREE }, 3_000_000)]);
}

#[test]
fn the_model_finds_what_is_planted() {
    for planted in [Planted::NoEpochCheck, Planted::SkipFill] {
        let bounds = Bounds { crashes: 1, falses: 1, planted: Some(planted), ..THREE };
        let (states, fault) = visit(bounds, 20_000, true);
        assert!(fault.is_some(), "{planted:?} lives through {states} states");
    }
}
