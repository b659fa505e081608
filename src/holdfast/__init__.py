"""Holdfast: reliable events for Python services on Postgres.

Three entry points: `Publisher` writes events inside your transaction, `Worker` delivers them to handlers, and
`Operator` reads and changes their state. The `holdfast` command is the command line of the worker and the operator.
"""

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.errors import HoldfastError, TerminalHandlerError, TransientHandlerError
from holdfast.handlers import HandlerRegistry
from holdfast.new_event import NewEvent
from holdfast.operator import Operator
from holdfast.outcome import Done, Reject, Retry, Snooze
from holdfast.postgres.publisher import Publisher
from holdfast.protocols import EventHandler, EventListener, EventPublisher
from holdfast.reactions.reactions import Reactions
from holdfast.retry import RetryPolicy
from holdfast.settings import WorkerSettings
from holdfast.worker.worker import Worker

__all__ = [
    "Done",
    "EventEnvelope",
    "EventHandler",
    "EventListener",
    "EventPublisher",
    "HandlerContext",
    "HandlerRegistry",
    "HoldfastError",
    "NewEvent",
    "Operator",
    "Publisher",
    "Reactions",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "TerminalHandlerError",
    "TransientHandlerError",
    "Worker",
    "WorkerSettings",
]
