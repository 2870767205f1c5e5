//! Questions: every one ends in exactly one answer or one typed error, no later than its deadline.

use crate::address::{Address, Limit, Posed, SendError};
use crate::remote::{Asked, Asking, Encode, Failure, Pending, Posted, claim, decode_body, leave};
use crate::trace::TraceContext;
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use starling_transport::codec;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// The link to its node went down while the question was open.
    #[error("connection to actor {name:?} was lost before it replied")]
    ConnectionLost { name: Arc<str>, may_have_been_delivered: bool },
    /// The actor answered, but the answer could not be brought home.
    #[error("the answer of actor {name:?} was lost: {reason}")]
    AnswerLost { name: Arc<str>, reason: String },
}

/// The right to answer one question, once. Dropping it tells the asker at once that there is no answer. It travels inside
/// messages to other nodes; serialized in any other place it is an error.
pub struct Reply<R> {
    /// Empty once answered, or once it has travelled on. Locked by nobody else while this is alone, so without a wait.
    answer: Mutex<Option<Answer<R>>>,
}

/// The way home.
enum Answer<R> {
    Local(oneshot::Sender<Result<R, Failure>>),
    Remote { asked: Arc<Asked>, encode: Encode<R> },
}

impl<R> Reply<R> {
    fn new(answer: Answer<R>) -> Self {
        Self { answer: Mutex::new(Some(answer)) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Answer<R>>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&mut self) -> Option<Answer<R>> {
        self.answer.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Answers. Does nothing when the asker no longer waits. Works on any thread.
    pub fn send(mut self, answer: R) {
        match self.take() {
            // The asker may have met its deadline: then nobody is left to tell.
            Some(Answer::Local(sender)) => drop(sender.send(Ok(answer))),
            Some(Answer::Remote { asked, encode }) => {
                asked.answer(|frame| encode(&answer, frame));
            }
            None => {}
        }
    }

    /// Whether the asker still waits: work for nobody can be skipped.
    pub fn is_wanted(&self) -> bool {
        match &*self.lock() {
            Some(Answer::Local(sender)) => !sender.is_closed(),
            Some(Answer::Remote { asked, .. }) => asked.is_wanted(),
            None => false,
        }
    }

    fn give_up(&mut self, failure: Failure) {
        match self.take() {
            Some(Answer::Local(sender)) => drop(sender.send(Err(failure))),
            Some(Answer::Remote { asked, .. }) => asked.give_up(failure),
            None => {}
        }
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        self.give_up(if std::thread::panicking() { Failure::Died } else { Failure::Dropped });
    }
}

impl<R> fmt::Debug for Reply<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("wanted", &self.is_wanted()).finish()
    }
}

/// Waits here for an answer from another node.
struct Away<R>(Reply<R>);

impl<R: DeserializeOwned + Send + 'static> Asking for Away<R> {
    fn is_wanted(&self) -> bool {
        self.0.is_wanted()
    }

    fn answer(self: Box<Self>, body: &[u8]) {
        let mut reply = self.0;
        match decode_body(body) {
            Ok(answer) => reply.send(answer),
            Err(error) => reply.give_up(Failure::AnswerLost { reason: error.to_string() }),
        }
    }

    fn fail(mut self: Box<Self>, failure: Failure) {
        self.0.give_up(failure);
    }
}

impl<R: Serialize + DeserializeOwned + Send + 'static> Serialize for Reply<R> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let away = || {
            let answer = self.lock().take().ok_or("this reply was given already")?;
            Ok(Pending::Reply(Box::new(Away(Self::new(answer)))))
        };
        leave(away).map_err(S::Error::custom)?.serialize(serializer)
    }
}

impl<'de, R: Serialize + DeserializeOwned + Send + 'static> Deserialize<'de> for Reply<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let asked = claim(u16::deserialize(deserializer)?).map_err(D::Error::custom)?;
        Ok(Self::new(Answer::Remote { asked, encode: codec::encode_onto::<R> }))
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
        let posed = self.pose(trace, Some(deadline), question(Reply::new(Answer::Local(sender))))?;
        let (posted, mailbox) = match posed {
            Posed::Local(mailbox) => (None, Some(mailbox)),
            Posed::Remote(posted) => (Some(posted), None),
        };
        let mut waiting = AwaitedAnswer { receiver: Some(receiver), posted };
        let Some(receiver) = waiting.receiver.as_mut() else {
            unreachable!("the receiver leaves when the question is dropped")
        };
        let failure = match tokio::time::timeout(deadline, receiver).await {
            Ok(Ok(Ok(answer))) => {
                waiting.posted = None;
                return Ok(answer);
            }
            Ok(Ok(Err(failure))) => failure,
            Ok(Err(_)) => Failure::Dropped,
            Err(_) => return Err(AskError::DeadlineExceeded { name: Arc::clone(self.label()), deadline }),
        };
        // The questions left in a mailbox are dropped with it.
        let died = failure == Failure::Dropped && mailbox.is_some_and(|mailbox| mailbox.is_dead());
        Err(self.why(if died { Failure::Died } else { failure }, deadline))
    }

    fn why(&self, failure: Failure, deadline: Duration) -> AskError {
        let name = Arc::clone(self.label());
        AskError::Undelivered(match failure {
            Failure::Dropped | Failure::Finished => return AskError::NoReply { name },
            Failure::Died => return AskError::Died { name },
            Failure::DeadlineExceeded => return AskError::DeadlineExceeded { name, deadline },
            Failure::ConnectionLost => return AskError::ConnectionLost { name, may_have_been_delivered: true },
            Failure::AnswerLost { reason } => return AskError::AnswerLost { name, reason },
            Failure::NotRunning => SendError::NotRunning { name },
            Failure::MailboxFull { limit } => SendError::Full { name, limit: Limit::MailboxMessages(limit) },
            Failure::NotExposed => SendError::NotExposed { name },
            Failure::UnknownType => SendError::UnknownType { name, sent: std::any::type_name::<M>() },
            Failure::Undecodable => SendError::Undecodable { name },
        })
    }
}

/// The asker's side. Dropped before the answer, it tells the other node that nobody waits any more.
struct AwaitedAnswer<R> {
    receiver: Option<oneshot::Receiver<Result<R, Failure>>>,
    posted: Option<Posted>,
}

impl<R> Drop for AwaitedAnswer<R> {
    fn drop(&mut self) {
        // First, so that the answer is seen to be unwanted.
        drop(self.receiver.take());
        if let Some(posted) = self.posted.take() {
            posted.withdraw();
        }
    }
}
