"""The contract in Django, over its own threaded server: the same rows, and views in place of endpoints.

The servers are shared: two processes for each isolation level, and one with settings that change the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import FileResponse, StreamingHttpResponse

from chaos.wire import Cut, Watch, wired
from holdfast.errors import ConfigurationError
from holdfast.idempotency import Commands, job_key
from holdfast.integrations.django import idempotent
from tests.http.djangoshop import LONG
from tests.http.shop import ISOLATION, SECRET
from tests.http.support import Client, Zygote, client, effects, expire, opened, problem, records, reserved_port, runs
from tests.http.test_crashes import port_of, settled
from tests.http.test_crashes import request as raw_request
from tests.worker.support import until

at_every_level = pytest.mark.parametrize("isolation", ISOLATION, ids=lambda value: value.replace(" ", "-"))
# Two requests that change the same row: the second one fails, and is not the view's fault.
above_read_committed = pytest.mark.parametrize("isolation", ISOLATION[1:], ids=lambda value: value.replace(" ", "-"))

Open = Callable[..., Client]


@pytest.fixture
async def shop(ports: Callable[..., int], dsn: str) -> AsyncIterator[Open]:
    """Clients of shared servers."""
    clients: list[Client] = []

    def opened(isolation: str = ISOLATION[0], interface: str = "wsgi", count: int = 2, **options: Any) -> Client:
        options = {"REQUEST_LIMIT": 1000, "RESPONSE_LIMIT": 2000} | options
        clients.append(client(ports(count, "django", [interface, isolation, options])))
        return clients[-1]

    yield opened
    for http in clients:
        await http.aclose()


def changed(shop: Open) -> Client:
    """With settings that change the contract."""
    return shop(count=1, STORE_5XX=True, ROUTE_IN_SCOPE=True, WAIT=0.1)


@asynccontextmanager
async def django(zygote: Zygote, dsn: str, **options: Any) -> AsyncIterator[tuple[Client, int]]:
    """A server of the test's own."""
    with reserved_port() as port:
        wanted = {"app": "django", "port": port, "dsn": dsn, "options": ["wsgi", ISOLATION[0], options]}
        async with zygote.serving(**wanted) as [pid], client(port) as http:
            yield http, pid


# --- which requests take part ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_keys_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Rows 1 to 5, 13 and 14, H2 to H4, H9: which requests take part, and whose keys they are."""
    http = shop()
    assert (await http.get("/gifts", headers={"Authorization": "Bearer alice", "Idempotency-Key": "k"})).is_success
    assert (await http.order(path="/plain")).json() == {"plain": "yes"}
    problem(await http.order(None), 400, "idempotency-key-missing")
    problem(await http.order(""), 400, "idempotency-key-missing")
    for key in ("x" * 256, "two words", '"unended', "one,two"):
        problem(await http.order(key), 400, "idempotency-key-invalid")
    fields = [("Authorization", "Bearer alice"), ("Idempotency-Key", "a"), ("Idempotency-Key", "a")]
    problem(await http.post("/orders", json={"sku": "tea"}, headers=fields), 400, "idempotency-key-invalid")
    for who, status in ((None, 401), ("mallory", 403)):
        assert (await http.order(who=who)).status_code == status
    problem(await http.order(who="x" * 1021), 400, "idempotency-scope-invalid")
    problem(await http.order(order={"filling": "x" * 1000}), 413, "request-too-large")
    assert (await runs(conn), await records(conn)) == ([], [])

    first, again, quoted = await http.order("k"), await http.order("k"), await http.order('"k"')
    assert first.status_code == 201
    assert first.content == again.content == quoted.content
    assert (first.headers["idempotency-key"], quoted.headers["idempotency-key"]) == ("k", '"k"')
    for who, status in ((None, 401), ("mallory", 403)):
        assert (await http.order("k", who=who)).status_code == status
    problem(await http.order("k", {"sku": "coffee"}), 409, "idempotency-key-reused")
    problem(await http.order("k", path="/gifts"), 409, "idempotency-key-reused")
    assert (await http.order("k", who="bob")).status_code == 201
    assert (await http.order("g", path="/gifts")).status_code == 201
    assert (await http.order("g", path="/gifts")).headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"] * 3


