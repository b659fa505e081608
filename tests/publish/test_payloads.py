"""The encoding of payloads, for values that JSON does not have (PUB-6)."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, NaiveDatetime, RootModel, SecretStr, TypeAdapter, field_serializer

from holdfast.encoding import MAX_DEPTH
from holdfast.errors import PayloadError
from holdfast.payload import encode, encode_payload

pytestmark = pytest.mark.newcomer

BERLIN = timezone(timedelta(hours=2))


class Colour(enum.Enum):
    RED = "red"
    PRICED = Decimal("1.10")


class Text(enum.StrEnum):
    A = "a"


class Odd(str, enum.Enum):  # noqa: UP042
    """Its text is not its value."""

    def __new__(cls, value: str) -> Odd:
        made = str.__new__(cls, value.upper())
        made._value_ = value
        return made

    A = "a"


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: Decimal
    y: int


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    sku: str
    price: Decimal
    at: datetime | None = None


class Order(BaseModel):
    order_id: UUID
    total: Decimal
    lines: list[Line] = []
    tags: set[str] = set()


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    order_id: int = Field(alias="orderId")
    secret: str = Field(default="s", exclude=True)


@pydantic.dataclasses.dataclass
class Validated:
    at: datetime
    amount: Decimal


ID = UUID("3b241101-e2bb-4255-8caf-4136c566a962")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Decimal("1.10"), "1.10"),
        (Decimal("1E+2"), "1E+2"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 600_000, tzinfo=BERLIN), "2026-01-02T03:04:05.600000+02:00"),
        (datetime(1890, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), "1889-12-31T23:06:32Z"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(9, 30), "09:30:00"),
        (timedelta(hours=1, minutes=30), "PT1H30M"),
        (ID, str(ID)),
        (Colour.RED, "red"),
        (Colour.PRICED, "1.10"),
        (Text.A, "a"),
        (Odd.A, "a"),
        (Level.HIGH, 3),
        (Point(Decimal("0.5"), 2), ["0.5", 2]),
        (Line("a", Decimal("1.10")), {"sku": "a", "price": "1.10", "at": None}),
        (
            Order(order_id=ID, total=Decimal("3.30"), lines=[Line("a", Decimal(1))], tags={"x"}),
            {
                "order_id": str(ID),
                "total": "3.30",
                "lines": [{"sku": "a", "price": "1", "at": None}],
                "tags": ["x"],
            },
        ),
        (Aliased(order_id=7), {"orderId": 7}),
        (
            Validated(datetime(2026, 1, 2, tzinfo=UTC), Decimal("0.10")),
            {"at": "2026-01-02T00:00:00Z", "amount": "0.10"},
        ),
    ],
)
def test_each_line_of_the_table(value: Any, written: Any) -> None:
    """Anywhere in a payload, and what handlers get is what publish returns (PUB-6)."""
    text, values = encode({"plain": 1, "a": [{"deep": value}]})
    assert json.loads(text) == values == {"plain": 1, "a": [{"deep": written}]}
    if isinstance(written, dict):
        assert json.loads(encode_payload(value)) == written


def test_what_publish_returns_is_no_longer_the_callers() -> None:
    payload: dict[str, Any] = {"a": [1, {"b": None}]}
    values = encode(payload)[1]
    payload["a"][1]["b"] = 2
    assert values == {"a": [1, {"b": None}]}


class Moment(BaseModel):
    at: datetime


class Serialized(BaseModel):
    at: NaiveDatetime

    @field_serializer("at", when_used="json")
    def in_words(self, _at: datetime) -> str:
        return "noon"


NAIVE = datetime(2026, 1, 1)


@pytest.mark.parametrize(
    ("payload", "field", "text"),
    [
        ({"at": NAIVE}, "payload.at", "time zone"),
        ({"lines": (Line("a", Decimal(1), NAIVE),)}, "payload.lines[0].at", "time zone"),
        (Line("a", Decimal(1), NAIVE), "payload.at", "time zone"),
        (Moment(at=NAIVE), "payload.at", "time zone"),
        ({"orders": [Order(order_id=ID, total=Decimal(1), lines=[Line("a", Decimal(1), NAIVE)])]}, None, "time zone"),
        ({"n": Decimal("Infinity")}, "payload.n", "infinite"),
        ({"tags": {"a"}}, "payload.tags", "sorted"),
        ({"raw": memoryview(b"x")}, "payload.raw", "base64"),
        ({"class": Order}, "payload.class", "no encoding"),
        ({"line": Line}, "payload.line", "no encoding"),
        (Line, "payload", "pass an object of it"),
        ({"id": {ID: 1}}, "payload.id", "key of type UUID"),
        (RootModel[list[int]]([1]), "payload", "wrap"),
        ({"line": Line("a\0", Decimal(1))}, "payload.line.sku", "NUL"),
        ({"line": Line("\ud800", Decimal(1))}, "payload.line.sku", "surrogate"),
        ({"colour": enum.Enum("E", {"A": "x\0"}).A}, "payload.colour", "NUL"),  # type: ignore[attr-defined]
        ({"line": Line("a", float("nan"))}, "payload.line.price", "NaN"),  # type: ignore[arg-type]
        ({"key": Line({1: 2}, Decimal(1))}, "payload.key.sku", "key of type int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused_is_named_by_its_path(payload: Any, field: str | None, text: str) -> None:
    """PUB-3, PUB-6."""
    with pytest.raises(PayloadError) as refused:
        encode_payload(payload)
    assert text in str(refused.value)
    assert refused.value.field == (field or "payload.orders[0].lines[0].at")


def test_a_model_decides_how_a_naive_datetime_is_written() -> None:
    assert encode_payload(Serialized(at=NAIVE)) == '{"at":"noon"}'


class Unwritable(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: Any


def raising(error: BaseException) -> Any:
    class Raises(BaseModel):
        def model_dump(self, **_: Any) -> Any:
            raise error

    return Raises()


@dataclasses.dataclass(slots=True)
class Unset:
    a: int = dataclasses.field(init=False)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Unwritable(thing=object()), "payload.a"),
        (Unwritable(thing=b"\xff canary"), "payload.a"),
        (raising(ValueError("canary")), "payload.a"),
        (raising(Unprintable()), "payload.a"),
        (Unset(), "payload.a.a"),
    ],
)
def test_an_object_that_cannot_be_written_is_named(value: Any, field: str) -> None:
    """Without a word of what it holds (PUB-6)."""
    with pytest.raises(PayloadError) as refused:
        encode_payload({"a": value})
    assert refused.value.field == field
    assert "canary" not in str(refused.value)


@dataclasses.dataclass
class Node:
    child: Any = None


class NodeModel(BaseModel):
    child: Any = None


@pytest.mark.parametrize("kind", [Node, NodeModel])
def test_objects_that_contain_themselves_or_are_too_deep(kind: Callable[..., Any]) -> None:
    """A typed error, within a moment, whatever it is made of (PUB-6)."""
    loop = kind()
    loop.child = [loop]
    with pytest.raises(PayloadError) as refused:
        encode_payload({"a": loop})
    assert refused.value.field.startswith("payload.a")
    deep = kind()
    for _ in range(MAX_DEPTH - 1):
        deep = kind(child=deep)
    encode_payload(deep)
    for levels in (1, 5_000 if kind is Node else 10):
        deeper = deep
        for _ in range(levels):
            deeper = kind(child=deeper)
        with pytest.raises(PayloadError, match="nested deeper"):
            encode_payload(deeper)


def test_few_objects_that_would_be_written_as_gigabytes() -> None:
    value: Any = Node(1)
    for _ in range(40):
        value = Node([value, value])
    with pytest.raises(PayloadError, match="more values"):
        encode_payload({"bomb": value})


def test_the_cap_counts_what_is_written() -> None:
    """The size of an object is that of its JSON (PUB-3)."""
    order = Line("x" * 300_000, Decimal(1))
    with pytest.raises(PayloadError, match="bytes of JSON, 262144 are allowed"):
        encode_payload(order)


def test_a_secret_stays_one() -> None:
    """As pydantic writes it."""

    class Card(BaseModel):
        number: SecretStr

    assert "4242" not in encode_payload(Card(number=SecretStr("4242")))


values = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.datetimes(timezones=st.just(UTC)),
)


@given(values)
def test_values_are_written_as_pydantic_writes_them_and_read_back(value: Any) -> None:
    """One encoding, in a model and out of it; nothing is lost on the way (PUB-6)."""
    kind = TypeAdapter[Any](type(value))
    text = encode_payload({"a": value})
    assert json.loads(text)["a"] == kind.dump_python(value, mode="json")
    assert kind.validate_json(json.dumps(json.loads(text)["a"])) == value
