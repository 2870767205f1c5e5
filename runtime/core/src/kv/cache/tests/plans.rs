use super::{Bed, SCOPE, config, count, fork, required, window};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::cache::checkpoint::{MARGINS, Publishing, Tail};
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Retention};
use crate::kv::cache::{Commits, Config, Effect, Input, PlanId, Turn, TurnEnd};

const CHAT: ConversationKey = ConversationKey(1);

fn with_window(policy: Policy, slots: u32) -> Config {
    let life_cycles =
        vec![required(Retention::Full, 0), LifeCycle { policy, ..required(window(8), 1) }, required(window(8), 2)];
    config(4, life_cycles, vec![vec![slots; 3]])
}

fn end_points(config: Config) -> Config {
    Config { commits: Commits::EndPoints, ..config }
}

/// Serves `tokens` and plans; the plan and its pages by life cycle.
fn planned(bed: &mut Bed, tokens: &[TokenId]) -> (PlanId, Vec<u32>) {
    let (id, _) = bed.prefill(tokens, &[]);
    bed.manager.stop(id).expect("it is open");
    let plan = bed.manager.plan(id).expect("it is stopped").expect("its end is an end point");
    bed.close(id);
    plan
}

#[test]
fn private_windows_do_not_keep_a_turn_from_being_planned() {
    let mut bed = Bed::new(with_window(Policy::Private, 20));
    let (plan, pages) = planned(&mut bed, &count(0, 24));
    assert_eq!(pages, [0, 0, 2]);
    bed.manager.drop_plan(plan).expect("once");
    bed.check();
    assert_eq!(bed.probe(&count(0, 24)), 16);
}

#[test]
fn a_missing_optional_page_is_left_out_and_a_missing_required_one_forbids_the_plan() {
    for (life_cycle, expected) in [(1, Some(vec![0, 1, 2])), (2, None)] {
        let mut bed = Bed::new(with_window(Policy::Optional, 30));
        let (id, _) = bed.open(&[]);
        // Two blocks further, so that nobody holds the pages in question.
        assert!(bed.resume(id) && bed.resize(id, 32, 0) && bed.resize(id, 32, 32));
        bed.commit(id, &count(0, 24));
        bed.manager.stop(id).expect("it is open");
        assert!(bed.manager.unlink(&SCOPE, &count(0, 24), (4, life_cycle)));
        let plan = bed.manager.plan(id).expect("it is stopped");
        assert_eq!(plan.map(|(_, pages)| pages), expected, "life cycle {life_cycle}");
        bed.check();
    }
}

#[test]
fn dropping_a_short_turn_leaves_the_longer_one() {
    let mut bed = Bed::new(config(8, vec![required(Retention::Full, 0), required(window(8), 1)], vec![vec![20, 20]]));
    let (long, _) = planned(&mut bed, &count(0, 24));
    let (short, _) = planned(&mut bed, &count(0, 8));
    bed.manager.drop_plan(short).expect("once");
    assert_eq!((bed.probe(&count(0, 8)), bed.probe(&count(0, 24))), (0, 24));
    bed.manager.drop_plan(long).expect("once");
    assert_eq!(bed.probe(&count(0, 24)), 16);
    bed.check();
}

/// A turn of the conversation; what it reused, and what came of its end.
fn turn(bed: &mut Bed, tokens: &[TokenId], ends: &[usize]) -> (u32, TurnEnd) {
    bed.conversation = Some(CHAT);
    let (id, opened) = bed.open(tokens);
    assert_eq!(bed.manager.begin_turn(CHAT, id), Ok(Turn::Current));
    assert!(bed.resume(id) && bed.resize(id, tokens.len() as u32, opened.reused_tokens));
    let mut from = opened.reused_tokens as usize;
    for &end in ends.iter().chain([&tokens.len()]) {
        assert!(bed.resize(id, tokens.len() as u32, end as u32));
        bed.commit(id, &tokens[from..end]);
        from = end;
    }
    bed.manager.stop(id).expect("it is open");
    let end = bed.manager.end_turn(CHAT, id).expect("it is current");
    bed.close(id);
    (opened.reused_tokens, end)
}

