//! Random runs of a whole rank, for models of several kinds.

use super::super::*;
use super::rank::{Rank, STOPS, attempt};
use super::{config, prompt, sequence};
use crate::kv::cache::checkpoint::Publishing;
use crate::kv::cache::{Commits, PPM};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Shape {
    kind: u8,
    step_tokens_max: u32,
    sequences_max: u32,
    draft_tokens_max: u32,
    blocks: u32,
    block_tokens: u32,
}

/// Kinds of models.
const KINDS: u8 = 5;

impl Shape {
    /// Full attention alone, with windows, with sinks, and with recurrent layers.
    fn pools(&self) -> kv::Shape {
        let window = |tokens, sink_blocks| {
            let tokens = std::num::NonZeroU32::new(tokens).expect("above 0");
            kv::Pool { retention: Retention::Window { tokens, sink_blocks }, blocks: self.blocks }
        };
        let full = kv::Pool { retention: Retention::Full, blocks: self.blocks };
        let states = kv::Pool { retention: Retention::State, blocks: 1 + self.blocks / 3 };
        let pools = match self.kind {
            0 => vec![full],
            1 => vec![full, window(5, 0)],
            2 => vec![window(7, 1), window(3, 0)],
            3 => vec![full, states],
            _ => vec![window(6, 0), full, states],
        };
        kv::Shape { block_tokens: self.block_tokens.try_into().expect("above 0"), pools }
    }

    fn config(&self) -> Config {
        let Shape { step_tokens_max, sequences_max, draft_tokens_max, .. } = *self;
        Config { step_tokens_max, sequences_max, draft_tokens_max, kv: self.pools(), ..config() }
    }

    /// A KV manager that publishes by another policy than goes with the model, where there is one, and with other settings.
    fn other_kv(
        &self,
        (all_reusable, partial_reuse, backoff, utilisation_percent): (bool, bool, u32, u32),
    ) -> kv::Config {
        let pools = self.pools();
        let life_cycles = pools.pools.iter().map(|pool| (pool.retention, pool.blocks)).collect();
        let mut kv = kv::Config::new(pools.block_tokens, life_cycles);
        (kv.publishing, kv.cache.commits) = match all_reusable && !pools.has_states() {
            true => (Publishing::AllReusable, Commits::EveryBlock),
            false => (Publishing::PerRequest, Commits::EndPoints),
        };
        kv.cache.endpoint_rewind_tokens = if kv.publishing == Publishing::AllReusable { backoff } else { 0 };
        (kv.cache.partial_reuse, kv.cache.match_backoff_tokens) = (partial_reuse, backoff);
        kv.cache.utilisation_ppm_max = utilisation_percent * (PPM / 100);
        kv
    }
}

#[derive(Clone, Debug)]
enum Op {
    Admit {
        tenant: u64,
        seed: u64,
        length: usize,
        max_new_tokens: u32,
        late_number: bool,
    },
    Cancel(usize),
    /// The same request again, with what it produced so far.
    Resume(usize),
    ToKv(u8),
    ToBatch(u8),
    Plan,
    FinishStep,
    Tick,
}

fn shapes() -> impl Strategy<Value = Shape> {
    (0u8..KINDS, 1u32..20, 1u32..6, 0u32..6, 3u32..24, 1u32..6).prop_map(
        |(kind, step_tokens_max, sequences_max, draft_tokens_max, blocks, block_tokens)| Shape {
            kind,
            step_tokens_max,
            sequences_max,
            draft_tokens_max,
            blocks,
            block_tokens,
        },
    )
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let admit = (0u64..2, 0u64..3, 1usize..24, 0u32..24, any::<bool>()).prop_map(
        |(tenant, seed, length, max_new_tokens, late_number)| Op::Admit {
            tenant,
            seed,
            length,
            max_new_tokens,
            late_number,
        },
    );
    let op = prop_oneof![
        3 => admit,
        1 => any::<usize>().prop_map(Op::Cancel),
        1 => any::<usize>().prop_map(Op::Resume),
        6 => (1u8..4).prop_map(Op::ToKv),
        6 => (1u8..4).prop_map(Op::ToBatch),
        5 => Just(Op::Plan),
        5 => Just(Op::FinishStep),
        1 => Just(Op::Tick),
    ];
    proptest::collection::vec(op, 1..250)
}

/// Plays the operations, then lets everything end, and compares each stream with its undisturbed run.
fn play(shape: &Shape, ops: Vec<Op>) -> Rank {
    play_on(Rank::new(shape.config()), ops)
}

