//! Layers the sources over each other and says which of them is wrong where.

use super::keys::{Key, Kind, join, variable};
use super::{Config, Secret, check, placement, upstream};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Environment variables of the configuration are `STARLING__SECTION__KEY`.
pub const ENV_PREFIX: &str = "STARLING__";

/// What is layered over the defaults, in this order.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// What the command itself sets (`up` hosts two ranks).
    pub preset: Table,
    pub file: Option<PathBuf>,
    /// The process's environment; other variables are ignored.
    pub env: Vec<(OsString, OsString)>,
    pub flags: Table,
}

/// Why there is no configuration. Each prints as one line a problem.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read configuration {path:?}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("configuration {path:?} is not TOML: {message}")]
    Syntax { path: PathBuf, message: String },
    #[error("{}", .0.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
}

/// One thing that is wrong: the key, what is wrong with it, and where it was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the key, such as `api.body-limit`.
    pub key: String,
    pub what: String,
    pub origin: Option<Origin>,
}

impl Problem {
    pub fn new(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self { key: key.into(), what: what.into(), origin: None }
    }

    fn at(self, origin: &Origin) -> Self {
        Self { origin: Some(origin.clone()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.what)?;
        match &self.origin {
            Some(origin) => write!(f, " ({origin})"),
            None => Ok(()),
        }
    }
}

/// Where a value was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Preset,
    File(PathBuf),
    Env(String),
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Preset => f.write_str("set by this command"),
            Self::File(path) => write!(f, "in {}", path.display()),
            Self::Env(name) => write!(f, "from the environment variable {name}"),
            Self::Flag => f.write_str("from the command line"),
        }
    }
}

/// Sets `path`, such as `api.listen`, in a table of flags.
pub fn set(table: &mut Table, path: &str, value: impl Into<Value>) {
    match path.split_once('.') {
        None => {
            table.insert(path.to_owned(), value.into());
        }
        Some((first, rest)) => {
            let below = table.entry(first).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(below) = below {
                set(below, rest, value);
            }
        }
    }
}

impl Config {
    /// Reads all sources and checks the outcome.
    ///
    /// # Errors
    /// A file that cannot be read or parsed; else every unknown key; else the first value of a wrong type; else every
    /// value that does not fit the others.
    pub fn load(sources: &Sources) -> Result<Self, ConfigError> {
        let mut layers = Layers::new();
        layers.add(&sources.preset, &Origin::Preset);
        if let Some(path) = &sources.file {
            let file = read(path)?;
            layers.refuse_secrets(&file, path);
            layers.add(&file, &Origin::File(path.clone()));
        }
        layers.add_env(&sources.env);
        layers.add(&sources.flags, &Origin::Flag);
        layers.into_config()
    }
}

fn read(path: &Path) -> Result<Table, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    text.parse().map_err(|e: toml::de::Error| ConfigError::Syntax {
        path: path.into(),
        message: e.to_string().trim_end().to_owned(),
    })
}

struct Layers {
    keys: Key,
    merged: Table,
    origins: BTreeMap<String, Origin>,
    problems: Vec<Problem>,
}

impl Layers {
    fn new() -> Self {
        let mut keys = Key::root();
        if let Key::Table(tables) = &mut keys
            && let Some(Key::Table(known)) = tables.get_mut("placement")
        {
            known.extend(placement::SWITCHES.map(|name| (name.to_owned(), Key::Value(Kind::Boolean))));
        }
        Self { keys, merged: Table::new(), origins: BTreeMap::new(), problems: Vec::new() }
    }

    fn add(&mut self, layer: &Table, origin: &Origin) {
        let layer = &self.under_our_names(layer, origin);
        let model = |key: &str| layer.get("model").and_then(|m| m.get(key)).is_some();
        // Two ways to say one thing: a later source replaces what an earlier one said, whichever way that was.
        for (said, other) in [("path", "name"), ("name", "path")] {
            if model(said)
                && !model(other)
                && let Some(Value::Table(merged)) = self.merged.get_mut("model")
            {
                merged.remove(other);
            }
        }
        let keys = std::mem::replace(&mut self.keys, Key::Table(BTreeMap::new()));
        let mut merged = std::mem::take(&mut self.merged);
        self.merge(&keys, &mut merged, layer, ("", origin));
        (self.keys, self.merged) = (keys, merged);
    }

    /// The layer with the published names of placement's and the KV manager's keys replaced by ours, so that later sources
    /// replace earlier ones whichever name they use.
    fn under_our_names(&mut self, layer: &Table, origin: &Origin) -> Table {
        let mut layer = layer.clone();
        self.problems.extend(upstream::under_our_names(&mut layer).into_iter().map(|problem| problem.at(origin)));
        let Some(Value::Table(given)) = layer.get_mut("placement") else {
            return layer;
        };
        let mut said: BTreeMap<String, String> = BTreeMap::new();
        for (name, value) in std::mem::take(given) {
            let key = placement::of_published(&name).map_or_else(|| name.clone(), str::to_owned);
            given.insert(key.clone(), value);
            if let Some(first) = said.insert(key.clone(), name.clone()) {
                let what = format!("{first} and {name} are two names of one key; give one");
                self.problems.push(Problem::new(join("placement", &key), what).at(origin));
            }
        }
        layer
    }

    fn merge(&mut self, keys: &Key, merged: &mut Table, layer: &Table, (path, origin): (&str, &Origin)) {
        for (name, value) in layer {
            let path = join(path, name);
            match (keys.get(name), value) {
                (None, _) => self.problems.push(self.unknown(&path).at(origin)),
                (Some(key @ Key::Table(_)), Value::Table(layer)) => {
                    let below = merged.entry(name).or_insert_with(|| Value::Table(Table::new()));
                    if let Value::Table(below) = below {
                        self.merge(key, below, layer, (&path, origin));
                    }
                }
                (Some(Key::Table(_)), value) => {
                    let what = format!("{value} is not a table");
                    self.problems.push(Problem::new(path, what).at(origin));
                }
                (Some(Key::Value(_)), value) => {
                    merged.insert(name.clone(), value.clone());
                    self.origins.insert(path, origin.clone());
                }
            }
        }
    }

