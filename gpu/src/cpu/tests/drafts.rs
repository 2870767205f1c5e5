//! Guesses under the planner, the KV manager and the real arithmetic: they change no bit of an answer.

use super::*;
use starling_core::batch::{self, Batch, Config, Effect, Input};
use starling_core::ids::{Attempt, Incarnation, RequestKey, RequestNumber};
use starling_core::kv::{self, identity::Scope};
use starling_core::request::{Adjustment, Generation};
use std::collections::{BTreeMap, VecDeque};

const NEW_TOKENS: u32 = 40;

fn sequence(number: u64, tokens: Vec<TokenId>, sampling: Sampling) -> batch::Sequence {
    let key = RequestKey { ingress: Incarnation(1), seq: number };
    batch::Sequence {
        attempt: AttemptKey { key, attempt: Attempt(1) },
        number: RequestNumber(number),
        child: 0,
        scope: Scope { tenant: 1, adapter: None },
        conversation: None,
        tokens,
        produced_before: 0,
        generation: Generation { sampling, max_new_tokens: NEW_TOKENS, ..Generation::default() },
        context_tokens_max: 200,
    }
}

/// A model of random weights does not repeat itself, so most are held to few tokens. Penalties hang on every token before.
fn sequences(vocabulary: u32) -> Vec<batch::Sequence> {
    let few: Vec<(TokenId, f32)> = (7..10).map(|token| (token, 60.0)).collect();
    let held = Adjustment { logit_bias: few.clone(), ..Adjustment::default() };
    let penalized =
        Adjustment { repetition_penalty: 1.2, presence_penalty: 0.3, frequency_penalty: 0.1, logit_bias: few };
    let samplings = [
        Sampling { top_logprobs: 3, ..Sampling::default() },
        Sampling { adjustment: held.clone().unless_neutral(), ..Sampling::default() },
        Sampling { temperature: 0.7, seed: 5, top_k: 3, adjustment: held.unless_neutral(), ..Sampling::default() },
        Sampling {
            temperature: 1.0,
            seed: 6,
            min_p: 0.01,
            adjustment: penalized.unless_neutral(),
            ..Sampling::default()
        },
    ];
    let prompts = (0..).map(|seed| tokens(6, seed, 0, vocabulary).repeat(2 + seed % 2));
    (1..).zip(prompts).zip(samplings).map(|((number, prompt), sampling)| sequence(number, prompt, sampling)).collect()
}

/// What each sequence says, to the last bit, and how often guesses were right and wrong.
fn run(model: &Arc<Model>, draft_tokens_max: u32, blocks: u32) -> (BTreeMap<u64, Vec<(TokenId, u32)>>, batch::Stats) {
    let manager = kv::Config::full(blocks, BLOCK_TOKENS).unwrap();
    let vocabulary = model.config().vocabulary;
    let config = Config { step_tokens_max: 24, sequences_max: 4, draft_tokens_max, vocabulary, kv: manager.shape() };
    let mut planner = Batch::new(config).unwrap();
    let mut manager = kv::Manager::new(manager).unwrap();
    let mut backend = backend(model, 1);
    let mut said: BTreeMap<u64, Vec<(TokenId, u32)>> = BTreeMap::new();
    let mut inputs: VecDeque<Input> = sequences(vocabulary).into_iter().map(Input::Admit).collect();
    loop {
        while let Some(input) = inputs.pop_front() {
            let (mut effects, mut answers) = (Vec::new(), Vec::new());
            planner.handle(0, input, &mut effects);
            planner.check().unwrap();
            for effect in effects {
                match effect {
                    Effect::Kv(input) => manager.handle(0, input, &mut answers),
                    Effect::Emit(frames) => frames.into_iter().for_each(|frame| {
                        let tokens = frame.tokens.iter().map(|drawn| (drawn.token, drawn.logprob.to_bits()));
                        said.entry(frame.attempt.key.seq).or_default().extend(tokens);
                    }),
                    other => panic!("{other:?}"),
                }
            }
            inputs.extend(answers.into_iter().map(Input::Kv));
        }
        let Some(step) = planner.plan() else { break };
        let mut sampled = Vec::new();
        backend.step(&step, &mut sampled).unwrap();
        inputs.push_back(Input::StepDone { sampled });
    }
    assert!(planner.is_idle());
    (said, planner.stats())
}

#[test]
fn guesses_change_no_bit_of_greedy_seeded_and_penalized_answers() {
    let (_, model) = tiny(1, false);
    let (plain, stats) = run(&model, 0, BLOCKS);
    assert_eq!(stats.drafted_tokens, 0);
    assert!(plain.len() == 4 && plain.values().all(|said| said.len() == NEW_TOKENS as usize));
    for (draft_tokens_max, blocks) in [(1, BLOCKS), (3, BLOCKS), (8, BLOCKS), (4, 12)] {
        let (said, guessed) = run(&model, draft_tokens_max, blocks);
        assert_eq!(said, plain, "{draft_tokens_max} guesses");
        assert!(guessed.accepted_tokens > 10 && guessed.accepted_tokens < guessed.drafted_tokens, "{guessed:?}");
        assert!(blocks < BLOCKS || guessed.steps < stats.steps, "{} instead of {} steps", guessed.steps, stats.steps);
        assert!(blocks == BLOCKS || guessed.preemptions > 0, "the small pool is too small");
    }
}
