//! The tables `[cluster]` and `[mesh]`: who takes part, and how this node reaches the others.

use super::units::HostPort;
use super::{Config, Problem};
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use starling_transport::{Credentials, NodeName};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// The cluster that this node is part of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Cluster {
    /// Name of the cluster, as the certificates say it: a-z, 0-9 and `-`, a letter first, at most 63. Nodes of another
    /// cluster are refused.
    pub name: String,
    /// Milliseconds after which a member that is not heard from is suspected, and left out of the view if most others are heard.
    pub suspect_after_ms: u64,
    /// Milliseconds for which suspicions are gathered before it is chosen who is left out.
    pub suspicion_gather_ms: u64,
    /// Milliseconds that a member may take to report how far it came before a change of the view goes on without it.
    pub report_after_ms: u64,
    /// Milliseconds that a change of the view may take before new requests are refused, and that a member which was left out
    /// votes on at most.
    pub change_ms_max: u64,
    /// Milliseconds, up to twice as many, after which a leader of changes that is silent is replaced; at most a quarter of
    /// `suspect-after-ms` is used.
    pub election_ms: u64,
    /// Names of the members that found the cluster: all of them have to be there once. The others join. Empty: all members.
    #[schemars(with = "Vec<String>")]
    pub bootstrap: Vec<NodeName>,
    /// Ranks of all nodes step together: a round is one step.
    pub lockstep: bool,
    /// Seconds that an open stream waits for the node that runs it before it ends with an error.
    pub stream_wait_s: u64,
    /// All nodes that may be members, this node among them, at most 64, each
    /// `{ name = "node-0", mesh = "10.0.0.1:8002", ranks = 1 }`; `ranks` is 1 if it is left out. The list is the same on
    /// every node. Without one the node is a cluster of its own and opens no mesh. In the environment variable a member
    /// is written `node-0=10.0.0.1:8002/1`.
    pub members: Vec<Member>,
}

/// One member of the cluster, written as a table or as `NAME=HOST:PORT/RANKS`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Member {
    /// Name of the node, as its certificate says it: a-z, 0-9 and `-`, a letter first, at most 63.
    #[schemars(with = "String")]
    pub name: NodeName,
    /// Host and UDP port by which the others reach its mesh.
    pub mesh: HostPort,
    /// Ranks that it hosts.
    #[serde(default = "one_rank")]
    pub ranks: u32,
}

/// How this node meets the other members: QUIC, both sides authenticated by certificates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Mesh {
    /// Address and UDP port.
    #[serde(deserialize_with = "super::units::address")]
    #[schemars(with = "String")]
    pub listen: SocketAddr,
    /// Certificate of the authority that all members trust (PEM). `starling cert` makes one for development.
    pub authority: Option<PathBuf>,
    /// This node's certificate (PEM).
    pub certificate: Option<PathBuf>,
    /// The certificate's private key (PEM).
    pub key: Option<PathBuf>,
    /// Streams of messages to each peer that do not hold each other up, 1 to 4; both sides use the smaller number.
    pub lanes: u8,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            name: "starling".into(),
            suspect_after_ms: 2000,
            suspicion_gather_ms: 200,
            report_after_ms: 1000,
            change_ms_max: 5000,
            election_ms: 500,
            bootstrap: Vec::new(),
            lockstep: false,
            stream_wait_s: 30,
            members: Vec::new(),
        }
    }
}

impl Default for Mesh {
    fn default() -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 8002));
        Self { listen, authority: None, certificate: None, key: None, lanes: 2 }
    }
}

impl Config {
    /// This node's entry in the list of members.
    pub fn own_member(&self) -> Option<&Member> {
        self.cluster.members.iter().find(|member| member.name.as_str() == self.node.name)
    }

    /// Reads the files of `[mesh]`. They are looked at as a peer would, whose refusal could say less.
    ///
    /// # Errors
    /// A file that is not given, cannot be read or does not belong to the others, or a certificate of another node or
    /// cluster.
    pub fn credentials(&self) -> Result<Credentials, Problem> {
        let Mesh { authority, certificate, key, .. } = &self.mesh;
        let read = |name: &str, path: &Option<PathBuf>| {
            let members = self.cluster.members.len();
            let missing = || format!("not given, and a cluster of {members} members needs it (see starling cert)");
            let path = path.as_ref().ok_or_else(|| Problem::new(name, missing()))?;
            std::fs::read(path).map_err(|e| Problem::new(name, format!("cannot read {path:?}: {e}")))
        };
        let authority = read("mesh.authority", authority)?;
        let chain = read("mesh.certificate", certificate)?;
        let key = read("mesh.key", key)?;
        let of_certificate = |what| Problem::new("mesh.certificate", what);
        let credentials = Credentials::from_pem(&authority, &chain, &key).map_err(|e| of_certificate(e.to_string()))?;
        let (node, cluster) = (credentials.name().as_str(), credentials.cluster());
        if node != self.node.name || cluster != self.cluster.name {
            let (name, of) = (&self.node.name, &self.cluster.name);
            let what = format!("is of node {node} in cluster {cluster}, and this is node {name} in cluster {of}");
            return Err(of_certificate(what));
        }
        Ok(credentials)
    }
}

const fn one_rank() -> u32 {
    1
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}/{}", self.name, self.mesh, self.ranks)
    }
}

impl FromStr for Member {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a member such as \"node-0=10.0.0.1:8002/1\"");
        let (name, place) = text.split_once('=').ok_or_else(wrong)?;
        let (mesh, ranks) = match place.rsplit_once('/') {
            Some((mesh, ranks)) => (mesh, ranks.trim().parse().map_err(|_| wrong())?),
            None => (place, one_rank()),
        };
        let name = NodeName::new(name.trim()).map_err(|e| e.to_string())?;
        let mesh = mesh.trim().parse().map_err(|e: super::UnitError| e.to_string())?;
        Ok(Self { name, mesh, ranks })
    }
}

impl<'de> Deserialize<'de> for Member {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        struct Written {
            name: NodeName,
            mesh: HostPort,
            #[serde(default = "one_rank")]
            ranks: u32,
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Member;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member: a table of name, mesh and ranks")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Member, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Member, A::Error> {
                let Written { name, mesh, ranks } = Written::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Member { name, mesh, ranks })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_written_on_one_line_too() {
        for (text, ranks) in [("node-0=10.0.0.1:8002/4", 4), ("a=b.example:1", 1), ("a = [::1]:65535 / 2", 2)] {
            let member: Member = text.parse().unwrap();
            assert_eq!(member.ranks, ranks);
            assert_eq!(member.to_string().parse(), Ok(member));
        }
        for (wrong, says) in [
            ("node-0", "\"node-0\" is not a member such as"),
            ("Node=h:1", "node name \"Node\" is not"),
            ("a=h", "\"h\" is not a host and port"),
            ("a=h:0", "\"h:0\" is not a host and port"),
            ("a=h:1/two", "\"a=h:1/two\" is not a member"),
            ("a=h:1/", "\"a=h:1/\" is not a member"),
        ] {
            let error = wrong.parse::<Member>().unwrap_err();
            assert!(error.starts_with(says), "{wrong}: {error}");
        }
    }
}
