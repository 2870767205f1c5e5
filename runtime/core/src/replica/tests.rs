use super::*;
use crate::ids::{ClusterId, ConversationKey, Epoch};
use crate::placement;
use crate::round::{Chain, Explicit, Member, PrefixMatch, RankSnapshot, Sequenced};
use proptest::prelude::*;

const ME: Incarnation = Incarnation(7);

fn view(ranks: u32) -> View {
    let member = Member { incarnation: ME, ranks: (0..ranks).map(RankId).collect() };
    View { epoch: Epoch(1), members: vec![member], first_round: Round(1) }
}

fn config(cap: u32) -> Config {
    Config { cap, attempts_max: 3, probe_requests_max: 256, lockstep: false, placement: placement::Config::default() }
}

/// One member's rounds, with its outbox.
struct Rig {
    replica: Replica,
    round: u64,
    seq: u64,
    ranks: Vec<RankSnapshot>,
    matches: Vec<PrefixMatch>,
    draining: bool,
}

impl Rig {
    fn new(ranks: u32, cap: u32) -> Self {
        Self {
            replica: Replica::new(view(ranks), config(cap)),
            round: 0,
            seq: 0,
            ranks: vec![],
            matches: vec![],
            draining: false,
        }
    }

    fn merged(&mut self, entries: Vec<Entry>) -> Merged {
        self.round += 1;
        let entries = entries
            .into_iter()
            .map(|entry| {
                self.seq += 1;
                Sequenced { seq: self.seq, entry }
            })
            .collect();
        let contribution = Contribution {
            cluster: ClusterId(1),
            epoch: Epoch(1),
            round: Round(self.round),
            member: ME,
            clock_us: self.round * 1000,
            entries,
            ranks: self.ranks.clone(),
            prefix_matches: std::mem::take(&mut self.matches),
            digest: 0,
            draining: self.draining,
        };
        Merged {
            epoch: Epoch(1),
            round: Round(self.round),
            clock_us: self.round * 1000,
            contributions: vec![contribution],
        }
    }

    fn round(&mut self, entries: Vec<Entry>) -> Vec<Decision> {
        let merged = self.merged(entries);
        let mut out = Vec::new();
        let applied = self.replica.apply(&merged, &mut out);
        self.replica.check().expect("invariants");
        assert_ne!(applied.digest, 0);
        out
    }
}

fn key(seq: u64) -> RequestKey {
    RequestKey { ingress: ME, seq }
}

fn attempt(seq: u64, attempt: u32) -> AttemptKey {
    AttemptKey { key: key(seq), attempt: Attempt(attempt) }
}

fn arrival(seq: u64, conversation: Option<u128>) -> Entry {
    Entry::Arrival(Box::new(Arrival {
        key: key(seq),
        prompt_tokens: 10,
        produced_tokens: 0,
        head: Box::default(),
        chain: Chain::default(),
        children: 0,
        conversation: conversation.map(ConversationKey),
        sub_agent: None,
        explicit: None,
        priority: 0.5,
    }))
}

fn placed(decisions: &[Decision]) -> Vec<(u64, u32, u32)> {
    decisions
        .iter()
        .filter_map(|d| match d {
            Decision::Placed { attempt, rank, .. } => Some((attempt.key.seq, attempt.attempt.0, rank.0)),
            _ => None,
        })
        .collect()
}

#[test]
fn turns_of_a_conversation_return_to_their_rank_and_others_spread() {
    let mut rig = Rig::new(2, 4);
    assert_eq!(placed(&rig.round(vec![arrival(1, Some(5)), arrival(2, Some(6))])), [(1, 1, 0), (2, 1, 1)]);
    rig.round(vec![Entry::Finished(attempt(1, 1)), Entry::Finished(attempt(2, 1))]);
    rig.round(vec![Entry::Ended(key(1)), Entry::Ended(key(2))]);
    assert_eq!(rig.replica.requests_len(), 0);
    assert_eq!(placed(&rig.round(vec![arrival(3, Some(6))])), [(3, 1, 1)]);
    assert_eq!(placed(&rig.round(vec![arrival(4, Some(5))])), [(4, 1, 0)]);
}

