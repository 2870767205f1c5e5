//! The command line: what can be said, and what it means for the configuration. Running it is the binary's part.

pub mod bench;
pub mod calibrate;
pub mod cert;
pub mod client;
pub mod demo;
mod exit;
pub mod nodes;
pub mod plan;
mod up;

pub use exit::Exit;
pub use up::Up;

use crate::config::{Config, Sources, set, variable};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::LazyLock;
use toml::Table;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit that was built, if the build said so by the variable `STARLING_COMMIT`.
pub const COMMIT: &str = match option_env!("STARLING_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
/// What `--version` prints after the name.
static VERSION_LINE: LazyLock<String> = LazyLock::new(|| format!("{VERSION} (commit {COMMIT}; engines: cpu, timed)"));

/// Columns of help texts at most.
const HELP_COLUMNS: usize = 100;

/// Serves a language model over an OpenAI-compatible API, from one process to a cluster.
#[derive(Clone, Debug, Parser)]
#[command(name = "starling", max_term_width = HELP_COLUMNS)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Starts a cluster on this machine with a small model, has a conversation with it and keeps serving.
    #[command(after_help = up::EXAMPLES)]
    Up(Up),
    /// Serves a model until a signal to stop, which drains.
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Serve),
    /// Sends a load to an OpenAI-compatible server and measures its answers.
    #[command(after_help = bench::EXAMPLES)]
    Bench(Box<bench::Bench>),
    /// Measures how long the model's steps take on this machine, as the engine `timed` is told.
    #[command(after_help = calibrate::EXAMPLES)]
    Calibrate(calibrate::Calibrate),
    /// Plans how much of which KV memory holds: slots of each pool, and conversations that fit.
    #[command(after_help = plan::EXAMPLES)]
    Plan(Box<plan::Plan>),
    /// Shows the members of a cluster as one of its nodes sees them.
    #[command(after_help = NODES_EXAMPLES)]
    Nodes {
        /// Admin listener of a node.
        #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8001")]
        admin: String,
    },
    /// Makes certificates for the nodes of a cluster, for development.
    #[command(after_help = CERT_EXAMPLES)]
    Cert(cert::CertArgs),
    /// Shows, checks or describes the configuration.
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(ConfigArgs),
    /// Fetches models.
    #[command(after_help = MODEL_EXAMPLES)]
    Model(ModelArgs),
    /// Prints a completion script for a shell.
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page.
    #[command(after_help = MAN_EXAMPLES)]
    Man {
        /// Of this command; without one, of starling itself.
        command: Option<String>,
    },
}

#[derive(Clone, Debug, Args)]
pub struct Serve {
    /// Model file (GGUF), model folder, or name of a model that is fetched once, such as `hf:OWNER/NAME`. [default: smollm2]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// For whoever started this process: the end of standard input means to drain and exit, and standard output gets the
    /// `ready` line of `up --json`. So no node outlives the one that started it.
    #[arg(long, hide = true)]
    pub supervised: bool,
    #[command(flatten)]
    pub settings: Settings,
}

/// Flags that set keys of the configuration.
#[derive(Clone, Debug, Default, Args)]
pub struct Settings {
    /// Configuration file (TOML).
    #[arg(long, env = "STARLING_CONFIG", hide_env_values = true, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// What runs the steps: `cpu` computes the model, `timed` only takes the time.
    #[arg(long, value_name = "KIND", value_parser = ["cpu", "timed"], help_heading = "Model and engine")]
    pub engine: Option<String>,
    /// Copies of the model, each with KV blocks of its own.
    #[arg(long, value_name = "N", help_heading = "Model and engine")]
    pub ranks: Option<u32>,
    /// Threads of all ranks together.
    #[arg(long, value_name = "N", help_heading = "Model and engine")]
    pub threads: Option<u32>,
    /// Memory of one rank's KV blocks.
    #[arg(long, value_name = "SIZE", help_heading = "Model and engine")]
    pub kv_memory: Option<String>,
    /// Which rank runs a request.
    #[arg(long, value_name = "POLICY", value_parser = ["balanced", "kv-aware", "conversation"])]
    #[arg(help_heading = "Model and engine")]
    pub policy: Option<String>,
    /// Address and port of the API.
    #[arg(long, value_name = "ADDRESS", help_heading = "Network")]
    pub listen: Option<String>,
    /// Port of the API on 127.0.0.1; short for --listen.
    #[arg(long, value_name = "PORT", conflicts_with = "listen", help_heading = "Network")]
    pub port: Option<u16>,
    /// Address and port of metrics, probes and debugging.
    #[arg(long, value_name = "ADDRESS", help_heading = "Network")]
    pub admin_listen: Option<String>,
    /// Which logs are written to standard error.
    #[arg(long, value_name = "FILTER", help_heading = "Telemetry")]
    pub log: Option<String>,
    /// How logs are written.
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"], help_heading = "Telemetry")]
    pub log_format: Option<String>,
}

