//! One link as the actors use it: the questions open in both directions, and the credit of both.

use super::asked::Asked;
use super::flow::{Flow, Window, WindowClosed};
use super::gate::Gate;
use super::passage::{Home, Pending};
use super::stats::Counters;
use super::wire::{ALL_REPLIES, ENVELOPE_VERSION, Failure, Frame, KEY_BYTES, Key};
use super::{RemoteLimits, hash_of};
use bytes::Bytes;
use starling_transport::{DownReason, Lane, Link, LinkError, codec};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Larger bodies go by streams of their own: on a lane they would hold up what comes behind them. A link of 1 Gbit/s takes half a
/// millisecond for this much.
pub(crate) const LANE_BYTES_MAX: usize = 64 << 10;

/// Cancels that overtook their questions, or came after the answer had left: which of the two cannot be known, so the last few
/// are kept.
const EARLY_CANCELS_MAX: usize = 256;

/// Replies that were sent on and then given up stay until they are looked for, but never more than half of all, or this many.
const SWEEP_AT_MIN: usize = 64;

pub(crate) struct Session {
    pub link: Link,
    pub limits: RemoteLimits,
    pub counters: Arc<Counters>,
    /// The peer's window, from its hello.
    peer_window: OnceLock<u32>,
    ended: AtomicBool,
    /// Its coming up was told, so its end will be.
    pub told: AtomicBool,
    asking: Mutex<AskingTable>,
    asked: Mutex<AskedTable>,
    windows: Mutex<BTreeMap<u64, Arc<Window>>>,
    flows: Mutex<BTreeMap<u64, Arc<Flow>>>,
    entrances: Mutex<BTreeMap<Arc<str>, Arc<Entrance>>>,
}

/// What a message of the peer for one name meets; kept, so that it is looked up once for all of them.
pub(crate) struct Entrance {
    pub gate: Arc<dyn Gate>,
    pub flow: Arc<Flow>,
}

/// Our questions. Invariant: (S1) once `closed`, it is empty.
#[derive(Default)]
struct AskingTable {
    closed: bool,
    pending: BTreeMap<Key, Pending>,
    /// Those that nobody waits for any more are looked for when there are so many.
    sweep_at: usize,
}

/// The peer's questions.
#[derive(Default)]
struct AskedTable {
    open: BTreeMap<Key, Arc<Asked>>,
    early_cancels: VecDeque<Key>,
}

/// Why a frame was not taken for sending.
pub(crate) enum PostError {
    Down,
    TooLarge { bytes: usize, limit: usize },
    QueueFull { limit: usize },
    TooManyAsks { limit: usize },
}

impl From<LinkError> for PostError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Down { .. } => Self::Down,
            LinkError::TooLarge { bytes, limit, .. } => Self::TooLarge { bytes, limit },
            LinkError::Full { limit, .. } => Self::QueueFull { limit },
        }
    }
}

