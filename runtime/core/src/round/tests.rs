use super::*;
use crate::ids::RequestKey;

fn cancel(seq: u64) -> Entry {
    Entry::Cancel(RequestKey { ingress: Incarnation(1), seq })
}

fn view(members: u64) -> View {
    View {
        epoch: Epoch(1),
        members: (1..=members).map(|m| Member { incarnation: Incarnation(m), ranks: vec![RankId(m as u32)] }).collect(),
        first_round: Round(1),
    }
}

fn machine(me: u64, members: u64) -> Machine {
    at_first_round(Incarnation(me), view(members))
}

/// The replica has said that it is there.
fn at_first_round(me: Incarnation, view: View) -> Machine {
    let mut machine = Machine::new(ClusterId(9), me, view, Config::default()).expect("a member");
    assert_eq!(machine.poll_timeout(), None, "nothing happens before the replica is there");
    machine.applied = Some(Applied { round: Round(0), digest: 0, waiting: false, probing: false, stepping: false });
    machine
}

/// Handles one input, checks the invariants, and answers each completed round as the replica would.
fn drive(machine: &mut Machine, now_us: u64, input: Input) -> Vec<Effect> {
    let mut out = Vec::new();
    machine.handle(now_us, input, &mut out);
    machine.check().expect("invariants");
    out
}

fn applied(round: u64, waiting: bool) -> Input {
    Input::Applied(Applied { round: Round(round), digest: round * 7, waiting, probing: false, stepping: false })
}

fn completed(effects: &[Effect]) -> Option<&Merged> {
    effects.iter().find_map(|e| match e {
        Effect::Completed(merged) => Some(merged),
        _ => None,
    })
}

#[test]
fn a_single_member_completes_its_own_rounds_at_the_pace_of_its_outbox() {
    let mut m = machine(1, 1);
    let first = drive(&mut m, 0, Input::Tick);
    assert_eq!(completed(&first).map(|c| c.round), Some(Round(1)), "the first round is due at once");
    assert_eq!(m.poll_timeout(), None, "the replica has not applied it");
    drive(&mut m, 10, applied(1, false));
    assert_eq!(m.poll_timeout(), Some(200_000), "idle: heartbeat");
    let early = drive(&mut m, 1_000, Input::Announce(cancel(5)));
    assert!(completed(&early).is_none(), "the minimum interval has not passed");
    assert_eq!(m.poll_timeout(), Some(2_000));
    let second = drive(&mut m, 2_000, Input::Tick);
    let merged = completed(&second).expect("due");
    assert_eq!(merged.contributions[0].entries, [Sequenced { seq: 1, entry: cancel(5) }]);
    assert_eq!(merged.contributions[0].digest, 7);
    drive(&mut m, 2_010, applied(2, true));
    assert_eq!(m.poll_timeout(), Some(22_000), "something waits: busy interval");
}

#[test]
fn entries_beyond_the_limit_wait_in_order() {
    let mut m = machine(1, 1);
    drive(&mut m, 0, Input::Tick);
    for seq in 0..600 {
        drive(&mut m, 1, Input::Announce(cancel(seq)));
    }
    let mut seen = Vec::new();
    let mut now = 0;
    for round in 1..=3 {
        now += 2_000;
        let out = drive(&mut m, now, applied(round, false));
        let merged = completed(&out).expect("due at once: the interval passed").clone();
        assert!(merged.contributions[0].entries.len() <= 256);
        seen.extend(merged.contributions[0].entries.iter().map(|s| s.seq));
    }
    assert_eq!(seen, (1..=600).collect::<Vec<u64>>());
    assert_eq!(m.outbox_len(), 0);
}

/// Three members over a network that delivers everything; all must complete the same merged inputs.
#[test]
fn members_complete_equal_rounds_and_none_is_always_first() {
    let mut members: Vec<Machine> = (1..=3).map(|m| machine(m, 3)).collect();
    let mut completions: Vec<Vec<Merged>> = vec![Vec::new(); 3];
    let mut now = 0;
    for step in 0..400u64 {
        now += 700;
        let mut inbox = Vec::new();
        for (i, m) in members.iter_mut().enumerate() {
            let mut effects = drive(m, now + i as u64 * 50, Input::Tick);
            if step % 7 == i as u64 {
                effects.extend(drive(m, now + i as u64 * 50, Input::Announce(cancel(step))));
            }
            while let Some(effect) = effects.pop() {
                match effect {
                    Effect::Send(c) => inbox.push((i, c)),
                    Effect::Completed(merged) => {
                        let round = merged.round.0;
                        completions[i].push(merged);
                        effects.extend(drive(m, now + i as u64 * 50, applied(round, false)));
                    }
                    Effect::Dropped(d) => panic!("nothing is dropped here: {d:?}"),
                }
            }
        }
        while let Some((from, c)) = inbox.pop() {
            for (i, m) in members.iter_mut().enumerate().filter(|(i, _)| *i != from) {
                let mut effects = drive(m, now + 100, Input::Received(c.clone()));
                while let Some(effect) = effects.pop() {
                    match effect {
                        Effect::Send(c) => inbox.push((i, c)),
                        Effect::Completed(merged) => {
                            let round = merged.round.0;
                            completions[i].push(merged);
                            effects.extend(drive(m, now + 100, applied(round, false)));
                        }
                        Effect::Dropped(d) => panic!("nothing is dropped here: {d:?}"),
                    }
                }
            }
        }
    }
    let shortest = completions.iter().map(Vec::len).min().expect("three");
    assert!(shortest > 50, "rounds went on: {shortest}");
    for completed in &completions {
        assert_eq!(completed[..shortest], completions[0][..shortest]);
    }
    let firsts: std::collections::BTreeSet<u64> = completions[0].iter().map(|m| m.contributions[0].member.0).collect();
    assert_eq!(firsts.len(), 3);
    for i in 1..=3u64 {
        let mine: Vec<u64> = completions[0]
            .iter()
            .flat_map(|m| m.contributions.iter().filter(|c| c.member.0 == i))
            .flat_map(|c| c.entries.iter().map(|s| s.seq))
            .collect();
        assert!(mine.len() > 10);
        assert_eq!(mine, (1..=mine.len() as u64).collect::<Vec<_>>(), "nothing lost, nothing twice");
    }
}

