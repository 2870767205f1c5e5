//! The replica: waiting queue, router and assignment table, the same on every node.
//!
//! `apply(round)` is a pure function of the replica's state and the merged input of a round, so every node derives the
//! same decisions and none is asked. A request is `waiting`, then `placed`, then `closing` (its rank is done), and gone
//! when its ingress says so; after a failure it is `held` until its ingress resumes it.
//!
//! # Invariants
//! - P1: a request waits in the queue exactly while its state is `Waiting`.
//! - P2: a rank's open count is the weight of the requests placed on it; under `strict-cap` it never passes the cap by a
//!   placement.
//! - P3: attempts of a request count up by one with each placement; an entry that names another attempt is ignored.
//! - P4: an entry is applied at most once: the highest `seq` applied is kept per member.
//! - P5: the running digest equals the digest computed from scratch.

mod config;
mod install;
mod ranks;
mod requests;

pub use config::Config;

use crate::admission::{self, Admission, Admitted, Limits, Pass, Priority, Queue, Waiting, affinity};
use crate::digest;
use crate::ids::{Attempt, AttemptKey, Incarnation, RankId, RequestKey, RequestNumber, Round};
use crate::placement::{CountChildren, Placement, RankLoad, Router, Routing, Why};
use crate::rejection::Rejection;
use crate::round::{Applied, Arrival, Contribution, Entry, Merged, View};
use ranks::Rank;
use requests::{Request, Requests, State};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What a round decided, in order. Each node carries out what concerns it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    /// The request waits in the queue, under this number.
    Enqueued { key: RequestKey, number: RequestNumber },
    /// The ingress sends the prompt to `rank`; its node expects it.
    Placed { attempt: AttemptKey, number: RequestNumber, rank: RankId, why: Why },
    /// The rank ends the attempt and frees its blocks.
    Stop { attempt: AttemptKey, rank: RankId },
    /// The attempt failed: the ingress takes no more of its frames and resumes the request.
    Seal { attempt: AttemptKey },
    /// Ranks look up how much of the prompt they could reuse, for the next round.
    Probe { key: RequestKey, number: RequestNumber },
    /// The request is gone.
    Rejected { key: RequestKey, rejection: Rejection },
}

/// Things that should not happen, or happen seldom: counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// Entries that named an unknown request, another attempt, or came from a member that may not say so.
    pub entries_ignored: u64,
    /// Snapshots that counted all placements and yet differ from the replica's own count.
    pub counts_differ: u64,
    /// Slices whose memory did not match their running digest.
    pub digest_mismatches: u64,
    /// Requests that placement put nowhere; they went back to the queue.
    pub placements_dropped: u64,
}

/// The replicated state of a view, as it travels to a node that takes it over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// The donor's settings, to be compared and not taken over.
    settings: String,
    view: View,
    queue: Queue,
    router: Router,
    ranks: Vec<Rank>,
    requests: Vec<Request>,
    named: BTreeSet<RequestNumber>,
    applied_seq: Vec<(Incarnation, u64)>,
    next_number: u64,
    clock_us: u64,
    round: Round,
    digest: u64,
    faults: Faults,
}

/// The machine. See the module.
#[derive(Clone, Debug)]
pub struct Replica {
    config: Config,
    view: View,
    queue: Queue,
    router: Router,
    ranks: Vec<Rank>,
    requests: Requests,
    /// Requests that the last round named: the ones that this round may place, where the policy probes.
    named: BTreeSet<RequestNumber>,
    applied_seq: BTreeMap<Incarnation, u64>,
    next_number: u64,
    clock_us: u64,
    round: Round,
    digest: u64,
    faults: Faults,
    // Scratch of a round, kept for its allocations.
    admission: Admission,
    placement: Placement,
    counts: Vec<u32>,
    loads: Vec<RankLoad>,
}

impl Replica {
    pub fn new(view: View, config: Config) -> Self {
        let ranks: Vec<Rank> = view.ranks().map(|(id, member)| Rank::new(id, member)).collect();
        Self {
            queue: Queue::new(config.placement.queue),
            router: Router::new(&config.placement, config.placement.bound(config.lockstep), ranks.len() as u32),
            round: Round(view.first_round.0.saturating_sub(1)),
            ranks,
            requests: Requests::default(),
            named: BTreeSet::new(),
            applied_seq: BTreeMap::new(),
            next_number: 1,
            clock_us: 0,
            digest: 0,
            faults: Faults::default(),
            admission: Admission::default(),
            placement: Placement::default(),
            counts: Vec::new(),
            loads: Vec::new(),
            view,
            config,
        }
    }