#[test]
fn a_full_view_makes_requests_wait_and_a_finished_one_lets_the_next_in() {
    let mut rig = Rig::new(1, 2);
    let out = rig.round((1..=4).map(|s| arrival(s, None)).collect());
    assert_eq!(placed(&out).len(), 2);
    assert_eq!(rig.replica.waiting_len(), 2);
    let out = rig.round(vec![Entry::Finished(attempt(1, 1))]);
    assert_eq!(placed(&out), [(3, 1, 0)], "the slot is free although the ingress has not ended the request");
    let out = rig.round(vec![Entry::Cancel(key(2)), Entry::Ended(key(1))]);
    assert!(out.contains(&Decision::Stop { attempt: attempt(2, 1), rank: RankId(0) }));
    assert_eq!(placed(&out), [(4, 1, 0)]);
}

#[test]
fn an_arrival_and_its_cancel_in_one_round_never_reach_placement() {
    let mut rig = Rig::new(1, 2);
    let out = rig.round(vec![arrival(1, None), Entry::Cancel(key(1))]);
    assert_eq!(placed(&out), []);
    assert_eq!(rig.replica.requests_len(), 0);
}

#[test]
fn a_lost_request_is_held_resumed_at_the_front_and_given_up_after_the_last_attempt() {
    let mut rig = Rig::new(1, 1);
    rig.round(vec![arrival(1, None), arrival(2, None)]);
    let out = rig.round(vec![Entry::Lost(attempt(1, 1))]);
    assert!(out.contains(&Decision::Seal { attempt: attempt(1, 1) }));
    assert_eq!(placed(&out), [(2, 1, 0)], "a held request is not placeable");
    rig.round(vec![Entry::Resume { key: key(1), attempt: Attempt(1), produced: 4 }, arrival(3, None)]);
    let out = rig.round(vec![Entry::Ended(key(2))]);
    assert_eq!(placed(&out), [(1, 2, 0)], "in number order, before 3");
    assert_eq!(rig.round(vec![Entry::Lost(attempt(1, 1))]), [], "another attempt's loss is ignored");
    rig.round(vec![Entry::Lost(attempt(1, 2))]);
    rig.round(vec![Entry::Resume { key: key(1), attempt: Attempt(2), produced: 4 }, Entry::Cancel(key(3))]);
    let out = rig.round(vec![Entry::Lost(attempt(1, 3))]);
    let exhausted = Rejection::AttemptsExhausted { attempts: 3 };
    assert_eq!(out, [Decision::Rejected { key: key(1), rejection: exhausted }]);
    assert_eq!(rig.replica.requests_len(), 0);
}

#[test]
fn a_resume_of_a_placed_attempt_ends_that_one_first() {
    let mut rig = Rig::new(1, 1);
    rig.round(vec![arrival(1, None)]);
    let out = rig.round(vec![Entry::Resume { key: key(1), attempt: Attempt(1), produced: 2 }]);
    assert_eq!(out[0], Decision::Stop { attempt: attempt(1, 1), rank: RankId(0) });
    assert_eq!(placed(&out), [(1, 2, 0)]);
}

#[test]
fn a_rank_that_dies_behind_its_finished_is_resumed_from_the_tokens_held() {
    let mut rig = Rig::new(1, 1);
    rig.round(vec![arrival(1, None)]);
    rig.round(vec![Entry::Finished(attempt(1, 1))]);
    let out = rig.round(vec![Entry::Lost(attempt(1, 1))]);
    assert_eq!(out, [Decision::Seal { attempt: attempt(1, 1) }]);
    let out = rig.round(vec![Entry::Resume { key: key(1), attempt: Attempt(1), produced: 9 }]);
    assert_eq!(placed(&out), [(1, 2, 0)]);
}

