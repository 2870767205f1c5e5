use super::*;
use serde_json::json;

fn chat(change: Value) -> Result<GenerationRequest, ApiError> {
    GenerationRequest::chat(&merged(json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}), change))
}

fn completion(change: Value) -> Result<GenerationRequest, ApiError> {
    GenerationRequest::completion(&merged(json!({"model": "m", "prompt": "hi"}), change))
}

fn merged(base: Value, change: Value) -> Map<String, Value> {
    let (Value::Object(mut base), Value::Object(change)) = (base, change) else {
        panic!("both are objects");
    };
    base.extend(change);
    base
}

/// The field and the words of a refusal.
fn refusal(read: Result<GenerationRequest, ApiError>) -> (String, String) {
    let error = read.expect_err("must be refused");
    assert_eq!(error.row().status, 400);
    (error.param().expect("names the field").to_owned(), error.to_string())
}

#[test]
fn what_is_left_out_has_the_documented_defaults() {
    let asked = chat(json!({})).unwrap();
    assert_eq!((asked.temperature, asked.top_p, asked.top_k, asked.seed), (1.0, 1.0, 0, None));
    assert_eq!((asked.max_tokens, asked.stream, asked.ignore_eos), (None, false, false));
    assert_eq!(completion(json!({})).unwrap().max_tokens, Some(16));
}

#[test]
fn fields_of_the_wrong_kind_or_range_are_named_with_their_value() {
    let cases = [
        (json!({"max_tokens": -1}), "max_tokens", "-1"),
        (json!({"max_tokens": 0}), "max_tokens", "not 0"),
        (json!({"max_tokens": 1.5}), "max_tokens", "1.5"),
        (json!({"max_tokens": 1e30}), "max_tokens", "1e+30"),
        (json!({"max_tokens": 99_999_999_999u64}), "max_tokens", "99999999999"),
        (json!({"max_tokens": "5"}), "max_tokens", "\"5\""),
        (json!({"max_tokens": [5]}), "max_tokens", "an array"),
        (json!({"temperature": 9}), "temperature", "0 to 2, not 9"),
        (json!({"temperature": -0.1}), "temperature", "-0.1"),
        (json!({"temperature": "NaN"}), "temperature", "\"NaN\""),
        (json!({"temperature": {}}), "temperature", "an object"),
        (json!({"top_p": 0}), "top_p", "not 0"),
        (json!({"top_p": 1.01}), "top_p", "1.01"),
        (json!({"top_k": -2}), "top_k", "-2"),
        (json!({"seed": 1.5}), "seed", "1.5"),
        (json!({"seed": "x"}), "seed", "\"x\""),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop", "5 strings"),
        (json!({"stop": ""}), "stop", "empty"),
        (json!({"stop": [1]}), "stop", "not 1"),
        (json!({"stop": {"a": 1}}), "stop", "an object"),
        (json!({"stop": "x".repeat(1_025)}), "stop", "1025 bytes"),
        (json!({"stream": "yes"}), "stream", "\"yes\""),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "stream"),
        (json!({"stream": true, "stream_options": []}), "stream_options", "an array"),
        (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage", "1"),
        (json!({"stream": true, "stream_options": {"odd": 1}}), "stream_options.odd", "unknown"),
        (json!({"ignore_eos": 1}), "ignore_eos", "1"),
        (json!({"prompt_cache_key": 7}), "prompt_cache_key", "7"),
        (json!({"model": 7}), "model", "7"),
        (json!({"model": null}), "model", "missing"),
        (json!({"odd": null}), "odd", "unknown field"),
        (json!({"min_tokens": -1}), "min_tokens", "-1"),
        (json!({"min_tokens": 6, "max_tokens": 5}), "min_tokens", "0 to 5, not 6"),
        (json!({"min_tokens": 1.5}), "min_tokens", "1.5"),
        (json!({"n": 0}), "n", "1 to 128, not 0"),
        (json!({"n": 129}), "n", "1 to 128, not 129"),
        (json!({"n": 1e30}), "n", "1e+30"),
        (json!({"n": "1"}), "n", "\"1\""),
        (json!({"min_p": 1.01}), "min_p", "0 to 1, not 1.01"),
        (json!({"min_p": -0.1}), "min_p", "-0.1"),
        (json!({"min_p": "NaN"}), "min_p", "\"NaN\""),
        (json!({"repetition_penalty": 0}), "repetition_penalty", "0.01 to 100, not 0"),
        (json!({"repetition_penalty": -1}), "repetition_penalty", "-1"),
        (json!({"repetition_penalty": 1e300}), "repetition_penalty", "not 1000"),
        (json!({"presence_penalty": 2.5}), "presence_penalty", "-2 to 2, not 2.5"),
        (json!({"frequency_penalty": -2.5}), "frequency_penalty", "-2.5"),
        (json!({"frequency_penalty": [1]}), "frequency_penalty", "an array"),
        (json!({"logit_bias": [1]}), "logit_bias", "an array"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "\"x\""),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias", "\"-1\""),
        (json!({"logit_bias": {"05": 1}}), "logit_bias", "\"05\""),
        (json!({"logit_bias": {"5": 100.5}}), "logit_bias.5", "-100 to 100, not 100.5"),
        (json!({"logit_bias": {"5": null}}), "logit_bias.5", "missing"),
        (json!({"logit_bias": {"5": "1"}}), "logit_bias.5", "\"1\""),
        (
            json!({"logit_bias": (0..301).map(|t| (t.to_string(), json!(1))).collect::<Map<_, _>>()}),
            "logit_bias",
            "301",
        ),
        (json!({"response_format": {"type": "json_object"}}), "response_format", "text"),
    ];
    for (change, param, words) in cases {
        for read in [chat(change.clone()), completion(change.clone())] {
            let (named, message) = refusal(read);
            assert_eq!(named, param, "{change}");
            assert!(message.contains(words) && message.starts_with(param), "{message}");
        }
    }
}

