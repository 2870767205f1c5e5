//! Time, memory and what is made of them.

use rustix::time::{ClockId, clock_gettime};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::read_to_string;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Instant;

/// Counts live bytes where memory is the subject; elsewhere it costs a load.
pub struct Counted;

static COUNTS: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);

fn count(bytes: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        LIVE.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        unsafe { System.realloc(block, layout, size) }
    }
}

pub fn count_bytes() {
    COUNTS.store(true, Ordering::Relaxed);
}

pub fn live_bytes() -> i64 {
    LIVE.load(Ordering::Relaxed)
}

pub fn resident_bytes() -> i64 {
    const PAGE: i64 = 4096;
    let statm = read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok()).unwrap_or(0) * PAGE
}

/// CPU seconds of this thread.
pub fn cpu_seconds() -> f64 {
    let at = clock_gettime(ClockId::ThreadCPUTime);
    at.tv_sec as f64 + at.tv_nsec as f64 * 1e-9
}

/// Adds the CPU seconds of a call to `total`.
pub fn on_cpu<T>(total: &mut f64, call: impl FnOnce() -> T) -> T {
    let start = cpu_seconds();
    let made = call();
    *total += cpu_seconds() - start;
    made
}

/// Microseconds of single calls.
#[derive(Default)]
pub struct Calls(Vec<f64>);

impl Calls {
    pub fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let made = call();
        self.0.push(start.elapsed().as_nanos() as f64 / 1000.0);
        made
    }

    pub fn percentile(&mut self, percent: usize) -> f64 {
        self.0.sort_by(f64::total_cmp);
        self.0.get((self.0.len() * percent / 100).min(self.0.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&mut self) -> f64 {
        self.percentile(50)
    }
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub fn load_average() -> String {
    read_to_string("/proc/loadavg").unwrap_or_default().split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

pub fn machine() -> String {
    let cpu = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = cpu.lines().filter(|line| line.starts_with("processor")).count();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':'));
        line.map_or_else(|| "unknown".to_owned(), |(_, value)| value.trim().to_owned())
    };
    let memory = read_to_string("/proc/meminfo").unwrap_or_default();
    let (model, cache) = (field(&cpu, "model name"), field(&cpu, "cache size"));
    format!("{cores} cores, {model}, {cache} of cache a core, {} of memory", field(&memory, "MemTotal"))
}
