//! What the process tells the shell when it ends.

use crate::config::ConfigError;
use crate::fetch::FetchError;

/// One code a meaning, for scripts and service managers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Also after a signal that was followed by a drain.
    Ok = 0,
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The configuration is wrong.
    Config = 3,
    /// The model or the device is not there or cannot be used.
    Unavailable = 4,
    /// A benchmark missed its objective.
    ObjectiveMissed = 5,
    /// The second Ctrl-C ended the process at once.
    Interrupted = 130,
}

impl Exit {
    /// Codes and meanings, as the help shows them.
    pub const HELP: &str = "\
Exit codes:
  0    done, or drained after a signal
  1    failed
  2    the command line is wrong
  3    the configuration is wrong
  4    the model or the device is not available
  130  a second Ctrl-C";
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl From<&ConfigError> for Exit {
    fn from(_: &ConfigError) -> Self {
        Self::Config
    }
}

impl From<&FetchError> for Exit {
    fn from(error: &FetchError) -> Self {
        match error {
            FetchError::Unknown(_) => Self::Usage,
            _ => Self::Unavailable,
        }
    }
}