#[derive(Clone, Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum ConfigCommand {
    /// Prints the configuration in effect as TOML, secrets redacted.
    Print {
        #[command(flatten)]
        settings: Settings,
    },
    /// Checks the configuration; says nothing when it is right.
    Check {
        #[command(flatten)]
        settings: Settings,
    },
    /// Prints the JSON Schema of the configuration file.
    Schema,
}

#[derive(Clone, Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub command: ModelCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum ModelCommand {
    /// Fetches a model into the cache if it is not there, and prints its path.
    Fetch {
        /// Name of the model.
        #[arg(default_value = crate::fetch::SMOLLM2.name)]
        name: String,
    },
}

const TOP_EXAMPLES: &str = "\
Examples:
  starling up                                  fetch a small model, talk to it, keep serving
  starling serve --config node.toml            serve as the file says
  starling config print --config node.toml     show what is in effect";

const SERVE_EXAMPLES: &str = "\
Examples:
  starling serve --config node.toml
  starling serve ./model.gguf --listen 0.0.0.0:8000 --ranks 2
  STARLING__API__KEYS=secret starling serve --admin-listen 127.0.0.1:9464";

const NODES_EXAMPLES: &str = "\
Examples:
  starling nodes                               as the node at 127.0.0.1:8001 sees them
  starling nodes --admin http://10.0.0.2:8001  as another does
  watch -n 1 starling nodes                    while one of them comes and goes";

const CERT_EXAMPLES: &str = "\
Examples:
  starling cert authority --cluster flock --out ca
  starling cert node --name node-0 --authority ca --out node-0
  starling cert node --name node-0 --authority ca --out node-0 --days 30 --force";

const CONFIG_EXAMPLES: &str = "\
Examples:
  starling config print                        the defaults
  starling config check --config node.toml     exit code 3 and a line a problem if it is wrong
  starling config schema > config.schema.json  for editors";

const MODEL_EXAMPLES: &str = "\
Examples:
  starling model fetch                         fetch smollm2
  starling model fetch smollm2                 likewise, by name
  MODEL=$(starling model fetch)                its path, for scripts";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  starling completions bash > /etc/bash_completion.d/starling
  starling completions zsh > ~/.zfunc/_starling
  starling completions fish > ~/.config/fish/completions/starling.fish";

const MAN_EXAMPLES: &str = "\
Examples:
  starling man | man -l -                      read it
  starling man > starling.1                    keep it
  starling man up                              of one command";

/// The flag and the key that it sets: from here come the defaults and variables that help shows.
const FLAGS: [(&str, &str); 9] = [
    ("engine", "engine.kind"),
    ("ranks", "ranks.count"),
    ("threads", "engine.threads"),
    ("kv_memory", "engine.kv-memory"),
    ("policy", "placement.policy"),
    ("listen", "api.listen"),
    ("admin_listen", "admin.listen"),
    ("log", "telemetry.log"),
    ("log_format", "telemetry.log-format"),
];

impl Settings {
    fn flags(&self, model: Option<&String>) -> Table {
        let mut table = Table::new();
        let texts = [&self.engine, &self.kv_memory, &self.policy, &self.listen, &self.admin_listen];
        let texts = texts.into_iter().chain([&self.log, &self.log_format]);
        let keys = ["engine.kind", "engine.kv-memory", "placement.policy", "api.listen", "admin.listen"];
        let keys = keys.into_iter().chain(["telemetry.log", "telemetry.log-format"]);
        for (key, text) in keys.zip(texts) {
            if let Some(text) = text {
                set(&mut table, key, text.as_str());
            }
        }
        for (key, n) in [("ranks.count", self.ranks), ("engine.threads", self.threads)] {
            if let Some(n) = n {
                set(&mut table, key, i64::from(n));
            }
        }
        if let Some(port) = self.port {
            set(&mut table, "api.listen", SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string());
        }
        if let Some(model) = model {
            let key = if crate::fetch::is_name(model) { "model.name" } else { "model.path" };
            set(&mut table, key, model.as_str());
        }
        table
    }

