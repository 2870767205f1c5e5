//! Each rule by itself, on the machine of node `a`, whose first life is 1.

use super::*;

struct Rig {
    machine: Machine,
    now_us: u64,
}

impl Rig {
    fn new(config: Config) -> Self {
        Self { machine: Machine::new(name(0), Incarnation(1), config), now_us: 0 }
    }

    /// Linked with `b` of life 2 and `c` of life 3, and so pledged.
    fn pledged() -> Self {
        let mut rig = Self::new(config(3));
        rig.link(1, hello(2));
        rig.link(2, hello(3));
        rig
    }

    /// In the cluster of lives 1, 2 and 3.
    fn inside() -> Self {
        let mut rig = Self::pledged();
        rig.pledges(1, 2, set(1, 2, 3));
        rig.pledges(2, 3, set(1, 2, 3));
        assert_eq!(rig.machine.cluster(), Some(set(1, 2, 3).cluster()));
        rig
    }

    fn put(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.machine.handle(self.now_us, input, &mut out);
        self.machine.check().expect("invariants");
        out
    }

    fn link(&mut self, at: usize, hello: Hello) -> Vec<Effect> {
        self.put(Input::LinkUp { name: name(at), hello })
    }

    fn says(&mut self, at: usize, incarnation: u64, place: Place) -> Vec<Effect> {
        let standing = Box::new(Standing { incarnation: Incarnation(incarnation), place });
        self.put(Input::Received { from: name(at), standing })
    }

    fn pledges(&mut self, at: usize, incarnation: u64, founders: Founders) -> Vec<Effect> {
        self.says(at, incarnation, Place::Outside { pledge: Some(founders) })
    }

    fn draws(&mut self, incarnation: u64) -> Vec<Effect> {
        self.put(Input::Incarnation(Incarnation(incarnation)))
    }

    /// Lets time pass up to what the machine waits for.
    fn tick(&mut self) -> Vec<Effect> {
        self.now_us = self.machine.poll_timeout().expect("the machine waits for a time");
        self.put(Input::Tick)
    }

    fn pledge(&self) -> Option<Founders> {
        match self.machine.standing().place {
            Place::Outside { pledge } => pledge,
            Place::Inside { .. } => None,
        }
    }
}

fn set(a: u64, b: u64, c: u64) -> Founders {
    Founders::new(vec![life(0, a), life(1, b), life(2, c)]).expect("three lives")
}

fn outside() -> Place {
    Place::Outside { pledge: None }
}

fn inside(founders: &Founders) -> Place {
    Place::Inside { cluster: founders.cluster(), founders: Some(founders.clone()) }
}

/// A cluster that this node has not founded.
fn older() -> Founders {
    set(90, 2, 92)
}

fn drawn(out: &[Effect]) -> Option<Why> {
    out.iter().find_map(|effect| match effect {
        Effect::DrawIncarnation(why) => Some(*why),
        _ => None,
    })
}

fn sent(out: &[Effect]) -> usize {
    out.iter().filter(|effect| matches!(effect, Effect::Send { .. })).count()
}

fn refused(out: &[Effect]) -> Option<&Refusal> {
    out.iter().find_map(|effect| match effect {
        Effect::Refuse { why, .. } => Some(why),
        _ => None,
    })
}

#[test]
fn a_set_of_all_names_begins_once_all_have_pledged_it() {
    let mut rig = Rig::new(config(3));
    assert_eq!(rig.machine.readiness().to_string(), "waits for names [b, c]");
    rig.link(1, hello(2));
    assert_eq!((rig.pledge(), rig.machine.readiness()), (None, Readiness::WaitsForNames(vec![name(2)])));
    let out = rig.link(2, hello(3));
    assert_eq!((rig.pledge(), sent(&out)), (Some(set(1, 2, 3)), 2));
    rig.pledges(1, 2, set(1, 2, 3));
    assert_eq!(rig.machine.readiness().to_string(), "waits for pledges of [c]");
    rig.pledges(2, 3, set(1, 2, 3));
    let cluster = set(1, 2, 3).cluster();
    assert_eq!(rig.machine.readiness(), Readiness::Inside(cluster));
    assert_eq!(rig.machine.counts().begun, 1);
}

