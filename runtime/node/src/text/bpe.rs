//! Byte-level byte-pair encoding, from the vocabulary and merges that a model file holds.

use super::bytes::ByteAlphabet;
use super::model::TextError;
use super::split::{KNOWN, Splitter};
use super::tokenizer::{TokenKind, TokenizerParts};
use starling_core::ids::TokenId;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab};

/// Words whose merges each encoding thread remembers.
const CACHED_WORDS_MAX: usize = 10_000;

pub struct ByteBpe {
    bpe: BPE,
    splitter: Splitter,
    alphabet: ByteAlphabet,
}

impl ByteBpe {
    /// # Errors
    /// Rules that are not known, or merges that do not fit the vocabulary.
    pub fn new(parts: &TokenizerParts, merges: &[String], pre_tokenizer: &str) -> Result<Self, TextError> {
        let splitter = Splitter::of(pre_tokenizer)
            .ok_or_else(|| TextError::UnknownPreTokenizer { name: pre_tokenizer.to_owned(), known: KNOWN })?;
        // Only text tokens take part in merging: no input can come out as any other.
        let mut vocabulary = Vocab::with_capacity(parts.tokens.len());
        for ((id, token), kind) in (0..).zip(&parts.tokens).zip(&parts.kinds) {
            if *kind == TokenKind::Text {
                vocabulary.entry(token.clone()).or_insert(id);
            }
        }
        let merges = merges.iter().map(|merge| pair(merge)).collect::<Result<Vec<_>, _>>()?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .cache_capacity(CACHED_WORDS_MAX)
            .ignore_merges(Splitter::takes_whole_words(pre_tokenizer))
            .build()
            .map_err(|error| TextError::Merges(error.to_string()))?;
        Ok(Self { bpe, splitter, alphabet: ByteAlphabet::new() })
    }

    /// A byte that the vocabulary cannot express (some leave out a few control characters) is left out, as the model's
    /// reference implementations do.
    pub fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut failed = None;
        self.splitter.split(text, &mut |word| match self.bpe.tokenize(&self.alphabet.spell(word)) {
            Ok(found) => tokens.extend(found.iter().map(|token| token.id)),
            Err(error) => failed = Some(error.to_string()),
        });
        failed.map_or(Ok(()), |error| Err(TextError::Encode(error)))
    }
}

fn pair(merge: &str) -> Result<(String, String), TextError> {
    match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(TextError::BadMerge(merge.chars().take(80).collect())),
    }
}
