//! An embedded actor application: a counter that a poison message makes panic, and a supervisor that brings it back.

use starling_actors::{Actor, ActorError, ActorSpec, AskError, Backoff, Context, Node, Reply};
use starling_actors::{Strategy, SupervisorSpec, TraceContext};
use std::error::Error;
use std::io::Write;
use std::time::Duration;

const TRACE: TraceContext = TraceContext::NONE;
const DEADLINE: Duration = Duration::from_secs(5);

enum CounterMessage {
    Add(u64),
    Total(Reply<u64>),
    /// What a bug looks like from outside.
    Poison(Reply<u64>),
}

#[derive(Default)]
struct Counter {
    total: u64,
}

impl Actor for Counter {
    type Message = CounterMessage;

    fn handle(
        &mut self,
        _context: &mut Context<'_, CounterMessage>,
        message: CounterMessage,
    ) -> Result<(), ActorError> {
        match message {
            CounterMessage::Add(amount) => self.total += amount,
            CounterMessage::Total(reply) => reply.send(self.total),
            CounterMessage::Poison(_reply) => panic!("poisoned at {}", self.total),
        }
        Ok(())
    }
}

/// Counts to five, poisons the counter, and counts on from zero through the same address.
async fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (restarted, mut restarts) = tokio::sync::mpsc::unbounded_channel();
    let node = Node::new("example");
    let spec = SupervisorSpec::new("counters", Strategy::OneForOne)
        .backoff(Backoff::NONE)
        .on_restart(move |name, number| {
            // Nobody listens after the example has ended.
            let _ = restarted.send(format!("{name} restarted, {number} in all"));
        })
        .child(ActorSpec::new("counter", Counter::default).mailbox_messages_max(1_000));
    let tree = node.start(spec).await?;
    let counter = node.address::<CounterMessage>("counter");

    counter.tell(TRACE, CounterMessage::Add(2))?;
    counter.tell(TRACE, CounterMessage::Add(3))?;
    let total = counter.ask(TRACE, DEADLINE, CounterMessage::Total).await?;
    writeln!(out, "total {total}")?;

    match counter.ask(TRACE, DEADLINE, CounterMessage::Poison).await {
        Err(error @ AskError::Died { .. }) => writeln!(out, "{error}")?,
        other => return Err(format!("the poison did not work: {other:?}").into()),
    }
    let restart = restarts.recv().await.ok_or("the supervisor is gone")?;
    writeln!(out, "{restart}")?;

    counter.tell(TRACE, CounterMessage::Add(1))?;
    let total = counter.ask(TRACE, DEADLINE, CounterMessage::Total).await?;
    writeln!(out, "total {total}: a fresh machine, the same address")?;
    writeln!(out, "stop: {:?}", tree.stop(DEADLINE).await)?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(&mut std::io::stdout()).await
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_poisoned_counter_returns_fresh_under_the_same_address() {
        let mut out = Vec::new();
        super::run(&mut out).await.unwrap();
        let expected = "total 5\n\
            actor \"counter\" died before it replied\n\
            counter restarted, 1 in all\n\
            total 1: a fresh machine, the same address\n\
            stop: Drained\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