#[test]
fn strangers_old_rounds_duplicates_and_equivocation_are_dropped_with_their_reason() {
    let mut m = machine(1, 2);
    let good = Contribution {
        cluster: ClusterId(9),
        epoch: Epoch(1),
        round: Round(1),
        member: Incarnation(2),
        clock_us: 5,
        entries: vec![],
        ranks: vec![],
        prefix_matches: vec![],
        digest: 0,
        draining: false,
    };
    let mut cases = vec![
        (Contribution { cluster: ClusterId(8), ..good.clone() }, Dropped::OtherCluster),
        (Contribution { epoch: Epoch(0), ..good.clone() }, Dropped::OlderEpoch),
        (Contribution { epoch: Epoch(2), ..good.clone() }, Dropped::NewerEpoch),
        (Contribution { member: Incarnation(3), ..good.clone() }, Dropped::NotAMember(Incarnation(3))),
        (Contribution { round: Round(0), ..good.clone() }, Dropped::OldRound(Round(0))),
        (Contribution { round: Round(3), ..good.clone() }, Dropped::FutureRound(Round(3))),
    ];
    let foreign = RankSnapshot { rank: RankId(1), ..RankSnapshot::default() };
    cases.push((Contribution { ranks: vec![foreign], ..good.clone() }, Dropped::Malformed(Incarnation(2))));
    let twice = vec![Sequenced { seq: 1, entry: cancel(1) }, Sequenced { seq: 1, entry: cancel(2) }];
    cases.push((Contribution { entries: twice, ..good.clone() }, Dropped::Malformed(Incarnation(2))));
    for (contribution, expected) in cases {
        let out = drive(&mut m, 0, Input::Received(contribution));
        assert!(out.contains(&Effect::Dropped(expected)), "{expected:?}");
    }
    let second = Contribution { round: Round(2), ..good.clone() };
    assert!(drive(&mut m, 0, Input::Received(second.clone())).iter().all(|e| !matches!(e, Effect::Dropped(_))));
    assert_eq!(drive(&mut m, 1, Input::Received(second.clone())), [Effect::Dropped(Dropped::Duplicate)]);
    let other = Contribution { clock_us: 6, ..second };
    assert_eq!(drive(&mut m, 1, Input::Received(other)), [Effect::Dropped(Dropped::Equivocation(Incarnation(2)))]);
    assert_eq!(drive(&mut m, 1, applied(4, false)), [Effect::Dropped(Dropped::UnexpectedApplied(Round(4)))]);
}

#[test]
fn one_wrong_clock_does_not_move_the_agreed_clock() {
    let mut m = machine(1, 3);
    let from = |member: u64, clock_us: u64| {
        Input::Received(Contribution {
            cluster: ClusterId(9),
            epoch: Epoch(1),
            round: Round(1),
            member: Incarnation(member),
            clock_us,
            entries: vec![],
            ranks: vec![],
            prefix_matches: vec![],
            digest: 0,
            draining: false,
        })
    };
    drive(&mut m, 1_000, Input::Tick);
    drive(&mut m, 1_000, from(2, u64::MAX));
    let out = drive(&mut m, 1_000, from(3, 1_050));
    assert_eq!(completed(&out).map(|c| c.clock_us), Some(1_050));
}

