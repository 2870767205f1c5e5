//! A server whose engine plays a script, and the little that tests need to talk to it.

use reqwest::Response;
use serde_json::{Value, json};
use starling::api::metrics::{ApiMetrics, End, Endpoint, Usage};
use starling::api::{
    Api, Check, Drained, Engine, Events, Forgetting, Health, ModelCard, NoTrace, ServeLimits, Settings, router, serve,
};
use starling::text::{ChatTemplate, Cost, Rules, TextModel, TokenKind, Tokenizer, TokenizerParts};
use starling_core::ids::{RankId, TokenId};
use starling_core::kv::{Forget, Forgotten};
use starling_core::rejection::Rejection;
use starling_core::request::Finish;
use starling_core::step::Drawn;
use starling_serving::api::{Placed, StreamEvent, StreamToken, Submission};
use starling_serving::{ForgetReport, RankForgotten, Texts, Unanswered};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

pub const END: TokenId = 1;
const FIRST_BYTE: TokenId = 2;
pub const CONTEXT: u32 = 256;

/// What became of a request's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Read to their end.
    Read,
    /// Ended by a stop string.
    Finished,
    /// Dropped while they still ran.
    Cancelled,
}

/// A byte, its logprob, and the most probable bytes with theirs.
pub type Scored<'a> = (u8, f32, &'a [(u8, f32)]);

/// One submitted request, in the hands of the test.
pub struct Request {
    pub submission: Submission,
    pub events: mpsc::UnboundedSender<StreamEvent>,
    pub fate: oneshot::Receiver<Fate>,
}

impl Request {
    pub fn place(&self) {
        let placed = Placed { node: "node-7".into(), rank: RankId(3), attempt: 1 };
        self.send(StreamEvent::Placed(placed));
    }

    /// Sends a token for each byte.
    pub fn say(&self, bytes: &[u8]) {
        self.send(StreamEvent::Tokens(bytes.iter().map(|&byte| token(FIRST_BYTE + TokenId::from(byte))).collect()));
    }

    /// Sends one token for each of these bytes with what the model thought of it: its logprob, and the most probable bytes.
    pub fn score(&self, scored: &[Scored<'_>]) {
        let id = |byte: u8| FIRST_BYTE + TokenId::from(byte);
        let tokens = scored.iter().map(|(byte, logprob, top)| {
            let top = top.iter().map(|(byte, logprob)| (id(*byte), *logprob)).collect();
            StreamToken { drawn: Drawn { top, ..Drawn::new(id(*byte), *logprob) }, cached_tokens: 4 }
        });
        self.send(StreamEvent::Tokens(tokens.collect()));
    }

    /// Sends the model's end token, and the end.
    pub fn stop(&self) {
        self.send(StreamEvent::Tokens(vec![token(END)]));
        self.end(Finish::Stop);
    }

    pub fn end(&self, finish: Finish) {
        self.send(StreamEvent::Ended(finish));
    }

    pub fn send(&self, event: StreamEvent) {
        // Whoever left does not read on.
        let _ = self.events.send(event);
    }

    /// The prompt as text, control tokens by name.
    pub fn prompt(&self) -> String {
        text_model().tokenizer.decode(&self.submission.prompt).unwrap()
    }
}

fn token(token: TokenId) -> StreamToken {
    StreamToken { drawn: Drawn::new(token, 0.0), cached_tokens: 4 }
}

/// Hands each request to the test.
struct Script {
    requests: mpsc::UnboundedSender<Request>,
    refusal: Arc<Mutex<Option<Rejection>>>,
    forgets: Arc<Forgets>,
}

/// What was to be forgotten, and who is said not to have answered. Texts are forgotten in truth.
#[derive(Default)]
struct Forgets {
    asked: Mutex<Vec<Forget>>,
    unanswered: Mutex<Vec<Unanswered>>,
    texts: OnceLock<Arc<dyn Texts>>,
}

impl Engine for Script {
    fn forget(&self, what: Forget) -> Forgetting<'_> {
        self.forgets.asked.lock().unwrap().push(what);
        let texts = self.forgets.texts.get().map_or(0, |texts| texts.forget(&what));
        let forgotten = |rank: u32| RankForgotten {
            rank: RankId(rank),
            forgotten: Forgotten { pages: 2 * rank + 6, blocks: rank + 3, pending_sequences: rank },
        };
        let ranks = (0..2).map(forgotten).collect();
        let unanswered = self.forgets.unanswered.lock().unwrap().clone();
        Box::pin(async move { ForgetReport { ranks, texts, unanswered } })
    }

