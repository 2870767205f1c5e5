//! Whatever a peer says, or the log holds, a machine takes it or drops it, and stays sound.

use super::super::*;
use super::cluster::{Cluster, Draw, Setup};
use crate::ids::Epoch;

/// Numbers around what is true, and at the ends.
fn number(draw: &mut Draw, near: u64) -> u64 {
    match draw.below(7) {
        0 => 0,
        1 => u64::MAX,
        2 => u64::MAX - 1,
        3 => near.saturating_sub(1),
        4 => near + 1,
        5 => near + 2,
        _ => near,
    }
}

fn lives(draw: &mut Draw) -> Vec<Incarnation> {
    (0..draw.below(4)).map(|_| Incarnation(draw.below(12))).collect()
}

fn contribution(draw: &mut Draw, machine: &Machine, member: Incarnation) -> Contribution {
    let agreed = machine.agreed().cloned();
    Contribution {
        cluster: agreed.as_ref().map_or(ClusterId(3), |a| a.cluster),
        epoch: Epoch(number(draw, agreed.map_or(1, |a| a.epoch.0))),
        round: Round(number(draw, machine.completed().0)),
        member,
        clock_us: draw.below(1_000_000),
        entries: vec![],
        ranks: vec![],
        prefix_matches: vec![],
        digest: draw.below(3),
        draining: draw.one_in(2),
    }
}

fn message(draw: &mut Draw, machine: &Machine, from: Incarnation, snapshot: &crate::replica::Snapshot) -> Message {
    let agreed = machine.agreed();
    let cluster = agreed.map_or(ClusterId(3), |a| a.cluster);
    let epoch = Epoch(number(draw, agreed.map_or(1, |a| a.epoch.0)));
    let change = Change(number(draw, agreed.and_then(Agreed::change).map_or(1, |change| change.0)));
    let round = Round(number(draw, machine.completed().0));
    let merged = Box::new(Merged {
        epoch,
        round,
        clock_us: draw.below(1_000_000),
        contributions: (0..draw.below(4)).map(|m| contribution(draw, machine, Incarnation(m + 1))).collect(),
    });
    match draw.below(17) {
        0 => Message::Contribution(Box::new(contribution(draw, machine, from))),
        1 => Message::Hello { cluster, epoch, completed: round },
        2 => Message::Stale { cluster: ClusterId(draw.below(2)), epoch },
        3 => {
            let (down, missing) = (lives(draw), lives(draw));
            let gone = lives(draw).into_iter().map(|incarnation| Leaver { incarnation, why: Why::Restarted }).collect();
            let sight = Sight { by: from, epoch, down, round, missing, gone };
            Message::Sight { sight: Box::new(sight), passed_on: draw.one_in(2) }
        }
        4 => Message::Look { epoch },
        5 => Message::Ask(change),
        6 => {
            let (digest, links) = (draw.below(3), lives(draw));
            Message::Report(Box::new(Report { change, completed: round, input_hash: Some(digest), digest, links }))
        }
        7 => {
            let input_hash = draw.one_in(2).then(|| merged.hash());
            Message::Level(Box::new(Level { change, round, input_hash, holders: lives(draw) }))
        }
        8 => Message::Need { change, round, by: from },
        9 => Message::Fill { change, to: machine.incarnation(), merged },
        10 => {
            let name = machine.links.get(&from).map_or(Name("x".into()), |link| link.name.clone());
            let joiner = Joiner { name, incarnation: from, ranks: u32::MAX, replaces: lives(draw).first().copied() };
            Message::Joining(Box::new(Joining { joiner, epoch, links: lives(draw) }))
        }
        11 => Message::Leaving { epoch },
        12 => Message::Want { cluster, epoch },
        13 => Message::Refused,
        14 => Message::Enough,
        15 => {
            let replica = snapshot.clone();
            Message::State(Box::new(State { cluster, epoch, round, clock_us: 1, replica }))
        }
        _ => Message::Round(merged),
    }
}

fn entry(draw: &mut Draw, machine: &Machine) -> Command {
    let agreed = machine.agreed();
    let epoch = Epoch(number(draw, agreed.map_or(1, |a| a.epoch.0)));
    let joiner = |incarnation: Incarnation| Joiner {
        name: Name("x".into()),
        incarnation,
        ranks: (incarnation.0 as u32).wrapping_mul(0x4000_0000),
        replaces: None,
    };
    if draw.one_in(2) {
        let leaving = lives(draw).into_iter().map(|incarnation| Leaver { incarnation, why: Why::Silent }).collect();
        let joining = lives(draw).into_iter().map(joiner).collect();
        return Command::Freeze(Freeze { epoch, leaving, joining });
    }
    let change = Change(number(draw, agreed.and_then(Agreed::change).map_or(1, |change| change.0)));
    let members = agreed.map(Agreed::members_next).unwrap_or_default();
    let cut = Round(number(draw, machine.completed().0));
    Command::Install(Install { change, epoch, members, cut, digest: draw.below(2) })
}

#[test]
fn a_machine_takes_or_drops_whatever_comes_and_stays_sound() {
    for seed in 1..=40 {
        let nodes = 3 + (seed % 3) as usize;
        let mut cluster = Cluster::new(&Setup { outside: usize::from(seed % 2 == 0), ..Setup::of(nodes, seed) });
        let mut draw = Draw::new(seed + 1000);
        for step in 0..3_000 {
            cluster.step(true);
            if step % 100 == 7 {
                cluster.fault();
            }
            assert_eq!(cluster.fault.take(), None, "seed {seed}");
            let at = draw.below(nodes as u64) as usize;
            let snapshot =
                cluster.nodes.iter().find_map(|node| node.replica.as_ref()).map(|replica| replica.snapshot());
            let Some(snapshot) = snapshot.filter(|_| step % 3 == 0) else { continue };
            // A copy hears what the machine itself does not.
            let mut machine = cluster.nodes[at].machine.clone();
            let mut out = Vec::new();
            for _ in 0..4 {
                let linked: Vec<Incarnation> = machine.links.keys().copied().collect();
                let from = linked.get(draw.below(linked.len() as u64 + 1) as usize).copied().unwrap_or(Incarnation(99));
                let input = match draw.below(6) {
                    0 => {
                        let index = machine.agreed().map_or(1, |agreed| agreed.index + 1);
                        Input::Committed { index, command: entry(&mut draw, &machine) }
                    }
                    _ => Input::Received { from, message: Box::new(message(&mut draw, &machine, from, &snapshot)) },
                };
                let said = format!("{input:?}");
                machine.handle(cluster.now_us, input, &mut out);
                if let Err(broken) = machine.check() {
                    panic!("seed {seed} step {step}: {broken} by {}", &said[..said.len().min(2_000)]);
                }
            }
        }
    }
}
