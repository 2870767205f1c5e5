use super::*;
use crate::ids::{ClusterId, Epoch, Incarnation, RankId, RequestKey};
use crate::round::{Applied, Config, Contribution, Effect, Entry, Input, Member, Merged, View};
use std::collections::BTreeMap;

const STEP_WAIT_US: u64 = 50_000;
const HEARTBEAT_US: u64 = 200_000;

/// A machine whose replica answers each round when the test says so, and whose members host one rank each.
struct Rig {
    machine: Machine,
    effects: Vec<Effect>,
}

impl Rig {
    /// Member 1 of `members`, behind its first round. Its rank passed that.
    fn new(members: u64, ranks_here: u32) -> Self {
        let member = |m: u64| Member {
            incarnation: Incarnation(m),
            ranks: (0..if m == 1 { ranks_here } else { 1 }).map(|r| RankId(10 * m as u32 + r)).collect(),
        };
        let view = View { epoch: Epoch(1), members: (1..=members).map(member).collect(), first_round: Round(1) };
        let config = Config { lockstep: true, ..Config::default() };
        let machine = Machine::new(ClusterId(9), Incarnation(1), view, config).expect("a member");
        let mut rig = Self { machine, effects: Vec::new() };
        rig.apply(0, 0, false);
        assert_eq!(rig.due(), Some(STEP_WAIT_US), "no rank has said where it stands");
        for rank in 0..ranks_here {
            rig.rank(0, 10 + rank, 1, false);
        }
        rig
    }

    fn drive(&mut self, now_us: u64, input: Input) {
        self.machine.handle(now_us, input, &mut self.effects);
        self.machine.check().expect("invariants");
    }

    fn rank(&mut self, now_us: u64, rank: u32, boundary: u64, ready: bool) {
        let snapshot = RankSnapshot { rank: RankId(rank), boundary: Round(boundary), ready, ..RankSnapshot::default() };
        self.drive(now_us, Input::FromRank { entry: None, snapshot });
    }

    fn apply(&mut self, now_us: u64, round: u64, stepping: bool) {
        let round = Round(round);
        self.drive(now_us, Input::Applied(Applied { round, digest: 7, waiting: false, probing: false, stepping }));
    }

    fn other(&mut self, now_us: u64, member: u64) {
        let contribution = Contribution {
            cluster: ClusterId(9),
            epoch: Epoch(1),
            round: Round(self.machine.completed().0 + 1),
            member: Incarnation(member),
            clock_us: now_us,
            entries: vec![],
            ranks: vec![],
            prefix_matches: vec![],
            digest: 7,
            draining: false,
        };
        self.drive(now_us, Input::Received(contribution));
    }

    fn due(&self) -> Option<u64> {
        self.machine.poll_timeout()
    }

    fn announce(&mut self, now_us: u64) {
        self.drive(now_us, Input::Announce(Entry::Cancel(RequestKey { ingress: Incarnation(1), seq: now_us })));
    }

    /// The round that was completed since the last call.
    fn completed(&mut self) -> Option<Merged> {
        let effects = std::mem::take(&mut self.effects);
        effects.into_iter().find_map(|e| match e {
            Effect::Completed(merged) => Some(merged),
            _ => None,
        })
    }

    /// The late ranks of the contribution that was sent since the last call, if one was.
    fn sent(&mut self) -> Option<Vec<u32>> {
        let effects = std::mem::take(&mut self.effects);
        effects.into_iter().find_map(|e| match e {
            Effect::Send(contribution) => {
                Some(contribution.ranks.iter().filter(|r| r.late).map(|r| r.rank.0).collect())
            }
            _ => None,
        })
    }
}

#[test]
fn a_round_waits_for_the_boundary_of_each_local_rank_and_no_longer() {
    let mut rig = Rig::new(1, 2);
    assert!(rig.completed().is_some(), "both stand before round 1");
    rig.apply(10, 1, true);
    assert_eq!(rig.due(), Some(10 + STEP_WAIT_US));
    rig.rank(400, 10, 2, true);
    assert!(rig.completed().is_none(), "the other still runs its step");
    rig.announce(450);
    assert!(rig.completed().is_none(), "what is announced waits for the step too");
    rig.rank(500, 11, 2, false);
    let merged = rig.completed().expect("the least interval is no matter");
    assert!(merged.contributions[0].ranks.iter().all(|r| !r.late));
    assert_eq!(merged.contributions[0].entries.len(), 1);
}

