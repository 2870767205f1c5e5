//! What replies see while the message that holds them is encoded or decoded: the way in which an answer comes home.
//!
//! It is set on the thread only for that time. A reply that is serialized at any other moment is an error.

use super::asked::Asked;
use super::session::Session;
use super::wire::{Failure, Key, REPLIES_MAX};
use crate::entry::Control;
use starling_transport::Lane;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    static PASSAGE: RefCell<Passage> = const { RefCell::new(Passage::None) };
}

enum Passage {
    None,
    Out(Vec<Pending>),
    In(Arrival),
}

/// The asking side of a reply or a sink that has travelled.
pub(crate) enum Pending {
    Reply(Box<dyn Asking>),
    Stream(Arc<dyn Streaming>),
}

/// Waits for one answer.
pub(crate) trait Asking: Send {
    /// Whether somebody still waits for it.
    fn is_wanted(&self) -> bool;
    fn answer(self: Box<Self>, body: &[u8]);
    fn fail(self: Box<Self>, failure: Failure);
}

/// Takes the items of one stream.
pub(crate) trait Streaming: Send + Sync {
    /// From now on the items come over this link.
    fn at_home(&self, home: Home);
    fn is_wanted(&self) -> bool;
    /// True when the stream is over.
    ///
    /// # Errors
    /// The rule that the peer broke.
    fn item(&self, body: &[u8]) -> Result<bool, String>;
    /// It ends after so many items. True when it is over.
    fn end(&self, items: u64, failure: Failure) -> bool;
}

/// Where a stream comes from.
pub(crate) struct Home {
    pub session: Arc<Session>,
    pub key: Key,
}

impl Home {
    pub fn give_item_credit(&self, items: u32) {
        self.session.send_item_credit(self.key, items);
    }

    /// Nobody takes items any more.
    pub fn withdraw(&self) {
        self.session.withdraw(self.key.request);
    }
}

impl Pending {
    pub fn is_wanted(&self) -> bool {
        match self {
            Self::Reply(asking) => asking.is_wanted(),
            Self::Stream(stream) => stream.is_wanted(),
        }
    }

    /// Nothing more will come.
    pub fn fail(self, failure: Failure) {
        match self {
            Self::Reply(asking) => asking.fail(failure),
            Self::Stream(stream) => drop(stream.end(0, failure)),
        }
    }
}

/// What became of a message, for the replies in it. Empty until it is in a mailbox: until then whoever carries it answers for all
/// of its replies, and they drop in silence.
#[derive(Default)]
pub(crate) struct Fate(Mutex<Option<Arc<dyn Control>>>);

impl Fate {
    pub fn set(&self, mailbox: Option<Arc<dyn Control>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = mailbox;
    }

    pub fn mailbox(&self) -> Option<Arc<dyn Control>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A message that is being decoded.
struct Arrival {
    session: Arc<Session>,
    replies: Replies,
    claimed: Vec<bool>,
    fate: Arc<Fate>,
}

/// What a message says of the replies in it, and the lane by which they go home.
#[derive(Clone, Copy)]
pub(crate) struct Replies {
    pub request: u64,
    pub count: u16,
    pub lane: Lane,
}

/// Encodes within the passage; what the replies inside left behind comes back in the order of their numbers.
pub(crate) fn outward<T>(encode: impl FnOnce() -> T) -> (T, Vec<Pending>) {
    let before = PASSAGE.replace(Passage::Out(Vec::new()));
    let restore = Restore(Some(before));
    let encoded = encode();
    match restore.take() {
        Passage::Out(pending) => (encoded, pending),
        _ => (encoded, Vec::new()),
    }
}

/// Decodes within the passage. The last part of the result says which of the `replies` were found.
pub(crate) fn inward<T>(
    session: &Arc<Session>,
    replies: Replies,
    fate: &Arc<Fate>,
    decode: impl FnOnce() -> T,
) -> (T, Vec<bool>) {
    let claimed = vec![false; replies.count.into()];
    let arrival = Arrival { session: Arc::clone(session), replies, claimed, fate: Arc::clone(fate) };
    let restore = Restore(Some(PASSAGE.replace(Passage::In(arrival))));
    let decoded = decode();
    match restore.take() {
        Passage::In(arrival) => (decoded, arrival.claimed),
        _ => (decoded, Vec::new()),
    }
}

/// Puts the former passage back, also when the encoding panics.
struct Restore(Option<Passage>);

impl Restore {
    /// The passage that was set.
    fn take(mut self) -> Passage {
        let before = self.0.take().unwrap_or(Passage::None);
        PASSAGE.replace(before)
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            PASSAGE.set(before);
        }
    }
}

/// Hands the asking side of a reply over; the number under which the other side finds it.
pub(crate) fn leave(pending: impl FnOnce() -> Result<Pending, &'static str>) -> Result<u16, &'static str> {
    PASSAGE.with_borrow_mut(|passage| match passage {
        Passage::Out(left) if left.len() < usize::from(REPLIES_MAX) => {
            let index = u16::try_from(left.len()).map_err(|_| "too many replies in one message")?;
            left.push(pending()?);
            Ok(index)
        }
        Passage::Out(_) => Err("too many replies in one message"),
        _ => Err("replies and sinks can only travel inside a message to another node"),
    })
}

/// The answering side of the reply with this number.
pub(crate) fn claim(index: u16) -> Result<Arc<Asked>, &'static str> {
    claim_sink(index, 0)
}

/// The sending side of the stream with this number, with credit for so many items.
pub(crate) fn claim_sink(index: u16, items_max: u32) -> Result<Arc<Asked>, &'static str> {
    PASSAGE.with_borrow_mut(|passage| {
        let Passage::In(arrival) = passage else {
            return Err("replies and sinks can only be read out of a message from another node");
        };
        match arrival.claimed.get_mut(usize::from(index)) {
            Some(claimed) if !*claimed => *claimed = true,
            _ => return Err("no such reply is in this message"),
        }
        let key = Key { request: arrival.replies.request, index };
        let asked = Asked::new(&arrival.session, (key, arrival.replies.lane), items_max, &arrival.fate);
        Session::ask_arrives(&arrival.session, key, asked)
    })
}
