"""The idempotent exchange as a state machine: phases, events, and what to do next. No I/O.

    Outside ──> Opened ──> Working ──> Settling ──> Settled ──> Answered
                   │          │           │
                   └──────────┴───────────┴──> Decided (Holdfast answers) or Repeating (everything is run again)

`transition(phase, event)` returns the next phase and the next action. The ASGI and the Django exchange report the same
events and carry out the actions. A pair that cannot occur raises `ImpossibleTransition`.

What the table guarantees: an answer of the application reaches the client only after its transaction has ended as the
answer requires (`Settled`), or, for a 5xx that is also raised, after a rollback; once an exchange is `Settled`,
`Decided` or `Repeating`, nothing the application does is stored; and a phase that has ended stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NoReturn, assert_never

from holdfast.idempotency.answers import Answer, Settlement

# --- phases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outside:
    """No transaction was asked for: the request has nothing to do with Holdfast so far."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The transaction is open, and the key has not been taken."""


@dataclass(frozen=True, slots=True)
class Working:
    """The key is taken, or the request has none: the endpoint is at work."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The endpoint raised an error of its own, of which the framework may yet make a response."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The commit failed with an error of the application's: there is nothing left to undo or to store."""


@dataclass(frozen=True, slots=True)
class ErrorHeld:
    """The application answered with 5xx, which waits until it returns: it may yet raise what was wrong."""

    answer: Answer
    settlement: Settlement
    before: Undecided


@dataclass(frozen=True, slots=True)
class Settling:
    """The transaction is being ended as the answer requires."""

    answer: Answer
    settlement: Settlement
    before: Undecided


@dataclass(frozen=True, slots=True)
class Settled:
    """The transaction has ended as the answer requires, and the answer has not been sent."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Decided:
    """Holdfast answers: a refusal, or what is stored for the key. The endpoint's changes are rolled back."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Repeating:
    """An error that may pass: everything is rolled back and run again."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Answered:
    """A response is on its way to the client; `answer` is None when the application sent it without Holdfast."""

    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The transaction is rolled back, and the application's error is raised to the server."""


Undecided = Opened | Working | Failed | Unsettled
Phase = Outside | Undecided | ErrorHeld | Settling | Settled | Decided | Repeating | Answered | Closed

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginCalled:
    """The endpoint asks for its transaction, or for the key to be taken."""


@dataclass(frozen=True, slots=True)
class TransactionOpened:
    """A transaction has begun."""


@dataclass(frozen=True, slots=True)
class KeyTaken:
    """The request is recorded under its key, or needs none."""


@dataclass(frozen=True, slots=True)
class MessageSent:
    """The application sends a part of a response."""


@dataclass(frozen=True, slots=True)
class ResponseComplete:
    """The application's response is whole; `settlement` is what its status requires."""

    answer: Answer
    settlement: Settlement


@dataclass(frozen=True, slots=True)
class Refused:
    """Holdfast has an answer of its own."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class RepeatNeeded:
    """An error occurred that may pass when everything is run again."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class EndpointRaised:
    """The endpoint raised an error of its own; the framework has not made a response of it yet."""


@dataclass(frozen=True, slots=True)
class SettlingDone:
    """The transaction has ended as the answer requires."""


@dataclass(frozen=True, slots=True)
class SettlingFailed:
    """It has not, by an error of the application's; `transaction_ended` if no transaction is left."""

    transaction_ended: bool


@dataclass(frozen=True, slots=True)
class ReplyBegins:
    """The settled answer is about to be sent."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The application has returned."""


@dataclass(frozen=True, slots=True)
class Escaped:
    """An error has left the application, and it is the application's own."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The request is cancelled, the process is ending, or an error goes straight to the server."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The application is about to be run again."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It has been run often enough, or cannot be run again."""

    answer: Answer


Event = (
    BeginCalled | TransactionOpened | KeyTaken | MessageSent | ResponseComplete | Refused | RepeatNeeded
    | EndpointRaised | SettlingDone | SettlingFailed | ReplyBegins | Returned | Escaped | Interrupted | Restarted
    | GivenUp
)  # fmt: skip


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


class Transition(NamedTuple):
    """The phase after an event, and the action that follows."""

    phase: Phase
    action: Action


class ImpossibleTransition(AssertionError):
    """An event that cannot occur in the phase: a defect of Holdfast's."""


def transition(phase: Phase, event: Event) -> Transition:
    """Return the phase after the event, and what to do next."""
    match event:
        case MessageSent():
            return _on_message(phase)
        case BeginCalled():
            return _on_begin(phase)
        case ResponseComplete():
            return _on_response(phase, event)
        case Returned() | Escaped():
            return _on_end(phase, event)
        case TransactionOpened() if isinstance(phase, Outside):
            return Transition(Opened(), Action.TAKE_KEY)
        case KeyTaken() if isinstance(phase, Opened):
            return Transition(Working(), Action.CONTINUE)
        case SettlingDone() | SettlingFailed():
            return _on_settling(phase, event)
        case ReplyBegins():
            return _on_reply(phase, event)
        case Refused() | RepeatNeeded():
            return _on_decision(phase, event)
        case EndpointRaised():
            return Transition(Failed() if isinstance(phase, Working) else phase, Action.CONTINUE)
        case Interrupted():
            if isinstance(phase, Outside | Answered | Closed):
                return Transition(phase, Action.FINISH)
            return Transition(Closed(), Action.FAIL)
        case Restarted() if isinstance(phase, Repeating):
            return Transition(Outside(), Action.CONTINUE)
        case GivenUp(answer) if isinstance(phase, Repeating):
            return Transition(Answered(answer), Action.REPLY)
        case _:
            _impossible(phase, event)


