//! What openraft keeps, and what it is kept in: memory. A life that is gone never comes back, so nobody asks for its log.
//!
//! All of openraft's storage traits are here; when it changes them, this file and its network's are what changes.

use openraft::storage::{LogFlushed, LogState, RaftLogStorage, RaftStateMachine, Snapshot};
use openraft::{
    BasicNode, EntryPayload, LogId, OptionalSend, RaftLogReader, RaftSnapshotBuilder, SnapshotMeta, StorageError,
    StorageIOError, StoredMembership, Vote,
};
use starling_serving::log::{Entry, Keeper, Sink};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::Cursor;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

openraft::declare_raft_types!(
    /// Lives vote; nodes are named.
    pub Types:
        D = Entry,
        R = (),
        NodeId = u64,
        Node = BasicNode,
);

type Failed = StorageError<u64>;

/// The log, and the vote of this life.
#[derive(Clone, Default)]
pub struct Store(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    vote: Option<Vote<u64>>,
    entries: BTreeMap<u64, openraft::Entry<Types>>,
    purged: Option<LogId<u64>>,
    committed: Option<LogId<u64>>,
}

impl Store {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RaftLogReader<Types> for Store {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: R,
    ) -> Result<Vec<openraft::Entry<Types>>, Failed> {
        Ok(self.kept().entries.range(range).map(|(_, entry)| entry.clone()).collect())
    }
}

impl RaftLogStorage<Types> for Store {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, Failed> {
        let kept = self.kept();
        let last = kept.entries.values().next_back().map(|entry| entry.log_id).or(kept.purged);
        Ok(LogState { last_purged_log_id: kept.purged, last_log_id: last })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote<u64>) -> Result<(), Failed> {
        self.kept().vote = Some(*vote);
        Ok(())
    }

    async fn read_vote(&mut self) -> Result<Option<Vote<u64>>, Failed> {
        Ok(self.kept().vote)
    }

    async fn save_committed(&mut self, committed: Option<LogId<u64>>) -> Result<(), Failed> {
        self.kept().committed = committed;
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId<u64>>, Failed> {
        Ok(self.kept().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: LogFlushed<Types>) -> Result<(), Failed>
    where
        I: IntoIterator<Item = openraft::Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.kept().entries.extend(entries.into_iter().map(|entry| (entry.log_id.index, entry)));
        callback.log_io_completed(Ok(()));
        Ok(())
    }

    async fn truncate(&mut self, from: LogId<u64>) -> Result<(), Failed> {
        self.kept().entries.split_off(&from.index);
        Ok(())
    }

    async fn purge(&mut self, upto: LogId<u64>) -> Result<(), Failed> {
        let mut kept = self.kept();
        kept.entries = kept.entries.split_off(&(upto.index + 1));
        kept.purged = Some(upto);
        Ok(())
    }
}

/// The log's state, shared with whoever tends the group.
#[derive(Clone)]
pub struct Applied(Arc<Mutex<State>>);

struct State {
    keeper: Keeper,
    sink: Sink,
    last: Option<LogId<u64>>,
    membership: StoredMembership<u64, BasicNode>,
    snapshot: Option<(SnapshotMeta<u64, BasicNode>, Vec<u8>)>,
}

impl Applied {
    pub fn new(keeper: Keeper, sink: Sink) -> Self {
        let (last, membership, snapshot) = Default::default();
        Self(Arc::new(Mutex::new(State { keeper, sink, last, membership, snapshot })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the log's state.
    pub fn look<T>(&self, look: impl FnOnce(&Keeper) -> T) -> T {
        look(&self.state().keeper)
    }
}

impl RaftStateMachine<Types> for Applied {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId<u64>>, StoredMembership<u64, BasicNode>), Failed> {
        let state = self.state();
        Ok((state.last, state.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<()>, Failed>
    where
        I: IntoIterator<Item = openraft::Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut answers = Vec::new();
        let mut state = self.state();
        for entry in entries {
            state.last = Some(entry.log_id);
            match entry.payload {
                EntryPayload::Blank => {}
                EntryPayload::Normal(of_log) => {
                    if let Some(news) = state.keeper.apply(entry.log_id.index, of_log) {
                        (state.sink)(news);
                    }
                }
                EntryPayload::Membership(membership) => {
                    state.membership = StoredMembership::new(Some(entry.log_id), membership);
                }
            }
            answers.push(());
        }
        Ok(answers)
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<Cursor<Vec<u8>>>, Failed> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta<u64, BasicNode>,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Result<(), Failed> {
        let bytes = snapshot.into_inner();
        let unreadable = |error| StorageIOError::read_snapshot(Some(meta.signature()), &error);
        let agreed = serde_json::from_slice(&bytes).map_err(unreadable)?;
        let mut state = self.state();
        (state.last, state.membership) = (meta.last_log_id, meta.last_membership.clone());
        state.snapshot = Some((meta.clone(), bytes));
        if let Some(agreed) = agreed {
            let news = state.keeper.restore(agreed);
            (state.sink)(news);
        }
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<Types>>, Failed> {
        let kept = self.state().snapshot.clone();
        Ok(kept.map(|(meta, bytes)| Snapshot { meta, snapshot: Box::new(Cursor::new(bytes)) }))
    }
}

impl RaftSnapshotBuilder<Types> for Applied {
    async fn build_snapshot(&mut self) -> Result<Snapshot<Types>, Failed> {
        let mut state = self.state();
        let bytes =
            serde_json::to_vec(&state.keeper.agreed()).map_err(|error| StorageIOError::write_snapshot(None, &error))?;
        let meta = SnapshotMeta {
            last_log_id: state.last,
            last_membership: state.membership.clone(),
            snapshot_id: state.last.map_or_else(|| "empty".to_owned(), |last| last.to_string()),
        };
        state.snapshot = Some((meta.clone(), bytes.clone()));
        Ok(Snapshot { meta, snapshot: Box::new(Cursor::new(bytes)) })
    }
}
