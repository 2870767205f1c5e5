//! Cases of pure functions: `fn` with its inputs `in` and its results `out`.

use super::differ::{Nulls, agree};
use serde::Deserialize;
use serde_json::{Value, json};
use starling_core::kv::cache::checkpoint::{MARGINS, Publishing, Reach, Snapshots, Tail, snapshot_slots};
use starling_core::kv::cache::lifecycle::{Chunk, LifeCycle, Policy, Priority, Retention};
use starling_core::kv::cache::reuse::{Coverage, Match};
use starling_core::kv::cache::sizing::{Quota, SlotSizes, Workload, device_granularity, shares};
use std::num::NonZeroU32;

/// # Errors
/// The case cannot be read, or the first field that differs.
pub fn judge(function: &str, case: &Value) -> Result<(), String> {
    let (input, expected) = (&case["in"], &case["out"]);
    match function {
        "stale" => agree("", expected, &stale(read(input)?), Nulls::Pinned),
        "scratch" => agree("", expected, &scratch(read(input)?), Nulls::Pinned),
        "reuse" => agree("", expected, &reuse(read(input)?)?, Nulls::Pinned),
        "checkpoint" => agree("", expected, &checkpoint(read(input)?), Nulls::Pinned),
        "ssm_states" => ssm_states(read(input)?, expected),
        "ssm_blocks" => agree("", expected, &ssm_blocks(read(input)?), Nulls::Pinned),
        "gpu_granularity" => {
            let quota = input["quota"].as_u64().ok_or("in.quota is no number")?;
            agree("", expected, &json!({ "granularity": device_granularity(quota) }), Nulls::Pinned)
        }
        "typical" => agree("", expected, &typical(read(input)?)?, Nulls::Open),
        "pool_slots" => pool_slots(&read(input)?, expected),
        "balanced" => balanced(&read(input)?, expected),
        _ => Err(format!("fn {function:?} is not known")),
    }
}

fn read<T: for<'a> Deserialize<'a>>(input: &Value) -> Result<T, String> {
    T::deserialize(input).map_err(|error| format!("in: {error}"))
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Full,
    Window,
    Ssm,
}

/// What the vectors say of a life cycle.
#[derive(Deserialize)]
pub struct Described {
    kind: Kind,
    policy: Policy,
    window: Option<NonZeroU32>,
    #[serde(default)]
    sink_blocks: u32,
    #[serde(default)]
    sink_tokens: u32,
    #[serde(default)]
    group: u8,
    priority: Option<Value>,
}

impl Described {
    /// # Errors
    /// A window without a size, or a priority that is neither a number nor a list of them.
    pub fn life_cycle(&self, block_tokens: NonZeroU32) -> Result<LifeCycle, String> {
        let retention = match (&self.kind, self.window) {
            (Kind::Full, _) => Retention::Full,
            (Kind::Ssm, _) => Retention::State,
            (Kind::Window, Some(tokens)) => {
                let sink_blocks = self.sink_blocks.max(self.sink_tokens.div_ceil(block_tokens.get()));
                Retention::Window { tokens, sink_blocks }
            }
            (Kind::Window, None) => return Err("life cycle of kind window has no window".into()),
        };
        let priority = match &self.priority {
            None => Priority::default(),
            Some(value) => u8::deserialize(value)
                .map(Priority::Uniform)
                .or_else(|_| Vec::deserialize(value).map(Priority::ByOrdinal))
                .map_err(|_| format!("priority {value} is neither a class nor a list of classes"))?,
        };
        Ok(LifeCycle { retention, policy: self.policy, group: self.group, priority })
    }
}

fn life_cycles(described: &[Described], block_tokens: NonZeroU32) -> Result<Vec<LifeCycle>, String> {
    described.iter().map(|one| one.life_cycle(block_tokens)).collect()
}

#[derive(Deserialize)]
struct Stale {
    #[serde(rename = "W")]
    window: Option<NonZeroU32>,
    sink_blocks: u32,
    #[serde(rename = "H")]
    history: u32,
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
}

fn window(window: Option<NonZeroU32>, sink_blocks: u32) -> Retention {
    window.map_or(Retention::Full, |tokens| Retention::Window { tokens, sink_blocks })
}

