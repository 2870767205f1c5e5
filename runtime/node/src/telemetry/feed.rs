//! Feeds the metrics from what the API, the serving actors and the actor framework report.

use super::metrics::{Format, Identity, Registered, resident_bytes};
use crate::api::metrics::{ApiMetrics, End, Endpoint, Usage};
use crate::text::Cost;
use prometheus_client::metrics::counter::Counter;
use starling_actors::{ActorKind, ActorStats, LinkStats};
use starling_core::ids::Epoch;
use starling_core::rejection::Rejection;
use starling_core::request::Finish;
use starling_core::{batch, kv};
use starling_serving::{IngressReport, LocalRank, Observer, RoundReport, RoundTiming};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The node's metrics. Gauges of ranks and actors are set when somebody scrapes.
#[derive(Debug)]
pub struct Metrics {
    registered: Registered,
    identity: Identity,
    state: Mutex<State>,
}

/// What is only looked at when somebody scrapes.
#[derive(Debug, Default)]
pub struct Sight {
    pub actors: Vec<ActorStats>,
    pub links: Vec<LinkStats>,
    /// For how long no round completes; zero while rounds go on.
    pub standstill: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// The newest report of each rank.
    ranks: BTreeMap<u32, (batch::Stats, kv::Stats)>,
    /// Waiting in the replica and in the ingress' backlog.
    queue: usize,
    backlog: usize,
    frames_fenced: u64,
}

/// How far a counter went on; a smaller value means that its owner started over.
fn grown(old: u64, new: u64) -> u64 {
    new.checked_sub(old).unwrap_or(new)
}

