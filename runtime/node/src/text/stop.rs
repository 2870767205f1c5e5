//! Stop strings: where the answer ends, even across tokens.

use super::output::Utf8Stream;
use super::tokenizer::Tokenizer;
use starling_core::ids::TokenId;

/// Strings that end an answer. None of them is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStrings(Vec<String>);

impl StopStrings {
    /// Leaves empty strings out: they would end every answer before it began.
    pub fn new(strings: Vec<String>) -> Self {
        Self(strings.into_iter().filter(|string| !string.is_empty()).collect())
    }

    /// Where the first of them begins.
    fn find(&self, text: &str) -> Option<usize> {
        self.0.iter().filter_map(|stop| text.find(&**stop)).min()
    }

    /// Where the longest end of `text` begins that may be the beginning of one of them.
    fn begun(&self, text: &str) -> usize {
        let begins = |stop: &String| {
            let longest = text.len().saturating_sub(stop.len() - 1);
            let starts = text.char_indices().map(|(at, _)| at).filter(|&at| at >= longest);
            starts.into_iter().find(|&at| stop.starts_with(&text[at..]))
        };
        self.0.iter().filter_map(begins).min().unwrap_or(text.len())
    }
}

/// Turns generated tokens into the answer's text, and finds its end.
#[derive(Default)]
pub struct Output {
    utf8: Utf8Stream,
    stops: StopStrings,
    /// Complete characters that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl Output {
    pub fn new(stops: StopStrings) -> Self {
        Self { utf8: Utf8Stream::default(), stops, held: String::new(), stopped: false }
    }

    /// Looks for these in what follows.
    pub fn look_for(&mut self, stops: StopStrings) {
        self.stops = stops;
    }

    /// Takes one token and appends to `text` what is certain to be part of the answer. True once a stop string was
    /// found: neither it nor anything after it is part of the answer.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: TokenId, text: &mut String) -> bool {
        self.push_bytes(tokenizer.answer_bytes(token), text)
    }

    fn push_bytes(&mut self, bytes: &[u8], text: &mut String) -> bool {
        if self.stopped {
            return true;
        }
        self.utf8.push(bytes, &mut self.held);
        self.release(text);
        self.stopped
    }

    /// What may be the beginning of a stop string, or not.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// No token follows. True when the last characters completed a stop string.
    pub fn end(&mut self, text: &mut String) -> bool {
        if !self.stopped {
            self.utf8.end(&mut self.held);
            self.release(text);
        }
        if !self.stopped {
            text.push_str(&self.held);
        }
        self.held.clear();
        self.stopped
    }

    fn release(&mut self, text: &mut String) {
        if let Some(at) = self.stops.find(&self.held) {
            text.push_str(&self.held[..at]);
            self.held.clear();
            self.stopped = true;
        } else {
            let keep = self.stops.begun(&self.held);
            text.extend(self.held.drain(..keep));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What comes out of each piece, and whether the end was found.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut output = Output::new(StopStrings::new(stops.iter().map(|s| s.to_string()).collect()));
        let mut texts = Vec::new();
        for piece in pieces {
            let mut text = String::new();
            let stopped = output.push_bytes(piece.as_bytes(), &mut text);
            texts.push(text);
            if stopped {
                return (texts, true);
            }
        }
        let mut text = String::new();
        let stopped = output.end(&mut text);
        texts.push(text);
        (texts, stopped)
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        assert_eq!(run(&[], &["a", "b"]), (vec!["a".into(), "b".into(), "".into()], false));
    }

    #[test]
    fn a_stop_string_is_found_across_tokens_and_not_sent() {
        assert_eq!(run(&["END"], &["xE", "N", "Dy"]), (vec!["x".into(), "".into(), "".into()], true));
    }

    #[test]
    fn what_only_looked_like_a_stop_string_is_sent_later() {
        assert_eq!(run(&["END"], &["xE", "N", "T"]), (vec!["x".into(), "".into(), "ENT".into(), "".into()], false));
        assert_eq!(run(&["END"], &["xEN"]), (vec!["x".into(), "EN".into()], false));
    }

    #[test]
    fn the_earliest_of_several_ends_the_answer() {
        assert_eq!(run(&["c", "b"], &["abc"]), (vec!["a".into()], true));
        assert_eq!(run(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into()], true));
    }

    proptest! {
        #[test]
        fn the_answer_ends_where_the_whole_text_first_holds_a_stop_string(
            text in "[ab你]{0,24}",
            stops in proptest::collection::vec("[ab你]{1,4}", 0..4),
            cut in 1usize..5,
        ) {
            let mut output = Output::new(StopStrings::new(stops.clone()));
            let mut found = String::new();
            let mut stopped = false;
            for piece in text.as_bytes().chunks(cut) {
                stopped = output.push_bytes(piece, &mut found);
                if stopped {
                    break;
                }
            }
            stopped |= output.end(&mut found);
            let expected = stops.iter().filter_map(|stop| text.find(&**stop)).min();
            prop_assert_eq!(stopped, expected.is_some());
            // Cut at each character, the earliest end to complete wins, and it may begin later than a longer one's.
            match expected {
                None => prop_assert_eq!(found, text),
                Some(at) => {
                    prop_assert!(text.starts_with(&found) && found.len() >= at);
                    prop_assert!(stops.iter().any(|stop| text[found.len()..].starts_with(&**stop)));
                }
            }
        }
    }
}
