//! What the planner knows of one sequence, by phase.

use super::Sequence;
use crate::ids::{AttemptKey, BlockId, ConversationKey, RequestNumber, TokenId};
use crate::kv::cache::lifecycle::Retention;
use crate::kv::identity::Scope;
use crate::kv::{Rebased, Shape};
use crate::request::{Finish, Generation};
use crate::step::{Banned, Drawn, History, Table};
use std::num::NonZeroU32;
use std::sync::Arc;

/// Tokens that must stand elsewhere in the sequence for a guess. Fewer match by chance, more miss what repeats.
pub(super) const DRAFT_MATCH_TOKENS: usize = 3;
/// How far back they are looked for: beyond it, looking costs more than a token computed for nothing.
const DRAFT_LOOKBACK_TOKENS: usize = 16_384;

/// Who goes first: the lower request number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    pub number: RequestNumber,
    pub attempt: AttemptKey,
}

/// What stays the same, or only grows, whether the sequence waits or runs.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub child: u32,
    pub scope: Scope,
    pub conversation: Option<ConversationKey>,
    pub generation: Generation,
    /// Prompt and everything produced. Shared with the step in flight where its draws need them.
    pub tokens: Arc<Vec<TokenId>>,
    pub prompt_tokens: u32,
    /// Length at which the sequence ends by itself.
    pub tokens_max: u32,
    /// Prompt tokens that the first reservation reused; `None` before it.
    pub cached_tokens: Option<u32>,
}

impl Known {
    /// A sequence of at least one prompt token and at most `u32::MAX` tokens in all.
    pub fn new(sequence: Sequence) -> Self {
        let prompt_tokens = sequence.tokens.len() as u32 - sequence.produced_before;
        let tokens_max = prompt_tokens.saturating_add(sequence.generation.max_new_tokens);
        Self {
            child: sequence.child,
            scope: sequence.scope,
            conversation: sequence.conversation,
            generation: sequence.generation,
            tokens: Arc::new(sequence.tokens),
            prompt_tokens,
            tokens_max: tokens_max.min(sequence.context_tokens_max),
            cached_tokens: None,
        }
    }

    pub fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Costs nothing while no step holds the tokens, which is so whenever one is pushed.
    pub fn push(&mut self, token: TokenId) {
        Arc::make_mut(&mut self.tokens).push(token);
    }

    /// What draws behind the last token need of those before it.
    pub fn history(&self) -> Option<History> {
        let history = || History { tokens: Arc::clone(&self.tokens), prompt_tokens: self.prompt_tokens };
        self.generation.sampling.has_penalties().then(history)
    }

    /// Tokens that would end the sequence before it may.
    pub fn banned(&self) -> Option<Banned> {
        let before = self.prompt_tokens.saturating_add(self.generation.min_new_tokens);
        let stops = &self.generation.stop_tokens;
        (self.len() < before && !stops.is_empty()).then(|| Banned { tokens: stops.clone(), before })
    }

    /// What may come next, by looking up what came after the last tokens when they stood in the sequence before: the latest
    /// such place, read on as if it repeated itself. At most `count` tokens; none where there is no such place.
    ///
    /// # Cost
    /// Linear in the sequence, up to a bound.
    pub fn guess(&self, count: usize) -> Vec<TokenId> {
        let (tokens, length) = (&self.tokens[..], self.tokens.len());
        let Some(pattern) = length.checked_sub(DRAFT_MATCH_TOKENS).map(|at| &tokens[at..]) else {
            return Vec::new();
        };
        let from = length.saturating_sub(DRAFT_LOOKBACK_TOKENS);
        let mut places = tokens[from..length - 1].windows(DRAFT_MATCH_TOKENS);
        let Some(place) = places.rposition(|window| window == pattern) else {
            return Vec::new();
        };
        let mut guessed: Vec<TokenId> = Vec::with_capacity(count);
        for at in (from + place + DRAFT_MATCH_TOKENS..).take(count) {
            guessed.push(if at < length { tokens[at] } else { guessed[at - length] });
        }
        guessed
    }

    pub fn produced(&self) -> u32 {
        self.len() - self.prompt_tokens
    }

    /// Places that the sequence needs at most. A reservation covers one token more than is known, so the last position
    /// counts although its KV is never read.
    pub fn capacity_max(&self, block_tokens: NonZeroU32) -> u32 {
        self.tokens_max.div_ceil(block_tokens.get()).saturating_mul(block_tokens.get())
    }

