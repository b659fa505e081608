"""One examination: where it looks, and what several checks share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import asyncpg

from holdfast.postgres.doctor.description import Live, describe
from holdfast.postgres.doctor.expected import Expected
from holdfast.postgres.doctor.findings import CannotLook, Limits
from holdfast.postgres.operations import status
from holdfast.postgres.operations.status import Status
from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.contract import Contract, apply_command
from holdfast.postgres.schema.ownership import OWNER


@dataclass(frozen=True, slots=True)
class Place:
    """The server, the login that looks, and whose the schema is. Names are quoted where they need it."""

    server: str
    major: int
    login: str
    owner: str | None  # of the schema; None: there is no such schema
    outbox_owner: str | None
    owner_is_superuser: bool
    has_ledger: bool
    has_contract: bool
    sees_sessions: bool


class Examination:
    """Reads are made one by one, each in a read-only transaction, so that one that fails spoils no other."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        schema: str,
        limits: Limits,
        *,
        pooled: bool,
        clock: Callable[[], float],
    ) -> None:
        self.connection = connection
        self.queries = Queries(schema)
        self.schema = schema
        self.limits = limits
        self.pooled = pooled
        self.clock = clock
        self._shared: dict[str, asyncio.Future[Any]] = {}

    async def rows(self, name: str, **values: object) -> list[asyncpg.Record]:
        """What a statement of `sql/doctor.sql` answers."""
        statement = self.queries.asyncpg(name)
        async with self.connection.transaction(isolation="read_committed", readonly=True):
            await self.connection.fetch(self.queries.asyncpg("begin_examination").sql)
            found: list[asyncpg.Record] = await self.connection.fetch(statement.sql, *statement.bind(values))
        return found

    # --- read once, for all who ask; what failed once has failed for all ---

    async def place(self) -> Place:
        async def find() -> Place:
            (row,) = await self.rows("examine_place")
            return Place(**{field.name: row[field.name] for field in fields(Place)})

        found: Place = await self._once("place", find)
        return found

    async def live(self) -> Live:
        found: Live = await self._once("live", lambda: describe(self.connection, self.queries))
        return found

    async def status(self) -> Status:
        await self.require_installed()
        found: Status = await self._once("status", self._status)
        return found

    async def _status(self) -> Status:
        # Within a transaction of ours, so that it waits for no lock either.
        async with self.connection.transaction(isolation="repeatable_read", readonly=True):
            await self.connection.fetch(self.queries.asyncpg("begin_examination").sql)
            return await status.read(self.connection, self.schema)

    async def ledger(self) -> dict[int, str]:
        """The checksum of each applied migration; number 0 is that of the functions."""
        found: dict[int, str] = await self._once("ledger", self._ledger)
        return found

    async def _ledger(self) -> dict[int, str]:
        return {row["version"]: row["checksum"] for row in await self.rows("read_ledger")}

    async def contract(self) -> Contract | None:
        """The contract of the schema; None: it records none."""
        found: Contract | None = await self._once("contract", self._contract)
        return found

    async def _contract(self) -> Contract | None:
        recorded = (await self.place()).has_contract
        rows = await self.rows("read_contract") if recorded else []
        return Contract(**dict(rows[0])) if rows else None

    @cached_property
    def expected(self) -> Expected:
        return Expected(self.schema)

    async def _once(self, name: str, find: Callable[[], Awaitable[Any]]) -> Any:
        if name not in self._shared:
            self._shared[name] = asyncio.ensure_future(find())
        return await self._shared[name]

    # --- what has to be there before something can be looked at ---

    async def require_installed(self) -> Place:
        place = await self.place()
        if place.owner is None or (place.outbox_owner is None and not place.has_ledger):
            # The address may be a wrong one: nobody should install Holdfast there by following this.
            remedy = (
                f"check that this is the right database and --schema; to install Holdfast here: {self.apply_command}"
            )
            raise CannotLook(f"there is no Holdfast in the schema {self.schema}", remedy)
        return place

    async def require_sessions(self) -> None:
        place = await self.place()
        if not place.sees_sessions:
            remedy = f"-- as an administrator:\nGRANT pg_monitor TO {place.login};"
            # Many servers let nobody see them, and the rest of the report stands without.
            raise CannotLook(f"{place.login} sees only sessions of its own", remedy, "warning")

    async def owner(self) -> str:
        """Whose everything should be. Of the schema and the outbox one may have been given away, hardly both."""
        place = await self.require_installed()
        return OWNER if OWNER in (place.owner, place.outbox_owner) else str(place.owner)

    @property
    def apply_command(self) -> str:
        return apply_command(self.schema)

    def in_schema(self, name: str) -> str:
        """For SQL."""
        return f"core.{name}" if self.schema == "core" else f'"{self.schema}".{name}'
