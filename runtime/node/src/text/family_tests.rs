//! Tokenizers of the families: SentencePiece with scores, `tokenizer.json`, and the folders they come in.

use super::json;
use super::prompt::PromptText;
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use starling_core::ids::TokenId;
use starling_gpu::gguf::Gguf;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// What a prompt of this text becomes, the begin token included.
fn prompt_of(tokenizer: &Tokenizer, prompt: &PromptText) -> Vec<TokenId> {
    let mut progress = prompt::Progress::default();
    progress.tokens.extend(tokenizer.begin_of(prompt));
    tokenizer.go_on(prompt, &mut progress).unwrap();
    progress.tokens
}

fn trusted(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    prompt_of(tokenizer, &tokenizer.prompt_text(&[Piece::Template(text.into())]))
}

// -- SentencePiece

/// Tokens with their scores: specials, pieces, and single bytes where `with_bytes`.
pub(super) fn scored(space_prefix: bool, with_bytes: bool) -> TokenizerParts {
    let mut table = vec![
        ("<unk>".to_owned(), TokenKind::Control, 0.0),
        ("<s>".to_owned(), TokenKind::Control, 0.0),
        ("</s>".to_owned(), TokenKind::Control, 0.0),
        ("<mark>".to_owned(), TokenKind::UserDefined, 0.0),
        ("\n\n".to_owned(), TokenKind::UserDefined, 0.0),
    ];
    let pieces =
        ["▁", "a", "b", "c", "<", ">", "s", "/", "ab", "bc", "▁a", "abc", "▁ab", "▁▁", "<s", "<s>", "é", "▁abc", "cc"];
    let scores = (0..).map(|rank: u16| -f32::from(rank));
    table.extend(pieces.iter().zip(scores).map(|(piece, score)| ((*piece).to_owned(), TokenKind::Text, score)));
    if with_bytes {
        table.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenKind::Byte, 0.0)));
    }
    let scores = table.iter().map(|(_, _, score)| *score).collect();
    TokenizerParts {
        tokens: table.iter().map(|(name, _, _)| name.clone()).collect(),
        kinds: table.iter().map(|(_, kind, _)| *kind).collect(),
        rules: Rules::Scores { scores, space_prefix },
        begin: Some(1),
        adds_begin: true,
        unknown: Some(0),
        ends: vec![2],
        takes_space_before: Vec::new(),
        takes_space_behind: Vec::new(),
    }
}

fn names(parts: &TokenizerParts, tokens: &[TokenId]) -> Vec<String> {
    tokens.iter().map(|&id| parts.tokens[id as usize].clone()).collect()
}

/// The rule as it is written: join the best pair, the leftmost of equals, until none is left.
fn joined_slowly(parts: &TokenizerParts, text: &str) -> Vec<String> {
    let Rules::Scores { scores, .. } = &parts.rules else { panic!("other rules") };
    let score = |piece: &str| {
        let found =
            parts.tokens.iter().zip(&parts.kinds).position(|(name, kind)| name == piece && *kind == TokenKind::Text);
        found.map(|id| scores[id])
    };
    let mut symbols: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let pairs = symbols.windows(2).enumerate().filter_map(|(at, pair)| Some((score(&pair.concat())?, at)));
        let best = pairs.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let Some((_, at)) = best else { break };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    let spell = |symbol: String| match score(&symbol) {
        Some(_) => vec![symbol],
        None => symbol.bytes().map(|byte| format!("<0x{byte:02X}>")).collect(),
    };
    symbols.into_iter().flat_map(spell).collect()
}

static SCORED: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::new(scored(false, true)).unwrap());

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn the_best_pair_is_joined_first(text in "[abc <s>/é😀]{0,24}") {
        let parts = scored(false, true);
        prop_assert_eq!(names(&parts, &SCORED.encode(&text).unwrap()), joined_slowly(&parts, &text));
        prop_assert_eq!(SCORED.decode(&SCORED.encode(&text).unwrap()).unwrap(), text);
    }
}

