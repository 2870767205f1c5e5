//! Bytes between named, authenticated peers: the wire codec, and links that carry frames.

mod certificate;
pub mod codec;
mod dial;
mod greeting;
mod link;
pub mod memory;
mod mesh;
mod outbox;
mod parting;
mod port;
mod registry;
mod session;
#[doc(hidden)]
pub mod wire;

pub use certificate::{Authority, CertificateError, Credentials, NodeCertificate};
pub use link::{DownReason, Handler, Lane, Link, LinkError, NodeName, NodeNameError, Peer, Port};
pub use mesh::{Limits, Mesh, MeshError, MeshSettings, Timings};
