//! The committed schema and the key reference are what the code says. `UPDATE_DOCS=1` writes them anew.

use serde_json::Value;
use starling::config::{Config, variable};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

fn committed(name: &str, current: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, current).unwrap();
    }
    std::fs::read_to_string(&path).unwrap_or_default()
}

const NOT_CURRENT: &str = "is not current; run this test with UPDATE_DOCS=1";

#[test]
fn the_schema_is_current() {
    let schema = Config::json_schema();
    let text = serde_json::to_string_pretty(&schema).unwrap();
    let committed = committed("config.schema.json", &(text + "\n"));
    // As values: the order of keys is nobody's business.
    let committed: Value = serde_json::from_str(&committed).unwrap();
    assert!(committed == schema, "config.schema.json {NOT_CURRENT}");
}

#[test]
fn the_key_reference_is_current() {
    let reference = reference(&Config::json_schema());
    assert!(committed("config.md", &reference) == reference, "config.md {NOT_CURRENT}");
}

const HEAD: &str = "# Configuration

One TOML file (`--config FILE` or `STARLING_CONFIG`), one table a component. Later sources win: defaults, file, environment
variables, flags. A key that does not exist is refused with the nearest one that does. `starling config print` shows what is in
effect, `starling config check` only checks, `starling config schema` prints the JSON Schema, which editors read from a first line
`#:schema config.schema.json`.

Sizes are whole numbers with a unit (`\"512MiB\"`; B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), durations likewise (`\"250ms\"`; ns, us, ms, s,
m, h). Lists in environment variables are separated by commas; an empty variable counts as not set. This page is written from
the code.
";

fn reference(schema: &Value) -> String {
    let mut out = HEAD.to_owned();
    table(schema, schema, "", &mut out);
    out += PUBLISHED;
    for (theirs, ours) in Config::kv_names() {
        let _ = match ours {
            Ok(ours) => writeln!(out, "| `{theirs}` | `{ours}` |"),
            Err(why) => writeln!(out, "| `{theirs}` | not supported: {why} |"),
        };
    }
    out
}

const PUBLISHED: &str = "
## TensorRT-LLM's names in [kv]

The file may name settings of the KV manager as TensorRT-LLM's `kv_cache_config` does, nested as there. Both names of one key are an
error. What is not supported is accepted with the value that asks for nothing (`false` or 0; `true` where it is always so).

| there | here |
| --- | --- |
";

fn resolve<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let schema = schema["anyOf"].get(0).unwrap_or(schema);
    match schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/")) {
        Some(name) => &root["$defs"][name],
        None => schema,
    }
}

fn table(schema: &Value, root: &Value, path: &str, out: &mut String) {
    let properties: BTreeMap<_, _> = schema["properties"].as_object().unwrap().iter().collect();
    let is_table = |key: &Value| resolve(key, root)["properties"].is_object();
    if !path.is_empty() {
        let _ = write!(out, "\n## [{path}]\n\n{}\n\n", line(schema));
        let _ = writeln!(out, "| key | default | environment variable | |\n| --- | --- | --- | --- |");
        for (name, key) in properties.iter().filter(|(_, key)| !is_table(key)) {
            let default = match &key["default"] {
                Value::Null => String::new(),
                value => format!("`{value}`"),
            };
            let env = variable(&format!("{path}.{name}"));
            let _ = writeln!(out, "| `{name}` | {default} | `{env}` | {} |", line(key));
        }
    }
    for (name, key) in properties.iter().filter(|(_, key)| is_table(key)) {
        let path = if path.is_empty() { (*name).clone() } else { format!("{path}.{name}") };
        table(resolve(key, root), root, &path, out);
    }
}

fn line(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}
