//! The rows of the protocol's tables, one by one.

use super::super::*;
use super::cluster::{Cluster, Setup, config, name};
use super::faults::settle;
use crate::ids::{Epoch, RankId};

fn place(number: u64) -> Place {
    let at = number as usize - 1;
    Place { name: name(at), incarnation: Incarnation(number), ranks: vec![RankId(at as u32)] }
}

fn leaver(number: u64, why: Why) -> Leaver {
    Leaver { incarnation: Incarnation(number), why }
}

fn joiner(number: u64, replaces: Option<u64>) -> Joiner {
    let of = replaces.unwrap_or(number) as usize - 1;
    Joiner { name: name(of), incarnation: Incarnation(number), ranks: 1, replaces: replaces.map(Incarnation) }
}

fn freeze(epoch: u64, leaving: Vec<Leaver>, joining: Vec<Joiner>) -> Command {
    Command::Freeze(Freeze { epoch: Epoch(epoch), leaving, joining })
}

fn agreed(members: u64) -> Agreed {
    Agreed::founded(ClusterId(9), (1..=members).map(place).collect(), 4)
}

fn install(agreed: &Agreed, cut: u64) -> Command {
    let change = agreed.change().unwrap_or(Change(0));
    let members = agreed.members_next();
    Command::Install(Install { change, epoch: Epoch(agreed.epoch.0 + 1), members, cut: Round(cut), digest: 7 })
}

// -- the log

#[test]
fn an_install_counts_only_for_the_pending_change() {
    let mut log = agreed(3);
    assert_eq!(log.apply(1, &freeze(1, vec![leaver(3, Why::LinkDown)], vec![])), Outcome::Frozen);
    let late = install(&log, 5);
    assert_eq!(log.apply(1, &late), Outcome::Ignored(Ignored::Replayed));
    assert_eq!(
        log.apply(2, &freeze(1, vec![leaver(2, Why::Unreported), leaver(3, Why::LinkDown)], vec![])),
        Outcome::Frozen
    );
    assert_eq!(log.apply(3, &late), Outcome::Ignored(Ignored::OtherChange));
    let good = install(&log, 4);
    assert_eq!(log.apply(4, &good), Outcome::Installed);
    assert_eq!(log.apply(5, &good), Outcome::Ignored(Ignored::OtherChange));
    assert_eq!((log.epoch, log.first_round, log.members.clone()), (Epoch(2), Round(5), vec![place(1)]));
    assert_eq!(log.last.as_ref().map(|past| (past.change, past.cut)), Some((Change(2), Round(4))));
    log.check().expect("sound");
}

#[test]
fn each_further_freeze_removes_somebody_and_takes_nobody_back() {
    let mut log = agreed(3);
    let first = freeze(1, vec![leaver(3, Why::LinkDown)], vec![joiner(4, None), joiner(5, None)]);
    assert_eq!(log.apply(1, &freeze(2, vec![leaver(3, Why::LinkDown)], vec![])), Outcome::Ignored(Ignored::OtherEpoch));
    assert_eq!(log.apply(2, &freeze(1, vec![], vec![])), Outcome::Ignored(Ignored::Nothing));
    assert_eq!(log.apply(3, &first), Outcome::Frozen);
    assert_eq!(log.apply(4, &first), Outcome::Ignored(Ignored::Nothing), "proposed twice");
    let back = freeze(1, vec![leaver(2, Why::Silent)], vec![]);
    assert_eq!(log.apply(5, &back), Outcome::Ignored(Ignored::Unfit));
    let wider = freeze(1, vec![leaver(2, Why::Silent), leaver(3, Why::LinkDown)], vec![joiner(6, None)]);
    assert_eq!(log.apply(6, &wider), Outcome::Ignored(Ignored::Unfit));
    let all = (1..=3).map(|m| leaver(m, Why::Silent)).collect();
    assert_eq!(log.apply(7, &freeze(1, all, vec![])), Outcome::Ignored(Ignored::Unfit), "nobody would stay");
    let fewer = freeze(1, vec![leaver(3, Why::LinkDown)], vec![joiner(5, None)]);
    assert_eq!(log.apply(8, &fewer), Outcome::Frozen);
    let none = freeze(1, vec![leaver(3, Why::LinkDown)], vec![]);
    assert_eq!(log.apply(9, &none), Outcome::Frozen, "nobody joins: the change goes on with the rest");
    assert_eq!(log.change(), Some(Change(9)));
}

