"""What is answered, kept and undone: rows 7 to 11 and 18 of the contract, over every driver."""

from __future__ import annotations

import json

import asyncpg
import pytest

from tests.http.shop import EVERY_DRIVER
from tests.http.support import Open, effects, opened, problem, records, runs, with_every


@pytest.mark.slow
@with_every(EVERY_DRIVER)
async def test_the_first_answer_is_every_answer(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Rows 7 and 11, IDM-1, H8: status, body and the headers that may be kept; the change and its event once."""
    async with shop(driver, isolation) as http:
        first = await http.order(order={"status": 303})
        assert first.status_code == 303
        assert first.headers["idempotency-key"] == "k-1"
        assert "idempotent-replayed" not in first.headers
        assert first.headers["set-cookie"] == "session=secret"
        for _ in range(2):
            again = await http.order(order={"status": 303})
            assert (again.status_code, again.content) == (303, first.content)
            for name in ("content-type", "location", "etag", "link", "x-request-id", "content-length"):
                assert again.headers[name] == first.headers[name], name
            for name in ("set-cookie", "x-internal"):
                assert name not in again.headers, name
            assert again.headers["idempotent-replayed"] == "true"
            assert again.headers["cache-control"] == "no-store"
            assert again.headers["vary"] == "Idempotency-Key"
            assert again.headers["idempotency-key"] == "k-1"
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])
    [record] = await records(conn)
    assert (record["scope"], record["key"], record["status"]) == ("http:alice", "k-1", "Completed")
    assert (record["response_status_code"], bytes(record["response_body"])) == (303, first.content)
    assert record["hash_version"] == 1
    assert (record["expires_at"] - record["created_at"]).total_seconds() == 24 * 3600
    kept = {name for name, _ in json.loads(record["response_headers"])}
    assert kept == {"content-type", "location", "etag", "link", "x-request-id", "cache-control"}


@with_every(EVERY_DRIVER)
async def test_a_refusal_is_kept_and_its_work_is_not(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 8: the endpoint had written already; only the record of its answer is committed."""
    async with shop(driver, isolation) as http:
        for status in (402, 404, 409, 410, 422):
            first, again = [await http.order(f"k-{status}", {"status": status}) for _ in range(2)]
            assert (first.status_code, again.status_code) == (status, status)
            assert again.content == first.content
            assert again.headers["idempotent-replayed"] == "true"
            assert again.headers["retry-after"] == "7"
    assert (await runs(conn), await effects(conn)) == (["tea"] * 5, [])
    assert [record["status"] for record in await records(conn)] == ["Failed"] * 5


@with_every(EVERY_DRIVER)
async def test_a_refusal_after_a_database_error(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 8: an endpoint that turns a unique violation into 409 leaves a failed transaction, and the answer is kept."""
    async with shop(driver, isolation) as http:
        assert (await http.order("a", {"seat": "12a"})).status_code == 201
        refused, again = await http.order("b", {"seat": "12a"}), await http.order("b", {"seat": "12a"})
        assert (refused.status_code, again.status_code) == (409, 409)
        assert refused.json() == again.json() == {"detail": "the seat is taken"}
        assert again.headers["idempotent-replayed"] == "true"
    assert len(await runs(conn)) == 2
    assert await effects(conn) == ["tea"]


async def test_refusals_need_not_be_kept(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 8: the setting; then a retry is a first request."""
    async with opened(dsn, store_4xx=False) as (_, http):
        for _ in range(2):
            assert (await http.order(order={"status": 409})).status_code == 409
    assert (await runs(conn), await effects(conn), await records(conn)) == (["tea"] * 2, [], [])


@with_every(EVERY_DRIVER)
async def test_what_may_pass_is_not_kept(conn: asyncpg.Connection, shop: Open, driver: str, isolation: str) -> None:
    """Row 9: nothing is committed, Retry-After goes through, and the next attempt is a first request."""
    async with shop(driver, isolation) as http:
        for status in (401, 403, 408, 425, 429):
            first = await http.order(order={"status": status})
            assert (first.status_code, first.headers["retry-after"]) == (status, "7")
        assert (await effects(conn), await records(conn)) == ([], [])
        assert (await http.order()).status_code == 201
    assert await effects(conn) == ["tea"]


FAULTS: list[dict[str, object]] = [{"error": "exception"}, {"status": 500}, {"status": 503}, {"error": "22012"}]


@with_every(EVERY_DRIVER)
async def test_a_fault_leaves_nothing(conn: asyncpg.Connection, shop: Open, driver: str, isolation: str) -> None:
    """Row 10, H5: 5xx or an exception rolls everything back, the record too; the retry is carried out."""
    async with shop(driver, isolation) as http:
        for fault in FAULTS:
            assert (await http.order(order=fault)).status_code == fault.get("status", 500)
        assert (await effects(conn), await records(conn)) == ([], [])
        assert (await http.order()).status_code == 201
    assert (await runs(conn), await effects(conn)) == (["tea"] * 5, ["tea"])


async def test_faults_may_be_kept(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 10: store_5xx keeps the answer that the endpoint chose, and still undoes its work."""
    async with opened(dsn, store_5xx=True) as (_, http):
        first, again = await http.order(order={"status": 503}), await http.order(order={"status": 503})
        assert (first.status_code, again.status_code) == (503, 503)
        assert again.headers["idempotent-replayed"] == "true"
    assert (await runs(conn), await effects(conn)) == (["tea"], [])


@with_every(EVERY_DRIVER)
async def test_a_failed_transaction_is_never_a_success(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 10: an endpoint that swallows a database error and answers 201 has changed nothing, and says so."""
    async with shop(driver, isolation) as http:
        for key, path in (("k-1", "/orders"), (None, "/notes")):
            assert (await http.order(key, {"error": "aborted"}, path=path)).status_code == 500
    assert (await effects(conn), await records(conn)) == ([], [])


async def test_an_answer_without_a_body(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 11, H8: 204 is repeated as 204 and not carried out twice; its Location is kept."""
    async with opened(dsn) as (_, http):
        first, again = await http.order(order={"status": 204}), await http.order(order={"status": 204})
        assert (first.status_code, again.status_code) == (204, 204)
        assert (first.content, again.content) == (b"", b"")
        assert again.headers["location"] == first.headers["location"]
        assert "content-length" not in again.headers
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"]


async def test_an_answer_of_any_bytes(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 11, H8: binary, byte for byte."""
    async with opened(dsn) as (_, http):
        body = bytes(range(256)) * 400
        first, again = [await http.order(content=body, path="/images") for _ in range(2)]
        assert first.content == again.content == bytes(reversed(body))
        assert again.headers["content-type"] == first.headers["content-type"] == "application/octet-stream"
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["image"]


@with_every(EVERY_DRIVER)
async def test_an_answer_that_is_too_large_to_keep(
    conn: asyncpg.Connection, shop: Open, driver: str, isolation: str
) -> None:
    """Row 18, H8: the first client gets all of it; a duplicate gets 409 with the Location, and is not carried out."""
    async with shop(driver, isolation) as http:
        first = await http.order(order={"size": 5000})
        assert first.status_code == 201
        assert len(first.json()["filling"]) == 5000
        again = await http.order(order={"size": 5000})
        problem(again, 409, "response-not-replayable")
        assert again.headers["location"] == "/orders/tea"
        assert "retry-after" not in again.headers
        assert "x" * 10 not in again.text
    assert (await runs(conn), await effects(conn)) == (["tea"], ["tea"])
    [record] = await records(conn)
    assert (record["response_status_code"], record["body_omitted"], bytes(record["response_body"])) == (201, True, b"")


@with_every(EVERY_DRIVER)
async def test_whose_key_it_is(conn: asyncpg.Connection, shop: Open, driver: str, isolation: str) -> None:
    """Rows 6, 13 and 14, H2 to H4: what does not validate leaves no trace, another body or route is a mismatch,
    another tenant has keys of its own.
    """
    async with shop(driver, isolation) as http:
        assert (await http.order(order={"sku": ""})).status_code == 422
        assert (await runs(conn), await records(conn)) == ([], [])
        first = await http.order()
        assert first.status_code == 201
        assert (await http.order(order={"sku": ""})).status_code == 422
        for other in (await http.order(order={"sku": "coffee"}), await http.order(path="/gifts")):
            problem(other, 409, "idempotency-key-reused")
            assert "retry-after" not in other.headers
            assert first.json()["sku"] not in other.text
        bob = await http.order(who="bob", order={"sku": "coffee"})
        assert (bob.status_code, bob.json()["sku"]) == (201, "coffee")
        assert (await http.order()).content == first.content
    assert await effects(conn) == ["tea", "coffee"]


async def test_an_answer_as_large_as_may_be(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 18: the default is 1 MiB, and that much is repeated."""
    async with opened(dsn) as (_, http):
        small = len((await http.order("a")).content)
        size = 1024 * 1024 - small
        first, again = await http.order("b", {"size": size}), await http.order("b", {"size": size})
        assert len(first.content) == 1024 * 1024
        assert again.content == first.content
        larger = [await http.order("c", {"size": size + 1}) for _ in range(2)]
        assert [answer.status_code for answer in larger] == [201, 409]


async def test_more_headers_may_be_kept(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 11: a setting adds to the allow-list."""
    async with opened(dsn, keep_headers=("X-Internal",)) as (_, http):
        await http.order()
        assert (await http.order()).headers["x-internal"] == "not for replays"