#[test]
fn a_conversation_keeps_the_end_points_of_its_last_turns() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(6), 1)];
    let two = Config { turns_max: 2, ..end_points(config(4, life_cycles, vec![vec![40, 40]])) };
    let mut bed = Bed::new(two);
    let lengths = [9, 18, 27, 33];
    for (at, length) in lengths.into_iter().enumerate() {
        let (reused, end) = turn(&mut bed, &count(0, length), &[]);
        assert_eq!(reused, if at == 0 { 0 } else { lengths[at - 1] });
        assert_eq!(end, TurnEnd { planned: true, plans: 2.min(at as u32 + 1) });
        let kept = lengths.map(|length| bed.probe(&count(0, length)) == length);
        let expected = [0, 1, 2, 3].map(|turn| turn <= at && turn + 2 > at);
        assert_eq!(kept, expected, "after turn {at}");
    }
    bed.manager.expire(CHAT);
    bed.check();
    assert_eq!((bed.probe(&count(0, 33)), bed.manager.conversations()), (0, 0));
}

#[test]
fn another_turn_of_a_conversation_is_a_request_on_its_own() {
    let mut bed = Bed::new(with_window(Policy::Private, 20));
    let (first, second) = (bed.open(&[]).0, bed.open(&[]).0);
    assert_eq!(bed.manager.begin_turn(CHAT, first), Ok(Turn::Current));
    assert_eq!(bed.manager.begin_turn(CHAT, second), Ok(Turn::PerRequest));
    // A turn that never comes to its end gives way when it says so.
    bed.close(first);
    assert_eq!(bed.manager.begin_turn(CHAT, second), Ok(Turn::PerRequest));
    bed.manager.abandon_turn(CHAT, first).expect("it is current");
    assert_eq!(bed.manager.begin_turn(CHAT, second), Ok(Turn::Current));
}

#[test]
fn a_checkpoint_before_the_tail_serves_a_rewritten_tail_and_goes_with_its_turn() {
    // T = W = R = 128, P = 10000 (section 9.3).
    let (prompt, block) = (count(0, 10_000), super::some(128));
    let tail = Tail {
        prompt_tokens: 10_000,
        replay_tokens: 128,
        reused_tokens: 0,
        chunk_start: 9_000,
        publishing: Publishing::PerConversation,
        encoder_replay: false,
    };
    let checkpoint = tail.checkpoint(MARGINS[0], block).expect("far from the start");
    assert_eq!((checkpoint, tail.ladder(block).len()), (9_344, 1));
    let life_cycles = vec![required(Retention::Full, 0), required(window(128), 1)];
    let configured = end_points(config(128, life_cycles, vec![vec![200, 200]]));
    let limit = |tokens: &[TokenId]| tokens[..tokens.len() - 128].to_vec();
    // Without the checkpoint, a prompt that is sent again reuses nothing.
    let mut without = Bed::new(configured.clone());
    turn(&mut without, &prompt, &[]);
    assert_eq!(without.probe(&limit(&prompt)), 0);
    let mut bed = Bed::new(configured);
    turn(&mut bed, &prompt, &[checkpoint as usize]);
    for rewritten in [0, 128, 640, 656] {
        let again = fork(&prompt, 10_000 - rewritten, &count(50_000, rewritten as u32));
        assert_eq!(bed.probe(&limit(&again)), 9_344, "{rewritten} tokens rewritten");
    }
    assert_eq!(bed.probe(&limit(&fork(&prompt, 10_000 - 1024, &count(50_000, 1024)))), 0);
    bed.manager.expire(CHAT);
    bed.check();
    assert_eq!((bed.probe(&limit(&prompt)), bed.pages(1)), (0, vec![(0, 0, 0)]));
}

#[test]
fn history_that_passes_a_checkpoint_first_loses_it() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
    let mut bed = Bed::new(end_points(config(4, life_cycles, vec![vec![20, 20]])));
    let (right, _) = bed.prefill(&count(0, 30), &[16]);
    assert_eq!((bed.probe(&count(0, 16)), bed.probe(&count(0, 30))), (16, 30));
    bed.close(right);
    let (id, _) = bed.start(&count(500, 30));
    assert!(bed.resize(id, 30, 30));
    let early = bed.manager.commit(id, &count(500, 16), super::After::GoesOn, &mut bed.copies);
    assert!(early.is_err(), "{early:?}");
    bed.commit(id, &count(500, 30));
    assert_eq!(bed.probe(&count(500, 16)), 0);
}

#[test]
fn a_page_that_another_conversation_used_since_is_not_dropped() {
    for used in [false, true] {
        let mut bed = Bed::new(with_window(Policy::Private, 30));
        let (plan, _) = planned(&mut bed, &count(0, 24));
        if used {
            assert_eq!(bed.serve(&count(0, 24)), 24);
        }
        bed.manager.drop_plan(plan).expect("once");
        bed.check();
        assert_eq!(bed.probe(&count(0, 24)), if used { 24 } else { 16 });
    }
}