#[test]
fn fields_of_one_endpoint_only() {
    let chat_only = [
        (json!({"messages": []}), "messages"),
        (json!({"messages": {}}), "messages"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": ["hi"]}), "messages[0]"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "boss", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "x", "odd": 1}]}), "messages[0].odd"),
        (json!({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}), "messages[0].tool_calls"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}), "messages[0].content[0].text"),
        (json!({"messages": [{"role": "user", "content": ["x"]}]}), "messages[0].content[0]"),
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs"),
        (json!({"best_of": 1}), "best_of"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens"),
        (json!({"prompt": "x"}), "prompt"),
    ];
    for (change, param) in chat_only {
        assert_eq!(refusal(chat(change.clone())).0, param, "{change}");
    }
    let completion_only = [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"prompt": [true]}), "prompt"),
        (json!({"prompt": [1, -1]}), "prompt[1]"),
        (json!({"prompt": [1, 1.5]}), "prompt[1]"),
        (json!({"prompt": [4_294_967_296u64]}), "prompt[0]"),
        (json!({"echo": true}), "echo"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"top_logprobs": 1}), "top_logprobs"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"max_completion_tokens": 5}), "max_completion_tokens"),
    ];
    for (change, param) in completion_only {
        assert_eq!(refusal(completion(change.clone())).0, param, "{change}");
    }
}

#[test]
fn values_that_change_nothing_are_taken() {
    let neutral = json!({
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": false, "top_logprobs": null,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"], "audio": null,
        "user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "safety_identifier": "s",
        "temperature": null, "stop": null, "seed": null, "max_tokens": null, "stream_options": null,
    });
    chat(neutral).unwrap();
    completion(json!({"echo": false, "best_of": 1, "suffix": "", "n": 1, "user": "u", "logprobs": null})).unwrap();
    let repeated = json!({"role": "assistant", "content": "x", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "tool_calls": null});
    chat(json!({"messages": [repeated]})).unwrap();
}

#[test]
fn values_at_their_bounds_are_taken() {
    let asked = chat(json!({"temperature": 2, "top_p": 1, "top_k": -1, "seed": -1, "max_tokens": 1,
        "max_completion_tokens": 1, "stop": ["a", "b", "c", "d"]}))
    .unwrap();
    assert_eq!((asked.temperature, asked.top_k, asked.seed, asked.max_tokens), (2.0, 0, Some(u64::MAX), Some(1)));
    assert_eq!(chat(json!({"seed": u64::MAX})).unwrap().seed, Some(u64::MAX));
    assert_eq!(chat(json!({"stop": "a"})).unwrap().stops, StopStrings::new(vec!["a".into()]));
}

#[test]
fn what_changes_logits_and_what_is_told_of_tokens_is_read() {
    let all = json!({"min_p": 1, "repetition_penalty": 0.01, "presence_penalty": 2, "frequency_penalty": -2, "n": 128,
        "logit_bias": {"5": -100, "0": 100}});
    for asked in [chat(all.clone()).unwrap(), completion(all).unwrap()] {
        let mut adjustment = asked.adjustment;
        adjustment.logit_bias.sort_by_key(|(token, _)| *token);
        let logit_bias = vec![(0, 100.0), (5, -100.0)];
        let expected =
            Adjustment { repetition_penalty: 0.01, presence_penalty: 2.0, frequency_penalty: -2.0, logit_bias };
        assert_eq!((asked.min_p, adjustment, asked.choices, asked.logprobs), (1.0, expected, 128, None));
    }
    let told = |logprobs: Value, top: Value| chat(json!({"logprobs": logprobs, "top_logprobs": top})).unwrap().logprobs;
    assert_eq!(told(json!(true), json!(null)), Some(0));
    assert_eq!(told(json!(true), json!(20)), Some(20));
    assert_eq!(told(json!(false), json!(0)), None);
    assert_eq!(completion(json!({"logprobs": 0})).unwrap().logprobs, Some(0));
    assert_eq!(completion(json!({"logprobs": 20})).unwrap().logprobs, Some(20));
    assert_eq!(completion(json!({"n": 3, "best_of": 3})).unwrap().choices, 3);
}

#[test]
fn prompts_come_in_four_forms() {
    let prompt = |value| completion(json!({"prompt": value})).unwrap().prompt;
    assert_eq!(prompt(json!("a")), Prompt::Text("a".into()));
    assert_eq!(prompt(json!(["a"])), Prompt::Text("a".into()));
    assert_eq!(prompt(json!([1, 2])), Prompt::Tokens(vec![1, 2]));
    assert_eq!(prompt(json!([[1, 2]])), Prompt::Tokens(vec![1, 2]));
}

#[test]
fn parts_of_a_message_become_lines() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let asked = chat(json!({"messages": [{"role": "user", "content": parts}]})).unwrap();
    let Prompt::Messages(messages) = asked.prompt else { panic!("a chat has messages") };
    assert_eq!(messages[0].content, "a\nb");
}

#[test]
fn every_field_is_in_the_documentation() {
    let documentation = include_str!("../../../docs/api.md");
    for rules in [&CHAT, &COMPLETION, &STREAM_OPTIONS, &MESSAGE, &PART] {
        let neutral = rules.neutral.iter().map(|(name, _)| name);
        for name in rules.honoured.iter().chain(rules.tolerated).chain(neutral) {
            assert!(documentation.contains(&format!("`{name}`")), "{name} is not in docs/api.md");
        }
    }
}