    fn keep_texts(&self, texts: Arc<dyn Texts>) {
        assert!(self.forgets.texts.set(texts).is_ok(), "an API keeps its texts in one place");
    }

    fn submit(&self, submission: Submission) -> Result<Box<dyn Events>, Rejection> {
        if let Some(refusal) = self.refusal.lock().unwrap().clone() {
            return Err(refusal);
        }
        let (events, played) = mpsc::unbounded_channel();
        let (tell, fate) = oneshot::channel();
        self.requests.send(Request { submission, events, fate }).unwrap_or_else(|_| panic!("the test is gone"));
        Ok(Box::new(Played { played, tell: Some(tell), fate: Fate::Cancelled }))
    }
}

struct Played {
    played: mpsc::UnboundedReceiver<StreamEvent>,
    tell: Option<oneshot::Sender<Fate>>,
    fate: Fate,
}

impl Events for Played {
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamEvent>> {
        let event = self.played.poll_recv(context);
        if let Poll::Ready(Some(StreamEvent::Ended(_) | StreamEvent::Failed(_)) | None) = event {
            self.fate = Fate::Read;
        }
        event
    }

    fn finish(mut self: Box<Self>) {
        self.fate = Fate::Finished;
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        if let Some(tell) = self.tell.take() {
            let _ = tell.send(self.fate);
        }
    }
}

/// Whether the server says that it is ready.
struct Switch(AtomicBool);

impl Health for Switch {
    fn checks(&self) -> Vec<Check> {
        let check = |name, passed| Check { name, passed, detail: format!("{name} is {passed}") };
        vec![check("model", true), check("ranks", self.0.load(Ordering::SeqCst))]
    }
}

/// Keeps what the API counts, and wakes whoever waits for it.
#[derive(Default)]
struct Ledger {
    ends: Mutex<Vec<(Endpoint, End)>>,
    usages: Mutex<Vec<Usage>>,
    costs: Mutex<Vec<Cost>>,
    changed: tokio::sync::Notify,
}

impl ApiMetrics for Ledger {
    fn ended(&self, endpoint: Endpoint, end: &End) {
        self.ends.lock().unwrap().push((endpoint, end.clone()));
        self.changed.notify_waiters();
    }

    fn encoded(&self, cost: &Cost) {
        self.costs.lock().unwrap().push(*cost);
    }

    fn generated(&self, usage: &Usage) {
        self.usages.lock().unwrap().push(*usage);
    }
}

pub struct Server {
    pub address: SocketAddr,
    pub client: reqwest::Client,
    requests: mpsc::UnboundedReceiver<Request>,
    refusal: Arc<Mutex<Option<Rejection>>>,
    ready: Arc<Switch>,
    ledger: Arc<Ledger>,
    forgets: Arc<Forgets>,
    shutdown: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Drained>,
}

impl Server {
    pub async fn start() -> Self {
        Self::with(Settings::default(), ServeLimits::default()).await
    }

    pub async fn with(settings: Settings, limits: ServeLimits) -> Self {
        let (requests_in, requests) = mpsc::unbounded_channel();
        let refusal = Arc::new(Mutex::new(None));
        let ready = Arc::new(Switch(AtomicBool::new(true)));
        let ledger = Arc::new(Ledger::default());
        let forgets = Arc::new(Forgets::default());
        let api = Api {
            engine: Arc::new(Script { requests: requests_in, refusal: refusal.clone(), forgets: forgets.clone() }),
            health: ready.clone(),
            text: Arc::new(text_model()),
            model: ModelCard { id: "tiny".into(), context_tokens: CONTEXT, created_s: 1, owned_by: "tests".into() },
            metrics: ledger.clone(),
            trace: Arc::new(NoTrace),
            settings,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, stop) = oneshot::channel::<()>();
        let serving = tokio::spawn(serve(listener, router(api), limits, async move {
            let _ = stop.await;
        }));
        let client = reqwest::Client::new();
        Self { address, client, requests, refusal, ready, ledger, forgets, shutdown: Some(shutdown), serving }
    }

    /// The next submitted request.
    pub async fn next(&mut self) -> Request {
        self.requests.recv().await.expect("the server submits a request")
    }

    /// True while no request waits to be read by the test.
    pub fn is_quiet(&mut self) -> bool {
        self.requests.is_empty()
    }

