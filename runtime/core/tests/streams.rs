//! One stream across failures, every order of events explored: attempts, seal, resume, a client that leaves, a rank whose
//! worker is lost, a node that crashes, and one that is evicted and computes on without knowing it.
//!
//! The replica, the ingress and the fence of each rank are the product's. What stands between them is a model: the agreed
//! rounds are a list that each node carries out at its own pace; prompts and stops come in any order; frames of one attempt
//! keep their order, and come again at will. The client must see each position once, each token drawn behind the very
//! tokens that it has seen, and one end.

use starling_core::admission::HEAD_TOKENS;
use starling_core::batch::Frame;
use starling_core::fence::Expected;
use starling_core::ids::{Attempt, AttemptKey, ClusterId, Epoch, Incarnation, RankId, RequestKey, Round, TokenId};
use starling_core::ingress::{self, Prompt, Submission, Ticket};
use starling_core::kv::identity::PromptKeys;
use starling_core::placement;
use starling_core::replica::{Config, Decision, Replica};
use starling_core::request::{Finish, Generation};
use starling_core::round::{Contribution, Entry, Member, Merged, Sequenced, View};
use starling_core::step::Drawn;
use stateright::{Checker, HasDiscoveries, Model, Property};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

const INGRESS: Incarnation = Incarnation(7);
/// The members that host the ranks; the first one fails.
const HOSTS: [Incarnation; 2] = [Incarnation(8), Incarnation(9)];
const TICKET: Ticket = Ticket(1);
const PROMPT: [TokenId; 2] = [1, 2];
const PREFIX: &str = "each token was drawn behind those that the client saw";
const ONE_END: &str = "the client hears of one end and of nothing behind it";
const GOES_ON: &str = "a whole stream has tokens of two attempts";
const COMPLETE: &str = "a stream whose client stays ends with all its tokens, and nothing is left of it";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// `finished` from a rank ends the request, before its ingress has all frames.
    FinishedIsTheEnd,
    /// Frames are taken whatever attempt they are of.
    FramesWithoutAttempt,
}

struct Start {
    tokens: u32,
    losses: u8,
    mistake: Option<Mistake>,
}

/// What all nodes carry out alike.
#[derive(Clone, Debug)]
struct Agreed {
    decisions: Vec<Decision>,
    /// A new view: attempts that are open on the second rank.
    installed: Option<Vec<AttemptKey>>,
}

#[derive(Clone, Debug)]
struct Rank {
    /// How much of what was agreed it has carried out.
    at: usize,
    expected: Expected<Prompt>,
    /// Produced tokens, those of former attempts included, of what runs.
    running: BTreeMap<AttemptKey, Vec<TokenId>>,
    outbox: Vec<Entry>,
    stopped: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Drawing {
    attempt: AttemptKey,
    position: u32,
    token: TokenId,
}

#[derive(Clone, Debug)]
struct Stream {
    agreed: Vec<Arc<Agreed>>,
    replica: Arc<Replica>,
    ingress: Arc<ingress::Machine>,
    /// Hash of the ingress without its counters.
    ingress_face: u64,
    ingress_at: usize,
    outbox: Vec<Entry>,
    /// Of the members' entries, in their order.
    seqs: [u64; 3],
    /// The attempt that was placed last, as the ingress knows.
    placed: Option<AttemptKey>,
    seen: Vec<TokenId>,
    ends: u8,
    left: bool,
    /// Something came behind the end.
    late: bool,
    ranks: [Rank; 2],
    prompts: Vec<(RankId, Prompt)>,
    stops: BTreeSet<(RankId, AttemptKey)>,
    frames: BTreeSet<Drawing>,
    /// Frames of each attempt that have come at least once.
    come: BTreeMap<AttemptKey, u32>,
    evicted: bool,
    crashed: bool,
    losses_left: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A round takes the oldest entry of the ingress, or of a rank's host.
    IngressContributes,
    RankContributes(usize),
    IngressCarriesOut,
    RankCarriesOut(usize),
    Prompt(usize),
    Stop(usize),
    Draw(usize, AttemptKey),
    Frame(usize),
    // Faults, and the client.
    Evict,
    Crash,
    Lose(usize, AttemptKey),
    Leave,
}

fn face(value: &impl Debug) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{value:?}").hash(&mut hasher);
    hasher.finish()
}

/// A token says of which attempt it is and behind which tokens it was drawn.
fn draw(attempt: Attempt, before: &[TokenId]) -> TokenId {
    attempt.0 << 16 | digest(before)
}

