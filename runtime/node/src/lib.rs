//! The node: configuration, the OpenAI-compatible API, telemetry, the command line, and how they are put together.

pub mod api;
pub mod assembly;
pub mod bench;
pub mod cli;
pub mod config;
mod consensus;
pub mod fetch;
pub mod run;
pub mod telemetry;
pub mod text;
