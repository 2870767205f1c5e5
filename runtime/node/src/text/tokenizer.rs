//! Byte-pair encoding of text, from the vocabulary and merges that a model file holds.

use super::bytes::ByteAlphabet;
use super::chat::Piece;
use super::model::TextError;
use super::split::{KNOWN, Splitter};
use regex::Regex;
use starling_core::ids::TokenId;
use std::collections::HashMap;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab};

/// Words whose merges each encoding thread remembers.
const CACHED_WORDS_MAX: usize = 10_000;

/// What a token is, by the numbers that model files use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Made by merging bytes.
    Text,
    /// Read in any text as a whole; harmless.
    UserDefined,
    /// Steers the model; never read in what people wrote.
    Control,
}

/// What a tokenizer is made of.
pub struct TokenizerParts {
    /// Spelled in the byte alphabet, but for control and user-defined tokens, which are plain text. The index is the id.
    pub tokens: Vec<String>,
    /// One for each token.
    pub kinds: Vec<TokenKind>,
    /// Two spellings with a space between, the most frequent first.
    pub merges: Vec<String>,
    /// The name of the rules that cut text before merging.
    pub pre_tokenizer: String,
    pub begin: Option<TokenId>,
    /// Whether prompts start with `begin`.
    pub adds_begin: bool,
    /// Tokens that end a generation.
    pub ends: Vec<TokenId>,
}

/// Turns text into tokens and tokens into bytes.
pub struct Tokenizer {
    bpe: BPE,
    splitter: Splitter,
    alphabet: ByteAlphabet,
    control: Marks,
    user_defined: Marks,
    token_bytes: Vec<Box<[u8]>>,
    kinds: Vec<TokenKind>,
    begin: Option<TokenId>,
    adds_begin: bool,
    ends: Vec<TokenId>,
    token_bytes_max: usize,
}

impl Tokenizer {
    /// # Errors
    /// When the parts contradict one another, or the rules are not known.
    pub fn new(parts: TokenizerParts) -> Result<Self, TextError> {
        check(&parts)?;
        let alphabet = ByteAlphabet::new();
        let ignores_merges = matches!(&*parts.pre_tokenizer, "llama-bpe" | "llama3" | "llama-v3");
        let splitter = Splitter::of(&parts.pre_tokenizer)
            .ok_or_else(|| TextError::UnknownPreTokenizer { name: parts.pre_tokenizer.clone(), known: KNOWN })?;
        // Only text tokens take part in merging: no input can come out as any other.
        let mut vocabulary = Vocab::with_capacity(parts.tokens.len());
        for ((id, token), kind) in (0..).zip(&parts.tokens).zip(&parts.kinds) {
            if *kind == TokenKind::Text {
                vocabulary.entry(token.clone()).or_insert(id);
            }
        }
        let merges = parts.merges.iter().map(|merge| pair(merge)).collect::<Result<Vec<_>, _>>()?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .cache_capacity(CACHED_WORDS_MAX)
            .ignore_merges(ignores_merges)
            .build()
            .map_err(|error| TextError::Merges(error.to_string()))?;
        let token_bytes: Vec<Box<[u8]>> = parts
            .tokens
            .iter()
            .zip(&parts.kinds)
            .map(|(token, kind)| match kind {
                TokenKind::Text => alphabet.unspell(token).into(),
                TokenKind::UserDefined | TokenKind::Control => token.as_bytes().into(),
            })
            .collect();
        Ok(Self {
            bpe,
            splitter,
            alphabet,
            control: Marks::new(&parts, TokenKind::Control)?,
            user_defined: Marks::new(&parts, TokenKind::UserDefined)?,
            token_bytes_max: token_bytes.iter().map(|bytes| bytes.len()).max().unwrap_or(1).max(1),
            token_bytes,
            kinds: parts.kinds,
            begin: parts.begin,
            adds_begin: parts.adds_begin,
            ends: parts.ends,
        })
    }

