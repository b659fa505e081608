"""What an operator reads when something is wrong: the missing role, the schedules that exist, what a plan waits for."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from holdfast.cli.app import run
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Progress, Selection
from tests.logins import WORKER, Logins
from tests.operator.support import ACTOR, HANDLER, beat, fail, subscribe

pytestmark = pytest.mark.newcomer


async def test_a_missing_right_names_the_role_and_the_login(logins: Logins, capsys: pytest.CaptureFixture[str]) -> None:
    """OPS-1: as a statement that an administrator can run."""
    for name in (logins.names["stranger"], logins.names[WORKER]):
        for command in (["failed", "list"], ["status"], ["retention", "show"]):
            assert await asyncio.to_thread(run, [*command, "--dsn", logins.dsn_of(name)]) == 1
            grant = f"as an administrator: GRANT holdfast_operator TO {name}"
            assert f"try: use a login that has the role holdfast_operator, or {grant}" in capsys.readouterr().err


async def test_an_unknown_setting_in_the_address(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """OPS-1: the server's message names it, and the remedy says where it stands."""
    assert await asyncio.to_thread(run, ["status", "--dsn", f"{dsn}{'&' if '?' in dsn else '?'}foo=1"]) == 1
    assert "it stands after the ? in HOLDFAST_DSN" in capsys.readouterr().err


async def test_an_unknown_schedule_names_those_that_exist(dsn: str, conn: asyncpg.Connection) -> None:
    """OPS-1: also for what cannot be the name of one."""
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
    """OPS-1: at once by a command, or by itself after an hour; a living one stays."""
    for name in ("killed", "forgotten", "living"):
        await beat(conn, name, HANDLER)
    silent = "UPDATE core.workers SET heartbeat_at = now() - $2::text::interval WHERE name = $1"
    await conn.execute(silent, "killed", "5 minutes")
    await conn.execute(silent, "forgotten", "61 minutes")
    async with Operator(dsn, actor=ACTOR) as operator:
        listed = {worker.name: worker for worker in await operator.workers.all()}
        assert set(listed) == {"killed", "living"}
        dry = await operator.workers.release(listed["killed"].id, dry_run=True)
        assert (dry.unlisted, dry.released) == (True, 0)
        done = await operator.workers.release(listed["killed"].id)
        assert (done.unlisted, done.released, done.left) == (True, 0, 0)
        forced = await operator.workers.release(listed["living"].id, force=True)
        assert not forced.unlisted
        assert [worker.name for worker in await operator.workers.all()] == ["living"]
        assert [worker.name for worker in (await operator.status()).workers] == ["living"]
        await beat(conn, "killed", HANDLER)
        assert {worker.name for worker in await operator.workers.all()} == {"killed", "living"}


async def test_a_waiting_plan_says_for_whom(dsn: str, conn: asyncpg.Connection) -> None:
    """OPS-1: for a worker, or for the outcomes of which handler in which generation; `plans show` says it too."""
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
