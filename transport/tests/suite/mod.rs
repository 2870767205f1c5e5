//! What every transport has to keep, written once: a node that records what it is told, and the rules as functions over any fabric.

// Each test program uses its part of this.
#![allow(dead_code)]

pub mod rules;

use bytes::Bytes;
use starling_transport::{DownReason, Handler, Lane, Link, NodeName, Peer};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// For what comes at once unless something is broken. Machines of tests are slow at times.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

/// What every node of a rule's cluster allows; small, so that limits are reached soon.
#[derive(Clone, Debug)]
pub struct Allowed {
    pub lanes: u8,
    pub frame_bytes_max: usize,
    pub bulk_bytes_max: usize,
    pub queue_bytes_max: usize,
    pub urgent_bytes_max: usize,
}

impl Default for Allowed {
    fn default() -> Self {
        Self {
            lanes: 2,
            frame_bytes_max: 1 << 20,
            bulk_bytes_max: 8 << 20,
            queue_bytes_max: 32 << 20,
            urgent_bytes_max: 32 << 20,
        }
    }
}

/// A transport under test: makes nodes of one cluster that can reach each other.
pub trait Fabric: Send + Sync + 'static {
    type Node: FabricNode;

    fn node(&self, name: &str, incarnation: u64, allowed: &Allowed) -> impl Future<Output = Self::Node> + Send;
}

/// One life of a node.
pub trait FabricNode: Send + Sync + Sized + 'static {
    fn record(&self) -> &Arc<Record>;
    /// Keeps a link to the other.
    fn connect(&self, other: &Self);
    fn links(&self) -> Vec<Link>;
    fn close(&self, deadline: Duration) -> impl Future<Output = ()> + Send;
    /// Ends without a word, as a process that is killed does.
    fn crash(self);
}

#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Up(Peer),
    Down(Peer, DownReason),
    Frame(Peer, Lane, Bytes),
    Bulk(Peer, Bytes),
    Datagram(Peer, Bytes),
    Refused(String, String),
}

/// Keeps what a handler is told, in order, and the links it was given.
#[derive(Default)]
pub struct Record {
    told: Mutex<(Vec<Told>, Vec<Link>)>,
    changed: Notify,
}

impl Record {
    fn tell(&self, told: Told, link: Option<&Link>) {
        let mut record = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        record.0.push(told);
        record.1.extend(link.cloned());
        drop(record);
        self.changed.notify_waiters();
    }

    pub fn told(&self) -> Vec<Told> {
        self.told.lock().unwrap().0.clone()
    }

