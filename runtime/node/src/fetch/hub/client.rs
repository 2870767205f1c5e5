//! Downloads a model of the hub into the hub's own cache folder, which other programs share.
//!
//! `HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_CACHE` mean what they mean elsewhere. The small files come first and the
//! weights last: a cache that has the weights has everything, so it serves without the network.

use super::HubName;
use crate::fetch::{FetchError, Progress};
use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use hf_hub::repository::{HFRepository, RepoTypeModel};
use hf_hub::{HFClient, HFError};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// What a folder may have beside them.
const OPTIONAL: [&str; 4] =
    ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"];
/// Which file has which weights, where they are in several.
const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";

/// The hub, as the environment says where it is.
#[derive(Clone, Debug, Default)]
pub struct Hub {
    /// Replaces the environment's address of the hub.
    pub endpoint: Option<String>,
    /// Replaces the environment's cache folder.
    pub cache: Option<PathBuf>,
    /// Replaces how often, and after what time, a request that may succeed later is sent again.
    pub retries: Option<(usize, Duration)>,
    pub quiet: bool,
}

impl Hub {
    /// Path of the model, fetched first as far as it is not cached. Blocks; progress goes to standard error.
    ///
    /// # Errors
    /// A repository or file that is not there or not allowed, no network, a download that breaks off, a cache that cannot
    /// be written. Each names the repository and the file.
    pub fn fetch(&self, name: &HubName) -> Result<PathBuf, FetchError> {
        let failed = |why: String| FetchError::Hub { model: name.to_string(), file: "-".into(), why };
        // A thread of its own: whoever asks may be a task of a runtime, which must not be blocked by another one.
        std::thread::scope(|scope| {
            let fetching = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.map_err(|error| failed(error.to_string()))?.block_on(self.fetch_soon(name))
            });
            fetching.join().unwrap_or_else(|_| Err(failed("the download panicked".into())))
        })
    }

    async fn fetch_soon(&self, name: &HubName) -> Result<PathBuf, FetchError> {
        let mut client = HFClient::builder();
        if let Some(endpoint) = &self.endpoint {
            client = client.endpoint(endpoint);
        }
        if let Some(cache) = &self.cache {
            client = client.cache_dir(cache);
        }
        if let Some((times, delay)) = self.retries {
            client = client.retry_max_attempts(times).retry_base_delay(delay);
        }
        let failed = |why: String| FetchError::Hub { model: name.to_string(), file: "-".into(), why };
        let client = client.build().map_err(|error| failed(chain(&error)))?;
        let (owner, repository) = hf_hub::split_id(&name.repository);
        let mut download = Download {
            repository: client.model(owner, repository),
            revision: name.revision.clone(),
            name,
            quiet: self.quiet,
        };
        match &name.file {
            Some(file) => download.required(file).await,
            None => download.folder().await,
        }
    }
}

struct Download<'a> {
    repository: HFRepository<RepoTypeModel>,
    revision: Option<String>,
    name: &'a HubName,
    quiet: bool,
}