#[test]
fn a_step_that_takes_too_long_makes_its_rank_late_and_it_is_waited_for_again_once_it_is_back() {
    let mut rig = Rig::new(2, 2);
    assert_eq!(rig.due(), None, "its contribution is out");
    rig.other(0, 2);
    rig.apply(0, 1, true);
    rig.rank(100, 10, 2, true);
    rig.sent();
    rig.other(200, 2);
    rig.drive(STEP_WAIT_US - 1, Input::Tick);
    assert_eq!(rig.sent(), None, "others wait, and yet it waits for its own");
    rig.drive(STEP_WAIT_US, Input::Tick);
    assert_eq!(rig.sent(), Some(vec![11]));
    // The late one is not waited for in the next round; the other is.
    rig.apply(60_000, 2, true);
    assert_eq!(rig.due(), Some(110_000));
    rig.rank(60_500, 10, 3, true);
    assert_eq!(rig.sent(), Some(vec![11]));
    rig.other(60_600, 2);
    rig.apply(60_700, 3, true);
    // It is back, and takes the turn of round 3: that step is waited for.
    rig.rank(60_800, 11, 3, false);
    rig.rank(60_900, 10, 4, true);
    assert_eq!((rig.sent(), rig.due()), (None, Some(110_700)));
    rig.rank(61_000, 11, 4, true);
    assert_eq!(rig.sent(), Some(vec![]));
}

#[test]
fn an_idle_member_is_no_brake_while_others_step_and_follows_whoever_begins() {
    let mut rig = Rig::new(2, 1);
    rig.other(0, 2);
    rig.completed();
    rig.apply(10, 1, true);
    rig.rank(20, 10, 2, false);
    assert_eq!(rig.sent(), Some(vec![]), "at once: the other runs a step and is the pace");
    rig.other(900, 2);
    rig.apply(910, 2, false);
    rig.rank(920, 10, 3, false);
    assert_eq!((rig.sent(), rig.due()), (None, Some(20 + HEARTBEAT_US)), "nobody has a step");
    rig.other(1_000, 2);
    assert_eq!(rig.sent(), Some(vec![]), "the other member has begun the round");
}

#[test]
fn a_rank_that_comes_to_have_a_step_begins_a_round_at_once() {
    let mut rig = Rig::new(1, 1);
    rig.apply(10, 1, false);
    rig.rank(20, 10, 2, false);
    rig.completed();
    assert_eq!(rig.due(), Some(HEARTBEAT_US));
    rig.rank(100, 10, 2, true);
    assert!(rig.completed().is_some_and(|m| m.contributions[0].ranks[0].ready));
}

/// Whatever ranks say, rounds in which no step runs come at the pace of heartbeats, or of `step_wait_us` while one is late.
#[test]
fn nothing_spins_without_steps() {
    let mut idle = Rig::new(1, 1);
    let mut rounds = 0;
    for now_us in (0..10 * HEARTBEAT_US).step_by(100) {
        idle.drive(now_us, Input::Tick);
        while let Some(merged) = idle.completed() {
            rounds += 1;
            idle.apply(now_us, merged.round.0, false);
            idle.rank(now_us, 10, merged.round.0 + 1, false);
        }
    }
    assert_eq!(rounds, 10, "one a heartbeat");
    let (mut stuck, mut rounds) = (Rig::new(1, 1), 0);
    for now_us in (0..10 * STEP_WAIT_US).step_by(100) {
        stuck.drive(now_us, Input::Tick);
        while let Some(merged) = stuck.completed() {
            rounds += 1;
            assert_eq!(merged.contributions[0].ranks[0].late, rounds > 1);
            stuck.apply(now_us, merged.round.0, false);
        }
    }
    assert_eq!(rounds, 10, "one a bound of the wait");
    // With a late rank, what is announced goes out as outside lockstep: at once, but not again before the least interval.
    let now_us = 10 * STEP_WAIT_US - 90;
    stuck.announce(now_us);
    let merged = stuck.completed().expect("the last round is long past");
    stuck.apply(now_us, merged.round.0, false);
    stuck.announce(now_us + 10);
    assert_eq!((stuck.completed(), stuck.due()), (None, Some(now_us + 2_000)));
}

