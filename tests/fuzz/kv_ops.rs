//! Fuzz target of the KV manager: bytes become operations of several sequences, and every page has bytes that follow
//! from the tokens it stands for.
//!
//! Checked besides `Manager::check`, by the specification's numbers: (11.7) a new sequence reuses what a probe said;
//! (11.8) and (11.9) what an active sequence reads is what was computed for its scope and its tokens, whatever moved
//! meanwhile; (11.10) an operation that fails, or is refused, changes nothing; (11.13) a mirror built from events is the
//! tree, whenever it catches up, although events were lost on the way.

use starling_core::ids::{ConversationKey, TokenId};
use starling_core::kv::cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use starling_core::kv::cache::mirror::Mirror;
use starling_core::kv::cache::{
    After, Commits, Config, Copy, Error, EventLimits, Eviction, Manager, PPM, Phase, Place, PlanId, SequenceId,
};
use starling_core::kv::identity::{Scope, truncated_chain};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

const SEQUENCES: u8 = 7;
const STREAMS: u8 = 6;
/// Of pools.
pub const KINDS: u8 = 10;
const TOKENS_MAX: u32 = 64;
/// Of a pool, however often it grows.
const SLOTS_MAX: u32 = 40;
/// Leaves of the tree that may be without a page.
const BARE_LEAVES_MAX: usize = 256;
/// Of metadata, for each block and each page.
const BLOCK_BYTES_MAX: usize = 160;
/// Operations between two checks of a fuzzed input; a property test checks after each.
const FUZZ_CHECKS: usize = 16;

pub fn kv_ops(input: &[u8]) {
    run(input, FUZZ_CHECKS);
}

/// Runs the operations that `input` stands for, with a check after every `every`th; how many they were.
pub fn run(input: &[u8], every: usize) -> usize {
    let mut choices = Choices(input);
    let mut rig = Rig::new(configuration(&mut choices));
    let mut count = 0;
    while !choices.0.is_empty() {
        rig.step(&mut choices);
        count += 1;
        if count % every == 0 {
            rig.check();
        }
    }
    rig.finish();
    count
}

/// The input as a source of choices; zeros once it has run out.
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: u32) -> u32 {
        u32::from(self.byte()) % end.max(1)
    }
}

fn window(tokens: u32, sink_blocks: u32) -> Retention {
    Retention::Window { tokens: NonZeroU32::new(tokens).expect("a window has tokens"), sink_blocks }
}

fn life_cycle(retention: Retention, policy: Policy, group: u8) -> LifeCycle {
    LifeCycle { retention, policy, group, priority: Priority::default() }
}

