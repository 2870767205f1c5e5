use super::*;
use crate::cli::{Command as Any, parse};
use serde_json::{Value, json};
use starling_gpu::testing::TinyModel;
use std::ffi::OsString;
use std::num::NonZeroU32;

const EXAMPLE: &str = r#"{"life_cycles": [
    {"kind": "full", "slot_bytes": 1572864},
    {"kind": "window", "window": 128, "slot_bytes": 2097152},
    {"kind": "window", "window": 128, "policy": "private", "slot_bytes": 524288}]}"#;
const EXAMPLE_LOAD: &str = "--block-tokens 128 --turns 5 --sequence-tokens 65536 --requests 64 --step-tokens 8192 \
    --draft-tokens 3 --end-points 1";

fn planned(words: &str) -> Result<String, PlanRunError> {
    let words = ["starling", "plan"].into_iter().chain(words.split_whitespace());
    let Any::Plan(command) = parse(words.map(OsString::from)).expect("a right command line").command else {
        panic!("another command");
    };
    let mut out = Vec::new();
    run(&command, &mut out)?;
    Ok(String::from_utf8(out).expect("text"))
}

fn described(text: &str, words: &str) -> Result<String, PlanRunError> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("life-cycles.json");
    std::fs::write(&file, text).expect("a scratch file");
    let out = planned(&format!("--life-cycles {} {words}", file.display()))?;
    Ok(out.replace(&file.display().to_string(), "FILE"))
}

fn json_of(text: &str, words: &str) -> Value {
    serde_json::from_str(&described(text, &format!("{words} --json")).expect("a plan")).expect("JSON")
}

#[test]
fn the_balanced_row_of_the_worked_example_comes_out() {
    let found = json_of(EXAMPLE, &format!("{EXAMPLE_LOAD} --device-bytes 64GiB"));
    let device = &found["tiers"][0];
    assert_eq!([0, 1, 2].map(|pool| device["pools"][pool]["slots"].as_u64()), [Some(42_274), Some(1014), Some(190)]);
    assert_eq!(format!("{:.1}", device["conversations"].as_f64().expect("a number")), "82.4");
    assert_eq!(device["pools"][0]["holds"], json!({ "count": 42_274 * 128, "what": "tokens" }));
    assert_eq!(device["pools"][1]["holds"], json!({ "count": 507, "what": "end points" }));
    assert_eq!(device["pools"][2]["conversations"], Value::Null);
    assert_eq!((&found["bottleneck_pool"], &found["warnings"]), (&Value::Null, &json!([])));
    let typical = json_of(EXAMPLE, &format!("{EXAMPLE_LOAD} --device-bytes 64GiB --method typical"));
    assert_eq!(typical["tiers"][0]["pools"][1]["slots"], 256);
    assert_eq!(typical["bottleneck_pool"], 1);
}

#[test]
fn a_plan_is_a_table_and_says_which_pool_is_full_first() {
    let balanced =
        described(EXAMPLE, &format!("{EXAMPLE_LOAD} --device-bytes 64GiB --host-bytes 128GiB")).expect("a plan");
    let expected = "\
FILE: conversations of 65536 tokens, 5 turns kept with 1 end points each; 64 requests at a time
pool  layers  keeps            policy    slot       a conversation
0     -       all tokens       required  1.5 MiB    512 slots
1     -       last 128 tokens  required  2.0 MiB    10 slots
2     -       last 128 tokens  private   512.0 KiB  0 slots

tier    pool  slots  holds            conversations  bytes
device  0     42274  5411072 tokens   82.4           61.9 GiB
device  1     1014   507 end points   82.4           2.0 GiB
device  2     190    190 pages        -              95.0 MiB
host    0     84955  10874240 tokens  165.9          124.4 GiB
host    1     1787   893 end points   165.9          3.5 GiB
host    2     128    128 pages        -              64.0 MiB

device: 82.4 conversations, 64.0 GiB of 64.0 GiB used
host: 165.9 conversations, 128.0 GiB of 128.0 GiB used
bottleneck: none, all pools are full at 248.3 conversations
";
    assert_eq!(balanced, expected);
    let ratio = format!("{EXAMPLE_LOAD} --device-bytes 64GiB --pool-ratio 0.9,0.05,0.05");
    let found = described(EXAMPLE, &ratio).expect("a plan");
    assert!(found.contains("bottleneck: pool 0, full at 76.7 conversations"), "{found}");
}

