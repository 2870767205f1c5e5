//! Several choices for one prompt, and what is told of their tokens.

use crate::script::{Fate, Request, Scored, Server, chat_body, chunks_of, completion_body, events_of, json_of};
use serde_json::{Value, json};
use starling_core::rejection::Rejection;
use starling_core::request::{Adjustment, Finish};
use starling_serving::api::StreamEvent;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// All of the choices, the first of which has said `a`: the others are submitted behind its first token.
async fn submitted(server: &mut Server, count: usize) -> Vec<Request> {
    let first = server.next().await;
    first.place();
    first.say(b"a");
    let mut requests = vec![first];
    while requests.len() < count {
        requests.push(server.next().await);
    }
    requests[1..].iter().for_each(Request::place);
    requests
}

/// The pieces of one choice of a stream.
fn of_choice(chunks: &[Value], index: u32) -> Vec<&Value> {
    chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).filter(|choice| choice["index"] == index).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_are_children_of_one_prompt_seed_and_conversation() {
    let mut server = Server::start().await;
    let asked = server.post_soon(CHAT, chat_body(json!({"n": 3, "seed": 9})));
    let first = server.next().await;
    assert!(server.is_quiet(), "the others wait until the first has computed the prompt");
    first.place();
    first.say(b"a");
    let requests = [first, server.next().await, server.next().await];
    let first = &requests[0].submission;
    for (child, request) in requests.iter().enumerate() {
        let submission = &request.submission;
        assert_eq!((submission.child as usize, &submission.prompt), (child, &first.prompt));
        assert_eq!(submission.generation, first.generation);
        assert_eq!(submission.generation.sampling.seed, 9);
        assert!(submission.conversation.is_some() && submission.conversation == first.conversation);
    }
    for (request, (text, finish)) in
        requests.iter().zip([("b", Finish::Stop), ("cd", Finish::Length), ("e", Finish::Stop)])
    {
        request.say(text.as_bytes());
        request.end(finish);
    }
    let body = json_of(asked.await.unwrap()).await;
    let told: Vec<_> = (0..3)
        .map(|at| {
            let choice = &body["choices"][at];
            (choice["index"].clone(), choice["message"]["content"].clone(), choice["finish_reason"].clone())
        })
        .collect();
    let expected = [(0, "ab", "stop"), (1, "cd", "length"), (2, "e", "stop")];
    assert_eq!(told, expected.map(|(index, text, reason)| (json!(index), json!(text), json!(reason))));
    let prompt_tokens = requests[0].submission.prompt.len();
    assert_eq!(body["usage"]["prompt_tokens"], prompt_tokens, "counted once");
    assert_eq!(body["usage"]["completion_tokens"], 5);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    let usages = server.usages();
    assert_eq!(usages.len(), 1);
    assert_eq!((usages[0].prompt_tokens as usize, usages[0].finish), (prompt_tokens, Some(Finish::Length)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_choice_alone_is_the_first_of_several() {
    let mut server = Server::start().await;
    let mut generations = Vec::new();
    for n in [json!(null), json!(1), json!(2)] {
        let asked = server.post_soon(COMPLETIONS, completion_body(json!({"n": n, "seed": 4, "best_of": n})));
        let first = server.next().await;
        first.place();
        first.stop();
        assert_eq!(first.submission.child, 0);
        generations.push(first.submission.generation.clone());
        if n == 2 {
            server.next().await.stop();
        }
        asked.await.unwrap();
    }
    assert!(generations.iter().all(|generation| *generation == generations[0]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_choices_interleave_under_their_index() {
    let mut server = Server::start().await;
    let stream = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    for (path, body) in [(CHAT, chat_body(stream.clone())), (COMPLETIONS, completion_body(stream))] {
        let asked = server.post_soon(path, body);
        let requests = submitted(&mut server, 2).await;
        requests[1].say(b"x");
        requests[0].say(b"b");
        requests[1].end(Finish::Length);
        requests[0].stop();
        let events = events_of(asked.await.unwrap()).await;
        assert_eq!(events.last().unwrap(), "[DONE]");
        let chunks = chunks_of(&events);
        for (index, text, reason) in [(0, "ab", "stop"), (1, "x", "length")] {
            let pieces = of_choice(&chunks, index);
            if path == CHAT {
                assert_eq!(pieces[0]["delta"], json!({"role": "assistant", "content": ""}));
            }
            let said =
                |piece: &&Value| piece["delta"]["content"].as_str().or(piece["text"].as_str()).map(str::to_owned);
            assert_eq!(pieces.iter().filter_map(said).collect::<String>(), text, "{path}");
            assert_eq!(pieces.last().unwrap()["finish_reason"], reason);
            assert!(pieces[..pieces.len() - 1].iter().all(|piece| piece["finish_reason"].is_null()));
        }
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], 4, "a, b, the end token, and x");
        assert_eq!(usage["prompt_tokens"], requests[0].submission.prompt.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_its_choice_and_no_other() {
    let mut server = Server::start().await;
    let asked = server.post_soon(COMPLETIONS, completion_body(json!({"n": 2, "stop": "."})));
    let requests = submitted(&mut server, 2).await;
    requests[0].say(b".more");
    requests[1].say(b"one");
    requests[1].say(b"two");
    requests[1].end(Finish::Length);
    let body = json_of(asked.await.unwrap()).await;
    assert_eq!((&body["choices"][0]["text"], &body["choices"][1]["text"]), (&json!("a"), &json!("onetwo")));
    let fates = requests.into_iter().map(|request| request.fate);
    let mut told = Vec::new();
    for fate in fates {
        told.push(fate.await.unwrap());
    }
    assert_eq!(told, [Fate::Finished, Fate::Read]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_cancels_every_choice() {
    let mut server = Server::start().await;
    for stream in [false, true] {
        let asked = server.post_soon(CHAT, chat_body(json!({"n": 3, "stream": stream})));
        let requests = submitted(&mut server, 3).await;
        match stream {
            false => asked.abort(),
            true => drop(asked.await.unwrap()),
        }
        for request in requests {
            assert_eq!(request.fate.await.unwrap(), Fate::Cancelled);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_choice_that_fails_fails_the_request_and_cancels_the_others() {
    let mut server = Server::start().await;
    let asked = server.post_soon(CHAT, chat_body(json!({"n": 3})));
    let requests = submitted(&mut server, 3).await;
    requests[1].send(StreamEvent::Failed(Rejection::RankFailed));
    let response = asked.await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(json_of(response).await["error"]["code"], "rank_failed");
    let mut requests = requests.into_iter();
    assert_eq!(requests.next().unwrap().fate.await.unwrap(), Fate::Cancelled);
    assert_eq!(requests.nth(1).unwrap().fate.await.unwrap(), Fate::Cancelled);
    // One that is refused when it follows the first.
    let asked = server.post_soon(CHAT, chat_body(json!({"n": 2, "stream": true})));
    let first = server.next().await;
    first.place();
    let response = asked.await.unwrap();
    server.refuse(Rejection::Draining);
    first.say(b"a");
    let events = events_of(response).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "draining");
    assert_eq!(first.fate.await.unwrap(), Fate::Cancelled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_of_the_rank_names_the_parameter() {
    let mut server = Server::start().await;
    let asked = server.post_soon(CHAT, chat_body(json!({})));
    let refusal = Rejection::bad(starling_core::rejection::Parameter::MinP, f32::NAN);
    server.next().await.send(StreamEvent::Failed(refusal));
    let response = asked.await.unwrap();
    assert_eq!(response.status(), 400);
    let error = &json_of(response).await["error"];
    assert_eq!((&error["param"], &error["message"]), (&json!("min_p"), &json!("min_p cannot be NaN")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_about_sampling_reaches_the_engine() {
    let mut server = Server::start().await;
    let all = json!({"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2,
        "logit_bias": {"7": -100, "257": 0.5}});
    for (path, body) in [(CHAT, chat_body(all.clone())), (COMPLETIONS, completion_body(all))] {
        let asked = server.post_soon(path, body);
        let request = server.next().await;
        let sampling = &request.submission.generation.sampling;
        assert_eq!(sampling.min_p, 0.25);
        let mut adjustment = Adjustment::clone(sampling.adjustment.as_ref().unwrap());
        adjustment.logit_bias.sort_by_key(|(token, _)| *token);
        let expected = Adjustment {
            repetition_penalty: 1.5,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(7, -100.0), (257, 0.5)],
        };
        assert_eq!(adjustment, expected);
        request.place();
        request.stop();
        asked.await.unwrap();
    }
    let neutral = json!({"repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "logprobs": null});
    let asked = server.post_soon(CHAT, chat_body(neutral));
    let request = server.next().await;
    assert_eq!(request.submission.generation.sampling.adjustment, None);
    request.place();
    request.stop();
    asked.await.unwrap();
}

/// What the engine says in the tests of logprobs.
const SCORED: [Scored<'_>; 2] =
    [(b'h', -0.5, &[(b'h', -0.5), (b'j', -1.5)]), (b'i', -2.0, &[(b'o', -0.25), (b'a', -1.75)])];

fn chat_token(token: &str, logprob: f32) -> Value {
    json!({"token": token, "logprob": logprob, "bytes": token.as_bytes()})
}

fn chat_scores() -> Value {
    let with = |mut token: Value, top: [(&str, f32); 2]| {
        token["top_logprobs"] = json!(top.map(|(token, logprob)| chat_token(token, logprob)));
        token
    };
    json!([
        with(chat_token("h", -0.5), [("h", -0.5), ("j", -1.5)]),
        with(chat_token("i", -2.0), [("o", -0.25), ("a", -1.75)]),
    ])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_tells_logprobs_in_openais_shape() {
    let mut server = Server::start().await;
    for stream in [false, true] {
        let asked = server.post_soon(CHAT, chat_body(json!({"logprobs": true, "top_logprobs": 2, "stream": stream})));
        let request = server.next().await;
        assert_eq!(request.submission.generation.sampling.top_logprobs, 2);
        request.place();
        request.score(&SCORED[..1]);
        request.score(&SCORED[1..]);
        // The end token is no part of the answer.
        request.stop();
        let response = asked.await.unwrap();
        if stream {
            let chunks = chunks_of(&events_of(response).await);
            let told: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["logprobs"]).collect();
            assert!(told[0].is_null() && told[3].is_null(), "the role and the end have none");
            for at in 0..2 {
                assert_eq!(told[at + 1], &json!({"content": [chat_scores()[at]], "refusal": null}));
            }
        } else {
            let body = json_of(response).await;
            assert_eq!(body["choices"][0]["logprobs"], json!({"content": chat_scores(), "refusal": null}));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_tells_logprobs_in_openais_shape() {
    let mut server = Server::start().await;
    for stream in [false, true] {
        let asked = server.post_soon(COMPLETIONS, completion_body(json!({"logprobs": 2, "stream": stream})));
        let request = server.next().await;
        request.place();
        request.score(&SCORED[..1]);
        request.score(&SCORED[1..]);
        request.stop();
        let expected = |from: usize, to: usize| {
            let lists = [json!(["h", "i"]), json!([-0.5, -2.0]), json!([0, 1])];
            let [tokens, logprobs, offsets] = lists.map(|list| json!(list.as_array().unwrap()[from..to]));
            let top = [json!({"h": -0.5, "j": -1.5}), json!({"o": -0.25, "a": -1.75, "i": -2.0})];
            json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top[from..to], "text_offset": offsets})
        };
        let response = asked.await.unwrap();
        if stream {
            let chunks = chunks_of(&events_of(response).await);
            let told: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["logprobs"]).collect();
            assert_eq!(told, [&expected(0, 1), &expected(1, 2), &Value::Null]);
        } else {
            assert_eq!(json_of(response).await["choices"][0]["logprobs"], expected(0, 2));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_without_top_tell_of_the_token_alone() {
    let mut server = Server::start().await;
    let asked = server.post_soon(CHAT, chat_body(json!({"logprobs": true})));
    let request = server.next().await;
    assert_eq!(request.submission.generation.sampling.top_logprobs, 0);
    request.place();
    request.say(b"a");
    request.stop();
    let content = &json_of(asked.await.unwrap()).await["choices"][0]["logprobs"]["content"];
    assert_eq!(content, &json!([{"token": "a", "logprob": 0.0, "bytes": [97], "top_logprobs": []}]));
    let asked = server.post_soon(COMPLETIONS, completion_body(json!({"logprobs": 0})));
    let request = server.next().await;
    request.place();
    request.say(b"a");
    request.stop();
    let told = &json_of(asked.await.unwrap()).await["choices"][0]["logprobs"];
    assert_eq!(told["top_logprobs"], json!([{"a": 0.0}]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_go_with_their_text_and_what_a_stop_string_cut_off_has_none() {
    let mut server = Server::start().await;
    for stream in [false, true] {
        let asked =
            server.post_soon(COMPLETIONS, completion_body(json!({"logprobs": 0, "stop": ["END"], "stream": stream})));
        let request = server.next().await;
        request.place();
        // The E of xE is held back; é takes two tokens; then the stop string comes in pieces.
        for text in ["xE", "y", "\u{e9}", "E", "ND and more"] {
            request.say(text.as_bytes());
        }
        let response = asked.await.unwrap();
        let choices: Vec<Value> = if stream {
            chunks_of(&events_of(response).await).into_iter().map(|chunk| chunk["choices"][0].clone()).collect()
        } else {
            vec![json_of(response).await["choices"][0].clone()]
        };
        let told = |name: &str| -> Vec<Value> {
            choices.iter().flat_map(|c| c["logprobs"][name].as_array().cloned().unwrap_or_default()).collect()
        };
        let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, "xEy\u{e9}");
        assert_eq!(told("tokens"), ["x", "E", "y", "bytes:\\xc3", "bytes:\\xa9"].map(Value::from), "stream {stream}");
        assert_eq!(told("text_offset"), [0, 1, 2, 3, 3].map(Value::from));
        if stream {
            let first = &choices[0];
            assert_eq!(
                (&first["text"], &first["logprobs"]["tokens"]),
                (&json!("x"), &json!(["x"])),
                "E is not out yet"
            );
        }
    }
}
