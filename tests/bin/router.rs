//! Runs router vectors: each line of a file is a sequence that starts with a fresh router and queue.

use crate::vectors::{self, Tally, lines, stem};
use serde::Deserialize;
use serde_json::Value;
use starling_core::admission::{self, Admission, Admitted, Limits, Pass, Priority, Queue, Waiting};
use starling_core::ids::{ConversationKey, RequestNumber};
use starling_core::placement::{
    Config, CountChildren, Matches, NewConversations, Placement, Policy, RankLoad, Router, Routing, balance, padding,
    permutation,
};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Mismatches that are shown of each file.
const SHOWN_MAX: usize = 5;

type Verdict = Result<(), String>;

/// `router DIR`: a line a family, then the sum; fails if anything failed or nothing was run.
#[allow(dead_code)] // the test runs folders without the command line
pub fn main(args: &[String]) -> ExitCode {
    let [folder] = args else {
        let _ = writeln!(std::io::stderr(), "usage: conformance router DIR");
        return ExitCode::FAILURE;
    };
    vectors::print_folder(folder, run_file)
}

#[allow(dead_code)] // the command prints it
pub fn run_folder(folder: &Path, report: &mut dyn FnMut(&str)) -> std::io::Result<Tally> {
    vectors::run_folder(folder, report, run_file)
}

/// A line that cannot be read counts as failed, and so does a file that ends badly.
pub fn run_file(file: &Path, report: &mut dyn FnMut(&str)) -> Tally {
    let name = stem(file).unwrap_or("?");
    let mut tally = Tally::default();
    let mut shown = 0;
    let mut described = false;
    let mut count = |verdict: Verdict, line: usize, report: &mut dyn FnMut(&str)| match verdict {
        Ok(()) => tally.passed += 1,
        Err(why) => {
            tally.failed += 1;
            shown += 1;
            if shown <= SHOWN_MAX {
                report(&format!("{name} line {line}: {why}"));
            }
        }
    };
    match lines(file) {
        Ok(lines) => {
            for (at, line) in lines.enumerate() {
                let line = match line {
                    Ok(line) => line,
                    Err(error) => {
                        count(Err(error.to_string()), at + 1, report);
                        break;
                    }
                };
                match run_line(&line) {
                    Ran::Judged(verdict) => count(verdict, at + 1, report),
                    Ran::Described => described = true,
                    Ran::Blank => {}
                }
            }
        }
        Err(error) => count(Err(error.to_string()), 0, report),
    }
    // A file that only describes inputs has nothing to pass.
    if tally != Tally::default() || !described {
        report(&format!("{name} {} passed, {} failed", tally.passed, tally.failed));
    }
    tally
}

enum Ran {
    Judged(Verdict),
    /// An input without an expected result.
    Described,
    Blank,
}

#[derive(Deserialize)]
struct Kind {
    router: Option<String>,
    perm: Option<Vec<u32>>,
    case: Option<String>,
}

fn run_line(line: &str) -> Ran {
    if line.trim().is_empty() {
        return Ran::Blank;
    }
    let kind: Kind = match serde_json::from_str(line) {
        Ok(kind) => kind,
        Err(error) => return Ran::Judged(Err(error.to_string())),
    };
    let router = match (&kind.router, &kind.perm, &kind.case) {
        (Some(router), ..) => router.as_str(),
        (None, Some(_), _) => "rng",
        (None, None, Some(_)) => return Ran::Described,
        (None, None, None) => return Ran::Judged(Err("neither a sequence nor a permutation".to_owned())),
    };
    Ran::Judged(match router {
        "rng" => read(line).and_then(Permutation::run),
        "pad" => read(line).and_then(Pad::run),
        "balance" => read(line).and_then(Balance::run),
        "default" | "kv_aware" | "conversation" | "system" | "admission" => {
            read(line).and_then(|sequence: Sequence| Run::new(&sequence)?.all(&sequence))
        }
        other => Err(format!("unknown router {other:?}")),
    })
}

fn read<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| error.to_string())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, wanted: &T) -> Verdict {
    if got == wanted { Ok(()) } else { Err(format!("{what} is {got:?}, should be {wanted:?}")) }
}

#[derive(Deserialize)]
struct Permutation {
    seed: u64,
    n: u32,
    perm: Vec<u32>,
}

impl Permutation {
    fn run(self) -> Verdict {
        same("perm", &permutation(self.seed, self.n), &self.perm)
    }
}

