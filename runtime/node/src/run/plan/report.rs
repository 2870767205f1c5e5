//! A plan, as people and as programs read it.

use super::described::Pooled;
use serde_json::{Value, json};
use starling_core::kv::cache::lifecycle::{Policy, Retention};
use starling_core::kv::cache::sizing::demand::Demand;
use starling_core::kv::cache::sizing::{Plan, Pool, SlotSizes, end_point_pages};
use std::io::{self, Write};

const TIERS: [&str; 3] = ["device", "host", "disk"];
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

pub struct Report<'a> {
    pub name: String,
    pub pooled: Vec<Pooled>,
    pub sizes: &'a [SlotSizes],
    pub demand: &'a Demand,
    pub plan: Plan,
}

impl Report<'_> {
    fn of_group(&self, group: usize) -> impl Iterator<Item = &Pooled> {
        self.pooled.iter().filter(move |one| usize::from(one.life_cycle.group) == group)
    }

    /// What the slots of a pool are good for, and how many of these there are.
    fn holds(&self, group: usize, slots: u64) -> (u64, &'static str) {
        let mut cycles = self.of_group(group).map(|one| (one.life_cycle.retention, one.life_cycle.policy));
        let block_tokens = self.demand.workload.block_tokens;
        match (cycles.next(), cycles.next()) {
            (Some((Retention::State, _)), None) => (slots, "states"),
            (Some((Retention::Full, _)), None) => (slots.saturating_mul(u64::from(block_tokens.get())), "tokens"),
            (Some((Retention::Window { tokens, .. }, Policy::Required | Policy::Optional)), None) => {
                (slots / u64::from(end_point_pages(tokens, block_tokens).max(1)), "end points")
            }
            // What is never published, or of several life cycles.
            _ => (slots, "pages"),
        }
    }

    pub fn to_json(&self) -> Value {
        let pools = (0..self.sizes.len()).map(|group| {
            let cycles = self.of_group(group).map(|one| {
                json!({
                    "retention": retention(one.life_cycle.retention),
                    "policy": one.life_cycle.policy,
                    "layers": one.layers,
                })
            });
            json!({
                "life_cycles": cycles.collect::<Vec<_>>(),
                "slot_bytes": self.sizes[group],
                "slots_per_conversation": self.plan.conversation[group],
            })
        });
        let tiers = self.plan.tiers.iter().enumerate().map(|(tier, of)| {
            let pools = of.pools.iter().enumerate().map(|(group, pool)| {
                let (count, what) = self.holds(group, pool.slots);
                json!({
                    "slots": pool.slots,
                    "bytes": pool.bytes,
                    "live_slots": pool.live,
                    "holds": { "count": count, "what": what },
                    "conversations": pool.conversations,
                })
            });
            json!({
                "tier": TIERS[tier.min(TIERS.len() - 1)],
                "quota_bytes": of.quota,
                "used_bytes": of.used,
                "conversations": of.conversations,
                "pools": pools.collect::<Vec<_>>(),
            })
        });
        json!({
            "model": self.name,
            "block_tokens": self.demand.workload.block_tokens,
            "sequence_tokens": self.demand.workload.sequence_tokens,
            "turns": self.demand.retained.turns,
            "end_points_per_turn": self.plan.end_points,
            "pools": pools.collect::<Vec<_>>(),
            "tiers": tiers.collect::<Vec<_>>(),
            "conversations": self.plan.conversations,
            "bottleneck_pool": self.plan.bottleneck,
            "warnings": self.plan.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    }

    /// # Errors
    /// Writing failed.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Demand { workload, retained, .. } = self.demand;
        let (length, turns, requests) = (workload.sequence_tokens, retained.turns, workload.requests);
        writeln!(
            out,
            "{}: conversations of {length} tokens, {turns} turns kept with {} end points each; {requests} requests at a time",
            self.name, self.plan.end_points
        )?;
        let head = ["pool", "layers", "keeps", "policy", "slot", "a conversation"].map(str::to_owned);
        let pools = self.pooled.iter().map(|one| self.pool_row(one));
        write_table(&std::iter::once(head).chain(pools).collect::<Vec<_>>(), out)?;
        let head = ["tier", "pool", "slots", "holds", "conversations", "bytes"].map(str::to_owned);
        let tiers = self.plan.tiers.iter().enumerate();
        let rows =
            tiers.flat_map(|(tier, of)| of.pools.iter().enumerate().map(move |(group, pool)| (tier, group, pool)));
        let rows = rows.map(|(tier, group, pool)| self.tier_row(tier, group, pool));
        writeln!(out)?;
        write_table(&std::iter::once(head).chain(rows).collect::<Vec<_>>(), out)?;
        writeln!(out)?;
        for (tier, of) in self.plan.tiers.iter().enumerate() {
            let name = TIERS[tier.min(TIERS.len() - 1)];
            let (holds, used, quota) = (tenths(of.conversations), bytes(of.used), bytes(of.quota));
            writeln!(out, "{name}: {holds} conversations, {used} of {quota} used")?;
        }
        match self.plan.bottleneck {
            Some(group) => {
                writeln!(out, "bottleneck: pool {group}, full at {} conversations", tenths(self.plan.conversations))?
            }
            None => writeln!(
                out,
                "bottleneck: none, all pools are full at {} conversations",
                tenths(self.plan.conversations)
            )?,
        }
        self.plan.warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))
    }

    fn pool_row(&self, one: &Pooled) -> [String; 6] {
        let group = usize::from(one.life_cycle.group);
        let layers = if one.layers.is_empty() { "-".to_owned() } else { one.layers.len().to_string() };
        let policy = match one.life_cycle.policy {
            Policy::Required => "required",
            Policy::Optional => "optional",
            Policy::Private => "private",
        };
        let slot = bytes(self.sizes[group].iter().sum());
        let each = format!("{} slots", self.plan.conversation[group]);
        [group.to_string(), layers, retention(one.life_cycle.retention), policy.to_owned(), slot, each]
    }

    fn tier_row(&self, tier: usize, group: usize, pool: &Pool) -> [String; 6] {
        let (count, what) = self.holds(group, pool.slots);
        let holds = format!("{count} {what}");
        let name = TIERS[tier.min(TIERS.len() - 1)].to_owned();
        [name, group.to_string(), pool.slots.to_string(), holds, tenths(pool.conversations), bytes(pool.bytes)]
    }
}

fn retention(retention: Retention) -> String {
    match retention {
        Retention::Full => "all tokens".to_owned(),
        Retention::State => "a state".to_owned(),
        Retention::Window { tokens, sink_blocks: 0 } => format!("last {tokens} tokens"),
        Retention::Window { tokens, sink_blocks } => format!("last {tokens} tokens, first {sink_blocks} blocks"),
    }
}

/// `-`: any number of them.
fn tenths(conversations: Option<f64>) -> String {
    conversations.map_or_else(|| "-".to_owned(), |conversations| format!("{conversations:.1}"))
}

fn bytes(bytes: u64) -> String {
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

fn write_table(rows: &[[String; 6]], out: &mut impl Write) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