    /// Applies the next round.
    pub fn apply(&mut self, merged: &Merged, out: &mut Vec<Decision>) -> Applied {
        let first = out.len();
        self.clock_us = self.clock_us.max(merged.clock_us);
        for contribution in &merged.contributions {
            self.entries(contribution, Entry::is_from_rank, out);
        }
        for contribution in &merged.contributions {
            self.compare_counts(contribution, merged.round);
        }
        for contribution in &merged.contributions {
            self.entries(contribution, |e| !e.is_from_rank(), out);
            if let Some(last) = contribution.entries.last() {
                let applied = self.applied_seq.entry(contribution.member).or_default();
                *applied = last.seq.max(*applied);
            }
        }
        for contribution in &merged.contributions {
            self.snapshots(contribution);
        }
        if !self.queue.is_empty() {
            let matches = self.matches(merged);
            self.admit_and_place(&matches, out);
        }
        self.name_probes(out);
        self.round = merged.round;
        self.digest = self.digest_of_round(merged, &out[first..]);
        self.said_of_round()
    }

    fn said_of_round(&self) -> Applied {
        Applied {
            round: self.round,
            digest: self.digest,
            waiting: !self.queue.is_empty(),
            probing: !self.named.is_empty(),
            stepping: self.is_stepping(),
        }
    }

    /// What the replica says when it stands before the first round of a view.
    pub fn ready(&self) -> Applied {
        let waiting = !self.queue.is_empty();
        let digest = self.state_digest().max(1);
        Applied { round: self.round, digest, waiting, probing: false, stepping: false }
    }

    /// What the replica said last: of the last round, or as `ready` before the first one of its view.
    pub fn last_said(&self) -> Applied {
        if self.round == self.view.cut() { self.ready() } else { self.said_of_round() }
    }

    fn entries(&mut self, contribution: &Contribution, wanted: impl Fn(&Entry) -> bool, out: &mut Vec<Decision>) {
        let applied = self.applied_seq.get(&contribution.member).copied().unwrap_or(0);
        for sequenced in contribution.entries.iter().filter(|s| s.seq > applied && wanted(&s.entry)) {
            if self.entry(contribution.member, &sequenced.entry, out).is_none() {
                self.faults.entries_ignored += 1;
            }
        }
    }

    /// `None`: the entry is ignored.
    fn entry(&mut self, from: Incarnation, entry: &Entry, out: &mut Vec<Decision>) -> Option<()> {
        match entry {
            Entry::Arrival(arrival) => self.arrive(from, arrival, out),
            Entry::Cancel(key) | Entry::Ended(key) => {
                self.requests.get(*key).filter(|_| key.ingress == from)?;
                self.forget(*key, out);
                Some(())
            }
            Entry::Resume { key, attempt, produced } => self.resume(from, (*key, *attempt), *produced, out),
            Entry::Finished(attempt) => {
                // A request that its ingress ended first has nothing to free.
                let Some(rank) = self.placed_on(*attempt) else { return Some(()) };
                if self.ranks[rank].member != from {
                    return None;
                }
                self.release(attempt.key, rank);
                self.requests.change(attempt.key, |r| r.state = std::mem::take(&mut r.state).closed());
                Some(())
            }
            Entry::Lost(attempt) => self.lost(from, *attempt, out),
        }
    }

    fn arrive(&mut self, from: Incarnation, arrival: &Arrival, out: &mut Vec<Decision>) -> Option<()> {
        let key = arrival.key;
        if key.ingress != from || self.requests.get(key).is_some() {
            return None;
        }
        let number = RequestNumber(self.next_number);
        match self.vet(number, arrival) {
            Err(rejection) => out.push(Decision::Rejected { key, rejection }),
            Ok(waiting) => {
                self.next_number += 1;
                self.requests.insert(Request::new(key, number, arrival.produced_tokens));
                // The number is new, so it cannot be refused as known.
                let pushed = self.queue.push(waiting);
                debug_assert!(pushed.is_ok());
                out.push(Decision::Enqueued { key, number });
            }
        }
        Some(())
    }