#[derive(Deserialize)]
struct Pad {
    expected: u32,
    active: String,
    attention_dp: bool,
    exclude_retiring: bool,
    disagg: bool,
    benchmark_fill: bool,
    needs_dummy: bool,
}

impl Pad {
    fn run(self) -> Verdict {
        let of = |letters: &str| self.active.chars().filter(|letter| letters.contains(*letter)).count() as u32;
        same("unknown letters", &(self.active.chars().count() as u32 - of("RTIX")), &0)?;
        let rank =
            padding::Occupancy { expected: self.expected, active: of("RTIX"), retiring: of("T"), receiving: of("IX") };
        let mode = padding::Mode {
            attention_dp: self.attention_dp,
            exclude_retiring: self.exclude_retiring,
            disaggregated: self.disagg,
            benchmark_fill: self.benchmark_fill,
        };
        same("needs_dummy", &padding::needs_dummy(mode, rank), &self.needs_dummy)
    }
}

#[derive(Deserialize)]
struct BalanceSettings {
    max_batch_size: u32,
    timeout_iters: u32,
    batching_wait_iters: u32,
    min_generation_requests: u32,
    low_occupancy_timeout_iters: u32,
}

#[derive(Deserialize)]
struct BalanceStep {
    ranks: Vec<[u32; 3]>,
    release: bool,
    ctx_wait: u32,
    batch_wait: u32,
}

#[derive(Deserialize)]
struct Balance {
    cfg: BalanceSettings,
    iters: Vec<BalanceStep>,
}

