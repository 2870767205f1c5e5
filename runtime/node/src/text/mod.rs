//! Text: tokens, chat templates, and the way back to characters.
//!
//! What people write can never become a control token: text is encoded with a vocabulary that does not hold them, and a
//! template's own text, the only place where they are read, is known apart from what people wrote.

mod bpe;
mod bytes;
mod cache;
mod chat;
mod folder;
mod json;
mod marks;
mod model;
mod output;
mod pieces;
mod prompt;
mod split;
mod stop;
mod tokenizer;

pub use cache::{Cost, Encoded, Owner, TextCache};
pub use chat::{ChatError, ChatTemplate, Message, Piece, Role};
pub use model::{TextError, TextModel};
pub use output::Utf8Stream;
pub use prompt::{Control, PromptText};
pub use split::Splitter;
pub use stop::{Output, StopStrings};
pub use tokenizer::{Rules, TokenKind, Tokenizer, TokenizerParts};

#[cfg(test)]
mod family_tests;
#[cfg(test)]
mod tests;
