//! Writes safetensors files, and the folders that hold a model of them.

use super::quantise;
use crate::dequant::TensorType;
use crate::source::{Folder, Json, Safetensors};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Collects tensors and writes them as a safetensors file.
#[derive(Clone, Default)]
pub struct SafetensorsWriter {
    tensors: Vec<WrittenTensor>,
}

#[derive(Clone)]
struct WrittenTensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl SafetensorsWriter {
    /// Adds a tensor, converting the weights to `kind`; `dims[0]` is the row length.
    pub fn tensor(&mut self, name: &str, kind: TensorType, dims: &[usize], weights: &[f32]) -> &mut Self {
        assert_eq!(weights.len(), dims.iter().product::<usize>(), "weights of {name}");
        self.raw_tensor(name, &kind.to_string(), dims, quantise(kind, weights))
    }

    /// Adds a tensor as it is, whether it makes sense or not.
    pub fn raw_tensor(&mut self, name: &str, dtype: &str, dims: &[usize], bytes: Vec<u8>) -> &mut Self {
        self.remove_tensor(name);
        let shape = dims.iter().rev().copied().collect();
        self.tensors.push(WrittenTensor { name: name.into(), dtype: dtype.into(), shape, bytes });
        self
    }

    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// What the header says, so that a test can damage it.
    pub fn header(&self) -> Map<String, Value> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut at = 0;
        for tensor in &self.tensors {
            let end = at + tensor.bytes.len();
            let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end] });
            header.insert(tensor.name.clone(), entry);
            at = end;
        }
        header
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.with_header(&Value::Object(self.header()).to_string())
    }

    /// The file with another header.
    pub fn with_header(&self, header: &str) -> Vec<u8> {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        self.tensors.iter().for_each(|tensor| out.extend(&tensor.bytes));
        out
    }
}

/// A folder of a model: its configuration, and its weights in one file.
#[derive(Clone, Default)]
pub struct FolderWriter {
    pub config: Map<String, Value>,
    pub weights: SafetensorsWriter,
}

impl FolderWriter {
    /// Sets a key of the configuration.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.config.insert(key.to_string(), value);
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.config.remove(key);
        self
    }

    /// The folder, opened from memory.
    ///
    /// # Errors
    /// As `Folder::open`.
    pub fn folder(&self) -> Result<Folder, crate::source::ModelError> {
        let path = Path::new("tiny");
        let config = Value::Object(self.config.clone()).to_string();
        let weights = Safetensors::from_bytes(&path.join("model.safetensors"), self.weights.to_bytes())?;
        Folder::new(path, Json::from_bytes(&path.join("config.json"), config.as_bytes())?, vec![weights])
    }

    /// Writes the folder.
    ///
    /// # Errors
    /// Of the file system.
    pub fn write(&self, path: impl AsRef<Path>) -> std::io::Result<()> {
        let path = path.as_ref();
        std::fs::create_dir_all(path)?;
        std::fs::write(path.join("config.json"), Value::Object(self.config.clone()).to_string())?;
        std::fs::write(path.join("model.safetensors"), self.weights.to_bytes())
    }

    /// Writes the folder with the weights in so many files and an index.
    ///
    /// # Errors
    /// Of the file system.
    pub fn write_sharded(&self, path: impl AsRef<Path>, files: usize) -> std::io::Result<()> {
        let path = path.as_ref();
        std::fs::create_dir_all(path)?;
        std::fs::write(path.join("config.json"), Value::Object(self.config.clone()).to_string())?;
        let mut map = Map::new();
        for file in 0..files {
            let name = format!("model-{:05}-of-{files:05}.safetensors", file + 1);
            let tensors = self.weights.tensors.iter().skip(file).step_by(files).cloned().collect::<Vec<_>>();
            tensors.iter().for_each(|tensor| _ = map.insert(tensor.name.clone(), json!(name)));
            std::fs::write(path.join(&name), SafetensorsWriter { tensors }.to_bytes())?;
        }
        let index = json!({ "metadata": {}, "weight_map": map });
        std::fs::write(path.join("model.safetensors.index.json"), index.to_string())
    }
}
