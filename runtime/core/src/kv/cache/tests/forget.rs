use super::{Bed, SCOPE, config, count, fork, required, window};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use crate::kv::cache::{After, Commits, Config, Effect, Forgotten, Input, Manager, SequenceId};
use crate::kv::identity::Scope;
use proptest::prelude::*;

const CHAT: ConversationKey = ConversationKey(1);
const OTHER: ConversationKey = ConversationKey(2);
const ELSEWHERE: Scope = Scope { tenant: 2, adapter: None };

fn full() -> LifeCycle {
    required(Retention::Full, 0)
}

fn serve_as(bed: &mut Bed, conversation: Option<ConversationKey>, tokens: &[TokenId]) -> u32 {
    bed.conversation = conversation;
    bed.serve(tokens)
}

fn forget(bed: &mut Bed, conversation: ConversationKey) -> Forgotten {
    let forgotten = bed.manager.forget_conversation(conversation);
    bed.check();
    forgotten
}

#[test]
fn what_only_the_conversation_used_goes_and_the_system_prompt_stays() {
    for tiers in [vec![vec![60]], vec![vec![9], vec![60]]] {
        let mut bed = Bed::new(config(4, vec![full()], tiers));
        let system = count(0, 10);
        serve_as(&mut bed, None, &system);
        let before = bed.manager.metadata_bytes();
        let first = fork(&system, 10, &count(100, 10));
        let branch = fork(&first, 15, &count(200, 9));
        let other = fork(&system, 10, &count(300, 6));
        for (conversation, tokens) in [(CHAT, &first), (CHAT, &branch), (OTHER, &other)] {
            serve_as(&mut bed, Some(conversation), tokens);
        }
        assert_eq!((bed.manager.owners(), bed.probe(&first), bed.probe(&branch)), (2, 20, 24));
        // [8..12) and [12..16) to [20..24) of both branches.
        let gone = forget(&mut bed, CHAT);
        assert_eq!(gone, Forgotten { pages: 6, blocks: 6, pending_sequences: 0 });
        assert_eq!((bed.probe(&first), bed.probe(&branch), bed.probe(&other)), (10, 10, 16));
        assert_eq!(bed.manager.owners(), 1);
        assert_eq!(forget(&mut bed, CHAT), Forgotten::default());
        assert!(forget(&mut bed, OTHER).pages > 0);
        assert_eq!((bed.manager.owners(), bed.probe(&other)), (0, 10));
        assert!(bed.manager.metadata_bytes() > before, "nodes are used again, not given back");
    }
}

#[test]
fn a_block_that_two_used_stays_and_its_branches_go_one_by_one() {
    let mut bed = Bed::new(config(2, vec![full()], vec![vec![40]]));
    let trunk = count(0, 6);
    let (ours, theirs) = (fork(&trunk, 6, &[100, 101, 102]), fork(&trunk, 6, &[200, 201]));
    serve_as(&mut bed, Some(CHAT), &ours);
    serve_as(&mut bed, Some(OTHER), &theirs);
    assert_eq!(forget(&mut bed, OTHER), Forgotten { pages: 1, blocks: 1, pending_sequences: 0 });
    assert_eq!((bed.probe(&ours), bed.probe(&theirs)), (9, 6));
    assert_eq!(forget(&mut bed, CHAT), Forgotten { pages: 2, blocks: 2, pending_sequences: 0 });
    assert_eq!((bed.probe(&ours), bed.manager.blocks()), (6, 3));
}

#[test]
fn the_beginning_of_a_block_that_others_used_stays() {
    // Whose block it was first, and who only reads its beginning.
    let (short, long) = (count(0, 6), count(0, 8));
    for order in [[(None, &short), (Some(CHAT), &long)], [(Some(CHAT), &long), (None, &short)]] {
        let mut bed = Bed::new(config(4, vec![full(), required(window(5), 1)], vec![vec![20, 20]]));
        for (conversation, tokens) in order {
            serve_as(&mut bed, conversation, tokens);
        }
        assert_eq!(bed.probe(&long), 8);
        forget(&mut bed, CHAT);
        assert_eq!((bed.probe(&long), bed.probe(&short)), (6, 6), "{order:?}");
    }
    // Somebody else's block begins alike: there is no use for two.
    let mut bed = Bed::new(config(4, vec![full()], vec![vec![20]]));
    serve_as(&mut bed, None, &short);
    serve_as(&mut bed, Some(CHAT), &long);
    serve_as(&mut bed, Some(OTHER), &fork(&short, 6, &[70, 71]));
    forget(&mut bed, CHAT);
    assert_eq!((bed.probe(&long), bed.manager.blocks()), (6, 2));
}

