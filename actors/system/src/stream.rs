//! Streams: many items for one question, from this node or another, no faster than they are taken.

use crate::address::{Address, Limit, Posed, SendError};
use crate::entry::Control;
use crate::remote::{Asked, Encode, Failure, Home, OutletError, Pending, Streaming, claim_sink, decode_body, leave};
use crate::trace::TraceContext;
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use starling_transport::codec;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Why a stream ended before its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The question was never delivered.
    #[error(transparent)]
    Undelivered(#[from] SendError),
    /// The actor dropped the sink.
    #[error("actor {name:?} dropped the stream before its end")]
    Dropped { name: Arc<str> },
    /// The actor panicked over the stream, or ended before it came to it.
    #[error("actor {name:?} died before the end of the stream")]
    Died { name: Arc<str> },
    #[error("connection to actor {name:?} was lost before the end of the stream")]
    ConnectionLost { name: Arc<str> },
    /// An item came that cannot be decoded.
    #[error("an item of actor {name:?} was lost: {reason}")]
    ItemLost { name: Arc<str>, reason: String },
}

/// Why an item was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError<T> {
    /// As many items as the stream allows wait to be taken.
    #[error("stream is full")]
    Full(T),
    /// Nobody takes items any more.
    #[error("nobody takes items of this stream any more")]
    Unwanted(T),
    /// It cannot travel to the other node.
    #[error("item cannot be sent: {reason}")]
    Unsendable { item: T, reason: String },
}

// -- the side that makes items

/// Where the items of a stream go. [`Sink::finish`] says that the stream is complete; a sink that is merely dropped leaves an
/// error. It travels inside messages to another node, once.
pub struct Sink<T> {
    /// Empty once it is finished or has travelled on.
    outlet: Mutex<Option<Outlet<T>>>,
}

enum Outlet<T> {
    Local { sender: mpsc::Sender<T>, shared: Arc<Shared>, items_max: u32 },
    Remote { asked: Arc<Asked>, sent: u64, encode: Encode<T> },
}

impl<T> Sink<T> {
    fn new(outlet: Outlet<T>) -> Self {
        Self { outlet: Mutex::new(Some(outlet)) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Outlet<T>>> {
        self.outlet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outlet(&mut self) -> &mut Option<Outlet<T>> {
        self.outlet.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an item over; never waits.
    ///
    /// # Errors
    /// See [`SinkError`]: the item comes back.
    pub fn try_send(&mut self, item: T) -> Result<(), SinkError<T>> {
        match self.outlet() {
            Some(Outlet::Local { sender, .. }) => sender.try_send(item).map_err(|error| match error {
                mpsc::error::TrySendError::Full(item) => SinkError::Full(item),
                mpsc::error::TrySendError::Closed(item) => SinkError::Unwanted(item),
            }),
            Some(Outlet::Remote { asked, sent, encode }) => {
                let frame = asked.item(|frame| encode(&item, frame));
                match frame.and_then(|frame| asked.try_send_item(frame)) {
                    Ok(()) => *sent += 1,
                    Err(error) => return Err(returned(item, error)),
                }
                Ok(())
            }
            None => Err(SinkError::Unwanted(item)),
        }
    }

    /// Hands an item over; waits while the stream is full.
    ///
    /// # Errors
    /// See [`SinkError`]; never `Full`.
    pub async fn send(&mut self, item: T) -> Result<(), SinkError<T>> {
        match self.outlet() {
            Some(Outlet::Local { sender, .. }) => {
                sender.send(item).await.map_err(|mpsc::error::SendError(item)| SinkError::Unwanted(item))
            }
            Some(Outlet::Remote { asked, sent, encode }) => {
                let frame = asked.item(|frame| encode(&item, frame));
                let result = match frame {
                    Ok(frame) => asked.send_item(frame).await,
                    Err(error) => Err(error),
                };
                match result {
                    Ok(()) => *sent += 1,
                    Err(error) => return Err(returned(item, error)),
                }
                Ok(())
            }
            None => Err(SinkError::Unwanted(item)),
        }
    }

    /// The stream is complete: whoever takes the items sees its end after the last one.
    pub fn finish(mut self) {
        self.end(Failure::Finished);
    }

    /// Whether somebody still takes items: work for nobody can be skipped.
    pub fn is_wanted(&self) -> bool {
        match &*self.lock() {
            Some(Outlet::Local { sender, .. }) => !sender.is_closed(),
            Some(Outlet::Remote { asked, .. }) => asked.is_wanted(),
            None => false,
        }
    }

    fn end(&mut self, failure: Failure) {
        match self.outlet().take() {
            // Before the sender is dropped, which ends the stream.
            Some(Outlet::Local { shared, .. }) => shared.end(failure),
            Some(Outlet::Remote { asked, sent, .. }) => asked.end_items(sent, failure),
            None => {}
        }
    }
}

fn returned<T>(item: T, error: OutletError) -> SinkError<T> {
    match error {
        OutletError::Full => SinkError::Full(item),
        OutletError::Unwanted => SinkError::Unwanted(item),
        OutletError::Unsendable(reason) => SinkError::Unsendable { item, reason },
    }
}

impl<T> Drop for Sink<T> {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() { Failure::Died } else { Failure::Dropped });
    }
}

impl<T> fmt::Debug for Sink<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sink").field("wanted", &self.is_wanted()).finish()
    }
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Serialize for Sink<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut items_credit = 0;
        let index = leave(|| {
            let mut outlet = self.lock();
            match outlet.take() {
                Some(Outlet::Local { sender, shared, items_max }) => {
                    items_credit = items_max;
                    let inlet = Inlet { sender: Some(sender), received: 0, announced: None };
                    Ok(Pending::Stream(Arc::new(Away { shared, inlet: Mutex::new(inlet) })))
                }
                remote @ Some(_) => {
                    *outlet = remote;
                    Err("a sink travels to one other node only")
                }
                None => Err("this sink was given away"),
            }
        });
        (index.map_err(S::Error::custom)?, items_credit).serialize(serializer)
    }
}