#[test]
fn a_view_has_a_limit() {
    let mut log = agreed(3);
    let two = freeze(1, vec![], vec![joiner(4, None), joiner(5, None)]);
    assert_eq!(log.apply(1, &two), Outcome::Ignored(Ignored::Full));
    assert_eq!(log.apply(2, &freeze(1, vec![], vec![joiner(4, None)])), Outcome::Frozen);
}

#[test]
fn rank_ids_are_given_at_join_and_never_again() {
    let mut log = agreed(3);
    let ranks = |log: &Agreed| -> Vec<u32> { log.view().ranks().map(|(rank, _)| rank.0).collect() };
    log.apply(1, &freeze(1, vec![leaver(3, Why::LinkDown)], vec![]));
    let next = install(&log, 4);
    log.apply(2, &next);
    assert_eq!(ranks(&log), [0, 1]);
    // The node comes back as another life: its ranks are others.
    let two = Joiner { ranks: 2, ..joiner(4, None) };
    log.apply(3, &freeze(2, vec![], vec![two]));
    let next = install(&log, 8);
    log.apply(4, &next);
    assert_eq!(ranks(&log), [0, 1, 3, 4]);
    log.check().expect("sound");
}

#[test]
fn an_actor_that_starts_over_keeps_its_ranks_in_one_change() {
    let mut log = agreed(3);
    log.apply(1, &freeze(1, vec![leaver(2, Why::Replaced)], vec![joiner(4, Some(2))]));
    let next = install(&log, 4);
    assert_eq!(log.apply(2, &next), Outcome::Installed);
    let members: Vec<(u64, u32)> = log.members.iter().map(|m| (m.incarnation.0, m.ranks[0].0)).collect();
    assert_eq!(members, [(1, 0), (3, 2), (4, 1)]);
    // Too late: the life before was evicted already.
    let mut log = agreed(3);
    log.apply(1, &freeze(1, vec![leaver(2, Why::Silent)], vec![]));
    let next = install(&log, 4);
    log.apply(2, &next);
    log.apply(3, &freeze(2, vec![], vec![joiner(4, Some(2))]));
    let next = install(&log, 6);
    log.apply(4, &next);
    assert_eq!(log.members[2].ranks, [RankId(3)]);
}

// -- one machine

struct Rig {
    machine: Machine,
    now_us: u64,
}

impl Rig {
    /// Member 1 of three, linked to the others, behind its first view.
    fn new() -> Self {
        let life = Life { name: name(0), incarnation: Incarnation(1), ranks: 1, replaces: None, witness: false };
        let mut rig = Self { machine: Machine::new(life, config(), 1), now_us: 1 };
        for other in [2, 3] {
            rig.link(other, other as usize - 1, None);
        }
        rig.feed(Input::Founded { cluster: ClusterId(9), members: (1..=3).map(place).collect() });
        rig.applied(0);
        rig
    }

    fn link(&mut self, number: u64, at: usize, replaces: Option<u64>) -> Vec<Effect> {
        let replaces = replaces.map(Incarnation);
        self.feed(Input::LinkUp(Peer { name: name(at), incarnation: Incarnation(number), replaces }))
    }

    fn feed(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.machine.handle(self.now_us, input, &mut out);
        self.machine.check().expect("invariants");
        out
    }

    fn applied(&mut self, round: u64) -> Vec<Effect> {
        let applied =
            round::Applied { round: Round(round), digest: 70 + round, waiting: false, probing: false, stepping: false };
        self.feed(Input::Round(round::Input::Applied(applied)))
    }

    fn tick(&mut self, after_us: u64) -> Vec<Effect> {
        self.now_us += after_us;
        self.feed(Input::Round(round::Input::Tick))
    }

    fn receive(&mut self, from: u64, message: Message) -> Vec<Effect> {
        self.feed(Input::Received { from: Incarnation(from), message: Box::new(message) })
    }

    fn lead_by(&mut self, leader: u64, reached: &[u64]) -> Vec<Effect> {
        let all = [1, 2, 3].map(Incarnation).to_vec();
        let reached = reached.iter().copied().map(Incarnation).collect();
        self.feed(Input::Consensus(Consensus { leader: Some(Incarnation(leader)), voters: all, reached }))
    }