#[test]
fn outside_lockstep_boundaries_and_lateness_mean_nothing() {
    let member = Member { incarnation: Incarnation(1), ranks: vec![RankId(10)] };
    let view = View { epoch: Epoch(1), members: vec![member], first_round: Round(1) };
    let machine = Machine::new(ClusterId(9), Incarnation(1), view, Config::default()).expect("a member");
    let mut rig = Rig { machine, effects: Vec::new() };
    rig.rank(0, 10, 0, true);
    rig.apply(0, 0, true);
    assert!(rig.completed().is_some_and(|m| !m.contributions[0].ranks[0].late));
    rig.apply(10, 1, true);
    assert_eq!(rig.due(), Some(HEARTBEAT_US));
}

fn turn(round: u64, active: u32) -> Turn {
    let occupancy = Occupancy { expected: 2, active, ..Occupancy::default() };
    Turn { round: Round(round), occupancy }
}

#[test]
fn a_rank_runs_one_step_a_turn_and_takes_the_newest_turn_behind_a_long_step() {
    let mut rank = Lockstep::new(4);
    assert_eq!((rank.begin(|| Some(1)), rank.boundary()), (Begun::Nothing, Round(0)), "not its turn");
    rank.turn(turn(5, 1));
    assert_eq!((rank.begin(|| Some(1)), rank.boundary()), (Begun::Step(1), Round(5)));
    assert_eq!(rank.begin(|| Some(2)), Begun::Nothing, "one a turn");
    rank.ended();
    assert_eq!((rank.begin(|| Some(2)), rank.boundary()), (Begun::Nothing, Round(6)));
    rank.turn(turn(6, 1));
    assert_eq!(rank.begin(|| Some(3)), Begun::Step(3));
    rank.turn(turn(7, 1));
    rank.turn(turn(8, 1));
    assert_eq!((rank.begin(|| Some(4)), rank.boundary()), (Begun::Nothing, Round(6)), "late");
    rank.ended();
    assert_eq!((rank.begin(|| Some(4)), rank.boundary()), (Begun::Step(4), Round(8)), "turn 7 is missed");
    // A new cluster counts from 0.
    rank.ended();
    rank.turn(turn(0, 0));
    assert_eq!((rank.begin(|| Some(5)), rank.boundary()), (Begun::Step(5), Round(0)));
}

#[test]
fn a_rank_with_nothing_to_run_is_padded_while_the_view_has_requests() {
    let begin = |turn: Turn| {
        let mut rank = Lockstep::new(4);
        rank.turn(turn);
        let begun = rank.begin(|| None::<()>);
        assert_eq!(rank.boundary(), Round(turn.round.0 + 1), "it passes at once");
        begun
    };
    assert_eq!(begin(turn(3, 0)), Begun::Dummy, "no request");
    assert_eq!(begin(turn(3, 1)), Begun::Dummy, "requests, and none can run");
    let idle = Turn { occupancy: Occupancy::default(), ..turn(3, 0) };
    assert_eq!(begin(idle), Begun::Nothing, "the group expects no request anywhere");
}

/// Three members with one rank each, steps of any length, and messages that take their time; all in virtual time.
struct Group {
    draw: u64,
    now_us: u64,
    agenda: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    nodes: Vec<Node>,
    long_steps: bool,
}

struct Node {
    machine: Machine,
    rank: Lockstep,
    running: bool,
    /// Steps to run.
    left: u32,
    lates: u64,
}

enum Event {
    Tick(usize),
    StepDone(usize),
    Contribution(usize, Contribution),
    Work(usize, u32),
}

impl Group {
    fn new(seed: u64, long_steps: bool) -> Self {
        let member = |m: u64| Member { incarnation: Incarnation(m), ranks: vec![RankId(m as u32)] };
        let view = View { epoch: Epoch(1), members: (1..=3).map(member).collect(), first_round: Round(1) };
        let config = Config { lockstep: true, ..Config::default() };
        let node = |m: u64| {
            let machine = Machine::new(ClusterId(9), Incarnation(m), view.clone(), config.clone()).expect("a member");
            Node { machine, rank: Lockstep::new(8), running: false, left: 0, lates: 0 }
        };
        let draw = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let nodes = (1..=3).map(node).collect();
        let mut group = Self { draw, now_us: 0, agenda: BTreeMap::new(), scheduled: 0, nodes, long_steps };
        (0..3).for_each(|node| group.applied(node, Round(0), false));
        group
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.draw ^= self.draw << 13;
        self.draw ^= self.draw >> 7;
        self.draw ^= self.draw << 17;
        self.draw % bound
    }

