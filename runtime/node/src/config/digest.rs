//! A hash of all settings that decide. Nodes whose hashes differ would come to different decisions, so they refuse each other.

use super::Config;
use serde_json::{Value, json};

/// Hashed in front of everything; another number where the form of what follows changes.
const FORM: &str = "starling settings 1";

/// Keys, or whole tables, that must be the same on every node. What is not here may differ: where a node listens, where its
/// files are, how much of its machine it uses, what its ranks keep for later, what it tells, and bounds that only its own
/// clients meet. `cluster.members` and the model's name are hashed by what they mean, so they are not here either.
const DECIDING: [&str; 15] = [
    "cluster.bootstrap",
    "cluster.lockstep",
    "cluster.name",
    "cluster.suspect-after-ms",
    "engine.arithmetic",
    "engine.block-tokens",
    "engine.context-tokens-max",
    "engine.kind",
    "engine.sequences-max",
    "limits.announced-requests-max",
    "limits.attempts-max",
    "placement",
    "rounds.busy-interval-ms",
    "rounds.heartbeat-ms",
    "rounds.round-interval-ms-min",
];

impl Config {
    /// The same on all nodes that may form one cluster; stable over restarts and machines.
    pub fn settings_digest(&self) -> u64 {
        let settings = json!(self);
        let mut hasher = blake3::Hasher::new();
        let mut add = |name: &str, value: &str| {
            for part in [name, value] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part.as_bytes());
            }
        };
        add("form", FORM);
        for path in DECIDING {
            let value = path.split('.').fold(&settings, |value, name| &value[name]);
            add(path, &canonical(value));
        }
        // The order is the view's. Addresses are not hashed: two nodes may reach a third by different ones.
        for member in &self.cluster.members {
            add("member", &format!("{}/{}", member.name, member.ranks));
        }
        add("model", &self.model.id());
        let hash = hasher.finalize();
        u64::from_le_bytes(std::array::from_fn(|at| hash.as_bytes()[at]))
    }
}

