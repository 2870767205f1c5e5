//! Everything the serving actors are told when they start.

use crate::LocalRank;
use crate::directory::Seat;
use starling_actors::NodeName;
use starling_core::kv::cache::rebalance;
use starling_core::{batch, bootstrap, ingress as core_ingress, kv, membership, placement, replica, round};
use std::ops::Range;

/// Everything the actors need to know. All limits are in here.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The members of the cluster, this node among them, in the order of views. Equal on all of them.
    pub members: Vec<MemberSettings>,
    /// Which of the members this node is.
    pub me: usize,
    /// A cluster in which no round completes for this long stands still: nothing new is taken.
    pub suspect_after_us: u64,
    /// Prompt and generated tokens of a sequence, at most.
    pub context_tokens_max: u32,
    /// A placed attempt whose prompt does not come for this long is lost.
    pub prompt_wait_us: u64,
    pub batch: batch::Config,
    /// The KV managers, whose pools `batch` plans with.
    pub kv: kv::Config,
    /// What their pools were sized for; each rank measures what it should have been.
    pub kv_sizing: Option<rebalance::Pools>,
    pub replica: replica::Config,
    pub rounds: round::Config,
    /// The bounds of changes of the view; those of rounds and of suspicion are the ones above.
    pub changes: membership::Config,
    /// Names of the members that found a cluster; empty: all of the list. Equal on all of them.
    pub bootstrap: Vec<NodeName>,
    pub ingress: core_ingress::Config,
}

/// Settings that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("member {name} has no rank (ranks 0)")]
    NoRanks { name: NodeName },
    #[error("this node is member {me} of a list of {members}")]
    NotAMember { me: usize, members: usize },
    #[error("bootstrap name {name} is not in the list of members")]
    Unlisted { name: NodeName },
    #[error("member {name} is in the list twice")]
    Twice { name: NodeName },
    #[error("a rank holds no requests (cap 0)")]
    NoCap,
    #[error("rounds and the replica disagree on lockstep (rounds {rounds}, replica {replica})")]
    Lockstep { rounds: bool, replica: bool },
    #[error(transparent)]
    Batch(#[from] batch::ConfigError),
    #[error(transparent)]
    Placement(#[from] placement::ConfigError),
    #[error(transparent)]
    Kv(#[from] kv::ConfigError),
    #[error("the step planner does not know the KV manager's pools")]
    Pools,
    #[error(
        "a sequence may have {context} tokens, which take {wanted} blocks of KV life cycle {life_cycle}; a rank has {blocks} \
         (of {block_tokens} tokens)"
    )]
    PoolTooSmall { context: u32, life_cycle: usize, wanted: u32, blocks: u32, block_tokens: u32 },
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSettings {
    pub name: NodeName,
    pub ranks: u32,
}

impl MemberSettings {
    pub(crate) fn ranks(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..self.ranks).map(LocalRank)
    }
}

impl Settings {
    /// Ids of a member's ranks: they count through the list.
    pub(crate) fn ranks_of(&self, seat: Seat) -> Range<u32> {
        let seat = seat.0 as usize;
        let first: u32 = self.members.iter().take(seat).map(|member| member.ranks).sum();
        first..first + self.members.get(seat).map_or(0, |member| member.ranks)
    }

    pub(crate) fn own_ranks(&self) -> impl Iterator<Item = LocalRank> + use<> {
        (0..self.members.get(self.me).map_or(0, |member| member.ranks)).map(LocalRank)
    }

    /// This node's place in the list.
    pub(crate) fn seat(&self) -> Seat {
        Seat(self.me as u32)
    }

    pub(crate) fn seat_of(&self, name: &str) -> Option<Seat> {
        self.members.iter().position(|member| member.name.as_str() == name).map(|seat| Seat(seat as u32))
    }

    pub(crate) fn name_of(&self, seat: Seat) -> &str {
        self.members.get(seat.0 as usize).map_or("unknown", |member| member.name.as_str())
    }

    pub(crate) fn membership(&self) -> membership::Config {
        let (round, suspect_after_us) = (self.rounds.clone(), self.suspect_after_us);
        membership::Config { round, suspect_after_us, ..self.changes.clone() }
    }

    /// Who founds a cluster with whom. That versions and settings agree is checked by the links.
    pub(crate) fn bootstrap(&self) -> bootstrap::Config {
        let all = || self.members.iter().map(|member| member.name.as_str().into()).collect();
        let named = || self.bootstrap.iter().map(|name| name.as_str().into()).collect();
        bootstrap::Config::new(if self.bootstrap.is_empty() { all() } else { named() }, 1, 0)
    }

    /// The ingress' bounds, with what the placement policy asks of arrivals.
    pub(crate) fn ingress_config(&self) -> core_ingress::Config {
        let probes = self.replica.placement.policy == placement::Policy::KvAware;
        core_ingress::Config {
            probe_block_tokens: probes.then_some(self.kv.cache.block_tokens.get()),
            ..self.ingress.clone()
        }
    }

    /// # Errors
    /// The first setting that cannot work, with its value.
    pub fn validate(&self) -> Result<(), SettingsError> {
        if self.me >= self.members.len() {
            return Err(SettingsError::NotAMember { me: self.me, members: self.members.len() });
        }
        for (index, member) in self.members.iter().enumerate() {
            let name = member.name.clone();
            if member.ranks == 0 {
                return Err(SettingsError::NoRanks { name });
            }
            if self.members[..index].iter().any(|other| other.name == name) {
                return Err(SettingsError::Twice { name });
            }
        }
        if let Some(name) = self.bootstrap.iter().find(|name| self.seat_of(name.as_str()).is_none()) {
            return Err(SettingsError::Unlisted { name: name.clone() });
        }
        if self.replica.cap == 0 {
            return Err(SettingsError::NoCap);
        }
        let (rounds, replica) = (self.rounds.lockstep, self.replica.lockstep);
        if rounds != replica {
            return Err(SettingsError::Lockstep { rounds, replica });
        }
        self.kv.validate()?;
        if self.batch.kv != self.kv.shape() {
            return Err(SettingsError::Pools);
        }
        batch::Batch::new(self.batch.clone())?;
        self.replica.placement.validate()?;
        let context = self.context_tokens_max;
        match self.batch.too_small(context) {
            None => Ok(()),
            Some(batch::TooSmall { life_cycle, wanted, blocks }) => {
                let block_tokens = self.kv.cache.block_tokens.get();
                Err(SettingsError::PoolTooSmall { context, life_cycle, wanted, blocks, block_tokens })
            }
        }
    }
}