    fn vet(&self, number: RequestNumber, arrival: &Arrival) -> Result<Waiting, Rejection> {
        let ranks = self.ranks.len() as u32;
        let explicit = match arrival.explicit {
            None => None,
            Some(e) => Some(self.index_of(e.rank).ok_or(Rejection::NoSuchRank { rank: e.rank.0, ranks })?),
        };
        let waiting = Waiting {
            number,
            key: arrival.key,
            tokens: arrival.prompt_tokens.saturating_add(arrival.produced_tokens),
            children: arrival.children,
            explicit: explicit.map(|index| index as u32),
            relax: arrival.explicit.and_then(|e| e.relax),
            affinity: affinity(arrival.sub_agent, arrival.conversation),
            priority: Priority::new(arrival.priority).unwrap_or_default(),
            deferrals: 0,
            since_us: 0,
            head: arrival.head.clone(),
        };
        let limits = Limits { ranks, cap: self.config.cap, count_children: self.config.placement.count_children };
        limits.vet(&waiting)?;
        Ok(waiting)
    }

    /// The attempt is gone with its KV: the request is held until its ingress resumes it, or given up.
    fn lost(&mut self, from: Incarnation, attempt: AttemptKey, out: &mut Vec<Decision>) -> Option<()> {
        let current = self.requests.get(attempt.key).filter(|r| r.attempt == attempt.attempt);
        let placed = current.and_then(|r| Some((self.index_of(r.state.rank()?)?, r)));
        // What is over already cannot be lost.
        let Some((rank, request)) = placed else { return Some(()) };
        if self.ranks[rank].member != from {
            return None;
        }
        if matches!(request.state, State::Placed { .. }) {
            self.release(attempt.key, rank);
        }
        self.fail(attempt, out);
        Some(())
    }

    /// Counts a failed attempt: `held`, or rejected past the limit.
    fn fail(&mut self, attempt: AttemptKey, out: &mut Vec<Decision>) {
        let mut failed = 0;
        self.requests.change(attempt.key, |r| {
            r.failed += 1;
            failed = r.failed;
            r.state = std::mem::take(&mut r.state).held();
        });
        if failed >= self.config.attempts_max {
            self.requests.remove(attempt.key);
            let rejection = Rejection::AttemptsExhausted { attempts: failed };
            out.push(Decision::Rejected { key: attempt.key, rejection });
        } else {
            out.push(Decision::Seal { attempt });
        }
    }

    fn resume(
        &mut self,
        from: Incarnation,
        (key, attempt): (RequestKey, Attempt),
        produced: u32,
        out: &mut Vec<Decision>,
    ) -> Option<()> {
        let request = self.requests.get(key).filter(|r| key.ingress == from && r.attempt == attempt)?;
        let current = AttemptKey { key, attempt };
        match request.state {
            State::Waiting => return None,
            State::Held { .. } => {}
            State::Placed { .. } | State::Closing { .. } => {
                self.vacate(key, out);
                self.fail(current, out);
                // Sealed by its own ingress, which asks for no seal; past the limit the request is gone already.
                out.retain(|d| !matches!(d, Decision::Seal { attempt } if *attempt == current));
            }
        }
        let Some(request) = self.requests.get(key) else { return Some(()) };
        let mut waiting = request.state.waiting()?.clone();
        // `produced` counts from the request's start; the queue's token count is prompt plus produced.
        waiting.tokens = waiting.tokens.saturating_sub(request.produced).saturating_add(produced);
        self.requests.change(key, |r| {
            r.produced = produced;
            r.state = State::Waiting;
        });
        let pushed = self.queue.push(waiting);
        debug_assert!(pushed.is_ok());
        Some(())
    }

    /// The request is gone, wherever it stood.
    fn forget(&mut self, key: RequestKey, out: &mut Vec<Decision>) {
        let Some(request) = self.requests.get(key) else { return };
        if matches!(request.state, State::Waiting) {
            let number = request.number;
            self.queue.remove(number);
        }
        self.vacate(key, out);
        self.requests.remove(key);
    }

    /// Frees the slot of a placed request and stops its rank.
    fn vacate(&mut self, key: RequestKey, out: &mut Vec<Decision>) {
        let Some(request) = self.requests.get(key) else { return };
        if let State::Placed { rank: id, .. } = &request.state {
            let (attempt, id) = (AttemptKey { key, attempt: request.attempt }, *id);
            if let Some(rank) = self.index_of(id) {
                self.release(key, rank);
            }
            out.push(Decision::Stop { attempt, rank: id });
        }
    }