fn digest(before: &[TokenId]) -> u32 {
    before.iter().fold(before.len() as u32, |hash, token| hash.wrapping_mul(31).wrapping_add(token ^ token >> 16))
        & 0xffff
}

fn view(epoch: u64, hosts: &[(Incarnation, u32)]) -> View {
    let hosts = hosts.iter().map(|(host, rank)| Member { incarnation: *host, ranks: vec![RankId(*rank)] });
    let ingress = Member { incarnation: INGRESS, ranks: vec![] };
    View { epoch: Epoch(epoch), members: [ingress].into_iter().chain(hosts).collect(), first_round: Round(1) }
}

impl Stream {
    fn new(start: &Start) -> Self {
        let config = Config {
            cap: 4,
            attempts_max: 4,
            probe_requests_max: 1,
            lockstep: false,
            placement: placement::Config { policy: placement::Policy::Balanced, ..placement::Config::default() },
        };
        let rank =
            Rank { at: 0, expected: Expected::default(), running: BTreeMap::new(), outbox: Vec::new(), stopped: false };
        let mut stream = Self {
            agreed: Vec::new(),
            replica: Arc::new(Replica::new(view(1, &[(HOSTS[0], 0), (HOSTS[1], 1)]), config)),
            ingress: Arc::new(ingress::Machine::new(ingress::Config::default())),
            ingress_face: 0,
            ingress_at: 0,
            outbox: Vec::new(),
            seqs: [0; 3],
            placed: None,
            seen: Vec::new(),
            ends: 0,
            left: false,
            late: false,
            ranks: [rank.clone(), rank],
            prompts: Vec::new(),
            stops: BTreeSet::new(),
            frames: BTreeSet::new(),
            come: BTreeMap::new(),
            evicted: false,
            crashed: false,
            losses_left: start.losses,
        };
        stream.tell(ingress::Input::NewCluster(INGRESS));
        let generation = Generation { max_new_tokens: start.tokens, ..Generation::default() };
        stream.tell(ingress::Input::Submit(Box::new(Submission {
            ticket: TICKET,
            prompt: Arc::from(PROMPT),
            keys: PromptKeys::default(),
            produced: Vec::new(),
            generation,
            conversation: None,
            sub_agent: None,
            explicit: None,
            priority: 0.5,
            tenant: 0,
            child: 0,
        })));
        stream
    }

    fn tell(&mut self, input: ingress::Input) {
        let mut out = Vec::new();
        let ingress = Arc::make_mut(&mut self.ingress);
        ingress.handle(0, input, &mut out);
        ingress.check().expect("invariants of the ingress");
        let listing = format!("{ingress:?}");
        // Its counters are the last field: how often something was dropped makes no other state.
        self.ingress_face = face(&listing.rsplit_once(", counts: ").map_or("", |(before, _)| before));
        for effect in out {
            match effect {
                ingress::Effect::Announce(entry) => self.outbox.push(entry),
                ingress::Effect::Prompt { rank, prompt, .. } => self.prompts.push((rank, prompt)),
                ingress::Effect::Stop { rank, attempt } => {
                    self.stops.insert((rank, attempt));
                }
                ingress::Effect::Placed { attempt, .. } => {
                    self.placed = Some(AttemptKey { key: key(), attempt });
                }
                ingress::Effect::Tokens { tokens, .. } => {
                    self.late |= self.ends > 0 || self.left;
                    self.seen.extend(tokens.iter().map(|drawn| drawn.token));
                }
                ingress::Effect::Ended { .. } | ingress::Effect::Failed { .. } => {
                    self.late |= self.left;
                    self.ends += 1;
                }
            }
        }
    }

    /// One round with one entry: what others said in the same one could as well have come in the next.
    fn round(&mut self, from: usize, entry: Entry) {
        self.seqs[from] += 1;
        let member = [INGRESS, HOSTS[0], HOSTS[1]][from];
        let epoch = Epoch(1 + u64::from(self.evicted));
        let contribution = Contribution {
            cluster: ClusterId(1),
            epoch,
            round: Round(1),
            member,
            clock_us: 0,
            entries: vec![Sequenced { seq: self.seqs[from], entry }],
            ranks: vec![],
            prefix_matches: vec![],
            digest: 0,
            draining: false,
        };
        let merged = Merged { epoch, round: Round(1), clock_us: 0, contributions: vec![contribution] };
        let mut decisions = Vec::new();
        let replica = Arc::make_mut(&mut self.replica);
        replica.apply(&merged, &mut decisions);
        replica.check().expect("invariants of the replica");
        self.agreed.push(Arc::new(Agreed { decisions, installed: None }));
    }

