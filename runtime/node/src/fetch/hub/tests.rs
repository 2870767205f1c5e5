use super::{Hub, HubName};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use futures_util::stream;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the stub answers a file's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Every request.
    Status(u16),
    /// That of the file itself, behind a head that promises it, with a body of the same length.
    BodyStatus(u16),
    /// The body ends early.
    Truncated,
    /// The body ends early, and nothing says so.
    Short,
}

#[derive(Default)]
struct Shelf {
    files: BTreeMap<String, String>,
    faults: BTreeMap<String, Fault>,
    /// Method and file of each request.
    asked: Vec<(Method, String)>,
}

/// A stub of the hub with one repository, `birds/wren`.
struct Stub {
    shelf: Arc<Mutex<Shelf>>,
    endpoint: String,
    cache: TempDir,
    runtime: Option<Runtime>,
}

async fn answer(State(shelf): State<Arc<Mutex<Shelf>>>, request: Request) -> Response {
    let mut shelf = shelf.lock().unwrap();
    let path = request.uri().path().to_owned();
    let known = path.strip_prefix("/birds/wren/resolve/").and_then(|rest| rest.split_once('/'));
    let status = |status: u16| Response::builder().status(status);
    let Some((revision, file)) = known else { return status(404).body(Body::empty()).unwrap() };
    shelf.asked.push((request.method().clone(), file.to_owned()));
    let is_head = request.method() == Method::HEAD;
    let fault = shelf.faults.get(file).copied();
    match fault {
        Some(Fault::Status(code)) => return status(code).body(Body::empty()).unwrap(),
        Some(Fault::BodyStatus(code)) if !is_head => return status(code).body("no luck".into()).unwrap(),
        _ => {}
    }
    let commit = |builder: axum::http::response::Builder| builder.header("x-repo-commit", COMMIT);
    let Some(text) = shelf.files.get(file).filter(|_| ["main", "v1", COMMIT].contains(&revision)) else {
        return commit(status(404)).header("x-error-code", "EntryNotFound").body(Body::empty()).unwrap();
    };
    let etag = format!("\"{:x}\"", Sha256::digest(text));
    if request.headers().get("if-none-match").is_some_and(|known| *known == *etag) {
        return commit(Response::builder().status(StatusCode::NOT_MODIFIED)).body(Body::empty()).unwrap();
    }
    let answer = commit(status(200)).header("etag", etag);
    let half = text[..text.len() / 2].to_owned();
    match fault {
        _ if is_head => answer.header("content-length", text.len()).body(Body::empty()),
        Some(Fault::Truncated) => {
            let parts = [Ok(half), Err(std::io::Error::other("gone"))];
            answer.header("content-length", text.len()).body(Body::from_stream(stream::iter(parts)))
        }
        Some(Fault::Short) => answer.body(Body::from(half)),
        _ => answer.body(Body::from(text.clone())),
    }
    .unwrap()
}

impl Stub {
    fn with(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let shelf = Arc::new(Mutex::new(Shelf { files, ..Shelf::default() }));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shelf));
        runtime.spawn(async move { axum_serve(listener, router).await });
        Self { shelf, endpoint, cache: TempDir::new().unwrap(), runtime: Some(runtime) }
    }

    fn folder() -> Self {
        Self::with(&[
            ("config.json", "{\"a\": 1}"),
            ("tokenizer.json", "{\"b\": 2}"),
            ("tokenizer_config.json", "{\"c\": 3}"),
            ("model.safetensors", "weights"),
            ("README.md", "not wanted"),
        ])
    }

    fn fail(&self, file: &str, fault: Fault) -> &Self {
        self.shelf.lock().unwrap().faults.insert(file.into(), fault);
        self
    }

    fn mend(&self) -> &Self {
        self.shelf.lock().unwrap().faults.clear();
        self
    }

    fn fetch(&self, name: &str) -> Result<PathBuf, String> {
        let hub = Hub {
            endpoint: Some(self.endpoint.clone()),
            cache: Some(self.cache.path().into()),
            retries: Some((0, Duration::ZERO)),
            quiet: true,
        };
        hub.fetch(&name.parse::<HubName>().unwrap()).map_err(|error| error.to_string())
    }

    /// Files whose bodies were sent since the last call.
    fn sent(&self) -> Vec<String> {
        let asked = std::mem::take(&mut self.shelf.lock().unwrap().asked);
        asked.into_iter().filter(|(method, _)| method == Method::GET).map(|(_, file)| file).collect()
    }

    fn stop(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn axum_serve(listener: TcpListener, router: Router) {
    let limits = crate::api::ServeLimits::default();
    crate::api::serve(listener, router, limits, std::future::pending()).await;
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_folder_is_fetched_once_with_what_it_needs_and_the_weights_last() {
    let stub = Stub::folder();
    let folder = stub.fetch("hf:birds/wren").unwrap();
    let files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&folder), files);
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).unwrap(), "weights");
    assert_eq!(stub.sent(), ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]);
    assert_eq!(stub.fetch("hf:birds/wren").unwrap(), folder);
    assert_eq!(stub.fetch(&format!("hf:birds/wren@{COMMIT}")).unwrap(), folder);
    assert_eq!(stub.sent(), [""; 0]);
}

