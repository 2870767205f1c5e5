//! Ranks of models that do not keep everything: what a conversation says does not depend on what was reused.
//!
//! A rank in one thread: the step planner, the KV manager and a backend, with the messages between them in order. Each turn
//! of a conversation is the last one's tokens, its answer, and something new.

mod life_cycles {
    pub mod hybrid;
}

use life_cycles::hybrid::{self, Hybrid};
use starling_core::batch::{self, Batch, Effect, Input};
use starling_core::ids::{Attempt, AttemptKey, ConversationKey, Incarnation, RequestKey, RequestNumber, TokenId};
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::kv::identity::Scope;
use starling_core::kv::{self, Manager};
use starling_core::request::Generation;
use starling_gpu::Backend;
use starling_gpu::cpu::{CpuBackend, CpuConfig};
use starling_gpu::llama::{Family, Model};
use starling_gpu::source::Source;
use starling_gpu::testing::TinyModel;
use starling_gpu::weights::Arithmetic;
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;

/// What one turn said, and how much of its prompt was reused.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    tokens: Vec<TokenId>,
    /// Of each token, to the last bit.
    logprobs: Vec<u32>,
    cached_tokens: u32,
}

struct Rank {
    batch: Batch,
    kv: Manager,
    backend: Box<dyn Backend>,
    /// The most blocks of each pool that were held after a step.
    held_max: Vec<u32>,
    requests: u64,
}

struct Turn {
    conversation: u128,
    tokens: Vec<TokenId>,
    new_tokens: u32,
}

impl Rank {
    fn new(kv: kv::Config, backend: Box<dyn Backend>, (step_tokens_max, vocabulary): (u32, u32)) -> Self {
        let shape = kv.shape();
        let held_max = vec![0; shape.pools.len()];
        let config = batch::Config { step_tokens_max, sequences_max: 4, draft_tokens_max: 2, vocabulary, kv: shape };
        let batch = Batch::new(config).expect("budgets that a sequence fits");
        Self { batch, kv: Manager::new(kv).expect("pools that hold something"), backend, held_max, requests: 0 }
    }

    /// Runs turns of different conversations side by side.
    fn run(&mut self, turns: &[Turn]) -> Vec<Said> {
        let mut said: BTreeMap<u64, Said> = BTreeMap::new();
        let first = self.requests;
        let admit = |(at, turn): (u64, &Turn)| {
            let ingress = Incarnation(1);
            Input::Admit(batch::Sequence {
                attempt: AttemptKey { key: RequestKey { ingress, seq: first + at }, attempt: Attempt(1) },
                number: RequestNumber(first + at),
                child: 0,
                scope: Scope { tenant: 1, adapter: None },
                conversation: Some(ConversationKey(turn.conversation)),
                tokens: turn.tokens.clone(),
                produced_before: 0,
                generation: Generation { max_new_tokens: turn.new_tokens, ..Generation::default() },
                context_tokens_max: 512,
            })
        };
        let mut inputs: VecDeque<Input> = (0u64..).zip(turns).map(admit).collect();
        self.requests += turns.len() as u64;
        loop {
            while let Some(input) = inputs.pop_front() {
                let mut effects = Vec::new();
                self.batch.handle(0, input, &mut effects);
                for effect in effects {
                    match effect {
                        Effect::Kv(input) => {
                            let mut answers = Vec::new();
                            self.kv.handle(0, input, &mut answers);
                            inputs.extend(answers.into_iter().map(Input::Kv));
                        }
                        Effect::Emit(frames) => frames.into_iter().for_each(|frame| {
                            let said = said.entry(frame.attempt.key.seq - first).or_default();
                            said.cached_tokens = frame.cached_tokens;
                            said.tokens.extend(frame.tokens.iter().map(|drawn| drawn.token));
                            said.logprobs.extend(frame.tokens.iter().map(|drawn| drawn.logprob.to_bits()));
                        }),
                        other => panic!("{other:?}"),
                    }
                }
                self.batch.check().expect("all invariants of the planner hold");
                self.kv.check().expect("all invariants of the KV manager hold");
            }
            for (most, pool) in self.held_max.iter_mut().zip(self.kv.stats().pools) {
                *most = pool.blocks_held.max(*most);
            }
            let Some(step) = self.batch.plan() else { break };
            let mut sampled = Vec::new();
            self.backend.step(&step, &mut sampled).expect("a step that can be computed");
            inputs.push_back(Input::StepDone { sampled });
        }
        assert!(self.batch.is_idle());
        said.into_values().collect()
    }
}

