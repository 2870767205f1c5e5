//! Each rule is shown an offence that it must find and a neighbour that it must leave alone.

use super::rules::{FILE_LINES_MAX, FUNCTION_LINES_MAX, LINE_CHARS_MAX, words};
use super::{RULES, Source};

/// Rule, path, a text that offends and one that does not.
const PLANTED: &[(&str, &str, &str, &str)] = &[
    ("names_say_something", "gpu/src/utils.rs", "", ""),
    ("names_say_something", "gpu/src/a.rs", "pub(crate) struct RequestInfo {\n", "    type Item = u32;\n"),
    ("names_say_something", "gpu/src/a.rs", "fn parse_helper() {\n", "fn parse_data() {\n"),
    ("test_names_say_the_rule", "tests/a.rs", "fn test_tree() {\n", "fn evicts_leaves_before_parents() {\n"),
    ("error_messages_are_lowercase", "gpu/src/a.rs", "#[error(\"Pool empty\")]\n", "#[error(\"KV pool empty\")]\n"),
    ("error_messages_are_lowercase", "gpu/src/a.rs", "#[error(\"pool empty.\")]\n", "#[error(\"pool empty\")]\n"),
    ("nothing_is_left_unfinished", "gpu/src/a.rs", "    todo!(\"x\")\n", "// nothing to do!\n"),
    ("nothing_is_left_unfinished", "gpu/src/a.rs", "#[ignore]\n", "#[ignore = \"needs a device\"]\n"),
    ("nothing_names_a_machine", "README.md", "see /home/me/x\n", "the api's chat/home/x\n"),
    ("nothing_names_a_machine", "tests/a.py", "at = 'https://pypi.org/simple'\n", "at = 'https://example.org'\n"),
    ("whitespace_is_plain", "a.md", "a \n", "a\n"),
    ("whitespace_is_plain", "a.py", "\tx\n", "x\n"),
    ("whitespace_is_plain", "a.toml", "x = 1", "x = 1\n"),
    ("whitespace_is_plain", "a.toml", "x = 1\n\n", "x = 1\n"),
    (
        "tests_wait_on_observables",
        "tests/a.rs",
        "std::thread::sleep(d);\n",
        "// sleeps because time is virtual\nsleep(d);\n",
    ),
    (
        "tests_wait_on_observables",
        "gpu/src/a.rs",
        "#[cfg(test)]\nmod tests {\n tokio::time::sleep(d);\n",
        "tokio::time::sleep(d);\n",
    ),
    ("bad_input_cannot_panic", "transport/src/a.rs", "x.unwrap();\n", "#[cfg(test)]\nx.unwrap();\n"),
    (
        "bad_input_cannot_panic",
        "actors/system/src/a.rs",
        "x.unwrap();\n",
        "// x.unwrap()\nx.expect(\"held since start\");\n",
    ),
    ("the_core_is_deterministic", "runtime/core/src/a.rs", "use std::time::Instant;\n", "// std::time is told\n"),
    ("only_the_codec_names_bincode", "gpu/src/a.rs", "use bincode::encode;\n", "// bincode is in the codec\n"),
    ("libraries_say_what_they_are", "gpu/src/lib.rs", "pub mod a;\n", "//! What it is.\n"),
    ("documents_name_what_exists", "README.md", "[x](no-such-file.md)\n", "[x](tests/tidy.rs#L1)\n"),
    ("documents_name_what_exists", "README.md", "see `runtime/core/src/none.rs`\n", "see `tests/tidy.rs`\n"),
    (
        "changelog_has_its_shape",
        "CHANGELOG.md",
        "# Changelog\n\n## Soon\n",
        "# Changelog\n\n## Unreleased\n### Added\n- x\n",
    ),
    ("changelog_has_its_shape", "CHANGELOG.md", "# Changelog\n", "# Changelog\n\n## 0.1.0 - 2026-12-01\n"),
    (
        "decisions_have_their_shape",
        "runtime/docs/adr/0001-x.md",
        "# 1. X\nStatus: accepted\n",
        "# 0001. X\nStatus: accepted\n",
    ),
    (
        "decisions_have_their_shape",
        "runtime/docs/adr/0001-x.md",
        "# 0001. X\n",
        "# 0001. X\nStatus: superseded by 0002\n",
    ),
];

#[test]
fn every_rule_finds_what_is_planted_and_nothing_else() {
    let long_line = format!("// {}\n", "x".repeat(LINE_CHARS_MAX));
    let long_file = "// x\n".repeat(FILE_LINES_MAX + 1);
    let long_function = format!("fn long(\n) {{\n{}}}\n", "    x();\n".repeat(FUNCTION_LINES_MAX));
    let tested_file = format!("#[cfg(test)]\n{long_file}");
    let sized = [
        ("lines_are_short", "gpu/src/a.rs", long_line.as_str(), "// x\n"),
        ("files_are_short", "gpu/src/a.rs", long_file.as_str(), tested_file.as_str()),
        ("functions_are_short", "gpu/src/a.rs", long_function.as_str(), "fn one();\nfn two() {\n}\n"),
    ];
    let source = |path: &str, text: &str| Source { path: path.to_string(), text: text.to_string() };
    for (rule, check) in RULES {
        let rows: Vec<_> = PLANTED.iter().chain(&sized).filter(|row| row.0 == *rule).collect();
        assert!(!rows.is_empty(), "nothing is planted for {rule}");
        for (_, path, bad, good) in rows {
            assert!(!check(&source(path, bad)).is_empty(), "{rule} does not find {bad:?} in {path}");
            if bad != good {
                assert_eq!(check(&source(path, good)), [], "{rule} objects to {good:?} in {path}");
            }
        }
    }
}

#[test]
fn words_of_an_identifier_are_found_in_either_spelling() {
    assert_eq!(words("RequestInfo"), ["request", "info"]);
    assert_eq!(words("kv_block_MAX"), ["kv", "block", "max"]);
    assert_eq!(words("KVBlock2Info"), ["kvblock2", "info"]);
}
