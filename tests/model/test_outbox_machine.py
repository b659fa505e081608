"""Any order of calls by producers, workers and people leaves the tables that the model in rows.py foretells."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast import Publisher
from tests.model.choices import (
    CHANNELS,
    EVENT_ROUTES,
    HANDLERS,
    LONG,
    REASONS,
    ROUTES,
    TARGETS,
    TYPES,
    delays,
    events_that_are,
    generations,
    handlers,
    held_ones,
    keys,
    limits,
    marks,
    one,
    seldom,
    some,
    sources,
)
from tests.model.rows import About, Model, Row
from tests.model.snapshot import read, require_balance, require_equal, require_laws
from tests.outbox import NOBODY, START, InFlight, Lane, Outbox, connect
from tests.servers import SessionServer

pytestmark = [pytest.mark.slow, pytest.mark.both_postgres]

EXAMPLES = {18: 150, 15: 50}
STEPS = 25
ANN = "ann@example.org"
SWEEP = "SELECT swept FROM core.retention_sweep($1, 'operations', '-infinity', 5000)"

T = TypeVar("T")


class OutboxMachine(RuleBasedStateMachine):
    """`loop`, `outbox` and `inside` outlive the examples; everything else is as after the installation."""

    loop: asyncio.AbstractEventLoop
    outbox: Outbox
    inside: Outbox  # where a handler runs in a transaction
    examples = count(1)

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.leases: list[InFlight] = []  # live and stale
        self.before = self.run(self._clear())
        secret = self.run(self.outbox.connection.fetchval("SELECT secret FROM core.secrets"))
        self.model = Model(self.before.now, secret)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    async def _clear(self) -> Any:
        await self.outbox.clear()
        await self.outbox.connection.execute(
            "DELETE FROM effects; DELETE FROM core.rollup; DELETE FROM core.rollup_journal"
        )
        if next(self.examples) % 25 == 0:  # else dead rows would be most of what each step reads
            await self.outbox.connection.execute("VACUUM core.outbox, core.event_handled, effects")
        return await read(self.outbox.connection)

    def teardown(self) -> None:
        if self.inside.connection.is_in_transaction():
            self.run(self.inside.connection.execute("ROLLBACK"))

    @invariant()
    def the_tables_are_as_foretold(self) -> None:
        found = self.run(read(self.outbox.connection))
        require_laws(self.before, found)
        require_equal(self.model, found)
        self.run(require_balance(self.outbox))
        self.before = found
        # What the rules ask over and over.
        rows = self.model.rows.values()
        self.live = [each for each in self.leases if self.model.under(each)]
        tokens = {NOBODY, *(each.token for each in self.live)}
        self.forged = [
            each._replace(token=token) for each in self.live for token in sorted(tokens) if token != each.token
        ]
        self.dead = [row for row in rows if row.status == "failed" and not row.deleted]
        self.delayed = [row for row in rows if row.status == "pending" and row.place[0] > self.model.now]
        self.due = any(row.lease_over for row in rows) or len(self.delayed) < sum(
            row.status == "pending" for row in rows
        )

    def identity(self) -> UUID:
        """The same in every run of an example: ids decide which of two rows is claimed first."""
        return UUID(int=next(self.numbers) << 80)

    # --- producers ---

    @initialize(claimed=st.booleans())
    def begin(self, claimed: bool) -> None:
        """Some rules are left out in each example: the others need something to begin with."""
        for handler, kind in zip(HANDLERS, ("order.*", "order.placed", "order.placed"), strict=True):
            self.subscribe_or_retire(handler, kind, True)
        self.publish(TYPES[0], None, "k1", 0.0, 1, None)
        self.publish(TYPES[0], None, "k1", 0.0, 1, None)
        self.publish(TYPES[1], "billing", None, 0.0, 1, None)
        self.the_tables_are_as_foretold()
        if claimed:
            self.claim_all(HANDLERS[0])

    @rule(
        kind=st.sampled_from(TYPES),
        to=st.sampled_from(TARGETS),
        key=st.sampled_from((None, "k1", "k2")),
        delay=delays,
        priority=st.sampled_from((1, 0, 2)),
        expiry=st.sampled_from((None, -LONG, LONG)),
    )
    def publish(
        self, kind: str, to: str | None, key: str | None, delay: float, priority: int, expiry: float | None
    ) -> None:
        id = self.identity()
        row = Row(id, kind, "shop", to, key or str(id), None, priority, (expiry or 0) < 0, About(0))
        columns: dict[str, object] = {}
        if expiry:
            columns["expires_at"] = self.model.now + timedelta(seconds=expiry)
        if delay:
            columns["available_at"] = row.available_at = self.model.now + timedelta(seconds=delay)
        self.run(
            self.outbox.insert(id=id, event_type=kind, target=to, idempotency_key=key, priority=priority, **columns)
        )
        self.model.publish(row)

    @rule(
        verb=st.sampled_from(("publish", "publish", "cancel", "reschedule")),
        source=sources,
        key=keys,
        delay=delays,
        on_duplicate=st.sampled_from(("ignore", "reschedule")),
    )
    def use_key(self, verb: str, source: str, key: str, delay: float, on_duplicate: str) -> None:
        async def publish(id: UUID) -> UUID:
            connection, options = self.outbox.connection, {"delay": delay, "on_duplicate": on_duplicate}
            async with connection.transaction():
                event = await Publisher(source).publish(connection, TYPES[0], {}, event_id=id, key=key, **options)
            return event.event_id

        if verb == "publish":
            id = self.identity()
            row = Row(id, TYPES[0], source, None, str(id), key, 1, False, About(delay))
            assert self.run(publish(id)) == self.model.hold_key(row, on_duplicate == "reschedule")
        elif verb == "cancel":
            moved = self.run(self.outbox.call("outbox_cancel", source=source, key=key))
            assert moved[0][0] == self.model.cancel(source, key)
        else:
            values = {"source": source, "key": key, "available_at": None, "delay": str(delay)}
            moved = self.run(self.outbox.call("reschedule_key", **values))
            assert moved[0][0] == self.model.reschedule(source, key, delay)

    # --- interest ---

    @rule(handler=handlers, kind=st.sampled_from((*TYPES, "order.*")), wanted=st.booleans())
    def subscribe_or_retire(self, handler: str, kind: str, wanted: bool) -> None:
        if wanted:
            self.run(self.outbox.subscribe(handler, kind))
            self.model.subscribe(handler, [kind])
        else:
            everything = None if kind == "order.*" else kind
            ended = self.run(self.outbox.value("SELECT core.retire($1, $2)", handler, everything))
            assert ended == self.model.retire(handler, everything)

    @precondition(lambda self: self.due)
    @rule(
        routes=st.just(EVENT_ROUTES) | st.lists(st.sampled_from(EVENT_ROUTES), min_size=1, unique=True),
        limit=limits,
        mark=marks,
        generation=generations,
        outdated=seldom,
    )
    def split(self, routes: Sequence[str], limit: int, mark: UUID | None, generation: int, outdated: bool) -> None:
        lanes = self.lanes(routes, (0, 1, 2), limit, mark)
        where = {"channel": CHANNELS[generation], "generation": generation}
        finds = self.run(
            self.outbox.find_and_split(*lanes, version=self.model.subscriptions_version - outdated, **where)
        )
        if outdated:
            assert [tuple(find) for find in finds] == [(None,) * 5]
        else:
            assert {(find["route"], find["priority"]): tuple(find)[2:] for find in finds} == self.model.split(
                lanes, **where
            )

    # --- workers ---

    def lanes(
        self,
        routes: Sequence[str],
        priorities: Sequence[int],
        limit: int,
        mark: UUID | None,
        handler: str = HANDLERS[0],
    ) -> list[Lane]:
        """`handler` serves the routes that are not a handler's own."""
        place = self.model.rows[mark].place if mark else START
        return [
            Lane(route, priority, handler if "/" in route else route, limit, place)
            for route in routes
            for priority in priorities
        ]

    @precondition(lambda self: self.due)
    @rule(
        routes=st.just(ROUTES) | st.lists(st.sampled_from(ROUTES), min_size=1, unique=True),
        priorities=st.just((0, 1, 2)) | st.lists(st.integers(0, 2), min_size=1, unique=True),
        limit=limits,
        mark=marks,
        handler=handlers,
        generation=generations,
        outdated=seldom,
    )
    def claim(
        self,
        routes: Sequence[str],
        priorities: Sequence[int],
        limit: int,
        mark: UUID | None,
        handler: str,
        generation: int,
        outdated: bool,
    ) -> None:
        lanes = self.lanes(routes, priorities, limit, mark, handler)
        fence = {"token": self.identity(), "worker": self.identity()}
        where = {"channel": CHANNELS[generation], "generation": generation}
        version = self.model.subscriptions_version - outdated
        found = self.run(self.outbox.claim(*lanes, lease=LONG, version=version, **fence, **where))
        if outdated:
            assert [row["id"] for row in found] == [None]
            return
        told = {
            row["id"]: {**row, "failing": row["failing_for"] is not None, "expired": bool(row["expired"])}
            for row in found
        }
        foretold = self.model.claim(lanes, **fence, **where)
        assert told.keys() == foretold.keys()
        for id, row in foretold.items():
            assert row == {name: told[id][name] for name in row}
            route = row["route"]
            self.leases.append(InFlight(id, fence["token"], handler if "/" in route else route, route))

    @precondition(lambda self: self.due)
    @rule(handler=handlers)
    def claim_all(self, handler: str) -> None:
        self.claim(ROUTES, (0, 1, 2), 20, None, handler, 0, False)

    def patient(self, held: Sequence[InFlight]) -> list[InFlight]:
        """Without what would wait for the handler that runs in a transaction."""
        return [each for each in held if not self.model.waits(each)]

    @precondition(lambda self: self.live)
    @rule(held=held_ones)
    def extend(self, held: list[InFlight]) -> None:
        lost = self.run(self.outbox.extend(*held, lease=LONG))
        assert sorted(lost) == sorted(self.model.extend(held))

    @precondition(lambda self: self.live)
    @rule(held=held_ones)
    def deliver(self, held: list[InFlight]) -> None:
        held = self.patient(held)
        lost = self.run(self.outbox.deliver(*held))
        assert set(lost) == set(self.model.deliver(held, record=True))

    @precondition(lambda self: any(map(self.model.handled, self.leases)))
    @rule(held=some(lambda machine: [], lambda machine: [*filter(machine.model.handled, machine.leases)]))
    def deliver_duplicates(self, held: list[InFlight]) -> None:
        """What a worker does with events whose keys the claim found in the inbox."""
        held = self.patient(held)
        lost = self.run(self.outbox.deliver(*held, record=False))
        assert set(lost) == set(self.model.deliver(held, record=False))

    @precondition(lambda self: self.live)
    @rule(held=held_ones, delay=delays)
    def retry(self, held: list[InFlight], delay: float) -> None:
        held = self.patient(held)
        lost = self.run(self.outbox.retry(*held, delay=delay))
        assert set(lost) == set(self.model.retry(held, delay, "boom"))

    @precondition(lambda self: self.live)
    @rule(
        held=held_ones,
        reasons=st.lists(st.sampled_from(REASONS), min_size=4, max_size=4),
        error=st.sampled_from((None, "boom")),
    )
    def fail(self, held: list[InFlight], reasons: list[str], error: str | None) -> None:
        # The same lease fails once: what a second reason in the same call does is not laid down.
        held = list(dict.fromkeys(self.patient(held)))
        reasons = reasons[: len(held)]
        lost = self.run(self._fail(self.outbox, held, reasons, error))
        assert set(lost) == set(self.model.fail(held, reasons, error, "E:1"))

    async def _fail(
        self, outbox: Outbox, held: Sequence[InFlight], reasons: Sequence[str], error: str | None
    ) -> list[UUID]:
        rows = await outbox.call(
            "outbox_fail",
            ids=[each.id for each in held],
            tokens=[each.token for each in held],
            handlers=[each.handler for each in held],
            reasons=reasons,
            errors=[error] * len(held),
            signatures=["E:1"] * len(held),
        )
        return [row[0] for row in rows]

    @precondition(lambda self: self.live)
    @rule(held=held_ones, delay=delays)
    def release(self, held: list[InFlight], delay: float) -> None:
        """A give-back, or a snooze."""
        held = self.patient(held)
        lost = self.run(self.outbox.release(*held, delay=delay))
        assert set(lost) == set(self.model.release(held, delay))

    # --- a handler in a transaction ---

    @precondition(lambda self: self.live and self.model.running is None)
    @rule(held=one(lambda machine: machine.live, lambda machine: machine.leases))
    def enter(self, held: InFlight) -> None:
        async def call() -> str:
            await self.inside.connection.execute("BEGIN")
            entered = await self.inside.enter(held)
            if entered == "lost":
                await self.inside.connection.execute("ROLLBACK")
            elif entered == "run":
                await self.inside.connection.execute("SAVEPOINT handler")
                key = self.model.rows[held.id].idempotency_key
                await self.inside.connection.execute("INSERT INTO effects VALUES ($1, $2)", held.handler, key)
            return entered

        assert self.run(call()) == self.model.enter(held)

    @precondition(lambda self: self.model.running)
    @rule(
        how=st.sampled_from(("commit", "vanish", "retry", "fail", "release")),
        reason=st.sampled_from(REASONS),
        delay=delays,
    )
    def leave(self, how: str, reason: str, delay: float) -> None:
        """When the handler fails, what it wrote is taken back, and the rest settled before anybody can have the row."""

        async def call() -> list[UUID]:
            lost = []
            if how in ("retry", "fail", "release"):
                await self.inside.connection.execute("ROLLBACK TO handler")
                assert await self.inside.reopen(held)
            if how == "retry":
                lost = await self.inside.retry(held, delay=delay)
            elif how == "fail":
                lost = await self._fail(self.inside, [held], [reason], "boom")
            elif how == "release":
                lost = await self.inside.release(held, delay=delay)
            await self.inside.connection.execute("ROLLBACK" if how == "vanish" else "COMMIT")
            return lost

        assert self.model.running is not None
        held = self.model.running.held
        if not self.model.running.first:  # the handler of a duplicate does not run
            how = "commit"
        assert self.run(call()) == []
        self.model.leave(commit=how == "commit")
        if how == "retry":
            self.model.retry([held], delay, "boom")
        elif how == "fail":
            self.model.fail([held], [reason], "boom", "E:1")
        elif how == "release":
            self.model.release([held], delay)

    # --- people, and time ---

    @precondition(lambda self: self.dead)
    @rule(event=events_that_are("failed"), generation=generations)
    def replay(self, event: UUID, generation: int) -> None:
        moved = self.run(self.outbox.replay(event, generation, ANN))
        assert moved == self.model.replay(event, generation, ANN)

    @precondition(lambda self: self.model.running)
    @rule(event=one(lambda machine: [machine.model.running.held.id], lambda machine: list(machine.model.rows)))
    def cancel_event(self, event: UUID) -> None:
        """Mostly what a handler holds in its transaction; elsewhere it is a cancellation like any other."""
        assert self.run(self.outbox.cancel_event(event, ANN)) == self.model.cancel_event(event, ANN)

    @precondition(lambda self: self.live)
    @rule(events=st.lists(events_that_are("in_flight"), min_size=1, max_size=3))
    def leases_end(self, events: list[UUID]) -> None:
        rows = [row for id in events if not self.model.locked(row := self.model.rows[id])]
        self.run(self.outbox.expire_lease(*(row.id for row in rows)))
        for row in rows:
            if row.status == "in_flight":
                row.write(lease_over=True)

    @precondition(lambda self: self.model.delivered(deleted=False))
    @rule(now=seldom)
    def retention(self, now: bool) -> None:
        """The time to live of what was delivered is over."""
        if now:  # each time would leave hardly a delivered row for the other rules to meet
            assert self.run(self.outbox.value(SWEEP, "delivered")) == self.model.tombstone()

    @precondition(lambda self: self.model.delivered(deleted=True))
    @rule()
    def grace_ends(self) -> None:
        aged = "UPDATE core.outbox SET deleted_at = now() - interval '2 days' WHERE status = 'delivered'"
        self.run(self.outbox.connection.execute(aged + " AND deleted_at IS NOT NULL"))
        assert self.run(self.outbox.value(SWEEP, "tombstones")) == self.model.dispose()

    @precondition(lambda self: self.delayed)
    @rule()
    def delays_end(self) -> None:
        update = """UPDATE core.outbox SET available_at = now() - interval '1 second'
                    WHERE status = 'pending' AND available_at > now()"""
        self.run(self.outbox.connection.execute(update))
        for row in self.delayed:
            row.write(available_at=About(-1))


