//! A model as it lies on disk: one GGUF file, or a folder of safetensors. Tensors are found by name in either.

use crate::dequant::TensorType;
use crate::gguf::Gguf;
use std::fs::File;
use std::path::{Path, PathBuf};

mod folder;
mod json;
mod safetensors;
#[cfg(test)]
mod tests;
pub use folder::Folder;
pub use json::Json;
pub use safetensors::Safetensors;

/// Why a model was refused. Each message names the file, the thing in it and the value found.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read model file {}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{} is not a GGUF file ({length} bytes, begins with {found:02x?})", file.display())]
    BadMagic { file: PathBuf, length: usize, found: Vec<u8> },
    #[error("{} has GGUF version {version}; versions 2 and 3 are supported", file.display())]
    UnsupportedVersion { file: PathBuf, version: u32 },
    #[error("{} is truncated: {what} needs {wanted} bytes at offset {offset}, the file has {length}", file.display())]
    Truncated { file: PathBuf, what: String, wanted: u64, offset: u64, length: u64 },
    #[error("{}: {what} is malformed ({why})", file.display())]
    Malformed { file: PathBuf, what: String, why: String },
    #[error("{}: metadata key {key} is missing", file.display())]
    MissingKey { file: PathBuf, key: String },
    #[error("{}: metadata key {key} is {found}, not {wanted}", file.display())]
    WrongValueType { file: PathBuf, key: String, wanted: &'static str, found: &'static str },
    #[error("{}: metadata key {key} has value {value} ({why})", file.display())]
    BadValue { file: PathBuf, key: String, value: String, why: &'static str },
    #[error("{}: architecture {architecture} is not supported (supported: {supported})", file.display())]
    UnsupportedArchitecture { file: PathBuf, architecture: String, supported: String },
    #[error("{}: tensor {tensor} has type {kind}, which is not supported", file.display())]
    UnsupportedTensorType { file: PathBuf, tensor: String, kind: String },
    #[error("{}: tensor {tensor} is missing", file.display())]
    MissingTensor { file: PathBuf, tensor: String },
    #[error("{}: tensor {tensor} is not part of a supported model", file.display())]
    UnexpectedTensor { file: PathBuf, tensor: String },
    #[error("{}: tensor {tensor} has shape {found:?}, not {wanted:?}", file.display())]
    WrongShape { file: PathBuf, tensor: String, found: Vec<usize>, wanted: Vec<usize> },
    #[error("{}: tensor {tensor} ({bytes} bytes at offset {offset}) ends outside the file of {length} bytes", file.display())]
    TensorOutsideFile { file: PathBuf, tensor: String, offset: u64, bytes: u64, length: u64 },
}

/// Names are cut to this many bytes in messages.
const NAME_SHOWN_BYTES_MAX: usize = 100;

/// A name from a file, cut so that a message stays readable.
pub(crate) fn shown(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME_SHOWN_BYTES_MAX)]
}

/// A file's bytes: mapped, or in memory.
pub(crate) enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a file.
    pub fn map(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { file: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        // SAFETY: a map of a file is as safe as the file is still. Model files are written once, under another name,
        // and renamed into place; nobody writes to them while they are mapped.
        unsafe { memmap2::Mmap::map(&file) }.map(Self::Mapped).map_err(io)
    }

    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A tensor where it lies.
///
/// # Shape
/// `dims[0]` is the row length (the fastest dimension), whatever order the file writes them in. `bytes` is as long as
/// `kind` and `dims` say, and rows are whole blocks of `kind`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'a> {
    pub kind: TensorType,
    pub dims: Vec<usize>,
    pub bytes: &'a [u8],
}

/// An open model.
#[derive(Debug)]
pub enum Source {
    Gguf(Gguf),
    /// A folder with `config.json` and weights as safetensors, as models are published on hubs.
    Folder(Folder),
}

impl Source {
    /// Opens a GGUF file or a folder of safetensors. Maps the weights and checks where they lie; reads none.
    ///
    /// # Errors
    /// A file cannot be read, or is not what its place says.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        match path.is_dir() {
            true => Folder::open(path).map(Self::Folder),
            false => Gguf::open(path).map(Self::Gguf),
        }
    }

    /// The file or folder, as it was opened.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(gguf) => gguf.path(),
            Self::Folder(folder) => folder.path(),
        }
    }

    /// `None` for a folder.
    pub fn gguf(&self) -> Option<&Gguf> {
        match self {
            Self::Gguf(gguf) => Some(gguf),
            Self::Folder(_) => None,
        }
    }

    /// Names of all tensors, sorted, as the files write them.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(gguf) => gguf.tensors().map(|(name, _)| name).collect(),
            Self::Folder(folder) => folder.names().collect(),
        }
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        match self {
            Self::Gguf(gguf) => gguf.tensor(name).map(|entry| Tensor {
                kind: entry.kind,
                dims: entry.dims.clone(),
                bytes: gguf.tensor_bytes(entry),
            }),
            Self::Folder(folder) => folder.tensor(name),
        }
    }
}

impl From<Gguf> for Source {
    fn from(gguf: Gguf) -> Self {
        Self::Gguf(gguf)
    }
}

impl From<Folder> for Source {
    fn from(folder: Folder) -> Self {
        Self::Folder(folder)
    }
}
