//! `starling calibrate`: which model is measured, and how.

use crate::config::{Sources, set};
use clap::Args;
use std::path::PathBuf;
use toml::Table;

#[derive(Clone, Debug, Args)]
pub struct Calibrate {
    /// Configuration file (TOML), for the model and how it is computed.
    #[arg(long, env = "STARLING_CONFIG", hide_env_values = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Model file (GGUF), model folder, or name of a model that is fetched once, such as `hf:OWNER/NAME`. [default: smollm2]
    #[arg(long, value_name = "PATH|NAME")]
    pub model: Option<String>,
    /// Threads that compute. [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    /// Measurements of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Prints one JSON object.
    #[arg(long)]
    pub json: bool,
}

pub const EXAMPLES: &str = "\
Examples:
  starling calibrate                                 the model that is served by default
  starling calibrate --model ./model.gguf --threads 2
  starling calibrate --json | jq .decode_tok_s";

impl Calibrate {
    /// Where the configuration of what is measured comes from: one rank that computes.
    pub fn sources(&self) -> Sources {
        let mut flags = Table::new();
        set(&mut flags, "engine.kind", "cpu");
        if let Some(threads) = self.threads {
            set(&mut flags, "engine.threads", i64::from(threads));
        }
        if let Some(model) = &self.model {
            let key = if crate::fetch::by_name(model).is_some() { "model.name" } else { "model.path" };
            set(&mut flags, key, model.as_str());
        }
        Sources { preset: Table::new(), file: self.config.clone(), env: std::env::vars_os().collect(), flags }
    }
}
