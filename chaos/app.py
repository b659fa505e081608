"""The handlers, as an application would write them, and the ones that no application should have.

Run by `holdfast worker chaos.app:registry`. Effects are rows in chaos.effects, written in the handler's transaction.
Every delivery that a handler finished is a line in a file of its process, written at once: a SIGKILL leaves it there.
"""

import asyncio
import logging
import os
import select
import signal
import threading
import time
from typing import Any

from chaos.events import crowd, derived
from chaos.journal import Deliveries
from chaos.libraries import in_batch, in_transaction, pause, publish, write
from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    Publisher,
    RetryPolicy,
    TerminalHandlerError,
    TransientHandlerError,
)
from holdfast.flow import Pause

# Faults take attempts too: an event that only suffers from them must not run out of attempts.
PATIENT = RetryPolicy(max_attempts=1000, base_delay=0.1, max_delay=0.5)
BRIEF = RetryPolicy(max_attempts=3, base_delay=0.1, max_delay=0.2)
FEW = RetryPolicy(max_attempts=10, base_delay=0.1, max_delay=0.2)
AWAY = Pause(after=5, first_probe=0.2, longest_wait=1.0)
registry = HandlerRegistry()
publisher = Publisher("ledger")


deliveries = Deliveries()
lease = float(os.environ.get("CHAOS_LEASE", "3"))
dsn = os.environ.get("HOLDFAST_DSN", "")
log = logging.getLogger(__name__)


def duration(event: EventEnvelope) -> float:
    """Mostly a few milliseconds; one in fifty takes its time."""
    n = int(event.idempotency_key.rstrip("r")) * 2654435761 % 1000
    return 0.8 * n / 1000 if n % 50 == 7 else n / 100_000


def sleep(seconds: float) -> None:
    """Block the thread. time.sleep fails under a library that moves the clock."""
    select.select([], [], [], seconds)


