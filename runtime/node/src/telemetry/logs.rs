//! Logs to standard error: text for people, JSON for machines.

use crate::config::{LogFormat, Telemetry};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Why logging does not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("{filter:?} is not a log filter: {why}")]
    Filter { filter: String, why: String },
    #[error("logs are set up already")]
    Twice,
}

/// Sets up the process's logs.
///
/// # Errors
/// A filter that does not parse, or a second call.
pub fn init(settings: &Telemetry) -> Result<(), LogError> {
    // The consensus group tells of each of its heartbeats and votes, unless somebody wants to hear that.
    let quiet = if settings.log.contains("openraft") { "" } else { ",openraft=error" };
    let filter = EnvFilter::try_new(format!("{}{quiet}", settings.log))
        .map_err(|e| LogError::Filter { filter: settings.log.clone(), why: e.to_string() })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let outcome = match settings.log_format {
        LogFormat::Text => logs.with_ansi(colour(std::io::stderr().is_terminal())).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).with_ansi(false).try_init(),
    };
    outcome.map_err(|_| LogError::Twice)
}

/// Whether to colour what goes to a stream: on a terminal, unless `NO_COLOR` is set; anywhere if `CLICOLOR_FORCE` is.
pub fn colour(is_terminal: bool) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let forced = std::env::var_os("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0");
    !set("NO_COLOR") && (forced || is_terminal)
}