    /// Encodes what people wrote. The text of a control token is text like any other.
    ///
    /// A byte that the vocabulary cannot express (some leave out a few control characters) is left out, as the model's
    /// reference implementations do.
    ///
    /// # Errors
    /// When the encoder fails, which no text is known to cause.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        self.encode_into(text, &mut tokens)?;
        Ok(tokens)
    }

    /// Encodes text that is to be trusted, such as a template's: control tokens are read.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_trusted(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        self.encode_pieces(&[Piece::Template(text.to_owned())])
    }

    /// Encodes a rendered chat: control tokens are read in the template's pieces only, and between two of them the text
    /// is encoded as one, whoever wrote it, so that tokens are those that the model was trained with.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::new();
        let mut text = String::new();
        for piece in pieces {
            match piece {
                Piece::Content(content) => text.push_str(content),
                Piece::Template(literal) => {
                    let mut rest = 0;
                    for (range, token) in self.control.find(literal) {
                        text.push_str(&literal[rest..range.start]);
                        self.encode_into(&text, &mut tokens)?;
                        text.clear();
                        tokens.push(token);
                        rest = range.end;
                    }
                    text.push_str(&literal[rest..]);
                }
            }
        }
        self.encode_into(&text, &mut tokens)?;
        Ok(tokens)
    }

    fn encode_into(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut rest = 0;
        for (range, token) in self.user_defined.find(text) {
            self.encode_words(&text[rest..range.start], tokens)?;
            tokens.push(token);
            rest = range.end;
        }
        self.encode_words(&text[rest..], tokens)
    }

    fn encode_words(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut failed = None;
        self.splitter.split(text, &mut |word| match self.bpe.tokenize(&self.alphabet.spell(word)) {
            Ok(found) => tokens.extend(found.iter().map(|token| token.id)),
            Err(error) => failed = Some(error.to_string()),
        });
        failed.map_or(Ok(()), |error| Err(TextError::Encode(error)))
    }

    /// Puts the begin token first where the model wants it and `tokens` do not have it.
    pub fn with_begin(&self, mut tokens: Vec<TokenId>) -> Vec<TokenId> {
        if let Some(begin) = self.begin
            && self.adds_begin
            && tokens.first() != Some(&begin)
        {
            tokens.insert(0, begin);
        }
        tokens
    }

    /// Tokens that `bytes` of text make at least: far cheaper to know than the tokens.
    pub fn tokens_min(&self, bytes: usize) -> usize {
        // Bytes that the vocabulary cannot express make no token; they are control characters that no long text is made
        // of, and the count is only used to refuse text that is far too long.
        bytes / self.token_bytes_max
    }

    /// The bytes that a token stands for; a control token's are its name. `None` outside the vocabulary.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.token_bytes.get(token as usize).map(|bytes| &**bytes)
    }

    pub fn is_control(&self, token: TokenId) -> bool {
        self.kinds.get(token as usize) == Some(&TokenKind::Control)
    }

    /// What a generated token adds to the answer: nothing for control tokens and for those that end a generation.
    pub fn answer_bytes(&self, token: TokenId) -> &[u8] {
        if self.is_control(token) || self.ends.contains(&token) {
            return &[];
        }
        self.token_bytes(token).unwrap_or_default()
    }

    /// The text of tokens, control tokens by their names; what is not UTF-8 becomes U+FFFD. `Err` is the first token
    /// outside the vocabulary.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String, TokenId> {
        let mut bytes = Vec::new();
        for &token in tokens {
            bytes.extend_from_slice(self.token_bytes(token).ok_or(token)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn vocabulary_tokens(&self) -> u32 {
        self.kinds.len() as u32
    }

    /// Tokens that end a generation.
    pub fn ends(&self) -> &[TokenId] {
        &self.ends
    }

    pub fn begin(&self) -> Option<TokenId> {
        self.begin
    }

    /// The text of user-defined tokens found in `text`, in order.
    pub(super) fn user_defined_in(&self, text: &str) -> Vec<std::ops::Range<usize>> {
        self.user_defined.find(text).map(|(range, _)| range).collect()
    }
}

/// Tokens that are found in text as a whole; of several at one place the longest.
struct Marks {
    regex: Option<Regex>,
    ids: HashMap<String, TokenId>,
}

impl Marks {
    fn new(parts: &TokenizerParts, kind: TokenKind) -> Result<Self, TextError> {
        let ids: HashMap<String, TokenId> = (0..)
            .zip(&parts.tokens)
            .zip(&parts.kinds)
            .filter(|((_, token), of)| **of == kind && !token.is_empty())
            .map(|((id, token), _)| (token.clone(), id))
            .collect();
        let mut names: Vec<&String> = ids.keys().collect();
        names.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        let any: Vec<String> = names.into_iter().map(|name| regex::escape(name)).collect();
        let regex = match any.is_empty() {
            true => None,
            false => Some(Regex::new(&any.join("|")).map_err(|error| TextError::Marks(error.to_string()))?),
        };
        Ok(Self { regex, ids })
    }

    fn find<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (std::ops::Range<usize>, TokenId)> + 't {
        let found = self.regex.iter().flat_map(move |regex| regex.find_iter(text));
        found.filter_map(|found| Some((found.range(), *self.ids.get(found.as_str())?)))
    }
}

fn check(parts: &TokenizerParts) -> Result<(), TextError> {
    let tokens = parts.tokens.len();
    if tokens == 0 || parts.kinds.len() != tokens {
        return Err(TextError::Vocabulary { tokens, kinds: parts.kinds.len() });
    }
    let outside = parts.begin.iter().chain(&parts.ends).find(|&&id| id as usize >= tokens);
    match outside {
        Some(&id) => Err(TextError::SpecialOutside { id, tokens }),
        None => Ok(()),
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
