"""One group is one cause: what tells failures apart, and what does not."""

from __future__ import annotations

import random
import string
import urllib.error
import uuid
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import httpx
import psycopg
import psycopg.errors
import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry, RetryPolicy
from holdfast.event_data import EventData
from holdfast.failure import describe
from holdfast.operator import Operator
from holdfast.retry import classify
from tests.worker.support import PATIENCE, drained, publish_many, running

pytestmark = pytest.mark.newcomer

ONCE = RetryPolicy(max_attempts=1)


class Bank:
    """A service that answers with a status, and with another id each time."""

    def charge(self, n: int, status: int) -> None:
        request = httpx.Request("POST", f"https://bank.example/v1/charges/{uuid.uuid4()}?n={n}")
        httpx.Response(status, request=request).raise_for_status()


class Order:
    lines: list[int]


# Twelve handlers, and what goes wrong in each: twenty causes. Every one gets the number of its event.
async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    n = event.payload["n"]
    Bank().charge(n, (400, 401, 404, 410)[n % 4])


async def refund(event: EventEnvelope) -> None:
    n = event.payload["n"]
    if n % 2:
        Bank().charge(n, 503)
    raise ConnectionError(f"bank{n}.example:443 refused connection {uuid.uuid4()}")


async def price(event: EventEnvelope) -> None:
    if event.payload["n"] % 2:
        event.payload["amount"]
    else:
        event.payload["currency"]


def pack(event: EventEnvelope) -> None:
    order: Any = Order()
    if event.payload["n"] % 2:
        order.lines  # noqa: B018
    else:
        order.weight  # noqa: B018


async def ledger(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    table = "postings" if event.payload["n"] % 2 else "accounts"
    await tx.execute(f"SELECT * FROM {table} WHERE id = {event.payload['n']}")


async def stock(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    n = event.payload["n"]
    await tx.execute("SELECT ($1::text || 'x')::int" if n % 2 else "SELECT 1 / (length($1::text) * 0)", str(n))


async def mail(event: EventEnvelope) -> None:
    raise ValueError(f"no address of customer {uuid.uuid4()} (try {event.payload['n']} of 99999)")


async def sms(event: EventEnvelope) -> None:
    raise ValueError(f"no address of customer {uuid.uuid4()} (try {event.payload['n']} of 99999)")


def invoice(event: EventEnvelope) -> None:
    raise FileNotFoundError(2, "No such file", f"/var/lib/shop/{uuid.uuid4()}/invoice-{event.payload['n']}.pdf")


async def audit(event: EventEnvelope) -> None:
    raise LookupError(f"no session {uuid.uuid4()} in <Store at 0x{event.payload['n'] * 4096:012x}>")


async def report(event: EventEnvelope) -> None:
    {}[f"sku-{event.payload['n']}-{uuid.uuid4().hex}"]


async def index(event: EventEnvelope) -> None:
    int(f"'{uuid.uuid4()}'")


HANDLERS = (charge, refund, price, pack, ledger, stock, mail, sms, invoice, audit, report, index)


async def test_twenty_causes_in_twelve_handlers_are_twenty_groups(dsn: str, conn: asyncpg.Connection) -> None:
    """Statuses, SQLSTATEs, names of keys, attributes and tables, and places; ids and numbers split nothing (DLQ-7)."""
    registry = HandlerRegistry()
    for function in HANDLERS:
        registry.add(f"shop.{function.__name__}", ("order.placed",), function, retry=ONCE)
    await publish_many(conn, "order.placed", 16)
    async with running(dsn, registry):
        await drained(conn, within=3 * PATIENCE)
    async with Operator(dsn, actor="ann@example.org") as operator:
        groups = (await operator.failed.groups()).groups
    assert sum(group.count for group in groups) == 12 * 16
    shown = [f"{group.name} {group.count} {group.raised_at} {group.sample_error}" for group in groups]
    assert len(groups) == 20, "\n".join(sorted(shown))
    assert all(group.raised_at and "operator/test_causes.py:" in group.raised_at for group in groups), shown


def at_one_line(error: BaseException) -> str:
    try:
        raise error
    except BaseException as caught:
        return describe(caught).signature


def shaped(name: str, **attributes: object) -> BaseException:
    """An error with the name and the attributes of a library's."""
    module, _, cls = name.rpartition(".")
    error: BaseException = type(cls, (Exception,), {"__module__": module})("no")
    vars(error).update(attributes)
    return error


def status_errors(status: int) -> dict[str, BaseException]:
    request = httpx.Request("GET", "https://bank.example")
    return {
        "httpx": httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request)),
        "requests": shaped("requests.exceptions.HTTPError", response=SimpleNamespace(status_code=status)),
        "aiohttp": shaped("aiohttp.client_exceptions.ClientResponseError", status=status),
        "urllib": urllib.error.HTTPError("https://bank.example", status, "no", Message(), None),
    }


