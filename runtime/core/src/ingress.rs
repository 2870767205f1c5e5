//! The ingress: it keeps the prompt, the seed and all generated tokens of each open request, it alone ends a request,
//! and it alone decides which frames a client sees.
//!
//! A frame is taken only if its attempt is the current one and not sealed, and only from the position where the held
//! tokens end; so a client never sees a token twice, and never one that a dead rank may not have meant.
//!
//! # Invariants
//! - I1: an open request is in the backlog, announced, placed or sealed; the announced ones are counted.
//! - I2: every submission is answered by exactly one of `Ended`, `Failed`, unless its client left.
//! - I3: produced tokens never exceed `max_new_tokens`.

use crate::admission::HEAD_TOKENS;
use crate::batch::{Frame, Sequence};
use crate::ids::{Attempt, AttemptKey, ConversationKey, Incarnation, RankId, RequestKey, RequestNumber, TokenId};
use crate::kv::identity::{PromptKeys, Scope};
use crate::rejection::Rejection;
use crate::request::{Finish, Generation};
use crate::round::{Arrival, Chain, Entry, Explicit};
use crate::step::Drawn;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Names a submission for its whole life, also when it is announced again under a new key. Given by the caller, never
/// twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ticket(pub u64);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Requests that wait in the replica at most; the rest stays in the backlog.
    pub announced_requests_max: u32,
    pub backlog_requests_max: u32,
    pub backlog_tokens_max: u64,
    /// A request that stays in the backlog for longer is refused; one that was announced too, while the cluster stands still.
    pub announce_wait_us: u64,
    /// A stream whose rank is gone ends after this time, while the cluster stands still.
    pub stream_wait_us: u64,
    /// Set where the routing policy asks ranks for prefix matches: arrivals then carry the prompt's block keys, of blocks
    /// of this many tokens, and its first tokens.
    pub probe_block_tokens: Option<u32>,
}

impl Default for Config {
    /// The bounds of the protocol.
    fn default() -> Self {
        Self {
            announced_requests_max: 1024,
            backlog_requests_max: 8192,
            backlog_tokens_max: 64 << 20,
            announce_wait_us: 2_000_000,
            stream_wait_us: 30_000_000,
            probe_block_tokens: None,
        }
    }
}

/// A request as a client hands it in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Submission {
    pub ticket: Ticket,
    pub prompt: Arc<[TokenId]>,
    /// Of the prompt's leading blocks; what is missing is computed when it is asked for.
    pub keys: PromptKeys,
    /// Tokens that the client already has: more than none when a stream goes on after its ingress failed.
    pub produced: Vec<TokenId>,
    pub generation: Generation,
    pub conversation: Option<ConversationKey>,
    pub sub_agent: Option<ConversationKey>,
    pub explicit: Option<Explicit>,
    pub priority: f64,
    /// Salt of the block keys: blocks are shared within a tenant only.
    pub tenant: u64,
    /// Which of the answers to one question; the first is 0. Part of every draw.
    pub child: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Submit(Box<Submission>),
    Frame(Frame),
    Placed {
        attempt: AttemptKey,
        rank: RankId,
    },
    Seal {
        attempt: AttemptKey,
    },
    Rejected {
        key: RequestKey,
        rejection: Rejection,
    },
    /// The rank that was chosen cannot run it, nor can any other.
    Refused {
        attempt: AttemptKey,
        rejection: Rejection,
    },
    /// The client left.
    Cancel(Ticket),
    /// The edge found a stop string in the text.
    Finish(Ticket),
    /// The rank could not be reached with the prompt.
    PromptUndelivered {
        attempt: AttemptKey,
    },
    /// The node is in a new cluster: every open request is announced again.
    NewCluster(Incarnation),
    /// Whether rounds complete; if not, whom they wait for.
    Standstill(Option<String>),
    /// The node of these ranks cannot be reached: what ran there goes on elsewhere, or there from the tokens held here.
    Unreachable(Vec<RankId>),
    /// No new submissions.
    Drain,
    Tick,
}

/// A prompt on its way to the rank that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    pub attempt: AttemptKey,
    /// Prompt and produced tokens.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens` were produced by earlier attempts.
    pub produced: u32,
    pub generation: Generation,
    pub tenant: u64,
    /// Of which the request is a turn.
    pub conversation: Option<ConversationKey>,
    pub child: u32,
}

