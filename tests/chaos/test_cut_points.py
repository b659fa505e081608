"""A connection may break at every message of the protocol: whoever used it then knows too little, never wrong things.

Each operation is first run uncut, to learn its messages, and then once for every one of them, cut there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Literal, NamedTuple, get_args
from uuid import UUID

import asyncpg
import psycopg
import pytest

from chaos.wire import Cut, Direction, Watch, Wire, wired
from holdfast import EventEnvelope, HandlerRegistry, NewEvent, Publisher, Reject, Retry, RetryPolicy
from holdfast.telemetry import Failed
from tests.worker.support import Facts, drained, make_tables, running, until

pytestmark = [pytest.mark.nightly("cut points of a process"), pytest.mark.slow, pytest.mark.new_database]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


def cuts(learned: Watch, *ways: Literal["before", "within", "after"]) -> Iterator[Cut]:
    """Every message in both directions, in each of the ways."""
    for direction in DIRECTIONS:
        letters = "".join(learned.seen[direction])
        for number, letter in enumerate(letters, start=1):
            # Of the settings that a server tells in a row one stands for all, and what follows a goodbye is nothing.
            told = direction == "to_client" and letters[:number].endswith("SS")
            if not told and letter != "X":
                yield from (Cut(direction, number, way) for way in ways)


# --- producers and operators: they have a connection, and hear an answer or an error -----------------------------

# Writes the order `n` in one transaction, and returns when it has heard that it is committed.
Operation = Callable[[str, int], Awaitable[None]]
PATIENCE = 1.0  # when nobody answers
BATCH = 3
# What drivers say when a connection breaks.
BROKEN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, psycopg.Error)


@contextlib.asynccontextmanager
async def connected(through: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(through, timeout=PATIENCE, command_timeout=PATIENCE)
    try:
        yield connection
    finally:
        with contextlib.suppress(*BROKEN):
            await connection.close(timeout=PATIENCE)


async def publish(through: str, n: int) -> None:
    async with connected(through) as connection, connection.transaction():
        await connection.execute("INSERT INTO orders VALUES ($1, 1)", n)
        await Publisher("shop").publish(connection, "order.booked", {"n": n})


async def publish_with_psycopg(through: str, n: int) -> None:
    connection = await psycopg.AsyncConnection.connect(through, connect_timeout=2)
    try:
        async with asyncio.timeout(PATIENCE):
            await connection.execute("INSERT INTO orders VALUES (%s, 1)", [n])
            await Publisher("shop").publish(connection, "order.booked", {"n": n})
            await connection.commit()
    finally:
        await connection.close()


async def publish_with_key(through: str, n: int) -> None:
    async with connected(through) as connection, connection.transaction():
        await connection.execute("INSERT INTO orders VALUES ($1, 1)", n)
        await Publisher("shop").publish(connection, "order.booked", {"n": n}, key=f"order-{n}")


async def publish_many(through: str, n: int) -> None:
    async with connected(through) as connection, connection.transaction():
        await connection.execute("INSERT INTO orders VALUES ($1, $2)", n, BATCH)
        await Publisher("shop").publish_many(connection, [NewEvent("order.booked", {"n": n}) for _ in range(BATCH)])


async def attempt(dsn: str, operation: Operation, n: int, cut: Cut | None) -> tuple[bool, Watch]:
    """Whether the caller heard of success, and what was seen on the wire."""
    async with wired(dsn) as (wire, through):
        watch = wire.watch(cut=cut)
        try:
            await operation(through, n)
        except BROKEN:
            assert cut is not None, "nothing was cut, and it failed"
            return False, watch
        return True, watch


async def sweep(dsn: str, conn: asyncpg.Connection, operation: Operation) -> tuple[dict[int, Cut], set[int]]:
    """Run it uncut as number 0 and then with every cut. Which number had which cut, and which were acknowledged."""
    acknowledged, learned = await attempt(dsn, operation, 0, None)
    assert acknowledged
    said, heard = ("".join(learned.seen[direction]) for direction in DIRECTIONS)
    half_open = [
        Cut("to_server", 1 + max(said.rfind("Q"), said.rfind("S")), "before", "half_open"),  # the commit
        Cut("to_client", heard.rfind("Z"), "before", "half_open"),  # and its answer, before "ready for the next"
    ]
    planned = dict(enumerate([*cuts(learned, "before", "within", "after"), *half_open], start=1))
    known, places = {0}, asyncio.Semaphore(8)

    async def one(n: int, cut: Cut) -> None:
        async with places:
            acknowledged, watch = await attempt(dsn, operation, n, cut)
            assert watch.made.is_set(), f"{cut} was not reached"
            if acknowledged:
                known.add(n)

    async with asyncio.TaskGroup() as group:
        for n, cut in planned.items():
            group.create_task(one(n, cut))
    # new_database above: the session that brings a lent one back would be counted.
    others = """SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()
                AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""
    await until(lambda: conn.fetchval(others), what="the server has noticed every cut")
    return planned, known