def _impossible(phase: Phase, event: Event) -> NoReturn:
    raise ImpossibleTransition(f"{type(event).__name__} in the phase {type(phase).__name__}")


def _on_begin(phase: Phase) -> Transition:
    match phase:
        case Outside():
            return Transition(phase, Action.OPEN)
        case Opened():
            return Transition(phase, Action.TAKE_KEY)
        case Working() | Failed() | Unsettled() | ErrorHeld() | Settling() | Settled():
            return Transition(phase, Action.CONTINUE)
        case Decided() | Repeating():
            return Transition(phase, Action.STOP_ENDPOINT)
        case Answered() | Closed():
            return Transition(phase, Action.REJECT_BEGIN)
        case _:
            assert_never(phase)


def _on_message(phase: Phase) -> Transition:
    match phase:
        case Outside():
            return Transition(Answered(), Action.FORWARD)
        case Answered():
            return Transition(phase, Action.FORWARD)  # the server knows best what is wrong with a second response
        case Opened() | Working() | Failed() | Unsettled() | ErrorHeld():
            return Transition(phase, Action.HOLD)
        case Settling() | Settled() | Decided() | Repeating() | Closed():
            return Transition(phase, Action.DROP)
        case _:
            assert_never(phase)


def _on_response(phase: Phase, event: ResponseComplete) -> Transition:
    match phase:
        case ErrorHeld():
            return _on_response(phase.before, event)  # a second response takes the place of the first
        case Opened() | Working() | Failed() | Unsettled():
            settlement = _settlement_in(phase, event)
            if settlement is None:
                return Transition(phase, Action.REJECT_ANSWER)
            if event.answer.status >= 500:
                return Transition(ErrorHeld(event.answer, settlement, phase), Action.HOLD)
            return Transition(Settling(event.answer, settlement, phase), Action.SETTLE)
        case _:
            _impossible(phase, event)


def _settlement_in(phase: Undecided, event: ResponseComplete) -> Settlement | None:
    """Return how the transaction is ended; None if the answer claims a success that the phase cannot commit."""
    succeeds = event.settlement in (Settlement.COMMIT, Settlement.STORE)
    match phase:
        case Opened():  # a dependency or the validation refused the request before its work began
            return None if succeeds else Settlement.ROLL_BACK
        case Unsettled():
            return None if succeeds else Settlement.NOTHING
        case Failed() if event.answer.status >= 500:
            return Settlement.ROLL_BACK  # an error page of the framework's: the endpoint gave no answer
        case _:
            return event.settlement


def _on_settling(phase: Phase, event: SettlingDone | SettlingFailed) -> Transition:
    match phase, event:
        case Settling(), SettlingDone():
            return Transition(Settled(phase.answer), Action.CONTINUE)
        case Settling(), SettlingFailed():
            return Transition(Unsettled() if event.transaction_ended else phase.before, Action.CONTINUE)
        case Closed(), _:  # the application ended without waiting for the response it had sent
            return Transition(phase, Action.CONTINUE)
        case _:
            _impossible(phase, event)


def _on_reply(phase: Phase, event: ReplyBegins) -> Transition:
    match phase:
        case Settled():
            return Transition(Answered(phase.answer), Action.REPLY)
        case Answered() | Closed():  # the application ended without waiting, see above
            return Transition(phase, Action.DROP)
        case _:
            _impossible(phase, event)


def _on_decision(phase: Phase, event: Refused | RepeatNeeded) -> Transition:
    if isinstance(phase, Settled | Decided | Repeating | Answered | Closed):
        return Transition(phase, Action.STOP_ENDPOINT)  # it stays as it was decided first
    if isinstance(event, Refused):
        return Transition(Decided(event.answer), Action.STOP_ENDPOINT)
    if isinstance(phase, Outside):
        _impossible(phase, event)
    return Transition(Repeating(event.error), Action.STOP_ENDPOINT)


def _on_end(phase: Phase, event: Returned | Escaped) -> Transition:
    match phase:
        case Outside() | Answered() | Closed():
            return Transition(phase, Action.FINISH)
        case Opened() | Working() | Failed() | Unsettled() | Settling():
            return Transition(Closed(), Action.FAIL)
        case ErrorHeld() if isinstance(event, Returned):
            return Transition(Settling(phase.answer, phase.settlement, phase.before), Action.SETTLE)
        case ErrorHeld():
            return Transition(Answered(phase.answer), Action.REPLY_AND_FAIL)
        case Settled() | Decided():
            return Transition(Answered(phase.answer), Action.REPLY)
        case Repeating():
            return Transition(phase, Action.RUN_AGAIN)
        case _:
            assert_never(phase)