    /// Whether the sequence is over with the tokens it has.
    pub fn finished(&self) -> Option<Finish> {
        let last = self.tokens.last().filter(|_| self.produced() > 0);
        if last.is_some_and(|token| self.generation.stop_tokens.contains(token)) {
            Some(Finish::Stop)
        } else if self.len() >= self.tokens_max {
            Some(Finish::Length)
        } else {
            None
        }
    }
}

/// Where a waiting sequence stands with the KV manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    No,
    /// Preempted while a growth was in question: that answer comes first, and means nothing.
    Settling,
    /// A reservation is in question. `again` when it was refused before: nobody may ask behind it.
    Open {
        again: bool,
        mark: u64,
    },
    Refused {
        mark: u64,
        wanted: u32,
        available: u32,
    },
}

impl Ask {
    pub fn is_open(self) -> bool {
        matches!(self, Self::Open { .. })
    }
}

/// A sequence without blocks.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub known: Known,
    pub ask: Ask,
}

/// Where a running sequence stands with the KV manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    Quiet,
    Open { mark: u64 },
    Refused { mark: u64, available: u32 },
}

/// What happens to a running sequence when the step in flight is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doom {
    Preempt,
    /// With the number of steps done when the cancel came.
    Cancel {
        steps: u64,
    },
}

/// A sequence with blocks.
#[derive(Clone, Debug)]
pub(super) struct Running {
    pub known: Known,
    /// One for each life cycle.
    pub tables: Vec<Table>,
    /// Positions that have a place.
    pub capacity: u32,
    /// Leading positions whose KV is written.
    pub computed: u32,
    /// Tokens, and computed positions, that the KV manager was told of.
    pub told_tokens: u32,
    pub told_computed: u32,
    /// Lengths at which it is to be told before more is computed, ascending.
    pub stops: Vec<u32>,
    /// Commits that it has not answered.
    pub commits_open: u32,
    pub growth: Growth,
    pub in_step: bool,
    pub doom: Option<Doom>,
}

impl Running {
    /// Known tokens without KV: 1 when decoding, more in prefill.
    pub fn uncomputed(&self) -> u32 {
        self.known.len() - self.computed
    }

    /// Takes the drawn tokens, at least one, as far as they stand: each behind the first was drawn behind a guess, and stands
    /// only if that guess was right and the sequence is not over before it. The KV of right guesses is written.
    pub fn take(&mut self, drawn: Vec<Drawn>, drafts: &[TokenId]) -> Vec<Drawn> {
        let mut taken: Vec<Drawn> = Vec::with_capacity(drawn.len());
        for one in drawn {
            if let Some(last) = taken.last() {
                if drafts.get(taken.len() - 1) != Some(&last.token) || self.known.finished().is_some() {
                    break;
                }
                self.computed += 1;
            }
            self.known.push(one.token);
            taken.push(one);
        }
        taken
    }

    /// The next token has no place.
    pub fn is_short(&self) -> bool {
        self.capacity <= self.computed
    }

    /// Tokens that a step may compute now, if it has room for all. A state is copied before it is written again.
    pub fn computable(&self, shape: &Shape) -> u32 {
        if self.commits_open > 0 && shape.has_states() {
            return 0;
        }
        let stop = self.stops.iter().find(|stop| **stop > self.computed).copied().unwrap_or(u32::MAX);
        self.known.len().min(self.capacity).min(stop) - self.computed
    }

    /// The tables of a slice from `computed` to `end`: blocks out of the window are not named any more.
    pub fn tables_to(&mut self, end: u32, shape: &Shape) -> Vec<Table> {
        let ordinals = end.div_ceil(shape.block_tokens.get());
        let mut tables = Vec::with_capacity(self.tables.len());
        for (table, pool) in self.tables.iter_mut().zip(&shape.pools) {
            if pool.retention == Retention::State {
                tables.push(table.clone());
                continue;
            }
            table.leave_out(pool.retention.stale(self.computed, shape.block_tokens));
            tables.push(table.up_to(ordinals));
        }
        tables
    }

    pub fn grow(&mut self, blocks: Vec<Vec<BlockId>>, capacity: u32) {
        self.tables.iter_mut().zip(blocks).for_each(|(table, blocks)| table.blocks.extend(blocks));
        self.capacity = capacity;
    }

    pub fn rebase(&mut self, rebased: Rebased) {
        if let Some(table) = self.tables.get_mut(usize::from(rebased.life_cycle)) {
            table.replace(rebased.ordinal, rebased.block);
        }
    }
}