/// Small pools of every kind.
pub fn configuration(choices: &mut Choices<'_>) -> Config {
    use Policy::{Optional, Private, Required};
    use Retention::{Full, State};
    let full = life_cycle(Full, Required, 0);
    let by_ordinal = Priority::ByOrdinal(vec![60, 10, 35]);
    let (life_cycles, tiers) = match choices.below(KINDS.into()) {
        0 => (vec![full], vec![vec![24]]),
        1 => (vec![full, life_cycle(window(5, 0), Required, 1)], vec![vec![20, 12]]),
        2 => {
            let windows = [life_cycle(window(8, 0), Private, 1), life_cycle(window(6, 0), Required, 2)];
            (vec![full, windows[0].clone(), windows[1].clone()], vec![vec![16, 10, 10], vec![12, 6, 8]])
        }
        3 => (vec![full, life_cycle(State, Required, 1)], vec![vec![18, 8], vec![14, 5]]),
        4 => {
            let window = life_cycle(window(7, 0), Required, 0);
            (vec![window, life_cycle(State, Required, 1)], vec![vec![14, 7], vec![6, 4], vec![6, 4]])
        }
        5 => {
            let sinks = LifeCycle { priority: by_ordinal, ..life_cycle(window(4, 1), Required, 1) };
            let optional = life_cycle(window(9, 0), Optional, 2);
            (vec![full, sinks, optional], vec![vec![14, 12, 12], vec![6, 6, 4], vec![4, 9, 3]])
        }
        6 => {
            let windows = [life_cycle(window(1, 0), Required, 0), life_cycle(window(10, 2), Required, 0)];
            (windows.to_vec(), vec![vec![26]])
        }
        7 => {
            let windows = [life_cycle(window(6, 0), Required, 1), life_cycle(window(3, 0), Private, 2)];
            let tiers = vec![vec![10, 8, 6], vec![4, 3, 2], vec![5, 4, 1]];
            (vec![full, windows[0].clone(), windows[1].clone()], tiers)
        }
        8 => (vec![full], vec![vec![9], vec![4], vec![7]]),
        _ => {
            let full = LifeCycle { priority: by_ordinal, ..full };
            (vec![full, life_cycle(window(3, 0), Optional, 0)], vec![vec![20], vec![5], vec![5], vec![9]])
        }
    };
    let recurrent = life_cycles.iter().any(|one| one.retention == State);
    let flags = choices.byte();
    let commits = if recurrent || flags & 1 == 1 { Commits::EndPoints } else { Commits::EveryBlock };
    let block_tokens = NonZeroU32::new(1 + choices.below(5)).expect("not 0");
    Config {
        commits,
        utilisation_ppm_max: [PPM, PPM / 10 * 7][usize::from(flags >> 1 & 1)],
        partial_reuse: flags & 4 == 0,
        match_backoff_tokens: u32::from(flags >> 3 & 1),
        turns_max: 1 + u32::from(flags >> 4 & 1),
        conversations_max: 3,
        conversation_ttl_us: (flags & 32 > 0).then_some(400),
        scope_quota_ppm: (flags & 64 > 0).then_some(PPM / 2),
        endpoint_rewind_tokens: if commits == Commits::EveryBlock { u32::from(flags >> 7) * 3 } else { 0 },
        events: [None, Some(2), Some(40)][choices.below(3) as usize]
            .map(|events_max| EventLimits { events_max, keys_max: 3 }),
        eviction: [Eviction::Pages, Eviction::EndPoints][choices.below(2) as usize],
        ..Config::new(block_tokens, life_cycles, tiers)
    }
}

/// What is computed for a token of a sequence. It follows from everything before the token.
fn computed(scope: Scope, tokens: &[TokenId], life_cycle: u8) -> u64 {
    let start = scope.tenant.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(life_cycle);
    tokens.iter().fold(start, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23))
}

/// A sequence as its engine knows it.
struct Running {
    scope: Scope,
    tokens: Vec<TokenId>,
    conversation: ConversationKey,
    resumed: bool,
    stopped: bool,
    /// Tokens that its recurrent state stands for.
    state_tokens: u32,
}

pub struct Rig {
    manager: Manager,
    bytes: BTreeMap<Place, Vec<u64>>,
    running: BTreeMap<SequenceId, Running>,
    plans: Vec<PlanId>,
    copies: Vec<Copy>,
    now_us: u64,
    mirror: Mirror,
}

impl Rig {
    pub fn new(config: Config) -> Self {
        let mirror = Mirror::new(config.block_tokens, &config.life_cycles);
        let manager = Manager::new(config).expect("the configurations are right");
        Self {
            manager,
            bytes: BTreeMap::new(),
            running: BTreeMap::new(),
            plans: Vec::new(),
            copies: Vec::new(),
            now_us: 0,
            mirror,
        }
    }

    fn block_tokens(&self) -> usize {
        self.manager.config().block_tokens.get() as usize
    }

    /// Streams that fork from each other, at blocks' ends and inside blocks.
    fn tokens(stream: u8, length: u32) -> Vec<TokenId> {
        const FORKS: [u32; STREAMS as usize] = [0, 0, 5, 8, 13, 24];
        let fork = FORKS[usize::from(stream)];
        (0..length).map(|at| if at < fork { at } else { at + 1000 * u32::from(stream) }).collect()
    }

    /// Runs an operation that either succeeds or changes nothing.
    fn attempt<T>(
        &mut self,
        run: impl FnOnce(&mut Manager, &mut Vec<Copy>) -> Result<T, Error>,
        done: fn(&T) -> bool,
    ) -> bool {
        let before = self.manager.clone();
        let outcome = run(&mut self.manager, &mut self.copies);
        if outcome.as_ref().is_ok_and(done) {
            for Copy { from, to } in self.copies.drain(..) {
                let bytes = self.bytes.get(&from).cloned().unwrap_or_default();
                self.bytes.insert(to, bytes);
            }
            return true;
        }
        assert_eq!(self.copies, [], "11.10: copies of an operation that failed");
        assert_eq!(format!("{before:?}"), format!("{:?}", self.manager), "11.10: something changed");
        false
    }