#[test]
fn an_open_sequence_of_a_forgotten_conversation_publishes_nothing_more() {
    for commits in [Commits::EveryBlock, Commits::EndPoints] {
        let life_cycles = vec![full(), required(window(5), 1)];
        let mut bed = Bed::new(Config { commits, ..config(4, life_cycles, vec![vec![20, 20]]) });
        bed.conversation = Some(CHAT);
        let tokens = count(0, 20);
        let (id, _) = bed.start(&tokens);
        bed.resize(id, 20, 8);
        bed.commit(id, &tokens[..8]);
        bed.manager.begin_turn(CHAT, id).expect("it is open");
        let forgotten = forget(&mut bed, CHAT);
        assert_eq!((forgotten.pending_sequences, forgotten.blocks), (1, 2));
        assert_eq!((bed.manager.blocks(), bed.manager.conversations()), (0, 0));
        bed.resize(id, 20, 20);
        bed.commit(id, &tokens[8..]);
        assert_eq!((bed.manager.standing(id).map(|standing| standing.committed), bed.probe(&tokens)), (Some(20), 0));
        assert_eq!(forget(&mut bed, CHAT).pending_sequences, 1);
        bed.close(id);
        assert_eq!((bed.manager.blocks(), bed.manager.free(0, 0), bed.manager.free(0, 1)), (0, 20, 20));
        // A new sequence of the conversation is like any other.
        serve_as(&mut bed, Some(CHAT), &tokens);
        assert_eq!(bed.probe(&tokens), 20);
    }
}

#[test]
fn a_forgotten_conversation_takes_its_plans_along_and_spares_shared_pages() {
    let mut bed = Bed::new(config(4, vec![full(), required(window(4), 1)], vec![vec![30, 30]]));
    let (system, prompt) = (count(0, 8), count(0, 16));
    serve_as(&mut bed, None, &system);
    let mut plans = Vec::new();
    for tokens in [&system, &prompt] {
        bed.conversation = Some(CHAT);
        let (id, _) = bed.prefill(tokens, &[]);
        bed.manager.stop(id).expect("it is open");
        plans.push(bed.manager.plan(id).expect("it is stopped").expect("its end is an end point").0);
        bed.manager.begin_turn(CHAT, id).expect("it is open");
        bed.manager.end_turn(CHAT, id).expect("it is current");
        bed.close(id);
    }
    forget(&mut bed, CHAT);
    assert_eq!((bed.manager.conversations(), bed.probe(&prompt)), (0, 8));
    assert!(plans.into_iter().all(|plan| bed.manager.drop_plan(plan).is_err()));
}

#[test]
fn a_forgotten_scope_leaves_others_alone() {
    let mut bed = Bed::new(config(4, vec![full()], vec![vec![40]]));
    let tokens = count(0, 16);
    for scope in [SCOPE, ELSEWHERE] {
        for conversation in [None, Some(CHAT)] {
            bed.conversation = conversation;
            let (id, opened) = bed.open_in(scope, &tokens);
            let new = &tokens[opened.reused_tokens as usize..];
            assert!(bed.resume(id) && bed.resize(id, 16, 16));
            bed.commit(id, new);
            bed.manager.stop(id).expect("it is open");
            bed.manager.begin_turn(CHAT, id).expect("it is open");
            bed.manager.end_turn(CHAT, id).expect("it is current");
            bed.close(id);
        }
    }
    let (open, _) = bed.open_in(SCOPE, &tokens);
    bed.manager.begin_turn(OTHER, open).expect("it is open");
    let mut out = Vec::new();
    bed.manager.handle(0, Input::ForgetScope { scope: SCOPE }, &mut out);
    bed.check();
    assert_eq!(out, [Effect::Forgotten(Forgotten { pages: 4, blocks: 4, pending_sequences: 1 })]);
    assert_eq!((bed.probe(&tokens), bed.manager.probe(&ELSEWHERE, &tokens)), (0, 16));
    // The turn in the other scope stays.
    assert_eq!((bed.manager.conversations(), bed.manager.owners()), (1, 0));
    bed.close(open);
    assert_eq!(bed.manager.free(0, 0), 36);
}

#[test]
fn ids_of_owners_are_used_again() {
    let mut bed = Bed::new(config(4, vec![full()], vec![vec![8]]));
    for chat in 0..500 {
        serve_as(&mut bed, Some(ConversationKey(chat)), &count(1000 * chat as u32, 12));
        assert!(bed.manager.owners() <= 8);
    }
    assert!(bed.manager.store.owners.bytes() < 4096);
}

// -- against a manager that never saw the conversation

/// A request of one of three users, one of whom will be forgotten.
#[derive(Clone, Debug)]
struct Asked {
    user: Option<ConversationKey>,
    tokens: Vec<TokenId>,
    chunk: usize,
}

const FORKS: [u32; 6] = [0, 0, 5, 8, 14, 20];