@pytest.mark.parametrize("path", ["/wishes", "/forms"], ids=["by-a-decorator", "by-the-view"])
async def test_what_does_not_validate_is_not_stored_in_django(conn: asyncpg.Connection, shop: Open, path: str) -> None:
    """Row 6: refused before the work, and the corrected request may have the same key; a replay is validated too."""
    http = shop()
    assert (await http.order(order={"sku": ""}, path=path)).status_code == 422
    assert (await runs(conn), await records(conn)) == ([], [])
    first, again = await http.order(path=path), await http.order(path=path)
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert (await http.order(order={"sku": ""}, path=path)).status_code == 422
    problem(await http.order(None, path=path), 400, "idempotency-key-missing")
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])


async def test_routes_in_the_scope_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 14, H4: with the setting every route has keys of its own, however long it is."""
    http = changed(shop)
    for path in ("/orders", f"/{LONG}/one", f"/{LONG}/two"):
        first, again = await http.order(path=path), await http.order(path=path)
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"] * 3
    scopes = [record["scope"] for record in await records(conn)]
    assert scopes[0] == "http:alice POST /orders"
    assert len({*scopes}) == 3


async def test_a_tenant_with_the_name_of_jobs(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 14, IDM-2: a job's commands and a tenant's requests share no keys, whatever they are called."""
    key, done = job_key("2026-03-01", "order", "tea"), []
    assert (await shop().order(key, who="jobs")).status_code == 201

    async def work() -> int:
        done.append(1)
        return len(done)

    for _ in range(2):
        async with conn.transaction():
            assert await Commands({1: SECRET}).run(conn, key, {"sku": "tea"}, work) == 1
    assert (await shop().order(key, who="jobs")).headers["idempotent-replayed"] == "true"
    assert sorted(record["scope"] for record in await records(conn)) == ["http:jobs", "job:jobs"]


async def test_an_expired_key_is_a_new_one_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 15: by the database's clock; also for another request, and also for many at once."""
    http = shop()
    first = await http.order()
    await expire(conn, but=timedelta(seconds=60))
    assert (await http.order()).content == first.content
    await expire(conn)
    second = await http.order(order={"sku": "coffee"})
    assert (second.status_code, second.json()["sku"]) == (201, "coffee")
    assert "idempotent-replayed" not in second.headers
    await expire(conn)
    answers = await asyncio.gather(*(http.order(order={"sku": "milk", "seconds": 0.1}) for _ in range(8)))
    assert {answer.content for answer in answers} == {answers[0].content}
    assert await effects(conn) == ["tea", "coffee", "milk"]
    assert len(await records(conn)) == 1


# --- what is answered --------------------------------------------------------------------------------------


@at_every_level
async def test_answers_in_django(conn: asyncpg.Connection, shop: Open, isolation: str) -> None:
    """Rows 7, 10, 11, 16 and 18, H5, H8: what is kept, dropped and run again."""
    http = shop(isolation)
    first, again = await http.order("a"), await http.order("a")
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    for name in ("content-type", "location", "x-request-id"):
        assert again.headers[name] == first.headers[name], name
    assert "set-cookie" in first.headers and "set-cookie" not in again.headers
    assert (again.headers["idempotent-replayed"], again.headers["cache-control"]) == ("true", "no-store")
    empty, again = [await http.order("empty", {"status": 204}) for _ in range(2)]
    assert (empty.status_code, again.status_code, empty.content, again.content) == (204, 204, b"", b"")
    assert again.headers["location"] == empty.headers["location"]
    assert await effects(conn) == ["tea"] * 2

    kept = len(await records(conn))
    for order in ({"status": 503}, *({"error": error} for error in ("exception", "aborted", "doomed"))):
        assert (await http.order("c", order)).status_code == order.get("status", 500)
    for error in ("aborted", "doomed"):
        assert (await http.order(None, {"error": error}, path="/notes")).status_code == 500
    for code, status, name in (("40001", 503, "idempotency-unavailable"), ("23505", 409, "request-conflict")):
        fails = f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{code}'; END $$"
        before = len(await runs(conn))
        problem(await http.order("d", {"sql": fails}), status, name)
        assert len(await runs(conn)) == before + 4
    assert len(await records(conn)) == kept
    assert (await http.order("c")).status_code == 201

    large, not_kept = await http.order("e", {"size": 3000}), await http.order("e", {"size": 3000})
    assert len(large.json()["filling"]) == 3000
    problem(not_kept, 409, "response-not-replayable")
    assert not_kept.headers["location"] == "/orders/tea"
    assert (await http.order(None, path="/notes")).status_code == 201
    assert await effects(conn) == ["tea"] * 5


