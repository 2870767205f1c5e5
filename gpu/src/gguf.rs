//! Reads GGUF files: metadata and where each tensor lies. The file is mapped, so opening costs its header only.
//!
//! Every length in the file is checked against what the file still holds before anything is allocated for it.
//!
//! # Source
//! The GGUF specification of the ggml project, versions 2 and 3, little-endian.

use crate::dequant::TensorType;
use crate::source::Bytes;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use crate::source::ModelError;

mod reader;
#[cfg(test)]
mod tests;

use reader::Reader;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one type. Typed vectors, so that memory stays within a small factor of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// The name of the value's type, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "a bool",
            Self::Str(_) => "a string",
            Self::Array(Array::Str(_)) => "an array of strings",
            Self::Array(_) => "an array",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }

    fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl Array {
    fn to_integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            Self::U8(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I8(v) => v.iter().map(|&v| v.into()).collect(),
            Self::U16(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I16(v) => v.iter().map(|&v| v.into()).collect(),
            Self::U32(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I32(v) => v.iter().map(|&v| v.into()).collect(),
            Self::U64(v) => v.iter().map(|&v| v.into()).collect(),
            Self::I64(v) => v.iter().map(|&v| v.into()).collect(),
            _ => return None,
        })
    }
}

/// Where a tensor lies, and what it is.
///
/// # Shape
/// `dims[0]` is the row length (the fastest dimension), as the file writes it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    pub kind: TensorType,
    pub dims: Vec<usize>,
    /// The tensor's bytes within the file; inside it, and as long as `kind` and `dims` say.
    range: Range<usize>,
}

/// An open model file.
pub struct Gguf {
    path: PathBuf,
    bytes: Bytes,
    version: u32,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorEntry>,
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("version", &self.version)
            .field("keys", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .finish()
    }
}

impl Gguf {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// Any `ModelError` but those of a model's configuration.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        Self::parse(path.to_path_buf(), Bytes::map(path)?)
    }

    /// Checks a file that is in memory already; `path` names it in messages.
    ///
    /// # Errors
    /// As `open`.
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self, ModelError> {
        Self::parse(path.as_ref().to_path_buf(), Bytes::Owned(bytes))
    }

    fn parse(path: PathBuf, bytes: Bytes) -> Result<Self, ModelError> {
        let header = Reader::new(&path, bytes.as_slice()).header()?;
        Ok(Self { path, bytes, version: header.version, metadata: header.metadata, tensors: header.tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn version(&self) -> u32 {
        self.version
    }

    /// Every key with its value, in the order of the keys.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (&**key, value))
    }

    /// Every tensor, in the order of the names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (&**name, entry))
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The bytes of a tensor of this file, as the file stores them.
    pub fn tensor_bytes(&self, entry: &TensorEntry) -> &[u8] {
        &self.bytes.as_slice()[entry.range.clone()]
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// # Errors
    /// The key is there and not a string.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Str(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// Any integer type that holds a value within `u32`.
    ///
    /// # Errors
    /// The key is there and is no integer, or does not fit.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let integer = value.as_integer().ok_or_else(|| self.wrong_type(key, "an integer", value))?;
        let fits = u32::try_from(integer).map_err(|_| self.bad_value(key, integer, "does not fit 32 bits"))?;
        Ok(Some(fits))
    }

    /// # Errors
    /// The key is there and is no floating-point number.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::F32(number)) => Ok(Some(number)),
            Some(&Value::F64(number)) => Ok(Some(number as f32)),
            Some(other) => Err(self.wrong_type(key, "a floating-point number", other)),
        }
    }

    /// # Errors
    /// The key is there and not a bool.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong_type(key, "a bool", other)),
        }
    }

    /// # Errors
    /// The key is there and not an array of strings.
    pub fn get_str_array(&self, key: &str) -> Result<Option<&[String]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Str(texts))) => Ok(Some(texts)),
            Some(other) => Err(self.wrong_type(key, "an array of strings", other)),
        }
    }

    /// An array of any integer type whose values fit `i64`.
    ///
    /// # Errors
    /// The key is there and not such an array.
    pub fn get_int_array(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let integers = match value {
            Value::Array(array) => array.to_integers(),
            _ => None,
        };
        let integers = integers.ok_or_else(|| self.wrong_type(key, "an array of integers", value))?;
        let fits = |v: i128| i64::try_from(v).map_err(|_| self.bad_value(key, v, "does not fit 64 bits with a sign"));
        integers.into_iter().map(fits).collect::<Result<_, _>>().map(Some)
    }

    /// # Errors
    /// The key is there and not an array of 32-bit floating-point numbers.
    pub fn get_f32_array(&self, key: &str) -> Result<Option<&[f32]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(numbers))) => Ok(Some(numbers)),
            Some(other) => Err(self.wrong_type(key, "an array of f32", other)),
        }
    }

    /// The error for a key that must be there: `gguf.get_u32(key)?.ok_or_else(|| gguf.missing(key))?`.
    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { file: self.path.clone(), key: key.to_string() }
    }

    /// The error for a key whose value cannot be.
    pub fn bad_value(&self, key: &str, value: impl fmt::Display, why: &'static str) -> ModelError {
        ModelError::BadValue { file: self.path.clone(), key: key.to_string(), value: value.to_string(), why }
    }

    fn wrong_type(&self, key: &str, wanted: &'static str, found: &Value) -> ModelError {
        ModelError::WrongValueType { file: self.path.clone(), key: key.to_string(), wanted, found: found.type_name() }
    }
}
