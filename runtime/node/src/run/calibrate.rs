//! `starling calibrate`: what this machine and this model make of steps.

use crate::assembly::{LoadError, Loaded};
use crate::cli::Exit;
use crate::cli::calibrate::Calibrate;
use crate::config::{Config, ConfigError};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};
use starling_actors::ActorError;
use starling_gpu::calibrate::{
    CONTEXT, CalibrateError, Calibration, Costs, StepTimes, fma_gflops, load_average, median, read_gb_s,
};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
enum CalibrateRunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("cannot make the backend: {0}")]
    Backend(ActorError),
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
}

impl From<&CalibrateRunError> for Exit {
    fn from(error: &CalibrateRunError) -> Self {
        match error {
            CalibrateRunError::Config(error) => error.into(),
            CalibrateRunError::Load(LoadError::Fetch(error)) => error.into(),
            CalibrateRunError::Load(_) | CalibrateRunError::Backend(_) => Self::Unavailable,
            CalibrateRunError::Calibrate(_) | CalibrateRunError::Write(_) => Self::Failed,
        }
    }
}

/// Runs `starling calibrate`.
pub fn calibrate(command: &Calibrate) -> Exit {
    match run(command, &mut io::stdout().lock()) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            eprintln!("error: {error}");
            (&error).into()
        }
    }
}

fn run(command: &Calibrate, out: &mut impl Write) -> Result<(), CalibrateRunError> {
    let mut config = Config::load(&command.sources())?;
    // One rank with all threads, however many a node would have.
    config.ranks.count = 1;
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let threads = *config.engine.threads.get_or_insert_with(cores);
    let mut loaded = Loaded::load(&config)?;
    loaded.set_blocks(Calibration::blocks_needed(command.runs, config.engine.block_tokens));
    let calibration = Calibration::new(command.runs, loaded.bounds())?;
    let mut backend =
        loaded.backends(&config).backend(starling_serving::LocalRank(0)).map_err(CalibrateRunError::Backend)?;

    let load = load_average();
    // The first raises the clock.
    let _ = fma_gflops(1);
    let machine = Machine {
        load,
        fma_gflops: [fma_gflops(1), fma_gflops(2)],
        read_gb_s: median((0..command.runs).map(|_| read_gb_s()).collect()),
    };
    let bar = bar(calibration.steps());
    let times = calibration.measure(&mut *backend, || bar.inc(1))?;
    bar.finish_and_clear();
    if machine.is_shared() {
        eprintln!("warning: others are at work on this machine, so the times are longer than they need be");
    }
    if command.json {
        let mut object = to_json(&machine, &times);
        object["model"] = config.model.id().into();
        object["arithmetic"] = json!(config.engine.arithmetic);
        object["threads"] = threads.into();
        return Ok(writeln!(out, "{object}")?);
    }
    let (model, arithmetic) = (config.model.id(), json!(config.engine.arithmetic));
    let arithmetic = arithmetic.as_str().unwrap_or_default();
    writeln!(out, "model {model}, {arithmetic}, threads {threads}, context {CONTEXT}, medians of {}", command.runs)?;
    Ok(write_text(&machine, &times, out)?)
}

/// What was measured without a model.
struct Machine {
    /// Before anything was measured.
    load: Option<f64>,
    /// Of one thread and of two.
    fma_gflops: [Option<f64>; 2],
    read_gb_s: f64,
}

impl Machine {
    /// Whether somebody else computes: before, or while two threads got in each other's way.
    fn is_shared(&self) -> bool {
        let slowed = matches!(self.fma_gflops, [Some(one), Some(two)] if two < 1.8 * one);
        slowed || self.load.is_some_and(|load| load >= LOAD_MAX)
    }
}

/// Load average of a machine that has nothing else to do, at most.
const LOAD_MAX: f64 = 1.0;

fn to_json(machine: &Machine, times: &StepTimes) -> Value {
    let decode = times.decode_tok_s().into_iter().map(|(batch, rate)| (batch.to_string(), json!(rate)));
    let [one, two] = machine.fma_gflops;
    let Costs { prefill_per_token, decode_per_step, decode_per_sequence } = times.costs();
    json!({
        format!("prefill_{CONTEXT}_tok_s"): times.prefill_tok_s(),
        "decode_tok_s": decode.collect::<Map<_, _>>(),
        "read_gb_s": machine.read_gb_s,
        "fma_gflops": { "1": one, "2": two },
        "load": machine.load,
        "timed": {
            "prefill-per-token": period(prefill_per_token),
            "decode-per-step": period(decode_per_step),
            "decode-per-sequence": period(decode_per_sequence),
        },
    })
}

