//! The table `[placement]`: the core's own settings, with the schema that the core knows nothing of.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use starling_core::placement;
use std::borrow::Cow;

/// Which rank runs a request. Dereferences to the core's settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Placement(pub placement::Config);

impl std::ops::Deref for Placement {
    type Target = placement::Config;

    fn deref(&self) -> &placement::Config {
        &self.0
    }
}

/// Every key with its description and, for a name, what it may be.
const KEYS: [(&str, &str, &[&str]); 18] = [
    (
        "policy",
        "`balanced`: longest prompt first, to the rank with the fewest tokens. `kv-aware`: weighs a rank's cached prefix \
         against its load. `conversation`: later turns go to the rank that holds their prefix.",
        &["balanced", "kv-aware", "conversation"],
    ),
    ("queue", "Order in which waiting requests are served.", &["fcfs", "priority"]),
    ("count-children", "What a request with children counts on its rank.", &["strict-cap", "vectors", "upstream"]),
    (
        "new-conversations",
        "Where the first turn of a conversation goes.",
        &["round-robin", "least-queued", "least-tokens"],
    ),
    ("conversations-max", "Conversations remembered; the one unused for longest is forgotten first.", &[]),
    ("strict-affinity", "A turn whose rank is full waits for it, up to the bound, instead of going elsewhere.", &[]),
    ("strict-affinity-max-wait-s", "The bound of that wait, in seconds.", &[]),
    ("strict-affinity-max-wait-passes", "The bound where ranks step together, in admission passes.", &[]),
    ("fair-share-multiplier", "A rank takes up to this many times its fair share of a batch.", &[]),
    ("load-weight", "Weight of load against cached prefix in the score of `kv-aware`.", &[]),
    ("match-threshold", "Prefix matches count only if the best exceeds this share of the prompt.", &[]),
    ("cold-start-warmup", "The first requests go to one rank each, so that every rank caches the shared prompt.", &[]),
    ("account-for-in-transfer", "Requests whose KV is still being sent away count as load.", &[]),
    ("balance", "Hold prefill back until the ranks of a group can prefill together.", &[]),
    ("balance-timeout-steps", "Steps for which prefill is held back at most.", &[]),
    ("balance-batching-wait-steps", "Steps to wait for more prefill once all ranks have some.", &[]),
    (
        "balance-min-generation-requests",
        "Below this many generating requests on some rank the low-occupancy timeout applies; 0: never.",
        &[],
    ),
    ("balance-low-occupancy-timeout-steps", "The low-occupancy timeout, in steps.", &[]),
];

impl schemars::JsonSchema for Placement {
    fn schema_name() -> Cow<'static, str> {
        "Placement".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let defaults = json!(placement::Config::default());
        let key = |(name, description, names): (&str, &str, &[&str])| {
            let default = &defaults[name];
            let mut schema = json!({ "description": description, "default": default, "type": type_of(default) });
            if !names.is_empty() {
                schema["enum"] = json!(names);
            }
            (name.to_owned(), schema)
        };
        let properties: Map<String, Value> = KEYS.into_iter().map(key).collect();
        schemars::json_schema!({
            "description": "Which rank runs a request.",
            "type": "object",
            "properties": properties,
            "additionalProperties": false,
        })
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        _ => "string",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_core_is_described() {
        let core = json!(placement::Config::default());
        let mut core: Vec<&str> = core.as_object().unwrap().keys().map(String::as_str).collect();
        let mut described: Vec<&str> = KEYS.iter().map(|(name, ..)| *name).collect();
        core.sort_unstable();
        described.sort_unstable();
        assert_eq!(core, described);
    }

    #[test]
    fn every_name_is_one_that_the_core_reads() {
        for (key, _, names) in KEYS {
            for name in names {
                let given = json!({ key: name });
                let read: placement::Config = serde_json::from_value(given.clone()).unwrap();
                assert_eq!(json!(read)[key], given[key]);
            }
        }
    }
}
