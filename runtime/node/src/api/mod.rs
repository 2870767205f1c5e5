//! The OpenAI-compatible API: the only place that knows HTTP and JSON.

pub mod engine;
pub mod metrics;
pub mod trace;
