//! What happens to a cluster, and what must hold of it at the end.

use super::super::*;
use super::cluster::{Cluster, Setup};
use crate::ids::RequestKey;
use std::collections::BTreeSet;

/// One thing that could happen now.
#[derive(Clone, Copy, Debug)]
enum Event {
    Deliver(usize, usize),
    Work(usize),
    Tick(usize),
    Log(usize),
    Tell(usize),
    Commit,
    Voters,
    Renew(usize),
    Elect,
}

impl Cluster {
    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (&(from, to), wire) in &self.wires {
            if !wire.is_empty() && self.nodes[to].runs() {
                events.push(Event::Deliver(from, to));
            }
        }
        for (at, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.runs()) {
            if !node.work.is_empty() {
                events.push(Event::Work(at));
            }
            if node.machine.poll_timeout().is_some_and(|due| due <= self.now_us) {
                events.push(Event::Tick(at));
            }
            if self.hears_of_log(at) {
                events.push(Event::Log(at));
            }
            if node.told != self.consensus(at) {
                events.push(Event::Tell(at));
            }
            if node.left.is_some() && !self.voters.contains(&node.life()) {
                events.push(Event::Renew(at));
            }
        }
        if !self.proposals.is_empty() {
            events.push(Event::Commit);
        }
        if self.voters != voters(&self.truth.members, None) {
            events.push(Event::Voters);
        }
        if self.leader.is_none_or(|leader| !self.has_majority(leader)) {
            events.push(Event::Elect);
        }
        events
    }

    /// One thing happens somewhere, or time passes.
    pub(super) fn step(&mut self, lossy: bool) {
        let events = self.events();
        let hurry = if lossy { 8 } else { 40 };
        if events.is_empty() || self.draw.one_in(hurry) {
            let due = self.nodes.iter().filter(|n| n.runs()).filter_map(|n| n.machine.poll_timeout()).min();
            let some_us = if lossy { self.draw.below(4_000) } else { self.draw.below(300) };
            let at_least = if events.is_empty() { due.unwrap_or(0) } else { 0 };
            self.now_us = at_least.max(self.now_us + 1 + some_us);
            return;
        }
        match events[self.draw.below(events.len() as u64) as usize] {
            Event::Deliver(from, to) => self.deliver(from, to),
            Event::Work(at) => self.work(at),
            Event::Tick(at) => self.feed(at, Input::Round(round::Input::Tick)),
            Event::Log(at) => self.hear_of_log(at),
            Event::Tell(at) => {
                let consensus = self.consensus(at);
                self.nodes[at].told = consensus.clone();
                self.feed(at, Input::Consensus(consensus));
            }
            Event::Commit => self.commit(lossy),
            Event::Voters => self.change_voters(),
            Event::Renew(at) => self.renew(at),
            Event::Elect => self.elect(),
        }
    }

    fn renew(&mut self, at: usize) {
        if self.nodes[at].leaving && self.draw.one_in(2) {
            self.die(at);
            self.nodes[at].retired = true;
        } else {
            self.new_life(at, None);
        }
    }

    fn die(&mut self, at: usize) {
        for other in (0..self.nodes.len()).filter(|other| *other != at) {
            self.cut(at, other);
            self.wires.remove(&(other, at));
        }
        self.nodes[at].up = false;
        self.nodes[at].asleep = false;
        self.nodes[at].work.clear();
    }

    fn boot(&mut self, at: usize) {
        if !self.nodes[at].up && !self.nodes[at].retired {
            self.nodes[at] = self.new_node(at, None);
        }
    }

    /// Whether the cluster survives the end of this life: most voters live, and two of those who stay.
    fn may_end(&self, at: usize) -> bool {
        let ends = self.nodes[at].life();
        let lives = |life: Incarnation| life != ends && self.at(life).is_some_and(|at| self.nodes[at].up);
        let voters = self.voters.iter().filter(|voter| lives(**voter)).count();
        let stay = self.truth.stayers().filter(|m| {
            let left = self.at(m.incarnation).is_some_and(|at| self.nodes[at].left.is_some());
            lives(m.incarnation) && !left
        });
        voters * 2 > self.voters.len() && stay.count() >= 2
    }

    pub(super) fn fault(&mut self) {
        let count = self.nodes.len();
        let at = self.draw.below(count as u64) as usize;
        let other = (at + 1 + self.draw.below(count as u64 - 1) as usize) % count;
        match self.draw.below(16) {
            0 if self.nodes[at].up && self.may_end(at) => self.die(at),
            1 | 2 => (0..count).for_each(|at| self.boot(at)),
            3 if self.nodes[at].up => self.nodes[at].asleep = true,
            4 => (0..count).for_each(|at| self.nodes[at].asleep = false),
            5 | 6 => self.cut(at, other),
            7..=9 => {
                for a in 0..count {
                    for b in a + 1..count {
                        self.link(a, b);
                    }
                }
            }
            10 if self.linked.contains(&(at.min(other), at.max(other))) => {
                self.lossy.insert((at, other));
            }
            11 | 12 => self.notice(),
            13 if self.nodes[at].runs() && self.may_end(at) => {
                let actor = self.nodes[at].machine.view().is_some() && self.draw.one_in(2);
                let replaces = actor.then(|| self.nodes[at].life());
                self.new_life(at, replaces);
            }
            14 if self.nodes[at].runs() && self.may_leave(at) => {
                self.nodes[at].leaving = true;
                self.feed(at, Input::Leave);
            }
            15 => self.elect(),
            _ => {}
        }
    }

    fn may_leave(&self, at: usize) -> bool {
        let stay = self.nodes.iter().filter(|node| !node.leaving && !node.retired && node.left.is_none()).count();
        stay > 3 && self.nodes[at].left.is_none() && self.nodes[at].machine.view().is_some() && self.may_end(at)
    }

    /// Ends of a link that loses one direction, or whose other end is stopped, notice it.
    fn notice(&mut self) {
        let lossy: Vec<(usize, usize)> = self.lossy.iter().copied().collect();
        let asleep = |at: usize| self.nodes[at].asleep;
        let stopped: Vec<(usize, usize)> =
            self.linked.iter().copied().filter(|(a, b)| asleep(*a) != asleep(*b)).collect();
        for (a, b) in lossy.into_iter().chain(stopped) {
            self.cut(a, b);
        }
    }

    /// All faults are over.
    pub(super) fn calm(&mut self) {
        let count = self.nodes.len();
        for at in 0..count {
            self.boot(at);
            self.nodes[at].asleep = false;
        }
        self.notice();
        self.lossy.clear();
        for a in 0..count {
            for b in a + 1..count {
                self.link(a, b);
            }
        }
    }

    /// Whether nobody is left that could go on.
    fn is_over(&self) -> bool {
        let lives =
            |life: Incarnation| self.at(life).is_some_and(|at| self.nodes[at].up && self.nodes[at].left.is_none());
        let voters = self.voters.iter().filter(|voter| self.at(**voter).is_some_and(|at| self.nodes[at].up)).count();
        !self.truth.stayers().any(|m| lives(m.incarnation)) || voters * 2 <= self.voters.len()
    }

    pub(super) fn is_settled(&self) -> bool {
        let view = self.truth.view();
        let mut present = self.nodes.iter().filter(|node| !node.retired);
        self.truth.pending.is_none()
            && present.all(|node| node.machine.view() == Some(&view) && node.machine.pending().is_none())
    }

    pub(super) fn least_completed(&self) -> u64 {
        let present = self.nodes.iter().filter(|node| !node.retired);
        present.map(|node| node.machine.completed().0).min().unwrap_or(0)
    }

    /// What must hold of all that happened.
    fn verify(&self) -> Result<(), String> {
        let is_void = |epoch: u64, round: u64| self.cuts.get(&epoch).is_some_and(|cut| round > *cut);
        for ((epoch, round), (_, _, who)) in &self.completed {
            if !is_void(*epoch, *round) {
                continue;
            }
            let next = self.views.get(&(epoch + 1));
            let stayed = who.iter().find(|life| next.is_some_and(|next| next.contains(life)));
            if let Some(life) = stayed {
                return Err(format!("{life} stayed and completed {round} of epoch {epoch}, above the cut"));
            }
            if self.cuts.get(epoch) != Some(&(round - 1)) {
                return Err(format!("round {round} of epoch {epoch} is more than one above the cut"));
            }
            if let Some(life) = who.iter().find(|life| self.polite.get(life) == Some(epoch)) {
                return Err(format!("{life} left politely and completed {round} of epoch {epoch}, above the cut"));
            }
        }
        for (key, rounds) in &self.enqueued {
            let times = rounds.iter().filter(|(epoch, round)| !is_void(*epoch, *round)).count();
            if times > 1 {
                return Err(format!("{key} was applied in {rounds:?}"));
            }
        }
        let members: BTreeSet<Incarnation> = self.truth.members.iter().map(|m| m.incarnation).collect();
        for node in self.nodes.iter().filter(|node| members.contains(&node.life())) {
            for seq in 1..=node.announced {
                let key = RequestKey { ingress: node.life(), seq };
                let applied = self.enqueued.get(&key);
                if !applied.is_some_and(|rounds| rounds.iter().any(|(epoch, round)| !is_void(*epoch, *round))) {
                    return Err(format!("{key} of a living ingress is lost"));
                }
            }
        }
        Ok(())
    }
}

