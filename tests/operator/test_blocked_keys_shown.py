"""A key that a dead letter blocks is told wherever an operator looks first (LSN-9, OPS-1, OPS-5)."""

from __future__ import annotations

import shlex
from uuid import UUID

import asyncpg
import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.cli.status import warnings
from holdfast.console.story import why_it_waits
from holdfast.operator import Operator
from tests.operator.support import ACTOR, command
from tests.worker.support import publish, running, settled

HANDLER = "billing.apply"
KEY = "order 17's"


async def blocked(dsn: str, conn: asyncpg.Connection) -> tuple[UUID, UUID]:
    """A dead letter at the head of a key, and an event behind it."""
    registry = HandlerRegistry()

    @registry.handler("order.*", name=HANDLER, on_error="reject")
    async def apply(event: EventEnvelope) -> None:
        raise RuntimeError("broken")

    async with running(dsn, registry, poll_interval=600.0):
        head = await publish(conn, "order.placed", {"n": 0}, ordering_key=KEY)
        follower = await publish(conn, "order.placed", {"n": 1}, ordering_key=KEY)
        await settled(conn, head, "failed")
    return head, follower


async def said(dsn: str, *arguments: str) -> tuple[int | None, str, str]:
    process = await command(dsn, *arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_status_doctor_and_the_event_name_what_blocks(dsn: str, conn: asyncpg.Connection) -> None:
    """Nobody has to know that keys can be blocked to find it out (LSN-9, OPS-1, OPS-5)."""
    head, follower = await blocked(dsn, conn)
    async with Operator(dsn, actor=ACTOR) as operator:
        status = await operator.status()
        report = await operator.doctor(only="health")
        event = await operator.events.detail(follower)
    (counted,) = status.blocked
    assert (counted.handler_name, counted.keys) == (HANDLER, 1)
    (warning,) = [each for each in warnings(status) if "blocked" in each]
    assert warning.startswith(f"1 ordering key of {HANDLER} is blocked by dead letters since ")
    assert warning.endswith(f": holdfast keys blocked --handler {HANDLER}")
    (finding,) = [each for each in report.findings if each.code == "key-blocked"]
    assert finding.object == HANDLER and finding.remedy.endswith(f"holdfast keys blocked --handler {HANDLER}")
    (delivery,) = event.deliveries
    assert [(each.handler_name, each.id, each.failed) for each in delivery.behind] == [(HANDLER, head, True)]
    assert why_it_waits(delivery, event, status) == (
        f"Its ordering key is blocked at {HANDLER} by a dead letter, {head}."
    )
    code, out, _ = await said(dsn, "events", "show", str(follower))
    assert code == 0 and f"ordering key    {KEY}" in out and "next attempt" not in out
    assert f"waits behind    {head}, a dead letter of {HANDLER}" in out


@pytest.mark.slow
async def test_the_command_that_is_shown_releases_the_key(dsn: str, conn: asyncpg.Connection) -> None:
    """Also for a key that a shell would take apart; afterwards nothing is said any more (LSN-9, OPS-1)."""
    head, follower = await blocked(dsn, conn)
    _, listed, _ = await said(dsn, "keys", "blocked", "--limit", "1")
    assert "1 are listed; there may be more" in listed
    _, shown, _ = await said(dsn, "events", "show", str(follower))
    release = listed.strip().rpartition(": ")[2]
    assert release in shown
    _, *words = shlex.split(release)
    code, out, err = await said(dsn, *words, "--yes")
    assert (code, err) == (0, "") and f"{head} stays a dead letter" in out
    async with Operator(dsn, actor=ACTOR) as operator:
        assert (await operator.status()).blocked == ()
        (delivery,) = (await operator.events.detail(follower)).deliveries
    assert delivery.behind == []


async def test_a_handler_that_is_misspelt_is_unknown(dsn: str, conn: asyncpg.Connection) -> None:
    """ "not blocked" would be taken for good news (OPS-1)."""
    await blocked(dsn, conn)
    code, _, err = await said(dsn, "keys", "release", "billing.aply", KEY, "--yes")
    assert code == 2 and "handler billing.aply is unknown" in err and "holdfast handlers list" in err
    code, out, _ = await said(dsn, "keys", "release", HANDLER, "order-18", "--yes")
    assert code == 1 and "order-18: not blocked" in out