    fn rank_contributes(&mut self, at: usize, mistake: Option<Mistake>) {
        let entry = self.ranks[at].outbox.remove(0);
        let finished = matches!(entry, Entry::Finished(_));
        self.round(at + 1, entry);
        if finished && mistake == Some(Mistake::FinishedIsTheEnd) {
            self.round(0, Entry::Ended(key()));
        }
    }

    fn evict(&mut self) {
        self.evicted = true;
        let mut decisions = Vec::new();
        let replica = Arc::make_mut(&mut self.replica);
        replica.install(view(2, &[(HOSTS[1], 1)]), &[], &mut decisions).expect("a sound view");
        replica.check().expect("invariants of the replica");
        let open = replica.open_on_rank(RankId(1)).into_iter().map(|(attempt, _)| attempt).collect();
        self.agreed.push(Arc::new(Agreed { decisions, installed: Some(open) }));
    }

    fn ingress_carries_out(&mut self) {
        let agreed = self.agreed[self.ingress_at].clone();
        self.ingress_at += 1;
        for decision in &agreed.decisions {
            match decision {
                Decision::Placed { attempt, rank, .. } => {
                    self.tell(ingress::Input::Placed { attempt: *attempt, rank: *rank });
                }
                Decision::Seal { attempt } => self.tell(ingress::Input::Seal { attempt: *attempt }),
                Decision::Rejected { key, rejection } => {
                    self.tell(ingress::Input::Rejected { key: *key, rejection: rejection.clone() });
                }
                Decision::Enqueued { .. } | Decision::Stop { .. } | Decision::Probe { .. } => {}
            }
        }
    }

    fn frame(&mut self, at: usize, start: &Start) {
        let Some(drawing) = self.frames.iter().nth(at).cloned() else { return };
        let come = self.come.entry(drawing.attempt).or_default();
        *come = (*come).max(drawing.position + 1);
        let last = drawing.position + 1 >= start.tokens;
        let attempt = match start.mistake {
            Some(Mistake::FramesWithoutAttempt) => self.placed.unwrap_or(drawing.attempt),
            _ => drawing.attempt,
        };
        self.tell(ingress::Input::Frame(Frame {
            attempt,
            first_position: drawing.position,
            tokens: vec![Drawn::new(drawing.token, 0.0)],
            cached_tokens: 0,
            finished: last.then_some(Finish::Length),
        }));
    }

    /// Whether a frame may come now: the next one of its attempt, or one that came before.
    fn may_come(&self, drawing: &Drawing) -> bool {
        let of_attempt = self.frames.iter().filter(|other| other.attempt == drawing.attempt);
        let first = of_attempt.map(|other| other.position).min().unwrap_or(0);
        drawing.position <= self.come.get(&drawing.attempt).copied().unwrap_or(first)
    }

    fn drawn(&mut self, at: usize, attempt: AttemptKey, tokens_max: u32) {
        let rank = &mut self.ranks[at];
        let Some(produced) = rank.running.get_mut(&attempt) else { return };
        let token = draw(attempt.attempt, produced);
        self.frames.insert(Drawing { attempt, position: produced.len() as u32, token });
        produced.push(token);
        if produced.len() as u32 >= tokens_max {
            rank.running.remove(&attempt);
            rank.outbox.push(Entry::Finished(attempt));
        }
    }

    /// Its frames that did not come are lost with it.
    fn crash(&mut self) {
        self.crashed = true;
        self.ranks[0].stopped = true;
        self.ranks[0].running.clear();
        self.ranks[0].outbox.clear();
        let on_first = |attempt: &AttemptKey| {
            let placed = self.agreed.iter().flat_map(|agreed| &agreed.decisions);
            placed.into_iter().any(
                |decision| matches!(decision, Decision::Placed { attempt: a, rank: RankId(0), .. } if a == attempt),
            )
        };
        let gone: Vec<Drawing> = self.frames.iter().filter(|drawing| on_first(&drawing.attempt)).cloned().collect();
        gone.iter().for_each(|drawing| {
            self.frames.remove(drawing);
        });
    }

    fn is_running(&self) -> bool {
        self.ranks.iter().enumerate().any(|(at, rank)| !(rank.running.is_empty() || (at == 0 && self.evicted)))
    }