@pytest.fixture
def machine(dsn: str) -> Iterator[type[OutboxMachine]]:
    """The machine, on two connections to a database of its own."""

    async def prepare() -> tuple[Outbox, Outbox]:
        # One thread plays everybody: a call that waits for the handler's transaction would wait for ever.
        options = {"server_settings": {"lock_timeout": "3s"}}
        outbox, inside = await connect(dsn, **options), await connect(dsn, **options)
        await outbox.execute("CREATE TABLE effects (handler text, key text)")
        policy = "SET active_ttl_days = 0, tombstoned_grace_days = 1 WHERE entity = 'outbox_row'"
        await outbox.execute(f"UPDATE core.retention_policies {policy}")
        return Outbox(outbox), Outbox(inside)

    loop = asyncio.new_event_loop()
    outbox, inside = loop.run_until_complete(prepare())
    yield type("OutboxMachine", (OutboxMachine,), {"loop": loop, "outbox": outbox, "inside": inside})
    loop.run_until_complete(outbox.clear())
    for each in (outbox, inside):
        loop.run_until_complete(each.connection.close())
    loop.close()


@pytest.mark.search
@pytest.mark.timeout(1800)
def test_any_order_of_calls(postgres_server: SessionServer, machine: type[OutboxMachine]) -> None:
    """The tables are as the model says (P1, P2, P8, LSN-3, LSN-6, LSN-7, LSN-11, PUB-2, DLQ-3, OBX-5, E8, E9)."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[postgres_server.major],
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=False,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
