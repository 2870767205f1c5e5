//! `starling nodes`: the members of a cluster as one of them sees them.

use super::client::local_http;
use starling_serving::{ClusterReport, MemberReport, MemberState};
use std::io::{self, Write};
use std::time::Duration;

/// Answers of this length are no list of at most 64 members.
const BODY_BYTES_MAX: usize = 1 << 20;
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    #[error("admin URL {0:?} does not begin with http://")]
    Url(String),
    #[error("cannot reach {url}: {why}")]
    Http { url: String, why: String },
    #[error("{url} answered {status}: {body}")]
    Refused { url: String, status: u16, body: String },
    #[error("{url} did not answer with a cluster: {why}")]
    Answer { url: String, why: String },
    #[error("cannot write to standard output: {0}")]
    Write(#[from] io::Error),
}

/// Asks a node's admin listener.
///
/// # Errors
/// No answer, a refusal, or an answer that is no cluster.
pub async fn ask(admin: &str) -> Result<ClusterReport, NodesError> {
    if !admin.starts_with("http://") {
        return Err(NodesError::Url(admin.to_owned()));
    }
    let url = format!("{}/debug/cluster", admin.trim_end_matches('/'));
    let http = |error: reqwest::Error| NodesError::Http { url: url.clone(), why: innermost(&error) };
    let request = local_http().map_err(http)?.get(&url).timeout(ANSWER_WAIT);
    let mut response = request.send().await.map_err(http)?;
    let status = response.status();
    let mut body = Vec::new();
    while let Some(bytes) = response.chunk().await.map_err(http)? {
        body.extend_from_slice(&bytes);
        if body.len() > BODY_BYTES_MAX {
            return Err(NodesError::Answer { url, why: format!("more than {BODY_BYTES_MAX} bytes") });
        }
    }
    if !status.is_success() {
        let body = String::from_utf8_lossy(&body).trim().chars().take(200).collect();
        return Err(NodesError::Refused { url, status: status.as_u16(), body });
    }
    serde_json::from_slice(&body).map_err(|e| {
        // A node whose actors do not answer says so in place of the cluster.
        let told: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let told = told.and_then(|answer| answer["error"].as_str().map(str::to_owned));
        NodesError::Answer { url, why: told.unwrap_or_else(|| e.to_string()) }
    })
}

