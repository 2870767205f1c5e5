//! Forgetting, expiring and explaining, as a rank meets them.

use super::cache::lifecycle::Retention;
use super::identity::{Scope, truncated_chain};
use super::{Config, Effect, Explanation, Forget, Forgotten, Input, Manager, Missed, Released, Reservation, Why};
use crate::ids::{Attempt, AttemptKey, ConversationKey, Incarnation, RequestKey, TokenId};
use std::num::NonZeroU32;

const SCOPE: Scope = Scope { tenant: 1, adapter: None };
const ELSEWHERE: Scope = Scope { tenant: 2, adapter: None };
const CHAT: ConversationKey = ConversationKey(1);
const OTHER: ConversationKey = ConversationKey(2);
const BLOCK_TOKENS: u32 = 4;

const FORGET_CHAT: Forget = Forget::Conversation { scope: SCOPE, conversation: CHAT };

fn count(from: TokenId, tokens: u32) -> Vec<TokenId> {
    (from..from + tokens).collect()
}

/// `shared` tokens of a prompt, and others after them.
fn fork(of: &[TokenId], shared: usize, rest: &[TokenId]) -> Vec<TokenId> {
    [&of[..shared], rest].concat()
}

fn window(tokens: u32) -> Retention {
    Retention::Window { tokens: NonZeroU32::new(tokens).expect("not 0"), sink_blocks: 0 }
}

fn config(life_cycles: &[(Retention, u32)]) -> Config {
    Config::new(NonZeroU32::new(BLOCK_TOKENS).expect("not 0"), life_cycles.to_vec())
}

/// Life cycles that publish every block, and those that publish end points.
fn kinds() -> [Config; 2] {
    [config(&[(Retention::Full, 40)]), config(&[(Retention::Full, 40), (window(5), 40)])]
}

struct Rig {
    manager: Manager,
    now_us: u64,
    scope: Scope,
    attempts: u64,
}

impl Rig {
    fn new(config: Config) -> Self {
        Self { manager: Manager::new(config).expect("it can be"), now_us: 0, scope: SCOPE, attempts: 0 }
    }

    fn put(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.manager.handle(self.now_us, input, &mut out);
        self.manager.check().expect("all invariants hold");
        out
    }

    fn try_reserve(&mut self, attempt: AttemptKey, by: Option<ConversationKey>, tokens: &[TokenId]) -> Vec<Effect> {
        let length = tokens.len() as u32;
        let (scope, tokens) = (self.scope, tokens.to_vec());
        let (ahead_tokens, tokens_max) = (length + 8, length + 8);
        self.put(Input::Reserve { attempt, scope, conversation: by, tokens, ahead_tokens, tokens_max })
    }

    fn reserve(&mut self, by: Option<ConversationKey>, tokens: &[TokenId]) -> (AttemptKey, Reservation) {
        self.attempts += 1;
        let key = RequestKey { ingress: Incarnation(1), seq: self.attempts };
        let attempt = AttemptKey { key, attempt: Attempt(1) };
        match self.try_reserve(attempt, by, tokens).pop() {
            Some(Effect::Reserved { reservation, .. }) => (attempt, reservation),
            other => panic!("{other:?}"),
        }
    }

    fn compute(&mut self, attempt: AttemptKey, computed: u32) {
        let out = self.put(Input::Commit { attempt, tokens: Vec::new(), computed });
        assert!(matches!(out[0], Effect::Committed { .. }), "{out:?}");
    }

    fn release(&mut self, attempt: AttemptKey, why: Released) {
        self.put(Input::Release { attempt, why });
    }

    /// A whole turn; the tokens that it reused.
    fn serve(&mut self, by: Option<ConversationKey>, tokens: &[TokenId]) -> u32 {
        let (attempt, reservation) = self.reserve(by, tokens);
        for stop in reservation.stops.iter().copied().chain([tokens.len() as u32]) {
            self.compute(attempt, stop);
        }
        self.release(attempt, Released::Over);
        reservation.cached_tokens
    }

    fn forget(&mut self, what: Forget) -> Forgotten {
        let forgotten = self.manager.forget(self.now_us, &what, &mut Vec::new());
        self.manager.check().expect("all invariants hold");
        forgotten
    }

