//! Text: tokens, chat templates, and the way back to characters.