@at_every_level
async def test_refusals_in_django(conn: asyncpg.Connection, shop: Open, isolation: str) -> None:
    """Row 8: the answer is kept and the work is not, also when the database refused first and the view said it."""
    http = shop(isolation)
    assert (await http.order("a", {"seat": "1"})).status_code == 201
    refusals: list[tuple[dict[str, Any], int]] = [({"status": status}, status) for status in (402, 404, 410, 422)]
    refusals += [({"seat": "1", "through": through}, 409) for through in ("cursor", "orm", "inner")]
    refusals += [({"error": "missing"}, 404)]
    for number, (order, status) in enumerate(refusals):
        refused, again = [await http.order(f"b-{number}", order) for _ in range(2)]
        assert (refused.status_code, again.status_code, again.content) == (status, status, refused.content)
        assert again.headers["idempotent-replayed"] == "true"
    assert len(await runs(conn)) == 1 + len(refusals)
    assert await effects(conn) == ["tea"]
    assert [record["status"] for record in await records(conn)] == ["Completed"] + ["Failed"] * len(refusals)


async def test_what_may_pass_is_not_kept_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 9: nothing is committed, Retry-After goes through, and the next attempt is a first request."""
    http = shop()
    for status in (401, 403, 408, 425, 429):
        answer = await http.order(order={"status": status})
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
    assert (await effects(conn), await records(conn)) == ([], [])
    assert (await http.order()).status_code == 201
    assert await effects(conn) == ["tea"]


@pytest.mark.parametrize("framework", ["django", "fastapi"])
async def test_faults_may_be_kept_everywhere(dsn: str, conn: asyncpg.Connection, shop: Open, framework: str) -> None:
    """Row 10: store_5xx keeps what was answered on purpose, undone; never a page that was made of an exception."""
    async with contextlib.AsyncExitStack() as stack:
        if framework == "django":
            http = changed(shop)
        else:
            _, http = await stack.enter_async_context(opened(dsn, store_5xx=True))
        for order in ({"error": "exception"}, {"error": "aborted"}):
            for _ in range(2):
                answer = await http.order("a", order)
                assert (answer.status_code, "idempotent-replayed" in answer.headers) == (500, False)
        assert (len(await runs(conn)), await effects(conn), await records(conn)) == (4, [], [])
        for status in (500, 503):
            first, again = [await http.order(f"b-{status}", {"status": status}) for _ in range(2)]
            assert (first.status_code, again.status_code, again.content) == (status, status, first.content)
            assert again.headers["idempotent-replayed"] == "true"
        assert (len(await runs(conn)), await effects(conn)) == (6, [])
        assert [record["status"] for record in await records(conn)] == ["Failed"] * 2


async def test_a_middleware_that_fails_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 10: inside of Holdfast's its exception is no answer either, whatever the settings."""
    http = changed(shop)
    assert (await http.order(headers={"X-Break": "yes"})).status_code == 500
    assert (await effects(conn), await records(conn)) == ([], [])
    assert (await http.order()).status_code == 201
    assert await effects(conn) == ["tea"]


async def test_what_fails_after_the_commit_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 7: on_commit may fail; the first client gets the answer that every duplicate gets."""
    first, again = [await shop().order(order={"error": "late"}) for _ in range(2)]
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"]


async def test_what_django_refuses(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 19, IDM-1: a stream, and a view inside a transaction of somebody else, are errors and change nothing."""
    http = shop()
    assert (await http.order(path="/stream")).status_code == 500
    assert (await http.order(path="/nested")).status_code == 500
    assert (await effects(conn), await records(conn)) == ([], [])


