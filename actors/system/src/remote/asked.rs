//! The answering side of the peer's questions.

use super::passage::Fate;
use super::session::{Session, Way};
use super::wire::{Failure, Key};
use bytes::Bytes;
use starling_transport::codec::CodecError;
use starling_transport::{Lane, LinkError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, TryAcquireError};

/// One question of the peer, until it is answered.
pub(crate) struct Asked {
    session: Arc<Session>,
    key: Key,
    lane: Lane,
    wanted: AtomicBool,
    fate: Arc<Fate>,
    /// 0: a question of one answer.
    items_max: u32,
    items_left: Semaphore,
}

/// Why an item was not sent.
pub(crate) enum OutletError {
    Full,
    Unwanted,
    Unsendable(String),
}

impl Asked {
    pub fn new(session: &Arc<Session>, (key, lane): (Key, Lane), items_max: u32, fate: &Arc<Fate>) -> Self {
        Self {
            session: Arc::clone(session),
            key,
            lane,
            wanted: AtomicBool::new(true),
            fate: Arc::clone(fate),
            items_max,
            items_left: Semaphore::new(items_max as usize),
        }
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    pub fn answer(&self, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), CodecError>) {
        if self.close() {
            match self.key.answer(encode) {
                Ok(frame) => self.session.send_answer((self.key, self.lane), frame),
                Err(error) => {
                    let reason = error.to_string();
                    self.session.send_failure(self.key, 0, Failure::AnswerLost { reason });
                }
            }
        }
    }

    /// There is no answer.
    pub fn give_up(&self, failure: Failure) {
        self.end_items(0, failure);
    }

    /// Nothing comes after so many items. In silence while the message is in no mailbox: then its carrier answers for it.
    pub fn end_items(&self, items: u64, failure: Failure) {
        let mailbox = self.fate.mailbox();
        if let (true, Some(mailbox)) = (self.close(), mailbox) {
            let died = failure == Failure::Dropped && mailbox.is_dead();
            self.session.send_failure(self.key, items, if died { Failure::Died } else { failure });
        }
    }

    /// An item, ready to be sent.
    pub fn item(&self, encode: impl FnOnce(&mut Vec<u8>) -> Result<(), CodecError>) -> Result<Bytes, OutletError> {
        self.key.item(encode).map_err(|error| OutletError::Unsendable(error.to_string()))
    }

    pub fn try_send_item(&self, frame: Bytes) -> Result<(), OutletError> {
        match self.items_left.try_acquire() {
            Ok(credit) => {
                self.post_item(frame)?;
                credit.forget();
                Ok(())
            }
            Err(TryAcquireError::NoPermits) => Err(OutletError::Full),
            Err(TryAcquireError::Closed) => Err(OutletError::Unwanted),
        }
    }

    pub async fn send_item(&self, frame: Bytes) -> Result<(), OutletError> {
        let credit = self.items_left.acquire().await.map_err(|_| OutletError::Unwanted)?;
        let mut pauses = Pauses::default();
        while let Err(error) = self.post_item(frame.clone()) {
            match error {
                OutletError::Full => pauses.pause().await,
                error => return Err(error),
            }
        }
        credit.forget();
        Ok(())
    }

    /// All items of a stream take one lane, so they keep their order.
    fn post_item(&self, frame: Bytes) -> Result<(), OutletError> {
        if !self.is_wanted() {
            return Err(OutletError::Unwanted);
        }
        self.session.send(Way::Lane(self.lane), frame).map_err(|error| match error {
            LinkError::Full { .. } => OutletError::Full,
            LinkError::Down { .. } => OutletError::Unwanted,
            error @ LinkError::TooLarge { .. } => OutletError::Unsendable(error.to_string()),
        })
    }

    /// False when more comes back than was sent.
    pub fn give_item_credit(&self, items: u32) -> bool {
        let fits = self.items_left.available_permits() + items as usize <= self.items_max as usize;
        if fits {
            self.items_left.add_permits(items as usize);
        }
        fits
    }

    /// True for the first who closes it, if the peer still waits.
    fn close(&self) -> bool {
        let wanted = self.close_in_silence();
        if wanted {
            self.session.ask_is_closed(self.key);
        }
        wanted
    }

    /// Leaves the session's table alone, which may be locked.
    pub fn close_in_silence(&self) -> bool {
        self.items_left.close();
        self.wanted.swap(false, Ordering::AcqRel)
    }
}

/// A link says that its queue is full, not when it no longer is. So it is asked again after 1 ms, then after twice as long, up to
/// 32 ms: about what a full queue of the default size takes at 5 Gbit/s.
pub(crate) struct Pauses(Duration);

const PAUSE_MAX: Duration = Duration::from_millis(32);

impl Default for Pauses {
    fn default() -> Self {
        Self(Duration::from_millis(1))
    }
}

impl Pauses {
    pub async fn pause(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(PAUSE_MAX);
    }
}
