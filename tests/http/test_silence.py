"""A server that does not answer any more, and tells nobody: row 17 of the contract, and what `commit_within` is for.

The line falls silent at each message that is not the endpoint's own. The pool has one connection, so that the next
request shows whether it was given back.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import httpx
import pytest
from fastapi import Depends, Response

from chaos.wire import Cut, Watch, Wire, wired
from tests.http.shop import Order, Shop
from tests.http.support import Client, effects, problem, records, served
from tests.worker.support import until

WITHIN = 0.3  # seconds for an answer of the database
NAME = "silenced"
over_drivers = pytest.mark.parametrize(
    "driver", ["asyncpg", "psycopg", "psycopg-sync", "sqlalchemy", "sqlalchemy-sync"]
)


class Silence:
    """A shop behind a line that falls silent before the endpoint is entered, or after it has done its work."""

    def __init__(self, dsn: str, through: str, wire: Wire, driver: str) -> None:
        self._wire = wire
        # What does not wait for the database any more must not wait for another request either.
        settings: dict[str, Any] = {"commit_within": WITHIN, "wait": 0.1, "connect_within": 1}
        self.shop = Shop(through, driver, None, NAME, 1, outside=dsn, **settings)
        self._cut: dict[str, Cut | None] = {}
        self.watches: dict[str, Watch] = {}
        shop = self.shop

        @shop.app.post("/silent")
        async def place(order: Order, tx: Annotated[Any, Depends(shop.idempotency.required)]) -> Response:
            self._wire.watch(NAME)
            await shop.place(tx, order.model_copy(update={"status": 201}))
            self._watch("after")
            return Response("done", order.status)

    def _watch(self, phase: str) -> None:
        self.watches[phase] = self._wire.watch(NAME, self._cut.pop(phase, None))

    async def order(self, http: Client, status: int, phase: str = "", cut: Cut | None = None) -> httpx.Response:
        self._cut = {phase: cut}
        self.watches = {}
        self._watch("before")
        began = time.monotonic()
        answer = await http.order(order={"status": status}, path="/silent")
        assert time.monotonic() - began < WITHIN + 1, f"{cut} {phase} the endpoint, which answers {status}"
        self._wire.watch(NAME)
        return answer


@asynccontextmanager
async def silencing(dsn: str, driver: str) -> AsyncIterator[tuple[Silence, Wire, Client]]:
    async with wired(dsn) as (wire, through):
        silence = Silence(dsn, through, wire, driver)
        async with served(silence.shop.app) as http:
            yield silence, wire, http
            wire.heal()


def ends(watch: Watch) -> list[Cut]:
    """Before each statement is heard, and before its answer is: the parts of one travel together."""
    return [
        Cut(direction, number, how="half_open")
        for direction, letters in watch.seen.items()
        for number, letter in enumerate(letters, start=1)
        if letter in ("Q", "S", "Z")
    ]


async def empty(conn: asyncpg.Connection) -> None:
    await conn.execute("DELETE FROM effects; DELETE FROM core.outbox; DELETE FROM core.idempotency_records")


@pytest.mark.slow
@over_drivers
@pytest.mark.timeout(60)
async def test_a_server_that_falls_silent(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Rows 17, 20 and 21: 503 within the deadline, the connection's place is free again, and the retry executes or
    replays: while nobody knows it is told to wait, and never carried out a second time.
    """
    async with silencing(dsn, driver) as (silence, wire, http):
        assert (await silence.order(http, 201)).status_code == 201  # the connection is there, its statements prepared
        cuts = 0
        for status, phase in ((201, "before"), (201, "after"), (402, "after"), (500, "after")):
            await empty(conn)
            assert (await silence.order(http, status)).status_code == status
            for cut in ends(silence.watches[phase]):
                where = f"{cut} {phase} the endpoint, which answers {status}"
                await empty(conn)
                answer = await silence.order(http, status, phase, cut)
                if not silence.watches[phase].made.is_set():
                    continue  # what a driver prepares once
                cuts += 1
                kept = len(await records(conn))
                if status == 500:
                    assert answer.status_code in (500, 503), where
                elif answer.status_code != status:
                    problem(answer, 503, "idempotency-unavailable")
                else:
                    assert kept == 1, f"answered without a commit: {where}"
                answers: list[httpx.Response] = []

                async def again(*wanted: int, answers: list[httpx.Response] = answers, status: int = status) -> bool:
                    answers.append(await silence.order(http, status))
                    return answers[-1].status_code in wanted

                # The backend may still hold the key, or have given it up: nobody can know. But there is a connection.
                await until(lambda again=again, status=status: again(status, 409), what=f"a connection after {where}")
                wire.heal()
                await until(lambda again=again, status=status: again(status), what=f"the retry of {where}")
                assert {each.status_code for each in answers} <= {status, 409, 503}, where
                replayed = "idempotent-replayed" in answers[-1].headers
                assert replayed or not kept, f"carried out twice: {where}"
                assert await effects(conn) == (["tea"] if status == 201 else []), where
                assert len(await records(conn)) == (status != 500), where
        assert cuts >= 14, "there are fewer messages than the request has statements"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg-sync", "sqlalchemy", "sqlalchemy-core"])
async def test_a_server_that_is_silent_from_the_start(dsn: str, conn: asyncpg.Connection, driver: str) -> None:
    """Row 17: it accepts the connection and says nothing. 503, and not carried out; then it is there again."""
    async with silencing(dsn, driver) as (_, wire, http):
        wire.watch(NAME, Cut("to_server", 1, how="half_open"))
        began = time.monotonic()
        problem(await http.order(), 503, "idempotency-unavailable")
        assert time.monotonic() - began < 3
        assert await effects(conn) == []
        wire.heal()
        answers: list[int] = []

        async def again() -> bool:
            answers.append((await http.order()).status_code)
            return answers[-1] == 201

        await until(again, what="a connection")
        assert {*answers} <= {201, 503}
    assert await effects(conn) == ["tea"]
