//! What conversations became: their next turns are encoded, and their blocks keyed, from where they differ from the last one.
//!
//! A prompt is cached up to its last control token. What lies between two control tokens becomes the same tokens whatever
//! stands before and behind, so tokens of an equal beginning are equal. Beginnings are compared as a whole, byte by byte;
//! no hash decides. An entry belongs to one conversation of one tenant, and nobody else's request looks at it.

use super::model::{TextError, TextModel};
use super::prompt::{Control, Progress, PromptText};
use starling_core::ids::{ConversationKey, TokenId};
use starling_core::kv::Forget;
use starling_core::kv::identity::{BlockKey, PromptKeys, Scope, chain_after};
use starling_serving::Texts;
use std::collections::{BTreeMap, HashMap};
use std::mem::size_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that an entry takes beside its parts: the maps' nodes and the allocations' heads.
const ENTRY_BYTES: usize = 256;
/// Prompts of one conversation that are remembered. More than one: agents that work for a conversation use its name, and
/// an answer that is asked for again goes on from an earlier turn.
const BRANCHES_MAX: usize = 4;

/// Whose prompt it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub tenant: u64,
    /// Requests without one are not cached.
    pub conversation: Option<ConversationKey>,
}

/// A prompt, ready to be submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    pub tokens: Arc<[TokenId]>,
    pub keys: PromptKeys,
    pub cost: Cost,
}

/// What a prompt cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Whether the request belongs to a conversation, and the cache is on.
    pub is_cacheable: bool,
    /// Bytes of text that were turned into tokens.
    pub encoded_bytes: usize,
    /// Tokens that were taken from the conversation's last turn.
    pub reused_tokens: usize,
    /// Blocks whose keys were computed.
    pub keyed_blocks: usize,
    /// Entries that made room for this prompt's.
    pub evicted: usize,
    /// What the cache holds now.
    pub cache_bytes: usize,
}

/// A prompt of a conversation.
struct Entry {
    /// Up to the last control token.
    text: Box<str>,
    controls: Box<[Control]>,
    /// For each control token, how many tokens end with it.
    ends: Box<[usize]>,
    /// The whole prompt's.
    tokens: Arc<[TokenId]>,
    keys: Arc<[BlockKey]>,
}

impl Entry {
    fn bytes(&self) -> usize {
        let (controls, ends) = (size_of::<Control>() * self.controls.len(), size_of::<usize>() * self.ends.len());
        let (tokens, keys) = (size_of::<TokenId>() * self.tokens.len(), size_of::<BlockKey>() * self.keys.len());
        ENTRY_BYTES + self.text.len() + controls + ends + tokens + keys
    }

    /// Tokens that a prompt which goes on from this one can reuse.
    fn lasting(&self) -> usize {
        self.ends.last().copied().unwrap_or(self.tokens.len())
    }

    /// Whether all that can be reused of this prompt can be reused of another one that has as many tokens in common.
    fn is_said_by(&self, other: &Self, same: usize) -> bool {
        same >= self.lasting() && other.lasting() >= self.lasting() && other.controls.len() >= self.controls.len()
    }

    /// How many control tokens both begin with, and the same text up to each.
    fn controls_shared(&self, prompt: &PromptText) -> usize {
        let same_text = common_prefix(self.text.as_bytes(), prompt.text.as_bytes());
        let pairs = self.controls.iter().zip(&prompt.controls);
        pairs.take_while(|(known, control)| known == control && known.at <= same_text).count()
    }
}

/// Remembers conversations within a number of bytes; whoever was not seen for longest makes room.
pub struct TextCache {
    bytes_max: usize,
    /// Prompts get the keys of their blocks of so many tokens; `None` where nobody asks for them.
    block_tokens: Option<u32>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What each owner's requests went on from or left, the newest last, by the time of its last use.
    entries: HashMap<Owner, Vec<(u64, Arc<Entry>)>>,
    /// Each use has a number of its own.
    by_use: BTreeMap<u64, Owner>,
    uses: u64,
    bytes: usize,
}