    /// The mirror catches up, by a snapshot where events were lost, and is compared with the tree.
    fn catch_up(&mut self) {
        if self.manager.config().events.is_none() {
            return;
        }
        let Self { manager, mirror, .. } = self;
        match manager.events_after(mirror.sequence()) {
            Ok(events) => {
                for event in events {
                    mirror.apply(event).expect("the log has no holes");
                }
            }
            Err(gap) => {
                assert_eq!(gap.wanted, mirror.sequence() + 1);
                mirror.repair(&manager.snapshot());
            }
        }
        let snapshot = manager.snapshot();
        let mut fresh = Mirror::new(manager.config().block_tokens, &manager.config().life_cycles);
        fresh.repair(&snapshot);
        assert_eq!(*mirror, fresh, "11.13: the mirror is not the tree");
        assert_eq!(mirror.end_points(), manager.end_points());
        for stream in 0..STREAMS {
            for tenant in 0..2 {
                self.check_mirror(&Scope { tenant, adapter: None }, &Self::tokens(stream, TOKENS_MAX));
            }
        }
    }

    /// What the mirror says of a prompt, beside what the manager says.
    fn check_mirror(&self, scope: &Scope, tokens: &[TokenId]) {
        let Config { match_backoff_tokens, partial_reuse, .. } = *self.manager.config();
        if match_backoff_tokens > 0 {
            return;
        }
        let chain = truncated_chain(scope, tokens, self.block_tokens() as u32);
        let (least, found) = (self.manager.probe_chain(&chain), self.mirror.reusable(scope, tokens));
        assert!(least <= found, "11.13: the mirror says {found}, a chain {least}");
        let most = self.manager.probe(scope, tokens);
        assert!(found <= most || !partial_reuse, "11.13: the mirror says {found}, the tree {most}");
        for length in [5, 12, 23, 40] {
            let (found, most) =
                (self.mirror.reusable(scope, &tokens[..length]), self.manager.probe(scope, &tokens[..length]));
            assert!(found <= most || !partial_reuse, "11.13: the mirror says {found} of {length}, the tree {most}");
        }
    }

    pub fn step(&mut self, choices: &mut Choices<'_>) {
        if choices.below(8) == 0 {
            self.catch_up();
        }
        let id = SequenceId(u64::from(choices.below(SEQUENCES.into())));
        let known = self.running.get(&id);
        // Mostly what makes sense for the sequence.
        let phase = known.and_then(|_| self.manager.standing(id)).map(|standing| standing.phase);
        match (phase, choices.below(16)) {
            (None, 0..=11) => self.create(id, choices),
            (Some(Phase::Suspended), 0..=7) => self.resume(id, choices),
            (Some(Phase::Active), 0..=4) => self.resize(id, choices),
            (Some(Phase::Active), 5..=9) => self.commit(id, choices),
            (_, 10) => self.suspend(id),
            (_, 11) => self.stop(id),
            (_, 12) => self.close(id),
            (_, 13) => self.plan(id, choices),
            (_, 14) => self.turn(id, choices),
            _ => self.other(id, choices),
        }
    }

    fn create(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let tokens = Self::tokens(choices.below(STREAMS.into()) as u8, TOKENS_MAX);
        let scope = Scope { tenant: u64::from(choices.below(8) / 7), adapter: None };
        let conversation = ConversationKey(u128::from(choices.below(5)));
        let prompt = &tokens[..choices.below(TOKENS_MAX) as usize];
        let said = self.manager.probe(&scope, prompt);
        let chain = truncated_chain(&scope, prompt, self.block_tokens() as u32);
        let whole = self.manager.probe(&scope, &prompt[..chain.len() * self.block_tokens()]);
        let estimate = self.manager.probe_chain(&chain);
        let partial = self.manager.config().partial_reuse;
        assert!(estimate == whole || (partial && estimate < whole), "a chain promised {estimate}, its tokens {whole}");
        let label = (conversation.0 > 0).then_some(conversation);
        let mut reused = 0;
        let created = self.attempt(
            |manager, _| manager.create(id, scope, prompt, label).map(|opened| reused = opened.reused_tokens),
            |()| true,
        );
        if created {
            assert_eq!(reused, said, "11.7: a probe promised otherwise");
            let (mut at, whole) = (reused, [prompt, &[0]].concat());
            for missed in self.manager.explain(&scope, &whole, reused) {
                assert!(missed.from == at && missed.to > at, "an explanation has a gap at {at}: {missed:?}");
                at = missed.to;
            }
            assert_eq!(at as usize, whole.len(), "an explanation ends early");
            let running = Running { scope, tokens, conversation, resumed: false, stopped: false, state_tokens: reused };
            self.running.insert(id, running);
        }
    }