#[test]
fn pieces_are_joined_by_score_and_not_from_the_left() {
    let (parts, tokenizer) = (scored(true, true), Tokenizer::new(scored(true, true)).unwrap());
    let of = |text| names(&parts, &tokenizer.encode(text).unwrap());
    assert_eq!(of("abc"), ["▁abc"]);
    assert_eq!(of("abcbc"), ["▁abc", "bc"]);
    assert_eq!(of("cab  b"), ["▁", "c", "ab", "▁▁", "b"]);
    assert_eq!(of("é€"), ["▁", "é", "<0xE2>", "<0x82>", "<0xAC>"]);
    assert_eq!(of(""), [""; 0]);
    let without = scored(false, false);
    let bare = Tokenizer::new(scored(false, false)).unwrap();
    assert_eq!(names(&without, &bare.encode("abcz").unwrap()), ["abc", "<unk>"]);
}

#[test]
fn a_space_is_put_before_text_at_the_start_and_behind_whole_tokens() {
    let (parts, tokenizer) = (scored(true, true), Tokenizer::new(scored(true, true)).unwrap());
    let of = |text| names(&parts, &trusted(&tokenizer, text));
    assert_eq!(of("ab"), ["<s>", "▁ab"]);
    assert_eq!(of("<s>ab</s>ab"), ["<s>", "▁ab", "</s>", "▁ab"]);
    assert_eq!(of("ab<mark>ab\n\n"), ["<s>", "▁ab", "<mark>", "▁ab", "\n\n"]);
    for text in ["ab", " ab", "ab<mark>ab", "ab<mark> ab", "\n\n", "é 😀"] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    }
    assert_eq!(tokenizer.decode(&trusted(&tokenizer, "ab</s>ab")).unwrap(), "<s>ab</s>ab");
}

#[test]
fn text_never_becomes_a_control_token_or_a_byte_by_its_name() {
    for with_bytes in [true, false] {
        let (parts, tokenizer) = (scored(true, with_bytes), Tokenizer::new(scored(true, with_bytes)).unwrap());
        for attack in ["<s>", "</s>", "a<s>b</s>", "<mark><s></s>", "<unk>"] {
            let tokens = tokenizer.encode(attack).unwrap();
            let controls = tokens.iter().filter(|&&token| tokenizer.is_control(token) && token != 0).count();
            assert_eq!(controls, 0, "{attack:?}: {:?}", names(&parts, &tokens));
        }
    }
    // `<s>` is a piece as well as a control token here: text is the piece.
    let (parts, tokenizer) = (scored(false, true), &*SCORED);
    let tokens = tokenizer.encode("<s><0x61>").unwrap();
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "<s><0x61>");
    assert!(tokens[0] > 4 && parts.tokens[tokens[0] as usize] == "<s>");
}

#[test]
fn long_runs_of_one_character_are_no_trap_for_pieces() {
    for unit in [" ", "a", "é", "z", "\n\n"] {
        let text = unit.repeat(100_000);
        assert!(SCORED.decode(&SCORED.encode(&text).unwrap()).unwrap() == text, "{unit:?}");
    }
}

#[test]
fn scores_that_do_not_fit_the_vocabulary_are_refused() {
    let mut parts = scored(true, true);
    parts.rules = Rules::Scores { scores: vec![0.0; 3], space_prefix: true };
    let error = Tokenizer::new(parts).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("vocabulary has 280 tokens and 3 scores"));
}

// -- tokenizer.json

fn added(id: TokenId, content: &str, special: bool, strips: &str) -> Value {
    json!({
        "id": id, "content": content, "special": special, "single_word": false, "normalized": false,
        "lstrip": strips.contains('l'), "rstrip": strips.contains('r'),
    })
}

/// How the file below cuts words.
const WORD: &str = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A byte-level file, as those of the Llama 3 and Qwen families.
pub(super) fn byte_level_file(ignore_merges: bool) -> Value {
    let alphabet = bytes::ByteAlphabet::new();
    let mut vocabulary = serde_json::Map::new();
    let mut add = |name: &str| {
        let id = vocabulary.len();
        vocabulary.insert(name.into(), id.into());
    };
    (0..=255u8).for_each(|byte| add(&alphabet.letter(byte).to_string()));
    // Control tokens lie in the vocabulary too, and one could be merged: text must not find it.
    ["he", "ll", "Ġhe", "hell", "<|", "|>", "<|end|>", "<|begin|>"].into_iter().for_each(&mut add);
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(262, "<|end|>", true, ""), added(263, "<|begin|>", true, ""), added(264, "<|role|>", true, "r"),
            added(265, "<think>", false, ""), added(266, "<mask>", true, "l"),
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORD},
             "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [263], "tokens": ["<|begin|>"]}}},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocabulary, "merges": [["h", "e"], ["l", "l"], ["Ġ", "he"], ["he", "ll"], ["<", "|"], ["|", ">"]],
        },
    })
}

