//! A machine's next deadline as one timer.

use crate::clock::Clock;
use starling_actors::{Context, Timer};

/// Keeps one timer armed for a machine's `poll_timeout`.
#[derive(Default)]
pub struct Wakeup {
    armed: Option<(u64, Timer)>,
}

impl Wakeup {
    /// Arms the timer for `due_us`, sending `tick`; does nothing when it is armed for that moment already.
    pub fn arm<M: Send + 'static>(
        &mut self,
        context: &mut Context<'_, M>,
        clock: &Clock,
        due_us: Option<u64>,
        tick: M,
    ) {
        match (due_us, &self.armed) {
            (Some(due), Some((armed, _))) if due == *armed => return,
            _ => {}
        }
        if let Some((_, timer)) = self.armed.take() {
            timer.cancel();
        }
        if let Some(due) = due_us {
            self.armed = Some((due, context.send_after(clock.until(due), tick)));
        }
    }

    /// The timer fired.
    pub fn fired(&mut self) {
        self.armed = None;
    }
}
