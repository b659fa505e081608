"""The example of tasks for agents, with a human's approval (IDM-5)."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

import examples.agent_tasks.office as office_module
from examples.agent_tasks import desk
from examples.agent_tasks.office import Office
from examples.agent_tasks.tasks import RETENTION, AgentTask, Conversation
from holdfast import EventEnvelope
from holdfast.errors import DomainFault, NotFoundFault
from holdfast.operator import Operator
from tests.worker.support import insert, publish, running, settled, until

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "examples" / "agent_tasks" / "schema.sql"
DISPUTE = {"order_id": "A-17", "cents": 2500}


class Desk:
    """An office with its worker, and a person in it."""

    def __init__(self, office: Office, conn: asyncpg.Connection, notices: list[str]) -> None:
        self.office = office
        self.conn = conn
        self.notices = notices

    async def dispute(self, **payload: Any) -> tuple[UUID, AgentTask]:
        """The event, and the task that came of it."""
        event = await publish(self.conn, "order.disputed", DISPUTE | payload)
        (task,) = await until(lambda: desk.waiting(self.office.sessions), what="a task that waits")
        return event, task

    async def decide(self, task: AgentTask, decision: desk.Decision) -> None:
        await desk.decide(self.office.sessions, task.id, decision, "ada")

    async def ended(self, task_id: UUID, status: str) -> AgentTask:
        """The task, once it has ended and the conversation knows."""
        query = "SELECT 1 FROM messages WHERE agent_task_id = $1"
        await until(lambda: self.conn.fetchval(query, task_id), what=f"the result of {task_id}")
        task = await desk.find(self.office.sessions, task_id)
        assert task.status == status and task.finished_at is not None
        return task

    async def told(self, task_id: UUID) -> str:
        query = "SELECT array_agg(text) FROM messages WHERE agent_task_id = $1"
        (text,) = await self.conn.fetchval(query, task_id)
        return str(text)

    async def request(self, steps: list[dict[str, Any]]) -> AgentTask:
        """One that needs no approval."""
        async with self.office.sessions.begin() as session:
            conversation = Conversation(id=uuid4(), subject="by hand")
            session.add(conversation)
            await session.flush()
            task = AgentTask.request(conversation, "watch", steps, approval=False)
            session.add(task)
        return task


@pytest.fixture
async def here(dsn: str, conn: asyncpg.Connection) -> AsyncIterator[Desk]:
    await conn.execute(SCHEMA.read_text())
    notices: list[str] = []
    office = Office(dsn, notify=notices.append, rounds=timedelta(seconds=1))
    async with office.reactions, running(dsn, office.registry, poll_interval=0.5):
        yield Desk(office, conn, notices)
    await office.close()


async def test_approved_executed_and_told(here: Desk) -> None:
    """Conversation and task link back to the event; every event of a task carries its id and nothing else (IDM-5)."""
    event, task = await here.dispute()
    assert (task.status, task.trigger_event_id) == ("awaiting_approval", event)
    conversation = await here.conn.fetchrow("SELECT id, trigger_event_id FROM conversations")
    assert tuple(conversation) == (task.conversation_id, event)
    await until(lambda: here.notices == [f"waits for approval: refund {task.id}"], what="the reminder")
    dispatched = "SELECT count(*) FROM core.outbox WHERE event_type = 'agent.task.dispatched' AND origin_id IS NULL"
    assert await here.conn.fetchval(dispatched) == 0
    await here.decide(task, "approve")
    done = await here.ended(task.id, "done")
    assert (done.decided_by, len(done.transcript)) == ("ada", 2)
    assert await here.told(task.id) == "refund done: refunded 2500 cents for order A-17"
    assert await here.conn.fetchval(dispatched) == 1
    rows = await here.conn.fetch("SELECT event_type, payload FROM core.outbox WHERE event_type LIKE 'agent.task.%'")
    expected = {f"agent.task.{name}" for name in ("requested", "dispatched", "finished", "expired")}
    assert {row["event_type"] for row in rows} == expected
    assert all(json.loads(row["payload"]) == {"agent_task_id": str(task.id)} for row in rows)


async def test_a_refused_task_executes_nothing(here: Desk) -> None:
    """Nothing is executed; a decision that comes later is refused itself (IDM-5)."""
    _, task = await here.dispute()
    await here.decide(task, "refuse")
    await here.ended(task.id, "refused")
    for late in ("approve", "refuse", "cancel"):
        with pytest.raises(DomainFault, match="is refused"):
            await here.decide(task, late)  # type: ignore[arg-type]
    with pytest.raises(NotFoundFault):
        await desk.decide(here.office.sessions, uuid4(), "approve", "ada")
    assert await here.told(task.id) == "refund refused"
    query = "SELECT count(*) FROM core.outbox WHERE event_type = 'agent.task.dispatched'"
    assert await here.conn.fetchval(query) == 0


async def test_failed_by_its_tool(here: Desk) -> None:
    """What the tool says is the task's result, and no dead letter (IDM-5)."""
    _, task = await here.dispute(cents=1_000_000)
    await here.decide(task, "approve")
    failed = await here.ended(task.id, "failed")
    assert "the bank refuses" in (failed.result or "") and len(failed.transcript) == 1
    assert await here.conn.fetchval("SELECT count(*) FROM core.failed") == 0