    /// All that makes a difference for what may follow.
    fn key(&self) -> impl Hash + PartialEq + use<> {
        let pending = [self.ingress_at, self.ranks[0].at, self.ranks[1].at];
        let first = pending.iter().copied().min().unwrap_or(0);
        let ranks = [0, 1].map(|at| face(&(&self.ranks[at].expected, &self.ranks[at].outbox)));
        let running: Vec<_> = self.ranks.iter().map(|rank| (rank.running.clone(), rank.stopped)).collect();
        let nodes = (
            self.replica.state_digest(),
            self.ingress_face,
            face(&self.agreed[first..].iter().map(|a| (&a.decisions, &a.installed)).collect::<Vec<_>>()),
            pending.map(|at| at - first),
            face(&self.outbox),
            ranks,
            running,
        );
        let wires = (face(&self.prompts), self.stops.clone(), self.frames.clone(), self.come.clone(), self.placed);
        let client = (self.seen.clone(), self.ends, self.left, self.late);
        (nodes, wires, client, (self.evicted, self.crashed, self.losses_left))
    }
}

impl Hash for Stream {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Rank {
    fn run(&mut self, prompt: &Prompt) {
        assert!(prompt.tokens.starts_with(&PROMPT) && PROMPT.len() < HEAD_TOKENS);
        self.running.insert(prompt.attempt, prompt.tokens[PROMPT.len()..].to_vec());
    }

    fn stop(&mut self, attempt: AttemptKey) {
        if self.running.remove(&attempt).is_none() {
            self.expected.stop(0, attempt);
        }
    }

    fn carry_out(&mut self, agreed: &Agreed, me: RankId) {
        self.at += 1;
        for decision in &agreed.decisions {
            match decision {
                Decision::Placed { attempt, number, rank, .. } if *rank == me => {
                    if let Some(prompt) = self.expected.placed(0, *attempt, *number) {
                        self.run(&prompt);
                    }
                }
                Decision::Stop { attempt, rank } if *rank == me => self.stop(*attempt),
                _ => {}
            }
        }
        match &agreed.installed {
            Some(open) if me == RankId(1) => {
                self.running.retain(|attempt, _| open.contains(attempt));
                self.expected.retain(|attempt| open.contains(attempt));
            }
            Some(_) => {
                self.running.clear();
                self.outbox.clear();
                self.stopped = true;
            }
            None => {}
        }
    }
}

fn key() -> RequestKey {
    RequestKey { ingress: INGRESS, seq: TICKET.0 }
}

impl Start {
    fn progress(&self, stream: &Stream, events: &mut Vec<Event>) {
        if !stream.outbox.is_empty() {
            events.push(Event::IngressContributes);
        }
        if stream.ingress_at < stream.agreed.len() {
            events.push(Event::IngressCarriesOut);
        }
        for (at, rank) in stream.ranks.iter().enumerate().filter(|(_, rank)| !rank.stopped) {
            if !(rank.outbox.is_empty() || at == 0 && stream.evicted) {
                events.push(Event::RankContributes(at));
            }
            if rank.at < stream.agreed.len() {
                events.push(Event::RankCarriesOut(at));
            }
            events.extend(rank.running.keys().map(|attempt| Event::Draw(at, *attempt)));
        }
        let reaches = |rank: &RankId| !stream.ranks[rank.0 as usize].stopped;
        let prompts = (0..stream.prompts.len()).filter(|at| reaches(&stream.prompts[*at].0));
        events.extend(prompts.map(Event::Prompt));
        let stops = stream.stops.iter().enumerate().filter(|(_, (rank, _))| reaches(rank));
        events.extend(stops.map(|(at, _)| Event::Stop(at)));
        let frames = stream.frames.iter().enumerate().filter(|(_, drawing)| stream.may_come(drawing));
        events.extend(frames.map(|(at, _)| Event::Frame(at)));
        if stream.crashed && !stream.evicted {
            events.push(Event::Evict);
        }
    }

    fn faults(&self, stream: &Stream, events: &mut Vec<Event>) {
        if !stream.evicted && !stream.crashed {
            events.push(Event::Evict);
        }
        if !stream.crashed {
            events.push(Event::Crash);
        }
        if stream.losses_left > 0 {
            for (at, rank) in stream.ranks.iter().enumerate().filter(|(at, _)| !(*at == 0 && stream.evicted)) {
                events.extend(rank.running.keys().map(|attempt| Event::Lose(at, *attempt)));
            }
        }
        if stream.ends == 0 && !stream.left {
            events.push(Event::Leave);
        }
    }

    /// Nothing is left to happen that changes anything, but faults.
    fn is_at_rest(&self, stream: &Stream) -> bool {
        let mut events = Vec::new();
        self.progress(stream, &mut events);
        events.into_iter().all(|event| self.next_state(stream, event).is_none())
    }
}

impl Model for Start {
    type State = Stream;
    type Action = Event;

    fn init_states(&self) -> Vec<Stream> {
        vec![Stream::new(self)]
    }

