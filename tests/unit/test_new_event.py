"""New events: every argument is checked before any SQL."""

import dataclasses
import enum
import json
import math
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from holdfast import Publisher
from holdfast.encoding import PayloadObject
from holdfast.errors import FieldError, PublishError
from holdfast.new_event import HEADERS_LIMIT, MAX_HEADERS, EventOptions, NewEvent, unknown_option
from holdfast.outbox_row import origin, plain, prepare

NOW = datetime(2026, 4, 25, 12, tzinfo=UTC)
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
SHOP = origin("shop", 0, "outbox_default")
SOON = datetime.now(UTC) + timedelta(hours=1)


class Type(enum.StrEnum):
    PLACED = "order.placed"


class Placed(BaseModel):
    event_type: ClassVar[str] = "order.placed"


class OldStyle(str, enum.Enum):  # noqa: UP042 - the kind whose str() is not its value
    PLACED = "order.placed"


class Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> None:
        return None


def new(**arguments: Any) -> NewEvent:
    return NewEvent(**{"event_type": "order.placed", "payload": {"order_id": "o-1"}} | arguments)


def refused(**arguments: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        new(**arguments)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", ["event_type", "target", "content_class"])
@pytest.mark.parametrize(
    "value",
    ["", " ", "a b", "a/b", "a*", "*", "a\0", "a\n", "a\u2028b", "a\u00a0b", "\ud800", "x" * 201, "ü" * 101, 5, b"a"],
)
def test_names_are_checked(name: str, value: Any) -> None:
    """A name that Postgres or a lane could not hold is refused by field (PUB-3)."""
    assert refused(**{name: value}).field == name


@pytest.mark.parametrize("value", ["order.placed", "Order_Placed-2", "bestellung.geprüft", "x" * 200, "订单.已创建"])
def test_names_are_lenient_otherwise(value: str) -> None:
    assert new(event_type=value, target=value).event_type == value


def test_the_message_recommends_a_form() -> None:
    assert "order.placed" in str(refused(event_type="order placed"))
    assert str(refused(event_type=Placed)) == "event_type is the class Placed; write Placed.event_type"
    assert str(refused(event_type=Placed())) == "event_type is an object of Placed; write Placed.event_type"
    assert str(refused(event_type=int)) == "event_type is the class int; pass text"


TEXTS = ["idempotency_key", "trace_context", "correlation_id", "causation_id", "key"]
KEYS = ["ordering_key", "fairness_key"]


@pytest.mark.parametrize("name", TEXTS + KEYS)
@pytest.mark.parametrize("value", ["", "a\0b", "a\nb", "\x1b[31m", "\x85", "\udc80", "x" * 256, 7, b"k"])
def test_texts_are_checked(name: str, value: Any) -> None:
    """PUB-3."""
    assert refused(**{name: value}).field == name


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", ["x" * 255, "job:1:send reminder/7", "👩\u200d💻", "😀" * 255])
def test_texts_are_lenient_otherwise(name: str, value: str) -> None:
    assert getattr(new(**{name: value}), name) == value


@pytest.mark.parametrize("name", KEYS)
def test_keys_have_at_most_800_bytes(name: str) -> None:
    """What an index can hold beside the longest names; and an event has one of the two (LSN-9, LSN-15)."""
    assert getattr(new(**{name: "😀" * 200}), name) == "😀" * 200
    assert refused(**{name: "😀" * 201}).field == name
    assert refused(ordering_key="a", fairness_key="b").field == "fairness_key"


def test_enum_members_become_plain_text() -> None:
    """A driver may write an enum member's name where its value is meant."""
    for member in (Type.PLACED, OldStyle.PLACED):
        row = prepare(new(event_type=member, key=member, target=member), origin(member, 0, "hot"))
        for value in (row.event_type, row.dedupe_key, row.target, row.source):
            assert type(value) is str and value == "order.placed"


@pytest.mark.parametrize(
    "arguments",
    [
        {"event_version": 0},
        {"event_version": 2**31},
        {"event_version": True},
        {"event_version": 1.0},
        {"event_version": "1"},
        {"priority": -1},
        {"priority": 3},
        {"priority": True},
        {"priority": 1.0},
        {"domain_id": str(ID)},
        {"domain_id": 5},
        {"event_id": str(ID)},
        {"channel": ""},
        {"channel": "Hot"},
        {"channel": "1st"},
        {"channel": "a-b"},
        {"channel": "a\n"},
        {"channel": "x" * 64},
        {"channel": "ü"},
        {"channel": 5},
        {"on_duplicate": "replace", "key": "k"},
        {"on_duplicate": "reschedule"},
    ],
)
def test_other_arguments_are_checked(arguments: dict[str, Any]) -> None:
    """Each refusal names its field (PUB-3)."""
    assert refused(**arguments).field == next(iter(arguments))


def test_rescheduling_needs_the_key_it_compares() -> None:
    """PUB-2."""
    assert "key=" in refused(on_duplicate="reschedule").remedy
    assert new(on_duplicate="reschedule", key="reminder:7").key == "reminder:7"


MOMENTS = ["occurred_at", "available_at", "expires_at"]


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 1),
        datetime(2026, 1, 1, tzinfo=Nowhere()),
        date(2026, 1, 1),
        "2026-01-01T00:00:00Z",
        1_767_225_600,
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, tzinfo=UTC),
    ],
)
def test_moments_are_aware_and_within_the_calendar(name: str, value: Any) -> None:
    """A time the database or a driver could not show is refused by field (PUB-3)."""
    assert refused(**{name: value}).field == name


