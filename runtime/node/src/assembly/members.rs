//! The members of the cluster, and this node's mesh to them.

use crate::config::{Config, Problem};
use starling_actors::Node;
use starling_serving::MemberSettings;
use starling_transport::{Limits, Mesh, MeshError, MeshSettings, NodeName, NodeNameError, Timings};
use std::time::{SystemTime, UNIX_EPOCH};

/// Why a node cannot take part in its cluster.
#[derive(Debug, thiserror::Error)]
pub enum MembersError {
    #[error(transparent)]
    Name(#[from] NodeNameError),
    #[error("{0}")]
    Credentials(Problem),
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

/// The members in view order, and which of them this node is. Without a list it is a cluster of its own.
pub fn list(config: &Config) -> Result<(Vec<MemberSettings>, usize), MembersError> {
    let members: Vec<MemberSettings> = config
        .cluster
        .members
        .iter()
        .map(|member| MemberSettings { name: member.name.clone(), ranks: member.ranks })
        .collect();
    if members.is_empty() {
        let name = NodeName::new(&config.node.name)?;
        return Ok((vec![MemberSettings { name, ranks: config.ranks.count }], 0));
    }
    // The configuration was checked: the node is among its members.
    let me = members.iter().position(|member| member.name.as_str() == config.node.name).unwrap_or(members.len());
    Ok((members, me))
}

/// Listens for the other members and keeps a link to each; nothing where this node is alone.
pub async fn join(config: &Config, actors: &Node) -> Result<Option<Mesh>, MembersError> {
    if config.cluster.members.len() < 2 {
        return Ok(None);
    }
    let settings = MeshSettings {
        incarnation: life_of_process(),
        settings_digest: config.settings_digest(),
        listen: config.mesh.listen,
        credentials: config.credentials().map_err(MembersError::Credentials)?,
        limits: Limits { lanes: config.mesh.lanes, ..Limits::default() },
        timings: Timings::default(),
    };
    let mesh = Mesh::start(settings, actors.mesh_handler()).await?;
    for member in config.cluster.members.iter().filter(|member| member.name.as_str() != config.node.name) {
        mesh.connect(member.name.clone(), member.mesh.to_string());
    }
    Ok(Some(mesh))
}

/// Microseconds since 1970 at its start: a later life of a name has a greater number, by which peers know it for one.
fn life_of_process() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX).max(1)
}