    /// Waits until the record, looked at as a whole, gives something.
    pub async fn until<T>(&self, what: &str, mut look: impl FnMut(&[Told]) -> Option<T>) -> T {
        let waits = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if let Some(found) = look(&self.told.lock().unwrap().0) {
                    return found;
                }
                changed.await;
            }
        };
        match tokio::time::timeout(LIMIT, waits).await {
            Ok(found) => found,
            Err(_) => panic!("waited for {what}; told {:?}", brief(&self.told())),
        }
    }

    /// Waits for the `count`th link to a peer.
    pub async fn link(&self, peer: &str, count: usize) -> Link {
        let is_it = |told: &&Told| matches!(told, Told::Up(up) if up.name.as_str() == peer);
        self.until(&format!("link {count} to {peer}"), |told| {
            (told.iter().filter(is_it).count() >= count).then_some(())
        })
        .await;
        let links = self.told.lock().unwrap().1.clone();
        links.into_iter().filter(|link| link.peer().name.as_str() == peer).nth(count - 1).unwrap()
    }

    /// Waits for the `count`th end of a link to a peer.
    pub async fn down(&self, peer: &str, count: usize) -> DownReason {
        let reason = |told: &Told| match told {
            Told::Down(down, reason) if down.name.as_str() == peer => Some(reason.clone()),
            _ => None,
        };
        self.until(&format!("end {count} of {peer}"), |told| told.iter().filter_map(reason).nth(count - 1)).await
    }

    /// Waits for so many frames of a lane.
    pub async fn frames(&self, lane: Lane, count: usize) -> Vec<Bytes> {
        let frame = |told: &Told| match told {
            Told::Frame(_, on, frame) if *on == lane => Some(frame.clone()),
            _ => None,
        };
        let enough = |told: &[Told]| {
            let frames: Vec<Bytes> = told.iter().filter_map(frame).collect();
            (frames.len() >= count).then_some(frames)
        };
        self.until(&format!("{count} frames on {lane:?}"), enough).await
    }

    pub async fn bodies(&self, count: usize) -> Vec<Bytes> {
        let body = |told: &Told| match told {
            Told::Bulk(_, body) => Some(body.clone()),
            _ => None,
        };
        let enough = |told: &[Told]| {
            let bodies: Vec<Bytes> = told.iter().filter_map(body).collect();
            (bodies.len() >= count).then_some(bodies)
        };
        self.until(&format!("{count} bodies"), enough).await
    }

    pub async fn refusal(&self) -> (String, String) {
        let refused = |told: &Told| match told {
            Told::Refused(peer, why) => Some((peer.clone(), why.clone())),
            _ => None,
        };
        self.until("a refusal", |told| told.iter().find_map(refused)).await
    }

    /// The order that every handler is promised: up first, down last, each once, one link to a name at a time.
    pub fn check(&self) {
        let mut up: Vec<Peer> = Vec::new();
        for told in self.told() {
            match told {
                Told::Up(peer) => {
                    assert!(up.iter().all(|other| other.name != peer.name), "{peer:?} is up twice");
                    up.push(peer);
                }
                Told::Down(peer, reason) => {
                    let at = up.iter().position(|other| *other == peer);
                    up.remove(at.unwrap_or_else(|| panic!("{peer:?} is down ({reason}) and was not up")));
                }
                Told::Frame(peer, ..) | Told::Bulk(peer, ..) | Told::Datagram(peer, ..) => {
                    assert!(up.contains(&peer), "something came from {peer:?}, which is not up");
                }
                Told::Refused(..) => {}
            }
        }
    }
}

/// Without the bytes, for a person who reads why a test failed.
fn brief(told: &[Told]) -> Vec<String> {
    let one = |told: &Told| match told {
        Told::Frame(peer, lane, frame) => format!("frame {}: {lane:?} {} bytes", peer.name, frame.len()),
        Told::Bulk(peer, body) => format!("bulk {}: {} bytes", peer.name, body.len()),
        other => format!("{other:?}"),
    };
    told.iter().rev().take(40).rev().map(one).collect()
}

impl Handler for Record {
    fn up(&self, link: &Link) {
        self.tell(Told::Up(link.peer().clone()), Some(link));
    }

    fn down(&self, link: &Link, reason: &DownReason) {
        self.tell(Told::Down(link.peer().clone(), reason.clone()), None);
    }

    fn frame(&self, link: &Link, lane: Lane, frame: Bytes) {
        self.tell(Told::Frame(link.peer().clone(), lane, frame), None);
    }

    fn bulk(&self, link: &Link, body: Bytes) {
        self.tell(Told::Bulk(link.peer().clone(), body), None);
    }

    fn datagram(&self, link: &Link, datagram: Bytes) {
        self.tell(Told::Datagram(link.peer().clone(), datagram), None);
    }

    fn refused(&self, peer: &str, why: &str) {
        self.tell(Told::Refused(peer.to_owned(), why.to_owned()), None);
    }
}

/// Two nodes with a link.
pub struct Pair<N> {
    pub a: N,
    pub b: N,
    pub to_b: Link,
    pub to_a: Link,
}

pub async fn pair<F: Fabric>(fabric: &F, allowed: &Allowed) -> Pair<F::Node> {
    let (a, b) = (fabric.node("a", 1, allowed).await, fabric.node("b", 1, allowed).await);
    a.connect(&b);
    let (to_b, to_a) = (a.record().link("b", 1).await, b.record().link("a", 1).await);
    Pair { a, b, to_b, to_a }
}
