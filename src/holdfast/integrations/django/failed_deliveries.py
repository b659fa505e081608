"""The verbs of `Operator` that the admin's pages use, for the user of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from holdfast.errors import NotFound
from holdfast.integrations._waiting import wait_for
from holdfast.integrations.django.configuration import Configuration
from holdfast.operator import Operator
from holdfast.operator.outcome import Moved
from holdfast.operator.selection import Selection
from holdfast.postgres.operations.events import Delivery, EventDetail
from holdfast.postgres.operations.failed import FailedEvent, FailureGroup

T = TypeVar("T")

PAGE = 50


class FailedDeliveries:
    """Failed deliveries for one user; the audit has every change under the user's name."""

    def __init__(self, user: Any) -> None:
        self._actor = user.get_username()

    def overview(
        self, group: str | None, before: tuple[datetime, UUID] | None
    ) -> tuple[list[FailureGroup], list[FailedEvent]]:
        """Return the groups of failures, and a page of failed deliveries: of one group or of all."""
        selection = Selection.group(group) if group else Selection()

        async def read(operator: Operator) -> tuple[list[FailureGroup], list[FailedEvent]]:
            groups = await operator.failed.groups()
            return list(groups.groups), await operator.failed.page(selection, limit=PAGE, before=before)

        return self._run(read)

    def detail(self, id: UUID, *, payload: bool) -> tuple[EventDetail, Delivery]:
        """Return a delivery that has failed, now or earlier, with its event; the admin shows no others."""
        event = self._run(lambda operator: operator.events.detail(id, payload=payload))
        for delivery in event.deliveries:
            if delivery.id == id and (delivery.status == "failed" or delivery.cycles):
                return event, delivery
        raise NotFound("id", f"{id} is not a delivery that has failed", "choose one of the list")

    def move(self, verb: str, ids: Iterable[str], group: str | None, reason: str | None) -> Moved:
        """Replay or discard the deliveries with these ids, or all of a group."""

        async def change(operator: Operator) -> Moved:
            selection = Selection.group(group) if group else None
            rows: Iterable[UUID | str] = await operator.failed.select(selection) if selection else ids
            moving = operator.failed.replay if verb == "replay" else operator.failed.discard
            return await moving(rows, reason=reason, selection=selection)

        return self._run(change)

    def _run(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        configuration = Configuration.read()

        async def connected() -> T:
            async with Operator(configuration.dsn, actor=self._actor, schema=configuration.schema) as operator:
                return await work(operator)

        return wait_for(connected())
