//! Steps: what goes into the next one, and what follows when it is done.

use super::sequence::{Doom, Order, Running};
use super::{Batch, Effect, Frame, Ignored, Part};
use crate::kv;
use crate::step::{Drawn, Sample, Sampled, Slice, Step};

impl Batch {
    /// The next step: a token of every decoding sequence first, then prefill in number order, then guesses of those that
    /// decode, up to `step_tokens_max`.
    /// `None` while a step is in flight or nothing can be computed.
    ///
    /// # Cost
    /// Linear in the step's tokens and blocks; with guesses, in the tokens of the sequences that decode.
    pub fn plan(&mut self) -> Option<Step> {
        if self.in_flight.is_some() {
            return None;
        }
        let mut budget = self.config.step_tokens_max;
        let mut parts = Vec::new();
        for decoding in [true, false] {
            for (&order, running) in &self.running {
                let uncomputed = running.uncomputed();
                let tokens = running.computable(&self.config.kv).min(budget);
                if (uncomputed == 1) == decoding && tokens > 0 {
                    budget -= tokens;
                    parts.push(Part { order, tokens, samples: tokens == uncomputed, drafts: Vec::new() });
                }
            }
        }
        if parts.is_empty() {
            return None;
        }
        self.draft(&mut parts, budget);
        let slices = parts.iter().filter_map(|part| self.slice(part)).collect();
        let copies = std::mem::take(&mut self.copies);
        for part in &parts {
            if let Some(running) = self.running.get_mut(&part.order) {
                running.in_step = true;
            }
        }
        self.in_flight = Some(parts);
        Some(Step { copies, slices })
    }

    /// Guesses with what everyone's share left of the step, so that a guess delays nobody.
    fn draft(&self, parts: &mut [Part], mut budget: u32) {
        if self.config.kv.has_states() {
            return;
        }
        for part in parts {
            let Some(running) = self.running.get(&part.order).filter(|running| running.uncomputed() == 1) else {
                continue;
            };
            let room = running.capacity.saturating_sub(running.known.len());
            // Behind the last guess another token is drawn.
            let left = running.known.tokens_max.saturating_sub(running.known.len() + 1);
            let most = self.config.draft_tokens_max.min(room).min(left).min(budget);
            if most > 0 {
                part.drafts = running.known.guess(most as usize);
                budget -= part.drafts.len() as u32;
            }
        }
    }

    /// Whether `plan` would give a step.
    pub fn has_step(&self) -> bool {
        self.in_flight.is_none() && self.running.values().any(|running| running.computable(&self.config.kv) > 0)
    }

    fn slice(&mut self, part: &Part) -> Option<Slice> {
        let running = self.running.get_mut(&part.order)?;
        let (start, end) = (running.computed, running.computed + part.tokens);
        let tables = running.tables_to(end + part.drafts.len() as u32, &self.config.kv);
        let known = &running.known;
        let sample = || Sample {
            sampling: known.generation.sampling.clone(),
            child: known.child,
            position: end,
            drafts: part.drafts.len() as u32,
            history: known.history(),
            banned: known.banned(),
        };
        Some(Slice {
            attempt: part.order.attempt,
            tokens: known.tokens[start as usize..end as usize].iter().chain(&part.drafts).copied().collect(),
            start,
            tables,
            sample: part.samples.then(sample),
        })
    }

    pub(super) fn step_done(&mut self, sampled: Vec<Sampled>, out: &mut Vec<Effect>) {
        let Some(parts) = self.in_flight.take() else {
            return self.ignore(Ignored::NoStep, out);
        };
        self.totals.steps += 1;
        let drawn = self.drawn(&parts, sampled, out);
        // Tokens go out before anything else is put in motion.
        let emitted_at = out.len();
        let mut frames = Vec::new();
        for (at, (part, drawn)) in parts.into_iter().zip(drawn).enumerate() {
            if part.samples && drawn.is_empty() {
                self.ignore(Ignored::MissingToken { slice: at as u32 }, out);
            }
            frames.extend(self.part_done(part, drawn, out));
        }
        if !frames.is_empty() {
            out.insert(emitted_at, Effect::Emit(frames));
        }
    }

    /// The tokens of each part, as far as they were asked for and came.
    fn drawn(&mut self, parts: &[Part], sampled: Vec<Sampled>, out: &mut Vec<Effect>) -> Vec<Vec<Drawn>> {
        let mut drawn = vec![Vec::new(); parts.len()];
        for one in sampled {
            let at = one.slice as usize;
            let asked = parts.get(at).map_or(0, Part::draws);
            match drawn.get_mut(at) {
                Some(tokens) if tokens.len() < asked => tokens.push(one.drawn),
                _ => self.ignore(Ignored::UnaskedToken { slice: one.slice }, out),
            }
        }
        drawn
    }

    fn part_done(&mut self, part: Part, drawn: Vec<Drawn>, out: &mut Vec<Effect>) -> Option<Frame> {
        let running = self.running.get_mut(&part.order)?;
        running.in_step = false;
        let doom = running.doom.take();
        // Without its token, the last position must be computed again: there is nothing else to draw one from.
        let lost = part.samples && drawn.is_empty();
        running.computed += part.tokens - u32::from(lost);
        self.totals.computed_tokens += u64::from(part.tokens) + part.drafts.len() as u64;
        self.totals.drafted_tokens += part.drafts.len() as u64;
        let cancelled = match doom {
            Some(Doom::Cancel { steps }) => Some(self.totals.steps - steps),
            _ => None,
        };
        let mut frame = None;
        if !drawn.is_empty() && cancelled.is_none() {
            let first_position = running.known.produced();
            let tokens = running.take(drawn, &part.drafts);
            self.totals.produced_tokens += tokens.len() as u64;
            self.totals.accepted_tokens += tokens.len() as u64 - 1;
            frame = Some(Frame {
                attempt: part.order.attempt,
                first_position,
                tokens,
                cached_tokens: running.known.cached_tokens.unwrap_or(0),
                finished: running.known.finished(),
            });
        }
        if lost && self.config.kv.has_states() {
            self.fail(part.order, cancelled, out);
            return None;
        }
        self.tell(part.order, out);
        if let Some(steps) = cancelled {
            self.count_cancel(steps);
            self.drop_running(part.order, out);
        } else if frame.as_ref().is_some_and(|f| f.finished.is_some()) {
            self.drop_running(part.order, out);
        } else if doom == Some(Doom::Preempt) {
            self.preempt(part.order, out);
        }
        frame
    }

    /// Tells the KV manager of newly full blocks, and of a stop, with the tokens it has not seen.
    fn tell(&mut self, order: Order, out: &mut Vec<Effect>) {
        let block_tokens = self.config.kv.block_tokens;
        let is_due = |running: &Running| {
            running.computed / block_tokens > running.told_computed / block_tokens
                || running.stops.contains(&running.computed)
        };
        if self.running.get(&order).is_some_and(is_due) {
            self.tell_all(order, out);
        }
    }

    /// Tells the KV manager of everything that is computed.
    pub(super) fn tell_all(&mut self, order: Order, out: &mut Vec<Effect>) {
        let Some(running) = self.running.get_mut(&order).filter(|running| running.computed > running.told_computed)
        else {
            return;
        };
        let tokens = running.known.tokens[running.told_tokens as usize..].to_vec();
        running.told_computed = running.computed;
        running.told_tokens = running.known.len();
        running.commits_open += 1;
        out.push(Effect::Kv(kv::Input::Commit { attempt: order.attempt, tokens, computed: running.computed }));
    }
}
