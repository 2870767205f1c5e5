//! Where a request ran, and why its prompt's tokens were not reused: for whoever looks for it by name.

use crate::api::Names;
use crate::everywhere::{Unanswered, ask_all};
use crate::serving::Serving;
use crate::{ingress, kv_manager};
use serde::{Deserialize, Serialize};
use starling_actors::TraceContext;
use starling_core::ids::{AttemptKey, RankId};
use starling_core::kv::{Explanation, Missed};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Requests that are over and still known by their names.
const ENDED_MAX: usize = 1024;

/// A request as its ingress knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Known {
    #[serde(skip)]
    pub names: Names,
    pub child: u32,
    pub is_open: bool,
    /// In the order of the placements.
    pub attempts: Vec<(AttemptKey, RankId)>,
}

impl Known {
    pub fn is_called(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }
}

/// The last requests that are over.
#[derive(Default)]
pub(crate) struct Over(VecDeque<Known>);

impl Over {
    pub fn add(&mut self, known: Known) {
        if known.names.is_empty() {
            return;
        }
        if self.0.len() == ENDED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Known { is_open: false, ..known });
    }

    pub fn iter(&self) -> impl Iterator<Item = &Known> {
        self.0.iter()
    }
}

/// All requests of a name, and who was not heard about them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestsReport {
    pub id: String,
    /// One for each choice; clients may give a name twice.
    pub requests: Vec<RequestReport>,
    pub unanswered: Vec<Unanswered>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestReport {
    /// The node that talks to the client.
    pub ingress: String,
    /// Which of the choices.
    pub choice: u32,
    pub open: bool,
    pub attempts: Vec<AttemptReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttemptReport {
    pub attempt: u32,
    pub node: String,
    pub rank: u32,
    /// Empty while it waits for blocks, once it was forgotten, and after a thousand others.
    pub reservations: Vec<ReservationReport>,
}

/// Blocks were reserved: once, and again each time that the attempt was preempted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReservationReport {
    pub prompt_tokens: u32,
    pub reused_tokens: u32,
    pub missed: Vec<MissedReport>,
}

/// Tokens `from..to` of the prompt, which were not reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MissedReport {
    pub from: u32,
    pub to: u32,
    pub why: &'static str,
    /// Whose pages were missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life_cycle: Option<u8>,
}

impl From<&Missed> for MissedReport {
    fn from(missed: &Missed) -> Self {
        let Missed { from, to, why } = *missed;
        Self { from, to, why: why.label(), life_cycle: why.life_cycle() }
    }
}

impl From<&Explanation> for ReservationReport {
    fn from(explanation: &Explanation) -> Self {
        let Explanation { prompt_tokens, reused_tokens, missed, .. } = explanation;
        let missed = missed.iter().map(MissedReport::from).collect();
        Self { prompt_tokens: *prompt_tokens, reused_tokens: *reused_tokens, missed }
    }
}

impl Serving {
    /// Where the requests of this name run or ran lately, on whichever node their clients are, and what their prompts reused.
    pub async fn requests(&self, name: &str, within: Duration) -> RequestsReport {
        let trace = TraceContext::default();
        let asked: Arc<str> = name.into();
        let find = move |_, reply| ingress::Message::Find { name: asked.to_string(), reply };
        let (found, mut unanswered) = ask_all(self.all_ingresses(), trace, within, find).await;
        let mut by_rank: BTreeMap<RankId, Vec<AttemptKey>> = BTreeMap::new();
        for (attempt, rank) in
            found.iter().flat_map(|(_, known): &(usize, Vec<Known>)| known).flat_map(|known| &known.attempts)
        {
            by_rank.entry(*rank).or_default().push(*attempt);
        }
        let (ranks, attempts): (Vec<RankId>, Vec<Vec<AttemptKey>>) = by_rank.into_iter().unzip();
        let (asked, attempts): (Vec<_>, Vec<_>) =
            ranks.iter().zip(attempts).filter_map(|(rank, attempts)| Some((self.kv_of(*rank)?, attempts))).unzip();
        let explain =
            move |index: usize, reply| kv_manager::Message::Explain { attempts: attempts[index].clone(), reply };
        let (explained, silent) = ask_all(asked, trace, within, explain).await;
        unanswered.extend(silent);
        let mut explanations: BTreeMap<AttemptKey, Vec<ReservationReport>> = BTreeMap::new();
        for one in explained.iter().flat_map(|(_, explained): &(usize, Vec<Explanation>)| explained) {
            explanations.entry(one.attempt).or_default().push(one.into());
        }
        let requests = found.iter().flat_map(|(seat, known)| known.iter().map(move |known| (*seat, known)));
        let requests = requests.map(|(seat, known)| self.request_report(seat, known, &explanations)).collect();
        RequestsReport { id: name.to_owned(), requests, unanswered }
    }

    fn request_report(
        &self,
        seat: usize,
        known: &Known,
        explanations: &BTreeMap<AttemptKey, Vec<ReservationReport>>,
    ) -> RequestReport {
        let attempt = |(attempt, rank): &(AttemptKey, RankId)| AttemptReport {
            attempt: attempt.attempt.0,
            node: self.node_of(*rank).to_owned(),
            rank: rank.0,
            reservations: explanations.get(attempt).cloned().unwrap_or_default(),
        };
        RequestReport {
            ingress: self.name_of(seat).to_owned(),
            choice: known.child,
            open: known.is_open,
            attempts: known.attempts.iter().map(attempt).collect(),
        }
    }
}
