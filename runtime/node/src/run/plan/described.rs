//! Life cycles that a file describes in place of a model.

use serde::Deserialize;
use starling_core::kv::cache::checkpoint::Snapshots;
use starling_core::kv::cache::lifecycle::{LifeCycle, Policy, Priority, Retention};
use std::fs::File;
use std::io::{self, Read};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

/// A description of 255 life cycles is far shorter.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum DescribedError {
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{}: {why}", file.display())]
    Format { file: PathBuf, why: String },
}

/// A life cycle, and what a page of it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooled {
    pub life_cycle: LifeCycle,
    /// Of the model; none if it was described.
    pub layers: Vec<usize>,
    pub sizes: Vec<u64>,
}

/// What pools are planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    pub name: String,
    pub pooled: Vec<Pooled>,
    pub snapshots: Snapshots,
    /// Tokens that the model was made for.
    pub context: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    life_cycles: Vec<One>,
    #[serde(default)]
    snapshots: Snapshots,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Full,
    Window,
    State,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct One {
    kind: Kind,
    window: Option<NonZeroU32>,
    sink_tokens: Option<u32>,
    #[serde(default = "required")]
    policy: Policy,
    slot_bytes: SlotBytes,
    group: Option<u8>,
}

fn required() -> Policy {
    Policy::Required
}

/// Of one pool, or of each pool of a group.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum SlotBytes {
    One(u64),
    Many(Vec<u64>),
}

impl Described {
    /// # Errors
    /// A file that cannot be read, or a life cycle that cannot be.
    pub fn read(file: &Path, block_tokens: NonZeroU32) -> Result<Self, DescribedError> {
        let read = |source| DescribedError::Read { file: file.to_path_buf(), source };
        let mut text = String::new();
        File::open(file).map_err(read)?.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(read)?;
        let (pooled, snapshots) =
            parse(&text, block_tokens).map_err(|why| DescribedError::Format { file: file.to_path_buf(), why })?;
        Ok(Self { name: file.display().to_string(), pooled, snapshots, context: None })
    }
}

/// The life cycles of a description, or which one is wrong.
pub fn parse(text: &str, block_tokens: NonZeroU32) -> Result<(Vec<Pooled>, Snapshots), String> {
    let content: Content = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if content.life_cycles.len() > usize::from(u8::MAX) {
        return Err(format!("life_cycles are {} (at most 255)", content.life_cycles.len()));
    }
    let mut pooled: Vec<Pooled> = Vec::with_capacity(content.life_cycles.len());
    for (index, one) in content.life_cycles.into_iter().enumerate() {
        let retention = one.retention(block_tokens).map_err(|why| format!("life_cycles[{index}]: {why}"))?;
        let group = one.group.unwrap_or(index as u8);
        let sizes = match one.slot_bytes {
            SlotBytes::One(bytes) => vec![bytes],
            SlotBytes::Many(bytes) => bytes,
        };
        if pooled.iter().any(|other| other.life_cycle.group == group && other.sizes != sizes) {
            return Err(format!(
                "life_cycles[{index}]: slot_bytes are {sizes:?} (others of group {group} have other ones)"
            ));
        }
        let life_cycle = LifeCycle { retention, policy: one.policy, group, priority: Priority::default() };
        pooled.push(Pooled { life_cycle, layers: Vec::new(), sizes });
    }
    let groups = pooled.iter().map(|one| one.life_cycle.group).max().unwrap_or(0);
    match (0..groups).find(|group| pooled.iter().all(|one| one.life_cycle.group != *group)) {
        Some(group) => Err(format!("group {group} has no life cycle (groups count from 0)")),
        None => Ok((pooled, content.snapshots)),
    }
}

impl One {
    fn retention(&self, block_tokens: NonZeroU32) -> Result<Retention, &'static str> {
        match (self.kind, self.window, self.sink_tokens) {
            (Kind::Window, Some(tokens), sinks) => {
                Ok(Retention::Window { tokens, sink_blocks: sinks.unwrap_or(0).div_ceil(block_tokens.get()) })
            }
            (Kind::Window, None, _) => Err("a window has no `window`"),
            (_, Some(_), _) | (_, _, Some(_)) => Err("`window` and `sink_tokens` go with the kind window only"),
            (Kind::Full, None, None) => Ok(Retention::Full),
            (Kind::State, None, None) => Ok(Retention::State),
        }
    }
}