    fn sources(&self, model: Option<&String>, preset: Table) -> Sources {
        let env = std::env::vars_os().collect();
        Sources { preset, file: self.config.clone(), env, flags: self.flags(model) }
    }
}

impl Serve {
    /// Where this command's configuration comes from.
    pub fn sources(&self) -> Sources {
        self.settings.sources(self.model.as_ref(), Table::new())
    }
}

impl ConfigCommand {
    /// Where the configuration comes from that this command is about; none for `schema`.
    pub fn sources(&self) -> Option<Sources> {
        match self {
            Self::Print { settings } | Self::Check { settings } => Some(settings.sources(None, Table::new())),
            Self::Schema => None,
        }
    }

    /// Does all that the command does.
    ///
    /// # Errors
    /// Writing failed. A configuration that is wrong is told on standard error and by the exit code.
    pub fn run(&self, out: &mut impl Write) -> io::Result<Exit> {
        let Some(sources) = self.sources() else {
            serde_json::to_writer_pretty(&mut *out, &Config::json_schema())?;
            writeln!(out)?;
            return Ok(Exit::Ok);
        };
        match Config::load(&sources) {
            Err(e) => {
                eprintln!("error: {e}");
                Ok(Exit::from(&e))
            }
            Ok(config) => {
                if matches!(self, Self::Print { .. }) {
                    out.write_all(config.to_toml().as_bytes())?;
                }
                Ok(Exit::Ok)
            }
        }
    }
}

/// The whole command line, with the defaults and variables of the configuration in the help of the flags that set it.
pub fn command() -> clap::Command {
    let command = Cli::command().version(VERSION_LINE.as_str()).term_width(HELP_COLUMNS);
    let command = command.after_help(format!("{TOP_EXAMPLES}\n\n{}", Exit::HELP));
    let defaults = serde_json::json!(Config::default());
    let preset = serde_json::json!(up::preset(1));
    let config_commands = ["print", "check"];
    let with_keys = |command: clap::Command, over: &serde_json::Value| {
        FLAGS.iter().fold(command, |command, (flag, key)| {
            let (table, name) = key.split_once('.').unwrap_or((key, ""));
            let default = over[table].get(name).unwrap_or(&defaults[table][name]);
            command.mut_arg(flag, |arg| {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                let default = match default {
                    serde_json::Value::Null => "one a core".to_owned(),
                    serde_json::Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                arg.help(format!("{help}\n[default: {default}] [env: {}]", variable(key)))
            })
        })
    };
    let none = serde_json::Value::Null;
    command
        .mut_subcommand("up", |up| with_keys(up::over_nodes(up), &preset))
        .mut_subcommand("serve", |serve| with_keys(serve, &none))
        .mut_subcommand("config", |config| {
            config_commands
                .iter()
                .fold(config, |config, name| config.mut_subcommand(name, |command| with_keys(command, &none)))
        })
}

/// Reads a command line, its first word the program's name.
///
/// # Errors
/// A wrong one, or one that asks for help or the version: `clap::Error::exit` prints it and ends with the right code.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&command().try_get_matches_from(words)?)
}

/// Writes the completion script of a shell.
pub fn write_completions(shell: clap_complete::Shell, out: &mut impl Write) {
    clap_complete::generate(shell, &mut command(), "starling", out);
}