    pub fn refuse(&self, refusal: Rejection) {
        *self.refusal.lock().unwrap() = Some(refusal);
    }

    /// What was to be forgotten, in order.
    pub fn forgets(&self) -> Vec<Forget> {
        self.forgets.asked.lock().unwrap().clone()
    }

    /// From now on these do not answer when they are to forget.
    pub fn silence(&self, unanswered: &[(&str, &str)]) {
        let one = |(who, why): &(&str, &str)| Unanswered { who: (*who).into(), why: (*why).into() };
        *self.forgets.unanswered.lock().unwrap() = unanswered.iter().map(one).collect();
    }

    pub fn set_ready(&self, ready: bool) {
        self.ready.0.store(ready, Ordering::SeqCst);
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> Response {
        self.client.post(self.url(path)).body(body).send().await.unwrap()
    }

    /// Posts in the background, so that the test can play the engine meanwhile.
    pub fn post_soon(&self, path: &str, body: Value) -> JoinHandle<Response> {
        let request = self.client.post(self.url(path)).body(body.to_string());
        tokio::spawn(async move { request.send().await.unwrap() })
    }

    /// Waits until a request was counted for which `wanted` holds.
    pub async fn counted(&self, wanted: impl Fn(&Endpoint, &End) -> bool) -> End {
        loop {
            let changed = self.ledger.changed.notified();
            let found = self.ledger.ends.lock().unwrap().iter().find(|(at, end)| wanted(at, end)).cloned();
            if let Some((_, end)) = found {
                return end;
            }
            changed.await;
        }
    }

    pub fn usages(&self) -> Vec<Usage> {
        self.ledger.usages.lock().unwrap().clone()
    }

    /// What each prompt cost, in order.
    pub fn costs(&self) -> Vec<Cost> {
        self.ledger.costs.lock().unwrap().clone()
    }

    /// Asks the server to drain; the handle says how that went.
    pub fn shut_down(mut self) -> JoinHandle<Drained> {
        drop(self.shutdown.take());
        self.serving
    }
}

/// Two control tokens and a token for each byte; ChatML without extras.
pub fn text_model() -> TextModel {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut spare = 0x100..;
    let letters = (0..=255u8).map(|byte| match printable(byte) {
        true => char::from(byte).to_string(),
        false => char::from_u32(spare.next().unwrap()).unwrap().to_string(),
    });
    let tokens: Vec<String> =
        ["<|im_start|>".to_string(), "<|im_end|>".to_string()].into_iter().chain(letters).collect();
    let mut kinds = vec![TokenKind::Control; 2];
    kinds.resize(tokens.len(), TokenKind::Text);
    let parts = TokenizerParts {
        tokens,
        kinds,
        rules: Rules::Merges { merges: Vec::new(), pre_tokenizer: "gpt-2".into() },
        begin: None,
        adds_begin: false,
        unknown: None,
        ends: vec![END],
        takes_space_before: Vec::new(),
        takes_space_behind: Vec::new(),
    };
    let template = "{% for message in messages %}\
        {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\
        {% endfor %}{{ '<|im_start|>assistant\n' }}";
    let tokenizer = Tokenizer::new(parts).unwrap();
    let template = ChatTemplate::new(template.into(), &tokenizer, String::new(), "<|im_end|>".into()).unwrap();
    TextModel { tokenizer, template: Some(template) }
}

pub fn chat_body(change: Value) -> Value {
    merged(json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}), change)
}

pub fn completion_body(change: Value) -> Value {
    merged(json!({"model": "tiny", "prompt": "hi"}), change)
}

fn merged(mut base: Value, change: Value) -> Value {
    for (name, value) in change.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

pub async fn json_of(response: Response) -> Value {
    serde_json::from_slice(&response.bytes().await.unwrap()).unwrap()
}

/// The data of each event of a stream that has ended.
pub async fn events_of(response: Response) -> Vec<String> {
    let text = response.text().await.unwrap();
    assert!(text.ends_with("\n\n"), "{text:?}");
    text.trim_end().split("\n\n").map(|event| event.strip_prefix("data: ").expect("only data").to_owned()).collect()
}

/// The JSON of each event but `[DONE]`.
pub fn chunks_of(events: &[String]) -> Vec<Value> {
    events.iter().filter(|event| *event != "[DONE]").map(|event| serde_json::from_str(event).unwrap()).collect()
}
