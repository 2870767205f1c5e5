//! A rank in one thread: planner, KV manager, the mailboxes between them, and a model that reads and writes real pages.
//!
//! Every message waits in its mailbox until it is delivered, so that any interleaving can be played. The model's next
//! token is a hash of all tokens **as read from the pages**: a block that was reused wrongly, given back too early or
//! written by two sequences changes the output.

use super::super::*;
use super::memory;
use crate::ids::{Attempt, BlockId, Incarnation, RequestKey};
use crate::kv::Manager;
use crate::step::Step;
use memory::Memory;
use std::collections::VecDeque;

pub fn attempt(seq: u64, attempt: u32) -> AttemptKey {
    AttemptKey { key: RequestKey { ingress: Incarnation(1), seq }, attempt: Attempt(attempt) }
}

/// Tokens below `STOPS` end a sequence.
pub const STOPS: TokenId = 1;
/// Few tokens make shared prefixes and stops common.
pub const VOCABULARY: u64 = 12;

/// How far back the model looks where it repeats itself.
const REPEATS_AFTER: usize = 4;

/// A hash of all tokens, which says in most cases that one is repeated: so guesses are right often, and wrong often.
pub fn next_token(tokens: impl IntoIterator<Item = TokenId>) -> TokenId {
    let tokens: Vec<TokenId> = tokens.into_iter().collect();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for &token in &tokens {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3);
        hash ^= hash >> 29;
    }
    match tokens.len().checked_sub(REPEATS_AFTER) {
        Some(at) if hash >> 40 & 3 != 0 => tokens[at],
        _ => (hash % VOCABULARY) as TokenId,
    }
}

/// What a sequence must produce, alone and undisturbed.
pub fn undisturbed(sequence: &Sequence) -> (Vec<TokenId>, Finish) {
    let before = sequence.produced_before as usize;
    let mut tokens = sequence.tokens.clone();
    let prompt = tokens.len() - before;
    loop {
        let produced = &tokens[prompt..];
        if produced.last().is_some_and(|token| sequence.generation.stop_tokens.contains(token)) {
            return (tokens.split_off(prompt + before), Finish::Stop);
        }
        let full = tokens.len() >= sequence.context_tokens_max as usize;
        if full || produced.len() >= sequence.generation.max_new_tokens as usize {
            return (tokens.split_off(prompt + before), Finish::Length);
        }
        tokens.push(next_token(tokens.iter().copied()));
    }
}

/// What came out for one attempt.
#[derive(Clone, Debug)]
pub struct Stream {
    pub sequence: Sequence,
    pub tokens: Vec<TokenId>,
    pub cached_tokens: Vec<u32>,
    pub end: Option<End>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Finished(Finish),
    Refused(Rejection),
    Cancelled,
}

pub struct Rank {
    pub batch: Batch,
    pub kv: Manager,
    to_kv: VecDeque<kv::Input>,
    to_batch: VecDeque<kv::Effect>,
    pub step: Option<Step>,
    memory: Memory,
    pub streams: BTreeMap<AttemptKey, Stream>,
    pub steps: Vec<Step>,
    pub ignored: Vec<Ignored>,
    /// Ends, in the order they came.
    pub ended: Vec<AttemptKey>,
}

impl Rank {
    pub fn new(config: Config) -> Self {
        let kv::Shape { block_tokens, pools } = config.kv.clone();
        let kv = kv::Config::new(block_tokens, pools.iter().map(|pool| (pool.retention, pool.blocks)).collect());
        Self::with(config, kv)
    }

