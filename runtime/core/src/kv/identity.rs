//! What a block of tokens is called: one definition for the tree, for routing and for whatever is stored later.
//!
//! A block's key covers the scope, all tokens before the block and the block itself, so equal keys mean equal prefixes.
//! Every hashed field is tagged and length-prefixed: no two different inputs give the hasher the same bytes.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// First byte of everything hashed here: what kind of thing follows.
const TAG_SCOPE: u8 = 1;
const TAG_TOKENS: u8 = 2;
/// Tags of a scope's fields.
const FIELD_TENANT: u8 = 1;
const FIELD_ADAPTER: u8 = 2;

/// Bytes before a block's tokens: tag, key of the block before, count.
const HEAD: usize = 1 + 32 + 8;
/// Tokens that are handed to the hasher at once.
const RUN: usize = 64;

/// Who may share blocks with whom: blocks are reused within one scope and never across two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Scope {
    /// Keyed hash of the tenant.
    pub tenant: u64,
    /// The adapter that shaped the KV; `None` for the base model.
    pub adapter: Option<u64>,
}

impl Scope {
    /// The key that the first block of a sequence hangs from.
    pub fn root(&self) -> BlockKey {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&[TAG_SCOPE]);
        let fields = [(FIELD_TENANT, Some(self.tenant)), (FIELD_ADAPTER, self.adapter)];
        for (tag, value) in fields {
            let Some(value) = value else { continue };
            hasher.update(&[tag]);
            hasher.update(&8u64.to_le_bytes());
            hasher.update(&value.to_le_bytes());
        }
        BlockKey(*hasher.finalize().as_bytes())
    }
}

/// A block's 256-bit chained key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockKey(pub [u8; 32]);

impl BlockKey {
    /// The key of the block of `tokens` that follows this one.
    ///
    /// # Cost
    /// One hash over the block's tokens; what lies before it is in `self`.
    pub fn child(&self, tokens: &[TokenId]) -> BlockKey {
        // In one piece where it fits: the hasher copies what it is given piece by piece.
        let mut bytes = [0u8; HEAD + 4 * RUN];
        bytes[0] = TAG_TOKENS;
        bytes[1..33].copy_from_slice(&self.0);
        bytes[33..HEAD].copy_from_slice(&(tokens.len() as u64).to_le_bytes());
        let (first, rest) = tokens.split_at(tokens.len().min(RUN));
        write(&mut bytes[HEAD..], first);
        let end = HEAD + 4 * first.len();
        if rest.is_empty() {
            return BlockKey(*blake3::hash(&bytes[..end]).as_bytes());
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes[..end]);
        for run in rest.chunks(RUN) {
            write(&mut bytes, run);
            hasher.update(&bytes[..4 * run.len()]);
        }
        BlockKey(*hasher.finalize().as_bytes())
    }

    /// The first 64 bits: enough to estimate a match when routing, never to hand out blocks.
    pub fn truncated(&self) -> u64 {
        let mut low = [0u8; 8];
        low.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(low)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({:016x}..)", self.truncated())
    }
}

fn write(bytes: &mut [u8], tokens: &[TokenId]) {
    for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        to.copy_from_slice(&token.to_le_bytes());
    }
}

/// The keys of all full blocks of `tokens`, in order. A block size of 0 has no blocks.
pub fn chain(scope: &Scope, tokens: &[TokenId], block_tokens: u32) -> Vec<BlockKey> {
    chain_after(&[], scope, tokens, block_tokens)
}

/// As [`chain`], where the keys of the first blocks are `known`; of more than there are blocks the rest is left out.
///
/// # Cost
/// One hash a block that is not known.
pub fn chain_after(known: &[BlockKey], scope: &Scope, tokens: &[TokenId], block_tokens: u32) -> Vec<BlockKey> {
    if block_tokens == 0 {
        return Vec::new();
    }
    let blocks = tokens.len() / block_tokens as usize;
    let known = &known[..known.len().min(blocks)];
    let mut keys = Vec::with_capacity(blocks);
    keys.extend_from_slice(known);
    let mut parent = known.last().copied().unwrap_or_else(|| scope.root());
    for block in tokens.chunks_exact(block_tokens as usize).skip(known.len()) {
        parent = parent.child(block);
        keys.push(parent);
    }
    keys
}

/// The keys of a prompt's leading blocks, where whoever hands the prompt in has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptKeys {
    /// 0 where there are none.
    pub block_tokens: u32,
    pub keys: Arc<[BlockKey]>,
}