/// How a message travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Lane(Lane),
    Bulk,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere cannot leave these tables half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub fn new(link: Link, limits: RemoteLimits, counters: Arc<Counters>) -> Self {
        Self {
            link,
            limits,
            counters,
            peer_window: OnceLock::new(),
            ended: AtomicBool::new(false),
            told: AtomicBool::new(false),
            asking: Mutex::default(),
            asked: Mutex::default(),
            windows: Mutex::default(),
            flows: Mutex::default(),
            entrances: Mutex::default(),
        }
    }

    /// Whether the peer said hello and no end was heard of. A send finds out the rest.
    pub fn is_ready(&self) -> bool {
        self.peer_window.get().is_some() && !self.has_ended()
    }

    /// Whether messages may be sent right now.
    pub fn is_usable(&self) -> bool {
        self.is_ready() && self.link.is_up()
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Questions of this node and of the peer.
    pub fn open_asks(&self) -> (usize, usize) {
        let asking = lock(&self.asking).pending.len();
        (asking, lock(&self.asked).open.len())
    }

    pub fn send_hello(&self) {
        let window_bytes = self.limits.window_bytes;
        let hello = Frame::Hello { version: ENVELOPE_VERSION, codec: codec::CODEC_NUMBER, window_bytes };
        // A link that is down already says so by itself.
        let _ = self.send(Way::Lane(Lane::Control), hello.encode());
    }

    /// # Errors
    /// What is wrong with it.
    pub fn take_hello(&self, (version, codec): (u16, u16), window_bytes: u32) -> Result<(), String> {
        if version != ENVELOPE_VERSION {
            return Err(format!("envelopes of version {version}, not {ENVELOPE_VERSION}"));
        }
        if codec != codec::CODEC_NUMBER {
            return Err(format!("codec {codec}, not {}", codec::CODEC_NUMBER));
        }
        if window_bytes == 0 {
            return Err("a window of 0 bytes".to_owned());
        }
        self.peer_window.set(window_bytes).map_err(|_| "a second hello".to_owned())
    }

    /// The peer broke a rule.
    pub fn violated(&self, what: &str) {
        tracing::warn!(peer = %self.link.peer().name, what, "link closed: the peer broke the protocol of actors");
        self.link.close(DownReason::Violation(what.to_owned()));
        self.end();
    }

    /// Nothing passes any more: open questions fail, answers have nowhere to go.
    pub fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let pending = {
            let mut asking = lock(&self.asking);
            asking.closed = true;
            std::mem::take(&mut asking.pending)
        };
        for pending in pending.into_values() {
            pending.fail(Failure::ConnectionLost);
        }
        for window in lock(&self.windows).values() {
            window.close();
        }
        let asked = std::mem::take(&mut lock(&self.asked).open);
        for asked in asked.into_values() {
            asked.close_in_silence();
        }
    }

    pub fn send(&self, way: Way, frame: Bytes) -> Result<(), LinkError> {
        let bytes = frame.len();
        match way {
            Way::Lane(lane) => self.link.send(lane, frame)?,
            Way::Bulk => self.link.send_bulk(frame)?,
        }
        self.counters.sent(bytes);
        Ok(())
    }

    // -- our questions

    /// Keeps the replies of a message that is about to be sent.
    pub fn await_answers(session: &Arc<Self>, request: u64, pending: Vec<Pending>) -> Result<(), PostError> {
        if pending.is_empty() {
            return Ok(());
        }
        let keys = (0..).map(|index| Key { request, index });
        for (key, pending) in keys.clone().zip(&pending) {
            if let Pending::Stream(stream) = pending {
                stream.at_home(Home { session: Arc::clone(session), key });
            }
        }
        let mut asking = lock(&session.asking);
        if asking.closed {
            return Err(PostError::Down);
        }
        let limit = session.limits.open_asks_max;
        let mut unwanted = Vec::new();
        if asking.pending.len() + pending.len() > asking.sweep_at {
            asking.pending.retain(|key, pending| {
                let wanted = pending.is_wanted();
                if !wanted {
                    unwanted.push(*key);
                }
                wanted
            });
            asking.sweep_at = (asking.pending.len() * 2).max(SWEEP_AT_MIN).min(limit);
        }
        let fits = asking.pending.len() + pending.len() <= limit;
        if fits {
            asking.pending.extend(keys.zip(pending));
        }
        drop(asking);
        unwanted.into_iter().for_each(|key| session.send_cancel(key));
        if fits { Ok(()) } else { Err(PostError::TooManyAsks { limit }) }
    }

    fn send_cancel(&self, key: Key) {
        // A link that is down has told the peer already.
        let _ = self.send(Way::Lane(Lane::Control), Frame::Cancel { key }.encode());
    }

    /// The asker of this message has gone: what nobody waits for is taken back.
    pub fn withdraw(&self, request: u64) {
        let mut gone = Vec::new();
        {
            let mut asking = lock(&self.asking);
            for (key, pending) in asking.pending.range(range_of(request)) {
                if !pending.is_wanted() {
                    gone.push(*key);
                }
            }
            for key in &gone {
                asking.pending.remove(key);
            }
        }
        gone.into_iter().for_each(|key| self.send_cancel(key));
    }

    /// The message was not sent after all.
    pub fn forget(&self, request: u64) {
        if request != 0 {
            // Dropped: whoever waits hears it from the error, or from the dropped reply.
            drop(self.take_all(request));
        }
    }

    fn take_all(&self, request: u64) -> Vec<Pending> {
        let mut asking = lock(&self.asking);
        let keys: Vec<Key> = asking.pending.range(range_of(request)).map(|(key, _)| *key).collect();
        keys.iter().filter_map(|key| asking.pending.remove(key)).collect()
    }

    pub fn answered(&self, key: Key, body: &[u8]) -> Result<(), String> {
        let pending = lock(&self.asking).pending.remove(&key);
        match pending {
            Some(Pending::Reply(asking)) => asking.answer(body),
            Some(Pending::Stream(_)) => return Err("an answer to a stream".to_owned()),
            None => drop(self.counters.unwanted_answers.fetch_add(1, Ordering::Relaxed)),
        }
        Ok(())
    }

    pub fn failed(&self, key: Key, items: u64, failure: &Failure) {
        if key.index == ALL_REPLIES {
            self.take_all(key.request).into_iter().for_each(|pending| pending.fail(failure.clone()));
            return;
        }
        let pending = {
            let mut asking = lock(&self.asking);
            match asking.pending.get(&key) {
                // Stays: items that the end has overtaken are still to come.
                Some(Pending::Stream(stream)) => Some(Pending::Stream(Arc::clone(stream))),
                _ => asking.pending.remove(&key),
            }
        };
        match pending {
            Some(Pending::Stream(stream)) if stream.end(items, failure.clone()) => self.stream_is_over(key),
            Some(Pending::Reply(asking)) => asking.fail(failure.clone()),
            _ => {}
        }
    }

    fn stream_is_over(&self, key: Key) {
        lock(&self.asking).pending.remove(&key);
    }

    /// # Errors
    /// The rule that the peer broke.
    pub fn item(&self, key: Key, body: &[u8]) -> Result<(), String> {
        let stream = match lock(&self.asking).pending.get(&key) {
            Some(Pending::Stream(stream)) => Arc::clone(stream),
            Some(Pending::Reply(_)) => return Err("an item for a question of one answer".to_owned()),
            None => {
                self.counters.unwanted_answers.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
        };
        if stream.item(body)? {
            self.stream_is_over(key);
        }
        Ok(())
    }

    pub fn send_item_credit(&self, key: Key, items: u32) {
        // A link that is down has told the peer already.
        let _ = self.send(Way::Lane(Lane::Control), Frame::ItemCredit { key, items }.encode());
    }

    // -- the peer's questions

    /// A reply was found in a message of the peer.
    pub fn ask_arrives(session: &Arc<Self>, key: Key, asked: Asked) -> Result<Arc<Asked>, &'static str> {
        let asked = Arc::new(asked);
        let mut table = lock(&session.asked);
        if table.open.contains_key(&key) {
            return Err("the same request is open already");
        }
        // The peer may count one as closed whose cancel is still on its way: hence twice what it may have.
        if table.open.len() >= session.limits.open_asks_max.saturating_mul(2) {
            return Err("too many requests are open");
        }
        let cancelled = table.early_cancels.iter().position(|early| *early == key);
        if let Some(at) = cancelled {
            table.early_cancels.remove(at);
        }
        if cancelled.is_some() || session.has_ended() {
            asked.close_in_silence();
        } else {
            table.open.insert(key, Arc::clone(&asked));
        }
        Ok(asked)
    }

    pub fn cancelled(&self, key: Key) {
        let mut table = lock(&self.asked);
        if let Some(asked) = table.open.remove(&key) {
            asked.close_in_silence();
            return;
        }
        if table.early_cancels.len() == EARLY_CANCELS_MAX {
            table.early_cancels.pop_front();
        }
        table.early_cancels.push_back(key);
    }

    /// # Errors
    /// What is wrong with it.
    pub fn item_credited(&self, key: Key, items: u32) -> Result<(), String> {
        // One that is not open was ended or cancelled meanwhile.
        let Some(asked) = lock(&self.asked).open.get(&key).cloned() else { return Ok(()) };
        if asked.give_item_credit(items) {
            return Ok(());
        }
        Err(format!("credit for {items} items came back, more than were sent"))
    }

    pub fn ask_is_closed(&self, key: Key) {
        lock(&self.asked).open.remove(&key);
    }

    /// Says that none of the replies of a message will come.
    pub fn refuse(&self, request: u64, failure: Failure) {
        let key = Key { request, index: ALL_REPLIES };
        if request != 0 {
            self.send_failure(key, 0, failure);
        }
    }

    pub fn send_failure(&self, key: Key, items: u64, failure: Failure) {
        // A link that is down has told the peer already.
        let _ = self.send(Way::Lane(Lane::Control), Frame::Fail { key, items, failure }.encode());
    }

    /// By the lane of the question: answers that are given together then travel together.
    pub fn send_answer(&self, (key, lane): (Key, Lane), frame: Bytes) {
        let way = if frame.len() > KEY_BYTES + LANE_BYTES_MAX { Way::Bulk } else { Way::Lane(lane) };
        let error = match self.send(way, frame.clone()) {
            Ok(()) | Err(LinkError::Down { .. }) => return,
            // An answer must not be lost to a full queue; there are no more of them than there are open questions.
            Err(LinkError::Full { .. }) if way != Way::Bulk => self.send(Way::Lane(Lane::Control), frame).err(),
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            self.send_failure(key, 0, Failure::AnswerLost { reason: error.to_string() });
        }
    }

    // -- credit

    /// What is left for the actor of this hash.
    pub fn window(&self, flow: u64) -> Result<Arc<Window>, WindowClosed> {
        let bytes = *self.peer_window.get().ok_or(WindowClosed)?;
        let mut windows = lock(&self.windows);
        // Looked at under the lock, which `end` takes after it has set it.
        if self.has_ended() {
            return Err(WindowClosed);
        }
        Ok(Arc::clone(windows.entry(flow).or_insert_with(|| Arc::new(Window::new(bytes)))))
    }

    /// # Errors
    /// What is wrong with it.
    pub fn credited(&self, flow: u64, bytes: u32) -> Result<(), String> {
        let window = lock(&self.windows).get(&flow).cloned();
        if window.is_some_and(|window| window.give_back(bytes)) {
            return Ok(());
        }
        Err(format!("{bytes} bytes of credit came back for flow {flow:x}, more than were taken"))
    }

    /// The way to an actor that peers may reach; `find` knows who is exposed.
    pub fn entrance(&self, name: &str, find: impl FnOnce() -> Option<Arc<dyn Gate>>) -> Option<Arc<Entrance>> {
        let mut entrances = lock(&self.entrances);
        if let Some(entrance) = entrances.get(name) {
            return Some(Arc::clone(entrance));
        }
        // Under the lock, so that what is found is forgotten if it is replaced meanwhile.
        let entrance = Arc::new(Entrance { gate: find()?, flow: self.flow(name) });
        entrances.insert(name.into(), Arc::clone(&entrance));
        Some(entrance)
    }

    /// Somebody else may be exposed by a name that was looked up.
    pub fn forget_entrances(&self) {
        lock(&self.entrances).clear();
    }

    fn flow(&self, name: &str) -> Arc<Flow> {
        let hash = hash_of(name);
        let make =
            || Arc::new(Flow::new(hash, self.limits.window_bytes, self.link.clone(), Arc::clone(&self.counters)));
        Arc::clone(lock(&self.flows).entry(hash).or_insert_with(make))
    }
}

fn range_of(request: u64) -> std::ops::RangeInclusive<Key> {
    Key { request, index: 0 }..=Key { request, index: u16::MAX }
}

/// Messages to one actor keep their order, so they share a lane.
pub(crate) fn lane_of(hash: u64) -> Lane {
    Lane::Messages((hash % 256) as u8)
}