/// The cause of causes: "connection refused" rather than "error sending request".
pub fn innermost(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

/// Writes one line a member under a line about the rounds.
///
/// # Errors
/// Writing failed.
pub fn write(report: &ClusterReport, out: &mut impl Write) -> io::Result<()> {
    let ClusterReport { cluster, epoch, round, rounds_per_s, leader, changing, last_change, members } = report;
    match cluster.as_str() {
        "" => writeln!(out, "in no view yet")?,
        id => writeln!(out, "cluster {id} · epoch {epoch} · round {round} · {rounds_per_s:.1} rounds/s")?,
    }
    let led = leader.as_ref().map_or_else(|| "nobody leads".to_owned(), |leader| format!("led by {}", plain(leader)));
    let changes = if *changing { " · the view is changing" } else { "" };
    writeln!(out, "{led}{changes}")?;
    if let Some(change) = last_change {
        let left = change.left.iter().map(|left| format!("{} left ({})", plain(&left.name), plain(&left.why)));
        let joined = change.joined.iter().map(|name| format!("{} joined", plain(name)));
        let what: Vec<String> = left.chain(joined).collect();
        writeln!(out, "last change, to epoch {} behind round {}: {}", change.epoch, change.cut, what.join(", "))?;
    }
    let head = ["member", "state", "heard", "ranks"].map(str::to_owned);
    let rows: Vec<[String; 4]> = std::iter::once(head).chain(members.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [name, state, heard] = [width(0), width(1), width(2)];
    for row in &rows {
        writeln!(out, "{:name$}  {:state$}  {:>heard$}  {}", row[0], row[1], row[2], row[3])?;
    }
    Ok(())
}

/// Whatever a name is, it does not move the cursor.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

fn row(member: &MemberReport) -> [String; 4] {
    let state = match member.state {
        MemberState::Up if !member.in_view => "outside",
        MemberState::Up => "up",
        MemberState::Suspected => "suspected",
        MemberState::Down => "down",
    };
    let heard = member.last_heard_ms.map_or_else(|| "-".to_owned(), |ms| format!("{:.1} s ago", ms as f64 / 1000.0));
    let ranks: Vec<String> = member.ranks.iter().map(u32::to_string).collect();
    [plain(&member.name), state.to_owned(), heard, ranks.join(",")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::get;
    use serde_json::{Value, json};

    async fn serve(status: StatusCode, body: String) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/debug/cluster", get(move || async move { (status, body) }));
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }

    fn three() -> Value {
        let change = json!({ "epoch": 2, "cut": 4000, "joined": ["node-1"],
            "left": [{ "name": "no\u{1b}[2J", "incarnation": "i9", "why": "its link was down" }] });
        json!({ "cluster": "c7", "epoch": 2, "round": 4711, "rounds_per_s": 49.96, "leader": "node-0", "changing": false,
            "last_change": change, "members": [
            { "name": "node-0", "incarnation": "i1", "in_view": true, "ranks": [0, 1],
              "state": "up", "last_heard_ms": 0, "completed": 4711 },
            { "name": "node-1", "incarnation": "i2", "in_view": true, "ranks": [2],
              "state": "suspected", "last_heard_ms": 12345,
              "completed": null },
            { "name": "no\u{1b}[2J", "incarnation": "", "in_view": false, "ranks": [],
              "state": "down", "last_heard_ms": null, "completed": null },
        ] })
    }

    async fn shown(answer: &Value) -> String {
        let admin = serve(StatusCode::OK, answer.to_string()).await;
        let report = ask(&format!("{admin}/")).await.unwrap();
        let mut out = Vec::new();
        write(&report, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[tokio::test]
    async fn members_are_shown_with_their_state_and_ranks() {
        let expected = "\
cluster c7 · epoch 2 · round 4711 · 50.0 rounds/s
led by node-0
last change, to epoch 2 behind round 4000: no[2J left (its link was down), node-1 joined
member  state           heard  ranks
node-0  up          0.0 s ago  0,1
node-1  suspected  12.3 s ago  2
no[2J   down                -  \n";
        assert_eq!(shown(&three()).await, expected);
        let mut no_view = three();
        no_view["cluster"] = json!("");
        assert!(shown(&no_view).await.starts_with("in no view yet\nled by "));
    }

    #[tokio::test]
    async fn what_is_no_cluster_is_told() {
        let admin = serve(StatusCode::OK, "{}".into()).await;
        let error = ask(&admin).await.unwrap_err().to_string();
        let says = format!("{admin}/debug/cluster did not answer with a cluster: missing field `cluster`");
        assert!(error.starts_with(&says), "{error}");
        let admin = serve(StatusCode::OK, json!({ "error": "queue is restarting" }).to_string()).await;
        let error = ask(&admin).await.unwrap_err().to_string();
        assert!(error.ends_with("did not answer with a cluster: queue is restarting"), "{error}");
        let admin = serve(StatusCode::NOT_FOUND, "no such page\n".into()).await;
        let error = ask(&admin).await.unwrap_err().to_string();
        assert_eq!(error, format!("{admin}/debug/cluster answered 404: no such page"));
        let admin = serve(StatusCode::OK, " ".repeat(BODY_BYTES_MAX + 1)).await;
        assert!(matches!(ask(&admin).await, Err(NodesError::Answer { .. })));
        assert!(matches!(ask("127.0.0.1:8001").await, Err(NodesError::Url(_))));
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = ask(&format!("http://{closed}")).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot reach http://{closed}/debug/cluster: ")), "{error}");
        assert!(error.to_lowercase().contains("refused"), "{error}");
    }
}
