//! One link over one connection, as those who send see it: queues, their limits, and the reason why it ended.

use crate::link::{DownReason, Lane, Link, LinkError, Peer, Port};
use crate::outbox::{Outbox, cost};
use crate::wire::{CONTROL_FRAME, DATAGRAM_USER, Offer};
use bytes::{BufMut, Bytes, BytesMut};
use quinn::SendDatagramError;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// What a link may hold, of both sides' limits the smaller where the peer has a say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortLimits {
    pub offer: Offer,
    /// Of messages and bulk bodies.
    pub queue_bytes_max: usize,
    /// Of control and rounds: a peer that lets so much wait does not read.
    pub urgent_bytes_max: usize,
}

/// Bodies that wait for a stream of their own.
#[derive(Default)]
struct Bodies {
    waiting: VecDeque<Bytes>,
    closed: bool,
}

pub(crate) struct QuicPort {
    peer: Peer,
    /// For datagrams, while the link is up: who keeps a link that ended must not keep the socket.
    connection: Mutex<Option<quinn::Connection>>,
    limits: PortLimits,
    control: Outbox,
    rounds: Outbox,
    messages: Vec<Outbox>,
    bodies: Mutex<Bodies>,
    bodies_ready: Notify,
    /// Bytes of messages and bodies that wait.
    queued: AtomicUsize,
    /// Bytes of control and rounds that wait.
    urgent: AtomicUsize,
    /// Milliseconds from `started` to when anything last came.
    heard_ms: AtomicU64,
    started: Instant,
    up: AtomicBool,
    end: OnceLock<DownReason>,
    ended: Notify,
}

impl QuicPort {
    pub fn new(peer: Peer, connection: quinn::Connection, limits: PortLimits) -> Arc<Self> {
        let messages = (0..limits.offer.lanes).map(|_| Outbox::default()).collect();
        Arc::new(Self {
            peer,
            connection: Mutex::new(Some(connection)),
            limits,
            control: Outbox::default(),
            rounds: Outbox::default(),
            messages,
            bodies: Mutex::default(),
            bodies_ready: Notify::new(),
            queued: AtomicUsize::new(0),
            urgent: AtomicUsize::new(0),
            heard_ms: AtomicU64::new(0),
            started: Instant::now(),
            up: AtomicBool::new(false),
            end: OnceLock::new(),
            ended: Notify::new(),
        })
    }

    pub fn link(self: &Arc<Self>) -> Link {
        Link::new(self.clone())
    }

    pub fn limits(&self) -> &PortLimits {
        &self.limits
    }

    /// Every lane that is a stream of its own, with its queue: all but control.
    pub fn streams(&self) -> impl Iterator<Item = (Lane, &Outbox)> {
        let messages = self.messages.iter().enumerate().map(|(index, outbox)| (Lane::Messages(index as u8), outbox));
        std::iter::once((Lane::Rounds, &self.rounds)).chain(messages)
    }

    pub fn outbox(&self, lane: Lane) -> &Outbox {
        match lane {
            Lane::Control => &self.control,
            Lane::Rounds => &self.rounds,
            Lane::Messages(index) => &self.messages[usize::from(index) % self.messages.len()],
        }
    }

    fn waiting_bytes(&self, lane: Lane) -> &AtomicUsize {
        match lane {
            Lane::Control | Lane::Rounds => &self.urgent,
            Lane::Messages(_) => &self.queued,
        }
    }

    /// The connection took so many bytes of a lane. The mesh's own frames were never counted, so the count stops at zero.
    pub fn sent(&self, lane: Lane, bytes: usize) {
        release(self.waiting_bytes(lane), bytes);
    }

    pub fn body_sent(&self, bytes: usize) {
        release(&self.queued, bytes);
    }

    pub fn heard(&self) {
        let since_start = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(since_start, Ordering::Relaxed);
    }

    pub fn set_up(&self) {
        self.heard();
        self.up.store(true, Ordering::Release);
    }

    /// Takes nothing more for sending; what waits is still sent, and then the streams end.
    pub fn leave(&self) {
        self.up.store(false, Ordering::Release);
        self.control.close();
        for (_, outbox) in self.streams() {
            outbox.end();
        }
        self.bodies().closed = true;
        self.bodies_ready.notify_waiters();
    }

    /// The first reason stands; what waits is lost.
    pub fn end(&self, reason: DownReason) {
        if self.end.set(reason).is_err() {
            return;
        }
        self.up.store(false, Ordering::Release);
        self.control.discard();
        for (_, outbox) in self.streams() {
            outbox.discard();
        }
        {
            let mut bodies = self.bodies();
            bodies.closed = true;
            bodies.waiting.clear();
        }
        self.connection().take();
        self.queued.store(0, Ordering::Relaxed);
        self.urgent.store(0, Ordering::Relaxed);
        self.ended.notify_one();
    }

    pub fn end_reason(&self) -> Option<&DownReason> {
        self.end.get()
    }

