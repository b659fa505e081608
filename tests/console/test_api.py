"""The HTTP API (OPS-3): its contract, who may do what, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking
from holdfast.access.redaction import Redaction
from holdfast.api import create_api
from holdfast.api.openapi import openapi
from holdfast.operator import Operators
from holdfast.operator.catalogue import VERBS
from tests.logins import Logins
from tests.observability.scraping import read
from tests.operator.support import HANDLER, actions, fail, states

TOKENS = {str(role): Principal(f"{role}@example.org", role) for role in Role}
ID = "0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11"


async def authenticate(request: Request) -> Principal | None:
    assert "cookie" not in request.headers
    return TOKENS.get(request.headers["authorization"].removeprefix("Bearer "))


class Client(httpx.AsyncClient):
    """A client of the API, with the token of a role."""

    def as_(self, role: str | None) -> dict[str, str]:
        return {} if role is None else {"authorization": f"Bearer {role}"}

    async def read(self, verb: str, role: str | None = "viewer", **query: Any) -> httpx.Response:
        return await self.get(f"/{verb.replace('.', '/')}", params=query, headers=self.as_(role))

    async def change(
        self, verb: str, role: str | None = "admin", *, key: str | None = None, **body: Any
    ) -> httpx.Response:
        headers = self.as_(role) | ({} if key is None else {"idempotency-key": key})
        return await self.post(f"/{verb.replace('.', '/')}", json=body, headers=headers)


@asynccontextmanager
async def serving(dsn: str, **options: Any) -> AsyncIterator[Client]:
    pool: dict[str, Any] = {name: options.pop(name) for name in ("size", "read_timeout", "wait") if name in options}
    async with Operators(dsn, **pool) as operators:
        app = Starlette(routes=[Mount("/ops/api/v1", create_api(operators, authenticate, **options))])
        transport = httpx.ASGITransport(app)
        async with Client(transport=transport, base_url="http://127.0.0.1/ops/api/v1") as client:
            yield client


@pytest.fixture
async def api(dsn: str) -> AsyncIterator[Client]:
    async with serving(dsn) as client:
        yield client


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert found["status"] == status and found["title"] and found["problem"] and found["remedy"]
    return found


# --- the contract ---


async def test_every_read_answers_as_its_schema_says(api: Client, conn: asyncpg.Connection) -> None:
    """The OpenAPI document describes what is sent, with a little of everything in the database (OPS-3)."""
    (id,) = await fail(conn)
    await api.change("plans.create", ids=[str(id)])
    await api.change("failed.note", group=f"{HANDLER}/x", note=None)
    await conn.execute(
        """INSERT INTO core.subscriptions (domain_context, handler_name, event_type, retired_at)
           VALUES ('relay', 'relay.nats', '*', now())"""
    )
    described = (await api.get("/openapi.json", headers=api.as_("viewer"))).json()
    assert described == json.loads(json.dumps(openapi(VERBS.values())))
    given: dict[str, dict[str, Any]] = {
        "events.show": {"id": str(id), "payload": "true"},
        "events.find": {"key": str(id)},
        "events.children": {"id": str(id)},
        "events.causes": {"id": str(id)},
        "audit.event": {"id": str(id)},
        "series": {"handler": HANDLER},
        "plans.show": {"plan": 1},
        "plans.failed": {"plan": 1},
        "plans.outcomes": {"plan": 1},
        "relay.check": {"broker": "nats"},
    }
    for name, verb in VERBS.items():
        if verb.changes or name in ("schedules.show", "archive.show", "requests.show", "handlers.show"):
            continue
        response = await api.read(name, **given.get(name, {}))
        assert response.status_code == 200, (name, response.text)
        assert response.headers["cache-control"] == "no-store" and "access-control-allow-origin" not in response.headers
        operation = described["paths"][f"/{name.replace('.', '/')}"]["get"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(response.json(), {**schema, "components": described["components"]})
    assert problem(await api.read("schedules.show", name="none"), 404)["field"] == "schedule"
    assert problem(await api.read("relay.check", broker="kafka"), 404)["field"] == "broker"
    assert problem(await api.read("archive.show", id=7), 404)["field"] == "ids"
    assert problem(await api.read("handlers.show", handler=HANDLER), 404)["field"] == "handler"
    assert problem(await api.read("requests.show", scope="a", key="b"), 404)["field"] == "key"


async def test_prometheus_can_scrape_it(api: Client, conn: asyncpg.Connection) -> None:
    """With a token, and the header that Prometheus sends; everyone else gets JSON (OBS-2)."""
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    found = await api.get("/metrics", headers=api.as_("viewer") | {"accept": accept})
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert read(found.text).of("holdfast_outbox_pending") == 0
    assert "holdfast_outbox_pending 0.0" in (await api.read("metrics")).json()["value"]
    problem(await api.get("/metrics", headers={"accept": accept}), 401)


async def test_a_change_is_made_and_audited_under_the_name_of_who_asks(api: Client, conn: asyncpg.Connection) -> None:
    """With its reason; a dry run changes nothing (OPS-3, DLQ-6)."""
    ids = [str(id) for id in await fail(conn, 3)]
    tried = await api.change("failed.replay", "operator", handler=HANDLER, dry_run=True)
    assert tried.status_code == 200 and len(tried.json()["moved"]) == 3 and await states(conn) == {"failed": 3}
    done = await api.change("failed.replay", "operator", ids=ids[:2], reason="the terminal is back")
    assert sorted(done.json()["moved"]) == sorted(ids[:2]) and await states(conn) == {"failed": 1, "pending": 2}
    line = await conn.fetchrow("SELECT actor, action, reason FROM core.audit")
    assert tuple(line) == ("operator@example.org", "replay", "the terminal is back")
    again = await api.change("failed.replay", "operator", ids=ids[:1])
    assert again.json()["moved"] == [] and again.json()["left"] == {"pending": 1}


async def test_pages_follow_each_other_and_have_a_bound(api: Client, conn: asyncpg.Connection) -> None:
    """Cursors, and at most 200 on a page (OPS-3, S9)."""
    ids = {str(id) for id in await fail(conn, 5)}
    for verb, named in (("failed.list", "events"), ("events.search", "events")):
        seen: list[str] = []
        cursor: dict[str, Any] = {}
        while True:
            page = (await api.read(verb, limit=2, **cursor)).json()
            seen += [each["id"] for each in page[named]]
            if page["next"] is None:
                break
            cursor = {"before": page["next"]}
        assert len(seen) == 5 and set(seen) == ids
    assert problem(await api.read("failed.list", limit=201), 422)["field"] == "limit"


# --- who may do what ---


@pytest.mark.parametrize("role", [None, "viewer", "operator", "admin", "unknown"])
async def test_roles_are_checked_before_anything_is_read(api: Client, role: str | None) -> None:
    """Each verb for each role; who may not gets no other answer, whatever the arguments are (OPS-3, S11)."""
    for name, verb in VERBS.items():
        call = api.change if verb.changes else api.read
        # Nonsense: whoever may use the verb is told so, and nobody else.
        response = await call(name, role, nonsense="1")
        if role in (None, "unknown"):
            problem(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        elif not TOKENS[role].may(verb.role):
            assert str(verb.role) in problem(response, 403)["problem"]
        else:
            problem(response, 422)


async def test_only_a_bearer_token_opens_the_door(api: Client) -> None:
    """A cookie never does, so that no site can act for a browser; nor do two tokens, or other schemes (S10, S12)."""
    path = "/status"
    for headers in (
        {"cookie": "holdfast=admin; session=admin"},
        {"authorization": "Basic YWRtaW46YWRtaW4="},
        {"authorization": "Bearer "},
        {"authorization": "admin"},
    ):
        problem(await api.get(path, headers=headers), 401)
    twice = [("authorization", "Bearer admin"), ("authorization", "Bearer admin")]
    problem(await api.get(path, headers=twice), 401)
    problem(await api.get("/openapi.json"), 401)
    problem(await api.get("/no/such"), 401)
    with_both = await api.get(path, headers={"authorization": "Bearer viewer", "cookie": "a=b"})
    assert with_both.status_code == 200


async def test_the_host_is_checked(dsn: str) -> None:
    """Also with a token, also on loopback (S15)."""
    async with serving(dsn, allowed_hosts=["ops.example.org"]) as api:
        for host, status in (("evil.example", 421), ("ops.example.org", 200), ("localhost:8424", 200), ("[::1]", 200)):
            response = await api.get("/notify/show", headers={**api.as_("viewer"), "host": host})
            assert response.status_code == status, host


# --- what is shown ---


async def test_viewers_see_the_shape_of_payloads(dsn: str, conn: asyncpg.Connection) -> None:
    """Keys, types and sizes; the values are for operators, and a hook has the first word (S11)."""
    (id,) = await fail(conn)
    secret = json.dumps({"card": "4111111111111111", "lines": [{"qty": 2}]})
    await conn.execute("UPDATE core.outbox SET payload = $1::text::jsonb, headers = $1::text::jsonb", secret)
    async with serving(dsn) as api:
        for verb, query in (("events.show", {"id": str(id)}), ("failed.list", {})):
            for role in ("viewer", "operator"):
                response = await api.read(verb, role, payload="true", **query)
                assert ("4111" in response.text) == (role == "operator")
                assert '"card"' in response.text
        shown = (await api.read("events.show", id=str(id), payload="true")).json()
        assert shown["payload"] == {"card": "text, 16", "lines": [{"qty": "number"}]} == shown["headers"]
        assert (await api.read("events.show", id=str(id))).json()["payload"] is None
    hidden = Redaction(values_from=Role.ADMIN)
    async with serving(dsn, redaction=hidden) as api:
        assert "4111" not in (await api.read("events.show", "operator", id=str(id), payload="true")).text
        problem(await api.change("events.reveal", "viewer", id=str(id), reason="a complaint"), 403)
        assert problem(await api.change("events.reveal", "operator", id=str(id)), 422)["field"] == "reason"
        assert "4111" in (await api.change("events.reveal", "operator", id=str(id), reason="a complaint")).text
        assert await actions(conn) == ["event.reveal"]
        again = await api.change("events.reveal", "operator", key="once", id=str(id), reason="a complaint")
        assert "Idempotency-Key" in problem(again, 400)["problem"]
        assert await conn.fetchval("SELECT count(*) FROM core.idempotency_records") == 0
        assert await actions(conn) == ["event.reveal"]
    hook = Redaction(redact=lambda who, event_type, value: {"for": who.name, "type": event_type})
    async with serving(dsn, redaction=hook) as api:
        response = await api.read("events.show", "admin", id=str(id), payload="true")
        assert response.json()["payload"] == {"for": "admin@example.org", "type": "order.placed"}


# --- what is refused ---


async def test_errors_say_what_to_do_and_tell_no_secrets(dsn: str, api: Client, conn: asyncpg.Connection) -> None:
    """A status for each kind; no traceback, no payload and no address of the database (OPS-3, S7, S8)."""
    (id,) = await fail(conn)
    assert problem(await api.read("events.show", id="x"), 422)["field"] == "id"
    assert problem(await api.read("events.show", id=ID), 404)["field"] == "id"
    assert problem(await api.read("events.search", state="delivered", since="yesterday"), 422)["field"] == "since"
    assert problem(await api.read("failed.groups", handler="nodot"), 422)["field"] == "handler"
    assert problem(await api.change("failed.discard", ids=[str(id)]), 422)["field"] == "reason"
    assert problem(await api.change("failed.replay", reason="all"), 422)["field"] == "selection"
    assert problem(await api.change("events.cancel_many", event_type="no.such"), 409)
    assert problem(await api.change("retention.set", entity="x", active_days=1), 422)["field"] == "entity"
    for payload in ('{"card": "4111", "x": "\\ud800"}', '{"card": "4111", "x": "\\u0000"}', '["4111"]'):
        body = f'{{"id": "{uuid4()}", "payload": {payload}}}'
        headers = {**api.as_("admin"), "content-type": "application/json"}
        edited = await api.post("/failed/edit", content=body, headers=headers)
        assert "4111" not in edited.text and problem(edited, edited.status_code)
    problem(await api.get("/no/such", headers=api.as_("viewer")), 404)
    refused = await api.post("/status", headers=api.as_("viewer"))
    assert problem(refused, 405) and refused.headers["allow"]
    assert await states(conn) == {"failed": 1} and await actions(conn) == []
    async with serving("postgresql://nobody:hunter2@127.0.0.1:1/nothing") as away:
        response = await away.read("status")
        assert problem(response, 503) and response.headers["retry-after"] == "1"
        assert "hunter2" not in response.text and "127.0.0.1" not in response.text
    async with serving(dsn, read_timeout=0.05) as hurried, conn.transaction():
        await conn.execute("LOCK core.outbox IN ACCESS EXCLUSIVE MODE")
        assert "narrow" in problem(await hurried.read("events.search"), 504)["remedy"]


async def test_bodies_and_queries_have_bounds(api: Client, dsn: str) -> None:
    """What is too large, not JSON, or said twice is refused before anything is read (S9)."""
    headers = {**api.as_("admin"), "content-type": "application/json"}
    for body, status in (
        (b"{", 400),
        (b"", 400),
        (b"[]", 422),
        (b'"x"', 422),
        (b"[" * 100_000, 400),
        (b'{"reason": "' + b"x" * (1 << 20) + b'"}', 413),
        (b'{"reason": NaN}', 422),
        (b"\xff\xfe", 400),
    ):
        problem(await api.post("/failed/replay", content=body, headers=headers), status)
    problem(await api.post("/failed/replay", content=b"a=b", headers=api.as_("admin")), 415)
    problem(await api.post("/failed/replay?all=true", json={}, headers=api.as_("admin")), 400)
    problem(await api.get(f"/failed/list?handler={'x' * 9000}", headers=api.as_("viewer")), 400)
    twice = await api.get("/failed/list?limit=1&limit=2", headers=api.as_("viewer"))
    assert "more than once" in problem(twice, 422)["problem"]


# --- idempotent requests ---


async def test_a_key_makes_a_change_once(api: Client, conn: asyncpg.Connection) -> None:
    """A retry gets the stored answer; a key belongs to who sent it, and to one request (OPS-3, IDM-1)."""
    ids = [str(id) for id in await fail(conn, 2)]
    first = await api.change("failed.replay", "operator", key="retry-1", ids=ids[:1], reason="fixed")
    again = await api.change("failed.replay", "operator", key="retry-1", ids=ids[:1], reason="fixed")
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert first.json()["moved"] == ids[:1] and again.headers["cache-control"] == "no-store"
    assert await actions(conn) == ["replay"]
    other = await api.change("failed.replay", "operator", key="retry-1", ids=ids[1:], reason="fixed")
    assert other.status_code == 409 and await states(conn) == {"pending": 1, "failed": 1}
    another = await api.change("failed.replay", "admin", key="retry-1", ids=ids[1:], reason="fixed")
    assert another.json()["moved"] == ids[1:]
    assert (await api.change("failed.replay", "viewer", key="retry-2", ids=ids)).status_code == 403
    listed = (await api.read("requests.list")).json()["requests"]
    assert [each["scope"] for each in listed if "operator@" in each["scope"]] != [] and "retry-1" not in str(listed)


async def test_the_role_of_operators_is_enough(conn: asyncpg.Connection, logins: Logins) -> None:
    """For reads, for changes and for the records of requests (OBX-2, OPS-3)."""
    ids = [str(id) for id in await fail(conn, 2)]
    async with serving(logins.dsn_of("login_operator")) as api:
        assert (await api.read("status")).status_code == 200
        done = await api.change("failed.replay", key="k-1", ids=ids, reason="fixed")
        assert done.status_code == 200, done.text
        assert (await api.change("failed.replay", key="k-1", ids=ids, reason="fixed")).json() == done.json()
    async with serving(logins.dsn_of("login_producer")) as api:
        response = await api.read("status")
        assert problem(response, 503) and "core" not in response.text


# --- in the console ---


async def test_a_console_has_the_api_and_no_browser_s_cookie_opens_it(filled: str, consoles: Any) -> None:
    """Under the prefix of the console, by the tokens of its provider, and with what it may show (OPS-3, S12)."""

    class ByToken:
        """Knows browsers by whatever they send, and tools by their tokens."""

        async def principal(self, asking: Asking) -> Principal | None:
            token = asking.bearer()
            return Principal("ann", Role.ADMIN) if token is None else TOKENS.get(token)

    console = consoles(filled, provider=ByToken())
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/ops", console)]))
    async with Client(transport=transport, base_url="http://127.0.0.1:8424/ops") as browser:
        assert (await browser.get("/", headers={"accept": "text/html"})).status_code == 200
        problem(await browser.get("/api/v1/status", headers={"accept": "text/html"}), 401)
        problem(
            await browser.post("/api/v1/failed/replay", json={"all": True}, headers={"sec-fetch-site": "none"}), 401
        )
        found = await browser.get("/api/v1/failed/list?payload=true&limit=1", headers=browser.as_("viewer"))
        assert found.status_code == 200 and len(found.json()["events"]) == 1
        assert found.headers["cache-control"] == "no-store"
        tried = await browser.post(
            "/api/v1/failed/replay", json={"all": True, "dry_run": True}, headers=browser.as_("operator")
        )
        assert tried.status_code == 200 and tried.json()["dry_run"]
        evil = {**browser.as_("admin"), "origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        assert (await browser.post("/api/v1/failed/replay", json={"all": True}, headers=evil)).status_code == 403
