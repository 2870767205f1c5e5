//! What passed over the links to one peer, over all their lives.

use starling_transport::NodeName;
use std::sync::atomic::{AtomicU64, Ordering};

/// What passed over the links to one peer since this node first saw it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LinkStats {
    pub peer: NodeName,
    pub is_up: bool,
    /// Links that were up so far.
    pub links: u64,
    pub frames_in: u64,
    pub bytes_in: u64,
    pub frames_out: u64,
    pub bytes_out: u64,
    /// Credit of the peer's messages that wait in mailboxes here.
    pub held_bytes: u64,
    /// Questions and streams of this node that wait for the peer.
    pub open_asks: usize,
    /// Those of the peer that wait for this node.
    pub open_asks_of_peer: usize,
    pub dropped: Dropped,
}

/// Messages that came from a peer and reached no mailbox, and answers that nobody waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Dropped {
    pub not_exposed: u64,
    pub unknown_type: u64,
    pub not_running: u64,
    pub mailbox_full: u64,
    pub undecodable: u64,
    pub deadline_exceeded: u64,
    pub unwanted_answers: u64,
}

impl Dropped {
    /// All together.
    pub fn total(&self) -> u64 {
        self.not_exposed
            + self.unknown_type
            + self.not_running
            + self.mailbox_full
            + self.undecodable
            + self.deadline_exceeded
            + self.unwanted_answers
    }
}

#[derive(Default)]
pub(crate) struct Counters {
    pub links: AtomicU64,
    frames_in: AtomicU64,
    bytes_in: AtomicU64,
    frames_out: AtomicU64,
    bytes_out: AtomicU64,
    pub held_bytes: AtomicU64,
    pub not_exposed: AtomicU64,
    pub unknown_type: AtomicU64,
    pub not_running: AtomicU64,
    pub mailbox_full: AtomicU64,
    pub undecodable: AtomicU64,
    pub deadline_exceeded: AtomicU64,
    pub unwanted_answers: AtomicU64,
}

/// Counters are independent of each other, so the order in which they are seen does not matter.
const ORDER: Ordering = Ordering::Relaxed;

impl Counters {
    pub fn sent(&self, bytes: usize) {
        self.frames_out.fetch_add(1, ORDER);
        self.bytes_out.fetch_add(bytes as u64, ORDER);
    }

    pub fn received(&self, bytes: usize) {
        self.frames_in.fetch_add(1, ORDER);
        self.bytes_in.fetch_add(bytes as u64, ORDER);
    }

    /// `open` are the questions of this node and of the peer, when the link is up.
    pub fn read(&self, peer: NodeName, open: Option<(usize, usize)>) -> LinkStats {
        let (open_asks, open_asks_of_peer) = open.unwrap_or_default();
        LinkStats {
            peer,
            is_up: open.is_some(),
            links: self.links.load(ORDER),
            frames_in: self.frames_in.load(ORDER),
            bytes_in: self.bytes_in.load(ORDER),
            frames_out: self.frames_out.load(ORDER),
            bytes_out: self.bytes_out.load(ORDER),
            held_bytes: self.held_bytes.load(ORDER),
            open_asks,
            open_asks_of_peer,
            dropped: Dropped {
                not_exposed: self.not_exposed.load(ORDER),
                unknown_type: self.unknown_type.load(ORDER),
                not_running: self.not_running.load(ORDER),
                mailbox_full: self.mailbox_full.load(ORDER),
                undecodable: self.undecodable.load(ORDER),
                deadline_exceeded: self.deadline_exceeded.load(ORDER),
                unwanted_answers: self.unwanted_answers.load(ORDER),
            },
        }
    }
}
