//! `starling up`: what can be said about a cluster on one machine.

use super::Settings;
use crate::config::{Sources, set};
use clap::Args;
use toml::Table;

#[derive(Clone, Debug, Args)]
pub struct Up {
    /// Nodes, each a process of its own; a single one is this process.
    #[arg(long, value_name = "N", help_heading = "Cluster", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: u16,
    /// Keeps the folder with the configuration and the log of each node, and says where it is. A single node logs to
    /// standard error.
    #[arg(long, help_heading = "Cluster")]
    pub keep_logs: bool,
    /// Exits after the conversation.
    #[arg(long, help_heading = "Conversation", conflicts_with = "quiet")]
    pub demo_only: bool,
    /// Only serves: no conversation.
    #[arg(long, help_heading = "Conversation")]
    pub quiet: bool,
    /// Prints one JSON object a line: `ready` once, `turn` for each turn.
    #[arg(long, help_heading = "Conversation")]
    pub json: bool,
    /// Model file (GGUF), model folder, or name of a model that is fetched once, such as `hf:OWNER/NAME`. [default: smollm2]
    #[arg(long, value_name = "PATH|NAME", help_heading = "Model and engine")]
    pub model: Option<String>,
    #[command(flatten)]
    pub settings: Settings,
}

impl Up {
    /// Where this command's configuration comes from: of the node if it is one, of all of them if they are several.
    pub fn sources(&self) -> Sources {
        self.settings.sources(self.model.as_ref(), preset(self.nodes))
    }
}

/// What `up` sets where nobody says otherwise: few logs between the lines of the conversation, and for several nodes free
/// ports, since the usual ones are for one.
pub fn preset(nodes: u16) -> Table {
    let mut preset = Table::new();
    set(&mut preset, "telemetry.log", "warn");
    if nodes > 1 {
        set(&mut preset, "api.listen", "127.0.0.1:0");
        set(&mut preset, "admin.listen", "127.0.0.1:0");
    }
    preset
}

/// The flags that say something else where there are several nodes, in the words of `up`.
pub fn over_nodes(up: clap::Command) -> clap::Command {
    let several = "; several nodes count up from its port, and take free ones if none is given";
    up.mut_arg("ranks", |arg| {
        let help = "Ranks of each node: copies of the model, each with KV blocks of its own";
        arg.long("ranks-per-node").visible_alias("ranks").help(help).help_heading("Cluster")
    })
    .mut_arg("threads", |arg| arg.help("Threads of all ranks of all nodes together"))
    .mut_arg("listen", |arg| arg.help(format!("Address and port of the API{several}")))
    .mut_arg("admin_listen", |arg| arg.help(format!("Address and port of metrics, probes and debugging{several}")))
}

pub const EXAMPLES: &str = "\
Examples:
  starling up                                  three nodes with a rank each, and a conversation over them
  starling up --nodes 1 --ranks-per-node 2     one process with two ranks on 127.0.0.1:8000
  starling up --demo-only --json               one conversation, one JSON object a line";
