//! One rank: KV manager, step planner and a backend whose steps take virtual time.

use starling_core::batch::{self, Batch};
use starling_core::fence::Expected;
use starling_core::ids::{AttemptKey, RequestNumber, TokenId};
use starling_core::ingress::Prompt;
use starling_core::kv::{self, Manager};
use starling_core::step::{Drawn, Sampled, Step};

/// Tokens of a simulated vocabulary.
pub(crate) const VOCABULARY: u32 = 1000;

/// How far back a model that repeats itself looks.
const REPEATS_AFTER: usize = 5;

/// The model: the next token is a hash of all tokens before it, as the pages hold them, or the one that the hash says is
/// repeated.
pub(crate) fn next_token(tokens: impl Iterator<Item = TokenId>) -> TokenId {
    let tokens: Vec<TokenId> = tokens.collect();
    let hash = tokens.iter().fold(17u32, |hash, token| (hash ^ token).wrapping_mul(0x9e37_79b1).rotate_left(7));
    match tokens.len().checked_sub(REPEATS_AFTER) {
        Some(at) if hash >> 16 & 7 != 0 => tokens[at],
        _ => hash % VOCABULARY,
    }
}

pub(crate) struct Rank {
    pub(crate) kv: Manager,
    pub(crate) batch: Batch,
    pub(crate) expected: Expected<Prompt>,
    pages: Vec<TokenId>,
    block_tokens: usize,
    /// Lives of this rank; a step of an earlier one says nothing.
    pub(crate) life: u64,
    config: batch::Config,
    context_tokens: u32,
}

impl Rank {
    pub(crate) fn new(config: batch::Config, life: u64, context_tokens: u32) -> Self {
        let block_tokens = config.kv.block_tokens.get();
        let blocks = config.kv.pools[0].blocks;
        let kv = kv::Config::full(blocks, block_tokens).expect("a pool that holds something");
        let block_tokens = block_tokens as usize;
        Self {
            kv: Manager::new(kv).expect("a pool that holds something"),
            batch: Batch::new(config.clone()).expect("budgets that a sequence fits"),
            expected: Expected::default(),
            pages: vec![TokenId::MAX; blocks as usize * block_tokens],
            block_tokens,
            life,
            config,
            context_tokens,
        }
    }

    /// The device failed: everything starts over.
    pub(crate) fn crash(&mut self) {
        *self = Self::new(self.config.clone(), self.life + 1, self.context_tokens);
    }

    pub(crate) fn placed(
        &mut self,
        now_us: u64,
        attempt: AttemptKey,
        number: RequestNumber,
        out: &mut Vec<batch::Effect>,
    ) {
        if let Some(prompt) = self.expected.placed(now_us, attempt, number) {
            self.admit(now_us, prompt, number, out);
        }
    }

    pub(crate) fn prompt(&mut self, now_us: u64, prompt: Prompt, out: &mut Vec<batch::Effect>) {
        if let Some((prompt, number)) = self.expected.prompt(now_us, prompt.attempt, prompt) {
            self.admit(now_us, prompt, number, out);
        }
    }

    fn admit(&mut self, now_us: u64, prompt: Prompt, number: RequestNumber, out: &mut Vec<batch::Effect>) {
        let sequence = prompt.into_sequence(number, self.context_tokens);
        self.drive(now_us, batch::Input::Admit(sequence), out);
    }

    pub(crate) fn stop(&mut self, now_us: u64, attempt: AttemptKey, out: &mut Vec<batch::Effect>) {
        if self.batch.attempts().any(|known| known == attempt) {
            self.drive(now_us, batch::Input::Cancel { attempt }, out);
        } else {
            self.expected.stop(now_us, attempt);
        }
    }

    /// Feeds the planner, and the KV manager behind it, until both are quiet. What goes further is put out.
    pub(crate) fn drive(&mut self, now_us: u64, input: batch::Input, out: &mut Vec<batch::Effect>) {
        let mut inputs = std::collections::VecDeque::from([input]);
        let (mut effects, mut answers) = (Vec::new(), Vec::new());
        while let Some(input) = inputs.pop_front() {
            self.batch.handle(now_us, input, &mut effects);
            for effect in effects.drain(..) {
                match effect {
                    batch::Effect::Kv(input) => self.kv.handle(now_us, input, &mut answers),
                    other => out.push(other),
                }
            }
            inputs.extend(answers.drain(..).map(batch::Input::Kv));
        }
    }

    /// Computes a step on the pages.
    pub(crate) fn compute(&mut self, step: &Step) -> Vec<Sampled> {
        let mut sampled = Vec::new();
        for copy in &step.copies {
            let [from, to] = [copy.from, copy.to].map(|block| block.0 as usize * self.block_tokens);
            self.pages.copy_within(from..from + self.block_tokens, to);
        }
        for (index, slice) in step.slices.iter().enumerate() {
            let at = |position: usize| {
                let block = slice.tables[0][position / self.block_tokens].0 as usize;
                block * self.block_tokens + position % self.block_tokens
            };
            for (i, token) in slice.tokens.iter().enumerate() {
                self.pages[at(slice.start as usize + i)] = *token;
            }
            for draw in slice.draws() {
                let known = draw.position as usize;
                let token = next_token((0..known).map(|position| self.pages[at(position)]));
                sampled.push(Sampled::new(index, Drawn::new(token, -1.0)));
            }
        }
        sampled
    }

    /// # Errors
    /// The first invariant of a machine that does not hold.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.kv.check().map_err(|violation| violation.to_string())?;
        self.batch.check().map_err(|violation| violation.to_string())
    }

    /// No block is held and nothing waits.
    pub(crate) fn is_quiet(&self) -> bool {
        let is_free = |pool: &kv::PoolStats| {
            pool.blocks_held == 0 && pool.blocks_free + pool.blocks_reusable == pool.blocks_total
        };
        self.kv.stats().pools.iter().all(is_free) && self.batch.is_idle()
    }
}
