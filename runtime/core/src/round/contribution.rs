//! What a member says in a round.

use crate::admission::HEAD_TOKENS;
use crate::digest;
use crate::ids::{
    Attempt, AttemptKey, ClusterId, ConversationKey, Epoch, Incarnation, RankId, RequestKey, RequestNumber, Round,
    TokenId,
};
use serde::{Deserialize, Serialize};

/// What one member contributes to one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contribution {
    pub cluster: ClusterId,
    pub epoch: Epoch,
    pub round: Round,
    pub member: Incarnation,
    /// The member's clock, counted from the agreed clock at its install.
    pub clock_us: u64,
    /// The oldest of its outbox.
    pub entries: Vec<Sequenced>,
    /// Each rank it hosts.
    pub ranks: Vec<RankSnapshot>,
    /// For requests that the last round named: what each local rank could reuse. What is absent counts as 0.
    pub prefix_matches: Vec<PrefixMatch>,
    /// Of the last completed round.
    pub digest: u64,
    pub draining: bool,
}

/// An entry and its place in the member's outbox; it keeps it when it has to go again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequenced {
    pub seq: u64,
    pub entry: Entry,
}

/// Something all members must learn in the same order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Entry {
    /// From an ingress: a request to place. Its prompt never travels in a round.
    Arrival(Box<Arrival>),
    /// From an ingress: its client left.
    Cancel(RequestKey),
    /// From an ingress: the request ended; only the ingress ends it.
    Ended(RequestKey),
    /// From an ingress: place the request again, from the tokens that it holds.
    Resume { key: RequestKey, attempt: Attempt, produced: u32 },
    /// From a rank: the attempt is done and its slot free.
    Finished(AttemptKey),
    /// From a rank: the attempt is gone with its KV.
    Lost(AttemptKey),
}

/// The placement's view of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    pub key: RequestKey,
    pub prompt_tokens: u32,
    /// Tokens already produced: more than 0 when an ingress announces a request again.
    pub produced_tokens: u32,
    /// First tokens of the prompt, at most 64: only where the routing policy sorts by them.
    pub head: Box<[TokenId]>,
    /// Truncated block keys of the prompt, for probing only; no replica keeps them. Empty unless the policy probes.
    pub chain: Chain,
    pub children: u32,
    pub conversation: Option<ConversationKey>,
    pub sub_agent: Option<ConversationKey>,
    pub explicit: Option<Explicit>,
    /// Higher is served first under the priority queue. Finite.
    pub priority: f64,
}

/// Hashes of a chain at most (4 KiB); a longer one is thinned.
pub const CHAIN_HASHES_MAX: usize = 512;

/// The block keys of a prompt, truncated to 64 bits, every `stride`-th: each covers all before it, so a match is exact
/// to `stride` blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chain {
    pub hashes: Box<[u64]>,
    pub stride: u32,
}

impl Chain {
    /// Thins `hashes`, one a block, to what a contribution carries.
    pub fn thinned(hashes: &[u64]) -> Self {
        let stride = hashes.len().div_ceil(CHAIN_HASHES_MAX).max(1);
        let kept = hashes.iter().skip(stride - 1).step_by(stride).copied().collect();
        Self { hashes: kept, stride: stride as u32 }
    }
}

/// Prompt tokens of a waiting request whose KV a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixMatch {
    pub number: RequestNumber,
    pub rank: RankId,
    pub tokens: u32,
}

/// A rank that the client named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explicit {
    pub rank: RankId,
    /// False: wait for that rank. True: prefer it. Unset: the policy's reading.
    pub relax: Option<bool>,
}

/// How loaded a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSnapshot {
    pub rank: RankId,
    /// The last round whose placements the rank had been told of when it counted.
    pub counted: Round,
    /// Attempts placed up to `counted` and not yet ended, whether their prompt has come or not; a parent counts its
    /// children too.
    pub active_requests: u32,
    pub active_tokens: u64,
    pub queued_prefill_tokens: u64,
    pub kv_blocks_held: u32,
    pub kv_blocks_reusable: u32,
    pub kv_blocks_free: u32,
    /// Steps the rank has run.
    pub steps: u64,
    /// In lockstep: the round that the rank stands before. It is through with the steps of all rounds below.
    pub boundary: Round,
    /// In lockstep: it stands there with something to run.
    pub ready: bool,
    /// In lockstep: its step takes so long that its node did not wait for it. It gets nothing new in this round.
    pub late: bool,
}

