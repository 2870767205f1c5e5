//! A load generator for OpenAI-compatible servers: sends what a workload says, when a pace says, and measures the answers.
//!
//! Where requests arrive by a rate, latency counts from the moment at which a request was due, not from when it was sent:
//! a server that makes the generator late has to answer for that.

mod client;
mod load;
mod pace;
mod plot;
mod report;
#[cfg(test)]
mod tests;
mod workload;

pub use client::{Answer, Client, Endpoint, Failure, ModelsError, Target, Usage, models};
pub use load::{Load, Measured, Record};
pub use pace::Pace;
pub use plot::{PlotError, write_svg};
pub use report::{Metric, Objective, Report, Spread, View};
pub use workload::{Prompts, Random, TextError, Turn, Workload, conversations_from_json};
