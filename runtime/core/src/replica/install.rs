//! A new view: what becomes of requests, ranks and bindings between the cut and the first round behind it.

use super::requests::State;
use super::{Decision, Rank, Replica};
use crate::ids::{AttemptKey, Incarnation, RequestKey};
use crate::placement::Remap;
use crate::rejection::Rejection;
use crate::round::View;
use std::collections::BTreeSet;

impl Replica {
    /// Installs `view` behind the last applied round. `polite` left of their own will: what ran on their ranks goes on
    /// elsewhere without counting as failed.
    ///
    /// Requests of an ingress that left are stopped; attempts on ranks that left end, and their requests are held until
    /// their ingress resumes them; conversations bound to such ranks become unknown; requests that insist on one are
    /// rejected. Ranks that stay keep their identity, whatever dense index they now have.
    ///
    /// # Errors
    /// A rank that is twice in the view; nothing was changed then.
    pub fn install(&mut self, view: View, polite: &[Incarnation], out: &mut Vec<Decision>) -> Result<(), String> {
        let remap = self.remap_to(&view)?;
        let first = out.len();
        self.stop_requests_of_gone_ingresses(&view, out);
        self.end_attempts_on_gone_ranks(&remap, polite, out);
        for waiting in self.queue.remap(&remap) {
            let rank = waiting.explicit.map_or(0, |index| self.ranks[index as usize].id.0);
            self.reject(waiting.key, Rejection::NoSuchRank { rank, ranks: remap.ranks() }, out);
        }
        self.remap_hints(&remap, out);
        self.router.remap(&remap);
        self.replace_ranks(&view);
        let members: BTreeSet<Incarnation> = view.members.iter().map(|m| m.incarnation).collect();
        // Whom the last round named is named again: the matches would have come from the old ranks.
        self.named.clear();
        self.applied_seq.retain(|member, _| members.contains(member));
        self.view = view;
        debug_assert!(out.len() >= first);
        Ok(())
    }

    fn remap_to(&self, view: &View) -> Result<Remap, String> {
        let new: Vec<_> = view.ranks().map(|(id, _)| id).collect();
        if let Some((i, id)) = new.iter().enumerate().find(|(i, id)| new[..*i].contains(id)) {
            return Err(format!("{id} is twice in the view, the second time at {i}"));
        }
        let index = |id| new.iter().position(|n| *n == id).map(|index| index as u32);
        let old_to_new = self.ranks.iter().map(|rank| index(rank.id)).collect();
        Remap::new(old_to_new, new.len() as u32).map_err(|error| error.to_string())
    }

    fn stop_requests_of_gone_ingresses(&mut self, view: &View, out: &mut Vec<Decision>) {
        let gone = |key: &RequestKey| view.members.iter().all(|m| m.incarnation != key.ingress);
        let keys: Vec<RequestKey> = self.requests.iter().map(|r| r.key).filter(gone).collect();
        for key in keys {
            self.forget(key, out);
        }
    }

    fn end_attempts_on_gone_ranks(&mut self, remap: &Remap, polite: &[Incarnation], out: &mut Vec<Decision>) {
        let on_gone = |state: &State| {
            let index = state.rank().and_then(|id| self.index_of(id))?;
            remap.rank(index as u32).is_none().then_some(index)
        };
        let ended: Vec<(AttemptKey, usize)> = self
            .requests
            .iter()
            .filter_map(|r| on_gone(&r.state).map(|rank| (AttemptKey { key: r.key, attempt: r.attempt }, rank)))
            .collect();
        for (attempt, rank) in ended {
            if self.requests.get(attempt.key).is_some_and(|r| matches!(r.state, State::Placed { .. })) {
                self.release(attempt.key, rank);
            }
            if polite.contains(&self.ranks[rank].member) {
                self.requests.change(attempt.key, |r| r.state = std::mem::take(&mut r.state).held());
                out.push(Decision::Seal { attempt });
            } else {
                self.fail(attempt, out);
            }
        }
    }

    /// Hints of requests that are not in the queue: relaxed ones to a rank that left are forgotten, the others end a
    /// request that has nowhere to run any more.
    fn remap_hints(&mut self, remap: &Remap, out: &mut Vec<Decision>) {
        let hinted: Vec<RequestKey> = self
            .requests
            .iter()
            .filter(|r| r.state.waiting().is_some_and(|w| w.explicit.is_some()))
            .map(|r| r.key)
            .collect();
        for key in hinted {
            let Some(request) = self.requests.get(key) else { continue };
            let Some(waiting) = request.state.waiting() else { continue };
            let old = waiting.explicit.unwrap_or_default();
            let new = remap.rank(old);
            if new.is_none() && waiting.is_strict_at_admission() && matches!(request.state, State::Held { .. }) {
                let rank = self.ranks.get(old as usize).map_or(old, |r| r.id.0);
                self.reject(key, Rejection::NoSuchRank { rank, ranks: remap.ranks() }, out);
                continue;
            }
            self.requests.change(key, |r| {
                if let Some(waiting) = r.state.waiting_mut() {
                    waiting.explicit = new;
                }
            });
        }
    }

    fn reject(&mut self, key: RequestKey, rejection: Rejection, out: &mut Vec<Decision>) {
        self.requests.remove(key);
        out.push(Decision::Rejected { key, rejection });
    }

    fn replace_ranks(&mut self, view: &View) {
        let old = std::mem::take(&mut self.ranks);
        self.ranks = view
            .ranks()
            .map(|(id, member)| match old.iter().find(|r| r.id == id) {
                Some(known) => Rank { member, draining: false, ..known.clone() },
                None => Rank::new(id, member),
            })
            .collect();
    }
}
