use super::{Bed, config, count, required, window};
use crate::ids::ConversationKey;
use crate::kv::cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use crate::kv::cache::{
    After, Commits, Config, ConfigError, Effect, Error, ErrorKind, Input, Manager, PlanId, SequenceId,
};

/// The call is refused with that kind of error, and changes nothing.
fn refused<T: std::fmt::Debug>(bed: &mut Bed, kind: ErrorKind, call: impl FnOnce(&mut Bed) -> Result<T, Error>) {
    let before = format!("{:?}", bed.manager);
    let error = call(bed).expect_err("a refusal");
    assert_eq!((error.kind(), before), (kind, format!("{:?}", bed.manager)), "{error}");
}

#[test]
fn refused_calls_say_why_and_change_nothing() {
    let optional = LifeCycle { policy: Policy::Optional, ..required(window(4), 0) };
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0), optional], vec![vec![20]]));
    let (id, _) = bed.prefill(&count(0, 5), &[]);
    let (idle, _) = bed.open(&count(900, 2));
    let gone = SequenceId(99);
    let nowhere = &mut Vec::new();
    use ErrorKind::{Argument, Logic};
    refused(&mut bed, Argument, |bed| bed.manager.resize(id, (None, Some(2)), nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.resize(id, (Some(4), None), nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.commit(id, &[1, 2], After::GoesOn, nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.commit(gone, &[], After::GoesOn, nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.create(id, super::SCOPE, &[], None));
    // A required life cycle, one that is not there, and (below) one that is not complete.
    refused(&mut bed, Argument, |bed| bed.manager.resume(idle, &[0], nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.resume(idle, &[7], nowhere));
    refused(&mut bed, Argument, |bed| bed.manager.drop_plan(PlanId(1)));
    refused(&mut bed, Logic, |bed| bed.manager.resume(id, &[], nowhere));
    refused(&mut bed, Logic, |bed| bed.manager.resize(idle, (Some(8), None), nowhere));
    refused(&mut bed, Logic, |bed| bed.manager.suspend(idle));
    refused(&mut bed, Logic, |bed| bed.manager.plan(id));
    refused(&mut bed, Logic, |bed| bed.manager.end_turn(ConversationKey(1), id));
    refused(&mut bed, Logic, |bed| bed.manager.clear());
    bed.manager.stop(id).expect("it is open");
    bed.manager.stop(id).expect("twice is once");
    refused(&mut bed, Logic, |bed| bed.manager.commit(id, &[], After::GoesOn, nowhere));
    let (plan, _) = bed.manager.plan(id).expect("it is stopped").expect("its end is an end point");
    bed.manager.drop_plan(plan).expect("once");
    refused(&mut bed, Argument, |bed| bed.manager.drop_plan(plan));
    bed.close(id);
    bed.close(id);
    bed.close(idle);
    bed.manager.clear().expect("nothing is open");
    assert_eq!((bed.manager.blocks(), bed.manager.free(0, 0)), (0, 20));
}

#[test]
fn an_incomplete_optional_life_cycle_is_not_restored() {
    let optional = LifeCycle { policy: Policy::Optional, ..required(window(4), 1) };
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0), optional], vec![vec![20, 20]]));
    bed.serve(&count(0, 8));
    assert_eq!(bed.open(&count(0, 8)).1.restorable, [1]);
    bed.close(SequenceId(bed.opened));
    assert!(bed.manager.unlink(&super::SCOPE, &count(0, 8), (3, 1)));
    let (id, opened) = bed.open(&count(0, 8));
    assert_eq!((opened.reused_tokens, opened.restorable), (8, vec![]));
    refused(&mut bed, ErrorKind::Argument, |bed| bed.manager.resume(id, &[1], &mut Vec::new()));
    assert!(bed.resume(id), "without it, the window is fresh");
}

#[test]
fn end_points_are_committed_at_the_history_only() {
    let mut bed = Bed::new(config(4, vec![required(Retention::State, 0)], vec![vec![8]]));
    let (id, _) = bed.open(&[]);
    assert!(bed.resume(id) && bed.resize(id, 12, 6));
    let nowhere = &mut Vec::new();
    refused(&mut bed, ErrorKind::Assertion, |bed| bed.manager.commit(id, &count(0, 4), After::GoesOn, nowhere));
    bed.commit(id, &count(0, 6));
    bed.commit(id, &count(6, 2));
}

