//! A backend that computes tokens from what its pages really hold, and an observer that remembers.

use starling_actors::{ActorError, NodeName, TraceContext};
use starling_core::ids::{ConversationKey, TokenId};
use starling_core::kv::cache::lifecycle::Retention;
use starling_core::kv::identity::PromptKeys;
use starling_core::request::Generation;
use starling_core::step::{Drawn, Sampled, Step};
use starling_core::{batch, ingress, kv, membership, placement, replica, round};
use starling_gpu::{Backend, StepError};
use starling_serving::api::{StreamEvent, Submission};
use starling_serving::{Backends, LocalRank, MemberSettings, Observer, Settings, TokenStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::timeout;

/// Generous: two shared cores.
pub const LIMIT: Duration = Duration::from_secs(60);
pub const BLOCK_TOKENS: u32 = 4;
pub const VOCABULARY: u32 = 1000;

pub fn settings(ranks: u32, blocks: u32) -> Settings {
    let kv = kv::Config::new(BLOCK_TOKENS.try_into().expect("above 0"), vec![(Retention::Full, blocks)]);
    Settings {
        members: vec![MemberSettings { name: NodeName::new("here").expect("a name"), ranks }],
        me: 0,
        suspect_after_us: 2_000_000,
        context_tokens_max: 256,
        prompt_wait_us: 5_000_000,
        batch: batch::Config {
            step_tokens_max: 32,
            sequences_max: 8,
            draft_tokens_max: 0,
            vocabulary: VOCABULARY,
            kv: kv.shape(),
        },
        kv,
        kv_sizing: None,
        replica: replica::Config {
            cap: 8,
            attempts_max: 10,
            probe_requests_max: 256,
            lockstep: false,
            placement: placement::Config::default(),
        },
        rounds: round::Config::default(),
        changes: membership::Config::default(),
        bootstrap: Vec::new(),
        ingress: ingress::Config::default(),
    }
}

/// A model whose next token hangs on all tokens so far, read from its pages: a page that was not written, or was
/// given to another sequence, gives another token.
struct PagedHash {
    pages: Vec<[TokenId; BLOCK_TOKENS as usize]>,
    gate: Arc<Gate>,
}

/// Lets a test hold steps back and count them.
#[derive(Default)]
pub struct Gate {
    pub closed: AtomicBool,
    pub steps: AtomicU64,
    pub panic_at: AtomicU64,
}

/// How far back the model looks where it repeats itself.
const REPEATS_AFTER: usize = 5;

fn next_token(tokens: impl Iterator<Item = TokenId>) -> TokenId {
    let tokens: Vec<TokenId> = tokens.collect();
    let hash = tokens.iter().fold(17u32, |h, t| (h ^ t).wrapping_mul(0x9e37_79b1).rotate_left(7));
    match tokens.len().checked_sub(REPEATS_AFTER) {
        Some(at) if hash >> 16 & 7 != 0 => tokens[at],
        _ => hash % VOCABULARY,
    }
}

impl Backend for PagedHash {
    fn step(&mut self, step: &Step, out: &mut Vec<Sampled>) -> Result<(), StepError> {
        let nth = self.gate.steps.fetch_add(1, Ordering::SeqCst) + 1;
        assert_ne!(nth, self.gate.panic_at.load(Ordering::SeqCst), "a planned fault of the device");
        while self.gate.closed.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        for copy in &step.copies {
            self.pages[copy.to.0 as usize] = self.pages[copy.from.0 as usize];
        }
        for (index, slice) in step.slices.iter().enumerate() {
            let at = |position: usize| {
                let block = slice.tables[0][position / BLOCK_TOKENS as usize].0 as usize;
                (block, position % BLOCK_TOKENS as usize)
            };
            for (i, token) in slice.tokens.iter().enumerate() {
                let (block, offset) = at(slice.start as usize + i);
                self.pages[block][offset] = *token;
            }
            for draw in slice.draws() {
                let known = draw.position as usize;
                let token = next_token((0..known).map(|p| self.pages[at(p).0][at(p).1]));
                out.push(Sampled::new(index, Drawn::new(token, -1.0)));
            }
        }
        Ok(())
    }
}

/// What an undisturbed run answers.
pub fn expected(prompt: &[TokenId], tokens: u32) -> Vec<TokenId> {
    let mut all = prompt.to_vec();
    for _ in 0..tokens {
        all.push(next_token(all.iter().copied()));
    }
    all.split_off(prompt.len())
}

/// The newest block counts of each rank, and what was lost.
#[derive(Default)]
pub struct Seen {
    pub kv: Mutex<Vec<(kv::Stats, batch::Stats)>>,
    pub lost: AtomicU64,
    pub faults: Mutex<replica::Faults>,
}

impl Observer for Seen {
    fn rank(&self, rank: LocalRank, batch: &batch::Stats, kv: &kv::Stats) {
        let mut seen = self.kv.lock().expect("no panic under the lock");
        let ranks = seen.len().max(rank.0 as usize + 1);
        seen.resize(ranks, Default::default());
        seen[rank.0 as usize] = (kv.clone(), *batch);
    }
    fn lost(&self, _: LocalRank, attempts: usize) {
        self.lost.fetch_add(attempts as u64, Ordering::SeqCst);
    }
    fn round(&self, report: &starling_serving::RoundReport) {
        *self.faults.lock().expect("no panic under the lock") = report.faults;
    }
}

impl Seen {
    /// No rank holds a block or runs anything.
    pub fn is_quiet(&self) -> bool {
        let ranks = self.kv.lock().expect("no panic under the lock");
        ranks.iter().all(|(kv, batch)| {
            let is_free = |pool: &kv::PoolStats| {
                pool.blocks_held == 0 && pool.blocks_free + pool.blocks_reusable == pool.blocks_total
            };
            kv.pools.iter().all(is_free) && batch.running + batch.waiting == 0
        })
    }
}

pub fn backends(settings: &Settings, gate: &Arc<Gate>) -> Arc<dyn Backends> {
    let (blocks, gate) = (settings.batch.kv.pools[0].blocks as usize, Arc::clone(gate));
    Arc::new(move |_: LocalRank| -> Result<Box<dyn Backend>, ActorError> {
        let pages = vec![[TokenId::MAX; BLOCK_TOKENS as usize]; blocks];
        Ok(Box::new(PagedHash { pages, gate: Arc::clone(&gate) }))
    })
}

pub fn submission(prompt: &[TokenId], tokens: u32, conversation: Option<u128>) -> Submission {
    Submission {
        names: Arc::default(),
        prompt: Arc::from(prompt),
        keys: PromptKeys::default(),
        generation: Generation { max_new_tokens: tokens, ..Generation::default() },
        conversation: conversation.map(ConversationKey),
        explicit: None,
        priority: 0.5,
        tenant: 1,
        child: 0,
        trace: TraceContext::default(),
    }
}

/// Waits until it holds.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}, in time"));
}

pub async fn first_token(stream: &mut TokenStream) -> StreamEvent {
    loop {
        match timeout(LIMIT, stream.next()).await.expect("in time").expect("not ended") {
            StreamEvent::Placed(_) => {}
            other => return other,
        }
    }
}

#[allow(dead_code, reason = "not every test that shares this file has prompts of its own")]
pub fn prompt(seed: u32) -> Vec<TokenId> {
    (0..(10 + seed % 30)).map(|i| (seed * 31 + i) % 997).collect()
}