async def handled_once(dsn: str, conn: asyncpg.Connection, wanted: Counter[int]) -> None:
    """A worker finds everything, and each event has its one effect, its one inbox row and nothing else."""
    registry = HandlerRegistry()

    @registry.handler("order.booked", name="ledger.book")
    async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO ledger (event_id, n) VALUES ($1, $2)", event.event_id, event.payload["n"])

    async with running(dsn, registry):
        await drained(conn)
    rows = await conn.fetch("SELECT n, count(*) AS effects FROM ledger GROUP BY n")
    assert Counter({row["n"]: row["effects"] for row in rows}) == wanted
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.event_handled") == wanted.total()


@pytest.mark.parametrize("operation", [publish, publish_with_psycopg, publish_with_key, publish_many])
async def test_a_producer_is_cut_off_at_every_message(dsn: str, conn: asyncpg.Connection, operation: Operation) -> None:
    """What was acknowledged is there; of the rest, the order and its events are, or neither (P1, PUB-1, PUB-2)."""
    await make_tables(conn)
    await conn.execute("CREATE TABLE orders (n int, events int)")
    planned, acknowledged = await sweep(dsn, conn, operation)
    rows = await conn.fetch(
        """SELECT n, coalesce(o.events, 0) AS wanted, coalesce(e.events, 0) AS found, coalesce(e.keys, 0) AS keys
           FROM orders o FULL JOIN (
               SELECT (e.payload->>'n')::int AS n, count(*) AS events, count(k.event_id) AS keys
               FROM core.outbox e LEFT JOIN core.outbox_keys k ON k.event_id = e.id GROUP BY 1) e USING (n)"""
    )
    halves = {row["n"]: (planned.get(row["n"]), dict(row)) for row in rows if row["wanted"] != row["found"]}
    assert not halves, "one half of a transaction"
    there = Counter({row["n"]: row["found"] for row in rows})
    lost = [str(planned[n]) for n in acknowledged - there.keys()]
    assert not lost, "acknowledged and not there"
    assert acknowledged < there.keys() < {0, *planned}, "no cut left the caller in doubt, or none undid the transaction"
    keyed = operation is publish_with_key
    assert await conn.fetchval("SELECT count(*) FROM core.outbox_keys") == (there.total() if keyed else 0)
    await handled_once(dsn, conn, there)


