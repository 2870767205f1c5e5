//! A folder with a model as hubs publish it: `config.json`, and weights in one safetensors file or several.

use super::json::Json;
use super::safetensors::Safetensors;
use super::{ModelError, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
/// Says which file of several holds each tensor.
const INDEX: &str = "model.safetensors.index.json";

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Json,
    files: Vec<Safetensors>,
    /// Which of `files` holds each tensor.
    places: BTreeMap<String, usize>,
}

impl Folder {
    /// Reads the configuration, and maps and checks the weights.
    ///
    /// # Errors
    /// A file is missing, cannot be read or is malformed, or files do not hold what the index says.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let config = Json::open(&path.join(CONFIG))?;
        let index = path.join(INDEX);
        // One file comes first, as in the library that writes these folders.
        if path.join(SINGLE).exists() || !index.exists() {
            return Self::new(path, config, vec![Safetensors::open(&path.join(SINGLE))?]);
        }
        let index = Json::open(&index)?;
        let map = index.get_object("weight_map")?.ok_or_else(|| index.missing("weight_map"))?;
        let mut wanted = Vec::new();
        for (tensor, file) in map.keys() {
            let name = file.as_str().filter(|name| is_plain_name(name));
            let bad = || map.bad_value(tensor, file, "it is not the name of a file in the folder");
            wanted.push((tensor, name.ok_or_else(bad)?));
        }
        let names: BTreeSet<&str> = wanted.iter().map(|(_, file)| *file).collect();
        let files = names.iter().map(|name| Safetensors::open(&path.join(name))).collect::<Result<_, _>>()?;
        let folder = Self::new(path, config, files)?;
        for (tensor, file) in wanted {
            let place = folder.places.get(tensor).map(|&place| folder.files[place].file());
            if place != Some(&path.join(file)) {
                return Err(ModelError::MissingTensor { file: path.join(file), tensor: tensor.to_string() });
            }
        }
        Ok(folder)
    }

    /// Joins files that are open already; `path` names the folder in messages.
    ///
    /// # Errors
    /// A tensor stands in two files.
    pub fn new(path: &Path, config: Json, files: Vec<Safetensors>) -> Result<Self, ModelError> {
        let mut places = BTreeMap::new();
        for (place, file) in files.iter().enumerate() {
            for name in file.names() {
                if let Some(before) = places.insert(name.to_string(), place) {
                    let why = format!("it stands in {} too", files[before].file().display());
                    let (file, what) = (file.file().to_path_buf(), format!("tensor {name}"));
                    return Err(ModelError::Malformed { file, what, why });
                }
            }
        }
        Ok(Self { path: path.to_path_buf(), config, files, places })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What `config.json` holds.
    pub fn config(&self) -> &Json {
        &self.config
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.places.get(name)?].tensor(name)
    }
}

/// Whether a name stays within its folder.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(part)), None) if part == name)
}
