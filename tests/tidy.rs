//! Style that a machine can check, so that people discuss design. `STYLE.md` says why each rule is there.
//!
//! A rule is a function from one file to its offences. Each has a test that runs it over the repository, and a row in
//! `PLANTED` that shows it an offence it must find and a neighbour it must leave alone.

#[path = "tidy/planted.rs"]
mod planted;
#[path = "tidy/rules.rs"]
mod rules;

use std::path::{Path, PathBuf};

/// Folders that hold no source of ours.
const SKIPPED_FOLDERS: &[&str] = &["target", "node_modules", "__pycache__", "vectors"];
/// These files spell out what they forbid.
const SELF: &str = "tests/tidy";
const TOP_LEVEL: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "STYLE.md",
    "actors",
    "deny.toml",
    "examples",
    "gpu",
    "runtime",
    "rustfmt.toml",
    "tests",
    "transport",
];

struct Source {
    /// From the repository's root, with `/`.
    path: String,
    text: String,
}

impl Source {
    fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    fn is_self(&self) -> bool {
        self.path.starts_with(SELF)
    }

    fn is_rust(&self) -> bool {
        self.extension() == "rs" && !self.is_self()
    }

    fn is_code(&self) -> bool {
        matches!(self.extension(), "rs" | "py" | "mjs" | "sh") && !self.is_self()
    }

    fn is_test_file(&self) -> bool {
        self.path.starts_with("tests/") || self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }

    /// Numbered lines, from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// Lines before the file's unit tests; none of a file that is all test.
    fn product_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let all_test = self.is_test_file();
        self.lines().take_while(move |(_, line)| !all_test && !line.trim_start().starts_with("#[cfg(test)]"))
    }

    /// The file's unit tests, or all of a file that is all test.
    fn test_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let product = self.product_lines().count();
        self.lines().skip(product)
    }
}

/// What a rule found: the line, and what is wrong with it.
type Offences = Vec<(usize, String)>;
type Rule = fn(&Source) -> Offences;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package lies in the repository").to_path_buf()
}

/// Every text file of the repository, hidden and generated folders apart.
fn sources() -> Vec<Source> {
    let root = root();
    let (mut found, mut open) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = open.pop() {
        let entries =
            std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("cannot list {}: {error}", folder.display()));
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() {
                if !SKIPPED_FOLDERS.contains(&name.as_str()) && (!name.starts_with('.') || name == ".ci") {
                    open.push(path);
                }
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                let relative = path.strip_prefix(&root).expect("the walk starts at the root");
                found.push(Source { path: relative.to_string_lossy().replace('\\', "/"), text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(found.iter().any(|source| source.is_self()), "the walk did not find this file");
    found
}

fn assert_none(offenders: &[String]) {
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
}

fn assert_everywhere(rule: Rule) {
    let mut offenders = Vec::new();
    for source in sources() {
        offenders.extend(rule(&source).into_iter().map(|(line, what)| format!("{}:{line} {what}", source.path)));
    }
    assert_none(&offenders);
}

// -- the rules over the repository

macro_rules! everywhere {
    ($($rule:ident),* $(,)?) => {
        mod repository {
            $(#[test] fn $rule() { super::assert_everywhere(super::rules::$rule) })*
        }
        const RULES: &[(&str, Rule)] = &[$((stringify!($rule), rules::$rule)),*];
    };
}

everywhere!(
    names_say_something,
    test_names_say_the_rule,
    error_messages_are_lowercase,
    lines_are_short,
    files_are_short,
    functions_are_short,
    whitespace_is_plain,
    nothing_is_left_unfinished,
    nothing_names_a_machine,
    tests_wait_on_observables,
    bad_input_cannot_panic,
    the_core_is_deterministic,
    only_the_codec_names_bincode,
    libraries_say_what_they_are,
    documents_name_what_exists,
    changelog_has_its_shape,
    decisions_have_their_shape,
);

#[test]
fn top_level_holds_only_what_is_agreed() {
    let entries = std::fs::read_dir(root()).expect("the root can be listed").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let ours = names.filter(|name| !name.starts_with('.') && !SKIPPED_FOLDERS.contains(&name.as_str()));
    let unknown: Vec<String> = ours.filter(|name| !TOP_LEVEL.contains(&name.as_str())).collect();
    assert_none(&unknown);
}

#[test]
fn decisions_are_numbered_without_gaps_and_listed() {
    let sources = sources();
    let index =
        sources.iter().find(|source| source.path == "runtime/docs/adr/README.md").expect("decisions have an index");
    let names = sources.iter().filter_map(|source| source.path.strip_prefix("runtime/docs/adr/"));
    for (position, name) in names.filter(|name| *name != "README.md").enumerate() {
        assert!(name.starts_with(&format!("{:04}-", position + 1)), "{name} is not number {}", position + 1);
        assert!(index.text.contains(&format!("]({name})")), "{name} is not listed in {}", index.path);
    }
}
