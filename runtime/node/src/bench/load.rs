//! A run: sends the conversations of a workload at a pace, and collects what became of them.

use super::client::{Answer, Client, Failure, History};
use super::pace::Pace;
use super::workload::{Turn, Workload};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

/// Everything that makes a run.
pub struct Load {
    pub client: Client,
    pub workload: Workload,
    pub pace: Pace,
}

/// What became of one request.
#[derive(Clone, Debug)]
pub struct Record {
    pub conversation: u32,
    pub turn: u32,
    /// When it was due, from the beginning of the run.
    pub due: Duration,
    pub outcome: Result<Answer, Failure>,
    /// Later turns that were not sent, since this one failed.
    pub dropped_turns: u32,
}

/// What a run brought.
#[derive(Clone, Debug)]
pub struct Measured {
    /// In the order of their ends.
    pub records: Vec<Record>,
    pub duration: Duration,
    /// Requests that had not ended, or were not sent, when the run was stopped.
    pub unfinished: u64,
    pub stopped: bool,
}

impl Load {
    /// Runs until all conversations have ended, or until `stop` does; `each` gets every record as it is made.
    pub async fn run(self, stop: impl Future<Output = ()>, mut each: impl FnMut(&Record)) -> Measured {
        let total = self.workload.requests();
        let begun = Instant::now();
        let (told, mut records_of) = mpsc::unbounded_channel();
        // Dropped with the set, the conversations end with it.
        let mut dispatching = JoinSet::new();
        dispatching.spawn(Arc::new(self).dispatch(begun, told));
        let (mut records, mut settled, mut stopped) = (Vec::new(), 0, false);
        let mut take = |record: Record| {
            each(&record);
            settled += 1 + u64::from(record.dropped_turns);
            records.push(record);
        };
        tokio::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => {
                    stopped = true;
                    break;
                }
                record = records_of.recv() => {
                    let Some(record) = record else { break };
                    take(record);
                }
            }
        }
        // What had ended before the run was stopped is part of it.
        while let Ok(record) = records_of.try_recv() {
            take(record);
        }
        Measured { records, duration: begun.elapsed(), unfinished: total.saturating_sub(settled), stopped }
    }

    async fn dispatch(self: Arc<Self>, begun: Instant, told: mpsc::UnboundedSender<Record>) {
        let mut due_at = arrivals(self.pace.due(self.workload.seed), self.workload.conversations, begun);
        let most = self.pace.concurrency_max.map_or(Semaphore::MAX_PERMITS, |most| most as usize);
        let open = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        let mut conversations = JoinSet::new();
        for index in 0..self.workload.conversations {
            // Made before it is due: what the client takes for it is no latency of the server.
            let turns = self.workload.conversation(index);
            let Some(due) = due_at.recv().await else { break };
            // Those that are due wait here for their turn, and their time runs.
            let Ok(permit) = Arc::clone(&open).acquire_owned().await else { break };
            let due = if self.pace.is_closed_loop() { Instant::now() } else { due };
            let (load, told) = (Arc::clone(&self), told.clone());
            let sent = Conversation { load, index, turns, begun, told, _permit: permit };
            conversations.spawn(sent.run(due));
            // Those that have ended need no memory.
            while conversations.try_join_next().is_some() {}
        }
        drop(told);
        while conversations.join_next().await.is_some() {}
    }
}

/// Tells when each conversation is due, at that time. From a thread that sleeps: the runtime's timer is a millisecond late.
fn arrivals(
    due: impl Iterator<Item = Duration> + Send + 'static,
    conversations: u32,
    begun: Instant,
) -> mpsc::UnboundedReceiver<Instant> {
    let (tell, told) = mpsc::unbounded_channel();
    // The thread ends by itself once nobody listens any more; at the latest when the process does.
    std::thread::spawn(move || {
        for due in due.take(conversations as usize) {
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
            let Some(due) = begun.checked_add(due) else { return };
            if tell.send(due).is_err() {
                return;
            }
        }
    });
    told
}

struct Conversation {
    load: Arc<Load>,
    index: u32,
    turns: Vec<Turn>,
    begun: Instant,
    told: mpsc::UnboundedSender<Record>,
    _permit: OwnedSemaphorePermit,
}

impl Conversation {
    /// Sends one turn after the other, each with all that was said before.
    async fn run(self, first_due: Instant) {
        let Load { client, workload, .. } = &*self.load;
        let turns = &self.turns;
        let name = (turns.len() > 1).then(|| format!("bench-{}-{}", workload.seed, self.index));
        let mut history = History::new(client.target().endpoint);
        let mut due = first_due;
        for (turn, asked) in turns.iter().enumerate() {
            history.user_says(&asked.text);
            let mut outcome = client.ask(&history, asked.output_tokens, name.as_deref(), due).await;
            if let Ok(answer) = &mut outcome {
                // The text is of use for the next turn only.
                history.model_says(&std::mem::take(&mut answer.text));
            }
            let failed = outcome.is_err();
            let dropped_turns = if failed { (turns.len() - turn - 1) as u32 } else { 0 };
            let since = due.saturating_duration_since(self.begun);
            let record = Record { conversation: self.index, turn: turn as u32, due: since, outcome, dropped_turns };
            // Nobody listens once the run was stopped.
            if self.told.send(record).is_err() || failed {
                return;
            }
            due = Instant::now();
        }
    }
}
