//! What the nodes of a cluster on one machine need before they start: a folder with an authority, and for each node a
//! certificate, a configuration and a place for its log.

use super::ClusterError;
use crate::cli::cert::{self, Out};
use crate::config::{Config, HostPort, Member};
use starling_transport::{Authority, NodeName};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use toml::Table;

/// A cluster on one machine lives for as long as somebody looks at it.
const CERTIFICATE_DAYS: u32 = 30;

/// The folder; gone when this is dropped, unless it is kept.
pub struct Folder(TempDir);

/// One node that is to be started.
#[derive(Debug)]
pub struct Plan {
    pub name: String,
    pub config: PathBuf,
    pub log: PathBuf,
}

impl Folder {
    /// # Errors
    /// No place for temporary files.
    pub fn new() -> Result<Self, ClusterError> {
        use std::os::unix::fs::PermissionsExt;
        // Keys lie in it.
        let private = std::fs::Permissions::from_mode(0o700);
        let made = tempfile::Builder::new().prefix("starling-up-").permissions(private).tempdir();
        made.map(Self).map_err(|source| ClusterError::Folder { path: std::env::temp_dir(), source })
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves the folder where it is.
    pub fn keep(&mut self) {
        self.0.disable_cleanup(true);
    }

    /// Writes everything that `nodes` nodes need which all are as `config` says.
    ///
    /// # Errors
    /// A file that cannot be written, ports that run out, or no free port for a mesh.
    pub fn fill(&self, config: &Config, nodes: u16) -> Result<Vec<Plan>, ClusterError> {
        listeners_are_apart(config, nodes)?;
        let authority = Authority::new(&config.cluster.name).map_err(cert::CertError::from)?;
        let out = Out { out: self.path().to_owned(), force: false };
        let trusted = cert::write_authority(&authority, &out)?.certificate;
        let meshes = free_ports(nodes)?;
        let names = (0..nodes).map(|node| NodeName::new(&format!("node-{node}")).expect("this is a label"));
        let members: Vec<Member> = names
            .zip(&meshes)
            .map(|(name, mesh)| Member { name, mesh: host_port(*mesh), ranks: config.ranks.count })
            .collect();
        let mut plans = Vec::new();
        for (at, (member, mesh)) in members.iter().zip(&meshes).enumerate() {
            let pair = cert::write_node(&authority, &member.name, CERTIFICATE_DAYS, &out)?;
            let mut own = of_all(config, nodes);
            own.node.name = member.name.as_str().to_owned();
            own.cluster.members.clone_from(&members);
            own.mesh.listen = *mesh;
            own.mesh.authority = Some(trusted.clone());
            (own.mesh.certificate, own.mesh.key) = (Some(pair.certificate), Some(pair.key));
            own.api.listen = counted(config.api.listen, at)?;
            own.admin.listen = counted(config.admin.listen, at)?;
            plans.push(self.write(&own)?);
        }
        Ok(plans)
    }

    fn write(&self, own: &Config) -> Result<Plan, ClusterError> {
        let name = own.node.name.clone();
        let (config, log) = (self.path().join(format!("{name}.toml")), self.path().join(format!("{name}.log")));
        let mut table = Table::try_from(own).expect("a configuration is plain tables of plain values");
        // Bearer keys reach the node as they reached this process: by its environment or by their file.
        table.get_mut("api").and_then(toml::Value::as_table_mut).map(|api| api.remove("keys"));
        let text = toml::to_string(&table).expect("a table is a document");
        std::fs::write(&config, text).map_err(|source| ClusterError::Folder { path: config.clone(), source })?;
        Ok(Plan { name, config, log })
    }
}

/// What all nodes share, but for their share of the threads.
fn of_all(config: &Config, nodes: u16) -> Config {
    let cores = std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX));
    let threads = config.engine.threads.unwrap_or(cores);
    let ranks = config.ranks.count;
    let mut own = config.clone();
    own.engine.threads = Some(ranks * (threads / (ranks * u32::from(nodes)).max(1)).max(1));
    own
}

/// UDP ports that nobody had a moment ago. The nodes must know each other's before any of them runs, so none can choose its own.
fn free_ports(nodes: u16) -> Result<Vec<SocketAddr>, ClusterError> {
    let bind = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
    // All are held until the last is found, so that no two are the same.
    let held = (0..nodes).map(|_| bind()).collect::<Result<Vec<_>, _>>();
    let addresses = held.and_then(|held| held.iter().map(UdpSocket::local_addr).collect());
    addresses.map_err(|source| ClusterError::MeshPort { source })
}

fn host_port(address: SocketAddr) -> HostPort {
    address.to_string().parse().expect("a bound address is a host and a port")
}

