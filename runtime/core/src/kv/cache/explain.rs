//! Why tokens of a prompt were not reused.
//!
//! A block that was evicted looks like one that never was: the keys of the last ones that went are remembered, and forgotten
//! with their conversation.

use super::Manager;
use super::lifecycle::Retention;
use super::store::{Path, Store};
use super::tree::NodeId;
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Evicted blocks that are remembered.
const GONE_MAX: usize = 4096;
/// Other scopes that are asked for a prompt's beginning.
const SCOPES_MAX: usize = 64;

/// Why tokens were not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// Nobody in the scope has computed such a block after these tokens, as far as is known.
    ContentDiffers,
    /// The block was known until a page of that life cycle was evicted.
    Evicted { life_cycle: u8 },
    /// The block is known, but that life cycle's window is not there where it would be resumed.
    WindowMissing { life_cycle: u8 },
    /// All pages are there, but no snapshot of the recurrent layers.
    NoSnapshot,
    /// Another scope knows these tokens.
    OtherScope,
    /// A prompt's last token is always computed.
    LastToken,
    /// Left for the look-ahead of speculation.
    Backoff,
    /// All was there, but not the room for the copy that using it takes.
    NoRoom,
}

impl Why {
    /// Short and stable, for people and their tools.
    pub fn label(self) -> &'static str {
        match self {
            Self::ContentDiffers => "content_differs",
            Self::Evicted { .. } => "evicted",
            Self::WindowMissing { .. } => "window_missing",
            Self::NoSnapshot => "no_snapshot",
            Self::OtherScope => "other_scope",
            Self::LastToken => "last_token",
            Self::Backoff => "backoff",
            Self::NoRoom => "no_room",
        }
    }

    /// Whose pages were missing.
    pub fn life_cycle(self) -> Option<u8> {
        match self {
            Self::Evicted { life_cycle } | Self::WindowMissing { life_cycle } => Some(life_cycle),
            _ => None,
        }
    }
}

/// Tokens `from..to` of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missed {
    pub from: u32,
    pub to: u32,
    pub why: Why,
}

/// A block that was evicted.
#[derive(Clone, Copy, Debug)]
struct Trace {
    life_cycle: u8,
    /// The only conversation that had used it.
    conversation: Option<ConversationKey>,
    serial: u64,
}

/// The last blocks that were evicted.
#[derive(Clone, Debug, Default)]
pub(super) struct Gone {
    traces: BTreeMap<u64, Trace>,
    order: VecDeque<(u64, u64)>,
    serials: u64,
}

impl Gone {
    fn add(&mut self, key: u64, life_cycle: u8, conversation: Option<ConversationKey>) {
        self.serials += 1;
        self.traces.insert(key, Trace { life_cycle, conversation, serial: self.serials });
        self.order.push_back((key, self.serials));
        if self.order.len() > GONE_MAX
            && let Some((key, serial)) = self.order.pop_front()
            && self.traces.get(&key).is_some_and(|trace| trace.serial == serial)
        {
            self.traces.remove(&key);
        }
    }

    pub fn forget(&mut self, conversation: ConversationKey) {
        self.traces.retain(|_, trace| trace.conversation != Some(conversation));
    }
}

impl Store {
    /// The block is about to go because that life cycle's page went.
    pub fn remember(&mut self, node: NodeId, life_cycle: u8) {
        let conversation = self.tree.owner(node).map(|owner| self.owners.conversation(owner));
        self.gone.add(self.tree.key(node).truncated(), life_cycle, conversation);
    }

    /// Why the path's tokens up to `matched` were not reused.
    fn missed_on_path(&self, path: &Path, matched: u32) -> Why {
        let gap = (0u8..)
            .zip(&self.config.life_cycles)
            .find(|(index, one)| one.is_required() && !one.is_state() && !self.is_complete(path, *index, matched));
        match gap {
            Some((life_cycle, one)) if one.retention != Retention::Full => Why::WindowMissing { life_cycle },
            Some((life_cycle, _)) => Why::Evicted { life_cycle },
            None => Why::NoSnapshot,
        }
    }

    /// How many tokens after the path's full blocks were known until they were evicted, and which life cycle's pages went.
    fn evicted_after(&self, scope: &Scope, path: &Path, tokens: &[TokenId]) -> (u32, u8) {
        let block_tokens = self.block_tokens() as usize;
        let full = path.tokens as usize / block_tokens;
        let last = full.checked_sub(1).and_then(|last| path.nodes.get(last)).copied();
        let mut key = last.map_or_else(|| scope.root(), |last| self.tree.key(last));
        let (mut known, mut life_cycle) = (0, 0);
        for block in tokens[full * block_tokens..].chunks(block_tokens) {
            key = key.child(block);
            let Some(trace) = self.gone.traces.get(&key.truncated()) else { break };
            if known == 0 {
                life_cycle = trace.life_cycle;
            }
            known += block.len() as u32;
        }
        ((full * block_tokens) as u32 + known, life_cycle)
    }

    /// How many tokens another scope knows, if that is a block at least.
    fn known_elsewhere(&self, scope: &Scope, tokens: &[TokenId]) -> u32 {
        let others = self.tree.scopes().filter(|other| *other != scope).take(SCOPES_MAX);
        let known = others.map(|other| self.matched(other, tokens, &[]).tokens).max().unwrap_or(0);
        if known < self.block_tokens() { 0 } else { known }
    }
}

impl Manager {
    /// Why the tokens of a prompt from `reused` on are computed: ranges without gaps, to the prompt's end. `tokens` is the whole
    /// prompt; a sequence is opened with all but the last one.
    ///
    /// # Cost
    /// A look-up of the prompt, also in other scopes where its beginning is not known.
    pub fn explain(&self, scope: &Scope, tokens: &[TokenId], reused: u32) -> Vec<Missed> {
        let Some((_, body)) = tokens.split_last() else { return Vec::new() };
        let (length, store) = (body.len() as u32, &self.store);
        let path = store.matched(scope, body, &[]);
        let matched = path.tokens.saturating_sub(store.config.match_backoff_tokens);
        let with_snapshots = store.reusable_before_states(&path, store.config.match_backoff_tokens);
        let mut missed = Explained { at: reused.min(length + 1), missed: Vec::new() };
        if with_snapshots > store.reusable(&path, store.config.match_backoff_tokens) {
            missed.until(with_snapshots, Why::NoSnapshot);
        }
        missed.until(matched, store.missed_on_path(&path, matched));
        missed.until(path.tokens, Why::Backoff);
        let (evicted, life_cycle) = store.evicted_after(scope, &path, body);
        missed.until(evicted, Why::Evicted { life_cycle });
        if missed.at == 0 {
            missed.until(store.known_elsewhere(scope, body), Why::OtherScope);
        }
        missed.until(length, Why::ContentDiffers);
        missed.until(length + 1, Why::LastToken);
        missed.missed
    }
}

/// What was explained so far.
struct Explained {
    at: u32,
    missed: Vec<Missed>,
}

impl Explained {
    fn until(&mut self, to: u32, why: Why) {
        if to > self.at {
            self.missed.push(Missed { from: self.at, to, why });
            self.at = to;
        }
    }
}