fn asked() -> impl Strategy<Value = Asked> {
    (0u32..3, 0u32..6, 1u32..30, 1usize..12).prop_map(|(user, stream, length, chunk)| {
        let fork = FORKS[stream as usize];
        let tokens = (0..length).map(|at| if at < fork { at } else { at + 1000 * stream }).collect();
        Asked { user: [None, Some(CHAT), Some(OTHER)][user as usize], tokens, chunk }
    })
}

/// A manager, what it is asked and how far that is. Requests that it does not see take their time all the same.
struct Server<'a> {
    manager: Manager,
    all: &'a [Asked],
    next: usize,
    sees: fn(&Asked) -> bool,
    slots: [Option<usize>; 4],
}

impl Server<'_> {
    fn new(config: Config, all: &[Asked], sees: fn(&Asked) -> bool) -> Server<'_> {
        let manager = Manager::new(config).expect("a valid configuration");
        Server { manager, all, next: 0, sees, slots: [None; 4] }
    }

    /// One step of the request in a slot: it starts, commits a chunk, or is closed.
    fn step(&mut self, slot: usize) {
        let Some(at) = self.slots[slot] else {
            let Some(asked) = self.all.get(self.next) else { return };
            if (self.sees)(asked) {
                let id = SequenceId(self.next as u64);
                self.manager.create(id, SCOPE, &asked.tokens, asked.user).expect("ids are not used twice");
                assert!(self.manager.resume(id, &[], &mut Vec::new()).expect("it rests"), "no room");
            }
            self.slots[slot] = Some(self.next);
            self.next += 1;
            return;
        };
        let (asked, id) = (&self.all[at], SequenceId(at as u64));
        let length = asked.tokens.len();
        let committed = self.manager.standing(id).map_or(length, |standing| standing.committed as usize);
        if committed == length {
            self.manager.close(id);
            self.slots[slot] = None;
            return;
        }
        let to = (committed + asked.chunk).min(length);
        let history = (self.manager.config().commits == Commits::EndPoints).then_some(to as u32);
        let copies = &mut Vec::new();
        assert!(self.manager.resize(id, (Some(length as u32), history), copies).expect("a right size"), "no room");
        let new = &asked.tokens[committed..to];
        self.manager.commit(id, new, After::GoesOn, copies).expect("a right commit");
    }

    fn finish(&mut self) {
        while self.next < self.all.len() || self.slots.iter().any(Option::is_some) {
            (0..4).for_each(|slot| self.step(slot));
        }
    }
}

fn pages(manager: &Manager) -> Vec<u32> {
    let all = |tiers: &Vec<super::super::Census>| tiers.iter().map(|one| one.locked + one.held + one.droppable).sum();
    manager.census().iter().map(all).collect()
}

fn configurations() -> impl Strategy<Value = Config> {
    let windows = vec![full(), required(window(6), 1), LifeCycle { policy: Policy::Private, ..required(window(8), 1) }];
    let states = vec![full(), required(Retention::State, 1)];
    let tiers = vec![vec![60, 80], vec![400, 400]];
    prop_oneof![
        Just(config(4, vec![full()], vec![vec![400]])),
        Just(config(4, windows.clone(), tiers.clone())),
        Just(Config { commits: Commits::EndPoints, ..config(4, windows, tiers.clone()) }),
        Just(config(4, states, tiers)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn nothing_of_a_forgotten_conversation_is_left(
        config in configurations(),
        before in proptest::collection::vec(asked(), 0..14),
        steps in proptest::collection::vec(0usize..4, 0..60),
    ) {
        let is_other = |asked: &Asked| asked.user != Some(CHAT);
        // Where a request reuses less, its chunks end elsewhere, and so do its end points.
        let exact = config.commits == Commits::EveryBlock;
        let mut forgetful = Server::new(config.clone(), &before, |_| true);
        let mut ignorant = Server::new(config, &before, is_other);
        for &slot in &steps {
            forgetful.step(slot);
            ignorant.step(slot);
        }
        forgetful.manager.forget_conversation(CHAT);
        prop_assert!(forgetful.manager.check().is_ok(), "{:?}", forgetful.manager.check());
        forgetful.sees = is_other;
        forgetful.finish();
        ignorant.finish();
        let (forgetful, ignorant) = (forgetful.manager, ignorant.manager);
        prop_assert!(forgetful.check().is_ok(), "{:?}", forgetful.check());
        prop_assert_eq!(forgetful.evicted_pages(), 0);
        for Asked { tokens, .. } in &before {
            let (left, right) = (forgetful.probe(&SCOPE, tokens), ignorant.probe(&SCOPE, tokens));
            prop_assert!(left == right || !exact, "{left} tokens instead of {right}");
            let same = |other: &Asked| other.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count() as u32;
            let used = before.iter().filter(|asked| is_other(asked)).map(same).max().unwrap_or(0);
            prop_assert!(left <= used, "{left} tokens, of which others used {used}");
        }
        if exact {
            prop_assert_eq!((pages(&forgetful), forgetful.blocks()), (pages(&ignorant), ignorant.blocks()));
        }
    }
}