#[test]
fn what_begins_names_the_cluster_and_all_its_members_and_the_others_are_told() {
    let mut rig = Rig::pledged();
    rig.pledges(1, 2, set(1, 2, 3));
    let out = rig.pledges(2, 3, set(1, 2, 3));
    let (cluster, members) = (set(1, 2, 3).cluster(), set(1, 2, 3).lives().to_vec());
    assert_eq!(out[0], Effect::Begin { cluster, members });
    assert_eq!(sent(&out), 2);
    assert_eq!(rig.machine.hello().cluster, Some(cluster));
}

#[test]
fn the_only_name_begins_alone() {
    let mut rig = Rig::new(config(1));
    let out = rig.put(Input::Tick);
    assert!(matches!(&out[..], [Effect::Begin { members, .. }] if members == &[life(0, 1)]));
}

#[test]
fn a_pledge_of_another_set_does_not_count() {
    let mut rig = Rig::pledged();
    rig.pledges(1, 2, set(1, 2, 3));
    rig.pledges(2, 3, set(9, 2, 3));
    assert_eq!(rig.machine.readiness(), Readiness::WaitsForPledges(vec![name(2)]));
}

#[test]
fn a_pledge_counts_although_the_link_of_who_made_it_is_gone() {
    let mut rig = Rig::pledged();
    rig.pledges(1, 2, set(1, 2, 3));
    rig.put(Input::LinkDown { name: name(1) });
    rig.pledges(2, 3, set(1, 2, 3));
    assert_eq!(rig.machine.cluster(), Some(set(1, 2, 3).cluster()));
}

#[test]
fn a_pledge_lapses_after_its_time_if_the_set_did_not_fill() {
    let mut rig = Rig::pledged();
    rig.put(Input::LinkDown { name: name(1) });
    assert_eq!(rig.machine.poll_timeout(), Some(10 * SECOND));
    let out = rig.tick();
    assert_eq!((rig.pledge(), sent(&out), rig.machine.poll_timeout()), (None, 1, None));
    assert_eq!(rig.machine.readiness(), Readiness::WaitsForNames(vec![name(1)]));
    // The name is back with the life that it had: the same set again.
    rig.link(1, hello(2));
    assert_eq!((rig.pledge(), rig.machine.counts().pledges), (Some(set(1, 2, 3)), 2));
}

#[test]
fn a_pledge_lapses_at_once_when_a_name_of_its_set_shows_another_life() {
    let mut rig = Rig::pledged();
    rig.pledges(1, 2, set(1, 2, 3));
    rig.link(1, hello(20));
    assert_eq!((rig.pledge(), rig.machine.counts().pledges_lapsed), (Some(set(1, 20, 3)), 1));
    // What life 2 had pledged fills no set of life 20.
    rig.pledges(2, 3, set(1, 20, 3));
    assert_eq!(rig.machine.readiness(), Readiness::WaitsForPledges(vec![name(1)]));
}

#[test]
fn a_member_shows_later_that_the_set_was_full() {
    let mut rig = Rig::pledged();
    rig.put(Input::LinkDown { name: name(1) });
    rig.tick();
    assert_eq!(rig.pledge(), None);
    let out = rig.says(2, 3, inside(&set(1, 2, 3)));
    assert!(matches!(&out[0], Effect::Begin { cluster, .. } if *cluster == set(1, 2, 3).cluster()));
}

#[test]
fn who_begins_a_cluster_that_has_evicted_it_since_draws_another_life() {
    let mut rig = Rig::pledged();
    rig.says(2, 3, inside(&set(1, 2, 3)));
    let out = rig.put(Input::Left(Left::Evicted));
    assert_eq!(drawn(&out), Some(Why::Left(Left::Evicted)));
    rig.draws(100);
    assert!(matches!(rig.machine.readiness(), Readiness::Waits { .. }));
    let out = rig.tick();
    assert!(matches!(&out[..], [Effect::Join { .. }, ..]), "{out:?}");
}