#[test]
fn a_contribution_waits_for_the_matches_of_its_ranks_but_not_for_long() {
    let two_ranks =
        View { members: vec![Member { incarnation: Incarnation(1), ranks: vec![RankId(0), RankId(1)] }], ..view(1) };
    let mut m = at_first_round(Incarnation(1), two_ranks);
    drive(&mut m, 0, Input::Tick);
    let probing = |round| Applied { round: Round(round), digest: 1, waiting: true, probing: true, stepping: false };
    let found = |rank| vec![PrefixMatch { number: crate::ids::RequestNumber(4), rank: RankId(rank), tokens: 16 }];
    drive(&mut m, 5_000, Input::Applied(probing(1)));
    assert_eq!(m.poll_timeout(), Some(7_000), "the interval has passed; the probe has not");
    let one = drive(&mut m, 5_100, Input::Matches { round: Round(1), matches: found(0) });
    assert!(completed(&one).is_none(), "another rank has not answered");
    let both = drive(&mut m, 5_200, Input::Matches { round: Round(1), matches: found(1) });
    let merged = completed(&both).expect("all answered");
    assert_eq!(merged.contributions[0].prefix_matches, [found(0), found(1)].concat());
    drive(&mut m, 9_000, Input::Applied(probing(2)));
    let late = drive(&mut m, 11_000, Input::Tick);
    assert!(completed(&late).is_some_and(|c| c.contributions[0].prefix_matches.is_empty()), "nobody waits longer");
    // A rank that is faster than the replica counts all the same.
    drive(&mut m, 11_010, Input::Matches { round: Round(3), matches: found(1) });
    drive(&mut m, 14_000, Input::Applied(probing(3)));
    let both = drive(&mut m, 14_100, Input::Matches { round: Round(3), matches: found(0) });
    let merged = completed(&both).expect("nobody is waited for");
    assert_eq!(merged.contributions[0].prefix_matches, [found(1), found(0)].concat());
    let dropped = drive(&mut m, 14_200, Input::Matches { round: Round(2), matches: found(0) });
    assert_eq!(dropped, [Effect::Dropped(Dropped::LateMatches(Round(2)))]);
}

#[test]
fn a_frozen_machine_completes_nothing_but_the_round_it_lacks() {
    let (mut a, mut b) = (machine(1, 2), machine(2, 2));
    drive(&mut a, 0, Input::Announce(cancel(1)));
    let sent = |effects: Vec<Effect>| {
        effects.into_iter().find_map(|e| match e {
            Effect::Send(contribution) => Some(contribution),
            _ => None,
        })
    };
    let of_a = sent(drive(&mut a, 300_000, Input::Tick)).or_else(|| a.own_contributions().next().cloned());
    let of_b = sent(drive(&mut b, 300_000, Input::Tick)).expect("due");
    let done = drive(&mut b, 300_000, Input::Received(of_a.expect("due")));
    let merged = completed(&done).expect("both are there").clone();
    a.freeze();
    assert!(completed(&drive(&mut a, 300_100, Input::Received(of_b))).is_none(), "frozen");
    assert_eq!((a.poll_timeout(), a.outbox_len(), a.completed()), (None, 1, Round(0)));
    let mut out = Vec::new();
    a.fill(300_200, merged.clone(), &mut out);
    assert_eq!(completed(&out), Some(&merged));
    assert_eq!((a.outbox_len(), a.completed()), (0, Round(1)));
    out.clear();
    a.fill(300_300, merged, &mut out);
    assert!(out.is_empty(), "it has it already");
    a.check().expect("invariants");
    // The next view begins behind the cut; entries of contributions that came to nothing go again.
    drive(&mut a, 300_400, applied(1, false));
    drive(&mut a, 300_400, Input::Announce(cancel(2)));
    let next = |epoch, first_round| View { epoch: Epoch(epoch), first_round: Round(first_round), ..view(1) };
    assert!(!a.install(next(1, 2)) && !a.install(next(2, 3)), "not a next one");
    assert!(a.install(next(2, 2)) && !a.is_frozen());
    let again = drive(&mut a, 300_500, applied(1, false));
    let merged = completed(&again).expect("alone now");
    assert_eq!(merged.contributions[0].entries, [Sequenced { seq: 2, entry: cancel(2) }]);
}

#[test]
fn a_member_that_hears_another_contributes_at_once_and_nobody_begins_a_round_too_soon() {
    let (mut a, mut b) = (machine(1, 2), machine(2, 2));
    let mut now = 0;
    let mut began = Vec::new();
    for round in 1..=5 {
        drive(&mut a, now, Input::Announce(cancel(round)));
        // Nothing is due any more where the announcement itself was late enough.
        now = now.max(a.poll_timeout().unwrap_or(now));
        drive(&mut a, now, Input::Tick);
        began.push(now);
        let of_a = a.own_contributions().last().cloned().expect("due");
        assert_eq!(of_a.round, Round(round));
        let answer = drive(&mut b, now + 100, Input::Received(of_a));
        let of_b = answer.iter().find_map(|e| if let Effect::Send(c) = e { Some(c.clone()) } else { None });
        assert!(completed(&answer).is_some(), "round {round} is complete at b at once");
        assert!(completed(&drive(&mut a, now + 200, Input::Received(of_b.expect("at once")))).is_some());
        now += 300;
        drive(&mut a, now, applied(round, false));
        drive(&mut b, now, applied(round, false));
    }
    assert!(began.windows(2).all(|pair| pair[1] - pair[0] >= 2_000), "{began:?}");
}
