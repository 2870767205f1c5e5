//! A simulation is trusted once it has caught what was planted for it.

use super::super::Planted;
use super::cluster::Setup;
use super::faults::run;

/// Runs until the mistake shows, in `seeds` runs at most, and says how.
fn is_caught(planted: Option<Planted>, leaves_at_send: bool, seeds: u64) -> String {
    for seed in 1..=seeds {
        let nodes = 3 + (seed % 5) as usize;
        let setup = Setup { planted, leaves_at_send, outside: usize::from(seed % 3 == 0), ..Setup::of(nodes, seed) };
        if let Err(fault) = run(&setup, 5_000, 2 + seed / 5 % 14) {
            return format!("seed {seed}: {fault}");
        }
    }
    panic!("{planted:?} lives through {seeds} seeds")
}

#[test]
fn an_install_on_a_majority_of_reports_is_caught() {
    is_caught(Some(Planted::InstallOnMajority), false, 100);
}

#[test]
fn contributions_of_an_older_epoch_are_caught() {
    is_caught(Some(Planted::NoEpochCheck), false, 600);
}

#[test]
fn a_skipped_fill_is_caught() {
    is_caught(Some(Planted::SkipFill), false, 100);
}

#[test]
fn an_outbox_left_at_send_is_caught() {
    is_caught(None, true, 100);
}

#[test]
fn a_round_completed_while_frozen_is_caught() {
    is_caught(Some(Planted::CompleteWhileFrozen), false, 100);
}

#[test]
fn an_install_of_another_change_is_caught() {
    is_caught(Some(Planted::InstallWithoutChange), false, 1000);
}

#[test]
fn a_change_that_never_starts_again_is_caught() {
    is_caught(Some(Planted::NoRestart), false, 100);
}

#[test]
fn polite_leavers_that_do_not_report_are_caught() {
    is_caught(Some(Planted::PoliteSilence), false, 400);
}
