//! SentencePiece's byte-pair encoding: of all neighbours that make a token together, those of the best score are joined first.
//!
//! # Source
//! The rules of SentencePiece for models of type BPE, with the prefix rule of the GGUF format: where `add_space_prefix` is
//! set, text begins with a space at its start and behind every token that was found as a whole.

use super::model::TextError;
use super::tokenizer::{TokenKind, TokenizerParts};
use starling_core::ids::TokenId;
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// Stands for a space in the vocabulary.
pub const SPACE: char = '\u{2581}';

/// The byte that a token's name `<0x0A>` stands for.
pub fn byte_named(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_byte.then(|| u8::from_str_radix(digits, 16).ok())?
}

pub struct ScoredPieces {
    ids: HashMap<Box<str>, TokenId>,
    scores: Vec<f32>,
    /// The tokens of single bytes, for characters that are not in the vocabulary.
    bytes: [Option<TokenId>; 256],
    /// For bytes that have none.
    unknown: Option<TokenId>,
    space_prefix: bool,
    piece_bytes_max: usize,
}

/// Part of the text; joined ones lie in the left one, and the right one is empty.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    left: usize,
    right: usize,
}

/// Two neighbours that make a token. Out of date once one of them was joined with another: then their length differs.
struct Pair {
    score: f32,
    left: Reverse<usize>,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(self.left.cmp(&other.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Pair {}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

/// No neighbour.
const NONE: usize = usize::MAX;

impl ScoredPieces {
    /// # Errors
    /// When there is not a score for each token.
    pub fn new(parts: &TokenizerParts, scores: &[f32], space_prefix: bool) -> Result<Self, TextError> {
        if scores.len() != parts.tokens.len() {
            return Err(TextError::Scores { tokens: parts.tokens.len(), scores: scores.len() });
        }
        let mut ids = HashMap::with_capacity(parts.tokens.len());
        let mut bytes = [None; 256];
        for ((id, token), kind) in (0..).zip(&parts.tokens).zip(&parts.kinds) {
            match kind {
                TokenKind::Text => {
                    ids.entry(token.clone().into_boxed_str()).or_insert(id);
                }
                TokenKind::Byte => {
                    if let Some(byte) = byte_named(token) {
                        bytes[usize::from(byte)].get_or_insert(id);
                    }
                }
                // No text becomes one of these.
                TokenKind::UserDefined | TokenKind::Control => {}
            }
        }
        let piece_bytes_max = ids.keys().map(|piece| piece.len()).max().unwrap_or(0);
        Ok(Self { ids, scores: scores.to_vec(), bytes, unknown: parts.unknown, space_prefix, piece_bytes_max })
    }

    /// Encodes text that begins at the prompt's start or behind a token that was found as a whole.
    ///
    /// # Cost
    /// n log n in the text's length.
    pub fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) {
        if text.is_empty() {
            return;
        }
        let mut spelled = String::with_capacity(text.len() + text.len() / 4);
        if self.space_prefix {
            spelled.push(SPACE);
        }
        spelled.extend(text.chars().map(|char| if char == ' ' { SPACE } else { char }));
        let symbols = self.join(&spelled);
        let mut at = 0;
        while let Some(symbol) = symbols.get(at) {
            let piece = &spelled[symbol.start..symbol.start + symbol.len];
            match self.ids.get(piece) {
                Some(&id) => tokens.push(id),
                None => tokens.extend(piece.bytes().filter_map(|byte| self.bytes[usize::from(byte)].or(self.unknown))),
            }
            at = symbol.right;
        }
    }

    fn join(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(at, (start, char))| Symbol {
                start,
                len: char.len_utf8(),
                left: at.checked_sub(1).unwrap_or(NONE),
                right: at + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.right = NONE;
        }
        let mut pairs = BinaryHeap::new();
        for right in 1..symbols.len() {
            pairs.extend(self.pair(text, &symbols, right - 1, right));
        }
        while let Some(Pair { left: Reverse(left), right, len, .. }) = pairs.pop() {
            let (kept, gone) = (symbols[left], symbols[right]);
            if kept.len == 0 || gone.len == 0 || kept.len + gone.len != len {
                continue;
            }
            symbols[left] = Symbol { len, right: gone.right, ..kept };
            symbols[right].len = 0;
            if let Some(after) = symbols.get_mut(gone.right) {
                after.left = left;
            }
            pairs.extend(self.pair(text, &symbols, kept.left, left));
            pairs.extend(self.pair(text, &symbols, left, gone.right));
        }
        symbols
    }

    /// The two symbols as a pair, if they are there and make a token.
    fn pair(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Pair> {
        let (first, second) = (symbols.get(left)?, symbols.get(right)?);
        let len = first.len + second.len;
        // Longer ones are no token; looking them up would cost their length.
        let piece = text.get(first.start..first.start + len).filter(|_| len <= self.piece_bytes_max)?;
        let id = self.ids.get(piece)?;
        Some(Pair { score: self.scores[*id as usize], left: Reverse(left), right, len })
    }
}
