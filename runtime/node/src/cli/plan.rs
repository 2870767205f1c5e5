//! `starling plan`: what memory is divided, and for what.

use crate::config::Size;
use clap::{Args, ValueEnum};
use starling_core::kv::cache::sizing::Method;
use std::num::NonZeroU32;
use std::path::PathBuf;

#[derive(Clone, Debug, Args)]
pub struct Plan {
    /// Model file (GGUF), model folder, or name of a model that is fetched once, such as `hf:OWNER/NAME`. No weights are read.
    #[arg(value_name = "MODEL", required_unless_present = "life_cycles")]
    pub model: Option<String>,
    /// File (JSON) that describes the life cycles in place of a model.
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub life_cycles: Option<PathBuf>,
    /// Bytes of a KV number: `int8` serves with f16 KV, `exact` with f32.
    #[arg(long, value_name = "KIND", value_parser = ["int8", "exact"], default_value = "int8")]
    pub arithmetic: String,
    /// Tokens of a KV block.
    #[arg(long, value_name = "T", default_value = "16")]
    pub block_tokens: NonZeroU32,
    /// Memory of the device for KV, such as 16GiB.
    #[arg(long, value_name = "SIZE", help_heading = "Tiers")]
    pub device_bytes: Size,
    /// Memory of the host for KV.
    #[arg(long, value_name = "SIZE", help_heading = "Tiers")]
    pub host_bytes: Option<Size>,
    /// Disk for KV.
    #[arg(long, value_name = "SIZE", requires = "host_bytes", help_heading = "Tiers")]
    pub disk_bytes: Option<Size>,
    /// Completed turns of a conversation whose end points stay.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load")]
    pub turns: u32,
    /// Tokens of a conversation.
    #[arg(long, value_name = "L", default_value_t = 8192, help_heading = "Load")]
    pub sequence_tokens: u32,
    /// Tokens of the longest sequence. [default: as --sequence-tokens]
    #[arg(long, value_name = "L", help_heading = "Load")]
    pub sequence_tokens_max: Option<u32>,
    /// Requests that run at a time, one of them in prefill.
    #[arg(long, value_name = "B", default_value_t = 64, help_heading = "Load")]
    pub requests: u32,
    /// Requests that may rest below the device. [default: as --requests]
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub suspended_requests: Option<u32>,
    /// Tokens that one step computes at most.
    #[arg(long, value_name = "N", default_value_t = 512, help_heading = "Load")]
    pub step_tokens: u32,
    /// Tokens that are drafted ahead of each decoded one.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Load")]
    pub draft_tokens: u32,
    /// Tokens at the start that all conversations share.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Load")]
    pub system_prompt_tokens: u32,
    /// End points that a turn leaves. [default: its two ends, and those before its tail]
    #[arg(long, value_name = "N", help_heading = "Load")]
    pub end_points: Option<u32>,
    /// Share of the device for each life cycle, in place of a method; together they are 1.
    #[arg(long, value_name = "A,B", value_delimiter = ',', help_heading = "Method")]
    pub pool_ratio: Option<Vec<f64>>,
    /// `balanced` fills all pools at the same number of conversations; `typical` divides by what a step holds, `retained`
    /// by that and the end points of all turns but one.
    #[arg(long, value_name = "METHOD", value_enum, default_value_t = MethodName::Balanced, help_heading = "Method")]
    pub method: MethodName,
    /// Prints one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodName {
    Balanced,
    Typical,
    Retained,
}

impl From<MethodName> for Method {
    fn from(name: MethodName) -> Self {
        match name {
            MethodName::Balanced => Self::Balanced,
            MethodName::Typical => Self::TypicalStep,
            MethodName::Retained => Self::TypicalStepRetaining,
        }
    }
}

pub const EXAMPLES: &str = r#"The file of --life-cycles is an object. `policy` is required, optional or private; `group` puts pages
of equal slots into one pool; `window` and `sink_tokens` go with the kind window:
  {"life_cycles": [
     {"kind": "full", "slot_bytes": 1572864},
     {"kind": "window", "window": 128, "policy": "private", "slot_bytes": 524288},
     {"kind": "state", "slot_bytes": [4194304, 65536], "group": 2}],
   "snapshots": {"from_start": [], "from_end": [0], "at_branches": false}}

Examples:
  starling plan ./gemma.gguf --device-bytes 16GiB --turns 5
  starling plan hf:google/gemma-3-1b-it --device-bytes 8GiB --host-bytes 64GiB --json
  starling plan --life-cycles hybrid.json --device-bytes 64GiB --block-tokens 128 --requests 32"#;
