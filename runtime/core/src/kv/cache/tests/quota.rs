use super::{Bed, SCOPE, config, count, required, window};
use crate::ids::TokenId;
use crate::kv::cache::lifecycle::{LifeCycle, Priority, Retention};
use crate::kv::cache::{Config, ConfigError, Manager, PPM};
use crate::kv::identity::Scope;

const GREEDY: Scope = Scope { tenant: 7, adapter: None };

fn half(config: Config) -> Config {
    Config { scope_quota_ppm: Some(PPM / 2), ..config }
}

/// Computes, commits and closes in a scope; the tokens that were reused.
fn serve(bed: &mut Bed, scope: Scope, tokens: &[TokenId]) -> u32 {
    let (id, opened) = bed.open_in(scope, tokens);
    assert!(bed.resume(id) && bed.resize(id, tokens.len() as u32, opened.reused_tokens), "no room");
    bed.commit(id, &tokens[opened.reused_tokens as usize..]);
    bed.close(id);
    opened.reused_tokens
}

#[test]
fn a_greedy_scope_pushes_out_its_own_pages_only() {
    for (quota, left) in [(Some(PPM / 2), 24), (None, 0)] {
        for tiers in [vec![vec![24]], vec![vec![8], vec![8], vec![8]]] {
            let mut bed =
                Bed::new(Config { scope_quota_ppm: quota, ..config(2, vec![required(Retention::Full, 0)], tiers) });
            serve(&mut bed, SCOPE, &count(0, 12));
            serve(&mut bed, SCOPE, &count(100, 12));
            for round in 0..20 {
                serve(&mut bed, GREEDY, &count(1000 * round, 10));
            }
            assert_eq!(bed.probe(&count(0, 12)) + bed.probe(&count(100, 12)), left, "with a quota of {quota:?}");
            assert_eq!(bed.manager.scope_pages(&GREEDY, 0).is_some_and(|pages| pages <= 12), quota.is_some());
            // What came last is still there.
            assert_eq!(bed.manager.probe(&GREEDY, &count(19_000, 10)), 10);
        }
    }
}

#[test]
fn pages_in_use_count_and_are_never_refused() {
    let mut bed = Bed::new(half(config(2, vec![required(Retention::Full, 0)], vec![vec![12]])));
    serve(&mut bed, GREEDY, &count(0, 8));
    assert_eq!(bed.manager.scope_pages(&GREEDY, 0), Some(4));
    let (id, _) = bed.open_in(GREEDY, &count(100, 20));
    assert!(bed.resume(id) && bed.resize(id, 20, 0), "what is in use is not refused");
    // Ten in use: nothing that nobody uses has a place beside them.
    assert_eq!((bed.manager.scope_pages(&GREEDY, 0), bed.manager.probe(&GREEDY, &count(0, 8))), (Some(10), 0));
    bed.commit(id, &count(100, 20));
    bed.close(id);
    assert_eq!((bed.manager.scope_pages(&GREEDY, 0), bed.manager.probe(&GREEDY, &count(100, 20))), (Some(6), 12));
}

#[test]
fn the_least_valuable_pages_of_a_scope_go_first() {
    let full = LifeCycle { priority: Priority::ByOrdinal(vec![60, 60, 10]), ..required(Retention::Full, 0) };
    let mut bed = Bed::new(half(config(2, vec![full], vec![vec![12]])));
    serve(&mut bed, GREEDY, &count(0, 8));
    serve(&mut bed, GREEDY, &count(100, 8));
    assert_eq!(bed.manager.probe(&GREEDY, &count(0, 8)), 4, "the last blocks of the first one went");
    assert_eq!(bed.manager.probe(&GREEDY, &count(100, 8)), 8);
}

#[test]
fn a_quota_is_of_each_group_and_at_most_everything() {
    let two = config(4, vec![required(Retention::Full, 0), required(window(4), 1)], vec![vec![20, 4]]);
    let mut bed = Bed::new(half(two.clone()));
    serve(&mut bed, GREEDY, &count(0, 16));
    assert_eq!((bed.manager.scope_pages(&GREEDY, 0), bed.manager.scope_pages(&GREEDY, 1)), (Some(4), Some(2)));
    assert_eq!(
        (bed.manager.scope_pages(&SCOPE, 0), Bed::new(two.clone()).manager.scope_pages(&SCOPE, 0)),
        (Some(0), None)
    );
    bed.manager.forget_scope(&GREEDY);
    bed.check();
    assert_eq!(bed.manager.scope_pages(&GREEDY, 0), Some(0));
    let more = Manager::new(Config { scope_quota_ppm: Some(PPM + 1), ..two }).map(|_| ());
    assert_eq!(more, Err(ConfigError::ScopeQuota { quota_ppm: PPM + 1 }));
}