impl PromptKeys {
    /// [`truncated_chain`] of `tokens`, a prefix of the prompt. Blocks of another size, or that no key is there for, are
    /// hashed.
    pub fn truncated(&self, scope: &Scope, tokens: &[TokenId], block_tokens: u32) -> Vec<u64> {
        let known = if self.block_tokens == block_tokens { &*self.keys } else { &[] };
        chain_after(known, scope, tokens, block_tokens).iter().map(BlockKey::truncated).collect()
    }
}

/// The chain as it travels with a request for probing.
pub fn truncated_chain(scope: &Scope, tokens: &[TokenId], block_tokens: u32) -> Vec<u64> {
    chain(scope, tokens, block_tokens).iter().map(BlockKey::truncated).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const BASE: Scope = Scope { tenant: 7, adapter: None };

    #[test]
    fn a_key_covers_scope_and_every_token_before_it() {
        let tokens: Vec<u32> = (0..64).collect();
        let keys = chain(&BASE, &tokens, 16);
        assert_eq!(keys.len(), 4);
        for changed in 0..64 {
            let mut other = tokens.clone();
            other[changed] += 1000;
            let others = chain(&BASE, &other, 16);
            for block in 0..4 {
                assert_eq!(keys[block] == others[block], block < changed / 16, "token {changed}, block {block}");
            }
        }
        let elsewhere = chain(&Scope { tenant: 8, adapter: None }, &tokens, 16);
        assert!(keys.iter().zip(&elsewhere).all(|(a, b)| a != b));
    }

    #[test]
    fn tenant_and_adapter_of_the_same_value_do_not_collide() {
        let scopes = [
            Scope { tenant: 0, adapter: None },
            Scope { tenant: 0, adapter: Some(0) },
            Scope { tenant: 7, adapter: None },
            Scope { tenant: 0, adapter: Some(7) },
            Scope { tenant: 7, adapter: Some(0) },
            Scope { tenant: 7, adapter: Some(7) },
        ];
        let roots: BTreeSet<_> = scopes.iter().map(Scope::root).collect();
        assert_eq!(roots.len(), scopes.len());
    }

    #[test]
    fn a_key_is_the_hash_of_its_tagged_and_counted_fields() {
        let mut scope = vec![1u8, 1, 8, 0, 0, 0, 0, 0, 0, 0];
        scope.extend(7u64.to_le_bytes());
        let root = blake3::hash(&scope);
        assert_eq!(BASE.root().0, *root.as_bytes());
        let tokens: Vec<u32> = (0..100).map(|t| t * 0x01010101).collect();
        let mut block = vec![2u8];
        block.extend(root.as_bytes());
        block.extend(100u64.to_le_bytes());
        block.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        let key = chain(&BASE, &tokens, 100)[0];
        assert_eq!(key.0, *blake3::hash(&block).as_bytes());
        assert_eq!(key.truncated().to_le_bytes(), key.0[..8]);
    }

    #[test]
    fn a_chain_goes_on_from_any_of_its_keys() {
        let tokens: Vec<u32> = (0..77).collect();
        let whole = chain(&BASE, &tokens, 16);
        for known in 0..=whole.len() {
            assert_eq!(chain_after(&whole[..known], &BASE, &tokens, 16), whole);
        }
        assert_eq!(chain_after(&whole, &BASE, &tokens[..40], 16), whole[..2]);
        assert_eq!(chain_after(&whole, &BASE, &tokens, 0), []);
        // What is known is taken and not hashed again.
        let other = chain(&Scope { tenant: 8, adapter: None }, &tokens, 16);
        assert_eq!(chain_after(&other[..3], &BASE, &tokens, 16), other);
    }

    #[test]
    fn keys_of_another_block_size_are_not_taken() {
        let tokens: Vec<u32> = (0..77).collect();
        let keys = |block_tokens| PromptKeys { block_tokens, keys: chain(&BASE, &tokens, block_tokens).into() };
        for given in [keys(8), keys(16), PromptKeys::default()] {
            assert_eq!(given.truncated(&BASE, &tokens[..76], 16), truncated_chain(&BASE, &tokens[..76], 16));
        }
    }

    #[test]
    fn only_full_blocks_have_keys() {
        let tokens: Vec<u32> = (0..33).collect();
        assert_eq!(chain(&BASE, &tokens[..15], 16), []);
        assert_eq!(chain(&BASE, &tokens, 16).len(), 2);
        assert_eq!(chain(&BASE, &tokens, 16), chain(&BASE, &tokens[..32], 16));
        assert_eq!(chain(&BASE, &tokens, 0), []);
        assert_ne!(chain(&BASE, &tokens[..32], 32), chain(&BASE, &tokens[..32], 16)[1..]);
    }
}
