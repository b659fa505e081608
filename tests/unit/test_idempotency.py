"""Keys, hashes and answers without I/O (IDM-1, IDM-2)."""

from __future__ import annotations

import asyncio
import json
import string
import threading
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import asyncpg
import django.db
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import PendingRollbackError

from holdfast.errors import ConfigurationError, FieldError
from holdfast.idempotency import IdempotencySettings, answers, job_key
from holdfast.idempotency.answers import Answer, Settlement, replayed, settlement_of, stored
from holdfast.idempotency.asgi.messages import HeldResponse
from holdfast.idempotency.exchange import Exchange, ExchangeConfig, StopEndpoint, run_now
from holdfast.idempotency.faults import Fault, fault_of_settling, fault_of_taking, fault_of_work, log_fields
from holdfast.idempotency.hashing import HashedRequest, Secrets, canonical_json, canonical_query
from holdfast.idempotency.keys import (
    LONGEST_SCOPE,
    KeyInvalid,
    KeyMissing,
    http_scope,
    job_scope,
    parse_key,
    require_key,
    require_scope,
)
from holdfast.idempotency.phases import Decided
from holdfast.observing import DirectObservers
from holdfast.postgres.faults import is_conflict
from holdfast.postgres.idempotency import ExistingRecord, Records
from holdfast.postgres.managed_transaction import open_managed_transaction, uninterrupted
from holdfast.postgres.queries import Queries
from holdfast.retry import sqlstate_of

SETTINGS = IdempotencySettings()
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)
BARE = st.text(sorted(set(map(chr, range(0x21, 0x7F))) - set('",;\\')), min_size=1, max_size=255)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abé\u2028\t"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4),
    max_leaves=20,
)


# --- keys ---


@given(PRINTABLE)
def test_a_quoted_key_is_what_was_quoted(key: str) -> None:
    """Row 3: whatever a client puts into an RFC 8941 string."""
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_key([quoted.encode()]) == key


@given(BARE)
def test_a_bare_key_is_the_same_as_quoted(key: str) -> None:
    """Row 3."""
    assert parse_key([key.encode()]) == parse_key([f' "{key}"\t'.encode()]) == key


@given(st.lists(st.binary(max_size=600), max_size=3))
def test_anything_else_is_an_error_of_two_kinds(fields: list[bytes]) -> None:
    """Rows 2 and 3: never another exception, never a key that could not be stored."""
    try:
        key = parse_key(fields)
    except (KeyMissing, KeyInvalid) as error:
        assert isinstance(error, KeyMissing) == (
            not fields or (len(fields) == 1 and fields[0].strip(b" \t") in (b"", b'""'))
        )
    else:
        assert require_key(key) == key


def test_keys_of_jobs() -> None:
    """The same parts, the same key; different parts, different keys (IDM-2)."""
    assert job_key(7, "send-reminder", "o-1") == "job:7:send-reminder:o-1"
    for parts in (("", "x"), ("a:b", "x"), ("a", "x:y"), ("a", "x", ""), ("ä", "x"), ("a" * 250, "x")):
        with pytest.raises(FieldError, match="key"):
            job_key(parts[0], parts[1], *parts[2:])
    for key in ("", "x" * 256, "a\n", None):
        with pytest.raises(FieldError):
            require_key(key)  # type: ignore[arg-type]
    for scope in ("", " ", "a\0", "a\n", None, 17, "x" * 1021):
        with pytest.raises(ConfigurationError):
            require_scope(scope)  # type: ignore[arg-type]
        for made in (http_scope, job_scope):
            with pytest.raises(ConfigurationError, match="scope"):
                made(scope)  # type: ignore[arg-type]


