//! How a node gets into a cluster, and out of one that is over.
//!
//! The settings name the nodes that found a cluster. A node outside pledges itself to one set of incarnations, one for
//! **each** of these names; when all have pledged the same set, each of them begins that same membership, also later if a
//! member shows that the set was full. All names, not some: two halves of a partition can never both begin, and one member
//! of an older cluster stops a second one, since the others join it. A group so many of whose voters are gone for good that
//! no majority can be left is over: its members leave it, draw a new incarnation each, and join a cluster or found one.
//!
//! The machine lives as long as its process. Nodes tell each other where they stand, whole each time, over links that keep
//! order; so a message that is lost with its link is made good by the next one. Clusters never merge: a member that meets
//! another one refuses and counts it.
//!
//! # Invariants
//! - B1: a pledge is to a set that holds this very life and one life of each of the names.
//! - B2: a node inside a cluster is one of its members, by the life it has; where it knows the founders, they make the id.
//! - B3: a life enters one cluster at most: whoever leaves, or gives up joining, has no life until it is given a new one.
//! - B4: a name that is barred is in no cluster, joins none and is pledged to nothing.
//! - B5: the wait before a try is between 1 s and 60 s.
//! - B6: what is kept of others is bounded, by `PEERS_MAX` names and `PLEDGES_MAX` sets.
//! - B7: nobody is pledged while a linked node, of whatever version, is in a cluster.
//! - B8: no life has two votes or two places in a cluster.

mod effects;
mod invariants;
mod lives;
mod patience;
mod peers;
mod planted;
mod readiness;

pub use effects::{Counts, Effect, Input, Left, Membership, Why};
pub use lives::{Founders, LIVES_MAX, Life, Name};
pub use patience::{MISMATCHES_WITHIN_US, REJOIN_US_MAX, REJOIN_US_MIN};
pub use peers::{Hello, PEERS_MAX, Place, Refusal, Standing};
pub use readiness::Readiness;

use crate::digest;
use crate::ids::{ClusterId, Incarnation};
use lives::are_distinct;
use patience::Mismatches;
use peers::{Peer, Peers};
use planted::Planted;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Sets that one life pledges itself to at most; then it draws a new one. Sets differ only when other nodes begin new
/// lives, so this is far above what a start with a few restarts needs.
pub const PLEDGES_MAX: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Config {
    /// Whose set begins a cluster. Equal on all nodes that are to found one; a node that is not named only joins.
    pub bootstrap: Vec<Name>,
    /// What this process speaks; who differs is refused.
    pub version: u32,
    /// Hash of all settings that decide; who differs is refused.
    pub settings: u64,
    /// A pledge lapses after this time if its set did not fill.
    pub pledge_us: u64,
    /// Joining is given up after this time.
    pub join_us_max: u64,
    /// For how long a group must look over before it is left: what members know of each other is never quite of one time.
    pub over_after_us: u64,
    /// Mismatches within ten minutes after which a name stays out.
    pub mismatches_max: u32,
}