impl<'de, T: Serialize + DeserializeOwned + Send + 'static> Deserialize<'de> for Sink<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (index, items_max) = Deserialize::deserialize(deserializer)?;
        let asked = claim_sink(index, items_max).map_err(D::Error::custom)?;
        Ok(Self::new(Outlet::Remote { asked, sent: 0, encode: codec::encode_onto::<T> }))
    }
}

// -- what both sides know

/// Known to the taker and, in whatever hands it is, the sink.
#[derive(Default)]
struct Shared {
    end: OnceLock<Failure>,
    /// Set when the sink has travelled.
    home: OnceLock<Home>,
}

impl Shared {
    fn end(&self, failure: Failure) {
        // The first reason is the reason.
        let _ = self.end.set(failure);
    }
}

/// Takes items that come from another node. Their lane and that of the end may overtake each other, so the end says how many
/// items belong before it.
struct Away<T> {
    shared: Arc<Shared>,
    inlet: Mutex<Inlet<T>>,
}

struct Inlet<T> {
    /// Dropped at the end.
    sender: Option<mpsc::Sender<T>>,
    received: u64,
    announced: Option<(u64, Failure)>,
}

impl<T> Inlet<T> {
    /// True when it is over.
    fn settle(&mut self, shared: &Shared) -> bool {
        let reached = |announced: &mut (u64, Failure)| announced.0 <= self.received;
        if let Some((_, failure)) = self.announced.take_if(reached) {
            shared.end(failure);
            self.sender = None;
        }
        self.sender.is_none()
    }
}

impl<T> Away<T> {
    fn lock(&self) -> MutexGuard<'_, Inlet<T>> {
        self.inlet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: DeserializeOwned + Send + 'static> Streaming for Away<T> {
    fn at_home(&self, home: Home) {
        // A sink travels once.
        let _ = self.shared.home.set(home);
    }

    fn is_wanted(&self) -> bool {
        self.lock().sender.as_ref().is_some_and(|sender| !sender.is_closed())
    }

    fn item(&self, body: &[u8]) -> Result<bool, String> {
        let mut inlet = self.lock();
        let Some(sender) = &inlet.sender else {
            return Ok(true);
        };
        match decode_body(body) {
            Ok(item) => match sender.try_send(item) {
                Err(mpsc::error::TrySendError::Full(_)) => return Err("more items than their credit".to_owned()),
                // Whoever took them has gone, and the cancel is on its way.
                Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            },
            Err(error) => inlet.announced = Some((0, Failure::AnswerLost { reason: error.to_string() })),
        }
        inlet.received += 1;
        Ok(inlet.settle(&self.shared))
    }

