//! Nodes of one test: their folder, certificates, configurations, processes.

use super::client::Client;
use super::process::{Process, command, eventually, succeed};
use starling_gpu::testing::TinyModel;
use std::fmt::Write;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// How many prompts and answers a test has room for.
const CONTEXT_TOKENS: u32 = 4096;
const CLUSTER: &str = "flock";
/// What clients call the model, whichever it is.
pub const MODEL: &str = "tiny";

/// Writes the model that all these tests serve, and returns its path.
pub fn model(folder: &Path) -> PathBuf {
    let path = folder.join("tiny.gguf");
    TinyModel { context: CONTEXT_TOKENS, ..TinyModel::default() }.write(&path).unwrap();
    path
}

/// What a node computes with.
struct Engine<'a> {
    kind: &'a str,
    model: &'a Path,
}

pub struct Cluster {
    pub nodes: Vec<Node>,
    _folder: TempDir,
}

pub struct Node {
    pub name: String,
    config: PathBuf,
    log: PathBuf,
    /// `None` while it is dead.
    process: Option<Process>,
    client: Option<Client>,
}

impl Cluster {
    /// Starts `count` nodes that are members of one cluster, `ranks` ranks each, and waits until all are ready. `more` is
    /// added to each configuration: whole lines with dotted keys.
    pub async fn start(count: usize, ranks: u32, more: &str) -> Self {
        let mut cluster = Self::launch(&vec![more; count], ranks).await;
        cluster.ready().await;
        cluster
    }

    /// Likewise with lines of its own for each node, and waits for their listeners only.
    pub async fn launch(mores: &[&str], ranks: u32) -> Self {
        let folder = TempDir::new().unwrap();
        let texts = members(folder.path(), mores, ranks).await;
        Self::timed(folder, texts).await
    }

    /// Starts members with one rank each, which really compute the model in this file.
    pub async fn computing(count: usize, model: &Path, more: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let texts = members(folder.path(), &vec![more; count], 1).await;
        let mut cluster = Self::of(folder, texts, &Engine { kind: "cpu", model }).await;
        cluster.ready().await;
        cluster
    }

    /// Starts `count` nodes that know nothing of each other.
    pub async fn apart(count: usize, more: &str) -> Self {
        let mut cluster = Self::timed(TempDir::new().unwrap(), vec![more.to_owned(); count]).await;
        cluster.ready().await;
        cluster
    }

    async fn timed(folder: TempDir, texts: Vec<String>) -> Self {
        let model = model(folder.path());
        Self::of(folder, texts, &Engine { kind: "timed", model: &model }).await
    }

    async fn of(folder: TempDir, texts: Vec<String>, engine: &Engine<'_>) -> Self {
        let mut nodes = Vec::new();
        for (at, text) in texts.into_iter().enumerate() {
            let name = format!("node-{at}");
            let mut config =
                format!("node.name = '{name}'\napi.listen = '127.0.0.1:0'\nadmin.listen = '127.0.0.1:0'\n");
            let _ = write!(
                config,
                "model.id = '{MODEL}'\nmodel.path = '{}'\nengine.kind = '{}'\nengine.kv-memory = '64MiB'\n",
                engine.model.display(),
                engine.kind,
            );
            let path = folder.path().join(format!("{name}.toml"));
            std::fs::write(&path, config + &text).unwrap();
            let log = folder.path().join(format!("{name}.log"));
            nodes.push(Node { name, config: path, log, process: None, client: None });
        }
        for node in &mut nodes {
            node.spawn();
        }
        let mut cluster = Self { nodes, _folder: folder };
        cluster.listening().await;
        cluster
    }

    /// Waits until every node is ready.
    pub async fn ready(&mut self) {
        self.listening().await;
        for node in &self.nodes {
            eventually(&node.name, async || node.client().ready().await).await;
        }
    }

    async fn listening(&mut self) {
        for node in &mut self.nodes {
            node.listening().await;
        }
    }

    /// The client of the node at this place.
    pub fn client(&self, at: usize) -> &Client {
        self.nodes[at % self.nodes.len()].client()
    }
}

/// What the members of one cluster have in their configurations beside `mores`; writes their certificates into the folder.
async fn members(folder: &Path, mores: &[&str], ranks: u32) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    succeed(["cert", "authority", "--cluster", CLUSTER, "--out", &path("")]).await;
    // All are held until the last is found, so that no two are the same.
    let held: Vec<UdpSocket> = mores.iter().map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    let meshes: Vec<String> = held.iter().map(|socket| socket.local_addr().unwrap().to_string()).collect();
    let members = meshes.iter().enumerate().map(|(at, mesh)| format!("'node-{at}={mesh}/{ranks}'"));
    let members = members.collect::<Vec<_>>().join(", ");
    let mut texts = Vec::new();
    for (at, (mesh, more)) in meshes.iter().zip(mores).enumerate() {
        let name = format!("node-{at}");
        succeed(["cert", "node", "--name", &name, "--authority", &path(""), "--out", &path("")]).await;
        let files = [path("authority.pem"), path(&format!("{name}.pem")), path(&format!("{name}-key.pem"))];
        let [authority, certificate, key] = files;
        texts.push(format!(
            "{more}cluster.name = '{CLUSTER}'\ncluster.members = [{members}]\nmesh.listen = '{mesh}'\n\
                 mesh.authority = '{authority}'\nmesh.certificate = '{certificate}'\nmesh.key = '{key}'\n"
        ));
    }
    drop(held);
    texts
}

impl Node {
    fn spawn(&mut self) {
        let config = self.config.to_str().unwrap();
        let command = command(["serve", "--supervised", "--config", config]);
        self.process = Some(Process::start(&self.name, command, &self.log));
    }

    /// Reads where its listeners are, if it has not been read yet.
    async fn listening(&mut self) {
        if self.client.is_none() {
            let process = self.process.as_mut().unwrap_or_else(|| panic!("{} is dead", self.name));
            self.client = Some(Client::new(&process.event().await["nodes"][0]));
        }
    }

    pub fn client(&self) -> &Client {
        self.client.as_ref().unwrap_or_else(|| panic!("{} does not listen", self.name))
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().unwrap_or_else(|| panic!("{} is dead", self.name))
    }

    pub fn log(&self) -> String {
        self.process().log()
    }

    /// Stops it in the middle of whatever it does, and returns once it stands still.
    pub async fn freeze(&self) {
        self.process().signal("STOP").await;
        eventually(&format!("{} is stopped", self.name), async || match self.process().state() {
            None | Some('T') => Ok(()),
            Some(state) => Err(format!("its state is {state}")),
        })
        .await;
    }

    pub async fn thaw(&self) {
        self.process().signal("CONT").await;
    }

    /// Kills it and waits until it is gone.
    pub async fn kill(&mut self) {
        self.process().signal("KILL").await;
        let mut process = self.process.take().unwrap_or_else(|| panic!("{} is dead", self.name));
        process.ended().await;
        self.client = None;
    }

    /// Asks it to drain, and returns its exit code.
    pub async fn terminate(&mut self) -> Option<i32> {
        self.process().signal("TERM").await;
        let mut process = self.process.take().unwrap_or_else(|| panic!("{} is dead", self.name));
        self.client = None;
        process.ended().await.code()
    }

    /// Starts it again as it was; see [`Cluster::ready`].
    pub fn restart(&mut self) {
        assert!(self.process.is_none(), "{} runs", self.name);
        self.spawn();
    }
}
