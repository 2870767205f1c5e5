//! Sequences of operations on one manager, each with its result and what is observed after it.

use super::differ::{Nulls, agree};
use super::pure::Described;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use starling_core::ids::{ConversationKey, TokenId};
use starling_core::kv::cache::{
    After, Commits, Config, Copy, Error, ErrorKind, Manager, PPM, Phase, PlanId, SequenceId, Turn,
};
use starling_core::kv::identity::Scope;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// Conversations that a sequence may name: none expires on its own.
const CONVERSATIONS_MAX: u32 = 1 << 20;

#[derive(Deserialize)]
struct Case {
    config: Configured,
    streams: Vec<Vec<[u32; 3]>>,
    #[serde(default)]
    scopes: Vec<Named>,
    #[serde(default)]
    /// A length below zero counts from the stream's end.
    probes: Vec<(u64, usize, i64)>,
    #[serde(default)]
    end_point_candidates: Vec<(u64, usize, Vec<i64>)>,
    steps: Vec<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Configured {
    #[serde(rename = "T")]
    block_tokens: NonZeroU32,
    life_cycles: Vec<Described>,
    tiers: Vec<Vec<u32>>,
    mode: Mode,
    #[serde(default = "whole")]
    max_util: f64,
    #[serde(default = "yes")]
    partial_reuse: bool,
    #[serde(default)]
    backoff: u32,
    #[serde(default = "one")]
    max_num_turns: u32,
}

fn whole() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Default,
    MinSnapshot,
}

#[derive(Clone, Copy, Deserialize)]
struct Named {
    lora_id: Option<u64>,
    salt: Option<u64>,
}

impl Named {
    /// No salt is not the salt 0.
    fn scope(self) -> Scope {
        Scope { tenant: self.salt.map_or(0, |salt| salt + 1), adapter: self.lora_id }
    }
}

impl Configured {
    fn config(&self) -> Result<Config, String> {
        let life_cycles = self.life_cycles.iter().map(|one| one.life_cycle(self.block_tokens));
        Ok(Config {
            commits: match self.mode {
                Mode::Default => Commits::EveryBlock,
                Mode::MinSnapshot => Commits::EndPoints,
            },
            utilisation_ppm_max: (self.max_util * f64::from(PPM)).round() as u32,
            partial_reuse: self.partial_reuse,
            match_backoff_tokens: self.backoff,
            turns_max: self.max_num_turns,
            conversations_max: CONVERSATIONS_MAX,
            ..Config::new(self.block_tokens, life_cycles.collect::<Result<_, _>>()?, self.tiers.clone())
        })
    }
}

/// # Errors
/// The case cannot be read, or the first step and field that differ.
pub fn judge(case: &Value) -> Result<(), String> {
    let case = Case::deserialize(case).map_err(|error| error.to_string())?;
    let manager = Manager::new(case.config.config()?).map_err(|error| error.to_string())?;
    let mut runner = Runner { case: &case, manager, plans: BTreeMap::new(), copies: Vec::new() };
    for (at, step) in case.steps.iter().enumerate() {
        let fields = Fields(step);
        let name = fields.text("op").unwrap_or("?");
        let judged = runner.step(&fields);
        judged.map_err(|why| format!("step {at} ({name}): {why}"))?;
    }
    Ok(())
}

/// A step's fields.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get<T: for<'b> Deserialize<'b>>(&self, name: &str) -> Result<Option<T>, String> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => T::deserialize(value).map(Some).map_err(|error| format!("{name}: {error}")),
        }
    }

    fn want<T: for<'b> Deserialize<'b>>(&self, name: &str) -> Result<T, String> {
        self.get(name)?.ok_or_else(|| format!("{name} is missing"))
    }

    fn text(&self, name: &str) -> Result<&str, String> {
        self.0.get(name).and_then(Value::as_str).ok_or_else(|| format!("{name} is missing"))
    }

    fn sequence(&self) -> Result<SequenceId, String> {
        Ok(SequenceId(self.want("seq")?))
    }

    fn conversation(&self) -> Result<ConversationKey, String> {
        Ok(ConversationKey(u128::from(self.want::<u64>("conv")?)))
    }
}

