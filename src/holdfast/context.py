"""The handler context: what a handler may know about its delivery, beside the envelope."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple
from uuid import UUID


class HandlerContext(NamedTuple):
    """The context of one delivery, passed to a handler that has a parameter named `context`.

    What the handler publishes inherits `correlation_id` and names this event as its cause.
    """

    event_id: UUID
    delivery_id: UUID
    handler_name: str
    attempt: int
    headers: Mapping[str, str]
    trace_context: str | None = None

    @property
    def correlation_id(self) -> str:
        """The id that ties a chain of events together: inherited, or the first event's own."""
        return self.headers.get("correlation_id") or str(self.event_id)

    @property
    def database(self) -> str | None:
        """The name of the database that the event came from, in a worker that serves several."""
        return current_database.get()

    @property
    def causation_id(self) -> str | None:
        """The event whose handler published this one."""
        return self.headers.get("causation_id")


current_database: ContextVar[str | None] = ContextVar("holdfast_database", default=None)
current_context: ContextVar[HandlerContext | None] = ContextVar("holdfast_context", default=None)
