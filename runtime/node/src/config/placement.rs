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

/// Published names and the keys they stand for. A switch that names a policy indirectly stands for itself: the core turns it
/// into a policy.
const PUBLISHED: [(&str, &str); 17] = [
    ("enable_kv_cache_aware_routing", SWITCHES[0]),
    ("kv_cache_routing_conversation_affinity", SWITCHES[1]),
    ("kv_cache_routing_new_conv_placement", "new-conversations"),
    ("kv_cache_routing_max_sessions", "conversations-max"),
    ("kv_cache_routing_strict_conversation_affinity", "strict-affinity"),
    ("kv_cache_routing_strict_affinity_max_wait_iters", "strict-affinity-max-wait-passes"),
    ("strict_affinity_max_wait", "strict-affinity-max-wait-s"),
    ("kv_cache_routing_fair_share_multiplier", "fair-share-multiplier"),
    ("kv_cache_routing_load_balance_weight", "load-weight"),
    ("kv_cache_routing_match_rate_threshold", "match-threshold"),
    ("kv_cache_routing_cold_start_warmup", "cold-start-warmup"),
    ("kv_cache_routing_account_for_in_transfer", "account-for-in-transfer"),
    ("enable_balance", "balance"),
    ("timeout_iters", "balance-timeout-steps"),
    ("batching_wait_iters", "balance-batching-wait-steps"),
    ("min_generation_requests", "balance-min-generation-requests"),
    ("low_occupancy_timeout_iters", "balance-low-occupancy-timeout-steps"),
];

/// Published booleans that are no key of ours.
pub const SWITCHES: [&str; 2] = ["enable_kv_cache_aware_routing", "kv_cache_routing_conversation_affinity"];

/// The key that a published name stands for, written with `_` or, as environment variables end up, with `-`.
pub fn of_published(name: &str) -> Option<&'static str> {
    let name = name.replace('-', "_");
    PUBLISHED.iter().find(|(published, _)| *published == name).map(|(_, ours)| *ours)
}

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
    fn a_published_name_means_to_the_core_what_it_means_here() {
        let read =
            |key: &str, value: &Value| serde_json::from_value::<placement::Config>(json!({ key: value })).unwrap();
        let defaults = json!(placement::Config::default());
        for (published, ours) in PUBLISHED.iter().filter(|(_, ours)| !SWITCHES.contains(ours)) {
            let other = match &defaults[ours] {
                Value::Bool(on) => json!(!on),
                Value::String(_) => json!("round-robin"),
                _ => json!(7),
            };
            let config = read(ours, &other);
            assert_ne!(json!(config), defaults, "{ours}");
            // The core knows one name of its own spelling; all others are spelt as published.
            let name = if *published == "strict_affinity_max_wait" { "strict-affinity-max-wait" } else { published };
            assert_eq!(read(name, &other), config, "{published}");
        }
        for switch in SWITCHES {
            assert_eq!(of_published(switch), Some(switch));
            assert!(!KEYS.iter().any(|(key, ..)| *key == switch));
        }
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
