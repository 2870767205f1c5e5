//! The admin listener over HTTP.

use axum::http::header::{ACCEPT, CONTENT_TYPE};
use serde_json::{Value, json};
use starling::api::{Check, Health};
use starling::telemetry::admin::{Page, Requests};
use starling::telemetry::{DebugSource, Identity, Metrics, Sight, admin_router};
use starling_actors::{ActorKind, ActorState, ActorStats};
use starling_serving::{AttemptReport, MissedReport, RequestReport, RequestsReport, ReservationReport, Unanswered};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct Fixed;

impl DebugSource for Fixed {
    fn actors(&self) -> Vec<ActorStats> {
        vec![ActorStats {
            name: "router".into(),
            kind: ActorKind::Actor,
            level: 2,
            state: ActorState::Running,
            depth: 6,
            mailbox_messages_max: Some(9),
            handled: 1,
            restarts: 0,
            failures: 0,
            uptime: Duration::ZERO,
        }]
    }

    fn sight(&self) -> Sight {
        Sight { actors: self.actors(), ..Sight::default() }
    }

    fn placement(&self) -> Page<'_> {
        Box::pin(async { json!({ "conversations": 3 }) })
    }

    fn cluster(&self) -> Page<'_> {
        Box::pin(async { json!({ "epoch": 2 }) })
    }

    /// Of one request and what becomes of it; a node that is silent knows others.
    fn requests(&self, id: String) -> Requests<'_> {
        let missed = vec![
            MissedReport { from: 12, to: 16, why: "evicted", life_cycle: Some(1) },
            MissedReport { from: 16, to: 17, why: "last_token", life_cycle: None },
        ];
        let reservations = vec![ReservationReport { prompt_tokens: 17, reused_tokens: 12, missed }];
        let attempts = vec![AttemptReport { attempt: 1, node: "node-1".into(), rank: 1, reservations }];
        let request = RequestReport { ingress: "node-0".into(), choice: 0, open: false, attempts };
        let silent = Unanswered { who: "node-2".into(), why: "no link".into() };
        let requests = if id == "mine/1" { vec![request] } else { Vec::new() };
        let unanswered = if id == "lost" { vec![silent] } else { Vec::new() };
        Box::pin(async { RequestsReport { id, requests, unanswered } })
    }
}

struct Switch(AtomicBool);

impl Health for Switch {
    fn checks(&self) -> Vec<Check> {
        let passed = self.0.load(Ordering::SeqCst);
        let draining = Check { name: "draining", passed: true, detail: "no".into() };
        vec![Check { name: "model", passed, detail: "smollm2".into() }, draining]
    }
}

async fn start() -> (SocketAddr, Arc<Switch>) {
    let health = Arc::new(Switch(AtomicBool::new(false)));
    let model = "smollm2".to_owned();
    let metrics = Arc::new(Metrics::new(Identity { model, block_tokens: 16, version: "1", commit: "abc" }));
    let router = admin_router(metrics, Arc::new(Fixed), Arc::clone(&health) as Arc<dyn Health>);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, health)
}

async fn get(address: SocketAddr, path: &str, accept: &str) -> (u16, String, String) {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = client.get(format!("http://{address}{path}")).header(ACCEPT, accept);
    let response = request.send().await.unwrap();
    let kind = response.headers()[CONTENT_TYPE].to_str().unwrap().to_owned();
    (response.status().as_u16(), kind, response.text().await.unwrap())
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    let (address, _) = start().await;
    let (status, kind, text) = get(address, "/metrics", "*/*").await;
    assert_eq!((status, kind.as_str()), (200, "text/plain; version=0.0.4; charset=utf-8"));
    assert!(text.contains("starling_actor_mailbox_depth{actor=\"router\"} 6\n"), "{text}");
    let accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    let (status, kind, text) = get(address, "/metrics", accept).await;
    assert_eq!((status, kind.as_str()), (200, "application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn readiness_tells_the_truth_and_names_what_fails() {
    let (address, health) = start().await;
    let (status, _, text) = get(address, "/readyz", "*/*").await;
    assert_eq!((status, text.as_str()), (503, "[-] model: smollm2\nnot ready\n"));
    assert_eq!(get(address, "/livez", "*/*").await.0, 200);
    health.0.store(true, Ordering::SeqCst);
    let (status, _, text) = get(address, "/readyz", "*/*").await;
    assert_eq!((status, text.as_str()), (200, "ready\n"));
    let (_, _, text) = get(address, "/readyz?verbose", "*/*").await;
    assert_eq!(text, "[+] model: smollm2\n[+] draining: no\nready\n");
}

#[tokio::test]
async fn debug_pages_are_json() {
    let (address, _) = start().await;
    let (status, _, text) = get(address, "/debug/actors", "*/*").await;
    let actors: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &actors[0]["name"], &actors[0]["depth"]), (200, &json!("router"), &json!(6)));
    let (_, _, text) = get(address, "/debug/placement", "*/*").await;
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({ "conversations": 3 }));
}

#[tokio::test]
async fn requests_are_found_by_name_and_unknown_ones_are_errors() {
    let (address, _) = start().await;
    let page = async |path: &str| {
        let (status, _, text) = get(address, path, "*/*").await;
        (status, serde_json::from_str::<Value>(&text).unwrap())
    };
    for path in ["/debug/requests/mine/1", "/debug/requests/mine%2F1"] {
        let (status, found) = page(path).await;
        assert_eq!((status, &found["id"], &found["unanswered"]), (200, &json!("mine/1"), &json!([])));
        let missed = json!([
            {"from": 12, "to": 16, "why": "evicted", "life_cycle": 1},
            {"from": 16, "to": 17, "why": "last_token"},
        ]);
        let reservation = json!({"prompt_tokens": 17, "reused_tokens": 12, "missed": missed});
        let attempt = json!({"attempt": 1, "node": "node-1", "rank": 1, "reservations": [reservation]});
        let request = json!({"ingress": "node-0", "choice": 0, "open": false, "attempts": [attempt]});
        assert_eq!(found["requests"], json!([request]));
    }
    assert_eq!(page("/debug/requests/unknown").await, (404, json!({"error": "no request \"unknown\" is known"})));
    let (status, lost) = page("/debug/requests/lost").await;
    assert_eq!(
        (status, lost),
        (503, json!({"error": "no request \"lost\" is known; no answer from node-2 (no link)"}))
    );
}