async def test_an_operator_is_cut_off_at_every_message_of_a_replay(dsn: str, conn: asyncpg.Connection) -> None:
    """It has happened or it has not; asked for once more, it has happened once (DLQ-3)."""
    await make_tables(conn)
    ids: dict[int, UUID] = {}
    turn = asyncio.Lock()
    failed = """
        INSERT INTO core.outbox (event_type, source, payload, status, attempts, last_error, failure_reason,
                                 first_failed_at, failed_at, settled_at)
        VALUES ('order.booked', 'shop', jsonb_build_object('n', $1::int), 'failed', 5, 'boom', 'retry_terminal',
                now(), now(), now()) RETURNING id
    """

    async def replay(through: str, n: int) -> None:
        async with turn:
            ids[n] = await conn.fetchval(failed, n)
        async with connected(through) as connection:
            moved = await connection.fetchval("SELECT core.outbox_replay($1, 0, 'ann@example.org')", ids[n])
        assert moved == 1

    planned, acknowledged = await sweep(dsn, conn, replay)
    query = """SELECT (payload->>'n')::int AS n, status, attempts, jsonb_array_length(failure_history) AS cycles
               FROM core.outbox"""
    rows = {row["n"]: tuple(row)[1:] for row in await conn.fetch(query)}
    assert rows.keys() == {0, *planned}
    assert set(rows.values()) == {("pending", 0, 1), ("failed", 5, 0)}
    replayed = {n for n, row in rows.items() if row[0] == "pending"}
    assert acknowledged < replayed
    for n, id in ids.items():
        moved = await conn.fetchval("SELECT core.outbox_replay($1, 0, 'ann@example.org')", id)
        assert moved == (n not in replayed)
    assert {tuple(row)[1:] for row in await conn.fetch(query)} == {("pending", 0, 1)}
    await handled_once(dsn, conn, Counter(ids.keys()))


# --- workers: they recover by themselves -------------------------------------------------------------------------

WORKERS = 20  # side by side: nearly all the time they wait for a lease to end, or before they connect again
SETTINGS = {"lease": 1.5, "poll_interval": 1.0, "connections": 1, "concurrency": 4, "grace": 5.0}
QUICK = RetryPolicy(max_attempts=20, base_delay=0.02, max_delay=0.05)
RECOVERY = 30.0


class Step(NamedTuple):
    """What a worker does on one of its connections for one event."""

    name: str
    connection: str
    event_type: str
    status: str = "delivered"


CLAIM = Step("claim", "claim", "order.placed")
SPLIT = Step("split", "claim", "order.shipped")
DELIVER = Step("deliver", "settle", "order.placed")
RETRY = Step("retry", "settle", "order.delayed")
FAIL = Step("fail", "settle", "order.refused", "failed")
HANDLE = Step("transaction", "handler", "order.booked")
STUMBLE = Step("transaction that fails", "handler", "order.stumbled")
STEPS = (CLAIM, SPLIT, DELIVER, RETRY, FAIL, HANDLE, STUMBLE)


class Job(NamedTuple):
    step: Step
    cold: bool  # on a new connection, whose beginning is part of it; else its statements are prepared
    cut: Cut | None

    def __str__(self) -> str:
        return f"{self.step.name}, {'cold' if self.cold else 'warm'}, {self.cut or 'uncut'}"


