//! A model's text side, read from its file.

use super::chat::{ChatError, ChatTemplate, Message};
use super::tokenizer::{TokenKind, Tokenizer, TokenizerParts};
use starling_core::ids::TokenId;
use starling_gpu::gguf::{Gguf, ModelError};

/// Names of tokens that end a turn in the families of models; a file names only one of them as its end.
const END_NAMES: [&str; 6] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<EOT>"];
/// Rules of files that name none.
const PRE_TOKENIZER_UNNAMED: &str = "default";

/// Why a model's text side could not be built or used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error(transparent)]
    File(#[from] ModelError),
    #[error("tokenizer model {0:?} is not supported (supported: gpt2)")]
    UnsupportedModel(String),
    #[error("pre-tokenizer {name:?} is not known (known: {known})")]
    UnknownPreTokenizer { name: String, known: &'static str },
    #[error("vocabulary has {tokens} tokens and {kinds} token types")]
    Vocabulary { tokens: usize, kinds: usize },
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
    /// `None` when the file has none.
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
        let begin = named("tokenizer.ggml.bos_token_id")?;
        let end = named("tokenizer.ggml.eos_token_id")?;
        let source = file.get_str("tokenizer.chat_template")?;
        let template = source.map(|source| ChatTemplate::new(source.to_owned(), begin, end));
        Ok(Self { template: template.transpose()?, tokenizer })
    }

    /// The prompt of a plain text.
    ///
    /// # Errors
    /// When the encoder fails.
    pub fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        Ok(self.tokenizer.with_begin(self.tokenizer.encode(text)?))
    }

    /// The prompt of a conversation, up to where the answer begins.
    ///
    /// # Errors
    /// When there is no template, or it does not take the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<TokenId>, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let pieces = template.render(messages, &self.tokenizer)?;
        let tokens = self.tokenizer.encode_pieces(&pieces);
        tokens.map(|tokens| self.tokenizer.with_begin(tokens)).map_err(|error| ChatError::Refused(error.to_string()))
    }
}

fn parts(file: &Gguf) -> Result<TokenizerParts, TextError> {
    const MODEL: &str = "tokenizer.ggml.model";
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const MERGES: &str = "tokenizer.ggml.merges";
    const BEGIN: &str = "tokenizer.ggml.bos_token_id";
    const END: &str = "tokenizer.ggml.eos_token_id";
    let model = file.get_str(MODEL)?.ok_or_else(|| file.missing(MODEL))?;
    if model != "gpt2" {
        return Err(TextError::UnsupportedModel(model.to_owned()));
    }
    let tokens = file.get_str_array(TOKENS)?.ok_or_else(|| file.missing(TOKENS))?.to_vec();
    let merges = file.get_str_array(MERGES)?.ok_or_else(|| file.missing(MERGES))?.to_vec();
    let kinds = match file.get_int_array("tokenizer.ggml.token_type")? {
        Some(kinds) => kinds.into_iter().map(kind).collect(),
        None => vec![TokenKind::Text; tokens.len()],
    };
    let pre_tokenizer = file.get_str("tokenizer.ggml.pre")?.unwrap_or(PRE_TOKENIZER_UNNAMED).to_owned();
    let named = (0..)
        .zip(&tokens)
        .zip(&kinds)
        .filter(|((_, token), kind)| **kind == TokenKind::Control && END_NAMES.contains(&token.as_str()));
    let mut ends: Vec<TokenId> = named.map(|((id, _), _)| id).chain(file.get_u32(END)?).collect();
    ends.sort_unstable();
    ends.dedup();
    Ok(TokenizerParts {
        kinds,
        merges,
        pre_tokenizer,
        begin: file.get_u32(BEGIN)?,
        adds_begin: file.get_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
        ends,
        tokens,
    })
}

/// The file format's numbers: 1 text, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte.
fn kind(number: i64) -> TokenKind {
    match number {
        2 | 3 | 5 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        _ => TokenKind::Text,
    }
}
