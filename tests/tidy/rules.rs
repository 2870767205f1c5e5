//! The rules: each takes one file and returns what offends in it.

use super::{Offences, Source, root};

/// Where rustfmt gives up on a comment or a string, a person must not.
pub const LINE_CHARS_MAX: usize = 140;
/// Lines of a file before its first `#[cfg(test)]`: more than this has two subjects.
pub const FILE_LINES_MAX: usize = 700;
/// Lines of a function from `fn` to its closing brace.
pub const FUNCTION_LINES_MAX: usize = 100;

// -- words

/// The lower-case words of an identifier in either spelling.
pub fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut last_was_lower = false;
    for letter in identifier.chars() {
        if letter == '_' || (letter.is_uppercase() && last_was_lower) {
            words.push(String::new());
        }
        last_was_lower = letter.is_lowercase() || letter.is_ascii_digit();
        if letter != '_' {
            words.last_mut().expect("starts with one").extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The keyword and the name that a line of Rust defines.
fn definition(line: &str) -> Option<(&str, &str)> {
    let mut rest = line.trim_start();
    if let Some(after) = rest.strip_prefix("pub") {
        rest = after.strip_prefix('(').and_then(|scope| scope.split_once(')')).map_or(after, |(_, after)| after);
    }
    let mut parts = rest.split_whitespace().skip_while(|word| matches!(*word, "async" | "const" | "unsafe"));
    let keyword = parts.next().filter(|word| matches!(*word, "fn" | "struct" | "enum" | "trait" | "type" | "mod"))?;
    let name = parts.next()?.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()?;
    Some((keyword, name)).filter(|(_, name)| !name.is_empty())
}

/// Words that name nothing: what they hold is better said by its own name.
const EMPTY_WORDS: &[&str] = &["util", "utils", "helper", "helpers", "misc"];
/// Words that say nothing in the name of a type.
const EMPTY_TYPE_WORDS: &[&str] = &["job", "task", "item", "data", "info", "common"];

pub fn names_say_something(source: &Source) -> Offences {
    let mut found = Vec::new();
    let stem = source.path.rsplit('/').next().and_then(|name| name.split('.').next()).unwrap_or("");
    if source.is_code() && (EMPTY_WORDS.contains(&stem) || stem == "common") {
        found.push((1, format!("a file named {stem}")));
    }
    for (number, line) in source.lines().filter(|_| source.is_rust()) {
        let Some((keyword, name)) = definition(line) else {
            continue;
        };
        let is_associated_type = keyword == "type" && line.starts_with(' ');
        let is_type = matches!(keyword, "struct" | "enum" | "trait" | "type") && !is_associated_type;
        for word in words(name) {
            let word = word.as_str();
            if EMPTY_WORDS.contains(&word) || (is_type && EMPTY_TYPE_WORDS.contains(&word)) {
                found.push((number, format!("`{word}` in the name {name}")));
            }
        }
    }
    found
}

pub fn test_names_say_the_rule(source: &Source) -> Offences {
    let tests = source.test_lines().filter(|_| source.is_rust());
    let named = tests.filter_map(|(number, line)| Some((number, definition(line)?)));
    named
        .filter(|(_, (keyword, name))| {
            *keyword == "fn" && (name.starts_with("test_") || name.ends_with("_test") || *name == "works")
        })
        .map(|(number, (_, name))| (number, format!("{name} does not say the rule it tests")))
        .collect()
}

pub fn error_messages_are_lowercase(source: &Source) -> Offences {
    let mut found = Vec::new();
    for (number, line) in source.lines().filter(|_| source.is_rust()) {
        let Some((_, message)) = line.split_once("#[error(\"") else {
            continue;
        };
        let mut letters = message.chars();
        // `KV`, `GGUF` and other names that are written so may stand first.
        let capitalised =
            letters.next().is_some_and(char::is_uppercase) && letters.next().is_some_and(char::is_lowercase);
        let text = message.rsplit_once('"').map_or(message, |(text, _)| text);
        if capitalised || text.ends_with('.') {
            found.push((number, "messages start lowercase and end without a full stop".to_string()));
        }
    }
    found
}

// -- sizes

pub fn lines_are_short(source: &Source) -> Offences {
    let long = source.lines().filter(|(_, line)| source.is_code() && line.chars().count() > LINE_CHARS_MAX);
    long.map(|(number, line)| (number, format!("{} characters (limit {LINE_CHARS_MAX})", line.chars().count())))
        .collect()
}

pub fn files_are_short(source: &Source) -> Offences {
    let lines = match source.is_test_file() {
        true => source.lines().count(),
        false => source.product_lines().count(),
    };
    let long = source.is_rust() && lines > FILE_LINES_MAX;
    Vec::from_iter(long.then(|| (1, format!("{lines} lines (limit {FILE_LINES_MAX})"))))
}

/// rustfmt puts a function's closing brace under its `fn`, so indentation tells where it ends.
pub fn functions_are_short(source: &Source) -> Offences {
    let mut found = Vec::new();
    let mut open: Option<(usize, usize, &str)> = None;
    for (number, line) in source.product_lines().filter(|_| source.is_rust()) {
        let indent = line.len() - line.trim_start().len();
        match open {
            None => {
                if let Some(("fn", name)) = definition(line).filter(|_| !line.trim_end().ends_with([';', '}'])) {
                    open = Some((number, indent, name));
                }
            }
            Some((start, depth, name)) if indent == depth && line.trim_start().starts_with('}') => {
                let lines = number - start + 1;
                if lines > FUNCTION_LINES_MAX {
                    found.push((start, format!("{name} has {lines} lines (limit {FUNCTION_LINES_MAX})")));
                }
                open = None;
            }
            // A signature without a body, over several lines.
            Some((_, depth, _)) if indent == depth && line.trim_end().ends_with(';') => open = None,
            Some(_) => {}
        }
    }
    found
}

// -- what must not be there

pub fn whitespace_is_plain(source: &Source) -> Offences {
    let mut found = Vec::new();
    if !matches!(source.extension(), "rs" | "toml" | "md" | "py" | "mjs" | "sh" | "yaml" | "service")
        || source.text.is_empty()
    {
        return found;
    }
    for (number, line) in source.text.split('\n').enumerate() {
        if line.contains('\t') || line.ends_with([' ', '\r']) {
            found.push((number + 1, "a tab, a carriage return or a space at the end".to_string()));
        }
    }
    if !source.text.ends_with('\n') || source.text.ends_with("\n\n") {
        found.push((source.lines().count(), "a file ends with one line end".to_string()));
    }
    found
}

pub fn nothing_is_left_unfinished(source: &Source) -> Offences {
    const MARKS: &[&str] = &["todo!(", "unimplemented!(", "dbg!(", "TODO", "FIXME", "XXX", "#[ignore]"];
    let mut found = Vec::new();
    for (number, line) in source.lines().filter(|_| source.is_code()) {
        found.extend(MARKS.iter().filter(|mark| line.contains(**mark)).map(|mark| (number, format!("`{mark}`"))));
    }
    found
}

/// A path of one machine, or the address of a registry that not everybody reaches under that name.
pub fn nothing_names_a_machine(source: &Source) -> Offences {
    const PLACES: &[&str] = &["/work/", "/root/", "/home/", "/Users/"];
    const HOSTS: &[&str] = &["pypi.org", "pythonhosted.org", "npmjs.org", "npmjs.com", "crates.io"];
    let mut found = Vec::new();
    for (number, line) in source.lines().filter(|_| !source.path.ends_with("Cargo.lock") && !source.is_self()) {
        found.extend(HOSTS.iter().filter(|host| line.contains(**host)).map(|host| (number, format!("names {host}"))));
        for place in PLACES {
            let starts_there = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-}/".contains(c));
            if line.match_indices(place).any(|(at, _)| starts_there(at)) {
                found.push((number, format!("names {place}")));
            }
        }
    }
    found
}

/// A sleep in a test is a guess about another machine's speed. Virtual time and paced producers say so on the line.
pub fn tests_wait_on_observables(source: &Source) -> Offences {
    let mut found = Vec::new();
    let mut above = "";
    for (number, line) in source.test_lines().filter(|_| source.is_rust()) {
        let sleeps = ["thread::sleep(", "time::sleep(", "sleep_until("].iter().any(|call| line.contains(call));
        let excused = [line, above].iter().any(|line| line.contains("// sleeps because "));
        if sleeps && !excused {
            found.push((number, "a test sleeps; wait on what it waits for, or say `// sleeps because …`".to_string()));
        }
        above = line;
    }
    found
}

pub fn bad_input_cannot_panic(source: &Source) -> Offences {
    let guarded =
        ["runtime/core/src/", "transport/src/", "actors/"].iter().any(|folder| source.path.starts_with(folder));
    let lines = source.product_lines().filter(|_| guarded && source.is_rust());
    let code = lines.filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.filter(|(_, line)| line.contains(".unwrap()") || line.contains(".expect(\"\")"))
        .map(|(number, _)| {
            (number, "`unwrap` in product code; return an error, or `expect` with the invariant".to_string())
        })
        .collect()
}

/// Clocks, randomness, threads and random order make two replicas differ. The compiler cannot see them, so names must.
pub fn the_core_is_deterministic(source: &Source) -> Offences {
    const SOURCES: &[&str] = &[
        "std::time::",
        "SystemTime",
        "Instant::",
        "std::thread",
        "std::fs",
        "std::net",
        "std::env",
        "RandomState",
        "thread_rng",
    ];
    let core = source.path.starts_with("runtime/core/src/");
    let mut found = Vec::new();
    for (number, line) in source.product_lines().filter(|(_, line)| core && !line.trim_start().starts_with("//")) {
        found.extend(
            SOURCES.iter().filter(|name| line.contains(**name)).map(|name| (number, format!("`{name}` in the core"))),
        );
    }
    found
}

pub fn only_the_codec_names_bincode(source: &Source) -> Offences {
    let elsewhere = source.is_rust() && source.path != "transport/src/codec.rs" && source.path != "tests/layering.rs";
    let lines = source.lines().filter(|(_, line)| elsewhere && !line.trim_start().starts_with("//"));
    lines
        .filter(|(_, line)| line.contains("bincode"))
        .map(|(number, _)| (number, "names bincode".to_string()))
        .collect()
}

// -- documents

pub fn libraries_say_what_they_are(source: &Source) -> Offences {
    let library = source.path.ends_with("src/lib.rs") && !source.path.starts_with("examples/");
    let bare = library && !source.text.starts_with("//! ");
    Vec::from_iter(bare.then(|| (1, "a library begins with what it is: `//! …`".to_string())))
}

/// A relative link, or a path in backticks that begins with one of our folders, leads to a file.
pub fn documents_name_what_exists(source: &Source) -> Offences {
    let mut found = Vec::new();
    if source.extension() != "md" {
        return found;
    }
    let root = root();
    let folder = root.join(&source.path).parent().expect("a file lies in a folder").to_path_buf();
    for (number, line) in source.lines() {
        let links = line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.contains("://") && !link.starts_with('#')) {
            let path = link.split('#').next().unwrap_or(link);
            if !folder.join(path).exists() {
                found.push((number, format!("the link {link} leads nowhere")));
            }
        }
        let quoted = line.split('`').skip(1).step_by(2);
        for path in quoted.filter(|path| is_path_of_ours(path)) {
            if !root.join(path).exists() {
                found.push((number, format!("{path} does not exist")));
            }
        }
    }
    found
}