/// Writes the manual page, in roff.
///
/// # Errors
/// A command that does not exist, or writing failed.
pub fn write_man(of: Option<&str>, out: &mut impl Write) -> io::Result<()> {
    let mut whole = command();
    whole.build();
    let page = match of {
        None => whole,
        Some(name) => {
            let found = whole.find_subcommand(name);
            let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("no command {name:?}"));
            found.ok_or_else(unknown)?.clone()
        }
    };
    let title = page.get_bin_name().unwrap_or("starling").replace(' ', "-");
    clap_mangen::Man::new(page).title(title).render(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineKind, ModelSource};

    fn cli(line: &str) -> Result<Cli, clap::Error> {
        parse(line.split(' ').map(OsString::from))
    }

    fn up(line: &str) -> Config {
        let Command::Up(up) = cli(line).unwrap().command else { panic!("{line}") };
        Config::load(&Sources { env: Vec::new(), ..up.sources() }).unwrap()
    }

    #[test]
    fn up_has_a_rank_a_node_and_flags_win() {
        assert_eq!(up("starling up").ranks.count, 1);
        assert_eq!(up("starling up --ranks 2").ranks.count, 2);
        let config =
            up("starling up --ranks-per-node 3 --engine timed --threads 4 --port 0 --admin-listen 127.0.0.1:0");
        assert_eq!((config.ranks.count, config.engine.kind), (3, EngineKind::Timed));
        assert_eq!((config.engine.threads, config.api.listen.port()), (Some(4), 0));
        assert_eq!(config.admin.listen.port(), 0);
        assert_eq!(up("starling up --model smollm2").model.source(), ModelSource::Named("smollm2".into()));
        assert_eq!(up("starling up --model ./smollm2").model.source(), ModelSource::Path("./smollm2".into()));
        let Command::Serve(serve) = cli("starling serve m.gguf --log debug").unwrap().command else { panic!() };
        let config = Config::load(&Sources { env: Vec::new(), ..serve.sources() }).unwrap();
        assert_eq!((config.ranks.count, config.telemetry.log.as_str()), (1, "debug"));
        assert_eq!(config.model.source(), ModelSource::Path("m.gguf".into()));
    }

    #[test]
    fn several_nodes_take_free_ports_unless_told_and_one_takes_the_usual() {
        let ports = |line| (up(line).api.listen.port(), up(line).admin.listen.port());
        assert_eq!(ports("starling up"), (0, 0));
        assert_eq!(ports("starling up --nodes 2 --port 9000"), (9000, 0));
        assert_eq!(ports("starling up --nodes 1"), (8000, 8001));
    }

    #[test]
    fn every_flag_names_a_key_that_exists() {
        let all = "starling up --engine cpu --ranks 1 --threads 1 --kv-memory 64MiB --policy balanced --listen [::1]:1 \
                   --admin-listen [::1]:2 --log warn --log-format json";
        let config = up(all);
        assert_eq!((config.engine.threads, config.api.listen.port()), (Some(1), 1));
        let flags = |line| match cli(line).unwrap().command {
            Command::Up(up) => up.settings.flags(None),
            other => panic!("{other:?}"),
        };
        let flags = flags(all);
        for (flag, key) in FLAGS {
            let (table, name) = key.split_once('.').unwrap();
            assert!(flags[table].get(name).is_some(), "--{flag} does not set {key}");
        }
    }

    #[test]
    fn a_wrong_command_line_is_a_usage_error() {
        for line in [
            "starling",
            "starling fly",
            "starling up --ranks many",
            "starling up --nodes 0",
            "starling up --nodes 65",
            "starling cert node --name Node --authority ca --out o",
            "starling cert node --name node --authority ca --out o --days 0",
            "starling cert authority --out o",
            "starling up --engine gpu",
            "starling up --quiet --demo-only",
            "starling up --port 1 --listen 127.0.0.1:2",
            "starling up --port 65536",
            "starling completions csh",
        ] {
            assert_eq!(cli(line).unwrap_err().exit_code(), Exit::Usage as i32, "{line}");
        }
        let version = cli("starling --version").unwrap_err();
        assert_eq!(version.exit_code(), 0);
        let text = version.to_string();
        assert!(text.starts_with(&format!("starling {VERSION} (commit ")) && text.contains("cpu, timed"), "{text}");
    }

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn completions_and_manual_pages_are_written() {
        let mut script = Vec::new();
        write_completions(clap_complete::Shell::Bash, &mut script);
        assert!(String::from_utf8(script).unwrap().contains("--demo-only"));
        let mut page = Vec::new();
        write_man(Some("up"), &mut page).unwrap();
        assert!(String::from_utf8(page).unwrap().contains("demo\\-only"));
        assert!(write_man(Some("fly"), &mut Vec::new()).unwrap_err().to_string().contains("\"fly\""));
    }
}