    fn probe(&self, tokens: &[TokenId]) -> u32 {
        self.manager.probe(&truncated_chain(&self.scope, tokens, BLOCK_TOKENS))
    }

    /// Why a prompt that is reserved now reuses no more: what it reuses, and the ends of the ranges with the reasons.
    fn why(&mut self, by: Option<ConversationKey>, tokens: &[TokenId]) -> (u32, Vec<(u32, Why)>) {
        let (attempt, reservation) = self.reserve(by, tokens);
        let explained = self.manager.explanations(attempt);
        let [Explanation { prompt_tokens, reused_tokens, missed, .. }] = &explained[..] else {
            panic!("{explained:?}")
        };
        assert_eq!((*prompt_tokens as usize, *reused_tokens), (tokens.len(), reservation.cached_tokens));
        let mut at = *reused_tokens;
        for Missed { from, to, .. } in missed {
            assert!(*from == at && to > from, "{missed:?}");
            at = *to;
        }
        assert_eq!(at, *prompt_tokens);
        self.release(attempt, Released::Failed);
        assert_eq!(self.manager.explanations(attempt), explained, "the same once it has ended");
        (*reused_tokens, missed.iter().map(|missed| (missed.to, missed.why)).collect())
    }

    fn held(&self) -> Vec<u32> {
        self.manager.stats().pools.iter().map(|pool| pool.blocks_held).collect()
    }
}

// -- forgetting

#[test]
fn a_forgotten_conversation_reuses_the_shared_system_prompt_and_nothing_of_its_own() {
    let mut rig = Rig::new(config(&[(Retention::Full, 40)]));
    let system = count(0, 12);
    let (ours, theirs) = (fork(&system, 12, &count(100, 20)), fork(&system, 12, &count(200, 8)));
    rig.serve(Some(CHAT), &ours);
    rig.serve(Some(OTHER), &theirs);
    assert_eq!((rig.probe(&ours), rig.probe(&theirs)), (32, 20));
    let free = rig.manager.stats().pools[0].blocks_free;
    assert_eq!(rig.forget(FORGET_CHAT), Forgotten { pages: 5, blocks: 5, pending_sequences: 0 });
    assert_eq!(rig.manager.stats().pools[0].blocks_free, free + 5);
    assert_eq!((rig.probe(&ours), rig.probe(&theirs)), (12, 20));
    let next = fork(&ours, 32, &count(300, 4));
    assert_eq!(rig.serve(Some(CHAT), &next), 12);
    assert_eq!(rig.serve(Some(OTHER), &fork(&theirs, 20, &[7])), 20);
}

#[test]
fn forgetting_twice_or_what_nobody_knows_frees_nothing() {
    for config in kinds() {
        let mut rig = Rig::new(config);
        assert_eq!(rig.forget(FORGET_CHAT), Forgotten::default());
        rig.serve(Some(CHAT), &count(0, 20));
        assert!(rig.forget(FORGET_CHAT).blocks > 0);
        assert_eq!(rig.forget(FORGET_CHAT), Forgotten::default());
        assert_eq!(rig.manager.stats().conversations, 0);
    }
}

#[test]
fn an_attempt_of_a_forgotten_conversation_goes_on_and_leaves_nothing() {
    for config in kinds() {
        let mut rig = Rig::new(config);
        let tokens = count(0, 20);
        let (attempt, _) = rig.reserve(Some(CHAT), &tokens);
        rig.compute(attempt, 16);
        assert!(rig.held()[0] > 0);
        assert_eq!(rig.forget(FORGET_CHAT).pending_sequences, 1);
        assert_eq!(rig.manager.explanations(attempt), []);
        assert!(rig.held()[0] > 0, "what it holds is its own until it ends");
        rig.compute(attempt, 20);
        let out = rig.put(Input::Grow { attempt, tokens: 24 });
        assert!(matches!(out[0], Effect::Grown { .. }), "{out:?}");
        let commit = Input::Commit { attempt, tokens: vec![50, 51, 52], computed: 23 };
        assert!(matches!(rig.put(commit)[0], Effect::Committed { .. }));
        rig.release(attempt, Released::Over);
        let stats = rig.manager.stats();
        assert!(stats.pools.iter().all(|pool| pool.blocks_free == pool.blocks_total), "{stats:?}");
        assert_eq!((stats.conversations, stats.turns_unplanned), (0, 0));
        assert_eq!(rig.manager.explanations(attempt), []);
        // The next turn is like the first.
        assert_eq!(rig.serve(Some(CHAT), &tokens), 0);
        assert!(rig.serve(Some(CHAT), &fork(&tokens, 20, &[9])) > 0);
    }
}

