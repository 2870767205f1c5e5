use super::*;
use crate::check::Checker;
use starling_core::step::Sampled;
use std::num::NonZeroU32;

fn bounds() -> Bounds {
    let window = Retention::Window { tokens: NonZeroU32::MIN, sink_blocks: 0 };
    let pools = [Retention::Full, window, Retention::State].map(|retention| Pool { retention, blocks: 16 * 33 });
    Bounds { pools: pools.to_vec(), block_tokens: 16, vocabulary: 100, context: 1024 }
}

/// Checks each step as every backend does, and keeps how many slices and tokens it had.
#[derive(Default)]
struct Recorder {
    checker: Checker,
    steps: Vec<(usize, usize)>,
    positions: Vec<u32>,
}

impl Backend for Recorder {
    fn step(&mut self, step: &Step, _: &mut Vec<Sampled>) -> Result<(), StepError> {
        self.checker.check(step, &bounds())?;
        self.steps.push((step.slices.len(), step.tokens()));
        self.positions.extend(step.slices.iter().map(|slice| slice.start));
        Ok(())
    }
}

#[test]
fn measures_the_steps_that_it_names_and_no_others() {
    let calibration = Calibration::new(2, bounds()).unwrap();
    let (mut backend, mut done) = (Recorder::default(), 0);
    calibration.measure(&mut backend, || done += 1).unwrap();
    let prefills = vec![(1, 512); 2 + 15];
    let decodes = BATCHES.iter().flat_map(|batch| vec![(*batch, *batch); 8]);
    assert_eq!(backend.steps, prefills.into_iter().chain(decodes).collect::<Vec<_>>());
    assert_eq!(done, calibration.steps());
    assert!(backend.positions.iter().all(|start| *start == 0 || (512..520).contains(start)));
}

#[test]
fn refuses_what_it_cannot_measure() {
    let wrong = |runs, bounds| Calibration::new(runs, bounds).err().unwrap().to_string();
    assert_eq!(wrong(0, bounds()), "runs must be at least 1");
    let short = Bounds { context: 519, ..bounds() };
    assert_eq!(wrong(2, short), "a sequence of 520 tokens does not fit the context of the model (519)");
    let mut small = bounds();
    small.pools[1].blocks -= 1;
    assert_eq!(wrong(2, small), "KV pool of life cycle 1 has 527 blocks, 528 are needed");
    assert_eq!(Calibration::blocks_needed(2, 16), 16 * 33);
    assert!(wrong(u32::MAX, bounds()).contains("does not fit"));
}

#[test]
fn costs_give_back_times_that_lie_on_a_line() {
    let times = StepTimes { prefill_s: 0.512, decode_s: BATCHES.map(|batch| 0.010 + 0.002 * batch as f64) };
    let costs = times.costs();
    assert_eq!(costs.prefill_per_token, Duration::from_millis(1));
    let near = |cost: Duration, s: f64| (cost.as_secs_f64() - s).abs() < 1e-8;
    assert!(near(costs.decode_per_step, 0.010) && near(costs.decode_per_sequence, 0.002), "{costs:?}");
    let rates = times.decode_tok_s();
    assert!((times.prefill_tok_s() - 1000.0).abs() < 1e-9 && (rates[2].1 - 16.0 / 0.042).abs() < 1e-9, "{rates:?}");
}

#[test]
fn costs_are_never_negative() {
    let costs = |decode_s| StepTimes { prefill_s: 1.0, decode_s }.costs();
    let falling = costs([0.030, 0.020, 0.010]);
    assert_eq!(falling.decode_per_sequence, Duration::ZERO);
    assert!((0.010..0.030).contains(&falling.decode_per_step.as_secs_f64()), "{falling:?}");
    let steep = costs([0.001, 0.010, 0.100]);
    assert_eq!(steep.decode_per_step, Duration::ZERO);
    assert!((0.001..0.00625).contains(&steep.decode_per_sequence.as_secs_f64()), "{steep:?}");
}

#[test]
fn the_median_is_the_middle_one() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 3.0);
}
