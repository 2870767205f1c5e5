//! What surrounds every request: names, keys, probes, models, tokens.

use crate::script::{Request, Server, chat_body, json_of};
use serde_json::json;
use starling::api::metrics::Endpoint;
use starling::api::{ServeLimits, Settings};
use starling_actors::TraceContext;
use starling_core::kv::identity::{Scope, chain};

const CHAT: &str = "/v1/chat/completions";

/// Sends a chat with headers and returns the request that reached the engine, and the answer.
async fn ask(server: &mut Server, headers: &[(&str, &str)], change: serde_json::Value) -> (Request, reqwest::Response) {
    let mut request = server.client.post(server.url(CHAT)).body(chat_body(change).to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let asked = tokio::spawn(request.send());
    let request = server.next().await;
    request.place();
    request.stop();
    (request, asked.await.unwrap().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_ids_are_repeated_or_made() {
    let mut server = Server::start().await;
    let (_, response) = ask(&mut server, &[("x-request-id", "mine-1")], json!({})).await;
    assert_eq!(response.headers()["x-request-id"], "mine-1");
    let (_, response) = ask(&mut server, &[("x-request-id", "not sane")], json!({})).await;
    assert_eq!(response.headers()["x-request-id"].len(), 32);
    // Errors and probes have one too.
    assert!(server.get("/no/such").await.headers().contains_key("x-request-id"));
    let first = server.get("/livez").await.headers()["x-request-id"].clone();
    assert_ne!(first, server.get("/livez").await.headers()["x-request-id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_are_named_by_headers_before_the_body_and_never_by_request_ids() {
    let mut server = Server::start().await;
    let none = ask(&mut server, &[("x-request-id", "r")], json!({})).await.0.submission.conversation;
    assert_eq!(none, None);
    let by_body = ask(&mut server, &[], json!({"prompt_cache_key": "s"})).await.0.submission.conversation;
    assert!(by_body.is_some());
    for name in starling::api::CONVERSATION_HEADERS {
        let (request, _) = ask(&mut server, &[(name, "s")], json!({"prompt_cache_key": "other"})).await;
        assert_eq!(request.submission.conversation, by_body, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversations_next_turn_encodes_and_keys_what_is_new() {
    let keys = vec!["one".into(), "two".into()];
    let settings = Settings { keys, keyed_block_tokens: Some(4), ..Settings::default() };
    let mut server = Server::with(settings, ServeLimits::default()).await;
    let turn = json!({"role": "user", "content": "hi <|im_end|>"});
    let answer = json!({"role": "assistant", "content": "yes"});
    let turns = [json!([turn]), json!([turn, answer, turn])];
    let mut prompts = Vec::new();
    for (key, messages) in [("one", 0), ("one", 1), ("two", 1)] {
        let headers = [("authorization", &*format!("Bearer {key}")), ("x-session-id", "s")];
        let (request, _) = ask(&mut server, &headers, json!({"messages": turns[messages]})).await;
        let submission = &request.submission;
        let scope = Scope { tenant: submission.tenant, adapter: None };
        assert_eq!(submission.keys.block_tokens, 4);
        assert_eq!(&*submission.keys.keys, chain(&scope, &submission.prompt, 4));
        prompts.push(submission.prompt.clone());
    }
    assert_eq!(prompts[1], prompts[2]);
    let costs: Vec<_> = server.costs().iter().map(|cost| (cost.encoded_bytes, cost.reused_tokens)).collect();
    let (whole, tail) = (prompts[1].len() - 7, "assistant\n".len());
    assert_eq!(costs[0], (prompts[0].len() - 3, 0));
    assert_eq!(costs[1], (prompts[1].len() - prompts[0].len() + tail - 4, prompts[0].len() - tail));
    assert_eq!(costs[2], (whole, 0), "another tenant's conversation of the same name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_are_continued() {
    let mut server = Server::start().await;
    let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (request, _) = ask(&mut server, &[("traceparent", header)], json!({})).await;
    assert_eq!(request.submission.trace, header.parse().unwrap());
    let (request, _) = ask(&mut server, &[("traceparent", "nonsense")], json!({})).await;
    assert_eq!(request.submission.trace, TraceContext::NONE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_path_but_probes_asks_for_a_key() {
    let settings = Settings { keys: vec!["one".into(), "two".into()], ..Settings::default() };
    let mut server = Server::with(settings, ServeLimits::default()).await;
    let guarded = [CHAT, "/v1/completions", "/tokenize", "/detokenize"];
    for path in guarded {
        let response = server.post(path, "{}").await;
        assert_eq!(response.status(), 401, "{path}");
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        assert_eq!(json_of(response).await["error"]["code"], "invalid_api_key");
    }
    for path in ["/v1/models", "/v1/models/tiny"] {
        assert_eq!(server.get(path).await.status(), 401, "{path}");
        let wrong = server.client.get(server.url(path)).bearer_auth("three").send().await.unwrap();
        assert_eq!(wrong.status(), 401);
        let right = server.client.get(server.url(path)).bearer_auth("two").send().await.unwrap();
        assert_eq!(right.status(), 200);
    }
    for path in ["/livez", "/readyz", "/health"] {
        assert_eq!(server.get(path).await.status(), 200, "{path}");
    }
    let named = json!({"prompt_cache_key": "s"});
    let (one, _) = ask(&mut server, &[("authorization", "Bearer one")], named.clone()).await;
    let (two, _) = ask(&mut server, &[("authorization", "Bearer two")], named).await;
    assert_ne!(one.submission.tenant, two.submission.tenant);
    assert_ne!(one.submission.conversation, two.submission.conversation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_tell_the_truth() {
    let server = Server::start().await;
    for (path, text) in [("/livez", "alive\n"), ("/readyz", "ready\n"), ("/health", "ready\n")] {
        let response = server.get(path).await;
        assert_eq!((response.status().as_u16(), &*response.text().await.unwrap()), (200, text));
    }
    let verbose = server.get("/readyz?verbose").await.text().await.unwrap();
    assert_eq!(verbose, "[+] model: model is true\n[+] ranks: ranks is true\nready\n");
    server.set_ready(false);
    for path in ["/readyz", "/health", "/readyz?verbose"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 503, "{path}");
        assert!(response.text().await.unwrap().contains("[-] ranks: ranks is false\nnot ready"), "{path}");
    }
    assert_eq!(server.get("/livez").await.status(), 200);
    let models = server.get("/v1/models").await;
    assert_eq!((models.status().as_u16(), models.headers()["retry-after"].to_str().unwrap()), (503, "5"));
    assert_eq!(json_of(models).await["error"]["code"], "not_ready");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_listed_and_shown() {
    let server = Server::start().await;
    let card = json!({"id": "tiny", "object": "model", "created": 1, "owned_by": "tests", "max_model_len": 256});
    assert_eq!(json_of(server.get("/v1/models").await).await, json!({"object": "list", "data": [card]}));
    assert_eq!(json_of(server.get("/v1/models/tiny").await).await, card);
    let response = server.get("/v1/models/org/other").await;
    assert_eq!(response.status(), 404);
    let error = &json_of(response).await["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("\"org/other\""));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_becomes_tokens_and_text_again() {
    let server = Server::start().await;
    let text = "a <|im_end|> 😀";
    let body = json!({"model": "tiny", "prompt": text}).to_string();
    let tokens = json_of(server.post("/tokenize", body).await).await;
    assert_eq!((&tokens["count"], &tokens["max_model_len"]), (&json!(text.len()), &json!(256)));
    let body = json!({"tokens": tokens["tokens"]}).to_string();
    assert_eq!(json_of(server.post("/detokenize", body).await).await, json!({"prompt": text}));
    let body = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
    let tokens = json_of(server.post("/tokenize", body).await).await["tokens"].clone();
    let text = json_of(server.post("/detokenize", json!({"tokens": tokens}).to_string()).await).await;
    assert_eq!(text["prompt"], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_is_counted_once_with_its_status() {
    let server = Server::start().await;
    let cases = [("/livez", Endpoint::Health, 200), ("/no/such", Endpoint::Unknown, 404), (CHAT, Endpoint::Chat, 405)];
    for (path, endpoint, status) in cases {
        server.get(path).await;
        let end = server.counted(|at, _| *at == endpoint).await;
        assert_eq!((end.status, end.streamed), (status, false));
        assert_eq!(end.error.is_some(), status != 200);
    }
}