#[test]
fn who_never_pledged_the_set_joins_and_does_not_begin_it() {
    let mut rig = Rig::new(config(3));
    rig.link(2, hello(3));
    let out = rig.says(2, 3, inside(&set(1, 2, 3)));
    assert!(matches!(&out[..], [Effect::Join { .. }]), "{out:?}");
}

#[test]
fn one_member_of_a_cluster_stops_a_second_one_and_is_joined() {
    let mut rig = Rig::new(config(3));
    rig.link(1, Hello { cluster: Some(older().cluster()), ..hello(2) });
    rig.link(2, hello(3));
    assert_eq!(rig.pledge(), None, "its hello is enough");
    let out = rig.says(1, 2, inside(&older()));
    let cluster = older().cluster();
    assert_eq!(out, [Effect::Join { cluster, via: life(1, 2) }]);
    assert_eq!(rig.machine.readiness(), Readiness::Joining { cluster, via: life(1, 2) });
    let members = [older().lives(), &[life(0, 1)]].concat();
    let voters = older().lives().to_vec();
    rig.put(Input::InCluster(Membership { cluster, members, voters }));
    assert_eq!(rig.machine.readiness(), Readiness::Inside(cluster));
}

#[test]
fn a_member_ends_a_pledge() {
    let mut rig = Rig::pledged();
    rig.link(3, hello(4));
    let founders = Founders::new(vec![life(3, 4)]).expect("one life");
    let out = rig.says(3, 4, inside(&founders));
    assert!(out.contains(&Effect::Join { cluster: founders.cluster(), via: life(3, 4) }));
    assert_eq!(sent(&out), 3, "the others hear that the pledge is over");
}

#[test]
fn who_is_not_named_only_joins() {
    let mut rig = Rig::new(Config::new(vec![name(1), name(2)], VERSION, SETTINGS));
    rig.link(1, hello(2));
    rig.link(2, hello(3));
    assert_eq!((rig.pledge(), rig.machine.readiness()), (None, Readiness::WaitsForCluster));
}

#[test]
fn a_node_of_another_version_or_with_other_settings_is_refused_and_stops_a_second_cluster() {
    for (differs, says) in [
        (Hello { version: 2, ..hello(4) }, "protocol version 2 differs from ours, 1"),
        (
            Hello { settings: 7, ..hello(4) },
            "settings that decide differ (hash 0000000000000007, ours 0000000000005e77)",
        ),
    ] {
        let mut rig = Rig::new(config(3));
        let out = rig.link(3, Hello { cluster: Some(ClusterId(8)), ..differs });
        assert_eq!(refused(&out).map(ToString::to_string).as_deref(), Some(says));
        rig.link(1, hello(2));
        rig.link(2, hello(3));
        assert_eq!(rig.pledge(), None);
        assert_eq!(rig.machine.readiness().to_string(), format!("refused with d: {says}"));
        // Outside any cluster it stops nothing: it is not needed.
        rig.link(3, differs);
        assert_eq!((rig.pledge(), rig.machine.counts().refused), (Some(set(1, 2, 3)), 2));
    }
}

#[test]
fn a_name_that_is_needed_and_differs_is_waited_for_with_the_reason() {
    let mut rig = Rig::new(config(2));
    let out = rig.link(1, Hello { version: 3, ..hello(2) });
    let why = Refusal::Version { ours: 1, theirs: 3 };
    assert_eq!((refused(&out), sent(&out)), (Some(&why), 0));
    assert_eq!(rig.machine.readiness(), Readiness::Refused { name: name(1), why });
    rig.says(1, 2, outside());
    assert_eq!((rig.pledge(), rig.machine.counts().malformed), (None, 1));
    rig.link(1, hello(20));
    assert!(rig.pledge().is_some());
}

#[test]
fn its_own_name_is_taken() {
    let mut rig = Rig::new(config(1));
    let out = rig.link(0, hello(77));
    assert_eq!(refused(&out), Some(&Refusal::NameTaken { name: name(0) }));
}