/// Brings a counter to a total that is counted elsewhere.
fn raise(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

fn signed(n: impl TryInto<i64>) -> i64 {
    n.try_into().unwrap_or(i64::MAX)
}

impl Metrics {
    pub fn new(identity: Identity) -> Self {
        let registered = Registered::new(&identity);
        registered.identify(&identity);
        Self { registered, identity, state: Mutex::default() }
    }

    /// A request came without a conversation key.
    pub fn conversation_keyless(&self) {
        self.registered.keyless.inc();
    }

    pub fn actor_handled(&self, actor: &str, seconds: f64) {
        self.registered.handle_seconds.with([actor]).observe(seconds);
    }

    pub fn actor_restarted(&self, actor: &str) {
        self.registered.actor_restarts.with([actor]).inc();
    }

    pub fn actor_failed(&self, actor: &str) {
        self.registered.actor_failures.with([actor]).inc();
    }

    /// The text of a scrape.
    pub fn encode(&self, sight: &Sight, format: Format) -> String {
        for actor in sight.actors.iter().filter(|actor| actor.kind == ActorKind::Actor) {
            self.registered.mailbox_depth.with([&actor.name]).set(i64::from(actor.depth));
        }
        if let Some(bytes) = resident_bytes() {
            self.registered.rss.set(bytes);
        }
        self.registered.standstill.set(sight.standstill.as_secs_f64());
        self.set_links(&sight.links);
        self.set_gauges();
        self.registered.encode(format)
    }

    /// The metrics, for their documentation.
    pub fn registered(&self) -> &Registered {
        &self.registered
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain numbers: a panic elsewhere cannot have left them half-written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_links(&self, links: &[LinkStats]) {
        // Two scrapes at once would both count what came since the one before.
        let _state = self.state();
        let metrics = &self.registered;
        for link in links {
            let peer = link.peer.as_str();
            metrics.link_up.with([peer]).set(i64::from(link.is_up));
            metrics.link_held.with([peer]).set(signed(link.held_bytes));
            metrics.link_asks.with([peer, "node"]).set(signed(link.open_asks));
            metrics.link_asks.with([peer, "peer"]).set(signed(link.open_asks_of_peer));
            raise(&metrics.links.with([peer]), link.links);
            let passed = [("in", link.frames_in, link.bytes_in), ("out", link.frames_out, link.bytes_out)];
            for (direction, frames, bytes) in passed {
                raise(&metrics.link_frames.with([peer, direction]), frames);
                raise(&metrics.link_bytes.with([peer, direction]), bytes);
            }
            let dropped = &link.dropped;
            for (reason, count) in [
                ("not_exposed", dropped.not_exposed),
                ("unknown_type", dropped.unknown_type),
                ("not_running", dropped.not_running),
                ("mailbox_full", dropped.mailbox_full),
                ("undecodable", dropped.undecodable),
                ("deadline_exceeded", dropped.deadline_exceeded),
                ("unwanted_answers", dropped.unwanted_answers),
            ] {
                raise(&metrics.link_dropped.with([peer, reason]), count);
            }
        }
    }

    fn set_gauges(&self) {
        let state = self.state();
        let metrics = &self.registered;
        let (mut running, mut waiting, mut held, mut total) = (0, state.queue + state.backlog, 0, 0);
        for (rank, (batch, kv)) in &state.ranks {
            let rank = rank.to_string();
            for (life_cycle, pool) in kv.pools.iter().enumerate() {
                let life_cycle = life_cycle.to_string();
                let states =
                    [("free", pool.blocks_free), ("reusable", pool.blocks_reusable), ("held", pool.blocks_held)];
                for (name, blocks) in states {
                    metrics.kv_blocks.with([&rank, &life_cycle, name]).set(i64::from(blocks));
                }
                metrics.kv_pool_blocks.with([&rank, &life_cycle]).set(i64::from(pool.blocks_total));
            }
            for (life_cycle, blocks) in kv.proposed.iter().enumerate() {
                metrics.kv_pool_blocks_proposed.with([&rank, &life_cycle.to_string()]).set(i64::from(*blocks));
            }
            metrics.kv_conversations.with([&rank]).set(i64::from(kv.conversations));
            metrics.rank_running.with([&rank]).set(i64::from(batch.running));
            metrics.rank_waiting.with([&rank]).set(i64::from(batch.waiting));
            running += batch.running;
            waiting += batch.waiting as usize;
            let tightest = kv.tightest();
            held += u64::from(tightest.blocks_held);
            total += u64::from(tightest.blocks_total);
        }
        metrics.running.set(i64::from(running));
        metrics.waiting.set(signed(waiting));
        metrics.kv_usage.set(if total == 0 { 0.0 } else { held as f64 / total as f64 });
        if total > 0 {
            let block_tokens = self.identity.block_tokens.to_string();
            metrics.cache_config.with([&block_tokens, &total.to_string()]).set(1);
        }
    }
}

impl Observer for Metrics {
    fn round(&self, round: &RoundReport) {
        let metrics = &self.registered;
        metrics.rounds.inc();
        metrics.round_apply_seconds.observe(round.apply.as_secs_f64());
        metrics.queue_requests.set(signed(round.waiting));
        self.state().queue = round.waiting;
        let faults = &round.faults;
        for (kind, count) in [
            ("entries_ignored", faults.entries_ignored),
            ("counts_differ", faults.counts_differ),
            ("digest_mismatches", faults.digest_mismatches),
            ("placements_dropped", faults.placements_dropped),
        ] {
            // Most rounds have none, and a series that was never needed stays away.
            if count > 0 {
                metrics.replica_faults.with([kind]).set(signed(count));
            }
        }
    }

    fn round_timed(&self, timing: &RoundTiming<'_>) {
        self.registered.round_seconds.observe(timing.took.as_secs_f64());
        for (member, wait) in &timing.waits {
            self.registered.round_wait_seconds.with([member.as_str()]).observe(wait.as_secs_f64());
        }
    }

    fn view(&self, epoch: Epoch) {
        self.registered.view_epoch.set(signed(epoch.0));
    }

    fn placed(&self, why: &'static str, waited: Duration) {
        self.registered.placements.with([why]).inc();
        self.registered.queue_time.observe(waited.as_secs_f64());
        if why == "overflow" {
            self.registered.lost_rank.inc();
        }
    }

    fn rejected(&self, rejection: &Rejection) {
        self.registered.rejections.with([rejection.label()]).inc();
    }

    fn rank(&self, rank: LocalRank, batch: &batch::Stats, kv: &kv::Stats) {
        let (old_batch, old_kv) = self.state().ranks.insert(rank.0, (*batch, kv.clone())).unwrap_or_default();
        let metrics = &self.registered;
        metrics.preemptions.inc_by(grown(old_batch.preemptions, batch.preemptions));
        metrics.generation_tokens.inc_by(grown(old_batch.produced_tokens, batch.produced_tokens));
        metrics.cancels.inc_by(grown(old_batch.cancels, batch.cancels));
        metrics.cancel_steps.inc_by(grown(old_batch.cancel_steps, batch.cancel_steps));
        metrics.prefix_queries.inc_by(grown(old_kv.query_tokens, kv.query_tokens));
        metrics.prefix_hits.inc_by(grown(old_kv.hit_tokens, kv.hit_tokens));
        let most = signed(batch.cancel_steps_max);
        if most > metrics.cancel_steps_max.get() {
            metrics.cancel_steps_max.set(most);
        }
        let drafted = grown(old_batch.drafted_tokens, batch.drafted_tokens);
        if drafted > 0 {
            let rank = rank.0.to_string();
            metrics.drafted.with([&rank]).inc_by(drafted);
            metrics.accepted.with([&rank]).inc_by(grown(old_batch.accepted_tokens, batch.accepted_tokens));
        }
        let turns = grown(old_kv.turns, kv.turns);
        if turns > 0 {
            let rank = rank.0.to_string();
            metrics.kv_turns.with([&rank]).inc_by(turns);
            let unplanned = grown(old_kv.turns_unplanned, kv.turns_unplanned);
            metrics.kv_turns_unplanned.with([&rank]).inc_by(unplanned);
        }
        let evicted = grown(old_kv.evicted_blocks, kv.evicted_blocks);
        if evicted > 0 {
            metrics.kv_evicted.with([&rank.0.to_string()]).inc_by(evicted);
        }
    }

    fn step(&self, rank: LocalRank, tokens: usize, took: Duration) {
        let rank = rank.0.to_string();
        self.registered.step_seconds.with([&rank]).observe(took.as_secs_f64());
        self.registered.step_tokens.with([&rank]).inc_by(tokens as u64);
    }

    fn ingress(&self, report: &IngressReport) {
        self.registered.open_requests.set(signed(report.open));
        self.registered.backlog_requests.set(signed(report.backlog));
        let mut state = self.state();
        state.backlog = report.backlog;
        let old = std::mem::replace(&mut state.frames_fenced, report.counts.frames_fenced);
        self.registered.fenced.inc_by(grown(old, report.counts.frames_fenced));
    }

    fn fenced(&self, _rank: LocalRank) {
        self.registered.fenced.inc();
    }

    fn padded(&self, rank: LocalRank) {
        self.registered.steps_dummy.with([&rank.0.to_string()]).inc();
    }

    fn late(&self, rank: LocalRank) {
        self.registered.steps_late.with([&rank.0.to_string()]).inc();
    }

    fn lost(&self, _rank: LocalRank, attempts: usize) {
        self.registered.attempts_lost.inc_by(attempts as u64);
    }
}

impl ApiMetrics for Metrics {
    fn started(&self, endpoint: Endpoint) {
        self.registered.http_open.with([endpoint.label()]).inc();
    }

    fn ended(&self, endpoint: Endpoint, end: &End) {
        let metrics = &self.registered;
        let name = endpoint.label();
        metrics.http_open.with([name]).dec();
        metrics.http_requests.with([name, &end.status.to_string()]).inc();
        if let Some(error) = end.error {
            metrics.http_errors.with([name, error]).inc();
        } else if matches!(endpoint, Endpoint::Chat | Endpoint::Completions) && end.status == 200 {
            metrics.e2e.observe(end.elapsed.as_secs_f64());
        }
    }

    fn encoded(&self, cost: &Cost) {
        let metrics = &self.registered;
        metrics.text_encoded.inc_by(cost.encoded_bytes as u64);
        metrics.text_cache_bytes.set(signed(cost.cache_bytes));
        metrics.text_cache_evictions.inc_by(cost.evicted as u64);
        if cost.is_cacheable {
            let result = if cost.reused_tokens > 0 { "hit" } else { "miss" };
            metrics.text_cache_lookups.with([result]).inc();
            metrics.text_cache_tokens.inc_by(cost.reused_tokens as u64);
        }
    }

    fn first_token(&self, elapsed: Duration) {
        self.registered.ttft.observe(elapsed.as_secs_f64());
    }

    fn next_tokens(&self, gap: Duration, tokens: u32) {
        // Tokens that arrive together came from as many steps: each counts with its share of the gap.
        for _ in 0..tokens {
            self.registered.itl.observe(gap.as_secs_f64() / f64::from(tokens));
        }
    }

    fn generated(&self, usage: &Usage) {
        let metrics = &self.registered;
        metrics.prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
        metrics.prompt_tokens_cached.inc_by(u64::from(usage.cached_tokens));
        metrics.request_prompt_tokens.observe(f64::from(usage.prompt_tokens));
        metrics.request_generation_tokens.observe(f64::from(usage.generated_tokens));
        let reason = match usage.finish {
            Some(Finish::Stop) => "stop",
            Some(Finish::Length) => "length",
            None => "abort",
        };
        metrics.request_success.with([reason]).inc();
    }
}