#[test]
fn a_scope_is_forgotten_with_all_its_conversations_and_others_stay() {
    for config in kinds() {
        let mut rig = Rig::new(config);
        let tokens = count(0, 20);
        for scope in [SCOPE, ELSEWHERE] {
            rig.scope = scope;
            let chat = ConversationKey(10 + u128::from(scope.tenant));
            rig.serve(None, &tokens);
            rig.serve(Some(chat), &fork(&tokens, 12, &count(100, 8)));
        }
        let (attempt, _) = rig.reserve(None, &tokens);
        assert_eq!(rig.forget(Forget::Scope(SCOPE)).pending_sequences, 0, "that one is another scope's");
        assert_eq!(rig.manager.explanations(attempt).len(), 1);
        rig.release(attempt, Released::Over);
        assert!(rig.serve(None, &tokens) > 0);
        rig.scope = SCOPE;
        assert_eq!(rig.serve(None, &tokens), 0);
        assert_eq!(rig.forget(Forget::Scope(ELSEWHERE)).pending_sequences, 0);
        rig.scope = ELSEWHERE;
        assert_eq!(rig.serve(None, &tokens), 0);
    }
}

#[test]
fn explanations_are_forgotten_with_their_conversation() {
    let mut rig = Rig::new(config(&[(Retention::Full, 40)]));
    let attempts: Vec<AttemptKey> = [Some(CHAT), Some(OTHER), None]
        .into_iter()
        .map(|by| {
            let (attempt, _) = rig.reserve(by, &count(0, 8));
            rig.release(attempt, Released::Over);
            attempt
        })
        .collect();
    let known = |rig: &Rig| attempts.iter().map(|attempt| rig.manager.explanations(*attempt).len()).collect::<Vec<_>>();
    assert_eq!(known(&rig), [1, 1, 1]);
    // A conversation's key is its tenant's: in another scope nothing is found.
    rig.forget(Forget::Scope(ELSEWHERE));
    assert_eq!(known(&rig), [1, 1, 1]);
    rig.forget(FORGET_CHAT);
    assert_eq!(known(&rig), [0, 1, 1]);
    rig.forget(Forget::Scope(SCOPE));
    assert_eq!(known(&rig), [0, 0, 0]);
}

// -- explaining

#[test]
fn other_content_another_scope_and_the_last_token_are_told_apart() {
    let mut rig = Rig::new(config(&[(Retention::Full, 40)]));
    let tokens = count(0, 12);
    assert_eq!(rig.why(None, &tokens), (0, vec![(11, Why::ContentDiffers), (12, Why::LastToken)]));
    rig.serve(None, &tokens);
    assert_eq!(rig.why(None, &tokens), (11, vec![(12, Why::LastToken)]));
    let differs = fork(&tokens, 6, &count(50, 6));
    assert_eq!(rig.why(None, &differs), (6, vec![(11, Why::ContentDiffers), (12, Why::LastToken)]));
    rig.scope = ELSEWHERE;
    let elsewhere = vec![(6, Why::OtherScope), (11, Why::ContentDiffers), (12, Why::LastToken)];
    assert_eq!(rig.why(None, &differs), (0, elsewhere));
}

#[test]
fn evicted_blocks_are_named_with_their_life_cycle() {
    let mut rig = Rig::new(config(&[(Retention::Full, 6)]));
    let tokens = count(0, 12);
    rig.serve(None, &tokens);
    rig.serve(None, &count(100, 20));
    let evicted = Why::Evicted { life_cycle: 0 };
    let (reused, why) = rig.why(None, &fork(&tokens, 12, &[90]));
    assert!(reused < 12, "{reused} of 12 are still there");
    assert_eq!(why, [(12, evicted), (13, Why::LastToken)]);
}

