//! How sequences come, get blocks, lose them, and go.

use super::sequence::{Ask, Doom, Growth, Known, Order, Running, Waiting};
use super::{Batch, Effect, Frame, Ignored, Sequence, TooSmall};
use crate::ids::{AttemptKey, BlockId};
use crate::kv::{self, Rebased, Released, Reservation};
use crate::rejection::Rejection;
use crate::request::in_vocabulary;

impl Batch {
    pub(super) fn admit(&mut self, sequence: Sequence, out: &mut Vec<Effect>) {
        let attempt = sequence.attempt;
        if self.numbers.contains_key(&attempt) || self.leaving.contains(&attempt) {
            return self.ignore(Ignored::DuplicateAttempt { attempt }, out);
        }
        let tokens = sequence.tokens.len() as u64;
        let limit = u64::from(sequence.context_tokens_max);
        let produced = u64::from(sequence.produced_before);
        if tokens <= produced {
            return self.refuse(attempt, Rejection::EmptyPrompt, out);
        }
        if tokens > limit || (tokens == limit && produced == 0) {
            let rejection = Rejection::PromptTooLong { tokens, limit: limit.saturating_sub(1) };
            return self.refuse(attempt, rejection, out);
        }
        // It may come from another node, whose word is no better than a client's.
        if let Err(rejection) = self.vet(&sequence) {
            return self.refuse(attempt, rejection, out);
        }
        let order = Order { number: sequence.number, attempt };
        let known = Known::new(sequence);
        if let Some(finished) = known.finished() {
            let first_position = known.produced();
            let frame =
                Frame { attempt, first_position, tokens: Vec::new(), cached_tokens: 0, finished: Some(finished) };
            return out.push(Effect::Emit(vec![frame]));
        }
        if let Some(TooSmall { wanted, blocks: total, .. }) = self.config.too_small(known.tokens_max) {
            return self.refuse(attempt, Rejection::TooLargeForRank { wanted, total }, out);
        }
        self.numbers.insert(attempt, order.number);
        self.waiting.insert(order, Waiting { known, ask: Ask::No });
    }

    fn vet(&self, sequence: &Sequence) -> Result<(), Rejection> {
        let vocabulary = self.config.vocabulary;
        sequence.generation.check(vocabulary)?;
        sequence.tokens.iter().try_for_each(|&token| in_vocabulary(token, vocabulary))
    }

    pub(super) fn cancel(&mut self, attempt: AttemptKey, out: &mut Vec<Effect>) {
        let Some(order) = self.order(attempt) else {
            return self.ignore(Ignored::UnknownAttempt { attempt }, out);
        };
        if let Some(waiting) = self.waiting.remove(&order) {
            self.numbers.remove(&attempt);
            match waiting.ask {
                // The release follows the question, so it undoes a reservation that is on its way.
                Ask::Open { .. } => {
                    self.leaving.insert(attempt);
                    self.release(attempt, Released::Over, out);
                }
                Ask::Settling => {
                    self.leaving.insert(attempt);
                }
                Ask::No | Ask::Refused { .. } => {}
            }
            return self.count_cancel(0);
        }
        let Some(running) = self.running.get_mut(&order) else {
            return;
        };
        if !running.in_step {
            self.count_cancel(0);
            self.drop_running(order, out);
        } else if !matches!(running.doom, Some(Doom::Cancel { .. })) {
            // The step writes into these blocks: they are given back when it is done.
            running.doom = Some(Doom::Cancel { steps: self.totals.steps });
        }
    }

    pub(super) fn answered(&mut self, answer: kv::Effect, out: &mut Vec<Effect>) {
        match answer {
            kv::Effect::Reserved { attempt, reservation, copies } => {
                self.copies.extend(copies);
                self.reserved(attempt, reservation, out);
            }
            kv::Effect::Grown { attempt, blocks, capacity, copies } => {
                self.copies.extend(copies);
                self.grown(attempt, (blocks, capacity), out);
            }
            kv::Effect::Committed { attempt, rebased, copies } => {
                self.copies.extend(copies);
                self.committed(attempt, &rebased);
            }
            kv::Effect::Exhausted { attempt, wanted, available } => {
                self.exhausted(attempt, (wanted, available), out);
            }
            kv::Effect::Freed { .. } => self.mark += 1,
            kv::Effect::Ignored { attempt, why } => self.unanswered(attempt, why, out),
        }
    }