    /// Takes a placed request out of its rank's counts.
    fn release(&mut self, key: RequestKey, rank: usize) {
        let Some(State::Placed { waiting, load_tokens, .. }) = self.requests.get(key).map(|r| &r.state) else { return };
        let weight = self.weight(waiting.children);
        let tokens = u64::from(*load_tokens);
        let rank = &mut self.ranks[rank];
        rank.open = rank.open.saturating_sub(weight);
        rank.open_tokens = rank.open_tokens.saturating_sub(tokens);
    }

    fn weight(&self, children: u32) -> u32 {
        u32::try_from(self.config.placement.count_children.weight(children)).unwrap_or(u32::MAX)
    }

    fn index_of(&self, rank: RankId) -> Option<usize> {
        self.ranks.iter().position(|r| r.id == rank)
    }

    /// Dense index of the rank on which this very attempt is placed.
    fn placed_on(&self, attempt: AttemptKey) -> Option<usize> {
        let request = self.requests.get(attempt.key).filter(|r| r.attempt == attempt.attempt)?;
        match request.state {
            State::Placed { rank, .. } => self.index_of(rank),
            _ => None,
        }
    }

    /// What the ranks found for the requests that the last round named, by dense rank.
    fn matches(&self, merged: &Merged) -> BTreeMap<RequestNumber, Vec<u32>> {
        let mut rows: BTreeMap<RequestNumber, Vec<u32>> = BTreeMap::new();
        for contribution in &merged.contributions {
            for found in contribution.prefix_matches.iter().filter(|m| self.named.contains(&m.number)) {
                let owned = |rank: &usize| self.ranks[*rank].member == contribution.member;
                let Some(rank) = self.index_of(found.rank).filter(owned) else { continue };
                let row = rows.entry(found.number).or_insert_with(|| vec![0; self.ranks.len()]);
                row[rank] = found.tokens;
            }
        }
        rows
    }

    /// Names the next requests in queue order, where placement needs their matches.
    fn name_probes(&mut self, out: &mut Vec<Decision>) {
        self.named.clear();
        if self.router.needs_matches() {
            let next = self.queue.iter().take(self.config.probe_requests_max as usize);
            for waiting in next {
                self.named.insert(waiting.number);
                out.push(Decision::Probe { key: waiting.key, number: waiting.number });
            }
        }
    }

    fn admit_and_place(&mut self, matches: &BTreeMap<RequestNumber, Vec<u32>>, out: &mut Vec<Decision>) {
        let cap = self.config.cap;
        self.counts.clear();
        self.counts.extend(self.ranks.iter().map(|r| r.open.max(r.snapshot.active_requests)));
        let held = self.held();
        let pass = Pass {
            budget: admission::budget(&self.counts, &held, cap),
            cap,
            counts: &self.counts,
            held: &held,
            now_us: self.clock_us,
            count_children: self.config.placement.count_children,
            only: self.router.needs_matches().then_some(&self.named),
        };
        let (router, now_us) = (&self.router, self.clock_us);
        self.queue.admit(&pass, |waiting| router.admission_rank(waiting, now_us), &mut self.admission);
        if self.admission.admitted.is_empty() {
            return;
        }
        let active = self.ranks.iter().zip(&self.counts);
        self.loads.clear();
        self.loads
            .extend(active.map(|(rank, count)| RankLoad { active_requests: *count, active_tokens: rank.open_tokens }));
        let mut placement = std::mem::take(&mut self.placement);
        let mut batch = std::mem::take(&mut self.admission.admitted);
        let routing = Routing { loads: &self.loads, cap, held: &self.admission.held, now_us: self.clock_us, matches };
        self.router.route(&routing, &batch, &mut placement);
        // The published fallback, which counts children as 1 or ignores what fits where, may go over; strict-cap may not.
        let may_go_over = self.config.placement.count_children != CountChildren::StrictCap;
        debug_assert!(placement.over_cap == 0 || may_go_over, "P2: a rank over its cap");
        for assigned in &placement.assigned {
            let admitted = std::mem::take(&mut batch[assigned.index as usize]);
            let row = matches.get(&admitted.request.number);
            let matched = row.map_or(0, |row| row[assigned.rank as usize]);
            self.place(admitted, (assigned.rank, matched, assigned.why), out);
        }
        self.faults.placements_dropped += placement.dropped.len() as u64;
        let dropped = placement.dropped.iter().map(|index| std::mem::take(&mut batch[*index as usize]).request);
        // They stood in the queue a moment ago, so their numbers are free.
        let back = self.queue.put_back(dropped);
        debug_assert!(back.is_ok());
        self.admission.admitted = batch;
        self.placement = placement;
    }