/// The input of one round, the same on every member: contributions in the order in which they are applied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Merged {
    pub epoch: Epoch,
    pub round: Round,
    /// The agreed clock.
    pub clock_us: u64,
    pub contributions: Vec<Contribution>,
}

impl Merged {
    /// Hash of the whole input.
    pub fn hash(&self) -> u64 {
        let head = digest::element(INPUT, &[self.epoch.0, self.round.0, self.clock_us]);
        self.contributions.iter().fold(head, |hash, c| c.fold_hash(hash))
    }
}

const INPUT: u64 = 0x1a;

impl Contribution {
    /// Entries in growing `seq` and within the limit, snapshots of own ranks only and none twice, numbers finite.
    pub(super) fn is_well_formed(&self, entries_max: usize, own: &[RankId]) -> bool {
        let seqs_grow = self.entries.windows(2).all(|w| w[0].seq < w[1].seq);
        let ranks_own = self.ranks.iter().all(|r| own.contains(&r.rank));
        let ranks_once = self.ranks.iter().enumerate().all(|(i, r)| self.ranks[..i].iter().all(|o| o.rank != r.rank));
        let entries_sane = self.entries.iter().all(|s| match &s.entry {
            Entry::Arrival(a) => {
                a.priority.is_finite() && a.head.len() <= HEAD_TOKENS && a.chain.hashes.len() <= CHAIN_HASHES_MAX
            }
            _ => true,
        });
        let matches_own = self.prefix_matches.iter().all(|m| own.contains(&m.rank));
        self.entries.len() <= entries_max && seqs_grow && ranks_own && ranks_once && entries_sane && matches_own
    }

    fn fold_hash(&self, hash: u64) -> u64 {
        let mut words = vec![
            self.cluster.0,
            self.epoch.0,
            self.round.0,
            self.member.0,
            self.clock_us,
            self.digest,
            u64::from(self.draining),
            self.entries.len() as u64,
            self.prefix_matches.len() as u64,
        ];
        for s in &self.entries {
            words.push(s.seq);
            s.entry.words(&mut words);
        }
        for r in &self.ranks {
            words.extend([
                u64::from(r.rank.0),
                r.counted.0,
                u64::from(r.active_requests),
                r.active_tokens,
                r.queued_prefill_tokens,
                u64::from(r.kv_blocks_held),
                u64::from(r.kv_blocks_reusable),
                u64::from(r.kv_blocks_free),
                r.steps,
                r.boundary.0,
                u64::from(r.ready) | u64::from(r.late) << 1,
            ]);
        }
        for m in &self.prefix_matches {
            words.extend([m.number.0, u64::from(m.rank.0), u64::from(m.tokens)]);
        }
        digest::element(hash, &words)
    }
}

impl Entry {
    fn words(&self, words: &mut Vec<u64>) {
        match self {
            Entry::Arrival(a) => {
                words.extend([0, a.key.ingress.0, a.key.seq]);
                words.extend([u64::from(a.prompt_tokens), u64::from(a.produced_tokens), u64::from(a.children)]);
                words.push(a.head.len() as u64);
                words.extend(a.head.iter().map(|t| u64::from(*t)));
                words.extend([a.chain.hashes.len() as u64, u64::from(a.chain.stride)]);
                words.extend(a.chain.hashes.iter().copied());
                push_key(words, a.conversation);
                push_key(words, a.sub_agent);
                match a.explicit {
                    None => words.push(0),
                    Some(e) => words.extend([1, u64::from(e.rank.0), e.relax.map_or(2, u64::from)]),
                }
                words.push(a.priority.to_bits());
            }
            Entry::Cancel(key) => words.extend([1, key.ingress.0, key.seq]),
            Entry::Ended(key) => words.extend([2, key.ingress.0, key.seq]),
            Entry::Resume { key, attempt, produced } => {
                words.extend([3, key.ingress.0, key.seq, u64::from(attempt.0), u64::from(*produced)]);
            }
            Entry::Finished(a) => words.extend([4, a.key.ingress.0, a.key.seq, u64::from(a.attempt.0)]),
            Entry::Lost(a) => words.extend([5, a.key.ingress.0, a.key.seq, u64::from(a.attempt.0)]),
        }
    }
}

fn push_key(words: &mut Vec<u64>, key: Option<ConversationKey>) {
    match key {
        None => words.push(0),
        Some(k) => words.extend([1, k.0 as u64, (k.0 >> 64) as u64]),
    }
}