fn stale(of: Stale) -> Value {
    let retention = window(of.window, of.sink_blocks);
    let stale = retention.stale(of.history, of.block_tokens);
    let live: Vec<u32> = retention.live(of.history, of.block_tokens).collect();
    let is_live = |block: u32| retention.is_live(block, of.history, of.block_tokens);
    assert!((0..live.last().map_or(0, |last| last + 2)).all(|block| is_live(block) == live.contains(&block)));
    json!({
        "stale": [stale.start, stale.end],
        "stale_empty": stale.is_empty(),
        "live_pages": retention.live_pages(of.history, of.block_tokens),
        "live_blocks": runs(&live),
    })
}

/// Numbers as runs of `[first, count, step]`, a single one with step 0.
fn runs(numbers: &[u32]) -> Vec<[u32; 3]> {
    let mut runs: Vec<[u32; 3]> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some([first, count, step]) if *first + *count == number => (*count, *step) = (*count + 1, 1),
            _ => runs.push([number, 1, 0]),
        }
    }
    runs
}

#[derive(Deserialize)]
struct Scratch {
    #[serde(flatten)]
    stale: Stale,
    #[serde(rename = "C")]
    capacity: u32,
    max_rewind: u32,
}

fn scratch(of: Scratch) -> Value {
    let chunk = Chunk { history: of.stale.history, capacity: of.capacity, rewind_max: of.max_rewind };
    let blocks = window(of.stale.window, of.stale.sink_blocks).scratch(chunk, of.stale.block_tokens);
    json!({ "scratch_blocks": blocks.collect::<Vec<u32>>() })
}

#[derive(Deserialize)]
struct Reuse {
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
    #[serde(rename = "match")]
    matched: u32,
    backoff: u32,
    life_cycles: Vec<Described>,
    covered: Vec<Vec<u32>>,
}

struct Table(Vec<Vec<u32>>);

impl Coverage for Table {
    fn covered(&self, life_cycle: usize, block: u32) -> u32 {
        self.0.get(life_cycle).and_then(|row| row.get(block as usize)).copied().unwrap_or(0)
    }
}

fn reuse(of: Reuse) -> Result<Value, String> {
    let life_cycles = life_cycles(&of.life_cycles, of.block_tokens)?;
    let tokens = of.matched.saturating_sub(of.backoff);
    let matched = Match { block_tokens: of.block_tokens, life_cycles: &life_cycles, tokens };
    let table = Table(of.covered);
    let reuse = matched.reusable(&table);
    let complete = life_cycles.iter().enumerate().map(|(at, life_cycle)| {
        (life_cycle.policy == Policy::Optional).then(|| matched.is_complete(at, reuse, &table))
    });
    Ok(json!({
        "reuse": reuse,
        "depth_before_ssm": matched.reusable_before_states(&table),
        "optional_complete": complete.collect::<Vec<Option<bool>>>(),
    }))
}

#[derive(Deserialize)]
struct Checkpoint {
    prompt_len: u32,
    replay: u32,
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
    reused: u32,
    chunk_start: u32,
    policy: Publishing,
    encoder_replay: bool,
}

fn checkpoint(of: Checkpoint) -> Value {
    let tail = Tail {
        prompt_tokens: of.prompt_len,
        replay_tokens: of.replay,
        reused_tokens: of.reused,
        chunk_start: of.chunk_start,
        publishing: of.policy,
        encoder_replay: of.encoder_replay,
    };
    json!({ "checkpoint": tail.checkpoint(MARGINS[0], of.block_tokens) })
}

#[derive(Deserialize)]
struct SsmStates {
    #[serde(rename = "N")]
    turns: u32,
    from_start: Vec<u32>,
    from_end: Vec<u32>,
    branch: bool,
    capacity: u32,
    max_seq_len: u32,
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
}

/// What upstream would take is there for information.
fn ssm_states(of: SsmStates, expected: &Value) -> Result<(), String> {
    let reach = Reach {
        capacity: of.capacity,
        sequence_tokens_max: of.max_seq_len,
        turns: of.turns,
        block_tokens: of.block_tokens,
    };
    let snapshots = Snapshots { from_start: of.from_start, from_end: of.from_end, at_branches: of.branch };
    let states = snapshots.states(reach);
    let mut expected = expected.clone();
    if let Some(fields) = expected.as_object_mut() {
        fields.retain(|name, _| !name.starts_with("upstream_"));
    }
    let found = json!({ "m": states.moving, "gen_slot": states.generation, "ctx_slot": states.context });
    agree("", &expected, &found, Nulls::Pinned)
}

#[derive(Deserialize)]
struct SsmBlocks {
    prompt_len: u32,
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
    from_end: Vec<u32>,
}