    fn end(&self, items: u64, failure: Failure) -> bool {
        let mut inlet = self.lock();
        inlet.announced = Some((items, failure));
        inlet.settle(&self.shared)
    }
}

// -- the side that takes items

/// The items of a stream. Dropping it tells the sink that nobody takes them any more.
pub struct Items<T> {
    receiver: mpsc::Receiver<T>,
    shared: Arc<Shared>,
    /// Where the question lies, on this node.
    mailbox: Option<Arc<dyn Control>>,
    name: Arc<str>,
    sent: &'static str,
    /// Taken, and not given back as credit yet.
    taken: u32,
    batch: u32,
    is_over: bool,
}

impl<T> Items<T> {
    /// The next item; none after the end. An error is the last thing that comes.
    pub async fn next(&mut self) -> Option<Result<T, StreamError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`Items::next`], for whoever builds another kind of stream on it.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<T, StreamError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        Poll::Ready(match std::task::ready!(self.receiver.poll_recv(context)) {
            Some(item) => {
                self.give_credit();
                Some(Ok(item))
            }
            None => {
                self.is_over = true;
                self.why().map(Err)
            }
        })
    }

    fn give_credit(&mut self) {
        self.taken += 1;
        if self.taken >= self.batch
            && let Some(home) = self.shared.home.get()
        {
            home.give_item_credit(std::mem::take(&mut self.taken));
        }
    }

    /// None when the stream is complete.
    fn why(&self) -> Option<StreamError> {
        let name = Arc::clone(&self.name);
        let failure = self.shared.end.get().cloned().unwrap_or(Failure::Dropped);
        Some(StreamError::Undelivered(match failure {
            Failure::Finished => return None,
            Failure::Dropped if self.mailbox.as_ref().is_some_and(|mailbox| mailbox.is_dead()) => {
                return Some(StreamError::Died { name });
            }
            Failure::Dropped => return Some(StreamError::Dropped { name }),
            Failure::Died => return Some(StreamError::Died { name }),
            Failure::ConnectionLost => return Some(StreamError::ConnectionLost { name }),
            Failure::AnswerLost { reason } => return Some(StreamError::ItemLost { name, reason }),
            Failure::NotRunning | Failure::DeadlineExceeded => SendError::NotRunning { name },
            Failure::MailboxFull { limit } => SendError::Full { name, limit: Limit::MailboxMessages(limit) },
            Failure::NotExposed => SendError::NotExposed { name },
            Failure::UnknownType => SendError::UnknownType { name, sent: self.sent },
            Failure::Undecodable => SendError::Undecodable { name },
        }))
    }
}

impl<T> Drop for Items<T> {
    fn drop(&mut self) {
        // First, so that the stream is seen to be unwanted.
        self.receiver.close();
        if let Some(home) = self.shared.home.get() {
            home.withdraw();
        }
    }
}

impl<T> fmt::Debug for Items<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items").field("of", &self.name).field("over", &self.is_over).finish()
    }
}

impl<M: Send + 'static> Address<M> {
    /// Sends the question that `question` makes of a [`Sink`]; its answer is a stream, of which at most `items_max` items wait to be
    /// taken.
    ///
    /// # Errors
    /// See [`SendError`]; what goes wrong later is the last thing in the stream.
    pub fn stream<T: Send + 'static>(
        &self,
        trace: TraceContext,
        items_max: u32,
        question: impl FnOnce(Sink<T>) -> M,
    ) -> Result<Items<T>, SendError> {
        let items_max = items_max.max(1);
        let (sender, receiver) = mpsc::channel(items_max as usize);
        let shared = Arc::new(Shared::default());
        let sink = Sink::new(Outlet::Local { sender, shared: Arc::clone(&shared), items_max });
        let posed = self.pose(trace, None, question(sink))?;
        let mailbox = match posed {
            Posed::Local(mailbox) => Some(mailbox as Arc<dyn Control>),
            Posed::Remote(_) => None,
        };
        Ok(Items {
            receiver,
            shared,
            mailbox,
            name: Arc::clone(self.label()),
            sent: std::any::type_name::<M>(),
            taken: 0,
            // Half: the sink need not wait while one half is on its way back.
            batch: items_max.div_ceil(2),
            is_over: false,
        })
    }
}
