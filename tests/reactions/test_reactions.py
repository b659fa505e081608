"""Reactions in the producer's process, beyond what they share with the outbox (IDM-3)."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reactions, Retry, Snooze
from holdfast.domain_events import RecordsEvents
from holdfast.errors import ConfigurationError, FieldError, SchemaMismatch
from holdfast.integrations.sqlalchemy import DomainEvents
from holdfast.operator import Operator
from holdfast.postgres import migrate
from holdfast.telemetry import Failed
from tests.operator.test_commands import Run, holdfast
from tests.outbox import Outbox
from tests.worker.support import Facts, drained, make_tables, publish, row, running, settled, terminate, until

__all__ = ["holdfast"]  # a fixture

PUBLISHER = Publisher("shop")


class Calls(list[EventEnvelope]):
    """A handler that remembers, and does what it is told."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    async def __call__(self, event: EventEnvelope) -> Any:
        self.append(event)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if isinstance(self.answer, asyncio.Event):
            await self.answer.wait()
            return None
        return self.answer


def registry_of(**functions: Any) -> HandlerRegistry:
    """In-process handlers of order.placed, named after the arguments."""
    registry = HandlerRegistry()
    for name, function in functions.items():
        registry.add(f"shop.{name}", ("order.placed",), function, via="in_process")
    return registry


async def placed(conn: asyncpg.Connection, **options: Any) -> EventEnvelope:
    async with conn.transaction():
        return await PUBLISHER.publish(conn, "order.placed", {"n": 1}, **options)


# --- with other drivers ---


async def test_an_asyncpg_publisher(dsn: str, conn: asyncpg.Connection) -> None:
    """One call after the commit; the payload is what a worker would read (IDM-3)."""
    calls = Calls()
    async with Reactions(dsn, registry_of(greet=calls)) as reactions:
        payload: dict[str, Any] = {"lines": (1, 2)}
        async with conn.transaction():
            event = await PUBLISHER.publish(conn, "order.placed", payload)
        reactions.react(event, {"correlation_id": "c-1"})
        payload["lines"] = "changed by the producer"
        await reactions.drain()
        assert [each.payload for each in calls] == [{"lines": [1, 2]}]
        assert (calls[0].event_id, calls[0].idempotency_key) == (event.event_id, event.idempotency_key)
        assert reactions.counters.delivered == 1
    assert (await row(conn, event.event_id))["status"] == "delivered"


async def test_a_psycopg_publisher_in_a_program_without_a_loop(dsn: str, conn: asyncpg.Connection) -> None:
    """A thread runs them, asynchronous handlers and others; leaving the block waits for them (IDM-3)."""
    calls, threads = Calls(), []

    def program() -> None:
        def greet(event: EventEnvelope) -> None:
            threads.append(threading.current_thread().name)

        registry = registry_of(remember=calls, greet=greet)
        with Reactions(dsn, registry) as reactions, psycopg.connect(dsn) as connection:
            event = PUBLISHER.publish(connection, "order.placed", {"n": 1})
            connection.commit()
            reactions.react(event)
        with pytest.raises(ConfigurationError, match="not running"):
            reactions.react(event)

    await asyncio.to_thread(program)
    assert len(calls) == len(threads) == 1 and threads[0].startswith("holdfast-handler")
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 2
    await drained(conn)


def test_a_program_without_a_database() -> None:
    """What keeps them from starting is told where they are started (IDM-3)."""
    with pytest.raises(OSError), Reactions("postgresql://127.0.0.1:1/none", registry_of(greet=Calls())):
        pass
    # Where everything has moved to the outbox there is nothing to start.
    with Reactions("postgresql://127.0.0.1:1/none", HandlerRegistry()):
        pass


# --- who else wants the event ---


async def test_the_event_waits_for_whoever_else_wants_it(dsn: str, conn: asyncpg.Connection) -> None:
    """A reaction in process takes nothing from handlers elsewhere (IDM-3, LSN-7)."""
    mine, theirs = Calls(), Calls()
    elsewhere = HandlerRegistry()
    elsewhere.add("billing.charge", ("order.*",), theirs)
    await Outbox(conn).subscribe("billing.charge", "order.*")
    async with Reactions(dsn, registry_of(greet=mine)) as reactions:
        event = await placed(conn)
        reactions.react(event)
        await reactions.drain()
        assert (await row(conn, event.event_id))["status"] == "pending"
        async with running(dsn, elsewhere):
            await settled(conn, event.event_id)
    assert [each.event_id for each in (*mine, *theirs)] == [event.event_id] * 2


