//! Actors of other nodes: the same rules over every kind of mesh.

#[path = "../support/mod.rs"]
mod support;

mod fabric;
mod fates;
mod hostile;
mod links;
mod messages;
mod probe;
mod streams;
mod twin;
