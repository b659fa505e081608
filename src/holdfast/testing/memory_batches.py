"""Batches of an outbox in memory: as a worker calls batch handlers, with halves where a call fails."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from holdfast.context import HandlerContext
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler, HandlerRegistry
from holdfast.outcome import Outcome
from holdfast.postgres.delivery import Delivery
from holdfast.testing.memory_rows import Row


class Item(NamedTuple):
    """One row of a batch, and what its handler gets of it."""

    row: Row
    delivery: Delivery
    event: EventEnvelope
    context: HandlerContext


Results = list[Outcome | Exception]


def batches(due: Iterable[Row], registry: HandlerRegistry) -> Iterator[tuple[Handler, list[Row]]]:
    """Yield the rows that are due in the order of delivery: one row, or those for one call of a batch handler.

    Of rows that have the same key a batch gets the first.
    """
    rows = list(due)
    gathered: dict[str, deque[Row]] = defaultdict(deque)
    for row in rows:
        if registry[str(row.handler_name)].batch is not None:
            gathered[str(row.handler_name)].append(row)
    taken: set[int] = set()
    for row in rows:
        handler = registry[str(row.handler_name)]
        if handler.batch is None:
            yield handler, [row]
        elif id(row) not in taken:
            batch = _take(gathered[handler.name], handler.batch.size)
            taken.update(map(id, batch))
            yield handler, batch


def _take(waiting: deque[Row], size: int) -> list[Row]:
    taken: dict[str, Row] = {}
    again: list[Row] = []
    while waiting and len(taken) < size:
        row = waiting.popleft()
        if taken.setdefault(row.idempotency_key, row) is not row:
            again.append(row)
    waiting.extendleft(reversed(again))
    return list(taken.values())


async def halving(
    items: list[Item], call: Callable[[list[Item]], Awaitable[Results]]
) -> list[tuple[Item, Outcome | Exception]]:
    """Call the handler with all rows, and with halves if that fails; return the result of each row."""
    try:
        return list(zip(items, await call(items), strict=True))
    except Exception as error:
        if len(items) == 1:
            return [(items[0], error)]
    middle = (len(items) + 1) // 2
    return await halving(items[:middle], call) + await halving(items[middle:], call)