#[test]
fn weights_in_several_files_are_those_of_the_index() {
    let index = r#"{"weight_map": {"x": "m-1.safetensors", "y": "m-2.safetensors", "z": "m-1.safetensors"}}"#;
    let files = [
        ("config.json", "{}"),
        ("tokenizer.json", "{\"b\": 2}"),
        ("model.safetensors.index.json", index),
        ("m-1.safetensors", "one"),
        ("m-2.safetensors", "two"),
        ("m-3.safetensors", "three"),
    ];
    let stub = Stub::with(&files);
    let folder = stub.fetch("hf:birds/wren@v1").unwrap();
    assert_eq!(stub.sent()[3..], ["m-1.safetensors", "m-2.safetensors"]);
    assert_eq!(fs::read_to_string(folder.join("m-2.safetensors")).unwrap(), "two");
    for bad in [r#"{"weight_map": {"x": "../up.safetensors"}}"#, r#"{"weight_map": {"x": 1}}"#, "{}", "{"] {
        let stub = Stub::with(&[files[0], files[1], (files[2].0, bad)]);
        let error = stub.fetch("hf:birds/wren").unwrap_err();
        assert!(error.starts_with("hf:birds/wren: model.safetensors.index.json: "), "{error}");
    }
}

#[test]
fn one_gguf_file_is_fetched_alone() {
    let stub = Stub::with(&[("q4/wren.gguf", "gguf"), ("config.json", "{}")]);
    let file = stub.fetch("hf:birds/wren/q4/wren.gguf").unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), "gguf");
    assert_eq!(stub.sent(), ["q4/wren.gguf"]);
}

#[test]
fn what_the_hub_refuses_names_the_repository_and_the_file() {
    let stub = Stub::folder();
    let refused = |name: &str| stub.fetch(name).unwrap_err();
    let none = "the repository has no such file, or there is no such repository or revision";
    assert_eq!(refused("hf:birds/wren@v9"), format!("hf:birds/wren@v9: config.json: {none}"));
    assert_eq!(refused("hf:birds/owl"), format!("hf:birds/owl: config.json: {none}"));
    assert_eq!(refused("hf:birds/wren/x.gguf"), format!("hf:birds/wren/x.gguf: x.gguf: {none}"));
    for (code, told) in [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (500, "500"), (429, "")] {
        stub.fail("tokenizer.json", Fault::Status(code));
        let error = refused("hf:birds/wren");
        assert!(error.starts_with("hf:birds/wren: tokenizer.json: ") && error.contains(told), "{code}: {error}");
    }
    // What may be left out must not be missing only because the hub has trouble.
    stub.mend().fail("tokenizer_config.json", Fault::Status(403));
    assert!(refused("hf:birds/wren").starts_with("hf:birds/wren: tokenizer_config.json: "));
}

#[test]
fn what_breaks_off_is_not_kept_and_starts_over() {
    let stub = Stub::folder();
    for fault in [Fault::Truncated, Fault::Short, Fault::BodyStatus(500), Fault::BodyStatus(404)] {
        stub.fail("model.safetensors", fault);
        let error = stub.fetch("hf:birds/wren").unwrap_err();
        assert!(error.starts_with("hf:birds/wren: model.safetensors: "), "{fault:?}: {error}");
    }
    stub.sent();
    let folder = stub.mend().fetch("hf:birds/wren").unwrap();
    assert_eq!(stub.sent(), ["model.safetensors"], "the rest was whole");
    assert_eq!(fs::read_to_string(folder.join("model.safetensors")).unwrap(), "weights");
}

#[test]
fn a_cache_serves_while_the_hub_cannot_be_asked() {
    let mut stub = Stub::folder();
    let folder = stub.fetch("hf:birds/wren").unwrap();
    stub.fail("config.json", Fault::Status(503)).fail("tokenizer_config.json", Fault::Status(500));
    assert_eq!(stub.fetch("hf:birds/wren").unwrap(), folder);
    stub.stop();
    assert_eq!(stub.fetch("hf:birds/wren").unwrap(), folder);
    let error = stub.fetch("hf:birds/owl").unwrap_err();
    assert!(error.starts_with("hf:birds/owl: config.json: "), "{error}");
}
