//! Dummy padding: a rank with nothing to run still takes part in a group's collectives.

/// What a rank knows before it schedules a step. `Default` is an idle rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Active requests that the group expects on each rank; from the router.
    pub expected: u32,
    pub active: u32,
    /// Of the active: those whose last token is produced.
    pub retiring: u32,
    /// Of the active: those that wait for KV from elsewhere or receive it.
    pub receiving: u32,
}

/// How the group runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// Ranks step together; without it nobody waits for an idle rank.
    pub attention_dp: bool,
    pub exclude_retiring: bool,
    /// Prefill and decode run on different groups.
    pub disaggregated: bool,
    /// A benchmark fills the ranks before it starts.
    pub benchmark_fill: bool,
}

/// Requests that count for the rank's share of the batch; more than `expected` is tolerated.
fn routable(mode: Mode, rank: Occupancy) -> u32 {
    if mode.exclude_retiring { rank.active.saturating_sub(rank.retiring) } else { rank.active }
}

/// Whether a rank runs a dummy request in this step; at most one.
pub fn needs_dummy(mode: Mode, rank: Occupancy) -> bool {
    let expected = rank.expected.max(routable(mode, rank));
    let receiving = if mode.disaggregated { rank.receiving } else { 0 };
    let runnable = rank.active.saturating_sub(receiving);
    mode.attention_dp && !mode.benchmark_fill && expected > 0 && runnable == 0
}

/// The second rule: a rank has active requests, but its scheduler picked none of them.
pub fn needs_dummy_after_scheduling(mode: Mode, rank: Occupancy, cap: u32, has_dummy: bool) -> bool {
    mode.attention_dp && rank.expected > 0 && rank.active > 0 && rank.active < cap && !has_dummy
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dummy {
    Generation,
    Context,
}

/// What the dummy pretends to do: the work of the batch that the group was last given.
pub fn dummy_kind(mode: Mode, last_batch_has_context_only: bool) -> Dummy {
    if mode.disaggregated && last_batch_has_context_only { Dummy::Context } else { Dummy::Generation }
}