    fn resume(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let optional: Vec<u8> = (0..3).filter(|_| choices.below(4) == 0).collect();
        let resumed = self.attempt(|manager, copies| manager.resume(id, &optional, copies), |fits| *fits);
        if !resumed {
            return;
        }
        let first = self.running.get_mut(&id).is_some_and(|running| !std::mem::replace(&mut running.resumed, true));
        for life_cycle in 0..self.manager.config().life_cycles.len() as u8 {
            let policy = self.manager.config().life_cycles[usize::from(life_cycle)].policy;
            let refilled = match policy {
                Policy::Required => false,
                Policy::Optional => !optional.contains(&life_cycle),
                Policy::Private => true,
            };
            self.write(id, life_cycle, first && refilled);
        }
    }

    fn resize(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let standing = self.manager.standing(id);
        let (history, capacity) = standing.map_or((0, 0), |standing| (standing.history, standing.capacity));
        let further = history + choices.below(9);
        // Where every block is published, what history passes must have been stored.
        let further = match self.manager.config().commits {
            Commits::EveryBlock => further.min(capacity),
            Commits::EndPoints => further,
        };
        let history = [history, further, capacity][choices.below(3) as usize];
        let capacity = match choices.below(8) {
            0 => history.saturating_sub(choices.below(3)),
            1 => history,
            2..=5 => history + choices.below(9),
            _ => capacity,
        };
        let wanted = (Some(capacity.min(TOKENS_MAX)), Some(history.min(TOKENS_MAX)));
        if self.attempt(|manager, copies| manager.resize(id, wanted, copies), |fits| *fits) {
            for life_cycle in 0..self.manager.config().life_cycles.len() as u8 {
                self.write(id, life_cycle, false);
            }
        }
    }

    /// Computes what the sequence has room for, from its committed tokens on, or from the first one that it can keep.
    fn write(&mut self, id: SequenceId, life_cycle: u8, from_start: bool) {
        let Some(running) = self.running.get(&id) else { return };
        let Some(standing) = self.manager.standing(id).filter(|_| !self.is_state(life_cycle)) else { return };
        // A block that is not full may be published once nothing more is committed.
        let written = if running.stopped { standing.committed } else { standing.capacity } as usize;
        let block_tokens = self.block_tokens();
        let from = if from_start { 0 } else { standing.committed as usize };
        for (block, place) in self.manager.table(id, life_cycle).into_iter().enumerate() {
            let Some(place) = place else { continue };
            let bytes = self.bytes.entry(place).or_default();
            bytes.resize(block_tokens, 0);
            let (start, end) = (block * block_tokens, (block + 1) * block_tokens);
            for at in start.max(from)..end.min(written) {
                bytes[at - start] = computed(running.scope, &running.tokens[..=at], life_cycle);
            }
        }
    }

    fn is_state(&self, life_cycle: u8) -> bool {
        self.manager.config().life_cycles[usize::from(life_cycle)].is_state()
    }

    fn state_place(&self, id: SequenceId) -> Option<(u8, Place)> {
        let states =
            (0..self.manager.config().life_cycles.len() as u8).find(|life_cycle| self.is_state(*life_cycle))?;
        Some((states, self.manager.table(id, states).first().copied().flatten()?))
    }

    fn commit(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let Some(standing) = self.manager.standing(id) else { return };
        let (from, after) = (standing.committed, if choices.below(12) == 0 { After::Ends } else { After::GoesOn });
        let to = match choices.below(4) {
            0 => (from + choices.below(9)).min(TOKENS_MAX),
            1 => standing.capacity,
            _ => standing.history,
        };
        let Some(running) = self.running.get(&id) else { return };
        let (scope, tokens) = (running.scope, running.tokens[..to.max(from) as usize].to_vec());
        // The state is that of the tokens which are committed.
        let state = self.state_place(id).filter(|_| to <= standing.capacity);
        let overwritten = state.and_then(|(life_cycle, place)| {
            let bytes = vec![computed(scope, &tokens, life_cycle)];
            Some((place, self.bytes.insert(place, bytes)?))
        });
        let new = &tokens[from as usize..];
        if self.attempt(|manager, copies| manager.commit(id, new, after, copies), |_| true) {
            if let Some(running) = self.running.get_mut(&id) {
                running.state_tokens = to.max(from);
                running.stopped |= after == After::Ends;
            }
        } else if let Some((place, bytes)) = overwritten {
            self.bytes.insert(place, bytes);
        } else if let Some((_, place)) = state {
            self.bytes.remove(&place);
        }
    }