/// A file with byte fallback, as those of the Llama 2 and Gemma families, with one of the ways to mark words.
fn byte_fallback_file(words: &str) -> Value {
    let mut vocabulary = serde_json::Map::new();
    let mut add = |name: &str| {
        let id = vocabulary.len();
        vocabulary.insert(name.into(), id.into());
    };
    ["<unk>", "<s>", "</s>"].into_iter().for_each(&mut add);
    (0..=255u8).for_each(|byte| add(&format!("<0x{byte:02X}>")));
    ["▁", "a", "b", "<", ">", "s", "ab", "▁a", "▁ab", "▁▁", "<s", "\n", "\n\n"].into_iter().for_each(&mut add);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let metaspace = |scheme| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let (normaliser, cutter) = match words {
        "prepend" => {
            (json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}), Value::Null)
        }
        "replace" => (
            replace,
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
        ),
        scheme => (Value::Null, metaspace(scheme)),
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(0, "<unk>", true, ""), added(1, "<s>", true, ""), added(2, "</s>", true, ""),
            added(271, "\n\n", false, ""), added(272, "[INST]", true, ""),
        ],
        "normalizer": normaliser, "pre_tokenizer": cutter,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": ["a b", "▁ a", "▁ ab", "▁ ▁", "< s", "<s >", "\n \n"],
        },
    })
}

const WORDS: [&str; 5] = ["prepend", "replace", "first", "always", "never"];

struct Both {
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
    /// `Metaspace` takes a space that is there for the one it would put: which of both was meant is lost.
    keeps_spaces: bool,
}

fn both(file: Value) -> Both {
    let scheme = &file["pre_tokenizer"]["prepend_scheme"];
    let keeps_spaces = scheme != "first" && scheme != "always";
    let reference = serde_json::from_value(file.clone()).unwrap();
    Both { ours: Tokenizer::new(json::parts(file, 300).unwrap()).unwrap(), reference, keeps_spaces }
}

impl Both {
    fn round_trips(&self, text: &str) -> bool {
        let decoded = self.ours.decode(&self.ours.encode(text).unwrap()).unwrap();
        let bare = |text: &str| text.replace(' ', "");
        decoded == text || !self.keeps_spaces && bare(&decoded) == bare(text)
    }
}

static FILES: LazyLock<Vec<Both>> = LazyLock::new(|| {
    let byte_level = [true, false].map(byte_level_file);
    byte_level.into_iter().chain(WORDS.map(byte_fallback_file)).map(both).collect()
});

const WHOLE: [&str; 12] =
    ["<s>", "</s>", "[INST]", "<|end|>", "<|begin|>", "<|role|>", "<think>", "<mask>", "\n\n", "e\u{301}", "😀", "   "];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn a_prompt_of_trusted_text_is_what_the_format_says(
        parts in prop::collection::vec(prop_oneof![
            "[ab hel<|>s\n 1é]{0,6}",
            prop::sample::select(&WHOLE[..])
                .prop_map(str::to_owned),
        ], 0..7),
    ) {
        let text = parts.concat();
        for Both { ours, reference, .. } in FILES.iter() {
            // The reference puts a begin token before whatever follows; here one that is written already is enough.
            let mut wanted = reference.encode(&*text, true).unwrap().get_ids().to_vec();
            if wanted.len() > 1 && wanted[0] == wanted[1] {
                wanted.remove(0);
            }
            prop_assert_eq!(trusted(ours, &text), wanted, "{:?}", text);
        }
    }

    #[test]
    fn what_people_write_becomes_no_control_token_and_loses_nothing(
        parts in prop::collection::vec(prop_oneof![
            "[ab hel<|>s\n 1é]{0,6}",
            prop::sample::select(vec!["<s>", "</s>", "[INST]", "<unk>", "<|end|>", "<|begin|>", "<|role|>", "<mask>", "<think>", "😀"])
                .prop_map(str::to_owned),
        ], 0..7),
    ) {
        let text = parts.concat();
        for both in FILES.iter() {
            let tokens = both.ours.encode(&text).unwrap();
            prop_assert!(!tokens.iter().any(|&token| both.ours.is_control(token)), "{:?} {:?}", text, tokens);
            prop_assert!(both.round_trips(&text), "{:?} {:?}", text, tokens);
        }
    }
}

