//! A generation as the client sees it: events of tokens go in, text and ends come out, of one choice or several.

use super::engine::{Engine, Events};
use super::error::ApiError;
use super::logprobs::{Scores, TokenScore};
use super::metrics::Usage;
use super::scope::Scope;
use super::trace::attribute;
use crate::text::{Output, StopStrings, TextModel};
use starling_core::rejection::Rejection;
use starling_core::request::Finish;
use starling_serving::api::{Placed, StreamEvent, StreamToken, Submission};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// What happened next.
#[derive(Debug)]
pub enum Step {
    Placed(Placed),
    /// More of a choice, never empty.
    More {
        choice: u32,
        piece: Piece,
    },
    /// A choice is complete.
    Ended {
        choice: u32,
        finish: Finish,
    },
    /// Every choice is.
    Done,
    Failed(ApiError),
}

/// A piece of a choice's text, and what is told of the tokens in it.
#[derive(Debug, Default)]
pub struct Piece {
    pub text: String,
    /// `None` unless they were asked for.
    pub scores: Option<Vec<TokenScore>>,
}

impl Piece {
    pub fn append(&mut self, more: Self) {
        self.text.push_str(&more.text);
        if let Some(more) = more.scores {
            self.scores.get_or_insert_default().extend(more);
        }
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.scores.as_ref().is_none_or(Vec::is_empty)
    }
}

/// An open generation. Dropping it cancels what still runs.
pub struct Answer {
    choices: Vec<Choice>,
    /// Which one is looked at next, so that none waits for the others.
    next: usize,
    /// Choices that are not submitted yet: they follow when the first has computed the prompt, whose blocks they then share.
    later: Vec<Submission>,
    engine: Arc<dyn Engine>,
    text: Arc<TextModel>,
    ask: Ask,
    scope: Arc<Scope>,
    usage: Usage,
    finishes: Vec<Finish>,
    started: bool,
    /// Steps known already; the oldest first.
    pending: VecDeque<Step>,
}

struct Choice {
    /// `None` once nothing more is expected of them.
    events: Option<Box<dyn Events>>,
    output: Output,
    scores: Option<Scores>,
    tokens: u32,
    last_tokens_at: Option<Instant>,
}

impl Answer {
    /// Submits the first of the choices; the others follow.
    ///
    /// # Errors
    /// When it is refused at once.
    pub fn start(
        engine: Arc<dyn Engine>,
        mut submissions: Vec<Submission>,
        (scope, text): (Arc<Scope>, Arc<TextModel>),
        ask: Ask,
    ) -> Result<Self, ApiError> {
        let later = submissions.split_off(1.min(submissions.len()));
        let mut answer = Self {
            choices: Vec::with_capacity(later.len() + 1),
            next: 0,
            later: Vec::new(),
            engine,
            text,
            scope,
            usage: Usage { prompt_tokens: ask.prompt_tokens, ..Usage::default() },
            ask,
            finishes: Vec::new(),
            started: false,
            pending: VecDeque::new(),
        };
        for first in submissions {
            answer.submit(first).map_err(|why| ApiError::Refused(why, answer.ask.prompt_param))?;
        }
        answer.later = later;
        Ok(answer)
    }

    fn submit(&mut self, submission: Submission) -> Result<(), Rejection> {
        let events = Some(self.engine.submit(submission)?);
        let scores = self.ask.scores.then(Scores::default);
        self.choices.push(Choice { events, output: Output::default(), scores, tokens: 0, last_tokens_at: None });
        Ok(())
    }

    /// Waits until a rank runs the request: until then a failure can still be told by the status of the answer.
    ///
    /// # Errors
    /// When the request failed before.
    pub async fn placed(&mut self) -> Result<Option<Placed>, ApiError> {
        match self.step().await {
            Step::Placed(placed) => Ok(Some(placed)),
            Step::Failed(error) => Err(error),
            step => {
                self.pending.push_front(step);
                Ok(None)
            }
        }
    }

    /// The next step. Not to be called after `Done` or `Failed`.
    pub async fn step(&mut self) -> Step {
        poll_fn(|context| self.poll_step(context)).await
    }

    /// As `step`.
    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Step> {
        loop {
            if let Some(step) = self.pending.pop_front() {
                return Poll::Ready(step);
            }
            let (choice, event) = std::task::ready!(self.poll_event(context));
            match event {
                None => self.fail(ApiError::Lost),
                Some(StreamEvent::Failed(why)) => self.fail(ApiError::Refused(why, self.ask.prompt_param)),
                Some(StreamEvent::Placed(placed)) => self.place(choice, placed),
                Some(StreamEvent::Tokens(tokens)) => self.take(choice, &tokens),
                Some(StreamEvent::Ended(finish)) => self.end_of_events(choice, finish),
            }
        }
    }

