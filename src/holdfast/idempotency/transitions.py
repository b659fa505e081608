"""The idempotent exchange as a state machine: which phase follows an event, and what to do next. No I/O.

`transition(phase, event)` returns the next phase and the next action. The ASGI and the Django exchange report the same
events and carry out the actions. A pair that cannot occur raises `ImpossibleTransition`.

What the table guarantees: an answer of the application reaches the client only after its transaction has ended as the
answer requires (`Settled`), or, for a 5xx that is also raised, after a rollback; once an exchange is `Settled`,
`Decided` or `Repeating`, nothing the application does is stored; and a phase that has ended stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NoReturn

from holdfast.idempotency.answers import Settlement
from holdfast.idempotency.phases import (
    Answered,
    BeginCalled,
    Closed,
    Decided,
    EndpointRaised,
    ErrorHeld,
    Escaped,
    Event,
    Failed,
    GivenUp,
    Interrupted,
    KeyTaken,
    MessageSent,
    Opened,
    Outside,
    Phase,
    Refused,
    Repeating,
    RepeatNeeded,
    ReplyBegins,
    ResponseComplete,
    Restarted,
    Returned,
    Settled,
    Settling,
    SettlingDone,
    SettlingFailed,
    TransactionOpened,
    Undecided,
    Unsettled,
    Working,
)

# --- what to do next ----------------------------------------------------------------------------------------


class Action(Enum):
    """What the exchange does after an event."""

    CONTINUE = "nothing in particular"
    OPEN = "open the transaction"
    TAKE_KEY = "take the key"
    STOP_ENDPOINT = "end the endpoint: the exchange is decided"
    REJECT_BEGIN = "raise: the response has begun without a transaction"
    FORWARD = "send the message to the server"
    HOLD = "hold the message back"
    DROP = "drop the message"
    REJECT_ANSWER = "raise: the answer claims a success that is not committed"
    SETTLE = "end the transaction as the phase says"
    FINISH = "nothing is left to do; an error is raised to the server"
    FAIL = "roll back, and raise the error"
    REPLY = "roll back what is open, and send the answer"
    REPLY_AND_FAIL = "roll back, send the answer, and raise the error"
    RUN_AGAIN = "roll back, and run everything again"


Transition = tuple[Phase, Action]  # the phase after an event, and the action that follows


class ImpossibleTransition(AssertionError):
    """An event that cannot occur in the phase: a defect of Holdfast's."""


def transition(phase: Phase, event: Event) -> Transition:
    """Return the phase after the event, and what to do next."""
    return _TRANSITIONS[type(event)](phase, event)


def _impossible(phase: Phase, event: Event) -> NoReturn:
    raise ImpossibleTransition(f"{type(event).__name__} in the phase {type(phase).__name__}")


# --- before the work ----------------------------------------------------------------------------------------

_BEGINNING: Mapping[type[Phase], Action] = {
    Outside: Action.OPEN,
    Opened: Action.TAKE_KEY,
    Working: Action.CONTINUE,
    Failed: Action.CONTINUE,
    Unsettled: Action.CONTINUE,
    ErrorHeld: Action.CONTINUE,
    Settling: Action.CONTINUE,
    Settled: Action.CONTINUE,
    Decided: Action.STOP_ENDPOINT,
    Repeating: Action.STOP_ENDPOINT,
    Answered: Action.REJECT_BEGIN,
    Closed: Action.REJECT_BEGIN,
}


def _on_begin(phase: Phase, _event: BeginCalled) -> Transition:
    return phase, _BEGINNING[type(phase)]


def _on_opened(phase: Phase, event: TransactionOpened) -> Transition:
    if not isinstance(phase, Outside):
        _impossible(phase, event)
    return Opened(), Action.TAKE_KEY


def _on_taken(phase: Phase, event: KeyTaken) -> Transition:
    if not isinstance(phase, Opened):
        _impossible(phase, event)
    return Working(), Action.CONTINUE


def _on_decision(phase: Phase, event: Refused | RepeatNeeded) -> Transition:
    if isinstance(phase, (Settled, Decided, Repeating, Answered, Closed)):
        return phase, Action.STOP_ENDPOINT  # it stays as it was decided first
    if isinstance(event, Refused):
        return Decided(event.answer), Action.STOP_ENDPOINT
    if isinstance(phase, Outside):
        _impossible(phase, event)
    return Repeating(event.error), Action.STOP_ENDPOINT


def _on_raised(phase: Phase, _event: EndpointRaised) -> Transition:
    return Failed() if isinstance(phase, Working) else phase, Action.CONTINUE


# --- the response -------------------------------------------------------------------------------------------

