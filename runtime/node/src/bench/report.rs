//! What a run comes to: numbers under the names of vLLM's `bench serve`, as a table and as JSON.

use super::load::{Measured, Record};
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::str::FromStr;
use std::time::Duration;

/// A time that is measured of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

impl Metric {
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tpot, Self::Itl, Self::E2el];

    /// As flags and JSON have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Itl => "itl",
            Self::E2el => "e2el",
        }
    }

    /// As tables have it.
    pub fn title(self) -> String {
        self.name().to_uppercase()
    }

    const fn heading(self) -> &'static str {
        match self {
            Self::Ttft => "Time to First Token",
            Self::Tpot => "Time per Output Token (excl. 1st token)",
            Self::Itl => "Inter-token Latency",
            Self::E2el => "End-to-end Latency",
        }
    }

    /// What one request has of it.
    fn of(self, record: &Record) -> Vec<Duration> {
        let Ok(answer) = &record.outcome else { return Vec::new() };
        match self {
            Self::Ttft => vec![answer.ttft],
            Self::Tpot => answer.tpot().into_iter().collect(),
            Self::Itl => answer.gaps.clone(),
            Self::E2el => vec![answer.latency],
        }
    }
}

impl FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|metric| metric.name() == text.trim());
        found.ok_or_else(|| format!("{text:?} is no metric; metrics are {}", known()))
    }
}

/// What a good request keeps to: `ttft:200` is a first token within 200 ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    pub metric: Metric,
    pub ms: f64,
}

impl Objective {
    fn is_met_by(&self, record: &Record) -> bool {
        self.metric.of(record).iter().all(|time| time.as_secs_f64() * 1e3 <= self.ms)
    }
}

impl FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, ms) = text.split_once(':').ok_or_else(|| format!("{text:?} is not METRIC:MS, such as ttft:200"))?;
        let metric = name.parse()?;
        if metric == Metric::Itl {
            return Err("\"itl\" is of a token, not of a request; ttft, tpot and e2el can be asked for".into());
        }
        let ms = ms.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0);
        Ok(Self { metric, ms: ms.ok_or_else(|| format!("{text:?} has no number of milliseconds above 0"))? })
    }
}

/// How one metric is distributed, in milliseconds.
#[derive(Clone, Debug)]
pub struct Spread {
    micros: Histogram<u64>,
}

/// Digits of a time that are kept.
const DIGITS: u8 = 3;

impl Spread {
    pub fn new(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut micros = Histogram::new(DIGITS).expect("so many digits are allowed");
        for time in times {
            let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
            micros.record(us).expect("the histogram grows with its values");
        }
        Self { micros }
    }

    fn some(&self, ms: impl Fn(&Histogram<u64>) -> f64) -> Option<f64> {
        (!self.micros.is_empty()).then(|| ms(&self.micros) / 1e3)
    }

    pub fn mean(&self) -> Option<f64> {
        self.some(Histogram::mean)
    }

    pub fn deviation(&self) -> Option<f64> {
        self.some(Histogram::stdev)
    }

    pub fn percentile(&self, percentile: f64) -> Option<f64> {
        self.some(|micros| micros.value_at_percentile(percentile) as f64)
    }
}

/// What of a run is shown, and what counts as good.
#[derive(Clone, Debug)]
pub struct View {
    pub metrics: Vec<Metric>,
    pub percentiles: Vec<f64>,
    pub objectives: Vec<Objective>,
    /// Also the times of each request, in JSON.
    pub detailed: bool,
}

/// What one turn of all conversations came to.
#[derive(Clone, Debug)]
struct OfTurn {
    completed: u64,
    input_tokens: u64,
    cached_tokens: u64,
    ttft: Spread,
}

/// A run in numbers.
#[derive(Clone, Debug)]
pub struct Report {
    view: View,
    pub completed: u64,
    pub failed: u64,
    dropped: u64,
    unfinished: u64,
    stopped: bool,
    duration_s: f64,
    input_tokens: u64,
    output_tokens: u64,
    cached_tokens: u64,
    /// Answers whose tokens the server did not count.
    without_usage: u64,
    good: u64,
    spreads: Vec<(Metric, Spread)>,
    /// How often each kind of failure came, and the first of it in words.
    pub failures: BTreeMap<String, (u64, String)>,
    turns: Vec<OfTurn>,
    detail: Option<Value>,
}

