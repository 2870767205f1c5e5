//! A JSON object of a model's folder, read key by key.

use super::ModelError;
use serde_json::{Map, Value};
use std::fmt;
use std::path::{Path, PathBuf};

/// An object with the file it came from, so that errors name both. A key whose value is null counts as absent.
#[derive(Clone, Debug)]
pub struct Json {
    file: PathBuf,
    /// Where in the file the object lies, as a prefix of its keys.
    prefix: String,
    map: Map<String, Value>,
}

impl Json {
    /// Reads a file that is one object.
    ///
    /// # Errors
    /// The file cannot be read, or is no JSON object.
    pub fn open(file: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read(file).map_err(|source| ModelError::Io { file: file.to_path_buf(), source })?;
        Self::from_bytes(file, &text)
    }

    /// As `open`, of text that is in memory.
    ///
    /// # Errors
    /// It is no JSON object.
    pub fn from_bytes(file: &Path, text: &[u8]) -> Result<Self, ModelError> {
        let malformed = |why: String| ModelError::Malformed { file: file.to_path_buf(), what: "its JSON".into(), why };
        match serde_json::from_slice(text).map_err(|error| malformed(error.to_string()))? {
            Value::Object(map) => Ok(Self { file: file.to_path_buf(), prefix: String::new(), map }),
            other => Err(malformed(format!("it is {}, not an object", type_name(&other)))),
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    pub fn keys(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.map.iter().map(|(key, value)| (&**key, value))
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn get_as<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| self.wrong_type(key, wanted, value))
    }

    /// # Errors
    /// The key is there and no integer, or does not fit.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let integer = |value: &Value| value.as_u64().map(i128::from).or(value.as_i64().map(i128::from));
        let Some(number) = self.get_as(key, "an integer", integer)? else { return Ok(None) };
        u32::try_from(number).map(Some).map_err(|_| self.bad_value(key, number, "does not fit 32 bits"))
    }

    /// # Errors
    /// The key is there and no number.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.get_as(key, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    /// # Errors
    /// The key is there and no string.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.get_as(key, "a string", Value::as_str)
    }

    /// # Errors
    /// The key is there and no bool.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get_as(key, "a bool", Value::as_bool)
    }

    /// # Errors
    /// The key is there and no array.
    pub fn get_array(&self, key: &str) -> Result<Option<&[Value]>, ModelError> {
        self.get_as(key, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    /// # Errors
    /// The key is there and no object.
    pub fn get_object(&self, key: &str) -> Result<Option<Self>, ModelError> {
        let map = self.get_as(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Self { file: self.file.clone(), prefix: format!("{}{key}.", self.prefix), map: map.clone() }))
    }

    /// The error for a key that must be there.
    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { file: self.file.clone(), key: self.named(key) }
    }

    /// The error for a key whose value cannot be.
    pub fn bad_value(&self, key: &str, value: impl fmt::Display, why: &'static str) -> ModelError {
        ModelError::BadValue { file: self.file.clone(), key: self.named(key), value: value.to_string(), why }
    }

    fn wrong_type(&self, key: &str, wanted: &'static str, found: &Value) -> ModelError {
        let (file, key) = (self.file.clone(), self.named(key));
        ModelError::WrongValueType { file, key, wanted, found: type_name(found) }
    }

    fn named(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
