//! What outlives the lives of a member: whether this process is in a cluster, and what it knows of the others.

use starling_core::bootstrap::{self, Input, Left, Machine};
use starling_core::ids::Incarnation;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a life ended; one that did not say so lost its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Left(Left),
    /// The gate asked for a new life itself.
    Asked,
}

/// Held by one life of the queue after another.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    machine: Option<Machine>,
    end: Option<End>,
    /// The life before, while it may be replaced by the next one: its ranks run on.
    last: Option<Incarnation>,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new life begins. Says which one it replaces, if that only lost its state.
    pub(crate) fn born(
        &self,
        now_us: u64,
        incarnation: Incarnation,
        make: impl FnOnce() -> Machine,
        out: &mut Vec<bootstrap::Effect>,
    ) -> Option<Incarnation> {
        let mut state = self.state();
        let (end, last) = (state.end.take(), state.last.take());
        let replaces = last.filter(|_| end.is_none());
        match &mut state.machine {
            None => state.machine = Some(make()),
            Some(machine) => {
                if end != Some(End::Asked) {
                    let left = match end {
                        Some(End::Left(left)) => left,
                        _ => Left::StateLost,
                    };
                    machine.handle(now_us, Input::Left(left), &mut Vec::new());
                }
                machine.handle(now_us, Input::Incarnation(incarnation), out);
            }
        }
        replaces
    }

    /// This life is a member from now on: if it loses its state, the next one takes its place.
    pub(crate) fn inside(&self, incarnation: Incarnation) {
        self.state().last = Some(incarnation);
    }

    pub(crate) fn ends(&self, end: End) {
        self.state().end = Some(end);
    }

    pub(crate) fn handle(&self, now_us: u64, input: Input, out: &mut Vec<bootstrap::Effect>) {
        if let Some(machine) = &mut self.state().machine {
            machine.handle(now_us, input, out);
        }
    }

    /// Looks at the machine, if a life has begun.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Machine) -> T) -> Option<T> {
        self.state().machine.as_ref().map(look)
    }
}
