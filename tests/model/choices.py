"""What the rules of the machine choose from. Most of it depends on what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.model.test_outbox_machine import OutboxMachine

LONG = 3600.0  # no run takes this long: what is delayed or leased for so long stays so until a rule says otherwise

TYPES = ("order.placed", "order.shipped")
HANDLERS = ("billing.charge", "billing.book", "mail.send")
TARGETS = (None, "billing")
EVENT_ROUTES = tuple(f"{target or '*'}/{kind}" for target in TARGETS for kind in TYPES)
ROUTES = (*HANDLERS, *EVENT_ROUTES)
CHANNELS = ("outbox_default", "outbox_gen_1")
REASONS = ("max_deliveries", "retry_terminal", "rejected", "cancelled", "expired")

T = TypeVar("T")


Choice = Callable[["OutboxMachine"], list[T]]


def _pool(likely: Choice[T], all: Choice[T]) -> Callable[[OutboxMachine], st.SearchStrategy[T]]:
    """Half of the time a likely one: else most calls would do nothing."""

    def choose(machine: OutboxMachine) -> st.SearchStrategy[T]:
        first, every = likely(machine), all(machine)
        return st.sampled_from([*first * (len(every) // max(1, len(first))), *every])

    return choose


def one(likely: Choice[T], all: Choice[T]) -> st.SearchStrategy[T]:
    return st.runner().flatmap(_pool(likely, all))


def some(likely: Choice[T], all: Choice[T]) -> st.SearchStrategy[list[T]]:
    choose = _pool(likely, all)
    return st.runner().flatmap(lambda machine: st.lists(choose(machine), min_size=1, max_size=4))


def events_that_are(*statuses: str) -> st.SearchStrategy[UUID]:
    return one(
        lambda machine: [row.id for row in machine.model.rows.values() if row.status in statuses and not row.deleted],
        lambda machine: list(machine.model.rows),
    )


held_ones = some(lambda machine: machine.live, lambda machine: machine.leases + machine.forged)
marks = st.sampled_from((False,) * 3 + (True,)).flatmap(lambda some: events_that_are("pending") if some else st.none())
delays = st.sampled_from((0.0, 0.0, LONG))
limits = st.integers(1, 4)
sources = st.sampled_from(("shop", "depot"))
keys = st.sampled_from(("timer", "other"))
handlers = st.sampled_from(HANDLERS)
generations = st.sampled_from((0,) * 7 + (1,))
seldom = st.sampled_from((False,) * 7 + (True,))