    fn unknown(&self, path: &str) -> Problem {
        // `merge` borrows the tree; rebuilding it costs little and happens only on an error.
        let nearest = Key::root().nearest(path);
        Problem::new(path, nearest.map_or("unknown key".into(), |n| format!("unknown key; did you mean {n}?")))
    }

    fn refuse_secrets(&mut self, file: &Table, path: &Path) {
        if file.get("api").and_then(|api| api.get("keys")).is_some() {
            let what = format!("secrets are not read from the file; set {} or api.keys-file", variable("api.keys"));
            self.problems.push(Problem::new("api.keys", what).at(&Origin::File(path.into())));
        }
    }

    fn add_env(&mut self, env: &[(OsString, OsString)]) {
        // The common name first, so that the particular one wins.
        if let Some((_, value)) = env.iter().find(|(name, _)| name == "RUST_LOG") {
            self.add_variable("RUST_LOG", "telemetry.log", value);
        }
        let mut said: BTreeMap<String, &str> = BTreeMap::new();
        for (name, value) in env.iter().filter(|(_, value)| !value.is_empty()) {
            let Some(name) = name.to_str().filter(|name| name.starts_with(ENV_PREFIX)) else {
                continue;
            };
            let path = name[ENV_PREFIX.len()..].to_lowercase().replace("__", ".").replace('_', "-");
            let published = path.strip_prefix("placement.").and_then(placement::of_published);
            let path = published.map_or(path, |ours| join("placement", ours));
            if let Some(first) = said.insert(path.clone(), name) {
                let what = format!("{first} and {name} are two names of one key; give one");
                self.problems.push(Problem::new(path, what));
                continue;
            }
            self.add_variable(name, &path, value);
        }
    }

    /// An empty variable counts as one that is not set.
    fn add_variable(&mut self, name: &str, path: &str, value: &OsString) {
        if value.is_empty() {
            return;
        }
        let origin = Origin::Env(name.to_owned());
        let Some(text) = value.to_str() else {
            let what = format!("{value:?} is not UTF-8");
            return self.problems.push(Problem::new(path, what).at(&origin));
        };
        let kind = match path.split('.').try_fold(&self.keys, |key, name| key.get(name)) {
            Some(Key::Value(kind)) => *kind,
            // Unknown keys and tables are reported by the merge.
            _ => Kind::Text,
        };
        let value = match read_text(kind, text) {
            Ok(value) => value,
            Err(what) => return self.problems.push(Problem::new(path, what).at(&origin)),
        };
        let mut layer = Table::new();
        set(&mut layer, path, value);
        self.add(&layer, &origin);
    }

    fn into_config(mut self) -> Result<Config, ConfigError> {
        if !self.problems.is_empty() {
            return Err(ConfigError::Invalid(self.problems));
        }
        let merged = Value::Table(std::mem::take(&mut self.merged));
        let mut config: Config = serde_path_to_error::deserialize(merged).map_err(|e| {
            let path = e.path().to_string();
            let problem = Problem::new(path, e.inner().message());
            ConfigError::Invalid(vec![self.with_origin(problem)])
        })?;
        // The list of members decides; a number of ranks that was said as well has to agree, which `check` looks at.
        if !self.origins.contains_key("ranks.count")
            && let Some(ranks) = config.own_member().map(|own| own.ranks)
        {
            config.ranks.count = ranks;
        }
        let mut problems = Vec::new();
        match check::keys_of_file(&config) {
            Ok(keys) => config.api.keys.extend(keys.into_iter().map(Secret::new)),
            Err(problem) => problems.push(problem),
        }
        problems.extend(check::check(&config));
        if problems.is_empty() {
            return Ok(config);
        }
        Err(ConfigError::Invalid(problems.into_iter().map(|p| self.with_origin(p)).collect()))
    }

    fn with_origin(&self, problem: Problem) -> Problem {
        // A problem inside a list is where the list was said.
        let key = problem.key.split('[').next().unwrap_or_default();
        match self.origins.get(key) {
            Some(origin) => problem.at(origin),
            None => problem,
        }
    }
}

/// The value that the text of a variable stands for.
fn read_text(kind: Kind, text: &str) -> Result<Value, String> {
    let wrong = |what: &str| format!("{text:?} is not {what}");
    match kind {
        Kind::Text => Ok(Value::from(text)),
        Kind::Boolean => text.trim().parse::<bool>().map(Value::from).map_err(|_| wrong("true or false")),
        Kind::Integer => text.trim().parse::<i64>().map(Value::from).map_err(|_| wrong("a whole number")),
        Kind::Number => text.trim().parse::<f64>().map(Value::from).map_err(|_| wrong("a number")),
        Kind::List => Ok(Value::from(parts(text)?)),
        Kind::Integers => {
            let numbers = parts(text)?.into_iter().map(|part| read_text(Kind::Integer, part));
            Ok(Value::Array(numbers.collect::<Result<_, _>>()?))
        }
        Kind::Numbers => {
            let numbers = parts(text)?.into_iter().map(|part| read_text(Kind::Number, part));
            Ok(Value::Array(numbers.collect::<Result<_, _>>()?))
        }
    }
}

/// What a list in a variable holds.
fn parts(text: &str) -> Result<Vec<&str>, String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    if parts.is_empty() { Err("the list names nothing".into()) } else { Ok(parts) }
}