    fn place(&mut self, admitted: Admitted, (index, matched, why): (u32, u32, Why), out: &mut Vec<Decision>) {
        let waiting = admitted.request;
        let (key, number) = (waiting.key, waiting.number);
        let weight = self.weight(waiting.children);
        let rank = &mut self.ranks[index as usize];
        rank.open = rank.open.saturating_add(weight);
        // What is cached costs nothing; a policy that does not probe counts the whole prompt.
        let load_tokens = waiting.tokens.saturating_sub(matched);
        rank.open_tokens += u64::from(load_tokens);
        let id = rank.id;
        let mut attempt = Attempt(0);
        self.requests.change(key, |r| {
            r.attempt.0 += 1;
            attempt = r.attempt;
            r.state = State::Placed { rank: id, waiting, load_tokens };
        });
        out.push(Decision::Placed { attempt: AttemptKey { key, attempt }, number, rank: id, why });
    }

    /// Hash of the state, the round's input and its decisions; re-hashes one slice of every table from memory. A replica
    /// that finds itself damaged says 0 and loses the comparison.
    fn digest_of_round(&mut self, merged: &Merged, decisions: &[Decision]) -> u64 {
        let slice = merged.round.0;
        if !(self.requests.verify(slice) && self.queue.verify(slice) && self.router.verify(slice)) {
            self.faults.digest_mismatches += 1;
            return 0;
        }
        let mut words = vec![self.state_digest(), merged.hash(), decisions.len() as u64];
        for decision in decisions {
            decision.words(&mut words);
        }
        digest::element(ROUND, &words).max(1)
    }

    /// Hash of the state alone: equal for equal states, whatever way led there.
    pub fn state_digest(&self) -> u64 {
        let mut words = vec![
            self.queue.digest(),
            self.router.digest(),
            self.requests.digest(),
            self.next_number,
            self.clock_us,
            self.view.epoch.0,
        ];
        for rank in &self.ranks {
            let s = &rank.snapshot;
            words.extend([u64::from(rank.id.0), u64::from(rank.open), rank.open_tokens, u64::from(rank.draining)]);
            words.extend([s.counted.0, u64::from(s.active_requests), s.active_tokens, s.steps]);
            words.extend([s.boundary.0, u64::from(s.ready) | u64::from(s.late) << 1]);
        }
        words.extend(self.named.iter().map(|number| number.0));
        for (member, seq) in &self.applied_seq {
            words.extend([member.0, *seq]);
        }
        digest::element(STATE, &words)
    }

