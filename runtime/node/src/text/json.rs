//! The rules of a `tokenizer.json`, applied by the crate that defines the format.
//!
//! Tokens that are found as a whole are taken out of it and found by ourselves, as in every other family: the format reads
//! control tokens in any text, and here nothing that people wrote may become one.

use super::model::TextError;
use super::pieces::{SPACE, byte_named};
use super::tokenizer::{Rules, SpacePrefix, TokenKind, TokenizerParts};
use serde::Deserialize;
use serde_json::{Value, json};
use starling_core::ids::TokenId;
use std::collections::HashSet;

/// A text of n bytes may have n / 4 after normalisation, no known form shrinks it further.
const NORMALISED_SHRINKS_BY: usize = 4;

pub struct JsonRules {
    first: tokenizers::Tokenizer,
    /// For text that does not stand at the prompt's start, where that makes a difference.
    later: Option<tokenizers::Tokenizer>,
    spells_bytes: bool,
    space_prefix: SpacePrefix,
    normalises: bool,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

impl JsonRules {
    /// Encodes text in which no token is to be found as a whole.
    ///
    /// # Errors
    /// When the rules fail, which no text is known to cause.
    pub fn encode(&self, text: &str, is_first: bool, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        if text.is_empty() {
            return Ok(());
        }
        let rules = self.later.as_ref().filter(|_| !is_first).unwrap_or(&self.first);
        let encoding = rules.encode_fast(text, false).map_err(|error| TextError::Encode(error.to_string()))?;
        tokens.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    pub fn spells_bytes(&self) -> bool {
        self.spells_bytes
    }

    pub fn space_prefix(&self) -> SpacePrefix {
        self.space_prefix
    }

    /// How many bytes of text may become one byte of tokens.
    pub fn shrinks_by_at_most(&self) -> usize {
        if self.normalises { NORMALISED_SHRINKS_BY } else { 1 }
    }
}

/// Reads a `tokenizer.json` for a model whose embedding has so many rows. What the vocabulary adds to that many, such as
/// tokens of images for a model of text, is left out.
///
/// # Errors
/// When it is no such file, of a kind that is not supported, or for another model.
pub fn parts(mut file: Value, embedding: u32) -> Result<TokenizerParts, TextError> {
    let malformed = |what: &str, why: &dyn std::fmt::Display| TextError::Json(format!("{what}: {why}"));
    if !file.is_object() {
        return Err(malformed("file", &"must be an object"));
    }
    let added: Vec<AddedToken> = match file["added_tokens"].take() {
        Value::Null => Vec::new(),
        added => serde_json::from_value(added).map_err(|error| malformed("added_tokens", &error))?,
    };
    if let Some(token) = added.iter().find(|token| token.single_word) {
        return Err(TextError::Json(format!("added token {:?}: single_word is not supported", token.content)));
    }
    let kind = file["model"]["type"].as_str().unwrap_or("none").to_owned();
    if kind != "BPE" {
        return Err(TextError::UnsupportedModel { found: kind, supported: "BPE" });
    }
    let unknown = file["model"]["unk_token"].as_str().map(str::to_owned);
    let Some(vocabulary) = file["model"]["vocab"].as_object() else {
        return Err(malformed("model.vocab", &"must be an object"));
    };
    let mut named = Vec::with_capacity(vocabulary.len());
    for (name, id) in vocabulary {
        let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
        named.push((name.clone(), id.ok_or_else(|| malformed("model.vocab", &format!("{name:?} has no id")))?));
    }
    let byte_fallback = file["model"]["byte_fallback"].as_bool().unwrap_or(false);
    let is_added: HashSet<TokenId> = added.iter().map(|token| token.id).collect();
    let text_tokens = named.iter().filter(|(_, id)| !is_added.contains(id)).map(|(_, id)| id + 1).max().unwrap_or(0);
    if text_tokens > embedding {
        return Err(TextError::VocabularyTooLarge { tokens: text_tokens, embedding });
    }
    let ids = named.iter().map(|(_, id)| *id).chain(added.iter().map(|token| token.id));
    let tokens = ids.filter(|id| *id < embedding).max().map_or(0, |id| id as usize + 1);
    let mut table = TokenTable { names: vec![String::new(); tokens], kinds: vec![TokenKind::Control; tokens] };
    for (name, id) in &named {
        let is_byte = byte_fallback && byte_named(name).is_some();
        table.set(*id, name, if is_byte { TokenKind::Byte } else { TokenKind::Text });
    }
    for token in &added {
        table.set(token.id, &token.content, if token.special { TokenKind::Control } else { TokenKind::UserDefined });
    }
    let begin = begin_of(&file["post_processor"]).filter(|id| (*id as usize) < tokens);
    let unknown = unknown.and_then(|name| table.id(&name));
    let taking = |takes: fn(&AddedToken) -> bool| -> Vec<TokenId> {
        added.iter().filter(|token| takes(token)).map(|token| token.id).collect()
    };
    let (takes_space_before, takes_space_behind) = (taking(|token| token.lstrip), taking(|token| token.rstrip));
    let control = added.iter().filter(|token| token.special).map(|token| token.content.as_str()).collect();
    let rules = rules(file, &control)?;
    Ok(TokenizerParts {
        tokens: table.names,
        kinds: table.kinds,
        rules: Rules::Json(Box::new(rules)),
        begin,
        adds_begin: begin.is_some(),
        unknown,
        ends: Vec::new(),
        takes_space_before,
        takes_space_behind,
    })
}

struct TokenTable {
    names: Vec<String>,
    kinds: Vec<TokenKind>,
}

impl TokenTable {
    fn set(&mut self, id: TokenId, name: &str, kind: TokenKind) {
        if let (Some(slot), Some(of)) = (self.names.get_mut(id as usize), self.kinds.get_mut(id as usize)) {
            (*slot, *of) = (name.to_owned(), kind);
        }
    }

