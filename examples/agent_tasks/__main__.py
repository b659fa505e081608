"""Disputes come in, an agent proposes refunds, a person decides: here, on an embedded Postgres."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import UUID, uuid4

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from examples.agent_tasks import desk
from examples.agent_tasks.office import Office
from examples.agent_tasks.tasks import AgentTask, Conversation
from holdfast import HoldfastError, Publisher, Worker, WorkerSettings
from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres import migrate
from holdfast.telemetry import Fact, Notice

DISPUTES = [("A-17", 2_500), ("B-4", 800), ("C-99", 50_000)]
# What nobody says is answered like this: the second one looks wrong, the third asks for more than the bank gives.
ANSWERS = {"A-17": "y", "B-4": "n", "C-99": "y"}
T = TypeVar("T")


def say(text: str) -> None:
    print(text, flush=True)


def _trouble(fact: Fact) -> None:
    if not isinstance(fact, Notice) or fact.level != "info":
        print(f"agent_tasks: {fact}", file=sys.stderr)


async def play(dsn: str, ask: Callable[[str, str], Awaitable[str]]) -> int:
    await migrate.apply(dsn)
    connection = await asyncpg.connect(dsn)
    await connection.execute(Path(__file__).with_name("schema.sql").read_text())
    office = Office(dsn, notify=lambda text: say(f"  [{text}]"))
    settings = WorkerSettings(poll_interval=1.0)
    async with office.reactions, Worker(dsn, office.registry, settings, observers=(_trouble,)):
        shop = Publisher("shop")
        async with connection.transaction():
            for order, cents in DISPUTES:
                await shop.publish(connection, "order.disputed", {"order_id": order, "cents": cents})
        say(f"{len(DISPUTES)} orders are disputed")
        for task in await _until(lambda: desk.waiting(office.sessions), len(DISPUTES)):
            order = task.steps[0]["look_up"]
            answer = await ask(order, f"refund {task.steps[1]['refund']} cents for order {order}? [y/n] ")
            await desk.decide(office.sessions, task.id, "approve" if answer == "y" else "refuse", "you")
        cancelled = await _cancel_one(office, connection)
        messages = """SELECT c.subject, c.trigger_event_id, m.text FROM messages m
                      JOIN conversations c ON c.id = m.conversation_id ORDER BY c.subject"""
        for row in await _until(lambda: connection.fetch(messages), len(DISPUTES) + 1):
            began = f"event {row['trigger_event_id']}" if row["trigger_event_id"] else "a person"
            say(f"{row['subject']:<12} {row['text']:<56} began with {began}")
        status = (await desk.find(office.sessions, cancelled)).status
    await office.close()
    await connection.close()
    return 0 if status == "cancelled" else 1


async def _cancel_one(office: Office, connection: asyncpg.Connection) -> UUID:
    """A long task that needs no approval, and that somebody stops while it runs."""
    async with office.sessions.begin() as session:
        task = await _long_task(session)
    await _until(lambda: connection.fetch("SELECT 1 FROM agent_tasks WHERE status = 'running' AND kind = 'watch'"), 1)
    await desk.decide(office.sessions, task.id, "cancel", "you")
    say(f"cancelled while it ran: {task.kind} {task.id}")
    return task.id


async def _long_task(session: AsyncSession) -> AgentTask:
    conversation = Conversation(id=uuid4(), subject="the night")
    session.add(conversation)
    await session.flush()
    task = AgentTask.request(conversation, "watch", [{"wait": 0.2}] * 300, approval=False)
    session.add(task)
    return task


async def _until(look: Callable[[], Awaitable[list[T]]], count: int) -> list[T]:
    async with asyncio.timeout(60):
        while len(found := await look()) < count:
            await asyncio.sleep(0.05)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev demo agent_tasks", description=__doc__)
    parser.add_argument("--unattended", action="store_true", help="answer the questions by itself")
    unattended = parser.parse_args().unattended or not sys.stdin.isatty()

    async def ask(order: str, question: str) -> str:
        if unattended:
            say(f"{question}{ANSWERS[order]}")
            return ANSWERS[order]
        return (await asyncio.to_thread(input, question)).strip().lower()[:1]

    try:
        with EmbeddedPostgres() as server:
            return asyncio.run(play(server.create_database("agents"), ask))
    except KeyboardInterrupt:
        return 130
    except HoldfastError as error:
        print(f"agent_tasks: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