#[test]
fn a_model_is_planned_by_its_layers_and_without_its_weights() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("tiny.gguf");
    let tiny = TinyModel { family: starling_gpu::llama::Family::Gemma3, layers: 7, ..TinyModel::default() };
    tiny.write(&file).expect("a model file");
    let words = format!("{} --device-bytes 64MiB --turns 3 --sequence-tokens 64 --requests 2 --json", file.display());
    let found: Value = serde_json::from_str(&planned(&words).expect("a plan")).expect("JSON");
    let pools = found["pools"].as_array().expect("a list");
    assert_eq!(pools.len(), 2);
    let layers = |pool: usize| pools[pool]["life_cycles"][0]["layers"].as_array().map_or(0, Vec::len) as u64;
    assert_eq!(layers(0) + layers(1), 7);
    let slot = |pool: usize| pools[pool]["slot_bytes"][0].as_u64().expect("a number");
    // A layer takes the same in each pool.
    assert_eq!(slot(0) * layers(1), slot(1) * layers(0));
    assert!(found["conversations"].as_f64().is_some_and(|holds| holds > 2.0), "{found}");
    let missing = planned("no-such-model.gguf --device-bytes 1GiB").expect_err("it is not there");
    assert!(missing.to_string().contains("no-such-model.gguf"), "{missing}");
    assert_eq!(Exit::from(&missing), Exit::Unavailable);
}

#[test]
fn what_cannot_be_is_named() {
    let refused = |text: &str, words: &str| {
        let error = described(text, &format!("--device-bytes 1GiB {words}")).expect_err("it is refused");
        (error.to_string(), Exit::from(&error))
    };
    let ends = |(text, exit): (String, Exit), with: &str, code: Exit| {
        assert!(text.ends_with(with) && exit == code, "{text} {exit:?}");
    };
    ends(refused(EXAMPLE, "--requests 0"), "requests is 0 (it must be above 0)", Exit::Usage);
    ends(refused(EXAMPLE, "--pool-ratio 0.5,0.5"), "pool_ratio has 2 numbers, there are 3 life cycles", Exit::Usage);
    ends(
        refused(EXAMPLE, "--pool-ratio 0.5,0.5,1"),
        "pool_ratio is 2 (in sum; the shares must add up to 1)",
        Exit::Usage,
    );
    let window = r#"{"life_cycles": [{"kind": "window", "slot_bytes": 1}]}"#;
    ends(refused(window, ""), "life_cycles[0]: a window has no `window`", Exit::Config);
    let full = r#"{"life_cycles": [{"kind": "full", "window": 5, "slot_bytes": 1}]}"#;
    ends(refused(full, ""), "`window` and `sink_tokens` go with the kind window only", Exit::Config);
    let gap = r#"{"life_cycles": [{"kind": "full", "slot_bytes": 1, "group": 1}]}"#;
    ends(refused(gap, ""), "group 0 has no life cycle (groups count from 0)", Exit::Config);
    let shared =
        r#"{"life_cycles": [{"kind": "full", "slot_bytes": 1}, {"kind": "full", "slot_bytes": 2, "group": 0}]}"#;
    ends(refused(shared, ""), "slot_bytes are [2] (others of group 0 have other ones)", Exit::Config);
    assert!(refused(r#"{"life_cycles": [], "x": 1}"#, "").0.contains("unknown field `x`"));
    let states = r#"{"life_cycles": [{"kind": "state", "slot_bytes": 1073741824}]}"#;
    ends(refused(states, "--requests 2"), "(2147483648 bytes)", Exit::Failed);
}

#[test]
fn the_format_that_help_shows_can_be_read() {
    let help = crate::cli::plan::EXAMPLES;
    let (from, to) = (help.find('{').expect("an object"), help.rfind("}}").expect("its end") + 2);
    let (pooled, snapshots) = described::parse(&help[from..to], NonZeroU32::MIN).expect("the format");
    assert_eq!((pooled.len(), snapshots.from_end, sizes(&pooled)[2].len()), (3, vec![0], 2));
}