    fn id(&self, name: &str) -> Option<TokenId> {
        self.names.iter().position(|known| known == name).map(|id| id as TokenId)
    }
}

/// The token that the post-processor puts before a text.
fn begin_of(processor: &Value) -> Option<TokenId> {
    let template = parts_of(processor, "processors").find(|part| part["type"] == "TemplateProcessing")?;
    let name = template["single"][0]["SpecialToken"]["id"].as_str()?;
    let id = template["special_tokens"][name]["ids"][0].as_u64()?;
    TokenId::try_from(id).ok()
}

/// A component, or those of a sequence.
fn parts_of<'v>(component: &'v Value, list: &str) -> Box<dyn Iterator<Item = &'v Value> + 'v> {
    match component[list].as_array() {
        Some(parts) => Box::new(parts.iter()),
        None => Box::new(std::iter::once(component)),
    }
}

fn rules(mut file: Value, control: &HashSet<&str>) -> Result<JsonRules, TextError> {
    let has = |component: &Value, list: &str, kind: &str| parts_of(component, list).any(|part| part["type"] == kind);
    let (decoder, normaliser, cutter) = (&file["decoder"], &file["normalizer"], &file["pre_tokenizer"]);
    let spells_bytes = has(decoder, "decoders", "ByteLevel");
    let spells_space = parts_of(decoder, "decoders").any(|part| match part["type"].as_str() {
        Some("Metaspace") => true,
        Some("Replace") => part["pattern"]["String"] == json!(SPACE),
        _ => false,
    });
    if !spells_bytes && !spells_space {
        let why = format!("decoder {}: neither ByteLevel nor Metaspace", decoder["type"]);
        return Err(TextError::Json(why));
    }
    let prepends = |part: &Value| part["type"] == "Prepend" && part["prepend"] == json!(SPACE);
    let metaspace = parts_of(cutter, "pretokenizers").find(|part| part["type"] == "Metaspace");
    let scheme = metaspace.map(|part| match (part["prepend_scheme"].as_str(), part["add_prefix_space"].as_bool()) {
        (Some("never"), _) | (None, Some(false)) => SpacePrefix::Never,
        (Some("first"), _) => SpacePrefix::First,
        _ => SpacePrefix::Each,
    });
    let space_prefix = match parts_of(normaliser, "normalizers").any(prepends) {
        true => SpacePrefix::Each,
        false => scheme.unwrap_or(SpacePrefix::Never),
    };
    let normalises = !normaliser.is_null();
    forget(&mut file["model"], control);
    for dropped in ["added_tokens", "post_processor", "truncation", "padding"] {
        file[dropped] = if dropped == "added_tokens" { json!([]) } else { Value::Null };
    }
    let later = (space_prefix == SpacePrefix::First).then(|| {
        let mut later = file.clone();
        never_prefix(&mut later["pre_tokenizer"]);
        later
    });
    let built = |file: Value| -> Result<tokenizers::Tokenizer, TextError> {
        serde_json::from_value(file).map_err(|error| TextError::Json(error.to_string()))
    };
    Ok(JsonRules { first: built(file)?, later: later.map(built).transpose()?, spells_bytes, space_prefix, normalises })
}

fn never_prefix(cutter: &mut Value) {
    let Some(fields) = cutter.as_object_mut() else { return };
    if let Some(parts) = fields.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        parts.iter_mut().for_each(never_prefix);
    } else if fields.get("type").is_some_and(|kind| kind == "Metaspace") {
        fields.insert("prepend_scheme".into(), json!("never"));
        fields.remove("add_prefix_space");
    }
}

/// Takes control tokens out of the vocabulary and the merges, so that no text can become one.
fn forget(model: &mut Value, control: &HashSet<&str>) {
    let takes_whole_words = model["ignore_merges"].as_bool().unwrap_or(false);
    let unknown = model["unk_token"].as_str().map(str::to_owned);
    // Text becomes the unknown token only where nothing else spells it, unless whole words are looked up.
    let stays = |name: &str| !takes_whole_words && unknown.as_deref() == Some(name);
    if let Some(vocabulary) = model.get_mut("vocab").and_then(Value::as_object_mut) {
        vocabulary.retain(|name, _| !control.contains(name.as_str()) || stays(name));
    }
    if takes_whole_words && unknown.as_deref().is_some_and(|name| control.contains(name)) {
        model["unk_token"] = Value::Null;
    }
    if let Some(merges) = model.get_mut("merges").and_then(Value::as_array_mut) {
        merges.retain(|merge| {
            let sides = match merge {
                Value::String(text) => text.split_once(' '),
                pair => pair[0].as_str().zip(pair[1].as_str()),
            };
            // What is no merge is reported by whoever builds the rules.
            sides.is_none_or(|(left, right)| {
                let makes = format!("{left}{right}");
                ![left, right, &makes].into_iter().any(|name| control.contains(name))
            })
        });
    }
}