def test_what_django_refuses_when_it_is_declared() -> None:
    """Row 19: streams, files, generators and asynchronous views, before the first request."""

    def streaming(request: Any) -> StreamingHttpResponse:
        raise NotImplementedError

    def file(request: Any) -> FileResponse:
        raise NotImplementedError

    def generator(request: Any) -> Iterator[bytes]:
        yield b""

    async def asynchronous(request: Any) -> Any:
        raise NotImplementedError

    streaming.__annotations__["return"] = StreamingHttpResponse  # as without the import from __future__
    for view in (streaming, file, generator, asynchronous):
        with pytest.raises(ConfigurationError, match=view.__name__):
            idempotent(view)


# --- many at once ------------------------------------------------------------------------------------------


@at_every_level
async def test_fifty_at_once_in_django(conn: asyncpg.Connection, shop: Open, isolation: str) -> None:
    """In two processes, one execution, no 5xx, and the same bytes for everybody (H1, P9)."""
    http = shop(isolation)
    answers = await asyncio.gather(*(http.order(order={"seconds": 0.2}) for _ in range(50)))
    assert Counter(answer.status_code for answer in answers) == {201: 50}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 49
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])
    assert len(await records(conn)) == 1


async def test_waiting_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Row 12: 409 after the wait."""
    http = changed(shop)
    first = asyncio.create_task(http.order(order={"seconds": 0.6}))
    await until(lambda: runs(conn), what="the first one runs")
    waiting = await http.order(order={"seconds": 0.6})
    problem(waiting, 409, "idempotency-in-progress")
    assert waiting.headers["retry-after"] == "1"
    assert (await first).status_code == 201
    assert await effects(conn) == ["tea"]


@above_read_committed
@pytest.mark.parametrize("catch", [False, True], ids=["raised", "answered-with-409"])
async def test_a_real_conflict_in_django(
    dsn: str, conn: asyncpg.Connection, shop: Open, isolation: str, catch: bool
) -> None:
    """Row 16: 40001 of an ORM statement is run again, also when the view has made a refusal of it."""
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute("UPDATE counters SET value = value + 1")
            waiting = asyncio.create_task(shop(isolation).order(order={"count": True, "catch": catch}))
            await until(lambda: blocked(conn), what="the view waits for the row")
        answer = await waiting
    finally:
        await other.close()
    assert answer.status_code == 201
    assert "idempotent-replayed" not in answer.headers
    assert (len(await runs(conn)), await effects(conn)) == (2, ["tea"])
    assert await conn.fetchval("SELECT value FROM counters") == 2


async def blocked(conn: asyncpg.Connection) -> bool:
    return bool(await conn.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))


@at_every_level
async def test_requests_in_each_others_way_in_django(conn: asyncpg.Connection, shop: Open, isolation: str) -> None:
    """Row 16: 201 or 503 at every level, never 409 or 500, and each success counts once."""
    http = shop(isolation)
    order = {"count": True, "catch": True}
    answers = await asyncio.gather(*(http.order(f"k-{n}", order) for n in range(6)))
    assert {answer.status_code for answer in answers} <= {201, 503}
    for n in range(6):
        assert (await http.order(f"k-{n}", order)).status_code == 201
    assert await conn.fetchval("SELECT value FROM counters") == 6
    assert len(await effects(conn)) == 6


@pytest.mark.parametrize("by", ["files", "stream", "body"])
async def test_a_view_that_is_run_again_finds_the_request_as_it_came(
    conn: asyncpg.Connection, shop: Open, by: str
) -> None:
    """Row 16: its files, its stream and its body, from the beginning; without a key only what is still there."""
    http, content = shop(), b"0123456789"
    sends: dict[str, Any] = {"files": {"file": ("a.txt", content)}} if by == "files" else {"content": content}
    for key in ("k-1", None):
        await conn.execute("CREATE SEQUENCE tries")
        headers = {"Authorization": "Bearer alice"} | ({"Idempotency-Key": key} if key else {})
        answer = await http.post("/uploads", params={"by": by}, headers=headers, **sends)
        await conn.execute("DROP SEQUENCE tries")
        if key is None and by != "body":
            problem(answer, 503, "idempotency-unavailable")
        else:
            assert (answer.status_code, answer.content) == (201, content[::-1])
    assert len(await records(conn)) == 1


async def test_a_commit_that_fails_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Rows 10, 16 and 17: what the database finds only at the commit is never a success."""
    await conn.execute(
        """
        CREATE SEQUENCE tries;
        CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            CASE NEW.name
            WHEN 'again' THEN
                IF nextval('tries') <= 2 THEN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END IF;
            WHEN 'never' THEN RAISE EXCEPTION 'never' USING ERRCODE = '23503';
            WHEN 'gone' THEN PERFORM pg_terminate_backend(pg_backend_pid());
            ELSE NULL;
            END CASE;
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION at_commit();
        """
    )
    try:
        http = shop()
        assert (await http.order("a", {"sku": "again"})).status_code == 201
        assert (await http.order("b", {"sku": "never"})).status_code == 500
        problem(await http.order("c", {"sku": "gone"}), 503, "idempotency-unavailable")
        assert (await http.order(None, {"sku": "never"}, path="/notes")).status_code == 500
        assert (await http.order("d", {"sku": "tea"})).status_code == 201
        assert await effects(conn) == ["again", "tea"]
        assert len(await records(conn)) == 2
    finally:
        await conn.execute("DROP TRIGGER at_commit ON effects; DROP FUNCTION at_commit; DROP SEQUENCE tries")


