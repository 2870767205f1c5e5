use super::*;
use crate::ids::{ConversationKey, RequestKey, RequestNumber};
use crate::placement::{CountChildren, Remap};

fn waiting(number: u64) -> Waiting {
    Waiting {
        number: RequestNumber(number),
        key: RequestKey { seq: number, ..RequestKey::default() },
        tokens: 5,
        ..Waiting::default()
    }
}

fn with_priority(number: u64, priority: f64) -> Waiting {
    Waiting { priority: Priority::new(priority).unwrap(), ..waiting(number) }
}

fn numbers<'a>(requests: impl IntoIterator<Item = &'a Waiting>) -> Vec<u64> {
    requests.into_iter().map(|request| request.number.0).collect()
}

fn filled(policy: Policy, requests: impl IntoIterator<Item = Waiting>) -> Queue {
    let mut queue = Queue::new(policy);
    for request in requests {
        queue.push(request).unwrap();
    }
    queue.check();
    queue
}

fn pass<'a>(budget: u64, cap: u32, counts: &'a [u32]) -> Pass<'a> {
    Pass { budget, cap, counts, held: &[], now_us: 0, count_children: CountChildren::StrictCap, only: None }
}

fn admit(queue: &mut Queue, pass: &Pass<'_>) -> Vec<u64> {
    let mut out = Admission::default();
    queue.admit(pass, |_| None, &mut out);
    queue.check();
    numbers(out.admitted.iter().map(|admitted| &admitted.request))
}

#[test]
fn first_come_is_first_served_whatever_the_priority() {
    let queue = filled(Policy::Fcfs, [with_priority(1, 0.1), with_priority(2, 0.9), with_priority(3, 0.5)]);
    assert_eq!(numbers(queue.iter()), [1, 2, 3]);
}

#[test]
fn higher_priority_is_served_first_and_equals_in_order_of_arrival() {
    let requests = [(1, 0.5), (2, 0.9), (3, 0.5), (4, 0.1), (5, 0.9)].map(|(n, p)| with_priority(n, p));
    let mut queue = filled(Policy::Priority, requests);
    assert_eq!(numbers(queue.iter()), [2, 5, 1, 3, 4]);
    assert_eq!(admit(&mut queue, &pass(3, 8, &[0])), [2, 5, 1]);
    assert_eq!(numbers(queue.iter()), [3, 4]);
}

#[test]
fn what_is_put_back_stands_before_later_equals_and_behind_higher_priorities() {
    let requests = [(1, 0.5), (2, 0.5), (3, 0.5)].map(|(n, p)| with_priority(n, p));
    let mut queue = filled(Policy::Priority, requests);
    let taken: Vec<Waiting> = [2, 1].into_iter().filter_map(|n| queue.remove(RequestNumber(n))).collect();
    queue.push(with_priority(4, 0.5)).unwrap();
    queue.push(with_priority(5, 0.9)).unwrap();
    queue.put_back(taken).unwrap();
    queue.check();
    assert_eq!(numbers(queue.iter()), [5, 1, 2, 3, 4]);
    let known = queue.put_back([waiting(1), waiting(9)]).unwrap_err();
    assert_eq!(numbers(&known), [1]);
    assert!(queue.contains(RequestNumber(9)));
}

#[test]
fn a_number_that_waits_is_not_taken_twice() {
    let mut queue = filled(Policy::Fcfs, [waiting(1)]);
    let digest = queue.digest();
    assert_eq!(queue.push(with_priority(1, 0.9)).unwrap_err().label(), "duplicate_request");
    assert_eq!((queue.len(), queue.digest()), (1, digest));
}

#[test]
fn a_parent_that_exceeds_the_budget_stops_the_pass() {
    let mut queue = filled(Policy::Fcfs, [waiting(1), Waiting { children: 2, ..waiting(2) }, waiting(3)]);
    assert_eq!(admit(&mut queue, &pass(3, 8, &[0, 0])), [1]);
    assert_eq!(numbers(queue.iter()), [2, 3]);
}

#[test]
fn a_strict_request_waits_for_its_rank_and_others_pass() {
    let strict = Waiting { explicit: Some(0), ..waiting(1) };
    let mut queue = filled(Policy::Fcfs, [strict, waiting(2)]);
    assert_eq!(admit(&mut queue, &pass(1, 1, &[1, 0])), [2]);
    let waits = queue.get(RequestNumber(1)).unwrap();
    assert_eq!(waits.deferrals, 0, "only turns of conversations are counted");
    assert_eq!(admit(&mut queue, &pass(2, 1, &[0, 0])), [1]);
}

#[test]
fn reservations_of_one_pass_add_up() {
    let strict = |number| Waiting { explicit: Some(0), relax: Some(false), ..waiting(number) };
    let mut queue = filled(Policy::Fcfs, (1..5).map(strict));
    assert_eq!(admit(&mut queue, &pass(8, 3, &[1, 0])), [1, 2]);
}

