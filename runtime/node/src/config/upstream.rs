//! TensorRT-LLM's names of the settings of `[kv]`. They are read from the file as ours, with their own values and nesting.

use super::{Config, Problem};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// How a value of theirs becomes one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    Same,
    /// `all_reusable` is `all-reusable`.
    Name,
    /// 0.95 is 95 percent.
    Percent,
}

/// Their names, as paths in `[kv]`, and our keys.
const NAMES: [(&str, &str, Reading); 16] = [
    ("tokens_per_block", "engine.block-tokens", Reading::Same),
    ("block_reuse_config.policy", "kv.reuse-policy", Reading::Name),
    ("block_reuse_config.max_num_turns", "kv.turns-max", Reading::Same),
    ("max_num_turns", "kv.turns-max", Reading::Same),
    ("enable_partial_reuse", "kv.partial-reuse", Reading::Same),
    ("reuse_match_backoff", "kv.match-backoff-tokens", Reading::Same),
    ("swa_endpoint_rewind_tokens", "kv.endpoint-rewind-tokens", Reading::Same),
    ("enable_branch_snapshot", "kv.branch-snapshots", Reading::Same),
    ("mamba_state_config.enable_branch_snapshot", "kv.branch-snapshots", Reading::Same),
    ("mamba_state_config.additional_snapshot_offsets_from_start", "kv.snapshot-offsets-from-start", Reading::Same),
    ("additional_snapshot_offsets_from_start", "kv.snapshot-offsets-from-start", Reading::Same),
    ("mamba_state_config.additional_snapshot_offsets_from_end", "kv.snapshot-offsets-from-end", Reading::Same),
    ("additional_snapshot_offsets_from_end", "kv.snapshot-offsets-from-end", Reading::Same),
    ("pool_ratio", "kv.pool-ratio", Reading::Same),
    ("avg_seq_len", "kv.sequence-tokens", Reading::Same),
    ("max_util_for_resume", "kv.resume-utilisation-percent-max", Reading::Percent),
];

/// A value with which a name of theirs asks for nothing that is not there.
#[derive(Clone, Copy, Debug)]
enum Off {
    Is(bool),
    Zero,
    /// Every value asks for something.
    Never,
}

const PROPOSED: &str = "pools keep their sizes while a node runs; starling_kv_pool_blocks_proposed says which would fit, set kv.pool-ratio";

/// Their names that have no key here: with the value that changes nothing they are accepted, and why others are not.
const MISSING: [(&str, Off, &str); 18] = [
    ("enable_block_reuse", Off::Is(true), "prefixes are always reusable"),
    ("copy_on_partial_reuse", Off::Is(true), "blocks that are not full are always copied"),
    ("enable_swa_scratch_reuse", Off::Is(false), "blocks out of a window have memory until a step is over"),
    ("enable_kv_pool_rebalance", Off::Is(false), PROPOSED),
    ("use_kv_cache_manager_v2", Off::Is(true), "there is no other manager"),
    ("periodic_snapshot_interval", Off::Zero, NO_PERIODIC),
    ("mamba_state_config.periodic_snapshot_interval", Off::Zero, NO_PERIODIC),
    ("event_buffer_max_size", Off::Zero, "a rank publishes no events of its blocks"),
    ("host_cache_size", Off::Zero, NO_TIERS),
    ("disk_cache_size", Off::Zero, NO_TIERS),
    ("disk_cache_path", Off::Never, NO_TIERS),
    ("disk_prefetch_num_reqs", Off::Zero, NO_TIERS),
    ("secondary_offload_min_priority", Off::Never, NO_TIERS),
    ("free_gpu_memory_fraction", Off::Never, MEMORY_BY_SIZE),
    ("max_gpu_total_bytes", Off::Zero, MEMORY_BY_SIZE),
    ("max_tokens", Off::Never, MEMORY_BY_SIZE),
    ("max_attention_window", Off::Never, "windows are those that the model has"),
    ("dtype", Off::Never, "engine.arithmetic says what KV is stored as"),
];
const NO_PERIODIC: &str = "snapshots are taken at kv.snapshot-offsets-from-start and -from-end";
const NO_TIERS: &str = "ranks keep KV on the device alone";
const MEMORY_BY_SIZE: &str = "set engine.kv-memory";

