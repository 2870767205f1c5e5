//! A node: its machines, the messages between them, and the clients in front.

use crate::draw::Draw;
use crate::rank::{Rank, VOCABULARY, next_token};
use starling_core::ids::{AttemptKey, ClusterId, ConversationKey, Epoch, Incarnation, RankId, Round, TokenId};
use starling_core::ingress::{self, Submission, Ticket};
use starling_core::kv::identity::PromptKeys;
use starling_core::replica::{self, Decision, Replica};
use starling_core::request::{Finish, Generation};
use starling_core::round::{self, Entry, Member, RankSnapshot, View};
use starling_core::step::Drawn;
use starling_core::{batch, kv, placement};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How long a prompt may be on its way (the default of a node).
const PROMPT_WAIT_US: u64 = 5_000_000;
const CONTEXT_TOKENS: u32 = 160;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub ranks: u32,
    pub requests: u64,
    pub conversations: u64,
    pub policy: placement::Policy,
    /// Requests of a rank at once.
    pub cap: u32,
    pub blocks: u32,
    /// Tokens that a rank guesses ahead at most; 0 guesses none.
    pub draft_tokens_max: u32,
    /// Longest delay of a message between actors, in microseconds.
    pub delay_us_max: u64,
    /// Of a thousand events, how many are followed by a fault.
    pub faults_per_mille: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            ranks: 3,
            requests: 60,
            conversations: 9,
            policy: placement::Policy::Conversation,
            cap: 4,
            blocks: 26,
            draft_tokens_max: 0,
            delay_us_max: 3_000,
            faults_per_mille: 10,
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub ended: u64,
    pub failed: u64,
    pub left: u64,
    pub rank_crashes: u64,
    pub control_restarts: u64,
    pub attempts_lost: u64,
    pub preemptions: u64,
    /// Guessed tokens that were right, and that were not.
    pub drafts_right: u64,
    pub drafts_wrong: u64,
    pub rounds: u64,
    pub events: u64,
    pub virtual_us: u64,
    /// Digest of the last round: equal runs have equal ones.
    pub digest: u64,
}

#[derive(Debug)]
enum Event {
    Arrive(u64),
    Ingress(Box<ingress::Input>),
    Queue(Box<round::Input>),
    Router(Box<round::Merged>),
    /// From the router: placements and stops.
    Decided(RankId, u64, Vec<Decision>),
    Prompt(RankId, Box<ingress::Prompt>),
    Stop(RankId, AttemptKey),
    StepDone(RankId, u64),
    /// From a rank, by way of the router.
    Finished(RankId, AttemptKey),
    Tick,
}

struct Client {
    prompt: Vec<TokenId>,
    max_new_tokens: u32,
    got: Vec<TokenId>,
    outcome: Option<Result<Finish, String>>,
    left: bool,
}

/// A run. All state is plain; nothing outside it is read.
pub struct Simulation {
    scenario: Scenario,
    draw: Draw,
    now_us: u64,
    agenda: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    /// Last delivery by channel: messages between two actors keep their order.
    channels: BTreeMap<(&'static str, u32), u64>,
    ingress: ingress::Machine,
    queue: round::Machine,
    replica: Replica,
    incarnation: u64,
    ledgers: Vec<BTreeSet<AttemptKey>>,
    ranks: Vec<Rank>,
    steps: BTreeMap<u32, starling_core::step::Step>,
    clients: BTreeMap<u64, Client>,
    faults: bool,
    report: Report,
}

impl Simulation {
    pub fn new(seed: u64, scenario: Scenario) -> Self {
        let kv = kv::Config::full(scenario.blocks, 4).expect("a pool that holds something").shape();
        let block_tokens = kv.block_tokens.get();
        let config = batch::Config {
            step_tokens_max: 24,
            sequences_max: scenario.cap,
            draft_tokens_max: scenario.draft_tokens_max,
            vocabulary: VOCABULARY,
            kv,
        };
        let (queue, replica) = control(&scenario, 1);
        let probes = scenario.policy == placement::Policy::KvAware;
        let ingress_config = ingress::Config {
            announced_requests_max: 16,
            announce_wait_us: u64::MAX / 4,
            probe_block_tokens: probes.then_some(block_tokens),
            ..ingress::Config::default()
        };
        let mut simulation = Self {
            draw: Draw::new(seed),
            now_us: 0,
            agenda: BTreeMap::new(),
            scheduled: 0,
            channels: BTreeMap::new(),
            ingress: ingress::Machine::new(ingress_config),
            queue,
            replica,
            incarnation: 1,
            ledgers: vec![BTreeSet::new(); scenario.ranks as usize],
            ranks: (0..scenario.ranks).map(|_| Rank::new(config.clone(), 0, CONTEXT_TOKENS)).collect(),
            steps: BTreeMap::new(),
            clients: BTreeMap::new(),
            faults: true,
            report: Report::default(),
            scenario,
        };
        let mut at = 0;
        for ticket in 1..=simulation.scenario.requests {
            at += simulation.draw.below(20_000);
            simulation.at(at, Event::Arrive(ticket));
        }
        simulation.at(0, Event::Ingress(Box::new(ingress::Input::NewCluster(Incarnation(1)))));
        let ready = simulation.replica.ready();
        simulation.at(0, Event::Queue(Box::new(round::Input::Applied(ready))));
        simulation
    }