fn ssm_blocks(of: SsmBlocks) -> Value {
    json!({ "slots": snapshot_slots(of.prompt_len, &of.from_end, of.block_tokens) })
}

#[derive(Deserialize)]
struct Typical {
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
    #[serde(rename = "L")]
    sequence_tokens: u32,
    #[serde(rename = "B")]
    requests: u32,
    #[serde(rename = "N")]
    turns: u32,
    max_num_tokens: u32,
    extra: u32,
    draft: u32,
    quota: u64,
    system_prompt_length: u32,
    life_cycles: Vec<Described>,
    slot_sizes: Vec<SlotSizes>,
}

fn typical(of: Typical) -> Result<Value, String> {
    let life_cycles = life_cycles(&of.life_cycles, of.block_tokens)?;
    let workload = Workload {
        block_tokens: of.block_tokens,
        sequence_tokens: of.sequence_tokens,
        requests: of.requests,
        step_tokens_max: of.max_num_tokens,
        extra_tokens: of.extra,
        draft_tokens: of.draft,
        system_prompt_tokens: of.system_prompt_length,
    };
    let granularity = device_granularity(of.quota);
    let slots = workload.typical_slots(&life_cycles);
    let right = workload.retaining_slots(&life_cycles, of.turns, None);
    Ok(json!({
        "granularity": granularity,
        "typical_slots": slots,
        "ratio": shares(&slots, &of.slot_sizes, granularity),
        "right_slots": right,
        "right_ratio": shares(&right, &of.slot_sizes, granularity),
    }))
}

#[derive(Deserialize)]
struct PoolSlots {
    quota: u64,
    granularity: u64,
    ratio: Vec<f64>,
    slot_sizes: Vec<SlotSizes>,
    minimum: Vec<u64>,
}

#[derive(Deserialize)]
struct Bounds {
    at_least: Vec<u64>,
    at_most: Option<Vec<u64>>,
    fits_quota: Option<bool>,
}

impl Bounds {
    fn hold(&self, slots: &[u64]) -> Result<(), String> {
        if slots.len() != self.at_least.len() || self.at_least.iter().zip(slots).any(|(least, found)| found < least) {
            return Err(format!("at_least: expected {:?}, found {slots:?}", self.at_least));
        }
        match &self.at_most {
            Some(most) if slots.iter().zip(most).any(|(found, most)| found > most) => {
                Err(format!("at_most: expected {most:?}, found {slots:?}"))
            }
            _ => Ok(()),
        }
    }
}

fn pool_slots(of: &PoolSlots, expected: &Value) -> Result<(), String> {
    let bounds: Bounds = read(expected)?;
    let quota = Quota { bytes: of.quota, granularity: of.granularity, sizes: &of.slot_sizes, floors: &of.minimum };
    let slots = quota.pool_slots(&of.ratio);
    bounds.hold(&slots)?;
    let bytes = |(slots, sizes): (&u64, &SlotSizes)| -> u64 {
        sizes.iter().map(|size| (slots * size).next_multiple_of(of.granularity)).sum()
    };
    let total: u64 = slots.iter().zip(&of.slot_sizes).map(bytes).sum();
    let fits = total <= of.quota;
    match bounds.fits_quota {
        Some(right) if right != fits => Err(format!("fits_quota: expected {right}, found {fits} ({total} bytes)")),
        _ => Ok(()),
    }
}

#[derive(Deserialize)]
struct BalancedSolve {
    quota: u64,
    slot_sizes: Vec<SlotSizes>,
    live: Vec<u64>,
    conv: Vec<u64>,
}

fn balanced(of: &BalancedSolve, expected: &Value) -> Result<(), String> {
    let bounds: Bounds = read(expected)?;
    let quota = Quota { bytes: of.quota, granularity: 1, sizes: &of.slot_sizes, floors: &[] };
    let solved = quota.balanced(&of.live, &of.conv).map_err(|error| error.to_string())?;
    agree("conversations", &expected["conversations"], &json!(solved.conversations), Nulls::Pinned)?;
    bounds.hold(&solved.slots)?;
    let bytes = |(slots, sizes): (&u64, &SlotSizes)| -> u64 { sizes.iter().map(|size| slots * size).sum() };
    let total: u64 = solved.slots.iter().zip(&of.slot_sizes).map(bytes).sum();
    if total > of.quota {
        return Err(format!("total: {total} bytes are more than the quota of {}", of.quota));
    }
    Ok(())
}