/// The listener of the node at this place: ports count up, and a free one stays a free one.
fn counted(listen: SocketAddr, at: usize) -> Result<SocketAddr, ClusterError> {
    if listen.port() == 0 {
        return Ok(listen);
    }
    let port = u16::try_from(at).ok().and_then(|at| listen.port().checked_add(at));
    Ok(SocketAddr::new(listen.ip(), port.ok_or(ClusterError::Ports { listen, nodes: at + 1 })?))
}

/// Both listeners of all nodes count up from a port; the one must not run into the other.
fn listeners_are_apart(config: &Config, nodes: u16) -> Result<(), ClusterError> {
    let (api, admin) = (config.api.listen, config.admin.listen);
    let chosen = api.port() != 0 && admin.port() != 0;
    if chosen && api.port().abs_diff(admin.port()) < nodes {
        return Err(ClusterError::Overlap { api, admin, nodes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;

    fn base(keys: &[(&str, toml::Value)]) -> Config {
        let mut sources = Sources::default();
        for (key, value) in [("api.listen", "127.0.0.1:0".into()), ("admin.listen", "127.0.0.1:0".into())] {
            crate::config::set(&mut sources.flags, key, toml::Value::String(value));
        }
        for (key, value) in keys {
            crate::config::set(&mut sources.flags, key, value.clone());
        }
        Config::load(&sources).unwrap()
    }

    fn load(plan: &Plan) -> Config {
        Config::load(&Sources { file: Some(plan.config.clone()), ..Sources::default() }).unwrap()
    }

    #[test]
    fn every_node_gets_a_configuration_that_is_right_and_agrees_with_the_others() {
        let keys = [("ranks.count", 2.into()), ("engine.threads", 16.into()), ("engine.block-tokens", 32.into())];
        let folder = Folder::new().unwrap();
        let plans = folder.fill(&base(&keys), 3).unwrap();
        let configs: Vec<Config> = plans.iter().map(load).collect();
        for (at, config) in configs.iter().enumerate() {
            assert_eq!(config.node.name, format!("node-{at}"));
            assert_eq!((config.cluster.members.len(), config.ranks.count, config.engine.block_tokens), (3, 2, 32));
            assert_eq!(config.engine.threads, Some(4), "16 threads for 6 ranks are 2 for each");
            assert_eq!(config.own_member().unwrap().mesh.to_string(), config.mesh.listen.to_string());
            assert_eq!(config.settings_digest(), configs[0].settings_digest());
        }
        let ports: BTreeSet<u16> = configs.iter().map(|config| config.mesh.listen.port()).collect();
        assert_eq!(ports.len(), 3);
        let one_thread = folder_of(&base(&[("engine.threads", 1.into())]), 3);
        assert!(one_thread.iter().all(|config| config.engine.threads == Some(1)));
    }

    fn folder_of(config: &Config, nodes: u16) -> Vec<Config> {
        let folder = Folder::new().unwrap();
        folder.fill(config, nodes).unwrap().iter().map(load).collect()
    }

    #[test]
    fn ports_that_are_given_count_up() {
        let at = |port: u16| toml::Value::from(format!("127.0.0.1:{port}"));
        let ports = |api, admin| {
            let configs = folder_of(&base(&[("api.listen", at(api)), ("admin.listen", at(admin))]), 3);
            let ports = configs.iter().map(|config| (config.api.listen.port(), config.admin.listen.port()));
            ports.collect::<Vec<_>>()
        };
        assert_eq!(ports(9000, 9100), [(9000, 9100), (9001, 9101), (9002, 9102)]);
        assert_eq!(ports(0, 9003), [(0, 9003), (0, 9004), (0, 9005)]);
        let folder = Folder::new().unwrap();
        let refused = |api, admin| {
            let config = base(&[("api.listen", at(api)), ("admin.listen", at(admin))]);
            folder.fill(&config, 3).unwrap_err().to_string()
        };
        assert!(refused(9000, 9002).contains("127.0.0.1:9000") && refused(9000, 9002).contains("127.0.0.1:9002"));
        let last = SocketAddr::from(([127, 0, 0, 1], 65_535));
        assert!(counted(last, 1).unwrap_err().to_string().contains("127.0.0.1:65535"));
    }

    #[test]
    fn the_folder_is_private_and_goes_unless_it_is_kept() {
        let folder = Folder::new().unwrap();
        let path = folder.path().to_owned();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(folder);
        assert!(!path.exists());
        let mut folder = Folder::new().unwrap();
        folder.keep();
        let path = folder.path().to_owned();
        drop(folder);
        assert!(path.is_dir());
        std::fs::remove_dir_all(path).unwrap();
    }
}