@pytest.mark.parametrize("client", status_errors(400))
def test_statuses_tell_causes_apart(client: str) -> None:
    """Of every client, also behind an error of the application's own (DLQ-7)."""
    statuses = (400, 401, 404, 410, 500, 503)
    assert len({at_one_line(status_errors(status)[client]) for status in statuses}) == len(statuses)
    wrapped = set()
    for status in statuses:
        error = RuntimeError("the bank said no")
        error.__cause__ = status_errors(status)[client]
        wrapped.add(at_one_line(error))
    assert len(wrapped) == len(statuses)


def test_sqlstates_and_names_of_tables_tell_causes_apart() -> None:
    """Of asyncpg and psycopg, bare and wrapped by SQLAlchemy; values and numbers of rows do not (DLQ-7)."""

    def undefined(table: str) -> list[BaseException]:
        text = f'relation "{table}" does not exist'
        bare = asyncpg.UndefinedTableError(text), psycopg.errors.UndefinedTable(text)
        return [*bare, sqlalchemy.exc.ProgrammingError("SELECT 1", {}, bare[1])]

    for first, second in zip(undefined("orders"), undefined("invoices"), strict=True):
        assert at_one_line(first) != at_one_line(second)
    for first, second in zip(undefined("events_2026_01"), undefined("events_2026_02"), strict=True):
        assert at_one_line(first) == at_one_line(second)
    deadlock, conflict = asyncpg.DeadlockDetectedError("no"), asyncpg.SerializationError("no")
    assert at_one_line(deadlock) != at_one_line(conflict)
    values = [asyncpg.InvalidTextRepresentationError(f'invalid input syntax for type integer: "{x}"') for x in "ab"]
    assert len(set(map(at_one_line, values))) == 1


def test_a_key_that_the_event_names_is_data() -> None:
    """A country that the rates do not have is one cause, whatever the country (DLQ-7)."""

    def signature(country: str, key: str) -> str:
        try:
            {}[key]
        except KeyError as error:
            return describe(error, event=EventData({"to": [{"country": country}]})).signature
        return ""

    assert signature("FR", "FR") == signature("DE", "DE")
    assert signature("FR", "amount") != signature("FR", "currency")


def test_two_lines_of_one_function_are_two_causes_wherever_they_stand(tmp_path: Path) -> None:
    """Told apart by their text, which outlives a deployment; a line number does not (DLQ-7)."""
    code = "def load(text, which):\n{}    if which:\n        return int(text)\n    return int(text + text)\n"

    def signature(deployed: str, padding: str, which: bool) -> str:
        space: dict[str, Any] = {"__name__": "loader"}
        file = tmp_path / deployed / "loader.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code.format(padding))
        exec(compile(code.format(padding), file, "exec"), space)  # noqa: S102
        try:
            space["load"](str(uuid.uuid4()), which)
        except ValueError as error:
            return describe(error).signature
        return ""

    before = [signature("old", "", which) for which in (True, False)]
    after = [signature("new", "    # moved\n    # down\n", which) for which in (True, False)]
    assert before == after and len(set(before)) == 2