def test_scopes_of_requests_and_jobs_are_apart() -> None:
    """Row 14, IDM-2: by their kind; and whatever the route, a scope can be stored and is nobody else's."""
    assert (http_scope("jobs"), job_scope("jobs")) == ("http:jobs", "job:jobs")
    assert http_scope("alice", "POST /orders") == "http:alice POST /orders"
    routes = ["POST /" + "x" * size for size in (900, 1020, 5000, 5001)] + ["POST /a\0b", "POST /a\nb", "POST /\ud800"]
    owners = ["alice", "x" * 1015, "x" * 1016, "x" * 1020, "\U0001f600" * 255]
    scopes = [http_scope(owner, route) for owner in owners for route in ("", *routes)]
    scopes += [job_scope(owner) for owner in owners] + [http_scope(scope) for scope in scopes if len(scope) < 100]
    assert len({*scopes}) == len(scopes)
    for scope in scopes:
        assert scope.isprintable() and len(scope.encode()) <= LONGEST_SCOPE
        assert scope.startswith(("http:", "http-sha256:", "job:", "job-sha256:"))


@pytest.mark.parametrize("route", ["POST /orders", "POST /" + "x" * 2000, "POST /a\nb"])
def test_no_owner_is_called_like_the_hash_of_another(route: str) -> None:
    """Of an owner with a space a hash is stored, where keys belong to a route (SEC-1, IDM-2)."""
    hashed = sha256(b"Acme Ltd").hexdigest()
    scopes = [http_scope(owner, route) for owner in ("Acme Ltd", hashed, f"sha256 {hashed}", f"sha256:{hashed}")]
    assert len({*scopes}) == 4
    assert all(len(scope) <= LONGEST_SCOPE and scope.isprintable() for scope in scopes)


def read_key(fields: list[bytes], *, required: bool, scope: Any = "alice") -> str | Answer | None:
    """The key that an exchange reads in the fields, or its answer."""
    config = ExchangeConfig(
        secrets=Secrets({1: "x" * 16}), settings=SETTINGS, records=Records(), observe=DirectObservers(())
    )
    exchange = Exchange(config, "POST /", fields)
    try:
        exchange.identify(scope, route="", required=required)
    except StopEndpoint:
        assert isinstance(exchange.phase, Decided)
        return exchange.phase.answer
    return exchange.key


def test_how_a_key_is_read() -> None:
    """Rows 2 and 3: one is needed or not, and what cannot be read is refused in any case."""
    for required in (True, False):
        assert read_key([b"k"], required=required) == "k"
        for fields in ([b"a", b"a"], [b"two words"], [b"x" * 256]):
            assert read_key(fields, required=required).status == 400  # type: ignore[union-attr]
    for fields in ([], [b""], [b'""']):
        missing = read_key(fields, required=True)
        assert isinstance(missing, Answer) and b"idempotency-key-missing" in missing.body
    assert read_key([], required=False) is None
    empty = read_key([b""], required=False)
    assert isinstance(empty, Answer) and b"idempotency-key-invalid" in empty.body


@pytest.mark.newcomer
@pytest.mark.parametrize(
    ("field", "what"),
    [(b"two words", "a space"), (b"a,b", "a comma"), (b"a;b", "a semicolon"), (b'a"b', "a quotation mark"),
     (b"a\\b", "a backslash"), (b"caf\xe9", "a character")],
    ids=["space", "comma", "semicolon", "quote", "backslash", "latin-1"],
)  # fmt: skip
def test_an_invalid_key_is_told_what_is_wrong(field: bytes, what: str) -> None:
    """Row 3: a space is printable ASCII, so that alone explains nothing; quoted, it is a key."""
    refused = read_key([field], required=True)
    assert isinstance(refused, Answer)
    detail = json.loads(refused.body)["detail"]
    assert f"has {what}, which only a quoted key" in detail and "into quotation marks if it has a space" in detail
    if field.isascii():
        quoted = field.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        assert read_key([b'"%b"' % quoted], required=True) == field.decode()


