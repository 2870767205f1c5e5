//! The life of one link: its streams, its heartbeats, its end. The handler hears `up` before any of its tasks exist, and `down` when
//! none is left.

use crate::greeting::{ControlStream, Greeted, NotUp, choice, close, code, readable};
use crate::link::{DownReason, Handler, Lane, Link, Port};
use crate::mesh::{Phase, Shared};
use crate::parting::Parting;
use crate::port::{PortLimits, QuicPort};
use crate::registry::{Claim, Held};
use crate::wire::{CONTROL_COMPLETE, CONTROL_GOODBYE, CONTROL_USE, Control, DATAGRAM_HEARTBEAT, DATAGRAM_USER};
use crate::wire::{FrameCutter, STREAM_BULK, STREAM_MESSAGES, STREAM_ROUNDS};
use bytes::{Buf, Bytes};
use quinn::{Connection, ConnectionError, ReadError, ReadToEndError, RecvStream, SendStream, VarInt, WriteError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

const PRIORITY_ROUNDS: i32 = 15;
const PRIORITY_MESSAGES: i32 = 10;
const PRIORITY_BULK: i32 = 0;
/// Chunks that one read of a lane takes at most; a chunk is about a packet.
const CHUNKS_A_READ: usize = 32;

/// What a link's tasks tell its life.
enum Event {
    LaneEnded,
    BodyArrived,
    Goodbye { bodies: u64 },
    Complete,
    Violation(String),
}

/// What the tasks of a link share.
#[derive(Clone)]
struct Context {
    port: Arc<QuicPort>,
    link: Link,
    handler: Arc<dyn Handler>,
    events: mpsc::Sender<Event>,
    /// Lanes that the peer has opened, a bit each.
    opened: Arc<AtomicU16>,
}

/// A link that has its place, and is about to be up.
pub(crate) struct Session {
    context: Context,
    connection: Connection,
    control: Option<ControlStream>,
    events: mpsc::Receiver<Event>,
    parting: Parting,
    goodbye: Duration,
    held: Held,
    /// Tasks that end when this side leaves: they return the bodies they sent.
    writers: JoinSet<Result<u64, WriteError>>,
    /// Tasks that end with the connection.
    duties: JoinSet<()>,
    bodies_sent: u64,
    /// Passed by a peer that leaves and does not come to an end.
    gives_up: Option<tokio::time::Instant>,
}

/// From a peer that is known to a link that has the peer's place.
pub(crate) async fn enter(shared: &Shared, mut greeted: Greeted) -> Result<Session, NotUp> {
    let chooses = shared.hello.name > greeted.peer.name;
    let chosen = if chooses { None } else { Some(greeted.chosen().await?) };
    let Greeted { connection, peer, offer, .. } = &greeted;
    let limits = PortLimits {
        offer: *offer,
        queue_bytes_max: shared.limits.queue_bytes_max,
        urgent_bytes_max: shared.limits.urgent_bytes_max,
    };
    let port = QuicPort::new(peer.clone(), connection.clone(), limits);
    let claim = Claim { incarnation: peer.incarnation, chosen };
    let held = shared.registry.claim(&port, claim).await.map_err(|why| greeted.not_taken(&why))?;
    if chooses {
        port.outbox(Lane::Control).push_own(CONTROL_USE, choice(shared.next_serial()));
    }
    let Greeted { connection, mut control, .. } = greeted;
    // One more for the kind byte of control frames.
    control.cutter.set_limit(frame_bytes_max(&port) + 1);
    let (sender, events) = mpsc::channel(16);
    let lanes = port.streams().count();
    let link = port.link();
    let context = Context { port, link, handler: shared.handler.clone(), events: sender, opened: Arc::default() };
    Ok(Session {
        context,
        connection,
        control: Some(control),
        events,
        parting: Parting::new(lanes),
        goodbye: shared.timings.goodbye,
        held,
        writers: JoinSet::new(),
        duties: JoinSet::new(),
        bodies_sent: 0,
        gives_up: None,
    })
}

fn frame_bytes_max(port: &QuicPort) -> usize {
    usize::try_from(port.limits().offer.frame_bytes_max).unwrap_or(usize::MAX)
}

impl Session {
    /// The whole life of the link, from `up` to `down`.
    pub async fn run(mut self, heartbeat: Duration, life: watch::Receiver<Phase>) -> DownReason {
        let Context { port, link, handler, .. } = self.context.clone();
        tracing::debug!(peer = %port.peer().name, incarnation = port.peer().incarnation, "link is up");
        port.set_up();
        handler.up(&link);
        self.spawn(heartbeat);
        // Who closes the mesh waits for every `life` to be dropped, and this one only is when the peer was told why.
        let (reason, code) = self.live(life.clone()).await;
        port.end(reason);
        // The first reason stands, and it may have come from elsewhere just before.
        let reason = port.end_reason().cloned().unwrap_or(DownReason::Closed);
        close(&self.connection, code.unwrap_or_else(|| code_of(&reason)), &reason.to_string());
        self.writers.shutdown().await;
        self.duties.shutdown().await;
        tracing::debug!(peer = %port.peer().name, %reason, "link is down");
        handler.down(&link, &reason);
        drop(self.held);
        reason
    }

    fn spawn(&mut self, heartbeat: Duration) {
        let Some(ControlStream { send, receive, cutter }) = self.control.take() else {
            return;
        };
        let (context, connection) = (&self.context, &self.connection);
        let port = context.port.clone();
        self.duties.spawn(async move {
            // What fails here has failed the connection, which ends the link by itself.
            let _ = write_lane(&port, Lane::Control, send).await;
        });
        self.duties.spawn(read_control(context.clone(), receive, cutter));
        self.duties.spawn(exchange_datagrams(context.clone(), connection.clone(), heartbeat));
        let lanes: Vec<Lane> = context.port.streams().map(|(lane, _)| lane).collect();
        for lane in lanes {
            self.writers.spawn(write_stream(context.port.clone(), connection.clone(), lane));
        }
        for _ in 0..context.port.limits().offer.bulk_streams_max {
            self.writers.spawn(write_bodies(context.port.clone(), connection.clone()));
        }
    }

    /// Until the link ends: why, and the code for the peer where the reason does not give it.
    async fn live(&mut self, mut life: watch::Receiver<Phase>) -> (DownReason, Option<VarInt>) {
        let (port, connection) = (self.context.port.clone(), self.connection.clone());
        let closed = connection.closed();
        tokio::pin!(closed);
        let phase = *life.borrow_and_update();
        match phase {
            Phase::Running => {}
            Phase::Leaving => self.leave(DownReason::Closed),
            Phase::Over => return (DownReason::Closed, None),
        }
        loop {
            let gives_up = self.gives_up;
            tokio::select! {
                reason = port.ended() => return (reason, None),
                error = &mut closed => return (self.lost(&error), None),
                Some(event) = self.events.recv() => {
                    if let Some(why) = self.on_event(event) {
                        return (DownReason::Violation(why), None);
                    }
                }
                Ok(stream) = connection.accept_uni() => {
                    self.duties.spawn(read_stream(self.context.clone(), stream));
                }
                Some(ended) = self.writers.join_next() => match ended {
                    Ok(Ok(bodies)) => self.writer_ended(bodies),
                    Ok(Err(WriteError::ConnectionLost(_))) => {}
                    Ok(Err(error)) => return (DownReason::Violation(format!("a stream was not taken: {error}")), None),
                    Err(error) => return (DownReason::Lost(error.to_string()), None),
                },
                Some(ended) = self.duties.join_next() => {
                    if let Err(error) = ended {
                        return (DownReason::Lost(error.to_string()), None);
                    }
                }
                changed = life.changed() => {
                    if changed.is_err() || *life.borrow_and_update() == Phase::Over {
                        return (DownReason::Closed, None);
                    }
                    self.leave(DownReason::Closed);
                }
                () = passed(gives_up) => {
                    let why = format!("goodbye took more than {:?}", self.goodbye);
                    return (DownReason::Lost(why), None);
                }
            }
            if self.parting.answers() {
                port.outbox(Lane::Control).push_own(CONTROL_COMPLETE, Bytes::new());
            }
            if let Some(reason) = self.parting.is_complete() {
                return (reason, Some(code::GOODBYE));
            }
        }
    }

    fn on_event(&mut self, event: Event) -> Option<String> {
        match event {
            Event::LaneEnded => self.parting.lane_ended(),
            Event::BodyArrived => self.parting.body_arrived(),
            Event::Complete => self.parting.was_answered(),
            Event::Violation(why) => return Some(why),
            Event::Goodbye { bodies } => {
                if !self.parting.goodbye(bodies) {
                    return Some("goodbye was said twice".to_owned());
                }
                self.leave(DownReason::Goodbye);
            }
        }
        None
    }

    /// Sends what waits, then says goodbye.
    fn leave(&mut self, reason: DownReason) {
        if reason == DownReason::Goodbye {
            self.gives_up = Some(tokio::time::Instant::now() + self.goodbye);
        }
        if self.parting.leave(reason) {
            self.context.port.leave();
        }
    }

    fn writer_ended(&mut self, bodies: u64) {
        self.bodies_sent += bodies;
        if self.writers.is_empty() && self.parting.is_leaving() {
            let bodies = Bytes::copy_from_slice(&self.bodies_sent.to_le_bytes());
            self.context.port.outbox(Lane::Control).push_own(CONTROL_GOODBYE, bodies);
        }
    }

    fn lost(&self, error: &ConnectionError) -> DownReason {
        match error {
            ConnectionError::ApplicationClosed(closed) => match closed.error_code {
                code::GOODBYE => self.parting.closed_as_complete(),
                code::REPLACED => DownReason::Replaced,
                _ => DownReason::Lost(format!("closed there: {}", readable(&closed.reason))),
            },
            ConnectionError::TimedOut => DownReason::Silent(self.context.port.last_heard()),
            ConnectionError::LocallyClosed => DownReason::Closed,
            other => DownReason::Lost(other.to_string()),
        }
    }
}

async fn passed(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn code_of(reason: &DownReason) -> VarInt {
    match reason {
        DownReason::Replaced => code::REPLACED,
        DownReason::Violation(_) => code::VIOLATION,
        DownReason::Goodbye | DownReason::Closed | DownReason::Silent(_) | DownReason::Lost(_) => code::CLOSED,
    }
}

// -- sending

/// Writes a lane's frames until its queue ends; in batches, so that a queue of small frames is a few writes.
async fn write_lane(port: &QuicPort, lane: Lane, mut stream: SendStream) -> Result<(), WriteError> {
    let mut batch = Vec::new();
    while port.outbox(lane).take(&mut batch).await {
        let mut left = &mut batch[..];
        while !left.is_empty() {
            let written = stream.write_chunks(left).await?;
            port.sent(lane, written.bytes);
            left = &mut left[written.chunks..];
        }
        batch.clear();
    }
    // Only a stream that was reset cannot be finished, and nobody resets it.
    let _ = stream.finish();
    Ok(())
}

async fn open(connection: &Connection, priority: i32, kind: u8) -> Result<SendStream, WriteError> {
    let mut stream = connection.open_uni().await?;
    let _ = stream.set_priority(priority);
    stream.write_all(&[kind]).await?;
    Ok(stream)
}

async fn write_stream(port: Arc<QuicPort>, connection: Connection, lane: Lane) -> Result<u64, WriteError> {
    let (priority, kind) = match lane {
        Lane::Messages(index) => (PRIORITY_MESSAGES, STREAM_MESSAGES + index),
        Lane::Control | Lane::Rounds => (PRIORITY_ROUNDS, STREAM_ROUNDS),
    };
    let stream = open(&connection, priority, kind).await?;
    write_lane(&port, lane, stream).await?;
    Ok(0)
}

/// Sends one body after another; returns how many.
async fn write_bodies(port: Arc<QuicPort>, connection: Connection) -> Result<u64, WriteError> {
    let mut bodies = 0;
    while let Some(body) = port.next_body().await {
        let mut stream = open(&connection, PRIORITY_BULK, STREAM_BULK).await?;
        let (mut left, overhead) = ([body], crate::wire::HEADER_BYTES);
        while !left[0].is_empty() {
            let written = stream.write_chunks(&mut left).await?;
            port.body_sent(written.bytes);
            if written.chunks > 0 {
                break;
            }
        }
        port.body_sent(overhead);
        let _ = stream.finish();
        bodies += 1;
    }
    Ok(bodies)
}

// -- receiving

impl Context {
    async fn tell(&self, event: Event) {
        // Who would hear it is gone when the link has ended.
        let _ = self.events.send(event).await;
    }

    async fn violation(&self, why: impl ToString) {
        self.tell(Event::Violation(why.to_string())).await;
    }

    /// A failed read is the connection's end, which is seen elsewhere, or the peer broke a stream off.
    async fn read_failed(&self, what: &str, error: &ReadError) {
        if !matches!(error, ReadError::ConnectionLost(_)) {
            self.violation(format!("{what} was broken off: {error}")).await;
        }
    }
}

async fn read_control(context: Context, mut receive: RecvStream, mut cutter: FrameCutter) {
    loop {
        loop {
            let decoded = cutter.cut().and_then(|frame| frame.map(Control::decode).transpose());
            match decoded {
                Ok(None) => break,
                Ok(Some(Control::Frame(frame))) => context.handler.frame(&context.link, Lane::Control, frame),
                Ok(Some(Control::Goodbye { bodies })) => context.tell(Event::Goodbye { bodies }).await,
                Ok(Some(Control::Complete)) => context.tell(Event::Complete).await,
                Ok(Some(other @ (Control::Hello(_) | Control::Use { .. }))) => {
                    return context.violation(format!("a {} on a link that is up", other.name())).await;
                }
                Err(error) => return context.violation(error).await,
            }
        }
        match receive.read_chunk(usize::MAX, true).await {
            Ok(Some(chunk)) => cutter.push(chunk.bytes),
            Ok(None) => return context.violation("the control stream ended").await,
            Err(error) => return context.read_failed("the control stream", &error).await,
        }
        context.port.heard();
    }
}

/// A stream of the peer: its first byte says of what.
async fn read_stream(context: Context, mut stream: RecvStream) {
    let mut kind = [0];
    if let Err(error) = stream.read_exact(&mut kind).await {
        return match error {
            quinn::ReadExactError::FinishedEarly(_) => context.violation("a stream was empty").await,
            quinn::ReadExactError::ReadError(error) => context.read_failed("a stream", &error).await,
        };
    }
    let lanes = context.port.limits().offer.lanes;
    let lane = match kind[0] {
        STREAM_BULK => return read_body(context, stream).await,
        STREAM_ROUNDS => Lane::Rounds,
        other => match other.checked_sub(STREAM_MESSAGES).filter(|index| *index < lanes) {
            Some(index) => Lane::Messages(index),
            None => return context.violation(format!("stream of kind {other} is not known")).await,
        },
    };
    let bit = match lane {
        Lane::Control | Lane::Rounds => 1,
        Lane::Messages(index) => 2 << index,
    };
    if context.opened.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return context.violation(format!("{lane:?} was opened twice")).await;
    }
    read_lane(context, lane, stream).await;
}

async fn read_lane(context: Context, lane: Lane, mut stream: RecvStream) {
    let mut cutter = FrameCutter::new(frame_bytes_max(&context.port));
    let mut chunks = [const { Bytes::new() }; CHUNKS_A_READ];
    loop {
        let read = match stream.read_chunks(&mut chunks).await {
            Ok(Some(read)) => read,
            Ok(None) if cutter.held_bytes() == 0 => return context.tell(Event::LaneEnded).await,
            Ok(None) => return context.violation(format!("{lane:?} ended within a frame")).await,
            Err(error) => return context.read_failed(&format!("{lane:?}"), &error).await,
        };
        context.port.heard();
        for chunk in &mut chunks[..read] {
            cutter.push(std::mem::take(chunk));
            loop {
                match cutter.cut() {
                    Ok(Some(frame)) => context.handler.frame(&context.link, lane, frame),
                    Ok(None) => break,
                    Err(error) => return context.violation(format!("{lane:?}: {error}")).await,
                }
            }
        }
    }
}

async fn read_body(context: Context, mut stream: RecvStream) {
    let limit = usize::try_from(context.port.limits().offer.bulk_bytes_max).unwrap_or(usize::MAX);
    match stream.read_to_end(limit).await {
        Ok(body) => {
            context.port.heard();
            context.handler.bulk(&context.link, Bytes::from(body));
            context.tell(Event::BodyArrived).await;
        }
        Err(ReadToEndError::TooLong) => context.violation(format!("a body has more than {limit} bytes")).await,
        Err(ReadToEndError::Read(error)) => context.read_failed("a body", &error).await,
    }
}

/// Heartbeats out, and datagrams in: a heartbeat that comes only says that the peer lives.
async fn exchange_datagrams(context: Context, connection: Connection, heartbeat: Duration) {
    let mut beats = tokio::time::interval(heartbeat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beats.tick() => {
                // A beat that is lost is a beat that is lost; the peer's limit is far above one byte.
                let _ = connection.send_datagram(Bytes::from_static(&[DATAGRAM_HEARTBEAT]));
            }
            received = connection.read_datagram() => {
                let Ok(mut datagram) = received else {
                    return;
                };
                context.port.heard();
                match datagram.first() {
                    Some(&DATAGRAM_HEARTBEAT) => {}
                    Some(&DATAGRAM_USER) => {
                        datagram.advance(1);
                        context.handler.datagram(&context.link, datagram);
                    }
                    other => {
                        let kind = other.copied();
                        return context.violation(format!("datagram of kind {kind:?} is not known")).await;
                    }
                }
            }
        }
    }
}