    /// Runs until every request is answered and everything is released.
    ///
    /// # Errors
    /// The first invariant that does not hold, in words, with the virtual time.
    pub fn run(mut self) -> Result<Report, String> {
        let events_max = 2_000_000;
        while let Some(((at, _), event)) = self.agenda.pop_first() {
            self.now_us = at;
            self.report.events += 1;
            if self.report.events > events_max {
                return Err(self.fail("no progress"));
            }
            self.handle(event)?;
            self.check()?;
            // Faults end with the traffic: then everything must come to rest.
            self.faults = self.clients.len() < self.scenario.requests as usize;
            if self.faults && self.draw.chance(self.scenario.faults_per_mille) {
                self.fault();
            }
            if !self.faults && self.is_at_rest() {
                return self.finish();
            }
        }
        Err(self.fail("the agenda is empty, and not all requests are answered"))
    }

    fn fail(&self, what: &str) -> String {
        format!("at {} us, event {}: {what}", self.now_us, self.report.events)
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.scheduled += 1;
        self.agenda.insert((at_us.max(self.now_us), self.scheduled), event);
    }

    /// Sends a message over a channel: delayed, and in order behind what was sent before.
    fn send(&mut self, channel: (&'static str, u32), event: Event) {
        let at = self.now_us + self.draw.below(self.scenario.delay_us_max + 1);
        let last = self.channels.entry(channel).or_default();
        *last = at.max(*last);
        let at = *last;
        self.at(at, event);
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Arrive(ticket) => self.arrive(ticket),
            Event::Ingress(input) => self.feed_ingress(*input)?,
            Event::Queue(input) => self.feed_queue(*input),
            Event::Router(merged) => self.feed_router(&merged),
            Event::Decided(rank, life, decisions) => self.decided(rank, life, decisions),
            Event::Prompt(rank, prompt) => {
                let mut out = Vec::new();
                self.ranks[rank.0 as usize].prompt(self.now_us, *prompt, &mut out);
                self.carry_on(rank, out);
            }
            Event::Stop(rank, attempt) => {
                let mut out = Vec::new();
                self.ranks[rank.0 as usize].stop(self.now_us, attempt, &mut out);
                self.carry_on(rank, out);
            }
            Event::StepDone(rank, life) => self.step_done(rank, life),
            Event::Finished(rank, attempt) => {
                if self.ledgers[rank.0 as usize].remove(&attempt) {
                    self.tell_queue(rank, Some(Entry::Finished(attempt)));
                }
            }
            Event::Tick => self.tick(),
        }
        Ok(())
    }

    fn arrive(&mut self, ticket: u64) {
        let conversation = self.draw.below(self.scenario.conversations);
        let shared = 4 + self.draw.below(12) as u32;
        let own = self.draw.below(30) as u32;
        let head = (0..shared).map(|i| conversation as u32 * 50 + i);
        let prompt: Vec<TokenId> = head.chain((0..own).map(|i| (ticket as u32 * 31 + i) % VOCABULARY)).collect();
        let max_new_tokens = 1 + self.draw.below(40) as u32;
        let submission = Submission {
            ticket: Ticket(ticket),
            prompt: Arc::from(prompt.as_slice()),
            keys: PromptKeys::default(),
            produced: Vec::new(),
            generation: Generation { max_new_tokens, ..Generation::default() },
            conversation: Some(ConversationKey(u128::from(conversation))),
            sub_agent: None,
            explicit: None,
            priority: 0.5,
            tenant: conversation % 2,
            child: 0,
        };
        let client = Client { prompt, max_new_tokens, got: Vec::new(), outcome: None, left: false };
        self.clients.insert(ticket, client);
        self.send(("ingress", 0), Event::Ingress(Box::new(ingress::Input::Submit(Box::new(submission)))));
    }