#[test]
fn requests_that_can_never_run_are_refused_and_known_keys_ignored() {
    let mut rig = Rig::new(2, 2);
    let Entry::Arrival(good) = arrival(1, None) else { unreachable!() };
    let far = Arrival { explicit: Some(Explicit { rank: RankId(9), relax: Some(false) }), ..(*good).clone() };
    let empty = Arrival { key: key(2), prompt_tokens: 0, ..(*good).clone() };
    let wide = Arrival { key: key(3), children: 7, ..(*good).clone() };
    let out = rig.round([far, empty, wide].map(|a| Entry::Arrival(Box::new(a))).to_vec());
    let why: Vec<&str> = out
        .iter()
        .map(|d| match d {
            Decision::Rejected { rejection, .. } => rejection.label(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(why, ["no_such_rank", "empty_prompt", "too_many_children"]);
    rig.round(vec![arrival(1, None)]);
    assert_eq!(rig.round(vec![arrival(1, None)]), []);
    assert_eq!(rig.replica.faults().entries_ignored, 1);
}

#[test]
fn nothing_is_placed_on_a_draining_member_while_others_can_take_it() {
    let other = Incarnation(ME.0 + 1);
    let mut members = view(2).members;
    let ranks = members[0].ranks.split_off(1);
    members.push(crate::round::Member { incarnation: other, ranks: ranks.clone() });
    let mut rig = Rig::new(2, 1);
    rig.replica = Replica::new(View { members, ..view(2) }, config(1));
    rig.draining = true;
    assert_eq!(placed(&rig.round(vec![arrival(1, None), arrival(2, None)])), [(1, 1, ranks[0].0)]);
    // The other drains too: what waits is served here or nowhere.
    let mut merged = rig.merged(vec![]);
    merged.contributions.push(Contribution { member: other, ..merged.contributions[0].clone() });
    let mut out = Vec::new();
    rig.replica.apply(&merged, &mut out);
    assert_eq!(placed(&out).len(), 1, "{out:?}");
}

#[test]
fn a_late_rank_gets_nothing_new_in_that_round_and_keeps_what_it_runs() {
    let mut rig = Rig::new(2, 4);
    assert_eq!(placed(&rig.round(vec![arrival(1, Some(5)), arrival(2, Some(6))])), [(1, 1, 0), (2, 1, 1)]);
    rig.ranks = (0..2)
        .map(|r| RankSnapshot { rank: RankId(r), ready: true, late: r == 0, ..RankSnapshot::default() })
        .collect();
    // A turn of the conversation that lives there waits, strangers go to the other rank.
    let out = rig.round(vec![arrival(3, Some(5)), arrival(4, None), arrival(5, None)]);
    assert_eq!(placed(&out), [(4, 1, 1), (5, 1, 1)]);
    assert_eq!(rig.replica.placed_on_rank(RankId(0)), [attempt(1, 1)], "steps go on");
    rig.ranks[0].late = false;
    assert_eq!(placed(&rig.round(vec![])), [(3, 1, 0)]);
    // Unlike ranks that drain, ranks that are all late get nothing.
    rig.ranks.iter_mut().for_each(|snapshot| snapshot.late = true);
    assert_eq!(placed(&rig.round(vec![arrival(6, None)])), []);
    rig.ranks.iter_mut().for_each(|snapshot| snapshot.late = false);
    assert_eq!(placed(&rig.round(vec![])).len(), 1);
}

#[test]
fn what_ranks_say_in_lockstep_is_part_of_the_digest_and_of_the_answer() {
    let apply = |change: fn(&mut RankSnapshot)| {
        let mut rig = Rig::new(1, 2);
        rig.ranks = vec![RankSnapshot::default()];
        change(&mut rig.ranks[0]);
        let merged = rig.merged(vec![]);
        let applied = rig.replica.apply(&merged, &mut Vec::new());
        (merged.hash(), rig.replica.state_digest(), applied.stepping)
    };
    let changes: [fn(&mut RankSnapshot); 5] = [
        |_| {},
        |s| s.boundary = Round(3),
        |s| s.ready = true,
        |s| s.late = true,
        |s| (s.ready, s.late) = (true, true),
    ];
    let seen = changes.map(apply);
    let hashes: BTreeSet<u64> = seen.iter().map(|(hash, ..)| *hash).collect();
    let digests: BTreeSet<u64> = seen.iter().map(|(_, digest, _)| *digest).collect();
    assert_eq!((hashes.len(), digests.len()), (5, 5));
    assert_eq!(seen.map(|(.., stepping)| stepping), [false, false, true, false, false], "a late one runs another step");
}

#[test]
fn a_rank_is_told_what_the_group_expects_of_each() {
    let mut rig = Rig::new(3, 4);
    assert_eq!(rig.replica.occupancy(RankId(0)).expected, 0);
    rig.round((1..=4).map(|s| arrival(s, None)).collect());
    let told = |rig: &Rig| [0, 1, 2].map(|r| rig.replica.occupancy(RankId(r))).map(|o| (o.expected, o.active));
    assert_eq!(told(&rig), [(2, 2), (2, 1), (2, 1)], "4 over 3 ranks");
    rig.round([2, 3].map(|s| Entry::Finished(attempt(s, 1))).into());
    assert_eq!(told(&rig), [(2, 2), (2, 0), (2, 0)], "no less than the fullest has");
    assert_eq!(rig.replica.occupancy(RankId(9)), Default::default());
}

#[test]
fn in_lockstep_the_bound_of_a_wait_is_counted_in_rounds() {
    let mut rig = Rig::new(2, 1);
    let placement = placement::Config { strict_affinity_max_wait_passes: 5, ..placement::Config::default() };
    rig.replica = Replica::new(view(2), Config { placement, lockstep: true, ..config(1) });
    assert_eq!(placed(&rig.round(vec![arrival(1, Some(5))])), [(1, 1, 0)]);
    let mut rounds = 0;
    let mut out = rig.round(vec![arrival(2, Some(5))]);
    while placed(&out).is_empty() {
        rounds += 1;
        assert!(rounds < 50, "it overflows to the free rank");
        out = rig.round(vec![]);
    }
    assert_eq!((placed(&out), rounds), (vec![(2, 1, 1)], 5));
}

#[test]
fn a_rank_that_counts_more_than_the_replica_is_believed_and_a_current_difference_is_a_fault() {
    let mut rig = Rig::new(2, 2);
    rig.ranks = vec![
        RankSnapshot { rank: RankId(0), active_requests: 2, ..RankSnapshot::default() },
        RankSnapshot { rank: RankId(1), ..RankSnapshot::default() },
    ];
    assert_eq!(placed(&rig.round(vec![arrival(1, None), arrival(2, None)])), [(1, 1, 1), (2, 1, 1)]);
    assert_eq!(rig.replica.faults().counts_differ, 1);
    rig.ranks[0].active_requests = 0;
    rig.ranks[0].counted = Round(1);
    rig.ranks[1].active_requests = 2;
    rig.ranks[1].counted = Round(1);
    rig.round(vec![]);
    assert_eq!(rig.replica.faults().counts_differ, 1, "equal counts are none");
}

#[test]
fn a_flipped_bit_is_found_within_256_rounds_and_says_digest_zero() {
    let mut rig = Rig::new(1, 1);
    rig.round((1..=300).map(|s| arrival(s, None)).collect());
    rig.replica.requests.flip_a_bit(key(200));
    let found = (0..256).position(|_| {
        let merged = rig.merged(vec![]);
        rig.replica.apply(&merged, &mut Vec::new()).digest == 0
    });
    assert!(found.is_some());
    assert_eq!(rig.replica.faults().digest_mismatches, 1);
}

#[test]
fn a_turn_waits_two_passes_for_its_full_rank_then_overflows_at_the_bound_and_keeps_its_binding() {
    let mut rig = Rig::new(2, 1);
    // The agreed clock is 1 ms a round in this rig; the bound is a second of it.
    let placement = placement::Config { strict_affinity_max_wait_s: 1, ..placement::Config::default() };
    rig.replica = Replica::new(view(2), Config { placement, ..config(1) });
    assert_eq!(placed(&rig.round(vec![arrival(1, Some(5))])), [(1, 1, 0)]);
    // Its next turn finds the rank full and is set aside; a stranger behind it is served meanwhile.
    let out = rig.round(vec![arrival(2, Some(5)), arrival(3, None)]);
    assert_eq!(placed(&out), [(3, 1, 1)]);
    assert_eq!(placed(&rig.round(vec![Entry::Finished(attempt(3, 1)), Entry::Ended(key(3))])), []);
    let deferrals = |rig: &Rig| rig.replica.queue.iter().next().map(|w| w.deferrals);
    assert_eq!(deferrals(&rig), Some(2), "two deferrals, with room elsewhere");
    rig.round = 1_001;
    let out = rig.round(vec![]);
    let why = out.iter().find_map(|d| match d {
        Decision::Placed { why, .. } => Some(why.label()),
        _ => None,
    });
    assert_eq!((placed(&out), why), (vec![(2, 1, 1)], Some("overflow")), "released exactly at the bound");
    rig.round([1, 2].map(|s| Entry::Finished(attempt(s, 1))).into());
    assert_eq!(placed(&rig.round(vec![arrival(4, Some(5))])), [(4, 1, 0)], "an overflow rebinds nothing");
}

#[test]
fn a_policy_that_probes_places_one_round_later_where_the_prefix_is() {
    let mut rig = Rig::new(2, 4);
    let policy = placement::Config { policy: placement::Policy::KvAware, ..placement::Config::default() };
    rig.replica = Replica::new(view(2), Config { placement: policy, ..config(4) });
    let out = rig.round(vec![arrival(1, None), arrival(2, None)]);
    assert_eq!(placed(&out), []);
    let named: Vec<u64> = out
        .iter()
        .filter_map(|d| match d {
            Decision::Probe { number, .. } => Some(number.0),
            _ => None,
        })
        .collect();
    assert_eq!(named, [1, 2]);
    let found = |number, rank, tokens| PrefixMatch { number: RequestNumber(number), rank: RankId(rank), tokens };
    // A match of a request that was not named, and one of a rank that is not there, say nothing.
    rig.matches = vec![found(1, 1, 9), found(2, 1, 9), found(77, 0, 9), found(1, 5, 9)];
    let out = rig.round(vec![arrival(3, None)]);
    assert_eq!(placed(&out), [(1, 1, 1), (2, 1, 1)], "3 came too late to be probed");
    assert_eq!(rig.replica.ranks[1].open_tokens, 2, "what is cached is no load");
    let out = rig.round(vec![]);
    assert_eq!(placed(&out), [(3, 1, 0)], "no match anywhere: the emptiest");
    rig.round((1..=3).flat_map(|s| [Entry::Finished(attempt(s, 1)), Entry::Ended(key(s))]).collect());
    assert!(rig.replica.ranks.iter().all(|r| r.open == 0 && r.open_tokens == 0));
}

fn view_of(epoch: u64, members: &[(u64, &[u32])]) -> View {
    let members = members
        .iter()
        .map(|(m, ranks)| Member { incarnation: Incarnation(*m), ranks: ranks.iter().map(|r| RankId(*r)).collect() })
        .collect();
    View { epoch: Epoch(epoch), members, first_round: Round(1) }
}

#[test]
fn a_view_change_keeps_bindings_by_identity_and_holds_what_ran_on_ranks_that_left() {
    let mut rig = Rig::new(0, 2);
    rig.replica = Replica::new(view_of(1, &[(8, &[10]), (7, &[20, 30])]), config(2));
    let out = rig.round((1..=3).map(|s| arrival(s, Some(u128::from(s)))).collect());
    assert_eq!(placed(&out), [(1, 1, 10), (2, 1, 20), (3, 1, 30)]);
    let mut out = Vec::new();
    rig.replica.install(view_of(2, &[(7, &[30, 20]), (9, &[40])]), &[], &mut out).expect("a sound view");
    rig.replica.check().expect("invariants");
    assert_eq!(out, [Decision::Seal { attempt: attempt(1, 1) }]);
    let out = rig.round(vec![Entry::Resume { key: key(1), attempt: Attempt(1), produced: 2 }]);
    assert_eq!(placed(&out), [(1, 2, 40)], "its conversation is unknown now and goes to the emptiest rank");
    rig.round((1..=3).flat_map(|s| [Entry::Finished(attempt(s, 1)), Entry::Ended(key(s))]).collect());
    let out = rig.round(vec![arrival(12, Some(2)), arrival(13, Some(3)), arrival(11, Some(1))]);
    assert_eq!(placed(&out), [(12, 1, 20), (13, 1, 30), (11, 1, 40)], "each where its conversation lives");
}

#[test]
fn a_view_change_stops_the_requests_of_an_ingress_that_left_and_rejects_pins_to_ranks_that_left() {
    let mut rig = Rig::new(0, 1);
    rig.replica = Replica::new(view_of(1, &[(7, &[0]), (8, &[1])]), config(1));
    let pinned = |seq, relax| {
        let Entry::Arrival(mut a) = arrival(seq, None) else { unreachable!() };
        a.explicit = Some(Explicit { rank: RankId(1), relax: Some(relax) });
        Entry::Arrival(a)
    };
    rig.round(vec![pinned(1, false), pinned(2, false), pinned(3, true)]);
    let mut foreign = rig.merged(vec![]);
    let Entry::Arrival(mut a) = arrival(4, None) else { unreachable!() };
    a.key.ingress = Incarnation(8);
    let theirs = a.key;
    foreign.contributions[0].member = Incarnation(8);
    foreign.contributions[0].entries = vec![Sequenced { seq: 1, entry: Entry::Arrival(a) }];
    rig.replica.apply(&foreign, &mut Vec::new());
    let mut out = Vec::new();
    rig.replica.install(view_of(2, &[(7, &[0])]), &[Incarnation(8)], &mut out).expect("a sound view");
    rig.replica.check().expect("invariants");
    let gone = Rejection::NoSuchRank { rank: 1, ranks: 1 };
    assert!(out.contains(&Decision::Seal { attempt: attempt(1, 1) }), "{out:?}");
    assert!(out.contains(&Decision::Rejected { key: key(1), rejection: gone.clone() }), "held and pinned: {out:?}");
    assert!(out.contains(&Decision::Rejected { key: key(2), rejection: gone }), "waiting and pinned: {out:?}");
    assert!(rig.replica.requests.get(theirs).is_none(), "nobody is left to end it");
    assert_eq!(rig.replica.requests_len(), 1, "the relaxed one goes on");
    let twice = rig.replica.install(view_of(3, &[(7, &[0, 0])]), &[], &mut Vec::new());
    assert!(twice.is_err_and(|why| why.contains("rank-0 is twice")));
}

/// Random traffic, also from a member that errs.
fn traffic() -> impl Strategy<Value = Vec<Vec<(u64, u8, u32)>>> {
    prop::collection::vec(prop::collection::vec((0..12u64, 0..7u8, 1..4u32), 0..6), 1..60)
}

fn entry((seq, kind, n): (u64, u8, u32)) -> Entry {
    match kind {
        0 | 1 => arrival(seq, (n > 1).then_some(u128::from(seq % 3))),
        2 => Entry::Cancel(key(seq)),
        3 => Entry::Ended(key(seq)),
        4 => Entry::Resume { key: key(seq), attempt: Attempt(n), produced: n },
        5 => Entry::Finished(attempt(seq, n)),
        _ => Entry::Lost(attempt(seq, n)),
    }
}

#[test]
fn a_snapshot_of_other_settings_is_refused_with_both_values() {
    let replica = Replica::new(view(3), config(2));
    let refused = |config: &Config| Replica::restore(replica.snapshot(), config).expect_err("other settings");
    assert_eq!(refused(&config(3)), "settings differ: here cap: 3, there cap: 2");
    let mut other = config(2);
    other.placement.strict_affinity = !other.placement.strict_affinity;
    let what = refused(&other);
    assert!(what.starts_with("settings differ: here strict_affinity: "), "{what}");
    assert!(Replica::restore(replica.snapshot(), &config(2)).is_ok());
}

proptest! {
    /// Two replicas of the same rounds agree in every digest, and one restored from a snapshot goes on alike.
    #[test]
    fn equal_rounds_give_equal_digests_also_behind_a_snapshot(rounds in traffic(), cut in 0..60usize) {
        let (mut a, mut b) = (Rig::new(3, 2), Replica::new(view(3), config(2)));
        let mut restored: Option<Replica> = None;
        for (index, entries) in rounds.into_iter().enumerate() {
            let merged = a.merged(entries.into_iter().map(entry).collect());
            let (mut da, mut db, mut dr) = (Vec::new(), Vec::new(), Vec::new());
            let applied = a.replica.apply(&merged, &mut da);
            a.replica.check().expect("invariants");
            prop_assert_eq!(applied, b.apply(&merged, &mut db));
            prop_assert_eq!(&da, &db);
            if let Some(r) = &mut restored {
                prop_assert_eq!(applied, r.apply(&merged, &mut dr));
                prop_assert_eq!(&da, &dr);
            }
            if index == cut {
                let bytes = serde_json::to_vec(&a.replica.snapshot()).expect("serializes");
                let snapshot: Snapshot = serde_json::from_slice(&bytes).expect("deserializes");
                let r = Replica::restore(snapshot, &config(2)).expect("a sound snapshot");
                prop_assert_eq!(r.state_digest(), a.replica.state_digest());
                restored = Some(r);
            }
        }
    }

    /// Whatever views follow each other under whatever traffic: two replicas agree, every invariant holds, and a
    /// conversation whose rank stayed is still bound to it.
    #[test]
    fn views_that_come_and_go_keep_identities_and_agreement(
        rounds in traffic(),
        views in prop::collection::vec(prop::collection::btree_set(0..6u32, 1..6), 60),
    ) {
        let mut a = Rig::new(0, 2);
        let first = view_of(1, &[(7, &[0, 1, 2])]);
        a.replica = Replica::new(first.clone(), config(2));
        let mut b = Replica::new(first, config(2));
        for (index, (entries, ranks)) in rounds.into_iter().zip(views).enumerate() {
            let merged = a.merged(entries.into_iter().map(entry).collect());
            let (mut da, mut db) = (Vec::new(), Vec::new());
            prop_assert_eq!(a.replica.apply(&merged, &mut da), b.apply(&merged, &mut db));
            if index % 3 == 2 {
                // Rank 5 belongs to another member, which comes and goes with it.
                let (theirs, mine): (Vec<u32>, Vec<u32>) = ranks.into_iter().partition(|r| *r == 5);
                let view = view_of(2 + index as u64, &[(7, &mine), (8, &theirs)]);
                let stay: Vec<RankId> = view.ranks().map(|(id, _)| id).collect();
                let bound = |r: &Replica| -> Vec<Option<RankId>> {
                    let rank = |c: u128| r.router().bound_rank(ConversationKey(c)).map(|i| r.ranks[i as usize].id);
                    (0..3).map(rank).collect()
                };
                let before = bound(&a.replica);
                a.replica.install(view.clone(), &[], &mut da).expect("a sound view");
                b.install(view, &[], &mut db).expect("a sound view");
                let kept: Vec<Option<RankId>> = before.into_iter().map(|r| r.filter(|id| stay.contains(id))).collect();
                prop_assert_eq!(bound(&a.replica), kept);
            }
            prop_assert_eq!(&da, &db);
            prop_assert_eq!(a.replica.state_digest(), b.state_digest());
            let sound = a.replica.check();
            prop_assert!(sound.is_ok(), "{:?}", sound);
        }
    }

    /// Snapshots of ranks may be up to five rounds old, and bursts may come at any time: no rank exceeds its cap.
    #[test]
    fn old_snapshots_and_bursts_never_take_a_rank_over_its_cap(
        bursts in prop::collection::vec((0..9u64, 0..6usize, prop::collection::vec(0..40usize, 0..6)), 1..60),
    ) {
        const CAP: u32 = 3;
        let mut rig = Rig::new(0, CAP);
        rig.replica = Replica::new(view(3), config(CAP));
        let mut running: Vec<(AttemptKey, u32)> = Vec::new();
        let mut history: Vec<Vec<RankSnapshot>> = vec![vec![]];
        let mut seq = 0;
        for (burst, age, done) in bursts {
            let mut entries = Vec::new();
            for nth in done {
                if nth < running.len() {
                    let (attempt, _) = running.swap_remove(nth);
                    entries.push(Entry::Finished(attempt));
                    entries.push(Entry::Ended(attempt.key));
                }
            }
            for _ in 0..burst {
                seq += 1;
                entries.push(arrival(seq, (seq % 3 > 0).then_some(u128::from(seq % 7))));
            }
            rig.ranks = history[history.len().saturating_sub(1 + age)].clone();
            for decision in rig.round(entries) {
                if let Decision::Placed { attempt, rank, .. } = decision {
                    running.push((attempt, rank.0));
                }
            }
            let counts: Vec<u32> = (0..3).map(|r| running.iter().filter(|(_, rank)| *rank == r).count() as u32).collect();
            prop_assert!(counts.iter().all(|c| *c <= CAP), "{:?}", counts);
            let snapshot = |r: u32| RankSnapshot {
                rank: RankId(r),
                counted: rig.replica.round(),
                active_requests: counts[r as usize],
                ..RankSnapshot::default()
            };
            history.push((0..3).map(snapshot).collect());
        }
    }

    /// An entry that comes again with a seq that was applied changes nothing.
    #[test]
    fn entries_are_applied_once(rounds in traffic()) {
        let mut a = Rig::new(2, 2);
        for entries in rounds {
            let merged = a.merged(entries.into_iter().map(entry).collect());
            a.replica.apply(&merged, &mut Vec::new());
            let before = (a.replica.requests_len(), a.replica.waiting_len());
            let mut again = a.merged(vec![]);
            again.contributions[0].entries = merged.contributions[0].entries.clone();
            let mut out = Vec::new();
            a.replica.apply(&again, &mut out);
            let only_placements = out.iter().all(|d| matches!(d, Decision::Placed { .. }));
            prop_assert!(only_placements);
            prop_assert_eq!(a.replica.requests_len(), before.0);
            prop_assert!(a.replica.waiting_len() <= before.1);
        }
    }
}