/// What a run came to.
#[derive(Default)]
pub(super) struct Came {
    pub(super) views: u64,
    pub(super) rounds: usize,
    /// The faults left nobody that could go on, so it was not seen to end well.
    pub(super) over: bool,
}

/// Faults in `faults` of a thousand steps, then none.
pub(super) fn run(setup: &Setup, steps: u64, faults: u64) -> Result<(Cluster, Came), String> {
    let mut cluster = Cluster::new(setup);
    for step in 0..steps {
        cluster.step(true);
        let at = cluster.draw.below(cluster.nodes.len() as u64) as usize;
        if step % 13 == 0 && cluster.nodes[at].runs() && cluster.nodes[at].left.is_none() {
            cluster.announce(at);
        }
        if cluster.draw.below(1000) < faults {
            cluster.fault();
        }
        if let Some(fault) = cluster.fault.take() {
            return Err(format!("step {step}: {fault}"));
        }
    }
    let over = !settle(&mut cluster)?;
    if !over {
        cluster.verify()?;
    }
    let came = Came { views: cluster.truth.epoch.0, rounds: cluster.completed.len(), over };
    Ok((cluster, came))
}

/// Steps after the faults in which all must be in one view: some hundred rounds.
const STEPS_MAX: u64 = 200_000;

/// False if nobody is left that could go on.
pub(super) fn settle(cluster: &mut Cluster) -> Result<bool, String> {
    let mut from = None;
    for step in 0..STEPS_MAX {
        if step % 64 == 0 && from.is_none() {
            cluster.calm();
            if cluster.is_over() {
                return Ok(false);
            }
        }
        cluster.step(false);
        if let Some(fault) = cluster.fault.take() {
            return Err(format!("calm step {step}: {fault}"));
        }
        match from {
            None if cluster.is_settled() => {
                from = Some(cluster.least_completed());
                for at in 0..cluster.nodes.len() {
                    if !cluster.nodes[at].retired {
                        cluster.announce(at);
                    }
                }
            }
            // What was announced meanwhile needs a round or two.
            Some(round) if cluster.least_completed() >= round + 8 => return Ok(true),
            _ => {}
        }
    }
    let stand = |at: usize| {
        let node = &cluster.nodes[at];
        format!(
            "\n  {at} = {} up {} left {:?} retired {} agreed {:?} in {:?} at {} {:?} told {:?}",
            node.life(),
            node.up,
            node.left,
            node.retired,
            node.machine.agreed().map(|a| (a.index, a.epoch, a.change())),
            node.machine.view().map(|v| v.epoch),
            node.machine.completed(),
            node.machine.standstill(),
            node.told.leader,
        )
    };
    let nodes: String = (0..cluster.nodes.len()).map(stand).collect();
    Err(format!(
        "does not come to rest: log {} {:?} {:?}{nodes}",
        cluster.log.len(),
        cluster.truth.epoch,
        cluster.truth.pending
    ))
}