    fn contribution(&mut self, from: u64, epoch: u64, round: u64) -> Vec<Effect> {
        let contribution = Contribution {
            cluster: ClusterId(9),
            epoch: Epoch(epoch),
            round: Round(round),
            member: Incarnation(from),
            clock_us: 0,
            entries: vec![],
            ranks: vec![],
            prefix_matches: vec![],
            digest: 69 + round,
            draining: false,
        };
        self.receive(from, Message::Contribution(Box::new(contribution)))
    }

    fn commit(&mut self, index: u64, command: Command) -> Vec<Effect> {
        self.feed(Input::Committed { index, command })
    }

    fn report(&mut self, from: u64, change: u64, completed: u64) -> Vec<Effect> {
        let report = Report {
            change: Change(change),
            completed: Round(completed),
            input_hash: Some(completed),
            digest: 70 + completed,
            links: [1, 2, 3].map(Incarnation).to_vec(),
        };
        self.receive(from, Message::Report(Box::new(report)))
    }
}

fn sent(effects: &[Effect]) -> Vec<(u64, &Message)> {
    let mut sent = Vec::new();
    for effect in effects {
        if let Effect::Send { to, message } = effect {
            sent.push((to.0, &**message));
        }
    }
    sent
}

fn proposed(effects: &[Effect]) -> Vec<&Command> {
    let mut proposed = Vec::new();
    for effect in effects {
        if let Effect::Propose(command) = effect {
            proposed.push(command);
        }
    }
    proposed
}

#[test]
fn who_froze_completes_no_round_but_by_fill_and_no_time_frees_it() {
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    rig.tick(20_000);
    let reports = rig.commit(1, freeze(1, vec![leaver(3, Why::LinkDown)], vec![]));
    assert!(matches!(sent(&reports)[..], [(3, Message::Stale { .. }), (2, Message::Report(_))]), "{reports:?}");
    rig.contribution(2, 1, 1);
    rig.contribution(3, 1, 1);
    for _ in 0..100 {
        assert!(!rig.tick(1_000_000).iter().any(|effect| matches!(effect, Effect::Completed(_))));
    }
    assert!(rig.machine.refuses(rig.now_us));
    assert_eq!(rig.machine.completed(), Round(0));
    // Not what it was asked to fill.
    let merged = Merged { epoch: Epoch(1), round: Round(1), clock_us: 5, contributions: vec![] };
    let fill =
        |merged: &Merged| Message::Fill { change: Change(1), to: Incarnation(1), merged: Box::new(merged.clone()) };
    let unasked = rig.receive(2, fill(&merged));
    assert!(matches!(unasked[..], [Effect::Dropped(Dropped::Unasked)]), "{unasked:?}");
    let level = |hash: u64| {
        let (change, holders) = (Change(1), vec![Incarnation(2)]);
        Message::Level(Box::new(Level { change, round: Round(1), input_hash: Some(hash), holders }))
    };
    let need = rig.receive(2, level(merged.hash() + 1));
    assert!(matches!(sent(&need)[..], [(2, Message::Need { .. })]), "{need:?}");
    assert!(matches!(rig.receive(2, fill(&merged))[..], [Effect::Dropped(Dropped::Unasked)]), "another input");
    rig.receive(2, level(merged.hash()));
    let filled = rig.receive(2, fill(&merged));
    assert!(matches!(filled[0], Effect::Completed(_)), "{filled:?}");
    let again = rig.applied(1);
    assert!(matches!(sent(&again)[..], [(2, Message::Report(report))] if report.completed == Round(1)), "{again:?}");
}

