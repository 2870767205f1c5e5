//! Bytes between named, authenticated peers. Today: the wire codec.

pub mod codec;
