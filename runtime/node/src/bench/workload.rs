//! What is sent: conversations of random words, or of a file.

use super::pace::{Purpose, stream};
use rand_distr::{Distribution, Uniform};
use rand_pcg::Pcg64;
use serde::Deserialize;
use std::sync::Arc;

/// Conversations, each a number of turns.
#[derive(Clone, Debug)]
pub struct Workload {
    pub prompts: Prompts,
    pub conversations: u32,
    /// Turns of a conversation at most; a file's may have fewer.
    pub turns: u32,
    pub seed: u64,
}

#[derive(Clone, Debug)]
pub enum Prompts {
    Random(Random),
    /// What users of a file say, by conversation.
    Texts(Arc<Vec<Vec<Turn>>>),
}

/// Random words. One word is one token for most tokenizers; how many tokens there were the server says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Random {
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// Lengths are uniform between `1 - range` and `1 + range` times these.
    pub range: f64,
    /// Tokens in front of a conversation's first prompt that it shares with others.
    pub prefix_tokens: u32,
    /// Different prefixes; conversations take them in turns.
    pub prefixes: u32,
}

/// What a user says, and how long the answer may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub text: String,
    pub output_tokens: u32,
}

impl Workload {
    /// Requests of all conversations.
    pub fn requests(&self) -> u64 {
        match &self.prompts {
            Prompts::Random(_) => u64::from(self.conversations) * u64::from(self.turns),
            Prompts::Texts(_) => (0..self.conversations).map(|index| self.conversation(index).len() as u64).sum(),
        }
    }

    /// The turns of a conversation; the same whenever it is asked for.
    pub fn conversation(&self, index: u32) -> Vec<Turn> {
        match &self.prompts {
            Prompts::Random(random) => self.random(random, index),
            Prompts::Texts(texts) => {
                let turns = &texts[self.place(index, texts.len())];
                turns.iter().take(self.turns as usize).cloned().collect()
            }
        }
    }

    fn random(&self, sizes: &Random, index: u32) -> Vec<Turn> {
        let mut random = stream(self.seed, Purpose::Conversation, u64::from(index));
        let turn = |turn: u32| {
            let input = length(&mut random, sizes.input_tokens, sizes.range);
            let output_tokens = length(&mut random, sizes.output_tokens, sizes.range);
            let own = words(&mut random, input);
            let prefix = (turn == 0 && sizes.prefix_tokens > 0).then(|| {
                let prefix = u64::from(index % sizes.prefixes.max(1));
                words(&mut stream(self.seed, Purpose::Prefix, prefix), sizes.prefix_tokens)
            });
            let text = prefix.map_or(own.clone(), |prefix| format!("{prefix} {own}"));
            Turn { text, output_tokens }
        };
        (0..self.turns).map(turn).collect()
    }

    /// Where the conversation stands in a file of so many: all of them in an order of the seed's, then all in another.
    fn place(&self, index: u32, of: usize) -> usize {
        let (pass, within) = (index as usize / of, index as usize % of);
        let mut random = stream(self.seed, Purpose::Order, pass as u64);
        // The first steps of a shuffle say which comes at this place.
        let mut order: Vec<usize> = (0..of).collect();
        for at in 0..=within {
            order.swap(at, uniform(&mut random, at as u64, of as u64 - 1) as usize);
        }
        order[within]
    }
}

fn uniform(random: &mut Pcg64, least: u64, most: u64) -> u64 {
    Uniform::new_inclusive(least, most).map_or(least, |range| range.sample(random))
}

fn length(random: &mut Pcg64, tokens: u32, range: f64) -> u32 {
    let least = (f64::from(tokens) * (1.0 - range)).floor().max(1.0);
    let most = (f64::from(tokens) * (1.0 + range)).ceil();
    uniform(random, least as u64, most.max(least) as u64) as u32
}

fn words(random: &mut Pcg64, count: u32) -> String {
    let mut text = String::new();
    for at in 0..count {
        if at > 0 {
            text.push(' ');
        }
        text.push_str(WORDS[uniform(random, 0, WORDS.len() as u64 - 1) as usize]);
    }
    text
}

/// Short and common, so that byte-pair vocabularies have each as one token.
const WORDS: [&str; 128] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they", "you", "were", "their",
    "one", "all", "we", "can", "her", "has", "there", "been", "if", "more", "when", "will", "would", "who", "so", "no",
    "she", "other", "its", "may", "these", "what", "them", "than", "some", "him", "time", "into", "only", "do", "such",
    "my", "new", "about", "out", "also", "two", "any", "up", "first", "could", "our", "then", "most", "see", "me",
    "should", "after", "said", "your", "very", "between", "made", "many", "over", "like", "those", "did", "now",
    "even", "well", "where", "must", "people", "through", "how", "same", "work", "being", "because", "man", "life",
    "before", "each", "much", "under", "year", "way", "long", "water", "world", "here", "think", "both", "state",
    "know", "good", "part", "use", "house", "place", "small", "great", "still", "hand", "high",
];

/// Why a file holds no conversations.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("not a list of conversations: {0}")]
    Json(#[from] serde_json::Error),
    #[error("no conversation in it begins with what a user says")]
    Empty,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(alias = "messages")]
    conversations: Vec<Said>,
}

#[derive(Deserialize)]
struct Said {
    #[serde(alias = "role")]
    from: String,
    #[serde(alias = "content")]
    value: String,
}

/// Characters of a token where only the text is known.
const TOKEN_CHARS: usize = 4;

/// Reads ShareGPT's form, `[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]`, or `messages` with
/// `role` and `content`. Answers are as long as `output_tokens` says, or else as the file's (a token for four characters).
///
/// # Errors
/// Another form, or nothing to send.
pub fn conversations_from_json(bytes: &[u8], output_tokens: Option<u32>) -> Result<Vec<Vec<Turn>>, TextError> {
    let entries: Vec<Entry> = serde_json::from_slice(bytes)?;
    let is_user = |said: &Said| matches!(said.from.as_str(), "human" | "user");
    let turns = |entry: Entry| -> Vec<Turn> {
        let pairs = entry.conversations.chunks_exact(2).take_while(|pair| is_user(&pair[0]) && !is_user(&pair[1]));
        let spoken = pairs.filter(|pair| !pair[0].value.trim().is_empty());
        spoken
            .map(|pair| {
                let estimate = (pair[1].value.chars().count() / TOKEN_CHARS).clamp(1, u32::MAX as usize) as u32;
                Turn { text: pair[0].value.clone(), output_tokens: output_tokens.unwrap_or(estimate) }
            })
            .collect()
    };
    let conversations: Vec<_> = entries.into_iter().map(turns).filter(|turns| !turns.is_empty()).collect();
    if conversations.is_empty() { Err(TextError::Empty) } else { Ok(conversations) }
}