impl Download<'_> {
    async fn folder(&mut self) -> Result<PathBuf, FetchError> {
        let config = self.required(CONFIG).await?;
        let folder = config.parent().unwrap_or(&config).to_path_buf();
        // All files are of one commit, even if the branch goes on meanwhile.
        if let Some(commit) = folder.file_name().and_then(|name| name.to_str()) {
            self.revision = Some(commit.to_owned());
        }
        self.required(TOKENIZER).await?;
        for file in OPTIONAL {
            self.optional(file).await?;
        }
        match self.optional(INDEX).await? {
            Some(index) => {
                for file in self.weights_of(&index)? {
                    self.required(&file).await?;
                }
            }
            None => _ = self.required(WEIGHTS).await?,
        }
        Ok(folder)
    }

    fn weights_of(&self, index: &Path) -> Result<BTreeSet<String>, FetchError> {
        let bad = |why: &str| self.failed(INDEX, why.to_owned());
        let text = fs::read(index).map_err(|error| bad(&error.to_string()))?;
        let index: serde_json::Value = serde_json::from_slice(&text).map_err(|error| bad(&error.to_string()))?;
        let map = index["weight_map"].as_object().ok_or_else(|| bad("weight_map is not an object"))?;
        let mut files = BTreeSet::new();
        for file in map.values() {
            let plain = |file: &&str| file.ends_with(".safetensors") && !file.contains(['/', '\\']);
            let file = file.as_str().filter(plain);
            files.insert(file.ok_or_else(|| bad("weight_map names what is no safetensors file beside it"))?.to_owned());
        }
        Ok(files)
    }

    async fn required(&self, file: &str) -> Result<PathBuf, FetchError> {
        let why = "the repository has no such file, or there is no such repository or revision";
        self.optional(file).await?.ok_or_else(|| self.failed(file, why.into()))
    }

    /// A file of the repository; `None` if it has none of this name.
    async fn optional(&self, file: &str) -> Result<Option<PathBuf>, FetchError> {
        let watch = Arc::new(Watch::new(format!("fetching {}/{file}", self.name.repository), self.quiet));
        let online = self.repository.download_file().filename(file).maybe_revision(self.revision.clone());
        match online.progress(Arc::clone(&watch)).send().await {
            Ok(path) => self.whole(file, path, &watch).map(Some),
            Err(HFError::EntryNotFound { .. }) => Ok(None),
            Err(error) if is_about_the_way(&error) => self.cached(file, &error).await,
            Err(error) => Err(self.failed(file, told(&error))),
        }
    }

    /// What the cache says of a file while the hub cannot be asked.
    async fn cached(&self, file: &str, error: &HFError) -> Result<Option<PathBuf>, FetchError> {
        let offline = self.repository.download_file().filename(file).maybe_revision(self.revision.clone());
        match offline.local_files_only(true).send().await {
            Ok(path) => Ok(Some(path)),
            // Weights are fetched last: where they are, every file that there is was asked for once.
            Err(_) if OPTIONAL.contains(&file) || file == INDEX => Ok(None),
            Err(_) => Err(self.failed(file, told(error))),
        }
    }

    /// A file that is what the hub said: as long, and for weights of the same SHA-256, which is what they are kept under.
    /// What is not is removed, so that the next fetch starts over.
    fn whole(&self, file: &str, path: PathBuf, watch: &Watch) -> Result<PathBuf, FetchError> {
        let io = |error: std::io::Error| self.failed(file, error.to_string());
        let (wanted, downloaded) = watch.seen();
        let found = fs::metadata(&path).map_err(io)?.len();
        let blob = fs::canonicalize(&path).map_err(io)?;
        let kept_under = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_sha256 = kept_under.len() == 64 && kept_under.bytes().all(|byte| byte.is_ascii_hexdigit());
        let broken = match wanted {
            Some(wanted) if wanted != found => Some(format!("the hub sent {found} bytes, expected {wanted}")),
            _ if downloaded && is_sha256 => {
                let sha256 = sha256_of(&blob).map_err(io)?;
                let differs = !sha256.eq_ignore_ascii_case(kept_under);
                differs.then(|| format!("what the hub sent has SHA-256 {sha256}, expected {kept_under}"))
            }
            _ => None,
        };
        let Some(why) = broken else { return Ok(path) };
        for broken in [&blob, &path] {
            // What cannot be removed is found to be wrong again.
            let _ = fs::remove_file(broken);
        }
        Err(self.failed(file, why))
    }

    fn failed(&self, file: &str, why: String) -> FetchError {
        FetchError::Hub { model: self.name.to_string(), file: file.into(), why }
    }
}

fn sha256_of(path: &Path) -> std::io::Result<String> {
    let mut hash = Sha256::new();
    std::io::copy(&mut fs::File::open(path)?, &mut hash)?;
    Ok(format!("{:x}", hash.finalize()))
}

/// Whether the hub could not be asked, or could not answer.
fn is_about_the_way(error: &HFError) -> bool {
    match error {
        HFError::Request { .. } => true,
        HFError::Http { context } => context.status.is_server_error(),
        _ => false,
    }
}

/// What went wrong, and what to do about it.
fn told(error: &HFError) -> String {
    match error {
        HFError::AuthRequired { .. } | HFError::Forbidden { .. } => {
            format!("{}; HF_TOKEN names a token that may read it, if there is such a repository", chain(error))
        }
        error => chain(error),
    }
}

/// An error with its reasons, those left out that say what the error before has said.
fn chain(error: &dyn Error) -> String {
    let mut told = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let why = error.to_string();
        if !told.contains(&why) {
            told = format!("{told}: {why}");
        }
        source = error.source();
    }
    told
}

/// Shows a file's progress, and remembers how long the hub says that it is.
struct Watch {
    what: String,
    quiet: bool,
    state: Mutex<Watched>,
}

struct Watched {
    wanted: Option<u64>,
    downloaded: bool,
    progress: Progress,
}

impl Watch {
    fn new(what: String, quiet: bool) -> Self {
        let watched = Watched { wanted: None, downloaded: false, progress: Progress::None };
        Self { what, quiet, state: Mutex::new(watched) }
    }

    /// How long the hub says that the file is, and whether it sent it.
    fn seen(&self) -> (Option<u64>, bool) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.wanted, state.downloaded)
    }
}

impl ProgressHandler for Watch {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            // A size of 0 is what is told of files of unknown size.
            DownloadEvent::Start { total_bytes, .. } => state.wanted = Some(*total_bytes).filter(|bytes| *bytes > 0),
            DownloadEvent::Progress { files } => {
                // What is cached is complete at once, and nothing to tell of.
                for file in files.iter().filter(|file| file.status == FileStatus::InProgress) {
                    if !std::mem::replace(&mut state.downloaded, true) {
                        state.progress = Progress::new(self.quiet, &self.what, state.wanted.unwrap_or(0));
                    }
                    state.progress.at(file.bytes_completed);
                }
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => state.progress.at(*bytes_completed),
            DownloadEvent::Complete => state.progress.end(),
        }
    }
}
