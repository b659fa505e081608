"""A delivery fails like any other, whatever the error of its handler does while it is read (RTY-1)."""

from __future__ import annotations

from typing import Any, NoReturn

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.failure import describe
from holdfast.retry import classify
from tests.worker.support import Facts, drained, publish, running

pytestmark = pytest.mark.newcomer

ATTRIBUTES = (
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__traceback__",
    "__notes__",
    "__dict__",
    "args",
    "response",
    "status_code",
    "sqlstate",
    "orig",
)


def raising(self: object, *args: object) -> NoReturn:
    raise RuntimeError("cannot be read")


ODD: dict[str, type[Exception]] = {
    **{name: type("Odd", (Exception,), {name: property(raising)}) for name in ATTRIBUTES},
    "__str__": type("Odd", (Exception,), {"__str__": raising}),
    "__repr__": type("Odd", (Exception,), {"__repr__": raising}),
    "__getattr__": type("Odd", (Exception,), {"__getattr__": raising}),
    "exceptions": type("Odd", (ExceptionGroup,), {"exceptions": property(raising)}),
    "__module__": type("Odd", (Exception,), {"__module__": None}),
}


def made(name: str) -> Exception:
    kind = ODD[name]
    return kind("z", [ValueError("v")]) if issubclass(kind, ExceptionGroup) else kind("z")


async def test_the_delivery_fails(dsn: str, conn: asyncpg.Connection) -> None:
    """In a coroutine, in a thread and in a transaction; without a defect of the worker."""
    registry, facts = HandlerRegistry(), Facts()
    once = RetryPolicy(max_attempts=1)

    def handlers(name: str) -> tuple[Any, ...]:
        async def asynchronous(event: EventEnvelope) -> None:
            raise made(name)

        def threaded(event: EventEnvelope) -> None:
            raise made(name)

        async def transactional(event: EventEnvelope, tx: asyncpg.Connection) -> None:
            raise made(name)

        return asynchronous, threaded, transactional

    names = [(odd, function) for odd in ODD for function in handlers(odd)]
    for n, (_, function) in enumerate(names):
        registry.add(f"odd.n{n}", ("odd.happened",), function, retry=once)
    async with running(dsn, registry, facts):
        await publish(conn, "odd.happened")
        await drained(conn)
    failed = await conn.fetchval("SELECT count(*) FROM core.failed")
    assert (failed, facts.notices("runner_failed")) == (len(names), [])


@pytest.mark.parametrize("name", ["__cause__", "__context__", "__module__", "__suppress_context__"])
def test_what_can_be_read_is_shown(name: str) -> None:
    assert describe(made(name)).text.endswith("Odd: z")


@pytest.mark.parametrize("name", ODD)
def test_the_classifier_never_raises(name: str) -> None:
    assert not classify(made(name)).terminal