    fn reserved(&mut self, attempt: AttemptKey, reservation: Reservation, out: &mut Vec<Effect>) {
        if self.leaving.remove(&attempt) {
            return;
        }
        let Some(order) = self.order(attempt) else {
            // Asked by a planner that is gone.
            return out.push(Effect::Kv(kv::Input::Release { attempt, why: Released::Over }));
        };
        let Some(waiting) = self.waiting.remove(&order) else {
            return self.ignore(Ignored::UnaskedAnswer { attempt }, out);
        };
        let Reservation { tables, capacity, cached_tokens: cached, stops } = reservation;
        let fits = tables.len() == self.config.kv.pools.len() && capacity > cached;
        if !waiting.ask.is_open() {
            self.waiting.insert(order, waiting);
            return self.ignore(Ignored::UnaskedAnswer { attempt }, out);
        }
        if !fits || cached >= waiting.known.len() {
            // The two do not agree on the pool: nothing can run here.
            self.numbers.remove(&attempt);
            self.release(attempt, Released::Over, out);
            return self.refuse(attempt, Rejection::RankFailed, out);
        }
        let mut known = waiting.known;
        known.cached_tokens.get_or_insert(cached.min(known.prompt_tokens));
        self.totals.reused_tokens += u64::from(cached);
        let running = Running {
            told_tokens: known.len(),
            told_computed: cached,
            known,
            tables,
            capacity,
            computed: cached,
            stops,
            commits_open: 0,
            growth: Growth::Quiet,
            in_step: false,
            doom: None,
        };
        self.running.insert(order, running);
    }

    fn grown(&mut self, attempt: AttemptKey, (blocks, capacity): (Vec<Vec<BlockId>>, u32), out: &mut Vec<Effect>) {
        if self.leaving.remove(&attempt) || self.settled(attempt) {
            return;
        }
        match self.running_mut(attempt) {
            Some(running) if matches!(running.growth, Growth::Open { .. }) => {
                running.growth = Growth::Quiet;
                running.grow(blocks, capacity);
            }
            _ => self.ignore(Ignored::UnaskedAnswer { attempt }, out),
        }
    }

    /// The answer may come when the attempt is over, or waits again.
    fn committed(&mut self, attempt: AttemptKey, rebased: &[Rebased]) {
        if let Some(running) = self.running_mut(attempt) {
            running.commits_open = running.commits_open.saturating_sub(1);
            rebased.iter().for_each(|rebased| running.rebase(*rebased));
        }
    }

    fn exhausted(&mut self, attempt: AttemptKey, (wanted, available): (u32, u32), out: &mut Vec<Effect>) {
        if self.leaving.remove(&attempt) || self.settled(attempt) {
            return;
        }
        if let Some(running) = self.running_mut(attempt)
            && let Growth::Open { mark } = running.growth
        {
            running.growth = Growth::Refused { mark, available };
            return;
        }
        if let Some(order) = self.order(attempt)
            && let Some(waiting) = self.waiting.get_mut(&order)
            && let Ask::Open { mark, .. } = waiting.ask
        {
            waiting.ask = Ask::Refused { mark, wanted, available };
            return;
        }
        self.ignore(Ignored::UnaskedAnswer { attempt }, out);
    }

