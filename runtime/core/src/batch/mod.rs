//! One rank's step planner: continuous batching, chunked prefill, preemption by recompute.
//!
//! The KV manager is another actor. Questions to it are effects and its answers are inputs; until an answer is there,
//! the sequence waits and the others go on. **Order matters**: the KV manager must get the [`Effect::Kv`] inputs in the
//! order they were put out, and its effects must come back in order.
//!
//! Who goes first is always the lower request number. Reservations are asked for in that order and nobody overtakes a
//! sequence that does not fit yet; when a running sequence cannot grow, the running one with the highest number gives
//! its blocks back and waits again. So the lowest number always goes on, and everything admitted ends.

mod flow;
mod plan;
mod sequence;
#[cfg(test)]
mod tests;

use crate::ids::{AttemptKey, ConversationKey, RequestNumber, TokenId};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::{self, Violation, identity::Scope};
use crate::rejection::Rejection;
use crate::request::{Finish, Generation};
use crate::step::{BlockCopy, Drawn, Sampled, Table};
use sequence::{Order, Running, Waiting};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Budgets of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Tokens that one step computes at most, decode and prefill together.
    pub step_tokens_max: u32,
    /// Sequences that hold blocks, or ask for them, at once.
    pub sequences_max: u32,
    /// Tokens that a decoding sequence guesses at most, to verify them in the same step; 0 guesses none.
    pub draft_tokens_max: u32,
    /// Tokens that there are. What comes with others is refused.
    pub vocabulary: u32,
    /// The KV manager's pools.
    pub kv: kv::Shape,
}

impl Config {
    /// Positions behind the computed ones that a sequence in prefill has places for: those of the step in flight, and of the
    /// next one.
    pub fn ahead_tokens(&self) -> u32 {
        ahead_tokens(self.step_tokens_max)
    }

    /// The first pool that a sequence of so many tokens does not fit.
    pub fn too_small(&self, tokens: u32) -> Option<TooSmall> {
        let wanted = |pool: &kv::Pool| pool.blocks_max(tokens, self.ahead_tokens(), self.kv.block_tokens);
        let mut all = self.kv.pools.iter().enumerate().map(|(life_cycle, pool)| TooSmall {
            life_cycle,
            wanted: wanted(pool),
            blocks: pool.blocks,
        });
        all.find(|pool| pool.wanted > pool.blocks)
    }
}

/// As [`Config::ahead_tokens`], for whoever sizes pools before there is a planner.
pub fn ahead_tokens(step_tokens_max: u32) -> u32 {
    step_tokens_max.saturating_mul(2)
}

/// A pool that cannot hold a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    pub life_cycle: usize,
    pub wanted: u32,
    pub blocks: u32,
}

/// Budgets that no sequence fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("a step computes no tokens (step tokens max 0)")]
    NoStepTokens,
    #[error("no sequence may run (sequences max 0)")]
    NoSequences,
    #[error("there are no tokens (vocabulary 0)")]
    NoVocabulary,
    #[error("KV pool {pool} has no blocks")]
    NoBlocks { pool: usize },
}

/// A sequence to run: one attempt of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    pub attempt: AttemptKey,
    pub number: RequestNumber,
    /// Which of the request's children; 0 for a request without.
    pub child: u32,
    pub scope: Scope,
    /// Of which this is a turn.
    pub conversation: Option<ConversationKey>,
    /// The prompt, then what former attempts produced.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` former attempts produced.
    pub produced_before: u32,
    pub generation: Generation,
    /// Prompt and produced tokens together, at most.
    pub context_tokens_max: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Admit(Sequence),
    /// What the KV manager says.
    Kv(kv::Effect),
    Cancel {
        attempt: AttemptKey,
    },
    /// The planned step ran; a token for each draw.
    StepDone {
        sampled: Vec<Sampled>,
    },
    /// Ask the KV manager again for whatever it refused. Never needed while no message is lost.
    Tick,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// To the rank's KV manager, in this order.
    Kv(kv::Input),
    /// A step's tokens: one frame a sequence that got one.
    Emit(Vec<Frame>),
    /// The sequence is not run, or not further, and holds nothing.
    Refused {
        attempt: AttemptKey,
        rejection: Rejection,
    },
    Ignored(Ignored),
}