/// What becomes of the prompt that a new one is nearest to.
enum Nearest {
    /// It says all that the new one does.
    Kept(u64),
    /// The new one goes on from its end.
    Replaced(u64),
    /// Another branch, or none.
    Left,
}

impl TextCache {
    /// With no bytes nothing is remembered.
    pub fn new(bytes_max: usize, block_tokens: Option<u32>) -> Self {
        Self { bytes_max, block_tokens, state: Mutex::default() }
    }

    /// Encodes a prompt.
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn encode(&self, model: &TextModel, prompt: PromptText, owner: Owner) -> Result<Encoded, TextError> {
        let known = self.known(owner);
        let shared = known.iter().map(|(_, entry)| (entry.controls_shared(&prompt), entry));
        let mut progress = Progress::default();
        match shared.max_by_key(|(shared, _)| *shared).filter(|(shared, _)| *shared > 0) {
            Some((shared, entry)) => {
                let tokens = entry.ends[shared - 1];
                progress.tokens.extend_from_slice(&entry.tokens[..tokens]);
                progress.ends.extend_from_slice(&entry.ends[..shared]);
            }
            None => progress.tokens.extend(model.tokenizer.begin_of(&prompt)),
        }
        let reused_tokens = progress.ends.last().copied().unwrap_or(0);
        model.tokenizer.go_on(&prompt, &mut progress)?;
        let cost = Cost { encoded_bytes: progress.encoded_bytes, reused_tokens, ..Cost::default() };
        Ok(self.finish(owner, &known, (prompt, progress), cost))
    }

    /// Takes a prompt that came as tokens; only its keys can be known.
    pub fn take(&self, tokens: Vec<TokenId>, owner: Owner) -> Encoded {
        let known = self.known(owner);
        let progress = Progress { tokens, ..Progress::default() };
        self.finish(owner, &known, (PromptText::default(), progress), Cost::default())
    }

    fn finish(
        &self,
        owner: Owner,
        known: &[(u64, Arc<Entry>)],
        (mut prompt, progress): (PromptText, Progress),
        mut cost: Cost,
    ) -> Encoded {
        let tokens: Arc<[TokenId]> = progress.tokens.into();
        let same = known.iter().map(|(used, entry)| (common_prefix(&entry.tokens, &tokens), *used, &**entry));
        let nearest = same.max_by_key(|(same, used, _)| (*same, *used));
        let keys = self.keys(owner.tenant, nearest.map(|(same, _, entry)| (same, entry)), &tokens, &mut cost);
        prompt.text.truncate(prompt.run_start());
        let entry = Entry {
            text: prompt.text.into(),
            controls: prompt.controls.into(),
            ends: progress.ends.into(),
            tokens: Arc::clone(&tokens),
            keys: Arc::clone(&keys.keys),
        };
        let nearest = match nearest {
            Some((same, used, known)) if entry.is_said_by(known, same) => Nearest::Kept(used),
            Some((same, used, known)) if known.is_said_by(&entry, same) => Nearest::Replaced(used),
            _ => Nearest::Left,
        };
        cost.is_cacheable = self.is_cacheable(owner);
        let says_something = !entry.controls.is_empty() || !entry.keys.is_empty();
        let mut state = self.state();
        if cost.is_cacheable && says_something {
            cost.evicted = state.put(owner, entry, nearest, self.bytes_max);
        }
        cost.cache_bytes = state.bytes;
        drop(state);
        Encoded { tokens, keys, cost }
    }

