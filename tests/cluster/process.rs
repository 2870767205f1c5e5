//! One process of the binary: started, read, signalled, and always ended.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{MissedTickBehavior, interval, timeout};

/// For anything that a test waits for: two cores that others share, and an unoptimised build.
pub const LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at something that another process changes.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Of a log that is shown when a test fails.
const LOG_BYTES_SHOWN: usize = 16 << 10;

/// Looks until `look` finds what it looks for. The error of a look says what was seen instead.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let mut seen = "nothing was seen".to_owned();
    let looks = async {
        let mut pace = interval(LOOK_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pace.tick().await;
            match look().await {
                Ok(found) => return found,
                Err(instead) => seen = instead,
            }
        }
    };
    match timeout(LIMIT, looks).await {
        Ok(found) => found,
        Err(_) => panic!("{what}: not within {LIMIT:?}; last seen: {seen}"),
    }
}

/// A command of the binary, with nothing of ours in its environment.
pub fn command<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
    command.args(arguments).kill_on_drop(true);
    let ours = |name: &str| name.starts_with("STARLING") || name.starts_with("OTEL_") || name == "RUST_LOG";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
        command.env_remove(name);
    }
    command
}

/// Runs a command that ends by itself and has to end well.
pub async fn succeed<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> String {
    let output = timeout(LIMIT, command(arguments).output()).await.expect("the command ends").unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    out.into_owned()
}

/// A process that runs until it is told to stop. Dropped, it is killed; if the test failed, its log is shown.
pub struct Process {
    pub name: String,
    child: Child,
    /// Held open: for nodes its end means to stop.
    _stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
}

impl Process {
    /// Starts it; standard error is added to `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Self {
        let stderr = File::options().append(true).create(true).open(log).unwrap();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stdin = child.stdin.take().unwrap();
        Self { name: name.to_owned(), child, _stdin: stdin, lines, log: log.to_owned() }
    }

    /// The next line of standard output as JSON; panics if there is none.
    pub async fn event(&mut self) -> serde_json::Value {
        let line = timeout(LIMIT, self.lines.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("{} printed nothing within {LIMIT:?}", self.name)).unwrap();
        let line = line.unwrap_or_else(|| panic!("{} closed standard output", self.name));
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{}: {e} in {line:?}", self.name))
    }

    pub fn pid(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    /// The state letter that the kernel shows, `T` for one that is stopped; `None` where it shows none.
    pub fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?;
        // The name before it is in parentheses, and may hold any.
        stat.rsplit_once(") ")?.1.chars().next()
    }

    pub async fn signal(&self, signal: &str) {
        send(signal, self.pid()).await;
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        let status = timeout(LIMIT, self.child.wait()).await;
        status.unwrap_or_else(|_| panic!("{} still runs after {LIMIT:?}", self.name)).unwrap()
    }

    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned()
    }
}

/// Sends a signal, such as `KILL`, `STOP` or `CONT`.
pub async fn send(signal: &str, pid: u32) {
    send_to(signal, &pid.to_string()).await;
}

/// Likewise, to a process or, by a number below zero, to a whole group.
pub async fn send_to(signal: &str, whom: &str) {
    let sent = Command::new("kill").args([&format!("-{signal}"), "--", whom]).status().await.unwrap();
    assert!(sent.success(), "kill -{signal} -- {whom}: {sent}");
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let shown: String = log.chars().skip(log.chars().count().saturating_sub(LOG_BYTES_SHOWN)).collect();
            eprintln!("--- log of {}\n{shown}---", self.name);
        }
        // One that has ended already needs no signal; the runtime reaps it.
        let _ = self.child.start_kill();
    }
}