#[test]
fn a_contribution_of_an_older_epoch_is_answered_and_of_a_newer_one_is_kept() {
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    rig.commit(1, freeze(1, vec![leaver(3, Why::LinkDown)], vec![]));
    rig.contribution(2, 2, 1);
    let next =
        Install { change: Change(1), epoch: Epoch(2), members: vec![place(1), place(2)], cut: Round(0), digest: 70 };
    let installed = rig.commit(2, Command::Install(next));
    assert!(installed.iter().any(|effect| matches!(effect, Effect::Installed { .. })), "{installed:?}");
    let completed = rig.applied(0);
    assert!(
        completed.iter().any(|effect| matches!(effect, Effect::Completed(_))),
        "the one that was kept: {completed:?}"
    );
    let answer = rig.contribution(3, 1, 1);
    assert!(matches!(sent(&answer)[..], [(3, Message::Stale { epoch: Epoch(2), .. })]), "{answer:?}");
    let answer = rig.contribution(2, 1, 1);
    assert!(sent(&answer).is_empty(), "a member that is behind in the log is not told that it is out: {answer:?}");
    let stranger = rig.receive(
        2,
        Message::Contribution(Box::new(Contribution {
            cluster: ClusterId(8),
            epoch: Epoch(2),
            round: Round(2),
            member: Incarnation(2),
            clock_us: 0,
            entries: vec![],
            ranks: vec![],
            prefix_matches: vec![],
            digest: 0,
            draining: false,
        })),
    );
    assert!(matches!(stranger[..], [Effect::Dropped(Dropped::Round(round::Dropped::OtherCluster))]), "{stranger:?}");
}

#[test]
fn who_is_told_that_its_epoch_is_over_stops_at_once() {
    let mut rig = Rig::new();
    let other = rig.receive(2, Message::Stale { cluster: ClusterId(8), epoch: Epoch(2) });
    assert!(matches!(other[..], [Effect::Dropped(_)]), "another cluster's: {other:?}");
    let told = rig.receive(2, Message::Stale { cluster: ClusterId(9), epoch: Epoch(2) });
    assert!(matches!(told[..], [Effect::Left(Left::Stale { epoch: Epoch(2) })]), "{told:?}");
    assert!(rig.tick(1_000_000).is_empty() && rig.machine.view().is_none());
}

#[test]
fn who_sees_itself_left_out_of_a_freeze_stops_at_once() {
    let mut rig = Rig::new();
    let out = rig.commit(1, freeze(1, vec![leaver(1, Why::Silent)], vec![]));
    assert!(out.iter().any(|e| matches!(e, Effect::Left(Left::Evicted(Why::Silent)))), "{out:?}");
}

#[test]
fn a_link_that_is_down_is_suspected_after_a_while_and_a_new_life_at_once() {
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    rig.contribution(2, 1, 1);
    rig.contribution(3, 1, 1);
    rig.applied(1);
    rig.tick(1_000);
    rig.feed(Input::LinkDown(Incarnation(3)));
    assert!(!sent(&rig.tick(config().suspect_after_us - 1)).iter().any(|(_, m)| matches!(m, Message::Sight { .. })));
    let said = rig.tick(1);
    let sight = |(to, message): &(u64, &Message)| match message {
        Message::Sight { sight, passed_on: false } => Some((*to, sight.down.clone(), sight.gone.clone())),
        _ => None,
    };
    assert_eq!(sent(&said).iter().find_map(sight), Some((2, vec![Incarnation(3)], vec![])));
    // Its actor starts over: that is no reason yet. Another process of that name is.
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    rig.tick(1_000);
    assert_eq!(sent(&rig.link(4, 2, Some(3))).iter().find_map(sight), None);
    rig.tick(10);
    let gone = vec![leaver(3, Why::Restarted)];
    assert_eq!(sent(&rig.link(5, 2, None)).iter().find_map(sight), Some((2, vec![], gone)));
}

#[test]
fn a_suspicion_is_passed_on_to_the_leader_once() {
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    let sight = |by: u64| {
        Box::new(Sight { by: Incarnation(by), epoch: Epoch(1), down: vec![Incarnation(2)], ..Sight::default() })
    };
    let on = rig.receive(3, Message::Sight { sight: sight(3), passed_on: false });
    assert!(matches!(sent(&on)[..], [(2, Message::Sight { passed_on: true, .. })]), "{on:?}");
    let on = rig.receive(3, Message::Sight { sight: sight(3), passed_on: true });
    assert!(matches!(on[..], [Effect::Dropped(Dropped::NotTheLeader)]), "{on:?}");
    let on = rig.receive(3, Message::Sight { sight: sight(2), passed_on: false });
    assert!(matches!(on[..], [Effect::Dropped(Dropped::NotItsOwn(_))]), "{on:?}");
}

