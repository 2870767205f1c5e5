//! The tree of keys, read from the schema: which keys there are and what type each takes.

use serde_json::Value;
use std::collections::BTreeMap;

/// A key of the configuration: a table of more, or a value.
#[derive(Debug)]
pub enum Key {
    Table(BTreeMap<String, Key>),
    Value(Kind),
}

/// How the text of an environment variable becomes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Boolean,
    Integer,
    Number,
    Text,
    /// Texts, separated by commas; so are the other lists.
    List,
    Integers,
    Numbers,
}

impl Key {
    pub fn root() -> Self {
        let schema = super::Config::json_schema();
        Self::read(&schema, &schema)
    }

    fn read(schema: &Value, root: &Value) -> Self {
        if let Some(name) = schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/")) {
            return Self::read(&root["$defs"][name], root);
        }
        // `Option` of a named type: the named type, or null.
        if let Some(first) = schema["anyOf"].get(0) {
            return Self::read(first, root);
        }
        if let Some(properties) = schema["properties"].as_object() {
            return Self::Table(properties.iter().map(|(k, v)| (k.clone(), Self::read(v, root))).collect());
        }
        // `Option` of a plain type lists the type before null.
        let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
        Self::Value(match kind {
            Some("boolean") => Kind::Boolean,
            Some("integer") => Kind::Integer,
            Some("number") => Kind::Number,
            Some("array") => match schema["items"]["type"].as_str() {
                Some("integer") => Kind::Integers,
                Some("number") => Kind::Numbers,
                _ => Kind::List,
            },
            _ => Kind::Text,
        })
    }

    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Table(keys) => keys.get(name),
            Self::Value(_) => None,
        }
    }

    /// All values below, by their path.
    pub fn paths(&self) -> Vec<String> {
        fn walk(key: &Key, path: &str, out: &mut Vec<String>) {
            match key {
                Key::Value(_) => out.push(path.to_owned()),
                Key::Table(keys) => {
                    for (name, below) in keys {
                        walk(below, &join(path, name), out);
                    }
                }
            }
        }
        let mut out = Vec::new();
        walk(self, "", &mut out);
        out
    }

    /// The key that was probably meant by `path`, as a whole path: the nearest by edits, if it is near enough to be a
    /// slip, else the same last name in another table.
    pub fn nearest(&self, path: &str) -> Option<String> {
        let mut known = self.paths();
        if let Self::Table(tables) = self {
            known.extend(tables.keys().cloned());
        }
        let near = || {
            let near = known.iter().map(|k| (strsim::osa_distance(k, path), k)).min();
            // One slip for short words, a third of longer ones.
            near.filter(|(distance, _)| *distance <= (path.len() / 3).max(1)).map(|(_, k)| k)
        };
        let (table, last) = path.rsplit_once('.').unwrap_or(("", path));
        let moved = || known.iter().find(|k| k.rsplit('.').next() == Some(last));
        // A key in a table that exists was rather put there by mistake than misspelt.
        let table_exists = known.iter().any(|k| k.rsplit_once('.').is_some_and(|(t, _)| t == table));
        let nearest = if table_exists { moved().or_else(near) } else { near().or_else(moved) };
        nearest.cloned()
    }
}

pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The environment variable of a key.
pub fn variable(path: &str) -> String {
    format!("{}{}", super::load::ENV_PREFIX, path.to_uppercase().replace('-', "_").replace('.', "__"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_found_with_its_type() {
        let root = Key::root();
        let kind = |path: &str| match path.split('.').try_fold(&root, |key, name| key.get(name)) {
            Some(Key::Value(kind)) => *kind,
            other => panic!("{path} is {other:?}"),
        };
        assert_eq!(kind("api.body-limit"), Kind::Text);
        assert_eq!(kind("api.keys"), Kind::List);
        assert_eq!(kind("api.keys-file"), Kind::Text);
        assert_eq!(kind("engine.threads"), Kind::Integer);
        assert_eq!(kind("engine.kind"), Kind::Text);
        assert_eq!(kind("placement.strict-affinity"), Kind::Boolean);
        assert_eq!(kind("placement.load-weight"), Kind::Number);
        assert_eq!(kind("engine.timed.decode-per-step"), Kind::Text);
        assert_eq!(kind("kv.reuse-policy"), Kind::Text);
        assert_eq!(kind("kv.pool-ratio"), Kind::Numbers);
        assert_eq!(kind("kv.snapshot-offsets-from-end"), Kind::Integers);
    }

    #[test]
    fn the_nearest_key_is_named() {
        let root = Key::root();
        assert_eq!(root.nearest("api.body-limt").as_deref(), Some("api.body-limit"));
        assert_eq!(root.nearest("engin").as_deref(), Some("engine"));
        assert_eq!(root.nearest("node.listen").as_deref(), Some("admin.listen"));
        assert_eq!(root.nearest("colour.of-the-bikeshed"), None);
    }
}
