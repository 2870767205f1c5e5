//! Clients that leave, and servers that stop.

use crate::script::{Fate, Server, chat_body, events_of};
use serde_json::json;
use starling::api::metrics::STATUS_CLIENT_LEFT;
use starling::api::{Drained, ServeLimits, Settings};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

/// Sends a chat over a socket of its own, so that the test decides when the connection closes.
async fn send(server: &Server, stream: bool) -> TcpStream {
    let body = chat_body(json!({"stream": stream})).to_string();
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_before_the_first_token_cancels() {
    let mut server = Server::start().await;
    for (number, (stream, placed)) in
        [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
    {
        let socket = send(&server, stream).await;
        let request = server.next().await;
        if placed {
            request.place();
        }
        drop(socket);
        assert_eq!(request.fate.await.unwrap(), Fate::Cancelled, "stream {stream}, placed {placed}");
        let end = server.counted(|_, end| end.status == STATUS_CLIENT_LEFT).await;
        assert_eq!(end.error, Some("client_left"));
        assert_eq!(server.usages().len(), number + 1);
        assert!(server.usages().iter().all(|usage| usage.finish.is_none()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_within_an_answer_cancels() {
    let mut server = Server::start().await;
    for stream in [false, true] {
        let mut socket = send(&server, stream).await;
        let request = server.next().await;
        request.place();
        request.say(b"abc");
        if stream {
            let mut received = Vec::new();
            while !String::from_utf8_lossy(&received).contains("\"abc\"") {
                let mut part = [0; 1_024];
                let length = socket.read(&mut part).await.unwrap();
                assert!(length > 0);
                received.extend_from_slice(&part[..length]);
            }
        }
        drop(socket);
        assert_eq!(request.fate.await.unwrap(), Fate::Cancelled, "stream {stream}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_within_a_body_is_forgotten() {
    let mut server = Server::start().await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let half = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{\"model\":");
    socket.write_all(half.as_bytes()).await.unwrap();
    drop(socket);
    server.counted(|_, end| end.status == STATUS_CLIENT_LEFT || end.error == Some("body_lost")).await;
    assert!(server.is_quiet());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_lets_open_streams_end_and_accepts_no_more() {
    let mut server = Server::start().await;
    let asked = server.post_soon(CHAT, chat_body(json!({"stream": true})));
    let request = server.next().await;
    request.place();
    let response = asked.await.unwrap();
    let address = server.address;
    let drained = server.shut_down();
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    request.say(b"still here");
    request.stop();
    let events = events_of(response).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(drained.await.unwrap(), Drained::Clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_outlives_the_drain_is_cut_and_cancelled() {
    let limits = ServeLimits { drain_wait: Duration::ZERO, ..ServeLimits::default() };
    let mut server = Server::with(Settings::default(), limits).await;
    let socket = send(&server, true).await;
    let request = server.next().await;
    request.place();
    assert_eq!(server.shut_down().await.unwrap(), Drained::Cut { connections: 1 });
    assert_eq!(request.fate.await.unwrap(), Fate::Cancelled);
    drop(socket);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_hold_up_a_drain() {
    let mut server = Server::start().await;
    let mut socket = send(&server, false).await;
    let request = server.next().await;
    request.place();
    request.stop();
    let mut answer = [0; 64];
    assert!(socket.read(&mut answer).await.unwrap() > 0);
    assert_eq!(server.shut_down().await.unwrap(), Drained::Clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_over_the_limit_waits_for_another_to_close() {
    let limits = ServeLimits { connections_max: 1, ..ServeLimits::default() };
    let mut server = Server::with(Settings::default(), limits).await;
    let first = send(&server, true).await;
    let one = server.next().await;
    one.place();
    let _second = send(&server, true).await;
    assert!(server.is_quiet());
    drop(first);
    assert_eq!(one.fate.await.unwrap(), Fate::Cancelled);
    server.next().await.place();
}
