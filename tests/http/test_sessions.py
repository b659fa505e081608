"""SQLAlchemy sessions, which remember more than the database does: rows 8, 9 and 10 of the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import Depends, Response
from sqlalchemy import Text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast import NewEvent, Publisher
from holdfast.domain_events import RecordsEvents
from holdfast.integrations.sqlalchemy import DomainEvents
from tests.http.support import Client, opened, problem, records


class Base(DeclarativeBase):
    pass


class Seat(RecordsEvents, Base):
    __tablename__ = "seats"
    name: Mapped[str] = mapped_column(Text, primary_key=True)

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.record(NewEvent("seat.taken", {"seat": name}))


async def found(conn: asyncpg.Connection) -> tuple[list[str], int]:
    """The seats that are taken, and how many events say so."""
    seats = [row["name"] for row in await conn.fetch("SELECT name FROM seats ORDER BY name")]
    return seats, await conn.fetchval("SELECT count(*) FROM core.outbox")


@asynccontextmanager
async def seats(dsn: str, driver: str) -> AsyncIterator[Client]:
    """Endpoints that take a seat by an object."""
    async with opened(dsn, driver, pool=2) as (shop, http):
        DomainEvents(Publisher("shop")).attach(shop._connect)
        Tx = Annotated[Any, Depends(shop.idempotency.required)]

        async def called(function: Any, *arguments: Any) -> Any:
            result = function(*arguments)
            return await result if driver == "sqlalchemy" else result

        @shop.app.post("/seats/{name}")
        async def take(tx: Tx, name: str, status: int = 201, flush: bool = False) -> Response:
            tx.add(Seat(name))
            if flush:
                try:
                    await called(tx.flush)
                except IntegrityError:
                    return Response("taken", 409)
            return Response("done", status)

        @shop.app.post("/ends/{name}")
        async def end(tx: Tx, name: str, how: str, goes_on: bool = False, status: int = 201) -> Response:
            tx.add(Seat(name))
            await called(tx.flush)
            await called(getattr(tx, how))
            if goes_on:
                tx.add(Seat(f"{name}, again"))
                await called(tx.flush)
            return Response("done", status)

        yield http


over_sessions = pytest.mark.parametrize("driver", ["sqlalchemy", "sqlalchemy-sync"])


@over_sessions
async def test_an_object_that_was_never_flushed(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Rows 8, 9 and 10: refused, it is not written by our commit, and its domain events are not published."""
    async with seats(dsn, driver) as http:
        for flush in ("", "&flush=1"):
            for status in (402, 429, 500):
                path = f"/seats/{status}?status={status}{flush}"
                for _ in range(2):
                    answer = await http.order(f"{status}{flush}", path=path)
                    assert answer.status_code == status
                assert ("idempotent-replayed" in answer.headers) == (status == 402)
                assert await found(conn) == ([], 0)
        assert len(await records(conn)) == 2
        # And the connection is as good as new for the next one.
        for _ in range(2):
            assert (await http.order(path="/seats/1")).status_code == 201
    assert await found(conn) == (["1"], 1)


@over_sessions
async def test_a_flush_that_fails(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Row 8: the endpoint answers 409 and leaves the session as it is: the answer is kept, and nothing else."""
    async with seats(dsn, driver) as http:
        assert (await http.order("a", path="/seats/1?flush=1")).status_code == 201
        refused, again = [await http.order("b", path="/seats/1?flush=1") for _ in range(2)]
        assert (refused.status_code, again.status_code, again.content) == (409, 409, b"taken")
        assert again.headers["idempotent-replayed"] == "true"
        assert await found(conn) == (["1"], 1)
    assert [record["status"] for record in await records(conn)] == ["Completed", "Failed"]


@over_sessions
@pytest.mark.parametrize("goes_on", [0, 1], ids=["and-answers", "and-goes-on"])
async def test_an_endpoint_that_commits_its_session(
    dsn: str, conn: asyncpg.Connection, driver: str, goes_on: int
) -> None:
    """It is told so with 500, never a success; what it does after its commit is not committed, and it is never
    carried out again (IDM-1).
    """
    async with seats(dsn, driver) as http:
        path = f"/ends/1?how=commit&goes_on={goes_on}"
        assert (await http.order(path=path)).status_code == 500
        assert await found(conn) == (["1"], 1)
        problem(await http.order(path=path), 409, "response-not-replayable")
        for key in ("a", "b", "c"):  # the connections of the pool are whole
            assert (await http.order(key, path=f"/seats/{key}")).status_code == 201
    assert await found(conn) == (["1", "a", "b", "c"], 4)


@over_sessions
async def test_an_endpoint_that_rolls_its_session_back(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Rows 7 and 8: a success of which nothing is left is none; a refusal is one, and is kept."""
    async with seats(dsn, driver) as http:
        for goes_on in (0, 1):
            path = f"/ends/1?how=rollback&goes_on={goes_on}"
            assert (await http.order("a", path=path)).status_code == 500
            assert (await found(conn), await records(conn)) == (([], 0), [])
            path += "&status=409"
            refused, again = [await http.order(f"b-{goes_on}", path=path) for _ in range(2)]
            assert (refused.status_code, again.status_code) == (409, 409)
            assert again.headers["idempotent-replayed"] == "true"
            assert await found(conn) == ([], 0)
            await conn.execute("DELETE FROM core.idempotency_records")


@pytest.mark.parametrize("how", ["commit", "rollback"])
async def test_our_statements_never_land_on_a_strangers_connection(
    dsn: str, conn: asyncpg.Connection, how: str
) -> None:
    """Somebody else has got the connection when the endpoint that ended its session answers.
    What the other one has done, and has not committed, is neither committed nor undone by us (IDM-1).
    """
    async with opened(dsn, "sqlalchemy", pool=2) as (shop, http):
        strangers: list[Any] = []

        @shop.app.post("/ends")
        async def end(tx: Annotated[Any, Depends(shop.idempotency.required)]) -> Response:
            await getattr(tx, how)()
            stranger = shop._connect()
            strangers.append(stranger)
            stranger.add(Seat("a stranger's"))
            await stranger.flush()
            return Response("done", 201)

        assert (await http.order(path="/ends")).status_code == 500
        assert (await found(conn))[0] == []
        await strangers[0].commit()
        await strangers[0].close()
        assert (await found(conn))[0] == ["a stranger's"]
    [kept] = await records(conn) if how == "commit" else [None]
    assert kept is None or kept["status"] == "Started"