#[test]
fn another_cluster_is_refused_and_counted_once_a_link_and_never_merged() {
    let mut rig = Rig::inside();
    let theirs = Founders::new(vec![life(3, 4)]).expect("one life");
    rig.link(3, hello(4));
    let out = rig.says(3, 4, inside(&theirs));
    let why = Refusal::OtherCluster { ours: set(1, 2, 3).cluster(), theirs: theirs.cluster() };
    assert_eq!((refused(&out), out.len()), (Some(&why), 1));
    assert_eq!(refused(&rig.says(3, 4, inside(&theirs))), None);
    assert_eq!(rig.machine.counts().other_cluster, 1);
    assert_eq!(rig.machine.cluster(), Some(set(1, 2, 3).cluster()));
}

#[test]
fn joining_is_given_up_when_the_member_is_gone_and_waits_longer_each_time() {
    let mut rig = Rig::new(config(3));
    let mut waits = Vec::new();
    for incarnation in 100..110 {
        rig.link(1, hello(2));
        rig.says(1, 2, inside(&older()));
        if rig.machine.poll_timeout().is_some() && !matches!(rig.machine.readiness(), Readiness::Joining { .. }) {
            rig.tick();
        }
        assert!(matches!(rig.machine.readiness(), Readiness::Joining { .. }));
        let out = rig.says(1, 2, outside());
        assert_eq!(drawn(&out), Some(Why::JoinGivenUp));
        rig.draws(incarnation);
        waits.push(rig.machine.poll_timeout().expect("it backs off") - rig.now_us);
    }
    assert_eq!(waits[0], SECOND);
    assert!(waits.iter().zip(1..).all(|(wait, n)| *wait <= (SECOND << (n - 1).min(6)).min(60 * SECOND)), "{waits:?}");
    assert!(waits.last().is_some_and(|wait| (30 * SECOND..=60 * SECOND).contains(wait)), "{waits:?}");
}

#[test]
fn joining_is_given_up_after_its_time() {
    let mut rig = Rig::new(config(3));
    rig.link(1, hello(2));
    rig.says(1, 2, inside(&older()));
    assert_eq!(drawn(&rig.tick()), Some(Why::JoinGivenUp));
    assert_eq!(rig.now_us, 60 * SECOND);
}

#[test]
fn who_was_in_a_cluster_for_long_tries_again_soon() {
    let mut rig = Rig::inside();
    for incarnation in [100, 101] {
        let members = vec![life(0, if incarnation == 100 { 1 } else { 100 }), life(1, 2)];
        let cluster = set(1, 2, 3).cluster();
        rig.put(Input::InCluster(Membership { cluster, voters: members.clone(), members }));
        rig.now_us += 61 * SECOND;
        rig.put(Input::Left(Left::Evicted));
        rig.draws(incarnation);
        assert_eq!(rig.machine.poll_timeout(), Some(rig.now_us + SECOND));
        rig.says(1, 2, inside(&set(1, 2, 3)));
        rig.tick();
    }
}

#[test]
fn a_name_that_differed_too_often_within_ten_minutes_stays_out_until_it_is_readmitted() {
    let mut rig = Rig::inside();
    let (cluster, voters) = (set(1, 2, 3).cluster(), vec![life(1, 2)]);
    for (incarnation, after_us) in [(100, 0), (101, 500 * SECOND), (102, 200 * SECOND), (103, SECOND)] {
        assert!(!matches!(rig.machine.readiness(), Readiness::Barred { .. }));
        rig.now_us += after_us;
        rig.put(Input::Left(Left::Diverged));
        rig.draws(incarnation);
        rig.says(1, 2, inside(&set(1, 2, 3)));
        if rig.machine.poll_timeout().is_some() {
            rig.tick();
            let members = vec![life(1, 2), life(0, incarnation)];
            rig.put(Input::InCluster(Membership { cluster, members, voters: voters.clone() }));
        }
    }
    // The first one was too long ago to count with the last three.
    assert_eq!(rig.machine.readiness(), Readiness::Barred { times: 3 });
    assert_eq!((rig.machine.poll_timeout(), rig.pledge()), (None, None));
    rig.now_us += 3_600 * SECOND;
    assert_eq!(rig.put(Input::Tick), []);
    assert!(matches!(&rig.put(Input::Readmit { name: name(0) })[..], [Effect::Join { .. }]));
}

