pub mod api;
pub mod config;
pub mod fetch;
pub mod telemetry;
pub mod text;
