use super::*;
use std::sync::atomic::AtomicU64;

#[test]
fn each_part_runs_once_whatever_the_number_of_threads() {
    for threads in 1..=4 {
        let mut team = Team::new(threads).unwrap();
        assert_eq!(team.threads(), threads);
        for parts in [0, 1, 2, 3, 100] {
            let counts: Vec<AtomicU64> = (0..parts).map(|_| AtomicU64::new(0)).collect();
            team.run(parts, |part| {
                counts[part].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} threads, {parts} parts");
        }
    }
}

#[test]
fn rows_are_cut_into_stretches_that_cover_them() {
    let mut team = Team::new(2).unwrap();
    let mut numbers = vec![0.0; 10];
    let split = Split::new(&mut numbers);
    team.run_rows(10, 4, |rows| {
        assert!(rows.len() <= 4);
        // SAFETY: stretches of rows do not overlap.
        unsafe { split.part(rows) }.iter_mut().for_each(|n| *n += 1.0);
    });
    assert_eq!(numbers, [1.0; 10]);
}

#[test]
fn a_panic_in_any_part_reaches_the_caller_and_the_team_lives_on() {
    let mut team = Team::new(3).unwrap();
    for bad in 0..8 {
        let run = catch_unwind(AssertUnwindSafe(|| team.run(8, |part| assert_ne!(part, bad))));
        assert!(run.is_err(), "part {bad}");
    }
    let sum = AtomicU64::new(0);
    team.run(8, |part| {
        sum.fetch_add(part as u64, Ordering::Relaxed);
    });
    assert_eq!(sum.into_inner(), 28);
}

#[test]
fn many_short_rounds_lose_no_part() {
    let mut team = Team::new(2).unwrap();
    let sum = AtomicU64::new(0);
    for _ in 0..20_000 {
        team.run(3, |part| {
            sum.fetch_add(part as u64 + 1, Ordering::Relaxed);
        });
    }
    assert_eq!(sum.into_inner(), 120_000);
}

#[test]
fn more_threads_than_processors_do_not_spin() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(!is_crowded(processors) && is_crowded(processors + 1));
    let team = Team::new(processors + 1).unwrap();
    assert!(is_crowded(THREADS.load(Ordering::Relaxed)), "its threads are counted");
    drop(team);
}