#[test]
fn members_refuse_a_name_that_differed_too_often() {
    let mut rig = Rig::inside();
    for _ in 0..3 {
        assert_eq!(rig.machine.admits("c"), Ok(()));
        rig.put(Input::Mismatched { name: name(2) });
    }
    let why = Refusal::Diverged { name: name(2), times: 3 };
    assert_eq!(rig.machine.admits("c"), Err(why.clone()));
    assert_eq!(refused(&rig.link(2, hello(30))), Some(&why));
    // What is refused is told to the other side, which says so.
    rig.put(Input::Left(Left::Evicted));
    rig.draws(100);
    rig.put(Input::RefusedBy { name: name(1), why: why.clone() });
    rig.tick();
    assert_eq!(rig.machine.readiness(), Readiness::Refused { name: name(1), why });
    let out = rig.put(Input::Readmit { name: name(2) });
    assert_eq!((sent(&out), rig.machine.admits("c")), (1, Ok(())), "c is told, b refuses still");
}

#[test]
fn a_group_is_over_when_no_majority_can_be_left() {
    let mut rig = Rig::inside();
    rig.link(1, hello(20));
    assert_eq!(rig.machine.poll_timeout(), None, "two of three are left");
    rig.link(2, hello(30));
    assert_eq!(rig.machine.poll_timeout(), Some(2 * SECOND));
    assert_eq!(drawn(&rig.tick()), Some(Why::GroupOver));
    let out = rig.draws(100);
    assert_eq!((rig.pledge(), sent(&out)), (None, 2));
    rig.tick();
    assert_eq!(rig.pledge(), Some(set(100, 20, 30)));
}