    /// The KV manager did not do what it was told. Where an answer was expected none will come, so the attempt is over.
    fn unanswered(&mut self, attempt: AttemptKey, why: kv::Ignored, out: &mut Vec<Effect>) {
        match why {
            kv::Ignored::UnknownCommit | kv::Ignored::BadCommit => self.committed(attempt, &[]),
            kv::Ignored::UnknownRelease => {}
            kv::Ignored::DuplicateReserve | kv::Ignored::EmptyReserve | kv::Ignored::UnknownGrow => {
                if self.leaving.remove(&attempt) || self.settled(attempt) {
                    return;
                }
                let Some(order) = self.order(attempt) else {
                    return;
                };
                if let Some(running) = self.running_mut(attempt) {
                    running.growth = Growth::Quiet;
                    if running.in_step {
                        running.doom = running.doom.or(Some(Doom::Preempt));
                    } else {
                        self.preempt(order, out);
                    }
                } else if self.waiting.get(&order).is_some_and(|w| w.ask.is_open()) {
                    self.drop_waiting(order);
                    self.release(attempt, Released::Over, out);
                    self.refuse(attempt, Rejection::RankFailed, out);
                }
            }
        }
    }

    /// Asks for what can be asked for now, and makes room where a sequence cannot go on. Runs after every input.
    pub(super) fn settle(&mut self, out: &mut Vec<Effect>) {
        loop {
            self.ask_growth(out);
            if !self.make_room(out) {
                break;
            }
        }
        self.ask_reservations(out);
    }

    /// Every running sequence asks ahead of need, so that no step is delayed by the answer: one block when it decodes, the
    /// next step's tokens in prefill.
    fn ask_growth(&mut self, out: &mut Vec<Effect>) {
        let (block_tokens, ahead) = (self.config.kv.block_tokens.get(), self.config.ahead_tokens());
        for (order, running) in &mut self.running {
            let held = running.capacity.div_ceil(block_tokens);
            let needed = running.known.len().min(running.computed.saturating_add(ahead)).div_ceil(block_tokens);
            let decodes = running.uncomputed() == 1;
            let wanted = (needed + u32::from(decodes && needed <= held)).saturating_mul(block_tokens);
            let wanted = wanted.min(running.known.capacity_max(self.config.kv.block_tokens));
            let refused = matches!(running.growth, Growth::Refused { mark, .. } if mark == self.mark);
            let open = matches!(running.growth, Growth::Open { .. });
            if wanted > running.capacity && !refused && !open && running.doom.is_none() {
                running.growth = Growth::Open { mark: self.mark };
                out.push(Effect::Kv(kv::Input::Grow { attempt: order.attempt, tokens: wanted }));
            }
        }
    }

    /// Preempts the highest number when a sequence has no place for its next token. True when blocks came free at once.
    fn make_room(&mut self, out: &mut Vec<Effect>) -> bool {
        let starved = self.running.values().find_map(|running| match running.growth {
            Growth::Refused { mark, available } if mark == self.mark && running.is_short() => Some(available),
            _ => None,
        });
        let Some(available) = starved else {
            return false;
        };
        // One victim at a time: who is doomed gives its blocks back when the step is done.
        if self.running.values().any(|running| running.doom.is_some()) {
            return false;
        }
        let others = self.running.len() - 1;
        let Some((&order, victim)) = self.running.iter_mut().next_back() else {
            return false;
        };
        if victim.in_step {
            victim.doom = Some(Doom::Preempt);
            return false;
        }
        let wanted = victim.known.tokens_max.div_ceil(self.config.kv.block_tokens.get());
        let total = available + victim.tables.iter().map(|table| table.blocks.len() as u32).max().unwrap_or(0);
        if others > 0 {
            self.preempt(order, out);
            return true;
        }
        // Alone, and nothing was released since it asked: the pool is not what this planner was told.
        self.drop_running(order, out);
        self.refuse(order.attempt, Rejection::TooLargeForRank { wanted, total }, out);
        true
    }