async def test_the_event_waits_for_a_handler_that_has_not_started_yet(dsn: str, conn: asyncpg.Connection) -> None:
    """On the first deployment producers may be up before the worker has told its interest (IDM-3, LSN-7)."""
    registry, calls = registry_of(greet=Calls()), Calls()
    registry.add("shop.charge", ("order.*",), calls)
    async with Reactions(dsn, registry) as reactions:
        event = await placed(conn)
        reactions.react(event)
        await reactions.drain()
        assert (await row(conn, event.event_id))["status"] == "pending"
        async with running(dsn, registry):
            await settled(conn, event.event_id)
    assert [each.event_id for each in calls] == [event.event_id]


async def test_a_failure_is_kept_when_the_event_is_gone(dsn: str, conn: asyncpg.Connection) -> None:
    """Whoever else wanted it may have handled it, and retention may have removed it (IDM-3)."""
    domain = uuid4()
    async with Reactions(dsn, registry_of(greet=Calls(RuntimeError("no")))) as reactions:
        event = await placed(conn, domain_id=domain)
        await conn.execute("DELETE FROM core.outbox")
        reactions.react(event)
        await reactions.drain()
    dead = await conn.fetchrow("SELECT * FROM core.failed")
    assert (dead["event_id"], dead["domain_id"], dead["payload"]) == (event.event_id, domain, '{"n": 1}')
    assert (dead["occurred_at"], dead["idempotency_key"]) == (event.occurred_at, event.idempotency_key)


# --- moving between the rungs ---


async def test_moving_up_repeats_nothing_and_finds_what_was_missed(dsn: str, conn: asyncpg.Connection) -> None:
    """What was handled in process is in the inbox; what a dead process had not begun is delivered (IDM-3, IDM-5)."""
    calls = Calls()
    await Outbox(conn).subscribe("billing.charge", "order.placed")  # so that the rows stay open
    async with Reactions(dsn, registry_of(greet=calls)) as reactions:
        handled = await placed(conn)
        reactions.react(handled)
        await reactions.drain()
    missed = await placed(conn)  # and the process dies
    assert len(calls) == 1
    moved = HandlerRegistry()
    moved.add("shop.greet", ("order.placed",), calls)
    moved.add("billing.charge", ("order.placed",), Calls())
    async with running(dsn, moved) as worker:
        await drained(conn)
        await until(lambda: worker.counters.duplicates == 1, what="the one that was handled in process")
    assert [each.event_id for each in calls] == [handled.event_id, missed.event_id]


async def test_moving_down_is_told_until_the_interest_is_retired(dsn: str, conn: asyncpg.Connection) -> None:
    """The old interest is durable; until somebody ends it, the worker delivers too, and the inbox knows (IDM-3)."""
    calls, facts = Calls(), Facts()
    await Outbox(conn).subscribe("shop.greet", "order.placed")
    registry = registry_of(greet=calls)
    async with Reactions(dsn, registry) as reactions:
        event = await placed(conn)
        reactions.react(event)
        await reactions.drain()
        async with running(dsn, registry, facts):
            await settled(conn, event.event_id)
    assert len(calls) == 1
    (notice,) = facts.notices("subscription_outdated")
    assert notice.details["handler_name"] == "shop.greet"


async def test_the_remedy_for_an_outdated_interest(dsn: str, conn: asyncpg.Connection, holdfast: Run) -> None:
    """The command of the notice, pasted into a shell, ends that interest and no other (IDM-3, OPS-1)."""
    for event_type in ("order.*", "order.placed"):
        await Outbox(conn).subscribe("shop.greet", event_type)
    facts, registry = Facts(), HandlerRegistry()
    registry.add("shop.greet", ("order.placed",), Calls())
    async with running(dsn, registry, facts):
        pass
    (notice,) = facts.notices("subscription_outdated")
    program, *words = shlex.split(str(notice.details["remedy"]).rpartition(": ")[2])
    assert (program, words[-1]) == ("holdfast", "order.*")
    code, out, _ = await asyncio.to_thread(holdfast, *words, "--yes")
    assert (code, out) == (0, "shop.greet: 1 subscription ended\n")
    async with running(dsn, registry, facts := Facts()):
        pass
    assert facts.notices("subscription_outdated") == []
    left = "SELECT array_agg(event_type) FROM core.subscriptions WHERE retired_at IS NULL"
    assert await conn.fetchval(left) == ["order.placed"]


# --- what becomes of failures ---


