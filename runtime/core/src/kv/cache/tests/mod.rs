//! Tests of the KV manager: a bed that serves prompts, and one file a subject.

mod errors;
mod events;
mod explain;
mod forget;
mod hint;
mod plans;
mod quota;
mod rebalance;
mod regressions;
mod resize;
mod reuse;
mod sizing;
mod tiers;
mod tree;
mod worth;

use super::lifecycle::{LifeCycle, Policy, Priority, Retention};
use super::{After, Config, Copy, Manager, Opened, SequenceId};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use std::num::NonZeroU32;

const SCOPE: Scope = Scope { tenant: 1, adapter: None };

fn some(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("not 0")
}

fn window(tokens: u32) -> Retention {
    Retention::Window { tokens: some(tokens), sink_blocks: 0 }
}

fn required(retention: Retention, group: u8) -> LifeCycle {
    LifeCycle { retention, policy: Policy::Required, group, priority: Priority::default() }
}

fn config(block_tokens: u32, life_cycles: Vec<LifeCycle>, tiers: Vec<Vec<u32>>) -> Config {
    Config { conversations_max: 100, ..Config::new(some(block_tokens), life_cycles, tiers) }
}

/// `count` tokens from `first` on.
fn count(first: u32, count: u32) -> Vec<TokenId> {
    (first..first + count).collect()
}

/// The first tokens of one sequence, then others.
fn fork(tokens: &[TokenId], at: usize, rest: &[TokenId]) -> Vec<TokenId> {
    [&tokens[..at], rest].concat()
}

/// A manager whose invariants are checked after every call.
struct Bed {
    manager: Manager,
    copies: Vec<Copy>,
    opened: u64,
    /// That new sequences belong to.
    conversation: Option<ConversationKey>,
}

impl Bed {
    fn new(config: Config) -> Self {
        Self {
            manager: Manager::new(config).expect("a valid configuration"),
            copies: Vec::new(),
            opened: 0,
            conversation: None,
        }
    }

    fn check(&self) {
        self.manager.check().unwrap_or_else(|violation| panic!("{violation}"));
    }

    fn open(&mut self, tokens: &[TokenId]) -> (SequenceId, Opened) {
        self.open_in(SCOPE, tokens)
    }

    fn open_in(&mut self, scope: Scope, tokens: &[TokenId]) -> (SequenceId, Opened) {
        self.opened += 1;
        let id = SequenceId(self.opened);
        let opened = self.manager.create(id, scope, tokens, self.conversation).expect("ids are not used twice");
        self.check();
        (id, opened)
    }

    fn resume(&mut self, id: SequenceId) -> bool {
        let resumed = self.manager.resume(id, &[], &mut self.copies).expect("it is suspended");
        self.check();
        resumed
    }

    fn resize(&mut self, id: SequenceId, capacity: u32, history: u32) -> bool {
        let wanted = (Some(capacity), Some(history));
        let resized = self.manager.resize(id, wanted, &mut self.copies).expect("a right size");
        self.check();
        resized
    }

    fn commit(&mut self, id: SequenceId, tokens: &[TokenId]) {
        self.manager.commit(id, tokens, After::GoesOn, &mut self.copies).expect("a right commit");
        self.check();
    }

    fn close(&mut self, id: SequenceId) {
        self.manager.close(id);
        self.check();
    }

    /// Opens and resumes a sequence, with room for `tokens`.
    fn start(&mut self, tokens: &[TokenId]) -> (SequenceId, u32) {
        let (id, opened) = self.open(tokens);
        assert!(self.resume(id) && self.resize(id, tokens.len() as u32, opened.reused_tokens), "no room");
        (id, opened.reused_tokens)
    }

    /// Computes and commits `tokens`, with end points at `ends` as well; the tokens that were reused.
    fn prefill(&mut self, tokens: &[TokenId], ends: &[usize]) -> (SequenceId, u32) {
        let (id, reused) = self.start(tokens);
        let mut from = reused as usize;
        for &end in ends.iter().filter(|end| **end > reused as usize).chain([&tokens.len()]) {
            assert!(self.resize(id, tokens.len() as u32, end as u32));
            self.commit(id, &tokens[from..end]);
            from = end;
        }
        (id, reused)
    }

    /// Computes, commits and closes; the tokens that were reused.
    fn serve(&mut self, tokens: &[TokenId]) -> u32 {
        let (id, reused) = self.prefill(tokens, &[]);
        self.close(id);
        reused
    }

    fn probe(&self, tokens: &[TokenId]) -> u32 {
        self.manager.probe(&SCOPE, tokens)
    }

    /// Pages of a life cycle by tier: locked, held, droppable.
    fn pages(&self, life_cycle: usize) -> Vec<(u32, u32, u32)> {
        let tiers = &self.manager.census()[life_cycle];
        tiers.iter().map(|tier| (tier.locked, tier.held, tier.droppable)).collect()
    }
}
