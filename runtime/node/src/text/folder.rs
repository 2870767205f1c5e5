//! A model folder's text side: `tokenizer.json` and the small files beside it.

use super::chat::ChatTemplate;
use super::json;
use super::model::{TextError, TextModel, ends_named};
use super::tokenizer::{Tokenizer, TokenizerParts};
use serde_json::Value;
use starling_core::ids::TokenId;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The rules and the vocabulary; the only file that must be there.
const TOKENIZER: &str = "tokenizer.json";
/// Which tokens begin and end a text, and in older folders the chat template.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Which tokens end a generation.
const GENERATION_CONFIG: &str = "generation_config.json";
/// The model's configuration names them too.
const CONFIG: &str = "config.json";
const TEMPLATE: &str = "chat_template.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";

impl TextModel {
    /// Reads the folder of a model whose embedding has so many rows.
    ///
    /// # Errors
    /// When something is missing, malformed, or of a kind that is not supported.
    pub fn from_folder(folder: &Path, embedding: u32) -> Result<Self, TextError> {
        let file = read_json(folder, TOKENIZER)?.ok_or_else(|| bad(TOKENIZER, "is missing from the model's folder"))?;
        let config = read_json(folder, TOKENIZER_CONFIG)?.unwrap_or_default();
        let mut parts = json::parts(file, embedding)?;
        let (begin, end) = (special(&config, "bos_token")?, special(&config, "eos_token")?);
        if let Some(name) = &begin {
            parts.begin = Some(named(&parts, "bos_token", name)?);
        }
        if let Some(adds) = config["add_bos_token"].as_bool() {
            parts.adds_begin = adds;
        }
        let mut ends = ends_named(&parts.tokens, &parts.kinds);
        if let Some(name) = &end {
            ends.push(named(&parts, "eos_token", name)?);
        }
        for file in [GENERATION_CONFIG, CONFIG] {
            ends.extend(end_ids(file, &read_json(folder, file)?.unwrap_or_default()["eos_token_id"])?);
        }
        ends.sort_unstable();
        ends.dedup();
        parts.ends = ends;
        let tokenizer = Tokenizer::new(parts)?;
        let source = template(folder, &config)?;
        let (begin, end) = (begin.unwrap_or_default(), end.unwrap_or_default());
        let template = source.map(|source| ChatTemplate::new(source, &tokenizer, begin, end)).transpose()?;
        Ok(Self { tokenizer, template })
    }
}

fn bad(file: &'static str, why: impl Into<String>) -> TextError {
    TextError::Folder { file, why: why.into() }
}

fn read(folder: &Path, file: &'static str) -> Result<Option<String>, TextError> {
    let path = folder.join(file);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Io { file: path, source }),
    }
}

fn read_json(folder: &Path, file: &'static str) -> Result<Option<Value>, TextError> {
    let text = read(folder, file)?;
    let value = text.map(|text| serde_json::from_str(&text).map_err(|error| bad(file, error.to_string())));
    match value.transpose()? {
        Some(Value::Object(fields)) => Ok(Some(Value::Object(fields))),
        Some(_) => Err(bad(file, "must be a JSON object")),
        None => Ok(None),
    }
}

/// A token's name: a string, or an object that has it as `content`.
fn special(config: &Value, key: &'static str) -> Result<Option<String>, TextError> {
    match &config[key] {
        Value::Null => Ok(None),
        Value::String(name) => Ok(Some(name.clone())),
        value => match value["content"].as_str() {
            Some(name) => Ok(Some(name.to_owned())),
            None => Err(bad(TOKENIZER_CONFIG, format!("{key} is neither a string nor a token"))),
        },
    }
}

fn named(parts: &TokenizerParts, key: &str, name: &str) -> Result<TokenId, TextError> {
    let id = parts.tokens.iter().position(|token| token == name);
    let id = id.ok_or_else(|| bad(TOKENIZER_CONFIG, format!("{key} {name:?} is not in {TOKENIZER}")))?;
    Ok(id as TokenId)
}

/// One id or several.
fn end_ids(file: &'static str, value: &Value) -> Result<Vec<TokenId>, TextError> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| bad(file, format!("eos_token_id has {value}, which is not a token id")))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => Ok(vec![id(one)?]),
    }
}

/// The chat template: a file of its own, else in the tokenizer's configuration, of several the one named `default`.
fn template(folder: &Path, config: &Value) -> Result<Option<String>, TextError> {
    if let Some(source) = read(folder, TEMPLATE)? {
        return Ok(Some(source));
    }
    if let Some(file) = read_json(folder, TEMPLATE_JSON)? {
        let source = file["chat_template"].as_str();
        return source
            .map(|source| Some(source.to_owned()))
            .ok_or_else(|| bad(TEMPLATE_JSON, "chat_template is no text"));
    }
    match &config["chat_template"] {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(source.clone())),
        Value::Array(named) => {
            let default = named.iter().find(|template| template["name"] == "default");
            Ok(default.and_then(|template| template["template"].as_str()).map(str::to_owned))
        }
        _ => Err(bad(TOKENIZER_CONFIG, "chat_template is neither a text nor a list of named texts")),
    }
}
