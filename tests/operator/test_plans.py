"""Plans (DLQ-4): preview, canary, rate, stop, changes from another process, and runners that die."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

import holdfast.operator.plans
from holdfast import HandlerRegistry, TerminalHandlerError
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused, Selection
from holdfast.operator.plan_runner import Progress, ReplayRate
from tests.operator.support import (
    ACTOR,
    CAUSES,
    EVENT,
    HANDLER,
    command,
    driver_of,
    fail,
    fail_with,
    states,
    subscribe,
)
from tests.operator.support import actions as audited
from tests.worker.support import running, until

ALL = Selection(everything=True)


@pytest.fixture
async def operator(dsn: str) -> AsyncIterator[Operator]:
    async with Operator(dsn, actor=ACTOR) as each:
        yield each


class Shop:
    """A handler that can be broken, and that counts what it handled."""

    def __init__(self) -> None:
        self.broken = False
        self.handled: list[int] = []
        self.registry = HandlerRegistry()

        @self.registry.handler(EVENT, name=HANDLER)
        async def charge_card(event: Any) -> None:
            if self.broken:
                raise TerminalHandlerError(f"order {event.payload['n']} is unknown")
            self.handled.append(event.payload["n"])


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def rows_of(conn: asyncpg.Connection, plan: int) -> dict[str, int]:
    rows = await conn.fetch("SELECT state, count(*) FROM core.plan_rows WHERE plan_id = $1 GROUP BY state", plan)
    return {row["state"]: row["count"] for row in rows}


# --- preview ---


async def test_a_preview_says_what_would_happen(conn: asyncpg.Connection, operator: Operator) -> None:
    """Counts, groups, generations, and what the handlers have handled already (DLQ-4)."""
    await subscribe(conn)
    ids = await fail_with(conn, [CAUSES[n % 2](n) for n in range(10_000)])
    others = await fail(conn, 30, handler="mail.thank", generation=3)
    await conn.execute(
        """INSERT INTO core.event_handled (handler_name, idempotency_key, source)
           SELECT $1, unnest($2::uuid[])::text, 'shop'""",
        HANDLER, ids[:40],
    )  # fmt: skip
    await conn.execute("UPDATE core.outbox SET created_at = now() - interval '90 days' WHERE id = ANY ($1)", others[:5])
    made = await operator.plans.create(ALL, canary=25, rate=100, reason="after the outage")
    plan, preview = made.plan, made.preview
    assert (plan.state, plan.total, plan.pending, plan.skipped) == ("open", 10_030, 10_025, 5)
    assert (preview.count, preview.handled, preview.not_failed, preview.skipped) == (10_025, 40, 0, {"too_old": 5})
    lines = {(line.handler_name, line.signature.partition(":")[0], line.generation): line for line in preview.lines}
    assert {key: (line.count, line.handled) for key, line in lines.items()} == {
        (HANDLER, "ValueError", 0): (5_000, 20),
        (HANDLER, "KeyError", 0): (5_000, 20),
        ("mail.thank", "ValueError", 3): (25, 0),
    }
    assert await states(conn) == {"failed": 10_030}, "a plan that was made has moved nothing"

    await operator.failed.replay(ids[:100], generation=0)
    await operator.failed.discard(ids[100:110])
    await fail(conn, 7)
    later = await operator.plans.detail(plan.id)
    assert (later.plan.total, later.preview.count, later.preview.not_failed) == (10_030, 10_025, 110), "it is frozen"


async def test_a_plan_that_is_tried_is_not_kept(conn: asyncpg.Connection, operator: Operator) -> None:
    """A dry run shows the same (DLQ-4)."""
    await fail(conn, 20)
    made = await operator.plans.create(ALL, dry_run=True)
    assert (made.dry_run, made.plan.total, made.preview.count) == (True, 20, 20)
    assert await operator.plans.page() == []
    assert await audited(conn) == []


async def test_the_canary_is_drawn_from_all_causes(conn: asyncpg.Connection, operator: Operator) -> None:
    """The oldest rows might share one (DLQ-4)."""
    await fail_with(conn, [CAUSES[n // 500](n) for n in range(3_500)])
    made = await operator.plans.create(ALL, canary=100)
    canary = await conn.fetch(
        """SELECT o.error_signature, count(*) FROM core.plan_rows r JOIN core.outbox o ON o.id = r.row_id
           WHERE r.plan_id = $1 AND r.position <= 100 GROUP BY 1""",
        made.plan.id,
    )
    assert sum(row["count"] for row in canary) == 100
    assert len(canary) == 7
    rest = await conn.fetch(
        """SELECT o.failed_at FROM core.plan_rows r JOIN core.outbox o ON o.id = r.row_id
           WHERE r.plan_id = $1 AND r.position > 100 ORDER BY r.position""",
        made.plan.id,
    )
    times = [row["failed_at"] for row in rest]
    assert times == sorted(times), "and then the oldest come first"


# --- canary and stop ---


@pytest.mark.slow
async def test_a_canary_stops_the_plan_while_the_cause_is_there(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """Of 10,000 rows only the canary fails again; put right and resumed, it begins with a canary anew (DLQ-4)."""
    await fail(conn, 10_000)
    made = await operator.plans.create(ALL, canary=20, rate=2_000, max_failure_ratio=0.1)
    shop.broken = True
    async with running(dsn, shop.registry):
        stopped = await operator.plans.run(made.plan.id)
        assert stopped.plan.state == "stopped"
        assert stopped.plan.state_reason == "20 of 20 replayed rows failed again"
        assert await rows_of(conn, made.plan.id) == {"failed": 20, "pending": 9_980}
        assert await states(conn) == {"failed": 10_000}
        assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE failure_history <> '[]'") == 20
        with pytest.raises(Refused, match="is stopped: 20 of 20") as refused:
            await operator.plans.run(made.plan.id)
        assert refused.value.remedy == f"holdfast plans resume {made.plan.id}"

        shop.broken = False
        assert (await operator.plans.resume(made.plan.id, reason="fixed in 1.4")).after == "open"
        phases: list[str] = []
        done = await operator.plans.run(made.plan.id, on_progress=lambda step: phases.append(step.phase))
    assert done.plan.state == "done"
    assert phases[0] == "canary" and "ramp" in phases and phases[-1] == "over"
    assert await rows_of(conn, made.plan.id) == {"failed": 20, "delivered": 9_980}
    assert len(shop.handled) == len(set(shop.handled)) == 9_980
    assert await audited(conn) == [
        "plan.create", "plan.run", "plan.stop", "plan.run", "plan.resume", "plan.run", "plan.done",
    ]  # fmt: skip


async def test_what_is_resumed_goes_to_the_workers_that_are_there_now(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """The cause is put right by a deployment, which is another generation (DLQ-4, GEN-1)."""
    await fail(conn, 60)
    made = await operator.plans.create(ALL, canary=5, rate=1_000)
    assert made.plan.generation is None
    shop.broken = True
    async with running(dsn, shop.registry):
        assert (await operator.plans.run(made.plan.id)).plan.state == "stopped"
    shop.broken = False
    await operator.plans.resume(made.plan.id)
    async with running(dsn, shop.registry, generation=5):
        assert (await operator.plans.run(made.plan.id)).plan.state == "done"
    rows = await conn.fetch("SELECT generation, status, count(*) FROM core.outbox GROUP BY 1, 2 ORDER BY 1")
    assert [tuple(row) for row in rows] == [(0, "failed", 5), (5, "delivered", 55)]


async def test_a_plan_waits_for_somebody_to_be_there(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Before a worker lives, nothing is moved; after a while the plan stops and says so (DLQ-4)."""
    await fail(conn, 20)
    plan = (await operator.plans.create(ALL, canary=5, patience=1.0)).plan.id
    stopped = await operator.plans.run(plan)
    assert (stopped.plan.state, stopped.plan.moved) == ("stopped", 0)
    assert stopped.plan.state_reason == "no worker was heard of for 00:00:01"
    assert await states(conn) == {"failed": 20}


