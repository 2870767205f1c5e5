//! Bytes between named, authenticated peers: the wire codec, and links that carry frames.

mod certificate;
pub mod codec;
mod link;
pub mod memory;

pub use certificate::{Authority, CertificateError, Credentials, NodeCertificate};
pub use link::{DownReason, Handler, Lane, Link, LinkError, NodeName, NodeNameError, Peer, Port};