    fn feed_ingress(&mut self, input: ingress::Input) -> Result<(), String> {
        let mut out = Vec::new();
        self.ingress.handle(self.now_us, input, &mut out);
        for effect in out {
            match effect {
                ingress::Effect::Announce(entry) => {
                    self.send(("ingress>queue", 0), Event::Queue(Box::new(round::Input::Announce(entry))));
                }
                ingress::Effect::Prompt { rank, prompt, .. } => {
                    // Behind what the router told the rank before it told the ingress.
                    self.send(("worker", rank.0), Event::Prompt(rank, Box::new(prompt)));
                }
                ingress::Effect::Stop { rank, attempt } => self.send(("worker", rank.0), Event::Stop(rank, attempt)),
                ingress::Effect::Placed { .. } => {}
                ingress::Effect::Tokens { ticket, tokens, .. } => self.tokens(ticket.0, &tokens)?,
                ingress::Effect::Ended { ticket, finish } => self.answered(ticket.0, Ok(finish))?,
                ingress::Effect::Failed { ticket, rejection } => self.answered(ticket.0, Err(rejection.to_string()))?,
            }
        }
        Ok(())
    }

    /// Each token a client gets is the next one of the undisturbed answer.
    fn tokens(&mut self, ticket: u64, tokens: &[Drawn]) -> Result<(), String> {
        let context = |what: &str| format!("at {} us: request {ticket} {what}", self.now_us);
        let Some(client) = self.clients.get_mut(&ticket) else { return Err(context("is nobody's")) };
        // Nobody reads what was on its way when the client left.
        if client.left {
            return Ok(());
        }
        if client.outcome.is_some() {
            return Err(context("got a token behind its end"));
        }
        for Drawn { token, .. } in tokens {
            let expected = next_token(client.prompt.iter().chain(&client.got).copied());
            if *token != expected {
                return Err(context(&format!("got {token} for {expected} at {}", client.got.len())));
            }
            client.got.push(*token);
        }
        Ok(())
    }

    fn answered(&mut self, ticket: u64, outcome: Result<Finish, String>) -> Result<(), String> {
        let context = |what: &str| format!("at {} us: request {ticket} {what}", self.now_us);
        let Some(client) = self.clients.get_mut(&ticket) else { return Err(context("is nobody's")) };
        if client.left {
            return Ok(());
        }
        if client.outcome.is_some() {
            return Err(context("was answered twice"));
        }
        if outcome.is_ok() && client.got.len() != client.max_new_tokens as usize {
            return Err(context(&format!("ended after {} of {}", client.got.len(), client.max_new_tokens)));
        }
        client.outcome = Some(outcome);
        Ok(())
    }

    fn feed_queue(&mut self, input: round::Input) {
        let mut out = Vec::new();
        self.queue.handle(self.now_us, input, &mut out);
        for effect in out {
            match effect {
                round::Effect::Completed(merged) => self.send(("queue>router", 0), Event::Router(Box::new(merged))),
                round::Effect::Send(_) | round::Effect::Dropped(_) => {}
            }
        }
        if let Some(due) = self.queue.poll_timeout() {
            self.at(due, Event::Tick);
        }
    }

    fn feed_router(&mut self, merged: &round::Merged) {
        // A round of an ended cluster.
        if merged.contributions.iter().any(|c| c.member.0 != self.incarnation) {
            return;
        }
        let mut decisions = Vec::new();
        let applied = self.replica.apply(merged, &mut decisions);
        (self.report.rounds, self.report.digest) = (self.report.rounds + 1, applied.digest);
        for rank in 0..self.scenario.ranks {
            let id = RankId(rank);
            let mine = |d: &&Decision| match d {
                Decision::Placed { rank, .. } | Decision::Stop { rank, .. } => *rank == id,
                _ => false,
            };
            let mine: Vec<Decision> = decisions.iter().filter(mine).cloned().collect();
            for decision in &mine {
                match decision {
                    Decision::Placed { attempt, .. } => self.ledgers[rank as usize].insert(*attempt),
                    Decision::Stop { attempt, .. } => self.ledgers[rank as usize].remove(attempt),
                    _ => false,
                };
            }
            if !mine.is_empty() {
                let life = self.ranks[rank as usize].life;
                self.send(("worker", rank), Event::Decided(id, life, mine));
            }
            self.tell_queue(id, None);
        }
        for decision in decisions {
            let input = match decision {
                Decision::Placed { attempt, rank, .. } => ingress::Input::Placed { attempt, rank },
                Decision::Seal { attempt } => ingress::Input::Seal { attempt },
                Decision::Rejected { key, rejection } => ingress::Input::Rejected { key, rejection },
                Decision::Enqueued { .. } | Decision::Stop { .. } | Decision::Probe { .. } => continue,
            };
            self.send(("router>ingress", 0), Event::Ingress(Box::new(input)));
        }
        self.send(("router>queue", 0), Event::Queue(Box::new(round::Input::Applied(applied))));
    }