#[test]
fn long_runs_of_one_character_are_no_trap_for_files() {
    for (at, both) in FILES.iter().enumerate() {
        for unit in [" ", "a", "1", "é", "\n"] {
            assert!(both.round_trips(&unit.repeat(50_000)), "file {at}, {unit:?}");
        }
    }
}

#[test]
fn files_that_cannot_be_used_are_refused_by_name() {
    let broken = |change: fn(&mut Value)| {
        let mut file = byte_level_file(false);
        change(&mut file);
        json::parts(file, 300).and_then(Tokenizer::new).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(broken(|file| *file = json!([])), "tokenizer.json: file: must be an object");
    let unigram = broken(|file| file["model"]["type"] = json!("Unigram"));
    assert_eq!(unigram, "tokenizer model \"Unigram\" is not supported (supported: BPE)");
    assert!(broken(|file| file["model"]["vocab"] = json!([])).contains("model.vocab: must be an object"));
    assert!(broken(|file| file["model"]["vocab"]["a"] = json!(-1)).contains("model.vocab: \"a\" has no id"));
    assert!(broken(|file| file["model"]["merges"] = json!(["no such"])).starts_with("tokenizer.json: "));
    assert!(broken(|file| file["decoder"] = json!({"type": "WordPiece"})).contains("decoder \"WordPiece\""));
    assert!(broken(|file| file["added_tokens"][0]["single_word"] = json!(true)).contains("\"<|end|>\": single_word"));
    assert!(broken(|file| file["pre_tokenizer"] = json!({"type": "NoSuch"})).starts_with("tokenizer.json: "));
    let small = json::parts(byte_level_file(false), 200).err().map(|error| error.to_string());
    assert_eq!(small.as_deref(), Some("the tokenizer has 262 tokens, the model's embedding only 200"));
}

#[test]
fn tokens_beyond_the_embedding_do_not_exist() {
    let tokenizer = Tokenizer::new(json::parts(byte_level_file(false), 264).unwrap()).unwrap();
    assert_eq!(tokenizer.vocabulary_tokens(), 264);
    assert_eq!(trusted(&tokenizer, "<|end|>")[1], 262);
    assert!(trusted(&tokenizer, "<|role|><think>").iter().all(|&token| token < 264));
}

// -- folders

fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn refusal(files: &[(&str, String)]) -> String {
    TextModel::from_folder(folder(files).path(), 300).err().map(|error| error.to_string()).unwrap_or_default()
}

const TEMPLATE: &str = "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}";

fn user(content: &str) -> [Message; 1] {
    [Message { role: Role::User, content: content.into(), name: None }]
}

#[test]
fn a_folder_gives_tokens_ends_and_template() {
    let tokenizer = byte_level_file(true).to_string();
    let config = json!({
        "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE, "add_bos_token": true,
    });
    let files = [
        ("tokenizer.json", tokenizer.clone()),
        ("tokenizer_config.json", config.to_string()),
        ("generation_config.json", json!({"eos_token_id": [262, 264]}).to_string()),
        ("config.json", json!({"eos_token_id": 262}).to_string()),
    ];
    let model = TextModel::from_folder(folder(&files).path(), 300).unwrap();
    assert_eq!(model.tokenizer.ends(), [262, 264]);
    assert_eq!(model.encode_text("he").unwrap(), [263, 256]);
    let tokens = model.encode_chat(&user("he<|end|>")).unwrap();
    assert_eq!((tokens[..2].to_vec(), tokens.iter().filter(|&&t| t == 262).count()), (vec![263, 264], 1));

    // A template of its own wins, and what adds a begin token may be turned off.
    let quiet = json!({"add_bos_token": false, "chat_template": "unused"}).to_string();
    let own = "{{ messages[0].content }}".to_owned();
    let files = [("tokenizer.json", tokenizer.clone()), ("tokenizer_config.json", quiet), ("chat_template.jinja", own)];
    let model = TextModel::from_folder(folder(&files).path(), 300).unwrap();
    assert_eq!(model.encode_chat(&user("he")).unwrap(), [256]);

    let named =
        json!({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "he"}]});
    let files = [("tokenizer.json", tokenizer), ("tokenizer_config.json", named.to_string())];
    let model = TextModel::from_folder(folder(&files).path(), 300).unwrap();
    assert_eq!(model.encode_chat(&user("")).unwrap(), [263, 256]);
}