impl Balance {
    fn run(self) -> Verdict {
        let settings = balance::Settings {
            max_batch_size: self.cfg.max_batch_size,
            timeout_steps: self.cfg.timeout_iters,
            batching_wait_steps: self.cfg.batching_wait_iters,
            min_generation_requests: self.cfg.min_generation_requests,
            low_occupancy_timeout_steps: self.cfg.low_occupancy_timeout_iters,
        };
        let mut gate = balance::Gate::default();
        for (at, step) in self.iters.iter().enumerate() {
            let work = |[context, generation, generation_real]: &[u32; 3]| balance::RankWork {
                context: *context,
                generation: *generation,
                generation_real: *generation_real,
            };
            let ranks: Vec<balance::RankWork> = step.ranks.iter().map(work).collect();
            let release = gate.step(&settings, &ranks) == balance::Verdict::Release;
            same("release", &release, &step.release)
                .and_then(|()| same("ctx_wait", &gate.waited, &step.ctx_wait))
                .and_then(|()| same("batch_wait", &gate.batched, &step.batch_wait))
                .map_err(|why| format!("iteration {at}: {why}"))?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Sequence {
    router: String,
    ranks: u32,
    cap: u32,
    cfg: Value,
    iters: Vec<Iteration>,
    lru: Option<Vec<(String, u32)>>,
}

#[derive(Deserialize)]
struct Iteration {
    rs: Vec<(u32, u64)>,
    #[serde(default)]
    rq: Vec<Request>,
    #[serde(default)]
    cancel: Vec<u64>,
    #[serde(default)]
    arr: Vec<Request>,
    budget: Option<i64>,
    out: Option<Vec<Vec<u64>>>,
    exp: Option<u32>,
    cur: Option<u32>,
    pend: Option<Vec<u32>>,
    drop: Option<Vec<u64>>,
    adm: Option<Vec<u64>>,
    q: Option<Vec<u64>>,
    def: Option<Vec<(u64, u32)>>,
}

#[derive(Deserialize)]
struct Request {
    id: u64,
    n: u32,
    #[serde(default)]
    t: Vec<(u32, u32)>,
    #[serde(default)]
    m: Vec<u32>,
    c: Option<String>,
    sa: Option<String>,
    r: Option<u32>,
    x: Option<bool>,
    p: Option<f64>,
    #[serde(default)]
    k: u32,
}

/// One sequence under way.
struct Run {
    router: Router,
    queue: Queue,
    count_children: CountChildren,
    attention_dp: bool,
    cap: u32,
    ranks: u32,
    /// Conversation names; a key is a place in this list, from 1.
    names: Vec<String>,
    /// Ids by request number where requests queue: numbers are given in order of arrival.
    ids: Vec<u64>,
    matches: Rows,
    admission: Admission,
    placement: Placement,
}

#[derive(Default)]
struct Rows(BTreeMap<RequestNumber, Vec<u32>>);

impl Matches for Rows {
    fn row(&self, request: RequestNumber) -> &[u32] {
        self.0.row(request)
    }
}

impl Run {
    fn new(sequence: &Sequence) -> Result<Self, String> {
        let cfg = &sequence.cfg;
        let number = |name: &str, default: f64| cfg.get(name).and_then(Value::as_f64).unwrap_or(default);
        let switch = |name: &str| cfg.get(name).and_then(Value::as_bool).unwrap_or(false);
        let whole = |name: &str, default: u64| {
            let value = cfg.get(name).and_then(Value::as_u64).unwrap_or(default);
            u32::try_from(value).map_err(|_| format!("cfg.{name} is {value}"))
        };
        let name = cfg.get("placement").and_then(Value::as_str).unwrap_or("round_robin");
        let (new_conversations, warning) = NewConversations::from_name(name);
        if let Some(warning) = warning {
            return Err(warning.to_string());
        }
        let queue = match cfg.get("policy").and_then(Value::as_str) {
            None | Some("fcfs") => admission::Policy::Fcfs,
            Some("priority") => admission::Policy::Priority,
            Some(other) => return Err(format!("cfg.policy is {other:?}")),
        };
        let count_children = if switch("count_children") { CountChildren::Vectors } else { CountChildren::Upstream };
        let config = Config {
            policy: match sequence.router.as_str() {
                "default" => Policy::Balanced,
                "kv_aware" => Policy::KvAware,
                _ => Policy::Conversation,
            },
            queue,
            count_children,
            new_conversations,
            conversations_max: whole("max_sessions", 65_536)?,
            strict_affinity: switch("strict"),
            strict_affinity_max_wait_passes: whole("max_wait_iters", 2_000)?,
            fair_share_multiplier: number("fair_share_multiplier", 2.0),
            load_weight: number("load_balance_weight", 1.0),
            match_threshold: number("match_rate_threshold", 0.1),
            cold_start_warmup: switch("cold_start_warmup"),
            ..Config::default()
        };
        Ok(Self {
            router: Router::new(&config, config.bound(true), sequence.ranks),
            queue: Queue::new(queue),
            count_children,
            attention_dp: cfg.get("attention_dp").and_then(Value::as_bool).unwrap_or(true),
            cap: sequence.cap,
            ranks: sequence.ranks,
            names: Vec::new(),
            ids: Vec::new(),
            matches: Rows::default(),
            admission: Admission::default(),
            placement: Placement::default(),
        })
    }

    fn all(mut self, sequence: &Sequence) -> Verdict {
        for (at, iteration) in sequence.iters.iter().enumerate() {
            self.step(&sequence.router, iteration).map_err(|why| format!("iteration {at}: {why}"))?;
            self.router.check(self.ranks);
        }
        self.queue.check();
        if let (Some(wanted), Router::Conversation(router)) = (&sequence.lru, &self.router) {
            let name = |key: ConversationKey| self.names[key.0 as usize - 1].clone();
            let got: Vec<(String, u32)> = router.table().iter().map(|(key, rank)| (name(key), rank)).collect();
            same("lru", &got, wanted)?;
        }
        Ok(())
    }

    fn step(&mut self, family: &str, iteration: &Iteration) -> Verdict {
        if family == "admission" || family == "system" {
            self.admit(iteration)?;
            if family == "admission" {
                return Ok(());
            }
            let batch = std::mem::take(&mut self.admission.admitted);
            let ids: Vec<u64> = batch.iter().map(|admitted| self.id(admitted.request.number)).collect();
            return self.place(iteration, &batch, &ids);
        }
        self.matches.0.clear();
        let mut batch = Vec::with_capacity(iteration.rq.len());
        for request in &iteration.rq {
            let number = RequestNumber(request.id);
            if !request.m.is_empty() {
                self.matches.0.insert(number, request.m.clone());
            }
            let request = self.waiting(request, number)?;
            batch.push(Admitted { request, reserved: None });
        }
        let ids: Vec<u64> = iteration.rq.iter().map(|request| request.id).collect();
        self.place(iteration, &batch, &ids)
    }

    fn admit(&mut self, iteration: &Iteration) -> Verdict {
        for id in &iteration.cancel {
            let queued = self.queue.iter().map(|request| request.number).find(|number| self.id(*number) == *id);
            if let Some(number) = queued {
                self.queue.remove(number);
            }
        }
        for request in &iteration.arr {
            let number = RequestNumber(self.ids.len() as u64);
            self.ids.push(request.id);
            let request = self.waiting(request, number)?;
            let limits = Limits { ranks: self.ranks, cap: u32::MAX, count_children: self.count_children };
            limits.vet(&request).and_then(|()| self.queue.push(request)).map_err(|refusal| refusal.to_string())?;
        }
        let counts: Vec<u32> = iteration.rs.iter().map(|(active, _)| *active).collect();
        let budget = admission::budget(&counts, &[], self.cap);
        if let Some(wanted) = iteration.budget {
            same("budget", &budget, &(wanted.max(0) as u64))?;
        }
        let pass = Pass {
            only: None,
            budget,
            cap: self.cap,
            counts: if self.attention_dp { &counts } else { &[] },
            held: &[],
            now_us: 0,
            count_children: self.count_children,
        };
        let router = &self.router;
        self.queue.admit(&pass, |request| router.admission_rank(request, 0), &mut self.admission);
        let admitted: Vec<u64> =
            self.admission.admitted.iter().map(|admitted| self.id(admitted.request.number)).collect();
        let queued: Vec<u64> = self.queue.iter().map(|request| self.id(request.number)).collect();
        let deferred: Vec<(u64, u32)> = self
            .queue
            .iter()
            .filter(|request| request.deferrals > 0)
            .map(|request| (self.id(request.number), request.deferrals))
            .collect();
        same("adm", &Some(admitted), &iteration.adm)?;
        same("q", &Some(queued), &iteration.q)?;
        same("def", &deferred, &iteration.def.clone().unwrap_or_default())
    }

    fn place(&mut self, iteration: &Iteration, batch: &[Admitted], ids: &[u64]) -> Verdict {
        let load = |(active_requests, active_tokens): &(u32, u64)| RankLoad {
            active_requests: *active_requests,
            active_tokens: *active_tokens,
        };
        let loads: Vec<RankLoad> = iteration.rs.iter().map(load).collect();
        let routing = Routing { loads: &loads, cap: self.cap, held: &[], now_us: 0, matches: &self.matches };
        self.router.route(&routing, batch, &mut self.placement);
        self.placement.check(batch.len(), loads.len());
        let mut out = vec![Vec::new(); loads.len()];
        for assigned in &self.placement.assigned {
            out[assigned.rank as usize].push(ids[assigned.index as usize]);
        }
        let dropped: Vec<u64> = self.placement.dropped.iter().map(|index| ids[*index as usize]).collect();
        same("out", &Some(out), &iteration.out)?;
        same("exp", &Some(self.placement.expected), &iteration.exp)?;
        same("drop", &dropped, &iteration.drop.clone().unwrap_or_default())?;
        match (&self.router, iteration.cur, &iteration.pend) {
            (Router::Conversation(router), Some(cursor), _) => same("cur", &router.cursor(), &cursor),
            (Router::KvAware(router), _, Some(pending)) => same("pend", &router.pending().to_vec(), pending),
            (_, None, None) => Ok(()),
            _ => Err("expects state that this router does not have".to_owned()),
        }
    }

    fn id(&self, number: RequestNumber) -> u64 {
        self.ids[number.0 as usize]
    }

    fn waiting(&mut self, request: &Request, number: RequestNumber) -> Result<Waiting, String> {
        let sub_agent = request.sa.as_ref().filter(|name| !name.is_empty()).map(|name| self.key(name));
        let conversation = request.c.as_ref().map(|name| self.key(name));
        let priority = request.p.map_or(Some(Priority::default()), Priority::new);
        let runs = request.t.iter().flat_map(|(token, count)| std::iter::repeat_n(*token, *count as usize));
        Ok(Waiting {
            number,
            tokens: request.n,
            children: request.k,
            explicit: request.r,
            relax: request.x,
            affinity: admission::affinity(sub_agent, conversation),
            priority: priority.ok_or("priority is not finite")?,
            head: runs.take(admission::HEAD_TOKENS).collect(),
            ..Waiting::default()
        })
    }

    fn key(&mut self, name: &str) -> ConversationKey {
        let known = self.names.iter().position(|known| known == name);
        let place = known.unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        ConversationKey(place as u128 + 1)
    }
}
