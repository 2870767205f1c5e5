//! Bad input: the right status, body and field, and nothing reaches the engine.

use crate::script::{CONTEXT, Server, chat_body, completion_body, json_of};
use serde_json::{Value, json};
use starling::api::{ServeLimits, Settings};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// What an error body has to say.
struct Wanted {
    status: u16,
    code: &'static str,
    param: Option<&'static str>,
    words: &'static str,
}

fn wanted(status: u16, code: &'static str, param: Option<&'static str>, words: &'static str) -> Wanted {
    Wanted { status, code, param, words }
}

async fn check(server: &Server, path: &str, body: Vec<u8>, wanted: Wanted) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(100)]).into_owned();
    let response = server.post(path, body).await;
    assert_eq!(response.status(), wanted.status, "{path} {shown}");
    assert_eq!(response.headers()["content-type"], "application/json");
    let body = json_of(response).await;
    let error = body["error"].as_object().expect("an error object");
    assert_eq!(error.keys().collect::<Vec<_>>(), ["code", "message", "param", "type"], "{shown}");
    assert_eq!(error["code"], wanted.code, "{shown}");
    assert_eq!(error["param"].as_str(), wanted.param, "{shown}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(wanted.words), "{shown}: {message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_no_json_object() {
    let mut server = Server::start().await;
    let deep = "[".repeat(100_000).into_bytes();
    let deep_object = format!("{{\"a\":{}", "{\"a\":".repeat(10_000)).into_bytes();
    for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
        let cases = [
            (b"{\"model\": \"tiny\", ".to_vec(), wanted(400, "invalid_json", None, "line 1")),
            (Vec::new(), wanted(400, "invalid_json", None, "not JSON")),
            (b"[1, 2]".to_vec(), wanted(400, "invalid_type", None, "an array")),
            (b"\"text\"".to_vec(), wanted(400, "invalid_type", None, "a string")),
            (b"null".to_vec(), wanted(400, "invalid_type", None, "null")),
            (b"{\"model\": \"\xff\"}".to_vec(), wanted(400, "invalid_utf8", None, "byte 11")),
            (b"{\"temperature\": NaN}".to_vec(), wanted(400, "invalid_json", None, "not JSON")),
            (b"{\"temperature\": 1e999}".to_vec(), wanted(400, "invalid_json", None, "out of range")),
            (b"{\"a\": 1} {\"b\": 2}".to_vec(), wanted(400, "invalid_json", None, "trailing")),
            (deep.clone(), wanted(400, "invalid_json", None, "recursion")),
            (deep_object.clone(), wanted(400, "invalid_json", None, "recursion")),
        ];
        for (body, wanted) in cases {
            check(&server, path, body, wanted).await;
        }
    }
    assert!(server.is_quiet());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_that_cannot_be_served() {
    let mut server = Server::start().await;
    let long = "x".repeat(CONTEXT as usize - 1);
    let full = format!("{} tokens; the context holds {CONTEXT}", CONTEXT);
    let full: &'static str = full.leak();
    let chat = [
        (json!({"max_tokens": -1}), wanted(400, "invalid_value", Some("max_tokens"), "-1")),
        (json!({"max_tokens": 0}), wanted(400, "invalid_value", Some("max_tokens"), "not 0")),
        (json!({"temperature": 9}), wanted(400, "invalid_value", Some("temperature"), "9")),
        (json!({"n": 129}), wanted(400, "invalid_value", Some("n"), "1 to 128")),
        (
            json!({"logit_bias": {"258": 1}}),
            wanted(400, "invalid_value", Some("logit_bias.258"), "token 258 is outside"),
        ),
        (json!({"tools": [{}]}), wanted(400, "unsupported_value", Some("tools"), "an array")),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), wanted(400, "invalid_value", Some("stop"), "5 strings")),
        (json!({"no_such_field": 1}), wanted(400, "unknown_parameter", Some("no_such_field"), "unknown")),
        (json!({"messages": []}), wanted(400, "invalid_value", Some("messages"), "empty")),
        (json!({"messages": {"role": "user"}}), wanted(400, "invalid_value", Some("messages"), "an object")),
        (json!({"messages": null}), wanted(400, "invalid_value", Some("messages"), "missing")),
        (json!({"model": "other"}), wanted(404, "model_not_found", Some("model"), "\"other\"")),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            wanted(400, "chat_template", Some("messages"), "tool"),
        ),
        (
            json!({"messages": [{"role": "user", "content": long}]}),
            wanted(400, "context_length_exceeded", Some("messages"), "context holds 256"),
        ),
    ];
    for (change, wanted) in chat {
        check(&server, CHAT, chat_body(change).to_string().into_bytes(), wanted).await;
    }
    let completions = [
        (json!({"prompt": ""}), wanted(400, "empty_prompt", Some("prompt"), "empty prompt")),
        (json!({"prompt": [258]}), wanted(400, "invalid_value", Some("prompt[0]"), "258 tokens")),
        (json!({"prompt": ["a", "b"]}), wanted(400, "unsupported_value", Some("prompt"), "2 prompts")),
        (json!({"echo": true}), wanted(400, "unsupported_value", Some("echo"), "only false")),
        (json!({"prompt": "x".repeat(CONTEXT as usize)}), wanted(400, "context_length_exceeded", Some("prompt"), full)),
        (json!({"prompt": vec![5; CONTEXT as usize]}), wanted(400, "context_length_exceeded", Some("prompt"), full)),
        (json!({"prompt": "x".repeat(1_000_000)}), wanted(400, "context_length_exceeded", Some("prompt"), "at least")),
    ];
    for (change, wanted) in completions {
        check(&server, COMPLETIONS, completion_body(change).to_string().into_bytes(), wanted).await;
    }
    let tokenize = [
        (json!({}), wanted(400, "invalid_value", Some("prompt"), "missing")),
        (json!({"prompt": 5}), wanted(400, "invalid_value", Some("prompt"), "5")),
        (json!({"prompt": "x", "messages": []}), wanted(400, "invalid_value", Some("prompt"), "messages")),
        (json!({"prompt": "x", "model": "other"}), wanted(404, "model_not_found", Some("model"), "other")),
    ];
    for (body, wanted) in tokenize {
        check(&server, "/tokenize", body.to_string().into_bytes(), wanted).await;
    }
    let detokenize = [
        (json!({}), wanted(400, "invalid_value", Some("tokens"), "missing")),
        (json!({"tokens": "x"}), wanted(400, "invalid_value", Some("tokens"), "\"x\"")),
        (json!({"tokens": [1, -5]}), wanted(400, "invalid_value", Some("tokens[1]"), "-5")),
        (json!({"tokens": [999]}), wanted(400, "invalid_value", Some("tokens[0]"), "999")),
    ];
    for (body, wanted) in detokenize {
        check(&server, "/detokenize", body.to_string().into_bytes(), wanted).await;
    }
    assert!(server.is_quiet());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_token_of_the_context_can_be_generated() {
    let mut server = Server::start().await;
    let prompt = "x".repeat(CONTEXT as usize - 1);
    let asked = server.post_soon(COMPLETIONS, completion_body(json!({"prompt": prompt, "max_tokens": 50})));
    let request = server.next().await;
    assert_eq!(request.submission.generation.max_new_tokens, 1);
    request.place();
    request.stop();
    assert_eq!(asked.await.unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_over_the_limit() {
    let mut server = Server::start().await;
    for path in [CHAT, "/detokenize"] {
        let body = vec![b' '; 10 << 20];
        check(&server, path, body, wanted(413, "body_too_large", None, "8388608 bytes")).await;
    }
    let settings = Settings { body_bytes_max: 64, ..Settings::default() };
    let small = Server::with(settings, ServeLimits::default()).await;
    check(&small, CHAT, vec![b'['; 65], wanted(413, "body_too_large", None, "64 bytes")).await;
    check(&small, CHAT, vec![b'['; 64], wanted(400, "invalid_json", None, "not JSON")).await;
    assert!(server.is_quiet());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_does_not_arrive_is_given_up() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let settings = Settings { body_seconds_max: 0, ..Settings::default() };
    let server = Server::with(settings, ServeLimits::default()).await;
    let mut socket = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("body_late"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_content_type_will_do_if_the_body_is_json() {
    let mut server = Server::start().await;
    for kind in ["text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"] {
        let request =
            server.client.post(server.url(CHAT)).header("content-type", kind).body(chat_body(json!({})).to_string());
        let asked = tokio::spawn(request.send());
        let request = server.next().await;
        request.place();
        request.stop();
        assert_eq!(asked.await.unwrap().unwrap().status(), 200, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paths_and_methods_that_do_not_exist() {
    let server = Server::start().await;
    for path in ["/", "/metrics", "/v1", "/v1/embeddings", "/v1/chat", "/v1/models/"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        let error = json_of(response).await["error"].clone();
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error", "{path}: {error}");
    }
    for (method, path) in [("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/readyz"), ("PUT", "/tokenize")] {
        let response = server.client.request(method.parse().unwrap(), server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 405, "{method} {path}");
        let error = &json_of(response).await["error"];
        assert_eq!(error["code"], "method_not_allowed");
        assert!(error["message"].as_str().unwrap().contains(method) && error["param"] == Value::Null);
    }
}