#[test]
fn a_base_model_completes_and_says_that_it_cannot_chat() {
    let model =
        TextModel::from_folder(folder(&[("tokenizer.json", byte_level_file(true).to_string())]).path(), 300).unwrap();
    assert_eq!(model.encode_text("he").unwrap(), [263, 256]);
    assert_eq!(model.encode_chat(&user("he")), Err(ChatError::NoTemplate));
}

#[test]
fn a_folders_files_are_refused_by_name() {
    let tokenizer = || ("tokenizer.json", byte_level_file(true).to_string());
    assert_eq!(refusal(&[]), "tokenizer.json: is missing from the model's folder");
    assert!(refusal(&[("tokenizer.json", "{".into())]).starts_with("tokenizer.json: EOF"));
    assert_eq!(refusal(&[tokenizer(), ("config.json", "[]".into())]), "config.json: must be a JSON object");
    let config = |text: &str| refusal(&[tokenizer(), ("tokenizer_config.json", text.into())]);
    assert_eq!(
        config(r#"{"eos_token": "</no>"}"#),
        "tokenizer_config.json: eos_token \"</no>\" is not in tokenizer.json"
    );
    assert_eq!(config(r#"{"bos_token": 7}"#), "tokenizer_config.json: bos_token is neither a string nor a token");
    assert!(config(r#"{"chat_template": 7}"#).starts_with("tokenizer_config.json: chat_template is neither"));
    assert!(config(r#"{"chat_template": "{% if %}"}"#).starts_with("chat template: "));
    let ends = refusal(&[tokenizer(), ("generation_config.json", r#"{"eos_token_id": [1, "x"]}"#.into())]);
    assert_eq!(ends, "generation_config.json: eos_token_id has \"x\", which is not a token id");
    let outside = refusal(&[tokenizer(), ("generation_config.json", r#"{"eos_token_id": 4000}"#.into())]);
    assert_eq!(outside, "token 4000 is outside the vocabulary of 267 tokens");
}

// -- the real model

/// The tokens of llama.cpp for each prompt of the file that `STARLING_GEMMA_VECTORS` names, by the model file that
/// `STARLING_GEMMA` names.
#[test]
fn sentence_pieces_of_the_real_model_are_the_references() {
    let (Some(model), Some(vectors)) = (std::env::var_os("STARLING_GEMMA"), std::env::var_os("STARLING_GEMMA_VECTORS"))
    else {
        eprintln!("SKIPPED: STARLING_GEMMA and STARLING_GEMMA_VECTORS are not both set");
        return;
    };
    let model = TextModel::from_gguf(&Gguf::open(Path::new(&model)).unwrap()).unwrap();
    assert!(model.template.is_none());
    let file: Value = serde_json::from_slice(&fs::read(vectors).unwrap()).unwrap();
    let mut met = 0;
    for case in file["prompts"].as_array().unwrap() {
        let text = case["prompt"].as_str().unwrap();
        let tokens = model.encode_text(text).unwrap();
        assert_eq!(json!(tokens), case["prompt_ids"], "{}", case["name"]);
        let begin = tokens[0];
        assert!(model.tokenizer.is_control(begin));
        assert_eq!(model.tokenizer.decode(&tokens[1..]).unwrap(), text);
        met += 1;
    }
    assert!(met > 0);
}
