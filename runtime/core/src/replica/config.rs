//! What all members must agree on before they decide anything.

use crate::placement;
use serde::{Deserialize, Serialize};

/// All settings that decide; equal on every member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Active requests a rank holds at most.
    pub cap: u32,
    /// Failed attempts after which a request is rejected.
    pub attempts_max: u32,
    /// Requests that a round names to be probed at most.
    pub probe_requests_max: u32,
    /// A round is one step of all ranks, so bounds may be counted in rounds.
    pub lockstep: bool,
    pub placement: placement::Config,
}

impl Config {
    /// Every setting with its value, one a line: members that decide by different settings would drift apart in the first
    /// round where it matters.
    pub fn listing(&self) -> String {
        format!("{self:#?}")
    }

    /// The first setting in which another member's `listing` differs, with both values.
    pub fn difference(&self, listing: &str) -> Option<String> {
        let ours = self.listing();
        let differs = |(ours, theirs): (&str, &str)| {
            let (ours, theirs) = (ours.trim().trim_end_matches(','), theirs.trim().trim_end_matches(','));
            (ours != theirs).then(|| format!("settings differ: here {ours}, there {theirs}"))
        };
        let first = ours.lines().zip(listing.lines()).find_map(differs);
        first.or_else(|| (ours != listing).then(|| "settings differ in number".into()))
    }
}
