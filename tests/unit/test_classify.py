"""The classifier: which errors are worth a retry. Real errors of real libraries where there are any."""

import asyncio
import io
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import asyncpg
import psycopg
import psycopg.errors
import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from holdfast.errors import (
    AuthorizationFault,
    DomainFault,
    FieldError,
    NotFoundFault,
    PayloadError,
    TerminalHandlerError,
    TransientHandlerError,
    ValidationFault,
)
from holdfast.retry import RetryPolicy, Verdict, classify

TRANSIENT_STATES = (
    *("40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "08000", "08003", "08006", "08P01"),
    *("53100", "53200", "53300", "25006", "P0001", "XX000", "58030"),
)
TERMINAL_STATES = (
    *("22P02", "22P05", "22003", "23505", "23503", "23514", "23502", "23P01"),
    *("42601", "42501", "42P01", "42703"),
)
TERMINAL = Verdict(terminal=True)
TRANSIENT = Verdict(terminal=False)


class Order(BaseModel):
    id: int


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate({})
    return caught.value


def caused(outer: BaseException, cause: BaseException) -> BaseException:
    outer.__cause__ = cause
    return outer


class DjangoDatabaseError(Exception):
    """Django's wrappers have these names and keep the driver's error as their cause."""


DjangoDatabaseError.__name__ = "DatabaseError"


def django(name: str, cause: BaseException | None = None) -> BaseException:
    error: BaseException = type(name, (DjangoDatabaseError,), {"__module__": "django.db.utils"})(name)
    error.__cause__ = cause
    return error


def with_sqlstate(code: str) -> list[BaseException]:
    """One database error under the names that five libraries have for it."""
    plain = type("Error", (Exception,), {"sqlstate": code})("x")
    legacy = type("Error", (Exception,), {"pgcode": code})("x")
    return [
        plain,
        legacy,
        sqlalchemy.exc.DBAPIError("SELECT 1", {}, plain),
        sqlalchemy.exc.OperationalError("SELECT 1", {}, legacy),
        sqlalchemy.exc.DBAPIError("SELECT 1", {}, caused(Exception("adapted"), plain)),
        django("OperationalError", plain),
        django("DatabaseError", legacy),
    ]


# --- the rules that were decided on


@pytest.mark.parametrize(
    "error",
    [
        validation_error(),
        PayloadError("payload.a", "is bytes", "encode it"),
        TerminalHandlerError("no"),
        ValidationFault("no"),
        AuthorizationFault("no"),
        DomainFault("no"),
        NotFoundFault("no"),
        type("OutOfStock", (TerminalHandlerError,), {})("no"),
        type("IntegrityError", (Exception,), {})("no sqlstate"),
        type("AlreadyPaid", (type("IntegrityError", (Exception,), {}),), {})("a subclass"),
    ],
)
def test_terminal_by_default(error: BaseException) -> None:
    """RTY-2."""
    assert classify(error) == TERMINAL


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError(),
        ConnectionResetError(),
        TimeoutError(),
        TimeoutError(),
        OSError("disk"),
        ValueError("from the handler's own code"),
        KeyError("x"),
        FieldError("delay", "is negative", "give seconds"),
        Exception("anything"),
        type("OperationalError", (Exception,), {})("no sqlstate"),
        type("InterfaceError", (Exception,), {})("no sqlstate"),
        TransientHandlerError("later"),
        # RELIABILITY A12: raised by a handler, these must neither stop the worker nor fail the event.
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(404),
        GeneratorExit(),
        MemoryError(),
        RecursionError(),
        BaseException("odd"),
    ],
)
def test_transient_by_default(error: BaseException) -> None:
    """What is not known to be terminal is retried (RTY-2)."""
    assert classify(error) == TRANSIENT


def test_a_policy_adds_terminal_errors() -> None:
    """A ValueError of the handler's own is transient unless the policy lists it (RTY-2)."""
    policy = RetryPolicy(terminal_errors=(ValueError, TimeoutError, SystemExit))
    assert classify(UnicodeError("a subclass"), policy) == TERMINAL
    assert classify(TimeoutError(), policy) == TERMINAL
    assert classify(SystemExit(1), policy) == TERMINAL
    assert classify(caused(RuntimeError(), ValueError()), policy) == TERMINAL
    assert classify(KeyError(), policy) == TRANSIENT