TEMPLATES: tuple[Callable[[str], str], ...] = (
    lambda value: f"order {value} is unknown",
    lambda value: f"no answer for {value} after 3 attempts",
)


@given(st.sampled_from(TEMPLATES), st.lists(st.uuids().map(str), min_size=2, max_size=5))
def test_ids_do_not_split_groups(template: Callable[[str], str], values: list[str]) -> None:
    """DLQ-7."""
    assert len({at_one_line(ValueError(template(value))) for value in values}) == 1


@given(st.data(), st.sampled_from(range(2)), st.sampled_from(range(4)))
def test_values_of_one_kind_do_not_split_groups(data: st.DataObject, which: int, kind: int) -> None:
    """Numbers, quoted values, times and addresses (DLQ-7)."""
    kinds = (
        st.integers(min_value=0, max_value=2**63).map(str),
        st.text(st.characters(codec="ascii", exclude_characters="'\"\n\\`", min_codepoint=32), max_size=30).map(
            lambda text: f"'{text}'"
        ),
        st.ip_addresses(v=4).map(str),
        st.uuids().map(lambda value: value.hex if value.hex[:8].isdigit() else str(value)),
    )
    values = data.draw(st.lists(kinds[kind], min_size=2, max_size=4))
    signatures = {at_one_line(ValueError(TEMPLATES[which](value))) for value in values}
    assert len(signatures) <= (2 if kind == 3 else 1)


def framework_error(name: str) -> BaseException:
    """An error of a class that has the name of a framework's, and a subclass of the application's."""
    module, _, cls = name.rpartition(".")
    base = type(cls, (Exception,), {"__module__": module})
    return type("Mine", (base,), {"__module__": "shop.models"})("no")


@pytest.mark.parametrize(
    "error",
    [
        sqlalchemy.exc.NoResultFound("no row"),
        sqlalchemy.exc.MultipleResultsFound("two rows"),
        framework_error("django.core.exceptions.ValidationError"),
        framework_error("django.core.exceptions.PermissionDenied"),
        framework_error("django.core.exceptions.ObjectDoesNotExist"),
        framework_error("django.core.exceptions.MultipleObjectsReturned"),
        framework_error("django.http.response.Http404"),
    ],
    ids=lambda error: str(type(error).__mro__[1].__name__),
)
def test_what_frameworks_raise_for_bad_requests_is_terminal(error: BaseException) -> None:
    """Validation, permission and not found, by the name of the class (RTY-2)."""
    assert classify(error).terminal
    assert not classify(framework_error("shop.errors.ValidationError")).terminal


def test_djangos_own_errors_are_terminal() -> None:
    """The names are Django's (RTY-2)."""
    exceptions = pytest.importorskip("django.core.exceptions")
    http = pytest.importorskip("django.http")
    names = ("ValidationError", "PermissionDenied", "ObjectDoesNotExist", "MultipleObjectsReturned")
    assert all(classify(getattr(exceptions, name)("no")).terminal for name in names)
    assert classify(http.Http404()).terminal


def raised(error: BaseException, payload: object = None) -> str:
    try:
        raise error
    except BaseException as caught:
        return describe(caught, event=EventData(payload)).signature


def member(text: str) -> Exception:
    try:
        raise ValueError(text) if "left" in text else LookupError(text)
    except Exception as error:
        return error


def test_a_group_of_errors_is_the_set_of_its_causes() -> None:
    """How many members fail for one cause, and in which order, depends on the day (DLQ-7)."""
    left, right = "order 17 is left", "order 18 is right"

    def of(*texts: str) -> str:
        return raised(ExceptionGroup("unhandled errors in a TaskGroup", [member(text) for text in texts]))

    assert len({of(left), of(left, left), of(left, "order 9 is left", left)}) == 1
    assert of(left, right) == of(right, left) == of(right, left, right, left, right, left, right)
    assert len({of(left), of(right), of(left, right)}) == 3
    nested = ExceptionGroup("inner", [member(left), ExceptionGroup("inmost", [member(right)])])
    other = ExceptionGroup("inner", [ExceptionGroup("inmost", [member(right)]), member(left), member(left)])
    assert raised(nested) == raised(other)


