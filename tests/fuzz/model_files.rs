//! Fuzz targets of model files: plain functions over bytes that a file could hold.

use starling_gpu::gguf::Gguf;
use starling_gpu::llama::Model;
use starling_gpu::source::{Safetensors, Source};
use starling_gpu::weights::Arithmetic;
use std::path::Path;

const NAME: &str = "fuzz.bin";

/// A GGUF file, or what follows its magic and version: refused by name, or all its tensors lie inside and it loads or is
/// refused by name.
pub fn gguf_header(bytes: &[u8]) {
    for file in [bytes.to_vec(), [b"GGUF\x03\0\0\0", bytes].concat()] {
        let length = file.len();
        match Gguf::from_bytes(NAME, file) {
            Ok(gguf) => {
                for (name, entry) in gguf.tensors() {
                    let (blocks, bytes) = (gguf.tensor_bytes(entry).len(), entry.kind.block_bytes());
                    let weights: usize = entry.dims.iter().product();
                    assert!(blocks <= length, "tensor {name:?}");
                    assert_eq!(blocks / bytes * entry.kind.block_weights(), weights, "tensor {name:?}");
                }
                loads_or_names(&gguf.into());
            }
            Err(why) => names_the_file(&why.to_string()),
        }
    }
}

/// A safetensors file, or its header with a length before it and some weights behind.
pub fn safetensors_header(bytes: &[u8]) {
    let length = (bytes.len() as u64).to_le_bytes();
    for file in [bytes.to_vec(), [&length, bytes].concat(), [&length, bytes, &[0; 24]].concat()] {
        let length = file.len();
        match Safetensors::from_bytes(Path::new(NAME), file) {
            Ok(file) => {
                let all: usize = file.names().map(|name| file.tensor(name).expect("named").bytes.len()).sum();
                assert!(all <= length, "{all} bytes of tensors in a file of {length}");
            }
            Err(why) => names_the_file(&why.to_string()),
        }
    }
}

/// A model that can be opened loads, or is refused by name.
pub fn loads_or_names(source: &Source) {
    if let Err(why) = Model::load(source, Arithmetic::Exact) {
        let (message, path) = (why.to_string(), source.path().display().to_string());
        assert!(message.contains(&path), "{message}");
    }
}

fn names_the_file(message: &str) {
    assert!(message.contains(NAME), "{message}");
    assert!(message.len() < 1000, "a message of {} bytes", message.len());
}