# --- databases


@pytest.mark.parametrize(
    "code",
    TRANSIENT_STATES,
)
def test_transient_sqlstates(code: str) -> None:
    """Under every library's name for the error; the unknown is transient (RTY-2, C6)."""
    assert [classify(error) for error in with_sqlstate(code)] == [TRANSIENT] * 7


@pytest.mark.parametrize("code", TERMINAL_STATES)
def test_terminal_sqlstates(code: str) -> None:
    """Bad data, broken constraints, statements that cannot work (RTY-2, C6)."""
    assert [classify(error) for error in with_sqlstate(code)] == [TERMINAL] * 7


@pytest.mark.parametrize("text", ["deadlock detected", "duplicate key value violates unique constraint", "23505"])
def test_texts_are_never_read(text: str) -> None:
    """RELIABILITY C2: lc_messages may be anything."""
    assert classify(Exception(text)) == TRANSIENT
    assert classify(type("E", (Exception,), {"sqlstate": "23505"})("verrou mortel")) == TERMINAL


def test_what_was_set_on_a_builtin_error_counts() -> None:
    error = RuntimeError("of a driver")
    assert classify(error) == TRANSIENT
    error.sqlstate = "23505"  # type: ignore[attr-defined]
    assert classify(error) == TERMINAL


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (asyncpg.UniqueViolationError("x"), TERMINAL),
        (asyncpg.ForeignKeyViolationError("x"), TERMINAL),
        (asyncpg.InvalidTextRepresentationError("x"), TERMINAL),
        (asyncpg.UndefinedTableError("x"), TERMINAL),
        (asyncpg.exceptions._base.DataError("invalid input for query argument $1"), TERMINAL),
        (asyncpg.DeadlockDetectedError("x"), TRANSIENT),
        (asyncpg.SerializationError("x"), TRANSIENT),
        (asyncpg.LockNotAvailableError("x"), TRANSIENT),
        (asyncpg.QueryCanceledError("x"), TRANSIENT),
        (asyncpg.AdminShutdownError("x"), TRANSIENT),
        (asyncpg.TooManyConnectionsError("x"), TRANSIENT),
        (asyncpg.ConnectionDoesNotExistError("x"), TRANSIENT),
        (asyncpg.ReadOnlySQLTransactionError("x"), TRANSIENT),
        (asyncpg.InterfaceError("connection is closed"), TRANSIENT),
        (asyncpg.RaiseError("x"), TRANSIENT),
        (psycopg.errors.UniqueViolation("x"), TERMINAL),
        (psycopg.errors.CheckViolation("x"), TERMINAL),
        (psycopg.errors.NumericValueOutOfRange("x"), TERMINAL),
        (psycopg.errors.SyntaxError("x"), TERMINAL),
        (psycopg.IntegrityError("x"), TERMINAL),
        (psycopg.DataError("text fields cannot contain NUL"), TERMINAL),
        (psycopg.errors.DeadlockDetected("x"), TRANSIENT),
        (psycopg.errors.SerializationFailure("x"), TRANSIENT),
        (psycopg.errors.QueryCanceled("x"), TRANSIENT),
        (psycopg.errors.DiskFull("x"), TRANSIENT),
        (psycopg.OperationalError("server closed the connection"), TRANSIENT),
        (psycopg.InterfaceError("the connection is closed"), TRANSIENT),
        (sqlalchemy.exc.IntegrityError("s", {}, psycopg.errors.UniqueViolation("x")), TERMINAL),
        (sqlalchemy.exc.IntegrityError("s", {}, Exception("no sqlstate")), TERMINAL),
        (sqlalchemy.exc.ProgrammingError("s", {}, psycopg.errors.UndefinedTable("x")), TERMINAL),
        (sqlalchemy.exc.DBAPIError("s", {}, asyncpg.UniqueViolationError("x")), TERMINAL),
        (sqlalchemy.exc.OperationalError("s", {}, psycopg.OperationalError("gone")), TRANSIENT),
        (sqlalchemy.exc.DBAPIError("s", {}, asyncpg.DeadlockDetectedError("x")), TRANSIENT),
        (sqlalchemy.exc.InterfaceError("s", {}, Exception("gone")), TRANSIENT),
        (sqlalchemy.exc.TimeoutError("pool"), TRANSIENT),
        (django("IntegrityError", psycopg.errors.UniqueViolation("x")), TERMINAL),
        (django("IntegrityError"), TERMINAL),
        (django("DataError", psycopg.errors.NumericValueOutOfRange("x")), TERMINAL),
        (django("ProgrammingError", psycopg.errors.UndefinedTable("x")), TERMINAL),
        (django("OperationalError", psycopg.errors.DeadlockDetected("x")), TRANSIENT),
        (django("InterfaceError"), TRANSIENT),
        (django("OperationalError"), TRANSIENT),
    ],
    ids=repr,
)
def test_real_database_errors(error: BaseException, verdict: Verdict) -> None:
    """The classifier knows asyncpg's, psycopg's, SQLAlchemy's and Django's names (RTY-2)."""
    assert classify(error) == verdict