def handlers(runs: Counter[UUID]) -> HandlerRegistry:
    """`runs` counts how often the handlers of an event were entered."""
    registry = HandlerRegistry()
    write = "INSERT INTO ledger (handler, event_id) VALUES ($1, $2)"

    @registry.handler("order.placed", name="billing.charge", retry=QUICK)
    async def charge(event: EventEnvelope) -> None:
        runs[event.event_id] += 1

    @registry.handler("order.shipped", name="billing.invoice", retry=QUICK)
    async def invoice(event: EventEnvelope) -> None:
        runs[event.event_id] += 1

    @registry.handler("order.shipped", name="mail.send", retry=QUICK)
    async def send(event: EventEnvelope) -> None:
        runs[event.event_id] += 1

    @registry.handler("order.delayed", name="billing.wait", retry=QUICK)
    async def wait(event: EventEnvelope) -> Retry | None:
        runs[event.event_id] += 1
        return Retry(0.01, "not yet") if runs[event.event_id] == 1 else None

    @registry.handler("order.refused", name="billing.refuse", retry=QUICK)
    async def refuse(event: EventEnvelope) -> Reject:
        runs[event.event_id] += 1
        return Reject("never")

    @registry.handler("order.booked", name="ledger.book", retry=QUICK, timeout=3.0)
    async def book(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs[event.event_id] += 1
        await tx.execute(write, "ledger.book", event.event_id)

    @registry.handler("order.stumbled", name="ledger.stumble", retry=QUICK, timeout=3.0)
    async def stumble(event: EventEnvelope, tx: asyncpg.Connection) -> None:
        runs[event.event_id] += 1
        await tx.execute(write, "ledger.stumble", event.event_id)
        if runs[event.event_id] == 1:
            raise ConnectionError("the other side is not there")

    return registry


class Control:
    """The connection that is not cut, for all who look on."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._conn = conn
        self._turn = asyncio.Lock()

    async def publish(self, publisher: Publisher, event_type: str) -> UUID:
        async with self._turn, self._conn.transaction():
            return (await publisher.publish(self._conn, event_type, {})).event_id

    async def settled(self, id: UUID) -> None:
        """Wait until every handler's part of an event is settled."""
        query = "SELECT bool_and(settled_at IS NOT NULL) FROM core.outbox WHERE id = $1 OR origin_id = $1"
        deadline, settled = time.monotonic() + RECOVERY, False
        while not settled:
            assert time.monotonic() < deadline, f"{id} is not settled after {RECOVERY:g} s"
            await asyncio.sleep(0.04)
            async with self._turn:
                settled = await self._conn.fetchval(query, id)


class Victim:
    """A worker on a channel of its own, behind a wire of its own."""

    def __init__(self, wire: Wire, control: Control, channel: str) -> None:
        self._wire = wire
        self._control = control
        self._publisher = Publisher("shop", channel=channel)

    async def prepare(self) -> None:
        for step in STEPS:
            await self._work(step)

    async def run(self, job: Job) -> Watch:
        """Let the worker meet the cut while it works, and then work once more."""
        connection = f"holdfast {job.step.connection}"
        if job.cold:
            self._wire.reset(connection)
        elif job.cut is None:
            await self._work(job.step)  # a session that was idle before would be reset in the middle of it
        watch = self._wire.watch(connection, job.cut)
        await self._work(job.step)
        if job.cut is None:
            self._wire.watch()  # what was seen until now is what was to be learned
        else:
            await until(watch.made.is_set, what="the cut is made")
        await self._work(job.step)
        self._wire.heal()
        return watch

    async def _work(self, step: Step) -> None:
        await self._control.settled(await self._control.publish(self._publisher, step.event_type))
        passed = -1
        while passed != self._wire.passed:  # until it has nothing more to say
            passed = self._wire.passed
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def victim(dsn: str, control: Control, number: int, runs: Counter[UUID], facts: Facts) -> AsyncIterator[Victim]:
    channel = f"lane_{number}"
    async with (
        wired(dsn) as (wire, through),
        running(through, handlers(runs), facts, channels=(channel,), **SETTINGS),
    ):
        yield Victim(wire, control, channel)


async def work_off(victims: list[Victim], planned: Iterable[Job]) -> dict[Job, Watch]:
    """All take from one list."""
    jobs, done = deque(planned), dict[Job, Watch]()

    async def work(victim: Victim) -> None:
        while jobs:
            job = jobs.popleft()
            try:
                done[job] = await victim.run(job)
            except BaseException as error:
                error.add_note(f"in {job}")
                raise

    async with asyncio.TaskGroup() as group:
        for each in victims:
            group.create_task(work(each))
    return done


def planned(learned: dict[Job, Watch], *, ended_by_server: bool) -> Iterator[Job]:
    """The slow ones first. Before Postgres 17 nothing but the keepalives ends a transaction in its midst."""
    commit = len(learned[Job(HANDLE, False, None)].seen["to_server"])
    answer = len(learned[Job(HANDLE, False, None)].seen["to_client"]) - 1
    yield Job(HANDLE, False, Cut("to_server", commit, "before", "half_open"))
    yield Job(HANDLE, False, Cut("to_client", answer, "before", "half_open"))
    for step in (CLAIM, DELIVER):
        for direction in DIRECTIONS:
            yield Job(step, False, Cut(direction, 1, "before", "half_open"))
    if ended_by_server:
        # Carried out, but not committed: the server waits for the end of a message, with the rows locked.
        yield Job(CLAIM, False, Cut("to_server", 6, "before", "half_open"))
        yield Job(DELIVER, False, Cut("to_server", 3, "before", "half_open"))
    for (step, cold, _), watch in learned.items():
        if step.connection == "claim":
            # It looks again and again for what is due: the first times are enough.
            first = {"to_server": 36, "to_client": 64} if cold else {"to_server": 15, "to_client": 20}
            yield from (Job(step, cold, cut) for cut in cuts(watch, "before") if cut.number <= first[cut.direction])
        else:
            # Its second attempt is the other step.
            ways: tuple[Literal["before", "within"], ...] = (
                ("before",) if cold or step is STUMBLE else ("before", "within")
            )
            yield from (Job(step, cold, cut) for cut in cuts(watch, *ways))


@pytest.mark.timeout(300)
async def test_a_worker_is_cut_off_at_every_message(dsn: str, conn: asyncpg.Connection) -> None:
    """It recovers by itself, and nothing is lost, doubled or left in flight (P1, P2, P8, LSN-2, LSN-3, LSN-5,
    LSN-7).
    """
    await make_tables(conn)
    runs: Counter[UUID] = Counter()
    facts, control = Facts(), Control(conn)
    async with contextlib.AsyncExitStack() as stack:
        victims = [
            await stack.enter_async_context(victim(dsn, control, number, runs, facts)) for number in range(WORKERS)
        ]
        await asyncio.gather(*(each.prepare() for each in victims))
        learned = await work_off(
            victims,
            [Job(step, False, None) for step in STEPS] + [Job(step, True, None) for step in (CLAIM, DELIVER, HANDLE)],
        )
        done = await work_off(victims, planned(learned, ended_by_server=conn.get_server_version().major >= 17))
    assert all(watch.made.is_set() for watch in done.values())
    await require_all_right(conn, runs, facts)


async def require_all_right(conn: asyncpg.Connection, runs: Counter[UUID], facts: Facts) -> None:
    """Each event, and each of its handlers, has what it was owed, once."""
    rows = await conn.fetch(
        """SELECT id, event_type, status, handler_name, failure_reason,
                  (SELECT array_agg(s.handler_name || ' ' || s.status ORDER BY s.handler_name) FROM core.outbox s
                   WHERE s.origin_id = o.id) AS siblings,
                  (SELECT count(*) FROM ledger l WHERE l.event_id = o.id) AS effects
           FROM core.outbox o WHERE origin_id IS NULL"""
    )
    right = {
        "order.placed": ("delivered", "billing.charge", None, None, 0),
        "order.shipped": ("delivered", "*", None, ["billing.invoice delivered", "mail.send delivered"], 0),
        "order.delayed": ("delivered", "billing.wait", None, None, 0),
        "order.refused": ("failed", "billing.refuse", "rejected", None, 0),
        "order.booked": ("delivered", "ledger.book", None, None, 1),
        "order.stumbled": ("delivered", "ledger.stumble", None, None, 1),
    }
    assert [dict(row) for row in rows if tuple(row)[2:] != right[row["event_type"]]] == []
    assert {row["id"] for row in rows} == runs.keys()
    inbox = """SELECT handler_name, idempotency_key FROM core.event_handled ORDER BY 1, 2"""
    delivered = """SELECT handler_name, idempotency_key FROM core.outbox
                   WHERE status = 'delivered' AND handler_name <> '*' ORDER BY 1, 2"""
    assert await conn.fetch(inbox) == await conn.fetch(delivered)
    refused = {row["id"] for row in rows if row["event_type"] == "order.refused"}
    assert {fact.event_id for fact in facts.of(Failed)} == refused
