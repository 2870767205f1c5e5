//! How text is cut before byte-pair encoding: merges never cross a cut.

use regex::Regex;
use std::ops::Range;

/// GPT-2's words. The look-ahead of the original's `\s+(?!\S)` is done by `Pass::leaves_last_space`, so that matching stays
/// linear in the text's length.
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// The pre-tokenizers whose rules are known, by the name that model files give them.
pub const KNOWN: &str = "default, gpt-2, smollm, llama-bpe, qwen2";

/// Cuts text by a model's rules.
pub struct Splitter {
    passes: Vec<Pass>,
}

/// One expression; each pass cuts what the passes before left whole.
struct Pass {
    regex: Regex,
    /// A run of spaces leaves its last one to the word that follows.
    leaves_last_space: bool,
    /// Runs of spaces that end with a line break were matched by an alternative of their own, without look-ahead.
    line_breaks_apart: bool,
}

impl Splitter {
    /// The rules of a name; `None` when they are not known.
    pub fn of(name: &str) -> Option<Self> {
        let words = |words, line_breaks_apart| Pass {
            regex: Regex::new(words).expect("the expression is a constant"),
            leaves_last_space: true,
            line_breaks_apart,
        };
        let plain = |expression| Pass {
            regex: Regex::new(expression).expect("the expression is a constant"),
            leaves_last_space: false,
            line_breaks_apart: false,
        };
        let passes = match name {
            "gpt-2" => vec![words(GPT2_WORDS, false)],
            "smollm" => vec![plain(r"\p{N}"), words(GPT2_WORDS, false)],
            "default" => vec![
                plain(r"[\p{P}\$\+<=>\^~\|]+"),
                words(GPT2_WORDS, false),
                plain(r"\p{N}+"),
                plain("[0-9][0-9][0-9]"),
            ],
            "llama-bpe" | "llama3" | "llama-v3" => vec![words(LLAMA3_WORDS, true)],
            "qwen2" | "deepseek-r1-qwen" => vec![words(QWEN2_WORDS, true)],
            _ => return None,
        };
        Some(Self { passes })
    }

    /// Whether the rules of a name take a word that is a token as it is, without merging.
    pub fn takes_whole_words(name: &str) -> bool {
        matches!(name, "llama-bpe" | "llama3" | "llama-v3")
    }

    /// Calls `word` with each piece of `text`, in order; together they are all of it.
    pub fn split<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) {
        split_by(&self.passes, text, word);
    }
}

fn split_by<'t>(passes: &[Pass], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    let Some((pass, rest)) = passes.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let mut from = 0;
    while let Some(found) = pass.find(text, from) {
        split_by(rest, &text[from..found.start], word);
        split_by(rest, &text[found.clone()], word);
        from = found.end;
    }
    split_by(rest, &text[from..], word);
}

impl Pass {
    fn find(&self, text: &str, from: usize) -> Option<Range<usize>> {
        let found = self.regex.find_at(text, from)?;
        let mut range = found.range();
        if self.leaves_last_space && range.end < text.len() {
            let run = found.as_str();
            let is_spaces =
                run.chars().all(char::is_whitespace) && !(self.line_breaks_apart && run.ends_with(['\r', '\n']));
            // The expression matched the whole run, so a word follows. A single space stays: there is nothing before it.
            if is_spaces && let Some((last, _)) = run.char_indices().next_back() {
                range.end = if last > 0 { range.start + last } else { range.end };
            }
        }
        (!range.is_empty()).then_some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::bytes::ByteAlphabet;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::sync::LazyLock;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::digits::Digits;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    static SPLITTERS: LazyLock<BTreeMap<&str, Splitter>> = LazyLock::new(|| {
        let names = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"];
        names.into_iter().map(|name| (name, Splitter::of(name).unwrap())).collect()
    });

    /// Llama 3's words with the look-ahead that `LLAMA3_WORDS` does without.
    static LLAMA3_LOOKING_AHEAD: LazyLock<Split> = LazyLock::new(|| {
        let words = LLAMA3_WORDS.replace(r"|\s+", r"|\s+(?!\S)|\s+");
        Split::new(SplitPattern::Regex(words), SplitDelimiterBehavior::Isolated, false).unwrap()
    });

    /// What the reference implementation cuts, spelled in the byte alphabet.
    fn reference(steps: &[&dyn Fn(&mut PreTokenizedString)], text: &str) -> Vec<String> {
        let mut cut = PreTokenizedString::from(text);
        steps.iter().for_each(|step| step(&mut cut));
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, _, _)| piece.to_owned()).filter(|piece| !piece.is_empty()).collect()
    }

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        SPLITTERS[name].split(text, &mut |piece| pieces.push(piece.to_owned()));
        pieces
    }

    #[test]
    fn a_run_of_spaces_leaves_its_last_to_the_word() {
        assert_eq!(pieces("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(pieces("gpt-2", "a\n\n b  "), ["a", "\n\n", " b", "  "]);
        assert_eq!(pieces("gpt-2", "a \nb"), ["a", " ", "\n", "b"]);
        assert_eq!(pieces("gpt-2", "\u{3000}\u{3000}x"), ["\u{3000}", "\u{3000}", "x"]);
    }

    #[test]
    fn smollm_cuts_every_digit() {
        assert_eq!(pieces("smollm", "in 1969,"), ["in", " ", "1", "9", "6", "9", ","]);
        assert_eq!(pieces("gpt-2", "in 1969,"), ["in", " 1969", ","]);
    }

    #[test]
    fn llama_takes_three_digits_and_keeps_line_breaks_with_marks() {
        assert_eq!(pieces("llama-bpe", "It's 12345!\n\nX"), ["It", "'s", " ", "123", "45", "!\n\n", "X"]);
        assert_eq!(pieces("llama-bpe", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(pieces("qwen2", "a 12"), ["a", " ", "1", "2"]);
    }

    #[test]
    fn default_cuts_marks_first() {
        assert_eq!(pieces("default", "a+1234=b c"), ["a", "+", "123", "4", "=", "b", " c"]);
    }

    #[test]
    fn pieces_together_are_the_text() {
        let text = "  leading, 'tis\t\r\n \u{a0}é 你好 😀😀   12,345.6 \n";
        for name in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"] {
            assert_eq!(pieces(name, text).concat(), text, "{name}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]
        #[test]
        fn cuts_are_the_references(text in "(?s)[a-cé你 \t\n\r\u{a0}\u{3000}0-3½'sStTlL.,!<|😀\u{301}]{0,24}") {
            let alphabet = ByteAlphabet::new();
            let spelled = |name| -> Vec<String> { pieces(name, &text).iter().map(|piece| alphabet.spell(piece)).collect() };
            let bytes = |cut: &mut PreTokenizedString| ByteLevel::new(false, false, true).pre_tokenize(cut).unwrap();
            let spell = |cut: &mut PreTokenizedString| ByteLevel::new(false, false, false).pre_tokenize(cut).unwrap();
            let digits = |cut: &mut PreTokenizedString| Digits::new(true).pre_tokenize(cut).unwrap();
            let words = |cut: &mut PreTokenizedString| LLAMA3_LOOKING_AHEAD.pre_tokenize(cut).unwrap();
            prop_assert_eq!(spelled("gpt-2"), reference(&[&bytes], &text));
            prop_assert_eq!(spelled("smollm"), reference(&[&digits, &bytes], &text));
            prop_assert_eq!(spelled("llama-bpe"), reference(&[&words, &spell], &text));
        }
    }

    #[test]
    fn unknown_rules_are_not_guessed() {
        assert!(Splitter::of("no-such-rules").is_none());
    }
}
