//! Text to tokens and back, by the rules of a model's family.

use super::bpe::ByteBpe;
use super::bytes::ByteAlphabet;
use super::chat::Piece;
use super::json::JsonRules;
use super::marks::Marks;
use super::model::TextError;
use super::pieces::{SPACE, ScoredPieces, byte_named};
use super::prompt::{Control, Progress, PromptText};
use starling_core::ids::TokenId;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Found by the rules.
    Text,
    /// The byte that its name `<0x0A>` says, for text that no other token spells.
    Byte,
    /// Read in any text as a whole; harmless.
    UserDefined,
    /// Steers the model; never read in what people wrote.
    Control,
}

/// How text becomes tokens.
pub enum Rules {
    /// Byte-level byte-pair encoding: two spellings with a space between, the most frequent first, and the name of the
    /// rules that cut text before merging.
    Merges { merges: Vec<String>, pre_tokenizer: String },
    /// SentencePiece: a score for each token, and whether text begins with a space.
    Scores { scores: Vec<f32>, space_prefix: bool },
    /// What a `tokenizer.json` says.
    Json(Box<JsonRules>),
}

/// What a tokenizer is made of.
pub struct TokenizerParts {
    /// As the rules spell them, but for control and user-defined tokens, which are plain text. The index is the id.
    pub tokens: Vec<String>,
    /// One for each token.
    pub kinds: Vec<TokenKind>,
    pub rules: Rules,
    pub begin: Option<TokenId>,
    /// Whether prompts start with `begin`.
    pub adds_begin: bool,
    /// What stands for text that no token spells.
    pub unknown: Option<TokenId>,
    /// Tokens that end a generation.
    pub ends: Vec<TokenId>,
    /// Tokens that take the white space before them, and behind them, with them.
    pub takes_space_before: Vec<TokenId>,
    pub takes_space_behind: Vec<TokenId>,
}

enum Encoder {
    Bytes(Box<ByteBpe>),
    Pieces(Box<ScoredPieces>),
    Json(Box<JsonRules>),
}

/// Where text gets a space that nobody wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpacePrefix {
    Never,
    /// At the prompt's start.
    First,
    /// Behind every token that was found as a whole, too.
    Each,
}

/// Turns text into tokens and tokens into bytes.
pub struct Tokenizer {
    encoder: Encoder,
    control: Marks,
    user_defined: Marks,
    token_bytes: Vec<Box<[u8]>>,
    kinds: Vec<TokenKind>,
    begin: Option<TokenId>,
    adds_begin: bool,
    ends: Vec<TokenId>,
    takes_space_before: Vec<TokenId>,
    takes_space_behind: Vec<TokenId>,
    space_prefix: SpacePrefix,
    token_bytes_max: usize,
}

impl Tokenizer {
    /// # Errors
    /// When the parts contradict one another, or the rules are not known.
    pub fn new(parts: TokenizerParts) -> Result<Self, TextError> {
        check(&parts)?;
        let control = Marks::of(&parts, TokenKind::Control)?;
        let user_defined = Marks::of(&parts, TokenKind::UserDefined)?;
        let spells_bytes = match &parts.rules {
            Rules::Merges { .. } => true,
            Rules::Scores { .. } => false,
            Rules::Json(rules) => rules.spells_bytes(),
        };
        let token_bytes = token_bytes(&parts, spells_bytes);
        let longest = token_bytes.iter().map(|bytes| bytes.len()).max().unwrap_or(1).max(1);
        let (space_prefix, shrinks) = match &parts.rules {
            Rules::Merges { .. } | Rules::Scores { space_prefix: false, .. } => (SpacePrefix::Never, 1),
            Rules::Scores { space_prefix: true, .. } => (SpacePrefix::Each, 1),
            Rules::Json(rules) => (rules.space_prefix(), rules.shrinks_by_at_most()),
        };
        let (begin, adds_begin, ends) = (parts.begin, parts.adds_begin, parts.ends.clone());
        let takes_space_before = parts.takes_space_before.clone();
        let takes_space_behind = parts.takes_space_behind.clone();
        let (encoder, kinds) = encoder(parts)?;
        Ok(Self {
            encoder,
            control,
            user_defined,
            token_bytes,
            kinds,
            begin,
            adds_begin,
            ends,
            takes_space_before,
            takes_space_behind,
            space_prefix,
            token_bytes_max: longest * shrinks,
        })
    }