#[test]
fn a_page_of_two_plans_goes_with_the_second() {
    let mut bed = Bed::new(with_window(Policy::Private, 30));
    let (first, _) = planned(&mut bed, &count(0, 24));
    let (second, _) = planned(&mut bed, &count(0, 24));
    bed.manager.drop_plan(first).expect("once");
    bed.check();
    assert_eq!(bed.probe(&count(0, 24)), 24);
    bed.manager.drop_plan(second).expect("once");
    assert_eq!(bed.probe(&count(0, 24)), 16);
}

#[test]
fn a_plan_does_not_take_the_page_that_has_its_pages_id_now() {
    let mut bed = Bed::new(with_window(Policy::Private, 2));
    let (plan, pages) = planned(&mut bed, &count(0, 8));
    assert_eq!(pages, [0, 0, 2]);
    // The same ids hold other tokens now.
    bed.serve(&count(100, 8));
    assert_eq!((bed.probe(&count(0, 8)), bed.probe(&count(100, 8))), (0, 8));
    bed.manager.drop_plan(plan).expect("once");
    bed.check();
    assert_eq!(bed.probe(&count(100, 8)), 8);
}

#[test]
fn conversations_beyond_the_limit_expire_and_take_their_plans_along() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(6), 1)];
    let three = Config { conversations_max: 3, ..end_points(config(4, life_cycles, vec![vec![90, 90]])) };
    let mut bed = Bed::new(three);
    for chat in 0..6u32 {
        let conversation = ConversationKey(u128::from(chat));
        let (id, _) = bed.open(&[]);
        bed.manager.begin_turn(conversation, id).expect("it is open");
        assert!(bed.resume(id) && bed.resize(id, 10, 10));
        bed.commit(id, &count(100 * chat, 10));
        bed.manager.stop(id).expect("it is open");
        bed.manager.end_turn(conversation, id).expect("it is current");
        bed.close(id);
        // The first one goes on, so it is never the one used longest ago.
        let (again, _) = bed.open(&[]);
        bed.manager.begin_turn(ConversationKey(0), again).expect("it is open");
        bed.manager.abandon_turn(ConversationKey(0), again).expect("it is current");
        bed.close(again);
    }
    assert_eq!(bed.manager.conversations(), 3);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|chat| bed.probe(&count(100 * chat, 10))), [10, 0, 0, 0, 10, 10]);
}

#[test]
fn an_idle_conversation_expires_and_its_plans_are_dropped() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
    let ttl = Config { conversation_ttl_us: Some(100), ..end_points(config(4, life_cycles, vec![vec![90, 90]])) };
    let mut bed = Bed::new(ttl);
    assert_eq!(bed.manager.poll_timeout(), None);
    bed.manager.advance(50);
    let tokens = count(0, 16);
    turn(&mut bed, &tokens, &[]);
    // One that is under way never expires, one whose sequence is closed does.
    bed.conversation = Some(ConversationKey(2));
    let (running, _) = bed.open(&[]);
    bed.manager.begin_turn(ConversationKey(2), running).expect("it is open");
    assert_eq!((bed.manager.poll_timeout(), bed.probe(&tokens)), (Some(150), 16));
    let mut out = Vec::new();
    for (now_us, left) in [(149, 2), (20, 2), (150, 1), (10_000, 1)] {
        bed.manager.handle(now_us, Input::Tick, &mut out);
        bed.check();
        assert_eq!(bed.manager.conversations(), left, "at {now_us}");
    }
    assert_eq!((out.as_slice(), bed.manager.poll_timeout()), (&[const { Effect::Done }; 4][..], None));
    assert_eq!(bed.probe(&tokens), 0, "the window's pages went with the plan");
    bed.close(running);
    assert_eq!(bed.manager.poll_timeout(), Some(150));
    bed.manager.handle(10_001, Input::Clear, &mut out);
    assert_eq!((bed.manager.conversations(), bed.manager.poll_timeout()), (0, None));
}

#[test]
fn a_conversation_in_use_does_not_expire() {
    let life_cycles = vec![required(Retention::Full, 0), required(window(4), 1)];
    let ttl = Config { conversation_ttl_us: Some(100), ..end_points(config(4, life_cycles, vec![vec![90, 90]])) };
    let mut bed = Bed::new(ttl);
    for round in 1..6u32 {
        bed.manager.advance(u64::from(round) * 90);
        turn(&mut bed, &count(0, 8 * round), &[]);
        assert_eq!((bed.manager.conversations(), bed.manager.poll_timeout()), (1, Some(u64::from(round) * 90 + 100)));
    }
}
