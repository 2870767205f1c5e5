//! `starling cert`: an authority and certificates of nodes, for development. In production a real authority makes them.

use clap::{Args, Subcommand};
use starling_transport::{Authority, CertificateError, NodeName};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct CertArgs {
    #[command(subcommand)]
    pub command: CertCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum CertCommand {
    /// Makes an authority: DIR/authority.pem, which every node trusts, and DIR/authority-key.pem.
    Authority {
        /// Name of the cluster whose nodes it certifies.
        #[arg(long, value_name = "NAME")]
        cluster: String,
        #[command(flatten)]
        out: Out,
    },
    /// Makes a node's certificate and key: DIR/NAME.pem and DIR/NAME-key.pem.
    Node {
        /// Name of the node.
        #[arg(long, value_parser = node_name)]
        name: NodeName,
        /// Folder of the authority.
        #[arg(long, value_name = "DIR")]
        authority: PathBuf,
        /// Days for which the certificate is valid.
        #[arg(long, value_name = "D", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
        #[command(flatten)]
        out: Out,
    },
}

#[derive(Clone, Debug, Args)]
pub struct Out {
    /// Folder to write to; made if it is not there.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Replaces files that are there.
    #[arg(long)]
    pub force: bool,
}

fn node_name(text: &str) -> Result<NodeName, String> {
    NodeName::new(text).map_err(|e| e.to_string())
}

/// Why no certificate was written.
#[derive(Debug, thiserror::Error)]
pub enum CertError {
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    #[error("{0:?} is there already; --force replaces it")]
    Exists(PathBuf),
    #[error("cannot {verb} {path:?}: {source}")]
    Io { verb: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
}

/// Where a certificate and its private key lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Pair {
    fn of(folder: &Path, name: &str) -> Self {
        Self { certificate: folder.join(format!("{name}.pem")), key: folder.join(format!("{name}-key.pem")) }
    }
}

const AUTHORITY: &str = "authority";

impl CertCommand {
    /// Does what the command says and prints the paths of what it wrote.
    ///
    /// # Errors
    /// A name that is none, files that are in the way, or an authority that cannot be read.
    pub fn run(&self, to: &mut impl Write) -> Result<(), CertError> {
        let written = match self {
            Self::Authority { cluster, out } => write_authority(&Authority::new(cluster)?, out)?,
            Self::Node { name, authority, days, out } => write_node(&read_authority(authority)?, name, *days, out)?,
        };
        for path in [written.certificate, written.key] {
            writeln!(to, "{}", path.display())?;
        }
        Ok(())
    }
}

/// Writes an authority's certificate and key.
///
/// # Errors
/// Files that are in the way or cannot be written.
pub fn write_authority(authority: &Authority, out: &Out) -> Result<Pair, CertError> {
    write(Pair::of(&out.out, AUTHORITY), (&authority.certificate_pem(), &authority.key_pem()), out)
}

/// Makes and writes a node's certificate and key.
///
/// # Errors
/// Files that are in the way or cannot be written.
pub fn write_node(authority: &Authority, name: &NodeName, days: u32, out: &Out) -> Result<Pair, CertError> {
    let made = authority.issue(name, days)?;
    write(Pair::of(&out.out, name.as_str()), (&made.certificate_pem, &made.key_pem), out)
}

fn read_authority(folder: &Path) -> Result<Authority, CertError> {
    let pair = Pair::of(folder, AUTHORITY);
    let read = |path: &Path| fs::read_to_string(path).map_err(io_error("read", path));
    Ok(Authority::from_pem(&read(&pair.certificate)?, &read(&pair.key)?)?)
}

fn write(pair: Pair, (certificate, key): (&str, &str), out: &Out) -> Result<Pair, CertError> {
    fs::create_dir_all(&out.out).map_err(io_error("create", &out.out))?;
    for path in [&pair.certificate, &pair.key] {
        // A link that leads nowhere is in the way too.
        match fs::symlink_metadata(path) {
            Ok(_) if !out.force => return Err(CertError::Exists(path.clone())),
            Ok(_) => fs::remove_file(path).map_err(io_error("replace", path))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io_error("write", path)(e)),
        }
    }
    // The key first: a certificate without its key is of no use.
    create(&pair.key, key, 0o600)?;
    create(&pair.certificate, certificate, 0o644)?;
    Ok(pair)
}

