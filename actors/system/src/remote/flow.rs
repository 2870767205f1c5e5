//! Credit: how many bytes of messages may be on their way to one actor, or wait in its mailbox, for one link.
//!
//! Sender and receiver name the actor by a hash, so two names of the same hash share a window, on both sides alike.

use super::stats::Counters;
use super::wire::Frame;
use starling_transport::{Lane, Link};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Semaphore, TryAcquireError};

/// What a frame costs. Half a window at most: credit comes back in halves, so what costs more might never be affordable.
pub(crate) fn cost(frame_bytes: usize, window_bytes: u32) -> u32 {
    let half = (window_bytes / 2).max(1);
    u32::try_from(frame_bytes).map_or(half, |bytes| bytes.clamp(1, half))
}

/// The sender's side: what is left of the receiver's window.
pub(crate) struct Window {
    left: Semaphore,
    bytes: u32,
}

/// The link went down while the sender waited for credit.
pub(crate) struct WindowClosed;

impl Window {
    pub fn new(bytes: u32) -> Self {
        Self { left: Semaphore::new(bytes as usize), bytes }
    }

    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// False when there is not enough left, or others wait already.
    pub fn try_take(&self, cost: u32) -> Result<bool, WindowClosed> {
        match self.left.try_acquire_many(cost) {
            Ok(taken) => taken.forget(),
            Err(TryAcquireError::NoPermits) => return Ok(false),
            Err(TryAcquireError::Closed) => return Err(WindowClosed),
        }
        Ok(true)
    }

    /// Waits in line.
    pub async fn take(&self, cost: u32) -> Result<(), WindowClosed> {
        let taken = self.left.acquire_many(cost).await.map_err(|_| WindowClosed)?;
        taken.forget();
        Ok(())
    }

    /// False when more comes back than was taken.
    pub fn give_back(&self, bytes: u32) -> bool {
        let fits = self.left.available_permits() + bytes as usize <= self.bytes as usize;
        if fits {
            self.left.add_permits(bytes as usize);
        }
        fits
    }

    pub fn close(&self) {
        self.left.close();
    }
}

/// The receiver's side.
pub(crate) struct Flow {
    hash: u64,
    link: Link,
    window_bytes: u32,
    counters: Arc<Counters>,
    spent: Mutex<Spent>,
}

/// Invariant: (F1) `free <= out <= window_bytes`.
#[derive(Default)]
struct Spent {
    /// Received and not given back.
    out: u32,
    /// Of these, what has left the mailbox.
    free: u32,
}

/// The peer sent more than it had credit for.
pub(crate) struct Overdrawn {
    pub bytes: u64,
}

impl Flow {
    pub fn new(hash: u64, window_bytes: u32, link: Link, counters: Arc<Counters>) -> Self {
        Self { hash, link, window_bytes, counters, spent: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A frame for the actor came. The permit gives its credit back when it is dropped.
    pub fn charge(self: &Arc<Self>, frame_bytes: usize) -> Result<Permit, Overdrawn> {
        let cost = cost(frame_bytes, self.window_bytes);
        let mut spent = self.lock();
        let out = u64::from(spent.out) + u64::from(cost);
        if out > u64::from(self.window_bytes) {
            return Err(Overdrawn { bytes: out });
        }
        spent.out += cost;
        drop(spent);
        self.counters.held_bytes.fetch_add(u64::from(cost), Ordering::Relaxed);
        Ok(Permit { flow: Arc::clone(self), cost })
    }

    fn free(&self, cost: u32) {
        self.counters.held_bytes.fetch_sub(u64::from(cost), Ordering::Relaxed);
        let mut spent = self.lock();
        spent.free += cost;
        if spent.free >= (self.window_bytes / 2).max(1) {
            let bytes = std::mem::take(&mut spent.free);
            spent.out -= bytes;
            drop(spent);
            give_credit(&self.link, self.hash, bytes, &self.counters);
        }
    }
}

/// Tells the peer that it may send so many bytes more. A link that is down needs no credit.
pub(crate) fn give_credit(link: &Link, flow: u64, bytes: u32, counters: &Counters) {
    let frame = Frame::Credit { flow, bytes }.encode();
    let length = frame.len();
    if link.send(Lane::Control, frame).is_ok() {
        counters.sent(length);
    }
}

/// Held by a message from its arrival until it leaves the mailbox, in whatever way.
pub(crate) struct Permit {
    flow: Arc<Flow>,
    cost: u32,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.flow.free(self.cost);
    }
}
