//! Deleting conversations and scopes: the same names as in requests, nobody else's, and errors that say what to do.

use crate::script::{Request, Server, chat_body, json_of};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use starling::api::metrics::Endpoint;
use starling::api::{ServeLimits, Settings};
use starling_core::kv::Forget;
use starling_core::kv::identity::Scope;

const CHAT: &str = "/v1/chat/completions";
const ALL: &str = "/v1/conversations";

async fn two_tenants() -> Server {
    let settings = Settings { keys: vec!["one".into(), "two".into()], ..Settings::default() };
    Server::with(settings, ServeLimits::default()).await
}

async fn delete(server: &Server, path: &str, key: &str) -> Response {
    server.client.delete(server.url(path)).bearer_auth(key).send().await.unwrap()
}

/// A chat of a conversation; the request that reached the engine.
async fn chat(server: &mut Server, key: &str, named: (&str, &str)) -> Request {
    let request = server.client.post(server.url(CHAT)).bearer_auth(key).header(named.0, named.1);
    let asked = tokio::spawn(request.body(chat_body(json!({})).to_string()).send());
    let request = server.next().await;
    request.place();
    request.stop();
    assert_eq!(asked.await.unwrap().unwrap().status(), 200);
    request
}

fn forget_of(request: &Request) -> Forget {
    let submission = &request.submission;
    let scope = Scope { tenant: submission.tenant, adapter: None };
    Forget::Conversation { scope, conversation: submission.conversation.expect("it was named") }
}

fn ranks() -> Value {
    json!([
        {"rank": 0, "blocks": 3, "pages": 6, "pending_sequences": 0},
        {"rank": 1, "blocks": 4, "pages": 8, "pending_sequences": 1},
    ])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_is_deleted_by_the_name_that_its_requests_gave() {
    let mut server = two_tenants().await;
    for (name, path) in [("chat-1", "chat-1"), ("a/b c%d", "a/b%20c%25d"), ("a/b c%d", "a%2fb%20c%25d")] {
        for header in starling::api::CONVERSATION_HEADERS {
            let request = chat(&mut server, "one", (header, name)).await;
            let response = delete(&server, &format!("{ALL}/{path}"), "one").await;
            assert_eq!(response.status(), 200);
            let deleted = json!({"id": name, "object": "conversation.deleted", "deleted": true, "ranks": ranks()});
            assert_eq!(json_of(response).await, deleted);
            assert_eq!(server.forgets().last(), Some(&forget_of(&request)), "{header}: {name}");
        }
    }
    let named = chat_body(json!({"prompt_cache_key": "chat-1"})).to_string();
    let asked = tokio::spawn(server.client.post(server.url(CHAT)).bearer_auth("one").body(named).send());
    let request = server.next().await;
    request.stop();
    asked.await.unwrap().unwrap();
    assert_eq!(server.forgets()[0], forget_of(&request));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_again_or_what_nobody_knows_is_answered_alike() {
    let server = two_tenants().await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        let response = delete(&server, "/v1/conversations/unknown", "one").await;
        assert_eq!(response.status(), 200);
        answers.push(json_of(response).await);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let forgets = server.forgets();
    assert!(forgets.len() == 3 && forgets.iter().all(|forget| *forget == forgets[0]));
    let end = server.counted(|at, _| *at == Endpoint::Conversations).await;
    assert_eq!((end.status, end.error), (200, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scope_is_that_of_the_key_alone() {
    let mut server = two_tenants().await;
    for key in ["one", "two"] {
        let request = chat(&mut server, key, ("x-session-id", "s")).await;
        let response = delete(&server, ALL, key).await;
        assert_eq!(response.status(), 200);
        assert_eq!(json_of(response).await, json!({"object": "scope.deleted", "deleted": true, "ranks": ranks()}));
        let scope = Scope { tenant: request.submission.tenant, adapter: None };
        assert_eq!(server.forgets().last(), Some(&Forget::Scope(scope)));
    }
    let forgets = server.forgets();
    assert_ne!(forgets[0], forgets[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_deletes_its_own_texts_and_no_other_tenants() {
    let mut server = two_tenants().await;
    let named = ("x-session-id", "s");
    // How many tokens the next turn takes from the text cache, after that was deleted.
    let mut reused = Vec::new();
    for (path, key) in [("/s", "two"), ("", "two"), ("/other", "one"), ("/s", "one"), ("", "one")] {
        chat(&mut server, "one", named).await;
        assert_eq!(delete(&server, &format!("{ALL}{path}"), key).await.status(), 200);
        chat(&mut server, "one", named).await;
        reused.push(server.costs().last().expect("a prompt was encoded").reused_tokens);
    }
    assert!(reused[0] > 0, "{reused:?}");
    assert_eq!(reused, [reused[0], reused[0], reused[0], 0, 0]);
    let conversations: Vec<Forget> =
        server.forgets().into_iter().filter(|f| matches!(f, Forget::Conversation { .. })).collect();
    assert_ne!(conversations[0], conversations[2], "the same name is another conversation for another tenant");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_did_not_answer_is_named_and_deleting_again_may_succeed() {
    let server = two_tenants().await;
    server.silence(&[("rank 1 of node-1", "no link to node node-1 is up"), ("node-1", "no link")]);
    for path in [ALL, "/v1/conversations/s"] {
        let response = delete(&server, path, "one").await;
        assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (503, "5"));
        let body = json_of(response).await;
        let error = body["error"].as_object().expect("an error object");
        assert_eq!(error.keys().collect::<Vec<_>>(), ["code", "message", "param", "type"]);
        assert_eq!((&error["code"], &error["type"]), (&json!("not_deleted_everywhere"), &json!("server_error")));
        let message = error["message"].as_str().unwrap();
        let who = "no answer from rank 1 of node-1 (no link to node node-1 is up), node-1 (no link)";
        assert!(message.contains(who) && message.contains("deleted again"), "{message}");
    }
    server.silence(&[]);
    assert_eq!(delete(&server, "/v1/conversations/s", "one").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_deleted_without_a_key_a_name_or_the_method() {
    let server = two_tenants().await;
    let bad = [
        (Method::DELETE, ALL, None, 401, "invalid_api_key"),
        (Method::DELETE, "/v1/conversations/s", None, 401, "invalid_api_key"),
        (Method::DELETE, "/v1/conversations/s", Some("three"), 401, "invalid_api_key"),
        (Method::DELETE, "/v1/conversations/", Some("one"), 404, "not_found"),
        (Method::DELETE, "/v1/conversations/%zz", Some("one"), 400, "invalid_value"),
        (Method::GET, "/v1/conversations/s", Some("one"), 405, "method_not_allowed"),
        (Method::POST, ALL, Some("one"), 405, "method_not_allowed"),
    ];
    for (method, path, key, status, code) in bad {
        let mut request = server.client.request(method.clone(), server.url(path));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{method} {path}");
        assert_eq!(json_of(response).await["error"]["code"], code, "{method} {path}");
    }
    assert_eq!(server.forgets(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_submitted_with_the_names_that_their_clients_see() {
    let mut server = Server::start().await;
    let body = chat_body(json!({"n": 2})).to_string();
    let request = server.client.post(server.url(CHAT)).header("x-request-id", "mine");
    let asked = tokio::spawn(request.body(body).send());
    let first = server.next().await;
    first.place();
    first.stop();
    let second = server.next().await;
    second.stop();
    let answer = json_of(asked.await.unwrap().unwrap()).await;
    for request in [first, second] {
        assert_eq!(request.submission.names[..], ["mine", answer["id"].as_str().unwrap()]);
    }
}
