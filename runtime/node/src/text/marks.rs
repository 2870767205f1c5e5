//! Tokens that are found in text as a whole.

use super::model::TextError;
use super::tokenizer::{TokenKind, TokenizerParts};
use regex::Regex;
use starling_core::ids::TokenId;
use std::collections::HashMap;
use std::ops::Range;

/// Of several tokens at one place the longest is found.
pub struct Marks {
    regex: Option<Regex>,
    ids: HashMap<String, TokenId>,
}

impl Marks {
    /// All tokens of one kind.
    pub fn of(parts: &TokenizerParts, kind: TokenKind) -> Result<Self, TextError> {
        let of_kind = (0..).zip(&parts.tokens).zip(&parts.kinds).filter(|(_, of)| **of == kind);
        Self::new(of_kind.map(|((id, token), _)| (token.clone(), id)).collect())
    }

    pub fn new(mut ids: HashMap<String, TokenId>) -> Result<Self, TextError> {
        ids.retain(|name, _| !name.is_empty());
        let mut names: Vec<&String> = ids.keys().collect();
        names.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        let any: Vec<String> = names.into_iter().map(|name| regex::escape(name)).collect();
        let regex = match any.is_empty() {
            true => None,
            false => Some(Regex::new(&any.join("|")).map_err(|error| TextError::Marks(error.to_string()))?),
        };
        Ok(Self { regex, ids })
    }

    pub fn find<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (Range<usize>, TokenId)> + 't {
        let found = self.regex.iter().flat_map(move |regex| regex.find_iter(text));
        found.filter_map(|found| Some((found.range(), *self.ids.get(found.as_str())?)))
    }

    /// Those whose names satisfy `keep`.
    pub fn only(&self, keep: impl Fn(&str) -> bool) -> Result<Self, TextError> {
        let kept = self.ids.iter().filter(|(name, _)| keep(name));
        Self::new(kept.map(|(name, id)| (name.clone(), *id)).collect())
    }
}