def test_ids_of_letters_and_digits_do_not_split_groups() -> None:
    """With dashes, and of random letters of both cases (DLQ-7)."""
    chance = random.Random(7)

    def of(characters: str, length: int) -> str:
        return "".join(chance.choices(characters, k=length))

    makers: tuple[Callable[[], str], ...] = (
        lambda: f"order Ord-2026-{of('0123456789ABCDEF', 4)} is closed",
        lambda: f"order ord-2026-{of('0123456789abcdef', 4)} is closed",
        lambda: f"file {of(f'{string.ascii_letters}{string.digits}_-', 24)} is gone",
    )
    for make in makers:
        assert len({at_one_line(ValueError(make())) for _ in range(50)}) == 1
    ids = ("uy6HdjNBwuLxVTEaOVTU", "0-_xTrZq8LmWbYc3Kd_P", "qWzRtYpLkJhGfDsAxCvB")
    assert len({at_one_line(ValueError(f"file {id} is gone")) for id in ids}) == 1
    names = ("X-REQUEST-ID", "X-TRACE-ID", "OrderPlacedHandler", "InvoiceSentHandler", "read-only", "write-only")
    assert len({at_one_line(ValueError(f"no {name} here")) for name in names}) == len(names)


def test_words_that_are_values_of_the_payload_do_not_split_groups() -> None:
    """Short ones too; but not the short words that every text has (DLQ-7)."""

    def of(text: str, value: str) -> str:
        return raised(ValueError(text.format(value)), {"to": [{"value": value}]})

    values = ("Ann", "Bo", "Annabelle", "Ann Smith", "EUR", "US", "eur", "Ann-5", "Zoë")
    assert len({of("customer {} has no address", value) for value in values}) == 1
    assert of("is no", "is") == of("is no", "no") == of("is no", "x") == of("is no", "17")
    assert of("customer 17 of 3", "17") == of("customer 17 of 3", "x")
    assert of("Annual report", "Ann") == of("Annual report", "Bob")


def test_names_of_keys_tell_causes_apart() -> None:
    """With dashes, spaces and a digit too, and also when the event has the name as a value; ids do not (DLQ-7)."""
    keys = ("x-request-id", "content-type", "first name", "last name", "line1", "line2", "first_name", "amount")
    assert len({raised(KeyError(key), {"field": key}) for key in keys if " " not in key}) == len(keys) - 2
    assert len({raised(KeyError(key)) for key in keys}) == len(keys)
    ids = ("sku-1", "sku-22", "Ord-2026-A235", "order17", "order18", "uyZHdjNBwuLxVTEaOVTU", "17", str(uuid.uuid4()))
    assert len({raised(KeyError(key)) for key in ids}) == 1


def test_numbers_of_system_errors_tell_causes_apart() -> None:
    """A full disk and a full quota may have the same text (DLQ-7)."""
    assert raised(OSError(28, "cannot write")) != raised(OSError(122, "cannot write"))


def test_equal_lines_of_one_function_are_two_causes_wherever_they_stand(tmp_path: Path) -> None:
    """Told apart by their number among the equal lines (DLQ-7)."""
    code = "{}def load(text, which):\n{}    if which:\n        int(text)\n    else:\n        int(text)\n"

    def signature(deployed: str, above: str, padding: str, which: bool) -> str:
        space: dict[str, Any] = {"__name__": "loader"}
        file = tmp_path / deployed / "loader.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code.format(above, padding))
        exec(compile(file.read_text(), file, "exec"), space)  # noqa: S102
        try:
            space["load"](str(uuid.uuid4()), which)
        except ValueError as error:
            return describe(error).signature
        return ""

    before = [signature("old", "", "", which) for which in (True, False)]
    above = "def other(text):\n    int(text)\n\n"
    after = [signature("new", above, "    # moved\n", which) for which in (True, False)]
    assert before == after and len(set(before)) == 2