async def test_cancelled_while_it_waits_and_while_it_runs(here: Desk) -> None:
    """At once, or after the step it is at; nothing follows (IDM-5)."""
    _, waiting = await here.dispute()
    await here.decide(waiting, "cancel")
    assert (await here.ended(waiting.id, "cancelled")).transcript == []

    running_task = await here.request([{"wait": 0.05}] * 1000)
    steps = "SELECT jsonb_array_length(transcript) >= 2 FROM agent_tasks WHERE id = $1"
    await until(lambda: here.conn.fetchval(steps, running_task.id), what="two steps")
    await here.decide(running_task, "cancel")
    cancelled = await here.ended(running_task.id, "cancelled")
    assert 2 <= len(cancelled.transcript) < 1000 and cancelled.result is None


async def test_a_second_delivery_goes_on_where_the_first_one_died(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row knows how far it came; a step that is called again is called with the same key (IDM-5)."""
    used: list[dict[str, Any]] = []
    keys: list[str] = []
    real = office_module.use

    async def once(step: dict[str, Any], key: str) -> str:
        used.append(step)
        keys.append(key)
        line = await real(step, key)
        if len(used) == 2:
            raise ConnectionError("the worker lost its network, with the refund done")
        return line

    monkeypatch.setattr(office_module, "use", once)
    steps = [{"look_up": "A-17"}, {"refund": 100, "order": "A-17"}]
    task = await here.request(steps)
    await here.ended(task.id, "done")
    assert used == [steps[0], steps[1], steps[1]]
    assert keys[1] == keys[2] != keys[0]
    again = await insert(here.conn, "agent.task.dispatched", json.dumps({"agent_task_id": str(task.id)}))
    await settled(here.conn, again)
    assert len(used) == 3
    assert await here.told(task.id)  # one message


async def test_one_conversation_for_one_event(here: Desk) -> None:
    """The trigger is unique, whatever is delivered twice (IDM-5)."""
    event, task = await here.dispute()
    envelope = await here.conn.fetchrow("SELECT * FROM core.outbox WHERE id = $1", event)
    twice = EventEnvelope.model_validate(
        {name: envelope[name] for name in EventEnvelope.model_fields if name not in ("event_id", "payload")}
        | {"event_id": event, "payload": DISPUTE}
    )
    await here.office.open_conversation(twice, office_module.Dispute(**DISPUTE))  # type: ignore[arg-type]
    assert await here.conn.fetchval("SELECT count(*) FROM conversations") == 1
    await here.decide(task, "refuse")
    await here.ended(task.id, "refused")


async def test_it_is_forgotten_in_time(here: Desk) -> None:
    """The contents go after the task's own retention, by an event that waits for it; the row stays (IDM-5)."""
    task = await here.request([{"look_up": "A-17"}])
    await here.ended(task.id, "done")
    expiry = await here.conn.fetchrow(
        "SELECT id, available_at, created_at FROM core.outbox WHERE event_type = 'agent.task.expired'"
    )
    assert abs(expiry["available_at"] - expiry["created_at"] - RETENTION) < timedelta(seconds=5)
    await here.conn.execute("UPDATE core.outbox SET available_at = now() WHERE id = $1", expiry["id"])
    await settled(here.conn, expiry["id"])
    forgotten = await desk.find(here.office.sessions, task.id)
    assert (forgotten.steps, forgotten.transcript, forgotten.result) == ([], [], None)
    assert forgotten.forgotten_at is not None and forgotten.status == "done"


class Broken:
    """A tool that fails for good at its second step, until it is mended; before that somebody may act."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[str, Any]] = []
        self.mended = False
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._real = office_module.use
        monkeypatch.setattr(office_module, "use", self)

    async def __call__(self, step: dict[str, Any], key: str) -> str:
        self.steps.append(step)
        if len(self.steps) == 2 and not self.mended:
            self.reached.set()
            await self.go_on.wait()
            raise NotFoundFault("the bank has moved")
        return await self._real(step, key)


STEPS: list[dict[str, Any]] = [{"look_up": "A-17"}, {"refund": 100, "order": "A-17"}]


async def stuck(here: Desk, task_id: UUID) -> AgentTask:
    (found,) = await until(lambda: desk.waiting(here.office.sessions, "stuck"), what="a task that is stuck")
    assert found.id == task_id
    return found


async def test_a_dead_letter_leaves_its_task_stuck_and_a_replay_goes_on(
    here: Desk, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row says so, with the error, and so does the office; the step that was done is not repeated (IDM-5,
    DLQ-3).
    """
    broken = Broken(monkeypatch)
    broken.go_on.set()
    task = await here.request(STEPS)
    found = await stuck(here, task.id)
    assert "the bank has moved" in (found.result or "") and found.finished_at is None and len(found.transcript) == 1
    await until(lambda: [each for each in here.notices if str(task.id) in each], what="a call for help")
    assert "is stuck" in here.notices[-1]
    broken.mended = True
    async with Operator(dsn, actor="ada") as operator:
        dead = await here.conn.fetchval("SELECT event_id FROM core.failed")
        assert (await operator.failed.replay([dead])).count == 1
    done = await here.ended(task.id, "done")
    assert len(done.transcript) == 2 and broken.steps == [STEPS[0], STEPS[1], STEPS[1]]


async def test_what_is_stuck_can_be_cancelled(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, because nobody works on it; also when the cancellation came before the failure (IDM-5)."""
    broken = Broken(monkeypatch)
    broken.go_on.set()
    task = await here.request(STEPS)
    await stuck(here, task.id)
    await here.decide(task, "cancel")
    assert (await here.ended(task.id, "cancelled")).result is None

    broken.steps.clear()
    broken.reached.clear()
    broken.go_on.clear()
    other = await here.request(STEPS)
    await broken.reached.wait()
    await here.decide(other, "cancel")
    broken.go_on.set()
    await here.ended(other.id, "cancelled")
    assert await here.conn.fetchval("SELECT count(*) FROM core.failed") == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_demo_ends_by_itself_where_nobody_can_be_asked() -> None:
    """One command, nothing to install; it ends by itself where nobody can be asked (IDM-5)."""
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "examples.agent_tasks"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    # On a busy machine the worker's first look may find an event before its reaction in this process has handled it.
    early = re.compile(r".*name='events_unrouted', details={'event_type': 'agent.task.(requested|stuck)'.*")
    assert [line for line in run.stderr.splitlines() if not early.fullmatch(line)] == []
    for line in ("refund done: refunded 2500 cents", "refund refused", "refund failed: the bank", "watch cancelled"):
        assert line in run.stdout