/// Prompts of a conversation: each goes on from what was said.
fn prompt(conversation: u128, turn: usize, before: &[TokenId], vocabulary: u32) -> Vec<TokenId> {
    let new = 17 + 13 * turn + 5 * conversation as usize;
    let token = |at: usize| (at * at * 7 + at * (turn + 3) + 31 * conversation as usize) as u32 % (vocabulary - 3) + 3;
    before.iter().copied().chain((0..new).map(token)).collect()
}

/// Plays three conversations of four turns on one rank, and hands each turn with what it said to `check`.
fn converse(rank: &mut Rank, vocabulary: u32, mut check: impl FnMut(&Turn, &Said, usize)) {
    let mut histories: BTreeMap<u128, Vec<TokenId>> = (1..=3).map(|conversation| (conversation, Vec::new())).collect();
    for turn in 0..4 {
        let turns = histories.iter().map(|(conversation, before)| Turn {
            conversation: *conversation,
            tokens: prompt(*conversation, turn, before, vocabulary),
            new_tokens: 9 + turn as u32,
        });
        let turns: Vec<Turn> = turns.collect();
        let said = rank.run(&turns);
        assert_eq!(said.len(), turns.len());
        for (turn_of, said) in turns.iter().zip(&said) {
            check(turn_of, said, histories[&turn_of.conversation].len());
            let all = turn_of.tokens.iter().chain(&said.tokens).copied().collect();
            histories.insert(turn_of.conversation, all);
        }
    }
}

fn gemma(seed: u64) -> Arc<Model> {
    let tiny = TinyModel { family: Family::Gemma3, layers: 4, window: 24, pattern: 2, seed, ..TinyModel::default() };
    Arc::new(Model::load(&Source::Gguf(tiny.gguf()), Arithmetic::Exact).expect("a model that loads"))
}

fn windowed(model: &Arc<Model>, (blocks, block_tokens, step_tokens_max): ([u32; 2], u32, u32)) -> Rank {
    let groups = model.config().life_cycles(Arithmetic::Exact, block_tokens);
    let retentions: Vec<Retention> = groups.iter().map(|group| group.life_cycle.retention).collect();
    assert_eq!(retentions.len(), 2, "{retentions:?}");
    let of = |retention: &Retention| if *retention == Retention::Full { blocks[0] } else { blocks[1] };
    let pools: Vec<(Retention, u32)> = retentions.iter().map(|retention| (*retention, of(retention))).collect();
    let cpu = CpuConfig { blocks: pools.iter().map(|(_, blocks)| *blocks).collect(), block_tokens, threads: 1 };
    let backend = CpuBackend::new(Arc::clone(model), cpu).expect("a backend");
    let kv = kv::Config::new(NonZeroU32::new(block_tokens).expect("above 0"), pools);
    Rank::new(kv, Box::new(backend), (step_tokens_max, model.config().vocabulary))
}

#[test]
fn a_model_with_windows_says_the_same_with_reuse_and_without_and_gives_its_windows_back() {
    let model = gemma(5);
    let vocabulary = model.config().vocabulary;
    for (block_tokens, step_tokens_max) in [(8, 40), (16, 24), (4, 7)] {
        let full = 4096 / block_tokens;
        // Three conversations run at once; each needs a window, a step's tokens and the next one's.
        let window = 3 * ((24 + 2 * step_tokens_max) / block_tokens + 6);
        let mut rank = windowed(&model, ([full, window], block_tokens, step_tokens_max));
        let mut reused = 0;
        converse(&mut rank, vocabulary, |turn, said, before| {
            let mut cold = windowed(&model, ([full, full], block_tokens, 512));
            let alone = cold.run(std::slice::from_ref(turn));
            assert_eq!((&alone[0].tokens, &alone[0].logprobs), (&said.tokens, &said.logprobs), "{block_tokens}");
            assert_eq!(alone[0].cached_tokens, 0);
            // Of what was said before, the last token has no KV.
            assert_eq!(said.cached_tokens, before.saturating_sub(1) as u32, "{block_tokens}");
            reused += said.cached_tokens;
        });
        assert!(reused > 500, "{reused}");
        let [full_max, window_max] = rank.held_max[..] else { panic!("two pools") };
        // In the order of layers the window comes first.
        let (window_max, full_max) =
            if full_max < window_max { (full_max, window_max) } else { (window_max, full_max) };
        assert!(window_max <= window && full_max > 2 * window_max || block_tokens > 4, "{full_max}, {window_max}");
    }
}

