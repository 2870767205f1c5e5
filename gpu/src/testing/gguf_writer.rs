//! Writes GGUF files.

use super::quantise;
use crate::dequant::TensorType;
use crate::gguf::{Array, Value};

/// What the specification aligns tensors to where a file says nothing.
const ALIGNMENT: usize = 32;

/// Collects metadata and tensors and writes them as a GGUF file of version 3.
#[derive(Clone, Default)]
pub struct GgufWriter {
    keys: Vec<(String, Value)>,
    tensors: Vec<WrittenTensor>,
}

#[derive(Clone)]
struct WrittenTensor {
    name: String,
    kind: u32,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl GgufWriter {
    /// Sets a key, over what it had.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.keys.retain(|(known, _)| known != key);
        self.keys.push((key.to_string(), value));
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(known, _)| known != key);
        self
    }

    /// Adds a tensor, converting the weights to `kind`.
    pub fn tensor(&mut self, name: &str, kind: TensorType, dims: &[usize], weights: &[f32]) -> &mut Self {
        assert_eq!(weights.len(), dims.iter().product::<usize>(), "weights of {name}");
        self.raw_tensor(name, kind.id(), dims, quantise(kind, weights))
    }

    /// Adds a tensor as it is, whether it makes sense or not.
    pub fn raw_tensor(&mut self, name: &str, kind: u32, dims: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.remove_tensor(name);
        self.tensors.push(WrittenTensor { name: name.to_string(), kind, dims: dims.to_vec(), bytes });
        self
    }

    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// The file, and the length of its header.
    pub fn to_bytes(&self) -> (Vec<u8>, usize) {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0_usize;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            for &dim in &tensor.dims {
                out.extend((dim as u64).to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(ALIGNMENT);
        }
        let header = out.len();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.bytes);
        }
        (out, header)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let kind = match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::Str(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12_u32,
    };
    out.extend(kind.to_le_bytes());
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::Str(v) => put_text(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! numbers {
        ($kind:literal, $values:expr) => {{
            out.extend(($kind as u32).to_le_bytes());
            out.extend(($values.len() as u64).to_le_bytes());
            $values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(v) => numbers!(0, v),
        Array::I8(v) => numbers!(1, v),
        Array::U16(v) => numbers!(2, v),
        Array::I16(v) => numbers!(3, v),
        Array::U32(v) => numbers!(4, v),
        Array::I32(v) => numbers!(5, v),
        Array::F32(v) => numbers!(6, v),
        Array::Bool(v) => numbers!(7, v.iter().map(|&flag| u8::from(flag)).collect::<Vec<_>>()),
        Array::Str(v) => {
            out.extend(8_u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|text| put_text(out, text));
        }
        Array::Array(v) => {
            out.extend(9_u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|inner| put_array(out, inner));
        }
        Array::U64(v) => numbers!(10, v),
        Array::I64(v) => numbers!(11, v),
        Array::F64(v) => numbers!(12, v),
    }
}
