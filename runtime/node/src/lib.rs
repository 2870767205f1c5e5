pub mod api;
pub mod cli;
pub mod config;
pub mod fetch;
pub mod telemetry;
pub mod text;