    fn tell_queue(&mut self, rank: RankId, entry: Option<Entry>) {
        let snapshot = RankSnapshot {
            rank,
            counted: self.replica.round(),
            active_requests: self.ledgers[rank.0 as usize].len() as u32,
            ..RankSnapshot::default()
        };
        self.send(("router>queue", 0), Event::Queue(Box::new(round::Input::FromRank { entry, snapshot })));
    }

    fn decided(&mut self, rank: RankId, life: u64, decisions: Vec<Decision>) {
        let mut out = Vec::new();
        for decision in decisions {
            let now_us = self.now_us;
            let of_rank = &mut self.ranks[rank.0 as usize];
            match decision {
                // What was said to an earlier life was lost with it.
                Decision::Placed { attempt, number, .. } if of_rank.life == life => {
                    of_rank.placed(now_us, attempt, number, &mut out);
                }
                Decision::Stop { attempt, .. } => of_rank.stop(now_us, attempt, &mut out),
                _ => {}
            }
        }
        self.carry_on(rank, out);
    }

    /// Carries a rank's effects on, and begins its next step.
    fn carry_on(&mut self, rank: RankId, effects: Vec<batch::Effect>) {
        for effect in effects {
            match effect {
                batch::Effect::Emit(frames) => {
                    for frame in frames {
                        let (attempt, finished) = (frame.attempt, frame.finished.is_some());
                        self.send(("worker>ingress", rank.0), Event::Ingress(Box::new(ingress::Input::Frame(frame))));
                        if finished {
                            self.send(("worker>router", rank.0), Event::Finished(rank, attempt));
                        }
                    }
                }
                batch::Effect::Refused { attempt, rejection } => {
                    let refused = ingress::Input::Refused { attempt, rejection };
                    self.send(("worker>ingress", rank.0), Event::Ingress(Box::new(refused)));
                    self.send(("worker>router", rank.0), Event::Finished(rank, attempt));
                }
                batch::Effect::Kv(_) | batch::Effect::Ignored(_) => {}
            }
        }
        let of_rank = &mut self.ranks[rank.0 as usize];
        if let Some(step) = of_rank.batch.plan() {
            let took_us = 500 + 20 * step.tokens() as u64;
            let life = of_rank.life;
            self.steps.insert(rank.0, step);
            self.at(self.now_us + took_us, Event::StepDone(rank, life));
        }
    }

    fn step_done(&mut self, rank: RankId, life: u64) {
        if self.ranks[rank.0 as usize].life != life {
            return;
        }
        let Some(step) = self.steps.remove(&rank.0) else { return };
        let mut out = Vec::new();
        let now_us = self.now_us;
        let of_rank = &mut self.ranks[rank.0 as usize];
        let sampled = of_rank.compute(&step);
        of_rank.drive(now_us, batch::Input::StepDone { sampled }, &mut out);
        self.carry_on(rank, out);
    }

    fn tick(&mut self) {
        self.feed_queue(round::Input::Tick);
        for rank in 0..self.scenario.ranks {
            let late = self.ranks[rank as usize].expected.overdue(self.now_us, PROMPT_WAIT_US).lost;
            self.lost(RankId(rank), late);
        }
    }

    fn lost(&mut self, rank: RankId, attempts: Vec<AttemptKey>) {
        for attempt in attempts {
            self.report.attempts_lost += 1;
            self.ledgers[rank.0 as usize].remove(&attempt);
            self.tell_queue(rank, Some(Entry::Lost(attempt)));
        }
    }

