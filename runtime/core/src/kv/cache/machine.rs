//! The manager as a machine: inputs and effects are plain values, so an actor, a simulator and a recorded trace can all
//! drive it. Nothing here waits for the time.

use super::{After, Copy, Error, Forgotten, Manager, Opened, PlanId, Request, SequenceId, Standing, Turn, TurnEnd};
use crate::ids::{ConversationKey, TokenId};
use crate::kv::identity::Scope;
use serde::{Deserialize, Serialize};

/// A call of the manager's; see the method of the same name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Create {
        sequence: SequenceId,
        scope: Scope,
        tokens: Vec<TokenId>,
        conversation: Option<ConversationKey>,
        /// See `Request`.
        #[serde(default)]
        reusable_tokens: Option<u32>,
    },
    Resume {
        sequence: SequenceId,
        restored: Vec<u8>,
    },
    Resize {
        sequence: SequenceId,
        capacity: Option<u32>,
        history: Option<u32>,
    },
    Commit {
        sequence: SequenceId,
        tokens: Vec<TokenId>,
        after: After,
    },
    Stop {
        sequence: SequenceId,
    },
    Suspend {
        sequence: SequenceId,
    },
    Close {
        sequence: SequenceId,
    },
    Plan {
        sequence: SequenceId,
    },
    DropPlan {
        plan: PlanId,
    },
    BeginTurn {
        conversation: ConversationKey,
        sequence: SequenceId,
    },
    EndTurn {
        conversation: ConversationKey,
        sequence: SequenceId,
    },
    AbandonTurn {
        conversation: ConversationKey,
        sequence: SequenceId,
    },
    Expire {
        conversation: ConversationKey,
    },
    Forget {
        conversation: ConversationKey,
    },
    ForgetScope {
        scope: Scope,
    },
    Prefetch {
        scope: Scope,
        tokens: Vec<TokenId>,
    },
    ResizePools {
        tier: u8,
        slots: Vec<u32>,
    },
    Clear,
    /// Time has passed: what is due at `Manager::poll_timeout` is done.
    Tick,
}

/// What follows from an input: copies to be made in their order, then one answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    Copy(Copy),
    Created(Opened),
    /// A resume, resize or prefetch that fits, or does not and changed nothing.
    Fits(bool),
    Committed(Standing),
    Planned(Option<PlanId>),
    TurnBegan(Turn),
    TurnEnded(TurnEnd),
    Forgotten(Forgotten),
    Done,
    /// Nothing was changed.
    Refused(Error),
}

impl Manager {
    /// Takes one input and appends what follows from it. Total: what makes no sense is `Refused`.
    /// Conversations whose time has come expire first.
    pub fn handle(&mut self, now_us: u64, input: Input, out: &mut Vec<Effect>) {
        self.advance(now_us);
        let mut copies = Vec::new();
        let answer = self.answer(input, &mut copies);
        out.extend(copies.into_iter().map(Effect::Copy));
        out.push(answer.unwrap_or_else(Effect::Refused));
    }

    fn answer(&mut self, input: Input, copies: &mut Vec<Copy>) -> Result<Effect, Error> {
        Ok(match input {
            Input::Create { sequence, scope, tokens, conversation, reusable_tokens } => {
                Effect::Created(self.open(sequence, Request { scope, tokens: &tokens, conversation, reusable_tokens })?)
            }
            Input::Resume { sequence, restored } => Effect::Fits(self.resume(sequence, &restored, copies)?),
            Input::Resize { sequence, capacity, history } => {
                Effect::Fits(self.resize(sequence, (capacity, history), copies)?)
            }
            Input::Commit { sequence, tokens, after } => {
                Effect::Committed(self.commit(sequence, &tokens, after, copies)?)
            }
            Input::Stop { sequence } => {
                self.stop(sequence)?;
                Effect::Done
            }
            Input::Suspend { sequence } => {
                self.suspend(sequence)?;
                Effect::Done
            }
            Input::Close { sequence } => {
                self.close(sequence);
                Effect::Done
            }
            Input::Plan { sequence } => Effect::Planned(self.plan(sequence)?.map(|(plan, _)| plan)),
            Input::DropPlan { plan } => {
                self.drop_plan(plan)?;
                Effect::Done
            }
            Input::BeginTurn { conversation, sequence } => Effect::TurnBegan(self.begin_turn(conversation, sequence)?),
            Input::EndTurn { conversation, sequence } => Effect::TurnEnded(self.end_turn(conversation, sequence)?),
            Input::AbandonTurn { conversation, sequence } => {
                self.abandon_turn(conversation, sequence)?;
                Effect::Done
            }
            Input::Expire { conversation } => {
                self.expire(conversation);
                Effect::Done
            }
            Input::Forget { conversation } => Effect::Forgotten(self.forget_conversation(conversation)),
            Input::ForgetScope { scope } => Effect::Forgotten(self.forget_scope(&scope)),
            Input::Prefetch { scope, tokens } => Effect::Fits(self.prefetch(&scope, &tokens, copies)),
            Input::ResizePools { tier, slots } => {
                self.resize_pools(tier, &slots, copies)?;
                Effect::Done
            }
            Input::Tick => Effect::Done,
            Input::Clear => {
                self.clear()?;
                Effect::Done
            }
        })
    }
}