#[test]
fn no_budget_means_no_pass_and_no_deferral() {
    let mut queue = filled(Policy::Fcfs, [Waiting { affinity: Some(ConversationKey(1)), ..waiting(1) }]);
    let mut out = Admission::default();
    queue.admit(&pass(0, 1, &[1]), |_| Some(0), &mut out);
    assert_eq!(queue.get(RequestNumber(1)).unwrap().deferrals, 0);
    queue.admit(&Pass { now_us: 9, ..pass(1, 1, &[1, 0]) }, |_| Some(0), &mut out);
    let deferred = queue.get(RequestNumber(1)).unwrap();
    assert_eq!((deferred.deferrals, deferred.since_us, out.set_aside), (1, 9, 1));
    queue.check();
}

#[test]
fn slots_held_free_are_left_alone() {
    let strict = |number, rank| Waiting { explicit: Some(rank), ..waiting(number) };
    let mut queue = filled(Policy::Fcfs, [strict(1, 0), strict(2, 1)]);
    let held = [4, 0];
    assert_eq!(budget(&[1, 1], &held, 4), 3);
    assert_eq!(admit(&mut queue, &Pass { held: &held, ..pass(3, 4, &[1, 1]) }), [2]);
}

#[test]
fn a_parent_needs_one_rank_with_room_for_all_of_it() {
    let parent = || Waiting { children: 2, ..waiting(1) };
    let mut queue = filled(Policy::Fcfs, [parent()]);
    assert_eq!(admit(&mut queue, &pass(4, 4, &[2, 2])), [0u64; 0]);
    assert_eq!(admit(&mut queue, &pass(4, 4, &[3, 1])), [1]);
    let mut published = filled(Policy::Fcfs, [parent()]);
    let upstream = Pass { count_children: CountChildren::Upstream, ..pass(4, 4, &[2, 2]) };
    assert_eq!(admit(&mut published, &upstream), [1]);
}

#[test]
fn counts_beyond_all_sense_leave_no_budget() {
    assert_eq!(budget(&[u32::MAX, u32::MAX], &[u32::MAX], 1), 0);
    assert_eq!(budget(&[], &[], 8), 0);
    let mut queue = filled(Policy::Fcfs, [Waiting { children: u32::MAX, ..waiting(1) }]);
    assert_eq!(admit(&mut queue, &pass(u64::MAX, u32::MAX, &[u32::MAX, 7])), [0u64; 0]);
}

#[test]
fn priorities_are_finite_and_zero_is_one_value() {
    assert_eq!(Priority::new(f64::NAN), None);
    assert_eq!(Priority::new(f64::INFINITY), None);
    assert_eq!(Priority::new(-0.0), Priority::new(0.0));
    assert!(Priority::new(-0.0).unwrap() <= Priority::new(0.0).unwrap());
    assert!(serde_json::from_str::<Priority>("1e999").is_err());
}

#[test]
fn digests_follow_the_requests_and_not_their_slots() {
    let mut a = filled(Policy::Fcfs, (0..600).map(waiting));
    for number in (0..600).step_by(2) {
        a.remove(RequestNumber(number)).unwrap();
    }
    let b = filled(Policy::Fcfs, (0..300).map(|n| waiting(599 - 2 * n)));
    assert_eq!(a.digest(), b.digest());
    let head = |token| Waiting { head: vec![token].into(), ..waiting(1) };
    assert_ne!(filled(Policy::Fcfs, [head(1)]).digest(), filled(Policy::Fcfs, [head(2)]).digest());
    for number in (1..600).step_by(2) {
        a.remove(RequestNumber(number)).unwrap();
    }
    assert_eq!(a.digest(), 0);
    a.check();
}

#[test]
fn a_hint_to_a_rank_that_left_is_forgotten_or_refused() {
    let hint = |number, relax| Waiting { explicit: Some(1), relax: Some(relax), ..waiting(number) };
    let mut queue = filled(Policy::Fcfs, [hint(1, true), hint(2, false), waiting(3)]);
    let stranded = queue.remap(&Remap::new(vec![Some(0), None], 1).unwrap());
    queue.check();
    assert_eq!((numbers(&stranded), numbers(queue.iter())), (vec![2], vec![1, 3]));
    assert_eq!(queue.get(RequestNumber(1)).unwrap().explicit, None);
}

#[test]
fn snapshots_with_a_number_twice_are_refused() {
    let mut snapshot = serde_json::to_value(filled(Policy::Fcfs, [waiting(1)])).unwrap();
    let twice = snapshot["waiting"][0].clone();
    snapshot["waiting"].as_array_mut().unwrap().push(twice);
    assert!(serde_json::from_value::<Queue>(snapshot).unwrap_err().to_string().contains("already known"));
}
