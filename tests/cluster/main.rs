//! Several nodes as processes of the real binary, talked to over HTTP as clients and operators do.
//!
//! The engine is `timed` and the model tiny, except in `real`, so that a cluster starts in a moment on any machine. What a
//! test waits for it looks at until it is so, within `process::LIMIT`; nothing here measures time.

mod alone;
mod choices;
mod client;
mod mesh;
mod metrics;
mod process;
mod real;
mod rig;
mod trace;
mod up;
