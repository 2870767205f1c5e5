//! The cursor over a file's header.

use super::{Array, ModelError, TensorEntry, Value};
use crate::dequant::TensorType;
use crate::source::shown;
use std::collections::BTreeMap;
use std::path::Path;

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
/// What a file without `general.alignment` is aligned to, by the specification.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Arrays of arrays may nest this deep: enough for any known file, and a bound for the reader's stack.
const ARRAY_DEPTH_MAX: u32 = 4;
/// ggml's tensors have at most this many dimensions.
const DIMS_MAX: u32 = 4;

pub(super) struct Header {
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// Invariant: `at <= bytes.len()`.
pub(super) struct Reader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

/// Number types that stand in the file as they stand in memory, little-endian.
trait Fixed: Sized {
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! fixed {
    ($($number:ty),*) => {$(
        impl Fixed for $number {
            fn from_le(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("cut to the type's size"))
            }
        }
    )*};
}
fixed!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl<'a> Reader<'a> {
    pub fn new(file: &'a Path, bytes: &'a [u8]) -> Self {
        Self { file, bytes, at: 0 }
    }

    pub fn header(mut self) -> Result<Header, ModelError> {
        let magic = &self.bytes[..self.bytes.len().min(4)];
        if magic != MAGIC {
            let (length, found) = (self.bytes.len(), magic.to_vec());
            return Err(ModelError::BadMagic { file: self.file.to_path_buf(), length, found });
        }
        self.at = 4;
        let version = self.number::<u32>("the version")?;
        if !(2..=3).contains(&version) {
            return Err(ModelError::UnsupportedVersion { file: self.file.to_path_buf(), version });
        }
        let tensor_count = self.number::<u64>("the tensor count")?;
        let key_count = self.number::<u64>("the key count")?;
        let metadata = self.metadata(key_count)?;
        let tensors = self.tensors(tensor_count, &metadata)?;
        Ok(Header { version, metadata, tensors })
    }

    fn metadata(&mut self, count: u64) -> Result<BTreeMap<String, Value>, ModelError> {
        let mut metadata = BTreeMap::new();
        for index in 0..count {
            let key = self.text(&format!("metadata key {index}"))?;
            let what = format!("metadata key {}", shown(&key));
            let kind = self.number::<u32>(&what)?;
            let value = self.value(kind, &what)?;
            if metadata.insert(key, value).is_some() {
                return Err(self.malformed(&what, "it stands twice"));
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, kind: u32, what: &str) -> Result<Value, ModelError> {
        Ok(match kind {
            0 => Value::U8(self.number(what)?),
            1 => Value::I8(self.number(what)?),
            2 => Value::U16(self.number(what)?),
            3 => Value::I16(self.number(what)?),
            4 => Value::U32(self.number(what)?),
            5 => Value::I32(self.number(what)?),
            6 => Value::F32(self.number(what)?),
            7 => Value::Bool(self.flag(what)?),
            8 => Value::Str(self.text(what)?),
            9 => Value::Array(self.array(what, 1)?),
            10 => Value::U64(self.number(what)?),
            11 => Value::I64(self.number(what)?),
            12 => Value::F64(self.number(what)?),
            other => return Err(self.malformed(what, format!("unknown value type {other}"))),
        })
    }

    fn array(&mut self, what: &str, depth: u32) -> Result<Array, ModelError> {
        let kind = self.number::<u32>(what)?;
        let count = self.number::<u64>(what)?;
        Ok(match kind {
            0 => Array::U8(self.numbers(count, what)?),
            1 => Array::I8(self.numbers(count, what)?),
            2 => Array::U16(self.numbers(count, what)?),
            3 => Array::I16(self.numbers(count, what)?),
            4 => Array::U32(self.numbers(count, what)?),
            5 => Array::I32(self.numbers(count, what)?),
            6 => Array::F32(self.numbers(count, what)?),
            // These grow as they are read, so a false count runs into the end of the file and costs nothing before it.
            7 => Array::Bool((0..count).map(|_| self.flag(what)).collect::<Result<_, _>>()?),
            8 => Array::Str((0..count).map(|_| self.text(what)).collect::<Result<_, _>>()?),
            9 if depth < ARRAY_DEPTH_MAX => {
                let inner = (0..count).map(|_| self.array(what, depth + 1));
                Array::Array(inner.collect::<Result<_, _>>()?)
            }
            9 => {
                let why = format!("arrays nest deeper than {ARRAY_DEPTH_MAX}");
                return Err(self.malformed(what, why));
            }
            10 => Array::U64(self.numbers(count, what)?),
            11 => Array::I64(self.numbers(count, what)?),
            12 => Array::F64(self.numbers(count, what)?),
            other => return Err(self.malformed(what, format!("unknown value type {other}"))),
        })
    }

    fn tensors(
        &mut self,
        count: u64,
        metadata: &BTreeMap<String, Value>,
    ) -> Result<BTreeMap<String, TensorEntry>, ModelError> {
        let alignment = self.alignment(metadata)?;
        let mut headers = Vec::new();
        for index in 0..count {
            headers.push(self.tensor_header(index)?);
        }
        // Offsets count from the first aligned byte behind the header.
        let base = (self.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for header in headers {
            let what = format!("tensor {}", shown(&header.name));
            if header.offset % alignment != 0 {
                let why = format!("its offset {} is not aligned to {alignment}", header.offset);
                return Err(self.malformed(&what, why));
            }
            let entry = self.place(&header, base)?;
            if tensors.insert(header.name, entry).is_some() {
                return Err(self.malformed(&what, "it stands twice"));
            }
        }
        Ok(tensors)
    }

    fn alignment(&self, metadata: &BTreeMap<String, Value>) -> Result<u64, ModelError> {
        let Some(value) = metadata.get(ALIGNMENT_KEY) else {
            return Ok(ALIGNMENT_DEFAULT);
        };
        match value {
            Value::U32(alignment) if alignment.is_power_of_two() => Ok(u64::from(*alignment)),
            other => Err(ModelError::BadValue {
                file: self.file.to_path_buf(),
                key: ALIGNMENT_KEY.to_string(),
                value: format!("{other:?}"),
                why: "not a u32 power of two",
            }),
        }
    }

    fn tensor_header(&mut self, index: u64) -> Result<TensorHeader, ModelError> {
        let name = self.text(&format!("the name of tensor {index}"))?;
        let what = format!("tensor {}", shown(&name));
        let rank = self.number::<u32>(&what)?;
        if rank > DIMS_MAX {
            return Err(self.malformed(&what, format!("{rank} dimensions, at most {DIMS_MAX}")));
        }
        let mut dims = Vec::new();
        for _ in 0..rank {
            let dim = self.number::<u64>(&what)?;
            let dim =
                usize::try_from(dim).map_err(|_| self.malformed(&what, format!("dimension {dim} is too large")))?;
            dims.push(dim);
        }
        let kind = self.number::<u32>(&what)?;
        let kind = TensorType::from_id(kind).map_err(|kind| ModelError::UnsupportedTensorType {
            file: self.file.to_path_buf(),
            tensor: shown(&name).to_string(),
            kind,
        })?;
        let offset = self.number::<u64>(&what)?;
        Ok(TensorHeader { name, kind, dims, offset })
    }

    fn place(&self, header: &TensorHeader, base: u64) -> Result<TensorEntry, ModelError> {
        let what = format!("tensor {}", shown(&header.name));
        let row = header.dims.first().copied().unwrap_or(1);
        let (per_block, block_bytes) = (header.kind.block_weights(), header.kind.block_bytes());
        if row % per_block != 0 {
            let why = format!("rows of {row} are no multiple of {per_block}, the block of {}", header.kind);
            return Err(self.malformed(&what, why));
        }
        let too_large = || self.malformed(&what, format!("shape {:?} overflows", header.dims));
        let weights =
            header.dims.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim)).ok_or_else(too_large)?;
        let bytes = (weights / per_block).checked_mul(block_bytes).ok_or_else(too_large)?;
        let start = base.checked_add(header.offset);
        let end = start.and_then(|start| start.checked_add(bytes as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.bytes.len() as u64 => {
                Ok(TensorEntry { kind: header.kind, dims: header.dims.clone(), range: start as usize..end as usize })
            }
            _ => Err(ModelError::TensorOutsideFile {
                file: self.file.to_path_buf(),
                tensor: shown(&header.name).to_string(),
                offset: header.offset,
                bytes: bytes as u64,
                length: self.bytes.len() as u64,
            }),
        }
    }

    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], ModelError> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(count) {
            Ok(count) if count <= rest.len() => {
                self.at += count;
                Ok(&rest[..count])
            }
            _ => Err(ModelError::Truncated {
                file: self.file.to_path_buf(),
                what: what.to_string(),
                wanted: count,
                offset: self.at as u64,
                length: self.bytes.len() as u64,
            }),
        }
    }

    fn number<T: Fixed>(&mut self, what: &str) -> Result<T, ModelError> {
        self.take(size_of::<T>() as u64, what).map(T::from_le)
    }

    fn numbers<T: Fixed>(&mut self, count: u64, what: &str) -> Result<Vec<T>, ModelError> {
        let size = size_of::<T>();
        let bytes = self.take(count.saturating_mul(size as u64), what)?;
        Ok(bytes.chunks_exact(size).map(T::from_le).collect())
    }

    fn flag(&mut self, what: &str) -> Result<bool, ModelError> {
        match self.number::<u8>(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.malformed(what, format!("a bool with value {other}"))),
        }
    }

    fn text(&mut self, what: &str) -> Result<String, ModelError> {
        let length = self.number::<u64>(what)?;
        let bytes = self.take(length, what)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|e| self.malformed(what, format!("not UTF-8 after byte {}", e.valid_up_to())));
        text.map(str::to_string)
    }

    fn malformed(&self, what: &str, why: impl Into<String>) -> ModelError {
        ModelError::Malformed { file: self.file.to_path_buf(), what: what.to_string(), why: why.into() }
    }
}

struct TensorHeader {
    name: String,
    kind: TensorType,
    dims: Vec<usize>,
    offset: u64,
}