    /// The keys of the prompt's blocks, from the first one on that the nearest prompt does not have.
    fn keys(&self, tenant: u64, nearest: Option<(usize, &Entry)>, tokens: &[TokenId], cost: &mut Cost) -> PromptKeys {
        let Some(block_tokens) = self.block_tokens else { return PromptKeys::default() };
        let known = nearest.map_or(&[][..], |(same, entry)| {
            let blocks = same / block_tokens.max(1) as usize;
            &entry.keys[..blocks.min(entry.keys.len())]
        });
        let keys = chain_after(known, &Scope { tenant, adapter: None }, tokens, block_tokens);
        cost.keyed_blocks = keys.len() - known.len();
        PromptKeys { block_tokens, keys: keys.into() }
    }

    fn known(&self, owner: Owner) -> Vec<(u64, Arc<Entry>)> {
        match self.is_cacheable(owner) {
            true => self.state().entries.get(&owner).cloned().unwrap_or_default(),
            false => Vec::new(),
        }
    }

    fn is_cacheable(&self, owner: Owner) -> bool {
        self.bytes_max > 0 && owner.conversation.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Texts for TextCache {
    fn forget(&self, what: &Forget) -> usize {
        self.state().forget(what)
    }
}

impl State {
    fn forget(&mut self, what: &Forget) -> usize {
        let owners: Vec<Owner> = match what {
            Forget::Conversation { scope, conversation } => {
                vec![Owner { tenant: scope.tenant, conversation: Some(*conversation) }]
            }
            Forget::Scope(scope) => self.entries.keys().copied().filter(|owner| owner.tenant == scope.tenant).collect(),
        };
        let mut forgotten = 0;
        for owner in owners {
            for (used, entry) in self.entries.remove(&owner).unwrap_or_default() {
                self.by_use.remove(&used);
                self.bytes -= entry.bytes();
                forgotten += 1;
            }
        }
        forgotten
    }

    /// Puts an entry beside the owner's others, and returns how many entries made room.
    fn put(&mut self, owner: Owner, entry: Entry, nearest: Nearest, bytes_max: usize) -> usize {
        let entry = match nearest {
            // It may have made room meanwhile.
            Nearest::Kept(used) => self.remove(owner, used).unwrap_or_else(|| Arc::new(entry)),
            Nearest::Replaced(used) => {
                self.remove(owner, used);
                Arc::new(entry)
            }
            Nearest::Left => Arc::new(entry),
        };
        let bytes = entry.bytes();
        if bytes > bytes_max {
            return 0;
        }
        let mut evicted = 0;
        let branches = self.entries.get(&owner).map_or(0, Vec::len);
        let oldest_branch = self.entries.get(&owner).and_then(|entries| entries.first()).map(|(used, _)| *used);
        if let Some(used) = oldest_branch.filter(|_| branches >= BRANCHES_MAX) {
            self.remove(owner, used);
            evicted += 1;
        }
        while self.bytes + bytes > bytes_max
            && let Some((&used, &oldest)) = self.by_use.first_key_value()
        {
            self.remove(oldest, used);
            evicted += 1;
        }
        self.uses += 1;
        self.bytes += bytes;
        self.by_use.insert(self.uses, owner);
        self.entries.entry(owner).or_default().push((self.uses, entry));
        evicted
    }

    fn remove(&mut self, owner: Owner, used: u64) -> Option<Arc<Entry>> {
        let entries = self.entries.get_mut(&owner)?;
        let at = entries.iter().position(|(of, _)| *of == used)?;
        let (_, entry) = entries.remove(at);
        if entries.is_empty() {
            self.entries.remove(&owner);
        }
        self.by_use.remove(&used);
        self.bytes -= entry.bytes();
        Some(entry)
    }
}

/// How many elements both begin with.
fn common_prefix<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    /// Compared at once: most of a long history is equal.
    const STRIDE: usize = 1024;
    let mut same = 0;
    for (a, b) in a.chunks(STRIDE).zip(b.chunks(STRIDE)) {
        match a == b {
            true => same += a.len(),
            false => return same + a.iter().zip(b).take_while(|(a, b)| a == b).count(),
        }
    }
    same
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
