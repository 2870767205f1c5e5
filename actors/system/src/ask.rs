//! Questions: every one ends in exactly one answer or one typed error, no later than its deadline.

use crate::address::{Address, SendError};
use crate::trace::TraceContext;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// The question was never delivered.
    #[error(transparent)]
    Undelivered(#[from] SendError),
    /// The actor took the question and dropped its reply.
    #[error("actor {name:?} gave no reply")]
    NoReply { name: Arc<str> },
    /// The actor panicked on the question, or ended before it came to it.
    #[error("actor {name:?} died before it replied")]
    Died { name: Arc<str> },
    #[error("actor {name:?} did not reply within {deadline:?}")]
    DeadlineExceeded { name: Arc<str>, deadline: Duration },
}

/// The right to answer one question, once. Dropping it tells the asker at once that there is no answer.
pub struct Reply<R> {
    /// Empty once answered.
    answer: Option<oneshot::Sender<Result<R, Unanswered>>>,
}

enum Unanswered {
    Dropped,
    Panicked,
}

impl<R> Reply<R> {
    /// Answers. Does nothing when the asker no longer waits. Works on any thread.
    pub fn send(mut self, answer: R) {
        if let Some(sender) = self.answer.take() {
            // The asker may have met its deadline: then nobody is left to tell.
            let _ = sender.send(Ok(answer));
        }
    }

    /// Whether the asker still waits: work for nobody can be skipped.
    pub fn is_wanted(&self) -> bool {
        self.answer.as_ref().is_some_and(|sender| !sender.is_closed())
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        if let Some(sender) = self.answer.take() {
            let reason = if std::thread::panicking() { Unanswered::Panicked } else { Unanswered::Dropped };
            let _ = sender.send(Err(reason));
        }
    }
}

impl<R> fmt::Debug for Reply<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("wanted", &self.is_wanted()).finish()
    }
}

impl<M: Send + 'static> Address<M> {
    /// Sends the question that `question` makes of a [`Reply`] and waits for the answer, at most `deadline`.
    ///
    /// # Errors
    /// See [`AskError`]. Except for `Undelivered` the actor may have acted on the question.
    pub async fn ask<R: Send + 'static>(
        &self,
        trace: TraceContext,
        deadline: Duration,
        question: impl FnOnce(Reply<R>) -> M,
    ) -> Result<R, AskError> {
        let (sender, receiver) = oneshot::channel();
        let reply = Reply { answer: Some(sender) };
        let mailbox = self.deliver(trace, question(reply), Arc::clone)?;
        let name = || Arc::clone(self.name_shared());
        match tokio::time::timeout(deadline, receiver).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(Unanswered::Panicked))) => Err(AskError::Died { name: name() }),
            // The questions left in a mailbox are dropped with it.
            Ok(Ok(Err(Unanswered::Dropped)) | Err(_)) if mailbox.is_dead() => Err(AskError::Died { name: name() }),
            Ok(Ok(Err(Unanswered::Dropped)) | Err(_)) => Err(AskError::NoReply { name: name() }),
            Err(_) => Err(AskError::DeadlineExceeded { name: name(), deadline }),
        }
    }
}
