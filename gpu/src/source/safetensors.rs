//! Reads safetensors files: eight bytes with the length of a JSON header, the header, and the tensors without gaps.
//!
//! Every claim of the header is checked against the file before it is used.
//!
//! # Source
//! The format's description in the safetensors project: little-endian, rows one after the other, no holes.

use super::json::Json;
use super::{Bytes, ModelError, Tensor, shown};
use crate::dequant::TensorType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;
/// A header may be this long: the limit of the format's own library, a hundred times what large models have.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// A key of the header that names no tensor, but strings about the file.
const ABOUT: &str = "__metadata__";

/// An open file.
pub struct Safetensors {
    file: PathBuf,
    bytes: Bytes,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    kind: TensorType,
    dims: Vec<usize>,
    /// Within the file.
    range: Range<usize>,
}

impl fmt::Debug for Safetensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Safetensors").field("file", &self.file).field("tensors", &self.tensors.len()).finish()
    }
}

impl Safetensors {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// It cannot be read, is malformed, or holds a tensor of a type that cannot be read.
    pub fn open(file: &Path) -> Result<Self, ModelError> {
        Self::parse(file, Bytes::map(file)?)
    }

    /// Checks a file that is in memory already; `file` names it in messages.
    ///
    /// # Errors
    /// As `open`.
    pub fn from_bytes(file: &Path, bytes: Vec<u8>) -> Result<Self, ModelError> {
        Self::parse(file, Bytes::Owned(bytes))
    }

    fn parse(file: &Path, bytes: Bytes) -> Result<Self, ModelError> {
        let tensors = Header { file, bytes: bytes.as_slice() }.tensors()?;
        Ok(Self { file: file.to_path_buf(), bytes, tensors })
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let entry = self.tensors.get(name)?;
        let bytes = &self.bytes.as_slice()[entry.range.clone()];
        Some(Tensor { kind: entry.kind, dims: entry.dims.clone(), bytes })
    }
}

struct Header<'a> {
    file: &'a Path,
    bytes: &'a [u8],
}

impl Header<'_> {
    fn tensors(&self) -> Result<BTreeMap<String, Entry>, ModelError> {
        let truncated = |what: &str, wanted: u64, offset: usize| ModelError::Truncated {
            file: self.file.to_path_buf(),
            what: what.to_string(),
            wanted,
            offset: offset as u64,
            length: self.bytes.len() as u64,
        };
        let (length, rest) = self
            .bytes
            .split_first_chunk::<LENGTH_BYTES>()
            .ok_or_else(|| truncated("the header's length", LENGTH_BYTES as u64, 0))?;
        let length = u64::from_le_bytes(*length);
        if length > HEADER_BYTES_MAX {
            let why = format!("a header of {length} bytes, at most {HEADER_BYTES_MAX}");
            return Err(self.malformed("the header's length", why));
        }
        let header = rest.get(..length as usize).ok_or_else(|| truncated("the header", length, LENGTH_BYTES))?;
        let header = Json::from_bytes(self.file, header)?;
        let base = LENGTH_BYTES + length as usize;
        let mut tensors = BTreeMap::new();
        for (name, value) in header.keys().filter(|(name, _)| *name != ABOUT) {
            tensors.insert(name.to_string(), self.entry(name, value, base)?);
        }
        self.check_places(&tensors, base)?;
        Ok(tensors)
    }

    fn entry(&self, name: &str, value: &Value, base: usize) -> Result<Entry, ModelError> {
        let what = format!("tensor {}", shown(name));
        let bad = |why: String| self.malformed(&what, why);
        let numbers = |key: &str| -> Result<Vec<usize>, ModelError> {
            let array = value.get(key).and_then(Value::as_array);
            let numbers = array.and_then(|array| {
                array.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect::<Option<Vec<_>>>()
            });
            numbers.ok_or_else(|| bad(format!("its {key} is {}, not a list of sizes", shown_value(value.get(key)))))
        };
        let kind = match value.get("dtype").and_then(Value::as_str) {
            Some("F32") => TensorType::F32,
            Some("F16") => TensorType::F16,
            Some("BF16") => TensorType::Bf16,
            Some(other) => {
                return Err(ModelError::UnsupportedTensorType {
                    file: self.file.to_path_buf(),
                    tensor: shown(name).to_string(),
                    kind: shown(other).to_string(),
                });
            }
            None => return Err(bad(format!("its dtype is {}, not a string", shown_value(value.get("dtype"))))),
        };
        let (shape, offsets) = (numbers("shape")?, numbers("data_offsets")?);
        let &[start, end] = offsets.as_slice() else {
            return Err(bad(format!("its data_offsets are {} numbers, not 2", offsets.len())));
        };
        let bytes = shape.iter().try_fold(kind.block_bytes(), |bytes, &dim| bytes.checked_mul(dim));
        let bytes = bytes.ok_or_else(|| bad("its shape overflows".into()))?;
        if start.checked_add(bytes) != Some(end) {
            return Err(bad(format!("it lies from {start} to {end}, but {kind} of its shape takes {bytes} bytes")));
        }
        match base.checked_add(end) {
            Some(last) if last <= self.bytes.len() => {
                let dims = shape.into_iter().rev().collect();
                Ok(Entry { kind, dims, range: base + start..last })
            }
            _ => Err(ModelError::TensorOutsideFile {
                file: self.file.to_path_buf(),
                tensor: shown(name).to_string(),
                offset: start as u64,
                bytes: bytes as u64,
                length: self.bytes.len() as u64,
            }),
        }
    }

    /// Tensors lie one after the other and end where the file ends.
    fn check_places(&self, tensors: &BTreeMap<String, Entry>, base: usize) -> Result<(), ModelError> {
        let mut places: Vec<_> =
            tensors.iter().map(|(name, entry)| (entry.range.start, entry.range.end, name)).collect();
        places.sort_unstable();
        let mut at = base;
        for (start, end, name) in places {
            if start != at {
                let why = format!("it begins at byte {start}, where {at} is due");
                return Err(self.malformed(&format!("tensor {}", shown(name)), why));
            }
            at = end;
        }
        match self.bytes.len() - at {
            0 => Ok(()),
            more => Err(self.malformed("the end of the file", format!("{more} bytes belong to no tensor"))),
        }
    }

    fn malformed(&self, what: &str, why: impl Into<String>) -> ModelError {
        ModelError::Malformed { file: self.file.to_path_buf(), what: what.to_string(), why: why.into() }
    }
}

fn shown_value(value: Option<&Value>) -> String {
    value.map_or("absent".into(), |value| shown(&value.to_string()).to_string())
}
