//! The sender's side of a remote address.

use super::asked::Pauses;
use super::flow::{Window, cost};
use super::passage::{Pending, outward};
use super::session::{LANE_BYTES_MAX, PostError, Session, Way, lane_of};
use super::wire::{NAME_BYTES_MAX, Tell, framed};
use super::{Encode, Remote, hash_of, type_hash};
use crate::trace::TraceContext;
use crate::{Carrier, Limit, SendError};
use arc_swap::ArcSwapOption;
use bytes::Bytes;
use serde::Serialize;
use starling_transport::codec;
use starling_transport::{Lane, LinkError, NodeName};
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct RemoteTarget<M> {
    remote: Arc<Remote>,
    node: NodeName,
    name: Arc<str>,
    /// `name@node`, for errors.
    label: Arc<str>,
    flow: u64,
    type_hash: u64,
    carrier: Carrier,
    encode: Encode<M>,
    /// The way of the last send; looked for again when its link has ended.
    route: ArcSwapOption<Route>,
}

struct Route {
    session: Arc<Session>,
    window: Arc<Window>,
}

/// A message that is on its way.
pub(crate) struct Posted {
    session: Arc<Session>,
    request: u64,
}

impl Posted {
    /// Nobody waits for the answer any more.
    pub fn withdraw(&self) {
        self.session.withdraw(self.request);
    }
}

/// What a message holds before it is sent. Dropped before that, it gives all back.
struct Underway<'a> {
    route: &'a Route,
    cost: u32,
    request: u64,
}

impl Underway<'_> {
    fn sent(self) {
        std::mem::forget(self);
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        // What was not sent costs nothing, and nobody answers it.
        self.route.window.give_back(self.cost);
        self.route.session.forget(self.request);
    }
}

/// A message that is ready to be sent.
struct Letter {
    frame: Bytes,
    way: Way,
    request: u64,
    pending: Vec<Pending>,
}

impl<M: Serialize> RemoteTarget<M> {
    pub fn new(remote: Arc<Remote>, node: NodeName, name: Arc<str>, schema: u32) -> Self {
        Self {
            label: format!("{name}@{node}").into(),
            flow: hash_of(&name),
            type_hash: type_hash::<M>(schema),
            carrier: Carrier::Messages,
            encode: codec::encode_onto::<M>,
            route: ArcSwapOption::empty(),
            remote,
            node,
            name,
        }
    }
}

impl<M> RemoteTarget<M> {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub fn over(&self, carrier: Carrier) -> Self {
        Self {
            remote: Arc::clone(&self.remote),
            node: self.node.clone(),
            name: Arc::clone(&self.name),
            label: Arc::clone(&self.label),
            flow: self.flow,
            type_hash: self.type_hash,
            carrier,
            encode: self.encode,
            route: ArcSwapOption::empty(),
        }
    }

    pub fn is_linked(&self) -> bool {
        self.route().is_ok_and(|route| route.session.is_usable())
    }

    /// Sends now or says why not.
    pub fn post(&self, trace: TraceContext, message: &M, deadline: Option<Duration>) -> Result<Posted, SendError> {
        let route = self.route()?;
        let letter = self.write(trace, message, deadline)?;
        let cost = self.cost(&route, &letter);
        match cost.map(|cost| route.window.try_take(cost)).transpose() {
            Ok(None | Some(true)) => {}
            Ok(Some(false)) => return Err(self.full(Limit::CreditBytes(route.window.bytes()))),
            Err(_) => return Err(self.not_connected()),
        }
        let Letter { frame, way, request, pending } = letter;
        let mut underway = Underway { route: &route, cost: cost.unwrap_or(0), request: 0 };
        Session::await_answers(&route.session, request, pending).map_err(|error| self.refused(error))?;
        underway.request = request;
        route.session.send(way, frame).map_err(|error| self.refused(error.into()))?;
        underway.sent();
        Ok(Posted { session: Arc::clone(&route.session), request })
    }