#[test]
fn the_leader_gathers_and_asks_before_it_chooses_and_needs_a_majority_of_voters() {
    for reached in [&[1u64, 2][..], &[1]] {
        let mut rig = Rig::new();
        rig.lead_by(1, reached);
        let sight = Sight { by: Incarnation(2), epoch: Epoch(1), down: vec![Incarnation(3)], ..Sight::default() };
        let stranger = Sight { by: Incarnation(8), ..sight.clone() };
        let message = |sight: &Sight| Message::Sight { sight: Box::new(sight.clone()), passed_on: true };
        assert!(matches!(rig.receive(3, message(&stranger))[..], [Effect::Dropped(Dropped::OtherEpoch)]));
        let asks = rig.receive(2, message(&sight));
        assert_eq!(sent(&asks).iter().filter(|(_, m)| matches!(m, Message::Look { .. })).count(), 2, "{asks:?}");
        assert!(proposed(&rig.tick(config().suspicion_gather_us - 1)).is_empty());
        let chosen = rig.tick(1);
        let expected = freeze(1, vec![leaver(3, Why::LinkDown)], vec![]);
        match reached.len() {
            2 => assert_eq!(proposed(&chosen), [&expected]),
            _ => assert!(proposed(&chosen).is_empty(), "{chosen:?}"),
        }
    }
}

#[test]
fn every_stayer_reports_before_the_install_and_who_does_not_is_left_out() {
    let mut rig = Rig::new();
    rig.lead_by(1, &[1, 2, 3]);
    rig.tick(1_000);
    let asks = rig.commit(1, freeze(1, vec![], vec![joiner(4, None)]));
    assert_eq!(sent(&asks).iter().filter(|(_, m)| matches!(m, Message::Ask(Change(1)))).count(), 2, "{asks:?}");
    assert!(matches!(rig.report(2, 7, 0)[..], [Effect::Dropped(Dropped::OtherChange)]));
    assert!(proposed(&rig.report(2, 1, 0)).is_empty(), "a majority is not enough");
    let standstill = rig.machine.standstill().expect("frozen");
    assert_eq!(standstill.waits_for, [Incarnation(3), Incarnation(4)]);
    let late = rig.tick(config().report_after_us);
    assert_eq!(proposed(&late), [&freeze(1, vec![leaver(3, Why::Unreported)], vec![])], "{late:?}");
    rig.commit(2, freeze(1, vec![leaver(3, Why::Unreported)], vec![]));
    let done = rig.report(2, 2, 0);
    assert!(matches!(proposed(&done)[..], [Command::Install(install)] if install.change == Change(2)), "{done:?}");
    let status = rig.machine.status();
    assert_eq!(status.pending.map(|pending| pending.change), Some(Change(2)));
}

#[test]
fn a_member_below_the_cut_is_told_who_holds_the_round() {
    let mut rig = Rig::new();
    rig.lead_by(1, &[1, 2, 3]);
    rig.commit(1, freeze(1, vec![leaver(3, Why::Politely)], vec![]));
    rig.report(2, 1, 0);
    let told = rig.report(3, 1, 1);
    let level = |(to, message): &(u64, &Message)| match message {
        Message::Level(level) => Some((*to, level.round, level.input_hash, level.holders.clone())),
        _ => None,
    };
    let levels: Vec<_> = sent(&told).iter().filter_map(level).collect();
    assert_eq!(levels, [(2, Round(1), Some(1), vec![Incarnation(3)])], "a polite leaver's rounds count too");
    assert!(
        matches!(sent(&told)[..], [.., (3, Message::Need { round: Round(1), .. })]),
        "this one lacks it too: {told:?}"
    );
    // What a dead holder alone completed never happened: the change starts again without it.
    rig.feed(Input::LinkDown(Incarnation(3)));
    let again = rig.tick(config().report_after_us);
    assert_eq!(proposed(&again), [&freeze(1, vec![leaver(3, Why::Unreported)], vec![])], "{again:?}");
    rig.commit(2, freeze(1, vec![leaver(3, Why::Unreported)], vec![]));
    let done = rig.report(2, 2, 0);
    assert!(matches!(proposed(&done)[..], [Command::Install(install)] if install.cut == Round(0)), "{done:?}");
}