#[test]
fn contradictions_of_a_configuration_are_named() {
    let full = || required(Retention::Full, 0);
    let right = config(4, vec![full()], vec![vec![4]]);
    let with = |life_cycles: Vec<LifeCycle>| Config { life_cycles, ..right.clone() };
    let urgent = LifeCycle { priority: Priority::ByOrdinal(vec![3, 101]), ..full() };
    let private = LifeCycle { policy: Policy::Private, ..required(Retention::State, 0) };
    let state = || required(Retention::State, 0);
    let ends = |config: Config| Config { commits: Commits::EndPoints, ..config };
    let wrong = [
        (with(Vec::new()), "KV manager of 0 life cycles (1 to 255 are possible)"),
        (
            Config { tiers: Vec::new(), ..right.clone() },
            "KV manager of 0 tiers with 0 pool groups (1 to 255 of each are possible)",
        ),
        (Config { tiers: vec![vec![1], vec![]], ..right.clone() }, "KV tier 1 has 0 pool groups, the device has 1"),
        (Config { tiers: vec![vec![0]], ..right.clone() }, "KV pool group 0 has no slot on the device"),
        (Config { tiers: vec![vec![u32::MAX]], ..right.clone() }, "KV tiers have more slots than 32 bits count"),
        (with(vec![required(Retention::Full, 3)]), "KV life cycle 0 is in pool group 3, but there are 1"),
        (
            Config { commits: Commits::EndPoints, endpoint_rewind_tokens: 9, ..right.clone() },
            "KV end points are kept for a rewind of 9 tokens, but only end points are committed",
        ),
        (with(vec![urgent]), "KV life cycle 0 has priority 101 (at most 100)"),
        (with(vec![state()]), "KV life cycle of recurrent layers needs commits at end points only"),
        (ends(with(vec![private])), "KV life cycle of recurrent layers is always required"),
        (ends(with(vec![state(), state()])), "KV manager has 2 life cycles of recurrent layers (at most one)"),
    ];
    for (config, said) in wrong {
        let error: ConfigError = Manager::new(config).expect_err(said);
        assert_eq!(error.to_string(), said);
    }
}

#[test]
fn inputs_are_answered_once_and_copies_come_first() {
    let mut bed = Bed::new(config(2, vec![required(Retention::Full, 0)], vec![vec![2], vec![4]]));
    bed.serve(&count(0, 4));
    let mut tell = |input: Input| {
        // A recorded trace is as good as the input itself.
        let trace = serde_json::to_string(&input).expect("inputs are plain values");
        let mut effects = Vec::new();
        bed.manager.handle(0, serde_json::from_str(&trace).expect("and come back"), &mut effects);
        bed.manager.check().unwrap_or_else(|violation| panic!("{violation}"));
        effects
    };
    let sequence = SequenceId(7);
    let create = Input::Create {
        sequence,
        scope: super::SCOPE,
        tokens: count(50, 4),
        conversation: None,
        reusable_tokens: None,
    };
    assert!(matches!(tell(create.clone())[..], [Effect::Created(_)]));
    assert_eq!(tell(create), [Effect::Refused(Error::DuplicateSequence { sequence })]);
    assert_eq!(tell(Input::Resume { sequence, restored: vec![] }), [Effect::Fits(true)]);
    let resize = Input::Resize { sequence, capacity: Some(4), history: None };
    assert!(matches!(tell(resize)[..], [Effect::Copy(_), Effect::Copy(_), Effect::Fits(true)]));
    let more = Input::Resize { sequence, capacity: Some(6), history: None };
    assert_eq!(tell(more), [Effect::Fits(false)]);
    let commit = Input::Commit { sequence, tokens: count(50, 4), after: After::Ends };
    assert!(matches!(tell(commit)[..], [Effect::Committed(_)]));
    assert!(matches!(tell(Input::Plan { sequence })[..], [Effect::Planned(Some(PlanId(1)))]));
    assert_eq!(tell(Input::DropPlan { plan: PlanId(1) }), [Effect::Done]);
    assert_eq!(tell(Input::DropPlan { plan: PlanId(1) }), [Effect::Refused(Error::UnknownPlan { plan: PlanId(1) })]);
    assert_eq!(tell(Input::Close { sequence }), [Effect::Done]);
    assert_eq!(tell(Input::Clear), [Effect::Done]);
}

#[test]
fn absurd_sizes_do_not_fit() {
    let mut bed = Bed::new(config(1, vec![required(Retention::Full, 0), required(window(4), 0)], vec![vec![20]]));
    let (id, _) = bed.prefill(&count(0, 4), &[]);
    let before = format!("{:?}", bed.manager);
    for (capacity, history) in [(u32::MAX, 4), (u32::MAX, u32::MAX), (22, 22)] {
        assert!(!bed.resize(id, capacity, history), "{capacity}, {history}");
        assert_eq!(before, format!("{:?}", bed.manager));
    }
}