    fn fault(&mut self) {
        match self.draw.below(10) {
            0..=2 => {
                let rank = self.draw.below(u64::from(self.scenario.ranks)) as u32;
                self.report.rank_crashes += 1;
                self.count(rank as usize);
                self.ranks[rank as usize].crash();
                self.steps.remove(&rank);
                let attempts = self.replica.placed_on_rank(RankId(rank));
                self.lost(RankId(rank), attempts);
            }
            3 => self.restart_control(),
            _ => {
                let open: Vec<u64> =
                    self.clients.iter().filter(|(_, c)| c.outcome.is_none() && !c.left).map(|(t, _)| *t).collect();
                if open.is_empty() {
                    return;
                }
                let ticket = open[self.draw.below(open.len() as u64) as usize];
                if let Some(client) = self.clients.get_mut(&ticket) {
                    client.left = true;
                }
                let cancel = ingress::Input::Cancel(Ticket(ticket));
                self.send(("ingress", 0), Event::Ingress(Box::new(cancel)));
            }
        }
    }

    /// What a rank did in this life.
    fn count(&mut self, rank: usize) {
        let stats = self.ranks[rank].batch.stats();
        self.report.preemptions += stats.preemptions;
        self.report.drafts_right += stats.accepted_tokens;
        self.report.drafts_wrong += stats.drafted_tokens - stats.accepted_tokens;
    }

    /// The router or the queue failed: a new cluster, of which nobody remembers the old one's messages.
    fn restart_control(&mut self) {
        self.report.control_restarts += 1;
        self.incarnation += 1;
        (self.queue, self.replica) = control(&self.scenario, self.incarnation);
        self.ledgers.iter_mut().for_each(BTreeSet::clear);
        self.agenda.retain(|_, event| !matches!(event, Event::Queue(_) | Event::Router(_) | Event::Finished(..)));
        let me = Incarnation(self.incarnation);
        for rank in 0..self.scenario.ranks {
            let now_us = self.now_us;
            let of_rank = &mut self.ranks[rank as usize];
            of_rank.expected.retain(|_| false);
            let others: Vec<AttemptKey> = of_rank.batch.attempts().filter(|a| a.key.ingress != me).collect();
            let mut out = Vec::new();
            for attempt in others {
                of_rank.stop(now_us, attempt, &mut out);
            }
            self.carry_on(RankId(rank), out);
        }
        self.send(("router>ingress", 0), Event::Ingress(Box::new(ingress::Input::NewCluster(me))));
        let ready = self.replica.ready();
        self.at(self.now_us, Event::Queue(Box::new(round::Input::Applied(ready))));
    }

    fn check(&mut self) -> Result<(), String> {
        self.ingress.check().map_err(|what| self.fail(&what))?;
        self.queue.check().map_err(|what| self.fail(&what))?;
        self.replica.check().map_err(|what| self.fail(&what))?;
        for rank in &self.ranks {
            rank.check().map_err(|what| self.fail(&what))?;
            if rank.batch.stats().cancel_steps_max > 1 {
                return Err(self.fail("a cancel took more than one step"));
            }
        }
        let faults = self.replica.faults();
        if faults.digest_mismatches + faults.placements_dropped > 0 {
            return Err(self.fail(&format!("{faults:?}")));
        }
        Ok(())
    }

    fn is_at_rest(&self) -> bool {
        self.clients.values().all(|c| c.outcome.is_some() || c.left)
            && self.ingress.open_len() == 0
            && self.replica.requests_len() == 0
            && self.ranks.iter().all(Rank::is_quiet)
    }

    fn finish(mut self) -> Result<Report, String> {
        for client in self.clients.values() {
            match &client.outcome {
                Some(Ok(_)) => self.report.ended += 1,
                Some(Err(_)) => self.report.failed += 1,
                None => self.report.left += 1,
            }
        }
        (0..self.ranks.len()).for_each(|rank| self.count(rank));
        self.report.virtual_us = self.now_us;
        Ok(self.report)
    }
}

fn control(scenario: &Scenario, incarnation: u64) -> (round::Machine, Replica) {
    let me = Incarnation(incarnation);
    let view = View {
        epoch: Epoch(1),
        members: vec![Member { incarnation: me, ranks: (0..scenario.ranks).map(RankId).collect() }],
        first_round: Round(1),
    };
    let placement = placement::Config { policy: scenario.policy, ..placement::Config::default() };
    let config =
        replica::Config { cap: scenario.cap, attempts_max: 100, probe_requests_max: 16, lockstep: false, placement };
    let queue = round::Machine::new(ClusterId(incarnation), me, view.clone(), round::Config::default());
    (queue.expect("the view was made of this incarnation"), Replica::new(view, config))
}
