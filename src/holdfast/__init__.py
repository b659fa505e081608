"""Holdfast: reliable events for Python services on Postgres.

Three entry points: `Publisher` writes events inside your transaction, `Worker` delivers them to handlers, and
`Operator` reads and changes their state. The `holdfast` command is the command line of the worker and the operator.
"""

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Done": "holdfast.outcome",
            "EventEnvelope": "holdfast.envelope",
            "EventHandler": "holdfast.protocols",
            "EventListener": "holdfast.protocols",
            "EventPublisher": "holdfast.protocols",
            "HandlerContext": "holdfast.context",
            "HandlerRegistry": "holdfast.handlers",
            "HoldfastError": "holdfast.errors",
            "NewEvent": "holdfast.new_event",
            "Operator": "holdfast.operator",
            "Publisher": "holdfast.postgres.publisher",
            "Reactions": "holdfast.reactions.reactions",
            "Reject": "holdfast.outcome",
            "Retry": "holdfast.outcome",
            "RetryPolicy": "holdfast.retry",
            "Snooze": "holdfast.outcome",
            "TerminalHandlerError": "holdfast.errors",
            "TransientHandlerError": "holdfast.errors",
            "Worker": "holdfast.worker.worker",
            "WorkerSettings": "holdfast.settings",
        },
    )

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
