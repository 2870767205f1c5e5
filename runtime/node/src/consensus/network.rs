//! How lives of the consensus group reach each other: questions to the other node's actor, over the mesh.

use super::store::Types;
use openraft::error::{InstallSnapshotError, RPCError, RaftError, Unreachable};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse, VoteRequest,
    VoteResponse,
};
use openraft::{BasicNode, Raft};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Address, Carrier, Context, Node, NodeName, Reply, TraceContext};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What its actor is called on every node.
pub const ACTOR: &str = "consensus";

#[derive(Serialize, Deserialize)]
pub enum Message {
    Ask { of: u64, request: Box<Request>, reply: Reply<Answer> },
}

#[derive(Clone, Serialize, Deserialize)]
pub enum Request {
    Append(AppendEntriesRequest<Types>),
    Vote(VoteRequest<u64>),
    Snapshot(InstallSnapshotRequest<Types>),
}

#[derive(Serialize, Deserialize)]
pub enum Answer {
    Append(AppendEntriesResponse<u64>),
    Vote(VoteResponse<u64>),
    Snapshot(InstallSnapshotResponse<u64>),
    /// That life is not here, or not any more.
    Failed(String),
}

/// The lives of this process that take part: the newest, and those before it that still vote.
#[derive(Clone, Default)]
pub struct Lives(Arc<Mutex<BTreeMap<u64, Raft<Types>>>>);

impl Lives {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Raft<Types>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, life: u64, raft: Raft<Types>) {
        self.all().insert(life, raft);
    }

    pub fn remove(&self, life: u64) {
        self.all().remove(&life);
    }

    fn get(&self, life: u64) -> Option<Raft<Types>> {
        self.all().get(&life).cloned()
    }
}

/// Answers for the lives of this process.
pub struct Port(pub Lives);

impl Actor for Port {
    type Message = Message;

    fn handle(&mut self, _: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        let Message::Ask { of, request, reply } = message;
        match self.0.get(of) {
            // It answers in its own time, and others are not kept waiting for it.
            Some(raft) => drop(tokio::spawn(async move { reply.send(answer(&raft, *request).await) })),
            None => reply.send(Answer::Failed(format!("life {of:016x} is not here"))),
        }
        Ok(())
    }

    fn kind(_: &Message) -> &'static str {
        "ask"
    }
}

async fn answer(raft: &Raft<Types>, request: Request) -> Answer {
    let failed = |error: &dyn std::error::Error| Answer::Failed(error.to_string());
    match request {
        Request::Append(request) => {
            raft.append_entries(request).await.map_or_else(|error| failed(&error), Answer::Append)
        }
        Request::Vote(request) => raft.vote(request).await.map_or_else(|error| failed(&error), Answer::Vote),
        Request::Snapshot(request) => {
            raft.install_snapshot(request).await.map_or_else(|error| failed(&error), Answer::Snapshot)
        }
    }
}

/// Makes the way to each life of the group.
#[derive(Clone)]
pub struct Network(pub Node);

impl RaftNetworkFactory<Types> for Network {
    type Network = Way;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Way {
        let here = node.addr == self.0.name();
        let address = match NodeName::new(&node.addr) {
            Ok(_) if here => Some(self.0.address(ACTOR)),
            Ok(name) => Some(self.0.remote(&name, ACTOR).over(Carrier::Rounds)),
            Err(_) => None,
        };
        Way { target, address }
    }
}

/// To one life.
pub struct Way {
    target: u64,
    /// None for a name that no node can have.
    address: Option<Address<Message>>,
}

type Failed<E = openraft::error::Infallible> = RPCError<u64, BasicNode, RaftError<u64, E>>;

impl Way {
    async fn ask<E: std::error::Error>(&self, request: Request, option: &RPCOption) -> Result<Answer, Failed<E>> {
        let unreachable = |why: String| RPCError::Unreachable(Unreachable::new(&io::Error::other(why)));
        let address = self.address.as_ref().ok_or_else(|| unreachable("no name".to_owned()))?;
        let (of, request) = (self.target, Box::new(request));
        let question = |reply| Message::Ask { of, request: request.clone(), reply };
        match address.ask(TraceContext::default(), option.hard_ttl(), question).await {
            Ok(Answer::Failed(why)) => Err(unreachable(why)),
            Ok(answer) => Ok(answer),
            Err(error) => Err(unreachable(error.to_string())),
        }
    }
}

fn misplaced<E: std::error::Error>() -> Failed<E> {
    RPCError::Unreachable(Unreachable::new(&io::Error::other("an answer to another question")))
}

impl RaftNetwork<Types> for Way {
    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, Failed> {
        match self.ask(Request::Append(request), &option).await? {
            Answer::Append(answer) => Ok(answer),
            _ => Err(misplaced()),
        }
    }

    async fn install_snapshot(
        &mut self,
        request: InstallSnapshotRequest<Types>,
        option: RPCOption,
    ) -> Result<InstallSnapshotResponse<u64>, Failed<InstallSnapshotError>> {
        match self.ask(Request::Snapshot(request), &option).await? {
            Answer::Snapshot(answer) => Ok(answer),
            _ => Err(misplaced()),
        }
    }

    async fn vote(&mut self, request: VoteRequest<u64>, option: RPCOption) -> Result<VoteResponse<u64>, Failed> {
        match self.ask(Request::Vote(request), &option).await? {
            Answer::Vote(answer) => Ok(answer),
            _ => Err(misplaced()),
        }
    }
}