    fn actions(&self, stream: &Stream, events: &mut Vec<Event>) {
        self.progress(stream, events);
        self.faults(stream, events);
    }

    fn next_state(&self, stream: &Stream, event: Event) -> Option<Stream> {
        let mut next = stream.clone();
        match event {
            Event::IngressContributes => {
                let entry = next.outbox.remove(0);
                next.round(0, entry);
            }
            Event::RankContributes(at) => next.rank_contributes(at, self.mistake),
            Event::IngressCarriesOut => next.ingress_carries_out(),
            Event::RankCarriesOut(at) => {
                let agreed = next.agreed[next.ranks[at].at].clone();
                next.ranks[at].carry_out(&agreed, RankId(at as u32));
            }
            Event::Prompt(at) => {
                let (rank, prompt) = next.prompts.remove(at);
                let rank = &mut next.ranks[rank.0 as usize];
                if let Some((prompt, _)) = rank.expected.prompt(0, prompt.attempt, prompt) {
                    rank.run(&prompt);
                }
            }
            Event::Stop(at) => {
                let (rank, attempt) = next.stops.iter().nth(at).copied()?;
                next.stops.remove(&(rank, attempt));
                next.ranks[rank.0 as usize].stop(attempt);
            }
            Event::Draw(at, attempt) => next.drawn(at, attempt, self.tokens),
            Event::Frame(at) => next.frame(at, self),
            Event::Evict => next.evict(),
            Event::Crash => next.crash(),
            Event::Lose(at, attempt) => {
                next.losses_left -= 1;
                next.ranks[at].running.remove(&attempt);
                next.ranks[at].outbox.push(Entry::Lost(attempt));
            }
            Event::Leave => {
                next.left = true;
                next.tell(ingress::Input::Cancel(TICKET));
            }
        }
        (next != *stream).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(PREFIX, |_, stream: &Stream| {
                (0..stream.seen.len()).all(|at| stream.seen[at] & 0xffff == digest(&stream.seen[..at]))
            }),
            Property::always(ONE_END, |start, stream: &Stream| {
                let whole = stream.ends == 0 || stream.seen.len() == start.tokens as usize;
                stream.ends <= 1 && !stream.late && whole
            }),
            Property::always(COMPLETE, |start, stream: &Stream| {
                let ended = stream.ends == 1 || stream.left;
                let clean = !stream.replica.knows(key()) && stream.ingress.open_len() == 0 && !stream.is_running();
                (ended && clean) || !start.is_at_rest(stream)
            }),
            // That the model gets to what it is about.
            Property::sometimes(GOES_ON, |start, stream: &Stream| {
                let attempts: BTreeSet<u32> = stream.seen.iter().map(|token| token >> 16).collect();
                stream.seen.len() == start.tokens as usize && stream.ends == 1 && attempts.len() > 1
            }),
        ]
    }
}

fn assert_sound(start: Start) -> usize {
    let checker = start.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    for property in [PREFIX, ONE_END, COMPLETE] {
        if let Some(path) = checker.discovery(property) {
            panic!("{property}: {:#?}\n{:?}", path.clone().into_actions(), path.last_state());
        }
    }
    assert!(checker.discovery(GOES_ON).is_some(), "{GOES_ON}: never");
    checker.unique_state_count()
}

fn finds(mistake: Mistake, property: &'static str) -> bool {
    let start = Start { tokens: 2, losses: 1, mistake: Some(mistake) };
    let checker = start.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    checker.discovery(property).is_some()
}

#[test]
fn a_client_sees_each_token_once_and_one_end() {
    let states = assert_sound(Start { tokens: 3, losses: 0, mistake: None });
    assert!(states > 10_000, "{states} states are not all");
}

#[test]
fn a_client_sees_each_token_once_and_one_end_although_a_worker_is_lost_too() {
    let states = assert_sound(Start { tokens: 2, losses: 1, mistake: None });
    assert!(states > 10_000, "{states} states are not all");
}

#[test]
#[ignore = "many states: minutes, for whoever changes the rules"]
fn longer_streams_are_seen_once_and_end_once_although_a_worker_is_lost_too() {
    assert_sound(Start { tokens: 3, losses: 1, mistake: None });
}

#[test]
fn finished_taken_for_the_end_is_found_to_cut_a_stream_short() {
    assert!(finds(Mistake::FinishedIsTheEnd, COMPLETE));
}

#[test]
fn frames_without_their_attempt_are_found_to_mix_two_attempts() {
    assert!(finds(Mistake::FramesWithoutAttempt, PREFIX));
}
