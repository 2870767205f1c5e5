use super::planted::Mistake;
use super::*;

mod model;
mod registry;
mod rules;
mod simulation;

const VERSION: u32 = 1;
const SETTINGS: u64 = 0x5e77;
const SECOND: u64 = 1_000_000;

fn name(at: usize) -> Name {
    Name::from(["a", "b", "c", "d", "e", "f"][at])
}

fn life(at: usize, incarnation: u64) -> Life {
    Life { name: name(at), incarnation: Incarnation(incarnation) }
}

fn config(names: usize) -> Config {
    Config::new((0..names).map(name).collect(), VERSION, SETTINGS)
}

fn hello(incarnation: u64) -> Hello {
    Hello { incarnation: Incarnation(incarnation), version: VERSION, settings: SETTINGS, cluster: None }
}