fn is_path_of_ours(text: &str) -> bool {
    const FOLDERS: &[&str] = &["runtime/", "actors/", "gpu/", "transport/", "tests/", "examples/", ".ci/"];
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    plain && FOLDERS.iter().any(|folder| text.starts_with(folder))
}

pub fn changelog_has_its_shape(source: &Source) -> Offences {
    let mut found = Vec::new();
    if source.path != "CHANGELOG.md" {
        return found;
    }
    let mut versions = 0;
    for (number, line) in source.lines() {
        let fine = if let Some(kind) = line.strip_prefix("### ") {
            versions > 0 && matches!(kind, "Added" | "Changed" | "Fixed" | "Removed")
        } else if let Some(version) = line.strip_prefix("## ") {
            versions += 1;
            let dated = version.split_once(" - ").is_some_and(|(version, date)| is_version(version) && is_date(date));
            dated || (versions == 1 && version == "Unreleased")
        } else {
            !line.starts_with('#') || (number == 1 && line == "# Changelog")
        };
        if !fine {
            found.push((number, format!("`{line}` is not a heading of a changelog here")));
        }
    }
    if versions == 0 {
        found.push((1, "no version".to_string()));
    }
    found
}

fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    parts.len() == 3 && parts.iter().all(|part| part.parse::<u32>().is_ok())
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let digits = parts.iter().all(|part| part.chars().all(|c| c.is_ascii_digit()));
    digits && parts.iter().map(|part| part.len()).eq([4, 2, 2])
}

/// `NNNN-title.md` begins with `# NNNN. ` and says in what state the decision is.
pub fn decisions_have_their_shape(source: &Source) -> Offences {
    let mut found = Vec::new();
    let Some(name) = source.path.strip_prefix("runtime/docs/adr/").filter(|name| *name != "README.md") else {
        return found;
    };
    let number = name.split('-').next().unwrap_or("");
    if number.len() != 4 || number.parse::<u32>().is_err() || !name.ends_with(".md") {
        found.push((1, "a decision is called NNNN-title.md".to_string()));
    }
    if !source.text.starts_with(&format!("# {number}. ")) {
        found.push((1, format!("the title does not begin with `# {number}. `")));
    }
    let states = ["Status: proposed", "Status: accepted", "Status: superseded by "];
    if !source.lines().any(|(_, line)| states.iter().any(|state| line.starts_with(state))) {
        found.push((1, "no line `Status: proposed|accepted|superseded by NNNN`".to_string()));
    }
    found
}
