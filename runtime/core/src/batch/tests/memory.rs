//! What a rank's blocks hold: tokens for attention, and for recurrent layers the tokens that a state has seen.
//!
//! Whatever a query would read is compared with what it should be: a block that was reused wrongly, given back too early,
//! copied too late or written by two sequences does not hold the tokens of the sequence that reads it.

use crate::ids::TokenId;
use crate::kv::Pool;
use crate::kv::cache::lifecycle::Retention;
use crate::step::{BlockCopy, Slice};
use std::num::NonZeroU32;

#[derive(Clone, Debug)]
enum Block {
    /// The owner and the token of each position.
    Attention(Vec<Option<(u64, TokenId)>>),
    State(Option<(u64, Vec<TokenId>)>),
}

pub struct Memory {
    block_tokens: usize,
    pools: Vec<(Retention, Vec<Block>)>,
}

impl Memory {
    pub fn new(block_tokens: NonZeroU32, pools: Vec<Pool>) -> Self {
        let block_tokens = block_tokens.get() as usize;
        let empty = |retention| match retention {
            Retention::State => Block::State(None),
            Retention::Full | Retention::Window { .. } => Block::Attention(vec![None; block_tokens]),
        };
        let pool = |pool: Pool| (pool.retention, vec![empty(pool.retention); pool.blocks as usize]);
        Self { block_tokens, pools: pools.into_iter().map(pool).collect() }
    }

    pub fn copy(&mut self, copy: BlockCopy) {
        let blocks = &mut self.pools[usize::from(copy.life_cycle)].1;
        blocks[copy.to.0 as usize] = blocks[copy.from.0 as usize].clone();
    }

    /// Runs a slice of a sequence whose tokens, up to the slice's end, are `known`. Gives back the tokens as the last query
    /// reads them.
    pub fn write(&mut self, slice: &Slice, tenant: u64, known: &[TokenId]) -> Vec<TokenId> {
        let start = slice.start as usize;
        let mut read = known.to_vec();
        for (table, (retention, blocks)) in slice.tables.iter().zip(&mut self.pools) {
            let retention = *retention;
            if let Retention::State = retention {
                let Block::State(state) = &mut blocks[table[0].0 as usize] else { panic!("a state") };
                if start > 0 {
                    assert_eq!(state, &Some((tenant, known[..start].to_vec())), "{} goes on from there", slice.attempt);
                }
                *state = Some((tenant, known.to_vec()));
                continue;
            }
            for (at, token) in slice.tokens.iter().enumerate() {
                let block = table[(start + at) / self.block_tokens].0 as usize;
                let Block::Attention(tokens) = &mut blocks[block] else { panic!("tokens") };
                tokens[(start + at) % self.block_tokens] = Some((tenant, *token));
            }
            let first = |query: usize| match retention {
                Retention::Window { tokens, .. } => (query + 1).saturating_sub(tokens.get() as usize),
                _ => 0,
            };
            let sinks = match retention {
                Retention::Window { sink_blocks, .. } => sink_blocks as usize * self.block_tokens,
                _ => 0,
            };
            for query in start..known.len() {
                for position in (0..sinks.min(query + 1)).chain(first(query)..=query) {
                    let block = table[position / self.block_tokens].0 as usize;
                    let Block::Attention(tokens) = &blocks[block] else { panic!("tokens") };
                    let (owner, token) = tokens[position % self.block_tokens].expect("computed before");
                    assert_eq!((owner, token), (tenant, known[position]), "{} at {position}", slice.attempt);
                    read[position] = token;
                }
            }
        }
        read
    }
}
