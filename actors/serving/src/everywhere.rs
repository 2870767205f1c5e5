//! Questions that go to all nodes or ranks of the cluster at once.

use serde::{Deserialize, Serialize};
use starling_actors::{Address, AskError, Reply, SendError, TraceContext};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// Somebody who did not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unanswered {
    /// Such as `rank 1 of node-1`, or `node-1`.
    pub who: String,
    pub why: String,
}

/// How long until a question is posed again for which there was no room, or nobody yet.
const POSE_AGAIN: Duration = Duration::from_millis(5);

/// Asks everyone, and returns what was answered within the deadline, by index, and who did not answer.
pub(crate) async fn ask_all<M, R, Q>(
    everyone: Vec<(String, Address<M>)>,
    trace: TraceContext,
    within: Duration,
    question: Q,
) -> (Vec<(usize, R)>, Vec<Unanswered>)
where
    M: Send + 'static,
    R: Send + 'static,
    Q: Fn(usize, Reply<R>) -> M + Clone + Send + Sync + 'static,
{
    let mut asking = JoinSet::new();
    let until = Instant::now() + within;
    for (index, (who, address)) in everyone.into_iter().enumerate() {
        let question = question.clone();
        asking.spawn(async move {
            let answer = ask(&address, trace, until, |reply| question(index, reply)).await;
            (index, answer.map_err(|error| Unanswered { who, why: error.to_string() }))
        });
    }
    let mut all = asking.join_all().await;
    all.sort_by_key(|(index, _)| *index);
    let (mut answers, mut unanswered) = (Vec::new(), Vec::new());
    for (index, answer) in all {
        match answer {
            Ok(answer) => answers.push((index, answer)),
            Err(missing) => unanswered.push(missing),
        }
    }
    (answers, unanswered)
}

/// Asks one, again while its mailbox is full, there is no credit, or it is being restarted.
async fn ask<M: Send + 'static, R: Send + 'static>(
    address: &Address<M>,
    trace: TraceContext,
    until: Instant,
    question: impl Fn(Reply<R>) -> M + Sync,
) -> Result<R, AskError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match address.ask(trace, left, &question).await {
            Err(AskError::Undelivered(SendError::Full { .. } | SendError::NotRunning { .. })) if left > POSE_AGAIN => {
                // sleeps because neither room nor a restart is announced to whoever is no actor
                sleep(POSE_AGAIN).await;
            }
            answer => return answer,
        }
    }
}
