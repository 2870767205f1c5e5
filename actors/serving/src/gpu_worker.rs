//! A rank's GPU worker: owns the step planner, and the backend on its own OS thread.

use crate::clock::Clock;
use crate::directory::Seat;
use crate::observer::Observer;
use crate::outlet::Outlet;
use crate::wakeup::Wakeup;
use crate::{Addresses, Backends, LocalRank, RankAddresses, Settings, ingress, kv_manager, router};
use serde::{Deserialize, Serialize};
use starling_actors::{Actor, ActorError, Address, Context, SpanRecord, TraceContext};
use starling_core::batch::{Batch, ConfigError, Effect, Frame, Input};
use starling_core::fence::Expected;
use starling_core::ids::{AttemptKey, Incarnation, RequestNumber, Round};
use starling_core::ingress::Prompt;
use starling_core::kv;
use starling_core::rejection::Rejection;
use starling_core::replica::Decision;
use starling_core::round::{Begun, Lockstep, Turn};
use starling_core::step::{Sampled, Step};
use starling_gpu::{Backend, StepError};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From an ingress, here or elsewhere: a prompt for an attempt that is placed here, or will be by the next round. The
    /// trace of the message is the request's.
    Prompt(Box<Prompt>),
    /// Straight from the ingress, ahead of the round.
    Stop(AttemptKey),
    // The rest is from this node only.
    /// Placements on this rank, and attempts to end.
    #[serde(skip)]
    Decided(Vec<Decision>),
    #[serde(skip)]
    Kv { effects: Vec<kv::Effect>, stats: kv::Stats },
    #[serde(skip)]
    StepDone { thread: u64, outcome: Outcome },
    /// In lockstep: a round was applied, or a view installed; what it decided for this rank was said before.
    #[serde(skip)]
    Step(Turn),
    /// A new view: its ingresses and where they sit, and the attempts that the replica counts as open here. What runs and is not among
    /// them ends; its blocks stay as reusable prefixes.
    #[serde(skip)]
    Reconcile {
        ingresses: Arc<[(Incarnation, Seat)]>,
        open: Arc<[(AttemptKey, RequestNumber)]>,
        /// Whether what is open and not here is to be reported as lost.
        report_lost: bool,
    },
    #[serde(skip)]
    Tick,
}

/// What became of a step.
pub enum Outcome {
    Ran {
        sampled: Vec<Sampled>,
        tokens: usize,
        took: Duration,
    },
    Failed(StepError),
    /// The backend panicked: its thread is gone.
    Died(String),
}

/// A rank's load and blocks, for the next contribution.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankReport {
    pub active_tokens: u64,
    pub queued_prefill_tokens: u64,
    pub steps: u64,
    /// Of the pool that will be short first.
    pub kv: kv::PoolStats,
    /// In lockstep: the round that the rank stands before, and whether it has a step for it.
    pub boundary: Round,
    pub ready: bool,
}

/// A request on this rank, as its trace sees it.
struct Traced {
    trace: TraceContext,
    number: RequestNumber,
    admitted: SystemTime,
    first_token: Option<SystemTime>,
    prompt_tokens: usize,
    produced: usize,
}

pub struct GpuWorker {
    rank: LocalRank,
    settings: Arc<Settings>,
    batch: Batch,
    lockstep: Lockstep,
    expected: Expected<(Box<Prompt>, TraceContext)>,
    /// Where the ingresses of the view sit.
    ingresses: Arc<[(Incarnation, Seat)]>,
    /// The ways to the ingresses of other nodes, once something was sent there.
    outlets: BTreeMap<Seat, Outlet>,
    traced: BTreeMap<AttemptKey, Traced>,
    kv_stats: kv::Stats,
    backends: Arc<dyn Backends>,
    thread: Option<StepThread>,
    own: RankAddresses,
    addresses: Arc<Addresses>,
    observer: Arc<dyn Observer>,
    clock: Clock,
    wakeup: Wakeup,
}

impl GpuWorker {
    /// # Errors
    /// Budgets that no sequence fits; checked before the tree starts.
    pub fn new(rank: LocalRank, around: &crate::Surroundings, own: RankAddresses) -> Result<Self, ConfigError> {
        Ok(Self {
            rank,
            batch: Batch::new(around.settings.batch.clone())?,
            lockstep: Lockstep::new(around.settings.replica.cap),
            settings: Arc::clone(&around.settings),
            expected: Expected::default(),
            ingresses: Arc::default(),
            outlets: BTreeMap::new(),
            traced: BTreeMap::new(),
            kv_stats: kv::Stats::default(),
            backends: Arc::clone(&around.backends),
            thread: None,
            own,
            addresses: Arc::clone(&around.addresses),
            observer: Arc::clone(&around.observer),
            clock: around.clock,
            wakeup: Wakeup::default(),
        })
    }