    fn stop(&mut self, id: SequenceId) {
        self.attempt(|manager, _| manager.stop(id), |()| true);
        if let Some(running) = self.running.get_mut(&id) {
            running.stopped = true;
        }
    }

    fn suspend(&mut self, id: SequenceId) {
        self.attempt(|manager, _| manager.suspend(id), |()| true);
    }

    fn close(&mut self, id: SequenceId) {
        self.manager.close(id);
        self.running.remove(&id);
    }

    fn plan(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        if choices.below(2) == 0 {
            let mut made = None;
            self.attempt(|manager, _| manager.plan(id).map(|plan| made = plan.map(|(plan, _)| plan)), |()| true);
            self.plans.extend(made);
        } else if !self.plans.is_empty() {
            let at = choices.below(self.plans.len() as u32) as usize;
            // Some are dropped twice.
            let plan = if choices.below(4) == 0 { self.plans[at] } else { self.plans.swap_remove(at) };
            self.attempt(|manager, _| manager.drop_plan(plan), |()| true);
        }
    }

    fn turn(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let named = ConversationKey(u128::from(choices.below(5)));
        let conversation = self.running.get(&id).map_or(named, |running| running.conversation);
        match choices.below(5) {
            0 => {
                self.attempt(|manager, _| manager.begin_turn(conversation, id), |_| true);
            }
            1 => {
                self.attempt(|manager, _| manager.end_turn(conversation, id), |_| true);
            }
            2 => {
                self.attempt(|manager, _| manager.abandon_turn(conversation, id), |()| true);
            }
            3 => self.tick(choices.below(200)),
            _ => self.manager.expire(named),
        }
    }

    /// Time passes; what is due is done at once.
    fn tick(&mut self, elapsed_us: u32) {
        self.now_us += u64::from(elapsed_us);
        self.manager.advance(self.now_us);
        assert!(
            self.manager.poll_timeout().is_none_or(|at_us| at_us > self.now_us),
            "a conversation outlived its time"
        );
    }

    fn other(&mut self, id: SequenceId, choices: &mut Choices<'_>) {
        let tokens = Self::tokens(choices.below(STREAMS.into()) as u8, choices.below(TOKENS_MAX));
        let scope = Scope { tenant: u64::from(choices.below(8) / 7), adapter: None };
        match choices.below(9) {
            0 => {
                let at = (choices.below(16), choices.below(3) as u8);
                self.attempt(|manager, _| Ok(manager.unlink(&scope, &tokens, at)), |gone| *gone);
            }
            1..=3 => {
                self.attempt(|manager, copies| Ok(manager.prefetch(&scope, &tokens, copies)), |fits| *fits);
            }
            4 => self.close(id),
            5 => self.forget(scope, &tokens, choices),
            6 | 7 => self.resize(id, choices),
            _ => self.resize_pools(choices),
        }
    }

    /// Gives the pools of a tier other sizes; the device's mostly after everything was suspended.
    fn resize_pools(&mut self, choices: &mut Choices<'_>) {
        let tiers = self.manager.config().tiers.clone();
        let tier = choices.below(tiers.len() as u32);
        if tier == 0 && choices.below(4) > 0 {
            for id in (0..SEQUENCES).map(|id| SequenceId(id.into())) {
                self.suspend(id);
            }
        }
        let change = |slots: &u32| (slots + choices.below(9)).saturating_sub(4).min(SLOTS_MAX);
        let wanted: Vec<u32> = tiers[tier as usize].iter().map(change).collect();
        if self.attempt(|manager, copies| manager.resize_pools(tier as u8, &wanted, copies), |()| true) {
            // The memory of slots that went is somebody else's now.
            self.bytes.retain(|at, _| u32::from(at.tier) != tier || at.slot < wanted[usize::from(at.group)]);
        }
    }