    /// The next event of whichever choice has one.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<(usize, Option<StreamEvent>)> {
        let count = self.choices.len();
        if self.choices.iter().all(|choice| choice.events.is_none()) {
            return Poll::Ready((0, None));
        }
        for _ in 0..count {
            let at = self.next;
            self.next = (at + 1) % count;
            if let Some(events) = &mut self.choices[at].events
                && let Poll::Ready(event) = events.poll_event(context)
            {
                return Poll::Ready((at, event));
            }
        }
        Poll::Pending
    }

    pub fn usage(&self) -> Usage {
        self.usage
    }

    fn place(&mut self, choice: usize, placed: Placed) {
        if choice == 0 {
            self.scope.set(attribute::NODE, &*placed.node);
            self.scope.set(attribute::RANK, placed.rank.0);
            self.scope.set(attribute::ATTEMPT, placed.attempt);
        }
        self.pending.push_back(Step::Placed(placed));
    }

    fn take(&mut self, at: usize, tokens: &[StreamToken]) {
        let Some(first) = tokens.first() else { return };
        self.time(at, tokens.len() as u32, first.cached_tokens);
        self.follow();
        let choice = &mut self.choices[at];
        let mut text = String::new();
        let mut stopped = false;
        for token in tokens {
            self.usage.generated_tokens += 1;
            if choice.tokens == self.ask.min_tokens {
                choice.output.look_for(self.ask.stops.clone());
            }
            choice.tokens += 1;
            if let Some(scores) = &mut choice.scores {
                scores.push(&token.drawn, &self.text.tokenizer, (&choice.output, &text));
            }
            stopped = choice.output.push(&self.text.tokenizer, token.drawn.token, &mut text);
            if stopped {
                break;
            }
        }
        let scores = choice.scores.as_mut().map(|scores| scores.go_with(&text));
        self.more(at, Piece { text, scores });
        if stopped {
            if let Some(events) = self.choices[at].events.take() {
                events.finish();
            }
            self.end(at, Finish::Stop);
        }
    }

    fn end_of_events(&mut self, at: usize, finish: Finish) {
        let choice = &mut self.choices[at];
        choice.events = None;
        let mut text = String::new();
        let stopped = choice.output.end(&mut text);
        let scores = choice.scores.as_mut().map(|scores| {
            let mut out = scores.go_with(&text);
            // What a stop string cut off has no text.
            out.extend(scores.rest().into_iter().filter(|_| !stopped));
            out
        });
        self.more(at, Piece { text, scores });
        self.follow();
        self.end(at, if stopped { Finish::Stop } else { finish });
    }

    /// The prompt is computed: its blocks are there for the other choices.
    fn follow(&mut self) {
        for submission in std::mem::take(&mut self.later) {
            if let Err(why) = self.submit(submission) {
                return self.fail(ApiError::Refused(why, self.ask.prompt_param));
            }
        }
    }

    fn time(&mut self, at: usize, tokens: u32, cached_tokens: u32) {
        let now = Instant::now();
        let before = self.choices[at].last_tokens_at.replace(now);
        if !std::mem::replace(&mut self.started, true) {
            let elapsed = self.scope.elapsed();
            self.usage.cached_tokens = cached_tokens.min(self.usage.prompt_tokens);
            self.scope.metrics().first_token(elapsed);
            self.scope.set(attribute::TIME_TO_FIRST_TOKEN_S, elapsed.as_secs_f64());
        }
        if let Some(before) = before {
            self.scope.metrics().next_tokens(now - before, tokens);
        }
    }

    fn more(&mut self, at: usize, piece: Piece) {
        if !piece.is_empty() {
            self.pending.push_back(Step::More { choice: at as u32, piece });
        }
    }

    fn end(&mut self, at: usize, finish: Finish) {
        self.pending.push_back(Step::Ended { choice: at as u32, finish });
        self.finishes.push(finish);
        if self.finishes.len() == self.choices.len() + self.later.len() {
            let reasons = self.finishes.iter().map(|finish| finish_reason(*finish)).collect::<Vec<_>>();
            self.scope.set(attribute::FINISH_REASONS, reasons.join(","));
            let cut = self.finishes.contains(&Finish::Length);
            self.usage.finish = Some(if cut { Finish::Length } else { Finish::Stop });
            self.pending.push_back(Step::Done);
        }
    }

    fn fail(&mut self, error: ApiError) {
        self.choices.iter_mut().for_each(|choice| choice.events = None);
        self.later.clear();
        self.pending.push_back(Step::Failed(error));
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.scope.set(attribute::INPUT_TOKENS, self.usage.prompt_tokens);
        self.scope.set(attribute::OUTPUT_TOKENS, self.usage.generated_tokens);
        self.scope.set(attribute::CACHED_TOKENS, self.usage.cached_tokens);
        self.scope.metrics().generated(&self.usage);
    }
}

/// What an answer has to know of its request.
pub struct Ask {
    pub stops: StopStrings,
    pub prompt_tokens: u32,
    /// Tokens of a choice in which no stop string is looked for.
    pub min_tokens: u32,
    /// Whether what the model thought of its tokens is told.
    pub scores: bool,
    /// The field that errors about the prompt name.
    pub prompt_param: &'static str,
}

/// OpenAI's word.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