def test_a_caller_that_is_not_identified() -> None:
    """Text that the client has caused gets a problem; what is not text is a mistake of the application (S18)."""
    for scope in ("", "  ", "a\n", "x" * 1021):
        refused = read_key([b"k"], required=True, scope=scope)
        assert isinstance(refused, Answer) and refused.status == 400
        assert b"idempotency-scope-invalid" in refused.body
    with pytest.raises(ConfigurationError):
        read_key([b"k"], required=True, scope=None)


# --- errors ---


FAULTS = [  # of taking the key, of the work, of keeping the answer and the commit
    ("40001", Fault.PASSING, Fault.PASSING, Fault.PASSING),
    ("40P01", Fault.PASSING, Fault.PASSING, Fault.PASSING),
    ("23505", Fault.PASSING, Fault.PASSING, Fault.PASSING),
    ("55P03", Fault.IN_PROGRESS, Fault.PASSING, Fault.PASSING),
    ("57014", Fault.IN_PROGRESS, Fault.OWN, Fault.OWN),
    ("57P01", Fault.UNAVAILABLE, Fault.UNAVAILABLE, Fault.UNAVAILABLE),
    ("08006", Fault.UNAVAILABLE, Fault.UNAVAILABLE, Fault.UNAVAILABLE),
    ("53300", Fault.UNAVAILABLE, Fault.UNAVAILABLE, Fault.UNAVAILABLE),
    ("23503", Fault.UNAVAILABLE, Fault.OWN, Fault.OWN),
    ("42P01", Fault.UNAVAILABLE, Fault.OWN, Fault.OWN),
]


@pytest.mark.parametrize(("state", "taking", "work", "ending"), FAULTS, ids=[row[0] for row in FAULTS])
def test_what_an_error_means(state: str, taking: Fault, work: Fault, ending: Fault) -> None:
    """Rows 12, 16 and 17: by its code, whichever driver brings it and whoever has wrapped it."""
    bare = asyncpg.PostgresError.new({"C": state, "M": "x"})
    wrapped = django.db.DatabaseError("x")
    wrapped.__cause__ = psycopg.errors.lookup(state)("x")
    for error in (bare, wrapped):
        found = fault_of_taking(error), fault_of_work(error), fault_of_settling(error)
        assert found == (taking, work, ending)
        assert is_conflict(error) is (state in ("40001", "40P01"))


def test_what_an_error_without_a_code_means() -> None:
    """Rows 10 and 17: a server that is gone says nothing; everything else is the endpoint's, until the commit."""
    for lost in (psycopg.OperationalError("gone"), django.db.OperationalError("gone")):
        assert fault_of_work(lost) is fault_of_settling(lost) is fault_of_taking(lost) is Fault.UNAVAILABLE
    for own in (RuntimeError("broken"), psycopg.ProgrammingError("wrong"), asyncpg.InterfaceError("busy")):
        assert (fault_of_work(own), fault_of_settling(own)) == (Fault.OWN, Fault.UNAVAILABLE)
    refused = ConfigurationError("the view", "is wrong", "mend it")
    assert fault_of_work(refused) is fault_of_settling(refused) is Fault.OWN
    assert not is_conflict(RuntimeError("broken"))


# --- hashes ---


@given(JSON, st.randoms(use_true_random=False))
def test_the_same_json_in_other_words_is_the_same(value: Any, random: Any) -> None:
    """Row 11: white space, escapes and the order of keys."""

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(member)) for key, member in value.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffled(member) for member in value] if isinstance(value, list) else value

    plain = json.dumps(value)
    other = json.dumps(shuffled(value), indent=random.choice([None, 1, 4]), ensure_ascii=random.choice([True, False]))
    assert canonical_json(plain) == canonical_json(other.encode())


