//! Queue and routers allocate nothing a request once their buffers have grown. A binary of its own: it counts in the
//! global allocator.

use starling_core::admission::{self, Admission, Pass, Policy as QueuePolicy, Queue, Waiting};
use starling_core::ids::{ConversationKey, RequestKey, RequestNumber};
use starling_core::placement::{
    Config, CountChildren, MatchTable, NewConversations, Placement, Policy, RankLoad, Router, Routing,
};

// The benchmark counts in the same way.
#[path = "../runtime/core/benches/placement/memory.rs"]
mod memory;

const RANKS: u32 = 16;
const BATCH: u64 = 512;
const ROUNDS: u64 = 40;

fn request(number: u64) -> Waiting {
    Waiting {
        number: RequestNumber(number),
        key: RequestKey { seq: number, ..RequestKey::default() },
        tokens: 100 + (number % 900) as u32,
        explicit: number.is_multiple_of(10).then_some((number % u64::from(RANKS)) as u32),
        affinity: (!number.is_multiple_of(5)).then(|| ConversationKey(u128::from(number * 7919 % 1500))),
        children: if number.is_multiple_of(50) { 2 } else { 0 },
        ..Waiting::default()
    }
}

struct Steady {
    queue: Queue,
    router: Router,
    matches: MatchTable,
    admission: Admission,
    placement: Placement,
    number: u64,
}

impl Steady {
    fn new(config: &Config) -> Self {
        Self {
            queue: Queue::new(QueuePolicy::Fcfs),
            router: Router::new(config, config.bound(true), RANKS),
            matches: MatchTable::default(),
            admission: Admission::default(),
            placement: Placement::default(),
            number: 0,
        }
    }

    /// A round: arrivals, matches, a pass and its placement. What was placed ends at once.
    fn round(&mut self) {
        self.matches.reset(RANKS);
        while (self.queue.len() as u64) < BATCH {
            let request = request(self.number);
            self.matches.set(request.number, (self.number % u64::from(RANKS)) as u32, 50);
            self.number += 1;
            self.queue.push(request).expect("numbers rise");
        }
        let loads: [RankLoad; RANKS as usize] = std::array::from_fn(|rank| RankLoad {
            active_requests: rank as u32 % 5,
            active_tokens: 1000 * rank as u64,
        });
        let counts = loads.map(|load| load.active_requests);
        let cap = 24;
        let pass = Pass {
            budget: admission::budget(&counts, &[], cap),
            cap,
            counts: &counts,
            held: &[],
            now_us: 0,
            count_children: CountChildren::StrictCap,
            only: None,
        };
        let router = &self.router;
        self.queue.admit(&pass, |request| router.admission_rank(request, 0), &mut self.admission);
        let routing = Routing { loads: &loads, cap, held: &self.admission.held, now_us: 0, matches: &self.matches };
        self.router.route(&routing, &self.admission.admitted, &mut self.placement);
        assert!(self.placement.assigned.len() > 100, "the round places something");
    }
}

/// One test, so that no other thread allocates meanwhile.
#[test]
fn steady_rounds_allocate_nothing_and_conversations_are_small() {
    for policy in [Policy::Balanced, Policy::KvAware, Policy::Conversation] {
        for new_conversations in NewConversations::ALL {
            let config = Config { policy, new_conversations, conversations_max: 1000, ..Config::default() };
            let mut steady = Steady::new(&config);
            for _ in 0..ROUNDS {
                steady.round();
            }
            let made = memory::allocations(|| (0..ROUNDS).for_each(|_| steady.round()));
            assert_eq!(made, 0, "{policy:?}, {new_conversations:?}: {made} allocations in {ROUNDS} rounds");
        }
    }
    conversations_take_few_bytes();
    waiting_requests_take_few_bytes();
}

fn conversations_take_few_bytes() {
    let bytes = memory::bytes(|| {
        let config = Config::default();
        let mut router = Router::new(&config, config.bound(true), RANKS);
        let Router::Conversation(conversations) = &mut router else { panic!("the default policy") };
        for key in 0..65_536u128 {
            conversations.bind(ConversationKey((key << 64) | (key * 31)), (key % 16) as u32);
        }
        assert_eq!(router.conversations(), 65_536);
        router
    });
    assert!(bytes <= 8 << 20, "{bytes} bytes of 65536 conversations");
}

fn waiting_requests_take_few_bytes() {
    let bytes = memory::bytes(|| {
        let mut queue = Queue::new(QueuePolicy::Priority);
        for number in 0..65_536 {
            queue.push(request(number)).expect("numbers differ");
        }
        queue
    });
    assert!(bytes <= 16 << 20, "{bytes} bytes of 65536 waiting requests");
}