    /// Waits for credit and for room in the link's queue.
    pub async fn post_patiently(&self, trace: TraceContext, message: M) -> Result<(), SendError> {
        let route = self.route()?;
        let letter = self.write(trace, &message, None)?;
        drop(message);
        let mut underway = Underway { route: &route, cost: 0, request: 0 };
        if let Some(cost) = self.cost(&route, &letter) {
            route.window.take(cost).await.map_err(|_| self.not_connected())?;
            underway.cost = cost;
        }
        let Letter { frame, way, request, pending } = letter;
        Session::await_answers(&route.session, request, pending).map_err(|error| self.refused(error))?;
        underway.request = request;
        let mut pauses = Pauses::default();
        while let Err(error) = route.session.send(way, frame.clone()) {
            match error {
                LinkError::Full { .. } => pauses.pause().await,
                error => return Err(self.refused(error.into())),
            }
        }
        underway.sent();
        Ok(())
    }

    fn cost(&self, route: &Route, letter: &Letter) -> Option<u32> {
        (self.carrier == Carrier::Messages).then(|| cost(letter.frame.len(), route.window.bytes()))
    }

    fn write(&self, trace: TraceContext, message: &M, deadline: Option<Duration>) -> Result<Letter, SendError> {
        if self.name.len() > NAME_BYTES_MAX {
            return Err(self.unencodable(format!("its name has {} bytes (limit {NAME_BYTES_MAX})", self.name.len())));
        }
        // Rounded up: a deadline of less than a millisecond is not over yet.
        let left_ms = deadline.map(|left| u32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX));
        let (name, type_hash) = (&*self.name, self.type_hash);
        let head = Tell { name, type_hash, request: 0, replies: 0, left_ms, trace, body: &[] };
        let (mut request, mut pending, mut body_bytes) = (0, Vec::new(), 0);
        let frame = framed(|frame| {
            head.encode_head(frame);
            let head_bytes = frame.len();
            let (encoded, left) = outward(|| (self.encode)(message, frame));
            encoded.map_err(|error| self.unencodable(error.to_string()))?;
            (pending, body_bytes) = (left, frame.len() - head_bytes);
            if !pending.is_empty() {
                let replies = u16::try_from(pending.len());
                let replies = replies.map_err(|_| self.unencodable("too many replies".to_owned()))?;
                request = self.remote.next_request();
                Tell::set_replies(frame, request, replies);
            }
            Ok(())
        })?;
        let way = match self.carrier {
            Carrier::Rounds => Way::Lane(Lane::Rounds),
            Carrier::Messages if body_bytes > LANE_BYTES_MAX => Way::Bulk,
            Carrier::Messages => Way::Lane(lane_of(self.flow)),
        };
        Ok(Letter { frame, way, request, pending })
    }

    fn route(&self) -> Result<Arc<Route>, SendError> {
        if let Some(route) = self.route.load().as_ref().filter(|route| route.session.is_ready()) {
            return Ok(Arc::clone(route));
        }
        let session = self.remote.session(&self.node).ok_or_else(|| self.not_connected())?;
        let window = session.window(self.flow).map_err(|_| self.not_connected())?;
        let route = Arc::new(Route { session, window });
        self.route.store(Some(Arc::clone(&route)));
        Ok(route)
    }

    fn not_connected(&self) -> SendError {
        SendError::NotConnected { name: Arc::clone(&self.label), node: self.node.clone() }
    }

    fn full(&self, limit: Limit) -> SendError {
        SendError::Full { name: Arc::clone(&self.label), limit }
    }

    fn unencodable(&self, reason: String) -> SendError {
        SendError::Unencodable { name: Arc::clone(&self.label), reason }
    }

    fn refused(&self, error: PostError) -> SendError {
        match error {
            PostError::Down => self.not_connected(),
            PostError::TooLarge { bytes, limit } => SendError::TooLarge { name: Arc::clone(&self.label), bytes, limit },
            PostError::QueueFull { limit } => self.full(Limit::QueueBytes(limit)),
            PostError::TooManyAsks { limit } => self.full(Limit::OpenAsks(limit)),
        }
    }
}
