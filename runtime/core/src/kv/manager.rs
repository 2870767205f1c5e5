//! The KV manager as the step planner sees it: attempts with tables of blocks, and room that is promised before it is taken.

use super::cache::checkpoint::{Publishing, Tail};
use super::cache::lifecycle::Retention;
use super::cache::rebalance::{self, Pools, Rebalancer};
use super::cache::{self, After, Copy, Forgotten, Missed, Opened, PPM, SequenceId, Turn, Why};
use super::record::{Ended, Explanation, Forget};
use super::{Config, ConfigError, Copies, Effect, Ignored, Input, Pool, PoolStats, Rebased, Released, Reservation};
use super::{Scope, Shape, Stats, Violation};
use crate::ids::{AttemptKey, BlockId, ConversationKey, TokenId};
use crate::step::{BlockCopy, Table};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

/// What one attempt holds.
#[derive(Clone, Debug)]
struct Attempt {
    id: SequenceId,
    /// Whose current turn this is.
    conversation: Option<ConversationKey>,
    /// Tokens behind the committed ones.
    rest: Vec<TokenId>,
    /// Leading positions whose KV is written.
    computed: u32,
    /// Room is promised up to this many positions.
    target: u32,
    /// Positions behind the computed ones that have a place at most, and positions in all.
    ahead: u32,
    tokens_max: u32,
    /// Lengths at which end points will be made, ascending.
    ends: VecDeque<u32>,
    /// Of full attention, the blocks that will be needed up to the target beside those that it has. Of windows and states, all
    /// that it may ever have at once: what slides out of its window may still be somebody else's.
    promised: Vec<u32>,
    /// Why it reused no more, unless that was forgotten.
    explanation: Option<Explanation>,
}

/// Somebody who asks for blocks.
struct Asking {
    attempt: AttemptKey,
    scope: Scope,
    conversation: Option<ConversationKey>,
    tokens: Vec<TokenId>,
    ahead: u32,
    tokens_max: u32,
}

impl Asking {
    /// Positions that room is promised for: those of the tokens, and of one more.
    fn target(&self) -> u32 {
        (self.tokens.len() as u32).saturating_add(1)
    }

    /// Blocks that have a place at first, if so many tokens are reused.
    fn first_blocks(&self, reused: u32, block_tokens: NonZeroU32) -> u32 {
        self.target().min(reused.saturating_add(self.ahead)).div_ceil(block_tokens.get())
    }
}

/// Blocks behind its computed tokens that a sequence which decodes has at most: one for the next token, one more that is asked
/// for ahead of need, and one that is begun.
const DECODE_AHEAD_BLOCKS: u32 = 3;

/// Blocks that were needed, and those that could be had.
#[derive(Clone, Copy, Debug)]
struct Shortage {
    wanted: u32,
    available: u32,
}

/// The KV manager of one rank.
///
/// Invariants, besides those of the cache: (K1) each attempt has an open sequence, and no other is open; (K2) what is promised
/// can be had: of full attention, no more than is free or reusable; of windows and states, no more than there is, and no more
/// is held; (K3) computed positions are at most the capacity, and committed ones at most the computed.
#[derive(Clone, Debug)]
pub struct Manager {
    config: Config,
    shape: Shape,
    cache: cache::Manager,
    attempts: BTreeMap<AttemptKey, Attempt>,
    /// By pool, over all attempts.
    promised: Vec<u32>,
    /// Sequences that were ever opened.
    opened: u64,
    counts: Stats,
    ended: Ended,
    measured: Option<Rebalancer>,
}

