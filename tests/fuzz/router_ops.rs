//! Fuzz targets of admission and placement: plain functions over bytes, each ending in `check()`.
//!
//! Bytes become operations that a hostile peer could cause: absurd loads, numbers that are known already, ranks that do
//! not exist, children beyond any cap, views that change.

use starling_core::admission::{self, Admission, Admitted, Pass, Priority, Queue, Waiting};
use starling_core::ids::{ConversationKey, RequestKey, RequestNumber};
use starling_core::placement::{
    Bound, Config, CountChildren, NewConversations, Placement, Policy, RankLoad, Remap, Router, Routing,
};
use std::collections::BTreeMap;

const RANKS_MAX: u8 = 9;

/// The input as a source of choices; zeros once it has run out.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn left(&self) -> bool {
        !self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: u8) -> u8 {
        self.byte() % end.max(1)
    }

    /// Mostly small, at times as large as it gets.
    fn count(&mut self) -> u32 {
        match self.byte() {
            255 => u32::MAX,
            254 => 1 << 31,
            small => u32::from(small % 12),
        }
    }

    fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    fn request(&mut self, number: u64) -> Waiting {
        let number = if self.byte() == 7 { u64::from(self.byte()) } else { number };
        let priority = match self.below(5) {
            0 => f64::MAX,
            1 => -0.0,
            small => f64::from(small),
        };
        let key = self.below(8);
        Waiting {
            number: RequestNumber(number),
            key: RequestKey { seq: number, ..RequestKey::default() },
            tokens: self.count(),
            children: if self.below(4) == 0 { self.count() } else { 0 },
            explicit: if self.below(3) == 0 { Some(self.count()) } else { None },
            relax: [None, Some(false), Some(true)][usize::from(self.below(3))],
            affinity: (key > 0).then(|| ConversationKey(u128::from(key))),
            priority: Priority::new(priority).unwrap_or_default(),
            deferrals: if self.below(9) == 0 { self.count() } else { 0 },
            since_us: u64::from(self.count()),
            head: (0..self.below(4)).map(u32::from).collect(),
        }
    }

    fn loads(&mut self, ranks: u8) -> Vec<RankLoad> {
        let load = |_| RankLoad {
            active_requests: self.count(),
            active_tokens: if self.byte() == 255 { u64::MAX } else { u64::from(self.count()) },
        };
        (0..ranks).map(load).collect()
    }

    fn held(&mut self, ranks: u8) -> Vec<u32> {
        if self.below(4) > 0 {
            return Vec::new();
        }
        (0..self.below(ranks + 1)).map(|_| self.count()).collect()
    }

    fn count_children(&mut self) -> CountChildren {
        [CountChildren::StrictCap, CountChildren::Vectors, CountChildren::Upstream][usize::from(self.below(3))]
    }

    fn config(&mut self) -> Config {
        let number = |byte: u8| [0.0, 0.5, 1.0, 2.0, f64::MAX, f64::NAN, -1.0][usize::from(byte % 7)];
        Config {
            policy: [Policy::Balanced, Policy::KvAware, Policy::Conversation][usize::from(self.below(3))],
            queue: if self.flag() { admission::Policy::Priority } else { admission::Policy::Fcfs },
            count_children: self.count_children(),
            new_conversations: NewConversations::ALL[usize::from(self.below(3))],
            conversations_max: self.count(),
            strict_affinity: self.flag(),
            fair_share_multiplier: number(self.byte()),
            load_weight: number(self.byte()),
            match_threshold: number(self.byte()),
            cold_start_warmup: self.flag(),
            ..Config::default()
        }
    }

    fn remap(&mut self, ranks: u8) -> Option<(Remap, u8)> {
        let after = self.below(RANKS_MAX + 1);
        let old_to_new = (0..ranks).map(|_| self.flag().then(|| u32::from(self.below(after + 1)))).collect();
        Remap::new(old_to_new, u32::from(after)).ok().map(|remap| (remap, after))
    }
}