#[test]
fn a_life_in_another_cluster_is_gone_for_good() {
    let mut rig = Rig::inside();
    rig.link(1, hello(20));
    let other = Founders::new(vec![life(2, 3)]).expect("one life");
    rig.says(2, 3, inside(&other));
    rig.put(Input::LinkDown { name: name(2) });
    assert_eq!(drawn(&rig.tick()), Some(Why::GroupOver));
    // Planted: it is not seen, and the member waits for good.
    let mut rig = Rig::inside();
    rig.machine.planted.mistake = Some(Mistake::NewerAlone);
    rig.link(1, hello(20));
    rig.says(2, 3, inside(&other));
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn a_newer_life_that_is_in_this_cluster_is_not_gone() {
    let mut rig = Rig::inside();
    let cluster = set(1, 2, 3).cluster();
    rig.link(1, Hello { cluster: Some(cluster), ..hello(20) });
    rig.link(2, Hello { cluster: Some(cluster), ..hello(30) });
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn a_voter_whose_newer_life_is_a_member_already_is_gone() {
    let mut rig = Rig::inside();
    let cluster = set(1, 2, 3).cluster();
    rig.link(1, Hello { cluster: Some(cluster), ..hello(20) });
    let members = vec![life(0, 1), life(2, 3), life(1, 20)];
    rig.put(Input::InCluster(Membership { cluster, members, voters: set(1, 2, 3).lives().to_vec() }));
    rig.link(2, hello(30));
    // Lives 2 and 3 vote still, and cannot; life 20 has no vote yet.
    assert_eq!(drawn(&rig.tick()), Some(Why::GroupOver));
}

#[test]
fn a_former_life_of_its_own_that_votes_still_is_gone() {
    let mut rig = Rig::new(config(3));
    rig.link(1, hello(2));
    rig.says(1, 2, inside(&older()));
    let (cluster, members) = (older().cluster(), [older().lives(), &[life(0, 1)]].concat());
    rig.put(Input::InCluster(Membership { cluster, members, voters: older().lives().to_vec() }));
    assert_eq!(rig.machine.poll_timeout(), None, "one of three voters is gone, which was life 90 of this name");
    rig.link(1, hello(20));
    assert_eq!(drawn(&rig.tick()), Some(Why::GroupOver));
}

#[test]
fn a_former_life_stays_gone_when_the_link_is_down_and_a_voter_that_never_came_back_does_not() {
    let mut rig = Rig::inside();
    rig.put(Input::LinkDown { name: name(1) });
    rig.put(Input::LinkDown { name: name(2) });
    assert_eq!(rig.machine.poll_timeout(), None, "they may come back");
    rig.link(1, hello(20));
    rig.link(2, hello(30));
    rig.put(Input::LinkDown { name: name(1) });
    rig.put(Input::LinkDown { name: name(2) });
    assert_eq!(drawn(&rig.tick()), Some(Why::GroupOver));
}

#[test]
fn the_operator_gives_a_group_up_and_may_name_others() {
    let mut rig = Rig::inside();
    let out = rig.put(Input::Abandon { bootstrap: Some(vec![name(0), name(3), name(0)]) });
    assert_eq!(drawn(&out), Some(Why::Abandoned));
    rig.draws(100);
    assert_eq!(rig.machine.readiness(), Readiness::WaitsForNames(vec![name(3)]));
    rig.says(1, 2, outside());
    rig.link(3, hello(4));
    assert_eq!(rig.pledge(), Founders::new(vec![life(0, 100), life(3, 4)]), "nobody waits");
}

#[test]
fn another_life_of_a_member_is_a_suspicion() {
    let mut rig = Rig::inside();
    assert!(rig.link(1, hello(20)).contains(&Effect::Superseded(life(1, 2))));
    let cluster = set(1, 2, 3).cluster();
    assert!(!rig.link(2, Hello { cluster: Some(cluster), ..hello(30) }).contains(&Effect::Superseded(life(2, 3))));
}

#[test]
fn what_its_sender_may_not_say_is_dropped_and_counted() {
    let mut rig = Rig::pledged();
    let strange = |lives: Vec<Life>| Place::Outside { pledge: Founders::new(lives) };
    rig.says(1, 2, strange(vec![life(0, 1), life(2, 3)]));
    rig.says(5, 6, outside());
    rig.says(1, 2, Place::Inside { cluster: ClusterId(1), founders: Some(set(1, 2, 3)) });
    let unsorted: Founders = serde_json::from_str(r#"[{"name":"b","incarnation":2},{"name":"a","incarnation":1}]"#)
        .expect("a set out of order");
    rig.pledges(1, 2, unsorted);
    assert_eq!(rig.machine.counts().malformed, 4);
    assert_eq!(rig.pledge(), Some(set(1, 2, 3)));
}

#[test]
fn what_the_membership_may_not_say_now_is_dropped_and_counted() {
    let mut rig = Rig::inside();
    let members = vec![life(0, 1)];
    rig.put(Input::InCluster(Membership { cluster: ClusterId(5), members: members.clone(), voters: members }));
    rig.draws(9);
    let twice = vec![life(0, 1), life(0, 1)];
    let cluster = set(1, 2, 3).cluster();
    rig.put(Input::InCluster(Membership { cluster, members: twice.clone(), voters: twice }));
    assert_eq!((rig.machine.counts().unexpected, rig.machine.cluster()), (3, Some(cluster)));
    // A membership without this life has evicted it.
    let members = vec![life(1, 2), life(2, 3)];
    let out = rig.put(Input::InCluster(Membership { cluster, voters: vec![life(1, 2)], members }));
    assert_eq!(drawn(&out), Some(Why::Left(Left::Evicted)));
    rig.put(Input::Left(Left::Evicted));
    assert_eq!(rig.machine.counts().unexpected, 4);
    assert_eq!(drawn(&rig.draws(1)), Some(Why::NotNew), "a life is never used twice");
}

#[test]
fn sets_and_names_that_a_life_deals_with_are_bounded() {
    let mut rig = Rig::pledged();
    let out: Vec<Effect> = (0..PLEDGES_MAX as u64).flat_map(|n| rig.link(1, hello(1000 + n))).collect();
    assert_eq!(drawn(&out), Some(Why::PledgesSpent));
    let mut rig = Rig::new(config(3));
    for n in 0..PEERS_MAX as u64 {
        rig.put(Input::LinkUp { name: Name::from(format!("n{n}")), hello: hello(n) });
    }
    assert_eq!(refused(&rig.link(1, hello(2))), Some(&Refusal::TooManyNames { limit: PEERS_MAX }));
    rig.put(Input::LinkDown { name: Name::from("n7") });
    assert_eq!(refused(&rig.link(1, hello(2))), None, "one without a link makes room");
}