    fn drive(&mut self, context: &Context<'_, Message>, input: Input) {
        let mut effects = Vec::new();
        self.batch.handle(self.clock.now_us(), input, &mut effects);
        // The KV manager gets its inputs in the order in which they were put out.
        let mut changes = Vec::new();
        for effect in effects {
            match effect {
                Effect::Kv(input @ kv::Input::Reserve { attempt, .. }) => {
                    self.tell_kv(context, &mut changes);
                    let trace = self.traced.get(&attempt).map(|t| t.trace).unwrap_or_default();
                    let _ = self.own.kv.tell(trace, kv_manager::Message::Reserve(input));
                }
                Effect::Kv(input) => changes.push(input),
                Effect::Emit(frames) => self.emit(context, frames),
                Effect::Refused { attempt, rejection } => self.refuse(context, attempt, rejection),
                // Counted by the planner; a stop that comes twice is no fault.
                Effect::Ignored(why) => tracing::debug!(rank = %self.rank, ?why, "ignored"),
            }
        }
        self.tell_kv(context, &mut changes);
    }

    /// The KV manager shares this actor's supervisor and fate: if it is down, so is this actor in a moment.
    fn tell_kv(&self, context: &Context<'_, Message>, changes: &mut Vec<kv::Input>) {
        if !changes.is_empty() {
            let changes = kv_manager::Message::Changes(std::mem::take(changes));
            let _ = self.own.kv.tell(context.trace(), changes);
        }
    }

    fn emit(&mut self, context: &Context<'_, Message>, frames: Vec<Frame>) {
        let finished: Vec<AttemptKey> = frames.iter().filter(|f| f.finished.is_some()).map(|f| f.attempt).collect();
        for frame in &frames {
            self.trace_frame(context, frame);
        }
        // One message a step and ingress.
        let mut by_ingress: BTreeMap<Incarnation, Vec<Frame>> = BTreeMap::new();
        for frame in frames {
            by_ingress.entry(frame.attempt.key.ingress).or_default().push(frame);
        }
        for (ingress, frames) in by_ingress {
            self.tell_ingress(context, ingress, ingress::Message::Frames(frames));
        }
        for attempt in finished {
            self.done(context, attempt);
        }
    }

    /// An ingress that is not in the view is gone, and its requests with it. One that is down here announces its streams
    /// again.
    fn tell_ingress(&mut self, context: &Context<'_, Message>, ingress: Incarnation, message: ingress::Message) {
        let Some((_, seat)) = self.ingresses.iter().find(|(known, _)| *known == ingress) else { return };
        if *seat == self.settings.seat() {
            let _ = self.addresses.ingress.tell(context.trace(), message);
            return;
        }
        if let Some(address) = self.addresses.ingresses.get(seat.0 as usize) {
            let outlet = self.outlets.entry(*seat).or_insert_with(|| Outlet::to(address.clone()));
            outlet.send(context.trace(), message);
        }
    }

    /// The attempt is over here: its slot is free.
    fn done(&mut self, context: &Context<'_, Message>, attempt: AttemptKey) {
        self.traced.remove(&attempt);
        let finished = router::Message::Finished { rank: self.rank, attempt };
        let _ = self.addresses.router.tell(context.trace(), finished);
    }

    fn refuse(&mut self, context: &Context<'_, Message>, attempt: AttemptKey, rejection: Rejection) {
        self.tell_ingress(context, attempt.key.ingress, ingress::Message::Refused { attempt, rejection });
        self.done(context, attempt);
    }

    fn trace_frame(&mut self, context: &Context<'_, Message>, frame: &Frame) {
        let Some(traced) = self.traced.get_mut(&frame.attempt) else {
            return;
        };
        traced.produced += frame.tokens.len();
        // Looked up for spans only, not for each frame.
        let rank = || self.addresses.traced(self.settings.seat(), self.rank);
        let now = SystemTime::now();
        let span = |name, start, attributes: Vec<(&'static str, starling_actors::AttributeValue)>| SpanRecord {
            parent: traced.trace,
            span_id: None,
            name,
            start,
            end: now,
            attributes,
        };
        let first_token = match traced.first_token {
            Some(at) => at,
            None => {
                context.span(span(
                    "prefill",
                    traced.admitted,
                    vec![
                        ("starling.actor", "gpu_worker".into()),
                        ("starling.rank", rank().into()),
                        ("starling.prompt_tokens", traced.prompt_tokens.into()),
                        ("starling.cached_tokens", frame.cached_tokens.into()),
                    ],
                ));
                now
            }
        };
        if frame.finished.is_some() {
            context.span(span(
                "decode",
                first_token,
                vec![
                    ("starling.actor", "gpu_worker".into()),
                    ("starling.rank", rank().into()),
                    ("starling.produced_tokens", traced.produced.into()),
                ],
            ));
        }
        traced.first_token = Some(first_token);
    }

