//! A generation as the client sees it: events of tokens go in, text and an end come out.

use super::engine::Events;
use super::error::ApiError;
use super::metrics::Usage;
use super::scope::Scope;
use super::trace::attribute;
use crate::text::{Output, StopStrings, TextModel};
use starling_core::request::Finish;
use starling_serving::api::{Placed, StreamEvent, StreamToken};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// What happened next.
#[derive(Debug)]
pub enum Step {
    Placed(Placed),
    /// More of the answer, never empty.
    Text(String),
    /// The answer is complete.
    Ended(Finish),
    Failed(ApiError),
}

/// An open generation. Dropping it cancels what still runs.
pub struct Answer {
    /// `None` once nothing more is expected of them.
    events: Option<Box<dyn Events>>,
    text: Arc<TextModel>,
    output: Output,
    scope: Arc<Scope>,
    usage: Usage,
    last_tokens_at: Option<Instant>,
    prompt_param: &'static str,
    /// Steps known already; the oldest first, two at most.
    pending: Vec<Step>,
}

impl Answer {
    pub fn new(events: Box<dyn Events>, scope: Arc<Scope>, text: Arc<TextModel>, ask: Ask) -> Self {
        Self {
            events: Some(events),
            text,
            output: Output::new(ask.stops),
            scope,
            usage: Usage { prompt_tokens: ask.prompt_tokens, ..Usage::default() },
            last_tokens_at: None,
            prompt_param: ask.prompt_param,
            pending: Vec::new(),
        }
    }

    /// Waits until a rank runs the request: until then a failure can still be told by the status of the answer.
    ///
    /// # Errors
    /// When the request failed before.
    pub async fn placed(&mut self) -> Result<Option<Placed>, ApiError> {
        match poll_fn(|context| self.poll_step(context)).await {
            Step::Placed(placed) => Ok(Some(placed)),
            Step::Failed(error) => Err(error),
            step => {
                self.pending.insert(0, step);
                Ok(None)
            }
        }
    }

    /// The next step. Not to be called after `Ended` or `Failed`.
    pub async fn step(&mut self) -> Step {
        poll_fn(|context| self.poll_step(context)).await
    }

    /// As `step`.
    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Step> {
        loop {
            if !self.pending.is_empty() {
                return Poll::Ready(self.pending.remove(0));
            }
            let Some(events) = &mut self.events else {
                return Poll::Ready(Step::Failed(ApiError::Lost));
            };
            match std::task::ready!(events.poll_event(context)) {
                None => self.fail(ApiError::Lost),
                Some(StreamEvent::Failed(why)) => self.fail(ApiError::Refused(why, self.prompt_param)),
                Some(StreamEvent::Placed(placed)) => self.place(placed),
                Some(StreamEvent::Tokens(tokens)) => self.take(&tokens),
                Some(StreamEvent::Ended(finish)) => {
                    self.events = None;
                    let mut text = String::new();
                    let stopped = self.output.end(&mut text);
                    self.end(text, if stopped { Finish::Stop } else { finish });
                }
            }
        }
    }

    pub fn usage(&self) -> Usage {
        self.usage
    }

    fn place(&mut self, placed: Placed) {
        self.scope.set(attribute::NODE, &*placed.node);
        self.scope.set(attribute::RANK, placed.rank.0);
        self.scope.set(attribute::ATTEMPT, placed.attempt);
        self.pending.push(Step::Placed(placed));
    }

    fn take(&mut self, tokens: &[StreamToken]) {
        let Some(first) = tokens.first() else { return };
        self.time(tokens.len() as u32, first.cached_tokens);
        let mut text = String::new();
        for token in tokens {
            self.usage.generated_tokens += 1;
            if self.output.push(&self.text.tokenizer, token.token, &mut text) {
                if let Some(events) = self.events.take() {
                    events.finish();
                }
                return self.end(text, Finish::Stop);
            }
        }
        if !text.is_empty() {
            self.pending.push(Step::Text(text));
        }
    }

    fn time(&mut self, tokens: u32, cached_tokens: u32) {
        let now = Instant::now();
        match self.last_tokens_at.replace(now) {
            None => {
                let elapsed = self.scope.elapsed();
                self.usage.cached_tokens = cached_tokens.min(self.usage.prompt_tokens);
                self.scope.metrics().first_token(elapsed);
                self.scope.set(attribute::TIME_TO_FIRST_TOKEN_S, elapsed.as_secs_f64());
            }
            Some(before) => self.scope.metrics().next_tokens(now - before, tokens),
        }
    }

    fn end(&mut self, text: String, finish: Finish) {
        self.usage.finish = Some(finish);
        self.scope.set(attribute::FINISH_REASONS, finish_reason(finish));
        if !text.is_empty() {
            self.pending.push(Step::Text(text));
        }
        self.pending.push(Step::Ended(finish));
    }

    fn fail(&mut self, error: ApiError) {
        self.events = None;
        self.pending.push(Step::Failed(error));
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