@pytest.mark.parametrize("name", ["delay", "expires_in"])
@pytest.mark.parametrize(
    "value",
    [-1, -0.001, timedelta(seconds=-1), math.nan, math.inf, -math.inf, 10**400, True, "5", timedelta(days=3_654)],
)
def test_durations_are_checked(name: str, value: Any) -> None:
    """PUB-3."""
    assert refused(**{name: value}).field == name


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"delay": 1, "available_at": SOON}, "delay"),
        ({"expires_in": 1, "expires_at": SOON}, "expires_in"),
        ({"delay": 60, "expires_in": 60}, "expires_in"),
        ({"delay": 60, "expires_in": 59}, "expires_in"),
        ({"available_at": SOON, "expires_at": SOON}, "expires_at"),
        ({"available_at": SOON, "expires_in": 60}, "expires_in"),
        ({"delay": 7_200, "expires_at": SOON}, "expires_at"),
        ({"expires_in": 0}, "expires_in"),
        ({"expires_at": SOON - timedelta(days=1)}, "expires_at"),
        ({"available_at": SOON - timedelta(days=9), "expires_at": SOON - timedelta(days=8)}, "expires_at"),
    ],
)
def test_an_event_must_be_available_before_it_expires(arguments: dict[str, Any], field: str) -> None:
    """A delay and an expiry that leave no time to run are a mistake of the producer (PUB-2)."""
    assert refused(**arguments).field == field


@pytest.mark.parametrize(
    "arguments",
    [
        {"delay": 0},
        {"delay": timedelta(days=3_650)},
        {"delay": 60, "expires_in": 61},
        {"available_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"available_at": SOON, "expires_at": SOON + timedelta(seconds=1)},
        {"available_at": SOON, "expires_in": 3_700},
        {"delay": 60, "expires_at": SOON},
        {"expires_in": 0.5},
    ],
)
def test_schedules_that_make_sense(arguments: dict[str, Any]) -> None:
    """PUB-2."""
    row = prepare(new(**arguments), SHOP)
    for name in ("delay", "available_at", "expires_in", "expires_at"):
        assert (getattr(row, name) is None) == (name not in arguments)


def test_headers_are_bounded() -> None:
    """Count, size and characters (PUB-3, S9)."""
    assert refused(headers={f"h{n}": "x" for n in range(MAX_HEADERS + 1)}).field == "headers"
    assert refused(headers={"a": "x" * HEADERS_LIMIT}).field == "headers"
    assert refused(headers={"a": "ü" * 8_190}).field == "headers"
    assert refused(headers={"a": 5}).field == "headers.a"
    assert refused(headers={"a": ""}).field == "headers.a"
    assert refused(headers={"a": "x\0"}).field == "headers.a"
    assert refused(headers={"a\r\n": "x"}).field == "headers"
    assert refused(headers={5: "x"}).field == "headers"
    assert refused(headers={"x" * 256: "x"}).field == "headers"
    assert refused(headers=[("a", "b")]).field == "headers"
    for headers in ({f"h{n}": "x" for n in range(MAX_HEADERS)}, {"tracestate": "x" * 512}):
        row = prepare(new(headers=headers), SHOP)
        assert row.headers is not None and json.loads(row.headers) == headers


@pytest.mark.parametrize("name", ["correlation_id", "causation_id"])
def test_headers_with_arguments_of_their_own_are_refused(name: str) -> None:
    """PUB-2."""
    assert refused(headers={name: "c-1"}).remedy == f"use {name}="


def test_an_event_is_frozen_and_keeps_its_payload_out_of_its_repr() -> None:
    """RELIABILITY S7."""
    event = new(payload={"secret": "canary"})
    assert "canary" not in repr(event)
    assert "canary" not in repr(prepare(event, SHOP))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.priority = 0  # type: ignore[misc]


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(NewEvent)]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes() | st.uuids(),
    )
)
def test_whatever_is_passed_is_accepted_or_refused_by_field(arguments: dict[str, Any]) -> None:
    """No argument gets past as another kind of error (PUB-3)."""
    try:
        row = prepare(new(**arguments), SHOP)
    except PublishError as error:
        assert error.field.split(".")[0] in arguments
    else:
        assert {type(value) for value in row} <= {str, type(None)}


# --- options


def test_the_options_are_the_arguments_of_an_event() -> None:
    """Type checkers know the options of publish by `EventOptions`, and the library by `NewEvent` (ENV-1)."""
    arguments = {each.name: each.type for each in dataclasses.fields(NewEvent)}
    assert {"event_type": str, "payload": dict[str, Any] | PayloadObject} | EventOptions.__annotations__ == arguments


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("dealy", "write delay="), ("expire_in", "write expires_in="), ("zzz", "use one of event_id, ")],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(option: str, remedy: str) -> None:
    """ENV-1."""
    error = unknown_option({"key": "k-1", option: 1})
    assert error is not None
    assert (error.field, error.problem) == (option, "is not an option of an event")
    assert error.remedy.startswith(remedy)
    assert unknown_option({"key": 1}) is None


def test_a_typo_in_an_option_of_publish_names_the_option_that_was_meant() -> None:
    """The error is of the field, like every other refusal, and comes before any SQL (ENV-1)."""
    options: dict[str, Any] = {"dealy": 60}
    _, envelope = plain("order.placed", {}, SHOP)
    for call in (
        lambda: Publisher("shop").publish(object(), "order.placed", {}, **options),  # type: ignore[call-overload]
        lambda: NewEvent.from_envelope(envelope, **options),
    ):
        with pytest.raises(FieldError, match="dealy is not an option of an event; write delay="):
            call()
