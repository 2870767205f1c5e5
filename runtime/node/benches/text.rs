//! What the text of a long conversation's next turn costs, with the text cache and without: rendering, encoding, block keys.
//!
//! `STARLING_MODEL=FILE cargo bench -p starling --bench text`: the file's tokenizer and chat template are used.

use starling::text::{Cost, Encoded, Message, Owner, Role, TextCache, TextModel};
use starling_core::ids::ConversationKey;
use starling_gpu::gguf::Gguf;
use std::time::{Duration, Instant};

const HISTORY_TOKENS: usize = 64 << 10;
const BLOCK_TOKENS: u32 = 16;
const TURNS: usize = 9;
const OWNER: Owner = Owner { tenant: 1, conversation: Some(ConversationKey(1)) };

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn said(role: Role, content: String) -> Message {
    Message { role, content, name: None }
}

/// A conversation of so many tokens, of turns that are never the same.
fn history(model: &TextModel) -> Vec<Message> {
    let mut messages = Vec::new();
    for turn in 0.. {
        let question = format!("Question {turn}: what follows from {} and \"{}\"?\n", turn * 7919, turn % 13);
        let line = |at: usize| format!("    let value_{at} = step({}); // {} of turn {turn}\n", at * turn, at % 7);
        messages.push(said(Role::User, question));
        messages.push(said(Role::Assistant, (0..40).map(line).collect()));
        if turn % 8 == 0 && model.encode_chat(&messages).expect("a chat").len() >= HISTORY_TOKENS {
            return messages;
        }
    }
    messages
}

/// Takes turn after turn, each with a new answer and question; returns the times of rendering and of the rest.
fn run(model: &TextModel, cache: &TextCache) -> (f64, f64, Cost) {
    let mut messages = history(model);
    let (mut rendering, mut encoding, mut last) = (Vec::new(), Vec::new(), Cost::default());
    for turn in 0..=TURNS {
        messages.push(said(Role::User, format!("And what of {turn}?")));
        let begun = Instant::now();
        let text = model.chat_text(&messages).expect("a chat");
        let rendered = begun.elapsed();
        let Encoded { tokens, cost, .. } = cache.encode(model, text, OWNER).expect("encodes");
        // The first turn fills the cache.
        if turn > 0 {
            rendering.push(rendered);
            encoding.push(begun.elapsed() - rendered);
        }
        assert!(tokens.len() >= HISTORY_TOKENS);
        last = cost;
        messages.push(said(Role::Assistant, format!("Of {turn}, nothing follows.")));
    }
    (median(rendering), median(encoding), last)
}

fn main() {
    let path = std::env::var("STARLING_MODEL").expect("STARLING_MODEL names a model file");
    let model = TextModel::from_gguf(&Gguf::open(path).expect("a model file")).expect("its text side");
    // stdout is the benchmark's result.
    #[allow(clippy::print_stdout)]
    for (name, bytes_max) in [("without the cache", 0), ("with it", 64 << 20)] {
        let (render_ms, encode_ms, cost) = run(&model, &TextCache::new(bytes_max, Some(BLOCK_TOKENS)));
        println!(
            "a turn behind {HISTORY_TOKENS} tokens, {name}: rendered in {render_ms:.2} ms, encoded and keyed in \
             {encode_ms:.2} ms ({} bytes of text encoded, {} blocks keyed, {} tokens reused, cache {} KiB)",
            cost.encoded_bytes,
            cost.keyed_blocks,
            cost.reused_tokens,
            cost.cache_bytes >> 10,
        );
    }
}