#[test]
fn a_window_or_a_snapshot_that_is_not_there_is_named() {
    let tokens = count(0, 24);
    let prompt = fork(&tokens, 14, &count(70, 3));
    for (second, missing) in [(window(6), Why::WindowMissing { life_cycle: 1 }), (Retention::State, Why::NoSnapshot)] {
        let mut rig = Rig::new(config(&[(Retention::Full, 40), (second, 40)]));
        rig.serve(Some(CHAT), &tokens);
        let (reused, why) = rig.why(Some(OTHER), &prompt);
        assert_eq!((reused, &*why), (0, &[(14, missing), (16, Why::ContentDiffers), (17, Why::LastToken)][..]));
        // At the end of the turn both are there.
        assert_eq!(rig.why(Some(CHAT), &fork(&tokens, 24, &[70])), (24, vec![(25, Why::LastToken)]));
    }
}

#[test]
fn reuse_for_which_there_is_no_room_is_named() {
    let mut rig = Rig::new(config(&[(Retention::Full, 4)]));
    rig.serve(None, &count(0, 15));
    // Its last block begins like one that would have to be copied, and stay until then.
    let why = rig.why(None, &count(0, 15));
    assert_eq!(why, (12, vec![(14, Why::NoRoom), (15, Why::LastToken)]));
}

#[test]
fn each_reservation_of_an_attempt_is_explained_and_one_that_got_nothing_is_not() {
    let mut rig = Rig::new(config(&[(Retention::Full, 6)]));
    let tokens = count(0, 12);
    let (attempt, _) = rig.reserve(None, &tokens);
    rig.compute(attempt, 12);
    let refused = AttemptKey { attempt: Attempt(2), ..attempt };
    let out = rig.try_reserve(refused, None, &count(100, 20));
    assert!(matches!(out[..], [Effect::Exhausted { .. }]), "{out:?}");
    assert_eq!(rig.manager.explanations(refused), []);
    rig.release(attempt, Released::Preempted);
    rig.try_reserve(attempt, None, &tokens);
    let reused: Vec<u32> = rig.manager.explanations(attempt).iter().map(|one| one.reused_tokens).collect();
    assert_eq!(reused, [0, 11]);
    rig.put(Input::Clear);
    assert_eq!(rig.manager.explanations(attempt).len(), 2, "it ended with the device's contents");
}

#[test]
fn running_attempts_are_explained_however_many_have_ended_since() {
    let mut rig = Rig::new(config(&[(Retention::Full, 40)]));
    let (running, _) = rig.reserve(None, &count(0, 8));
    let ended: Vec<AttemptKey> = (0..1100)
        .map(|_| {
            let (attempt, _) = rig.reserve(None, &[1, 2, 3]);
            rig.release(attempt, Released::Over);
            attempt
        })
        .collect();
    assert_eq!(rig.manager.explanations(running).len(), 1);
    let known = ended.iter().filter(|attempt| !rig.manager.explanations(**attempt).is_empty()).count();
    assert_eq!(known, 1024);
    assert_eq!(rig.manager.explanations(ended[1099]).len(), 1, "the newest are those that are known");
}

// -- time

#[test]
fn conversations_expire_by_the_time_that_inputs_and_advance_tell() {
    for by_input in [false, true] {
        let mut config = config(&[(Retention::Full, 40), (window(5), 40)]);
        config.cache.conversation_ttl_us = Some(1000);
        let mut rig = Rig::new(config);
        assert_eq!(rig.manager.poll_timeout(), None);
        rig.now_us = 50;
        rig.serve(Some(CHAT), &count(0, 20));
        assert_eq!((rig.manager.stats().conversations, rig.manager.poll_timeout()), (1, Some(1050)));
        rig.now_us = 1049;
        rig.manager.advance(rig.now_us, &mut Vec::new());
        assert_eq!(rig.manager.stats().conversations, 1);
        rig.now_us = 1050;
        match by_input {
            // Whatever it is about.
            true => _ = rig.put(Input::Release { attempt: AttemptKey::default(), why: Released::Over }),
            false => rig.manager.advance(rig.now_us, &mut Vec::new()),
        }
        assert_eq!((rig.manager.stats().conversations, rig.manager.poll_timeout()), (0, None));
        rig.manager.check().expect("all invariants hold");
    }
}