    fn prompt(&mut self, context: &Context<'_, Message>, prompt: Box<Prompt>) {
        let (now_us, attempt) = (self.clock.now_us(), prompt.attempt);
        if let Some(((prompt, trace), number)) = self.expected.prompt(now_us, attempt, (prompt, context.trace())) {
            self.admit(context, (*prompt, trace), number);
        }
    }

    fn admit(
        &mut self,
        context: &Context<'_, Message>,
        (prompt, trace): (Prompt, TraceContext),
        number: RequestNumber,
    ) {
        let traced = Traced {
            trace,
            number,
            admitted: SystemTime::now(),
            first_token: None,
            prompt_tokens: prompt.tokens.len(),
            produced: 0,
        };
        self.traced.insert(prompt.attempt, traced);
        let sequence = prompt.into_sequence(number, self.settings.context_tokens_max);
        self.drive(context, Input::Admit(sequence));
    }

    fn decided(&mut self, context: &Context<'_, Message>, decisions: Vec<Decision>) {
        for decision in decisions {
            match decision {
                Decision::Placed { attempt, number, .. } => {
                    if let Some((prompt, trace)) = self.expected.placed(self.clock.now_us(), attempt, number) {
                        self.admit(context, (*prompt, trace), number);
                    }
                }
                Decision::Stop { attempt, .. } => self.stop(context, attempt),
                Decision::Enqueued { .. }
                | Decision::Seal { .. }
                | Decision::Probe { .. }
                | Decision::Rejected { .. } => {}
            }
        }
    }

    fn stop(&mut self, context: &Context<'_, Message>, attempt: AttemptKey) {
        match self.traced.remove(&attempt) {
            Some(traced) => {
                tracing::debug!(rank = %self.rank, number = %traced.number, "stopped");
                self.drive(context, Input::Cancel { attempt });
            }
            None => self.expected.stop(self.clock.now_us(), attempt),
        }
    }

    fn reconcile(&mut self, context: &Context<'_, Message>, open: &[(AttemptKey, RequestNumber)], report_lost: bool) {
        let open: BTreeSet<AttemptKey> = open.iter().map(|(attempt, _)| *attempt).collect();
        let running: BTreeSet<AttemptKey> = self.batch.attempts().collect();
        for attempt in running.difference(&open) {
            self.stop(context, *attempt);
        }
        self.expected.retain(|attempt| open.contains(attempt));
        let missing = open.difference(&running).filter(|attempt| !self.expected.expects(**attempt));
        let attempts: Vec<AttemptKey> = missing.copied().collect();
        if report_lost && !attempts.is_empty() {
            let lost = router::Message::Lost { rank: self.rank, attempts };
            let _ = self.addresses.router.tell(context.trace(), lost);
        }
    }

    fn step_done(&mut self, context: &Context<'_, Message>, outcome: Outcome) -> Result<(), ActorError> {
        match outcome {
            Outcome::Ran { sampled, tokens, took } => {
                self.observer.step(self.rank, tokens, took);
                self.lockstep.ended();
                self.drive(context, Input::StepDone { sampled });
                Ok(())
            }
            // The rank's KV is not to be trusted any more: start over, and let its requests go on elsewhere.
            Outcome::Failed(error) => Err(format!("step of {} failed: {error}", self.rank).into()),
            Outcome::Died(panic) => Err(format!("backend of {} died: {panic}", self.rank).into()),
        }
    }

    fn overdue(&mut self, context: &Context<'_, Message>) {
        let overdue = self.expected.overdue(self.clock.now_us(), self.settings.prompt_wait_us);
        (0..overdue.fenced).for_each(|_| self.observer.fenced(self.rank));
        if !overdue.lost.is_empty() {
            let lost = router::Message::Lost { rank: self.rank, attempts: overdue.lost };
            let _ = self.addresses.router.tell(context.trace(), lost);
        }
    }

    /// Sends the next step to the thread, unless one runs.
    fn next_step(&mut self) -> Result<(), ActorError> {
        let Some(step) = self.planned() else {
            return Ok(());
        };
        let thread = self.thread.as_ref().ok_or("no step thread")?;
        thread.steps.send(step).map_err(|_| "the step thread is gone")?;
        Ok(())
    }

    /// What may run now. In lockstep that is one step a turn. A padded rank computes nothing: these backends have no
    /// collectives that would wait for it, so that its place in the round is kept and counted is all there is to it.
    fn planned(&mut self) -> Option<Step> {
        if !self.settings.rounds.lockstep {
            return self.batch.plan();
        }
        match self.lockstep.begin(|| self.batch.plan()) {
            Begun::Step(step) => Some(step),
            Begun::Nothing => None,
            Begun::Dummy => {
                self.observer.padded(self.rank);
                None
            }
        }
    }