async def effect(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    await write(tx, context.handler_name, event.idempotency_key)


# --- ordinary ---------------------------------------------------------------------------------------------


@registry.handler("order.placed", name="ledger.record", retry=PATIENT)
@in_transaction
async def record(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    started = time.monotonic()
    await effect(event, tx, context)
    await publish(publisher, tx, "receipt.due", derived(event.idempotency_key))
    await pause(duration(event))
    deliveries.note(event, context, started)


@registry.handler("payment.received", name="ledger.pay", retry=PATIENT)
@registry.handler("receipt.due", name="ledger.receipt", retry=PATIENT)
@in_transaction
async def pay(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    started = time.monotonic()
    await pause(duration(event))
    await effect(event, tx, context)
    deliveries.note(event, context, started)


@registry.handler("payment.received", name="ledger.total", retry=PATIENT, batch=50, within="50ms")
@in_batch
async def total(events: list[EventEnvelope], tx: Any, context: list[HandlerContext]) -> None:
    """LSN-12: one transaction for many. Some make their first call fail, and are found by halving."""
    started = time.monotonic()
    for event, each in zip(events, context, strict=True):
        await effect(event, tx, each)
        if each.attempt == 1 and int(event.idempotency_key) % 41 == 7:
            raise TransientHandlerError("the total does not add up")
    await pause(duration(events[0]))
    for event, each in zip(events, context, strict=True):
        deliveries.note(event, each, started)


# A limit that binds now and then, whatever happens to the workers that hold its places.
@registry.handler("order.placed", name="mail.confirm", retry=PATIENT, fleet_concurrency=12)
@registry.handler("offer.made", name="offer.show", retry=PATIENT)
@registry.handler("probe.sent", name="probe.hear", retry=PATIENT)
async def send(event: EventEnvelope, context: HandlerContext) -> None:
    started = time.monotonic()
    if context.handler_name != "probe.hear":
        await asyncio.sleep(duration(event))
    deliveries.note(event, context, started)


@registry.handler("parcel.sent", name="parcel.track", retry=FEW, on_outage=AWAY, rate="400/s")
async def track(event: EventEnvelope, context: HandlerContext) -> None:
    """LSN-17: its partner is away for a second in ten, which must not make a dead letter."""
    started = time.monotonic()
    if int(started) % 10 == 0:
        raise TransientHandlerError("the carrier does not answer")
    await asyncio.sleep(duration(event))
    deliveries.note(event, context, started)


@registry.handler("price.changed", name="price.update", retry=PATIENT)
async def note(event: EventEnvelope, context: HandlerContext) -> None:
    deliveries.note(event, context, time.monotonic())


for event_type, handlers in crowd(int(os.environ.get("CHAOS_CROWD", "0"))).items():
    for name in handlers:
        registry.add(name, (event_type.replace(".seen", ".*"),), note, retry=PATIENT)


@registry.handler("invoice.due", name="invoice.print", retry=PATIENT)
def print_invoice(event: EventEnvelope, context: HandlerContext) -> None:
    started = time.monotonic()
    sleep(duration(event))
    deliveries.note(event, context, started)


@registry.handler("stock.counted", name="stock.flaky", retry=PATIENT)
@in_transaction
async def count_stock(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """Writes its effect, and then fails the first times."""
    started = time.monotonic()
    await effect(event, tx, context)
    await pause(duration(event))
    if context.attempt <= int(event.idempotency_key) % 3:
        raise TransientHandlerError("the warehouse does not answer")
    deliveries.note(event, context, started)


# --- trouble ----------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@registry.handler("trouble.exit", name="trouble.exit", retry=BRIEF)
async def leave(event: EventEnvelope) -> None:
    """A3: takes its process with it, every time."""
    os._exit(137)


@registry.handler("trouble.block", name="trouble.block", retry=PATIENT)
@in_transaction
async def block(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """A4: keeps the loop from turning for longer than the lease."""
    started = time.monotonic()
    await effect(event, tx, context)
    sleep(float(event.payload["leases"]) * lease)
    deliveries.note(event, context, started)


@registry.handler("trouble.hang", name="trouble.hang", retry=BRIEF, timeout=1.0)
async def hang(event: EventEnvelope) -> None:
    await asyncio.Event().wait()


@registry.handler("trouble.hog", name="trouble.hog", retry=PATIENT)
@in_transaction
async def hog(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """B9: sits on one of few connections."""
    started = time.monotonic()
    await pause(float(event.payload["seconds"]))
    await effect(event, tx, context)
    deliveries.note(event, context, started)


@registry.handler("trouble.linger", name="trouble.linger", retry=PATIENT)
async def linger(event: EventEnvelope, context: HandlerContext) -> None:
    """LSN-17: waits for something slow."""
    started = time.monotonic()
    await asyncio.sleep(float(event.payload["seconds"]))
    deliveries.note(event, context, started)


@registry.handler("trouble.occupy", name="trouble.occupy", retry=PATIENT)
def occupy(event: EventEnvelope, context: HandlerContext) -> None:
    """LSN-17: keeps one of few threads."""
    started = time.monotonic()
    sleep(float(event.payload["seconds"]))
    deliveries.note(event, context, started)


@registry.handler("trouble.shout", name="trouble.shout", retry=PATIENT)
async def shout(event: EventEnvelope, context: HandlerContext) -> None:
    """T16: has more to say than a pipe holds."""
    started = time.monotonic()
    for number in range(int(event.payload["lines"])):
        log.info("line %d", number)
        if number % 50 == 0:
            await asyncio.sleep(0)  # the log is the trouble, and not the loop
    deliveries.note(event, context, started)


@registry.handler("trouble.die_before_commit", name="trouble.die_before_commit", retry=PATIENT)
@in_transaction
async def die_before_commit(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """A1: killed with its effect written and not committed."""
    await effect(event, tx, context)
    if context.attempt == 1:
        die()


@registry.handler("trouble.die_after_commit", name="trouble.die_after_commit", retry=PATIENT)
@in_transaction
async def die_after_commit(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """A2: killed as soon as others can see the effect."""
    await effect(event, tx, context)
    if context.attempt == 1:
        threading.Thread(target=_die_when_visible, args=(event.idempotency_key,), daemon=True).start()


def _die_when_visible(key: str) -> None:
    import psycopg  # here, because every start of a worker would wait for it

    seen = "SELECT FROM chaos.effects WHERE handler = 'trouble.die_after_commit' AND key = %s"
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if connection.execute(seen, [key]).fetchone() is not None:
                die()
            sleep(0.0005)


@registry.handler("trouble.die_after_effect", name="trouble.die_after_effect", retry=PATIENT)
async def die_after_effect(event: EventEnvelope, context: HandlerContext) -> None:
    """A2: killed between an effect outside of any transaction and the settle."""
    deliveries.note(event, context, time.monotonic())
    if context.attempt == 1:
        die()


@registry.handler("trouble.raise", name="trouble.raise", retry=PATIENT)
async def fail(event: EventEnvelope) -> None:
    raise TerminalHandlerError("there is no such customer")


@registry.handler("trouble.unwind", name="trouble.unwind", retry=BRIEF)
async def unwind(event: EventEnvelope) -> None:
    """A12: what usually ends a program, a task or a generator."""
    kinds: tuple[type[BaseException], ...]
    kinds = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, MemoryError, RecursionError)
    raise kinds[int(event.idempotency_key) % len(kinds)]("from a handler")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def hostile(n: int) -> BaseException:
    """D4: errors whose texts are the trouble."""
    match n % 6:
        case 0:
            return ValueError("x" * 5_000_000)
        case 1:
            return Unprintable()
        case 2:
            return ValueError("a null \x00, half a pair \ud800, a bell \x07 and \x1b[31mred")
        case 3:
            first: BaseException = ValueError("first")
            chained = first
            for depth in range(10_000):
                cause = ValueError(str(depth))
                chained.__cause__, chained = cause, cause
            chained.__cause__ = first
            return first
        case 4:
            return UnicodeDecodeError("utf-8", b"\xff\xfe" * 1000, 0, 1, "bytes")
        case _:
            return ExceptionGroup("many", [ValueError(str(each)) for each in range(1000)])


@registry.handler("trouble.text", name="trouble.text", retry=BRIEF)
async def complain(event: EventEnvelope) -> None:
    raise hostile(int(event.idempotency_key))


@registry.handler("trouble.large", name="trouble.large", retry=PATIENT)
@in_transaction
async def measure(event: EventEnvelope, tx: Any, context: HandlerContext) -> None:
    """D2, D3: nothing of a large payload is missing."""
    text: Any = event.payload["text"]
    if len(text) != event.payload["length"]:
        raise TerminalHandlerError("the payload has lost something")
    await effect(event, tx, context)