impl Report {
    pub fn new(measured: &Measured, view: View) -> Self {
        let answers = || measured.records.iter().filter_map(|record| record.outcome.as_ref().ok());
        let usages = || answers().filter_map(|answer| answer.usage);
        let spread = |metric: Metric| Spread::new(measured.records.iter().flat_map(|record| metric.of(record)));
        let is_good = |record: &&Record| record.outcome.is_ok() && view.objectives.iter().all(|o| o.is_met_by(record));
        let mut failures = BTreeMap::new();
        for failure in measured.records.iter().filter_map(|record| record.outcome.as_ref().err()) {
            failures.entry(failure.kind()).or_insert_with(|| (0, failure.to_string())).0 += 1;
        }
        let completed = answers().count() as u64;
        Self {
            completed,
            failed: measured.records.len() as u64 - completed,
            dropped: measured.records.iter().map(|record| u64::from(record.dropped_turns)).sum(),
            unfinished: measured.unfinished,
            stopped: measured.stopped,
            duration_s: measured.duration.as_secs_f64(),
            input_tokens: usages().map(|usage| usage.prompt_tokens).sum(),
            output_tokens: answers().map(|answer| answer.output_tokens()).sum(),
            cached_tokens: usages().map(|usage| usage.cached_tokens).sum(),
            without_usage: completed - usages().count() as u64,
            good: measured.records.iter().filter(is_good).count() as u64,
            spreads: Metric::ALL.map(|metric| (metric, spread(metric))).to_vec(),
            failures,
            turns: by_turn(&measured.records),
            detail: view.detailed.then(|| detail(&measured.records)),
            view,
        }
    }

    fn per_s(&self, count: u64) -> f64 {
        if self.duration_s > 0.0 { count as f64 / self.duration_s } else { 0.0 }
    }

    /// Tokens of the prompts that the server had cached, of all; `None` if it counted none.
    pub fn cached_share(&self) -> Option<f64> {
        share(self.cached_tokens, self.input_tokens)
    }

    fn shown(&self) -> impl Iterator<Item = &(Metric, Spread)> {
        self.spreads.iter().filter(|(metric, _)| self.view.metrics.contains(metric))
    }

    pub fn spread(&self, metric: Metric) -> &Spread {
        let found = self.spreads.iter().find(|(of, _)| *of == metric);
        &found.expect("there is one of each").1
    }

    /// Writes the table; `header` are lines about what was run.
    ///
    /// # Errors
    /// Writing failed.
    pub fn write_table(&self, header: &[(&str, String)], out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "{}", titled(" Serving Benchmark Result ", '='))?;
        let mut line = |name: &str, value: &dyn std::fmt::Display| writeln!(out, "{name:<40} {value:<10}");
        line("Successful requests:", &self.completed)?;
        line("Failed requests:", &self.failed)?;
        for (kind, (count, _)) in &self.failures {
            line(&format!("  {kind}:"), count)?;
        }
        for (name, count) in [
            ("Turns not sent after a failure:", self.dropped),
            ("Requests not finished (interrupted):", self.unfinished),
            ("Answers without usage (events counted):", self.without_usage),
        ] {
            if count > 0 {
                line(name, &count)?;
            }
        }
        for (name, value) in header {
            line(&format!("{name}:"), value)?;
        }
        let two = |value: f64| format!("{value:.2}");
        line("Benchmark duration (s):", &two(self.duration_s))?;
        line("Total input tokens:", &self.input_tokens)?;
        if let Some(share) = self.cached_share() {
            line("Cached input tokens (%):", &two(share * 100.0))?;
        }
        line("Total generated tokens:", &self.output_tokens)?;
        line("Request throughput (req/s):", &two(self.per_s(self.completed)))?;
        if !self.view.objectives.is_empty() {
            line("Request goodput (req/s):", &two(self.per_s(self.good)))?;
        }
        line("Output token throughput (tok/s):", &two(self.per_s(self.output_tokens)))?;
        line("Total token throughput (tok/s):", &two(self.per_s(self.input_tokens + self.output_tokens)))?;
        for (metric, spread) in self.shown() {
            writeln!(out, "{}", titled(metric.heading(), '-'))?;
            let mut line = |name: &str, ms: Option<f64>| {
                let ms = ms.map_or_else(|| "-".into(), two);
                writeln!(out, "{:<40} {ms:<10}", format!("{name} {} (ms):", metric.title()))
            };
            line("Mean", spread.mean())?;
            line("Median", spread.percentile(50.0))?;
            for percentile in &self.view.percentiles {
                line(&format!("P{percentile}"), spread.percentile(*percentile))?;
            }
        }
        if self.turns.len() > 1 {
            writeln!(out, "{}", titled("Turns", '-'))?;
            for (turn, of) in self.turns.iter().enumerate() {
                let ttft = of.ttft.percentile(50.0).map_or_else(|| "-".into(), two);
                let cached = share(of.cached_tokens, of.input_tokens).map_or_else(|| "-".into(), |s| two(s * 100.0));
                writeln!(out, "{:<40} {ttft} / {cached}", format!("{}: median TTFT (ms) / cached (%):", turn + 1))?;
            }
        }
        writeln!(out, "{}", "=".repeat(COLUMNS))
    }

    /// All numbers as one object; `about` is what was run.
    pub fn to_json(&self, about: Map<String, Value>) -> Value {
        let mut all = about;
        let failures = self
            .failures
            .iter()
            .map(|(kind, (count, first))| (kind.clone(), json!({ "count": count, "first": first })));
        let numbers = json!({
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "failures": failures.collect::<Map<_, _>>(),
            "dropped_turns": self.dropped,
            "interrupted": self.stopped,
            "unfinished": self.unfinished,
            "without_usage": self.without_usage,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
            "cached_tokens_share": self.cached_share(),
            "request_throughput": self.per_s(self.completed),
            "request_goodput": (!self.view.objectives.is_empty()).then(|| self.per_s(self.good)),
            "output_throughput": self.per_s(self.output_tokens),
            "total_token_throughput": self.per_s(self.input_tokens + self.output_tokens),
        });
        let turns = self.turns.iter().enumerate().map(|(turn, of)| {
            json!({
                "turn": turn + 1,
                "completed": of.completed,
                "median_ttft_ms": of.ttft.percentile(50.0),
                "cached_tokens_share": share(of.cached_tokens, of.input_tokens),
            })
        });
        all.extend(fields(numbers));
        all.insert("turns".into(), turns.collect());
        for (metric, spread) in self.shown() {
            let name = metric.name();
            all.insert(format!("mean_{name}_ms"), json!(spread.mean()));
            all.insert(format!("median_{name}_ms"), json!(spread.percentile(50.0)));
            all.insert(format!("std_{name}_ms"), json!(spread.deviation()));
            for percentile in &self.view.percentiles {
                all.insert(format!("p{percentile}_{name}_ms"), json!(spread.percentile(*percentile)));
            }
        }
        all.extend(self.detail.clone().map(fields).unwrap_or_default());
        Value::Object(all)
    }
}

fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// Columns of the table.
const COLUMNS: usize = 50;

fn titled(title: &str, line: char) -> String {
    let around = COLUMNS.saturating_sub(title.chars().count());
    let line = |length: usize| std::iter::repeat_n(line, length).collect::<String>();
    format!("{}{title}{}", line(around / 2), line(around - around / 2))
}

fn by_turn(records: &[Record]) -> Vec<OfTurn> {
    let turns = records.iter().map(|record| record.turn + 1).max().unwrap_or(0);
    let of = |turn: u32| {
        let answers = || {
            let of_turn = records.iter().filter(move |record| record.turn == turn);
            of_turn.filter_map(|record| record.outcome.as_ref().ok())
        };
        OfTurn {
            completed: answers().count() as u64,
            input_tokens: answers().filter_map(|answer| answer.usage).map(|usage| usage.prompt_tokens).sum(),
            cached_tokens: answers().filter_map(|answer| answer.usage).map(|usage| usage.cached_tokens).sum(),
            ttft: Spread::new(answers().map(|answer| answer.ttft)),
        }
    };
    (0..turns).map(of).collect()
}

/// The times of each request in the order in which they were due, with vLLM's names, in seconds.
fn detail(records: &[Record]) -> Value {
    let mut sorted: Vec<&Record> = records.iter().collect();
    sorted.sort_by_key(|record| (record.due, record.conversation, record.turn));
    let each = |of: fn(&Record) -> Value| sorted.iter().map(|record| of(record)).collect::<Value>();
    json!({
        "start_times": each(|record| json!(record.due.as_secs_f64())),
        "input_lens": each(|record| json!(record.outcome.as_ref().ok().and_then(|a| a.usage).map(|u| u.prompt_tokens))),
        "output_lens": each(|record| json!(record.outcome.as_ref().map_or(0, |answer| answer.output_tokens()))),
        "ttfts": each(|record| json!(record.outcome.as_ref().ok().map(|answer| answer.ttft.as_secs_f64()))),
        "latencies": each(|record| json!(record.outcome.as_ref().ok().map(|answer| answer.latency.as_secs_f64()))),
        "itls": each(|record| Metric::Itl.of(record).iter().map(Duration::as_secs_f64).collect()),
        "errors": each(|record| json!(record.outcome.as_ref().err().map(ToString::to_string).unwrap_or_default())),
    })
}
