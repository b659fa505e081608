"""A failure in the database, in the log and on the screen: with its place, and old ones without."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID, uuid4

import asyncpg
import pytest
import structlog

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.cli import environment, groups, logs, timeline
from holdfast.console.verdict import concerns
from holdfast.errors import ConfigurationError
from holdfast.failure import FailureCycle
from holdfast.observability.logging import LogObserver, log_fact
from holdfast.observing import FACTS, USUAL_FACTS
from holdfast.operator import Delivery, EventDetail, FailureGroup, FailureGroups, Operator
from holdfast.postgres.clock import DatabaseClock
from holdfast.reactions.reactions import Reactions
from holdfast.telemetry import Counters, Failed, Handled, Notice, Retried
from holdfast.worker.tally import Tally
from tests.outbox import Outbox, connect
from tests.worker.support import (
    PUBLISHER,
    Facts,
    Observed,
    drained,
    publish,
    publish_many,
    row,
    running,
    settled,
    until,
)

pytestmark = pytest.mark.newcomer

ONCE = RetryPolicy(max_attempts=1)
THIS = "operator/test_failures_shown.py"


async def kinds(event: EventEnvelope) -> None:
    raise ValueError("no price")


async def in_transaction(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    await tx.execute("SELECT * FROM nowhere")


def in_thread(event: EventEnvelope) -> None:
    raise ValueError("no price")


async def in_a_group(event: EventEnvelope) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kinds(event))


async def too_long(event: EventEnvelope) -> None:
    await asyncio.sleep(60)


async def test_every_kind_of_handler_says_where_it_failed(dsn: str, conn: asyncpg.Connection) -> None:
    """In the row, in the view, in the fact; of one that took too long, where its await stood (DLQ-7)."""
    registry, facts = HandlerRegistry(), Facts()
    for function in (kinds, in_transaction, in_thread, in_a_group):
        registry.add(f"shop.{function.__name__}", ("order.placed",), function, retry=ONCE)
    registry.add("shop.too_long", ("order.placed",), too_long, retry=ONCE, timeout=0.05)
    await publish(conn, "order.placed")
    async with running(dsn, registry, facts):
        await drained(conn)
    await until(lambda: len(facts.of(Failed)) == 5, what="five failures told")
    shown = await conn.fetch("SELECT handler_name, raised_at, traceback, last_error FROM core.failed")
    places = {each["handler_name"].partition(".")[2]: each["raised_at"] for each in shown}
    assert {name: place.partition(" in ")[2] for name, place in places.items()} == {
        "kinds": "kinds", "in_transaction": "in_transaction", "in_thread": "in_thread",
        "in_a_group": "kinds", "too_long": "too_long",
    }  # fmt: skip
    assert all(THIS in place for place in places.values())
    stored = {each["handler_name"]: each["traceback"] for each in shown}
    assert stored == {fact.handler_name: fact.traceback for fact in facts.of(Failed)}
    assert not any("\x1e" in each["last_error"] for each in shown)


async def test_a_reaction_says_where_it_failed(dsn: str, conn: asyncpg.Connection) -> None:
    """Also one that took too long (DLQ-7)."""
    registry = HandlerRegistry()
    registry.add("shop.kinds", ("order.placed",), kinds, via="in_process")
    registry.add("shop.too_long", ("order.placed",), too_long, via="in_process", timeout=0.05)
    async with Reactions(dsn, registry, observers=()) as reactions:
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, "order.placed", {})
        reactions.react(event)
        await reactions.drain()
    places = [each["raised_at"] for each in await conn.fetch("SELECT raised_at FROM core.failed ORDER BY handler_name")]
    assert [place.partition(" in ")[2] for place in places] == ["kinds", "too_long"]


async def test_a_row_that_waits_for_a_retry_has_its_place_alone(dsn: str, conn: asyncpg.Connection) -> None:
    """A row that is written again and again stays small; a replay keeps the place in the history (DLQ-7)."""
    registry, facts = HandlerRegistry(), Facts()
    policy = RetryPolicy(max_attempts=2, base_delay=0.3, max_delay=0.3, strategy="constant")
    registry.add("shop.kinds", ("order.placed",), kinds, retry=policy)
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, facts, poll_interval=3600):
        waiting = await until(lambda: conn.fetchrow("SELECT * FROM core.outbox WHERE last_error IS NOT NULL"))
        assert waiting["traceback"].startswith("raised at ") and "\n" not in waiting["traceback"]
        failed = await settled(conn, identity, "failed")
    assert "\n" in failed["traceback"] and failed["traceback"] == facts.of(Retried)[0].traceback
    async with Operator(dsn, actor="ann@example.org") as operator:
        await operator.failed.replay([str(identity)], generation=0)
        (delivery,) = (await operator.events.detail(str(identity))).deliveries
    assert (delivery.traceback, delivery.cycles[0].failure_reason) == (None, "retry_terminal")
    assert delivery.cycles[0].raised_at == failed["traceback"].partition("\n")[0].removeprefix("raised at ")


async def test_an_archived_failure_keeps_its_traceback(dsn: str, conn: asyncpg.Connection) -> None:
    """Lists, details and groups of the archive have it, and a replay's history its place (DLQ-7)."""
    registry = HandlerRegistry()
    registry.add("shop.kinds", ("order.placed",), kinds, retry=ONCE)
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry, dead_letters="archive"):
        await drained(conn)
    async with Operator(dsn, actor="ann@example.org") as operator:
        (listed,) = await operator.archive.page()
        detail = await operator.archive.detail(str(listed.id))
        (group,) = (await operator.archive.groups()).groups
        assert listed.raised_at == detail.raised_at == group.raised_at and "in kinds" in str(listed.raised_at)
        assert str(detail.traceback).startswith(f"raised at {listed.raised_at}\n")
        await operator.archive.replay([listed.id], generation=0)
    (cycle,) = map(FailureCycle.model_validate, json.loads((await row(conn, identity))["failure_history"]))
    assert (cycle.raised_at, cycle.failure_reason) == (listed.raised_at, "retry_terminal")


