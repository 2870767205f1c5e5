//! Text: tokens, chat templates, and the way back to characters.
//!
//! What people write can never become a control token: text is encoded with a vocabulary that does not hold them, and a
//! template's own text, the only place where they are read, is known apart from what people wrote.

mod bytes;
mod chat;
mod model;
mod output;
mod split;
mod stop;
mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Message, Piece, Role};
pub use model::{TextError, TextModel};
pub use output::Utf8Stream;
pub use split::Splitter;
pub use stop::{Output, StopStrings};
pub use tokenizer::{TokenKind, Tokenizer, TokenizerParts};

#[cfg(test)]
mod tests;