_MESSAGES: Mapping[type[Phase], Action] = {
    Outside: Action.FORWARD,
    Opened: Action.HOLD,
    Working: Action.HOLD,
    Failed: Action.HOLD,
    Unsettled: Action.HOLD,
    ErrorHeld: Action.HOLD,
    Settling: Action.DROP,
    Settled: Action.DROP,
    Decided: Action.DROP,
    Repeating: Action.DROP,
    Answered: Action.FORWARD,  # the server reports what is wrong with a second response
    Closed: Action.DROP,
}


def _on_message(phase: Phase, _event: MessageSent) -> Transition:
    return Answered() if isinstance(phase, Outside) else phase, _MESSAGES[type(phase)]


def _on_response(phase: Phase, event: ResponseComplete) -> Transition:
    if isinstance(phase, ErrorHeld):
        phase = phase.before  # a second response takes the place of the first
    if not isinstance(phase, (Opened, Working, Failed, Unsettled)):
        _impossible(phase, event)
    settlement = _settlement_in(phase, event)
    if settlement is None:
        return phase, Action.REJECT_ANSWER
    if event.answer.status >= 500:
        return ErrorHeld(event.answer, settlement, phase), Action.HOLD
    return Settling(event.answer, settlement, phase), Action.SETTLE


def _settlement_in(phase: Undecided, event: ResponseComplete) -> Settlement | None:
    """Return how the transaction is ended; None if the answer claims a success that the phase cannot commit."""
    if isinstance(phase, Working):
        return event.settlement
    if isinstance(phase, Failed):
        # A 5xx is an error page of the framework's then: the endpoint gave no answer.
        return Settlement.ROLL_BACK if event.answer.status >= 500 else event.settlement
    if event.settlement in (Settlement.COMMIT, Settlement.STORE):
        return None
    # Opened: a dependency or the validation refused the request before its work began.
    return Settlement.ROLL_BACK if isinstance(phase, Opened) else Settlement.NOTHING


def _on_settled(phase: Phase, event: SettlingDone) -> Transition:
    if isinstance(phase, Settling):
        return Settled(phase.answer), Action.CONTINUE
    return _without_waiting(phase, event)


def _on_unsettled(phase: Phase, event: SettlingFailed) -> Transition:
    if isinstance(phase, Settling):
        return Unsettled() if event.transaction_ended else phase.before, Action.CONTINUE
    return _without_waiting(phase, event)


def _on_reply(phase: Phase, event: ReplyBegins) -> Transition:
    if isinstance(phase, Settled):
        return Answered(phase.answer), Action.REPLY
    return (phase, Action.DROP) if isinstance(phase, Answered) else _without_waiting(phase, event)


def _without_waiting(phase: Phase, event: Event) -> Transition:
    """Drop what became of a response for which the application did not wait before it ended."""
    if not isinstance(phase, Closed):
        _impossible(phase, event)
    return phase, Action.DROP


# --- the end of the application -----------------------------------------------------------------------------


def _on_end(phase: Phase, event: Returned | Escaped) -> Transition:
    match phase:
        case Outside() | Answered() | Closed():
            return phase, Action.FINISH
        case Opened() | Working() | Failed() | Unsettled() | Settling():
            return Closed(), Action.FAIL
        case ErrorHeld() if isinstance(event, Returned):
            return Settling(phase.answer, phase.settlement, phase.before), Action.SETTLE
        case ErrorHeld():
            return Answered(phase.answer), Action.REPLY_AND_FAIL
        case Settled() | Decided():
            return Answered(phase.answer), Action.REPLY
        case Repeating():
            return phase, Action.RUN_AGAIN


def _on_interrupted(phase: Phase, _event: Interrupted) -> Transition:
    if isinstance(phase, (Outside, Answered, Closed)):
        return phase, Action.FINISH
    return Closed(), Action.FAIL


def _on_repetition(phase: Phase, event: Restarted | GivenUp) -> Transition:
    if not isinstance(phase, Repeating):
        _impossible(phase, event)
    return (Answered(event.answer), Action.REPLY) if isinstance(event, GivenUp) else (Outside(), Action.CONTINUE)


_TRANSITIONS: Mapping[type[Event], Callable[[Phase, Any], Transition]] = {
    BeginCalled: _on_begin,
    TransactionOpened: _on_opened,
    KeyTaken: _on_taken,
    MessageSent: _on_message,
    ResponseComplete: _on_response,
    Refused: _on_decision,
    RepeatNeeded: _on_decision,
    EndpointRaised: _on_raised,
    SettlingDone: _on_settled,
    SettlingFailed: _on_unsettled,
    ReplyBegins: _on_reply,
    Returned: _on_end,
    Escaped: _on_end,
    Interrupted: _on_interrupted,
    Restarted: _on_repetition,
    GivenUp: _on_repetition,
}