impl Config {
    /// The bounds of the protocol: pledges of 10 s, three mismatches; 60 s to join, 2 s (as long as a suspicion takes) to
    /// leave a group that is over.
    pub fn new(bootstrap: Vec<Name>, version: u32, settings: u64) -> Self {
        Self {
            bootstrap,
            version,
            settings,
            pledge_us: 10_000_000,
            join_us_max: 60_000_000,
            over_after_us: 2_000_000,
            mismatches_max: 3,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Pledge {
    founders: Founders,
    since_us: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Outside {
        pledge: Option<Pledge>,
    },
    Joining {
        cluster: ClusterId,
        via: Life,
        since_us: u64,
    },
    Inside {
        cluster: ClusterId,
        founders: Option<Founders>,
        members: Vec<Life>,
        voters: Vec<Life>,
        since_us: u64,
        /// Since when the group looks over.
        over_since_us: Option<u64>,
    },
    /// Between two lives.
    Drawing,
}

/// The machine of one process. See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    config: Config,
    me: Name,
    incarnation: Incarnation,
    phase: Phase,
    peers: Peers,
    /// Sets that this life has pledged itself to, by the clusters they found.
    pledged: Vec<ClusterId>,
    /// B3: the cluster that this life has entered, or has asked to be taken in by.
    entered: Option<ClusterId>,
    /// Tries to be in a cluster that failed in a row.
    tries: u32,
    /// Before this time nothing is tried.
    quiet_until_us: Option<u64>,
    /// B5: how long the wait before this life's tries is, if there is one.
    waited_us: Option<u64>,
    mismatches: BTreeMap<Name, Mismatches>,
    counts: Counts,
    /// Who has to be told where this node stands.
    untold: BTreeSet<Name>,
    planted: Planted,
}

impl Machine {
    /// A process that has just begun, with its first life.
    pub fn new(me: Name, incarnation: Incarnation, mut config: Config) -> Self {
        config.bootstrap.sort_unstable();
        config.bootstrap.dedup();
        Self {
            config,
            me,
            incarnation,
            phase: Phase::Outside { pledge: None },
            peers: Peers::default(),
            pledged: Vec::new(),
            entered: None,
            tries: 0,
            quiet_until_us: None,
            waited_us: None,
            mismatches: BTreeMap::new(),
            counts: Counts::default(),
            untold: BTreeSet::new(),
            planted: Planted::default(),
        }
    }

    /// Takes one input at `now_us` of a monotonic clock.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        let stood = self.standing();
        match input {
            Input::LinkUp { name, hello } => self.link_up(name, &hello, out),
            Input::LinkDown { name } => {
                if let Some(peer) = self.peers.get_mut(&name) {
                    peer.up = false;
                }
            }
            Input::Received { from, standing } => self.received(from, *standing, out),
            Input::RefusedBy { name, why } => {
                if let Some(peer) = self.peers.get_mut(&name) {
                    peer.refused = Some(why);
                }
            }
            Input::InCluster(membership) => self.in_cluster(now_us, membership, out),
            Input::Left(left) => self.left(now_us, left, out),
            Input::Incarnation(incarnation) => self.born(now_us, incarnation, out),
            Input::Mismatched { name } => self.mismatched(now_us, name, out),
            Input::Abandon { bootstrap } => self.abandon(now_us, bootstrap, out),
            Input::Readmit { name } => {
                self.mismatches.remove(&name);
                if let Some(peer) = self.peers.get_mut(&name)
                    && matches!(peer.refused, Some(Refusal::Diverged { .. }))
                {
                    peer.refused = None;
                    self.untold.insert(name);
                }
            }
            Input::Tick => {}
        }
        self.quiet_until_us = self.quiet_until_us.filter(|until| now_us < *until);
        self.advance(now_us, out);
        self.tell(stood, out);
    }

    /// When this machine wants a `Tick`.
    pub fn poll_timeout(&self) -> Option<u64> {
        match &self.phase {
            Phase::Outside { pledge: Some(pledge) } => Some(pledge.since_us.saturating_add(self.config.pledge_us)),
            Phase::Outside { pledge: None } => self.quiet_until_us.filter(|_| !self.is_barred()),
            Phase::Joining { since_us, .. } => Some(since_us.saturating_add(self.config.join_us_max)),
            Phase::Inside { over_since_us, .. } => over_since_us.map(|at| at.saturating_add(self.config.over_after_us)),
            Phase::Drawing => None,
        }
    }

    pub fn life(&self) -> Life {
        Life { name: self.me.clone(), incarnation: self.incarnation }
    }

    /// The cluster that this node is in.
    pub fn cluster(&self) -> Option<ClusterId> {
        match &self.phase {
            Phase::Inside { cluster, .. } => Some(*cluster),
            Phase::Outside { .. } | Phase::Joining { .. } | Phase::Drawing => None,
        }
    }

    /// What this node begins each link with.
    pub fn hello(&self) -> Hello {
        Hello {
            incarnation: self.incarnation,
            version: self.config.version,
            settings: self.config.settings,
            cluster: self.cluster(),
        }
    }

    /// Whether a cluster with this member may take a node of that name in.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, name: &str) -> Result<(), Refusal> {
        self.barring(name).map_or(Ok(()), Err)
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    // -- what comes in

    fn link_up(&mut self, name: Name, hello: &Hello, out: &mut Vec<Effect>) {
        if name == self.me {
            self.refuse(name.clone(), Refusal::NameTaken { name }, out);
            return;
        }
        let peer = Peer::new(hello, self.peers.get(&name));
        if !self.peers.put(name.clone(), peer) {
            self.refuse(name, Refusal::TooManyNames { limit: PEERS_MAX }, out);
            return;
        }
        self.supersede(&name, hello.incarnation, out);
        let (version, settings) = (self.config.version, self.config.settings);
        if hello.version != version {
            self.refuse(name, Refusal::Version { ours: version, theirs: hello.version }, out);
        } else if hello.settings != settings {
            self.refuse(name, Refusal::Settings { ours: settings, theirs: hello.settings }, out);
        } else if let Some(why) = self.barring(&name) {
            self.refuse(name, why, out);
        } else {
            self.untold.insert(name);
        }
    }

    fn received(&mut self, from: Name, standing: Standing, out: &mut Vec<Effect>) {
        let heard = self.peers.get(&from).is_some_and(Peer::is_heard);
        if !heard || !standing.is_well_formed(&from) {
            self.counts.malformed += 1;
            return;
        }
        self.supersede(&from, standing.incarnation, out);
        let ours = self.cluster();
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let before = peer.cluster.filter(|_| peer.has_said);
        peer.stands(standing);
        if let (Some(ours), Some(theirs)) = (ours, peer.cluster)
            && ours != theirs
            && before != Some(theirs)
        {
            self.meet(from, ours, theirs, out);
        }
    }

    /// Two clusters have met: they never merge.
    fn meet(&mut self, name: Name, ours: ClusterId, theirs: ClusterId, out: &mut Vec<Effect>) {
        self.counts.refused += 1;
        self.counts.other_cluster += 1;
        out.push(Effect::Refuse { name, why: Refusal::OtherCluster { ours, theirs } });
    }

    /// This node is in a cluster now: who is in another one?
    fn meet_others(&mut self, ours: ClusterId, out: &mut Vec<Effect>) {
        let others = self.peers.heard().filter_map(|(name, peer)| Some((name.clone(), peer.cluster?)));
        let others: Vec<(Name, ClusterId)> = others.filter(|(_, theirs)| *theirs != ours).collect();
        for (name, theirs) in others {
            self.meet(name, ours, theirs, out);
        }
    }

    /// Another life of a member cannot take part in its stead.
    fn supersede(&mut self, name: &Name, incarnation: Incarnation, out: &mut Vec<Effect>) {
        if let Phase::Inside { members, .. } = &self.phase {
            let old = members.iter().find(|life| life.name == *name && life.incarnation != incarnation);
            // A newer life that is in this cluster already is a member by a change that is not known here yet.
            let joined =
                self.peers.get(name).is_some_and(|peer| peer.cluster.is_some() && peer.cluster == self.cluster());
            out.extend(old.filter(|_| !joined).cloned().map(Effect::Superseded));
        }
    }

    fn refuse(&mut self, name: Name, why: Refusal, out: &mut Vec<Effect>) {
        self.counts.refused += 1;
        if let Some(peer) = self.peers.get_mut(&name) {
            peer.refused = Some(why.clone());
        }
        out.push(Effect::Refuse { name, why });
    }

    fn in_cluster(&mut self, now_us: u64, membership: Membership, out: &mut Vec<Effect>) {
        let me = self.life();
        let (founders, since_us, over_since_us) = match &self.phase {
            Phase::Inside { cluster, founders, since_us, over_since_us, .. } if *cluster == membership.cluster => {
                (founders.clone(), *since_us, *over_since_us)
            }
            Phase::Joining { cluster, .. } if *cluster == membership.cluster => {
                let known = self.peers.heard().filter(|(_, peer)| peer.cluster == Some(*cluster));
                (known.filter_map(|(_, peer)| peer.founders.clone()).next(), now_us, None)
            }
            _ => {
                self.counts.unexpected += 1;
                return;
            }
        };
        let Membership { cluster, members, voters } = membership;
        if !are_distinct(&members) || !are_distinct(&voters) {
            self.counts.unexpected += 1;
        } else if members.contains(&me) {
            let new = self.cluster() != Some(cluster);
            self.phase = Phase::Inside { cluster, founders, members, voters, since_us, over_since_us };
            if new {
                self.meet_others(cluster, out);
            }
        } else {
            self.left(now_us, Left::Evicted, out);
        }
    }

    fn left(&mut self, now_us: u64, left: Left, out: &mut Vec<Effect>) {
        if !matches!(self.phase, Phase::Inside { .. } | Phase::Joining { .. }) {
            self.counts.unexpected += 1;
            return;
        }
        if left == Left::Diverged {
            let max = self.config.mismatches_max;
            self.mismatches.entry(self.me.clone()).or_default().count(now_us, max);
        }
        self.draw(now_us, Why::Left(left), out);
    }

    fn born(&mut self, now_us: u64, incarnation: Incarnation, out: &mut Vec<Effect>) {
        if self.phase != Phase::Drawing {
            self.counts.unexpected += 1;
        } else if incarnation == self.incarnation {
            self.counts.unexpected += 1;
            out.push(Effect::DrawIncarnation(Why::NotNew));
        } else {
            self.incarnation = incarnation;
            self.entered = None;
            self.phase = Phase::Outside { pledge: None };
            self.waited_us = (self.tries > 0).then(|| patience::rejoin_us(self.tries - 1, incarnation));
            self.quiet_until_us = self.waited_us.map(|wait| now_us.saturating_add(wait));
            self.tell_all();
        }
    }

    fn mismatched(&mut self, now_us: u64, name: Name, out: &mut Vec<Effect>) {
        // One's own are counted where the life that lost ends.
        if name == self.me || (self.mismatches.len() >= PEERS_MAX && !self.mismatches.contains_key(&name)) {
            return;
        }
        let max = self.config.mismatches_max;
        self.mismatches.entry(name.clone()).or_default().count(now_us, max);
        if let Some(why) = self.barring(&name).filter(|_| self.peers.get(&name).is_some_and(Peer::is_heard)) {
            self.refuse(name, why, out);
        }
    }

    fn abandon(&mut self, now_us: u64, bootstrap: Option<Vec<Name>>, out: &mut Vec<Effect>) {
        if let Some(mut names) = bootstrap {
            names.sort_unstable();
            names.dedup();
            self.config.bootstrap = names;
        }
        // Whoever is asked to does not hesitate.
        self.tries = 0;
        self.quiet_until_us = None;
        if self.phase != Phase::Drawing {
            self.draw(now_us, Why::Abandoned, out);
            self.tries = 0;
        }
    }

    /// Ends this life. What others said of themselves stays true.
    fn draw(&mut self, now_us: u64, why: Why, out: &mut Vec<Effect>) {
        if let Phase::Inside { since_us, .. } = &self.phase
            && now_us.saturating_sub(*since_us) >= REJOIN_US_MAX
        {
            self.tries = 0;
        }
        self.tries = self.tries.saturating_add(1);
        self.phase = Phase::Drawing;
        self.pledged.clear();
        self.counts.draws += 1;
        out.push(Effect::DrawIncarnation(why));
    }

    // -- what follows

    fn advance(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        match &self.phase {
            Phase::Outside { .. } => self.seek(now_us, out),
            Phase::Joining { cluster, via, since_us } => {
                let there = self.peers.get(&via.name).is_some_and(|peer| {
                    peer.is_heard() && peer.incarnation == via.incarnation && peer.cluster == Some(*cluster)
                });
                if !there || now_us.saturating_sub(*since_us) >= self.config.join_us_max {
                    self.draw(now_us, Why::JoinGivenUp, out);
                }
            }
            Phase::Inside { .. } => self.watch(now_us, out),
            Phase::Drawing => {}
        }
    }

    /// Outside: a cluster to join, or a set to begin one with.
    fn seek(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        if self.is_barred() {
            self.phase = Phase::Outside { pledge: None };
            return;
        }
        if self.is_shown(now_us, out) {
            return;
        }
        self.lapse(now_us);
        if self.peers.up().any(|(_, peer)| peer.cluster.is_some()) {
            // One member of a cluster stops another one.
            self.phase = Phase::Outside { pledge: None };
            if self.quiet_until_us.is_none() {
                self.join(now_us, out);
            }
            return;
        }
        if matches!(self.phase, Phase::Outside { pledge: None }) && self.quiet_until_us.is_none() {
            self.pledge(now_us, out);
        }
        if let Phase::Outside { pledge: Some(pledge) } = &self.phase
            && self.lacking(&pledge.founders).is_empty()
        {
            let founders = pledge.founders.clone();
            self.begin(now_us, founders, out);
        }
    }

    /// A member shows that a set was full to which this life had pledged itself.
    fn is_shown(&mut self, now_us: u64, out: &mut Vec<Effect>) -> bool {
        let me = self.life();
        let full = |f: &&Founders| f.holds(&me) && self.pledged.contains(&f.cluster());
        let shown = self.peers.heard().filter_map(|(_, peer)| peer.founders.as_ref()).find(full).cloned();
        let Some(founders) = shown else { return false };
        // Should it have been evicted since, the others tell it so.
        self.begin(now_us, founders, out);
        true
    }

    /// A pledge holds until its time is over, or one of its names shows another life: that set can only be filled by what
    /// was said before, and who filled it shows so.
    fn lapse(&mut self, now_us: u64) {
        let Phase::Outside { pledge: Some(pledge) } = &self.phase else { return };
        let late = now_us.saturating_sub(pledge.since_us) >= self.config.pledge_us;
        let stale = |life: &Life| self.peers.get(&life.name).is_some_and(|p| p.up && p.incarnation != life.incarnation);
        if late || pledge.founders.lives().iter().any(stale) {
            self.counts.pledges_lapsed += 1;
            self.phase = Phase::Outside { pledge: None };
        }
    }

    /// Pledges itself to the lives that all the names have now, if they are all there.
    fn pledge(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let names = &self.config.bootstrap;
        let lives: Vec<Life> = names.iter().filter_map(|name| self.life_of(name)).collect();
        let wanted = if self.planted.some_names() { names.len() / 2 + 1 } else { names.len() };
        let founders = Founders::new(lives).filter(|f| f.lives().len() >= wanted && f.holds(&self.life()));
        let Some(founders) = founders else { return };
        let cluster = founders.cluster();
        if !self.pledged.contains(&cluster) {
            if self.pledged.len() >= PLEDGES_MAX {
                self.draw(now_us, Why::PledgesSpent, out);
                return;
            }
            self.pledged.push(cluster);
        }
        self.counts.pledges += 1;
        self.phase = Phase::Outside { pledge: Some(Pledge { founders, since_us: now_us }) };
    }

    /// The life that a name has, if it can be pledged with.
    fn life_of(&self, name: &Name) -> Option<Life> {
        if *name == self.me {
            return Some(self.life());
        }
        let peer = self.peers.get(name).filter(|peer| peer.is_heard() && peer.cluster.is_none())?;
        Some(Life { name: name.clone(), incarnation: peer.incarnation })
    }

    /// Names of a set whose pledge to it has not come.
    fn lacking(&self, founders: &Founders) -> Vec<Name> {
        let has = |name: &Name| self.peers.get(name).is_some_and(|peer| peer.pledge.as_ref() == Some(founders));
        let others = founders.lives().iter().filter(|life| life.name != self.me);
        others.map(|life| life.name.clone()).filter(|name| !has(name)).collect()
    }

    fn begin(&mut self, now_us: u64, founders: Founders, out: &mut Vec<Effect>) {
        let (cluster, members) = (founders.cluster(), founders.lives().to_vec());
        self.counts.begun += 1;
        self.entered = Some(cluster);
        out.push(Effect::Begin { cluster, members: members.clone() });
        let voters = members.clone();
        let founders = Some(founders);
        self.phase = Phase::Inside { cluster, founders, members, voters, since_us: now_us, over_since_us: None };
        self.meet_others(cluster, out);
    }

    fn join(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        // Who said no more than its hello is about to say who its founders are: this life may be one of them.
        let inside = self.peers.heard().filter(|(_, peer)| peer.has_said);
        let vias: Vec<(ClusterId, Life)> = inside
            .filter_map(|(name, peer)| {
                Some((peer.cluster?, Life { name: name.clone(), incarnation: peer.incarnation }))
            })
            .collect();
        if vias.is_empty() {
            return;
        }
        // Each life asks whom its incarnation names, so that in the end all are asked, and not by all at once.
        let at = digest::element(VIA, &[self.incarnation.0]) % vias.len() as u64;
        let (cluster, via) = vias[at as usize].clone();
        self.counts.joins += 1;
        self.entered = Some(cluster);
        out.push(Effect::Join { cluster, via: via.clone() });
        self.phase = Phase::Joining { cluster, via, since_us: now_us };
    }

    /// Inside: leaves a group that looks over for long enough.
    fn watch(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let looks_over = self.looks_over();
        let Phase::Inside { over_since_us, .. } = &mut self.phase else { return };
        *over_since_us = looks_over.then(|| over_since_us.unwrap_or(now_us));
        if over_since_us.is_some_and(|since| now_us.saturating_sub(since) >= self.config.over_after_us) {
            self.draw(now_us, Why::GroupOver, out);
        }
    }

    /// Whether so many voters are gone for good that the rest is no majority.
    fn looks_over(&self) -> bool {
        let Phase::Inside { cluster, members, voters, .. } = &self.phase else { return false };
        let gone = voters.iter().filter(|voter| self.is_gone(voter, (*cluster, members))).count();
        !voters.is_empty() && 2 * (voters.len() - gone) <= voters.len()
    }

    /// Its name runs a newer life; or this very life is in another cluster. A newer life that is in this cluster shows that
    /// the voters known here are those of an earlier time, unless it is among the members known here: then the former life
    /// still has a vote that nobody can cast.
    fn is_gone(&self, voter: &Life, (cluster, members): (ClusterId, &[Life])) -> bool {
        if voter.name == self.me {
            // A former life of one's own casts no vote either.
            return voter.incarnation != self.incarnation;
        }
        let Some(peer) = self.peers.get(&voter.name) else { return false };
        if peer.incarnation == voter.incarnation {
            return peer.cluster.is_some_and(|theirs| theirs != cluster) && !self.planted.newer_alone();
        }
        // Over a link that is down, what is known may be older than the voter is.
        let newer = peer.up || peer.former.contains(&voter.incarnation);
        let is_member = members.iter().any(|life| life.name == voter.name && life.incarnation == peer.incarnation);
        newer && (is_member || peer.cluster != Some(cluster))
    }

    // -- what goes out

    fn standing(&self) -> Standing {
        let place = match &self.phase {
            Phase::Outside { pledge } => Place::Outside { pledge: pledge.as_ref().map(|p| p.founders.clone()) },
            Phase::Joining { .. } | Phase::Drawing => Place::Outside { pledge: None },
            Phase::Inside { cluster, founders, .. } => Place::Inside { cluster: *cluster, founders: founders.clone() },
        };
        Standing { incarnation: self.incarnation, place }
    }

    fn tell_all(&mut self) {
        self.untold.extend(self.peers.heard().map(|(name, _)| name.clone()));
    }

    /// Tells the others where this node stands, if that has changed or they do not know. Between two lives there is nothing
    /// to tell: the next one is about to begin.
    fn tell(&mut self, stood: Standing, out: &mut Vec<Effect>) {
        if self.phase == Phase::Drawing {
            return;
        }
        let standing = self.standing();
        if standing != stood {
            self.tell_all();
        }
        for to in std::mem::take(&mut self.untold) {
            if self.peers.get(&to).is_some_and(Peer::is_heard) {
                out.push(Effect::Send { to, standing: Box::new(standing.clone()) });
            }
        }
    }

    fn is_barred(&self) -> bool {
        self.barring(&self.me).is_some()
    }

    fn barring(&self, name: &str) -> Option<Refusal> {
        let (name, mismatches) = self.mismatches.get_key_value(name).filter(|(_, m)| m.is_barred())?;
        Some(Refusal::Diverged { name: name.clone(), times: mismatches.times() })
    }
}

const VIA: u64 = 0x33;

#[cfg(test)]
mod tests;
