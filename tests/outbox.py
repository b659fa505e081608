"""The outbox as SQL callers see it: short names for the calls that tests make over and over."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from holdfast.postgres.queries import Queries

EVENT = "order.placed"
LANE = f"*/{EVENT}"
HANDLER = "billing.charge_card"
CHANNEL = "outbox_default"
START = (datetime(1, 1, 2, tzinfo=UTC), UUID(int=0))
NOBODY = UUID(int=0xDEAD)


async def connect(dsn: str, **options: Any) -> asyncpg.Connection:
    """A connection that reads and writes jsonb as Python values."""
    connection = await asyncpg.connect(dsn, **options)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    return connection


class InFlight(NamedTuple):
    """A row under a lease, as its worker remembers it."""

    id: UUID
    token: UUID
    handler: str = HANDLER
    route: str = LANE


class Lane(NamedTuple):
    route: str = LANE
    priority: int = 1
    handler: str = HANDLER
    limit: int = 10
    mark: tuple[datetime, UUID] = START


class Outbox:
    """One connection and the statements that workers, producers and operators send over it."""

    def __init__(self, connection: asyncpg.Connection, schema: str = "core") -> None:
        self.connection = connection
        self.queries = Queries(schema)
        self.schema = schema

    async def call(self, name: str, /, **values: object) -> list[asyncpg.Record]:
        """A named statement of the package."""
        statement = self.queries.asyncpg(name)
        return await self.connection.fetch(statement.sql, *statement.bind(values))

    async def value(self, sql: str, *values: object) -> Any:
        return await self.connection.fetchval(sql, *values)

    # --- rows ---

    async def insert(self, **columns: object) -> UUID:
        """What a writer in another language does."""
        columns = {"event_type": EVENT, "source": "shop", "payload": {}} | columns
        names = ", ".join(columns)
        places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
        return await self.value(
            f'INSERT INTO "{self.schema}".outbox ({names}) VALUES ({places}) RETURNING id', *columns.values()
        )

    async def insert_many(self, count: int, event_type: str = EVENT, **columns: str) -> list[UUID]:
        """`columns` are SQL expressions that may use n, the number of the row."""
        source = columns.pop("source", "'shop'")
        names = "".join(f", {name}" for name in columns)
        values = "".join(f", {value}" for value in columns.values())
        rows = await self.connection.fetch(
            f"""INSERT INTO "{self.schema}".outbox (event_type, source, payload{names})
                SELECT $1, {source}, '{{}}'{values} FROM generate_series(1, {count}) n RETURNING id""",
            event_type,
        )
        return [row["id"] for row in rows]

    async def row(self, id: UUID) -> asyncpg.Record:
        row = await self.connection.fetchrow(f'SELECT * FROM "{self.schema}".outbox WHERE id = $1', id)
        assert row is not None, f"no row {id}"
        return row

    async def states(self, *ids: UUID) -> list[str]:
        return [(await self.row(id))["status"] for id in ids]

    async def expire_lease(self, *ids: UUID) -> None:
        """As if the worker had died a while ago."""
        await self.connection.execute(
            f"""UPDATE "{self.schema}".outbox SET lease_expires_at = now() - interval '1 second'
                WHERE id = ANY ($1) AND status = 'in_flight'""",
            ids,
        )

    async def somebody_waits(self) -> None:
        """Return when a session of this database waits for a lock."""
        waiting = """SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                                    WHERE NOT l.granted AND a.datname = current_database())"""
        async with asyncio.timeout(10):
            while not await self.value(waiting):  # noqa: ASYNC110 - a server sets no events
                await asyncio.sleep(0.01)

    # --- the worker's calls ---

    async def subscriptions_version(self) -> int:
        return int(await self.value(f'SELECT version FROM "{self.schema}".subscriptions_version'))

    async def subscribe(self, handler: str, *event_types: str, context: str | None = None) -> None:
        context = context or handler.partition(".")[0]
        await self.call("subscribe", domain_context=context, handler=handler, event_types=list(event_types))

    async def claim(
        self,
        *lanes: Lane,
        lease: float = 60,
        worker: UUID | None = None,
        version: int | None = None,
        channel: str = CHANNEL,
        generation: int = 0,
        token: UUID | None = None,
        ended_before: datetime | None = None,
        keyed: bool = False,
    ) -> list[asyncpg.Record]:
        lanes = lanes or (Lane(),)
        return await self.call(
            "outbox_claim",
            worker=worker or uuid.uuid4(),
            token=token or uuid.uuid4(),
            lease=timedelta(seconds=lease),
            subscriptions_version=await self.subscriptions_version() if version is None else version,
            channel=channel,
            generation=generation,
            routes=[lane.route for lane in lanes],
            priorities=[lane.priority for lane in lanes],
            handlers=[lane.handler for lane in lanes],
            limits=[lane.limit for lane in lanes],
            marks_at=[lane.mark[0] for lane in lanes],
            marks_id=[lane.mark[1] for lane in lanes],
            ended_before=ended_before,
            keyed=keyed,
        )

    async def hold(self, *lanes: Lane, **options: Any) -> list[InFlight]:
        """Claim, and remember what a settle needs, in the order of the ids."""
        handlers = {lane.route: lane.handler for lane in lanes or (Lane(),)}
        token = uuid.uuid4()
        rows = await self.claim(*lanes, token=token, **options)
        return sorted(InFlight(row["id"], token, handlers[row["route"]], row["route"]) for row in rows)

    async def held(self, **columns: object) -> InFlight:
        """A fresh row under a fresh lease."""
        id = await self.insert(**columns)
        channel = await self.value(f'SELECT channel FROM "{self.schema}".outbox WHERE id = $1', id)
        [held] = [each for each in await self.hold(channel=channel) if each.id == id]
        return held

    async def failed(self, error: str | None = "boom", **columns: object) -> UUID:
        """A fresh row that has failed."""
        held = await self.held(**columns)
        assert await self.fail(held, error=error) == []
        return held.id

    async def extend(self, *held: InFlight, lease: float = 60) -> list[UUID]:
        return _ids(await self.call("outbox_extend", **_fence(held), lease=timedelta(seconds=lease)))

    async def deliver(self, *held: InFlight, record: bool = True) -> list[UUID]:
        """A call for each handler, as a worker makes them. Lost is what none of them has settled."""
        settled: set[UUID] = set()
        for handler in dict.fromkeys(each.handler for each in held):
            some = [each for each in held if each.handler == handler]
            routes = list(dict.fromkeys(each.route for each in some))
            lost = await self.call(
                "outbox_deliver",
                **_fence(some),
                routes=routes,
                handlers=[handler] * len(routes),
                record=record,
                outcome="delivered" if record else "duplicate",
            )
            settled |= {each.id for each in some} - set(_ids(lost))
        return list(dict.fromkeys(each.id for each in held if each.id not in settled))

    async def retry(self, *held: InFlight, delay: float = 0, error: str = "boom") -> list[UUID]:
        n = len(held)
        delays = [timedelta(seconds=delay)] * n
        return _ids(
            await self.call("outbox_retry", **_fence(held), handlers=_handlers(held), delays=delays, errors=[error] * n)
        )

    async def fail(
        self, *held: InFlight, reason: str = "retry_terminal", error: str | None = "boom", signature: str | None = "E:1"
    ) -> list[UUID]:
        n = len(held)
        rows = await self.call(
            "outbox_fail",
            **_fence(held),
            handlers=_handlers(held),
            reasons=[reason] * n,
            errors=[error] * n,
            signatures=[signature] * n,
        )
        return _ids(rows)

    async def release(self, *held: InFlight, delay: float = 0) -> list[UUID]:
        delays = [timedelta(seconds=delay)] * len(held)
        return _ids(await self.call("outbox_release", **_fence(held), delays=delays, handlers=_handlers(held)))

    async def enter(self, held: InFlight, idle: float = 60) -> str:
        """How the transaction of a handler begins: `run`, `duplicate` or `lost`."""
        values = {"id": held.id, "token": held.token, "handler": held.handler, "idle": timedelta(seconds=idle)}
        return str((await self.call("outbox_enter", **values))[0][0])

    async def reopen(self, held: InFlight) -> bool:
        """What follows the rollback of a handler that failed."""
        rows = await self.call("outbox_reopen", id=held.id, token=held.token, handler=held.handler, route=held.route)
        return bool(rows[0][0])

    async def retry_entered(self, held: InFlight, delay: float = 0, error: str = "boom") -> None:
        """Both in one: what follows the rollback, and the retry."""
        values = {"id": held.id, "handler": held.handler, "delay": timedelta(seconds=delay), "error": error}
        await self.call("outbox_retry_entered", **values)

    async def find_and_split(
        self, *lanes: Lane, version: int | None = None, channel: str = CHANNEL, generation: int = 0
    ) -> list[asyncpg.Record]:
        return await self.call(
            "outbox_split",
            subscriptions_version=await self.subscriptions_version() if version is None else version,
            channel=channel,
            generation=generation,
            routes=[lane.route for lane in lanes],
            priorities=[lane.priority for lane in lanes],
            limits=[lane.limit for lane in lanes],
            marks_at=[lane.mark[0] for lane in lanes],
            marks_id=[lane.mark[1] for lane in lanes],
            ended_before=None,
        )

    async def split(self, *routes: str, limit: int = 500, **options: Any) -> int:
        """All priorities of some routes. How many events were found there; -1 when the subscriptions have changed."""
        lanes = [Lane(route, priority, limit=limit) for route in routes for priority in range(3)]
        rows = await self.find_and_split(*lanes, **options)
        return sum(-1 if row["route"] is None else row["n"] for row in rows)

    # --- the operator's calls ---

    async def replay(self, id: UUID, generation: int | None = 0, by: str | None = "ann@example.org") -> int:
        return int(await self.value(f'SELECT "{self.schema}".outbox_replay($1, $2, $3)', id, generation, by))

    async def cancel_event(self, id: UUID, by: str | None = "ann@example.org") -> int:
        return int(await self.value(f'SELECT "{self.schema}".outbox_cancel_event($1, $2)', id, by))

    async def clear(self) -> None:
        """As after the installation."""
        tables = (
            "outbox", "event_handled", "subscriptions", "outbox_keys", "sources", "deployments", "workers",
            "cancel_requests", "schedules", "handler_flow", "handler_slots", "ordering_heads",
        )  # fmt: skip
        await self.connection.execute(
            "; ".join(f'DELETE FROM "{self.schema}".{table}' for table in tables)
            + f'; UPDATE "{self.schema}".subscriptions_version SET version = 1'
        )


def _fence(held: Sequence[InFlight]) -> dict[str, object]:
    return {"ids": [each.id for each in held], "tokens": [each.token for each in held]}


def _handlers(held: Sequence[InFlight]) -> list[str]:
    return [each.handler for each in held]


def _ids(rows: Sequence[asyncpg.Record]) -> list[UUID]:
    return [row[0] for row in rows]