#[test]
fn the_next_leader_asks_for_the_reports_of_the_pending_change() {
    let mut rig = Rig::new();
    rig.lead_by(2, &[]);
    rig.commit(1, freeze(1, vec![leaver(3, Why::LinkDown)], vec![]));
    let told = rig.lead_by(3, &[]);
    assert!(matches!(sent(&told)[..], [(3, Message::Report(_))]), "the new leader is told: {told:?}");
    let asks = rig.lead_by(1, &[1, 2]);
    assert!(sent(&asks).iter().any(|(to, m)| *to == 2 && matches!(m, Message::Ask(Change(1)))), "{asks:?}");
    let done = rig.report(2, 1, 0);
    assert!(matches!(proposed(&done)[..], [Command::Install(_)]), "{done:?}");
    assert!(proposed(&rig.tick(1_000)).is_empty());
    let again = rig.tick(config().report_after_us);
    assert!(matches!(proposed(&again)[..], [Command::Install(_)]), "what is proposed may be lost: {again:?}");
}

#[test]
fn digests_of_reports_are_judged_like_those_of_rounds() {
    let mut rig = Rig::new();
    rig.lead_by(1, &[1, 2, 3]);
    rig.commit(1, freeze(1, vec![], vec![joiner(4, None)]));
    rig.link(4, 3, None);
    rig.report(2, 1, 0);
    rig.report(4, 1, 0);
    let differs = Report {
        change: Change(1),
        completed: Round(0),
        input_hash: None,
        digest: 99,
        links: [1, 2].map(Incarnation).to_vec(),
    };
    let judged = rig.receive(3, Message::Report(Box::new(differs)));
    let expected = freeze(1, vec![leaver(3, Why::Diverged)], vec![joiner(4, None)]);
    assert_eq!(proposed(&judged), [&expected], "{judged:?}");
}

// -- the cluster

fn calm(nodes: usize, outside: usize, seed: u64) -> Cluster {
    let mut cluster = Cluster::new(&Setup { outside, ..Setup::of(nodes, seed) });
    settle(&mut cluster).unwrap_or_else(|fault| panic!("{fault}"));
    cluster
}

fn until(cluster: &mut Cluster, what: &str, done: impl Fn(&Cluster) -> bool) {
    for _ in 0..100_000 {
        if done(cluster) {
            return;
        }
        cluster.step(false);
        assert_eq!(cluster.fault, None, "{what}");
    }
    panic!("never: {what}");
}

#[test]
fn a_stopped_member_is_evicted_as_silent_and_comes_back_as_another_life() {
    let mut cluster = calm(3, 0, 1);
    cluster.nodes[2].asleep = true;
    until(&mut cluster, "a view without it", |c| c.nodes[0].machine.view().is_some_and(|v| v.members.len() == 2));
    let past = cluster.truth.last.clone().expect("a change");
    assert_eq!(past.leaving, [leaver(3, Why::Silent)]);
    assert_eq!(cluster.nodes[0].machine.status().last.map(|last| last.leaving), Some(past.leaving));
    cluster.nodes[2].asleep = false;
    assert!(settle(&mut cluster).expect("all are in one view"));
    assert_eq!(cluster.truth.members.len(), 3);
    assert_ne!(cluster.nodes[2].life(), Incarnation(3));
}

#[test]
fn a_member_whose_replica_differs_leaves_and_comes_back_with_the_state_of_the_others() {
    let mut cluster = calm(3, 0, 5);
    cluster.tampered = true;
    let view = View { epoch: Epoch(99), ..cluster.truth.view() };
    let replica = cluster.nodes[2].replica.as_mut().expect("installed");
    replica.install(view, &[], &mut Vec::new()).expect("the same ranks");
    until(&mut cluster, "it finds out", |c| matches!(c.nodes[2].left, Some(Left::Diverged { .. })));
    until(&mut cluster, "a view without it", |c| c.truth.members.len() == 2);
    assert_eq!(cluster.truth.last.as_ref().map(|l| l.leaving.clone()), Some(vec![leaver(3, Why::Diverged)]));
    assert!(settle(&mut cluster).expect("all are in one view"));
    assert!(cluster.nodes[0].left.is_none() && cluster.nodes[1].left.is_none(), "the majority stays");
}