/// JSON with the keys of its objects in order, whatever map the JSON library uses.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> =
                fields.iter().map(|(name, value)| format!("{name:?}:{}", canonical(value))).collect();
            fields.sort_unstable();
            format!("{{{}}}", fields.join(","))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::Key;
    use std::collections::BTreeSet;

    /// Keys that may differ between nodes of one cluster. A new key goes here or into `DECIDING`.
    const LOCAL: [&str; 52] = [
        "admin.listen",
        "api.body-limit",
        "api.keys",
        "api.keys-file",
        "api.listen",
        "api.text-cache",
        "cluster.change-ms-max",
        "cluster.election-ms",
        "cluster.report-after-ms",
        "cluster.stream-wait-s",
        "cluster.suspicion-gather-ms",
        "drain.drain-timeout",
        "engine.draft-tokens-max",
        "engine.kv-memory",
        "engine.step-tokens-max",
        "engine.threads",
        "engine.timed.decode-per-sequence",
        "engine.timed.decode-per-step",
        "engine.timed.prefill-per-token",
        // A rank alone says what can be reused of its blocks; the others ask it.
        "kv.branch-snapshots",
        "kv.conversation-ttl",
        "kv.conversations-max",
        "kv.endpoint-rewind-tokens",
        "kv.match-backoff-tokens",
        "kv.partial-reuse",
        "kv.pool-ratio",
        "kv.resume-utilisation-percent-max",
        "kv.reuse-policy",
        "kv.scope-quota-percent",
        "kv.sequence-tokens",
        "kv.sizing",
        "kv.snapshot-offsets-from-end",
        "kv.snapshot-offsets-from-start",
        "kv.turns-max",
        "limits.announce-wait",
        "limits.backlog-requests-max",
        "limits.backlog-tokens-max",
        "limits.prompt-wait",
        "mesh.authority",
        "mesh.certificate",
        "mesh.key",
        "mesh.lanes",
        "mesh.listen",
        "model.name",
        "model.path",
        "node.name",
        "ranks.count",
        "telemetry.log",
        "telemetry.log-format",
        "telemetry.otlp",
        // Hashed by what they mean; see the tests below.
        "cluster.members",
        "model.id",
    ];

    fn base() -> Value {
        let mut config = Config::default();
        config.model.id = Some("tiny".into());
        config.cluster.members = vec!["node-0=h:1/2".parse().unwrap(), "node-1=h:2/2".parse().unwrap()];
        json!(config)
    }

    fn digest(settings: &Value) -> u64 {
        serde_json::from_value::<Config>(settings.clone()).unwrap().settings_digest()
    }

    fn decides(path: &str) -> bool {
        DECIDING.iter().any(|key| path == *key || path.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Another value of the same type.
    fn other(path: &str, value: &Value) -> Value {
        match (path, value) {
            ("placement.policy", _) => json!("balanced"),
            ("placement.queue", _) => json!("priority"),
            ("placement.count-children", _) => json!("upstream"),
            ("placement.new-conversations", _) => json!("least-tokens"),
            ("engine.kind", _) => json!("timed"),
            ("engine.arithmetic", _) => json!("exact"),
            ("engine.context-tokens-max" | "engine.threads", _) => json!(77),
            ("engine.kv-memory" | "api.body-limit" | "api.text-cache", _) => json!("7MiB"),
            ("telemetry.log-format", _) => json!("json"),
            ("kv.reuse-policy", _) => json!("per-request"),
            ("kv.sizing", _) => json!("typical-step"),
            ("kv.conversation-ttl", _) => json!("7s"),
            ("kv.scope-quota-percent" | "kv.sequence-tokens", _) => json!(77),
            ("kv.pool-ratio", _) => json!([0.25, 0.75]),
            ("kv.snapshot-offsets-from-start" | "kv.snapshot-offsets-from-end", _) => json!([7]),
            (_, Value::Bool(on)) => json!(!on),
            (_, Value::Number(n)) if n.is_f64() => json!(n.as_f64().unwrap() + 0.25),
            (_, Value::Number(n)) => json!(n.as_u64().unwrap() + 1),
            (_, Value::Array(_)) => json!(["other"]),
            (path, _) if path.ends_with(".listen") => json!("127.0.0.1:7"),
            (path, Value::String(_))
                if path.ends_with("-wait") || path.contains("-per-") || path.ends_with("timeout") =>
            {
                json!("7s")
            }
            _ => json!("other"),
        }
    }

    #[test]
    fn every_key_is_either_hashed_or_may_differ() {
        let all: BTreeSet<String> = Key::root().paths().into_iter().collect();
        let local: BTreeSet<String> = LOCAL.iter().map(|path| (*path).to_owned()).collect();
        let hashed: BTreeSet<String> = all.iter().filter(|path| decides(path)).cloned().collect();
        assert_eq!(&hashed | &local, all, "classify the key that is on one side only");
        assert!(hashed.is_disjoint(&local));
        for key in DECIDING {
            assert!(hashed.iter().any(|path| path.starts_with(key)), "{key} is no key");
        }
    }

    #[test]
    fn the_hash_follows_the_keys_that_decide_and_no_others() {
        let base = base();
        for path in Key::root().paths().iter().filter(|path| !["cluster.members", "model.id"].contains(&path.as_str()))
        {
            let mut changed = base.clone();
            let value = path.split('.').fold(&mut changed, |value, name| &mut value[name]);
            let before = value.clone();
            *value = other(path, &before);
            assert_ne!(*value, before, "{path}");
            assert_eq!(digest(&changed) != digest(&base), decides(path), "{path}");
        }
    }

    #[test]
    fn members_are_hashed_by_name_ranks_and_order_and_the_model_by_what_clients_call_it() {
        let base = base();
        let with = |members: Value| {
            let mut changed = base.clone();
            changed["cluster"]["members"] = members;
            digest(&changed)
        };
        let same = digest(&base);
        assert_eq!(with(json!(["node-0=elsewhere:9/2", "node-1=h:2/2"])), same, "an address decides nothing");
        for other in [
            json!(["node-1=h:2/2", "node-0=h:1/2"]),
            json!(["node-0=h:1/2"]),
            json!(["node-0=h:1/1", "node-1=h:2/2"]),
            json!(["node-0=h:1/2", "node-2=h:2/2"]),
        ] {
            assert_ne!(with(other.clone()), same, "{other}");
        }
        let mut by_path = base.clone();
        (by_path["model"]["id"], by_path["model"]["path"]) = (Value::Null, json!("/models/tiny.gguf"));
        assert_eq!(digest(&by_path), same);
        by_path["model"]["path"] = json!("/models/large.gguf");
        assert_ne!(digest(&by_path), same);
    }

    /// Only a key that is new among those that decide, another default or another form may change this number.
    #[test]
    fn the_hash_is_the_same_in_every_build() {
        assert_eq!(digest(&base()), 0x7502_5e9d_cca9_1a16);
    }
}