fn play_on(mut rank: Rank, ops: Vec<Op>) -> Rank {
    for (at, op) in ops.into_iter().enumerate() {
        let admitted = rank.streams.len();
        let nth = |n: usize| n.checked_rem(admitted);
        match op {
            Op::Admit { tenant, seed, length, max_new_tokens, late_number } => {
                // Most numbers grow; some requests come late, with a number below those that run.
                let number = if late_number { 500 - at as u64 } else { 1000 + at as u64 };
                let mut sequence = sequence(number, &prompt(seed, length), max_new_tokens);
                sequence.attempt = attempt(at as u64, 1);
                sequence.scope.tenant = tenant;
                sequence.conversation = (seed > 0).then_some(ConversationKey(seed.into()));
                sequence.generation.stop_tokens = (0..STOPS).collect();
                sequence.context_tokens_max = 40;
                rank.admit(sequence);
            }
            Op::Cancel(n) => {
                if let Some(one) = nth(n).and_then(|n| rank.streams.keys().nth(n).copied()) {
                    rank.cancel(one);
                }
            }
            Op::Resume(n) => {
                if let Some(old) = nth(n).and_then(|n| rank.streams.values().nth(n).cloned()) {
                    let mut sequence = old.sequence;
                    rank.cancel(sequence.attempt);
                    sequence.attempt.attempt.0 += 1;
                    sequence.produced_before += old.tokens.len() as u32;
                    sequence.tokens.extend(old.tokens);
                    if !rank.streams.contains_key(&sequence.attempt) {
                        rank.admit(sequence);
                    }
                }
            }
            Op::ToKv(count) => {
                for _ in 0..count {
                    rank.deliver_to_kv();
                }
            }
            Op::ToBatch(count) => {
                for _ in 0..count {
                    rank.deliver_to_batch();
                }
            }
            Op::Plan => _ = rank.plan(),
            Op::FinishStep => _ = rank.finish_step(),
            Op::Tick => rank.tell_batch(Input::Tick),
        }
    }
    rank.drain();
    rank.check_ended();
    rank
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everything_ends_with_the_undisturbed_tokens_and_no_block_leaks(shape in shapes(), ops in ops()) {
        play(&shape, ops);
    }

    #[test]
    fn other_policies_change_no_token(
        shape in shapes(),
        ops in ops(),
        settings in (any::<bool>(), any::<bool>(), 0u32..4, 50u32..=100),
    ) {
        play_on(Rank::with(shape.config(), shape.other_kv(settings)), ops);
    }
}

/// Random runs that are dense enough to preempt, cancel and reuse: the property above is worth nothing if it does not.
#[test]
fn random_runs_meet_what_they_are_meant_to_meet() {
    let (mut preemptions, mut cancelled_in_step, mut reused, mut evicted, mut refused) = (0, 0, 0, 0, 0);
    let (mut right, mut wrong) = (0, 0);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let shape = Shape {
            kind: draw(u64::from(KINDS)) as u8,
            step_tokens_max: 1 + draw(20) as u32,
            sequences_max: 1 + draw(6) as u32,
            draft_tokens_max: draw(6) as u32,
            blocks: 4 + draw(16) as u32,
            block_tokens: 1 + draw(5) as u32,
        };
        let ops = (0..200).map(|_| match draw(28) {
            0..=3 => Op::Admit {
                tenant: draw(2),
                seed: draw(3),
                length: 1 + draw(20) as usize,
                max_new_tokens: draw(24) as u32,
                late_number: draw(4) == 0,
            },
            4 => Op::Cancel(draw(50) as usize),
            5 => Op::Resume(draw(50) as usize),
            6..=11 => Op::ToKv(1 + draw(3) as u8),
            12..=17 => Op::ToBatch(1 + draw(3) as u8),
            18..=22 => Op::Plan,
            _ => Op::FinishStep,
        });
        let ops: Vec<Op> = ops.collect();
        let rank = play(&shape, ops);
        let stats = rank.batch.stats();
        preemptions += stats.preemptions;
        cancelled_in_step += stats.cancel_steps;
        reused += stats.reused_tokens;
        refused += stats.refused;
        right += stats.accepted_tokens;
        wrong += stats.drafted_tokens - stats.accepted_tokens;
        evicted += rank.kv.stats().evicted_blocks;
    }
    let met = [preemptions, cancelled_in_step, reused, refused, evicted, right, wrong];
    assert!(met.into_iter().all(|count| count > 50), "{met:?}");
}
