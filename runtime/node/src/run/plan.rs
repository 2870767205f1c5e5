//! `starling plan`: how many slots each KV pool gets, what it holds, and which one is full first.

mod described;
mod report;

use crate::cli::Exit;
use crate::cli::plan::Plan as Command;
use crate::fetch::{self, FetchError};
use described::{Described, DescribedError, Pooled};
use report::Report;
use starling_core::kv::cache::lifecycle::LifeCycle;
use starling_core::kv::cache::sizing::demand::{Demand, Retained};
use starling_core::kv::cache::sizing::{PlanError, Request, SlotSizes, Tier, Workload, plan as divide};
use starling_gpu::llama::ModelConfig;
use starling_gpu::source::{ModelError, Source};
use starling_gpu::weights::Arithmetic;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
enum PlanRunError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Described(#[from] DescribedError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
}

impl From<&PlanRunError> for Exit {
    fn from(error: &PlanRunError) -> Self {
        match error {
            PlanRunError::Fetch(error) => error.into(),
            PlanRunError::Model(_) => Self::Unavailable,
            PlanRunError::Described(_) => Self::Config,
            PlanRunError::Plan(PlanError::StatesDoNotFit { .. }) | PlanRunError::Write(_) => Self::Failed,
            PlanRunError::Plan(_) => Self::Usage,
        }
    }
}

/// Runs `starling plan`.
pub fn plan(command: &Command) -> Exit {
    match run(command, &mut io::stdout().lock()) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            eprintln!("error: {error}");
            (&error).into()
        }
    }
}

fn run(command: &Command, out: &mut impl Write) -> Result<(), PlanRunError> {
    let described = match &command.life_cycles {
        Some(file) => Described::read(file, command.block_tokens)?,
        None => of_model(command)?,
    };
    let Described { name, pooled, snapshots, context } = described;
    let longest = command.sequence_tokens_max.unwrap_or(command.sequence_tokens);
    let (sequence_tokens, sequence_tokens_max) = match context {
        // A model's conversations are no longer than it was made for.
        Some(context) => (command.sequence_tokens.min(context), longest.min(context)),
        None => (command.sequence_tokens, longest),
    };
    let demand = Demand {
        workload: Workload {
            block_tokens: command.block_tokens,
            sequence_tokens,
            requests: command.requests,
            step_tokens_max: command.step_tokens,
            extra_tokens: 0,
            draft_tokens: command.draft_tokens,
            system_prompt_tokens: command.system_prompt_tokens,
        },
        retained: Retained { tokens: sequence_tokens, turns: command.turns, end_points: command.end_points, snapshots },
        sequence_tokens_max,
        suspended_requests: command.suspended_requests.unwrap_or(command.requests),
        reserved_states: 0,
    };
    let below = [command.host_bytes, command.disk_bytes].into_iter().flatten().map(|size| Tier::below(size.bytes()));
    let tiers: Vec<Tier> = std::iter::once(Tier::device(command.device_bytes.bytes())).chain(below).collect();
    let life_cycles: Vec<LifeCycle> = pooled.iter().map(|one| one.life_cycle.clone()).collect();
    let sizes = sizes(&pooled);
    let request = Request {
        life_cycles: &life_cycles,
        sizes: &sizes,
        tiers: &tiers,
        demand: &demand,
        method: command.method.into(),
        ratio: command.pool_ratio.as_deref(),
    };
    let report = Report { name, pooled, sizes: &sizes, demand: &demand, plan: divide(&request)? };
    match command.json {
        true => writeln!(out, "{}", report.to_json())?,
        false => report.write(out)?,
    }
    Ok(())
}

/// A model's life cycles, each with a pool group of its own.
fn of_model(command: &Command) -> Result<Described, PlanRunError> {
    let name = command.model.clone().unwrap_or_default();
    let path = if fetch::is_name(&name) { fetch::model(&name)? } else { PathBuf::from(&name) };
    let config = ModelConfig::read(&Source::open(&path)?)?;
    let arithmetic = if command.arithmetic == "exact" { Arithmetic::Exact } else { Arithmetic::Int8 };
    let groups = config.life_cycles(arithmetic, command.block_tokens.get());
    let pooled = groups.into_iter().map(|group| Pooled {
        life_cycle: group.life_cycle,
        layers: group.layers,
        sizes: vec![group.page_bytes],
    });
    Ok(Described { name, pooled: pooled.collect(), snapshots: Default::default(), context: Some(config.context) })
}

/// Slot sizes by pool group.
fn sizes(pooled: &[Pooled]) -> Vec<SlotSizes> {
    let groups = pooled.iter().map(|one| usize::from(one.life_cycle.group) + 1).max().unwrap_or(0);
    let mut sizes = vec![SlotSizes::new(); groups];
    for one in pooled {
        sizes[usize::from(one.life_cycle.group)].clone_from(&one.sizes);
    }
    sizes
}

#[cfg(test)]
mod tests;