impl Manager {
    /// # Errors
    /// As [`Config::validate`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        let shape = config.shape();
        Ok(Self {
            // Its own check of how full the pools are would count what a sequence has just found there.
            cache: cache::Manager::new(cache::Config { utilisation_ppm_max: PPM, ..config.cache.clone() })?,
            attempts: BTreeMap::new(),
            promised: vec![0; shape.pools.len()],
            opened: 0,
            counts: Stats::default(),
            ended: Ended::default(),
            measured: None,
            shape,
            config,
        })
    }

    /// Measures what is needed of the pools from now on, against what they were sized for: [`Stats::proposed`] says what they
    /// should be instead. Nobody changes them while a rank runs.
    pub fn measure(&mut self, config: rebalance::Config, pools: Pools) {
        self.measured = Some(Rebalancer::new(config, pools));
    }

    fn propose(&mut self, now_us: u64) {
        let Some(measured) = &mut self.measured else { return };
        let current = &self.config.cache.tiers;
        if let Some(device) = measured.propose(now_us, current).and_then(|tiers| tiers.into_iter().next()) {
            self.counts.proposed = device;
        }
    }

    /// Takes one input and appends what follows from it. Total: what makes no sense is `Ignored`.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        self.advance(now_us, out);
        match input {
            Input::Reserve { attempt, scope, conversation, tokens, ahead_tokens, tokens_max } => {
                let tokens_max = tokens_max.max((tokens.len() as u32).saturating_add(1));
                let ahead = ahead_tokens.max(1);
                self.reserve(Asking { attempt, scope, conversation, tokens, ahead, tokens_max }, out);
            }
            Input::Grow { attempt, tokens } => self.grow(attempt, tokens, out),
            Input::Commit { attempt, tokens, computed } => self.commit(attempt, tokens, computed, out),
            Input::Release { attempt, why } => {
                self.release(attempt, why, out);
                self.propose(now_us);
            }
            Input::Clear => self.clear(out),
        }
    }

    /// It is that time, or a later one that was named before: what has expired is let go.
    pub fn advance(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        match self.poll_timeout() {
            Some(due_us) if due_us <= now_us => {
                let spare = self.spare();
                self.cache.advance(now_us);
                self.free(&spare, out);
            }
            _ => self.cache.advance(now_us),
        }
    }

    /// When to call [`advance`](Self::advance) next, unless something else happens before.
    pub fn poll_timeout(&self) -> Option<u64> {
        self.cache.poll_timeout()
    }

    /// Forgets a conversation or a scope, and what was explained of it. Attempts of it go on, and what they hold goes when they
    /// let go; one that begins again later, because it was preempted, is like a new one. Twice is the same as once.
    ///
    /// # Cost
    /// All attempts, all explanations, and the blocks that go.
    pub fn forget(&mut self, now_us: u64, what: &Forget, out: &mut Vec<Effect>) -> Forgotten {
        self.advance(now_us, out);
        let spare = self.spare();
        let forgotten = match what {
            Forget::Conversation { conversation, .. } => self.cache.forget_conversation(*conversation),
            Forget::Scope(scope) => self.cache.forget_scope(scope),
        };
        self.ended.forget(what);
        let is_meant = |one: &Explanation| what.is_meant(&one.scope, one.conversation);
        for attempt in self.attempts.values_mut().filter(|attempt| attempt.explanation.as_ref().is_some_and(is_meant)) {
            attempt.explanation = None;
            // Its turn is forgotten, so it does not end.
            attempt.conversation = None;
        }
        self.free(&spare, out);
        forgotten
    }

    /// Why an attempt that runs or ended lately reused no more than it did, for each time that it reserved blocks.
    pub fn explanations(&self, attempt: AttemptKey) -> Vec<Explanation> {
        let running = self.attempts.get(&attempt).and_then(|attempt| attempt.explanation.as_ref());
        self.ended.of(attempt).chain(running).cloned().collect()
    }

    /// Tokens of reusable prefix for a chain of truncated keys (`identity::truncated_chain`): an estimate for routing.
    /// It pins nothing, compares no tokens and counts a last block that a reservation would compute again.
    ///
    /// # Cost
    /// A logarithmic number of hash look-ups, and one for each block of a window.
    pub fn probe(&self, chain: &[u64]) -> u32 {
        self.cache.probe_chain(chain)
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether others may find what a block holds.
    #[cfg(test)]
    pub(crate) fn is_published(&self, life_cycle: u8, block: BlockId) -> bool {
        self.cache.is_published(life_cycle, block)
    }

    pub fn stats(&self) -> Stats {
        let pool = |(group, pool): (u8, &Pool)| {
            let (free, available) = (self.cache.free(0, group), self.cache.available(group));
            PoolStats {
                blocks_total: pool.blocks,
                blocks_free: free,
                blocks_reusable: available - free,
                blocks_held: pool.blocks - available,
            }
        };
        Stats {
            pools: (0u8..).zip(&self.shape.pools).map(pool).collect(),
            attempts: self.attempts.len() as u32,
            conversations: self.cache.conversations() as u32,
            evicted_blocks: self.cache.evicted_pages(),
            ..self.counts.clone()
        }
    }

    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.cache.check()?;
        if self.cache.sequences() != self.attempts.len() {
            let (open, attempts) = (self.cache.sequences(), self.attempts.len());
            return Err(Violation::new("K1", format!("{open} sequences are open for {attempts} attempts")));
        }
        let mut promised = vec![0; self.shape.pools.len()];
        for (key, attempt) in &self.attempts {
            let Some(at) = self.cache.standing(attempt.id) else {
                return Err(Violation::new("K1", format!("{key} has no sequence")));
            };
            if attempt.computed > at.capacity || at.committed > attempt.computed {
                return Err(Violation::new("K3", format!("{key} computed {}: {at:?}", attempt.computed)));
            }
            promised.iter_mut().zip(&attempt.promised).for_each(|(sum, promised)| *sum += promised);
        }
        let is_kept = |((group, pool), promised): ((u8, &Pool), &u32)| {
            let available = self.cache.available(group);
            match pool.retention {
                Retention::Full => *promised <= available,
                _ => (pool.blocks - available..=pool.blocks).contains(promised),
            }
        };
        if promised != self.promised || !(0u8..).zip(&self.shape.pools).zip(&promised).all(is_kept) {
            let stats = self.stats().pools;
            return Err(Violation::new("K2", format!("{:?} promised, {promised:?} in all: {stats:?}", self.promised)));
        }
        Ok(())
    }

    // -- room

    /// Blocks that can be promised, by pool.
    fn spare(&self) -> Vec<u32> {
        let spare = |((group, pool), promised): ((u8, &Pool), &u32)| match pool.retention {
            Retention::Full => self.cache.available(group).saturating_sub(*promised),
            _ => pool.blocks.saturating_sub(*promised),
        };
        (0u8..).zip(&self.shape.pools).zip(&self.promised).map(spare).collect()
    }

    /// What is lacking in the first pool where something is, so that a sequence could begin with what it found.
    fn shortage(&self, asking: &Asking, reused: u32) -> Option<Shortage> {
        let block_tokens = self.shape.block_tokens;
        let (target, now) = (asking.target(), asking.first_blocks(reused, block_tokens));
        let one = |((group, pool), spare): ((u8, &Pool), u32)| {
            let available = self.cache.available(group);
            // A last block that is not full, and a state, are copied.
            let kept = reused / block_tokens;
            match pool.retention {
                Retention::Full => {
                    let wanted = target.div_ceil(block_tokens.get()).saturating_sub(kept);
                    (wanted > spare).then_some(Shortage { wanted, available: spare })
                }
                Retention::State => (spare.min(available) == 0).then_some(Shortage { wanted: 1, available: 0 }),
                Retention::Window { .. } => {
                    let wanted = pool.blocks_max(asking.tokens_max, asking.ahead, block_tokens);
                    let fresh = now.saturating_sub(kept);
                    let of_promises = (wanted > spare).then_some(Shortage { wanted, available: spare });
                    of_promises.or_else(|| (fresh > available).then_some(Shortage { wanted: fresh, available }))
                }
            }
        };
        (0u8..).zip(&self.shape.pools).zip(self.spare()).find_map(one)
    }

    /// Sets what is promised to an attempt by where it stands now.
    fn promise(&mut self, key: AttemptKey) {
        let Some(attempt) = self.attempts.get_mut(&key) else { return };
        let Some(at) = self.cache.standing(attempt.id) else { return };
        let block_tokens = self.shape.block_tokens;
        // Behind its prompt it is a few blocks ahead at most.
        let prefills = at.capacity < attempt.target || attempt.computed.saturating_add(1) < attempt.target;
        let ahead = if prefills { attempt.ahead } else { attempt.ahead.min(DECODE_AHEAD_BLOCKS * block_tokens.get()) };
        for ((pool, promised), sum) in self.shape.pools.iter().zip(&mut attempt.promised).zip(&mut self.promised) {
            *sum -= *promised;
            *promised = match pool.retention {
                Retention::Full => {
                    let has = at.capacity.div_ceil(block_tokens.get());
                    attempt.target.div_ceil(block_tokens.get()).saturating_sub(has)
                }
                _ => pool.blocks_max(attempt.tokens_max, ahead, block_tokens),
            };
            *sum += *promised;
        }
    }

    // -- an attempt's life

    fn reserve(&mut self, asking: Asking, out: &mut Vec<Effect>) {
        let (key, length) = (asking.attempt, asking.tokens.len() as u32);
        if self.attempts.contains_key(&key) {
            return self.ignore(key, Ignored::DuplicateReserve, out);
        }
        if asking.tokens.is_empty() {
            return self.ignore(key, Ignored::EmptyReserve, out);
        }
        let (target, block_tokens) = (asking.target(), self.shape.block_tokens);
        let no_room = Shortage { wanted: target.div_ceil(block_tokens.get()), available: 0 };
        // Whoever is alone is admitted however full the pools may be.
        if self.cache.is_fuller_than(self.config.cache.utilisation_ppm_max) {
            return self.exhaust(key, no_room, out);
        }
        self.opened += 1;
        let id = SequenceId(self.opened);
        let (opened, found) = match self.open(id, &asking) {
            Ok(opened) => opened,
            Err(shortage) => return self.exhaust(key, shortage, out),
        };
        let reused = opened.reused_tokens;
        // Before anything is evicted for it.
        let explanation = self.explain(&asking, reused, found);
        let mut copies = Vec::new();
        let capacity = asking.first_blocks(reused, block_tokens).saturating_mul(block_tokens.get());
        let resumed = self.cache.resume(id, &[], &mut copies) == Ok(true);
        if !resumed || self.cache.resize(id, (Some(capacity), None), &mut copies) != Ok(true) {
            self.cache.close(id);
            return self.exhaust(key, no_room, out);
        }
        let mut ends = self.ends(length, opened.path_tokens);
        if ends.contains(&reused) {
            // It is this turn's as much as that of the turn that made it.
            self.cache.ends_at(id, reused);
        }
        ends.retain(|end| *end > reused);
        let attempt = Attempt {
            id,
            conversation: self.begin_turn(asking.conversation, id),
            rest: asking.tokens[reused as usize..].to_vec(),
            computed: reused,
            target,
            ahead: asking.ahead,
            tokens_max: asking.tokens_max,
            promised: vec![0; self.shape.pools.len()],
            ends: ends.iter().copied().collect(),
            explanation: Some(explanation),
        };
        self.attempts.insert(key, attempt);
        self.promise(key);
        self.counts.query_tokens += u64::from(length);
        self.counts.hit_tokens += u64::from(reused);
        if let Some(measured) = &mut self.measured {
            measured.created(reused);
        }
        let stops = match self.config.publishing {
            Publishing::AllReusable => Vec::new(),
            _ if self.shape.has_states() => ends.into_iter().collect(),
            _ => vec![length],
        };
        let reservation = Reservation { tables: self.tables(id), capacity, cached_tokens: reused, stops };
        out.push(Effect::Reserved { attempt: key, reservation, copies: on_device(copies) });
    }

    /// Opens a sequence for which there is room, with as much reuse as there is room for: a block that is reused in part, or a
    /// snapshot, is held until it was copied. Comes with how much there was to reuse.
    fn open(&mut self, id: SequenceId, asking: &Asking) -> Result<(Opened, u32), Shortage> {
        let block_tokens = self.shape.block_tokens;
        let mut short: Option<Shortage> = None;
        let mut found = None;
        let mut limit = (asking.tokens.len() as u32).saturating_sub(1);
        loop {
            let tokens = &asking.tokens[..limit as usize];
            // Ids are never used twice.
            let Ok(opened) = self.cache.create(id, asking.scope, tokens, asking.conversation) else {
                return Err(Shortage { wanted: 0, available: 0 });
            };
            let reused = opened.reused_tokens;
            let found = *found.get_or_insert(reused);
            let Some(shortage) = self.shortage(asking, reused) else {
                return Ok((opened, found));
            };
            self.cache.close(id);
            let first = *short.get_or_insert(shortage);
            if reused == 0 {
                return Err(first);
            }
            let whole = reused / block_tokens * block_tokens.get();
            limit = if whole < reused { whole } else { 0 };
        }
    }

    fn explain(&self, asking: &Asking, reused: u32, found: u32) -> Explanation {
        let no_room = (found > reused).then_some(Missed { from: reused, to: found, why: Why::NoRoom });
        let missed = self.cache.explain(&asking.scope, &asking.tokens, found);
        Explanation {
            attempt: asking.attempt,
            scope: asking.scope,
            conversation: asking.conversation,
            prompt_tokens: asking.tokens.len() as u32,
            reused_tokens: reused,
            missed: no_room.into_iter().chain(missed).collect(),
        }
    }

    /// Lengths at which a prompt's end points belong, ascending.
    fn ends(&self, length: u32, path_tokens: u32) -> BTreeSet<u32> {
        if self.config.publishing == Publishing::AllReusable {
            return BTreeSet::new();
        }
        let tail = Tail {
            prompt_tokens: length,
            replay_tokens: self.config.replay_tokens.get(),
            reused_tokens: 0,
            chunk_start: 0,
            publishing: self.config.publishing,
            encoder_replay: false,
        };
        let mut ends = tail.ladder(self.shape.block_tokens);
        // The prompt again, or another last token, resumes at the last block's beginning.
        ends.extend(tail.checkpoint(0, self.shape.block_tokens));
        if self.shape.has_states() {
            let snapshots = &self.config.snapshots;
            ends.extend(&snapshots.from_start);
            ends.extend(snapshots.from_end.iter().filter_map(|end| length.checked_sub(*end)));
            ends.extend(snapshots.at_branches.then_some(path_tokens));
        }
        ends.insert(length);
        ends.retain(|end| (1..=length).contains(end));
        ends
    }

    fn begin_turn(&mut self, conversation: Option<ConversationKey>, id: SequenceId) -> Option<ConversationKey> {
        let conversation = conversation.filter(|_| self.config.publishing == Publishing::PerConversation)?;
        let is_current = self.cache.begin_turn(conversation, id) == Ok(Turn::Current);
        is_current.then_some(conversation)
    }

    fn tables(&self, id: SequenceId) -> Vec<Table> {
        let Some(at) = self.cache.standing(id) else { return Vec::new() };
        let one = |(life_cycle, pool): (u8, &Pool)| Table {
            out: match pool.retention {
                Retention::State => 0..0,
                other => other.stale(at.history, self.shape.block_tokens),
            },
            blocks: self.cache.device_blocks(id, life_cycle, 0),
        };
        (0u8..).zip(&self.shape.pools).map(one).collect()
    }

    fn grow(&mut self, key: AttemptKey, tokens: u32, out: &mut Vec<Effect>) {
        let Some(attempt) = self.attempts.get(&key) else {
            return self.ignore(key, Ignored::UnknownGrow, out);
        };
        let (id, Some(at)) = (attempt.id, self.cache.standing(attempt.id)) else { return };
        let block_tokens = self.shape.block_tokens.get();
        let before = at.capacity.div_ceil(block_tokens);
        let added = tokens.div_ceil(block_tokens).saturating_sub(before);
        // Of full attention, what was promised to others is not to be had; of windows, nothing that was not promised.
        let room = |((pool, promised), spare): ((&Pool, &u32), u32)| match pool.retention {
            Retention::Full => promised.saturating_add(spare),
            Retention::State => u32::MAX,
            window => {
                let has = before - window.stale(at.history, self.shape.block_tokens).len() as u32;
                promised.saturating_sub(has)
            }
        };
        let pools = self.shape.pools.iter().zip(&attempt.promised).zip(self.spare());
        let available = pools.map(room).min().unwrap_or(u32::MAX);
        if added > available {
            return self.exhaust(key, Shortage { wanted: added, available }, out);
        }
        let mut copies = Vec::new();
        if self.cache.resize(id, (Some(at.capacity.max(tokens)), None), &mut copies) != Ok(true) {
            return self.exhaust(key, Shortage { wanted: added, available: 0 }, out);
        }
        self.promise(key);
        let new = |(life_cycle, pool): (u8, &Pool)| match pool.retention {
            Retention::State => Vec::new(),
            _ => self.cache.device_blocks(id, life_cycle, before),
        };
        let blocks = (0u8..).zip(&self.shape.pools).map(new).collect();
        let capacity = at.capacity.max(tokens);
        out.push(Effect::Grown { attempt: key, blocks, capacity, copies: on_device(copies) });
    }

    fn commit(&mut self, key: AttemptKey, tokens: Vec<TokenId>, computed: u32, out: &mut Vec<Effect>) {
        let Some(attempt) = self.attempts.get_mut(&key) else {
            return self.ignore(key, Ignored::UnknownCommit, out);
        };
        let (id, Some(at)) = (attempt.id, self.cache.standing(attempt.id)) else { return };
        let known = u64::from(at.committed) + attempt.rest.len() as u64 + tokens.len() as u64;
        if computed < attempt.computed || u64::from(computed) > known.min(u64::from(at.capacity)) {
            return self.ignore(key, Ignored::BadCommit, out);
        }
        attempt.rest.extend(tokens);
        attempt.computed = computed;
        let spare = self.spare();
        let mut copies = Vec::new();
        match self.config.publishing {
            Publishing::AllReusable => self.commit_to(key, computed, After::GoesOn, &mut copies),
            Publishing::PerRequest | Publishing::PerConversation => {
                while let Some(end) = self.next_end(key, computed) {
                    // A state is where the computed tokens end, and nowhere else.
                    if end == computed || !self.shape.has_states() {
                        self.commit_to(key, end, After::GoesOn, &mut copies);
                    }
                }
            }
        }
        let _ = self.cache.resize(id, (None, Some(computed)), &mut copies);
        self.promise(key);
        let rebased = self.cache.take_rebased(id).into_iter();
        let rebased = rebased.map(|(life_cycle, ordinal, block)| Rebased { life_cycle, ordinal, block }).collect();
        out.push(Effect::Committed { attempt: key, rebased, copies: on_device(copies) });
        self.free(&spare, out);
    }

    fn next_end(&mut self, key: AttemptKey, computed: u32) -> Option<u32> {
        let attempt = self.attempts.get_mut(&key)?;
        attempt.ends.pop_front_if(|end| *end <= computed)
    }

    /// Publishes up to a length of computed tokens, as the policy says.
    fn commit_to(&mut self, key: AttemptKey, length: u32, after: After, copies: &mut Vec<Copy>) {
        let Some(attempt) = self.attempts.get_mut(&key) else { return };
        let Some(at) = self.cache.standing(attempt.id) else { return };
        let count = (length.saturating_sub(at.committed) as usize).min(attempt.rest.len());
        let tokens: Vec<TokenId> = attempt.rest.drain(..count).collect();
        if self.config.publishing != Publishing::AllReusable {
            // An end point lies at the history. Before it is moved there, no window behind it was given back.
            let _ = self.cache.resize(attempt.id, (None, Some(length)), copies);
        }
        // What cannot be published is still recorded, so nothing here is refused.
        let committed = self.cache.commit(attempt.id, &tokens, after, copies);
        debug_assert!(committed.is_ok(), "{committed:?}");
    }

    fn release(&mut self, key: AttemptKey, why: Released, out: &mut Vec<Effect>) {
        let Some(attempt) = self.attempts.get(&key) else {
            return self.ignore(key, Ignored::UnknownRelease, out);
        };
        let (id, computed, conversation) = (attempt.id, attempt.computed, attempt.conversation);
        let spare = self.spare();
        let mut copies = Vec::new();
        match why {
            Released::Over | Released::Preempted => self.commit_to(key, computed, After::Ends, &mut copies),
            // It may be the state that is wrong, so that not even a block that is not full is published.
            Released::Failed => {}
        }
        if let Some(conversation) = conversation {
            match why {
                Released::Over => {
                    let ended = self.cache.end_turn(conversation, id);
                    self.counts.turns += 1;
                    self.counts.turns_unplanned += u64::from(!ended.is_ok_and(|turn| turn.planned));
                }
                // It begins again with the next reservation. If the conversation was forgotten, there is nothing to abandon.
                Released::Preempted | Released::Failed => _ = self.cache.abandon_turn(conversation, id),
            }
        }
        if let (Some(measured), Some(at)) = (&mut self.measured, self.cache.standing(id)) {
            measured.closed(at.capacity, at.history);
        }
        self.cache.close(id);
        if let Some(attempt) = self.attempts.remove(&key) {
            self.promised.iter_mut().zip(&attempt.promised).for_each(|(sum, promised)| *sum -= promised);
            attempt.explanation.into_iter().for_each(|explanation| self.ended.add(explanation));
        }
        // An end publishes the sequence's own blocks.
        debug_assert!(copies.is_empty(), "{copies:?}");
        self.free(&spare, out);
    }

    fn clear(&mut self, out: &mut Vec<Effect>) {
        let spare = self.spare();
        for attempt in std::mem::take(&mut self.attempts).into_values() {
            self.cache.close(attempt.id);
            attempt.explanation.into_iter().for_each(|explanation| self.ended.add(explanation));
        }
        self.promised.fill(0);
        // Nothing is open any more, so it is not refused.
        let cleared = self.cache.clear();
        debug_assert!(cleared.is_ok(), "{cleared:?}");
        self.free(&spare, out);
    }

    /// Says what can be had more than before.
    fn free(&self, before: &[u32], out: &mut Vec<Effect>) {
        let more = self.spare().iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).sum();
        if more > 0 {
            out.push(Effect::Freed { blocks: more });
        }
    }

    fn exhaust(&mut self, attempt: AttemptKey, Shortage { wanted, available }: Shortage, out: &mut Vec<Effect>) {
        self.counts.exhausted += 1;
        out.push(Effect::Exhausted { attempt, wanted, available });
    }

    fn ignore(&mut self, attempt: AttemptKey, why: Ignored, out: &mut Vec<Effect>) {
        self.counts.ignored += 1;
        out.push(Effect::Ignored { attempt, why });
    }
}

/// All places are the device's: there are no tiers below it yet.
fn on_device(copies: Vec<Copy>) -> Copies {
    let one =
        |Copy { from, to }: Copy| BlockCopy { life_cycle: from.group, from: BlockId(from.slot), to: BlockId(to.slot) };
    copies.into_iter().map(one).collect()
}
