//! Tiny models for tests: written as GGUF files or folders of safetensors, with seeded weights and a byte-level tokenizer.
//!
//! Public so that other crates' tests can run a whole engine in milliseconds; no part of the product uses it.

mod folder_writer;
mod gguf_writer;
mod quantise;
pub mod reference;
mod tiny;

pub use folder_writer::{FolderWriter, SafetensorsWriter};
pub use gguf_writer::GgufWriter;
pub use quantise::quantise;
pub use tiny::{CHAT_TEMPLATE, CONTROL_TOKENS, TinyModel};