    /// Waits for [`Self::end`]. One task waits.
    pub async fn ended(&self) -> DownReason {
        loop {
            if let Some(reason) = self.end.get() {
                return reason.clone();
            }
            self.ended.notified().await;
        }
    }

    /// Not up, or up and not heard for so long that it may be dead.
    pub fn is_doubtful(&self, silent_max: Duration) -> bool {
        !self.up.load(Ordering::Acquire) || self.last_heard() > silent_max
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        // Nothing panics while the lock is held, so a poisoned lock guards nothing broken.
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self) -> MutexGuard<'_, Option<quinn::Connection>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next body to send; `None` once there will be none. Several tasks wait.
    pub async fn next_body(&self) -> Option<Bytes> {
        loop {
            let ready = self.bodies_ready.notified();
            tokio::pin!(ready);
            // Before the look, so that what comes after it is not missed.
            ready.as_mut().enable();
            {
                let mut bodies = self.bodies();
                if let Some(body) = bodies.waiting.pop_front() {
                    return Some(body);
                }
                if bodies.closed {
                    return None;
                }
            }
            ready.await;
        }
    }

    fn down(&self) -> LinkError {
        LinkError::Down { peer: self.peer.name.clone() }
    }

    fn check_size(&self, bytes: usize, limit: u32) -> Result<(), LinkError> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if bytes > limit {
            return Err(LinkError::TooLarge { peer: self.peer.name.clone(), bytes, limit });
        }
        Ok(())
    }

    /// Counts bytes that are about to wait, unless they are too many.
    fn reserve(&self, waiting: &AtomicUsize, bytes: usize, limit: usize) -> Result<(), LinkError> {
        let before = waiting.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > limit {
            release(waiting, bytes);
            return Err(LinkError::Full { peer: self.peer.name.clone(), queued: before, limit });
        }
        Ok(())
    }

    fn reserve_lane(&self, lane: Lane, bytes: usize) -> Result<(), LinkError> {
        match lane {
            Lane::Messages(_) => self.reserve(&self.queued, bytes, self.limits.queue_bytes_max),
            Lane::Control | Lane::Rounds => {
                let limit = self.limits.urgent_bytes_max;
                let refused = self.reserve(&self.urgent, bytes, limit);
                if refused.is_err() {
                    let why = format!("more than {limit} bytes of control and rounds wait for it");
                    self.end(DownReason::Violation(why));
                }
                refused
            }
        }
    }
}

fn release(waiting: &AtomicUsize, bytes: usize) {
    let less = |queued: usize| Some(queued.saturating_sub(bytes));
    // The closure always has a value, so this cannot fail.
    let _ = waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
}

impl Port for QuicPort {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn send(&self, lane: Lane, frame: Bytes) -> Result<(), LinkError> {
        if !self.is_up() {
            return Err(self.down());
        }
        self.check_size(frame.len(), self.limits.offer.frame_bytes_max)?;
        let kind = (lane == Lane::Control).then_some(CONTROL_FRAME);
        let bytes = cost(&frame) + usize::from(kind.is_some());
        self.reserve_lane(lane, bytes)?;
        self.outbox(lane).push(kind, frame).map_err(|_| {
            self.sent(lane, bytes);
            self.down()
        })
    }

    fn send_bulk(&self, body: Bytes) -> Result<(), LinkError> {
        if !self.is_up() {
            return Err(self.down());
        }
        self.check_size(body.len(), self.limits.offer.bulk_bytes_max)?;
        let bytes = cost(&body);
        self.reserve(&self.queued, bytes, self.limits.queue_bytes_max)?;
        {
            let mut bodies = self.bodies();
            if bodies.closed {
                drop(bodies);
                self.body_sent(bytes);
                return Err(self.down());
            }
            bodies.waiting.push_back(body);
        }
        self.bodies_ready.notify_one();
        Ok(())
    }

    fn send_datagram(&self, datagram: Bytes) -> Result<(), LinkError> {
        if !self.is_up() {
            return Err(self.down());
        }
        let mut bytes = BytesMut::with_capacity(1 + datagram.len());
        bytes.put_u8(DATAGRAM_USER);
        bytes.put_slice(&datagram);
        let connection = self.connection().clone().ok_or_else(|| self.down())?;
        connection.send_datagram(bytes.freeze()).map_err(|error| match error {
            SendDatagramError::ConnectionLost(_) => self.down(),
            SendDatagramError::TooLarge | SendDatagramError::UnsupportedByPeer | SendDatagramError::Disabled => {
                let limit = connection.max_datagram_size().unwrap_or(0).saturating_sub(1);
                LinkError::TooLarge { peer: self.peer.name.clone(), bytes: datagram.len(), limit }
            }
        })
    }

    fn queued_bytes(&self) -> usize {
        self.queued.load(Ordering::Relaxed).saturating_add(self.urgent.load(Ordering::Relaxed))
    }

    fn last_heard(&self) -> Duration {
        let heard = Duration::from_millis(self.heard_ms.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(heard)
    }

    fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    fn close(&self, reason: DownReason) {
        self.end(reason);
    }
}