    fn at(&mut self, delay_us: u64, event: Event) {
        self.scheduled += 1;
        self.agenda.insert((self.now_us + delay_us, self.scheduled), event);
    }

    fn drive(&mut self, at: usize, input: Input) {
        let mut effects = Vec::new();
        self.nodes[at].machine.handle(self.now_us, input, &mut effects);
        self.nodes[at].machine.check().expect("invariants");
        for effect in effects {
            match effect {
                Effect::Send(contribution) => {
                    for to in (0..3).filter(|to| *to != at) {
                        let delay_us = 50 + self.below(500);
                        self.at(delay_us, Event::Contribution(to, contribution.clone()));
                    }
                }
                Effect::Completed(merged) => self.completed(at, &merged),
                Effect::Dropped(dropped) => panic!("nothing is dropped here: {dropped:?}"),
            }
        }
        if let Some(due_us) = self.nodes[at].machine.poll_timeout() {
            self.at(due_us.saturating_sub(self.now_us), Event::Tick(at));
        }
    }

    fn completed(&mut self, at: usize, merged: &Merged) {
        let ranks = || merged.contributions.iter().flat_map(|c| &c.ranks);
        for snapshot in ranks() {
            let node = &mut self.nodes[snapshot.rank.0 as usize - 1];
            let stands = node.rank.boundary();
            assert!(snapshot.late || stands >= merged.round, "{} before {stands}, {}", snapshot.rank, merged.round);
            node.lates += u64::from(snapshot.late);
        }
        let stepping = ranks().any(|s| s.ready && !s.late);
        self.applied(at, merged.round, stepping);
    }

    /// The replica is through: the rank takes its turn, and says where it stands behind that.
    fn applied(&mut self, at: usize, round: Round, stepping: bool) {
        self.nodes[at].rank.turn(turn(round.0, 1));
        self.drive(at, Input::Applied(Applied { round, digest: 7, waiting: false, probing: false, stepping }));
        self.carry_on(at);
    }

    fn carry_on(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let left = node.left;
        if let Begun::Step(()) = node.rank.begin(|| (left > 0).then_some(())) {
            (node.running, node.left) = (true, left - 1);
            let long = self.long_steps && self.below(20) == 0;
            let took_us = if long { 200_000 } else { 100 + self.below(3_000) };
            self.at(took_us, Event::StepDone(at));
        }
        let node = &self.nodes[at];
        let snapshot = RankSnapshot {
            rank: RankId(at as u32 + 1),
            boundary: node.rank.boundary(),
            ready: !node.running && node.left > 0,
            ..RankSnapshot::default()
        };
        self.drive(at, Input::FromRank { entry: None, snapshot });
    }

    fn run(&mut self, until_us: u64) {
        while let Some(entry) = self.agenda.first_entry().filter(|e| e.key().0 <= until_us) {
            let ((now_us, _), event) = entry.remove_entry();
            self.now_us = now_us;
            match event {
                Event::Tick(at) => self.drive(at, Input::Tick),
                Event::Contribution(to, contribution) => self.drive(to, Input::Received(contribution)),
                Event::StepDone(at) => {
                    self.nodes[at].running = false;
                    self.nodes[at].rank.ended();
                    self.carry_on(at);
                }
                Event::Work(at, steps) => {
                    self.nodes[at].left += steps;
                    self.carry_on(at);
                }
            }
        }
        self.now_us = until_us;
    }

    fn rounds(&self) -> u64 {
        self.nodes[0].machine.completed().0
    }
}

#[test]
fn whatever_steps_and_messages_take_ranks_keep_step_and_come_to_rest() {
    for seed in 1..=60 {
        let mut group = Group::new(seed, seed % 2 == 0);
        for at in 0..3 {
            for _ in 0..4 {
                let (delay_us, steps) = (group.below(400_000), 1 + group.below(40) as u32);
                group.at(delay_us, Event::Work(at, steps));
            }
        }
        group.run(30_000_000);
        assert!(group.nodes.iter().all(|n| n.left == 0 && !n.running), "seed {seed}: steps are left");
        let lates: u64 = group.nodes.iter().map(|n| n.lates).sum();
        assert_eq!(lates > 0, seed % 2 == 0, "seed {seed}: {lates} late");
        let before = group.rounds();
        group.run(30_000_000 + 20 * HEARTBEAT_US);
        let idle = group.rounds() - before;
        assert!((19..=21).contains(&idle), "seed {seed}: {idle} rounds in 20 heartbeats");
    }
}
