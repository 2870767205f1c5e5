//! Whatever happens, every question ends in exactly one answer or one typed error, and nothing is left behind.

use crate::fabric::{Fabric, Memory, Two, node_name};
use crate::probe::{Order, start};
use crate::support::{TRACE, until};
use proptest::prelude::*;
use starling_actors::{AskError, RemoteLimits, Reply, StreamError};
use std::time::Duration;
use tokio::task::JoinHandle;

const WINDOW_BYTES: u32 = 8 << 10;

#[derive(Clone, Debug)]
enum Step {
    Ask(Question, Duration),
    Stream {
        items_max: u32,
        count: u64,
        taken: u64,
    },
    /// An asker goes away.
    Abort(prop::sample::Index),
    AnswerKept,
    Panic,
    Cut,
    Heal,
    /// Lets tasks run so many times.
    Yield(u8),
    Pass(Duration),
}

#[derive(Clone, Copy, Debug)]
enum Question {
    Echo,
    DropReply,
    KeepReply,
    PanicOn,
    /// To a name that is not exposed.
    Hidden,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let question = prop_oneof![
        4 => Just(Question::Echo),
        1 => Just(Question::DropReply),
        3 => Just(Question::KeepReply),
        1 => Just(Question::PanicOn),
        1 => Just(Question::Hidden),
    ];
    let deadline = (0..200u64).prop_map(Duration::from_millis);
    let step = prop_oneof![
        8 => (question, deadline.clone()).prop_map(|(question, deadline)| Step::Ask(question, deadline)),
        2 => (1..5u32, 0..20u64, 0..20u64)
            .prop_map(|(items_max, count, taken)| Step::Stream { items_max, count, taken }),
        1 => any::<prop::sample::Index>().prop_map(Step::Abort),
        1 => Just(Step::AnswerKept),
        1 => Just(Step::Panic),
        1 => Just(Step::Cut),
        2 => Just(Step::Heal),
        4 => (0..20u8).prop_map(Step::Yield),
        2 => deadline.prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 1..60)
}

/// What an asker saw: a text that says what was wrong, if anything was.
type Verdict = Option<String>;

fn judge(question: Question, number: u64, outcome: &Result<u64, AskError>) -> Verdict {
    let right = match (question, outcome) {
        // Any question may meet these.
        (_, Err(AskError::ConnectionLost { may_have_been_delivered: true, .. })) => true,
        (_, Err(AskError::DeadlineExceeded { .. } | AskError::Undelivered(_))) => true,
        (Question::Echo, Ok(answer)) => *answer == number,
        (Question::KeepReply, Ok(answer)) => *answer == 77,
        (Question::DropReply, Err(AskError::NoReply { .. })) => true,
        (Question::DropReply | Question::Echo | Question::PanicOn, Err(AskError::Died { .. })) => true,
        (Question::KeepReply, Err(AskError::Died { .. } | AskError::NoReply { .. })) => true,
        _ => false,
    };
    (!right).then(|| format!("{question:?} {number}: {outcome:?}"))
}

struct Run {
    two: Two<Memory>,
    askers: Vec<JoinHandle<Verdict>>,
}

impl Run {
    fn ask(&mut self, question: Question, deadline: Duration) {
        let number = self.askers.len() as u64;
        let name = if matches!(question, Question::Hidden) { "hidden" } else { "probe" };
        let address = self.two.a.remote::<Order>(&node_name("b"), name);
        self.askers.push(tokio::spawn(async move {
            let started = tokio::time::Instant::now();
            let outcome = match question {
                Question::Echo | Question::Hidden => {
                    let body = number.to_le_bytes().to_vec();
                    let echo = address.ask(TRACE, deadline, |reply| Order::Echo(body, reply)).await;
                    echo.map(|body| u64::from_le_bytes(body.try_into().unwrap()))
                }
                question => {
                    let order = move |reply: Reply<u64>| match question {
                        Question::DropReply => Order::DropReply(reply),
                        Question::PanicOn => Order::PanicOn(reply),
                        _ => Order::KeepReply(reply),
                    };
                    address.ask(TRACE, deadline, order).await
                }
            };
            let late = started.elapsed() > deadline + Duration::from_millis(2);
            if late { Some(format!("{question:?} {number} took {:?}", started.elapsed())) } else { None }
                .or_else(|| judge(question, number, &outcome))
        }));
    }

    fn stream(&mut self, items_max: u32, count: u64, taken: u64) {
        let address = self.two.a.remote::<Order>(&node_name("b"), "probe");
        self.askers.push(tokio::spawn(async move {
            let question = |sink| Order::Numbers(count, crate::probe::End::Finish, sink);
            let mut items = match address.stream::<u64>(TRACE, items_max, question) {
                Ok(items) => items,
                Err(_) => return None,
            };
            for number in 0..taken {
                match items.next().await {
                    Some(Ok(item)) if item == number && number < count => {}
                    None if number == count => return None,
                    Some(Err(StreamError::ConnectionLost { .. } | StreamError::Undelivered(_))) => return None,
                    // It went down with the actor.
                    Some(Err(StreamError::Died { .. } | StreamError::Dropped { .. })) => return None,
                    other => return Some(format!("stream of {count} at {number}: {other:?}")),
                }
            }
            None
        }));
    }

    async fn step(&mut self, step: Step) {
        let at_home = self.two.b.address::<Order>("probe");
        match step {
            Step::Ask(question, deadline) => self.ask(question, deadline),
            Step::Stream { items_max, count, taken } => self.stream(items_max, count, taken),
            Step::Abort(at) if !self.askers.is_empty() => self.askers[at.index(self.askers.len())].abort(),
            Step::Abort(_) => {}
            // Between two lives nobody is there to be told.
            Step::AnswerKept => drop(at_home.tell(TRACE, Order::AnswerKept(77))),
            Step::Panic => drop(at_home.tell(TRACE, Order::Panic)),
            Step::Cut => self.two.fabric.cut("a", "b").await,
            Step::Heal => self.two.fabric.heal("a", "b").await,
            Step::Yield(times) => {
                for _ in 0..times {
                    tokio::task::yield_now().await;
                }
            }
            Step::Pass(time) => crate::support::pass(time).await,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_question_ends_once_and_nothing_is_left(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let limits = RemoteLimits { window_bytes: WINDOW_BYTES, ..RemoteLimits::default() };
            let mut run = Run { two: Two::linked_with(limits).await, askers: Vec::new() };
            start(&run.two.b, "probe").await;
            for step in steps {
                run.step(step).await;
            }
            run.step(Step::Heal).await;
            run.two.are_linked().await;
            for asker in run.askers.drain(..) {
                match asker.await {
                    Ok(verdict) => assert_eq!(verdict, None),
                    Err(error) => assert!(error.is_cancelled(), "{error}"),
                }
            }
            let (a, b) = (&run.two.a, &run.two.b);
            until("no question is open", || {
                let (a, b) = (&a.link_stats()[0], &b.link_stats()[0]);
                a.open_asks == 0 && b.open_asks_of_peer == 0 && b.held_bytes == 0
            })
            .await;
            // No credit got lost: each of these takes half of it.
            let address = a.remote::<Order>(&node_name("b"), "probe");
            crate::probe::until_answered(&address).await;
            for _ in 0..4 {
                let sent = address.send(TRACE, Order::Bytes(vec![0; WINDOW_BYTES as usize / 2]));
                tokio::time::timeout(Duration::from_secs(60), sent).await.expect("credit was lost").unwrap();
            }
        });
    }
}