impl Prompt {
    /// What the rank's planner runs.
    pub fn into_sequence(self, number: RequestNumber, context_tokens_max: u32) -> Sequence {
        Sequence {
            attempt: self.attempt,
            number,
            child: self.child,
            scope: Scope { tenant: self.tenant, adapter: None },
            conversation: self.conversation,
            tokens: self.tokens,
            produced_before: self.produced,
            generation: self.generation,
            context_tokens_max,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// To the next contribution.
    Announce(Entry),
    /// To the chosen rank.
    Prompt {
        ticket: Ticket,
        rank: RankId,
        prompt: Prompt,
    },
    /// Straight to the rank, ahead of the round that makes it agreed.
    Stop {
        rank: RankId,
        attempt: AttemptKey,
    },
    // To the client.
    Placed {
        ticket: Ticket,
        rank: RankId,
        attempt: Attempt,
    },
    Tokens {
        ticket: Ticket,
        tokens: Vec<Drawn>,
        cached_tokens: u32,
    },
    Ended {
        ticket: Ticket,
        finish: Finish,
    },
    Failed {
        ticket: Ticket,
        rejection: Rejection,
    },
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Backlog {
        since_us: u64,
    },
    Announced,
    Placed {
        rank: RankId,
        attempt: Attempt,
    },
    /// The attempt failed; the request was resumed and waits for the next one.
    Sealed {
        attempt: Attempt,
        since_us: u64,
    },
}

#[derive(Clone, Debug)]
struct Open {
    submission: Submission,
    state: State,
}

impl Open {
    fn tokens(&self) -> u64 {
        (self.submission.prompt.len() + self.submission.produced.len()) as u64
    }

    /// Why the request is over although no rank said so: the last frame came without its end.
    fn is_over(&self) -> Option<Finish> {
        let (produced, generation) = (&self.submission.produced, &self.submission.generation);
        if produced.last().is_some_and(|t| generation.stop_tokens.contains(t)) {
            return Some(Finish::Stop);
        }
        (produced.len() as u64 >= u64::from(generation.max_new_tokens)).then_some(Finish::Length)
    }
}

/// Things worth counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Frames of an attempt that is not current, or of an unknown request.
    pub frames_fenced: u64,
    /// Tokens that a frame brought again.
    pub tokens_overlapping: u64,
    /// Frames that skipped tokens: the request was resumed.
    pub frames_with_gap: u64,
    pub resumed: u64,
}

/// The machine of one node's ingress.
#[derive(Clone, Debug)]
pub struct Machine {
    config: Config,
    /// `None` until the node is in a cluster: nothing is announced before.
    me: Option<Incarnation>,
    open: BTreeMap<Ticket, Open>,
    backlog: VecDeque<Ticket>,
    backlog_tokens: u64,
    announced: u32,
    draining: bool,
    /// No round completes: since when, and whom it waits for.
    standstill: Option<(u64, String)>,
    counts: Counts,
}

impl Machine {
    /// An ingress that announces nothing before it is told its cluster (`NewCluster`).
    pub fn new(config: Config) -> Self {
        Self {
            config,
            me: None,
            open: BTreeMap::new(),
            backlog: VecDeque::new(),
            backlog_tokens: 0,
            announced: 0,
            draining: false,
            standstill: None,
            counts: Counts::default(),
        }
    }

    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Submit(submission) => self.submit(now_us, *submission, out),
            Input::Frame(frame) => self.frame(now_us, frame, out),
            Input::Placed { attempt, rank } => self.placed(attempt, rank, out),
            Input::Seal { attempt } | Input::PromptUndelivered { attempt } => self.seal(now_us, attempt, out),
            Input::Rejected { key, rejection } => {
                if let Some(ticket) = self.ticket(key) {
                    self.close(ticket);
                    out.push(Effect::Failed { ticket, rejection });
                }
            }
            Input::Refused { attempt, rejection } => self.refused(attempt, rejection, out),
            Input::Cancel(ticket) => self.leave(ticket, Entry::Cancel, out),
            Input::Finish(ticket) => self.leave(ticket, Entry::Ended, out),
            Input::NewCluster(incarnation) => self.new_cluster(incarnation, out),
            Input::Standstill(waits_for) => {
                let since_us = self.standstill.as_ref().map_or(now_us, |(since_us, _)| *since_us);
                self.standstill = waits_for.map(|who| (since_us, who));
            }
            Input::Unreachable(ranks) => self.unreachable(now_us, &ranks, out),
            Input::Drain => self.draining = true,
            Input::Tick => {}
        }
        self.expire(now_us, out);
        self.announce_backlog(out);
    }

    /// When the next request must be refused: the oldest of the backlog, or what waits while the cluster stands still.
    pub fn poll_timeout(&self) -> Option<u64> {
        let waiting =
            self.standstill.iter().flat_map(|_| self.open.values()).filter_map(|open| self.due_us(&open.state));
        self.backlog_due_us().into_iter().chain(waiting).min()
    }

    fn backlog_due_us(&self) -> Option<u64> {
        self.backlog.iter().find_map(|ticket| match self.open.get(ticket)?.state {
            State::Backlog { since_us } => Some(since_us + self.config.announce_wait_us),
            _ => None,
        })
    }

    /// When a request that waits for a round is given up, if none completes.
    fn due_us(&self, state: &State) -> Option<u64> {
        let (still_us, _) = self.standstill.as_ref()?;
        match state {
            State::Announced => Some(still_us + self.config.announce_wait_us),
            State::Sealed { since_us, .. } => Some(still_us.max(since_us) + self.config.stream_wait_us),
            State::Backlog { .. } | State::Placed { .. } => None,
        }
    }

    pub fn open_len(&self) -> usize {
        self.open.len()
    }

    pub fn backlog_len(&self) -> usize {
        self.backlog.len()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn key(&self, ticket: Ticket) -> RequestKey {
        RequestKey { ingress: self.me.unwrap_or_default(), seq: ticket.0 }
    }

    fn ticket(&self, key: RequestKey) -> Option<Ticket> {
        (Some(key.ingress) == self.me).then_some(Ticket(key.seq)).filter(|t| self.open.contains_key(t))
    }

    fn submit(&mut self, now_us: u64, submission: Submission, out: &mut Vec<Effect>) {
        let ticket = submission.ticket;
        if let Err(rejection) = self.vet(&submission) {
            out.push(Effect::Failed { ticket, rejection });
            return;
        }
        let open = Open { submission, state: State::Backlog { since_us: now_us } };
        if let Some(finish) = open.is_over() {
            out.push(Effect::Ended { ticket, finish });
            return;
        }
        self.backlog_tokens += open.tokens();
        self.open.insert(ticket, open);
        self.backlog.push_back(ticket);
    }

    fn vet(&self, submission: &Submission) -> Result<(), Rejection> {
        if self.draining {
            return Err(Rejection::Draining);
        }
        if submission.prompt.is_empty() {
            return Err(Rejection::EmptyPrompt);
        }
        if let Some((_, waits_for)) = &self.standstill {
            return Err(Rejection::Standstill { waits_for: waits_for.clone() });
        }
        if self.open.contains_key(&submission.ticket) {
            return Err(Rejection::DuplicateRequest { key: self.key(submission.ticket) });
        }
        let (requests, limit) = (self.backlog.len() as u32, self.config.backlog_requests_max);
        if requests >= limit {
            return Err(Rejection::BacklogFull { requests, limit });
        }
        let tokens = self.backlog_tokens + submission.prompt.len() as u64;
        let limit = self.config.backlog_tokens_max;
        if tokens > limit {
            return Err(Rejection::BacklogTokensFull { tokens, limit });
        }
        Ok(())
    }

    fn announce_backlog(&mut self, out: &mut Vec<Effect>) {
        while self.me.is_some()
            && self.standstill.is_none()
            && self.announced < self.config.announced_requests_max
            && let Some(ticket) = self.backlog.pop_front()
        {
            let key = self.key(ticket);
            let Some(open) = self.open.get_mut(&ticket) else { continue };
            self.backlog_tokens -= open.tokens();
            open.state = State::Announced;
            self.announced += 1;
            let arrival = arrival(key, &open.submission, self.config.probe_block_tokens);
            out.push(Effect::Announce(Entry::Arrival(Box::new(arrival))));
        }
    }

    /// Of the backlog only the front can be overdue: it is in order of arrival.
    fn expire(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        self.give_up(now_us, out);
        while self.backlog_due_us().is_some_and(|due| due <= now_us)
            && let Some(ticket) = self.backlog.front().copied()
        {
            self.close(ticket);
            let waited_ms = self.config.announce_wait_us / 1000;
            out.push(Effect::Failed { ticket, rejection: Rejection::AnnounceTimeout { waited_ms } });
        }
    }

    /// Ends what has waited for a round for too long; a round that completes later hears that it is gone.
    fn give_up(&mut self, now_us: u64, out: &mut Vec<Effect>) {
        let Some((_, waits_for)) = &self.standstill else { return };
        let rejection = Rejection::Standstill { waits_for: waits_for.clone() };
        let overdue = |open: &Open| self.due_us(&open.state).is_some_and(|due| due <= now_us);
        let late: Vec<Ticket> = self.open.iter().filter(|(_, open)| overdue(open)).map(|(ticket, _)| *ticket).collect();
        for ticket in late {
            self.leave(ticket, Entry::Cancel, out);
            out.push(Effect::Failed { ticket, rejection: rejection.clone() });
        }
    }

    fn unreachable(&mut self, now_us: u64, ranks: &[RankId], out: &mut Vec<Effect>) {
        let lost = |(ticket, open): (&Ticket, &Open)| match open.state {
            State::Placed { rank, attempt } if ranks.contains(&rank) => {
                Some(AttemptKey { key: self.key(*ticket), attempt })
            }
            _ => None,
        };
        let lost: Vec<AttemptKey> = self.open.iter().filter_map(lost).collect();
        for attempt in lost {
            self.seal(now_us, attempt, out);
        }
    }

    fn placed(&mut self, attempt: AttemptKey, rank: RankId, out: &mut Vec<Effect>) {
        let Some(ticket) = self.ticket(attempt.key) else { return };
        let Some(open) = self.open.get_mut(&ticket) else { return };
        match open.state {
            State::Announced => self.announced -= 1,
            State::Placed { attempt: known, .. } | State::Sealed { attempt: known, .. } if known < attempt.attempt => {}
            // Never announced in this cluster, or an attempt that is over.
            State::Backlog { .. } | State::Placed { .. } | State::Sealed { .. } => return,
        }
        open.state = State::Placed { rank, attempt: attempt.attempt };
        let submission = &open.submission;
        let tokens: Vec<TokenId> = submission.prompt.iter().chain(&submission.produced).copied().collect();
        let prompt = Prompt {
            attempt,
            tokens,
            produced: submission.produced.len() as u32,
            generation: submission.generation.clone(),
            tenant: submission.tenant,
            conversation: submission.conversation,
            child: submission.child,
        };
        out.push(Effect::Placed { ticket, rank, attempt: attempt.attempt });
        out.push(Effect::Prompt { ticket, rank, prompt });
    }

    fn frame(&mut self, now_us: u64, mut frame: Frame, out: &mut Vec<Effect>) {
        let ticket = self.ticket(frame.attempt.key);
        let current =
            |open: &&mut Open| matches!(open.state, State::Placed { attempt, .. } if attempt == frame.attempt.attempt);
        let Some((ticket, open)) = ticket.and_then(|t| self.open.get_mut(&t).filter(current).map(|open| (t, open)))
        else {
            self.counts.frames_fenced += 1;
            return;
        };
        let held = open.submission.produced.len() as u64;
        let first = u64::from(frame.first_position);
        if first > held {
            self.counts.frames_with_gap += 1;
            self.seal(now_us, frame.attempt, out);
            return;
        }
        let overlap = ((held - first) as usize).min(frame.tokens.len());
        self.counts.tokens_overlapping += overlap as u64;
        frame.tokens.drain(..overlap);
        let room = u64::from(open.submission.generation.max_new_tokens).saturating_sub(held) as usize;
        frame.tokens.truncate(room);
        open.submission.produced.extend(frame.tokens.iter().map(|drawn| drawn.token));
        if !frame.tokens.is_empty() {
            out.push(Effect::Tokens { ticket, tokens: frame.tokens, cached_tokens: frame.cached_tokens });
        }
        if let Some(finish) = frame.finished {
            self.end(ticket, finish, out);
        }
    }

    /// Ends a request whose rank is done, or has nothing more to say.
    fn end(&mut self, ticket: Ticket, finish: Finish, out: &mut Vec<Effect>) {
        self.close(ticket);
        out.push(Effect::Announce(Entry::Ended(self.key(ticket))));
        out.push(Effect::Ended { ticket, finish });
    }

    fn refused(&mut self, attempt: AttemptKey, rejection: Rejection, out: &mut Vec<Effect>) {
        let Some(ticket) = self.ticket(attempt.key) else { return };
        let current = |open: &Open| matches!(open.state, State::Placed { attempt: a, .. } if a == attempt.attempt);
        if self.open.get(&ticket).is_some_and(current) {
            self.close(ticket);
            out.push(Effect::Announce(Entry::Ended(attempt.key)));
            out.push(Effect::Failed { ticket, rejection });
        }
    }

    /// Takes no more of the attempt's frames and asks for another, from the tokens held.
    fn seal(&mut self, now_us: u64, attempt: AttemptKey, out: &mut Vec<Effect>) {
        let Some(ticket) = self.ticket(attempt.key) else { return };
        let Some(open) = self.open.get_mut(&ticket) else { return };
        if !matches!(open.state, State::Placed { attempt: current, .. } if current == attempt.attempt) {
            return;
        }
        if let Some(finish) = open.is_over() {
            self.end(ticket, finish, out);
            return;
        }
        open.state = State::Sealed { attempt: attempt.attempt, since_us: now_us };
        self.counts.resumed += 1;
        let produced = open.submission.produced.len() as u32;
        out.push(Effect::Announce(Entry::Resume { key: attempt.key, attempt: attempt.attempt, produced }));
    }

    /// The client left, or the edge ended the request: its rank hears it at once, everyone else in a round.
    fn leave(&mut self, ticket: Ticket, entry: impl Fn(RequestKey) -> Entry, out: &mut Vec<Effect>) {
        let key = self.key(ticket);
        let Some(open) = self.close(ticket) else { return };
        match open.state {
            State::Backlog { .. } => return,
            State::Placed { rank, attempt } => {
                out.push(Effect::Stop { rank, attempt: AttemptKey { key, attempt } });
            }
            State::Announced | State::Sealed { .. } => {}
        }
        out.push(Effect::Announce(entry(key)));
    }

    fn close(&mut self, ticket: Ticket) -> Option<Open> {
        let open = self.open.remove(&ticket)?;
        match open.state {
            State::Backlog { .. } => {
                self.backlog.retain(|t| *t != ticket);
                self.backlog_tokens -= open.tokens();
            }
            State::Announced => self.announced -= 1,
            State::Placed { .. } | State::Sealed { .. } => {}
        }
        Some(open)
    }

    /// What the old cluster knew is void: all open requests stand in the backlog again, oldest first. They have been
    /// accepted, so the backlog's limits do not turn them away.
    fn new_cluster(&mut self, incarnation: Incarnation, out: &mut Vec<Effect>) {
        self.me = Some(incarnation);
        self.announced = 0;
        let over: Vec<(Ticket, Finish)> =
            self.open.iter().filter_map(|(t, open)| open.is_over().map(|f| (*t, f))).collect();
        for (ticket, finish) in over {
            self.open.remove(&ticket);
            out.push(Effect::Ended { ticket, finish });
        }
        self.backlog.clear();
        self.backlog_tokens = 0;
        for (ticket, open) in &mut self.open {
            // An accepted request does not expire for waiting a second time.
            open.state = State::Backlog { since_us: u64::MAX - self.config.announce_wait_us };
            self.backlog.push_back(*ticket);
            self.backlog_tokens += open.tokens();
        }
    }

    /// Every invariant.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let in_backlog: Vec<Ticket> =
            self.open.iter().filter(|(_, o)| matches!(o.state, State::Backlog { .. })).map(|(t, _)| *t).collect();
        let mut listed: Vec<Ticket> = self.backlog.iter().copied().collect();
        listed.sort_unstable();
        if listed != in_backlog {
            return Err("I1: backlog and states differ".into());
        }
        let tokens: u64 = in_backlog.iter().filter_map(|t| self.open.get(t)).map(Open::tokens).sum();
        if tokens != self.backlog_tokens {
            return Err(format!("I1: backlog counts {} tokens, holds {tokens}", self.backlog_tokens));
        }
        let announced = self.open.values().filter(|o| o.state == State::Announced).count();
        if announced != self.announced as usize {
            return Err(format!("I1: {announced} announced, counted {}", self.announced));
        }
        let too_long = self
            .open
            .values()
            .find(|o| o.submission.produced.len() as u64 > u64::from(o.submission.generation.max_new_tokens));
        match too_long {
            Some(open) => Err(format!("I3: {:?} has too many tokens", open.submission.ticket)),
            None => Ok(()),
        }
    }
}

fn arrival(key: RequestKey, submission: &Submission, probe_block_tokens: Option<u32>) -> Arrival {
    let mut arrival = Arrival {
        key,
        prompt_tokens: submission.prompt.len() as u32,
        produced_tokens: submission.produced.len() as u32,
        head: Box::default(),
        chain: Chain::default(),
        children: 0,
        conversation: submission.conversation,
        sub_agent: submission.sub_agent,
        explicit: submission.explicit,
        priority: submission.priority,
    };
    if let Some(block_tokens) = probe_block_tokens {
        let prompt = &submission.prompt;
        // The last token is always computed, so it is never part of a match.
        let reusable = &prompt[..prompt.len().saturating_sub(1)];
        let scope = Scope { tenant: submission.tenant, adapter: None };
        arrival.head = prompt.iter().take(HEAD_TOKENS).copied().collect();
        arrival.chain = Chain::thinned(&submission.keys.truncated(&scope, reusable, block_tokens));
    }
    arrival
}

#[cfg(test)]
mod tests;
