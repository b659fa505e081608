"""Which requests take part, and which keys are keys: rows 1 to 6, 13 and 14 of the contract."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import product

import asyncpg
import pytest

from tests.http.plain import Plain
from tests.http.support import ALICE, ORDER, effects, opened, problem, records, runs, served


async def test_a_key_of_a_safe_method_is_ignored(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 1: the request goes its way, also with a key that is none, and nothing is stored."""
    async with opened(dsn) as (_, http):
        for method, key in product(("GET", "HEAD", "OPTIONS", "TRACE"), ("k-1", 'not"a key', "")):
            plain = await http.request(method, "/orders")
            keyed = await http.request(method, "/orders", headers={"Idempotency-Key": key})
            assert (keyed.status_code, keyed.content) == (plain.status_code, plain.content)
            assert "idempotency-key" not in keyed.headers
    assert await records(conn) == []


async def test_a_route_that_takes_no_part_ignores_the_key(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 1: also for POST: whoever does not ask for a transaction is left alone, whatever the size of the body."""
    async with opened(dsn, request_limit=100) as (_, http):
        for _ in range(2):
            answer = await http.order(path="/plain", order={"filling": "x" * 1000})
            assert (answer.status_code, answer.json()) == (201, {"plain": "yes"})
    assert await records(conn) == []


async def test_a_required_key_that_is_missing(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 2, H9: 400 with a type of its own, and the endpoint is not run."""
    async with opened(dsn) as (_, http):
        for key in (None, "", '""'):
            problem(await http.order(key), 400, "idempotency-key-missing")
    assert (await runs(conn), await records(conn)) == ([], [])


async def test_an_optional_key_that_is_missing(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 2, IDM-1: where the key is optional the request is carried out each time; an empty one is an error."""
    async with opened(dsn) as (_, http):
        for _ in range(2):
            assert (await http.order(None, path="/notes")).status_code == 201
        problem(await http.order("", path="/notes"), 400, "idempotency-key-invalid")
        first, again = await http.order("k", path="/notes"), await http.order("k", path="/notes")
        assert first.content == again.content
    assert await effects(conn) == ["tea"] * 3
    assert len(await records(conn)) == 1


INVALID = [
    b"x" * 256,
    b'"' + b"x" * 256 + b'"',
    b"x" * 4096,
    "schlüssel".encode(),
    b"caf\xe9",
    b"two words",
    b"one,two",
    b'"one", "two"',
    b'"unended',
    b'unbegun"',
    b'"an \\escape"',
    b'"one";a=1',
    b"one;a=1",
    b"back\\slash",
]


async def test_a_key_that_cannot_be_read(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 3, H9: 400 before any SQL, and the answer does not quote it."""
    async with opened(dsn) as (_, http):
        for key in INVALID:
            headers = [(b"Authorization", b"Bearer alice"), (b"Idempotency-Key", key)]
            answer = await http.post("/orders", json=ORDER, headers=headers)
            problem(answer, 400, "idempotency-key-invalid")
            assert key[:6] not in answer.content
            assert "idempotency-key" not in answer.headers
    assert (await runs(conn), await records(conn)) == ([], [])


async def test_two_keys_are_none(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 3, H9: two fields are an error, even if they say the same."""
    async with opened(dsn) as (_, http):
        for second in (b"k-1", b"k-2"):
            fields = [(b"Idempotency-Key", b"k-1"), (b"Idempotency-Key", second)]
            answer = await http.post("/orders", json=ORDER, headers=[(b"Authorization", b"Bearer alice"), *fields])
            problem(answer, 400, "idempotency-key-invalid")
    assert (await runs(conn), await records(conn)) == ([], [])


async def test_quoted_and_bare_are_one_key(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 3, H9: an RFC 8941 string and a token, 255 characters of it at most; the field is echoed as it was sent."""
    async with opened(dsn) as (_, http):
        for bare, quoted in ((b"k-1", b'"k-1"'), (b"x" * 255, b'"' + b"x" * 255 + b'"'), (b"a:b/c=+", b'"a:b/c=+"')):
            first = await http.post("/orders", json=ORDER, headers=[*ALICE.items(), ("Idempotency-Key", bare)])
            again = await http.post("/orders", json=ORDER, headers=[*ALICE.items(), ("Idempotency-Key", quoted)])
            assert (first.status_code, again.status_code) == (201, 201)
            assert first.content == again.content
            assert first.headers["idempotency-key"] == bare.decode()
            assert again.headers["idempotency-key"] == quoted.decode()
    assert await effects(conn) == ["tea"] * 3


async def test_an_escaped_key_is_what_it_stands_for(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 3: backslash and quotation mark are written with a backslash."""
    async with opened(dsn) as (_, http):
        assert (await http.order('"a \\"b\\" \\\\"')).status_code == 201
    assert [record["key"] for record in await records(conn)] == ['a "b" \\']


async def test_whoever_may_not_learns_nothing(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 4, S18: 401 and 403 come before the key is looked for, whether it was used or not, on a replay as well."""
    async with opened(dsn) as (_, http):
        assert (await http.order("used")).status_code == 201
        for who, status in ((None, 401), ("mallory", 403)):
            used, unused = await http.order("used", who=who), await http.order("unused", who=who)
            assert (used.status_code, unused.status_code) == (status, status)
            assert used.content == unused.content
            assert {*used.headers} == {*unused.headers}
            assert "idempotent-replayed" not in used.headers
    assert len(await records(conn)) == 1


async def test_every_dependency_comes_before_the_lookup(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 4: also one that is declared after the transaction, on the first request and on a replay."""
    async with opened(dsn) as (_, http):
        admin = {"X-Admin": "yes"}
        assert (await http.order(path="/late-guard")).status_code == 403
        assert (await http.order(path="/late-guard", headers=admin)).status_code == 201
        assert (await http.order(path="/late-guard")).status_code == 403
        again = await http.order(path="/late-guard", headers=admin)
        assert again.headers["idempotent-replayed"] == "true"
    assert await effects(conn) == ["tea"]


async def test_a_body_over_the_limit(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 5: 413, whether its length is announced or not; the limit itself is allowed."""
    async with opened(dsn, request_limit=1000) as (_, http):
        body = json.dumps(ORDER).encode()

        async def pieces(size: int) -> AsyncIterator[bytes]:
            padded = body.rjust(size)
            for start in range(0, size, 100):
                yield padded[start : start + 100]

        for content in (body.rjust(1001), pieces(1001), pieces(5000)):
            answer = await http.order(content=content, headers={"Content-Type": "application/json"})
            problem(answer, 413, "request-too-large")
        assert (await runs(conn), await records(conn)) == ([], [])
        for key, content in (("a", body.rjust(1000)), ("b", pieces(1000))):
            answer = await http.order(key, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 201
    assert len(await records(conn)) == 2


async def test_what_does_not_validate_is_not_stored(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 6: 422 of FastAPI's validation, and the corrected request may have the same key."""
    async with opened(dsn) as (_, http):
        assert (await http.order(order={"sku": ""})).status_code == 422
        assert (await http.order(content=b"{", headers={"Content-Type": "application/json"})).status_code == 422
        assert await records(conn) == []
        assert (await http.order()).status_code == 201
        # A replay is validated too, before it is looked for.
        assert (await http.order(order={"sku": ""})).status_code == 422
    assert await effects(conn) == ["tea"]


@pytest.mark.parametrize("status", [409, 422])
async def test_another_request_with_the_same_key(dsn: str, conn: asyncpg.Connection, status: int) -> None:
    """Row 13, H2: its own type, no Retry-After, and nothing of what is stored."""
    async with opened(dsn, mismatch_status=status) as (shop, http):
        assert (await http.order(order={"sku": "secret-tea"})).status_code == 201
        for other in (
            await http.order(order={"sku": "coffee"}),
            await http.order(order={"sku": "secret-tea"}, path="/orders?gift=1"),
            await http.order(order={"sku": "secret-tea"}, path="/orders/secret-tea", method="PATCH"),
        ):
            problem(other, status, "idempotency-key-reused")
            assert "retry-after" not in other.headers
            assert "secret-tea" not in other.text.replace("/orders/secret-tea", "")
            assert "idempotent-replayed" not in other.headers
        told = [fact.details for fact in shop.facts]  # type: ignore[union-attr]
        assert [details["operation"] for details in told] == [
            "POST /orders",
            "POST /orders",
            "PATCH /orders/secret-tea",
        ]
        assert "k-1" not in str(told)
    assert await effects(conn) == ["secret-tea"]


async def test_the_same_request_in_other_words(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 11: white space, the order of keys and of parameters do not matter; a digit and a repeated key do."""
    async with opened(dsn) as (_, http):

        async def send(body: bytes, query: str = "", content_type: str = "application/json") -> int:
            headers = {"Content-Type": content_type}
            return (await http.order(content=body, path=f"/orders{query}", headers=headers)).status_code

        assert await send(b'{"sku":"tea","seconds":0.0}', "?a=1&b=2") == 201
        assert (
            await send(b'{ "seconds" : 0.0,\n "sku" : "\\u0074ea" }', "?b=2&a=1", "application/json; charset=utf-8")
            == 201
        )
        assert await send(b'{"sku":"tea","seconds":0}', "?a=1&b=2") == 409
        assert await send(b'{"sku":"tea","seconds":0.00}', "?a=1&b=2") == 409
        assert await send(b'{"sku":"tea","sku":"tea","seconds":0.0}', "?a=1&b=2") == 409
    assert await effects(conn) == ["tea"]


async def test_raw_bytes_are_a_setting(dsn: str, conn: asyncpg.Connection) -> None:
    """With raw_body every byte counts (IDM-1)."""
    async with opened(dsn, raw_body=True) as (_, http):
        json_type = {"Content-Type": "application/json"}
        assert (await http.order(content=b'{"sku":"tea"}', headers=json_type)).status_code == 201
        assert (await http.order(content=b'{"sku":"tea"}', headers=json_type)).status_code == 201
        problem(await http.order(content=b'{"sku": "tea"}', headers=json_type), 409, "idempotency-key-reused")
    assert await effects(conn) == ["tea"]


async def test_a_form_is_the_same_under_another_boundary(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 11: clients make a new boundary for every attempt."""
    async with opened(dsn) as (_, http):

        async def send(boundary: str, content: str = "tea") -> int:
            body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{content}\r\n--{boundary}--\r\n'
            headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            return (await http.order(content=body.encode(), path="/images", headers=headers)).status_code

        assert [await send("one"), await send("two"), await send("one", "coffee")] == [201, 201, 409]
    assert await effects(conn) == ["image"]


async def test_keys_belong_to_their_tenant(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 14, H3: the same key of somebody else is a first request of its own."""
    async with opened(dsn) as (_, http):
        alice, bob = await http.order(who="alice"), await http.order(who="bob")
        assert (alice.status_code, bob.status_code) == (201, 201)
        assert alice.json() != bob.json()
        assert (await http.order(who="bob")).content == bob.content
        assert (await http.order(who="alice")).content == alice.content
        problem(await http.order(who="bob", order={"sku": "coffee"}), 409, "idempotency-key-reused")
    assert await effects(conn) == ["tea", "tea"]
    assert sorted(record["scope"] for record in await records(conn)) == ["http:alice", "http:bob"]


async def test_another_route_is_another_request(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 14, H4: of the same tenant, a mismatch."""
    async with opened(dsn) as (_, http):
        assert (await http.order()).status_code == 201
        problem(await http.order(path="/gifts"), 409, "idempotency-key-reused")
    assert await effects(conn) == ["tea"]


async def test_routes_as_a_part_of_the_scope(dsn: str, conn: asyncpg.Connection) -> None:
    """Row 14, H4: with the setting every route, by its template, has keys of its own."""
    async with opened(dsn, route_in_scope=True) as (_, http):
        assert (await http.order()).status_code == 201
        assert (await http.order(path="/gifts")).status_code == 201
        assert (await http.order(path="/orders/1", method="PATCH")).status_code == 201
        problem(await http.order(path="/orders/2", method="PATCH"), 409, "idempotency-key-reused")
    assert await effects(conn) == ["tea"] * 3
    scopes = sorted(record["scope"] for record in await records(conn))
    assert scopes == [f"http:alice {route}" for route in ("PATCH /orders/{sku}", "POST /gifts", "POST /orders")]


async def test_a_scope_that_names_nobody_is_refused(dsn: str, conn: asyncpg.Connection) -> None:
    """A client that makes the application name nobody gets a problem, and the request is not carried out (S18)."""
    async with opened(dsn) as (_, http):
        problem(await http.order(who="x" * 1021), 400, "idempotency-scope-invalid")
    assert (await runs(conn), await records(conn)) == ([], [])


@pytest.mark.parametrize("path", ["/orders/" + "x" * 2000, "/orders/a%00b", "/orders/" + "%C3%A4" * 600])
async def test_a_path_that_cannot_be_stored(dsn: str, conn: asyncpg.Connection, path: str) -> None:
    """Row 14: with the route in the scope, whatever its length and characters: no 500, and the key works."""
    async with opened(dsn, route_in_scope=True) as (_, http):
        first, again = [await http.order(path=path, method="PATCH") for _ in range(2)]
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        problem(await http.order(path=f"{path}y", method="PATCH"), 409, "idempotency-key-reused")
    assert await effects(conn) == ["tea"]

    # Without a framework there is no template, and the path itself is the route.
    await conn.execute("TRUNCATE effects, core.outbox, core.idempotency_records")
    async with served(Plain(dsn, route_in_scope=True)) as http:
        first, again = [await http.order(path=path) for _ in range(2)]
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        other = await http.order(path=f"{path}y")
        assert (other.status_code, "idempotent-replayed" in other.headers) == (201, False)
    assert await effects(conn) == ["tea"] * 2
    for record in await records(conn):
        assert record["scope"].startswith("http-sha256:")