    /// All that another node needs to go on from here.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            settings: self.config.listing(),
            view: self.view.clone(),
            queue: self.queue.clone(),
            router: self.router.clone(),
            ranks: self.ranks.clone(),
            requests: self.requests.iter().cloned().collect(),
            named: self.named.clone(),
            applied_seq: self.applied_seq.iter().map(|(m, s)| (*m, *s)).collect(),
            next_number: self.next_number,
            clock_us: self.clock_us,
            round: self.round,
            digest: self.digest,
            faults: self.faults,
        }
    }

    /// A replica that goes on where `snapshot` was taken, with the same digests. `config` is this node's own.
    ///
    /// # Errors
    /// The first setting that differs, with both values, or the invariant that the snapshot breaks.
    pub fn restore(snapshot: Snapshot, config: &Config) -> Result<Self, String> {
        if let Some(difference) = config.difference(&snapshot.settings) {
            return Err(difference);
        }
        let mut requests = Requests::default();
        for request in snapshot.requests {
            if requests.get(request.key).is_some() {
                return Err(format!("request {} is twice in the snapshot", request.key));
            }
            requests.insert(request);
        }
        let replica = Self {
            config: config.clone(),
            view: snapshot.view,
            queue: snapshot.queue,
            router: snapshot.router,
            ranks: snapshot.ranks,
            requests,
            named: snapshot.named,
            applied_seq: snapshot.applied_seq.into_iter().collect(),
            next_number: snapshot.next_number,
            clock_us: snapshot.clock_us,
            round: snapshot.round,
            digest: snapshot.digest,
            faults: snapshot.faults,
            admission: Admission::default(),
            placement: Placement::default(),
            counts: Vec::new(),
            loads: Vec::new(),
        };
        replica.check()?;
        Ok(replica)
    }

    /// Attempts that are placed on `rank` and not finished: what is lost when the rank loses its KV.
    pub fn placed_on_rank(&self, rank: RankId) -> Vec<AttemptKey> {
        let placed = self.requests.iter().filter(|r| r.state.rank() == Some(rank));
        placed.map(|r| AttemptKey { key: r.key, attempt: r.attempt }).collect()
    }

    /// Attempts that count as open on `rank`, with their requests' numbers: what its node must run or expect.
    pub fn open_on_rank(&self, rank: RankId) -> Vec<(AttemptKey, RequestNumber)> {
        let open = |r: &&Request| matches!(r.state, State::Placed { rank: on, .. } if on == rank);
        let keyed = |r: &Request| (AttemptKey { key: r.key, attempt: r.attempt }, r.number);
        self.requests.iter().filter(open).map(keyed).collect()
    }

    pub fn waiting_len(&self) -> usize {
        self.queue.len()
    }

    /// Whether the last round named requests to probe.
    pub fn is_probing(&self) -> bool {
        !self.named.is_empty()
    }

    /// Whether the request is known: announced and not ended.
    pub fn knows(&self, key: RequestKey) -> bool {
        self.requests.get(key).is_some()
    }

    pub fn requests_len(&self) -> usize {
        self.requests.len()
    }

    pub fn round(&self) -> Round {
        self.round
    }

    pub fn faults(&self) -> Faults {
        self.faults
    }

    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Every invariant. For the simulator, fuzzers and tests: it costs as much as the state is large.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.queue.check();
        self.router.check(self.ranks.len() as u32);
        self.requests.check()?;
        let mut open = vec![(0u64, 0u64); self.ranks.len()];
        let mut waiting = 0;
        for request in self.requests.iter() {
            if request.number.0 >= self.next_number {
                return Err(format!("{} has number {}, not given yet", request.key, request.number));
            }
            match &request.state {
                State::Waiting if !self.queue.contains(request.number) => {
                    return Err(format!("P1: {} waits but is not in the queue", request.key));
                }
                State::Waiting => waiting += 1,
                State::Placed { rank, waiting, load_tokens } => {
                    let index = self.index_of(*rank).ok_or(format!("{} is placed on {rank}", request.key))?;
                    open[index].0 += u64::from(self.weight(waiting.children));
                    open[index].1 += u64::from(*load_tokens);
                }
                State::Closing { .. } | State::Held { .. } => {}
            }
        }
        if waiting != self.queue.len() {
            return Err(format!("P1: {} in the queue, {waiting} waiting", self.queue.len()));
        }
        for (rank, (requests, tokens)) in self.ranks.iter().zip(open) {
            if (u64::from(rank.open), rank.open_tokens) != (requests, tokens) {
                return Err(format!("P2: {} counts {} open, table says {requests}", rank.id, rank.open));
            }
        }
        Ok(())
    }
}

const ROUND: u64 = 0x20;
const STATE: u64 = 0x21;

impl Entry {
    /// Rank entries are applied before ingress entries.
    fn is_from_rank(&self) -> bool {
        matches!(self, Entry::Finished(_) | Entry::Lost(_))
    }
}

impl Decision {
    fn words(&self, words: &mut Vec<u64>) {
        let (tag, key, attempt, value) = match self {
            Decision::Enqueued { key, number } => (0, key, 0, number.0),
            Decision::Placed { attempt, rank, .. } => (1, &attempt.key, attempt.attempt.0, u64::from(rank.0)),
            Decision::Stop { attempt, rank } => (2, &attempt.key, attempt.attempt.0, u64::from(rank.0)),
            Decision::Seal { attempt } => (3, &attempt.key, attempt.attempt.0, 0),
            Decision::Rejected { key, .. } => (4, key, 0, 0),
            Decision::Probe { key, number } => (5, key, 0, number.0),
        };
        words.extend([tag, key.ingress.0, key.seq, u64::from(attempt), value]);
    }
}

#[cfg(test)]
mod tests;