async def test_texts_from_workers_of_other_releases(dsn: str, conn: asyncpg.Connection) -> None:
    """One that sends no traceback leaves none; what anyone sends is cut (DLQ-7)."""
    outbox = Outbox(await connect(dsn))
    plain = await outbox.failed("ValueError: no")
    found = await outbox.row(plain)
    assert (found["last_error"], found["traceback"]) == ("ValueError: no", None)
    found = await outbox.row(await outbox.failed(f"{'x' * 10_000}\x1e{'y' * 10_000}\x1ez"))
    assert (found["last_error"], found["traceback"]) == ("x" * 8192, "y" * 4096)
    await outbox.connection.close()


# --- an event that several handlers want


async def test_a_published_row_does_not_read_as_handled(dsn: str, conn: asyncpg.Connection) -> None:
    """Before any handler has run, and while only some have (OPS-1)."""
    registry, go = HandlerRegistry(), asyncio.Event()

    async def wait(event: EventEnvelope) -> None:
        await go.wait()

    for name in ("shop.pack", "shop.mail"):
        registry.add(name, ("order.placed",), wait)
    identity = await publish(conn, "order.placed")
    async with running(dsn, registry):
        query = "SELECT state, handler_name, delivered_at FROM core.deliveries WHERE event_id = $1 ORDER BY state"
        await until(lambda: conn.fetchval("SELECT count(*) = 3 FROM core.deliveries WHERE event_id = $1", identity))
        rows = [tuple(each) for each in await conn.fetch(query, identity)]
        assert rows[0] == ("fanned_out", None, None) and {each[0] for each in rows[1:]} <= {"pending", "in_flight"}
        async with Operator(dsn, actor="ann@example.org") as operator:
            detail = await operator.events.detail(str(identity))
        assert detail.deliveries[0].state == "fanned_out"
        go.set()
        await drained(conn)
        assert [each["state"] for each in await conn.fetch(query, identity)].count("fanned_out") == 1


# --- screens

AT = datetime(2026, 11, 16, 3, 4, 5, tzinfo=UTC)
ID = UUID("01a1e3b9-decc-719c-b5fc-ffd65dc42ab1")
GROUP = "httpx.HTTPStatusError:5d41402abc4b2a76"
ERROR = "httpx.HTTPStatusError: Client error '404 Not Found' for url 'https://bank.example/charges/17'"
TRACEBACK = """raised at shop/handlers/billing.py:42 in charge_card
  shop/handlers/billing.py:42 in charge_card
    response = await bank.charge(event.payload["card"], event.payload["amount"], currency)
  shop/bank.py:17 in Bank.charge
    response.raise_for_status()
  httpx/_models.py:829 in Response.raise_for_status
caused by KeyError
  shop/bank.py:12 in Bank.charge
    return self.cache[key]"""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def delivery(**changes: object) -> Delivery:
    fields: dict[str, object] = dict.fromkeys(Delivery.__dataclass_fields__)
    fields |= {
        "id": ID, "handler_name": "billing.charge_card", "status": "failed", "state": "failed", "attempts": 5,
        "last_error": ERROR, "error_signature": GROUP, "traceback": TRACEBACK, "failure_reason": "retry_terminal",
        "failed_at": AT, "owed_to": [], "channel": "outbox_default", "generation": 0, "plans": [], "actions": [],
        "behind": [],
        "cycles": [FailureCycle(attempts=5, last_error=ERROR, failed_at=AT, failure_reason="retry_terminal",
                                raised_at="shop/handlers/billing.py:40 in charge_card", generation=0,
                                replayed_by="ann@example.org", replayed_at=AT)],
    }  # fmt: skip
    return Delivery(**(fields | changes))  # type: ignore[arg-type]