/// A router under any configuration, any batches and loads, and any changes of view.
pub fn placement_ops(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let config = choices.config();
    let mut ranks = choices.below(RANKS_MAX + 1);
    let bound = if choices.flag() { Bound::Passes(choices.count()) } else { Bound::Micros(u64::from(choices.count())) };
    let mut router = Router::new(&config, bound, u32::from(ranks));
    let mut placement = Placement::default();
    let mut number = 0;
    while choices.left() {
        if choices.below(8) == 0
            && let Some((remap, after)) = choices.remap(ranks)
        {
            router.remap(&remap);
            ranks = after;
        }
        let mut rows: BTreeMap<RequestNumber, Vec<u32>> = BTreeMap::new();
        let mut batch = Vec::new();
        for _ in 0..choices.below(9) {
            number += 1;
            let request = choices.request(number);
            if choices.flag() {
                rows.insert(request.number, (0..choices.below(ranks + 2)).map(|_| choices.count()).collect());
            }
            let reserved = choices.flag().then(|| choices.count());
            batch.push(Admitted { request, reserved });
        }
        let (loads, held) = (choices.loads(ranks), choices.held(ranks));
        let cap = choices.count();
        let routing = Routing { loads: &loads, cap, held: &held, now_us: u64::from(choices.count()), matches: &rows };
        router.route(&routing, &batch, &mut placement);
        placement.check(batch.len(), loads.len());
        if config.count_children == CountChildren::StrictCap {
            assert_eq!(placement.over_cap, 0, "strict-cap went over a cap");
        }
    }
    router.check(u32::from(ranks));
    assert!((0..256).all(|slice| router.verify(slice)), "the table changed behind its digest");
}

/// A queue under any arrivals, cancels, passes and changes of view: nothing is lost, nothing is there twice.
pub fn admission_ops(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let policy = if choices.flag() { admission::Policy::Priority } else { admission::Policy::Fcfs };
    let mut ranks = choices.below(RANKS_MAX + 1);
    let mut queue = Queue::new(policy);
    let mut admission = Admission::default();
    let mut number = 0;
    while choices.left() {
        let before = queue.len();
        match choices.below(6) {
            0 | 1 => {
                number += 1;
                let request = choices.request(number);
                let known = queue.contains(request.number);
                assert_eq!(queue.push(request).is_err(), known);
                assert_eq!(queue.len(), before + usize::from(!known));
            }
            2 => {
                let removed = queue.remove(RequestNumber(u64::from(choices.byte())));
                assert_eq!(queue.len() + usize::from(removed.is_some()), before);
            }
            3 => {
                if let Some((remap, after)) = choices.remap(ranks) {
                    let stranded = queue.remap(&remap);
                    assert_eq!(queue.len() + stranded.len(), before);
                    ranks = after;
                }
            }
            _ => {
                pass(&mut choices, ranks, &mut queue, &mut admission);
                assert_eq!(queue.len() + admission.admitted.len(), before);
                if choices.flag() {
                    let admitted = admission.admitted.drain(..).map(|admitted| admitted.request);
                    assert!(queue.put_back(admitted).is_ok(), "what was taken out is not known");
                    assert_eq!(queue.len(), before);
                }
            }
        }
    }
    queue.check();
}

fn pass(choices: &mut Choices<'_>, ranks: u8, queue: &mut Queue, admission: &mut Admission) {
    let counts: Vec<u32> = choices.loads(ranks).iter().map(|load| load.active_requests).collect();
    let (held, cap) = (choices.held(ranks), choices.count());
    let fair = admission::budget(&counts, &held, cap);
    let budget = if choices.flag() { fair } else { u64::from(choices.count()) };
    let pass = Pass {
        only: None,
        budget,
        cap,
        counts: &counts,
        held: &held,
        now_us: u64::from(choices.count()),
        count_children: choices.count_children(),
    };
    let pin_by = choices.byte();
    let pin = |request: &Waiting| {
        let key = request.affinity?.0 as u8;
        (key & pin_by != 0).then_some(u32::from(key ^ pin_by))
    };
    queue.admit(&pass, pin, admission);
    let whole: u64 = admission.admitted.iter().map(|admitted| 1 + u64::from(admitted.request.children)).sum();
    assert!(whole <= budget, "{whole} slots out of a budget of {budget}");
}