def test_the_state_decides_where_the_wrappers_name_would_not() -> None:
    """Django files a serialization failure under OperationalError, a bad value under DataError (RTY-2)."""
    assert classify(django("OperationalError", asyncpg.UniqueViolationError("x"))) == TERMINAL
    assert classify(django("IntegrityError", asyncpg.DeadlockDetectedError("x"))) == TRANSIENT


def test_an_applications_own_data_error_is_not_a_drivers() -> None:
    assert classify(type("DataError", (Exception,), {})("stale")) == TRANSIENT


# --- HTTP


def responding(status: object, headers: dict[str, str] | None = None) -> list[BaseException]:
    """One status as httpx and requests, aiohttp, openai and urllib tell it."""
    fields: list[dict[str, Any]] = [
        {"response": SimpleNamespace(status_code=status, headers=headers)},
        {"response": SimpleNamespace(status=status, headers=headers)},
        {"status": status, "headers": headers},
        {"status_code": status, "headers": headers},
    ]
    found: list[BaseException] = [type("HTTPStatusError", (Exception,), values)() for values in fields]
    if isinstance(status, int):
        message = Message()
        for name, value in (headers or {}).items():
            message[name] = value
        found.append(urllib.error.HTTPError("http://x", status, "x", message, io.BytesIO()))
    return found


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 507, 599])
def test_transient_statuses(status: int) -> None:
    """What passes, and every 5xx (RTY-2)."""
    assert [classify(error) for error in responding(status)] == [TRANSIENT] * 5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 413, 422, 451])
def test_terminal_statuses(status: int) -> None:
    """Other 4xx (RTY-2)."""
    assert [classify(error) for error in responding(status)] == [TERMINAL] * 5


@pytest.mark.parametrize("status", [200, 302, 399, 600, 1006, None, "404", True, 404.0])
def test_what_is_no_http_error_decides_nothing(status: object) -> None:
    assert {classify(error) for error in responding(status)} == {TRANSIENT}


def test_a_code_is_a_status_only_on_an_http_error() -> None:
    """Elsewhere it is an exit status or a close code."""
    assert classify(type("ConnectionClosed", (Exception,), {"code": 404})()) == TRANSIENT


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("name", ["Retry-After", "retry-after"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("86400", 300.0),
        ("9" * 500, 300.0),
        ("0", None),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 9998 07:28:00 GMT", 300.0),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_honoured_within_the_policys_cap(
    status: int, name: str, value: str, expected: float | None
) -> None:
    """RTY-2."""
    verdicts = [classify(error) for error in responding(status, {name: value})]
    assert verdicts == [Verdict(terminal=False, retry_after=expected)] * 5


def test_retry_after_may_be_a_date() -> None:
    """RTY-2."""
    header = {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)}
    for error in responding(503, header):
        wait = classify(error).retry_after
        assert wait is not None and 90 < wait <= 100


