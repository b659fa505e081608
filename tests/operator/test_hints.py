"""What an operator reads when something is wrong: the missing role, the schedules that exist, what a plan waits for."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from holdfast.cli.app import run
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Progress, Refused, Selection
from tests.logins import WORKER, Logins
from tests.operator.support import ACTOR, HANDLER, beat, fail, subscribe
from tests.worker.support import PUBLISHER

pytestmark = pytest.mark.newcomer


async def test_a_missing_right_names_the_role_and_the_login(logins: Logins, capsys: pytest.CaptureFixture[str]) -> None:
    """As a statement that an administrator can run (OPS-1)."""
    for name in (logins.names["stranger"], logins.names[WORKER]):
        for command in (["failed", "list"], ["status"], ["retention", "show"]):
            assert await asyncio.to_thread(run, [*command, "--dsn", logins.dsn_of(name)]) == 1
            grant = f"as an administrator: GRANT holdfast_operator TO {name}"
            assert f"try: use a login that has the role holdfast_operator, or {grant}" in capsys.readouterr().err


async def test_an_unknown_setting_in_the_address(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's message names it, and the remedy says where it stands (OPS-1)."""
    assert await asyncio.to_thread(run, ["status", "--dsn", f"{dsn}{'&' if '?' in dsn else '?'}foo=1"]) == 1
    assert "it stands after the ? in --dsn" in capsys.readouterr().err


async def test_a_misspelt_event_type_is_pointed_out(
    dsn: str, conn: asyncpg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the status and by the doctor, beside a subscription to what was meant (OPS-1)."""
    await subscribe(conn, HANDLER, "order.placed")
    async with conn.transaction():
        await PUBLISHER.publish(conn, "order.placd", {})
        await PUBLISHER.publish(conn, "invoice.sent", {})
    async with Operator(dsn, actor=ACTOR) as operator:
        meant = {route.event_type: route.meant for route in (await operator.status()).unrouted}
        remedies = {each.object: each.remedy for each in (await operator.doctor("health")).findings}
    assert meant == {"order.placd": "order.placed", "invoice.sent": None}
    assert remedies["order.placd"].startswith("did you mean order.placed? If not, start a worker")
    assert remedies["invoice.sent"].startswith("start a worker")
    await asyncio.to_thread(run, ["status", "--dsn", dsn])
    said = " ".join("".join(capsys.readouterr()).split())
    assert "no handler subscribes to it; did you mean order.placed? The events wait for one" in said


async def test_an_unknown_schedule_names_those_that_exist(dsn: str, conn: asyncpg.Connection) -> None:
    """Also for what cannot be the name of one (OPS-1)."""
    async with Operator(dsn, actor=ACTOR) as operator:
        with pytest.raises(ConfigurationError, match="no schedule is declared"):
            await operator.schedules.detail("nope")
        await conn.execute(
            """SELECT core.schedule_declare('shop.nightly', '0 3 * * *', 'UTC', NULL, 'latest', 'report.due', 'shop',
                                            NULL, 0::smallint, '{}', 0, true)"""
        )
        for name in ("nope", "shop.nope"):
            for verb in (operator.schedules.detail, operator.schedules.pause, operator.schedules.remove):
                with pytest.raises(ConfigurationError, match=f"'?{name}'? is unknown; name one of shop.nightly"):
                    await verb(name)


async def test_a_killed_worker_leaves_the_list(dsn: str, conn: asyncpg.Connection) -> None:
    """At once by a command, or by itself after an hour; --force does not wait until it counts as silent (OPS-1)."""
    for name in ("killed", "forgotten", "living"):
        await beat(conn, name, HANDLER)
    just_killed = await beat(conn, "just killed", HANDLER)
    silent = "UPDATE core.workers SET heartbeat_at = now() - $2::text::interval WHERE name = $1"
    await conn.execute(silent, "killed", "5 minutes")
    await conn.execute(silent, "forgotten", "61 minutes")
    async with Operator(dsn, actor=ACTOR) as operator:
        listed = {worker.name: worker for worker in await operator.workers.all()}
        assert set(listed) == {"killed", "living", "just killed"}
        dry = await operator.workers.release(listed["killed"].id, dry_run=True)
        assert (dry.unlisted, dry.released) == (True, 0)
        done = await operator.workers.release(listed["killed"].id)
        assert (done.unlisted, done.released, done.left) == (True, 0, 0)
        with pytest.raises(Refused, match=r"was heard of \d+ s ago"):
            await operator.workers.release(just_killed)
        assert (await operator.workers.release(just_killed, force=True)).unlisted
        assert [worker.name for worker in await operator.workers.all()] == ["living"]
        assert [worker.name for worker in (await operator.status()).workers] == ["living"]
        await beat(conn, "killed", HANDLER)
        assert {worker.name for worker in await operator.workers.all()} == {"killed", "living"}


async def test_a_waiting_plan_says_for_whom(dsn: str, conn: asyncpg.Connection) -> None:
    """For a worker, or for the outcomes of which handler in which generation; `plans show` says it too (OPS-1)."""
    await subscribe(conn)
    await fail(conn, 3)
    async with Operator(dsn, actor=ACTOR) as operator:
        wanted = Selection(handler=HANDLER)
        made = await operator.plans.create(wanted, generation=7, canary=3, rate=1000, patience=60)
        assert await _waits(operator, made.plan.id) == (
            f"waits for 3 of {HANDLER} in generation 7, which no living worker serves"
        )
        assert (await operator.plans.read(made.plan.id)).state_reason is None, "while it is run by no process"
        await fail(conn, 1)
        other = await operator.plans.create(wanted, canary=1, rate=1000, patience=60)
        assert await _waits(operator, other.plan.id) == "waits for a worker: none that lives serves a generation"
        await beat(conn, "one", HANDLER)
        assert await _waits(operator, other.plan.id) == f"waits for 1 of {HANDLER} in generation 0"


async def _waits(operator: Operator, plan: int) -> str | None:
    """Run a plan until it waits; the reason that others read meanwhile."""
    stop, seen = asyncio.Event(), []

    def show(progress: Progress) -> None:
        if progress.phase == "waiting":
            seen.append(progress.plan.state_reason)
            stop.set()

    async with asyncio.timeout(30):
        await operator.plans.run(plan, on_progress=show, stop=stop)
    return seen[0]


async def test_a_worker_that_was_replaced_leaves_the_list(dsn: str, conn: asyncpg.Connection) -> None:
    """A silent one, when another lives under its name on its host; any other stays for people to see (OPS-1, OBS-3)."""
    await beat(conn, "web/1", HANDLER, host="another")
    await beat(conn, "web/2", HANDLER)
    await beat(conn, "web/2", HANDLER, again="at once")
    async with Operator(dsn, actor=ACTOR) as operator:
        listed = [worker.name for worker in await operator.workers.all()]
        assert sorted(listed) == ["web/1", "web/2", "web/2"], "two may live under one name"
        await conn.execute("UPDATE core.workers SET heartbeat_at = now() - interval '2 minutes'")
        for name in ("web/1", "web/2"):
            await beat(conn, name, HANDLER, again="by the supervisor")
        found = sorted((worker.name, worker.host, worker.living) for worker in await operator.workers.all())
        assert found == [("web/1", "another", False), ("web/1", "host", True), ("web/2", "host", True)]