    /// Encodes what people wrote. The text of a control token is text like any other.
    ///
    /// # Errors
    /// When the encoder fails, which no text is known to cause.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        self.encode_run(text, true, &mut tokens)?;
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
        let mut progress = Progress::default();
        self.go_on(&self.prompt_text(pieces), &mut progress)?;
        Ok(progress.tokens)
    }

    /// Finds the control tokens of a rendered chat.
    pub fn prompt_text(&self, pieces: &[Piece]) -> PromptText {
        let mut prompt = PromptText::default();
        for piece in pieces {
            match piece {
                Piece::Content(content) => self.append(&mut prompt, content),
                Piece::Template(literal) => {
                    let mut rest = 0;
                    for (range, token) in self.control.find(literal) {
                        self.append(&mut prompt, &literal[rest..range.start]);
                        if self.takes_space_before.contains(&token) {
                            let kept = prompt.text[prompt.run_start()..].trim_end().len();
                            prompt.text.truncate(prompt.run_start() + kept);
                        }
                        prompt.controls.push(Control { at: prompt.text.len(), token });
                        rest = range.end;
                    }
                    self.append(&mut prompt, &literal[rest..]);
                }
            }
        }
        prompt
    }

    fn append(&self, prompt: &mut PromptText, text: &str) {
        let at_start = prompt.run_start() == prompt.text.len();
        let is_taken = |control: &Control| at_start && self.takes_space_behind.contains(&control.token);
        prompt.text.push_str(if prompt.controls.last().is_some_and(is_taken) { text.trim_start() } else { text });
    }

    /// Encodes what follows the control tokens that `progress` is through with.
    ///
    /// What stands between two control tokens becomes the same tokens whatever lies before and behind, so a prompt that
    /// begins as another one can go on from that one's tokens.
    ///
    /// # Errors
    /// As `encode`.
    pub fn go_on(&self, prompt: &PromptText, progress: &mut Progress) -> Result<(), TextError> {
        for run in progress.ends.len()..=prompt.controls.len() {
            let text = prompt.run(run);
            progress.encoded_bytes += text.len();
            self.encode_run(text, run == 0, &mut progress.tokens)?;
            if let Some(control) = prompt.controls.get(run) {
                progress.tokens.push(control.token);
                progress.ends.push(progress.tokens.len());
            }
        }
        Ok(())
    }

    /// Encodes the text between two control tokens, or before the first one.
    fn encode_run(&self, text: &str, mut is_first: bool, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        let mut rest = 0;
        for (range, token) in self.user_defined.find(text) {
            // Part of it went with the token before as white space.
            if range.start < rest {
                continue;
            }
            let mut before = &text[rest..range.start];
            if self.takes_space_before.contains(&token) {
                before = before.trim_end();
            }
            self.encode_plain(before, is_first, tokens)?;
            tokens.push(token);
            is_first = false;
            rest = range.end;
            if self.takes_space_behind.contains(&token) {
                rest = text.len() - text[rest..].trim_start().len();
            }
        }
        self.encode_plain(&text[rest..], is_first, tokens)
    }

    fn encode_plain(&self, text: &str, is_first: bool, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        match &self.encoder {
            Encoder::Bytes(bpe) => bpe.encode(text, tokens),
            Encoder::Pieces(pieces) => {
                pieces.encode(text, tokens);
                Ok(())
            }
            Encoder::Json(rules) => rules.encode(text, is_first, tokens),
        }
    }

    /// The token that a prompt begins with although nobody wrote it.
    pub fn begin_of(&self, prompt: &PromptText) -> Option<TokenId> {
        let has_it = |begin: &TokenId| prompt.controls.first().is_some_and(|c| c.at == 0 && c.token == *begin);
        self.begin.filter(|begin| self.adds_begin && !has_it(begin))
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
        let mut text = Vec::new();
        let mut is_prefixed = self.space_prefix != SpacePrefix::Never;
        for &token in tokens {
            let bytes = self.token_bytes(token).ok_or(token)?;
            let is_text = matches!(self.kinds[token as usize], TokenKind::Text | TokenKind::Byte);
            let prefix = if is_prefixed && is_text { bytes.strip_prefix(b" ") } else { None };
            text.extend_from_slice(prefix.unwrap_or(bytes));
            let is_begin = self.begin == Some(token) && text.len() == bytes.len();
            is_prefixed = match self.space_prefix {
                SpacePrefix::Never => false,
                SpacePrefix::First => is_prefixed && is_begin,
                SpacePrefix::Each => !is_text,
            };
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
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

    /// The user-defined tokens that a template's source names, so that it may look for them in texts.
    pub(super) fn user_defined_named_in(&self, source: &str) -> Result<Marks, TextError> {
        self.user_defined.only(|name| !name.trim().is_empty() && source.contains(name))
    }
}

fn encoder(mut parts: TokenizerParts) -> Result<(Encoder, Vec<TokenKind>), TextError> {
    let rules = std::mem::replace(&mut parts.rules, Rules::Scores { scores: Vec::new(), space_prefix: false });
    let encoder = match rules {
        Rules::Merges { merges, pre_tokenizer } => {
            Encoder::Bytes(Box::new(ByteBpe::new(&parts, &merges, &pre_tokenizer)?))
        }
        Rules::Scores { scores, space_prefix } => {
            Encoder::Pieces(Box::new(ScoredPieces::new(&parts, &scores, space_prefix)?))
        }
        Rules::Json(rules) => Encoder::Json(rules),
    };
    Ok((encoder, parts.kinds))
}

fn token_bytes(parts: &TokenizerParts, spells_bytes: bool) -> Vec<Box<[u8]>> {
    let alphabet = ByteAlphabet::new();
    let bytes = |(name, kind): (&String, &TokenKind)| -> Box<[u8]> {
        match kind {
            TokenKind::Text if spells_bytes => alphabet.unspell(name).into(),
            TokenKind::Text => name.replace(SPACE, " ").into_bytes().into(),
            TokenKind::Byte => byte_named(name).map_or_else(|| name.as_bytes().into(), |byte| [byte].into()),
            TokenKind::UserDefined | TokenKind::Control => name.as_bytes().into(),
        }
    };
    parts.tokens.iter().zip(&parts.kinds).map(bytes).collect()
}

fn check(parts: &TokenizerParts) -> Result<(), TextError> {
    let tokens = parts.tokens.len();
    if tokens == 0 || parts.kinds.len() != tokens {
        return Err(TextError::Vocabulary { tokens, kinds: parts.kinds.len() });
    }
    let special = parts.begin.iter().chain(&parts.unknown).chain(&parts.ends);
    match special.into_iter().find(|&&id| id as usize >= tokens) {
        Some(&id) => Err(TextError::SpecialOutside { id, tokens }),
        None => Ok(()),
    }
}