    /// A conversation or a scope is forgotten: a second time there is nothing left to forget.
    fn forget(&mut self, scope: Scope, tokens: &[TokenId], choices: &mut Choices<'_>) {
        let named = ConversationKey(u128::from(choices.below(5)));
        if choices.below(4) > 0 {
            let open = self.running.values().filter(|running| running.conversation == named && named.0 > 0).count();
            let forgotten = self.manager.forget_conversation(named);
            assert_eq!(forgotten.pending_sequences as usize, open);
            let again = self.manager.forget_conversation(named);
            assert_eq!((again.pages, again.blocks), (0, 0), "{named} was not forgotten at once");
        } else {
            self.manager.forget_scope(&scope);
            assert_eq!(self.manager.probe_path(&scope, tokens), (0, 0), "a scope was not forgotten at once");
        }
    }

    /// # Panics
    /// An invariant does not hold, or a sequence would read what is not its own.
    pub fn check(&self) {
        self.manager.check().unwrap_or_else(|violation| panic!("{violation}"));
        for (id, running) in &self.running {
            let Some(standing) = self.manager.standing(*id).filter(|standing| standing.phase == Phase::Active) else {
                continue;
            };
            let known = if running.stopped { standing.committed } else { standing.capacity } as usize;
            for life_cycle in 0..self.manager.config().life_cycles.len() as u8 {
                if !self.is_state(life_cycle) {
                    self.check_blocks(*id, life_cycle, known);
                }
            }
            if let Some((life_cycle, place)) = self.state_place(*id).filter(|_| running.state_tokens > 0) {
                let right = computed(running.scope, &running.tokens[..running.state_tokens as usize], life_cycle);
                let found = self.bytes.get(&place).and_then(|bytes| bytes.first());
                assert_eq!(found, Some(&right), "11.9: {id} has the state of other tokens at {place:?}");
            }
        }
    }

    fn check_blocks(&self, id: SequenceId, life_cycle: u8, known: usize) {
        let (running, block_tokens) = (&self.running[&id], self.block_tokens());
        for (block, place) in self.manager.table(id, life_cycle).into_iter().enumerate() {
            let Some(place) = place else { continue };
            let start = block * block_tokens;
            for at in start..(start + block_tokens).min(known) {
                let right = computed(running.scope, &running.tokens[..=at], life_cycle);
                let found = self.bytes.get(&place).and_then(|bytes| bytes.get(at - start));
                assert_eq!(
                    found,
                    Some(&right),
                    "11.9: {id} reads other bytes for token {at} of {life_cycle} at {place:?}"
                );
            }
        }
    }

    /// Closes everything: what is left is in the tree, and nothing is held.
    ///
    /// # Panics
    /// A page is held by nobody, or lost.
    pub fn finish(&mut self) {
        for id in (0..SEQUENCES).map(|id| SequenceId(id.into())) {
            self.close(id);
        }
        for plan in std::mem::take(&mut self.plans) {
            self.attempt(|manager, _| manager.drop_plan(plan), |()| true);
        }
        for conversation in 0..5 {
            self.manager.expire(ConversationKey(conversation));
        }
        self.check();
        self.catch_up();
        let mut droppable = 0;
        for census in self.manager.census().into_iter().flatten() {
            assert_eq!((census.locked, census.held), (0, 0), "a page is held after everything was closed");
            droppable += census.droppable;
        }
        let tiers = self.manager.config().tiers.clone();
        let slots: u32 = tiers.iter().flatten().sum();
        let each =
            (0u8..).zip(&tiers).flat_map(|(tier, groups)| (0..groups.len() as u8).map(move |group| (tier, group)));
        let free: u32 = each.map(|(tier, group)| self.manager.free(tier, group)).sum();
        assert_eq!(free + droppable, slots, "11.2: slots are lost");
        assert_eq!((self.manager.conversations(), self.manager.sequences()), (0, 0));
        // A leaf of the tree has a page, but for some of the last ones, and no more blocks than a sequence before it.
        let blocks_max = (slots as usize + BARE_LEAVES_MAX) * TOKENS_MAX.div_ceil(self.block_tokens() as u32) as usize;
        assert!(self.manager.blocks() <= blocks_max, "{} blocks in the tree", self.manager.blocks());
        let bytes_max = BLOCK_BYTES_MAX * (blocks_max + slots as usize);
        assert!(self.manager.metadata_bytes() <= bytes_max, "{} bytes of metadata", self.manager.metadata_bytes());
    }
}