/// Writes a file that is not there, with these permissions from its first moment.
fn create(path: &Path, text: &str, mode: u32) -> Result<(), CertError> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.map_err(io_error("create", path))?;
    file.write_all(text.as_bytes()).map_err(io_error("write", path))
}

fn io_error(verb: &'static str, path: &Path) -> impl Fn(io::Error) -> CertError {
    move |source| CertError::Io { verb, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling_transport::Credentials;
    use std::os::unix::fs::PermissionsExt;
    use tempfile::TempDir;

    fn run(command: &CertCommand) -> Result<Vec<PathBuf>, CertError> {
        let mut printed = Vec::new();
        command.run(&mut printed)?;
        Ok(String::from_utf8(printed).unwrap().lines().map(PathBuf::from).collect())
    }

    fn authority(folder: &Path, force: bool) -> CertCommand {
        CertCommand::Authority { cluster: "flock".into(), out: Out { out: folder.join("ca"), force } }
    }

    fn node(folder: &Path, force: bool) -> CertCommand {
        CertCommand::Node {
            name: NodeName::new("node-1").unwrap(),
            authority: folder.join("ca"),
            days: 30,
            out: Out { out: folder.join("deep/node"), force },
        }
    }

    #[test]
    fn an_authority_certifies_a_node_that_its_peers_accept() {
        let folder = TempDir::new().unwrap();
        let of_authority = run(&authority(folder.path(), false)).unwrap();
        let of_node = run(&node(folder.path(), false)).unwrap();
        assert_eq!(of_node, ["node-1.pem", "node-1-key.pem"].map(|name| folder.path().join("deep/node").join(name)));
        let read = |path: &PathBuf| fs::read(path).unwrap();
        let credentials =
            Credentials::from_pem(&read(&of_authority[0]), &read(&of_node[0]), &read(&of_node[1])).unwrap();
        assert_eq!((credentials.name().as_str(), credentials.cluster()), ("node-1", "flock"));
        for key in [&of_authority[1], &of_node[1]] {
            assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600, "{key:?}");
        }
    }

    #[test]
    fn what_is_there_is_replaced_only_by_force() {
        let folder = TempDir::new().unwrap();
        let paths = run(&authority(folder.path(), false)).unwrap();
        let before = fs::read(&paths[1]).unwrap();
        let error = run(&authority(folder.path(), false)).unwrap_err();
        assert!(matches!(&error, CertError::Exists(path) if *path == paths[0]), "{error}");
        fs::remove_file(&paths[0]).unwrap();
        let error = run(&authority(folder.path(), false)).unwrap_err();
        assert!(matches!(&error, CertError::Exists(path) if *path == paths[1]), "{error}");
        assert_eq!(fs::read(&paths[1]).unwrap(), before);

        fs::set_permissions(&paths[1], fs::Permissions::from_mode(0o644)).unwrap();
        run(&authority(folder.path(), true)).unwrap();
        assert_ne!(fs::read(&paths[1]).unwrap(), before);
        assert_eq!(fs::metadata(&paths[1]).unwrap().permissions().mode() & 0o777, 0o600);
        run(&node(folder.path(), false)).unwrap();
    }

    #[test]
    fn what_is_wrong_is_named() {
        let folder = TempDir::new().unwrap();
        let error = run(&node(folder.path(), false)).unwrap_err().to_string();
        assert!(error.starts_with("cannot read ") && error.contains("ca/authority.pem"), "{error}");
        let out = Out { out: folder.path().join("ca"), force: false };
        let error = run(&CertCommand::Authority { cluster: "A B".into(), out }).unwrap_err().to_string();
        assert!(error.contains("\"A B\""), "{error}");
        run(&authority(folder.path(), false)).unwrap();
        fs::write(folder.path().join("ca/authority-key.pem"), "no key").unwrap();
        let error = run(&node(folder.path(), false)).unwrap_err();
        assert!(matches!(error, CertError::Certificate(_)), "{error}");
        fs::write(folder.path().join("deep"), "a file").unwrap();
        run(&authority(folder.path(), true)).unwrap();
        let error = run(&node(folder.path(), false)).unwrap_err().to_string();
        assert!(error.starts_with("cannot create ") && error.contains("deep"), "{error}");
    }
}
