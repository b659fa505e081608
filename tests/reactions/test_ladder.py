"""One test, both rungs: the application below is the same in every test, except for the one argument `via` (IDM-3).

Its process has in-process reactions and a worker, on one registry; events are recorded on a SQLAlchemy aggregate.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast import (
    EventEnvelope,
    HandlerContext,
    HandlerRegistry,
    NewEvent,
    Publisher,
    Reactions,
    Reject,
    TerminalHandlerError,
)
from holdfast.domain_events import RecordsEvents
from holdfast.handlers import Via
from holdfast.integrations.sqlalchemy import DomainEvents
from holdfast.operator import Operator
from tests.worker.support import Facts, drained, make_tables, running, until

PUBLISHER = Publisher("shop")


class Base(DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    status: Mapped[str]

    def place(self, **options: Any) -> None:
        self.status = "placed"
        self.record(NewEvent("order.placed", {"order_id": str(self.id), "n": 1}, domain_id=self.id, **options))


class Placed(BaseModel):
    order_id: UUID


@dataclass
class App:
    """What a service has."""

    dsn: str
    registry: HandlerRegistry
    sessions: async_sessionmaker[AsyncSession]
    reactions: Reactions
    conn: asyncpg.Connection
    facts: Facts = field(default_factory=Facts)

    async def place(self, **options: Any) -> UUID:
        async with self.sessions.begin() as session:
            order = Order(id=uuid4(), status="new")
            order.place(**options)
            session.add(order)
        return order.id

    async def settled(self) -> None:
        """Whatever follows from what is committed has happened."""
        await self.reactions.drain()
        await drained(self.conn)


Start = Callable[[HandlerRegistry], contextlib.AbstractAsyncContextManager[App]]


@pytest.fixture(params=["in_process", "outbox"])
def via(request: pytest.FixtureRequest) -> Via:
    rung: Via = request.param
    return rung


@pytest.fixture
async def start(dsn: str, conn: asyncpg.Connection) -> Start:
    await make_tables(conn)
    await conn.execute("CREATE TABLE orders (id uuid PRIMARY KEY, status text NOT NULL)")

    @contextlib.asynccontextmanager
    async def started(registry: HandlerRegistry) -> AsyncIterator[App]:
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://", 1))
        facts = Facts()
        reactions = Reactions(dsn, registry, observers=(facts.append,))
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        DomainEvents(PUBLISHER, reactions).attach(sessions)
        async with running(dsn, registry, facts, poll_interval=0.2), reactions:
            yield App(dsn, registry, sessions, reactions, conn, facts)
        await engine.dispose()

    return started


async def test_every_kind_of_handler_gets_the_same_event(start: Start, via: Via) -> None:
    """Asynchronous, in a thread, typed, with the context, transactional; each gets the same event (IDM-3, LSN-5)."""
    registry = HandlerRegistry()
    got: dict[str, Any] = {}

    @registry.handler("order.placed", name="shop.plain", via=via)
    async def plain(event: EventEnvelope) -> None:
        got["plain"] = event

    @registry.handler("order.*", name="shop.thread", via=via)
    def thread(event: EventEnvelope) -> None:
        got["thread"] = event

    @registry.handler("order.placed", name="shop.typed", via=via)
    async def typed(event: EventEnvelope, payload: Placed, context: HandlerContext) -> None:
        got["typed"] = (event, payload, context)

    @registry.handler("order.placed", name="shop.ledger", via=via)
    async def ledger(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (handler, event_id) VALUES ('shop.ledger', $1)", event.event_id)

    async with start(registry) as app:
        order_id = await app.place(headers={"tenant": "acme"}, correlation_id="c-1", trace_context="00-ab-cd-01")
        await app.settled()
        event = got["plain"]
        assert event.payload == {"order_id": str(order_id), "n": 1} and event.source == "shop"
        assert (event.domain_id, event.trace_context, event.target) == (order_id, "00-ab-cd-01", None)
        typed_event, payload, context = got["typed"]
        assert got["thread"] == typed_event == event
        assert payload == Placed(order_id=order_id)
        assert (context.event_id, context.handler_name, context.attempt) == (event.event_id, "shop.typed", 1)
        assert (context.correlation_id, context.headers["tenant"]) == ("c-1", "acme")
        assert await app.conn.fetchval("SELECT array_agg(event_id) FROM ledger") == [event.event_id]
        handled = await app.conn.fetch("SELECT handler_name FROM core.event_handled ORDER BY 1")
        assert [row[0] for row in handled] == ["shop.ledger", "shop.plain", "shop.thread", "shop.typed"]
        assert await app.conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0


async def test_never_before_the_commit_and_never_without_it(start: Start, via: Via) -> None:
    """A reaction sees what its producer has committed, and nothing that was rolled back (IDM-3)."""
    registry = HandlerRegistry()
    seen: list[tuple[str, bool]] = []

    async with contextlib.AsyncExitStack() as stack:

        @registry.handler("order.placed", name="shop.look", via=via)
        async def look(event: EventEnvelope) -> None:
            identity = event.payload["order_id"]
            async with app.sessions() as session:
                seen.append((identity, await session.get(Order, UUID(identity)) is not None))

        app = await stack.enter_async_context(start(registry))
        async with app.sessions() as session:
            lost = Order(id=uuid4(), status="new")
            lost.place()
            session.add(lost)
            await session.flush()
            await session.rollback()
        async with app.sessions() as session, session.begin():
            order = Order(id=uuid4(), status="new")
            order.place()
            session.add(order)
            async with session.begin_nested():
                pass  # everything so far is in the database, and not committed
            await app.settled()
            assert seen == []
        await app.settled()
        assert seen == [(str(order.id), True)]


async def test_a_failure_is_listed_and_retried_by_hand(start: Start, via: Via) -> None:
    """With its error, under the handler's name; a replay runs it, is audited, and says who asked (IDM-3)."""
    registry = HandlerRegistry()
    broken, ran = [True], []

    @registry.handler("order.placed", name="shop.mail", via=via)
    async def mail(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (handler, event_id) VALUES ('shop.mail', $1)", event.event_id)
        if broken:
            raise TerminalHandlerError("the mail server refuses")
        ran.append(event)

    @registry.handler("order.placed", name="shop.other", via=via)
    async def other(event: EventEnvelope) -> None: ...

    async with start(registry) as app:
        await app.place()
        await app.settled()
        async with Operator(app.dsn, actor="ada@example.com") as operator:
            (dead,) = await operator.failed.page()
            assert (dead.handler_name, dead.failure_reason, dead.attempts) == ("shop.mail", "retry_terminal", 1)
            assert "the mail server refuses" in (dead.last_error or "")
            assert await app.conn.fetchval("SELECT count(*) FROM ledger") == 0  # rolled back
            told = [fact for fact in app.facts if getattr(fact, "handler_name", "") == "shop.mail"]
            assert len(told) == 1
            broken.clear()
            moved = await operator.failed.replay([dead.event_id], reason="it is back")
            assert moved.moved == [dead.id]
            await until(lambda: ran, what="the replayed reaction")
            await app.settled()
            assert await operator.failed.page() == []
            (line,) = await operator.audit.page(action="replay")
            assert (line.actor, line.reason) == ("ada@example.com", "it is back")
        assert [event.event_id for event in ran] == [dead.event_id]
        assert await app.conn.fetchval("SELECT count(*) FROM ledger") == 1


async def test_the_same_key_twice_has_one_effect(start: Start, via: Via) -> None:
    """For a reaction in a transaction and for one without (IDM-3, LSN-6, PUB-5)."""
    registry = HandlerRegistry()
    calls = []

    @registry.handler("order.placed", name="shop.count", via=via)
    async def count(event: EventEnvelope) -> None:
        calls.append(event.event_id)

    @registry.handler("order.placed", name="shop.ledger", via=via)
    async def ledger(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (handler, event_id) VALUES ('shop.ledger', $1)", event.event_id)

    async with start(registry) as app:
        for _ in range(2):
            await app.place(idempotency_key="order-17-placed")
            await app.settled()
        assert len(calls) == 1
        assert await app.conn.fetchval("SELECT count(*) FROM ledger") == 1
        assert await app.conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0


async def test_what_a_reaction_publishes_names_its_cause(start: Start, via: Via) -> None:
    """And may have reactions of its own (IDM-3, PUB-2)."""
    registry = HandlerRegistry()
    chain: list[HandlerContext] = []

    async with contextlib.AsyncExitStack() as stack:

        @registry.handler("order.placed", name="shop.ship", via=via)
        async def ship(event: EventEnvelope, context: HandlerContext) -> None:
            chain.append(context)
            async with app.sessions.begin() as session:
                order = Order(id=uuid4(), status="new")
                order.record(NewEvent("order.shipped", {}))
                session.add(order)

        @registry.handler("order.shipped", name="shop.thank", via=via)
        async def thank(event: EventEnvelope, context: HandlerContext) -> None:
            chain.append(context)

        app = await stack.enter_async_context(start(registry))
        await app.place()
        await until(lambda: len(chain) == 2, what="both reactions")
        await app.settled()
    first, second = chain
    assert second.causation_id == str(first.event_id)
    assert second.correlation_id == first.correlation_id == str(first.event_id)


async def test_a_rejected_event(start: Start, via: Via) -> None:
    """An outcome means the same on both rungs, where it can (IDM-3, LSN-8)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.check", via=via)
    async def check(event: EventEnvelope, tx: asyncpg.Connection) -> Reject:
        await tx.execute("INSERT INTO ledger (handler, event_id) VALUES ('shop.check', $1)", event.event_id)
        return Reject("no such customer")

    async with start(registry) as app:
        await app.place()
        await app.settled()
        row = await app.conn.fetchrow("SELECT handler_name, failure_reason, last_error FROM core.failed")
        assert tuple(row) == ("shop.check", "rejected", "no such customer")
        assert await app.conn.fetchval("SELECT count(*) FROM ledger") == 0
        assert await app.conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_an_event_for_another_context(start: Start, via: Via, conn: asyncpg.Connection) -> None:
    """A target is a target on both rungs (IDM-3, LSN-7)."""
    registry = HandlerRegistry()
    calls = []

    @registry.handler("order.placed", name="shop.hear", via=via)
    async def hear(event: EventEnvelope) -> None:
        calls.append(event.target)

    async with start(registry) as app:
        await app.place(target="billing")
        await app.place(target="shop")
        await app.reactions.drain()
        await until(lambda: calls, what="the event for us")
        waiting = "SELECT array_agg(target) = '{billing}' FROM core.outbox WHERE settled_at IS NULL"
        await until(lambda: conn.fetchval(waiting), what="the other one waits, unrouted")
        assert calls == ["shop"]