    fn report(&self, context: &Context<'_, Message>) {
        let (load, stats) = (self.batch.load(), self.batch.stats());
        self.observer.rank(self.rank, &stats, &self.kv_stats);
        let report = RankReport {
            active_tokens: load.active_tokens,
            queued_prefill_tokens: load.queued_prefill_tokens,
            steps: stats.steps,
            kv: self.kv_stats.tightest(),
            boundary: self.lockstep.boundary(),
            ready: self.settings.rounds.lockstep && self.batch.has_step(),
        };
        let _ = self.addresses.router.tell(context.trace(), router::Message::Report { rank: self.rank, report });
    }
}

impl Actor for GpuWorker {
    type Message = Message;

    fn started(&mut self, context: &mut Context<'_, Message>) -> Result<(), ActorError> {
        let backend = self.backends.backend(self.rank)?;
        self.thread = Some(StepThread::start(self.rank, backend, context.address().clone())?);
        // The pool is empty: gauges say so before the first request.
        let _ = self.own.kv.tell(context.trace(), kv_manager::Message::Changes(Vec::new()));
        // A router that is not up yet has placed nothing here.
        let _ = self.addresses.router.tell(context.trace(), router::Message::RankStarted(self.rank));
        Ok(())
    }

    fn handle(&mut self, context: &mut Context<'_, Message>, message: Message) -> Result<(), ActorError> {
        match message {
            Message::Prompt(prompt) => self.prompt(context, prompt),
            Message::Decided(decisions) => self.decided(context, decisions),
            Message::Stop(attempt) => self.stop(context, attempt),
            Message::Kv { effects, stats } => {
                self.kv_stats = stats;
                for effect in effects {
                    self.drive(context, Input::Kv(effect));
                }
            }
            Message::StepDone { thread, outcome } => {
                // A thread of an earlier life may still finish its step.
                if self.thread.as_ref().is_some_and(|t| t.id == thread) {
                    self.step_done(context, outcome)?;
                }
            }
            Message::Step(turn) => self.lockstep.turn(turn),
            Message::Reconcile { ingresses, open, report_lost } => {
                self.ingresses = ingresses;
                self.reconcile(context, &open, report_lost);
            }
            Message::Tick => {
                self.wakeup.fired();
                self.overdue(context);
            }
        }
        self.next_step()?;
        self.report(context);
        let due = self.expected.poll_timeout(self.settings.prompt_wait_us);
        self.wakeup.arm(context, &self.clock, due, Message::Tick);
        Ok(())
    }

    fn kind(message: &Message) -> &'static str {
        match message {
            Message::Prompt(_) => "prompt",
            Message::Decided(_) => "decided",
            Message::Stop(_) => "stop",
            Message::Kv { .. } => "kv",
            Message::StepDone { .. } => "step_done",
            Message::Step(_) => "step",
            Message::Reconcile { .. } => "reconcile",
            Message::Tick => "tick",
        }
    }
}

/// The OS thread that runs a rank's steps, one at a time. It ends when its actor does.
struct StepThread {
    id: u64,
    steps: SyncSender<Step>,
}

/// Tells the threads of successive lives of a worker apart.
static THREADS: AtomicU64 = AtomicU64::new(1);

impl StepThread {
    fn start(rank: LocalRank, backend: Box<dyn Backend>, worker: Address<Message>) -> std::io::Result<Self> {
        let id = THREADS.fetch_add(1, Ordering::Relaxed);
        // The planner has one step in flight at most.
        let (steps, inbox) = sync_channel(1);
        std::thread::Builder::new()
            .name(format!("{rank}-step"))
            .spawn(move || run_steps(id, backend, &inbox, &worker))?;
        Ok(Self { id, steps })
    }
}

fn run_steps(thread: u64, mut backend: Box<dyn Backend>, inbox: &Receiver<Step>, worker: &Address<Message>) {
    while let Ok(step) = inbox.recv() {
        let begun = Instant::now();
        let mut sampled = Vec::new();
        // The backend is not used again after a panic.
        let ran = catch_unwind(AssertUnwindSafe(|| backend.step(&step, &mut sampled)));
        let (took, tokens) = (begun.elapsed(), step.tokens());
        // It may share tokens with the planner, which adds to them when it hears of the outcome.
        drop(step);
        let outcome = match ran {
            Ok(Ok(())) => Outcome::Ran { sampled, tokens, took },
            Ok(Err(error)) => Outcome::Failed(error),
            Err(panic) => Outcome::Died(panic_text(&*panic)),
        };
        let died = matches!(outcome, Outcome::Died(_));
        let told = worker.tell(TraceContext::default(), Message::StepDone { thread, outcome });
        if died || told.is_err() {
            return;
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".to_owned())
}