struct Runner<'a> {
    case: &'a Case,
    manager: Manager,
    plans: BTreeMap<String, PlanId>,
    copies: Vec<Copy>,
}

impl Runner<'_> {
    fn step(&mut self, step: &Fields<'_>) -> Result<(), String> {
        let result = self.run(step)?;
        let expected = step.0.get("result").unwrap_or(&Value::Null);
        agree("result", expected, &result, Nulls::Pinned)?;
        self.manager.check().map_err(|violation| violation.to_string())?;
        let after = step.0.get("after").and_then(Value::as_object).into_iter().flatten();
        for (field, expected) in after {
            let found = self.observe(field, step)?;
            agree(&format!("after.{field}"), expected, &found, Nulls::Open)?;
        }
        Ok(())
    }

    fn run(&mut self, step: &Fields<'_>) -> Result<Value, String> {
        let op = step.text("op")?;
        let done = match op {
            "create" => return self.create(step),
            "resume" => {
                let restored: Vec<u8> = step.get("optional")?.unwrap_or_default();
                self.manager.resume(step.sequence()?, &restored, &mut self.copies).map(Value::from)
            }
            "resize" => {
                let wanted = (step.get("C")?, step.get("H")?);
                self.manager.resize(step.sequence()?, wanted, &mut self.copies).map(Value::from)
            }
            "commit" => {
                let after = if step.get("is_end")?.unwrap_or(false) { After::Ends } else { After::GoesOn };
                let tokens = self.tokens(step)?;
                let committed = self.manager.commit(step.sequence()?, &tokens, after, &mut self.copies);
                committed.map(|standing| json!({ "K": standing.committed, "H": standing.history }))
            }
            "stop" => self.manager.stop(step.sequence()?).map(|()| json!(true)),
            "suspend" => self.manager.suspend(step.sequence()?).map(|()| json!(true)),
            "close" => {
                self.manager.close(step.sequence()?);
                Ok(json!(true))
            }
            "plan" => self.manager.plan(step.sequence()?).map(|planned| {
                planned.map_or(Value::Null, |(plan, counts)| {
                    self.plans.insert(step.text("plan").unwrap_or("").to_string(), plan);
                    json!(counts)
                })
            }),
            "drop" => {
                let name = step.text("plan")?;
                let plan = self.plans.get(name).ok_or_else(|| format!("plan {name:?} was never made"))?;
                self.manager.drop_plan(*plan).map(|()| json!(true))
            }
            "turn_begin" => self.manager.begin_turn(step.conversation()?, step.sequence()?).map(|turn| match turn {
                Turn::Current => json!("current"),
                Turn::PerRequest => json!("per_request"),
            }),
            "turn_end" => self
                .manager
                .end_turn(step.conversation()?, step.sequence()?)
                .map(|end| json!({ "planned": end.planned, "plans": end.plans })),
            "expire" => {
                self.manager.expire(step.conversation()?);
                Ok(json!(true))
            }
            "prefetch" => Ok(json!(self.manager.prefetch(&self.scope(step)?, &self.tokens(step)?, &mut self.copies))),
            "probe" => Ok(json!(self.manager.probe(&self.scope(step)?, &self.tokens(step)?))),
            "unlink" => {
                let at = (step.want("block")?, step.want("lc")?);
                Ok(json!(self.manager.unlink(&self.scope(step)?, &self.tokens(step)?, at)))
            }
            _ => return Err(format!("op {op:?} is not known")),
        };
        Ok(answer(done))
    }

    fn create(&mut self, step: &Fields<'_>) -> Result<Value, String> {
        let conversation = step.get::<u64>("conv")?.map(|conversation| ConversationKey(u128::from(conversation)));
        let (scope, tokens) = (self.scope(step)?, self.tokens(step)?);
        let opened = self.manager.create(step.sequence()?, scope, &tokens, conversation);
        Ok(answer(opened.map(|opened| {
            json!({ "K": opened.reused_tokens, "path_depth": opened.path_tokens, "optional": opened.restorable })
        })))
    }

    fn scope(&self, step: &Fields<'_>) -> Result<Scope, String> {
        self.scope_at(step.get("scope")?.unwrap_or(0))
    }

    /// The index of a scope that is listed; else a salt, and 0 for none.
    fn scope_at(&self, number: u64) -> Result<Scope, String> {
        let unlisted = Named { lora_id: None, salt: (number > 0).then_some(number) };
        let listed = self.case.scopes.get(number as usize).copied();
        if !self.case.scopes.is_empty() && listed.is_none() {
            return Err(format!("scope {number} is not listed"));
        }
        Ok(listed.unwrap_or(unlisted).scope())
    }

    fn tokens(&self, step: &Fields<'_>) -> Result<Vec<TokenId>, String> {
        let (stream, from, to): (usize, usize, usize) = step.want("tokens")?;
        let all = self.stream(stream)?;
        all.get(from..to)
            .map(<[TokenId]>::to_vec)
            .ok_or_else(|| format!("stream {stream} has no tokens {from} to {to}"))
    }

    fn stream(&self, stream: usize) -> Result<Vec<TokenId>, String> {
        let runs = self.case.streams.get(stream).ok_or_else(|| format!("stream {stream} is not there"))?;
        Ok(runs.iter().flat_map(|[first, count, step]| (0..*count).map(move |at| first + at * step)).collect())
    }

    fn observe(&self, field: &str, step: &Fields<'_>) -> Result<Value, String> {
        Ok(match field {
            "free" => {
                let tiers = (0u8..).zip(&self.case.config.tiers);
                let free = |(tier, groups): (u8, &Vec<u32>)| -> Vec<u32> {
                    (0..groups.len() as u8).map(|group| self.manager.free(tier, group)).collect()
                };
                json!(tiers.map(free).collect::<Vec<_>>())
            }
            "pages" => {
                let pages = self.manager.census().into_iter().map(|tiers| {
                    tiers.into_iter().map(|page| [page.locked, page.held, page.droppable]).collect::<Vec<_>>()
                });
                json!(pages.collect::<Vec<_>>())
            }
            "seq" => match self.manager.standing(step.sequence()?) {
                None => json!({ "state": "closed" }),
                Some(standing) => json!({
                    "K": standing.committed,
                    "H": standing.history,
                    "C": standing.capacity,
                    "state": match standing.phase { Phase::Active => "active", Phase::Suspended => "suspended" },
                }),
            },
            "probes" => {
                let probe = |(scope, stream, length): &(u64, usize, i64)| -> Result<Value, String> {
                    let (reuse, depth) = self.probe(*scope, *stream, *length)?;
                    Ok(json!([reuse, depth]))
                };
                Value::Array(self.case.probes.iter().map(probe).collect::<Result<_, _>>()?)
            }
            "end_points" => {
                let ends = |(scope, stream, lengths): &(u64, usize, Vec<i64>)| -> Result<Value, String> {
                    let mut found = Vec::new();
                    for length in lengths {
                        if i64::from(self.probe(*scope, *stream, *length)?.0) == *length {
                            found.push(*length);
                        }
                    }
                    Ok(json!(found))
                };
                Value::Array(self.case.end_point_candidates.iter().map(ends).collect::<Result<_, _>>()?)
            }
            _ => return Err(format!("after.{field} is not known")),
        })
    }

    fn probe(&self, scope: u64, stream: usize, length: i64) -> Result<(u32, u32), String> {
        let mut tokens = self.stream(stream)?;
        let all = tokens.len() as i64;
        tokens.truncate(if length < 0 { all + length } else { length }.max(0) as usize);
        Ok(self.manager.probe_path(&self.scope_at(scope)?, &tokens))
    }
}

fn answer(done: Result<Value, Error>) -> Value {
    done.unwrap_or_else(|error| {
        json!({ "error": match error.kind() {
            ErrorKind::Argument => "argument",
            ErrorKind::Logic => "logic",
            ErrorKind::Assertion => "assertion",
        } })
    })
}