/// Tables of theirs inside `[kv]`.
const TABLES: [&str; 2] = ["block_reuse_config", "mamba_state_config"];

impl Config {
    /// TensorRT-LLM's names in `[kv]`, each with the key that it stands for, or why it is not supported.
    pub fn kv_names() -> Vec<(&'static str, Result<&'static str, &'static str>)> {
        let ours = NAMES.iter().map(|(theirs, ours, _)| (*theirs, Ok(*ours)));
        ours.chain(MISSING.iter().map(|(theirs, _, why)| (*theirs, Err(*why)))).collect()
    }
}

/// Replaces their names in a layer by ours. What cannot be is left out and told.
pub fn under_our_names(layer: &mut Table) -> Vec<Problem> {
    let Some(Value::Table(given)) = layer.get_mut("kv") else { return Vec::new() };
    let (theirs, ours) = theirs_and_ours(std::mem::take(given));
    *given = ours;
    let mut problems = Vec::new();
    let mut said: BTreeMap<&str, String> = BTreeMap::new();
    for (name, value) in theirs {
        if let Some((_, off, why)) = MISSING.iter().find(|(missing, ..)| *missing == name) {
            if !off.is(&value) {
                problems.push(Problem::new(format!("kv.{name}"), format!("{value} is not supported: {why}")));
            }
            continue;
        }
        let Some(&(_, key, reading)) = NAMES.iter().find(|(known, ..)| *known == name) else {
            problems.push(Problem::new(format!("kv.{name}"), "unknown key"));
            continue;
        };
        let first = said.get(key).cloned().or_else(|| has(layer, key).then(|| key.to_owned()));
        if let Some(first) = first {
            let what = format!("{first} and kv.{name} are two names of one key; give one");
            problems.push(Problem::new(key, what));
            continue;
        }
        match reading.read(value) {
            Ok(value) => super::load::set(layer, key, value),
            Err(what) => problems.push(Problem::new(format!("kv.{name}"), what)),
        }
        said.insert(key, format!("kv.{name}"));
    }
    problems
}

/// Their names as paths, and what is left of the table.
fn theirs_and_ours(given: Table) -> (Vec<(String, Value)>, Table) {
    let (mut theirs, mut ours) = (Vec::new(), Table::new());
    for (name, value) in given {
        match value {
            Value::Table(below) if TABLES.contains(&name.as_str()) => {
                theirs.extend(below.into_iter().map(|(below, value)| (format!("{name}.{below}"), value)));
            }
            value if is_known(&name) => theirs.push((name, value)),
            value => _ = ours.insert(name, value),
        }
    }
    (theirs, ours)
}

fn is_known(name: &str) -> bool {
    NAMES.iter().any(|(known, ..)| *known == name) || MISSING.iter().any(|(missing, ..)| *missing == name)
}

fn has(layer: &Table, path: &str) -> bool {
    let mut names = path.split('.');
    let first = names.next().and_then(|name| layer.get(name));
    names.try_fold(first, |value, name| Some(value?.get(name))).flatten().is_some()
}

impl Reading {
    fn read(self, value: Value) -> Result<Value, String> {
        match (self, value) {
            (Self::Name, Value::String(name)) => Ok(Value::String(name.replace('_', "-"))),
            (Self::Percent, value) => {
                let share = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
                let percent = share.map(|share| (share * 100.0, (share * 100.0).round()));
                let whole =
                    percent.filter(|(exact, whole)| (exact - whole).abs() < 1e-6 && (0.0..=100.0).contains(whole));
                let wrong = || format!("{value} is not a share from 0.01 to 1 in whole percents");
                whole.map(|(_, whole)| Value::Integer(whole as i64)).ok_or_else(wrong)
            }
            (Self::Same | Self::Name, value) => Ok(value),
        }
    }
}

impl Off {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Is(on) => value.as_bool() == Some(on),
            Self::Zero => value.as_integer() == Some(0),
            Self::Never => false,
        }
    }
}