async def test_what_cannot_be_had_in_process_is_a_failure(dsn: str, conn: asyncpg.Connection) -> None:
    """An error, a retry or a snooze that somebody asks for, a time limit, a wrong answer (IDM-3, LSN-5, LSN-11)."""

    def threaded(event: EventEnvelope) -> None:
        raise LookupError("nothing there")

    async def wrong(event: EventEnvelope) -> str:
        return "done"

    async def cancelled(event: EventEnvelope) -> None:
        raise asyncio.CancelledError

    async def doomed(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        with contextlib.suppress(asyncpg.PostgresError):
            await tx.execute("SELECT 1 / 0")

    async def commits(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("COMMIT")

    registry = registry_of(
        error=Calls(RuntimeError("it broke")), retry=Calls(Retry(5, "not yet")), snooze=Calls(Snooze(5)),
        threaded=threaded, wrong=wrong, cancelled=cancelled, doomed=doomed, commits=commits,
    )  # fmt: skip
    registry.add("shop.slow", ("order.placed",), Calls(asyncio.Event()), timeout=0.05, via="in_process")
    registry.add("shop.strict", ("order.placed",), Calls(KeyError("x")), on_error="reject", via="in_process")
    facts = Facts()
    async with Reactions(dsn, registry, observers=(facts.append,)) as reactions:
        event = await placed(conn)
        reactions.react(event)
        await reactions.drain()
        assert (reactions.counters.delivered, reactions.counters.failed) == (0, 10)
    dead = {each["handler_name"]: each for each in await conn.fetch("SELECT * FROM core.failed")}
    said = {name.removeprefix("shop."): each["last_error"] for name, each in dead.items()}
    assert said["error"] == "RuntimeError: it broke" and said["retry"] == "not yet"
    assert said["threaded"] == "LookupError: nothing there" and "limit of 0.05 s" in said["slow"]
    assert "returned str" in said["wrong"] and "CancelledError" in said["cancelled"]
    assert "again later" in said["snooze"] and "nothing could be committed" in said["doomed"]
    assert "by hand" in said["commits"]
    reasons = {name: each["failure_reason"] for name, each in dead.items()}
    assert reasons.pop("shop.strict") == "rejected" and set(reasons.values()) == {"retry_terminal"}
    assert (await row(conn, event.event_id))["handler_name"] == "*"
    told = facts.of(Failed)
    assert {fact.delivery_id for fact in told} == {each["id"] for each in dead.values()}
    assert {fact.correlation_id for fact in told} == {str(event.event_id)}
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 0


async def test_operators_find_what_failed_in_process(dsn: str, conn: asyncpg.Connection) -> None:
    """Among the dead letters by the event's id, with its siblings; discarded and restored like others (IDM-3,
    OPS-1).
    """
    registry = registry_of(greet=Calls(RuntimeError("no")), fine=Calls())
    async with Reactions(dsn, registry) as reactions:
        event = await placed(conn)
        reactions.react(event)
        await reactions.drain()
    async with Operator(dsn, actor="ada") as operator:
        (group,) = (await operator.failed.groups()).groups
        assert (group.handler_name, group.count) == ("shop.greet", 1)
        detail = await operator.events.detail(event.event_id)
        assert list(detail.handled_by) == ["shop.fine"] and "shop.greet" in str(detail)
        seen = {each.handler_name: each for each in await operator.handlers.all()}
        assert {name: (each.retired, each.failed) for name, each in seen.items()} == {
            "shop.fine": (True, 0),
            "shop.greet": (True, 1),
        }
        assert (await operator.failed.discard([event.event_id])).count == 1
        assert await operator.failed.page() == []
        assert (await operator.failed.restore([event.event_id])).count == 1


async def test_the_end_of_the_process(dsn: str, conn: asyncpg.Connection) -> None:
    """What runs may end within the grace; what does not, and what had not begun, is listed (IDM-3)."""
    never, soon, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(event: EventEnvelope) -> None:
        begun.set()
        await (soon if event.payload["n"] == 1 else never).wait()

    reactions = Reactions(dsn, registry_of(slow=slow), concurrency=2, grace=0.3)
    async with reactions:
        identities = []
        for n in range(1, 4):  # the third waits for a place
            async with conn.transaction():
                event = await PUBLISHER.publish(conn, "order.placed", {"n": n})
            identities.append(event.event_id)
            reactions.react(event)
        await begun.wait()
        asyncio.get_running_loop().call_later(0.05, soon.set)
    with pytest.raises(ConfigurationError, match="not running"):
        reactions.react(event)
    assert await conn.fetchval("SELECT array_agg(idempotency_key) FROM core.event_handled") == [str(identities[0])]
    dead = await conn.fetch("SELECT event_id, last_error FROM core.failed ORDER BY payload ->> 'n'")
    assert [each["event_id"] for each in dead] == identities[1:]
    assert all("the process was stopped" in each["last_error"] for each in dead)


async def test_a_connection_that_breaks(dsn: str, conn: asyncpg.Connection) -> None:
    """What became of reactions is written down on the next one; many at once are (IDM-3)."""
    calls = Calls()
    facts = Facts()
    async with Reactions(dsn, registry_of(greet=calls), observers=(facts.append,)) as reactions:
        assert await terminate(conn, "react") == 1
        for _ in range(20):
            reactions.react(await placed(conn))
        await reactions.drain()
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == 20
    assert facts == []
    await drained(conn)


async def test_a_settlement_may_be_sent_twice(conn: asyncpg.Connection) -> None:
    """When the answer was lost. And a dead letter that somebody has replayed meanwhile stays as it is (IDM-3)."""
    outbox = Outbox(conn)
    event = await placed(conn)
    values = {
        "event": event.model_dump_json(), "done": ["shop.a"], "failed": ["shop.b"], "reasons": ["rejected"],
        "errors": ["no"], "signatures": ["s"], "alone": True,
    }  # fmt: skip
    (first,) = await outbox.call("reaction_settle", **values)
    (dead,) = first[0]
    await conn.execute("SELECT core.outbox_replay($1, 0, 'ada')", dead)
    (second,) = await outbox.call("reaction_settle", **values)
    assert second[0] == first[0]
    assert (await row(conn, dead))["status"] == "pending"
    for broken in ({"done": ["*"]}, {"failed": ["x/y"]}, {"event": "{}"}, {"reasons": ["whim"]}):
        with pytest.raises(asyncpg.PostgresError):
            await outbox.call("reaction_settle", **(values | {"failed": ["shop.c"]} | broken))


async def test_draining_waits_for_what_was_accepted_before(dsn: str, conn: asyncpg.Connection) -> None:
    """And not for as many others (IDM-3)."""
    gate, ended = asyncio.Event(), []

    async def slow(event: EventEnvelope) -> None:
        if event.payload["n"] == 1:
            await gate.wait()
        ended.append(event.payload["n"])

    async with Reactions(dsn, registry_of(slow=slow)) as reactions:
        reactions.react(await placed(conn))
        draining = asyncio.create_task(reactions.drain())
        await asyncio.sleep(0)
        for n in (2, 3):
            async with conn.transaction():
                reactions.react(await PUBLISHER.publish(conn, "order.placed", {"n": n}))
        await until(lambda: len(ended) == 2, what="the later ones")
        await until(lambda: reactions.counters.delivered == 2, what="written down")
        assert not draining.done()
        gate.set()
        await draining
        assert ended == [2, 3, 1]


async def test_draining_without_a_loop(dsn: str, conn: asyncpg.Connection) -> None:
    """Synchronous code waits for what its commits have set off, with a deadline, and goes on (IDM-3)."""
    await conn.execute("CREATE TABLE orders (id uuid PRIMARY KEY)")
    gate = threading.Event()

    def slow(event: EventEnvelope) -> None:
        gate.wait(30)

    def program() -> int:
        reactions = Reactions(dsn, registry_of(slow=slow))
        reactions.drain_sync()  # of nothing: at once, open or not
        engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
        factory = sessionmaker(engine)
        DomainEvents(PUBLISHER, reactions).attach(factory)
        with reactions:
            with factory.begin() as session:
                order = Order(id=uuid4())
                order.record(NewEvent("order.placed", {}))
                session.add(order)
            with pytest.raises(TimeoutError, match="to 1 events have not ended in time"):
                reactions.drain_sync(timeout=0.05)
            with pytest.raises(TimeoutError):
                asyncio.run(reactions.drain(0.05))  # on a loop that is not theirs
            gate.set()
            reactions.drain_sync(timeout=30)
            with psycopg.connect(dsn) as connection:
                (handled,) = connection.execute("SELECT count(*) FROM core.event_handled").fetchone() or (0,)
            asyncio.run(reactions.drain())
        reactions.drain_sync()
        engine.dispose()
        return int(handled)

    assert await asyncio.to_thread(program) == 1
    await drained(conn)


async def test_a_loop_does_not_wait_for_itself(dsn: str, conn: asyncpg.Connection) -> None:
    """The thread that runs the reactions cannot block until they have ended; another one can (IDM-3)."""
    calls = Calls()
    async with Reactions(dsn, registry_of(greet=calls)) as reactions:
        with pytest.raises(ConfigurationError, match=r"await reactions\.drain"):
            reactions.drain_sync()
        reactions.react(await placed(conn))
        await asyncio.to_thread(reactions.drain_sync, 30)
        assert len(calls) == reactions.counters.delivered == 1
    reactions.drain_sync()  # nothing runs here any more


@pytest.mark.slow
async def test_nothing_is_waited_for_that_was_given_up(dsn: str, conn: asyncpg.Connection) -> None:
    """A reaction that outlives even its cancellation does not keep anybody waiting for ever (IDM-3)."""
    begun, gate, tasks = asyncio.Event(), asyncio.Event(), asyncio.all_tasks()

    async def stubborn(event: EventEnvelope) -> None:
        begun.set()
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()

    async with Reactions(dsn, registry_of(stubborn=stubborn), grace=0.05) as reactions:
        reactions.react(await placed(conn))
        await begun.wait()
        waiting = asyncio.create_task(asyncio.to_thread(reactions.drain_sync))
        await asyncio.sleep(0)
    await asyncio.wait_for(waiting, 10)
    gate.set()
    await until(lambda: asyncio.all_tasks() <= tasks, what="the reaction has ended, and its session")


async def test_what_is_refused_at_the_start_leaves_nothing_behind(empty_dsn: str) -> None:
    """A schema that is not there; no session of ours stays, and they open when it is there (IDM-3)."""
    reactions = Reactions(empty_dsn, registry_of(greet=Calls()))
    tasks = asyncio.all_tasks()
    with pytest.raises(SchemaMismatch):
        await reactions.__aenter__()
    assert asyncio.all_tasks() == tasks
    looking = await asyncpg.connect(empty_dsn)
    ours = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await until(lambda: looking.fetchval(ours), what="no session of ours")
    with pytest.raises(ConfigurationError, match="not running"):
        reactions.require_open()
    await migrate.apply(empty_dsn)
    async with reactions:
        reactions.react(await placed(looking))
        await reactions.drain(30)
        assert reactions.counters.delivered == 1
    await looking.close()


# --- refused before anything is written ---


class Base(DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "orders"
    id: Mapped[UUID] = mapped_column(primary_key=True)


async def test_a_commit_that_nobody_could_react_to(dsn: str, conn: asyncpg.Connection) -> None:
    """Reactions that are not running, or an event that is to wait, fail the commit and not what follows it (IDM-3)."""
    await conn.execute("CREATE TABLE orders (id uuid PRIMARY KEY)")
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    factory = sessionmaker(engine)
    reactions = Reactions(dsn, registry_of(greet=Calls()))
    DomainEvents(PUBLISHER, reactions).attach(factory)

    def commit(*, bind: Any = None, **options: Any) -> None:
        with factory.begin() if bind is None else factory(bind=bind) as session:
            order = Order(id=uuid4())
            order.record(NewEvent("order.placed", {}, **options))
            session.add(order)
            session.flush() if bind is None else session.commit()

    with pytest.raises(ConfigurationError, match="not running"):
        commit()
    async with reactions:
        for options in ({"delay": 60}, {"key": "k"}):
            with pytest.raises(FieldError, match="outbox"):
                commit(**options)
        with engine.connect() as outer, outer.begin() as transaction:
            with pytest.raises(ConfigurationError, match="bound to a connection"):
                commit(bind=outer)  # which may be rolled back after the session's commit
            transaction.rollback()
        commit(target="elsewhere", delay=60)  # nothing to us
    assert await conn.fetchval("SELECT count(*) FROM orders") == 1
    with Session(engine) as session:  # not attached
        session.add(Order(id=uuid4()))
        session.commit()
    engine.dispose()


@pytest.mark.parametrize("name", ["concurrency", "connections", "threads"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Reactions("postgresql://localhost/x", HandlerRegistry(), **{name: 0})


def test_the_argument_is_checked() -> None:
    """With what may be written there (IDM-3)."""
    with pytest.raises(ConfigurationError, match="outbox"):
        HandlerRegistry().add("shop.greet", ("order.placed",), Calls(), via="bus")  # type: ignore[arg-type]


async def test_a_worker_is_owed_nothing_for_reactions_in_process(dsn: str, conn: asyncpg.Connection) -> None:
    """It serves their lanes, for replays, and has no interest in their events (IDM-3)."""
    await make_tables(conn)
    async with running(dsn, registry_of(greet=Calls())):
        assert await conn.fetchval("SELECT count(*) FROM core.subscriptions") == 0
        identity = await publish(conn, "order.placed")
    assert (await row(conn, identity))["status"] == "pending"
