"""Secrets and data that errors quote reach neither table, log, Sentry nor metrics (SEC-1, T9, S7, S8)."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import reduce
from random import Random
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy
import structlog
from pydantic import BaseModel, ValidationError

from holdfast import EventEnvelope, HandlerRegistry, Reject, RetryPolicy, Worker, WorkerSettings
from holdfast.cli import logs
from holdfast.cli.targets import load_redactor
from holdfast.errors import ConfigurationError
from holdfast.event_data import EventData
from holdfast.failure import describe, state
from holdfast.integrations.sentry import SentryObserver
from holdfast.observability.logging import log_fact
from holdfast.operator import Operator
from holdfast.reactions.reactions import Reactions
from holdfast.redact import redact_secrets, unredacted
from tests.observability.test_worker_sentry import DSN, Recorder
from tests.worker.support import Facts, publish, until

pytestmark = pytest.mark.trust

CANARY = "canary2718281828"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "GET https://api.example/x?api_key=canary&page=1 failed",
            "GET https://api.example/x?api_key=***&page=1 failed",
        ),
        ("cannot connect to postgresql://u:canary@db/x", "cannot connect to postgresql://u:***@db/x"),
        ("Authorization: Bearer canary\nx", "Authorization: ***\nx"),
        ("{'Authorization': 'Bearer canary', 'Accept': 'x'}", "{'Authorization': ***, 'Accept': 'x'}"),
        ("sent with bearer canary123", "sent with bearer ***"),
        ("ALTER ROLE x PASSWORD 'it''s canary' VALID UNTIL 'x'", "ALTER ROLE x PASSWORD *** VALID UNTIL 'x'"),
        ("CREATE USER u IDENTIFIED BY 'canary'", "CREATE USER u IDENTIFIED BY ***"),
        ("psql --password canary -h db", "psql --password *** -h db"),
        ('the password "canary" is known', "the password *** is known"),
        ("its password is canary, sir", "its password is ***, sir"),
        ("session_id=canary sessionid=canary", "session_id=*** sessionid=***"),
        ("jwt=canary otp=canary csrf=canary", "jwt=*** otp=*** csrf=***"),
        ("encryptionKey=canary;AccountKey=canary;", "encryptionKey=***;AccountKey=***;"),
        ("credentials=('u', 'canary') failed", "credentials=*** failed"),
        ("x AKIACANARY7CANARY7X y", "x *** y"),
        ("x-api-key: canary", "x-api-key: ***"),
        ("X-Auth: canary", "X-Auth: ***"),
        ("client_secret='canary' and key=canary", "client_secret=*** and key=***"),
        ('{"access_token": "canary", "n": 1}', '{"access_token": ***, "n": 1}'),
        ("jwt eyJhbGciOi.eyJjYW5hcnk.canary is expired", "jwt *** is expired"),
        ("AKIACANARYCANARY1234 is no key", "*** is no key"),
        ("no\nDETAIL:  Key (email)=(canary) already exists.\nHINT:  x", "no\nDETAIL:  ***\nHINT:  x"),
        ("failed: Key (email)=(canary) already exists.", "failed: Key (email)=(***"),
        ("Key (email, (lower(name)))=(canary, x) already exists", "Key (email, (lower(name)))=(***"),
        ("Schlüssel »(email)=(canary)« existiert bereits.", "Schlüssel »(email)=(***"),
        ("PASSWORD: canary", "PASSWORD: ***"),
        ("login refused, password:canary, user:ann", "login refused, password:***, user:ann"),
        ("DB_PASSWORD=canary failed", "DB_PASSWORD=*** failed"),
        ("pass=canary user=ann", "pass=*** user=ann"),
        ("ldap bind cn=x pw=canary", "ldap bind cn=x pw=***"),
        ("secret_key='canary', n=1", "secret_key=***, n=1"),
        ("client_secret: canary", "client_secret: ***"),
        ("api-key: canary", "api-key: ***"),
        ("token: canary123 is unknown", "token: *** is unknown"),
        ("the secret: canary=", "the secret: ***"),
        ("  password: 'canary two'\n  user: ann", "  password: ***\n  user: ann"),
        ("bad [type=int, input_value='canary', input_type=str]", "bad [type=int, input_value=***, input_type=str]"),
        ("[parameters: ('canary',)]", "[parameters: ***"),
    ],
)
def test_secrets_in_a_text(text: str, expected: str) -> None:
    """The secret goes, what happened stays; a second redaction changes nothing (T9, S8)."""
    assert redact_secrets(text) == expected
    assert redact_secrets(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'order'",
        "Bearer authentication required",
        "status_code=404",
        "the password is too short",
        "password is required",
        "identified by its id",
        "run --password-file /etc/x",
        "spin=3",
        "max_tokens=100",
        "no key: x",
        "",
        'password authentication failed for user "u"',
        "  password: Field required",
        "password: must have 8 characters",
        "Unexpected token: SELECT",
        "invalid token: expired",
        "Error in signature: missing",
        "a secret: none was given",
        "first pass: 3 of 4",
        "primary_key: 17",
        "bypass: on",
        "f(password: str) takes 1 argument",
        "monkey: 4 bananas",
        "the tokens: a, b",
        "auth_token: value is missing",
        "surveyJson.parse(x)",
        "passed: 3, failed: 4",
    ],
)
def test_texts_without_secrets(text: str) -> None:
    """What tells causes apart stays (DLQ-7)."""
    assert redact_secrets(text) == text


def test_values_of_the_payload() -> None:
    """Also quoted or escaped, and inside other values; short ones stay. Keys that are data are no places (T9, S7)."""
    payload = {"customer": {"email": "ann@example.com"}, "notes": ["it's \n a secret"], "size": "XL", "a b": "somebody"}
    error = ValueError(f"no {payload['customer']!r}, {payload['notes']}, size XL, somebody")  # type: ignore[index]
    expected = "ValueError: no {'email': '<payload.customer.email>'}, [\"<payload.notes.0>\"], size XL, <payload.*>"
    assert describe(error, None, EventData(payload)).text == expected
    assert describe(error, unredacted, EventData(payload)).text == f"ValueError: {error}"
    assert state("for somebody", "rejected", None, EventData(payload)).text == "for <payload.*>"


SECRET_TEXT = 'Canary 4111 of Ann \u00c9lodie\nand "Bob" \U0001f600 with a tail'
QUOTED: dict[str, tuple[str, EventData, str]] = {
    "the beginning": (f"bad {SECRET_TEXT[:18]}!", EventData({"s": SECRET_TEXT}), "bad <payload.s>!"),
    "the middle": (f"near {SECRET_TEXT[8:18]}…", EventData({"s": SECRET_TEXT}), "near <payload.s>…"),
    "capitals": (f"near {SECRET_TEXT.upper()}", EventData({"s": SECRET_TEXT}), "near <payload.s>"),
    "Python": (f"near {SECRET_TEXT!r}", EventData({"s": SECRET_TEXT}), "near '<payload.s>'"),
    "JSON": (f"near {json.dumps([SECRET_TEXT])}", EventData({"s": SECRET_TEXT}), 'near ["<payload.s>"]'),
    "a part of JSON": (f"x{json.dumps(SECRET_TEXT)[20:40]}", EventData({"s": SECRET_TEXT}), "x<payload.s>"),
    "a number": ("card 4111111111111111 declined", EventData({"n": [4111111111111111]}), "card <payload.n.0> declined"),
    "a part of a number": ("card 41111111 declined", EventData({"n": -4111111111111111}), "card <payload.n> declined"),
    "a fraction": ("at 52.520008", EventData({"lat": 52.520008}), "at <payload.lat>"),
    "short numbers": ("17 of 99999 at 1.5", EventData({"a": 17, "b": 99999, "c": 1.5}), "17 of 99999 at 1.5"),
    "a huge number": ("none", EventData({"n": 10**10_000}), "none"),
    "a key that is data": ("no ann@example.com", EventData({"x": {"ann@example.com": 1}}), "no <payload.x.*>"),
    "a key that is a name": ("no customer", EventData({"customer": 1}), "no customer"),
    "two that begin alike": ("order-0002", EventData({"a": "order-0001", "b": "order-0002"}), "<payload.b>"),
    "one after the other": ("ann-smithben-smile", EventData(["ann-smith", "ben-smile"]), "<payload.0><payload.1>"),
    "a header": ("{'tenant': 'CANARY'}", EventData({}, {"tenant": "CANARY"}), "{'tenant': '<headers.tenant>'}"),
    "the correlation": ("in chain-12345", EventData({}, {"correlation_id": "chain-12345"}), "in chain-12345"),
    "the key": ("conflict for Order-17", EventData({}, {}, "order-17"), "conflict for <idempotency_key>"),
    "a key that is the id": (str(UUID(int=7)), EventData({}, {}, str(UUID(int=7)), UUID(int=7)), str(UUID(int=7))),
    "a secret after words of the payload": (
        "password=hunter2", EventData({"note": "my password=none"}), "<payload.note>***"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", QUOTED)
def test_what_is_quoted_of_an_event(kind: str) -> None:
    """Parts of eight characters, whatever their case, numbers, headers and the key; what happened stays (T9, S7)."""
    text, event, expected = QUOTED[kind]
    assert state(text, "rejected", None, event).text == expected
    assert state(text, "rejected", unredacted, event).text == state(text, "rejected").text.replace("***", "hunter2")


HOSTILE = (
    "x-", "a", "a:", "a://", "a://b", "a.b%", ",a:", ":/", "?a=", "&a", "a@", "\\", "\\'", "password='", "password=\\",
    "key-", "secret_", "Basic ", "token ", "token:", "password: ", "password:", "api_key", "eyJ-", "eyJaaaaa", "Key (",
    ")=(", "for query argument $1 ", ': "', ": '", "“", "'", '"', "=(", "::", "1.", "[SQL: ", "input_value=",
    "-----BEGIN PRIVATE KEY-----", "tls+a-", "postgres://", "DETAIL: ", "01", "f:", "/a", " ", "\n", "password is ",
    "--", "--a", "identified by ", "credentials=(", "token=[", "password '",
)  # fmt: skip


def seconds(act: Callable[[], object]) -> float:
    started = time.thread_time()
    act()
    return time.thread_time() - started


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_texts_take_no_longer_than_others(piece: str) -> None:
    """A payload quoted in an error does not stop the loop, whatever it repeats and however it ends (T9)."""
    size = 64 * 1024
    harmless = ("an ordinary sentence about order 17; " * size)[:size]
    usual = max(seconds(lambda: describe(asyncpg.DataError(harmless))), 0.005)
    text = (piece * size)[:size]
    for hostile in (text, f"@ {text}", f"{text[:16_000]}@", f"{text[:8_000]}=", f"{text[:16_000]}\nx"):
        taken = min(seconds(lambda hostile=hostile: describe(asyncpg.DataError(hostile))) for _ in range(2))
        assert taken < 20 * usual, f"{hostile[:20]!r} … {hostile[-20:]!r} took {taken:.3f} s, not {usual:.3f} s"


LETTERS = "".join(map(chr, Random(7).choices(range(97, 123), k=256_000)))
HOSTILE_PAYLOADS: dict[str, tuple[str, object]] = {
    "many strings": ("an ordinary sentence " * 800, [f"{n:06}" for n in range(28_000)]),
    "strings that nearly match": ("a" * 16_000, ["a" * 25 + f"b{n}" + "a" * 25 for n in range(4_500)]),
    "one that is all quoted": (LETTERS[:16_000], LETTERS),
    "one that repeats itself": ("a" * 16_000, ["a" * 256_000]),
    "pieces that are everywhere": (LETTERS[:16_000], [LETTERS[n % 16_000 :][:6] for n in range(0, 180_000, 5)]),
    "escapes": ("\\u00fc\\n" * 2_000, ["ü\n" * 100_000]),
    "many numbers": ("an ordinary sentence " * 800, [1_000_000 + n for n in range(32_000)]),
    "places that contain values": ("v00040 " * 2_300, {f"v{n:05}_" * 5: f"v{n + 1:05}" for n in range(40)}),
    "a deep place": ("secret-value " * 1200, reduce(lambda inner, _: {"k" * 40: inner}, range(500), "secret-value")),
}


@pytest.mark.parametrize("kind", HOSTILE_PAYLOADS)
def test_hostile_payloads_take_no_longer_than_others(kind: str) -> None:
    """Neither do 256 KB of values, and what replaces them does not grow without bound.

    It is less than 50 ms where nothing else runs (T9).
    """
    text, payload = HOSTILE_PAYLOADS[kind]
    event = EventData({"data": payload})
    taken = min(seconds(lambda: event.redact(text)) for _ in range(3))
    assert taken < 0.3 and len(event.redact(text)) < 1_000_000


def test_a_small_failure_costs_little() -> None:
    """A usual payload and a usual text take well below a millisecond (T9)."""
    event = EventData({"customer": {"email": "ann@example.com"}, "lines": [{"sku": f"sku-{n}"} for n in range(10)]})
    text = "could not charge the customer for the order: connection refused by the remote host after 3 attempts"
    assert min(seconds(lambda: event.redact(text)) for _ in range(20)) < 0.001


class Order(BaseModel):
    amount: int


def validation() -> BaseException:
    try:
        Order.model_validate({"amount": CANARY})
    except ValidationError as error:
        return error
    raise AssertionError


DRIVERS: dict[str, Callable[[], BaseException]] = {
    "asyncpg argument": lambda: asyncpg.DataError(f"invalid input for query argument $1: '{CANARY}' (an integer …)"),
    "sqlalchemy": lambda: sqlalchemy.exc.IntegrityError(
        f"INSERT INTO t VALUES ('{CANARY}')", {"card": CANARY}, Exception(f"no\nDETAIL:  ({CANARY})\n{CANARY}")
    ),
    "pydantic": validation,
    "pydantic quoted": lambda: RuntimeError(str(validation())),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_what_drivers_quote(kind: str) -> None:
    """Rows, statements, parameters and input (T9, S7)."""
    error = DRIVERS[kind]()
    assert CANARY in str(error) and CANARY not in describe(error).text


async def test_what_the_server_quotes(dsn: str, conn: asyncpg.Connection) -> None:
    """With both drivers, DETAIL over several lines and values in the message go; HINT and the message stay (T9, S7)."""
    await conn.execute("CREATE TABLE people (name text PRIMARY KEY CHECK (name <> E'x\\n" + CANARY + "'), age int)")
    await conn.execute("INSERT INTO people VALUES ($1)", f"a\n{CANARY}")
    statements = (
        f"INSERT INTO people VALUES (E'a\\n{CANARY}')",
        f"INSERT INTO people VALUES (E'x\\n{CANARY}')",
        f"SELECT '{CANARY}'::int",
        f"SELECT no_such('{CANARY}')",
    )
    for statement in statements:
        errors: list[BaseException] = []
        try:
            await conn.execute(statement)
        except asyncpg.PostgresError as error:
            errors.append(error)
        with psycopg.connect(dsn) as other:
            try:
                other.execute(statement)  # type: ignore[call-overload]
            except psycopg.Error as error:
                errors.append(error)
                other.rollback()
        for error in errors:
            text = describe(error).text
            assert CANARY not in text, text
            assert ("HINT" in text) == ("no_such" in statement)
        assert len(errors) == 2


def test_signatures_stay() -> None:
    """A signature depends neither on what is hidden nor on the length of a value (DLQ-7)."""
    for error in (*(make() for make in DRIVERS.values()), ValueError("postgres://u:pw@h/db of some one")):
        plain = describe(error, unredacted)
        assert describe(error).signature == plain.signature
    short, long = ({"name": name} for name in ("Ann", "Annabella"))
    seen = {describe(LookupError(f"no {each['name']!r}"), None, EventData(each)).signature for each in (short, long)}
    assert len(seen) == 1


async def test_table_log_sentry_and_metrics(dsn: str, conn: asyncpg.Connection) -> None:
    """An error with everything in it, retried and then failed, and a rejection; reactions alike (T9, SEC-1)."""
    stream, facts, transport = io.StringIO(), Facts(), Recorder()
    registry = HandlerRegistry()
    policy = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)

    def fault(event: EventEnvelope) -> Exception:
        return ConnectionError(f"card {event.payload['card']}: postgres://u:{CANARY}@h/x token={CANARY}")

    @registry.handler("order.placed", name="billing.charge", retry=policy)
    async def charge(event: EventEnvelope) -> None:
        raise fault(event)

    @registry.handler("order.placed", name="billing.refuse")
    async def refuse(event: EventEnvelope) -> Reject:
        return Reject(f"no such card: {event.payload['card']}")

    @registry.handler("order.seen", name="billing.see", via="in_process", retry=policy)
    async def see(event: EventEnvelope) -> None:
        raise fault(event)

    was = structlog.get_config()
    structlog.reset_defaults()
    try:
        logs.configure(stream)
        with SentryObserver(DSN, transport=transport) as sentry:
            observers = (log_fact, facts.append, sentry)
            async with Worker(dsn, registry, WorkerSettings(), observers=observers):
                await publish(conn, "order.placed", {"card": CANARY})
                await until(lambda: len(transport.events) == 2, what="both failures in Sentry")
            async with Reactions(dsn, registry, observers=observers) as reactions:
                identity, now = uuid4(), datetime.now(UTC)
                event = EventEnvelope(
                    event_id=identity, event_type="order.seen", event_version=1, occurred_at=now, source="shop",
                    payload={"card": CANARY}, idempotency_key=str(identity),
                )  # fmt: skip
                reactions.react(event)
                await reactions.drain()
                await until(lambda: len(transport.events) == 3, what="the reaction in Sentry")
    finally:
        structlog.configure(**was)
    rows = await conn.fetch("SELECT last_error, error_signature, failure_history::text FROM core.failed")
    assert len(rows) == 3
    async with Operator(dsn, actor="ann") as operator:
        metrics = await operator.metrics()
    for place in (repr(rows), stream.getvalue(), repr(facts), repr(transport.events), metrics):
        assert CANARY not in place
    assert "delivery_failed" in stream.getvalue() and "<payload.card>" in repr(rows)


def test_a_redactor_by_name() -> None:
    """`--redact` and HOLDFAST_REDACT name a function; `none` turns redaction off (SEC-1)."""
    assert load_redactor(None) is None and load_redactor("none") is unredacted
    assert load_redactor("holdfast.redact:redact_dsn") is not None
    for wrong in ("holdfast.redact", "holdfast.redact:nothing", "holdfast.redact:HIDDEN", "no_such_module:f"):
        with pytest.raises(ConfigurationError):
            load_redactor(wrong)
