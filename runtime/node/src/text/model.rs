//! A model's text side, read from its file.

use super::chat::{ChatError, ChatTemplate, Message};
use super::prompt::{Progress, PromptText};
use super::split::Splitter;
use super::tokenizer::{Rules, TokenKind, Tokenizer, TokenizerParts};
use starling_core::ids::TokenId;
use starling_gpu::gguf::{Gguf, ModelError};
use std::path::PathBuf;

/// Names of tokens that end a turn in the families of models; a file names only one of them as its end.
const END_NAMES: [&str; 8] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"];
/// Rules of files that name none.
const PRE_TOKENIZER_UNNAMED: &str = "default";

/// Why a model's text side could not be built or used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error(transparent)]
    File(#[from] ModelError),
    #[error("cannot read {}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },
    #[error("{file}: {why}")]
    Folder { file: &'static str, why: String },
    #[error("tokenizer.json: {0}")]
    Json(String),
    #[error("tokenizer model {found:?} is not supported (supported: {supported})")]
    UnsupportedModel { found: String, supported: &'static str },
    #[error("pre-tokenizer {name:?} is not known (known: {known})")]
    UnknownPreTokenizer { name: String, known: &'static str },
    #[error("vocabulary has {tokens} tokens and {kinds} token types")]
    Vocabulary { tokens: usize, kinds: usize },
    #[error("vocabulary has {tokens} tokens and {scores} scores")]
    Scores { tokens: usize, scores: usize },
    #[error("the tokenizer has {tokens} tokens, the model's embedding {embedding}")]
    VocabularyDiffers { tokens: u32, embedding: u32 },
    #[error("the tokenizer has {tokens} tokens, the model's embedding only {embedding}")]
    VocabularyTooLarge { tokens: u32, embedding: u32 },
    #[error("token {id} is outside the vocabulary of {tokens} tokens")]
    SpecialOutside { id: TokenId, tokens: usize },
    #[error("merge {0:?} is not two spellings with a space between")]
    BadMerge(String),
    #[error("merges do not fit the vocabulary: {0}")]
    Merges(String),
    #[error("special tokens cannot be searched for: {0}")]
    Marks(String),
    #[error("text cannot be encoded: {0}")]
    Encode(String),
    #[error("chat template: {0}")]
    Template(String),
}

/// Tokenizer and chat template of a model.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    /// `None` when the model has none.
    pub template: Option<ChatTemplate>,
}

impl TextModel {
    /// Reads a model file's metadata.
    ///
    /// # Errors
    /// When something is missing, malformed, or of a kind that is not supported.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::new(parts(file)?)?;
        let named = |key| -> Result<String, TextError> {
            let id = file.get_u32(key)?;
            let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
            Ok(String::from_utf8_lossy(bytes).into_owned())
        };
        let begin = named(BEGIN)?;
        let end = named(END)?;
        let source = file.get_str("tokenizer.chat_template")?;
        let template = source.map(|source| ChatTemplate::new(source.to_owned(), &tokenizer, begin, end));
        Ok(Self { template: template.transpose()?, tokenizer })
    }

    /// The prompt of a plain text.
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        self.encode(&PromptText::plain(text.to_owned()))
    }

    /// The prompt of a conversation, up to where the answer begins.
    ///
    /// # Errors
    /// When there is no template, or it does not take the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<TokenId>, ChatError> {
        self.encode(&self.chat_text(messages)?).map_err(|error| ChatError::Refused(error.to_string()))
    }

    /// The text of a conversation's prompt.
    ///
    /// # Errors
    /// As `encode_chat`.
    pub fn chat_text(&self, messages: &[Message]) -> Result<PromptText, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        Ok(self.tokenizer.prompt_text(&template.render(messages)?))
    }

    fn encode(&self, prompt: &PromptText) -> Result<Vec<TokenId>, TextError> {
        let mut progress = Progress::default();
        progress.tokens.extend(self.tokenizer.begin_of(prompt));
        self.tokenizer.go_on(prompt, &mut progress)?;
        Ok(progress.tokens)
    }
}

const BEGIN: &str = "tokenizer.ggml.bos_token_id";
const END: &str = "tokenizer.ggml.eos_token_id";

fn parts(file: &Gguf) -> Result<TokenizerParts, TextError> {
    const MODEL: &str = "tokenizer.ggml.model";
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let model = file.get_str(MODEL)?.ok_or_else(|| file.missing(MODEL))?;
    let tokens = file.get_str_array(TOKENS)?.ok_or_else(|| file.missing(TOKENS))?.to_vec();
    let kinds = match file.get_int_array("tokenizer.ggml.token_type")? {
        Some(kinds) => kinds.into_iter().map(kind).collect(),
        None => vec![TokenKind::Text; tokens.len()],
    };
    let (rules, adds_begin) = rules(file, model)?;
    let mut ends = ends_named(&tokens, &kinds);
    for key in [END, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ends.extend(file.get_u32(key)?);
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(TokenizerParts {
        kinds,
        rules,
        begin: file.get_u32(BEGIN)?,
        adds_begin: file.get_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_begin),
        unknown: file.get_u32("tokenizer.ggml.unknown_token_id")?.filter(|id| (*id as usize) < tokens.len()),
        ends,
        takes_space_before: Vec::new(),
        takes_space_behind: Vec::new(),
        tokens,
    })
}

/// The rules of a file, and whether files of this kind that do not say so want the begin token.
fn rules(file: &Gguf, model: &str) -> Result<(Rules, bool), TextError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    const SCORES: &str = "tokenizer.ggml.scores";
    match model {
        "gpt2" => {
            let merges = file.get_str_array(MERGES)?.ok_or_else(|| file.missing(MERGES))?.to_vec();
            let pre_tokenizer = file.get_str("tokenizer.ggml.pre")?.unwrap_or(PRE_TOKENIZER_UNNAMED).to_owned();
            let adds_begin = Splitter::takes_whole_words(&pre_tokenizer);
            Ok((Rules::Merges { merges, pre_tokenizer }, adds_begin))
        }
        "llama" => {
            let scores = file.get_f32_array(SCORES)?.ok_or_else(|| file.missing(SCORES))?.to_vec();
            let space_prefix = file.get_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            Ok((Rules::Scores { scores, space_prefix }, true))
        }
        other => Err(TextError::UnsupportedModel { found: other.to_owned(), supported: "gpt2, llama" }),
    }
}

/// Control tokens that end a turn by their names.
pub(super) fn ends_named(tokens: &[String], kinds: &[TokenKind]) -> Vec<TokenId> {
    let control = (0..).zip(tokens).zip(kinds).filter(|(_, kind)| **kind == TokenKind::Control);
    control.filter(|((_, token), _)| END_NAMES.contains(&token.as_str())).map(|((id, _), _)| id).collect()
}

/// The file format's numbers: 1 text, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte.
fn kind(number: i64) -> TokenKind {
    match number {
        2 | 3 | 5 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        6 => TokenKind::Byte,
        _ => TokenKind::Text,
    }
}