/// What one step produced for one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Frame {
    pub attempt: AttemptKey,
    /// Index of the first of `tokens` among all produced tokens, those of former attempts included.
    pub first_position: u32,
    pub tokens: Vec<Drawn>,
    /// Prompt tokens whose KV this attempt reused.
    pub cached_tokens: u32,
    pub finished: Option<Finish>,
}

/// Why an input had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ignored {
    DuplicateAttempt {
        attempt: AttemptKey,
    },
    /// Not here: it ended already, or never came.
    UnknownAttempt {
        attempt: AttemptKey,
    },
    /// The KV manager answered what was not asked.
    UnaskedAnswer {
        attempt: AttemptKey,
    },
    NoStep,
    /// A token that no draw of the slice asked for.
    UnaskedToken {
        slice: u32,
    },
    /// A slice that samples got no token; its last position is computed again.
    MissingToken {
        slice: u32,
    },
}

/// Counters and gauges of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Sequences without blocks, and with.
    pub waiting: u32,
    pub running: u32,
    pub steps: u64,
    pub preemptions: u64,
    pub cancels: u64,
    /// Steps that ended between a cancel and the release of its blocks: summed, and the most for one. Never above 1.
    pub cancel_steps: u64,
    pub cancel_steps_max: u64,
    /// Positions that steps computed, tokens they produced, and positions that reservations found computed.
    pub computed_tokens: u64,
    pub produced_tokens: u64,
    pub reused_tokens: u64,
    /// Guessed tokens that steps verified, and those of them that were right.
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    pub queued_prefill_tokens: u64,
    pub refused: u64,
    pub ignored: u64,
}

/// What a rank says of itself in a contribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    pub active_requests: u32,
    /// Tokens known of these, prompt and produced.
    pub active_tokens: u64,
    /// Tokens to compute before sequences that are not decoding yet get their next token.
    pub queued_prefill_tokens: u64,
}

/// One slice of the step in flight.
#[derive(Clone, Debug)]
struct Part {
    order: Order,
    /// Known tokens that it computes.
    tokens: u32,
    samples: bool,
    /// Guesses behind them. Their KV counts only as far as the tokens that are drawn turn out to be the same.
    drafts: Vec<TokenId>,
}

impl Part {
    /// Tokens that are drawn.
    fn draws(&self) -> usize {
        usize::from(self.samples) * (self.drafts.len() + 1)
    }
}

/// The step planner of one rank.
///
/// Invariants: (B1) `numbers` names exactly the sequences that wait or run; (B2) sequences that run or have a
/// reservation in question are `sequences_max` at most; (B3) a running sequence has places for every computed position,
/// at least one known token to compute, and no more places than it can ever need; (B4) only a sequence of the step in
/// flight is doomed, and every sequence of that step runs; (B5) an attempt that is leaving neither waits nor runs.
#[derive(Clone, Debug)]
pub struct Batch {
    config: Config,
    waiting: BTreeMap<Order, Waiting>,
    running: BTreeMap<Order, Running>,
    numbers: BTreeMap<AttemptKey, RequestNumber>,
    /// Cancelled and released while the KV manager still owes an answer.
    leaving: BTreeSet<AttemptKey>,
    in_flight: Option<Vec<Part>>,
    /// To be made before the next step.
    copies: Vec<BlockCopy>,
    /// Grows when blocks may have come free: what was refused under a lower mark is worth asking again.
    mark: u64,
    totals: Stats,
}