#[test]
fn a_joiner_whose_donor_goes_takes_the_state_from_another_and_one_that_goes_changes_nothing() {
    let cluster = calm(4, 1, 3);
    assert_eq!(cluster.truth.members.len(), 4, "it joined");
    let mut cluster = Cluster::new(&Setup { outside: 1, ..Setup::of(4, 3) });
    until(&mut cluster, "a donor", |c| c.nodes[3].machine.transfer.donor().is_some());
    let donor = cluster.nodes[3].machine.transfer.donor().and_then(|donor| cluster.at(donor)).expect("a node");
    cluster.cut(donor, 3);
    until(&mut cluster, "the link is down there", |c| c.nodes[3].machine.transfer.donor().is_none());
    cluster.link(donor, 3);
    let first = cluster.nodes[donor].life();
    until(&mut cluster, "another donor", |c| c.nodes[3].machine.transfer.donor().is_some_and(|d| d != first));
    // The joiner dies: no change comes of it.
    for other in 0..3 {
        cluster.cut(other, 3);
    }
    cluster.nodes[3].up = false;
    cluster.nodes[3].retired = true;
    let epoch = cluster.truth.epoch;
    until(&mut cluster, "rounds go on", |c| c.least_completed() > 50);
    assert_eq!((cluster.truth.epoch, cluster.truth.members.len()), (epoch, 3));
}

#[test]
fn a_polite_leaver_reports_and_the_last_member_just_goes() {
    let mut cluster = calm(2, 0, 2);
    cluster.nodes[0].leaving = true;
    cluster.feed(0, Input::Leave);
    until(&mut cluster, "it left", |c| c.nodes[0].left == Some(Left::Politely));
    until(&mut cluster, "one member", |c| c.truth.members.len() == 1);
    assert_eq!(cluster.truth.last.as_ref().map(|l| l.leaving.clone()), Some(vec![leaver(1, Why::Politely)]));
    until(&mut cluster, "it goes on alone", |c| c.nodes[1].machine.view().is_some_and(|v| v.members.len() == 1));
    cluster.feed(1, Input::Leave);
    assert_eq!(cluster.nodes[1].left, Some(Left::Politely));
}

#[test]
fn an_actor_restart_is_one_change_for_the_cluster() {
    let mut cluster = calm(3, 0, 4);
    let ranks = cluster.truth.members[1].ranks.clone();
    let old = cluster.nodes[1].life();
    cluster.new_life(1, Some(old));
    let new = cluster.nodes[1].life();
    until(&mut cluster, "the new life is in", |c| c.truth.position(new).is_some());
    assert_eq!(cluster.truth.epoch, Epoch(2), "one change");
    assert_eq!(
        cluster.truth.last.as_ref().map(|l| l.leaving.clone()),
        Some(vec![Leaver { incarnation: old, why: Why::Replaced }])
    );
    assert_eq!(cluster.truth.members[2].ranks, ranks);
    assert!(settle(&mut cluster).expect("all are in one view"));
}

#[test]
fn a_standstill_names_whose_word_is_missing() {
    let mut cluster = calm(3, 0, 6);
    cluster.nodes[2].asleep = true;
    until(&mut cluster, "the round waits", |c| {
        c.nodes[0].machine.standstill().is_some_and(|s| s.waits_for == [Incarnation(3)])
    });
    assert!(!cluster.nodes[0].machine.refuses(cluster.now_us));
}

#[test]
fn a_witness_leads_changes_and_is_in_no_view() {
    let life = Life { name: name(8), incarnation: Incarnation(9), ranks: 0, replaces: None, witness: true };
    let mut rig = Rig { machine: Machine::new(life, config(), 1), now_us: 1 };
    for other in [1, 2] {
        rig.link(other, other as usize - 1, None);
    }
    rig.feed(Input::Founded { cluster: ClusterId(9), members: vec![place(1), place(2)] });
    rig.lead_by(9, &[]);
    let all = [1, 2, 9].map(Incarnation).to_vec();
    rig.feed(Input::Consensus(Consensus {
        leader: Some(Incarnation(9)),
        voters: all,
        reached: vec![Incarnation(9), Incarnation(1)],
    }));
    let sight = Sight { by: Incarnation(1), epoch: Epoch(1), down: vec![Incarnation(2)], ..Sight::default() };
    rig.receive(1, Message::Sight { sight: Box::new(sight), passed_on: false });
    let chosen = rig.tick(config().suspicion_gather_us);
    assert_eq!(proposed(&chosen), [&freeze(1, vec![leaver(2, Why::LinkDown)], vec![])]);
    rig.commit(1, freeze(1, vec![leaver(2, Why::LinkDown)], vec![]));
    let done = rig.report(1, 1, 3);
    assert!(matches!(proposed(&done)[..], [Command::Install(install)] if install.cut == Round(3)), "{done:?}");
    assert!(rig.machine.view().is_none() && rig.machine.status().view.is_some());
}
