"""Handlers with an order, limits, a breaker, fairness or batches. Run by `holdfast worker chaos.flow.app:registry`."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

import asyncpg

from chaos.flow import AMENDED, AWAY, SLOT_SECONDS
from chaos.journal import DIRECTORY, Deliveries, Journal
from chaos.libraries import write
from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    RetryPolicy,
    TerminalHandlerError,
    TransientHandlerError,
)
from holdfast.flow import Pause

PATIENT = RetryPolicy(max_attempts=1000, base_delay=0.1, max_delay=0.5)
registry = HandlerRegistry()
deliveries, calls = Deliveries(), Journal("calls")


@contextlib.contextmanager
def call(event: EventEnvelope, context: HandlerContext) -> Iterator[None]:
    """Note the call of a handler: `began`, and then `done`, `retried` or `rejected`."""
    which, started = f"{context.handler_name} {event.idempotency_key}", time.monotonic()
    calls.write(f"began {which} {started:.6f}\n")
    try:
        yield
    except Exception as error:
        what = "rejected" if isinstance(error, TerminalHandlerError) else "retried"
        calls.write(f"{what} {which} {time.monotonic():.6f}\n")
        raise
    deliveries.note(event, context, started)
    calls.write(f"done {which} {time.monotonic():.6f}\n")


def obstacles(event: EventEnvelope, context: HandlerContext) -> None:
    """A third of the events fail once, and one in forty for good until somebody has amended what was wrong."""
    if int(event.idempotency_key) % 40 == 7 and not (DIRECTORY / AMENDED).exists():
        raise TerminalHandlerError("this account is not known")
    if context.attempt == 1 and int(event.idempotency_key) % 3 == 1:
        raise TransientHandlerError("not now")


@registry.handler("account.changed", name="account.apply", retry=PATIENT)
async def apply(event: EventEnvelope, tx: asyncpg.Connection, context: HandlerContext) -> None:
    with call(event, context):
        await write(tx, context.handler_name, event.idempotency_key)
        obstacles(event, context)


@registry.handler("ticket.moved", name="ticket.move", retry=PATIENT)
async def move(event: EventEnvelope, context: HandlerContext) -> None:
    with call(event, context):
        obstacles(event, context)


@registry.handler("slot.wanted", name="slot.use", retry=PATIENT, fleet_concurrency=7)
async def use(event: EventEnvelope, context: HandlerContext) -> None:
    with call(event, context):
        await asyncio.sleep(SLOT_SECONDS)


@registry.handler("report.due", name="report.render", retry=PATIENT)
@registry.handler("call.due", name="call.make", retry=PATIENT, rate="100/s")
async def make(event: EventEnvelope, context: HandlerContext) -> None:
    with call(event, context):
        pass


# The default curve: five attempts, which an outage of minutes would use up without a breaker.
@registry.handler("shipment.due", name="shipment.book", on_outage=Pause(longest_wait=10))
async def book(event: EventEnvelope, context: HandlerContext) -> None:
    with call(event, context):
        await asyncio.sleep(0.005)
        if (DIRECTORY / AWAY).exists():
            raise TransientHandlerError("the carrier does not answer")


@registry.handler(
    "entry.posted", "entry.forged", name="entry.post", retry=RetryPolicy(max_attempts=1), batch=500, within="50ms"
)
async def post(events: list[EventEnvelope], context: list[HandlerContext]) -> None:
    """LSN-12: a poisoned event makes the whole call fail, and nobody says which one it was."""
    started = time.monotonic()
    await asyncio.sleep(0)
    if any(event.payload.get("poisoned") for event in events):
        raise TerminalHandlerError("one of them is poisoned")
    for event, each in zip(events, context, strict=True):
        deliveries.note(event, each, started)