fn write_text(machine: &Machine, times: &StepTimes, out: &mut impl Write) -> io::Result<()> {
    let unknown = || "unknown".to_owned();
    let load = machine.load.map_or_else(unknown, |load| format!("{load:.2}"));
    writeln!(out, "load average before: {load}")?;
    if let [Some(one), Some(two)] = machine.fma_gflops {
        writeln!(out, "f32 multiply-add: {one:.0} GFLOP/s on 1 thread, {two:.0} on 2 ({:.2} x)", two / one)?;
    }
    writeln!(out, "memory: {:.1} GB/s read by 1 thread", machine.read_gb_s)?;
    writeln!(out, "prefill {CONTEXT}: {:.1} tok/s", times.prefill_tok_s())?;
    for ((batch, rate), s) in times.decode_tok_s().into_iter().zip(times.decode_s) {
        let sequences = if batch == 1 { "sequence" } else { "sequences" };
        writeln!(out, "decode, {batch} {sequences}: {rate:.1} tok/s ({:.2} ms a step)", s * 1e3)?;
    }
    let Costs { prefill_per_token, decode_per_step, decode_per_sequence } = times.costs();
    writeln!(out, "\n[engine.timed]")?;
    writeln!(out, "prefill-per-token = {:?}", period(prefill_per_token))?;
    writeln!(out, "decode-per-step = {:?}", period(decode_per_step))?;
    writeln!(out, "decode-per-sequence = {:?}", period(decode_per_sequence))
}

/// As the configuration has it; microseconds where they are exact enough.
fn period(cost: Duration) -> String {
    match cost.as_nanos() {
        nanos @ 0..100_000 => format!("{nanos}ns"),
        nanos => format!("{}us", (nanos + 500) / 1_000),
    }
}

fn bar(steps: u32) -> ProgressBar {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(u64::from(steps)), target);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} steps").expect("the template is sound"));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Period, Sources};
    use starling_gpu::calibrate::BATCHES;

    const MACHINE: Machine = Machine { load: Some(0.5), fma_gflops: [Some(80.0), Some(160.0)], read_gb_s: 28.0 };

    fn times() -> StepTimes {
        StepTimes { prefill_s: 0.512, decode_s: BATCHES.map(|batch| 0.010 + 0.002 * batch as f64) }
    }

    #[test]
    fn the_table_that_is_printed_can_be_pasted_into_a_configuration() {
        let mut text = Vec::new();
        write_text(&MACHINE, &times(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let table = &text[text.find("[engine.timed]").unwrap()..];
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("node.toml");
        std::fs::write(&file, table).unwrap();
        let config = Config::load(&Sources { file: Some(file), ..Sources::default() }).unwrap();
        let timed = config.engine.timed;
        assert_eq!(timed.prefill_per_token, Period::millis(1));
        assert_eq!((timed.decode_per_step, timed.decode_per_sequence), (Period::millis(10), Period::millis(2)));
    }

    #[test]
    fn the_object_has_the_names_that_scripts_read() {
        let object = to_json(&MACHINE, &times());
        assert_eq!(object["decode_tok_s"]["16"].as_f64().unwrap().round(), 381.0);
        assert_eq!(object["prefill_512_tok_s"].as_f64().unwrap().round(), 1000.0);
        assert_eq!((&object["fma_gflops"]["2"], &object["read_gb_s"]), (&json!(160.0), &json!(28.0)));
        assert_eq!((&object["load"], &object["timed"]["decode-per-step"]), (&json!(0.5), &json!("10000us")));
    }

    #[test]
    fn a_machine_is_shared_if_it_was_busy_or_its_threads_slow_each_other() {
        assert!(!MACHINE.is_shared());
        assert!(Machine { load: Some(1.5), ..MACHINE }.is_shared());
        assert!(Machine { fma_gflops: [Some(80.0), Some(120.0)], ..MACHINE }.is_shared());
        assert!(!Machine { load: None, fma_gflops: [None, None], ..MACHINE }.is_shared());
    }

    #[test]
    fn short_times_keep_their_nanoseconds() {
        let written = [0, 99_999, 100_000, 1_499_500].map(|nanos| period(Duration::from_nanos(nanos)));
        assert_eq!(written, ["0ns", "99999ns", "100us", "1500us"]);
    }
}
