//! What a node lets its peers reach: one actor by its name and type.

use super::flow::Permit;
use super::passage::{Fate, inward};
use super::session::Session;
use super::wire::{Failure, Key, Tell};
use super::{decode_body, type_hash};
use crate::address::{Envelope, Limited, Slot};
use crate::{Limit, SendError};
use serde::de::DeserializeOwned;
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
}

impl<M: Send + 'static> Exposed<M> {
    pub fn new(slot: Arc<Slot<M>>, schema: u32) -> Self {
        Self { slot, type_hash: type_hash::<M>(schema) }
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
        let fate = Arc::new(Fate::default());
        let replies = (tell.request, tell.replies);
        let (decoded, found) = inward(session, replies, &fate, || decode_body::<M>(tell.body));
        let message = decoded.map_err(|error| {
            tracing::debug!(peer = %session.link.peer().name, actor = tell.name, %error, "message dropped");
            Failure::Undecodable
        })?;
        let envelope = Envelope::Tell { trace: tell.trace, message, permit };
        let holds_replies = tell.replies > 0;
        let delivered = self.slot.deliver(envelope, Limited::Yes, |mailbox| {
            if holds_replies {
                fate.set(Some(Arc::clone(mailbox) as _));
            }
        });
        if let Err(refused) = delivered {
            // Before the message is dropped with the replies in it.
            fate.set(None);
            return Err(match refused.error {
                SendError::Full { limit: Limit::MailboxMessages(limit), .. } => Failure::MailboxFull { limit },
                _ => Failure::NotRunning,
            });
        }
        for (index, _) in found.iter().enumerate().filter(|(_, found)| !**found) {
            let index = u16::try_from(index).expect("a message has at most REPLIES_MAX replies");
            session.send_failure(Key { request: tell.request, index }, 0, Failure::Dropped);
        }
        Ok(())
    }
}