def event(*deliveries: Delivery) -> EventDetail:
    return EventDetail(ID, "order.placed", 1, AT, "shop", None, "operations", None, "k", None, None, [*deliveries], {})


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_width(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        capsys.readouterr()

    return set_width


@pytest.mark.parametrize("columns", [80, 120])
def test_the_screens_of_a_failure(
    columns: int, screen: Callable[[int], None], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Golden files; HOLDFAST_UPDATE_GOLDEN=1 writes them (DLQ-7, OPS-1)."""
    screen(columns)
    fanned_out = delivery(handler_name="*", status="delivered", state="fanned_out", last_error=None, traceback=None)
    old = delivery(traceback=None, cycles=[])
    timeline.show(event(fanned_out, delivery(), old), False)
    group = FailureGroup("billing.charge_card", GROUP, 1200, AT, AT, ["retry_terminal"], ["order.placed"], [0], ID,
                         ERROR, None, None, None, "shop/handlers/billing.py:42 in charge_card")  # fmt: skip
    groups.show_groups(FailureGroups([group], 1200), False)
    shown = "\n".join(line.rstrip() for line in ANSI.sub("", capsys.readouterr().out).splitlines()) + "\n"
    assert all(len(line) <= columns for line in shown.splitlines())
    golden = request.path.parent / "golden" / f"failures_{columns}.txt"
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(shown)
    assert shown == golden.read_text()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("KeyError: 'id'", "KeyError: 'id'. "),
        ("DoesNotExist: Order does not exist.", "DoesNotExist: Order does not exist. "),
        ("ValueError: " + 100 * "w", "ValueError: " + 77 * "w" + "… "),
    ],
)
async def test_an_error_on_the_overview_ends_once(dsn: str, error: str, said: str) -> None:
    """With one full stop, whatever mark the error itself ends with (OPS-2)."""
    group = FailureGroup("billing.charge_card", GROUP, 1, AT, AT, ["retry_terminal"], ["order.placed"], [0], ID,
                         error, None, None, None)  # fmt: skip
    async with Operator(dsn, actor="ada") as operator:
        [concern] = concerns(await operator.status(), [group], [])
    assert concern.detail[0].text == said


# --- success


async def test_each_handled_event_is_a_fact_on_request(dsn: str, conn: asyncpg.Connection) -> None:
    """With and without a transaction; a summary when the worker stops; nothing more by default (OPS-1)."""

    async def done(event: EventEnvelope) -> None: ...

    async def with_tx(event: EventEnvelope, tx: asyncpg.Connection) -> None: ...

    for wanted, expected in ((USUAL_FACTS, 0), (FACTS, 6)):
        registry, facts = HandlerRegistry(), Observed(wanted)
        registry.add("shop.done", ("order.placed",), done)
        registry.add("shop.with_tx", ("order.placed",), with_tx)
        registry.add("shop.kinds", ("order.placed",), kinds, retry=ONCE)
        await publish_many(conn, "order.placed", 3)
        async with running(dsn, registry, facts):
            await drained(conn)
        handled = facts.of(Handled)
        assert len(handled) == expected and all(fact.took is not None and fact.took > 0 for fact in handled)
        (summary,) = facts.notices("worker_summary")
        assert (summary.level, summary.details["handled"], summary.details["failed"]) == ("info", 6, 3)
        assert summary.details["handlers"] == {
            "shop.done": {"handled": 3}, "shop.with_tx": {"handled": 3}, "shop.kinds": {"failed": 3},
        }  # fmt: skip


class OfHandler:
    """As much of a delivery as is counted."""

    def __init__(self, name: str) -> None:
        self.handler = self
        self.name = name
        self.began_at = None  # the handler has not run


def test_a_summary_names_few_handlers_and_is_silent_when_nothing_happened() -> None:
    """OPS-1."""
    facts = Facts()
    tally = Tally(Counters(), DatabaseClock(15.0), facts.append)
    tally.report()
    assert facts == []
    busy: list[object] = [OfHandler(f"shop.h{n}") for n in range(50) for _ in range(n + 1)]
    tally.handled(busy)  # type: ignore[arg-type]
    tally.retried(busy[:1])  # type: ignore[arg-type]
    tally.report()
    tally.report()
    (summary,) = facts.of(Notice)
    handlers = summary.details["handlers"]
    assert isinstance(handlers, dict) and len(handlers) == 20 and summary.details["more_handlers"] == 30
    assert handlers["shop.h49"] == {"handled": 50} and summary.details["retried"] == 1


@pytest.mark.parametrize(("level", "shown"), [("debug", 2), ("info", 1), ("error", 0)])
def test_the_level_decides_what_is_printed(level: str, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--log-level` (OPS-1)."""
    stream, was = io.StringIO(), structlog.get_config()
    structlog.reset_defaults()
    try:
        logs.configure(stream, level)
        monkeypatch.setattr("holdfast.observability.logging.logger", lambda: structlog.get_logger("holdfast"))
        identity = uuid4()
        LogObserver(successes="debug")(Handled(identity, identity, "a.b", "shop", None, "shop.h", 1, "c", took=0.1))
        log_fact(Notice("info", "worker_summary", {"handled": 1}))
    finally:
        structlog.configure(**was)
    assert len(stream.getvalue().splitlines()) == shown


def test_the_level_comes_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-1."""
    assert environment.log_level(None) == "info"
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", "WARNING")
    assert environment.log_level(None) == "warning"
    assert environment.log_level(environment.LogLevel.DEBUG) == "debug"
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="debug, info, warning, error"):
        environment.log_level(None)