impl Batch {
    /// # Errors
    /// A budget of 0, no vocabulary, or a pool that holds nothing.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        if let Some(pool) = config.kv.pools.iter().position(|pool| pool.blocks == 0) {
            return Err(ConfigError::NoBlocks { pool });
        }
        if config.step_tokens_max == 0 {
            return Err(ConfigError::NoStepTokens);
        }
        if config.sequences_max == 0 {
            return Err(ConfigError::NoSequences);
        }
        if config.vocabulary == 0 {
            return Err(ConfigError::NoVocabulary);
        }
        Ok(Self {
            config,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            numbers: BTreeMap::new(),
            leaving: BTreeSet::new(),
            in_flight: None,
            copies: Vec::new(),
            mark: 0,
            totals: Stats::default(),
        })
    }

    /// Takes one input and appends what follows from it. Total: what makes no sense is `Ignored` or `Refused`.
    pub fn handle(&mut self, _now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Admit(sequence) => self.admit(sequence, out),
            Input::Kv(answer) => self.answered(answer, out),
            Input::Cancel { attempt } => self.cancel(attempt, out),
            Input::StepDone { sampled } => self.step_done(sampled, out),
            Input::Tick => self.mark += 1,
        }
        self.settle(out);
    }

    /// Nothing waits, runs, or is owed by the KV manager.
    pub fn is_idle(&self) -> bool {
        self.numbers.is_empty() && self.leaving.is_empty() && self.in_flight.is_none()
    }

    pub fn step_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Every attempt that waits or runs: what is lost when the rank fails.
    pub fn attempts(&self) -> impl Iterator<Item = AttemptKey> + '_ {
        self.numbers.keys().copied()
    }

    pub fn load(&self) -> Load {
        let known = self.waiting.values().map(|w| &w.known).chain(self.running.values().map(|r| &r.known));
        let waiting: u64 = self.waiting.values().map(|w| u64::from(w.known.len())).sum();
        let prefill = self.running.values().map(Running::uncomputed).filter(|&tokens| tokens > 1);
        Load {
            active_requests: self.numbers.len() as u32,
            active_tokens: known.map(|k| u64::from(k.len())).sum(),
            queued_prefill_tokens: waiting + prefill.map(u64::from).sum::<u64>(),
        }
    }

    pub fn stats(&self) -> Stats {
        Stats {
            waiting: self.waiting.len() as u32,
            running: self.running.len() as u32,
            queued_prefill_tokens: self.load().queued_prefill_tokens,
            ..self.totals
        }
    }

    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        let fail = |id, what| Err(Violation { id, what });
        let orders: BTreeMap<AttemptKey, RequestNumber> =
            self.waiting.keys().chain(self.running.keys()).map(|o| (o.attempt, o.number)).collect();
        if orders != self.numbers || orders.len() != self.waiting.len() + self.running.len() {
            return fail("B1", format!("{orders:?} wait or run, {:?} are known", self.numbers));
        }
        let asking = self.waiting.values().filter(|w| w.ask.is_open()).count();
        if self.running.len() + asking > self.config.sequences_max as usize {
            return fail("B2", format!("{} run and {asking} ask", self.running.len()));
        }
        let block_tokens = self.config.kv.block_tokens;
        for (order, running) in &self.running {
            let (capacity, most) = (running.capacity, running.known.capacity_max(block_tokens));
            let ordinals = capacity.div_ceil(block_tokens.get()) as usize;
            let covers = |(table, pool): (&Table, &kv::Pool)| match pool.retention {
                Retention::State => table.blocks.len() == 1,
                _ => table.len() == ordinals,
            };
            let covered = running.tables.len() == self.config.kv.pools.len()
                && running.tables.iter().zip(&self.config.kv.pools).all(covers);
            if !covered || running.computed > capacity || running.uncomputed() == 0 || capacity > most {
                return fail("B3", format!("{order:?}: {capacity} places of {most}: {running:?}"));
            }
            if running.doom.is_some() && !running.in_step {
                return fail("B4", format!("{order:?} is doomed outside a step"));
            }
        }
        let in_step: BTreeSet<Order> = self.running.iter().filter(|(_, r)| r.in_step).map(|(o, _)| *o).collect();
        let parts: BTreeSet<Order> = self.in_flight.iter().flatten().map(|p| p.order).collect();
        if in_step != parts {
            return fail("B4", format!("{in_step:?} are marked, {parts:?} are in the step"));
        }
        if let Some(attempt) = self.leaving.iter().find(|a| self.numbers.contains_key(a)) {
            return fail("B5", format!("{attempt} is leaving and still here"));
        }
        Ok(())
    }

    fn ignore(&mut self, why: Ignored, out: &mut Vec<Effect>) {
        self.totals.ignored += 1;
        out.push(Effect::Ignored(why));
    }

    fn refuse(&mut self, attempt: AttemptKey, rejection: Rejection, out: &mut Vec<Effect>) {
        self.totals.refused += 1;
        out.push(Effect::Refused { attempt, rejection });
    }
}
