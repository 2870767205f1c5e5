//! Accepts connections within limits, and drains them.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What connections may cost.
#[derive(Clone, Debug)]
pub struct ServeLimits {
    /// Open connections; more wait to be accepted.
    pub connections_max: usize,
    /// How long a request's head may take, and how long a connection may stay idle.
    pub head_wait: Duration,
    /// How long open requests may run on once `shutdown` resolved.
    pub drain_wait: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { connections_max: 4_096, head_wait: Duration::from_secs(75), drain_wait: Duration::from_secs(30) }
    }
}

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every open request was answered.
    Clean,
    /// The time to drain ran out; this many connections were cut.
    Cut { connections: usize },
}

/// Serves `router` until `shutdown` resolves, then stops accepting, closes idle connections and lets open requests finish.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    shutdown: impl Future<Output = ()>,
) -> Drained {
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(limits.connections_max.max(1)));
    let mut connections = JoinSet::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = async {
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, stream) = tokio::select! {
            () = &mut shutdown => break,
            (permit, accepted) = accepted => match accepted {
                Ok((stream, _)) => (permit, stream),
                Err(error) => {
                    pause_after(&error).await;
                    continue;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(connection_of(stream, limits.head_wait).serve(service));
        connections.spawn(async move {
            let _permit = permit;
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection ended early");
            }
        });
    }
    drop(listener);
    let drained = timeout(limits.drain_wait, graceful.shutdown()).await;
    while connections.try_join_next().is_some() {}
    match drained {
        Ok(()) => Drained::Clean,
        Err(_) => {
            let cut = connections.len();
            connections.shutdown().await;
            Drained::Cut { connections: cut }
        }
    }
}

struct Accepted {
    io: TokioIo<TcpStream>,
    http: http1::Builder,
}

fn connection_of(stream: TcpStream, head_wait: Duration) -> Accepted {
    // Each event of a stream is a small packet that must not wait for the one before to be acknowledged.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_wait);
    Accepted { io: TokioIo::new(stream), http }
}

impl Accepted {
    fn serve(
        self,
        service: TowerToHyperService<Router>,
    ) -> http1::Connection<TokioIo<TcpStream>, TowerToHyperService<Router>> {
        self.http.serve_connection(self.io, service)
    }
}

/// A client that gave up before it was accepted is no reason to wait; anything else would fail again at once.
async fn pause_after(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if !matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        tracing::warn!(%error, "accept failed");
        sleep(ACCEPT_PAUSE).await;
    }
}
