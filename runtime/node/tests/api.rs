//! The API over real sockets, with a scripted engine behind it.

#[path = "api/bad_input.rs"]
mod bad_input;
#[path = "api/choices.rs"]
mod choices;
#[path = "api/deleting.rs"]
mod deleting;
#[path = "api/generation.rs"]
mod generation;
#[path = "api/leaving.rs"]
mod leaving;
#[path = "api/script.rs"]
mod script;
#[path = "api/surroundings.rs"]
mod surroundings;
