//! Identities. What is stored is an identity; placement alone sees dense indices of the view.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One life of a node: drawn at start and again whenever the node leaves a view or loses its round state.
    Incarnation(u64),
    "i"
);
id!(
    /// Hash of the incarnations that bootstrapped together.
    ClusterId(u64),
    "c"
);
id!(
    /// A rank's identity: given when its node joins, never given again.
    RankId(u32),
    "rank-"
);
id!(
    /// Number of a view; a new view has the next one.
    Epoch(u64),
    "e"
);
id!(
    /// Number of a round; runs on over views.
    Round(u64),
    ""
);
id!(
    /// Given by the replica when it enqueues a request; 63 bits, never reused. Queue order and ties follow it.
    RequestNumber(u64),
    "#"
);
id!(
    /// Counts the placements of one request, from 1.
    Attempt(u32),
    "attempt "
);
id!(
    /// 128-bit keyed hash of (tenant, the client's conversation name), made at the ingress.
    ConversationKey(u128),
    "conversation "
);
id!(
    /// Index of a KV block in one rank's device pool.
    BlockId(u32),
    "block "
);

impl RequestNumber {
    /// Its hash in a table. Numbers are given in sequence, and requests that come together are looked up together: they
    /// sit side by side, told apart by seven mixed bits at the top.
    pub(crate) fn spread(self) -> u64 {
        const TAG: u64 = 0x7f << 57;
        (self.0 & !TAG) | (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) & TAG)
    }
}

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// What an ingress calls a request: unique as long as incarnations are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    pub ingress: Incarnation,
    pub seq: u64,
}

impl fmt::Display for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}/{}", self.ingress.0, self.seq)
    }
}

/// One placement of one request: what a rank runs, and what fences its frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptKey {
    pub key: RequestKey,
    pub attempt: Attempt,
}

impl fmt::Display for AttemptKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.attempt)
    }
}