    /// Reservations in number order; nobody asks behind one that was refused until it got its blocks.
    fn ask_reservations(&mut self, out: &mut Vec<Effect>) {
        let asking = self.waiting.values().filter(|waiting| waiting.ask.is_open()).count();
        let mut slots = (self.config.sequences_max as usize).saturating_sub(self.running.len() + asking);
        let mut hopeless = Vec::new();
        for (&order, waiting) in &mut self.waiting {
            let again = match waiting.ask {
                Ask::Open { again: true, .. } | Ask::Settling => break,
                Ask::Open { again: false, .. } => continue,
                Ask::Refused { mark, wanted, available } if mark == self.mark => {
                    // Nobody held a block when it was refused, so none will come free: the pool is too small.
                    if self.running.is_empty() {
                        hopeless.push((order, wanted, available));
                        continue;
                    }
                    break;
                }
                Ask::Refused { .. } => true,
                Ask::No => false,
            };
            if slots == 0 {
                break;
            }
            slots -= 1;
            waiting.ask = Ask::Open { again, mark: self.mark };
            out.push(Effect::Kv(kv::Input::Reserve {
                attempt: order.attempt,
                scope: waiting.known.scope,
                conversation: waiting.known.conversation,
                tokens: waiting.known.tokens.to_vec(),
                ahead_tokens: self.config.ahead_tokens(),
                tokens_max: waiting.known.tokens_max,
            }));
            if again {
                break;
            }
        }
        for (order, wanted, total) in hopeless {
            self.drop_waiting(order);
            self.refuse(order.attempt, Rejection::TooLargeForRank { wanted, total }, out);
        }
    }

    /// Gives the blocks of a sequence outside the step back and lets it wait again, in its old place.
    pub(super) fn preempt(&mut self, order: Order, out: &mut Vec<Effect>) {
        self.tell_all(order, out);
        let Some(running) = self.running.remove(&order) else {
            return;
        };
        let ask = if matches!(running.growth, Growth::Open { .. }) { Ask::Settling } else { Ask::No };
        self.waiting.insert(order, Waiting { known: running.known, ask });
        self.totals.preemptions += 1;
        self.release(order.attempt, Released::Preempted, out);
    }

    /// A sequence outside the step is over.
    pub(super) fn drop_running(&mut self, order: Order, out: &mut Vec<Effect>) {
        self.tell_all(order, out);
        let Some(running) = self.running.remove(&order) else {
            return;
        };
        self.numbers.remove(&order.attempt);
        if matches!(running.growth, Growth::Open { .. }) {
            self.leaving.insert(order.attempt);
        }
        self.release(order.attempt, Released::Over, out);
    }

    /// A sequence outside the step cannot go on here: its state has gone further than its tokens.
    pub(super) fn fail(&mut self, order: Order, cancelled: Option<u64>, out: &mut Vec<Effect>) {
        let Some(running) = self.running.remove(&order) else {
            return;
        };
        self.numbers.remove(&order.attempt);
        if matches!(running.growth, Growth::Open { .. }) {
            self.leaving.insert(order.attempt);
        }
        self.release(order.attempt, Released::Failed, out);
        match cancelled {
            Some(steps) => self.count_cancel(steps),
            None => self.refuse(order.attempt, Rejection::RankFailed, out),
        }
    }

    pub(super) fn count_cancel(&mut self, steps: u64) {
        self.totals.cancels += 1;
        self.totals.cancel_steps += steps;
        self.totals.cancel_steps_max = self.totals.cancel_steps_max.max(steps);
    }

    fn drop_waiting(&mut self, order: Order) {
        self.waiting.remove(&order);
        self.numbers.remove(&order.attempt);
    }

    fn release(&mut self, attempt: AttemptKey, why: Released, out: &mut Vec<Effect>) {
        self.mark += 1;
        out.push(Effect::Kv(kv::Input::Release { attempt, why }));
    }

    /// Whether this was the answer that a preempted sequence still had to wait for.
    fn settled(&mut self, attempt: AttemptKey) -> bool {
        let Some(order) = self.order(attempt) else {
            return false;
        };
        match self.waiting.get_mut(&order) {
            Some(waiting) if waiting.ask == Ask::Settling => {
                waiting.ask = Ask::No;
                true
            }
            _ => false,
        }
    }

    fn order(&self, attempt: AttemptKey) -> Option<Order> {
        self.numbers.get(&attempt).map(|&number| Order { number, attempt })
    }

    fn running_mut(&mut self, attempt: AttemptKey) -> Option<&mut Running> {
        let order = self.order(attempt)?;
        self.running.get_mut(&order)
    }
}
