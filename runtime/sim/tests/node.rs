//! Seeds of a node under faults: no token lost, repeated or wrong, nothing leaked, everything answered.

use starling_core::placement::Policy;
use starling_sim::{Report, Scenario, Simulation};

fn run(seed: u64, scenario: &Scenario) -> Report {
    Simulation::new(seed, scenario.clone()).run().unwrap_or_else(|what| panic!("seed {seed} of {scenario:?}: {what}"))
}

#[test]
fn streams_survive_crashes_restarts_and_clients_that_leave() {
    let mut seen = Report::default();
    for seed in 0..100 {
        let report = run(seed, &Scenario::default());
        assert_eq!(report.failed, 0, "seed {seed}: nothing fails for good");
        seen.ended += report.ended;
        seen.left += report.left;
        seen.rank_crashes += report.rank_crashes;
        seen.control_restarts += report.control_restarts;
        seen.attempts_lost += report.attempts_lost;
        seen.preemptions += report.preemptions;
    }
    // The runs were worth something only if all of this happened.
    let happened =
        [seen.ended, seen.left, seen.rank_crashes, seen.control_restarts, seen.attempts_lost, seen.preemptions];
    assert!(happened.iter().all(|count| *count > 100), "{seen:?}");
}

#[test]
fn every_policy_serves_everything() {
    for policy in [Policy::Balanced, Policy::KvAware, Policy::Conversation] {
        for seed in 0..40 {
            let scenario = Scenario { policy, faults_per_mille: 3, ..Scenario::default() };
            assert_eq!(run(seed, &scenario).failed, 0, "seed {seed} of {policy:?}");
        }
    }
}

#[test]
fn guesses_change_no_token_under_any_fault() {
    let mut seen = Report::default();
    for seed in 0..60 {
        let scenario = Scenario { draft_tokens_max: 1 + seed as u32 % 6, ..Scenario::default() };
        let report = run(seed, &scenario);
        assert_eq!(report.failed, 0, "seed {seed}");
        seen.rank_crashes += report.rank_crashes;
        seen.preemptions += report.preemptions;
        seen.drafts_right += report.drafts_right;
        seen.drafts_wrong += report.drafts_wrong;
    }
    let happened = [seen.rank_crashes, seen.preemptions, seen.drafts_right, seen.drafts_wrong];
    assert!(happened.iter().all(|count| *count > 40), "{seen:?}");
}

#[test]
fn equal_seeds_give_equal_runs() {
    for seed in 0..5 {
        assert_eq!(run(seed, &Scenario::default()), run(seed, &Scenario::default()));
    }
    assert_ne!(run(1, &Scenario::default()), run(2, &Scenario::default()));
}

#[test]
fn a_quiet_node_counts_as_its_ranks_count_and_fails_nothing() {
    for seed in 0..40 {
        let report = run(seed, &Scenario { faults_per_mille: 0, ..Scenario::default() });
        assert_eq!((report.ended, report.left, report.attempts_lost), (60, 0, 0));
    }
}