@given(JSON, JSON)
def test_other_json_is_another_one(one: Any, other: Any) -> None:
    """Row 13: what is not the same text after sorting is not the same."""
    first, second = (json.dumps(value, sort_keys=True) for value in (one, other))
    assert (canonical_json(first) == canonical_json(second)) == (first == second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1.0", "1.00"),
        ("100", "1e2"),
        ("12345678901234567890", "12345678901234567891"),
        ("0.1000000000000000055511151231257827", "0.1"),
        ('"1"', "1"),
        ('"NaN"', "NaN"),
        ('{"a":1}', '{"a":1,"a":1}'),
        ('{"a":1,"a":2}', '{"a":2,"a":1}'),
        ('{"a":2}', '{"a":1,"a":2}'),
        ('{"a":1,"a":2}', '["a",[["a",1],["a",2]]]'),
        ("[]", "{}"),
        ("null", '"null"'),
        ("[[1],2]", "[1,[2]]"),
    ],
)
def test_what_must_not_be_confused(one: str, other: str) -> None:
    """Row 13: no digit is lost, no repeated key is dropped, as jsonb would."""
    assert canonical_json(one) != canonical_json(other)


def test_what_is_no_json_is_compared_byte_by_byte() -> None:
    """Row 13: the application will refuse it; the hash must not fail on it."""
    for body in (b"{", b"\xff", b'"\\u0000"', b"[" * 100_000):
        request = HashedRequest("POST", b"/", b"", b"application/json", body)
        assert request.parts()[-2:] == [body, b"raw"]


def test_every_part_counts() -> None:
    """Row 13: and where one part ends and the next begins."""
    secrets = Secrets({1: "x" * 16})
    request = ("POST", b"/a", b"q=1", b"text/plain", b"body")
    variants = [
        ("PATCH", *request[1:]),
        ("POST", b"/b", *request[2:]),
        ("POST", b"/a", b"q=2", *request[3:]),
        ("POST", b"/a", b"q=1", b"text/html", b"body"),
        ("POST", b"/a", b"q=1", b"text/plain", b"bodyx"),
        ("POST", b"/aq=1", b"", b"text/plain", b"body"),
    ]
    hashes = {secrets.hashes("alice", HashedRequest(*each).parts())[0] for each in (request, *variants)}
    assert len(hashes) == 7
    assert canonical_query(b"b=2&a=1&b=1") == canonical_query(b"a=1&b=2&b=1") != canonical_query(b"a=1&b=1&b=2")


@given(st.binary(max_size=200))
def test_any_query_has_a_hash(query: bytes) -> None:
    """Row 13: whatever bytes a client sends; and what comes of it is as good as what it came from."""
    canonical = canonical_query(query)
    assert canonical.isascii()
    assert canonical_query(canonical) == canonical