# --- what dies, and who goes -------------------------------------------------------------------------------


async def empty(conn: asyncpg.Connection) -> None:
    """For tests that begin many times: quicker than TRUNCATE where there is little."""
    await conn.execute("DELETE FROM effects; DELETE FROM core.outbox; DELETE FROM core.idempotency_records")


async def test_a_backend_that_dies_in_django(conn: asyncpg.Connection, shop: Open) -> None:
    """Rows 17 and 21: 503, and nothing is left behind."""
    http = shop()
    ends = "SELECT pg_terminate_backend(pg_backend_pid())"
    for catch in (False, True):
        problem(await http.order(order={"sql": ends, "catch": catch}), 503, "idempotency-unavailable")
    assert (await effects(conn), await records(conn)) == ([], [])
    assert (await http.order()).status_code == 201
    assert await effects(conn) == ["tea"]


@pytest.mark.slow
async def test_the_line_is_cut_at_every_message_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Rows 17 and 21: 503 wherever it is cut, or 201 of what is committed; the retry executes or replays."""
    async with wired(dsn) as (wire, through), django(zygote, through, outside=dsn) as (http, _):

        async def attempt(cut: Cut | None) -> tuple[Watch, int]:
            await empty(conn)
            watch = wire.watch(cut=cut)
            answer = await http.order()
            if cut is not None:
                assert watch.made.is_set(), cut
                assert answer.status_code in ((201, 503) if await settled(conn) else (503,)), cut
                wire.watch()
                assert (await http.order()).status_code == 201, cut
                assert await settled(conn) == 1, cut
            return watch, answer.status_code

        learned, status = await attempt(None)
        assert status == 201
        statuses: Counter[int] = Counter()
        for direction, letters in learned.seen.items():
            # The parts of one statement travel together: its last one stands for all.
            for number, letter in enumerate(letters, start=1):
                if letter in ("^", "Q", "S", "Z"):
                    _, status = await attempt(Cut(direction, number))
                    statuses[status] += 1
        assert set(statuses) <= {201, 503}
        assert statuses[503] >= 14, "there are fewer messages than the request has statements"


async def test_a_database_that_is_down_in_django(dsn: str, conn: asyncpg.Connection, zygote: Zygote) -> None:
    """Row 17: 503 with Retry-After, and the view is not entered, with a key or without."""
    with reserved_port() as nowhere:
        down = f"postgresql://nobody:nothing@127.0.0.1:{nowhere}/none"
        async with django(zygote, down, outside=dsn) as (http, _):
            for key, path in (("k-1", "/orders"), (None, "/notes")):
                answer = await http.order(key, path=path)
                problem(answer, 503, "idempotency-unavailable")
                assert answer.headers["retry-after"] == "1"
    assert await runs(conn) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_django_server_is_killed_at_every_statement(
    dsn: str, conn: asyncpg.Connection, zygote: Zygote, shop: Open
) -> None:
    """Row 21, H6: SIGKILL before and after each, and before and after the commit; the retry goes to another process."""
    survivor, deaths, committed, first = shop(), 0, 0, None
    for moment in range(1, 100):
        await empty(conn)
        async with django(zygote, dsn, kill=moment) as (http, pid):
            with contextlib.suppress(httpx.TransportError):
                first = await http.order()
            if first is not None:
                break
            await until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), what="its death")
        deaths += 1
        before = await settled(conn)
        retry = await survivor.order()
        assert retry.status_code == 201, f"moment {moment}"
        replayed = "idempotent-replayed" in retry.headers
        assert replayed == (before == 1), f"moment {moment}"
        assert await settled(conn) == 1, f"moment {moment}"
        committed += replayed
    assert first is not None and first.status_code == 201
    assert deaths >= 10, "there are fewer moments than the request has statements"
    assert committed == 1, "after the commit there is one moment, and before it there are all others"


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
async def test_the_client_goes_in_django(conn: asyncpg.Connection, shop: Open, interface: str) -> None:
    """Row 20, H7: while its request runs. It ends as a whole: with its commit, or under ASGI, where Django cancels
    it, with a rollback. The retry waits for that, and is answered with it or carried out.
    """
    http, body = shop(interface=interface, count=1), b'{"sku": "tea", "seconds": 0.3}'
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(http))
    writer.write(raw_request(port_of(http), body))
    await writer.drain()
    await until(lambda: runs(conn), what="it runs")
    writer.transport.abort()
    retry = await http.order(content=body, headers={"Content-Type": "application/json"})
    assert retry.status_code == 201
    replayed = "idempotent-replayed" in retry.headers
    assert replayed or interface == "asgi"
    assert (await runs(conn), await effects(conn)) == (["tea"] * (1 if replayed else 2), ["tea"])
    assert len(await records(conn)) == 1


@pytest.mark.parametrize("interface", ["wsgi", "asgi"])
async def test_the_client_goes_before_its_request_is_whole_in_django(
    conn: asyncpg.Connection, shop: Open, interface: str
) -> None:
    """Row 20, H7: what was not sent in full is not carried out, also if it can be read as a request."""
    http, body = shop(interface=interface, count=1), b'{"sku": "tea"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(http))
    writer.write(raw_request(port_of(http), body, length=len(body) + 10))
    writer.write_eof()
    answer = await reader.read()
    assert b" 201 " not in answer.partition(b"\r\n")[0]
    writer.close()
    assert (await http.order("other")).status_code == 201
    assert (await runs(conn), len(await records(conn))) == (["tea"], 1)


async def test_django_under_asgi(conn: asyncpg.Connection, shop: Open) -> None:
    """Rows 7, 10, 11 and 16: the same middleware under uvicorn, where Django gives it a thread."""
    http = shop(interface="asgi", count=1)
    assert (await http.order(order={"error": "exception"})).status_code == 500
    fails = "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"
    problem(await http.order("b", {"sql": fails, "catch": True}), 503, "idempotency-unavailable")
    first, again = await http.order(), await http.order()
    assert (first.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"]


@pytest.mark.parametrize("name", ["CONNECT_WITHIN", "COMMIT_WITHIN"])
def test_settings_that_django_keeps_itself_are_refused(name: str) -> None:
    """Row 17: rather than to be believed in, and to do nothing."""
    from holdfast.integrations.django.middleware import _config

    with pytest.raises(ImproperlyConfigured, match=f"{name} .* tcp_user_timeout"):
        _config({"SECRETS": {1: "a secret of the tests"}, name: 5})
