//! Help texts are what `tests/help.txt` says. `UPDATE_DOCS=1` writes it anew.

use std::fmt::Write;

const COLUMNS_MAX: usize = 100;

fn collect(command: &mut clap::Command, path: &str, out: &mut String) {
    let _ = writeln!(out, "$ {path} --help\n{}", command.render_long_help());
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    for name in names.iter().filter(|name| *name != "help") {
        collect(command.find_subcommand_mut(name).unwrap(), &format!("{path} {name}"), out);
    }
}

fn texts() -> String {
    let mut command = starling::cli::command();
    command.build();
    let mut out = String::new();
    collect(&mut command, "starling", &mut out);
    out.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn help_texts_are_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/help.txt");
    let current = texts();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &current).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == current, "tests/help.txt is not current; run this test with UPDATE_DOCS=1");
}

#[test]
fn help_fits_the_terminal() {
    for line in texts().lines() {
        assert!(line.chars().count() <= COLUMNS_MAX, "{line}");
    }
}

#[test]
fn every_command_begins_with_a_sentence_and_ends_with_examples() {
    fn walk(command: &clap::Command) {
        let name = command.get_name();
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        assert!(about.chars().next().is_some_and(char::is_uppercase) && about.len() > 10, "{name}: {about}");
        for below in command.get_subcommands().filter(|c| c.get_name() != "help") {
            walk(below);
        }
    }
    let command = starling::cli::command();
    walk(&command);
    for command in std::iter::once(&command).chain(command.get_subcommands()) {
        let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert_eq!(examples.lines().filter(|line| line.contains("starling")).count(), 3, "{}", command.get_name());
    }
}