    pub fn with(config: Config, kv: kv::Config) -> Self {
        let kv::Shape { block_tokens, pools } = kv.shape();
        Self {
            batch: Batch::new(config).expect("a good configuration"),
            kv: Manager::new(kv).expect("a good configuration"),
            to_kv: VecDeque::new(),
            to_batch: VecDeque::new(),
            step: None,
            memory: Memory::new(block_tokens, pools),
            streams: BTreeMap::new(),
            steps: Vec::new(),
            ignored: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub fn admit(&mut self, sequence: Sequence) {
        let stream = Stream { sequence: sequence.clone(), tokens: Vec::new(), cached_tokens: Vec::new(), end: None };
        self.streams.insert(sequence.attempt, stream);
        self.tell_batch(Input::Admit(sequence));
    }

    pub fn cancel(&mut self, attempt: AttemptKey) {
        let stream = self.streams.get_mut(&attempt).expect("admitted");
        if stream.end.is_none() {
            stream.end = Some(End::Cancelled);
            self.ended.push(attempt);
            self.tell_batch(Input::Cancel { attempt });
        }
    }

    /// Delivers the oldest message to the KV manager.
    pub fn deliver_to_kv(&mut self) -> bool {
        let Some(input) = self.to_kv.pop_front() else {
            return false;
        };
        let mut out = Vec::new();
        self.kv.handle(0, input, &mut out);
        self.to_batch.extend(out);
        self.check();
        true
    }

    /// Delivers the oldest message of the KV manager.
    pub fn deliver_to_batch(&mut self) -> bool {
        let Some(effect) = self.to_batch.pop_front() else {
            return false;
        };
        self.tell_batch(Input::Kv(effect));
        true
    }

    /// Starts the next step if none is in flight.
    pub fn plan(&mut self) -> bool {
        let has_step = self.batch.has_step();
        let step = self.batch.plan();
        assert_eq!(has_step, step.is_some());
        let Some(step) = step else {
            return false;
        };
        assert!(self.step.is_none(), "one step at a time");
        assert!(step.tokens() > 0 && step.tokens() <= self.batch.config.step_tokens_max as usize);
        assert!(step.slices.iter().all(|slice| !slice.tokens.is_empty()));
        self.steps.push(step.clone());
        self.step = Some(step);
        self.check();
        true
    }

    /// Runs the step in flight on the pages and hands its tokens back.
    pub fn finish_step(&mut self) -> bool {
        let Some(step) = self.step.take() else {
            return false;
        };
        step.copies.iter().for_each(|copy| self.memory.copy(*copy));
        let mut read = Vec::new();
        for slice in &step.slices {
            let Stream { sequence, tokens, .. } = &self.streams[&slice.attempt];
            let known = sequence.tokens.iter().chain(tokens).copied().take(slice.start as usize);
            let known: Vec<TokenId> = known.chain(slice.tokens.iter().copied()).collect();
            read.push(self.memory.write(slice, sequence.scope.tenant, &known));
        }
        let mut sampled = Vec::new();
        for (at, slice) in step.slices.iter().enumerate() {
            let stream = &self.streams[&slice.attempt];
            let tokens = &read[at];
            let known = stream.sequence.tokens.len() + stream.tokens.len();
            if let Some(sample) = slice.sample.as_ref().filter(|_| stream.end.is_none()) {
                assert_eq!(sample.position as usize, known);
                let most = stream.sequence.tokens.len() - stream.sequence.produced_before as usize
                    + stream.sequence.generation.max_new_tokens as usize;
                assert!(known + 1 + sample.drafts as usize <= most.min(stream.sequence.context_tokens_max as usize));
            }
            for draw in slice.draws() {
                let token = next_token(tokens[..draw.position as usize].iter().copied());
                sampled.push(Sampled::new(at, Drawn::new(token, -0.5)));
            }
        }
        self.tell_batch(Input::StepDone { sampled });
        true
    }

    /// Delivers and runs everything until nothing is left to do; whatever was admitted must have ended by then.
    pub fn drain(&mut self) {
        let mut idle_turns = 0;
        while !self.batch.is_idle() || !self.to_kv.is_empty() || !self.to_batch.is_empty() {
            let moved = self.deliver_to_kv() | self.deliver_to_batch() | self.plan() | self.finish_step();
            idle_turns = if moved { 0 } else { idle_turns + 1 };
            assert!(idle_turns < 3, "stuck: {:?}\n{:?}", self.batch, self.kv.stats());
        }
    }

    /// What must hold once everything has ended.
    pub fn check_ended(&self) {
        for (attempt, stream) in &self.streams {
            let fits = self.fits(&stream.sequence);
            let (tokens, finish) = undisturbed(&stream.sequence);
            match &stream.end {
                Some(End::Finished(end)) => {
                    assert_eq!((&stream.tokens, *end), (&tokens, finish), "{attempt}");
                }
                Some(End::Cancelled) => assert!(tokens.starts_with(&stream.tokens), "{attempt}"),
                Some(End::Refused(_)) => {
                    assert!(!fits && stream.tokens.is_empty(), "{attempt} was refused")
                }
                None => panic!("{attempt} never ended"),
            }
        }
        let stats = self.kv.stats();
        assert_eq!(stats.attempts, 0);
        for pool in stats.pools {
            assert_eq!((pool.blocks_held, pool.blocks_free + pool.blocks_reusable), (0, pool.blocks_total));
        }
        assert!(self.batch.stats().cancel_steps_max <= 1);
        assert_eq!(self.batch.load(), Load::default());
    }

    /// Whether the pool can hold the sequence at its longest.
    pub fn fits(&self, sequence: &Sequence) -> bool {
        let prompt = sequence.tokens.len() as u32 - sequence.produced_before;
        let most = (prompt + sequence.generation.max_new_tokens).min(sequence.context_tokens_max);
        prompt < sequence.context_tokens_max && self.batch.config.too_small(most).is_none()
    }

    pub fn tell_batch(&mut self, input: Input) {
        let running_before: Vec<AttemptKey> = self.batch.running.keys().map(|order| order.attempt).collect();
        let preemptions = self.batch.totals.preemptions;
        let mut out = Vec::new();
        self.batch.handle(0, input, &mut out);
        if self.batch.totals.preemptions > preemptions {
            self.check_preempted(&running_before);
        }
        for effect in out {
            match effect {
                Effect::Kv(input) => {
                    if let kv::Input::Reserve { attempt, .. } | kv::Input::Grow { attempt, .. } = &input {
                        assert_eq!(self.streams[attempt].end, None, "{attempt} asks for blocks after its end");
                    }
                    self.to_kv.push_back(input);
                }
                Effect::Emit(frames) => frames.into_iter().for_each(|frame| self.take_frame(frame)),
                Effect::Refused { attempt, rejection } => self.end(attempt, End::Refused(rejection)),
                Effect::Ignored(why) => self.ignored.push(why),
            }
        }
        self.check();
    }

    /// Whoever lost its blocks has a higher number than everyone who keeps them.
    fn check_preempted(&self, running_before: &[AttemptKey]) {
        let waits = |attempt: &&AttemptKey| self.batch.waiting.keys().any(|order| order.attempt == **attempt);
        let lowest = running_before.iter().filter(waits).map(|a| self.batch.numbers[a]).min();
        let running = self.batch.running.keys().map(|order| order.number).max();
        assert!(running.is_none() || lowest > running, "{lowest:?} was preempted while {running:?} runs on");
    }

    fn take_frame(&mut self, frame: Frame) {
        let stream = self.streams.get_mut(&frame.attempt).expect("admitted");
        assert_eq!(stream.end, None, "{} got a frame after its end", frame.attempt);
        let produced = stream.sequence.produced_before as usize + stream.tokens.len();
        assert_eq!(frame.first_position as usize, produced, "no token lost or repeated");
        assert!(!frame.tokens.is_empty() || frame.finished.is_some());
        stream.tokens.extend(frame.tokens.iter().map(|drawn| drawn.token));
        stream.cached_tokens.push(frame.cached_tokens);
        assert_eq!(frame.cached_tokens, stream.cached_tokens[0], "preemption does not change what the prompt reused");
        if let Some(finish) = frame.finished {
            self.end(frame.attempt, End::Finished(finish));
        }
    }

    fn end(&mut self, attempt: AttemptKey, end: End) {
        let stream = self.streams.get_mut(&attempt).expect("admitted");
        assert_eq!(stream.end, None, "{attempt} ended twice");
        stream.end = Some(end);
        self.ended.push(attempt);
    }

    fn check(&self) {
        self.batch.check().expect("all invariants of the planner hold");
        self.kv.check().expect("all invariants of the KV manager hold");
        assert!(self.batch.stats().cancel_steps_max <= 1);
        self.check_tables();
    }

    /// No two running sequences both think that they may write a block, and none may write one that is reusable.
    fn check_tables(&self) {
        let block_tokens = self.batch.config.kv.block_tokens;
        for (life_cycle, pool) in (0u8..).zip(&self.batch.config.kv.pools) {
            let mut writers: BTreeMap<BlockId, AttemptKey> = BTreeMap::new();
            for (order, running) in &self.batch.running {
                let table = &running.tables[usize::from(life_cycle)];
                let first = if pool.retention == Retention::State { 0 } else { running.computed / block_tokens };
                for block in (first as usize..table.len()).filter_map(|ordinal| table.get(ordinal)) {
                    let other = writers.insert(block, order.attempt);
                    assert_eq!(other, None, "{block} of {life_cycle} is also written by {}", order.attempt);
                    assert!(!self.kv.is_published(life_cycle, block), "{block} of {life_cycle} is written and shared");
                }
            }
        }
    }
}
