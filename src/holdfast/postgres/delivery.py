"""A delivery: one claimed row of the outbox, as a worker holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.tracing import HandleSpan

_CRASHES_ALLOWED = 3


class Delivery:
    """One claimed row: an event, the handler it is owed to, and the lease under which it is held."""

    # What outbox_claim returns, in its order.
    id: UUID
    route: str
    priority: int
    available_at: datetime
    origin_id: UUID | None
    event_type: str
    event_version: int
    occurred_at: datetime
    source: str
    target: str | None
    domain_id: UUID | None
    payload: str
    idempotency_key: str
    trace_context: str | None
    headers: str | None
    attempts: int
    failing_for: float | None
    expired: bool
    cancelled: bool
    handled: bool
    # What only this worker knows.
    token: UUID
    handler: Handler
    key: tuple[str, str]
    twin: bool  # the worker has another copy of the same key
    claimed_at: float
    started_at: float | None  # when the handler, or the middleware after it, was last given its time
    began_at: float | None  # when the first of its middlewares began to run, or the handler
    ended_at: float  # when the attempt ended
    span: HandleSpan | None  # of the attempt, if it is recorded
    ordering_key: str | None
    seq: int  # its number, if it has an ordering key
    awaited: bool  # another row may be claimed when this one is settled
    closed: bool  # what became of it is counted and reported
    carried: tuple[EventEnvelope, HandlerContext] | None  # the event, if it came decoded

    __slots__ = tuple(__annotations__)

    def __init__(self, record: Iterable[Any], token: UUID, handlers: Mapping[str, Handler], claimed_at: float) -> None:
        (
            self.id, self.route, self.priority, self.available_at, self.origin_id,
            self.event_type, self.event_version, self.occurred_at, self.source, self.target, self.domain_id,
            self.payload, self.idempotency_key, self.trace_context, self.headers,
            self.attempts, self.failing_for, self.expired, self.cancelled, self.handled,
        ) = record  # fmt: skip
        self.token = token
        self.handler = handler = handlers[self.route]
        self.key = (handler.name, self.idempotency_key)
        self.twin = False
        self.claimed_at = claimed_at
        self.started_at = self.began_at = None
        self.ended_at = 0.0
        self.span = None
        self.ordering_key = None
        self.seq = 0
        self.awaited = False
        self.closed = False
        self.carried = None

    @property
    def event_id(self) -> UUID:
        """The id under which the event was published; a sibling's own id is another one."""
        return self.origin_id or self.id

    @property
    def handler_name(self) -> str:
        return self.handler.name

    @property
    def allowance(self) -> int:
        """How many deliveries are allowed: the handler's budget, but at least three while no attempt has ended.

        A worker that dies takes an attempt from everything it holds, also from what it had not started.
        """
        budget = self.handler.retry.budget
        return budget if self.failing_for is not None else max(budget, _CRASHES_ALLOWED)

    @property
    def suspect(self) -> bool:
        """Whether this is the last delivery and no earlier one has ended: the event may have killed its workers."""
        return self.attempts > 1 and self.attempts == self.allowance and self.failing_for is None
