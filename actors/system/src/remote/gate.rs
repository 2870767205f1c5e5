//! What a node lets its peers reach: one actor by its name and type.

use super::flow::Permit;
use super::passage::{Fate, Replies, inward};
use super::session::{Session, lane_of};
use super::wire::{Failure, Key, Tell};
use super::{decode_body, hash_of, type_hash};
use crate::address::{Envelope, Limited, Slot};
use crate::{Limit, SendError};
use serde::de::DeserializeOwned;
use starling_transport::Lane;
use starling_transport::codec::CodecError;
use std::sync::Arc;

/// An exposed actor, whatever it takes.
pub(crate) trait Gate: Send + Sync {
    /// # Errors
    /// Why the message reached no mailbox. Then all its replies are still to be refused.
    fn take(&self, session: &Arc<Session>, tell: &Tell<'_>, permit: Option<Permit>) -> Result<(), Failure>;
}

pub(crate) struct Exposed<M: Send + 'static> {
    slot: Arc<Slot<M>>,
    type_hash: u64,
    lane: Lane,
}

impl<M: Send + 'static> Exposed<M> {
    pub fn new(slot: Arc<Slot<M>>, schema: u32) -> Self {
        let lane = lane_of(hash_of(slot.name()));
        Self { slot, type_hash: type_hash::<M>(schema), lane }
    }
}

impl<M: DeserializeOwned + Send + 'static> Gate for Exposed<M> {
    fn take(&self, session: &Arc<Session>, tell: &Tell<'_>, permit: Option<Permit>) -> Result<(), Failure> {
        if tell.type_hash != self.type_hash {
            return Err(Failure::UnknownType);
        }
        if tell.left_ms == Some(0) {
            return Err(Failure::DeadlineExceeded);
        }
        let undecodable = |error: CodecError| {
            tracing::debug!(peer = %session.link.peer().name, actor = tell.name, %error, "message dropped");
            Failure::Undecodable
        };
        if tell.replies == 0 {
            let message = decode_body::<M>(tell.body).map_err(undecodable)?;
            let envelope = Envelope::Tell { trace: tell.trace, message, permit };
            return self.slot.deliver(envelope, Limited::Yes, |_| ()).map_err(|refused| why(&refused.error));
        }
        let fate = Arc::new(Fate::default());
        let replies = Replies { request: tell.request, count: tell.replies, lane: self.lane };
        let (decoded, found) = inward(session, replies, &fate, || decode_body::<M>(tell.body));
        let envelope = Envelope::Tell { trace: tell.trace, message: decoded.map_err(undecodable)?, permit };
        let delivered = self.slot.deliver(envelope, Limited::Yes, |mailbox| fate.set(Some(Arc::clone(mailbox) as _)));
        if let Err(refused) = delivered {
            // Before the message is dropped with the replies in it.
            fate.set(None);
            return Err(why(&refused.error));
        }
        for (index, _) in found.iter().enumerate().filter(|(_, found)| !**found) {
            let index = u16::try_from(index).expect("a message has at most REPLIES_MAX replies");
            session.send_failure(Key { request: tell.request, index }, 0, Failure::Dropped);
        }
        Ok(())
    }
}

fn why(error: &SendError) -> Failure {
    match error {
        SendError::Full { limit: Limit::MailboxMessages(limit), .. } => Failure::MailboxFull { limit: *limit },
        _ => Failure::NotRunning,
    }
}
