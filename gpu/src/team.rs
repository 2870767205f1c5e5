//! A few threads that work on one step together.
//!
//! Each rank has its own team, with the rank's own thread as a member, so two ranks in one process never wait for each
//! other. Which thread runs which part is left to chance; parts must not depend on it.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};

#[cfg(test)]
mod tests;

/// Looks at the next round before a thread goes to sleep: ten microseconds or so, about what waking it costs.
const SPINS_MAX: u32 = 400;

/// Threads of all teams of this process. Where they are more than the processors, spinning would take the processor from
/// whoever makes the wait end.
static THREADS: AtomicUsize = AtomicUsize::new(0);

fn is_crowded(threads: usize) -> bool {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    threads > *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

type Call<'a> = &'a (dyn Fn(usize) + Sync);

/// What the members run now.
struct Work {
    /// Its lifetime is not static: `Team::run` outlives every use of it.
    call: Call<'static>,
    parts: usize,
    caller: Thread,
}

struct Shared {
    /// Written by the caller while no member is busy; read by members between seeing a new `round` and leaving `busy`.
    work: UnsafeCell<Option<Work>>,
    round: AtomicUsize,
    next_part: AtomicUsize,
    busy: AtomicUsize,
    panicked: AtomicBool,
    stopping: AtomicBool,
}

// SAFETY: `work` is written and read as its comment says; all else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: a `Call` is shared between threads only, which `Sync` of its closure allows.
unsafe impl Send for Shared {}

/// Threads that run parts of a computation; dropping it ends them.
pub struct Team {
    shared: Arc<Shared>,
    members: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of `threads`, the caller's among them; at least one.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            work: UnsafeCell::new(None),
            round: AtomicUsize::new(0),
            next_part: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        });
        let mut team = Self { shared, members: Vec::new() };
        THREADS.fetch_add(1, Ordering::Relaxed);
        for member in 1..threads {
            let shared = Arc::clone(&team.shared);
            let builder = std::thread::Builder::new().name(format!("engine-{member}"));
            team.members.push(builder.spawn(move || shared.serve())?);
            THREADS.fetch_add(1, Ordering::Relaxed);
        }
        Ok(team)
    }

    pub fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Calls `call` once for each part, on any thread, and returns when all have returned.
    ///
    /// # Panics
    /// If a part panicked; the others have ended then.
    pub fn run(&mut self, parts: usize, call: impl Fn(usize) + Sync) {
        if self.members.is_empty() || parts <= 1 {
            return (0..parts).for_each(call);
        }
        let call: Call<'_> = &call;
        // SAFETY: members use the call before they leave `busy`, and this function waits for that on every path.
        let call = unsafe { std::mem::transmute::<Call<'_>, Call<'static>>(call) };
        let shared = &*self.shared;
        // SAFETY: the last round ended with no member busy, so nobody reads.
        unsafe { *shared.work.get() = Some(Work { call, parts, caller: std::thread::current() }) };
        shared.next_part.store(0, Ordering::Relaxed);
        shared.busy.store(self.members.len(), Ordering::Relaxed);
        shared.round.fetch_add(1, Ordering::Release);
        self.members.iter().for_each(|member| member.thread().unpark());

        let own = catch_unwind(AssertUnwindSafe(|| shared.take_parts(call, parts)));
        shared.wait_until(|| shared.busy.load(Ordering::Acquire) == 0);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a part of a step panicked on another thread");
    }

    /// `run` over rows: `call` gets stretches of at most `at_once` rows.
    pub fn run_rows(&mut self, rows: usize, at_once: usize, call: impl Fn(Range<usize>) + Sync) {
        self.run(rows.div_ceil(at_once), |part| {
            let start = part * at_once;
            call(start..rows.min(start + at_once));
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        THREADS.fetch_sub(self.threads(), Ordering::Relaxed);
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.round.fetch_add(1, Ordering::Release);
        for member in self.members.drain(..) {
            member.thread().unpark();
            // It catches the panics of its parts, so it ends as it should.
            let _ = member.join();
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut seen = 0;
        loop {
            self.wait_until(|| self.round.load(Ordering::Acquire) != seen);
            if self.stopping.load(Ordering::Relaxed) {
                return;
            }
            seen = seen.wrapping_add(1);
            // SAFETY: the caller wrote this before it raised `round`, and writes again once `busy` is zero.
            let work = unsafe { (*self.work.get()).as_ref() }.expect("a round has work");
            if catch_unwind(AssertUnwindSafe(|| self.take_parts(work.call, work.parts))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            let caller = work.caller.clone();
            if self.busy.fetch_sub(1, Ordering::Release) == 1 {
                caller.unpark();
            }
        }
    }

    fn take_parts(&self, call: Call<'_>, parts: usize) {
        loop {
            let part = self.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return;
            }
            call(part);
        }
    }

    /// Spins for a moment where there are processors for it, then sleeps until it is woken; whoever makes `ready` true wakes.
    fn wait_until(&self, ready: impl Fn() -> bool) {
        let spins = if is_crowded(THREADS.load(Ordering::Relaxed)) { 0 } else { SPINS_MAX };
        for _ in 0..spins {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        while !ready() {
            std::thread::park();
        }
    }
}

/// Numbers that several parts write at once, each to its own places.
pub struct Split<'a> {
    start: *mut f32,
    length: usize,
    numbers: PhantomData<&'a mut [f32]>,
}

// SAFETY: it hands out parts that, by the contract of `part`, do not overlap.
unsafe impl Sync for Split<'_> {}

impl<'a> Split<'a> {
    pub fn new(numbers: &'a mut [f32]) -> Self {
        Self { start: numbers.as_mut_ptr(), length: numbers.len(), numbers: PhantomData }
    }

    /// # Safety
    /// Ranges in use at the same time do not overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.length, "part {range:?} of {}", self.length);
        // SAFETY: the range lies within the slice that this borrows, and nobody else uses it now.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The address of a number, for code that writes with strides.
    pub fn address(&self, index: usize) -> *mut f32 {
        assert!(index <= self.length, "number {index} of {}", self.length);
        // SAFETY: within the slice, or one behind it.
        unsafe { self.start.add(index) }
    }
}