@given(st.tuples(st.binary(min_size=1), st.binary()), st.tuples(st.binary(min_size=1), st.binary()))
def test_other_parameters_are_another_query(one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> None:
    """Row 13: every byte counts, in whatever encoding, and also where it is none."""
    first, second = (canonical_query(f"{quote(name)}={quote(value)}".encode()) for name, value in (one, other))
    assert (first == second) == (one == other)


def test_a_query_may_be_written_with_or_without_escapes() -> None:
    """Row 13: the bytes are the same."""
    written = [canonical_query(query) for query in (b"n=%C3%A9", b"n=%c3%a9", "n=é".encode())]
    assert written == [b"n=%C3%A9"] * 3
    assert canonical_query(b"n=%E9") not in written


def test_secrets_have_numbers() -> None:
    """The highest signs; what is too short or has no number is refused, and none is ever shown (IDM-1)."""
    secrets = Secrets({1: "first secret 1234", 3: b"third secret 1234"})
    assert secrets.version == 3
    assert secrets.hashes("alice", [b"x"])[1:] == Secrets({1: "first secret 1234"}).hashes("alice", [b"x"])
    assert "first" not in repr(secrets)
    assert secrets.shown("s", "k") == secrets.shown("s", "k") != secrets.shown("t", "k")
    for wrong in ({}, {0: "x" * 16}, {1: "short"}, {"1": "x" * 16}, ["x" * 16]):
        with pytest.raises(ConfigurationError, match="secrets"):
            Secrets(wrong)  # type: ignore[arg-type]


# --- answers ---


def test_the_settlement_of_every_status() -> None:
    """Rows 7 to 10."""
    passing = {401, 403, 408, 425, 429}
    undo, roll_back = Settlement.STORE_REFUSAL, Settlement.ROLL_BACK
    for status in range(200, 600):
        success = status < 400
        refused = roll_back if status in passing or status >= 500 else undo
        assert settlement_of(status, SETTINGS, keyed=True) is (Settlement.STORE if success else refused)
        assert settlement_of(status, SETTINGS, keyed=False) is (Settlement.COMMIT if success else roll_back)
        nothing_stored = IdempotencySettings(store_4xx=False)
        assert settlement_of(status, nothing_stored, keyed=True) is (Settlement.STORE if success else roll_back)
        if status >= 500:
            assert settlement_of(status, IdempotencySettings(store_5xx=True), keyed=True) is undo


def test_headers_that_are_never_stored() -> None:
    """Row 11, S18: not even when asked."""
    headers = [
        (name.encode(), b"x") for name in ("Set-Cookie", "Date", "X-Other", "Content-Type", "ETag", "Proxy-Status")
    ]
    kept = stored(Answer(201, headers, b""), SETTINGS).headers
    assert kept == [("content-type", "x"), ("etag", "x")]
    for name in ("Set-Cookie", "WWW-Authenticate", "Proxy-Authorization", "Transfer-Encoding"):
        with pytest.raises(ConfigurationError, match="keep_headers"):
            IdempotencySettings(keep_headers=(name,))


def test_an_unfinished_record_is_no_answer() -> None:
    """Row 18: it is not carried out again either."""
    assert replayed(ExistingRecord("unfinished"), SETTINGS).status == 409
    assert replayed(ExistingRecord("reused"), IdempotencySettings(mismatch_status=422)).status == 422


def test_problems_have_types_of_their_own() -> None:
    """Rows 2, 3, 5, 12, 13, 17 and 18."""
    settings = IdempotencySettings(problems="https://api.example.com/problems/")
    found = [
        answers.key_missing(settings),
        answers.key_invalid(settings, "is empty"),
        answers.body_too_large(settings),
        answers.in_progress(settings),
        answers.key_reused(settings),
        answers.not_replayable(settings),
        answers.unavailable(settings),
    ]
    types = [json.loads(answer.body)["type"] for answer in found]
    assert len(set(types)) == len(types)
    assert all(kind.startswith("https://api.example.com/problems/") and "//" not in kind[8:] for kind in types)
    assert [answer.header(b"retry-after") is not None for answer in found] == [False] * 3 + [True, False, False, True]


@pytest.mark.parametrize(
    "wrong",
    [{"keep": 0}, {"wait": -1}, {"retries": 11}, {"mismatch_status": 400}, {"methods": "POST"}, {"methods": ("GET",)},
     {"keep_headers": "X"}, {"response_limit": 2**40}, {"wait": True}],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        IdempotencySettings(**wrong)


# --- what surrounds them ---


def test_a_coroutine_that_never_suspends_is_run_without_a_loop() -> None:
    """Django's exchange; one that would wait for a loop is a defect, and is said to be one (IDM-1)."""

    async def value(suspends: bool) -> int:
        if suspends:
            await asyncio.sleep(0)
        return 17

    async def failing() -> None:
        raise KeyError("x")

    assert run_now(value(suspends=False)) == 17
    with pytest.raises(KeyError):
        run_now(failing())
    with pytest.raises(RuntimeError, match="suspended"):
        run_now(value(suspends=True))


async def test_a_commit_is_not_cancelled_half_way() -> None:
    """Row 20: whoever waits may be cancelled, again and again; the work comes to its end."""
    story: list[str] = []

    async def commit() -> None:
        for step in string.ascii_lowercase[:5]:
            await asyncio.sleep(0)
            story.append(step)

    async def cancelled() -> None:
        await uninterrupted(commit())

    task = asyncio.create_task(cancelled())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == list("abcde")


class Lent:
    """Somebody's connection, which takes its time to come."""

    def __init__(self) -> None:
        self.asked, self.ready, self.returned = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> object:
        self.asked.set()
        assert self.ready.wait(10)
        return object()  # no connection that is known

    def __exit__(self, *error: object) -> None:
        self.returned.set()


async def test_a_connection_that_comes_too_late_is_given_back() -> None:
    """Row 17: to whoever waited too long, or does not wait any more."""
    late, cancelled = Lent(), Lent()
    with pytest.raises(TimeoutError):
        await open_managed_transaction(lambda: late, Queries(), 0.01, 0.01)
    waiting = asyncio.create_task(open_managed_transaction(lambda: cancelled, Queries(), 10, 10))
    assert await asyncio.to_thread(cancelled.asked.wait, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for lent in (late, cancelled):
        assert not lent.returned.is_set()
        lent.ready.set()
        assert await asyncio.to_thread(lent.returned.wait, 10)


async def test_what_is_no_connection_is_given_back() -> None:
    """Row 17: the error is the configuration's, and the pool does not lose one with every request."""
    lent = Lent()
    lent.ready.set()
    with pytest.raises(FieldError, match="tx"):
        await open_managed_transaction(lambda: lent, Queries(), 10, 10)
    assert lent.returned.is_set()


async def test_a_pool_in_place_of_its_connection_is_refused_and_stays_open() -> None:
    """Row 17: a pool is a context manager whose end would close it for all requests."""
    pool = asyncpg.create_pool("postgresql://nobody@127.0.0.1:1/nowhere", min_size=0)
    async with pool:
        with pytest.raises(ConfigurationError, match=r"connect returned Pool.*pass pool\.acquire"):
            await open_managed_transaction(lambda: pool, Queries(), 10, 10)
        assert not pool.is_closing()
    psycopg_pool = pytest.importorskip("psycopg_pool")
    waiting = psycopg_pool.AsyncConnectionPool("postgresql://nobody@127.0.0.1:1/nowhere", open=False)
    with pytest.raises(ConfigurationError, match=r"connect returned AsyncConnectionPool.*pass pool\.connection"):
        await open_managed_transaction(lambda: waiting, Queries(), 10, 10)


def test_a_second_start_is_another_response() -> None:
    """Row 11: nothing of the first one is left in it, and it has the whole limit."""
    held = HeldResponse(4)
    for status, body in ((200, b"half"), (500, b"oops")):
        assert held.take({"type": "http.response.start", "status": status}) is None
        assert held.take({"type": "http.response.body", "body": body, "more_body": True}) is None
    assert held.take({"type": "http.response.body"}) == Answer(500, [], b"oops")


@pytest.mark.parametrize(
    "kind", [PendingRollbackError, psycopg.ProgrammingError, asyncpg.InterfaceError, django.db.InterfaceError]
)
def test_logs_do_not_quote_the_errors_of_drivers(kind: type[Exception]) -> None:
    """Also without a code, and as the cause of another; other errors say what they have to say (S7)."""
    error = kind("[parameters: ('canary',)]")
    wrapped = RuntimeError("canary")
    wrapped.__cause__ = error
    assert log_fields(error) == {"error": f"{kind.__module__}.{kind.__qualname__}", "sqlstate": None}
    assert log_fields(wrapped) == {"error": "builtins.RuntimeError", "sqlstate": None}
    assert log_fields(OSError("no route"))["error"] == "OSError: no route"


def test_the_sqlstate_of_an_error() -> None:
    """Its own, or that of what it wraps or was caused by (RTY-2)."""

    class DriverError(Exception):
        sqlstate = "40001"

    class Wrapper(Exception):
        orig = DriverError()

    def caused() -> BaseException:
        try:
            raise ValueError from DriverError()
        except ValueError as error:
            return error

    assert [sqlstate_of(error) for error in (DriverError(), Wrapper(), caused(), ValueError())] == ["40001"] * 3 + [
        None
    ]