fn hybrid_rank(model: &Arc<Hybrid>, blocks: [u32; 3], block_tokens: u32, step_tokens_max: u32) -> Rank {
    let pools: Vec<(Retention, u32)> = hybrid::retentions().into_iter().zip(blocks).collect();
    let kv = kv::Config::new(NonZeroU32::new(block_tokens).expect("above 0"), pools);
    let backend = hybrid::HybridBackend::new(Arc::clone(model), blocks, block_tokens as usize);
    Rank::new(kv, Box::new(backend), (step_tokens_max, hybrid::VOCABULARY))
}

#[test]
fn a_hybrid_model_says_with_snapshots_what_it_says_by_its_definition() {
    for (seed, block_tokens, step_tokens_max) in [(1, 8, 40), (2, 16, 24), (3, 4, 7), (4, 5, 64)] {
        let model = Arc::new(Hybrid::new(seed));
        let mut rank =
            hybrid_rank(&model, [4096 / block_tokens, 1024 / block_tokens, 64], block_tokens, step_tokens_max);
        converse(&mut rank, hybrid::VOCABULARY, |turn, said, before| {
            assert_eq!(said.tokens, model.continued(&turn.tokens, turn.new_tokens), "seed {seed}");
            assert_eq!(
                said.cached_tokens,
                before.saturating_sub(1) as u32,
                "seed {seed}: a snapshot at the last answer's end"
            );
        });
    }
}

#[test]
fn a_hybrid_model_says_the_same_where_snapshots_and_blocks_are_few() {
    let (mut preemptions, mut reused) = (0, 0);
    for seed in 1..6 {
        let model = Arc::new(Hybrid::new(seed));
        // Room for the longest turn and little more.
        let mut rank = hybrid_rank(&model, [34, 30, 3], 8, 24);
        converse(&mut rank, hybrid::VOCABULARY, |turn, said, _| {
            assert_eq!(said.tokens, model.continued(&turn.tokens, turn.new_tokens), "seed {seed}");
            reused += said.cached_tokens;
        });
        preemptions += rank.batch.stats().preemptions;
        assert!(rank.kv.stats().evicted_blocks > 0, "seed {seed}");
    }
    assert!(reused > 100 && preemptions > 0, "{reused} reused, {preemptions} preemptions");
}

#[test]
fn an_edited_prompt_of_a_hybrid_model_resumes_at_the_snapshot_before_the_edit() {
    let model = Arc::new(Hybrid::new(9));
    let mut rank = hybrid_rank(&model, [1024, 256, 64], 8, 64);
    let turn = |tokens: &[TokenId]| Turn { conversation: 1, tokens: tokens.to_vec(), new_tokens: 5 };
    let tokens = prompt(1, 30, &[], hybrid::VOCABULARY);
    assert_eq!(rank.run(&[turn(&tokens)])[0].cached_tokens, 0);
    // The same again resumes at the last block's beginning, and so does another last token.
    let again = rank.run(&[turn(&tokens)]).remove(0);
    assert_eq!(again.cached_tokens, (tokens.len() as u32 - 1) / 8 * 8);
    assert_eq!(again.tokens, model.continued(&tokens, 5));
    let mut edited = tokens.clone();
    *edited.last_mut().expect("some") = 3;
    let said = rank.run(&[turn(&edited)]).remove(0);
    assert_eq!(said.cached_tokens, (tokens.len() as u32 - 1) / 8 * 8);
    assert_eq!(said.tokens, model.continued(&edited, 5));
}