async def test_what_fails_into_the_archive_has_failed(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """A row that is gone was delivered, unless it is there (DLQ-2, DLQ-4)."""
    await fail(conn, 40)
    made = await operator.plans.create(ALL, canary=10, rate=1_000)
    shop.broken = True
    async with running(dsn, shop.registry, dead_letters="archive"):
        stopped = await operator.plans.run(made.plan.id)
    assert (stopped.plan.state, stopped.plan.failed, stopped.plan.pending) == ("stopped", 10, 30)
    assert await conn.fetchval("SELECT count(*) FROM core.archive") == 10
    assert await states(conn) == {"failed": 30}


async def test_a_plan_needs_the_rights_of_an_operator_only(conn: asyncpg.Connection, operator: Operator) -> None:
    """OBX-2."""
    await fail(conn, 4)
    await driver_of(operator).execute("SET ROLE holdfast_operator")
    plan = (await operator.plans.create(ALL, canary=0, rate=1_000, patience=1.0, generation=0)).plan.id
    await operator.plans.pause(plan)
    await operator.plans.resume(plan)
    done = await operator.plans.run(plan)
    assert (done.plan.state, done.plan.replayed) == ("stopped", 4), "no worker is there"
    assert [each.id for each in await operator.plans.page()] == [plan]
    await driver_of(operator).execute("RESET ROLE")


async def test_what_grew_too_old_before_its_turn_is_skipped(conn: asyncpg.Connection, operator: Operator) -> None:
    """The inbox is asked again at each step; a plan that was made by force still has it then (OBX-5, DLQ-4)."""
    ids = await fail(conn, 4)
    made = await operator.plans.create(ids=ids[:2], canary=0, rate=1_000, patience=1.0, generation=0)
    forced = await operator.plans.create(ids=ids[2:], canary=0, rate=1_000, patience=1.0, generation=0, force=True)
    assert (made.plan.force, forced.plan.force) == (False, True)
    await conn.execute("UPDATE core.outbox SET created_at = now() - interval '61 days'")
    assert (await operator.plans.run(made.plan.id)).preview.skipped == {"too_old": 2}
    assert (await operator.plans.run(forced.plan.id)).plan.replayed == 2
    assert await states(conn) == {"failed": 2, "pending": 2}


async def test_why_a_plan_is_run_is_in_the_audit(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """Beside why it was made (S17)."""
    plan = (await operator.plans.create(ids=await fail(conn), canary=0, patience=1.0, generation=0)).plan.id
    process = await command(dsn, "plans", "run", str(plan), "--yes", "--json", "--reason", "the terminal is back")
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1, f"no worker is there: {errors.decode()}"
    assert await conn.fetchval("SELECT reason FROM core.audit WHERE action = 'plan.run'") == "the terminal is back"


async def test_a_failure_ratio_stops_the_ramp(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """Also when the canary was fine (DLQ-4)."""
    await fail(conn, 4_000)
    made = await operator.plans.create(ALL, canary=10, rate=500, max_failure_ratio=0.2)

    def break_it(step: Progress) -> None:
        shop.broken = shop.broken or step.plan.delivered >= 200

    async with running(dsn, shop.registry):
        stopped = await operator.plans.run(made.plan.id, on_progress=break_it)
    plan = stopped.plan
    assert plan.state == "stopped" and plan.state_reason is not None
    assert plan.failed > 0.2 * (plan.failed + plan.delivered)
    assert 200 < plan.moved < 3_000, "it ended long before everything was moved"
    assert plan.pending == 4_000 - plan.moved


async def test_a_canary_without_an_outcome_stops_the_plan(conn: asyncpg.Connection, operator: Operator) -> None:
    """Nobody serves the generation; the rows that were moved stay pending, and the reason is said (DLQ-4)."""
    await fail(conn, 100)
    made = await operator.plans.create(ALL, canary=5, patience=1.0, generation=9)
    stopped = await operator.plans.run(made.plan.id)
    assert stopped.plan.state == "stopped"
    assert stopped.plan.state_reason == (
        "5 of 5 canary rows have no outcome after 00:00:01; does a worker serve generation 9?"
    )
    assert await states(conn) == {"failed": 95, "pending": 5}


async def test_rows_that_are_not_there_any_more_are_skipped(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """Discarded, replayed by somebody else, delivered, or gone (DLQ-4)."""
    ids = await fail(conn, 60)
    made = await operator.plans.create(ids=ids, canary=5, rate=1_000)
    await operator.failed.discard(ids[:10])
    await conn.execute("DELETE FROM core.outbox WHERE id = $1", ids[10])
    await operator.failed.replay(ids[11:20])
    async with running(dsn, shop.registry):
        settled = "SELECT count(*) = 9 FROM core.outbox WHERE status = 'delivered'"
        await until(lambda: conn.fetchval(settled))
        done = await operator.plans.run(made.plan.id)
    assert (done.plan.state, done.plan.delivered, done.plan.skipped) == ("done", 40, 20)
    assert done.preview.skipped == {"delivered": 9, "discarded": 10, "missing": 1}
    assert await rows_of(conn, made.plan.id) == {"delivered": 40, "skipped": 20}


async def test_a_locked_row_is_taken_later(dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop) -> None:
    """The plan does not wait for it, and does not forget it (DLQ-4)."""
    ids = await fail(conn, 20)
    made = await operator.plans.create(ids=ids, canary=0, rate=1_000)
    other = await asyncpg.connect(dsn)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT FROM core.outbox WHERE id = ANY ($1) FOR UPDATE", ids[5:8])
    try:
        async with running(dsn, shop.registry):
            run = asyncio.create_task(operator.plans.run(made.plan.id))
            await until(lambda: len(shop.handled) == 17)
            assert not run.done()
            await transaction.rollback()
            done = await asyncio.wait_for(run, 20)
    finally:
        await other.close()
    assert (done.plan.state, done.plan.delivered) == ("done", 20)


# --- rate and death ---


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_runner_that_is_killed_is_followed_by_another(dsn: str, conn: asyncpg.Connection, shop: Shop) -> None:
    """4,000 rows at 800 a second, killed with -9 in the middle: the rate is kept, and each row moves once (DLQ-4)."""
    rate = 800
    await fail(conn, 4_000)
    async with Operator(dsn, actor=ACTOR) as operator:
        plan = (await operator.plans.create(ALL, canary=50, rate=rate)).plan.id
    moved = "SELECT count(*) FROM core.plan_rows WHERE plan_id = $1 AND state <> 'pending'"
    async with running(dsn, shop.registry):
        first = await command(dsn, "plans", "run", str(plan), "--yes")
        await until(lambda: _at_least(conn, moved, plan, 1_000), within=60)
        first.send_signal(signal.SIGKILL)
        assert await first.wait() == -signal.SIGKILL
        middle = await conn.fetchval(moved, plan)
        assert 1_000 <= middle < 4_000
        killed_at = await conn.fetchval("SELECT clock_timestamp()")

        second = await command(dsn, "plans", "run", str(plan), "--yes", "--json", actor="bob@example.org")
        out, errors = await asyncio.wait_for(second.communicate(), 90)
        assert second.returncode == 0, errors.decode()
    report = json.loads(out)
    assert (report["plan"]["state"], report["plan"]["delivered"]) == ("done", 4_000)
    assert await rows_of(conn, plan) == {"delivered": 4_000}
    assert sorted(shop.handled) == list(range(1, 4_001)), "each event was handled once"
    cycles = await conn.fetch("SELECT jsonb_array_length(failure_history) AS n, count(*) FROM core.outbox GROUP BY 1")
    assert [tuple(row) for row in cycles] == [(1, 4_000)], "each row was replayed once"
    by = await conn.fetch("SELECT DISTINCT failure_history->0->>'replayed_by' AS name FROM core.outbox ORDER BY 1")
    assert [row["name"] for row in by] == [f"{ACTOR} (plan {plan})", f"bob@example.org (plan {plan})"]
    audited_rows = await conn.fetchval(
        "SELECT sum(jsonb_array_length(arguments->'ids')) FROM core.audit WHERE action = 'plan.step'"
    )
    assert audited_rows == 4_000

    # From the end of the second runner's first step, which has nothing before it to be measured from.
    times = [row[0] for row in await conn.fetch(REPLAYED, plan, killed_at)]
    start = max(time for time in times if time - times[0] < timedelta(seconds=0.1))
    found = sum(time > start for time in times) / (times[-1] - start).total_seconds()
    assert 0.9 * rate < found < 1.1 * rate, f"{found:.0f} rows a second"


REPLAYED = "SELECT replayed_at FROM core.plan_rows WHERE plan_id = $1 AND replayed_at > $2 ORDER BY replayed_at"


async def _at_least(conn: asyncpg.Connection, query: str, plan: int, count: int) -> bool:
    return bool(await conn.fetchval(query, plan) >= count)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_runner_that_is_told_to_stop_gives_the_plan_back(
    dsn: str, conn: asyncpg.Connection, operator: Operator, number: signal.Signals
) -> None:
    """At once, and the plan is as it was (DLQ-4)."""
    await fail(conn, 50)
    plan = (await operator.plans.create(ALL, canary=0, rate=4, generation=0)).plan.id
    process = await command(dsn, "plans", "run", str(plan), "--yes", "--json")
    await until(
        lambda: _at_least(conn, "SELECT count(*) FROM core.outbox WHERE status = 'pending' AND $1 > 0", plan, 2)
    )
    process.send_signal(number)
    out, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1, errors.decode()
    report = json.loads(out)["plan"]
    assert (report["state"], report["running"]) == ("open", False)
    assert await conn.fetchval("SELECT lease_token FROM core.plans") is None


@pytest.mark.parametrize("rate", [0.5, 7.0, 50.0, 333.0, 2_000.0])
def test_the_pace_is_kept_whatever_a_step_takes(rate: float) -> None:
    """Within 10 % over a minute of steps that take 10 to 300 ms; a long stop is not made up for (DLQ-4)."""
    now, moved = 0.0, 0
    pace = ReplayRate(rate, lambda: now)
    for n in range(400):
        now += 0.15 + 0.01 + 0.29 * ((n * 7919) % 100) / 100
        due = pace.due()
        pace.took(due)
        moved += due
    assert abs(moved - rate * now) <= max(1.0, 0.1 * rate * now)
    now += 3_600
    assert pace.due() <= max(1, rate)
    pace.rest()
    assert pace.due() == 0


@pytest.mark.slow
async def test_a_plan_has_one_runner(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """A second one is told who runs it; a step with another token does nothing (DLQ-4)."""
    await fail(conn, 50)
    plan = (await operator.plans.create(ALL, canary=0, rate=1, generation=0)).plan.id
    stop = asyncio.Event()
    async with Operator(dsn, actor="bob@example.org") as bob:
        steps: list[Progress] = []
        first = asyncio.create_task(operator.plans.run(plan, stop=stop, on_progress=steps.append))
        await until(lambda: len(steps) >= 2)
        with pytest.raises(Refused, match="is run by "):
            await asyncio.wait_for(bob.plans.run(plan), 15)
        (step,) = await conn.fetch("SELECT * FROM core.plan_step($1, $2, 10, '10 s')", plan, uuid4())
        assert (step["state"], step["moved"]) == ("lost", 0)
        stop.set()
        halfway = await first
        assert (halfway.plan.state, halfway.plan.running) == ("open", False)
        await conn.execute("UPDATE core.plans SET rate = 1000, patience = '1 second'")
        done = await asyncio.wait_for(bob.plans.run(plan), 15)
    assert (done.plan.state, done.plan.replayed) == ("stopped", 50), "no worker is there"


async def test_a_runner_whose_lease_was_taken_stops(dsn: str, conn: asyncpg.Connection, operator: Operator) -> None:
    """It moves nothing more (LSN-3)."""
    await fail(conn, 50)
    plan = (await operator.plans.create(ALL, canary=0, rate=2, generation=0)).plan.id
    steps: list[Progress] = []
    run = asyncio.create_task(operator.plans.run(plan, on_progress=steps.append))
    await until(lambda: len(steps) >= 2)
    async with conn.transaction():
        await conn.execute("UPDATE core.plans SET lease_expires_at = now() - interval '1 second'")
        take = "SELECT answer FROM core.plan_take($1, $2, 'elsewhere:1', 'bob', '1 min')"
        assert await conn.fetchval(take, plan, uuid4()) == "taken"
    before = await rows_of(conn, plan)
    with pytest.raises(Refused, match="another process"):
        await asyncio.wait_for(run, 10)
    assert await rows_of(conn, plan) == before


# --- pausing, resuming, cancelling ---


@pytest.mark.slow
async def test_a_plan_is_paused_resumed_and_cancelled_by_others(
    dsn: str, conn: asyncpg.Connection, operator: Operator, shop: Shop
) -> None:
    """Its runner stays, and follows (DLQ-4)."""
    await fail(conn, 2_000)
    plan = (await operator.plans.create(ALL, canary=0, rate=200)).plan.id
    steps: list[Progress] = []
    async with running(dsn, shop.registry), Operator(dsn, actor="bob@example.org") as bob:
        run = asyncio.create_task(operator.plans.run(plan, on_progress=steps.append))
        await until(lambda: steps and steps[-1].plan.moved > 50)
        paused = await bob.plans.pause(plan, reason="lunch")
        assert (paused.before, paused.after, paused.running) == ("open", "paused", True)
        await until(lambda: steps[-1].plan.state == "paused")
        at_pause, seen = steps[-1].plan.moved, len(steps)
        await until(lambda: len(steps) >= seen + 4)
        assert steps[-1].plan.moved == at_pause
        assert steps[-1].plan.state_reason == "paused by bob@example.org: lunch"
        with pytest.raises(Refused, match="is paused"):
            await bob.plans.run(plan)
        assert (await bob.plans.resume(plan, dry_run=True)).after == "open"
        assert (await bob.plans.read(plan)).state == "paused"
        await bob.plans.resume(plan)
        await until(lambda: steps[-1].plan.moved > at_pause)
        await bob.plans.cancel(plan, reason="enough")
        cancelled = await asyncio.wait_for(run, 20)
    assert cancelled.plan.state == "cancelled" and cancelled.plan.finished_at is not None
    assert cancelled.plan.pending > 0
    assert (await states(conn))["failed"] == cancelled.plan.pending, "what was not its turn is failed as before"
    for verb in ("pause", "resume", "cancel"):
        with pytest.raises(Refused, match="is cancelled"):
            await getattr(operator.plans, verb)(plan)


async def test_unfinished_plans_hold_their_rows(conn: asyncpg.Connection, operator: Operator) -> None:
    """Retention asks for finished_at (OBX-5)."""
    ids = await fail(conn, 3)
    plan = (await operator.plans.create(ids=ids)).plan.id
    held = "SELECT count(*) FROM core.plan_rows r JOIN core.plans p ON p.id = r.plan_id WHERE p.finished_at IS NULL"
    assert await conn.fetchval(held) == 3
    await operator.plans.pause(plan)
    assert await conn.fetchval(held) == 3
    await operator.plans.cancel(plan)
    assert await conn.fetchval(held) == 0


# --- bad arguments ---


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("canary", {"canary": -1}),
        ("canary", {"canary": 1_001}),
        ("canary", {"canary": 1.5}),
        ("rate", {"rate": 0}),
        ("rate", {"rate": -5}),
        ("rate", {"rate": float("inf")}),
        ("rate", {"rate": float("nan")}),
        ("rate", {"rate": None}),
        ("rate", {"rate": 1e9}),
        ("max_failure_ratio", {"max_failure_ratio": 1.01}),
        ("max_failure_ratio", {"max_failure_ratio": -0.1}),
        ("max_failure_ratio", {"max_failure_ratio": float("nan")}),
        ("patience", {"patience": 0}),
        ("patience", {"patience": float("inf")}),
        ("generation", {"generation": -1}),
        ("reason", {"reason": "\x07"}),
        ("selection", {"ids": []}),
    ],
)
async def test_a_bad_plan_is_not_made(
    conn: asyncpg.Connection, operator: Operator, field: str, options: dict[str, object]
) -> None:
    """S9."""
    await fail(conn, 2)
    with pytest.raises(ConfigurationError) as refused:
        await operator.plans.create(ALL, **options)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert await conn.fetchval("SELECT count(*) FROM core.plans") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.audit") == 0


async def test_a_plan_names_its_rows(
    conn: asyncpg.Connection, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by accident, not none of them, and not too many (S9)."""
    for selection in (None, Selection()):
        with pytest.raises(ConfigurationError, match="selection"):
            await operator.plans.create(selection)
    with pytest.raises(ConfigurationError, match="matches no dead letter"):
        await operator.plans.create(ALL)
    await fail(conn, 6)
    monkeypatch.setattr(holdfast.operator.plans, "MOST_ROWS", 5)
    with pytest.raises(ConfigurationError, match="more than 5 events"):
        await operator.plans.create(ALL)
    for verb in (lambda: operator.plans.detail(99), lambda: operator.plans.run(99), lambda: operator.plans.read(0)):
        with pytest.raises(ConfigurationError, match="plan"):
            await verb()
    with pytest.raises(ConfigurationError, match="99 is unknown"):
        await operator.plans.pause(99)
    assert await conn.fetchval("SELECT count(*) FROM core.plans") == 0


async def test_groups_and_plans_speak_the_same_names(conn: asyncpg.Connection, operator: Operator) -> None:
    """A group is a selection (DLQ-4)."""
    await fail_with(conn, [CAUSES[n % 3](n) for n in range(30)])
    group = (await operator.failed.groups()).groups[0]
    made = await operator.plans.create(Selection.group(group.name))
    assert made.plan.total == group.count == 10
    assert made.plan.selection == {"handler": HANDLER, "signature": group.signature}
