"""The phases of an idempotent exchange, and the events that lead from one to another (see transitions.py). No I/O.

Outside ──> Opened ──> Working ──> Settling ──> Settled ──> Answered
               │          │           │
               └──────────┴───────────┴──> Decided (Holdfast answers) or Repeating (everything is run again)
"""

from __future__ import annotations

from dataclasses import dataclass

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
