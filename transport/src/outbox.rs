//! Frames that wait for one stream, and the writer that puts them there in batches.
//!
//! Small frames are copied side by side into one buffer, which is then handed to the connection without another copy: the
//! connection looks its unacknowledged pieces through from the front for every packet, so few large pieces are fast and many
//! small ones are not. A large frame is a piece of its own.

use crate::wire::HEADER_BYTES;
use bytes::{BufMut, Bytes, BytesMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// From this size a frame is not copied.
const PIECE_BYTES_MIN: usize = 16 * 1024;
/// Small frames are gathered up to this size.
const GATHERED_BYTES_MAX: usize = 64 * 1024;

#[derive(Default)]
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    /// Something waits, or nothing will any more.
    ready: Notify,
}

#[derive(Default)]
struct Waiting {
    pieces: Vec<Bytes>,
    gathered: BytesMut,
    /// Takes no frames of users.
    closed: bool,
    /// The stream ends when nothing waits.
    ends: bool,
}

/// The outbox takes no more frames.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// What a frame takes of a queue: an empty one is not free.
pub(crate) fn cost(frame: &[u8]) -> usize {
    HEADER_BYTES + frame.len()
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.gathered.is_empty()
    }

    fn cut_gathered(&mut self) {
        if !self.gathered.is_empty() {
            self.pieces.push(self.gathered.split().freeze());
        }
    }

    fn push(&mut self, kind: Option<u8>, frame: Bytes) {
        let length = frame.len() + usize::from(kind.is_some());
        let is_piece = frame.len() >= PIECE_BYTES_MIN;
        let gathered = HEADER_BYTES + 1 + if is_piece { 0 } else { frame.len() };
        if self.gathered.capacity() - self.gathered.len() < gathered {
            self.cut_gathered();
            self.gathered.reserve(GATHERED_BYTES_MAX);
        }
        // Limits of frames are far below the four bytes' range, see `Limits::check`.
        self.gathered.put_u32_le(length as u32);
        self.gathered.extend(kind);
        if is_piece {
            self.cut_gathered();
            self.pieces.push(frame);
        } else {
            self.gathered.put_slice(&frame);
        }
    }
}

impl Outbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while the lock is held, so a poisoned lock guards nothing broken.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a frame, after a kind byte on streams that have one.
    pub fn push(&self, kind: Option<u8>, frame: Bytes) -> Result<(), Closed> {
        self.put(kind, frame, false)
    }

    /// The mesh's own frames go out until the stream ends.
    pub fn push_own(&self, kind: u8, frame: Bytes) {
        let _ = self.put(Some(kind), frame, true);
    }

    fn put(&self, kind: Option<u8>, frame: Bytes, also_closed: bool) -> Result<(), Closed> {
        let mut waiting = self.waiting();
        if waiting.closed && !also_closed {
            return Err(Closed);
        }
        let was_empty = waiting.is_empty();
        waiting.push(kind, frame);
        drop(waiting);
        if was_empty {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Takes no more frames; those that wait are still written. The mesh's own follow until [`Self::end`].
    pub fn close(&self) {
        self.waiting().closed = true;
    }

    /// As [`Self::close`], and the stream ends once all is written.
    pub fn end(&self) {
        {
            let mut waiting = self.waiting();
            (waiting.closed, waiting.ends) = (true, true);
        }
        self.ready.notify_one();
    }

    /// Takes no more frames, and forgets those that wait.
    pub fn discard(&self) {
        let mut waiting = self.waiting();
        *waiting = Waiting { closed: true, ends: true, ..Waiting::default() };
    }

    /// Waits for frames and moves all of them to `batch`; `false` once there will be none.
    ///
    /// Cancel safe: it waits before it takes.
    pub async fn take(&self, batch: &mut Vec<Bytes>) -> bool {
        loop {
            {
                let mut waiting = self.waiting();
                if !waiting.is_empty() {
                    waiting.cut_gathered();
                    std::mem::swap(&mut waiting.pieces, batch);
                    return true;
                }
                if waiting.ends {
                    return false;
                }
            }
            self.ready.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::FrameCutter;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_put_in_comes_out_in_order(sizes in proptest::collection::vec(0usize..40_000, 0..60), kind in any::<Option<u8>>()) {
            let outbox = Outbox::default();
            let frames: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, size)| vec![i as u8; *size]).collect();
            for frame in &frames {
                outbox.push(kind, Bytes::from(frame.clone())).unwrap();
            }
            outbox.end();
            prop_assert_eq!(outbox.push(kind, Bytes::new()), Err(Closed));
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (mut cutter, mut found, mut batch) = (FrameCutter::new(40_001), Vec::new(), Vec::new());
            while runtime.block_on(outbox.take(&mut batch)) {
                for piece in batch.drain(..) {
                    cutter.push(piece);
                    while let Some(frame) = cutter.cut().unwrap() {
                        found.push(frame[usize::from(kind.is_some())..].to_vec());
                    }
                }
            }
            prop_assert_eq!(found, frames);
        }
    }

    #[test]
    fn what_is_discarded_does_not_come_out() {
        let outbox = Outbox::default();
        outbox.push(None, Bytes::from_static(b"x")).unwrap();
        outbox.discard();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(!runtime.block_on(outbox.take(&mut Vec::new())));
    }
}