def test_retry_after_makes_a_conflict_transient_but_not_a_refusal() -> None:
    """400, 401, 403 and 404 stay terminal, whatever they carry (RTY-2)."""
    assert {classify(error) for error in responding(409, {"Retry-After": "2"})} == {Verdict(False, 2.0)}
    for status in (400, 401, 403, 404):
        assert {classify(error) for error in responding(status, {"Retry-After": "2"})} == {TERMINAL}


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [(5, 5.0), (1e9, 300.0), (10**400, 300.0), (-1, None), (0, None), (float("nan"), None), (True, None), ("5", None)],
)
def test_a_handler_may_say_when(retry_after: Any, expected: float | None) -> None:
    """RTY-2."""
    error = TransientHandlerError("busy", retry_after=retry_after)
    assert classify(error) == Verdict(terminal=False, retry_after=expected)


# --- chains


def test_an_explicit_cause_decides_when_the_error_itself_does_not() -> None:
    """RTY-2."""
    assert classify(caused(RuntimeError(), caused(KeyError(), asyncpg.UniqueViolationError("x")))) == TERMINAL
    assert classify(caused(RuntimeError(), validation_error())) == TERMINAL
    assert classify(caused(RuntimeError(), responding(404)[0])) == TERMINAL


def test_the_outermost_decisive_error_wins() -> None:
    """RTY-2."""
    assert classify(caused(TransientHandlerError(), DomainFault())) == TRANSIENT
    assert classify(caused(DomainFault(), TimeoutError())) == TERMINAL
    assert classify(caused(TimeoutError(), asyncpg.UniqueViolationError("x"))) == TRANSIENT


def test_an_implicit_context_decides_nothing() -> None:
    error = RuntimeError()
    error.__context__ = DomainFault()
    assert classify(error) == TRANSIENT


def test_cycles_and_long_chains_end() -> None:
    """RELIABILITY D4."""
    first, second = RuntimeError(), RuntimeError()
    first.__cause__, second.__cause__ = second, first
    assert classify(first) == TRANSIENT
    wrapper = sqlalchemy.exc.DBAPIError("s", {}, first)
    assert classify(wrapper) == TRANSIENT
    first.__cause__, wrapper.__cause__ = wrapper, first
    assert classify(wrapper) == TRANSIENT
    near = caused(RuntimeError(), DomainFault())
    for _ in range(8):
        near = caused(RuntimeError(), near)
    far = caused(RuntimeError(), near)
    assert (classify(near), classify(far)) == (TERMINAL, TRANSIENT)
    chain: BaseException = DomainFault()
    for _ in range(10_000):
        chain = caused(RuntimeError(), chain)
    assert classify(chain) == TRANSIENT
    while (shorter := chain.__cause__) is not None:
        chain.__cause__ = None
        chain = shorter


def test_a_group_is_terminal_when_one_of_it_is() -> None:
    """A task group fails every time if one of its tasks does (RTY-2)."""
    assert classify(ExceptionGroup("g", [TimeoutError(), DomainFault()])) == TERMINAL
    assert classify(ExceptionGroup("g", [ExceptionGroup("h", [validation_error()])])) == TERMINAL
    slow, slower = (TransientHandlerError(retry_after=wait) for wait in (2, 9))
    assert classify(ExceptionGroup("g", [slow, KeyError(), slower])) == Verdict(False, 9.0)
    assert classify(BaseExceptionGroup("g", [asyncio.CancelledError(), KeyError()])) == TRANSIENT
    assert classify(ExceptionGroup("g", [KeyError()] * 100_000)) == TRANSIENT


@given(st.sampled_from(["sqlstate", "pgcode", "orig", "response", "status", "status_code", "headers"]), st.data())
def test_it_never_raises(name: str, data: st.DataObject) -> None:
    """Whatever an exotic error carries, or does when it is asked (RTY-2)."""

    def refuse(_: object) -> None:
        raise RuntimeError("not now")

    odd = st.none() | st.integers() | st.text() | st.binary() | st.floats() | st.just(property(refuse))
    error = type("OddError", (Exception,), {name: data.draw(odd)})()
    assert isinstance(classify(error), Verdict)


def test_a_class_that_only_calls_its_module_builtins_is_asked_like_any_other() -> None:
    """Code that is executed without a module's name makes such classes (RTY-2)."""
    duplicate = type("Duplicate", (asyncpg.UniqueViolationError,), {"__module__": "builtins"})
    missing = type("Missing", (Exception,), {"__module__": "builtins", "status_code": 404})
    for error in (duplicate("twice"), missing("no such order")):
        assert classify(error, RetryPolicy()).terminal
